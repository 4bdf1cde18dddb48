#include "sequences.h"

#include <algorithm>

#include "storage.h"
#include "structs.h"

namespace mha {
namespace {

constexpr int64_t min_position = -(int64_t{1} << 62);  // so that differences of positions are no overflow

int64_t sum(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }  // b is not negative

// Where the sequences are packed: null if no keys come with the call.
const int64_t *packed_keys_of(const SequenceArguments &s) {
  return s.is_self || (s.n_kv > 0 && !s.cu_seqlens_kv) ? s.cu_seqlens_q : s.n_kv > 0 ? s.cu_seqlens_kv : nullptr;
}

// Valid rows, and the first of them in the arrays.
int64_t queries_of(const SequenceArguments &s, int64_t b) {
  if (s.has_cu_seqlens()) return s.cu_seqlens_q[b + 1] - s.cu_seqlens_q[b];
  return s.q_lengths ? s.q_lengths[b] : s.is_self && s.kv_start ? s.n_q - s.kv_start[b] : s.n_q;
}
int64_t keys_of(const SequenceArguments &s, int64_t b) {
  if (s.is_self) return queries_of(s, b);
  if (s.has_cu_seqlens()) return packed_keys_of(s) ? packed_keys_of(s)[b + 1] - packed_keys_of(s)[b] : 0;
  return s.kv_lengths ? s.kv_lengths[b] : s.kv_start ? s.n_kv - s.kv_start[b] : s.n_kv;
}
int64_t first_query(const SequenceArguments &s, int64_t b) {
  if (s.has_cu_seqlens()) return s.cu_seqlens_q[b];
  return s.flags & MHA_PADDING_LEFT ? s.n_q - queries_of(s, b) : s.is_self && s.kv_start ? s.kv_start[b] : 0;
}
int64_t first_key(const SequenceArguments &s, int64_t b) {
  if (s.is_self) return first_query(s, b);
  if (s.has_cu_seqlens()) return packed_keys_of(s) ? packed_keys_of(s)[b] : 0;
  return s.flags & MHA_PADDING_LEFT ? s.n_kv - keys_of(s, b) : s.kv_start ? s.kv_start[b] : 0;
}

int64_t in_cache(const SequenceArguments &s, int64_t b) { return s.cache_sequences ? s.cache_sequences[b] : b; }
int64_t past_of(const SequenceArguments &s, int64_t b) { return s.cache ? state_of(s.cache, in_cache(s, b)).length : 0; }

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
  return s.is_causal() || s.has_window() || s.distances || (s.has_rope() && !s.rope.q_positions);
}

// Position of the first query, from the first key on; 0, and q_start is not looked at, where it does not matter.
int64_t start_of(const SequenceArguments &s, int64_t b) {
  if (!has_positions(s)) return 0;
  if (s.q_start) return s.q_start[b] < INT64_MIN + s.kv_position ? INT64_MIN : s.q_start[b] - s.kv_position;
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
  constexpr uint32_t known_flags = MHA_CAUSAL | MHA_WINDOW_LEFT | MHA_WINDOW_RIGHT | MHA_PADDING_LEFT | MHA_CACHE_READ;
  if (s.flags & ~known_flags) return report.invalid("flags has the bits 0x%x, which mean nothing; leave them 0", s.flags & ~known_flags);
  const struct {
    const char *name, *flag;
    int64_t value;
    bool is_set;
  } windows[] = {{"window_left", "MHA_WINDOW_LEFT", s.window_left, s.has_left()},
                 {"window_right", "MHA_WINDOW_RIGHT", s.window_right, (s.flags & MHA_WINDOW_RIGHT) != 0}};
  for (const auto &window : windows) {
    if (window.value < 0) {
      return report.invalid("%s is %lld; it can't be negative, and without the flag %s there is no limit", window.name, lld(window.value),
                            window.flag);
    }
    if (!window.is_set && window.value != 0)
      return report.invalid("%s is %lld without the flag %s; set the flag, or leave it 0", window.name, lld(window.value), window.flag);
  }
  return MHA_OK;
}

mha_status check_rope(Report report, SequenceArguments *s, int64_t head_dim) {
  if (!s->has_rope()) return MHA_OK;
  mha_rope &rope = s->rope;
  if (const mha_status status = read_struct(report, "mha_rope", s->given_rope, &rope)) return status;
  if (rope.reserved != 0) return report.invalid("mha_rope.reserved is not 0; set it to 0");
  if (rope.style > MHA_ROPE_INTERLEAVED) return report.invalid("rope.style is %u; use MHA_ROPE_HALF or MHA_ROPE_INTERLEAVED", rope.style);
  if (rope.offset < 0 || rope.offset >= head_dim)
    return report.invalid("rope.offset is %lld; set it to at least 0 and less than head_dim %lld", lld(rope.offset), lld(head_dim));
  if (rope.dims == 0) rope.dims = head_dim - rope.offset;
  if (rope.dims < 0 || rope.dims > head_dim - rope.offset || rope.dims % 2 != 0) {
    return report.invalid("rope.dims is %lld; set it to an even number of at most head_dim %lld less offset %lld", lld(rope.dims),
                          lld(head_dim), lld(rope.offset));
  }
  if (!rope.cos || !rope.sin)
    return report.fail(MHA_ERROR_NULL_POINTER, "rope.%s is NULL; pass tables, for instance of mha_rope_tables", rope.cos ? "sin" : "cos");
  if (rope.num_positions < 1)
    return report.invalid("rope.num_positions is %lld; set it to the rows of the tables", lld(rope.num_positions));
  if (rope.table_stride == 0) rope.table_stride = rope.dims / 2;
  if (rope.table_stride < rope.dims / 2) {
    return report.invalid(
        "rope.table_stride is %lld, less than the width of a row, dims / 2 = %lld; set at least that, or 0 for contiguous",
        lld(rope.table_stride), lld(rope.dims / 2));
  }
  if ((Count(rope.num_positions) * Count(rope.table_stride) * Count(sizeof(float))).overflows())
    return report.fail(MHA_ERROR_TOO_LARGE, "rope's tables would be larger than memory can be");
  return MHA_OK;
}

mha_status check_cache_fits(Report report, const SequenceArguments &s, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v) {
  const mha_kv_cache *const cache = s.cache;
  if (!cache) {
    if (!s.cache_sequences) return MHA_OK;
    return report.invalid("cache_sequences is given without cache; give the cache too");
  }
  const struct {
    const char *name;
    int64_t own, of_call;
  } sizes[] = {{"num_kv_heads", cache->num_kv_heads, num_kv_heads},
               {"head_dim", cache->head_dim, head_dim},
               {"head_dim_v", cache->head_dim_v, head_dim_v}};
  for (const auto &size : sizes) {
    if (size.own != size.of_call) {
      return report.fail(MHA_ERROR_SHAPE, "the cache has %s %lld, this call %lld; use a cache of this shape", size.name, lld(size.own),
                         lld(size.of_call));
    }
  }
  if (!s.cache_sequences && s.batch > cache->num_sequences) {
    return report.fail(MHA_ERROR_SHAPE, "batch is %lld, but the cache's num_sequences is %lld; use a larger cache", lld(s.batch),
                       lld(cache->num_sequences));
  }
  if (!s.is_ring()) return MHA_OK;
  if (!s.is_causal() || !s.has_left() || s.q_start)
    return report.invalid("a ring holds the keys of a sliding window: set MHA_CAUSAL and MHA_WINDOW_LEFT, and leave q_start NULL");
  if (s.window_left >= cache->capacity) {
    return report.fail(MHA_ERROR_SHAPE, "window_left is %lld, but the ring has %lld positions; it needs at least one more",
                       lld(s.window_left), lld(cache->capacity));
  }
  if (!s.is_self && !s.has_cu_seqlens() && s.n_kv > s.rows_per_pass() && s.n_q != s.n_kv) {
    return report.fail(
        MHA_ERROR_SHAPE,
        "a ring takes rows in passes of capacity - window_left = %lld, and several need as many queries as keys; n_q is %lld, n_kv %lld",
        lld(s.rows_per_pass()), lld(s.n_q), lld(s.n_kv));
  }
  return MHA_OK;
}

// What cu_seqlens_q and kv_start go with.
mha_status check_places(Report report, const SequenceArguments &s) {
  const char *const left = s.flags & MHA_PADDING_LEFT ? "MHA_PADDING_LEFT" : nullptr;
  if (s.cu_seqlens_kv && !s.has_cu_seqlens()) return report.invalid("cu_seqlens_kv is given without cu_seqlens_q; give that too");
  if (s.has_cu_seqlens()) {
    const char *const other = s.q_lengths ? "q_lengths" : s.kv_lengths ? "kv_lengths" : s.kv_start ? "kv_start" : left;
    if (other) return report.invalid("cu_seqlens_q says which rows are valid, but %s is given; leave it out", other);
    if (s.is_self && s.cu_seqlens_kv)
      return report.invalid("cu_seqlens_kv is given, but the keys are the rows of query; give cu_seqlens_q alone, or key");
    if (!s.is_self && !s.cu_seqlens_kv && s.n_kv > 0 && s.n_kv != s.n_q) {
      return report.fail(MHA_ERROR_SHAPE, "cu_seqlens_q is given alone, but n_kv %lld is not n_q %lld; give cu_seqlens_kv", lld(s.n_kv),
                         lld(s.n_q));
    }
  }
  if (s.kv_start && left) return report.invalid("kv_start says where the valid rows begin, but %s is set; leave one out", left);
  return MHA_OK;
}

// ---- Checks of arrays

mha_status check_lengths(Report report, const char *name, const int64_t *lengths, int64_t batch, int64_t most) {
  for (int64_t b = 0; lengths && b < batch; ++b) {
    if (lengths[b] < 0 || lengths[b] > most)
      return report.invalid("%s[%lld] is %lld; it can be 0 to %lld", name, lld(b), lld(lengths[b]), lld(most));
  }
  return MHA_OK;
}

// Rows that begin behind each other, and end within those of the array.
mha_status check_packed(Report report, const char *name, const int64_t *starts, int64_t batch, const char *rows_name, int64_t rows) {
  for (int64_t b = 0; starts && b <= batch; ++b) {
    const int64_t least = b > 0 ? starts[b - 1] : 0;
    if (starts[b] < least) {
      return report.invalid("%s[%lld] is %lld, less than %lld; it has to start at 0 or more, and ascend", name, lld(b), lld(starts[b]),
                            lld(least));
    }
    if (starts[b] > rows) {
      return report.fail(MHA_ERROR_SHAPE, "%s[%lld] is %lld, but there are only %s = %lld rows", name, lld(b), lld(starts[b]), rows_name,
                         lld(rows));
    }
  }
  return MHA_OK;
}

mha_status check_starts(Report report, const SequenceArguments &s) {
  const int64_t most = s.is_self ? s.n_q : s.n_kv;
  if (const mha_status status = check_lengths(report, "kv_start", s.kv_start, s.batch, most)) return status;
  for (int64_t b = 0; s.kv_start && b < s.batch; ++b) {
    const int64_t length = keys_of(s, b);
    if (s.kv_start[b] + length <= most) continue;
    return report.fail(MHA_ERROR_SHAPE, "kv_start[%lld] is %lld and the length %lld, but there are only %lld rows", lld(b),
                       lld(s.kv_start[b]), lld(length), lld(most));
  }
  return MHA_OK;
}

// That cache_sequences has each at most once. If they do not ascend, they are gone through for 32768 of the cache's sequences at a time,
// with a bit for each on the stack: there is no memory for more, and other calls may read the cache meanwhile.
mha_status check_cache_sequences(Report report, const SequenceArguments &s) {
  const int64_t *const sequences = s.cache_sequences;
  bool ascend = true;
  for (int64_t b = 0; b < s.batch; ++b) {
    if (const mha_status status = check_cache_sequence(report, s.cache, sequences[b])) return status;
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
        return report.invalid("cache_sequences[%lld] and [%lld] are both %lld; a call has each at most once",
                              lld(std::find(sequences, sequences + b, sequences[b]) - sequences), lld(b), lld(sequences[b]));
      }
      seen[at / 64] |= bit;
    }
  }
  return MHA_OK;
}

// That a ring still holds all that the rows attend to, in each pass.
mha_status check_ring(Report report, const SequenceArguments &s, int64_t b) {
  const int64_t sequence = in_cache(s, b), past = past_of(s, b), rows = keys_of(s, b), queries = queries_of(s, b), start = start_of(s, b);
  if (queries == 0) return MHA_OK;
  if (rows > s.rows_per_pass() && rows != queries) {
    return report.fail(MHA_ERROR_SHAPE,
                       "sequence %lld goes to the ring in several passes, which need as many queries as keys, not %lld and %lld", lld(b),
                       lld(queries), lld(rows));
  }
  const int64_t needed = start > s.window_left ? start - s.window_left : 0;
  const int64_t oldest = oldest_position(s.cache, sequence, past + std::min(rows, s.rows_per_pass()));
  if (needed < oldest) {
    return report.fail(MHA_ERROR_SHAPE,
                       "the window of sequence %lld begins at position %lld, but the ring holds those from %lld on; use a larger capacity",
                       lld(b), lld(needed), lld(oldest));
  }
  return MHA_OK;
}

// The largest position of a row has to have its line in the tables.
mha_status check_rope_positions(Report report, const SequenceArguments &s, int64_t b, bool of_keys) {
  const int64_t *const given = of_keys ? s.rope.k_positions : s.rope.q_positions;
  const int64_t rows = of_keys ? keys_of(s, b) : queries_of(s, b), stride = of_keys && !s.is_self ? s.n_kv : s.n_q;
  const int64_t first_row = (s.has_cu_seqlens() ? 0 : b * stride) + (of_keys ? first_key(s, b) : first_query(s, b));
  const int64_t first = sum(of_keys ? past_of(s, b) : start_of(s, b), s.kv_position);
  const char *const name = of_keys ? "k" : "q";
  for (int64_t i = 0; given && i < rows; ++i) {
    const int64_t at = first_row + i;
    if (given[at] < 0 || given[at] >= s.rope.num_positions) {
      return report.invalid("rope.%s_positions[%lld] is %lld; the tables have the positions 0 to %lld", name, lld(at), lld(given[at]),
                            lld(s.rope.num_positions - 1));
    }
  }
  if (!given && rows > 0 && first < 0 && (!s.is_causal() || s.adds_keys)) {
    return report.invalid("the queries of sequence %lld begin at position %lld, for which rope has no tables; set MHA_CAUSAL, and no"
                          " MHA_GROUPS_ALSO, so that they attend to nothing, or give rope.q_positions",
                          lld(b), lld(first));
  }
  if (!given && rows > 0 && sum(first, rows) > s.rope.num_positions) {
    return report.invalid("the %s of sequence %lld reach position %lld, but rope's tables have num_positions %lld; make them longer",
                          of_keys ? "keys" : "queries", lld(b), lld(sum(first, rows) - 1), lld(s.rope.num_positions));
  }
  return MHA_OK;
}

}  // namespace

mha_status check_sequences(Report report, SequenceArguments *sequences, int64_t num_kv_heads, int64_t head_dim, int64_t head_dim_v) {
  const SequenceArguments &s = *sequences;
  const bool is_plain = (s.flags & ~MHA_CAUSAL) == 0 && s.window_left == 0 && s.window_right == 0 && !s.has_rope() && !s.cache &&
                        !s.cache_sequences && !s.kv_start && !s.cu_seqlens_q && !s.cu_seqlens_kv;
  if (!is_plain) {
    if (const mha_status status = check_flags(report, s)) return status;
    if (const mha_status status = check_places(report, s)) return status;
    if (const mha_status status = check_rope(report, sequences, head_dim)) return status;
    if (const mha_status status = check_cache_fits(report, s, num_kv_heads, head_dim, head_dim_v)) return status;
  }
  const bool knows_counts = !s.q_start && !s.q_lengths && !s.kv_lengths && !s.kv_start && !s.has_cu_seqlens() && !s.cache;
  if (knows_counts && s.n_q > s.n_kv && has_positions(s)) {
    return report.fail(MHA_ERROR_SHAPE, "%s with n_q %lld > n_kv %lld would place queries before the first key; set n_kv, or give q_start",
                       s.is_causal()      ? "causal"
                       : s.has_window() ? "a window"
                       : s.distances    ? s.distances
                                        : "rope",
                       lld(s.n_q), lld(s.n_kv));
  }
  return MHA_OK;
}

mha_status check_sequence_arrays(Report report, const SequenceArguments &s) {
  const bool is_plain = !s.q_start && !s.is_ragged() && !s.cache && !s.has_rope();
  if (is_plain) return MHA_OK;
  if (const mha_status status = check_packed(report, "cu_seqlens_q", s.cu_seqlens_q, s.batch, "n_q", s.n_q)) return status;
  if (const mha_status status = check_packed(report, "cu_seqlens_kv", s.cu_seqlens_kv, s.batch, "n_kv", s.n_kv)) return status;
  if (const mha_status status = check_lengths(report, "q_lengths", s.q_lengths, s.batch, s.n_q)) return status;
  if (const mha_status status = check_lengths(report, "kv_lengths", s.kv_lengths, s.batch, s.n_kv)) return status;
  if (const mha_status status = check_starts(report, s)) return status;
  const bool are_alike = !s.q_start && !s.is_ragged() && !s.cache && !(s.has_rope() && (s.rope.q_positions || s.rope.k_positions));
  if (s.cache_sequences) {
    if (const mha_status status = check_cache_sequences(report, s)) return status;
  }
  for (int64_t b = 0; b < s.batch && !(are_alike && b > 0); ++b) {
    if (s.cache) {
      if (const mha_status status = check_append(report, s.cache, in_cache(s, b), keys_of(s, b))) return status;
    }
    const int64_t columns = s.has_new_columns ? s.n_kv : past_of(s, b) + keys_of(s, b);
    if (s.cache && columns > s.columns) {
      return report.fail(MHA_ERROR_SHAPE,
                         "score.mask, bias or kv_groups has rows of %lld columns, but sequence %lld needs %lld; make the stride larger",
                         lld(s.columns), lld(b), lld(columns));
    }
    if (s.cache && s.q_start && s.is_self && has_positions(s) && queries_of(s, b) > 0 && s.q_start[b] != past_of(s, b)) {
      return report.invalid("q_start[%lld] is %lld, but in self-attention the rows are appended at position %lld; leave q_start NULL",
                            lld(b), lld(s.q_start[b]), lld(past_of(s, b)));
    }
    if (start_of(s, b) < min_position) {
      return report.invalid("q_start[%lld] is %lld; it can be at least %s-2^62", lld(b), lld(s.q_start[b]),
                            s.kv_position != 0 ? "kv_position " : "");
    }
    if (start_of(s, b) < 0 && !s.q_start && !s.kv_start) {
      return report.fail(MHA_ERROR_SHAPE,
                         "sequence %lld has more queries (%lld) than keys (%lld), so that some would be before the first key; give q_start",
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

mha_status check_chosen_entries(Report report, const SequenceArguments &s, const Attention &attention) {
  const ChosenKeys &chosen = attention.options.chosen;
  if (!chosen.lists.base) return MHA_OK;
  const int64_t heads = chosen.lists.head_stride != 0 ? attention.num_kv_heads : 1;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t in_arrays = s.has_cu_seqlens() ? 0 : b, entries = blocks_of(past_of(s, b) + keys_of(s, b), chosen.block);
    for (int64_t at = 0; at < heads * queries_of(s, b); ++at) {
      const int64_t head = at / queries_of(s, b), row = first_query(s, b) + at % queries_of(s, b);
      const int32_t *const list = static_cast<const int32_t *>(chosen.lists.base) + in_arrays * chosen.lists.batch_stride +
                                  head * chosen.lists.head_stride + row * chosen.lists.row_stride;
      const auto is_wrong = [entries](int32_t entry) { return entry < -1 || entry >= entries; };
      const int64_t wrong = std::find_if(list, list + chosen.count, is_wrong) - list;
      if (wrong == chosen.count) continue;
      if (entries == 0) {
        return report.invalid(
            "score.chosen_keys[%lld, %lld, %lld, %lld] (sequence, kv head, row, entry) is %d; the sequence has no keys, so give -1, which "
            "is none",
            lld(in_arrays), lld(head), lld(row), lld(wrong), list[wrong]);
      }
      return report.invalid(
          "score.chosen_keys[%lld, %lld, %lld, %lld] (sequence, kv head, row, entry) is %d; there are 0 to %lld, and -1 is none",
          lld(in_arrays), lld(head), lld(row), lld(wrong), list[wrong], lld(entries - 1));
    }
  }
  return MHA_OK;
}

int64_t max_keys(const SequenceArguments &s) {
  if (!s.cache) return s.n_kv;
  return s.is_ring() ? sum(s.cache->capacity, 2 * chunk_keys) : s.cache->capacity;
}

int64_t longest_keys(const SequenceArguments &s) {
  if (!s.cache && !s.has_cu_seqlens()) return s.n_kv;
  return most_of(s, [&](int64_t b) { return past_of(s, b) + keys_of(s, b); });
}

int64_t pair_columns(const SequenceArguments &s) { return s.cache ? longest_keys(s) : s.n_kv; }

int64_t longest_queries(const SequenceArguments &s) {
  if (!s.has_cu_seqlens()) return s.n_q;
  return most_of(s, [&](int64_t b) { return queries_of(s, b); });
}

int64_t longest_rows(const SequenceArguments &s) {
  if (!s.has_cu_seqlens()) return std::max(s.n_q, s.n_kv);
  return most_of(s, [&](int64_t b) { return std::max(queries_of(s, b), keys_of(s, b)); });
}

Extent packed_queries(const SequenceArguments &s) { return {s.cu_seqlens_q[0], s.cu_seqlens_q[s.batch] - s.cu_seqlens_q[0], 0, 0}; }

Extent packed_keys(const SequenceArguments &s) {
  const int64_t *const starts = packed_keys_of(s);
  return starts ? Extent{starts[0], starts[s.batch] - starts[0], 0, 0} : Extent{};
}

// Sequence b, with `before` rows of keys before it, begins with block before / 16 + b: that is behind the last block of the one before.
int64_t packed_key_blocks(int64_t n_kv, int64_t batch) { return sum(n_kv / key_block, batch); }

void set_window(const SequenceArguments &s, Attention *attention) {
  attention->window_left = s.has_left() ? s.window_left : INT64_MAX;
  attention->window_right = s.is_causal() ? 0 : s.flags & MHA_WINDOW_RIGHT ? s.window_right : INT64_MAX;
}

void fill_sequences(const SequenceArguments &s, int64_t first_row, int64_t rows, Sequence *filled, Extent *queries, Extent *keys) {
  int64_t q_before = 0, kv_before = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b), n_kv = keys_of(s, b), past = past_of(s, b);
    const int64_t q_begin = std::min(first_row, n_q), q_end = std::min(n_q, sum(first_row, rows));
    const int64_t kv_begin = std::min(first_row, n_kv), kv_end = std::min(n_kv, sum(first_row, rows));
    Sequence &sequence = filled[b];
    sequence.n_q = q_end - q_begin;
    sequence.n_kv = past + kv_end;
    sequence.q_start = sum(start_of(s, b), q_begin);
    sequence.q_first = first_query(s, b) + q_begin;
    sequence.kv_first = first_key(s, b) + kv_begin;
    sequence.past = past + kv_begin;
    sequence.kv_rows = kv_end - kv_begin;
    sequence.in_cache = s.has_cu_seqlens() && !s.cache ? kv_before / key_block + b : in_cache(s, b);
    sequence.in_arrays = s.has_cu_seqlens() ? 0 : b;
    sequence.column = s.cache ? 0 : sequence.kv_first;
    sequence.option_column = s.has_new_columns ? sequence.kv_first - sequence.past : sequence.column;
    sequence.first_in_columns = s.has_new_columns ? past : 0;
    sequence.end_of_columns = keys_with_columns(s, b, sequence.n_kv);
    if (queries) queries[b] = {sequence.q_first, sequence.n_q, q_before, b};
    if (keys) keys[b] = {sequence.kv_first, sequence.kv_rows, kv_before, s.cache ? b : sequence.in_cache};
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
          of_keys ? s.rope.k_positions : s.rope.q_positions,
          of_keys && !s.is_self ? s.n_kv : s.n_q,
          s.kv_position};
}

void grow_cache(const SequenceArguments &s) {
  for (int64_t b = 0; s.cache && b < s.batch; ++b) {
    if (keys_of(s, b) > 0) grow(s.cache, in_cache(s, b), keys_of(s, b));
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
  return n * s + triangle + static_cast<uint64_t>(count - below - growing) * static_cast<uint64_t>(most);
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

uint64_t key_value_bytes(const SequenceArguments &s, const Attention &attention, int64_t k_heads, int64_t v_heads, int64_t past_heads) {
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
    bytes += (static_cast<uint64_t>(new_heads[i]) * valid_keys(s) + static_cast<uint64_t>(past_heads) * positions) *
             static_cast<uint64_t>(widths[i] * bytes_of(both[i]->storage) + scale);
  }
  return bytes;
}

uint64_t attending_pairs(const SequenceArguments &s) {
  Attention window = {};
  set_window(s, &window);
  uint64_t pairs = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t n_q = queries_of(s, b), n_kv = keys_with_columns(s, b, past_of(s, b) + keys_of(s, b)), start = start_of(s, b);
    const bool sees_all = start >= n_kv - 1 - window.window_right;  // each query all keys that come after its first one
    const uint64_t ends = sees_all ? product(n_q, n_kv) : clamped_sum(start + window.window_right + 1, n_q, n_kv);
    const uint64_t begins = window.window_left >= sum(start < 0 ? 0 : start, n_q) ? 0 : clamped_sum(start - window.window_left, n_q, n_kv);
    pairs += ends - begins;
    if (!s.cache && !s.q_start && !s.is_ragged()) return static_cast<uint64_t>(s.batch) * pairs;
  }
  return pairs;
}

}  // namespace mha
