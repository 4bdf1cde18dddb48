// Attention over keys that lie in several places: partials of parts, merged and finished, have the
// bits of one call; every partial has those of the specification.
#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "interface/calls.h"
#include "support/attention_test.h"
#include "support/norm.h"
#include "support/rope.h"
#include "support/rounds.h"
#include "support/schedulers.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

// The columns [first, first + count) of so many.
template <typename T>
std::vector<T> Columns(const std::vector<T> &x, int64_t columns, int64_t first, int64_t count) {
  std::vector<T> part;
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(columns)) {
    const auto begin = x.begin() + static_cast<int64_t>(row) + first;
    part.insert(part.end(), begin, begin + count);
  }
  return part;
}

// The call for the keys [first, first + count) of each sequence.
AttentionProblem Part(const AttentionProblem &whole, int64_t first, int64_t count) {
  AttentionProblem part = whole;
  part.n_kv = count;
  part.kv_position = first;
  part.q_start.clear();
  for (int64_t b = 0; b < whole.batch; b++) part.q_start.push_back(ShapeOf(whole, b).q_start);
  for (int64_t &length : part.kv_lengths) length = std::clamp<int64_t>(length - first, 0, count);
  const int64_t k_width = whole.num_kv_heads * whole.head_dim,
                v_width = whole.num_kv_heads * whole.head_dim_v;
  part.k = Columns(whole.k, whole.n_kv * k_width, first * k_width, count * k_width);
  part.v = Columns(whole.v, whole.n_kv * v_width, first * v_width, count * v_width);
  if (!part.score) return part;
  part.score->bias.values = Columns(whole.score->bias.values, whole.n_kv, first, count);
  part.score->mask.values = Columns(whole.score->mask.values, whole.n_kv, first, count);
  part.score->segments.of_keys = Columns(whole.score->segments.of_keys, whole.n_kv, first, count);
  part.score->sinks.clear();
  part.score->head_scales.clear();
  return part;
}

int64_t RowsOf(const AttentionSizes &sizes) { return sizes.batch * sizes.num_heads * sizes.n_q; }

// What the specification makes of a part.
std::vector<float> SpecifyPartials(const AttentionProblem &part) {
  const int64_t width = part.head_dim_v + 2;
  std::vector<float> partials(RowsOf(part) * width);
  for (int64_t row = 0; row < RowsOf(part); row++) partials[row * width] = -kInfinity;
  const std::optional<Norm> norm = NormOf(part);
  for (int64_t b = 0; b < part.batch; b++) {
    const ValidRows valid = ValidRowsOf(part, b);
    std::vector<float> alone(part.num_heads * valid.n_q * width);
    WithRotation(part, b, [&](const Rotation *rotation) {
      WithScoreOptions(part, b, [&](const ScoreOptions *score) {
        AttentionShape shape = ShapeOf(part, b);
        shape.norm = norm ? &*norm : nullptr;
        shape.rotation = rotation;
        shape.score = score;
        spec::AttentionOutputs outputs = {};
        outputs.partials = alone.data();
        spec::Fastest().attend(shape, part.q.data() + b * part.n_q * part.num_heads * part.head_dim,
                               part.k.data() + b * part.n_kv * part.num_kv_heads * part.head_dim,
                               part.v.data() + b * part.n_kv * part.num_kv_heads * part.head_dim_v,
                               outputs);
      });
    });
    for (int64_t h = 0; h < part.num_heads; h++) {
      const auto from = alone.begin() + h * valid.n_q * width;
      std::copy(from, from + valid.n_q * width,
                partials.begin() + ((b * part.num_heads + h) * part.n_q) * width);
    }
  }
  return partials;
}

struct Finished {
  std::vector<float> y, lse;
};

class Partials : public AttentionTest {
 protected:
  std::vector<float> Run(const AttentionProblem &part, AttentionCall call) const {
    call.asked = kAskNothing;
    call.instruction_set = instruction_set();
    AttentionData data(part, call);
    data.args.output = {};
    Memory partials(static_cast<size_t>(RowsOf(part) * (part.head_dim_v + 2)) * sizeof(float));
    partials.Fill(0xff);
    data.outputs.partials = partials.floats();
    const size_t bytes = data.WorkspaceBytes();
    Memory workspace(bytes);
    workspace.Fill(0xff);
    mha_error error;
    Check(data.Run(workspace.data(), bytes, &error), error);
    return std::vector<float>(partials.floats(),
                              partials.floats() + partials.size() / sizeof(float));
  }

  std::vector<float> Merge(const std::vector<float> &left, const std::vector<float> &right,
                           int64_t head_dim_v) const {
    std::vector<float> result = left;
    mha_error error;
    const int64_t rows = static_cast<int64_t>(left.size()) / (head_dim_v + 2);
    Check(mha_partials_merge(rows, head_dim_v, result.data(), right.data(), result.data(),
                             instruction_set(), &error),
          error);
    std::vector<float> in_right = right;
    Check(mha_partials_merge(rows, head_dim_v, left.data(), in_right.data(), in_right.data(),
                             instruction_set(), &error),
          error);
    EXPECT_TRUE(SameBits("the result in place of either", in_right, result));
    return result;
  }

  // In the given layout, whose gaps stay as they are.
  Finished Finish(const AttentionProblem &whole, const std::vector<float> &partials,
                  const Layout &layout = kDense) const {
    Finished finished = {{}, std::vector<float>(RowsOf(whole), kNan)};
    Strided output(layout, whole.batch, whole.n_q, whole.num_heads, whole.head_dim_v,
                   Place::kBeforeGuard);
    mha_partials_args args = Zeroed<mha_partials_args>();
    args.batch = whole.batch;
    args.num_heads = whole.num_heads;
    args.n_q = whole.n_q;
    args.head_dim_v = whole.head_dim_v;
    args.partials = partials.data();
    if (whole.score && !whole.score->sinks.empty()) args.sinks = whole.score->sinks.data();
    if (whole.score && !whole.score->head_scales.empty())
      args.head_scales = whole.score->head_scales.data();
    args.output.data = output.memory.data();
    args.output.strides = {output.batch_stride(), output.row_stride(), output.head_stride()};
    args.lse = finished.lse.data();
    args.instruction_set = instruction_set();
    mha_error error;
    Check(mha_partials_finish(&args, &error), error);
    EXPECT_TRUE(output.GapsAreUntouched());
    finished.y = output.Get();
    return finished;
  }

  // Parts of so many keys, merged as in a tournament.
  std::vector<float> RunInParts(const AttentionProblem &whole, int64_t keys) const {
    std::vector<std::vector<float>> round;
    for (int64_t first = 0; first < whole.n_kv; first += keys) {
      const AttentionProblem part = Part(whole, first, std::min(keys, whole.n_kv - first));
      round.push_back(Run(part, {}));
      EXPECT_TRUE(SameBits("partials", round.back(), SpecifyPartials(part))) << Describe(part);
    }
    while (round.size() > 1) {
      std::vector<std::vector<float>> next;
      for (size_t i = 0; i < round.size(); i += 2) {
        next.push_back(i + 1 < round.size() ? Merge(round[i], round[i + 1], whole.head_dim_v)
                                            : round[i]);
      }
      round = std::move(next);
    }
    return round[0];
  }

  void ExpectTheBitsOfOneCall(const AttentionProblem &whole, int64_t keys) const {
    const Outputs expected = AttentionTest::Run(whole, kAskLse);
    const Finished finished = Finish(whole, RunInParts(whole, keys));
    EXPECT_TRUE(SameBits("y", finished.y, expected.y))
        << Describe(whole) << " in parts of " << keys;
    EXPECT_TRUE(SameBits("lse", finished.lse, expected.lse))
        << Describe(whole) << " in parts of " << keys;
  }
};
MHA_INSTANTIATE_FOR_INSTRUCTION_SETS(Partials);

AttentionProblem Problem(Random *random, int64_t n_q, int64_t n_kv) {
  AttentionProblem problem;
  problem.batch = random->Between(1, 2);
  problem.n_q = n_q;
  problem.n_kv = n_kv;
  problem.num_kv_heads = random->Between(1, 2);
  problem.num_heads = problem.num_kv_heads * random->Between(1, 3);
  problem.head_dim = random->Pick<int64_t>({8, 6, 17, 32});
  problem.head_dim_v = random->Pick<int64_t>({8, 5, 16, 33});
  FillNormal(random, &problem);
  return problem;
}

// Everything that changes what takes part, and what its position changes.
AttentionProblem RandomProblem(Random *random) {
  const int64_t n_kv = random->Between(200, 1100);
  AttentionProblem problem = Problem(random, random->Pick<int64_t>({1, 1, 3, 40}), n_kv);
  MakeSpecial(random, RandomKind(random), 1, &problem.k);
  MakeSpecial(random, random->Pick({Values::kNormal, Values::kSpecial, Values::kTies}), 1,
              &problem.v);
  problem.is_causal = random->Coin();
  if (random->Coin()) problem.window_left = random->Pick<int64_t>({0, 30, 256, 700});
  if (random->Chance(0.2)) problem.window_right = random->Pick<int64_t>({0, 30, 256});
  if (random->Coin()) {
    for (int64_t b = 0; b < problem.batch; b++)
      problem.q_start.push_back(random->Between(-5, n_kv + 20));
  }
  if (random->Chance(0.3)) {
    for (int64_t b = 0; b < problem.batch; b++)
      problem.kv_lengths.push_back(random->Between(problem.n_q, n_kv));
    for (int64_t b = 0; b < problem.batch; b++)
      problem.q_lengths.push_back(random->Between(0, problem.n_q));
  }
  if (random->Chance(0.3) && problem.head_dim % 2 == 0)
    problem.rope = MakeRope(random->Coin(), problem.head_dim, n_kv + 100);
  if (problem.rope && !problem.is_causal) problem.q_start.clear();
  if (random->Chance(0.2)) problem.norm = RandomNorm(random, problem);
  if (random->Chance(0.2)) return problem;
  problem.score.emplace();
  ScoreArrays &score = *problem.score;
  if (random->Coin()) score.softcap = 5;
  if (random->Coin()) score.alibi_slopes = random->Normals(problem.num_heads, 0.1f);
  if (random->Coin()) score.sinks = random->Normals(problem.num_heads, 2.0f);
  if (random->Chance(0.3)) score.head_scales = random->Normals(problem.num_heads);
  if (random->Chance(0.1)) score.head_scales.assign(problem.num_heads, 0.0f);
  if (random->Coin()) {
    score.relative_left = random->Pick<int64_t>({0, 40, 600});
    score.relative_bias = random->Normals(problem.num_heads * (score.relative_left + 1));
  }
  if (random->Chance(0.3)) score.q_scales = random->Normals(problem.batch * problem.n_q);
  if (random->Chance(0.3)) score.bias.values = random->Normals(problem.n_q * n_kv);
  if (random->Coin()) {
    while (static_cast<int64_t>(score.mask.values.size()) < problem.n_q * n_kv) {
      score.mask.values.resize(
          std::min<size_t>(score.mask.values.size() + static_cast<size_t>(random->Between(1, 400)),
                           static_cast<size_t>(problem.n_q * n_kv)),
          random->Coin());
    }
  }
  if (random->Chance(0.3)) {
    for (int64_t i = 0; i < problem.batch * problem.n_q; i++)
      score.segments.of_queries.push_back(random->Between(0, 1));
    for (int64_t j = 0; j < problem.batch * n_kv; j++)
      score.segments.of_keys.push_back(j % n_kv / 300);
    score.segments.add_keys = random->Coin();
    if (score.segments.add_keys) problem.rope.reset();
  }
  return problem;
}

TEST_P(Partials, OfEqualSubtreesOfKeysMergeToTheBitsOfOneCall) {
  Sample sample;
  for (uint64_t seed = 1; seed <= 120 && !HasFailure(); seed++) {
    if (!sample.Takes()) continue;
    Random random(seed);
    const AttentionProblem problem = RandomProblem(&random);
    ExpectTheBitsOfOneCall(problem, random.Pick<int64_t>({256, 256, 512, 1024}));
  }
}

// Of any length, from any position on, however far away.
TEST_P(Partials, OfAnyPartEqualTheSpecification) {
  Sample sample;
  for (uint64_t seed = 1; seed <= 40 && !HasFailure(); seed++) {
    if (!sample.Takes()) continue;
    Random random(seed);
    AttentionProblem problem = RandomProblem(&random);
    const int64_t first = random.Below(problem.n_kv);
    AttentionProblem part = Part(problem, first, random.Between(1, problem.n_kv - first));
    if (!part.rope && random.Coin()) {
      const int64_t far = random.Pick<int64_t>({1, 100'000, (int64_t{1} << 62) - 2000});
      part.kv_position += far;
      for (int64_t &start : part.q_start) start += far;
    }
    EXPECT_TRUE(SameBits("partials", Run(part, {}), SpecifyPartials(part)))
        << Describe(part) << " seed " << seed;
  }
}

// Entries of a list are numbers of the call's own keys, of which those are left that flags leave by
// their true positions.
TEST_P(Partials, OfChosenKeysEqualTheSpecification) {
  for (const int64_t block : {1, 40}) {
    Random random(6);
    AttentionProblem part = Part(Problem(&random, 3, 900), 300, 600);
    part.is_causal = true;
    part.window_left = 500;
    part.score.emplace();
    part.score->alibi_slopes = random.Normals(part.num_heads, 0.1f);
    part.score->chosen_block = block;
    part.score->chosen.columns = 8;
    for (int64_t n = 0; n < part.n_q * 8; n++) {
      part.score->chosen.values.push_back(static_cast<int32_t>(random.Between(-1, 599 / block)));
    }
    EXPECT_TRUE(SameBits("partials", Run(part, {}), SpecifyPartials(part)))
        << Describe(part) << " blocks of " << block;
  }
}

// The last query is at the last key of the call, which is kv_first_position further on. Finished
// outputs of a part, too, are those of its positions.
TEST_P(Partials, CountPositionsFromTheFirstKeyOfTheSequence) {
  Random random(2);
  AttentionProblem whole = Problem(&random, 5, 700);
  whole.window_left = 100;
  whole.score.emplace().alibi_slopes = random.Normals(whole.num_heads, 0.1f);
  AttentionProblem part = Part(whole, 512, 188);
  EXPECT_TRUE(SameBits(AttentionTest::Run(part, kAskLse), AttentionTest::Run(whole, kAskLse)));
  const std::vector<float> expected = Run(part, {});
  part.q_start.clear();
  EXPECT_TRUE(SameBits("partials", Run(part, {}), expected));
}

// Threads share out the keys of few rows, and merge their partials themselves.
TEST_P(Partials, OnAnyThreadsEqualTheSpecification) {
  Random random(3);
  const AttentionProblem part = Part(Problem(&random, 1, 4000), 1000, 3000);
  const std::vector<float> expected = SpecifyPartials(part);
  for (const uint32_t threads : {1, 2, 7}) {
    SerialScheduler scheduler{threads};
    AttentionCall call;
    call.scheduler = &scheduler.scheduler;
    call.place = Place::kBeforeGuard;
    EXPECT_TRUE(SameBits("partials", Run(part, call), expected)) << threads << " threads";
  }
}

// Two caches with half of the keys each, which are rotated where they stand in the sequence; a
// window that a ring holds.
TEST_P(Partials, OfCachesWithPartsOfTheKeysMergeToTheBitsOfOneCache) {
  const CacheForm contiguous = {MHA_CACHE_KIND_CONTIGUOUS, 0};
  for (const CacheForm form :
       {contiguous, CacheForm{MHA_CACHE_KIND_PAGED, 64}, CacheForm{MHA_CACHE_KIND_RING, 304}}) {
    for (const Storage type : {Storage::kF32, Storage::kInt4, Storage::kF16}) {
      Random random(4);
      AttentionProblem whole = Problem(&random, 4, 800);
      whole.head_dim = 6;
      whole.batch = 1;
      whole.is_causal = true;
      whole.window_left = 300;
      whole.rope = MakeRope(false, 6, 800);
      whole.k_type = KeysBeside(whole.v_type = type);
      FillNormal(&random, &whole);
      std::vector<std::vector<float>> partials;
      for (const int64_t first : {0, 512}) {
        const AttentionProblem part = Part(whole, first, first == 0 ? 512 : 288);
        // A ring begins with the call: the last query is at the last key.
        const bool is_ring = form.kind == MHA_CACHE_KIND_RING && first != 0;
        Cache cache(CacheConfigOf(part, is_ring ? form : contiguous, 1, part.n_kv));
        if (form.kind == MHA_CACHE_KIND_PAGED) {
          cache = Cache(CacheConfigOf(part, form, 1, part.n_kv));
          SpreadBlocks(&random, &cache);
        }
        AttentionProblem call_of = part;
        AttentionCall call;
        if (is_ring) {  // in two calls, of which the first one's partials are not looked at
          call_of.q_start.clear();
          AttentionProblem before = Slice(call_of, 0, 0, 4, 284);
          before.n_q = 284;
          before.q = random.Normals(284 * before.num_heads * before.head_dim);
          call.cache = {cache.get(), {}, 284};
          Run(before, call);
          call_of.n_kv = 4;
          call_of.k = SliceRows(part.k, 0, 288, part.num_kv_heads * part.head_dim, 284, 4);
          call_of.v = SliceRows(part.v, 0, 288, part.num_kv_heads * part.head_dim_v, 284, 4);
        }
        call.cache = {cache.get(), {}, 288};
        partials.push_back(Run(call_of, call));
      }
      const Finished finished = Finish(whole, Merge(partials[0], partials[1], whole.head_dim_v));
      const Outputs expected = Specify(whole);
      EXPECT_TRUE(SameBits("y", finished.y, expected.y))
          << Describe(form) << " of " << NameOf(type);
      EXPECT_TRUE(SameBits("lse", finished.lse, expected.lse))
          << Describe(form) << " of " << NameOf(type);
    }
  }
}

// ---- Any partials at all

// Rows of any numbers, empty ones among them, and NaN of any payload.
std::vector<float> AnyPartials(Random *random, int64_t rows, int64_t head_dim_v) {
  std::vector<float> partials =
      RandomValues(random, RandomKind(random), rows * (head_dim_v + 2), 3);
  for (int64_t row = 0; row < rows; row++) {
    float *const partial = &partials[row * (head_dim_v + 2)];
    partial[1] = 1 + 20 * static_cast<float>(random->Unit());
    if (random->Chance(0.1)) partial[0] = partial[1] = kNan;
    if (random->Chance(0.1)) partial[0] = FromBits(0xffd23456u);
    if (random->Chance(0.1)) partial[1] = FromBits(0xffd23456u);
    if (random->Chance(0.1)) partial[0] = -kInfinity;
    if (!random->Chance(0.2)) continue;
    std::fill_n(partial, head_dim_v + 2, random->Coin() ? 0.0f : -0.0f);
    partial[0] = random->Coin() ? -kInfinity : 1.0f;
  }
  return partials;
}

TEST_P(Partials, MergedAndFinishedEqualTheSpecification) {
  for (uint64_t seed = 1; seed <= 200 && !HasFailure(); seed++) {
    Random random(seed);
    AttentionProblem problem;
    problem.batch = random.Between(1, 3);
    problem.num_heads = random.Between(1, 5);
    problem.n_q = random.Between(1, 4);
    problem.head_dim_v = random.Pick<int64_t>({1, 5, 8, 64, 65, 200});
    problem.score.emplace();
    if (random.Coin()) problem.score->sinks = random.Normals(problem.num_heads, 3);
    if (random.Coin()) problem.score->head_scales = random.Normals(problem.num_heads);
    if (random.Chance(0.2)) problem.score->head_scales.assign(problem.num_heads, 0.0f);
    const int64_t width = problem.head_dim_v, rows = RowsOf(problem);
    const std::vector<float> left = AnyPartials(&random, rows, width),
                             right = AnyPartials(&random, rows, width);
    std::vector<float> merged(left.size());
    Finished expected = {std::vector<float>(rows * width), std::vector<float>(rows)};
    for (int64_t row = 0; row < rows; row++) {
      const int64_t at = row * (width + 2), head = row / problem.n_q % problem.num_heads,
                    query = row % problem.n_q;
      const int64_t to =
          (row / problem.n_q / problem.num_heads * problem.n_q + query) * problem.num_heads + head;
      spec::Fastest().merge_partials(width, &left[at], &right[at], &merged[at]);
      spec::Fastest().finish_partial(
          width, &merged[at], problem.score->sinks.empty() ? nullptr : &problem.score->sinks[head],
          problem.score->head_scales.empty() ? nullptr : &problem.score->head_scales[head],
          &expected.y[to * width], &expected.lse[row]);
    }
    EXPECT_TRUE(SameBits("partials", Merge(left, right, width), merged)) << "seed " << seed;
    for (const Layout &layout : {kDense, kHeadsOutside, kRowsOutside, kGaps}) {
      const Finished finished = Finish(problem, merged, layout);
      EXPECT_TRUE(SameBits("y", finished.y, expected.y)) << Describe(layout) << " seed " << seed;
      EXPECT_TRUE(SameBits("lse", finished.lse, expected.lse)) << "seed " << seed;
    }
  }
}

// As a call narrows its output; either output alone is what both are.
TEST_P(Partials, FinishedIn16BitsAreThoseOfACall) {
  Random random(5);
  AttentionProblem problem = Problem(&random, 7, 300);
  problem.head_dim_v = 100;
  FillNormal(&random, &problem);
  const std::vector<float> partials = Run(problem, {});
  const Finished both = Finish(problem, partials);
  for (const Storage type : {Storage::kF16, Storage::kBf16}) {
    AttentionCall call = PlainCall();
    call.asked = kAskNothing;
    call.output_array = type;
    const Outputs expected = Attend(problem, call);
    std::vector<uint16_t> output(both.y.size());
    mha_partials_args args = Zeroed<mha_partials_args>();
    args.batch = problem.batch;
    args.num_heads = problem.num_heads;
    args.n_q = problem.n_q;
    args.head_dim_v = problem.head_dim_v;
    args.partials = partials.data();
    args.output.data = output.data();
    args.output.type = static_cast<uint32_t>(type);
    args.instruction_set = instruction_set();
    ASSERT_EQ(mha_partials_finish(&args, nullptr), MHA_OK);
    std::vector<float> wide;
    for (const uint16_t bits : output) wide.push_back(FloatOf(type, bits));
    EXPECT_TRUE(SameBits("y", wide, expected.y)) << NameOf(type);
    std::vector<float> lse(both.lse.size());
    args.output = {};
    args.lse = lse.data();
    ASSERT_EQ(mha_partials_finish(&args, nullptr), MHA_OK);
    EXPECT_TRUE(SameBits("lse", lse, both.lse));
  }
}

// Partials are written in place of the output, with two numbers more for each row.
TEST(PartialsInfo, CountsTheBytesOfPartials) {
  AttentionData data{NormalAttention(FullProblem()), {Guarded()}};
  mha_call_info with_output = Zeroed<mha_call_info>(), with_partials = with_output;
  float partials[1];
  ASSERT_EQ(data.Info(&with_output, nullptr), MHA_OK);
  data.args.output = {};
  data.outputs.partials = partials;
  ASSERT_EQ(data.Info(&with_partials, nullptr), MHA_OK);
  EXPECT_EQ(with_partials.operations, with_output.operations);
  const int64_t rows = data.args.call.batch * data.args.num_heads * data.args.call.n_q;
  EXPECT_EQ(with_partials.bytes,
            with_output.bytes + static_cast<uint64_t>(rows) * 2 * sizeof(float));
}

// ---- Bad input

struct PartialsCall {
  PartialsCall() {
    data.args.output = {};
    data.outputs.partials = partials;
  }
  AttentionProblem problem = NormalAttention(FullProblem());
  float partials[4096] = {};
  AttentionData data{problem, {Guarded()}};
  mha_attention_args &args = data.args;
};

void ExpectRefused(void (*change)(PartialsCall &), const Words &words) {
  PartialsCall call;
  change(call);
  Memory workspace(1 << 20);
  size_t bytes = 4711;
  const Expected expected = {MHA_ERROR_INVALID_VALUE, {1}, words};
  ExpectFails([&](mha_error *error) { return mha_attention_workspace(&call.args, &bytes, error); },
              expected);
  ExpectFails(
      [&](mha_error *error) {
        return mha_attention(&call.args, workspace.data(), workspace.size(), error);
      },
      expected);
  EXPECT_EQ(bytes, 4711u);
  EXPECT_TRUE(std::all_of(call.partials, call.partials + 4096, [](float x) { return x == 0; }));
}

TEST(PartialsErrors, OutputsOfFinishedRowsAreRefusedBesideStates) {
  static float numbers[64];
  ExpectRefused([](PartialsCall &c) { c.args.output.data = numbers; },
                {"output.data is given beside outputs.partials", "mha_partials_finish"});
  ExpectRefused([](PartialsCall &c) { c.args.output.type = MHA_TYPE_F16; },
                {"output.type is given beside outputs.partials"});
  ExpectRefused([](PartialsCall &c) { c.args.output.strides.row = 100; }, {"output.strides"});
  ExpectRefused([](PartialsCall &c) { c.data.outputs.lse = numbers; },
                {"outputs.lse is given beside outputs.partials"});
  ExpectRefused([](PartialsCall &c) { c.data.outputs.attention_weights = numbers; },
                {"an output per pair is given beside outputs.partials"});
  ExpectRefused([](PartialsCall &c) { c.data.outputs.scores = numbers; },
                {"an output per pair is given beside outputs.partials"});
  ExpectRefused(
      [](PartialsCall &c) {
        c.data.score.sinks = numbers;
        c.args.call.score = &c.data.score;
      },
      {"score.sinks is given beside outputs.partials"});
  ExpectRefused(
      [](PartialsCall &c) {
        c.data.score.head_scales = numbers;
        c.args.call.score = &c.data.score;
      },
      {"score.head_scales is given beside outputs.partials"});
}

TEST(PartialsErrors, PositionsOutsideTheirRangeAreRefused) {
  ExpectRefused([](PartialsCall &c) { c.args.kv_first_position = -1; },
                {"kv_first_position is -1"});
  ExpectRefused([](PartialsCall &c) { c.args.kv_first_position = (int64_t{1} << 62) + 1; },
                {"kv_first_position", "2^62"});
  PartialsCall call;
  call.args.kv_first_position = 1000;
  call.args.call.flags |= MHA_CAUSAL;
  Memory workspace(1 << 20);
  for (const int64_t start : {std::numeric_limits<int64_t>::min(), -(int64_t{1} << 62) + 999}) {
    call.data.q_start[0] = start;
    ExpectFails(
        [&](mha_error *error) {
          return mha_attention(&call.args, workspace.data(), workspace.size(), error);
        },
        {MHA_ERROR_INVALID_VALUE,
         {1},
         {"sequences.q_first_positions[0]", "kv_first_position -2^62"}});
  }
  call.data.q_start[0] = -(int64_t{1} << 62) + 1000;
  ExpectSucceeds([&](mha_error *error) {
    return mha_attention(&call.args, workspace.data(), workspace.size(), error);
  });
}

TEST(PartialsErrors, OfTheMergeNameTheArgument) {
  float numbers[12] = {};
  const auto expect = [&](int64_t rows, int64_t head_dim_v, const float *left, const float *right,
                          float *result, uint32_t instruction_set, const Expected &expected) {
    ExpectFails(
        [&](mha_error *error) {
          return mha_partials_merge(rows, head_dim_v, left, right, result, instruction_set, error);
        },
        expected);
  };
  float *const x = numbers, *const none = nullptr;
  constexpr mha_status wrong = MHA_ERROR_INVALID_VALUE, null = MHA_ERROR_NULL_POINTER;
  expect(0, 4, x, x, x, 0, {wrong, {1}, {"rows is 0", "MHA_EMPTY"}});
  expect(-1, 4, x, x, x, 0, {wrong, {1}, {"rows is -1"}});
  expect(2, 0, x, x, x, 0, {wrong, {2}, {"head_dim_v is 0"}});
  expect(2, int64_t{1} << 31, x, x, x, 0, {wrong, {2}, {"head_dim_v"}});
  expect(int64_t{1} << 60, 4, x, x, x, 0, {MHA_ERROR_TOO_LARGE, {1}, {"address space"}});
  expect(2, 4, none, x, x, 0, {null, {3}, {"left is NULL"}});
  expect(2, 4, x, none, x, 0, {null, {4}, {"right is NULL"}});
  expect(2, 4, x, x, none, 0, {null, {5}, {"result is NULL"}});
  expect(2, 4, x, x, x, 99, {wrong, {6}, {"instruction_set is 99"}});
  expect(2, 4, x, x, x, AbsentInstructionSet(),
         {MHA_ERROR_INSTRUCTION_SET, {6}, {"MHA_INSTRUCTION_SET_AUTO"}});
  ExpectSucceeds([](mha_error *error) {
    return mha_partials_merge(MHA_EMPTY, 4, nullptr, nullptr, nullptr, 0, error);
  });
}

TEST(PartialsErrors, OfFinishingNameTheField) {
  static float numbers[64];
  const auto expect = [](void (*change)(mha_partials_args &), const Words &words,
                         mha_status status = MHA_ERROR_INVALID_VALUE) {
    float partials[40] = {}, output[32] = {}, lse[4] = {};
    mha_partials_args args = Zeroed<mha_partials_args>();
    args.batch = 1;
    args.n_q = args.num_heads = 2;
    args.head_dim_v = 8;
    args.partials = partials;
    args.output.data = output;
    args.lse = lse;
    change(args);
    ExpectFails([&](mha_error *error) { return mha_partials_finish(&args, error); },
                {status, {1}, words});
    EXPECT_TRUE(std::all_of(output, output + 32, [](float x) { return x == 0; }));
  };
  expect([](auto &a) { a.struct_size = 8; }, {"mha_partials_args.struct_size"},
         MHA_ERROR_STRUCT_SIZE);
  expect([](auto &a) { a.n_q = 0; }, {"n_q is 0"});
  expect([](auto &a) { a.num_heads = 0; }, {"num_heads is 0"});
  expect([](auto &a) { a.num_heads = int64_t{1} << 31; }, {"num_heads is 2147483648"});
  expect([](auto &a) { a.head_dim_v = -3; }, {"head_dim_v is -3"});
  expect([](auto &a) { a.batch = int64_t{1} << 60; }, {"partials"}, MHA_ERROR_TOO_LARGE);
  expect([](auto &a) { a.output.type = MHA_TYPE_INT8; }, {"output.type is 4"});
  expect([](auto &a) { a.output.type = MHA_TYPE_F16, a.output.data = nullptr; }, {"output.data"});
  expect([](auto &a) { a.output.strides.row = 8, a.output.data = nullptr; }, {"output.data"});
  expect([](auto &a) { a.output.strides.head = 7; }, {"output.strides.head is 7", "8"});
  expect([](auto &a) { a.output.strides.row = 15; }, {"output.strides.row is 15", "16"});
  expect([](auto &a) { a.output.strides.batch = MHA_BROADCAST; }, {"output.strides.batch"});
  expect([](auto &a) { a.output.reserved = 1; }, {"output.reserved"});
  expect([](auto &a) { a.reserved = 7; }, {"reserved is 7", "set it to 0 in mha_partials_args"});
  expect([](auto &a) { a.partials = nullptr; }, {"partials is NULL"}, MHA_ERROR_NULL_POINTER);
  expect([](auto &a) { a.output.data = a.lse = nullptr; }, {"output.data and lse"},
         MHA_ERROR_NULL_POINTER);
  expect([](auto &a) { a.instruction_set = 99; }, {"instruction_set is 99"});
  expect([](auto &a) { numbers[1] = kInfinity, a.sinks = numbers; }, {"sinks[1] is inf"});
  expect([](auto &a) { numbers[1] = kNan, a.head_scales = numbers; }, {"head_scales[1] is nan"});
  mha_partials_args args = Zeroed<mha_partials_args>();
  args.batch = MHA_EMPTY;
  args.n_q = args.num_heads = args.head_dim_v = 1;
  ExpectSucceeds([&](mha_error *error) { return mha_partials_finish(&args, error); });
}

}  // namespace
