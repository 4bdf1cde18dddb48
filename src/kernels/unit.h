// A unit of work of the attention: a block of queries of all the query heads that share one kv
// head, and the keys that its rows attend to. Of few rows it may have several kv heads.
//
// Unit says where everything of such a unit lies: its rows, their positions, the keys that window
// and causal mask leave to each row, the queries and partials in scratch memory, and the places in
// the outputs. It is built at the start of a call of `attend` and const from then on, and nearly
// every function of the attention takes it first.
#pragma once

#include "elements.h"
#include "tile.h"

namespace mha {
namespace {

constexpr int64_t max_positions = INT64_MAX;

// One row of a unit: one query of one query head. Its numbers are kept together because dividing
// the index anew for each use would cost more than stepping from row to row.
struct Row {
  int64_t index;  // within the unit
  int64_t query;  // within the sequence
  int64_t head;
};

// Keys, chunks or tiles from `begin` up to, but without, `end`.
struct Range {
  int64_t begin, end;
};

// Rows go query by query, and for each query head by head: row r is query query_begin + r /
// computed_heads of query head first_head + r % computed_heads. Neighbours therefore have almost
// the same keys to attend to, and later rows never have earlier keys. Heads whose scale is 0 are
// left out; `computed_heads` counts the rest.
struct Unit {
  const Attention &call;
  const Sequence &sequence;
  int64_t sequence_index;  // in the caller's arrays and the outputs
  int64_t kv_head, query_begin, queries;
  int64_t heads_per_kv;          // query heads that share the kv head
  int64_t computed_heads;        // those of them that are computed
  int64_t first_head, end_head;  // the first of these, and the end of all
  int64_t num_rows;
  // Units that read plain rows may have several kv heads, one after the other, with this many rows
  // of each. The last row stands in for one that is missing to an even number. 0: all other units.
  int64_t rows_per_kv;
  bool has_groups;  // its rows are not just those of one kv head
  float *scratch;
  // With chosen keys the unit has one query, and this is its list: the numbers of the blocks of
  // keys in ascending order. Its keys then count by rank, their place in the list, and `ranks` are
  // the keys of the query. Null: keys count by position.
  const int32_t *blocks;
  Range ranks;

  // The row with this index. The division has 32 bits, which is faster.
  MHA_INLINE Row row(int64_t index) const {
    if (has_groups) return row_of_group(index);
    if (computed_heads == 1) return {index, query_begin + index, first_head};
    const uint32_t query = static_cast<uint32_t>(index) / static_cast<uint32_t>(computed_heads);
    const int64_t place = index - query * computed_heads;
    return {index, query_begin + query,
            computed_heads == heads_per_kv ? first_head + place : computed_head(first_head, place)};
  }
  MHA_NOINLINE Row row_of_group(int64_t index) const {
    const int64_t group = index / rows_per_kv,
                  place = min(index - group * rows_per_kv, queries * heads_per_kv - 1),
                  query = place / heads_per_kv;
    return {index, query_begin + query,
            first_head + group * heads_per_kv + place - query * heads_per_kv};
  }
  // Steps to the next row.
  MHA_INLINE void advance(Row *row) const {
    ++row->index;
    if (has_groups) return static_cast<void>(*row = row_of_group(row->index));
    ++row->head;
    if (computed_heads != heads_per_kv) row->head = computed_head(row->head, 0);
    if (row->head < end_head) return;
    row->head = first_head;
    ++row->query;
  }
  // The computed head that follows `before` other computed ones from `head` on, or end_head.
  MHA_NOINLINE int64_t computed_head(int64_t head, int64_t before) const {
    while (head < end_head && (!is_computed(head) || before-- != 0)) ++head;
    return head;
  }
  // Calls function(row) for the rows of the heads that are left out.
  template <class Function>
  MHA_INLINE void for_each_left_out(const Function &function) const {
    for (int64_t i = 0; i < queries * heads_per_kv; ++i) {
      const Row row = {0, query_begin + i / heads_per_kv,
                       end_head - heads_per_kv + i % heads_per_kv};
      if (!is_computed(row.head)) function(row);
    }
  }
  MHA_INLINE bool is_computed(int64_t head) const {
    return !call.request.options.head_scales || call.request.options.head_scales[head] != 0.0f;
  }

  // The position of the row in its sequence, at most max_positions: q_start may be as large as an
  // int64_t can be, so it is compared before anything is added.
  MHA_INLINE int64_t position_of(const Row &row) const {
    const int64_t start = sequence.q_start;
    return start > max_positions - row.query ? max_positions : start + row.query;
  }

  // The keys that a window leaves to a row; later rows have later ones. The limits of the window
  // may be as large as an int64_t can be, too.
  MHA_INLINE Range keys_in_window(const Row &row, int64_t left, int64_t right) const {
    const int64_t n = sequence.end_of_columns, position = position_of(row);
    const int64_t end = position >= n - 1 - right ? n : position + right + 1;  // negative: none
    return {position > left ? min(position - left, end) : 0, end};
  }
  // The keys that positions leave to a row. Masks, segments and biases may leave fewer.
  MHA_INLINE Range keys_of(const Row &row) const {
    return blocks ? ranks
                  : keys_in_window(row, call.request.window_left, call.request.window_right);
  }

  // The position of a key, and how many keys from this one on have positions that follow each
  // other.
  MHA_INLINE int64_t position_of_key(int64_t key) const {
    if (!blocks) return key;
    const int64_t size = call.request.options.chosen.block,
                  entry = size == 1 ? key : quotient(key, size);
    return blocks[entry] * size + key - entry * size;
  }
  MHA_INLINE int64_t run_of_keys(int64_t key) const {
    if (!blocks) return max_positions;
    const int64_t size = call.request.options.chosen.block;
    return size == 1 ? 1 : size - key % size;
  }
  // Whether a tile of 16 keys may hold keys that are no neighbours, which then come one by one.
  MHA_INLINE bool gathers_keys() const {
    return blocks && call.request.options.chosen.block % tile_keys != 0;
  }

  // The query of a row, prepared and scaled, in scratch memory. In integers these are pairs of
  // words, followed by their scale.
  MHA_INLINE float *q(int64_t index) const {
    return scratch + call.plan.scratch.queries + index * call.plan.query_stride;
  }

  // The partial of a row in one of the slots: o, its unnormalised context; m, its greatest score;
  // and l, its sum of exp(score - m).
  MHA_INLINE float *o(int64_t slot, int64_t index) const {
    return scratch + call.plan.scratch.partials + slot * call.plan.scratch.partial_stride +
           index * call.plan.head_dim_v_padded;
  }
  MHA_INLINE float *m(int64_t slot, int64_t index) const {
    return o(slot, num_rows + spare_rows) + index;
  }
  MHA_INLINE float *l(int64_t slot, int64_t index) const {
    return m(slot, num_rows) + merge_rows + index;
  }

  // The row's number in the caller's array of queries and in the outputs, and where it lies there.
  MHA_INLINE int64_t array_row(const Row &row) const { return sequence.q_first + row.query; }
  MHA_INLINE const void *input(const Row &row) const {
    return element_at(call.arrays.q.base, call.arrays.q.storage,
                      sequence_index * call.arrays.q.batch_stride +
                          array_row(row) * call.arrays.q.row_stride +
                          row.head * call.arrays.q.head_stride);
  }
  MHA_INLINE void *output(const Row &row) const {
    return element_at(call.arrays.output.base, call.arrays.output.storage,
                      sequence_index * call.arrays.output.batch_stride +
                          array_row(row) * call.arrays.output.row_stride +
                          row.head * call.arrays.output.head_stride);
  }
  // The row in the output `context`; null if that was not asked for.
  MHA_INLINE float *context_tap(const Row &row) const {
    if (!call.request.context) return nullptr;
    return call.request.context +
           ((sequence_index * call.request.n_q + array_row(row)) * call.request.num_heads +
            row.head) *
               call.request.head_dim_v;
  }
  // The number of the row in an output [batch, num_heads, n_q].
  MHA_INLINE int64_t output_row(const Row &row) const {
    return (sequence_index * call.request.num_heads + row.head) * call.request.n_q + array_row(row);
  }
};

// Leaves out the heads whose scale is 0.
MHA_NOINLINE inline void leave_out_heads(Unit *unit) {
  unit->computed_heads = 0;
  for (int64_t head = unit->first_head; head < unit->end_head; ++head)
    unit->computed_heads += unit->is_computed(head);
  unit->num_rows = unit->queries * unit->computed_heads;
  unit->first_head = unit->computed_head(unit->first_head, 0);
}

// The unit of some queries of a sequence. heads: query heads of each kv head.
MHA_INLINE Unit unit_of(const Attention &call, const Sequence &sequence, int64_t kv_head,
                        int64_t query_begin, int64_t queries, int64_t heads, float *scratch) {
  const int64_t first = kv_head * heads, rows = queries * heads;
  Unit unit = {call,    sequence, sequence.in_arrays, kv_head, query_begin, queries, heads,
               heads,   first,    first + heads,      rows,    0,           false,   scratch,
               nullptr, {0, 0}};
  if (call.request.options.head_scales) leave_out_heads(&unit);
  return unit;
}

// The unit of a block of queries. It has no rows if the sequence is shorter.
MHA_INLINE Unit unit_of(const Attention &call, int64_t sequence_index, int64_t kv_head,
                        int64_t block, float *scratch) {
  const Sequence &sequence = call.run.sequences[sequence_index];
  const int64_t query_begin = block * call.run.block_queries,
                queries = max(0, min(call.run.block_queries, sequence.n_q - query_begin));
  return unit_of(call, sequence, kv_head, query_begin, queries, call.request.heads_per_kv, scratch);
}

// Makes the unit one that reads plain rows, of some more kv heads.
MHA_INLINE void take_rows(Unit *unit) {
  const AttentionRequest &request = unit->call.request;
  const int64_t kv_heads = min(unit->call.run.unit_kv_heads, request.num_kv_heads - unit->kv_head);
  unit->rows_per_kv = padded_rows(unit->num_rows);
  unit->num_rows = unit->rows_per_kv * kv_heads;
  unit->has_groups = unit->num_rows != unit->queries * unit->heads_per_kv;
  unit->end_head = unit->first_head + kv_heads * unit->heads_per_kv;
}

// ---- Chosen keys

// Puts the list of a unit's query in order, after which the unit counts its keys by their ranks
// (CONTRACT.md, section 6); key_values.h finds the keys by these.
//
// Each entry of the list that the window leaves keys of sets one bit of a field with a bit for each
// block of keys. Reading the field in order gives the entries in order, each once.
MHA_NOINLINE inline void rank_keys(Unit *unit) {
  const ChosenKeys &chosen = unit->call.request.options.chosen;
  const Row row = unit->row(0);
  const Range window =
      unit->keys_in_window(row, unit->call.request.window_left, unit->call.request.window_right);
  int32_t *const blocks =
      reinterpret_cast<int32_t *>(unit->scratch + unit->call.plan.scratch.chosen_blocks);
  uint64_t *const bits =
      reinterpret_cast<uint64_t *>(unit->scratch + unit->call.plan.scratch.chosen_bits);
  unit->blocks = blocks;
  unit->ranks = {0, 0};
  if (window.begin >= window.end) return;
  const int64_t size = chosen.block, first = quotient(window.begin, size),
                count = quotient(window.end - 1, size) + 1 - first;
  const int64_t words = (count + 63) / 64;
  MHA_MEMSET(bits, 0, static_cast<size_t>(words) * sizeof *bits);
  const int32_t *const list = static_cast<const int32_t *>(chosen.lists.base) +
                              unit->sequence_index * chosen.lists.batch_stride +
                              unit->kv_head * chosen.lists.head_stride +
                              unit->array_row(row) * chosen.lists.row_stride;
  for (int64_t i = 0; i < chosen.count; ++i) {
    // An entry of -1 means no key: as an unsigned number it is too large.
    const uint64_t at = static_cast<uint64_t>(list[i]) - static_cast<uint64_t>(first);
    if (at < static_cast<uint64_t>(count)) bits[at / 64] |= uint64_t{1} << at % 64;
  }
  int64_t found = 0;
  for (int64_t word = 0; word < words; ++word) {
    for (uint64_t rest = bits[word]; rest != 0; rest &= rest - 1) {
      blocks[found++] = static_cast<int32_t>(first + word * 64 + lowest_bit(rest));
    }
  }
  if (found == 0) return;
  const int64_t begin = blocks[0] * size, last = blocks[found - 1] * size;
  unit->ranks = {max(0, window.begin - begin), (found - 1) * size + min(size, window.end - last)};
}

}  // namespace
}  // namespace mha
