// Chosen keys: the list of a unit's query put in order. From then on the unit counts its keys by their ranks (CONTRACT.md, section 6), by
// which key_values.h finds them.
#pragma once

#include "unit.h"

namespace mha {
namespace {

// Puts the entries that the flags leave keys of in order, each once, by a bit for each block of keys; then the unit has its ranks.
MHA_NOINLINE inline void rank_keys(Unit *unit) {
  const ChosenKeys &chosen = unit->call.options.chosen;
  const Row row = unit->row(0);
  const Range window = unit->keys_in_window(row, unit->call.window_left, unit->call.window_right);
  int32_t *const blocks = reinterpret_cast<int32_t *>(unit->scratch + unit->call.scratch.chosen_blocks);
  uint64_t *const bits = reinterpret_cast<uint64_t *>(unit->scratch + unit->call.scratch.chosen_bits);
  unit->blocks = blocks;
  unit->ranks = {0, 0};
  if (window.begin >= window.end) return;
  const int64_t size = chosen.block, first = quotient(window.begin, size), count = quotient(window.end - 1, size) + 1 - first;
  const int64_t words = (count + 63) / 64;
  MHA_MEMSET(bits, 0, static_cast<size_t>(words) * sizeof *bits);
  const int32_t *const list = static_cast<const int32_t *>(chosen.lists.base) + unit->sequence_index * chosen.lists.batch_stride +
                              unit->kv_head * chosen.lists.head_stride + unit->array_row(row) * chosen.lists.row_stride;
  for (int64_t i = 0; i < chosen.count; ++i) {
    const uint64_t at = static_cast<uint64_t>(list[i]) - static_cast<uint64_t>(first);  // of -1, which is none, too large
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
