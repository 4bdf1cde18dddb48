// mha_linear: the product with W_O alone, of rows of the caller's.

#include "linear.h"

#include "../check/entries.h"
#include "../storage.h"
#include "frame.h"

namespace mha {

// One product, which the layer's W_O multiplies. Several threads share its units by a counter in
// the workspace.
mha_status make_call(Report report, const mha_layer *layer, const mha_linear_args *given,
                     LinearCall *call) {
  MHA_TRY(check_linear(report, layer, given, &call->args));
  call->layer = layer;
  const mha_linear_args &args = call->args;
  const LayerShape &shape = layer->shape;
  const int64_t threads = threads_of(args.scheduler);
  const Storage input = storage_of_type(args.x.type);
  WorkspaceLayout layout;
  call->counter = layout.take(Count(threads > 1 ? 1 : 0), sizeof(UnitCounter));
  call->product = plan_products(*layer, input, false, Count(args.rows), shape.output_depth(),
                                shape.output_dim, threads, &layout);
  // A call on one thread whose rows are read where they are needs no workspace.
  const bool needs_nothing = threads == 1 && !layer->sgemm && takes_rows_as_given(*layer, input);
  return check_size(report, layout, needs_nothing || args.rows == 0, &call->workspace_bytes);
}

bool has_no_work(const LinearCall &call) { return call.args.rows == 0; }

mha_status check_data(Report report, LinearCall &call) {
  return each_array(*call.layer, call.args, CheckPointers{report});
}

void run(const LinearCall *made, unsigned char *workspace) {
  const LinearCall &call = *made;
  const mha_layer &layer = *call.layer;
  const mha_linear_args &args = call.args;
  const InputRows x = {args.x.data,        args.rows, 0,
                       args.x.strides.row, nullptr,   storage_of_type(args.x.type)};
  Product product = {};
  product.num_parts = 1;
  product.plain_weights = static_cast<const float *>(layer.weights(matrix_o));
  product.plain_stride = layer.layout.matrices[matrix_o].stride;
  Projection &projection = product.parts[0];
  describe_projection(layer, matrix_o, x, args.rows, &projection);
  Destination &to = projection.destination;
  to.kind = Destination::Kind::rows;
  to.storage = storage_of_type(args.output.type);
  to.base = args.output.data;
  to.row_stride = args.output.strides.row;
  to.head_width = layer.shape.output_dim;
  to.residual = args.residual.data;
  to.residual_row_stride = args.residual.strides.row;
  run_products(layer, &product, 1, args.scheduler,
               reinterpret_cast<UnitCounter *>(workspace + call.counter), call.product, workspace);
}

}  // namespace mha

using namespace mha;

mha_status mha_linear_workspace(const mha_layer *layer, const mha_linear_args *args, size_t *bytes,
                                mha_error *error) {
  return answer_size<LinearCall>(error, bytes, layer, args);
}

mha_status mha_linear(const mha_layer *layer, const mha_linear_args *args, void *workspace,
                      size_t workspace_bytes, mha_error *error) {
  return run_call<LinearCall>(error, "mha_linear_workspace", workspace, workspace_bytes, layer,
                              args);
}
