/*
 * mha - multi-head attention for CPUs
 *
 * One call takes x to y, where attend is softmax(scale * q k^T) v for each head (Vaswani et al., arXiv:1706.03762):
 *
 *     x [batch, n, query_dim] --W_Q|W_K|W_V--> q | k | v --attend--> context [batch, n, num_heads * head_dim_v] --W_O--> y
 *
 * The library allocates nothing during a call (mha_layer_create is the one function that allocates), starts no thread, takes no
 * lock, never prints, never aborts. Memory and threads belong to the caller. Everything that sizes, shapes, strides and NULLs can tell is
 * checked before the first write: on an error the output arrays and the cache are untouched. The results are the same bits for any batch,
 * chunking, number of threads and instruction set, and for any way of cutting a sequence into calls over a cache (src/kernels/CONTRACT.md),
 * except through a caller's BLAS.
 *
 * Conventions that hold for everything below:
 * - Matrices are row-major arrays, of float where nothing else is said. A shape such as [batch, n, dim] names the extents from the
 *   outermost to the innermost, whose stride is always 1. Strides count elements, not bytes. A stride of 0 means: contiguous, as the shape
 *   says; arrays without a stride field are contiguous. No pointer needs more alignment than its type has, but for the buffers of packed
 *   layers and of caches: 64 bytes.
 * - Dimensions, counts, positions and strides are int64_t; a negative one is an error. So is a row or head stride that is shorter than the
 *   innermost extent. The strides of an output must nest, each stepping over all that the smaller ones reach. Sizes in bytes are size_t.
 * - The first field of an input struct is struct_size = sizeof the struct. All other fields may be zero, and zero is the default
 *   where it is no meaningful value itself: `mha_forward_args args = { .struct_size = sizeof args, ... }`. Structs can only grow at
 *   their end, so programs compiled against an older header keep working.
 * - Pointers in a struct are borrowed for the call. Outputs must not overlap inputs, the workspace, a cache or each other, nor may inputs
 *   overlap a cache that is appended to; inputs may overlap each other.
 *   That cannot be checked, nor that a pointer has the memory which shape and strides say (strides in bytes, say, reach far outside).
 * - Every function that can fail returns a mha_status (0 = MHA_OK) and takes an optional mha_error *, which it always writes.
 * - Every function may be called from any thread at any time, as long as no two calls under way write the same memory (outputs,
 *   workspace, packed buffer under construction, a cache that is appended to or changed). A mha_layer is immutable: any number of threads
 *   may use one.
 */
#ifndef MHA_H
#define MHA_H

#include <stddef.h>
#include <stdint.h>

/* The version of this header, and of the library that it came with; a library with the same major number can take its place. */
#define MHA_VERSION_MAJOR 0
#define MHA_VERSION_MINOR 1
#define MHA_VERSION_PATCH 0

/* The arithmetic contract this header describes (src/kernels/CONTRACT.md). Bits never change within a number; 0 = no contract. */
#define MHA_CONTRACT 2

/* Stands before each function: it is exported. On Windows, users of the shared library define MHA_SHARED. */
#if defined(_WIN32) && defined(MHA_SHARED)
#ifdef MHA_BUILDING
#define MHA_API __declspec(dllexport)
#else
#define MHA_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define MHA_API __attribute__((visibility("default")))
#else
#define MHA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status and errors ------------------------------------------------------------------------------------------------------ */

/*
 * One of MHA_OK and MHA_ERROR_*. The numbers never change; new ones may be added. Up to MHA_ERROR_TOO_LARGE they are about arguments, and
 * any function that takes such arguments may return them; the others belong to what is named beside them.
 */
typedef uint32_t mha_status;

#define MHA_OK 0u                     /* success */
#define MHA_ERROR_NULL_POINTER 1u     /* a pointer that is needed is NULL */
#define MHA_ERROR_STRUCT_SIZE 2u      /* struct_size is too small, or larger with fields set that this version does not know */
#define MHA_ERROR_INVALID_VALUE 3u    /* a field has a value outside its range, or two fields contradict each other */
#define MHA_ERROR_SHAPE 4u            /* dimensions that do not fit together */
#define MHA_ERROR_TOO_LARGE 5u        /* a size overflows, here or in the caller's BLAS */
#define MHA_ERROR_BUFFER_TOO_SMALL 6u /* a workspace, packed buffer, cache or storage to write to is smaller than its query says */
#define MHA_ERROR_OUT_OF_MEMORY 7u    /* mha_layer_create: the allocator returned NULL */
#define MHA_ERROR_INSTRUCTION_SET 8u  /* where one is chosen: this machine or build does not have it */
#define MHA_ERROR_PACKED_FORMAT 9u    /* a packed buffer is none, is truncated, misaligned, of another version or back end */
#define MHA_ERROR_PACKED_CHECKSUM 10u /* mha_layer_verify: the weights are not what was packed */
#define MHA_ERROR_OUT_OF_RANGE 11u    /* mha_layer_create, mha_layer_pack: a finite weight that f16 cannot hold */
#define MHA_ERROR_CACHE_FULL 12u      /* calls and mha_kv_cache_*: a sequence of a cache has no room, or no block, for more positions */
#define MHA_ERROR_CACHE_FORMAT 13u    /* a cache or its buffer is none, is truncated, misaligned, damaged or of another version */

/* Filled by every function that can fail and is given one. The struct is frozen at 256 bytes. */
typedef struct mha_error {
  uint32_t status;   /* the same value as returned */
  uint32_t argument; /* which parameter of the function was at fault, 1 = the first; 0 = none (success, out of memory) */
  char message[248]; /* one sentence, what was wrong and what would be right; "" on success; always 0-terminated */
} mha_error;

/* The name of a status, such as "MHA_ERROR_SHAPE". Never NULL: "unknown mha_status" for any other number. Static memory. */
MHA_API const char *mha_status_string(mha_status status);

/* ---- Version and machine ---------------------------------------------------------------------------------------------------- */

/* 10000 * major + 100 * minor + patch of the library that is linked, which may be newer than this header. */
MHA_API uint32_t mha_version(void);

/* MHA_CONTRACT of the library that is linked. */
MHA_API uint32_t mha_contract(void);

/* Instruction sets that the kernels are written for. */
#define MHA_INSTRUCTION_SET_AUTO 0u   /* the best one that this machine has */
#define MHA_INSTRUCTION_SET_SCALAR 1u /* any machine; slow */
#define MHA_INSTRUCTION_SET_AVX2 2u   /* x86-64 with AVX2, FMA and F16C */
#define MHA_INSTRUCTION_SET_AVX512 3u /* x86-64 with AVX-512 F, CD, BW, VL and DQ */
#define MHA_INSTRUCTION_SET_NEON 4u   /* AArch64 */

/* The sets that this build contains and this machine (operating system included) can run: bit (1u << MHA_INSTRUCTION_SET_X) each. */
MHA_API uint32_t mha_instruction_sets(void);

/* "scalar", "avx2", "avx512", "neon"; "auto" for 0; "unknown" for any other number. Never NULL. Static memory. */
MHA_API const char *mha_instruction_set_name(uint32_t instruction_set);

/* ---- Threads ---------------------------------------------------------------------------------------------------------------- */

/*
 * The caller's threads. A call without a scheduler runs on the calling thread alone; with one it calls parallel_for a few times, from the
 * calling thread, unless there is too little to share out.
 *
 * parallel_for(context, count, task, task_context) must run task(task_context, index) exactly once for each index in 0 .. count - 1
 * and return when all have returned; 1 <= count <= num_threads. Tasks must see what was written before the call of parallel_for, and the
 * caller afterwards what they wrote. It may use any threads, in any order, even the calling thread one after the other: tasks never wait
 * for each other and never call parallel_for. Work is balanced inside, so that tasks may start late. It cannot fail, and must not throw.
 * Calls that run at the same time with the same scheduler call it at the same time.
 *
 * The result does not depend on any of this, if the threads have the default floating-point environment: round to nearest, subnormal
 * numbers not flushed to zero.
 */
typedef struct mha_scheduler {
  void *context;        /* passed to parallel_for as it is */
  uint32_t num_threads; /* the most tasks to run at once, at least 1; each has its slice of the workspace */
  uint32_t reserved;    /* 0 */
  /* Runs task for each index below count, as said above. */
  void (*parallel_for)(void *context, uint32_t count, void (*task)(void *task_context, uint32_t index), void *task_context);
} mha_scheduler;

/* ---- Types ------------------------------------------------------------------------------------------------------------------ */

/* Types of stored numbers. Each field says which ones it takes. An array of f16 or bf16 is one of uint16_t with the bits of the numbers. */
#define MHA_TYPE_F32 0u  /* float */
#define MHA_TYPE_F16 1u  /* IEEE binary16 */
#define MHA_TYPE_BF16 2u /* the upper half of a float */
#define MHA_TYPE_INT8 3u /* -127 .. 127 times a scale */
#define MHA_TYPE_INT4 4u /* -8 .. 7 times a scale; weights only */

/* ---- The layer: weights, packed ------------------------------------------------------------------------------------------------
 *
 * A layer is the packed weights and their shape. Packing puts W_Q|W_K|W_V (and W_O) into the order in which the kernels read them;
 * the same packed bytes serve every instruction set. Three ways to get a layer:
 *
 *     mha_layer_create    packs into memory that it allocates; free with mha_layer_destroy
 *     mha_layer_pack      packs into the caller's buffer, which can be written to a file; then
 *     mha_layer_view      makes a layer over such a buffer without copying, for instance over a file in mmap
 */
typedef struct mha_layer mha_layer; /* opaque; immutable once it is made */

/*
 * The shape of a layer. Only query_dim, num_heads and, where it is not query_dim / num_heads, head_dim are needed.
 * No dimension, and no num_heads * head_dim, may be larger than 2^31 - 1 (MHA_ERROR_TOO_LARGE); likewise in mha_attention_args.
 */
typedef struct mha_layer_config {
  size_t struct_size;   /* sizeof the struct */
  int64_t query_dim;    /* width of a row of the query input (d_in, embed_dim); >= 1 */
  int64_t num_heads;    /* query heads; >= 1 */
  int64_t num_kv_heads; /* key and value heads, a divisor of num_heads (grouped-query attention); 0 = num_heads */
  int64_t head_dim;     /* width of a head's queries and keys; 0 = d_out / num_heads, which must divide */
  int64_t head_dim_v;   /* width of a head's values; 0 = head_dim */
  int64_t d_out;        /* num_heads * head_dim, to derive head_dim from; 0 = query_dim where head_dim is 0. Given both, they must agree. */
  int64_t key_dim;      /* width of a row of the key input; 0 = query_dim */
  int64_t value_dim;    /* width of a row of the value input; 0 = key_dim */
  int64_t output_dim;   /* width of an output row, where there is a W_O; 0 = query_dim. Must be 0 without W_O. */
  float scale;          /* factor of the scores; 0 = 1 / sqrt(head_dim); must be finite */
  uint32_t weight_type; /* MHA_TYPE_*: how the weights are kept; 0 = f32. Biases stay float. Must be 0 with an sgemm. See below. */
} mha_layer_config;

/*
 * Weights in fewer bits are less to read, and reading them is what a call on few rows spends its time with. Rounding is to the nearest,
 * ties to even; CONTRACT.md, sections 2 and 4, says each operation.
 *     MHA_TYPE_F16     2 bytes a weight, 11 significant bits; a finite weight of 65520 or more is MHA_ERROR_OUT_OF_RANGE
 *     MHA_TYPE_BF16    2 bytes a weight, 8 significant bits, the range of float
 *     MHA_TYPE_INT8    1 byte a weight and a scale for each output column: the column's largest magnitude / 127
 *     MHA_TYPE_INT4    5/8 of a byte a weight: a scale for each output column and 32 inputs, whose weight of the largest magnitude is
 *                      -8 times it; the last group of a column may be shorter
 * A column (int8) or group (int4) with a weight that is not finite is NaN as a whole.
 */

/* How weight matrices lie in memory. A row is what is contiguous as stored: with OUT_IN it has "in" elements. */
#define MHA_LAYOUT_IN_OUT 0u /* W [in, out], y = x W:   x @ W, GPT-2's Conv1D */
#define MHA_LAYOUT_OUT_IN 1u /* W [out, in], y = x W^T: PyTorch's nn.Linear and in_proj_weight */

/*
 * The weights. Shapes below are for MHA_LAYOUT_IN_OUT; with MHA_LAYOUT_OUT_IN each matrix is transposed (w_qkv: W_Q, W_K and W_V one
 * below the other). The columns of W_Q are head 0's head_dim columns, then head 1's, and so on; so are those of W_K and W_V, and the rows
 * of W_O.
 *
 * W_Q, W_K and W_V are given in exactly one of three forms:
 *     w_q, w_k, w_v                      three matrices
 *     w_qkv                              one fused matrix; needs key_dim = value_dim = query_dim
 *     w_q_heads, w_k_heads, w_v_heads    one matrix per head
 *
 * Matrices given as f32, f16 or bf16 are converted to weight_type. Those of a quantiser are taken as they are, with their scales: int8
 * where weight_type is MHA_TYPE_INT8, int4 where it is MHA_TYPE_INT4. A weight is code * scale.
 *     int8    codes are int8_t
 *     int4    with MHA_LAYOUT_OUT_IN only: a row is ceil(in / 2) bytes, of which each holds two codes + 8, that of the earlier input in
 *             the low half. Strides count elements all the same, and are even; 0 = whole bytes.
 *
 * The arrays are read during mha_layer_pack and mha_layer_create only.
 */
typedef struct mha_layer_weights {
  size_t struct_size;            /* sizeof the struct */
  uint32_t layout;               /* MHA_LAYOUT_*, of all matrices below */
  uint32_t type;                 /* MHA_TYPE_* of the matrices; 0 = f32 */
  const void *w_q;               /* [query_dim, num_heads * head_dim] */
  const void *w_k;               /* [key_dim, num_kv_heads * head_dim] */
  const void *w_v;               /* [value_dim, num_kv_heads * head_dim_v] */
  const void *w_qkv;             /* [query_dim, num_heads * head_dim + num_kv_heads * head_dim + num_kv_heads * head_dim_v] */
  const float *const *w_q_heads; /* num_heads pointers to [query_dim, head_dim]; f32 only, likewise below */
  const float *const *w_k_heads; /* num_kv_heads pointers to [key_dim, head_dim] */
  const float *const *w_v_heads; /* num_kv_heads pointers to [value_dim, head_dim_v] */
  const void *w_o;               /* [num_heads * head_dim_v, output_dim]; NULL = no output projection: y is the merged heads */
  const float *b_q;              /* [num_heads * head_dim]; NULL = no bias, here and below */
  const float *b_k;              /* [num_kv_heads * head_dim] */
  const float *b_v;              /* [num_kv_heads * head_dim_v] */
  const float *b_qkv;            /* b_q, b_k, b_v one after the other; instead of these three, with any form of the weights */
  const float *b_o;              /* [output_dim]; only with w_o */
  int64_t w_q_stride;            /* from one row of w_q (or of each of w_q_heads) to the next; 0 = contiguous; likewise below */
  int64_t w_k_stride;            /* of w_k, or of each of w_k_heads */
  int64_t w_v_stride;            /* of w_v, or of each of w_v_heads */
  int64_t w_qkv_stride;          /* of w_qkv */
  int64_t w_o_stride;            /* of w_o */
  const float *w_q_scales;       /* of w_q given as INT8: [num_heads * head_dim], a scale for each output column; given as INT4:
                                    [num_heads * head_dim, ceil(query_dim / 32)], for each column and 32 inputs. Else NULL. Likewise
                                    below, for the columns and inputs of each matrix. */
  const float *w_k_scales;       /* [num_kv_heads * head_dim], or [num_kv_heads * head_dim, ceil(key_dim / 32)] */
  const float *w_v_scales;       /* [num_kv_heads * head_dim_v], or [num_kv_heads * head_dim_v, ceil(value_dim / 32)] */
  const float *w_qkv_scales;     /* of the columns of w_q, w_k and w_v one after the other; INT4: [.., ceil(query_dim / 32)] */
  const float *w_o_scales;       /* [output_dim], or [output_dim, ceil(num_heads * head_dim_v / 32)] */
} mha_layer_weights;

/*
 * A matrix product of the caller's, called as cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) with
 * order 101 (row-major) and trans 111 (none): c [m, n] = alpha * a [m, k] * b [k, n] + beta * c. It must be callable from the thread
 * that calls mha_forward, and with it the projections use no mha_scheduler: its threads are its own. The library touches none of its
 * global settings.
 */
typedef void (*mha_sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                          int ldb, float beta, float *c, int ldc);

/* Memory for mha_layer_create. allocate returns bytes of memory aligned for any type, or NULL; release gets what allocate returned. */
typedef struct mha_allocator {
  void *context;                                  /* passed to both as it is */
  void *(*allocate)(void *context, size_t bytes); /* called once by mha_layer_create, from its thread */
  void (*release)(void *context, void *memory);   /* called once by mha_layer_destroy, or by mha_layer_create if it fails later */
} mha_allocator;

/* Choices about how a layer computes, not what. NULL in place of the struct = all defaults. */
typedef struct mha_layer_options {
  size_t struct_size;             /* sizeof the struct */
  uint32_t instruction_set;       /* MHA_INSTRUCTION_SET_*; one that this machine lacks is an error, never a fallback */
  uint32_t reserved;              /* 0 */
  mha_sgemm sgemm;                /* runs the projections; NULL = the library's own kernels */
  const mha_allocator *allocator; /* mha_layer_create only, copied into the layer; NULL = malloc and free */
} mha_layer_options;

/*
 * The bytes that mha_layer_pack needs. Everything but the arrays is checked, and none of these is read. The size depends on config, on
 * whether there is a w_o, and on whether options has an sgemm; not on the instruction set, which this machine need not have: a layer
 * can be packed for another one. Writes *bytes on success only.
 */
MHA_API mha_status mha_layer_pack_size(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                                       size_t *bytes, mha_error *error);

/*
 * Packs the weights into buffer, which must be aligned to 64 bytes (aligned_alloc(64, size): the size is a multiple of 64). On success the
 * first mha_layer_pack_size bytes are the packed layer: position-independent, the same on every machine of this byte order, ready to be
 * copied or written to a file.
 */
MHA_API mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                                  void *buffer, size_t buffer_bytes, mha_error *error);

/* The bytes of storage that mha_layer_view needs for the layer object (not the weights). */
MHA_API size_t mha_layer_view_size(void);

/*
 * Makes *layer over a packed buffer (aligned to 64 bytes), which is borrowed: it must stay unchanged as long as the layer is used.
 * The object itself lies in storage (of any alignment), which is the caller's too and must stay as long; there is nothing to destroy, and
 * mha_layer_destroy does nothing to it. Checks the header and all bounds in constant time; does not read the weights. options->sgemm must
 * be given exactly if the buffer was packed with one. *layer is written on success only.
 */
MHA_API mha_status mha_layer_view(const void *buffer, size_t buffer_bytes, const mha_layer_options *options, void *storage,
                                  size_t storage_bytes, const mha_layer **layer, mha_error *error);

/* Like the checks of mha_layer_view, and in addition compares the checksum of all weights. Reads the whole buffer. */
MHA_API mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error);

/*
 * Packs the weights into one block of memory that it allocates, and makes *layer over it. *layer is NULL after an error. The weights
 * may be freed afterwards. The layer belongs to the caller, who frees it by mha_layer_destroy when no call uses it any more.
 * Without an allocator, a block of 4 MiB or more asks the system for huge pages (on Linux), by an advice that may remain without effect.
 */
MHA_API mha_status mha_layer_create(const mha_layer_config *config, const mha_layer_weights *weights, const mha_layer_options *options,
                                    mha_layer **layer, mha_error *error);

/* Frees a layer made by mha_layer_create. NULL is allowed. */
MHA_API void mha_layer_destroy(mha_layer *layer);

/* Fills config (whose struct_size must be set) with the shape of a layer, all defaults resolved; output_dim is the width of y. */
MHA_API mha_status mha_layer_shape(const mha_layer *layer, mha_layer_config *config, mha_error *error);

/* ---- The KV cache ---------------------------------------------------------------------------------------------------------------
 *
 * Keys and values of earlier calls, so that a token costs one row of projections and one pass over what is stored. A cache lies in one
 * buffer of the caller's, which is all of it: position-independent and the same bytes for every instruction set, so that it can be copied,
 * written to a file, and viewed again. It holds several sequences, each with its own length. Keys are stored as the scores need them:
 * rotated already, where there is a rotation.
 *
 * Calls change a cache if they append to it, as do the functions below that take it without const; all others only read it. What changes
 * it must not run at the same time as anything else with the same cache, not even for other sequences; what only reads it may, on any
 * number of threads. A call that fails leaves the cache as it was, byte for byte.
 *
 * The buffer, each part on a border of 64 bytes: a header of 256 bytes with the sizes, the versions and a checksum of itself; the lengths;
 * block tables (paged); then, where a block is a sequence of capacity positions rounded up to 16, or one of the pool,
 *     keys      [block][kv head][positions / 16][head_dim][16]                    of k_type; 16 positions side by side
 *     k scales  [block][kv head][positions] float                                 INT8 only
 *     values    [block][kv head][positions][head_dim_v rounded up to 16]          of v_type
 *     v scales  [block][kv head][positions] float                                 INT8 only
 */
typedef struct mha_kv_cache mha_kv_cache; /* opaque; lies in the caller's buffer */

#define MHA_CACHE_CONTIGUOUS 0u /* each sequence has capacity positions of its own */
#define MHA_CACHE_RING 1u       /* for sliding windows: position p lies at p % capacity, over an older one; positions go on growing */
#define MHA_CACHE_PAGED 2u      /* blocks of positions from a common pool, by a table for each sequence (mha_kv_cache_set_blocks) */

/* What a cache holds. */
typedef struct mha_kv_cache_config {
  size_t struct_size;      /* sizeof the struct */
  int64_t num_sequences;   /* sequences, numbered from 0; >= 1 */
  int64_t capacity;        /* most positions of a sequence; >= 1. Of a ring: the last positions, which it keeps; a multiple of 16, more than
                              window_left. Paged: a multiple of block_positions. */
  int64_t num_kv_heads;    /* as the layer's, with its default resolved; >= 1 */
  int64_t head_dim;        /* as the layer's; >= 1 */
  int64_t head_dim_v;      /* as the layer's; 0 = head_dim */
  uint32_t k_type;         /* how keys are kept: MHA_TYPE_F32, F16, BF16 or INT8 (a scale for each position and kv head). Rounding is to the
                              nearest, ties to even; CONTRACT.md, section 2, says each operation. */
  uint32_t v_type;         /* likewise, for values */
  uint32_t kind;           /* MHA_CACHE_* */
  uint32_t reserved;       /* 0 */
  int64_t block_positions; /* positions of a block: 16, 32, 64, 128 or a multiple of 256. Paged only, else 0. */
  int64_t num_blocks;      /* blocks of the pool, numbered from 0; >= 1. Paged only, else 0. */
} mha_kv_cache_config;

/* The bytes of buffer that a cache needs, a multiple of 64. Writes *bytes on success only. */
MHA_API mha_status mha_kv_cache_size(const mha_kv_cache_config *config, size_t *bytes, mha_error *error);

/*
 * Makes an empty cache in buffer, which must be aligned to 64 bytes and have at least mha_kv_cache_size bytes. The buffer remains the
 * caller's and must stay as long as the cache is used; *cache points into it, and there is nothing to destroy. The room for keys and
 * values is not written; a paged cache has no blocks yet (mha_kv_cache_set_blocks). *cache is written on success only.
 */
MHA_API mha_status mha_kv_cache_init(const mha_kv_cache_config *config, void *buffer, size_t buffer_bytes, mha_kv_cache **cache,
                                     mha_error *error);

/*
 * Makes *cache over a buffer (aligned to 64 bytes) that holds one already, such as a copy or a file in mmap, and that is the caller's
 * likewise. Checks the header and that all lengths and block tables lie within bounds; does not read keys and values. A buffer that can't
 * be written will do where the cache is only read. What is no cache of this version, contract and byte order is MHA_ERROR_CACHE_FORMAT.
 */
MHA_API mha_status mha_kv_cache_view(void *buffer, size_t buffer_bytes, mha_kv_cache **cache, mha_error *error);

/* Fills config (whose struct_size must be set) with what a cache was made for, all defaults resolved. */
MHA_API mha_status mha_kv_cache_shape(const mha_kv_cache *cache, mha_kv_cache_config *config, mha_error *error);

/* How many positions a sequence has, those that a ring has overwritten among them. Writes *length on success only. */
MHA_API mha_status mha_kv_cache_length(const mha_kv_cache *cache, int64_t sequence, int64_t *length, mha_error *error);

/*
 * Forgets all positions of a sequence from `length` on, such as rejected tokens; 0 empties it. More than the sequence has is an error.
 * What a ring has overwritten does not come back: a later call whose window reaches there is an error.
 */
MHA_API mha_status mha_kv_cache_truncate(mha_kv_cache *cache, int64_t sequence, int64_t length, mha_error *error);

/*
 * Paged only: the blocks of a sequence from now on, the first for the positions 0 .. block_positions - 1 and so on; count of them, each at
 * most once, 0 .. capacity / block_positions. blocks is copied. Blocks that hold positions of the sequence have to stay; those behind may
 * come, go and change. A block may stand in the tables of several sequences that have a prefix in common: it is read-only as long as it
 * does, and to append into it is an error. Which blocks are free is for the caller to know.
 */
MHA_API mha_status mha_kv_cache_set_blocks(mha_kv_cache *cache, int64_t sequence, const int32_t *blocks, int64_t count, mha_error *error);

/*
 * Makes the first `length` positions of sequence `from` all that sequence `to`, another one, has, whatever that had before. Paged: `to`
 * needs its blocks before; those that both tables name are not copied.
 */
MHA_API mha_status mha_kv_cache_copy_prefix(mha_kv_cache *cache, int64_t from, int64_t to, int64_t length, mha_error *error);

/*
 * Appends `count` rows to a sequence, without attention: k [count, num_kv_heads, head_dim], rotated already if they are to be, and
 * v [count, num_kv_heads, head_dim_v], both contiguous; with a count of 0 they may be NULL. They are stored as a call stores them, bit for
 * bit. Runs on the calling thread.
 */
MHA_API mha_status mha_kv_cache_append(mha_kv_cache *cache, int64_t sequence, int64_t count, const float *k, const float *v,
                                       mha_error *error);

/*
 * Reads the positions [first, first + count) of a sequence back, as the numbers that they are taken as: k [count, num_kv_heads, head_dim],
 * v [count, num_kv_heads, head_dim_v], contiguous; either may be NULL. Positions that the sequence does not have, or a ring no longer
 * holds, are an error. Of f32, f16 and bf16, what is read and appended to a cache of the same types is stored as the same numbers.
 */
MHA_API mha_status mha_kv_cache_read(const mha_kv_cache *cache, int64_t sequence, int64_t first, int64_t count, float *k, float *v,
                                     mha_error *error);

/* ---- Rotary position embedding ---------------------------------------------------------------------------------------------------
 *
 * Rotary position embedding (RoPE; Su et al., arXiv:2104.09864) turns pairs of elements of a query or key by an angle that grows with its
 * position: pair i of dims / 2 by position * theta[i], theta[i] = base^(-2 i / dims). The sines and cosines come from tables, which
 * mha_rope_tables fills for the usual ways of choosing the angles; any other way is a table of the caller's.
 */

#define MHA_ROPE_HALF 0u        /* element i is paired with element i + dims / 2: Llama as Hugging Face has it, GPT-NeoX */
#define MHA_ROPE_INTERLEAVED 1u /* element 2 i is paired with element 2 i + 1: Llama as Meta has it, GPT-J */

/*
 * Rotates queries and keys before the scores, each pair (a, b) to (a cos - b sin, b cos + a sin) by the angle of its position. Keys go into
 * a cache rotated. The struct, its tables and its positions are only read, and any number of calls may share them.
 */
typedef struct mha_rope {
  size_t struct_size;         /* sizeof the struct */
  uint32_t style;             /* MHA_ROPE_* */
  uint32_t reserved;          /* 0 */
  int64_t dims;               /* how many elements of a head are rotated, the first ones; even; 0 = head_dim, which then must be even */
  int64_t num_positions;      /* rows of the tables, >= 1; each position that is looked up must be below it */
  const float *cos;           /* [num_positions, dims / 2]: row p is for position p, column i for pair i */
  const float *sin;           /* likewise */
  int64_t table_stride;       /* from one row of either table to the next; 0 = dims / 2 */
  const int64_t *q_positions; /* [batch, n_q] position of each query; NULL = q_start, q_start + 1, ... Those of padding are not looked at.
                                 The mask goes by q_start all the same. */
  const int64_t *k_positions; /* [batch, rows of key] position of each key that comes with the call; NULL = counted from the sequence's
                                 first key, those in a cache included. In self-attention the rows of key are those of query. */
} mha_rope;

/*
 * How mha_rope_tables chooses the angles. With dims, first_position and num_positions alone: Llama's.
 *
 * linear_factor is position interpolation (Chen et al., arXiv:2306.15595; "linear" in Hugging Face's rope_scaling).
 *
 * yarn_factor is YaRN (Peng et al., arXiv:2309.00071) in the form of Hugging Face's "yarn": with w[i] falling from 1 to 1 / yarn_factor,
 *
 *     theta[i] = base^(-2 i / dims) * w[i]
 *     w[i]     = 1 - ramp + ramp / yarn_factor
 *     ramp     = (i - low) / (high - low), at least 0 and at most 1; where low = high: 0 up to i = low, 1 beyond
 *     low      = floor(d(yarn_beta_fast)), at least 0
 *     high     = ceil(d(yarn_beta_slow)), at most dims - 1
 *     d(beta)  = dims * ln(yarn_original_positions / (2 pi beta)) / (2 ln(base)), the pair that turns beta times in that many positions
 *
 * Both cosines and sines are multiplied by yarn_attention_factor. For files with "mscale" and "mscale_all_dim" it is
 * (0.1 mscale ln(yarn_factor) + 1) / (0.1 mscale_all_dim ln(yarn_factor) + 1).
 */
typedef struct mha_rope_config {
  size_t struct_size;              /* sizeof the struct */
  int64_t dims;                    /* elements of a head that are rotated, two for each column of the tables; even, 2 .. 2^31 - 2 */
  int64_t num_positions;           /* rows of the tables; 0 = nothing to do. All positions must be below 2^31. */
  int64_t first_position;          /* the position of row 0 of the tables */
  double base;                     /* 1 .. 2^64, with YaRN more than 1; 0 = 10000 */
  double linear_factor;            /* positions are divided by it; 1 .. 2^31; 0 = 1 */
  double yarn_factor;              /* by how much the context is stretched; 1 .. 2^31; 0 = no YaRN, then the fields below must be 0 */
  int64_t yarn_original_positions; /* the context that the model was trained with before; 1 .. 2^31, needed with yarn_factor */
  double yarn_beta_fast;           /* pairs that turn more often in it keep their angle; 2^-31 .. 2^31; 0 = 32 */
  double yarn_beta_slow;           /* pairs that turn less often are stretched in full; 2^-31 .. yarn_beta_fast; 0 = 1 */
  double yarn_attention_factor;    /* factor of cosines and sines; 2^-31 .. 2^31; 0 = 0.1 ln(yarn_factor) + 1 */
} mha_rope_config;

/*
 * Fills cos and sin, both [num_positions, dims / 2], contiguous: row r holds the cosines and sines of position first_position + r, column i
 * those of pair i. The rows are the same in any table with the same other fields, so that parts of one can be filled by several threads.
 *
 * The values are those of the formulas rounded to float, the same bits on every machine. The error is at most 0.501 units in the last place
 * at any position; where sine or cosine is nearer to 0 than 2^-29, half a unit and 2^-62. (Where the angle itself is computed in float, it
 * is off by about 2^-24 of it: 0.004 at an angle of 65536.)
 */
MHA_API mha_status mha_rope_tables(const mha_rope_config *config, float *cos, float *sin, mha_error *error);

/* ---- The call ----------------------------------------------------------------------------------------------------------------- */

/*
 * A look inside a call: each pointer that is not NULL receives what the call computed at that point, contiguous in the shape given.
 * Asking does not change the other outputs. scores, scaled_scores and masked_scores take time and memory that grow with n_q * n_kv; with a
 * cache, their n_kv is that of attention_weights. Rows and columns of padding are 0, -infinity in masked_scores.
 */
typedef struct mha_taps {
  size_t struct_size;   /* sizeof the struct */
  float *q;             /* [batch, n_q, num_heads, head_dim]  as projected, before any rotation; mha_forward only, likewise k and v */
  float *k;             /* [batch, n_kv, num_kv_heads, head_dim]  likewise, before storing; the rows of this call alone */
  float *v;             /* [batch, n_kv, num_kv_heads, head_dim_v]  likewise */
  float *scores;        /* [batch, num_heads, n_q, n_kv]  q k^T, both rotated, the keys as they are stored */
  float *scaled_scores; /* [batch, num_heads, n_q, n_kv]  times scale */
  float *masked_scores; /* [batch, num_heads, n_q, n_kv]  -infinity where masked */
  float *context;       /* [batch, n_q, num_heads, head_dim_v]  the weighted values, before W_O */
} mha_taps;

/*
 * Positions count from the sequence's first key: its first valid row or, with a cache, the first
 * position that was appended. A sequence gets the same bits alone, in a batch, with padding on either
 * side and from a cache, as long as its keys have the same positions. A sequence whose beginning is cut
 * off, or that is packed behind another one with a mask between, has other positions: its results may
 * differ in the last bits.
 *
 * The flags of a call, combined by |. Where several limit the keys of a query, all of them do.
 */
#define MHA_CAUSAL 1u       /* a query at position p attends to keys at positions <= p only */
#define MHA_WINDOW_LEFT 2u  /* ... to keys at positions >= p - window_left only */
#define MHA_WINDOW_RIGHT 4u /* ... to keys at positions <= p + window_right only */
#define MHA_PADDING_LEFT 8u /* the valid rows of a sequence are its last ones, not its first ones */
#define MHA_CACHE_READ 16u  /* attend to the cache as it is, and append nothing */

/* Reserved for options that change scores. This version has none: pointers to it must be NULL. */
typedef struct mha_score_options mha_score_options;

/*
 * The arguments of mha_forward. Widths of rows are those of the layer, see mha_layer_shape. The struct
 * and all that it points to but the outputs and the cache are only read; it can be kept and reused.
 */
typedef struct mha_forward_args {
  size_t struct_size; /* sizeof the struct */

  /* Size */
  int64_t batch; /* number of sequences; 0 = nothing to do */
  int64_t n_q;   /* rows of query and output per sequence; 0 = nothing to do, and nothing is appended */
  /* Rows of key and value per sequence, where one of them is given. There 0 means: no keys, or with a
     cache none to append. Otherwise n_kv is not looked at: it is n_q, with MHA_CACHE_READ 0. */
  int64_t n_kv;

  /* Arrays */
  const float *query; /* [batch, n_q, query_dim] */
  const float *key;   /* [batch, n_kv, key_dim]; NULL = query (self-attention) */
  const float *value; /* [batch, n_kv, value_dim]; NULL = key */
  float *output;      /* [batch, n_q, output_dim]; without W_O [batch, n_q, num_heads * head_dim_v] */

  /* Strides: from one sequence to the next, 0 = rows * row stride; from one row to the next, 0 = width */
  int64_t query_batch_stride;
  int64_t query_row_stride;
  int64_t key_batch_stride;
  int64_t key_row_stride;
  int64_t value_batch_stride;
  int64_t value_row_stride;
  int64_t output_batch_stride;
  int64_t output_row_stride;

  /* Mask */
  uint32_t flags;                 /* MHA_CAUSAL, MHA_WINDOW_LEFT, ...; 0 = every query sees all keys */
  uint32_t reserved;              /* 0 */
  int64_t window_left;            /* with MHA_WINDOW_LEFT: >= 0; without it 0 */
  int64_t window_right;           /* with MHA_WINDOW_RIGHT: >= 0; without it 0 */
  const mha_score_options *score; /* NULL */

  /* Positions */
  /* [batch] position of each sequence's first valid query. NULL = its keys, those in the cache included,
     less its queries: the last query stands at the last key, and there must not be more queries than
     keys. Must be NULL with a ring; in self-attention with any other cache NULL, or the lengths that the
     cache has. Not looked at where no position counts: without MHA_CAUSAL, windows and rope. */
  const int64_t *q_start;
  /* [batch] valid rows of query and output, 0 .. n_q; NULL = n_q for all. The others are padding: they
     are not read, no work is done on them, their outputs are 0 and their lse is -infinity. */
  const int64_t *q_lengths;
  /* [batch] valid rows of key and value, 0 .. n_kv; NULL = n_kv for all. Must be NULL where key is NULL:
     in self-attention q_lengths counts. */
  const int64_t *kv_lengths;
  const mha_rope *rope; /* rotation of queries and keys; NULL = none */

  /* Cache */
  /* NULL = none. The call first appends the rows of key and value to its sequences, then attends to all
     that these hold, as it is stored. With MHA_CACHE_READ key and value must be NULL, and the cache is
     only read. Its num_kv_heads, head_dim and head_dim_v must be the layer's. A ring needs MHA_CAUSAL
     and MHA_WINDOW_LEFT; it has no outputs per pair (attention_weights and the taps of scores); and a
     call that appends more than capacity - window_left rows needs as many queries as keys. */
  mha_kv_cache *cache;
  const int64_t *cache_sequences; /* [batch] numbers of its sequences, each once; NULL = 0 .. batch - 1 */

  /* Outputs, each optional (NULL) and contiguous */
  /* [batch, num_heads, n_q] ln of the sum of exp(score); -infinity where all keys are masked */
  float *lse;
  /* [batch, num_heads, n_q, n_kv]. A row sums to 1, or is 0 where all keys are masked. With a cache,
     n_kv is the longest length of the call's sequences after the call. */
  float *attention_weights;
  const mha_taps *taps; /* what the call computes on its way */

  /* Execution */
  const mha_scheduler *scheduler; /* the threads; NULL = run on the calling thread */
} mha_forward_args;

/*
 * The bytes of workspace that mha_forward needs for these arguments. Dereferences no data pointer, so they may be NULL; those given
 * count (key, value, optional outputs, lengths). Of a cache it reads the header alone: what the cache holds does not count, its capacity
 * does. rope needs its tables, which are not read. Never shrinks when batch, n_q, n_kv, num_threads or the outputs asked for grow: one
 * query at the maxima serves all smaller calls. Writes *bytes on success only.
 */
MHA_API mha_status mha_forward_workspace(const mha_layer *layer, const mha_forward_args *args, size_t *bytes, mha_error *error);

/*
 * The whole layer, from input rows to output rows. workspace is any memory of at least mha_forward_workspace bytes, of any alignment
 * and content, used by one call at a time; it may be NULL if 0 bytes are needed.
 *
 * Values: a row whose keys are all masked (or n_kv = 0) has context 0 and lse -infinity. A masked key or value is never read into a
 * result, NaN included (only the taps scores and scaled_scores show masked pairs too). A NaN in an input row reaches only the rows that
 * attend to it. A score of +infinity gives a row of NaN, one of -infinity counts as masked.
 */
MHA_API mha_status mha_forward(const mha_layer *layer, const mha_forward_args *args, void *workspace, size_t workspace_bytes,
                               mha_error *error);

/*
 * The arguments of mha_attention: the middle stage alone, on the caller's queries, keys and values.
 * Query head h attends with kv head h / (num_heads / num_kv_heads). Fields without a comment are those
 * of mha_forward_args, with k and v for key and value.
 *
 * Where all strides of an array are 0, its shape is [batch, n, heads, width]. [batch, heads, n, width]
 * has row_stride = width, head_stride = n * width and batch_stride = heads * n * width. Where the head
 * stride of an array is set, its row stride must be set too, and for more than one sequence its batch
 * stride.
 */
typedef struct mha_attention_args {
  size_t struct_size; /* sizeof the struct */

  /* Size */
  int64_t batch;
  int64_t n_q;
  int64_t n_kv; /* rows of k and v per sequence; 0 = no keys, or with a cache none to append */

  /* Shape */
  int64_t num_heads;    /* heads of q; >= 1 */
  int64_t num_kv_heads; /* heads of k and v, a divisor of num_heads; 0 = num_heads */
  int64_t head_dim;     /* width of a head's queries and keys; >= 1 */
  int64_t head_dim_v;   /* width of a head's values; 0 = head_dim */

  /* Arrays */
  const void *q;   /* [batch, n_q, num_heads, head_dim] float */
  const void *k;   /* [batch, n_kv, num_kv_heads, head_dim] of k_type */
  const void *v;   /* [batch, n_kv, num_kv_heads, head_dim_v] of v_type */
  void *output;    /* [batch, n_q, num_heads, head_dim_v] float */
  uint32_t k_type; /* MHA_TYPE_F32; without a cache also MHA_TYPE_F16 or MHA_TYPE_BF16 */
  uint32_t v_type; /* likewise, independent of k_type */

  /* Strides: from one sequence, row or head to the next */
  int64_t q_batch_stride; /* 0 = n_q * q_row_stride, likewise below */
  int64_t q_row_stride;   /* 0 = num_heads * head_dim, likewise below */
  int64_t q_head_stride;  /* 0 = head_dim, likewise below */
  int64_t k_batch_stride;
  int64_t k_row_stride;
  int64_t k_head_stride;
  int64_t v_batch_stride;
  int64_t v_row_stride;
  int64_t v_head_stride;
  int64_t output_batch_stride;
  int64_t output_row_stride;
  int64_t output_head_stride;

  /* Mask */
  uint32_t flags;
  float scale; /* factor of the scores; 0 = 1 / sqrt(head_dim); must be finite */
  int64_t window_left;
  int64_t window_right;
  const mha_score_options *score;

  /* Positions */
  const int64_t *q_start;
  const int64_t *q_lengths;
  const int64_t *kv_lengths;
  const mha_rope *rope; /* rotation of q, and of k before it is stored or scored; NULL = none */

  /* Cache */
  mha_kv_cache *cache; /* its num_kv_heads, head_dim and head_dim_v must be those above */
  const int64_t *cache_sequences;

  /* Outputs */
  float *lse;
  float *attention_weights;
  const mha_taps *taps; /* its q, k and v must be NULL */

  /* Execution */
  const mha_scheduler *scheduler;
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_*; one that this machine lacks is an error */
  uint32_t reserved;        /* 0 */
} mha_attention_args;

/* Like mha_forward_workspace. */
MHA_API mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes, mha_error *error);

/* Like mha_forward without the projections; bit for bit the middle stage of it. */
MHA_API mha_status mha_attention(const mha_attention_args *args, void *workspace, size_t workspace_bytes, mha_error *error);

/* ---- What a call will do ------------------------------------------------------------------------------------------------------ */

#define MHA_BACK_END_NATIVE 0u /* the library's own kernels run the projections */
#define MHA_BACK_END_SGEMM 1u  /* the caller's sgemm runs them */

/* How a call would be run, and its cost: nothing slow happens silently. operations and bytes of a call with nothing to do are 0. */
typedef struct mha_call_info {
  size_t struct_size;           /* set by the caller, as in an input struct */
  uint32_t instruction_set;     /* MHA_INSTRUCTION_SET_* that the kernels use, never AUTO */
  uint32_t back_end;            /* MHA_BACK_END_* of the projections */
  uint32_t contract;            /* of the results: MHA_CONTRACT on the native back end, else 0 */
  uint32_t num_threads;         /* the most tasks at once */
  int64_t project_tile_rows;    /* input rows in a full register tile of the projections; 0 = no own projection */
  int64_t project_tile_columns; /* output columns in that tile */
  int64_t attend_tile_rows;     /* query rows in a register tile of the attention */
  int64_t attend_block_rows;    /* query rows in a unit of work */
  int64_t attend_chunk_keys;    /* keys in a chunk */
  size_t workspace_bytes;       /* as the workspace query says */
  size_t packed_bytes;          /* of the packed layer, as it is stored, scales and biases included; 0 for mha_attention */
  uint64_t operations;          /* multiplications and additions, counting only the pairs that attend */
  uint64_t bytes;               /* inputs, weights, outputs, and what is appended and attended to of a cache; each counted once, as stored.
                                   Padding counts in optional outputs alone. */
} mha_call_info;

/*
 * Describes mha_forward(layer, args, ...), as it would be run now: with a cache, with what that holds. Of the arrays, reads q_start,
 * q_lengths, kv_lengths, cache_sequences and rope's positions.
 */
MHA_API mha_status mha_info(const mha_layer *layer, const mha_forward_args *args, mha_call_info *info, mha_error *error);

/* Describes mha_attention(args, ...), likewise. */
MHA_API mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info, mha_error *error);

#ifdef __cplusplus
}
#endif

#endif /* MHA_H */
