// Runs the attention of a call, from q, k and v to the context. mha_forward and mha_attention use
// it (mha_choose_keys has prepare_pass in place of attend_pass):
//
//   begin_passes    cuts the work into units and finds the memory in the workspace
//   next_pass       describes the rows of the next pass: all rows, but for long calls over a ring
//   attend_pass     stores new keys and values, then attends; mha_forward has its products before
//                   and after it
//
// Nothing here can fail: check/request.cpp has checked everything, arrays too.
#pragma once

#include "../base/schedule.h"
#include "../plan/attention_plan.h"
#include "../plan/rows.h"

namespace mha {

struct AttentionStage {
  SequenceArguments sequences;
  const mha_scheduler *scheduler;
  const Kernels *kernels;
  mha_outputs outputs;  // all NULL where none are given
  Attention attention;
  // The workspace.
  UnitCounter *counter;
  float *scratch;
  Sequence *in_pass;       // [batch] the rows of this pass
  Extent *queries, *keys;  // [batch] the same for the products; null: all rows
  int64_t next_row;
  bool units_store;  // units of the attention store the new rows of their kv heads

  // Whether rows of the arrays may belong to no sequence. Each row of packed arrays belongs to one.
  bool has_padding() const { return queries && !sequences.is_packed(); }
};

// Whether several units would pack the same plain keys and values, each for so few rows that it
// takes long. attention.request and plan are set.
bool packs_often(const AttentionStage &stage);

// attention.request, plan and arrays are set. Writes what padding has in the optional outputs.
void begin_passes(AttentionStage *stage, unsigned char *workspace);

// All rows of the call or, with a ring, as many as it can take at once. Returns false after the
// last ones, when the cache counts all new positions.
bool next_pass(AttentionStage *stage);

// Stores new rows of keys and values, and measures rows whose heads are normalised together.
void prepare_pass(const AttentionStage &stage);

// The same, and attends.
void attend_pass(AttentionStage *stage);

// Keys or values in the workspace, packed: positions of one head lie side by side. counts_blocks:
// sequences are packed, and their numbers are those of blocks of 16 positions.
KeyValues packed_floats(const float *base, int64_t row_stride, int64_t head_floats,
                        int64_t positions, int64_t num_kv_heads, bool counts_blocks);

// The same as codes of 8 bits, behind which come the scales of all `heads` rows of positions; and
// the floats of memory that a position takes. Keys are transformed as in a cache.
KeyValues packed_codes_at(float *base, bool are_keys, int64_t width, int64_t positions,
                          int64_t num_kv_heads, int64_t heads, bool counts_blocks);
int64_t floats_of_codes(int64_t width);

// Writes +0 to the rows of an array [batch][rows][width] that belong to no extent.
void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, void *base,
                   int64_t batch_stride, int64_t row_stride, Storage storage = Storage::f32);

}  // namespace mha
