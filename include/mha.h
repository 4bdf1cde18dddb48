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
 *     mha_linear_create, mha_linear          packs a linear layer, y = x W + b; runs one
 *     mha_options.h, included at the end     types of weights, gates, saved layers, more of caches,
 *                                            rotation, norms, score options, states, taps, costs
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
 *               shapes, strides, NULLs and pointers to no layer or cache are found before the first
 *               write: after an error, outputs, results and caches are as they were. A layer that
 *               was destroyed is found only while its memory is there and has no other use.
 *     threads   Any function may run on any thread at any time, as long as no two calls at the same
 *               time write the same memory. A mha_layer is immutable. A thread that runs the
 *               library has 96 KiB of stack left and the default floating point: exceptions masked,
 *               rounding to nearest, subnormals kept (no FTZ, no DAZ). mha_info says whether it
 *               rounds and keeps them so. No function changes this, nor errno.
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
#define MHA_CONTRACT 1

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

/* ---- Status, errors and version ------------------------------------------------------------- */

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
#define MHA_ERROR_PACKED_FORMAT 9u    /* no packed layer of this version, or its sgemm differs */
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

/* 10000 * major + 100 * minor + patch of the linked library; it may be newer than this header. */
MHA_API uint32_t mha_version(void);

/* ---- Threads -------------------------------------------------------------------------------- */

/*
 * The caller's threads; without a scheduler, a call runs on the calling thread alone.
 *
 * parallel_for(context, count, task, task_context) runs task(task_context, index) exactly once for
 * each index from 0 to count - 1, 1 <= count <= num_threads, on any threads in any order, and
 * returns when all have returned. It must not fail or throw. Tasks never wait for each other and
 * never call parallel_for; so they may all run on the calling thread. A task sees what was written
 * before the call of parallel_for, and the caller sees afterwards what the tasks wrote. Calls that
 * run at the same time call it at the same time. This struct is frozen.
 */
typedef struct mha_scheduler {
  void *context;        /* passed to parallel_for as it is */
  uint32_t num_threads; /* the most tasks at once; >= 1; each takes its slice of the workspace */
  uint32_t reserved;    /* 0 */
  void (*parallel_for)(void *context, uint32_t count,
                       void (*task)(void *task_context, uint32_t index),
                       void *task_context); /* as said above */
} mha_scheduler;

/* ---- Extents, strides and types ------------------------------------------------------------- */

#define MHA_EMPTY INT64_MIN     /* an extent of a call: nothing there, as in a batch of none */
#define MHA_BROADCAST INT64_MIN /* a stride of an input: sequences, heads or rows are one, once */

/* Types of stored numbers. Arrays of f16 and bf16 are of uint16_t, with the bits of the numbers. */
#define MHA_TYPE_F32 0u  /* float */
#define MHA_TYPE_F16 1u  /* IEEE binary16 */
#define MHA_TYPE_BF16 2u /* the upper half of a float */
#define MHA_TYPE_INT8 3u /* -127 .. 127 times a scale */
#define MHA_TYPE_INT4 4u /* -8 .. 7 times a scale; weights only */

/* ---- The layer ------------------------------------------------------------------------------ */

typedef struct mha_layer mha_layer; /* opaque: packed weights and their shape */
struct mha_layer_options;           /* instruction set, BLAS and memory, in mha_options.h */

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
  uint32_t weight_type; /* MHA_TYPE_*: how weights are kept; 0 = f32, for an sgemm too */
  uint32_t gate;        /* MHA_GATE_*: what the context is multiplied by before W_O; 0 = nothing */
  uint32_t arithmetic;  /* MHA_ARITHMETIC_* of the projections; 0 = F32 */
  int64_t gate_dim;     /* numbers of a head's gate: head_dim_v (or 0), or 1 for the whole head */
} mha_layer_config;

/* How a weight matrix lies in memory. With OUT_IN, a row has "in" elements. */
#define MHA_LAYOUT_IN_OUT 0u /* W [in, out], y = x W:   x @ W, GPT-2's Conv1D */
#define MHA_LAYOUT_OUT_IN 1u /* W [out, in], y = x W^T: PyTorch's nn.Linear and in_proj_weight */

/*
 * The weights: w_q, w_k and w_v, or one fused w_qkv, which needs key_dim = value_dim = query_dim;
 * or w_q alone, for calls with MHA_CACHE_READ: then key_dim and value_dim are 0; and w_o. Shapes
 * are for MHA_LAYOUT_IN_OUT; with OUT_IN every matrix is transposed. Columns of W_Q, W_K and W_V,
 * and rows of W_O, are those of head 0, then of head 1, and so on.
 *
 * Matrices of f32, f16 or bf16 are converted to weight_type. A quantiser's int8 or int4 need the
 * same weight_type and their scales, and are taken as they are ("Types of weights").
 */
typedef struct mha_layer_weights {
  size_t struct_size; /* sizeof the struct */
  uint32_t layout;    /* MHA_LAYOUT_* of all matrices; 0 = IN_OUT */
  uint32_t type;      /* MHA_TYPE_* of all matrices; 0 = f32 */

  /* Matrices: w_q, w_k and w_v, or w_qkv, or w_q; and W_O */
  const void *w_q;   /* [query_dim, num_heads * head_dim] */
  const void *w_k;   /* [key_dim, num_kv_heads * head_dim] */
  const void *w_v;   /* [value_dim, num_kv_heads * head_dim_v] */
  const void *w_qkv; /* [query_dim, columns of w_q, then of w_k, then of w_v] */
  const void *w_o;   /* [num_heads * head_dim_v, output_dim]; NULL: y is the context */
  const void *w_g;   /* gate: [query_dim, num_heads * gate_dim]; NULL: in w_q or w_qkv ("Gates") */

  /* Biases; NULL = none */
  const float *b_q;   /* [num_heads * head_dim] */
  const float *b_k;   /* [num_kv_heads * head_dim] */
  const float *b_v;   /* [num_kv_heads * head_dim_v] */
  const float *b_qkv; /* b_q, b_k and b_v in one array instead; with w_qkv or without */
  const float *b_o;   /* [output_dim]; only with w_o */
  const float *b_g;   /* [num_heads * gate_dim]; only with w_g */

  /* Strides from one row to the next; 0 = contiguous */
  int64_t w_q_stride, w_k_stride, w_v_stride, w_qkv_stride, w_o_stride, w_g_stride;

  /* Scales of int8 [out], of int4 [out, ceil(in / 32)]; of other types NULL */
  const float *w_q_scales;
  const float *w_k_scales;
  const float *w_v_scales;
  const float *w_qkv_scales;
  const float *w_o_scales;
  const float *w_g_scales;
} mha_layer_weights;

/*
 * Packs the weights, whose arrays are not needed afterwards, into memory that it allocates, 4 MiB
 * or more on huge pages where Linux has them, and makes *layer, NULL after an error. The caller
 * frees it by mha_layer_destroy when no call uses it any more. options NULL = all defaults.
 */
MHA_API mha_status mha_layer_create(const mha_layer_config *config,
                                    const mha_layer_weights *weights,
                                    const struct mha_layer_options *options, mha_layer **layer,
                                    mha_error *error);

/* Frees a layer made by mha_layer_create. Does nothing to NULL, or to a layer over a buffer. */
MHA_API void mha_layer_destroy(mha_layer *layer);

/* ---- The KV cache --------------------------------------------------------------------------- */

/*
 * The keys and values of earlier calls, after norm and rotation, so that a new token costs one row.
 * A cache holds several sequences, each with its own length, in one buffer of the caller's, which
 * can be copied, written to a file and viewed again, elsewhere and for any instruction set.
 *
 * Calls that append change a cache, and so do functions that take it without const. While one runs,
 * nothing else may use the cache, not even other sequences of it. Any number of calls may read it.
 */
typedef struct mha_kv_cache mha_kv_cache; /* opaque; lies in the caller's buffer */

/* What a cache holds. INT8 has a scale for each position and head. Rounding is to nearest. */
typedef struct mha_kv_cache_config {
  size_t struct_size;      /* sizeof the struct */
  int64_t num_sequences;   /* sequences, numbered from 0; >= 1 */
  int64_t capacity;        /* the most positions of a sequence; >= 1; of a ring, those kept */
  int64_t num_kv_heads;    /* key and value heads, the layer's; >= 1 */
  int64_t head_dim;        /* width of a head's keys, the layer's; >= 1 */
  int64_t head_dim_v;      /* width of a head's values, the layer's; 0 = head_dim */
  uint32_t k_type;         /* of keys: MHA_TYPE_F32, F16, BF16 or INT8; 0 = F32 */
  uint32_t v_type;         /* of values: likewise; 0 = k_type where they are in the keys */
  uint32_t kind;           /* MHA_CACHE_CONTIGUOUS, RING or PAGED; 0 = CONTIGUOUS */
  uint32_t values;         /* MHA_CACHE_VALUES_*: where values are; 0 = beside the keys */
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

/* ---- The call ------------------------------------------------------------------------------- */

/* Flags of a call, combined by |. Where several limit the keys of a query, all of them count. */
#define MHA_CAUSAL 1u       /* the query at position p attends to keys at positions <= p only */
#define MHA_WINDOW_LEFT 2u  /* ... to keys at positions >= p - window_left only */
#define MHA_WINDOW_RIGHT 4u /* ... to keys at positions <= p + window_right only */
#define MHA_PADDING_LEFT 8u /* the valid rows of a sequence are its last ones, not its first ones */
#define MHA_CACHE_READ 16u  /* attends to the cache as it is, and appends nothing */

/*
 * What mha_forward is given, and only reads. Self-attention needs batch, n_q, query and output.
 *
 * Positions count from the first key of a sequence: its first valid row or, with a cache, the first
 * that was appended. A sequence has the same bits alone, in a batch, with padding and from a cache,
 * as long as its keys have the same positions; with others the last bits may differ.
 *
 * q_start is -2^62 or more. Negative is before the first key; there rope without q_positions needs
 * MHA_CAUSAL. NULL = (length in the cache + n_kv) - n_q, of valid rows: the last query is at the
 * last key; negative with kv_start alone. In self-attention with a cache it is NULL, or the lengths
 * that the cache has. It is not looked at where neither mask nor scores nor rope count positions.
 *
 * Rows that are not valid are padding: not read, at no cost; their outputs are 0, their lse
 * -infinity. From kv_start on, as many rows are valid as lengths say, or all. In self-attention,
 * keys are valid where queries are: kv_start is of query too, and kv_lengths must be NULL.
 *
 * With cu_seqlens, sequences are packed, without lengths. Arrays of rows, and outputs, are then of
 * a batch of 1, in which sequence b is the rows from cu_seqlens[b] up to cu_seqlens[b + 1].
 *
 * With a cache, the call first appends the rows of key and value to its sequences, and then attends
 * to all that these hold, as it is stored. With MHA_CACHE_READ it appends nothing: key, value and
 * what is said of their rows must be NULL. num_kv_heads, head_dim and head_dim_v are the layer's.
 */
typedef struct mha_forward_args {
  size_t struct_size; /* sizeof the struct */

  /* Size */
  int64_t batch; /* sequences; >= 1, or MHA_EMPTY = nothing to do */
  int64_t n_q;   /* rows of query and output per sequence; likewise; then nothing is appended */
  /* Rows of key and value per sequence; >= 1, or MHA_EMPTY = none; with value alone n_q. Not looked
     at in self-attention, where it is n_q, and with MHA_CACHE_READ, where it is none. */
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
  uint32_t flags;       /* MHA_CAUSAL, MHA_WINDOW_LEFT, ... as above; 0 = no mask */
  uint32_t reserved;    /* 0 */
  int64_t window_left;  /* with MHA_WINDOW_LEFT: >= 0; without it 0 */
  int64_t window_right; /* with MHA_WINDOW_RIGHT: >= 0; without it 0 */
  const struct mha_score_options *score; /* what changes scores; NULL = nothing */

  /* Positions and the cache */
  const int64_t *q_start;       /* [batch]: position of the first valid query; NULL: as above */
  const int64_t *q_lengths;     /* [batch]: valid rows of query, 0 .. n_q; NULL = n_q */
  const int64_t *kv_lengths;    /* [batch]: of key and value, 0 .. n_kv; NULL = n_kv */
  const int64_t *kv_start;      /* [batch]: row of the first valid key; NULL = 0 */
  const int64_t *cu_seqlens_q;  /* [batch + 1], ascending: first rows of query; NULL = not packed */
  const int64_t *cu_seqlens_kv; /* likewise of key and value; NULL = as of query */
  const struct mha_norm *norm;  /* norm of queries and keys; NULL = none */
  const struct mha_rope *rope;  /* rotation of queries and keys; NULL = none */
  mha_kv_cache *cache;            /* appended to and attended to, as above; NULL = none */
  const int64_t *cache_sequences; /* [batch]: its sequences, each once; NULL = 0 .. batch - 1 */

  /* Outputs beside output, each optional and contiguous; threads */
  float *lse; /* [batch, num_heads, n_q]: ln of the sum of exp(score), the sink's included */
  /* [batch, num_heads, n_q, n_kv]: a row sums to 1, to less with sinks, or is 0 if all is masked.
     With a cache, n_kv is the longest length that the call's sequences have after it. */
  float *attention_weights;
  const struct mha_taps *taps; /* what the call computes on its way */
  const mha_scheduler *scheduler; /* NULL = the calling thread alone */
} mha_forward_args;

/*
 * The bytes of workspace that mha_forward needs. Reads no array, but rope's tables must be there,
 * and it counts which of key, value, optional outputs and lengths are given; of a cache, its shape.
 * More batch, n_q, n_kv, threads or outputs never need less: the maxima serve all smaller calls.
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
 * "as above" have the fields of mha_forward_args, with k and v for key and value. Strides:
 *
 *     [batch, n, heads, width]    all strides 0
 *     [batch, heads, n, width]    row width, head n * width, batch heads * n * width
 *
 * A head stride needs a row stride beside it, and for several sequences a batch stride.
 */
typedef struct mha_attention_args {
  size_t struct_size; /* sizeof the struct */

  /* As above: size; and shape */
  int64_t batch;
  int64_t n_q;
  int64_t n_kv;         /* rows of k and v per sequence; with MHA_CACHE_READ not looked at */
  int64_t num_heads;    /* heads of q; >= 1 */
  int64_t num_kv_heads; /* of k and v, a divisor, shared as in mha_layer_config; 0 = num_heads */
  int64_t head_dim;     /* width of a head's queries and keys; >= 1 */
  int64_t head_dim_v;   /* width of a head's values; 0 = head_dim */

  /* Arrays */
  const void *q;        /* [batch, n_q, num_heads, head_dim], of q_type */
  const void *k;        /* [batch, n_kv, num_kv_heads, head_dim], of k_type */
  const void *v;        /* [batch, n_kv, num_kv_heads, head_dim_v], of v_type; NULL: in the keys */
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
  const struct mha_score_options *score;

  /* As above: positions, cache, outputs beside output and execution */
  const int64_t *q_start;
  const int64_t *q_lengths;
  const int64_t *kv_lengths;
  const int64_t *kv_start;
  const int64_t *cu_seqlens_q;
  const int64_t *cu_seqlens_kv;
  const struct mha_norm *norm;
  const struct mha_rope *rope; /* of q, and of k before it is scored or stored; NULL = none */
  mha_kv_cache *cache;         /* its num_kv_heads, head_dim and head_dim_v are those above */
  const int64_t *cache_sequences;
  float *lse;
  float *attention_weights;
  const struct mha_taps *taps; /* its q, k and v must be NULL */
  const mha_scheduler *scheduler;
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_*; 0 = the best one that this machine has */
  uint32_t reserved;        /* 0 */
  float *states;       /* [batch, num_heads, n_q, head_dim_v + 2] in place of output ("States") */
  int64_t kv_position; /* of the first key of a sequence, or of its cache; 0 .. 2^62 ("States") */
} mha_attention_args;

/* The bytes of workspace that mha_attention needs, as mha_forward_workspace says. */
MHA_API mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes,
                                           mha_error *error);
/* Runs attention alone; as mha_forward, whose middle stage has the same bits. */
MHA_API mha_status mha_attention(const mha_attention_args *args, void *workspace,
                                 size_t workspace_bytes, mha_error *error);

/* ---- A product alone ------------------------------------------------------------------------ */

/*
 * A linear layer, y = x W + bias, as the projections of mha_forward are computed. mha_layer_view,
 * _verify, _shape and _destroy take it, mha_forward does not. Types are as in mha_layer_weights.
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
                                     const struct mha_layer_options *options, mha_layer **layer,
                                     mha_error *error);

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

#ifdef __cplusplus
}
#endif

#include "mha_options.h"

#endif /* MHA_H */
