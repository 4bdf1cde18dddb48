// Layers: the checks of a configuration and its weights, and the four ways in: pack, view, verify, create.

#include "layer.h"

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu.h"
#include "small.h"
#include "structs.h"

namespace mha {
namespace {

constexpr uint32_t config_argument = 1, weights_argument = 2, options_argument = 3;  // of pack_size, pack and create

static_assert(static_cast<uint32_t>(Storage::f32) == MHA_TYPE_F32 && static_cast<uint32_t>(Storage::f16) == MHA_TYPE_F16 &&
                  static_cast<uint32_t>(Storage::bf16) == MHA_TYPE_BF16 && static_cast<uint32_t>(Storage::int8) == MHA_TYPE_INT8 &&
                  static_cast<uint32_t>(Storage::int4) == MHA_TYPE_INT4,
              "the kernels' names for the types of mha.h");
static_assert(static_cast<uint32_t>(Arithmetic::f32) == MHA_ARITHMETIC_F32 &&
                  static_cast<uint32_t>(Arithmetic::int8) == MHA_ARITHMETIC_INT8 &&
                  static_cast<uint32_t>(Arithmetic::int16) == MHA_ARITHMETIC_INT16,
              "and for its arithmetics");

struct NamedValue {
  const char *name;
  int64_t value;
};

mha_status check_config(Report &report, const mha_layer_config &config) {
  const NamedValue values[] = {{"query_dim", config.query_dim},   {"key_dim", config.key_dim},       {"value_dim", config.value_dim},
                               {"output_dim", config.output_dim}, {"num_heads", config.num_heads},   {"num_kv_heads", config.num_kv_heads},
                               {"head_dim", config.head_dim},     {"head_dim_v", config.head_dim_v}, {"gate_dim", config.gate_dim}};
  for (const NamedValue &value : values) {
    if (value.value < 0) {
      return report.fail(MHA_ERROR_INVALID_VALUE, config_argument, "%s is %lld; a dimension can't be negative", value.name,
                         static_cast<long long>(value.value));
    }
    if (value.value > INT32_MAX) {
      return report.fail(MHA_ERROR_TOO_LARGE, config_argument, "%s is %lld; the largest dimension is %d", value.name,
                         static_cast<long long>(value.value), INT32_MAX);
    }
  }
  if (config.query_dim == 0)
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument, "query_dim is 0; set it to the width of an input row");
  if (config.weight_type > MHA_TYPE_INT4) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument, "weight_type is %u; set one of MHA_TYPE_F32 (0) to MHA_TYPE_INT4 (4)",
                       config.weight_type);
  }
  if (config.scale - config.scale != 0.0f) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument, "scale is not finite; set a number, or 0 for 1 / sqrt(head_dim)");
  }
  if (config.arithmetic > MHA_ARITHMETIC_INT16) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument,
                       "arithmetic is %u; set MHA_ARITHMETIC_F32 (0), MHA_ARITHMETIC_INT8 (1) or MHA_ARITHMETIC_INT16 (2)",
                       config.arithmetic);
  }
  if (config.arithmetic != MHA_ARITHMETIC_F32 && config.weight_type != MHA_TYPE_INT8 && config.weight_type != MHA_TYPE_INT4) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument,
                       "arithmetic is %u, but integers multiply weights of MHA_TYPE_INT8 (3) or MHA_TYPE_INT4 (4), and weight_type is %u",
                       config.arithmetic, config.weight_type);
  }
  if (config.gate > MHA_GATE_SOFTPLUS) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument,
                       "gate is %u; set MHA_GATE_NONE (0), MHA_GATE_SIGMOID (1) or MHA_GATE_SOFTPLUS (2)", config.gate);
  }
  return MHA_OK;
}

mha_status resolve_gate(Report &report, const mha_layer_config &config, LayerShape *shape) {
  shape->gate = config.gate;
  shape->gate_dim = config.gate == MHA_GATE_NONE || config.gate_dim != 0 ? config.gate_dim : shape->head_dim_v;
  const bool is_sound = config.gate == MHA_GATE_NONE ? config.gate_dim == 0 : shape->gate_dim == 1 || shape->gate_dim == shape->head_dim_v;
  if (is_sound) return MHA_OK;
  return report.fail(MHA_ERROR_SHAPE, config_argument,
                     "gate_dim is %lld; a gate has head_dim_v (%lld) numbers or 1, and without one it is 0",
                     static_cast<long long>(config.gate_dim), static_cast<long long>(shape->head_dim_v));
}

mha_status resolve_heads(Report &report, const mha_layer_config &config, LayerShape *shape) {
  shape->num_heads = config.num_heads;
  shape->num_kv_heads = config.num_kv_heads ? config.num_kv_heads : config.num_heads;
  if (shape->num_heads % shape->num_kv_heads != 0) {
    return report.fail(MHA_ERROR_SHAPE, config_argument,
                       "num_kv_heads %lld does not divide num_heads %lld; set it to num_heads, or to a divisor for grouped queries",
                       static_cast<long long>(shape->num_kv_heads), static_cast<long long>(shape->num_heads));
  }
  shape->head_dim = config.head_dim;
  if (shape->head_dim == 0) {
    if (config.query_dim % config.num_heads != 0) {
      return report.fail(MHA_ERROR_SHAPE, config_argument,
                         "num_heads %lld does not divide query_dim %lld; check both, or set head_dim if the heads have another width",
                         static_cast<long long>(config.num_heads), static_cast<long long>(config.query_dim));
    }
    shape->head_dim = config.query_dim / config.num_heads;
  }
  shape->head_dim_v = config.head_dim_v ? config.head_dim_v : shape->head_dim;
  if (shape->num_heads * shape->head_dim > INT32_MAX || shape->num_heads * shape->head_dim_v > INT32_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE, config_argument, "num_heads %lld * head_dim (or * head_dim_v) is larger than %d",
                       static_cast<long long>(config.num_heads), INT32_MAX);
  }
  return MHA_OK;
}

// A layer of W_O alone: nothing else is set.
mha_status resolve_without_heads(Report &report, const mha_layer_config &config, const mha_layer_weights &weights, LayerShape *shape) {
  mha_layer_config of_config = {};
  of_config.struct_size = config.struct_size;
  of_config.query_dim = config.query_dim;
  of_config.output_dim = config.output_dim;
  of_config.weight_type = config.weight_type;
  of_config.arithmetic = config.arithmetic;
  mha_layer_weights of_weights = {};
  of_weights.struct_size = weights.struct_size;
  of_weights.layout = weights.layout;
  of_weights.type = weights.type;
  of_weights.w_o = weights.w_o;
  of_weights.b_o = weights.b_o;
  of_weights.w_o_stride = weights.w_o_stride;
  of_weights.w_o_scales = weights.w_o_scales;
  if (!weights.w_o || memcmp(&of_config, &config, sizeof config) != 0 || memcmp(&of_weights, &weights, sizeof weights) != 0) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument,
                       "num_heads is 0; set it to at least 1, or for mha_linear give no other dimensions than query_dim and output_dim, "
                       "and no weights but w_o and b_o");
  }
  shape->query_dim = config.query_dim;
  shape->output_dim = config.output_dim ? config.output_dim : config.query_dim;
  shape->has_output = true;
  return MHA_OK;
}

mha_status check_weight_forms(Report &report, const mha_layer_weights &weights, const LayerShape &shape) {
  const bool has_any_matrix = weights.w_q || weights.w_k || weights.w_v, has_all_matrices = weights.w_q && weights.w_k && weights.w_v;
  if (!has_any_matrix && !weights.w_qkv) {
    return report.fail(MHA_ERROR_NULL_POINTER, weights_argument, "there are no weights; give w_q, w_k and w_v, or w_qkv");
  }
  if (has_any_matrix && weights.w_qkv) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                       "w_qkv is given together with %s; give either w_q, w_k and w_v, or w_qkv",
                       weights.w_q   ? "w_q"
                       : weights.w_k ? "w_k"
                                     : "w_v");
  }
  if (has_any_matrix && !has_all_matrices) {
    return report.fail(MHA_ERROR_NULL_POINTER, weights_argument, "%s is NULL; give all of w_q, w_k and w_v",
                       !weights.w_q   ? "w_q"
                       : !weights.w_k ? "w_k"
                                      : "w_v");
  }
  if (weights.w_qkv && !shape.has_one_input_width()) {
    return report.fail(MHA_ERROR_SHAPE, weights_argument,
                       "w_qkv is one matrix, but query_dim %lld, key_dim %lld and value_dim %lld differ; give w_q, w_k and w_v",
                       static_cast<long long>(shape.query_dim), static_cast<long long>(shape.key_dim),
                       static_cast<long long>(shape.value_dim));
  }
  if (weights.b_qkv && (weights.b_q || weights.b_k || weights.b_v)) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument, "b_qkv is given together with b_q, b_k or b_v; give one or the other");
  }
  if (weights.b_o && !weights.w_o) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument, "b_o is given without w_o; a bias needs its matrix");
  }
  if (weights.w_g && shape.gate == MHA_GATE_NONE) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                       "w_g is given, but mha_layer_config.gate is MHA_GATE_NONE; set it, or leave w_g NULL");
  }
  if (weights.b_g && !weights.w_g) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                       "b_g is given without w_g; without it, biases of the gate are behind those of each head in b_q");
  }
  return MHA_OK;
}

// The type of the matrices as given, what it can be converted to, and its scales.
mha_status check_weight_types(Report &report, const mha_layer_weights &weights, uint32_t weight_type) {
  if (weights.type > MHA_TYPE_INT4) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                       "mha_layer_weights.type is %u; set one of MHA_TYPE_F32 (0) to MHA_TYPE_INT4 (4)", weights.type);
  }
  const bool is_coded = weights.type == MHA_TYPE_INT8 || weights.type == MHA_TYPE_INT4;
  const char *const name = weights.type == MHA_TYPE_INT8 ? "INT8" : "INT4";
  if (is_coded && weight_type != weights.type) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                       "weights given as MHA_TYPE_%s are taken as they are, but weight_type is %u; set it to MHA_TYPE_%s (%u)", name,
                       weight_type, name, weights.type);
  }
  if (weights.type == MHA_TYPE_INT4 && weights.layout != MHA_LAYOUT_OUT_IN) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                       "weights given as MHA_TYPE_INT4 have pairs of inputs in a byte; give them with MHA_LAYOUT_OUT_IN");
  }
  const struct {
    const char *matrix_name, *scales_name;
    const void *matrix;
    const float *scales;
  } matrices[] = {{"w_q", "w_q_scales", weights.w_q, weights.w_q_scales},
                  {"w_k", "w_k_scales", weights.w_k, weights.w_k_scales},
                  {"w_v", "w_v_scales", weights.w_v, weights.w_v_scales},
                  {"w_qkv", "w_qkv_scales", weights.w_qkv, weights.w_qkv_scales},
                  {"w_o", "w_o_scales", weights.w_o, weights.w_o_scales},
                  {"w_g", "w_g_scales", weights.w_g, weights.w_g_scales}};
  for (const auto &matrix : matrices) {
    if (is_coded && matrix.matrix && !matrix.scales) {
      return report.fail(MHA_ERROR_NULL_POINTER, weights_argument, "%s is NULL; %s is given as MHA_TYPE_%s, which needs its scales",
                         matrix.scales_name, matrix.matrix_name, name);
    }
    if (matrix.scales && !(is_coded && matrix.matrix)) {
      return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                         "%s is given, but no %s of MHA_TYPE_INT8 or MHA_TYPE_INT4; set mha_layer_weights.type or leave it NULL",
                         matrix.scales_name, matrix.matrix_name);
    }
  }
  return MHA_OK;
}

mha_status check_weight_strides(Report &report, const mha_layer_weights &weights, const LayerShape &shape) {
  const bool in_out = weights.layout == MHA_LAYOUT_IN_OUT;
  const int64_t q_head = shape.head_dim + (weights.w_g ? 0 : shape.gate_dim), q_columns = shape.num_heads * q_head;
  const struct {
    const char *name;
    bool is_given;
    int64_t stride, in, out;
  } strides[] = {{"w_q_stride", weights.w_q != nullptr, weights.w_q_stride, shape.query_dim, q_columns},
                 {"w_k_stride", weights.w_k != nullptr, weights.w_k_stride, shape.key_dim, shape.k_columns()},
                 {"w_v_stride", weights.w_v != nullptr, weights.w_v_stride, shape.value_dim, shape.v_columns()},
                 {"w_qkv_stride", weights.w_qkv != nullptr, weights.w_qkv_stride, shape.query_dim,
                  q_columns + shape.k_columns() + shape.v_columns()},
                 {"w_g_stride", weights.w_g != nullptr, weights.w_g_stride, shape.query_dim, shape.g_columns()},
                 {"w_o_stride", shape.has_output, weights.w_o_stride, shape.output_depth(), shape.output_dim}};
  for (const auto &stride : strides) {
    if (stride.stride < 0) {
      return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument, "%s is %lld; strides can't be negative", stride.name,
                         static_cast<long long>(stride.stride));
    }
    if (!stride.is_given) continue;
    const int64_t width = in_out ? stride.out : stride.in, rows = in_out ? stride.in : stride.out;
    if (stride.stride != 0 && stride.stride < width) {
      return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                         "%s is %lld, less than the width of a row, %lld; set at least that, or 0 for contiguous", stride.name,
                         static_cast<long long>(stride.stride), static_cast<long long>(width));
    }
    if (weights.type == MHA_TYPE_INT4 && stride.stride % 2 != 0) {
      return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument,
                         "%s is %lld, but rows of MHA_TYPE_INT4 begin at whole bytes; set an even number, or 0 for whole bytes",
                         stride.name, static_cast<long long>(stride.stride));
    }
    if ((Count(stride.stride) * Count(rows) * Count(sizeof(float))).overflows()) {
      return report.fail(MHA_ERROR_TOO_LARGE, weights_argument, "%s is %lld; the matrix would be larger than memory can be", stride.name,
                         static_cast<long long>(stride.stride));
    }
  }
  return MHA_OK;
}

// Everything that pack_size, pack and create have in common.
struct PackJob {
  LayerShape shape;
  mha_layer_weights weights;
  mha_layer_options options;
  PackedKind kind;
  PackedLayout layout;
};

mha_status prepare(Report &report, const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                   PackJob *job) {
  if (const mha_status status = resolve_shape(report, config, weights, &job->shape, &job->weights)) return status;
  if (const mha_status status = read_options(report, options_argument, options, &job->options)) return status;
  if (job->options.sgemm && config->weight_type != MHA_TYPE_F32) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument,
                       "weight_type is %u, but options.sgemm multiplies floats; set weight_type to MHA_TYPE_F32 (0) or sgemm to NULL",
                       config->weight_type);
  }
  job->kind = job->options.sgemm ? PackedKind::plain_f32 : kind_of(static_cast<Storage>(config->weight_type), job->shape.arithmetic);
  job->layout = packed_layout(job->shape, job->kind);
  if (job->layout.bytes < 0 || static_cast<uint64_t>(job->layout.bytes) > PTRDIFF_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE, config_argument, "the packed layer would be larger than memory can be");
  }
  if (job->options.sgemm && !job->shape.fits_sgemm()) {
    return report.fail(MHA_ERROR_TOO_LARGE, config_argument,
                       "the matrices of the inputs have more than %d columns together, which sgemm can't be asked for", INT32_MAX);
  }
  return MHA_OK;
}

// malloc, but on huge pages of 2 MiB where the layer is large: otherwise most of the time of creating one goes into the page faults at the
// first write to each 4 KiB.
void *allocate_default(void *, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr size_t huge_page_bytes = size_t{2} << 20;
  if (bytes >= 2 * huge_page_bytes) {
    void *memory;
    if (posix_memalign(&memory, huge_page_bytes, bytes) != 0) return nullptr;
    // Whole huge pages only: the rest of the last one is not ours. It is an advice, nothing is lost if the system does not take it.
    madvise(memory, bytes / huge_page_bytes * huge_page_bytes, MADV_HUGEPAGE);
    return memory;
  }
#endif
  return malloc(bytes);
}
void release_default(void *, void *memory) { free(memory); }

void *align64(void *memory) { return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64); }

mha_layer *make_layer(void *storage, const LayerShape &shape, PackedKind kind, const PackedLayout &layout, const void *packed,
                      const mha_layer_options &options, const Kernels *kernels) {
  mha_layer layer = {};
  layer.shape = shape;
  layer.layout = layout;
  layer.packed = static_cast<const unsigned char *>(packed);
  layer.storage = storage_of(kind);
  layer.kernels = kernels;
  layer.sgemm = options.sgemm;
  layer.small = small_layer_of(layer);
  mha_layer *const made = static_cast<mha_layer *>(align64(storage));
  memcpy(static_cast<void *>(made), &layer, sizeof layer);
  return made;
}

constexpr size_t layer_bytes = (sizeof(mha_layer) + 63) / 64 * 64;

}  // namespace

mha_status resolve_shape(Report &report, const mha_layer_config *config, const mha_layer_weights *weights, LayerShape *shape,
                         mha_layer_weights *read_weights) {
  mha_layer_config given;
  if (const mha_status status = read_struct(report, config_argument, "mha_layer_config", config, &given)) return status;
  if (const mha_status status = check_config(report, given)) return status;
  if (const mha_status status = read_struct(report, weights_argument, "mha_layer_weights", weights, read_weights)) return status;
  if (read_weights->layout > MHA_LAYOUT_OUT_IN) {
    return report.fail(MHA_ERROR_INVALID_VALUE, weights_argument, "layout %u is none; use MHA_LAYOUT_IN_OUT or MHA_LAYOUT_OUT_IN",
                       read_weights->layout);
  }
  *shape = {};
  shape->arithmetic = static_cast<Arithmetic>(given.arithmetic);
  if (given.num_heads == 0) {
    if (const mha_status status = resolve_without_heads(report, given, *read_weights, shape)) return status;
    if (const mha_status status = check_weight_types(report, *read_weights, given.weight_type)) return status;
    return check_weight_strides(report, *read_weights, *shape);
  }
  if (const mha_status status = resolve_heads(report, given, shape)) return status;
  if (const mha_status status = resolve_gate(report, given, shape)) return status;
  shape->query_dim = given.query_dim;
  shape->key_dim = given.key_dim ? given.key_dim : given.query_dim;
  shape->value_dim = given.value_dim ? given.value_dim : shape->key_dim;
  shape->has_output = read_weights->w_o != nullptr;
  shape->output_dim = !shape->has_output ? shape->context_columns() : given.output_dim ? given.output_dim : given.query_dim;
  if (!shape->has_output && given.output_dim != 0) {
    return report.fail(MHA_ERROR_INVALID_VALUE, config_argument,
                       "output_dim is %lld, but there is no w_o; without it the output has num_heads * head_dim_v columns",
                       static_cast<long long>(given.output_dim));
  }
  // Both operations correctly rounded.
  shape->scale = given.scale != 0.0f ? given.scale : 1.0f / __builtin_sqrtf(static_cast<float>(shape->head_dim));
  if (const mha_status status = check_weight_forms(report, *read_weights, *shape)) return status;
  if (const mha_status status = check_weight_types(report, *read_weights, given.weight_type)) return status;
  return check_weight_strides(report, *read_weights, *shape);
}

mha_status read_options(Report &report, uint32_t argument, const mha_layer_options *options, mha_layer_options *read) {
  *read = {};
  if (!options) return MHA_OK;
  if (const mha_status status = read_struct(report, argument, "mha_layer_options", options, read)) return status;
  if (read->reserved != 0) return report.fail(MHA_ERROR_INVALID_VALUE, argument, "mha_layer_options.reserved is not 0; set it to 0");
  if (read->allocator && (!read->allocator->allocate || !read->allocator->release)) {
    return report.fail(MHA_ERROR_NULL_POINTER, argument, "the allocator's allocate or release is NULL; give both");
  }
  return check_instruction_set(report, argument, read->instruction_set);
}

}  // namespace mha

using namespace mha;

mha_status mha_layer_pack_size(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                               size_t *bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  return write_size(report, 4, static_cast<size_t>(job.layout.bytes), bytes);
}

mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options, void *buffer,
                          size_t buffer_bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  if (!buffer) return report.fail(MHA_ERROR_NULL_POINTER, 4, "buffer is NULL; pass memory of mha_layer_pack_size bytes, aligned to 64");
  if (reinterpret_cast<uintptr_t>(buffer) % 64 != 0) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 4, "buffer is not aligned to 64 bytes; allocate it with aligned_alloc(64, ...) or mmap");
  }
  if (buffer_bytes < static_cast<size_t>(job.layout.bytes)) {
    return report.fail(MHA_ERROR_BUFFER_TOO_SMALL, 5, "buffer_bytes is %zu, the packed layer needs %lld; ask mha_layer_pack_size",
                       buffer_bytes, static_cast<long long>(job.layout.bytes));
  }
  if (const mha_status status = check_range(report, weights_argument, job.shape, job.kind, job.weights)) return status;
  pack_layer(job.shape, job.kind, job.layout, job.weights, buffer);
  return MHA_OK;
}

size_t mha_layer_view_size(void) { return layer_bytes + 63; }

mha_status mha_layer_view(const void *buffer, size_t buffer_bytes, const mha_layer_options *options, void *storage, size_t storage_bytes,
                          const mha_layer **layer, mha_error *error) {
  Report report(error);
  LayerShape shape;
  PackedKind kind;
  PackedLayout layout;
  if (const mha_status status = read_packed(report, buffer, buffer_bytes, &shape, &kind, &layout)) return status;
  mha_layer_options read;
  if (const mha_status status = read_options(report, 3, options, &read)) return status;
  if ((kind == PackedKind::plain_f32) != (read.sgemm != nullptr)) {
    return report.fail(MHA_ERROR_PACKED_FORMAT, 3,
                       read.sgemm
                           ? "the layer was packed for the library's own kernels; leave options.sgemm NULL or pack it again with sgemm"
                           : "the layer was packed for a BLAS; give options.sgemm or pack it again without");
  }
  if (!storage) return report.fail(MHA_ERROR_NULL_POINTER, 4, "storage is NULL; pass memory of mha_layer_view_size bytes");
  if (storage_bytes < mha_layer_view_size()) {
    return report.fail(MHA_ERROR_BUFFER_TOO_SMALL, 5, "storage_bytes is %zu, the layer object needs %zu; ask mha_layer_view_size",
                       storage_bytes, mha_layer_view_size());
  }
  if (!layer) return report.fail(MHA_ERROR_NULL_POINTER, 6, "layer is NULL; pass where to write the layer");
  const Kernels *kernels;
  if (const mha_status status = choose_kernels(report, 3, read.instruction_set, &kernels)) return status;
  *layer = make_layer(storage, shape, kind, layout, buffer, read, kernels);
  return MHA_OK;
}

mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error) {
  Report report(error);
  LayerShape shape;
  PackedKind kind;
  PackedLayout layout;
  if (const mha_status status = read_packed(report, buffer, buffer_bytes, &shape, &kind, &layout)) return status;
  if (!packed_checksum_holds(kind, layout, buffer)) {
    return report.fail(MHA_ERROR_PACKED_CHECKSUM, 1,
                       "the packed weights are not what was packed (their checksum does not hold); pack the layer again");
  }
  return MHA_OK;
}

mha_status mha_layer_create(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                            mha_layer **layer, mha_error *error) {
  Report report(error);
  if (!layer) return report.fail(MHA_ERROR_NULL_POINTER, 4, "layer is NULL; pass where to write the layer");
  *layer = nullptr;
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  const Kernels *kernels;
  if (const mha_status status = choose_kernels(report, 3, job.options.instruction_set, &kernels)) return status;

  const mha_allocator allocator =
      job.options.allocator ? *job.options.allocator : mha_allocator{nullptr, allocate_default, release_default};
  const Count bytes = Count(job.layout.bytes) + Count(static_cast<int64_t>(layer_bytes + 63));
  if (bytes.overflows()) return report.fail(MHA_ERROR_TOO_LARGE, 1, "the packed layer would be larger than memory can be");
  void *const block = allocator.allocate(allocator.context, static_cast<size_t>(bytes.value()));
  if (!block) {
    return report.fail(MHA_ERROR_OUT_OF_MEMORY, 0, "the allocator has no %lld bytes for the packed layer",
                       static_cast<long long>(bytes.value()));
  }
  if (const mha_status status = check_range(report, weights_argument, job.shape, job.kind, job.weights)) {
    allocator.release(allocator.context, block);
    return status;
  }
  unsigned char *const packed = static_cast<unsigned char *>(align64(block)) + layer_bytes;
  pack_layer(job.shape, job.kind, job.layout, job.weights, packed);
  mha_layer *const made = make_layer(block, job.shape, job.kind, job.layout, packed, job.options, kernels);
  made->allocator = allocator;
  made->block = block;
  *layer = made;
  return MHA_OK;
}

void mha_layer_destroy(mha_layer *layer) {
  if (!layer || !layer->block) return;
  const mha_allocator allocator = layer->allocator;
  allocator.release(allocator.context, layer->block);
}

mha_status mha_layer_shape(const mha_layer *layer, mha_layer_config *config, mha_error *error) {
  Report report(error);
  if (!layer) return report.fail(MHA_ERROR_NULL_POINTER, 1, "layer is NULL; pass a layer of mha_layer_create or mha_layer_view");
  mha_layer_config filled = {};
  const LayerShape &shape = layer->shape;
  filled.query_dim = shape.query_dim;
  filled.key_dim = shape.key_dim;
  filled.value_dim = shape.value_dim;
  filled.output_dim = shape.output_dim;
  filled.num_heads = shape.num_heads;
  filled.num_kv_heads = shape.num_kv_heads;
  filled.head_dim = shape.head_dim;
  filled.head_dim_v = shape.head_dim_v;
  filled.scale = shape.scale;
  filled.weight_type = static_cast<uint32_t>(layer->storage);
  filled.gate = shape.gate;
  filled.gate_dim = shape.gate_dim;
  filled.arithmetic = static_cast<uint32_t>(shape.arithmetic);
  return write_struct(report, 2, "mha_layer_config", filled, config);
}
