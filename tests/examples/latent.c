/*
 * A layer of multi-head latent attention as DeepSeek V2 and V3 have it, and with keys that an
 * indexer chooses as V3.2 has it; explained in src/docs/latent.md. Words in comments are those of
 * the model's config.json and of its files.
 *
 * A position is 576 numbers in the cache. Tokens attend to them as they lie (absorbed); for
 * prompts, keys and values of all heads are made from them (expanded). The program compares both
 * with a plain transcription in double: an argument is the number of heads, 128 in V3.
 */
#define _POSIX_C_SOURCE 200112L
#include <math.h>
#include <mha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* qk_nope_head_dim, qk_rope_head_dim, v_head_dim and kv_lora_rank of the models; a head's query, a
 * position in the cache. */
enum {
  nope = 128,
  rotated = 64,
  value = 128,
  latent = 512,
  head = nope + rotated,
  key = latent + rotated
};
/* index_n_heads, index_head_dim and index_topk: 64, 128 and 2048 in the model. */
enum { index_heads = 4, index_dim = 128, num_chosen = 24 };
enum { prompt = 64, tokens = 72 };
static int heads = 4, hidden,
           q_rank; /* num_attention_heads, hidden_size, q_lora_rank: 128, 7168 and 1536 in V3 */

/* q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj; wq_b, wk and weights_proj of the
 * indexer; in and out of each */
enum { q_a, q_b, kv_a, kv_b, o, index_q, index_k, index_w, num_products };
static int dims[num_products][2];

struct weights {
  float *matrices[num_products];        /* [out, in], as nn.Linear has them */
  float *q_norm, *kv_norm, *index_norm; /* q_a_layernorm, kv_a_layernorm; k_norm of the indexer */
};

struct layer {
  const struct weights *w;
  mha_layer *products[num_products];
  mha_layer **to_latent, **from_latent; /* of each head, parts of kv_b: what absorbs */
  mha_rope rope, index_rope;
  mha_kv_cache *latents, *index_keys;
};

static void check(mha_status status, const mha_error *error) {
  if (status == MHA_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

static float *floats(int64_t count) { return malloc((size_t)count * sizeof(float)); }

static float *numbers(int64_t count, float middle, float size) {
  float *x = floats(count);
  for (int64_t i = 0; i < count; i++)
    x[i] = middle + size * ((float)rand() / (float)RAND_MAX * 2 - 1);
  return x;
}

static mha_layer *make_linear(const float *w, int in, int out, uint32_t layout) {
  mha_linear_weights weights = {.struct_size = sizeof weights,
                                .input_dim = in,
                                .output_dim = out,
                                .layout = layout,
                                .w.data = w};
  mha_layer *layer;
  mha_error error;
  check(mha_linear_create(&weights, NULL, &layer, &error), &error);
  return layer;
}

static mha_rope make_rope(void) {
  mha_rope_config angles = {.struct_size = sizeof angles, .dims = rotated, .num_positions = tokens};
  float *const cosines = floats(tokens * rotated / 2), *const sines = floats(tokens * rotated / 2);
  mha_error error;
  check(mha_rope_tables(&angles, cosines, sines, &error), &error);
  return (mha_rope){.struct_size = sizeof(mha_rope),
                    .dims = rotated,
                    .num_positions = tokens,
                    .cos = cosines,
                    .sin = sines};
}

/* One kv head whose values are the first `values` elements of its keys. */
static mha_kv_cache *make_cache(int width, int values) {
  mha_kv_cache_config room = {
      .struct_size = sizeof room, .num_sequences = 1, .capacity = tokens, .num_kv_heads = 1};
  room.head_dim = width;
  room.head_dim_v = values;
  room.value_place = MHA_CACHE_VALUES_IN_KEYS;
  mha_kv_cache *cache;
  mha_error error;
  void *memory;
  size_t bytes;
  check(mha_kv_cache_size(&room, &bytes, &error), &error);
  if (posix_memalign(&memory, 64, bytes)) exit(1);
  check(mha_kv_cache_init(&room, memory, bytes, &cache, &error), &error);
  return cache;
}

static struct layer make_layer(const struct weights *w) {
  struct layer l = {.w = w};
  for (int i = 0; i < num_products; i++)
    l.products[i] = make_linear(w->matrices[i], dims[i][0], dims[i][1], MHA_LAYOUT_OUT_IN);
  l.to_latent = malloc(sizeof(void *) * (size_t)heads);
  l.from_latent = malloc(sizeof(void *) * (size_t)heads);
  for (int h = 0; h < heads; h++) {
    const float *keys = w->matrices[kv_b] + (int64_t)h * (nope + value) * latent,
                *values = keys + nope * latent;
    /* The other layout, since q^T (W c) = (W^T q)^T c. */
    l.to_latent[h] = make_linear(keys, nope, latent, MHA_LAYOUT_IN_OUT);
    l.from_latent[h] = make_linear(values, latent, value, MHA_LAYOUT_OUT_IN);
  }
  l.rope = l.index_rope =
      make_rope(); /* the indexer rotates the first numbers of a head, in halves */
  l.rope.style = MHA_ROPE_INTERLEAVED;
  l.rope.offset = latent;
  l.latents = make_cache(key, latent);
  l.index_keys = make_cache(index_dim, index_dim);
  return l;
}

static void free_layer(struct layer *l) {
  for (int i = 0; i < num_products; i++) mha_layer_destroy(l->products[i]);
  for (int h = 0; h < heads; h++) {
    mha_layer_destroy(l->to_latent[h]);
    mha_layer_destroy(l->from_latent[h]);
  }
  free(l->to_latent);
  free(l->from_latent);
  free(l->latents);
  free(l->index_keys);
  free((void *)l->rope.cos);
  free((void *)l->rope.sin);
}

/* Strides of rows, 0 = contiguous. On one thread and rows of floats a product needs no workspace.
 */
static void linear(const mha_layer *layer, int64_t rows, const float *x, int64_t x_stride, float *y,
                   int64_t y_stride) {
  mha_linear_args args = {.struct_size = sizeof args, .rows = rows};
  args.x.data = x;
  args.x.strides.row = x_stride;
  args.output.data = y;
  args.output.strides.row = y_stride;
  mha_error error;
  check(mha_linear(layer, &args, NULL, 0, &error), &error);
}

static void attention(const mha_attention_args *args) {
  size_t bytes;
  mha_error error;
  check(mha_attention_workspace(args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_attention(args, workspace, bytes, &error), &error);
  free(workspace);
}

/* RMS norm; with is_centred layer norm. */
static void norm(float *x, int width, const float *weight, int is_centred) {
  double mean = 0, squares = 0;
  for (int i = 0; i < width && is_centred; i++) mean += x[i] / (double)width;
  for (int i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
  const double factor = 1 / sqrt(squares / width + 1e-6);
  for (int i = 0; i < width; i++) x[i] = (float)((x[i] - mean) * factor) * weight[i];
}

/* chosen [n, num_chosen]: of each row, the keys with the greatest index scores. A factor that the
 * model has in them changes no choice. */
static void choose_keys(const struct layer *l, int64_t n, const float *x, const float *low_q,
                        int32_t *chosen) {
  float *q = floats(n * index_heads * index_dim), *k = floats(n * index_dim),
        *weights = floats(n * index_heads);
  linear(l->products[index_q], n, low_q, 0, q, 0);
  linear(l->products[index_k], n, x, 0, k, 0);
  linear(l->products[index_w], n, x, 0, weights, 0);
  for (int64_t i = 0; i < n; i++) norm(k + i * index_dim, index_dim, l->w->index_norm, 1);
  mha_attention_args index = {.struct_size = sizeof index, .call.n_q = n, .call.n_kv = n};
  index.num_heads = index_heads;
  index.num_kv_heads = 1;
  index.head_dim = index_dim;
  index.q.data = q;
  index.k.data = k;
  index.call.rope = &l->index_rope;
  index.call.cache = l->index_keys;
  index.call.flags = MHA_CAUSAL;
  mha_choose_keys_args args = {
      .struct_size = sizeof args, .attention = &index, .weights.data = weights};
  args.num_chosen = num_chosen;
  args.chosen_keys = chosen;
  size_t bytes;
  mha_error error;
  check(mha_choose_keys_workspace(&args, &bytes, &error), &error);
  void *workspace = malloc(bytes);
  check(mha_choose_keys(&args, workspace, bytes, &error), &error);
  free(workspace);
  free(q);
  free(k);
  free(weights);
}

/* The context [n, heads, value] of q [n, heads, head], whose positions have the rows k [n, key],
 * which are rotated and appended. */
static void attend_absorbed(const struct layer *l, int64_t n, const float *q, const float *k,
                            const mha_score_arrays *lists, float *y) {
  float *latent_q = floats(n * heads * key), *context = floats(n * heads * latent);
  for (int h = 0; h < heads; h++)
    linear(l->to_latent[h], n, q + h * head, heads * head, latent_q + h * key, heads * key);
  for (int64_t i = 0; i < n * heads; i++)
    memcpy(latent_q + i * key + latent, q + i * head + nope, rotated * sizeof *q);
  mha_attention_args args = {.struct_size = sizeof args,
                             .call.n_q = n,
                             .call.n_kv = n,
                             .num_heads = heads,
                             .num_kv_heads = 1};
  args.head_dim = key;
  args.head_dim_v = latent;
  args.scale = 1 / sqrtf(head);
  args.q.data = latent_q;
  args.k.data = k;
  args.output.data = context;
  args.call.cache = l->latents;
  args.call.rope = &l->rope;
  args.call.score_arrays = lists;
  args.call.flags = MHA_CAUSAL;
  attention(&args);
  for (int h = 0; h < heads; h++)
    linear(l->from_latent[h], n, context + h * latent, heads * latent, y + h * value,
           heads * value);
  free(latent_q);
  free(context);
}

static void attend_expanded(const struct layer *l, int64_t n, const float *q, const float *k,
                            const mha_score_arrays *lists, float *y) {
  /* A call for one query, which nobody needs, rotates the keys and appends them. */
  float unused[latent];
  mha_attention_args append = {
      .struct_size = sizeof append, .call.n_q = 1, .call.n_kv = n, .num_heads = 1};
  append.head_dim = key;
  append.head_dim_v = latent;
  append.q.data = append.k.data = k;
  append.output.data = unused;
  append.call.rope = &l->rope;
  append.call.cache = l->latents;
  attention(&append);

  int64_t length;
  mha_error error;
  check(mha_kv_cache_length(l->latents, 0, &length, &error), &error);
  float *latents = floats(length * key), *keys_values = floats(length * heads * (nope + value)),
        *keys = floats(length * heads * head);
  check(mha_kv_cache_read(l->latents, 0, 0, length, latents, NULL, &error), &error);
  linear(l->products[kv_b], length, latents, key, keys_values, 0);
  for (int64_t i = 0; i < length * heads; i++) {
    memcpy(keys + i * head, keys_values + i * (nope + value), nope * sizeof *keys);
    memcpy(keys + i * head + nope, latents + i / heads * key + latent,
           rotated * sizeof *keys); /* the same for all heads */
  }
  mha_rope rope = l->rope;
  int64_t *zeros = calloc((size_t)length, sizeof *zeros);
  rope.offset = nope;
  /* Keys from the cache are rotated already: by an angle of 0. */
  mha_sequences sequences = {.struct_size = sizeof sequences, .rope_k_positions = zeros};
  mha_attention_args args = {
      .struct_size = sizeof args, .call.n_q = n, .call.n_kv = length, .num_heads = heads};
  args.head_dim = head;
  args.head_dim_v = value;
  args.q.data = q;
  args.k.data = keys;
  args.output.data = y;
  args.v.data = keys_values + nope;
  args.v.strides.row = (int64_t)heads * (nope + value);
  args.v.strides.head = nope + value;
  args.call.rope = &rope;
  args.call.sequences = &sequences;
  args.call.score_arrays = lists;
  args.call.flags = MHA_CAUSAL;
  attention(&args);
  free(latents);
  free(keys_values);
  free(keys);
  free(zeros);
}

/* y [n, hidden] of the next n rows of the sequence. chosen [n, num_chosen] gets the lists of the
 * indexer; NULL = all keys. */
static void run_layer(const struct layer *l, int64_t n, const float *x, int is_absorbed,
                      int32_t *chosen, float *y) {
  float *low_q = floats(n * q_rank), *q = floats(n * heads * head), *k = floats(n * key),
        *values = floats(n * heads * value);
  linear(l->products[q_a], n, x, 0, low_q, 0);
  linear(l->products[kv_a], n, x, 0, k, 0);
  for (int64_t i = 0; i < n; i++) {
    norm(low_q + i * q_rank, q_rank, l->w->q_norm, 0);
    norm(k + i * key, latent, l->w->kv_norm, 0);
  }
  linear(l->products[q_b], n, low_q, 0, q, 0);
  mha_score_arrays lists = {.struct_size = sizeof lists};
  lists.chosen_keys = chosen;
  lists.num_chosen = num_chosen;
  lists.chosen_keys_strides.head = MHA_BROADCAST; /* all heads attend to the same keys */
  if (chosen) choose_keys(l, n, x, low_q, chosen);
  (is_absorbed ? attend_absorbed : attend_expanded)(l, n, q, k, chosen ? &lists : NULL, values);
  linear(l->products[o], n, values, 0, y, 0);
  free(low_q);
  free(q);
  free(k);
  free(values);
}

/* The same in double, as the definition says it, of all rows; first y [tokens, out] = x W^T. */
static double *product(const struct weights *w, int which, const double *x, int x_stride) {
  const int in = dims[which][0], out = dims[which][1];
  double *y = calloc((size_t)tokens * (size_t)out, sizeof *y);
  for (int i = 0; i < tokens; i++) {
    for (int c = 0; c < out; c++) {
      for (int d = 0; d < in; d++)
        y[(int64_t)i * out + c] +=
            x[(int64_t)i * x_stride + d] * w->matrices[which][(int64_t)c * in + d];
    }
  }
  return y;
}

static void plain_norm(double *x, int width, const float *weight) {
  double squares = 0;
  for (int i = 0; i < width; i++) squares += x[i] * x[i] / width;
  for (int i = 0; i < width; i++) x[i] = x[i] / sqrt(squares + 1e-6) * weight[i];
}

static void plain_rotate(double *x, int position) {
  for (int i = 0; i < rotated; i += 2) {
    const double angle = position * pow(10000, -(double)i / rotated), a = x[i], b = x[i + 1];
    x[i] = a * cos(angle) - b * sin(angle);
    x[i + 1] = b * cos(angle) + a * sin(angle);
  }
}

static double *plain_layer(const struct weights *w, const float *rows, const int32_t *chosen) {
  double *x = malloc(sizeof *x * (size_t)(tokens * hidden));
  for (int i = 0; i < tokens * hidden; i++) x[i] = rows[i];
  double *low_q = product(w, q_a, x, hidden), *k = product(w, kv_a, x, hidden);
  for (int i = 0; i < tokens; i++) {
    plain_norm(low_q + i * q_rank, q_rank, w->q_norm);
    plain_norm(k + i * key, latent, w->kv_norm);
    plain_rotate(k + i * key + latent, i);
  }
  double *q = product(w, q_b, low_q, q_rank), *kv = product(w, kv_b, k, key);
  double *values = calloc((size_t)(tokens * heads * value), sizeof *values);
  for (int row = 0; row < tokens * heads; row++) {
    const int i = row / heads, h = row % heads;
    double sum = 0, *const query = q + row * head;
    plain_rotate(query + nope, i);
    for (int j = 0; j <= i; j++) {
      int c = 0;
      while (chosen && c < num_chosen && chosen[i * num_chosen + c] != j) c++;
      if (c == num_chosen) continue; /* not in the list */
      const double *const own = kv + (int64_t)(j * heads + h) * (nope + value), *const shared =
                                                                                    k + j * key +
                                                                                    latent;
      double score = 0;
      for (int d = 0; d < nope; d++) score += query[d] * own[d];
      for (int d = 0; d < rotated; d++) score += query[nope + d] * shared[d];
      const double weight = exp(score / sqrt(head));
      sum += weight;
      for (int d = 0; d < value; d++) values[row * value + d] += weight * own[nope + d];
    }
    for (int d = 0; d < value; d++) values[row * value + d] /= sum;
  }
  double *y = product(w, o, values, heads * value);
  free(x);
  free(low_q);
  free(k);
  free(q);
  free(kv);
  free(values);
  return y;
}

int main(int argc, char **argv) {
  if (argc > 1) heads = atoi(argv[1]);
  if (heads < 1 || heads > 128) return fprintf(stderr, "latent [heads, from 1 to 128]\n"), 1;
  hidden = 56 * heads;
  q_rank = 12 * heads;
  const int shapes[num_products][2] = {{hidden, q_rank},        {q_rank, heads * head},
                                       {hidden, key},           {latent, heads * (nope + value)},
                                       {heads * value, hidden}, {q_rank, index_heads * index_dim},
                                       {hidden, index_dim},     {hidden, index_heads}};
  memcpy(dims, shapes, sizeof dims);
  struct weights w;
  for (int i = 0; i < num_products; i++)
    w.matrices[i] = numbers((int64_t)dims[i][0] * dims[i][1], 0, sqrtf(3 / (float)dims[i][0]));
  w.q_norm = numbers(q_rank, 1, 0.5f);
  w.kv_norm = numbers(latent, 1, 0.5f);
  w.index_norm = numbers(index_dim, 1, 0.5f);
  struct layer layer = make_layer(&w);
  float *x = numbers(tokens * hidden, 0, 1), *y = floats(tokens * hidden);
  int differ = 0;
  for (int has_lists = 0; has_lists < 2; has_lists++) {
    double *expected = NULL;
    static const char *const ways[] = {"all expanded", "prompt expanded, tokens absorbed",
                                       "all absorbed"};
    for (int way = 0; way < 3; way++) {
      int32_t chosen[tokens * num_chosen];
      mha_error error;
      check(mha_kv_cache_truncate(layer.latents, 0, 0, &error), &error);
      check(mha_kv_cache_truncate(layer.index_keys, 0, 0, &error), &error);
      for (int first = 0, n = prompt / 2; first < tokens;
           first += n, n = first < prompt ? n : 1) { /* half a prompt, the other, tokens */
        const int is_absorbed = way == 2 || (way == 1 && first >= prompt);
        run_layer(&layer, n, x + first * hidden, is_absorbed,
                  has_lists ? chosen + first * num_chosen : NULL, y + first * hidden);
      }
      if (!expected) expected = plain_layer(&w, x, has_lists ? chosen : NULL);
      double off = 0, largest = 0;
      for (int i = 0; i < tokens * hidden; i++) {
        off = fmax(off, fabs(y[i] - expected[i]));
        largest = fmax(largest, fabs(expected[i]));
      }
      printf("%s, %s: off by %.1e of the largest number\n", has_lists ? "chosen keys" : "all keys",
             ways[way], off / largest);
      differ |= !(off < 1e-4 * largest);
    }
    free(expected);
  }
  free_layer(&layer);
  free(x);
  free(y);
  free(w.q_norm);
  free(w.kv_norm);
  free(w.index_norm);
  for (int i = 0; i < num_products; i++) free(w.matrices[i]);
  return differ;
}
