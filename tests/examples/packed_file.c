/*
 * Weights that are packed once, written to a file, and mapped from there by every later run: nothing is copied when the layer is made, and
 * processes that use the same file share its memory.
 */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { tokens = 5, width = 64, heads = 4 };
static float x[tokens * width], created_y[tokens * width], mapped_y[tokens * width], w_qkv[width * 3 * width], w_o[width * width];

static void fill(float *values, int count) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * 7 % 11 - 5) / 32;
}

static void check(mha_status status, const mha_error *error) {
  if (status != MHA_OK) fprintf(stderr, "%s\n", error->message), exit(1);
}

static void expect(int holds, const char *what) {
  if (!holds) perror(what), exit(1);
}

static void forward(const mha_layer *layer, float *y) {
  mha_forward_args args = {.struct_size = sizeof args, .batch = 1, .n_q = tokens, .query = x, .output = y, .is_causal = 1};
  mha_error error;
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);
  free(workspace);
}

int main(void) {
  fill(x, tokens * width), fill(w_qkv, width * 3 * width), fill(w_o, width * width);
  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {.struct_size = sizeof weights, .w_qkv = w_qkv, .w_o = w_o};
  mha_error error;

  /* Once: pack and write. */
  size_t bytes;
  check(mha_layer_pack_size(&config, &weights, NULL, &bytes, &error), &error);
  void *packed;
  expect(posix_memalign(&packed, 64, bytes) == 0, "posix_memalign");
  check(mha_layer_pack(&config, &weights, NULL, packed, bytes, &error), &error);
  char path[] = "/tmp/mha-packed-XXXXXX";
  int file = mkstemp(path);
  expect(file >= 0 && write(file, packed, bytes) == (ssize_t)bytes, path);
  free(packed);

  /* Later: map and run. */
  void *mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
  expect(mapped != MAP_FAILED, path);
  check(mha_layer_verify(mapped, bytes, &error), &error); /* reads it all; needed only where the file may be damaged */
  void *storage = malloc(mha_layer_view_size());
  const mha_layer *view;
  check(mha_layer_view(mapped, bytes, NULL, storage, mha_layer_view_size(), &view, &error), &error);
  forward(view, mapped_y);

  /* The same as from the weights themselves. */
  mha_layer *created;
  check(mha_layer_create(&config, &weights, NULL, &created, &error), &error);
  forward(created, created_y);
  int equal = memcmp(created_y, mapped_y, sizeof mapped_y) == 0;
  printf("%zu bytes of packed weights, mapped from a file: %s\n", bytes, equal ? "the same bits" : "different bits");

  mha_layer_destroy(created);
  free(storage);
  munmap(mapped, bytes);
  close(file);
  unlink(path);
  return equal ? 0 : 1;
}
