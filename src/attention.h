// The middle stage: q, k, v to context.
#pragma once

#include "arguments.h"
#include "kernels/kernels.h"
#include "schedule.h"
#include "workspace.h"

namespace mha {

inline int64_t padded_width(int64_t head_dim_v) { return (head_dim_v + key_block - 1) / key_block * key_block; }

// Where the middle stage's memory lies in the workspace, in bytes from its start.
struct AttentionMemory {
  int64_t sequences, query_extents, key_extents;  // extents only if some rows may be no part of the call
  int64_t unfinished, part_states;                // only for several threads
  int64_t scratch;                                // one for each thread
};

// Fills in how the attention is cut (block_queries, head_dim_v_padded, scratch) from its dimensions, of which n_kv is the most that a
// sequence may have, and takes the memory for it.
AttentionMemory plan_attention(Attention *attention, int64_t num_threads, bool is_ragged, Carving *carving);

// Points the attention to that memory.
void bind_attention(const AttentionMemory &memory, unsigned char *workspace, Attention *attention);

// Units of work, and their execution.
void run_attention(const Kernels &kernels, Attention *attention, const mha_scheduler *scheduler, UnitCounter *counter, float *scratch);

// Keys and values to their packed storage; scratch as for run_attention.
void run_storing(const Kernels &kernels, const Attention &attention, const Storing (&storings)[2], const mha_scheduler *scheduler,
                 UnitCounter *counter, float *scratch);

// +0 in the rows of an array [batch][rows][width] that belong to no extent.
void clear_padding(const Extent *extents, int64_t batch, int64_t rows, int64_t width, float *base, int64_t batch_stride,
                   int64_t row_stride);

// The outputs of the middle stage for such rows, the context aside: no key takes part in them.
void clear_padding_of(const Attention &attention, const Extent *extents);

}  // namespace mha
