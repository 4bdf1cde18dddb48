/*
 * mha: functions for rarer needs. mha.h includes this header; its rules hold here too.
 *
 *     mha_layer_options          instruction set, BLAS and memory of a layer
 *     mha_layer_pack, _view      layers in the caller's memory or in files
 *     mha_kv_cache_*             rings, paged caches, saved caches, appending and reading
 *     mha_outputs                lse, attention weights and every intermediate result
 *     mha_partials_merge         attention over distributed keys
 *     mha_choose_keys            the keys with the greatest index scores (DeepSeek V3.2)
 *     mha_forward_info           how a call will run, and what it costs
 */
#ifndef MHA_EXTRA_H
#define MHA_EXTRA_H

#ifndef MHA_H
#error "include mha.h, which includes mha_extra.h"
#endif

/* ---- How a layer computes ------------------------------------------------------------------- */

/*
 * Instruction sets. AVX2_VNNI to AVX512_AMX, and WASM_*_DOT, only add integer or BF16 arithmetic.
 * Linux has AMX for processes that asked for it before they call this library, by
 *     syscall(SYS_arch_prctl, 0x1023, 18);   (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
 */
#define MHA_INSTRUCTION_SET_AUTO 0u          /* the best one that this machine has */
#define MHA_INSTRUCTION_SET_SCALAR 1u        /* plain C++, on any machine; slow */
#define MHA_INSTRUCTION_SET_AVX2 2u          /* x86-64 with AVX2, FMA and F16C */
#define MHA_INSTRUCTION_SET_AVX512 3u        /* x86-64 with AVX-512 F, CD, BW, VL and DQ */
#define MHA_INSTRUCTION_SET_NEON 4u          /* AArch64 */
#define MHA_INSTRUCTION_SET_AVX2_VNNI 5u     /* AVX2 with AVX-VNNI */
#define MHA_INSTRUCTION_SET_AVX512_VNNI 6u   /* AVX512 with AVX-512 VNNI */
#define MHA_INSTRUCTION_SET_NEON_DOTPROD 7u  /* NEON with FEAT_DotProd; on Linux only */
#define MHA_INSTRUCTION_SET_NEON_I8MM 8u     /* NEON_DOTPROD with FEAT_I8MM; on Linux only */
#define MHA_INSTRUCTION_SET_AVX512_BF16 9u   /* AVX512_VNNI with AVX-512 BF16 */
#define MHA_INSTRUCTION_SET_AVX512_AMX 10u   /* AVX512_VNNI with AMX for BF16; on Linux only */
#define MHA_INSTRUCTION_SET_WASM_SIMD128 11u /* WebAssembly with SIMD; slow in floats */
#define MHA_INSTRUCTION_SET_WASM_RELAXED 12u /* WebAssembly with relaxed SIMD, fused multiply-add */
#define MHA_INSTRUCTION_SET_WASM_SIGNED_DOT 13u   /* WASM_RELAXED, dot products of signed bytes */
#define MHA_INSTRUCTION_SET_WASM_UNSIGNED_DOT 14u /* WASM_RELAXED, those of unsigned bytes */
#define MHA_INSTRUCTION_SET_RVV 15u          /* 64-bit RISC-V with vectors; by clang, on Linux */

/* Returns the sets that this build has and this machine runs: bit 1u << MHA_INSTRUCTION_SET_X. */
MHA_API uint32_t mha_instruction_sets(void);
/* Returns "auto", "scalar", "avx512_vnni" and so on, or "unknown". The string is static. */
MHA_API const char *mha_instruction_set_name(uint32_t instruction_set);
/* Returns MHA_CONTRACT of the linked library. */
MHA_API uint32_t mha_contract(void);

/*
 * A matrix product supplied by the caller, called as cblas_sgemm(order, trans_a, trans_b, m, n, k,
 * alpha, a, lda, b, ldb, beta, c, ldc) with order 101 (row-major) and trans 111 (no transposition):
 * c [m, n] = alpha * a [m, k] * b [k, n] + beta * c. alpha is 1 and beta 0, so it must not read c.
 * It runs on the thread that calls mha_forward; concurrent calls call it concurrently. Its
 * threading is up to you: projections by sgemm do not use mha_scheduler.
 */
typedef void (*mha_sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                          const float *a, int lda, const float *b, int ldb, float beta, float *c,
                          int ldc);

/* Supplies the memory of mha_layer_create. This struct is frozen. */
typedef struct mha_allocator {
  void *context; /* passed to both functions unchanged */
  /* Returns memory aligned for any type, or NULL. A create calls it once, on the same thread. */
  void *(*allocate)(void *context, size_t bytes);
  /* Releases that memory, in mha_layer_destroy or in a create that fails. */
  void (*release)(void *context, void *memory);
} mha_allocator;

/* How a layer computes. NULL in place of the struct = all defaults. */
typedef struct mha_layer_options {
  size_t struct_size;
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has */
  uint32_t reserved;
  mha_sgemm sgemm;                /* runs the projections; NULL = the library's kernels */
  const mha_allocator *allocator; /* for mha_layer_create, which copies it; NULL = malloc, free */
} mha_layer_options;

/* ---- Layers in the caller's memory or in a file --------------------------------------------- */

/*
 * Sets *bytes to the size of buffer that mha_layer_pack needs. It depends on config, sgemm and the
 * matrices that are given. Checks everything except the contents of arrays, and reads no array.
 */
MHA_API mha_status mha_layer_pack_size(const mha_layer_config *config,
                                       const mha_layer_weights *weights,
                                       const mha_layer_options *options, size_t *bytes,
                                       mha_error *error);

/*
 * Packs the weights into buffer, which is aligned to 64 bytes (as by aligned_alloc). The arrays of
 * weights are not needed afterwards. The packed layer is the first mha_layer_pack_size bytes of
 * buffer. It serves every instruction set, has the same bytes on every machine of this byte order,
 * and can be copied and saved to a file.
 */
MHA_API mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights,
                                  const mha_layer_options *options, void *buffer,
                                  size_t buffer_bytes, mha_error *error);

/* Returns the bytes of storage that mha_layer_view needs for the layer object. */
MHA_API size_t mha_layer_view_size(void);

/*
 * Makes *layer over a packed buffer, such as a mapped file, without copying. buffer is aligned to
 * 64 bytes; storage, of any alignment, receives the layer object. Both belong to the caller and
 * must stay unchanged while the layer is in use; there is nothing to destroy. Checks header and
 * bounds in constant time, but not the weights. options->sgemm must be set if the buffer was packed
 * with one, and only then.
 */
MHA_API mha_status mha_layer_view(const void *buffer, size_t buffer_bytes,
                                  const mha_layer_options *options, void *storage,
                                  size_t storage_bytes, const mha_layer **layer, mha_error *error);

/* Checks what mha_layer_view checks, and the checksum of all weights. Reads the whole buffer. */
MHA_API mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error);
/* Like mha_layer_pack_size, for a linear layer. */
MHA_API mha_status mha_linear_pack_size(const mha_linear_weights *weights,
                                        const mha_layer_options *options, size_t *bytes,
                                        mha_error *error);
/* Like mha_layer_pack, for a linear layer. */
MHA_API mha_status mha_linear_pack(const mha_linear_weights *weights,
                                   const mha_layer_options *options, void *buffer,
                                   size_t buffer_bytes, mha_error *error);

/*
 * Fills *config, whose struct_size is set, with the shape of a layer, all defaults resolved.
 * output_dim is the width of y; to create such a layer without W_O again, set it to 0. A layer
 * without W_K and W_V has key_dim and value_dim 0. A linear layer has num_heads 0; its input_dim is
 * query_dim.
 */
MHA_API mha_status mha_layer_shape(const mha_layer *layer, mha_layer_config *config,
                                   mha_error *error);

/* ---- More of the KV cache ------------------------------------------------------------------- */

/*
 * Kinds of caches:
 *   Ring     Position p is stored at p % capacity, over an older one. capacity is a multiple of 16
 *            and more than window_left. Calls need MHA_CAUSAL and MHA_WINDOW_LEFT, and
 *            q_first_positions NULL. A call that appends more than capacity - window_left
 *            rows needs as many queries as keys. Outputs per pair are not available.
 *   Paged    A sequence is a list of blocks from the cache's pool, set by mha_kv_cache_set_blocks.
 *            capacity is a multiple of block_positions. The caller keeps track of free blocks.
 *            Sequences may share blocks. To fork one: mha_kv_cache_set_blocks(to, the blocks of
 *            from that hold its first length positions), then mha_kv_cache_copy_prefix(from, to,
 *            length), which copies nothing. Before the next append to either, call
 *            mha_kv_cache_unshare: a shared block is never written.
 *   Pool     The blocks of a program that keeps lengths and block tables itself and reorders its
 *            sequences at every step (vLLM, SGLang). mha_kv_pool_init makes it over memory of the
 *            program; mha_sequences gives lengths and tables with each call. Bits are those of a
 *            paged cache. Who writes to which block is up to the program, but a call that would
 *            write to one twice is an error; calls that write to different blocks may run at once.
 *            num_sequences is the most of a call. A pool has no state: functions for one sequence
 *            refuse it, and there is nothing to save or view.
 */

/*
 * Where the values of a cache are. With IN_KEYS, the value of a position is the first head_dim_v
 * elements of its key, as stored (rotated, with an INT8 key's scale), and is stored only once.
 * Absorbed multi-head latent attention (DeepSeek V2, arXiv:2405.04434) has head_dim 576, head_dim_v
 * 512 and one kv head. Calls that append pass keys only; v must be NULL.
 */
#define MHA_CACHE_VALUES_OWN 0u         /* stored beside the keys */
#define MHA_CACHE_VALUES_IN_KEYS 0x201u /* the first elements of the keys */

/*
 * The memory of a pool. Block b of the keys begins b * k_block_stride bytes after k, and so on.
 * All parts of a block may lie in one page, with the same stride, or in arrays of their own; none
 * may overlap another. In a block lie
 *
 *     keys      [num_kv_heads, block_positions / 16, head_dim, 16], 16 positions side by side; with
 *               MHA_CACHE_VALUES_IN_KEYS [num_kv_heads, block_positions, ceil16(head_dim)]
 *     values    [num_kv_heads, block_positions, ceil16(head_dim_v)]
 *     scales    [num_kv_heads, block_positions]
 *
 * where ceil16 rounds up to a multiple of 16. Numbers are of k_type and v_type; those of INT4 have
 * 8 bytes for 16. Memory need not be initialised.
 */
typedef struct mha_kv_pool {
  size_t struct_size;

  /* The first block of each, aligned to 64 bytes */
  void *k;         /* keys */
  void *v;         /* values; NULL = MHA_CACHE_VALUES_IN_KEYS */
  float *k_scales; /* [num_blocks, num_kv_heads, block_positions], of INT8 keys; NULL = others */
  float *v_scales; /* [num_blocks, num_kv_heads, block_positions], of INT8 and INT4 values; NULL =
                      others */

  /* From block to block: multiples of 16 */
  int64_t k_block_stride;        /* in bytes; 0 = contiguous */
  int64_t v_block_stride;        /* in bytes; 0 = contiguous */
  int64_t k_scales_block_stride; /* in bytes; 0 = contiguous */
  int64_t v_scales_block_stride; /* in bytes; 0 = contiguous */
} mha_kv_pool;

/*
 * Makes a pool in buffer, as mha_kv_cache_init does. The buffer holds addresses alone; the memory
 * of the pool belongs to the caller and stays where it is while the cache is used.
 */
MHA_API mha_status mha_kv_pool_init(const mha_kv_cache_config *config, const mha_kv_pool *pool,
                                    void *buffer, size_t buffer_bytes, mha_kv_cache **cache,
                                    mha_error *error);

/*
 * Makes *cache over a buffer that holds a cache, such as a copy or a mapped file. The buffer may be
 * read-only if the cache is only read. Checks the header, lengths and block tables, but not the
 * contents.
 */
MHA_API mha_status mha_kv_cache_view(void *buffer, size_t buffer_bytes, mha_kv_cache **cache,
                                     mha_error *error);

/* Fills *config, whose struct_size is set, with the shape of a cache, all defaults resolved. */
MHA_API mha_status mha_kv_cache_shape(const mha_kv_cache *cache, mha_kv_cache_config *config,
                                      mha_error *error);
/* Sets *length to the positions of a sequence, including those that a ring has overwritten. */
MHA_API mha_status mha_kv_cache_length(const mha_kv_cache *cache, int64_t sequence, int64_t *length,
                                       mha_error *error);

/*
 * Shortens a sequence to its first length positions, for example to drop rejected tokens; 0 empties
 * it. Blocks stay in its table until mha_kv_cache_set_blocks leaves them out. After a ring is
 * truncated, a call whose window reaches overwritten positions is an error.
 */
MHA_API mha_status mha_kv_cache_truncate(mha_kv_cache *cache, int64_t sequence, int64_t length,
                                         mha_error *error);

/*
 * Sets the blocks of a sequence of a paged cache in the order of their positions. blocks [count] is
 * copied and has no duplicates; count is at most capacity / block_positions. Blocks that already
 * hold positions of the sequence must stay in their places.
 */
MHA_API mha_status mha_kv_cache_set_blocks(mha_kv_cache *cache, int64_t sequence,
                                           const int32_t *blocks, int64_t count, mha_error *error);

/*
 * Copy on write for a paged cache: if the last block of a sequence is partly filled and other
 * sequences share it, copies its positions to `block`, a free block of the pool, puts that in its
 * place and sets *used to 1. Otherwise changes nothing and sets *used to 0. block may be -1 if no
 * block is free; if one is needed, that is MHA_ERROR_CACHE_FULL.
 */
MHA_API mha_status mha_kv_cache_unshare(mha_kv_cache *cache, int64_t sequence, int32_t block,
                                        uint32_t *used, mha_error *error);

/*
 * Replaces the contents of sequence `to` by the first length positions of sequence `from`, which is
 * another one. In a paged cache, `to` must already have blocks for them; a block that both have is
 * not copied.
 */
MHA_API mha_status mha_kv_cache_copy_prefix(mha_kv_cache *cache, int64_t from, int64_t to,
                                            int64_t length, mha_error *error);

/*
 * Appends count rows to a sequence on the calling thread, without attention, and stores them bit
 * for bit as a call would. k is [count, num_kv_heads, head_dim] and v [count, num_kv_heads,
 * head_dim_v], already normalised and rotated. v is NULL for MHA_CACHE_VALUES_IN_KEYS.
 */
MHA_API mha_status mha_kv_cache_append(mha_kv_cache *cache, int64_t sequence, int64_t count,
                                       const float *k, const float *v, mha_error *error);

/*
 * Reads count positions of a sequence from position first on, as the numbers that attention uses,
 * in the shapes of mha_kv_cache_append; k or v may be NULL. Positions that the sequence does not
 * have, or that a ring has overwritten, are an error. Appending what was read from F32, F16 or BF16
 * stores the same bits again.
 */
MHA_API mha_status mha_kv_cache_read(const mha_kv_cache *cache, int64_t sequence, int64_t first,
                                     int64_t count, float *k, float *v, mha_error *error);

/* ---- Optional outputs ----------------------------------------------------------------------- */

/*
 * Optional outputs of a call, contiguous. Requesting one does not affect the others. q, k and
 * v belong to mha_forward, partials to mha_attention. With a cache, n_kv of the outputs per pair is
 * the longest length that the call's sequences have after it. In padding, masked_scores and lse are
 * -infinity and everything else is 0.
 */
typedef struct mha_outputs {
  size_t struct_size;

  /* NULL = not computed */
  float *lse;     /* [batch, num_heads, n_q]: ln of the sum of exp(score), sinks included */
  float *partials; /* [batch, num_heads, n_q, head_dim_v + 2], in place of output ("Partials") */
  float *q;       /* [batch, n_q, num_heads, head_dim], as projected: before norm and RoPE */
  float *k;       /* [batch, n_kv, num_kv_heads, head_dim], the same; only rows of this call */
  float *v;       /* [batch, n_kv, num_kv_heads, head_dim_v], the same; only rows of this call */
  float *context; /* [batch, n_q, num_heads, head_dim_v], before the gate and W_O */

  /* Per pair of query and key: [batch, num_heads, n_q, n_kv]; NULL = not computed */
  float *scores;            /* q k^T after RoPE, k as stored */
  float *scaled_scores;     /* times scale */
  float *softcapped_scores; /* after softcap */
  float *masked_scores;     /* after all biases; -infinity where masked */
  float *attention_weights; /* the softmax. Rows sum to 1; less with sinks; 0 if all is masked. */
} mha_outputs;

/* ---- Partials: distributed keys ------------------------------------------------------------- */

/*
 * The keys of a sequence may be distributed over processes, machines or caches. One call per part
 * computes the partial results, or partials, of all queries over the keys of that part;
 * mha_partials_merge joins those of neighbouring parts, and mha_partials_finish computes context
 * from the partials over all keys. src/docs/machines.md shows how, and in which order merged parts
 * have the bits of a single call.
 *
 * The partial of a row is its greatest score m, the sum l of exp(score - m), and o [head_dim_v],
 * the sum of exp(score - m) * value; -infinity and zeros for padding and rows without keys. A call
 * for partials has no output, no sinks or head_scales and no other optional outputs.
 *
 * kv_first_position is the number of keys before those of the call or its cache.
 * q_first_positions, masks, ALiBi, relative biases and RoPE count them; NULL still puts the last
 * query at the call's last key. Columns and entries of score_arrays count only the call's own keys.
 */

/*
 * Writes the partials of left and right together to result, which may be left or right. All are
 * [rows, head_dim_v + 2]; left has the earlier keys. rows is at least 1, or MHA_EMPTY.
 * instruction_set is an MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has.
 */
MHA_API mha_status mha_partials_merge(int64_t rows, int64_t head_dim_v, const float *left,
                                    const float *right, float *result, uint32_t instruction_set,
                                    mha_error *error);

/* The arguments of mha_partials_finish. batch, n_q and shapes are those of mha_attention_args. */
typedef struct mha_partials_args {
  size_t struct_size;
  int64_t batch;            /* >= 1, or MHA_EMPTY = nothing to do; 0 = 1 */
  int64_t num_heads;        /* 1 .. 2^31 - 1 */
  int64_t n_q;              /* >= 1, or MHA_EMPTY = nothing to do */
  int64_t head_dim_v;       /* 1 .. 2^31 - 1 */
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has */
  uint32_t reserved;
  const float *partials;    /* [batch, num_heads, n_q, head_dim_v + 2], over all keys */
  const float *sinks;       /* [num_heads], as in mha_score_options; NULL = none */
  const float *head_scales; /* [num_heads], as in mha_score_options; NULL = 1 */
  mha_output output;        /* [batch, n_q, num_heads, head_dim_v]; data NULL = not computed */
  float *lse;               /* [batch, num_heads, n_q]; NULL = not computed */
} mha_partials_args;

/* Writes output and lse as mha_attention would, on the calling thread. */
MHA_API mha_status mha_partials_finish(const mha_partials_args *args, mha_error *error);

/* ---- Choosing keys -------------------------------------------------------------------------- */

/*
 * Chooses, for each query, the num_chosen keys with the greatest index scores (the lightning
 * indexer of DeepSeek V3.2 and GLM-5), or all keys if there are fewer:
 *
 *     sum over heads h of weights[b, i, h] * max(0, scale * q[b, i, h] k[b, j]^T)
 *
 * Only keys that flags and lengths allow are candidates. Of equal scores, the first keys are
 * chosen; NaN counts as -infinity.
 */
typedef struct mha_choose_keys_args {
  size_t struct_size;
  /* q, k, flags, norm, rope, sequences, cache and execution. num_heads counts index heads, which
     share one key head: num_kv_heads is 1 or 0. v, score, score_arrays, output and outputs must not
     be given; kv_first_position is 0 and head_dim_v is ignored. A cache is not a ring; appending
     needs MHA_CACHE_VALUES_IN_KEYS. */
  const mha_attention_args *attention;
  mha_input weights;    /* [batch, n_q, num_heads], F32; strides.head must be 0 */
  int64_t num_chosen;   /* the most keys of a query; >= 1 */
  int32_t *chosen_keys; /* [batch, n_q, num_chosen]: ascending positions, then -1; -1 in padding */
  float *index_scores;  /* [batch, n_q, n_kv]: the scores, -infinity for other keys and in padding;
                           n_kv as in mha_outputs; NULL = not computed */
} mha_choose_keys_args;

/* Sets *bytes to the size of workspace that mha_choose_keys needs. */
MHA_API mha_status mha_choose_keys_workspace(const mha_choose_keys_args *args, size_t *bytes,
                                             mha_error *error);
/* Chooses keys. The choice for a query does not depend on other queries or threads. */
MHA_API mha_status mha_choose_keys(const mha_choose_keys_args *args, void *workspace,
                                   size_t workspace_bytes, mha_error *error);

/* ---- Costs ---------------------------------------------------------------------------------- */

/* What runs the projections. */
#define MHA_BACK_END_NATIVE 0u /* the library's kernels */
#define MHA_BACK_END_SGEMM 1u  /* the caller's sgemm */

/* How a call would run, and what it would cost. */
typedef struct mha_call_info {
  size_t struct_size;       /* set by the caller */
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_* of the kernels, never AUTO */
  uint32_t back_end;        /* MHA_BACK_END_* of the projections */
  uint32_t contract;        /* MHA_CONTRACT of the results; 0 with an sgemm, or if the thread does
                               not round to nearest and keep subnormals */
  uint32_t num_threads;     /* the most tasks at once */
  size_t workspace_bytes;   /* as mha_forward_workspace or mha_attention_workspace says */
  size_t packed_bytes;      /* of the packed layer, scales and biases included; 0 without a layer */
  uint64_t operations;      /* multiplications and additions, without pairs of query and key that
                               flags, lengths or head_scales exclude */
  uint64_t bytes;           /* inputs, weights, outputs, and what is appended to and read from a
                               cache, each once and as stored. Padding counts only in optional
                               outputs. */
} mha_call_info;

/*
 * Fills *info, whose struct_size is set, with how mha_forward(layer, args, ...) would run now.
 * Reads the arrays of sequences and score, chosen_keys and the lengths in the cache. operations and
 * bytes are 0 for an empty call.
 */
MHA_API mha_status mha_forward_info(const mha_layer *layer, const mha_forward_args *args,
                            mha_call_info *info, mha_error *error);
/* Like mha_forward_info, for mha_attention(args, ...). */
MHA_API mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info,
                                      mha_error *error);
/* Like mha_forward_info, for mha_linear(layer, args, ...); of a layer with heads, W_O counts. */
MHA_API mha_status mha_linear_info(const mha_layer *layer, const mha_linear_args *args,
                                   mha_call_info *info, mha_error *error);

#endif /* MHA_EXTRA_H */
