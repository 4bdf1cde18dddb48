// mha_forward: the products with W_Q|W_G|W_K|W_V, the middle stage, the product with W_O.
//
// check_rows and finish_plan make the plan: the first has all that a small call needs (small.h),
// which has no plan and no units. `run` goes through the passes, of which there is one but for long
// calls over a ring: project, attend, project.

#include <algorithm>

#include "arguments.h"
#include "layer.h"
#include "middle_stage.h"
#include "projections.h"
#include "small.h"
#include "structs.h"

namespace mha {
namespace {

constexpr uint32_t layer_argument = 1, args_argument = 2;  // of mha_forward and its queries

// What a call comes to: its arguments, all defaults resolved, and its workspace.
struct Plan {
  mha_forward_args args;
  InputRows query, own_key, own_value;
  const InputRows *key, *value;  // the caller's own, or the same rows as query or key; null: none
  MiddleStage stage;
  // Offsets into the workspace. Rows of keys and values are there if they have to be prepared or go
  // to a cache: then they lie as projected first.
  int64_t q, gate, k, v, k_rows, v_rows, context;
  ProductMemory inputs, output;  // of the products before and after the middle stage
  int64_t workspace_bytes;

  bool is_packed() const { return stage.sequences.is_packed(); }
  int64_t key_blocks() const {
    return is_packed() ? packed_key_blocks(args.n_kv, stage.sequences.batch)
                       : blocks_of(args.n_kv, key_block);
  }

  bool has_key_rows() const { return stage.attention.prepare_k.is_any || stage.sequences.cache; }
  bool has_value_rows() const { return stage.attention.prepare_v.is_any || stage.sequences.cache; }
};

// NULL inputs: key = query, value = key. The widths have to agree then, and without key there are
// as many keys as queries.
mha_status resolve_inputs(Report report, const LayerShape &shape, mha_forward_args *args) {
  const bool has_key = args->key.data != nullptr, has_value = args->value.data != nullptr;
  if (const mha_status status = check_one_cache(report, args->cache, args->cache_read))
    return status;
  if (shape.only_asks() && !args->cache_read)
    return report.invalid(
        "cache_read is NULL, but the layer has no W_K and W_V, so it can only attend to a cache; "
        "give cache_read");
  if (args->cache_read) {
    args->n_kv = 0;
    if (!has_key && !has_value) return MHA_OK;
    return report.invalid(
        "%s.data is given, but no keys come with cache_read; set it to NULL, or give cache to "
        "append",
        has_key ? "key" : "value");
  }
  if (!has_key && shape.key_dim != shape.query_dim) {
    return report.fail(MHA_ERROR_SHAPE,
                       "key.data is NULL, but key_dim %lld is not query_dim %lld; give key",
                       lld(shape.key_dim), lld(shape.query_dim));
  }
  if (!has_value && shape.value_dim != shape.key_dim) {
    return report.fail(MHA_ERROR_SHAPE,
                       "value.data is NULL, but value_dim %lld is not key_dim %lld; give value",
                       lld(shape.value_dim), lld(shape.key_dim));
  }
  if (!has_key && !has_value) {
    args->n_kv = args->n_q;
    return MHA_OK;
  }
  if (const mha_status status =
          resolve_extent(report, "n_kv", "the rows of key and value per sequence", &args->n_kv))
    return status;
  if (!has_key && args->n_kv != args->n_q) {
    return report.fail(MHA_ERROR_SHAPE,
                       "n_kv is %lld, but key.data is NULL, so that the keys are the n_q = %lld "
                       "rows of query; give key",
                       lld(args->n_kv), lld(args->n_q));
  }
  return MHA_OK;
}

// The rows of an input, whose strides are resolved here.
mha_status resolve_rows(Report report, const char *name, const mha_input &input, int64_t batch,
                        int64_t n, int64_t width, InputRows *rows) {
  if (const mha_status status = check_input_fields(report, name, input)) return status;
  const Storage storage = storage_of_type(input.type);
  if (is_plain(input.strides, batch, n, width)) {
    *rows = {input.data, n, n * width, width, nullptr, storage};
    return MHA_OK;
  }
  Array array = array_of(name, input.strides, batch, n, no_extent, width);
  if (const mha_status status = resolve_input(report, &array)) return status;
  *rows = {input.data, n, array.strides[0], array.strides[1], nullptr, storage};
  return MHA_OK;
}

// The same for key and value, which have query's type.
mha_status resolve_other_rows(Report report, const char *name, const mha_forward_args &args,
                              mha_input input, int64_t width, InputRows *rows) {
  if (input.type == 0) input.type = args.query.type;
  if (storage_of_type(input.type) != storage_of_type(args.query.type) &&
      input.type <= MHA_TYPE_BF16)
    return report.invalid(
        "%s.type is %u, but query.type is %u; set it to 0 or to the type of query", name,
        input.type, args.query.type);
  return resolve_rows(report, name, input, args.batch, args.n_kv, width, rows);
}

mha_status resolve_arrays(Report report, const LayerShape &shape, Plan *plan) {
  mha_forward_args &args = plan->args;
  const bool has_key = args.key.data != nullptr, has_value = args.value.data != nullptr;
  if (const mha_status status = resolve_rows(report, "query", args.query, args.batch, args.n_q,
                                             shape.query_dim, &plan->query))
    return status;
  plan->key = args.cache_read ? nullptr : has_key ? &plan->own_key : &plan->query;
  plan->value = has_value ? &plan->own_value : plan->key;
  for (const auto &[name, input] : {std::pair{"key", &args.key}, {"value", &args.value}}) {
    if (const mha_status status = check_input_fields(report, name, *input)) return status;
  }
  if (!args.cache_read) {
    if (const mha_status status = has_key ? resolve_other_rows(report, "key", args, args.key,
                                                               shape.key_dim, &plan->own_key)
                                          : check_absent(report, "key", args.key))
      return status;
    if (const mha_status status = has_value ? resolve_other_rows(report, "value", args, args.value,
                                                                 shape.value_dim, &plan->own_value)
                                            : check_absent(report, "value", args.value))
      return status;
  }
  if (const mha_status status = check_output_fields(report, "output", args.output)) return status;
  if (is_plain(args.output.strides, args.batch, args.n_q, shape.output_dim)) {
    args.output.strides = {args.n_q * shape.output_dim, shape.output_dim, 0};
    return MHA_OK;
  }
  Array output =
      array_of("output", args.output.strides, args.batch, args.n_q, no_extent, shape.output_dim);
  if (const mha_status status = resolve_output(report, &output)) return status;
  args.output.strides = {output.strides[0], output.strides[1], 0};
  return MHA_OK;
}

mha_status check_sgemm_strides(Report report, const mha_layer &layer, const Plan &plan) {
  if (!layer.sgemm) return MHA_OK;
  const InputRows *const inputs[] = {&plan.query, plan.key, plan.value};
  const char *const names[] = {"query", "key", "value"};
  for (int i = 0; i < 3; ++i) {
    if (inputs[i] && inputs[i]->row_stride == 0)
      return report.invalid(
          "%s.strides.row is MHA_BROADCAST, which sgemm does not support; copy the rows", names[i]);
    if (inputs[i] && inputs[i]->row_stride > INT32_MAX) {
      return report.fail(MHA_ERROR_TOO_LARGE,
                         "%s.strides.row is %lld; the largest that sgemm supports is %d", names[i],
                         lld(inputs[i]->row_stride), INT32_MAX);
    }
  }
  return MHA_OK;
}

void plan_workspace(const mha_layer &layer, Plan *plan, WorkspaceLayout *layout) {
  const LayerShape &shape = layer.shape;
  const mha_forward_args &args = plan->args;
  const Count batch(args.batch), q_rows = batch * Count(args.n_q),
                                 kv_heads = batch * Count(shape.num_kv_heads);
  const Count kv_rows = batch * Count(args.n_kv), none(0),
              key_positions = Count(plan->key_blocks()) * Count(key_block);
  const Count value_positions = plan->is_packed() ? key_positions : Count(args.n_kv);
  plan_middle(&plan->stage, layout);
  plan->q = layout->take_floats(q_rows * Count(shape.q_columns()));
  plan->gate = layout->take_floats(q_rows * Count(shape.g_columns()));
  plan->k = layout->take_floats(
      plan->stage.sequences.cache ? none : kv_heads * key_positions * Count(shape.head_dim));
  plan->v = layout->take_floats(plan->stage.sequences.cache
                                    ? none
                                    : kv_heads * value_positions *
                                          Count(plan->stage.attention.head_dim_v_padded));
  plan->k_rows =
      layout->take_floats(plan->has_key_rows() ? kv_rows * Count(shape.k_columns()) : none);
  plan->v_rows =
      layout->take_floats(plan->has_value_rows() ? kv_rows * Count(shape.v_columns()) : none);
  plan->context =
      layout->take_floats(shape.has_output ? q_rows * Count(shape.context_columns()) : none);
  const int64_t input_width = std::max(shape.query_dim, std::max(shape.key_dim, shape.value_dim)),
                threads = threads_of(args.scheduler);
  const Count rows = batch * Count(std::max(args.n_q, args.n_kv));
  plan->inputs = plan_products(layer, plan->query.storage, plan->stage.sequences.is_ragged(), rows,
                               input_width, shape.input_columns(), threads, layout);
  plan->output = plan_products(layer, Storage::f32, plan->stage.sequences.is_ragged(),
                               shape.has_output ? q_rows : none, shape.context_columns(),
                               shape.output_dim, threads, layout);
}

// The beginning of every plan: counts, arrays and threads.
mha_status check_rows(Report report, const mha_layer *layer, const mha_forward_args *given,
                      Plan *plan) {
  if (const mha_status status = check_layer(report.about(layer_argument), layer)) return status;
  mha_forward_args &args = plan->args;
  const LayerShape &shape = layer->shape;
  if (!shape.has_heads()) {
    return report.about(layer_argument)
        .invalid(
            "layer is a linear layer, which has no heads; call mha_linear, or create it with "
            "mha_layer_create");
  }
  if (const mha_status status = read_struct(report, "mha_forward_args", given, &args))
    return status;
  if (const mha_status status =
          resolve_extent(report, "batch", "the number of sequences", &args.batch))
    return status;
  if (const mha_status status =
          resolve_extent(report, "n_q", "the rows of query per sequence", &args.n_q))
    return status;
  if (const mha_status status = resolve_inputs(report, shape, &args)) return status;
  if (const mha_status status = resolve_arrays(report, shape, plan)) return status;
  return check_scheduler(report, args.scheduler);
}

// The rest of it. So nothing is left that can be known without the data: dimensions, strides,
// sizes.
mha_status finish_plan(Report report, const mha_layer *layer, Plan *plan) {
  mha_forward_args &args = plan->args;
  const LayerShape &shape = layer->shape;
  MiddleStage &stage = plan->stage;
  if (args.reserved != 0) return report.invalid("reserved is not 0; set it to 0");
  const bool is_self = !args.key.data && !args.cache_read;
  if (const mha_status status = describe_call(report, CallArguments(args), is_self, &stage))
    return status;
  if (plan->is_packed())  // products count batches by sequence, of which packed ones have no stride
    plan->query.batch_stride = plan->own_key.batch_stride = plan->own_value.batch_stride =
        args.output.strides.batch = 0;
  stage.has_output = shape.has_output;
  stage.kernels = layer->kernels;
  Attention &attention = stage.attention;
  attention.num_heads = shape.num_heads;
  attention.num_kv_heads = shape.num_kv_heads;
  attention.head_dim = shape.head_dim;
  attention.head_dim_v = shape.head_dim_v;
  attention.scale = shape.scale;
  const mha_kv_cache *const cache = stage.sequences.cache;
  attention.k = cache ? cached_keys(cache) : KeyValues{};
  attention.v = cache ? cached_values(cache) : KeyValues{};
  if (!cache) attention.k.is_packed = attention.v.is_packed = true;
  if (args.cache && is_stored(attention.k)) {
    return report.invalid(
        "cache has MHA_CACHE_VALUES_IN_KEYS, but the layer projects values; give cache_read, or "
        "append with mha_attention");
  }
  if (stage.outputs.states)
    return report.invalid(
        "outputs.states is given, but only mha_attention computes it; set it to NULL");
  if (const mha_status status = check_middle(report, &stage)) return status;
  if (const mha_status status = check_sgemm_strides(report, *layer, *plan)) return status;
  WorkspaceLayout layout;
  plan_workspace(*layer, plan, &layout);
  if (is_small(*layer, args)) {
    plan->workspace_bytes = small_workspace_bytes(layer->small, args.n_q);
    return MHA_OK;
  }
  return check_size(report, layout, stage.sequences.has_no_work(), &plan->workspace_bytes);
}

mha_status make_plan(Report report, const mha_layer *layer, const mha_forward_args *given,
                     Plan *plan) {
  if (const mha_status status = check_rows(report, layer, given, plan)) return status;
  return finish_plan(report, layer, plan);
}

mha_status check_pointers(Report report, const mha_forward_args &args) {
  if (!args.query.data)
    return report.fail(MHA_ERROR_NULL_POINTER, "query.data is NULL; pass the input rows");
  if (!args.output.data)
    return report.fail(MHA_ERROR_NULL_POINTER, "output.data is NULL; pass an array for the result");
  return MHA_OK;
}

// ---- The call

// Field by field into its place: to copy a struct that has just been written would have to wait for
// the writes.
inline void set_destination(Destination *to, Destination::Kind kind, void *base,
                            int64_t batch_stride, int64_t row_stride, int64_t head_stride,
                            int64_t head_width) {
  to->kind = kind;
  to->base = base;
  to->batch_stride = batch_stride;
  to->row_stride = row_stride;
  to->head_stride = head_stride;
  to->head_width = head_width;
}

// Contiguous, and without heads; not at all if there is no such output. n: rows from one sequence
// to the next.
inline void set_destination_of_rows(Destination *to, float *base, int64_t n, int64_t width) {
  if (base) set_destination(to, Destination::Kind::rows, base, n * width, width, width, width);
}

// Valid rows of all sequences together.
int64_t rows_of_extents(const Extent *extents, int64_t batch, int64_t rows) {
  return extents ? extents[batch - 1].before + extents[batch - 1].count : batch * rows;
}

bool is_same(const InputRows &a, const InputRows &b) {
  return a.base == b.base && a.rows_per_sequence == b.rows_per_sequence &&
         a.batch_stride == b.batch_stride && a.row_stride == b.row_stride && a.extents == b.extents;
}

// The products of a stage: one for all matrices that have the same input rows. Only what is used is
// written.
class Products {
 public:
  explicit Products(const mha_layer &layer) : layer_(layer), count_(0) {}

  // One more matrix, whose destination is yet to be set.
  Projection &add(MatrixName name, const InputRows &x, int64_t rows) {
    // A BLAS can only take matrices together that are packed side by side.
    const bool may_share = !layer_.sgemm || layer_.shape.has_one_input_width();
    if (count_ == 0 || !may_share || !is_same(x, products_[count_ - 1].parts[0].x)) {
      Product &product = products_[count_++];
      product.num_parts = 0;
      product.plain_weights = static_cast<const float *>(layer_.weights(name));
      product.plain_stride = layer_.layout.matrices[name].stride;
    }
    Product &product = products_[count_ - 1];
    Projection &part = product.parts[product.num_parts++];
    describe_projection(layer_, name, x, rows, &part);
    return part;
  }

  void run(const mha_scheduler *scheduler, UnitCounter *counter, const ProductMemory &memory,
           unsigned char *workspace) const {
    run_products(layer_, products_, count_, scheduler, counter, memory, workspace);
  }

 private:
  const mha_layer &layer_;
  int64_t count_;
  Product products_[max_products];
};

// Where q, k, v and the context of a call lie, in the workspace but for what the caller or a cache
// has.
void place(const mha_layer &layer, Plan *plan, unsigned char *memory) {
  const LayerShape &shape = layer.shape;
  const mha_forward_args &args = plan->args;
  MiddleStage &stage = plan->stage;
  Attention &attention = stage.attention;
  const auto floats_at = [memory](int64_t offset) {
    return reinterpret_cast<float *>(memory + offset);
  };
  attention.q = {floats_at(plan->q), args.n_q * shape.q_columns(), shape.q_columns(),
                 shape.head_dim};
  if (shape.gate != MHA_GATE_NONE) {
    attention.gate.values = {floats_at(plan->gate), args.n_q * shape.g_columns(), shape.g_columns(),
                             shape.gate_dim};
    attention.gate.is_sigmoid = shape.gate == MHA_GATE_SIGMOID;
    attention.gate.is_single = shape.gate_dim == 1;
  }
  if (!stage.sequences.cache) {
    const int64_t positions = plan->key_blocks() * key_block, width = attention.head_dim_v_padded;
    const int64_t value_positions = plan->is_packed() ? positions : args.n_kv,
                  heads = shape.num_kv_heads;
    attention.k = packed_floats(floats_at(plan->k), shape.head_dim, positions * shape.head_dim,
                                positions, heads, plan->is_packed());
    attention.v = packed_floats(floats_at(plan->v), width, value_positions * width, positions,
                                heads, plan->is_packed());
  }
  if (plan->key && plan->has_key_rows())
    stage.k_rows = {floats_at(plan->k_rows), args.n_kv * shape.k_columns(), shape.k_columns(),
                    shape.head_dim};
  if (plan->key && plan->has_value_rows())
    stage.v_rows = {floats_at(plan->v_rows), args.n_kv * shape.v_columns(), shape.v_columns(),
                    shape.head_dim_v};
  // Without W_O the context is the output.
  attention.output = shape.has_output ? floats_at(plan->context) : args.output.data;
  attention.output_storage = shape.has_output ? Storage::f32 : storage_of_type(args.output.type);
  attention.output_batch_stride =
      shape.has_output ? args.n_q * shape.context_columns() : args.output.strides.batch;
  attention.output_row_stride =
      shape.has_output ? shape.context_columns() : args.output.strides.row;
  attention.output_head_stride = shape.head_dim_v;
}

// x -> q | gate | k | v. A head is a column range: each is written to where it is stored from, or
// where the attention reads it.
void project_inputs(const mha_layer &layer, const Plan &plan, unsigned char *workspace) {
  const LayerShape &shape = layer.shape;
  const mha_forward_args &args = plan.args;
  const MiddleStage &stage = plan.stage;
  const Attention &attention = stage.attention;
  const mha_outputs &outputs = stage.outputs;
  // The kernels only read what they are told of; here it is written.
  const auto written = [](const void *base) {
    return static_cast<float *>(const_cast<void *>(base));
  };
  const int64_t q_rows = rows_of_extents(stage.queries, stage.sequences.batch, args.n_q);
  const int64_t n_q = plan.is_packed() ? 0 : args.n_q, n_kv = plan.is_packed() ? 0 : args.n_kv;
  InputRows query = plan.query;
  query.extents = stage.queries;
  Products qkv(layer);
  Projection &to_q = qkv.add(matrix_q, query, q_rows);
  set_destination_of_rows(&to_q.destination, written(attention.q.base), n_q, shape.q_columns());
  set_destination_of_rows(&to_q.tap, outputs.q, n_q, shape.q_columns());
  if (shape.gate != MHA_GATE_NONE) {
    Projection &to_gate = qkv.add(matrix_g, query, q_rows);
    set_destination_of_rows(&to_gate.destination, written(attention.gate.values.base), n_q,
                            shape.g_columns());
  }
  if (plan.key) {
    const int64_t kv_rows = rows_of_extents(stage.keys, stage.sequences.batch, args.n_kv);
    InputRows key = *plan.key, value = *plan.value;
    key.extents = value.extents = stage.keys;
    Projection &to_k = qkv.add(matrix_k, key, kv_rows);
    set_destination_of_rows(&to_k.tap, outputs.k, n_kv, shape.k_columns());
    if (stage.k_rows.base)
      set_destination_of_rows(&to_k.destination, written(stage.k_rows.base), n_kv,
                              shape.k_columns());
    else
      set_destination(&to_k.destination, Destination::Kind::key_blocks, written(attention.k.base),
                      attention.k.batch_stride, 0, attention.k.head_stride, shape.head_dim);
    Projection &to_v = qkv.add(matrix_v, value, kv_rows);
    set_destination_of_rows(&to_v.tap, outputs.v, n_kv, shape.v_columns());
    if (stage.v_rows.base)
      set_destination_of_rows(&to_v.destination, written(stage.v_rows.base), n_kv,
                              shape.v_columns());
    else
      set_destination(&to_v.destination, Destination::Kind::value_rows, written(attention.v.base),
                      attention.v.batch_stride, attention.v.row_stride, attention.v.head_stride,
                      shape.head_dim_v);
  }
  qkv.run(args.scheduler, stage.counter, plan.inputs, workspace);
}

// context -> y
void project_output(const mha_layer &layer, const Plan &plan, unsigned char *workspace) {
  const mha_forward_args &args = plan.args;
  const MiddleStage &stage = plan.stage;
  const Attention &attention = stage.attention;
  const int64_t batch_stride = plan.is_packed() ? 0 : attention.output_batch_stride;
  const InputRows context = {attention.output, args.n_q, batch_stride, attention.output_row_stride,
                             stage.queries};
  Products output(layer);
  Projection &to_output = output.add(
      matrix_o, context, rows_of_extents(stage.queries, stage.sequences.batch, args.n_q));
  set_destination(&to_output.destination, Destination::Kind::rows, args.output.data,
                  args.output.strides.batch, args.output.strides.row, 0, layer.shape.output_dim);
  to_output.destination.storage = storage_of_type(args.output.type);
  output.run(args.scheduler, stage.counter, plan.output, workspace);
}

// Nothing here can fail.
void run(const mha_layer &layer, Plan &plan, unsigned char *workspace) {
  const mha_forward_args &args = plan.args;
  MiddleStage &stage = plan.stage;
  place(layer, &plan, workspace);
  begin_passes(&stage, workspace);
  if (stage.has_padding()) {
    clear_padding(stage.queries, args.batch, args.n_q, layer.shape.output_dim, args.output.data,
                  args.output.strides.batch, args.output.strides.row,
                  storage_of_type(args.output.type));
  }
  while (next_pass(&stage)) {
    project_inputs(layer, plan, workspace);
    attend_pass(&stage);
    if (layer.shape.has_output) project_output(layer, plan, workspace);
  }
}

// A small call needs no more than the checks of its rows.
mha_status forward_small(Report report, const mha_layer &layer, const Plan &plan, void *workspace,
                         size_t workspace_bytes) {
  const mha_forward_args &args = plan.args;
  if (const mha_status status = check_pointers(report, args)) return status;
  if (const mha_status status =
          check_workspace(report, 3, "mha_forward_workspace", workspace, workspace_bytes,
                          small_workspace_bytes(layer.small, args.n_q)))
    return status;
  const SmallCall call = {args.batch,
                          args.n_q,
                          (args.flags & MHA_CAUSAL) != 0,
                          {plan.query.base, plan.query.batch_stride, plan.query.row_stride, 0},
                          static_cast<float *>(args.output.data),
                          args.output.strides.batch,
                          args.output.strides.row};
  layer.kernels->run_small(layer.small, call,
                           reinterpret_cast<float *>(align_workspace(workspace)));
  return MHA_OK;
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_forward_workspace(const mha_layer *layer, const mha_forward_args *args,
                                 size_t *bytes, mha_error *error) {
  Report report(error, args_argument);
  Plan plan;
  if (const mha_status status = make_plan(report, layer, args, &plan)) return status;
  return write_size(report.about(3), static_cast<size_t>(plan.workspace_bytes), bytes);
}

mha_status mha_forward(const mha_layer *layer, const mha_forward_args *args, void *workspace,
                       size_t workspace_bytes, mha_error *error) {
  Report report(error, args_argument);
  Plan plan;
  if (const mha_status status = check_rows(report, layer, args, &plan)) return status;
  if (is_small(*layer, plan.args))
    return forward_small(report, *layer, plan, workspace, workspace_bytes);
  if (const mha_status status = finish_plan(report, layer, &plan)) return status;
  if (const mha_status status = check_workspace(report, 3, "mha_forward_workspace", workspace,
                                                workspace_bytes, plan.workspace_bytes))
    return status;
  if (plan.stage.sequences.has_no_work()) return MHA_OK;
  if (const mha_status status = check_pointers(report, plan.args)) return status;
  if (const mha_status status = check_array_contents(report, &plan.stage)) return status;
  run(*layer, plan, align_workspace(workspace));
  return MHA_OK;
}

mha_status mha_info(const mha_layer *layer, const mha_forward_args *args, mha_call_info *info,
                    mha_error *error) {
  Report report(error, args_argument);
  Plan plan;
  if (const mha_status status = make_plan(report, layer, args, &plan)) return status;
  mha_call_info filled = {};
  const LayerShape &shape = layer->shape;
  const mha_forward_args &read = plan.args;
  filled.workspace_bytes = static_cast<size_t>(plan.workspace_bytes);
  describe_projections(*layer, &filled);
  describe_middle(plan.stage, &filled);
  if (!plan.stage.sequences.has_no_work()) {
    if (const mha_status status = check_array_contents(report, &plan.stage)) return status;
    const uint64_t q_rows = valid_queries(plan.stage.sequences),
                   kv_rows = valid_keys(plan.stage.sequences);
    const uint64_t output_weights =
        shape.has_output ? product(shape.context_columns(), shape.output_dim) : 0;
    filled.operations =
        2 * (q_rows * (product(shape.query_dim, shape.q_columns() + shape.g_columns()) +
                       output_weights) +
             kv_rows * (product(shape.key_dim, shape.k_columns()) +
                        product(shape.value_dim, shape.v_columns())));
    const uint64_t of_inputs = static_cast<uint64_t>(bytes_of(plan.query.storage));
    // Inputs that are the same rows count once.
    filled.bytes =
        filled.packed_bytes +
        of_inputs * (q_rows * static_cast<uint64_t>(shape.query_dim) +
                     (read.key.data ? kv_rows * static_cast<uint64_t>(shape.key_dim) : 0) +
                     (read.value.data ? kv_rows * static_cast<uint64_t>(shape.value_dim) : 0));
    filled.bytes += q_rows * product(shape.output_dim, bytes_of(storage_of_type(read.output.type)));
    add_cost_of_middle(plan.stage, &filled);
  }
  return write_struct(report.about(3), "mha_call_info", filled, info);
}
