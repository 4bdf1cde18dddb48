// Tables that a program makes once: sines and cosines for RoPE, slopes for ALiBi, and relative
// biases for T5.
//
// Angles of RoPE grow to 2^31 radians, where float has no digits after the point, and libraries
// that compute them in float get other results on each machine. Here everything is computed in
// binary64 with the functions of binary64.h and not those of libm, so that every machine gets the
// same bits (CONTRACT.md, sections 13 to 15). docs/rope.md has the formulas of each kind of
// scaling.

#include <stdint.h>

#include <algorithm>

#include "../base/count.h"
#include "../base/structs.h"
#include "../check/rules.h"
#include "binary64.h"
#include "rope_config.h"

namespace mha {
namespace {

// ---- Angles of RoPE

// Pair i turns by theta = base^(-2i / dims) from one position to the next, which scaling changes.
// These are the numbers that all pairs of a table have in common.
struct Angles {
  const mha_rope_config &config;  // with its defaults
  double dims;
  double log2_base;
  double first, last;  // of YaRN: the pairs between which stretching sets in, low and high
};

// The pair that turns `beta` times within the original context, YaRN's d(beta). It is limited to
// the range of pairs and one more on each side, whose floor and ceil are integers of 64 bits.
double correction(const Angles &angles, double beta) {
  const double turns =
      log2_of(static_cast<double>(angles.config.original_positions) / (beta * two_pi));
  const double d = angles.dims * turns / (2.0 * angles.log2_base);
  return d < -1.0 ? -1.0 : d > angles.dims ? angles.dims : d;
}

// NTK changes the base, and YaRN needs the pairs at which its ramp begins and ends.
Angles angles_of(const mha_rope_config &config) {
  Angles angles = {config, static_cast<double>(config.dims), log2_of(config.base), 0.0, 0.0};
  if (config.ntk_factor != 0 && config.ntk_positions > config.original_positions) {
    const double more = static_cast<double>(config.ntk_positions - config.original_positions);
    const double stretch =
        1.0 + config.ntk_factor * more / static_cast<double>(config.original_positions);
    angles.log2_base += log2_of(stretch) * angles.dims / (angles.dims - 2.0);
  }
  if (config.yarn_factor != 0) {
    angles.first = correction(angles, config.yarn_beta_fast);
    angles.last = correction(angles, config.yarn_beta_slow);
    if (!config.yarn_unrounded) {
      angles.first = floor_of(angles.first);
      angles.last = -floor_of(-angles.last);
    }
    if (angles.first < 0.0) angles.first = 0.0;
    if (angles.last > angles.dims - 1.0) angles.last = angles.dims - 1.0;
  }
  return angles;
}

// How much of its stretching pair i gets, from 0 to 1, under YaRN or Llama 3. theta is its angle
// from one position to the next.
double ramp_of(const Angles &angles, int64_t i, double theta) {
  const mha_rope_config &config = angles.config;
  double ramp;
  if (config.yarn_factor != 0) {
    const double above = static_cast<double>(i) - angles.first, length = angles.last - angles.first;
    ramp = length != 0.0 ? above / length : above > 0.0 ? 1.0 : 0.0;
  } else {
    const double turns = static_cast<double>(config.original_positions) * theta / two_pi;
    ramp = (config.llama3_high_freq_factor - turns) /
           (config.llama3_high_freq_factor - config.llama3_low_freq_factor);
  }
  return ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp;
}

// By how much pair i turns from one position to the next, in units of 2^-64 turns. The product of a
// position and this integer wraps around as often as the pair turns, which leaves exactly the
// fraction of a turn that sine and cosine depend on.
uint64_t step_of(const Angles &angles, int64_t i) {
  const mha_rope_config &config = angles.config;
  double theta = exp2_of_minus(static_cast<double>(2 * i) * angles.log2_base / angles.dims);
  const double factor = config.yarn_factor != 0 ? config.yarn_factor : config.llama3_factor;
  if (factor != 0) {
    const double ramp = ramp_of(angles, i, theta);
    theta = theta * (1.0 - ramp + ramp / factor);
  }
  theta = theta / config.linear_factor;
  if (config.pair_factors) theta = theta / config.pair_factors[i];
  return static_cast<uint64_t>(theta / two_pi * 0x1p64);
}

// ---- Sines and cosines

// The positions that pair i goes by, one for each row. Null stands for first_position and those
// after it.
const int64_t *positions_of(const mha_rope_config &config, int64_t i) {
  const int64_t *const section = config.mrope_section;
  if (!section) return nullptr;
  const int64_t in_order = i < section[0]                ? 0
                           : i < section[0] + section[1] ? 1
                                                         : 2,
                in_turn = i < 3 * section[i % 3] ? i % 3 : 0;
  return config.mrope_positions +
         (config.mrope_interleaved ? in_turn : in_order) * config.num_positions;
}

// The series of cos x and of (sin x / x - 1) / x^2 in powers of x^2, the highest power first. The
// denominators are factorials from 14! down to 2!, and from 13! down to 3!.
constexpr double cos_series[8] = {-1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320,
                                  -1.0 / 720,         1.0 / 24,        -1.0 / 2,       1.0};
constexpr double sin_series[6] = {1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880,
                                  -1.0 / 5040,      1.0 / 120,       -1.0 / 6};

struct Values {
  float cos, sin;
};

// The angle is rounded to the nearest quarter of a turn, which decides between cos and sin and
// their signs. What is left is at most pi / 4 and goes into the series.
Values values_at(int64_t position, uint64_t step, double factor) {
  const uint64_t angle = static_cast<uint64_t>(position) * step;
  const uint64_t quarters = (angle + (uint64_t{1} << 61)) >> 62;
  const double x =
      static_cast<double>(static_cast<int64_t>(angle - (quarters << 62))) * (two_pi * 0x1p-64);
  const double z = x * x;
  double c = cos_series[0], s = sin_series[0];
  for (int i = 1; i < 8; ++i) c = c * z + cos_series[i];
  for (int i = 1; i < 6; ++i) s = s * z + sin_series[i];
  s = x + x * (z * s);
  const double cos = quarters == 0 ? c : quarters == 1 ? -s : quarters == 2 ? -c : s;
  const double sin = quarters == 0 ? s : quarters == 1 ? c : quarters == 2 ? -s : -c;
  return {static_cast<float>(cos * factor) + 0.0f, static_cast<float>(sin * factor) + 0.0f};
}

// Fills both tables, [num_positions, dims / 2]. Blocks of columns keep the angles and positions of
// pairs on the stack, so that the library needs no memory for them.
void fill(const mha_rope_config &config, float *cos, float *sin) {
  const Angles angles = angles_of(config);
  const double factor = config.attention_factor != 0 ? config.attention_factor
                        : config.yarn_factor != 0 ? 0.1 * (ln2 * log2_of(config.yarn_factor)) + 1.0
                                                  : 1.0;
  const int64_t columns = config.dims / 2;
  constexpr int64_t block = 128;
  uint64_t steps[block];
  const int64_t *positions[block];
  for (int64_t first = 0; first < columns; first += block) {
    const int64_t count = columns - first < block ? columns - first : block;
    for (int64_t i = 0; i < count; ++i) {
      steps[i] = step_of(angles, first + i);
      positions[i] = positions_of(config, first + i);
    }
    for (int64_t row = 0; row < config.num_positions; ++row) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = positions[i] ? positions[i][row] : config.first_position + row;
        const Values values = values_at(position, steps[i], factor);
        cos[row * columns + first + i] = values.cos;
        sin[row * columns + first + i] = values.sin;
      }
    }
  }
}

// ---- Biases by distance

// Slopes of ALiBi: slopes[i] = 2^(-8 k / n) with k = 1 + i * step, for a power of two n. The root
// 2^(-8 / n) is found by square roots, and its powers by products, both of which are correctly
// rounded everywhere. Every n / 8 steps the power is a power of two; taking that exactly keeps
// rounding errors from adding up.
void fill_slopes(int64_t n, int64_t step, int64_t count, float *slopes) {
  double root = 0.5, whole = 1.0, power = 1.0;
  for (int64_t i = n; i > 8; i /= 2) root = MHA_SQRT(root);
  for (int64_t i = n; i < 8; i *= 2) root = root * root;
  const int64_t steps = n > 8 ? n / 8 : 1;
  for (int64_t k = 1, i = 0; i < count; ++k) {
    power = power * root;
    if (k % steps == 0) power = whole = n > 8 ? whole * 0.5 : power;
    if ((k - 1) % step == 0) slopes[i++] = static_cast<float>(power);
  }
}

// T5's buckets of distances in one direction. Each distance below `exact` has its own bucket. The
// others have logarithmic ones: bucket exact + k begins at exact * (max_distance / exact)^(k /
// (count
// - exact)), and the last one has all distances from max_distance on.
struct T5Buckets {
  int64_t count, exact, max_distance;

  // The bucket of a distance, from that of the distance before. Logarithms that differ by less than
  // 2^-40 count as equal, because a distance at which a bucket begins exactly must not end up in
  // the bucket before it by a rounding error.
  int64_t bucket_of(int64_t distance, int64_t bucket) const {
    if (distance < exact) return distance;
    if (distance >= max_distance || bucket == count - 1) return count - 1;
    const auto log2 = [](int64_t x) { return log2_of(static_cast<double>(x)); };
    const double first = log2(exact), range = log2(max_distance) - first;
    const double reached = (log2(distance) - first + 0x1p-40) * static_cast<double>(count - exact);
    bucket = std::max(bucket, exact);
    while (bucket < count - 1 && static_cast<double>(bucket + 1 - exact) * range <= reached)
      ++bucket;
    return bucket;
  }
};

}  // namespace
}  // namespace mha

using namespace mha;

mha_status mha_rope_tables(const mha_rope_config *config, float *cos, float *sin,
                           mha_error *error) {
  Reporter report(error);
  mha_rope_config known;
  MHA_TRY(read_struct(report, "mha_rope_config", config, &known));
  MHA_TRY(check_rope_config(report, known));
  constexpr char what[] = "memory for num_positions * dims / 2 floats";
  MHA_TRY(Rules{report.about(2)}.given("cos", cos, what));
  MHA_TRY(Rules{report.about(3)}.given("sin", sin, what));
  fill(known, cos, sin);
  return MHA_OK;
}

// For a number of heads that is not a power of two, the first ones get the slopes of the next
// smaller power n, and the others every second slope of 2n heads, as in the paper.
mha_status mha_alibi_slopes(int64_t num_heads, float *slopes, mha_error *error) {
  Reporter report(error);
  MHA_TRY(Rules{report}.range("num_heads", num_heads, 1, INT32_MAX, "1 to 2147483647"));
  MHA_TRY(Rules{report.about(2)}.given("slopes", slopes, "an array of num_heads floats"));
  int64_t n = 1;
  while (2 * n <= num_heads) n *= 2;
  fill_slopes(n, 1, n, slopes);
  fill_slopes(2 * n, 2, num_heads - n, slopes + n);
  return MHA_OK;
}

// Relative biases are [head][left + 1 + right], by the position of the key minus that of the query.
// Keys after the query have the upper half of the buckets, or bucket 0 in a model that does not
// look at them.
mha_status mha_t5_relative_bias(const float *embedding, int64_t num_buckets, int64_t max_distance,
                                uint32_t is_bidirectional, int64_t num_heads, int64_t left,
                                int64_t right, float *relative_bias, mha_error *error) {
  Reporter report(error);
  if (num_buckets == 0) num_buckets = 32;
  if (max_distance == 0) max_distance = 128;
  constexpr int64_t most = 1 << 30;
  MHA_TRY(Rules{report.about(2)}.range(
      "num_buckets", num_buckets, is_bidirectional ? 4 : 2, most,
      is_bidirectional ? "4 to 2^30, or to 0 (32)" : "2 to 2^30, or to 0 (32)"));
  const int64_t count = is_bidirectional ? num_buckets / 2 : num_buckets;
  const T5Buckets buckets = {count, count / 2, max_distance};
  if (max_distance <= buckets.exact || max_distance > most)
    return report.about(3).invalid(
        "max_distance is %lld; with these buckets it must be more than %lld, to 2^30, or 0 for 128",
        lld(max_distance), lld(buckets.exact));
  MHA_TRY(Rules{report.about(5)}.range("num_heads", num_heads, 1, INT64_MAX, "at least 1"));
  MHA_TRY(Rules{report.about(6)}.range("left", left, 0, INT64_MAX, "at least 0"));
  MHA_TRY(Rules{report.about(7)}.range("right", right, 0, INT64_MAX, "at least 0"));
  const Count width = Count(left) + Count(right) + Count(1);
  if ((Count(num_heads) * width * Count(sizeof(float))).overflows() ||
      (Count(num_heads) * Count(num_buckets * 4)).overflows())
    return report.about(5).too_large(
        "the arrays would exceed the address space; use smaller dimensions");
  MHA_TRY(
      Rules{report}.given("embedding", embedding, "an array of num_buckets * num_heads floats"));
  MHA_TRY(Rules{report.about(8)}.given("relative_bias", relative_bias,
                                       "an array of num_heads * (left + 1 + right) floats"));
  // embedding is [num_buckets, num_heads], as models store it, so the copy transposes it.
  const auto set = [&](int64_t distance, int64_t bucket) {
    for (int64_t head = 0; head < num_heads; ++head)
      relative_bias[head * width.value() + left + distance] = embedding[bucket * num_heads + head];
  };
  int64_t bucket = 0;
  for (int64_t distance = 0; distance <= std::max(left, right); ++distance) {
    bucket = buckets.bucket_of(distance, bucket);
    if (distance <= left) set(-distance, bucket);
    if (distance > 0 && distance <= right) set(distance, is_bidirectional ? count + bucket : 0);
  }
  return MHA_OK;
}
