// Pools: what mha_kv_pool_init and calls refuse, and which entries of block tables calls need.
// Their bits are those of paged caches: generated_test.cpp compares both.
#include "support/pool.h"

#include <gtest/gtest.h>
#include <mha.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "interface/calls.h"
#include "support/instruction_sets.h"
#include "support/same_bits.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Two sequences of n rows, which the cache gets.
AttentionProblem Problem(int64_t n, Storage k_type, Storage v_type) {
  AttentionSizes sizes;
  sizes.batch = 2;
  sizes.n_q = sizes.n_kv = n;
  sizes.num_heads = 4;
  sizes.num_kv_heads = 2;
  sizes.head_dim = 5;
  sizes.head_dim_v = 3;
  sizes.is_causal = true;
  sizes.k_type = k_type;
  sizes.v_type = v_type;
  return NormalAttention(sizes);
}

// A paged cache for it, in which the sequences hold some positions.
Cache Filled(const AttentionSizes &sizes, int64_t block_positions, int64_t capacity, int64_t first,
             int64_t second) {
  Cache cache(CacheConfigOf(sizes, {MHA_CACHE_KIND_PAGED, block_positions}, 2, capacity));
  Random random(4);
  SpreadBlocks(&random, &cache);
  cache.Append(0, {random.Normals(first * 2 * 5), random.Normals(first * 2 * 3)});
  cache.Append(1, {random.Normals(second * 2 * 5), random.Normals(second * 2 * 3)});
  return cache;
}

// ---- Making a pool

struct Making {
  Making() {
    config.kind = MHA_CACHE_KIND_POOL;
    pool.k = memory.data();
    pool.v = memory.data() + (1 << 14);
    pool.k_scales = reinterpret_cast<float *>(memory.data() + (1 << 15));
    pool.v_scales = reinterpret_cast<float *>(memory.data() + (1 << 16));
  }
  mha_status operator()(mha_error *error) const {
    return mha_kv_pool_init(&config, &pool, buffer.data(), buffer.size(), &cache, error);
  }
  Memory memory{1 << 17, Place::kAnywhere};
  mutable Memory buffer{256, Place::kBeforeGuard, 64};
  mha_kv_cache_config config =
      CacheConfigOf(Problem(1, Storage::kInt8, Storage::kInt8), {MHA_CACHE_KIND_PAGED, 16}, 2, 48);
  mha_kv_pool pool = Zeroed<mha_kv_pool>();
  mutable mha_kv_cache *cache = nullptr;
};

TEST(Pool, WrongMemoryIsNamedAndNothingIsWritten) {
  // A block has 2 * 16 * 5 bytes of keys, 2 * 16 * 16 of values and 2 * 16 * 4 of scales.
  const struct {
    std::function<void(Making &)> change;
    Expected expected;
  } table[] = {
      {[](Making &m) { m.config.kind = MHA_CACHE_KIND_PAGED; },
       {MHA_ERROR_INVALID_VALUE, {1}, {"MHA_CACHE_KIND_POOL"}}},
      {[](Making &m) { m.pool.k = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"k is NULL"}}},
      {[](Making &m) { m.config.k_type = MHA_TYPE_F16; },
       {MHA_ERROR_INVALID_VALUE, {2}, {"k_scales is given"}}},
      {[](Making &m) {
         m.config.value_place = MHA_CACHE_VALUES_IN_KEYS;
         m.pool.v_scales = nullptr;
       },
       {MHA_ERROR_INVALID_VALUE, {2}, {"v is given"}}},
      {[](Making &m) { m.pool.v = static_cast<char *>(m.pool.v) + 32; },
       {MHA_ERROR_INVALID_VALUE, {2}, {"v is not aligned to 64 bytes"}}},
      {[](Making &m) { m.pool.k_block_stride = 144; },
       {MHA_ERROR_INVALID_VALUE, {2}, {"k_block_stride", "144", "160"}}},
      {[](Making &m) { m.pool.v_scales_block_stride = 136; },
       {MHA_ERROR_INVALID_VALUE, {2}, {"v_scales_block_stride", "136", "16"}}},
      {[](Making &m) { m.pool.v_block_stride = INT64_MAX / 16 * 16; },
       {MHA_ERROR_TOO_LARGE, {2}, {"v would exceed the address space"}}},
      {[](Making &m) { m.pool.v = static_cast<char *>(m.pool.k) + 1408; },  // the last block
       {MHA_ERROR_INVALID_VALUE, {2}, {"k and v overlap"}}},
      {[](Making &m) {  // a page of 640 bytes: 160 of keys, and 512 of values from byte 192 on
         m.pool.v = static_cast<char *>(m.pool.k) + 192;
         m.pool.k_block_stride = m.pool.v_block_stride = 640;
       },
       {MHA_ERROR_INVALID_VALUE, {2}, {"k and v overlap"}}},
      {[](Making &m) { m.pool.k_scales = m.pool.v_scales; },
       {MHA_ERROR_INVALID_VALUE, {2}, {"k_scales and v_scales overlap"}}},
  };
  for (const auto &row : table) {
    Making making;
    making.memory.Fill(0x5a);
    making.buffer.Fill(0x5a);
    row.change(making);
    SCOPED_TRACE(&row - table);
    ExpectFails(making, row.expected);
    EXPECT_TRUE(making.buffer.Holds(0x5a) && making.memory.Holds(0x5a));
    EXPECT_EQ(making.cache, nullptr);
  }
  Making making;
  making.pool.v = static_cast<char *>(making.pool.k) + 192;
  making.pool.k_block_stride = making.pool.v_block_stride = 704;
  ExpectSucceeds(making);
}

TEST(Pool, HasNoStateToChangeSaveOrView) {
  Making making;
  mha_error error;
  ASSERT_EQ(making(&error), MHA_OK) << error.message;
  int64_t length = 0;
  const Expected refused = {MHA_ERROR_INVALID_VALUE, {1}, {"pool", "with each call"}};
  ExpectFails(refused, mha_kv_cache_length, making.cache, 0, &length);
  ExpectFails(refused, mha_kv_cache_truncate, making.cache, 0, 0);
  ExpectFails(refused, mha_kv_cache_set_blocks, making.cache, 0, nullptr, 0);
  ExpectFails(refused, mha_kv_cache_append, making.cache, 0, 0, nullptr, nullptr);
  ExpectFails(refused, mha_kv_cache_read, making.cache, 0, 0, 0, nullptr, nullptr);
  mha_kv_cache *viewed = nullptr;
  ExpectFails({MHA_ERROR_CACHE_FORMAT, {1}, {"pool", "mha_kv_pool_init"}}, mha_kv_cache_view,
              making.buffer.data(), making.buffer.size(), &viewed);
  ExpectFails({MHA_ERROR_INVALID_VALUE, {1}, {"MHA_CACHE_KIND_POOL", "mha_kv_pool_init"}},
              mha_kv_cache_init, &making.config, making.buffer.data(), making.buffer.size(),
              &viewed);
}

// ---- Calls

// Sequences of 20 and 5 positions get 14 rows each, the first one in three blocks of 16.
struct PoolCall {
  PoolCall() {
    Random random(1);
    pool = std::make_unique<Pool>(paged, &random);
    AttentionCall call;
    call.asked = kAskLse;
    call.cache.cache = pool->get();
    data = std::make_unique<AttentionData>(problem, call);
    data->sequences.cache_lengths = lengths;
    data->sequences.block_tables = tables;
    data->sequences.block_table_entries = 3;
  }
  mha_sequences *SetStarts(int64_t a, int64_t b, int64_t c) {
    starts[0] = a, starts[1] = b, starts[2] = c;
    data->sequences.block_table_starts = starts;
    data->sequences.block_table_entries = 6;
    return &data->sequences;
  }
  AttentionProblem problem = Problem(14, Storage::kF16, Storage::kInt8);
  Cache paged = Filled(problem, 16, 48, 20, 5);
  std::unique_ptr<Pool> pool;
  std::unique_ptr<AttentionData> data;
  int64_t lengths[2] = {20, 5}, starts[3];
  int32_t tables[6] = {4, 7, 1, 2, 0, 8};
};

TEST(Pool, WrongLengthsAndTablesAreNamedAndNothingIsWritten) {
  const struct {
    std::function<void(PoolCall &)> change;
    Expected expected;
  } table[] = {
      {[](PoolCall &c) { c.data->sequences.cache_lengths = nullptr; },
       {MHA_ERROR_NULL_POINTER, {1}, {"cache_lengths is NULL", "pool"}}},
      {[](PoolCall &c) { c.data->sequences.block_tables = nullptr; },
       {MHA_ERROR_NULL_POINTER, {1}, {"block_tables is NULL", "pool"}}},
      {[](PoolCall &c) { c.lengths[1] = -1; },
       {MHA_ERROR_INVALID_VALUE, {1}, {"cache_lengths[1]", "-1", "48"}}},
      {[](PoolCall &c) { c.lengths[0] = 35; },
       {MHA_ERROR_CACHE_FULL, {1}, {"sequence 0", "35", "14", "48"}}},
      {[](PoolCall &c) { c.data->sequences.block_table_entries = 2; },
       {MHA_ERROR_CACHE_FULL, {1}, {"sequence 0 needs 3 blocks for 34 positions", "2 entries"}}},
      {[](PoolCall &c) { c.data->sequences.block_table_stride = 2; },
       {MHA_ERROR_INVALID_VALUE, {1}, {"block_table_stride", "2", "3"}}},
      {[](PoolCall &c) { c.data->sequences.block_table_stride = INT64_MAX / 2; },
       {MHA_ERROR_TOO_LARGE, {1}, {"block_tables", "address space"}}},
      {[](PoolCall &c) { c.SetStarts(0, 3, 6)->block_table_stride = 3; },
       {MHA_ERROR_INVALID_VALUE, {1}, {"block_table_stride", "block_table_starts"}}},
      {[](PoolCall &c) { c.SetStarts(0, 3, 7); },
       {MHA_ERROR_INVALID_VALUE, {1}, {"block_table_starts[1]", "3", "7", "6"}}},
      {[](PoolCall &c) { c.SetStarts(-1, 3, 6); },
       {MHA_ERROR_INVALID_VALUE, {1}, {"block_table_starts[0]", "-1"}}},
      {[](PoolCall &c) { c.SetStarts(0, 2, 6); },
       {MHA_ERROR_CACHE_FULL, {1}, {"sequence 0 needs 3 blocks", "2 entries"}}},
      {[](PoolCall &c) { c.tables[0] = -1; },
       {MHA_ERROR_INVALID_VALUE, {1}, {"entry 0", "sequence 0", "-1", "0 to 8"}}},
      {[](PoolCall &c) { c.tables[4] = 9; },
       {MHA_ERROR_INVALID_VALUE, {1}, {"entry 1", "sequence 1", "9", "0 to 8"}}},
      {[](PoolCall &c) { c.tables[3] = 7; },
       {MHA_ERROR_CACHE_SHARED, {1}, {"block 7", "sequence 0 and by sequence 1"}}},
      {[](PoolCall &c) { c.tables[2] = 7; },
       {MHA_ERROR_CACHE_SHARED, {1}, {"block 7", "sequence 0 and by sequence 0"}}},
  };
  for (const auto &row : table) {
    PoolCall call;
    row.change(call);
    SCOPED_TRACE(&row - table);
    Memory workspace(1 << 20);
    call.data->PoisonOutputs();
    ExpectFails([&](auto *error) { return call.data->Run(workspace.data(), 1 << 20, error); },
                row.expected);
    EXPECT_TRUE(call.data->OutputsAreUntouched() && call.pool->HoldsTheBytesOf(call.paged));
  }
  PoolCall call;
  call.tables[5] = -1;  // 19 positions are in two blocks
  call.tables[3] = 4;   // a full block, which both read and none writes to
  call.lengths[1] = 16;
  call.data->Compute();
}

TEST(Pool, EntriesBeforeTheWindowAreUsedForOutputsPerPairAlone) {
  for (const uint32_t set : SetsOfTheArchitecture(Sets::kWithKernels)) {
    if ((mha_instruction_sets() >> set & 1) == 0) continue;
    for (const Storage type : {Storage::kF32, Storage::kF16, Storage::kInt8}) {
      for (const int64_t n : {1, 70}) {
        SCOPED_TRACE(testing::Message() << set << " " << static_cast<int>(type) << " " << n);
        AttentionProblem problem = Problem(n, type, type);
        problem.window_left = 40;
        Cache paged = Filled(problem, 48, 480, 330, 330);
        Random random(1);
        Pool pool(paged, &random);
        AttentionCall call;
        call.asked = kAskLse;
        call.instruction_set = set;
        call.cache.cache = paged.get();
        const Outputs expected = AttentionData(problem, call).Compute();
        // The first query is at 330, and its window begins at 290, in block 6.
        for (const int64_t unused : {6, 7}) {
          call.cache.cache = pool.get();
          AttentionData data(problem, call);
          pool.SetSequences({}, 2, paged, unused, &data.sequences);
          if (unused == 7) {
            EXPECT_THROW(data.Compute(), std::runtime_error);
            continue;
          }
          EXPECT_TRUE(SameBits(data.Compute(), expected));
          EXPECT_TRUE(pool.HoldsTheBytesOf(paged));
        }
        call.asked = kAskScores;  // of all keys
        call.cache.columns = 330 + n;
        AttentionData with_scores(problem, call);
        pool.SetSequences({}, 2, paged, 1, &with_scores.sequences);
        EXPECT_THROW(with_scores.Compute(), std::runtime_error);
      }
    }
  }
}

}  // namespace
