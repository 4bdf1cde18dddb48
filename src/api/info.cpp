// mha_forward_info, mha_attention_info and mha_linear_info: how a call will run, and what it costs.

#include <algorithm>

#include "../check/entries.h"
#include "../check/request.h"
#include "../storage.h"
#include "attention.h"
#include "forward.h"
#include "frame.h"
#include "linear.h"

namespace mha {
namespace {

// ---- Pairs of query and key

// Adds up first + i for i in [0, count), each term at least 0 and at most `most`: the terms that
// are 0, then those that grow by 1, then those that have reached `most`.
uint64_t clamped_sum(int64_t first, int64_t count, int64_t most) {
  const int64_t below = first < 0 ? std::min(count, -first) : 0;  // terms that are 0
  const int64_t start = first < 0 ? 0 : first;
  const int64_t growing = start >= most ? 0 : std::min(count - below, most - start);
  const uint64_t n = static_cast<uint64_t>(growing), s = static_cast<uint64_t>(start);
  const uint64_t triangle = n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n;
  return n * s + triangle +
         static_cast<uint64_t>(count - below - growing) * static_cast<uint64_t>(most);
}

// Counts the pairs of query and key that attend, over all sequences and one head. The window of a
// query moves by one key from row to row, so both of its ends are sums of that kind.
uint64_t attending_pairs(const SequenceArguments &s) {
  const Window window = window_of(s);
  uint64_t pairs = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b),
                  n_kv = keys_with_columns(s, b, past_of(s, b) + keys_of(s, b)),
                  start = start_of(s, b);
    // Then the window of every query reaches the last key.
    const bool sees_all = start >= n_kv - 1 - window.right;
    const uint64_t ends =
        sees_all ? product(n_q, n_kv) : clamped_sum(start + window.right + 1, n_q, n_kv);
    const uint64_t begins = window.left >= capped_sum(start < 0 ? 0 : start, n_q)
                                ? 0
                                : clamped_sum(start - window.left, n_q, n_kv);
    pairs += ends - begins;
    if (!s.cache && !s.given.q_first_positions && !s.is_ragged())
      return static_cast<uint64_t>(s.batch) * pairs;
  }
  return pairs;
}

// ---- Bytes

// Heads of queries that are computed, and that are read; kv heads that they attend with; and kv
// heads whose new keys are read.
struct ReadHeads {
  int64_t computed, queries, attended, new_keys;
};
// Head scales of 0 leave heads out. Norms of all heads read them all the same.
ReadHeads read_heads(const AttentionRequest &request) {
  const float *const scales = request.options.head_scales;
  const int64_t heads = request.num_heads, kv_heads = request.num_kv_heads,
                group = request.heads_per_kv;
  if (!scales) return {heads, heads, kv_heads, kv_heads};
  ReadHeads read = {};
  for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const int64_t before = read.computed;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
      read.computed += scales[head] != 0.0f;
    read.attended += read.computed != before;
  }
  const bool reads_all = request.prepare_q.norm.is_of_all_heads;
  read.queries = reads_all ? heads : read.computed;
  read.new_keys = reads_all ? kv_heads : read.attended;
  return read;
}

// Bytes of the keys and values that are attended to, each once, as they are stored: of k_heads and
// v_heads heads of those that come with the call, of past_heads heads of those in the cache before.
uint64_t key_value_bytes(const SequenceArguments &s, const AttentionRequest &request,
                         int64_t k_heads, int64_t v_heads, int64_t past_heads) {
  const KeyValues *const both[] = {&request.k, &request.v};
  const int64_t new_heads[] = {k_heads, v_heads};
  const int64_t widths[] = {request.head_dim, request.head_dim_v};
  const Window window = window_of(s);
  uint64_t positions = 0, bytes = 0;  // of the cache, before those that the call appends
  for (int64_t b = 0; s.cache && b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b), start = start_of(s, b);
    if (n_q == 0) continue;
    const int64_t first = start > window.left ? start - window.left : 0;
    const int64_t end = std::min(past_of(s, b), capped_sum(capped_sum(start, n_q), window.right));
    if (first < end) positions += static_cast<uint64_t>(end - first);
  }
  for (int i = 0; i < (is_stored(request.k) ? 1 : 2); ++i) {
    const int64_t scale = has_codes(both[i]->storage) ? sizeof(float) : 0;
    bytes += (static_cast<uint64_t>(new_heads[i]) * valid_keys(s) +
              static_cast<uint64_t>(past_heads) * positions) *
             static_cast<uint64_t>(bytes_of(both[i]->storage, widths[i]) + scale);
  }
  return bytes;
}

// Bytes of mask, bias, relative biases and segments, each element once.
uint64_t bytes_of_score_options(const ScoreOptions &options, int64_t batch, int64_t num_heads,
                                int64_t n_q, int64_t columns) {
  uint64_t bytes = 0;
  const struct {
    const PairArray &array;
    int64_t columns;
  } arrays[] = {{options.bias, columns},
                {options.mask, columns},
                {options.relative, options.relative_left + 1 + options.relative_right}};
  for (const auto &[array, of_row] : arrays) {
    if (!array.base) continue;
    const int64_t sequences = array.batch_stride != 0 ? batch : 1,
                  heads = array.head_stride != 0 ? num_heads : 1;
    const int64_t rows = array.row_stride != 0 ? n_q : 1;
    bytes += product(sequences, heads) * product(rows, of_row) *
             static_cast<uint64_t>(bytes_of(array.storage));
  }
  const PositionSegments &segments = options.segments;
  if (segments.of_rows) bytes += product(batch, n_q) * sizeof(int32_t);
  if (segments.of_columns != segments.of_rows) bytes += product(batch, columns) * sizeof(int32_t);
  return bytes;
}

// ---- The parts of a call

void describe_run(const mha_layer &layer, const mha_scheduler *scheduler, mha_call_info *info) {
  describe_run(*layer.kernels, scheduler, layer.sgemm != nullptr, info);
  info->packed_bytes = static_cast<size_t>(layer.layout.bytes);
}

// Keys and values that are projected in the call do not count as read.
void add_attention_cost(const AttentionStage &stage, const AttentionRequest &request,
                        mha_call_info *info) {
  const SequenceArguments &s = stage.sequences;
  const ReadHeads heads = read_heads(request);
  info->operations +=
      2 * attending_pairs(s) * product(heads.computed, request.head_dim + request.head_dim_v);
  const int64_t columns = s.scored.has_new_columns ? s.n_kv : pair_columns(s);
  info->bytes += bytes_of_score_options(request.options, s.array_batch, heads.computed, request.n_q,
                                        std::min(s.scored.num_columns, columns));
  const int64_t stored = request.num_kv_heads;  // a cache takes all
  if (s.cache || !request.k.is_packed)
    info->bytes += key_value_bytes(s, request, s.cache ? stored : heads.new_keys,
                                   s.cache ? stored : heads.attended, heads.attended);
  for (const OptionalOutput &output :
       optional_outputs(request, stage.outputs, s, pair_columns(s))) {
    if (output.output)
      info->bytes += static_cast<uint64_t>(output.elements.value()) * sizeof(float);
  }
}

}  // namespace

mha_status fill_info(Report report, ForwardCall &call, mha_call_info *info) {
  const LayerShape &shape = call.layer->shape;
  AttentionStage &stage = call.stage;
  describe_run(*call.layer, stage.scheduler, info);
  if (stage.sequences.has_no_work()) return MHA_OK;
  MHA_TRY(check_array_contents(report, stage.sequences, &stage.attention.request));
  const uint64_t q_rows = valid_queries(stage.sequences), kv_rows = valid_keys(stage.sequences);
  const uint64_t output_weights =
      shape.has_output ? product(shape.context_columns(), shape.output_dim) : 0;
  info->operations =
      2 *
      (q_rows * (product(shape.query_dim, shape.q_columns() + shape.g_columns()) + output_weights) +
       kv_rows * (product(shape.key_dim, shape.k_columns()) +
                  product(shape.value_dim, shape.v_columns())));
  uint64_t row_bytes[2] = {};  // inputs that are the same rows count once
  MHA_TRY(each_array(*call.layer, call.args, CountRowBytes{row_bytes}));
  info->bytes = info->packed_bytes + q_rows * row_bytes[0] + kv_rows * row_bytes[1];
  add_attention_cost(stage, stage.attention.request, info);
  return MHA_OK;
}

mha_status fill_info(Report report, AttentionCall &call, mha_call_info *info) {
  AttentionStage &stage = call.stage;
  describe_run(*stage.kernels, stage.scheduler, false, info);
  if (stage.sequences.has_no_work()) return MHA_OK;
  MHA_TRY(check_array_contents(report, stage.sequences, &stage.attention.request));
  const mha_attention_args &read = call.args;
  const int64_t output_width =
      stage.outputs.partials ? 0 : read.head_dim_v * bytes_of(storage_of_type(read.output.type));
  const uint64_t row_bytes = product(read_heads(stage.attention.request).queries,
                                     read.head_dim * bytes_of(storage_of_type(read.q.type))) +
                             product(read.num_heads, output_width);
  info->bytes = row_bytes * valid_queries(stage.sequences);
  const AttentionRequest &request = stage.attention.request;
  const bool are_rounded = request.is_in_integers && !stage.sequences.cache;  // read, then packed
  add_attention_cost(
      stage,
      are_rounded ? with_rows(request, plain_rows(rows_of(read.k)), plain_rows(rows_of(read.v)))
                  : request,
      info);
  return MHA_OK;
}

mha_status fill_info(Report, LinearCall &call, mha_call_info *info) {
  const mha_linear_args &read = call.args;
  const mha_layer *const layer = call.layer;
  const LayerShape &shape = layer->shape;
  describe_run(*layer, read.scheduler, info);
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
    info->operations =
        2 * static_cast<uint64_t>(read.rows) * product(shape.output_depth(), shape.output_dim);
    info->bytes = static_cast<uint64_t>(of_weights + of_scales + of_bias) +
                  product(read.rows, of_input + of_output);
  }
  return MHA_OK;
}

}  // namespace mha

using namespace mha;

mha_status mha_forward_info(const mha_layer *layer, const mha_forward_args *args,
                            mha_call_info *info, mha_error *error) {
  return answer_info<ForwardCall>(error, info, layer, args);
}

mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info,
                              mha_error *error) {
  return answer_info<AttentionCall>(error, info, args);
}

mha_status mha_linear_info(const mha_layer *layer, const mha_linear_args *args, mha_call_info *info,
                           mha_error *error) {
  return answer_info<LinearCall>(error, info, layer, args);
}
