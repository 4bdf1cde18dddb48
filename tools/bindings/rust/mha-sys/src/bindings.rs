// What `cargo run -p systest` makes of mha.h.


pub const MHA_VERSION_MAJOR: u32 = 0;
pub const MHA_VERSION_MINOR: u32 = 1;
pub const MHA_VERSION_PATCH: u32 = 0;
pub const MHA_CONTRACT: u32 = 1;
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
pub const MHA_EMPTY: i64 = -9223372036854775808;
pub const MHA_BROADCAST: i64 = -9223372036854775808;
pub const MHA_LAYOUT_IN_OUT: u32 = 0;
pub const MHA_LAYOUT_OUT_IN: u32 = 1;
pub const MHA_CACHE_KIND_CONTIGUOUS: u32 = 0;
pub const MHA_CACHE_KIND_RING: u32 = 257;
pub const MHA_CACHE_KIND_PAGED: u32 = 258;
pub const MHA_CAUSAL: u32 = 1;
pub const MHA_WINDOW_LEFT: u32 = 2;
pub const MHA_WINDOW_RIGHT: u32 = 4;
pub const MHA_EQUAL_SCORES: u32 = 8;
pub const MHA_ARITHMETIC_F32: u32 = 0;
pub const MHA_ARITHMETIC_INT8: u32 = 1281;
pub const MHA_ARITHMETIC_INT16: u32 = 1282;
pub const MHA_GATE_NONE: u32 = 0;
pub const MHA_GATE_SIGMOID: u32 = 1;
pub const MHA_GATE_SOFTPLUS: u32 = 2;
pub const MHA_ROPE_HALF: u32 = 0;
pub const MHA_ROPE_INTERLEAVED: u32 = 1;
pub const MHA_NORM_LAYER: u32 = 256;
pub const MHA_NORM_ALL_HEADS: u32 = 512;
pub const MHA_NORM_AFTER_ROPE: u32 = 1024;
pub const MHA_NORM_VALUES: u32 = 2048;
pub const MHA_NORM_AFTER_GATE: u32 = 4096;
pub const MHA_COLUMNS_ALL_KEYS: u32 = 0;
pub const MHA_COLUMNS_NEW_KEYS: u32 = 769;
pub const MHA_GROUPS_WITHIN: u32 = 0;
pub const MHA_GROUPS_ALSO: u32 = 1025;
pub const MHA_INSTRUCTION_SET_AUTO: u32 = 0;
pub const MHA_INSTRUCTION_SET_SCALAR: u32 = 1;
pub const MHA_INSTRUCTION_SET_AVX2: u32 = 2;
pub const MHA_INSTRUCTION_SET_AVX512: u32 = 3;
pub const MHA_INSTRUCTION_SET_NEON: u32 = 4;
pub const MHA_INSTRUCTION_SET_AVX2_VNNI: u32 = 5;
pub const MHA_INSTRUCTION_SET_AVX512_VNNI: u32 = 6;
pub const MHA_INSTRUCTION_SET_NEON_DOTPROD: u32 = 7;
pub const MHA_INSTRUCTION_SET_NEON_I8MM: u32 = 8;
pub const MHA_CACHE_VALUES_OWN: u32 = 0;
pub const MHA_CACHE_VALUES_IN_KEYS: u32 = 513;
pub const MHA_BACK_END_NATIVE: u32 = 0;
pub const MHA_BACK_END_SGEMM: u32 = 1;
pub const MHA_ACTIVATION_NONE: u32 = 0;
pub const MHA_ACTIVATION_SILU: u32 = 1793;
pub type mha_status = u32;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_error {
    pub status: u32,
    pub argument: u32,
    pub message: [core::ffi::c_char; 248usize],
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_scheduler {
    pub context: *mut core::ffi::c_void,
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
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_strides {
    pub batch: i64,
    pub row: i64,
    pub head: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_input {
    pub data: *const core::ffi::c_void,
    pub type_: u32,
    pub reserved: u32,
    pub strides: mha_strides,
    pub reserved_pointer: *const core::ffi::c_void,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_output {
    pub data: *mut core::ffi::c_void,
    pub type_: u32,
    pub reserved: u32,
    pub strides: mha_strides,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_matrix {
    pub data: *const core::ffi::c_void,
    pub bias: *const f32,
    pub scales: *const f32,
    pub offsets: *const f32,
    pub row_stride: i64,
}
#[repr(C)]
#[derive(Debug)]
pub struct mha_layer {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_layer_config {
    pub struct_size: usize,
    pub query_dim: i64,
    pub key_dim: i64,
    pub value_dim: i64,
    pub output_dim: i64,
    pub num_heads: i64,
    pub num_kv_heads: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub scale: f32,
    pub weight_type: u32,
    pub group_size: u32,
    pub scale_type: u32,
    pub arithmetic: u32,
    pub gate: u32,
    pub gate_dim: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_layer_weights {
    pub struct_size: usize,
    pub layout: u32,
    pub type_: u32,
    pub w_q: mha_matrix,
    pub w_k: mha_matrix,
    pub w_v: mha_matrix,
    pub w_qkv: mha_matrix,
    pub w_o: mha_matrix,
    pub w_g: mha_matrix,
}
#[repr(C)]
#[derive(Debug)]
pub struct mha_kv_cache {
    _unused: [u8; 0],
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_kv_cache_config {
    pub struct_size: usize,
    pub num_sequences: i64,
    pub capacity: i64,
    pub num_kv_heads: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub k_type: u32,
    pub v_type: u32,
    pub kind: u32,
    pub values: u32,
    pub block_positions: i64,
    pub num_blocks: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_sequences {
    pub struct_size: usize,
    pub count: i64,
    pub cu_seqlens_q: *const i64,
    pub cu_seqlens_kv: *const i64,
    pub q_lengths: *const i64,
    pub kv_lengths: *const i64,
    pub q_first_rows: *const i64,
    pub kv_first_rows: *const i64,
    pub q_first_positions: *const i64,
    pub cache_sequences: *const i64,
    pub rope_q_positions: *const i64,
    pub rope_k_positions: *const i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_forward_args {
    pub struct_size: usize,
    pub flags: u32,
    pub reserved: u32,
    pub window_left: i64,
    pub window_right: i64,
    pub rope: *const mha_rope,
    pub norm: *const mha_norm,
    pub score: *const mha_score_options,
    pub scheduler: *const mha_scheduler,
    pub batch: i64,
    pub n_q: i64,
    pub n_kv: i64,
    pub query: mha_input,
    pub key: mha_input,
    pub value: mha_input,
    pub output: mha_output,
    pub sequences: *const mha_sequences,
    pub score_arrays: *const mha_score_arrays,
    pub cache: *mut mha_kv_cache,
    pub cache_read: *const mha_kv_cache,
    pub outputs: *const mha_outputs,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_attention_args {
    pub struct_size: usize,
    pub num_heads: i64,
    pub num_kv_heads: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub scale: f32,
    pub flags: u32,
    pub window_left: i64,
    pub window_right: i64,
    pub rope: *const mha_rope,
    pub norm: *const mha_norm,
    pub score: *const mha_score_options,
    pub scheduler: *const mha_scheduler,
    pub instruction_set: u32,
    pub reserved: u32,
    pub batch: i64,
    pub n_q: i64,
    pub n_kv: i64,
    pub q: mha_input,
    pub k: mha_input,
    pub v: mha_input,
    pub output: mha_output,
    pub sequences: *const mha_sequences,
    pub score_arrays: *const mha_score_arrays,
    pub cache: *mut mha_kv_cache,
    pub cache_read: *const mha_kv_cache,
    pub outputs: *const mha_outputs,
    pub kv_first_position: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_linear_weights {
    pub struct_size: usize,
    pub input_dim: i64,
    pub output_dim: i64,
    pub w: mha_matrix,
    pub layout: u32,
    pub type_: u32,
    pub weight_type: u32,
    pub group_size: u32,
    pub scale_type: u32,
    pub arithmetic: u32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_linear_args {
    pub struct_size: usize,
    pub rows: i64,
    pub x: mha_input,
    pub residual: mha_input,
    pub output: mha_output,
    pub scheduler: *const mha_scheduler,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_rope {
    pub struct_size: usize,
    pub style: u32,
    pub reserved: u32,
    pub dims: i64,
    pub offset: i64,
    pub num_positions: i64,
    pub cos: *const f32,
    pub sin: *const f32,
    pub table_stride: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_rope_config {
    pub struct_size: usize,
    pub dims: i64,
    pub num_positions: i64,
    pub first_position: i64,
    pub base: f64,
    pub attention_factor: f64,
    pub linear_factor: f64,
    pub original_positions: i64,
    pub yarn_factor: f64,
    pub yarn_beta_fast: f64,
    pub yarn_beta_slow: f64,
    pub yarn_unrounded: u32,
    pub mrope_interleaved: u32,
    pub llama3_factor: f64,
    pub llama3_low_freq_factor: f64,
    pub llama3_high_freq_factor: f64,
    pub ntk_factor: f64,
    pub ntk_positions: i64,
    pub pair_factors: *const f64,
    pub mrope_section: *const i64,
    pub mrope_positions: *const i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_norm {
    pub struct_size: usize,
    pub flags: u32,
    pub epsilon: f32,
    pub q_weight: *const f32,
    pub k_weight: *const f32,
    pub q_bias: *const f32,
    pub k_bias: *const f32,
    pub head_stride: i64,
    pub context_flags: u32,
    pub context_epsilon: f32,
    pub context_weight: *const f32,
    pub context_bias: *const f32,
    pub context_head_stride: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_score_options {
    pub struct_size: usize,
    pub softcap: f32,
    pub reserved: u32,
    pub alibi_slopes: *const f32,
    pub sinks: *const f32,
    pub head_scales: *const f32,
    pub relative_bias: *const f32,
    pub relative_left: i64,
    pub relative_right: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_score_arrays {
    pub struct_size: usize,
    pub bias: mha_input,
    pub mask: *const u8,
    pub mask_strides: mha_strides,
    pub columns: u32,
    pub groups: u32,
    pub num_columns: i64,
    pub q_groups: *const i32,
    pub kv_groups: *const i32,
    pub q_scales: *const f32,
    pub relative_rows: *const f32,
    pub relative_rows_strides: mha_strides,
    pub chosen_keys: *const i32,
    pub chosen_keys_strides: mha_strides,
    pub num_chosen: i64,
    pub chosen_block: i64,
}
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
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_allocator {
    pub context: *mut core::ffi::c_void,
    pub allocate: ::core::option::Option<
        unsafe extern "C" fn(
            context: *mut core::ffi::c_void,
            bytes: usize,
        ) -> *mut core::ffi::c_void,
    >,
    pub release: ::core::option::Option<
        unsafe extern "C" fn(context: *mut core::ffi::c_void, memory: *mut core::ffi::c_void),
    >,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_layer_options {
    pub struct_size: usize,
    pub instruction_set: u32,
    pub reserved: u32,
    pub sgemm: mha_sgemm,
    pub allocator: *const mha_allocator,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_outputs {
    pub struct_size: usize,
    pub lse: *mut f32,
    pub states: *mut f32,
    pub q: *mut f32,
    pub k: *mut f32,
    pub v: *mut f32,
    pub context: *mut f32,
    pub scores: *mut f32,
    pub scaled_scores: *mut f32,
    pub softcapped_scores: *mut f32,
    pub masked_scores: *mut f32,
    pub attention_weights: *mut f32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_states_args {
    pub struct_size: usize,
    pub batch: i64,
    pub num_heads: i64,
    pub n_q: i64,
    pub head_dim_v: i64,
    pub instruction_set: u32,
    pub reserved: u32,
    pub states: *const f32,
    pub sinks: *const f32,
    pub head_scales: *const f32,
    pub output: mha_output,
    pub lse: *mut f32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_choose_keys_args {
    pub struct_size: usize,
    pub attention: *const mha_attention_args,
    pub weights: mha_input,
    pub num_chosen: i64,
    pub chosen_keys: *mut i32,
    pub index_scores: *mut f32,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_call_info {
    pub struct_size: usize,
    pub instruction_set: u32,
    pub back_end: u32,
    pub contract: u32,
    pub num_threads: u32,
    pub workspace_bytes: usize,
    pub packed_bytes: usize,
    pub operations: u64,
    pub bytes: u64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_recurrent_args {
    pub struct_size: usize,
    pub num_q_heads: i64,
    pub num_k_heads: i64,
    pub num_v_heads: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub decay_dim: i64,
    pub scale: f32,
    pub norm_epsilon: f32,
    pub a_log: *const f32,
    pub dt_bias: *const f32,
    pub beta_function: u32,
    pub instruction_set: u32,
    pub scheduler: *const mha_scheduler,
    pub batch: i64,
    pub rows: i64,
    pub q: mha_input,
    pub k: mha_input,
    pub v: mha_input,
    pub decay: mha_input,
    pub beta: mha_input,
    pub output: mha_output,
    pub sequences: *const mha_sequences,
    pub state: *const f32,
    pub state_out: *mut f32,
    pub snapshots: *mut f32,
    pub num_snapshots: i64,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct mha_causal_conv_args {
    pub struct_size: usize,
    pub channels: i64,
    pub kernel_size: i64,
    pub weights: *const f32,
    pub bias: *const f32,
    pub activation: u32,
    pub instruction_set: u32,
    pub scheduler: *const mha_scheduler,
    pub batch: i64,
    pub rows: i64,
    pub x: mha_input,
    pub output: mha_output,
    pub sequences: *const mha_sequences,
    pub state: *const f32,
    pub state_out: *mut f32,
}
extern "C" {
    pub fn mha_status_string(status: mha_status) -> *const core::ffi::c_char;
    pub fn mha_version() -> u32;
    pub fn mha_layer_create(
        config: *const mha_layer_config, weights: *const mha_layer_weights,
        options: *const mha_layer_options, layer: *mut *mut mha_layer, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_layer_destroy(layer: *mut mha_layer);
    pub fn mha_kv_cache_size(
        config: *const mha_kv_cache_config, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_init(
        config: *const mha_kv_cache_config, buffer: *mut core::ffi::c_void, buffer_bytes: usize,
        cache: *mut *mut mha_kv_cache, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_forward_workspace(
        layer: *const mha_layer, args: *const mha_forward_args, bytes: *mut usize,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_forward(
        layer: *const mha_layer, args: *const mha_forward_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_attention_workspace(
        args: *const mha_attention_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_attention(
        args: *const mha_attention_args, workspace: *mut core::ffi::c_void, workspace_bytes: usize,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_linear_create(
        weights: *const mha_linear_weights, options: *const mha_layer_options,
        layer: *mut *mut mha_layer, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_linear_workspace(
        layer: *const mha_layer, args: *const mha_linear_args, bytes: *mut usize,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_linear(
        layer: *const mha_layer, args: *const mha_linear_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_rope_tables(
        config: *const mha_rope_config, cos: *mut f32, sin: *mut f32, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_alibi_slopes(num_heads: i64, slopes: *mut f32, error: *mut mha_error) -> mha_status;
    pub fn mha_t5_relative_bias(
        embedding: *const f32, num_buckets: i64, max_distance: i64, is_bidirectional: u32,
        num_heads: i64, left: i64, right: i64, relative_bias: *mut f32, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_instruction_sets() -> u32;
    pub fn mha_instruction_set_name(instruction_set: u32) -> *const core::ffi::c_char;
    pub fn mha_contract() -> u32;
    pub fn mha_layer_pack_size(
        config: *const mha_layer_config, weights: *const mha_layer_weights,
        options: *const mha_layer_options, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_layer_pack(
        config: *const mha_layer_config, weights: *const mha_layer_weights,
        options: *const mha_layer_options, buffer: *mut core::ffi::c_void, buffer_bytes: usize,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_layer_view_size() -> usize;
    pub fn mha_layer_view(
        buffer: *const core::ffi::c_void, buffer_bytes: usize, options: *const mha_layer_options,
        storage: *mut core::ffi::c_void, storage_bytes: usize, layer: *mut *const mha_layer,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_layer_verify(
        buffer: *const core::ffi::c_void, buffer_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_linear_pack_size(
        weights: *const mha_linear_weights, options: *const mha_layer_options, bytes: *mut usize,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_linear_pack(
        weights: *const mha_linear_weights, options: *const mha_layer_options,
        buffer: *mut core::ffi::c_void, buffer_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_layer_shape(
        layer: *const mha_layer, config: *mut mha_layer_config, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_view(
        buffer: *mut core::ffi::c_void, buffer_bytes: usize, cache: *mut *mut mha_kv_cache,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_shape(
        cache: *const mha_kv_cache, config: *mut mha_kv_cache_config, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_length(
        cache: *const mha_kv_cache, sequence: i64, length: *mut i64, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_truncate(
        cache: *mut mha_kv_cache, sequence: i64, length: i64, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_set_blocks(
        cache: *mut mha_kv_cache, sequence: i64, blocks: *const i32, count: i64,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_unshare(
        cache: *mut mha_kv_cache, sequence: i64, block: i32, used: *mut u32, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_copy_prefix(
        cache: *mut mha_kv_cache, from: i64, to: i64, length: i64, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_append(
        cache: *mut mha_kv_cache, sequence: i64, count: i64, k: *const f32, v: *const f32,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_kv_cache_read(
        cache: *const mha_kv_cache, sequence: i64, first: i64, count: i64, k: *mut f32,
        v: *mut f32, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_states_merge(
        rows: i64, head_dim_v: i64, left: *const f32, right: *const f32, result: *mut f32,
        instruction_set: u32, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_states_finish(args: *const mha_states_args, error: *mut mha_error) -> mha_status;
    pub fn mha_choose_keys_workspace(
        args: *const mha_choose_keys_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_choose_keys(
        args: *const mha_choose_keys_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_info(
        layer: *const mha_layer, args: *const mha_forward_args, info: *mut mha_call_info,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_attention_info(
        args: *const mha_attention_args, info: *mut mha_call_info, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_linear_info(
        layer: *const mha_layer, args: *const mha_linear_args, info: *mut mha_call_info,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_recurrent_attention_workspace(
        args: *const mha_recurrent_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_recurrent_attention(
        args: *const mha_recurrent_args, workspace: *mut core::ffi::c_void, workspace_bytes: usize,
        error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_recurrent_attention_info(
        args: *const mha_recurrent_args, info: *mut mha_call_info, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_causal_conv_workspace(
        args: *const mha_causal_conv_args, bytes: *mut usize, error: *mut mha_error,
    ) -> mha_status;
    pub fn mha_causal_conv(
        args: *const mha_causal_conv_args, workspace: *mut core::ffi::c_void,
        workspace_bytes: usize, error: *mut mha_error,
    ) -> mha_status;
}
