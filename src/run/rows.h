// Calls whose sequences consist of rows alone: mha_recurrent_attention and mha_causal_conv.
#pragma once

#include "../plan/sequences.h"
#include "../storage.h"

namespace mha {

inline StridedRows rows_of(const mha_input &input) {
  return {input.data, input.strides.batch, input.strides.row, input.strides.head,
          storage_of_type(input.type)};
}
inline OutputRows rows_of(const mha_output &output) {
  return {output.data, storage_of_type(output.type), output.strides.batch, output.strides.row,
          output.strides.head};
}

// The valid rows of sequence b.
inline SequenceRows rows_of(const SequenceArguments &s, int64_t b) {
  return {b, s.is_packed() ? 0 : b, first_query(s, b), queries_of(s, b)};
}

// Writes zeros to padding, which packed sequences do not have.
void clear_padding(const SequenceArguments &sequences, const OutputRows &output, int64_t heads,
                   int64_t width);

}  // namespace mha
