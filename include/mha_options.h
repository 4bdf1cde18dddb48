/*
 * mha: what changes a layer or a call beyond its shape and its mask, and what fewer programs call.
 * mha.h includes this file at its end; programs include mha.h alone. In the order of this file:
 *
 *     mha_layer_options           instruction set, BLAS and memory of a layer
 *     MHA_ARITHMETIC_*            types of weights, arithmetic of integers
 *     MHA_GATE_*                  gates
 *     mha_layer_pack, _view       layers in the caller's memory or in files
 *     mha_kv_cache_*              rings, paged and saved caches; appending and reading alone
 *     mha_rope, mha_rope_tables   rotary position embedding and its tables
 *     mha_norm                    norms of queries, keys, values and the context
 *     mha_score_options           softcap, biases, mask arrays, groups, sinks, factors
 *     mha_states_merge, _finish   attention over keys that lie in several places
 *     mha_choose_keys             the keys with the greatest index scores (DeepSeek V3.2)
 *     mha_taps                    outputs of each step in between
 *     mha_info                    how a call will run, and what it costs
 *
 * All that mha.h says of structs, strides, pointers, errors and threads holds here.
 */
#ifndef MHA_OPTIONS_H
#define MHA_OPTIONS_H

#ifndef MHA_H
#error "include mha.h, which includes mha_options.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- How a layer computes ------------------------------------------------------------------- */

/* MHA_CONTRACT of the linked library. */
MHA_API uint32_t mha_contract(void);

/* Instruction sets. The last four differ from the first ones in integer arithmetic alone. */
#define MHA_INSTRUCTION_SET_AUTO 0u   /* the best one that this machine has */
#define MHA_INSTRUCTION_SET_SCALAR 1u /* any machine; slow */
#define MHA_INSTRUCTION_SET_AVX2 2u   /* x86-64 with AVX2, FMA and F16C */
#define MHA_INSTRUCTION_SET_AVX512 3u /* x86-64 with AVX-512 F, CD, BW, VL and DQ */
#define MHA_INSTRUCTION_SET_NEON 4u   /* AArch64 */
#define MHA_INSTRUCTION_SET_AVX2_VNNI 5u    /* AVX2 with AVX-VNNI */
#define MHA_INSTRUCTION_SET_AVX512_VNNI 6u  /* AVX512 with AVX-512 VNNI */
#define MHA_INSTRUCTION_SET_NEON_DOTPROD 7u /* NEON with FEAT_DotProd; known on Linux only */
#define MHA_INSTRUCTION_SET_NEON_I8MM 8u    /* NEON_DOTPROD with FEAT_I8MM; known on Linux only */

/* Those that this build has and this machine can run: a bit (1u << MHA_INSTRUCTION_SET_X) each. */
MHA_API uint32_t mha_instruction_sets(void);
/* "auto", "scalar", "avx512_vnni", ...; of other numbers "unknown". Static memory. */
MHA_API const char *mha_instruction_set_name(uint32_t instruction_set);

/*
 * A matrix product of the caller's. It is called as cblas_sgemm(order, trans_a, trans_b, m, n, k,
 * alpha, a, lda, b, ldb, beta, c, ldc) with order 101 (row-major) and trans 111 (no transposition),
 * and computes c [m, n] = alpha * a [m, k] * b [k, n] + beta * c. alpha is 1 and beta 0, so c must
 * not be read. It is called on the thread that calls mha_forward, at the same time where several
 * do. Its threads and settings are its affair: with it, the projections use no mha_scheduler.
 */
typedef void (*mha_sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                          const float *a, int lda, const float *b, int ldb, float beta, float *c,
                          int ldc);

/* Memory for mha_layer_create. This struct is frozen. */
typedef struct mha_allocator {
  void *context; /* passed to both functions as it is */
  /* Returns memory aligned for any type, or NULL. mha_layer_create calls it once, on its thread. */
  void *(*allocate)(void *context, size_t bytes);
  /* Gets that memory once, in mha_layer_destroy or in a create that fails. */
  void (*release)(void *context, void *memory);
} mha_allocator;

/* How a layer computes, not what. NULL in place of the struct = all defaults. */
typedef struct mha_layer_options {
  size_t struct_size;           /* sizeof the struct */
  uint32_t instruction_set;     /* MHA_INSTRUCTION_SET_*; 0 = the best one that this machine has */
  uint32_t reserved;            /* 0 */
  mha_sgemm sgemm;              /* runs the projections; NULL = the library's own kernels */
  const mha_allocator *allocator; /* of mha_layer_create, which copies it; NULL = malloc, free */
} mha_layer_options;

/* ---- Types of weights, integers, gates ------------------------------------------------------ */

/*
 * Weights in fewer bits are less to read, which is what few rows spend their time on. Biases stay
 * float. Rounding is to nearest, ties to even. One weight that is not finite makes its column
 * (int8) or group (int4) NaN as a whole. A quantiser's codes are taken as they are: a weight is
 * code * scale.
 *     F16     2 bytes a weight, 11 significant bits. A finite one of 65520 or more is refused.
 *     BF16    2 bytes a weight, 8 significant bits, the range of float
 *     INT8    1 byte a weight, and a scale for each output column: its largest magnitude / 127.
 *             A quantiser's codes are int8_t, its scales [out].
 *     INT4    5/8 of a byte a weight: a scale for each output column and group of 32 inputs, of
 *             which the last may be shorter. The weight of the largest magnitude is -8 times it.
 *             A quantiser's need MHA_LAYOUT_OUT_IN; scales are [out, ceil(in / 32)]. A row is
 *             ceil(in / 2) bytes of two codes + 8 each, the earlier input in the low half. Strides
 *             count elements and are even.
 */

/*
 * What projections compute in. Integers need weights of INT8 or INT4. Input rows become codes: each
 * 64 numbers have a scale, their largest magnitude / 127 or / 32767. Products of codes add up
 * exactly. A number that is not finite makes its row NaN.
 */
#define MHA_ARITHMETIC_F32 0u
#define MHA_ARITHMETIC_INT8 1u  /* codes of 8 bits */
#define MHA_ARITHMETIC_INT16 2u /* codes of 16 bits, whose error is small beside the weights' */

/*
 * A gate: the context of a head times a function of x W_G + b_G, a projection of the query input
 * with a number for each element or for each head. A row of 0 stays 0. Without w_g, the columns of
 * each head's gate lie behind the head's own in w_q or w_qkv, and so in b_q or b_qkv (Qwen3-Next).
 */
#define MHA_GATE_NONE 0u
#define MHA_GATE_SIGMOID 1u  /* 1 / (1 + exp(-g)): Qwen3-Next; one for each head: Step */
#define MHA_GATE_SOFTPLUS 2u /* ln(1 + exp(g)) */

/* ---- Layers in the caller's memory, or in a file -------------------------------------------- */

/*
 * The bytes that mha_layer_pack needs: they depend on config, sgemm and whether there are w_k and
 * w_o. The packed layer serves every instruction set. Checks all but the contents of arrays, and
 * reads none of them.
 */
MHA_API mha_status mha_layer_pack_size(const mha_layer_config *config,
                                       const mha_layer_weights *weights,
                                       const mha_layer_options *options, size_t *bytes,
                                       mha_error *error);

/*
 * Packs the weights, whose arrays are not needed afterwards, into buffer, which is aligned to 64
 * bytes, as by aligned_alloc(64, size). The packed layer is its first mha_layer_pack_size bytes,
 * the same on every machine of this byte order, and can be copied and written to a file.
 */
MHA_API mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights,
                                  const mha_layer_options *options, void *buffer,
                                  size_t buffer_bytes, mha_error *error);

/* The bytes of storage that mha_layer_view needs for the layer object, without the weights. */
MHA_API size_t mha_layer_view_size(void);

/*
 * Makes *layer over a packed buffer, aligned to 64 bytes, such as a file in mmap, without a copy,
 * and places the layer object in storage, of any alignment. Both stay the caller's, unchanged as
 * long as the layer is used; there is nothing to destroy. Checks the header and bounds, in constant
 * time, not the weights. options->sgemm is given if the buffer was packed with one, and only then.
 */
MHA_API mha_status mha_layer_view(const void *buffer, size_t buffer_bytes,
                                  const mha_layer_options *options, void *storage,
                                  size_t storage_bytes, const mha_layer **layer, mha_error *error);

/* Checks what mha_layer_view checks, and the checksum of all weights. Reads the whole buffer. */
MHA_API mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error);

/* As mha_layer_pack_size, of a linear layer. */
MHA_API mha_status mha_linear_pack_size(const mha_linear_weights *weights,
                                        const mha_layer_options *options, size_t *bytes,
                                        mha_error *error);
/* As mha_layer_pack, of a linear layer. */
MHA_API mha_status mha_linear_pack(const mha_linear_weights *weights,
                                   const mha_layer_options *options, void *buffer,
                                   size_t buffer_bytes, mha_error *error);

/*
 * Fills *config, its struct_size set, with the shape of a layer, all defaults resolved. output_dim
 * is the width of y; to make such a layer without W_O once more, set it back to 0. Without W_K and
 * W_V, key_dim and value_dim are 0. A linear layer has num_heads 0, and its input_dim as query_dim.
 */
MHA_API mha_status mha_layer_shape(const mha_layer *layer, mha_layer_config *config,
                                   mha_error *error);

/* ---- More of the KV cache ------------------------------------------------------------------- */

/*
 * Kinds of caches. In a ring, position p lies at p % capacity, over an older one. capacity is a
 * multiple of 16 and more than window_left. A call needs MHA_CAUSAL and MHA_WINDOW_LEFT, q_start
 * NULL, and as many queries as keys for more than capacity - window_left rows at once. It has no
 * outputs per pair. Of a paged cache, capacity is a multiple of block_positions.
 */
#define MHA_CACHE_CONTIGUOUS 0u /* each sequence has room for capacity positions of its own */
#define MHA_CACHE_RING 1u       /* the last capacity positions of each sequence, for windows */
#define MHA_CACHE_PAGED 2u      /* blocks from a common pool, by mha_kv_cache_set_blocks */

/*
 * Where the values of a cache are. With IN_KEYS, the value of a position is the first head_dim_v
 * elements of its key, as stored: rotated, and of INT8 with the code and scale of the key. It is
 * there once: absorbed multi-head latent attention (DeepSeek V2, arXiv:2405.04434) has head_dim
 * 576, head_dim_v 512 and one kv head. What appends to such a cache gives keys alone, v NULL.
 */
#define MHA_CACHE_VALUES_OWN 0u     /* beside the keys */
#define MHA_CACHE_VALUES_IN_KEYS 1u /* in them, as said above */

/*
 * As mha_kv_cache_init, over a buffer that holds a cache, such as a copy or a file in mmap;
 * read-only if the cache is only read. Checks header, lengths and block tables, not the contents.
 */
MHA_API mha_status mha_kv_cache_view(void *buffer, size_t buffer_bytes, mha_kv_cache **cache,
                                     mha_error *error);

/* Fills *config, its struct_size set, with what a cache was made for, all defaults resolved. */
MHA_API mha_status mha_kv_cache_shape(const mha_kv_cache *cache, mha_kv_cache_config *config,
                                      mha_error *error);

/* The positions of a sequence, with those that a ring has overwritten. Writes on success only. */
MHA_API mha_status mha_kv_cache_length(const mha_kv_cache *cache, int64_t sequence, int64_t *length,
                                       mha_error *error);

/*
 * Forgets the positions of a sequence from length on, such as rejected tokens; 0 empties it. More
 * than it has is an error, and so is a later call whose window reaches what a ring overwrote.
 */
MHA_API mha_status mha_kv_cache_truncate(mha_kv_cache *cache, int64_t sequence, int64_t length,
                                         mha_error *error);

/*
 * Sets the blocks of a sequence of a paged cache, in the order of their positions. blocks [count]
 * is copied and names each block once; count is at most capacity / block_positions. Blocks that
 * hold positions must stay in their places. Sequences may share the blocks of a common prefix, into
 * which nothing can be appended then. The caller knows which blocks are free.
 */
MHA_API mha_status mha_kv_cache_set_blocks(mha_kv_cache *cache, int64_t sequence,
                                           const int32_t *blocks, int64_t count, mha_error *error);

/*
 * Replaces what sequence `to` has by the first length positions of sequence `from`, another one. In
 * a paged cache, `to` must have its blocks before; those that both tables name are not copied.
 */
MHA_API mha_status mha_kv_cache_copy_prefix(mha_kv_cache *cache, int64_t from, int64_t to,
                                            int64_t length, mha_error *error);

/*
 * Appends count rows to a sequence, without attention and on the calling thread: k [count,
 * num_kv_heads, head_dim] and v [count, num_kv_heads, head_dim_v], norm and rotation done already;
 * NULL will do with a count of 0, and v is NULL where values are in the keys. They are stored bit
 * for bit as a call stores them.
 */
MHA_API mha_status mha_kv_cache_append(mha_kv_cache *cache, int64_t sequence, int64_t count,
                                       const float *k, const float *v, mha_error *error);

/*
 * Reads count positions of a sequence, from first on, as the numbers that attention computes with,
 * in the shapes of mha_kv_cache_append; k or v may be NULL. Positions that the sequence does not
 * have, or a ring no longer, are an error. What is read of f32, f16 and bf16 can be appended again.
 */
MHA_API mha_status mha_kv_cache_read(const mha_kv_cache *cache, int64_t sequence, int64_t first,
                                     int64_t count, float *k, float *v, mha_error *error);

/* ---- Rotary position embedding --------------------------------------------------------------
 *
 * Rotary position embedding (RoPE; Su et al., arXiv:2104.09864) rotates pairs of elements of
 * queries and keys before the scores: (a, b) becomes (a cos - b sin, b cos + a sin). The angle of
 * pair i is position * theta[i], with theta[i] = base^(-2 i / dims), i = 0 .. dims / 2 - 1. Sines
 * and cosines come from tables, of mha_rope_tables or the caller's own.
 */

/* Which elements are a pair, counted from offset on. */
#define MHA_ROPE_HALF 0u        /* i and i + dims / 2: Llama as Hugging Face has it, GPT-NeoX */
#define MHA_ROPE_INTERLEAVED 1u /* 2 i and 2 i + 1: Llama as Meta has it, GPT-J */

/* A rotation. Calls only read the struct and all that it points to, and may share them. */
typedef struct mha_rope {
  size_t struct_size;    /* sizeof the struct */
  uint32_t style;        /* MHA_ROPE_*; 0 = HALF */
  uint32_t reserved;     /* 0 */
  int64_t dims;          /* elements of a head to rotate; even; 0 = head_dim - offset */
  int64_t num_positions; /* rows of the tables; >= 1; each position that is looked up is less */
  const float *cos;      /* [num_positions, dims / 2]: row p for position p, column i for pair i */
  const float *sin;      /* likewise */
  int64_t table_stride;  /* from one row of either table to the next; 0 = dims / 2 */
  /* [batch, n_q]: the position of each query; NULL = q_start, q_start + 1, ... Masks go by q_start
     all the same. Those of padding are not looked at, likewise below. */
  const int64_t *q_positions;
  /* [batch, rows of key]: the position of each key that comes with the call; NULL = counted from
     the sequence's first key, those in a cache included. */
  const int64_t *k_positions;
  int64_t offset; /* the first element of a head to rotate; MLA's are a head's last ones */
} mha_rope;

/*
 * Which angles mha_rope_tables computes. With dims and num_positions alone, they are Llama's.
 * linear_factor divides positions ("linear" in Hugging Face's rope_scaling; Chen et al.,
 * arXiv:2306.15595). With it or alone goes one of these, as Hugging Face has them:
 *     yarn      theta[i] * (1 - ramp + ramp / yarn_factor) (Peng et al., arXiv:2309.00071)
 *               ramp = (i - low) / (high - low), at least 0, at most 1; where low = high: 0 up to
 *               i = low, 1 beyond. low = floor(d(yarn_beta_fast)), at least 0; high =
 *               ceil(d(yarn_beta_slow)), at most dims - 1; d(beta) = dims * ln(original_positions /
 *               (2 pi beta)) / (2 ln(base)), the pair that turns beta times in these positions
 *     llama3    theta[i] * (1 - ramp + ramp / llama3_factor), where ramp = (high - t) / (high -
 *               low) of the two llama3_*_freq_factor, at least 0, at most 1, for a pair that turns
 *               t = original_positions * theta[i] / (2 pi) times
 *     longrope  theta[i] / pair_factors[i] (Ding et al., arXiv:2402.13753)
 *     dynamic   base * (1 + ntk_factor * (ntk_positions - original_positions) /
 *               original_positions)^(dims / (dims - 2)) for base, once ntk_positions is the greater
 * With M-RoPE, rows have positions in time, height and width, and pair i goes by one of them: the
 * first mrope_section[0] pairs by the first, and so on; interleaved by number i % 3, but by the
 * first where i >= 3 * mrope_section[i % 3]. Calls name rows as q_positions and k_positions.
 * Cosines and sines are multiplied by attention_factor. With "mscale" and "mscale_all_dim" of YaRN
 * and f = 0.1 ln(yarn_factor), it is (f mscale + 1) / (f mscale_all_dim + 1). LongRoPE's is
 * sqrt(1 + ln(s) / ln(original length)) where the context has become s > 1 times as long.
 */
typedef struct mha_rope_config {
  size_t struct_size;      /* sizeof the struct */
  int64_t dims;            /* elements of a head to rotate; even, 2 (dynamic NTK 4) .. 2^31 - 2 */
  int64_t num_positions;   /* rows of the tables; >= 1 */
  int64_t first_position;  /* position of row 0; all positions are less than 2^31 */
  double base;             /* 1 .. 2^64, with YaRN more than 1; 0 = 10000 */
  double linear_factor;    /* divides positions; 1 .. 2^31; 0 = 1 */
  double yarn_factor;      /* stretches slow pairs; 1 .. 2^31; 0 = no YaRN */
  double yarn_beta_fast;   /* pairs with more turns keep their angle; 2^-31 .. 2^31; 0 = 32 */
  double yarn_beta_slow;   /* with fewer are stretched in full; 2^-31 .. yarn_beta_fast; 0 = 1 */
  double llama3_factor;    /* stretches slow pairs as in Llama 3; 1 .. 2^31; 0 = none */
  double llama3_low_freq_factor;  /* turns of slow pairs; 2^-31 .. 2^31; 0 = 1 */
  double llama3_high_freq_factor; /* of fast pairs; more than those, to 2^31; 0 = 4 */
  double ntk_factor;       /* dynamic NTK; 1 .. 2^31; 0 = none */
  int64_t ntk_positions;   /* the length of the context now, 1 .. 2^31; with ntk_factor needed */
  const double *pair_factors; /* [dims / 2], 1/2 .. 2^31; NULL = no LongRoPE */
  int64_t original_positions; /* length in training; 1 .. 2^31; YaRN, Llama 3 and NTK need it */
  double attention_factor; /* 2^-31 .. 2^31; 0 = 1, with YaRN 0.1 ln(yarn_factor) + 1 */
  uint32_t yarn_unrounded; /* 1 = no floor and ceil ("truncate": false, gpt-oss); 0 or 1 */
  uint32_t reserved;       /* 0 */
  const int64_t *mrope_section;   /* [3]: pairs of each, together dims / 2; NULL = no M-RoPE */
  const int64_t *mrope_positions; /* [3, num_positions], 0 .. 2^31 - 1; needed with mrope_section */
  int64_t mrope_interleaved;      /* 0 = in order (Qwen2-VL), 1 = interleaved (Qwen3-VL) */
} mha_rope_config;

/*
 * Fills cos and sin, both [num_positions, dims / 2]: row r is for position first_position + r, or
 * those of mrope_positions, column i for pair i. Tables of the same angles have the same rows:
 * threads can fill a part each.
 *
 * The values are the same bits on every machine: those of the formulas, rounded to float, with
 * angles that are off by at most position * 2^-51 (more if a ramp is steep). Up to position 2^20,
 * that adds less than 0.01 units in the last place to numbers of 1/2 and more.
 */
MHA_API mha_status mha_rope_tables(const mha_rope_config *config, float *cos, float *sin,
                                   mha_error *error);

/* ---- Normalised queries, keys, values and context ------------------------------------------- */

/* Flags of a norm, combined by |. */
#define MHA_NORM_LAYER 1u      /* layer norm, not RMS norm (Cohere, StableLM) */
#define MHA_NORM_ALL_HEADS 2u  /* one norm over the columns of all heads together (OLMo 2) */
#define MHA_NORM_AFTER_ROPE 4u /* behind the rotation, not before it (Hunyuan, Llama 4) */
#define MHA_NORM_VALUES 8u     /* of values too: RMS norm of each head without weights (Gemma 4) */
#define MHA_NORM_AFTER_GATE 16u /* of the context: behind the layer's gate, not before it (Dory) */

/*
 * Norm of the queries, and of the keys before they are scored or stored, each head by itself
 * (Qwen3). Calls only read the struct and its arrays, which may hold anything, NaN included.
 *     RMS norm      x / sqrt(mean of x^2 + epsilon) * weight
 *     layer norm    (x - mean) / sqrt(mean of (x - mean)^2 + epsilon) * weight + bias
 * Gemma and others store w for a weight of 1 + w: the sum is to be given.
 *
 * And a norm of the context (BitNet, Kosmos-2), which needs a layer with W_O. Rows of 0 are
 * normalised too, such as those without keys: there biases reach y. Either norm may be left out.
 */
typedef struct mha_norm {
  size_t struct_size;    /* sizeof the struct */
  uint32_t flags;        /* MHA_NORM_*; 0 = RMS norm of each head, before the rotation */
  float epsilon;         /* > 0 and finite; 0 and all to head_stride 0 = that of context alone */
  const float *q_weight; /* [head_dim] for all heads, or [num_heads, head_dim]; NULL = 1 */
  const float *k_weight; /* likewise, [num_kv_heads, head_dim] */
  const float *q_bias;   /* of layer norm, in the shape of q_weight; NULL = 0 */
  const float *k_bias;   /* likewise */
  /* From a head's weights and biases to the next head's, at least head_dim: 0 = the same for all
     heads, but with MHA_NORM_ALL_HEADS head_dim, the only other choice there */
  int64_t head_stride;
  uint32_t context_flags; /* MHA_NORM_LAYER, ALL_HEADS and AFTER_GATE; 0 = RMS norm of each head */
  float context_epsilon;  /* > 0 and finite; 0 and all context_* 0 = no norm of the context */
  const float *context_weight; /* [head_dim_v] for all heads or [num_heads, head_dim_v]; NULL = 1 */
  const float *context_bias;   /* of layer norm, in the shape of context_weight; NULL = 0 */
  int64_t context_head_stride; /* as head_stride, with head_dim_v */
} mha_norm;

/* ---- Scores --------------------------------------------------------------------------------- */

/* Which keys the columns of mask and bias stand for; see below. */
#define MHA_COLUMNS_ALL_KEYS 0u
#define MHA_COLUMNS_NEW_KEYS 1u

/* What position groups do. */
#define MHA_GROUPS_WITHIN 0u /* of the keys that flags leave, only its own group: documents */
#define MHA_GROUPS_ALSO 1u   /* besides the keys that flags leave, its own group: image blocks */

/*
 * What changes scores and who attends to whom beyond the flags: each is optional, and all combine.
 * For the query at position p in row i and the key at position j, in this order:
 *
 *     q = q_scales[b, i] * q                       once rotated (Llama 4, Ministral 3)
 *     s = scale * q k^T
 *     s = softcap * tanh(s / softcap)              softcap (Gemma 2)
 *     s = s - alibi_slopes[head] * |j - p|         ALiBi (Press et al., arXiv:2108.12409)
 *     s = s + relative_bias[head, j - p]           by distance (T5, mha_t5_relative_bias)
 *     or s + relative_rows[b, head, i, j - p]      likewise, of each query (Conformer)
 *     s = s + bias[b, head, i, column of j]        additive mask
 *     s = -infinity where flags, groups or mask say so
 *     weight = exp(s) / (sum of exp(s) over the keys + exp(sinks[head]))
 *     lse = ln of that sum, with the sink; -infinity if all is masked
 *     context = head_scales[head] * (weights times values)
 *
 * This is the order of ONNX's Attention. A key whose score is -infinity takes no part. A bias or a
 * relative bias of -infinity excludes a key even if its score is NaN; with bias, keys are skipped
 * as with mask. Of mask and bias, what flags and lengths exclude is not read (with MHA_GROUPS_ALSO
 * it may be), and of bias what mask or groups exclude reaches no result. Calls only read the struct
 * and all it points to.
 *
 * mask and bias have the shape [batch, num_heads, n_q, columns]; one [n_q, columns] for all has
 * MHA_BROADCAST as batch and head stride. Rows are those of query, padding included, and all have
 * the same columns:
 *
 *     ALL_KEYS    as in attention_weights: the rows of key or, with a cache, the positions in it
 *                 after the call
 *     NEW_KEYS    always the rows of key that come with the call. The keys that the cache had
 *                 before have no column: no mask or group excludes them, even with GROUPS_WITHIN,
 *                 and their bias is 0. So a tree of drafted tokens needs a mask of its own rows
 *                 only. A ring, whose positions have no end, takes these alone, and no groups.
 *
 * Keys behind num_columns are masked.
 *
 * With chosen_keys, each query attends only to the keys of its list that flags and mask leave to
 * it (DeepSeek V3.2's and MiniMax's sparse attention). Entries are positions, or numbers of blocks
 * of chosen_block keys, in any order; -1 is none, and what comes twice counts once. A list for all
 * kv heads has MHA_BROADCAST as head stride. With chosen_block 1, bits are those of a call over the
 * keys gathered in ascending order. The cost grows with the keys of the lists, not with all keys.
 * But a single key of a cache with values of their own costs the reading of 16, which lie side by
 * side there. Not with groups or outputs per pair.
 */
typedef struct mha_score_options {
  size_t struct_size;        /* sizeof the struct */
  float softcap;             /* > 0 and finite; 0 = none */
  uint32_t bias_type;        /* of bias: MHA_TYPE_F32 or MHA_TYPE_F16; 0 = F32 */
  const float *alibi_slopes; /* [num_heads], finite; NULL = none */
  const float *sinks;        /* [num_heads], less than infinity, not scaled; NULL = none */
  const void *bias;          /* [batch, num_heads, n_q, columns]; NULL = none */
  int64_t bias_batch_stride, bias_head_stride, bias_row_stride; /* 0 = contiguous */
  const uint8_t *mask;       /* [batch, num_heads, n_q, columns]: 0 = takes no part; NULL = none */
  int64_t mask_batch_stride, mask_head_stride, mask_row_stride; /* likewise */
  uint32_t columns;          /* MHA_COLUMNS_* of mask, bias and kv_groups; 0 = ALL_KEYS */
  uint32_t groups;           /* MHA_GROUPS_*; 0 = WITHIN; without groups 0 */
  int64_t num_columns;       /* that rows of mask, bias and kv_groups have; 0 = as many as needed */
  /* Position groups: numbers [batch, n_q] and [batch, columns]; NULL = none. kv_groups NULL =
     q_groups, where columns are the rows of query. With MHA_GROUPS_ALSO, negative is no group. */
  const int32_t *q_groups;
  const int32_t *kv_groups;                  /* likewise */
  int64_t q_groups_stride, kv_groups_stride; /* of sequences; 0 = contiguous */
  const float *q_scales;     /* [batch, n_q], any; NULL = 1 */
  int64_t q_scales_stride;   /* from one sequence to the next; 0 = n_q */
  /* [num_heads, relative_left + 1 + relative_right], any: from j - p = -relative_left on; keys
     farther away have the first or the last number. NULL = none */
  const float *relative_bias;
  int64_t relative_left, relative_right;     /* distances that the table has; >= 0 */
  const float *head_scales;  /* [num_heads], finite; a head of 0 is padding throughout; NULL = 1 */
  /* [batch, num_heads, n_q, relative_left + 1 + relative_right], any: a relative bias with numbers
     of each query, made from q beforehand, in place of relative_bias; NULL = none */
  const float *relative_rows;
  int64_t relative_rows_batch_stride, relative_rows_head_stride; /* 0 = contiguous */
  int64_t relative_rows_row_stride;                              /* likewise */
  const int32_t *chosen_keys; /* [batch, num_kv_heads, n_q, num_chosen], as above; NULL = all */
  int64_t chosen_keys_batch_stride, chosen_keys_head_stride; /* 0 = contiguous */
  int64_t chosen_keys_row_stride;                            /* likewise */
  int64_t num_chosen;   /* entries of a list; >= 1 with chosen_keys */
  int64_t chosen_block; /* entry e is the keys e * chosen_block and on; 0 = 1: key e alone */
} mha_score_options;

/*
 * Fills slopes [num_heads], 1 .. 2^31 - 1, with the slopes of ALiBi. With n the greatest
 * power of two up to num_heads: 2^(-8 k / n) for k = 1 .. n, then 2^(-4 k / n), k = 1, 3, 5, ...
 */
MHA_API mha_status mha_alibi_slopes(int64_t num_heads, float *slopes, mha_error *error);

/*
 * Fills relative_bias [num_heads, left + 1 + right] from T5's embedding [num_buckets, num_heads]:
 * each distance has the bucket that Hugging Face's T5Attention gives it. num_buckets is 4 .. 2^30,
 * or from 2 on in decoders (is_bidirectional 0); 0 = 32. Distances of max_distance or more share
 * the last bucket; it is more than num_buckets / 4 (in decoders / 2), to 2^30; 0 = 128.
 */
MHA_API mha_status mha_t5_relative_bias(const float *embedding, int64_t num_buckets,
                                        int64_t max_distance, uint32_t is_bidirectional,
                                        int64_t num_heads, int64_t left, int64_t right,
                                        float *relative_bias, mha_error *error);

/* ---- States: keys in several places --------------------------------------------------------- */

/*
 * The keys of a sequence may lie in several places: processes, machines, caches. A call for each
 * part computes the states of all queries over the keys of that part; mha_states_merge joins those
 * of neighbours, mha_states_finish makes rows of context of the states over all keys.
 *
 * mha_attention_args.states is where a call writes them, in place of output. For each row of each
 * head they are the greatest score m, the sum l of exp(score - m), and o, the sum of exp(score - m)
 * times value; -infinity and zeros for a row without keys and for padding. output, lse, taps,
 * attention_weights, sinks and head_scales must be NULL then, output_type and output strides 0.
 *
 * kv_position says how many keys the sequences have before those of the call, or of its cache.
 * q_start, masks, ALiBi, relative biases and rope without positions count these too; q_start NULL
 * still puts the last query at the last key of the call. Columns of mask, bias and kv_groups, and
 * entries of chosen_keys, count the call's own keys alone.
 *
 * Merged and finished states have the bits of one call over all keys where each part has 256 * 2^k
 * keys, the last one at most so many, and neighbours are merged as in a tournament: parts 0 and 1,
 * 2 and 3, ..., then their results; one without a partner stays. Any other parts, merged in order,
 * and parts with chosen_keys give the same but for rounding; their bits are the same everywhere.
 */

/*
 * Writes merge(left, right) of so many rows to result, which may be left or right. All three are
 * [rows, head_dim_v + 2]; left has the earlier keys. rows is at least 1, or MHA_EMPTY.
 * instruction_set is an MHA_INSTRUCTION_SET_*; 0 = the best one that this machine has.
 */
MHA_API mha_status mha_states_merge(int64_t rows, int64_t head_dim_v, const float *left,
                                    const float *right, float *result, uint32_t instruction_set,
                                    mha_error *error);

/* States over all keys, and what is made of them. */
typedef struct mha_states_args {
  size_t struct_size;       /* sizeof the struct */
  int64_t batch;            /* as in mha_attention_args, likewise below */
  int64_t num_heads;        /* >= 1 */
  int64_t n_q;              /* rows of each head of each sequence */
  int64_t head_dim_v;       /* >= 1 */
  const float *states;      /* [batch, num_heads, n_q, head_dim_v + 2] */
  const float *sinks;       /* [num_heads], as in mha_score_options; NULL = none */
  const float *head_scales; /* likewise; NULL = 1 */
  void *output;             /* [batch, n_q, num_heads, head_dim_v]; NULL = not asked for */
  uint32_t output_type;     /* MHA_TYPE_F32, F16 or BF16; 0 = F32 */
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_*; 0 = the best one that this machine has */
  float *lse;               /* [batch, num_heads, n_q]; NULL = not asked for */
} mha_states_args;

/* Writes output and lse as mha_attention would. Like the merge, it runs on its thread alone. */
MHA_API mha_status mha_states_finish(const mha_states_args *args, mha_error *error);

/* ---- Choosing keys -------------------------------------------------------------------------- */

/*
 * For each query, the keys with the greatest index scores (DeepSeek V3.2's lightning indexer,
 * GLM-5):
 *
 *     sum over heads h of weights[b, i, h] * max(0, scale * q[b, i, h] k[b, j]^T)
 *
 * attention says what mha_attention_args says of q, k, flags, positions, norm, rope, cache and
 * execution. num_heads is that of the index heads, num_kv_heads 1 (or 0), for all share one key
 * head. v, score and all outputs must be NULL, kv_position 0; head_dim_v is not looked at. A cache
 * is not a ring; what appends to it needs MHA_CACHE_VALUES_IN_KEYS.
 *
 * Of the keys that flags and lengths leave to a query, it chooses num_chosen, or all if there are
 * fewer: of equal scores the first ones. A score of NaN is as one of -infinity.
 */
typedef struct mha_choose_keys_args {
  size_t struct_size;                  /* sizeof the struct */
  const mha_attention_args *attention; /* as said above */
  const float *weights;                /* [batch, n_q, num_heads] */
  int64_t weights_batch_stride;        /* 0 = n_q * row stride; or MHA_BROADCAST, likewise below */
  int64_t weights_row_stride;          /* 0 = num_heads */
  int64_t num_chosen;                  /* keys of a query at most; >= 1 */
  /* [batch, n_q, num_chosen]: positions of keys in ascending order, then -1; padding has -1 */
  int32_t *chosen_keys;
  /* [batch, n_q, n_kv], the columns of attention_weights: the scores, -infinity of keys that are
     not left to the query and in padding; NULL = not asked for */
  float *index_scores;
} mha_choose_keys_args;

/* The bytes of workspace that mha_choose_keys needs, as mha_forward_workspace says. */
MHA_API mha_status mha_choose_keys_workspace(const mha_choose_keys_args *args, size_t *bytes,
                                             mha_error *error);
/* Chooses keys. A query has the same scores and choice for any other queries and threads. */
MHA_API mha_status mha_choose_keys(const mha_choose_keys_args *args, void *workspace,
                                   size_t workspace_bytes, mha_error *error);

/* ---- Optional outputs ----------------------------------------------------------------------- */

/*
 * Optional outputs, contiguous, that show what a call computes on its way; NULL = not asked for. q,
 * k and v are for mha_forward only. Asking does not change other outputs. With a cache, n_kv is
 * that of attention_weights. Padding is 0, and -infinity in masked_scores.
 */
typedef struct mha_taps {
  size_t struct_size;   /* sizeof the struct */
  float *q;             /* [batch, n_q, num_heads, head_dim], as projected: before norm, rotation */
  float *k;             /* [batch, n_kv, num_kv_heads, head_dim], likewise; this call's rows only */
  float *v;             /* [batch, n_kv, num_kv_heads, head_dim_v], likewise */
  float *scores;        /* [batch, num_heads, n_q, n_kv]: q k^T, rotated, k as stored; not scaled */
  float *scaled_scores; /* [batch, num_heads, n_q, n_kv]: times scale */
  float *softcapped_scores; /* [batch, num_heads, n_q, n_kv]: after softcap, if there is one */
  float *masked_scores; /* [batch, num_heads, n_q, n_kv]: after all biases; -infinity if masked */
  float *context;       /* [batch, n_q, num_heads, head_dim_v]: before the gate and W_O */
} mha_taps;

/* ---- What a call will do -------------------------------------------------------------------- */

/* What runs the projections. */
#define MHA_BACK_END_NATIVE 0u /* the library's own kernels */
#define MHA_BACK_END_SGEMM 1u  /* the caller's sgemm */

/* How a call would run, and what it costs. */
typedef struct mha_call_info {
  size_t struct_size;          /* sizeof the struct, set by the caller */
  uint32_t instruction_set;    /* MHA_INSTRUCTION_SET_* of the kernels, never AUTO */
  uint32_t back_end;           /* MHA_BACK_END_* of the projections */
  uint32_t contract;           /* of the results: MHA_CONTRACT; 0 with an sgemm, or on a thread that
                                  does not round to nearest and keep subnormals */
  uint32_t num_threads;        /* the most tasks at once */
  size_t workspace_bytes;      /* as mha_forward_workspace or mha_attention_workspace says */
  size_t packed_bytes;         /* of the packed layer as stored, scales and biases included; or 0 */
  uint64_t operations;         /* multiplications and additions; of pairs, those that flags, lengths
                                  and head_scales leave to attend */
  /* Inputs, weights and outputs, and what is appended to a cache and attended to there: each once,
     as stored. Of padding, optional outputs alone count. With nothing to do 0, as operations. */
  uint64_t bytes;
} mha_call_info;

/*
 * Fills *info, its struct_size set, with how mha_forward(layer, args, ...) would run now: with a
 * cache, with what that holds. Reads the arrays of the fields under "Positions and the cache", and
 * score's alibi_slopes, sinks and head_scales.
 */
MHA_API mha_status mha_info(const mha_layer *layer, const mha_forward_args *args,
                            mha_call_info *info, mha_error *error);

/* As mha_info, for mha_attention(args, ...). */
MHA_API mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info,
                                      mha_error *error);

/* As mha_info, for mha_linear(layer, args, ...). Of the packed layer, bytes counts W_O and b_o. */
MHA_API mha_status mha_linear_info(const mha_layer *layer, const mha_linear_args *args,
                                   mha_call_info *info, mha_error *error);

#ifdef __cplusplus
}
#endif

#endif /* MHA_OPTIONS_H */
