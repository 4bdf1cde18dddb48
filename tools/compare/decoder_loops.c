/*
 * The decoder of tests/examples/decoder.h in plain loops: one token at a time, prompts too, and a product for each matrix whose rows are
 * shared out by OpenMP. What a compiler makes of that is what tools/compare_decoder.py measures beside the library.
 *
 *     decoder_loops FILE HEADS PROMPT COUNT
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../tests/examples/safetensors.h"

static struct safetensors file;
static int layers, width, heads, kv_heads, head_dim, hidden, vocabulary, positions;

static const float *get(const char *name, int layer, int *rows) {
  char whole[128];
  snprintf(whole, sizeof whole, name, layer);
  const struct tensor *const t = safetensors_find(&file, whole);
  if (!t || strcmp(t->dtype, "F32") != 0) fprintf(stderr, "%s: has no tensor %s of F32\n", file.path, whole), exit(1);
  if (rows) *rows = (int)t->shape[0];
  return t->data;
}

static float *zeros(size_t count) { return calloc(count, sizeof(float)); }

static void product(float *y, const float *w, const float *x, int outputs, int inputs) {
#pragma omp parallel for
  for (int o = 0; o < outputs; o++) {
    const float *const row = w + (size_t)o * (size_t)inputs;
    float sum = 0;
    for (int i = 0; i < inputs; i++) sum += row[i] * x[i];
    y[o] = sum;
  }
}

static void norm(float *y, const float *x, const float *weights) {
  float squares = 0;
  for (int i = 0; i < width; i++) squares += x[i] * x[i];
  const float factor = 1 / sqrtf(squares / (float)width + 1e-5f);
  for (int i = 0; i < width; i++) y[i] = x[i] * factor * weights[i];
}

static void rotate(float *row, int count, const float *cosines, const float *sines) {
  for (int h = 0; h < count; h++) {
    float *const a = row + h * head_dim, *const b = a + head_dim / 2;
    for (int i = 0; i < head_dim / 2; i++) {
      const float x = a[i], y = b[i];
      a[i] = x * cosines[i] - y * sines[i], b[i] = y * cosines[i] + x * sines[i];
    }
  }
}

struct layer {
  const float *attention_norm, *q, *k, *v, *o, *mlp_norm, *gate, *up, *down;
  float *keys, *values; /* [positions, kv_heads, head_dim] */
};

int main(int count_of_words, char **words) {
  if (count_of_words != 5) fprintf(stderr, "decoder_loops FILE HEADS PROMPT COUNT\n"), exit(2);
  if (!safetensors_open(&file, words[1])) fprintf(stderr, "%s\n", file.error), exit(1);
  static int tokens[1 << 20];
  int prompt = 0, q_width, kv_width;
  FILE *const prompt_file = fopen(words[3], "r");
  while (prompt_file && fscanf(prompt_file, "%d", &tokens[prompt]) == 1) prompt++;
  heads = atoi(words[2]), positions = prompt + atoi(words[4]);
  const float *const embedding = get("model.embed_tokens.weight", 0, &vocabulary), *const head = get("lm_head.weight", 0, NULL);
  const float *const final_norm = get("model.norm.weight", 0, &width);
  get("model.layers.0.self_attn.q_proj.weight", 0, &q_width), get("model.layers.0.self_attn.k_proj.weight", 0, &kv_width);
  get("model.layers.0.mlp.gate_proj.weight", 0, &hidden);
  head_dim = q_width / heads, kv_heads = kv_width / head_dim, layers = ((int)file.count - 3) / 9;
  struct layer *const layer = calloc((size_t)layers, sizeof *layer);
  for (int l = 0; l < layers; l++) {
    layer[l] = (struct layer){
        get("model.layers.%d.input_layernorm.weight", l, NULL), get("model.layers.%d.self_attn.q_proj.weight", l, NULL),
        get("model.layers.%d.self_attn.k_proj.weight", l, NULL), get("model.layers.%d.self_attn.v_proj.weight", l, NULL),
        get("model.layers.%d.self_attn.o_proj.weight", l, NULL), get("model.layers.%d.post_attention_layernorm.weight", l, NULL),
        get("model.layers.%d.mlp.gate_proj.weight", l, NULL), get("model.layers.%d.mlp.up_proj.weight", l, NULL),
        get("model.layers.%d.mlp.down_proj.weight", l, NULL), zeros((size_t)positions * (size_t)kv_width),
        zeros((size_t)positions * (size_t)kv_width)};
  }
  float *const cosines = zeros((size_t)positions * (size_t)head_dim), *const sines = zeros((size_t)positions * (size_t)head_dim);
  for (int p = 0; p < positions; p++) {
    for (int i = 0; i < head_dim / 2; i++) {
      const double angle = p * pow(10000, -2.0 * i / head_dim);
      cosines[p * head_dim + i] = (float)cos(angle), sines[p * head_dim + i] = (float)sin(angle);
    }
  }
  float *const x = zeros((size_t)width), *const normed = zeros((size_t)width), *const q = zeros((size_t)q_width);
  float *const context = zeros((size_t)q_width), *const added = zeros((size_t)width), *const gate = zeros((size_t)hidden);
  float *const up = zeros((size_t)hidden), *const logits = zeros((size_t)vocabulary);
  float *const scores = zeros((size_t)heads * (size_t)positions);
  volatile char touched; /* all weights are in memory before the clock starts, as the others have them */
  for (size_t i = 0; i < file.bytes; i += 4096) touched = ((const char *)file.memory)[i];
  (void)touched;

  struct timespec start, now;
  double prompt_seconds = 0;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int p = 0; p < positions - 1; p++) {
    memcpy(x, embedding + (size_t)tokens[p] * (size_t)width, (size_t)width * sizeof *x);
    for (int l = 0; l < layers; l++) {
      const struct layer *const w = &layer[l];
      float *const keys = w->keys + (size_t)p * (size_t)kv_width, *const values = w->values + (size_t)p * (size_t)kv_width;
      norm(normed, x, w->attention_norm);
      product(q, w->q, normed, q_width, width);
      product(keys, w->k, normed, kv_width, width);
      product(values, w->v, normed, kv_width, width);
      rotate(q, heads, cosines + p * head_dim, sines + p * head_dim);
      rotate(keys, kv_heads, cosines + p * head_dim, sines + p * head_dim);
#pragma omp parallel for
      for (int h = 0; h < heads; h++) {
        const int kv = h / (heads / kv_heads) * head_dim;
        float *const row = scores + (size_t)h * (size_t)positions, *const to = context + h * head_dim;
        float largest = -3e38f, sum = 0; /* -ffast-math knows no infinity */
        for (int k = 0; k <= p; k++) {
          const float *const key = w->keys + (size_t)k * (size_t)kv_width + kv;
          float score = 0;
          for (int i = 0; i < head_dim; i++) score += q[h * head_dim + i] * key[i];
          row[k] = score / sqrtf((float)head_dim);
          largest = row[k] > largest ? row[k] : largest;
        }
        for (int k = 0; k <= p; k++) sum += row[k] = expf(row[k] - largest);
        memset(to, 0, (size_t)head_dim * sizeof *to);
        for (int k = 0; k <= p; k++) {
          const float *const value = w->values + (size_t)k * (size_t)kv_width + kv;
          for (int i = 0; i < head_dim; i++) to[i] += row[k] / sum * value[i];
        }
      }
      product(added, w->o, context, width, q_width);
      for (int i = 0; i < width; i++) x[i] += added[i];
      norm(normed, x, w->mlp_norm);
      product(gate, w->gate, normed, hidden, width);
      product(up, w->up, normed, hidden, width);
      for (int i = 0; i < hidden; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
      product(added, w->down, gate, width, hidden);
      for (int i = 0; i < width; i++) x[i] += added[i];
    }
    if (p < prompt - 1) continue; /* logits are not needed before the prompt's last token */
    norm(normed, x, final_norm);
    product(logits, head, normed, vocabulary, width);
    int best = 0;
    for (int i = 1; i < vocabulary; i++) best = logits[i] > logits[best] ? i : best;
    tokens[p + 1] = best;
    printf("%d%c", best, p < positions - 2 ? ' ' : '\n');
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (p == prompt - 1) prompt_seconds = (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec), start = now;
  }
  const double rest = (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec);
  fprintf(stderr, "prompt %.6f s, token %.6f s\n", prompt_seconds, positions > prompt + 1 ? rest / (positions - prompt - 1) : 0);
  return 0;
}
