// Partials of attention over keys that lie in several places: mha_partials_merge and
// mha_partials_finish.

#include "../base/structs.h"
#include "../check/arrays.h"
#include "../check/rules.h"
#include "../check/scores.h"
#include "../cpu.h"
#include "../storage.h"

namespace mha {
namespace {

Count bytes_of_partials(Count rows, int64_t head_dim_v) {
  return rows * Count(partial_head + head_dim_v) * Count(sizeof(float));
}

// Reads, checks and resolves the arguments of mha_partials_finish. An empty call has no arrays.
mha_status read_partials(Report report, const mha_partials_args *given, Partials *partials,
                         const Kernels **kernels) {
  mha_partials_args args;
  MHA_TRY(read_struct(report, "mha_partials_args", given, &args));
  MHA_TRY(resolve_batch(report, &args.batch));
  MHA_TRY(resolve_extent(report, "n_q", "the rows of q per sequence", &args.n_q));
  const Rules rules = {report};
  MHA_TRY(check_fields(rules, args));
  const Count rows = Count(args.batch) * Count(args.num_heads) * Count(args.n_q);
  MHA_TRY(rules.fits("partials", bytes_of_partials(rows, args.head_dim_v)));
  MHA_TRY(check_row_fields(report, "output", args.output));
  if (!args.output.data && (args.output.type != 0 || !is_contiguous(args.output.strides)))
    return report.invalid(
        "output.data is NULL, but other fields of output are set; give data, or set them to 0");
  Array output = array_of("output", args.output.strides, args.batch, args.n_q, args.num_heads,
                          args.head_dim_v);
  MHA_TRY(resolve_output(report, &output));
  MHA_TRY(choose_kernels(report, args.instruction_set, kernels));
  if (args.batch == 0 || args.n_q == 0) args.batch = args.n_q = 0;
  if (args.n_q > 0)
    MHA_TRY(rules.given("partials", args.partials, "the partials that mha_attention computed"));
  if (args.n_q > 0 && !args.output.data && !args.lse)
    return report.null("output.data and lse are both NULL; pass an array for at least one");
  MHA_TRY(check_arrays(rules, args, args.num_heads));
  *partials = {args.partials,     args.batch,        args.num_heads,
               args.n_q,          args.head_dim_v,   args.sinks,
               args.head_scales,  args.output.data,  storage_of_type(args.output.type),
               output.strides[0], output.strides[1], output.strides[2],
               args.lse};
  return MHA_OK;
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_partials_merge(int64_t rows, int64_t head_dim_v, const float *left,
                              const float *right, float *result, uint32_t instruction_set,
                              mha_error *error) {
  Reporter report(error);
  const Kernels *kernels;
  MHA_TRY(resolve_extent(report, "rows", "the rows of left, right and result", &rows));
  MHA_TRY(Rules{report.about(2)}.range("head_dim_v", head_dim_v, 1, INT32_MAX,
                                       "that of the call, 1 to 2^31 - 1"));
  MHA_TRY(Rules{report}.fits("left, right and result", bytes_of_partials(Count(rows), head_dim_v)));
  const void *const arrays[] = {left, right, result};
  const char *const names[] = {"left", "right", "result"};
  for (uint32_t i = 0; rows > 0 && i < 3; ++i)
    MHA_TRY(Rules{report.about(3 + i)}.given(names[i], arrays[i], "an array of partials"));
  MHA_TRY(choose_kernels(report.about(6), instruction_set, &kernels));
  kernels->merge_partials(left, right, rows, head_dim_v, result);
  return MHA_OK;
}

mha_status mha_partials_finish(const mha_partials_args *args, mha_error *error) {
  Reporter report(error);
  Partials partials;
  const Kernels *kernels;
  MHA_TRY(read_partials(report, args, &partials, &kernels));
  kernels->finish_partials(partials);
  return MHA_OK;
}
