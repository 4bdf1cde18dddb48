/*
 * The attention of a serving engine that owns its blocks: it keeps the lengths and block tables of
 * its requests itself, shares the blocks of a common prefix, and reorders the batch at every step.
 * Each request gets the bits that it gets alone, at once and without a cache.
 */
#define _POSIX_C_SOURCE 200112L
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { requests = 4, tokens = 90, prefix = 32, steps = 1000 };
enum { heads = 4, kv_heads = 2, dim = 16, block = 16, blocks = 40, max_blocks = 6 };
enum { q_width = heads * dim, kv_width = kv_heads * dim, numbers = block * kv_width };

struct request {
  float q[tokens * q_width], k[tokens * kv_width], v[tokens * kv_width], y[tokens * q_width];
  int32_t table[max_blocks];
  int64_t length; /* positions in the pool */
};

static struct request all[requests];
static float (*pages)[2][numbers]; /* [blocks, keys and values, numbers] */
static int32_t next_block;         /* of those that nobody has */

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

static float any(void) { return (float)rand() / (float)RAND_MAX * 2 - 1; }

static mha_attention_args arguments(int64_t n, const float *q, const float *k, const float *v,
                                    float *y) {
  mha_attention_args args = {.struct_size = sizeof args, .num_heads = heads, .head_dim = dim};
  args.num_kv_heads = kv_heads;
  args.call.flags = MHA_CAUSAL;
  args.call.n_q = args.call.n_kv = n;
  args.q.data = q;
  args.k.data = k;
  args.v.data = v;
  args.output.data = y;
  return args;
}

static void attend(const mha_attention_args *args) {
  mha_error error;
  size_t bytes;
  check(mha_attention_workspace(args, &bytes, &error), &error);
  void *workspace = malloc(bytes); /* an engine keeps one for its largest step */
  check(mha_attention(args, workspace, bytes, &error), &error);
  free(workspace);
}

/* One step: the next rows of each request of the batch, prompts and single tokens together. */
static void step(mha_kv_cache *pool, int count, struct request *const *batch, const int *rows) {
  static float q[requests * tokens * q_width], y[requests * tokens * q_width];
  static float k[requests * tokens * kv_width], v[requests * tokens * kv_width];
  int32_t tables[requests][max_blocks];
  int64_t lengths[requests], starts[requests + 1] = {0};
  for (int b = 0; b < count; b++) {
    struct request *r = batch[b];
    const int64_t at = starts[b], from = r->length, n = rows[b];
    memcpy(q + at * q_width, r->q + from * q_width, sizeof *q * (size_t)(n * q_width));
    memcpy(k + at * kv_width, r->k + from * kv_width, sizeof *k * (size_t)(n * kv_width));
    memcpy(v + at * kv_width, r->v + from * kv_width, sizeof *v * (size_t)(n * kv_width));
    starts[b + 1] = at + n;
    lengths[b] = from;
    for (int64_t i = (from + block - 1) / block; i < (from + n + block - 1) / block; i++)
      r->table[i] = next_block++;
    memcpy(tables[b], r->table, sizeof r->table);
  }
  mha_sequences sequences = {.struct_size = sizeof sequences, .count = count};
  sequences.cu_seqlens_q = starts;
  sequences.cache_lengths = lengths;
  sequences.block_tables = tables[0];
  sequences.block_table_entries = max_blocks;
  mha_attention_args args = arguments(starts[count], q, k, v, y);
  args.call.sequences = &sequences;
  args.call.cache = pool;
  attend(&args);
  for (int b = 0; b < count; b++) { /* the pool counts nothing: the engine does */
    memcpy(batch[b]->y + lengths[b] * q_width, y + starts[b] * q_width,
           sizeof *y * (size_t)(rows[b] * q_width));
    batch[b]->length += rows[b];
  }
}

int main(void) {
  mha_kv_cache_config config = {.struct_size = sizeof config, .kind = MHA_CACHE_KIND_POOL};
  config.num_sequences = requests; /* of a call */
  config.capacity = tokens;        /* of a request */
  config.num_kv_heads = kv_heads;
  config.head_dim = dim;
  config.block_positions = block;
  config.num_blocks = blocks;
  void *all_pages, *buffer;
  if (posix_memalign(&all_pages, 64, blocks * sizeof *pages) || posix_memalign(&buffer, 64, 256))
    return 1;
  pages = all_pages;
  mha_kv_pool memory = {.struct_size = sizeof memory, .k = pages[0][0], .v = pages[0][1]};
  memory.k_block_stride = memory.v_block_stride = sizeof pages[0];
  mha_kv_cache *pool;
  mha_error error;
  check(mha_kv_pool_init(&config, &memory, buffer, 256, &pool, &error), &error);

  for (int i = 0; i < requests; i++) {
    struct request *r = &all[i];
    for (int n = 0; n < tokens * q_width; n++) r->q[n] = any();
    for (int n = 0; n < tokens * kv_width; n++) r->k[n] = any(), r->v[n] = any();
    memcpy(r->k, all[0].k, sizeof *r->k * prefix * kv_width); /* all begin with the same text */
    memcpy(r->v, all[0].v, sizeof *r->v * prefix * kv_width);
  }

  /* The first request computes the prefix, and the others take its blocks. */
  struct request *const first = &all[0];
  step(pool, 1, &first, (const int[]){prefix});
  for (int i = 1; i < requests; i++) {
    memcpy(all[i].table, first->table, sizeof first->table);
    all[i].length = prefix;
  }
  int left = 1, count = 0;
  for (int n = 0; left && n < steps; n++) { /* some of them, in any order, by any number of rows */
    struct request *batch[requests];
    int rows[requests], offset = rand() % requests;
    left = count = 0;
    for (int i = 0; i < requests; i++) {
      struct request *r = &all[(i + offset) % requests];
      const int more = tokens - (int)r->length, some = rand() % 2 ? 1 : 1 + rand() % 20;
      left += more;
      if (more == 0 || rand() % 3 == 0) continue;
      batch[count] = r;
      rows[count++] = more < some ? more : some;
    }
    if (count) step(pool, count, batch, rows);
  }

  int same = left == 0;
  for (int i = 0; i < requests; i++) {
    static float alone[tokens * q_width];
    const mha_attention_args args = arguments(tokens, all[i].q, all[i].k, all[i].v, alone);
    attend(&args);
    const size_t from = i ? prefix * q_width : 0; /* the rows that it computed itself */
    same = same && !memcmp(alone + from, all[i].y + from, sizeof alone - from * sizeof *alone);
  }
  free(all_pages);
  free(buffer);
  printf("each request in any batch has the bits that it has alone: %s\n", same ? "yes" : "no");
  return !same;
}
