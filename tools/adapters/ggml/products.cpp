#include "products.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace mha_ggml {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kGroup = 32;  // weights that share a scale, in ggml and mha

// A group in ggml: its scale in binary16, then 32 codes + 8, of which the first 16 are low nibbles.
struct Block {
  uint16_t scale;
  uint8_t codes[kGroup / 2];
};

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool is_packed(const ggml_tensor *t) {
  return t->type == GGML_TYPE_Q4_0 && t->ne[0] % kGroup == 0 && t->ne[2] == 1 && t->ne[3] == 1 &&
         !t->view_src && ggml_is_contiguous(t);
}

mha_linear_weights weights_of(const ggml_tensor *t, const void *codes, const float *scales) {
  mha_linear_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.input_dim = t->ne[0], weights.output_dim = t->ne[1];
  weights.w.data = codes, weights.w.scales = scales;
  weights.layout = MHA_LAYOUT_OUT_IN;
  weights.type = weights.weight_type = MHA_TYPE_INT4;
  weights.arithmetic = MHA_ARITHMETIC_INT8;
  return weights;
}

// Bytes of the packed layer; 0 if mha does not take it.
size_t packed_bytes(const ggml_tensor *t) {
  static const float any = 0;
  const mha_linear_weights weights = weights_of(t, &any, &any);
  size_t bytes;
  return mha_linear_pack_size(&weights, nullptr, &bytes, nullptr) == MHA_OK ? bytes : 0;
}

// Packs blocks where the tensor lies, with the layer object behind.
bool pack(ggml_tensor *t, const Block *blocks) {
  const size_t groups = static_cast<size_t>(t->ne[0] / kGroup * t->ne[1]);
  std::vector<uint8_t> codes(groups * kGroup / 2);
  std::vector<float> scales(groups);
  const ggml_to_float_t widen = ggml_get_type_traits(GGML_TYPE_F16)->to_float;
  for (size_t i = 0; i < groups; i++) {
    widen(&blocks[i].scale, &scales[i], 1);
    for (size_t j = 0; j < kGroup / 4; j++) {
      const uint8_t a = blocks[i].codes[2 * j], b = blocks[i].codes[2 * j + 1];
      codes[i * kGroup / 2 + j] = static_cast<uint8_t>((a & 15) | b << 4);
      codes[i * kGroup / 2 + kGroup / 4 + j] = static_cast<uint8_t>(a >> 4 | (b & 240));
    }
  }
  const mha_linear_weights weights = weights_of(t, codes.data(), scales.data());
  const size_t bytes = packed_bytes(t);
  const mha_layer *layer = nullptr;
  const bool is_done =
      mha_linear_pack(&weights, nullptr, t->data, bytes, nullptr) == MHA_OK &&
      mha_layer_view(t->data, bytes, nullptr, static_cast<char *>(t->data) + aligned(bytes),
                     mha_layer_view_size(), &layer, nullptr) == MHA_OK;
  t->extra = const_cast<mha_layer *>(layer);
  return is_done;
}

// ---- Buffers of packed weights

const char *name_of_type(ggml_backend_buffer_type_t) { return "MHA_Q4_0"; }
size_t alignment(ggml_backend_buffer_type_t) { return kAlignment; }

size_t bytes_of(ggml_backend_buffer_type_t, const ggml_tensor *t) {
  return is_packed(t) ? aligned(packed_bytes(t)) + aligned(mha_layer_view_size()) : ggml_nbytes(t);
}

void free_buffer(ggml_backend_buffer_t buffer) {
  ::operator delete(buffer->context, std::align_val_t(kAlignment));
}

void *base_of(ggml_backend_buffer_t buffer) { return buffer->context; }

// A weight comes as a whole. One that could not be packed has no layer, and products with it fail.
void set_tensor(ggml_backend_buffer_t, ggml_tensor *t, const void *data, size_t offset,
                size_t bytes) {
  if (!is_packed(t)) {
    std::memcpy(static_cast<char *>(t->data) + offset, data, bytes);
    return;
  }
  t->extra = nullptr;
  try {
    if (offset == 0 && bytes == ggml_nbytes(t)) pack(t, static_cast<const Block *>(data));
  } catch (const std::bad_alloc &) {
  }
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor *t, void *data, size_t offset,
                size_t bytes) {
  std::memcpy(data, static_cast<const char *>(t->data) + offset, bytes);  // packed, if it is
}

void fill_tensor(ggml_backend_buffer_t, ggml_tensor *t, uint8_t value, size_t offset,
                 size_t bytes) {
  std::memset(static_cast<char *>(t->data) + offset, value, bytes);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
  std::memset(buffer->context, value, buffer->size);
}

ggml_backend_buffer_t make_buffer(ggml_backend_buffer_type_t type, size_t bytes) {
  void *const data =
      ::operator new(std::max(bytes, kAlignment), std::align_val_t(kAlignment), std::nothrow);
  ggml_backend_buffer_i table = {};
  table.free_buffer = free_buffer, table.get_base = base_of, table.clear = clear;
  table.memset_tensor = fill_tensor, table.set_tensor = set_tensor, table.get_tensor = get_tensor;
  return data ? ggml_backend_buffer_init(type, table, data, bytes) : nullptr;
}

}  // namespace

ggml_backend_buffer_type_t type_of_weights(ggml_backend_dev_t device) {
  static ggml_backend_buffer_type type = {
      {name_of_type, make_buffer, alignment, nullptr, bytes_of, nullptr}, device, nullptr};
  return &type;
}

bool Products::supports(const ggml_tensor *op, ggml_backend_buffer_type_t type) {
  const ggml_tensor *const w = op->src[0], *const x = op->src[1];
  return op->op == GGML_OP_MUL_MAT && w->buffer && w->buffer->buft == type && is_packed(w) &&
         x->type == GGML_TYPE_F32 && packed_bytes(w) > 0;
}

const char *Products::compute(const ggml_tensor *op, const mha_scheduler *scheduler) {
  const ggml_tensor *const x = op->src[1];
  const mha_layer *const layer = static_cast<const mha_layer *>(op->src[0]->extra);
  if (!layer) return "its weights were not packed, for want of memory";
  mha_linear_args args = {};
  args.struct_size = sizeof args;
  args.rows = x->ne[1] * x->ne[2] * x->ne[3];
  if (args.rows == 0) return nullptr;  // the last layer of a part whose logits nobody wants
  args.x.data = x->data;
  args.output.data = op->data;
  args.scheduler = scheduler;
  if (x->ne[2] == 1 && x->ne[3] == 1 && x->nb[0] == sizeof(float) &&
      x->nb[1] >= x->ne[0] * sizeof(float)) {
    args.x.strides.row = x->ne[1] == 1 ? 0 : static_cast<int64_t>(x->nb[1] / sizeof(float));
  } else if (!ggml_is_contiguous(x)) {
    float *to = reinterpret_cast<float *>(
        rows_.get(static_cast<size_t>(args.rows * x->ne[0]) * sizeof(float)));
    args.x.data = to;
    for (int64_t i = 0; to && i < args.rows; i++) {
      const char *const row = static_cast<const char *>(x->data) + i % x->ne[1] * x->nb[1] +
                              i / x->ne[1] % x->ne[2] * x->nb[2] +
                              i / (x->ne[1] * x->ne[2]) * x->nb[3];
      for (int64_t j = 0; j < x->ne[0]; j++) std::memcpy(to++, row + j * x->nb[0], sizeof(float));
    }
  }
  size_t bytes;
  if (mha_linear_workspace(layer, &args, &bytes, &error_) != MHA_OK) return error_.message;
  unsigned char *const workspace = workspace_.get(std::max<size_t>(bytes, 1));
  if (!workspace || !args.x.data) return "there is no memory for the workspace";
  return mha_linear(layer, &args, workspace, bytes, &error_) == MHA_OK ? nullptr : error_.message;
}

}  // namespace mha_ggml
