"""Written by tools/interface.py from the headers: constants, types and names of fields, and
functions."""

constants = """\
VERSION_MAJOR=0 VERSION_MINOR=1 VERSION_PATCH=0 CONTRACT=3 OK=0 ERROR_NULL_POINTER=1
ERROR_STRUCT_SIZE=2 ERROR_INVALID_VALUE=3 ERROR_SHAPE=4 ERROR_TOO_LARGE=5 ERROR_BUFFER_TOO_SMALL=6
ERROR_OUT_OF_MEMORY=7 ERROR_INSTRUCTION_SET=8 ERROR_PACKED_FORMAT=9 ERROR_PACKED_CHECKSUM=10
ERROR_OUT_OF_RANGE=11 ERROR_CACHE_FULL=12 ERROR_CACHE_SHARED=13 ERROR_CACHE_FORMAT=14 TYPE_F32=1
TYPE_F16=2 TYPE_BF16=3 TYPE_INT8=4 TYPE_INT4=5 TYPE_INT5=6 TYPE_INT6=7 EMPTY=-9223372036854775808
BROADCAST=-9223372036854775808 LAYOUT_IN_OUT=0 LAYOUT_OUT_IN=1 CACHE_KIND_CONTIGUOUS=0
CACHE_KIND_RING=257 CACHE_KIND_PAGED=258 CACHE_KIND_POOL=259 CAUSAL=1 WINDOW_LEFT=2 WINDOW_RIGHT=4
EQUAL_SCORES=8 ARITHMETIC_F32=0 ARITHMETIC_INT8=1281 ARITHMETIC_INT16=1282 ARITHMETIC_BF16=1283
GATE_IN_W_G=0 GATE_IN_W_Q=2049 FUNCTION_NONE=0 FUNCTION_SIGMOID=1 FUNCTION_SOFTPLUS=2
FUNCTION_SILU=3 ROPE_HALF=0 ROPE_INTERLEAVED=1 NORM_LAYER=256 NORM_ALL_HEADS=512
NORM_AFTER_ROPE=1024 NORM_VALUES=2048 NORM_AFTER_GATE=4096 COLUMNS_ALL_KEYS=0 COLUMNS_NEW_KEYS=769
SEGMENTS_WITHIN=0 SEGMENTS_ALSO=1025 INSTRUCTION_SET_AUTO=0 INSTRUCTION_SET_SCALAR=1
INSTRUCTION_SET_AVX2=2 INSTRUCTION_SET_AVX512=3 INSTRUCTION_SET_NEON=4 INSTRUCTION_SET_AVX2_VNNI=5
INSTRUCTION_SET_AVX512_VNNI=6 INSTRUCTION_SET_NEON_DOTPROD=7 INSTRUCTION_SET_NEON_I8MM=8
INSTRUCTION_SET_AVX512_BF16=9 INSTRUCTION_SET_AVX512_AMX=10 INSTRUCTION_SET_WASM_SIMD128=11
INSTRUCTION_SET_WASM_RELAXED=12 INSTRUCTION_SET_WASM_SIGNED_DOT=13
INSTRUCTION_SET_WASM_UNSIGNED_DOT=14 INSTRUCTION_SET_RVV=15 CACHE_VALUES_OWN=0
CACHE_VALUES_IN_KEYS=513 BACK_END_NATIVE=0 BACK_END_SGEMM=1
"""

structs = """\
mha_error: u32 status argument, text message
mha_scheduler: out context, u32 num_threads reserved, ptr parallel_for
mha_strides: i64 batch row head
mha_input: ptr data, u32 type reserved, mha_strides strides, ptr reserved_pointer
mha_output: out data, u32 type reserved, mha_strides strides
mha_matrix: ptr data bias scales offsets block_scales block_offsets, i64 row_stride
mha_weight_format: u32 type group_size scale_type arithmetic
mha_layer_config: size struct_size, i64 query_dim key_dim value_dim output_dim num_heads
  num_kv_heads head_dim head_dim_v, f32 scale, mha_weight_format format, u32 gate, i64 gate_dim
mha_layer_weights: size struct_size, u32 layout type gate_place, mha_matrix w_q w_k w_v w_qkv w_o
  w_g
mha_kv_cache_config: size struct_size, i64 num_sequences capacity num_kv_heads head_dim head_dim_v,
  u32 k_type v_type kind value_place, i64 block_positions num_blocks
mha_sequences: size struct_size, i64 count, ptr cu_seqlens_q cu_seqlens_kv q_lengths kv_lengths
  q_first_rows kv_first_rows q_first_positions cache_sequences cache_lengths block_tables, i64
  block_table_entries block_table_stride, ptr block_table_starts rope_q_positions rope_k_positions
mha_call: u32 flags attention_arithmetic, i64 window_left window_right, ptr rope norm score
  scheduler, i64 batch n_q n_kv, ptr sequences score_arrays, out cache, ptr cache_read outputs
mha_forward_args: size struct_size, mha_call call, mha_input query key value, mha_output output
mha_attention_args: size struct_size, mha_call call, i64 num_heads num_kv_heads head_dim head_dim_v,
  f32 scale, u32 instruction_set, mha_input q k v, mha_output output, i64 kv_first_position
mha_linear_weights: size struct_size, i64 input_dim output_dim, mha_matrix w, u32 layout type,
  mha_weight_format format
mha_linear_args: size struct_size, i64 rows, mha_input x residual, mha_output output, ptr scheduler
mha_rope: size struct_size, u32 style reserved, i64 dims offset num_positions, ptr cos sin, i64
  table_stride
mha_norm: size struct_size, u32 flags, f32 epsilon, ptr q_weight k_weight q_bias k_bias, i64
  head_stride, u32 context_flags, f32 context_epsilon, ptr context_weight context_bias, i64
  context_head_stride
mha_score_options: size struct_size, f32 softcap, u32 reserved, ptr alibi_slopes sinks head_scales
  relative_bias, i64 relative_left relative_right
mha_score_arrays: size struct_size, mha_input bias, ptr mask, mha_strides mask_strides, u32
  column_keys segments, i64 num_columns, ptr q_segments kv_segments q_scales relative_rows,
  mha_strides relative_rows_strides, ptr chosen_keys, mha_strides chosen_keys_strides, i64
  num_chosen chosen_block
mha_rope_config: size struct_size, i64 dims num_positions first_position, f64 base attention_factor
  linear_factor, i64 original_positions, f64 yarn_factor yarn_beta_fast yarn_beta_slow, u32
  yarn_unrounded mrope_interleaved, f64 llama3_factor llama3_low_freq_factor llama3_high_freq_factor
  ntk_factor, i64 ntk_positions, ptr pair_factors mrope_section mrope_positions
mha_recurrent_args: size struct_size, i64 num_q_heads num_k_heads num_v_heads head_dim head_dim_v
  decay_dim, f32 scale norm_epsilon, ptr a_log dt_bias, u32 beta_function instruction_set, ptr
  scheduler, i64 batch rows, mha_input q k v decay beta, mha_output output, ptr sequences state, out
  state_out snapshots, i64 num_snapshots
mha_causal_conv_args: size struct_size, i64 channels kernel_size, ptr weights bias, u32 activation
  instruction_set, ptr scheduler, i64 batch rows, mha_input x, mha_output output, ptr sequences
  state, out state_out
mha_allocator: out context, ptr allocate release
mha_layer_options: size struct_size, u32 instruction_set reserved, ptr sgemm allocator
mha_kv_pool: size struct_size, out k v k_scales v_scales, i64 k_block_stride v_block_stride
  k_scales_block_stride v_scales_block_stride
mha_outputs: size struct_size, out lse partials q k v context scores scaled_scores softcapped_scores
  masked_scores attention_weights
mha_partials_args: size struct_size, i64 batch num_heads n_q head_dim_v, u32 instruction_set
  reserved, ptr partials sinks head_scales, mha_output output, out lse
mha_choose_keys_args: size struct_size, ptr attention, mha_input weights, i64 num_chosen, out
  chosen_keys index_scores
mha_call_info: size struct_size, u32 instruction_set back_end contract num_threads, size
  workspace_bytes packed_bytes, u64 operations bytes
"""

functions = """\
mha_layer_create=pppp mha_kv_cache_size=pp mha_kv_cache_init=ppsp mha_forward_workspace=ppp
mha_forward=ppps mha_attention_workspace=pp mha_attention=pps mha_linear_create=ppp
mha_linear_workspace=ppp mha_linear=ppps mha_rope_tables=ppp mha_alibi_slopes=ip
mha_t5_relative_bias=piiuiiip mha_recurrent_attention_workspace=pp mha_recurrent_attention=pps
mha_recurrent_attention_info=pp mha_causal_conv_workspace=pp mha_causal_conv=pps
mha_layer_pack_size=pppp mha_layer_pack=pppps mha_layer_view=psppsp mha_layer_verify=ps
mha_linear_pack_size=ppp mha_linear_pack=ppps mha_layer_shape=pp mha_kv_pool_init=pppsp
mha_kv_cache_view=psp mha_kv_cache_shape=pp mha_kv_cache_length=pip mha_kv_cache_truncate=pii
mha_kv_cache_set_blocks=pipi mha_kv_cache_unshare=pinp mha_kv_cache_copy_prefix=piii
mha_kv_cache_append=piipp mha_kv_cache_read=piiipp mha_partials_merge=iipppu mha_partials_finish=p
mha_choose_keys_workspace=pp mha_choose_keys=pps mha_forward_info=ppp mha_attention_info=pp
mha_linear_info=ppp
"""
