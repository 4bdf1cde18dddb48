// A case made of a choice of options (generated_options.h): what is computed, as one problem for
// the specification, and the calls by which the library computes it.
#ifndef MHA_TESTS_SUPPORT_GENERATED_CASE_H
#define MHA_TESTS_SUPPORT_GENERATED_CASE_H

#include <mha.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/choices.h"
#include "support/fixtures.h"
#include "support/packed_sequences.h"
#include "support/pool.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/sgemm.h"
#include "support/specify.h"

namespace support {

// A size of a case, and the least that its value of the dimension means.
struct Size {
  int64_t value = 1, least = 1;
};

inline Size Draw(Random *random, int64_t least, int64_t most) {
  return {random->Between(least, most), least};
}
inline Size Fixed(int64_t size) { return {size, size}; }

// Normal numbers, quickly: from somewhere in a long list of them.
inline std::vector<float> QuickNormals(Random *random, int64_t count, float factor = 1) {
  static const std::vector<float> all = Random(1).Normals(1 << 16);
  std::vector<float> x(count);
  size_t at = static_cast<size_t>(random->Below(static_cast<int64_t>(all.size())));
  for (float &value : x) {
    value = all[at] * factor;
    at = (at + 1) % all.size();
  }
  return x;
}

// With which options it counts where queries stand: one of these lines.
inline std::vector<std::string> PositionsCount() {
  return {"causal=yes",       "window_left=!no",   "window_right=!no",
          "alibi_slopes=!no", "relative_bias=!no", "rope=!none rope_positions=counted|keys"};
}

struct Case {
  Case(const Space &its_space, Choice its_choice)
      : space(&its_space), choice(std::move(its_choice)) {}

  const Space *space;
  Choice choice;
  bool Is(std::string_view dimension, std::string_view values) const {
    return space->Is(choice, dimension, values);
  }
  int NumberOf(std::string_view dimension) const {
    return choice[space->NumberOf(dimension)];
  }  // of its value
  Storage TypeOf(std::string_view dimension) const {
    uint32_t type = 1;
    while (kTypeNames[type] != ValueOf(dimension)) type++;
    return static_cast<Storage>(type);
  }
  std::string_view ValueOf(std::string_view dimension) const {
    return space->NameOfValue(choice, space->NumberOf(dimension));
  }

  // ---- What is computed, for the specification. Rows of queries lie beside padding; so do keys
  // without a cache, and with one they lie by position. All three inputs are there, whatever the
  // call gives. Of mha_attention they are q, k and v.
  LayerProblem whole;
  bool is_layer() const { return !Is("entry", "attention"); }
  bool is_self() const {
    return Is("entry", "self|value") && !reads();
  }  // the keys are the rows of query
  bool has_cache() const { return !Is("cache", "none"); }
  bool reads() const { return Is("cache_read", "yes"); }
  bool is_packed() const { return Is("packed", "yes"); }
  // Of an array of values that comes with a cache: of mha_attention, another one than the keys' if
  // it is to be.
  Storage value_type() const {
    if (Is("value_array", "same")) return input_type;
    return input_type == Storage::kF32   ? Storage::kBf16
           : input_type == Storage::kF16 ? Storage::kF32
                                         : Storage::kF16;
  }

  // ---- Sizes, until SettleSizes gives them to the problem. n_kv: rows that come with the calls.
  Size n_q, n_kv, past, num_kv_heads, group, head_dim, head_dim_v, query_dim, key_dim, value_dim,
      output_dim;
  std::vector<int64_t> pasts, new_keys;  // of each sequence
  std::vector<int64_t> kv_start;  // of a call; with a cache, positions in it do not depend on that.
                                  // Empty if keys are queries
  PackedSequences packed;  // in the rows of a whole of batch 1; without rows: none. With a cache,
                           // keys are those before too
  std::vector<int64_t>
      packed_new_keys;  // with a cache: where the keys of each begin in the rows of the call

  // ---- How it is computed
  LayerForm form;
  CallForm call;
  Layout inputs, outputs;
  CacheForm cache_form = {MHA_CACHE_KIND_CONTIGUOUS, 0};
  std::vector<int64_t> cache_sequences;
  int64_t cache_size = 0;  // its sequences
  std::vector<int64_t>
      cuts;  // rows of query at which a call ends and another one begins, 0 and n_q included
  Storage input_type = Storage::kF32;
  std::unique_ptr<Scheduler> scheduler;
  uint64_t blocks_seed = 0;
  // Mask, bias and segments of keys as they are given, where their columns are not those of the
  // whole (has_own_columns).
  Pairs<float> given_bias;
  Pairs<uint8_t> given_mask;
  std::vector<int64_t> given_kv_segments;

  // Columns are not those of the whole: new keys alone, of all calls together, those of a call
  // being KeyColumns; or positions in a cache, which packed sequences have in common.
  bool has_own_columns() const { return Is("columns", "new") || (is_packed() && has_cache()); }
  int64_t num_own_columns() const {
    int64_t longest = 0;
    for (int64_t b = 0; b < packed.count() && is_packed(); b++)
      longest = std::max(longest, packed.kv[b + 1] - packed.kv[b]);
    return Is("columns", "new") ? n_kv.value : longest;
  }
  // With each call come as many keys as queries, to stand at the same positions.
  bool keys_come_with_queries() const {
    return has_cache() && Is("n_kv", "queries") && Is("kv_lengths", "queries");
  }
  bool counts_positions() const {
    const std::vector<std::string> lines = PositionsCount();
    return std::any_of(lines.begin(), lines.end(), [&](const std::string &line) {
      const auto terms = TermsOf(line);
      return std::all_of(terms.begin(), terms.end(),
                         [&](const auto &term) { return Is(term.first, term.second); });
    });
  }
  // Rows of new keys, with their padding, that come with the call of rows begin .. end of query.
  std::pair<int64_t, int64_t> KeyColumns(int64_t begin, int64_t end) const {
    if (!has_cache() || begin == 0) return {0, keys_come_with_queries() ? end : n_kv.value};
    if (keys_come_with_queries()) return {begin, end};
    return {0, 0};
  }
};

// Which rows of a sequence a call is about.
struct CallRows {
  int64_t q_first, q_count,
      q_before;  // in the rows of the call's query; valid rows in earlier calls
  int64_t kv_first, kv_count,
      kv_column;   // in the rows of the call's key; where the first one is among the whole's keys
  int64_t length;  // keys there are after the call; without a cache all columns
};

struct CallPart {
  int64_t begin, end;  // rows of the whole's query
  int64_t n_kv;        // rows of the call's key
  int64_t columns;     // keys of outputs with a number for each pair
  std::vector<CallRows> rows;
};

inline CallPart PartOf(const Case &c, int64_t begin, int64_t end) {
  const auto [column, column_end] = c.KeyColumns(begin, end);
  CallPart part = {begin, end, column_end - column, c.has_cache() ? 0 : c.whole.n_kv, {}};
  if (c.reads()) part.n_kv = 0;
  for (int64_t b = 0; c.is_packed() && c.has_cache() && b < c.packed.count();
       b++) {  // all of them in the first sequence of the whole
    const auto count = [b](const std::vector<int64_t> &starts) {
      return starts[b + 1] - starts[b];
    };
    const int64_t length = count(c.packed.kv), fresh = count(c.packed_new_keys);
    part.rows.push_back({c.packed.q[b], count(c.packed.q), 0, c.packed_new_keys[b], fresh,
                         c.packed.kv[b] + length - fresh, length});
    part.columns = std::max(part.columns, length);
  }
  if (!part.rows.empty()) return part;
  for (int64_t b = 0; b < c.whole.batch; b++) {
    const ValidRows valid = ValidRowsOf(c.whole, b);
    const int64_t first = std::clamp(valid.q_first, begin, end),
                  last = std::clamp(valid.q_first + valid.n_q, begin, end);
    CallRows rows = {
        first - begin, last - first, first - std::min(valid.q_first, first), 0, 0, 0, 0};
    if (first == last) rows.q_before = end <= valid.q_first ? 0 : valid.n_q;
    if (!c.has_cache()) {
      rows.kv_first = rows.kv_column = valid.kv_first;
      rows.kv_count = valid.n_kv;
      rows.length = c.whole.n_kv;
    } else {
      const bool in_step = c.keys_come_with_queries() && c.kv_start.empty();
      const int64_t before = in_step ? rows.q_before : begin > 0 ? c.new_keys[b] : 0;
      rows.kv_count = c.reads() ? 0 : in_step ? rows.q_count : begin > 0 ? 0 : c.new_keys[b];
      rows.kv_first = in_step ? rows.q_first : !c.kv_start.empty() ? c.kv_start[b] : 0;
      rows.kv_column = c.pasts[b] + before;
      rows.length = rows.kv_column + rows.kv_count;
      part.columns = std::max(part.columns, rows.length);
    }
    part.rows.push_back(rows);
  }
  return part;
}

// Rows of a call, [batch, n, width]: of each sequence those of x that place(rows of the sequence) =
// {from, to, count} says, and padding.
template <typename T, typename Function>
std::vector<T> PlaceRows(const std::vector<T> &x, const Case &c, const CallPart &part, int64_t n,
                         int64_t n_of_x, int64_t width, T padding, const Function &place) {
  std::vector<T> rows(c.whole.batch * n * width, padding);
  for (size_t r = 0; r < part.rows.size(); r++) {
    const int64_t b = c.is_packed() ? 0 : static_cast<int64_t>(r);
    const auto [from, to, count] = place(part.rows[r]);
    const auto begin = x.begin() + (b * n_of_x + from) * width;
    std::copy(begin, begin + count * width, rows.begin() + (b * n + to) * width);
  }
  return rows;
}

// Something of each key that comes with a call, out of the same of each key of the whole.
template <typename T>
std::vector<T> RowsOfKeys(const std::vector<T> &x, const Case &c, const CallPart &part,
                          int64_t width, T padding) {
  return PlaceRows(x, c, part, part.n_kv, c.whole.n_kv, width, padding, [](const CallRows &rows) {
    return std::array<int64_t, 3>{rows.kv_column, rows.kv_first, rows.kv_count};
  });
}

// Something of each row of query, padding included.
template <typename T>
std::vector<T> RowsOfQueries(const std::vector<T> &x, const Case &c, const CallPart &part,
                             int64_t width) {
  std::vector<T> rows;
  for (int64_t b = 0; !x.empty() && b < c.whole.batch; b++) {
    const auto begin = x.begin() + (b * c.whole.n_q + part.begin) * width;
    rows.insert(rows.end(), begin, begin + (part.end - part.begin) * width);
  }
  return rows;
}

// The rows of pairs that belong to the call, with columns begin .. end.
template <typename T>
Pairs<T> RowsOfPairs(const Pairs<T> &pairs, const Case &c, const CallPart &part,
                     int64_t all_columns, int64_t begin, int64_t end) {
  Pairs<T> rows = pairs;
  if (pairs.values.empty()) return rows;
  rows.values.clear();
  const int64_t of_head = pairs.by_row ? c.whole.n_q : 1, first = pairs.by_row ? part.begin : 0,
                last = pairs.by_row ? part.end : 1;
  const int64_t heads = (pairs.by_sequence ? c.whole.batch : 1) *
                        (pairs.by_head ? pairs.heads_of(c.whole.num_heads) : 1);
  for (int64_t h = 0; h < heads; h++) {
    for (int64_t i = first; i < last; i++) {
      const auto row = pairs.values.begin() + (h * of_head + i) * all_columns;
      rows.values.insert(rows.values.end(), row + begin, row + end);
    }
  }
  rows.columns = end - begin;
  return rows;
}

// An input as [batch, n, heads, width], of which sequences, rows or heads may all be the same.
struct Input {
  std::vector<float> *x;
  int64_t n, heads, width;
  bool has_one_sequence, has_one_row, has_one_head;

  bool is_shared() const { return has_one_sequence || has_one_row || has_one_head; }

  // Of the elements that are the same as this one, the first.
  int64_t FirstOf(int64_t at) const {
    const int64_t head = at / width % heads, row = at / width / heads % n,
                  b = at / width / heads / n;
    return (((has_one_sequence ? 0 : b) * n + (has_one_row ? 0 : row)) * heads +
            (has_one_head ? 0 : head)) *
               width +
           at % width;
  }

  // Those of an array without gaps; without rows, as if there were one.
  mha_strides Strides(bool has_heads) const {
    return {has_one_sequence ? MHA_BROADCAST : std::max<int64_t>(n, 1) * heads * width,
            has_one_row ? MHA_BROADCAST : heads * width,
            !has_heads     ? 0
            : has_one_head ? MHA_BROADCAST
                           : width};
  }
};

inline std::array<Input, 3> InputsOf(const Case &c, LayerProblem *p) {
  const bool sequence = c.Is("inputs", "repeated"), row = c.Is("inputs", "one_row"),
             head = c.Is("inputs", "one_head");
  if (c.is_layer()) {
    return {{{&p->query, p->n_q, 1, p->query_dim, sequence, row, head},
             {&p->key, p->n_kv, 1, p->key_dim, sequence, row, head},
             {&p->value, p->n_kv, 1, p->value_dim, sequence, row, head}}};
  }
  return {{{&p->query, p->n_q, p->num_heads, p->head_dim, sequence, row, head},
           {&p->key, p->n_kv, p->num_kv_heads, p->head_dim, sequence, row, head},
           {&p->value, p->n_kv, p->num_kv_heads, p->head_dim_v, sequence, row, head}}};
}

// What a call is given. The arrays that the whole has for each key or row, position or pair are cut
// here: a new one is added here.
inline LayerProblem ProblemOf(const Case &c, const CallPart &part) {
  const LayerProblem &whole = c.whole;
  const float nan = FromBits(0x7fc0dead);
  LayerProblem problem = whole;
  problem.n_q = part.end - part.begin;
  problem.n_kv = part.n_kv;
  problem.query = RowsOfQueries(whole.query, c, part, whole.query_dim);
  problem.has_key = !c.reads() && c.Is("entry", "attention|key|key_value");
  problem.has_value = !c.reads() && c.Is("entry", "attention|value|key_value");
  if (c.has_cache()) {
    problem.key = RowsOfKeys(whole.key, c, part, whole.key_dim, nan);
    problem.value = RowsOfKeys(whole.value, c, part, whole.value_dim, nan);
  }
  for (const Input &input : InputsOf(c, &problem)) {
    for (size_t at = 0; input.is_shared() && at < input.x->size(); at++) {
      // Is in memory, but not read.
      if (input.FirstOf(static_cast<int64_t>(at)) != static_cast<int64_t>(at)) (*input.x)[at] = nan;
    }
  }
  problem.q_start.clear();
  problem.q_lengths.clear();
  problem.kv_lengths.clear();
  problem.q_first.clear();
  problem.kv_start.clear();
  const bool starts_by_default =
      c.Is("q_start", "null") && (c.cuts.size() == 2 || c.keys_come_with_queries());
  for (int64_t b = 0; b < whole.batch; b++) {
    const CallRows &rows = part.rows[b];
    const bool has_q_lengths = !c.Is("q_lengths", "no"), has_q_first = !c.Is("q_first", "no");
    if (has_q_lengths) problem.q_lengths.push_back(rows.q_count);
    if (has_q_first) problem.q_first.push_back(rows.q_first);
    const bool are_in_step = c.keys_come_with_queries() && c.kv_start.empty();
    const bool has_kv_lengths = c.Is("kv_lengths", "queries")
                                    ? has_q_lengths || (has_q_first && !are_in_step)
                                    : !c.Is("kv_lengths", "no");
    const bool has_kv_first = !c.kv_start.empty() || (are_in_step && has_q_first && !c.is_self());
    if (has_kv_first) problem.kv_start.push_back(rows.kv_first);
    if (has_kv_lengths && !c.is_self() && !c.reads()) problem.kv_lengths.push_back(rows.kv_count);
    const int64_t start = ShapeOf(whole, b).q_start, most = std::numeric_limits<int64_t>::max();
    if (!starts_by_default)
      problem.q_start.push_back(start > most - rows.q_before ? most : start + rows.q_before);
  }
  if (whole.rope) {
    problem.rope->q_positions = RowsOfQueries(whole.rope->q_positions, c, part, 1);
    std::vector<int64_t> &k_positions = problem.rope->k_positions;
    k_positions = c.reads() || k_positions.empty()
                      ? std::vector<int64_t>()
                      : RowsOfKeys<int64_t>(k_positions, c, part, 1, -1);
  }
  if (whole.score) {
    const int64_t columns = c.has_own_columns() ? c.num_own_columns() : whole.n_kv;
    const auto [begin, end] = c.Is("columns", "new") ? c.KeyColumns(part.begin, part.end)
                                                     : std::pair<int64_t, int64_t>(0, columns);
    problem.score->bias = RowsOfPairs(c.has_own_columns() ? c.given_bias : whole.score->bias, c,
                                      part, columns, begin, end);
    problem.score->mask = RowsOfPairs(c.has_own_columns() ? c.given_mask : whole.score->mask, c,
                                      part, columns, begin, end);
    const int64_t distances = whole.score->relative_left + 1 + whole.score->relative_right;
    problem.score->relative_rows =
        RowsOfPairs(whole.score->relative_rows, c, part, distances, 0, distances);
    const int64_t entries = whole.score->chosen.columns;
    problem.score->chosen = RowsOfPairs(whole.score->chosen, c, part, entries, 0, entries);
    problem.score->q_scales = RowsOfQueries(whole.score->q_scales, c, part, 1);
    problem.score->bias_is_f16 = problem.score->bias_is_f16 && !problem.score->bias.values.empty();
    problem.score->segments.of_queries =
        RowsOfQueries(whole.score->segments.of_queries, c, part, 1);
    std::vector<int64_t> &kv_segments = problem.score->segments.of_keys;
    if (c.has_own_columns()) kv_segments = c.given_kv_segments;
    const int64_t given_columns = whole.score->num_columns != 0 ? whole.score->num_columns
                                  : c.has_cache()               ? part.columns
                                                                : columns;
    // Contiguous: those of each sequence follow each other.
    if (!c.has_own_columns() && !kv_segments.empty() && given_columns > 0) {
      kv_segments.clear();
      for (int64_t b = 0; b < whole.batch; b++) {
        const auto first = whole.score->segments.of_keys.begin() + b * columns;
        kv_segments.insert(kv_segments.end(), first, first + given_columns);
      }
    }
  }
  return problem;
}

inline AttentionProblem AttentionOf(const LayerProblem &problem) {
  AttentionProblem attention;
  static_cast<AttentionSizes &>(attention) = problem;
  attention.q = problem.query;
  attention.k = problem.key;
  attention.v = problem.value;
  return attention;
}

// What the specification gives for the whole.
inline Outputs Specify(const Case &c) {
  const auto specify = [&](const auto &whole) {
    return c.is_packed() ? Specify(whole, c.packed) : Specify(whole);
  };
  if (!c.is_layer()) return specify(AttentionOf(c.whole));
  return specify(c.form.weight_type == Stored::kF32 ? c.whole
                                                    : Converted(c.whole, c.form.weight_type));
}

// What a call has to give, out of that.
inline Outputs ExpectedOf(const Case &c, const CallPart &part, const Outputs &whole) {
  const LayerProblem &sizes = c.whole;
  const int64_t n_q = part.end - part.begin;
  Outputs expected;
  expected.y = Rounded(
      c.call.output_array,
      RowsOfQueries(whole.y, c, part, c.is_layer() ? sizes.y_width() : sizes.merged_width()));
  expected.context = RowsOfQueries(whole.context, c, part, sizes.merged_width());
  expected.q = RowsOfQueries(whole.q, c, part, sizes.q_width());
  if (c.is_layer()) {
    expected.k = RowsOfKeys(whole.k, c, part, sizes.k_width(), 0.0f);
    expected.v = RowsOfKeys(whole.v, c, part, sizes.v_width(), 0.0f);
  }
  for (const auto &[field, padding] :
       {std::pair{&Outputs::scores, 0.0f},
        {&Outputs::scaled_scores, 0.0f},
        {&Outputs::softcapped_scores, 0.0f},
        {&Outputs::masked_scores, -std::numeric_limits<float>::infinity()},
        {&Outputs::attention_weights, 0.0f}}) {
    (expected.*field).assign(sizes.batch * sizes.num_heads * n_q * part.columns, padding);
  }
  // Which columns of the whole a row has, from its first one on.
  const auto columns_of = [&](int64_t b, int64_t i) -> std::pair<int64_t, int64_t> {
    if (!c.is_packed() || !c.has_cache()) return {0, part.rows[b].length};
    for (size_t r = 0; r < part.rows.size(); r++) {
      if (i >= part.rows[r].q_first && i < part.rows[r].q_first + part.rows[r].q_count)
        return {c.packed.kv[r], part.rows[r].length};
    }
    return {0, 0};
  };
  for (int64_t b = 0; b < sizes.batch; b++) {
    for (int64_t h = 0; h < sizes.num_heads; h++) {
      const int64_t to = (b * sizes.num_heads + h) * n_q,
                    from = (b * sizes.num_heads + h) * sizes.n_q + part.begin;
      for (int64_t i = 0; i < n_q; i++) {
        expected.lse.push_back(whole.lse[from + i]);
        for (const auto field :
             {&Outputs::scores, &Outputs::scaled_scores, &Outputs::softcapped_scores,
              &Outputs::masked_scores, &Outputs::attention_weights}) {
          const auto [first, length] = columns_of(b, i);
          const auto row = (whole.*field).begin() + (from + i) * sizes.n_kv + first;
          std::copy(row, row + length, (expected.*field).begin() + (to + i) * part.columns);
        }
      }
    }
  }
  return expected;
}

class CaseRun {
 public:
  CaseRun(const Case &c, const Outputs &expected, uint32_t instruction_set)
      : c_(c), expected_(expected), instruction_set_(instruction_set) {}

  // What differs from the specification, or is refused; empty if nothing is.
  std::string Differences() {
    try {
      Begin();
      for (size_t n = 0; n + 1 < c_.cuts.size(); n++) {
        const CallPart part = PartOf(c_, c_.cuts[n], c_.cuts[n + 1]);
        const testing::AssertionResult same =
            SameBits(Compute(part, ProblemOf(c_, part)), ExpectedOf(c_, part, expected_));
        if (!same) {
          return "in call " + std::to_string(n + 1) + " of " + std::to_string(c_.cuts.size() - 1) +
                 ", of rows " + std::to_string(part.begin) + " to " + std::to_string(part.end) +
                 ":" + same.message();
        }
      }
    } catch (const std::exception &error) {
      return std::string("refused: ") + error.what() + "\n";
    }
    return "";
  }

  // The sentence with which the first call is refused; empty if it is not.
  std::string Refusal() {
    try {
      Begin();
      const CallPart part = PartOf(c_, c_.cuts[0], c_.cuts[1]);
      Compute(part, ProblemOf(c_, part));
    } catch (const std::exception &error) {
      return error.what();
    }
    return "";
  }

 private:
  void Begin() {
    if (c_.is_layer()) MakeTheLayer();
    if (c_.has_cache()) FillCache();
  }

  void MakeTheLayer() {
    const bool is_stored = c_.Is("weights_given", "stored");
    LayerForm form = c_.form;
    if (is_stored) form.row_gap *= 2;  // int4 is given in whole bytes
    LayerData data(is_stored ? Converted(c_.whole, form.weight_type) : c_.whole, Place::kAnywhere,
                   form);
    if (c_.Is("kv_weights", "none")) {
      data.weights.w_k = data.weights.w_v = {};
      data.config.key_dim = data.config.value_dim = 0;
    }
    const mha_layer_options options =
        Options(instruction_set_, c_.Is("sgemm", "yes") ? SgemmOfTheSpecification : nullptr);
    layer_ = Create(data, &options);
    for (Memory &array : data.arrays) array.Fill(0xff);
  }

  Outputs Compute(const CallPart &part, const LayerProblem &problem) const {
    CallForm form = c_.call;
    form.cache.cache = cache_ ? cache_->get() : nullptr;
    form.cache.sequences = c_.cache_sequences;
    form.cache.columns = part.columns;
    form.cache.read = c_.reads();
    form.scheduler = c_.scheduler ? c_.scheduler->get() : nullptr;
    const auto change = [&](CallData *data) {
      const bool has_pairs = problem.score && (!problem.score->mask.values.empty() ||
                                               !problem.score->bias.values.empty());
      if (has_pairs && c_.Is("columns", "new"))
        data->score_arrays.column_keys = MHA_COLUMNS_NEW_KEYS;
    };
    if (!c_.Is("cache", "pool")) return Compute(problem, form, change);
    // The paged cache gets the rows first, and then a pool with the blocks that it had before.
    Random random(c_.blocks_seed);
    Pool pool(*cache_, &random);
    const Outputs paged = Compute(problem, form, change);
    const int64_t count = c_.is_packed() ? c_.packed.count() : problem.batch;
    form.cache.cache = pool.get();
    const Outputs outputs = Compute(problem, form, [&](CallData *data) {
      change(data);
      pool.SetSequences(c_.cache_sequences, count, *cache_, 0, &data->sequences);
    });
    const testing::AssertionResult same = SameBits(outputs, paged);
    if (!same) throw std::runtime_error(std::string("not as a paged cache: ") + same.message());
    if (!pool.HoldsTheBytesOf(*cache_)) throw std::runtime_error("stored other bytes than a cache");
    return outputs;
  }

  template <typename Change>
  Outputs Compute(const LayerProblem &problem, const CallForm &form, const Change &change) const {
    if (c_.is_layer()) {
      LayerCall call;
      static_cast<CallForm &>(call) = form;
      call.query = call.key = call.value = c_.inputs;
      call.output = c_.outputs;
      call.input_array = c_.input_type;
      const auto share = [&](ForwardData *data, const std::array<Input, 3> &inputs) {
        mha_forward_args &args = data->args;
        args.query.strides = inputs[0].Strides(false);
        if (args.key.data) args.key.strides = inputs[1].Strides(false);
        if (args.value.data) args.value.strides = inputs[2].Strides(false);
      };
      return Run<ForwardData>(form, change, share, problem, layer_.get(), problem, call);
    }
    AttentionCall call;
    static_cast<CallForm &>(call) = form;
    call.instruction_set = instruction_set_;
    call.q = call.k = call.v = c_.inputs;
    call.output = c_.outputs;
    call.q_array = call.k_array = c_.input_type;
    call.v_array = c_.value_type();
    if (!c_.has_cache()) {
      call.k_array = c_.TypeOf("k_type");
      call.v_array = c_.TypeOf("v_type");
    }
    const auto share = [&](AttentionData *data, const std::array<Input, 3> &inputs) {
      mha_attention_args &args = data->args;
      args.q.strides = inputs[0].Strides(true);
      args.k.strides = inputs[1].Strides(true);
      args.v.strides = inputs[2].Strides(true);
    };
    return Run<AttentionData>(form, change, share, problem, AttentionOf(problem), call);
  }

  template <typename Data, typename Change, typename Share, typename... Given>
  Outputs Run(const CallForm &form, const Change &change, const Share &share, LayerProblem problem,
              const Given &...given) const {
    std::unique_ptr<Data> data;
    if (c_.is_packed()) {
      PackedSequences packed = c_.packed;
      if (c_.has_cache()) packed.kv = c_.packed_new_keys;
      data = std::make_unique<PackedData<Data>>(packed, given...);
      if (c_.is_self() || (packed.q == packed.kv && packed.count() % 2 == 0))
        data->sequences.cu_seqlens_kv = nullptr;
    } else {
      data = std::make_unique<Data>(given...);
      if (problem.n_q % 2 == 1) data->sequences.count = problem.batch;
    }
    change(data.get());
    const std::array<Input, 3> inputs = InputsOf(c_, &problem);
    if (inputs[0].is_shared()) share(data.get(), inputs);
    data->gives_empty_structs = !c_.Is("empty_structs", "null");
    if (!data->gives_empty_structs) LeaveOutEmptyStructs(data.get());
    if (!c_.Is("in_place", "yes"))
      return data->Compute(form.workspace_fill, form.place, form.workspace_misalignment);
    const size_t bytes = data->WorkspaceBytes(), of_floats = data->output.memory.size();
    Memory workspace(bytes + form.workspace_misalignment, form.place);
    workspace.Fill(form.workspace_fill);
    data->PoisonOutputs();
    // It has the layout and the type of the query.
    if (of_floats != 0)
      std::memcpy(data->args.output.data, QueryOf(data->args),
                  of_floats / (c_.input_type == Storage::kF32 ? 1 : 2));
    QueryOf(data->args) = data->args.output.data;
    mha_error error;
    Check(data->Run(workspace.data() + form.workspace_misalignment, bytes, &error), error);
    return data->Results();
  }

  // Those of scores in which nothing is given.
  template <typename Data>
  static void LeaveOutEmptyStructs(Data *data) {
    const auto is_empty = [](const auto &given) {
      const auto zeroed = Zeroed<std::decay_t<decltype(given)>>();
      return std::memcmp(&given, &zeroed, sizeof given) == 0;
    };
    // relative_rows has the width that score says, which may be 1.
    if (is_empty(data->score) && !data->score_arrays.relative_rows) data->args.call.score = nullptr;
    if (is_empty(data->score_arrays)) data->args.call.score_arrays = nullptr;
  }

  static const void *&QueryOf(mha_forward_args &args) {
    return args.query.data;
  }  // NOLINT: to be changed, here and below
  static const void *&QueryOf(mha_attention_args &args) { return args.q.data; }  // NOLINT

  // A cache with the keys before those of the first call.
  void FillCache() {
    const LayerProblem &whole = c_.whole;
    cache_.emplace(
        CacheConfigOf(whole, c_.cache_form, c_.cache_size, std::max<int64_t>(whole.n_kv, 1)));
    Random random(c_.blocks_seed);
    SpreadBlocks(&random, &*cache_);
    const int64_t longest = *std::max_element(c_.pasts.begin(), c_.pasts.end());
    if (longest == 0) return;
    if (c_.Is("past_by", "append") || c_.is_packed() || c_.Is("kv_weights", "none"))
      return AppendPast();
    // A call in which each row sees its own key alone: what is stored does not depend on who
    // attends to it.
    CallPart part = {0, longest, longest, 0, {}};
    for (const int64_t past : c_.pasts) part.rows.push_back({0, past, 0, 0, past, 0, past});
    LayerProblem problem = whole;
    problem.n_q = problem.n_kv = longest;
    problem.is_causal = true;
    problem.window_left = 0;
    problem.window_right.reset();
    problem.score.reset();
    if (!c_.is_layer()) problem.gate = GateKind::kNone;
    problem.q_first.clear();
    problem.kv_start.clear();
    problem.q_start.clear();
    problem.q_lengths = c_.pasts;
    const bool keys_are_queries = c_.Is("entry", "self|value");
    problem.kv_lengths = keys_are_queries ? std::vector<int64_t>() : c_.pasts;
    problem.has_key = !keys_are_queries;
    problem.has_value = c_.Is("entry", "attention|value|key_value");
    problem.key = RowsOfKeys(whole.key, c_, part, whole.key_dim, 0.0f);
    problem.value = RowsOfKeys(whole.value, c_, part, whole.value_dim, 0.0f);
    problem.query = keys_are_queries ? problem.key
                                     : std::vector<float>(whole.batch * longest * whole.query_dim);
    if (whole.rope) {
      problem.rope->q_positions.clear();
      std::vector<int64_t> &k_positions = problem.rope->k_positions;
      if (!k_positions.empty()) k_positions = RowsOfKeys<int64_t>(k_positions, c_, part, 1, -1);
    }
    CallForm form;
    form.asked = kAskNothing;
    form.cache = {cache_->get(), c_.cache_sequences, 0, false};
    form.output_array = c_.call.output_array;
    Compute(problem, form, [](CallData *) {});
  }

  // By mha_kv_cache_append, as the specification projects, normalises and rotates them.
  void AppendPast() {
    const LayerProblem &whole = c_.whole;
    const std::optional<Norm> norm = NormOf(whole);
    for (int64_t b = 0; b < static_cast<int64_t>(c_.pasts.size()); b++) {
      const int64_t past = c_.pasts[b], in_whole = c_.is_packed() ? 0 : b;
      const int64_t first = c_.is_packed() ? c_.packed.kv[b] : 0;
      const AttentionSizes &all = whole, sizes = c_.is_packed() ? OneOf(all, c_.packed, b) : all;
      KeysAndValues rows;
      rows.k = SliceRows(c_.is_layer() ? expected_.k : whole.key, in_whole, whole.n_kv,
                         whole.k_width(), first, past);
      rows.v = SliceRows(c_.is_layer() ? expected_.v : whole.value, in_whole, whole.n_kv,
                         whole.v_width(), first, past);
      WithRotation(sizes, in_whole, [&](const Rotation *rotation) {
        AttentionShape shape = ShapeOf(sizes, in_whole);
        shape.n_kv = past;
        shape.norm = norm ? &*norm : nullptr;
        shape.rotation = rotation;
        spec::Fastest().prepare_keys(shape, rows.k.data(), rows.v.data());
      });
      cache_->Append(c_.cache_sequences.empty() ? b : c_.cache_sequences[b], rows);
    }
  }

  const Case &c_;
  const Outputs &expected_;
  const uint32_t instruction_set_;
  Layer layer_;
  std::optional<Cache> cache_;
};

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_GENERATED_CASE_H
