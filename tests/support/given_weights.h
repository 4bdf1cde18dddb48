// Matrices that are given as a layer keeps them: numbers of 16 bits, or codes and scales of a
// quantiser.
#ifndef MHA_TESTS_SUPPORT_GIVEN_WEIGHTS_H
#define MHA_TESTS_SUPPORT_GIVEN_WEIGHTS_H

#include <mha.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "support/call.h"
#include "support/layer.h"

namespace support {

template <typename Number>
std::vector<unsigned char> BytesOf(const std::vector<Number> &numbers) {
  std::vector<unsigned char> bytes(numbers.size() * sizeof(Number));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// w [in, out] of numbers or codes, in memory as the type and layout say, with `gap` elements
// between rows.
inline std::vector<unsigned char> InMemory(Stored stored, const std::vector<float> &w, int64_t in,
                                           int64_t out, uint32_t layout, int64_t gap) {
  const bool in_out = layout == MHA_LAYOUT_IN_OUT;
  const int64_t rows = in_out ? in : out, width = in_out ? out : in;
  const auto at = [&](int64_t row, int64_t i) {
    return in_out ? w[row * out + i] : w[i * out + row];
  };
  if (stored == Stored::kInt4) {
    const int64_t row_bytes = (width + 1) / 2 + gap / 2;
    std::vector<unsigned char> bytes(rows * row_bytes, 0xff);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t i = 0; i < width; i++) {
        unsigned char &byte = bytes[row * row_bytes + i / 2];
        const auto code = static_cast<unsigned>(static_cast<int>(at(row, i)) + 8);
        byte = static_cast<unsigned char>(i % 2 == 0 ? (byte & 0xf0u) | code
                                                     : (byte & 0x0fu) | code << 4);
      }
    }
    return bytes;
  }
  const int64_t stride = width + gap;
  std::vector<uint16_t> wide(rows * stride, 0x7e01u);
  std::vector<int8_t> narrow(rows * stride, 99);
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < width; i++) {
      const float x = at(row, i);
      narrow[row * stride + i] = static_cast<int8_t>(stored == Stored::kInt8 ? x : 0);
      wide[row * stride + i] =
          stored == Stored::kInt8 ? uint16_t{0} : BitsIn16(static_cast<Storage>(stored), x);
    }
  }
  return stored == Stored::kInt8 ? BytesOf(narrow) : BytesOf(wide);
}

// Scales as they are given: int4 has those of a column side by side.
inline std::vector<unsigned char> ScalesInMemory(Stored stored, const std::vector<float> &scales,
                                                 int64_t out) {
  if (stored == Stored::kInt8) return BytesOf(scales);
  const int64_t groups = static_cast<int64_t>(scales.size()) / out;
  std::vector<float> given(scales.size());
  for (int64_t g = 0; g < groups; g++) {
    for (int64_t n = 0; n < out; n++) given[n * groups + g] = scales[g * out + n];
  }
  return BytesOf(given);
}

inline void Beside(std::vector<float> *all, int64_t rows,
                   const std::vector<const std::vector<float> *> &parts) {
  for (int64_t r = 0; r < rows; r++) {
    for (const std::vector<float> *part : parts) {
      const int64_t columns = static_cast<int64_t>(part->size()) / rows;
      all->insert(all->end(), part->begin() + r * columns, part->begin() + (r + 1) * columns);
    }
  }
}

// A problem whose matrices are of its type already, to be given as they are.
inline LayerData GivenAs(const LayerProblem &problem, uint32_t layout, bool is_fused, int64_t gap,
                         bool gate_in_q = false) {
  LayerData given(problem, Place::kAnywhere);
  given.config.weight_type = static_cast<uint32_t>(problem.stored);
  mha_layer_weights &weights = given.weights;
  weights.layout = layout;
  weights.type = static_cast<uint32_t>(problem.stored);
  const auto stride_of = [&](int64_t in, int64_t out) -> int64_t {
    const int64_t width = layout == MHA_LAYOUT_IN_OUT ? out : in;
    if (gap == 0) return 0;
    return (problem.stored == Stored::kInt4 ? (width + 1) / 2 * 2 : width) + gap;
  };
  const auto keep = [&](const std::vector<unsigned char> &bytes) {
    given.arrays.push_back(CopyOf(bytes, Place::kAnywhere));
    return given.arrays.back().data();
  };
  const auto give = [&](const std::vector<float> &w, const std::vector<float> &s, int64_t in,
                        int64_t out, mha_matrix *matrix) {
    if (w.empty()) return;
    matrix->data = keep(InMemory(problem.stored, w, in, out, layout, gap));
    matrix->row_stride = stride_of(in, out);
    if (!s.empty())
      matrix->scales =
          reinterpret_cast<const float *>(keep(ScalesInMemory(problem.stored, s, out)));
  };
  const int64_t dim = problem.query_dim;
  std::vector<float> w_q = problem.w_q, s_q = problem.s_q;
  if (gate_in_q) {
    w_q = WithGates(problem, w_q, problem.w_g, dim);
    if (!s_q.empty())
      s_q = WithGates(problem, s_q, problem.s_g,
                      static_cast<int64_t>(s_q.size()) / problem.q_width());
    weights.w_g = {};
    if (!problem.b_q.empty()) {
      weights.w_q.bias = reinterpret_cast<const float *>(
          keep(BytesOf(WithGates(problem, problem.b_q, problem.b_g, 1))));
    }
  } else if (problem.gate != GateKind::kNone) {
    give(problem.w_g, problem.s_g, dim, problem.gate_width(), &weights.w_g);
  }
  const int64_t q_width = static_cast<int64_t>(w_q.size()) / dim;
  if (is_fused) {
    std::vector<float> w, s;
    Beside(&w, dim, {&w_q, &problem.w_k, &problem.w_v});
    if (!s_q.empty())
      Beside(&s, static_cast<int64_t>(s_q.size()) / q_width, {&s_q, &problem.s_k, &problem.s_v});
    // The biases stay where they are.
    weights.w_q.data = weights.w_k.data = weights.w_v.data = nullptr;
    give(w, s, dim, q_width + problem.k_width() + problem.v_width(), &weights.w_qkv);
  } else {
    give(w_q, s_q, dim, q_width, &weights.w_q);
    give(problem.w_k, problem.s_k, problem.key_dim, problem.k_width(), &weights.w_k);
    give(problem.w_v, problem.s_v, problem.value_dim, problem.v_width(), &weights.w_v);
  }
  give(problem.w_o, problem.s_o, problem.merged_width(), problem.output_dim, &weights.w_o);
  return given;
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_GIVEN_WEIGHTS_H
