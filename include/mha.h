/*
 * mha: multi-head attention for CPUs
 *
 * One call takes the input rows x of an attention layer to its output rows y:
 *
 *     q, k, v = x W_Q, x W_K, x W_V                     [batch, n, heads * width of a head]
 *     context = softmax(scale * q k^T) v, head by head  [batch, n, num_heads * head_dim_v]
 *     y       = context W_O                             [batch, n, output_dim]
 *
 * (Vaswani et al., arXiv:1706.03762.) A score is scale * q k^T, of a query and a key. There is no
 * dropout: at inference it changes nothing. What a program calls, in the order of this file:
 *
 *     mha_layer_create, mha_layer_destroy    packs the weights of a layer; frees them
 *     mha_kv_cache_init                      makes a cache of the keys and values of earlier calls
 *     mha_rope_tables                        computes tables for rotary position embedding
 *     mha_alibi_slopes, mha_t5_relative_bias compute the slopes of ALiBi, and T5's relative bias
 *     mha_forward_workspace, mha_forward     says how much memory a call needs; runs a layer
 *     mha_attention                          the same for softmax(scale * q k^T) v alone
 *     mha_info                               says how a call will run, and what it costs
 *     mha_linear_create, mha_linear          packs a linear layer, y = x W + b; runs one
 *
 * The library computes in float, projections on request in integers. It allocates only in
 * mha_layer_create, starts no thread, takes no lock, never prints and never aborts.
 *
 * Results are the same bits for any batch, number of threads and instruction set, and for any way
 * of cutting a sequence into calls over a cache. src/kernels/CONTRACT.md defines each operation.
 * With a BLAS of the caller's (mha_sgemm), the projections are that BLAS's arithmetic instead.
 *
 * Conventions for everything below:
 *
 * - Arrays hold floats unless said otherwise. A shape such as [batch, n, dim] names the extents
 *   from the outermost to the innermost, whose stride is 1. Strides count elements, not bytes; 0
 *   means contiguous, as the shape says. Inputs of a call also take MHA_BROADCAST: the same for
 *   all. Arrays without a stride field are contiguous. The stride of a row or a head is at least
 *   the innermost extent. The strides of an output nest: each steps over all the smaller reach.
 * - Dimensions, counts, positions, strides: int64_t, >= 0 unless said. Sizes in bytes: size_t.
 * - An extent of a call (batch, n_q, n_kv, rows) is at least 1. None at all is MHA_EMPTY: 0, which
 *   a field has that was never set, is an error.
 * - Structs begin with struct_size, which the caller sets to sizeof the struct. Any other field may
 *   be left zero: its comment says what 0 or NULL stands for, unless it is the number itself. Those
 *   named reserved must be 0. Later versions add fields at the end, except to the frozen structs.
 * - Pointers in structs are borrowed for the call. Buffers of packed layers and of caches are
 *   aligned to 64 bytes, all else as its type needs. Inputs may overlap each other, but not a cache
 *   that is appended to. Outputs must not overlap inputs, the workspace, a cache or each other.
 *   But output may alias query (or q), with its type and strides; then key and value must be
 *   separate arrays, and mha_attention has no outputs per pair. The library cannot check all this,
 *   nor that there is all the memory that shapes and strides say.
 * - Errors. A function that can fail returns a mha_status, 0 on success, and fills a mha_error if
 *   it is given one. All that sizes, shapes, strides and NULLs can tell is checked before the first
 *   write: after an error, outputs and caches are as they were.
 * - Threads. Any function may be called on any thread at any time, as long as no two calls at the
 *   same time write the same memory: outputs, a workspace, a buffer being packed, a cache that is
 *   appended to or changed. A mha_layer is immutable: any number of threads may use it.
 * - A thread that calls the library, or runs its tasks, must round to nearest and keep subnormals
 *   (no FTZ, no DAZ), which is the default. The library needs up to 96 KiB of its stack.
 */
#ifndef MHA_H
#define MHA_H

#include <stddef.h>
#include <stdint.h>

/* The version of this header and of its library. One with the same major number can replace it. */
#define MHA_VERSION_MAJOR 0
#define MHA_VERSION_MINOR 1
#define MHA_VERSION_PATCH 0

/* The arithmetic contract (src/kernels/CONTRACT.md). Within a number, bits never change. */
#define MHA_CONTRACT 3

/* Marks exported functions. On Windows, users of the shared library define MHA_SHARED. */
#if defined(_WIN32) && defined(MHA_SHARED)
#define MHA_API __declspec(dllimport)
#elif defined(__GNUC__)
#define MHA_API __attribute__((visibility("default")))
#else
#define MHA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status and errors ---------------------------------------------------------------------- */

/*
 * One of MHA_OK and MHA_ERROR_*. The numbers never change; later versions may add some. Those up to
 * MHA_ERROR_TOO_LARGE are about arguments: any function may return them. A packed layer or cache
 * that is cut short is MHA_ERROR_PACKED_FORMAT or MHA_ERROR_CACHE_FORMAT.
 */
typedef uint32_t mha_status;

#define MHA_OK 0u                     /* success */
#define MHA_ERROR_NULL_POINTER 1u     /* a pointer that is needed is NULL */
#define MHA_ERROR_STRUCT_SIZE 2u      /* struct_size is too small, or unknown fields are not zero */
#define MHA_ERROR_INVALID_VALUE 3u    /* a value is out of its range, or contradicts another one */
#define MHA_ERROR_SHAPE 4u            /* dimensions that do not fit together */
#define MHA_ERROR_TOO_LARGE 5u        /* a size overflows, here or in the caller's BLAS */
#define MHA_ERROR_BUFFER_TOO_SMALL 6u /* less memory to write to than the size query says */
#define MHA_ERROR_OUT_OF_MEMORY 7u    /* mha_layer_create: the allocator returned NULL */
#define MHA_ERROR_INSTRUCTION_SET 8u  /* where one is chosen: the machine or this build lacks it */
#define MHA_ERROR_PACKED_FORMAT 9u    /* mha_layer_view, _verify: no packed layer of this version;
                                         _view: packed with an sgemm and used without, or reverse */
#define MHA_ERROR_PACKED_CHECKSUM 10u /* mha_layer_verify: the weights are not what was packed */
#define MHA_ERROR_OUT_OF_RANGE 11u    /* mha_layer_create, _pack: f16 cannot hold a finite weight */
#define MHA_ERROR_CACHE_FULL 12u      /* what appends to a cache: no room or block for new rows */
#define MHA_ERROR_CACHE_FORMAT 13u    /* mha_kv_cache_view: no cache of this version, or damaged */

/* What was wrong. A function that is given one always fills it. This struct is frozen. */
typedef struct mha_error {
  uint32_t status;   /* the same value as returned */
  uint32_t argument; /* which parameter of the function was at fault, from 1 on; 0 = none of them */
  char message[248]; /* what was wrong and what would be right, a sentence; "" on success */
} mha_error;

/* "MHA_ERROR_SHAPE" and so on; of other numbers "unknown mha_status". Static memory. */
MHA_API const char *mha_status_string(mha_status status);

/* ---- Version and machine -------------------------------------------------------------------- */

/* 10000 * major + 100 * minor + patch of the linked library; it may be newer than this header. */
MHA_API uint32_t mha_version(void);
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

/* ---- Threads -------------------------------------------------------------------------------- */

/*
 * The caller's threads. Without a scheduler, a call runs on the calling thread alone. With one, it
 * calls parallel_for a few times from the calling thread, unless there is too little work.
 *
 * parallel_for(context, count, task, task_context) runs task(task_context, index) exactly once for
 * each index from 0 to count - 1 and returns when all have returned. 1 <= count <= num_threads. It
 * may use any threads in any order, even the calling thread alone: tasks never wait for each other,
 * and never call parallel_for. The library balances the work, so tasks may start late. A task must
 * see what was written before the call of parallel_for; the caller must see afterwards what the
 * tasks wrote. parallel_for cannot fail and must not throw. Calls that run at the same time with
 * the same scheduler call it at the same time. No result depends on this. This struct is frozen.
 */
typedef struct mha_scheduler {
  void *context;        /* passed to parallel_for as it is */
  uint32_t num_threads; /* the most tasks at once; >= 1; each takes its slice of the workspace */
  uint32_t reserved;    /* 0 */
  /* runs the tasks, as said above */
  void (*parallel_for)(void *context, uint32_t count,
                       void (*task)(void *task_context, uint32_t index), void *task_context);
} mha_scheduler;

/* ---- Extents, strides and types ------------------------------------------------------------- */

/* In place of an extent of a call: nothing there, such as a batch of no sequences. */
#define MHA_EMPTY INT64_MIN

/* A stride of an input whose sequences, heads or rows are all the same one, in memory once. */
#define MHA_BROADCAST INT64_MIN

/* Types of stored numbers. Arrays of f16 and bf16 are of uint16_t, with the bits of the numbers. */
#define MHA_TYPE_F32 0u  /* float */
#define MHA_TYPE_F16 1u  /* IEEE binary16 */
#define MHA_TYPE_BF16 2u /* the upper half of a float */
#define MHA_TYPE_INT8 3u /* -127 .. 127 times a scale */
#define MHA_TYPE_INT4 4u /* -8 .. 7 times a scale; weights only */

/* ---- The layer ------------------------------------------------------------------------------
 *
 * A layer is packed weights and their shape. Packing puts W_Q, W_K, W_V and W_O into the order in
 * which the kernels read them. The same packed bytes serve every instruction set. Ways to a layer:
 *     mha_layer_create    packs into memory that it allocates; mha_layer_destroy frees it
 *     mha_layer_pack      packs into the caller's buffer, which can be written to a file;
 *     mha_layer_view      makes a layer over such a buffer without a copy, such as a file in mmap
 */
typedef struct mha_layer mha_layer; /* opaque; immutable once made */

/*
 * The shape of a layer. query_dim and num_heads are needed; so is head_dim, unless all heads
 * together are query_dim wide. Dimensions, and num_heads times a head's width, are at most
 * 2^31 - 1. Query head h attends with kv head h / (num_heads / num_kv_heads).
 */
typedef struct mha_layer_config {
  size_t struct_size;   /* sizeof the struct */
  int64_t query_dim;    /* width of a row of the query input (d_in, embed_dim); >= 1 */
  int64_t num_heads;    /* query heads; >= 1 */
  int64_t num_kv_heads; /* key and value heads, a divisor of num_heads; 0 = num_heads */
  int64_t head_dim;     /* width of a head's queries and keys; 0 = query_dim / num_heads, exactly */
  int64_t head_dim_v;   /* width of a head's values; 0 = head_dim */
  int64_t key_dim;      /* width of a row of the key input; 0 = query_dim */
  int64_t value_dim;    /* width of a row of the value input; 0 = key_dim */
  int64_t output_dim;   /* width of a row of the output with W_O; 0 = query_dim. Without W_O 0. */
  float scale;          /* factor of the scores; finite; 0 = 1 / sqrt(head_dim) */
  uint32_t weight_type; /* MHA_TYPE_*: how weights are kept, see below; 0 = f32, for an sgemm too */
  uint32_t gate;        /* MHA_GATE_*: what the context is multiplied by before W_O; 0 = nothing */
  uint32_t arithmetic;  /* MHA_ARITHMETIC_* of the projections, see below; 0 = F32 */
  int64_t gate_dim;     /* numbers of a head's gate: head_dim_v (or 0), or 1 for the whole head */
} mha_layer_config;

/*
 * Weights in fewer bits are less to read, which is what a call on few rows spends its time on.
 * Biases stay float. Rounding is to nearest, ties to even.
 *     F16     2 bytes a weight, 11 significant bits. A finite one of 65520 or more is refused.
 *     BF16    2 bytes a weight, 8 significant bits, the range of float
 *     INT8    1 byte a weight, and a scale for each output column: its largest magnitude / 127
 *     INT4    5/8 of a byte a weight: a scale for each output column and group of 32 inputs, of
 *             which the last may be shorter. The weight of the largest magnitude is -8 times it.
 * A column (int8) or group (int4) with a weight that is not finite becomes NaN as a whole.
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
 * A gate: the context of a head times a function of its gate, whose numbers are a projection of the
 * query input, x W_G + b_G: one for each element or for each head. A row of 0 stays 0.
 */
#define MHA_GATE_NONE 0u
#define MHA_GATE_SIGMOID 1u  /* 1 / (1 + exp(-g)): Qwen3-Next; one for each head: Step */
#define MHA_GATE_SOFTPLUS 2u /* ln(1 + exp(g)) */

/* How a weight matrix lies in memory. With OUT_IN, a row has "in" elements. */
#define MHA_LAYOUT_IN_OUT 0u /* W [in, out], y = x W:   x @ W, GPT-2's Conv1D */
#define MHA_LAYOUT_OUT_IN 1u /* W [out, in], y = x W^T: PyTorch's nn.Linear and in_proj_weight */

/*
 * The weights. Shapes below are for MHA_LAYOUT_IN_OUT; with MHA_LAYOUT_OUT_IN every matrix is
 * transposed. The columns of W_Q are those of head 0, then those of head 1, and so on; likewise the
 * columns of W_K and W_V, and the rows of W_O.
 *
 * W_Q, W_K and W_V come either as three matrices, w_q, w_k and w_v, or as one fused matrix, w_qkv,
 * which needs key_dim = value_dim = query_dim.
 * Matrices of f32, f16 or bf16 are converted to weight_type. A quantiser's matrices of int8 or int4
 * need the same weight_type, and are taken as they are: a weight is code * scale.
 *     int8    codes are int8_t
 *     int4    with MHA_LAYOUT_OUT_IN only. A row is ceil(in / 2) bytes. Each holds two codes + 8,
 *             that of the earlier input in the low half. Strides count elements all the same, and
 *             are even; 0 = whole bytes.
 */
typedef struct mha_layer_weights {
  size_t struct_size; /* sizeof the struct */
  uint32_t layout;    /* MHA_LAYOUT_* of all matrices; 0 = IN_OUT */
  uint32_t type;      /* MHA_TYPE_* of all matrices; 0 = f32 */

  /* Matrices: w_q, w_k and w_v, or w_qkv; and W_O */
  const void *w_q;   /* [query_dim, num_heads * head_dim] */
  const void *w_k;   /* [key_dim, num_kv_heads * head_dim] */
  const void *w_v;   /* [value_dim, num_kv_heads * head_dim_v] */
  const void *w_qkv; /* [query_dim, columns of w_q, then of w_k, then of w_v] */
  const void *w_o;   /* [num_heads * head_dim_v, output_dim]; NULL: y is the context */
  /* [query_dim, num_heads * gate_dim]. NULL with a gate: the columns of each head's gate lie behind
     the head's own in w_q or w_qkv, and so in b_q or b_qkv (Qwen3-Next). */
  const void *w_g;

  /* Biases; NULL = none */
  const float *b_q;   /* [num_heads * head_dim] */
  const float *b_k;   /* [num_kv_heads * head_dim] */
  const float *b_v;   /* [num_kv_heads * head_dim_v] */
  const float *b_qkv; /* b_q, b_k and b_v in one array instead; with w_qkv or without */
  const float *b_o;   /* [output_dim]; only with w_o */
  const float *b_g;   /* [num_heads * gate_dim]; only with w_g */

  /* Strides from one row to the next; 0 = contiguous */
  int64_t w_q_stride, w_k_stride, w_v_stride, w_qkv_stride, w_o_stride, w_g_stride;

  /* Scales of int8: [out], for each output column. Of int4: [out, ceil(in / 32)], for each output
     column and group of 32 inputs. Otherwise NULL. */
  const float *w_q_scales;
  const float *w_k_scales;
  const float *w_v_scales;
  const float *w_qkv_scales;
  const float *w_o_scales;
  const float *w_g_scales;
} mha_layer_weights;

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

/*
 * The bytes that mha_layer_pack needs. Checks all but the contents of arrays, of which it reads
 * none. The size depends on config, and whether there are w_o and sgemm, not on the instruction
 * set, which may be another machine's. Writes *bytes on success only.
 */
MHA_API mha_status mha_layer_pack_size(const mha_layer_config *config,
                                       const mha_layer_weights *weights,
                                       const mha_layer_options *options, size_t *bytes,
                                       mha_error *error);

/*
 * Packs the weights, whose arrays are not needed afterwards, into buffer, which is aligned to 64
 * bytes, as by aligned_alloc(64, size). On success its first mha_layer_pack_size bytes are the
 * packed layer, the same on every machine of this byte order: copy them, or write them to a file.
 */
MHA_API mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights,
                                  const mha_layer_options *options, void *buffer,
                                  size_t buffer_bytes, mha_error *error);

/* The bytes of storage that mha_layer_view needs for the layer object, without the weights. */
MHA_API size_t mha_layer_view_size(void);

/*
 * Makes *layer over a packed buffer, which is aligned to 64 bytes, and places the layer object in
 * storage, of any alignment. Both stay the caller's: they must stay as they are as long as the
 * layer is used. There is nothing to destroy. Checks the header and all bounds, in constant time;
 * does not read the weights. options->sgemm must be given if the buffer was packed with one, and
 * only then. Writes *layer on success only.
 */
MHA_API mha_status mha_layer_view(const void *buffer, size_t buffer_bytes,
                                  const mha_layer_options *options, void *storage,
                                  size_t storage_bytes, const mha_layer **layer, mha_error *error);

/* Checks what mha_layer_view checks, and the checksum of all weights. Reads the whole buffer. */
MHA_API mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error);

/*
 * Packs the weights into one block of memory that it allocates, and makes *layer over it; after an
 * error *layer is NULL. The layer belongs to the caller, who frees it by mha_layer_destroy when no
 * call uses it any more. Without an allocator, 4 MiB or more are on huge pages if Linux has them.
 */
MHA_API mha_status mha_layer_create(const mha_layer_config *config,
                                    const mha_layer_weights *weights,
                                    const mha_layer_options *options, mha_layer **layer,
                                    mha_error *error);

/* Frees a layer made by mha_layer_create. Does nothing to NULL, or to a layer over a buffer. */
MHA_API void mha_layer_destroy(mha_layer *layer);

/*
 * Fills *config, its struct_size set, with the shape of a layer, all defaults resolved. output_dim
 * is the width of y; to make such a layer without W_O once more, set it back to 0. A linear layer
 * has num_heads 0, and its input_dim as query_dim.
 */
MHA_API mha_status mha_layer_shape(const mha_layer *layer, mha_layer_config *config,
                                   mha_error *error);

/* ---- The KV cache ---------------------------------------------------------------------------
 *
 * A cache keeps the keys and values of earlier calls: a new token then costs one row of projections
 * and one pass over what is stored, after norm and rotation. A cache holds several sequences, each
 * with its own length, and lies in one buffer of the caller's. This can be copied, written to a
 * file, and viewed again, at another place and for any instruction set.
 *
 * Calls that append change a cache, as do the functions below that take it without const; all
 * others only read it. What changes a cache must not run at the same time as anything else on the
 * same cache, not even for other sequences. What only reads it may, on any number of threads. A
 * call that fails leaves the cache as it was, byte for byte.
 */
typedef struct mha_kv_cache mha_kv_cache; /* opaque; lies in the caller's buffer */

/* Kinds of caches. */
#define MHA_CACHE_CONTIGUOUS 0u /* each sequence has room for capacity positions of its own */
#define MHA_CACHE_RING 1u       /* the last capacity positions of each sequence, for windows */
#define MHA_CACHE_PAGED 2u      /* blocks from a common pool, by mha_kv_cache_set_blocks */

/* What a cache holds. INT8 has a scale for each position and head. Rounding is to nearest. */
typedef struct mha_kv_cache_config {
  size_t struct_size;    /* sizeof the struct */
  int64_t num_sequences; /* sequences, numbered from 0; >= 1 */
  /* The most positions of a sequence; >= 1. A ring keeps the last capacity positions: position p
     lies at p % capacity, over an older one. It needs a multiple of 16 that is more than
     window_left. Paged: a multiple of block_positions. */
  int64_t capacity;
  int64_t num_kv_heads;    /* key and value heads, the layer's; >= 1 */
  int64_t head_dim;        /* width of a head's keys, the layer's; >= 1 */
  int64_t head_dim_v;      /* width of a head's values, the layer's; 0 = head_dim */
  uint32_t k_type;         /* of keys: MHA_TYPE_F32, F16, BF16 or INT8; 0 = F32 */
  uint32_t v_type;         /* of values: likewise */
  uint32_t kind;           /* MHA_CACHE_*; 0 = CONTIGUOUS */
  uint32_t reserved;       /* 0 */
  int64_t block_positions; /* paged: positions of a block: 16, 32, 64, 128 or a multiple of 256 */
  int64_t num_blocks;      /* paged: blocks of the pool, numbered from 0; >= 1. Otherwise both 0. */
} mha_kv_cache_config;

/* The bytes of buffer that a cache needs, a multiple of 64. Writes *bytes on success only. */
MHA_API mha_status mha_kv_cache_size(const mha_kv_cache_config *config, size_t *bytes,
                                     mha_error *error);

/*
 * Makes an empty cache in buffer, which is aligned to 64 bytes and has at least mha_kv_cache_size
 * bytes. The buffer stays the caller's, and must stay as long as the cache is used: *cache points
 * into it. There is nothing to destroy. The room for keys and values is not written. A paged cache
 * has no blocks yet. Writes *cache on success only.
 */
MHA_API mha_status mha_kv_cache_init(const mha_kv_cache_config *config, void *buffer,
                                     size_t buffer_bytes, mha_kv_cache **cache, mha_error *error);

/*
 * The same over a buffer that holds a cache already, such as a copy or a file in mmap; one that
 * cannot be written will do for a cache that is only read. Checks the header, lengths and block
 * tables, not keys and values. MHA_ERROR_CACHE_FORMAT: not of this version, contract, byte order.
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
 * Sets the blocks of a sequence of a paged cache: the first block holds its first block_positions
 * positions, and so on. blocks [count] is copied, and names each block at most once; count is at
 * most capacity / block_positions. Blocks that hold positions already must stay in their places;
 * those behind them may change. Sequences with a common prefix may share blocks: into a block of
 * several sequences nothing can be appended. The caller knows which blocks are free.
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
 * Appends count rows to a sequence, without attention: k [count, num_kv_heads, head_dim] and v
 * [count, num_kv_heads, head_dim_v], norm and rotation done already. They are stored as a call
 * stores them, bit for bit. With a count of 0, k and v may be NULL. Runs on the calling thread.
 */
MHA_API mha_status mha_kv_cache_append(mha_kv_cache *cache, int64_t sequence, int64_t count,
                                       const float *k, const float *v, mha_error *error);

/*
 * Reads count positions of a sequence back, from first on, as the numbers that attention computes
 * with: k [count, num_kv_heads, head_dim] and v [count, num_kv_heads, head_dim_v]; either may be
 * NULL. It is an error if the sequence does not have these positions, or a ring no longer does.
 * Numbers of f32, f16 and bf16 that are read and appended to a cache of these types stay the same.
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

/* Which elements are a pair. */
#define MHA_ROPE_HALF 0u        /* i and i + dims / 2: Llama as Hugging Face has it, GPT-NeoX */
#define MHA_ROPE_INTERLEAVED 1u /* 2 i and 2 i + 1: Llama as Meta has it, GPT-J */

/* A rotation. Calls only read the struct and all that it points to, and may share them. */
typedef struct mha_rope {
  size_t struct_size;    /* sizeof the struct */
  uint32_t style;        /* MHA_ROPE_*; 0 = HALF */
  uint32_t reserved;     /* 0 */
  int64_t dims;          /* elements of a head to rotate, its first ones; even; 0 = head_dim */
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
} mha_rope_config;

/*
 * Fills cos and sin, both [num_positions, dims / 2]: row r is for position first_position + r,
 * column i for pair i. Tables of the same angles have the same rows: threads can fill a part each.
 *
 * The values are the same bits on every machine: those of the formulas, rounded to float, with
 * angles that are off by at most position * 2^-51 (more if a ramp is steep). Up to position 2^20,
 * that adds less than 0.01 units in the last place to numbers of 1/2 and more.
 */
MHA_API mha_status mha_rope_tables(const mha_rope_config *config, float *cos, float *sin,
                                   mha_error *error);

/* ---- Normalised queries, keys and values ---------------------------------------------------- */

/* Flags of a norm, combined by |. */
#define MHA_NORM_LAYER 1u      /* layer norm, not RMS norm (Cohere, StableLM) */
#define MHA_NORM_ALL_HEADS 2u  /* one norm over the columns of all heads together (OLMo 2) */
#define MHA_NORM_AFTER_ROPE 4u /* behind the rotation, not before it (Hunyuan, Llama 4) */
#define MHA_NORM_VALUES 8u     /* of values too: RMS norm of each head without weights (Gemma 4) */

/*
 * Norm of the queries, and of the keys before they are scored or stored, each head by itself
 * (Qwen3). Calls only read the struct and its arrays, which may hold anything, NaN included.
 *     RMS norm      x / sqrt(mean of x^2 + epsilon) * weight
 *     layer norm    (x - mean) / sqrt(mean of (x - mean)^2 + epsilon) * weight + bias
 * Gemma and others store w for a weight of 1 + w: the sum is to be given.
 */
typedef struct mha_norm {
  size_t struct_size;    /* sizeof the struct */
  uint32_t flags;        /* MHA_NORM_*; 0 = RMS norm of each head, before the rotation */
  float epsilon;         /* > 0 and finite */
  const float *q_weight; /* [head_dim] for all heads, or [num_heads, head_dim]; NULL = 1 */
  const float *k_weight; /* likewise, [num_kv_heads, head_dim] */
  const float *q_bias;   /* of layer norm, in the shape of q_weight; NULL = 0 */
  const float *k_bias;   /* likewise */
  /* From a head's weights and biases to the next head's, at least head_dim: 0 = the same for all
     heads, but with MHA_NORM_ALL_HEADS head_dim, the only other choice there */
  int64_t head_stride;
} mha_norm;

/* ---- The call -------------------------------------------------------------------------------
 *
 * Positions count from the first key of a sequence: its first valid row or, with a cache, the first
 * that was appended. A sequence gets the same bits alone, in a batch, with padding on either side
 * and from a cache, as long as its keys have the same positions. Where its beginning is cut off, or
 * where it is packed behind another sequence with a mask between, its keys have other positions,
 * and its results may differ in the last bits.
 */

/* Flags of a call, combined by |. Where several limit the keys of a query, all of them count. */
#define MHA_CAUSAL 1u       /* the query at position p attends to keys at positions <= p only */
#define MHA_WINDOW_LEFT 2u  /* ... to keys at positions >= p - window_left only */
#define MHA_WINDOW_RIGHT 4u /* ... to keys at positions <= p + window_right only */
#define MHA_PADDING_LEFT 8u /* the valid rows of a sequence are its last ones, not its first ones */
#define MHA_CACHE_READ 16u  /* attends to the cache as it is, and appends nothing */

/* Which keys the columns of mask and bias stand for. */
#define MHA_COLUMNS_ALL_KEYS 0u /* the rows of key or, with a cache, all positions in it */
#define MHA_COLUMNS_NEW_KEYS 1u /* the rows of key that come with the call */

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
 *     s = s + bias[b, head, i, column of j]        additive mask
 *     s = -infinity where flags, groups or mask say so
 *     weight = exp(s) / (sum of exp(s) over the keys + exp(sinks[head]))
 *     lse = ln of that sum, with the sink; -infinity if all is masked
 *     context = head_scales[head] * (weights times values)
 *
 * This is the order of ONNX's Attention. A key whose score is -infinity takes no part. Of mask and
 * bias, what flags and lengths exclude is not read (with MHA_GROUPS_ALSO it may be), and of bias
 * what mask or groups exclude reaches no result. Calls only read the struct and all it points to.
 *
 * mask and bias have the shape [batch, num_heads, n_q, columns]. Where all sequences, heads or rows
 * have the same, the stride is MHA_BROADCAST: one [n_q, columns] for all has it as batch and head
 * stride. Rows are those of query, padding included, and have all columns. These are as in
 * attention_weights: the rows of key or, with a cache, the positions in it after the call. With
 * MHA_COLUMNS_NEW_KEYS they are always the rows of key that come with the call. The keys that the
 * cache had before then have no column: no mask excludes them, and their bias is 0, so that a tree
 * of drafted tokens needs a mask of its own rows only. They are in no group, and no group excludes
 * them: with MHA_GROUPS_WITHIN too, every query attends to them. A ring, whose positions have no
 * end, takes these columns alone, and no groups. Keys behind num_columns are masked.
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

/*
 * The arguments of mha_forward. Widths of rows are the layer's (mha_layer_shape). Self-attention
 * needs batch, n_q, query and output. The struct can be kept and used again: a call writes to the
 * outputs, and to the cache if it appends.
 */
typedef struct mha_forward_args {
  size_t struct_size; /* sizeof the struct */

  /* Size */
  int64_t batch; /* sequences; >= 1, or MHA_EMPTY = nothing to do */
  int64_t n_q;   /* rows of query and output per sequence; likewise; then nothing is appended */
  /* Rows of key and value per sequence, where one of them is given; n_q where value alone is. >= 1,
     or MHA_EMPTY = no keys, or with a cache none to append. Otherwise not looked at: it is n_q in
     self-attention, none with MHA_CACHE_READ. */
  int64_t n_kv;

  /* Arrays */
  const void *query;    /* [batch, n_q, query_dim], of input_type */
  const void *key;      /* [batch, n_kv, key_dim], likewise; NULL = query (self-attention) */
  const void *value;    /* [batch, n_kv, value_dim], likewise; NULL = key */
  void *output;         /* [batch, n_q, width of y, as mha_layer_shape says], of output_type */
  uint32_t input_type;  /* MHA_TYPE_F32, F16 or BF16; 0 = F32 */
  uint32_t output_type; /* likewise */

  /* Strides; 0 = n * row stride for batch strides, the width for row strides; or MHA_BROADCAST */
  int64_t query_batch_stride, query_row_stride;
  int64_t key_batch_stride, key_row_stride;
  int64_t value_batch_stride, value_row_stride;
  int64_t output_batch_stride, output_row_stride;

  /* Mask */
  uint32_t flags;                 /* MHA_CAUSAL, MHA_WINDOW_LEFT, ... as above; 0 = no mask */
  uint32_t reserved;              /* 0 */
  int64_t window_left;            /* with MHA_WINDOW_LEFT: >= 0; without it 0 */
  int64_t window_right;           /* with MHA_WINDOW_RIGHT: >= 0; without it 0 */
  const mha_score_options *score; /* what changes scores; NULL = nothing */

  /* Positions */
  /* [batch]: position of each sequence's first valid query, -2^62 or more. Negative is before the
     first key; there rope without q_positions needs MHA_CAUSAL. NULL = (length in the cache + n_kv)
     - n_q, of valid rows: the last query is at the last key; negative with kv_start alone. With a
     ring it must be NULL; in self-attention with another cache NULL, or the lengths that the cache
     has. Not looked at where no position counts: neither in the mask, nor in the scores or rope. */
  const int64_t *q_start;
  /* [batch]: valid rows of query and output, 0 .. n_q; NULL = n_q. The other rows are padding: they
     are not read and cost no work; their outputs are 0 and their lse is -infinity. */
  const int64_t *q_lengths;
  /* [batch]: valid rows of key and value, 0 .. n_kv; NULL = n_kv. Where key is NULL it must be
     NULL: in self-attention the valid rows are those of query. */
  const int64_t *kv_lengths;
  /* [batch]: row of the first valid key, in self-attention of query too, for padding on the left:
     as many rows from there on are valid as lengths say, or all. NULL = 0 */
  const int64_t *kv_start;
  /* [batch + 1], ascending: packed sequences, without lengths. Arrays of rows, and outputs, are
     then those of a batch of 1, in which sequence b is the rows from cu_seqlens_q[b] up to
     cu_seqlens_q[b + 1], and likewise of key and value (NULL = as of query). NULL = none */
  const int64_t *cu_seqlens_q;
  const int64_t *cu_seqlens_kv;
  const mha_norm *norm; /* norm of queries and keys; NULL = none */
  const mha_rope *rope; /* rotation of queries and keys; NULL = none */

  /* Cache */
  /* NULL = none. The call first appends the rows of key and value to its sequences, and then
     attends to all that these hold, as it is stored. With MHA_CACHE_READ it appends nothing: key,
     value and what is said of their rows must be NULL. num_kv_heads, head_dim and head_dim_v are
     the layer's. A ring needs MHA_CAUSAL and MHA_WINDOW_LEFT, has no outputs per pair, and needs as
     many queries as keys for more than capacity - window_left rows at once. */
  mha_kv_cache *cache;
  const int64_t *cache_sequences; /* [batch]: its sequences, each once; NULL = 0 .. batch - 1 */

  /* Outputs beside output, each optional and contiguous */
  float *lse; /* [batch, num_heads, n_q]: ln of the sum of exp(score), of the keys that are not
                 masked, with the sink; -infinity if all are */
  /* [batch, num_heads, n_q, n_kv]: a row sums to 1, to less with sinks, or is 0 if all is masked.
     With a cache, n_kv is the longest length that the call's sequences have after it. */
  float *attention_weights;
  const mha_taps *taps; /* what the call computes on its way */

  /* Execution */
  const mha_scheduler *scheduler; /* threads; NULL = the calling thread alone */
} mha_forward_args;

/*
 * The bytes of workspace that mha_forward needs for these arguments. Reads no array, but it counts
 * which are given: key, value, optional outputs, lengths, and rope's tables, which must be. Of a
 * cache, its shape counts, not what it holds. More batch, n_q, n_kv, num_threads or outputs never
 * need less: a query at the maxima serves all smaller calls. Writes *bytes on success only.
 */
MHA_API mha_status mha_forward_workspace(const mha_layer *layer, const mha_forward_args *args,
                                         size_t *bytes, mha_error *error);

/*
 * Runs a layer, from input rows to output rows. workspace is memory of at least
 * mha_forward_workspace bytes, of any alignment and content, for one call at a time.
 *
 * A row whose keys are all masked has context 0 and lse -infinity, so that y is b_o or 0; likewise
 * without keys. What is masked is not read into any result, NaN included; only the taps scores and
 * scaled_scores show masked pairs. NaN in an input row reaches only the rows that attend to it. A
 * score of +infinity gives a row of NaN; a score of -infinity counts as masked.
 */
MHA_API mha_status mha_forward(const mha_layer *layer, const mha_forward_args *args,
                               void *workspace, size_t workspace_bytes, mha_error *error);

/* ---- Attention alone ------------------------------------------------------------------------ */

/*
 * The arguments of mha_attention: context = softmax(scale * q k^T) v on the caller's q, k and v,
 * without projections. Query head h attends with kv head h / (num_heads / num_kv_heads). Groups
 * that begin with "As in mha_forward_args" have its fields, with k and v for key and value.
 *
 * With all strides of an array 0, its shape is [batch, n, heads, width]. For [batch, heads, n,
 * width], row_stride is width, head_stride is n * width, and batch_stride is heads * n * width. A
 * head stride needs a row stride beside it, and for several sequences a batch stride.
 */
typedef struct mha_attention_args {
  size_t struct_size; /* sizeof the struct */

  /* As in mha_forward_args: size */
  int64_t batch;
  int64_t n_q;
  int64_t n_kv; /* rows of k and v per sequence; with MHA_CACHE_READ not looked at */

  /* Shape */
  int64_t num_heads;    /* heads of q; >= 1 */
  int64_t num_kv_heads; /* heads of k and v, a divisor of num_heads; 0 = num_heads */
  int64_t head_dim;     /* width of a head's queries and keys; >= 1 */
  int64_t head_dim_v;   /* width of a head's values; 0 = head_dim */

  /* Arrays */
  const void *q;        /* [batch, n_q, num_heads, head_dim], of q_type */
  const void *k;        /* [batch, n_kv, num_kv_heads, head_dim], of k_type */
  const void *v;        /* [batch, n_kv, num_kv_heads, head_dim_v], of v_type */
  void *output;         /* [batch, n_q, num_heads, head_dim_v], of output_type */
  uint32_t q_type;      /* MHA_TYPE_F32, F16 or BF16; 0 = F32; all four may differ */
  uint32_t k_type;      /* likewise */
  uint32_t v_type;      /* likewise */
  uint32_t output_type; /* as q_type */

  /* Strides; 0 = n * row stride for batch, heads * width for row, width for head; MHA_BROADCAST */
  int64_t q_batch_stride, q_row_stride, q_head_stride;
  int64_t k_batch_stride, k_row_stride, k_head_stride;
  int64_t v_batch_stride, v_row_stride, v_head_stride;
  int64_t output_batch_stride, output_row_stride, output_head_stride;

  /* As in mha_forward_args: mask */
  uint32_t flags;
  float scale; /* factor of the scores; finite; 0 = 1 / sqrt(head_dim); 1e-45f = all are equal */
  int64_t window_left, window_right;
  const mha_score_options *score;

  /* As in mha_forward_args: positions */
  const int64_t *q_start;
  const int64_t *q_lengths;
  const int64_t *kv_lengths;
  const int64_t *kv_start;
  const int64_t *cu_seqlens_q;
  const int64_t *cu_seqlens_kv;
  const mha_norm *norm;
  const mha_rope *rope;         /* of q, and of k before it is scored or stored; NULL = none */

  /* As in mha_forward_args: cache */
  mha_kv_cache *cache; /* its num_kv_heads, head_dim and head_dim_v are those above */
  const int64_t *cache_sequences;

  /* As in mha_forward_args: outputs beside output */
  float *lse;
  float *attention_weights;
  const mha_taps *taps; /* its q, k and v must be NULL */

  /* As in mha_forward_args: execution */
  const mha_scheduler *scheduler;
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_*; 0 = the best one that this machine has */
  uint32_t reserved;        /* 0 */
} mha_attention_args;

/* The bytes of workspace that mha_attention needs, as mha_forward_workspace says. */
MHA_API mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes,
                                           mha_error *error);

/* Runs attention alone; as mha_forward, whose middle stage has the same bits. */
MHA_API mha_status mha_attention(const mha_attention_args *args, void *workspace,
                                 size_t workspace_bytes, mha_error *error);

/* ---- What a call will do -------------------------------------------------------------------- */

/* What runs the projections. */
#define MHA_BACK_END_NATIVE 0u /* the library's own kernels */
#define MHA_BACK_END_SGEMM 1u  /* the caller's sgemm */

/* How a call would run, and what it costs. */
typedef struct mha_call_info {
  size_t struct_size;          /* sizeof the struct, set by the caller */
  uint32_t instruction_set;    /* MHA_INSTRUCTION_SET_* of the kernels, never AUTO */
  uint32_t back_end;           /* MHA_BACK_END_* of the projections */
  uint32_t contract;           /* of the results: MHA_CONTRACT; with an sgemm 0 */
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
 * cache, with what that holds. Reads the arrays of the fields under Positions, cache_sequences, and
 * score's alibi_slopes, sinks and head_scales.
 */
MHA_API mha_status mha_info(const mha_layer *layer, const mha_forward_args *args,
                            mha_call_info *info, mha_error *error);

/* The same for mha_attention(args, ...). */
MHA_API mha_status mha_attention_info(const mha_attention_args *args, mha_call_info *info,
                                      mha_error *error);

/* ---- A product alone ------------------------------------------------------------------------ */

/*
 * A linear layer, y = x W + bias: for feed-forward blocks, low-rank projections and logits, with
 * all that the projections of mha_forward have. mha_layer_view, _verify, _shape and _destroy take
 * it, mha_forward refuses it. Types, scales and layouts are as in mha_layer_weights.
 */
typedef struct mha_linear_weights {
  size_t struct_size;    /* sizeof the struct */
  int64_t input_dim;     /* width of a row of x; >= 1 */
  int64_t output_dim;    /* width of a row of y; >= 1 */
  uint32_t layout;       /* MHA_LAYOUT_* of w; 0 = IN_OUT */
  uint32_t type;         /* MHA_TYPE_* of w; 0 = f32 */
  const void *w;         /* [input_dim, output_dim], with MHA_LAYOUT_OUT_IN transposed */
  const float *bias;     /* [output_dim]; NULL = none */
  int64_t w_stride;      /* from one row of w to the next; 0 = contiguous */
  const float *w_scales; /* of int8 [output_dim], of int4 [output_dim, ceil(input_dim / 32)] */
  uint32_t weight_type;  /* MHA_TYPE_*: how weights are kept; 0 = f32 */
  uint32_t arithmetic;   /* MHA_ARITHMETIC_* of the product; 0 = F32 */
} mha_linear_weights;

/* As mha_layer_create, of a linear layer. */
MHA_API mha_status mha_linear_create(const mha_linear_weights *weights,
                                     const mha_layer_options *options, mha_layer **layer,
                                     mha_error *error);

/* As mha_layer_pack_size, of a linear layer. */
MHA_API mha_status mha_linear_pack_size(const mha_linear_weights *weights,
                                        const mha_layer_options *options, size_t *bytes,
                                        mha_error *error);

/* As mha_layer_pack, of a linear layer. */
MHA_API mha_status mha_linear_pack(const mha_linear_weights *weights,
                                   const mha_layer_options *options, void *buffer,
                                   size_t buffer_bytes, mha_error *error);

/* Rows times a linear layer, or times the W_O of a layer with heads, where x is the context. */
typedef struct mha_linear_args {
  size_t struct_size;   /* sizeof the struct */
  int64_t rows;         /* of x, residual and output; >= 1, or MHA_EMPTY = nothing to do */
  const void *x;        /* [rows, width of x], of input_type */
  const void *residual; /* [rows, output_dim], of output_type; it may be output; NULL = none */
  void *output;         /* [rows, output_dim], of output_type */
  uint32_t input_type;  /* MHA_TYPE_F32, F16 or BF16; 0 = F32 */
  uint32_t output_type; /* likewise */
  int64_t x_row_stride, residual_row_stride, output_row_stride; /* 0 = contiguous */
  const mha_scheduler *scheduler; /* threads; NULL = the calling thread alone */
} mha_linear_args;

/* The bytes of workspace that mha_linear needs, as mha_forward_workspace says; often 0. */
MHA_API mha_status mha_linear_workspace(const mha_layer *layer, const mha_linear_args *args,
                                        size_t *bytes, mha_error *error);

/* Runs the product. Each row has the same bits for any other rows. */
MHA_API mha_status mha_linear(const mha_layer *layer, const mha_linear_args *args, void *workspace,
                              size_t workspace_bytes, mha_error *error);

/* As mha_info, for mha_linear(layer, args, ...). Of the packed layer, bytes counts W_O and b_o. */
MHA_API mha_status mha_linear_info(const mha_layer *layer, const mha_linear_args *args,
                                   mha_call_info *info, mha_error *error);

#ifdef __cplusplus
}
#endif

#endif /* MHA_H */
