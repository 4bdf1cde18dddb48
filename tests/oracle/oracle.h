// What the library's results are measured against: the textbook's attention and layer, in natural
// order, as a template over the type that it computes in. In double it is the oracle, taken for
// exact; in float it is the naive float32 implementation, whose error shows how much rounding the
// problem itself brings along. One sequence, dense arrays.
#ifndef MHA_TESTS_ORACLE_ORACLE_H
#define MHA_TESTS_ORACLE_ORACLE_H

#include <cstdint>
#include <vector>

#include "support/shapes.h"

namespace oracle {

template <typename T>
struct Attention {
  std::vector<T> scores;   // [num_heads, n_q, n_kv], unscaled, of every pair
  std::vector<T> weights;  // [num_heads, n_q, n_kv]
  std::vector<T> lse;      // [num_heads, n_q]
  std::vector<T> context;  // [n_q, num_heads, head_dim_v]
  std::vector<T> gated;    // likewise, behind the gate, if there is one
};

template <typename T>
struct Layer {
  std::vector<T> q;     // [n_q, num_heads, head_dim]
  std::vector<T> k;     // [n_kv, num_kv_heads, head_dim]
  std::vector<T> v;     // [n_kv, num_kv_heads, head_dim_v]
  std::vector<T> gate;  // [n_q, num_heads, gate.dim]
  Attention<T> attention;
  std::vector<T> y;  // [n_q, output_dim], or [n_q, num_heads * head_dim_v] without w_o
};

// The norms that a struct describes, of queries, keys and values, in the form of that of a context.
support::ContextNorm NormOfQueries(const support::Norm &norm);
support::ContextNorm NormOfKeys(const support::Norm &norm);
support::ContextNorm NormOfValues(const support::Norm &norm);

// x [rows, heads, width], normalised.
std::vector<double> Normalized(const support::ContextNorm &norm, int64_t heads, int64_t width,
                               std::vector<double> x);

// Queries, keys and values as they are attended to, after the norm and the rotation of the shape.
struct Prepared {
  std::vector<double> q, k, v;
};

Prepared PrepareRows(const support::AttentionShape &shape, const std::vector<double> &q,
                     const std::vector<double> &k, const std::vector<double> &v);

// Of rows that are prepared already. T is float or double. gate: [n_q, num_heads, shape.gate.dim];
// empty = that of the shape.
template <typename T>
Attention<T> AttentionForward(const support::AttentionShape &shape, const std::vector<T> &q,
                              const std::vector<T> &k, const std::vector<T> &v,
                              const std::vector<T> &gate = {});

template <typename T>
Layer<T> LayerForward(const support::LayerShape &shape, const support::LayerWeights &weights,
                      const float *query, const float *key, const float *value);

// A-priori bounds of the error of each element in float32, in any order of summation, given the
// exact result. The derivation is in oracle.cpp.
struct AttentionBound {
  std::vector<double> weights;  // [num_heads, n_q, n_kv]
  std::vector<double> lse;      // [num_heads, n_q]
  std::vector<double> context;  // [n_q, num_heads, head_dim_v]
  std::vector<double> gated;    // likewise
};

struct LayerBound {
  std::vector<double> q;
  std::vector<double> k;
  std::vector<double> v;
  std::vector<double> gate;
  AttentionBound attention;
  std::vector<double> y;
};

// exact is AttentionForward<double> of the same q, k, v. The errors that q, k, v already have are
// given by bounds of the same shape; empty = none.
AttentionBound BoundAttention(const support::AttentionShape &shape, const std::vector<double> &q,
                              const std::vector<double> &k, const std::vector<double> &v,
                              const std::vector<double> &q_error,
                              const std::vector<double> &k_error,
                              const std::vector<double> &v_error, const Attention<double> &exact,
                              const std::vector<double> &gate = {},
                              const std::vector<double> &gate_error = {});

// The error of rows x [rows, heads, width] once they are normalised.
std::vector<double> BoundNorm(const support::ContextNorm &norm, int64_t heads, int64_t width,
                              const std::vector<double> &x);

// exact is LayerForward<double> of the same inputs.
LayerBound BoundLayer(const support::LayerShape &shape, const support::LayerWeights &weights,
                      const float *query, const float *key, const float *value,
                      const Layer<double> &exact);

}  // namespace oracle

#endif  // MHA_TESTS_ORACLE_ORACLE_H
