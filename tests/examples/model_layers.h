/*
 * What the examples of models' layers have in common: a stack of attention layers, each of which
 * adds its output to its input. What stands between them in a model is left out. A prompt goes
 * through at once, then token by token over caches; all rows at once, without a cache, have to come
 * out with the same bits.
 */
#define _POSIX_C_SOURCE 200112L
#include <math.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct model_layer {
  mha_layer *layer;
  mha_forward_args args; /* flags, windows, rope, norm and score; the rest is set for each call */
};

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

/* Numbers from -size to size, in place of a file's. */
static float *numbers(int64_t count, float size) {
  float *values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; i < count; i++) values[i] = size * ((float)rand() / (float)RAND_MAX * 2 - 1);
  return values;
}

static mha_rope make_rope(mha_rope_config angles) {
  const size_t bytes = (size_t)(angles.num_positions * (angles.dims / 2)) * sizeof(float);
  float *cosines = malloc(bytes), *sines = malloc(bytes);
  mha_error error;
  check(mha_rope_tables(&angles, cosines, sines, &error), &error);
  return (mha_rope){.struct_size = sizeof(mha_rope),
                    .num_positions = angles.num_positions,
                    .cos = cosines,
                    .sin = sines};
}

/* Matrices as those of nn.Linear: self_attn.q_proj.weight, k_proj, v_proj and o_proj in files of
 * Hugging Face, and their biases. */
static mha_layer *make_layer(const mha_layer_config *config, int has_biases) {
  const int64_t width = config->query_dim, q = config->num_heads * config->head_dim,
                kv = config->num_kv_heads * config->head_dim;
  float *const w[] = {numbers(q * width, 0.2f), numbers(kv * width, 0.2f),
                      numbers(kv * width, 0.2f), numbers(width * q, 0.1f)};
  float *const b[] = {numbers(q, 0.5f), numbers(kv, 0.5f), numbers(kv, 0.5f), numbers(width, 0.1f)};
  mha_layer_weights weights = {.struct_size = sizeof weights, .layout = MHA_LAYOUT_OUT_IN};
  weights.w_q.data = w[0];
  weights.w_k.data = w[1];
  weights.w_v.data = w[2];
  weights.w_o.data = w[3];
  if (has_biases) {
    weights.w_q.bias = b[0];
    weights.w_k.bias = b[1];
    weights.w_v.bias = b[2];
    weights.w_o.bias = b[3];
  }
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(config, &weights, NULL, &layer, &error), &error);
  for (int i = 0; i < 4; i++) { /* the layer has what it needs */
    free(w[i]);
    free(b[i]);
  }
  return layer;
}

/* A ring where there is a window: it holds no more positions than that needs. */
static mha_kv_cache *make_cache(const struct model_layer *of, int64_t tokens) {
  mha_layer_config shape = {.struct_size = sizeof shape};
  mha_error error;
  check(mha_layer_shape(of->layer, &shape, &error), &error);
  mha_kv_cache_config room = {.struct_size = sizeof room, .num_sequences = 1, .capacity = tokens};
  room.num_kv_heads = shape.num_kv_heads;
  room.head_dim = shape.head_dim;
  room.head_dim_v = shape.head_dim_v;
  if (of->args.call.flags & MHA_WINDOW_LEFT) {
    room.kind = MHA_CACHE_KIND_RING;
    room.capacity = of->args.call.window_left / 16 * 16 + 32;
  }
  mha_kv_cache *cache;
  size_t bytes;
  void *memory;
  check(mha_kv_cache_size(&room, &bytes, &error), &error);
  if (posix_memalign(&memory, 64, bytes)) exit(1);
  check(mha_kv_cache_init(&room, memory, bytes, &cache, &error), &error);
  return cache;
}

/* x [rows, width] = x + attention(x) */
static void run_layer(const struct model_layer *l, float *x, int64_t rows, int64_t width,
                      mha_kv_cache *cache) {
  float *y = malloc((size_t)(rows * width) * sizeof *y);
  mha_forward_args args = l->args;
  args.struct_size = sizeof args;
  args.call.n_q = rows;
  args.call.cache = cache;
  args.query.data = x;
  args.output.data = y;
  mha_error error;
  size_t bytes;
  check(mha_forward_workspace(l->layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_forward(l->layer, &args, workspace, bytes, &error), &error);
  for (int64_t i = 0; i < rows * width; i++) x[i] += y[i];
  free(workspace);
  free(y);
}

/* 0 if the bits are the same: what main returns. */
static int run_model(const struct model_layer *layers, int count, int64_t prompt, int64_t tokens,
                     int64_t width) {
  float *x = numbers(tokens * width, 1), *whole = malloc((size_t)(tokens * width) * sizeof *x);
  memcpy(whole, x, (size_t)(tokens * width) * sizeof *x);
  for (int l = 0; l < count; l++) {
    mha_kv_cache *cache = make_cache(
        &layers[l], tokens); /* a model keeps them, and takes a token through all layers */
    for (int64_t first = 0, rows = prompt; first < tokens; first += rows, rows = 1) {
      run_layer(&layers[l], x + first * width, rows, width, cache);
    }
    run_layer(&layers[l], whole, tokens, width, NULL);
    free(cache);
  }
  const int differ = memcmp(x, whole, (size_t)(tokens * width) * sizeof *x);
  printf("%d layers, a prompt of %d and %d tokens: %s at once\n", count, (int)prompt,
         (int)(tokens - prompt), differ ? "different bits from all" : "the same bits as all");
  free(x);
  free(whole);
  return differ != 0;
}
