// mha_linear: the product with W_O alone, of rows of the caller's.

#include "../check/arrays.h"
#include "../check/layer.h"
#include "../check/structs.h"
#include "../objects/layer.h"
#include "../run/project.h"

namespace mha {
namespace {

constexpr uint32_t layer_argument = 1, args_argument = 2;

// What a call comes to: its arguments, all defaults resolved, and its workspace.
struct LinearCall {
  mha_linear_args args;
  int64_t counter;  // offset in the workspace, as those of the product
  ProductPlan memory;
  int64_t workspace_bytes;
};

mha_status resolve_rows(Report report, const char *name, int64_t rows, int64_t width,
                        mha_input *input) {
  MHA_TRY(check_input_fields(report, name, *input));
  Array array = array_of(name, input->strides, no_extent, rows, no_extent, width);
  MHA_TRY(resolve_input(report, &array));
  input->strides.row = array.strides[1];
  return MHA_OK;
}

mha_status resolve_arrays(Report report, const LayerShape &shape, mha_linear_args *args) {
  mha_input &x = args->x, &residual = args->residual;
  mha_output &output = args->output;
  MHA_TRY(resolve_rows(report, "x", args->rows, shape.output_depth(), &x));
  MHA_TRY(check_output_fields(report, "output", output));
  Array array =
      array_of("output", output.strides, no_extent, args->rows, no_extent, shape.output_dim);
  MHA_TRY(resolve_output(report, &array));
  output.strides.row = array.strides[1];
  if (!residual.data) {
    MHA_TRY(check_input_fields(report, "residual", residual));
    return check_absent(report, "residual", residual);
  }
  if (residual.type == 0) residual.type = output.type;
  MHA_TRY(resolve_rows(report, "residual", args->rows, shape.output_dim, &residual));
  if (storage_of_type(residual.type) == storage_of_type(output.type)) return MHA_OK;
  return report.invalid(
      "residual.type is %u, but output.type is %u; set it to 0 or to the type of output",
      residual.type, output.type);
}

mha_status make_call(Report report, const mha_layer *layer, const mha_linear_args *given,
                     LinearCall *call) {
  MHA_TRY(check_layer(report.about(layer_argument), layer));
  const LayerShape &shape = layer->shape;
  if (!shape.has_output)
    return report.about(layer_argument)
        .invalid(
            "layer has no W_O, which mha_linear multiplies by; create it with w_o, or with "
            "mha_linear_create");
  mha_linear_args &args = call->args;
  MHA_TRY(read_struct(report, "mha_linear_args", given, &args));
  MHA_TRY(resolve_extent(report, "rows", "the rows of x", &args.rows));
  MHA_TRY(resolve_arrays(report, shape, &args));
  MHA_TRY(check_scheduler(report, args.scheduler));
  if (layer->sgemm && args.x.strides.row == 0)
    return report.invalid(
        "x.strides.row is MHA_BROADCAST, which sgemm does not support; copy the rows");
  if (layer->sgemm && args.x.strides.row > INT32_MAX)
    return report.too_large("x.strides.row is %lld; the largest that sgemm supports is %d",
                            lld(args.x.strides.row), INT32_MAX);
  const int64_t threads = threads_of(args.scheduler);
  const Storage input = storage_of_type(args.x.type);
  WorkspaceLayout layout;
  call->counter = layout.take(Count(threads > 1 ? 1 : 0), sizeof(UnitCounter));
  call->memory = plan_products(*layer, input, false, Count(args.rows), shape.output_depth(),
                               shape.output_dim, threads, &layout);
  const bool are_taken_as_given =
      input == Storage::f32 && layer->shape.arithmetic == Arithmetic::f32;
  const bool needs_nothing = threads == 1 && !layer->sgemm && are_taken_as_given;
  return check_size(report, layout, needs_nothing || args.rows == 0, &call->workspace_bytes);
}

mha_status check_pointers(Report report, const mha_linear_args &args) {
  if (!args.x.data) return report.null("x.data is NULL; pass the input rows");
  if (!args.output.data) return report.null("output.data is NULL; pass an array for the result");
  return MHA_OK;
}

// Nothing here can fail.
void run(const mha_layer &layer, const LinearCall &call, unsigned char *workspace) {
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
               reinterpret_cast<UnitCounter *>(workspace + call.counter), call.memory, workspace);
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_linear_workspace(const mha_layer *layer, const mha_linear_args *args, size_t *bytes,
                                mha_error *error) {
  Report report(error, args_argument);
  LinearCall call;
  MHA_TRY(make_call(report, layer, args, &call));
  return write_size(report.about(3), static_cast<size_t>(call.workspace_bytes), bytes);
}

mha_status mha_linear(const mha_layer *layer, const mha_linear_args *args, void *workspace,
                      size_t workspace_bytes, mha_error *error) {
  Report report(error, args_argument);
  LinearCall call;
  MHA_TRY(make_call(report, layer, args, &call));
  MHA_TRY(check_workspace(report, 3, "mha_linear_workspace", workspace, workspace_bytes,
                          call.workspace_bytes));
  if (call.args.rows == 0) return MHA_OK;
  MHA_TRY(check_pointers(report, call.args));
  run(*layer, call, align_workspace(workspace));
  return MHA_OK;
}

mha_status mha_linear_info(const mha_layer *layer, const mha_linear_args *args, mha_call_info *info,
                           mha_error *error) {
  Report report(error, args_argument);
  LinearCall call;
  MHA_TRY(make_call(report, layer, args, &call));
  const mha_linear_args &read = call.args;
  const LayerShape &shape = layer->shape;
  mha_call_info filled = {};
  filled.workspace_bytes = static_cast<size_t>(call.workspace_bytes);
  filled.instruction_set = layer->kernels->instruction_set;
  filled.num_threads = static_cast<uint32_t>(threads_of(read.scheduler));
  describe_projections(*layer, &filled);
  if (read.rows != 0) {
    // The packed layer has all weights, then all scales, then all biases, those of W_O last each
    // time.
    const PackedMatrix &first = layer->layout.matrices[matrix_q],
                       &last = layer->layout.matrices[matrix_o];
    const int64_t of_scales = last.scales_offset ? first.bias_offset - last.scales_offset : 0;
    const int64_t of_weights =
        (last.scales_offset ? first.scales_offset : first.bias_offset) - last.weights_offset;
    const int64_t of_bias = layer->layout.bytes - last.bias_offset;
    const int64_t of_output = shape.output_dim * bytes_of(storage_of_type(read.output.type)) *
                              (read.residual.data ? 2 : 1);
    const int64_t of_input = shape.output_depth() * bytes_of(storage_of_type(read.x.type));
    filled.operations =
        2 * static_cast<uint64_t>(read.rows) * product(shape.output_depth(), shape.output_dim);
    filled.bytes = static_cast<uint64_t>(of_weights + of_scales + of_bias) +
                   product(read.rows, of_input + of_output);
  }
  return write_struct(report.about(3), "mha_call_info", filled, info);
}
