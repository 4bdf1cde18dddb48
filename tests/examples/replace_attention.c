/*
 * Replacing the attention of an existing model: a block of an encoder (BERT's) with the attention
 * that is written in an afternoon, and the same block with mha in its place. The weights stay as
 * they are: W [out, in] and a bias for each nn.Linear.
 */
#include <math.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { n = 24, width = 64, heads = 4, head_dim = width / heads, inner = 4 * width };

/* nn.Linear: y = x W^T + b. */
struct linear {
  float *weight; /* [out, in] */
  float *bias;   /* [out] */
};

struct block {
  struct linear query, key, value,
      output;             /* BERT: attention.self.query, .key, .value and attention.output.dense */
  struct linear up, down; /* intermediate.dense and output.dense */
};

/* ---- The model as it was */

static void linear(const struct linear *layer, const float *x, int in, int out, float *y) {
  for (int row = 0; row < n; row++) {
    for (int o = 0; o < out; o++) {
      float sum = layer->bias[o];
      for (int i = 0; i < in; i++) sum += x[row * in + i] * layer->weight[o * in + i];
      y[row * out + o] = sum;
    }
  }
}

static void naive_attention(const struct block *block, const float *x, float *y) {
  static float q[n * width], k[n * width], v[n * width], context[n * width], scores[n];
  linear(&block->query, x, width, width, q);
  linear(&block->key, x, width, width, k);
  linear(&block->value, x, width, width, v);
  for (int head = 0; head < heads; head++) {
    for (int row = 0; row < n; row++) {
      float sum = 0, *to = context + row * width + head * head_dim;
      for (int key = 0; key < n; key++) {
        float score = 0;
        for (int i = 0; i < head_dim; i++)
          score += q[row * width + head * head_dim + i] * k[key * width + head * head_dim + i];
        sum += scores[key] = expf(score / sqrtf(head_dim));
      }
      memset(to, 0, head_dim * sizeof *to);
      for (int key = 0; key < n; key++)
        for (int i = 0; i < head_dim; i++)
          to[i] += scores[key] / sum * v[key * width + head * head_dim + i];
    }
  }
  linear(&block->output, context, width, width, y);
}

static void layer_norm(float *x) {
  for (int row = 0; row < n; row++, x += width) {
    float mean = 0, variance = 0;
    for (int i = 0; i < width; i++) mean += x[i] / width;
    for (int i = 0; i < width; i++) variance += (x[i] - mean) * (x[i] - mean) / width;
    for (int i = 0; i < width; i++) x[i] = (x[i] - mean) / sqrtf(variance + 1e-12f);
  }
}

/* All of the block but the attention, whose output is y: y = norm(x + y), then y = norm(y +
 * down(gelu(up(y)))). */
static void rest_of_block(const struct block *block, const float *x, float *y) {
  static float wide[n * inner], narrow[n * width];
  for (int i = 0; i < n * width; i++) y[i] += x[i];
  layer_norm(y);
  linear(&block->up, y, width, inner, wide);
  for (int i = 0; i < n * inner; i++) wide[i] *= 0.5f * (1 + erff(wide[i] * 0.70710678f));
  linear(&block->down, wide, inner, width, narrow);
  for (int i = 0; i < n * width; i++) y[i] += narrow[i];
  layer_norm(y);
}

/* ---- The same by mha */

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

/* Once, where the model is loaded. The layer keeps what it needs of the weights, which may be
 * freed. */
static mha_layer *make_attention(const struct block *block) {
  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {
      .struct_size = sizeof weights,
      .layout = MHA_LAYOUT_OUT_IN, /* nn.Linear's; GPT-2's Conv1D is MHA_LAYOUT_IN_OUT */
      .w_q = {.data = block->query.weight, .bias = block->query.bias},
      .w_k = {.data = block->key.weight, .bias = block->key.bias},
      .w_v = {.data = block->value.weight, .bias = block->value.bias},
      .w_o = {.data = block->output.weight, .bias = block->output.bias},
  };
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &layer, &error), &error);
  return layer;
}

static void mha_attention_of_block(const mha_layer *layer, const float *x, float *y) {
  mha_forward_args args = {
      .struct_size = sizeof args, .call.n_q = n, .query.data = x, .output.data = y};
  mha_error error;
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes); /* a model keeps one for all of its layers */
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);
  free(workspace);
}

/* ---- Both */

static float *random_floats(int count, float size) {
  float *values = malloc(count * sizeof *values);
  for (int i = 0; i < count; i++) values[i] = size * ((float)rand() / (float)RAND_MAX - 0.5f);
  return values;
}

static struct linear random_linear(int in, int out) {
  struct linear layer = {random_floats(in * out, 4 / sqrtf((float)in)), random_floats(out, 1)};
  return layer;
}

int main(void) {
  struct block block = {.query = random_linear(width, width),
                        .key = random_linear(width, width),
                        .value = random_linear(width, width),
                        .output = random_linear(width, width),
                        .up = random_linear(width, inner),
                        .down = random_linear(inner, width)};
  float *x = random_floats(n * width, 2), before[n * width], after[n * width], largest = 0;

  naive_attention(&block, x, before);
  rest_of_block(&block, x, before);

  mha_layer *layer = make_attention(&block);
  mha_attention_of_block(layer, x, after);
  rest_of_block(&block, x, after);
  mha_layer_destroy(layer);

  for (int i = 0; i < n * width; i++) largest = fmaxf(largest, fabsf(after[i] - before[i]));
  printf("the block's output, %d x %d: the largest difference of an element is %.1e\n", n, width,
         largest);
  struct linear *all[] = {&block.query,  &block.key, &block.value,
                          &block.output, &block.up,  &block.down};
  for (int i = 0; i < 6; i++) {
    free(all[i]->weight);
    free(all[i]->bias);
  }
  free(x);
  return largest < 1e-5f ? 0 : 1;
}
