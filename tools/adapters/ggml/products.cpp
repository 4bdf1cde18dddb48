#include "products.h"

#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "src/objects/layer.h"

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
                               {GGML_TYPE_Q8_0, MHA_TYPE_INT8, kGroup, false},
                               {GGML_TYPE_BF16, MHA_TYPE_BF16, 0, false}};

bool is_bf16(const ggml_tensor *t) { return t->type == GGML_TYPE_BF16; }

// NULL: of another type, or of bf16 without instructions for it. ggml's own products, which round
// inputs as mha's do, then cost nothing more, and read mapped files.
const Format *format_of(const ggml_tensor *t) {
  static const bool has_bf16 = mha_instruction_sets() >> MHA_INSTRUCTION_SET_AVX512_BF16 & 1;
  for (const Format &format : kFormats) {
    if (format.type == t->type && (has_bf16 || !is_bf16(t))) return &format;
  }
  return nullptr;
}

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

mha_linear_weights weights_of(const ggml_tensor *t, const void *codes, const float *scales,
                              const float *offsets) {
  mha_linear_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.input_dim = t->ne[0], weights.output_dim = t->ne[1];
  weights.w.data = codes;
  weights.layout = MHA_LAYOUT_OUT_IN;
  weights.type = weights.format.type = format_of(t)->of_codes;
  weights.format.arithmetic = MHA_ARITHMETIC_BF16;
  if (is_bf16(t)) return weights;
  weights.w.scales = scales;
  weights.w.offsets = format_of(t)->has_offsets ? offsets : nullptr;
  weights.format.group_size = kGroup, weights.format.scale_type = MHA_TYPE_F16;
  weights.format.arithmetic = MHA_ARITHMETIC_INT8;
  return weights;
}

// Bytes of the packed layer; 0 if mha does not take it.
size_t packed_bytes(const ggml_tensor *t) {
  static const float any = 0;
  const mha_linear_weights weights = weights_of(t, &any, &any, &any);
  size_t bytes;
  return mha_linear_pack_size(&weights, nullptr, &bytes, nullptr) == MHA_OK ? bytes : 0;
}

bool is_packed(const ggml_tensor *t) {
  return format_of(t) && t->ne[0] % kGroup == 0 && t->ne[2] == 1 && t->ne[3] == 1 && !t->view_src &&
         ggml_is_contiguous(t) && packed_bytes(t) > 0;
}

// NULL: nothing was packed yet, or the buffer was cleared; the bytes of the tensor are ggml's then.
const mha_layer *layer_of(const ggml_tensor *t) {
  const mha_layer *const layer = static_cast<const mha_layer *>(t->extra);
  return layer && mha::is_layer(layer) ? layer : nullptr;
}

// Packs blocks where the tensor lies, with the layer object after them.
void pack(ggml_tensor *t, const uint8_t *block) {
  const Format &format = *format_of(t);
  const void *const numbers = block;
  const size_t groups = is_bf16(t) ? 0 : static_cast<size_t>(t->ne[0] / kGroup * t->ne[1]);
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
  const mha_linear_weights weights =
      weights_of(t, is_bf16(t) ? numbers : codes.data(), scales.data(), offsets.data());
  const size_t bytes = packed_bytes(t);
  const mha_layer *layer = nullptr;
  if (mha_linear_pack(&weights, nullptr, t->data, bytes, nullptr) == MHA_OK) {
    mha_layer_view(t->data, bytes, nullptr, static_cast<char *>(t->data) + aligned(bytes),
                   mha_layer_view_size(), &layer, nullptr);
  }
  t->extra = const_cast<mha_layer *>(layer);
}

// Writes ggml's block i: what pack() read, but that every NaN of a scale or of bf16 is the same
// one, and that bf16 below 2^-50 are 0. pack.cpp of mha describes the layout: groups of 48 columns
// follow each other, with four terms of a column side by side in codes of int8 (plus 128), eight in
// those of int4, and two of bf16.
void unpack(const ggml_tensor *t, const mha_layer *layer, size_t i, uint8_t *block) {
  const Format &format = *format_of(t);
  if (is_bf16(t)) {
    const size_t inputs = static_cast<size_t>(t->ne[0]), k = i % inputs, output = i / inputs,
                 column = output % mha::panel_columns,
                 pair = (output - column) * inputs / 2 + k / 2 * mha::panel_columns + column;
    std::memcpy(block,
                static_cast<const uint16_t *>(layer->weights(mha::matrix_o)) + 2 * pair + k % 2, 2);
    return;
  }
  const size_t groups = static_cast<size_t>(t->ne[0] / kGroup), output = i / groups,
               column = output % mha::panel_columns,
               first = (output / mha::panel_columns * groups + i % groups) * mha::panel_columns;
  for (const void *const halves : {layer->scales(mha::matrix_o), layer->offsets(mha::matrix_o)}) {
    if (!halves) continue;
    std::memcpy(block, static_cast<const uint16_t *>(halves) + first + column, sizeof(uint16_t));
    block += sizeof(uint16_t);
  }
  const uint8_t *four = static_cast<const uint8_t *>(layer->weights(mha::matrix_o)) +
                        first * format.bytes + 4 * column;
  std::memset(block, 0, format.bytes);
  for (size_t k = 0; k < format.bytes; k += 4, four += 4 * mha::panel_columns) {
    for (size_t j = 0; j < 4; j++) {
      if (format.of_codes == MHA_TYPE_INT8) {
        block[k + j] = four[j] ^ 128;
      } else {  // of terms 2 * k + j and 2 * k + j + 4
        uint8_t *const to = block + 2 * k % 16 + j;
        const size_t shift = k / 8 * 4;
        to[0] = static_cast<uint8_t>(to[0] | (four[j] & 15) << shift);
        to[4] = static_cast<uint8_t>(to[4] | four[j] >> 4 << shift);
      }
    }
  }
}

// ---- Buffers of weights. Each is one of the CPU, which is its context, and to which the tensors
// in it belong that are not packed. The rest lie there packed, and are read and written as if they
// lay as in ggml; views of them belong to this buffer, too.

const char *name_of_type(ggml_backend_buffer_type_t) { return "MHA_WEIGHTS"; }
size_t alignment(ggml_backend_buffer_type_t) { return kAlignment; }

size_t bytes_of(ggml_backend_buffer_type_t, const ggml_tensor *t) {
  return is_packed(t) ? aligned(packed_bytes(t)) + aligned(mha_layer_view_size()) : ggml_nbytes(t);
}

ggml_backend_buffer_t memory_of(ggml_backend_buffer_t buffer) {
  return static_cast<ggml_backend_buffer_t>(buffer->context);
}

void free_buffer(ggml_backend_buffer_t buffer) { ggml_backend_buffer_free(memory_of(buffer)); }

void *base_of(ggml_backend_buffer_t buffer) {
  return memory_of(buffer)->iface.get_base(memory_of(buffer));
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
  memory_of(buffer)->iface.clear(memory_of(buffer), value);
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor *t) {
  t->extra = nullptr;
  if (!t->view_src && !is_packed(t)) t->buffer = memory_of(buffer);
  return GGML_STATUS_SUCCESS;
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor *t, void *data, size_t offset,
                size_t bytes) {
  const ggml_tensor *const w = t->view_src ? t->view_src : t;
  const mha_layer *const layer = layer_of(w);
  offset += t->view_offs;
  if (!layer) {
    std::memcpy(data, static_cast<const char *>(w->data) + offset, bytes);
    return;
  }
  for (char *to = static_cast<char *>(data), *const end = to + bytes; to < end;) {
    uint8_t block[sizeof(float) + kGroup];
    unpack(w, layer, offset / w->nb[0], block);
    const size_t skipped = offset % w->nb[0],
                 count = std::min(w->nb[0] - skipped, static_cast<size_t>(end - to));
    std::memcpy(to, block + skipped, count);
    to += count, offset += count;
  }
}

// Writes data, or a value, and packs the whole again. Without the memory for that, the tensor has
// no layer, and products with it fail.
void write(ggml_tensor *t, const void *data, uint8_t value, size_t offset, size_t bytes) {
  ggml_tensor *const w = t->view_src ? t->view_src : t;
  offset += t->view_offs;
  std::vector<uint8_t> whole;
  try {
    if (!data || bytes < ggml_nbytes(w)) {
      whole.resize(ggml_nbytes(w));
      get_tensor(nullptr, w, whole.data(), 0, whole.size());
      data ? std::memcpy(&whole[offset], data, bytes) : std::memset(&whole[offset], value, bytes);
      data = whole.data(), offset = 0, bytes = whole.size();
    }
    pack(w, static_cast<const uint8_t *>(data));
  } catch (const std::bad_alloc &) {
    w->extra = nullptr;
  }
  if (!w->extra && data) std::memcpy(static_cast<char *>(w->data) + offset, data, bytes);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor *t, const void *data, size_t offset,
                size_t bytes) {
  write(t, data, 0, offset, bytes);
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor *t, uint8_t value, size_t offset,
                   size_t bytes) {
  write(t, nullptr, value, offset, bytes);
}

// A mapped file, which llama.cpp reads otherwise, lies in huge pages of Linux's cache; memory does
// only on advice, and a product with one row reads all of it.
void advise_huge_pages(void *base, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base), end = begin + bytes,
                  first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#endif
}

ggml_backend_buffer_t make_buffer(ggml_backend_buffer_type_t type, size_t bytes) {
  const ggml_backend_buffer_t memory =
      ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes);
  if (!memory) return nullptr;
  advise_huge_pages(memory->iface.get_base(memory), bytes);
  ggml_backend_buffer_i table = {};
  table.free_buffer = free_buffer, table.get_base = base_of, table.clear = clear;
  table.init_tensor = init_tensor, table.memset_tensor = memset_tensor;
  table.set_tensor = set_tensor, table.get_tensor = get_tensor;
  return ggml_backend_buffer_init(type, table, memory, bytes);
}

}  // namespace

ggml_backend_buffer_type_t type_of_weights(ggml_backend_dev_t device) {
  static ggml_backend_buffer_type type = {
      {name_of_type, make_buffer, alignment, nullptr, bytes_of, nullptr}, device, nullptr};
  return &type;
}

bool Products::supports(const ggml_tensor *op, ggml_backend_buffer_type_t type) {
  const ggml_tensor *const w = op->src[0], *const x = op->src[1];
  if (!w->buffer || w->buffer->buft != type || !is_packed(w)) return false;
  return op->op == GGML_OP_GET_ROWS ? x->type == GGML_TYPE_I32 && op->type == GGML_TYPE_F32 &&
                                          ggml_is_contiguous(op) && ggml_is_contiguous(x)
                                    : x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float);
}

constexpr char kNotPacked[] = "its weights are not packed; write them, and leave memory for that";

const char *Products::get_rows(const ggml_tensor *op) {
  const ggml_tensor *const w = op->src[0], *const x = op->src[1];
  if (!layer_of(w)) return kNotPacked;
  for (int64_t i = 0; i < x->ne[0]; i++) {
    const int32_t row = static_cast<const int32_t *>(x->data)[i];
    if (row < 0 || row >= w->ne[1]) return "it takes a row that its matrix does not have";
    unsigned char *const blocks = workspace_.get(w->nb[1]);
    get_tensor(nullptr, w, blocks, static_cast<size_t>(row) * w->nb[1], w->nb[1]);
    ggml_get_type_traits(w->type)->to_float(blocks, static_cast<float *>(op->data) + i * w->ne[0],
                                            w->ne[0]);
  }
  return nullptr;
}

const char *Products::compute(const ggml_tensor *op, const mha_scheduler *scheduler) {
  const ggml_tensor *const x = op->src[1];
  const mha_layer *const layer = layer_of(op->src[0]);
  if (!layer) return kNotPacked;
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
