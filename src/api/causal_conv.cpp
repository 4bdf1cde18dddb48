// mha_causal_conv: a depthwise convolution of rows. A unit of work is some channels of all rows of
// a sequence.

#include "../check/recurrent.h"
#include "../check/rules.h"
#include "../check/sequences.h"
#include "../run/rows.h"
#include "frame.h"

namespace mha {
namespace {

struct ConvCall {
  mha_causal_conv_args args;
  SequenceArguments sequences;
  const Kernels *kernels;
  Convolution convolution;
  int64_t workspace_bytes;
};

// Without rows, the state is still handed on.
bool has_no_work(const ConvCall &call) {
  return call.sequences.batch == 0 || (call.sequences.n_q == 0 && !call.args.state_out);
}

// Units need no memory, and several threads share their numbers.
mha_status make_call(Report report, const mha_causal_conv_args *given, ConvCall *call) {
  mha_causal_conv_args &args = call->args;
  MHA_TRY(check_causal_conv(report, given, &args, &call->sequences));
  MHA_TRY(choose_kernels(report, args.instruction_set, &call->kernels));
  call->convolution = {args.channels,
                       args.kernel_size,
                       args.weights,
                       args.bias,
                       args.activation == MHA_FUNCTION_SILU,
                       rows_of(args.x),
                       rows_of(args.output),
                       args.state,
                       args.state_out};
  WorkspaceLayout layout;
  const bool has_threads = threads_of(args.scheduler) > 1;
  if (has_threads) layout.take(Count(1), sizeof(UnitCounter));
  return check_size(report, layout, has_no_work(*call) || !has_threads, &call->workspace_bytes);
}

void run_unit(const void *context, int64_t unit, int64_t) {
  const ConvCall &call = *static_cast<const ConvCall *>(context);
  const int64_t blocks = blocks_of(call.args.channels, conv_channels);
  call.kernels->convolve(call.convolution, rows_of(call.sequences, unit / blocks),
                         unit % blocks * conv_channels);
}

mha_status check_data(Report report, ConvCall &call) {
  MHA_TRY(Rules{report}.given("weights", call.args.weights, "the weights of each channel"));
  MHA_TRY(each_array(call.args, CheckPointers{report}));
  return check_query_rows(report, call.sequences, "rows");
}

void run(const ConvCall *call, unsigned char *workspace) {
  const mha_causal_conv_args &args = call->args;
  clear_padding(call->sequences, call->convolution.output, 1, args.channels);
  run_units(args.scheduler, reinterpret_cast<UnitCounter *>(workspace),
            call->sequences.batch * blocks_of(args.channels, conv_channels), run_unit, call);
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_causal_conv_workspace(const mha_causal_conv_args *args, size_t *bytes,
                                     mha_error *error) {
  return answer_size<ConvCall>(error, bytes, args);
}

mha_status mha_causal_conv(const mha_causal_conv_args *args, void *workspace,
                           size_t workspace_bytes, mha_error *error) {
  return run_call<ConvCall>(error, "mha_causal_conv_workspace", workspace, workspace_bytes, args);
}
