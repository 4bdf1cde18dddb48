// Histories of sequences that are fed to a cache in any pieces.
#ifndef MHA_TESTS_SUPPORT_REPLAY_H
#define MHA_TESTS_SUPPORT_REPLAY_H

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/cache.h"
#include "support/fixtures.h"
#include "support/same_bits.h"
#include "support/specify.h"

namespace support {

// The next rows of a sequence of a history.
struct Part {
  int64_t b;
  int64_t count;
};

// Rows first .. first + count of the given sequences, each in a row of a batch, padded to the
// longest.
inline std::vector<float> GatherRows(const std::vector<float> &x, int64_t n, int64_t width,
                                     const std::vector<Part> &parts,
                                     const std::vector<int64_t> &first, int64_t longest,
                                     bool padding_left) {
  std::vector<float> batch(parts.size() * longest * width, FromBits(0x7fc0dead));
  for (size_t p = 0; p < parts.size(); p++) {
    const int64_t at =
        static_cast<int64_t>(p) * longest + (padding_left ? longest - parts[p].count : 0);
    const auto from = x.begin() + (parts[p].b * n + first[parts[p].b]) * width;
    std::copy(from, from + parts[p].count * width, batch.begin() + at * width);
  }
  return batch;
}

// Feeds a history to a cache, piece by piece, and collects what the calls give. A history is a
// self-attention: as many keys as queries per sequence, without lengths or q_start. Sequence b lies
// in sequence sequences[b] of the cache.
class Replay {
 public:
  Replay(const AttentionSizes &history, int64_t y_width, Cache *cache,
         std::vector<int64_t> sequences = {})
      : history_(history),
        y_width_(y_width),
        cache_(cache),
        sequences_(std::move(sequences)),
        lengths_(history.batch, 0) {
    for (int64_t b = static_cast<int64_t>(sequences_.size()); b < history.batch; b++)
      sequences_.push_back(b);
    outputs_.y.assign(history.batch * history.n_q * y_width, Unwritten());
    outputs_.lse.assign(history.batch * history.num_heads * history.n_q, Unwritten());
  }

  const Outputs &outputs() const { return outputs_; }
  int64_t length(int64_t b) const { return lengths_[b]; }
  bool Finished() const {
    return std::all_of(lengths_.begin(), lengths_.end(),
                       [&](int64_t length) { return length == history_.n_q; });
  }

  void Truncate(int64_t b, int64_t length) {
    cache_->Truncate(sequences_[b], length);
    lengths_[b] = length;
  }
  void SetLength(int64_t b, int64_t length) {
    lengths_[b] = length;
  }  // after a change of the cache
  void MoveTo(Cache *cache) { cache_ = cache; }

  // One call for the next rows of some sequences, by mha_attention.
  void Step(const AttentionProblem &history, const std::vector<Part> &parts, AttentionCall call,
            bool padding_left = false) {
    AttentionProblem step;
    const int64_t longest = Prepare(parts, padding_left, &step, &call.cache);
    step.q = GatherRows(history.q, history.n_q, history.num_heads * history.head_dim, parts,
                        lengths_, longest, padding_left);
    step.k = GatherRows(history.k, history.n_q, history.num_kv_heads * history.head_dim, parts,
                        lengths_, longest, padding_left);
    step.v = GatherRows(history.v, history.n_q, history.num_kv_heads * history.head_dim_v, parts,
                        lengths_, longest, padding_left);
    call.asked = kAskLse;
    Collect(parts, longest, padding_left, Attend(step, call));
  }

  // The same by mha_forward.
  void Step(const LayerProblem &history, const std::vector<Part> &parts, const mha_layer *layer,
            LayerCall call, bool padding_left = false) {
    LayerProblem step = history;
    const int64_t longest = Prepare(parts, padding_left, &step, &call.cache);
    step.query = GatherRows(history.query, history.n_q, history.query_dim, parts, lengths_, longest,
                            padding_left);
    call.asked = kAskLse;
    Collect(parts, longest, padding_left, Forward(layer, step, call));
  }

  // Some sequences that are not at their end, and how many rows each. At most `most` rows.
  std::vector<Part> RandomParts(Random *random, int64_t most) const {
    std::vector<Part> parts;
    const int64_t limit = random->Pick<int64_t>({1, 1, 3, 17, 64, most});
    while (parts.empty()) {
      for (int64_t b = 0; b < history_.batch; b++) {
        const int64_t left = history_.n_q - lengths_[b];
        if (left > 0 && random->Chance(0.7))
          parts.push_back({b, random->Between(1, std::min({left, limit, most}))});
      }
    }
    for (size_t n = parts.size(); n > 1; n--)
      std::swap(parts[n - 1], parts[random->Between(0, static_cast<int64_t>(n) - 1)]);
    return parts;
  }

  // All sequences as far as they are not at their end.
  std::vector<Part> EachBy(int64_t count) const {
    std::vector<Part> parts;
    for (int64_t b = 0; b < history_.batch; b++) {
      if (lengths_[b] < history_.n_q)
        parts.push_back({b, std::min(count, history_.n_q - lengths_[b])});
    }
    return parts;
  }

 private:
  // The sizes of the step, but for its rows. Returns the longest part.
  int64_t Prepare(const std::vector<Part> &parts, bool padding_left, AttentionSizes *step,
                  CacheUse *use) const {
    int64_t longest = 0;
    bool same = true;
    for (const Part &part : parts) longest = std::max(longest, part.count);
    *step = history_;
    step->batch = static_cast<int64_t>(parts.size());
    step->n_q = step->n_kv = longest;
    use->cache = cache_->get();
    use->sequences.clear();
    bool in_order = true;
    for (size_t p = 0; p < parts.size(); p++) {
      same = same && parts[p].count == longest;
      step->q_lengths.push_back(parts[p].count);
      use->sequences.push_back(sequences_[parts[p].b]);
      in_order = in_order && use->sequences.back() == static_cast<int64_t>(p);
    }
    if (same) step->q_lengths.clear();
    step->kv_lengths = step->q_lengths;
    if (padding_left) PadLeft(longest % 2 == 0, step);
    if (in_order) use->sequences.clear();
    if (step->rope) {
      for (std::vector<int64_t> *positions : {&step->rope->q_positions, &step->rope->k_positions}) {
        if (positions->empty()) continue;
        std::vector<int64_t> gathered(parts.size() * longest, -1);
        for (size_t p = 0; p < parts.size(); p++) {
          const int64_t at =
              static_cast<int64_t>(p) * longest + (padding_left ? longest - parts[p].count : 0);
          const auto from = positions->begin() + parts[p].b * history_.n_q + lengths_[parts[p].b];
          std::copy(from, from + parts[p].count, gathered.begin() + at);
        }
        *positions = gathered;
      }
    }
    return longest;
  }

  void Collect(const std::vector<Part> &parts, int64_t longest, bool padding_left,
               const Outputs &step) {
    for (size_t p = 0; p < parts.size(); p++) {
      const Part &part = parts[p];
      const int64_t from = padding_left ? longest - part.count : 0, to = lengths_[part.b],
                    batch_at = static_cast<int64_t>(p);
      std::copy_n(step.y.begin() + (batch_at * longest + from) * y_width_, part.count * y_width_,
                  outputs_.y.begin() + (part.b * history_.n_q + to) * y_width_);
      for (int64_t h = 0; h < history_.num_heads; h++) {
        std::copy_n(step.lse.begin() + (batch_at * history_.num_heads + h) * longest + from,
                    part.count,
                    outputs_.lse.begin() + (part.b * history_.num_heads + h) * history_.n_q + to);
      }
      lengths_[part.b] += part.count;
    }
  }

  AttentionSizes history_;
  int64_t y_width_;
  Cache *cache_;
  std::vector<int64_t> sequences_;
  std::vector<int64_t> lengths_;
  Outputs outputs_;
};

// Sequence b's rows first .. first + count as a cache stores them and hands them out again.
inline KeysAndValues SpecifyStored(const AttentionProblem &history, int64_t b, int64_t first,
                                   int64_t count) {
  const spec::Functions &functions = spec::Fastest();
  KeysAndValues rows;
  rows.k =
      SliceRows(history.k, b, history.n_kv, history.num_kv_heads * history.head_dim, first, count);
  rows.v = SliceRows(history.v, b, history.n_kv, history.num_kv_heads * history.head_dim_v, first,
                     count);
  WithRotation(history, b, [&](const Rotation *rotation) {
    for (int64_t j = 0; rotation && j < count; j++) {
      functions.rotate(*rotation,
                       rotation->k_positions ? rotation->k_positions[first + j] : first + j,
                       history.num_kv_heads, history.head_dim,
                       rows.k.data() + j * history.num_kv_heads * history.head_dim);
    }
  });
  KeysAndValues stored = rows;
  functions.store(history.k_type, rows.k.data(), count * history.num_kv_heads, history.head_dim,
                  stored.k.data());
  functions.store(history.v_type, rows.v.data(), count * history.num_kv_heads, history.head_dim_v,
                  stored.v.data());
  for (int64_t row = 0; history.values_in_keys && row < count * history.num_kv_heads; row++) {
    std::copy_n(stored.k.begin() + row * history.head_dim, history.head_dim_v,
                stored.v.begin() + row * history.head_dim_v);
  }
  return stored;
}

inline testing::AssertionResult SameBits(const KeysAndValues &actual,
                                         const KeysAndValues &expected) {
  const testing::AssertionResult k = SameBits("k", actual.k, expected.k);
  return k ? SameBits("v", actual.v, expected.v) : k;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_REPLAY_H
