// Written by tools/interface.py from the headers: what each number of a struct may be by itself.
#include "../storage.h"
#include "rules.h"

namespace mha {

// clang-format off
#define MHA_FIELDS(S, list) \
  template <> mha_status check_fields(const Rules &rules, const S &s) { list return MHA_OK; }
#define MHA_RULE(kind, field, ...) MHA_TRY(rules.kind(#field, s.field, __VA_ARGS__));
#define MHA_ARRAYS(S, list) \
  template <> mha_status check_arrays(const Rules &rules, const S &s, int64_t num_heads) { \
    list return MHA_OK; }
#define MHA_ARRAY(field, ...) MHA_TRY(rules.numbers(#field, s.field, num_heads, __VA_ARGS__));

static_assert(type_of(Storage::f32) == MHA_TYPE_F32);
static_assert(type_of(Storage::f16) == MHA_TYPE_F16);
static_assert(type_of(Storage::bf16) == MHA_TYPE_BF16);
static_assert(type_of(Storage::int8) == MHA_TYPE_INT8);
static_assert(type_of(Storage::int4) == MHA_TYPE_INT4);
static_assert(type_of(Storage::int5) == MHA_TYPE_INT5);
static_assert(type_of(Storage::int6) == MHA_TYPE_INT6);

MHA_FIELDS(mha_weight_format,
  MHA_RULE(range, type, 0, 7,
           "MHA_TYPE_F32 (1), F16 (2), BF16 (3), INT8 (4), INT4 (5), INT5 (6) or INT6 (7), or to "
           "0 (F32)")
  MHA_RULE(one_of, group_size, {0, 16, 32, 64, 128},
           "16, 32, 64 or 128, or to 0 (all (INT8), 32 (INT4))")
  MHA_RULE(one_of, scale_type, {0, 1, 2, 4},
           "MHA_TYPE_F32 (1), MHA_TYPE_F16 (2) or MHA_TYPE_INT8 (4), or to 0 (F32)")
  MHA_RULE(one_of, arithmetic, {0, 1281, 1282, 1283},
           "MHA_ARITHMETIC_F32 (0), INT8 (1281), INT16 (1282) or BF16 (1283)"))

MHA_FIELDS(mha_layer_config,
  MHA_RULE(size, query_dim, 1, "at least 1: width of a row of query (d_in, embed_dim)")
  MHA_RULE(size, key_dim, 0, "at least 1, or to 0 (query_dim): width of a row of key")
  MHA_RULE(size, value_dim, 0, "at least 1, or to 0 (key_dim): width of a row of value")
  MHA_RULE(size, output_dim, 0, "at least 1, or to 0 (query_dim): width of a row of output")
  MHA_RULE(size, num_heads, 1, "at least 1: query heads (mha_linear_create makes a layer without)")
  MHA_RULE(size, num_kv_heads, 0, "at least 1, or to 0 (num_heads): key and value heads")
  MHA_RULE(size, head_dim, 0, "at least 1, or to 0 (query_dim / num_heads)")
  MHA_RULE(size, head_dim_v, 0, "at least 1, or to 0 (head_dim): width of a value of one head")
  MHA_RULE(number, scale, -FLT_MAX, FLT_MAX, "a finite number, or to 0 (1 / sqrt(head_dim))")
  MHA_RULE(range, gate, 0, 2,
           "MHA_FUNCTION_SIGMOID (1) or MHA_FUNCTION_SOFTPLUS (2), or to 0 (none)"))

MHA_FIELDS(mha_layer_weights,
  MHA_RULE(one_of, layout, {0, 1}, "MHA_LAYOUT_IN_OUT (0) or MHA_LAYOUT_OUT_IN (1)")
  MHA_RULE(range, type, 0, 5,
           "MHA_TYPE_F32 (1), F16 (2), BF16 (3), INT8 (4) or INT4 (5), or to 0 (F32)")
  MHA_RULE(one_of, gate_place, {0, 2049}, "MHA_GATE_IN_W_G (0) or MHA_GATE_IN_W_Q (2049)"))

MHA_FIELDS(mha_kv_cache_config,
  MHA_RULE(size, num_sequences, 1, "at least 1: sequences, numbered from 0")
  MHA_RULE(range, capacity, 1, INT64_MAX, "at least 1: the most positions of a sequence")
  MHA_RULE(size, num_kv_heads, 1, "at least 1")
  MHA_RULE(size, head_dim, 1, "at least 1")
  MHA_RULE(size, head_dim_v, 0, "at least 1, or to 0 (head_dim)")
  MHA_RULE(range, k_type, 0, 4, "MHA_TYPE_F32 (1), F16 (2), BF16 (3) or INT8 (4), or to 0 (F32)")
  MHA_RULE(range, v_type, 0, 5,
           "MHA_TYPE_F32 (1), F16 (2), BF16 (3), INT8 (4) or INT4 (5), or to 0 (k_type)")
  MHA_RULE(one_of, kind, {0, 257, 258, 259},
           "MHA_CACHE_KIND_CONTIGUOUS (0), RING (257), PAGED (258) or POOL (259)")
  MHA_RULE(one_of, value_place, {0, 513},
           "MHA_CACHE_VALUES_OWN (0) or MHA_CACHE_VALUES_IN_KEYS (513)")
  MHA_RULE(range, block_positions, 0, INT64_MAX, "at least 1, or to 0 (no blocks)")
  MHA_RULE(size, num_blocks, 0, "at least 1, or to 0 (no blocks): its blocks, numbered from 0"))

MHA_FIELDS(mha_sequences,
  MHA_RULE(range, count, 0, INT64_MAX, "at least 1, or to 0 (batch): sequences")
  MHA_RULE(range, block_table_entries, 0, INT64_MAX, "at least 1, or to 0 (none)")
  MHA_RULE(range, block_table_stride, 0, INT64_MAX, "at least 1, or to 0 (contiguous)"))

MHA_FIELDS(mha_call,
  MHA_RULE(flags, flags, 0xf,
           "MHA_CAUSAL (0x1), WINDOW_LEFT (0x2), WINDOW_RIGHT (0x4) or EQUAL_SCORES (0x8)")
  MHA_RULE(one_of, attention_arithmetic, {0, 1282},
           "MHA_ARITHMETIC_F32 (0) or MHA_ARITHMETIC_INT16 (1282)")
  MHA_RULE(range, window_left, 0, INT64_MAX, "at least 0")
  MHA_RULE(range, window_right, 0, INT64_MAX, "at least 0"))

MHA_FIELDS(mha_attention_args,
  MHA_RULE(size, num_heads, 1, "at least 1: query heads")
  MHA_RULE(size, num_kv_heads, 0, "at least 1, or to 0 (num_heads): key and value heads")
  MHA_RULE(size, head_dim, 1, "at least 1: width of a query or key of one head")
  MHA_RULE(size, head_dim_v, 0, "at least 1, or to 0 (head_dim): width of a value of one head")
  MHA_RULE(number, scale, -FLT_MAX, FLT_MAX, "a finite number, or to 0 (1 / sqrt(head_dim))")
  MHA_RULE(range, kv_first_position, 0, int64_t{1} << 62, "0 to 2^62"))

MHA_FIELDS(mha_linear_weights,
  MHA_RULE(size, input_dim, 1, "at least 1: width of a row of x")
  MHA_RULE(size, output_dim, 1, "at least 1: width of a row of y")
  MHA_RULE(one_of, layout, {0, 1}, "MHA_LAYOUT_IN_OUT (0) or MHA_LAYOUT_OUT_IN (1)")
  MHA_RULE(range, type, 0, 5,
           "MHA_TYPE_F32 (1), F16 (2), BF16 (3), INT8 (4) or INT4 (5), or to 0 (F32)"))

MHA_FIELDS(mha_rope,
  MHA_RULE(one_of, style, {0, 1}, "MHA_ROPE_HALF (0) or MHA_ROPE_INTERLEAVED (1)")
  MHA_RULE(range, reserved, 0, 0, "0 in mha_rope")
  MHA_RULE(range, dims, 0, INT64_MAX, "an even number, 2 to head_dim, or to 0 (head_dim - offset)")
  MHA_RULE(even, dims, "an even number, 2 to head_dim, or to 0 (head_dim - offset)")
  MHA_RULE(range, offset, 0, INT64_MAX, "at least 0")
  MHA_RULE(range, num_positions, 1, INT64_MAX, "at least 1: rows of the tables")
  MHA_RULE(range, table_stride, 0, INT64_MAX, "at least 1, or to 0 (dims / 2)"))

MHA_FIELDS(mha_norm,
  MHA_RULE(flags, flags, 0xf00,
           "MHA_NORM_LAYER (0x100), ALL_HEADS (0x200), AFTER_ROPE (0x400) or VALUES (0x800)")
  MHA_RULE(number, epsilon, 0, FLT_MAX,
           "a positive finite number, or to 0 (no norm of queries and keys)")
  MHA_RULE(range, head_stride, 0, INT64_MAX, "at least head_dim, or to 0 (all heads share one)")
  MHA_RULE(flags, context_flags, 0x1300,
           "MHA_NORM_LAYER (0x100), ALL_HEADS (0x200) or AFTER_GATE (0x1000)")
  MHA_RULE(number, context_epsilon, 0, FLT_MAX,
           "a positive finite number, or to 0 (no norm of the context)")
  MHA_RULE(range, context_head_stride, 0, INT64_MAX,
           "at least head_dim_v, or to 0 (all heads share one)"))

MHA_FIELDS(mha_score_options,
  MHA_RULE(number, softcap, 0, FLT_MAX, "a positive finite number, or to 0 (none)")
  MHA_RULE(range, reserved, 0, 0, "0 in mha_score_options")
  MHA_RULE(range, relative_left, 0, INT64_MAX, "at least 0")
  MHA_RULE(range, relative_right, 0, INT64_MAX, "at least 0"))

MHA_ARRAYS(mha_score_options,
  MHA_ARRAY(alibi_slopes, -FLT_MAX, "finite")
  MHA_ARRAY(sinks, -MHA_INFINITY, "less than infinity")
  MHA_ARRAY(head_scales, -FLT_MAX, "finite"))

MHA_FIELDS(mha_score_arrays,
  MHA_RULE(one_of, column_keys, {0, 769}, "MHA_COLUMNS_ALL_KEYS (0) or MHA_COLUMNS_NEW_KEYS (769)")
  MHA_RULE(one_of, segments, {0, 1025}, "MHA_SEGMENTS_WITHIN (0) or MHA_SEGMENTS_ALSO (1025)")
  MHA_RULE(range, num_columns, 0, INT64_MAX,
           "at least 1, or to 0 (the keys of the longest sequence (in a cache: after the call))")
  MHA_RULE(range, num_chosen, 0, INT32_MAX, "1 to 2^31 - 1, or to 0 (none): entries of a list")
  MHA_RULE(range, chosen_block, 0, INT32_MAX, "1 to 2^31 - 1, or to 0 (1): entry e"))

MHA_FIELDS(mha_rope_config,
  MHA_RULE(size, dims, 2, "an even number, at least 2: elements of a head to rotate")
  MHA_RULE(even, dims, "an even number, at least 2: elements of a head to rotate")
  MHA_RULE(range, num_positions, 1, INT64_MAX, "at least 1: rows of the tables")
  MHA_RULE(range, first_position, 0, INT64_MAX, "at least 0")
  MHA_RULE(number_or_0, base, 1, 0x1p64, "1 to 2^64, or to 0 (10000)")
  MHA_RULE(number_or_0, attention_factor, 0x1p-31, 0x1p31,
           "2^-31 to 2^31, or to 0 (1, YaRN: rope.md)")
  MHA_RULE(number_or_0, linear_factor, 1, 0x1p31, "1 to 2^31, or to 0 (1): divides positions")
  MHA_RULE(range, original_positions, 0, int64_t{1} << 31,
           "1 to 2^31, or to 0 (no YaRN, llama3, NTK)")
  MHA_RULE(number_or_0, yarn_factor, 1, 0x1p31, "1 to 2^31, or to 0 (no YaRN)")
  MHA_RULE(number_or_0, yarn_beta_fast, 0x1p-31, 0x1p31, "2^-31 to 2^31, or to 0 (32)")
  MHA_RULE(number_or_0, yarn_beta_slow, 0x1p-31, DBL_MAX, "2^-31 to yarn_beta_fast, or to 0 (1)")
  MHA_RULE(one_of, yarn_unrounded, {0, 1}, "0 or 1")
  MHA_RULE(one_of, mrope_interleaved, {0, 1}, "0 or 1")
  MHA_RULE(number_or_0, llama3_factor, 1, 0x1p31, "1 to 2^31, or to 0 (no llama3)")
  MHA_RULE(number_or_0, llama3_low_freq_factor, 0x1p-31, 0x1p31, "2^-31 to 2^31, or to 0 (1)")
  MHA_RULE(number, llama3_high_freq_factor, -DBL_MAX, 0x1p31,
           "more than llama3_low_freq_factor, or to 0 (4)")
  MHA_RULE(number_or_0, ntk_factor, 1, 0x1p31, "1 to 2^31, or to 0 (no dynamic NTK)")
  MHA_RULE(range, ntk_positions, 0, int64_t{1} << 31, "1 to 2^31, or to 0 (no dynamic NTK)"))

MHA_FIELDS(mha_recurrent_args,
  MHA_RULE(range, num_q_heads, 0, INT32_MAX, "1 to 2^31 - 1, or to 0 (num_k_heads)")
  MHA_RULE(range, num_k_heads, 0, INT32_MAX, "1 to 2^31 - 1, or to 0 (num_v_heads)")
  MHA_RULE(range, num_v_heads, 1, INT32_MAX, "1 to 2^31 - 1: heads of v, decay, beta and states")
  MHA_RULE(range, head_dim, 1, 1024, "1 to 1024: width of a query or key of one head")
  MHA_RULE(range, head_dim_v, 0, 1024, "1 to 1024, or to 0 (head_dim)")
  MHA_RULE(number, scale, -FLT_MAX, FLT_MAX, "a finite number, or to 0 (1 / sqrt(head_dim))")
  MHA_RULE(number, norm_epsilon, 0, FLT_MAX, "a positive finite number, or to 0 (none)")
  MHA_RULE(one_of, beta_function, {0, 1}, "MHA_FUNCTION_SIGMOID (1), or to 0 (as given)")
  MHA_RULE(range, num_snapshots, 0, 16, "1 to 16, or to 0 (none)"))

MHA_FIELDS(mha_causal_conv_args,
  MHA_RULE(range, channels, 1, INT32_MAX, "1 to 2^31 - 1: width of a row")
  MHA_RULE(range, kernel_size, 2, 8, "2 to 8: rows that a result depends on")
  MHA_RULE(one_of, activation, {0, 3}, "MHA_FUNCTION_SILU (3), or to 0 (none)"))

MHA_FIELDS(mha_layer_options,
  MHA_RULE(range, reserved, 0, 0, "0 in mha_layer_options"))

MHA_FIELDS(mha_kv_pool,
  MHA_RULE(range, k_block_stride, 0, INT64_MAX, "at least 1, or to 0 (contiguous): in bytes")
  MHA_RULE(range, v_block_stride, 0, INT64_MAX, "at least 1, or to 0 (contiguous): in bytes")
  MHA_RULE(range, k_scales_block_stride, 0, INT64_MAX, "at least 1, or to 0 (contiguous)")
  MHA_RULE(range, v_scales_block_stride, 0, INT64_MAX, "at least 1, or to 0 (contiguous)"))

MHA_FIELDS(mha_partials_args,
  MHA_RULE(range, num_heads, 1, INT32_MAX, "1 to 2^31 - 1")
  MHA_RULE(range, head_dim_v, 1, INT32_MAX, "1 to 2^31 - 1")
  MHA_RULE(range, reserved, 0, 0, "0 in mha_partials_args"))

MHA_ARRAYS(mha_partials_args,
  MHA_ARRAY(sinks, -MHA_INFINITY, "less than infinity")
  MHA_ARRAY(head_scales, -FLT_MAX, "finite"))

MHA_FIELDS(mha_choose_keys_args,
  MHA_RULE(range, num_chosen, 1, INT64_MAX, "at least 1: the most keys of a query"))
}  // namespace mha
