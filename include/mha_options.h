/*
 * mha: options of models. mha.h includes this header; its rules hold here too.
 *
 *     MHA_ARITHMETIC_*     weights in fewer bits, integer and BF16 arithmetic
 *     MHA_FUNCTION_*       gates, and functions of beta and of a convolution
 *     mha_rope             rotary position embedding (RoPE)
 *     mha_norm             norms of queries, keys, values and the context
 *     mha_score_options    what the model does to scores: softcap, ALiBi, sinks, ...
 *     mha_score_arrays     what a step does to scores: masks, biases, segments, chosen keys
 */
#ifndef MHA_OPTIONS_H
#define MHA_OPTIONS_H

#ifndef MHA_H
#error "include mha.h, which includes mha_options.h"
#endif

/* ---- Weights in fewer bits, integers, gates ------------------------------------------------- */

/*
 * Narrower weights mean less memory traffic, which dominates when a call has few rows. Biases stay
 * float. Conversion rounds to nearest, ties to even. A weight that is not finite makes its whole
 * column (INT8) or group (INT4) NaN.
 *
 *     F16     2 bytes per weight, 11 significant bits. Finite weights of 65520 and more are
 *             rejected.
 *     BF16    2 bytes per weight, 8 significant bits, the range of float.
 *     INT8    1 byte per weight, and scales: the largest magnitude divided by 127. A quantiser's
 *             codes are int8_t.
 *     INT4    1/2 byte per weight, and scales: the weight of the largest magnitude is -8 times the
 *             scale. A quantiser's weights need MHA_LAYOUT_OUT_IN. A row is ceil(in / 2) bytes; a
 *             byte is two codes + 8, the earlier input in the low half, and with offsets two
 *             codes, 0 .. 15. Strides count elements and are even.
 *     INT5    5/8 and 3/4 byte per weight, and scales. A quantiser's weights in groups, for integer
 *     INT6    arithmetic alone. They are given as INT8: -16 .. 15 and -32 .. 31, or, with offsets,
 *             0 .. 31 and 0 .. 63.
 *
 * A weight is code * scale, where group_size inputs of an output share a scale (the last group may
 * be shorter), INT8 by default all of them. A quantiser may also give offsets, for each matrix: a
 * weight is then code * scale + offset. Scales and offsets are packed as float or, with scale_type
 * F16, as F16, which must hold those of the quantiser exactly; weights that the library itself
 * quantises have float scales only. A column or group whose largest magnitude is less than 2^-100
 * becomes 0.
 *
 * With scale_type INT8, for integer arithmetic alone, scales and offsets are integers, -128 .. 127,
 * and 256 inputs share a factor of them, which F16 must hold exactly. The scale of a group is
 * scales * block_scales, and its offset is offsets * block_offsets.
 */

/*
 * The arithmetic of projections. Integer arithmetic needs weights that are integers. It converts
 * each input row to integers: 64 numbers (of smaller groups as many as these have, with INT4 at
 * most 32) share a scale, their largest magnitude divided by 127 (INT8) or 32767 (INT16). Products
 * of integers are summed exactly. An input number that is not finite makes its row NaN.
 *
 * BF16 needs BF16 weights. It rounds input rows to BF16, takes numbers below 2^-50 in magnitude for
 * 0, and sums products in float. With MHA_INSTRUCTION_SET_AVX512_AMX that is several times as fast
 * as F32; other sets take up to 1.3 times as long, with the same bits.
 *
 * Attention (mha_call.attention_arithmetic) computes in F32 or INT16. With INT16, keys are INT8 and
 * values INT8 or INT4: those of a cache, or the call's, which are rounded to INT8 as a cache would
 * do. Each query, and the weights of each 256 keys, become 16-bit integers with a scale. Calls of
 * mha_choose_keys need a cache.
 */
#define MHA_ARITHMETIC_F32 0u
#define MHA_ARITHMETIC_INT8 0x501u  /* inputs as 8-bit integers */
#define MHA_ARITHMETIC_INT16 0x502u /* inputs as 16-bit integers, with little error */
#define MHA_ARITHMETIC_BF16 0x503u  /* inputs as BF16 */

/*
 * A gate multiplies the context of a head by a function of g = x W_G + b_G, a projection of the
 * query input with one number per element (Qwen3-Next) or per head (Step). A context of 0 stays 0.
 */
#define MHA_GATE_IN_W_G 0u     /* in w_g */
#define MHA_GATE_IN_W_Q 0x801u /* in w_q or w_qkv: a head's columns, then its gate's (Qwen3-Next) */

/* Functions of a gate, of beta and of a convolution. Each field says which ones it takes. */
#define MHA_FUNCTION_NONE 0u
#define MHA_FUNCTION_SIGMOID 1u  /* 1 / (1 + exp(-x)) */
#define MHA_FUNCTION_SOFTPLUS 2u /* ln(1 + exp(x)) */
#define MHA_FUNCTION_SILU 3u     /* x / (1 + exp(-x)) */

/* ---- Rotary position embedding -------------------------------------------------------------- */

/*
 * Rotary position embedding (Su et al., arXiv:2104.09864) rotates pairs of elements of queries and
 * keys before they are scored: (a, b) becomes (a cos - b sin, b cos + a sin), with the sine and
 * cosine of the row's position in the tables. Without scaling, the angle of pair i is
 * position * base^(-2 i / dims).
 */

/* Which elements are pair i, counted from offset on. */
#define MHA_ROPE_HALF 0u        /* i and i + dims / 2: Llama in Hugging Face, GPT-NeoX */
#define MHA_ROPE_INTERLEAVED 1u /* 2 i and 2 i + 1: Meta's Llama, GPT-J */

/* A rotation. Calls only read it and its tables; all layers, steps and threads can share one. */
typedef struct mha_rope {
  size_t struct_size;
  uint32_t style;        /* MHA_ROPE_*; 0 = HALF */
  uint32_t reserved;
  int64_t dims;          /* elements that rotate; even, 2 .. head_dim; 0 = head_dim - offset */
  int64_t offset;        /* the first of them, >= 0; MLA rotates the last elements of a head */
  int64_t num_positions; /* rows of the tables; >= 1; more than any position that is looked up */
  const float *cos;      /* [num_positions, dims / 2]: row p is position p, column i is pair i */
  const float *sin;      /* [num_positions, dims / 2] */
  int64_t table_stride;  /* elements from one row of the tables to the next; 0 = dims / 2 */
} mha_rope;

/* ---- Norms ---------------------------------------------------------------------------------- */

/* Flags of a norm, combined with |. Without any, it is an RMS norm of each head before RoPE. */
#define MHA_NORM_LAYER 0x100u       /* layer norm instead of RMS norm (Cohere, StableLM) */
#define MHA_NORM_ALL_HEADS 0x200u   /* one norm over the columns of all heads (OLMo 2) */
#define MHA_NORM_AFTER_ROPE 0x400u  /* after the rotation, not before (Hunyuan, Llama 4) */
#define MHA_NORM_VALUES 0x800u      /* also of values: RMS norm per head, no weights (Gemma 4) */
#define MHA_NORM_AFTER_GATE 0x1000u /* norm of the context: after the layer's gate, not before */

/*
 * A norm of the queries, and of the keys before they are scored or stored (Qwen3), and a norm of
 * the context before W_O (BitNet, Kosmos-2). At least one of them is set; the second needs W_O.
 *
 *     RMS norm      x / sqrt(mean of x^2 + epsilon) * weight
 *     layer norm    (x - mean) / sqrt(mean of (x - mean)^2 + epsilon) * weight + bias
 *
 * Squares are summed in float: rows with numbers near 1e19 overflow. Models that store w for a
 * weight of 1 + w (Gemma) must pass the sum. A context of 0 is normalised too; its bias reaches y.
 * Calls only read the struct and its arrays, which may hold any numbers.
 */
typedef struct mha_norm {
  size_t struct_size;

  /* Queries and keys */
  uint32_t flags;        /* MHA_NORM_LAYER | ALL_HEADS | AFTER_ROPE | VALUES */
  float epsilon;         /* > 0 and finite; 0 = no norm of queries and keys */
  const float *q_weight; /* [head_dim] or [num_heads, head_dim]; NULL = 1 */
  const float *k_weight; /* [head_dim] or [num_kv_heads, head_dim]; NULL = 1 */
  const float *q_bias;   /* layer norm: in the shape of q_weight; NULL = 0 */
  const float *k_bias;   /* layer norm: in the shape of k_weight; NULL = 0 */
  int64_t head_stride;   /* from one head's weights to the next's; >= head_dim; 0 = all heads share
                            one. MHA_NORM_ALL_HEADS: 0 or head_dim, both contiguous. */

  /* Context */
  uint32_t context_flags;      /* MHA_NORM_LAYER | ALL_HEADS | AFTER_GATE */
  float context_epsilon;       /* > 0 and finite; 0 = no norm of the context */
  const float *context_weight; /* [head_dim_v] or [num_heads, head_dim_v]; NULL = 1 */
  const float *context_bias;   /* layer norm: in the shape of context_weight; NULL = 0 */
  int64_t context_head_stride; /* as head_stride; >= head_dim_v; 0 = all heads share one */
} mha_norm;

/* ---- Scores --------------------------------------------------------------------------------- */

/*
 * What changes scores and which keys are visible, beyond flags. All options combine. For a query of
 * sequence b at position p in row i, and a key at position j, in this order (that of ONNX's
 * Attention):
 *
 *     q = q_scales[b, i] * q                         after rotation (Llama 4, Ministral 3)
 *     s = scale * q k^T
 *     s = softcap * tanh(s / softcap)                Gemma 2
 *     s = s - alibi_slopes[head] * |j - p|           ALiBi (Press et al., arXiv:2108.12409)
 *     s = s + relative_bias[head, j - p]             T5; or
 *         s + relative_rows[b, head, i, j - p]       Conformer
 *     s = s + bias[b, head, i, column of j]          -infinity masks the key, whatever s was
 *     s = -infinity where flags, mask, segments or chosen_keys exclude the key
 *     weight  = exp(s) / (sum of exp(s) over all keys + exp(sinks[head]))
 *     lse     = ln of that denominator; -infinity if there is no visible key and no sink
 *     context = head_scales[head] * (weights times values)
 *
 * A key whose score is -infinity is masked: neither the key nor its value reaches a result.
 */

/* What a model does to scores; the same for all steps of a layer. Calls only read it. */
typedef struct mha_score_options {
  size_t struct_size;
  float softcap;              /* > 0 and finite; 0 = none */
  uint32_t reserved;
  const float *alibi_slopes;  /* [num_heads], finite; NULL = none */
  const float *sinks;         /* [num_heads], less than infinity, not scaled; NULL = none */
  const float *head_scales;   /* [num_heads], finite; NULL = 1. A head of 0 is not computed. */
  const float *relative_bias; /* [num_heads, relative_left + 1 + relative_right], from distance
                                 -relative_left on; NULL = none. Keys that are farther away have
                                 the first or the last number. */
  int64_t relative_left;      /* >= 0: distances before the query that have a relative bias */
  int64_t relative_right;     /* >= 0: distances after it; without relative biases, both are 0 */
} mha_score_options;

/* Which keys the columns of mask, bias and kv_segments stand for. */
#define MHA_COLUMNS_ALL_KEYS 0u     /* the rows of key or the positions in a cache after the call */
#define MHA_COLUMNS_NEW_KEYS 0x301u /* the rows of key that come with the call */

/* What segments do. */
#define MHA_SEGMENTS_WITHIN 0u   /* of the keys that flags allow, a query sees its segment's */
#define MHA_SEGMENTS_ALSO 0x401u /* a query also sees all keys of its segment (image blocks) */

/*
 * What a step does to scores; one struct can serve all layers of the step. Calls only read it.
 *
 * Columns. mask, bias and kv_segments have the same columns for all rows; without a cache, they are
 * all rows of key, also of packed sequences. With NEW_KEYS, keys that the cache had before have no
 * column: they are always visible (even with MHA_SEGMENTS_WITHIN) and have a bias of 0, so a tree
 * of drafted tokens needs a mask of its own rows only. A ring takes NEW_KEYS and no segments. Keys
 * after the last of num_columns are masked. Columns that flags and lengths exclude are not read,
 * except with MHA_SEGMENTS_ALSO.
 *
 * Chosen keys. Each query attends only to the keys of its list that flags and mask allow (DeepSeek
 * V3.2, MiniMax). Entries are positions or, with chosen_block, numbers of blocks of chosen_block
 * keys, in any order; -1 marks an unused entry and duplicates are ignored. The cost grows with the
 * keys of the lists. When values are stored separately, reading one chosen key of a cache costs
 * reading its block of 16. With chosen_block 0 or 1, bits are those of a call over the keys
 * gathered in ascending order. Chosen keys cannot be combined with segments or with outputs that
 * have a number per pair.
 */
typedef struct mha_score_arrays {
  size_t struct_size;

  /* Masks and biases */
  mha_input bias;           /* [batch, num_heads, n_q, num_columns], F32 or F16; data NULL = none */
  const uint8_t *mask;      /* [batch, num_heads, n_q, num_columns]: 0 = masked; NULL = none */
  mha_strides mask_strides; /* of mask; 0 = contiguous; MHA_BROADCAST is allowed */
  uint32_t column_keys;     /* MHA_COLUMNS_*; 0 = ALL_KEYS */
  uint32_t segments;        /* MHA_SEGMENTS_*; 0 = WITHIN; without q_segments 0 */
  int64_t num_columns;      /* columns of mask, bias and kv_segments; 0 = the keys of the longest
                               sequence (in a cache: after the call) */

  /* Segments, such as documents or images. With MHA_SEGMENTS_ALSO, negative = no segment. */
  const int32_t *q_segments;  /* [batch, n_q]; NULL = no segments */
  const int32_t *kv_segments; /* [batch, num_columns]; NULL = q_segments, of the same rows */

  /* Factors and relative biases */
  const float *q_scales;             /* [batch, n_q]; NULL = 1 */
  const float *relative_rows;        /* [batch, num_heads, n_q, relative_left + 1 + relative_right]
                                        of score; in place of relative_bias; NULL = none */
  mha_strides relative_rows_strides; /* of relative_rows; 0 = contiguous; MHA_BROADCAST */

  /* Chosen keys */
  const int32_t *chosen_keys;      /* [batch, num_kv_heads, n_q, num_chosen]; NULL = all keys */
  mha_strides chosen_keys_strides; /* of chosen_keys; 0 = contiguous; MHA_BROADCAST */
  int64_t num_chosen;              /* entries of a list: 1 .. 2^31 - 1; without lists, 0 = none */
  int64_t chosen_block;            /* entry e: keys e * chosen_block and on; 1 .. 2^31 - 1; 0 = 1 */
} mha_score_arrays;

#endif /* MHA_OPTIONS_H */
