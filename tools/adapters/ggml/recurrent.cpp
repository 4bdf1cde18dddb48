#include "recurrent.h"

#include <algorithm>
#include <cstring>

namespace mha_ggml {
namespace {

// src[] of the operation. v is [sequences, rows, heads, width], in which order ggml counts from the
// end; q and k may have fewer heads, decay and beta have other widths. The states are transposed.
enum { kQ, kK, kV, kDecay, kBeta, kState, kSources };

// The result is the output, as v is shaped, and behind it the states after all rows, then those
// before the last row, before the last two rows and so on.
int64_t number_of_states(const ggml_tensor *op) { return op->op_params[0]; }

// Head h of v has head h % (heads of k) of q and k. For mha_recurrent_attention, these are heads of
// several sequences that share q and k.
mha_recurrent_args arguments(const ggml_tensor *op, int64_t sequence, int64_t begin, int64_t rows) {
  const int64_t heads = op->src[kV]->ne[1], key_heads = op->src[kK]->ne[1];
  const auto input = [&](const ggml_tensor *t, bool is_shared) {
    const int64_t row = static_cast<int64_t>(t->nb[2] / sizeof(float)),
                  head = t->ne[1] == 1 ? t->ne[0] : static_cast<int64_t>(t->nb[1] / sizeof(float));
    return mha_input{static_cast<const char *>(t->data) + sequence * t->nb[3] + begin * t->nb[2],
                     MHA_TYPE_F32,
                     0,
                     {is_shared ? MHA_BROADCAST : key_heads * head, row, head},
                     nullptr};
  };
  mha_recurrent_args args = {};
  args.struct_size = sizeof args;
  args.num_v_heads = key_heads;
  args.head_dim = op->src[kV]->ne[0];
  args.decay_dim = op->src[kDecay]->ne[0];
  args.batch = heads / key_heads;
  args.rows = rows;
  args.q = input(op->src[kQ], true), args.k = input(op->src[kK], true);
  args.v = input(op->src[kV], false);
  args.decay = input(op->src[kDecay], false), args.beta = input(op->src[kBeta], false);
  const int64_t row = heads * args.head_dim, first = sequence * op->src[kV]->ne[2] + begin;
  args.output.data = static_cast<float *>(op->data) + first * row;
  args.output.strides = {key_heads * args.head_dim, row, args.head_dim};
  return args;
}

// Transposes states, which may stay where they are.
void transpose(const float *from, float *to, int64_t count, int64_t width,
               const mha_scheduler *scheduler) {
  auto transpose_one = [=](uint32_t index) {
    constexpr int64_t kTile = 16;
    const float *const a = from + index * width * width;
    float *const b = to + index * width * width;
    for (int64_t top = 0; top < width; top += kTile) {
      for (int64_t left = 0; left <= top; left += kTile) {
        for (int64_t i = top; i < std::min(top + kTile, width); i++) {
          for (int64_t j = left; j < std::min(left + kTile, i + 1); j++) {
            const float below = a[i * width + j], above = a[j * width + i];
            b[i * width + j] = above, b[j * width + i] = below;
          }
        }
      }
    }
  };
  using Task = decltype(transpose_one);
  const auto run = [](void *task, uint32_t i) { (*static_cast<Task *>(task))(i); };
  scheduler->parallel_for(scheduler->context, static_cast<uint32_t>(count), run, &transpose_one);
}

}  // namespace

bool Recurrent::supports(const ggml_tensor *op) {
  if (op->op != GGML_OP_GATED_DELTA_NET) return false;
  const auto is_none = [](const void *source) { return !source; };
  const auto is_zero = [](int32_t parameter) { return parameter == 0; };
  if (std::any_of(op->src, op->src + kSources, is_none) ||
      !std::all_of(op->src + kSources, std::end(op->src), is_none) ||
      !std::all_of(op->op_params + 1, std::end(op->op_params), is_zero)) {
    return false;  // what later versions of ggml may add
  }
  const int64_t *const v = op->src[kV]->ne;
  const int64_t width = v[0], heads = v[1], rows = v[2], key_heads = op->src[kK]->ne[1];
  const int64_t shapes[kSources][4] = {
      {width, key_heads, rows, v[3]}, {width, key_heads, rows, v[3]},
      {width, heads, rows, v[3]},     {op->src[kDecay]->ne[0], heads, rows, v[3]},
      {1, heads, rows, v[3]},         {width, width, heads, v[3]}};
  for (int i = 0; i < kSources; i++) {
    const ggml_tensor *const t = op->src[i];
    if (t->type != GGML_TYPE_F32 || std::memcmp(t->ne, shapes[i], sizeof shapes[i]) != 0 ||
        t->nb[0] != sizeof(float) || (t->nb[1] | t->nb[2] | t->nb[3]) % sizeof(float) != 0 ||
        (i >= kDecay && !ggml_is_contiguous(t))) {
      return false;
    }
  }
  if (heads % key_heads != 0 || number_of_states(op) < 1 ||
      rows < kFewestRows * number_of_states(op))
    return false;
  mha_recurrent_args args = arguments(op, 0, 0, rows);
  args.decay.data = args.beta.data = op;  // NULL, as long as nothing is allocated, would mean none
  size_t bytes;
  return mha_recurrent_attention_workspace(&args, &bytes, nullptr) == MHA_OK;
}

const char *Recurrent::compute(const ggml_tensor *op, const mha_scheduler *scheduler) {
  const ggml_tensor &v = *op->src[kV], &given = *op->src[kState];
  const int64_t width = v.ne[0], rows = v.ne[2], sequences = v.ne[3],
                state = given.ne[2] * width * width, states = sequences * state,
                count = sequences * given.ne[2], oldest = number_of_states(op) - 1;
  float *const after = static_cast<float *>(op->data) + rows * count * width;
  transpose(static_cast<const float *>(given.data), after + oldest * states, count, width,
            scheduler);
  for (int64_t sequence = 0; sequence < sequences; sequence++) {
    for (int64_t begin = 0, left = oldest; left >= 0; begin = rows - left, left--) {
      mha_recurrent_args args = arguments(op, sequence, begin, rows - left - begin);
      args.state_out = after + left * states + sequence * state;
      args.state = args.state_out + (begin == 0 ? 0 : states);
      args.scheduler = scheduler;
      size_t bytes;
      if (mha_recurrent_attention_workspace(&args, &bytes, &error_) != MHA_OK ||
          mha_recurrent_attention(&args, workspace_.get(bytes), bytes, &error_) != MHA_OK) {
        return error_.message;
      }
    }
  }
  transpose(after, after, (oldest + 1) * count, width, scheduler);
  return nullptr;
}

}  // namespace mha_ggml
