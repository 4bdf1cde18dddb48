#define _POSIX_C_SOURCE 200112L
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { prompt = 5, tokens = 9, width = 8, heads = 2, head_dim = width / heads };
static float x[tokens * width], y[tokens * width], whole[tokens * width], w_qkv[width * 3 * width],
    w_o[width * width];
static float cosines[tokens * head_dim / 2], sines[tokens * head_dim / 2];

static void fill(float *values, int count) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * 7 % 11 - 5) / 8;
}

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

int main(void) {
  fill(x, prompt * width);
  fill(w_qkv, width * 3 * width);
  fill(w_o, width * width);
  mha_layer_config config = MHA_INIT(mha_layer_config);
  config.query_dim = width;
  config.num_heads = heads;
  mha_layer_weights weights = MHA_INIT(mha_layer_weights);
  weights.w_qkv.data = w_qkv;
  weights.w_o.data = w_o;
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &layer, &error), &error);

  mha_rope_config angles = MHA_INIT(mha_rope_config);
  angles.dims = head_dim;
  angles.num_positions = tokens;
  mha_rope rope = MHA_INIT(mha_rope);
  rope.num_positions = tokens;
  rope.cos = cosines;
  rope.sin = sines;
  check(mha_rope_tables(&angles, cosines, sines, &error), &error);

  mha_kv_cache_config room = MHA_INIT(mha_kv_cache_config);
  room.num_sequences = 1;
  room.capacity = tokens;
  room.num_kv_heads = heads;
  room.head_dim = head_dim;
  mha_kv_cache *cache;
  size_t cache_bytes, bytes;
  void *memory;
  check(mha_kv_cache_size(&room, &cache_bytes, &error), &error);
  if (posix_memalign(&memory, 64, cache_bytes)) return 1;
  check(mha_kv_cache_init(&room, memory, cache_bytes, &cache, &error), &error);

  mha_forward_args args = MHA_INIT(mha_forward_args);
  args.call.n_q = tokens;
  args.call.flags = MHA_CAUSAL;
  args.call.rope = &rope;
  args.call.cache = cache;
  /* The workspace of the longest call is large enough for every call. */
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  for (int position = 0, next; position < tokens; position = next) {
    next = position == 0 ? prompt : position + 1; /* the prompt at once, then token by token */
    args.call.n_q = next - position;
    args.query.data = x + position * width;
    args.output.data = y + position * width;
    check(mha_forward(layer, &args, workspace, bytes, &error), &error);
    const float *last = y + (next - 1) * width;
    printf("y[%d] = %7.4f %7.4f ...\n", next - 1, last[0], last[1]);
    /* A model has more to do here: this takes the last output row as the next input row. */
    if (next < tokens) memcpy(x + next * width, last, width * sizeof *x);
  }

  /* All again, at once and without a cache. */
  args.call.n_q = tokens;
  args.query.data = x;
  args.output.data = whole;
  args.call.cache = NULL;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  workspace = realloc(workspace, bytes);
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);
  printf("at once: %s\n", memcmp(whole, y, sizeof y) == 0 ? "the same bits" : "different bits");
  free(workspace);
  free(memory);
  mha_layer_destroy(layer);
  return 0;
}
