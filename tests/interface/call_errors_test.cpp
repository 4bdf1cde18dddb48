// Bad input is a sentence, not a crash: both entries, their size queries and their descriptions are
// called with every kind of wrong argument. Each row of a table takes a valid call and breaks one
// thing in it; then the status, the parameter that is named and the sentence must fit, and nothing
// but the error struct may have been written.

#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <vector>

#include "interface/calls.h"

namespace {

const int32_t kEntry = 0;  // of a list of chosen keys

using namespace support;  // NOLINT: this file is about nothing else

// ---- Calls: mha_forward, its workspace query and mha_info
// --------------------------------------------------------------------------

// Numbers of which the last one of any heads is wrong: the calls here have at most 64 heads.
const float *WithTheLast(float value) {
  static std::vector<float> values[2];
  std::vector<float> &of = values[std::isnan(value)];
  of.assign(64, value);
  of[0] = 0;
  return of.data();
}

// Numbers of rows, for calls of batch 2 with n_q 3 and n_kv 4.
template <int64_t... rows>
const int64_t *Rows() {
  static const int64_t values[] = {rows...};
  return values;
}

// The two sequences of a call in one batch of rows.
template <typename Call>
void Pack(const int64_t *q, const int64_t *kv, Call *call) {
  call->args.batch = 1;
  call->data.sequences.count = 2;
  call->data.sequences.cu_seqlens_q = q;
  call->data.sequences.cu_seqlens_kv = kv;
}

// Which functions a row is about. The queries look at no data, mha_info alone at q_start.
enum : unsigned {
  kWorkspace = 1,
  kCall = 2,
  kInfo = 4,
  kReadsStarts = kCall | kInfo,
  kAllOfTheCall = 7
};

template <typename Call>
struct CallCase {
  const char *name;
  void (*change)(Call &);
  Expected expected;
  unsigned functions = kAllOfTheCall;
  const std::function<void(Call &)> *other_change =
      nullptr;  // instead, of one that is put together
};
template <typename Call>
void PrintTo(const CallCase<Call> &row, std::ostream *stream) {
  *stream << row.name;
}

template <typename Call>
void ExpectCallFails(const CallCase<Call> &row) {
  Call call;
  row.other_change != nullptr ? (*row.other_change)(call) : row.change(call);
  if ((row.functions & kWorkspace) != 0) {
    SCOPED_TRACE("the workspace query");
    size_t bytes = 4711;
    ExpectFails([&](mha_error *error) { return call.data.Workspace(&bytes, error); }, row.expected);
    EXPECT_EQ(bytes, 4711u);
  }
  if ((row.functions & kInfo) != 0) {
    SCOPED_TRACE("the description");
    mha_call_info info;
    std::memset(&info, 0x5A, sizeof info);
    info.struct_size = sizeof info;
    const mha_call_info before = info;
    ExpectFails([&](mha_error *error) { return call.data.Info(&info, error); }, row.expected);
    EXPECT_EQ(std::memcmp(&info, &before, sizeof info), 0) << "info was written";
  }
  if ((row.functions & kCall) != 0) {
    SCOPED_TRACE("the call");
    Memory workspace(1 << 20);  // far more than the valid call needs
    workspace.Fill(0x5A);
    ExpectFails(
        [&](mha_error *error) { return call.data.Run(workspace.data(), workspace.size(), error); },
        row.expected);
    EXPECT_TRUE(call.data.OutputsAreUntouched());
    EXPECT_EQ(call.scheduler.calls, 0u) << "work was started";
  }
}

template <typename Call>
void ExpectCallSucceeds(const std::function<void(Call &)> &change) {
  Call call;
  change(call);
  size_t bytes = 0;
  ExpectSucceeds([&](mha_error *error) { return call.data.Workspace(&bytes, error); });
  mha_call_info info = Zeroed<mha_call_info>();
  ExpectSucceeds([&](mha_error *error) { return call.data.Info(&info, error); });
  Memory workspace(bytes);
  ExpectSucceeds(
      [&](mha_error *error) { return call.data.Run(workspace.data(), workspace.size(), error); });
}

// Rows about what both entries have. argument: which parameter the arguments are.
template <typename Call>
std::vector<CallCase<Call>> CommonCases(uint32_t argument) {
  return {
      {"BatchIsNegative",
       [](auto &c) { c.args.batch = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"batch"}}},
      {"BatchIsNextToTheLeastInteger",
       [](auto &c) { c.args.batch = kMin + 1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"batch"}}},
      {"BatchWasNeverSet",
       [](auto &c) { c.args.batch = 0; },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"batch is 0; set it to the number of sequences, or to MHA_EMPTY for none"}}},
      {"NQWasNeverSet",
       [](auto &c) { c.args.n_q = 0; },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"n_q is 0; set it to", "per sequence, or to MHA_EMPTY for none"}}},
      {"NKvWasNeverSet",
       [](auto &c) { c.args.n_kv = 0; },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"n_kv is 0; set it to", "per sequence, or to MHA_EMPTY for none"}}},
      {"NQIsNegative",
       [](auto &c) { c.args.n_q = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"n_q"}}},
      {"NKvIsNegative",
       [](auto &c) { c.args.n_kv = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"n_kv"}}},
      {"OutputIsNull",
       [](auto &c) { c.args.output.data = nullptr; },
       {MHA_ERROR_NULL_POINTER, {argument}, {"output"}},
       kCall},
      {"UnknownFlagIsSet",
       [](auto &c) { c.args.flags = 0x100; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"flags", "0x100"}}},
      {"OutputTypeIsUnknown",
       [](auto &c) { c.args.output.type = 4; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"output.type is 4"}}},
      {"ReservedIsSet",
       [](auto &c) { c.args.reserved = 1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"reserved"}}},
      {"NormIsOfNoVersion",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1,
         c.data.norm.struct_size = sizeof(mha_norm) - 1;
       },
       {MHA_ERROR_STRUCT_SIZE, {argument}, {"mha_norm", "struct_size"}}},
      {"NormHasAnUnknownFlag",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.flags = 0x2000;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.flags", "0x2000"}}},
      {"NormEpsilonsAreZero",
       [](auto &c) { c.args.norm = &c.data.norm; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon and context_epsilon are both 0"}}},
      {"NormEpsilonIsNegative",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = -1e-6f; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is -1e-06"}}},
      {"NormEpsilonIsInfinite",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = std::numeric_limits<float>::infinity();
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is inf"}}},
      {"NormEpsilonIsNaN",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = std::numeric_limits<float>::quiet_NaN();
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is nan"}}},
      {"RmsNormHasABiasOfQueries",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.q_bias = WithTheLast(0);
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.q_bias", "MHA_NORM_LAYER"}}},
      {"RmsNormHasABiasOfKeys",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.k_bias = WithTheLast(0);
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.k_bias", "MHA_NORM_LAYER"}}},
      {"NormHeadStrideIsNegative",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.head_stride = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.head_stride is -1", "head_dim"}}},
      {"NormHeadStrideIsLessThanAHead",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.head_stride = 1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.head_stride is 1;", "head_dim"}}},
      {"NormOfAllHeadsHasAnotherStride",
       [](auto &c) {
         c.args.norm = &c.data.norm;
         c.data.norm.epsilon = 1;
         c.data.norm.flags = MHA_NORM_ALL_HEADS;
         c.data.norm.head_stride = 4711;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.head_stride is 4711", "MHA_NORM_ALL_HEADS"}}},
      {"NormWeightsOverflow",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.head_stride = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"norm"}}},
      {"NormOfTheContextHasAFlagOfRotation",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1;
         c.data.norm.context_flags = MHA_NORM_AFTER_ROPE;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_flags", "0x400"}}},
      {"NormOfTheContextHasNoEpsilon",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.epsilon = 1,
         c.data.norm.context_weight = WithTheLast(0);
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_epsilon is 0"}}},
      {"NormOfTheContextHasANegativeEpsilon",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.context_epsilon = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_epsilon is -1"}}},
      {"RmsNormOfTheContextHasABias",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1,
         c.data.norm.context_bias = WithTheLast(0);
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_bias", "MHA_NORM_LAYER"}}},
      {"NormOfTheContextHasAStrideLessThanAHead",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1,
         c.data.norm.context_head_stride = 1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_head_stride is 1;", "head_dim_v"}}},
      {"NormOfTheContextOfAllHeadsHasAnotherStride",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1,
         c.data.norm.context_head_stride = 4711;
         c.data.norm.context_flags = MHA_NORM_ALL_HEADS;
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"norm.context_head_stride is 4711", "MHA_NORM_ALL_HEADS"}}},
      {"WeightsOfQueriesBesideANormOfTheContextAlone",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1,
         c.data.norm.q_weight = WithTheLast(0);
         c.data.norm.epsilon = 0;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is 0"}}},
      {"ScoreOptionsOfAnUnknownSize",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.struct_size = sizeof(mha_score_options) - 1;
       },
       {MHA_ERROR_STRUCT_SIZE, {argument}, {"mha_score_options", "struct_size"}}},
      {"SoftcapIsNegative",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.softcap = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.softcap is -1"}}},
      {"SoftcapIsInfinite",
       [](auto &c) {
         c.args.score = &c.data.score,
         c.data.score.softcap = std::numeric_limits<float>::infinity();
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.softcap is inf"}}},
      {"AnAlibiSlopeIsNaN",
       [](auto &c) {
         c.args.score = &c.data.score,
         c.data.score.alibi_slopes = WithTheLast(std::numeric_limits<float>::quiet_NaN());
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.alibi_slopes", "nan"}},
       kReadsStarts},
      {"ASinkIsInfinite",
       [](auto &c) {
         c.args.score = &c.data.score,
         c.data.score.sinks = WithTheLast(std::numeric_limits<float>::infinity());
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.sinks", "inf"}},
       kReadsStarts},
      {"ASinkIsNaN",
       [](auto &c) {
         c.args.score = &c.data.score,
         c.data.score.sinks = WithTheLast(std::numeric_limits<float>::quiet_NaN());
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.sinks", "nan"}},
       kReadsStarts},
      {"RelativeLeftIsNegative",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.relative_bias = WithTheLast(0.0f),
         c.data.score.relative_left = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.relative_left is -1"}}},
      {"RelativeRightWithoutTheTable",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.relative_right = 3; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.relative_right is 3", "relative_bias"}}},
      {"RelativeBiasIsTooLarge",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.relative_bias = WithTheLast(0.0f);
         c.data.score.relative_left = c.data.score.relative_right = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score.relative_bias"}}},
      {"RelativeRowsBesideTheTable",
       [](auto &c) {
         c.args.score = &c.data.score, c.args.score_arrays = &c.data.score_arrays,
         c.data.score.relative_bias = c.data.score_arrays.relative_rows = WithTheLast(0.0f);
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"score.relative_bias", "score_arrays.relative_rows"}}},
      {"RelativeRowsStrideWithoutRows",
       [](auto &c) {
         c.args.score = &c.data.score, c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.relative_rows_strides.head = 4;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.relative_rows_strides", "NULL"}}},
      {"RelativeRowsStrideIsNegative",
       [](auto &c) {
         c.args.score = &c.data.score, c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.relative_rows = WithTheLast(0.0f);
         c.data.score_arrays.relative_rows_strides.batch = -3;
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"score_arrays.relative_rows_strides.batch is -3", "MHA_BROADCAST"}}},
      {"RelativeRowsAreCloserThanTheirDistances",
       [](auto &c) {
         c.args.score = &c.data.score, c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.relative_rows = WithTheLast(0.0f), c.data.score.relative_left = 4;
         c.data.score_arrays.relative_rows_strides.row = 4;
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"score_arrays.relative_rows_strides.row is 4", "the width of a row, 5"}}},
      {"RelativeRowsWithoutTheirDistances",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.relative_rows = WithTheLast(0.0f);
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"score_arrays.relative_rows is given", "score", "NULL"}}},
      {"RelativeRowsHaveTooManyDistances",
       [](auto &c) {
         c.args.score = &c.data.score, c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.relative_rows = WithTheLast(0.0f);
         c.data.score.relative_left = c.data.score.relative_right = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score_arrays.relative_rows"}}},
      {"RelativeRowsAreTooLarge",
       [](auto &c) {
         c.args.score = &c.data.score, c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.relative_rows = WithTheLast(0.0f),
         c.data.score_arrays.relative_rows_strides.head = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score_arrays.relative_rows"}}},
      {"ChosenKeysWithoutACount",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.chosen_keys = &kEntry;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.num_chosen is 0"}}},
      {"ACountWithoutChosenKeys",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.num_chosen = 3;
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"score_arrays.num_chosen is 3", "chosen_keys is NULL"}}},
      {"ABlockWithoutChosenKeys",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.chosen_block = 16;
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"score_arrays.chosen_block is 16", "chosen_keys is NULL"}}},
      {"OutputsPerPairBesideChosenKeys",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.chosen_keys = &kEntry,
         c.data.score_arrays.num_chosen = 1;
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"outputs.scores has a number for each key", "set it to NULL"}}},
      {"ChosenBlockIsNegative",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.chosen_keys = &kEntry,
         c.data.score_arrays.num_chosen = 1, c.data.score_arrays.chosen_block = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.chosen_block is -1"}}},
      {"ListsOfChosenKeysOverlap",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.chosen_keys = &kEntry,
         c.data.score_arrays.num_chosen = 4;
         c.data.score_arrays.chosen_keys_strides.row = 3;
       },
       {MHA_ERROR_INVALID_VALUE,
        {argument},
        {"score_arrays.chosen_keys_strides.row is 3", "the width of a row, 4"}}},
      {"ListsOfChosenKeysAreTooLarge",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.chosen_keys = &kEntry,
         c.data.score_arrays.num_chosen = 4;
         c.data.score_arrays.chosen_keys_strides.row = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score_arrays.chosen_keys"}}},
      {"QScalesAreTooLarge",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.q_scales = WithTheLast(0.0f), c.args.n_q = kMax / 128;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"AHeadScaleIsNaN",
       [](auto &c) {
         c.args.score = &c.data.score,
         c.data.score.head_scales = WithTheLast(std::numeric_limits<float>::quiet_NaN());
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.head_scales[1] is nan"}},
       kReadsStarts},
      {"AHeadScaleIsInfinite",
       [](auto &c) {
         c.args.score = &c.data.score,
         c.data.score.head_scales = WithTheLast(-std::numeric_limits<float>::infinity());
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.head_scales[1] is -inf"}},
       kReadsStarts},
      {"BiasTypeIsUnknown",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.bias.data = &c,
         c.data.score_arrays.bias.type = MHA_TYPE_INT8;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.bias.type is 4"}}},
      {"BiasTypeWithoutBias",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.bias.type = MHA_TYPE_F16;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.bias.type is 2"}}},
      {"BiasStrideWithoutBias",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.bias.strides.head = 8;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.bias.strides", "NULL"}}},
      {"MaskStrideIsNegative",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays;
         c.data.score_arrays.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score_arrays.mask_strides.batch = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.mask_strides.batch is -1"}}},
      {"MaskRowsAreTooShort",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays;
         c.data.score_arrays.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score_arrays.mask_strides.row = 1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.mask_strides.row is 1"}}},
      {"BiasIsTooLarge",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.bias.data = &c,
         c.data.score_arrays.bias.strides.head = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score_arrays.bias"}}},
      {"ColumnsAreUnknown",
       [](auto &c) { c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.columns = 2; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.columns is 2"}}},
      {"ColumnsWithoutMaskAndBias",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.columns = MHA_COLUMNS_NEW_KEYS;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.columns"}}},
      {"NumColumnsAreNegative",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays;
         c.data.score_arrays.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score_arrays.num_columns = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.num_columns is -1"}}},
      {"NumColumnsWithoutColumns",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.num_columns = 8;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.num_columns is 8"}}},
      {"RowsAreShorterThanNumColumns",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays;
         c.data.score_arrays.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score_arrays.mask_strides.row = 99;
         c.data.score_arrays.num_columns = 100;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.mask_strides.row is 99", "100"}}},
      {"GroupsAreUnknown",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.q_groups = reinterpret_cast<int32_t *>(&c),
         c.data.score_arrays.groups = 2;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.groups is 2"}}},
      {"GroupsWithoutNumbers",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays, c.data.score_arrays.groups = MHA_GROUPS_ALSO;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.groups", "q_groups"}}},
      {"GroupsOfKeysWithoutThoseOfQueries",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays,
         c.data.score_arrays.kv_groups = reinterpret_cast<int32_t *>(&c);
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.kv_groups", "q_groups"}}},
      {"GroupsAreTooMany",  // 2 sequences of 2^60 groups of 4 bytes
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays;
         c.data.score_arrays.q_groups = c.data.score_arrays.kv_groups =
             reinterpret_cast<int32_t *>(&c);
         c.data.score_arrays.num_columns = int64_t{1} << 60;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score_arrays.kv_groups"}}},
      {"NumColumnsAreTheGreatestInteger",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays;
         c.data.score_arrays.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score_arrays.mask_strides = {MHA_BROADCAST, MHA_BROADCAST, MHA_BROADCAST};
         c.data.score_arrays.num_columns = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score_arrays.num_columns"}}},
      {"GroupsOfKeysThatAreNotTheQueries",
       [](auto &c) {
         c.args.score_arrays = &c.data.score_arrays;
         c.data.score_arrays.q_groups = reinterpret_cast<int32_t *>(&c);
         c.args.n_q -= 1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score_arrays.kv_groups is NULL"}}},
      {"CausalWithMoreQueriesThanKeysNeedsStarts",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.data.sequences.q_first_positions = nullptr;
         c.args.n_kv = 2;
       },
       {MHA_ERROR_SHAPE, {argument}, {"n_q", "n_kv", "3", "2", "sequences.q_first_positions"}}},
      {"CausalWithoutKeysNeedsStarts",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.data.sequences.q_first_positions = nullptr;
         c.args.n_kv = MHA_EMPTY;
       },
       {MHA_ERROR_SHAPE, {argument}, {"n_q", "n_kv", "sequences.q_first_positions"}}},
      {"FirstStartIsTooFarBeforeTheFirstKey",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.data.q_start[0] = -(int64_t{1} << 62) - 1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.q_first_positions[0]", "-2^62"}},
       kReadsStarts},
      {"LastStartIsTooFarBeforeTheFirstKey",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.data.q_start[1] = kMin;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.q_first_positions[1]", "-2^62"}},
       kReadsStarts},
      {"SequencesOfAnUnknownSize",
       [](auto &c) { c.data.sequences.struct_size = sizeof(mha_sequences) - 1; },
       {MHA_ERROR_STRUCT_SIZE, {argument}, {"mha_sequences", "struct_size"}}},
      {"CountIsNotTheBatch",
       [](auto &c) { c.data.sequences.count = 3; },
       {MHA_ERROR_SHAPE, {argument}, {"sequences.count is 3", "batch is 2"}}},
      {"CountIsNegative",
       [](auto &c) { c.data.sequences.count = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.count is -1"}}},
      {"PackedKeysWithoutPackedQueries",
       [](auto &c) { c.data.sequences.cu_seqlens_kv = Rows<0, 2, 4>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.cu_seqlens_kv", "without cu_seqlens_q"}}},
      {"PackedQueriesAloneWithAnotherNumberOfKeys",
       [](auto &c) { Pack(Rows<0, 1, 3>(), nullptr, &c); },
       {MHA_ERROR_SHAPE, {argument}, {"sequences.cu_seqlens_kv is NULL", "n_kv 4", "n_q 3"}}},
      {"PackedSequencesWithQLengths",
       [](auto &c) {
         Pack(Rows<0, 1, 3>(), Rows<0, 2, 4>(), &c), c.data.sequences.q_lengths = Rows<1, 2>();
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.q_lengths", "cu_seqlens_q"}}},
      {"PackedSequencesWithKvLengths",
       [](auto &c) {
         Pack(Rows<0, 1, 3>(), Rows<0, 2, 4>(), &c), c.data.sequences.kv_lengths = Rows<1, 2>();
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.kv_lengths", "cu_seqlens_q"}}},
      {"PackedSequencesWithFirstRowsOfQueries",
       [](auto &c) {
         Pack(Rows<0, 1, 3>(), Rows<0, 2, 4>(), &c), c.data.sequences.q_first_rows = Rows<1, 2>();
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.q_first_rows", "cu_seqlens_q"}}},
      {"PackedSequencesWithFirstRowsOfKeys",
       [](auto &c) {
         Pack(Rows<0, 1, 3>(), Rows<0, 2, 4>(), &c), c.data.sequences.kv_first_rows = Rows<1, 2>();
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.kv_first_rows", "cu_seqlens_q"}}},
      {"PackedQueriesStartBeforeTheArray",
       [](auto &c) { Pack(Rows<-1, 1, 3>(), Rows<0, 2, 4>(), &c); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.cu_seqlens_q[0] is -1", "0"}},
       kReadsStarts},
      {"PackedQueriesDescend",
       [](auto &c) { Pack(Rows<0, 2, 1>(), Rows<0, 2, 4>(), &c); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.cu_seqlens_q[2] is 1", "less than 2"}},
       kReadsStarts},
      {"PackedQueriesAreMoreThanThereAre",
       [](auto &c) { Pack(Rows<0, 2, 4>(), Rows<0, 2, 4>(), &c); },
       {MHA_ERROR_SHAPE, {argument}, {"sequences.cu_seqlens_q[2] is 4", "n_q, 3"}},
       kReadsStarts},
      {"PackedKeysAreMoreThanThereAre",
       [](auto &c) { Pack(Rows<0, 2, 3>(), Rows<0, 4, 5>(), &c); },
       {MHA_ERROR_SHAPE, {argument}, {"sequences.cu_seqlens_kv[2] is 5", "n_kv, 4"}},
       kReadsStarts},
      {"PackedKeysDescendFromMoreThanThereAre",
       [](auto &c) { Pack(Rows<0, 2, 3>(), Rows<0, 5, 4>(), &c); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.cu_seqlens_kv[2] is 4", "less than 5"}},
       kReadsStarts},
      {"APackedSequenceHasMoreQueriesThanKeys",
       [](auto &c) {
         Pack(Rows<0, 1, 3>(), Rows<0, 3, 4>(), &c);
         c.args.flags = MHA_CAUSAL, c.data.sequences.q_first_positions = nullptr;
       },
       {MHA_ERROR_SHAPE, {argument}, {"sequence 1", "sequences.q_first_positions"}},
       kReadsStarts},
      {"QFirstRowIsNegative",
       [](auto &c) { c.data.sequences.q_first_rows = Rows<0, -1>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.q_first_rows[1] is -1", "0 to n_q, 3"}},
       kReadsStarts},
      {"QFirstRowIsAfterTheLastRow",
       [](auto &c) { c.data.sequences.q_first_rows = Rows<4, 0>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.q_first_rows[0] is 4", "0 to n_q, 3"}},
       kReadsStarts},
      {"QFirstRowAndLengthAreMoreThanThereAre",
       [](auto &c) {
         c.data.sequences.q_first_rows = Rows<1, 2>(), c.data.sequences.q_lengths = Rows<2, 2>();
       },
       {MHA_ERROR_SHAPE, {argument}, {"sequences.q_first_rows[1] is 2", "n_q = 3 rows"}},
       kReadsStarts},
      {"KvFirstRowIsNegative",
       [](auto &c) { c.data.sequences.kv_first_rows = Rows<0, -1>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.kv_first_rows[1] is -1"}},
       kReadsStarts},
      {"KvFirstRowIsAfterTheLastRow",
       [](auto &c) { c.data.sequences.kv_first_rows = Rows<5, 0>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"sequences.kv_first_rows[0] is 5", "0 to n_kv, 4"}},
       kReadsStarts},
      {"KvFirstRowAndLengthAreMoreThanThereAre",
       [](auto &c) {
         c.data.sequences.kv_first_rows = Rows<1, 2>(), c.data.sequences.kv_lengths = Rows<3, 3>();
       },
       {MHA_ERROR_SHAPE, {argument}, {"sequences.kv_first_rows[1] is 2", "3", "n_kv = 4 rows"}},
       kReadsStarts},
      {"SchedulerWithoutThreads",
       [](auto &c) { c.scheduler.scheduler.num_threads = 0; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"num_threads"}}},
      {"SchedulerWithoutParallelFor",
       [](auto &c) { c.scheduler.scheduler.parallel_for = nullptr; },
       {MHA_ERROR_NULL_POINTER, {argument}, {"parallel_for"}}},
      {"SchedulerReservedIsSet",
       [](auto &c) { c.scheduler.scheduler.reserved = 1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"reserved"}}},
      {"OutputsOfAnUnknownSize",
       [](auto &c) { c.data.outputs.struct_size = sizeof(mha_outputs) - 1; },
       {MHA_ERROR_STRUCT_SIZE, {argument}, {"mha_outputs", "struct_size"}}},
      {"BatchIsTooLarge",
       [](auto &c) { c.args.batch = kMax; },
       {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"NQIsTooLarge", [](auto &c) { c.args.n_q = kMax; }, {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"NKvIsTooLarge", [](auto &c) { c.args.n_kv = kMax; }, {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"EverythingIsTooLarge",
       [](auto &c) { c.args.batch = c.args.n_q = c.args.n_kv = kMax; },
       {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"AttentionWeightsAreTooLarge",  // 2 * 4 heads * 2^30 * 2^30 floats
       [](auto &c) { c.args.n_q = c.args.n_kv = int64_t{1} << 30; },
       {MHA_ERROR_TOO_LARGE, {argument}, {}}},
  };
}

// Rows about each stride of an array. A head stride is given with those of rows and sequences.
template <typename Call, typename Args, typename Array>
std::vector<CallCase<Call>> StrideCases(uint32_t argument, const std::string &name,
                                        Array Args::*array, bool has_heads) {
  std::vector<CallCase<Call>> cases;
  using Strides = std::vector<int64_t mha_strides::*>;
  const auto add = [&](const std::string &stride, const Strides &fields) {
    for (const int64_t wrong : {int64_t{-1}, kMin + 1, kMax, kMax - 1, kMax / 2}) {
      const Expected expected = wrong > 0 ? Expected{MHA_ERROR_TOO_LARGE, {argument}, {name}}
                                          : Expected{MHA_ERROR_INVALID_VALUE,
                                                     {argument},
                                                     {name + ".strides." + stride + " is"}};
      static std::deque<std::function<void(Call &)>> kept;
      kept.push_back([=](Call &c) {
        for (int64_t mha_strides::*field : fields)
          (c.args.*array).strides.*field = wrong > 0 || field == fields.back() ? wrong : 0;
      });
      const char *case_name =
          Kept(name + "_" + stride + "_" + std::to_string(static_cast<uint64_t>(wrong)));
      cases.push_back({case_name, nullptr, expected, kAllOfTheCall, &kept.back()});
    }
  };
  add("batch", {&mha_strides::batch});
  add("row", {&mha_strides::row});
  if (has_heads) add("head", {&mha_strides::batch, &mha_strides::row, &mha_strides::head});
  return cases;
}

class ForwardErrors : public testing::TestWithParam<CallCase<FullForward>> {};
TEST_P(ForwardErrors, AreSentencesAndNothingIsWritten) { ExpectCallFails(GetParam()); }

const CallCase<FullForward> kForwardCases[] = {
    {"InputTypeIsUnknown",
     [](auto &c) { c.args.query.type = 4; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"query.type is 4"}}},
    {"QueryIsNull",
     [](auto &c) { c.args.query.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {2}, {"query"}},
     kCall},
    {"KeyIsNullButHasAnotherWidth",
     [](auto &c) {
       c.args.key.data = nullptr;
       c.args.n_kv = c.args.n_q;
     },
     {MHA_ERROR_SHAPE, {2}, {"key", "7", "10"}}},
    {"ValueIsNullButHasAnotherWidth",
     [](auto &c) { c.args.value.data = nullptr; },
     {MHA_ERROR_SHAPE, {2}, {"value", "9", "7"}}},
    {"QueryRowStrideIsShorterThanARow",
     [](auto &c) { c.args.query.strides.row = 9; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"query.strides.row", "9", "10"}}},
    {"KeyRowStrideIsShorterThanARow",
     [](auto &c) { c.args.key.strides.row = 6; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"key.strides.row", "6", "7"}}},
    {"ValueRowStrideIsShorterThanARow",
     [](auto &c) { c.args.value.strides.row = 1; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"value.strides.row", "1", "9"}}},
    {"OutputRowStrideIsShorterThanARow",
     [](auto &c) { c.args.output.strides.row = 10; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output.strides.row", "10", "11"}}},
    {"OutputRowsAreBroadcast",
     [](auto &c) { c.args.output.strides.row = MHA_BROADCAST; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output.strides.row"}}},
    {"OutputSequencesAreBroadcast",
     [](auto &c) { c.args.output.strides.batch = MHA_BROADCAST; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output.strides.batch"}}},
    {"QueryIsBroadcastBeyondMemory",
     [](auto &c) {
       c.args.query.strides.batch = kMax / 2, c.args.query.strides.row = MHA_BROADCAST;
     },
     {MHA_ERROR_TOO_LARGE, {2}, {"query"}}},
    {"OutputSequencesOverlap",
     [](auto &c) { c.args.output.strides.batch = 11; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output.strides.batch"}}},
    {"OutputSequencesOverlapByOneElement",
     [](auto &c) {
       c.args.output.strides.row = 20;
       c.args.output.strides.batch = 2 * 20 + 11 - 1;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output.strides.batch"}}},
    {"TheInputIsTwoToThe64Bytes",  // 2^61 rows of 10 floats
     [](auto &c) { c.args.n_q = int64_t{1} << 61; },
     {MHA_ERROR_TOO_LARGE, {2}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Common, ForwardErrors, testing::ValuesIn(CommonCases<FullForward>(2)),
                         CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(Args, ForwardErrors, testing::ValuesIn(kForwardCases),
                         CaseName<CallCase<FullForward>>);

#define MHA_FORWARD_STRIDES(array) \
  testing::ValuesIn(StrideCases<FullForward>(2, #array, &mha_forward_args::array, false))
INSTANTIATE_TEST_SUITE_P(QueryStrides, ForwardErrors, MHA_FORWARD_STRIDES(query),
                         CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(KeyStrides, ForwardErrors, MHA_FORWARD_STRIDES(key),
                         CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(ValueStrides, ForwardErrors, MHA_FORWARD_STRIDES(value),
                         CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(OutputStrides, ForwardErrors, MHA_FORWARD_STRIDES(output),
                         CaseName<CallCase<FullForward>>);

TEST(ForwardCalls, SucceedBeforeTheyAreBroken) {
  ExpectCallSucceeds<FullForward>([](auto &) {});
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.flags = MHA_CAUSAL; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.scheduler = nullptr; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.data.sequences.q_first_positions = nullptr; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.n_kv = MHA_EMPTY; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.batch = MHA_EMPTY; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.n_q = MHA_EMPTY; });
  // All strides spelled out, as they would be if they were 0.
  ExpectCallSucceeds<FullForward>([](auto &c) {
    c.args.query.strides.row = 10;
    c.args.query.strides.batch = 3 * 10;
    c.args.key.strides.row = 7;
    c.args.key.strides.batch = 4 * 7;
    c.args.value.strides.row = 9;
    c.args.value.strides.batch = 4 * 9;
    c.args.output.strides.row = 11;
    c.args.output.strides.batch = 3 * 11;
  });
  // Sequences of the input may overlap each other.
  ExpectCallSucceeds<FullForward>([](auto &c) {
    c.args.query.strides.row = 10;
    c.args.query.strides.batch = 10;
  });
}

TEST(ForwardCalls, WithSgemmHaveRowStridesOf31Bits) {
  const LayerProblem problem = SmallLayer();
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const Layer layer = Create(LayerData(problem), &options);
  ForwardData data(layer.get(), problem, {Guarded()});
  data.args.n_q = data.args.batch = 1;
  data.sequences.q_first_positions = nullptr;
  Memory workspace(1 << 20);
  for (mha_input mha_forward_args::*input : {&mha_forward_args::query, &mha_forward_args::value}) {
    (data.args.*input).strides.row = int64_t{1} << 31;
    ExpectFails(
        [&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); },
        {MHA_ERROR_TOO_LARGE, {2}, {"2147483648", "2147483647"}});
    EXPECT_TRUE(data.OutputsAreUntouched());
    (data.args.*input).strides.row = 0;
  }
}

// With rows outside, the second sequence's rows are between those of the first one.
TEST(ForwardCalls, AcceptOutputSequencesThatInterleaveWithoutOverlap) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  for (const Layout &layout : {kGaps, kRowsOutside}) {
    ForwardData(layer.get(), problem, {Guarded(), layout, layout, layout, layout}).Compute();
  }
}

// The query's rows serve as keys then: there are n_q of them, and a value for each.
TEST(ForwardCalls, WithValuesButNoKeysHaveOneValueForEachQuery) {
  LayerProblem problem = SquareLayer(10, 4, 2, 3);
  const Layer layer = Create(LayerData(problem));
  problem.has_key = false;
  for (int64_t n_kv : {0, 2, 3, 4}) {
    problem.n_kv = n_kv;
    ForwardData data(layer.get(), problem, {Guarded()});
    if (n_kv == problem.n_q) {
      data.Compute();
      continue;
    }
    const Expected expected = {MHA_ERROR_SHAPE, {2}, {"n_q", "n_kv", "3", std::to_string(n_kv)}};
    Memory workspace(1 << 20);
    size_t bytes = 4711;
    ExpectFails([&](mha_error *error) { return data.Workspace(&bytes, error); }, expected);
    EXPECT_EQ(bytes, 4711u);
    ExpectFails(
        [&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); },
        expected);
    EXPECT_TRUE(data.OutputsAreUntouched());
  }
}

TEST(ForwardCalls, WriteNothingWhereThereIsNothingToDo) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  for (bool empty_batch : {true, false}) {
    ForwardData data(
        layer.get(), problem,
        {Guarded(kAskAll &
                 ~(kAskK | kAskV))});  // these two depend on the keys, of which there are some
    (empty_batch ? data.args.batch : data.args.n_q) = MHA_EMPTY;
    Memory workspace(data.WorkspaceBytes());
    mha_error error = UnwrittenError();
    ExpectNoError(data.Run(workspace.data(), workspace.size(), &error), error);
    EXPECT_TRUE(data.OutputsAreUntouched());
  }
}

TEST(ForwardCalls, NameThePointerThatIsNull) {
  FullForward call;
  size_t needed = 0;
  ASSERT_EQ(call.data.Workspace(&needed, nullptr), MHA_OK);
  ASSERT_GT(needed, 0u);
  Memory workspace(needed);
  size_t bytes = 4711;
  mha_call_info info = Zeroed<mha_call_info>();
  const mha_layer *layer = call.layer.get();
  ExpectFails(
      [&](mha_error *error) { return mha_forward_workspace(nullptr, &call.args, &bytes, error); },
      {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails(
      [&](mha_error *error) { return mha_forward_workspace(layer, nullptr, &bytes, error); },
      {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails(
      [&](mha_error *error) { return mha_forward_workspace(layer, &call.args, nullptr, error); },
      {MHA_ERROR_NULL_POINTER, {3}, {"bytes"}});
  EXPECT_EQ(bytes, 4711u);
  ExpectFails([&](mha_error *error) { return mha_info(nullptr, &call.args, &info, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_info(layer, nullptr, &info, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails([&](mha_error *error) { return mha_info(layer, &call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"info|mha_call_info"}});
  ExpectFails(
      [&](mha_error *error) {
        return mha_forward(nullptr, &call.args, workspace.data(), needed, error);
      },
      {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails(
      [&](mha_error *error) {
        return mha_forward(layer, nullptr, workspace.data(), needed, error);
      },
      {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails(
      [&](mha_error *error) { return mha_forward(layer, &call.args, nullptr, needed + 64, error); },
      {MHA_ERROR_NULL_POINTER, {3}, {"workspace"}});
  EXPECT_TRUE(call.data.OutputsAreUntouched());
}

class AttentionErrors : public testing::TestWithParam<CallCase<FullAttention>> {};
TEST_P(AttentionErrors, AreSentencesAndNothingIsWritten) { ExpectCallFails(GetParam()); }

const CallCase<FullAttention> kAttentionCases[] = {
    {"NormOfTheContextWithoutWO",
     [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"norm.context_epsilon is 1", "W_O"}}},
    {"NumHeadsIsZero",
     [](auto &c) { c.args.num_heads = 0; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumHeadsIsNegative",
     [](auto &c) { c.args.num_heads = -4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumKvHeadsIsNegative",
     [](auto &c) { c.args.num_kv_heads = -1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"num_kv_heads"}}},
    {"HeadDimIsZero",
     [](auto &c) { c.args.head_dim = 0; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimIsNegative",
     [](auto &c) { c.args.head_dim = -3; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimVIsNegative",
     [](auto &c) { c.args.head_dim_v = -5; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim_v"}}},
    {"NumKvHeadsDoesNotDivide",
     [](auto &c) { c.args.num_kv_heads = 3; },
     {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "3", "4"}}},
    {"MoreKvHeadsThanHeads",
     [](auto &c) { c.args.num_kv_heads = 8; },
     {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "8", "4"}}},
    {"QIsNull",
     [](auto &c) { c.args.q.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {1}, {"q"}},
     kCall},
    {"KIsNull",
     [](auto &c) { c.args.k.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {1}, {"k"}},
     kCall},
    {"VIsNull",
     [](auto &c) { c.args.v.data = nullptr; },
     {MHA_ERROR_NULL_POINTER, {1}, {"v"}},
     kCall},
    {"QTypeIsUnknown",
     [](auto &c) { c.args.q.type = MHA_TYPE_INT8; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"q.type is 4"}}},
    {"KTypeIsUnknown",
     [](auto &c) { c.args.k.type = 4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"k.type is 4"}}},
    {"VTypeIsUnknown",
     [](auto &c) { c.args.v.type = 0x80000000u; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"v.type is 2147483648"}}},
    {"QRowStrideIsShorterThanARow",
     [](auto &c) { c.args.q.strides.row = 2; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"q.strides.row", "2", "3"}}},
    {"KRowStrideIsShorterThanARow",
     [](auto &c) { c.args.k.strides.row = 1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"k.strides.row", "1", "3"}}},
    {"KHeadsOverlap",
     [](auto &c) {
       c.args.k.strides.head = 2, c.args.k.strides.row = 6, c.args.k.strides.batch = 600;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"k.strides.head is 2", "3"}}},
    {"VRowStrideIsShorterThanARow",
     [](auto &c) { c.args.v.strides.row = 4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"v.strides.row", "4", "5"}}},
    {"OutputRowStrideIsShorterThanARow",
     [](auto &c) {
       c.args.output.strides.row = 4;
       c.args.output.strides.head = 15;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output.strides.row"}}},
    {"OutputHeadStrideIsShorterThanARow",
     [](auto &c) { c.args.output.strides.head = 4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output.strides.head"}}},
    {"OutputHeadsOverlapRows",  // row 1 of head 0 is row 0 of head 1
     [](auto &c) { c.args.output.strides.row = 5; },
     {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"OutputHeadsOverlapRowsByOneElement",  // [batch, heads, n, width] with heads that are one
                                            // element too close
     [](auto &c) {
       c.args.output.strides.row = 5;
       c.args.output.strides.head = 14;
       c.args.output.strides.batch = 60;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"OutputSequencesOverlap",
     [](auto &c) { c.args.output.strides.batch = 59; },
     {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"ScaleIsNan", [](auto &c) { c.args.scale = kNan; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsInfinite",
     [](auto &c) { c.args.scale = kInfinity; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsMinusInfinity",
     [](auto &c) { c.args.scale = -kInfinity; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"OutputsHaveQ",
     [](auto &c) { c.data.outputs.q = c.data.outputs.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"outputs.q is given, but only mha_forward computes it"}}},
    {"OutputsHaveK",
     [](auto &c) { c.data.outputs.k = c.data.outputs.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"outputs.k is given, but only mha_forward computes it"}}},
    {"OutputsHaveV",
     [](auto &c) { c.data.outputs.v = c.data.outputs.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"outputs.v is given, but only mha_forward computes it"}}},
    {"UnknownInstructionSet",
     [](auto &c) { c.args.instruction_set = 9; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set", "9"}}},
    {"InstructionSet32",
     [](auto &c) { c.args.instruction_set = 32; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set", "32"}}},
    {"InstructionSetWithAllBits",
     [](auto &c) { c.args.instruction_set = 0xFFFFFFFFu; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set"}}},
    {"AbsentInstructionSet",
     [](auto &c) { c.args.instruction_set = AbsentInstructionSet(); },
     {MHA_ERROR_INSTRUCTION_SET, {1}, {mha_instruction_set_name(AbsentInstructionSet())}}},
    {"NumHeadsIsTooLarge",
     [](auto &c) { c.args.num_heads = c.args.num_kv_heads = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimIsTooLarge", [](auto &c) { c.args.head_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimVIsTooLarge",
     [](auto &c) { c.args.head_dim_v = kMax; },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimVOfAllHeadsIsTooLarge",
     [](auto &c) { c.args.head_dim_v = int64_t{1} << 29; },
     {MHA_ERROR_TOO_LARGE, {1}, {"num_heads 4 * head_dim (or * head_dim_v)"}}},
    {"AllOfTheShapeIsTooLarge",
     [](auto &c) {
       c.args.batch = c.args.n_q = c.args.n_kv = c.args.num_heads = c.args.num_kv_heads =
           c.args.head_dim = c.args.head_dim_v = kMax;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Common, AttentionErrors, testing::ValuesIn(CommonCases<FullAttention>(1)),
                         CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(Args, AttentionErrors, testing::ValuesIn(kAttentionCases),
                         CaseName<CallCase<FullAttention>>);

#define MHA_ATTENTION_STRIDES(array) \
  testing::ValuesIn(StrideCases<FullAttention>(1, #array, &mha_attention_args::array, true))
INSTANTIATE_TEST_SUITE_P(QStrides, AttentionErrors, MHA_ATTENTION_STRIDES(q),
                         CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(KStrides, AttentionErrors, MHA_ATTENTION_STRIDES(k),
                         CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(VStrides, AttentionErrors, MHA_ATTENTION_STRIDES(v),
                         CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(OutputStrides, AttentionErrors, MHA_ATTENTION_STRIDES(output),
                         CaseName<CallCase<FullAttention>>);

TEST(AttentionCalls, SucceedBeforeTheyAreBroken) {
  ExpectCallSucceeds<FullAttention>([](auto &) {});
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.flags = MHA_CAUSAL; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.scheduler = nullptr; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.data.sequences.q_first_positions = nullptr; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.n_kv = MHA_EMPTY; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.batch = MHA_EMPTY; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.n_q = MHA_EMPTY; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.scale = -0.5f; });
  // All strides spelled out, as they would be if they were 0.
  ExpectCallSucceeds<FullAttention>([](auto &c) {
    c.args.q.strides.head = 3;
    c.args.q.strides.row = 12;
    c.args.q.strides.batch = 36;
    c.args.k.strides.head = 3;
    c.args.k.strides.row = 6;
    c.args.k.strides.batch = 24;
    c.args.v.strides.head = 5;
    c.args.v.strides.row = 10;
    c.args.v.strides.batch = 40;
    c.args.output.strides.head = 5;
    c.args.output.strides.row = 20;
    c.args.output.strides.batch = 60;
  });
}

TEST(AttentionCalls, AcceptEveryNestingOfBatchRowsAndHeads) {
  for (const Layout &layout : {kHeadsOutside, kRowsOutside, kGaps}) {
    AttentionData(NormalAttention(SmallSizes()),
                  {Guarded(), MHA_INSTRUCTION_SET_AUTO, layout, layout, layout, layout})
        .Compute();
  }
  // There is nothing to step over in a batch of one.
  AttentionSizes one = SmallSizes();
  one.batch = 1;
  AttentionData data(NormalAttention(one),
                     {Guarded(), MHA_INSTRUCTION_SET_AUTO, {}, {}, {}, kHeadsOutside});
  data.args.output.strides.batch = 1;
  data.Compute();
}

TEST(AttentionCalls, NameThePointerThatIsNull) {
  FullAttention call;
  size_t needed = 0;
  ASSERT_EQ(call.data.Workspace(&needed, nullptr), MHA_OK);
  ASSERT_GT(needed, 0u);
  Memory workspace(needed);
  size_t bytes = 4711;
  mha_call_info info = Zeroed<mha_call_info>();
  ExpectFails([&](mha_error *error) { return mha_attention_workspace(nullptr, &bytes, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"args|mha_attention_args"}});
  ExpectFails([&](mha_error *error) { return mha_attention_workspace(&call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"bytes"}});
  EXPECT_EQ(bytes, 4711u);
  ExpectFails([&](mha_error *error) { return mha_attention_info(nullptr, &info, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"args|mha_attention_args"}});
  ExpectFails([&](mha_error *error) { return mha_attention_info(&call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"info|mha_call_info"}});
  ExpectFails(
      [&](mha_error *error) { return mha_attention(nullptr, workspace.data(), needed, error); },
      {MHA_ERROR_NULL_POINTER, {1}, {"args|mha_attention_args"}});
  ExpectFails(
      [&](mha_error *error) { return mha_attention(&call.args, nullptr, needed + 64, error); },
      {MHA_ERROR_NULL_POINTER, {2}, {"workspace"}});
  EXPECT_TRUE(call.data.OutputsAreUntouched());
}

// ---- Workspace
// ---------------------------------------------------------------------------------------------------------------------

template <typename Call>
void ExpectEverySmallerWorkspaceFails(uint32_t argument) {
  Call call;
  size_t needed = 0;
  ASSERT_EQ(call.data.Workspace(&needed, nullptr), MHA_OK);
  ASSERT_GT(needed, 0u);
  for (size_t smaller = 0; smaller < needed; smaller += smaller + 400 < needed ? 131 : 1) {
    Memory workspace(smaller);
    ExpectFails([&](mha_error *error) { return call.data.Run(workspace.data(), smaller, error); },
                {MHA_ERROR_BUFFER_TOO_SMALL, {argument, argument + 1}, {std::to_string(needed)}});
    ASSERT_TRUE(call.data.OutputsAreUntouched()) << smaller << " of " << needed;
  }
  // Too small is too small, also where there is nothing at all.
  mha_error error = UnwrittenError();
  EXPECT_NE(call.data.Run(nullptr, 0, &error), MHA_OK);
  EXPECT_TRUE(call.data.OutputsAreUntouched());
}

TEST(Workspace, OfForwardIsRejectedIfItIsSmaller) {
  ExpectEverySmallerWorkspaceFails<FullForward>(3);
}
TEST(Workspace, OfAttentionIsRejectedIfItIsSmaller) {
  ExpectEverySmallerWorkspaceFails<FullAttention>(2);
}

// ---- Time
// --------------------------------------------------------------------------------------------------------------------------

// However many sequences there are said to be, a call without its workspace ends, and so does a
// description without arrays to be read.
template <typename Call>
void ExpectAnswersForAnyBatch(uint32_t workspace_argument) {
  const std::vector<float> table(8, 0.5f);
  mha_rope rope = Zeroed<mha_rope>();
  rope.dims = 2;
  rope.num_positions = 8;
  rope.cos = rope.sin = table.data();
  std::vector<int64_t> positions(8);
  for (const int64_t batch : {int64_t{1} << 28, int64_t{1} << 50}) {
    Call call;
    call.args.batch = batch;
    call.args.n_q = 1;
    call.args.n_kv = 1;
    call.data.sequences.q_first_positions = nullptr;
    call.data.outputs.lse = call.data.outputs.attention_weights = nullptr;
    call.args.outputs = nullptr;
    call.args.rope = &rope;
    mha_call_info info = Zeroed<mha_call_info>();
    ExpectSucceeds([&](mha_error *error) { return call.data.Info(&info, error); });
    ExpectFails(
        [&](mha_error *error) { return call.data.Run(nullptr, info.workspace_bytes, error); },
        {MHA_ERROR_NULL_POINTER, {workspace_argument}, {"workspace"}});
    // Nor are arrays read before there is a workspace; these have fewer elements than are said.
    call.data.sequences.rope_q_positions = call.data.sequences.q_first_positions =
        call.data.sequences.q_lengths = positions.data();
    size_t bytes = 0;
    ExpectSucceeds([&](mha_error *error) { return call.data.Workspace(&bytes, error); });
    ExpectFails([&](mha_error *error) { return call.data.Run(nullptr, bytes, error); },
                {MHA_ERROR_NULL_POINTER, {workspace_argument}, {"workspace"}});
    call.data.sequences.rope_q_positions = nullptr;
  }
}

TEST(Time, OfForwardErrorsDoesNotGrowWithTheBatch) { ExpectAnswersForAnyBatch<FullForward>(3); }
TEST(Time, OfAttentionErrorsDoesNotGrowWithTheBatch) { ExpectAnswersForAnyBatch<FullAttention>(2); }

}  // namespace
