// Wrong use of a cache returns an error message: the cache's bytes, the outputs and what a query
// would write stay as they were.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "interface/calls.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// Three sequences of 40 positions, two kv heads of 4 and 3 numbers.
mha_kv_cache_config Config(uint32_t kind = MHA_CACHE_KIND_CONTIGUOUS) {
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  config.num_sequences = 3;
  config.capacity = kind == MHA_CACHE_KIND_CONTIGUOUS ? 40 : 48;
  config.num_kv_heads = 2;
  config.head_dim = 4;
  config.head_dim_v = 3;
  config.k_type = MHA_TYPE_F16;
  config.v_type = MHA_TYPE_INT8;
  config.kind = kind;
  if (kind == MHA_CACHE_KIND_PAGED) {
    config.block_positions = 16;
    config.num_blocks = 10;
  }
  return config;
}

KeysAndValues Rows(int64_t count) {
  Random random(1);
  return {random.Normals(count * 2 * 4), random.Normals(count * 2 * 3)};
}

// Sequences 0 and 1 hold 20 and 5 positions, sequence 2 none. Paged: in the blocks 4, 7, 1 and 2,
// 0, 9; sequence 2 has no table.
Cache Filled(const mha_kv_cache_config &config) {
  Cache cache(config);
  if (config.kind == MHA_CACHE_KIND_PAGED) {
    cache.SetBlocks(0, {4, 7, 1});
    cache.SetBlocks(1, {2, 0, 9});
  }
  cache.Append(0, Rows(20));
  cache.Append(1, Rows(5));
  return cache;
}

// The call fails as expected, and leaves the cache as it is.
template <typename Call>
void ExpectFailsAndLeaves(const Cache &cache, const Call &call, const Expected &expected) {
  const std::string before = cache.buffer().Bytes();
  ExpectFails(call, expected);
  EXPECT_TRUE(cache.buffer().Bytes() == before) << "the cache was written";
}

// The same for a function of the library and its arguments, of which the last one is the error.
template <typename Function, typename... Args>
void ExpectFailsAndLeaves(const Cache &cache, const Expected &expected, const Function &function,
                          const Args &...args) {
  ExpectFailsAndLeaves(
      cache, [&](mha_error *error) { return function(args..., error); }, expected);
}

// The same of the functions that change or read a cache.
void ExpectNoAppend(const Cache &cache, int64_t sequence, int64_t count, const Expected &expected) {
  const KeysAndValues rows = Rows(64);
  ExpectFailsAndLeaves(cache, expected, mha_kv_cache_append, cache.get(), sequence, count,
                       rows.k.data(), rows.v.data());
}
void ExpectNoTruncation(const Cache &cache, int64_t sequence, int64_t length,
                        const Expected &expected) {
  ExpectFailsAndLeaves(cache, expected, mha_kv_cache_truncate, cache.get(), sequence, length);
}
void ExpectNoCopy(const Cache &cache, int64_t from, int64_t to, int64_t length,
                  const Expected &expected) {
  ExpectFailsAndLeaves(cache, expected, mha_kv_cache_copy_prefix, cache.get(), from, to, length);
}
void ExpectNoBlocks(const Cache &cache, int64_t sequence, const std::vector<int32_t> &blocks,
                    const Expected &expected) {
  SCOPED_TRACE(testing::PrintToString(blocks));
  const int64_t count = static_cast<int64_t>(blocks.size());
  ExpectFailsAndLeaves(cache, expected, mha_kv_cache_set_blocks, cache.get(), sequence,
                       blocks.data(), count);
}

// ---- Making a cache: mha_kv_cache_size and mha_kv_cache_init

constexpr uint32_t kContiguous = MHA_CACHE_KIND_CONTIGUOUS, kRing = MHA_CACHE_KIND_RING,
                   kPaged = MHA_CACHE_KIND_PAGED;

void ExpectNoCache(const mha_kv_cache_config &config, const Expected &expected) {
  size_t bytes = 4711;
  ExpectFails(expected, mha_kv_cache_size, &config, &bytes);
  EXPECT_EQ(bytes, 4711u);
  Memory buffer(1 << 16, Place::kAnywhere);
  buffer.Fill(0x5a);
  mha_kv_cache *const untouched = reinterpret_cast<mha_kv_cache *>(&bytes);
  mha_kv_cache *cache = untouched;
  ExpectFails(expected, mha_kv_cache_init, &config, buffer.data(), buffer.size(), &cache);
  EXPECT_TRUE(buffer.Holds(0x5a));
  EXPECT_EQ(cache, untouched);
}

TEST(CacheErrors, WrongConfigsAreNamedAndNothingIsWritten) {
  using Field = mha_kv_cache_config;
  const struct {
    uint32_t kind;
    int64_t Field::*field;
    const char *name;
    std::vector<int64_t> wrong, too_large;
  } numbers[] = {
      {kContiguous, &Field::capacity, "capacity", {}, {kMax}},
      {kRing, &Field::capacity, "16", {40}, {kMax / 16 * 16}},
      {kPaged, &Field::capacity, "block_positions", {40}, {}},
      {kPaged, &Field::block_positions, "block_positions", {0, 8, 24, 328}, {}},
      {kPaged, &Field::num_blocks, "num_blocks", {0}, {}},
      {kContiguous, &Field::block_positions, "block_positions", {16}, {}},
      {kRing, &Field::num_blocks, "num_blocks", {3}, {}},
  };
  for (const auto &row : numbers) {
    mha_kv_cache_config config = Config(row.kind);
    for (const int64_t value : row.wrong) {
      SCOPED_TRACE(row.name + (" " + std::to_string(value)));
      config.*row.field = value;
      if (value == 320) config.capacity = 320;
      ExpectNoCache(config, {MHA_ERROR_INVALID_VALUE, {1}, {row.name}});
    }
    for (const int64_t value : row.too_large) {
      SCOPED_TRACE(row.name + (" " + std::to_string(value)));
      config.*row.field = value;
      ExpectNoCache(config, {MHA_ERROR_TOO_LARGE, {1}, {}});
    }
  }
  mha_kv_cache_config in_keys = Config();
  in_keys.value_place = MHA_CACHE_VALUES_IN_KEYS;
  in_keys.v_type = 0;
  in_keys.head_dim_v = in_keys.head_dim + 1;
  ExpectNoCache(in_keys, {MHA_ERROR_SHAPE, {1}, {"head_dim_v"}});
  in_keys.head_dim_v = 0;
  in_keys.k_type = MHA_TYPE_F16;
  for (const uint32_t type : {MHA_TYPE_BF16, MHA_TYPE_INT4}) {
    in_keys.v_type = type;
    ExpectNoCache(in_keys, {MHA_ERROR_INVALID_VALUE, {1}, {"v_type"}});
  }
  in_keys.v_type = MHA_TYPE_F16;  // which they have
  size_t bytes = 0;
  ExpectSucceeds([&](mha_error *error) { return mha_kv_cache_size(&in_keys, &bytes, error); });
  mha_kv_cache_config config = Config();
  config.num_sequences = config.capacity = int64_t{1} << 30;  // their product overflows
  ExpectNoCache(config, {MHA_ERROR_TOO_LARGE, {1}, {}});
}

TEST(CacheErrors, InitNeedsAsManyBytesAsTheSizeQuerySays) {
  for (const uint32_t kind : {kContiguous, kRing, kPaged}) {
    const mha_kv_cache_config config = Config(kind);
    size_t bytes = 0;
    ASSERT_EQ(mha_kv_cache_size(&config, &bytes, nullptr), MHA_OK);
    Memory buffer(bytes, Place::kAnywhere);
    buffer.Fill(0x5a);
    const std::string before = buffer.Bytes();
    mha_kv_cache *cache = nullptr;
    for (const size_t too_few : {bytes - 1, size_t{256}, size_t{0}}) {
      ExpectFails({MHA_ERROR_BUFFER_TOO_SMALL, {3}, {std::to_string(bytes)}}, mha_kv_cache_init,
                  &config, buffer.data(), too_few, &cache);
    }
    EXPECT_TRUE(buffer.Bytes() == before);
    EXPECT_EQ(cache, nullptr);
  }
}

TEST(CacheErrors, InitWritesNothingWhereKeysAndValuesGo) {
  for (const uint32_t kind : {kContiguous, kRing, kPaged}) {
    const mha_kv_cache_config config = Config(kind);
    size_t bytes = 0;
    ASSERT_EQ(mha_kv_cache_size(&config, &bytes, nullptr), MHA_OK);
    Memory buffer(bytes, Place::kAnywhere);
    buffer.Fill(0x5a);
    mha_kv_cache *cache = nullptr;
    ASSERT_EQ(mha_kv_cache_init(&config, buffer.data(), bytes, &cache, nullptr), MHA_OK);
    const int64_t positions = kind == kPaged ? config.num_blocks * config.block_positions
                                             : config.num_sequences * config.capacity;
    // F16, int8 and its scale.
    const int64_t stored =
        positions * config.num_kv_heads * (2 * config.head_dim + config.head_dim_v + 4);
    EXPECT_GE(std::count(buffer.data(), buffer.data() + bytes, 0x5a), stored);
  }
}

TEST(CacheErrors, EveryMisalignedBufferIsRefused) {
  const mha_kv_cache_config config = Config();
  const Cache made = Filled(config);
  const size_t size = made.buffer().size();
  const Expected expected = {MHA_ERROR_INVALID_VALUE, {1, 2}, {"64"}};
  for (size_t offset = 1; offset < 64; offset++) {
    Memory buffer(size + 64, Place::kAnywhere);
    unsigned char *const bytes = buffer.data() + offset;
    std::memcpy(bytes, made.buffer().data(), size);
    const std::string before = buffer.Bytes();
    mha_kv_cache *cache = nullptr;
    ExpectFails(expected, mha_kv_cache_init, &config, bytes, size, &cache);
    ExpectFails(expected, mha_kv_cache_view, bytes, size, &cache);
    int64_t length = 4711;
    ExpectFails({MHA_ERROR_INVALID_VALUE, {1}, {"cache is not aligned to 64 bytes"}},
                mha_kv_cache_length, reinterpret_cast<const mha_kv_cache *>(bytes), 0, &length);
    EXPECT_EQ(length, 4711);
    EXPECT_TRUE(buffer.Bytes() == before);
    EXPECT_EQ(cache, nullptr);
  }
}

TEST(CacheErrors, NullPointersAreNamed) {
  const mha_kv_cache_config config = Config(kPaged);
  Cache cache = Filled(config);
  mha_kv_cache *c = cache.get(), *made = nullptr;
  Memory buffer(1 << 16, Place::kAnywhere);
  void *const bytes = buffer.data();
  const size_t size = buffer.size();
  float k[8], v[6];
  const int32_t block = 3;
  size_t needed = 0;
  int64_t length = 0;
  uint32_t used = 4711;
  mha_kv_cache_config shape = config;
  const auto expect = [&](uint32_t argument, const auto &call) {
    ExpectFailsAndLeaves(cache, call, {MHA_ERROR_NULL_POINTER, {argument}, {}});
  };
  using E = mha_error;
  expect(1, [&](E *e) { return mha_kv_cache_size(nullptr, &needed, e); });
  expect(2, [&](E *e) { return mha_kv_cache_size(&config, nullptr, e); });
  expect(1, [&](E *e) { return mha_kv_cache_init(nullptr, bytes, size, &made, e); });
  expect(2, [&](E *e) { return mha_kv_cache_init(&config, nullptr, size, &made, e); });
  expect(4, [&](E *e) { return mha_kv_cache_init(&config, bytes, size, nullptr, e); });
  expect(1, [&](E *e) { return mha_kv_cache_view(nullptr, size, &made, e); });
  expect(3, [&](E *e) { return mha_kv_cache_view(cache.buffer().data(), size, nullptr, e); });
  expect(1, [&](E *e) { return mha_kv_cache_shape(nullptr, &shape, e); });
  expect(2, [&](E *e) { return mha_kv_cache_shape(c, nullptr, e); });
  expect(1, [&](E *e) { return mha_kv_cache_length(nullptr, 0, &length, e); });
  expect(3, [&](E *e) { return mha_kv_cache_length(c, 0, nullptr, e); });
  expect(1, [&](E *e) { return mha_kv_cache_truncate(nullptr, 0, 0, e); });
  expect(1, [&](E *e) { return mha_kv_cache_unshare(nullptr, 0, 3, &used, e); });
  expect(4, [&](E *e) { return mha_kv_cache_unshare(c, 0, 3, nullptr, e); });
  expect(1, [&](E *e) { return mha_kv_cache_set_blocks(nullptr, 2, &block, 1, e); });
  expect(3, [&](E *e) { return mha_kv_cache_set_blocks(c, 2, nullptr, 1, e); });
  expect(1, [&](E *e) { return mha_kv_cache_copy_prefix(nullptr, 0, 1, 0, e); });
  expect(1, [&](E *e) { return mha_kv_cache_append(nullptr, 0, 1, k, v, e); });
  expect(4, [&](E *e) { return mha_kv_cache_append(c, 0, 1, nullptr, v, e); });
  expect(5, [&](E *e) { return mha_kv_cache_append(c, 0, 1, k, nullptr, e); });
  expect(1, [&](E *e) { return mha_kv_cache_read(nullptr, 0, 0, 1, k, v, e); });
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(used, 4711u);
}

// ---- Viewing a buffer

class CacheViewErrors : public testing::TestWithParam<uint32_t> {
 protected:
  static void ExpectRejected(void *buffer, size_t bytes, uint32_t argument = 1,
                             const Words &words = {}) {
    mha_kv_cache *cache = nullptr;
    const Few<uint32_t> arguments = {1, argument};
    ExpectFails({MHA_ERROR_CACHE_FORMAT, arguments, words}, mha_kv_cache_view, buffer, bytes,
                &cache);
    EXPECT_EQ(cache, nullptr);
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, CacheViewErrors, testing::Values(kContiguous, kRing, kPaged));

TEST_P(CacheViewErrors, ATruncatedBufferIsRejected) {
  const Cache cache = Filled(Config(GetParam()));
  const size_t size = cache.buffer().size();
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{8}, size_t{255}, size_t{256}, size / 2, size - 1}) {
    SCOPED_TRACE(bytes);
    // Bytes that are not there must not be read either.
    Memory memory(bytes, Place::kBeforeGuard, 64);
    if (bytes % 64 == 0) {
      std::memcpy(memory.data(), cache.buffer().data(), bytes);
      ExpectRejected(memory.data(), bytes, 2);
    }
    ExpectRejected(cache.buffer().data(), bytes, 2);
  }
}

TEST_P(CacheViewErrors, ALongerBufferIsAccepted) {
  const Cache cache = Filled(Config(GetParam()));
  Memory longer(cache.buffer().size() + 1000, Place::kAnywhere);
  longer.Fill(0x11);
  std::memcpy(longer.data(), cache.buffer().data(), cache.buffer().size());
  mha_kv_cache *view = nullptr;
  ExpectSucceeds([&](mha_error *error) {
    return mha_kv_cache_view(longer.data(), longer.size(), &view, error);
  });
}

TEST_P(CacheViewErrors, ABufferThatIsNoCacheIsRejected) {
  for (const int fill : {0x00, 0xff, 0x5a}) {
    Memory buffer(1 << 14, Place::kAnywhere);
    buffer.Fill(fill);
    ExpectRejected(buffer.data(), buffer.size());
    int64_t length = 4711;
    ExpectFails({MHA_ERROR_INVALID_VALUE, {1}, {"cache does not point to a KV cache"}},
                mha_kv_cache_length, reinterpret_cast<const mha_kv_cache *>(buffer.data()), 0,
                &length);
  }
}

// Magic, byte order, version, contract, sizes, checksum: no bit of the header may be another.
TEST_P(CacheViewErrors, AnyChangedBitOfTheHeaderIsNoticed) {
  const Cache cache = Filled(Config(GetParam()));
  for (size_t byte = 0; byte < 256; byte++) {
    for (int bit = 0; bit < 8; bit++) {
      unsigned char &at = cache.buffer().data()[byte];
      at = static_cast<unsigned char>(at ^ 1u << bit);
      mha_kv_cache *view = nullptr;
      ASSERT_EQ(mha_kv_cache_view(cache.buffer().data(), cache.buffer().size(), &view, nullptr),
                MHA_ERROR_CACHE_FORMAT)
          << "byte " << byte << " bit " << bit;
      at = static_cast<unsigned char>(at ^ 1u << bit);
    }
  }
  mha_kv_cache *view = nullptr;
  ExpectSucceeds([&](mha_error *error) {
    return mha_kv_cache_view(cache.buffer().data(), cache.buffer().size(), &view, error);
  });
}

// Of another contract, or with sizes that contradict each other, and yet with the checksum that the
// format says.
TEST_P(CacheViewErrors, AHeaderThatWasMadeUpIsNoticed) {
  const Cache cache = Filled(Config(GetParam()));
  unsigned char *const header = cache.buffer().data();
  const std::string good = cache.buffer().Bytes();
  const auto write_checksum = [&] {
    uint64_t words[31], sum = 0x9e3779b97f4a7c15u;
    std::memcpy(words, header, sizeof words);
    const auto add = [&](uint64_t word) {
      sum = (sum ^ word) * 0xff51afd7ed558ccdu;
      sum ^= sum >> 32;
    };
    for (const uint64_t word : words) add(word);
    add(0);
    std::memcpy(header + sizeof words, &sum, sizeof sum);
  };
  write_checksum();
  ASSERT_TRUE(cache.buffer().Bytes() == good) << "the checksum is not the one that this test knows";
  const struct {
    size_t offset;
    Words words;
  } formats[] = {{0, {"buffer does not hold a KV cache"}},
                 {8, {"has the other byte order"}},
                 {12, {"version 99 of the format", "reads version"}},
                 {16, {"arithmetic contract 99", "this library has"}}};
  for (const auto &[offset, words] : formats) {
    header[offset] = 99;
    if (offset == 16) ExpectRejected(header, good.size(), 1, {"its checksum is wrong"});
    write_checksum();
    ExpectRejected(header, good.size(), 1, words);
    std::memcpy(header, good.data(), good.size());
  }
  // contract, bytes, num_sequences, capacity, num_kv_heads, head_dim, head_dim_v, block_positions,
  // num_blocks, values, reserved
  for (const size_t offset : {16, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104}) {
    for (const unsigned char wrong : {0, 65, 255}) {
      std::memcpy(header, good.data(), good.size());
      if (header[offset] == wrong) continue;
      SCOPED_TRACE(std::to_string(wrong) + " at " + std::to_string(offset));
      header[offset] = wrong;
      write_checksum();
      ExpectRejected(header, good.size());
    }
  }
}

// Behind the header: the lengths, each with the largest length since the sequence was last empty,
// and the tables of blocks. What they say is where calls read and write, so a view does not trust
// them.
TEST_P(CacheViewErrors, LengthsAndTablesOutOfBoundsAreNoticed) {
  const Cache cache = Filled(Config(GetParam()));
  constexpr size_t kLengths = 256, kTables = 320, kCounts = 384;
  const auto expect_rejected = [&](size_t offset, auto value) {
    SCOPED_TRACE(testing::PrintToString(value) + " at " + std::to_string(offset));
    unsigned char before[sizeof value], *const at = cache.buffer().data() + offset;
    std::memcpy(before, at, sizeof value);
    std::memcpy(at, &value, sizeof value);
    ExpectRejected(cache.buffer().data(), cache.buffer().size());
    std::memcpy(at, before, sizeof value);
  };
  int64_t length = 0;
  std::memcpy(&length, cache.buffer().data() + kLengths, sizeof length);
  ASSERT_EQ(length, 20) << "the layout is not the one that this test knows";
  for (const int64_t sequence : {0, 2}) {
    for (const int64_t wrong : {int64_t{-1}, kMin})
      expect_rejected(kLengths + 16 * sequence, wrong);
    const int64_t most = GetParam() == kRing ? kMax / 2 : cache.config().capacity;
    for (const int64_t wrong : {most + 1, kMax}) {
      expect_rejected(kLengths + 16 * sequence, wrong);
      expect_rejected(kLengths + 16 * sequence, std::array{wrong, wrong});  // and written
    }
  }
  if (GetParam() != kPaged) return;
  int32_t block = 0;
  std::memcpy(&block, cache.buffer().data() + kTables, sizeof block);
  ASSERT_EQ(block, 4) << "the layout is not the one that this test knows";
  for (const int32_t wrong :
       {int32_t{10}, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    expect_rejected(kTables, wrong);
  }
  // Sequence 2 has no blocks, and no entry says where these positions would be.
  expect_rejected(kLengths + 32, std::array{cache.config().capacity, cache.config().capacity});
  expect_rejected(kTables + 24, int32_t{10});  // of the pool's 10, for no position
  expect_rejected(kTables, int32_t{-1});       // no block, where positions are held
  expect_rejected(kTables + 8, int32_t{-1});   // one block less than is counted
  expect_rejected(kTables + 24, int32_t{3});   // one more
  // The first block in the place of the second, and the second in that of the third: their counts
  // say that each is in one table alone, and calls would write into it.
  expect_rejected(kTables + 4, block);
  expect_rejected(kTables + 8, int32_t{7});
  // Block 4 in a second table, in the place of block 9, and counted there: 4 + 4 is not 9, either.
  const int32_t none = 0;
  std::memcpy(cache.buffer().data() + kCounts + 4 * 4, &none, sizeof none);
  expect_rejected(kTables + 20, block);
}

// ---- Sequences, positions, blocks

TEST(CacheErrors, SequencesThatDoNotExistAreNamed) {
  for (const uint32_t kind : {kContiguous, kRing, kPaged}) {
    const Cache cache = Filled(Config(kind));
    std::vector<float> k(8), v(6);
    int64_t length = 4711;
    for (const int64_t sequence : {int64_t{-1}, int64_t{3}, kMax, kMin}) {
      SCOPED_TRACE(sequence);
      const Expected second = {MHA_ERROR_INVALID_VALUE, {2}, {std::to_string(sequence)}};
      ExpectFailsAndLeaves(cache, second, mha_kv_cache_length, cache.get(), sequence, &length);
      ExpectFailsAndLeaves(cache, second, mha_kv_cache_read, cache.get(), sequence, 0, 0, k.data(),
                           v.data());
      ExpectNoTruncation(cache, sequence, 0, second);
      ExpectNoAppend(cache, sequence, 1, second);
      ExpectNoCopy(cache, sequence, 1, 0, second);
      ExpectNoCopy(cache, 0, sequence, 0,
                   {MHA_ERROR_INVALID_VALUE, {3}, {std::to_string(sequence)}});
      if (kind == kPaged) ExpectNoBlocks(cache, sequence, {3}, second);
    }
    EXPECT_EQ(length, 4711);
  }
}

TEST(CacheErrors, TruncatingBeyondTheLengthIsRefused) {
  for (const uint32_t kind : {kContiguous, kRing, kPaged}) {
    const Cache cache = Filled(Config(kind));
    for (const int64_t length : {int64_t{21}, int64_t{-1}, kMax, kMin}) {
      ExpectNoTruncation(cache, 0, length, {MHA_ERROR_INVALID_VALUE, {3}, {"20|at least 0"}});
    }
    EXPECT_EQ(cache.Length(0), 20);
  }
}

TEST(CacheErrors, AppendingMoreThanThereIsRoomForIsRefused) {
  for (const uint32_t kind : {kContiguous, kPaged}) {
    Cache cache = Filled(Config(kind));
    const int64_t room = cache.config().capacity - 20;
    ExpectNoAppend(cache, 0, room + 1, {MHA_ERROR_CACHE_FULL, {3}, {}});
    ExpectNoAppend(cache, 0, kMax, {MHA_ERROR_CACHE_FULL, {3}, {}});
    ExpectNoAppend(cache, 0, -1, {MHA_ERROR_INVALID_VALUE, {3}, {}});
    cache.Append(0, Rows(room));
    EXPECT_EQ(cache.Length(0), cache.config().capacity);
    ExpectNoAppend(cache, 0, 1, {MHA_ERROR_CACHE_FULL, {3}, {}});
    // Nothing more is nothing wrong.
    ExpectSucceeds(
        [&](mha_error *e) { return mha_kv_cache_append(cache.get(), 0, 0, nullptr, nullptr, e); });
  }
}

TEST(CacheErrors, AppendingBeyondTheTableOfBlocksIsRefused) {
  Cache cache = Filled(Config(kPaged));
  const Expected full = {MHA_ERROR_CACHE_FULL, {2, 3}, {}};
  ExpectNoAppend(cache, 2, 1, full);
  cache.SetBlocks(2, {5});
  ExpectNoAppend(cache, 2, 17, full);
  cache.Append(2, Rows(16));
  EXPECT_EQ(cache.Length(2), 16);
}

TEST(CacheErrors, ReadingPositionsThatAreNotHeldIsRefused) {
  for (const uint32_t kind : {kContiguous, kRing, kPaged}) {
    Cache cache = Filled(Config(kind));
    std::vector<float> k(64 * 8, kNan), v(64 * 6, kNan);
    const auto expect_rejected = [&](int64_t first, int64_t count) {
      SCOPED_TRACE(std::to_string(first) + " + " + std::to_string(count));
      ExpectFailsAndLeaves(cache, {MHA_ERROR_INVALID_VALUE, {3, 4}, {}}, mha_kv_cache_read,
                           cache.get(), 0, first, count, k.data(), v.data());
      EXPECT_TRUE(std::all_of(k.begin(), k.end(), [](float x) { return x != x; }));
      EXPECT_TRUE(std::all_of(v.begin(), v.end(), [](float x) { return x != x; }));
    };
    expect_rejected(0, 21);
    expect_rejected(20, 1);
    expect_rejected(-1, 1);
    expect_rejected(0, -1);
    expect_rejected(kMax, 1);
    expect_rejected(1, kMax);
    expect_rejected(kMin, kMin);
  }
}

// A ring has the last `capacity` positions that were ever written: neither truncating, nor
// appending after that, nor copying brings back what lay there before.
TEST(CacheErrors, PositionsThatARingHasOverwrittenDoNotComeBack) {
  struct Held {
    const char *what;
    int64_t sequence, oldest, length;
  };
  mha_kv_cache_config config = Config(kRing);  // of 48
  config.num_sequences = 4;
  Cache cache(config);
  cache.Append(0, Rows(50));
  cache.Append(1, Rows(50));
  cache.Truncate(1, 42);
  cache.CopyPrefix(0, 2, 45);
  cache.Append(3, Rows(60));
  cache.Truncate(3, 50);
  cache.Append(3, Rows(2));
  std::vector<float> k(64 * 8, kNan), v(64 * 6, kNan);
  for (const Held &held : {Held{"all", 0, 2, 50},
                           {"truncated", 1, 2, 42},
                           {"copied", 2, 2, 45},
                           {"truncated and grown", 3, 12, 52}}) {
    SCOPED_TRACE(held.what);
    for (int64_t first = 0; first < held.length; first++) {
      mha_error error = {};
      EXPECT_EQ(mha_kv_cache_read(cache.get(), held.sequence, first, 1, k.data(), v.data(),
                                  &error) == MHA_OK,
                first >= held.oldest)
          << first << ": " << error.message;
    }
  }
  mha_kv_cache *view = nullptr;
  ExpectSucceeds([&](mha_error *error) {
    return mha_kv_cache_view(cache.buffer().data(), cache.buffer().size(), &view, error);
  });
  // But a sequence that was emptied is as good as new.
  for (const bool by_copy : {false, true}) {
    if (by_copy) {
      cache.CopyPrefix(0, 2, 0);
    } else {
      cache.Truncate(2, 0);
    }
    cache.Append(2, Rows(40));
    ExpectSucceeds([&](mha_error *e) {
      return mha_kv_cache_read(cache.get(), 2, 0, 40, k.data(), v.data(), e);
    });
  }
}

TEST(CacheErrors, WrongTablesOfBlocksAreRefused) {
  Cache cache = Filled(Config(kPaged));
  const Expected entry = {MHA_ERROR_INVALID_VALUE, {3}, {}},
                 either = {MHA_ERROR_INVALID_VALUE, {3, 4}, {}};
  ExpectNoBlocks(cache, 2, {10}, {MHA_ERROR_INVALID_VALUE, {3}, {"10"}});
  ExpectNoBlocks(cache, 2, {3, -1}, {MHA_ERROR_INVALID_VALUE, {3}, {"blocks[1] is -1"}});
  ExpectNoBlocks(cache, 2, {3, std::numeric_limits<int32_t>::max()}, entry);
  ExpectNoBlocks(cache, 2, {3, 5, 6, 8}, either);  // more than capacity / block_positions
  ExpectFailsAndLeaves(cache, {MHA_ERROR_INVALID_VALUE, {4}, {}}, mha_kv_cache_set_blocks,
                       cache.get(), 2, nullptr, -1);
  // Sequence 0 holds 20 positions, in the first two of its blocks.
  for (const std::vector<int32_t> &moved : {std::vector<int32_t>{4}, {}, {4, 5, 1}, {7, 4}})
    ExpectNoBlocks(cache, 0, moved, either);
  cache.SetBlocks(0, {4, 7, 5});
  cache.SetBlocks(0, {4, 7});
  cache.Truncate(0, 16);
  cache.SetBlocks(0, {4, 3});
}

TEST(CacheErrors, BlocksAreForPagedCaches) {
  for (const uint32_t kind : {kContiguous, kRing})
    ExpectNoBlocks(Filled(Config(kind)), 2, {0}, {MHA_ERROR_INVALID_VALUE, {1}, {}});
}

// ---- Copy on write: mha_kv_cache_unshare

// Sequences 0 and 2 share their blocks 4 and 7, of which the second is partly filled.
Cache WithASharedLastBlock() {
  Cache cache = Filled(Config(kPaged));
  cache.SetBlocks(2, {4, 7, 3});
  cache.CopyPrefix(0, 2, 20);
  return cache;
}

// The sequence gets the block, and has the same positions as before.
void ExpectCopied(Cache *cache, int64_t sequence, int32_t block) {
  const int64_t length = cache->Length(sequence);
  const KeysAndValues before = cache->Read(sequence, 0, length);
  uint32_t used = 4711;
  ExpectSucceeds([&](mha_error *error) {
    // The second time, without an error struct, there is nothing left to copy.
    uint32_t now = 4711;
    const mha_status status = mha_kv_cache_unshare(cache->get(), sequence, block, &now, error);
    used = used == 4711 ? now : used + 10 * now;
    return status;
  });
  EXPECT_EQ(used, 1u);
  EXPECT_EQ(cache->Length(sequence), length);
  const KeysAndValues after = cache->Read(sequence, 0, length);
  EXPECT_EQ(before.k, after.k);
  EXPECT_EQ(before.v, after.v);
}

// Nothing is shared that is to be written: the call says so and changes nothing.
void ExpectNotCopied(const Cache &cache, int64_t sequence) {
  const std::string before = cache.buffer().Bytes();
  for (const int32_t block : {3, 5, 8}) {
    uint32_t used = 4711;
    ExpectSucceeds([&](mha_error *error) {
      return mha_kv_cache_unshare(cache.get(), sequence, block, &used, error);
    });
    EXPECT_EQ(used, 0u);
  }
  EXPECT_TRUE(cache.buffer().Bytes() == before) << "the cache was written";
}

void ExpectNoUnsharing(const Cache &cache, int64_t sequence, int32_t block,
                       const Expected &expected) {
  SCOPED_TRACE(block);
  uint32_t used = 4711;
  ExpectFailsAndLeaves(cache, expected, mha_kv_cache_unshare, cache.get(), sequence, block, &used);
  EXPECT_EQ(used, 4711u);
}

TEST(Unshare, ASequenceCanBeAppendedToAfterItsLastBlockWasCopied) {
  for (const int64_t sequence : {0, 2}) {
    Cache cache = WithASharedLastBlock();
    const int64_t other = 2 - sequence;
    const KeysAndValues before = cache.Read(other, 0, 20);
    ExpectNoAppend(
        cache, sequence, 1,
        {MHA_ERROR_CACHE_SHARED, {2, 3}, {"block 7", "is in the tables of 2 sequences"}});
    ExpectCopied(&cache, sequence, 5);
    cache.Append(sequence, Rows(3));
    EXPECT_EQ(cache.Length(sequence), 23);
    EXPECT_EQ(cache.Length(other), 20);
    const KeysAndValues after = cache.Read(other, 0, 20);
    EXPECT_EQ(before.k, after.k);
    EXPECT_EQ(before.v, after.v);
    ExpectNotCopied(cache, other);  // which has block 7 alone now
    cache.Append(other, Rows(1));
    // The new block stands in the table: it may stay there and nowhere else.
    ExpectNoBlocks(cache, sequence, {4, 7}, {MHA_ERROR_INVALID_VALUE, {3}, {"block 5"}});
    cache.SetBlocks(sequence, {4, 5});
  }
}

TEST(Unshare, CopiesTheBlockThatATruncatedSequenceEndsIn) {
  Cache cache = WithASharedLastBlock();
  cache.Truncate(2, 10);  // into block 4
  ExpectCopied(&cache, 2, 6);
  cache.Append(2, Rows(6));  // to its end
  EXPECT_EQ(cache.Length(2), 16);
  // Block 7, where the next position would go, is sequence 0's.
  ExpectNoAppend(cache, 2, 1,
                 {MHA_ERROR_CACHE_SHARED,
                  {2, 3},
                  {"block 7", "from position 16 on", "mha_kv_cache_set_blocks"}});
  ExpectNotCopied(cache, 2);
}

TEST(Unshare, OfABlockThatIsNotFreeIsAnError) {
  const Cache cache = WithASharedLastBlock();
  // Of sequence 0, of sequence 1, and of the tables beyond the positions.
  for (const int32_t block : {4, 7, 2, 0, 1, 3}) {
    ExpectNoUnsharing(cache, 2, block,
                      {MHA_ERROR_INVALID_VALUE,
                       {3},
                       {"block is " + std::to_string(block), "in the block table of a sequence"}});
  }
  for (const int32_t block :
       {-2, 10, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    ExpectNoUnsharing(
        cache, 2, block,
        {MHA_ERROR_INVALID_VALUE, {3}, {"block is " + std::to_string(block), "0 to 9"}});
    ExpectNoUnsharing(cache, 1, block,
                      {MHA_ERROR_INVALID_VALUE, {3}, {"0 to 9"}});  // where none is needed, too
  }
}

TEST(Unshare, WithoutAFreeBlockIsAnErrorOnlyIfOneIsNeeded) {
  Cache cache = WithASharedLastBlock();
  for (const int64_t sequence : {0, 2}) {
    ExpectNoUnsharing(
        cache, sequence, -1,
        {MHA_ERROR_CACHE_FULL,
         {3},
         {std::string("block is -1"), "block 7 of sequence " + std::to_string(sequence)}});
  }
  cache.Truncate(2, 16);
  for (const int64_t sequence : {1, 2}) {
    uint32_t used = 4711;
    ExpectSucceeds([&](mha_error *error) {
      return mha_kv_cache_unshare(cache.get(), sequence, -1, &used, error);
    });
    EXPECT_EQ(used, 0u);
  }
}

TEST(Unshare, IsForPagedCachesAndSequencesThatExist) {
  for (const uint32_t kind : {kContiguous, kRing})
    ExpectNoUnsharing(Filled(Config(kind)), 0, 0,
                      {MHA_ERROR_INVALID_VALUE, {1}, {"no blocks", "MHA_CACHE_KIND_PAGED"}});
  const Cache cache = WithASharedLastBlock();
  for (const int64_t sequence : {int64_t{-1}, int64_t{3}, kMax, kMin}) {
    ExpectNoUnsharing(cache, sequence, 5,
                      {MHA_ERROR_INVALID_VALUE, {2}, {std::to_string(sequence)}});
  }
}

// ---- Copying a prefix

TEST(CacheErrors, CopyingAPrefixThatIsNotHeldOrHasNoRoomIsRefused) {
  for (const uint32_t kind : {kContiguous, kPaged}) {
    const Cache cache = Filled(Config(kind));
    for (const int64_t length : {int64_t{21}, int64_t{-1}, kMax}) {
      ExpectNoCopy(cache, 0, 1, length, {MHA_ERROR_INVALID_VALUE, {4}, {"20|at least 0"}});
    }
  }
  Cache cache = Filled(Config(kPaged));
  ExpectNoCopy(cache, 0, 2, 20, {MHA_ERROR_CACHE_FULL, {3, 4}, {}});  // sequence 2 has no blocks
  cache.SetBlocks(2, {4, 2});                                         // the second is sequence 1's
  ExpectNoCopy(cache, 0, 2, 20,
               {MHA_ERROR_CACHE_SHARED, {3}, {"block 2 of sequence 2", "2 sequences"}});
  ExpectNoCopy(cache, 1, 1, 5, {MHA_ERROR_INVALID_VALUE, {3}, {"both sequence 1"}});
}

// ---- Calls with a cache

// Two sequences of two rows each to append and to attend with, by either entry.
struct Call {
  explicit Call(Cache *the_cache) : cache(the_cache) {
    LayerProblem sizes = SquareSizes(5, 4, 2, 4);
    sizes.head_dim_v = 3;
    layer = MakeLayer(NormalLayer(sizes));
    Random random(2);
    query = k = v = random.Normals(4096);
    attention.call.batch = attention.call.n_q = attention.call.n_kv = 2;
    attention.num_heads = 4;
    attention.num_kv_heads = 2;
    attention.head_dim = 4;
    attention.head_dim_v = 3;
    attention.q.data = query.data();
    attention.k.data = k.data();
    attention.v.data = v.data();
    forward.call.batch = forward.call.n_q = 2;
    forward.query.data = query.data();
    output.assign(4096, kNan);
    lse.assign(4096, kNan);
    weights.assign(8192, kNan);
    Both([&](auto &args) {
      args.call.flags |= MHA_CAUSAL;
      args.output.data = output.data();
      args.call.outputs = &outputs;
      args.call.cache = cache->get();
    });
    outputs.lse = lse.data();
    attention.call.sequences = &of_attention;
    forward.call.sequences = &of_forward;
  }

  // Does the same to both entries' arguments.
  template <typename Change>
  void Both(const Change &change) {
    change(attention);
    change(forward);
  }

  // The same for what they say of sequences.
  template <typename Change>
  void BothSequences(const Change &change) {
    change(of_attention);
    change(of_forward);
  }

  void SetWindow(int64_t left) {
    Both([&](auto &args) {
      args.call.flags |= MHA_WINDOW_LEFT;
      args.call.window_left = left;
    });
  }

  void ExpectSucceeds(bool by_forward) {
    mha_error error = {};
    EXPECT_EQ(Run(by_forward, &error), MHA_OK) << error.message;
  }

  mha_status Run(bool by_forward, mha_error *error) {
    std::vector<unsigned char> workspace(1 << 20, 0xff);
    return by_forward
               ? mha_forward(layer.get(), &forward, workspace.data(), workspace.size(), error)
               : mha_attention(&attention, workspace.data(), workspace.size(), error);
  }

  // Both entries, or one of them, fail with their arguments at fault, and write nothing.
  void ExpectFailsAndWritesNothing(mha_status status, const Words &words,
                                   bool attention_too = true) {
    for (const bool by_forward : {true, false}) {
      if (!by_forward && !attention_too) continue;
      SCOPED_TRACE(by_forward ? "mha_forward" : "mha_attention");
      ExpectFailsAndLeaves(*cache, [&](mha_error *error) { return Run(by_forward, error); },
                           {status, {by_forward ? 2u : 1u}, words});
      const auto untouched = [](const std::vector<float> &x) {
        return std::all_of(x.begin(), x.end(), [](float y) { return y != y; });
      };
      EXPECT_TRUE(untouched(output) && untouched(lse) && untouched(weights));
    }
  }

  Cache *cache;
  Layer layer;
  std::vector<float> query, k, v, output, lse, weights;
  mha_attention_args attention = Zeroed<mha_attention_args>();
  mha_forward_args forward = Zeroed<mha_forward_args>();
  mha_outputs outputs = Zeroed<mha_outputs>();
  mha_sequences of_attention = Zeroed<mha_sequences>(), of_forward = Zeroed<mha_sequences>();
};

TEST(CallErrors, ValuesForACacheThatHasThemInItsKeys) {
  mha_kv_cache_config config = Config();
  config.value_place = MHA_CACHE_VALUES_IN_KEYS;
  config.v_type = 0;
  config.head_dim_v = 2;
  Cache cache(config);
  ExpectNoAppend(cache, 0, 1, {MHA_ERROR_INVALID_VALUE, {5}, {"v is given"}});
  cache.Append(0, Rows(20));
  cache.Append(1, Rows(6));
  Call call(&cache);
  call.attention.head_dim_v = 2;
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"v.data is given|cache_read"});
  call.attention.v.data = nullptr;
  mha_norm norm = Zeroed<mha_norm>();
  norm.flags = MHA_NORM_VALUES;
  norm.epsilon = 1;
  call.Both([&](auto &args) { args.call.norm = &norm; });
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"MHA_NORM_VALUES|cache_read"});
  call.attention.call.norm = nullptr;
  call.ExpectSucceeds(false);
  EXPECT_EQ(cache.Length(0), 22);
}

TEST(CallErrors, AFullCache) {
  for (const uint32_t kind : {kContiguous, kPaged}) {
    Cache cache = Filled(Config(kind));
    cache.Append(1, Rows(cache.config().capacity - 6));  // room for one
    Call call(&cache);
    call.ExpectFailsAndWritesNothing(MHA_ERROR_CACHE_FULL, {});
    const int64_t lengths[] = {2, 1};
    call.BothSequences([&](auto &given) { given.q_lengths = lengths; });
    call.of_attention.kv_lengths = lengths;
    call.ExpectSucceeds(true);
  }
  Cache cache = Filled(Config(kPaged));
  const int64_t sequences[] = {0, 2};  // which has no blocks
  Call call(&cache);
  call.BothSequences([&](auto &given) { given.cache_sequences = sequences; });
  call.ExpectFailsAndWritesNothing(MHA_ERROR_CACHE_FULL, {});
}

TEST(CallErrors, SequencesThatDoNotExistOrOccurTwice) {
  Cache cache = Filled(Config());
  Call call(&cache);
  for (const std::vector<int64_t> &sequences : {std::vector<int64_t>{0, 3},
                                                {-1, 0},
                                                {kMax, 1},
                                                {1, 1},
                                                {2, 2},
                                                {0, 2, 0},
                                                {2, 0, 2},
                                                {2, 0, 0}}) {
    SCOPED_TRACE(testing::PrintToString(sequences));
    call.BothSequences([&](auto &given) { given.cache_sequences = sequences.data(); });
    call.Both([&](auto &args) { args.call.batch = static_cast<int64_t>(sequences.size()); });
    call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"cache_sequences|sequence"});
  }
  // By default sequence b is the b-th, of which there are three.
  call.BothSequences([&](auto &given) { given.cache_sequences = nullptr; });
  call.Both([&](auto &args) { args.call.batch = 4; });
  call.ExpectFailsAndWritesNothing(MHA_ERROR_SHAPE, {"num_sequences", "4", "3"});
}

// A million sequences or blocks in any order, of which none or one is there twice: to compare each
// with each would take minutes.
mha_kv_cache_config ManyConfig(uint32_t kind) {
  mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
  const int64_t many = int64_t{1} << 20;
  config.kind = kind;
  config.num_sequences = kind == kPaged ? 1 : many;
  config.capacity = kind == kPaged ? 16 * many : 16;
  config.num_kv_heads = config.head_dim = 1;
  config.k_type = config.v_type = MHA_TYPE_INT8;
  if (kind == kPaged) config.block_positions = 16, config.num_blocks = static_cast<int32_t>(many);
  return config;
}

template <typename Number>
std::vector<Number> Descending(int64_t count) {
  std::vector<Number> numbers(count);
  for (size_t i = 0; i < numbers.size(); i++)
    numbers[i] = static_cast<Number>(count - 1 - static_cast<int64_t>(i));
  return numbers;
}

// A cache of which next to nothing is written.
struct ManyCache {
  explicit ManyCache(uint32_t kind) : config(ManyConfig(kind)) {
    mha_error error;
    size_t bytes = 0;
    Check(mha_kv_cache_size(&config, &bytes, &error), error);
    buffer = Memory(bytes, Place::kBeforeGuard, 64);
    Check(mha_kv_cache_init(&config, buffer.data(), buffer.size(), &cache, &error), error);
  }

  mha_kv_cache_config config;
  Memory buffer;
  mha_kv_cache *cache = nullptr;
};

TEST(CallErrors, AMillionSequencesInAnyOrderAreFoundToBeOnceInNoTime) {
  ManyCache many(kContiguous);
  std::vector<int64_t> sequences = Descending<int64_t>(many.config.num_sequences);
  const float row[] = {1};
  mha_attention_args args = Zeroed<mha_attention_args>();
  args.call.batch = many.config.num_sequences;
  args.call.n_q = args.call.n_kv = args.num_heads = args.num_kv_heads = args.head_dim = 1;
  args.q.data = row, args.k.data = args.v.data = row;
  args.call.cache = many.cache;
  mha_sequences given = Zeroed<mha_sequences>();
  given.cache_sequences = sequences.data();
  args.call.sequences = &given;
  std::vector<float> output(1);
  args.output.data = output.data();  // not written: the call is only described
  mha_call_info info = Zeroed<mha_call_info>();
  ExpectSucceeds([&](mha_error *error) { return mha_attention_info(&args, &info, error); });
  for (const size_t place : {size_t{0}, size_t{40000}, sequences.size() - 2}) {
    const int64_t before = sequences[place];
    sequences[place] = sequences.back();
    ExpectFails({MHA_ERROR_INVALID_VALUE,
                 {1},
                 {std::to_string(place), std::to_string(sequences.size() - 1)}},
                mha_attention_info, &args, &info);
    sequences[place] = before;
  }
  std::reverse(sequences.begin(), sequences.end());
  sequences[sequences.size() - 2] = 40000;
  ExpectFails({MHA_ERROR_INVALID_VALUE, {1}, {"40000", "are both 40000"}}, mha_attention_info,
              &args, &info);
}

TEST(CacheErrors, AMillionBlocksInAnyOrderAreFoundToBeOnceInNoTime) {
  ManyCache many(kPaged);
  std::vector<int32_t> blocks = Descending<int32_t>(many.config.num_blocks);
  const auto set = [&](mha_error *error) {
    return mha_kv_cache_set_blocks(many.cache, 0, blocks.data(),
                                   static_cast<int64_t>(blocks.size()), error);
  };
  blocks.back() = blocks.front();
  ExpectFails(set, {MHA_ERROR_INVALID_VALUE, {3}, {"0", std::to_string(blocks.size() - 1)}});
  blocks.back() = 0;
  ExpectSucceeds(set);
  mha_kv_cache *view = nullptr;
  const auto see = [&](mha_error *error) {
    return mha_kv_cache_view(many.buffer.data(), many.buffer.size(), &view, error);
  };
  ExpectSucceeds(see);
  // A block that is counted but in no table, the first one or the last.
  unsigned char *const end = many.buffer.data() + many.buffer.size();
  const auto *const first = reinterpret_cast<unsigned char *>(blocks.data());
  int32_t *const table = reinterpret_cast<int32_t *>(
      std::search(many.buffer.data(), end, first, first + blocks.size() * sizeof blocks[0]));
  for (const size_t entry : {size_t{0}, blocks.size() - 1}) {
    table[entry] = -1;
    ExpectFails(see, {MHA_ERROR_CACHE_FORMAT, {1}, {"block counts disagree"}});
    table[entry] = blocks[entry];
  }
}

TEST(CallErrors, ACacheOfAnotherShape) {
  for (const auto change : {+[](mha_kv_cache_config &c) { c.num_kv_heads = 4; },
                            +[](mha_kv_cache_config &c) { c.head_dim = 5; },
                            +[](mha_kv_cache_config &c) { c.head_dim_v = 4; },
                            +[](mha_kv_cache_config &c) { c.num_kv_heads = 1; }}) {
    mha_kv_cache_config config = Config();
    change(config);
    Cache cache(config);
    Call call(&cache);
    call.ExpectFailsAndWritesNothing(MHA_ERROR_SHAPE, {});
  }
}

TEST(CallErrors, ASharedBlock) {
  Cache cache = Filled(Config(kPaged));
  cache.SetBlocks(2, {4, 7, 3});
  cache.CopyPrefix(0, 2, 20);
  Call call(&cache);
  call.ExpectFailsAndWritesNothing(
      MHA_ERROR_CACHE_SHARED,
      {"is in the tables of 2 sequences", "mha_kv_cache_unshare(cache, 0, <free block>)"});
}

TEST(CallErrors, RowsThatSeePositionsThatARingDoesNotHold) {
  Cache cache = Filled(Config(kRing));
  cache.Append(0, Rows(30));  // 50 positions, of which 2 .. 49 are held; the call makes it 52
  Call call(&cache);
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"ring|window_left"});  // no window
  for (const int64_t left : {int64_t{48}, int64_t{50}, kMax}) {
    call.SetWindow(left);
    call.ExpectFailsAndWritesNothing(MHA_ERROR_SHAPE, {"ring", "window_left"});
  }
  // Rows at other positions than the last ones, and rows that see what comes after them, are not
  // what a ring is for.
  const int64_t starts[] = {50, 5};
  call.SetWindow(19);
  call.BothSequences([&](auto &given) { given.q_first_positions = starts; });
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                   {"ring", "sequences.q_first_positions"});
  call.BothSequences([&](auto &given) { given.q_first_positions = nullptr; });
  call.Both([&](auto &args) { args.call.flags &= ~MHA_CAUSAL; });
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"ring", "MHA_CAUSAL"});
  call.Both([&](auto &args) { args.call.flags |= MHA_CAUSAL; });
  call.SetWindow(40);
  call.ExpectSucceeds(true);
  call.ExpectSucceeds(false);
  // After truncating, the slots of the forgotten positions do not come back.
  cache.Truncate(0, 40);
  std::fill(call.output.begin(), call.output.end(), kNan);
  std::fill(call.lse.begin(), call.lse.end(), kNan);
  call.ExpectFailsAndWritesNothing(MHA_ERROR_SHAPE, {"ring", "window"});
}

// More rows than a ring takes at once go in passes, in which each query comes with its key.
TEST(CallErrors, MoreKeysThanARingTakesAtOnceWithOtherQueries) {
  Cache cache = Filled(Config(kRing));
  Call call(&cache);
  call.k.resize(1024), call.v.resize(1024);
  call.forward.key.data = call.k.data();
  call.attention.k.data = call.k.data(), call.attention.v.data = call.v.data();
  call.SetWindow(45);  // 3 rows at once
  call.Both([&](auto &args) { args.call.n_kv = 4; });
  call.ExpectFailsAndWritesNothing(MHA_ERROR_SHAPE,
                                   {"capacity - window_left = 3", "n_q 2 and n_kv 4 differ"});
  const int64_t q_starts[] = {0, 1, 2}, kv_starts[] = {0, 4, 8};
  call.Both([&](auto &args) { args.call.batch = 1, args.call.n_q = 2, args.call.n_kv = 8; });
  call.BothSequences([&](auto &given) {
    given.count = 2, given.cu_seqlens_q = q_starts, given.cu_seqlens_kv = kv_starts;
  });
  call.ExpectFailsAndWritesNothing(MHA_ERROR_SHAPE, {"sequence 0", "1", "4", "a ring"});
}

TEST(CallErrors, AttentionInIntegersOverCachesOfOtherTypes) {
  for (const auto &[k_type, v_type] :
       {std::pair(MHA_TYPE_F32, MHA_TYPE_F32), std::pair(MHA_TYPE_F16, MHA_TYPE_INT8),
        std::pair(MHA_TYPE_INT8, MHA_TYPE_BF16)}) {
    mha_kv_cache_config config = Config(kContiguous);
    config.k_type = k_type, config.v_type = v_type;
    Cache cache = Filled(config);
    Call call(&cache);
    call.Both([](auto &args) { args.call.attention_arithmetic = MHA_ARITHMETIC_INT16; });
    call.ExpectFailsAndWritesNothing(
        MHA_ERROR_INVALID_VALUE,
        {"attention_arithmetic is MHA_ARITHMETIC_INT16",
         "keys as MHA_TYPE " + std::to_string(k_type) + " and values as " + std::to_string(v_type),
         "k_type MHA_TYPE_INT8 (4) and v_type MHA_TYPE_INT8 (4) or MHA_TYPE_INT4 (5)"});
  }
}

// Numbers of keys that a ring forgets, or that the array does not have, are none.
TEST(CallErrors, PositionGroupsThatDoNotFitTheCache) {
  const std::vector<int32_t> numbers(64, 1);
  mha_score_arrays arrays = Zeroed<mha_score_arrays>();
  arrays.q_segments = numbers.data();
  for (const uint32_t kind : {kContiguous, kRing}) {
    Cache cache = Filled(Config(kind));
    Call call(&cache);
    if (kind == kRing) call.SetWindow(10);
    call.Both([&](auto &args) { args.call.score_arrays = &arrays; });
    arrays.column_keys = MHA_COLUMNS_ALL_KEYS;
    call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                     {kind == kRing ? "ring" : "score_arrays.kv_segments is NULL"});
    arrays.column_keys = MHA_COLUMNS_NEW_KEYS;
    if (kind == kRing)
      call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                       {"ring", "score_arrays.q_segments"});
  }
  Cache cache = Filled(Config(kContiguous));  // 20 and 5 positions, which become 22 and 7
  Call call(&cache);
  call.Both([&](auto &args) { args.call.score_arrays = &arrays; });
  arrays.column_keys = MHA_COLUMNS_ALL_KEYS;
  arrays.kv_segments = numbers.data();
  arrays.num_columns = 21;  // the last key is masked then
  call.ExpectSucceeds(true);
}

// Of a ring of 48 that held 50 positions and was cut to 42, 2 .. 41 are left: the two rows of the
// call stand at 42 and 43.
// A size query does not know the length, so that a mask may get as many columns as there is room.
TEST(CallErrors, MasksOfACacheThatWouldExceedTheAddressSpace) {
  Cache cache = Filled(Config());  // of 40 positions
  Call call(&cache);
  const uint8_t mask = 1;
  mha_score_arrays arrays = Zeroed<mha_score_arrays>();
  arrays.mask = &mask;
  call.attention.call.score_arrays = &arrays;
  call.attention.call.n_q = int64_t{1} << 53;
  size_t bytes = 0;
  const auto query = [&](mha_error *error) {
    return mha_attention_workspace(&call.attention, &bytes, error);
  };
  ExpectFails(query, {MHA_ERROR_TOO_LARGE, {1}, {"score_arrays.mask would exceed"}});
  arrays.num_columns = 1;
  ExpectSucceeds(query);
  arrays.num_columns = 0;
  arrays.column_keys = MHA_COLUMNS_NEW_KEYS;
  ExpectSucceeds(query);
}

TEST(CallErrors, RowsThatSeeOnePositionMoreThanATruncatedOrCopiedRingHolds) {
  for (const bool is_copied : {false, true}) {
    SCOPED_TRACE(is_copied ? "copied" : "truncated");
    const auto make = [&] {
      Cache cache(Config(kRing));
      cache.Append(is_copied ? 2 : 0, Rows(50));
      if (is_copied) {
        cache.CopyPrefix(2, 0, 42);
      } else {
        cache.Truncate(0, 42);
      }
      return cache;
    };
    Cache cache = make();
    Call call(&cache);
    call.SetWindow(41);
    call.ExpectFailsAndWritesNothing(MHA_ERROR_SHAPE, {"ring", "1", "2"});
    for (const bool by_forward : {true, false}) {
      Cache other = make();
      Call one_less(&other);
      one_less.SetWindow(40);
      one_less.ExpectSucceeds(by_forward);
    }
  }
}

TEST(CallErrors, ANumberPerPairOfARing) {
  Cache cache = Filled(Config(kRing));
  Call call(&cache);
  call.SetWindow(3);
  for (float *mha_outputs::*output :
       {&mha_outputs::attention_weights, &mha_outputs::scores, &mha_outputs::scaled_scores,
        &mha_outputs::softcapped_scores, &mha_outputs::masked_scores}) {
    call.outputs = Zeroed<mha_outputs>();
    call.outputs.*output = call.weights.data();
    call.ExpectFailsAndWritesNothing(
        MHA_ERROR_INVALID_VALUE,
        {output == &mha_outputs::attention_weights ? "outputs.attention_weights" : "outputs",
         "ring"});
  }
}

// In self-attention the rows of query are appended, and are where they are appended. Where the rows
// of key are others, or none, the queries may be anywhere.
TEST(CallErrors, AStartWhereTheRowsOfSelfAttentionAreNotAppended) {
  Cache cache = Filled(Config());
  const int64_t where_they_are[] = {20, 5}, elsewhere[] = {20, 4}, later[] = {21, 5},
                only_first[] = {2, 0}, none[] = {0, 0};
  const auto restore = [&cache] {
    cache.Truncate(0, 20);
    cache.Truncate(1, 5);
  };
  for (const int64_t *starts : {elsewhere, later}) {
    Call call(&cache);
    call.of_forward.q_first_positions = starts;
    const char *const length = starts == later ? "20" : "5";
    call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                     {"sequences.q_first_positions", length, "NULL"}, false);
    mha_call_info info = Zeroed<mha_call_info>();
    ExpectFails({MHA_ERROR_INVALID_VALUE, {2}, {"sequences.q_first_positions"}}, mha_forward_info,
                call.layer.get(), &call.forward, &info);
    call.forward.call.flags = 0;  // then no position counts
    call.ExpectSucceeds(true);
    restore();
    call.forward.call.flags = MHA_CAUSAL;
    call.forward.call.cache = nullptr;
    call.forward.call.cache_read = cache.get();
    call.ExpectSucceeds(true);
    call.forward.call.cache = cache.get();
    call.forward.call.cache_read = nullptr;
    call.forward.key.data = call.k.data();
    call.forward.call.n_kv = 2;
    call.ExpectSucceeds(true);
    restore();
    call.of_attention.q_first_positions = starts;
    call.ExpectSucceeds(false);
    restore();
  }
  Call call(&cache);
  call.of_forward.q_first_positions = where_they_are;
  call.ExpectSucceeds(true);
  restore();
  // A sequence without rows has no position.
  call.of_forward.q_first_positions = elsewhere;
  call.of_forward.q_lengths = only_first;
  call.ExpectSucceeds(true);
  restore();
  call.of_forward.q_first_positions = none;
  call.of_forward.q_lengths = none;
  call.ExpectSucceeds(true);
}

// Whatever else is wrong with it, a call without queries is accepted, and so it is described.
TEST(CallErrors, ACallWithNothingToDoIsDescribedAsOne) {
  Cache cache = Filled(Config());
  const int64_t starts[] = {-1, -1}, lengths[] = {7, -1}, sequences[] = {4, 4};
  for (const bool with_cache : {true, false}) {
    for (const bool empty_batch : {true, false}) {
      Call call(&cache);
      call.forward.key.data = call.k.data();
      call.forward.call.n_kv = call.attention.call.n_kv = 36;  // more than sequence 0 has room for
      call.Both([&](auto &args) {
        (empty_batch ? args.call.batch : args.call.n_q) = MHA_EMPTY;
        if (!with_cache) args.call.cache = nullptr;
      });
      call.BothSequences([&](auto &given) {
        given.q_first_positions = starts;
        given.q_lengths = given.kv_lengths = lengths;
        given.cache_sequences = sequences;  // ignored without a cache
      });
      for (const bool by_forward : {true, false}) {
        SCOPED_TRACE(by_forward ? "mha_forward_info" : "mha_attention_info");
        ExpectSucceeds([&](mha_error *error) { return call.Run(by_forward, error); });
        mha_call_info info = Zeroed<mha_call_info>();
        ExpectSucceeds([&](mha_error *error) {
          return by_forward ? mha_forward_info(call.layer.get(), &call.forward, &info, error)
                            : mha_attention_info(&call.attention, &info, error);
        });
        EXPECT_EQ(info.operations, 0u);
        EXPECT_EQ(info.bytes, 0u);
        EXPECT_EQ(info.workspace_bytes, 0u);
        EXPECT_EQ(cache.Length(0), 20);
      }
    }
  }
}

// A cache that is only read takes the place of one to append to, and no keys come with the call.
struct ReadingCall : Call {
  explicit ReadingCall(Cache *the_cache) : Call(the_cache) {
    Both([&](auto &args) {
      args.call.cache = nullptr;
      args.call.cache_read = cache->get();
    });
    attention.k.data = attention.v.data = nullptr;
  }
};

TEST(CallErrors, CacheAndCacheReadTogether) {
  Cache cache = Filled(Config()), other = Filled(Config());
  for (const Cache *read : {&cache, &other}) {
    Call call(&cache);
    call.Both([&](auto &args) { args.call.cache_read = read->get(); });
    call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                     {"cache and cache_read are both given"});
  }
  for (const bool by_forward : {false, true}) ReadingCall(&cache).ExpectSucceeds(by_forward);
  EXPECT_EQ(cache.Length(0), 20);
  alignas(64) const unsigned char other_memory[256] = {};
  const auto *const no_cache = reinterpret_cast<const mha_kv_cache *>(other_memory);
  ReadingCall reading(&cache);
  reading.Both([&](auto &args) { args.call.cache_read = no_cache; });
  reading.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"cache_read does not point to a"});
  Call appending(&cache);
  appending.Both([&](auto &args) { args.call.cache = const_cast<mha_kv_cache *>(no_cache); });
  appending.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"cache does not point to a"});
}

TEST(CallErrors, CacheReadWithKeysOrValues) {
  Cache cache = Filled(Config());
  ReadingCall call(&cache);
  call.forward.key.data = call.attention.k.data = call.k.data();
  call.forward.call.n_kv = 2;
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                   {"cache_read", "key.data is given|k.data is given"});
  call.forward.key.data = call.attention.k.data = nullptr;
  call.forward.value.data = call.attention.v.data = call.v.data();
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                   {"cache_read", "value.data is given|v.data is given"});
  call.forward.value.data = call.attention.v.data = nullptr;
  call.forward.key.type = call.attention.k.type = 9;
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"key.type is 9|k.type is 9"});
  call.forward.key.type = call.attention.k.type = 0;
  call.forward.value.reserved = call.attention.v.reserved = 1;
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                   {"value.reserved is set|v.reserved is set"});
}

TEST(CallErrors, CacheReadWithGroupsOrColumnsOfNewKeys) {
  Cache cache = Filled(Config());
  const std::vector<int32_t> numbers(64, 1);
  mha_score_arrays arrays = Zeroed<mha_score_arrays>();
  arrays.q_segments = numbers.data();
  ReadingCall call(&cache);
  call.Both([&](auto &args) { args.call.score_arrays = &arrays; });
  arrays.column_keys = MHA_COLUMNS_NEW_KEYS;
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"no new key with cache_read"});
  arrays.column_keys = MHA_COLUMNS_ALL_KEYS;
  arrays.kv_segments = nullptr;
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"score_arrays.kv_segments is NULL"});
}

TEST(CallErrors, CacheReadWithRowsOfKeys) {
  Cache cache = Filled(Config());
  const struct {
    const int64_t *mha_sequences::*field;
    const char *name;
  } fields[] = {{&mha_sequences::kv_lengths, "sequences.kv_lengths is given"},
                {&mha_sequences::kv_first_rows, "sequences.kv_first_rows is given"},
                {&mha_sequences::cu_seqlens_kv, "sequences.cu_seqlens_kv is given"}};
  for (const std::vector<int64_t> &numbers : {std::vector<int64_t>{0, 0, 0}, {2, 1, 2}}) {
    for (const auto &[field, name] : fields) {
      ReadingCall call(&cache);
      call.BothSequences([&, field = field](auto &given) { given.*field = numbers.data(); });
      call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE, {"cache_read", name});
    }
  }
}

TEST(CallErrors, LengthsOfKeysThatAreTheRowsOfQuery) {
  Cache cache = Filled(Config());
  const int64_t lengths[] = {2, 1};
  for (const bool with_cache : {false, true}) {
    Call call(&cache);
    call.of_forward.kv_lengths = lengths;
    if (!with_cache) call.forward.call.cache = nullptr;
    call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                     {"sequences.kv_lengths is given", "the rows of query"}, false);
  }
}

TEST(CallErrors, AWindowWithoutItsFlag) {
  Cache cache = Filled(Config());
  Call call(&cache);
  call.Both([&](auto &args) {
    args.call.flags = MHA_CAUSAL, args.call.window_right = 3;
  });  // as if it counted
  call.ExpectFailsAndWritesNothing(MHA_ERROR_INVALID_VALUE,
                                   {"window_right is 3", "MHA_WINDOW_RIGHT"});
}

// ---- Rotation

TEST(CallErrors, RotationsThatDoNotFit) {
  const std::vector<float> table(64 * 4, 0.5f);
  const auto expect_refused = [&](const auto &change, const Words &words,
                                  mha_status status = MHA_ERROR_INVALID_VALUE) {
    mha_rope rope = Zeroed<mha_rope>();
    rope.num_positions = 64;
    rope.cos = rope.sin = table.data();
    for (const bool with_cache : {false, true}) {
      Cache cache = Filled(Config());
      Call call(&cache);
      call.Both([&](auto &args) {
        args.call.rope = &rope;
        if (!with_cache) args.call.cache = nullptr;
      });
      change(call, rope);
      call.ExpectFailsAndWritesNothing(status, words);
    }
  };
  const struct {
    void (*change)(mha_rope &);
    Words words;
    mha_status status = MHA_ERROR_INVALID_VALUE;
  } rows[] = {
      {[](auto &r) { r.dims = 6; }, {"dims", "6", "4"}},
      {[](auto &r) { r.offset = 4; }, {"rope.offset is 4", "4"}},
      {[](auto &r) { r.offset = INT64_MAX; }, {"rope.offset"}},
      {[](auto &r) { r.num_positions = kMax / 4; }, {"the tables of rope"}, MHA_ERROR_TOO_LARGE},
      {[](auto &r) { r.offset = 1; }, {"rope.dims is 3"}},
      {[](auto &r) { r.offset = 1, r.dims = 4; }, {"rope.dims is 4", "head_dim - offset = 4 - 1"}},
      {[](auto &r) { r.table_stride = 1; }, {"table_stride"}},
      {[](auto &r) { r.num_positions = 1; }, {"num_positions"}},
  };
  for (const auto &row : rows) {
    SCOPED_TRACE(&row - rows);
    expect_refused([&](Call &, mha_rope &rope) { row.change(rope); }, row.words, row.status);
  }
  const int64_t negative[] = {0, 1, -1, 0}, large[] = {0, 64, 0, 0};
  for (const int64_t *numbers : {negative, large}) {
    const char *const number = numbers == large ? "64" : "-1";
    const auto set = [&](const int64_t *mha_sequences::*positions) {
      return [=](Call &call, mha_rope &) {
        call.BothSequences([=](auto &given) { given.*positions = numbers; });
      };
    };
    expect_refused(set(&mha_sequences::rope_q_positions), {"sequences.rope_q_positions", number});
    expect_refused(set(&mha_sequences::rope_k_positions), {"sequences.rope_k_positions", number});
  }
}

}  // namespace
