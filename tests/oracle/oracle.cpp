#include "oracle/oracle.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#ifdef __FAST_MATH__
#error "the oracle needs IEEE arithmetic: compile without -ffast-math"
#endif

namespace oracle {
namespace {

using support::AttentionShape;
using support::LayerShape;
using support::LayerWeights;

template <typename T>
T ScaleOf(const AttentionShape &shape) {
  if (shape.has_equal_scores) return T(0);
  return shape.scale != 0 ? T(shape.scale) : T(1) / std::sqrt(T(shape.head_dim));
}

// Whether key j lies in a block that row i of head h has chosen, where there are lists.
bool IsChosen(const AttentionShape &shape, int64_t h, int64_t i, int64_t j) {
  if (!shape.score || !shape.score->chosen) return true;
  const int64_t kv_head = h / (shape.num_heads / shape.num_kv_heads);
  const int32_t *list = shape.score->chosen + (kv_head * shape.n_q + i) * shape.score->num_chosen;
  return std::count(list, list + shape.score->num_chosen, j / shape.score->chosen_block) > 0;
}

// Whether the pair is excluded by its position. Mask and bias arrays are in the score.
bool IsMasked(const AttentionShape &shape, int64_t h, int64_t i, int64_t j) {
  const bool is_outside = (shape.is_causal && j - i > shape.q_start) ||
                          (shape.has_window_left && j - i < shape.q_start - shape.window_left) ||
                          (shape.has_window_right && j - i - shape.window_right > shape.q_start);
  if (!shape.score) return is_outside;
  const int64_t *rows = shape.score->q_segments, *keys = shape.score->kv_segments;
  if (j >= shape.score->num_keys || !IsChosen(shape, h, i, j)) return true;
  if (shape.score->segments_add_keys) return is_outside && (rows[i] < 0 || keys[j] != rows[i]);
  const bool is_of_another = rows && keys[j] != support::kNoSegment && keys[j] != rows[i];
  return is_outside || is_of_another;
}

bool HasRelativeBias(const support::ScoreOptions &options) {
  return options.relative_bias || options.relative_rows;
}

const float *RelativeBias(const AttentionShape &shape, int64_t h, int64_t i, int64_t j) {
  const support::ScoreOptions &options = *shape.score;
  const int64_t distance =
      std::clamp(j - (shape.q_start + i), -options.relative_left, options.relative_right);
  const int64_t distances = options.relative_left + 1 + options.relative_right;
  const int64_t row = options.relative_rows ? h * shape.n_q + i : h;
  return (options.relative_rows ? options.relative_rows : options.relative_bias) + row * distances +
         options.relative_left + distance;
}

// The finished score of row i of head h and key j, of q k^T.
template <typename T>
T FinishedScore(const AttentionShape &shape, int64_t h, int64_t i, int64_t j, T dot) {
  T s = dot * ScaleOf<T>(shape);
  if (shape.score) {
    const support::ScoreOptions &options = *shape.score;
    if (options.q_scales) s *= T(options.q_scales[i]);
    const int64_t at = (h * shape.n_q + i) * shape.n_kv + j;
    if (options.mask && !options.mask[at]) return -std::numeric_limits<T>::infinity();
    if (options.softcap != 0) s = T(options.softcap) * std::tanh(s / T(options.softcap));
    if (options.alibi_slopes)
      s -= T(options.alibi_slopes[h]) * std::fabs(T(j - (shape.q_start + i)));
    if (HasRelativeBias(options)) s += T(*RelativeBias(shape, h, i, j));
    if (options.bias) s += T(options.bias[at]);
  }
  return IsMasked(shape, h, i, j) ? -std::numeric_limits<T>::infinity() : s;
}

// Of the gate's number g.
template <typename T>
T GateFactor(support::GateKind kind, T g) {
  if (kind == support::GateKind::kSigmoid)
    return g < 0 ? std::exp(g) / (1 + std::exp(g)) : 1 / (1 + std::exp(-g));
  return std::max(g, T(0)) + std::log1p(std::exp(-std::fabs(g)));
}

// The gate of element d of head h in row i, one number for all elements or one for each.
template <typename T>
T GateOf(const AttentionShape &shape, const std::vector<T> &gate, int64_t i, int64_t h, int64_t d) {
  const int64_t at = (i * shape.num_heads + h) * shape.gate.dim + (shape.gate.dim == 1 ? 0 : d);
  return gate.empty() ? T(shape.gate.values[at]) : gate[at];
}

double HeadScale(const AttentionShape &shape, int64_t h) {
  return shape.score && shape.score->head_scales ? double(shape.score->head_scales[h]) : 1.0;
}

// y [rows, out] = x [rows, in] w [in, out] + b [out]
template <typename T, typename X>
std::vector<T> Project(const X *x, const float *w, const float *b, int64_t rows, int64_t in,
                       int64_t out) {
  std::vector<T> y(rows * out);
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t n = 0; n < out; n++) {
      T sum = 0;
      for (int64_t c = 0; c < in; c++) sum += T(x[i * in + c]) * T(w[c * out + n]);
      y[i * out + n] = b ? sum + T(b[n]) : sum;
    }
  }
  return y;
}

// x [rows, heads, width], normalised by the textbook.
template <typename T>
void Normalize(const support::ContextNorm &norm, int64_t heads, int64_t width, std::vector<T> *x) {
  const int64_t rows_and_heads = static_cast<int64_t>(x->size()) / width,
                together = norm.is_of_all_heads ? heads : 1, count = together * width;
  for (int64_t first = 0; first < rows_and_heads; first += together) {
    T *row = x->data() + first * width;
    T mean = 0, variance = 0;
    for (int64_t n = 0; n < count && norm.is_layer; n++) mean += row[n] / T(count);
    for (int64_t n = 0; n < count; n++) variance += (row[n] - mean) * (row[n] - mean) / T(count);
    for (int64_t n = 0; n < count; n++) {
      const int64_t at = (first % heads + n / width) * norm.head_stride + n % width;
      row[n] = (row[n] - mean) / std::sqrt(variance + T(norm.epsilon));
      if (norm.weight) row[n] *= T(norm.weight[at]);
      if (norm.bias) row[n] += T(norm.bias[at]);
    }
  }
}

// Queries or keys x [rows, heads, head_dim], normalised and rotated.
template <typename T>
void Prepare(const AttentionShape &shape, bool are_keys, std::vector<T> *x) {
  const int64_t rows = are_keys ? shape.n_kv : shape.n_q,
                heads = are_keys ? shape.num_kv_heads : shape.num_heads;
  const auto normalize = [&](bool is_after) {
    if (shape.norm && shape.norm->is_after_rotation == is_after)
      Normalize(are_keys ? NormOfKeys(*shape.norm) : NormOfQueries(*shape.norm), heads,
                shape.head_dim, x);
  };
  normalize(false);
  for (int64_t n = 0; shape.rotation && n < rows * heads; n++) {
    const support::Rotation &rotation = *shape.rotation;
    const int64_t *positions = are_keys ? rotation.k_positions : rotation.q_positions,
                  i = n / heads;
    const int64_t at = (positions  ? positions[i]
                        : are_keys ? i
                                   : shape.q_start + i) *
                       rotation.table_stride,
                  half = rotation.dims / 2;
    for (int64_t pair = 0; pair < half; pair++) {
      T &a =
          (*x)[n * shape.head_dim + rotation.offset + (rotation.is_interleaved ? 2 * pair : pair)];
      T &b = (*x)[n * shape.head_dim + rotation.offset +
                  (rotation.is_interleaved ? 2 * pair + 1 : pair + half)];
      const T cos = rotation.cos[at + pair], sin = rotation.sin[at + pair], old_a = a;
      a = a * cos - b * sin;
      b = b * cos + old_a * sin;
    }
  }
  normalize(true);
}

}  // namespace

support::ContextNorm NormOfQueries(const support::Norm &norm) {
  return {norm.is_layer, norm.is_of_all_heads, false,           norm.epsilon,
          norm.q_weight, norm.q_bias,          norm.head_stride};
}
support::ContextNorm NormOfKeys(const support::Norm &norm) {
  return {norm.is_layer, norm.is_of_all_heads, false,           norm.epsilon,
          norm.k_weight, norm.k_bias,          norm.head_stride};
}
support::ContextNorm NormOfValues(const support::Norm &norm) {
  return {false, false, false, norm.epsilon, nullptr, nullptr, 0};
}

std::vector<double> Normalized(const support::ContextNorm &norm, int64_t heads, int64_t width,
                               std::vector<double> x) {
  Normalize(norm, heads, width, &x);
  return x;
}

Prepared PrepareRows(const AttentionShape &shape, const std::vector<double> &q,
                     const std::vector<double> &k, const std::vector<double> &v) {
  Prepared prepared = {q, k, v};
  Prepare(shape, false, &prepared.q);
  Prepare(shape, true, &prepared.k);
  if (shape.norm && shape.norm->is_of_values)
    Normalize(NormOfValues(*shape.norm), shape.num_kv_heads, shape.head_dim_v, &prepared.v);
  return prepared;
}

template <typename T>
Attention<T> AttentionForward(const AttentionShape &shape, const std::vector<T> &q,
                              const std::vector<T> &k, const std::vector<T> &v,
                              const std::vector<T> &gate) {
  const int64_t n_q = shape.n_q, n_kv = shape.n_kv, num_heads = shape.num_heads,
                num_kv_heads = shape.num_kv_heads;
  const int64_t head_dim = shape.head_dim, head_dim_v = shape.head_dim_v;
  const T infinity = std::numeric_limits<T>::infinity();
  Attention<T> result;
  result.scores.resize(num_heads * n_q * n_kv);
  result.weights.resize(num_heads * n_q * n_kv);
  result.lse.resize(num_heads * n_q);
  result.context.resize(n_q * num_heads * head_dim_v);

  std::vector<T> finished(
      n_kv);  // the scores of one row, scaled; -infinity where a key takes no part
  for (int64_t h = 0; h < num_heads; h++) {
    const int64_t g = h / (num_heads / num_kv_heads);  // the kv head
    for (int64_t i = 0; i < n_q; i++) {
      const T *q_ih = q.data() + (i * num_heads + h) * head_dim;                 // (head_dim)
      T *scores_hi = result.scores.data() + (h * n_q + i) * n_kv;                // (n_kv)
      T *weights_hi = result.weights.data() + (h * n_q + i) * n_kv;              // (n_kv)
      T *context_ih = result.context.data() + (i * num_heads + h) * head_dim_v;  // (head_dim_v)

      // Pass 1: scores and their maximum.
      T max = -infinity;
      for (int64_t j = 0; j < n_kv; j++) {
        const T *k_jg = k.data() + (j * num_kv_heads + g) * head_dim;  // (head_dim)
        T dot = 0;
        for (int64_t d = 0; d < head_dim; d++) dot += q_ih[d] * k_jg[d];
        scores_hi[j] = dot;
        finished[j] = FinishedScore(shape, h, i, j, dot);
        if (finished[j] > max) max = finished[j];
      }

      // Pass 2: exponentials and their sum, which is 0 only if no key takes part: that of the
      // maximum is 1. A sink joins both.
      T sum = 0;
      if (shape.score && shape.score->sinks && max > -infinity) {
        const T sink = T(shape.score->sinks[h]);
        if (sink > max) max = sink;
        sum = std::exp(sink - max);
      }
      for (int64_t j = 0; j < n_kv; j++) {
        weights_hi[j] = finished[j] == -infinity ? T(0) : std::exp(finished[j] - max);
        sum += weights_hi[j];
      }
      result.lse[h * n_q + i] = sum == 0 ? -infinity : max + std::log(sum);

      // Pass 3: normalise. Pass 4: accumulate the weighted values.
      for (int64_t d = 0; d < head_dim_v; d++) context_ih[d] = 0;
      for (int64_t j = 0; j < n_kv; j++) {
        if (finished[j] == -infinity) continue;
        weights_hi[j] /= sum;
        const T *v_jg = v.data() + (j * num_kv_heads + g) * head_dim_v;  // (head_dim_v)
        for (int64_t d = 0; d < head_dim_v; d++) context_ih[d] += weights_hi[j] * v_jg[d];
      }
      for (int64_t d = 0; d < head_dim_v; d++) context_ih[d] *= T(HeadScale(shape, h));
      if (HeadScale(shape, h) != 0) continue;  // as if it had no keys
      std::fill_n(weights_hi, n_kv, T(0));
      result.lse[h * n_q + i] = -infinity;
    }
  }
  result.gated = result.context;
  for (int64_t n = 0;
       shape.gate.kind != support::GateKind::kNone && n < n_q * num_heads * head_dim_v; n++) {
    const int64_t i = n / head_dim_v / num_heads, h = n / head_dim_v % num_heads;
    result.gated[n] *= GateFactor<T>(shape.gate.kind, GateOf(shape, gate, i, h, n % head_dim_v));
  }
  return result;
}

template <typename T>
Layer<T> LayerForward(const LayerShape &shape, const LayerWeights &weights, const float *query,
                      const float *key, const float *value) {
  const AttentionShape &a = shape.attention;
  Layer<T> result;
  result.q =
      Project<T>(query, weights.w_q, weights.b_q, a.n_q, shape.query_dim, a.num_heads * a.head_dim);
  result.k =
      Project<T>(key, weights.w_k, weights.b_k, a.n_kv, shape.key_dim, a.num_kv_heads * a.head_dim);
  result.v = Project<T>(value, weights.w_v, weights.b_v, a.n_kv, shape.value_dim,
                        a.num_kv_heads * a.head_dim_v);
  if (weights.w_g)
    result.gate = Project<T>(query, weights.w_g, weights.b_g, a.n_q, shape.query_dim,
                             a.num_heads * a.gate.dim);
  result.attention = AttentionForward<T>(a, result.q, result.k, result.v, result.gate);
  const std::vector<T> &context = result.attention.gated;
  result.y = weights.w_o ? Project<T>(context.data(), weights.w_o, weights.b_o, a.n_q,
                                      a.num_heads * a.head_dim_v, shape.output_dim)
                         : context;
  return result;
}

template Attention<float> AttentionForward(const AttentionShape &, const std::vector<float> &,
                                           const std::vector<float> &, const std::vector<float> &,
                                           const std::vector<float> &);
template Attention<double> AttentionForward(const AttentionShape &, const std::vector<double> &,
                                            const std::vector<double> &,
                                            const std::vector<double> &,
                                            const std::vector<double> &);
template Layer<float> LayerForward(const LayerShape &, const LayerWeights &, const float *,
                                   const float *, const float *);
template Layer<double> LayerForward(const LayerShape &, const LayerWeights &, const float *,
                                    const float *, const float *);

// ---- Bounds
//
// eps = 2^-23 is twice the unit roundoff u, so that a bound counts n * eps where at most n
// roundings of relative size u happen, with half of it left for terms of second order, the merging
// of chunks and the rounded default scale.
//
// Projection: a sum of products in any order has at most (in + 1) roundings in each term, the bias
// included:
//     |y - y64| <= (in + 1) * eps * (|x| |W| + |b|)  +  x_error |W|
//
// Score: |s - s64| <= eps * (head_dim + 2) * S + D with S = max over j of scale * |q| . |k_j|,
// where the 2 stands for the scale and for s - m, and D = max over j of scale * (|q| . k_error_j +
// q_error . |k_j| + q_error . k_error_j) for what came in.
//
// Weight: it is exp(s_j - m) / l. The error of s enters twice, above and below the line; so does
// that of exp (0.89 ulp, also where partials are merged). The sum has n_kv terms; 1 / l and the
// last product are one rounding each. Together, relative to the weight:
//     G = eps * (2 * (head_dim + 2) * S + n_kv + C) + 2 * D,   C = 2 * 0.89 + 1
//
// Context: |o - o64| <= G * sum_j p_j |v_j|  +  sum_j p_j v_error_j, the n_kv * eps in G serving
// the sum of weighted values as well.
//
// Below 2^-126 exp gives 0, and products lose bits or vanish. That is an absolute error in relation
// to the greatest exponential, which is 1, and therefore to l >= 1.
//
// What score options add: a softcap passes the error of s on at most once, and adds the roundings
// of a product, of tanh (1.45 ulp) and of another product, of at most |s|; ALiBi and biases are
// three sums more, whose terms count in S; a factor of the query is one rounding more, and counts
// in S and D; a sink is a term more of the sum.
//
// A head's scale is one product more. So is a gate, whose factor f(g) is off by at most 2.5 ulp, or
// by the smallest normal number; its slope is at most 1, so an error of g passes on at most once.
//
// lse = log of the sum of exp(s_j): an error of all s_j passes on at most once, and that of l
// relative becomes absolute, together G / 2; then the roundings of log (0.84 ulp) and of m +
// log(l).
namespace {

constexpr double kEps = FLT_EPSILON;
constexpr double kExpUlp = 0.89;
constexpr double kC = 2 * kExpUlp + 1;
constexpr double kSmallestNormal = FLT_MIN;
constexpr double kSmallest = 0x1p-149;

// |x| |w| for x [rows, in], w [in, out]
std::vector<double> AbsProduct(const std::vector<double> &x, const float *w, int64_t rows,
                               int64_t in, int64_t out) {
  std::vector<double> y(rows * out);
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t c = 0; c < in; c++) {
      const double x_ic = std::fabs(x[i * in + c]);
      for (int64_t n = 0; n < out; n++) y[i * out + n] += x_ic * std::fabs(double(w[c * out + n]));
    }
  }
  return y;
}

std::vector<double> BoundProjection(const std::vector<double> &x,
                                    const std::vector<double> &x_error, const float *w,
                                    const float *b, int64_t rows, int64_t in, int64_t out) {
  std::vector<double> computed = x;  // at most so large is what float32 multiplies
  if (!x_error.empty()) {
    for (size_t n = 0; n < x.size(); n++) computed[n] = std::fabs(x[n]) + x_error[n];
  }
  std::vector<double> bound = AbsProduct(computed, w, rows, in, out);
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t n = 0; n < out; n++) {
      double &bound_in = bound[i * out + n];
      bound_in = (in + 1) * (kEps * (bound_in + (b ? std::fabs(double(b[n])) : 0.0)) + kSmallest);
    }
  }
  if (!x_error.empty()) {
    const std::vector<double> passed_on = AbsProduct(x_error, w, rows, in, out);
    for (size_t n = 0; n < bound.size(); n++) bound[n] += passed_on[n];
  }
  return bound;
}

}  // namespace

AttentionBound BoundAttention(const AttentionShape &shape, const std::vector<double> &q,
                              const std::vector<double> &k, const std::vector<double> &v,
                              const std::vector<double> &q_error,
                              const std::vector<double> &k_error,
                              const std::vector<double> &v_error, const Attention<double> &exact,
                              const std::vector<double> &gate,
                              const std::vector<double> &gate_error) {
  const int64_t n_q = shape.n_q, n_kv = shape.n_kv, num_heads = shape.num_heads,
                num_kv_heads = shape.num_kv_heads;
  const int64_t head_dim = shape.head_dim, head_dim_v = shape.head_dim_v;
  const double scale = std::fabs(ScaleOf<double>(shape));
  const auto error_of = [](const std::vector<double> &error, int64_t at) {
    return error.empty() ? 0.0 : error[at];
  };
  AttentionBound bound;
  bound.weights.resize(exact.weights.size());
  bound.lse.resize(exact.lse.size());
  bound.context.resize(exact.context.size());
  bound.gated.resize(exact.context.size());

  for (int64_t h = 0; h < num_heads; h++) {
    const int64_t g = h / (num_heads / num_kv_heads);
    for (int64_t i = 0; i < n_q; i++) {
      double S = 0, D = 0;
      for (int64_t j = 0; j < n_kv; j++) {
        if (IsMasked(shape, h, i, j)) continue;
        double S_j = 0, D_j = 0;
        for (int64_t d = 0; d < head_dim; d++) {
          const int64_t at_q = (i * num_heads + h) * head_dim + d,
                        at_k = (j * num_kv_heads + g) * head_dim + d;
          const double q_d = std::fabs(q[at_q]), k_d = std::fabs(k[at_k]);
          const double q_d_error = error_of(q_error, at_q), k_d_error = error_of(k_error, at_k);
          S_j += (q_d + q_d_error) * (k_d + k_d_error);
          D_j += q_d * k_d_error + q_d_error * k_d + q_d_error * k_d_error;
        }
        double added = 0;
        if (shape.score && shape.score->alibi_slopes) {
          added +=
              std::fabs(double(shape.score->alibi_slopes[h]) * double(j - (shape.q_start + i)));
        }
        if (shape.score && shape.score->q_scales) {
          S_j *= std::fabs(double(shape.score->q_scales[i]));
          D_j *= std::fabs(double(shape.score->q_scales[i]));
        }
        if (shape.score && HasRelativeBias(*shape.score))
          added += std::fabs(double(*RelativeBias(shape, h, i, j)));
        if (shape.score && shape.score->bias)
          added += std::fabs(double(shape.score->bias[(h * n_q + i) * n_kv + j]));
        S = std::max(S, scale * S_j + added);
        D = std::max(D, scale * D_j + head_dim * kSmallest * std::max(scale, 1.0));
      }
      const double G = kEps * (2 * (head_dim + (shape.score ? 8 : 2)) * S + double(n_kv) +
                               (shape.score ? 1 : 0) + kC) +
                       2 * D;

      const double *weights_hi = exact.weights.data() + (h * n_q + i) * n_kv;
      for (int64_t j = 0; j < n_kv; j++) {
        bound.weights[(h * n_q + i) * n_kv + j] =
            IsMasked(shape, h, i, j) ? 0 : G * weights_hi[j] + kSmallestNormal;
      }
      const double lse = exact.lse[h * n_q + i];
      bound.lse[h * n_q + i] =
          G / 2 + kEps * (std::fabs(lse) + std::log(std::max(double(n_kv), 1.0)));
      for (int64_t d = 0; d < head_dim_v; d++) {
        double sum = 0, passed_on = 0, small = 0;
        for (int64_t j = 0; j < n_kv; j++) {
          if (IsMasked(shape, h, i, j)) continue;
          const int64_t at_v = (j * num_kv_heads + g) * head_dim_v + d;
          const double v_d_error = error_of(v_error, at_v);
          sum += weights_hi[j] * (std::fabs(v[at_v]) + v_d_error);
          passed_on += weights_hi[j] * v_d_error;
          small += kSmallestNormal * (std::fabs(v[at_v]) + v_d_error) + kSmallest;
        }
        const int64_t at = (i * num_heads + h) * head_dim_v + d;
        const double c = std::fabs(exact.context[at]);
        bound.context[at] =
            std::fabs(HeadScale(shape, h)) * (G * sum + passed_on + small) + kEps * c;
        bound.gated[at] = bound.context[at];
        if (shape.gate.kind == support::GateKind::kNone) continue;
        const double f = GateFactor<double>(shape.gate.kind, GateOf(shape, gate, i, h, d));
        const int64_t at_gate =
            (i * num_heads + h) * shape.gate.dim + (shape.gate.dim == 1 ? 0 : d);
        const double f_error = 3 * kEps * f + kSmallestNormal + error_of(gate_error, at_gate);
        bound.gated[at] =
            (c + bound.context[at]) * f_error + bound.context[at] * f + kEps * c * f + kSmallest;
      }
    }
  }
  return bound;
}

// With n numbers together, of which u is the largest and s the root: a mean is off by n roundings
// of u at most, a difference from it by one more; the sum of their squares by n + 2 roundings, and
// twice what the differences are off by; the root halves that; five roundings follow.
std::vector<double> BoundNorm(const support::ContextNorm &norm, int64_t heads, int64_t width,
                              const std::vector<double> &x) {
  constexpr double eps = 0x1p-24;
  const int64_t count = (norm.is_of_all_heads ? heads : 1) * width;
  std::vector<double> bound(x.size());
  for (int64_t first = 0; first < static_cast<int64_t>(x.size()); first += count) {
    double u = 0, mean = 0, variance = 0;
    for (int64_t n = 0; n < count; n++) u = std::max(u, std::fabs(x[first + n]));
    for (int64_t n = 0; n < count && norm.is_layer; n++) mean += x[first + n] / double(count);
    for (int64_t n = 0; n < count; n++)
      variance += (x[first + n] - mean) * (x[first + n] - mean) / double(count);
    const double s = std::sqrt(variance + double(norm.epsilon));
    const double of_difference = norm.is_layer ? eps * double(count + 3) * u : 0;
    const double of_root = eps * (double(count) / 2 + 4) + of_difference / s;
    for (int64_t n = 0; n < count; n++) {
      const int64_t at = (first / width + n / width) % heads * norm.head_stride + n % width;
      const double w = norm.weight ? std::fabs(double(norm.weight[at])) : 1,
                   b = norm.bias ? std::fabs(double(norm.bias[at])) : 0;
      const double distance = std::fabs(x[first + n] - mean);
      bound[first + n] =
          w / s * (of_difference + distance * (of_root + 6 * eps)) + eps * b + kSmallestNormal;
    }
  }
  return bound;
}

LayerBound BoundLayer(const LayerShape &shape, const LayerWeights &weights, const float *query,
                      const float *key, const float *value, const Layer<double> &exact) {
  const AttentionShape &a = shape.attention;
  const int64_t merged_dim = a.num_heads * a.head_dim_v;
  const auto bound_input = [](const float *x, const float *w, const float *b, int64_t rows,
                              int64_t in, int64_t out) {
    return BoundProjection(std::vector<double>(x, x + rows * in), {}, w, b, rows, in, out);
  };
  LayerBound bound;
  bound.q = bound_input(query, weights.w_q, weights.b_q, a.n_q, shape.query_dim,
                        a.num_heads * a.head_dim);
  bound.k = bound_input(key, weights.w_k, weights.b_k, a.n_kv, shape.key_dim,
                        a.num_kv_heads * a.head_dim);
  bound.v = bound_input(value, weights.w_v, weights.b_v, a.n_kv, shape.value_dim,
                        a.num_kv_heads * a.head_dim_v);
  if (weights.w_g)
    bound.gate = bound_input(query, weights.w_g, weights.b_g, a.n_q, shape.query_dim,
                             a.num_heads * a.gate.dim);
  bound.attention = BoundAttention(a, exact.q, exact.k, exact.v, bound.q, bound.k, bound.v,
                                   exact.attention, exact.gate, bound.gate);
  bound.y = weights.w_o ? BoundProjection(exact.attention.gated, bound.attention.gated, weights.w_o,
                                          weights.b_o, a.n_q, merged_dim, shape.output_dim)
                        : bound.attention.gated;
  return bound;
}

}  // namespace oracle
