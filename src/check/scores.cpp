// mha_score_options and mha_score_arrays become a ScoreOptions for the kernels in two steps.
// check_score_options does all that needs no array; resolve_score_strides fills in strides that
// depend on lengths in a cache. Fields of mha_score_options reach the kernels as they are, and
// fields.cpp checks their numbers; a new one of mha_score_arrays is a field of ScoreOptions and an
// assignment here. Either has a function in kernels/score_options.h.

#include "scores.h"

#include <algorithm>

#include "../base/structs.h"
#include "../storage.h"
#include "arrays.h"
#include "rules.h"

namespace mha {
namespace {

// How messages call an array with a number for each pair of row and key, and its strides.
struct PairName {
  const char *name, *strides_name;
};
constexpr PairName bias_name = {"score_arrays.bias", ".strides"},
                   mask_name = {"score_arrays.mask", "_strides"},
                   relative_rows_name = {"score_arrays.relative_rows", "_strides"},
                   chosen_keys_name = {"score_arrays.chosen_keys", "_strides"};

PairArray pair_array(const void *base, Storage storage, const mha_strides &strides) {
  return {base, storage, strides.batch, strides.head, strides.row};
}

// Resolves the strides of an array, [batch, heads, rows, columns], if it is there.
mha_status resolve_strides(Report report, const SequenceArguments &s, const PairName &name,
                           int64_t num_heads, int64_t columns, PairArray *array) {
  const mha_strides strides = {array->batch_stride, array->row_stride, array->head_stride};
  if (!array->base) {
    if (is_contiguous(strides)) return MHA_OK;
    return report.invalid("%s%s are set, but the array is NULL; set them to 0", name.name,
                          name.strides_name);
  }
  Array whole = pair_array_of(name.name, name.strides_name, strides, s.array_batch, num_heads,
                              s.n_q, columns);
  MHA_TRY(resolve_input(report, &whole));
  array->batch_stride = whole.strides[0];
  array->row_stride = whole.strides[1];
  array->head_stride = whole.strides[2];
  return MHA_OK;
}

// Checks strides for the most columns that there can be, without resolving them.
mha_status check_strides(Report report, const SequenceArguments &s, const PairName &name,
                         int64_t num_heads, int64_t columns, PairArray array) {
  return resolve_strides(report, s, name, num_heads, columns, &array);
}

// mask or bias. The columns of a cache are known only with the lengths in it; until then a row may
// have none, or as many as it has room for.
mha_status check_pair_array(Report report, const SequenceArguments &s, const PairName &name,
                            int64_t num_heads, const PairArray &array) {
  const bool are_known = s.scored.num_columns != INT64_MAX || !s.cache || s.scored.has_new_columns;
  const int64_t columns = s.scored.columns_or(are_known ? s.n_kv : 0);
  MHA_TRY(check_strides(report, s, name, num_heads, columns, array));
  const bool is_contiguous = (array.batch_stride | array.head_stride | array.row_stride) == 0;
  return are_known || !is_contiguous
             ? MHA_OK
             : check_strides(report, s, name, num_heads, max_keys(s), array);
}

// Mask, bias and segments have a column for each key: for all keys from the first one on, or only
// for the keys that come with the call. num_columns limits them, and a ring allows only the latter,
// because it forgets positions.
mha_status check_columns(Report report, const SequenceArguments &s,
                         const mha_score_arrays &arrays) {
  const bool has_pairs = arrays.mask || arrays.bias.data,
             has_columns = has_pairs || arrays.q_segments;
  if (arrays.column_keys == MHA_COLUMNS_NEW_KEYS && (!has_columns || s.only_reads()))
    return report.invalid(
        "score_arrays.column_keys is MHA_COLUMNS_NEW_KEYS, but there is no %s; set it to "
        "MHA_COLUMNS_ALL_KEYS",
        has_columns ? "new key with cache_read" : "mask, bias or q_segments");
  const Rules rules = {report, "score_arrays."};
  if (!has_columns)
    MHA_TRY(
        rules.needs({"mask, bias or q_segments", nullptr}, {{"num_columns", arrays.num_columns}}));
  MHA_TRY(rules.fits("num_columns", Count(arrays.num_columns)));
  if (arrays.column_keys == MHA_COLUMNS_ALL_KEYS && has_pairs && s.is_ring())
    return report.invalid(
        "score_arrays.%s has a column for each position, but the cache is a ring; set column_keys "
        "to MHA_COLUMNS_NEW_KEYS",
        arrays.mask ? "mask" : "bias.data");
  return MHA_OK;
}

// Segments limit a row to the keys of its own segment, or add these keys to what flags leave.
mha_status check_segments(Report report, const SequenceArguments &s,
                          const mha_score_arrays &arrays) {
  const Rules rules = {report, "score_arrays."};
  MHA_TRY(rules.needs({"q_segments", arrays.q_segments},
                      {{"kv_segments", arrays.kv_segments}, {"segments", arrays.segments}}));
  if (!arrays.q_segments) return MHA_OK;
  if (s.is_ring())
    return report.invalid(
        "score_arrays.q_segments is given, but the cache is a ring; use another kind of cache");
  const Count columns(s.scored.columns_or(max_keys(s)));
  if (arrays.kv_segments)
    return rules.fits("kv_segments", Count(s.array_batch) * columns * Count(sizeof(int32_t)));
  // Without kv_segments the segments of the rows serve as those of the columns, which must be the
  // same rows then.
  const bool are_rows_of_query = s.n_kv == s.n_q && (!s.cache || s.scored.has_new_columns);
  if (are_rows_of_query || (s.n_kv == 0 && !s.cache)) return MHA_OK;
  return report.invalid(
      "score_arrays.kv_segments is NULL, but the columns are not the rows of query; give the "
      "segments of the keys");
}

// Biases by the distance of a key from the query, from relative_left before it to relative_right
// after it. A table is the same for all sequences and rows, so both strides become 0.
mha_status check_relative_biases(Report report, const SequenceArguments &s,
                                 const mha_score_options &options, const mha_score_arrays &arrays,
                                 int64_t num_heads, PairArray *array) {
  // A table has one row of numbers for each head; arrays have one for each head and row.
  const bool is_table = options.relative_bias != nullptr;
  *array = pair_array(arrays.relative_rows, Storage::f32, arrays.relative_rows_strides);
  if (is_table && array->base)
    return report.invalid(
        "score.relative_bias and score_arrays.relative_rows are both given; add the first to each "
        "row of the second, and set it to NULL");
  const Rules rules = {report, is_table ? "score." : "score_arrays."};
  if (!is_table && !array->base)
    MHA_TRY(Rules{report}.needs({"score.relative_bias or score_arrays.relative_rows", nullptr},
                                {{"score.relative_left", options.relative_left},
                                 {"score.relative_right", options.relative_right}}));
  const Count distances = Count(options.relative_left) + Count(options.relative_right) + Count(1);
  MHA_TRY(rules.fits(is_table ? "relative_bias" : "relative_rows", distances));
  MHA_TRY(resolve_strides(report, s, relative_rows_name, num_heads, distances.value(), array));
  if (!is_table) return MHA_OK;
  MHA_TRY(rules.fits("relative_bias", Count(num_heads) * distances * Count(sizeof(float))));
  *array = {options.relative_bias, Storage::f32, 0, distances.value(), 0};
  return MHA_OK;
}

// Lists of chosen keys, and the number of keys that an entry stands for.
mha_status check_chosen_keys(Report report, const SequenceArguments &s,
                             const mha_score_arrays &arrays, int64_t num_kv_heads,
                             ChosenKeys *chosen) {
  *chosen = {pair_array(arrays.chosen_keys, Storage::f32, arrays.chosen_keys_strides),
             arrays.num_chosen, arrays.chosen_block != 0 ? arrays.chosen_block : 1};
  const Rules rules = {report, "score_arrays."};
  const Given num_chosen = {"num_chosen", arrays.num_chosen},
              chosen_keys = {"chosen_keys", arrays.chosen_keys};
  MHA_TRY(rules.needs(chosen_keys, {num_chosen, {"chosen_block", arrays.chosen_block}}));
  MHA_TRY(rules.needs(num_chosen, {chosen_keys}));
  if (!arrays.chosen_keys)
    return resolve_strides(report, s, chosen_keys_name, 0, 0, &chosen->lists);
  if (arrays.q_segments)
    return report.invalid(
        "score_arrays.chosen_keys and q_segments are both given; leave one out, and choose only "
        "keys of the row's segment");
  return resolve_strides(report, s, chosen_keys_name, num_kv_heads, arrays.num_chosen,
                         &chosen->lists);
}

// Whether the options of the model change scores: all of them do but sinks, which act on the sum,
// and head_scales, which act on the context.
bool changes_scores(mha_score_options options) {
  options.struct_size = 0;
  options.sinks = options.head_scales = nullptr;
  constexpr mha_score_options none = {};
  return memcmp(&options, &none, sizeof none) != 0;
}

}  // namespace

mha_status check_score_options(Report report, const GivenScore &given, int64_t num_heads,
                               int64_t num_kv_heads, const SequenceArguments &s, ScoredKeys *scored,
                               ScoreOptions *options) {
  *options = {};
  if (!given.options && !given.arrays) return MHA_OK;
  mha_score_options o = {};
  mha_score_arrays a = {};
  if (given.options) MHA_TRY(read_struct(report, "mha_score_options", given.options, &o));
  if (given.arrays) MHA_TRY(read_struct(report, "mha_score_arrays", given.arrays, &a));
  if (a.relative_rows && !given.options)
    return report.invalid(
        "score_arrays.relative_rows is given, but score, whose relative_left and relative_right "
        "are its width, is NULL; give score");
  MHA_TRY(check_fields(Rules{report, "score."}, o));
  MHA_TRY(check_fields(Rules{report, "score_arrays."}, a));
  MHA_TRY(check_row_fields(report, "score_arrays.bias", a.bias));
  if (a.bias.type == MHA_TYPE_BF16)
    return report.invalid(
        "score_arrays.bias.type is MHA_TYPE_BF16; it must be MHA_TYPE_F32 or MHA_TYPE_F16");
  if (!a.bias.data && a.bias.type != 0)
    return report.invalid(
        "score_arrays.bias.type is %u, but bias.data is NULL; give the bias, or set the type to 0",
        a.bias.type);
  MHA_TRY(check_columns(report, s, a));
  MHA_TRY(check_relative_biases(report, s, o, a, num_heads, &options->relative));
  MHA_TRY(check_chosen_keys(report, s, a, num_kv_heads, &options->chosen));
  // Everything was checked that stands alone; now it becomes what the kernels read.
  static_cast<mha_score_options &>(*options) = o;
  options->softcap_inverse = o.softcap != 0.0f ? 1.0f / o.softcap : 0.0f;
  options->bias = pair_array(a.bias.data, storage_of_type(a.bias.type), a.bias.strides);
  options->mask = pair_array(a.mask, Storage::int8, a.mask_strides);
  const Window window = window_of(s);
  options->segments = {a.q_segments,
                       a.kv_segments ? a.kv_segments : a.q_segments,
                       s.n_q,
                       a.kv_segments ? 0 : s.n_q,
                       a.segments == MHA_SEGMENTS_ALSO,
                       window.left,
                       window.right};
  options->limits_pairs = a.mask || a.q_segments || a.bias.data;
  options->change_scores = changes_scores(o) || options->relative.base || a.bias.data;
  options->q_scales = a.q_scales;
  options->q_scales_stride = s.n_q;
  const char *const distances = o.alibi_slopes           ? "ALiBi"
                                : options->relative.base ? "a relative bias"
                                                         : nullptr;
  *scored = {distances, a.segments == MHA_SEGMENTS_ALSO, a.column_keys == MHA_COLUMNS_NEW_KEYS,
             a.num_columns != 0 ? a.num_columns : INT64_MAX};
  MHA_TRY(check_segments(report, s, a));
  MHA_TRY(check_pair_array(report, s, bias_name, num_heads, options->bias));
  return check_pair_array(report, s, mask_name, num_heads, options->mask);
}

mha_status resolve_score_strides(Report report, const SequenceArguments &s, int64_t num_heads,
                                 ScoreOptions *options) {
  // Strides of 0 stand for contiguous rows, whose width is known by now: the arrays with lengths
  // have been checked.
  PositionSegments &segments = options->segments;
  if (!options->bias.base && !options->mask.base && !segments.of_rows) return MHA_OK;
  const int64_t columns = s.scored.columns_or(s.scored.has_new_columns ? s.n_kv : pair_columns(s));
  if (segments.column_stride == 0) segments.column_stride = columns;
  MHA_TRY(resolve_strides(report, s, bias_name, num_heads, columns, &options->bias));
  return resolve_strides(report, s, mask_name, num_heads, columns, &options->mask);
}

}  // namespace mha
