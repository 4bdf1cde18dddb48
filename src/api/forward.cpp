// mha_forward: the products with W_Q|W_G|W_K|W_V, the attention, the product with W_O.
//
// check_forward and check_and_plan make the call; the first of them checks all that a small call
// needs (run/small.h), which has no plan and no units of work. `run` goes through the passes:
// project, attend, project. Only long calls over a ring have more than one pass.

#include "forward.h"

#include <algorithm>

#include "../base/structs.h"
#include "../check/arrays.h"
#include "../check/entries.h"
#include "../check/request.h"
#include "../run/small.h"
#include "frame.h"

namespace mha {
namespace {

// Key tiles of 16 positions that the keys of one sequence need; of all sequences where these are
// packed.
int64_t key_tiles(const ForwardCall &call) {
  return call.is_packed() ? packed_key_blocks(call.args.call.n_kv, call.stage.sequences.batch)
                          : blocks_of(call.args.call.n_kv, tile_keys);
}

// Whether keys and values go to rows first, from which they are prepared and stored.
bool has_key_rows(const ForwardCall &call) {
  const AttentionRequest &request = call.stage.attention.request;
  return call.stage.sequences.cache || request.is_in_integers || request.prepare_k.is_any;
}
bool has_value_rows(const ForwardCall &call) {
  const AttentionRequest &request = call.stage.attention.request;
  return call.stage.sequences.cache || request.is_in_integers || request.prepare_v.is_any;
}

// Takes the memory of a call: first for the attention, then for what the products write, then for
// what the products need themselves.
void plan_workspace(const mha_layer &layer, ForwardCall *call, WorkspaceLayout *layout) {
  const LayerShape &shape = layer.shape;
  const mha_forward_args &args = call->args;
  const SequenceArguments &s = call->stage.sequences;
  Attention &attention = call->stage.attention;
  const int64_t threads = threads_of(args.call.scheduler);
  const Count batch(args.call.batch), none(0), q_rows = batch * Count(args.call.n_q),
                                               kv_rows = batch * Count(args.call.n_kv),
                                               kv_heads = batch * Count(shape.num_kv_heads);
  attention.plan = plan_attention(attention.request, s, threads, layout);
  const auto take = [&](bool is_needed, Count rows, int64_t width) {
    return layout->take_floats(is_needed ? rows * Count(width) : none);
  };
  const Count key_positions = Count(key_tiles(*call)) * Count(tile_keys);
  const bool are_codes = attention.request.is_in_integers;
  const int64_t v_width = attention.plan.head_dim_v_padded;
  const Count value_positions = s.is_packed() || are_codes ? key_positions : Count(args.call.n_kv);
  call->q = take(true, q_rows, shape.q_columns());
  call->gate = take(true, q_rows, shape.g_columns());
  call->k = take(!s.cache, kv_heads * key_positions,
                 are_codes ? floats_of_codes(shape.head_dim) : key_stride_of(shape.head_dim));
  call->v =
      take(!s.cache, kv_heads * value_positions, are_codes ? floats_of_codes(v_width) : v_width);
  call->k_rows = take(has_key_rows(*call), kv_rows, shape.k_columns());
  call->v_rows = take(has_value_rows(*call), kv_rows, shape.v_columns());
  call->context = take(shape.has_output, q_rows, shape.context_columns());
  const int64_t input_width = std::max(shape.query_dim, std::max(shape.key_dim, shape.value_dim));
  call->inputs = plan_products(layer, storage_of_type(args.query.type), s.is_ragged(),
                               batch * Count(std::max(args.call.n_q, args.call.n_kv)), input_width,
                               shape.input_columns(), threads, layout);
  call->output = plan_products(layer, Storage::f32, s.is_ragged(), shape.has_output ? q_rows : none,
                               shape.context_columns(), shape.output_dim, threads, layout);
}

// Rows of packed sequences have no batch stride.
InputRows rows_of(const mha_input &input, int64_t n, bool is_packed, const Extent *extents) {
  return {input.data,        n,       is_packed ? 0 : input.strides.batch,
          input.strides.row, extents, storage_of_type(input.type)};
}

// Whether the call asks for nothing but all of its rows, with MHA_CAUSAL at most.
bool is_plain(const mha_call &call) {
  return (call.flags & ~MHA_CAUSAL) == 0 && call.attention_arithmetic == 0 &&
         (call.window_left | call.window_right) == 0 && !call.rope && !call.norm && !call.score &&
         !call.sequences && !call.score_arrays && !call.cache && !call.cache_read && !call.outputs;
}

// Whether a call takes the small path: self-attention of a few rows per sequence (with several
// threads, a few rows in total), and no option but MHA_CAUSAL. Everything that the small path does
// not compute must be absent from the call. Only counts, arrays and the scheduler need checks.
bool is_small(const mha_layer &layer, const mha_forward_args &args) {
  static_assert(sizeof(void *) != 8 || sizeof args == 312,
                "a small call ignores the new field: refuse it here");
  const mha_call &of = args.call;
  const bool has_few_rows = of.n_q > 0 && of.n_q <= layer.small.max_rows && of.batch > 0;
  // Waking threads takes longer than computing max_rows rows.
  const bool is_shared_out =
      has_few_rows && threads_of(of.scheduler) > 1 && of.batch > layer.small.max_rows / of.n_q;
  const bool is_self = !args.key.data && !args.value.data;
  const bool has_floats = args.query.type <= MHA_TYPE_F32 && args.output.type <= MHA_TYPE_F32;
  return has_few_rows && !is_shared_out && is_self && has_floats && is_plain(of);
}

// Checks everything that needs no array, and plans the workspace. mha_forward skips this for small
// calls; size queries and mha_forward_info do not, so that arguments get the same checks there.
mha_status check_and_plan(Report report, const mha_layer *layer, ForwardCall *call) {
  call->layer = layer;
  mha_forward_args &args = call->args;
  AttentionStage &stage = call->stage;
  const bool is_self = !args.key.data && !args.call.cache_read;
  MHA_TRY(read_call(report, args.call, is_self, 0, &stage.sequences, &stage.outputs));
  // Products count batches by sequence, of which packed ones have no stride.
  if (call->is_packed()) args.output.strides.batch = 0;
  // The layer has chosen its kernels when it was created.
  stage.scheduler = args.call.scheduler;
  stage.kernels = layer->kernels;
  MHA_TRY(check_forward_request(report, layer->shape, args.call, stage.outputs, &stage.sequences,
                                &stage.attention.request));
  MHA_TRY(check_sgemm_inputs(report, *layer, args));
  WorkspaceLayout layout;
  plan_workspace(*layer, call, &layout);
  if (is_small(*layer, args)) {
    call->workspace_bytes = small_workspace_bytes(layer->small, args.call.n_q);
    return MHA_OK;
  }
  return check_size(report, layout, stage.sequences.has_no_work(), &call->workspace_bytes);
}

// ---- The call

// Writes field by field into the struct in place: a copy of a struct that has just been written
// would wait for the writes.
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

// Collects products, and runs matrices that have the same input rows as one product: for
// self-attention that is W_Q|W_G|W_K|W_V, in one pass over the rows.
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

  void run(const mha_scheduler *scheduler, UnitCounter *counter, const ProductPlan &memory,
           unsigned char *workspace) const {
    run_products(layer_, products_, count_, scheduler, counter, memory, workspace);
  }

 private:
  const mha_layer &layer_;
  int64_t count_;
  Product products_[max_products];
};

// Where q, k, v and the context of a call lie: in the workspace, unless they are the caller's or in
// a cache.
void place(const ForwardCall &call, unsigned char *memory, AttentionArrays *arrays) {
  const LayerShape &shape = call.layer->shape;
  const mha_forward_args &args = call.args;
  const AttentionStage &stage = call.stage;
  // Rows of all heads, side by side.
  const auto rows_at = [memory](int64_t offset, int64_t n, int64_t columns, int64_t head_width) {
    return StridedRows{memory + offset, n * columns, columns, head_width};
  };
  arrays->q = rows_at(call.q, args.call.n_q, shape.q_columns(), shape.head_dim);
  arrays->k = stage.attention.request.k;
  arrays->v = stage.attention.request.v;
  const int64_t v_width = stage.attention.plan.head_dim_v_padded;
  if (stage.attention.request.is_in_integers && !stage.sequences.cache) {
    const auto packed = [&](int64_t offset, bool are_keys, int64_t width) {
      return packed_codes_at(reinterpret_cast<float *>(memory + offset), are_keys, width,
                             key_tiles(call) * tile_keys, shape.num_kv_heads,
                             args.call.batch * shape.num_kv_heads, call.is_packed());
    };
    arrays->k = packed(call.k, true, shape.head_dim);
    arrays->v = packed(call.v, false, v_width);
  } else if (!stage.sequences.cache) {
    const int64_t positions = key_tiles(call) * tile_keys,
                  value_positions = call.is_packed() ? positions : args.call.n_kv;
    const auto packed = [&](int64_t offset, int64_t row_stride, int64_t positions_of_head) {
      return packed_floats(reinterpret_cast<float *>(memory + offset), row_stride,
                           positions_of_head * row_stride, positions, shape.num_kv_heads,
                           call.is_packed());
    };
    arrays->k = packed(call.k, key_stride_of(shape.head_dim), positions);
    arrays->v = packed(call.v, v_width, value_positions);
  }
  arrays->new_keys = arrays->new_values = {};
  if (!args.call.cache_read && has_key_rows(call))
    arrays->new_keys = rows_at(call.k_rows, args.call.n_kv, shape.k_columns(), shape.head_dim);
  if (!args.call.cache_read && has_value_rows(call))
    arrays->new_values = rows_at(call.v_rows, args.call.n_kv, shape.v_columns(), shape.head_dim_v);
  arrays->gate = {};
  if (shape.gate != MHA_FUNCTION_NONE)
    arrays->gate = {rows_at(call.gate, args.call.n_q, shape.g_columns(), shape.gate_dim),
                    shape.gate == MHA_FUNCTION_SIGMOID, shape.gate_dim == 1};
  // Without W_O the context is the output.
  const mha_strides &strides = args.output.strides;
  arrays->output = {args.output.data, storage_of_type(args.output.type), strides.batch, strides.row,
                    shape.head_dim_v};
  if (shape.has_output)
    arrays->output = {memory + call.context, Storage::f32, args.call.n_q * shape.context_columns(),
                      shape.context_columns(), shape.head_dim_v};
}

// x -> q | gate | k | v. A head is a range of columns. The products write each head to where the
// attention reads it, so nothing is copied to split the heads. Keys and values that a norm, a
// rotation or a cache still has to process go to rows first.
void project_inputs(const ForwardCall &call, unsigned char *workspace) {
  const LayerShape &shape = call.layer->shape;
  const mha_forward_args &args = call.args;
  const AttentionStage &stage = call.stage;
  const AttentionArrays &arrays = stage.attention.arrays;
  const mha_outputs &outputs = stage.outputs;
  // AttentionArrays points to const, since the attention only reads q, k and v. The products write.
  const auto written = [](const void *base) {
    return static_cast<float *>(const_cast<void *>(base));
  };
  const int64_t q_rows = rows_of_extents(stage.queries, stage.sequences.batch, args.call.n_q);
  const int64_t n_q = call.is_packed() ? 0 : args.call.n_q,
                n_kv = call.is_packed() ? 0 : args.call.n_kv;
  const InputRows query = rows_of(args.query, args.call.n_q, call.is_packed(), stage.queries);
  Products qkv(*call.layer);
  Projection &to_q = qkv.add(matrix_q, query, q_rows);
  set_destination_of_rows(&to_q.destination, written(arrays.q.base), n_q, shape.q_columns());
  set_destination_of_rows(&to_q.tap, outputs.q, n_q, shape.q_columns());
  if (shape.gate != MHA_FUNCTION_NONE) {
    Projection &to_gate = qkv.add(matrix_g, query, q_rows);
    set_destination_of_rows(&to_gate.destination, written(arrays.gate.values.base), n_q,
                            shape.g_columns());
  }
  if (!args.call.cache_read) {
    const int64_t kv_rows = rows_of_extents(stage.keys, stage.sequences.batch, args.call.n_kv);
    const mha_input &k = args.key.data ? args.key : args.query,
                    &v = args.value.data ? args.value : k;
    const InputRows key = rows_of(k, args.call.n_kv, call.is_packed(), stage.keys),
                    value = rows_of(v, args.call.n_kv, call.is_packed(), stage.keys);
    Projection &to_k = qkv.add(matrix_k, key, kv_rows);
    set_destination_of_rows(&to_k.tap, outputs.k, n_kv, shape.k_columns());
    if (arrays.new_keys.base)
      set_destination_of_rows(&to_k.destination, written(arrays.new_keys.base), n_kv,
                              shape.k_columns());
    else
      set_destination(&to_k.destination, Destination::Kind::key_tiles, written(arrays.k.base),
                      arrays.k.batch_stride, arrays.k.row_stride, arrays.k.head_stride,
                      shape.head_dim);
    Projection &to_v = qkv.add(matrix_v, value, kv_rows);
    set_destination_of_rows(&to_v.tap, outputs.v, n_kv, shape.v_columns());
    if (arrays.new_values.base)
      set_destination_of_rows(&to_v.destination, written(arrays.new_values.base), n_kv,
                              shape.v_columns());
    else
      set_destination(&to_v.destination, Destination::Kind::value_rows, written(arrays.v.base),
                      arrays.v.batch_stride, arrays.v.row_stride, arrays.v.head_stride,
                      shape.head_dim_v);
  }
  qkv.run(args.call.scheduler, stage.counter, call.inputs, workspace);
}

// context -> y
void project_output(const ForwardCall &call, unsigned char *workspace) {
  const mha_layer &layer = *call.layer;
  const mha_forward_args &args = call.args;
  const AttentionStage &stage = call.stage;
  const AttentionArrays &arrays = stage.attention.arrays;
  const int64_t batch_stride = call.is_packed() ? 0 : arrays.output.batch_stride;
  const InputRows context = {arrays.output.base, args.call.n_q, batch_stride,
                             arrays.output.row_stride, stage.queries};
  Products output(layer);
  Projection &to_output = output.add(
      matrix_o, context, rows_of_extents(stage.queries, stage.sequences.batch, args.call.n_q));
  set_destination(&to_output.destination, Destination::Kind::rows, args.output.data,
                  args.output.strides.batch, args.output.strides.row, 0, layer.shape.output_dim);
  to_output.destination.storage = storage_of_type(args.output.type);
  output.run(args.call.scheduler, stage.counter, call.output, workspace);
}

// A small call needs no checks but those of its rows.
mha_status forward_small(Report report, const mha_layer &layer, mha_forward_args &args,
                         void *workspace, size_t workspace_bytes) {
  MHA_TRY(each_array(layer, args, CheckPointers{report}));
  MHA_TRY(check_workspace(report, 3, "mha_forward_workspace", workspace, workspace_bytes,
                          small_workspace_bytes(layer.small, args.call.n_q)));
  const SmallCall small = {args.call.batch,
                           args.call.n_q,
                           (args.call.flags & MHA_CAUSAL) != 0,
                           {args.query.data, args.query.strides.batch, args.query.strides.row, 0},
                           static_cast<float *>(args.output.data),
                           args.output.strides.batch,
                           args.output.strides.row};
  layer.kernels->run_small(layer.small, small, reinterpret_cast<float *>(align64(workspace)));
  return MHA_OK;
}

}  // namespace

mha_status make_call(Report report, const mha_layer *layer, const mha_forward_args *given,
                     ForwardCall *call) {
  MHA_TRY(check_forward(report, layer, given, &call->args));
  return check_and_plan(report, layer, call);
}

bool has_no_work(const ForwardCall &call) { return call.stage.sequences.has_no_work(); }

mha_status check_data(Report report, ForwardCall &call) {
  MHA_TRY(each_array(*call.layer, call.args, CheckPointers{report}));
  return check_array_contents(report, call.stage.sequences, &call.stage.attention.request);
}

void run(ForwardCall *made, unsigned char *workspace) {
  ForwardCall &call = *made;
  const LayerShape &shape = call.layer->shape;
  const mha_forward_args &args = call.args;
  AttentionStage &stage = call.stage;
  place(call, workspace, &stage.attention.arrays);
  begin_passes(&stage, workspace);
  if (stage.has_padding())
    clear_padding(stage.queries, args.call.batch, args.call.n_q, shape.output_dim, args.output.data,
                  args.output.strides.batch, args.output.strides.row,
                  storage_of_type(args.output.type));
  while (next_pass(&stage)) {
    project_inputs(call, workspace);
    attend_pass(&stage);
    if (shape.has_output) project_output(call, workspace);
  }
}

}  // namespace mha

using namespace mha;

mha_status mha_forward_workspace(const mha_layer *layer, const mha_forward_args *args,
                                 size_t *bytes, mha_error *error) {
  return answer_size<ForwardCall>(error, bytes, layer, args);
}

mha_status mha_forward(const mha_layer *layer, const mha_forward_args *args, void *workspace,
                       size_t workspace_bytes, mha_error *error) {
  Reporter report(error, args_argument);
  ForwardCall call;
  MHA_TRY(check_forward(report, layer, args, &call.args));
  if (is_small(*layer, call.args))
    return forward_small(report, *layer, call.args, workspace, workspace_bytes);
  MHA_TRY(check_and_plan(report, layer, &call));
  return run_made(report, 3, "mha_forward_workspace", workspace, workspace_bytes, &call);
}
