/*
 * The target mha::openblas: OpenBLAS as the back end of a layer's projections.
 *
 *     mha_layer_options options = { .struct_size = sizeof options, .sgemm = mha_openblas_sgemm };
 *
 * OpenBLAS owns its threads and their settings, which are the same for the whole process; this
 * target never changes them. OpenBLAS chooses its kernels when it is loaded. On a processor that is
 * newer than OpenBLAS, it may choose very old ones (mha_openblas_core_name returns "Prescott" or
 * another name without AVX2). Setting OPENBLAS_CORETYPE=SkylakeX in the environment (Haswell for
 * AVX2) then makes it several times as fast. OpenBLAS allocates memory at its first call and cannot
 * report failure: version 0.3.21 then never returns.
 */
#ifndef MHA_OPENBLAS_H
#define MHA_OPENBLAS_H

#ifdef __cplusplus
extern "C" {
#endif

/* cblas_sgemm of OpenBLAS, with the signature of mha_sgemm (mha_extra.h). */
void mha_openblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                        const float *a, int lda, const float *b, int ldb, float beta, float *c,
                        int ldc);

/* Returns the processor that OpenBLAS chose its kernels for, such as "Haswell". Static string. */
const char *mha_openblas_core_name(void);

#ifdef __cplusplus
}
#endif

#endif /* MHA_OPENBLAS_H */
