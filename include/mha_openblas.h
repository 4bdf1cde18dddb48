/*
 * The target mha::openblas: OpenBLAS as the back end of a layer's projections.
 *
 *     mha_layer_options options = { .struct_size = sizeof options, .sgemm = mha_openblas_sgemm };
 *
 * Its threads and their settings are OpenBLAS's own and belong to the whole process; nothing here
 * touches them. So are its kernels, which it chooses when it is loaded: a processor newer than
 * itself may get those of a very old one (mha_openblas_core_name says "Prescott", or another name
 * without AVX2), and then OPENBLAS_CORETYPE=SkylakeX in the environment, with AVX2 alone Haswell,
 * makes it several times as fast. It allocates memory of its own at its first call, and has no way
 * to say that there is none: OpenBLAS 0.3.21 then never returns.
 */
#ifndef MHA_OPENBLAS_H
#define MHA_OPENBLAS_H

#ifdef __cplusplus
extern "C" {
#endif

/* cblas_sgemm of OpenBLAS with the signature of mha_sgemm (see mha.h). */
void mha_openblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                        const float *a, int lda, const float *b, int ldb, float beta, float *c,
                        int ldc);

/* The processor that OpenBLAS chose its kernels for, such as "Haswell". Static memory. */
const char *mha_openblas_core_name(void);

#ifdef __cplusplus
}
#endif

#endif /* MHA_OPENBLAS_H */
