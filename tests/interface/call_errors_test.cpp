// Bad input is a sentence, not a crash: both entries, their size queries and their descriptions are called
// with every kind of wrong argument. Each row of a table takes a valid call and breaks one thing in it; then the status, the parameter that
// is named and the sentence must fit, and nothing but the error struct may have been written.

#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <vector>

#include "interface/calls.h"

namespace {

const int32_t kEntry = 0;  // of a list of chosen keys

using namespace support;  // NOLINT: this file is about nothing else

// ---- Calls: mha_forward, its workspace query and mha_info --------------------------------------------------------------------------

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

// Which functions a row is about. The queries look at no data, mha_info alone at q_start.
enum : unsigned { kWorkspace = 1, kCall = 2, kInfo = 4, kReadsStarts = kCall | kInfo, kAllOfTheCall = 7 };

template <typename Call>
struct CallCase {
  const char *name;
  void (*change)(Call &);
  Expected expected;
  unsigned functions = kAllOfTheCall;
  const std::function<void(Call &)> *other_change = nullptr;  // instead, of one that is put together
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
    ExpectFails([&](mha_error *error) { return call.data.Run(workspace.data(), workspace.size(), error); }, row.expected);
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
  ExpectSucceeds([&](mha_error *error) { return call.data.Run(workspace.data(), workspace.size(), error); });
}

// Rows about what both entries have. argument: which parameter the arguments are.
template <typename Call>
std::vector<CallCase<Call>> CommonCases(uint32_t argument) {
  return {
      {"BatchIsNegative", [](auto &c) { c.args.batch = -1; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"batch"}}},
      {"BatchIsNextToTheLeastInteger", [](auto &c) { c.args.batch = kMin + 1; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"batch"}}},
      {"BatchWasNeverSet",
       [](auto &c) { c.args.batch = 0; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"batch is 0; set it to the number of sequences, or to MHA_EMPTY for none"}}},
      {"NQWasNeverSet",
       [](auto &c) { c.args.n_q = 0; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"n_q is 0; set it to", "per sequence, or to MHA_EMPTY for none"}}},
      {"NKvWasNeverSet",
       [](auto &c) { c.args.n_kv = 0; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"n_kv is 0; set it to", "per sequence, or to MHA_EMPTY for none"}}},
      {"NQIsNegative", [](auto &c) { c.args.n_q = -1; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"n_q"}}},
      {"NKvIsNegative", [](auto &c) { c.args.n_kv = -1; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"n_kv"}}},
      {"OutputIsNull", [](auto &c) { c.args.output = nullptr; }, {MHA_ERROR_NULL_POINTER, {argument}, {"output"}}, kCall},
      {"UnknownFlagIsSet", [](auto &c) { c.args.flags = 0x100; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"flags", "0x100"}}},
      {"OutputTypeIsUnknown", [](auto &c) { c.args.output_type = 3; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"output_type is 3"}}},
      {"ReservedIsSet", [](auto &c) { c.args.reserved = 1; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"reserved"}}},
      {"NormIsOfNoVersion",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.struct_size = sizeof(mha_norm) - 1; },
       {MHA_ERROR_STRUCT_SIZE, {argument}, {"mha_norm", "struct_size"}}},
      {"NormHasAnUnknownFlag",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.flags = 16; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.flags", "0x10"}}},
      {"NormEpsilonIsZero", [](auto &c) { c.args.norm = &c.data.norm; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is 0"}}},
      {"NormEpsilonIsNegative", [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = -1e-6f; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is -1e-06"}}},
      {"NormEpsilonIsInfinite",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = std::numeric_limits<float>::infinity(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is inf"}}},
      {"NormEpsilonIsNaN",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = std::numeric_limits<float>::quiet_NaN(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is nan"}}},
      {"RmsNormHasABiasOfQueries",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.q_bias = WithTheLast(0); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.q_bias", "MHA_NORM_LAYER"}}},
      {"RmsNormHasABiasOfKeys",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.k_bias = WithTheLast(0); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.k_bias", "MHA_NORM_LAYER"}}},
      {"NormHeadStrideIsNegative",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.head_stride = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.head_stride is -1", "head_dim"}}},
      {"NormHeadStrideIsLessThanAHead",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.head_stride = 1; },
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
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.head_stride = kMax; },
       {MHA_ERROR_TOO_LARGE, {argument}, {"norm"}}},
      {"NormOfTheContextHasAFlagOfRotation",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1;
         c.data.norm.context_flags = MHA_NORM_AFTER_ROPE;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_flags", "0x4"}}},
      {"NormOfTheContextHasNoEpsilon",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.epsilon = 1, c.data.norm.context_weight = WithTheLast(0); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_epsilon is 0"}}},
      {"NormOfTheContextHasANegativeEpsilon",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.context_epsilon = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_epsilon is -1"}}},
      {"RmsNormOfTheContextHasABias",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1, c.data.norm.context_bias = WithTheLast(0); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_bias", "MHA_NORM_LAYER"}}},
      {"NormOfTheContextHasAStrideLessThanAHead",
       [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1, c.data.norm.context_head_stride = 1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_head_stride is 1;", "head_dim_v"}}},
      {"NormOfTheContextOfAllHeadsHasAnotherStride",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1, c.data.norm.context_head_stride = 4711;
         c.data.norm.context_flags = MHA_NORM_ALL_HEADS;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.context_head_stride is 4711", "MHA_NORM_ALL_HEADS"}}},
      {"WeightsOfQueriesBesideANormOfTheContextAlone",
       [](auto &c) {
         c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1, c.data.norm.q_weight = WithTheLast(0);
         c.data.norm.epsilon = 0;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"norm.epsilon is 0"}}},
      {"ScoreOptionsOfAnUnknownSize",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.struct_size = sizeof(mha_score_options) - 1; },
       {MHA_ERROR_STRUCT_SIZE, {argument}, {"mha_score_options", "struct_size"}}},
      {"SoftcapIsNegative",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.softcap = -1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.softcap is -1"}}},
      {"SoftcapIsInfinite",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.softcap = std::numeric_limits<float>::infinity(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.softcap is inf"}}},
      {"AnAlibiSlopeIsNaN",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.alibi_slopes = WithTheLast(std::numeric_limits<float>::quiet_NaN()); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.alibi_slopes", "nan"}},
       kReadsStarts},
      {"ASinkIsInfinite",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.sinks = WithTheLast(std::numeric_limits<float>::infinity()); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.sinks", "inf"}},
       kReadsStarts},
      {"ASinkIsNaN",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.sinks = WithTheLast(std::numeric_limits<float>::quiet_NaN()); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.sinks", "nan"}},
       kReadsStarts},
      {"RelativeLeftIsNegative",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.relative_bias = WithTheLast(0.0f), c.data.score.relative_left = -1; },
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
       [](auto &c) { c.args.score = &c.data.score, c.data.score.relative_bias = c.data.score.relative_rows = WithTheLast(0.0f); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.relative_bias", "score.relative_rows"}}},
      {"RelativeRowsStrideWithoutRows",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.relative_rows_head_stride = 4; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.relative_rows_head_stride is 4", "NULL"}}},
      {"RelativeRowsStrideIsNegative",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.relative_rows = WithTheLast(0.0f);
         c.data.score.relative_rows_batch_stride = -3;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.relative_rows_batch_stride is -3", "MHA_BROADCAST"}}},
      {"RelativeRowsAreCloserThanTheirDistances",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.relative_rows = WithTheLast(0.0f), c.data.score.relative_left = 4;
         c.data.score.relative_rows_row_stride = 4;
       },
       {MHA_ERROR_SHAPE, {argument}, {"score.relative_rows_row_stride is 4", "5 distances"}}},
      {"RelativeRowsHaveTooManyDistances",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.relative_rows = WithTheLast(0.0f);
         c.data.score.relative_left = c.data.score.relative_right = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score.relative_rows"}}},
      {"RelativeRowsAreTooLarge",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.relative_rows = WithTheLast(0.0f), c.data.score.relative_rows_head_stride = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score.relative_rows"}}},
      {"ChosenKeysWithoutACount",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.chosen_keys = &kEntry; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.num_chosen is 0"}}},
      {"ACountWithoutChosenKeys",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.num_chosen = 3; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.num_chosen is 3", "chosen_keys is NULL"}}},
      {"ABlockWithoutChosenKeys",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.chosen_block = 16; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.chosen_block is 16", "chosen_keys is NULL"}}},
      {"OutputsPerPairBesideChosenKeys",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.chosen_keys = &kEntry, c.data.score.num_chosen = 1; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"attention_weights has a column for each key", "leave it NULL"}}},
      {"ChosenBlockIsNegative",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.chosen_keys = &kEntry, c.data.score.num_chosen = 1, c.data.score.chosen_block = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.chosen_block is -1"}}},
      {"ListsOfChosenKeysOverlap",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.chosen_keys = &kEntry, c.data.score.num_chosen = 4;
         c.data.score.chosen_keys_row_stride = 3;
       },
       {MHA_ERROR_SHAPE, {argument}, {"score.chosen_keys_row_stride is 3", "4 entries"}}},
      {"ListsOfChosenKeysAreTooLarge",
       [](auto &c) {
         c.args.score = &c.data.score, c.data.score.chosen_keys = &kEntry, c.data.score.num_chosen = 4;
         c.data.score.chosen_keys_row_stride = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score.chosen_keys"}}},
      {"QScalesStrideIsNegative",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.q_scales = WithTheLast(0.0f), c.data.score.q_scales_stride = -2; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.q_scales_stride is -2"}}},
      {"QScalesStrideWithoutQScales",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.q_scales_stride = 2; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.q_scales_stride is 2", "q_scales"}}},
      {"QScalesAreTooLarge",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.q_scales = WithTheLast(0.0f), c.data.score.q_scales_stride = kMax; },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score.q_scales"}}},
      {"AHeadScaleIsNaN",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.head_scales = WithTheLast(std::numeric_limits<float>::quiet_NaN()); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.head_scales[1] is nan"}},
       kReadsStarts},
      {"AHeadScaleIsInfinite",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.head_scales = WithTheLast(-std::numeric_limits<float>::infinity()); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.head_scales[1] is -inf"}},
       kReadsStarts},
      {"BiasTypeIsUnknown",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.bias = &c, c.data.score.bias_type = MHA_TYPE_INT8; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.bias_type is 3"}}},
      {"BiasTypeWithoutBias",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.bias_type = MHA_TYPE_F16; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.bias_type is 1"}}},
      {"BiasStrideWithoutBias",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.bias_head_stride = 8; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.bias_head_stride is 8"}}},
      {"MaskStrideIsNegative",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score.mask_batch_stride = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.mask_batch_stride is -1"}}},
      {"MaskRowsAreTooShort",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score.mask_row_stride = 1;
       },
       {MHA_ERROR_SHAPE, {argument}, {"score.mask_row_stride is 1"}}},
      {"BiasIsTooLarge",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.bias = &c, c.data.score.bias_head_stride = kMax; },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score.bias"}}},
      {"ColumnsAreUnknown",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.columns = 2; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.columns is 2"}}},
      {"ColumnsWithoutMaskAndBias",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.columns = MHA_COLUMNS_NEW_KEYS; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.columns"}}},
      {"NumColumnsAreNegative",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score.num_columns = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.num_columns is -1"}}},
      {"NumColumnsWithoutColumns",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.num_columns = 8; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.num_columns is 8"}}},
      {"RowsAreShorterThanNumColumns",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.mask = reinterpret_cast<uint8_t *>(&c);
         c.data.score.mask_row_stride = 99;
         c.data.score.num_columns = 100;
       },
       {MHA_ERROR_SHAPE, {argument}, {"score.mask_row_stride is 99", "100"}}},
      {"GroupsAreUnknown",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.q_groups = reinterpret_cast<int32_t *>(&c), c.data.score.groups = 2; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.groups is 2"}}},
      {"GroupsWithoutNumbers",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.groups = MHA_GROUPS_ALSO; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.groups", "score.q_groups"}}},
      {"GroupsOfKeysWithoutThoseOfQueries",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.kv_groups = reinterpret_cast<int32_t *>(&c); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.kv_groups", "score.q_groups"}}},
      {"GroupsStrideWithoutGroups",
       [](auto &c) { c.args.score = &c.data.score, c.data.score.kv_groups_stride = 8; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.kv_groups_stride is 8"}}},
      {"GroupsStrideIsNegative",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.q_groups = reinterpret_cast<int32_t *>(&c);
         c.data.score.q_groups_stride = -1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.q_groups_stride is -1"}}},
      {"GroupsStrideIsTooSmall",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.q_groups = c.data.score.kv_groups = reinterpret_cast<int32_t *>(&c);
         c.data.score.kv_groups_stride = 1;
       },
       {MHA_ERROR_SHAPE, {argument}, {"score.kv_groups_stride is 1"}}},
      {"GroupsOfQueriesStrideIsTooSmall",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.q_groups = c.data.score.kv_groups = reinterpret_cast<int32_t *>(&c);
         c.data.score.q_groups_stride = 1;
       },
       {MHA_ERROR_SHAPE, {argument}, {"score.q_groups_stride is 1"}}},
      {"GroupsAreTooMany",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.q_groups = c.data.score.kv_groups = reinterpret_cast<int32_t *>(&c);
         c.data.score.kv_groups_stride = kMax;
       },
       {MHA_ERROR_TOO_LARGE, {argument}, {"score.kv_groups"}}},
      {"GroupsOfKeysThatAreNotTheQueries",
       [](auto &c) {
         c.args.score = &c.data.score;
         c.data.score.q_groups = reinterpret_cast<int32_t *>(&c);
         c.args.n_q -= 1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"score.kv_groups is NULL"}}},
      {"CausalWithMoreQueriesThanKeysNeedsStarts",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.args.q_start = nullptr;
         c.args.n_kv = 2;
       },
       {MHA_ERROR_SHAPE, {argument}, {"n_q", "n_kv", "3", "2", "q_start"}}},
      {"CausalWithoutKeysNeedsStarts",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.args.q_start = nullptr;
         c.args.n_kv = MHA_EMPTY;
       },
       {MHA_ERROR_SHAPE, {argument}, {"n_q", "n_kv", "q_start"}}},
      {"FirstStartIsTooFarBeforeTheFirstKey",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.data.q_start[0] = -(int64_t{1} << 62) - 1;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"q_start[0]", "-2^62"}},
       kReadsStarts},
      {"LastStartIsTooFarBeforeTheFirstKey",
       [](auto &c) {
         c.args.flags = MHA_CAUSAL;
         c.data.q_start[1] = kMin;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"q_start[1]", "-2^62"}},
       kReadsStarts},
      {"PackedKeysWithoutPackedQueries",
       [](auto &c) { c.args.cu_seqlens_kv = Rows<0, 2, 4>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"cu_seqlens_kv", "without cu_seqlens_q"}}},
      {"PackedQueriesAloneWithAnotherNumberOfKeys",
       [](auto &c) { c.args.cu_seqlens_q = Rows<0, 1, 3>(); },
       {MHA_ERROR_SHAPE, {argument}, {"cu_seqlens_q", "n_kv 4", "n_q 3", "cu_seqlens_kv"}}},
      {"PackedSequencesWithQLengths",
       [](auto &c) { c.args.cu_seqlens_q = Rows<0, 1, 3>(), c.args.cu_seqlens_kv = Rows<0, 2, 4>(), c.args.q_lengths = Rows<1, 2>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"cu_seqlens_q", "q_lengths"}}},
      {"PackedSequencesWithKvLengths",
       [](auto &c) { c.args.cu_seqlens_q = Rows<0, 1, 3>(), c.args.cu_seqlens_kv = Rows<0, 2, 4>(), c.args.kv_lengths = Rows<1, 2>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"cu_seqlens_q", "kv_lengths"}}},
      {"PackedSequencesWithKvStart",
       [](auto &c) { c.args.cu_seqlens_q = Rows<0, 1, 3>(), c.args.cu_seqlens_kv = Rows<0, 2, 4>(), c.args.kv_start = Rows<1, 2>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"cu_seqlens_q", "kv_start"}}},
      {"PackedSequencesWithPaddingOnTheLeft",
       [](auto &c) {
         c.args.cu_seqlens_q = Rows<0, 1, 3>(), c.args.cu_seqlens_kv = Rows<0, 2, 4>(), c.args.flags = MHA_PADDING_LEFT;
       },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"cu_seqlens_q", "MHA_PADDING_LEFT"}}},
      {"PackedQueriesStartBeforeTheArray",
       [](auto &c) { c.args.cu_seqlens_q = Rows<-1, 1, 3>(), c.args.cu_seqlens_kv = Rows<0, 2, 4>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"cu_seqlens_q[0] is -1", "0"}},
       kReadsStarts},
      {"PackedQueriesDescend",
       [](auto &c) { c.args.cu_seqlens_q = Rows<0, 2, 1>(), c.args.cu_seqlens_kv = Rows<0, 2, 4>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"cu_seqlens_q[2] is 1", "less than 2"}},
       kReadsStarts},
      {"PackedQueriesAreMoreThanThereAre",
       [](auto &c) { c.args.cu_seqlens_q = Rows<0, 2, 4>(), c.args.cu_seqlens_kv = Rows<0, 2, 4>(); },
       {MHA_ERROR_SHAPE, {argument}, {"cu_seqlens_q[2] is 4", "n_q = 3"}},
       kReadsStarts},
      {"PackedKeysAreMoreThanThereAre",
       [](auto &c) { c.args.cu_seqlens_q = Rows<0, 2, 3>(), c.args.cu_seqlens_kv = Rows<0, 5, 4>(); },
       {MHA_ERROR_SHAPE, {argument}, {"cu_seqlens_kv[1] is 5", "n_kv = 4"}},
       kReadsStarts},
      {"APackedSequenceHasMoreQueriesThanKeys",
       [](auto &c) {
         c.args.cu_seqlens_q = Rows<0, 1, 3>(), c.args.cu_seqlens_kv = Rows<0, 3, 4>();
         c.args.flags = MHA_CAUSAL, c.args.q_start = nullptr;
       },
       {MHA_ERROR_SHAPE, {argument}, {"sequence 1", "q_start"}},
       kReadsStarts},
      {"KvStartWithPaddingOnTheLeft",
       [](auto &c) { c.args.kv_start = Rows<1, 2>(), c.args.flags = MHA_PADDING_LEFT; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"kv_start", "MHA_PADDING_LEFT"}}},
      {"KvStartIsNegative",
       [](auto &c) { c.args.kv_start = Rows<0, -1>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"kv_start[1] is -1"}},
       kReadsStarts},
      {"KvStartIsBehindTheLastRow",
       [](auto &c) { c.args.kv_start = Rows<5, 0>(); },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"kv_start[0] is 5", "0 to 4"}},
       kReadsStarts},
      {"KvStartAndLengthAreMoreThanThereAre",
       [](auto &c) { c.args.kv_start = Rows<1, 2>(), c.args.kv_lengths = Rows<3, 3>(); },
       {MHA_ERROR_SHAPE, {argument}, {"kv_start[1] is 2", "3", "4 rows"}},
       kReadsStarts},
      {"SchedulerWithoutThreads",
       [](auto &c) { c.scheduler.scheduler.num_threads = 0; },
       {MHA_ERROR_INVALID_VALUE, {argument}, {"num_threads"}}},
      {"SchedulerWithoutParallelFor",
       [](auto &c) { c.scheduler.scheduler.parallel_for = nullptr; },
       {MHA_ERROR_NULL_POINTER, {argument}, {"parallel_for"}}},
      {"SchedulerReservedIsSet", [](auto &c) { c.scheduler.scheduler.reserved = 1; }, {MHA_ERROR_INVALID_VALUE, {argument}, {"reserved"}}},
      {"TapsOfAnUnknownSize",
       [](auto &c) { c.data.taps.struct_size = sizeof(mha_taps) - 1; },
       {MHA_ERROR_STRUCT_SIZE, {argument}, {"struct_size"}}},
      {"BatchIsTooLarge", [](auto &c) { c.args.batch = kMax; }, {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"NQIsTooLarge", [](auto &c) { c.args.n_q = kMax; }, {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"NKvIsTooLarge", [](auto &c) { c.args.n_kv = kMax; }, {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"EverythingIsTooLarge", [](auto &c) { c.args.batch = c.args.n_q = c.args.n_kv = kMax; }, {MHA_ERROR_TOO_LARGE, {argument}, {}}},
      {"AttentionWeightsAreTooLarge",  // 2 * 4 heads * 2^30 * 2^30 floats
       [](auto &c) { c.args.n_q = c.args.n_kv = int64_t{1} << 30; },
       {MHA_ERROR_TOO_LARGE, {argument}, {}}},
  };
}

// Rows about each stride of an array. A head stride is given with those of rows and sequences.
template <typename Call, typename Args>
std::vector<CallCase<Call>> StrideCases(uint32_t argument, const std::string &array, int64_t Args::*batch, int64_t Args::*row,
                                        int64_t Args::*head = nullptr) {
  std::vector<CallCase<Call>> cases;
  const auto add = [&](const std::string &stride, const std::vector<int64_t Args::*> &fields) {
    for (const int64_t wrong : {int64_t{-1}, kMin + 1, kMax, kMax - 1, kMax / 2}) {
      const Expected expected = wrong > 0 ? Expected{MHA_ERROR_TOO_LARGE, {argument}, {}}
                                          : Expected{MHA_ERROR_INVALID_VALUE, {argument}, {array + "_" + stride + "_stride|" + array}};
      static std::deque<std::function<void(Call &)>> kept;
      kept.push_back([=](Call &c) {
        for (int64_t Args::*field : fields) c.args.*field = wrong > 0 || field == fields.back() ? wrong : 0;
      });
      const char *name = Kept(array + "_" + stride + "_" + std::to_string(static_cast<uint64_t>(wrong)));
      cases.push_back({name, nullptr, expected, kAllOfTheCall, &kept.back()});
    }
  };
  add("batch", {batch});
  add("row", {row});
  if (head != nullptr) add("head", {batch, row, head});
  return cases;
}

class ForwardErrors : public testing::TestWithParam<CallCase<FullForward>> {};
TEST_P(ForwardErrors, AreSentencesAndNothingIsWritten) { ExpectCallFails(GetParam()); }

const CallCase<FullForward> kForwardCases[] = {
    {"InputTypeIsUnknown", [](auto &c) { c.args.input_type = 4; }, {MHA_ERROR_INVALID_VALUE, {2}, {"input_type is 4"}}},
    {"QueryIsNull", [](auto &c) { c.args.query = nullptr; }, {MHA_ERROR_NULL_POINTER, {2}, {"query"}}, kCall},
    {"KeyIsNullButHasAnotherWidth",
     [](auto &c) {
       c.args.key = nullptr;
       c.args.n_kv = c.args.n_q;
     },
     {MHA_ERROR_SHAPE, {2}, {"key", "7", "10"}}},
    {"ValueIsNullButHasAnotherWidth", [](auto &c) { c.args.value = nullptr; }, {MHA_ERROR_SHAPE, {2}, {"value", "9", "7"}}},
    {"QueryRowStrideIsShorterThanARow",
     [](auto &c) { c.args.query_row_stride = 9; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"query_row_stride|query", "9", "10"}}},
    {"KeyRowStrideIsShorterThanARow",
     [](auto &c) { c.args.key_row_stride = 6; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"key_row_stride|key", "6", "7"}}},
    {"ValueRowStrideIsShorterThanARow",
     [](auto &c) { c.args.value_row_stride = 1; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"value_row_stride|value", "1", "9"}}},
    {"OutputRowStrideIsShorterThanARow",
     [](auto &c) { c.args.output_row_stride = 10; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_row_stride|output", "10", "11"}}},
    {"OutputRowsAreBroadcast",
     [](auto &c) { c.args.output_row_stride = MHA_BROADCAST; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_row_stride"}}},
    {"OutputSequencesAreBroadcast",
     [](auto &c) { c.args.output_batch_stride = MHA_BROADCAST; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_batch_stride"}}},
    {"QueryIsBroadcastBeyondMemory",
     [](auto &c) { c.args.query_batch_stride = kMax / 2, c.args.query_row_stride = MHA_BROADCAST; },
     {MHA_ERROR_TOO_LARGE, {2}, {"query"}}},
    {"OutputSequencesOverlap",
     [](auto &c) { c.args.output_batch_stride = 11; },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_batch_stride|output"}}},
    {"OutputSequencesOverlapByOneElement",
     [](auto &c) {
       c.args.output_row_stride = 20;
       c.args.output_batch_stride = 2 * 20 + 11 - 1;
     },
     {MHA_ERROR_INVALID_VALUE, {2}, {"output_batch_stride|output"}}},
    {"TheInputIsTwoToThe64Bytes",  // 2^61 rows of 10 floats
     [](auto &c) { c.args.n_q = int64_t{1} << 61; },
     {MHA_ERROR_TOO_LARGE, {2}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Common, ForwardErrors, testing::ValuesIn(CommonCases<FullForward>(2)), CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(Args, ForwardErrors, testing::ValuesIn(kForwardCases), CaseName<CallCase<FullForward>>);

#define MHA_FORWARD_STRIDES(array) \
  testing::ValuesIn(StrideCases<FullForward>(2, #array, &mha_forward_args::array##_batch_stride, &mha_forward_args::array##_row_stride))
INSTANTIATE_TEST_SUITE_P(QueryStrides, ForwardErrors, MHA_FORWARD_STRIDES(query), CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(KeyStrides, ForwardErrors, MHA_FORWARD_STRIDES(key), CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(ValueStrides, ForwardErrors, MHA_FORWARD_STRIDES(value), CaseName<CallCase<FullForward>>);
INSTANTIATE_TEST_SUITE_P(OutputStrides, ForwardErrors, MHA_FORWARD_STRIDES(output), CaseName<CallCase<FullForward>>);

TEST(ForwardCalls, SucceedBeforeTheyAreBroken) {
  ExpectCallSucceeds<FullForward>([](auto &) {});
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.flags = MHA_CAUSAL; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.scheduler = nullptr; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.q_start = nullptr; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.n_kv = MHA_EMPTY; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.batch = MHA_EMPTY; });
  ExpectCallSucceeds<FullForward>([](auto &c) { c.args.n_q = MHA_EMPTY; });
  // All strides spelled out, as they would be if they were 0.
  ExpectCallSucceeds<FullForward>([](auto &c) {
    c.args.query_row_stride = 10;
    c.args.query_batch_stride = 3 * 10;
    c.args.key_row_stride = 7;
    c.args.key_batch_stride = 4 * 7;
    c.args.value_row_stride = 9;
    c.args.value_batch_stride = 4 * 9;
    c.args.output_row_stride = 11;
    c.args.output_batch_stride = 3 * 11;
  });
  // Sequences of the input may overlap each other.
  ExpectCallSucceeds<FullForward>([](auto &c) {
    c.args.query_row_stride = 10;
    c.args.query_batch_stride = 10;
  });
}

TEST(ForwardCalls, WithSgemmHaveRowStridesOf31Bits) {
  const LayerProblem problem = SmallLayer();
  const mha_layer_options options = Options(MHA_INSTRUCTION_SET_AUTO, PlainSgemm);
  const Layer layer = Create(LayerData(problem), &options);
  ForwardData data(layer.get(), problem, {Guarded()});
  data.args.n_q = data.args.batch = 1;
  data.args.q_start = nullptr;
  Memory workspace(1 << 20);
  for (int64_t mha_forward_args::*stride : {&mha_forward_args::query_row_stride, &mha_forward_args::value_row_stride}) {
    data.args.*stride = int64_t{1} << 31;
    ExpectFails([&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); },
                {MHA_ERROR_TOO_LARGE, {2}, {"2147483648", "2147483647"}});
    EXPECT_TRUE(data.OutputsAreUntouched());
    data.args.*stride = 0;
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
    ExpectFails([&](mha_error *error) { return data.Run(workspace.data(), workspace.size(), error); }, expected);
    EXPECT_TRUE(data.OutputsAreUntouched());
  }
}

TEST(ForwardCalls, WriteNothingWhereThereIsNothingToDo) {
  const LayerProblem problem = SmallLayer();
  const Layer layer = Create(LayerData(problem));
  for (bool empty_batch : {true, false}) {
    ForwardData data(layer.get(), problem, {Guarded(kAskAll & ~(kAskK | kAskV))});  // these two depend on the keys, of which there are some
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
  ExpectFails([&](mha_error *error) { return mha_forward_workspace(nullptr, &call.args, &bytes, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_forward_workspace(layer, nullptr, &bytes, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails([&](mha_error *error) { return mha_forward_workspace(layer, &call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"bytes"}});
  EXPECT_EQ(bytes, 4711u);
  ExpectFails([&](mha_error *error) { return mha_info(nullptr, &call.args, &info, error); }, {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_info(layer, nullptr, &info, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails([&](mha_error *error) { return mha_info(layer, &call.args, nullptr, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"info|mha_call_info"}});
  ExpectFails([&](mha_error *error) { return mha_forward(nullptr, &call.args, workspace.data(), needed, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"layer"}});
  ExpectFails([&](mha_error *error) { return mha_forward(layer, nullptr, workspace.data(), needed, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"args|mha_forward_args"}});
  ExpectFails([&](mha_error *error) { return mha_forward(layer, &call.args, nullptr, needed + 64, error); },
              {MHA_ERROR_NULL_POINTER, {3}, {"workspace"}});
  EXPECT_TRUE(call.data.OutputsAreUntouched());
}

class AttentionErrors : public testing::TestWithParam<CallCase<FullAttention>> {};
TEST_P(AttentionErrors, AreSentencesAndNothingIsWritten) { ExpectCallFails(GetParam()); }

const CallCase<FullAttention> kAttentionCases[] = {
    {"NormOfTheContextWithoutWO",
     [](auto &c) { c.args.norm = &c.data.norm, c.data.norm.context_epsilon = 1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"norm.context_epsilon is 1", "W_O"}}},
    {"NumHeadsIsZero", [](auto &c) { c.args.num_heads = 0; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumHeadsIsNegative", [](auto &c) { c.args.num_heads = -4; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_heads"}}},
    {"NumKvHeadsIsNegative", [](auto &c) { c.args.num_kv_heads = -1; }, {MHA_ERROR_INVALID_VALUE, {1}, {"num_kv_heads"}}},
    {"HeadDimIsZero", [](auto &c) { c.args.head_dim = 0; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimIsNegative", [](auto &c) { c.args.head_dim = -3; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim"}}},
    {"HeadDimVIsNegative", [](auto &c) { c.args.head_dim_v = -5; }, {MHA_ERROR_INVALID_VALUE, {1}, {"head_dim_v"}}},
    {"NumKvHeadsDoesNotDivide", [](auto &c) { c.args.num_kv_heads = 3; }, {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "3", "4"}}},
    {"MoreKvHeadsThanHeads", [](auto &c) { c.args.num_kv_heads = 8; }, {MHA_ERROR_SHAPE, {1}, {"num_kv_heads", "8", "4"}}},
    {"QIsNull", [](auto &c) { c.args.q = nullptr; }, {MHA_ERROR_NULL_POINTER, {1}, {"q"}}, kCall},
    {"KIsNull", [](auto &c) { c.args.k = nullptr; }, {MHA_ERROR_NULL_POINTER, {1}, {"k"}}, kCall},
    {"VIsNull", [](auto &c) { c.args.v = nullptr; }, {MHA_ERROR_NULL_POINTER, {1}, {"v"}}, kCall},
    {"QTypeIsUnknown", [](auto &c) { c.args.q_type = MHA_TYPE_INT8; }, {MHA_ERROR_INVALID_VALUE, {1}, {"q_type is 3"}}},
    {"KTypeIsUnknown", [](auto &c) { c.args.k_type = 3; }, {MHA_ERROR_INVALID_VALUE, {1}, {"k_type"}}},
    {"VTypeIsUnknown", [](auto &c) { c.args.v_type = 0x80000000u; }, {MHA_ERROR_INVALID_VALUE, {1}, {"v_type"}}},
    {"QRowStrideIsShorterThanARow",
     [](auto &c) { c.args.q_row_stride = 2; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"q_row_stride|q", "2", "3"}}},
    {"KRowStrideIsShorterThanARow",
     [](auto &c) { c.args.k_row_stride = 1; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"k_row_stride|k", "1", "3"}}},
    {"KHeadsOverlap",
     [](auto &c) { c.args.k_head_stride = 2, c.args.k_row_stride = 6, c.args.k_batch_stride = 600; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"k_head_stride is 2", "3"}}},
    {"VRowStrideIsShorterThanARow",
     [](auto &c) { c.args.v_row_stride = 4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"v_row_stride|v", "4", "5"}}},
    {"OutputRowStrideIsShorterThanARow",
     [](auto &c) {
       c.args.output_row_stride = 4;
       c.args.output_head_stride = 15;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_row_stride|output"}}},
    {"OutputHeadStrideIsShorterThanARow",
     [](auto &c) { c.args.output_head_stride = 4; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"output_head_stride|output"}}},
    {"OutputHeadsOverlapRows",  // row 1 of head 0 is row 0 of head 1
     [](auto &c) { c.args.output_row_stride = 5; },
     {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"OutputHeadsOverlapRowsByOneElement",  // [batch, heads, n, width] with heads that are one element too close
     [](auto &c) {
       c.args.output_row_stride = 5;
       c.args.output_head_stride = 14;
       c.args.output_batch_stride = 60;
     },
     {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"OutputSequencesOverlap", [](auto &c) { c.args.output_batch_stride = 59; }, {MHA_ERROR_INVALID_VALUE, {1}, {}}},
    {"ScaleIsNan", [](auto &c) { c.args.scale = kNan; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsInfinite", [](auto &c) { c.args.scale = kInfinity; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"ScaleIsMinusInfinity", [](auto &c) { c.args.scale = -kInfinity; }, {MHA_ERROR_INVALID_VALUE, {1}, {"scale"}}},
    {"TapQ",
     [](auto &c) { c.data.taps.q = c.data.taps.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"taps", "q"}}},
    {"TapK",
     [](auto &c) { c.data.taps.k = c.data.taps.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"taps", "k"}}},
    {"TapV",
     [](auto &c) { c.data.taps.v = c.data.taps.context; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"taps", "v"}}},
    {"UnknownInstructionSet",
     [](auto &c) { c.args.instruction_set = 9; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set", "9"}}},
    {"InstructionSet32", [](auto &c) { c.args.instruction_set = 32; }, {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set", "32"}}},
    {"InstructionSetWithAllBits",
     [](auto &c) { c.args.instruction_set = 0xFFFFFFFFu; },
     {MHA_ERROR_INVALID_VALUE, {1}, {"instruction_set"}}},
    {"AbsentInstructionSet",
     [](auto &c) { c.args.instruction_set = AbsentInstructionSet(); },
     {MHA_ERROR_INSTRUCTION_SET, {1}, {mha_instruction_set_name(AbsentInstructionSet())}}},
    {"NumHeadsIsTooLarge", [](auto &c) { c.args.num_heads = c.args.num_kv_heads = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimIsTooLarge", [](auto &c) { c.args.head_dim = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimVIsTooLarge", [](auto &c) { c.args.head_dim_v = kMax; }, {MHA_ERROR_TOO_LARGE, {1}, {}}},
    {"HeadDimVOfAllHeadsIsTooLarge",
     [](auto &c) { c.args.head_dim_v = int64_t{1} << 29; },
     {MHA_ERROR_TOO_LARGE, {1}, {"num_heads 4 * head_dim (or * head_dim_v)"}}},
    {"AllOfTheShapeIsTooLarge",
     [](auto &c) {
       c.args.batch = c.args.n_q = c.args.n_kv = c.args.num_heads = c.args.num_kv_heads = c.args.head_dim = c.args.head_dim_v = kMax;
     },
     {MHA_ERROR_TOO_LARGE, {1}, {}}},
};
INSTANTIATE_TEST_SUITE_P(Common, AttentionErrors, testing::ValuesIn(CommonCases<FullAttention>(1)), CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(Args, AttentionErrors, testing::ValuesIn(kAttentionCases), CaseName<CallCase<FullAttention>>);

#define MHA_ATTENTION_STRIDES(array)                                                                 \
  testing::ValuesIn(StrideCases<FullAttention>(1, #array, &mha_attention_args::array##_batch_stride, \
                                               &mha_attention_args::array##_row_stride, &mha_attention_args::array##_head_stride))
INSTANTIATE_TEST_SUITE_P(QStrides, AttentionErrors, MHA_ATTENTION_STRIDES(q), CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(KStrides, AttentionErrors, MHA_ATTENTION_STRIDES(k), CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(VStrides, AttentionErrors, MHA_ATTENTION_STRIDES(v), CaseName<CallCase<FullAttention>>);
INSTANTIATE_TEST_SUITE_P(OutputStrides, AttentionErrors, MHA_ATTENTION_STRIDES(output), CaseName<CallCase<FullAttention>>);

TEST(AttentionCalls, SucceedBeforeTheyAreBroken) {
  ExpectCallSucceeds<FullAttention>([](auto &) {});
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.flags = MHA_CAUSAL; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.scheduler = nullptr; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.q_start = nullptr; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.n_kv = MHA_EMPTY; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.batch = MHA_EMPTY; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.n_q = MHA_EMPTY; });
  ExpectCallSucceeds<FullAttention>([](auto &c) { c.args.scale = -0.5f; });
  // All strides spelled out, as they would be if they were 0.
  ExpectCallSucceeds<FullAttention>([](auto &c) {
    c.args.q_head_stride = 3;
    c.args.q_row_stride = 12;
    c.args.q_batch_stride = 36;
    c.args.k_head_stride = 3;
    c.args.k_row_stride = 6;
    c.args.k_batch_stride = 24;
    c.args.v_head_stride = 5;
    c.args.v_row_stride = 10;
    c.args.v_batch_stride = 40;
    c.args.output_head_stride = 5;
    c.args.output_row_stride = 20;
    c.args.output_batch_stride = 60;
  });
}

TEST(AttentionCalls, AcceptEveryNestingOfBatchRowsAndHeads) {
  for (const Layout &layout : {kHeadsOutside, kRowsOutside, kGaps}) {
    AttentionData(NormalAttention(SmallSizes()), {Guarded(), MHA_INSTRUCTION_SET_AUTO, layout, layout, layout, layout}).Compute();
  }
  // There is nothing to step over in a batch of one.
  AttentionSizes one = SmallSizes();
  one.batch = 1;
  AttentionData data(NormalAttention(one), {Guarded(), MHA_INSTRUCTION_SET_AUTO, {}, {}, {}, kHeadsOutside});
  data.args.output_batch_stride = 1;
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
  ExpectFails([&](mha_error *error) { return mha_attention(nullptr, workspace.data(), needed, error); },
              {MHA_ERROR_NULL_POINTER, {1}, {"args|mha_attention_args"}});
  ExpectFails([&](mha_error *error) { return mha_attention(&call.args, nullptr, needed + 64, error); },
              {MHA_ERROR_NULL_POINTER, {2}, {"workspace"}});
  EXPECT_TRUE(call.data.OutputsAreUntouched());
}

// ---- Workspace ---------------------------------------------------------------------------------------------------------------------

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

TEST(Workspace, OfForwardIsRejectedIfItIsSmaller) { ExpectEverySmallerWorkspaceFails<FullForward>(3); }
TEST(Workspace, OfAttentionIsRejectedIfItIsSmaller) { ExpectEverySmallerWorkspaceFails<FullAttention>(2); }

// ---- Time --------------------------------------------------------------------------------------------------------------------------

// However many sequences there are said to be, a call without its workspace ends, and so does a description without arrays to be read.
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
    call.args.q_start = nullptr;
    call.args.lse = call.args.attention_weights = nullptr;
    call.args.taps = nullptr;
    call.args.rope = &rope;
    mha_call_info info = Zeroed<mha_call_info>();
    ExpectSucceeds([&](mha_error *error) { return call.data.Info(&info, error); });
    ExpectFails([&](mha_error *error) { return call.data.Run(nullptr, info.workspace_bytes, error); },
                {MHA_ERROR_NULL_POINTER, {workspace_argument}, {"workspace"}});
    // Nor are arrays read before there is a workspace; these have fewer elements than are said.
    rope.q_positions = call.args.q_start = call.args.q_lengths = positions.data();
    size_t bytes = 0;
    ExpectSucceeds([&](mha_error *error) { return call.data.Workspace(&bytes, error); });
    ExpectFails([&](mha_error *error) { return call.data.Run(nullptr, bytes, error); },
                {MHA_ERROR_NULL_POINTER, {workspace_argument}, {"workspace"}});
    rope.q_positions = nullptr;
  }
}

TEST(Time, OfForwardErrorsDoesNotGrowWithTheBatch) { ExpectAnswersForAnyBatch<FullForward>(3); }
TEST(Time, OfAttentionErrorsDoesNotGrowWithTheBatch) { ExpectAnswersForAnyBatch<FullAttention>(2); }

}  // namespace
