// Calls whose sequences consist of rows alone: mha_recurrent_attention and mha_causal_conv.
#pragma once

#include "../plan/sequences.h"
#include "attend.h"

namespace mha {

// The valid rows of sequence b.
inline SequenceRows rows_of(const SequenceArguments &s, int64_t b) {
  return {b, s.is_packed() ? 0 : b, first_query(s, b), queries_of(s, b)};
}

// Writes +0 to rows of padding, which packed sequences do not have.
inline void clear_padding(const SequenceArguments &s, const OutputRows &output, int64_t heads,
                          int64_t width) {
  if (s.is_packed() || !s.is_ragged()) return;
  for (int64_t b = 0; b < s.batch; ++b) {
    const Extent valid = {first_query(s, b), queries_of(s, b), 0, 0};
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = b * output.batch_stride + h * output.head_stride;
      clear_padding(&valid, 1, s.n_q, width,
                    static_cast<char *>(output.base) + at * bytes_of(output.storage), 0,
                    output.row_stride, output.storage);
    }
  }
}

}  // namespace mha
