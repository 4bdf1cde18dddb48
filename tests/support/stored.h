// What a cache stores.
#ifndef MHA_TESTS_SUPPORT_STORED_H
#define MHA_TESTS_SUPPORT_STORED_H

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "support/cache.h"
#include "support/fixtures.h"
#include "support/same_bits.h"
#include "support/specify.h"

namespace support {

// Sequence b's rows first .. first + count as a cache stores them and hands them out again.
inline KeysAndValues SpecifyStored(const AttentionProblem &history, int64_t b, int64_t first,
                                   int64_t count) {
  const spec::Functions &functions = spec::Fastest();
  KeysAndValues rows;
  rows.k =
      SliceRows(history.k, b, history.n_kv, history.num_kv_heads * history.head_dim, first, count);
  rows.v = SliceRows(history.v, b, history.n_kv, history.num_kv_heads * history.head_dim_v, first,
                     count);
  WithRotation(history, b, [&](const Rotation *rotation) {
    for (int64_t j = 0; rotation && j < count; j++) {
      functions.rotate(*rotation,
                       rotation->k_positions ? rotation->k_positions[first + j] : first + j,
                       history.num_kv_heads, history.head_dim,
                       rows.k.data() + j * history.num_kv_heads * history.head_dim);
    }
  });
  KeysAndValues stored = rows;
  const AttentionShape shape = ShapeOf(history, b);
  functions.store(shape, true, rows.k.data(), count * shape.num_kv_heads, stored.k.data());
  functions.store(shape, false, rows.v.data(), count * shape.num_kv_heads, stored.v.data());
  for (int64_t row = 0; history.values_in_keys && row < count * history.num_kv_heads; row++) {
    std::copy_n(stored.k.begin() + row * history.head_dim, history.head_dim_v,
                stored.v.begin() + row * history.head_dim_v);
  }
  return stored;
}

inline testing::AssertionResult SameBits(const KeysAndValues &actual,
                                         const KeysAndValues &expected) {
  const testing::AssertionResult k = SameBits("k", actual.k, expected.k);
  return k ? SameBits("v", actual.v, expected.v) : k;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_STORED_H
