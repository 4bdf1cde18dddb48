#include "attention.h"

#include <algorithm>
#include <cstring>

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

size_t floats_when_widened(const ggml_tensor *t) {
  return is_widened(t) ? static_cast<size_t>(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]) : 0;
}

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

// Arrays that are widened are described as they will be: contiguous.
mha_input input_of(const ggml_tensor *t) {
  if (!is_widened(t)) return {t->data, type_of(t->type), 0, strides_of(t), nullptr};
  const int64_t width = t->ne[0], row = t->ne[2] * width;
  return {nullptr, MHA_TYPE_F32, 0, {t->ne[1] * row, row, width}, nullptr};
}

// The operation without its mask
struct Arguments {
  mha_attention_args args = {};
  mha_score_options score = {};

  explicit Arguments(const ggml_tensor *op) {
    const ggml_tensor *const q = op->src[kQ], *const k = op->src[kK], *const v = op->src[kV];
    float parameters[kPrecision];
    std::memcpy(parameters, op->op_params, sizeof parameters);
    args.struct_size = sizeof args;
    args.num_heads = q->ne[2], args.num_kv_heads = k->ne[2];
    args.head_dim = q->ne[0], args.head_dim_v = v->ne[0];
    args.scale = parameters[kScale];
    args.call.flags = args.scale == 0 ? MHA_EQUAL_SCORES : 0;
    args.call.batch = q->ne[3], args.call.n_q = q->ne[1], args.call.n_kv = k->ne[1];
    args.q = input_of(q), args.k = input_of(k), args.v = input_of(v);
    args.output.data = op->data;
    args.output.strides = {op->ne[0] * op->ne[1] * op->ne[2], op->ne[0] * op->ne[1], op->ne[0]};
    score.struct_size = sizeof score;
    score.softcap = parameters[kSoftcap];
    score.sinks = op->src[kSinks] ? static_cast<const float *>(op->src[kSinks]->data) : nullptr;
    args.call.score = score.softcap != 0 || score.sinks ? &score : nullptr;
  }
  Arguments(const Arguments &) = delete;
};

// Widens the first rows of all streams.
void widen(const ggml_tensor *t, int64_t rows, float *to, const mha_scheduler *scheduler) {
  const ggml_to_float_t to_float = ggml_get_type_traits(t->type)->to_float;
  const int64_t count = t->ne[3] * rows, heads = t->ne[2], width = t->ne[0];
  in_parts(scheduler, count, count * heads * width, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const int64_t stream = i / rows, row = i % rows;
      const char *from = static_cast<const char *>(t->data) + stream * t->nb[3] + row * t->nb[1];
      float *at = to + (stream * t->ne[1] + row) * heads * width;
      for (int64_t head = 0; head < heads; head++, from += t->nb[2], at += width) {
        to_float(from, at, width);
      }
    }
  });
}

}  // namespace

unsigned char *Memory::get(size_t bytes) {
  constexpr size_t kAlignment = 64;
  if (!data_ || bytes > bytes_) {
    data_.reset();
    data_.reset(new unsigned char[bytes + kAlignment]);
    bytes_ = bytes;
  }
  return data_.get() + (-reinterpret_cast<uintptr_t>(data_.get()) % kAlignment);
}

bool Attention::supports(const ggml_tensor *op) {
  const ggml_tensor *const q = op->src[kQ], *const k = op->src[kK], *const v = op->src[kV],
                           *const mask = op->src[kMask];
  const auto is_set = [](auto word) { return word != 0; };
  const int32_t precision = op->op_params[kPrecision];
  if (std::any_of(op->src + kSources, std::end(op->src), is_set) ||
      std::any_of(op->op_params + kParameters, std::end(op->op_params), is_set) ||
      op->op_params[kMaxBias] != 0 || (precision != 0 && precision != GGML_PREC_F32)) {
    return false;  // ALiBi, and what later versions of ggml may add
  }
  if (q->type != GGML_TYPE_F32 || !can_read(q) || !can_read(k) || !can_read(v) ||
      v->ne[1] != k->ne[1] || v->ne[2] != k->ne[2] || k->ne[3] != q->ne[3] ||
      v->ne[3] != q->ne[3]) {
    return false;
  }
  if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[0] != k->ne[1] || mask->ne[1] < q->ne[1] ||
               (mask->ne[2] != 1 && mask->ne[2] != q->ne[2]) ||
               (mask->ne[3] != 1 && mask->ne[3] != q->ne[3]))) {
    return false;
  }
  const Arguments arguments(op);
  size_t bytes;
  return mha_attention_workspace(&arguments.args, &bytes, nullptr) == MHA_OK;
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
  calls_.read(additive, q->ne[3], q->ne[1], k->ne[1], scheduler);

  Arguments arguments(op);
  arguments.args.call.scheduler = scheduler;
  const size_t k_floats = floats_when_widened(k), v_floats = floats_when_widened(v);
  float *const floats =
      reinterpret_cast<float *>(widened_.get((k_floats + v_floats) * sizeof(float)));
  if (k_floats > 0) {
    widen(k, calls_.end_of_keys(), floats, scheduler);
    arguments.args.k.data = floats;
  }
  if (v_floats > 0) {
    widen(v, calls_.end_of_keys(), floats + k_floats, scheduler);
    arguments.args.v.data = floats + k_floats;
  }
  for (size_t i = 0; i < calls_.count(); i++) {
    mha_attention_args args = arguments.args;
    calls_.apply(i, args);
    size_t bytes;
    if (mha_attention_workspace(&args, &bytes, &error_) != MHA_OK ||
        mha_attention(&args, workspace_.get(bytes), bytes, &error_) != MHA_OK) {
      return error_.message;
    }
  }
  return nullptr;
}

}  // namespace mha_ggml
