// mha_forward: the products with W_Q|W_G|W_K|W_V, the middle stage, the product with W_O.
//
// check_rows and finish_plan make the plan: the first has all that a small call needs (small.h), which has no plan and no units. `run` goes
// through the passes, of which there is one but for long calls over a ring: project, attend, project.

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
  // Offsets into the workspace. Rows of keys and values are there if they have to be prepared or go to a cache: then they lie as projected
  // first.
  int64_t q, gate, k, v, k_rows, v_rows, context;
  ProductMemory inputs, output;  // of the products before and after the middle stage
  int64_t workspace_bytes;

  // Packed sequences lie in one after the other, which is then the only one that the arrays have.
  bool has_cu_seqlens() const { return args.cu_seqlens_q != nullptr; }
  int64_t array_batch() const { return has_cu_seqlens() && args.batch > 1 ? 1 : args.batch; }
  int64_t key_blocks() const { return has_cu_seqlens() ? packed_key_blocks(args.n_kv, args.batch) : blocks_of(args.n_kv, key_block); }

  bool has_key_rows() const { return stage.attention.prepare_k.is_any || args.cache; }
  bool has_value_rows() const { return stage.attention.prepare_v.is_any || args.cache; }
};

// NULL inputs: key = query, value = key. The widths have to agree then, and without key there are as many keys as queries.
mha_status resolve_inputs(Report report, const LayerShape &shape, mha_forward_args *args) {
  if (shape.only_asks() && !(args->flags & MHA_CACHE_READ))
    return report.invalid("the layer has no W_K and W_V, so it can only attend to a cache as it is; give cache, and set MHA_CACHE_READ");
  if (args->flags & MHA_CACHE_READ) {
    args->n_kv = 0;
    return check_cache_read(report, *args, args->key ? "key" : args->value ? "value" : nullptr);
  }
  if (!args->key && shape.key_dim != shape.query_dim) {
    return report.fail(MHA_ERROR_SHAPE, "key is NULL, but key_dim %lld is not query_dim %lld; give key", lld(shape.key_dim),
                       lld(shape.query_dim));
  }
  if (!args->value && shape.value_dim != shape.key_dim) {
    return report.fail(MHA_ERROR_SHAPE, "value is NULL, but value_dim %lld is not key_dim %lld; give value", lld(shape.value_dim),
                       lld(shape.key_dim));
  }
  if (!args->key && args->kv_lengths)
    return report.invalid("kv_lengths is given, but the keys are the rows of query; give q_lengths alone, or key");
  if (!args->key && !args->value) {
    args->n_kv = args->n_q;
    return MHA_OK;
  }
  if (const mha_status status = resolve_extent(report, "n_kv", "the rows of key and value per sequence", &args->n_kv)) return status;
  if (!args->key && args->n_kv != args->n_q) {
    return report.fail(MHA_ERROR_SHAPE, "key is NULL, so n_kv has to be n_q = %lld, but it is %lld; give key", lld(args->n_q),
                       lld(args->n_kv));
  }
  return MHA_OK;
}

// 0 = contiguous.
InputRows rows_of(const void *base, uint32_t type, int64_t n, int64_t width, int64_t batch_stride, int64_t row_stride) {
  if (row_stride == 0) row_stride = width;
  return {base, n, contiguous_stride(batch_stride, n, row_stride, width), row_stride, nullptr, static_cast<Storage>(type)};
}

Array array_of(const char *name, const InputRows &rows, int64_t batch, int64_t width) {
  return {name, width, {batch, rows.rows_per_sequence, 1}, {rows.batch_stride, rows.row_stride, width}};
}

// Strides that are negative are MHA_BROADCAST where check_strides found the array sound, and wrong where none is given.
mha_status resolve_broadcasts(Report report, Plan *plan) {
  const mha_forward_args &args = plan->args;
  const struct {
    const char *name;
    bool is_given;
    int64_t batch_stride, row_stride;
    InputRows *rows;
  } inputs[] = {{"query", true, args.query_batch_stride, args.query_row_stride, &plan->query},
                {"key", args.key != nullptr, args.key_batch_stride, args.key_row_stride, &plan->own_key},
                {"value", args.value != nullptr, args.value_batch_stride, args.value_row_stride, &plan->own_value}};
  for (const auto &input : inputs) {
    if (!input.is_given && (input.batch_stride | input.row_stride) < 0)
      return fail_input(report, {input.name, 0, {}, {input.batch_stride, input.row_stride, 0}});
    if (!input.is_given) continue;
    input.rows->batch_stride = resolved_stride(input.rows->batch_stride);
    input.rows->row_stride = resolved_stride(input.rows->row_stride);
  }
  return MHA_OK;
}

mha_status check_strides(Report report, const LayerShape &shape, Plan *plan) {
  mha_forward_args &args = plan->args;
  const int64_t batch = plan->array_batch();
  plan->query = rows_of(args.query, args.input_type, args.n_q, shape.query_dim, args.query_batch_stride, args.query_row_stride);
  plan->key = &plan->query;
  if (args.key) {
    plan->own_key = rows_of(args.key, args.input_type, args.n_kv, shape.key_dim, args.key_batch_stride, args.key_row_stride);
    plan->key = &plan->own_key;
  }
  plan->value = plan->key;
  if (args.value) {
    plan->own_value = rows_of(args.value, args.input_type, args.n_kv, shape.value_dim, args.value_batch_stride, args.value_row_stride);
    plan->value = &plan->own_value;
  }
  if (args.flags & MHA_CACHE_READ) plan->key = plan->value = nullptr;
  const InputRows output =
      rows_of(args.output, args.output_type, args.n_q, shape.output_dim, args.output_batch_stride, args.output_row_stride);
  args.output_batch_stride = output.batch_stride;
  args.output_row_stride = output.row_stride;
  if (const mha_status status = check_broadcast_input(report, array_of("query", plan->query, batch, shape.query_dim))) return status;
  if (args.key) {
    if (const mha_status status = check_broadcast_input(report, array_of("key", *plan->key, batch, shape.key_dim))) return status;
  }
  if (args.value) {
    if (const mha_status status = check_broadcast_input(report, array_of("value", *plan->value, batch, shape.value_dim))) return status;
  }
  const int64_t of_key = args.key_batch_stride | args.key_row_stride, of_value = args.value_batch_stride | args.value_row_stride;
  if ((args.query_batch_stride | args.query_row_stride | of_key | of_value) < 0) {
    if (const mha_status status = resolve_broadcasts(report, plan)) return status;
  }
  if (const mha_status status = check_output(report, array_of("output", output, batch, shape.output_dim))) return status;
  if (plan->has_cu_seqlens())
    plan->query.batch_stride = plan->own_key.batch_stride = plan->own_value.batch_stride = args.output_batch_stride = 0;
  return MHA_OK;
}

mha_status check_sgemm_strides(Report report, const mha_layer &layer, const Plan &plan) {
  if (!layer.sgemm) return MHA_OK;
  const InputRows *const inputs[] = {&plan.query, plan.key, plan.value};
  for (const InputRows *input : inputs) {
    if (input && input->row_stride == 0)
      return report.invalid("a row stride is MHA_BROADCAST, which sgemm can't be asked for; copy the rows");
    if (input && input->row_stride > INT32_MAX) {
      return report.fail(MHA_ERROR_TOO_LARGE, "a row stride of %lld is more than sgemm can be asked for; the largest is %d",
                         lld(input->row_stride), INT32_MAX);
    }
  }
  return MHA_OK;
}

void plan_workspace(const mha_layer &layer, Plan *plan, WorkspaceLayout *layout) {
  const LayerShape &shape = layer.shape;
  const mha_forward_args &args = plan->args;
  const Count batch(plan->array_batch()), q_rows = batch * Count(args.n_q), kv_heads = batch * Count(shape.num_kv_heads);
  const Count kv_rows = batch * Count(args.n_kv), none(0), key_positions = Count(plan->key_blocks()) * Count(key_block);
  const Count value_positions = plan->has_cu_seqlens() ? key_positions : Count(args.n_kv);
  plan_middle(&plan->stage, layout);
  plan->q = layout->take_floats(q_rows * Count(shape.q_columns()));
  plan->gate = layout->take_floats(q_rows * Count(shape.g_columns()));
  plan->k = layout->take_floats(args.cache ? none : kv_heads * key_positions * Count(shape.head_dim));
  plan->v = layout->take_floats(args.cache ? none : kv_heads * value_positions * Count(plan->stage.attention.head_dim_v_padded));
  plan->k_rows = layout->take_floats(plan->has_key_rows() ? kv_rows * Count(shape.k_columns()) : none);
  plan->v_rows = layout->take_floats(plan->has_value_rows() ? kv_rows * Count(shape.v_columns()) : none);
  plan->context = layout->take_floats(shape.has_output ? q_rows * Count(shape.context_columns()) : none);
  const int64_t input_width = std::max(shape.query_dim, std::max(shape.key_dim, shape.value_dim)), threads = threads_of(args.scheduler);
  const Count rows = batch * Count(std::max(args.n_q, args.n_kv));
  plan->inputs = plan_products(layer, plan->query.storage, plan->stage.sequences.is_ragged(), rows, input_width, shape.input_columns(),
                               threads, layout);
  plan->output = plan_products(layer, Storage::f32, plan->stage.sequences.is_ragged(), shape.has_output ? q_rows : none,
                               shape.context_columns(), shape.output_dim, threads, layout);
}

// The beginning of every plan: counts, arrays and threads.
mha_status check_rows(Report report, const mha_layer *layer, const mha_forward_args *given, Plan *plan) {
  if (const mha_status status = check_layer(report.about(layer_argument), layer)) return status;
  mha_forward_args &args = plan->args;
  const LayerShape &shape = layer->shape;
  if (!shape.has_heads()) {
    return report.about(layer_argument).invalid(
        "the layer has no heads, as mha_linear_create makes it; call mha_linear, or make it with mha_layer_create");
  }
  if (const mha_status status = read_struct(report, "mha_forward_args", given, &args)) return status;
  if (const mha_status status = resolve_extent(report, "batch", "the number of sequences", &args.batch)) return status;
  if (const mha_status status = resolve_extent(report, "n_q", "the rows of query per sequence", &args.n_q)) return status;
  if (const mha_status status = resolve_inputs(report, shape, &args)) return status;
  if (const mha_status status = check_strides(report, shape, plan)) return status;
  return check_scheduler(report, args.scheduler);
}

// The rest of it. So nothing is left that can be known without the data: dimensions, strides, sizes.
mha_status finish_plan(Report report, const mha_layer *layer, Plan *plan) {
  const mha_forward_args &args = plan->args;
  const LayerShape &shape = layer->shape;
  MiddleStage &stage = plan->stage;
  if (const mha_status status = check_row_type(report, "input_type", args.input_type)) return status;
  if (const mha_status status = check_row_type(report, "output_type", args.output_type)) return status;
  if (args.reserved != 0) return report.invalid("mha_forward_args.reserved is not 0; set it to 0");
  if (const mha_status status = check_optional_cache(report, args.cache)) return status;
  describe_call(args, &stage);
  stage.sequences.is_self = !args.key && !(args.flags & MHA_CACHE_READ);
  stage.has_output = shape.has_output;
  stage.kernels = layer->kernels;
  Attention &attention = stage.attention;
  attention.num_heads = shape.num_heads;
  attention.num_kv_heads = shape.num_kv_heads;
  attention.head_dim = shape.head_dim;
  attention.head_dim_v = shape.head_dim_v;
  attention.scale = shape.scale;
  attention.k = args.cache ? cached_keys(args.cache) : KeyValues{};
  attention.v = args.cache ? cached_values(args.cache) : KeyValues{};
  if (!args.cache) attention.k.is_packed = attention.v.is_packed = true;
  if (is_stored(attention.k) && !(args.flags & MHA_CACHE_READ)) {
    return report.invalid(
        "the cache has its values in the keys, where a layer's own values have no place; set MHA_CACHE_READ, or append by mha_attention");
  }
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

mha_status make_plan(Report report, const mha_layer *layer, const mha_forward_args *given, Plan *plan) {
  if (const mha_status status = check_rows(report, layer, given, plan)) return status;
  return finish_plan(report, layer, plan);
}

mha_status check_pointers(Report report, const mha_forward_args &args) {
  if (!args.query) return report.fail(MHA_ERROR_NULL_POINTER, "query is NULL; pass the input rows");
  if (!args.output) return report.fail(MHA_ERROR_NULL_POINTER, "output is NULL; pass where to write the result");
  return MHA_OK;
}

// ---- The call

// Field by field into its place: to copy a struct that has just been written would have to wait for the writes.
inline void set_destination(Destination *to, Destination::Kind kind, void *base, int64_t batch_stride, int64_t row_stride,
                            int64_t head_stride, int64_t head_width) {
  to->kind = kind;
  to->base = base;
  to->batch_stride = batch_stride;
  to->row_stride = row_stride;
  to->head_stride = head_stride;
  to->head_width = head_width;
}

// Contiguous, and without heads; not at all if there is no such output. n: rows from one sequence to the next.
inline void set_destination_of_rows(Destination *to, float *base, int64_t n, int64_t width) {
  if (base) set_destination(to, Destination::Kind::rows, base, n * width, width, width, width);
}

// Valid rows of all sequences together.
int64_t rows_of_extents(const Extent *extents, int64_t batch, int64_t rows) {
  return extents ? extents[batch - 1].before + extents[batch - 1].count : batch * rows;
}

bool is_same(const InputRows &a, const InputRows &b) {
  return a.base == b.base && a.rows_per_sequence == b.rows_per_sequence && a.batch_stride == b.batch_stride &&
         a.row_stride == b.row_stride && a.extents == b.extents;
}

// The products of a stage: one for all matrices that have the same input rows. Only what is used is written.
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

  void run(const mha_scheduler *scheduler, UnitCounter *counter, const ProductMemory &memory, unsigned char *workspace) const {
    run_products(layer_, products_, count_, scheduler, counter, memory, workspace);
  }

 private:
  const mha_layer &layer_;
  int64_t count_;
  Product products_[max_products];
};

// Where q, k, v and the context of a call lie, in the workspace but for what the caller or a cache has.
void place(const mha_layer &layer, Plan *plan, unsigned char *memory) {
  const LayerShape &shape = layer.shape;
  const mha_forward_args &args = plan->args;
  MiddleStage &stage = plan->stage;
  Attention &attention = stage.attention;
  const auto floats_at = [memory](int64_t offset) { return reinterpret_cast<float *>(memory + offset); };
  attention.q = {floats_at(plan->q), args.n_q * shape.q_columns(), shape.q_columns(), shape.head_dim};
  if (shape.gate != MHA_GATE_NONE) {
    attention.gate.values = {floats_at(plan->gate), args.n_q * shape.g_columns(), shape.g_columns(), shape.gate_dim};
    attention.gate.is_sigmoid = shape.gate == MHA_GATE_SIGMOID;
    attention.gate.is_single = shape.gate_dim == 1;
  }
  if (!args.cache) {
    const int64_t positions = plan->key_blocks() * key_block, width = attention.head_dim_v_padded;
    const int64_t value_positions = plan->has_cu_seqlens() ? positions : args.n_kv, heads = shape.num_kv_heads;
    attention.k = packed_floats(floats_at(plan->k), shape.head_dim, positions * shape.head_dim, positions, heads, plan->has_cu_seqlens());
    attention.v = packed_floats(floats_at(plan->v), width, value_positions * width, positions, heads, plan->has_cu_seqlens());
  }
  if (plan->key && plan->has_key_rows())
    stage.k_rows = {floats_at(plan->k_rows), args.n_kv * shape.k_columns(), shape.k_columns(), shape.head_dim};
  if (plan->key && plan->has_value_rows())
    stage.v_rows = {floats_at(plan->v_rows), args.n_kv * shape.v_columns(), shape.v_columns(), shape.head_dim_v};
  // Without W_O the context is the output.
  attention.output = shape.has_output ? floats_at(plan->context) : args.output;
  attention.output_storage = static_cast<Storage>(shape.has_output ? MHA_TYPE_F32 : args.output_type);
  attention.output_batch_stride = shape.has_output ? args.n_q * shape.context_columns() : args.output_batch_stride;
  attention.output_row_stride = shape.has_output ? shape.context_columns() : args.output_row_stride;
  attention.output_head_stride = shape.head_dim_v;
}

// x -> q | gate | k | v. A head is a column range: each is written to where it is stored from, or where the attention reads it.
void project_inputs(const mha_layer &layer, const Plan &plan, unsigned char *workspace) {
  const LayerShape &shape = layer.shape;
  const mha_forward_args &args = plan.args;
  const MiddleStage &stage = plan.stage;
  const Attention &attention = stage.attention;
  const mha_taps &taps = stage.taps;
  // The kernels only read what they are told of; here it is written.
  const auto written = [](const void *base) { return static_cast<float *>(const_cast<void *>(base)); };
  const int64_t q_rows = rows_of_extents(stage.queries, args.batch, args.n_q);
  const int64_t n_q = plan.has_cu_seqlens() ? 0 : args.n_q, n_kv = plan.has_cu_seqlens() ? 0 : args.n_kv;
  InputRows query = plan.query;
  query.extents = stage.queries;
  Products qkv(layer);
  Projection &to_q = qkv.add(matrix_q, query, q_rows);
  set_destination_of_rows(&to_q.destination, written(attention.q.base), n_q, shape.q_columns());
  set_destination_of_rows(&to_q.tap, taps.q, n_q, shape.q_columns());
  if (shape.gate != MHA_GATE_NONE) {
    Projection &to_gate = qkv.add(matrix_g, query, q_rows);
    set_destination_of_rows(&to_gate.destination, written(attention.gate.values.base), n_q, shape.g_columns());
  }
  if (plan.key) {
    const int64_t kv_rows = rows_of_extents(stage.keys, args.batch, args.n_kv);
    InputRows key = *plan.key, value = *plan.value;
    key.extents = value.extents = stage.keys;
    Projection &to_k = qkv.add(matrix_k, key, kv_rows);
    set_destination_of_rows(&to_k.tap, taps.k, n_kv, shape.k_columns());
    if (stage.k_rows.base)
      set_destination_of_rows(&to_k.destination, written(stage.k_rows.base), n_kv, shape.k_columns());
    else
      set_destination(&to_k.destination, Destination::Kind::key_blocks, written(attention.k.base), attention.k.batch_stride, 0,
                      attention.k.head_stride, shape.head_dim);
    Projection &to_v = qkv.add(matrix_v, value, kv_rows);
    set_destination_of_rows(&to_v.tap, taps.v, n_kv, shape.v_columns());
    if (stage.v_rows.base)
      set_destination_of_rows(&to_v.destination, written(stage.v_rows.base), n_kv, shape.v_columns());
    else
      set_destination(&to_v.destination, Destination::Kind::value_rows, written(attention.v.base), attention.v.batch_stride,
                      attention.v.row_stride, attention.v.head_stride, shape.head_dim_v);
  }
  qkv.run(args.scheduler, stage.counter, plan.inputs, workspace);
}

// context -> y
void project_output(const mha_layer &layer, const Plan &plan, unsigned char *workspace) {
  const mha_forward_args &args = plan.args;
  const MiddleStage &stage = plan.stage;
  const Attention &attention = stage.attention;
  const int64_t batch_stride = plan.has_cu_seqlens() ? 0 : attention.output_batch_stride;
  const InputRows context = {attention.output, args.n_q, batch_stride, attention.output_row_stride, stage.queries};
  Products output(layer);
  Projection &to_output = output.add(matrix_o, context, rows_of_extents(stage.queries, args.batch, args.n_q));
  set_destination(&to_output.destination, Destination::Kind::rows, args.output, args.output_batch_stride, args.output_row_stride, 0,
                  layer.shape.output_dim);
  to_output.destination.storage = static_cast<Storage>(args.output_type);
  output.run(args.scheduler, stage.counter, plan.output, workspace);
}

// Nothing here can fail.
void run(const mha_layer &layer, Plan &plan, unsigned char *workspace) {
  const mha_forward_args &args = plan.args;
  MiddleStage &stage = plan.stage;
  place(layer, &plan, workspace);
  begin_passes(&stage, workspace);
  if (stage.queries) {
    clear_padding(valid_queries(stage), plan.array_batch(), args.n_q, layer.shape.output_dim, args.output, args.output_batch_stride,
                  args.output_row_stride, static_cast<Storage>(args.output_type));
  }
  while (next_pass(&stage)) {
    project_inputs(layer, plan, workspace);
    attend_pass(&stage);
    if (layer.shape.has_output) project_output(layer, plan, workspace);
  }
}

// A small call needs no more than the checks of its rows.
mha_status forward_small(Report report, const mha_layer &layer, const Plan &plan, void *workspace, size_t workspace_bytes) {
  const mha_forward_args &args = plan.args;
  if (const mha_status status = check_pointers(report, args)) return status;
  if (const mha_status status =
          check_workspace(report, 3, "mha_forward_workspace", workspace, workspace_bytes, small_workspace_bytes(layer.small, args.n_q)))
    return status;
  const SmallCall call = {args.batch,
                          args.n_q,
                          (args.flags & MHA_CAUSAL) != 0,
                          {plan.query.base, plan.query.batch_stride, plan.query.row_stride, 0},
                          static_cast<float *>(args.output),
                          args.output_batch_stride,
                          args.output_row_stride};
  layer.kernels->run_small(layer.small, call, reinterpret_cast<float *>(align_workspace(workspace)));
  return MHA_OK;
}

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_forward_workspace(const mha_layer *layer, const mha_forward_args *args, size_t *bytes, mha_error *error) {
  Report report(error, args_argument);
  Plan plan;
  if (const mha_status status = make_plan(report, layer, args, &plan)) return status;
  return write_size(report.about(3), static_cast<size_t>(plan.workspace_bytes), bytes);
}

mha_status mha_forward(const mha_layer *layer, const mha_forward_args *args, void *workspace, size_t workspace_bytes, mha_error *error) {
  Report report(error, args_argument);
  Plan plan;
  if (const mha_status status = check_rows(report, layer, args, &plan)) return status;
  if (is_small(*layer, plan.args)) return forward_small(report, *layer, plan, workspace, workspace_bytes);
  if (const mha_status status = finish_plan(report, layer, &plan)) return status;
  if (const mha_status status = check_workspace(report, 3, "mha_forward_workspace", workspace, workspace_bytes, plan.workspace_bytes))
    return status;
  if (plan.stage.sequences.has_no_work()) return MHA_OK;
  if (const mha_status status = check_pointers(report, plan.args)) return status;
  if (const mha_status status = check_array_contents(report, &plan.stage)) return status;
  run(*layer, plan, align_workspace(workspace));
  return MHA_OK;
}

mha_status mha_info(const mha_layer *layer, const mha_forward_args *args, mha_call_info *info, mha_error *error) {
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
    const uint64_t q_rows = valid_queries(plan.stage.sequences), kv_rows = valid_keys(plan.stage.sequences);
    const uint64_t output_weights = shape.has_output ? product(shape.context_columns(), shape.output_dim) : 0;
    filled.operations = 2 * (q_rows * (product(shape.query_dim, shape.q_columns() + shape.g_columns()) + output_weights) +
                             kv_rows * (product(shape.key_dim, shape.k_columns()) + product(shape.value_dim, shape.v_columns())));
    const uint64_t of_inputs = static_cast<uint64_t>(bytes_of(static_cast<Storage>(read.input_type)));
    // Inputs that are the same rows count once.
    filled.bytes = filled.packed_bytes + of_inputs * (q_rows * static_cast<uint64_t>(shape.query_dim) +
                                                      (read.key ? kv_rows * static_cast<uint64_t>(shape.key_dim) : 0) +
                                                      (read.value ? kv_rows * static_cast<uint64_t>(shape.value_dim) : 0));
    filled.bytes += q_rows * product(shape.output_dim, bytes_of(static_cast<Storage>(read.output_type)));
    add_cost_of_middle(plan.stage, &filled);
  }
  return write_struct(report.about(3), "mha_call_info", filled, info);
}
