// Packed sequences: problems whose arrays have no batch, and in which one sequence comes after the
// other (cu_seqlens_q, cu_seqlens_kv).
#ifndef MHA_TESTS_SUPPORT_PACKED_SEQUENCES_H
#define MHA_TESTS_SUPPORT_PACKED_SEQUENCES_H

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/call.h"
#include "support/outputs.h"
#include "support/specify.h"

namespace support {

struct PackedSequences {
  std::vector<int64_t> q, kv;  // [count + 1] rows at which each begins, and where the last one ends
  std::vector<int64_t> q_start;  // [count]; empty = not given

  int64_t count() const { return static_cast<int64_t>(q.size()) - 1; }
};

// Rows at which sequences of these lengths begin.
inline std::vector<int64_t> StartsOf(const std::vector<int64_t> &lengths) {
  std::vector<int64_t> starts = {0};
  for (const int64_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

// The whole (a problem of batch 1) with everything but sequence b as padding.
template <typename Problem>
Problem OneOf(const Problem &whole, const PackedSequences &packed, int64_t b) {
  Problem one = whole;
  one.q_first = {packed.q[b]};
  one.q_lengths = {packed.q[b + 1] - packed.q[b]};
  one.kv_start = {packed.kv[b]};
  one.kv_lengths = {packed.kv[b + 1] - packed.kv[b]};
  if (!packed.q_start.empty()) one.q_start = {packed.q_start[b]};
  return one;
}

// What a call for all sequences has to give: the rows of each as in a call in which the others are
// padding.
template <typename Problem>
Outputs Specify(const Problem &whole, const PackedSequences &packed) {
  PackedSequences none = packed;
  none.q = none.kv = {0, 0};
  Outputs all = Specify(OneOf(whole, none, 0));
  for (int64_t b = 0; b < packed.count(); b++) {
    const Outputs one = Specify(OneOf(whole, packed, b));
    const auto copy = [&](std::vector<float> Outputs::*field, int64_t outer, int64_t n,
                          const std::vector<int64_t> &starts) {
      const int64_t width = n > 0 ? static_cast<int64_t>((one.*field).size()) / (outer * n) : 0;
      for (int64_t o = 0; o < outer; o++) {
        const auto from = (one.*field).begin() + (o * n + starts[b]) * width;
        std::copy(from, from + (starts[b + 1] - starts[b]) * width,
                  (all.*field).begin() + (o * n + starts[b]) * width);
      }
    };
    for (const auto field : {&Outputs::y, &Outputs::q, &Outputs::context})
      copy(field, 1, whole.n_q, packed.q);
    for (const auto field : {&Outputs::k, &Outputs::v}) copy(field, 1, whole.n_kv, packed.kv);
    for (const auto field :
         {&Outputs::lse, &Outputs::scores, &Outputs::scaled_scores, &Outputs::softcapped_scores,
          &Outputs::masked_scores, &Outputs::attention_weights}) {
      copy(field, whole.num_heads, whole.n_q, packed.q);
    }
  }
  return all;
}

// AttentionData or ForwardData of a problem of batch 1, with packed sequences in its arrays.
template <typename Data>
class PackedData : public Data {
 public:
  template <typename... Given>
  explicit PackedData(const PackedSequences &packed, Given &&...given)
      : Data(std::forward<Given>(given)...) {
    auto &args = this->args;
    auto &sequences = this->sequences;
    sequences.count = packed.count();
    sequences.cu_seqlens_q = q = this->Keep(packed.q);
    if (args.call.n_kv > 0) sequences.cu_seqlens_kv = kv = this->Keep(packed.kv);
    sequences.q_first_positions = this->Keep(packed.q_start);
  }
  int64_t *q, *kv = nullptr;
};

inline Outputs Attend(const AttentionProblem &whole, const PackedSequences &packed,
                      const AttentionCall &call = {}) {
  return PackedData<AttentionData>(packed, whole, call)
      .Compute(call.workspace_fill, call.place, call.workspace_misalignment);
}

inline Outputs Forward(const mha_layer *layer, const LayerProblem &whole,
                       const PackedSequences &packed, const LayerCall &call = {}) {
  return PackedData<ForwardData>(packed, layer, whole, call)
      .Compute(call.workspace_fill, call.place, call.workspace_misalignment);
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_PACKED_SEQUENCES_H
