/*
 * Weights that are packed once, written to a file, and mapped from there by every process that uses
 * them: nothing is copied when the layer is made, and the processes share the file's memory. Here
 * two of them compute the same rows, as does a layer made from the weights.
 */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { tokens = 5, width = 64, heads = 4, processes = 2 };
static float x[tokens * width], y[tokens * width], their_y[tokens * width],
    w_qkv[width * 3 * width], w_o[width * width];

static void fill(float *values, int count) {
  for (int i = 0; i < count; i++) values[i] = (float)(i * 7 % 11 - 5) / 32;
}

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

static void expect(int holds, const char *what) {
  if (!holds) {
    perror(what);
    exit(1);
  }
}

static void forward(const mha_layer *layer) {
  mha_forward_args args = {.struct_size = sizeof args, .call.n_q = tokens};
  args.query.data = x;
  args.output.data = y;
  args.call.flags = MHA_CAUSAL;
  mha_error error;
  size_t bytes;
  check(mha_forward_workspace(layer, &args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_forward(layer, &args, workspace, bytes, &error), &error);
  free(workspace);
}

/* Once, by whoever converts models: packs the weights and writes them. */
static void write_packed(const mha_layer_config *config, const mha_layer_weights *weights,
                         int file) {
  mha_error error;
  size_t bytes;
  void *packed;
  check(mha_layer_pack_size(config, weights, NULL, &bytes, &error), &error);
  expect(posix_memalign(&packed, 64, bytes) == 0, "posix_memalign");
  check(mha_layer_pack(config, weights, NULL, packed, bytes, &error), &error);
  expect(write(file, packed, bytes) == (ssize_t)bytes, "writing the packed weights");
  free(packed);
}

/* In every process that uses them: maps the file and runs the layer. */
static void run_mapped(const char *path) {
  int file = open(path, O_RDONLY);
  struct stat about;
  expect(file >= 0 && fstat(file, &about) == 0, path);
  size_t bytes = (size_t)about.st_size;
  void *mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, 0);
  expect(mapped != MAP_FAILED, path);
  close(file); /* the mapping stays */

  mha_error error;
  const mha_layer *layer;
  void *storage = malloc(mha_layer_view_size());
  check(mha_layer_verify(mapped, bytes, &error),
        &error); /* reads it all; needed only where the file may be damaged */
  check(mha_layer_view(mapped, bytes, NULL, storage, mha_layer_view_size(), &layer, &error),
        &error);
  forward(layer);
  free(storage);
  munmap(mapped, bytes);
}

struct process {
  pid_t id;
  int from; /* where it writes its y */
};

/* Starts a process that runs the mapped layer. */
static struct process start(const char *path) {
  int ends[2];
  expect(pipe(ends) == 0, "pipe");
  struct process process = {.id = fork(), .from = ends[0]};
  expect(process.id >= 0, "fork");
  if (process.id == 0) {
    run_mapped(path);
    _exit(write(ends[1], y, sizeof y) == (ssize_t)sizeof y ? 0 : 1);
  }
  close(ends[1]);
  return process;
}

/* Waits for its end; what it computed is in their_y. */
static void finish(const struct process *process) {
  size_t got = 0;
  int status;
  for (ssize_t some; (some = read(process->from, (char *)their_y + got, sizeof their_y - got)) > 0;)
    got += (size_t)some;
  close(process->from);
  expect(waitpid(process->id, &status, 0) == process->id && status == 0 && got == sizeof their_y,
         "a process that maps the weights");
}

int main(void) {
  fill(x, tokens * width);
  fill(w_qkv, width * 3 * width);
  fill(w_o, width * width);
  mha_layer_config config = {.struct_size = sizeof config, .query_dim = width, .num_heads = heads};
  mha_layer_weights weights = {.struct_size = sizeof weights, .w_qkv.data = w_qkv, .w_o.data = w_o};

  char path[] = "/tmp/mha-packed-XXXXXX";
  int file = mkstemp(path);
  expect(file >= 0, path);
  write_packed(&config, &weights, file);
  close(file);

  struct process started[processes];
  for (int i = 0; i < processes; i++) started[i] = start(path);

  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(&config, &weights, NULL, &layer, &error), &error);
  forward(layer);
  mha_layer_destroy(layer);

  int equal = 1;
  for (int i = 0; i < processes; i++) {
    finish(&started[i]);
    equal = equal && memcmp(their_y, y, sizeof y) == 0;
  }
  printf("packed weights, mapped by %d processes at once: %s\n", processes,
         equal ? "the same bits" : "different bits");
  unlink(path);
  return equal ? 0 : 1;
}
