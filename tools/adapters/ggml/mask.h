// What ggml's additive mask means: which keys each query attends to, said as mha_attention reads it
// fastest. The mask is read once per call, and each form gives the same weights as adding it.
#ifndef MHA_GGML_MASK_H
#define MHA_GGML_MASK_H

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mha.h"

namespace mha_ggml {

// Binary16 numbers, [streams, heads, rows, keys], that are added to scores; -infinity masks. Strides
// count numbers. There may be more rows than queries, which are not read.
struct AdditiveMask {
  const uint16_t *data = nullptr;  // nullptr: every query attends to every key
  int64_t row_stride = 0;
  int64_t head_stride = 0;    // 0: one for all heads
  int64_t stream_stride = 0;  // 0: one for all streams
};

// Says how the queries of an operation attend to its keys, as one call of mha_attention or several.
// Each thread or context that calls has its own; memory is kept from call to call.
class MaskedCalls {
 public:
  // The forms, cheapest first. kRanges: from one key to another, perhaps with MHA_CAUSAL and
  // MHA_WINDOW_LEFT.
  enum class Form { kRanges, kLists, kBytes, kBias };

  // Reads a mask, with the scheduler's threads if that is worth it (NULL: on the calling one).
  // Heads are those of queries. Throws std::bad_alloc.
  void read(const AdditiveMask &mask, int64_t streams, int64_t heads, int64_t n_q, int64_t n_kv,
            const mha_scheduler *scheduler);

  size_t count() const { return calls_.size(); }
  Form form(size_t call) const { return calls_[call].form; }
  // Keys from here on have no query in any stream.
  int64_t end_of_keys() const { return end_of_keys_; }

  // Turns the arguments of the whole operation, [batch = streams, n_q, ...], into those of a call.
  // All strides of q, k, v and output are set, those of batch too, and none is MHA_BROADCAST.
  // Overwrites flags, windows, batch, n_q, n_kv, sequences and score_arrays; these point into this
  // object until the next read().
  void apply(size_t call, mha_attention_args &args);

 private:
  // What a row of the mask says: keys begin .. end - 1, of which `open` are attended to; all are if
  // there are no others. Only biased rows add anything else than 0 and -infinity.
  struct Row {
    int32_t begin = 0, end = 0, open = 0;
    bool is_biased = false;

    bool is_range() const { return !is_biased && open == end - begin; }
    bool operator==(const Row &) const;
  };

  // `batch` sequences of `rows` queries, from a row of a stream on: neighbours in one stream, which
  // share its keys, or streams from their first rows on.
  struct Call {
    Form form = Form::kRanges;
    bool is_of_streams = false;
    int64_t stream = 0, row = 0, rows = 0, batch = 1;
    uint32_t flags = 0;
    int64_t window_left = 0;
    int64_t n_kv = 0, num_chosen = 0, begin = 0, at = 0;
    mha_sequences sequences = {};
    mha_score_arrays arrays = {};
  };
};

}  // namespace mha_ggml

#endif  // MHA_GGML_MASK_H
