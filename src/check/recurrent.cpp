#include "recurrent.h"

#include "../base/structs.h"
#include "arrays.h"
#include "rules.h"
#include "sequences.h"

namespace mha {
namespace {

// What mha_sequences says of keys, positions and caches has no meaning for calls with rows alone.
mha_status read_rows(Report report, const mha_sequences *given, int64_t *batch, int64_t *rows,
                     SequenceArguments *sequences) {
  MHA_TRY(resolve_batch(report, batch));
  MHA_TRY(resolve_extent(report, "rows", "the rows of each sequence", rows));
  mha_call of_rows = {};
  of_rows.batch = *batch;
  of_rows.n_q = of_rows.n_kv = *rows;
  of_rows.sequences = given;
  if (given) {
    mha_sequences read;
    MHA_TRY(read_struct(report, "mha_sequences", given, &read));
    const Given others[] = {
        {"cu_seqlens_kv", read.cu_seqlens_kv},       {"kv_lengths", read.kv_lengths},
        {"kv_first_rows", read.kv_first_rows},       {"q_first_positions", read.q_first_positions},
        {"cache_sequences", read.cache_sequences},   {"rope_q_positions", read.rope_q_positions},
        {"rope_k_positions", read.rope_k_positions}, {"cache_lengths", read.cache_lengths},
        {"block_tables", read.block_tables}};
    for (const Given &other : others) {
      if (other.is_set)
        return report.invalid(
            "sequences.%s is given, but recurrent attention and convolutions do not use it; set it "
            "to NULL",
            other.name);
    }
  }
  return read_sequences(report, of_rows, true, 0, sequences);
}

// States are floats, `each` of them for every sequence.
mha_status check_states(const Rules &rules, const char *name, const SequenceArguments &s,
                        Count each) {
  return rules.fits(name, Count(s.batch) * each * Count(sizeof(float)));
}

// Defaults of heads and widths, and which of them fit together.
mha_status resolve_heads(const Rules &rules, mha_recurrent_args *args) {
  if (args->num_k_heads == 0) args->num_k_heads = args->num_v_heads;
  if (args->num_q_heads == 0) args->num_q_heads = args->num_k_heads;
  if (args->head_dim_v == 0) args->head_dim_v = args->head_dim;
  MHA_TRY(rules.divides("num_k_heads", args->num_k_heads, "num_v_heads", args->num_v_heads));
  if (args->num_v_heads % args->num_q_heads != 0 && args->num_q_heads % args->num_v_heads != 0)
    return rules.report.shape(
        "num_q_heads is %lld, which neither divides num_v_heads, %lld, nor is a multiple of it; "
        "set it to one of these",
        lld(args->num_q_heads), lld(args->num_v_heads));
  const bool is_one = args->decay_dim == 0 || args->decay_dim == 1;
  if (!is_one && args->decay_dim != args->head_dim)
    return rules.report.shape("decay_dim is %lld; set it to 1, or to head_dim, %lld",
                              lld(args->decay_dim), lld(args->head_dim));
  if (is_one || !args->decay.data) args->decay_dim = 1;
  return MHA_OK;
}

}  // namespace

mha_status check_recurrent(Report report, const mha_recurrent_args *given, mha_recurrent_args *read,
                           SequenceArguments *s) {
  MHA_TRY(read_struct(report, "mha_recurrent_args", given, read));
  mha_recurrent_args &args = *read;
  const Rules rules = {report};
  const Given num_snapshots = {"num_snapshots", args.num_snapshots};
  MHA_TRY(read_rows(report, args.sequences, &args.batch, &args.rows, s));
  MHA_TRY(check_fields(rules, args));
  MHA_TRY(resolve_heads(rules, &args));
  MHA_TRY(rules.needs({"decay.data", args.decay.data}, {{"a_log", args.a_log}}));
  MHA_TRY(rules.needs({"a_log", args.a_log}, {{"dt_bias", args.dt_bias}}));
  MHA_TRY(rules.needs({"beta.data", args.beta.data}, {{"beta_function", args.beta_function}}));
  MHA_TRY(rules.needs({"snapshots", args.snapshots}, {num_snapshots}));
  MHA_TRY(rules.needs(num_snapshots, {{"snapshots", args.snapshots}}));
  MHA_TRY(each_array(args, ResolveArrays{report}));
  const Count each = Count(args.num_v_heads) * Count(args.head_dim) * Count(args.head_dim_v);
  MHA_TRY(check_states(rules, "state", *s, each));
  MHA_TRY(check_states(rules, "snapshots", *s, each * Count(args.num_snapshots)));
  return check_scheduler(report, args.scheduler);
}

mha_status check_causal_conv(Report report, const mha_causal_conv_args *given,
                             mha_causal_conv_args *read, SequenceArguments *s) {
  MHA_TRY(read_struct(report, "mha_causal_conv_args", given, read));
  mha_causal_conv_args &args = *read;
  const Rules rules = {report};
  MHA_TRY(read_rows(report, args.sequences, &args.batch, &args.rows, s));
  MHA_TRY(check_fields(rules, args));
  MHA_TRY(each_array(args, ResolveArrays{report}));
  MHA_TRY(check_states(rules, "state", *s, Count(args.kernel_size) * Count(args.channels)));
  return check_scheduler(report, args.scheduler);
}

}  // namespace mha
