#include "attention.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace mha_ggml {
namespace {

// src[] of the operation
enum { kQ, kK, kV, kMask, kSinks, kSources };
// Numbers of op_params: floats, and from kPrecision on integers
enum { kScale, kMaxBias, kSoftcap, kPrecision, kMostKeys, kParameters };

uint32_t type_of(ggml_type type) {
  return type == GGML_TYPE_F32    ? MHA_TYPE_F32
         : type == GGML_TYPE_F16  ? MHA_TYPE_F16
         : type == GGML_TYPE_BF16 ? MHA_TYPE_BF16
                                  : 0;
}

// Types that mha lacks are widened to floats first.
bool is_widened(const ggml_tensor *t) { return type_of(t->type) == 0; }

// Distances of a tensor [width, rows, heads, streams] in elements. Of what there is but one of,
// ggml does not say where the next would be; any stride that mha takes will do.
mha_strides strides_of(const ggml_tensor *t) {
  const auto stride = [&](int i) {
    return t->ne[i] == 1 ? t->ne[0] : static_cast<int64_t>(t->nb[i] / t->nb[0]);
  };
  return {stride(3), stride(1), stride(2)};
}

// Whether mha's strides can say how it lies. Blocks of widened types are read row by row.
bool can_read(const ggml_tensor *t) {
  const ggml_type_traits *const traits = ggml_get_type_traits(t->type);
  if (t->nb[0] != traits->type_size || t->ne[0] % traits->blck_size != 0) return false;
  if (is_widened(t)) return traits->is_quantized && traits->to_float;
  return std::all_of(t->nb + 1, t->nb + 4, [&](size_t bytes) { return bytes % t->nb[0] == 0; });
}

bool can_read_mask(const ggml_tensor *mask, const ggml_tensor *q, const ggml_tensor *k) {
  const auto is_one_or = [&](int i, int64_t extent) {
    return mask->ne[i] == 1 || mask->ne[i] == extent;
  };
  return mask->type == GGML_TYPE_F16 && ggml_is_contiguous(mask) && mask->ne[0] == k->ne[1] &&
         mask->ne[1] >= q->ne[1] && is_one_or(2, q->ne[2]) && is_one_or(3, q->ne[3]);
}

// The operation without its mask. Arrays that are widened are as they will be: contiguous.
struct Arguments {
  mha_attention_args args = {};
  mha_score_options score = {};

  explicit Arguments(const ggml_tensor *op) {
    const ggml_tensor *const q = op->src[kQ], *const k = op->src[kK], *const v = op->src[kV];
    float parameters[kPrecision];
    std::memcpy(parameters, op->op_params, sizeof parameters);
    args.struct_size = sizeof args;
    args.num_heads = q->ne[2];
    args.num_kv_heads = k->ne[2];
    args.head_dim = q->ne[0];
    args.head_dim_v = v->ne[0];
    args.scale = parameters[kScale];
    args.flags = args.scale == 0 ? MHA_EQUAL_SCORES : 0;
    args.batch = q->ne[3];
    args.n_q = q->ne[1];
    args.n_kv = k->ne[1];
    args.q = input(q), args.k = input(k), args.v = input(v);
    args.output.data = op->data;
    args.output.strides = {op->ne[0] * op->ne[1] * op->ne[2], op->ne[0] * op->ne[1], op->ne[0]};
    score.struct_size = sizeof score;
    score.softcap = parameters[kSoftcap];
    score.sinks = op->src[kSinks] ? static_cast<const float *>(op->src[kSinks]->data) : nullptr;
    args.score = score.softcap != 0 || op->src[kSinks] ? &score : nullptr;
  }
  Arguments(const Arguments &) = delete;

 private:
  static mha_input input(const ggml_tensor *t) {
    if (!is_widened(t)) {
      return {t->data, type_of(t->type), 0, strides_of(t), nullptr};
    }
    const int64_t width = t->ne[0], row = t->ne[2] * width;
    return {nullptr, MHA_TYPE_F32, 0, {t->ne[1] * row, row, width}, nullptr};
  }
};

size_t bytes_of_widened(const ggml_tensor *t) {
  return is_widened(t)
             ? static_cast<size_t>(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]) * sizeof(float)
             : 0;
}

// Widens the first rows of all streams.
void widen(const ggml_tensor *t, int64_t rows, float *to, const mha_scheduler *scheduler) {
  struct Context {
    const ggml_tensor *t;
    int64_t rows, blocks;
    float *to;
    ggml_to_float_t to_float;
  };
  constexpr int64_t kRowsOfTask = 64;
  const Context context{t, rows, (rows + kRowsOfTask - 1) / kRowsOfTask, to,
                        ggml_get_type_traits(t->type)->to_float};
  const auto task = [](void *data, uint32_t index) {
    const Context &c = *static_cast<const Context *>(data);
    const int64_t stream = index / c.blocks, first = index % c.blocks * kRowsOfTask,
                  end = std::min(first + kRowsOfTask, c.rows);
    const ggml_tensor &t = *c.t;
    for (int64_t row = first; row < end; row++) {
      for (int64_t head = 0; head < t.ne[2]; head++) {
        const char *const from =
            static_cast<const char *>(t.data) + stream * t.nb[3] + head * t.nb[2] + row * t.nb[1];
        c.to_float(from, c.to + ((stream * t.ne[1] + row) * t.ne[2] + head) * t.ne[0], t.ne[0]);
      }
    }
  };
  scheduler->parallel_for(scheduler->context, static_cast<uint32_t>(t->ne[3] * context.blocks),
                          task, const_cast<Context *>(&context));
}

}  // namespace

unsigned char *Memory::get(size_t bytes) {
  constexpr size_t kAlignment = 64;
  if (bytes > bytes_) {
    data_.reset();
    data_.reset(new (std::nothrow) unsigned char[bytes + kAlignment]);
    bytes_ = data_ ? bytes : 0;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(data_.get());
  return data_ ? data_.get() + (kAlignment - address % kAlignment) % kAlignment : nullptr;
}

bool Attention::supports(const ggml_tensor *op) {
  if (op->op != GGML_OP_FLASH_ATTN_EXT) return false;
  const ggml_tensor *const q = op->src[kQ], *const k = op->src[kK], *const v = op->src[kV],
                           *const mask = op->src[kMask], *const sinks = op->src[kSinks];
  const auto is_none = [](const void *source) { return !source; };
  const auto is_zero = [](int32_t parameter) { return parameter == 0; };
  const int32_t precision = op->op_params[kPrecision];
  if (!std::all_of(op->src + kSources, op->src + GGML_MAX_SRC, is_none) ||
      !std::all_of(op->op_params + kParameters, std::end(op->op_params), is_zero) ||
      op->op_params[kMaxBias] != 0 || (precision != 0 && precision != GGML_PREC_F32)) {
    return false;  // ALiBi, and what later versions of ggml may add
  }
  if (q->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32 || !ggml_is_contiguous(op) ||
      !can_read(q) || !can_read(k) || !can_read(v) || (mask && !can_read_mask(mask, q, k)) ||
      (sinks && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks)))) {
    return false;
  }
  if (k->ne[0] != q->ne[0] || v->ne[1] != k->ne[1] || v->ne[2] != k->ne[2] ||
      k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3]) {
    return false;
  }
  const Arguments arguments(op);
  size_t bytes;
  mha_error error;
  return mha_attention_workspace(&arguments.args, &bytes, &error) == MHA_OK;
}

void Attention::reserve(const ggml_tensor *op, const mha_scheduler *scheduler) {
  Arguments arguments(op);
  arguments.args.scheduler = scheduler;
  size_t bytes;
  if (mha_attention_workspace(&arguments.args, &bytes, nullptr) == MHA_OK) workspace_.get(bytes);
  widened_.get(bytes_of_widened(op->src[kK]) + bytes_of_widened(op->src[kV]));
}

const char *Attention::compute(const ggml_tensor *op, const mha_scheduler *scheduler) {
  const ggml_tensor *const q = op->src[kQ], *const k = op->src[kK], *const v = op->src[kV],
                           *const mask = op->src[kMask];
  AdditiveMask additive;
  if (mask) {
    const mha_strides strides = strides_of(mask);
    additive = {static_cast<const uint16_t *>(mask->data), strides.row,
                mask->ne[2] == 1 ? 0 : strides.head, mask->ne[3] == 1 ? 0 : strides.batch};
  }
  calls_.read(additive, q->ne[3], q->ne[2], q->ne[1], k->ne[1], scheduler);

  Arguments arguments(op);
  arguments.args.scheduler = scheduler;
  const size_t k_bytes = bytes_of_widened(k), bytes_in_all = k_bytes + bytes_of_widened(v);
  if (bytes_in_all > 0) {
    unsigned char *const memory = widened_.get(bytes_in_all);
    if (!memory) return "there is no memory for keys and values as floats";
    const auto place = [&](const ggml_tensor *t, unsigned char *at, mha_input &input) {
      if (is_widened(t)) {
        widen(t, calls_.end_of_keys(), reinterpret_cast<float *>(at), scheduler);
        input.data = at;
      }
    };
    place(k, memory, arguments.args.k);
    place(v, memory + k_bytes, arguments.args.v);
  }
  for (size_t i = 0; i < calls_.count(); i++) {
    mha_attention_args args = arguments.args;
    calls_.apply(i, args);
    args.flags |= arguments.args.flags;
    size_t bytes;
    if (mha_attention_workspace(&args, &bytes, &error_) != MHA_OK) return error_.message;
    unsigned char *const workspace = workspace_.get(std::max<size_t>(bytes, 1));
    if (!workspace) return "there is no memory for the workspace";
    if (mha_attention(&args, workspace, bytes, &error_) != MHA_OK) return error_.message;
  }
  return nullptr;
}

}  // namespace mha_ggml
