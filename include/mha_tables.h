/*
 * mha: tables that a program makes once, for the arrays of mha_rope and mha_score_options. mha.h
 * includes this header; its rules hold here too.
 *
 *     mha_rope_tables          sines and cosines of RoPE
 *     mha_alibi_slopes         slopes of ALiBi
 *     mha_t5_relative_bias     relative biases of T5
 */
#ifndef MHA_TABLES_H
#define MHA_TABLES_H

#ifndef MHA_H
#error "include mha.h, which includes mha_tables.h"
#endif

/*
 * The angles that mha_rope_tables computes. dims and num_positions alone give the original RoPE.
 * The others are the methods of Hugging Face's rope_scaling: linear (arXiv:2306.15595) with at most
 * one of YaRN (arXiv:2309.00071), llama3, LongRoPE (arXiv:2402.13753) and dynamic NTK; and M-RoPE.
 * src/docs/rope.md gives their formulas.
 */
typedef struct mha_rope_config {
  size_t struct_size;
  int64_t dims;               /* elements of a head to rotate; even, >= 2; with NTK at least 4 */
  int64_t num_positions;      /* rows of the tables; >= 1 */
  int64_t first_position;     /* of row 0, to fill tables in parts; >= 0; all are less than 2^31 */
  double base;                /* of the angles; 1 .. 2^64, YaRN: more than 1; 0 = 10000 */
  double attention_factor;    /* multiplies the tables; 2^-31 .. 2^31; 0 = 1, YaRN: rope.md */
  double linear_factor;       /* divides positions; 1 .. 2^31; 0 = 1 */
  int64_t original_positions; /* context in training; 1 .. 2^31; 0 = no YaRN, llama3, NTK */

  double yarn_factor;         /* how far slow pairs are stretched; 1 .. 2^31; 0 = no YaRN */
  double yarn_beta_fast;      /* turns of pairs that keep their angle; 2^-31 .. 2^31; 0 = 32 */
  double yarn_beta_slow;      /* turns of pairs stretched in full; 2^-31 .. yarn_beta_fast; 0 = 1 */
  uint32_t yarn_unrounded;    /* bounds are not rounded ("truncate": false, gpt-oss): 0 or 1 */
  uint32_t mrope_interleaved; /* sections of M-RoPE are interleaved (Qwen3-VL): 0 or 1 */

  double llama3_factor;           /* how far slow pairs are stretched; 1 .. 2^31; 0 = no llama3 */
  double llama3_low_freq_factor;  /* turns of slow pairs; 2^-31 .. 2^31; 0 = 1 */
  double llama3_high_freq_factor; /* of fast pairs; > llama3_low_freq_factor, <= 2^31; 0 = 4 */

  double ntk_factor;     /* how far the base is raised; 1 .. 2^31; 0 = no dynamic NTK */
  int64_t ntk_positions; /* current context length; 1 .. 2^31; 0 = no dynamic NTK */

  const double *pair_factors;     /* LongRoPE: [dims / 2], 1/2 .. 2^31; NULL = none */
  const int64_t *mrope_section;   /* M-RoPE: [3], pairs per section, dims / 2 in all; NULL = none */
  const int64_t *mrope_positions; /* M-RoPE: [3, num_positions], 0 .. 2^31 - 1; NULL = none */
} mha_rope_config;

/*
 * Fills cos and sin, both [num_positions, dims / 2]. Row r is position first_position + r or, with
 * M-RoPE, the positions in column r of mrope_positions. Several threads may fill parts of the rows.
 *
 * The values have the same bits on every machine: the formulas' results rounded to float, for
 * angles off by at most position * 2^-51 (more if a ramp is steep). Up to position 2^20 this adds
 * less than 0.01 ulp to numbers of 1/2 and more.
 */
MHA_API mha_status mha_rope_tables(const mha_rope_config *config, float *cos, float *sin,
                                   mha_error *error);

/*
 * Fills slopes [num_heads] with the slopes of ALiBi. Let n be the greatest power of two up to
 * num_heads, which is 1 .. 2^31 - 1: the slopes are 2^(-8 k / n) for k = 1 .. n, followed by
 * 2^(-4 k / n) for k = 1, 3, 5, ...
 */
MHA_API mha_status mha_alibi_slopes(int64_t num_heads, float *slopes, mha_error *error);

/*
 * Fills relative_bias [num_heads, left + 1 + right] from T5's embedding [num_buckets, num_heads]:
 * each distance gets the bucket that Hugging Face's T5Attention gives it. num_buckets is 4 .. 2^30
 * (decoders, is_bidirectional 0: from 2 on); 0 = 32. Distances of max_distance or more share the
 * last bucket; max_distance is more than num_buckets / 4 (decoders: / 2), up to 2^30; 0 = 128.
 */
MHA_API mha_status mha_t5_relative_bias(const float *embedding, int64_t num_buckets,
                                        int64_t max_distance, uint32_t is_bidirectional,
                                        int64_t num_heads, int64_t left, int64_t right,
                                        float *relative_bias, mha_error *error);

#endif /* MHA_TABLES_H */
