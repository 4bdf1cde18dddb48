// Reading and checking mha_score_options, what they add to the cost of a call, and the slopes of ALiBi.

#include "score_options.h"

#include "storage.h"
#include "structs.h"

namespace mha {
namespace {

bool is_finite(float x) { return x - x == 0.0f; }

mha_status check_pair_array(Report &report, const SequenceArguments &s, const char *name, const PairArray &array, int64_t num_heads) {
  const long long strides[] = {array.batch_stride, array.head_stride, array.row_stride};
  const char *const of[] = {"batch", "head", "row"};
  for (int i = 0; i < 3; ++i) {
    if (!array.base && strides[i] != 0) {
      return report.fail(MHA_ERROR_INVALID_VALUE, s.argument, "score.%s_%s_stride is %lld, but score.%s is NULL; give it, or leave it 0",
                         name, of[i], strides[i], name);
    }
    if (strides[i] < 0) {
      return report.fail(MHA_ERROR_INVALID_VALUE, s.argument, "score.%s_%s_stride is %lld; a stride can't be negative", name, of[i],
                         strides[i]);
    }
  }
  if (!array.base) return MHA_OK;
  if (!s.cache && array.row_stride != 0 && array.row_stride < s.n_kv) {
    return report.fail(MHA_ERROR_SHAPE, s.argument, "score.%s_row_stride is %lld, but there are %lld keys; a row has a column for each",
                       name, static_cast<long long>(array.row_stride), static_cast<long long>(s.n_kv));
  }
  const auto reach = [](int64_t count, int64_t stride) { return Count(count > 0 ? count - 1 : 0) * Count(stride); };
  const Count elements = reach(s.batch, array.batch_stride) + reach(num_heads, array.head_stride) + reach(s.n_q, array.row_stride) +
                         Count(max_keys(s));
  if ((elements * Count(sizeof(float))).overflows()) {
    return report.fail(MHA_ERROR_TOO_LARGE, s.argument, "score.%s would be larger than memory can be", name);
  }
  return MHA_OK;
}

mha_status check_columns(Report &report, const SequenceArguments &s, const mha_score_options &options) {
  if (options.columns > MHA_COLUMNS_NEW_KEYS) {
    return report.fail(MHA_ERROR_INVALID_VALUE, s.argument, "score.columns is %u, which is no MHA_COLUMNS_*", options.columns);
  }
  const bool has_pairs = options.mask || options.bias;
  if (options.columns == MHA_COLUMNS_NEW_KEYS && (!has_pairs || (s.flags & MHA_CACHE_READ))) {
    return report.fail(MHA_ERROR_INVALID_VALUE, s.argument, "score.columns is MHA_COLUMNS_NEW_KEYS, but there is no %s; leave it 0",
                       has_pairs ? "new key with MHA_CACHE_READ" : "score.mask and no score.bias");
  }
  if (options.columns == MHA_COLUMNS_ALL_KEYS && has_pairs && s.is_ring()) {
    return report.fail(MHA_ERROR_INVALID_VALUE, s.argument,
                       "score.%s has a column for each position, of which a ring has no end; set score.columns to MHA_COLUMNS_NEW_KEYS",
                       options.mask ? "mask" : "bias");
  }
  return MHA_OK;
}

}  // namespace

mha_status check_score_options(Report &report, const mha_score_options *given, int64_t num_heads, SequenceArguments *sequences,
                               ScoreOptions *options) {
  SequenceArguments &s = *sequences;
  *options = {};
  if (!given) return MHA_OK;
  mha_score_options o;
  if (const mha_status status = read_struct(report, s.argument, "mha_score_options", given, &o)) return status;
  if (!is_finite(o.softcap) || o.softcap < 0.0f) {
    return report.fail(MHA_ERROR_INVALID_VALUE, s.argument, "score.softcap is %g; it must be positive and finite, or 0 for none",
                       static_cast<double>(o.softcap));
  }
  if ((o.bias_type != MHA_TYPE_F32 && o.bias_type != MHA_TYPE_F16) || (!o.bias && o.bias_type != 0)) {
    return report.fail(MHA_ERROR_INVALID_VALUE, s.argument,
                       "score.bias_type is %u; it is MHA_TYPE_F32 or MHA_TYPE_F16, and 0 without score.bias", o.bias_type);
  }
  if (const mha_status status = check_columns(report, s, o)) return status;
  options->softcap = o.softcap;
  options->softcap_inverse = o.softcap != 0.0f ? 1.0f / o.softcap : 0.0f;
  options->alibi_slopes = o.alibi_slopes;
  options->sinks = o.sinks;
  options->bias = {o.bias, o.bias_type == MHA_TYPE_F16 ? Storage::f16 : Storage::f32, o.bias_batch_stride, o.bias_head_stride,
                   o.bias_row_stride};
  options->mask = {o.mask, Storage::int8, o.mask_batch_stride, o.mask_head_stride, o.mask_row_stride};
  options->change_scores = o.softcap != 0.0f || o.alibi_slopes || o.bias || o.mask;
  options->limits_pairs = o.mask != nullptr;
  s.has_alibi = o.alibi_slopes != nullptr;
  s.has_new_columns = o.columns == MHA_COLUMNS_NEW_KEYS;
  const int64_t bias_columns = o.bias && o.bias_row_stride != 0 ? o.bias_row_stride : INT64_MAX;
  const int64_t mask_columns = o.mask && o.mask_row_stride != 0 ? o.mask_row_stride : INT64_MAX;
  s.columns = bias_columns < mask_columns ? bias_columns : mask_columns;
  if (const mha_status status = check_pair_array(report, s, "bias", options->bias, num_heads)) return status;
  return check_pair_array(report, s, "mask", options->mask, num_heads);
}

mha_status check_score_arrays(Report &report, uint32_t argument, const ScoreOptions &options, int64_t num_heads) {
  for (int64_t head = 0; options.alibi_slopes && head < num_heads; ++head) {
    if (is_finite(options.alibi_slopes[head])) continue;
    return report.fail(MHA_ERROR_INVALID_VALUE, argument, "score.alibi_slopes[%lld] is %g; it must be finite",
                       static_cast<long long>(head), static_cast<double>(options.alibi_slopes[head]));
  }
  for (int64_t head = 0; options.sinks && head < num_heads; ++head) {
    if (options.sinks[head] < __builtin_inff()) continue;
    return report.fail(MHA_ERROR_INVALID_VALUE, argument, "score.sinks[%lld] is %g; it must be less than infinity",
                       static_cast<long long>(head), static_cast<double>(options.sinks[head]));
  }
  return MHA_OK;
}

uint64_t bytes_of_score_options(const ScoreOptions &options, int64_t batch, int64_t num_heads, int64_t n_q, int64_t columns) {
  uint64_t bytes = 0;
  const PairArray *const arrays[] = {&options.bias, &options.mask};
  for (const PairArray *const array : arrays) {
    if (!array->base) continue;
    const int64_t sequences = array->batch_stride != 0 ? batch : 1, heads = array->head_stride != 0 ? num_heads : 1;
    const int64_t rows = array->row_stride != 0 ? n_q : 1;
    bytes += product(sequences, heads) * product(rows, columns) * static_cast<uint64_t>(bytes_of(array->storage));
  }
  return bytes;
}

}  // namespace mha

using namespace mha;

namespace {

// slopes[i] = 2^(-8 k / n), k = 1 + i * step, for a power of two n: by sqrt and products of binary64, which are the same everywhere. Every
// n / 8 steps the power is a whole one, and taken anew.
void fill_slopes(int64_t n, int64_t step, int64_t count, float *slopes) {
  double root = 0.5, whole = 1.0, power = 1.0;  // root: 2^(-8 / n)
  for (int64_t i = n; i > 8; i /= 2) root = __builtin_sqrt(root);
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
  if (num_heads < 1 || num_heads > INT32_MAX) {
    return report.fail(MHA_ERROR_INVALID_VALUE, 1, "num_heads is %lld; it must be 1 to 2147483647", static_cast<long long>(num_heads));
  }
  if (!slopes) return report.fail(MHA_ERROR_NULL_POINTER, 2, "slopes is NULL; pass an array of num_heads floats");
  int64_t n = 1;
  while (2 * n <= num_heads) n *= 2;
  fill_slopes(n, 1, n, slopes);
  fill_slopes(2 * n, 2, num_heads - n, slopes + n);
  return MHA_OK;
}
