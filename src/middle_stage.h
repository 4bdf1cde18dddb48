// The middle stage of a call, q, k, v to context, in the order in which both entries go through it:
//
//   describe_call         takes the fields that their argument structs have in common; the entry adds the shape and where its arrays are
//   check_middle          checks all that can be known without reading an array
//   plan_middle           cuts the stage into units, and takes their memory from the workspace
//   check_array_contents  checks lengths, positions, sequences of a cache, slopes, sinks and head scales; then strides are known
//   begin_passes, then as long as there is a next_pass: attend_pass, before and after which mha_forward has its products
//
// A parameter of the scores is a field of ScoreOptions (kernels/kernels.h), which score_options.cpp reads and checks for check_middle.
#pragma once

#include "attention_units.h"
#include "sequences.h"

namespace mha {

struct MiddleStage {
  SequenceArguments sequences;
  const mha_scheduler *scheduler;
  const Kernels *kernels;
  const mha_score_options *score;
  const mha_norm *norm;
  bool has_output;  // W_O takes the context
  const mha_taps *given_taps;
  mha_taps taps;               // read by check_middle; all NULL where none are given
  Attention attention;         // what the kernels are told
  StridedRows k_rows, v_rows;  // rows that come with the call and go to attention.k and attention.v before it attends; null: none
  // The workspace: offsets from its start, and from begin_passes on what lies there.
  int64_t counter_offset;
  int64_t q_statistics, k_statistics;  // of rows whose heads are normalised together
  AttentionMemory memory;
  UnitCounter *counter;
  float *scratch;
  Sequence *in_pass;       // [batch] the rows of this pass
  Extent *queries, *keys;  // [batch] likewise; null: all rows
  Extent packed[2];        // all queries and all keys of packed sequences
  int64_t next_row;
};

// The shape (num_heads ... head_dim_v, scale), q, k, v, the output, kernels, is_self and has_output are the entry's to set.
template <class Args>
void describe_call(const Args &args, MiddleStage *stage) {
  describe_sequences(args, &stage->sequences);
  stage->scheduler = args.scheduler;
  stage->score = args.score;
  stage->norm = args.norm;
  stage->has_output = false;
  stage->given_taps = args.taps;
  stage->k_rows = stage->v_rows = {};
  Attention &attention = stage->attention;
  attention.gate = {};
  attention.batch = args.batch;
  attention.array_batch = stage->sequences.array_batch();
  attention.n_q = args.n_q;
  attention.most_queries = 0;
  attention.lse = args.lse;
  attention.states = nullptr;
  attention.pairs = {};
  attention.pairs.weights = args.attention_weights;
}

// Whether nothing is asked for of describe_call's fields but the rows, all of them, and MHA_CAUSAL at most.
template <class Args>
bool is_plain_call(const Args &args) {
  return (args.flags & ~MHA_CAUSAL) == 0 && args.reserved == 0 && args.window_left == 0 && args.window_right == 0 && !args.score &&
         !args.q_start && !args.q_lengths && !args.kv_lengths && !args.kv_start && !args.cu_seqlens_q && !args.cu_seqlens_kv &&
         !args.norm && !args.rope && !args.cache && !args.cache_sequences && !args.attention_weights && !args.lse && !args.taps;
}

mha_status check_middle(Report report, MiddleStage *stage);

mha_status check_array_contents(Report report, MiddleStage *stage);

// The valid rows of the arrays, of each sequence that they have room for; null: all.
inline const Extent *valid_queries(const MiddleStage &stage) { return stage.sequences.has_cu_seqlens() ? &stage.packed[0] : stage.queries; }
inline const Extent *valid_keys(const MiddleStage &stage) { return stage.sequences.has_cu_seqlens() ? &stage.packed[1] : stage.keys; }

// After attention.k and attention.v say how they are stored.
void plan_middle(MiddleStage *stage, WorkspaceLayout *layout);

// Binds the stage to its memory, and writes what padding has in the optional outputs. From here on nothing can fail.
void begin_passes(MiddleStage *stage, unsigned char *workspace);

// All rows of the call or, with a ring, as many as it can take at once. False after the last ones, when the cache has grown by all.
bool next_pass(MiddleStage *stage);

// Keys or values in the workspace, packed: a head's positions one after the other. counts_blocks: of packed sequences.
KeyValues packed_floats(const float *base, int64_t width, int64_t head_floats, int64_t positions, int64_t num_kv_heads, bool counts_blocks);

// Rows of keys or values as the attention reads them in place.
KeyValues plain_rows(const StridedRows &rows);

// Stores the rows of keys and values, and measures those that a norm takes together.
void prepare_pass(MiddleStage *stage);

// The same, and attends.
void attend_pass(MiddleStage *stage);

// +0 in the rows of an array [batch][rows][width] that belong to no extent.
void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, void *base, int64_t batch_stride,
                   int64_t row_stride, Storage storage = Storage::f32);

// Heads of queries that are computed, those of them that are read, and heads of keys that they attend with; and the heads of the keys of
// the call that are read.
struct ReadHeads {
  int64_t computed, queries, attended, new_keys;
};
ReadHeads read_heads(const Attention &attention);

// How the stage will be run; and, of arrays that were checked, what it costs. Of keys and values only those that are not projected in
// the call.
void describe_middle(const MiddleStage &stage, mha_call_info *info);
void add_cost_of_middle(const MiddleStage &stage, mha_call_info *info);

}  // namespace mha
