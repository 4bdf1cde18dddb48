// Reading and checking mha_score_options, what they add to the cost of a call, and the slopes of ALiBi.

#include "score_options.h"

#include "binary64.h"
#include "storage.h"
#include "structs.h"

#include <algorithm>

namespace mha {
namespace {

bool is_finite(float x) { return x - x == 0.0f; }

// The stride from one row of columns to the next. Without num_columns, those of a cache are counted later (check_sequence_arrays).
mha_status check_row(Report report, const SequenceArguments &s, const char *name, const char *stride_name, int64_t stride) {
  const bool is_counted = s.num_columns != INT64_MAX;
  const int64_t columns = is_counted ? s.num_columns : s.cache ? 0 : s.n_kv;
  if (stride == 0 || stride == MHA_BROADCAST || stride >= columns) return MHA_OK;
  return report.fail(MHA_ERROR_SHAPE, "score.%s_%s is %lld, but there are %lld %s; a row has %s", name, stride_name, lld(stride),
                     lld(columns), is_counted ? "score.num_columns" : "keys", is_counted ? "so many columns" : "a column for each");
}

// 0 = contiguous. What is MHA_BROADCAST is in memory once, and no step from then on.
void resolve_strides(int64_t columns, int64_t n_q, int64_t num_heads, PairArray *array) {
  Count inner(columns);
  const auto resolve = [&inner](int64_t *stride, int64_t extent) {
    if (*stride == MHA_BROADCAST) {
      *stride = 0;
      return;
    }
    if (*stride == 0) *stride = inner.overflows() ? INT64_MAX : inner.value();
    inner = Count(extent) * Count(*stride);
  };
  resolve(&array->row_stride, n_q);
  resolve(&array->head_stride, num_heads);
  resolve(&array->batch_stride, 1);
}

void resolve_stride(int64_t columns, int64_t *stride) {
  if (*stride == 0) *stride = columns;
  if (*stride == MHA_BROADCAST) *stride = 0;
}

mha_status fail_stride(Report report, const char *name, const char *stride_name, int64_t stride) {
  return report.invalid(
      "score.%s_%s is %lld; set it to 0 for contiguous, to more for what is not, or to MHA_BROADCAST for the same for all", name,
      stride_name, lld(stride));
}

mha_status fail_size(Report report, const char *name) {
  return report.fail(MHA_ERROR_TOO_LARGE, "score.%s would be larger than memory can be", name);
}

// Strides that mean something, of an array that is there.
mha_status check_array_strides(Report report, const char *name, const PairArray &array) {
  const long long strides[] = {array.batch_stride, array.head_stride, array.row_stride};
  const char *const of[] = {"batch_stride", "head_stride", "row_stride"};
  for (int i = 0; i < 3; ++i) {
    if (!array.base && strides[i] != 0)
      return report.invalid("score.%s_%s is %lld, but score.%s is NULL; give it, or leave it 0", name, of[i], strides[i], name);
    if (strides[i] < 0 && strides[i] != MHA_BROADCAST) return fail_stride(report, name, of[i], strides[i]);
  }
  return MHA_OK;
}

mha_status check_array_size(Report report, const SequenceArguments &s, const char *name, PairArray array, int64_t num_heads,
                            int64_t columns) {
  resolve_strides(columns, s.n_q, num_heads, &array);
  const auto reach = [](int64_t count, int64_t stride) { return Count(count > 0 ? count - 1 : 0) * Count(stride); };
  const Count elements = reach(s.array_batch(), array.batch_stride) + reach(num_heads, array.head_stride) + reach(s.n_q, array.row_stride) +
                         Count(columns);
  if ((elements * Count(sizeof(float))).overflows()) return fail_size(report, name);
  return MHA_OK;
}

mha_status check_pair_array(Report report, const SequenceArguments &s, const char *name, const PairArray &array, int64_t num_heads) {
  if (const mha_status status = check_array_strides(report, name, array)) return status;
  if (!array.base) return MHA_OK;
  if (const mha_status status = check_row(report, s, name, "row_stride", array.row_stride)) return status;
  return check_array_size(report, s, name, array, num_heads, std::min(max_keys(s), s.num_columns));
}

mha_status check_columns(Report report, const SequenceArguments &s, const mha_score_options &options) {
  if (options.columns > MHA_COLUMNS_NEW_KEYS) return report.invalid("score.columns is %u, which is no MHA_COLUMNS_*", options.columns);
  const bool has_pairs = options.mask || options.bias, has_columns = has_pairs || options.q_groups;
  if (options.columns == MHA_COLUMNS_NEW_KEYS && (!has_columns || (s.flags & MHA_CACHE_READ))) {
    return report.invalid("score.columns is MHA_COLUMNS_NEW_KEYS, but there is no %s; leave it 0",
                          has_columns ? "new key with MHA_CACHE_READ" : "score.mask, score.bias or score.q_groups");
  }
  if (options.num_columns < 0 || (options.num_columns > 0 && !has_columns)) {
    return report.invalid("score.num_columns is %lld; %s", lld(options.num_columns),
                          has_columns ? "it can't be negative" : "leave it 0 without score.mask, score.bias and score.q_groups");
  }
  if (options.columns == MHA_COLUMNS_ALL_KEYS && has_pairs && s.is_ring()) {
    return report.invalid("score.%s has a column for each position, of which a ring has no end; set score.columns to MHA_COLUMNS_NEW_KEYS",
                          options.mask ? "mask" : "bias");
  }
  return MHA_OK;
}

mha_status check_groups(Report report, const SequenceArguments &s, const mha_score_options &options) {
  const struct {
    const char *name;
    const int32_t *numbers;
    int64_t stride;
  } arrays[] = {{"q_groups", options.q_groups, options.q_groups_stride}, {"kv_groups", options.kv_groups, options.kv_groups_stride}};
  for (const auto &array : arrays) {
    if (array.stride < 0 && array.stride != MHA_BROADCAST) return fail_stride(report, array.name, "stride", array.stride);
    if (!array.numbers && array.stride != 0) {
      return report.invalid("score.%s_stride is %lld, but score.%s is NULL; give it, or leave it 0", array.name, lld(array.stride),
                            array.name);
    }
    if (array.stride > 0 && (Count(s.array_batch()) * Count(array.stride) * Count(sizeof(int32_t))).overflows())
      return fail_size(report, array.name);
  }
  if (!options.q_groups) {
    if (!options.kv_groups && options.groups == 0) return MHA_OK;
    return report.invalid("score.%s is given without score.q_groups; give it, or leave both out",
                          options.kv_groups ? "kv_groups" : "groups");
  }
  if (options.groups > MHA_GROUPS_ALSO) return report.invalid("score.groups is %u, which is no MHA_GROUPS_*", options.groups);
  if (s.is_ring()) return report.invalid("a ring takes no score.q_groups; use a cache of another kind");
  if (options.q_groups_stride > 0 && options.q_groups_stride < s.n_q) {
    return report.fail(MHA_ERROR_SHAPE, "score.q_groups_stride is %lld, but there are %lld queries; each has a number",
                       lld(options.q_groups_stride), lld(s.n_q));
  }
  if (options.kv_groups) return check_row(report, s, "kv_groups", "stride", options.kv_groups_stride);
  const bool are_rows_of_query = s.n_kv == s.n_q && !(s.flags & MHA_CACHE_READ) && (!s.cache || s.has_new_columns);
  if (are_rows_of_query || (s.n_kv == 0 && !s.cache)) return MHA_OK;
  return report.invalid("score.kv_groups is NULL, but the columns are not the rows of query; give the numbers of the keys");
}

// Relative biases, *array: those of a table are the same for all sequences and rows.
mha_status check_relative_biases(Report report, const SequenceArguments &s, const mha_score_options &options, int64_t num_heads,
                                 PairArray *array) {
  const bool is_table = options.relative_bias != nullptr;
  *array = {options.relative_rows, Storage::f32, options.relative_rows_batch_stride, options.relative_rows_head_stride,
            options.relative_rows_row_stride};
  if (is_table && array->base)
    return report.invalid("score.relative_bias and score.relative_rows are both given; add the first to each row of the second");
  if (const mha_status status = check_array_strides(report, "relative_rows", *array)) return status;
  if (is_table) *array = {options.relative_bias, Storage::f32, MHA_BROADCAST, 0, MHA_BROADCAST};
  const struct {
    const char *name;
    int64_t value;
  } reaches[] = {{"left", options.relative_left}, {"right", options.relative_right}};
  for (const auto &reach : reaches) {
    if (reach.value < 0 || (!array->base && reach.value != 0)) {
      return report.invalid("score.relative_%s is %lld; it can't be negative, and without relative_bias or relative_rows it is 0",
                            reach.name, lld(reach.value));
    }
  }
  if (!array->base) return MHA_OK;
  const char *const name = is_table ? "relative_bias" : "relative_rows";
  const Count distances = Count(options.relative_left) + Count(options.relative_right) + Count(1);
  if (distances.overflows()) return fail_size(report, name);
  if (array->row_stride > 0 && array->row_stride < distances.value()) {
    return report.fail(MHA_ERROR_SHAPE, "score.relative_rows_row_stride is %lld, but there are %lld distances; a row has a number for each",
                       lld(array->row_stride), lld(distances.value()));
  }
  return check_array_size(report, s, name, *array, num_heads, distances.value());
}

mha_status check_q_scales(Report report, const SequenceArguments &s, const mha_score_options &options) {
  int64_t stride = options.q_scales_stride;
  if (!options.q_scales && stride != 0)
    return report.invalid("score.q_scales_stride is %lld, but score.q_scales is NULL; give it, or leave it 0", lld(stride));
  if (stride < 0 && stride != MHA_BROADCAST) return fail_stride(report, "q_scales", "stride", stride);
  resolve_stride(s.n_q, &stride);
  if (options.q_scales && ((Count(s.batch) * Count(stride) + Count(s.n_q)) * Count(sizeof(float))).overflows())
    return fail_size(report, "q_scales");
  return MHA_OK;
}

mha_status check_chosen_keys(Report report, const SequenceArguments &s, const mha_score_options &options, int64_t num_kv_heads,
                             ChosenKeys *chosen) {
  *chosen = {{options.chosen_keys, Storage::f32, options.chosen_keys_batch_stride, options.chosen_keys_head_stride,
              options.chosen_keys_row_stride},
             options.num_chosen,
             options.chosen_block != 0 ? options.chosen_block : 1};
  if (const mha_status status = check_array_strides(report, "chosen_keys", chosen->lists)) return status;
  if (!options.chosen_keys) {
    if (options.num_chosen == 0 && options.chosen_block == 0) return MHA_OK;
    return report.invalid("score.%s is %lld, but score.chosen_keys is NULL; give it, or leave it 0",
                          options.num_chosen ? "num_chosen" : "chosen_block",
                          lld(options.num_chosen ? options.num_chosen : options.chosen_block));
  }
  if (options.num_chosen < 1 || options.num_chosen > INT32_MAX)
    return report.invalid("score.num_chosen is %lld; set it to the entries of a list, at least 1", lld(options.num_chosen));
  if (options.chosen_block < 0 || options.chosen_block > INT32_MAX)
    return report.invalid("score.chosen_block is %lld; set it to the keys of an entry, or to 0 for 1", lld(options.chosen_block));
  if (options.q_groups)
    return report.invalid("score.chosen_keys and score.q_groups are both given; choose keys of the row's group instead");
  const int64_t stride = options.chosen_keys_row_stride;
  if (stride > 0 && stride < options.num_chosen) {
    return report.fail(MHA_ERROR_SHAPE, "score.chosen_keys_row_stride is %lld, but a list has num_chosen = %lld entries", lld(stride),
                       lld(options.num_chosen));
  }
  return check_array_size(report, s, "chosen_keys", chosen->lists, num_kv_heads, options.num_chosen);
}

}  // namespace

mha_status check_score_options(Report report, const mha_score_options *given, int64_t num_heads, int64_t num_kv_heads,
                               SequenceArguments *sequences, ScoreOptions *options) {
  SequenceArguments &s = *sequences;
  *options = {};
  if (!given) return MHA_OK;
  mha_score_options o;
  if (const mha_status status = read_struct(report, "mha_score_options", given, &o)) return status;
  if (!is_finite(o.softcap) || o.softcap < 0.0f)
    return report.invalid("score.softcap is %g; it must be positive and finite, or 0 for none", static_cast<double>(o.softcap));
  if ((o.bias_type != MHA_TYPE_F32 && o.bias_type != MHA_TYPE_F16) || (!o.bias && o.bias_type != 0))
    return report.invalid("score.bias_type is %u; it is MHA_TYPE_F32 or MHA_TYPE_F16, and 0 without score.bias", o.bias_type);
  if (const mha_status status = check_columns(report, s, o)) return status;
  if (const mha_status status = check_relative_biases(report, s, o, num_heads, &options->relative)) return status;
  if (const mha_status status = check_q_scales(report, s, o)) return status;
  if (const mha_status status = check_chosen_keys(report, s, o, num_kv_heads, &options->chosen)) return status;
  options->softcap = o.softcap;
  options->softcap_inverse = o.softcap != 0.0f ? 1.0f / o.softcap : 0.0f;
  options->alibi_slopes = o.alibi_slopes;
  options->sinks = o.sinks;
  options->head_scales = o.head_scales;
  options->bias = {o.bias, o.bias_type == MHA_TYPE_F16 ? Storage::f16 : Storage::f32, o.bias_batch_stride, o.bias_head_stride,
                   o.bias_row_stride};
  options->mask = {o.mask, Storage::int8, o.mask_batch_stride, o.mask_head_stride, o.mask_row_stride};
  const bool has_own_groups = o.kv_groups != nullptr;
  options->groups = {o.q_groups,
                     has_own_groups ? o.kv_groups : o.q_groups,
                     o.q_groups_stride,
                     has_own_groups              ? o.kv_groups_stride
                     : o.q_groups_stride != 0 ? o.q_groups_stride
                                              : s.n_q,
                     o.groups == MHA_GROUPS_ALSO,
                     INT64_MAX,
                     INT64_MAX};
  options->limits_pairs = o.mask || o.q_groups || o.bias;
  options->change_scores = o.softcap != 0.0f || o.alibi_slopes || options->relative.base || o.bias;
  options->relative_left = o.relative_left;
  options->relative_right = o.relative_right;
  options->q_scales = o.q_scales;
  options->q_scales_stride = o.q_scales_stride;
  s.distances = o.alibi_slopes ? "ALiBi" : options->relative.base ? "a relative bias" : nullptr;
  s.adds_keys = o.groups == MHA_GROUPS_ALSO;
  s.has_new_columns = o.columns == MHA_COLUMNS_NEW_KEYS;
  if (o.num_columns != 0) {
    s.num_columns = o.num_columns;
  } else {
    for (const int64_t stride : {o.bias_row_stride, o.mask_row_stride, o.kv_groups_stride}) {
      if (stride > 0) s.columns = std::min(s.columns, stride);
    }
  }
  if (const mha_status status = check_groups(report, s, o)) return status;
  if (const mha_status status = check_pair_array(report, s, "bias", options->bias, num_heads)) return status;
  return check_pair_array(report, s, "mask", options->mask, num_heads);
}

mha_status check_score_arrays(Report report, const char *prefix, const ScoreOptions &options, int64_t num_heads) {
  const struct {
    const char *name;
    const float *numbers;
    bool may_be_low;  // minus infinity
  } arrays[] = {{"alibi_slopes", options.alibi_slopes, false}, {"sinks", options.sinks, true}, {"head_scales", options.head_scales, false}};
  for (const auto &array : arrays) {
    for (int64_t head = 0; array.numbers && head < num_heads; ++head) {
      const float x = array.numbers[head];
      if (array.may_be_low ? x < MHA_INFINITY : is_finite(x)) continue;
      return report.invalid("%s%s[%lld] is %g; it must be %s", prefix, array.name, lld(head), static_cast<double>(x),
                            array.may_be_low ? "less than infinity" : "finite");
    }
  }
  return MHA_OK;
}

void resolve_score_strides(const SequenceArguments &s, int64_t num_heads, int64_t num_kv_heads, ScoreOptions *options) {
  PositionGroups &groups = options->groups;
  const bool has_pairs = options->bias.base || options->mask.base;
  resolve_stride(s.n_q, &options->q_scales_stride);
  resolve_strides(options->relative_left + 1 + options->relative_right, s.n_q, num_heads, &options->relative);
  resolve_strides(options->chosen.count, s.n_q, num_kv_heads, &options->chosen.lists);
  if (!has_pairs && !groups.of_rows) return;
  const int64_t columns = s.num_columns != INT64_MAX ? s.num_columns : s.has_new_columns ? s.n_kv : pair_columns(s);
  resolve_strides(columns, s.n_q, num_heads, &options->bias);
  resolve_strides(columns, s.n_q, num_heads, &options->mask);
  resolve_stride(columns, &groups.column_stride);
  resolve_stride(s.n_q, &groups.row_stride);
}

uint64_t bytes_of_score_options(const ScoreOptions &options, int64_t batch, int64_t num_heads, int64_t n_q, int64_t columns) {
  uint64_t bytes = 0;
  const struct {
    const PairArray &array;
    int64_t columns;
  } arrays[] = {{options.bias, columns}, {options.mask, columns}, {options.relative, options.relative_left + 1 + options.relative_right}};
  for (const auto &[array, of_row] : arrays) {
    if (!array.base) continue;
    const int64_t sequences = array.batch_stride != 0 ? batch : 1, heads = array.head_stride != 0 ? num_heads : 1;
    const int64_t rows = array.row_stride != 0 ? n_q : 1;
    bytes += product(sequences, heads) * product(rows, of_row) * static_cast<uint64_t>(bytes_of(array.storage));
  }
  const PositionGroups &groups = options.groups;
  if (groups.of_rows) bytes += product(groups.row_stride != 0 ? batch : 1, n_q) * sizeof(int32_t);
  if (groups.of_columns != groups.of_rows) bytes += product(groups.column_stride != 0 ? batch : 1, columns) * sizeof(int32_t);
  return bytes;
}

}  // namespace mha

using namespace mha;

namespace {

// slopes[i] = 2^(-8 k / n), k = 1 + i * step, for a power of two n: by sqrt and products of binary64, which are the same everywhere. Every
// n / 8 steps the power is a whole one, and taken anew.
void fill_slopes(int64_t n, int64_t step, int64_t count, float *slopes) {
  double root = 0.5, whole = 1.0, power = 1.0;  // root: 2^(-8 / n)
  for (int64_t i = n; i > 8; i /= 2) root = MHA_SQRT(root);
  for (int64_t i = n; i < 8; i *= 2) root = root * root;
  const int64_t steps = n > 8 ? n / 8 : 1;
  for (int64_t k = 1, i = 0; i < count; ++k) {
    power = power * root;
    if (k % steps == 0) power = whole = n > 8 ? whole * 0.5 : power;
    if ((k - 1) % step == 0) slopes[i++] = static_cast<float>(power);
  }
}

}  // namespace

mha_status mha_alibi_slopes(int64_t num_heads, float *slopes, mha_error *error) {
  Report report(error);
  if (num_heads < 1 || num_heads > INT32_MAX) return report.invalid("num_heads is %lld; it must be 1 to 2147483647", lld(num_heads));
  if (!slopes) return report.about(2).fail(MHA_ERROR_NULL_POINTER, "slopes is NULL; pass an array of num_heads floats");
  int64_t n = 1;
  while (2 * n <= num_heads) n *= 2;
  fill_slopes(n, 1, n, slopes);
  fill_slopes(2 * n, 2, num_heads - n, slopes + n);
  return MHA_OK;
}

namespace {

// T5's buckets for one direction: each distance below `exact` has one of its own, and the others are shared out by the logarithm of the
// distance up to max_distance: distance * (max_distance / exact)^(k / (count - exact)) begins bucket exact + k.
struct T5Buckets {
  int64_t count, exact, max_distance;

  // Calls function(distance, bucket) for the distances from 0 to `last`. Logarithms that differ by less than 2^-40 count as equal.
  template <class Function>
  void visit(int64_t last, const Function &function) const {
    const auto log2 = [](int64_t x) { return log2_of(static_cast<double>(x)); };
    const double first = log2(exact), range = log2(max_distance) - first;
    int64_t bucket = 0;
    for (int64_t distance = 0; distance <= last; ++distance) {
      if (distance < exact || distance >= max_distance) {
        bucket = distance < exact ? distance : count - 1;
      } else if (bucket < count - 1) {
        const double reached = (log2(distance) - first + 0x1p-40) * static_cast<double>(count - exact);
        bucket = bucket < exact ? exact : bucket;
        while (bucket < count - 1 && static_cast<double>(bucket + 1 - exact) * range <= reached) ++bucket;
      }
      function(distance, bucket);
    }
  }
};

}  // namespace

mha_status mha_t5_relative_bias(const float *embedding, int64_t num_buckets, int64_t max_distance, uint32_t is_bidirectional,
                                int64_t num_heads, int64_t left, int64_t right, float *relative_bias, mha_error *error) {
  Report report(error);
  if (num_buckets == 0) num_buckets = 32;
  if (max_distance == 0) max_distance = 128;
  constexpr int64_t most = 1 << 30;
  const long long least = is_bidirectional ? 4 : 2;
  if (num_buckets < least || num_buckets > most)
    return report.about(2).invalid("num_buckets is %lld; it must be %lld to 2^30, or 0 for 32", lld(num_buckets), least);
  const int64_t count = is_bidirectional ? num_buckets / 2 : num_buckets;
  const T5Buckets buckets = {count, count / 2, max_distance};
  if (max_distance <= buckets.exact || max_distance > most) {
    return report.about(3).invalid("max_distance is %lld; with these buckets it must be more than %lld, to 2^30, or 0 for 128",
                                   lld(max_distance), lld(buckets.exact));
  }
  const struct {
    const char *name;
    uint32_t argument;
    int64_t value, least;
  } sizes[] = {{"num_heads", 5, num_heads, 1}, {"left", 6, left, 0}, {"right", 7, right, 0}};
  for (const auto &size : sizes) {
    if (size.value < size.least)
      return report.about(size.argument).invalid("%s is %lld; it must be at least %lld", size.name, lld(size.value), lld(size.least));
  }
  const Count width = Count(left) + Count(right) + Count(1);
  if ((Count(num_heads) * width * Count(sizeof(float))).overflows() || (Count(num_heads) * Count(num_buckets * 4)).overflows())
    return report.about(5).fail(MHA_ERROR_TOO_LARGE, "the arrays would be larger than memory can be");
  if (!embedding) return report.fail(MHA_ERROR_NULL_POINTER, "embedding is NULL; pass an array of num_buckets * num_heads floats");
  if (!relative_bias)
    return report.about(8).fail(MHA_ERROR_NULL_POINTER, "relative_bias is NULL; pass an array of num_heads * (left + 1 + right) floats");
  const auto set = [&](int64_t distance, int64_t bucket) {
    for (int64_t head = 0; head < num_heads; ++head) {
      relative_bias[head * width.value() + left + distance] = embedding[bucket * num_heads + head];
    }
  };
  buckets.visit(left, [&](int64_t distance, int64_t bucket) { set(-distance, bucket); });
  if (is_bidirectional) {
    buckets.visit(right, [&](int64_t distance, int64_t bucket) {
      if (distance > 0) set(distance, count + bucket);
    });
  } else {
    for (int64_t distance = 1; distance <= right; ++distance) set(distance, 0);
  }
  return MHA_OK;
}
