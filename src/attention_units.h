// The units of work of the middle stage: their size, their memory and their execution.
#pragma once

#include "kernels/kernels.h"
#include "schedule.h"
#include "workspace.h"

namespace mha {

// Where their memory lies in the workspace, in bytes from its start.
struct AttentionMemory {
  int64_t sequences, query_extents,
      key_extents;                  // extents only if some rows may be no part of the call
  int64_t unfinished, part_states;  // only for several threads
  int64_t row_states;               // only for outputs per pair: m and l of all rows
  int64_t scratch;                  // one for each thread
};

// Fills in how the attention is cut (block_queries, head_dim_v_padded, scratch) from its
// dimensions, the window and what keys and values are, for sequences of up to max_keys keys, and
// takes the memory for it.
AttentionMemory plan_attention(Attention *attention, int64_t max_keys, int64_t num_threads,
                               bool is_ragged, WorkspaceLayout *layout);

// The same cut for sequences of up to longest_q queries, which are no more than those that were
// planned for.
void cut_queries(int64_t longest_q, int64_t num_threads, Attention *attention);

// Points the attention to that memory.
void bind_attention(const AttentionMemory &memory, unsigned char *workspace, Attention *attention);

// Rows of keys and values to their packed storage, and statistics of keys and queries; what has no
// rows is left out. scratch: that of all threads.
void run_preparation(const Kernels &kernels, const Attention &attention,
                     const KvStore (&kv_stores)[2], const RowMeasure (&measures)[2],
                     const mha_scheduler *scheduler, UnitCounter *counter, float *scratch);

// The norm of the context, in place, once it is there.
void run_context_norm(const Kernels &kernels, const Attention &attention,
                      const mha_scheduler *scheduler, UnitCounter *counter);

// All units, and then the outputs per pair.
void run_attention(const Kernels &kernels, Attention *attention, const mha_scheduler *scheduler,
                   UnitCounter *counter, float *scratch);

}  // namespace mha
