/*
 * decoder.h as a program: a model's file and tokens in, and the most probable next tokens out, or
 * how probable each token was.
 *
 *     decoder                    makes a small model with random weights, and shows that all ways
 *                                to the same tokens give the same bits
 *     decoder write FILE LAYERS WIDTH HEADS KV_HEADS HIDDEN VOCABULARY
 *                                writes a model with random weights, named and laid out as Hugging
 *                                Face has Llama's
 *     decoder run FILE HEADS PROMPT COUNT [THREADS [TYPE [ARITHMETIC [LOGITS]]]]
 *                                reads numbers of tokens from the file PROMPT, and writes COUNT
 *                                more
 *     decoder score FILE HEADS TOKENS COUNT [THREADS [TYPE [ARITHMETIC [KEYS [VALUES]]]]]
 *                                cuts TOKENS into windows of COUNT, and writes the logarithm of the
 *                                probability of each token in the second half of a window, given
 *                                those before it there: a line for each window
 *     decoder check FILE HEADS   shows for this model what the first form shows for its own
 *
 * HEADS: the number of heads; 9,100000 where rope_theta is 100000 instead of 10000. TYPE: how
 * weights are kept, f32, f16, bf16, int8 or int4 (file: as they are, codes of a quantiser too);
 * int8/32: in groups of 32.
 * ARITHMETIC: of products with them, f32, or with int8 or int4 int16 or int8, or with bf16 bf16.
 * LOGITS: a file for the logits that each token was chosen by. KEYS, VALUES: how caches keep them,
 * f32, f16, bf16 or int8, and values int4.
 */
#include "decoder.h"

#include <inttypes.h>
#include <time.h>

static int32_t largest(const float *logits, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++) best = logits[i] > logits[best] ? i : best;
  return (int32_t)best;
}

/* The logits behind the last token; a prompt longer than a call goes in several. */
static const float *append(struct decoder *d, int64_t sequence, const int32_t *tokens,
                           int64_t count) {
  for (; count > most_rows; tokens += most_rows, count -= most_rows)
    decoder_run(d, &(struct piece){sequence, tokens, most_rows, 0}, 1);
  return decoder_run(d, &(struct piece){sequence, tokens, count, 1}, 1);
}

/* ---- A model to try it on */

struct writer {
  FILE *file, *header; /* one pass for the header, one for the numbers */
  int64_t offset;
  uint64_t random;
};

/* Numbers from -size to size, or 1 for norms; the same on every machine. */
static void write_tensor(struct writer *w, const char *name, int64_t rows, int64_t columns,
                         float size) {
  const int64_t count = rows * (columns ? columns : 1);
  if (w->header) {
    fprintf(w->header, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%lld", w->offset ? "," : "", name,
            (long long)rows);
    if (columns) fprintf(w->header, ",%lld", (long long)columns);
    fprintf(w->header, "],\"data_offsets\":[%lld,%lld]}", (long long)w->offset,
            (long long)(w->offset + 4 * count));
    w->offset += 4 * count;
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    const float number = columns ? size * ((float)(w->random >> 40) / 8388608 - 1) : 1;
    fwrite(&number, sizeof number, 1, w->file);
  }
}

static void write_model(const char *path, const int64_t *shape) {
  const int64_t layers = shape[0], width = shape[1], heads = shape[2], kv_heads = shape[3],
                hidden = shape[4], vocabulary = shape[5];
  if (layers < 1 || heads < 1 || width % heads || kv_heads < 1 || heads % kv_heads || hidden < 1 ||
      vocabulary < 1 || width / heads % 2) {
    fail(
        "a model has layers, heads that divide the width evenly, kv heads that divide the heads, a "
        "hidden width and a vocabulary");
  }
  const int64_t kv_width = width / heads * kv_heads;
  const float from_width = sqrtf(3.0f / (float)width),
              from_hidden = sqrtf(3.0f / (float)hidden); /* rows keep their variance */
  const struct {
    const char *name;
    int64_t rows, columns;
    float size;
  } parts[] = {{"self_attn.q_proj", width, width, from_width},
               {"self_attn.k_proj", kv_width, width, from_width},
               {"self_attn.v_proj", kv_width, width, from_width},
               {"self_attn.o_proj", width, width, from_width},
               {"mlp.gate_proj", hidden, width, from_width},
               {"mlp.up_proj", hidden, width, from_width},
               {"mlp.down_proj", width, hidden, from_hidden},
               {"input_layernorm", width, 0, 1},
               {"post_attention_layernorm", width, 0, 1}};
  struct writer w = {.file = fopen(path, "wb"), .random = 1};
  char *header = NULL;
  size_t bytes = 0;
  if (!w.file || !(w.header = open_memstream(&header, &bytes))) fail("%s cannot be written", path);
  fputc('{', w.header);
  for (int pass = 0; pass < 2; pass++) {
    write_tensor(&w, "model.embed_tokens.weight", vocabulary, width, sqrtf(3));
    for (int64_t l = 0; l < layers; l++) {
      for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[80];
        snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)l, parts[i].name);
        write_tensor(&w, name, parts[i].rows, parts[i].columns, parts[i].size);
      }
    }
    write_tensor(&w, "model.norm.weight", width, 0, 1);
    write_tensor(&w, "lm_head.weight", vocabulary, width, from_width);
    if (pass) break;
    fputc('}', w.header);
    while (ftell(w.header) % 8) fputc(' ', w.header); /* numbers are to lie where a float may */
    fclose(w.header);
    w.header = NULL;
    for (int i = 0; i < 8; i++) fputc((int)((uint64_t)bytes >> 8 * i & 255), w.file);
    fwrite(header, 1, bytes, w.file);
  }
  free(header);
  if (ferror(w.file) | fclose(w.file)) fail("%s cannot be written", path);
}

/* ---- All ways to the same tokens */

enum {
  prompt_tokens = 75,
  new_tokens = 24,
  draft_tokens = 4,
  positions = 128,
  all = prompt_tokens + new_tokens
};

struct result {
  int32_t tokens[all + 1]; /* the prompt, then what the model chose */
  float *logits;           /* [new_tokens][vocabulary] */
};

static int same(const char *what, const struct decoder *d, const struct result *a,
                const struct result *b) {
  const size_t bytes = new_tokens * (size_t)d->model->vocabulary * sizeof(float);
  const int is_same = memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0 &&
                      memcmp(a->logits, b->logits, bytes) == 0;
  printf("%s: %s\n", what, is_same ? "the same bits" : "other bits");
  return is_same;
}

/* Chooses token i, from logits, and keeps both. */
static void choose(const struct decoder *d, struct result *r, int i, const float *logits) {
  memcpy(r->logits + (i - prompt_tokens) * d->model->vocabulary, logits,
         (size_t)d->model->vocabulary * sizeof *logits);
  r->tokens[i] = largest(logits, d->model->vocabulary);
}

/* Tokens are guessed, by a smaller model say, and the model looks at all guesses in one call: each
 * right one is a token for which the weights need not be read. Those behind the first wrong one are
 * taken back. */
static void generate_with_drafts(struct decoder *d, int64_t sequence, struct result *r,
                                 const struct result *guesses) {
  for (int i = prompt_tokens; i < all;) { /* token i is chosen, and not yet in the sequence */
    int32_t piece[1 + draft_tokens] = {r->tokens[i - 1]};
    const int drafts = i + draft_tokens < all ? draft_tokens : all - 1 - i;
    for (int k = 0; k < drafts; k++)
      piece[1 + k] = guesses->tokens[i + k] ^ (k == i % 4); /* in most calls one is wrong */
    const float *const logits =
        decoder_run(d, &(struct piece){sequence, piece, 1 + drafts, 1 + drafts}, 1);
    const int first = i;
    do choose(d, r, i, logits + (i - first) * d->model->vocabulary);
    while (i++ < first + drafts && piece[i - first] == r->tokens[i - 1]);
    decoder_truncate(d, sequence, i - 1); /* all but the last token that is right */
  }
}

/* HEADS, or HEADS,ROPE_THETA */
static int64_t heads_of(const char *word, double *rope_base) {
  char *end;
  const int64_t heads = strtoll(word, &end, 10);
  *rope_base = *end == ',' ? strtod(end + 1, &end) : 10000;
  if (*end) fail("%s is no number of heads, with a comma and rope_theta after it or without", word);
  return heads;
}

static int check_model(const char *path, const char *heads_word) {
  struct model m;
  struct pool pool;
  struct decoder d;
  double rope_base;
  const int64_t heads = heads_of(heads_word, &rope_base);
  model_load(&m, path, heads, rope_base, 0, 0, MHA_ARITHMETIC_F32);
  pool_start(&pool, 1);
  const mha_scheduler scheduler = {
      .context = &pool, .num_threads = pool.num_workers + 1, .parallel_for = parallel_for};
  decoder_make(&d, &m, &scheduler, 4, positions, 0, 0, MHA_ARITHMETIC_F32);
  struct result at_once, others[4], *r = others;
  memset(&at_once, 0, sizeof at_once);
  memset(others, 0, sizeof others);
  at_once.logits = allocate(new_tokens * m.vocabulary, sizeof(float));
  for (int i = 0; i < 4; i++) others[i].logits = allocate(new_tokens * m.vocabulary, sizeof(float));
  for (int i = 0; i < prompt_tokens; i++) at_once.tokens[i] = (int32_t)(i * i % 31 % m.vocabulary);
  for (int i = 0; i < 4; i++) memcpy(others[i].tokens, at_once.tokens, sizeof at_once.tokens);

  const float *logits = append(&d, 0, at_once.tokens, prompt_tokens);
  printf("tokens:");
  for (int i = prompt_tokens; i < all; i++, logits = append(&d, 0, &at_once.tokens[i - 1], 1)) {
    choose(&d, &at_once, i, logits);
    printf(" %d", (int)at_once.tokens[i]);
  }
  printf("\n");

  for (int i = 0; i < prompt_tokens; i++) logits = append(&d, 1, &r->tokens[i], 1);
  for (int i = prompt_tokens; i < all; i++, logits = append(&d, 1, &r->tokens[i - 1], 1))
    choose(&d, r, i, logits);
  int is_same = same("one token at a time", &d, &at_once, r);

  /* Two sequences share the first 70 tokens of the first one. Both go on in the same calls, which
   * copies the last 6 for each. */
  r = &others[1];
  decoder_share(&d, 0, 2, 70);
  decoder_share(&d, 0, 3, 70);
  int32_t last[2] = {0, 5};
  struct piece pieces[] = {{2, r->tokens + 70, prompt_tokens - 70, 1}, {3, &last[1], 1, 1}};
  for (int i = prompt_tokens; i < all; i++) {
    logits = decoder_run(&d, pieces, 2);
    choose(&d, r, i, logits);
    last[0] = r->tokens[i];
    last[1] = largest(logits + m.vocabulary, m.vocabulary);
    pieces[0] = (struct piece){2, &last[0], 1, 1};
  }
  is_same &= same("a shared prefix, beside another sequence", &d, &at_once, r);

  decoder_truncate(&d, 1, prompt_tokens - 1);
  generate_with_drafts(&d, 1, &others[2], &at_once);
  is_same &= same("wrong drafts taken back", &d, &at_once, &others[2]);

  /* The first sequence goes back into what it shares, while another one goes on with it. */
  decoder_truncate(&d, 0, 40);
  logits = append(&d, 0, others[3].tokens + 40, prompt_tokens - 40);
  for (int i = prompt_tokens; i < all; i++, logits = append(&d, 0, &others[3].tokens[i - 1], 1))
    choose(&d, &others[3], i, logits);
  is_same &= same("back into a shared prefix", &d, &at_once, &others[3]);

  for (int s = 0; s < 4; s++) decoder_truncate(&d, s, 0);
  for (int64_t b = 0; b < d.num_blocks; b++) {
    if (d.users[b] != 0) fail("block %lld is left over", (long long)b);
  }
  for (int i = 0; i < 4; i++) free(others[i].logits);
  free(at_once.logits);
  decoder_free(&d);
  pool_stop(&pool);
  model_free(&m);
  return is_same ? 0 : 1;
}

/* ---- The program */

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static uint32_t index_of(const char *word, const char *const *words, int count,
                         const char *complaint) {
  for (int i = 0; i < count; i++) {
    if (strcmp(words[i], word) == 0) return (uint32_t)i;
  }
  fail(complaint, word);
  return 0;
}

/* Writes COUNT tokens, each the one with the largest logit. */
static void write_tokens(struct decoder *d, const int32_t *prompt, int prompt_count, int count,
                         const char *logits_path) {
  FILE *const logits_file = logits_path ? fopen(logits_path, "wb") : NULL;
  if (logits_path && !logits_file) fail("%s cannot be written", logits_path);
  const int64_t vocabulary = d->model->vocabulary;
  double start = seconds(), prompt_seconds = 0;
  const float *logits = append(d, 0, prompt, prompt_count);
  for (int i = 0; i < count; i++) {
    const int32_t token = largest(logits, vocabulary);
    if (logits_file) fwrite(logits, sizeof *logits, (size_t)vocabulary, logits_file);
    printf("%d%c", (int)token, i + 1 < count ? ' ' : '\n');
    if (i == 0) {
      prompt_seconds = seconds() - start;
      start = seconds();
    }
    if (i + 1 < count) logits = append(d, 0, &token, 1);
  }
  fprintf(stderr, "prompt %.6f s, token %.6f s\n", prompt_seconds,
          count > 1 ? (seconds() - start) / (count - 1) : 0);
  if (logits_file) fclose(logits_file);
}

static void write_scores(struct decoder *d, const int32_t *tokens, int count, int window) {
  const int64_t vocabulary = d->model->vocabulary;
  for (; count >= window; tokens += window, count -= window) {
    decoder_truncate(d, 0, 0);
    append(d, 0, tokens, window / 2);
    for (int i = window / 2, rows; i + 1 < window; i += rows) {
      rows = window - 1 - i < most_wanted ? window - 1 - i : most_wanted;
      const float *logits = decoder_run(d, &(struct piece){0, tokens + i, rows, rows}, 1);
      for (int r = 1; r <= rows; r++, logits += vocabulary) {
        const double most = logits[largest(logits, vocabulary)];
        double sum = 0;
        for (int64_t v = 0; v < vocabulary; v++) sum += exp(logits[v] - most);
        printf("%.7f%c", logits[check_token(d->model, tokens[i + r])] - most - log(sum),
               i + r + 1 < window ? ' ' : '\n');
      }
    }
  }
}

/* words: FILE HEADS PROMPT COUNT THREADS TYPE ARITHMETIC, and LOGITS or KEYS VALUES ATTENTION or
   NULL */
static int run(int is_score, const char *const *words) {
  static const char *const types[] = {"file", "f32",  "f16",
                                      "bf16", "int8", "int4"}; /* 0, then MHA_TYPE_* */
  static const char *const arithmetics[] = {"f32", "int8", "int16", "bf16"};
  static const uint32_t arithmetic_types[] = {MHA_ARITHMETIC_F32, MHA_ARITHMETIC_INT8,
                                              MHA_ARITHMETIC_INT16, MHA_ARITHMETIC_BF16};
  char type[8] = "";
  uint32_t group_size = 0;
  sscanf(words[5], "%7[^/]/%" SCNu32, type, &group_size);
  const uint32_t weight_type =
      index_of(type, types, 6, "%s is no type of weights; file, f32, f16, bf16, int8 or int4 is");
  const uint32_t arithmetic = arithmetic_types[index_of(
      words[6], arithmetics, 4, "%s is no arithmetic; f32, int16, int8 or bf16 is")];
  uint32_t cache_types[2] = {0, 0}; /* of keys, of values */
  for (int i = 0; i < 2 && is_score && words[7 + i]; i++) {
    cache_types[i] = 1 + index_of(words[7 + i], types + 1, 5,
                                  "%s is no type of caches; f32, f16, bf16, int8 or int4 is");
  }
  uint32_t attention_arithmetic = MHA_ARITHMETIC_F32;
  if (is_score && words[7] && words[8] && words[9]) {
    attention_arithmetic = arithmetic_types[index_of(
        words[9], arithmetics, 4, "%s is no arithmetic of attention; f32 or int16 is")];
  }
  enum { most = 1 << 20 };
  static int32_t tokens[most];
  int prompt = 0;
  FILE *const prompt_file = fopen(words[2], "r");
  if (!prompt_file) fail("%s: cannot be read", words[2]);
  while (prompt < most && fscanf(prompt_file, "%d", &tokens[prompt]) == 1) prompt++;
  if (prompt == 0 || !feof(prompt_file))
    fail("%s: numbers of tokens are expected, one to %d", words[2], most);
  fclose(prompt_file);
  const int count = atoi(words[3]), threads = atoi(words[4]);
  if (count < 1 || threads < 1)
    fail("the number of tokens to write and the number of threads are 1 or more");
  if (is_score && (count < 4 || count > prompt))
    fail("a window has 4 tokens or more, and at most the %d of %s", prompt, words[2]);
  struct model m;
  struct decoder d;
  struct pool pool;
  double rope_base;
  const int64_t heads = heads_of(words[1], &rope_base);
  model_load(&m, words[0], heads, rope_base, weight_type, group_size, arithmetic);
  pool_start(&pool, (uint32_t)threads - 1);
  const mha_scheduler scheduler = {
      .context = &pool, .num_threads = pool.num_workers + 1, .parallel_for = parallel_for};
  decoder_make(&d, &m, threads > 1 ? &scheduler : NULL, 1, is_score ? count : prompt + count,
               cache_types[0], cache_types[1], attention_arithmetic);
  if (is_score)
    write_scores(&d, tokens, prompt, count);
  else
    write_tokens(&d, tokens, prompt, count, words[7]);
  decoder_free(&d);
  pool_stop(&pool);
  model_free(&m);
  return 0;
}

int main(int count, char **words) {
  const char *const command = count > 1 ? words[1] : "";
  int64_t numbers[6] = {3, 64, 8, 4, 160, 96}; /* of the small model */
  if (strcmp(command, "write") == 0 && count == 9) {
    for (int i = 0; i < 6; i++) numbers[i] = atoll(words[3 + i]);
    write_model(words[2], numbers);
    return 0;
  }
  const int is_score = strcmp(command, "score") == 0;
  if ((is_score || strcmp(command, "run") == 0) && count >= 6 && count <= 10 + 2 * is_score) {
    const char *given[10] = {0, 0, 0, 0, "1", "file", "f32"};
    for (int i = 2; i < count; i++) given[i - 2] = words[i];
    return run(is_score, given);
  }
  if (strcmp(command, "check") == 0 && count == 4) return check_model(words[2], words[3]);
  if (count > 1) {
    fail(
        "decoder [write FILE LAYERS WIDTH HEADS KV_HEADS HIDDEN VOCABULARY | run FILE HEADS PROMPT "
        "COUNT [THREADS [TYPE [ARITHMETIC [LOGITS]]]] | score FILE HEADS TOKENS COUNT [THREADS "
        "[TYPE [ARITHMETIC [KEYS [VALUES [ATTENTION]]]]]] | check FILE HEADS]");
  }
  char path[] = "/tmp/mha-decoder-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0) fail("%s cannot be written", path);
  close(file);
  write_model(path, numbers);
  const int result = check_model(path, "8");
  unlink(path);
  return result;
}
