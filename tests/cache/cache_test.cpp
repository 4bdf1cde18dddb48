// Caches of keys and values: a sequence on any threads, in any kind of cache, has the bits that the
// specification gives for the whole sequence as it is stored. In any pieces and batches it has them
// in generated_test.cpp; after truncating, copying and moving, and in rings, in fuzz.caches.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"
#include "support/stored.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);
constexpr CacheForm kContiguous = {MHA_CACHE_KIND_CONTIGUOUS, 0};

class KvCache : public InstructionSetTest {
 protected:
  AttentionProblem History(int64_t batch, int64_t n, int64_t head_dim = 6, int64_t head_dim_v = 5,
                           int64_t group = 2) const {
    Random random(static_cast<uint64_t>(batch + 10 * n + 100 * head_dim));
    AttentionProblem history;
    history.batch = batch;
    history.n_q = history.n_kv = n;
    history.num_kv_heads = 2;
    history.num_heads = 2 * group;
    history.head_dim = head_dim;
    history.head_dim_v = head_dim_v;
    history.is_causal = true;
    FillNormal(&random, &history);
    return history;
  }

  AttentionCall Call(const mha_scheduler *scheduler = nullptr) const {
    AttentionCall call;
    call.instruction_set = instruction_set();
    call.scheduler = scheduler;
    return call;
  }

  // Some rows of its only sequence, with their keys and values.
  AttentionProblem Rows(const AttentionProblem &history, int64_t first, int64_t count) const {
    AttentionProblem rows = history;
    const int64_t n = history.n_kv;
    rows.n_q = rows.n_kv = count;
    rows.q = SliceRows(history.q, 0, n, history.num_heads * history.head_dim, first, count);
    rows.k = SliceRows(history.k, 0, n, history.num_kv_heads * history.head_dim, first, count);
    rows.v = SliceRows(history.v, 0, n, history.num_kv_heads * history.head_dim_v, first, count);
    return rows;
  }

  // What calls for so many rows at once give.
  std::vector<float> InPieces(const AttentionProblem &history, int64_t first,
                              const std::vector<int64_t> &counts, Cache *cache,
                              const mha_scheduler *scheduler = nullptr) const {
    AttentionCall call = Call(scheduler);
    call.asked = kAskLse;
    call.cache.cache = cache->get();
    std::vector<float> y;
    for (const int64_t count : counts) {
      const Outputs outputs = Attend(Rows(history, first, count), call);
      y.insert(y.end(), outputs.y.begin(), outputs.y.end());
      first += count;
    }
    return y;
  }

  // A call over a cache that holds all the keys.
  AttentionProblem Stored(Storage type, int64_t n_q, int64_t n_kv, int64_t group, int64_t head_dim,
                          int64_t head_dim_v) const {
    AttentionProblem problem = History(1, n_kv, head_dim, head_dim_v, group);
    problem.n_q = n_q;
    problem.k_type = KeysBeside(type);
    problem.v_type = type;
    problem.q.resize(n_q * problem.num_heads * head_dim);
    return problem;
  }

  void ExpectTheSpecification(const AttentionProblem &problem, const CacheForm &form) const {
    const int64_t n_kv = problem.n_kv;
    Random random(static_cast<uint64_t>(n_kv + problem.n_q));
    Cache cache(CacheConfigOf(problem, form, 1, n_kv));
    SpreadBlocks(&random, &cache);
    cache.Append(0, {problem.k, problem.v});
    AttentionProblem queries = problem;
    queries.n_kv = 0;
    queries.k.clear();
    queries.v.clear();
    AttentionCall call = Call();
    call.cache.cache = cache.get();
    call.cache.columns = n_kv;
    EXPECT_TRUE(SameBits(Attend(queries, call), Specify(problem)))
        << Describe(form) << " " << Describe(problem);
  }

  Sample sample_;  // for tests of many cases
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(KvCache);

// ---- Any pieces

// Rows come in tiles of a few shapes, which depend on how many there are, on how many keys, and on
// how these are stored.
TEST_P(KvCache, OfAnyTypeUnderAnyNumberOfRowsEqualsTheSpecification) {
  for (const Storage type : kValueTypes) {
    for (const int64_t n_kv : {127, 128, 300, 530}) {
      for (const int64_t n_q :
           {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 30, 60, 96, 97}) {
        if (!sample_.Takes()) continue;
        AttentionProblem problem = Stored(type, n_q, n_kv, 1, 6, 5);
        ExpectTheSpecification(problem, kContiguous);
        problem.window_left = 200;
        ExpectTheSpecification(problem, CacheForm{MHA_CACHE_KIND_PAGED, 16});
      }
      if (HasFailure()) return;
    }
  }
}

// One or two rows may go through two or four neighbouring chunks together, where they attend to all
// their keys, and these have no int8.
TEST_P(KvCache, OfSeveralChunksUnderFewRowsEqualsTheSpecification) {
  for (const auto &[k_type, v_type] : {std::pair{Storage::kF32, Storage::kF32},
                                       {Storage::kF16, Storage::kF16},
                                       {Storage::kBf16, Storage::kBf16},
                                       {Storage::kF32, Storage::kBf16},
                                       {Storage::kInt8, Storage::kF32},
                                       {Storage::kF16, Storage::kInt8},
                                       {Storage::kInt8, Storage::kInt4}}) {
    // The first key in each of the first five chunks: at the beginning (0, 256, 512, 768, 1024),
    // and behind it.
    for (const auto &[n_q, group] : {std::pair{1, 1}, {1, 2}, {2, 1}}) {
      for (const int64_t window : {2300, 2047, 1850, 1791, 1535, 1400, 1279, 1100, 1023}) {
        if (!sample_.Takes()) continue;
        AttentionProblem problem = Stored(k_type, n_q, 2049 - window % 2, group, 16, 16);
        problem.v_type = v_type;
        problem.window_left = window;
        ExpectTheSpecification(problem, kContiguous);
      }
    }
    if (HasFailure()) return;
  }
}

// Keys whose score is -infinity take no part, and their values are never read.
TEST_P(KvCache, KeysOfSeveralChunksThatTakeNoPartReachNoRow) {
  const std::vector<int64_t> one = {3}, of_both = {0, 255, 256, 300, 511},
                             of_the_second = {256, 257, 400}, of_the_fourth = {800, 1023}, none;
  std::vector<int64_t> a_whole_chunk;
  for (int64_t j = 256; j < 512; j++) a_whole_chunk.push_back(j);
  constexpr int64_t head_dim = 12, head_dim_v = 20, kv_heads = 2;
  using Types = std::pair<Storage, Storage>;  // of keys and of values
  for (const auto &[type, v_type] : {Types{Storage::kF32, Storage::kF32},
                                     {Storage::kF16, Storage::kF16},
                                     {Storage::kBf16, Storage::kInt8},
                                     {Storage::kF16, Storage::kInt4}}) {
    for (const auto &[n_q, group] :
         {std::pair{1, 1}, {1, 2}, {2, 1}, {1, 5}, {5, 1}, {7, 1}, {1, 8}, {2, 4}}) {
      for (const std::vector<int64_t> &excluded :
           {one, of_both, of_the_second, of_the_fourth, a_whole_chunk, none}) {
        if (!sample_.Takes()) continue;
        const int64_t n_kv = n_q * group > 2 ? 600 : 1100;
        AttentionProblem problem = Stored(type, n_q, n_kv, group, head_dim, head_dim_v);
        problem.v_type = v_type;
        for (int64_t row = 0; row < n_q * kv_heads * group; row++) {
          const bool has_nan = row % group == group - 1 && group > 1;  // 0 * -infinity
          problem.q[row * head_dim] = has_nan ? 0.0f : 1.0f + static_cast<float>(row);
        }
        for (const int64_t j : excluded) {
          if (j >= n_kv) continue;
          for (int64_t row = j * kv_heads; row < (j + 1) * kv_heads; row++) {
            problem.k[row * head_dim] = -kInfinity;
            std::fill_n(problem.v.begin() + row * head_dim_v, head_dim_v, kNaN);
          }
        }
        ExpectTheSpecification(problem, kContiguous);
        problem.window_left = n_kv - 10;  // begins within the first chunk
        ExpectTheSpecification(problem, CacheForm{MHA_CACHE_KIND_PAGED, 64});
      }
    }
  }
}

// So few heads that threads would share out the keys of one. The ring of 624 positions begins anew
// in the middle of two chunks.
TEST_P(KvCache, OfManyPositionsOnAnyThreadsEqualsTheSpecification) {
  constexpr int64_t n = 3300, last = 6;  // of the last rows alone the specification is wanted
  for (const CacheForm &form :
       {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 64}, CacheForm{MHA_CACHE_KIND_RING, 48},
        CacheForm{MHA_CACHE_KIND_RING, 624}, CacheForm{MHA_CACHE_KIND_RING, 1104},
        CacheForm{MHA_CACHE_KIND_RING, 2000}}) {
    for (const auto &[type, group, rows] : {std::tuple{Storage::kF32, 3, 3},
                                            {Storage::kF32, 1, 1},
                                            {Storage::kF32, 2, 1},
                                            {Storage::kF16, 1, 2},
                                            {Storage::kF32, 2, 3},
                                            {Storage::kInt4, 4, 2}}) {
      AttentionProblem history = History(1, n, 2, 1, group);
      history.k_type = KeysBeside(history.v_type = type);
      if (form.kind == MHA_CACHE_KIND_RING) history.window_left = form.positions - 20;
      AttentionProblem tokens = history;
      tokens.n_q = last;
      tokens.q = Rows(history, n - last, last).q;
      const Outputs expected = Specify(tokens);
      for (const uint32_t num_threads : {1u, 2u, 3u, 5u}) {
        const Scheduler scheduler(num_threads, num_threads == 3 ? RunBackwards : RunOnThreads);
        Random random(num_threads);
        Cache cache(CacheConfigOf(history, form, 1, n));
        SpreadBlocks(&random, &cache);
        const AttentionProblem before = Rows(history, 0, n - last);
        cache.Append(0, {before.k, before.v});
        const std::vector<int64_t> counts(last / rows, rows);
        EXPECT_TRUE(
            SameBits("y", InPieces(history, n - last, counts, &cache, scheduler.get()), expected.y))
            << num_threads << " threads, " << rows << " rows, " << Describe(form) << " "
            << Describe(history);
      }
    }
  }
}

// Zeros of either sign, too, which change no score.
TEST_P(KvCache, HasTheSameBytesByEveryInstructionSet) {
  AttentionProblem history = History(2, 40, 20, 18);
  history.rope = MakeRope(false, 20, 40);
  for (size_t i = 0; i < history.k.size(); i++) history.k[i] = i % 20 < 10 ? -0.0f : 0.0f;
  std::vector<std::string> bytes;
  for (const uint32_t set : {instruction_set(), uint32_t{MHA_INSTRUCTION_SET_SCALAR}}) {
    Cache cache(CacheConfigOf(history, kContiguous, 2, 40));
    AttentionCall call = Call();
    call.instruction_set = set;
    call.asked = kAskLse;
    call.cache.cache = cache.get();
    Attend(history, call);
    bytes.push_back(cache.buffer().Bytes());
  }
  EXPECT_TRUE(bytes[0] == bytes[1]);
}

// ---- What is stored

TEST_P(KvCache, TakesTheRowsOfHeadsOfScaleZero) {
  AttentionProblem history = History(2, 40);
  std::vector<std::string> bytes;
  for (const uint32_t num_threads : {1, 1, 4}) {  // first without scales
    const Scheduler scheduler(num_threads, RunBackwards);
    Cache cache(CacheConfigOf(history, kContiguous, 2, 40));
    AttentionCall call = Call(scheduler.get());
    call.asked = kAskNothing;
    call.cache.cache = cache.get();
    Attend(history, call);
    bytes.push_back(cache.buffer().Bytes());
    history.score.emplace().head_scales = {0.0f, 0.0f, 1.0f, 1.0f};
  }
  EXPECT_TRUE(bytes[0] == bytes[1] && bytes[0] == bytes[2]);
}

TEST_P(KvCache, ReadsBackWhatTheSpecificationStores) {
  Random random(6);
  for (const Values kind : {Values::kNormal, Values::kWide, Values::kTies, Values::kTiny,
                            Values::kHuge, Values::kSpecial}) {
    for (const Storage type : kValueTypes) {
      for (const bool same : {true, false}) {
        AttentionProblem history = History(1, 70, 19, 33);
        history.k_type = KeysBeside(type);
        history.v_type = same ? type : static_cast<Storage>(static_cast<uint32_t>(type) % 5 + 1);
        history.k = RandomValues(&random, kind, static_cast<int64_t>(history.k.size()));
        history.v = RandomValues(&random, kind, static_cast<int64_t>(history.v.size()));
        for (const CacheForm &form : {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 16},
                                      CacheForm{MHA_CACHE_KIND_RING, 80}}) {
          Cache appended(CacheConfigOf(history, form, 1, 70)),
              called(CacheConfigOf(history, form, 1, 70));
          SpreadBlocks(&random, &appended);
          SpreadBlocks(&random, &called);
          for (const int64_t first : {0, 35}) {
            const AttentionProblem rows = Rows(history, first, 35);
            appended.Append(0, {rows.k, rows.v});
          }
          AttentionProblem windowed = history;
          if (form.kind == MHA_CACHE_KIND_RING) windowed.window_left = 9;
          InPieces(windowed, 0, {1, 3, 14, 52}, &called);
          for (const auto &[first, count] :
               {std::pair<int64_t, int64_t>{0, 70}, {0, 0}, {3, 1}, {15, 18}, {69, 1}}) {
            const KeysAndValues expected = SpecifyStored(history, 0, first, count);
            const std::string what =
                std::string(NameOf(kind)) + " " + Describe(form) + " " + Describe(history);
            EXPECT_TRUE(SameBits(appended.Read(0, first, count), expected))
                << what << " from " << first;
            EXPECT_TRUE(SameBits(called.Read(0, first, count), expected))
                << what << " from " << first << ", appended by a call";
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Codes that are halfway between two, rows of the greatest floats and around the border of 0, and
// some with a number that is not finite.
TEST_P(KvCache, ReadsBackInt8RowsAtTheirBorders) {
  AttentionProblem history = History(1, 16, 255, 255);
  history.k_type = history.v_type = Storage::kInt8;
  const float sizes[] = {127,
                         -127,
                         std::numeric_limits<float>::max(),
                         0x1p-100f,
                         std::nextafter(0x1p-100f, 0.0f),
                         0x1p-149f,
                         0,
                         0x1p127f};
  for (size_t i = 0; i < history.k.size(); i++) {
    const float size = sizes[i / 255 % 8],
                half = static_cast<float>(static_cast<int>(i % 255) - 127) +
                       (i % 255 < 254 ? 0.5f : 0.0f);
    history.k[i] = size / 127 * half;
    history.v[i] = i % 2 ? size : -size;
  }
  history.k[255] = kInfinity;
  history.v.back() = std::numeric_limits<float>::quiet_NaN();
  Cache cache(CacheConfigOf(history, kContiguous, 1, 16));
  AttentionCall call = Call();
  call.asked = kAskNothing;
  call.cache.cache = cache.get();
  Attend(history, call);
  EXPECT_TRUE(SameBits(cache.Read(0, 0, 16), SpecifyStored(history, 0, 0, 16)));
}

// Widths with every block of the Hadamard transform, of int4 values, int8 keys, and int8 keys with
// values in them, with rows of one number and of the greatest.
TEST_P(KvCache, OfInt4OrInt8RowsOfAnyWidthEqualsTheSpecification) {
  enum Form { kValues, kKeys, kKeysWithValues };
  for (const int64_t width :
       {1, 2, 20, 24, 48, 64, 80, 96, 112, 128, 192, 256, 320, 384, 512, 520, 576}) {
    for (const auto &[form, n_q] : {std::pair{kValues, 1},
                                    {kValues, 2},
                                    {kValues, 4},
                                    {kValues, 17},
                                    {kKeys, 1},
                                    {kKeys, 6},
                                    {kKeysWithValues, 2}}) {
      if (!sample_.Takes()) continue;
      AttentionProblem problem = form == kValues
                                     ? Stored(Storage::kInt4, n_q, 290, 1, 8, width)
                                     : Stored(Storage::kInt8, n_q, 50, 1, width, (width + 1) / 2);
      problem.values_in_keys = form == kKeysWithValues;
      std::vector<float> &rows = form == kValues ? problem.v : problem.k;
      for (size_t i = 0; i < rows.size(); i++) {
        const size_t row = i / static_cast<size_t>(width), d = i % static_cast<size_t>(width);
        if (row == 30) rows[i] = d == 0 ? 1.0f : 0.0f;
        if (row == 31) rows[i] *= 0x1p-103f;
        if (row == 32) rows[i] = d % 3 == 0 ? 0x1p120f : -0x1p120f;
        if (row == 33) rows[i] = 0x1p-149f;
      }
      ExpectTheSpecification(problem, kContiguous);
      rows[static_cast<size_t>(width) * 35] = std::numeric_limits<float>::max();  // NaN
      ExpectTheSpecification(problem, CacheForm{MHA_CACHE_KIND_PAGED, 16});
      AttentionProblem history = problem;
      history.rope.reset();
      const int64_t count = problem.n_kv - 10;
      Cache cache(CacheConfigOf(history, kContiguous, 1, problem.n_kv));
      cache.Append(0, {problem.k, problem.v});
      EXPECT_TRUE(SameBits(cache.Read(0, 3, count), SpecifyStored(history, 0, 3, count))) << width;
    }
  }
}

// The scales of values, [kv head][16], are the last part of this cache.
TEST_P(KvCache, OfInt4MarksValuesThatAreNotFiniteByTheScaleNan) {
  AttentionProblem history = Stored(Storage::kInt4, 1, 16, 1, 8, 16);
  const size_t row = static_cast<size_t>(history.num_kv_heads) * 16;
  history.v[0] = kInfinity;
  history.v[row] = kNaN;
  history.v[2 * row] = history.v[2 * row + 8] = std::numeric_limits<float>::max();
  Cache cache(CacheConfigOf(history, kContiguous, 1, 16));
  cache.Append(0, {history.k, history.v});
  uint32_t scales[4];
  std::memcpy(scales, cache.buffer().data() + cache.buffer().size() - row * sizeof(float),
              sizeof scales);
  for (int i = 0; i < 3; i++) EXPECT_EQ(scales[i], 0x7fc00000u) << i;
  EXPECT_NE(scales[3], 0x7fc00000u);
}

// Such rows go through the scratch memory while they are stored.
TEST_P(KvCache, OfWideRowsOf16BitsEqualsTheSpecification) {
  Random random(9);
  AttentionProblem problem;
  problem.n_kv = 4;
  problem.head_dim = 1 << 14;
  problem.head_dim_v = 8;
  FillNormal(&random, &problem);
  problem.k = Rounded(Storage::kF16, problem.k);
  problem.v = Rounded(Storage::kF16, problem.v);
  Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, 4));
  AttentionCall call;
  call.instruction_set = instruction_set();
  call.asked = kAskLse;
  call.place = Place::kBeforeGuard;
  call.cache.cache = cache.get();
  call.k_array = call.v_array = Storage::kF16;
  EXPECT_TRUE(SameBits("y", Attend(problem, call).y, Specify(problem).y));
}

TEST_P(KvCache, ReadsKeysOrValuesAlone) {
  const AttentionProblem history = History(1, 40);
  Cache cache(CacheConfigOf(history, kContiguous, 1, 40));
  cache.Append(0, {history.k, history.v});
  KeysAndValues rows = {std::vector<float>(history.k.size()), std::vector<float>(history.v.size())};
  mha_error error = {};
  EXPECT_EQ(mha_kv_cache_read(cache.get(), 0, 0, 40, rows.k.data(), nullptr, &error), MHA_OK)
      << error.message;
  EXPECT_EQ(mha_kv_cache_read(cache.get(), 0, 0, 40, nullptr, rows.v.data(), &error), MHA_OK)
      << error.message;
  EXPECT_TRUE(SameBits(rows, SpecifyStored(history, 0, 0, 40)));
}

// What was in the buffer before, and what a truncated sequence has left there, is not read.
TEST_P(KvCache, SlotsThatHoldNoPositionAreNotRead) {
  for (const Storage type : kValueTypes) {
    AttentionProblem history = History(1, 270);
    history.k_type = KeysBeside(history.v_type = type);
    const std::vector<float> expected = Specify(history).y;
    for (const CacheForm &form : {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 64}}) {
      for (const int fill : {0x00, 0xff, 0x7f}) {
        Random random(8);
        Cache cache(CacheConfigOf(history, form, 1, 270), Place::kAnywhere, fill);
        SpreadBlocks(&random, &cache);
        const std::vector<float> spoiled_k(history.k.size(), kNaN),
            spoiled_v(history.v.size(), kInfinity);
        if (fill == 0x7f) cache.Append(0, {spoiled_k, spoiled_v});
        cache.Truncate(0, 0);
        EXPECT_TRUE(
            SameBits("y", InPieces(history, 0, {1, 3, 9, 17, 40, 100, 100}, &cache), expected))
            << Describe(form) << " filled with " << fill << " " << Describe(history);
      }
    }
  }
}

// ---- Copies of positions

// To other blocks, or on write, of the block that a sequence ends in. What is appended then goes to
// one sequence alone.
TEST(CacheCopies, AreTheSequenceUpToThere) {
  constexpr int64_t n = 300;
  for (const Storage type : kValueTypes) {
    for (const int64_t prefix : {0, 1, 33, 256, 270, 300}) {
      for (const bool values_in_keys : {false, true}) {
        Random random(10);
        AttentionProblem history;
        history.n_q = history.n_kv = n;
        history.num_heads = history.num_kv_heads = 2;
        history.head_dim = 4;
        history.head_dim_v = 3;
        history.k_type = KeysBeside(history.v_type = type);
        history.values_in_keys = values_in_keys;
        FillNormal(&random, &history);
        for (const auto &[form, shares] : {std::pair{kContiguous, false},
                                           {CacheForm{MHA_CACHE_KIND_PAGED, 16}, false},
                                           {CacheForm{MHA_CACHE_KIND_PAGED, 64}, true},
                                           {CacheForm{MHA_CACHE_KIND_PAGED, 256}, false},
                                           {CacheForm{MHA_CACHE_KIND_RING, 144}, false}}) {
          const int64_t oldest = form.kind == MHA_CACHE_KIND_RING ? n - 144 : 0;
          if (oldest > prefix) continue;
          SCOPED_TRACE(std::to_string(prefix) + " " + Describe(form) + " " + Describe(history));
          const auto append = [&](Cache *cache, int64_t sequence, int64_t first, int64_t count) {
            cache->Append(sequence, {SliceRows(history.k, 0, n, 2 * 4, first, count),
                                     SliceRows(history.v, 0, n, 2 * 3, first, count)});
          };
          Cache cache(CacheConfigOf(history, form, 2, n));
          if (!shares) {
            SpreadBlocks(&random, &cache);
            append(&cache, 1, 20, 7);  // which are forgotten
          } else {
            cache.SetBlocks(0, {0, 1, 2, 3, 4});
          }
          append(&cache, 0, 0, shares ? prefix : n);
          if (shares) {
            std::vector<int32_t> table = {0, 1, 2, 3, 4};
            for (int64_t i = (prefix + 63) / 64; i < 5; i++) table[i] += 5;
            cache.SetBlocks(1, table);
          }
          cache.CopyPrefix(0, 1, prefix);
          uint32_t used = 0;
          if (shares) {
            EXPECT_EQ(mha_kv_cache_unshare(cache.get(), 1, 12, &used, nullptr), MHA_OK);
          }
          EXPECT_EQ(used, shares && prefix % 64 != 0);
          EXPECT_EQ(cache.Length(1), prefix);
          const KeysAndValues copied = SpecifyStored(history, 0, oldest, prefix - oldest);
          EXPECT_TRUE(SameBits(cache.Read(1, oldest, prefix - oldest), copied));
          append(&cache, 1, prefix, n - prefix);
          EXPECT_TRUE(SameBits(cache.Read(1, oldest, n - oldest),
                               SpecifyStored(history, 0, oldest, n - oldest)));
          EXPECT_TRUE(SameBits(cache.Read(0, oldest, prefix - oldest), copied));
        }
      }
    }
  }
}

TEST(CacheShape, IsThatOfItsConfig) {
  AttentionSizes sizes;
  sizes.num_kv_heads = 2;
  sizes.head_dim = 6;
  sizes.head_dim_v = 0;
  sizes.v_type = Storage::kInt8;
  for (const bool values_in_keys : {false, true}) {
    sizes.values_in_keys = values_in_keys;
    const mha_kv_cache_config config = CacheConfigOf(sizes, {MHA_CACHE_KIND_PAGED, 16}, 3, 48);
    const Cache cache(config);
    mha_kv_cache_config shape = Zeroed<mha_kv_cache_config>(), expected = config;
    mha_error error = {};
    ASSERT_EQ(mha_kv_cache_shape(cache.get(), &shape, &error), MHA_OK) << error.message;
    expected.head_dim_v = 6;
    if (values_in_keys) expected.v_type = expected.k_type;
    EXPECT_EQ(std::memcmp(&shape, &expected, sizeof shape), 0) << values_in_keys;
  }
}

// Caches that were stored are caches for as long as the format has its version.
TEST(CacheBytes, StayThoseOfTheirVersion) {
  std::vector<float> rows(2 * 3 * 6);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 7) - 3.0f;
  rows[4] = FromBits(0xffd23456u);       // of NaNs one is stored
  uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (const uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_INT8}) {
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    config.num_sequences = config.num_blocks = 2;
    config.capacity = config.block_positions = 16;
    config.num_kv_heads = 3;
    config.head_dim = 6;
    config.k_type = config.v_type = type;
    config.kind = MHA_CACHE_KIND_PAGED;
    size_t bytes = 0;
    ASSERT_EQ(mha_kv_cache_size(&config, &bytes, nullptr), MHA_OK);
    Memory buffer(bytes, Place::kBeforeGuard, 64);
    std::fill_n(buffer.data(), bytes, static_cast<unsigned char>(0));
    mha_kv_cache *cache = nullptr;
    ASSERT_EQ(mha_kv_cache_init(&config, buffer.data(), bytes, &cache, nullptr), MHA_OK);
    const int32_t block = 1;
    ASSERT_EQ(mha_kv_cache_set_blocks(cache, 0, &block, 1, nullptr), MHA_OK);
    ASSERT_EQ(mha_kv_cache_append(cache, 0, 2, rows.data(), rows.data(), nullptr), MHA_OK);
    for (size_t i = 0; i < bytes; ++i) sum = (sum ^ buffer.data()[i]) * 1099511628211u;
  }
  EXPECT_EQ(sum, 13317402432519252965u) << "version 2 of the format, contract 3";
}

// ---- Values in the keys, but for what generated_test.cpp has

TEST_P(KvCache, WithValuesInItsKeysEqualsTheSpecification) {
  for (const Storage type : kKeyTypes) {
    for (const auto &[n_q, group] : {std::pair{1, 1},
                                     {1, 3},
                                     {1, 6},
                                     {1, 7},
                                     {1, 16},
                                     {1, 17},
                                     {2, 48},
                                     {1, 128},
                                     {9, 1},
                                     {100, 1}}) {
      for (const int64_t n_kv : {100, 128, 300, 1300}) {
        if (!sample_.Takes()) continue;
        AttentionProblem problem = Stored(type, n_q, n_kv, group, 37, 32);
        problem.values_in_keys = true;
        std::fill(problem.v.begin(), problem.v.end(), kNaN);
        ExpectTheSpecification(problem, kContiguous);
        problem.window_left = 260;
        ExpectTheSpecification(problem, CacheForm{MHA_CACHE_KIND_PAGED, 16});
      }
      if (HasFailure()) return;
    }
  }
}

}  // namespace
