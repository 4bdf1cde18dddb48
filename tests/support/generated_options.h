// All options of a call, each in one entry of a table, from which generated_test.cpp makes cases. A
// new option is
//
//   - an entry of kDimensions: its name, its values, of which the first one is a call without it,
//     and a function that gives a case what a value stands for. It goes behind what it needs, such
//     as the sizes. Its random numbers are its own: it changes no other option;
//   - combinations that the library refuses in RefusedByTheLibrary, and those that mean nothing in
//     WithoutMeaning;
//   - where it has an array with something for each row or key: a line in ProblemOf
//     (generated_case.h), which cuts the arrays of a call out of those of the whole.
//
// A caller's sgemm is one with the arithmetic of the specification, so that its results are
// compared to the bit too. mha_linear, which has few options, has random products of its own in
// linear_test.cpp.
//
// The rest is as for any test: the field in LayerProblem or what that consists of, which Specify
// gives to the specification and CallData or LayerData to the library.
#ifndef MHA_TESTS_SUPPORT_GENERATED_OPTIONS_H
#define MHA_TESTS_SUPPORT_GENERATED_OPTIONS_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/choices.h"
#include "support/generated_case.h"
#include "support/norm.h"

namespace support {

// Which numbers the library does not refuse somewhere.
inline bool IsAny(float) { return true; }
inline bool IsFinite(float x) { return std::isfinite(x); }
inline bool IsPositive(float x) { return std::isfinite(x) && x > 0; }
inline bool IsLow(float x) { return x < std::numeric_limits<float>::infinity(); }

// With values=any other arrays than the inputs hold any bits too, now and then.
inline void MakeAny(const Case &c, Random *random, std::vector<float> *x,
                    bool (*is_allowed)(float) = IsAny) {
  if (!c.Is("values", "any") || random->Coin()) return;
  MakeSpecial(random, Values::kAny, 1, x);
  for (float &value : *x) value = is_allowed(value) ? value : 0.25f;
}

inline float AnyOf(const Case &c, Random *random, float value, bool (*is_allowed)(float)) {
  std::vector<float> x = {value};
  MakeAny(c, random, &x, is_allowed);
  return x[0];
}

// Matrices of a layer that keeps them as f16 may not have finite numbers that are too large.
inline void MakeAnyWeights(const Case &c, Random *random, std::vector<float> *w) {
  const auto is_of_f16 = [](float x) { return !std::isfinite(x) || std::fabs(x) < 65520.0f; };
  MakeAny(c, random, w, c.form.weight_type == Stored::kF16 ? +is_of_f16 : IsAny);
}

using Name = std::string_view;  // of a value of a dimension

template <typename Types>
std::string NamesOf(const Types &types) {
  std::string names;
  for (const Storage type : types) names += NameOf(type) + std::string(" ");
  return names;
}

struct Dimension {
  std::string_view name;
  std::string values;  // "few one over_256*0.03": in random cases the last has this weight
  void (*apply)(Case *c, Name value, Random *random) = nullptr;  // null: others ask for the value
};

// ---- Sizes

inline Size DrawCount(Random *random, std::string_view value) {
  if (value == "one") return {1, 1};
  if (value == "few") return Draw(random, 2, 7);
  if (value == "some") return Draw(random, 8, 40);
  if (value == "many") return Draw(random, 41, 100);
  if (value == "over_256") return Draw(random, 257, 300);
  if (value == "over_512") return Draw(random, 530, 640);
  if (value == "over_1024") return Draw(random, 1030, 2600);
  return {0, 0};
}

// About how many multiply-adds the library has to do, those of the scalar kernels being the
// slowest.
inline double CostOf(const Case &c) {
  const auto of = [](const Size &size) { return static_cast<double>(size.value); };
  const double heads = of(c.num_kv_heads) * of(c.group), widths = of(c.head_dim) + of(c.head_dim_v),
               keys = of(c.past) + of(c.n_kv);
  double cost = of(c.n_q) * keys * heads * (widths + 20);
  if (c.is_layer()) {
    cost += of(c.n_q) * (of(c.query_dim) * heads * of(c.head_dim) +
                         of(c.output_dim) * heads * of(c.head_dim_v));
    cost += keys * of(c.num_kv_heads) *
            (of(c.key_dim) * of(c.head_dim) + of(c.value_dim) * of(c.head_dim_v));
  }
  return cost * of({c.whole.batch, 1});
}

// Makes the sizes smaller, towards the least that their values mean, until the case is not too
// large; then they are final.
inline void SettleSizes(Case *c) {
  const bool has_many_keys = c->Is("n_kv", "over_1024") || c->Is("past", "over_1024");
  const double most =
      has_many_keys || c->Is("n_q", "over_256") || c->Is("head_dim", "over_100") ? 1e6 : 6e4;
  const bool keys_are_new_queries = c->Is("n_kv", "queries") && !c->reads();
  while (true) {
    if (keys_are_new_queries) c->n_kv.value = c->n_q.value;
    if (CostOf(*c) <= most) break;
    Size *largest = nullptr;
    for (Size *size : {&c->n_q, &c->n_kv, &c->past, &c->num_kv_heads, &c->group, &c->head_dim,
                       &c->head_dim_v, &c->query_dim, &c->key_dim, &c->value_dim, &c->output_dim}) {
      if (size == &c->n_kv && keys_are_new_queries) continue;
      if (size->value > size->least &&
          (!largest || size->value * largest->least > largest->value * size->least))
        largest = size;
    }
    if (!largest) break;
    largest->value = largest->least + (largest->value - largest->least) / 2;
  }
  LayerProblem &whole = c->whole;
  if (!c->Is("rope", "none")) c->head_dim.value = std::max<int64_t>(c->head_dim.value, 2);
  if (c->Is("head_dim_v", "same")) c->head_dim_v = c->head_dim;
  if (c->Is("cache_values", "in_keys"))
    c->head_dim_v.value = std::min(c->head_dim_v.value, c->head_dim.value);
  if (c->Is("in_place", "yes")) c->output_dim = c->query_dim;
  whole.num_kv_heads = c->num_kv_heads.value;
  whole.num_heads = whole.num_kv_heads * c->group.value;
  whole.head_dim = c->head_dim.value;
  whole.head_dim_v = c->head_dim_v.value;
  if (!c->is_layer()) {
    c->query_dim.value = whole.q_width();
    c->key_dim.value = whole.k_width();
    c->value_dim.value = whole.v_width();
  } else {
    // What is NULL is the same array as what stands in for it.
    if (c->Is("widths", "same") || c->Is("entry", "self|value")) c->key_dim = c->query_dim;
    if (c->Is("widths", "same") || c->Is("entry", "self|key")) c->value_dim = c->key_dim;
  }
  whole.query_dim = c->query_dim.value;
  whole.key_dim = c->key_dim.value;
  whole.value_dim = c->value_dim.value;
  whole.output_dim = c->output_dim.value;
  whole.n_q = c->n_q.value;
  whole.has_key = whole.has_value = true;
}

inline std::vector<int64_t> DrawLengths(Random *random, std::string_view value, int64_t batch,
                                        int64_t n) {
  std::vector<int64_t> lengths(batch, n);
  for (int64_t &length : lengths) {
    if (value != "no") length = random->Between(std::min<int64_t>(n, 1), n);
  }
  if (value == "empty") lengths[random->Below(batch)] = 0;
  return lengths;
}

// Whether queries may stand before the first key, of which the tables of a rotation have no row.
inline bool MayBeBefore(const Case &c) {
  return c.Is("rope", "none") || c.Is("rope_positions", "queries|both") ||
         (c.Is("causal", "yes") && !c.Is("segments", "also"));
}

// How many keys each sequence has before the calls, and how many come; then n_kv and the lengths of
// the whole.
inline void SettleKeys(Case *c, std::string_view value, Random *random) {
  LayerProblem &whole = c->whole;
  const auto queries = [&](int64_t b) { return ValidRowsOf(whole, b).n_q; };
  c->new_keys = DrawLengths(random, value == "queries" ? "no" : value, whole.batch, c->n_kv.value);
  for (int64_t b = 0; b < whole.batch; b++) {
    int64_t &fresh = c->new_keys[b];
    if (value == "queries") fresh = queries(b);
    if (!c->kv_start.empty()) fresh = std::min(fresh, c->n_kv.value - c->kv_start[b]);
    int64_t past = b == 0 ? c->past.value : random->Between(0, c->past.value);
    // Where the last query stands at the last key, there are as many keys as queries.
    const bool has_one_for_each = c->counts_positions() && c->Is("q_start", "null") &&
                                  (c->has_cache() || !c->Is("n_kv", "none"));
    if (has_one_for_each && (c->kv_start.empty() || c->has_cache() || !MayBeBefore(*c))) {
      if (c->has_cache()) {
        past = std::max(past, queries(b) - fresh);
      } else if (fresh < queries(b) && value != "no") {
        fresh = queries(b);
        c->n_kv.value = std::max(c->n_kv.value, fresh);
      } else if (fresh < queries(b)) {
        c->n_kv.value = whole.n_q;
        c->new_keys.assign(whole.batch, whole.n_q);
      }
    }
    c->pasts.push_back(past);
  }
  whole.n_kv = c->n_kv.value;
  if (c->has_cache()) {
    whole.n_kv = 0;
    for (int64_t b = 0; b < whole.batch; b++) {
      whole.kv_lengths.push_back(c->pasts[b] + c->new_keys[b]);
      whole.n_kv = std::max(whole.n_kv, whole.kv_lengths.back());
    }
  } else if (value != "no") {
    whole.kv_lengths = c->new_keys;
  }
}

// ---- Arrays with a number for each pair

// The columns of mask and bias.
inline int64_t ColumnsOf(const Case &c) {
  return c.has_own_columns() ? c.num_own_columns() : c.whole.n_kv;
}

// make(i, j) is drawn for row i and column j, one after the other, of each sequence and head that
// has its own.
template <typename T, typename Make>
Pairs<T> DrawPairs(const Case &c, std::string_view extents_of, int64_t columns, const Make &make,
                   int64_t heads = 0) {
  const std::string_view extents = c.ValueOf(extents_of);
  Pairs<T> pairs;
  pairs.by_sequence = extents == "all" || extents == "sequence";
  pairs.by_head = extents == "all" || extents == "head";
  pairs.by_row = extents == "all" || extents == "row";
  pairs.heads = heads;
  const int64_t blocks = (pairs.by_sequence ? c.whole.batch : 1) *
                         (pairs.by_head ? pairs.heads_of(c.whole.num_heads) : 1);
  for (int64_t n = 0; n < blocks; n++) {
    for (int64_t i = 0; i < (pairs.by_row ? c.whole.n_q : 1); i++) {
      for (int64_t j = 0; j < columns; j++) pairs.values.push_back(make(i, j));
    }
  }
  return pairs;
}

template <typename T>
T &PairOf(const LayerProblem &sizes, Pairs<T> *pairs, int64_t columns, int64_t b, int64_t h,
          int64_t i, int64_t column) {
  const int64_t heads = pairs->by_head ? sizes.num_heads : 1, rows = pairs->by_row ? sizes.n_q : 1;
  const int64_t at = ((pairs->by_sequence ? b : 0) * heads + (pairs->by_head ? h : 0)) * rows +
                     (pairs->by_row ? i : 0);
  return pairs->values[at * columns + column];
}

// What an array with columns of its own means for the keys of the whole: those without one have
// `absent`.
template <typename T>
Pairs<T> OfAllKeys(const Case &c, Pairs<T> pairs, T absent) {
  const LayerProblem &whole = c.whole;
  Pairs<T> all;
  all.by_sequence = all.by_head = all.by_row = true;
  all.values.assign(whole.batch * whole.num_heads * whole.n_q * whole.n_kv, absent);
  for (size_t n = 0; n + 1 < c.cuts.size(); n++) {
    const CallPart part = PartOf(c, c.cuts[n], c.cuts[n + 1]);
    const bool are_new = c.Is("columns", "new");
    const int64_t first_column = c.KeyColumns(part.begin, part.end).first;
    for (size_t r = 0; r < part.rows.size(); r++) {
      const CallRows &rows = part.rows[r];
      const int64_t b = c.is_packed() ? 0 : static_cast<int64_t>(r),
                    count = are_new ? rows.kv_count : rows.length;
      const int64_t to = are_new ? rows.kv_column : c.packed.kv[r],
                    from = are_new ? first_column + rows.kv_first : 0;
      const int64_t begin = c.is_packed() ? rows.q_first : part.begin,
                    end = c.is_packed() ? rows.q_first + rows.q_count : part.end;
      for (int64_t h = 0; h < whole.num_heads; h++) {
        for (int64_t i = begin; i < end; i++) {
          for (int64_t j = 0; j < count; j++) {
            PairOf(whole, &all, whole.n_kv, b, h, i, to + j) =
                PairOf(whole, &pairs, c.num_own_columns(), b, h, i, from + j);
          }
        }
      }
    }
  }
  return all;
}

inline ScoreArrays &ScoreOf(Case *c) {
  if (!c->whole.score) c->whole.score.emplace();
  return *c->whole.score;
}

// ---- What may hold anything, since nothing is computed from it

// Calls function(sizes) for the whole or, if that is packed, for each sequence in it.
template <typename Function>
void ForEachView(const Case &c, const Function &function) {
  if (!c.is_packed()) return function(static_cast<const AttentionSizes &>(c.whole));
  for (int64_t b = 0; b < c.packed.count(); b++)
    function(OneOf(static_cast<const AttentionSizes &>(c.whole), c.packed, b));
}

// Calls function(b, h, i, j) for each pair of valid rows that attend, j being a column.
template <typename Function>
void ForEachAttendingPair(const AttentionSizes &sizes, const Function &function) {
  for (int64_t b = 0; b < sizes.batch; b++) {
    const ValidRows valid = ValidRowsOf(sizes, b);
    const AttentionShape shape = ShapeOf(sizes, b);
    const ScoreArrays score = sizes.score ? *sizes.score : ScoreArrays();
    const std::vector<uint8_t> mask = DensePairs(sizes, score.mask, b);
    const std::vector<int64_t> &q_segments = score.segments.of_queries,
                               &kv_segments = score.segments.of_keys.empty()
                                                  ? q_segments
                                                  : score.segments.of_keys;
    for (int64_t i = 0; i < valid.n_q; i++) {
      const int64_t most = std::numeric_limits<int64_t>::max(),
                    p = shape.q_start > most - i ? most : shape.q_start + i;
      for (int64_t j = 0; j < valid.n_kv; j++) {
        bool attends = !(shape.is_causal && j > p) &&
                       !(shape.has_window_left && j < p - shape.window_left) &&
                       !(shape.has_window_right && j - shape.window_right > p);
        if (!q_segments.empty()) {
          const int64_t own = q_segments[b * sizes.n_q + valid.q_first + i];
          const bool is_same = own == kv_segments[b * sizes.n_kv + valid.kv_first + j];
          attends = score.segments.add_keys ? attends || (is_same && own >= 0) : attends && is_same;
        }
        if (!attends || (score.num_columns != 0 && valid.kv_first + j >= score.num_columns))
          continue;
        for (int64_t h = 0; h < sizes.num_heads; h++) {
          if (!mask.empty() && !mask[(h * valid.n_q + i) * valid.n_kv + j]) continue;
          function(b, h, valid.q_first + i, valid.kv_first + j);
        }
      }
    }
  }
}

inline void PoisonWhatNobodyAttendsTo(Case *c, float poison) {
  LayerProblem &whole = c->whole;
  std::vector<bool> has_queries(whole.batch * whole.n_kv);
  Pairs<float> *bias = whole.score && !whole.score->bias.values.empty() && !c->has_own_columns()
                           ? &whole.score->bias
                           : nullptr;
  Pairs<float> poisoned;
  if (bias) {
    poisoned = *bias;
    std::fill(poisoned.values.begin(), poisoned.values.end(), poison);
  }
  ForEachView(*c, [&](const AttentionSizes &sizes) {
    ForEachAttendingPair(sizes, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      has_queries[b * whole.n_kv + j] = true;
      if (bias)
        PairOf(whole, &poisoned, whole.n_kv, b, h, i, j) =
            PairOf(whole, bias, whole.n_kv, b, h, i, j);
    });
  });
  if (bias) *bias = poisoned;
  for (int64_t b = 0; b < whole.batch; b++) {
    for (int64_t j = 0; j < whole.n_kv; j++) {
      const int64_t row = b * whole.n_kv + j;
      if (has_queries[row]) continue;
      std::fill_n(whole.value.begin() + row * whole.value_dim, whole.value_dim, poison);
      std::fill_n(whole.key.begin() + row * whole.key_dim, whole.key_dim, poison);
    }
  }
}

// Where key is NULL, keys are the rows of query; where value is, values are those of key.
inline void ShareInputs(Case *c) {
  LayerProblem &whole = c->whole;
  if (c->is_self() && c->has_cache() && c->is_packed()) {
    for (const CallRows &rows : PartOf(*c, 0, whole.n_q).rows) {
      const auto from = whole.key.begin() + rows.kv_column * whole.key_dim;
      std::copy(from, from + rows.q_count * whole.key_dim,
                whole.query.begin() + rows.q_first * whole.query_dim);
    }
  } else if (c->is_self() && !c->has_cache()) {
    whole.query = whole.key;
  } else if (c->is_self()) {
    for (int64_t b = 0; b < whole.batch; b++) {
      const ValidRows valid = ValidRowsOf(whole, b);
      const auto from = whole.key.begin() + (b * whole.n_kv + c->pasts[b]) * whole.key_dim;
      std::copy(from, from + valid.n_q * whole.key_dim,
                whole.query.begin() + (b * whole.n_q + valid.q_first) * whole.query_dim);
    }
  }
  if (c->Is("entry", "self|key")) whole.value = whole.key;
}

// ---- The table

// Sizes.
inline std::vector<Dimension> DimensionsOfSizes() {
  return {
      // mha_attention, or mha_forward with which inputs beside query
      {"entry", "attention self key value key_value"},
      {"batch", "1 2 3", [](Case *c, Name value, Random *) { c->whole.batch = value[0] - '0'; }},
      {"n_q", "few one some many*0.3 over_256*0.03",
       [](Case *c, Name value, Random *random) { c->n_q = DrawCount(random, value); }},
      {"n_kv",  // that come with the calls
       "queries few some over_256*0.5 over_512*0.15 over_1024*0.1 none*0.5",
       [](Case *c, Name value, Random *random) { c->n_kv = DrawCount(random, value); }},
      {"past",  // keys that a cache has before
       "none few some over_256*0.5 over_512*0.15 over_1024*0.1",
       [](Case *c, Name value, Random *random) { c->past = DrawCount(random, value); }},
      {"cache", "none*2 contiguous paged pool ring",
       [](Case *c, Name value, Random *random) {
         if (value == "paged" || value == "pool")
           c->cache_form = {MHA_CACHE_KIND_PAGED,
                            random->Pick<int64_t>({16, 32, 48, 64, 176, 256, 272, 512})};
         c->blocks_seed = random->Next();
       }},
      {"cache_read", "no yes"},
      {"kv_heads", "one several",
       [](Case *c, Name value, Random *random) {
         c->num_kv_heads = value == "one" ? Size{1, 1} : Draw(random, 2, 4);
       }},
      {"grouped", "no by_2 by_more",
       [](Case *c, Name value, Random *random) {
         c->group = value == "no" ? Size{1, 1} : value == "by_2" ? Size{2, 2} : Draw(random, 3, 9);
       }},
      {"head_dim", "small vectors odd wide*0.3 over_100*0.05",
       [](Case *c, Name value, Random *random) {
         if (value == "small") c->head_dim = Draw(random, 1, 8);
         if (value == "vectors") c->head_dim = Fixed(random->Pick<int64_t>({8, 16, 32}));
         if (value == "odd") c->head_dim = Fixed(2 * random->Between(4, 20) + 1);
         if (value == "wide") c->head_dim = Draw(random, 47, 97);
         if (value == "over_100")
           c->head_dim = Fixed(random->Pick<int64_t>({128, 144, random->Between(101, 260)}));
       }},
      {"head_dim_v", "same other",
       [](Case *c, Name value, Random *random) {
         c->head_dim_v =
             value == "same" ? c->head_dim : Draw(random, 1, random->Pick<int64_t>({8, 40, 97}));
       }},
      {"widths",  // of the inputs of a layer
       "same different",
       [](Case *c, Name value, Random *random) {
         const auto draw = [&] { return Draw(random, 1, random->Pick<int64_t>({8, 20, 48, 90})); };
         c->query_dim = c->key_dim = c->value_dim = c->output_dim = draw();
         if (value == "same") return;
         c->key_dim = draw();
         c->value_dim = draw();
         c->output_dim = draw();
       }},
      {"scale", "default given equal*0.5",  // equal: MHA_EQUAL_SCORES, whatever scale a layer has
       [](Case *c, Name value, Random *random) {
         c->whole.has_equal_scores = value == "equal";
         const bool is_given =
             value == "given" || (value == "equal" && c->is_layer() && random->Coin());
         if (is_given)
           c->whole.scale = random->Pick<float>({1.0f, -0.5f, 3.0f, 0.37f, 0x1p-140f, 1e30f});
         if (is_given) c->whole.scale = AnyOf(*c, random, c->whole.scale, IsFinite);
         SettleSizes(c);
       }},
  };
}

// Lengths, positions, and who attends to whom.
inline std::vector<Dimension> DimensionsOfVisibility() {
  return {
      {"kv_start", "no yes",
       [](Case *c, Name value, Random *random) {
         LayerProblem &whole = c->whole;
         const int64_t most =
             MayBeBefore(*c) ? c->n_kv.value : std::max<int64_t>(c->n_kv.value - whole.n_q, 0);
         for (int64_t b = 0; b < whole.batch && value == "yes"; b++)
           whole.kv_start.push_back(random->Between(0, most));
         c->kv_start = whole.kv_start;
         if (c->has_cache()) whole.kv_start.clear();
       }},
      {"q_lengths", "no ragged empty",
       [](Case *c, Name value, Random *random) {
         LayerProblem &whole = c->whole;
         if (value != "no") whole.q_lengths = DrawLengths(random, value, whole.batch, whole.n_q);
       }},
      {"q_first",  // end: padding is on the left alone
       "no some end",
       [](Case *c, Name value, Random *random) {
         LayerProblem &whole = c->whole;
         for (int64_t b = 0; b < whole.batch && value != "no"; b++) {
           const bool has_length = !whole.q_lengths.empty();
           const int64_t last = whole.n_q - (has_length ? whole.q_lengths[b] : 0);
           whole.q_first.push_back(value == "end" && has_length ? last : random->Between(0, last));
         }
         if (c->is_self() && !c->has_cache()) whole.kv_start = whole.q_first;
       }},
      {"kv_lengths", "no ragged empty queries", SettleKeys},
      {"packed", "no yes",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         LayerProblem &whole = c->whole;
         const auto draw = [&](int64_t count, int64_t n) {
           std::vector<int64_t> starts;
           for (int64_t b = 0; b <= count; b++) starts.push_back(random->Between(0, n));
           std::sort(starts.begin(), starts.end());
           starts.front() = 0;
           starts.back() = n;
           return starts;
         };
         PackedSequences &packed = c->packed;
         packed.q = draw(random->Between(1, 5), whole.n_q);
         if (c->has_cache()) {
           const bool has_one_for_each = c->counts_positions() && c->Is("q_start", "null");
           std::vector<int64_t> lengths;
           c->packed_new_keys = c->reads() ? std::vector<int64_t>(packed.q.size()) : packed.q;
           if (!c->Is("n_kv", "queries") && !c->reads())
             c->packed_new_keys = draw(packed.count(), c->n_kv.value);
           c->pasts.clear();
           for (int64_t b = 0; b < packed.count(); b++) {
             const int64_t queries = packed.q[b + 1] - packed.q[b],
                           fresh = c->packed_new_keys[b + 1] - c->packed_new_keys[b];
             const int64_t past = b == 0 ? c->past.value : random->Between(0, c->past.value);
             c->pasts.push_back(has_one_for_each ? std::max(past, queries - fresh) : past);
             lengths.push_back(c->pasts.back() + fresh);
           }
           packed.kv = StartsOf(lengths);
           whole.n_kv = packed.kv.back();
           whole.kv_lengths.clear();
           return;
         }
         packed.kv = c->Is("n_kv", "queries") ? packed.q : draw(packed.count(), whole.n_kv);
         if (c->Is("n_kv", "queries") || !c->counts_positions() || !c->Is("q_start", "null"))
           return;
         for (int64_t b = 0, left = whole.n_kv - whole.n_q; b < packed.count(); b++) {
           const int64_t more = b + 1 < packed.count()
                                    ? random->Between(0, left)
                                    : left;  // beyond those that its queries need
           left -= more;
           packed.kv[b + 1] = packed.kv[b] + packed.q[b + 1] - packed.q[b] + more;
         }
       }},
      {"causal", "no yes",
       [](Case *c, Name value, Random *) { c->whole.is_causal = value == "yes"; }},
      {"window_left", "no zero few over_256 over_512*0.2 over_1024*0.2",
       [](Case *c, Name value, Random *random) {
         if (value != "no") c->whole.window_left = DrawCount(random, value).value;
       }},
      {"window_right", "no zero few over_256",
       [](Case *c, Name value, Random *random) {
         if (value != "no") c->whole.window_right = DrawCount(random, value).value;
       }},
      {"q_start", "null last first within beyond far*0.5 before far_before*0.3",
       [](Case *c, Name value, Random *random) {
         if (value == "null") return;
         std::vector<int64_t> starts;
         ForEachView(*c, [&](const AttentionSizes &sizes) {
           for (int64_t b = 0; b < sizes.batch; b++) {
             const ValidRows valid = ValidRowsOf(sizes, b);
             // Last: with more queries than keys, some are before the first one.
             int64_t start = valid.n_kv - valid.n_q;
             if (value == "last" && !MayBeBefore(*c)) start = std::max<int64_t>(start, 0);
             if (value == "first") start = 0;
             if (value == "within") start = random->Between(0, valid.n_kv);
             if (value == "beyond") start = valid.n_kv + random->Between(0, 20);
             if (value == "far")
               start = std::numeric_limits<int64_t>::max() - random->Between(0, 9);
             if (value == "before") start = -random->Between(1, 1 + sizes.n_q);
             if (value == "far_before") start = -(int64_t{1} << 62) + random->Between(0, 9);
             starts.push_back(start);
           }
         });
         (c->is_packed() ? c->packed.q_start : c->whole.q_start) = starts;
       }},
      {"calls",  // that the rows of query come in
       "one*2 two several rows",
       [](Case *c, Name value, Random *random) {
         const int64_t n = c->whole.n_q;
         c->cuts = {0, n};
         for (int64_t count = value == "two" ? 1 : value == "several" ? 4 : 0; count > 0; count--)
           c->cuts.push_back(random->Between(0, n));
         for (int64_t row = 1; value == "rows" && row < std::min<int64_t>(n, 9); row++)
           c->cuts.push_back(row);
         std::sort(c->cuts.begin(), c->cuts.end());
         c->cuts.erase(std::unique(c->cuts.begin(), c->cuts.end()), c->cuts.end());
       }},
  };
}

// The cache.
inline std::vector<Dimension> DimensionsOfCaches() {
  return {
      {"ring", "tight roomy",
       [](Case *c, Name value, Random *random) {
         if (!c->Is("cache", "ring")) return;
         const bool in_step = c->keys_come_with_queries() && c->kv_start.empty();
         const int64_t at_once = in_step ? 1 : std::max(c->whole.n_q, c->n_kv.value);
         const int64_t least = c->whole.window_left.value_or(0) + at_once +
                               (value == "roomy" ? random->Between(1, 300) : 0);
         c->cache_form = {MHA_CACHE_KIND_RING, (least + 15) / 16 * 16};
       }},
      {"cache_sequences", "null given",
       [](Case *c, Name value, Random *random) {
         const int64_t sequences = c->is_packed() ? c->packed.count() : c->whole.batch;
         c->cache_size = sequences + random->Between(0, 2);
         std::vector<int64_t> all;
         for (int64_t n = 0; n < c->cache_size; n++)
           all.insert(all.begin() + random->Between(0, n), n);
         if (value == "given") c->cache_sequences.assign(all.begin(), all.begin() + sequences);
       }},
      {"past_by", "call append"},
      {"k_type",  // of a cache or, of mha_attention without one, of the array
       NamesOf(kKeyTypes),
       [](Case *c, Name, Random *) {
         if (c->has_cache()) c->whole.k_type = c->TypeOf("k_type");
       }},
      {"v_type", NamesOf(kValueTypes),
       [](Case *c, Name, Random *) {
         if (c->has_cache()) c->whole.v_type = c->TypeOf("v_type");
       }},

      {"attention_arithmetic", "f32*3 int16",
       [](Case *c, Name value, Random *) {
         c->whole.is_in_integers = value == "int16";
         if (value == "int16" && !c->has_cache())
           c->whole.k_type = c->whole.v_type = Storage::kInt8;
       }},
      {"cache_values", "own*4 in_keys",
       [](Case *c, Name value, Random *) { c->whole.values_in_keys = value == "in_keys"; }},
  };
}

// The layer.
inline std::vector<Dimension> DimensionsOfLayers() {
  return {
      {"weight_type", NamesOf(kWeightTypes),
       [](Case *c, Name, Random *random) {
         c->form.weight_type = c->TypeOf("weight_type");
         LayerProblem &whole = c->whole;
         const auto draw = [&](int64_t in, int64_t out) {
           std::vector<float> w =
               QuickNormals(random, in * out, 1 / std::sqrt(static_cast<float>(in)));
           if (c->is_layer()) MakeAnyWeights(*c, random, &w);
           return w;
         };
         whole.w_q = draw(whole.query_dim, whole.q_width());
         whole.w_k = draw(whole.key_dim, whole.k_width());
         whole.w_v = draw(whole.value_dim, whole.v_width());
       }},
      {"arithmetic", "f32 int8 int16 bf16",
       [](Case *c, Name value, Random *) {
         c->whole.arithmetic = value == "f32"    ? Arithmetic::kF32
                               : value == "int8" ? Arithmetic::kInt8
                               : value == "bf16" ? Arithmetic::kBf16
                                                 : Arithmetic::kInt16;
       }},
      {"weights_given", "floats stored"},  // in the type that the layer keeps
      {"sgemm", "no*3 yes"},
      {"weight_form", "three fused",
       [](Case *c, Name value, Random *) {
         c->form.form = value == "three" ? WeightForm::kThreeMatrices : WeightForm::kFused;
       }},
      {"weight_layout", "in_out out_in",
       [](Case *c, Name value, Random *) {
         c->form.layout = value == "in_out" ? MHA_LAYOUT_IN_OUT : MHA_LAYOUT_OUT_IN;
       }},
      {"weight_strides", "contiguous gaps",
       [](Case *c, Name value, Random *random) {
         c->form.row_gap = value == "gaps" ? random->Between(1, 9) : 0;
       }},
      {"layer_defaults", "written left_out",
       [](Case *c, Name value, Random *) { c->form.use_defaults = value != "written"; }},
      {"w_o", "yes no",
       [](Case *c, Name value, Random *random) {
         LayerProblem &whole = c->whole;
         const float factor = 1 / std::sqrt(static_cast<float>(whole.merged_width()));
         if (c->is_layer() && value == "yes")
           whole.w_o = QuickNormals(random, whole.merged_width() * whole.output_dim, factor);
         MakeAnyWeights(*c, random, &whole.w_o);
       }},
      {"biases", "no all some fused",
       [](Case *c, Name value, Random *random) {
         LayerProblem &whole = c->whole;
         c->form.fused_biases = value == "fused";
         const auto draw = [&](int64_t count, std::vector<float> *bias) {
           const bool is_there =
               value == "all" || value == "fused" || (value == "some" && random->Coin());
           if (is_there) *bias = QuickNormals(random, count);
           MakeAny(*c, random, bias);
         };
         draw(whole.q_width(), &whole.b_q);
         draw(whole.k_width(), &whole.b_k);
         draw(whole.v_width(), &whole.b_v);
         if (!whole.w_o.empty()) draw(whole.output_dim, &whole.b_o);
       }},
      {"gate", "no*2 sigmoid softplus",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         LayerProblem &whole = c->whole;
         whole.gate = value == "sigmoid" ? GateKind::kSigmoid : GateKind::kSoftplus;
         whole.gate_dim = c->Is("gate_dim", "single") ? 1 : whole.head_dim_v;
         c->form.gate_in_q = c->Is("gate_in_q", "yes");
         const float factor = 4 / std::sqrt(static_cast<float>(whole.query_dim));
         whole.w_g = QuickNormals(random, whole.query_dim * whole.gate_width(), factor);
         if (!whole.b_q.empty()) whole.b_g = QuickNormals(random, whole.gate_width());
         MakeAnyWeights(*c, random, &whole.w_g);
         MakeAny(*c, random, &whole.b_g);
       }},
      {"gate_dim", "elements single"},
      {"gate_in_q", "no yes"},
      {"kv_weights", "given none"},  // none: a layer of W_Q, which reads a cache that others fill
  };
}

// The inputs.
inline std::vector<Dimension> DimensionsOfInputs() {
  return {
      {"input_type",  // of rows of a layer; of q and, with a cache, of k and v
       "f32 f16 bf16", [](Case *c, Name, Random *) { c->input_type = c->TypeOf("input_type"); }},
      {"value_array", "same*2 other"},  // its type, beside that of the keys' array
      {"values", "normal*3 wide ties tiny huge*0.5 special*0.5 any",
       [](Case *c, Name, Random *random) {
         LayerProblem &whole = c->whole;
         whole.query = QuickNormals(random, whole.batch * whole.n_q * whole.query_dim);
         whole.key = QuickNormals(random, whole.batch * whole.n_kv * whole.key_dim);
         whole.value = QuickNormals(random, whole.batch * whole.n_kv * whole.value_dim);
         for (std::vector<float> *x : {&whole.query, &whole.key, &whole.value}) {
           if (random->Chance(0.7))
             MakeSpecial(random, static_cast<Values>(c->NumberOf("values")), 1, x);
         }
         const bool has_types_of_its_own = !c->is_layer() && !c->has_cache();
         whole.query = Rounded(c->input_type, whole.query);
         whole.key = Rounded(has_types_of_its_own ? c->TypeOf("k_type") : c->input_type, whole.key);
         whole.value =
             Rounded(has_types_of_its_own ? c->TypeOf("v_type") : c->value_type(), whole.value);
       }},
      {"rope", "none half interleaved",
       [](Case *c, Name value, Random *random) {
         if (value == "none") return;
         LayerProblem &whole = c->whole;
         Rope rope;
         rope.is_interleaved = value == "interleaved";
         if (c->Is("rope_dims", "behind")) rope.offset = random->Between(0, whole.head_dim - 2);
         rope.dims = (whole.head_dim - rope.offset) / 2 * 2;
         if (c->Is("rope_dims", "part|behind")) rope.dims = 2 * random->Between(1, rope.dims / 2);
         rope.use_defaults =
             c->Is("rope_dims", "default|behind") && rope.offset + rope.dims == whole.head_dim;
         rope.num_positions = std::max<int64_t>(whole.n_kv, 1);
         if (c->Is("rope_positions", "counted|keys")) {
           ForEachView(*c, [&](const AttentionSizes &sizes) {
             for (int64_t b = 0; b < sizes.batch; b++) {
               const int64_t start = std::min(ShapeOf(sizes, b).q_start, whole.n_kv + 20);
               rope.num_positions = std::max(rope.num_positions, start + ValidRowsOf(sizes, b).n_q);
             }
           });
         }
         rope.table_stride =
             rope.dims / 2 + (rope.use_defaults ? 0 : random->Pick<int64_t>({0, 3}));
         rope.cos = random->Uniforms(rope.num_positions * rope.table_stride);
         rope.sin = random->Uniforms(rope.num_positions * rope.table_stride);
         if (c->Is("values", "special"))
           rope.sin[random->Below(rope.dims / 2)] = SpecialValue(random);
         MakeAny(*c, random, &rope.cos);
         MakeAny(*c, random, &rope.sin);
         whole.rope = rope;
       }},
      {"rope_dims", "all part behind default"},
      {"rope_positions", "counted queries keys both",
       [](Case *c, Name value, Random *random) {
         if (!c->whole.rope) return;
         const auto draw = [&](int64_t n, std::vector<int64_t> *positions) {
           positions->resize(static_cast<size_t>(c->whole.batch * n));
           for (int64_t &position : *positions)
             position = random->Between(0, c->whole.rope->num_positions - 1);
         };
         if (value == "queries" || value == "both") {
           std::vector<int64_t> &of_queries = c->whole.rope->q_positions;
           draw(c->whole.n_q, &of_queries);
           ForEachPaddingRow(c->whole, true,
                             [&](int64_t row) { of_queries[row] = -1; });  // not looked at
         }
         if (value == "keys" || value == "both") draw(c->whole.n_kv, &c->whole.rope->k_positions);
       }},
  };
}

// Norms.
inline std::vector<Dimension> DimensionsOfNorms() {
  return {
      {"norm", "none rms layer",
       [](Case *c, Name value, Random *random) {
         if (value == "none") return;
         LayerProblem &whole = c->whole;
         NormArrays norm;
         norm.is_layer = value == "layer";
         norm.is_of_all_heads = c->Is("norm_heads", "together");
         norm.is_after_rotation = c->Is("norm_place", "after");
         norm.is_of_values = c->Is("norm_values", "yes");
         norm.use_defaults = norm.is_of_all_heads && random->Coin();
         norm.epsilon = AnyOf(*c, random, random->Pick<float>({1e-6f, 1e-5f, 0.25f}), IsPositive);
         if (norm.is_of_all_heads || c->Is("norm_weights", "heads"))
           norm.head_stride = whole.head_dim;
         if (c->Is("norm_weights", "apart"))
           norm.head_stride = whole.head_dim + random->Between(1, 9);
         FillNormWeights(random, whole, !c->Is("norm_weights", "none|keys"),
                         !c->Is("norm_weights", "none|queries"), &norm);
         if (c->Is("values", "special") && !norm.q_weight.empty())
           norm.q_weight[0] = SpecialValue(random);
         for (std::vector<float> *x : {&norm.q_weight, &norm.k_weight, &norm.q_bias, &norm.k_bias})
           MakeAny(*c, random, x);
         whole.norm = norm;
       }},
      {"norm_heads", "each together"},
      {"norm_place", "before after"},
      {"norm_values", "no yes"},
      {"norm_weights", "none same heads apart queries keys"},

      {"context_norm", "none rms layer",
       [](Case *c, Name value, Random *random) {
         if (value == "none") return;
         LayerProblem &whole = c->whole;
         ContextNormArrays norm;
         norm.is_layer = value == "layer";
         norm.is_of_all_heads = c->Is("context_norm_heads", "together");
         norm.is_after_gate = c->Is("context_norm_place", "after");
         norm.use_defaults = norm.is_of_all_heads && random->Coin();
         norm.epsilon = AnyOf(*c, random, random->Pick<float>({1e-6f, 1e-5f, 0.25f}), IsPositive);
         if (norm.is_of_all_heads || c->Is("context_norm_weights", "heads"))
           norm.head_stride = whole.head_dim_v;
         if (c->Is("context_norm_weights", "apart"))
           norm.head_stride = whole.head_dim_v + random->Between(1, 9);
         const auto draw = [&](float around) {
           return NormWeights(random, around, whole.num_heads, whole.head_dim_v, norm.head_stride);
         };
         if (!c->Is("context_norm_weights", "none")) norm.weight = draw(1);
         if (norm.is_layer && random->Coin()) norm.bias = draw(0);
         if (c->Is("values", "special") && !norm.weight.empty())
           norm.weight[0] = SpecialValue(random);
         for (std::vector<float> *x : {&norm.weight, &norm.bias}) MakeAny(*c, random, x);
         whole.context_norm = norm;
       }},
      {"context_norm_heads", "each together"},
      {"context_norm_place", "before after"},  // the gate
      {"context_norm_weights", "none same heads apart"},
  };
}

// A number for each head.
inline void DrawOfHeads(const Case &c, Name value, Random *random, bool may_be_low, float size,
                        std::vector<float> *x) {
  if (value == "no") return;
  *x = QuickNormals(random, c.whole.num_heads, size);
  const float infinity = std::numeric_limits<float>::infinity();
  if (value == "far")
    x->front() = random->Pick<float>({may_be_low ? -infinity : 0x1p127f, 80.0f, -200.0f});
  MakeAny(c, random, x, may_be_low ? IsLow : IsFinite);
  for (float &number : *x)
    number = value == "zeros" && random->Chance(0.6) ? random->Pick({0.0f, -0.0f}) : number;
}

inline std::vector<Dimension> DimensionsOfHeads() {
#define MHA_DIMENSION(array, may_be_low, size)                              \
  {#array, "no*2 some zeros far", [](Case *c, Name value, Random *random) { \
     DrawOfHeads(*c, value, random, may_be_low, size, &ScoreOf(c).array);   \
   }},
  return {MHA_EACH_HEAD_ARRAY(MHA_DIMENSION)};
}

// What changes scores.
inline std::vector<Dimension> DimensionsOfScores() {
  return {
      {"softcap", "no yes",
       [](Case *c, Name value, Random *random) {
         if (value == "yes")
           ScoreOf(c).softcap =
               AnyOf(*c, random, random->Pick<float>({50.0f, 1.0f, 0.1f, 3e5f}), IsPositive);
       }},
      {"relative_bias", "no short long left",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         ScoreArrays &score = ScoreOf(c);
         const int64_t most = value == "short" ? 9 : 400;
         score.relative_left = random->Between(0, most);
         score.relative_right = value == "left" ? 0 : random->Between(0, most);
         const int64_t distances = score.relative_left + 1 + score.relative_right;
         if (c->Is("relative_extents", "table")) {
           score.relative_bias = QuickNormals(random, c->whole.num_heads * distances);
         } else {
           score.relative_rows = DrawPairs<float>(*c, "relative_extents", distances,
                                                  [](int64_t, int64_t) { return 0.0f; });
           score.relative_rows.columns = distances;
           std::vector<float> &values = score.relative_rows.values;
           values = QuickNormals(random, static_cast<int64_t>(values.size()));
         }
         std::vector<float> &given =
             score.relative_bias.empty() ? score.relative_rows.values : score.relative_bias;
         if (c->Is("values", "special") && !given.empty())
           given[0] = SpecialValue(random);  // an infinity or NaN
         MakeAny(*c, random, &given);
       }},
      {"relative_extents", "table row all head sequence one"},
      {"q_scales", "no yes",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         ScoreOf(c).q_scales = QuickNormals(random, c->whole.batch * c->whole.n_q);
         MakeAny(*c, random, &ScoreOf(c).q_scales);
       }},
      {"columns", "all new"},
      {"bias", "no f32 f16",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         ScoreArrays &score = ScoreOf(c);
         score.bias_is_f16 = value == "f16";
         const double masked = c->Is("bias_values", "infinite") ? random->Pick({0.1, 0.9}) : 0;
         score.bias = DrawPairs<float>(*c, "bias_extents", ColumnsOf(*c), [&](int64_t, int64_t) {
           if (random->Chance(masked)) return -std::numeric_limits<float>::infinity();
           return static_cast<float>(random->Between(-64, 64)) / 16;  // which f16 holds exactly
         });
         if (c->Is("bias_values", "special") && !score.bias.values.empty()) {
           score.bias.values[random->Below(static_cast<int64_t>(score.bias.values.size()))] =
               random->Pick({FromBits(0xffc00000u), std::numeric_limits<float>::infinity()});
         }
         MakeAny(*c, random, &score.bias.values);
         if (score.bias_is_f16) score.bias.values = Rounded(Storage::kF16, score.bias.values);
         if (c->has_own_columns()) {
           c->given_bias = score.bias;
           score.bias = OfAllKeys(*c, c->given_bias, 0.0f);
         }
       }},
      {"bias_extents", "row all head sequence one"},
      {"bias_values", "finite infinite special"},
      {"mask", "no single runs tree nothing",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         ScoreArrays &score = ScoreOf(c);
         // Runs of columns that are alike, so that whole tiles, chunks and rows are masked.
         const int64_t longest = value == "runs" ? random->Pick<int64_t>({20, 100, 600}) : 1;
         int64_t left = 0;
         uint8_t attends = 0;
         score.mask =
             DrawPairs<uint8_t>(*c, "mask_extents", ColumnsOf(*c), [&](int64_t i, int64_t j) {
               if (value == "tree" && j > i) return uint8_t{0};
               if (value == "tree" && j == i) return uint8_t{1};
               if (left-- <= 0) {
                 left = random->Between(0, longest - 1);
                 attends = random->Coin() && value != "nothing"
                               ? static_cast<uint8_t>(random->Between(1, 255))
                               : uint8_t{0};
               }
               return attends;
             });
         if (c->has_own_columns()) {
           c->given_mask = score.mask;
           score.mask = OfAllKeys(*c, c->given_mask, uint8_t{1});
         }
       }},
      {"mask_extents", "row all head sequence one"},
      {"chosen", "no*4 few many blocks odd_blocks",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         ScoreArrays &score = ScoreOf(c);
         int64_t least = std::numeric_limits<int64_t>::max();  // keys that each list may name
         ForEachView(*c, [&](const AttentionSizes &sizes) {
           for (int64_t b = 0; b < sizes.batch; b++)
             least = std::min(least, ValidRowsOf(sizes, b).n_kv);
         });
         if (value == "blocks") score.chosen_block = random->Pick<int64_t>({16, 32, 48, 64, 256});
         if (value == "odd_blocks") score.chosen_block = random->Pick<int64_t>({2, 3, 8, 20});
         const int64_t entries = (least + score.chosen_block - 1) / score.chosen_block;
         const int64_t count = random->Between(1, value == "few" ? 5 : 2 + entries);
         score.chosen = DrawPairs<int32_t>(
             *c, "chosen_extents", count, [](int64_t, int64_t) { return -1; },
             c->whole.num_kv_heads);
         for (int32_t &entry : score.chosen.values) {
           if (entries > 0 && random->Chance(0.9))
             entry = static_cast<int32_t>(random->Below(entries));
         }
         score.chosen.columns = count;
       }},
      {"chosen_extents", "row all head sequence one"},
      {"segments", "no within also",
       [](Case *c, Name value, Random *random) {
         if (value == "no") return;
         Segments &segments = ScoreOf(c).segments;
         segments.add_keys = value == "also";
         // Documents behind each other, or runs of a few numbers that come again.
         const bool ascend = c->Is("segment_numbers", "ascending");
         const int64_t longest = random->Pick<int64_t>({1, 9, 60, 300});
         const auto draw = [&](int64_t n, std::vector<int64_t> *numbers) {
           for (int64_t b = 0; b < c->whole.batch; b++) {
             for (int64_t i = 0, left = 0, number = -1; i < n; i++) {
               if (left-- <= 0) {
                 left = random->Between(0, longest);
                 number = ascend ? number + 1
                                 : random->Pick<int64_t>({-1, 0, 1, 2, INT32_MAX, INT32_MIN});
               }
               numbers->push_back(number);
             }
           }
         };
         draw(c->whole.n_q, &segments.of_queries);
         if (c->has_own_columns()) {
           draw(c->num_own_columns(), &c->given_kv_segments);
           for (int64_t b = 0; b < c->packed.count(); b++) {
             const auto first = c->given_kv_segments.begin();
             segments.of_keys.insert(segments.of_keys.end(), first,
                                     first + (c->packed.kv[b + 1] - c->packed.kv[b]));
           }
         } else if (c->Is("segments_of_keys", "given")) {
           draw(c->whole.n_kv, &segments.of_keys);
         }
         // Most queries have the number of some key, wherever that is.
         for (size_t i = 0; i < segments.of_queries.size() && !segments.of_keys.empty(); i++) {
           const int64_t b = static_cast<int64_t>(i) / c->whole.n_q,
                         column = random->Below(c->whole.n_kv);
           if (random->Chance(0.8))
             segments.of_queries[i] = segments.of_keys[b * c->whole.n_kv + column];
         }
         if (c->whole.n_kv == 0)
           segments.of_keys = c->given_kv_segments = {0};  // an array of none must be there
       }},
      {"segments_of_keys", "given queries"},
      {"segment_numbers", "ascending any"},
      {"num_columns", "null short",
       [](Case *c, Name value, Random *random) {
         if (value == "short" && c->whole.n_kv > 0)
           ScoreOf(c).num_columns = random->Between(1, c->whole.n_kv);
       }},
      {"unread",  // what nobody attends to; padding and gaps between rows are NaN always
       "ordinary nan infinite",
       [](Case *c, Name value, Random *) {
         if (value == "nan") PoisonWhatNobodyAttendsTo(c, FromBits(0xffd23456u));
         if (value == "infinite")
           PoisonWhatNobodyAttendsTo(c, std::numeric_limits<float>::infinity());
         LayerProblem &whole = c->whole;
         bool is_shared = false;
         for (const Input &input : InputsOf(*c, &whole)) {
           is_shared = input.is_shared();
           for (size_t at = 0; is_shared && at < input.x->size(); at++) {
             (*input.x)[at] = (*input.x)[input.FirstOf(static_cast<int64_t>(at))];
           }
         }
         ShareInputs(c);
         if (is_shared) return;  // padding is the same as rows that are none
         FillPadding(FromBits(0x7fc0dead), &c->whole);
       }},
  };
}

// How the call is made.
inline std::vector<Dimension> DimensionsOfCalls() {
  return {
      {"lse", "no yes",
       [](Case *c, Name value, Random *) {
         c->call.asked = value == "yes" ? kAskLse : kAskNothing;
       }},
      {"weights", "no yes",
       [](Case *c, Name value, Random *) { c->call.asked |= value == "yes" ? kAskWeights : 0; }},
      {"taps", "no rows scores all",
       [](Case *c, Name value, Random *random) {
         constexpr uint32_t rows = kAskQ | kAskK | kAskV | kAskContext;
         constexpr uint32_t scores =
             kAskScores | kAskScaledScores | kAskSoftcappedScores | kAskMaskedScores;
         const uint32_t some = static_cast<uint32_t>(random->Next());
         c->call.asked |= value == "all"      ? rows | scores
                          : value == "rows"   ? rows & some
                          : value == "scores" ? scores & some
                                              : 0;
         if (c->reads()) c->call.asked &= ~(kAskK | kAskV);
       }},
      {"output_type", "f32 f16 bf16",
       [](Case *c, Name, Random *) { c->call.output_array = c->TypeOf("output_type"); }},
      {"inputs",
       // The last three: the same for all sequences, rows or heads.
       "contiguous gaps heads_outside rows_outside repeated one_row*0.5 one_head*0.5",
       [](Case *c, Name value, Random *) {
         c->inputs = value == "gaps"            ? kGaps
                     : value == "heads_outside" ? kHeadsOutside
                     : value == "rows_outside"  ? kRowsOutside
                                                : kDense;
       }},
      {"outputs", "contiguous gaps heads_outside rows_outside",
       [](Case *c, Name value, Random *) {
         c->outputs = value == "gaps"            ? kGaps
                      : value == "heads_outside" ? kHeadsOutside
                      : value == "rows_outside"  ? kRowsOutside
                                                 : kDense;
       }},
      {"in_place", "no*3 yes"},         // the output is the query
      {"empty_structs", "null given"},  // of sequences, scores and outputs
      {"threads", "none*2 one few many real*0.1",
       [](Case *c, Name value, Random *random) {
         const uint32_t count = value == "one"    ? 1
                                : value == "many" ? 40
                                                  : static_cast<uint32_t>(random->Between(2, 4));
         if (value != "none")
           c->scheduler =
               std::make_unique<Scheduler>(count, value == "real" ? RunOnThreads : RunBackwards);
       }},
      {"memory",  // next to which an access faults
       "anywhere*3 before_guard*0.5 after_guard*0.5",
       [](Case *c, Name value, Random *random) {
         c->call.place = value == "anywhere"       ? Place::kAnywhere
                         : value == "before_guard" ? Place::kBeforeGuard
                                                   : Place::kAfterGuard;
         c->call.workspace_fill = random->Pick({0xff, 0x00, 0x7f});
         c->call.workspace_misalignment = static_cast<size_t>(random->Between(0, 63));
       }},
  };
}

inline const std::vector<Dimension> &Dimensions() {
  static const std::vector<Dimension> kDimensions = [] {
    std::vector<Dimension> all;
    for (const auto part : {DimensionsOfSizes, DimensionsOfVisibility, DimensionsOfCaches,
                            DimensionsOfLayers, DimensionsOfInputs, DimensionsOfNorms,
                            DimensionsOfHeads, DimensionsOfScores, DimensionsOfCalls}) {
      for (Dimension &dimension : part()) all.push_back(std::move(dimension));
    }
    return all;
  }();
  return kDimensions;
}

// What the library refuses. A test makes each such call: a line too wide would hide what it allows.
inline std::vector<std::string> RefusedByTheLibrary() {
  std::vector<std::string> refusals = {
      "cache=none k_type=int8",
      "attention_arithmetic=int16 cache=!none k_type=!int8",
      "attention_arithmetic=int16 cache=!none cache_values=own v_type=!int8|int4",
      "cache_values=in_keys entry=!attention cache_read=no",
      "cache_values=in_keys norm=!none norm_values=yes",
      "cache=none v_type=!f32|f16|bf16",
      "q_start=far rope=!none rope_positions=counted|keys",  // beyond the tables
      "q_start=before|far_before rope=!none rope_positions=counted|keys causal=no",
      "q_start=before|far_before rope=!none rope_positions=counted|keys segments=also",
      "kv_start=yes cache_read=yes",
      "context_norm=!none entry=attention",
      "context_norm=!none w_o=no",
      "sgemm=yes weight_type=!f32",
      "sgemm=yes inputs=one_row",
      "arithmetic=int8|int16 weight_type=!int8|int4",
      "arithmetic=bf16 weight_type=!bf16",
      // Outputs per pair are computed from the queries once more
      "in_place=yes entry=attention weights=yes",
      "in_place=yes entry=attention taps=all",
      "chosen=!no weights=yes",
      "chosen=!no taps=all",
      "chosen=!no segments=!no",
      // A ring holds the keys of a window
      "cache=ring causal=no",
      "cache=ring window_left=no",
      "cache=ring q_start=!null",
      "cache=ring weights=yes",
      "cache=ring taps=all",
      "cache=ring columns=all mask=!no",
      "cache=ring columns=all bias=!no",
  };
  for (const std::string refusal :
       {"entry=self|value cache_read=no cache=!none q_start=beyond|far|before|far_before",
        "n_kv=none cache=none q_start=null"}) {
    for (const std::string &counts : PositionsCount()) refusals.push_back(refusal + " " + counts);
  }
  return refusals;
}

// What means nothing, or what the cases cannot say.
inline std::vector<std::string> WithoutMeaning() {
  std::vector<std::string> refusals = {
      // Which keys there are
      "entry=attention|self widths=different",
      "entry=self|value cache_read=no n_kv=!queries",
      "entry=self|value cache_read=no kv_lengths=!queries",
      "cache_read=yes n_kv=!none",
      "kv_lengths=queries n_kv=!queries",
      "kv_lengths=!no n_kv=none",
      "past=none past_by=append",
      "cache=!ring ring=roomy",
      "cache_values=in_keys v_type=!f32",
      "cache_values=in_keys entry=!attention cache_read=yes past_by=call",  // as a layer cannot
                                                                            // append
      "cache=none entry=!attention k_type=!f32",
      "cache=none entry=!attention v_type=!f32",
      // Positions
      "entry=self|value cache=!none cache_read=no q_start=first|within",  // unless they are right
      "norm_heads=together norm_weights=apart",
      "context_norm_heads=together context_norm_weights=apart",
      "kv_start=yes cache=!none calls=!one",
      "kv_start=yes entry=self|value cache_read=no",  // where q_first says it
      "inputs=repeated packed=yes",
      "inputs=one_head entry=!attention",
      // An output that is the query has its type, its widths and its strides
      "in_place=yes entry=attention head_dim_v=other",
      "in_place=yes entry=attention taps=scores",  // of which some may be none
      "in_place=yes entry=!attention w_o=no",
      "in_place=yes input_type=f32 output_type=!f32",
      "in_place=yes input_type=f16 output_type=!f16",
      "in_place=yes input_type=bf16 output_type=!bf16",
      "in_place=yes inputs=contiguous outputs=!contiguous",
      "in_place=yes inputs=gaps outputs=!gaps",
      "in_place=yes inputs=heads_outside outputs=!heads_outside",
      "in_place=yes inputs=rows_outside outputs=!rows_outside",
      "in_place=yes inputs=gaps input_type=!f32",  // of which Results() takes what it finds in gaps
      "packed=yes cache=!none past_by=append",     // as it is always then
      "packed=yes cache=!none num_columns=short",  // of positions, which the whole has in several
                                                   // places
      "packed=yes n_kv=none cache_read=no",
      // Several calls: each has the keys that its rows attend to
      "calls=!one cache=none entry=self|value",
      "calls=!one cache=!none n_kv=queries kv_lengths=!queries",
      "calls=!one cache=!none n_kv=queries causal=no",
      "calls=!one cache=!none n_kv=queries q_start=within|beyond|far|before|far_before",
      "calls=!one cache=ring n_kv=!queries",
      "cache=ring taps=scores",  // of which some may be none
      // Masks and biases
      "columns=new n_kv=none",
      "columns=new mask=no bias=no",
      "relative_bias=no relative_extents=!table",
      "mask=no mask_extents=!row",
      "chosen=no chosen_extents=!row",
      "chosen=!no taps=scores",                          // of which some may be none
      "chosen=!no calls=!one cache=!none n_kv=queries",  // later keys would not be there yet
      // Segments
      "segments=also calls=!one cache=!none n_kv=queries",  // later keys would not be there yet
      "num_columns=short segments=no mask=no bias=no",
      // The layer
      "weight_form=fused widths=different",
      "weights_given=stored weight_type=int4 weight_layout=in_out",
  };
  // One value, and those that it cannot stand with
  const std::pair<std::string, const char *> with_one[] = {
      {"cache=none", "cache_read=yes past=!none cache_values=in_keys value_array=other"},
      {"value_array=other", "entry=!attention cache_read=yes cache_values=in_keys"},
      {"rope=none", "rope_dims=!all rope_positions=!counted"},
      {"norm=none", "norm_heads=!each norm_place=!before norm_values=!no norm_weights=!none"},
      {"context_norm=none",
       "context_norm_heads=together context_norm_place=after context_norm_weights=!none"},
      {"gate=no", "gate_dim=single gate_in_q=yes"},
      {"bias=no", "bias_extents=!row bias_values=!finite"},
      {"segments=no", "segments_of_keys=!given segment_numbers=!ascending"},
      {"num_columns=short", "columns=new n_kv=none"},
      {"inputs=repeated|one_row|one_head", "cache=!none unread=!ordinary in_place=yes"},
      {"packed=yes",
       "batch=!1 calls=!one q_lengths=!no kv_lengths=ragged|empty q_first=!no kv_start=yes"},
      {"segments=!no", "cache=ring columns=new n_kv=none"},
      {"segments_of_keys=queries", "cache=!none n_kv=!queries calls=!one"},
      {"entry=attention",
       "weight_type=!f32 weights_given=stored arithmetic=!f32 sgemm=yes weight_form=!three "
       "weight_layout=!in_out weight_strides=!contiguous layer_defaults=!written w_o=!yes "
       "biases=!no gate=!no kv_weights=none"},
      {"weights_given=stored", "weight_type=f32 biases=fused layer_defaults=left_out"},
      {"kv_weights=none", "cache_read=no past_by=append weight_form=fused biases=fused"},
  };
  for (const auto &[one, others] : with_one) {
    for (const std::string &other : WordsOf(others)) refusals.push_back(one + " " + other);
  }
  return refusals;
}

// Every combination that has no case, except one of those that the library refuses.
inline std::vector<std::string> Refusals(const std::string &left_out = "") {
  std::vector<std::string> all = WithoutMeaning();
  for (const std::string &refusal : RefusedByTheLibrary()) {
    if (refusal != left_out) all.push_back(refusal);
  }
  return all;
}

inline Space SpaceWith(const std::vector<std::string> &refusals) {
  std::vector<Space::Axis> axes;
  for (const Dimension &dimension : Dimensions()) {
    axes.push_back({dimension.name, {}});
    for (const std::string &word : WordsOf(dimension.values)) {
      const size_t star = word.find('*');
      const double weight = star == std::string::npos ? 1 : std::stod(word.substr(star + 1));
      axes.back().values.push_back({word.substr(0, star), weight});
    }
  }
  return Space(std::move(axes), refusals);
}

inline const Space &OptionSpace() {
  static const Space space = SpaceWith(Refusals());
  return space;
}

inline Case MakeCase(const Choice &choice, uint64_t seed) {
  Case c(OptionSpace(), choice);
  for (const Dimension &dimension : Dimensions()) {
    uint64_t own = seed + 1;
    for (const char letter : dimension.name)
      own = own * 1099511628211u + static_cast<unsigned char>(letter);
    Random random(own);
    if (dimension.apply) dimension.apply(&c, c.ValueOf(dimension.name), &random);
  }
  return c;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_GENERATED_OPTIONS_H
