// The middle stage of a call, q, k, v to context, in the order in which both entries go through it:
//
//   describe_call         takes the fields that their argument structs have in common, and reads
//                         sequences and outputs; the entry adds the shape and where its arrays are
//   check_middle          checks all that can be known without reading an array
//   plan_middle           cuts the stage into units, and takes their memory from the workspace
//   check_array_contents  checks lengths, positions, sequences of a cache, slopes, sinks and head
//                         scales; then strides are known
//   begin_passes, then as long as there is a next_pass: attend_pass, before and after which
//   mha_forward has its products
//
// A parameter of the scores is a field of ScoreOptions (kernels/kernels.h), which score_options.cpp
// reads and checks for check_middle.
#pragma once

#include "attention_units.h"
#include "sequences.h"

namespace mha {

struct MiddleStage {
  SequenceArguments sequences;
  const mha_scheduler *scheduler;
  const Kernels *kernels;
  const mha_score_options *score;
  const mha_score_arrays *score_arrays;
  const mha_norm *norm;
  bool has_output;             // W_O takes the context
  mha_outputs outputs;         // all NULL where none are given
  Attention attention;         // what the kernels are told
  StridedRows k_rows, v_rows;  // rows that come with the call and go to attention.k and attention.v
                               // before it attends; null: none
  // The workspace: offsets from its start, and from begin_passes on what lies there.
  int64_t counter_offset;
  int64_t q_statistics, k_statistics;  // of rows whose heads are normalised together
  AttentionMemory memory;
  UnitCounter *counter;
  float *scratch;
  Sequence *in_pass;       // [batch] the rows of this pass
  Extent *queries, *keys;  // [batch] likewise; null: all rows
  int64_t next_row;

  // Whether rows of the arrays may belong to no sequence. Each row of packed arrays belongs to one.
  bool has_padding() const { return queries && !sequences.is_packed(); }
};

// The shape (num_heads ... head_dim_v, scale), q, k, v, the output, kernels and has_output are the
// entry's to set. is_self: the keys are the rows of the queries.
mha_status describe_call(Report report, const CallArguments &args, bool is_self,
                         MiddleStage *stage);

mha_status check_middle(Report report, MiddleStage *stage);

mha_status check_array_contents(Report report, MiddleStage *stage);

// After attention.k and attention.v say how they are stored.
void plan_middle(MiddleStage *stage, WorkspaceLayout *layout);

// Binds the stage to its memory, and writes what padding has in the optional outputs. From here on
// nothing can fail.
void begin_passes(MiddleStage *stage, unsigned char *workspace);

// All rows of the call or, with a ring, as many as it can take at once. False after the last ones,
// when the cache has grown by all.
bool next_pass(MiddleStage *stage);

// Keys or values in the workspace, packed: a head's positions one after the other. counts_blocks:
// of packed sequences.
KeyValues packed_floats(const float *base, int64_t width, int64_t head_floats, int64_t positions,
                        int64_t num_kv_heads, bool counts_blocks);

// Rows of keys or values as the attention reads them in place.
KeyValues plain_rows(const StridedRows &rows);

// Stores the rows of keys and values, and measures those that a norm takes together.
void prepare_pass(MiddleStage *stage);

// The same, and attends.
void attend_pass(MiddleStage *stage);

// +0 in the rows of an array [batch][rows][width] that belong to no extent.
void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, void *base,
                   int64_t batch_stride, int64_t row_stride, Storage storage = Storage::f32);

// Heads of queries that are computed, those of them that are read, and heads of keys that they
// attend with; and the heads of the keys of the call that are read.
struct ReadHeads {
  int64_t computed, queries, attended, new_keys;
};
ReadHeads read_heads(const Attention &attention);

// How the stage will be run; and, of arrays that were checked, what it costs. Of keys and values
// only those that are not projected in the call.
void describe_middle(const MiddleStage &stage, mha_call_info *info);
void add_cost_of_middle(const MiddleStage &stage, mha_call_info *info);

}  // namespace mha
