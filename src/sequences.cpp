#include "sequences.h"

#include <algorithm>

#include "storage.h"
#include "structs.h"

namespace mha {
namespace {

constexpr int64_t min_position =
    -(int64_t{1} << 62);  // so that differences of positions are no overflow

int64_t sum(int64_t a, int64_t b) {
  return a > INT64_MAX - b ? INT64_MAX : a + b;
}  // b is not negative

// Where the sequences are packed: null if no keys come with the call.
const int64_t *packed_keys_of(const SequenceArguments &s) {
  if (s.n_kv == 0) return nullptr;
  return s.is_self || !s.given.cu_seqlens_kv ? s.given.cu_seqlens_q : s.given.cu_seqlens_kv;
}

// Valid rows, and the first of them in the arrays.
int64_t first_query(const SequenceArguments &s, int64_t b) {
  if (s.is_packed()) return s.given.cu_seqlens_q[b];
  return s.given.q_first_rows ? s.given.q_first_rows[b] : 0;
}
int64_t first_key(const SequenceArguments &s, int64_t b) {
  if (s.is_self) return first_query(s, b);
  if (s.is_packed()) return packed_keys_of(s) ? packed_keys_of(s)[b] : 0;
  return s.given.kv_first_rows ? s.given.kv_first_rows[b] : 0;
}
int64_t queries_of(const SequenceArguments &s, int64_t b) {
  if (s.is_packed()) return s.given.cu_seqlens_q[b + 1] - s.given.cu_seqlens_q[b];
  return s.given.q_lengths ? s.given.q_lengths[b] : s.n_q - first_query(s, b);
}
int64_t keys_of(const SequenceArguments &s, int64_t b) {
  if (s.is_self) return queries_of(s, b);
  if (s.is_packed()) return packed_keys_of(s) ? packed_keys_of(s)[b + 1] - packed_keys_of(s)[b] : 0;
  return s.given.kv_lengths ? s.given.kv_lengths[b] : s.n_kv - first_key(s, b);
}

int64_t in_cache(const SequenceArguments &s, int64_t b) {
  return s.given.cache_sequences ? s.given.cache_sequences[b] : b;
}
int64_t past_of(const SequenceArguments &s, int64_t b) {
  return s.cache ? state_of(s.cache, in_cache(s, b)).length : 0;
}

// Of the first n_kv keys of a sequence, those that are not masked for want of a column.
int64_t keys_with_columns(const SequenceArguments &s, int64_t b, int64_t n_kv) {
  const int64_t row = first_key(s, b), past = past_of(s, b);
  int64_t end = s.num_columns;
  if (s.has_new_columns) {
    end = sum(past, end > row ? end - row : 0);  // no column is needed before
  } else if (!s.cache) {
    end = end > row ? end - row : 0;
  }
  return std::min(n_kv, end);
}

// Whether it matters at which position a query stands.
bool has_positions(const SequenceArguments &s) {
  return s.is_causal() || s.has_window() || s.distances ||
         (s.has_rope() && !s.given.rope_q_positions);
}

// Position of the first query, from the first key on; 0, and q_first_positions is not looked at,
// where it does not matter.
int64_t start_of(const SequenceArguments &s, int64_t b) {
  if (!has_positions(s)) return 0;
  const int64_t *const first = s.given.q_first_positions;
  if (first)
    return first[b] < INT64_MIN + s.kv_first_position ? INT64_MIN : first[b] - s.kv_first_position;
  return past_of(s, b) + keys_of(s, b) - queries_of(s, b);
}

// The largest of a number of each sequence.
template <class Number>
int64_t most_of(const SequenceArguments &s, const Number &number) {
  int64_t most = 0;
  for (int64_t b = 0; b < s.batch; ++b) most = std::max(most, number(b));
  return most;
}

// ---- Checks without arrays

mha_status check_flags(Report report, const SequenceArguments &s) {
  constexpr uint32_t known_flags =
      MHA_CAUSAL | MHA_WINDOW_LEFT | MHA_WINDOW_RIGHT | MHA_EQUAL_SCORES;
  if (s.flags & ~known_flags)
    return report.invalid(
        "flags has the unknown bits 0x%x; set only MHA_CAUSAL, MHA_WINDOW_LEFT, MHA_WINDOW_RIGHT "
        "and MHA_EQUAL_SCORES",
        s.flags & ~known_flags);
  const struct {
    const char *name, *flag;
    int64_t value;
    bool is_set;
  } windows[] = {
      {"window_left", "MHA_WINDOW_LEFT", s.window_left, s.has_left()},
      {"window_right", "MHA_WINDOW_RIGHT", s.window_right, (s.flags & MHA_WINDOW_RIGHT) != 0}};
  for (const auto &window : windows) {
    if (window.value < 0) {
      return report.invalid("%s is %lld; it must be at least 0. Leave out the flag %s for no limit",
                            window.name, lld(window.value), window.flag);
    }
    if (!window.is_set && window.value != 0)
      return report.invalid("%s is %lld, but flags lacks %s; set the flag, or set %s to 0",
                            window.name, lld(window.value), window.flag, window.name);
  }
  return MHA_OK;
}

mha_status check_rope(Report report, SequenceArguments *s, int64_t head_dim) {
  if (!s->has_rope()) return MHA_OK;
  mha_rope &rope = s->rope;
  if (const mha_status status = read_struct(report, "mha_rope", s->given_rope, &rope))
    return status;
  if (rope.reserved != 0) return report.invalid("rope.reserved is not 0; set it to 0");
  if (rope.style > MHA_ROPE_INTERLEAVED)
    return report.invalid(
        "rope.style is %u; set it to MHA_ROPE_HALF (0) or MHA_ROPE_INTERLEAVED (1)", rope.style);
  if (rope.offset < 0 || rope.offset >= head_dim)
    return report.invalid("rope.offset is %lld; it must be at least 0 and less than head_dim, %lld",
                          lld(rope.offset), lld(head_dim));
  if (rope.dims == 0) rope.dims = head_dim - rope.offset;
  if (rope.dims < 0 || rope.dims > head_dim - rope.offset || rope.dims % 2 != 0) {
    return report.invalid(
        "rope.dims is %lld; it must be even and at most head_dim - offset = %lld - %lld",
        lld(rope.dims), lld(head_dim), lld(rope.offset));
  }
  if (!rope.cos || !rope.sin)
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "rope.%s is NULL; pass a table, such as mha_rope_tables fills",
                       rope.cos ? "sin" : "cos");
  if (rope.num_positions < 1)
    return report.invalid("rope.num_positions is %lld; set it to the number of rows of the tables",
                          lld(rope.num_positions));
  if (rope.table_stride == 0) rope.table_stride = rope.dims / 2;
  if (rope.table_stride < rope.dims / 2) {
    return report.invalid(
        "rope.table_stride is %lld, less than the width of a row, dims / 2 = %lld; set it to at "
        "least that, or to 0 for contiguous",
        lld(rope.table_stride), lld(rope.dims / 2));
  }
  if ((Count(rope.num_positions) * Count(rope.table_stride) * Count(sizeof(float))).overflows())
    return report.fail(
        MHA_ERROR_TOO_LARGE,
        "the tables of rope would exceed the address space; set a smaller table_stride");
  return MHA_OK;
}

mha_status check_cache_fits(Report report, const SequenceArguments &s, int64_t num_kv_heads,
                            int64_t head_dim, int64_t head_dim_v) {
  const mha_kv_cache *const cache = s.cache;
  if (!cache) return MHA_OK;
  const struct {
    const char *name;
    int64_t own, of_call;
  } sizes[] = {{"num_kv_heads", cache->num_kv_heads, num_kv_heads},
               {"head_dim", cache->head_dim, head_dim},
               {"head_dim_v", cache->head_dim_v, head_dim_v}};
  for (const auto &size : sizes) {
    if (size.own != size.of_call) {
      return report.fail(
          MHA_ERROR_SHAPE,
          "the cache has %s %lld, but this call has %lld; use a cache made for this shape",
          size.name, lld(size.own), lld(size.of_call));
    }
  }
  if (!s.given.cache_sequences && s.batch > cache->num_sequences) {
    return report.fail(
        MHA_ERROR_SHAPE,
        "the call has %lld sequences, but the cache has num_sequences %lld; use a larger cache",
        lld(s.batch), lld(cache->num_sequences));
  }
  if (!s.is_ring()) return MHA_OK;
  if (!s.is_causal() || !s.has_left())
    return report.invalid("flags lacks %s, which a ring needs; set it",
                          s.is_causal() ? "MHA_WINDOW_LEFT" : "MHA_CAUSAL");
  if (s.given.q_first_positions)
    return report.invalid(
        "sequences.q_first_positions is given, but the cache is a ring; set it to NULL");
  if (s.window_left >= cache->capacity) {
    return report.fail(MHA_ERROR_SHAPE,
                       "window_left is %lld, but the ring has a capacity of %lld; set it to at "
                       "most %lld, or use a larger ring",
                       lld(s.window_left), lld(cache->capacity), lld(cache->capacity - 1));
  }
  if (!s.is_self && !s.is_packed() && s.n_kv > s.rows_per_pass() && s.n_q != s.n_kv) {
    return report.fail(MHA_ERROR_SHAPE,
                       "n_q %lld and n_kv %lld differ, but the ring takes more than capacity - "
                       "window_left = %lld rows at once only if they are equal",
                       lld(s.n_q), lld(s.n_kv), lld(s.rows_per_pass()));
  }
  return MHA_OK;
}

// What packed sequences go with.
mha_status check_packing(Report report, const SequenceArguments &s) {
  const mha_sequences &given = s.given;
  if (!s.is_packed()) {
    if (!given.cu_seqlens_kv) return MHA_OK;
    return report.invalid(
        "sequences.cu_seqlens_kv is given without cu_seqlens_q; give both, or leave both NULL");
  }
  const char *const other = given.q_lengths       ? "q_lengths"
                            : given.kv_lengths    ? "kv_lengths"
                            : given.q_first_rows  ? "q_first_rows"
                            : given.kv_first_rows ? "kv_first_rows"
                                                  : nullptr;
  if (other)
    return report.invalid(
        "sequences.%s is given beside cu_seqlens_q, which says which rows are valid; leave it NULL",
        other);
  if (!s.is_self && !given.cu_seqlens_kv && s.n_kv > 0 && s.n_kv != s.n_q) {
    return report.fail(MHA_ERROR_SHAPE,
                       "sequences.cu_seqlens_kv is NULL, but n_kv %lld is not n_q %lld; give it",
                       lld(s.n_kv), lld(s.n_q));
  }
  return MHA_OK;
}

// ---- Checks of arrays

// Valid rows within those of the array. rows_name: of `rows`.
mha_status check_rows(Report report, const char *prefix, const int64_t *lengths,
                      const int64_t *first_rows, int64_t batch, const char *rows_name,
                      int64_t rows) {
  const struct {
    const char *name;
    const int64_t *numbers;
  } arrays[] = {{"lengths", lengths}, {"first_rows", first_rows}};
  for (const auto &array : arrays) {
    for (int64_t b = 0; array.numbers && b < batch; ++b) {
      if (array.numbers[b] >= 0 && array.numbers[b] <= rows) continue;
      return report.invalid("sequences.%s_%s[%lld] is %lld; it must be 0 to %s, %lld", prefix,
                            array.name, lld(b), lld(array.numbers[b]), rows_name, lld(rows));
    }
  }
  for (int64_t b = 0; lengths && first_rows && b < batch; ++b) {
    if (lengths[b] <= rows - first_rows[b]) continue;
    return report.fail(MHA_ERROR_SHAPE,
                       "sequences.%s_first_rows[%lld] is %lld and its length %lld, but there are "
                       "only %s = %lld rows",
                       prefix, lld(b), lld(first_rows[b]), lld(lengths[b]), rows_name, lld(rows));
  }
  return MHA_OK;
}

// The first rows of packed sequences: they ascend from 0 to the number of rows.
mha_status check_packed(Report report, const char *name, const int64_t *starts, int64_t batch,
                        const char *rows_name, int64_t rows) {
  if (!starts) return MHA_OK;
  if (starts[0] != 0)
    return report.invalid("sequences.%s[0] is %lld; it must be 0", name, lld(starts[0]));
  for (int64_t b = 1; b <= batch; ++b) {
    if (starts[b] < starts[b - 1]) {
      return report.invalid(
          "sequences.%s[%lld] is %lld, less than %lld before it; the numbers must ascend", name,
          lld(b), lld(starts[b]), lld(starts[b - 1]));
    }
  }
  if (starts[batch] == rows) return MHA_OK;
  return report.fail(MHA_ERROR_SHAPE,
                     "sequences.%s[%lld] is %lld, the end of the last sequence; it must be %s, "
                     "%lld. Check count, too",
                     name, lld(batch), lld(starts[batch]), rows_name, lld(rows));
}

// That cache_sequences has each at most once. If they do not ascend, they are gone through for
// 32768 of the cache's sequences at a time, with a bit for each on the stack: there is no memory
// for more, and other calls may read the cache meanwhile.
mha_status check_cache_sequences(Report report, const SequenceArguments &s) {
  const int64_t *const sequences = s.given.cache_sequences;
  bool ascend = true;
  for (int64_t b = 0; b < s.batch; ++b) {
    if (sequences[b] < 0 || sequences[b] >= s.cache->num_sequences) {
      return report.invalid(
          "sequences.cache_sequences[%lld] is %lld; it must be 0 to %lld, a sequence of the cache",
          lld(b), lld(sequences[b]), lld(s.cache->num_sequences - 1));
    }
    ascend = ascend && (b == 0 || sequences[b - 1] < sequences[b]);
  }
  constexpr int64_t at_once = 1 << 15;
  for (int64_t first = 0, next; !ascend && first < s.cache->num_sequences; first = next) {
    uint64_t seen[at_once / 64] = {};
    next = INT64_MAX;
    for (int64_t b = 0; b < s.batch; ++b) {
      const int64_t at = sequences[b] - first;
      if (at < 0) continue;
      if (at >= at_once) {
        next = std::min(next, sequences[b]);
        continue;
      }
      const uint64_t bit = uint64_t{1} << at % 64;
      if (seen[at / 64] & bit) {
        return report.invalid(
            "sequences.cache_sequences[%lld] and [%lld] are both %lld; a call uses each sequence "
            "at most once",
            lld(std::find(sequences, sequences + b, sequences[b]) - sequences), lld(b),
            lld(sequences[b]));
      }
      seen[at / 64] |= bit;
    }
  }
  return MHA_OK;
}

// That a ring still holds all that the rows attend to, in each pass.
mha_status check_ring(Report report, const SequenceArguments &s, int64_t b) {
  const int64_t sequence = in_cache(s, b), past = past_of(s, b), rows = keys_of(s, b),
                queries = queries_of(s, b), start = start_of(s, b);
  if (queries == 0) return MHA_OK;
  if (rows > s.rows_per_pass() && rows != queries) {
    return report.fail(MHA_ERROR_SHAPE,
                       "the numbers of queries and keys of sequence %lld, %lld and %lld, differ, "
                       "but a ring takes more rows than it keeps"
                       " only if they are equal",
                       lld(b), lld(queries), lld(rows));
  }
  const int64_t needed = start > s.window_left ? start - s.window_left : 0;
  const int64_t oldest =
      oldest_position(s.cache, sequence, past + std::min(rows, s.rows_per_pass()));
  if (needed < oldest) {
    return report.fail(MHA_ERROR_SHAPE,
                       "the window of sequence %lld begins at position %lld, but the ring holds "
                       "positions from %lld on; use a larger capacity",
                       lld(b), lld(needed), lld(oldest));
  }
  return MHA_OK;
}

// The largest position of a row has to have its line in the tables.
mha_status check_rope_positions(Report report, const SequenceArguments &s, int64_t b,
                                bool of_keys) {
  const int64_t *const given = of_keys ? s.given.rope_k_positions : s.given.rope_q_positions;
  const int64_t rows = of_keys ? keys_of(s, b) : queries_of(s, b),
                stride = of_keys && !s.is_self ? s.n_kv : s.n_q;
  const int64_t first_row =
      (s.is_packed() ? 0 : b * stride) + (of_keys ? first_key(s, b) : first_query(s, b));
  const int64_t first = sum(of_keys ? past_of(s, b) : start_of(s, b), s.kv_first_position);
  const char *const name = of_keys ? "k" : "q";
  for (int64_t i = 0; given && i < rows; ++i) {
    const int64_t at = first_row + i;
    if (given[at] < 0 || given[at] >= s.rope.num_positions) {
      return report.invalid(
          "sequences.rope_%s_positions[%lld] is %lld; it must be 0 to %lld, the last row of the "
          "tables",
          name, lld(at), lld(given[at]), lld(s.rope.num_positions - 1));
    }
  }
  if (!given && rows > 0 && first < 0 && (!s.is_causal() || s.adds_keys)) {
    return report.invalid(
        "the queries of sequence %lld begin at position %lld, which the tables of rope do not "
        "have; set MHA_CAUSAL without"
        " MHA_GROUPS_ALSO, so that they attend to nothing, or give sequences.rope_q_positions",
        lld(b), lld(first));
  }
  if (!given && rows > 0 && sum(first, rows) > s.rope.num_positions) {
    return report.invalid(
        "the %s of sequence %lld reach position %lld, but rope.num_positions is %lld; make the "
        "tables longer",
        of_keys ? "keys" : "queries", lld(b), lld(sum(first, rows) - 1), lld(s.rope.num_positions));
  }
  return MHA_OK;
}

}  // namespace

mha_status read_sequences(Report report, const CallArguments &args, bool is_self,
                          SequenceArguments *sequences) {
  SequenceArguments &s = *sequences;
  s.batch = s.array_batch = args.batch;
  s.n_q = args.n_q;
  s.n_kv = args.n_kv;
  s.is_self = is_self;
  s.flags = args.flags;
  s.window_left = args.window_left;
  s.window_right = args.window_right;
  s.kv_first_position = 0;
  s.given = {};
  s.cache = args.cache_read ? args.cache_read : args.cache;
  s.growing = args.cache;
  s.distances = nullptr;
  s.adds_keys = s.has_new_columns = false;
  s.num_columns = INT64_MAX;
  s.given_rope = args.rope;
  if (!args.sequences) return MHA_OK;
  mha_sequences &given = s.given;
  if (const mha_status status = read_struct(report, "mha_sequences", args.sequences, &given))
    return status;
  if (!s.cache) given.cache_sequences = nullptr;
  const struct {
    const char *name;
    const void *array;
  } of_keys[] = {{"kv_lengths", given.kv_lengths},
                 {"kv_first_rows", given.kv_first_rows},
                 {"cu_seqlens_kv", given.cu_seqlens_kv}};
  for (const auto &array : of_keys) {
    if (!array.array || !(is_self || args.cache_read)) continue;
    return report.invalid(
        "sequences.%s is given, but %s; leave it NULL", array.name,
        is_self ? "the keys are the rows of query" : "no keys come with cache_read");
  }
  if (given.count < 0)
    return report.invalid("sequences.count is %lld; set it to the number of sequences",
                          lld(given.count));
  if (s.is_packed()) {
    if (args.batch > 1) {
      return report.fail(MHA_ERROR_SHAPE,
                         "batch is %lld, but packed sequences are one batch of rows; set it to 1, "
                         "and their number in"
                         " sequences.count",
                         lld(args.batch));
    }
    if (given.count == 0 && args.batch > 0 && args.n_q > 0)
      return report.invalid(
          "sequences.count is 0; with cu_seqlens_q, set it to the number of sequences");
    if (args.batch > 0) s.batch = given.count;
  } else if (given.count != 0 && given.count != args.batch) {
    return report.fail(
        MHA_ERROR_SHAPE,
        "sequences.count is %lld, but batch is %lld; set it to batch or 0, or give cu_seqlens_q",
        lld(given.count), lld(args.batch));
  }
  return check_packing(report, s);
}

mha_status check_sequences(Report report, SequenceArguments *sequences, int64_t num_kv_heads,
                           int64_t head_dim, int64_t head_dim_v) {
  const SequenceArguments &s = *sequences;
  if (const mha_status status = check_flags(report, s)) return status;
  if (const mha_status status = check_rope(report, sequences, head_dim)) return status;
  if (const mha_status status = check_cache_fits(report, s, num_kv_heads, head_dim, head_dim_v))
    return status;
  const bool knows_counts = !s.given.q_first_positions && !s.is_ragged() && !s.cache;
  if (knows_counts && s.n_q > s.n_kv && has_positions(s)) {
    return report.fail(MHA_ERROR_SHAPE,
                       "n_q %lld is more than n_kv %lld, so that with %s queries would be before "
                       "the first key; give"
                       " sequences.q_first_positions",
                       lld(s.n_q), lld(s.n_kv),
                       s.is_causal()    ? "MHA_CAUSAL"
                       : s.has_window() ? "a window"
                       : s.distances    ? s.distances
                                        : "rope");
  }
  return MHA_OK;
}

mha_status check_sequence_arrays(Report report, const SequenceArguments &s) {
  const mha_sequences &given = s.given;
  const bool is_plain = !given.q_first_positions && !s.is_ragged() && !s.cache && !s.has_rope();
  if (is_plain) return MHA_OK;
  if (const mha_status status =
          check_packed(report, "cu_seqlens_q", given.cu_seqlens_q, s.batch, "n_q", s.n_q))
    return status;
  if (const mha_status status =
          check_packed(report, "cu_seqlens_kv", given.cu_seqlens_kv, s.batch, "n_kv", s.n_kv))
    return status;
  if (const mha_status status =
          check_rows(report, "q", given.q_lengths, given.q_first_rows, s.batch, "n_q", s.n_q))
    return status;
  if (const mha_status status =
          check_rows(report, "kv", given.kv_lengths, given.kv_first_rows, s.batch, "n_kv", s.n_kv))
    return status;
  const bool has_rope_positions =
      s.has_rope() && (given.rope_q_positions || given.rope_k_positions);
  const bool are_alike =
      !given.q_first_positions && !s.is_ragged() && !s.cache && !has_rope_positions;
  if (given.cache_sequences) {
    if (const mha_status status = check_cache_sequences(report, s)) return status;
  }
  for (int64_t b = 0; b < s.batch && !(are_alike && b > 0); ++b) {
    if (s.growing) {
      if (const mha_status status = check_append(report, s.cache, in_cache(s, b), keys_of(s, b)))
        return status;
    }
    if (s.growing && given.q_first_positions && s.is_self && has_positions(s) &&
        queries_of(s, b) > 0 && given.q_first_positions[b] != past_of(s, b)) {
      return report.invalid(
          "sequences.q_first_positions[%lld] is %lld, but self-attention appends the rows at "
          "position %lld; leave it NULL",
          lld(b), lld(given.q_first_positions[b]), lld(past_of(s, b)));
    }
    if (start_of(s, b) < min_position) {
      return report.invalid(
          "sequences.q_first_positions[%lld] is %lld; it must be at least %s-2^62", lld(b),
          lld(given.q_first_positions[b]), s.kv_first_position != 0 ? "kv_first_position " : "");
    }
    if (start_of(s, b) < 0 && !given.q_first_positions && !given.kv_first_rows) {
      return report.fail(MHA_ERROR_SHAPE,
                         "sequence %lld has more queries, %lld, than keys, %lld, so that some "
                         "would be before the first key; give"
                         " sequences.q_first_positions",
                         lld(b), lld(queries_of(s, b)), lld(past_of(s, b) + keys_of(s, b)));
    }
    if (s.is_ring()) {
      if (const mha_status status = check_ring(report, s, b)) return status;
    }
    for (int of_keys = 0; s.has_rope() && of_keys < 2; ++of_keys) {
      if (const mha_status status = check_rope_positions(report, s, b, of_keys != 0)) return status;
    }
  }
  return MHA_OK;
}

mha_status check_chosen_entries(Report report, const SequenceArguments &s,
                                const Attention &attention) {
  const ChosenKeys &chosen = attention.options.chosen;
  if (!chosen.lists.base) return MHA_OK;
  const int64_t heads = chosen.lists.head_stride != 0 ? attention.num_kv_heads : 1;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t in_arrays = s.is_packed() ? 0 : b,
                  entries = blocks_of(past_of(s, b) + keys_of(s, b), chosen.block);
    for (int64_t at = 0; at < heads * queries_of(s, b); ++at) {
      const int64_t head = at / queries_of(s, b), row = first_query(s, b) + at % queries_of(s, b);
      const int32_t *const list = static_cast<const int32_t *>(chosen.lists.base) +
                                  in_arrays * chosen.lists.batch_stride +
                                  head * chosen.lists.head_stride + row * chosen.lists.row_stride;
      const auto is_wrong = [entries](int32_t entry) { return entry < -1 || entry >= entries; };
      const int64_t wrong = std::find_if(list, list + chosen.count, is_wrong) - list;
      if (wrong == chosen.count) continue;
      if (entries == 0) {
        return report.invalid(
            "score_arrays.chosen_keys[%lld, %lld, %lld, %lld] (sequence, kv head, row, entry) is "
            "%d; it must be -1, as the sequence has no "
            "keys",
            lld(in_arrays), lld(head), lld(row), lld(wrong), list[wrong]);
      }
      return report.invalid(
          "score_arrays.chosen_keys[%lld, %lld, %lld, %lld] (sequence, kv head, row, entry) is %d; "
          "it must be less than %lld, or -1 for "
          "unused",
          lld(in_arrays), lld(head), lld(row), lld(wrong), list[wrong], lld(entries));
    }
  }
  return MHA_OK;
}

int64_t max_keys(const SequenceArguments &s) {
  if (!s.cache) return s.n_kv;
  return s.is_ring() ? sum(s.cache->capacity, 2 * chunk_keys) : s.cache->capacity;
}

int64_t longest_keys(const SequenceArguments &s) {
  if (!s.cache && !s.is_packed()) return s.n_kv;
  return most_of(s, [&](int64_t b) { return past_of(s, b) + keys_of(s, b); });
}

int64_t pair_columns(const SequenceArguments &s) { return s.cache ? longest_keys(s) : s.n_kv; }

int64_t longest_queries(const SequenceArguments &s) {
  if (!s.is_packed()) return s.n_q;
  return most_of(s, [&](int64_t b) { return queries_of(s, b); });
}

int64_t longest_rows(const SequenceArguments &s) {
  if (!s.is_packed()) return std::max(s.n_q, s.n_kv);
  return most_of(s, [&](int64_t b) { return std::max(queries_of(s, b), keys_of(s, b)); });
}

// Sequence b, with `before` rows of keys before it, begins with block before / 16 + b: that is
// behind the last block of the one before.
int64_t packed_key_blocks(int64_t n_kv, int64_t batch) { return sum(n_kv / key_block, batch); }

void set_window(const SequenceArguments &s, Attention *attention) {
  attention->window_left = s.has_left() ? s.window_left : INT64_MAX;
  attention->window_right = s.is_causal()                ? 0
                            : s.flags & MHA_WINDOW_RIGHT ? s.window_right
                                                         : INT64_MAX;
}

void fill_sequences(const SequenceArguments &s, int64_t first_row, int64_t rows, Sequence *filled,
                    Extent *queries, Extent *keys) {
  int64_t q_before = 0, kv_before = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b), n_kv = keys_of(s, b), past = past_of(s, b);
    const int64_t q_begin = std::min(first_row, n_q), q_end = std::min(n_q, sum(first_row, rows));
    const int64_t kv_begin = std::min(first_row, n_kv),
                  kv_end = std::min(n_kv, sum(first_row, rows));
    Sequence &sequence = filled[b];
    sequence.n_q = q_end - q_begin;
    sequence.n_kv = past + kv_end;
    sequence.q_start = sum(start_of(s, b), q_begin);
    sequence.q_first = first_query(s, b) + q_begin;
    sequence.kv_first = first_key(s, b) + kv_begin;
    sequence.past = past + kv_begin;
    sequence.kv_rows = kv_end - kv_begin;
    sequence.in_cache = s.is_packed() && !s.cache ? kv_before / key_block + b : in_cache(s, b);
    sequence.in_arrays = s.is_packed() ? 0 : b;
    sequence.column = s.cache ? 0 : sequence.kv_first;
    sequence.option_column =
        s.has_new_columns ? sequence.kv_first - sequence.past : sequence.column;
    sequence.first_in_columns = s.has_new_columns ? past : 0;
    sequence.end_of_columns = keys_with_columns(s, b, sequence.n_kv);
    if (queries) queries[b] = {sequence.q_first, sequence.n_q, q_before, b};
    if (keys)
      keys[b] = {sequence.kv_first, sequence.kv_rows, kv_before, s.cache ? b : sequence.in_cache};
    q_before += sequence.n_q;
    kv_before += sequence.kv_rows;
  }
}

Rotation rotation_of(const SequenceArguments &s, bool of_keys) {
  if (!s.has_rope()) return {};
  return {s.rope.cos,
          s.rope.sin,
          s.rope.table_stride,
          s.rope.dims / 2,
          s.rope.offset,
          s.rope.style == MHA_ROPE_INTERLEAVED,
          of_keys ? s.given.rope_k_positions : s.given.rope_q_positions,
          of_keys && !s.is_self ? s.n_kv : s.n_q,
          s.kv_first_position};
}

void grow_cache(const SequenceArguments &s) {
  for (int64_t b = 0; s.growing && b < s.batch; ++b) {
    if (keys_of(s, b) > 0) grow(s.growing, in_cache(s, b), keys_of(s, b));
  }
}

// ---- Counting

namespace {

// The sum of `first` + i, each at least 0 and at most `most`, over i in [0, count).
uint64_t clamped_sum(int64_t first, int64_t count, int64_t most) {
  const int64_t below = first < 0 ? std::min(count, -first) : 0;  // terms that are 0
  const int64_t start = first < 0 ? 0 : first;
  const int64_t growing = start >= most ? 0 : std::min(count - below, most - start);
  const uint64_t n = static_cast<uint64_t>(growing), s = static_cast<uint64_t>(start);
  const uint64_t triangle = n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n;
  return n * s + triangle +
         static_cast<uint64_t>(count - below - growing) * static_cast<uint64_t>(most);
}

}  // namespace

uint64_t valid_queries(const SequenceArguments &s) {
  if (!s.is_ragged()) return product(s.batch, s.n_q);
  uint64_t rows = 0;
  for (int64_t b = 0; b < s.batch; ++b) rows += static_cast<uint64_t>(queries_of(s, b));
  return rows;
}

uint64_t valid_keys(const SequenceArguments &s) {
  if (!s.is_ragged()) return product(s.batch, s.is_self ? s.n_q : s.n_kv);
  uint64_t rows = 0;
  for (int64_t b = 0; b < s.batch; ++b) rows += static_cast<uint64_t>(keys_of(s, b));
  return rows;
}

uint64_t key_value_bytes(const SequenceArguments &s, const Attention &attention, int64_t k_heads,
                         int64_t v_heads, int64_t past_heads) {
  const KeyValues *const both[] = {&attention.k, &attention.v};
  const int64_t new_heads[] = {k_heads, v_heads};
  const int64_t widths[] = {attention.head_dim, attention.head_dim_v};
  Attention window = {};
  set_window(s, &window);
  uint64_t positions = 0, bytes = 0;  // of the cache, before those that the call appends
  for (int64_t b = 0; s.cache && b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b), start = start_of(s, b);
    if (n_q == 0) continue;
    const int64_t first = start > window.window_left ? start - window.window_left : 0;
    const int64_t end = std::min(past_of(s, b), sum(sum(start, n_q), window.window_right));
    if (first < end) positions += static_cast<uint64_t>(end - first);
  }
  for (int i = 0; i < (is_stored(attention.k) ? 1 : 2); ++i) {
    const int64_t scale = both[i]->storage == Storage::int8 ? sizeof(float) : 0;
    bytes += (static_cast<uint64_t>(new_heads[i]) * valid_keys(s) +
              static_cast<uint64_t>(past_heads) * positions) *
             static_cast<uint64_t>(widths[i] * bytes_of(both[i]->storage) + scale);
  }
  return bytes;
}

uint64_t attending_pairs(const SequenceArguments &s) {
  Attention window = {};
  set_window(s, &window);
  uint64_t pairs = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b),
                  n_kv = keys_with_columns(s, b, past_of(s, b) + keys_of(s, b)),
                  start = start_of(s, b);
    // Each query all keys that come after its first one.
    const bool sees_all = start >= n_kv - 1 - window.window_right;
    const uint64_t ends =
        sees_all ? product(n_q, n_kv) : clamped_sum(start + window.window_right + 1, n_q, n_kv);
    const uint64_t begins = window.window_left >= sum(start < 0 ? 0 : start, n_q)
                                ? 0
                                : clamped_sum(start - window.window_left, n_q, n_kv);
    pairs += ends - begins;
    if (!s.cache && !s.given.q_first_positions && !s.is_ragged())
      return static_cast<uint64_t>(s.batch) * pairs;
  }
  return pairs;
}

}  // namespace mha
