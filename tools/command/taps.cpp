#include "taps.h"

#include <cmath>
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

}  // namespace

std::unique_ptr<const Forward> look_into(const LoadedLayer &layer, const CallInputs &inputs) {
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
  result.q.resize(static_cast<size_t>(n_q * shape.num_heads * shape.head_dim));
  result.k.resize(static_cast<size_t>(n_kv * shape.num_kv_heads * shape.head_dim));
  result.v.resize(static_cast<size_t>(n_kv * shape.num_kv_heads * shape.head_dim_v));
  result.output.resize(static_cast<size_t>(n_q * shape.output_dim));
  Attention &middle = result.middle;
  middle.q = rows_of_heads(result.q, shape.num_heads, n_q, shape.head_dim);
  middle.k = rows_of_heads(result.k, shape.num_kv_heads, n_kv, shape.head_dim);
  middle.v = rows_of_heads(result.v, shape.num_kv_heads, n_kv, shape.head_dim_v);
  middle.scale = shape.scale;
  middle.is_causal = inputs.is_causal;
  middle.is_self = !inputs.key && !inputs.value;

  tap(&middle);
  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.q = result.q.data();
  taps.k = result.k.data();
  taps.v = result.v.data();
  taps.context = middle.context_values.data();
  mha_forward_args args = inputs.arguments(0, 1);
  args.output = result.output.data();
  args.taps = &taps;
  mha_error error;
  mha_call_info info = {};
  info.struct_size = sizeof info;
  check(mha_info(layer.get(), &args, &info, &error), error, name);
  middle.instruction_set = info.instruction_set;
  size_t workspace_bytes = 0;
  check(mha_forward_workspace(layer.get(), &args, &workspace_bytes, &error), error, name);
  std::vector<unsigned char> workspace(workspace_bytes);
  check(mha_forward(layer.get(), &args, workspace.data(), workspace_bytes, &error), error, name);
  return forward;
}

HeadScores scores_of_head(const Attention &attention, int64_t head) {
  const Heads &q = attention.q, &k = attention.k, &v = attention.v;
  const int64_t kv_head = head / (q.count / k.count);
  HeadScores result;
  result.rows = q.rows;
  result.columns = k.rows;
  for (std::vector<float> *values : {&result.scores, &result.scaled_scores, &result.masked_scores, &result.weights}) {
    values->resize(static_cast<size_t>(q.rows * k.rows));
  }
  std::vector<float> context(static_cast<size_t>(q.rows * v.width));

  mha_taps taps = {};
  taps.struct_size = sizeof taps;
  taps.scores = result.scores.data();
  taps.scaled_scores = result.scaled_scores.data();
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
