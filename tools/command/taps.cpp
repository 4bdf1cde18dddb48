#include "taps.h"

#include <cmath>
#include <numeric>
#include <string>

#include "error.h"
#include "terminal.h"

namespace command {
namespace {

Heads rows_of_heads(const std::vector<float> &values, int64_t count, int64_t rows, int64_t width) {
  return {values.data(), count, rows, width, count * width, width};
}

// Makes room for the context.
void tap(Attention *attention) {
  attention->context_values.resize(static_cast<size_t>(attention->q.count * attention->q.rows * attention->v.width));
  attention->context = rows_of_heads(attention->context_values, attention->q.count, attention->q.rows, attention->v.width);
}

void run(const mha_attention_args &args) {
  mha_error error;
  size_t workspace_bytes = 0;
  check(mha_attention_workspace(&args, &workspace_bytes, &error), error, "mha_attention");
  std::vector<unsigned char> workspace(workspace_bytes);
  check(mha_attention(&args, workspace.data(), workspace_bytes, &error), error, "mha_attention");
}

void run(const mha_layer *layer, const mha_forward_args &args, const std::string &name) {
  mha_error error;
  size_t workspace_bytes = 0;
  check(mha_forward_workspace(layer, &args, &workspace_bytes, &error), error, name);
  std::vector<unsigned char> workspace(workspace_bytes);
  check(mha_forward(layer, &args, workspace.data(), workspace_bytes, &error), error, name);
}

// The rows of heads as a call has them once they are normalised and rotated: no call shows that of queries, but a cache holds it of keys.
std::vector<float> prepared(const Heads &rows, const mha_norm *norm, const mha_rope *rope) {
  mha_kv_cache_config config = {};
  config.struct_size = sizeof config;
  config.num_sequences = 1;
  config.capacity = rows.rows;
  config.num_kv_heads = rows.count;
  config.head_dim = rows.width;
  config.head_dim_v = 1;
  size_t bytes = 0;
  mha_error error;
  check(mha_kv_cache_size(&config, &bytes, &error), error, "mha_kv_cache_size");
  constexpr size_t alignment = 64;
  std::vector<unsigned char> memory(bytes + alignment);
  unsigned char *const buffer = memory.data() + (alignment - reinterpret_cast<uintptr_t>(memory.data()) % alignment) % alignment;
  mha_kv_cache *cache = nullptr;
  check(mha_kv_cache_init(&config, buffer, bytes, &cache, &error), error, "mha_kv_cache_init");

  std::vector<float> output(static_cast<size_t>(rows.count)), result(static_cast<size_t>(rows.rows * rows.count * rows.width));
  const std::vector<float> values(static_cast<size_t>(rows.rows * rows.count));
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.batch = args.n_q = 1;
  args.n_kv = rows.rows;
  args.num_heads = args.num_kv_heads = rows.count;
  args.head_dim = rows.width;
  args.head_dim_v = 1;
  args.q = args.k = rows.data;
  args.v = values.data();
  args.output = output.data();
  args.norm = norm;
  args.rope = rope;
  args.cache = cache;
  run(args);
  check(mha_kv_cache_read(cache, 0, 0, rows.rows, result.data(), nullptr, &error), error, "mha_kv_cache_read");
  return result;
}

// Where rows are in their sequences; of rows in none, 0.
struct Positions {
  std::vector<int64_t> q, k;
};

Positions positions_of(int64_t n_q, int64_t n_kv, const CallOptions &call) {
  Positions positions = {std::vector<int64_t>(static_cast<size_t>(n_q)), std::vector<int64_t>(static_cast<size_t>(n_kv))};
  const std::vector<int64_t> all_q = {0, n_q}, all_k = {0, n_kv};
  const std::vector<int64_t> &q = call.num_packed() != 0 ? call.packed_queries() : all_q;
  const std::vector<int64_t> &k = call.num_packed() != 0 ? call.packed_keys() : all_k;
  for (size_t b = 0; b + 1 < q.size(); ++b) {  // the last query is at the last key
    std::iota(positions.q.begin() + q[b], positions.q.begin() + q[b + 1], k[b + 1] - k[b] - (q[b + 1] - q[b]));
    std::iota(positions.k.begin() + k[b], positions.k.begin() + k[b + 1], 0);
  }
  return positions;
}

std::unique_ptr<const Prepared> prepare(const Heads &q, const Heads &k, const Heads &v, const mha_norm *norm, const mha_rope *rope,
                                        const CallOptions &call) {
  auto result = std::make_unique<Prepared>();
  result->v = v;
  if (norm != nullptr && (norm->flags & MHA_NORM_VALUES) != 0) {
    mha_norm v_norm = {};
    v_norm.struct_size = sizeof v_norm;
    v_norm.epsilon = norm->epsilon;
    result->v_values = prepared(v, &v_norm, nullptr);
    result->v = rows_of_heads(result->v_values, v.count, v.rows, v.width);
  }
  mha_norm q_norm = {};
  if (norm != nullptr) {
    q_norm = *norm;
    q_norm.k_weight = norm->q_weight;
  }
  const Positions positions = positions_of(q.rows, k.rows, call);
  mha_rope q_rope = {}, k_rope = {};
  if (rope != nullptr) {
    q_rope = k_rope = *rope;
    q_rope.q_positions = q_rope.k_positions = positions.q.data();
    k_rope.q_positions = k_rope.k_positions = positions.k.data();
  }
  result->q_values = prepared(q, norm != nullptr ? &q_norm : nullptr, rope != nullptr ? &q_rope : nullptr);
  result->k_values = prepared(k, norm, rope != nullptr ? &k_rope : nullptr);
  result->q = rows_of_heads(result->q_values, q.count, q.rows, q.width);
  result->k = rows_of_heads(result->k_values, k.count, k.rows, k.width);
  return result;
}

}  // namespace

std::unique_ptr<const Forward> look_into(const LoadedLayer &layer, const LoadedLayer *without_output, const CallInputs &inputs,
                                         const CallOptions &options) {
  const mha_layer_config &shape = layer.shape();
  const int64_t n_q = inputs.n_q();
  const int64_t n_kv = inputs.n_kv();
  const std::string &name = inputs.query.name;
  const double bytes = 4.0 * sizeof(float) * static_cast<double>(n_q) * static_cast<double>(n_kv);
  if (bytes > 0x1p30) {
    fail(name, ": is too long to explain: the score matrices of ", n_q, " rows and a head would take ", bytes_text(bytes), " of memory");
  }
  if (inputs.batch() == 0 || n_q == 0 || n_kv == 0) {
    fail(name, ": has the shape ", shape_text(inputs.query.shape), "; there is nothing to explain");
  }

  auto forward = std::make_unique<Forward>();
  Forward &result = *forward;
  result.q_values.resize(static_cast<size_t>(n_q * shape.num_heads * shape.head_dim));
  result.k_values.resize(static_cast<size_t>(n_kv * shape.num_kv_heads * shape.head_dim));
  result.v_values.resize(static_cast<size_t>(n_kv * shape.num_kv_heads * shape.head_dim_v));
  result.output.resize(static_cast<size_t>(n_q * shape.output_dim));
  Attention &middle = result.middle;
  result.q = middle.q = rows_of_heads(result.q_values, shape.num_heads, n_q, shape.head_dim);
  result.k = middle.k = rows_of_heads(result.k_values, shape.num_kv_heads, n_kv, shape.head_dim);
  result.v = middle.v = rows_of_heads(result.v_values, shape.num_kv_heads, n_kv, shape.head_dim_v);
  middle.scale = shape.scale;
  middle.is_causal = inputs.is_causal;
  middle.is_self = !inputs.key && !inputs.value;
  middle.call = &options;

  tap(&middle);
  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.q = result.q_values.data();
  taps.k = result.k_values.data();
  taps.v = result.v_values.data();
  taps.context = middle.context_values.data();
  mha_forward_args args = inputs.arguments(0, 1);
  args.output = result.output.data();
  args.taps = &taps;
  mha_score_options score;
  options.add_to(&args, 0, &score);
  mha_error error;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  check(mha_info(layer.get(), &args, &info, &error), error, name);
  middle.instruction_set = info.instruction_set;
  run(layer.get(), args, name);
  if (without_output != nullptr) {
    result.gated.resize(middle.context_values.size());
    mha_forward_args merged = args;
    merged.output = result.gated.data();
    merged.taps = nullptr;
    run(without_output->get(), merged, name);
  }

  const mha_norm *const norm = options.norm();
  const mha_rope *const rope = options.rope();
  const bool is_norm_last = norm != nullptr && (norm->flags & MHA_NORM_AFTER_ROPE) != 0;
  if (norm != nullptr) result.norm = prepare(result.q, result.k, result.v, norm, is_norm_last ? rope : nullptr, options);
  if (rope != nullptr) result.rotation = prepare(result.q, result.k, result.v, is_norm_last ? nullptr : norm, rope, options);
  const Prepared *const last = is_norm_last || rope == nullptr ? result.norm.get() : result.rotation.get();
  if (last != nullptr) {
    middle.q = last->q;
    middle.k = last->k;
    middle.v = last->v;
  }
  return forward;
}

HeadScores scores_of_head(const Attention &attention, int64_t head) {
  const Heads &q = attention.q, &k = attention.k, &v = attention.v;
  const int64_t kv_head = head / (q.count / k.count);
  HeadScores result;
  result.rows = q.rows;
  result.columns = k.rows;
  for (std::vector<float> *values :
       {&result.scores, &result.scaled_scores, &result.softcapped_scores, &result.masked_scores, &result.weights}) {
    values->resize(static_cast<size_t>(q.rows * k.rows));
  }
  std::vector<float> context(static_cast<size_t>(q.rows * v.width));

  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.scores = result.scores.data();
  taps.scaled_scores = result.scaled_scores.data();
  taps.softcapped_scores = result.softcapped_scores.data();
  taps.masked_scores = result.masked_scores.data();
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.batch = args.num_heads = 1;
  args.n_q = q.rows;
  args.n_kv = k.rows;
  args.head_dim = q.width;
  args.head_dim_v = v.width;
  args.q = q.head(head).data;
  args.k = k.head(kv_head).data;
  args.v = v.head(kv_head).data;
  args.q_row_stride = q.row_stride;
  args.k_row_stride = k.row_stride;
  args.v_row_stride = v.row_stride;
  args.output = context.data();
  args.scale = attention.scale;
  args.flags = attention.is_causal ? MHA_CAUSAL : 0;
  attention.call->add_flags(&args);
  mha_score_options score;
  if (attention.call->score() != nullptr) {
    score = *attention.call->score();
    attention.call->move_to_head(head, &score);
    args.score = &score;
  }
  args.instruction_set = attention.instruction_set;
  args.attention_weights = result.weights.data();
  args.taps = &taps;
  run(args);
  return result;
}

std::unique_ptr<const Attention> look_into(const GroupedExample &example, uint32_t instruction_set) {
  const auto heads_of = [&](const float *data) {
    return Heads{data, example.num_heads, example.n, example.head_dim, example.head_dim, example.n * example.head_dim};
  };
  auto result = std::make_unique<Attention>();
  result->q = heads_of(example.q);
  result->k = heads_of(example.k);
  result->v = heads_of(example.v);
  result->scale = 1 / std::sqrt(static_cast<float>(example.head_dim));
  result->is_causal = result->is_self = true;
  static const CallOptions nothing;
  result->call = &nothing;
  result->instruction_set = instruction_set;

  tap(result.get());
  mha_attention_args args = {};
  args.struct_size = sizeof args;
  args.batch = 1;
  args.n_q = args.n_kv = example.n;
  args.num_heads = example.num_heads;
  args.head_dim = example.head_dim;
  args.q = example.q;
  args.k = example.k;
  args.v = example.v;
  args.output = result->context_values.data();
  args.q_row_stride = args.k_row_stride = args.v_row_stride = result->q.row_stride;
  args.q_head_stride = args.k_head_stride = args.v_head_stride = result->q.head_stride;
  args.q_batch_stride = args.k_batch_stride = args.v_batch_stride = example.num_heads * result->q.head_stride;
  args.flags = MHA_CAUSAL;
  args.instruction_set = instruction_set;
  run(args);
  return result;
}

}  // namespace command
