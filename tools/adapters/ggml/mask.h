// What ggml's additive mask means: which keys each query attends to, as mha_attention takes it
// fastest. Each operation reads its mask once.
#pragma once

#include <mha.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mha_ggml {

// Binary16 numbers, [streams, heads, rows, keys], that are added to scores; -infinity masks.
// Strides count numbers. Rows after those of the queries are not read.
struct AdditiveMask {
  const uint16_t *data = nullptr;  // nullptr: every query attends to every key
  int64_t row_stride = 0;
  int64_t head_stride = 0;    // 0: one for all heads
  int64_t stream_stride = 0;  // 0: one for all streams
};

// Cuts an operation into calls of mha_attention, mostly into one. An object keeps its memory for
// the next operation; only one thread at a time uses it.
class MaskedCalls {
 public:
  // How a call masks keys. The mask itself as a bias of binary16 is as fast as bytes made of it.
  enum class Form {
    kRanges,  // each query attends to all keys from one to another: flags and lengths
    kLists,   // each query attends to few keys: chosen_keys
    kBias     // anything else, also numbers other than 0 and -infinity
  };

  // Reads a mask, with the scheduler's threads if it is large; NULL: on the calling thread. Throws
  // std::bad_alloc. The mask stays as it is until the last call has run.
  void read(const AdditiveMask &mask, int64_t streams, int64_t heads, int64_t n_q, int64_t n_kv,
            const mha_scheduler *scheduler);

  size_t count() const { return calls_.size(); }
  Form form(size_t call) const { return calls_[call].form; }
  // No query of any stream attends to keys from here on.
  int64_t end_of_keys() const { return end_of_keys_; }

  // Turns the arguments of the operation, [batch = streams, n_q, ...], into those of a call. The
  // types and strides of q, k, v and output are set, those of batch too. Sets flags, windows,
  // batch, n_q, n_kv, sequences and score_arrays, which are valid until the next apply or read.
  void apply(size_t call, mha_attention_args &args);

 private:
  // What a row says: keys before begin and from end on are masked, and `open` of the others are
  // not. Without any, both ends are 0.
  struct Row {
    int64_t begin = 0, end = 0, open = 0;
    bool is_biased = false;  // adds something else than 0 and -infinity

    bool is_range() const { return !is_biased && open == end - begin; }
  };
  // `batch` sequences of `rows` queries: neighbours in a stream, which share its keys, or streams.
  struct Call {
    Form form = Form::kRanges;
    bool is_of_streams = false;
    uint32_t flags = 0;
    int64_t stream = 0, row = 0, rows = 0, batch = 1, window_left = 0;
    int64_t begin = 0, n_kv = 0, num_chosen = 0;  // keys of all sequences
    size_t entry = 0, list = 0;                   // in the arrays below

    bool is_like(const Call &other) const {
      return form == other.form && rows == other.rows && flags == other.flags &&
             window_left == other.window_left;
    }
  };

  static Row read_row(const uint16_t *keys, int64_t n_kv);
  const uint16_t *row_of_mask(int64_t row) const {  // row n_q is the first one of stream 1
    return mask_.data + row / n_q_ * mask_.stream_stride + row % n_q_ * mask_.row_stride;
  }
  void plan_stream(int64_t stream);
  void write_lists(Call &call, const mha_scheduler *scheduler);

  AdditiveMask mask_;
  int64_t n_q_ = 0, end_of_keys_ = 0;
  std::vector<Row> rows_;
  std::vector<Call> calls_;
  std::vector<int64_t> kv_first_rows_, kv_lengths_, q_first_positions_;  // of each sequence
  std::vector<int32_t> lists_;
  mha_sequences sequences_ = {};
  mha_score_arrays arrays_ = {};
};

}  // namespace mha_ggml
