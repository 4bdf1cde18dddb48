// The middle stage: q, k, v to context.
#pragma once

#include "arguments.h"
#include "kernels/kernels.h"
#include "schedule.h"
#include "workspace.h"

namespace mha {

inline int64_t padded_width(int64_t head_dim_v) { return (head_dim_v + key_block - 1) / key_block * key_block; }

// Fills in how the attention is cut (block_queries, head_dim_v_padded, scratch) from its dimensions. False if the scratch overflows.
bool plan_attention(Attention *attention, int64_t num_threads);

// Units of work, and their execution: each thread has attention.scratch.floats floats at `scratch`, one after the other.
void run_attention(const Kernels &kernels, const Attention &attention, const mha_scheduler *scheduler, UnitCounter *counter,
                   float *scratch);

}  // namespace mha
