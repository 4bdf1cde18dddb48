// The checks of a layer go from its configuration (check_kept, resolve_heads, resolve_gate) to
// the combination of matrices that the caller gives (check_combination), and then to each matrix
// (check_matrices). No array is read. Weights that are too large for their type are found when they
// are packed (check_range).
//
// Defaults depend on other fields, which have to be resolved before:
//   num_kv_heads   num_heads
//   head_dim       query_dim / num_heads
//   head_dim_v     head_dim
//   gate_dim       head_dim_v, if there is a gate
//   key_dim        query_dim, but 0 if W_Q is given alone
//   value_dim      key_dim
//   output_dim     query_dim, but the width of the context without W_O
//   scale          1 / sqrt(head_dim)
#include "layer.h"

#include <algorithm>
#include <initializer_list>

#include "../base/structs.h"
#include "../cpu.h"
#include "rules.h"

namespace mha {
namespace {

// Weights of these types are codes, with scales.
bool is_coded(uint32_t type) { return has_codes(storage_of_type(type)); }

// How weights are kept: integer arithmetic needs integers, and bf16 arithmetic bf16, which can both
// be multiplied in float32, too; and only integers are in groups that share a scale.
mha_status check_kept(Report report, const mha_weight_format &kept) {
  MHA_TRY(check_fields(Rules{report, "format."}, kept));
  const bool is_coded_type = is_coded(kept.type);
  if (kept.arithmetic == MHA_ARITHMETIC_BF16 && kept.type != MHA_TYPE_BF16)
    return report.invalid(
        "format.arithmetic is MHA_ARITHMETIC_BF16 (%u), but format.type is %u; set format.type to "
        "MHA_TYPE_BF16 (3), or format.arithmetic to MHA_ARITHMETIC_F32 (0)",
        kept.arithmetic, kept.type);
  if (kept.arithmetic != MHA_ARITHMETIC_F32 && kept.arithmetic != MHA_ARITHMETIC_BF16 &&
      !is_coded_type)
    return report.invalid(
        "format.arithmetic is %u, which needs integer weights, but format.type is %u; set "
        "format.type to MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 (5), or format.arithmetic to "
        "MHA_ARITHMETIC_F32 (0)",
        kept.arithmetic, kept.type);
  if (kept.group_size != 0 && !is_coded_type)
    return report.invalid(
        "format.group_size is %u, but format.type is %u; set format.type to MHA_TYPE_INT8 (4) or "
        "MHA_TYPE_INT4 (5), or format.group_size to 0",
        kept.group_size, kept.type);
  if (kept.scale_type > MHA_TYPE_F32 && kept.group_size == 0 && kept.type != MHA_TYPE_INT4)
    return report.invalid(
        "format.scale_type is %u, but the weights are not in groups; set format.group_size, or "
        "format.scale_type to 0",
        kept.scale_type);
  const bool has_high_bits = high_bits_of(storage_of_type(kept.type)) != 0;
  if (has_high_bits && kept.group_size == 0)
    return report.invalid(
        "format.group_size is 0, but format.type is %u, whose weights are in groups; set "
        "format.group_size to 16, 32, 64 or 128",
        kept.type);
  if ((has_high_bits || kept.scale_type == MHA_TYPE_INT8) && kept.arithmetic == MHA_ARITHMETIC_F32)
    return report.invalid(
        "format.arithmetic is MHA_ARITHMETIC_F32 (0), but format.%s is %u, which integer "
        "arithmetic takes; set format.arithmetic to MHA_ARITHMETIC_INT8 (%u) or INT16 (%u)",
        has_high_bits ? "type" : "scale_type", has_high_bits ? kept.type : kept.scale_type,
        MHA_ARITHMETIC_INT8, MHA_ARITHMETIC_INT16);
  return MHA_OK;
}

// A gate scales each head of the context as a whole (gate_dim 1) or each of its columns.
mha_status resolve_gate(Report report, const mha_layer_config &config, LayerShape *shape) {
  if (config.gate == MHA_FUNCTION_NONE) {
    if (config.gate_dim == 0) return MHA_OK;
    return report.shape(
        "gate_dim is %lld, but gate is MHA_FUNCTION_NONE (0); set gate_dim to 0, or set gate",
        lld(config.gate_dim));
  }
  shape->gate = config.gate;
  shape->gate_dim = config.gate_dim != 0 ? config.gate_dim : shape->head_dim_v;
  if (shape->gate_dim == 1 || shape->gate_dim == shape->head_dim_v) return MHA_OK;
  return report.shape("gate_dim is %lld; set it to 1 or to head_dim_v (%lld)", lld(config.gate_dim),
                      lld(shape->head_dim_v));
}

// The heads and their widths. Query heads share kv heads in groups of equal size, and all queries
// of a row have at most 2^31 - 1 columns, as all contexts have.
mha_status resolve_heads(Report report, const mha_layer_config &config, LayerShape *shape) {
  shape->num_heads = config.num_heads;
  shape->num_kv_heads = config.num_kv_heads ? config.num_kv_heads : config.num_heads;
  MHA_TRY(
      Rules{report}.divides("num_kv_heads", shape->num_kv_heads, "num_heads", shape->num_heads));
  // The heads share the width of the query unless their own width is set.
  shape->head_dim = config.head_dim;
  if (shape->head_dim == 0) {
    if (config.query_dim % config.num_heads != 0)
      return report.shape(
          "num_heads is %lld, which does not divide query_dim, %lld; set num_heads to a divisor of "
          "it, or set head_dim",
          lld(config.num_heads), lld(config.query_dim));
    shape->head_dim = config.query_dim / config.num_heads;
  }
  shape->head_dim_v = config.head_dim_v ? config.head_dim_v : shape->head_dim;
  // All heads side by side have the bound of every dimension. The products are exact, because both
  // factors are below 2^31.
  const int64_t widest = shape->num_heads * std::max(shape->head_dim, shape->head_dim_v);
  if (widest > INT32_MAX)
    return report.too_large("num_heads * %s is %lld; set them to a product of at most %d",
                            shape->head_dim < shape->head_dim_v ? "head_dim_v" : "head_dim",
                            lld(widest), INT32_MAX);
  return MHA_OK;
}

// The name of the first of three matrices for which a condition holds, for messages.
const char *first_of(bool holds_for_q, bool holds_for_k) {
  return holds_for_q ? "w_q" : holds_for_k ? "w_k" : "w_v";
}

// A gate has a matrix of its own or, as gate_place says, columns of W_Q.
mha_status check_gate(Report report, const mha_layer_weights &weights, const LayerShape &shape) {
  const bool has_gate = shape.gate != MHA_FUNCTION_NONE,
             is_in_q = weights.gate_place == MHA_GATE_IN_W_Q;
  if (!has_gate && (weights.w_g.data || is_in_q))
    return report.invalid(
        "%s, but mha_layer_config.gate is MHA_FUNCTION_NONE (0); set gate, or leave it out",
        is_in_q ? "gate_place is MHA_GATE_IN_W_Q" : "w_g.data is given");
  if (has_gate && !is_in_q && !weights.w_g.data)
    return report.null(
        "w_g.data is NULL, but the layer has a gate; set it or, if the gate's columns are in w_q "
        "or w_qkv, set gate_place to MHA_GATE_IN_W_Q");
  if (weights.w_g.data && is_in_q)
    return report.invalid(
        "w_g.data is given, but gate_place is MHA_GATE_IN_W_Q; leave one of them out");
  if (weights.w_g.bias && !weights.w_g.data)
    return report.invalid(
        "w_g.bias is given, but w_g.data is NULL; leave the bias NULL: with MHA_GATE_IN_W_Q, the "
        "gate's biases follow each head's in w_q.bias or w_qkv.bias");
  return MHA_OK;
}

// Which matrices are given together. A layer has either W_Q, W_K and W_V, or W_QKV for all three,
// or W_Q alone if it reads another layer's cache. Biases belong to matrices that are given.
mha_status check_combination(Report report, const mha_layer_weights &weights,
                             const LayerShape &shape) {
  const bool has_q = weights.w_q.data, has_k = weights.w_k.data, has_v = weights.w_v.data,
             has_qkv = weights.w_qkv.data;
  const bool has_any_matrix = has_q || has_k || has_v, has_q_alone = has_q && !has_k && !has_v;
  if (!has_any_matrix && !has_qkv)
    return report.null(
        "w_q.data, w_k.data, w_v.data and w_qkv.data are NULL; set the first three, or w_qkv.data, "
        "or w_q.data alone");
  if (has_any_matrix && has_qkv)
    return report.invalid(
        "w_qkv.data is given together with %s.data; set either w_q.data, w_k.data and w_v.data, or "
        "w_qkv.data",
        first_of(has_q, has_k));
  if (has_any_matrix && !(has_q && has_k && has_v) && !has_q_alone)
    return report.null("%s.data is NULL; set w_q.data, w_k.data and w_v.data, or w_q.data alone",
                       first_of(!has_q, !has_k));
  // One matrix has one input.
  if (has_qkv && !shape.has_one_input_width())
    return report.shape(
        "w_qkv.data is given, but query_dim %lld, key_dim %lld and value_dim %lld differ; give "
        "w_q, w_k and w_v instead",
        lld(shape.query_dim), lld(shape.key_dim), lld(shape.value_dim));
  // Biases may be separate even if the matrices are one, and the other way round, but not both. A
  // matrix may lack a bias, but not a bias its matrix.
  if (weights.w_qkv.bias && (weights.w_q.bias || weights.w_k.bias || weights.w_v.bias))
    return report.invalid(
        "w_qkv.bias is given together with %s.bias; set either w_qkv.bias, or the biases of w_q, "
        "w_k and w_v",
        first_of(weights.w_q.bias, weights.w_k.bias));
  if (has_q_alone && (weights.w_k.bias || weights.w_v.bias || weights.w_qkv.bias))
    return report.invalid(
        "%s.bias is given, but w_k.data and w_v.data are NULL; set both matrices, or leave the "
        "bias NULL",
        weights.w_k.bias   ? "w_k"
        : weights.w_v.bias ? "w_v"
                           : "w_qkv");
  MHA_TRY(Rules{report}.needs({"w_o.data", weights.w_o.data}, {{"w_o.bias", weights.w_o.bias}}));
  return check_gate(report, weights, shape);
}

// One of the caller's matrices, with the name of its field, as "w_q.", and the dimensions that it
// should have.
struct GivenMatrix {
  const char *name;
  const mha_matrix &matrix;
  int64_t in, out;
};

// The type of the caller's matrices. Floats can be packed as any type, codes only as they are.
mha_status check_given_type(Report report, uint32_t type, uint32_t layout, uint32_t weight_type) {
  const bool has_high_bits = high_bits_of(storage_of_type(weight_type)) != 0;
  if (has_high_bits && type != MHA_TYPE_INT8)
    return report.invalid(
        "type is %u, but format.type is %u, which takes a quantiser's codes of MHA_TYPE_INT8 (4) "
        "alone; give such codes, or set format.type to another type",
        type, weight_type);
  // Another type would need numbers to round, and codes have lost these.
  if (is_coded(type) && weight_type != type && !has_high_bits) {
    const char *const name = type == MHA_TYPE_INT8 ? "INT8" : "INT4";
    return report.invalid(
        "type is MHA_TYPE_%s (%u), whose weights are packed unchanged, but format.type is %u; set "
        "format.type to MHA_TYPE_%s (%u), too",
        name, type, weight_type, name, type);
  }
  if (type == MHA_TYPE_INT4 && layout != MHA_LAYOUT_OUT_IN)
    return report.invalid(
        "layout is MHA_LAYOUT_IN_OUT (0), but bytes of MHA_TYPE_INT4 hold pairs of inputs; set "
        "layout to MHA_LAYOUT_OUT_IN (1)");
  return MHA_OK;
}

// Codes need scales, and other types must not have any, for they would be ignored.
mha_status check_scales(Report report, uint32_t type, uint32_t scale_type,
                        const GivenMatrix &given) {
  const mha_matrix &m = given.matrix;
  const Rules rules = {report, given.name};
  if (is_coded(type) && m.data)
    MHA_TRY(rules.given("scales", m.scales, "the scales of the matrix, as codes need them"));
  MHA_TRY(rules.needs({"data", m.data}, {{"scales", m.scales}, {"row_stride", m.row_stride}}));
  MHA_TRY(rules.needs({"scales", m.scales}, {{"offsets", m.offsets}}));
  const bool are_in_blocks = scale_type == MHA_TYPE_INT8;
  if (are_in_blocks && m.scales)
    MHA_TRY(rules.given("block_scales", m.block_scales, "the factors of scales of MHA_TYPE_INT8"));
  if (are_in_blocks && m.offsets)
    MHA_TRY(
        rules.given("block_offsets", m.block_offsets, "the factors of offsets of MHA_TYPE_INT8"));
  MHA_TRY(rules.needs({"scales", m.scales}, {{"block_scales", m.block_scales}}));
  MHA_TRY(rules.needs({"block_scales", m.block_scales}, {{"block_offsets", m.block_offsets}}));
  MHA_TRY(rules.needs({"offsets", m.offsets}, {{"block_offsets", m.block_offsets}}));
  if (m.block_scales && !are_in_blocks)
    return report.invalid(
        "%sblock_scales is given, but format.scale_type is %u; set it to MHA_TYPE_INT8 (4), or "
        "leave the factors NULL",
        given.name, scale_type);
  if (!m.scales || is_coded(type)) return MHA_OK;
  return report.invalid(
      "%sscales is given, but type is %u; set type to MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 (5), or "
      "leave the scales NULL",
      given.name, type);
}

// The stride has to step over a row, and the whole matrix has to fit into memory.
mha_status check_stride(Report report, uint32_t type, uint32_t layout, const GivenMatrix &given) {
  const bool in_out = layout == MHA_LAYOUT_IN_OUT;
  const int64_t width = in_out ? given.out : given.in, rows = in_out ? given.in : given.out,
                stride = given.matrix.row_stride;
  if (stride != 0 && stride < width)
    return report.invalid(
        "%srow_stride is %lld, less than the width of a row, %lld; set it to at least that, or to "
        "0 for contiguous rows",
        given.name, lld(stride), lld(width));
  if (type == MHA_TYPE_INT4 && stride % 2 != 0)
    return report.invalid(
        "%srow_stride is %lld, but rows of MHA_TYPE_INT4 begin at whole bytes; set it to an even "
        "number, or to 0 for contiguous rows",
        given.name, lld(stride));
  // Elements are counted as floats here, whatever their type is.
  if ((Count(stride) * Count(rows) * Count(sizeof(float))).overflows())
    return report.too_large(
        "%srow_stride is %lld, with which %lld rows exceed the address space; set it to less",
        given.name, lld(stride), lld(rows));
  return MHA_OK;
}

// All matrices of a layer, which have one type and one layout.
mha_status check_matrices(Report report, uint32_t type, uint32_t layout,
                          const mha_weight_format &kept,
                          std::initializer_list<GivenMatrix> matrices) {
  MHA_TRY(check_given_type(report, type, layout, kept.type));
  if (kept.scale_type > MHA_TYPE_F32 && !is_coded(type))
    return report.invalid(
        "format.scale_type is %u, but type is %u, whose scales are made in packing; set "
        "format.scale_type to MHA_TYPE_F32 (1)",
        kept.scale_type, type);
  for (const GivenMatrix &given : matrices) {
    MHA_TRY(check_scales(report, type, kept.scale_type, given));
    if (given.matrix.offsets && type == MHA_TYPE_INT8 && kept.group_size == 0)
      return report.invalid(
          "%soffsets is given, but INT8 with format.group_size 0 has no groups; set that, or "
          "offsets to NULL",
          given.name);
    MHA_TRY(check_stride(report, type, layout, given));
  }
  return MHA_OK;
}

// The widths of inputs and output. Their defaults depend on which matrices are given: inputs are as
// wide as the query, and without W_O the output is the context.
mha_status resolve_widths(Report report, const mha_layer_config &given, const mha_layer_weights &w,
                          LayerShape *shape) {
  shape->query_dim = given.query_dim;
  // A layer that only asks reads keys and values from another layer's cache.
  const bool only_asks = w.w_q.data && !w.w_k.data && !w.w_v.data && !w.w_qkv.data;
  shape->key_dim = given.key_dim || only_asks ? given.key_dim : given.query_dim;
  shape->value_dim = given.value_dim ? given.value_dim : shape->key_dim;
  if (only_asks && shape->value_dim != 0)
    return report.invalid(
        "key_dim is %lld and value_dim is %lld, but w_k.data and w_v.data are NULL; set both "
        "dimensions to 0, or both matrices",
        lld(given.key_dim), lld(given.value_dim));
  shape->has_output = w.w_o.data != nullptr;
  if (!shape->has_output && given.output_dim != 0)
    return report.invalid(
        "output_dim is %lld, but w_o.data is NULL; set output_dim to 0, or set the matrix",
        lld(given.output_dim));
  shape->output_dim = given.output_dim ? given.output_dim : given.query_dim;
  if (!shape->has_output) shape->output_dim = shape->context_columns();
  return MHA_OK;
}

// How the layer keeps groups, of which the default of int4 is stored as 0.
void set_groups(const mha_weight_format &format, LayerShape *shape) {
  const bool is_default =
      format.type == MHA_TYPE_INT4 && format.group_size == static_cast<uint32_t>(int4_chain);
  shape->group = is_default ? 0 : format.group_size;
  shape->scale_storage = storage_of_type(format.scale_type);
}

// The last step of both kinds of layers: the options, and then the layout of the packed buffer.
mha_status finish_job(Report report, uint32_t weight_type, const mha_layer_options *options,
                      PackJob *job) {
  const LayerShape &shape = job->form.shape;
  const Storage storage = storage_of_type(weight_type);
  MHA_TRY(read_options(report.about(job->arguments.options), options, &job->options));
  // A BLAS multiplies plain matrices of floats.
  const bool has_sgemm = job->options.sgemm != nullptr;
  if (has_sgemm && storage != Storage::f32)
    return report.invalid(
        "format.type is %u, but options.sgemm multiplies floats; set format.type to MHA_TYPE_F32 "
        "(1), or options.sgemm to NULL",
        weight_type);
  job->form.kind = {storage, shape.arithmetic != Arithmetic::f32, has_sgemm};
  // The size may overflow even for dimensions that are allowed.
  job->form.layout = packed_layout(shape, job->form.kind);
  if (job->form.layout.bytes < 0)
    return report.too_large(
        "the packed layer would exceed the address space; set smaller dimensions");
  if (has_sgemm && !shape.fits_sgemm())
    return report.too_large(
        "w_q, w_k, w_v and w_g have %lld columns together, but options.sgemm takes at most %d "
        "columns; set fewer heads, or options.sgemm to NULL",
        lld(shape.input_columns()), INT32_MAX);
  return MHA_OK;
}

}  // namespace

Arithmetic arithmetic_of(uint32_t number) {
  return number == MHA_ARITHMETIC_INT8    ? Arithmetic::int8
         : number == MHA_ARITHMETIC_INT16 ? Arithmetic::int16
         : number == MHA_ARITHMETIC_BF16  ? Arithmetic::bf16
                                          : Arithmetic::f32;
}

uint32_t number_of(Arithmetic arithmetic) {
  constexpr uint32_t numbers[] = {MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8, MHA_ARITHMETIC_INT16,
                                  MHA_ARITHMETIC_BF16};
  return numbers[static_cast<int>(arithmetic)];
}

// Fields are checked in the order in which they depend on each other: the heads, the gate, the
// widths, and then the matrices, whose sizes follow from all of these.
mha_status prepare(Report report, const mha_layer_config *config, const mha_layer_weights *weights,
                   const mha_layer_options *options, PackJob *job) {
  *job = {};
  job->arguments = layer_arguments;
  LayerShape &shape = job->form.shape;
  mha_layer_weights &w = job->weights;
  mha_layer_config given;
  const Reporter of_weights = report.about(layer_arguments.weights);
  MHA_TRY(read_struct(report, "mha_layer_config", config, &given));
  const Rules rules = {report};
  MHA_TRY(check_fields(rules, given));
  MHA_TRY(rules.size("gate_dim", given.gate_dim, 0, "1 or head_dim_v, or to 0 for head_dim_v"));
  MHA_TRY(check_kept(report, given.format));
  MHA_TRY(read_struct(of_weights, "mha_layer_weights", weights, &w));
  MHA_TRY(check_fields(Rules{of_weights}, w));
  MHA_TRY(resolve_heads(report, given, &shape));
  MHA_TRY(resolve_gate(report, given, &shape));
  MHA_TRY(resolve_widths(report, given, w, &shape));
  shape.arithmetic = arithmetic_of(given.format.arithmetic);
  // The scale is the same on every machine, for both operations are correctly rounded.
  shape.scale =
      given.scale != 0.0f ? given.scale : 1.0f / MHA_SQRTF(static_cast<float>(shape.head_dim));
  MHA_TRY(check_combination(of_weights, w, shape));
  const int64_t q_head = shape.head_dim + (w.gate_place == MHA_GATE_IN_W_Q ? shape.gate_dim : 0),
                q_columns = shape.num_heads * q_head,
                kv_columns = shape.k_columns() + shape.v_columns();
  MHA_TRY(check_matrices(of_weights, w.type, w.layout, given.format,
                         {{"w_q.", w.w_q, shape.query_dim, q_columns},
                          {"w_k.", w.w_k, shape.key_dim, shape.k_columns()},
                          {"w_v.", w.w_v, shape.value_dim, shape.v_columns()},
                          {"w_qkv.", w.w_qkv, shape.query_dim, q_columns + kv_columns},
                          {"w_o.", w.w_o, shape.output_depth(), shape.output_dim},
                          {"w_g.", w.w_g, shape.query_dim, shape.g_columns()}}));
  set_groups(given.format, &shape);
  const bool in_q = w.w_q.offsets || w.w_qkv.offsets;
  shape.offsets =
      in_q << matrix_q |
      (shape.gate_dim != 0 && (w.w_g.data ? w.w_g.offsets != nullptr : in_q)) << matrix_g |
      (w.w_k.offsets || w.w_qkv.offsets) << matrix_k |
      (w.w_v.offsets || w.w_qkv.offsets) << matrix_v | (w.w_o.offsets != nullptr) << matrix_o;
  return finish_job(report, given.format.type, options, job);
}

// A linear layer is a layer that has a W_O alone. Its messages use the names of its own struct.
mha_status prepare(Report report, const mha_linear_weights *weights,
                   const mha_layer_options *options, PackJob *job) {
  *job = {};
  job->arguments = linear_arguments;
  mha_linear_weights given;
  MHA_TRY(read_struct(report, "mha_linear_weights", weights, &given));
  const Rules rules = {report};
  MHA_TRY(check_fields(rules, given));
  MHA_TRY(check_kept(report, given.format));
  MHA_TRY(rules.given("w.data", given.w.data, "the matrix"));
  MHA_TRY(check_matrices(report, given.type, given.layout, given.format,
                         {{"w.", given.w, given.input_dim, given.output_dim}}));
  LayerShape &shape = job->form.shape;
  shape.arithmetic = arithmetic_of(given.format.arithmetic);
  shape.query_dim = given.input_dim;
  shape.output_dim = given.output_dim;
  shape.has_output = true;
  set_groups(given.format, &shape);
  shape.offsets = (given.w.offsets != nullptr) << matrix_o;
  job->weights.layout = given.layout;
  job->weights.type = given.type;
  job->weights.w_o = given.w;
  return finish_job(report, given.format.type, options, job);
}

// Called if the number at the beginning of the memory is not that of a layer at this address.
mha_status fail_no_layer(Report report, const mha_layer *layer) {
  if (!layer)
    return report.null("layer is NULL; pass a layer from mha_layer_create or mha_layer_view");
  return report.invalid(
      "layer does not point to a layer, or the layer was destroyed or moved; pass one from "
      "mha_layer_create or mha_layer_view");
}

// NULL stands for options that are all 0.
mha_status read_options(Report report, const mha_layer_options *options, mha_layer_options *read) {
  *read = {};
  if (!options) return MHA_OK;
  MHA_TRY(read_struct(report, "mha_layer_options", options, read));
  MHA_TRY(check_fields(Rules{report, "options."}, *read));
  if (read->allocator && (!read->allocator->allocate || !read->allocator->release))
    return report.null("options.allocator->%s is NULL; set both functions of the allocator",
                       read->allocator->allocate ? "release" : "allocate");
  return check_instruction_set(report, read->instruction_set);
}

}  // namespace mha
