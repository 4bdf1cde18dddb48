/*
 * mha inside of a program that runs for long, in the pieces that src/docs/embedding.md explains:
 * weights mapped from a file, all memory taken in the beginning, errors as values, and a cache that
 * goes on from a file.
 */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { width = 64, heads = 4, max_rows = 16, max_positions = 32 };

struct engine {
  void *weights; /* a mapped file */
  size_t weights_bytes;
  const mha_layer *layer;
  void *layer_storage;
  mha_kv_cache *cache;
  mha_forward_args args; /* what all calls have in common */
  void *cache_buffer, *workspace;
  size_t cache_bytes, workspace_bytes;
  mha_error error; /* of the last function of the library */
};

/* ---- What embedding.md shows */

static mha_status map_weights(struct engine *engine, const char *path) {
  int file = open(path, O_RDONLY);
  struct stat about;
  engine->weights = MAP_FAILED;
  if (file >= 0 && fstat(file, &about) == 0) {
    engine->weights_bytes = (size_t)about.st_size;
    engine->weights = mmap(NULL, engine->weights_bytes, PROT_READ, MAP_SHARED, file, 0);
  }
  if (file >= 0) close(file);
  if (engine->weights == MAP_FAILED) {
    snprintf(engine->error.message, sizeof engine->error.message, "%s cannot be mapped", path);
    return MHA_ERROR_PACKED_FORMAT;
  }
  mha_status status = mha_layer_verify(engine->weights, engine->weights_bytes, &engine->error);
  if (status != MHA_OK) return status; /* damaged, or packed by another version: pack it again */
  engine->layer_storage = malloc(mha_layer_view_size());
  return mha_layer_view(engine->weights, engine->weights_bytes, NULL, engine->layer_storage,
                        mha_layer_view_size(), &engine->layer, &engine->error);
}

static mha_status reserve(struct engine *engine) {
  mha_kv_cache_config room = {.struct_size = sizeof room,
                              .num_sequences = 1,
                              .capacity = max_positions,
                              .num_kv_heads = heads,
                              .head_dim = width / heads,
                              .k_type = MHA_TYPE_F16};
  mha_status status = mha_kv_cache_size(&room, &engine->cache_bytes, &engine->error);
  if (status != MHA_OK) return status;
  if (posix_memalign(&engine->cache_buffer, 64, engine->cache_bytes))
    return MHA_ERROR_OUT_OF_MEMORY;
  memset(engine->cache_buffer, 0,
         engine->cache_bytes); /* so that the system has given the pages before it counts */
  status = mha_kv_cache_init(&room, engine->cache_buffer, engine->cache_bytes, &engine->cache,
                             &engine->error);
  if (status != MHA_OK) return status;

  engine->args = (mha_forward_args){.struct_size = sizeof engine->args, .call.flags = MHA_CAUSAL};
  mha_forward_args largest = engine->args;
  largest.call.n_q = max_rows;
  largest.call.cache = engine->cache;
  status = mha_forward_workspace(engine->layer, &largest, &engine->workspace_bytes, &engine->error);
  if (status != MHA_OK) return status;
  engine->workspace = malloc(engine->workspace_bytes);
  if (!engine->workspace) return MHA_ERROR_OUT_OF_MEMORY;
  memset(engine->workspace, 0, engine->workspace_bytes);
  return MHA_OK;
}

static mha_status step(struct engine *engine, int64_t rows, const float *x, float *y) {
  mha_forward_args args = engine->args;
  args.call.n_q = rows;
  args.query.data = x;
  args.output.data = y;
  args.call.cache = engine->cache;
  return mha_forward(engine->layer, &args, engine->workspace, engine->workspace_bytes,
                     &engine->error);
}

static int answer(struct engine *engine, int64_t rows, const float *x, float *y) {
  mha_status status = step(engine, rows, x, y);
  if (status == MHA_ERROR_CACHE_FULL) {
    /* y and the cache are unchanged. This program forgets the whole sequence. */
    status = mha_kv_cache_truncate(engine->cache, 0, 0, &engine->error);
    if (status == MHA_OK) status = step(engine, rows, x, y);
  }
  if (status == MHA_OK) return 1;
  /* This is a bug in the program, which the message explains. */
  fprintf(stderr, "%s: %s\n", mha_status_string(status), engine->error.message);
  return 0;
}

static int save_cache(const struct engine *engine, const char *path) {
  FILE *file = fopen(path, "wb");
  if (!file) return 0;
  int is_written =
      fwrite(engine->cache_buffer, 1, engine->cache_bytes, file) == engine->cache_bytes;
  return (fclose(file) == 0) && is_written;
}

static mha_status load_cache(struct engine *engine, const char *path) {
  FILE *file = fopen(path, "rb");
  size_t bytes = file ? fread(engine->cache_buffer, 1, engine->cache_bytes, file) : 0;
  if (file) fclose(file);
  return mha_kv_cache_view(engine->cache_buffer, bytes, &engine->cache, &engine->error);
}

/* ---- The program around it */

static void fill(float *values, int count) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * 7 % 11 - 5) / 32;
}

static void check(const struct engine *engine, mha_status status) {
  if (status != MHA_OK) {
    fprintf(stderr, "%s: %s\n", mha_status_string(status), engine->error.message);
    exit(1);
  }
}

static void expect(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  exit(1);
}

static void start(struct engine *engine, const char *weights) {
  memset(engine, 0, sizeof *engine);
  check(engine, map_weights(engine, weights));
  check(engine, reserve(engine));
}

static void stop(struct engine *engine) {
  munmap(engine->weights, engine->weights_bytes);
  free(engine->layer_storage);
  free(engine->cache_buffer);
  free(engine->workspace);
}

static void pack_to(const char *path) {
  static float w_qkv[width * 3 * width], w_o[width * width];
  fill(w_qkv, width * 3 * width);
  fill(w_o, width * width);
  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {.struct_size = sizeof weights, .w_qkv.data = w_qkv, .w_o.data = w_o};
  struct engine packing;
  void *packed;
  check(&packing,
        mha_layer_pack_size(&config, &weights, NULL, &packing.weights_bytes, &packing.error));
  expect(posix_memalign(&packed, 64, packing.weights_bytes) == 0, "no memory");
  check(&packing,
        mha_layer_pack(&config, &weights, NULL, packed, packing.weights_bytes, &packing.error));
  FILE *file = fopen(path, "wb");
  expect(file && fwrite(packed, 1, packing.weights_bytes, file) == packing.weights_bytes &&
             fclose(file) == 0,
         path);
  free(packed);
}

int main(void) {
  static float x[max_positions * width], y[max_positions * width], again[max_positions * width];
  fill(x, max_positions * width);
  char folder[] = "/tmp/mha-embedding-XXXXXX", weights[64], cache[64];
  expect(mkdtemp(folder) != NULL, folder);
  snprintf(weights, sizeof weights, "%s/layer.mha", folder);
  snprintf(cache, sizeof cache, "%s/cache", folder);
  pack_to(weights);

  struct engine first, second;
  start(&first, weights);
  for (int done = 0; done < 24; done += 8) { /* 24 rows, and the state after 16 of them saved */
    expect(answer(&first, 8, x + done * width, y + done * width), "the first engine fails");
    if (done == 8) expect(save_cache(&first, cache), cache);
  }
  start(&second, weights);
  check(&second, load_cache(&second, cache));
  expect(answer(&second, 8, x + 16 * width, again), "the second engine fails");
  int equal = memcmp(again, y + 16 * width, 8 * width * sizeof *y) == 0;
  printf("rows 16 to 23 from a saved cache: %s\n", equal ? "the same bits" : "different bits");

  expect(answer(&second, 16, x, again),
         "a full cache is not emptied"); /* 24 and 16 positions are more than it has */
  int is_anew = memcmp(again, y, 16 * width * sizeof *y) == 0;
  printf("and from the beginning, after it was full: %s\n",
         is_anew ? "the same bits" : "different bits");

  stop(&first);
  stop(&second);
  unlink(weights);
  unlink(cache);
  rmdir(folder);
  return equal && is_anew ? 0 : 1;
}
