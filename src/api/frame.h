// What all entry points of calls have in common. A call is a struct with workspace_bytes, and with
// these functions beside it:
//
//   make_call     reads the arguments, checks all that needs no data, and plans the call
//   has_no_work   whether it is empty
//   check_data    what a size query does not need: pointers, and the contents of arrays
//   run           computes; nothing in it can fail
//   fill_info     what it costs
#pragma once

#include "../base/schedule.h"
#include "../base/structs.h"
#include "../check/arrays.h"
#include "../cpu.h"

namespace mha {

// `given` are the first parameters of the entry, the last of which has the arguments.
template <class Call, class... Given>
mha_status answer_size(mha_error *error, size_t *bytes, const Given *...given) {
  constexpr uint32_t argument = sizeof...(given);
  const Reporter report(error, argument);
  Call call;
  MHA_TRY(make_call(report, given..., &call));
  return write_size(report.about(argument + 1), static_cast<size_t>(call.workspace_bytes), bytes);
}

// Runs a call that was made. `argument` is the parameter `workspace`, and `query` the function that
// tells its size.
template <class Call>
mha_status run_made(Report report, uint32_t argument, const char *query, void *workspace,
                    size_t workspace_bytes, Call *call) {
  MHA_TRY(
      check_workspace(report, argument, query, workspace, workspace_bytes, call->workspace_bytes));
  if (has_no_work(*call)) return MHA_OK;
  MHA_TRY(check_data(report, *call));
  run(call, align64(workspace));
  return MHA_OK;
}

template <class Call, class... Given>
mha_status run_call(mha_error *error, const char *query, void *workspace, size_t workspace_bytes,
                    const Given *...given) {
  constexpr uint32_t argument = sizeof...(given);
  const Reporter report(error, argument);
  Call call;
  MHA_TRY(make_call(report, given..., &call));
  return run_made(report, argument + 1, query, workspace, workspace_bytes, &call);
}

// How a call runs, but for its cost. A BLAS has its own arithmetic.
inline void describe_run(const Kernels &kernels, const mha_scheduler *scheduler, bool has_sgemm,
                         mha_call_info *info) {
  info->instruction_set = kernels.instruction_set;
  info->back_end = has_sgemm ? MHA_BACK_END_SGEMM : MHA_BACK_END_NATIVE;
  info->contract = has_sgemm ? 0 : contract_of_thread();
  info->num_threads = static_cast<uint32_t>(threads_of(scheduler));
}

template <class Call, class... Given>
mha_status answer_info(mha_error *error, mha_call_info *info, const Given *...given) {
  constexpr uint32_t argument = sizeof...(given);
  const Reporter report(error, argument);
  Call call;
  MHA_TRY(make_call(report, given..., &call));
  mha_call_info filled = {};
  filled.workspace_bytes = static_cast<size_t>(call.workspace_bytes);
  MHA_TRY(fill_info(report, call, &filled));
  return write_struct(report.about(argument + 1), "mha_call_info", filled, info);
}

}  // namespace mha
