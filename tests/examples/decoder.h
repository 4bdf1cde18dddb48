/*
 * A whole decoder as Llama is one, to be copied from: a .safetensors file of weights in, tokens in,
 * logits out. The library computes attention and every product. What stands between them is here:
 * RMS norms, SiLU, and which sequence has which blocks of the caches.
 *
 *     model_load         packs the weights of a file
 *     decoder_make       makes the memory that calls need: caches, workspace, rows
 *     decoder_run        takes tokens of some sequences through all layers, and gives logits
 *     decoder_truncate   takes the last tokens of a sequence back
 *     decoder_share      begins a sequence with the first tokens of another one, without computing
 *                        or copying them
 *
 * decoder.c makes a program of it.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <mha.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"
#include "thread_pool.h"

static const float epsilon = 1e-5f; /* rms_norm_eps of config.json */
enum {
  block = 32 /* positions */,
  most_rows = 512 /* of a call: longer prompts are cut */,
  most_wanted = 16,
  most_pieces = 8
};

static void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  exit(1);
}

static void check(mha_status status, const mha_error *error) {
  if (status != MHA_OK) fail("%s", error->message);
}

static void *allocate(int64_t count, size_t size) {
  void *memory; /* aligned as caches have to be */
  if (posix_memalign(&memory, 64, (size_t)count * size + 64) != 0)
    fail("there is no memory for %lld x %zu bytes", (long long)count, size);
  return memory;
}

/* ---- The model: nothing changes once it is loaded, so that any number of threads may use it */

struct model {
  struct safetensors file; /* stays open for the rows of the embedding */
  const struct tensor *embedding;
  int64_t layers, width, heads, kv_heads, head_dim, hidden, vocabulary;
  uint32_t weight_type, group_size, arithmetic;
  double rope_base; /* rope_theta of config.json */
  struct layer {
    mha_layer *attention, *gate, *up, *down;
    float *attention_norm, *mlp_norm;
  } * layer; /* [layers] */
  float *final_norm;
  mha_layer *logits;
};

#define LAYER "model.layers.%lld." /* as Hugging Face names them */

/* MHA_TYPE_*; codes of 4 bits are two in each number of U8. Others: 6. */
static uint32_t type_of(const struct tensor *t) {
  static const char *const names[] = {"F32", "F16", "BF16", "I8", "U8"};
  uint32_t type = 0;
  while (type < 5 && strcmp(t->dtype, names[type]) != 0) type++;
  return type + 1;
}

static int64_t columns_of(const struct tensor *t) {
  return type_of(t) == MHA_TYPE_INT4 ? 2 * t->shape[1] : t->shape[1];
}

/* The tensor of a layer, or of none, whose shape has to be this one; -1 = any; a vector has 0
 * columns. */
static const struct tensor *get(const struct model *m, const char *name, int64_t layer,
                                int64_t rows, int64_t columns) {
  char whole[128];
  snprintf(whole, sizeof whole, name, (long long)layer);
  const struct tensor *const t = safetensors_find(&m->file, whole);
  if (!t) fail("%s: has no tensor %s", m->file.path, whole);
  if (t->dimensions != (columns ? 2 : 1) || t->shape[0] < 1 || (rows >= 0 && t->shape[0] != rows) ||
      (columns && (t->shape[1] < 1 || (columns > 0 && columns_of(t) != columns)))) {
    fail(columns ? "%s: %s should be a matrix [%lld, %lld] (-1 = any)"
                 : "%s: %s should be a vector [%lld]",
         m->file.path, whole, (long long)rows, (long long)columns);
  }
  if (type_of(t) > (columns > 0 ? MHA_TYPE_INT4 : MHA_TYPE_BF16)) {
    fail("%s: %s holds %s; F32, F16 or BF16 is expected%s", m->file.path, whole, t->dtype,
         columns > 0 ? ", or I8 or U8 with scales" : "");
  }
  return t;
}

/* NAME.scales or NAME.offsets of a quantiser's codes NAME, for each output and 32 inputs of it. */
static const float *groups_of(const struct model *m, const struct tensor *w, const char *what) {
  char name[160];
  snprintf(name, sizeof name, "%.*s.%s", (int)w->name_length, w->name, what);
  const struct tensor *const t = safetensors_find(&m->file, name);
  if (!t) return NULL;
  const int64_t each = type_of(w) == MHA_TYPE_INT4 ? 16 : 32; /* of a group in a row of w */
  const int64_t groups = w->shape[1] / each + (w->shape[1] % each != 0);
  if (type_of(t) != MHA_TYPE_F32 || t->dimensions != 2 || t->shape[0] != w->shape[0] ||
      t->shape[1] != groups) {
    fail("%s: %s should be a matrix [%lld, %lld] of F32", m->file.path, name,
         (long long)w->shape[0], (long long)groups);
  }
  return t->data;
}

static mha_matrix matrix_of(const struct model *m, const struct tensor *w) {
  return (mha_matrix){
      .data = w->data, .scales = groups_of(m, w, "scales"), .offsets = groups_of(m, w, "offsets")};
}

/* Codes stay as they are, in groups of 32. */
static uint32_t group_size_of(const struct model *m, const struct tensor *w) {
  return type_of(w) > MHA_TYPE_BF16 ? 32 : m->group_size;
}

static float *load_norm(const struct model *m, const char *name, int64_t layer) {
  float *const weights = allocate(m->width, sizeof *weights);
  tensor_read(get(m, name, layer, m->width, 0), 0, m->width, weights);
  return weights;
}

/* Packs the weights into memory of the library's own. */
static mha_layer *create_layer(const mha_layer_config *config, const mha_layer_weights *weights) {
  mha_layer *layer;
  mha_error error;
  check(mha_layer_create(config, weights, NULL, &layer, &error), &error);
  return layer;
}

/* Matrices lie as nn.Linear has them, [outputs, inputs]. */
static mha_layer *load_linear(const struct model *m, const char *name, int64_t layer,
                              int64_t outputs, int64_t inputs) {
  const struct tensor *const w = get(m, name, layer, outputs, inputs);
  mha_linear_weights weights = {.struct_size = sizeof weights,
                                .input_dim = inputs,
                                .output_dim = outputs,
                                .layout = MHA_LAYOUT_OUT_IN};
  weights.type = type_of(w);
  weights.w = matrix_of(m, w);
  weights.format.type = m->weight_type ? m->weight_type : type_of(w);
  weights.format.group_size = group_size_of(m, w);
  weights.format.arithmetic = m->arithmetic;
  mha_layer *made;
  mha_error error;
  check(mha_linear_create(&weights, NULL, &made, &error), &error);
  return made;
}

static mha_layer *load_attention(const struct model *m, int64_t layer) {
  const int64_t q_width = m->heads * m->head_dim, kv_width = m->kv_heads * m->head_dim;
  const struct tensor *const w_q =
      get(m, LAYER "self_attn.q_proj.weight", layer, q_width, m->width);
  const struct tensor *const w_k =
      get(m, LAYER "self_attn.k_proj.weight", layer, kv_width, m->width);
  const struct tensor *const w_v =
      get(m, LAYER "self_attn.v_proj.weight", layer, kv_width, m->width);
  const struct tensor *const w_o =
      get(m, LAYER "self_attn.o_proj.weight", layer, m->width, q_width);
  if (strcmp(w_q->dtype, w_k->dtype) || strcmp(w_q->dtype, w_v->dtype) ||
      strcmp(w_q->dtype, w_o->dtype)) {
    fail("%s: the matrices of the attention of layer %lld have several types", m->file.path,
         (long long)layer);
  }
  mha_layer_config config = {.struct_size = sizeof config,
                             .query_dim = m->width,
                             .num_heads = m->heads,
                             .num_kv_heads = m->kv_heads};
  config.head_dim = m->head_dim;
  config.format.type = m->weight_type ? m->weight_type : type_of(w_q);
  config.format.group_size = group_size_of(m, w_q);
  config.format.arithmetic = m->arithmetic;
  mha_layer_weights weights = {
      .struct_size = sizeof weights, .layout = MHA_LAYOUT_OUT_IN, .type = type_of(w_q)};
  weights.w_q = matrix_of(m, w_q);
  weights.w_k = matrix_of(m, w_k);
  weights.w_v = matrix_of(m, w_v);
  weights.w_o = matrix_of(m, w_o);
  return create_layer(&config, &weights);
}

/* The shapes of tensors say all but the number of heads and the base of the rotation. weight_type:
 * MHA_TYPE_*, 0 = as the file has the matrices. group_size: that of mha_layer_config. arithmetic:
 * MHA_ARITHMETIC_*. */
static void model_load(struct model *m, const char *path, int64_t heads, double rope_base,
                       uint32_t weight_type, uint32_t group_size, uint32_t arithmetic) {
  *m = (struct model){.heads = heads, .weight_type = weight_type, .group_size = group_size};
  m->rope_base = rope_base;
  m->arithmetic = arithmetic;
  if (!safetensors_open(&m->file, path)) fail("%s", m->file.error);
  m->embedding = get(m, "model.embed_tokens.weight", 0, -1, -1);
  m->vocabulary = m->embedding->shape[0];
  m->width = m->embedding->shape[1];
  const struct tensor *const q = get(m, LAYER "self_attn.q_proj.weight", 0, -1, m->width);
  if (heads < 1 || q->shape[0] % heads)
    fail("%s: %lld heads do not divide its queries", path, (long long)heads);
  m->head_dim = q->shape[0] / heads;
  m->kv_heads = get(m, LAYER "self_attn.k_proj.weight", 0, -1, m->width)->shape[0] / m->head_dim;
  m->hidden = get(m, LAYER "mlp.gate_proj.weight", 0, -1, m->width)->shape[0];
  char next[80];
  do snprintf(next, sizeof next, LAYER "self_attn.q_proj.weight", (long long)++m->layers);
  while (safetensors_find(&m->file, next));
  const int is_tied = !safetensors_find(&m->file, "lm_head.weight");
  const long long expected = 9 * m->layers + 3 - is_tied;
  long long count = (long long)m->file.count;
  for (size_t i = 0; i < m->file.count; i++) {
    const mha_matrix w = matrix_of(m, &m->file.tensors[i]);
    count -= (w.scales != NULL) + (w.offsets != NULL);
  }
  /* Others, such as biases, would be missed in every token, and nobody told. */
  if (count != expected)
    fail("%s: has %lld tensors; %lld layers of Llama have %lld", path, count, (long long)m->layers,
         expected);
  m->layer = allocate(m->layers, sizeof *m->layer);
  for (int64_t l = 0; l < m->layers; l++) {
    m->layer[l].attention = load_attention(m, l);
    m->layer[l].gate = load_linear(m, LAYER "mlp.gate_proj.weight", l, m->hidden, m->width);
    m->layer[l].up = load_linear(m, LAYER "mlp.up_proj.weight", l, m->hidden, m->width);
    m->layer[l].down = load_linear(m, LAYER "mlp.down_proj.weight", l, m->width, m->hidden);
    m->layer[l].attention_norm = load_norm(m, LAYER "input_layernorm.weight", l);
    m->layer[l].mlp_norm = load_norm(m, LAYER "post_attention_layernorm.weight", l);
  }
  m->final_norm = load_norm(m, "model.norm.weight", 0);
  m->logits = load_linear(m, is_tied ? "model.embed_tokens.weight" : "lm_head.weight", 0,
                          m->vocabulary, m->width);
}

static void model_free(struct model *m) {
  for (int64_t l = 0; l < m->layers; l++) {
    mha_layer *const made[] = {m->layer[l].attention, m->layer[l].gate, m->layer[l].up,
                               m->layer[l].down};
    for (int i = 0; i < 4; i++) mha_layer_destroy(made[i]);
    free(m->layer[l].attention_norm);
    free(m->layer[l].mlp_norm);
  }
  mha_layer_destroy(m->logits);
  free(m->final_norm);
  free(m->layer);
  safetensors_close(&m->file);
}

/* ---- The decoder: sequences under way, and the memory of a call */

struct sequence {
  int64_t length, num_blocks;
  int32_t *blocks;
};

struct decoder {
  const struct model *model;
  const mha_scheduler *scheduler;
  mha_rope rope;
  mha_forward_args attention; /* what all calls have in common: normed -> attended */
  /* A cache for each layer. Blocks have the same numbers in all of them: one table for each
   * sequence serves all layers. */
  mha_kv_cache **cache; /* [layers], one behind the other in cache_memory */
  char *cache_memory;
  int64_t num_sequences, num_blocks;
  struct sequence *sequence;
  int32_t *users; /* [num_blocks]: sequences that have the block */
  float *x, *normed, *attended, *gate, *up, *logits; /* rows of a call */
  void *workspace;
  size_t workspace_bytes;
};

/* Some more tokens of a sequence. */
struct piece {
  int64_t sequence;
  const int32_t *tokens;
  int64_t count, wanted; /* of the last `wanted` tokens the logits are computed */
};

/* y = x W^T, and plus the residual, if there is one. */
static mha_linear_args linear_args(const struct decoder *d, int64_t rows, const float *x,
                                   const float *residual, float *y) {
  return (mha_linear_args){.struct_size = sizeof(mha_linear_args),
                           .rows = rows,
                           .x.data = x,
                           .residual.data = residual,
                           .output.data = y,
                           .scheduler = d->scheduler};
}

/* k_type, v_type: MHA_TYPE_* of the caches, 0 = f32. attention_arithmetic: that of mha_call. */
static void decoder_make(struct decoder *d, const struct model *m, const mha_scheduler *scheduler,
                         int64_t sequences, int64_t positions, uint32_t k_type, uint32_t v_type,
                         uint32_t attention_arithmetic) {
  const int64_t blocks_each = (positions + block - 1) / block;
  *d = (struct decoder){.model = m,
                        .scheduler = scheduler,
                        .num_sequences = sequences,
                        .num_blocks = sequences * blocks_each};
  d->sequence = allocate(sequences, sizeof *d->sequence);
  for (int64_t s = 0; s < sequences; s++)
    d->sequence[s] = (struct sequence){0, 0, allocate(blocks_each, sizeof(int32_t))};
  d->users = memset(allocate(d->num_blocks, sizeof *d->users), 0,
                    (size_t)d->num_blocks * sizeof *d->users);

  mha_error error;
  mha_rope_config angles = {.struct_size = sizeof angles,
                            .dims = m->head_dim,
                            .num_positions = blocks_each * block,
                            .base = m->rope_base};
  float *const tables =
      allocate(angles.num_positions * m->head_dim, sizeof *tables); /* cosines, then sines */
  float *const sines = tables + angles.num_positions * (m->head_dim / 2);
  check(mha_rope_tables(&angles, tables, sines, &error), &error);
  d->rope = (mha_rope){.struct_size = sizeof d->rope,
                       .num_positions = angles.num_positions,
                       .cos = tables,
                       .sin = sines};

  mha_kv_cache_config room = {
      .struct_size = sizeof room, .num_sequences = sequences, .capacity = angles.num_positions};
  room.num_kv_heads = m->kv_heads;
  room.head_dim = m->head_dim;
  room.kind = MHA_CACHE_KIND_PAGED;
  room.block_positions = block;
  room.num_blocks = d->num_blocks;
  room.k_type = k_type;
  room.v_type = v_type;
  size_t bytes;
  check(mha_kv_cache_size(&room, &bytes, &error), &error);
  d->cache = allocate(m->layers, sizeof *d->cache);
  d->cache_memory = allocate(m->layers, bytes);
  for (int64_t l = 0; l < m->layers; l++) {
    check(
        mha_kv_cache_init(&room, d->cache_memory + (size_t)l * bytes, bytes, &d->cache[l], &error),
        &error);
  }

  d->x = allocate(most_rows * m->width, sizeof(float));
  d->normed = allocate(most_rows * m->width, sizeof(float));
  d->attended = allocate(most_rows * m->width, sizeof(float));
  d->gate = allocate(most_rows * m->hidden, sizeof(float));
  d->up = allocate(most_rows * m->hidden, sizeof(float));
  d->logits = allocate(most_wanted * m->vocabulary, sizeof(float));

  d->attention = MHA_INIT(mha_forward_args);
  d->attention.call.flags = MHA_CAUSAL;
  d->attention.call.attention_arithmetic = attention_arithmetic;
  d->attention.call.rope = &d->rope;
  d->attention.call.scheduler = scheduler;
  d->attention.query.data = d->normed;
  d->attention.output.data = d->attended;
  /* The workspace of the longest call serves all. Arrays are not read when asking, but whether they
   * are given counts. */
  const int64_t numbers[most_pieces + 1] = {0};
  mha_sequences most = {
      .struct_size = sizeof most, .cu_seqlens_q = numbers, .cache_sequences = numbers};
  most.count = sequences < most_pieces ? sequences : most_pieces;
  mha_forward_args longest = d->attention;
  longest.call.n_q = most_rows;
  longest.call.sequences = &most;
  longest.call.cache = d->cache[0];
  check(mha_forward_workspace(m->layer[0].attention, &longest, &d->workspace_bytes, &error),
        &error);
  const mha_layer *const products[] = {m->layer[0].gate, m->layer[0].down, m->logits};
  for (int i = 0; i < 3; i++) {
    const mha_linear_args product =
        linear_args(d, i < 2 ? most_rows : most_wanted, d->x, d->x, d->x);
    check(mha_linear_workspace(products[i], &product, &bytes, &error), &error);
    if (bytes > d->workspace_bytes) d->workspace_bytes = bytes;
  }
  d->workspace = allocate(1, d->workspace_bytes);
}

static void decoder_free(struct decoder *d) {
  for (int64_t s = 0; s < d->num_sequences; s++) free(d->sequence[s].blocks);
  free(d->sequence);
  free(d->users);
  free((void *)d->rope.cos);
  free(d->cache);
  free(d->cache_memory);
  free(d->workspace);
  free(d->x);
  free(d->normed);
  free(d->attended);
  free(d->gate);
  free(d->up);
  free(d->logits);
}

/* ---- Sequences: who has which blocks */

static int32_t take_free_block(struct decoder *d) {
  int32_t b = 0;
  while (b < d->num_blocks && d->users[b] > 0) b++;
  if (b == d->num_blocks) fail("all %lld blocks of the caches are taken", (long long)d->num_blocks);
  d->users[b] = 1;
  return b;
}

/* Gives a sequence the blocks that this many positions need, and takes those after them away. */
static void set_room(struct decoder *d, struct sequence *s, int64_t positions) {
  const int64_t wanted = (positions + block - 1) / block;
  if (positions > d->rope.num_positions)
    fail("a sequence has room for %lld tokens", (long long)d->rope.num_positions);
  while (s->num_blocks > wanted) d->users[s->blocks[--s->num_blocks]]--;
  while (s->num_blocks < wanted) s->blocks[s->num_blocks++] = take_free_block(d);
  mha_error error;
  for (int64_t l = 0; l < d->model->layers; l++) {
    check(mha_kv_cache_set_blocks(d->cache[l], s - d->sequence, s->blocks, s->num_blocks, &error),
          &error);
  }
}

/* Nothing can be appended to a block that sequences share. If the last block of a sequence is
 * shared and partly filled, the sequence gets its own copy. */
static void unshare_last_block(struct decoder *d, struct sequence *s) {
  if (s->length % block == 0 || d->users[s->blocks[s->length / block]] == 1) return;
  int32_t *const last = &s->blocks[s->length / block], own = take_free_block(d);
  mha_error error;
  for (int64_t l = 0; l < d->model->layers; l++) {
    uint32_t is_used; /* 1, since the block is shared */
    check(mha_kv_cache_unshare(d->cache[l], s - d->sequence, own, &is_used, &error), &error);
  }
  d->users[*last]--;
  *last = own;
}

/* Keeps the first `length` tokens: takes rejected drafts back, or with 0 ends a sequence. */
static void decoder_truncate(struct decoder *d, int64_t sequence, int64_t length) {
  struct sequence *const s = &d->sequence[sequence];
  mha_error error;
  for (int64_t l = 0; l < d->model->layers; l++)
    check(mha_kv_cache_truncate(d->cache[l], sequence, length, &error), &error);
  s->length = length;
  set_room(d, s, length);
}

/* Sequence `to`, whatever it had, begins with the first `length` tokens of `from`. All their blocks
 * are shared. */
static void decoder_share(struct decoder *d, int64_t from, int64_t to, int64_t length) {
  struct sequence *const s = &d->sequence[to];
  decoder_truncate(d, to, 0);
  for (; s->num_blocks * block < length; s->num_blocks++) {
    d->users[s->blocks[s->num_blocks] = d->sequence[from].blocks[s->num_blocks]]++;
  }
  set_room(d, s, length);
  mha_error error;
  for (int64_t l = 0; l < d->model->layers; l++)
    check(mha_kv_cache_copy_prefix(d->cache[l], from, to, length, &error), &error);
  s->length = length;
}

/* ---- Tokens through the model */

/* A loop over rows on the library's threads: what is computed beside it need not run on one alone.
 */
typedef void row_function(struct decoder *d, const float *weights, int64_t row);

struct loop {
  row_function *body;
  struct decoder *d;
  const float *weights;
  int64_t rows;
  uint32_t parts;
};

static void run_part(void *context, uint32_t part) {
  const struct loop *const loop = context;
  const int64_t first = loop->rows * part / loop->parts,
                end = loop->rows * (part + 1) / loop->parts;
  for (int64_t row = first; row < end; row++) loop->body(loop->d, loop->weights, row);
}

static void each_row(struct decoder *d, int64_t rows, row_function *body, const float *weights) {
  struct loop loop = {body, d, weights, rows,
                      d->scheduler && rows > 1 ? d->scheduler->num_threads : 1};
  if (loop.parts == 1) run_part(&loop, 0);
  if (loop.parts > 1)
    d->scheduler->parallel_for(d->scheduler->context, loop.parts, run_part, &loop);
}

static void norm(struct decoder *d, const float *weights, int64_t row) {
  const int64_t width = d->model->width;
  const float *const x = d->x + row * width;
  float *const normed = d->normed + row * width;
  float squares = 0;
  for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
  const float factor = 1 / sqrtf(squares / (float)width + epsilon);
  for (int64_t i = 0; i < width; i++) normed[i] = x[i] * factor * weights[i];
}

static void add_and_norm(struct decoder *d, const float *weights, int64_t row) {
  const int64_t width = d->model->width;
  for (int64_t i = row * width; i < (row + 1) * width; i++) d->x[i] += d->attended[i];
  norm(d, weights, row);
}

/* silu(gate) * up, with silu(x) = x / (1 + e^-x) */
static void gated(struct decoder *d, const float *weights, int64_t row) {
  const int64_t hidden = d->model->hidden;
  for (int64_t i = row * hidden; i < (row + 1) * hidden; i++)
    d->gate[i] = d->gate[i] / (1 + expf(-d->gate[i])) * d->up[i];
  (void)weights;
}

static void linear(struct decoder *d, const mha_layer *layer, int64_t rows, const float *x,
                   const float *residual, float *output) {
  const mha_linear_args args = linear_args(d, rows, x, residual, output);
  mha_error error;
  check(mha_linear(layer, &args, d->workspace, d->workspace_bytes, &error), &error);
}

static int64_t check_token(const struct model *m, int64_t token) {
  if (token < 0 || token >= m->vocabulary)
    fail("the token %lld is none of the %lld", (long long)token, (long long)m->vocabulary);
  return token;
}

/*
 * Takes the pieces, each of another sequence, through the model: prompts, single tokens and drafts
 * may stand side by side in one call. All products run over the rows of all pieces at once, so that
 * weights are read once for all sequences. Returns logits [wanted tokens of the first piece, of the
 * next, ..][vocabulary], which stay until the next call. No sequence's numbers depend on the others
 * in the call.
 */
static const float *decoder_run(struct decoder *d, const struct piece *pieces, int64_t count) {
  const struct model *const m = d->model;
  int64_t numbers[most_pieces], starts[most_pieces + 1] = {0}, wanted = 0;
  for (int64_t p = 0; p < count; p++) {
    if (p == most_pieces || starts[p] + pieces[p].count > most_rows ||
        (wanted += pieces[p].wanted) > most_wanted) {
      fail("a call takes %d sequences, %d tokens, and gives %d rows of logits", most_pieces,
           most_rows, most_wanted);
    }
    struct sequence *const s = &d->sequence[numbers[p] = pieces[p].sequence];
    starts[p + 1] = starts[p] + pieces[p].count;
    unshare_last_block(d, s);
    set_room(d, s,
             s->length += pieces[p].count); /* the library appends them below, layer by layer */
    for (int64_t i = 0; i < pieces[p].count; i++) {
      const int64_t token = check_token(m, pieces[p].tokens[i]);
      tensor_read(m->embedding, token * m->width, m->width, d->x + (starts[p] + i) * m->width);
    }
  }
  const int64_t rows = starts[count];
  mha_sequences sequences = {.struct_size = sizeof sequences, .count = count};
  sequences.cu_seqlens_q = starts;
  sequences.cache_sequences = numbers;
  mha_forward_args attention = d->attention;
  attention.call.n_q = rows;
  attention.call.sequences = &sequences;
  for (int64_t l = 0; l < m->layers; l++) {
    const struct layer *const layer = &m->layer[l];
    each_row(d, rows, norm, layer->attention_norm);
    attention.call.cache = d->cache[l];
    mha_error error;
    check(mha_forward(layer->attention, &attention, d->workspace, d->workspace_bytes, &error),
          &error);
    each_row(d, rows, add_and_norm, layer->mlp_norm);
    linear(d, layer->gate, rows, d->normed, NULL, d->gate);
    linear(d, layer->up, rows, d->normed, NULL, d->up);
    each_row(d, rows, gated, NULL);
    linear(d, layer->down, rows, d->gate, d->x, d->x);
  }

  float *to = d->x; /* the rows that are wanted, moved to the front */
  for (int64_t p = 0; p < count; p++) {
    const int64_t floats = pieces[p].wanted * m->width;
    memmove(to, d->x + starts[p + 1] * m->width - floats, (size_t)floats * sizeof *to);
    to += floats;
  }
  each_row(d, wanted, norm, m->final_norm);
  if (wanted > 0) linear(d, m->logits, wanted, d->normed, NULL, d->logits);
  return d->logits;
}
