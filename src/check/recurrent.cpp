#include "recurrent.h"

#include "../base/structs.h"
#include "../storage.h"
#include "arrays.h"
#include "sequences.h"

namespace mha {
namespace {

constexpr int64_t max_head_dim = 1024, max_snapshots = 16, min_kernel = 2;

// What mha_sequences says of keys, positions and caches has no meaning for calls with rows alone.
mha_status read_rows(Report report, const mha_sequences *given, int64_t *batch, int64_t *rows,
                     SequenceArguments *sequences) {
  MHA_TRY(resolve_extent(report, "batch", "the number of sequences", batch));
  MHA_TRY(resolve_extent(report, "rows", "the rows of each sequence", rows));
  mha_attention_args of_rows = {};
  of_rows.batch = *batch;
  of_rows.n_q = of_rows.n_kv = *rows;
  of_rows.sequences = given;
  if (given) {
    mha_sequences read;
    MHA_TRY(read_struct(report, "mha_sequences", given, &read));
    const struct {
      const char *name;
      const void *array;
    } others[] = {
        {"cu_seqlens_kv", read.cu_seqlens_kv},      {"kv_lengths", read.kv_lengths},
        {"kv_first_rows", read.kv_first_rows},      {"q_first_positions", read.q_first_positions},
        {"cache_sequences", read.cache_sequences},  {"rope_q_positions", read.rope_q_positions},
        {"rope_k_positions", read.rope_k_positions}};
    for (const auto &other : others) {
      if (other.array)
        return report.invalid(
            "sequences.%s is given, but recurrent attention and convolutions do not use it; set it "
            "to NULL",
            other.name);
    }
  }
  return read_sequences(report, CallArguments(of_rows), true, sequences);
}

mha_status check_number(Report report, const char *name, int64_t value, int64_t least,
                        int64_t most) {
  if (value >= least && value <= most) return MHA_OK;
  return report.invalid("%s is %lld; it must be %lld to %lld", name, lld(value), lld(least),
                        lld(most));
}

// States are floats, `each` of them for every sequence.
mha_status check_states(Report report, const char *name, const SequenceArguments &s, Count each) {
  if (!(Count(s.batch) * each * Count(sizeof(float))).overflows()) return MHA_OK;
  return report.too_large("%s would exceed the address space; use smaller dimensions", name);
}

// Defaults of heads and widths, and which of them fit together.
mha_status resolve_heads(Report report, mha_recurrent_args *args) {
  MHA_TRY(check_number(report, "num_v_heads", args->num_v_heads, 1, INT32_MAX));
  MHA_TRY(check_number(report, "num_k_heads", args->num_k_heads, 0, INT32_MAX));
  MHA_TRY(check_number(report, "num_q_heads", args->num_q_heads, 0, INT32_MAX));
  MHA_TRY(check_number(report, "head_dim", args->head_dim, 1, max_head_dim));
  MHA_TRY(check_number(report, "head_dim_v", args->head_dim_v, 0, max_head_dim));
  if (args->num_k_heads == 0) args->num_k_heads = args->num_v_heads;
  if (args->num_q_heads == 0) args->num_q_heads = args->num_k_heads;
  if (args->head_dim_v == 0) args->head_dim_v = args->head_dim;
  if (args->num_v_heads % args->num_k_heads != 0)
    return report.shape(
        "num_k_heads %lld does not divide num_v_heads %lld; set it to num_v_heads or a divisor",
        lld(args->num_k_heads), lld(args->num_v_heads));
  if (args->num_v_heads % args->num_q_heads != 0 && args->num_q_heads % args->num_v_heads != 0)
    return report.shape(
        "num_q_heads %lld neither divides num_v_heads %lld nor is a multiple of it; set it to one "
        "of these",
        lld(args->num_q_heads), lld(args->num_v_heads));
  const bool is_one = args->decay_dim == 0 || args->decay_dim == 1;
  if (!is_one && args->decay_dim != args->head_dim)
    return report.shape("decay_dim is %lld; set it to 1, or to head_dim, %lld",
                        lld(args->decay_dim), lld(args->head_dim));
  if (is_one || !args->decay.data) args->decay_dim = 1;
  return MHA_OK;
}

// What is not an array of rows.
mha_status check_options(Report report, const mha_recurrent_args &args) {
  if (args.scale - args.scale != 0.0f)
    return report.invalid(
        "scale is not finite; set it to a number, or to 0 for 1 / sqrt(head_dim)");
  if (!(args.norm_epsilon >= 0.0f) || args.norm_epsilon - args.norm_epsilon != 0.0f)
    return report.invalid(
        "norm_epsilon is %g; set it to a positive finite number, or to 0 for no norm",
        static_cast<double>(args.norm_epsilon));
  if (args.a_log && !args.decay.data)
    return report.invalid(
        "a_log is given, but decay.data is NULL; give decay, or set a_log to NULL");
  if (args.dt_bias && !args.a_log)
    return report.invalid("dt_bias is given without a_log; give a_log, or set dt_bias to NULL");
  if (args.beta_function != MHA_GATE_NONE && args.beta_function != MHA_GATE_SIGMOID)
    return report.invalid("beta_function is %u; set it to MHA_GATE_SIGMOID (1) or to 0",
                          args.beta_function);
  if (args.beta_function != MHA_GATE_NONE && !args.beta.data)
    return report.invalid(
        "beta_function is %u, but beta.data is NULL; give beta, or set beta_function to 0",
        args.beta_function);
  if (args.snapshots)
    return check_number(report, "num_snapshots", args.num_snapshots, 1, max_snapshots);
  if (args.num_snapshots == 0) return MHA_OK;
  return report.invalid(
      "num_snapshots is %lld, but snapshots is NULL; give snapshots, or set num_snapshots to 0",
      lld(args.num_snapshots));
}

mha_status resolve_optional(Report report, const char *name, const Extents &extents,
                            mha_input *input) {
  return input->data ? resolve_array(report, name, extents, input)
                     : check_absent(report, name, *input);
}

}  // namespace

mha_status check_recurrent(Report report, const mha_recurrent_args *given, mha_recurrent_args *read,
                           SequenceArguments *s) {
  MHA_TRY(read_struct(report, "mha_recurrent_args", given, read));
  mha_recurrent_args &args = *read;
  MHA_TRY(read_rows(report, args.sequences, &args.batch, &args.rows, s));
  MHA_TRY(resolve_heads(report, &args));
  MHA_TRY(check_options(report, args));
  if (args.k.type == 0) args.k.type = args.q.type;
  if (args.v.type == 0) args.v.type = args.k.type;
  const int64_t batch = args.batch, rows = args.rows, heads = args.num_v_heads,
                output_heads = args.num_q_heads > heads ? args.num_q_heads : heads;
  MHA_TRY(resolve_array(report, "q", {batch, rows, args.num_q_heads, args.head_dim}, &args.q));
  MHA_TRY(resolve_array(report, "k", {batch, rows, args.num_k_heads, args.head_dim}, &args.k));
  MHA_TRY(resolve_array(report, "v", {batch, rows, heads, args.head_dim_v}, &args.v));
  MHA_TRY(resolve_optional(report, "decay", {batch, rows, heads, args.decay_dim}, &args.decay));
  MHA_TRY(resolve_optional(report, "beta", {batch, rows, heads, 1}, &args.beta));
  MHA_TRY(
      resolve_array(report, "output", {batch, rows, output_heads, args.head_dim_v}, &args.output));
  const Count each = Count(heads) * Count(args.head_dim) * Count(args.head_dim_v);
  MHA_TRY(check_states(report, "state", *s, each));
  if (args.snapshots)
    MHA_TRY(check_states(report, "snapshots", *s, each * Count(args.num_snapshots)));
  return check_scheduler(report, args.scheduler);
}

mha_status check_causal_conv(Report report, const mha_causal_conv_args *given,
                             mha_causal_conv_args *read, SequenceArguments *s) {
  MHA_TRY(read_struct(report, "mha_causal_conv_args", given, read));
  mha_causal_conv_args &args = *read;
  MHA_TRY(read_rows(report, args.sequences, &args.batch, &args.rows, s));
  MHA_TRY(check_number(report, "channels", args.channels, 1, INT32_MAX));
  MHA_TRY(check_number(report, "kernel_size", args.kernel_size, min_kernel, max_conv_kernel));
  if (args.activation != MHA_ACTIVATION_NONE && args.activation != MHA_ACTIVATION_SILU)
    return report.invalid("activation is %u; set it to MHA_ACTIVATION_SILU (%u) or to 0",
                          args.activation, MHA_ACTIVATION_SILU);
  const Extents of_rows = {args.batch, args.rows, no_extent, args.channels};
  MHA_TRY(resolve_array(report, "x", of_rows, &args.x));
  MHA_TRY(resolve_array(report, "output", of_rows, &args.output));
  MHA_TRY(check_states(report, "state", *s, Count(args.kernel_size) * Count(args.channels)));
  return check_scheduler(report, args.scheduler);
}

}  // namespace mha
