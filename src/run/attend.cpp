#include "attend.h"

#include <string.h>

#include <algorithm>

#include "../storage.h"

namespace mha {
namespace {

// ---- Units of the attention

// Cuts the queries of the longest sequence into blocks as equal as possible; a unit of work is one
// block of queries with all query heads of one kv head, or of several (cut_heads), and all keys or
// a part of them (split_keys). Large blocks use each key and value for many rows. Several units for
// each thread keep all threads busy, so that a late thread does not hold up the others. Blocks
// become smaller than preferred_block only where splitting the keys does not make enough units.
void cut_queries(const AttentionRequest &request, const AttentionPlan &plan, int64_t longest_q,
                 int64_t num_threads, AttentionRun *run) {
  const int64_t largest = largest_block(longest_q, request);
  int64_t block = largest, parts = 1;
  const int64_t heads = std::max<int64_t>(1, request.batch * request.num_kv_heads),
                wanted = num_threads * units_per_thread, per_head = blocks_of(wanted, heads);
  const bool is_causal = request.window_right < run->longest_kv;
  if (num_threads > 1 && blocks_of(longest_q, block) < per_head) {
    const auto block_of = [&](int64_t blocks, int64_t fewest) {
      return std::max(blocks_of(longest_q, blocks), std::min(fewest, largest));
    };
    block = block_of(per_head, preferred_block(request));
    // A causal mask leaves out half of the chunks.
    const int64_t chunks = std::max<int64_t>(1, blocks_of(run->longest_kv, chunk_keys)),
                  left = is_causal ? chunks / 2 + 1 : chunks;
    parts = plan.may_split_keys ? left : 1;
    if (blocks_of(longest_q, block) * parts < per_head)
      block = block_of(blocks_of(per_head, parts), smallest_block(request));
  }
  // Without a causal mask all units take about as long, so that threads wait for those with one
  // unit more. Of the possible numbers of blocks, the one that ends first is taken.
  const int64_t blocks = blocks_of(longest_q, block);
  const bool is_enough = blocks >= per_head;
  if (num_threads > 1 && !is_causal && (parts == 1 || is_enough)) {
    const auto time_of = [&](int64_t of) {
      return blocks_of(heads * of, num_threads) * (blocks_of(longest_q, of) + max_attend_rows);
    };
    const int64_t most = std::max(blocks, blocks_of(longest_q, preferred_block(request)));
    int64_t least = time_of(blocks);
    for (int64_t of = is_enough ? blocks : blocks_of(longest_q, largest); of <= most; ++of) {
      if (time_of(of) >= least) continue;
      least = time_of(of);
      block = blocks_of(longest_q, of);
    }
  }
  run->block_queries = longest_q > 0 ? blocks_of(longest_q, blocks_of(longest_q, block)) : 1;
  run->query_blocks = blocks_of(longest_q, run->block_queries);
}

// Units of few rows over the caller's own arrays have several kv heads, whose rows of one position
// lie side by side in memory, or all of them if the keys can be split between threads. Several
// threads need units for each of them, for which heads are divided first.
void cut_heads(const AttentionRequest &request, const AttentionPlan &plan, int64_t num_threads,
               AttentionRun *run) {
  run->unit_kv_heads = 1;
  const int64_t rows = run->block_queries * request.heads_per_kv;
  if (!plan.reads_rows || rows > max_few_rows) return;
  const int64_t parts = plan.may_split_keys ? run->longest_kv / (min_part_chunks * chunk_keys) : 1;
  const int64_t wanted = num_threads > 1 ? num_threads * units_per_thread : 1;
  const int64_t groups = blocks_of(wanted, std::max<int64_t>(1, request.batch * run->query_blocks *
                                                                    std::max<int64_t>(1, parts)));
  run->unit_kv_heads = std::min(most_kv_heads(request, padded_rows(rows)),
                                std::max<int64_t>(1, request.num_kv_heads / groups));
}

// How many units the kv heads of one block of queries make.
int64_t kv_groups(const AttentionRequest &request, const AttentionRun &run) {
  return blocks_of(request.num_kv_heads, run.unit_kv_heads);
}

int64_t whole_units(const AttentionRequest &request, const AttentionRun &run) {
  return request.batch * kv_groups(request, run) * run.query_blocks;
}

// Few queries, such as one token of one sequence, may make fewer units than threads need. Then the
// keys of each unit are split too. A part is a power of two of chunks, hence a subtree of the
// contract's tree of partials, so that results keep their bits.
void split_keys(const AttentionRequest &request, const AttentionPlan &plan, int64_t num_threads,
                AttentionRun *run) {
  run->parts.count = run->parts.chunks = 1;
  const int64_t units = whole_units(request, *run);
  const int64_t wanted = num_threads * units_per_thread;
  const int64_t chunks = blocks_of(run->longest_kv, chunk_keys);
  // The workspace has no place for partials of larger units, of which there are enough.
  const bool are_small = run->block_queries <= preferred_block(request);
  if (!plan.may_split_keys || !are_small || units == 0 || units >= wanted ||
      chunks < 2 * min_part_chunks)
    return;
  const int64_t parts_wanted = blocks_of(wanted, units);
  int64_t part = min_part_chunks;
  while (blocks_of(chunks, 2 * part) >= parts_wanted) part *= 2;
  run->parts.chunks = part;
  run->parts.count = blocks_of(chunks, part);
}

// The scratch memory of a thread.
float *scratch_of(const AttentionStage &stage, int64_t thread) {
  return stage.scratch + thread * stage.attention.plan.scratch.floats;
}

// What stores the new keys or values of these kv heads. Norms and rotations are applied on the way,
// so stored rows need none.
KvStore store_of(const AttentionStage &stage, bool are_keys, int64_t first_head, int64_t end_head) {
  const AttentionRequest &request = stage.attention.request;
  const AttentionArrays &arrays = stage.attention.arrays;
  const AttentionRun &run = stage.attention.run;
  return {are_keys ? arrays.new_keys : arrays.new_values,
          are_keys ? request.prepare_k : request.prepare_v,
          are_keys ? run.k_statistics : nullptr,
          run.sequences,
          are_keys ? arrays.k : arrays.v,
          first_head,
          end_head,
          are_keys ? request.head_dim : request.head_dim_v,
          are_keys && arrays.k.is_packed};
}

// Whether new rows of a kv head are stored: a cache takes all; others are not read where the scales
// of all their query heads are 0.
bool takes_head(const AttentionStage &stage, int64_t kv_head) {
  const AttentionRequest &request = stage.attention.request;
  const float *const scales = request.options.head_scales;
  bool takes = stage.sequences.cache || !scales;
  for (int64_t head = kv_head * request.heads_per_kv;
       !takes && head < (kv_head + 1) * request.heads_per_kv; ++head)
    takes = scales[head] != 0.0f;
  return takes;
}

// Whether the units of the attention store the new rows of their kv heads, which spares threads a
// stage of its own: if each head has one unit that reads them.
bool may_store_in_units(const AttentionStage &stage) {
  const AttentionRequest &request = stage.attention.request;
  const AttentionRun &run = stage.attention.run;
  if (!stage.attention.arrays.new_keys.base || threads_of(stage.scheduler) == 1 ||
      request.prepare_q.norm.is_of_all_heads || request.options.chosen.lists.base ||
      run.query_blocks != 1)
    return false;
  const int64_t part = run.parts.chunks * chunk_keys;
  for (int64_t b = 0; run.parts.count > 1 && b < request.batch; ++b) {
    const Sequence &sequence = run.sequences[b];
    if (quotient(sequence.past, part) != quotient(sequence.past + sequence.kv_rows - 1, part))
      return false;
  }
  return true;
}

// Stores the new rows of a kv head if they lie in this part of its keys.
void store_in_unit(const AttentionStage &stage, int64_t sequence, int64_t head, int64_t part,
                   float *scratch) {
  const KeyParts &parts = stage.attention.run.parts;
  const Sequence &of = stage.in_pass[sequence];
  if (parts.count > 1 && quotient(of.past, parts.chunks * chunk_keys) != part) return;
  if (!takes_head(stage, head)) return;
  for (const bool are_keys : {true, false}) {
    const KvStore storing = store_of(stage, are_keys, head, head + 1);
    if (storing.rows.base)
      stage.kernels->store(storing, sequence, 0, of.kv_rows,
                           scratch + stage.attention.plan.scratch.prepared);
  }
}

// The last query blocks come first: under a causal mask they have the most keys, and what comes at
// the end is small enough to share out evenly. One thread takes all blocks of a head in turn, whose
// keys and values stay in its cache; several threads take the largest blocks of all heads first.
void run_unit(const void *context, int64_t unit, int64_t thread) {
  const AttentionStage &stage = *static_cast<const AttentionStage *>(context);
  const Attention &attention = stage.attention;
  const bool is_shared = threads_of(stage.scheduler) > 1;
  const int64_t parts = attention.run.parts.count,
                kv_heads = kv_groups(attention.request, attention.run);
  const int64_t whole = quotient(unit, parts), part = unit - whole * parts;
  const int64_t blocks = attention.run.query_blocks, heads = attention.request.batch * kv_heads;
  const int64_t row_units = is_shared ? heads : blocks, row = quotient(whole, row_units),
                column = whole - row * row_units;
  const int64_t head = is_shared ? column : row, block = blocks - 1 - (is_shared ? row : column);
  const int64_t sequence = quotient(head, kv_heads), group = head - sequence * kv_heads;
  float *const scratch = scratch_of(stage, thread);
  if (stage.units_store) store_in_unit(stage, sequence, group, part, scratch);
  stage.kernels->attend(attention, sequence, group, block, part, scratch);
}

// Outputs per pair. A unit is a block of queries of one kv head, with all of its keys.
void run_inspection(const void *context, int64_t unit, int64_t thread) {
  const AttentionStage &stage = *static_cast<const AttentionStage *>(context);
  const Attention &attention = stage.attention;
  const int64_t blocks = attention.run.query_blocks, heads = attention.request.num_kv_heads;
  stage.kernels->inspect(attention, unit / blocks / heads, unit / blocks % heads, unit % blocks,
                         scratch_of(stage, thread));
}

void run_attention(const AttentionStage &stage) {
  const Attention &attention = stage.attention;
  const int64_t units = whole_units(attention.request, attention.run),
                parts = attention.run.parts.count;
  if (parts > 1) std::fill_n(attention.run.parts.waiting, units * parts, 0);
  run_units(stage.scheduler, stage.counter, units * parts, run_unit, &stage);
  if (attention.request.pairs.has_any() && units > 0)
    run_units(stage.scheduler, stage.counter,
              attention.request.batch * attention.request.num_kv_heads * attention.run.query_blocks,
              run_inspection, &stage);
}

// ---- Rows on their way: stored, measured, normalised

constexpr int64_t prepared_rows = 64;  // of a unit

// What a unit needs besides its number.
struct RowWork {
  const AttentionStage &stage;
  int64_t blocks, groups;  // of rows of each sequence, of kv heads
  const KvStore *kv_stores;
  const RowMeasure *measures;
};

// The most rows of one sequence in this pass, in units.
int64_t row_blocks(const AttentionStage &stage, bool of_queries, bool of_keys) {
  int64_t longest = 0;
  for (int64_t b = 0; b < stage.attention.request.batch; ++b) {
    if (of_queries) longest = std::max(longest, stage.in_pass[b].n_q);
    if (of_keys) longest = std::max(longest, stage.in_pass[b].kv_rows);
  }
  return blocks_of(longest, prepared_rows);
}

// Kinds of units: 0 stores keys, 1 stores values, 2 measures queries. The unit that stores keys
// measures them first, because storing them needs the statistics.
void run_preparing_unit(const void *context, int64_t unit, int64_t thread) {
  const RowWork &work = *static_cast<const RowWork *>(context);
  const AttentionStage &stage = work.stage;
  const int64_t batch = stage.attention.request.batch, group = unit % work.groups;
  unit /= work.groups;
  const int64_t block = unit % work.blocks, index = unit / work.blocks % batch,
                kind = unit / work.blocks / batch;
  const Sequence &sequence = stage.in_pass[index];
  const int64_t begin = block * prepared_rows, rows = kind < 2 ? sequence.kv_rows : sequence.n_q;
  const int64_t end = std::min(begin + prepared_rows, rows);
  if (begin >= rows) return;
  float *const scratch = scratch_of(stage, thread) + stage.attention.plan.scratch.prepared;
  const RowMeasure &measure = work.measures[kind == 0 ? 0 : 1];
  if (kind != 1 && measure.rows.base) stage.kernels->measure(measure, index, begin, end, scratch);
  if (kind == 2 || !work.kv_stores[kind].rows.base) return;
  KvStore storing = work.kv_stores[kind];
  const int64_t first_head = group * storing.end_kv_head / work.groups,
                end_head = (group + 1) * storing.end_kv_head / work.groups;
  for (int64_t head = first_head; head < end_head; head = storing.end_kv_head + 1) {
    storing.first_kv_head = storing.end_kv_head = head;
    while (storing.end_kv_head < end_head && takes_head(stage, storing.end_kv_head))
      ++storing.end_kv_head;
    stage.kernels->store(storing, index, begin, end, scratch);
  }
}

// Normalises the context in place. The norm needs all heads of a row, which several units write.
void run_context_norm(const AttentionStage &stage) {
  const RowWork work = {stage, row_blocks(stage, true, false), 1, nullptr, nullptr};
  const auto run = [](const void *context, int64_t unit, int64_t) {
    const RowWork &of = *static_cast<const RowWork *>(context);
    const int64_t index = unit / of.blocks, begin = unit % of.blocks * prepared_rows,
                  end = std::min(begin + prepared_rows, of.stage.in_pass[index].n_q);
    of.stage.kernels->normalize_context(of.stage.attention, index, begin, end);
  };
  run_units(stage.scheduler, stage.counter, stage.attention.request.batch * work.blocks, run,
            &work);
}

// ---- Padding

// No key takes part in rows of padding: their outputs are 0, and -infinity where an output is a
// logarithm or a masked score.
void clear_padding_of_outputs(const AttentionStage &stage) {
  const AttentionRequest &r = stage.attention.request;
  const mha_outputs &outputs = stage.outputs;
  const Extent *const queries = stage.queries, *const keys = stage.keys;
  const int64_t batch = r.array_batch, n_q = r.n_q, n_kv = stage.attention.run.pair_columns,
                own_n_kv = stage.sequences.n_kv;
  const int64_t q_width = r.num_heads * r.head_dim, k_width = r.num_kv_heads * r.head_dim,
                v_width = r.num_kv_heads * r.head_dim_v;
  const int64_t width = r.num_heads * r.head_dim_v;
  clear_padding(queries, batch, n_q, q_width, outputs.q, n_q * q_width, q_width);
  clear_padding(keys, batch, own_n_kv, k_width, outputs.k, own_n_kv * k_width, k_width);
  clear_padding(keys, batch, own_n_kv, v_width, outputs.v, own_n_kv * v_width, v_width);
  clear_padding(queries, batch, n_q, width, r.context, n_q * width, width);
  float *const pairs[] = {r.pairs.weights, r.pairs.scores, r.pairs.scaled_scores,
                          r.pairs.softcapped_scores};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < n_q; ++row) {
      if (row >= queries[b].first && row < queries[b].first + queries[b].count) continue;
      for (int64_t head = 0; head < r.num_heads; ++head) {
        const int64_t at = (b * r.num_heads + head) * n_q + row;
        if (r.lse) r.lse[at] = -MHA_INFINITY;
        if (r.partials) {
          float *const partial = r.partials + at * (partial_head + r.head_dim_v);
          memset(partial, 0, static_cast<size_t>(partial_head + r.head_dim_v) * sizeof(float));
          partial[0] = -MHA_INFINITY;
        }
        for (float *const output : pairs) {
          if (output) memset(output + at * n_kv, 0, static_cast<size_t>(n_kv) * sizeof(float));
        }
        for (int64_t j = 0; r.pairs.masked_scores && j < n_kv; ++j)
          r.pairs.masked_scores[at * n_kv + j] = -MHA_INFINITY;
      }
    }
  }
}

}  // namespace

void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, void *base,
                   int64_t batch_stride, int64_t row_stride, Storage storage) {
  const int64_t element = bytes_of(storage);
  for (int64_t b = 0; base && b < batch; ++b) {
    for (int64_t row = 0; row < rows; ++row) {
      if (row >= extents[b].first && row < extents[b].first + extents[b].count) continue;
      memset(static_cast<char *>(base) + (b * batch_stride + row * row_stride) * element, 0,
             static_cast<size_t>(width * element));
    }
  }
}

// Packing a key takes as long as some 20 rows take to read it.
bool packs_often(const AttentionStage &stage) {
  constexpr int64_t min_shared_keys = 64, max_packing_rows = 384;
  const Attention &attention = stage.attention;
  AttentionRun run;
  run.longest_kv = longest_keys(stage.sequences);
  cut_queries(attention.request, attention.plan, longest_queries(stage.sequences),
              threads_of(stage.scheduler), &run);
  return run.longest_kv >= min_shared_keys && run.query_blocks > 1 &&
         run.block_queries * attention.request.heads_per_kv <= max_packing_rows;
}

// ---- Passes

// From here on lengths are known, so the units can be cut and offsets become pointers.
void begin_passes(AttentionStage *stage, unsigned char *workspace) {
  const SequenceArguments &s = stage->sequences;
  const AttentionRequest &request = stage->attention.request;
  const AttentionPlan &plan = stage->attention.plan;
  const AttentionArrays &arrays = stage->attention.arrays;
  const auto floats_at = [workspace](int64_t offset) {
    return reinterpret_cast<float *>(workspace + offset);
  };
  AttentionRun &run = stage->attention.run;
  run.codes = request.is_in_integers ? stage->kernels->codes : nullptr;
  // How the work is cut.
  run.longest_kv = longest_keys(s);
  const ChosenKeys &chosen = request.options.chosen;
  if (chosen.lists.base && chosen.count < run.longest_kv / chosen.block)
    run.longest_kv = chosen.count * chosen.block;
  run.pair_columns = pair_columns(s);
  const int64_t num_threads = threads_of(stage->scheduler);
  cut_queries(request, plan, longest_queries(s), num_threads, &run);
  cut_heads(request, plan, num_threads, &run);
  split_keys(request, plan, num_threads, &run);
  // Where the memory lies.
  run.parts.waiting = reinterpret_cast<int64_t *>(workspace + plan.waiting_parts);
  run.parts.partials = floats_at(plan.split_partials);
  run.reworks_context = request.options.head_scales || request.context || arrays.gate.values.base ||
                        arrays.output.storage != Storage::f32;
  run.q_statistics = floats_at(plan.q_statistics);
  run.k_statistics = floats_at(plan.k_statistics);
  run.row_maxima = request.pairs.has_any() ? floats_at(plan.row_partials) : nullptr;
  run.row_sums =
      floats_at(plan.row_partials) + request.array_batch * request.num_heads * request.n_q;
  stage->in_pass = reinterpret_cast<Sequence *>(workspace + plan.sequences);
  run.sequences = stage->in_pass;

  stage->counter = reinterpret_cast<UnitCounter *>(workspace + plan.unit_counter);
  stage->scratch = floats_at(plan.unit_scratch);
  const bool is_ragged = s.is_ragged();
  stage->queries = is_ragged ? reinterpret_cast<Extent *>(workspace + plan.query_extents) : nullptr;
  stage->keys = is_ragged ? reinterpret_cast<Extent *>(workspace + plan.key_extents) : nullptr;
  stage->next_row = 0;
  if (!stage->has_padding()) return;
  fill_sequences(s, 0, INT64_MAX, stage->in_pass, stage->queries, stage->keys);
  clear_padding_of_outputs(*stage);
}

// The cache grows at the end, when nothing reads the old lengths any more.
bool next_pass(AttentionStage *stage) {
  const SequenceArguments &s = stage->sequences;
  const int64_t rows = s.rows_per_pass(), row = stage->next_row;
  const int64_t longest = longest_rows(s);
  if (row >= longest) {
    grow_cache(s);
    return false;
  }
  fill_sequences(s, row, rows, stage->in_pass, stage->queries, stage->keys);
  stage->next_row = longest - row > rows ? row + rows : longest;
  return true;
}

// Keys and values become what units read; queries are prepared by the units themselves, so only
// their statistics are taken here.
void prepare_pass(const AttentionStage &stage) {
  const AttentionRequest &request = stage.attention.request;
  const AttentionArrays &arrays = stage.attention.arrays;
  const AttentionRun &run = stage.attention.run;
  const bool is_measured = request.prepare_q.norm.is_of_all_heads;
  if (!arrays.new_keys.base && !is_measured) return;
  const int64_t q_heads = request.num_heads, kv_heads = request.num_kv_heads;
  const KvStore stores[2] = {store_of(stage, true, 0, kv_heads),
                             store_of(stage, false, 0, kv_heads)};
  RowMeasure measures[2] = {};
  if (is_measured) {
    const KeyValues k = is_plain(arrays.k) ? arrays.k : plain_rows(arrays.new_keys);
    measures[0] = {
        k, request.prepare_k, run.k_statistics, run.sequences, kv_heads, request.head_dim, true};
    const KeyValues q = plain_rows(arrays.q);
    measures[1] = {
        q, request.prepare_q, run.q_statistics, run.sequences, q_heads, request.head_dim, false};
  }
  // Heads are stored by several units where rows alone are too few; a measured row has one unit.
  RowWork work = {stage, row_blocks(stage, is_measured, true), 1, stores, measures};
  const int64_t units = (is_measured ? 3 : 2) * request.batch * work.blocks,
                num_threads = threads_of(stage.scheduler);
  if (num_threads > 1 && !is_measured && units > 0)
    work.groups = std::min(kv_heads, blocks_of(num_threads * units_per_thread, units));
  run_units(stage.scheduler, stage.counter, units * work.groups, run_preparing_unit, &work);
}

void attend_pass(AttentionStage *stage) {
  stage->units_store = may_store_in_units(*stage);
  if (!stage->units_store) prepare_pass(*stage);
  run_attention(*stage);
  if (stage->attention.request.context_norm.is_given) run_context_norm(*stage);
}

// ---- Keys and values

int64_t floats_of_codes(int64_t width) { return blocks_of(width, sizeof(float)) + 1; }

KeyValues packed_codes_at(float *base, bool are_keys, int64_t width, int64_t positions,
                          int64_t num_kv_heads, int64_t heads, bool counts_blocks) {
  KeyValues packed =
      packed_floats(base, width, positions * width, positions, num_kv_heads, counts_blocks);
  packed.storage = Storage::int8;
  if (are_keys) packed.hadamard = hadamard_block(width, width);
  packed.scales = base + heads * positions * (floats_of_codes(width) - 1);
  packed.scale_batch_stride = counts_blocks ? tile_keys : num_kv_heads * positions;
  return packed;
}

KeyValues packed_floats(const float *base, int64_t row_stride, int64_t head_floats,
                        int64_t positions, int64_t num_kv_heads, bool counts_blocks) {
  KeyValues packed = {};
  packed.base = base;
  packed.is_packed = true;
  packed.row_stride = row_stride;
  packed.head_stride = head_floats;
  packed.batch_stride = counts_blocks ? tile_keys * row_stride : num_kv_heads * head_floats;
  packed.block_positions = positions;
  return packed;
}

}  // namespace mha
