// A call says of its sequences how many rows are valid, where they begin, at which positions they
// stand, and which sequences of a cache they extend. Some of that is in numbers, some in arrays.
//
// read_sequences and check_sequences look at the numbers, which a size query has too;
// check_sequence_arrays and check_chosen_entries read the arrays, once the size of the workspace is
// settled. Nothing in run/ and the kernels checks a position or a length again.

#include "sequences.h"

#include <algorithm>

#include "../base/structs.h"
#include "cache.h"
#include "rules.h"

namespace mha {
namespace {

// Positions are at least this, so that no difference of two of them overflows.
constexpr int64_t min_position = -(int64_t{1} << 62);

// ---- Checks without arrays

// Windows have a flag each, because 0 is an ordinary width.
mha_status check_flags(Report report, const SequenceArguments &s) {
  const struct {
    const char *name, *flag;
    int64_t value;
    bool is_set;
  } windows[] = {
      {"window_left", "MHA_WINDOW_LEFT", s.window_left, s.has_left()},
      {"window_right", "MHA_WINDOW_RIGHT", s.window_right, (s.flags & MHA_WINDOW_RIGHT) != 0}};
  for (const auto &window : windows) {
    if (!window.is_set && window.value != 0)
      return report.invalid("%s is %lld, but flags lacks %s; set the flag, or set %s to 0",
                            window.name, lld(window.value), window.flag, window.name);
  }
  return MHA_OK;
}

// The shape of the rotation, with its defaults resolved. The tables themselves may hold anything.
mha_status check_rope(Report report, const mha_rope *given, int64_t head_dim, mha_rope *resolved) {
  if (!given) return MHA_OK;
  mha_rope &rope = *resolved;
  MHA_TRY(read_struct(report, "mha_rope", given, &rope));
  const Rules rules = {report, "rope."};
  MHA_TRY(check_fields(rules, rope));
  if (rope.offset >= head_dim)
    return report.invalid("rope.offset is %lld; it must be at least 0 and less than head_dim, %lld",
                          lld(rope.offset), lld(head_dim));
  if (rope.dims == 0) rope.dims = head_dim - rope.offset;
  if (rope.dims > head_dim - rope.offset || rope.dims % 2 != 0)
    return report.invalid(
        "rope.dims is %lld; it must be even and at most head_dim - offset = %lld - %lld",
        lld(rope.dims), lld(head_dim), lld(rope.offset));
  MHA_TRY(rules.given("cos", rope.cos, "a table, such as mha_rope_tables fills"));
  MHA_TRY(rules.given("sin", rope.sin, "a table, such as mha_rope_tables fills"));
  if (rope.table_stride == 0) rope.table_stride = rope.dims / 2;
  if (rope.table_stride < rope.dims / 2)
    return report.invalid(
        "rope.table_stride is %lld, less than the width of a row, dims / 2 = %lld; set it to at "
        "least that, or to 0 for contiguous",
        lld(rope.table_stride), lld(rope.dims / 2));
  return Rules{report}.fits(
      "the tables of rope",
      Count(rope.num_positions) * Count(rope.table_stride) * Count(sizeof(float)));
}

// A cache has the heads of the call, and room for its sequences. A ring needs more: it keeps only a
// window of positions, so the call must be causal, look back no further, and count positions by
// itself.
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
    if (size.own != size.of_call)
      return report.shape(
          "the cache has %s %lld, but this call has %lld; use a cache made for this shape",
          size.name, lld(size.own), lld(size.of_call));
  }
  const mha_sequences &given = s.given;
  if (s.has_pool() && !s.has_no_work() && (!given.cache_lengths || !given.block_tables))
    return report.null(
        "sequences.%s is NULL, but the cache is a pool; pass the %s of each sequence",
        given.cache_lengths ? "block_tables" : "cache_lengths",
        given.cache_lengths ? "blocks" : "positions before the call");
  MHA_TRY(Rules{report}.fits(
      "sequences.block_tables",
      Count(s.batch) * Count(given.block_table_stride) * Count(sizeof(int32_t))));
  if (s.batch > cache->num_sequences)
    return report.shape(
        "the call has %lld sequences, but the cache has num_sequences %lld; use a larger cache",
        lld(s.batch), lld(cache->num_sequences));
  if (!s.is_ring()) return MHA_OK;
  if (!s.is_causal() || !s.has_left())
    return report.invalid("flags lacks %s, which a ring needs; set it",
                          s.is_causal() ? "MHA_WINDOW_LEFT" : "MHA_CAUSAL");
  if (s.given.q_first_positions)
    return report.invalid(
        "sequences.q_first_positions is given, but the cache is a ring; set it to NULL");
  if (s.window_left >= cache->capacity)
    return report.shape(
        "window_left is %lld, but the ring has a capacity of %lld; set it to at most %lld, or use "
        "a larger ring",
        lld(s.window_left), lld(cache->capacity), lld(cache->capacity - 1));
  if (!s.is_packed() && s.n_kv > s.rows_per_pass() && s.n_q != s.n_kv)
    return report.shape(
        "n_q %lld and n_kv %lld differ, but the ring takes more than capacity - window_left = %lld "
        "rows at once only if they are equal",
        lld(s.n_q), lld(s.n_kv), lld(s.rows_per_pass()));
  return MHA_OK;
}

// cu_seqlens_q alone says which rows are valid, so other arrays that say so cannot stand beside it.
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
  if (!given.cu_seqlens_kv && s.n_kv > 0 && s.n_kv != s.n_q)
    return report.shape("sequences.cu_seqlens_kv is NULL, but n_kv %lld is not n_q %lld; give it",
                        lld(s.n_kv), lld(s.n_q));
  return MHA_OK;
}

// ---- Checks of arrays

// Lengths and first rows keep the valid rows within the array. rows_name is the field with `rows`.
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
    return report.shape(
        "sequences.%s_first_rows[%lld] is %lld and its length %lld, but there are only %s = %lld "
        "rows",
        prefix, lld(b), lld(first_rows[b]), lld(lengths[b]), rows_name, lld(rows));
  }
  return MHA_OK;
}

// cu_seqlens ascend from 0 to the number of rows: row starts[b] is the first one of sequence b, and
// row starts[b + 1] the first one of the next.
mha_status check_packed(Report report, const char *name, const int64_t *starts, int64_t batch,
                        const char *rows_name, int64_t rows) {
  if (!starts) return MHA_OK;
  if (starts[0] != 0)
    return report.invalid("sequences.%s[0] is %lld; it must be 0", name, lld(starts[0]));
  for (int64_t b = 1; b <= batch; ++b) {
    if (starts[b] < starts[b - 1])
      return report.invalid(
          "sequences.%s[%lld] is %lld, less than %lld before it; the numbers must ascend", name,
          lld(b), lld(starts[b]), lld(starts[b - 1]));
  }
  if (starts[batch] == rows) return MHA_OK;
  return report.shape(
      "sequences.%s[%lld] is %lld, the end of the last sequence; it must be %s, %lld. Check count, "
      "too",
      name, lld(batch), lld(starts[batch]), rows_name, lld(rows));
}

// A number that comes twice, and whose it is both times; -1: none does. each(visit) calls
// visit(number, owner) for all of them, numbers below `limit`. They are marked in a set of bits on
// the stack, 32768 at a time: the workspace has no room for more, and the cache cannot hold marks,
// because other calls may read it meanwhile.
struct Twice {
  int64_t number, first, second;
};
template <class Each>
Twice find_twice(int64_t limit, const Each &each) {
  constexpr int64_t at_once = 1 << 15;
  uint64_t seen[at_once / 64];
  Twice twice = {-1, -1, -1};
  for (int64_t first = 0, next; twice.number < 0 && first < limit; first = next) {
    const int64_t end = std::min(limit - first, at_once);
    std::fill_n(seen, blocks_of(end, 64), 0);
    next = limit;
    each([&](int64_t number, int64_t owner) {
      const int64_t at = number - first;
      if (at >= end) next = std::min(next, number);
      if (at < 0 || at >= end || twice.number >= 0) return;
      const uint64_t bit = uint64_t{1} << at % 64;
      if (seen[at / 64] & bit) twice = {number, -1, owner};
      seen[at / 64] |= bit;
    });
  }
  if (twice.number < 0) return twice;
  each([&](int64_t number, int64_t owner) {
    if (number == twice.number && twice.first < 0) twice.first = owner;
  });
  return twice;
}

// A call uses each sequence of the cache at most once.
mha_status check_cache_sequences(Report report, const SequenceArguments &s) {
  const int64_t *const sequences = s.given.cache_sequences;
  for (int64_t b = 0; b < s.batch; ++b) {
    if (sequences[b] < 0 || sequences[b] >= s.cache->num_sequences)
      return report.invalid(
          "sequences.cache_sequences[%lld] is %lld; it must be 0 to %lld, a sequence of the cache",
          lld(b), lld(sequences[b]), lld(s.cache->num_sequences - 1));
  }
  const Twice twice = find_twice(s.cache->num_sequences, [&](const auto &visit) {
    for (int64_t b = 0; b < s.batch; ++b) visit(sequences[b], b);
  });
  if (twice.number < 0) return MHA_OK;
  return report.invalid(
      "sequences.cache_sequences[%lld] and [%lld] are both %lld; a call uses each sequence at most "
      "once",
      lld(twice.first), lld(twice.second), lld(twice.number));
}

// The lengths and block tables of a pool: each sequence has room for its new positions, and a block
// for each position that the call reads or writes. No block is written to twice.
mha_status check_tables(Report report, const SequenceArguments &s) {
  const mha_sequences &given = s.given;
  const mha_kv_cache &pool = *s.cache;
  const int64_t *const starts = given.block_table_starts;
  const auto new_keys = [&s](int64_t b) { return s.growing ? keys_of(s, b) : 0; };
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t length = given.cache_lengths[b];
    if (length < 0 || length > pool.capacity)
      return report.invalid(
          "sequences.cache_lengths[%lld] is %lld; it must be 0 to the capacity, %lld", lld(b),
          lld(length), lld(pool.capacity));
    if (new_keys(b) > pool.capacity - length)
      return report.fail(MHA_ERROR_CACHE_FULL,
                         "sequence %lld has %lld positions and gets %lld more, but the capacity of "
                         "the pool is %lld; make it larger",
                         lld(b), lld(length), lld(new_keys(b)), lld(pool.capacity));
    if (starts &&
        (starts[b] < 0 || starts[b + 1] < starts[b] || starts[b + 1] > given.block_table_entries))
      return report.invalid(
          "sequences.block_table_starts[%lld] and the next are %lld and %lld; the numbers must "
          "ascend from 0 to at most block_table_entries, %lld",
          lld(b), lld(starts[b]), lld(starts[b + 1]), lld(given.block_table_entries));
    const int64_t end = blocks_in_use(pool, length + new_keys(b));
    if (end > table_entries(s, b))
      return report.fail(MHA_ERROR_CACHE_FULL,
                         "sequence %lld needs %lld blocks for %lld positions, but its block table "
                         "has %lld entries; make it longer",
                         lld(b), lld(end), lld(length + new_keys(b)), lld(table_entries(s, b)));
    int64_t first = length;
    if (queries_of(s, b) > 0) {
      const bool has_start = s.has_left() && !s.reads_all_keys;
      const int64_t start = has_start ? start_of(s, b) : 0;
      first = std::min(first, start > s.window_left ? start - s.window_left : 0);
    }
    const int32_t *const table = given.block_tables + in_cache(s, b);
    for (int64_t i = quotient(first, pool.block_positions); i < end; ++i) {
      if (table[i] < 0 || table[i] >= pool.num_blocks)
        return report.invalid(
            "entry %lld of the block table of sequence %lld is %d, but the call needs that block; "
            "it must be 0 to %lld, a block of the pool",
            lld(i), lld(b), table[i], lld(pool.num_blocks - 1));
    }
  }
  const Twice twice = find_twice(pool.num_blocks, [&](const auto &visit) {
    for (int64_t b = 0; b < s.batch; ++b) {
      const int64_t length = given.cache_lengths[b], count = new_keys(b);
      const int64_t end = count > 0 ? blocks_in_use(pool, length + count) : 0;
      for (int64_t i = quotient(length, pool.block_positions); i < end; ++i)
        visit(given.block_tables[in_cache(s, b) + i], b);
    }
  });
  if (twice.number < 0) return MHA_OK;
  return report.fail(MHA_ERROR_CACHE_SHARED,
                     "block %lld would be written to by sequence %lld and by sequence %lld; give "
                     "one of them a block of its own",
                     lld(twice.number), lld(twice.first), lld(twice.second));
}

// A ring overwrites its oldest positions. Each pass over it must still find every key that its
// rows attend to.
mha_status check_ring(Report report, const SequenceArguments &s, int64_t b) {
  const int64_t sequence = in_cache(s, b), past = past_of(s, b), rows = keys_of(s, b),
                queries = queries_of(s, b), start = start_of(s, b);
  if (queries == 0) return MHA_OK;
  if (rows > s.rows_per_pass() && rows != queries)
    return report.shape(
        "the numbers of queries and keys of sequence %lld, %lld and %lld, differ, but a ring takes "
        "more rows than it keeps only if they are equal",
        lld(b), lld(queries), lld(rows));
  const int64_t needed = start > s.window_left ? start - s.window_left : 0;
  const int64_t oldest =
      oldest_position(s.cache, sequence, past + std::min(rows, s.rows_per_pass()));
  if (needed < oldest)
    return report.shape(
        "the window of sequence %lld begins at position %lld, but the ring holds positions from "
        "%lld on; use a larger capacity",
        lld(b), lld(needed), lld(oldest));
  return MHA_OK;
}

// The tables of rope need a line for every position. Positions are the caller's, or count up from
// the position of the first row; then only the first and the last one can be out of range.
mha_status check_rope_positions(Report report, const SequenceArguments &s, int64_t b,
                                bool of_keys) {
  const int64_t *const given = of_keys ? s.given.rope_k_positions : s.given.rope_q_positions;
  const int64_t rows = of_keys ? keys_of(s, b) : queries_of(s, b),
                stride = of_keys ? s.n_kv : s.n_q;
  const int64_t first_row =
      (s.is_packed() ? 0 : b * stride) + (of_keys ? first_key(s, b) : first_query(s, b));
  const int64_t first = capped_sum(of_keys ? past_of(s, b) : start_of(s, b), s.kv_first_position);
  const char *const name = of_keys ? "k" : "q";
  for (int64_t i = 0; given && i < rows; ++i) {
    const int64_t at = first_row + i;
    if (given[at] < 0 || given[at] >= s.rope.num_positions)
      return report.invalid(
          "sequences.rope_%s_positions[%lld] is %lld; it must be 0 to %lld, the last row of the "
          "tables",
          name, lld(at), lld(given[at]), lld(s.rope.num_positions - 1));
  }
  if (!given && rows > 0 && first < 0 && (!s.is_causal() || s.scored.adds_keys))
    return report.invalid(
        "the queries of sequence %lld begin at position %lld, which the tables of rope do not "
        "have; set MHA_CAUSAL without MHA_SEGMENTS_ALSO, so that they attend to nothing, or give "
        "sequences.rope_q_positions",
        lld(b), lld(first));
  if (!given && rows > 0 && capped_sum(first, rows) > s.rope.num_positions)
    return report.invalid(
        "the %s of sequence %lld reach position %lld, but rope.num_positions is %lld; make the "
        "tables longer",
        of_keys ? "keys" : "queries", lld(b), lld(capped_sum(first, rows) - 1),
        lld(s.rope.num_positions));
  return MHA_OK;
}

}  // namespace

mha_status read_sequences(Report report, const mha_call &call, bool is_self, int64_t first_position,
                          SequenceArguments *sequences) {
  SequenceArguments &s = *sequences;
  s.batch = s.array_batch = call.batch;
  s.n_q = call.n_q;
  s.n_kv = call.n_kv;
  s.is_self = is_self;
  s.flags = call.flags;
  s.window_left = call.window_left;
  s.window_right = call.window_right;
  s.kv_first_position = first_position;
  s.given = {};
  s.cache = call.cache_read ? call.cache_read : call.cache;
  s.growing = call.cache;
  s.scored = {nullptr, false, false, INT64_MAX};
  s.reads_all_keys = false;
  s.given_rope = call.rope;
  if (!call.sequences) return MHA_OK;
  mha_sequences &given = s.given;
  MHA_TRY(read_struct(report, "mha_sequences", call.sequences, &given));
  // Ignored without a cache and with a pool, as mha.h says.
  if (!s.cache || s.has_pool()) given.cache_sequences = nullptr;
  const Rules rules = {report, "sequences."};
  MHA_TRY(check_fields(rules, given));
  MHA_TRY(rules.at_most_one({{"block_table_stride", given.block_table_stride},
                             {"block_table_starts", given.block_table_starts}}));
  if (given.block_table_stride == 0) given.block_table_stride = given.block_table_entries;
  if (given.block_table_stride < given.block_table_entries)
    return report.invalid(
        "sequences.block_table_stride is %lld; set it to at least block_table_entries, %lld",
        lld(given.block_table_stride), lld(given.block_table_entries));
  const struct {
    const char *name;
    const void *array;
  } of_keys[] = {{"kv_lengths", given.kv_lengths},
                 {"kv_first_rows", given.kv_first_rows},
                 {"cu_seqlens_kv", given.cu_seqlens_kv}};
  for (const auto &array : of_keys) {
    if (!array.array || !(is_self || call.cache_read)) continue;
    return report.invalid(
        "sequences.%s is given, but %s; leave it NULL", array.name,
        is_self ? "the keys are the rows of query" : "no keys come with cache_read");
  }
  if (s.is_packed()) {
    if (call.batch > 1)
      return report.shape(
          "batch is %lld, but packed sequences are one batch of rows; set it to 1, and their "
          "number in sequences.count",
          lld(call.batch));
    if (given.count == 0 && call.batch > 0 && call.n_q > 0)
      return report.invalid(
          "sequences.count is 0; with cu_seqlens_q, set it to the number of sequences");
    if (call.batch > 0) s.batch = given.count;
  } else if (given.count != 0 && given.count != call.batch) {
    return report.shape(
        "sequences.count is %lld, but batch is %lld; set it to batch or 0, or give cu_seqlens_q",
        lld(given.count), lld(call.batch));
  }
  return check_packing(report, s);
}

mha_status check_sequences(Report report, const SequenceArguments &s, int64_t num_kv_heads,
                           int64_t head_dim, int64_t head_dim_v, mha_rope *rope) {
  MHA_TRY(check_flags(report, s));
  MHA_TRY(check_rope(report, s.given_rope, head_dim, rope));
  MHA_TRY(check_cache_fits(report, s, num_kv_heads, head_dim, head_dim_v));
  // Without a cache and without lengths the counts of rows are known already, so that a query
  // before the first key is found without reading an array.
  const bool knows_counts = !s.given.q_first_positions && !s.is_ragged() && !s.cache;
  if (knows_counts && s.n_q > s.n_kv && has_positions(s))
    return report.shape(
        "n_q %lld is more than n_kv %lld, so that with %s queries would be before the first key; "
        "give sequences.q_first_positions",
        lld(s.n_q), lld(s.n_kv),
        s.is_causal()        ? "MHA_CAUSAL"
        : s.has_window()     ? "a window"
        : s.scored.distances ? s.scored.distances
                             : "rope");
  return MHA_OK;
}

mha_status check_query_rows(Report report, const SequenceArguments &s, const char *rows_name) {
  const mha_sequences &given = s.given;
  MHA_TRY(check_packed(report, "cu_seqlens_q", given.cu_seqlens_q, s.batch, rows_name, s.n_q));
  return check_rows(report, "q", given.q_lengths, given.q_first_rows, s.batch, rows_name, s.n_q);
}

// From the general to the particular: cu_seqlens, lengths and first rows, the sequences of the
// cache, then sequence by sequence the room there and the positions.
mha_status check_sequence_arrays(Report report, const SequenceArguments &s) {
  const mha_sequences &given = s.given;
  // Most calls have no such array.
  if (!given.q_first_positions && !s.is_ragged() && !s.cache && !s.has_rope()) return MHA_OK;
  MHA_TRY(check_query_rows(report, s, "n_q"));
  MHA_TRY(check_packed(report, "cu_seqlens_kv", given.cu_seqlens_kv, s.batch, "n_kv", s.n_kv));
  MHA_TRY(check_rows(report, "kv", given.kv_lengths, given.kv_first_rows, s.batch, "n_kv", s.n_kv));
  const bool has_rope_positions =
      s.has_rope() && (given.rope_q_positions || given.rope_k_positions);
  // Where no array tells sequences apart, the checks of the first one hold for all.
  const bool are_alike =
      !given.q_first_positions && !s.is_ragged() && !s.cache && !has_rope_positions;
  if (given.cache_sequences) MHA_TRY(check_cache_sequences(report, s));
  if (s.has_pool()) MHA_TRY(check_tables(report, s));
  for (int64_t b = 0; b < s.batch && !(are_alike && b > 0); ++b) {
    if (s.growing && !s.has_pool())
      MHA_TRY(check_append(report, s.cache, in_cache(s, b), keys_of(s, b)));
    // Self-attention appends its rows to the cache, so their positions follow from its length.
    if (s.growing && given.q_first_positions && s.is_self && has_positions(s) &&
        queries_of(s, b) > 0 && given.q_first_positions[b] != past_of(s, b)) {
      return report.invalid(
          "sequences.q_first_positions[%lld] is %lld, but self-attention appends the rows at "
          "position %lld; leave it NULL",
          lld(b), lld(given.q_first_positions[b]), lld(past_of(s, b)));
    }
    if (start_of(s, b) < min_position)
      return report.invalid(
          "sequences.q_first_positions[%lld] is %lld; it must be at least %s-2^62", lld(b),
          lld(given.q_first_positions[b]), s.kv_first_position != 0 ? "kv_first_position " : "");
    if (start_of(s, b) < 0 && !given.q_first_positions && !given.kv_first_rows)
      return report.shape(
          "sequence %lld has more queries, %lld, than keys, %lld, so that some would be before the "
          "first key; give sequences.q_first_positions",
          lld(b), lld(queries_of(s, b)), lld(past_of(s, b) + keys_of(s, b)));
    if (s.is_ring()) MHA_TRY(check_ring(report, s, b));
    for (int of_keys = 0; s.has_rope() && of_keys < 2; ++of_keys) {
      MHA_TRY(check_rope_positions(report, s, b, of_keys != 0));
    }
  }
  return MHA_OK;
}

// An entry names a key, or a block of keys, of its own sequence.
mha_status check_chosen_entries(Report report, const SequenceArguments &s, const ChosenKeys &chosen,
                                int64_t num_kv_heads) {
  if (!chosen.lists.base) return MHA_OK;
  const int64_t heads = chosen.lists.head_stride != 0 ? num_kv_heads : 1;
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
      if (entries == 0)
        return report.invalid(
            "score_arrays.chosen_keys[%lld, %lld, %lld, %lld] (sequence, kv head, row, entry) is "
            "%d; it must be -1, as the sequence has no keys",
            lld(in_arrays), lld(head), lld(row), lld(wrong), list[wrong]);
      return report.invalid(
          "score_arrays.chosen_keys[%lld, %lld, %lld, %lld] (sequence, kv head, row, entry) is %d; "
          "it must be less than %lld, or -1 for unused",
          lld(in_arrays), lld(head), lld(row), lld(wrong), list[wrong], lld(entries));
    }
  }
  return MHA_OK;
}

}  // namespace mha
