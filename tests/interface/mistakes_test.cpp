// Mistakes that would compute other numbers than were meant: strides of which some were forgotten,
// sequences that do not cover the rows, a flag in the wrong field. Each is refused, and its field
// is named. What looks like one of them but is right gives the right numbers.

#include <gtest/gtest.h>
#include <mha.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "interface/calls.h"
#include "support/choice.h"

namespace {

using namespace support;  // NOLINT: this file is about nothing else

constexpr uint32_t kOfAttention = 1, kOfForward = 2;  // the parameter that the arguments are

std::string Number(int64_t number) { return std::to_string(number); }

// The call fails as expected and writes nothing.
void ExpectRefusedByTheCall(CallData *data, uint32_t argument, mha_status status,
                            const Words &words) {
  Memory workspace(1 << 20);
  data->PoisonOutputs();
  ExpectFails(
      [&](mha_error *error) { return data->Run(workspace.data(), workspace.size(), error); },
      {status, {argument}, words});
  EXPECT_TRUE(data->OutputsAreUntouched());
}

// So does the query for its workspace, which reads no array.
void ExpectRefused(CallData *data, uint32_t argument, mha_status status, const Words &words) {
  size_t bytes = 4711;
  ExpectFails([&](mha_error *error) { return data->Workspace(&bytes, error); },
              {status, {argument}, words});
  EXPECT_EQ(bytes, 4711u);
  ExpectRefusedByTheCall(data, argument, status, words);
}

void ExpectInvalid(CallData *data, uint32_t argument, const Words &words) {
  ExpectRefused(data, argument, MHA_ERROR_INVALID_VALUE, words);
}

AttentionProblem Middle() { return NormalAttention(SmallSizes()); }

// ---- Sequences

LayerProblem SixRows() {
  LayerProblem sizes = OfItself(SquareSizes(12, 4, 2, 3), 6);
  sizes.batch = 1;
  return NormalLayer(sizes);
}

// Three sequences of 2, 1 and 3 rows in one batch of rows.
void ExpectPackingIsChecked(CallData *data, uint32_t argument, int64_t *batch) {
  const auto pack = [&](int64_t arrays, int64_t count, const std::vector<int64_t> &starts) {
    *batch = arrays;
    data->sequences.count = count;
    data->sequences.cu_seqlens_q = starts.data();
  };
  const std::vector<int64_t> starts = {0, 2, 3, 6};
  const struct {
    int64_t batch, count;
    mha_status status;
    Words words;
  } counts[] = {{1, 0, MHA_ERROR_INVALID_VALUE, {"sequences.count is 0", "number of sequences"}},
                {1, -3, MHA_ERROR_INVALID_VALUE, {"sequences.count is -3"}},
                {3, 0, MHA_ERROR_SHAPE, {"batch is 3", "set it to 1", "sequences.count"}},
                {3, 3, MHA_ERROR_SHAPE, {"batch is 3", "set it to 1", "sequences.count"}}};
  for (const auto &row : counts) {
    SCOPED_TRACE("batch " + Number(row.batch) + ", count " + Number(row.count));
    pack(row.batch, row.count, starts);
    ExpectRefused(data, argument, row.status, row.words);
  }
  const struct {
    int64_t count;
    std::vector<int64_t> starts;
    mha_status status;
    Words words;
  } rows[] = {
      {1, starts, MHA_ERROR_SHAPE, {"sequences.cu_seqlens_q[1] is 2", "n_q, 6", "Check count"}},
      {2, starts, MHA_ERROR_SHAPE, {"sequences.cu_seqlens_q[2] is 3", "n_q, 6", "Check count"}},
      {3, {0, 2, 3, 5}, MHA_ERROR_SHAPE, {"sequences.cu_seqlens_q[3] is 5", "n_q, 6"}},
      {3, {0, 2, 3, 7}, MHA_ERROR_SHAPE, {"sequences.cu_seqlens_q[3] is 7", "n_q, 6"}},
      {3, {1, 2, 3, 6}, MHA_ERROR_INVALID_VALUE, {"sequences.cu_seqlens_q[0] is 1", "0"}},
      {3, {-1, 2, 3, 6}, MHA_ERROR_INVALID_VALUE, {"sequences.cu_seqlens_q[0] is -1", "0"}},
      {3,
       {0, 3, 2, 6},
       MHA_ERROR_INVALID_VALUE,
       {"sequences.cu_seqlens_q[2] is 2", "less than 3"}}};
  for (const auto &row : rows) {
    SCOPED_TRACE("count " + Number(row.count) + " of " + testing::PrintToString(row.starts));
    pack(1, row.count, row.starts);
    ExpectRefusedByTheCall(data, argument, row.status, row.words);
  }
  pack(1, 3, starts);
  data->Compute();
}

TEST(PackedSequences, OfMhaForwardCoverTheRowsOfABatchOfOne) {
  const LayerProblem problem = SixRows();
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem, {Guarded()});
  ExpectPackingIsChecked(&data, kOfForward, &data.args.batch);
}

TEST(PackedSequences, OfMhaAttentionCoverTheRowsOfABatchOfOne) {
  AttentionData data(NormalAttention(SixRows()), {Guarded()});
  ExpectPackingIsChecked(&data, kOfAttention, &data.args.batch);
}

TEST(PackedSequences, OfKeysCoverTheirRows) {
  AttentionSizes sizes = SixRows();
  sizes.n_kv = 9;
  AttentionData data(NormalAttention(sizes), {Guarded()});
  const std::vector<int64_t> q = {0, 2, 3, 6};
  data.sequences.count = 3;
  data.sequences.cu_seqlens_q = q.data();
  ExpectRefused(&data, kOfAttention, MHA_ERROR_SHAPE,
                {"sequences.cu_seqlens_kv is NULL", "n_kv 9"});
  for (const std::vector<int64_t> &kv : {std::vector<int64_t>{0, 4, 5, 8}, {0, 4, 5, 10}}) {
    data.sequences.cu_seqlens_kv = kv.data();
    ExpectRefusedByTheCall(
        &data, kOfAttention, MHA_ERROR_SHAPE,
        {"sequences.cu_seqlens_kv[3] is " + Number(kv[3]), std::string("n_kv, 9")});
  }
  const std::vector<int64_t> kv = {0, 4, 5, 9};
  data.sequences.cu_seqlens_kv = kv.data();
  data.Compute();
}

TEST(PaddedSequences, AreAsManyAsTheBatch) {
  for (const int64_t count : {1, 3, 6}) {
    FullForward forward;
    forward.data.sequences.count = count;
    ExpectRefused(&forward.data, kOfForward, MHA_ERROR_SHAPE,
                  {"sequences.count is " + Number(count), std::string("batch is 2")});
    FullAttention attention;
    attention.data.sequences.count = count;
    ExpectRefused(&attention.data, kOfAttention, MHA_ERROR_SHAPE,
                  {"sequences.count is " + Number(count), std::string("batch is 2")});
  }
}

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

TEST(PartialStrides, OfHeadsRowsOrSequencesThatDoNotStepOverTheOthersAreRefused) {
  AttentionData data(Middle(), {Guarded()});
  const Outputs expected = data.Compute();
  for (const RowArray &array : ArraysOf(&data)) {
    const std::string name = array.name + ".strides.";
    const int64_t width = array.width, row = array.heads * width, sequence = array.rows * row;
    const auto less = [&](const char *stride, int64_t is, int64_t than) {
      return Words{name + stride + " is " + Number(is), "less than the " + Number(than)};
    };
    const struct {
      mha_strides strides;  // batch, row, head
      Words words;
    } cases[] = {
        {{0, width, 0}, less("row", width, row)},
        {{0, row - 1, 0}, less("row", row - 1, row)},
        {{sequence, width, 0}, less("row", width, row)},
        {{row, 0, 0}, less("batch", row, sequence)},
        {{sequence - 1, 0, 0}, less("batch", sequence - 1, sequence)},
        {{0, 0, width}, {name + "head is " + Number(width), std::string("row is 0")}},
        {{sequence, 0, width}, {name + "head is " + Number(width), std::string("row is 0")}},
        {{0, row, width}, {name + "head is " + Number(width), std::string("batch is 0")}},
        {{0, width, array.rows * width},
         {name + "head is " + Number(array.rows * width), std::string("batch is 0")}},
    };
    for (const auto &[strides, words] : cases) {
      SCOPED_TRACE(name + " " + Number(strides.batch) + " " + Number(strides.row) + " " +
                   Number(strides.head));
      *array.strides = strides;
      ExpectInvalid(&data, kOfAttention, words);
    }
    for (const mha_strides &strides :
         {mha_strides{0, row, 0}, {sequence, 0, 0}, {sequence, row, 0}, {sequence, row, width}}) {
      *array.strides = strides;
      EXPECT_TRUE(SameBits(data.Compute(), expected)) << name;
    }
    *array.strides = {};
  }
}

TEST(PartialStrides, OfSequencesThatDoNotStepOverTheirRowsAreRefusedByMhaForward) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem, {Guarded()});
  const Outputs expected = data.Compute();
  for (const RowArray &array : ArraysOf(&data)) {
    const std::string name = array.name + ".strides.";
    const int64_t width = array.width, sequence = array.rows * width;
    for (const int64_t batch : {int64_t{1}, width, sequence - 1}) {
      *array.strides = {batch, 0, 0};
      ExpectInvalid(&data, kOfForward,
                    {name + "batch is " + Number(batch), "less than the " + Number(sequence)});
    }
    for (const int64_t row : {int64_t{1}, width - 1}) {
      for (const int64_t batch : {int64_t{0}, sequence}) {
        *array.strides = {batch, row, 0};
        ExpectInvalid(
            &data, kOfForward,
            {name + "row is " + Number(row), "less than the width of a row, " + Number(width)});
      }
    }
    for (const mha_strides &strides :
         {mha_strides{0, width, 0}, {sequence, 0, 0}, {sequence, width, 0}}) {
      *array.strides = strides;
      EXPECT_TRUE(SameBits(data.Compute(), expected)) << name;
    }
    *array.strides = {};
  }
}

TEST(Strides, ThatAnArrayDoesNotHaveAreRefused) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem, {Guarded()});
  for (const RowArray &array : ArraysOf(&data)) {
    for (const int64_t head : {int64_t{1}, array.width, int64_t{-1}, MHA_BROADCAST}) {
      for (const mha_strides &others :
           {mha_strides{}, {array.rows * array.width, array.width, 0}}) {
        *array.strides = {others.batch, others.row, head};
        ExpectInvalid(
            &data, kOfForward,
            {array.name + ".strides.head is " + Number(head), std::string("no head dimension")});
      }
    }
    *array.strides = {};
  }
}

TEST(Strides, OfMhaLinearAreThoseOfRowsAlone) {
  const LayerProblem problem = SmallLayer();  // W_O is [20, 11]
  const Layer layer = Create(LayerData(problem));
  const std::vector<float> x(3 * 20, 0.5f), residual(3 * 11, 0.25f);
  std::vector<float> y(3 * 11, kNan);
  mha_linear_args args = Zeroed<mha_linear_args>();
  args.rows = 3;
  args.x.data = x.data();
  args.residual.data = residual.data();
  args.output.data = y.data();
  const auto run = [&](mha_error *error) {
    Memory workspace(1 << 16);
    return mha_linear(layer.get(), &args, workspace.data(), workspace.size(), error);
  };
  const struct {
    const char *name;
    mha_strides *strides;
    int64_t width;
  } arrays[] = {{"x", &args.x.strides, 20},
                {"residual", &args.residual.strides, 11},
                {"output", &args.output.strides, 11}};
  for (const auto &[name, strides, width] : arrays) {
    const std::string prefix = std::string(name) + ".strides.";
    const auto expect_invalid = [&](const Words &words) {
      ExpectFails(run, {MHA_ERROR_INVALID_VALUE, {2}, words});
      size_t bytes = 4711;
      ExpectFails(
          [&](mha_error *error) { return mha_linear_workspace(layer.get(), &args, &bytes, error); },
          {MHA_ERROR_INVALID_VALUE, {2}, words});
      EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float number) { return number != number; }));
    };
    *strides = {3 * width, 0, 0};
    expect_invalid({prefix + "batch is " + Number(3 * width), std::string("no batch dimension")});
    *strides = {0, width, width};
    expect_invalid({prefix + "head is " + Number(width), std::string("no head dimension")});
    *strides = {0, width - 1, 0};
    expect_invalid(
        {prefix + "row is " + Number(width - 1), std::string("less than the width of a row")});
    *strides = {};
  }
  ExpectSucceeds(run);
  const std::vector<float> expected = y;
  for (const auto &[name, strides, width] : arrays) strides->row = width;
  ExpectSucceeds(run);
  EXPECT_EQ(y, expected);
}

TEST(Strides, OfTheWeightsOfAChoiceAreThoseOfSequencesAndRows) {
  ChoiceProblem problem;
  problem.batch = 2, problem.n_q = 3, problem.n_kv = 20, problem.num_heads = 4,
  problem.head_dim = 8, problem.num_chosen = 5;
  Random random(1);
  FillNormal(&random, &problem);
  problem.weights = random.Normals(2 * 3 * 4);
  ChoiceData data(problem, {Guarded()});
  const Outputs expected = data.Compute();
  mha_strides &strides = data.choice.weights.strides;
  const struct {
    mha_strides strides;
    Words words;
  } cases[] = {{{0, 0, 1}, {"weights.strides.head is 1", "no head dimension"}},
               {{12, 4, 1}, {"weights.strides.head is 1", "no head dimension"}},
               {{4, 0, 0}, {"weights.strides.batch is 4", "less than the 12"}},
               {{11, 0, 0}, {"weights.strides.batch is 11", "less than the 12"}},
               {{0, 3, 0}, {"weights.strides.row is 3", "less than the width of a row, 4"}}};
  for (const auto &row : cases) {
    strides = row.strides;
    ExpectInvalid(&data, kOfAttention, row.words);
  }
  for (const mha_strides &right : {mha_strides{12, 0, 0}, {0, 4, 0}, {12, 4, 0}}) {
    strides = right;
    EXPECT_TRUE(SameBits(data.Compute(), expected));
  }
  data.choice.weights.type = MHA_TYPE_BF16;
  ExpectInvalid(&data, kOfAttention, {"weights.type is 3"});
}

TEST(PartialStrides, OfTheOutputOfStatesAreRefused) {
  const std::vector<float> states(2 * 4 * 3 * (5 + 2), 1.0f);
  std::vector<float> y(2 * 3 * 4 * 5, kNan);
  mha_states_args args = Zeroed<mha_states_args>();
  args.batch = 2, args.num_heads = 4, args.n_q = 3, args.head_dim_v = 5;
  args.states = states.data();
  args.output.data = y.data();
  const auto run = [&](mha_error *error) { return mha_states_finish(&args, error); };
  const struct {
    mha_strides strides;
    Words words;
  } cases[] = {{{0, 5, 0}, {"output.strides.row is 5", "less than the 20"}},
               {{20, 0, 0}, {"output.strides.batch is 20", "less than the 60"}},
               {{59, 0, 0}, {"output.strides.batch is 59", "less than the 60"}},
               {{0, 0, 5}, {"output.strides.head is 5", "row is 0"}},
               {{0, 5, 15}, {"output.strides.head is 15", "batch is 0"}},
               {{60, 5, 14}, {"output.strides.head is 14", "overlap"}}};
  for (const auto &row : cases) {
    args.output.strides = row.strides;
    ExpectFails(run, {MHA_ERROR_INVALID_VALUE, {1}, row.words});
    EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float number) { return number != number; }));
  }
  // A field of an output that is not given.
  args.output = {};
  args.lse = y.data();
  args.output.strides.row = 20;
  ExpectFails(run, {MHA_ERROR_INVALID_VALUE, {1}, {"output.data is NULL"}});
  args.output = {};
  ExpectSucceeds(run);
}

// ---- Inputs that interleave, with every stride set

// q, k and v as one projection writes them: the heads of all three side by side in a row.
TEST(InterleavedInputs, OfOneFusedProjectionGiveTheRightNumbers) {
  AttentionSizes sizes = SmallSizes();
  sizes.n_kv = sizes.n_q;
  const AttentionProblem problem = NormalAttention(sizes);
  const int64_t q_width = 4 * 3, k_width = 2 * 3, v_width = 2 * 5,
                width = q_width + k_width + v_width, rows = 2 * 3;
  std::vector<float> fused;
  for (int64_t row = 0; row < rows; row++) {
    fused.insert(fused.end(), problem.q.begin() + row * q_width,
                 problem.q.begin() + (row + 1) * q_width);
    fused.insert(fused.end(), problem.k.begin() + row * k_width,
                 problem.k.begin() + (row + 1) * k_width);
    fused.insert(fused.end(), problem.v.begin() + row * v_width,
                 problem.v.begin() + (row + 1) * v_width);
  }
  const Memory placed = CopyOf(fused, Place::kBeforeGuard);
  AttentionData data(problem);
  data.args.q.data = placed.floats();
  data.args.k.data = placed.floats() + q_width;
  data.args.v.data = placed.floats() + q_width + k_width;
  data.args.q.strides = {3 * width, width, 3};
  data.args.k.strides = {3 * width, width, 3};
  data.args.v.strides = {3 * width, width, 5};
  EXPECT_TRUE(SameBits(data.Compute(), Attend(problem)));
  // Rows and heads are where they would be without the strides that are left 0 here.
  data.args.q.strides = data.args.k.strides = data.args.v.strides = {0, width, 0};
  EXPECT_TRUE(SameBits(data.Compute(), Attend(problem)));
}

// Sequence b begins b rows after the first: windows of one long sequence, of whose rows most are in
// several of them.
TEST(InterleavedInputs, OfOverlappingSequencesGiveTheRightNumbers) {
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

// [rows, batch, width], as PyTorch has it without batch_first.
TEST(InterleavedInputs, OfSequencesInsideRowsGiveTheRightNumbers) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  ForwardData data(layer.get(), problem,
                   {CallForm(), kRowsOutside, kRowsOutside, kRowsOutside, kRowsOutside});
  EXPECT_EQ(data.args.query.strides.batch, 10);
  EXPECT_EQ(data.args.query.strides.row, 20);
  EXPECT_TRUE(SameBits(data.Compute(), Forward(layer.get(), problem)));
}

// ---- Strides of arrays with a number per pair of query and key

// An array [batch, heads, n_q, columns] in a call of batch 2 and n_q 3.
struct PairCase {
  const char *name, *strides_name;
  int64_t heads, columns;
  mha_strides &(*set)(AttentionData *data, const void *numbers);
};

const PairCase kPairCases[] = {
    {"score_arrays.bias", ".strides", 4, 4,
     [](AttentionData *data, const void *numbers) -> mha_strides & {
       data->score_arrays.bias.data = numbers;
       return data->score_arrays.bias.strides;
     }},
    {"score_arrays.mask", "_strides", 4, 4,
     [](AttentionData *data, const void *numbers) -> mha_strides & {
       data->score_arrays.mask = static_cast<const uint8_t *>(numbers);
       return data->score_arrays.mask_strides;
     }},
    {"score_arrays.relative_rows", "_strides", 4, 6,
     [](AttentionData *data, const void *numbers) -> mha_strides & {
       data->score.relative_left = 3, data->score.relative_right = 2;
       data->args.score = &data->score;
       data->score_arrays.relative_rows = static_cast<const float *>(numbers);
       return data->score_arrays.relative_rows_strides;
     }},
    {"score_arrays.chosen_keys", "_strides", 2, 3,
     [](AttentionData *data, const void *numbers) -> mha_strides & {
       data->score_arrays.chosen_keys = static_cast<const int32_t *>(numbers);
       data->score_arrays.num_chosen = 3;
       return data->score_arrays.chosen_keys_strides;
     }},
};

TEST(PartialStrides, OfArraysWithANumberPerPairAreRefused) {
  const std::vector<float> zeros(1024);
  for (const PairCase &array : kPairCases) {
    AttentionData data(Middle(), {Guarded(kAskLse)});
    data.args.score_arrays = &data.score_arrays;
    mha_strides &strides = array.set(&data, zeros.data());
    const std::string name = std::string(array.name) + array.strides_name + ".";
    const int64_t heads = array.heads, columns = array.columns, head = 3 * columns,
                  sequence = heads * head;
    const auto less = [&](const char *stride, int64_t is, int64_t than) {
      return Words{name + stride + " is " + Number(is), "less than the " + Number(than)};
    };
    const struct {
      mha_strides strides;  // batch, row, head
      Words words;
    } cases[] = {
        {{columns, 0, 0},
         less("batch", columns, sequence)},  // of [batch, columns], with the other two forgotten
        {{columns, 0, MHA_BROADCAST}, less("batch", columns, head)},
        {{columns, MHA_BROADCAST, 0}, less("batch", columns, heads * columns)},
        {{sequence - 1, 0, 0}, less("batch", sequence - 1, sequence)},
        {{0, 0, columns}, less("head", columns, head)},
        {{0, 0, head - 1}, less("head", head - 1, head)},
        {{sequence, 0, columns}, less("head", columns, head)},
        {{0, heads * columns, columns},
         {name + "batch is 0", "set every stride"}},  // of [batch, n_q, heads, columns]
        {{0, columns - 1, 0}, less("row", columns - 1, columns)},
    };
    for (const auto &row : cases) {
      SCOPED_TRACE(name + " " + Number(row.strides.batch) + " " + Number(row.strides.row) + " " +
                   Number(row.strides.head));
      strides = row.strides;
      if (row.strides.row == columns - 1) {
        ExpectInvalid(&data, kOfAttention,
                      {name + "row is " + Number(columns - 1),
                       "less than the width of a row, " + Number(columns)});
      } else {
        ExpectInvalid(&data, kOfAttention, row.words);
      }
    }
    for (const mha_strides &right : {mha_strides{},
                                     {sequence, 0, 0},
                                     {0, columns, 0},
                                     {0, 0, head},
                                     {sequence, columns, head},
                                     {columns, MHA_BROADCAST, MHA_BROADCAST},
                                     {MHA_BROADCAST, 0, MHA_BROADCAST},
                                     {heads * columns, MHA_BROADCAST, columns},
                                     {3 * heads * columns, heads * columns, columns}}) {
      SCOPED_TRACE(name + " " + Number(right.batch) + " " + Number(right.row) + " " +
                   Number(right.head));
      strides = right;
      Memory workspace(1 << 20);
      ExpectSucceeds(
          [&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); });
    }
    strides = {0, 0, 0};
    array.set(&data, nullptr) = {0, 4096, 0};
    if (data.score_arrays.num_chosen == 0) {
      data.score.relative_left = data.score.relative_right = 0;
      ExpectInvalid(&data, kOfAttention, {name.substr(0, name.size() - 1), std::string("is NULL")});
    }
  }
}

// A mask of keys, which each sequence has for all of its heads and rows.
TEST(Broadcast, OfAMaskOfKeysIsSetForHeadsAndRows) {
  AttentionProblem problem = Middle();
  problem.score = ScoreArrays();
  problem.score->mask.by_sequence = problem.score->mask.by_head = problem.score->mask.by_row = true;
  const uint8_t mask[2][4] = {{1, 1, 0, 1}, {0, 1, 1, 0}};
  for (int64_t b = 0; b < 2; b++) {
    for (int64_t row = 0; row < 4 * 3; row++)
      problem.score->mask.values.insert(problem.score->mask.values.end(), mask[b], mask[b] + 4);
  }
  AttentionData data(problem);
  const Outputs expected = data.Compute();
  data.score_arrays.mask = mask[0];
  for (const int64_t batch : {0, 4}) {
    data.score_arrays.mask_strides = {batch, MHA_BROADCAST, MHA_BROADCAST};
    EXPECT_TRUE(SameBits(data.Compute(), expected));
  }
}

// [batch, n_q, heads, columns], with every stride set.
TEST(InterleavedInputs, OfABiasWithHeadsInsideRowsGiveTheRightNumbers) {
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

// How many columns there are is known only with the lengths in the cache, which has room for more.
TEST(PartialStrides, OfAMaskOverACacheAreThoseOfThePositionsItHas) {
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
  data.args.score_arrays = &data.score_arrays;
  data.score_arrays.mask = mask.data();
  data.score_arrays.mask_strides.batch = 4 * 3 * 10 - 1;
  ExpectRefusedByTheCall(&data, kOfAttention, MHA_ERROR_INVALID_VALUE,
                         {"score_arrays.mask_strides.batch is 119", "less than the 120"});
  EXPECT_EQ(cache.Length(0), 6);
  for (const mha_strides &strides :
       {mha_strides{4 * 3 * 10, 0, 0}, {0, 10, 0}, {0, 0, 3 * 10}, {0, 0, 0}}) {
    SCOPED_TRACE(Number(strides.batch) + " " + Number(strides.row) + " " + Number(strides.head));
    data.score_arrays.mask_strides = strides;
    size_t bytes = 0;
    ExpectSucceeds([&](mha_error *error) { return data.Workspace(&bytes, error); });
    data.Compute();
    for (const int64_t sequence : {0, 1}) cache.Truncate(sequence, 6);
  }
}

// ---- Types that follow others

TEST(Types, OfValuesOfACacheAreThoseOfItsKeysByDefault) {
  for (const uint32_t type : {0u, MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_BF16, MHA_TYPE_INT8}) {
    mha_kv_cache_config config = CacheConfigOf(Middle(), {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, 16);
    config.k_type = type;
    config.v_type = 0;
    const Cache cache(config);
    mha_kv_cache_config shape = Zeroed<mha_kv_cache_config>();
    ExpectSucceeds(
        [&](mha_error *error) { return mha_kv_cache_shape(cache.get(), &shape, error); });
    EXPECT_EQ(shape.k_type, type == 0 ? MHA_TYPE_F32 : type);
    EXPECT_EQ(shape.v_type, shape.k_type);
  }
}

TEST(Types, OfKAreThoseOfQAndOfVThoseOfKByDefault) {
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

TEST(Types, OfKeysAndValuesAreThoseOfTheQueryInMhaForward) {
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

TEST(Types, OfTheResidualAreThoseOfTheOutputInMhaLinear) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  const std::vector<float> numbers(64);
  std::vector<float> y(64);
  mha_linear_args args = Zeroed<mha_linear_args>();
  args.rows = 1;
  args.x.data = args.residual.data = numbers.data();
  args.output.data = y.data();
  size_t bytes = 0;
  const auto query = [&](mha_error *error) {
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
                    {MHA_ERROR_INVALID_VALUE,
                     {2},
                     {"residual.type is " + Number(other), "output.type is " + Number(type)}});
      }
    }
  }
}

// ---- Flags in the wrong field

TEST(Flags, OfOtherFieldsAreNoneOfACall) {
  const struct {
    const char *name;
    uint32_t flag;
  } others[] = {{"MHA_CACHE_KIND_RING", MHA_CACHE_KIND_RING},
                {"MHA_CACHE_KIND_PAGED", MHA_CACHE_KIND_PAGED},
                {"MHA_CACHE_VALUES_IN_KEYS", MHA_CACHE_VALUES_IN_KEYS},
                {"MHA_NORM_LAYER", MHA_NORM_LAYER},
                {"MHA_NORM_ALL_HEADS", MHA_NORM_ALL_HEADS},
                {"MHA_NORM_AFTER_ROPE", MHA_NORM_AFTER_ROPE},
                {"MHA_NORM_VALUES", MHA_NORM_VALUES},
                {"MHA_NORM_AFTER_GATE", MHA_NORM_AFTER_GATE},
                {"MHA_GROUPS_ALSO", MHA_GROUPS_ALSO},
                {"MHA_COLUMNS_NEW_KEYS", MHA_COLUMNS_NEW_KEYS},
                {"MHA_ARITHMETIC_INT8", MHA_ARITHMETIC_INT8},
                {"MHA_ARITHMETIC_INT16", MHA_ARITHMETIC_INT16}};
  for (const auto &[name, flag] : others) {
    for (const uint32_t flags : {0u, MHA_CAUSAL, MHA_CAUSAL | MHA_EQUAL_SCORES}) {
      SCOPED_TRACE(name);
      FullForward forward;
      forward.args.flags = flags | flag;
      ExpectInvalid(&forward.data, kOfForward, {"flags has the unknown bits"});
      FullAttention attention;
      attention.args.flags = flags | flag;
      ExpectInvalid(&attention.data, kOfAttention, {"flags has the unknown bits"});
    }
  }
}

// A field takes the numbers of its own family alone: those of calls and of all other fields are
// refused.
TEST(Flags, OfOneFieldAreNoneOfAnother) {
  enum Family { kCallFlags, kKinds, kValues, kNorms, kGroups, kColumns, kArithmetic };
  const std::vector<std::pair<Family, uint32_t>> numbers = {
      {kCallFlags, MHA_CAUSAL},
      {kCallFlags, MHA_WINDOW_LEFT},
      {kCallFlags, MHA_WINDOW_RIGHT},
      {kCallFlags, MHA_EQUAL_SCORES},
      {kCallFlags, MHA_CAUSAL | MHA_WINDOW_LEFT},
      {kKinds, MHA_CACHE_KIND_RING},
      {kKinds, MHA_CACHE_KIND_PAGED},
      {kValues, MHA_CACHE_VALUES_IN_KEYS},
      {kNorms, MHA_NORM_LAYER},
      {kNorms, MHA_NORM_ALL_HEADS},
      {kNorms, MHA_NORM_AFTER_ROPE},
      {kNorms, MHA_NORM_VALUES},
      {kNorms, MHA_NORM_AFTER_GATE},
      {kGroups, MHA_GROUPS_ALSO},
      {kColumns, MHA_COLUMNS_NEW_KEYS},
      {kArithmetic, MHA_ARITHMETIC_INT8},
      {kArithmetic, MHA_ARITHMETIC_INT16}};
  const std::vector<int32_t> groups(8);
  for (const auto &[family, number] : numbers) {
    SCOPED_TRACE(number);
    FullForward call;
    if (family != kNorms) {
      call.args.norm = &call.data.norm;
      call.data.norm.epsilon = call.data.norm.context_epsilon = 1;
      call.data.norm.flags = number;
      ExpectInvalid(&call.data, kOfForward, {"norm.flags has the unknown bits"});
      call.data.norm.flags = MHA_NORM_LAYER;
      call.data.norm.context_flags = MHA_NORM_LAYER | number;
      ExpectInvalid(&call.data, kOfForward, {"norm.context_flags has the unknown bits"});
      call.args.norm = nullptr;
    }
    call.args.score_arrays = &call.data.score_arrays;
    call.data.score_arrays.q_groups = call.data.score_arrays.kv_groups = groups.data();
    if (family != kGroups) {
      call.data.score_arrays.groups = number;
      ExpectInvalid(&call.data, kOfForward, {"score_arrays.groups is " + Number(number)});
      call.data.score_arrays.groups = 0;
    }
    if (family != kColumns) {
      call.data.score_arrays.columns = number;
      ExpectInvalid(&call.data, kOfForward, {"score_arrays.columns is " + Number(number)});
    }
    mha_kv_cache_config cache = CacheConfigOf(Middle(), {MHA_CACHE_KIND_CONTIGUOUS, 0}, 1, 16);
    size_t bytes = 4711;
    const auto cache_size = [&](mha_error *error) {
      return mha_kv_cache_size(&cache, &bytes, error);
    };
    if (family != kKinds) {
      cache.kind = number;
      ExpectFails(cache_size, {MHA_ERROR_INVALID_VALUE, {1}, {"kind is " + Number(number)}});
      cache.kind = MHA_CACHE_KIND_CONTIGUOUS;
    }
    if (family != kValues) {
      cache.values = number;
      ExpectFails(cache_size, {MHA_ERROR_INVALID_VALUE, {1}, {"values is " + Number(number)}});
    }
    if (family != kArithmetic) {
      LayerData layer{SmallLayer()};
      layer.config.weight_type = MHA_TYPE_INT8;
      layer.config.arithmetic = number;
      ExpectFails(
          [&](mha_error *error) {
            return mha_layer_pack_size(&layer.config, &layer.weights, nullptr, &bytes, error);
          },
          {MHA_ERROR_INVALID_VALUE, {1}, {"arithmetic is " + Number(number)}});
    }
    EXPECT_EQ(bytes, 4711u);
  }
}

// ---- A scale beside scores that are equal

TEST(EqualScores, AreNotScaled) {
  FullAttention call;
  call.args.flags = MHA_EQUAL_SCORES;
  for (const float scale : {1.0f, -0.5f, 1e-45f}) {
    call.args.scale = scale;
    ExpectInvalid(&call.data, kOfAttention, {"scale is", "MHA_EQUAL_SCORES"});
  }
  call.args.scale = 0;
  for (const float weight : call.data.Compute().attention_weights) ASSERT_EQ(weight, 0.25f);
  FullForward forward;
  forward.args.flags = MHA_EQUAL_SCORES;
  for (const float weight : forward.data.Compute().attention_weights) ASSERT_EQ(weight, 0.25f);
}

// ---- Reserved fields

TEST(Reserved, FieldsOfTheInputsAndTheOutputOfACallAre0) {
  const float number = 0;
  const auto check_input = [&](CallData *data, uint32_t argument, const std::string &name,
                               mha_input *input) {
    input->reserved = 1;
    ExpectInvalid(data, argument, {name + ".reserved is set"});
    input->reserved = 0;
    input->reserved_pointer = &number;
    ExpectInvalid(data, argument, {name + ".reserved_pointer is set"});
    input->reserved_pointer = nullptr;
  };
  const auto check_output = [&](CallData *data, uint32_t argument, mha_output *output) {
    output->reserved = 1;
    ExpectInvalid(data, argument, {"output.reserved is set"});
    output->reserved = 0;
  };
  FullForward forward;
  check_input(&forward.data, kOfForward, "query", &forward.args.query);
  check_input(&forward.data, kOfForward, "key", &forward.args.key);
  check_input(&forward.data, kOfForward, "value", &forward.args.value);
  check_output(&forward.data, kOfForward, &forward.args.output);
  FullAttention attention;
  check_input(&attention.data, kOfAttention, "q", &attention.args.q);
  check_input(&attention.data, kOfAttention, "k", &attention.args.k);
  check_input(&attention.data, kOfAttention, "v", &attention.args.v);
  check_output(&attention.data, kOfAttention, &attention.args.output);
  const std::vector<float> bias(2 * 4 * 3 * 4);
  attention.args.score_arrays = &attention.data.score_arrays;
  attention.data.score_arrays.bias.data = bias.data();
  check_input(&attention.data, kOfAttention, "score_arrays.bias",
              &attention.data.score_arrays.bias);
  attention.data.score_arrays.bias = {};
  check_input(&attention.data, kOfAttention, "score_arrays.bias",
              &attention.data.score_arrays.bias);  // one that is not given, too
  attention.args.score = &attention.data.score;
  attention.data.score.reserved = 1;
  ExpectInvalid(&attention.data, kOfAttention, {"score.reserved is not 0"});
  attention.data.score.reserved = 0;
  attention.data.Compute();
}

TEST(Reserved, FieldsOfMhaLinearOfStatesAndOfAChoiceAre0) {
  const float number = 0;
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  mha_linear_args linear = Zeroed<mha_linear_args>();
  linear.rows = 1;
  size_t bytes = 0;
  const auto query = [&](mha_error *error) {
    return mha_linear_workspace(layer.get(), &linear, &bytes, error);
  };
  for (mha_input mha_linear_args::*input : {&mha_linear_args::x, &mha_linear_args::residual}) {
    const std::string name = input == &mha_linear_args::x ? "x" : "residual";
    (linear.*input).reserved = 1;
    ExpectFails(query, {MHA_ERROR_INVALID_VALUE, {2}, {name + ".reserved is set"}});
    (linear.*input).reserved = 0;
    (linear.*input).reserved_pointer = &number;
    ExpectFails(query, {MHA_ERROR_INVALID_VALUE, {2}, {name + ".reserved_pointer is set"}});
    (linear.*input).reserved_pointer = nullptr;
  }
  linear.output.reserved = 1;
  ExpectFails(query, {MHA_ERROR_INVALID_VALUE, {2}, {"output.reserved is set"}});
  linear.output.reserved = 0;
  ExpectSucceeds(query);

  const std::vector<float> numbers(16);
  std::vector<float> y(16);
  mha_states_args states = Zeroed<mha_states_args>();
  states.batch = states.num_heads = states.n_q = states.head_dim_v = 1;
  states.states = numbers.data();
  states.output.data = y.data();
  const auto finish = [&](mha_error *error) { return mha_states_finish(&states, error); };
  states.reserved = 1;
  ExpectFails(finish, {MHA_ERROR_INVALID_VALUE, {1}, {"reserved is not 0"}});
  states.reserved = 0;
  states.output.reserved = 1;
  ExpectFails(finish, {MHA_ERROR_INVALID_VALUE, {1}, {"output.reserved is set"}});
  states.output.reserved = 0;
  ExpectSucceeds(finish);

  ChoiceProblem choice;
  choice.n_kv = 20;
  static_cast<AttentionProblem &>(choice) = NormalAttention(choice);
  choice.weights = {1.0f};
  ChoiceData data(choice, {Guarded()});
  data.choice.weights.reserved = 1;
  ExpectInvalid(&data, kOfAttention, {"weights.reserved is set"});
  data.choice.weights.reserved = 0;
  data.choice.weights.reserved_pointer = &number;
  ExpectInvalid(&data, kOfAttention, {"weights.reserved_pointer is set"});
  data.choice.weights.reserved_pointer = nullptr;
  data.Compute();
}

TEST(Reserved, FieldsOfMatricesAre0) {
  const float number = 0;
  const LayerData data{SmallLayer()};
  const struct {
    const char *name;
    mha_matrix mha_layer_weights::*matrix;
  } matrices[] = {{"w_q", &mha_layer_weights::w_q}, {"w_k", &mha_layer_weights::w_k},
                  {"w_v", &mha_layer_weights::w_v}, {"w_qkv", &mha_layer_weights::w_qkv},
                  {"w_o", &mha_layer_weights::w_o}, {"w_g", &mha_layer_weights::w_g}};
  size_t bytes = 4711;
  for (const auto &[name, matrix] : matrices) {
    mha_layer_weights weights = data.weights;
    (weights.*matrix).reserved_pointer = &number;
    ExpectFails(
        [&](mha_error *error) {
          return mha_layer_pack_size(&data.config, &weights, nullptr, &bytes, error);
        },
        {MHA_ERROR_INVALID_VALUE, {2}, {std::string(name) + ".reserved_pointer is not NULL"}});
  }
  mha_linear_weights weights = Zeroed<mha_linear_weights>();
  weights.input_dim = weights.output_dim = 1;
  weights.w.data = &number;
  weights.w.reserved_pointer = &number;
  ExpectFails(
      [&](mha_error *error) { return mha_linear_pack_size(&weights, nullptr, &bytes, error); },
      {MHA_ERROR_INVALID_VALUE, {1}, {"w.reserved_pointer is not NULL"}});
  EXPECT_EQ(bytes, 4711u);
}

}  // namespace
