/*
 * The public header as a C99 program and as a C++ program (cxx_test.cpp includes this file): it compiles without a warning,
 * every public struct has the layout that programs were compiled against, and a tiny layer computes what it must.
 */
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Layout: sizes and offsets never change, structs only grow at their end (then the sizes here grow with them) --------------- */

#if defined(__LP64__) || defined(_WIN64)

/* An array of negative size stops the compiler; C99 has no assertion of its own for this. */
#define JOIN_AGAIN(a, b) a##b
#define JOIN(a, b) JOIN_AGAIN(a, b)
#define ASSERT_NOW(condition) typedef char JOIN(assertion_of_line_, __LINE__)[(condition) ? 1 : -1]
#define SIZE(type, bytes) ASSERT_NOW(sizeof(type) == (bytes))
#define FIELD(type, field, offset) ASSERT_NOW(offsetof(type, field) == (offset))

SIZE(mha_status, 4);

SIZE(mha_error, 256);
FIELD(mha_error, status, 0);
FIELD(mha_error, argument, 4);
FIELD(mha_error, message, 8);

SIZE(mha_scheduler, 24);
FIELD(mha_scheduler, context, 0);
FIELD(mha_scheduler, num_threads, 8);
FIELD(mha_scheduler, reserved, 12);
FIELD(mha_scheduler, parallel_for, 16);

SIZE(mha_layer_config, 96);
FIELD(mha_layer_config, struct_size, 0);
FIELD(mha_layer_config, query_dim, 8);
FIELD(mha_layer_config, num_heads, 16);
FIELD(mha_layer_config, num_kv_heads, 24);
FIELD(mha_layer_config, head_dim, 32);
FIELD(mha_layer_config, head_dim_v, 40);
FIELD(mha_layer_config, key_dim, 48);
FIELD(mha_layer_config, value_dim, 56);
FIELD(mha_layer_config, output_dim, 64);
FIELD(mha_layer_config, scale, 72);
FIELD(mha_layer_config, weight_type, 76);
FIELD(mha_layer_config, gate, 80);
FIELD(mha_layer_config, arithmetic, 84);
FIELD(mha_layer_config, gate_dim, 88);

SIZE(mha_layer_weights, 208);
FIELD(mha_layer_weights, struct_size, 0);
FIELD(mha_layer_weights, layout, 8);
FIELD(mha_layer_weights, type, 12);
FIELD(mha_layer_weights, w_q, 16);
FIELD(mha_layer_weights, w_k, 24);
FIELD(mha_layer_weights, w_v, 32);
FIELD(mha_layer_weights, w_qkv, 40);
FIELD(mha_layer_weights, w_o, 48);
FIELD(mha_layer_weights, w_g, 56);
FIELD(mha_layer_weights, b_q, 64);
FIELD(mha_layer_weights, b_k, 72);
FIELD(mha_layer_weights, b_v, 80);
FIELD(mha_layer_weights, b_qkv, 88);
FIELD(mha_layer_weights, b_o, 96);
FIELD(mha_layer_weights, b_g, 104);
FIELD(mha_layer_weights, w_q_stride, 112);
FIELD(mha_layer_weights, w_k_stride, 120);
FIELD(mha_layer_weights, w_v_stride, 128);
FIELD(mha_layer_weights, w_qkv_stride, 136);
FIELD(mha_layer_weights, w_o_stride, 144);
FIELD(mha_layer_weights, w_g_stride, 152);
FIELD(mha_layer_weights, w_q_scales, 160);
FIELD(mha_layer_weights, w_k_scales, 168);
FIELD(mha_layer_weights, w_v_scales, 176);
FIELD(mha_layer_weights, w_qkv_scales, 184);
FIELD(mha_layer_weights, w_o_scales, 192);
FIELD(mha_layer_weights, w_g_scales, 200);

SIZE(mha_allocator, 24);
FIELD(mha_allocator, context, 0);
FIELD(mha_allocator, allocate, 8);
FIELD(mha_allocator, release, 16);

SIZE(mha_layer_options, 32);
FIELD(mha_layer_options, struct_size, 0);
FIELD(mha_layer_options, instruction_set, 8);
FIELD(mha_layer_options, reserved, 12);
FIELD(mha_layer_options, sgemm, 16);
FIELD(mha_layer_options, allocator, 24);

SIZE(mha_kv_cache_config, 80);
FIELD(mha_kv_cache_config, struct_size, 0);
FIELD(mha_kv_cache_config, num_sequences, 8);
FIELD(mha_kv_cache_config, capacity, 16);
FIELD(mha_kv_cache_config, num_kv_heads, 24);
FIELD(mha_kv_cache_config, head_dim, 32);
FIELD(mha_kv_cache_config, head_dim_v, 40);
FIELD(mha_kv_cache_config, k_type, 48);
FIELD(mha_kv_cache_config, v_type, 52);
FIELD(mha_kv_cache_config, kind, 56);
FIELD(mha_kv_cache_config, reserved, 60);
FIELD(mha_kv_cache_config, block_positions, 64);
FIELD(mha_kv_cache_config, num_blocks, 72);

SIZE(mha_rope, 72);
FIELD(mha_rope, struct_size, 0);
FIELD(mha_rope, style, 8);
FIELD(mha_rope, reserved, 12);
FIELD(mha_rope, dims, 16);
FIELD(mha_rope, num_positions, 24);
FIELD(mha_rope, cos, 32);
FIELD(mha_rope, sin, 40);
FIELD(mha_rope, table_stride, 48);
FIELD(mha_rope, q_positions, 56);
FIELD(mha_rope, k_positions, 64);

SIZE(mha_rope_config, 144);
FIELD(mha_rope_config, struct_size, 0);
FIELD(mha_rope_config, dims, 8);
FIELD(mha_rope_config, num_positions, 16);
FIELD(mha_rope_config, first_position, 24);
FIELD(mha_rope_config, base, 32);
FIELD(mha_rope_config, linear_factor, 40);
FIELD(mha_rope_config, yarn_factor, 48);
FIELD(mha_rope_config, yarn_beta_fast, 56);
FIELD(mha_rope_config, yarn_beta_slow, 64);
FIELD(mha_rope_config, llama3_factor, 72);
FIELD(mha_rope_config, llama3_low_freq_factor, 80);
FIELD(mha_rope_config, llama3_high_freq_factor, 88);
FIELD(mha_rope_config, ntk_factor, 96);
FIELD(mha_rope_config, ntk_positions, 104);
FIELD(mha_rope_config, pair_factors, 112);
FIELD(mha_rope_config, original_positions, 120);
FIELD(mha_rope_config, attention_factor, 128);
FIELD(mha_rope_config, yarn_unrounded, 136);
FIELD(mha_rope_config, reserved, 140);

SIZE(mha_norm, 56);
FIELD(mha_norm, struct_size, 0);
FIELD(mha_norm, flags, 8);
FIELD(mha_norm, epsilon, 12);
FIELD(mha_norm, q_weight, 16);
FIELD(mha_norm, k_weight, 24);
FIELD(mha_norm, q_bias, 32);
FIELD(mha_norm, k_bias, 40);
FIELD(mha_norm, head_stride, 48);

SIZE(mha_score_options, 192);
FIELD(mha_score_options, struct_size, 0);
FIELD(mha_score_options, softcap, 8);
FIELD(mha_score_options, bias_type, 12);
FIELD(mha_score_options, alibi_slopes, 16);
FIELD(mha_score_options, sinks, 24);
FIELD(mha_score_options, bias, 32);
FIELD(mha_score_options, bias_batch_stride, 40);
FIELD(mha_score_options, bias_head_stride, 48);
FIELD(mha_score_options, bias_row_stride, 56);
FIELD(mha_score_options, mask, 64);
FIELD(mha_score_options, mask_batch_stride, 72);
FIELD(mha_score_options, mask_head_stride, 80);
FIELD(mha_score_options, mask_row_stride, 88);
FIELD(mha_score_options, columns, 96);
FIELD(mha_score_options, groups, 100);
FIELD(mha_score_options, num_columns, 104);
FIELD(mha_score_options, q_groups, 112);
FIELD(mha_score_options, kv_groups, 120);
FIELD(mha_score_options, q_groups_stride, 128);
FIELD(mha_score_options, kv_groups_stride, 136);
FIELD(mha_score_options, q_scales, 144);
FIELD(mha_score_options, q_scales_stride, 152);
FIELD(mha_score_options, relative_bias, 160);
FIELD(mha_score_options, relative_left, 168);
FIELD(mha_score_options, relative_right, 176);
FIELD(mha_score_options, head_scales, 184);

SIZE(mha_taps, 72);
FIELD(mha_taps, struct_size, 0);
FIELD(mha_taps, q, 8);
FIELD(mha_taps, k, 16);
FIELD(mha_taps, v, 24);
FIELD(mha_taps, scores, 32);
FIELD(mha_taps, scaled_scores, 40);
FIELD(mha_taps, softcapped_scores, 48);
FIELD(mha_taps, masked_scores, 56);
FIELD(mha_taps, context, 64);

SIZE(mha_forward_args, 280);
FIELD(mha_forward_args, struct_size, 0);
FIELD(mha_forward_args, batch, 8);
FIELD(mha_forward_args, n_q, 16);
FIELD(mha_forward_args, n_kv, 24);
FIELD(mha_forward_args, query, 32);
FIELD(mha_forward_args, key, 40);
FIELD(mha_forward_args, value, 48);
FIELD(mha_forward_args, output, 56);
FIELD(mha_forward_args, input_type, 64);
FIELD(mha_forward_args, output_type, 68);
FIELD(mha_forward_args, query_batch_stride, 72);
FIELD(mha_forward_args, query_row_stride, 80);
FIELD(mha_forward_args, key_batch_stride, 88);
FIELD(mha_forward_args, key_row_stride, 96);
FIELD(mha_forward_args, value_batch_stride, 104);
FIELD(mha_forward_args, value_row_stride, 112);
FIELD(mha_forward_args, output_batch_stride, 120);
FIELD(mha_forward_args, output_row_stride, 128);
FIELD(mha_forward_args, flags, 136);
FIELD(mha_forward_args, reserved, 140);
FIELD(mha_forward_args, window_left, 144);
FIELD(mha_forward_args, window_right, 152);
FIELD(mha_forward_args, score, 160);
FIELD(mha_forward_args, q_start, 168);
FIELD(mha_forward_args, q_lengths, 176);
FIELD(mha_forward_args, kv_lengths, 184);
FIELD(mha_forward_args, kv_start, 192);
FIELD(mha_forward_args, cu_seqlens_q, 200);
FIELD(mha_forward_args, cu_seqlens_kv, 208);
FIELD(mha_forward_args, norm, 216);
FIELD(mha_forward_args, rope, 224);
FIELD(mha_forward_args, cache, 232);
FIELD(mha_forward_args, cache_sequences, 240);
FIELD(mha_forward_args, lse, 248);
FIELD(mha_forward_args, attention_weights, 256);
FIELD(mha_forward_args, taps, 264);
FIELD(mha_forward_args, scheduler, 272);


SIZE(mha_attention_args, 360);
FIELD(mha_attention_args, struct_size, 0);
FIELD(mha_attention_args, batch, 8);
FIELD(mha_attention_args, n_q, 16);
FIELD(mha_attention_args, n_kv, 24);
FIELD(mha_attention_args, num_heads, 32);
FIELD(mha_attention_args, num_kv_heads, 40);
FIELD(mha_attention_args, head_dim, 48);
FIELD(mha_attention_args, head_dim_v, 56);
FIELD(mha_attention_args, q, 64);
FIELD(mha_attention_args, k, 72);
FIELD(mha_attention_args, v, 80);
FIELD(mha_attention_args, output, 88);
FIELD(mha_attention_args, q_type, 96);
FIELD(mha_attention_args, k_type, 100);
FIELD(mha_attention_args, v_type, 104);
FIELD(mha_attention_args, output_type, 108);
FIELD(mha_attention_args, q_batch_stride, 112);
FIELD(mha_attention_args, q_row_stride, 120);
FIELD(mha_attention_args, q_head_stride, 128);
FIELD(mha_attention_args, k_batch_stride, 136);
FIELD(mha_attention_args, k_row_stride, 144);
FIELD(mha_attention_args, k_head_stride, 152);
FIELD(mha_attention_args, v_batch_stride, 160);
FIELD(mha_attention_args, v_row_stride, 168);
FIELD(mha_attention_args, v_head_stride, 176);
FIELD(mha_attention_args, output_batch_stride, 184);
FIELD(mha_attention_args, output_row_stride, 192);
FIELD(mha_attention_args, output_head_stride, 200);
FIELD(mha_attention_args, flags, 208);
FIELD(mha_attention_args, scale, 212);
FIELD(mha_attention_args, window_left, 216);
FIELD(mha_attention_args, window_right, 224);
FIELD(mha_attention_args, score, 232);
FIELD(mha_attention_args, q_start, 240);
FIELD(mha_attention_args, q_lengths, 248);
FIELD(mha_attention_args, kv_lengths, 256);
FIELD(mha_attention_args, kv_start, 264);
FIELD(mha_attention_args, cu_seqlens_q, 272);
FIELD(mha_attention_args, cu_seqlens_kv, 280);
FIELD(mha_attention_args, norm, 288);
FIELD(mha_attention_args, rope, 296);
FIELD(mha_attention_args, cache, 304);
FIELD(mha_attention_args, cache_sequences, 312);
FIELD(mha_attention_args, lse, 320);
FIELD(mha_attention_args, attention_weights, 328);
FIELD(mha_attention_args, taps, 336);
FIELD(mha_attention_args, scheduler, 344);
FIELD(mha_attention_args, instruction_set, 352);
FIELD(mha_attention_args, reserved, 356);

SIZE(mha_call_info, 56);
FIELD(mha_call_info, struct_size, 0);
FIELD(mha_call_info, instruction_set, 8);
FIELD(mha_call_info, back_end, 12);
FIELD(mha_call_info, contract, 16);
FIELD(mha_call_info, num_threads, 20);
FIELD(mha_call_info, workspace_bytes, 24);
FIELD(mha_call_info, packed_bytes, 32);
FIELD(mha_call_info, operations, 40);
FIELD(mha_call_info, bytes, 48);

SIZE(mha_linear_args, 80);
FIELD(mha_linear_args, struct_size, 0);
FIELD(mha_linear_args, rows, 8);
FIELD(mha_linear_args, x, 16);
FIELD(mha_linear_args, residual, 24);
FIELD(mha_linear_args, output, 32);
FIELD(mha_linear_args, input_type, 40);
FIELD(mha_linear_args, output_type, 44);
FIELD(mha_linear_args, x_row_stride, 48);
FIELD(mha_linear_args, residual_row_stride, 56);
FIELD(mha_linear_args, output_row_stride, 64);
FIELD(mha_linear_args, scheduler, 72);

#endif

/* ---- A tiny layer: its weights are identities, so that everything can be worked out by hand -------------------------------------- */

static const float identity[2 * 2] = {1, 0, 0, 1};

static int failures = 0;

static void expect(int condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "not so: %s\n", what);
  failures++;
}

static int near(float a, float b) {
  const float difference = a > b ? a - b : b - a;
  return difference <= 1e-6f;
}

int main(void) {
  /* Two rows; the causal first row sees itself only, the second one both, with scores 0 and 1 (times a scale of 1). */
  const float x[2 * 2] = {1, 0, 0, 1};
  const float e = 2.718281828f;
  float y[2 * 2] = {-1, -1, -1, -1};
  float lse[2] = {-1, -1};
  mha_layer_config config;
  mha_layer_weights weights;
  mha_forward_args args;
  mha_layer *layer = NULL;
  mha_error error;
  size_t bytes = 0;
  void *workspace;

  memset(&config, 0, sizeof config);
  config.struct_size = sizeof config;
  config.query_dim = 2;
  config.num_heads = 1;
  config.scale = 1;
  memset(&weights, 0, sizeof weights);
  weights.struct_size = sizeof weights;
  weights.w_q = identity;
  weights.w_k = identity;
  weights.w_v = identity;
  weights.w_o = identity;
  if (mha_layer_create(&config, &weights, NULL, &layer, &error) != MHA_OK) {
    fprintf(stderr, "%s: %s\n", mha_status_string(error.status), error.message);
    return 1;
  }
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.batch = 1;
  args.n_q = 2;
  args.query = x;
  args.output = y;
  args.flags = MHA_CAUSAL;
  args.lse = lse;
  expect(mha_forward_workspace(layer, &args, &bytes, &error) == MHA_OK, error.message);
  workspace = malloc(bytes + 1);
  if (workspace == NULL) return 1;
  expect(mha_forward(layer, &args, workspace, bytes, &error) == MHA_OK, error.message);
  expect(y[0] == 1 && y[1] == 0, "the first row is its own value");
  expect(near(y[2], 1 / (1 + e)) && near(y[3], e / (1 + e)), "the second row is the softmax of 0 and 1");
  expect(near(lse[0], 1), "the first sum is exp(1)");
  expect(near(lse[1], 1.31326169f), "the second sum is 1 + exp(1)");

  args.n_q = -1;
  expect(mha_forward(layer, &args, workspace, bytes, &error) == MHA_ERROR_INVALID_VALUE, "a negative length is an error");
  expect(error.argument == 2 && error.message[0] != 0, "the error says where");
  free(workspace);
  mha_layer_destroy(layer);

  expect(mha_version() >= 10000 * MHA_VERSION_MAJOR + 100 * MHA_VERSION_MINOR + MHA_VERSION_PATCH, "the library is older than its header");
  expect(strcmp(mha_status_string(MHA_ERROR_SHAPE), "MHA_ERROR_SHAPE") == 0, "a status has the name of its macro");
  return failures == 0 ? 0 : 1;
}
