// Mistakes that would compute other numbers than were meant, such as strides of which some were
// forgotten or a flag in the wrong field, are refused, and the field is named. What looks like one
// of them but is right gives the right numbers.

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "interface/calls.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr uint32_t kOfAttention = 1, kOfForward = 2;  // the parameter that the arguments are

std::string Number(int64_t number) { return std::to_string(number); }

// The call fails as expected and writes nothing.
void ExpectInvalidCall(CallData *data, uint32_t argument, const Words &words) {
  Memory workspace(1 << 20);
  data->PoisonOutputs();
  ExpectFails([&](auto *error) { return data->Run(workspace.data(), workspace.size(), error); },
              {kInvalid, {argument}, words});
  EXPECT_TRUE(data->OutputsAreUntouched());
}

// The size query, which reads no array, fails as well.
void ExpectInvalid(CallData *data, uint32_t argument, const Words &words) {
  size_t bytes = 4711;
  ExpectFails([&](auto *error) { return data->Workspace(&bytes, error); },
              {kInvalid, {argument}, words});
  EXPECT_EQ(bytes, 4711u);
  ExpectInvalidCall(data, argument, words);
}

std::string Describe(const mha_strides &strides) {
  return Number(strides.batch) + ", " + Number(strides.row) + ", " + Number(strides.head);
}

// The call gives the same results with each of these strides of an array.
template <typename Data>
void ExpectSameResults(Data *data, mha_strides *strides, const Outputs &expected,
                       const std::vector<mha_strides> &all) {
  for (const mha_strides &right : all) {
    SCOPED_TRACE(Describe(right));
    *strides = right;
    EXPECT_TRUE(SameBits(data->Compute(), expected));
  }
  *strides = {};
}

// Wrong strides (batch, row, head), and the message about them.
struct WrongStrides {
  mha_strides strides;
  Words words;
};
Words Less(const std::string &name, int64_t is, int64_t than) {
  return {name + " is " + Number(is), "less than the " + Number(than)};
}

AttentionProblem Middle() { return NormalAttention(SmallSizes()); }

// ---- Strides of rows

// An array [batch, rows, heads, width] of a call.
struct RowArray {
  std::string name;
  mha_strides *strides;
  int64_t rows, heads, width;
};

std::vector<RowArray> ArraysOf(AttentionData *data) {
  mha_attention_args &args = data->args;
  return {{"q", &args.q.strides, 3, 4, 3},
          {"k", &args.k.strides, 4, 2, 3},
          {"v", &args.v.strides, 4, 2, 5},
          {"output", &args.output.strides, 3, 4, 5}};
}

std::vector<RowArray> ArraysOf(ForwardData *data) {
  mha_forward_args &args = data->args;
  return {{"query", &args.query.strides, 3, 0, 10},
          {"key", &args.key.strides, 4, 0, 7},
          {"value", &args.value.strides, 4, 0, 9},
          {"output", &args.output.strides, 3, 0, 11}};
}

TEST(PartialStrides, AttentionRefusesStridesThatOverlap) {
  AttentionData data(Middle(), {Guarded()});
  const Outputs expected = data.Compute();
  for (const RowArray &array : ArraysOf(&data)) {
    SCOPED_TRACE(array.name);
    const std::string name = array.name + ".strides.", head = name + "head is ";
    const int64_t width = array.width, row = array.heads * width, sequence = array.rows * row,
                  rows = array.rows * width;
    const std::string no_row = "row is 0", no_batch = "batch is 0";
    const WrongStrides cases[] = {
        {{0, width, 0}, Less(name + "row", width, row)},
        {{0, row - 1, 0}, Less(name + "row", row - 1, row)},
        {{sequence, width, 0}, Less(name + "row", width, row)},
        {{row, 0, 0}, Less(name + "batch", row, sequence)},
        {{sequence - 1, 0, 0}, Less(name + "batch", sequence - 1, sequence)},
        {{0, 0, width}, {head + Number(width), no_row}},
        {{sequence, 0, width}, {head + Number(width), no_row}},
        {{0, row, width}, {head + Number(width), no_batch}},
        {{0, width, rows}, {head + Number(rows), no_batch}},
    };
    for (const auto &[strides, words] : cases) {
      SCOPED_TRACE(Describe(strides));
      *array.strides = strides;
      ExpectInvalid(&data, kOfAttention, words);
    }
    ExpectSameResults(&data, array.strides, expected,
                      {{0, row, 0}, {sequence, 0, 0}, {sequence, row, 0}, {sequence, row, width}});
  }
}

TEST(PartialStrides, ForwardRefusesStridesThatOverlapOrOfHeads) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem, {Guarded()});
  const Outputs expected = data.Compute();
  for (const RowArray &array : ArraysOf(&data)) {
    SCOPED_TRACE(array.name);
    const std::string name = array.name + ".strides.";
    const int64_t width = array.width, sequence = array.rows * width;
    for (const int64_t batch : {int64_t{1}, width, sequence - 1}) {
      *array.strides = {batch, 0, 0};
      ExpectInvalid(&data, kOfForward, Less(name + "batch", batch, sequence));
    }
    for (const int64_t row : {int64_t{1}, width - 1}) {
      for (const int64_t batch : {int64_t{0}, sequence}) {
        *array.strides = {batch, row, 0};
        ExpectInvalid(
            &data, kOfForward,
            {name + "row is " + Number(row), "less than the width of a row, " + Number(width)});
      }
    }
    for (const int64_t head : {int64_t{1}, width, int64_t{-1}, MHA_BROADCAST}) {
      for (const mha_strides &strides : {mha_strides{0, 0, head}, {sequence, width, head}}) {
        *array.strides = strides;
        ExpectInvalid(&data, kOfForward,
                      {name + "head is " + Number(head), std::string("no head dimension")});
      }
    }
    ExpectSameResults(&data, array.strides, expected,
                      {{0, width, 0}, {sequence, 0, 0}, {sequence, width, 0}});
  }
}

// ---- Inputs that interleave, with every stride set

// Sequence b begins b rows after the first one: the sequences are overlapping windows of a long
// one.
TEST(InterleavedInputs, OverlappingSequencesGiveTheBitsOfCopies) {
  AttentionProblem problem = Middle();
  Random random(4);
  const std::vector<float> q = random.Normals((3 + 1) * 12), k = random.Normals((4 + 1) * 6),
                           v = random.Normals((4 + 1) * 10);
  for (int64_t b = 0; b < 2; b++) {
    std::copy_n(q.begin() + b * 12, 3 * 12, problem.q.begin() + b * 3 * 12);
    std::copy_n(k.begin() + b * 6, 4 * 6, problem.k.begin() + b * 4 * 6);
    std::copy_n(v.begin() + b * 10, 4 * 10, problem.v.begin() + b * 4 * 10);
  }
  const Memory q_placed = CopyOf(q, Place::kBeforeGuard), k_placed = CopyOf(k, Place::kBeforeGuard),
               v_placed = CopyOf(v, Place::kBeforeGuard);
  AttentionData data(problem);
  data.args.q.data = q_placed.floats();
  data.args.k.data = k_placed.floats();
  data.args.v.data = v_placed.floats();
  data.args.q.strides = {12, 12, 3};
  data.args.k.strides = {6, 6, 3};
  data.args.v.strides = {10, 10, 5};
  EXPECT_TRUE(SameBits(data.Compute(), Attend(problem)));
}

// ---- Strides of arrays with a number per pair of query and key

// The strides of an array [batch, heads, n_q, columns] in a call of batch 2 and n_q 3.
struct PairArray {
  std::string name;
  int64_t heads, columns;
  mha_strides &(*strides)(FullAttention &call);
};

const PairArray kPairArrays[] = {
    {"score_arrays.bias.strides.", 4, 4,
     [](auto &c) -> mha_strides & { return c.Bias().bias.strides; }},
    {"score_arrays.mask_strides.", 4, 4,
     [](auto &c) -> mha_strides & { return c.Mask().mask_strides; }},
    {"score_arrays.relative_rows_strides.", 4, 6,
     [](auto &c) -> mha_strides & {
       c.Score().relative_left = 3, c.Score().relative_right = 2;
       return c.RelativeRows().relative_rows_strides;
     }},
    {"score_arrays.chosen_keys_strides.", 2, 3,
     [](auto &c) -> mha_strides & { return c.ChosenKeys(3).chosen_keys_strides; }},
};

TEST(PartialStrides, PairArraysRefuseStridesThatOverlap) {
  for (const PairArray &array : kPairArrays) {
    FullAttention call;
    call.args.call.outputs = nullptr;
    AttentionData &data = call.data;
    mha_strides &strides = array.strides(call);
    const std::string &name = array.name;
    const int64_t heads = array.heads, columns = array.columns, row = heads * columns,
                  head = 3 * columns, sequence = heads * head;
    const std::string batch = name + "batch";
    const WrongStrides cases[] = {
        {{columns, 0, 0}, Less(batch, columns, sequence)},  // of [batch, columns]
        {{columns, 0, MHA_BROADCAST}, Less(batch, columns, head)},
        {{columns, MHA_BROADCAST, 0}, Less(batch, columns, row)},
        {{sequence - 1, 0, 0}, Less(batch, sequence - 1, sequence)},
        {{0, 0, columns}, Less(name + "head", columns, head)},
        {{0, 0, head - 1}, Less(name + "head", head - 1, head)},
        {{sequence, 0, columns}, Less(name + "head", columns, head)},
        // Of [batch, n_q, heads, columns].
        {{0, row, columns}, {batch + " is 0", std::string("set every stride")}},
        {{0, columns - 1, 0},
         {name + "row is " + Number(columns - 1),
          "less than the width of a row, " + Number(columns)}},
    };
    for (const WrongStrides &wrong : cases) {
      SCOPED_TRACE(name + " " + Describe(wrong.strides));
      strides = wrong.strides;
      ExpectInvalid(&data, kOfAttention, wrong.words);
    }
    for (const mha_strides &right : {mha_strides{},
                                     {sequence, 0, 0},
                                     {0, columns, 0},
                                     {0, 0, head},
                                     {sequence, columns, head},
                                     {columns, MHA_BROADCAST, MHA_BROADCAST},
                                     {MHA_BROADCAST, 0, MHA_BROADCAST},
                                     {row, MHA_BROADCAST, columns},
                                     {3 * row, row, columns}}) {
      SCOPED_TRACE(name + " " + Describe(right));
      strides = right;
      Memory workspace(1 << 20);
      ExpectSucceeds([&](auto *error) { return data.Run(workspace.data(), 1 << 20, error); });
    }
  }
}

// [batch, n_q, heads, columns], with every stride set.
TEST(InterleavedInputs, BiasWithHeadsInsideRowsGivesTheBitsOfADenseOne) {
  AttentionProblem problem = Middle();
  problem.score = ScoreArrays();
  Pairs<float> &bias = problem.score->bias;
  bias.by_sequence = bias.by_head = bias.by_row = true;
  bias.values = Random(3).Normals(2 * 4 * 3 * 4);
  std::vector<float> turned(bias.values.size());
  for (int64_t at = 0; at < 2 * 4 * 3 * 4; at++) {
    const int64_t column = at % 4, row = at / 4 % 3, head = at / 12 % 4, b = at / 48;
    turned[((b * 3 + row) * 4 + head) * 4 + column] = bias.values[at];
  }
  AttentionData data(problem);
  const Outputs expected = data.Compute();
  data.score_arrays.bias.data = turned.data();
  data.score_arrays.bias.strides = {48, 16, 4};
  EXPECT_TRUE(SameBits(data.Compute(), expected));
}

// The number of columns depends on the lengths in the cache, which has room for more.
TEST(PartialStrides, MaskOverACacheHasTheColumnsOfItsPositions) {
  AttentionProblem problem = Middle();
  Cache cache(CacheConfigOf(problem, {MHA_CACHE_KIND_CONTIGUOUS, 0}, 2, 400));
  Random random(5);
  for (const int64_t sequence : {0, 1})
    cache.Append(sequence, {random.Normals(6 * 2 * 3), random.Normals(6 * 2 * 5)});
  AttentionCall form = {Guarded(kAskLse)};
  form.cache.cache = cache.get();
  form.cache.columns = 10;
  AttentionData data(problem, form);
  const std::vector<uint8_t> mask(2 * 4 * 3 * 10, 1);
  data.args.call.score_arrays = &data.score_arrays;
  data.score_arrays.mask = mask.data();
  data.score_arrays.mask_strides.batch = 4 * 3 * 10 - 1;
  ExpectInvalidCall(&data, kOfAttention,
                    {"score_arrays.mask_strides.batch is 119", "less than the 120"});
  const std::vector<float> bias(mask.size());
  data.score_arrays.mask_strides.batch = 0;
  data.score_arrays.bias.data = bias.data();
  data.score_arrays.bias.strides.batch = 4 * 3 * 10 - 1;
  ExpectInvalidCall(&data, kOfAttention,
                    {"score_arrays.bias.strides.batch is 119", "less than the 120"});
  data.score_arrays.bias = {};
  EXPECT_EQ(cache.Length(0), 6);
  for (const mha_strides &strides :
       {mha_strides{4 * 3 * 10, 0, 0}, {0, 10, 0}, {0, 0, 3 * 10}, {0, 0, 0}}) {
    SCOPED_TRACE(Describe(strides));
    data.score_arrays.mask_strides = strides;
    size_t bytes = 0;
    ExpectSucceeds([&](auto *error) { return data.Workspace(&bytes, error); });
    data.Compute();
    for (const int64_t sequence : {0, 1}) cache.Truncate(sequence, 6);
  }
}

// ---- Types that follow others

TEST(Types, CacheValuesDefaultToTheTypeOfKeys) {
  for (const uint32_t type : {0u, MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8}) {
    mha_kv_cache_config config = CacheConfigOf(Middle(), {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, 16);
    config.k_type = type;
    config.v_type = 0;
    const Cache cache(config);
    mha_kv_cache_config shape = Zeroed<mha_kv_cache_config>();
    ExpectSucceeds(mha_kv_cache_shape, cache.get(), &shape);
    EXPECT_EQ(shape.k_type, type == 0 ? MHA_TYPE_F32 : type);
    EXPECT_EQ(shape.v_type, shape.k_type);
  }
}

TEST(Types, KeysDefaultToTheTypeOfQueriesAndValuesToThatOfKeys) {
  AttentionProblem problem = Middle();
  for (std::vector<float> *x : {&problem.q, &problem.k, &problem.v}) {
    for (float &number : *x)
      number = static_cast<float>(static_cast<int>(number * 8)) / 8;  // which all types have
  }
  const Outputs expected = Attend(problem);
  for (const Storage q_type : {Storage::kF32, Storage::kF16, Storage::kBf16}) {
    for (const Storage k_type : {Storage::kF32, Storage::kF16, Storage::kBf16}) {
      SCOPED_TRACE(std::string(NameOf(q_type)) + " " + NameOf(k_type));
      AttentionCall form;
      form.q_array = q_type;
      form.k_array = form.v_array = k_type;
      AttentionData data(problem, form);
      data.args.q.type = static_cast<uint32_t>(q_type);
      data.args.k.type = static_cast<uint32_t>(k_type);
      data.args.v.type = 0;
      EXPECT_TRUE(SameBits(data.Compute(), expected));
      if (q_type != k_type) continue;
      data.args.k.type = 0;
      EXPECT_TRUE(SameBits(data.Compute(), expected));
      if (q_type != Storage::kF32) continue;
      data.args.q.type = 0;
      EXPECT_TRUE(SameBits(data.Compute(), expected));
    }
  }
}

TEST(Types, ForwardKeysAndValuesHaveTheTypeOfTheQuery) {
  LayerProblem problem = SmallLayer();
  for (std::vector<float> *x : {&problem.query, &problem.key, &problem.value}) {
    for (float &number : *x) number = static_cast<float>(static_cast<int>(number * 8)) / 8;
  }
  const Layer layer = Create(LayerData(problem));
  const Outputs expected = Forward(layer.get(), problem);
  for (const Storage type : {Storage::kF32, Storage::kF16, Storage::kBf16}) {
    LayerCall form;
    form.input_array = type;
    ForwardData data(layer.get(), problem, form);
    data.args.key.type = data.args.value.type = 0;
    EXPECT_TRUE(SameBits(data.Compute(), expected)) << NameOf(type);
    for (mha_input mha_forward_args::*input : {&mha_forward_args::key, &mha_forward_args::value}) {
      const uint32_t other = type == Storage::kF16 ? MHA_TYPE_BF16 : MHA_TYPE_F16;
      (data.args.*input).type = other;
      const char *const name = input == &mha_forward_args::key ? "key.type is " : "value.type is ";
      ExpectInvalid(&data, kOfForward, {name + Number(other), std::string("query.type")});
      (data.args.*input).type = 0;
    }
  }
}

TEST(Types, LinearResidualHasTheTypeOfTheOutput) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  const std::vector<float> numbers(64);
  std::vector<float> y(64);
  mha_linear_args args = Zeroed<mha_linear_args>();
  args.rows = 1;
  args.x.data = args.residual.data = numbers.data();
  args.output.data = y.data();
  size_t bytes = 0;
  const auto query = [&](auto *error) {
    return mha_linear_workspace(layer.get(), &args, &bytes, error);
  };
  for (const uint32_t type : {0u, MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16}) {
    for (const uint32_t other : {0u, MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16}) {
      args.output.type = type;
      args.residual.type = other;
      if (other == 0 || other == type || (other == MHA_TYPE_F32 && type == 0)) {
        ExpectSucceeds(query);
      } else {
        ExpectFails(query,
                    {kInvalid,
                     {2},
                     {"residual.type is " + Number(other), "output.type is " + Number(type)}});
      }
    }
  }
}

}  // namespace
