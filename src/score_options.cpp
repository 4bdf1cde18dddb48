// Reading and checking mha_score_options and mha_score_arrays, what they add to the cost of a call,
// and the slopes of ALiBi.

#include "score_options.h"

#include <algorithm>

#include "arguments.h"
#include "binary64.h"
#include "storage.h"
#include "structs.h"

namespace mha {
namespace {

bool is_finite(float x) { return x - x == 0.0f; }

// What the strides of an array with a number for each pair are called.
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
  if (const mha_status status = resolve_input(report, &whole)) return status;
  array->batch_stride = whole.strides[0];
  array->row_stride = whole.strides[1];
  array->head_stride = whole.strides[2];
  return MHA_OK;
}

// The same without a result, for as many columns as there can be.
mha_status check_strides(Report report, const SequenceArguments &s, const PairName &name,
                         int64_t num_heads, int64_t columns, PairArray array) {
  return resolve_strides(report, s, name, num_heads, columns, &array);
}

mha_status fail_size(Report report, const char *name) {
  return report.fail(MHA_ERROR_TOO_LARGE,
                     "%s would exceed the address space; use smaller dimensions", name);
}

// mask or bias. The columns of a cache are known only with the lengths in it; until then a row may
// have none, or as many as it has room for.
mha_status check_pair_array(Report report, const SequenceArguments &s, const PairName &name,
                            int64_t num_heads, const PairArray &array) {
  const bool are_known = s.num_columns != INT64_MAX || !s.cache || s.has_new_columns;
  const int64_t columns = s.num_columns != INT64_MAX ? s.num_columns : are_known ? s.n_kv : 0;
  if (const mha_status status = check_strides(report, s, name, num_heads, columns, array))
    return status;
  const bool is_contiguous = (array.batch_stride | array.head_stride | array.row_stride) == 0;
  return are_known || !is_contiguous
             ? MHA_OK
             : check_strides(report, s, name, num_heads, max_keys(s), array);
}

mha_status check_columns(Report report, const SequenceArguments &s,
                         const mha_score_arrays &arrays) {
  if (arrays.columns != MHA_COLUMNS_ALL_KEYS && arrays.columns != MHA_COLUMNS_NEW_KEYS)
    return report.invalid(
        "score_arrays.columns is %u; set it to MHA_COLUMNS_ALL_KEYS or MHA_COLUMNS_NEW_KEYS",
        arrays.columns);
  const bool has_pairs = arrays.mask || arrays.bias.data,
             has_columns = has_pairs || arrays.q_groups;
  if (arrays.columns == MHA_COLUMNS_NEW_KEYS && (!has_columns || s.only_reads())) {
    return report.invalid(
        "score_arrays.columns is MHA_COLUMNS_NEW_KEYS, but there is no %s; set it to "
        "MHA_COLUMNS_ALL_KEYS",
        has_columns ? "new key with cache_read" : "mask, bias or q_groups");
  }
  if (arrays.num_columns < 0 || (arrays.num_columns > 0 && !has_columns)) {
    return report.invalid(
        "score_arrays.num_columns is %lld; %s", lld(arrays.num_columns),
        has_columns ? "it must be at least 0" : "set it to 0 without mask, bias and q_groups");
  }
  if (arrays.num_columns == INT64_MAX)
    return fail_size(report, "an array of score_arrays.num_columns columns");
  if (arrays.columns == MHA_COLUMNS_ALL_KEYS && has_pairs && s.is_ring()) {
    return report.invalid(
        "score_arrays.%s has a column for each position, but the cache is a ring; set columns to "
        "MHA_COLUMNS_NEW_KEYS",
        arrays.mask ? "mask" : "bias.data");
  }
  return MHA_OK;
}

mha_status check_groups(Report report, const SequenceArguments &s, const mha_score_arrays &arrays) {
  if (!arrays.q_groups) {
    if (!arrays.kv_groups && arrays.groups == 0) return MHA_OK;
    return report.invalid(
        "score_arrays.%s is given without q_groups; give that, too, or leave both out",
        arrays.kv_groups ? "kv_groups" : "groups");
  }
  if (arrays.groups != MHA_GROUPS_WITHIN && arrays.groups != MHA_GROUPS_ALSO)
    return report.invalid(
        "score_arrays.groups is %u; set it to MHA_GROUPS_WITHIN or MHA_GROUPS_ALSO", arrays.groups);
  if (s.is_ring())
    return report.invalid(
        "score_arrays.q_groups is given, but the cache is a ring; use another kind of cache");
  const Count columns(s.num_columns != INT64_MAX ? s.num_columns : max_keys(s));
  if ((Count(s.array_batch) * Count(s.n_q) * Count(sizeof(int32_t))).overflows())
    return fail_size(report, "score_arrays.q_groups");
  if (arrays.kv_groups) {
    if (!(Count(s.array_batch) * columns * Count(sizeof(int32_t))).overflows()) return MHA_OK;
    return fail_size(report, "score_arrays.kv_groups");
  }
  const bool are_rows_of_query =
      s.n_kv == s.n_q && !s.only_reads() && (!s.cache || s.has_new_columns);
  if (are_rows_of_query || (s.n_kv == 0 && !s.cache)) return MHA_OK;
  return report.invalid(
      "score_arrays.kv_groups is NULL, but the columns are not the rows of query; give the groups "
      "of the keys");
}

// Relative biases, *array: those of a table are the same for all sequences and rows.
mha_status check_relative_biases(Report report, const SequenceArguments &s,
                                 const mha_score_options &options, const mha_score_arrays &arrays,
                                 int64_t num_heads, PairArray *array) {
  const bool is_table = options.relative_bias != nullptr;
  *array = pair_array(arrays.relative_rows, Storage::f32, arrays.relative_rows_strides);
  if (is_table && array->base) {
    return report.invalid(
        "score.relative_bias and score_arrays.relative_rows are both given; add the first to each "
        "row of the second, and set it to NULL");
  }
  const struct {
    const char *name;
    int64_t value;
  } reaches[] = {{"left", options.relative_left}, {"right", options.relative_right}};
  for (const auto &reach : reaches) {
    if (reach.value < 0 || (!is_table && !array->base && reach.value != 0)) {
      return report.invalid(
          "score.relative_%s is %lld; it must be at least 0, and 0 without relative_bias or "
          "score_arrays.relative_rows",
          reach.name, lld(reach.value));
    }
  }
  const Count distances = Count(options.relative_left) + Count(options.relative_right) + Count(1);
  if (distances.overflows())
    return fail_size(report, is_table ? "score.relative_bias" : "score_arrays.relative_rows");
  if (const mha_status status =
          check_strides(report, s, relative_rows_name, num_heads, distances.value(), *array))
    return status;
  if (!is_table) return MHA_OK;
  if ((Count(num_heads) * distances * Count(sizeof(float))).overflows())
    return fail_size(report, "score.relative_bias");
  *array = {options.relative_bias, Storage::f32, MHA_BROADCAST, 0, MHA_BROADCAST};
  return MHA_OK;
}

mha_status check_chosen_keys(Report report, const SequenceArguments &s,
                             const mha_score_arrays &arrays, int64_t num_kv_heads,
                             ChosenKeys *chosen) {
  *chosen = {pair_array(arrays.chosen_keys, Storage::f32, arrays.chosen_keys_strides),
             arrays.num_chosen, arrays.chosen_block != 0 ? arrays.chosen_block : 1};
  if (!arrays.chosen_keys) {
    if (arrays.num_chosen == 0 && arrays.chosen_block == 0)
      return check_strides(report, s, chosen_keys_name, 0, 0, chosen->lists);
    return report.invalid(
        "score_arrays.%s is %lld, but chosen_keys is NULL; give chosen_keys, or set it to 0",
        arrays.num_chosen ? "num_chosen" : "chosen_block",
        lld(arrays.num_chosen ? arrays.num_chosen : arrays.chosen_block));
  }
  if (arrays.num_chosen < 1 || arrays.num_chosen > INT32_MAX)
    return report.invalid(
        "score_arrays.num_chosen is %lld; set it to the entries of a list, 1 to 2^31 - 1",
        lld(arrays.num_chosen));
  if (arrays.chosen_block < 0 || arrays.chosen_block > INT32_MAX)
    return report.invalid(
        "score_arrays.chosen_block is %lld; set it to the keys per entry, or to 0 for 1",
        lld(arrays.chosen_block));
  if (arrays.q_groups)
    return report.invalid(
        "score_arrays.chosen_keys and q_groups are both given; leave one out, and choose only keys "
        "of the row's group");
  return check_strides(report, s, chosen_keys_name, num_kv_heads, arrays.num_chosen, chosen->lists);
}

}  // namespace

mha_status check_score_options(Report report, const GivenScore &given, int64_t num_heads,
                               int64_t num_kv_heads, SequenceArguments *sequences,
                               ScoreOptions *options) {
  SequenceArguments &s = *sequences;
  *options = {};
  if (!given.options && !given.arrays) return MHA_OK;
  mha_score_options o = {};
  mha_score_arrays a = {};
  if (given.options) {
    if (const mha_status status = read_struct(report, "mha_score_options", given.options, &o))
      return status;
  }
  if (given.arrays) {
    if (const mha_status status = read_struct(report, "mha_score_arrays", given.arrays, &a))
      return status;
  }
  if (a.relative_rows && !given.options) {
    return report.invalid(
        "score_arrays.relative_rows is given, but score, whose relative_left and relative_right "
        "are its width, is NULL;"
        " give score");
  }
  if (!is_finite(o.softcap) || o.softcap < 0.0f)
    return report.invalid("score.softcap is %g; it must be positive and finite, or 0 for none",
                          static_cast<double>(o.softcap));
  if (o.reserved != 0) return report.invalid("score.reserved is not 0; set it to 0");
  if (const mha_status status = check_input_fields(report, "score_arrays.bias", a.bias))
    return status;
  if (a.bias.type == MHA_TYPE_BF16)
    return report.invalid(
        "score_arrays.bias.type is MHA_TYPE_BF16; it must be MHA_TYPE_F32 or MHA_TYPE_F16");
  if (!a.bias.data && a.bias.type != 0)
    return report.invalid(
        "score_arrays.bias.type is %u, but bias.data is NULL; give the bias, or set the type to 0",
        a.bias.type);
  if (const mha_status status = check_columns(report, s, a)) return status;
  if (const mha_status status =
          check_relative_biases(report, s, o, a, num_heads, &options->relative))
    return status;
  if (a.q_scales && (Count(s.array_batch) * Count(s.n_q) * Count(sizeof(float))).overflows())
    return fail_size(report, "score_arrays.q_scales");
  if (const mha_status status = check_chosen_keys(report, s, a, num_kv_heads, &options->chosen))
    return status;
  options->softcap = o.softcap;
  options->softcap_inverse = o.softcap != 0.0f ? 1.0f / o.softcap : 0.0f;
  options->alibi_slopes = o.alibi_slopes;
  options->sinks = o.sinks;
  options->head_scales = o.head_scales;
  options->bias = pair_array(a.bias.data, storage_of_type(a.bias.type), a.bias.strides);
  options->mask = pair_array(a.mask, Storage::int8, a.mask_strides);
  options->groups = {a.q_groups,
                     a.kv_groups ? a.kv_groups : a.q_groups,
                     s.n_q,
                     a.kv_groups ? 0 : s.n_q,
                     a.groups == MHA_GROUPS_ALSO,
                     INT64_MAX,
                     INT64_MAX};
  options->limits_pairs = a.mask || a.q_groups || a.bias.data;
  options->change_scores =
      o.softcap != 0.0f || o.alibi_slopes || options->relative.base || a.bias.data;
  options->relative_left = o.relative_left;
  options->relative_right = o.relative_right;
  options->q_scales = a.q_scales;
  options->q_scales_stride = s.n_q;
  s.distances = o.alibi_slopes ? "ALiBi" : options->relative.base ? "a relative bias" : nullptr;
  s.adds_keys = a.groups == MHA_GROUPS_ALSO;
  s.has_new_columns = a.columns == MHA_COLUMNS_NEW_KEYS;
  if (a.num_columns != 0) s.num_columns = a.num_columns;
  if (const mha_status status = check_groups(report, s, a)) return status;
  if (const mha_status status = check_pair_array(report, s, bias_name, num_heads, options->bias))
    return status;
  return check_pair_array(report, s, mask_name, num_heads, options->mask);
}

mha_status check_head_arrays(Report report, const char *prefix, const ScoreOptions &options,
                             int64_t num_heads) {
  const struct {
    const char *name;
    const float *numbers;
    bool may_be_low;  // minus infinity
  } arrays[] = {{"alibi_slopes", options.alibi_slopes, false},
                {"sinks", options.sinks, true},
                {"head_scales", options.head_scales, false}};
  for (const auto &array : arrays) {
    for (int64_t head = 0; array.numbers && head < num_heads; ++head) {
      const float x = array.numbers[head];
      if (array.may_be_low ? x < MHA_INFINITY : is_finite(x)) continue;
      return report.invalid("%s%s[%lld] is %g; it must be %s", prefix, array.name, lld(head),
                            static_cast<double>(x),
                            array.may_be_low ? "less than infinity" : "finite");
    }
  }
  return MHA_OK;
}

mha_status resolve_score_strides(Report report, const SequenceArguments &s, int64_t num_heads,
                                 int64_t num_kv_heads, ScoreOptions *options) {
  PositionGroups &groups = options->groups;
  const int64_t distances = options->relative_left + 1 + options->relative_right;
  if (const mha_status status =
          resolve_strides(report, s, relative_rows_name, num_heads, distances, &options->relative))
    return status;
  if (const mha_status status = resolve_strides(report, s, chosen_keys_name, num_kv_heads,
                                                options->chosen.count, &options->chosen.lists))
    return status;
  if (!options->bias.base && !options->mask.base && !groups.of_rows) return MHA_OK;
  const int64_t columns = s.num_columns != INT64_MAX ? s.num_columns
                          : s.has_new_columns        ? s.n_kv
                                                     : pair_columns(s);
  if (groups.column_stride == 0) groups.column_stride = columns;
  if (const mha_status status =
          resolve_strides(report, s, bias_name, num_heads, columns, &options->bias))
    return status;
  return resolve_strides(report, s, mask_name, num_heads, columns, &options->mask);
}

uint64_t bytes_of_score_options(const ScoreOptions &options, int64_t batch, int64_t num_heads,
                                int64_t n_q, int64_t columns) {
  uint64_t bytes = 0;
  const struct {
    const PairArray &array;
    int64_t columns;
  } arrays[] = {{options.bias, columns},
                {options.mask, columns},
                {options.relative, options.relative_left + 1 + options.relative_right}};
  for (const auto &[array, of_row] : arrays) {
    if (!array.base) continue;
    const int64_t sequences = array.batch_stride != 0 ? batch : 1,
                  heads = array.head_stride != 0 ? num_heads : 1;
    const int64_t rows = array.row_stride != 0 ? n_q : 1;
    bytes += product(sequences, heads) * product(rows, of_row) *
             static_cast<uint64_t>(bytes_of(array.storage));
  }
  const PositionGroups &groups = options.groups;
  if (groups.of_rows) bytes += product(batch, n_q) * sizeof(int32_t);
  if (groups.of_columns != groups.of_rows) bytes += product(batch, columns) * sizeof(int32_t);
  return bytes;
}

}  // namespace mha

using namespace mha;

namespace {

// slopes[i] = 2^(-8 k / n), k = 1 + i * step, for a power of two n: by sqrt and products of
// binary64, which are the same everywhere. Every n / 8 steps the power is a whole one, and taken
// anew.
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
  if (num_heads < 1 || num_heads > INT32_MAX)
    return report.invalid("num_heads is %lld; it must be 1 to 2147483647", lld(num_heads));
  if (!slopes)
    return report.about(2).fail(MHA_ERROR_NULL_POINTER,
                                "slopes is NULL; pass an array of num_heads floats");
  int64_t n = 1;
  while (2 * n <= num_heads) n *= 2;
  fill_slopes(n, 1, n, slopes);
  fill_slopes(2 * n, 2, num_heads - n, slopes + n);
  return MHA_OK;
}

namespace {

// T5's buckets for one direction: each distance below `exact` has one of its own, and the others
// are shared out by the logarithm of the distance up to max_distance: distance * (max_distance /
// exact)^(k / (count - exact)) begins bucket exact + k.
struct T5Buckets {
  int64_t count, exact, max_distance;

  // Calls function(distance, bucket) for the distances from 0 to `last`. Logarithms that differ by
  // less than 2^-40 count as equal.
  template <class Function>
  void visit(int64_t last, const Function &function) const {
    const auto log2 = [](int64_t x) { return log2_of(static_cast<double>(x)); };
    const double first = log2(exact), range = log2(max_distance) - first;
    int64_t bucket = 0;
    for (int64_t distance = 0; distance <= last; ++distance) {
      if (distance < exact || distance >= max_distance) {
        bucket = distance < exact ? distance : count - 1;
      } else if (bucket < count - 1) {
        const double reached =
            (log2(distance) - first + 0x1p-40) * static_cast<double>(count - exact);
        bucket = bucket < exact ? exact : bucket;
        while (bucket < count - 1 && static_cast<double>(bucket + 1 - exact) * range <= reached)
          ++bucket;
      }
      function(distance, bucket);
    }
  }
};

}  // namespace

mha_status mha_t5_relative_bias(const float *embedding, int64_t num_buckets, int64_t max_distance,
                                uint32_t is_bidirectional, int64_t num_heads, int64_t left,
                                int64_t right, float *relative_bias, mha_error *error) {
  Report report(error);
  if (num_buckets == 0) num_buckets = 32;
  if (max_distance == 0) max_distance = 128;
  constexpr int64_t most = 1 << 30;
  const long long least = is_bidirectional ? 4 : 2;
  if (num_buckets < least || num_buckets > most)
    return report.about(2).invalid("num_buckets is %lld; it must be %lld to 2^30, or 0 for 32",
                                   lld(num_buckets), least);
  const int64_t count = is_bidirectional ? num_buckets / 2 : num_buckets;
  const T5Buckets buckets = {count, count / 2, max_distance};
  if (max_distance <= buckets.exact || max_distance > most) {
    return report.about(3).invalid(
        "max_distance is %lld; with these buckets it must be more than %lld, to 2^30, or 0 for 128",
        lld(max_distance), lld(buckets.exact));
  }
  const struct {
    const char *name;
    uint32_t argument;
    int64_t value, least;
  } sizes[] = {{"num_heads", 5, num_heads, 1}, {"left", 6, left, 0}, {"right", 7, right, 0}};
  for (const auto &size : sizes) {
    if (size.value < size.least)
      return report.about(size.argument)
          .invalid("%s is %lld; it must be at least %lld", size.name, lld(size.value),
                   lld(size.least));
  }
  const Count width = Count(left) + Count(right) + Count(1);
  if ((Count(num_heads) * width * Count(sizeof(float))).overflows() ||
      (Count(num_heads) * Count(num_buckets * 4)).overflows())
    return report.about(5).fail(
        MHA_ERROR_TOO_LARGE, "the arrays would exceed the address space; use smaller dimensions");
  if (!embedding)
    return report.fail(MHA_ERROR_NULL_POINTER,
                       "embedding is NULL; pass an array of num_buckets * num_heads floats");
  if (!relative_bias)
    return report.about(8).fail(
        MHA_ERROR_NULL_POINTER,
        "relative_bias is NULL; pass an array of num_heads * (left + 1 + right) floats");
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
