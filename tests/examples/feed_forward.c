/*
 * A block of a decoder: attention and a feed-forward network, each added to the rows that it reads.
 * All products run on the library's kernels: those of the attention by mha_forward, the others by
 * mha_linear, from layers that have one matrix each.
 */
#define _POSIX_C_SOURCE 200112L

#include <math.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { tokens = 6, width = 16, heads = 2, hidden = 40 };

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

static void fill(float *values, int count, int step) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * step % 17 - 8) / 32;
}

/* W [outputs, inputs], as nn.Linear has it, kept in 16 bits. */
static mha_layer *make_linear(int inputs, int outputs, int step) {
  float *const w = malloc(sizeof *w * inputs * outputs);
  fill(w, inputs * outputs, step);
  mha_linear_weights weights = {
      .struct_size = sizeof weights, .input_dim = inputs, .output_dim = outputs};
  weights.layout = MHA_LAYOUT_OUT_IN;
  weights.w.data = w;
  weights.format.type = MHA_TYPE_BF16;
  mha_layer *layer;
  mha_error error;
  check(mha_linear_create(&weights, NULL, &layer, &error), &error);
  free(w);
  return layer;
}

/* output = x W^T, and plus the residual, if there is one. On one thread and rows of floats it needs
 * no workspace. */
static void linear(const mha_layer *layer, int rows, const float *x, const float *residual,
                   float *output) {
  mha_linear_args args = {.struct_size = sizeof args, .rows = rows, .x.data = x};
  args.residual.data = residual;
  args.output.data = output;
  mha_error error;
  check(mha_linear(layer, &args, NULL, 0, &error), &error);
}

struct block {
  mha_layer *attention, *gate, *up, *down;
  mha_kv_cache *cache;
};

/* The next rows of the sequence, in place. */
static void run(const struct block *block, int rows, float *x) {
  float attended[tokens * width], gate[tokens * hidden], up[tokens * hidden];
  mha_forward_args args = {.struct_size = sizeof args, .call.n_q = rows, .query.data = x};
  args.output.data = attended;
  args.call.flags = MHA_CAUSAL;
  args.call.cache = block->cache;
  size_t bytes;
  mha_error error;
  check(mha_forward_workspace(block->attention, &args, &bytes, &error), &error);
  void *const workspace = malloc(bytes);
  check(mha_forward(block->attention, &args, workspace, bytes, &error), &error);
  free(workspace);
  for (int i = 0; i < rows * width; i++) x[i] += attended[i];

  /* x + W_down (silu(W_gate x) * W_up x): the last product is added to the rows where they are. */
  linear(block->gate, rows, x, NULL, gate);
  linear(block->up, rows, x, NULL, up);
  for (int i = 0; i < rows * hidden; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
  linear(block->down, rows, gate, x, x);
}

int main(void) {
  static float w_qkv[width * 3 * width], w_o[width * width], x[tokens * width], y[tokens * width];
  fill(w_qkv, width * 3 * width, 5);
  fill(w_o, width * width, 7);
  fill(x, tokens * width, 11);
  memcpy(y, x, sizeof x);
  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {.struct_size = sizeof weights, .w_qkv.data = w_qkv, .w_o.data = w_o};
  struct block block = {NULL, make_linear(width, hidden, 3), make_linear(width, hidden, 13),
                        make_linear(hidden, width, 9), NULL};
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &block.attention, &error), &error);

  mha_kv_cache_config room = {
      .struct_size = sizeof room, .num_sequences = 1, .capacity = tokens, .num_kv_heads = heads};
  room.head_dim = width / heads;
  size_t bytes;
  void *memory;
  check(mha_kv_cache_size(&room, &bytes, &error), &error);
  if (posix_memalign(&memory, 64, bytes)) return 1;
  check(mha_kv_cache_init(&room, memory, bytes, &block.cache, &error), &error);

  run(&block, tokens, x); /* all rows at once */
  check(mha_kv_cache_truncate(block.cache, 0, 0, &error), &error);
  for (int i = 0; i < tokens; i++) run(&block, 1, y + i * width); /* and row by row */
  for (int i = 0; i < tokens; i++)
    printf("y[%d] = %7.4f %7.4f ...\n", i, y[i * width], y[i * width + 1]);
  const int same = memcmp(x, y, sizeof x) == 0;
  printf("row by row: %s\n", same ? "the same bits" : "other bits");

  mha_layer *const layers[] = {block.attention, block.gate, block.up, block.down};
  for (int i = 0; i < 4; i++) mha_layer_destroy(layers[i]);
  free(memory);
  return !same;
}
