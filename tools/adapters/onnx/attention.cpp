// mha.Attention: ONNX's Attention (opset 23 to 25), and mha.GroupQueryAttention: com.microsoft's.
// Both attend to the caller's keys and values, or to those of the past followed by those of the
// call, which they put together in present_key and present_value.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "runtime.h"

namespace mha_onnx {
namespace {

// Queries, keys or values: [batch, heads, rows, width], wherever each lies.
struct Rows {
  const float *data = nullptr;
  int64_t batch = 0, heads = 0, rows = 0, width = 0;
  mha_strides strides = {};

  const float *at(int64_t b, int64_t head, int64_t row) const {
    return data + b * strides.batch + row * strides.row + head * strides.head;
  }
};

// Arrays without rows have strides too: mha takes all of an array's strides or none.
Rows in_heads(const float *data, int64_t batch, int64_t heads, int64_t rows, int64_t width) {
  const int64_t head = std::max<int64_t>(rows, 1) * width;
  return {data, batch, heads, rows, width, {heads * head, width, head}};
}

// `row` numbers to a row, of which the heads are `heads * width`.
Rows in_rows(const float *data, int64_t batch, int64_t rows, int64_t row, int64_t heads,
             int64_t width) {
  return {data, batch, heads, rows, width, {std::max<int64_t>(rows, 1) * row, row, width}};
}

// `rows` of the past followed by new ones, put together in `present`. `starts`: how many past
// rows come before the new ones, for each sequence; of the past, as many as these are copied, and
// the rest of present is 0.
void append(const Call &call, const Tensor &past, const Rows &fresh, const int64_t *starts,
            int64_t total, float *present) {
  const int64_t past_rows = past ? past.shape[2] : 0, width = fresh.width;
  const int64_t rows_in_all = fresh.batch * fresh.heads;
  const bool in_place = past.data == present && past_rows == total;
  if (!in_place && past_rows > 0 && past.floats() < present + rows_in_all * total * width &&
      present < past.floats() + rows_in_all * past_rows * width) {
    throw Failure{
        "a past of " + std::to_string(past_rows) + " rows and a present of " +
        std::to_string(total) +
        " lie in the same memory; that takes both to begin there and to have as many rows"};
  }
  call.parallel(static_cast<size_t>(rows_in_all), [&](size_t index) {
    const int64_t b = static_cast<int64_t>(index) / fresh.heads,
                  head = static_cast<int64_t>(index) % fresh.heads;
    float *to = present + static_cast<int64_t>(index) * total * width;
    const auto bytes = [&](int64_t rows) {
      return static_cast<size_t>(rows * width) * sizeof(float);
    };
    if (!in_place && starts[b] > 0) {
      std::memcpy(to, past.floats() + static_cast<int64_t>(index) * past_rows * width,
                  bytes(starts[b]));
    }
    for (int64_t row = 0; row < fresh.rows; row++) {
      std::memcpy(to + (starts[b] + row) * width, fresh.at(b, head, row), bytes(1));
    }
    const int64_t end = starts[b] + fresh.rows;
    if (!in_place && end < total) {
      std::memset(to + end * width, 0, bytes(total - end));
    }
  });
}

void set_rows(mha_attention_args &args, const Rows &q, const Rows &k, const Rows &v) {
  args.call.batch = extent_of(q.batch), args.call.n_q = extent_of(q.rows),
  args.call.n_kv = extent_of(k.rows);
  args.num_heads = q.heads, args.num_kv_heads = k.heads, args.head_dim = q.width,
  args.head_dim_v = v.width;
  args.q.data = q.data, args.q.strides = q.strides;
  args.k.data = k.data, args.k.strides = k.strides;
  args.v.data = v.data, args.v.strides = v.strides;
}

void run(Call &call, mha_attention_args &args, const mha_score_options &score,
         const mha_score_arrays &arrays) {
  args.call.score = score.softcap != 0 || score.sinks ? &score : nullptr;
  args.call.score_arrays = arrays.bias.data || arrays.mask ? &arrays : nullptr;
  args.call.scheduler =
      call.scheduler(std::max<int64_t>(args.call.batch, 0) * std::max<int64_t>(args.call.n_q, 0));
  mha_error error;
  size_t bytes;
  check(mha_attention_workspace(&args, &bytes, &error), error);
  void *workspace = call.memory(bytes);
  check(mha_attention(&args, workspace, bytes, &error), error);
}

class Attention {
 public:
  static constexpr const char *kName = "Attention";
  enum Input : size_t { kQ, kK, kV, kMask, kPastKey, kPastValue, kLengths, kInputs };
  static constexpr size_t kOutputs = 3;
  static ONNXTensorElementDataType type_of(size_t input) {
    return input == kMask      ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
           : input == kLengths ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                               : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static bool is_optional(size_t input) { return input > kV; }

  explicit Attention(const NodeInfo &node)
      : scores_(node),
        heads_(node.integer("q_num_heads", 0)),
        kv_heads_(node.integer("kv_num_heads", 0)) {
    node.expect("softmax_precision", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
    node.expect("qk_matmul_output_mode", int64_t{0});
  }

  void compute(Call &call) {
    const Tensor queries = call.input(kQ);
    const bool by_heads = queries.rank == 4;
    Rows q = rows_of(queries, "Q", heads_, "q_num_heads");
    Rows k = rows_of(call.input(kK), "K", kv_heads_, "kv_num_heads"),
         v = rows_of(call.input(kV), "V", kv_heads_, "kv_num_heads");
    const Tensor past_key = call.input(kPastKey), past_value = call.input(kPastValue),
                 lengths = call.input(kLengths);
    const int64_t batch = std::max({q.batch, k.batch, v.batch});
    if (!past_key && call.outputs() == 1) {
      for (Rows *rows : {&q, &k, &v}) {
        if (rows->batch == 1 && batch > 1) {  // as MatMul broadcasts
          rows->batch = batch, rows->strides.batch = MHA_BROADCAST;
        }
      }
    }
    if (k.batch != q.batch || v.batch != q.batch || k.rows != v.rows || k.heads != v.heads ||
        k.width != q.width) {
      throw Failure{"Q is " + text(q) + ", K " + text(k) + " and V " + text(v) +
                    " as [batch, heads, rows, width]; all have to have the same batch, K and V the "
                    "same heads and rows, and K the width of Q"};
    }
    if (static_cast<bool>(past_key) != static_cast<bool>(past_value)) {
      throw Failure{"past_key and past_value go together"};
    }
    if (past_key && lengths) {
      throw Failure{"nonpad_kv_seqlen is for keys without a past"};
    }
    if (lengths && (lengths.rank != 1 || lengths.shape[0] != q.batch)) {
      throw Failure{"nonpad_kv_seqlen is " + shape_of(lengths) + "; it has to be [" +
                    std::to_string(q.batch) + "]"};
    }
    const int64_t past = past_key ? checked_past(past_key, k, "past_key") : 0;
    if (past_value && checked_past(past_value, v, "past_value") != past) {
      throw Failure{"past_key has " + std::to_string(past) +
                    " rows, past_value others; they have to have as many"};
    }
    const int64_t total = past + k.rows;

    int64_t *starts =
        static_cast<int64_t *>(call.memory(2 * static_cast<size_t>(q.batch) * sizeof(int64_t)));
    std::fill(starts, starts + q.batch, past);
    place(call, 1, past_key, starts, total, k);
    place(call, 2, past_value, starts, total, v);

    mha_attention_args args = {};
    args.struct_size = sizeof args;
    set_rows(args, q, k, v);
    const int64_t shape4[] = {q.batch, q.heads, q.rows, v.width},
                  shape3[] = {q.batch, q.rows, q.heads * v.width};
    args.output.data = by_heads ? call.output(0, shape4, 4) : call.output(0, shape3, 3);
    if (by_heads) {
      args.output.strides = in_heads(nullptr, q.batch, q.heads, q.rows, v.width).strides;
    }
    args.call.flags = scores_.flags();
    args.scale = scores_.scale;
    args.call.window_left = std::max<int64_t>(scores_.window_left, 0),
    args.call.window_right = std::max<int64_t>(scores_.window_right, 0);
    mha_sequences sequences = {};
    sequences.struct_size = sizeof sequences;
    args.call.sequences = &sequences;
    if (lengths) {
      sequences.kv_lengths = static_cast<const int64_t *>(lengths.data);
      for (int64_t b = 0; b < q.batch; b++) {
        starts[b] = std::max<int64_t>(sequences.kv_lengths[b], 0) -
                    q.rows;  // negative lengths are refused by mha
      }
    }
    if (args.call.flags) {
      sequences.q_first_positions = starts;
    }
    mha_score_options score = {};
    score.struct_size = sizeof score;
    score.softcap = scores_.softcap;
    mha_score_arrays arrays = {};
    arrays.struct_size = sizeof arrays;
    const Tensor mask = mask_of(call, call.input(kMask), q.batch, total, scores_.mask_filter);
    MaskStructure structure = {false, starts, starts + q.batch};
    if (args.call.flags == 0 && !lengths &&
        find_structure(mask, q.batch, q.rows, total, structure)) {
      args.call.flags = structure.is_causal ? MHA_CAUSAL : 0;
      sequences.q_first_positions = structure.is_causal ? starts : nullptr;
      sequences.kv_lengths = structure.lengths;
    } else {
      set_mask(mask, q.batch, q.heads, q.rows, total, total, arrays);
    }
    run(call, args, score, arrays);
  }

 private:
  static std::string text(const Rows &rows) {
    return "[" + std::to_string(rows.batch) + ", " + std::to_string(rows.heads) + ", " +
           std::to_string(rows.rows) + ", " + std::to_string(rows.width) + "]";
  }

  Rows rows_of(const Tensor &tensor, const char *name, int64_t heads, const char *attribute) const {
    if (tensor.rank >= 3 &&
        (tensor.shape[tensor.rank - 1] == 0 || (tensor.rank == 4 && tensor.shape[1] == 0))) {
      throw Failure{std::string(name) + " is " + shape_of(tensor) +
                    "; it has to have at least 1 head of at least 1 number"};
    }
    if (tensor.rank == 4) {
      return in_heads(tensor.floats(), tensor.shape[0], tensor.shape[1], tensor.shape[2],
                      tensor.shape[3]);
    }
    if (tensor.rank != 3) {
      throw Failure{std::string(name) + " is " + shape_of(tensor) +
                    "; it has to be [batch, heads, rows, width] or [batch, rows, heads * width]"};
    }
    if (heads < 1 || tensor.shape[2] % heads != 0) {
      throw Failure{std::string(name) + " is " + shape_of(tensor) + ", whose last dimension " +
                    attribute + " = " + std::to_string(heads) + " heads do not share evenly"};
    }
    return in_rows(tensor.floats(), tensor.shape[0], tensor.shape[1], tensor.shape[2], heads,
                   tensor.shape[2] / heads);
  }

  static int64_t checked_past(const Tensor &past, const Rows &fresh, const char *name) {
    if (past.rank != 4 || past.shape[0] != fresh.batch || past.shape[1] != fresh.heads ||
        past.shape[3] != fresh.width) {
      throw Failure{std::string(name) + " is " + shape_of(past) + "; it has to be [" +
                    std::to_string(fresh.batch) + ", " + std::to_string(fresh.heads) + ", rows, " +
                    std::to_string(fresh.width) + "]"};
    }
    return past.shape[2];
  }

  // Writes the present, if it is asked for; if there is a past, `rows` become those of past and
  // call, there or in memory of the call.
  static void place(Call &call, size_t output, const Tensor &past, const int64_t *starts,
                    int64_t total, Rows &rows) {
    const int64_t shape[] = {rows.batch, rows.heads, total, rows.width};
    float *present = call.output(output, shape, 4);
    if (!present && past) {
      present = static_cast<float *>(call.memory(
          static_cast<size_t>(rows.batch * rows.heads * total * rows.width) * sizeof(float)));
    }
    if (present) {
      append(call, past, rows, starts, total, present);
      rows = in_heads(present, rows.batch, rows.heads, total, rows.width);
    }
  }

  ScoreAttributes scores_;
  int64_t heads_, kv_heads_;
};

// Rotates `rows` to `to`, [batch, rows, heads, width]. positions: those of the rows, or NULL and
// they count from starts.
void rotate(const Call &call, const Rows &rows, const int64_t *starts, const int64_t *positions,
            const Tensor &cosines, const Tensor &sines, bool interleaved, float *to) {
  const int64_t half = cosines.shape[1], step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  call.parallel(static_cast<size_t>(rows.batch * rows.rows), [&](size_t index) {
    const int64_t b = static_cast<int64_t>(index) / rows.rows,
                  row = static_cast<int64_t>(index) % rows.rows;
    const int64_t position = positions ? positions[index] : starts[b] + row;
    const float *c = cosines.floats() + position * half, *s = sines.floats() + position * half;
    for (int64_t head = 0; head < rows.heads; head++) {
      const float *x = rows.at(b, head, row);
      float *y = to + (static_cast<int64_t>(index) * rows.heads + head) * rows.width;
      for (int64_t i = 0; i < half; i++) {
        const float first = x[i * step], second = x[i * step + apart];
        y[i * step] = first * c[i] - second * s[i];
        y[i * step + apart] = second * c[i] + first * s[i];
      }
      std::copy(x + 2 * half, x + rows.width, y + 2 * half);
    }
  });
}

// Divides each head of `rows` by the root of its mean square, and multiplies it by weights, if they
// are given.
void normalise(Call &call, const Tensor &weights, const char *name, float epsilon, Rows &rows) {
  if (!weights) {
    return;
  }
  if (weights.rank != 1 || weights.shape[0] != rows.width) {
    throw Failure{std::string(name) + " is " + shape_of(weights) + "; it has to be [" +
                  std::to_string(rows.width) + "]"};
  }
  const int64_t row_width = rows.heads * rows.width, count = rows.batch * rows.rows;
  float *to =
      static_cast<float *>(call.memory(static_cast<size_t>(count * row_width) * sizeof(float)));
  call.parallel(static_cast<size_t>(count), [&](size_t index) {
    const int64_t b = static_cast<int64_t>(index) / rows.rows,
                  row = static_cast<int64_t>(index) % rows.rows;
    for (int64_t head = 0; head < rows.heads; head++) {
      const float *x = rows.at(b, head, row);
      float *y = to + static_cast<int64_t>(index) * row_width + head * rows.width;
      float squares = 0;
      for (int64_t i = 0; i < rows.width; i++) {
        squares += x[i] * x[i];
      }
      const float root = std::sqrt(squares / static_cast<float>(rows.width) + epsilon);
      for (int64_t i = 0; i < rows.width; i++) {
        y[i] = x[i] / root * weights.floats()[i];
      }
    }
  });
  rows = in_rows(to, rows.batch, rows.rows, row_width, rows.heads, rows.width);
}

class GroupQuery {
 public:
  static constexpr const char *kName = "GroupQueryAttention";
  enum Input : size_t {
    kQuery,
    kKey,
    kValue,
    kPastKey,
    kPastValue,
    kLengths,
    kTotal,
    kCos,
    kSin,
    kPositions,
    kBias,
    kSink,
    kQueryNorm,
    kKeyNorm,
    kInputs
  };
  static constexpr size_t kOutputs = 3;
  static ONNXTensorElementDataType type_of(size_t input) {
    return input == kLengths || input == kTotal ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
           : input == kPositions                ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
                                                : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static bool is_optional(size_t input) {
    return input != kQuery && input != kLengths && input != kTotal;
  }

  explicit GroupQuery(const NodeInfo &node)
      : scores_(node),
        heads_(node.integer("num_heads", 0)),
        kv_heads_(node.integer("kv_num_heads", 0)),
        rotary_(node.integer("do_rotary", 0) != 0),
        interleaved_(node.integer("rotary_interleaved", 0) != 0),
        window_(node.integer("local_window_size", -1)),
        q_epsilon_(node.number("q_norm_epsilon", node.number("qk_norm_epsilon", 1e-6f))),
        k_epsilon_(node.number("k_norm_epsilon", node.number("qk_norm_epsilon", 1e-6f))) {
    if (heads_ < 1 || kv_heads_ < 1 || heads_ > INT32_MAX || heads_ % kv_heads_ != 0) {
      throw Failure{"num_heads is " + std::to_string(heads_) + " and kv_num_heads " +
                    std::to_string(kv_heads_) +
                    "; both have to be at least 1, and num_heads a multiple of kv_num_heads"};
    }
    if (window_ == 0 || window_ < -1) {
      throw Failure{"the attribute local_window_size is " + std::to_string(window_) +
                    "; it has to be at least 1, a row's own key, or -1 for no window"};
    }
    for (const char *window : {"left_window_size", "right_window_size"}) {
      node.expect(window, -1);
    }
    for (const char *causal : {"causal", "is_causal"}) {
      node.expect(causal, 1);
    }
    for (const char *number : {"qk_output", "kv_cache_bit_width", "sliding_window_cache"}) {
      node.expect(number, int64_t{0});
    }
    for (const char *type : {"k_quant_type", "v_quant_type"}) {
      node.expect(type, "NONE");
    }
    if (node.integer("smooth_softmax", 0) == 1) {  // -1 is the default
      zeros_.resize(static_cast<size_t>(heads_));
    }
  }

  void compute(Call &call) {
    const Tensor query = call.input(kQuery), key = call.input(kKey), value = call.input(kValue);
    const bool packed = !key && !value;
    const int64_t all_heads = packed ? heads_ + 2 * kv_heads_ : heads_;
    if (query.rank != 3 || query.shape[2] < 1 || query.shape[2] % all_heads != 0 ||
        static_cast<bool>(key) != static_cast<bool>(value)) {
      throw Failure{"query is " + shape_of(query) +
                    "; it has to be [batch, rows, heads * width] with num_heads heads and key and "
                    "value beside it, or "
                    "with the columns of all three"};
    }
    const int64_t batch = query.shape[0], n = query.shape[1], width = query.shape[2] / all_heads;
    for (const Tensor *tensor : {&key, &value}) {
      if (!packed && (tensor->rank != 3 || tensor->shape[0] != batch || tensor->shape[1] != n ||
                      tensor->shape[2] != kv_heads_ * width)) {
        throw Failure{std::string(tensor == &key ? "key" : "value") + " is " + shape_of(*tensor) +
                      "; it has to be [" + std::to_string(batch) + ", " + std::to_string(n) + ", " +
                      std::to_string(kv_heads_ * width) + "]"};
      }
    }
    const int64_t row = query.shape[2];
    Rows q = in_rows(query.floats(), batch, n, row, heads_, width);
    Rows k = packed ? in_rows(query.floats() + heads_ * width, batch, n, row, kv_heads_, width)
                    : in_rows(key.floats(), batch, n, kv_heads_ * width, kv_heads_, width);
    const Rows v = packed ? in_rows(query.floats() + (heads_ + kv_heads_) * width, batch, n, row,
                                    kv_heads_, width)
                          : in_rows(value.floats(), batch, n, kv_heads_ * width, kv_heads_, width);

    const Tensor past_key = call.input(kPastKey), past_value = call.input(kPastValue),
                 lengths = call.input(kLengths), all = call.input(kTotal);
    for (const Tensor *past : {&past_key, &past_value}) {
      if (*past && (past->rank != 4 || past->shape[0] != batch || past->shape[1] != kv_heads_ ||
                    past->shape[3] != width || past->shape[2] != past_key.shape[2])) {
        throw Failure{std::string(past == &past_key ? "past_key" : "past_value") + " is " +
                      shape_of(*past) + "; it has to be [" + std::to_string(batch) + ", " +
                      std::to_string(kv_heads_) + ", rows, " + std::to_string(width) +
                      "], both with as many rows"};
      }
    }
    int64_t length_count = 1;
    for (size_t i = 0; i < lengths.rank; i++) {
      length_count *= lengths.shape[i];
    }
    if (length_count != batch || static_cast<bool>(past_key) != static_cast<bool>(past_value)) {
      throw Failure{"seqlens_k is " + shape_of(lengths) + "; it has to be [" +
                    std::to_string(batch) + "], and past_key and past_value go together"};
    }
    for (size_t i = 0; i < all.rank; i++) {
      if (all.shape[i] != 1) {
        throw Failure{"total_sequence_length is " + shape_of(all) + "; it has to be one number"};
      }
    }
    const int64_t past = past_key ? past_key.shape[2] : 0,
                  total = *static_cast<const int32_t *>(all.data), present = std::max(past, total);
    int64_t *starts = static_cast<int64_t *>(
                call.memory(2 * static_cast<size_t>(batch) * sizeof(int64_t))),
            *ends = starts + batch;
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; b++) {
      starts[b] = n == total ? 0 : static_cast<const int32_t *>(lengths.data)[b] + int64_t{1} - n;
      ends[b] = starts[b] + n;
      longest = std::max(longest, ends[b]);
      if (starts[b] < 0 || starts[b] > past || ends[b] > present) {
        throw Failure{
            "sequence " + std::to_string(b) + " has seqlens_k " +
            std::to_string(static_cast<const int32_t *>(lengths.data)[b]) +
            " and total_sequence_length is " + std::to_string(total) + ", for " +
            std::to_string(n) + " rows and a past of " + std::to_string(past) +
            "; seqlens_k is the length with these rows, less 1, and no more than there is"};
      }
    }
    normalise(call, call.input(kQueryNorm), "q_norm_weight", q_epsilon_, q);
    normalise(call, call.input(kKeyNorm), "k_norm_weight", k_epsilon_, k);
    if (rotary_) {
      rotate_both(call, starts, q, k);
    }
    k = placed(call, 1, past_key, starts, present, k);

    mha_attention_args args = {};
    args.struct_size = sizeof args;
    set_rows(args, q, k, placed(call, 2, past_value, starts, present, v));
    args.call.n_q = extent_of(n);
    const int64_t shape[] = {batch, n, heads_ * width};
    args.output.data = call.output(0, shape, 3);
    args.call.flags = MHA_CAUSAL | (window_ > 0 ? MHA_WINDOW_LEFT : 0);
    args.call.window_left = std::max<int64_t>(window_ - 1, 0);  // keys before the row's own
    args.scale = scores_.scale;
    mha_sequences sequences = {};
    sequences.struct_size = sizeof sequences;
    sequences.q_first_positions = starts, sequences.kv_lengths = ends;
    args.call.sequences = &sequences;
    mha_score_options score = {};
    score.struct_size = sizeof score;
    score.softcap = scores_.softcap;
    const Tensor sink = call.input(kSink);
    if (sink && (sink.rank != 1 || sink.shape[0] != heads_)) {
      throw Failure{"head_sink is " + shape_of(sink) + "; it has to be [" + std::to_string(heads_) +
                    "]"};
    }
    score.sinks = sink ? sink.floats() : zeros_.empty() ? nullptr : zeros_.data();
    mha_score_arrays arrays = {};
    arrays.struct_size = sizeof arrays;
    // The bias may be as long as the sequences, where the past's memory is longer.
    set_mask(call.input(kBias), batch, heads_, n, present, longest, arrays);
    run(call, args, score, arrays);
  }

 private:
  void rotate_both(Call &call, const int64_t *starts, Rows &q, Rows &k) const {
    const Tensor cosines = call.input(kCos), sines = call.input(kSin),
                 positions = call.input(kPositions);
    for (const Tensor *table : {&cosines, &sines}) {
      if (table->rank != 2 || 2 * table->shape[1] > q.width ||
          table->shape[0] != cosines.shape[0] || table->shape[1] != cosines.shape[1]) {
        throw Failure{"with do_rotary, cos_cache and sin_cache have to be [positions, at most " +
                      std::to_string(q.width / 2) + "], both the same"};
      }
    }
    if (positions &&
        (positions.rank != 2 || positions.shape[0] != q.batch || positions.shape[1] != q.rows)) {
      throw Failure{"position_ids is " + shape_of(positions) + "; it has to be [" +
                    std::to_string(q.batch) + ", " + std::to_string(q.rows) + "]"};
    }
    const int64_t *given = static_cast<const int64_t *>(positions.data);
    for (int64_t b = 0; b < q.batch; b++) {
      for (int64_t row = 0; row < q.rows; row++) {
        const int64_t position = given ? given[b * q.rows + row] : starts[b] + row;
        if (position < 0 || position >= cosines.shape[0]) {
          throw Failure{"row " + std::to_string(row) + " of sequence " + std::to_string(b) +
                        " is at position " + std::to_string(position) +
                        "; cos_cache and sin_cache have positions 0 to " +
                        std::to_string(cosines.shape[0] - 1)};
        }
      }
    }
    const int64_t q_count = q.batch * q.rows * q.heads * q.width,
                  k_count = k.batch * k.rows * k.heads * k.width;
    float *rotated =
        static_cast<float *>(call.memory(static_cast<size_t>(q_count + k_count) * sizeof(float)));
    rotate(call, q, starts, given, cosines, sines, interleaved_, rotated);
    rotate(call, k, starts, given, cosines, sines, interleaved_, rotated + q_count);
    q = in_rows(rotated, q.batch, q.rows, q.heads * q.width, q.heads, q.width);
    k = in_rows(rotated + q_count, k.batch, k.rows, k.heads * k.width, k.heads, k.width);
  }

  static Rows placed(Call &call, size_t output, const Tensor &past, const int64_t *starts,
                     int64_t total, const Rows &rows) {
    const int64_t shape[] = {rows.batch, rows.heads, total, rows.width};
    float *present = call.output(output, shape, 4);
    if (!present) {
      present = static_cast<float *>(call.memory(
          static_cast<size_t>(rows.batch * rows.heads * total * rows.width) * sizeof(float)));
    }
    append(call, past, rows, starts, total, present);
    return in_heads(present, rows.batch, rows.heads, total, rows.width);
  }

  ScoreAttributes scores_;
  int64_t heads_, kv_heads_;
  bool rotary_, interleaved_;
  int64_t window_;  // keys of a row, its own included; -1 = none
  float q_epsilon_, k_epsilon_;
  std::vector<float> zeros_;  // smooth_softmax: a sink of 0 for each head
};

}  // namespace

const OrtCustomOp *attention_operator() { return operator_of<Attention>(); }
const OrtCustomOp *grouped_query_operator() { return operator_of<GroupQuery>(); }

}  // namespace mha_onnx
