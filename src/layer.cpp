// Layers: the checks of a configuration and its weights, and the four ways in: pack, view, verify,
// create. A linear layer has a W_O alone.

#include "layer.h"

#include <errno.h>
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

constexpr uint32_t weights_argument = 2;  // of mha_layer_pack_size, _pack and _create

// Which parameters a function has, for its errors; config, or what stands for it, is 1.
struct PackArguments {
  uint32_t weights, options, result;
};
constexpr PackArguments layer_arguments = {weights_argument, 3, 4}, linear_arguments = {1, 2, 3};

static_assert(type_of(Storage::f32) == MHA_TYPE_F32 && type_of(Storage::f16) == MHA_TYPE_F16 &&
                  type_of(Storage::bf16) == MHA_TYPE_BF16 &&
                  type_of(Storage::int8) == MHA_TYPE_INT8 &&
                  type_of(Storage::int4) == MHA_TYPE_INT4,
              "the kernels' names for the types of mha.h");

// The kernels' name for an MHA_ARITHMETIC_*, and back.
Arithmetic arithmetic_of(uint32_t number) {
  return number == MHA_ARITHMETIC_INT8    ? Arithmetic::int8
         : number == MHA_ARITHMETIC_INT16 ? Arithmetic::int16
                                          : Arithmetic::f32;
}
uint32_t number_of(Arithmetic arithmetic) {
  constexpr uint32_t numbers[] = {MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8, MHA_ARITHMETIC_INT16};
  return numbers[static_cast<int>(arithmetic)];
}

struct NamedValue {
  const char *name;
  int64_t value;
};

// How weights are kept, and what they are multiplied in.
mha_status check_kept(Report report, uint32_t weight_type, uint32_t arithmetic) {
  if (weight_type > MHA_TYPE_INT4) {
    return report.invalid(
        "weight_type is %u; set MHA_TYPE_F32 (1), MHA_TYPE_F16 (2), MHA_TYPE_BF16 (3), "
        "MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 (5); 0 is F32",
        weight_type);
  }
  if (number_of(arithmetic_of(arithmetic)) != arithmetic)
    return report.invalid(
        "arithmetic is %u; set MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8 or MHA_ARITHMETIC_INT16",
        arithmetic);
  if (arithmetic != MHA_ARITHMETIC_F32 && weight_type != MHA_TYPE_INT8 &&
      weight_type != MHA_TYPE_INT4) {
    return report.invalid(
        "arithmetic is %u, which needs integer weights, but weight_type is %u; set weight_type to "
        "MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 (5),"
        " or arithmetic to MHA_ARITHMETIC_F32 (0)",
        arithmetic, weight_type);
  }
  return MHA_OK;
}

mha_status check_layout(Report report, uint32_t layout) {
  if (layout <= MHA_LAYOUT_OUT_IN) return MHA_OK;
  return report.invalid("layout is %u; set MHA_LAYOUT_IN_OUT (0) or MHA_LAYOUT_OUT_IN (1)", layout);
}

mha_status check_config(Report report, const mha_layer_config &config) {
  if (config.query_dim < 1)
    return report.invalid("query_dim is %lld; set it to the width of a row of query, at least 1",
                          lld(config.query_dim));
  if (config.num_heads < 1) {
    return report.invalid(
        "num_heads is %lld; set it to the number of query heads, at least 1, or call "
        "mha_linear_create for a single matrix",
        lld(config.num_heads));
  }
  const NamedValue values[] = {
      {"query_dim", config.query_dim}, {"key_dim", config.key_dim},
      {"value_dim", config.value_dim}, {"output_dim", config.output_dim},
      {"num_heads", config.num_heads}, {"num_kv_heads", config.num_kv_heads},
      {"head_dim", config.head_dim},   {"head_dim_v", config.head_dim_v},
      {"gate_dim", config.gate_dim}};
  for (const NamedValue &value : values) {
    if (value.value < 0)
      return report.invalid("%s is %lld; set it to at least 1, or to 0 for its default", value.name,
                            lld(value.value));
    if (value.value > INT32_MAX)
      return report.fail(MHA_ERROR_TOO_LARGE, "%s is %lld; set it to at most %d", value.name,
                         lld(value.value), INT32_MAX);
  }
  if (const mha_status status = check_kept(report, config.weight_type, config.arithmetic))
    return status;
  if (config.scale - config.scale != 0.0f) {
    return report.invalid("scale is %g; set it to a finite number, or to 0 for 1 / sqrt(head_dim)",
                          static_cast<double>(config.scale));
  }
  if (config.gate > MHA_GATE_SOFTPLUS)
    return report.invalid(
        "gate is %u; set MHA_GATE_NONE (0), MHA_GATE_SIGMOID (1) or MHA_GATE_SOFTPLUS (2)",
        config.gate);
  return MHA_OK;
}

mha_status resolve_gate(Report report, const mha_layer_config &config, LayerShape *shape) {
  shape->gate = config.gate;
  shape->gate_dim =
      config.gate == MHA_GATE_NONE || config.gate_dim != 0 ? config.gate_dim : shape->head_dim_v;
  if (config.gate == MHA_GATE_NONE) {
    if (config.gate_dim == 0) return MHA_OK;
    return report.fail(
        MHA_ERROR_SHAPE,
        "gate_dim is %lld, but gate is MHA_GATE_NONE (0); set gate_dim to 0, or set gate",
        lld(config.gate_dim));
  }
  if (shape->gate_dim == 1 || shape->gate_dim == shape->head_dim_v) return MHA_OK;
  return report.fail(MHA_ERROR_SHAPE, "gate_dim is %lld; set it to 1 or to head_dim_v (%lld)",
                     lld(config.gate_dim), lld(shape->head_dim_v));
}

mha_status resolve_heads(Report report, const mha_layer_config &config, LayerShape *shape) {
  shape->num_heads = config.num_heads;
  shape->num_kv_heads = config.num_kv_heads ? config.num_kv_heads : config.num_heads;
  if (shape->num_heads % shape->num_kv_heads != 0) {
    return report.fail(MHA_ERROR_SHAPE,
                       "num_kv_heads is %lld, which does not divide num_heads, %lld; set it to "
                       "num_heads or to a divisor of num_heads",
                       lld(shape->num_kv_heads), lld(shape->num_heads));
  }
  shape->head_dim = config.head_dim;
  if (shape->head_dim == 0) {
    if (config.query_dim % config.num_heads != 0) {
      return report.fail(MHA_ERROR_SHAPE,
                         "num_heads is %lld, which does not divide query_dim, %lld; set num_heads "
                         "to a divisor of it, or set head_dim",
                         lld(config.num_heads), lld(config.query_dim));
    }
    shape->head_dim = config.query_dim / config.num_heads;
  }
  shape->head_dim_v = config.head_dim_v ? config.head_dim_v : shape->head_dim;
  const NamedValue products[] = {{"head_dim", shape->num_heads * shape->head_dim},
                                 {"head_dim_v", shape->num_heads * shape->head_dim_v}};
  for (const NamedValue &product : products) {
    if (product.value <= INT32_MAX) continue;
    return report.fail(MHA_ERROR_TOO_LARGE,
                       "num_heads * %s is %lld; set them to a product of at most %d", product.name,
                       lld(product.value), INT32_MAX);
  }
  return MHA_OK;
}

mha_status check_weight_forms(Report report, const mha_layer_weights &weights,
                              const LayerShape &shape) {
  const bool has_q = weights.w_q.data, has_k = weights.w_k.data, has_v = weights.w_v.data,
             has_qkv = weights.w_qkv.data;
  const bool has_any_matrix = has_q || has_k || has_v, has_q_alone = has_q && !has_k && !has_v;
  if (!has_any_matrix && !has_qkv) {
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "w_q.data, w_k.data, w_v.data and w_qkv.data are NULL; set the first three, "
                       "or w_qkv.data, or w_q.data alone");
  }
  if (has_any_matrix && has_qkv) {
    return report.invalid(
        "w_qkv.data is given together with %s.data; set either w_q.data, w_k.data and w_v.data, or "
        "w_qkv.data",
        has_q   ? "w_q"
        : has_k ? "w_k"
                : "w_v");
  }
  if (has_any_matrix && !(has_q && has_k && has_v) && !has_q_alone) {
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "%s.data is NULL; set w_q.data, w_k.data and w_v.data, or w_q.data alone",
                       !has_q   ? "w_q"
                       : !has_k ? "w_k"
                                : "w_v");
  }
  if (has_qkv && !shape.has_one_input_width()) {
    return report.fail(MHA_ERROR_SHAPE,
                       "w_qkv.data is given, but query_dim %lld, key_dim %lld and value_dim %lld "
                       "differ; give w_q, w_k and w_v instead",
                       lld(shape.query_dim), lld(shape.key_dim), lld(shape.value_dim));
  }
  if (weights.w_qkv.bias && (weights.w_q.bias || weights.w_k.bias || weights.w_v.bias)) {
    return report.invalid(
        "w_qkv.bias is given together with %s.bias; set either w_qkv.bias, or the biases of w_q, "
        "w_k and w_v",
        weights.w_q.bias   ? "w_q"
        : weights.w_k.bias ? "w_k"
                           : "w_v");
  }
  if (has_q_alone && (weights.w_k.bias || weights.w_v.bias || weights.w_qkv.bias)) {
    return report.invalid(
        "%s.bias is given, but w_k.data and w_v.data are NULL; set both matrices, or leave the "
        "bias NULL",
        weights.w_k.bias   ? "w_k"
        : weights.w_v.bias ? "w_v"
                           : "w_qkv");
  }
  if (weights.w_o.bias && !weights.w_o.data)
    return report.invalid(
        "w_o.bias is given, but w_o.data is NULL; set the matrix, or leave the bias NULL");
  if (weights.w_g.data && shape.gate == MHA_GATE_NONE)
    return report.invalid(
        "w_g.data is given, but mha_layer_config.gate is MHA_GATE_NONE (0); set gate, or leave "
        "w_g.data NULL");
  if (weights.w_g.bias && !weights.w_g.data) {
    return report.invalid(
        "w_g.bias is given, but w_g.data is NULL; leave the bias NULL: without w_g, the gate's "
        "biases follow each head's in w_q.bias or"
        " w_qkv.bias");
  }
  return MHA_OK;
}

// A matrix of the caller's, under the name of its field, with the dimensions that it should have.
struct GivenMatrix {
  const char *name;
  const mha_matrix &matrix;
  int64_t in, out;
};

bool is_coded(uint32_t type) { return type == MHA_TYPE_INT8 || type == MHA_TYPE_INT4; }

// The type of the matrices as given, and what it can be converted to.
mha_status check_given_type(Report report, uint32_t type, uint32_t layout, uint32_t weight_type) {
  if (type > MHA_TYPE_INT4) {
    return report.invalid(
        "type is %u; set MHA_TYPE_F32 (1), MHA_TYPE_F16 (2), MHA_TYPE_BF16 (3), MHA_TYPE_INT8 (4) "
        "or MHA_TYPE_INT4 (5); 0 is F32",
        type);
  }
  if (is_coded(type) && weight_type != type) {
    const char *const name = type == MHA_TYPE_INT8 ? "INT8" : "INT4";
    return report.invalid(
        "type is MHA_TYPE_%s (%u), whose weights are packed unchanged, but weight_type is %u; set "
        "weight_type to MHA_TYPE_%s (%u), too",
        name, type, weight_type, name, type);
  }
  if (type == MHA_TYPE_INT4 && layout != MHA_LAYOUT_OUT_IN) {
    return report.invalid(
        "layout is MHA_LAYOUT_IN_OUT (0), but bytes of MHA_TYPE_INT4 hold pairs of inputs; set "
        "layout to MHA_LAYOUT_OUT_IN (1)");
  }
  return MHA_OK;
}

mha_status check_scales(Report report, uint32_t type, const GivenMatrix &given) {
  const bool has_data = given.matrix.data;
  if (is_coded(type) && has_data && !given.matrix.scales) {
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "%s.scales is NULL, but type is MHA_TYPE_%s; pass the scales of the matrix",
                       given.name, type == MHA_TYPE_INT8 ? "INT8 (4)" : "INT4 (5)");
  }
  if (given.matrix.scales && !has_data)
    return report.invalid(
        "%s.scales is given, but %s.data is NULL; set the matrix, or leave the scales NULL",
        given.name, given.name);
  if (given.matrix.scales && !is_coded(type)) {
    return report.invalid(
        "%s.scales is given, but type is %u; set type to MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 (5), "
        "or leave the scales NULL",
        given.name, type);
  }
  return MHA_OK;
}

mha_status check_stride(Report report, uint32_t type, uint32_t layout, const GivenMatrix &given) {
  const bool in_out = layout == MHA_LAYOUT_IN_OUT;
  const int64_t width = in_out ? given.out : given.in, rows = in_out ? given.in : given.out,
                stride = given.matrix.row_stride;
  if (stride < 0) {
    return report.invalid(
        "%s.row_stride is %lld; set it to at least the width of a row, or to 0 for contiguous rows",
        given.name, lld(stride));
  }
  if (!given.matrix.data) {
    if (stride == 0) return MHA_OK;
    return report.invalid(
        "%s.row_stride is %lld, but %s.data is NULL; set the matrix, or set the stride to 0",
        given.name, lld(stride), given.name);
  }
  if (stride != 0 && stride < width) {
    return report.invalid(
        "%s.row_stride is %lld, less than the width of a row, %lld; set it to at least that, or to "
        "0 for contiguous rows",
        given.name, lld(stride), lld(width));
  }
  if (type == MHA_TYPE_INT4 && stride % 2 != 0) {
    return report.invalid(
        "%s.row_stride is %lld, but rows of MHA_TYPE_INT4 begin at whole bytes; set it to an even "
        "number, or to 0 for contiguous rows",
        given.name, lld(stride));
  }
  if ((Count(stride) * Count(rows) * Count(sizeof(float))).overflows()) {
    return report.fail(
        MHA_ERROR_TOO_LARGE,
        "%s.row_stride is %lld, with which %lld rows exceed the address space; set it to less",
        given.name, lld(stride), lld(rows));
  }
  return MHA_OK;
}

template <size_t count>
mha_status check_matrices(Report report, uint32_t type, uint32_t layout, uint32_t weight_type,
                          const GivenMatrix (&matrices)[count]) {
  for (const GivenMatrix &given : matrices) {
    if (given.matrix.reserved_pointer)
      return report.invalid("%s.reserved_pointer is not NULL; set it to NULL", given.name);
  }
  if (const mha_status status = check_given_type(report, type, layout, weight_type)) return status;
  for (const GivenMatrix &given : matrices) {
    if (const mha_status status = check_scales(report, type, given)) return status;
  }
  for (const GivenMatrix &given : matrices) {
    if (const mha_status status = check_stride(report, type, layout, given)) return status;
  }
  return MHA_OK;
}

mha_status check_layer_matrices(Report report, const mha_layer_weights &w, const LayerShape &shape,
                                uint32_t weight_type) {
  const int64_t q_head = shape.head_dim + (w.w_g.data ? 0 : shape.gate_dim),
                q_columns = shape.num_heads * q_head;
  const GivenMatrix matrices[] = {
      {"w_q", w.w_q, shape.query_dim, q_columns},
      {"w_k", w.w_k, shape.key_dim, shape.k_columns()},
      {"w_v", w.w_v, shape.value_dim, shape.v_columns()},
      {"w_qkv", w.w_qkv, shape.query_dim, q_columns + shape.k_columns() + shape.v_columns()},
      {"w_o", w.w_o, shape.output_depth(), shape.output_dim},
      {"w_g", w.w_g, shape.query_dim, shape.g_columns()}};
  return check_matrices(report, w.type, w.layout, weight_type, matrices);
}

// Everything that pack_size, pack and create have in common.
struct PackJob {
  PackArguments arguments;
  Storage storage;
  LayerShape shape;
  mha_layer_weights weights;
  mha_layer_options options;
  PackedKind kind;
  PackedLayout layout;
};

// Checks config and the pointers of weights (but reads no array), and resolves the shape.
mha_status resolve_shape(Report report, const mha_layer_config *config,
                         const mha_layer_weights *weights, PackJob *job) {
  LayerShape *const shape = &job->shape;
  mha_layer_weights *const read_weights = &job->weights;
  mha_layer_config given;
  if (const mha_status status = read_struct(report, "mha_layer_config", config, &given))
    return status;
  if (const mha_status status = check_config(report, given)) return status;
  if (const mha_status status =
          read_struct(report.about(weights_argument), "mha_layer_weights", weights, read_weights))
    return status;
  if (const mha_status status = check_layout(report.about(weights_argument), read_weights->layout))
    return status;
  job->storage = storage_of_type(given.weight_type);
  *shape = {};
  shape->arithmetic = arithmetic_of(given.arithmetic);
  if (const mha_status status = resolve_heads(report, given, shape)) return status;
  if (const mha_status status = resolve_gate(report, given, shape)) return status;
  shape->query_dim = given.query_dim;
  const mha_layer_weights &w = *read_weights;
  const bool only_asks = w.w_q.data && !w.w_k.data && !w.w_v.data && !w.w_qkv.data;
  shape->key_dim = given.key_dim || only_asks ? given.key_dim : given.query_dim;
  shape->value_dim = given.value_dim ? given.value_dim : shape->key_dim;
  if (only_asks && shape->value_dim != 0) {
    return report.invalid(
        "key_dim is %lld and value_dim is %lld, but w_k.data and w_v.data are NULL; set both "
        "dimensions to 0, or both matrices",
        lld(given.key_dim), lld(given.value_dim));
  }
  shape->has_output = read_weights->w_o.data != nullptr;
  shape->output_dim = !shape->has_output ? shape->context_columns()
                      : given.output_dim ? given.output_dim
                                         : given.query_dim;
  if (!shape->has_output && given.output_dim != 0) {
    return report.invalid(
        "output_dim is %lld, but w_o.data is NULL; set output_dim to 0, or set the matrix",
        lld(given.output_dim));
  }
  // Both operations correctly rounded.
  shape->scale =
      given.scale != 0.0f ? given.scale : 1.0f / MHA_SQRTF(static_cast<float>(shape->head_dim));
  if (const mha_status status =
          check_weight_forms(report.about(weights_argument), *read_weights, *shape))
    return status;
  return check_layer_matrices(report.about(weights_argument), *read_weights, *shape,
                              given.weight_type);
}

mha_status finish_job(Report report, const mha_layer_options *options, PackJob *job) {
  const PackArguments &arguments = job->arguments;
  if (const mha_status status =
          read_options(report.about(arguments.options), options, &job->options))
    return status;
  if (job->options.sgemm && job->storage != Storage::f32) {
    return report.invalid(
        "weight_type is %u, but options.sgemm multiplies floats; set weight_type to MHA_TYPE_F32 "
        "(1), or options.sgemm to NULL",
        type_of(job->storage));
  }
  job->kind =
      job->options.sgemm ? PackedKind::plain_f32 : kind_of(job->storage, job->shape.arithmetic);
  job->layout = packed_layout(job->shape, job->kind);
  if (job->layout.bytes < 0 || static_cast<uint64_t>(job->layout.bytes) > PTRDIFF_MAX)
    return report.fail(MHA_ERROR_TOO_LARGE,
                       "the packed layer would exceed the address space; set smaller dimensions");
  if (job->options.sgemm && !job->shape.fits_sgemm()) {
    return report.fail(MHA_ERROR_TOO_LARGE,
                       "w_q, w_k, w_v and w_g have %lld columns together, but options.sgemm takes "
                       "at most %d columns; set fewer heads, or"
                       " options.sgemm to NULL",
                       lld(job->shape.input_columns()), INT32_MAX);
  }
  return MHA_OK;
}

mha_status prepare(Report report, const mha_layer_config *config, const mha_layer_weights *weights,
                   const mha_layer_options *options, PackJob *job) {
  job->arguments = layer_arguments;
  if (const mha_status status = resolve_shape(report, config, weights, job)) return status;
  return finish_job(report, options, job);
}

mha_status prepare_linear(Report report, const mha_linear_weights *weights,
                          const mha_layer_options *options, PackJob *job) {
  job->arguments = linear_arguments;
  mha_linear_weights given;
  if (const mha_status status = read_struct(report, "mha_linear_weights", weights, &given))
    return status;
  const struct {
    const char *name, *what;
    int64_t value;
  } dims[] = {{"input_dim", "x", given.input_dim}, {"output_dim", "y", given.output_dim}};
  for (const auto &dim : dims) {
    if (dim.value < 1)
      return report.invalid("%s is %lld; set it to the width of a row of %s, at least 1", dim.name,
                            lld(dim.value), dim.what);
    if (dim.value > INT32_MAX)
      return report.fail(MHA_ERROR_TOO_LARGE, "%s is %lld; set it to at most %d", dim.name,
                         lld(dim.value), INT32_MAX);
  }
  if (const mha_status status = check_kept(report, given.weight_type, given.arithmetic))
    return status;
  if (const mha_status status = check_layout(report, given.layout)) return status;
  if (!given.w.data) return report.fail(MHA_ERROR_NULL_POINTER, "w.data is NULL; pass the matrix");
  const GivenMatrix matrices[] = {{"w", given.w, given.input_dim, given.output_dim}};
  if (const mha_status status =
          check_matrices(report, given.type, given.layout, given.weight_type, matrices))
    return status;
  job->storage = storage_of_type(given.weight_type);
  job->shape = {};
  job->shape.arithmetic = arithmetic_of(given.arithmetic);
  job->shape.query_dim = given.input_dim;
  job->shape.output_dim = given.output_dim;
  job->shape.has_output = true;
  job->weights = {};
  job->weights.layout = given.layout;
  job->weights.type = given.type;
  job->weights.w_o = given.w;
  return finish_job(report, options, job);
}

// malloc, but on huge pages of 2 MiB where the layer is large: otherwise most of the time of
// creating one goes into the page faults at the first write to each 4 KiB.
void *allocate_block(size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr size_t huge_page_bytes = size_t{2} << 20;
  if (bytes >= 2 * huge_page_bytes) {
    void *memory;
    if (posix_memalign(&memory, huge_page_bytes, bytes) != 0) return nullptr;
    // Whole huge pages only: the rest of the last one is not ours. It is an advice, nothing is lost
    // if the system does not take it.
    madvise(memory, bytes / huge_page_bytes * huge_page_bytes, MADV_HUGEPAGE);
    return memory;
  }
#endif
  return malloc(bytes);
}
void *allocate_default(void *, size_t bytes) {
  const int before = errno;  // which a refusal sets
  void *const memory = allocate_block(bytes);
  errno = before;
  return memory;
}
void release_default(void *, void *memory) { free(memory); }

void *align64(void *memory) {
  return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
}

mha_layer *make_layer(void *storage, const LayerShape &shape, PackedKind kind,
                      const PackedLayout &layout, const void *packed,
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
  layer.magic = magic_at(made);
  memcpy(static_cast<void *>(made), &layer, sizeof layer);
  return made;
}

constexpr size_t layer_bytes = (sizeof(mha_layer) + 63) / 64 * 64;

}  // namespace

mha_status fail_no_layer(Report report, const mha_layer *layer) {
  if (!layer)
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "layer is NULL; pass a layer from mha_layer_create or mha_layer_view");
  return report.invalid(
      "layer does not point to a layer, or the layer was destroyed or moved; pass one from "
      "mha_layer_create or mha_layer_view");
}

mha_status read_options(Report report, const mha_layer_options *options, mha_layer_options *read) {
  *read = {};
  if (!options) return MHA_OK;
  if (const mha_status status = read_struct(report, "mha_layer_options", options, read))
    return status;
  if (read->reserved != 0)
    return report.invalid("options.reserved is %u; set it to 0", read->reserved);
  if (read->allocator && (!read->allocator->allocate || !read->allocator->release)) {
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "options.allocator->%s is NULL; set both functions of the allocator",
                       read->allocator->allocate ? "release" : "allocate");
  }
  return check_instruction_set(report, read->instruction_set);
}

namespace {

mha_status pack(Report report, const PackJob &job, const char *size_query, void *buffer,
                size_t buffer_bytes) {
  if (!buffer)
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "buffer is NULL; pass memory of %s bytes, aligned to 64 bytes", size_query);
  if (reinterpret_cast<uintptr_t>(buffer) % 64 != 0)
    return report.invalid(
        "buffer is not aligned to 64 bytes; allocate it with aligned_alloc(64, ...) or mmap");
  if (buffer_bytes < static_cast<size_t>(job.layout.bytes)) {
    return report.about(job.arguments.result + 1)
        .fail(MHA_ERROR_BUFFER_TOO_SMALL,
              "buffer_bytes is %zu, but the packed layer needs %lld; call %s for the size",
              buffer_bytes, lld(job.layout.bytes), size_query);
  }
  if (const mha_status status =
          check_range(report.about(job.arguments.weights), job.shape, job.kind, job.weights))
    return status;
  pack_layer(job.shape, job.kind, job.layout, job.weights, buffer);
  return MHA_OK;
}

mha_status clear_layer(Report report, const PackArguments &arguments, mha_layer **layer) {
  if (!layer)
    return report.about(arguments.result)
        .fail(MHA_ERROR_NULL_POINTER, "layer is NULL; pass the address of a pointer to a layer");
  *layer = nullptr;
  return MHA_OK;
}

mha_status create(Report report, const PackJob &job, mha_layer **layer) {
  const Kernels *kernels;
  if (const mha_status status = choose_kernels(report.about(job.arguments.options),
                                               job.options.instruction_set, &kernels))
    return status;

  const mha_allocator allocator = job.options.allocator
                                      ? *job.options.allocator
                                      : mha_allocator{nullptr, allocate_default, release_default};
  const Count bytes = Count(job.layout.bytes) + Count(static_cast<int64_t>(layer_bytes + 63));
  if (bytes.overflows())
    return report.fail(MHA_ERROR_TOO_LARGE,
                       "the packed layer would exceed the address space; set smaller dimensions");
  void *const block = allocator.allocate(allocator.context, static_cast<size_t>(bytes.value()));
  if (!block)
    return report.about(0).fail(
        MHA_ERROR_OUT_OF_MEMORY,
        "the allocator returned NULL for the %lld bytes of the packed layer; free memory",
        lld(bytes.value()));
  if (const mha_status status =
          check_range(report.about(job.arguments.weights), job.shape, job.kind, job.weights)) {
    allocator.release(allocator.context, block);
    return status;
  }
  unsigned char *const packed = static_cast<unsigned char *>(align64(block)) + layer_bytes;
  pack_layer(job.shape, job.kind, job.layout, job.weights, packed);
  mha_layer *const made =
      make_layer(block, job.shape, job.kind, job.layout, packed, job.options, kernels);
  made->allocator = allocator;
  made->block = block;
  *layer = made;
  return MHA_OK;
}

}  // namespace

}  // namespace mha

using namespace mha;

mha_status mha_layer_pack_size(const mha_layer_config *config, const mha_layer_weights *weights,
                               const mha_layer_options *options, size_t *bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  return write_size(report.about(layer_arguments.result), static_cast<size_t>(job.layout.bytes),
                    bytes);
}

mha_status mha_linear_pack_size(const mha_linear_weights *weights, const mha_layer_options *options,
                                size_t *bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare_linear(report, weights, options, &job)) return status;
  return write_size(report.about(linear_arguments.result), static_cast<size_t>(job.layout.bytes),
                    bytes);
}

mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights,
                          const mha_layer_options *options, void *buffer, size_t buffer_bytes,
                          mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  return pack(report.about(layer_arguments.result), job, "mha_layer_pack_size", buffer,
              buffer_bytes);
}

mha_status mha_linear_pack(const mha_linear_weights *weights, const mha_layer_options *options,
                           void *buffer, size_t buffer_bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare_linear(report, weights, options, &job)) return status;
  return pack(report.about(linear_arguments.result), job, "mha_linear_pack_size", buffer,
              buffer_bytes);
}

size_t mha_layer_view_size(void) { return layer_bytes + 63; }

mha_status mha_layer_view(const void *buffer, size_t buffer_bytes, const mha_layer_options *options,
                          void *storage, size_t storage_bytes, const mha_layer **layer,
                          mha_error *error) {
  Report report(error);
  LayerShape shape;
  PackedKind kind;
  PackedLayout layout;
  if (const mha_status status = read_packed(report, buffer, buffer_bytes, &shape, &kind, &layout))
    return status;
  mha_layer_options read;
  if (const mha_status status = read_options(report.about(3), options, &read)) return status;
  if ((kind == PackedKind::plain_f32) != (read.sgemm != nullptr)) {
    return report.about(3).fail(MHA_ERROR_PACKED_FORMAT, "options.sgemm is %s",
                                read.sgemm ? "given, but the layer was packed without one; set it "
                                             "to NULL, or pack the layer again with it"
                                           : "NULL, but the layer was packed with one; set it, or "
                                             "pack the layer again without it");
  }
  if (!storage)
    return report.about(4).fail(MHA_ERROR_NULL_POINTER,
                                "storage is NULL; pass memory of mha_layer_view_size bytes");
  if (storage_bytes < mha_layer_view_size()) {
    return report.about(5).fail(MHA_ERROR_BUFFER_TOO_SMALL,
                                "storage_bytes is %zu, but the layer object needs %zu; call "
                                "mha_layer_view_size for the size",
                                storage_bytes, mha_layer_view_size());
  }
  if (!layer)
    return report.about(6).fail(MHA_ERROR_NULL_POINTER,
                                "layer is NULL; pass the address of a pointer to a layer");
  const Kernels *kernels;
  if (const mha_status status = choose_kernels(report.about(3), read.instruction_set, &kernels))
    return status;
  *layer = make_layer(storage, shape, kind, layout, buffer, read, kernels);
  return MHA_OK;
}

mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error) {
  Report report(error);
  LayerShape shape;
  PackedKind kind;
  PackedLayout layout;
  if (const mha_status status = read_packed(report, buffer, buffer_bytes, &shape, &kind, &layout))
    return status;
  if (!packed_checksum_holds(kind, layout, buffer)) {
    return report.fail(
        MHA_ERROR_PACKED_CHECKSUM,
        "the packed weights are damaged (their checksum is wrong); pack the layer again");
  }
  return MHA_OK;
}

mha_status mha_layer_create(const mha_layer_config *config, const mha_layer_weights *weights,
                            const mha_layer_options *options, mha_layer **layer, mha_error *error) {
  Report report(error);
  if (const mha_status status = clear_layer(report, layer_arguments, layer)) return status;
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  return create(report, job, layer);
}

mha_status mha_linear_create(const mha_linear_weights *weights, const mha_layer_options *options,
                             mha_layer **layer, mha_error *error) {
  Report report(error);
  if (const mha_status status = clear_layer(report, linear_arguments, layer)) return status;
  PackJob job;
  if (const mha_status status = prepare_linear(report, weights, options, &job)) return status;
  return create(report, job, layer);
}

void mha_layer_destroy(mha_layer *layer) {
  if (!layer || !is_layer(layer) || !layer->block) return;
  const mha_allocator allocator = layer->allocator;
  layer->magic = 0;
  allocator.release(allocator.context, layer->block);
}

mha_status mha_layer_shape(const mha_layer *layer, mha_layer_config *config, mha_error *error) {
  Report report(error);
  if (const mha_status status = check_layer(report, layer)) return status;
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
  filled.weight_type = type_of(layer->storage);
  filled.gate = shape.gate;
  filled.gate_dim = shape.gate_dim;
  filled.arithmetic = number_of(shape.arithmetic);
  return write_struct(report.about(2), "mha_layer_config", filled, config);
}
