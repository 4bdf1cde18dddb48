// The specification: src/kernels/CONTRACT.md in scalar code, for one sequence in dense arrays.
// Every kernel has to equal it bit for bit. It is a transcription of that page alone and includes
// nothing of the library.
#ifndef MHA_TESTS_SPEC_SPEC_H
#define MHA_TESTS_SPEC_SPEC_H

#include <cstdint>

#include "support/shapes.h"

namespace spec {

// What the middle stage hands out. Each pointer may be null.
struct AttentionOutputs {
  float *context;            // [n_q, num_heads, head_dim_v]
  float *lse;                // [num_heads, n_q]
  float *weights;            // [num_heads, n_q, n_kv]
  float *scores;             // [num_heads, n_q, n_kv]
  float *scaled_scores;      // [num_heads, n_q, n_kv]
  float *softcapped_scores;  // [num_heads, n_q, n_kv]
  float *masked_scores;      // [num_heads, n_q, n_kv]
  float *gated;  // [n_q, num_heads, head_dim_v], the context behind the gate, if there is one
  float *partials = nullptr;  // [num_heads, n_q, 2 + head_dim_v], without sinks
};

// What the layer hands out. None of the pointers here may be null, nor may attention.context and
// attention.gated.
struct LayerOutputs {
  float *q;  // [n_q, num_heads, head_dim]
  float *k;  // [n_kv, num_kv_heads, head_dim]
  float *v;  // [n_kv, num_kv_heads, head_dim_v]
  AttentionOutputs attention;
  float *y;  // [n_q, output_dim], or [n_q, num_heads * head_dim_v] without w_o
};

// One sequence of mha_recurrent_attention, dense, its defaults resolved. decay, a_log, dt_bias and
// beta may be null. Sections 18 and 19.
struct Recurrence {
  int64_t rows, num_q_heads, num_k_heads, num_v_heads, head_dim, head_dim_v, decay_dim;
  float scale, norm_epsilon;  // scale 0: the default
  bool beta_is_raw;           // sigmoid(beta) is taken
  const float *a_log;         // [num_v_heads]
  const float *dt_bias;       // [num_v_heads, decay_dim]
  const float *q, *k, *v;     // [rows, heads, width]
  const float *decay;         // [rows, num_v_heads, decay_dim]
  const float *beta;          // [rows, num_v_heads]
  int64_t num_snapshots;
};

// One sequence of mha_causal_conv. bias may be null.
struct Convolution {
  int64_t rows, channels, kernel_size;
  bool is_silu;
  const float *weights;  // [channels, kernel_size]
  const float *bias;     // [channels]
  const float *x;        // [rows, channels]
};

// The functions of one compilation of spec.cpp.
struct Functions {
  float (*fma)(float a, float b, float c);
  float (*exp)(float x);
  float (*log)(float x);
  float (*tanh)(float x);
  float (*sigmoid)(float x);
  float (*softplus)(float x);

  // y [rows, out] = x [rows, in] w [in, out] + bias [out]; bias may be null.
  void (*project)(const float *x, const float *w, const float *bias, int64_t rows, int64_t in,
                  int64_t out, float *y);

  // w [in, out] as it is kept: rounded numbers, or codes with their scales, [out] or [groups, out].
  void (*store_weights)(const support::Format &format, const float *w, int64_t in, int64_t out,
                        float *numbers, float *scales);

  // y [rows, out] = x [rows, in] w + bias + residual [rows, out], with w as store_weights leaves
  // it; scales, bias and residual may be null.
  void (*linear)(const support::Format &format, support::Arithmetic arithmetic, const float *x,
                 const float *w, const float *scales, const float *bias, const float *residual,
                 int64_t rows, int64_t in, int64_t out, float *y);

  // x [heads, width] at position r of the tables, in place.
  void (*rotate)(const support::Rotation &rotation, int64_t r, int64_t heads, int64_t width,
                 float *x);

  // k [n_kv, num_kv_heads, head_dim] and v [n_kv, num_kv_heads, head_dim_v] as they are to be
  // stored, in place.
  void (*prepare_keys)(const support::AttentionShape &shape, float *k, float *v);

  // What is read back of keys or values x [rows, width] after storing them.
  void (*store)(const support::AttentionShape &shape, bool are_keys, const float *x, int64_t rows,
                float *read);

  // q [n_q, num_heads, head_dim], k [n_kv, num_kv_heads, head_dim], v [n_kv, num_kv_heads,
  // head_dim_v], neither rotated nor stored yet
  void (*attend)(const support::AttentionShape &shape, const float *q, const float *k,
                 const float *v, const AttentionOutputs &outputs);

  // Of partials [2 + head_dim_v]: merge(left, right), and the row made of one; sink and head_scale
  // may be null.
  void (*merge_partials)(int64_t head_dim_v, const float *left, const float *right, float *result);
  void (*finish_partial)(int64_t head_dim_v, const float *partial, const float *sink,
                         const float *head_scale, float *context, float *lse);

  // q [n_q, num_heads, head_dim], k [n_kv, 1, head_dim] and weights [n_q, num_heads] to
  // index_scores [n_q, n_kv] and chosen [n_q, num_chosen].
  void (*choose_keys)(const support::AttentionShape &shape, const float *q, const float *k,
                      const float *weights, int64_t num_chosen, float *index_scores,
                      int32_t *chosen);

  // State and snapshots as in mha.h, of one sequence; state may be null.
  void (*recur)(const Recurrence &recurrence, const float *state, float *output, float *state_out,
                float *snapshots);
  void (*convolve)(const Convolution &convolution, const float *state, float *output,
                   float *state_out);

  // query [n_q, query_dim], key [n_kv, key_dim], value [n_kv, value_dim]
  void (*forward)(const support::LayerShape &shape, const support::LayerWeights &weights,
                  const float *query, const float *key, const float *value,
                  const LayerOutputs &outputs);
};

// Without the instruction an fma takes some hundred others, so on x86-64 spec.cpp is compiled
// twice.
extern const Functions kBaseline;
#if defined(__x86_64__)
extern const Functions kHardwareFma;  // to be called only if HasHardwareFma()
#endif

// Whether this machine has instructions that the baseline of its architecture lacks.
bool HasHardwareFma();
const Functions &Fastest();  // of those that this machine can run

}  // namespace spec

#endif  // MHA_TESTS_SPEC_SPEC_H
