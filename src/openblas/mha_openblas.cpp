// Empty without this, which src/openblas/CMakeLists.txt defines, so that src/**/*.cpp is the
// library alone.
#if defined(MHA_WITH_OPENBLAS)
#include "mha_openblas.h"

#include <cblas.h>

static_assert(sizeof(blasint) == sizeof(int),
              "this OpenBLAS was built with 64-bit dimensions; mha_sgemm has int");

void mha_openblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                        const float *a, int lda, const float *b, int ldb, float beta, float *c,
                        int ldc) {
  cblas_sgemm(static_cast<CBLAS_ORDER>(order), static_cast<CBLAS_TRANSPOSE>(trans_a),
              static_cast<CBLAS_TRANSPOSE>(trans_b), m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

const char *mha_openblas_core_name(void) { return openblas_get_corename(); }
#endif
