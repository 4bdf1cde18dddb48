// A caller's matrix product of which the results are known to the bit.
#ifndef MHA_TESTS_SUPPORT_SGEMM_H
#define MHA_TESTS_SUPPORT_SGEMM_H

#include <algorithm>
#include <cstdint>
#include <vector>

#include "spec/spec.h"

namespace support {

// A product as the specification has it: with it, projections through a caller's sgemm have the
// bits of the library's own.
inline void SgemmOfTheSpecification(int, int, int, int m, int n, int k, float, const float *a,
                                    int lda, const float *b, int ldb, float, float *c, int ldc) {
  std::vector<float> x, w, y(static_cast<size_t>(m) * static_cast<size_t>(n));
  for (int i = 0; i < m; i++) x.insert(x.end(), a + int64_t{i} * lda, a + int64_t{i} * lda + k);
  for (int i = 0; i < k; i++) w.insert(w.end(), b + int64_t{i} * ldb, b + int64_t{i} * ldb + n);
  spec::Fastest().project(x.data(), w.data(), nullptr, m, k, n, y.data());
  for (int i = 0; i < m; i++)
    std::copy(y.begin() + int64_t{i} * n, y.begin() + int64_t{i} * n + n, c + int64_t{i} * ldc);
}

}  // namespace support

#endif  // MHA_TESTS_SUPPORT_SGEMM_H
