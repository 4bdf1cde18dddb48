/*
 * mha: multi-head attention for CPUs
 *
 * One call takes the input rows x of an attention layer to its output rows y:
 *
 *     q, k, v = x W_Q, x W_K, x W_V                     [batch, n, heads * width of a head]
 *     context = softmax(scale * q k^T) v, head by head  [batch, n, num_heads * head_dim_v]
 *     y       = context W_O                             [batch, n, output_dim]
 *
 * (Vaswani et al., arXiv:1706.03762.) There are five headers; programs include this one alone:
 *
 *     mha.h            layers, KV caches, sequences; mha_forward, mha_attention and mha_linear
 *     mha_options.h    integer weights, gates, RoPE, norms, score options
 *     mha_tables.h     tables for RoPE, ALiBi and T5
 *     mha_extra.h      packed files, cache tools, partials, chosen keys, optional outputs, costs
 *     mha_recurrent.h  attention with a recurrent state (linear attention), causal convolution
 *
 * The library allocates memory only in mha_layer_create and mha_linear_create. It starts no
 * thread, takes no lock, never prints and never aborts. Results have the same bits for any batch,
 * number of threads, instruction set and way of cutting a sequence into calls over a cache
 * (src/kernels/CONTRACT.md). With a user-supplied BLAS (mha_sgemm), projections have that BLAS's
 * rounding.
 *
 * These rules hold for all functions and structs:
 *
 *   Arrays     A shape such as [batch, n, dim] lists the extents from the outermost to the
 *              innermost; the innermost stride is 1. "Contiguous" means that there are no gaps.
 *   Extents    n_q, n_kv and rows must be set. They are at least 1, or MHA_EMPTY. Widths, numbers
 *              of heads, num_sequences and num_blocks are at most 2^31 - 1.
 *   Structs    Most structs begin with struct_size, which MHA_INIT or the caller sets to sizeof the
 *              struct. Every other field may be left 0 unless its comment says otherwise. Reserved
 *              fields must be 0. Later versions may append fields, except to frozen structs.
 *   Ownership  Pointers are borrowed for the duration of the call. Buffers for packed layers and
 *              caches must be aligned to 64 bytes; everything else as its type requires.
 *   Aliasing   Inputs may overlap each other, but not a cache that the call appends to. Outputs
 *              must not overlap inputs, the workspace, a cache or each other, unless a field's
 *              comment allows it. In attention, output may be the same array as query (or q) if
 *              type and strides are equal, key and value are other arrays, and no optional output
 *              has a number per pair of query and key. The library cannot check aliasing.
 *   Errors     A function that can fail returns a mha_status and, if error is not NULL, explains
 *              what is wrong. All arguments are checked before the first write: after an error,
 *              outputs, results and caches are unchanged. Use after destroy is detected only until
 *              the memory is reused.
 *   Threads    Any function may run on any thread at any time, as long as no two concurrent calls
 *              write to the same memory. A mha_layer is immutable. The library needs 96 KiB of
 *              stack and the default floating-point environment: exceptions masked, rounding to
 *              nearest, subnormals kept (no FTZ or DAZ). It never changes this environment, nor
 *              errno. mha_forward_info reports whether the calling thread rounds as required.
 */
#ifndef MHA_H
#define MHA_H

#include <stddef.h>
#include <stdint.h>

/* The version of this header. A library with the same major version number can replace it. */
#define MHA_VERSION_MAJOR 0
#define MHA_VERSION_MINOR 1
#define MHA_VERSION_PATCH 0

/* The arithmetic contract (src/kernels/CONTRACT.md). Within one number, bits never change. */
#define MHA_CONTRACT 3

/* Marks exported functions. On Windows, programs that use the DLL define MHA_SHARED. */
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

/* One of the values below. They never change; later versions may add more. */
typedef uint32_t mha_status;

#define MHA_OK 0u                     /* success */
#define MHA_ERROR_NULL_POINTER 1u     /* a required pointer is NULL */
#define MHA_ERROR_STRUCT_SIZE 2u      /* struct_size is too small, or unknown fields are not 0 */
#define MHA_ERROR_INVALID_VALUE 3u    /* a value is out of range or contradicts another one */
#define MHA_ERROR_SHAPE 4u            /* dimensions do not fit together */
#define MHA_ERROR_TOO_LARGE 5u        /* a size overflows, here or in the caller's BLAS */
#define MHA_ERROR_BUFFER_TOO_SMALL 6u /* a buffer is smaller than the size query says */
#define MHA_ERROR_OUT_OF_MEMORY 7u    /* the allocator returned NULL */
#define MHA_ERROR_INSTRUCTION_SET 8u  /* this machine or build lacks the requested one */
#define MHA_ERROR_PACKED_FORMAT 9u    /* not a layer of this format, or another sgemm setting */
#define MHA_ERROR_PACKED_CHECKSUM 10u /* the contents of a packed layer are damaged */
#define MHA_ERROR_OUT_OF_RANGE 11u    /* a finite weight is too large for f16 */
#define MHA_ERROR_CACHE_FULL 12u      /* a cache has no room or no block for new rows */
#define MHA_ERROR_CACHE_SHARED 13u    /* a call would write to a block that sequences share */
#define MHA_ERROR_CACHE_FORMAT 14u    /* not a cache of this format, or damaged */

/* Describes an error. Every function that takes one fills it. This struct is frozen. */
typedef struct mha_error {
  uint32_t status;   /* the status that the function returned */
  uint32_t argument; /* the parameter at fault, counted from 1; 0 = none in particular */
  char message[248]; /* what is wrong and how to fix it; "" on success */
} mha_error;

/* Returns "MHA_ERROR_SHAPE" and so on, or "unknown mha_status". The string is static. */
MHA_API const char *mha_status_string(mha_status status);
/* Returns 10000 * major + 100 * minor + patch of the linked library. */
MHA_API uint32_t mha_version(void);

/* ---- Threads -------------------------------------------------------------------------------- */

/*
 * Runs tasks on the caller's threads. Without a scheduler, a call runs on the calling thread.
 *
 * parallel_for(context, count, task, task_context) runs task(task_context, index) exactly once for
 * each index in 0 .. count - 1, on any threads and in any order, and returns when all tasks have
 * returned. It must not fail or throw. Tasks never wait for each other and never call parallel_for.
 * A task must see what was written before parallel_for was called, and the caller must see what the
 * tasks wrote. Concurrent calls of the library call parallel_for concurrently. This struct is
 * frozen.
 */
typedef struct mha_scheduler {
  void *context;        /* passed to parallel_for unchanged */
  uint32_t num_threads; /* the most tasks at once; >= 1. The workspace grows with it. */
  uint32_t reserved;
  void (*parallel_for)(void *context, uint32_t count,
                       void (*task)(void *task_context, uint32_t index), void *task_context);
} mha_scheduler;

/* ---- Types, arrays and matrices ------------------------------------------------------------- */

/* A struct whose struct_size is set and whose other fields are 0: MHA_INIT(mha_forward_args). */
#ifdef __cplusplus
#define MHA_INIT(Type) \
  ([] { Type mha_init = Type(); mha_init.struct_size = sizeof(Type); return mha_init; }())
#else
#define MHA_INIT(Type) ((Type){.struct_size = sizeof(Type)})
#endif

/* Element types. 0 selects a default, which the field's comment names. */
#define MHA_TYPE_F32 1u  /* float */
#define MHA_TYPE_F16 2u  /* IEEE binary16, as the bits of a uint16_t */
#define MHA_TYPE_BF16 3u /* bfloat16, the upper half of a float, as the bits of a uint16_t */
#define MHA_TYPE_INT8 4u /* -127 .. 127 times a scale; weights and caches only */
#define MHA_TYPE_INT4 5u /* -8 .. 7 times a scale; weights and cached values only */
#define MHA_TYPE_INT5 6u /* -16 .. 15 times a scale; packed weights only */
#define MHA_TYPE_INT6 7u /* -32 .. 31 times a scale; packed weights only */

#define MHA_EMPTY INT64_MIN     /* an explicitly empty extent; a plain 0 is rejected as unset */
#define MHA_BROADCAST INT64_MIN /* a stride of an input: one copy serves all */

/*
 * The distances between neighbours, in elements. A stride of 0 means contiguous: a dimension starts
 * where those inside it end. (0 does not broadcast, unlike the strides of expanded tensors.) A
 * stride that is set must step over all that the 0 strides inside it span; to interleave
 * dimensions, set every stride. In [batch, n, heads, width], a head stride needs a row stride and,
 * for several sequences, a batch stride. Elements of outputs must not overlap. An array that lacks
 * a dimension, such as the heads of mha_forward's query, needs 0 there. This struct is frozen.
 */
typedef struct mha_strides {
  int64_t batch; /* from sequence to sequence; 0 = contiguous, or MHA_BROADCAST */
  int64_t row;   /* from row to row, at least a row's width; 0 = contiguous, or MHA_BROADCAST */
  int64_t head;  /* from head to head, at least a head's width; 0 = contiguous, or MHA_BROADCAST */
} mha_strides;

/* An array that a call reads. This struct is frozen. */
typedef struct mha_input {
  const void *data;  /* the first element */
  uint32_t type;     /* MHA_TYPE_F32, F16 or BF16; 0 = F32 unless the field says otherwise */
  uint32_t reserved;
  mha_strides strides; /* 0 = contiguous; MHA_BROADCAST is allowed */
  const void *reserved_pointer;
} mha_input;

/* An array that a call writes. This struct is frozen. */
typedef struct mha_output {
  void *data;        /* the first element */
  uint32_t type;     /* MHA_TYPE_F32, F16 or BF16; 0 = F32 */
  uint32_t reserved;
  mha_strides strides; /* 0 = contiguous */
} mha_output;

/* A weight matrix and its bias. This struct is frozen. */
typedef struct mha_matrix {
  const void *data;     /* the first weight; NULL = no matrix */
  const float *bias;    /* [out]; NULL = 0 */
  const float *scales;  /* [out], in groups [out, ceil(in / group_size)]; NULL = no codes */
  const float *offsets; /* of codes in groups, of the shape of scales; NULL = none */
  const float *block_scales;  /* factors of scales: [out, ceil(in / 256)]; NULL = none */
  const float *block_offsets; /* factors of offsets, of the shape of block_scales; NULL = none */
  int64_t row_stride;   /* elements from one row to the next; 0 = contiguous */
} mha_matrix;

/* The layout of a weight matrix. A row of OUT_IN has "in" elements. */
#define MHA_LAYOUT_IN_OUT 0u /* W [in, out], y = x W:   x @ W, GPT-2's Conv1D */
#define MHA_LAYOUT_OUT_IN 1u /* W [out, in], y = x W^T: PyTorch's nn.Linear and in_proj_weight */

/* ---- The layer ------------------------------------------------------------------------------ */

typedef struct mha_layer mha_layer; /* opaque: packed weights and their shape */
struct mha_layer_options;           /* in mha_extra.h: instruction set, BLAS and memory */

/* How a packed layer keeps and multiplies weights (mha_options.h). This struct is frozen. */
typedef struct mha_weight_format {
  uint32_t type;       /* MHA_TYPE_* of the packed weights; 0 = F32 */
  uint32_t group_size; /* inputs that share a scale: 16, 32, 64, 128; 0 = all (INT8), 32 (INT4) */
  uint32_t scale_type; /* of scales and offsets of groups: MHA_TYPE_F32, F16 or INT8; 0 = F32 */
  uint32_t arithmetic; /* MHA_ARITHMETIC_* of the products; 0 = F32 */
} mha_weight_format;

/*
 * The shape of a layer. query_dim and num_heads are required, and head_dim too unless num_heads *
 * head_dim is query_dim. num_heads times the width of a head is at most 2^31 - 1.
 * Query head h uses key and value head h / (num_heads / num_kv_heads).
 */
typedef struct mha_layer_config {
  size_t struct_size;

  /* Inputs and output */
  int64_t query_dim;  /* width of a row of query (d_in, embed_dim); >= 1 */
  int64_t key_dim;    /* width of a row of key; 0 = query_dim */
  int64_t value_dim;  /* width of a row of value; 0 = key_dim */
  int64_t output_dim; /* width of a row of output; 0 = query_dim. Without W_O it must be 0. */

  /* Heads */
  int64_t num_heads;    /* query heads (mha_linear_create makes a layer without); >= 1 */
  int64_t num_kv_heads; /* key and value heads; divides num_heads; 0 = num_heads */
  int64_t head_dim;     /* width of a query or key of one head; 0 = query_dim / num_heads */
  int64_t head_dim_v;   /* width of a value of one head; 0 = head_dim */
  float scale;          /* factor of the scores; finite; 0 = 1 / sqrt(head_dim) */

  /* Weights and gate (mha_options.h) */
  mha_weight_format format; /* of the packed weights */
  uint32_t gate;    /* MHA_FUNCTION_SIGMOID or SOFTPLUS: multiplies the context; 0 = none */
  int64_t gate_dim; /* numbers of a head's gate: 1 or head_dim_v; 0 = head_dim_v */
} mha_layer_config;

/*
 * The weights of a layer: w_q, w_k and w_v, or one fused w_qkv, which requires that key_dim and
 * value_dim equal query_dim. A layer with w_q alone can only attend to a cache (cache_read); its
 * key_dim and value_dim are 0. Shapes below are for MHA_LAYOUT_IN_OUT; OUT_IN transposes every
 * matrix. The columns of W_Q, W_K and W_V and the rows of W_O are those of head 0, then of head 1,
 * and so on.
 *
 * Biases of q, k and v may be fused (w_qkv.bias) or separate, whether or not the matrices are.
 * F32, F16 and BF16 matrices are converted to format.type. INT8 and INT4 matrices come from a
 * quantiser, need the same format.type (INT8 also INT5 or INT6), and are packed without change.
 */
typedef struct mha_layer_weights {
  size_t struct_size;
  uint32_t layout; /* MHA_LAYOUT_* of all matrices; 0 = IN_OUT */
  uint32_t type;   /* of all matrices: MHA_TYPE_F32, F16, BF16, INT8 or INT4; 0 = F32 */
  uint32_t gate_place; /* MHA_GATE_IN_W_G or IN_W_Q (mha_options.h); 0 = IN_W_G */
  mha_matrix w_q;   /* [query_dim, num_heads * head_dim]; data NULL = in w_qkv */
  mha_matrix w_k;   /* [key_dim, num_kv_heads * head_dim]; data NULL = in w_qkv, or none */
  mha_matrix w_v;   /* [value_dim, num_kv_heads * head_dim_v]; data NULL = as w_k */
  mha_matrix w_qkv; /* [query_dim, qkv_dim]: w_q's columns, then w_k's, w_v's; data NULL = none */
  mha_matrix w_o;   /* [num_heads * head_dim_v, output_dim]; data NULL = y is the context */
  mha_matrix w_g;   /* gate: [query_dim, num_heads * gate_dim]; data NULL = none, or IN_W_Q */
} mha_layer_weights;

/*
 * Packs the weights into memory that the library allocates, and sets *layer (NULL after an error).
 * The arrays of weights are not needed afterwards. Memory of 4 MiB or more is on huge pages where
 * Linux has them. Free the layer with mha_layer_destroy when no call uses it. options NULL =
 * defaults.
 */
MHA_API mha_status mha_layer_create(const mha_layer_config *config,
                                    const mha_layer_weights *weights,
                                    const struct mha_layer_options *options, mha_layer **layer,
                                    mha_error *error);
/* Frees a layer that was created. Does nothing to NULL or to a layer made by mha_layer_view. */
MHA_API void mha_layer_destroy(mha_layer *layer);

/* ---- The KV cache --------------------------------------------------------------------------- */

/*
 * A KV cache holds the keys and values of earlier calls, after norm and rotation, so that a new
 * token costs one row of projections and one pass over the cache. It lies in one buffer that the
 * caller owns, which can be copied, saved, and viewed again elsewhere (mha_kv_cache_view), for any
 * instruction set. A cache holds several sequences, each with its own length.
 *
 * Functions that take the cache without const change it, and so do calls that append. While one of
 * them runs, no other call may use the cache, not even another sequence of it. Calls that only read
 * may run concurrently.
 */
typedef struct mha_kv_cache mha_kv_cache; /* opaque; lies in the caller's buffer */

/* Kinds of caches; mha_extra.h describes all but the first. */
#define MHA_CACHE_KIND_CONTIGUOUS 0u /* each sequence has room for capacity positions */
#define MHA_CACHE_KIND_RING 0x101u   /* keeps the last capacity positions, for sliding windows */
#define MHA_CACHE_KIND_PAGED 0x102u  /* sequences consist of blocks from a common pool */
#define MHA_CACHE_KIND_POOL 0x103u   /* the same, whose lengths and block tables come with calls */

/* The shape of a cache. Numbers are rounded to nearest, beyond the range of F16 to infinity. INT8
   and INT4 have a scale per position and head; INT8 keys and INT4 values are transformed. */
typedef struct mha_kv_cache_config {
  size_t struct_size;
  int64_t num_sequences;   /* sequences, numbered from 0; >= 1 */
  int64_t capacity;        /* the most positions of a sequence; >= 1 */
  int64_t num_kv_heads;    /* as in the layer; >= 1 */
  int64_t head_dim;        /* as in the layer; >= 1 */
  int64_t head_dim_v;      /* as in the layer; 0 = head_dim */
  uint32_t k_type;         /* of stored keys: MHA_TYPE_F32, F16, BF16 or INT8; 0 = F32 */
  uint32_t v_type;         /* of stored values: MHA_TYPE_F32, F16, BF16, INT8 or INT4; 0 = k_type */
  uint32_t kind;           /* MHA_CACHE_KIND_*; 0 = CONTIGUOUS */
  uint32_t value_place;    /* MHA_CACHE_VALUES_* (mha_extra.h); 0 = stored beside the keys */
  int64_t block_positions; /* positions of a block, a multiple of 16; 0 = no blocks */
  int64_t num_blocks;      /* its blocks, numbered from 0; 0 = no blocks */
} mha_kv_cache_config;

/* Sets *bytes to the size of buffer that a cache needs, a multiple of 64. */
MHA_API mha_status mha_kv_cache_size(const mha_kv_cache_config *config, size_t *bytes,
                                     mha_error *error);
/*
 * Makes an empty cache in buffer, which has at least mha_kv_cache_size bytes, and sets *cache,
 * which points into buffer. There is nothing to destroy: free the buffer when the cache is no
 * longer used. The room for keys and values is not written. A paged cache starts without blocks.
 */
MHA_API mha_status mha_kv_cache_init(const mha_kv_cache_config *config, void *buffer,
                                     size_t buffer_bytes, mha_kv_cache **cache, mha_error *error);

/* ---- Sequences ------------------------------------------------------------------------------ */

/*
 * Says which rows of the arrays are sequences, and where they are in a cache. One struct can serve
 * all layers of a step. Without it, every sequence of the batch has n_q queries and n_kv keys.
 *
 *   Padded     Sequence s is batch entry s. Its valid rows are q_lengths[s] rows from
 *              q_first_rows[s] on: set the lengths for padding on the right, the first rows for
 *              padding on the left. kv_lengths and kv_first_rows do the same for key and value.
 *   Packed     The arrays have a batch of 1, and sequence s is the rows cu_seqlens_q[s] ..
 *              cu_seqlens_q[s + 1] - 1. count is required.
 *   Self       In self-attention, key is query, so all kv_ and cu_seqlens_kv fields are NULL.
 *
 * Rows that are not valid are padding. They are not read and cost nothing; their outputs are 0 and
 * their lse is -infinity.
 *
 * Positions count from the first key of a sequence: the first valid row or, with a cache, the first
 * that was ever appended. A sequence has the same bits alone, in a batch, with padding, packed and
 * from a cache of F32. Other caches round keys and values once, however calls are cut.
 */
typedef struct mha_sequences {
  size_t struct_size;
  int64_t count; /* sequences: entries of the arrays below; 0 = batch. Packed: required. */

  /* Packed sequences: never descending, from 0 to the number of rows */
  const int64_t *cu_seqlens_q;  /* [count + 1]: first rows in query; NULL = not packed */
  const int64_t *cu_seqlens_kv; /* [count + 1]: first rows in key and value; NULL = cu_seqlens_q */

  /* Padded sequences: all rows if NULL, for queries and keys separately */
  const int64_t *q_lengths;     /* [count]: valid rows; NULL = all from the first one on */
  const int64_t *kv_lengths;    /* [count]: of key and value, without a cache's; NULL = all */
  const int64_t *q_first_rows;  /* [count]: the first valid row; NULL = 0 */
  const int64_t *kv_first_rows; /* [count]: the same for key and value; NULL = 0 */

  /*
   * [count]: the position of the first valid query, for masks, score options and RoPE; at least
   * -2^62 (plus kv_first_position). NULL = the last query is at the position of the last key; then
   * more queries than keys are valid only with kv_first_rows. A query at a negative position is
   * before the first key. Self-attention that appends to a cache needs NULL or the lengths before.
   */
  const int64_t *q_first_positions;

  /* [count]: sequences of the cache, no two equal; NULL = 0, 1, ... Ignored without a cache and
     with a pool. */
  const int64_t *cache_sequences;

  /*
   * For a pool (MHA_CACHE_KIND_POOL), which requires the first two; ignored without one. Position p
   * is in block p / block_positions of the sequence's table. Entries that the call does not use may
   * be anything: those after its last position and, without outputs per pair, chosen keys and
   * MHA_SEGMENTS_ALSO, those before the window of the first query.
   */
  const int64_t *cache_lengths; /* [count]: positions before the call; NULL = no pool */
  const int32_t *block_tables;  /* [count, block_table_entries]: block numbers; NULL = no pool */
  int64_t block_table_entries;  /* of a table, or of all if block_table_starts is given; 0 = none */
  int64_t block_table_stride;   /* elements from table to table; 0 = contiguous */
  const int64_t *block_table_starts; /* [count + 1]: where each table begins and the last one ends;
                                        NULL = all have block_table_entries */

  /* For RoPE alone: the row of the tables for each row. Ignored without rope and for padding. */
  const int64_t *rope_q_positions; /* [batch, n_q]; NULL = q_first_positions, counted upwards */
  const int64_t *rope_k_positions; /* [batch, n_kv]; NULL = counted from the sequence's first key */
} mha_sequences;

/* ---- A layer's call ------------------------------------------------------------------------- */

/* Flags of a call. Where several limit the keys of a query, all of them do. */
#define MHA_CAUSAL 1u       /* the query at position p attends only to keys at positions <= p */
#define MHA_WINDOW_LEFT 2u  /* ... only to keys at positions >= p - window_left */
#define MHA_WINDOW_RIGHT 4u /* ... only to keys at positions <= p + window_right */
#define MHA_EQUAL_SCORES 8u /* the scale is 0: before softcap and biases, finite scores are equal */

/* In mha_options.h and, the last one, in mha_extra.h */
struct mha_rope; struct mha_norm; struct mha_score_options; struct mha_score_arrays;
struct mha_outputs;

/*
 * What the calls of a layer and of attention have in common. key and value are k and v in
 * attention. Fields of the first part stay the same from call to call; a program can fill them once
 * and copy the struct. This struct is frozen with version 0.1.0, not before.
 */
typedef struct mha_call {
  /* Usually the same for all calls of a layer */
  uint32_t flags;       /* MHA_CAUSAL | WINDOW_LEFT | WINDOW_RIGHT | EQUAL_SCORES */
  uint32_t attention_arithmetic; /* MHA_ARITHMETIC_F32 or INT16 of scores and context; 0 = F32 */
  int64_t window_left;  /* with MHA_WINDOW_LEFT: >= 0 (Hugging Face's sliding_window - 1); else 0 */
  int64_t window_right; /* with MHA_WINDOW_RIGHT: >= 0; otherwise 0 */
  const struct mha_rope *rope;           /* rotation of queries and new keys; NULL = none */
  const struct mha_norm *norm;           /* norms of queries, keys, values, context; NULL = none */
  const struct mha_score_options *score; /* softcap, ALiBi, sinks and others; NULL = none */
  const mha_scheduler *scheduler;        /* threads; NULL = the calling thread */

  /* The rows of this call */
  int64_t batch; /* of the arrays, packed 1: >= 1, or MHA_EMPTY = nothing to do; 0 = 1 */
  int64_t n_q;   /* rows of query and output per sequence; >= 1, or MHA_EMPTY = nothing to do */
  int64_t n_kv;  /* rows of key and value per sequence; >= 1, or MHA_EMPTY = none. Ignored with
                    cache_read and without key and value; with value alone, it must be n_q. */
  const mha_sequences *sequences;              /* NULL = batch unpadded sequences */
  const struct mha_score_arrays *score_arrays; /* masks, biases, chosen keys; NULL = none */
  mha_kv_cache *cache;                         /* appended to, then attended to; NULL = none */
  const mha_kv_cache *cache_read;              /* attended to, in place of cache; NULL = none */
  const struct mha_outputs *outputs; /* lse, weights, steps in between, partials; NULL = none */
} mha_call;

/*
 * The arguments of mha_forward. Self-attention needs call.n_q, query and output.
 *
 * With call.cache, the call first appends the rows of key and value to its sequences, and then
 * attends to everything that these hold, as stored. With cache_read, it attends to the cache
 * without appending; key, value and the kv_ fields of sequences must not be given. The cache's
 * num_kv_heads, head_dim and head_dim_v are the layer's.
 */
typedef struct mha_forward_args {
  size_t struct_size;
  mha_call call;     /* rows, options, sequences, cache */
  mha_input query;   /* [batch, n_q, query_dim] */
  mha_input key;     /* [batch, n_kv, key_dim], type 0 = query's; data NULL = self-attention */
  mha_input value;   /* [batch, n_kv, value_dim], type 0 = query's; data NULL = key */
  mha_output output; /* [batch, n_q, output_dim], as mha_layer_shape gives it */
} mha_forward_args;

/*
 * Sets *bytes to the size of workspace that mha_forward needs. Reads no array: query.data and
 * output.data may be NULL. The size depends on which other pointers are NULL and on the shape of
 * the cache. It never shrinks as batch, count, n_q, n_kv, threads or optional outputs grow, so a
 * workspace for the largest call serves every smaller one.
 */
MHA_API mha_status mha_forward_workspace(const mha_layer *layer, const mha_forward_args *args,
                                         size_t *bytes, mha_error *error);

/*
 * Runs a layer. workspace has at least mha_forward_workspace bytes, any alignment and any content,
 * and serves one call at a time. Special cases:
 *
 *     no visible key               context is 0 and lse -infinity, so y is the bias of W_O or 0
 *     NaN in an input row          reaches only the rows that attend to it
 *     NaN in a masked row          reaches only the optional outputs scores and scaled_scores
 *     a score of +infinity         makes the row NaN
 *     a score of -infinity         masks the key
 *     values above 3e38 / keys     may make the row infinite or NaN although their mean is finite:
 *                                  they are summed before the division by the sum of weights
 */
MHA_API mha_status mha_forward(const mha_layer *layer, const mha_forward_args *args,
                               void *workspace, size_t workspace_bytes, mha_error *error);

/* ---- Attention alone ------------------------------------------------------------------------ */

/*
 * The arguments of mha_attention: softmax(scale * q k^T) v, without projections. The four arrays
 * may have different types. Layouts of q, k, v and output:
 *
 *     [batch, n, heads, width]    all strides 0
 *     [batch, heads, n, width]    row = width, head = n * width, batch = heads * n * width
 */
typedef struct mha_attention_args {
  size_t struct_size;
  mha_call call; /* rows, options, sequences, cache */

  /* Usually the same for all calls of a layer */
  int64_t num_heads;        /* query heads; >= 1 */
  int64_t num_kv_heads;     /* key and value heads; divides num_heads; 0 = num_heads */
  int64_t head_dim;         /* width of a query or key of one head; >= 1 */
  int64_t head_dim_v;       /* width of a value of one head; 0 = head_dim */
  float scale;              /* factor of the scores; finite; 0 = 1 / sqrt(head_dim) */
  uint32_t instruction_set; /* MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has */

  /* The rows of this call */
  mha_input q;       /* [batch, n_q, num_heads, head_dim] */
  mha_input k;       /* [batch, n_kv, num_kv_heads, head_dim], type 0 = q's; data NULL = none */
  mha_input v;       /* [batch, n_kv, num_kv_heads, head_dim_v], type 0 = k's; data NULL =
                        none, or in the keys (MHA_CACHE_VALUES_IN_KEYS) */
  mha_output output; /* [batch, n_q, num_heads, head_dim_v] */
  int64_t kv_first_position; /* position of every sequence's first key ("Partials"); 0 .. 2^62 */
} mha_attention_args;

/* Sets *bytes to the size of workspace that mha_attention needs, as mha_forward_workspace does. */
MHA_API mha_status mha_attention_workspace(const mha_attention_args *args, size_t *bytes,
                                           mha_error *error);
/* Runs attention without projections, with the same bits as inside mha_forward. */
MHA_API mha_status mha_attention(const mha_attention_args *args, void *workspace,
                                 size_t workspace_bytes, mha_error *error);

/* ---- A linear layer ------------------------------------------------------------------------- */

/*
 * A linear layer, y = x W + bias, computed like the projections of mha_forward. It is a mha_layer:
 * mha_layer_view, _verify, _shape and _destroy accept it, but mha_forward does not.
 */
typedef struct mha_linear_weights {
  size_t struct_size;
  int64_t input_dim;  /* width of a row of x; >= 1 */
  int64_t output_dim; /* width of a row of y; >= 1 */
  mha_matrix w;       /* [input_dim, output_dim]; MHA_LAYOUT_OUT_IN transposes it */
  uint32_t layout;    /* MHA_LAYOUT_* of w; 0 = IN_OUT */
  uint32_t type;      /* of w: MHA_TYPE_F32, F16, BF16, INT8 or INT4; 0 = F32 */
  mha_weight_format format; /* of the packed weights */
} mha_linear_weights;

/* Packs a linear layer, as mha_layer_create does. */
MHA_API mha_status mha_linear_create(const mha_linear_weights *weights,
                                     const struct mha_layer_options *options, mha_layer **layer,
                                     mha_error *error);

/* The arguments of mha_linear. A layer with heads multiplies by its W_O; x is the context. */
typedef struct mha_linear_args {
  size_t struct_size;
  int64_t rows;       /* rows of x, residual and output; >= 1, or MHA_EMPTY = nothing to do */
  mha_input x;        /* [rows, input_dim]; only strides.row may be set */
  mha_input residual; /* [rows, output_dim], added to y, type 0 = output's and no other type; only
                         strides.row may be set; data NULL = none. May be the array of output. */
  mha_output output;  /* [rows, output_dim]; only strides.row may be set */
  const mha_scheduler *scheduler; /* threads; NULL = the calling thread */
} mha_linear_args;

/* Sets *bytes to the size of workspace that mha_linear needs, which is often 0. */
MHA_API mha_status mha_linear_workspace(const mha_layer *layer, const mha_linear_args *args,
                                        size_t *bytes, mha_error *error);
/* Runs a linear layer. The bits of a row do not depend on the other rows. */
MHA_API mha_status mha_linear(const mha_layer *layer, const mha_linear_args *args, void *workspace,
                              size_t workspace_bytes, mha_error *error);

#include "mha_options.h"
#include "mha_tables.h"
#include "mha_extra.h"
#include "mha_recurrent.h"

#ifdef __cplusplus
}
#endif

#endif /* MHA_H */
