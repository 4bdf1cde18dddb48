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

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_GIVEN_WEIGHTS_H
