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
#include "support/random.h"
#include "support/specify.h"

namespace support {

// What is in memory for `type` when its numbers are x, each of which it holds.
inline Memory InType(uint32_t type, const float *x, size_t count) {
  if (type == MHA_TYPE_F32) return CopyOf(std::vector<float>(x, x + count), Place::kBeforeGuard);
  std::vector<uint16_t> bits;
  for (size_t n = 0; n < count; n++) bits.push_back(BitsIn16(static_cast<Storage>(type), x[n]));
  return CopyOf(bits, Place::kBeforeGuard);
}

// A problem whose matrices are of its type already, to be given as they are.
inline LayerData GivenAs(const LayerProblem &problem, uint32_t layout, bool is_fused, int64_t gap) {
  LayerForm form;
  form.layout = layout;
  form.form = is_fused ? WeightForm::kFused : WeightForm::kThreeMatrices;
  form.row_gap = gap;
  return LayerData(problem, Place::kAnywhere, form);
}

// The formats of weights in groups of a quantiser: all codes, and types that only it gives.
inline std::vector<WeightFormat> GroupFormats() {
  std::vector<WeightFormat> formats = {{Stored::kInt5, Arithmetic::kInt8, "int5 in int8"},
                                       {Stored::kInt5, Arithmetic::kInt16, "int5 in int16"},
                                       {Stored::kInt6, Arithmetic::kInt8, "int6 in int8"},
                                       {Stored::kInt6, Arithmetic::kInt16, "int6 in int16"}};
  for (const WeightFormat &format : kWeightFormats)
    if (format.stored >= Stored::kInt8) formats.push_back(format);
  return formats;
}

// What codes with offsets exceed those without by.
inline float CentreOf(Stored stored) {
  return stored < Stored::kInt4    ? 0.0f
         : stored == Stored::kInt4 ? 8.0f
         : stored == Stored::kInt5 ? 16.0f
                                   : 32.0f;
}

// Codes in groups of a quantiser. Of the matrices q, k, v and o those have offsets whose bits are
// set.
inline LayerProblem InGroups(Random *random, LayerProblem problem, Stored stored, int64_t group,
                             uint32_t offsets, uint32_t scale_type) {
  problem.group = group;
  LayerProblem given = Converted(problem, std::min(stored, Stored::kInt4));
  given.stored = stored;
  given.scale_type = scale_type;
  const int64_t in = problem.query_dim;
  const struct {
    std::vector<float> *w, *scales, *offsets;
    int64_t in;
  } matrices[] = {{&given.w_q, &given.s_q, &given.o_q, in},
                  {&given.w_k, &given.s_k, &given.o_k, in},
                  {&given.w_v, &given.s_v, &given.o_v, in},
                  {&given.w_o, &given.s_o, &given.o_o, problem.merged_width()}};
  for (const auto &m : matrices) {
    const float centre = CentreOf(stored);
    for (float &code : *m.w) {
      if (stored > Stored::kInt4)
        code =
            static_cast<float>(random->Between(0, 2 * static_cast<int64_t>(centre) - 1)) - centre;
      if (offsets & 1) code += centre;
    }
    const auto count = static_cast<int64_t>(m.scales->size());
    if (offsets & 1) *m.offsets = random->Normals(count, 0.1f);
    offsets >>= 1;
    for (std::vector<float> *numbers : {m.scales, m.offsets}) {
      if (scale_type == MHA_TYPE_F16) *numbers = Rounded(Storage::kF16, *numbers);
      if (scale_type != MHA_TYPE_INT8 || numbers->empty()) continue;
      for (float &code : *numbers) code = static_cast<float>(random->Between(-128, 127));
      const std::vector<float> factors = Rounded(
          Storage::kF16,
          random->Normals((m.in + 255) / 256 * count / ((m.in + group - 1) / group), 0.01f));
      numbers->insert(numbers->end(), factors.begin(), factors.end());
    }
  }
  return given;
}

// A type that scales of groups may have.
inline uint32_t AnyScales(Random *random, const WeightFormat &kind) {
  return IsOfIntegers(kind) ? random->Pick({MHA_TYPE_F32, MHA_TYPE_F16, MHA_TYPE_INT8})
                            : random->Pick({MHA_TYPE_F32, MHA_TYPE_F16});
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_GIVEN_WEIGHTS_H
