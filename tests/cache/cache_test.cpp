// Caches of keys and values: a prompt at once, token by token or in any other pieces, in any batch,
// on any threads and instruction set, in any kind of cache, gives the bits that the specification
// gives for the whole sequence as it is stored.

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/fixtures.h"
#include "support/instruction_sets.h"
#include "support/replay.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/same_bits.h"
#include "support/schedulers.h"
#include "support/specify.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = FromBits(0xffd23456u);
constexpr CacheForm kContiguous = {MHA_CACHE_KIND_CONTIGUOUS, 0};

// The outputs of a history that a replay collects.
Outputs Collected(Outputs outputs) {
  Outputs collected;
  collected.y = std::move(outputs.y);
  collected.lse = std::move(outputs.lse);
  return collected;
}

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

  int64_t Width(const AttentionSizes &sizes) const { return sizes.num_heads * sizes.head_dim_v; }

  Replay ReplayOf(const AttentionProblem &history, Cache *cache,
                  std::vector<int64_t> sequences = {}) const {
    return Replay(history, Width(history), cache, std::move(sequences));
  }

  // A call over a cache that holds all the keys.
  AttentionProblem Stored(Storage type, int64_t n_q, int64_t n_kv, int64_t group, int64_t head_dim,
                          int64_t head_dim_v) const {
    AttentionProblem problem = History(1, n_kv, head_dim, head_dim_v, group);
    problem.n_q = n_q;
    problem.k_type = problem.v_type = type;
    problem.q.resize(static_cast<size_t>(n_q * problem.num_heads * head_dim));
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

  // In random pieces, on random numbers of threads.
  void Run(Random *random, const AttentionProblem &history, int64_t most, Replay *replay) const {
    while (!replay->Finished()) {
      const Scheduler scheduler(static_cast<uint32_t>(random->Between(1, 3)), RunBackwards);
      AttentionCall call = Call(random->Chance(0.5) ? scheduler.get() : nullptr);
      call.workspace_misalignment = static_cast<size_t>(random->Between(0, 63));
      replay->Step(history, replay->RandomParts(random, most), call, random->Chance(0.5));
    }
  }

  void RunEachBy(int64_t count, const AttentionProblem &history, Replay *replay) const {
    while (!replay->Finished()) replay->Step(history, replay->EachBy(count), Call());
  }

  Sample sample_;  // for tests of many cases
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(KvCache);

// ---- Any pieces

TEST_P(KvCache, OfEveryTypeAndKindGivesTheBitsOfTheSpecificationInAnyPieces) {
  AttentionProblem history = History(3, 280, 6, 5, 1);
  for (const Storage k_type : kStorageTypes) {
    for (const Storage v_type : kStorageTypes) {
      history.k_type = k_type;
      history.v_type = v_type;
      Outputs expected;
      for (const CacheForm &form : kContiguousAndPaged) {
        if (!sample_.Takes()) continue;
        if (expected.y.empty()) expected = Collected(Specify(history));
        Random random(static_cast<uint64_t>(form.positions));
        Cache cache(CacheConfigOf(history, form, 5, 280));
        SpreadBlocks(&random, &cache);
        Replay replay = ReplayOf(history, &cache, {3, 0, 4});
        Run(&random, history, 280, &replay);
        EXPECT_TRUE(SameBits(replay.outputs(), expected))
            << Describe(form) << " " << Describe(history);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(KvCache, APromptAtOnceEqualsTokenByToken) {
  for (const auto &[k_type, v_type] : {std::pair{Storage::kF32, Storage::kF32},
                                       {Storage::kF16, Storage::kBf16},
                                       {Storage::kInt8, Storage::kInt8}}) {
    AttentionProblem history = History(1, 530);
    history.k_type = k_type;
    history.v_type = v_type;
    const Outputs expected = Collected(Specify(history));
    for (const CacheForm &form : {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 64}}) {
      Random random(1);
      for (const int64_t count : {1, 530, 256, 100}) {
        Cache cache(CacheConfigOf(history, form, 1, 530));
        SpreadBlocks(&random, &cache);
        Replay replay = ReplayOf(history, &cache);
        RunEachBy(count, history, &replay);
        EXPECT_TRUE(SameBits(replay.outputs(), expected))
            << count << " at a time, " << Describe(form) << " " << Describe(history);
      }
    }
  }
}

TEST_P(KvCache, OfF32GivesTheBitsOfACallWithoutOne) {
  const AttentionProblem history = History(2, 300);
  Cache cache(CacheConfigOf(history, kContiguous, 2, 300));
  Replay replay = ReplayOf(history, &cache);
  replay.Step(history, replay.EachBy(300), Call());
  EXPECT_TRUE(SameBits(replay.outputs(), Collected(Attend(history, Call()))));
}

// Rows come in tiles of a few shapes, which depend on how many there are, on how many keys, and on
// how these are stored.
TEST_P(KvCache, OfAnyTypeGivesTheBitsOfTheSpecificationForAnyNumberOfRowsAndKeys) {
  for (const Storage type : kStorageTypes) {
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
TEST_P(KvCache, OfSeveralChunksUnderFewRowsGivesTheBitsOfTheSpecification) {
  for (const auto &[k_type, v_type] : {std::pair{Storage::kF32, Storage::kF32},
                                       {Storage::kF16, Storage::kF16},
                                       {Storage::kBf16, Storage::kBf16},
                                       {Storage::kF32, Storage::kBf16},
                                       {Storage::kInt8, Storage::kF32},
                                       {Storage::kF16, Storage::kInt8}}) {
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
                                     {Storage::kBf16, Storage::kInt8}}) {
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
          problem.q[static_cast<size_t>(row * head_dim)] =
              has_nan ? 0.0f : 1.0f + static_cast<float>(row);
        }
        for (const int64_t j : excluded) {
          if (j >= n_kv) continue;
          for (int64_t row = j * kv_heads; row < (j + 1) * kv_heads; row++) {
            problem.k[static_cast<size_t>(row * head_dim)] = -kInfinity;
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
TEST_P(KvCache, OfManyPositionsAndFewHeadsGivesTheSameBitsOnAnyThreads) {
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
                                            {Storage::kF32, 4, 2}}) {
      AttentionProblem history = History(1, n, 2, 1, group);
      history.k_type = history.v_type = type;
      if (form.kind == MHA_CACHE_KIND_RING) history.window_left = form.positions - 20;
      AttentionProblem tokens = history;
      tokens.n_q = last;
      tokens.q = SliceRows(history.q, 0, n, history.num_heads * history.head_dim, n - last, last);
      const Outputs expected = Specify(tokens);
      for (const uint32_t num_threads : {1u, 2u, 3u, 5u}) {
        const Scheduler scheduler(num_threads, num_threads == 3 ? RunBackwards : RunOnThreads);
        Random random(num_threads);
        Cache cache(CacheConfigOf(history, form, 1, n));
        SpreadBlocks(&random, &cache);
        cache.Append(0, {SliceRows(history.k, 0, n, 2 * 2, 0, n - last),
                         SliceRows(history.v, 0, n, 2 * 1, 0, n - last)});
        Replay replay = ReplayOf(history, &cache);
        replay.SetLength(0, n - last);
        while (!replay.Finished()) replay.Step(history, {{0, rows}}, Call(scheduler.get()));
        EXPECT_TRUE(SameBits(
            "y", SliceRows(replay.outputs().y, 0, n, Width(history), n - last, last), expected.y))
            << num_threads << " threads, " << rows << " rows, " << Describe(form) << " "
            << Describe(history);
      }
    }
  }
}

TEST_P(KvCache, IsReadByEveryInstructionSetAlike) {
  for (const Storage type : kStorageTypes) {
    AttentionProblem history = History(2, 290, 20, 18);
    history.k_type = history.v_type = type;
    history.rope = MakeRope(true, 20, 290);
    Cache cache(CacheConfigOf(history, kContiguous, 2, 290));
    Replay replay = ReplayOf(history, &cache);
    AttentionCall others = Call();
    for (int64_t n = 0; !replay.Finished(); n++) {
      others.instruction_set = n % 3 == 0   ? instruction_set()
                               : n % 3 == 1 ? MHA_INSTRUCTION_SET_SCALAR
                                            : MHA_INSTRUCTION_SET_AUTO;
      replay.Step(history, replay.EachBy(17 + n), others);
    }
    EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history)))) << Describe(history);
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
    Replay replay = ReplayOf(history, &cache);
    AttentionCall call = Call();
    call.instruction_set = set;
    replay.Step(history, replay.EachBy(40), call);
    bytes.push_back(cache.buffer().Bytes());
  }
  EXPECT_TRUE(bytes[0] == bytes[1]);
}

// ---- Windows, rotations, attention without appending

// ---- What is stored

TEST_P(KvCache, ReadsBackWhatTheContractSaysIsStored) {
  Random random(6);
  for (const Values kind : {Values::kNormal, Values::kWide, Values::kTies, Values::kTiny,
                            Values::kHuge, Values::kSpecial}) {
    for (const Storage type : kStorageTypes) {
      for (const bool same : {true, false}) {
        AttentionProblem history = History(1, 70, 19, 33);
        history.k_type = type;
        history.v_type = same ? type : static_cast<Storage>(static_cast<uint32_t>(type) % 4 + 1);
        history.k = RandomValues(&random, kind, static_cast<int64_t>(history.k.size()));
        history.v = RandomValues(&random, kind, static_cast<int64_t>(history.v.size()));
        for (const CacheForm &form : {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 16},
                                      CacheForm{MHA_CACHE_KIND_RING, 80}}) {
          Cache appended(CacheConfigOf(history, form, 1, 70)),
              called(CacheConfigOf(history, form, 1, 70));
          SpreadBlocks(&random, &appended);
          SpreadBlocks(&random, &called);
          for (int64_t first = 0; first < 70; first += 35) {
            appended.Append(0, {SliceRows(history.k, 0, 70, 2 * history.head_dim, first, 35),
                                SliceRows(history.v, 0, 70, 2 * history.head_dim_v, first, 35)});
          }
          AttentionProblem windowed = history;
          if (form.kind == MHA_CACHE_KIND_RING) windowed.window_left = 9;
          Replay replay = ReplayOf(windowed, &called);
          Run(&random, windowed, 70, &replay);
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
  for (const Storage type : kStorageTypes) {
    AttentionProblem history = History(1, 270);
    history.k_type = history.v_type = type;
    const Outputs expected = Collected(Specify(history));
    for (const CacheForm &form : {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 64}}) {
      for (const int fill : {0x00, 0xff, 0x7f}) {
        Random random(8);
        Cache cache(CacheConfigOf(history, form, 1, 270), Place::kAnywhere, fill);
        SpreadBlocks(&random, &cache);
        const std::vector<float> spoiled_k(history.k.size(), kNaN),
            spoiled_v(history.v.size(), kInfinity);
        if (fill == 0x7f) cache.Append(0, {spoiled_k, spoiled_v});
        Replay replay = ReplayOf(history, &cache);
        replay.Truncate(0, 0);
        for (const int64_t count : {1, 3, 9, 17, 40, 100, 270})
          replay.Step(history, replay.EachBy(count), Call());
        EXPECT_TRUE(SameBits(replay.outputs(), expected))
            << Describe(form) << " filled with " << fill << " " << Describe(history);
      }
    }
  }
}

// ---- Truncating, copying

TEST_P(KvCache, TruncatedContinuesAsIfTheRestHadNeverBeen) {
  for (const Storage type : kStorageTypes) {
    AttentionProblem history = History(2, 270, 6, 5, 1);
    history.k_type = history.v_type = type;
    AttentionProblem other = history;  // what is appended and then taken back
    Random random(9);
    FillNormal(&random, &other);
    for (const CacheForm &form : kContiguousAndPaged) {
      Cache cache(CacheConfigOf(history, form, 2, 270));
      SpreadBlocks(&random, &cache);
      Replay replay = ReplayOf(history, &cache);
      while (!replay.Finished()) {
        const int64_t before[2] = {replay.length(0), replay.length(1)};
        replay.Step(other, replay.RandomParts(&random, 270), Call());
        for (int64_t b = 0; b < 2; b++) replay.Truncate(b, before[b]);
        replay.Step(history, replay.RandomParts(&random, 100), Call());
        if (random.Chance(0.1)) replay.Truncate(0, random.Between(0, replay.length(0)));
      }
      EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history))))
          << Describe(form) << " " << Describe(history);
    }
  }
}

// History 1 begins like history 0.
AttentionProblem WithCommonPrefix(AttentionProblem history, int64_t prefix) {
  for (auto [x, width] : {std::pair{&history.q, history.num_heads * history.head_dim},
                          std::pair{&history.k, history.num_kv_heads * history.head_dim},
                          std::pair{&history.v, history.num_kv_heads * history.head_dim_v}}) {
    std::copy_n(x->begin(), prefix * width, x->begin() + history.n_q * width);
  }
  return history;
}

TEST_P(KvCache, ACopiedPrefixIsTheSequenceUpToThere) {
  for (const Storage type : kStorageTypes) {
    for (const int64_t prefix : {0, 1, 33, 256, 270, 300}) {
      AttentionProblem history = History(2, 300, 4, 3, 1);
      history.k_type = history.v_type = type;
      history = WithCommonPrefix(history, prefix);
      const Outputs expected = Collected(Specify(history));
      for (const CacheForm &form : {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 16},
                                    CacheForm{MHA_CACHE_KIND_PAGED, 256}}) {
        Random random(10);
        Cache cache(CacheConfigOf(history, form, 2, 300));
        SpreadBlocks(&random, &cache);
        cache.Append(1, {std::vector<float>(7 * 2 * history.head_dim, 3.0f),
                         std::vector<float>(7 * 2 * history.head_dim_v, kNaN)});
        Replay replay = ReplayOf(history, &cache);
        replay.Step(history, {{0, 300}}, Call());
        cache.CopyPrefix(0, 1, prefix);
        EXPECT_EQ(cache.Length(1), prefix);
        EXPECT_TRUE(SameBits(cache.Read(1, 0, prefix), SpecifyStored(history, 0, 0, prefix)));
        replay.SetLength(1, prefix);
        Run(&random, history, 300, &replay);
        Outputs outputs = replay.outputs(), all = expected;
        const int64_t width = Width(history),
                      begin = 300 * width;  // the prefix of sequence 1 was copied, not computed
        for (std::vector<float> *y : {&outputs.y, &all.y})
          y->erase(y->begin() + begin, y->begin() + begin + prefix * width);
        EXPECT_TRUE(SameBits("y", outputs.y, all.y))
            << "prefix " << prefix << " " << Describe(form) << " " << Describe(history);
      }
    }
  }
}

TEST_P(KvCache, SequencesShareTheBlocksThatBothTablesName) {
  AttentionProblem history = WithCommonPrefix(History(2, 100), 40);
  history.k_type = history.v_type = Storage::kF16;
  const Outputs expected = Collected(Specify(history));
  mha_kv_cache_config config = CacheConfigOf(history, {MHA_CACHE_KIND_PAGED, 16}, 2, 112);
  config.num_blocks = 12;  // 7 and 7 less 2 shared ones
  Cache cache(config);
  cache.SetBlocks(0, {11, 3, 5, 1, 0, 9, 10});
  Replay replay = ReplayOf(history, &cache);
  replay.Step(history, {{0, 70}}, Call());
  cache.SetBlocks(1, {11, 3, 2, 4, 6, 7, 8});
  cache.CopyPrefix(0, 1, 40);  // two blocks shared, 8 positions of the third copied
  EXPECT_EQ(cache.Length(1), 40);
  EXPECT_TRUE(SameBits(cache.Read(1, 0, 40), SpecifyStored(history, 0, 0, 40)));
  replay.SetLength(1, 40);
  RunEachBy(9, history, &replay);
  const int64_t width = Width(history);
  EXPECT_TRUE(SameBits("y", SliceRows(replay.outputs().y, 0, 100, width, 0, 100),
                       SliceRows(expected.y, 0, 100, width, 0, 100)));
  EXPECT_TRUE(SameBits("y", SliceRows(replay.outputs().y, 1, 100, width, 40, 60),
                       SliceRows(expected.y, 1, 100, width, 40, 60)));
}

// Copy on write: the positions are the same bit for bit, and from there on each sequence goes its
// own way.
TEST_P(KvCache, SequencesThatShareTheirLastBlockGoOnAfterOneOfThemCopiedIt) {
  for (const Storage type : kStorageTypes) {
    for (const bool values_in_keys : {false, true}) {
      for (const int64_t block : {16, 64, 256}) {
        const int64_t n = 2 * block + 10, prefix = block + block / 2 + 3;
        AttentionProblem history = History(2, n);
        history.k_type = history.v_type = type;
        history.values_in_keys = values_in_keys;
        history = WithCommonPrefix(history, prefix);
        SCOPED_TRACE(std::string(NameOf(type)) + (values_in_keys ? ", values in keys, " : ", ") +
                     std::to_string(block));
        const Outputs expected = Collected(Specify(history));
        Cache cache(CacheConfigOf(history, {MHA_CACHE_KIND_PAGED, block}, 2, n));
        cache.SetBlocks(0, {7, 2, 5});
        Replay replay = ReplayOf(history, &cache);
        replay.Step(history, {{0, prefix}}, Call());
        const KeysAndValues stored = cache.Read(0, 0, prefix);
        cache.SetBlocks(1, {7, 2, 8});
        cache.CopyPrefix(0, 1, prefix);
        uint32_t used = 4711;
        mha_error error = {};
        ASSERT_EQ(mha_kv_cache_unshare(cache.get(), 1, 4, &used, &error), MHA_OK) << error.message;
        EXPECT_EQ(used, 1u);
        for (const int64_t sequence : {0, 1}) {
          EXPECT_EQ(cache.Length(sequence), prefix);
          EXPECT_TRUE(SameBits(cache.Read(sequence, 0, prefix), stored)) << "sequence " << sequence;
        }
        replay.SetLength(1, prefix);
        RunEachBy(41, history, &replay);
        const int64_t width = Width(history),
                      rest = n - prefix;  // the prefix of sequence 1 was copied, not computed
        const auto rows = [&](const Outputs &outputs, int64_t b, int64_t first, int64_t count) {
          return SliceRows(outputs.y, b, n, width, first, count);
        };
        EXPECT_TRUE(SameBits("y", rows(replay.outputs(), 0, 0, n), rows(expected, 0, 0, n)));
        EXPECT_TRUE(SameBits("y", rows(replay.outputs(), 1, prefix, rest),
                             rows(expected, 1, prefix, rest)));
        EXPECT_TRUE(SameBits(cache.Read(0, 0, prefix), stored));
      }
    }
  }
}

TEST_P(KvCache, BlocksAreGivenAsTheSequenceGrows) {
  const AttentionProblem history = History(2, 100);
  const mha_kv_cache_config config = CacheConfigOf(history, {MHA_CACHE_KIND_PAGED, 16}, 2, 112);
  Cache cache(config);
  Replay replay = ReplayOf(history, &cache);
  std::vector<int32_t> tables[2];
  int32_t next = static_cast<int32_t>(config.num_blocks);
  while (!replay.Finished()) {
    for (int64_t b = 0; b < 2; b++) {
      while (static_cast<int64_t>(tables[b].size()) * 16 <
             std::min<int64_t>(100, replay.length(b) + 10))
        tables[b].push_back(--next);
      cache.SetBlocks(b, tables[b]);
    }
    replay.Step(history, replay.EachBy(10), Call());
  }
  EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history))));
}

TEST_P(KvCache, BlocksOfAResetSequenceServeAnother) {
  const AttentionProblem history = History(2, 60);
  mha_kv_cache_config config = CacheConfigOf(history, {MHA_CACHE_KIND_PAGED, 16}, 2, 64);
  config.num_blocks = 4;  // enough for one sequence
  Cache cache(config);
  Replay replay = ReplayOf(history, &cache);
  cache.SetBlocks(0, {2, 0, 3, 1});
  replay.Step(history, {{0, 60}}, Call());
  cache.Truncate(0, 0);
  cache.SetBlocks(0, {});
  cache.SetBlocks(1, {0, 1, 2, 3});
  replay.Step(history, {{1, 60}}, Call());
  EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history))));
}

TEST_P(KvCache, AViewOfACopiedBufferContinuesWithTheSameBits) {
  for (const Storage type : kStorageTypes) {
    AttentionProblem history = History(2, 300);
    history.k_type = history.v_type = type;
    for (const CacheForm &form :
         {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 64}, CacheForm{MHA_CACHE_KIND_RING, 64}}) {
      Random random(11);
      history.window_left.reset();
      if (form.kind == MHA_CACHE_KIND_RING) history.window_left = 40;
      Cache cache(CacheConfigOf(history, form, 2, 300));
      SpreadBlocks(&random, &cache);
      Replay replay = ReplayOf(history, &cache);
      for (int64_t n = 0; n < 10; n++) replay.Step(history, replay.EachBy(20), Call());
      Cache copy = cache.Copy();
      EXPECT_EQ(copy.Length(1), 200);
      mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
      mha_error error = {};
      EXPECT_EQ(mha_kv_cache_shape(copy.get(), &config, &error), MHA_OK) << error.message;
      EXPECT_EQ(config.capacity, cache.config().capacity);
      EXPECT_EQ(config.k_type, cache.config().k_type);
      std::fill_n(cache.buffer().data(), cache.buffer().size(),
                  static_cast<unsigned char>(0xff));  // no pointer leads back
      replay.MoveTo(&copy);
      RunEachBy(20, history, &replay);
      EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history))))
          << Describe(form) << " " << Describe(history);
    }
  }
}

TEST_P(KvCache, TellsItsShape) {
  const AttentionProblem history = History(2, 40);
  mha_kv_cache_config config = CacheConfigOf(history, {MHA_CACHE_KIND_PAGED, 16}, 3, 48);
  config.head_dim = 6;
  config.head_dim_v = 0;
  config.v_type = MHA_TYPE_INT8;
  const Cache cache(config);
  mha_kv_cache_config shape = Zeroed<mha_kv_cache_config>();
  mha_error error = {};
  ASSERT_EQ(mha_kv_cache_shape(cache.get(), &shape, &error), MHA_OK) << error.message;
  EXPECT_EQ(shape.num_sequences, 3);
  EXPECT_EQ(shape.capacity, 48);
  EXPECT_EQ(shape.num_kv_heads, 2);
  EXPECT_EQ(shape.head_dim, 6);
  EXPECT_EQ(shape.head_dim_v, 6);
  EXPECT_EQ(shape.k_type, MHA_TYPE_F32);
  EXPECT_EQ(shape.v_type, MHA_TYPE_INT8);
  EXPECT_EQ(shape.kind, MHA_CACHE_KIND_PAGED);
  EXPECT_EQ(shape.block_positions, 16);
  EXPECT_EQ(shape.num_blocks, config.num_blocks);
}

// Caches that were stored are caches for as long as the format has its version.
TEST(CacheBytes, AreThoseOfTheirVersion) {
  std::vector<float> rows(2 * 3 * 5);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 7) - 3.0f;
  rows[4] = FromBits(0xffd23456u);       // of NaNs one is stored
  uint64_t sum = 14695981039346656037u;  // FNV-1a
  for (const uint32_t type : {MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_INT8}) {
    mha_kv_cache_config config = Zeroed<mha_kv_cache_config>();
    config.num_sequences = config.num_blocks = 2;
    config.capacity = config.block_positions = 16;
    config.num_kv_heads = 3;
    config.head_dim = 5;
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
  EXPECT_EQ(sum, 12910920483740965963u) << "version 1 of the format, contract 1";
}

// ---- Values in the keys, but for what generated_test.cpp has

TEST_P(KvCache, WithValuesInItsKeysGivesTheBitsOfTheSpecificationForAnyNumberOfRowsAndKeys) {
  for (const Storage type : kStorageTypes) {
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

// What DeepSeek V2 and V3 have: 576 numbers of a key, of which 512 are the value.
TEST_P(KvCache, WithValuesInItsKeysEqualsOneThatStoresThemTwice) {
  for (const Storage type : {Storage::kF32, Storage::kF16, Storage::kBf16}) {
    for (const CacheForm &form :
         {kContiguous, CacheForm{MHA_CACHE_KIND_PAGED, 64}, CacheForm{MHA_CACHE_KIND_RING, 80}}) {
      AttentionProblem history = History(1, 290, 576, 512, 1);
      history.k_type = history.v_type = type;
      if (form.kind == MHA_CACHE_KIND_RING) history.window_left = 50;
      for (int64_t row = 0; row < 2 * history.n_kv; row++)
        std::copy_n(history.k.begin() + row * 576, 512, history.v.begin() + row * 512);
      AttentionProblem latent = history;
      latent.values_in_keys = true;
      Cache twice(CacheConfigOf(history, form, 1, 290)), once(CacheConfigOf(latent, form, 1, 290));
      EXPECT_GT(static_cast<double>(twice.buffer().size()),
                1.85 * static_cast<double>(once.buffer().size()));
      Random random(1);
      SpreadBlocks(&random, &twice);
      SpreadBlocks(&random, &once);
      const Scheduler scheduler(3, RunBackwards);
      Replay of_twice = ReplayOf(history, &twice), of_once = ReplayOf(latent, &once);
      RunEachBy(29, history, &of_twice);
      while (!of_once.Finished())
        of_once.Step(latent, of_once.EachBy(form.kind == MHA_CACHE_KIND_RING ? 30 : 145),
                     Call(scheduler.get()));
      EXPECT_TRUE(SameBits(of_once.outputs(), of_twice.outputs()))
          << Describe(form) << " " << NameOf(type);
      EXPECT_TRUE(SameBits(once.Read(0, 240, 50), twice.Read(0, 240, 50)))
          << Describe(form) << " " << NameOf(type);
    }
  }
}

TEST_P(KvCache, ACopiedPrefixOfKeysWithValuesIsTheSequenceUpToThere) {
  AttentionProblem history = History(1, 60);
  history.k_type = Storage::kInt8;
  history.values_in_keys = true;
  Cache cache(CacheConfigOf(history, {MHA_CACHE_KIND_PAGED, 16}, 2, 60));
  Random random(1);
  SpreadBlocks(&random, &cache);
  cache.Append(0, {history.k, {}});
  cache.CopyPrefix(0, 1, 37);
  EXPECT_TRUE(SameBits(cache.Read(1, 0, 37), SpecifyStored(history, 0, 0, 37)));
  EXPECT_TRUE(SameBits(cache.Copy().Read(1, 0, 37), SpecifyStored(history, 0, 0, 37)));
  mha_kv_cache_config shape = Zeroed<mha_kv_cache_config>();
  ASSERT_EQ(mha_kv_cache_shape(cache.get(), &shape, nullptr), MHA_OK);
  EXPECT_EQ(shape.values, MHA_CACHE_VALUES_IN_KEYS);
  EXPECT_EQ(shape.v_type, MHA_TYPE_INT8);
}

// ---- Rings

TEST_P(KvCache, ARingEqualsALargeCacheWithTheSameWindow) {
  for (const int64_t capacity : {16, 48, 64, 256, 272}) {
    for (const auto &[k_type, v_type] : {std::pair{Storage::kF32, Storage::kF32},
                                         {Storage::kF16, Storage::kInt8},
                                         {Storage::kInt8, Storage::kBf16}}) {
      for (const int64_t left : {int64_t{0}, capacity / 2, capacity - 1}) {
        AttentionProblem history = History(2, 430, 4, 3, 1);
        history.k_type = k_type;
        history.v_type = v_type;
        history.window_left = left;
        Random random(static_cast<uint64_t>(capacity + left));
        Cache cache(CacheConfigOf(history, {MHA_CACHE_KIND_RING, capacity}, 2, 430));
        Replay replay = ReplayOf(history, &cache);
        Run(&random, history, std::max<int64_t>(1, capacity - left),
            &replay);  // no row is pushed out that the call still needs
        EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history))))
            << "ring of " << capacity << " " << Describe(history);
        EXPECT_EQ(cache.Length(0), 430);
        const int64_t held = std::min<int64_t>(capacity, 430);
        EXPECT_TRUE(
            SameBits(cache.Read(1, 430 - held, held), SpecifyStored(history, 1, 430 - held, held)))
            << "ring of " << capacity;
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(KvCache, ARingMayBeTruncatedAsFarAsItStillHoldsTheWindow) {
  AttentionProblem history = History(1, 300);
  history.window_left = 20;
  history.k_type = Storage::kInt8;
  Random random(13);
  AttentionProblem other = history;
  FillNormal(&random, &other);
  Cache cache(CacheConfigOf(history, {MHA_CACHE_KIND_RING, 64}, 1, 300));
  Replay replay = ReplayOf(history, &cache);
  while (!replay.Finished()) {
    const int64_t before = replay.length(0),
                  more = std::min<int64_t>(random.Between(1, 44), 300 - before);
    replay.Step(other, {{0, more}}, Call());  // 20 + 44 positions fit
    replay.Truncate(0, before);
    // The slots of what was taken back count as used: they are written again first.
    replay.Step(history, {{0, more}}, Call());
  }
  EXPECT_TRUE(SameBits(replay.outputs(), Collected(Specify(history))));
}

TEST_P(KvCache, OfARingThatWasTruncatedToWhatItHasOverwrittenNothingIsThereToRead) {
  const AttentionProblem history = History(1, 40);
  Cache cache(CacheConfigOf(history, {MHA_CACHE_KIND_RING, 16}, 1, 40));
  cache.Append(0, {history.k, history.v});
  cache.Truncate(0, 10);
  EXPECT_TRUE(cache.Read(0, 10, 0).k.empty());
  mha_error error;
  EXPECT_EQ(mha_kv_cache_read(cache.get(), 0, 9, 1, nullptr, nullptr, &error),
            MHA_ERROR_INVALID_VALUE);
  EXPECT_STREQ(error.message,
               "first is 9 and count is 1, but sequence 0 holds only positions >= 10 and < 10; "
               "read within them");
}

TEST_P(KvCache, ACopiedPrefixOfARingIsTheSequenceUpToThere) {
  constexpr int64_t n = 70;
  AttentionProblem history = History(1, n);
  history.window_left = 6;
  history.k_type = Storage::kInt8;
  const Outputs expected = Specify(history);
  // As much as leaves the window of the next row among the 16 positions before `written`.
  for (const auto &[written, length] :
       {std::pair{40, 30}, {40, 31}, {40, 40}, {33, 24}, {16, 10}, {17, 7}}) {
    SCOPED_TRACE(std::to_string(length) + " of " + std::to_string(written));
    Cache cache(CacheConfigOf(history, {MHA_CACHE_KIND_RING, 16}, 2, n));
    cache.Append(0, {SliceRows(history.k, 0, n, 2 * 6, 0, written),
                     SliceRows(history.v, 0, n, 2 * 5, 0, written)});
    cache.CopyPrefix(0, 1, length);
    EXPECT_TRUE(SameBits(cache.Read(1, length - 6, 6), SpecifyStored(history, 0, length - 6, 6)));
    Replay replay = ReplayOf(history, &cache, {1});
    replay.SetLength(0, length);
    RunEachBy(9, history, &replay);
    EXPECT_TRUE(SameBits("y",
                         SliceRows(replay.outputs().y, 0, n, Width(history), length, n - length),
                         SliceRows(expected.y, 0, n, Width(history), length, n - length)));
  }
}

TEST_P(KvCache, AResetRingStartsAnew) {
  AttentionProblem history = History(1, 100);
  history.window_left = 20;
  Cache cache(CacheConfigOf(history, {MHA_CACHE_KIND_RING, 32}, 1, 100));
  const Outputs expected = Collected(Specify(history));
  for (int64_t round = 0; round < 3; round++) {
    Replay replay = ReplayOf(history, &cache);
    replay.Truncate(0, 0);
    RunEachBy(12 - round, history, &replay);
    EXPECT_TRUE(SameBits(replay.outputs(), expected)) << "round " << round;
  }
}

}  // namespace
