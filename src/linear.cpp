// mha_linear: the product with W_O alone, of rows of the caller's.

#include "arguments.h"
#include "layer.h"
#include "projections.h"
#include "structs.h"

namespace mha {
namespace {

constexpr uint32_t layer_argument = 1, args_argument = 2;

// What a call comes to: its arguments, all defaults resolved, and its workspace.
struct LinearCall {
  mha_linear_args args;
  int64_t counter;  // offset in the workspace, as those of the product
  ProductMemory memory;
  int64_t workspace_bytes;
};

Array rows_of(const char *name, int64_t rows, int64_t width, int64_t *row_stride) {
  if (*row_stride == 0) *row_stride = width;
  return {name, width, {1, rows, 1}, {0, *row_stride, width}};
}

mha_status make_call(Report report, const mha_layer *layer, const mha_linear_args *given, LinearCall *call) {
  if (const mha_status status = check_layer(report.about(layer_argument), layer)) return status;
  const LayerShape &shape = layer->shape;
  if (!shape.has_output) {
    return report.about(layer_argument).invalid(
        "the layer has no w_o, which mha_linear multiplies by; make it with one, or by mha_linear_create");
  }
  mha_linear_args &args = call->args;
  if (const mha_status status = read_struct(report, "mha_linear_args", given, &args)) return status;
  if (const mha_status status = resolve_extent(report, "rows", "the rows of x", &args.rows)) return status;
  if (const mha_status status = check_row_type(report, "input_type", args.input_type)) return status;
  if (const mha_status status = check_row_type(report, "output_type", args.output_type)) return status;
  const Array x = rows_of("x", args.rows, shape.output_depth(), &args.x_row_stride);
  const Array residual = rows_of("residual", args.rows, shape.output_dim, &args.residual_row_stride);
  const Array output = rows_of("output", args.rows, shape.output_dim, &args.output_row_stride);
  if (const mha_status status = check_input(report, x)) return status;
  if (const mha_status status = check_input(report, residual)) return status;
  if (const mha_status status = check_output(report, output)) return status;
  if (const mha_status status = check_scheduler(report, args.scheduler)) return status;
  if (layer->sgemm && args.x_row_stride > INT32_MAX) {
    return report.fail(MHA_ERROR_TOO_LARGE, "x_row_stride is %lld, more than sgemm can be asked for; the largest is %d",
                       lld(args.x_row_stride), INT32_MAX);
  }
  const int64_t threads = threads_of(args.scheduler);
  const Storage input = static_cast<Storage>(args.input_type);
  WorkspaceLayout layout;
  call->counter = layout.take(Count(threads > 1 ? 1 : 0), sizeof(UnitCounter));
  call->memory = plan_products(*layer, input, false, Count(args.rows), shape.output_depth(), shape.output_dim, threads, &layout);
  const bool are_taken_as_given = input == Storage::f32 && layer->shape.arithmetic == Arithmetic::f32;
  const bool needs_nothing = threads == 1 && !layer->sgemm && are_taken_as_given;
  return check_size(report, layout, needs_nothing || args.rows == 0, &call->workspace_bytes);
}

mha_status check_pointers(Report report, const mha_linear_args &args) {
  if (!args.x) return report.fail(MHA_ERROR_NULL_POINTER, "x is NULL; pass the input rows");
  if (!args.output) return report.fail(MHA_ERROR_NULL_POINTER, "output is NULL; pass where to write the result");
  return MHA_OK;
}

// Nothing here can fail.
void run(const mha_layer &layer, const LinearCall &call, unsigned char *workspace) {
  const mha_linear_args &args = call.args;
  const InputRows x = {args.x, args.rows, 0, args.x_row_stride, nullptr, static_cast<Storage>(args.input_type)};
  Product product = {};
  product.num_parts = 1;
  product.plain_weights = static_cast<const float *>(layer.weights(matrix_o));
  product.plain_stride = layer.layout.matrices[matrix_o].stride;
  Projection &projection = product.parts[0];
  describe_projection(layer, matrix_o, x, args.rows, &projection);
  Destination &to = projection.destination;
  to.kind = Destination::Kind::rows;
  to.storage = static_cast<Storage>(args.output_type);
  to.base = args.output;
  to.row_stride = args.output_row_stride;
  to.head_width = layer.shape.output_dim;
  to.residual = args.residual;
  to.residual_row_stride = args.residual_row_stride;
  run_products(layer, &product, 1, args.scheduler, reinterpret_cast<UnitCounter *>(workspace + call.counter), call.memory, workspace);
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_linear_workspace(const mha_layer *layer, const mha_linear_args *args, size_t *bytes, mha_error *error) {
  Report report(error, args_argument);
  LinearCall call;
  if (const mha_status status = make_call(report, layer, args, &call)) return status;
  return write_size(report.about(3), static_cast<size_t>(call.workspace_bytes), bytes);
}

mha_status mha_linear(const mha_layer *layer, const mha_linear_args *args, void *workspace, size_t workspace_bytes, mha_error *error) {
  Report report(error, args_argument);
  LinearCall call;
  if (const mha_status status = make_call(report, layer, args, &call)) return status;
  if (const mha_status status = check_workspace(report, 3, "mha_linear_workspace", workspace, workspace_bytes, call.workspace_bytes))
    return status;
  if (call.args.rows == 0) return MHA_OK;
  if (const mha_status status = check_pointers(report, call.args)) return status;
  run(*layer, call, align_workspace(workspace));
  return MHA_OK;
}

mha_status mha_linear_info(const mha_layer *layer, const mha_linear_args *args, mha_call_info *info, mha_error *error) {
  Report report(error, args_argument);
  LinearCall call;
  if (const mha_status status = make_call(report, layer, args, &call)) return status;
  const mha_linear_args &read = call.args;
  const LayerShape &shape = layer->shape;
  mha_call_info filled = {};
  filled.workspace_bytes = static_cast<size_t>(call.workspace_bytes);
  filled.instruction_set = layer->kernels->instruction_set;
  filled.num_threads = static_cast<uint32_t>(threads_of(read.scheduler));
  describe_projections(*layer, &filled);
  if (read.rows != 0) {
    // The packed layer has all weights, then all scales, then all biases, those of W_O last each time.
    const PackedMatrix &first = layer->layout.matrices[matrix_q], &last = layer->layout.matrices[matrix_o];
    const int64_t of_scales = last.scales_offset ? first.bias_offset - last.scales_offset : 0;
    const int64_t of_weights = (last.scales_offset ? first.scales_offset : first.bias_offset) - last.weights_offset;
    const int64_t of_bias = layer->layout.bytes - last.bias_offset;
    const int64_t of_output = shape.output_dim * bytes_of(static_cast<Storage>(read.output_type)) * (read.residual ? 2 : 1);
    const int64_t of_input = shape.output_depth() * bytes_of(static_cast<Storage>(read.input_type));
    filled.operations = 2 * static_cast<uint64_t>(read.rows) * product(shape.output_depth(), shape.output_dim);
    filled.bytes = static_cast<uint64_t>(of_weights + of_scales + of_bias) + product(read.rows, of_input + of_output);
  }
  return write_struct(report.about(3), "mha_call_info", filled, info);
}
