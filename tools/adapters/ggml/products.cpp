#include "products.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "src/objects/layer.h"

namespace mha_ggml {
namespace {

constexpr size_t kAlignment = 64, kMostWeights = 256;  // of a block

// How ggml stores a block of weights, which are code * scale, or code * scale + offset. Blocks of
// 32 have one scale, in binary16, and one offset; those of 256 have a factor in binary16 for the
// scales of groups, which are integers, and another, to be subtracted, for offsets.
struct Format {
  ggml_type type;
  uint32_t of_codes;               // MHA_TYPE_*
  int bits;                        // of a code
  size_t weights, group;           // of a block
  int factor_at, offset_at;        // bytes of the block; -1: it has none
  int scales_at;                   // 8 times 6 bits of scales and offsets, or 16 bytes
  size_t codes_at, span, high_at;  // the low nibbles of half of a span, then the high ones
};

constexpr Format kFormats[] = {
    {GGML_TYPE_Q4_0, MHA_TYPE_INT4, 4, 32, 32, 0, -1, -1, 2, 32, 0},
    {GGML_TYPE_Q4_1, MHA_TYPE_INT4, 4, 32, 32, 0, 2, -1, 4, 32, 0},
    {GGML_TYPE_Q5_0, MHA_TYPE_INT5, 5, 32, 32, 0, -1, -1, 6, 32, 2},
    {GGML_TYPE_Q5_1, MHA_TYPE_INT5, 5, 32, 32, 0, 2, -1, 8, 32, 4},
    {GGML_TYPE_Q8_0, MHA_TYPE_INT8, 8, 32, 32, 0, -1, -1, 2, 32, 0},
    {GGML_TYPE_Q4_K, MHA_TYPE_INT4, 4, 256, 32, 0, 2, 4, 16, 64, 0},
    {GGML_TYPE_Q5_K, MHA_TYPE_INT5, 5, 256, 32, 0, 2, 4, 48, 64, 16},
    {GGML_TYPE_Q6_K, MHA_TYPE_INT6, 6, 256, 16, 208, -1, 192, 0, 128, 128},
    {GGML_TYPE_BF16, MHA_TYPE_BF16, 16, 1, 1, -1, -1, -1, 0, 1, 0}};

size_t high_bits(const Format &f) { return f.bits < 8 ? static_cast<size_t>(f.bits - 4) : 0; }
int low_mask(const Format &f) { return f.bits == 8 ? 255 : 15; }

// The numbers of a block.
struct Numbers {
  uint8_t factors[2][2];  // of scales and offsets, or these themselves
  uint8_t scales[2][16];  // and offsets, of groups
  uint8_t codes[kMostWeights];
};

// Calls move(number, byte of the block, bits of the number, shifts of the number and of the byte)
// for all parts of all numbers.
template <class Moved, class Byte, class Move>
void for_block(const Format &f, Moved *n, Byte *block, Move move) {
  for (int i = 0; i < 2 && f.factor_at >= 0; i++) {
    move(n->factors[0][i], block[f.factor_at + i], 255, 0, 0);
    if (f.offset_at >= 0) move(n->factors[1][i], block[f.offset_at + i], 255, 0, 0);
  }
  Byte *const six = block + std::max(f.scales_at, 0);
  for (size_t i = 0; f.scales_at >= 0 && i < f.weights / f.group; i++) {
    if (f.group == 16) move(n->scales[0][i], six[i], 255, 0, 0);
    for (size_t kind = 0; kind < 2 && f.group == 32; kind++) {
      const bool is_whole = i < 4;
      move(n->scales[kind][i], six[i + (is_whole ? 4 * kind : 4)], is_whole ? 63 : 15, 0,
           is_whole ? 0 : 4 * kind);
      if (!is_whole) move(n->scales[kind][i], six[i - 4 + 4 * kind], 3, 4, 6);
    }
  }
  const size_t half = f.span / 2, high = high_bits(f);
  for (size_t i = 0; i < f.weights; i += half) {
    Byte *const from = block + f.codes_at + (f.bits == 8 ? i : i / f.span * half);
    const size_t shift = f.bits == 8 ? 0 : i % f.span / half * 4;
    for (size_t j = 0; j < half; j++) move(n->codes[i + j], from[j], low_mask(f), 0, shift);
  }
  for (size_t i = 0; high && i < f.weights; i += 32) {
    const size_t of_byte = 256 / high, shift = i % of_byte / 32 * high;
    Byte *const from = block + f.high_at + i / of_byte * 32;
    for (size_t j = 0; j < 32 && f.weights == 32; j++) move(n->codes[j], from[j / 8], 1, 4, j % 8);
    for (size_t j = 0; j < 32 && f.weights > 32; j++)
      move(n->codes[i + j], from[j], (1 << high) - 1, 4, shift);
  }
}

bool is_bf16(const ggml_tensor *t) { return t->type == GGML_TYPE_BF16; }

// NULL: of another type, or of bf16 without instructions for it. ggml's own products, which round
// inputs as mha's do, then cost nothing more, and read mapped files.
const Format *format_of(const ggml_tensor *t) {
  static const bool has_bf16 =
      mha_instruction_sets() >> MHA_INSTRUCTION_SET_AVX512_BF16 & 3;  // or AVX512_AMX
  for (const Format &format : kFormats) {
    if (format.type == t->type && (has_bf16 || !is_bf16(t))) return &format;
  }
  return nullptr;
}

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What mha packs.
struct Given {
  std::vector<uint8_t> codes;
  std::vector<float> factors[2], scales[2];  // factors as those of Numbers
};

mha_linear_weights weights_of(const ggml_tensor *t, const void *codes, const Given &given) {
  const Format &f = *format_of(t);
  mha_linear_weights weights = {};
  weights.struct_size = sizeof weights;
  weights.input_dim = t->ne[0], weights.output_dim = t->ne[1];
  weights.w.data = codes;
  weights.layout = MHA_LAYOUT_OUT_IN;
  weights.type = weights.format.type = f.of_codes;
  weights.format.arithmetic = MHA_ARITHMETIC_BF16;
  if (is_bf16(t)) return weights;
  if (f.bits > 4) weights.type = MHA_TYPE_INT8;
  weights.format.arithmetic = MHA_ARITHMETIC_INT8;
  weights.format.group_size = static_cast<uint32_t>(f.group);
  const bool has_offsets = f.offset_at >= 0, is_in_blocks = f.scales_at >= 0;
  weights.format.scale_type = is_in_blocks ? MHA_TYPE_INT8 : MHA_TYPE_F16;
  const auto &scales = is_in_blocks ? given.scales : given.factors;
  weights.w.scales = scales[0].data(), weights.w.offsets = has_offsets ? scales[1].data() : nullptr;
  if (is_in_blocks) weights.w.block_scales = given.factors[0].data();
  if (is_in_blocks && has_offsets) weights.w.block_offsets = given.factors[1].data();
  return weights;
}

// Bytes of the packed layer; 0 if mha does not take it.
size_t packed_bytes(const ggml_tensor *t) {
  static const Given any = {{0}, {{0}, {0}}, {{0}, {0}}};
  const mha_linear_weights weights = weights_of(t, any.codes.data(), any);
  size_t bytes;
  return mha_linear_pack_size(&weights, nullptr, &bytes, nullptr) == MHA_OK ? bytes : 0;
}

bool is_packed(const ggml_tensor *t) {
  const Format *const f = format_of(t);
  return f && t->ne[0] % static_cast<int64_t>(f->weights) == 0 && t->ne[2] == 1 && t->ne[3] == 1 &&
         !t->view_src && ggml_is_contiguous(t) && packed_bytes(t) > 0;
}

// NULL: nothing was packed yet, or the buffer was cleared; the bytes of the tensor are ggml's then.
const mha_layer *layer_of(const ggml_tensor *t) {
  const mha_layer *const layer = static_cast<const mha_layer *>(t->extra);
  return layer && mha::is_layer(layer) ? layer : nullptr;
}

// Packs blocks where the tensor lies, with the layer object after them.
void pack(ggml_tensor *t, const uint8_t *block) {
  const Format &f = *format_of(t);
  Given given;
  if (!is_bf16(t)) {
    const size_t kinds = f.offset_at < 0 ? 1 : 2,
                 groups = f.scales_at < 0 ? 0 : f.weights / f.group,
                 blocks = static_cast<size_t>(t->ne[0] * t->ne[1]) / f.weights;
    const int centre = kinds == 1 && f.bits < 8 ? 1 << (f.bits - 1) : 0;  // of codes of mha
    given.codes.resize(blocks * f.weights * (f.bits == 4 ? 4 : 8) / 8);
    for (size_t kind = 0; kind < kinds; kind++) {
      given.factors[kind].resize(blocks);
      given.scales[kind].resize(blocks * groups);
    }
    const ggml_to_float_t widen = ggml_get_type_traits(GGML_TYPE_F16)->to_float;
    uint8_t *to = given.codes.data();
    for (size_t i = 0; i < blocks; i++) {
      Numbers n = {};
      for_block(f, &n, block + i * t->nb[0],
                [](uint8_t &number, uint8_t byte, int mask, size_t left, size_t right) {
                  number = static_cast<uint8_t>(number | (byte >> right & mask) << left);
                });
      if (groups > 0) n.factors[1][1] ^= 0x80;  // which ggml subtracts
      for (size_t kind = 0; kind < kinds; kind++) {
        uint16_t half;
        std::memcpy(&half, n.factors[kind], sizeof half);
        widen(&half, &given.factors[kind][i], 1);
        for (size_t g = 0; g < groups; g++)
          given.scales[kind][i * groups + g] = static_cast<int8_t>(n.scales[kind][g]);
      }
      for (size_t j = 0; j < f.weights; j += f.bits == 4 ? 2 : 1)
        *to++ = static_cast<uint8_t>(f.bits == 4 ? n.codes[j] | n.codes[j + 1] << 4
                                                 : n.codes[j] - centre);
    }
  }
  const mha_linear_weights weights = weights_of(t, is_bf16(t) ? block : given.codes.data(), given);
  const size_t bytes = packed_bytes(t);
  const mha_layer *layer = nullptr;
  if (mha_linear_pack(&weights, nullptr, t->data, bytes, nullptr) == MHA_OK) {
    mha_layer_view(t->data, bytes, nullptr, static_cast<char *>(t->data) + aligned(bytes),
                   mha_layer_view_size(), &layer, nullptr);
  }
  t->extra = const_cast<mha_layer *>(layer);
}

// Writes ggml's block i: what pack() read, but that every NaN of a scale or of bf16 is the same
// one, and that bf16 below 2^-50 are 0. pack.cpp of mha describes the layout: four terms of a
// column lie side by side in codes of int8 (plus 128), eight in nibbles, after which those of int5
// and int6 have planes of high bits, and two of bf16.
void unpack(const ggml_tensor *t, const mha_layer *layer, size_t i, uint8_t *block) {
  const Format &f = *format_of(t);
  constexpr size_t kColumns = mha::panel_columns, kFours = 4 * kColumns;
  const size_t inputs = static_cast<size_t>(t->ne[0]), blocks = inputs / f.weights,
               output = i / blocks, column = output % kColumns, panel = output / kColumns;
  const uint8_t *const weights = static_cast<const uint8_t *>(layer->weights(mha::matrix_o));
  i %= blocks;
  if (is_bf16(t)) {
    const size_t pair = (panel * inputs + i / 2 * 2) * kColumns / 2 + column;
    std::memcpy(block, weights + 4 * pair + i % 2 * 2, 2);
    return;
  }
  Numbers n = {};
  const size_t groups = f.scales_at < 0 ? 0 : f.weights / f.group, at = panel * blocks + i;
  const void *const scales[] = {layer->scales(mha::matrix_o), layer->offsets(mha::matrix_o)};
  for (int kind = 0; kind < 2 && scales[kind]; kind++) {
    const uint8_t *const from =
        static_cast<const uint8_t *>(scales[kind]) + at * (2 + groups) * kColumns;
    std::memcpy(n.factors[kind], from + 2 * column, 2);
    for (size_t g = 0; g < groups; g++) n.scales[kind][g] = from[(2 + g) * kColumns + column];
  }
  const size_t high = high_bits(f), terms = 32 / (high ? high : static_cast<size_t>(f.bits)),
               nibbles = std::max<size_t>(terms / 8, 1) * kFours,
               unit = nibbles + (high ? kFours : 0);
  for (size_t j = 0; j < f.weights; j += 4) {
    const size_t k = j % terms, low = f.bits == 8 ? 0 : k / 4 % 2 * 4;
    const uint8_t *const from =
        weights + (at * (f.weights / terms) + j / terms) * unit + 4 * column;
    for (size_t l = 0; l < 4; l++) {
      const int upper = high ? from[nibbles + l] >> k / 4 * high & ((1 << high) - 1) : 0;
      n.codes[j + l] =
          static_cast<uint8_t>((from[k / 8 * kFours + l] >> low & low_mask(f)) | upper << 4);
      if (f.bits == 8) n.codes[j + l] ^= 128;
    }
  }
  if (groups > 0) n.factors[1][1] ^= 0x80;
  std::memset(block, 0, t->nb[0]);
  for_block(f, &n, block, [](uint8_t number, uint8_t &byte, int mask, size_t left, size_t right) {
    byte = static_cast<uint8_t>(byte | (number >> left & mask) << right);
  });
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
    uint8_t block[kMostWeights];
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

// Gives back pages of a file that is mapped to be shared, as llama.cpp maps a model, of which the
// process would keep what was read. The system reads them again if they are needed.
void release_mapped(const void *data, size_t bytes) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)),
                  first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page,
                  last = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  FILE *const maps = first < last ? std::fopen("/proc/self/maps", "re") : nullptr;
  if (!maps) return;
  uintptr_t begin, end;
  char flags[5];
  while (std::fscanf(maps, "%" SCNxPTR "-%" SCNxPTR " %4s%*[^\n]", &begin, &end, flags) == 3) {
    if (begin <= first && last <= end && flags[3] == 's')
      madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED);
  }
  std::fclose(maps);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor *t, const void *data, size_t offset,
                size_t bytes) {
  write(t, data, 0, offset, bytes);
  release_mapped(data, bytes);
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor *t, uint8_t value, size_t offset,
                   size_t bytes) {
  write(t, nullptr, value, offset, bytes);
}

ggml_backend_buffer_t make_buffer(ggml_backend_buffer_type_t type, size_t bytes) {
  const ggml_backend_buffer_t memory =
      ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), bytes);
  if (!memory) return nullptr;
  // A mapped file, which llama.cpp reads otherwise, lies in huge pages of Linux's cache; memory
  // does only on advice, and a product with one row reads all of it.
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t base = reinterpret_cast<uintptr_t>(memory->iface.get_base(memory)),
                  first = (base + kPage - 1) / kPage * kPage, last = (base + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
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
