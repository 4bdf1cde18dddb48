// What `cargo run -p systest` makes of mha.h.


pub const MHA_VERSION_MAJOR: u32 = 0;
pub const MHA_VERSION_MINOR: u32 = 1;
pub const MHA_VERSION_PATCH: u32 = 0;
pub const MHA_CONTRACT: u32 = 3;
pub const MHA_OK: u32 = 0;
pub const MHA_ERROR_NULL_POINTER: u32 = 1;
pub const MHA_ERROR_STRUCT_SIZE: u32 = 2;
pub const MHA_ERROR_INVALID_VALUE: u32 = 3;
pub const MHA_ERROR_SHAPE: u32 = 4;
pub const MHA_ERROR_TOO_LARGE: u32 = 5;
pub const MHA_ERROR_BUFFER_TOO_SMALL: u32 = 6;
pub const MHA_ERROR_OUT_OF_MEMORY: u32 = 7;
pub const MHA_ERROR_INSTRUCTION_SET: u32 = 8;
pub const MHA_ERROR_PACKED_FORMAT: u32 = 9;
pub const MHA_ERROR_PACKED_CHECKSUM: u32 = 10;
pub const MHA_ERROR_OUT_OF_RANGE: u32 = 11;
pub const MHA_ERROR_CACHE_FULL: u32 = 12;
pub const MHA_ERROR_CACHE_SHARED: u32 = 13;
pub const MHA_ERROR_CACHE_FORMAT: u32 = 14;
pub const MHA_TYPE_F32: u32 = 1;
pub const MHA_TYPE_F16: u32 = 2;
pub const MHA_TYPE_BF16: u32 = 3;
pub const MHA_TYPE_INT8: u32 = 4;
pub const MHA_TYPE_INT4: u32 = 5;
pub const MHA_TYPE_INT5: u32 = 6;
pub const MHA_TYPE_INT6: u32 = 7;
pub const MHA_EMPTY: i64 = -9223372036854775808;
pub const MHA_BROADCAST: i64 = -9223372036854775808;
pub const MHA_LAYOUT_IN_OUT: u32 = 0;
pub const MHA_LAYOUT_OUT_IN: u32 = 1;
pub const MHA_CACHE_KIND_CONTIGUOUS: u32 = 0;
pub const MHA_CACHE_KIND_RING: u32 = 257;
pub const MHA_CACHE_KIND_PAGED: u32 = 258;
pub const MHA_CACHE_KIND_POOL: u32 = 259;
pub const MHA_CAUSAL: u32 = 1;
pub const MHA_WINDOW_LEFT: u32 = 2;
pub const MHA_WINDOW_RIGHT: u32 = 4;
pub const MHA_EQUAL_SCORES: u32 = 8;
pub const MHA_ARITHMETIC_F32: u32 = 0;
pub const MHA_ARITHMETIC_INT8: u32 = 1281;
pub const MHA_ARITHMETIC_INT16: u32 = 1282;
pub const MHA_ARITHMETIC_BF16: u32 = 1283;
pub const MHA_GATE_IN_W_G: u32 = 0;
pub const MHA_GATE_IN_W_Q: u32 = 2049;
pub const MHA_FUNCTION_NONE: u32 = 0;
pub const MHA_FUNCTION_SIGMOID: u32 = 1;
pub const MHA_FUNCTION_SOFTPLUS: u32 = 2;
pub const MHA_FUNCTION_SILU: u32 = 3;
pub const MHA_ROPE_HALF: u32 = 0;
pub const MHA_ROPE_INTERLEAVED: u32 = 1;
pub const MHA_NORM_LAYER: u32 = 256;
pub const MHA_NORM_ALL_HEADS: u32 = 512;
pub const MHA_NORM_AFTER_ROPE: u32 = 1024;
pub const MHA_NORM_VALUES: u32 = 2048;
pub const MHA_NORM_AFTER_GATE: u32 = 4096;
pub const MHA_COLUMNS_ALL_KEYS: u32 = 0;
pub const MHA_COLUMNS_NEW_KEYS: u32 = 769;
pub const MHA_SEGMENTS_WITHIN: u32 = 0;
pub const MHA_SEGMENTS_ALSO: u32 = 1025;
pub const MHA_INSTRUCTION_SET_AUTO: u32 = 0;
pub const MHA_INSTRUCTION_SET_SCALAR: u32 = 1;
pub const MHA_INSTRUCTION_SET_AVX2: u32 = 2;
pub const MHA_INSTRUCTION_SET_AVX512: u32 = 3;
pub const MHA_INSTRUCTION_SET_NEON: u32 = 4;
pub const MHA_INSTRUCTION_SET_AVX2_VNNI: u32 = 5;
pub const MHA_INSTRUCTION_SET_AVX512_VNNI: u32 = 6;
pub const MHA_INSTRUCTION_SET_NEON_DOTPROD: u32 = 7;
pub const MHA_INSTRUCTION_SET_NEON_I8MM: u32 = 8;
pub const MHA_INSTRUCTION_SET_AVX512_BF16: u32 = 9;
pub const MHA_INSTRUCTION_SET_AVX512_AMX: u32 = 10;
pub const MHA_INSTRUCTION_SET_WASM_SIMD128: u32 = 11;
pub const MHA_INSTRUCTION_SET_WASM_RELAXED: u32 = 12;
pub const MHA_INSTRUCTION_SET_WASM_SIGNED_DOT: u32 = 13;
pub const MHA_INSTRUCTION_SET_WASM_UNSIGNED_DOT: u32 = 14;
pub const MHA_INSTRUCTION_SET_RVV: u32 = 15;
pub const MHA_CACHE_VALUES_OWN: u32 = 0;
pub const MHA_CACHE_VALUES_IN_KEYS: u32 = 513;
pub const MHA_BACK_END_NATIVE: u32 = 0;
pub const MHA_BACK_END_SGEMM: u32 = 1;
/// One of the values below. They never change; later versions may add more.
pub type mha_status = u32;
/// Describes an error. Every function that takes one fills it. This struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_error {
    /// the status that the function returned
    pub status: u32,
    /// the parameter at fault, counted from 1; 0 = none in particular
    pub argument: u32,
    /// what is wrong and how to fix it; "" on success
    pub message: [core::ffi::c_char; 248usize],
}
/// Runs tasks on the caller's threads. Without a scheduler, a call runs on the calling thread.
///
/// parallel_for(context, count, task, task_context) runs task(task_context, index) exactly once
/// for each index in 0 .. count - 1, on any threads and in any order, and returns when all tasks
/// have returned. It must not fail or throw. Tasks never wait for each other and never call
/// parallel_for. A task must see what was written before parallel_for was called, and the caller
/// must see what the tasks wrote. Concurrent calls of the library call parallel_for concurrently.
/// This struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_scheduler {
    /// passed to parallel_for unchanged
    pub context: *mut core::ffi::c_void,
    /// the most tasks at once; >= 1. The workspace grows with it.
    pub num_threads: u32,
    pub reserved: u32,
    pub parallel_for: ::core::option::Option<
        unsafe extern "C" fn(
            context: *mut core::ffi::c_void,
            count: u32,
            task: ::core::option::Option<
                unsafe extern "C" fn(task_context: *mut core::ffi::c_void, index: u32),
            >,
            task_context: *mut core::ffi::c_void,
        ),
    >,
}
/// The distances between neighbours, in elements. A stride of 0 means contiguous: a dimension
/// starts where those inside it end. (0 does not broadcast, unlike the strides of expanded
/// tensors.) A stride that is set must step over all that the 0 strides inside it span; to
/// interleave dimensions, set every stride. In `[batch, n, heads, width]`, a head stride needs a
/// row stride and, for several sequences, a batch stride. Elements of outputs must not overlap. An
/// array that lacks a dimension, such as the heads of mha_forward's query, needs 0 there. This
/// struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_strides {
    /// from sequence to sequence; 0 = contiguous, or MHA_BROADCAST
    pub batch: i64,
    /// from row to row, at least a row's width; 0 = contiguous, or MHA_BROADCAST
    pub row: i64,
    /// from head to head, at least a head's width; 0 = contiguous, or MHA_BROADCAST
    pub head: i64,
}
/// An array that a call reads. This struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_input {
    /// the first element
    pub data: *const core::ffi::c_void,
    /// MHA_TYPE_F32, F16 or BF16; 0 = F32 unless the field says otherwise
    pub type_: u32,
    pub reserved: u32,
    /// 0 = contiguous; MHA_BROADCAST is allowed
    pub strides: mha_strides,
    pub reserved_pointer: *const core::ffi::c_void,
}
/// An array that a call writes. This struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_output {
    /// the first element
    pub data: *mut core::ffi::c_void,
    /// MHA_TYPE_F32, F16 or BF16; 0 = F32
    pub type_: u32,
    pub reserved: u32,
    /// 0 = contiguous
    pub strides: mha_strides,
}
/// A weight matrix and its bias. This struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_matrix {
    /// the first weight; NULL = no matrix
    pub data: *const core::ffi::c_void,
    /// `[out]`; NULL = 0
    pub bias: *const f32,
    /// `[out]`, in groups `[out, ceil(in / group_size)]`; NULL = no codes
    pub scales: *const f32,
    /// of codes in groups, of the shape of scales; NULL = none
    pub offsets: *const f32,
    /// factors of scales: `[out, ceil(in / 256)]`; NULL = none
    pub block_scales: *const f32,
    /// factors of offsets, of the shape of block_scales; NULL = none
    pub block_offsets: *const f32,
    /// elements from one row to the next; 0 = contiguous
    pub row_stride: i64,
}
#[repr(C)]
#[derive(Debug)]
pub struct mha_layer {
    _unused: [u8; 0],
}
/// How a packed layer keeps and multiplies weights (mha_options.h). This struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_weight_format {
    /// MHA_TYPE_* of the packed weights; 0 = F32
    pub type_: u32,
    /// inputs that share a scale: 16, 32, 64, 128; 0 = all (INT8), 32 (INT4)
    pub group_size: u32,
    /// of scales and offsets of groups: MHA_TYPE_F32, F16 or INT8; 0 = F32
    pub scale_type: u32,
    /// MHA_ARITHMETIC_* of the products; 0 = F32
    pub arithmetic: u32,
}
/// The shape of a layer. query_dim and num_heads are required, and head_dim too unless num_heads *
/// head_dim is query_dim. num_heads times the width of a head is at most 2^31 - 1. Query head h
/// uses key and value head h / (num_heads / num_kv_heads).
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_layer_config {
    pub struct_size: usize,
    /// width of a row of query (d_in, embed_dim); >= 1
    pub query_dim: i64,
    /// width of a row of key; 0 = query_dim
    pub key_dim: i64,
    /// width of a row of value; 0 = key_dim
    pub value_dim: i64,
    /// width of a row of output; 0 = query_dim. Without W_O it must be 0.
    pub output_dim: i64,
    /// query heads (mha_linear_create makes a layer without); >= 1
    pub num_heads: i64,
    /// key and value heads; divides num_heads; 0 = num_heads
    pub num_kv_heads: i64,
    /// width of a query or key of one head; 0 = query_dim / num_heads
    pub head_dim: i64,
    /// width of a value of one head; 0 = head_dim
    pub head_dim_v: i64,
    /// factor of the scores; finite; 0 = 1 / sqrt(head_dim)
    pub scale: f32,
    /// of the packed weights
    pub format: mha_weight_format,
    /// MHA_FUNCTION_SIGMOID or SOFTPLUS: multiplies the context; 0 = none
    pub gate: u32,
    /// numbers of a head's gate: 1 or head_dim_v; 0 = head_dim_v
    pub gate_dim: i64,
}
/// The weights of a layer: w_q, w_k and w_v, or one fused w_qkv, which requires that key_dim and
/// value_dim equal query_dim. A layer with w_q alone can only attend to a cache (cache_read); its
/// key_dim and value_dim are 0. Shapes below are for MHA_LAYOUT_IN_OUT; OUT_IN transposes every
/// matrix. The columns of W_Q, W_K and W_V and the rows of W_O are those of head 0, then of head
/// 1, and so on.
///
/// Biases of q, k and v may be fused (w_qkv.bias) or separate, whether or not the matrices are.
/// F32, F16 and BF16 matrices are converted to format.type. INT8 and INT4 matrices come from a
/// quantiser, need the same format.type (INT8 also INT5 or INT6), and are packed without change.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_layer_weights {
    pub struct_size: usize,
    /// MHA_LAYOUT_* of all matrices; 0 = IN_OUT
    pub layout: u32,
    /// of all matrices: MHA_TYPE_F32, F16, BF16, INT8 or INT4; 0 = F32
    pub type_: u32,
    /// MHA_GATE_IN_W_G or IN_W_Q (mha_options.h); 0 = IN_W_G
    pub gate_place: u32,
    /// `[query_dim, num_heads * head_dim]`; data NULL = in w_qkv
    pub w_q: mha_matrix,
    /// `[key_dim, num_kv_heads * head_dim]`; data NULL = in w_qkv, or none
    pub w_k: mha_matrix,
    /// `[value_dim, num_kv_heads * head_dim_v]`; data NULL = as w_k
    pub w_v: mha_matrix,
    /// `[query_dim, qkv_dim]`: w_q's columns, then w_k's, w_v's; data NULL = none
    pub w_qkv: mha_matrix,
    /// `[num_heads * head_dim_v, output_dim]`; data NULL = y is the context
    pub w_o: mha_matrix,
    /// gate: `[query_dim, num_heads * gate_dim]`; data NULL = none, or IN_W_Q
    pub w_g: mha_matrix,
}
/// A KV cache holds the keys and values of earlier calls, after norm and rotation, so that a new
/// token costs one row of projections and one pass over the cache. It lies in one buffer that the
/// caller owns, which can be copied, saved, and viewed again elsewhere (mha_kv_cache_view), for
/// any instruction set. A cache holds several sequences, each with its own length.
///
/// Functions that take the cache without const change it, and so do calls that append. While one
/// of them runs, no other call may use the cache, not even another sequence of it. Calls that only
/// read may run concurrently.
#[repr(C)]
#[derive(Debug)]
pub struct mha_kv_cache {
    _unused: [u8; 0],
}
/// The shape of a cache. Numbers are rounded to nearest, beyond the range of F16 to infinity. INT8
/// and INT4 have a scale per position and head; INT8 keys and INT4 values are transformed.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_kv_cache_config {
    pub struct_size: usize,
    /// sequences, numbered from 0; >= 1
    pub num_sequences: i64,
    /// the most positions of a sequence; >= 1
    pub capacity: i64,
    /// as in the layer; >= 1
    pub num_kv_heads: i64,
    /// as in the layer; >= 1
    pub head_dim: i64,
    /// as in the layer; 0 = head_dim
    pub head_dim_v: i64,
    /// of stored keys: MHA_TYPE_F32, F16, BF16 or INT8; 0 = F32
    pub k_type: u32,
    /// of stored values: MHA_TYPE_F32, F16, BF16, INT8 or INT4; 0 = k_type
    pub v_type: u32,
    /// MHA_CACHE_KIND_*; 0 = CONTIGUOUS
    pub kind: u32,
    /// MHA_CACHE_VALUES_* (mha_extra.h); 0 = stored beside the keys
    pub value_place: u32,
    /// positions of a block, a multiple of 16; 0 = no blocks
    pub block_positions: i64,
    /// its blocks, numbered from 0; 0 = no blocks
    pub num_blocks: i64,
}
/// Says which rows of the arrays are sequences, and where they are in a cache. One struct can
/// serve all layers of a step. Without it, every sequence of the batch has n_q queries and n_kv
/// keys.
///
/// ```text
/// Padded     Sequence s is batch entry s. Its valid rows are q_lengths[s] rows from
///            q_first_rows[s] on: set the lengths for padding on the right, the first rows for
///            padding on the left. kv_lengths and kv_first_rows do the same for key and value.
/// Packed     The arrays have a batch of 1, and sequence s is the rows cu_seqlens_q[s] ..
///            cu_seqlens_q[s + 1] - 1. count is required.
/// Self       In self-attention, key is query, so all kv_ and cu_seqlens_kv fields are NULL.
/// ```
///
/// Rows that are not valid are padding. They are not read and cost nothing; their outputs are 0
/// and their lse is -infinity.
///
/// Positions count from the first key of a sequence: the first valid row or, with a cache, the
/// first that was ever appended. A sequence has the same bits alone, in a batch, with padding,
/// packed and from a cache of F32. Other caches round keys and values once, however calls are cut.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_sequences {
    pub struct_size: usize,
    /// sequences: entries of the arrays below; 0 = batch. Packed: required.
    pub count: i64,
    /// `[count + 1]`: first rows in query; NULL = not packed
    pub cu_seqlens_q: *const i64,
    /// `[count + 1]`: first rows in key and value; NULL = cu_seqlens_q
    pub cu_seqlens_kv: *const i64,
    /// `[count]`: valid rows; NULL = all from the first one on
    pub q_lengths: *const i64,
    /// `[count]`: of key and value, without a cache's; NULL = all
    pub kv_lengths: *const i64,
    /// `[count]`: the first valid row; NULL = 0
    pub q_first_rows: *const i64,
    /// `[count]`: the same for key and value; NULL = 0
    pub kv_first_rows: *const i64,
    /// `[count]`: the position of the first valid query, for masks, score options and RoPE; at
    /// least -2^62 (plus kv_first_position). NULL = the last query is at the position of the last
    /// key; then more queries than keys are valid only with kv_first_rows. A query at a negative
    /// position is before the first key. Self-attention that appends to a cache needs NULL or the
    /// lengths before.
    pub q_first_positions: *const i64,
    /// `[count]`: sequences of the cache, no two equal; NULL = 0, 1, ... Ignored without a cache
    /// and with a pool.
    pub cache_sequences: *const i64,
    /// `[count]`: positions before the call; NULL = no pool
    pub cache_lengths: *const i64,
    /// `[count, block_table_entries]`: block numbers; NULL = no pool
    pub block_tables: *const i32,
    /// of a table, or of all if block_table_starts is given; 0 = none
    pub block_table_entries: i64,
    /// elements from table to table; 0 = contiguous
    pub block_table_stride: i64,
    /// `[count + 1]`: where each table begins and the last one ends; NULL = all have
    /// block_table_entries
    pub block_table_starts: *const i64,
    /// `[batch, n_q]`; NULL = q_first_positions, counted upwards
    pub rope_q_positions: *const i64,
    /// `[batch, n_kv]`; NULL = counted from the sequence's first key
    pub rope_k_positions: *const i64,
}
/// What the calls of a layer and of attention have in common. key and value are k and v in
/// attention. Fields of the first part stay the same from call to call; a program can fill them
/// once and copy the struct. This struct is frozen with version 0.1.0, not before.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_call {
    /// MHA_CAUSAL | WINDOW_LEFT | WINDOW_RIGHT | EQUAL_SCORES
    pub flags: u32,
    /// MHA_ARITHMETIC_F32 or INT16 of scores and context; 0 = F32
    pub attention_arithmetic: u32,
    /// with MHA_WINDOW_LEFT: >= 0 (Hugging Face's sliding_window - 1); else 0
    pub window_left: i64,
    /// with MHA_WINDOW_RIGHT: >= 0; otherwise 0
    pub window_right: i64,
    /// rotation of queries and new keys; NULL = none
    pub rope: *const mha_rope,
    /// norms of queries, keys, values, context; NULL = none
    pub norm: *const mha_norm,
    /// softcap, ALiBi, sinks and others; NULL = none
    pub score: *const mha_score_options,
    /// threads; NULL = the calling thread
    pub scheduler: *const mha_scheduler,
    /// of the arrays, packed 1: >= 1, or MHA_EMPTY = nothing to do; 0 = 1
    pub batch: i64,
    /// rows of query and output per sequence; >= 1, or MHA_EMPTY = nothing to do
    pub n_q: i64,
    /// rows of key and value per sequence; >= 1, or MHA_EMPTY = none. Ignored with cache_read and
    /// without key and value; with value alone, it must be n_q.
    pub n_kv: i64,
    /// NULL = batch unpadded sequences
    pub sequences: *const mha_sequences,
    /// masks, biases, chosen keys; NULL = none
    pub score_arrays: *const mha_score_arrays,
    /// appended to, then attended to; NULL = none
    pub cache: *mut mha_kv_cache,
    /// attended to, in place of cache; NULL = none
    pub cache_read: *const mha_kv_cache,
    /// lse, weights, steps in between, partials; NULL = none
    pub outputs: *const mha_outputs,
}
/// The arguments of mha_forward. Self-attention needs call.n_q, query and output.
///
/// With call.cache, the call first appends the rows of key and value to its sequences, and then
/// attends to everything that these hold, as stored. With cache_read, it attends to the cache
/// without appending; key, value and the kv_ fields of sequences must not be given. The cache's
/// num_kv_heads, head_dim and head_dim_v are the layer's.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_forward_args {
    pub struct_size: usize,
    /// rows, options, sequences, cache
    pub call: mha_call,
    /// `[batch, n_q, query_dim]`
    pub query: mha_input,
    /// `[batch, n_kv, key_dim]`, type 0 = query's; data NULL = self-attention
    pub key: mha_input,
    /// `[batch, n_kv, value_dim]`, type 0 = query's; data NULL = key
    pub value: mha_input,
    /// `[batch, n_q, output_dim]`, as mha_layer_shape gives it
    pub output: mha_output,
}
/// The arguments of mha_attention: softmax(scale * q k^T) v, without projections. The four arrays
/// may have different types. Layouts of q, k, v and output:
///
/// ```text
/// [batch, n, heads, width]    all strides 0
/// [batch, heads, n, width]    row = width, head = n * width, batch = heads * n * width
/// ```
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_attention_args {
    pub struct_size: usize,
    /// rows, options, sequences, cache
    pub call: mha_call,
    /// query heads; >= 1
    pub num_heads: i64,
    /// key and value heads; divides num_heads; 0 = num_heads
    pub num_kv_heads: i64,
    /// width of a query or key of one head; >= 1
    pub head_dim: i64,
    /// width of a value of one head; 0 = head_dim
    pub head_dim_v: i64,
    /// factor of the scores; finite; 0 = 1 / sqrt(head_dim)
    pub scale: f32,
    /// MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has
    pub instruction_set: u32,
    /// `[batch, n_q, num_heads, head_dim]`
    pub q: mha_input,
    /// `[batch, n_kv, num_kv_heads, head_dim]`, type 0 = q's; data NULL = none
    pub k: mha_input,
    /// `[batch, n_kv, num_kv_heads, head_dim_v]`, type 0 = k's; data NULL = none, or in the keys
    /// (MHA_CACHE_VALUES_IN_KEYS)
    pub v: mha_input,
    /// `[batch, n_q, num_heads, head_dim_v]`
    pub output: mha_output,
    /// position of every sequence's first key ("Partials"); 0 .. 2^62
    pub kv_first_position: i64,
}
/// A linear layer, y = x W + bias, computed like the projections of mha_forward. It is a
/// mha_layer: mha_layer_view, _verify, _shape and _destroy accept it, but mha_forward does not.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_linear_weights {
    pub struct_size: usize,
    /// width of a row of x; >= 1
    pub input_dim: i64,
    /// width of a row of y; >= 1
    pub output_dim: i64,
    /// `[input_dim, output_dim]`; MHA_LAYOUT_OUT_IN transposes it
    pub w: mha_matrix,
    /// MHA_LAYOUT_* of w; 0 = IN_OUT
    pub layout: u32,
    /// of w: MHA_TYPE_F32, F16, BF16, INT8 or INT4; 0 = F32
    pub type_: u32,
    /// of the packed weights
    pub format: mha_weight_format,
}
/// The arguments of mha_linear. A layer with heads multiplies by its W_O; x is the context.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_linear_args {
    pub struct_size: usize,
    /// rows of x, residual and output; >= 1, or MHA_EMPTY = nothing to do
    pub rows: i64,
    /// `[rows, input_dim]`; only strides.row may be set
    pub x: mha_input,
    /// `[rows, output_dim]`, added to y, type 0 = output's and no other type; only strides.row may
    /// be set; data NULL = none. May be the array of output.
    pub residual: mha_input,
    /// `[rows, output_dim]`; only strides.row may be set
    pub output: mha_output,
    /// threads; NULL = the calling thread
    pub scheduler: *const mha_scheduler,
}
/// In mha_options.h and, the last one, in mha_extra.h
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_rope {
    pub struct_size: usize,
    /// MHA_ROPE_*; 0 = HALF
    pub style: u32,
    pub reserved: u32,
    /// elements that rotate; even, 2 .. head_dim; 0 = head_dim - offset
    pub dims: i64,
    /// the first of them, >= 0; MLA rotates the last elements of a head
    pub offset: i64,
    /// rows of the tables; >= 1; more than any position that is looked up
    pub num_positions: i64,
    /// `[num_positions, dims / 2]`: row p is position p, column i is pair i
    pub cos: *const f32,
    /// `[num_positions, dims / 2]`
    pub sin: *const f32,
    /// elements from one row of the tables to the next; 0 = dims / 2
    pub table_stride: i64,
}
/// A norm of the queries, and of the keys before they are scored or stored (Qwen3), and a norm of
/// the context before W_O (BitNet, Kosmos-2). At least one of them is set; the second needs W_O.
///
/// ```text
/// RMS norm      x / sqrt(mean of x^2 + epsilon) * weight
/// layer norm    (x - mean) / sqrt(mean of (x - mean)^2 + epsilon) * weight + bias
/// ```
///
/// Squares are summed in float: rows with numbers near 1e19 overflow. Models that store w for a
/// weight of 1 + w (Gemma) must pass the sum. A context of 0 is normalised too; its bias reaches
/// y. Calls only read the struct and its arrays, which may hold any numbers.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_norm {
    pub struct_size: usize,
    /// MHA_NORM_LAYER | ALL_HEADS | AFTER_ROPE | VALUES
    pub flags: u32,
    /// > 0 and finite; 0 = no norm of queries and keys
    pub epsilon: f32,
    /// `[head_dim]` or `[num_heads, head_dim]`; NULL = 1
    pub q_weight: *const f32,
    /// `[head_dim]` or `[num_kv_heads, head_dim]`; NULL = 1
    pub k_weight: *const f32,
    /// layer norm: in the shape of q_weight; NULL = 0
    pub q_bias: *const f32,
    /// layer norm: in the shape of k_weight; NULL = 0
    pub k_bias: *const f32,
    /// from one head's weights to the next's; >= head_dim; 0 = all heads share one.
    /// MHA_NORM_ALL_HEADS: 0 or head_dim, both contiguous.
    pub head_stride: i64,
    /// MHA_NORM_LAYER | ALL_HEADS | AFTER_GATE
    pub context_flags: u32,
    /// > 0 and finite; 0 = no norm of the context
    pub context_epsilon: f32,
    /// `[head_dim_v]` or `[num_heads, head_dim_v]`; NULL = 1
    pub context_weight: *const f32,
    /// layer norm: in the shape of context_weight; NULL = 0
    pub context_bias: *const f32,
    /// as head_stride; >= head_dim_v; 0 = all heads share one
    pub context_head_stride: i64,
}
/// What a model does to scores; the same for all steps of a layer. Calls only read it.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_score_options {
    pub struct_size: usize,
    /// > 0 and finite; 0 = none
    pub softcap: f32,
    pub reserved: u32,
    /// `[num_heads]`, finite; NULL = none
    pub alibi_slopes: *const f32,
    /// `[num_heads]`, less than infinity, not scaled; NULL = none
    pub sinks: *const f32,
    /// `[num_heads]`, finite; NULL = 1. A head of 0 is not computed.
    pub head_scales: *const f32,
    /// `[num_heads, relative_left + 1 + relative_right]`, from distance -relative_left on; NULL =
    /// none. Keys that are farther away have the first or the last number.
    pub relative_bias: *const f32,
    /// >= 0: distances before the query that have a relative bias
    pub relative_left: i64,
    /// >= 0: distances after it; without relative biases, both are 0
    pub relative_right: i64,
}
/// What a step does to scores; one struct can serve all layers of the step. Calls only read it.
///
/// Columns. mask, bias and kv_segments have the same columns for all rows; without a cache, they
/// are all rows of key, also of packed sequences. With NEW_KEYS, keys that the cache had before
/// have no column: they are always visible (even with MHA_SEGMENTS_WITHIN) and have a bias of 0,
/// so a tree of drafted tokens needs a mask of its own rows only. A ring takes NEW_KEYS and no
/// segments. Keys after the last of num_columns are masked. Columns that flags and lengths exclude
/// are not read, except with MHA_SEGMENTS_ALSO.
///
/// Chosen keys. Each query attends only to the keys of its list that flags and mask allow
/// (DeepSeek V3.2, MiniMax). Entries are positions or, with chosen_block, numbers of blocks of
/// chosen_block keys, in any order; -1 marks an unused entry and duplicates are ignored. The cost
/// grows with the keys of the lists. When values are stored separately, reading one chosen key of
/// a cache costs reading its block of 16. With chosen_block 0 or 1, bits are those of a call over
/// the keys gathered in ascending order. Chosen keys cannot be combined with segments or with
/// outputs that have a number per pair.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_score_arrays {
    pub struct_size: usize,
    /// `[batch, num_heads, n_q, num_columns]`, F32 or F16; data NULL = none
    pub bias: mha_input,
    /// `[batch, num_heads, n_q, num_columns]`: 0 = masked; NULL = none
    pub mask: *const u8,
    /// of mask; 0 = contiguous; MHA_BROADCAST is allowed
    pub mask_strides: mha_strides,
    /// MHA_COLUMNS_*; 0 = ALL_KEYS
    pub column_keys: u32,
    /// MHA_SEGMENTS_*; 0 = WITHIN; without q_segments 0
    pub segments: u32,
    /// columns of mask, bias and kv_segments; 0 = the keys of the longest sequence (in a cache:
    /// after the call)
    pub num_columns: i64,
    /// `[batch, n_q]`; NULL = no segments
    pub q_segments: *const i32,
    /// `[batch, num_columns]`; NULL = q_segments, of the same rows
    pub kv_segments: *const i32,
    /// `[batch, n_q]`; NULL = 1
    pub q_scales: *const f32,
    /// `[batch, num_heads, n_q, relative_left + 1 + relative_right]` of score; in place of
    /// relative_bias; NULL = none
    pub relative_rows: *const f32,
    /// of relative_rows; 0 = contiguous; MHA_BROADCAST
    pub relative_rows_strides: mha_strides,
    /// `[batch, num_kv_heads, n_q, num_chosen]`; NULL = all keys
    pub chosen_keys: *const i32,
    /// of chosen_keys; 0 = contiguous; MHA_BROADCAST
    pub chosen_keys_strides: mha_strides,
    /// entries of a list: 1 .. 2^31 - 1; without lists, 0 = none
    pub num_chosen: i64,
    /// entry e: keys e * chosen_block and on; 1 .. 2^31 - 1; 0 = 1
    pub chosen_block: i64,
}
/// The angles that mha_rope_tables computes. dims and num_positions alone give the original RoPE.
/// The others are the methods of Hugging Face's rope_scaling: linear (arXiv:2306.15595) with at
/// most one of YaRN (arXiv:2309.00071), llama3, LongRoPE (arXiv:2402.13753) and dynamic NTK; and
/// M-RoPE. src/docs/rope.md gives their formulas.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_rope_config {
    pub struct_size: usize,
    /// elements of a head to rotate; even, >= 2; with NTK at least 4
    pub dims: i64,
    /// rows of the tables; >= 1
    pub num_positions: i64,
    /// of row 0, to fill tables in parts; >= 0; all are less than 2^31
    pub first_position: i64,
    /// of the angles; 1 .. 2^64, YaRN: more than 1; 0 = 10000
    pub base: f64,
    /// multiplies the tables; 2^-31 .. 2^31; 0 = 1, YaRN: rope.md
    pub attention_factor: f64,
    /// divides positions; 1 .. 2^31; 0 = 1
    pub linear_factor: f64,
    /// context in training; 1 .. 2^31; 0 = no YaRN, llama3, NTK
    pub original_positions: i64,
    /// how far slow pairs are stretched; 1 .. 2^31; 0 = no YaRN
    pub yarn_factor: f64,
    /// turns of pairs that keep their angle; 2^-31 .. 2^31; 0 = 32
    pub yarn_beta_fast: f64,
    /// turns of pairs stretched in full; 2^-31 .. yarn_beta_fast; 0 = 1
    pub yarn_beta_slow: f64,
    /// bounds are not rounded ("truncate": false, gpt-oss): 0 or 1
    pub yarn_unrounded: u32,
    /// sections of M-RoPE are interleaved (Qwen3-VL): 0 or 1
    pub mrope_interleaved: u32,
    /// how far slow pairs are stretched; 1 .. 2^31; 0 = no llama3
    pub llama3_factor: f64,
    /// turns of slow pairs; 2^-31 .. 2^31; 0 = 1
    pub llama3_low_freq_factor: f64,
    /// of fast pairs; > llama3_low_freq_factor, <= 2^31; 0 = 4
    pub llama3_high_freq_factor: f64,
    /// how far the base is raised; 1 .. 2^31; 0 = no dynamic NTK
    pub ntk_factor: f64,
    /// current context length; 1 .. 2^31; 0 = no dynamic NTK
    pub ntk_positions: i64,
    /// LongRoPE: `[dims / 2]`, 1/2 .. 2^31; NULL = none
    pub pair_factors: *const f64,
    /// M-RoPE: `[3]`, pairs per section, dims / 2 in all; NULL = none
    pub mrope_section: *const i64,
    /// M-RoPE: `[3, num_positions]`, 0 .. 2^31 - 1; NULL = none
    pub mrope_positions: *const i64,
}
/// A matrix product supplied by the caller, called as cblas_sgemm(order, trans_a, trans_b, m, n,
/// k, alpha, a, lda, b, ldb, beta, c, ldc) with order 101 (row-major) and trans 111 (no
/// transposition): c `[m, n]` = alpha * a `[m, k]` * b `[k, n]` + beta * c. alpha is 1 and beta 0,
/// so it must not read c. It runs on the thread that calls mha_forward; concurrent calls call it
/// concurrently. Its threading is up to you: projections by sgemm do not use mha_scheduler.
pub type mha_sgemm = ::core::option::Option<
    unsafe extern "C" fn(
        order: core::ffi::c_int,
        trans_a: core::ffi::c_int,
        trans_b: core::ffi::c_int,
        m: core::ffi::c_int,
        n: core::ffi::c_int,
        k: core::ffi::c_int,
        alpha: f32,
        a: *const f32,
        lda: core::ffi::c_int,
        b: *const f32,
        ldb: core::ffi::c_int,
        beta: f32,
        c: *mut f32,
        ldc: core::ffi::c_int,
    ),
>;
/// Supplies the memory of mha_layer_create. This struct is frozen.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_allocator {
    /// passed to both functions unchanged
    pub context: *mut core::ffi::c_void,
    /// Returns memory aligned for any type, or NULL. A create calls it once, on the same thread.
    pub allocate: ::core::option::Option<
        unsafe extern "C" fn(
            context: *mut core::ffi::c_void,
            bytes: usize,
        ) -> *mut core::ffi::c_void,
    >,
    /// Releases that memory, in mha_layer_destroy or in a create that fails.
    pub release: ::core::option::Option<
        unsafe extern "C" fn(context: *mut core::ffi::c_void, memory: *mut core::ffi::c_void),
    >,
}
/// How a layer computes. NULL in place of the struct = all defaults.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_layer_options {
    pub struct_size: usize,
    /// MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has
    pub instruction_set: u32,
    pub reserved: u32,
    /// runs the projections; NULL = the library's kernels
    pub sgemm: mha_sgemm,
    /// for mha_layer_create, which copies it; NULL = malloc, free
    pub allocator: *const mha_allocator,
}
/// The memory of a pool. Block b of the keys begins b * k_block_stride bytes after k, and so on.
/// All parts of a block may lie in one page, with the same stride, or in arrays of their own; none
/// may overlap another. In a block lie
///
/// ```text
/// keys      [num_kv_heads, block_positions / 16, head_dim, 16], 16 positions side by side; with
///           MHA_CACHE_VALUES_IN_KEYS [num_kv_heads, block_positions, ceil16(head_dim)]
/// values    [num_kv_heads, block_positions, ceil16(head_dim_v)]
/// scales    [num_kv_heads, block_positions]
/// ```
///
/// where ceil16 rounds up to a multiple of 16. Numbers are of k_type and v_type; those of INT4
/// have 8 bytes for 16. Memory need not be initialised.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_kv_pool {
    pub struct_size: usize,
    /// keys
    pub k: *mut core::ffi::c_void,
    /// values; NULL = MHA_CACHE_VALUES_IN_KEYS
    pub v: *mut core::ffi::c_void,
    /// `[num_blocks, num_kv_heads, block_positions]`, of INT8 keys; NULL = others
    pub k_scales: *mut f32,
    /// `[num_blocks, num_kv_heads, block_positions]`, of INT8 and INT4 values; NULL = others
    pub v_scales: *mut f32,
    /// in bytes; 0 = contiguous
    pub k_block_stride: i64,
    /// in bytes; 0 = contiguous
    pub v_block_stride: i64,
    /// in bytes; 0 = contiguous
    pub k_scales_block_stride: i64,
    /// in bytes; 0 = contiguous
    pub v_scales_block_stride: i64,
}
/// Optional outputs of a call, contiguous. Requesting one does not affect the others. q, k and v
/// belong to mha_forward, partials to mha_attention. With a cache, n_kv of the outputs per pair is
/// the longest length that the call's sequences have after it. In padding, masked_scores and lse
/// are -infinity and everything else is 0.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_outputs {
    pub struct_size: usize,
    /// `[batch, num_heads, n_q]`: ln of the sum of exp(score), sinks included
    pub lse: *mut f32,
    /// `[batch, num_heads, n_q, head_dim_v + 2]`, in place of output ("Partials")
    pub partials: *mut f32,
    /// `[batch, n_q, num_heads, head_dim]`, as projected: before norm and RoPE
    pub q: *mut f32,
    /// `[batch, n_kv, num_kv_heads, head_dim]`, the same; only rows of this call
    pub k: *mut f32,
    /// `[batch, n_kv, num_kv_heads, head_dim_v]`, the same; only rows of this call
    pub v: *mut f32,
    /// `[batch, n_q, num_heads, head_dim_v]`, before the gate and W_O
    pub context: *mut f32,
    /// q k^T after RoPE, k as stored
    pub scores: *mut f32,
    /// times scale
    pub scaled_scores: *mut f32,
    /// after softcap
    pub softcapped_scores: *mut f32,
    /// after all biases; -infinity where masked
    pub masked_scores: *mut f32,
    /// the softmax. Rows sum to 1; less with sinks; 0 if all is masked.
    pub attention_weights: *mut f32,
}
/// The arguments of mha_partials_finish. batch, n_q and shapes are those of mha_attention_args.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_partials_args {
    pub struct_size: usize,
    /// >= 1, or MHA_EMPTY = nothing to do; 0 = 1
    pub batch: i64,
    /// 1 .. 2^31 - 1
    pub num_heads: i64,
    /// >= 1, or MHA_EMPTY = nothing to do
    pub n_q: i64,
    /// 1 .. 2^31 - 1
    pub head_dim_v: i64,
    /// MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has
    pub instruction_set: u32,
    pub reserved: u32,
    /// `[batch, num_heads, n_q, head_dim_v + 2]`, over all keys
    pub partials: *const f32,
    /// `[num_heads]`, as in mha_score_options; NULL = none
    pub sinks: *const f32,
    /// `[num_heads]`, as in mha_score_options; NULL = 1
    pub head_scales: *const f32,
    /// `[batch, n_q, num_heads, head_dim_v]`; data NULL = not computed
    pub output: mha_output,
    /// `[batch, num_heads, n_q]`; NULL = not computed
    pub lse: *mut f32,
}
/// Chooses, for each query, the num_chosen keys with the greatest index scores (the lightning
/// indexer of DeepSeek V3.2 and GLM-5), or all keys if there are fewer:
///
/// ```text
/// sum over heads h of weights[b, i, h] * max(0, scale * q[b, i, h] k[b, j]^T)
/// ```
///
/// Only keys that flags and lengths allow are candidates. Of equal scores, the first keys are
/// chosen; NaN counts as -infinity.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_choose_keys_args {
    pub struct_size: usize,
    /// q, k, flags, norm, rope, sequences, cache and execution. num_heads counts index heads,
    /// which share one key head: num_kv_heads is 1 or 0. v, score, score_arrays, output and
    /// outputs must not be given; kv_first_position is 0 and head_dim_v is ignored. A cache is not
    /// a ring; appending needs MHA_CACHE_VALUES_IN_KEYS.
    pub attention: *const mha_attention_args,
    /// `[batch, n_q, num_heads]`, F32; strides.head must be 0
    pub weights: mha_input,
    /// the most keys of a query; >= 1
    pub num_chosen: i64,
    /// `[batch, n_q, num_chosen]`: ascending positions, then -1; -1 in padding
    pub chosen_keys: *mut i32,
    /// `[batch, n_q, n_kv]`: the scores, -infinity for other keys and in padding; n_kv as in
    /// mha_outputs; NULL = not computed
    pub index_scores: *mut f32,
}
/// How a call would run, and what it would cost.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_call_info {
    /// set by the caller
    pub struct_size: usize,
    /// MHA_INSTRUCTION_SET_* of the kernels, never AUTO
    pub instruction_set: u32,
    /// MHA_BACK_END_* of the projections
    pub back_end: u32,
    /// MHA_CONTRACT of the results; 0 with an sgemm, or if the thread does not round to nearest
    /// and keep subnormals
    pub contract: u32,
    /// the most tasks at once
    pub num_threads: u32,
    /// as mha_forward_workspace or mha_attention_workspace says
    pub workspace_bytes: usize,
    /// of the packed layer, scales and biases included; 0 without a layer
    pub packed_bytes: usize,
    /// multiplications and additions, without pairs of query and key that flags, lengths or
    /// head_scales exclude
    pub operations: u64,
    /// inputs, weights, outputs, and what is appended to and read from a cache, each once and as
    /// stored. Padding counts only in optional outputs.
    pub bytes: u64,
}
/// Recurrent attention keeps a matrix S `[head_dim, head_dim_v]` for each value head in place of a
/// KV cache, so that the cost of a token does not grow with the length of its sequence. Row t of a
/// sequence, in order, does
///
/// ```text
/// S = exp(decay) * S               each row of S by its own decay if decay_dim is head_dim
/// S = S + k^T v                    without beta
/// S = S + k^T (beta * (v - k S))   with beta: the delta rule
/// output = scale * q S
/// ```
///
/// ```text
/// neither   linear attention (Katharopoulos et al., arXiv:2006.16236)
/// decay     gated: RetNet, GLA, Mamba-2 (q = C, k = B, v = dt x, decay = dt A;
///           arXiv:2405.21060)
/// beta      delta rule: DeltaNet (arXiv:2406.06484)
/// both      gated delta rule: Qwen3-Next, Qwen3.5 (arXiv:2412.06464); with decay_dim = head_dim
///           Kimi Delta Attention (arXiv:2510.26692)
/// ```
///
/// There are num_v_heads states. State h uses key head h / (num_v_heads / num_k_heads). The output
/// has max(num_q_heads, num_v_heads) heads: head o uses query head o / (output heads /
/// num_q_heads) and state o / (output heads / num_v_heads).
///
/// exp(decay) is 0 below about -87.3 and infinite above 87.3. Results have the same bits for a
/// prompt at once, in parts and token by token. NaN or infinity in k, v, decay or beta reaches the
/// row's output and, through the state, the later rows of the same sequence, in the heads that use
/// it; in q it reaches only the row's output. With norm_epsilon, a q or k whose sum of squares
/// overflows (numbers of 2e19 and more) counts as 0.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_recurrent_args {
    pub struct_size: usize,
    /// divides num_v_heads or a multiple; 1 .. 2^31 - 1; 0 = num_k_heads
    pub num_q_heads: i64,
    /// divides num_v_heads; 1 .. 2^31 - 1; 0 = num_v_heads
    pub num_k_heads: i64,
    /// heads of v, decay, beta and states; 1 .. 2^31 - 1
    pub num_v_heads: i64,
    /// width of a query or key of one head; 1 .. 1024
    pub head_dim: i64,
    /// width of a value of one head; 1 .. 1024; 0 = head_dim
    pub head_dim_v: i64,
    /// numbers of a head's decay: 1 or head_dim; 0 = 1
    pub decay_dim: i64,
    /// factor of the output; finite; 0 = 1 / sqrt(head_dim)
    pub scale: f32,
    /// > 0, finite: q, k are x / sqrt(sum of x^2 + norm_epsilon); 0 = none
    pub norm_epsilon: f32,
    /// `[num_v_heads]`: decay is -exp(a_log) * softplus(decay + dt_bias); NULL = decay as given
    pub a_log: *const f32,
    /// `[num_v_heads, decay_dim]`, only with a_log; NULL = 0
    pub dt_bias: *const f32,
    /// MHA_FUNCTION_SIGMOID: beta is sigmoid(beta); 0 = as given
    pub beta_function: u32,
    /// MHA_INSTRUCTION_SET_*; 0 = the best that the machine has
    pub instruction_set: u32,
    /// threads; NULL = the calling thread
    pub scheduler: *const mha_scheduler,
    /// of the arrays, packed 1: >= 1, or MHA_EMPTY = nothing to do; 0 = 1
    pub batch: i64,
    /// rows per sequence; >= 1, or MHA_EMPTY = none: state_out becomes state
    pub rows: i64,
    /// `[batch, rows, num_q_heads, head_dim]`
    pub q: mha_input,
    /// `[batch, rows, num_k_heads, head_dim]`, type 0 = q's
    pub k: mha_input,
    /// `[batch, rows, num_v_heads, head_dim_v]`, type 0 = k's
    pub v: mha_input,
    /// `[batch, rows, num_v_heads, decay_dim]`, type 0 = F32; data NULL = 0, a factor of 1
    pub decay: mha_input,
    /// `[batch, rows, num_v_heads]`, type 0 = F32; strides.head MHA_BROADCAST = shared by all
    /// heads; data NULL = no delta rule
    pub beta: mha_input,
    /// `[batch, rows, max(num_q_heads, num_v_heads), head_dim_v]`
    pub output: mha_output,
    /// count, cu_seqlens_q, q_lengths and q_first_rows; the other fields are NULL. NULL = batch
    /// unpadded sequences
    pub sequences: *const mha_sequences,
    /// before the first row; NULL = 0
    pub state: *const f32,
    /// after the last row; may be state; NULL = not computed
    pub state_out: *mut f32,
    /// `[count, num_snapshots, num_v_heads, head_dim, head_dim_v]`: entry i is the state before
    /// the last i + 1 rows, to drop rejected tokens. A sequence with fewer rows has the state
    /// before its first row there. NULL = not computed
    pub snapshots: *mut f32,
    /// 1 .. 16 with snapshots; otherwise 0
    pub num_snapshots: i64,
}
/// The arguments of mha_causal_conv, a depthwise causal convolution: each channel of row t is
///
/// ```text
/// output[t] = activation(bias + sum over j of weights[j] * x[t - (kernel_size - 1) + j])
/// ```
///
/// Rows before the first come from state, whose last row is the one just before it. Results have
/// the same bits however a sequence is cut into calls.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_causal_conv_args {
    pub struct_size: usize,
    /// width of a row; 1 .. 2^31 - 1
    pub channels: i64,
    /// rows that a result depends on; 2 .. 8
    pub kernel_size: i64,
    /// `[channels, kernel_size]`
    pub weights: *const f32,
    /// `[channels]`; NULL = 0
    pub bias: *const f32,
    /// MHA_FUNCTION_SILU; 0 = none
    pub activation: u32,
    /// MHA_INSTRUCTION_SET_*; 0 = the best that the machine has
    pub instruction_set: u32,
    /// threads; NULL = the calling thread
    pub scheduler: *const mha_scheduler,
    /// of the arrays, packed 1: >= 1, or MHA_EMPTY = nothing to do; 0 = 1
    pub batch: i64,
    /// rows per sequence; >= 1, or MHA_EMPTY = none: state_out becomes state
    pub rows: i64,
    /// `[batch, rows, channels]`
    pub x: mha_input,
    /// `[batch, rows, channels]`
    pub output: mha_output,
    /// as in mha_recurrent_args; NULL = batch sequences
    pub sequences: *const mha_sequences,
    /// `[count, kernel_size - 1, channels]`: rows before the first; NULL = 0
    pub state: *const f32,
    /// the shape of state, after the last row; may be it; NULL = not computed
    pub state_out: *mut f32,
}
extern "C" {
    /// Returns "MHA_ERROR_SHAPE" and so on, or "unknown mha_status". The string is static.
    pub fn mha_status_string(status: mha_status) -> *const core::ffi::c_char;
    /// Returns 10000 * major + 100 * minor + patch of the linked library.
    pub fn mha_version() -> u32;
    /// Packs the weights into memory that the library allocates, and sets *layer (NULL after an
    /// error). The arrays of weights are not needed afterwards. Memory of 4 MiB or more is on huge
    /// pages where Linux has them. Free the layer with mha_layer_destroy when no call uses it.
    /// options NULL = defaults.
    pub fn mha_layer_create(
        config: *const mha_layer_config, weights: *const mha_layer_weights,
        options: *const mha_layer_options, layer: *mut *mut mha_layer, error: *mut mha_error,
    ) -> mha_status;
    /// Frees a layer that was created. Does nothing to NULL or to a layer made by mha_layer_view.
    pub fn mha_layer_destroy(layer: *mut mha_layer);
    /// Sets *bytes to the size of buffer that a cache needs, a multiple of 64.
    pub fn mha_kv_cache_size(
        config: *const mha_kv_cache_config, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    /// Makes an empty cache in buffer, which has at least mha_kv_cache_size bytes, and sets
    /// *cache, which points into buffer. There is nothing to destroy: free the buffer when the
    /// cache is no longer used. The room for keys and values is not written. A paged cache starts
    /// without blocks.
    pub fn mha_kv_cache_init(
        config: *const mha_kv_cache_config, buffer: *mut core::ffi::c_void, buffer_bytes: usize,
        cache: *mut *mut mha_kv_cache, error: *mut mha_error,
    ) -> mha_status;
    /// Sets *bytes to the size of workspace that mha_forward needs. Reads no array: query.data and
    /// output.data may be NULL. The size depends on which other pointers are NULL and on the shape
    /// of the cache. It never shrinks as batch, count, n_q, n_kv, threads or optional outputs
    /// grow, so a workspace for the largest call serves every smaller one.
    pub fn mha_forward_workspace(
        layer: *const mha_layer, args: *const mha_forward_args, bytes: *mut usize,
        error: *mut mha_error,
    ) -> mha_status;
    /// Runs a layer. workspace has at least mha_forward_workspace bytes, any alignment and any
    /// content, and serves one call at a time. Special cases:
    ///
    /// ```text
    /// no visible key               context is 0 and lse -infinity, so y is the bias of W_O or 0
    /// NaN in an input row          reaches only the rows that attend to it
    /// NaN in a masked row          reaches only the optional outputs scores and scaled_scores
    /// a score of +infinity         makes the row NaN
    /// a score of -infinity         masks the key
    /// values above 3e38 / keys     may make the row infinite or NaN although their mean is finite:
    ///                              they are summed before the division by the sum of weights
    /// ```
    pub fn mha_forward(
        layer: *const mha_layer, args: *const mha_forward_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    /// Sets *bytes to the size of workspace that mha_attention needs, as mha_forward_workspace
    /// does.
    pub fn mha_attention_workspace(
        args: *const mha_attention_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    /// Runs attention without projections, with the same bits as inside mha_forward.
    pub fn mha_attention(
        args: *const mha_attention_args, workspace: *mut core::ffi::c_void, workspace_bytes: usize,
        error: *mut mha_error,
    ) -> mha_status;
    /// Packs a linear layer, as mha_layer_create does.
    pub fn mha_linear_create(
        weights: *const mha_linear_weights, options: *const mha_layer_options,
        layer: *mut *mut mha_layer, error: *mut mha_error,
    ) -> mha_status;
    /// Sets *bytes to the size of workspace that mha_linear needs, which is often 0.
    pub fn mha_linear_workspace(
        layer: *const mha_layer, args: *const mha_linear_args, bytes: *mut usize,
        error: *mut mha_error,
    ) -> mha_status;
    /// Runs a linear layer. The bits of a row do not depend on the other rows.
    pub fn mha_linear(
        layer: *const mha_layer, args: *const mha_linear_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    /// Fills cos and sin, both `[num_positions, dims / 2]`. Row r is position first_position + r
    /// or, with M-RoPE, the positions in column r of mrope_positions. Several threads may fill
    /// parts of the rows.
    ///
    /// The values have the same bits on every machine: the formulas' results rounded to float, for
    /// angles off by at most position * 2^-51 (more if a ramp is steep). Up to position 2^20 this
    /// adds less than 0.01 ulp to numbers of 1/2 and more.
    pub fn mha_rope_tables(
        config: *const mha_rope_config, cos: *mut f32, sin: *mut f32, error: *mut mha_error,
    ) -> mha_status;
    /// Fills slopes `[num_heads]` with the slopes of ALiBi. Let n be the greatest power of two up
    /// to num_heads, which is 1 .. 2^31 - 1: the slopes are 2^(-8 k / n) for k = 1 .. n, followed
    /// by 2^(-4 k / n) for k = 1, 3, 5, ...
    pub fn mha_alibi_slopes(num_heads: i64, slopes: *mut f32, error: *mut mha_error) -> mha_status;
    /// Fills relative_bias `[num_heads, left + 1 + right]` from T5's embedding `[num_buckets,
    /// num_heads]`: each distance gets the bucket that Hugging Face's T5Attention gives it.
    /// num_buckets is 4 .. 2^30 (decoders, is_bidirectional 0: from 2 on); 0 = 32. Distances of
    /// max_distance or more share the last bucket; max_distance is more than num_buckets / 4
    /// (decoders: / 2), up to 2^30; 0 = 128.
    pub fn mha_t5_relative_bias(
        embedding: *const f32, num_buckets: i64, max_distance: i64, is_bidirectional: u32,
        num_heads: i64, left: i64, right: i64, relative_bias: *mut f32, error: *mut mha_error,
    ) -> mha_status;
    /// Returns the sets that this build has and this machine runs: bit 1u <<
    /// MHA_INSTRUCTION_SET_X.
    pub fn mha_instruction_sets() -> u32;
    /// Returns "auto", "scalar", "avx512_vnni" and so on, or "unknown". The string is static.
    pub fn mha_instruction_set_name(instruction_set: u32) -> *const core::ffi::c_char;
    /// Returns MHA_CONTRACT of the linked library.
    pub fn mha_contract() -> u32;
    /// Sets *bytes to the size of buffer that mha_layer_pack needs. It depends on config, sgemm
    /// and the matrices that are given. Checks everything except the contents of arrays, and reads
    /// no array.
    pub fn mha_layer_pack_size(
        config: *const mha_layer_config, weights: *const mha_layer_weights,
        options: *const mha_layer_options, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    /// Packs the weights into buffer, which is aligned to 64 bytes (as by aligned_alloc). The
    /// arrays of weights are not needed afterwards. The packed layer is the first
    /// mha_layer_pack_size bytes of buffer. It serves every instruction set, has the same bytes on
    /// every machine of this byte order, and can be copied and saved to a file.
    pub fn mha_layer_pack(
        config: *const mha_layer_config, weights: *const mha_layer_weights,
        options: *const mha_layer_options, buffer: *mut core::ffi::c_void, buffer_bytes: usize,
        error: *mut mha_error,
    ) -> mha_status;
    /// Returns the bytes of storage that mha_layer_view needs for the layer object.
    pub fn mha_layer_view_size() -> usize;
    /// Makes *layer over a packed buffer, such as a mapped file, without copying. buffer is
    /// aligned to 64 bytes; storage, of any alignment, receives the layer object. Both belong to
    /// the caller and must stay unchanged while the layer is in use; there is nothing to destroy.
    /// Checks header and bounds in constant time, but not the weights. options->sgemm must be set
    /// if the buffer was packed with one, and only then.
    pub fn mha_layer_view(
        buffer: *const core::ffi::c_void, buffer_bytes: usize, options: *const mha_layer_options,
        storage: *mut core::ffi::c_void, storage_bytes: usize, layer: *mut *const mha_layer,
        error: *mut mha_error,
    ) -> mha_status;
    /// Checks what mha_layer_view checks, and the checksum of all weights. Reads the whole buffer.
    pub fn mha_layer_verify(
        buffer: *const core::ffi::c_void, buffer_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    /// Like mha_layer_pack_size, for a linear layer.
    pub fn mha_linear_pack_size(
        weights: *const mha_linear_weights, options: *const mha_layer_options, bytes: *mut usize,
        error: *mut mha_error,
    ) -> mha_status;
    /// Like mha_layer_pack, for a linear layer.
    pub fn mha_linear_pack(
        weights: *const mha_linear_weights, options: *const mha_layer_options,
        buffer: *mut core::ffi::c_void, buffer_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    /// Fills *config, whose struct_size is set, with the shape of a layer, all defaults resolved.
    /// output_dim is the width of y; to create such a layer without W_O again, set it to 0. A
    /// layer without W_K and W_V has key_dim and value_dim 0. A linear layer has num_heads 0; its
    /// input_dim is query_dim.
    pub fn mha_layer_shape(
        layer: *const mha_layer, config: *mut mha_layer_config, error: *mut mha_error,
    ) -> mha_status;
    /// Makes a pool in buffer, as mha_kv_cache_init does. The buffer holds addresses alone; the
    /// memory of the pool belongs to the caller and stays where it is while the cache is used.
    pub fn mha_kv_pool_init(
        config: *const mha_kv_cache_config, pool: *const mha_kv_pool,
        buffer: *mut core::ffi::c_void, buffer_bytes: usize, cache: *mut *mut mha_kv_cache,
        error: *mut mha_error,
    ) -> mha_status;
    /// Makes *cache over a buffer that holds a cache, such as a copy or a mapped file. The buffer
    /// may be read-only if the cache is only read. Checks the header, lengths and block tables,
    /// but not the contents.
    pub fn mha_kv_cache_view(
        buffer: *mut core::ffi::c_void, buffer_bytes: usize, cache: *mut *mut mha_kv_cache,
        error: *mut mha_error,
    ) -> mha_status;
    /// Fills *config, whose struct_size is set, with the shape of a cache, all defaults resolved.
    pub fn mha_kv_cache_shape(
        cache: *const mha_kv_cache, config: *mut mha_kv_cache_config, error: *mut mha_error,
    ) -> mha_status;
    /// Sets *length to the positions of a sequence, including those that a ring has overwritten.
    pub fn mha_kv_cache_length(
        cache: *const mha_kv_cache, sequence: i64, length: *mut i64, error: *mut mha_error,
    ) -> mha_status;
    /// Shortens a sequence to its first length positions, for example to drop rejected tokens; 0
    /// empties it. Blocks stay in its table until mha_kv_cache_set_blocks leaves them out. After a
    /// ring is truncated, a call whose window reaches overwritten positions is an error.
    pub fn mha_kv_cache_truncate(
        cache: *mut mha_kv_cache, sequence: i64, length: i64, error: *mut mha_error,
    ) -> mha_status;
    /// Sets the blocks of a sequence of a paged cache in the order of their positions. blocks
    /// `[count]` is copied and has no duplicates; count is at most capacity / block_positions.
    /// Blocks that already hold positions of the sequence must stay in their places.
    pub fn mha_kv_cache_set_blocks(
        cache: *mut mha_kv_cache, sequence: i64, blocks: *const i32, count: i64,
        error: *mut mha_error,
    ) -> mha_status;
    /// Copy on write for a paged cache: if the last block of a sequence is partly filled and other
    /// sequences share it, copies its positions to `block`, a free block of the pool, puts that in
    /// its place and sets *used to 1. Otherwise changes nothing and sets *used to 0. block may be
    /// -1 if no block is free; if one is needed, that is MHA_ERROR_CACHE_FULL.
    pub fn mha_kv_cache_unshare(
        cache: *mut mha_kv_cache, sequence: i64, block: i32, used: *mut u32, error: *mut mha_error,
    ) -> mha_status;
    /// Replaces the contents of sequence `to` by the first length positions of sequence `from`,
    /// which is another one. In a paged cache, `to` must already have blocks for them; a block
    /// that both have is not copied.
    pub fn mha_kv_cache_copy_prefix(
        cache: *mut mha_kv_cache, from: i64, to: i64, length: i64, error: *mut mha_error,
    ) -> mha_status;
    /// Appends count rows to a sequence on the calling thread, without attention, and stores them
    /// bit for bit as a call would. k is `[count, num_kv_heads, head_dim]` and v `[count,
    /// num_kv_heads, head_dim_v]`, already normalised and rotated. v is NULL for
    /// MHA_CACHE_VALUES_IN_KEYS.
    pub fn mha_kv_cache_append(
        cache: *mut mha_kv_cache, sequence: i64, count: i64, k: *const f32, v: *const f32,
        error: *mut mha_error,
    ) -> mha_status;
    /// Reads count positions of a sequence from position first on, as the numbers that attention
    /// uses, in the shapes of mha_kv_cache_append; k or v may be NULL. Positions that the sequence
    /// does not have, or that a ring has overwritten, are an error. Appending what was read from
    /// F32, F16 or BF16 stores the same bits again.
    pub fn mha_kv_cache_read(
        cache: *const mha_kv_cache, sequence: i64, first: i64, count: i64, k: *mut f32,
        v: *mut f32, error: *mut mha_error,
    ) -> mha_status;
    /// Writes the partials of left and right together to result, which may be left or right. All
    /// are `[rows, head_dim_v + 2]`; left has the earlier keys. rows is at least 1, or MHA_EMPTY.
    /// instruction_set is an MHA_INSTRUCTION_SET_*; 0 = the best one that the machine has.
    pub fn mha_partials_merge(
        rows: i64, head_dim_v: i64, left: *const f32, right: *const f32, result: *mut f32,
        instruction_set: u32, error: *mut mha_error,
    ) -> mha_status;
    /// Writes output and lse as mha_attention would, on the calling thread.
    pub fn mha_partials_finish(args: *const mha_partials_args, error: *mut mha_error)
        -> mha_status;
    /// Sets *bytes to the size of workspace that mha_choose_keys needs.
    pub fn mha_choose_keys_workspace(
        args: *const mha_choose_keys_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    /// Chooses keys. The choice for a query does not depend on other queries or threads.
    pub fn mha_choose_keys(
        args: *const mha_choose_keys_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    /// Fills *info, whose struct_size is set, with how mha_forward(layer, args, ...) would run
    /// now. Reads the arrays of sequences and score, chosen_keys and the lengths in the cache.
    /// operations and bytes are 0 for an empty call.
    pub fn mha_forward_info(
        layer: *const mha_layer, args: *const mha_forward_args, info: *mut mha_call_info,
        error: *mut mha_error,
    ) -> mha_status;
    /// Like mha_forward_info, for mha_attention(args, ...).
    pub fn mha_attention_info(
        args: *const mha_attention_args, info: *mut mha_call_info, error: *mut mha_error,
    ) -> mha_status;
    /// Like mha_forward_info, for mha_linear(layer, args, ...); of a layer with heads, W_O counts.
    pub fn mha_linear_info(
        layer: *const mha_layer, args: *const mha_linear_args, info: *mut mha_call_info,
        error: *mut mha_error,
    ) -> mha_status;
    /// Sets *bytes to the size of workspace that mha_recurrent_attention needs, which does not
    /// grow with batch, count or rows. Reads no array: data may be NULL where it is required.
    pub fn mha_recurrent_attention_workspace(
        args: *const mha_recurrent_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    /// Computes recurrent attention. Rows that are not valid are not read; their outputs are 0.
    pub fn mha_recurrent_attention(
        args: *const mha_recurrent_args, workspace: *mut core::ffi::c_void, workspace_bytes: usize,
        error: *mut mha_error,
    ) -> mha_status;
    /// Like mha_forward_info, for mha_recurrent_attention(args, ...). bytes counts the states once
    /// for each of state and state_out, and num_snapshots times for snapshots.
    pub fn mha_recurrent_attention_info(
        args: *const mha_recurrent_args, info: *mut mha_call_info, error: *mut mha_error,
    ) -> mha_status;
    /// Sets *bytes to the size of workspace that mha_causal_conv needs, which is often 0.
    pub fn mha_causal_conv_workspace(
        args: *const mha_causal_conv_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    /// Computes a causal convolution. Rows that are not valid are not read; their outputs are 0.
    pub fn mha_causal_conv(
        args: *const mha_causal_conv_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
}
