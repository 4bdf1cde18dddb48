// How the middle stage is cut into units of work, and how they run.
//
// plan_attention cuts: so many queries of all query heads of one kv head are a unit
// (block_queries). It lays out a thread's scratch memory (AttendScratch), and takes all memory of
// the units from the workspace. run_preparation moves the rows of keys and values that come with
// the call to packed storage, run_attention runs the units. Where units are fewer than threads can
// share, their keys are cut too (split_keys).

#include "attention_units.h"

#include <algorithm>

#include "storage.h"

namespace mha {
namespace {

// The most query rows of one unit, counting all query heads of the kv head, unless a single query
// has more. Their states fit into a level-2 cache. What is to be widened, and a caller's plain keys
// and values, are brought into the packed form once per unit and chunk, which more rows make
// cheaper.
constexpr int64_t packed_unit_rows = 96, plain_unit_rows = 768;

// Fewer rows in a unit leave no thread without work; but not so few that keys and values are mostly
// waited for.
constexpr int64_t units_per_thread = 3, min_unit_rows = 24;

// Units of at most so many rows use each of the caller's plain keys and values once: packing a
// whole chunk first would not pay.
constexpr int64_t max_late_rows = 6;

// So many units a thread has at most when the keys of a unit are shared out, and so many keys a
// part has at least.
constexpr int64_t part_units_per_thread = 2 * units_per_thread, min_part_chunks = 2;

int64_t min_block(const Attention &attention) {
  return std::max<int64_t>(1,
                           min_unit_rows / quotient(attention.num_heads, attention.num_kv_heads));
}

Count state_floats(Count rows, const Attention &attention) {
  return round_up((rows + Count(spare_rows)) * Count(attention.head_dim_v_padded) + rows + rows +
                      Count(2 * merge_rows),
                  16);
}

// Fewer units than threads can share: their keys are cut too, in powers of two of chunks.
void split_keys(int64_t num_threads, Attention *attention) {
  KvSplit &parts = attention->parts;
  parts.count = 1;
  const int64_t units = attention->batch * attention->num_kv_heads * attention->query_blocks,
                wanted = num_threads * units_per_thread;
  const int64_t chunks = blocks_of(attention->longest_kv, chunk_keys);
  // Whose states have a place.
  const bool has_small_units = attention->block_queries <= min_block(*attention);
  if (!parts.may_be || units == 0 || units >= wanted || chunks < 2 * min_part_chunks ||
      !has_small_units)
    return;
  const int64_t parts_wanted = blocks_of(wanted, units);
  parts.chunks = min_part_chunks;
  while (blocks_of(chunks, 2 * parts.chunks) >= parts_wanted) parts.chunks *= 2;
  parts.count = blocks_of(chunks, parts.chunks);
  for (int64_t unit = 0; unit < units; ++unit) parts.unfinished[unit] = parts.count;
}

struct AttendWork {
  const Kernels *kernels;
  const Attention *attention;
  float *scratch;
  bool is_shared;  // between threads
};

// The last query blocks come first: under a causal mask they have the most keys, and what comes at
// the end is small enough to share out evenly. One thread takes the blocks of one head after each
// other, whose keys and values stay in its cache; several take the largest of all heads.
void run_unit(const void *context, int64_t unit, int64_t thread) {
  const AttendWork &work = *static_cast<const AttendWork *>(context);
  const Attention &attention = *work.attention;
  const int64_t whole = quotient(unit, attention.parts.count),
                part = unit - whole * attention.parts.count;
  const int64_t blocks = attention.query_blocks, heads = attention.batch * attention.num_kv_heads;
  const int64_t row = quotient(whole, work.is_shared ? heads : blocks),
                column = whole - row * (work.is_shared ? heads : blocks);
  const int64_t head = work.is_shared ? column : row,
                block = blocks - 1 - (work.is_shared ? row : column);
  const int64_t sequence = quotient(head, attention.num_kv_heads);
  work.kernels->attend(attention, sequence, head - sequence * attention.num_kv_heads, block, part,
                       work.scratch + thread * attention.scratch.floats);
}

// Outputs per pair. A unit is a unit of the attention.
void run_inspection(const void *context, int64_t unit, int64_t thread) {
  const AttendWork &work = *static_cast<const AttendWork *>(context);
  const Attention &attention = *work.attention;
  const int64_t blocks = attention.query_blocks, heads = attention.num_kv_heads;
  work.kernels->inspect(attention, unit / blocks / heads, unit / blocks % heads, unit % blocks,
                        work.scratch + thread * attention.scratch.floats);
}

// Which units read as it is stored.
bool has_floats(const KeyValues &source) {
  return source.is_packed && source.storage == Storage::f32;
}

// The most query rows of a unit, of each query head, that sequences of so many queries need.
int64_t largest_block(int64_t longest_q, const Attention &attention) {
  if (attention.options.chosen.lists.base) return 1;  // each has keys of its own
  const bool has_all_floats = has_floats(attention.k) && has_floats(attention.v);
  const int64_t rows =
      has_all_floats || is_stored(attention.k) ? packed_unit_rows : plain_unit_rows;
  const int64_t group = quotient(attention.num_heads, attention.num_kv_heads);
  const int64_t most = attention.most_queries != 0 ? attention.most_queries
                                                   : std::max<int64_t>(1, quotient(rows, group));
  return std::min(std::max<int64_t>(1, longest_q), most);
}

// Values that are read in place are floats, and whole vectors.
void set_late_rows(Attention *attention) {
  const KeyValues &v = attention->v;
  const bool can_be_read = v.storage == Storage::f32 && !attention->prepare_v.is_any &&
                           attention->head_dim_v % key_block == 0;
  attention->late_rows = attention->k.is_packed ? 0 : max_late_rows;
  attention->in_place_rows = !v.is_packed && can_be_read ? max_late_rows : 0;
}

}  // namespace

void cut_queries(int64_t longest_q, int64_t num_threads, Attention *attention) {
  const int64_t largest = largest_block(longest_q, *attention), least = min_block(*attention);
  int64_t block = largest;
  if (num_threads > 1) {
    const Count heads = Count(attention->batch) * Count(attention->num_kv_heads),
                units = heads * Count(blocks_of(longest_q, block));
    const Count wanted = Count(num_threads) * Count(units_per_thread);
    if (units.value() < wanted.value()) {
      const int64_t per_head = blocks_of(wanted.value(), std::max<int64_t>(1, heads.value()));
      block = std::min(std::max(blocks_of(longest_q, per_head), least), largest);
    }
  }
  // Blocks as equal as can be.
  attention->block_queries = longest_q > 0 ? blocks_of(longest_q, blocks_of(longest_q, block)) : 1;
  attention->query_blocks = blocks_of(longest_q, attention->block_queries);
}

AttentionMemory plan_attention(Attention *attention, int64_t max_keys, int64_t num_threads,
                               bool is_ragged, WorkspaceLayout *layout) {
  const int64_t group = quotient(attention->num_heads, attention->num_kv_heads);
  attention->head_dim_v_padded = blocks_of(attention->head_dim_v, key_block) * key_block;

  // The scratch memory is that of the largest units, which does not depend on the number of
  // threads: so a workspace for more of them serves fewer, too.
  const bool has_floats_k = has_floats(attention->k), has_floats_v = has_floats(attention->v);
  const int64_t largest = largest_block(attention->n_q, *attention), least = min_block(*attention);
  cut_queries(attention->n_q, num_threads, attention);

  const int64_t chunks = blocks_of(max_keys, chunk_keys);
  int64_t slots = attention->window_left < max_keys ? 2 : 1;  // a window may begin within a subtree
  for (int64_t left = chunks / 2; left != 0; left /= 2)
    ++slots;  // as many as a counter up to `chunks` has digits
  // Chunks in step (kernels/attend.h) each have a slot before they are merged: one more than the
  // counter has digits.
  if (chunks >= max_interleaved_chunks && attention->k.is_packed && attention->v.is_packed) ++slots;

  const Count rows = Count(largest) * Count(group), width(attention->head_dim_v_padded),
              state = state_floats(rows, *attention);
  AttendScratch &scratch = attention->scratch;
  Count end(0);
  const auto take = [&end](Count floats) {
    const int64_t offset = end.value();
    end = end + round_up(floats, 16);
    return offset;
  };
  const int64_t head_dim = attention->head_dim;
  scratch.queries = take(rows * Count(head_dim));
  set_late_rows(attention);
  const bool are_late = largest * group <= attention->late_rows,
             are_in_place = largest * group <= attention->in_place_rows;
  const ChosenKeys &chosen = attention->options.chosen;
  const bool may_gather =
      chosen.lists.base && (chosen.block % key_block != 0 || is_plain(attention->k));
  const int64_t key_groups = may_gather     ? chunk_keys / key_block
                             : has_floats_k ? 0
                             : are_late     ? late_groups
                                            : chunk_keys / key_block;
  scratch.keys = take(Count(key_groups * key_block) * Count(head_dim));
  const Count value_width = may_gather && is_stored(attention->k) ? Count(attention->k.row_stride)
                                                                  : width;  // or all of a row
  scratch.values = take(
      (has_floats_v || are_in_place) && !may_gather ? Count(0) : Count(chunk_keys) * value_width);
  const int64_t prepared_keys = attention->k.is_packed && !may_gather ? 4 : key_block;
  const int64_t prepared =
      std::max(prepared_keys * head_dim, attention->prepare_v.is_any ? attention->head_dim_v : 0);
  const bool has_prepared =
      attention->prepare_k.is_any || attention->prepare_v.is_any || !has_floats_k || may_gather;
  scratch.prepared = take(has_prepared ? Count(prepared) : Count(0));
  scratch.scores = take(max_attend_rows * score_stride);
  scratch.chosen_blocks = take(Count(chosen.lists.base ? chosen.count : 0));
  scratch.chosen_bits = take(Count(chosen.lists.base ? 2 * (max_keys / chosen.block / 64 + 2) : 0));
  scratch.chosen_scales = take(Count(may_gather ? 2 * chunk_keys : 0));
  scratch.states = take(Count(slots) * state);
  scratch.state_stride = state.value();
  scratch.floats = end.value();

  attention->parts.may_be =
      num_threads > 1 && chunks >= 2 * min_part_chunks && attention->k.ring_positions == 0;
  // Where keys are shared out, units are as small as they come.
  const Count part_rows = Count(std::min(least, largest)) * Count(group),
              threads(attention->parts.may_be ? num_threads : 0);
  const Count part_state = attention->parts.may_be ? state_floats(part_rows, *attention) : Count(0);
  attention->parts.state_stride = part_state.value();
  const Count batch(attention->batch), extents = is_ragged ? batch : Count(0);
  AttentionMemory memory;
  memory.sequences = layout->take(batch, sizeof(Sequence));
  memory.query_extents = layout->take(extents, sizeof(Extent));
  memory.key_extents = layout->take(extents, sizeof(Extent));
  memory.unfinished = layout->take(threads * Count(units_per_thread), sizeof(int64_t));
  memory.part_states = layout->take_floats(threads * Count(part_units_per_thread) * part_state);
  const Count states_of_rows = Count(attention->pairs.has_any() ? 2 : 0) *
                               Count(attention->array_batch) * Count(attention->num_heads);
  memory.row_states = layout->take_floats(states_of_rows * Count(attention->n_q));
  memory.scratch = layout->take_floats(end * Count(num_threads));
  return memory;
}

void bind_attention(const AttentionMemory &memory, unsigned char *workspace, Attention *attention) {
  attention->sequences = reinterpret_cast<const Sequence *>(workspace + memory.sequences);
  attention->parts.unfinished = reinterpret_cast<int64_t *>(workspace + memory.unfinished);
  attention->parts.states = reinterpret_cast<float *>(workspace + memory.part_states);
  float *const row_states = reinterpret_cast<float *>(workspace + memory.row_states);
  attention->row_maxima = attention->pairs.has_any() ? row_states : nullptr;
  attention->row_sums = row_states + attention->array_batch * attention->num_heads * attention->n_q;
}

void run_attention(const Kernels &kernels, Attention *attention, const mha_scheduler *scheduler,
                   UnitCounter *counter, float *scratch) {
  split_keys(threads_of(scheduler), attention);
  const AttendWork work = {&kernels, attention, scratch, threads_of(scheduler) > 1};
  const int64_t units =
      attention->batch * attention->num_kv_heads * attention->query_blocks * attention->parts.count;
  run_units(scheduler, counter, units, run_unit, &work);
  if (!attention->pairs.has_any() || attention->query_blocks == 0) return;
  run_units(scheduler, counter,
            attention->batch * attention->num_kv_heads * attention->query_blocks, run_inspection,
            &work);
}

namespace {

struct PrepareWork {
  const Kernels *kernels;
  const KvStore *kv_stores;
  const RowMeasure *measures;
  const Attention *attention;
  float *scratch;
  int64_t batch, blocks;
};

constexpr int64_t prepared_rows = 64;  // of a unit

// Keys are measured by the unit that stores them.
void run_preparing_unit(const void *context, int64_t unit, int64_t thread) {
  const PrepareWork &work = *static_cast<const PrepareWork *>(context);
  const int64_t block = unit % work.blocks, index = unit / work.blocks % work.batch,
                kind = unit / work.blocks / work.batch;
  const Sequence &sequence = work.attention->sequences[index];
  const int64_t begin = block * prepared_rows, rows = kind < 2 ? sequence.kv_rows : sequence.n_q;
  const int64_t end = std::min(begin + prepared_rows, rows);
  if (begin >= rows) return;
  float *const scratch =
      work.scratch + thread * work.attention->scratch.floats + work.attention->scratch.prepared;
  const RowMeasure &measure = work.measures[kind == 0 ? 0 : 1];
  if (kind != 1 && measure.rows.base) work.kernels->measure(measure, index, begin, end, scratch);
  if (kind < 2 && work.kv_stores[kind].rows.base)
    work.kernels->store(work.kv_stores[kind], index, begin, end, scratch);
}

}  // namespace

void run_preparation(const Kernels &kernels, const Attention &attention,
                     const KvStore (&kv_stores)[2], const RowMeasure (&measures)[2],
                     const mha_scheduler *scheduler, UnitCounter *counter, float *scratch) {
  const bool has_queries = measures[1].rows.base != nullptr;
  int64_t longest = 0;
  for (int64_t b = 0; b < attention.batch; ++b) {
    longest = std::max(longest, attention.sequences[b].kv_rows);
    if (has_queries) longest = std::max(longest, attention.sequences[b].n_q);
  }
  const PrepareWork work = {&kernels,
                            kv_stores,
                            measures,
                            &attention,
                            scratch,
                            attention.batch,
                            blocks_of(longest, prepared_rows)};
  run_units(scheduler, counter, (has_queries ? 3 : 2) * work.batch * work.blocks,
            run_preparing_unit, &work);
}

void run_context_norm(const Kernels &kernels, const Attention &attention,
                      const mha_scheduler *scheduler, UnitCounter *counter) {
  int64_t longest = 0;
  for (int64_t b = 0; b < attention.batch; ++b)
    longest = std::max(longest, attention.sequences[b].n_q);
  const PrepareWork work = {&kernels,
                            nullptr,
                            nullptr,
                            &attention,
                            nullptr,
                            attention.batch,
                            blocks_of(longest, prepared_rows)};
  const auto run = [](const void *context, int64_t unit, int64_t) {
    const PrepareWork &of = *static_cast<const PrepareWork *>(context);
    const int64_t index = unit / of.blocks, begin = unit % of.blocks * prepared_rows;
    of.kernels->normalize_context(
        *of.attention, index, begin,
        std::min(begin + prepared_rows, of.attention->sequences[index].n_q));
  };
  run_units(scheduler, counter, work.batch * work.blocks, run, &work);
}

}  // namespace mha
