// Layers: the checks of a configuration and its weights, and the four ways in: pack, view, verify, create. A linear layer has a W_O alone.

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

// How weights are kept, and what they are multiplied in.
mha_status check_kept(Report report, uint32_t weight_type, uint32_t arithmetic) {
  if (weight_type > MHA_TYPE_INT4)
    return report.invalid("weight_type is %u; set one of MHA_TYPE_F32 (0) to MHA_TYPE_INT4 (4)", weight_type);
  if (arithmetic > MHA_ARITHMETIC_INT16)
    return report.invalid("arithmetic is %u; set MHA_ARITHMETIC_F32 (0), MHA_ARITHMETIC_INT8 (1) or MHA_ARITHMETIC_INT16 (2)", arithmetic);
  if (arithmetic != MHA_ARITHMETIC_F32 && weight_type != MHA_TYPE_INT8 && weight_type != MHA_TYPE_INT4) {
    return report.invalid(
        "arithmetic is %u, in integers, but weight_type is %u; set weight_type to MHA_TYPE_INT8 (3) or MHA_TYPE_INT4 (4), or arithmetic"
        " to MHA_ARITHMETIC_F32 (0)",
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
    return report.invalid("query_dim is %lld; set it to the width of a row of query, at least 1", lld(config.query_dim));
  if (config.num_heads < 1) {
    return report.invalid(
        "num_heads is %lld; set it to the number of query heads, at least 1, or call mha_linear_create for a single matrix",
        lld(config.num_heads));
  }
  const NamedValue values[] = {{"query_dim", config.query_dim},   {"key_dim", config.key_dim},       {"value_dim", config.value_dim},
                               {"output_dim", config.output_dim}, {"num_heads", config.num_heads},   {"num_kv_heads", config.num_kv_heads},
                               {"head_dim", config.head_dim},     {"head_dim_v", config.head_dim_v}, {"gate_dim", config.gate_dim}};
  for (const NamedValue &value : values) {
    if (value.value < 0) return report.invalid("%s is %lld; set it to at least 1, or to 0 for its default", value.name, lld(value.value));
    if (value.value > INT32_MAX)
      return report.fail(MHA_ERROR_TOO_LARGE, "%s is %lld; the largest dimension is %d", value.name, lld(value.value), INT32_MAX);
  }
  if (const mha_status status = check_kept(report, config.weight_type, config.arithmetic)) return status;
  if (config.scale - config.scale != 0.0f) return report.invalid("scale is not finite; set a number, or 0 for 1 / sqrt(head_dim)");
  if (config.gate > MHA_GATE_SOFTPLUS)
    return report.invalid("gate is %u; set MHA_GATE_NONE (0), MHA_GATE_SIGMOID (1) or MHA_GATE_SOFTPLUS (2)", config.gate);
  return MHA_OK;
}

mha_status resolve_gate(Report report, const mha_layer_config &config, LayerShape *shape) {
  shape->gate = config.gate;
  shape->gate_dim = config.gate == MHA_GATE_NONE || config.gate_dim != 0 ? config.gate_dim : shape->head_dim_v;
  const bool is_sound = config.gate == MHA_GATE_NONE ? config.gate_dim == 0 : shape->gate_dim == 1 || shape->gate_dim == shape->head_dim_v;
  if (is_sound) return MHA_OK;
  return report.fail(MHA_ERROR_SHAPE, "gate_dim is %lld; a gate has head_dim_v (%lld) numbers or 1, and without one it is 0",
                     lld(config.gate_dim), lld(shape->head_dim_v));
}

mha_status resolve_heads(Report report, const mha_layer_config &config, LayerShape *shape) {
  shape->num_heads = config.num_heads;
  shape->num_kv_heads = config.num_kv_heads ? config.num_kv_heads : config.num_heads;
  if (shape->num_heads % shape->num_kv_heads != 0) {
    return report.fail(MHA_ERROR_SHAPE,
                       "num_kv_heads %lld does not divide num_heads %lld; set it to num_heads, or to a divisor for grouped queries",
                       lld(shape->num_kv_heads), lld(shape->num_heads));
  }
  shape->head_dim = config.head_dim;
  if (shape->head_dim == 0) {
    if (config.query_dim % config.num_heads != 0) {
      return report.fail(MHA_ERROR_SHAPE,
                         "num_heads %lld does not divide query_dim %lld; set num_heads to a divisor of it, or head_dim to a width",
                         lld(config.num_heads), lld(config.query_dim));
    }
    shape->head_dim = config.query_dim / config.num_heads;
  }
  shape->head_dim_v = config.head_dim_v ? config.head_dim_v : shape->head_dim;
  if (shape->num_heads * shape->head_dim > INT32_MAX || shape->num_heads * shape->head_dim_v > INT32_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE, "num_heads %lld * head_dim (or * head_dim_v) is larger than %d", lld(config.num_heads),
                       INT32_MAX);
  }
  return MHA_OK;
}

mha_status check_weight_forms(Report report, const mha_layer_weights &weights, const LayerShape &shape) {
  const bool has_any_matrix = weights.w_q || weights.w_k || weights.w_v, has_all_matrices = weights.w_q && weights.w_k && weights.w_v;
  if (!has_any_matrix && !weights.w_qkv)
    return report.fail(MHA_ERROR_NULL_POINTER, "there are no weights; give w_q, w_k and w_v, or w_qkv, or w_q alone");
  if (has_any_matrix && weights.w_qkv) {
    return report.invalid("w_qkv is given together with %s; give either w_q, w_k and w_v, or w_qkv",
                          weights.w_q   ? "w_q"
                          : weights.w_k ? "w_k"
                                        : "w_v");
  }
  const bool has_q_alone = weights.w_q && !weights.w_k && !weights.w_v;
  if (has_any_matrix && !has_all_matrices && !has_q_alone) {
    return report.fail(MHA_ERROR_NULL_POINTER, "%s is NULL; give all of w_q, w_k and w_v, or w_q alone",
                       !weights.w_q   ? "w_q"
                       : !weights.w_k ? "w_k"
                                      : "w_v");
  }
  if (weights.w_qkv && !shape.has_one_input_width()) {
    return report.fail(MHA_ERROR_SHAPE,
                       "w_qkv is one matrix, but query_dim %lld, key_dim %lld and value_dim %lld differ; give w_q, w_k and w_v",
                       lld(shape.query_dim), lld(shape.key_dim), lld(shape.value_dim));
  }
  if (weights.b_qkv && (weights.b_q || weights.b_k || weights.b_v))
    return report.invalid("b_qkv is given together with b_q, b_k or b_v; give one or the other");
  if (has_q_alone && (weights.b_k || weights.b_v || weights.b_qkv)) {
    return report.invalid("%s is given, but no w_k and w_v; a layer of w_q alone has b_q alone",
                          weights.b_k   ? "b_k"
                          : weights.b_v ? "b_v"
                                        : "b_qkv");
  }
  if (weights.b_o && !weights.w_o) return report.invalid("b_o is given without w_o; a bias needs its matrix");
  if (weights.w_g && shape.gate == MHA_GATE_NONE)
    return report.invalid("w_g is given, but mha_layer_config.gate is MHA_GATE_NONE; set it, or leave w_g NULL");
  if (weights.b_g && !weights.w_g)
    return report.invalid("b_g is given without w_g; without it, biases of the gate are behind those of each head in b_q");
  return MHA_OK;
}

// A matrix with what is said of it.
struct GivenMatrix {
  const char *name;
  const void *matrix;
  const float *scales;
  int64_t stride, in, out;
};

bool is_coded(uint32_t type) { return type == MHA_TYPE_INT8 || type == MHA_TYPE_INT4; }

// The type of the matrices as given, and what it can be converted to.
mha_status check_given_type(Report report, uint32_t type, uint32_t layout, uint32_t weight_type) {
  if (type > MHA_TYPE_INT4) return report.invalid("the weights' type is %u; set one of MHA_TYPE_F32 (0) to MHA_TYPE_INT4 (4)", type);
  const char *const name = type == MHA_TYPE_INT8 ? "INT8" : "INT4";
  if (is_coded(type) && weight_type != type) {
    return report.invalid("weights given as MHA_TYPE_%s are taken as they are, but weight_type is %u; set it to MHA_TYPE_%s (%u)", name,
                          weight_type, name, type);
  }
  if (type == MHA_TYPE_INT4 && layout != MHA_LAYOUT_OUT_IN)
    return report.invalid("weights given as MHA_TYPE_INT4 have pairs of inputs in a byte; give them with MHA_LAYOUT_OUT_IN");
  return MHA_OK;
}

mha_status check_scales(Report report, uint32_t type, const GivenMatrix &given) {
  if (is_coded(type) && given.matrix && !given.scales) {
    return report.fail(MHA_ERROR_NULL_POINTER, "%s_scales is NULL; %s is given as MHA_TYPE_%s, which needs its scales", given.name,
                       given.name, type == MHA_TYPE_INT8 ? "INT8" : "INT4");
  }
  if (given.scales && !(is_coded(type) && given.matrix)) {
    return report.invalid("%s_scales is given, but no %s of MHA_TYPE_INT8 or MHA_TYPE_INT4; set the weights' type, or leave it NULL",
                          given.name, given.name);
  }
  return MHA_OK;
}

mha_status check_stride(Report report, uint32_t type, uint32_t layout, const GivenMatrix &given) {
  const bool in_out = layout == MHA_LAYOUT_IN_OUT;
  const int64_t width = in_out ? given.out : given.in, rows = in_out ? given.in : given.out;
  if (given.stride < 0) {
    return report.invalid("%s_stride is %lld; set it to 0 for contiguous, or to at least the width of a row", given.name,
                          lld(given.stride));
  }
  if (!given.matrix) return MHA_OK;
  if (given.stride != 0 && given.stride < width) {
    return report.invalid("%s_stride is %lld, less than the width of a row, %lld; set at least that, or 0 for contiguous", given.name,
                          lld(given.stride), lld(width));
  }
  if (type == MHA_TYPE_INT4 && given.stride % 2 != 0) {
    return report.invalid("%s_stride is %lld, but rows of MHA_TYPE_INT4 begin at whole bytes; set an even number, or 0 for whole bytes",
                          given.name, lld(given.stride));
  }
  if ((Count(given.stride) * Count(rows) * Count(sizeof(float))).overflows()) {
    return report.fail(MHA_ERROR_TOO_LARGE, "%s_stride is %lld; the matrix would be larger than memory can be", given.name,
                       lld(given.stride));
  }
  return MHA_OK;
}

mha_status check_matrices(Report report, const mha_layer_weights &w, const LayerShape &shape, uint32_t weight_type) {
  const int64_t q_head = shape.head_dim + (w.w_g ? 0 : shape.gate_dim), q_columns = shape.num_heads * q_head;
  const GivenMatrix matrices[] = {
      {"w_q", w.w_q, w.w_q_scales, w.w_q_stride, shape.query_dim, q_columns},
      {"w_k", w.w_k, w.w_k_scales, w.w_k_stride, shape.key_dim, shape.k_columns()},
      {"w_v", w.w_v, w.w_v_scales, w.w_v_stride, shape.value_dim, shape.v_columns()},
      {"w_qkv", w.w_qkv, w.w_qkv_scales, w.w_qkv_stride, shape.query_dim, q_columns + shape.k_columns() + shape.v_columns()},
      {"w_o", w.w_o, w.w_o_scales, w.w_o_stride, shape.output_depth(), shape.output_dim},
      {"w_g", w.w_g, w.w_g_scales, w.w_g_stride, shape.query_dim, shape.g_columns()}};
  if (const mha_status status = check_given_type(report, w.type, w.layout, weight_type)) return status;
  for (const GivenMatrix &matrix : matrices) {
    if (const mha_status status = check_scales(report, w.type, matrix)) return status;
  }
  for (const GivenMatrix &matrix : matrices) {
    if (const mha_status status = check_stride(report, w.type, w.layout, matrix)) return status;
  }
  return MHA_OK;
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
mha_status resolve_shape(Report report, const mha_layer_config *config, const mha_layer_weights *weights, PackJob *job) {
  LayerShape *const shape = &job->shape;
  mha_layer_weights *const read_weights = &job->weights;
  mha_layer_config given;
  if (const mha_status status = read_struct(report, "mha_layer_config", config, &given)) return status;
  if (const mha_status status = check_config(report, given)) return status;
  if (const mha_status status = read_struct(report.about(weights_argument), "mha_layer_weights", weights, read_weights)) return status;
  if (const mha_status status = check_layout(report.about(weights_argument), read_weights->layout)) return status;
  job->storage = static_cast<Storage>(given.weight_type);
  *shape = {};
  shape->arithmetic = static_cast<Arithmetic>(given.arithmetic);
  if (const mha_status status = resolve_heads(report, given, shape)) return status;
  if (const mha_status status = resolve_gate(report, given, shape)) return status;
  shape->query_dim = given.query_dim;
  const bool only_asks = read_weights->w_q && !read_weights->w_k && !read_weights->w_v && !read_weights->w_qkv;
  shape->key_dim = given.key_dim || only_asks ? given.key_dim : given.query_dim;
  shape->value_dim = given.value_dim ? given.value_dim : shape->key_dim;
  if (only_asks && shape->value_dim != 0) {
    return report.invalid("key_dim is %lld and value_dim %lld, but there are no w_k and w_v; without them set both to 0",
                          lld(given.key_dim), lld(given.value_dim));
  }
  shape->has_output = read_weights->w_o != nullptr;
  shape->output_dim = !shape->has_output ? shape->context_columns() : given.output_dim ? given.output_dim : given.query_dim;
  if (!shape->has_output && given.output_dim != 0) {
    return report.invalid("output_dim is %lld, but there is no w_o; without it the output has num_heads * head_dim_v columns",
                          lld(given.output_dim));
  }
  // Both operations correctly rounded.
  shape->scale = given.scale != 0.0f ? given.scale : 1.0f / MHA_SQRTF(static_cast<float>(shape->head_dim));
  if (const mha_status status = check_weight_forms(report.about(weights_argument), *read_weights, *shape)) return status;
  return check_matrices(report.about(weights_argument), *read_weights, *shape, given.weight_type);
}

mha_status finish_job(Report report, const mha_layer_options *options, PackJob *job) {
  const PackArguments &arguments = job->arguments;
  if (const mha_status status = read_options(report.about(arguments.options), options, &job->options)) return status;
  if (job->options.sgemm && job->storage != Storage::f32) {
    return report.invalid("weight_type is %u, but options.sgemm multiplies floats; set weight_type to MHA_TYPE_F32 (0) or sgemm to NULL",
                          static_cast<uint32_t>(job->storage));
  }
  job->kind = job->options.sgemm ? PackedKind::plain_f32 : kind_of(job->storage, job->shape.arithmetic);
  job->layout = packed_layout(job->shape, job->kind);
  if (job->layout.bytes < 0 || static_cast<uint64_t>(job->layout.bytes) > PTRDIFF_MAX)
    return report.fail(MHA_ERROR_TOO_LARGE, "the packed layer would be larger than memory can be");
  if (job->options.sgemm && !job->shape.fits_sgemm()) {
    return report.fail(MHA_ERROR_TOO_LARGE, "the matrices of the inputs have more than %d columns together, which sgemm can't be asked for",
                       INT32_MAX);
  }
  return MHA_OK;
}

mha_status prepare(Report report, const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                   PackJob *job) {
  job->arguments = layer_arguments;
  if (const mha_status status = resolve_shape(report, config, weights, job)) return status;
  return finish_job(report, options, job);
}

mha_status prepare_linear(Report report, const mha_linear_weights *weights, const mha_layer_options *options, PackJob *job) {
  job->arguments = linear_arguments;
  mha_linear_weights given;
  if (const mha_status status = read_struct(report, "mha_linear_weights", weights, &given)) return status;
  const struct {
    const char *name, *what;
    int64_t value;
  } dims[] = {{"input_dim", "x", given.input_dim}, {"output_dim", "y", given.output_dim}};
  for (const auto &dim : dims) {
    if (dim.value < 1)
      return report.invalid("%s is %lld; set it to the width of a row of %s, at least 1", dim.name, lld(dim.value), dim.what);
    if (dim.value > INT32_MAX)
      return report.fail(MHA_ERROR_TOO_LARGE, "%s is %lld; the largest dimension is %d", dim.name, lld(dim.value), INT32_MAX);
  }
  if (const mha_status status = check_kept(report, given.weight_type, given.arithmetic)) return status;
  if (const mha_status status = check_layout(report, given.layout)) return status;
  if (!given.w) return report.fail(MHA_ERROR_NULL_POINTER, "w is NULL; pass the matrix");
  const GivenMatrix matrix = {"w", given.w, given.w_scales, given.w_stride, given.input_dim, given.output_dim};
  if (const mha_status status = check_given_type(report, given.type, given.layout, given.weight_type)) return status;
  if (const mha_status status = check_scales(report, given.type, matrix)) return status;
  if (const mha_status status = check_stride(report, given.type, given.layout, matrix)) return status;
  job->storage = static_cast<Storage>(given.weight_type);
  job->shape = {};
  job->shape.arithmetic = static_cast<Arithmetic>(given.arithmetic);
  job->shape.query_dim = given.input_dim;
  job->shape.output_dim = given.output_dim;
  job->shape.has_output = true;
  job->weights = {};
  job->weights.layout = given.layout;
  job->weights.type = given.type;
  job->weights.w_o = given.w;
  job->weights.b_o = given.bias;
  job->weights.w_o_stride = given.w_stride;
  job->weights.w_o_scales = given.w_scales;
  return finish_job(report, options, job);
}

// malloc, but on huge pages of 2 MiB where the layer is large: otherwise most of the time of creating one goes into the page faults at the
// first write to each 4 KiB.
void *allocate_block(size_t bytes) {
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
void *allocate_default(void *, size_t bytes) {
  const int before = errno;  // which a refusal sets
  void *const memory = allocate_block(bytes);
  errno = before;
  return memory;
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
  layer.magic = magic_at(made);
  memcpy(static_cast<void *>(made), &layer, sizeof layer);
  return made;
}

constexpr size_t layer_bytes = (sizeof(mha_layer) + 63) / 64 * 64;

}  // namespace

mha_status fail_no_layer(Report report, const mha_layer *layer) {
  if (!layer) return report.fail(MHA_ERROR_NULL_POINTER, "layer is NULL; pass a layer of mha_layer_create or mha_layer_view");
  return report.invalid("layer points to no layer, or to one that was destroyed or moved; pass one of mha_layer_create or mha_layer_view");
}

mha_status read_options(Report report, const mha_layer_options *options, mha_layer_options *read) {
  *read = {};
  if (!options) return MHA_OK;
  if (const mha_status status = read_struct(report, "mha_layer_options", options, read)) return status;
  if (read->reserved != 0) return report.invalid("mha_layer_options.reserved is not 0; set it to 0");
  if (read->allocator && (!read->allocator->allocate || !read->allocator->release))
    return report.fail(MHA_ERROR_NULL_POINTER, "the allocator's allocate or release is NULL; give both");
  return check_instruction_set(report, read->instruction_set);
}

namespace {

mha_status pack(Report report, const PackJob &job, const char *size_query, void *buffer, size_t buffer_bytes) {
  if (!buffer) return report.fail(MHA_ERROR_NULL_POINTER, "buffer is NULL; pass memory of %s bytes, aligned to 64", size_query);
  if (reinterpret_cast<uintptr_t>(buffer) % 64 != 0)
    return report.invalid("buffer is not aligned to 64 bytes; allocate it with aligned_alloc(64, ...) or mmap");
  if (buffer_bytes < static_cast<size_t>(job.layout.bytes)) {
    return report.about(job.arguments.result + 1).fail(MHA_ERROR_BUFFER_TOO_SMALL,
                                                       "buffer_bytes is %zu, the packed layer needs %lld; ask %s", buffer_bytes,
                                                       lld(job.layout.bytes), size_query);
  }
  if (const mha_status status = check_range(report.about(job.arguments.weights), job.shape, job.kind, job.weights)) return status;
  pack_layer(job.shape, job.kind, job.layout, job.weights, buffer);
  return MHA_OK;
}

mha_status clear_layer(Report report, const PackArguments &arguments, mha_layer **layer) {
  if (!layer) return report.about(arguments.result).fail(MHA_ERROR_NULL_POINTER, "layer is NULL; pass where to write the layer");
  *layer = nullptr;
  return MHA_OK;
}

mha_status create(Report report, const PackJob &job, mha_layer **layer) {
  const Kernels *kernels;
  if (const mha_status status = choose_kernels(report.about(job.arguments.options), job.options.instruction_set, &kernels)) return status;

  const mha_allocator allocator =
      job.options.allocator ? *job.options.allocator : mha_allocator{nullptr, allocate_default, release_default};
  const Count bytes = Count(job.layout.bytes) + Count(static_cast<int64_t>(layer_bytes + 63));
  if (bytes.overflows()) return report.fail(MHA_ERROR_TOO_LARGE, "the packed layer would be larger than memory can be");
  void *const block = allocator.allocate(allocator.context, static_cast<size_t>(bytes.value()));
  if (!block)
    return report.about(0).fail(MHA_ERROR_OUT_OF_MEMORY, "the allocator has no %lld bytes for the packed layer", lld(bytes.value()));
  if (const mha_status status = check_range(report.about(job.arguments.weights), job.shape, job.kind, job.weights)) {
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

}  // namespace

}  // namespace mha

using namespace mha;

mha_status mha_layer_pack_size(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                               size_t *bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  return write_size(report.about(layer_arguments.result), static_cast<size_t>(job.layout.bytes), bytes);
}

mha_status mha_linear_pack_size(const mha_linear_weights *weights, const mha_layer_options *options, size_t *bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare_linear(report, weights, options, &job)) return status;
  return write_size(report.about(linear_arguments.result), static_cast<size_t>(job.layout.bytes), bytes);
}

mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options, void *buffer,
                          size_t buffer_bytes, mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  return pack(report.about(layer_arguments.result), job, "mha_layer_pack_size", buffer, buffer_bytes);
}

mha_status mha_linear_pack(const mha_linear_weights *weights, const mha_layer_options *options, void *buffer, size_t buffer_bytes,
                           mha_error *error) {
  Report report(error);
  PackJob job;
  if (const mha_status status = prepare_linear(report, weights, options, &job)) return status;
  return pack(report.about(linear_arguments.result), job, "mha_linear_pack_size", buffer, buffer_bytes);
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
  if (const mha_status status = read_options(report.about(3), options, &read)) return status;
  if ((kind == PackedKind::plain_f32) != (read.sgemm != nullptr)) {
    return report.about(3).fail(MHA_ERROR_PACKED_FORMAT, "the layer was packed for %s",
                                read.sgemm ? "the library's own kernels; leave options.sgemm NULL or pack it again with sgemm"
                                           : "a BLAS; give options.sgemm or pack it again without");
  }
  if (!storage) return report.about(4).fail(MHA_ERROR_NULL_POINTER, "storage is NULL; pass memory of mha_layer_view_size bytes");
  if (storage_bytes < mha_layer_view_size()) {
    return report.about(5).fail(MHA_ERROR_BUFFER_TOO_SMALL, "storage_bytes is %zu, the layer object needs %zu; ask mha_layer_view_size",
                                storage_bytes, mha_layer_view_size());
  }
  if (!layer) return report.about(6).fail(MHA_ERROR_NULL_POINTER, "layer is NULL; pass where to write the layer");
  const Kernels *kernels;
  if (const mha_status status = choose_kernels(report.about(3), read.instruction_set, &kernels)) return status;
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
    return report.fail(MHA_ERROR_PACKED_CHECKSUM,
                       "the packed weights are not what was packed (their checksum does not hold); pack the layer again");
  }
  return MHA_OK;
}

mha_status mha_layer_create(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                            mha_layer **layer, mha_error *error) {
  Report report(error);
  if (const mha_status status = clear_layer(report, layer_arguments, layer)) return status;
  PackJob job;
  if (const mha_status status = prepare(report, config, weights, options, &job)) return status;
  return create(report, job, layer);
}

mha_status mha_linear_create(const mha_linear_weights *weights, const mha_layer_options *options, mha_layer **layer, mha_error *error) {
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
  filled.weight_type = static_cast<uint32_t>(layer->storage);
  filled.gate = shape.gate;
  filled.gate_dim = shape.gate_dim;
  filled.arithmetic = static_cast<uint32_t>(shape.arithmetic);
  return write_struct(report.about(2), "mha_layer_config", filled, config);
}
