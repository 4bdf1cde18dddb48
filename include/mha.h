/*
 * mha: multi-head attention for CPUs
 *
 * One call takes the input rows x of an attention layer to its output rows y:
 *
 *     q, k, v = x W_Q, x W_K, x W_V                     [batch, n, heads * width of a head]
 *     context = softmax(scale * q k^T) v, head by head  [batch, n, num_heads * head_dim_v]
 *     y       = context W_O                             [batch, n, output_dim]
 *
 * (Vaswani et al., arXiv:1706.03762; no dropout.) In the order of this file:
 *
 *     mha_layer_create, mha_layer_destroy    packs the weights of a layer; frees them
 *     mha_kv_cache_init                      makes a cache of the keys and values of earlier calls
 *     mha_forward_workspace, mha_forward     says how much memory a call needs; runs a layer
 *     mha_attention                          the same for softmax(scale * q k^T) v alone
 *     mha_info                               says how a call will run, and what it costs
 *     mha_linear_create, mha_linear          packs a linear layer, y = x W + b; runs one
 *     mha_options.h                          rotation, norms, score options, optional outputs
 *
 * The library allocates only in mha_layer_create and mha_linear_create. It starts no thread, takes
 * no lock, never prints and never aborts. Results are the same bits for any batch, number of
 * threads, instruction set and way of cutting a sequence into calls over a cache
 * (src/kernels/CONTRACT.md); with a BLAS of the caller's (mha_sgemm), projections are that BLAS's.
 *
 * Rules for everything below:
 *
 *     arrays    hold floats unless said otherwise. A shape such as [batch, n, dim] names the
 *               extents from the outermost to the innermost, whose stride is 1.
 *     strides   count elements. 0 = contiguous, as the shape says; MHA_BROADCAST (inputs of a call
 *               only) = the same for all. The stride of a row or a head is at least the innermost
 *               extent. Strides of outputs nest: each steps over all that the smaller ones reach.
 *     extents   batch, n_q, n_kv and rows are at least 1, or MHA_EMPTY. 0 is an error.
 *     numbers   dimensions, counts, positions and strides are int64_t, sizes in bytes size_t.
 *     structs   begin with struct_size = sizeof the struct. Any other field may stay zero: its
 *               comment says what 0 or NULL means, unless it is the number itself. Reserved fields
 *               must be 0. Later versions add fields at the end, except to frozen structs.
 *     pointers  are borrowed for the call. Buffers of packed layers and caches are aligned to 64
 *               bytes, all else as its type needs.
 *     aliasing  Inputs may overlap each other, but not a cache that is appended to. Outputs must
 *               not overlap inputs, the workspace, a cache or each other. But output may alias
 *               query (or q), with its type and strides; then key and value must be separate
 *               arrays, and mha_attention has no outputs per pair. The library cannot check this.
 *     errors    What can fail returns a mha_status and fills a mha_error if one is given. Sizes,
 *               shapes, strides and NULLs are checked before the first write: after an error,
 *               outputs, results and caches are as they were.
 *     threads   Any function may run on any thread at any time, as long as no two calls at the same
 *               time write the same memory. A mha_layer is immutable. A thread that runs the
 *               library must round to nearest and keep subnormals (no FTZ, no DAZ), which is the
 *               default, and have 96 KiB of stack left.
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

/* One of those below. The numbers never change; later versions may add some. */
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
 * The caller's threads; without a scheduler, a call runs on the calling thread alone.
 *
 * parallel_for(context, count, task, task_context) runs task(task_context, index) exactly once for
 * each index from 0 to count - 1, 1 <= count <= num_threads, on any threads in any order, and
 * returns when all have returned. It must not fail or throw. Tasks never wait for each other and
 * never call parallel_for; so they may all run on the calling thread. A task sees what was written
 * before the call of parallel_for, and the caller sees afterwards what the tasks wrote. Calls that
 * run at the same time call it at the same time. No result depends on it. This struct is frozen.
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

/* What most need not set: how a layer computes, rotation, norms, score options, taps. */
#include "mha_options.h"

/* ---- The layer ------------------------------------------------------------------------------ */

/*
 * Packed weights and their shape; the same packed bytes serve every instruction set.
 *     mha_layer_create    packs into memory that it allocates; mha_layer_destroy frees it
 *     mha_layer_pack      packs into the caller's buffer, which can be written to a file
 *     mha_layer_view      makes a layer over such a buffer without a copy, such as a file in mmap
 */
typedef struct mha_layer mha_layer; /* opaque; immutable once made */

/*
 * The shape of a layer: query_dim, num_heads and, unless all heads together are query_dim wide,
 * head_dim are needed. Dimensions, and num_heads times a head's width, are at most 2^31 - 1. Query
 * head h attends with kv head h / (num_heads / num_kv_heads).
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
 * Weights in fewer bits are less to read, which is what few rows spend their time on. Biases stay
 * float. Rounding is to nearest, ties to even. One weight that is not finite makes its column
 * (int8) or group (int4) NaN as a whole.
 *     F16     2 bytes a weight, 11 significant bits. A finite one of 65520 or more is refused.
 *     BF16    2 bytes a weight, 8 significant bits, the range of float
 *     INT8    1 byte a weight, and a scale for each output column: its largest magnitude / 127
 *     INT4    5/8 of a byte a weight: a scale for each output column and group of 32 inputs, of
 *             which the last may be shorter. The weight of the largest magnitude is -8 times it.
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
 * with a number for each element or for each head. A row of 0 stays 0.
 */
#define MHA_GATE_NONE 0u
#define MHA_GATE_SIGMOID 1u  /* 1 / (1 + exp(-g)): Qwen3-Next; one for each head: Step */
#define MHA_GATE_SOFTPLUS 2u /* ln(1 + exp(g)) */

/* How a weight matrix lies in memory. With OUT_IN, a row has "in" elements. */
#define MHA_LAYOUT_IN_OUT 0u /* W [in, out], y = x W:   x @ W, GPT-2's Conv1D */
#define MHA_LAYOUT_OUT_IN 1u /* W [out, in], y = x W^T: PyTorch's nn.Linear and in_proj_weight */

/*
 * The weights: w_q, w_k and w_v, or one fused w_qkv, which needs key_dim = value_dim = query_dim;
 * and w_o. Shapes are for MHA_LAYOUT_IN_OUT; with OUT_IN every matrix is transposed. Columns of
 * W_Q, W_K and W_V, and rows of W_O, are those of head 0, then of head 1, and so on.
 *
 * Matrices of f32, f16 or bf16 are converted to weight_type. A quantiser's int8 or int4 need the
 * same weight_type and are taken as they are: a weight is code * scale.
 *     int8    codes are int8_t
 *     int4    with MHA_LAYOUT_OUT_IN only. A row is ceil(in / 2) bytes. Each holds two codes + 8,
 *             the earlier input in the low half. Strides count elements and are even.
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
 * The bytes that mha_layer_pack needs: they depend on config, w_o and sgemm, not on the
 * instruction set. Checks all but the contents of arrays, and reads none.
 */
MHA_API mha_status mha_layer_pack_size(const mha_layer_config *config,
                                       const mha_layer_weights *weights,
                                       const mha_layer_options *options, size_t *bytes,
                                       mha_error *error);

/*
 * Packs the weights, whose arrays are not needed afterwards, into buffer, which is aligned to 64
 * bytes, as by aligned_alloc(64, size). The packed layer is its first mha_layer_pack_size bytes,
 * the same on every machine of this byte order: copy them, or write them to a file.
 */
MHA_API mha_status mha_layer_pack(const mha_layer_config *config, const mha_layer_weights *weights,
                                  const mha_layer_options *options, void *buffer,
                                  size_t buffer_bytes, mha_error *error);

/* The bytes of storage that mha_layer_view needs for the layer object, without the weights. */
MHA_API size_t mha_layer_view_size(void);

/*
 * Makes *layer over a packed buffer, aligned to 64 bytes, and places the layer object in storage,
 * of any alignment. Both stay the caller's, unchanged as long as the layer is used; there is
 * nothing to destroy. Checks the header and bounds, in constant time, not the weights.
 * options->sgemm must be given if the buffer was packed with one, and only then.
 */
MHA_API mha_status mha_layer_view(const void *buffer, size_t buffer_bytes,
                                  const mha_layer_options *options, void *storage,
                                  size_t storage_bytes, const mha_layer **layer, mha_error *error);

/* Checks what mha_layer_view checks, and the checksum of all weights. Reads the whole buffer. */
MHA_API mha_status mha_layer_verify(const void *buffer, size_t buffer_bytes, mha_error *error);

/*
 * Packs the weights into memory that it allocates, 4 MiB or more on huge pages where Linux has
 * them, and makes *layer, NULL after an error. The caller frees it by mha_layer_destroy when no
 * call uses it any more.
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

/* ---- The KV cache --------------------------------------------------------------------------- */

/*
 * The keys and values of earlier calls, after norm and rotation, so that a new token costs one row.
 * A cache holds several sequences, each with its own length, in one buffer of the caller's, which
 * can be copied, written to a file and viewed again, elsewhere and for any instruction set.
 *
 * Calls that append change a cache, and so do functions that take it without const. These must not
 * run at the same time as anything else on it, not even for other sequences. All others only read
 * it, on any number of threads. A call that fails leaves it as it was, byte for byte.
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

/* The bytes of buffer that a cache needs, a multiple of 64. */
MHA_API mha_status mha_kv_cache_size(const mha_kv_cache_config *config, size_t *bytes,
                                     mha_error *error);

/*
 * Makes an empty cache in buffer, which is aligned to 64 bytes and has mha_kv_cache_size bytes.
 * *cache points into it: it stays the caller's as long as the cache is used; there is nothing to
 * destroy. The room for keys and values is not written. A paged cache has no blocks yet.
 */
MHA_API mha_status mha_kv_cache_init(const mha_kv_cache_config *config, void *buffer,
                                     size_t buffer_bytes, mha_kv_cache **cache, mha_error *error);

/*
 * The same over a buffer that holds a cache, such as a copy or a file in mmap; it may be read-only
 * if the cache is only read. Checks header, lengths and block tables, not keys and values.
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
 * hold positions must stay in their places. Sequences with a common prefix may share blocks, into
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
 * NULL will do with a count of 0. They are stored bit for bit as a call stores them.
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

/* ---- The call ------------------------------------------------------------------------------- */

/*
 * Positions count from the first key of a sequence: its first valid row or, with a cache, the first
 * that was appended. A sequence has the same bits alone, in a batch, with padding and from a cache,
 * as long as its keys have the same positions; with others the last bits may differ.
 */

/* Flags of a call, combined by |. Where several limit the keys of a query, all of them count. */
#define MHA_CAUSAL 1u       /* the query at position p attends to keys at positions <= p only */
#define MHA_WINDOW_LEFT 2u  /* ... to keys at positions >= p - window_left only */
#define MHA_WINDOW_RIGHT 4u /* ... to keys at positions <= p + window_right only */
#define MHA_PADDING_LEFT 8u /* the valid rows of a sequence are its last ones, not its first ones */
#define MHA_CACHE_READ 16u  /* attends to the cache as it is, and appends nothing */

/*
 * The arguments of mha_forward. Self-attention needs batch, n_q, query and output. A call writes
 * nothing to the struct, which can be used again.
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
 * The bytes of workspace that mha_forward needs for these arguments. Reads no array, but rope's
 * tables must be there, and it counts which of key, value, optional outputs and lengths are given.
 * Of a cache, the shape counts. More batch, n_q, n_kv, num_threads or outputs never need less: a
 * query at the maxima serves all smaller calls.
 */
MHA_API mha_status mha_forward_workspace(const mha_layer *layer, const mha_forward_args *args,
                                         size_t *bytes, mha_error *error);

/*
 * Runs a layer, from input rows to output rows. workspace is memory of at least
 * mha_forward_workspace bytes, of any alignment and content, for one call at a time.
 *
 *     all keys of a row are masked, or none there   context 0, lse -infinity: y is b_o or 0
 *     NaN in an input row                           reaches the rows that attend to it alone
 *     NaN in what is masked                         reaches the taps scores, scaled_scores alone
 *     a score of +infinity, of -infinity            a row of NaN; counts as masked
 */
MHA_API mha_status mha_forward(const mha_layer *layer, const mha_forward_args *args,
                               void *workspace, size_t workspace_bytes, mha_error *error);

/* ---- Attention alone ------------------------------------------------------------------------ */

/*
 * The arguments of mha_attention: context = softmax(scale * q k^T) v, without projections. Groups
 * "as above" have the fields of mha_forward_args, with k and v for key and value. Query head h
 * attends with kv head h / (num_heads / num_kv_heads).
 *
 *     [batch, n, heads, width]    all strides 0
 *     [batch, heads, n, width]    row width, head n * width, batch heads * n * width
 *
 * A head stride needs a row stride beside it, and for several sequences a batch stride.
 */
typedef struct mha_attention_args {
  size_t struct_size; /* sizeof the struct */

  /* As above: size */
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

  /* As above: mask */
  uint32_t flags;
  float scale; /* factor of the scores; finite; 0 = 1 / sqrt(head_dim); 1e-45f = all are equal */
  int64_t window_left, window_right;
  const mha_score_options *score;

  /* As above: positions */
  const int64_t *q_start;
  const int64_t *q_lengths;
  const int64_t *kv_lengths;
  const int64_t *kv_start;
  const int64_t *cu_seqlens_q;
  const int64_t *cu_seqlens_kv;
  const mha_norm *norm;
  const mha_rope *rope;         /* of q, and of k before it is scored or stored; NULL = none */

  /* As above: cache */
  mha_kv_cache *cache; /* its num_kv_heads, head_dim and head_dim_v are those above */
  const int64_t *cache_sequences;

  /* As above: outputs beside output */
  float *lse;
  float *attention_weights;
  const mha_taps *taps; /* its q, k and v must be NULL */

  /* As above: execution */
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
