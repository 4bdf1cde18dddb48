/*
 * Attention over a long sequence whose keys are spread over the processes of an MPI job. See --help
 * and src/docs/machines.md.
 *
 * The chunks of 256 keys are cut into equal subtrees, of which each process holds some that follow
 * each other. A step is one layer for one token or more: queries go from process 0 to all, each
 * process computes the partials of its keys, and partials go up the tree to the first process of
 * each group of heads, which makes rows of context of them. So the bits are those of one call, for
 * any number of processes.
 */
#include <mha.h>
#include <mpi.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  tag_step = 1,
  tag_partials,
  tag_output,
  tag_report,
  tag_failure,
  chunk_keys = 256,
  max_leaves = 1 << 14
};
enum { keys, heads, kv_heads, head_dim, head_dim_v, queries, groups, repeats, timeout, num_sizes };
static const char *const names[] = {"keys",    "heads",  "kv-heads", "head-dim", "head-dim-v",
                                    "queries", "groups", "repeats",  "timeout"};
static int64_t size[num_sizes] = {65536, 8, 2, 128, 128, 1, 1, 5, 10}, fault_rank = -1;
static const char *fault = "";

/* Every message begins with this, but for those of failures, which are a text. number: of bytes
 * sent; -1: the last step is over. */
typedef struct header {
  int64_t size[num_sizes], number;
} header;

static int rank, ranks, parts, part, levels, checks; /* parts: processes of a group */
static int64_t leaves, used_leaves, leaf_keys, bytes_sent, step;
static double computing;    /* seconds */
static float *partials[16]; /* one for each level of the tree, the uppermost first */
static int64_t own_heads(void) { return size[heads] / size[groups]; }
static int64_t partial_floats(void) { return own_heads() * size[queries] * (size[head_dim_v] + 2); }
static int is_faulty(const char *how) {
  return rank == fault_rank && step == 1 && !strcmp(fault, how);
}

/* ---- Failures: the process that finds one says it and tells all others, which say it too. Then
 * the job ends. */

static void end_after_failure(void) {
  MPI_Request all;
  const double end = MPI_Wtime() + (double)size[timeout];
  MPI_Ibarrier(MPI_COMM_WORLD, &all);
  for (int is_done = 0; !is_done && MPI_Wtime() < end; sched_yield())
    MPI_Test(&all, &is_done, MPI_STATUS_IGNORE);
  usleep(100000); /* for what was printed to be passed on */
  MPI_Abort(MPI_COMM_WORLD, 3);
}

static void fail(const char *format, ...) {
  static char text[256];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  fprintf(stderr, "mha_mpi: rank %d: %s\n", rank, text);
  MPI_Request request;
  for (int to = 0; to < ranks; ++to) {
    if (to != rank)
      MPI_Isend(text, sizeof text, MPI_BYTE, to, tag_failure, MPI_COMM_WORLD, &request);
  }
  end_after_failure();
}

/* To be called while something is waited for. */
static void wait_until(double end, const char *what, int from) {
  MPI_Status status;
  char text[256];
  int is_there;
  MPI_Iprobe(MPI_ANY_SOURCE, tag_failure, MPI_COMM_WORLD, &is_there, &status);
  if (!is_there && MPI_Wtime() > end) fail("rank %d %s within the time-out", from, what);
  if (!is_there) return (void)sched_yield();
  MPI_Recv(text, sizeof text, MPI_BYTE, status.MPI_SOURCE, tag_failure, MPI_COMM_WORLD,
           MPI_STATUS_IGNORE);
  fprintf(stderr, "mha_mpi: rank %d stops because rank %d failed: %s\n", rank, status.MPI_SOURCE,
          text);
  end_after_failure();
}

static void check(mha_status status, const mha_error *error) {
  if (status != MHA_OK) fail("%s", error->message);
}

static void *allocate(size_t bytes) {
  void *memory = NULL;
  if (posix_memalign(&memory, 64, bytes + 64))
    fail("there is no memory for %zu bytes; use more processes", bytes);
  return memory;
}
static float *floats(int64_t count) { return allocate((size_t)count * sizeof(float)); }
static void copy(const float *from, int64_t count, void *to) {
  if (count > 0) memcpy(to, from, (size_t)count * sizeof(float));
}

/* ---- Messages, for which none waits longer than `seconds` */

static void send(int to, int tag, int64_t number, const float *numbers, int64_t count) {
  const int bytes = (int)(sizeof(header) + (size_t)count * sizeof(float));
  header *const message = allocate((size_t)bytes);
  memcpy(message->size, size, sizeof size);
  message->size[head_dim_v] += is_faulty("shape"), message->number = number;
  copy(numbers, count, message + 1);
  MPI_Request request;
  const double end = MPI_Wtime() + (double)size[timeout];
  MPI_Isend(message, bytes, MPI_BYTE, to, tag, MPI_COMM_WORLD, &request);
  for (int is_done; MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), !is_done;)
    wait_until(end, "receives no message", to);
  free(message);
  bytes_sent += bytes;
}

static int64_t receive(int from, int tag, int64_t seconds, float *numbers, int64_t count) {
  MPI_Status status;
  int bytes;
  const double end = MPI_Wtime() + (double)seconds;
  for (int is_there; MPI_Iprobe(from, tag, MPI_COMM_WORLD, &is_there, &status), !is_there;)
    wait_until(end, "sends nothing", from);
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  header *const message = allocate((size_t)bytes);
  MPI_Recv(message, bytes, MPI_BYTE, from, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  for (int i = 0; i < num_sizes; ++i) {
    if (message->size[i] == size[i]) continue;
    fail("rank %d has --%s %ld, but this rank has %ld; start all with the same value", from,
         names[i], message->size[i], size[i]);
  }
  const int64_t number = message->number;
  if (number >= 0) copy((const float *)(message + 1), count, numbers);
  free(message);
  return number;
}

/* ---- Keys, values and queries: the same numbers in every process, by their place */

static void fill(int64_t first, int64_t count, float *numbers) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t mixed = (uint64_t)(first + i) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9u;
    numbers[i] = (float)(int32_t)(mixed >> 32) * 0x1p-31f;
  }
}

/* A cache of f16 of the keys [first, first + count), of kv heads that are to be attended to. */
static mha_kv_cache *make_cache(int64_t first, int64_t count, int64_t first_head,
                                int64_t num_heads) {
  mha_kv_cache_config config = {.struct_size = sizeof config,
                                .num_sequences = 1,
                                .capacity = count,
                                .num_kv_heads = num_heads};
  config.head_dim = size[head_dim], config.head_dim_v = size[head_dim_v],
  config.k_type = MHA_TYPE_F16;
  mha_error error;
  size_t bytes;
  mha_kv_cache *cache;
  check(mha_kv_cache_size(&config, &bytes, &error), &error);
  check(mha_kv_cache_init(&config, allocate(bytes), bytes, &cache, &error), &error);
  float *const k = floats(num_heads * size[head_dim]);
  float *const v = floats(num_heads * size[head_dim_v]);
  for (int64_t j = first; j < first + count; ++j) {
    fill((j * size[kv_heads] + first_head) * size[head_dim], num_heads * size[head_dim], k);
    fill(((j + size[keys]) * size[kv_heads] + first_head) * size[head_dim_v],
         num_heads * size[head_dim_v], v);
    check(mha_kv_cache_append(cache, 0, 1, k, v, &error), &error);
  }
  free(k), free(v);
  return cache;
}

/* Attention over a cache that begins at key `first`, for some heads, to partials or to output. */
static void attend(const mha_kv_cache *cache, int64_t first, int64_t first_head, int64_t num_heads,
                   const float *q, float *to_partials, const mha_score_options *score,
                   float *output) {
  static void *workspace;
  static size_t workspace_bytes;
  const int64_t start = size[keys] - size[queries];
  const mha_sequences sequences = {.struct_size = sizeof sequences, .q_first_positions = &start};
  const mha_outputs outputs = {.struct_size = sizeof outputs, .partials = to_partials};
  mha_attention_args args = {
      .struct_size = sizeof args, .call.n_q = size[queries], .num_heads = num_heads};
  args.num_kv_heads = num_heads * size[kv_heads] / size[heads], args.head_dim = size[head_dim],
  args.head_dim_v = size[head_dim_v];
  args.q.data = q + first_head * size[head_dim];
  args.q.strides = (mha_strides){.row = size[heads] * size[head_dim], .head = size[head_dim]};
  args.call.flags = MHA_CAUSAL, args.call.sequences = &sequences, args.call.cache_read = cache,
  args.kv_first_position = first;
  args.call.outputs = &outputs, args.call.score = score, args.output.data = output;
  if (is_faulty("fail")) args.kv_first_position = -1;
  mha_error error;
  size_t bytes;
  check(mha_attention_workspace(&args, &bytes, &error), &error);
  if (bytes > workspace_bytes) free(workspace), workspace = allocate(workspace_bytes = bytes);
  check(mha_attention(&args, workspace, workspace_bytes, &error), &error);
}

/* ---- The tree */

static int owner_of(int64_t leaf) { return (int)(((leaf + 1) * parts - 1) / used_leaves); }

/* The partials of the leaves [first, end), which are a subtree, or the end of one: a call over a
 * cache of their own. */
static void run_leaves(int64_t first, int64_t end, const float *q, float *to) {
  static mha_kv_cache *caches[max_leaves];
  const int64_t begin = first * leaf_keys,
                stop = end * leaf_keys < size[keys] ? end * leaf_keys : size[keys];
  const int64_t first_head = rank / parts * own_heads(), group = size[heads] / size[kv_heads];
  if (!caches[first])
    caches[first] = make_cache(begin, stop - begin, first_head / group, own_heads() / group);
  const double start = MPI_Wtime();
  attend(caches[first], begin, first_head, own_heads(), q, to, NULL, NULL);
  computing += MPI_Wtime() - start;
}

/* The partials of a subtree: in the process that has its first leaf, at partials[level]. */
static void run_tree(int64_t first, int64_t count, int level, const float *q) {
  const int64_t end = first + count < used_leaves ? first + count : used_leaves,
                middle = first + count / 2;
  const int left = owner_of(first), base = rank - part;
  if (left == owner_of(end - 1))
    return left == part ? run_leaves(first, end, q, partials[level]) : (void)0;
  if (middle >= end) return run_tree(first, count / 2, level, q);
  const int right = owner_of(middle);
  run_tree(first, count / 2, level, q);
  run_tree(middle, count / 2, level + 1, q);
  mha_error error;
  if (part == right && left != right)
    send(base + left, tag_partials, 0, partials[level + 1], partial_floats());
  if (part != left) return;
  int64_t below = 1; /* levels of processes, each of which may take its time */
  for (int n = owner_of(end - 1) - right; n > 0; n /= 2) ++below;
  if (left != right)
    receive(base + right, tag_partials, below * size[timeout], partials[level + 1],
            partial_floats());
  const int64_t rows = own_heads() * size[queries];
  check(mha_partials_merge(rows, size[head_dim_v], partials[level], partials[level + 1],
                           partials[level], 0, &error),
        &error);
}

/* Passes queries, or the end, on to the processes that are below this one in a binomial tree. */
static void pass_on(int64_t number, const float *q, int64_t count) {
  for (int apart = 1; rank + apart < ranks && (rank & apart) == 0; apart *= 2)
    send(rank + apart, tag_step, number, q, count);
}

/* One layer for these queries. output: [queries, heads, head_dim_v], in process 0. */
static void run_step(const float *q, const float *sinks, float *output) {
  if (is_faulty("hang")) sleep(600);
  pass_on(0, q, size[queries] * size[heads] * size[head_dim]);
  run_tree(0, leaves, 0, q);
  if (part != 0) return;
  const int64_t width = own_heads() * size[head_dim_v], all = size[queries] * width;
  float *const finished = floats(all);
  mha_partials_args args = {
      .struct_size = sizeof args, .batch = 1, .num_heads = own_heads(), .n_q = size[queries]};
  args.head_dim_v = size[head_dim_v], args.partials = partials[0],
  args.sinks = sinks + rank / parts * own_heads(), args.output.data = finished;
  mha_error error;
  check(mha_partials_finish(&args, &error), &error);
  if (rank != 0) send(0, tag_output, 0, finished, all);
  for (int group = 0; rank == 0 && group < size[groups]; ++group) {
    if (group > 0) receive(group * parts, tag_output, (levels + 2) * size[timeout], finished, all);
    for (int64_t i = 0; i < size[queries]; ++i)
      copy(finished + i * width, width, output + (i * size[groups] + group) * width);
  }
  free(finished);
}

/* ---- The program */
static void run_job(void) {
  const int64_t rows = size[queries] * size[heads], q_floats = rows * size[head_dim],
                out_floats = rows * size[head_dim_v];
  float *const q = floats(q_floats), *const sinks = floats(size[heads]);
  float *const results = floats(out_floats * (size[repeats] + 1)), *const once = floats(out_floats);
  /* The least of a step, what it takes besides the keys of rank 0, the least of one call. */
  double time = 1e9, beside = 0, alone = 1e9;
  for (int level = 0; level < 16; ++level) partials[level] = floats(partial_floats());
  fill(1 << 20, size[heads], sinks);
  if (rank != 0) {
    const int64_t wait = (levels + 3) * size[timeout];
    for (step = 0; receive(rank & (rank - 1), tag_step, wait, q, q_floats) >= 0; ++step)
      run_step(q, sinks, NULL);
    send(0, tag_report, bytes_sent, NULL, 0);
    return pass_on(-1, NULL, 0);
  }
  for (step = 0; step <= size[repeats];
       ++step) { /* the first one makes caches, and is not counted */
    fill(-(step + 1) * q_floats, q_floats, q);
    const double start = MPI_Wtime(), computed = computing;
    run_step(q, sinks, results + step * out_floats);
    const double taken = MPI_Wtime() - start;
    if (step > 0 && taken < time) time = taken, beside = taken - (computing - computed);
  }
  int64_t bytes = bytes_sent;
  pass_on(-1, NULL, 0);
  for (int from = 1; from < ranks; ++from)
    bytes += receive(from, tag_report, (levels + 2) * size[timeout], NULL, 0);
  uint64_t checksum = 0xcbf29ce484222325u;
  const unsigned char *const end =
      (const unsigned char *)(results + out_floats * (size[repeats] + 1));
  for (const unsigned char *byte = (const unsigned char *)results; byte < end; ++byte)
    checksum = (checksum ^ *byte) * 0x100000001b3u;
  const int64_t cached = 2 * size[keys] * size[kv_heads] * (size[head_dim] + size[head_dim_v]);
  const double sent = (double)bytes / (double)((size[repeats] + 1) * size[queries]);
  printf("%d ranks: %ld head groups of %d parts, %ld subtrees of %ld keys\n", ranks, size[groups],
         parts, used_leaves, leaf_keys);
  printf("checksum %016lx\nbytes sent per layer and token: %.0f, beside %ld of keys and values\n",
         checksum, sent, cached);
  printf("time of a step: %.1f us (least of %ld)\n", 1e6 * time, size[repeats]);
  if (!checks) return;
  mha_kv_cache *const cache = make_cache(0, size[keys], 0, size[kv_heads]);
  const mha_score_options score = {.struct_size = sizeof score, .sinks = sinks};
  for (step = 0; step <= size[repeats]; ++step) {
    fill(-(step + 1) * q_floats, q_floats, q);
    const double start = MPI_Wtime();
    attend(cache, 0, 0, size[heads], q, NULL, &score, once);
    if (step > 0 && MPI_Wtime() - start < alone) alone = MPI_Wtime() - start;
    if (memcmp(once, results + step * out_floats, (size_t)out_floats * sizeof *once))
      fail("step %ld: its bits differ from one call", step);
  }
  const double a = levels > 0 ? beside / levels : 0, hundred = alone / 100 + 7 * a;
  printf("one call on one rank: %.1f us, the same bits; efficiency of %d: %.0f%%\n", 1e6 * alone,
         ranks, 100 * alone / (ranks * time));
  printf(
      "t(P) = t(1) / P + ceil(log2 P) * a; a = %.1f us, what a step takes beside the keys of rank "
      "0, a level\n",
      1e6 * a);
  printf("t(100) = %.1f us: %.1f times as fast as one, efficiency %.0f%%\n", 1e6 * hundred,
         alone / hundred, alone / hundred);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv), MPI_Comm_rank(MPI_COMM_WORLD, &rank),
      MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (int i = 1; i < argc; ++i) {
    int64_t *to = NULL;
    for (int n = 0; n < num_sizes; ++n)
      to = !strncmp(argv[i], "--", 2) && !strcmp(argv[i] + 2, names[n]) ? &size[n] : to;
    if (to && i + 1 < argc && (*to = atoll(argv[++i])) > 0) continue;
    if (!to && !strcmp(argv[i], "--check") && (checks = 1)) continue;
    if (!to && !strcmp(argv[i], "--fault") && i + 2 < argc &&
        (fault_rank = atoll(argv[i + 1]), fault = argv[i += 2]))
      continue;
    if (rank == 0) {
      printf(
          "mpirun -n N mha_mpi [--keys N] [--heads N] [--kv-heads N] [--head-dim N] [--head-dim-v "
          "N]\n"
          "                    [--queries N] [--groups N] [--repeats N] [--timeout SECONDS] "
          "[--check]\n"
          "                    [--fault RANK fail|shape|hang]\n\n"
          "Computes the attention of the last queries to keys that are distributed over the N "
          "processes.\n"
          "--groups also divides the heads into groups, each with its share of the processes. "
          "--check\n"
          "computes the same in one call on rank 0, and compares bits and time. --fault is for "
          "tests.\n"
          "Exit codes: 0 success, 2 wrong arguments, 3 a process failed, which all others "
          "report.\n");
    }
    MPI_Finalize();
    return strcmp(argv[i], "--help") ? 2 : 0;
  }
  parts = ranks / (int)size[groups], part = parts > 0 ? rank % parts : 0;
  for (leaves = 1; leaves * chunk_keys < size[keys] && leaves < 16 * parts && leaves < max_leaves;
       leaves *= 2)
    continue;
  for (leaf_keys = chunk_keys; leaf_keys * leaves < size[keys]; leaf_keys *= 2) continue;
  used_leaves = (size[keys] + leaf_keys - 1) / leaf_keys;
  while (1 << levels < parts) ++levels;
  const int are_whole = ranks % size[groups] == 0 && size[kv_heads] % size[groups] == 0 &&
                        size[heads] % size[kv_heads] == 0;
  if (!are_whole || used_leaves < parts || size[queries] > size[keys])
    fail(
        "--groups must divide the %d processes and --kv-heads, that --heads; and --keys must be "
        "256 for each process of a group",
        ranks);
  run_job();
  MPI_Finalize();
  return 0;
}
