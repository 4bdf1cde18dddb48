#include "products.h"

#include <cstring>
#include <vector>

namespace mha_ggml {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kGroup = 32;  // weights that share a scale, in ggml and mha

// How ggml stores a group: its scale in binary16; in Q4_1 its smallest weight, too, which is the
// offset; its codes. Those of 4 bits are from 0 to 15, and the first 16 of them are low nibbles.
struct Format {
  ggml_type type;
  uint32_t of_codes;  // MHA_TYPE_*
  size_t bytes;       // of the codes
  bool has_offsets;
};

constexpr Format kFormats[] = {{GGML_TYPE_Q4_0, MHA_TYPE_INT4, kGroup / 2, false},
                               {GGML_TYPE_Q4_1, MHA_TYPE_INT4, kGroup / 2, true},
                               {GGML_TYPE_Q8_0, MHA_TYPE_INT8, kGroup, false}};

// NULL: of another type.
const Format *format_of(const ggml_tensor *t) {
  for (const Format &format : kFormats) {
    if (format.type == t->type) return &format;
  }
  return nullptr;
}

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool is_packed(const ggml_tensor *t) {
  return format_of(t) && t->ne[0] % kGroup == 0 && t->ne[2] == 1 && t->ne[3] == 1 && !t->view_src &&
         ggml_is_contiguous(t);
}

mha_linear_weights weights_of(const ggml_tensor *t, const void *codes, const float *scales,
                              const float *offsets) {
  mha_linear_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.input_dim = t->ne[0], weights.output_dim = t->ne[1];
  weights.w.data = codes, weights.w.scales = scales;
  weights.w.offsets = format_of(t)->has_offsets ? offsets : nullptr;
  weights.layout = MHA_LAYOUT_OUT_IN;
  weights.type = weights.weight_type = format_of(t)->of_codes;
  weights.group_size = kGroup, weights.scale_type = MHA_TYPE_F16;
  weights.arithmetic = MHA_ARITHMETIC_INT8;
  return weights;
}

// Bytes of the packed layer; 0 if mha does not take it.
size_t packed_bytes(const ggml_tensor *t) {
  static const float any = 0;
  const mha_linear_weights weights = weights_of(t, &any, &any, &any);
  size_t bytes;
  return mha_linear_pack_size(&weights, nullptr, &bytes, nullptr) == MHA_OK ? bytes : 0;
}

// Packs blocks where the tensor lies, with the layer object after them.
void pack(ggml_tensor *t, const uint8_t *block) {
  const Format &format = *format_of(t);
  const size_t groups = static_cast<size_t>(t->ne[0] / kGroup * t->ne[1]);
  std::vector<uint8_t> codes(groups * format.bytes);
  std::vector<float> scales(groups), offsets(format.has_offsets ? groups : 0);
  const ggml_to_float_t widen = ggml_get_type_traits(GGML_TYPE_F16)->to_float;
  uint8_t *to = codes.data();
  for (size_t i = 0; i < groups; i++, block += format.bytes, to += format.bytes) {
    widen(block, &scales[i], 1), block += sizeof(uint16_t);
    if (format.has_offsets) widen(block, &offsets[i], 1), block += sizeof(uint16_t);
    if (format.of_codes == MHA_TYPE_INT8) {
      std::memcpy(to, block, kGroup);
      continue;
    }
    for (size_t j = 0; j < kGroup / 4; j++) {
      const uint8_t a = block[2 * j], b = block[2 * j + 1];
      to[j] = static_cast<uint8_t>((a & 15) | b << 4);
      to[kGroup / 4 + j] = static_cast<uint8_t>(a >> 4 | (b & 240));
    }
  }
  const mha_linear_weights weights = weights_of(t, codes.data(), scales.data(), offsets.data());
  const size_t bytes = packed_bytes(t);
  const mha_layer *layer = nullptr;
  if (mha_linear_pack(&weights, nullptr, t->data, bytes, nullptr) == MHA_OK) {
    mha_layer_view(t->data, bytes, nullptr, static_cast<char *>(t->data) + aligned(bytes),
                   mha_layer_view_size(), &layer, nullptr);
  }
  t->extra = const_cast<mha_layer *>(layer);
}

// ---- Buffers of packed weights: those of the CPU, but for what is written into them

const char *name_of_type(ggml_backend_buffer_type_t) { return "MHA_WEIGHTS"; }
size_t alignment(ggml_backend_buffer_type_t) { return kAlignment; }

size_t bytes_of(ggml_backend_buffer_type_t, const ggml_tensor *t) {
  return is_packed(t) ? aligned(packed_bytes(t)) + aligned(mha_layer_view_size()) : ggml_nbytes(t);
}

// A weight comes as a whole. One that could not be packed has no layer, and products with it fail.
void set_tensor(ggml_backend_buffer_t, ggml_tensor *t, const void *data, size_t offset,
                size_t bytes) {
  t->extra = nullptr;
  try {
    if (is_packed(t) && offset == 0 && bytes == ggml_nbytes(t))
      pack(t, static_cast<const uint8_t *>(data));
  } catch (const std::bad_alloc &) {
  }
}

ggml_backend_buffer_t make_buffer(ggml_backend_buffer_type_t type, size_t bytes) {
  const ggml_backend_buffer_t buffer =
      ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes);
  if (buffer) {
    buffer->buft = type;
    buffer->iface.set_tensor = set_tensor;
    buffer->iface.get_tensor = nullptr, buffer->iface.cpy_tensor = nullptr;
  }
  return buffer;
}

}  // namespace

ggml_backend_buffer_type_t type_of_weights(ggml_backend_dev_t device) {
  static ggml_backend_buffer_type type = {
      {name_of_type, make_buffer, alignment, nullptr, bytes_of, nullptr}, device, nullptr};
  return &type;
}

bool Products::supports(const ggml_tensor *op, ggml_backend_buffer_type_t type) {
  const ggml_tensor *const w = op->src[0], *const x = op->src[1];
  return w->buffer && w->buffer->buft == type && is_packed(w) && packed_bytes(w) > 0 &&
         x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float);
}

const char *Products::compute(const ggml_tensor *op, const mha_scheduler *scheduler) {
  const ggml_tensor *const x = op->src[1];
  const mha_layer *const layer = static_cast<const mha_layer *>(op->src[0]->extra);
  if (!layer) return "its weights were not packed, for want of memory";
  mha_linear_args args = {};
  args.struct_size = sizeof args;
  args.scheduler = scheduler;
  // One call where all rows lie at equal distances, otherwise one for each of x's matrices.
  const int64_t matrices = ggml_is_contiguous(x) ? 1 : x->ne[2] * x->ne[3];
  args.rows = x->ne[1] * x->ne[2] * x->ne[3] / std::max<int64_t>(matrices, 1);
  if (args.rows == 0) return nullptr;  // the last layer of a part whose logits nobody wants
  args.x.strides.row = x->ne[1] == 1 ? 0 : static_cast<int64_t>(x->nb[1] / sizeof(float));
  for (int64_t i = 0; i < matrices; i++) {
    args.x.data =
        static_cast<const char *>(x->data) + i % x->ne[2] * x->nb[2] + i / x->ne[2] * x->nb[3];
    args.output.data = static_cast<float *>(op->data) + i * args.rows * op->src[0]->ne[1];
    size_t bytes;
    if (mha_linear_workspace(layer, &args, &bytes, &error_) != MHA_OK ||
        mha_linear(layer, &args, workspace_.get(bytes), bytes, &error_) != MHA_OK) {
      return error_.message;
    }
  }
  return nullptr;
}

}  // namespace mha_ggml
