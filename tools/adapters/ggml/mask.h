// What ggml's additive mask means: which keys each query attends to, as mha_attention takes it
// fastest. Each operation reads its mask once.
#pragma once

#include <mha.h>

#include <algorithm>
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

// Runs body(begin, end) for parts of `count` rows, which have `numbers` numbers together; with the
// scheduler's threads if they are many. NULL: on the calling thread.
template <class Body>
void in_parts(const mha_scheduler *scheduler, int64_t count, int64_t numbers, const Body &body) {
  const int64_t threads = scheduler ? scheduler->num_threads : 1,
                parts = std::min({count, numbers >> 16, threads});
  if (parts <= 1) return body(0, count);
  const auto run_part = [&](int64_t part) {
    body(count * part / parts, count * (part + 1) / parts);
  };
  scheduler->parallel_for(
      scheduler->context, static_cast<uint32_t>(parts),
      [](void *run, uint32_t part) { (*static_cast<decltype(run_part) *>(run))(part); },
      const_cast<void *>(static_cast<const void *>(&run_part)));
}

// Cuts an operation into calls of mha_attention, mostly into one. An object keeps its memory for
// the next operation; only one thread at a time uses it.
class MaskedCalls {
 public:
  // Reads a mask. Throws std::bad_alloc. The mask stays as it is until the last call has run.
  void read(const AdditiveMask &mask, int64_t streams, int64_t n_q, int64_t n_kv,
            const mha_scheduler *scheduler);

  size_t count() const { return calls_.size(); }
  // No query of any stream attends to keys from here on.
  int64_t end_of_keys() const { return end_of_keys_; }

  // Turns the arguments of the operation, [batch = streams, n_q, ...], into those of a call, which
  // are valid until the next apply or read. Types and strides of q, k, v and output are set.
  void apply(size_t call, mha_attention_args &args);

 private:
  // How a call masks keys. The mask itself as a bias of binary16 is as fast as bytes made of it.
  enum class Form {
    kRanges,  // each query attends to all keys from one to another: flags and lengths
    kLists,   // each query attends to few keys: chosen_keys
    kBias     // anything else, also numbers other than 0 and -infinity
  };
  // What a row says: keys before begin and from end on are masked, and `open` of the others are
  // not. Without any, both ends are 0.
  struct Row {
    int64_t begin, end, open;
    bool is_biased;  // adds something else than 0 and -infinity

    bool is_range() const { return !is_biased && open == end - begin; }
  };
  // `batch` sequences of `rows` queries: whole streams, or neighbours in a stream, which share its
  // keys.
  struct Call {
    Form form = Form::kRanges;
    uint32_t flags = 0;
    int64_t first = 0, rows = 0, batch = 1, window_left = 0;
    int64_t end = 0, num_chosen = 0;  // of all sequences
    size_t entry = 0, list = 0;       // in the arrays below
  };

  static Row read_row(const uint16_t *keys, int64_t n_kv);
  // Rows of all streams are counted through.
  const uint16_t *row_of_mask(int64_t row) const {
    return mask_.data + row / n_q_ * mask_.stream_stride + row % n_q_ * mask_.row_stride;
  }
  int64_t add_call(int64_t first);
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
