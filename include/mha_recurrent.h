/*
 * mha: attention with a recurrent state, known as linear attention, and the short convolution that
 * models put before it. mha.h includes this header; its rules hold here too.
 *
 *     mha_recurrent_attention    linear, gated (Mamba-2), delta and gated delta rules (Qwen3-Next)
 *     mha_causal_conv            depthwise causal convolution
 */
#ifndef MHA_RECURRENT_H
#define MHA_RECURRENT_H

#ifndef MHA_H
#error "include mha.h, which includes mha_recurrent.h"
#endif

/* ---- Recurrent attention -------------------------------------------------------------------- */

/*
 * Recurrent attention keeps a matrix S [head_dim, head_dim_v] for each value head in place of a KV
 * cache, so that the cost of a token does not grow with the length of its sequence. Row t of a
 * sequence, in order, does
 *
 *     S = exp(decay) * S               each row of S by its own decay if decay_dim is head_dim
 *     S = S + k^T v                    without beta
 *     S = S + k^T (beta * (v - k S))   with beta: the delta rule
 *     output = scale * q S
 *
 *     neither   linear attention (Katharopoulos et al., arXiv:2006.16236)
 *     decay     gated: RetNet, GLA, Mamba-2 (q = C, k = B, v = dt x, decay = dt A;
 *               arXiv:2405.21060)
 *     beta      delta rule: DeltaNet (arXiv:2406.06484)
 *     both      gated delta rule: Qwen3-Next, Qwen3.5 (arXiv:2412.06464); with decay_dim = head_dim
 *               Kimi Delta Attention (arXiv:2510.26692)
 *
 * There are num_v_heads states. State h uses key head h / (num_v_heads / num_k_heads). The output
 * has max(num_q_heads, num_v_heads) heads: head o uses query head o / (output heads / num_q_heads)
 * and state o / (output heads / num_v_heads).
 *
 * exp(decay) is 0 below about -87.3 and infinite above 87.3. Results have the same bits for a
 * prompt at once, in parts and token by token. NaN or infinity in k, v, decay or beta reaches the
 * row's output and, through the state, the later rows of the same sequence, in the heads that use
 * it; in q it reaches only the row's output. With norm_epsilon, a q or k whose sum of squares
 * overflows (numbers of 2e19 and more) counts as 0.
 */
typedef struct mha_recurrent_args {
  size_t struct_size;

  /* Usually the same for all calls of a layer */
  int64_t num_q_heads;    /* divides num_v_heads or a multiple; 1 .. 2^31 - 1; 0 = num_k_heads */
  int64_t num_k_heads;    /* divides num_v_heads; 1 .. 2^31 - 1; 0 = num_v_heads */
  int64_t num_v_heads;    /* heads of v, decay, beta and states; 1 .. 2^31 - 1 */
  int64_t head_dim;       /* width of a query or key of one head; 1 .. 1024 */
  int64_t head_dim_v;     /* width of a value of one head; 1 .. 1024; 0 = head_dim */
  int64_t decay_dim;      /* numbers of a head's decay: 1 or head_dim; 0 = 1 */
  float scale;            /* factor of the output; finite; 0 = 1 / sqrt(head_dim) */
  float norm_epsilon;     /* > 0, finite: q, k are x / sqrt(sum of x^2 + norm_epsilon); 0 = none */
  const float *a_log;     /* [num_v_heads]: decay is -exp(a_log) * softplus(decay + dt_bias); NULL =
                             decay as given */
  const float *dt_bias;   /* [num_v_heads, decay_dim], only with a_log; NULL = 0 */
  uint32_t beta_function; /* MHA_FUNCTION_SIGMOID: beta is sigmoid(beta); 0 = as given */
  uint32_t instruction_set;       /* MHA_INSTRUCTION_SET_*; 0 = the best that the machine has */
  const mha_scheduler *scheduler; /* threads; NULL = the calling thread */

  /* The rows of this call */
  int64_t batch;     /* of the arrays, packed 1: >= 1, or MHA_EMPTY = nothing to do; 0 = 1 */
  int64_t rows;      /* rows per sequence; >= 1, or MHA_EMPTY = none: state_out becomes state */
  mha_input q;       /* [batch, rows, num_q_heads, head_dim] */
  mha_input k;       /* [batch, rows, num_k_heads, head_dim], type 0 = q's */
  mha_input v;       /* [batch, rows, num_v_heads, head_dim_v], type 0 = k's */
  mha_input decay;   /* [batch, rows, num_v_heads, decay_dim], type 0 = F32; data NULL = 0, a
                        factor of 1 */
  mha_input beta;    /* [batch, rows, num_v_heads], type 0 = F32; strides.head MHA_BROADCAST =
                        shared by all heads; data NULL = no delta rule */
  mha_output output; /* [batch, rows, max(num_q_heads, num_v_heads), head_dim_v] */
  const mha_sequences *sequences; /* count, cu_seqlens_q, q_lengths and q_first_rows; the other
                                     fields are NULL. NULL = batch unpadded sequences */

  /* States: [count, num_v_heads, head_dim, head_dim_v] of the sequences; count is batch without
     sequences */
  const float *state; /* before the first row; NULL = 0 */
  float *state_out;   /* after the last row; may be state; NULL = not computed */
  float *snapshots;   /* [count, num_snapshots, num_v_heads, head_dim, head_dim_v]: entry i is the
                         state before the last i + 1 rows, to drop rejected tokens. A sequence with
                         fewer rows has the state before its first row there. NULL = not computed */
  int64_t num_snapshots; /* 1 .. 16 with snapshots; otherwise 0 */
} mha_recurrent_args;

/* Sets *bytes to the size of workspace that mha_recurrent_attention needs, which does not grow with
   batch, count or rows. Reads no array: data may be NULL where it is required. */
MHA_API mha_status mha_recurrent_attention_workspace(const mha_recurrent_args *args, size_t *bytes,
                                                     mha_error *error);
/* Computes recurrent attention. Rows that are not valid are not read; their outputs are 0. */
MHA_API mha_status mha_recurrent_attention(const mha_recurrent_args *args, void *workspace,
                                           size_t workspace_bytes, mha_error *error);
/* Like mha_forward_info, for mha_recurrent_attention(args, ...). bytes counts the states once for
   each of state and state_out, and num_snapshots times for snapshots. */
MHA_API mha_status mha_recurrent_attention_info(const mha_recurrent_args *args,
                                                struct mha_call_info *info, mha_error *error);

/* ---- Causal convolution --------------------------------------------------------------------- */

/*
 * The arguments of mha_causal_conv, a depthwise causal convolution: each channel of row t is
 *
 *     output[t] = activation(bias + sum over j of weights[j] * x[t - (kernel_size - 1) + j])
 *
 * Rows before the first come from state, whose last row is the one just before it. Results have the
 * same bits however a sequence is cut into calls.
 */
typedef struct mha_causal_conv_args {
  size_t struct_size;

  /* Usually the same for all calls of a layer */
  int64_t channels;       /* width of a row; 1 .. 2^31 - 1 */
  int64_t kernel_size;    /* rows that a result depends on; 2 .. 8 */
  const float *weights;   /* [channels, kernel_size] */
  const float *bias;      /* [channels]; NULL = 0 */
  uint32_t activation;    /* MHA_FUNCTION_SILU; 0 = none */
  uint32_t instruction_set;       /* MHA_INSTRUCTION_SET_*; 0 = the best that the machine has */
  const mha_scheduler *scheduler; /* threads; NULL = the calling thread */

  /* The rows of this call */
  int64_t batch;     /* of the arrays, packed 1: >= 1, or MHA_EMPTY = nothing to do; 0 = 1 */
  int64_t rows;      /* rows per sequence; >= 1, or MHA_EMPTY = none: state_out becomes state */
  mha_input x;       /* [batch, rows, channels] */
  mha_output output; /* [batch, rows, channels] */
  const mha_sequences *sequences; /* as in mha_recurrent_args; NULL = batch sequences */
  const float *state; /* [count, kernel_size - 1, channels]: rows before the first; NULL = 0 */
  float *state_out;   /* the shape of state, after the last row; may be it; NULL = not computed */
} mha_causal_conv_args;

/* Sets *bytes to the size of workspace that mha_causal_conv needs, which is often 0. */
MHA_API mha_status mha_causal_conv_workspace(const mha_causal_conv_args *args, size_t *bytes,
                                             mha_error *error);
/* Computes a causal convolution. Rows that are not valid are not read; their outputs are 0. */
MHA_API mha_status mha_causal_conv(const mha_causal_conv_args *args, void *workspace,
                                   size_t workspace_bytes, mha_error *error);

#endif /* MHA_RECURRENT_H */
