// The norm of the context before W_O, and the gate behind it. CONTRACT.md, section 10.
#pragma once

#include "prepare.h"
#include "states.h"

namespace mha {
namespace {

template <class V>
void normalize_context(const Attention &call, int64_t sequence_index, int64_t row_begin, int64_t row_end) {
  const Sequence &sequence = call.sequences[sequence_index];
  const Norm &norm = call.context_norm;
  const int64_t width = call.head_dim_v, stride = call.output_head_stride, together = norm.is_of_all_heads ? call.num_heads : 1;
  for (int64_t row = sequence.q_first + row_begin; row < sequence.q_first + row_end; ++row) {
    float *x = static_cast<float *>(call.output) + sequence.in_arrays * call.output_batch_stride + row * call.output_row_stride;
    Statistics found = {};
    for (int64_t head = 0; head < call.num_heads; ++head, x += stride) {
      const auto row_of = [x, stride](int64_t other) MHA_INLINED { return x + other * stride; };
      if (head % together == 0) found = statistics_of<V>(norm, together, width, row_of);
      scale_normal<V>(norm, found, head, width, x);
      if (call.gates_late && call.gate.values.base) apply_gate<V>(call.gate, sequence.in_arrays, row, head, width, x);
    }
  }
}

}  // namespace
}  // namespace mha
