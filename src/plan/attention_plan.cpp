// The attention of a unit of work goes through the keys chunk by chunk. Its scratch memory holds
// the queries of the unit, one chunk of keys and values if they are not read in place, the scores
// of a few rows, and the partials of rows: one for each level of the tree in which the contract
// merges chunks.

#include "attention_plan.h"

#include <algorithm>

#include "../base/schedule.h"
#include "../storage.h"

namespace mha {
namespace {

// The most query rows of one unit, counting all query heads of the kv head, unless a single query
// has more. Their partials fit into a level-2 cache. Keys and values that have to be widened or
// packed are so once per unit and chunk, which more rows make cheaper.
constexpr int64_t packed_unit_rows = 96, plain_unit_rows = 768;

// Where threads need more units, a unit keeps the preferred rows while its keys can be split
// instead, and min_unit_rows in any case: with fewer it waits for keys and values.
constexpr int64_t preferred_packed_rows = 64, preferred_plain_rows = 256, min_unit_rows = 24;
static_assert(preferred_plain_rows <= chunk_keys,
              "in a part, later rows begin at most one chunk after the first");

// Units of at most this many rows use each of the caller's plain keys and values once, so packing a
// whole chunk first would not pay.
constexpr int64_t max_late_rows = 6;

// The partials of some rows: o for each row and a spare one, then m and l, with room for merging
// rows side by side.
Count partial_floats(Count rows, int64_t head_dim_v_padded) {
  const Count partials = (rows + Count(spare_rows)) * Count(head_dim_v_padded);
  return round_up(partials + rows + rows + Count(2 * merge_rows), 16);
}

// Whether units read the numbers where they are stored.
bool is_read_as_stored(const KeyValues &source) {
  return source.is_packed && source.storage == Storage::f32;
}

// Whether a unit's keys and values are read by tile after tile of rows where they lie. Others are
// brought into another form once per unit and chunk.
bool is_read_often(const AttentionRequest &request) {
  return is_stored(request.k) || (is_read_as_stored(request.k) && is_read_as_stored(request.v));
}

// The scratch memory of one unit. It serves the largest units, whose size does not depend on the
// number of threads: a workspace for more threads serves fewer, too. few: the most rows of one that
// reads rows. Returns its size, which may overflow.
Count lay_out_scratch(const AttentionRequest &request, const AttentionPlan &plan,
                      int64_t block_rows, int64_t few, int64_t max_keys, int64_t slots,
                      AttendScratch *to) {
  const int64_t rows = std::max(block_rows, few);
  AttendScratch &scratch = *to;
  Count end(0);
  const auto take = [&end](Count floats) {
    const int64_t offset = end.value();
    end = end + round_up(floats, 16);
    return offset;
  };
  const KeyValues &k = request.k, &v = request.v;
  const ChosenKeys &chosen = request.options.chosen;
  const bool has_chosen = chosen.lists.base != nullptr;
  // Chosen keys that do not come in whole key tiles are gathered one by one.
  const bool may_gather = has_chosen && (chosen.block % tile_keys != 0 || is_plain(k));
  const bool are_late = rows <= plan.late_rows, are_in_place = rows <= plan.in_place_rows;
  const int64_t head_dim = request.head_dim;
  scratch.queries = take(Count(rows) * Count(plan.query_stride));

  int64_t key_tiles = chunk_keys / tile_keys;
  if (!may_gather && is_read_as_stored(k))
    key_tiles = 0;
  else if (!may_gather && are_late)
    key_tiles = late_tiles;
  scratch.keys = take(Count(key_tiles * tile_keys) * Count(key_stride_of(head_dim)));

  // Where values lie in the keys, gathering one brings the whole row of its key.
  const Count value_width(may_gather && is_stored(k) ? k.row_stride : plan.head_dim_v_padded);
  const bool needs_values =
      may_gather || !(is_read_as_stored(v) || (are_in_place && v.storage == Storage::f32));
  scratch.values = take(needs_values ? Count(chunk_keys) * value_width : Count(0));

  const int64_t prepared_keys = k.is_packed && !may_gather ? 4 : tile_keys;
  const int64_t prepared =
      std::max(prepared_keys * head_dim, request.prepare_v.is_any ? request.head_dim_v : 0);
  const bool has_prepared =
      request.prepare_k.is_any || request.prepare_v.is_any || !is_read_as_stored(k) || may_gather;
  scratch.prepared = take(has_prepared ? prepared : 0);
  scratch.scores = take(std::max(max_attend_rows, few) * score_stride);
  scratch.chosen_blocks = take(has_chosen ? chosen.count : 0);
  scratch.chosen_bits = take(has_chosen ? 2 * (max_keys / chosen.block / 64 + 2) : 0);
  scratch.chosen_scales = take(may_gather ? 2 * chunk_keys : 0);

  const Count partial = partial_floats(rows, plan.head_dim_v_padded);
  scratch.partials = take(Count(slots) * partial);
  scratch.partial_stride = partial.value();
  scratch.floats = end.value();
  return end;
}

// Slots for partials: merging `chunks` chunks takes as many as a binary counter up to that number
// has digits (CONTRACT.md, section 9).
int64_t slots_of(const AttentionRequest &request, int64_t max_keys, int64_t chunks) {
  int64_t slots = request.window_left < max_keys ? 2 : 1;  // a window may begin within a subtree
  for (int64_t left = chunks / 2; left != 0; left /= 2) ++slots;
  // Chunks in step (kernels/attend.h) have one slot each before they are merged.
  const bool is_packed = request.k.is_packed && request.v.is_packed;
  return chunks >= max_interleaved_chunks && is_packed ? slots + 1 : slots;
}

// The most rows of a unit that reads rows: those of as many kv heads as such a unit may have. Fewer
// rows of each head may be more together: 16 heads of 4 are 64 rows, 10 heads of 6 are 60.
int64_t few_rows(const AttentionRequest &request, const AttentionPlan &plan, int64_t n_q) {
  if (!plan.reads_rows || n_q == 0) return 0;
  const int64_t most =
      padded_rows(std::min(max_few_rows, std::min(max_few_rows, n_q) * request.heads_per_kv));
  int64_t few = 0;
  for (int64_t rows = 1; rows <= most; rows = padded_rows(rows + 1))
    few = std::max(few, rows * most_kv_heads(request, rows));
  return few;
}

}  // namespace

// Heads are read together where they lie side by side in each row. Elsewhere each head has its own
// stretch of memory, and several of them would only take turns.
int64_t most_kv_heads(const AttentionRequest &request, int64_t rows) {
  if (request.k.head_stride >= request.k.row_stride) return 1;
  return std::min(request.num_kv_heads, max_group_rows / rows);
}

// The partials of the rows must stay in the level-2 cache, and plain keys are packed once per unit.
int64_t largest_block(int64_t longest_q, const AttentionRequest &request) {
  if (request.options.chosen.lists.base) return 1;  // each query has its own keys
  const int64_t rows = is_read_often(request) ? packed_unit_rows : plain_unit_rows;
  const int64_t most =
      request.most_queries != 0 ? request.most_queries : quotient(rows, request.heads_per_kv);
  return std::min(std::max<int64_t>(1, longest_q), std::max<int64_t>(1, most));
}

int64_t preferred_block(const AttentionRequest &request) {
  const int64_t rows = is_read_often(request) ? preferred_packed_rows : preferred_plain_rows;
  return std::max<int64_t>(1, rows / request.heads_per_kv);
}

// Below this, threads wait for keys and values more than they compute.
int64_t smallest_block(const AttentionRequest &request) {
  return std::max<int64_t>(1, min_unit_rows / request.heads_per_kv);
}

// The order of the statements is the order in which memory is taken; none of it depends on contents
// of arrays.
AttentionPlan plan_attention(const AttentionRequest &request, const SequenceArguments &s,
                             int64_t num_threads, WorkspaceLayout *layout) {
  AttentionPlan plan;
  plan.unit_counter = layout->take(1, sizeof(UnitCounter));
  const bool has_statistics = request.prepare_q.norm.is_of_all_heads;
  const Count statistics = has_statistics ? Count(2) * Count(request.array_batch) : Count(0);
  plan.q_statistics = layout->take_floats(statistics * Count(request.n_q));
  plan.k_statistics = layout->take_floats(statistics * Count(s.n_kv));

  plan.head_dim_v_padded = blocks_of(request.head_dim_v, tile_keys) * tile_keys;
  plan.query_stride = request.head_dim + request.is_in_integers;
  // Values that are read in place are whole vectors.
  const KeyValues &k = request.k, &v = request.v;
  const bool can_be_in_place =
      !v.is_packed && !request.prepare_v.is_any && request.head_dim_v % tile_keys == 0;
  plan.late_rows = k.is_packed || request.is_in_integers ? 0 : max_late_rows;
  plan.in_place_rows = can_be_in_place ? max_late_rows : 0;
  plan.reads_rows = is_plain(k) && is_plain(v) && request.head_dim % 4 == 0 &&
                    !request.options.chosen.lists.base && !request.options.head_scales;

  const int64_t most_keys = max_keys(s), chunks = blocks_of(most_keys, chunk_keys);
  const int64_t largest = largest_block(request.n_q, request);
  const int64_t few = few_rows(request, plan, request.n_q);
  const Count scratch =
      lay_out_scratch(request, plan, largest * request.heads_per_kv, few, most_keys,
                      slots_of(request, most_keys, chunks), &plan.scratch);

  // Where keys are split, there are no more parts than part_units_per_thread of each thread, nor
  // than chunks of all units, and each part has a place for its partials.
  plan.may_split_keys = num_threads > 1 && chunks >= 2 * min_part_chunks && k.ring_positions == 0;
  const int64_t part_rows =
      std::max(std::min(preferred_block(request), largest) * request.heads_per_kv, few);
  const Count split_partial = partial_floats(part_rows, plan.head_dim_v_padded);
  plan.split_partial_stride = split_partial.value();
  Count parts(0);
  if (plan.may_split_keys) {
    const Count all = Count(request.batch) * Count(request.num_kv_heads) *
                      Count(blocks_of(request.n_q, std::min(smallest_block(request), largest))) *
                      Count(chunks);
    parts = Count(num_threads) * Count(part_units_per_thread);
    if (!all.overflows() && all.value() < parts.value()) parts = all;
  }

  // The rest depends on what the call asks for.
  const Count batch(request.batch), extents(s.is_ragged() ? request.batch : 0);
  plan.sequences = layout->take(batch, sizeof(Sequence));
  plan.query_extents = layout->take(extents, sizeof(Extent));
  plan.key_extents = layout->take(extents, sizeof(Extent));
  plan.waiting_parts = layout->take(parts, sizeof(int64_t));
  plan.split_partials = layout->take_floats(parts * split_partial);
  const Count row_partials = Count(request.pairs.has_any() ? 2 : 0) * Count(request.array_batch) *
                             Count(request.num_heads) * Count(request.n_q);
  plan.row_partials = layout->take_floats(row_partials);
  plan.unit_scratch = layout->take_floats(scratch * Count(num_threads));
  return plan;
}

}  // namespace mha
