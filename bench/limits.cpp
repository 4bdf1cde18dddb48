#include "limits.h"

#include <chrono>

#include "mha.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bench {
namespace {

constexpr int64_t steps = 20000;

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The accumulators stay in registers: an empty asm that claims to change each of them keeps the compiler from folding the chains. One
// macro, since each body has to be compiled for its own instruction set.
#define MHA_PEAK_PROBE(name, target, Vector, zero, fma, constraint)          \
  template <int chains>                                                      \
  target void name() {                                                       \
    Vector acc[chains];                                                      \
    _Pragma("GCC unroll 32") for (int i = 0; i < chains; ++i) acc[i] = zero; \
    Vector a = zero, b = zero;                                               \
    asm volatile("" : "+" constraint(a), "+" constraint(b));                 \
    for (int64_t step = 0; step < steps; ++step) {                           \
      _Pragma("GCC unroll 32") for (int i = 0; i < chains; ++i) {            \
        acc[i] = fma(a, b, acc[i]);                                          \
        asm volatile("" : "+" constraint(acc[i]));                           \
      }                                                                      \
    }                                                                        \
  }

#if defined(__x86_64__)
MHA_PEAK_PROBE(probe_avx512, __attribute__((target("avx512f"))), __m512, _mm512_setzero_ps(), _mm512_fmadd_ps, "v")
MHA_PEAK_PROBE(probe_avx2, __attribute__((target("avx2,fma"))), __m256, _mm256_setzero_ps(), _mm256_fmadd_ps, "x")
#elif defined(__aarch64__)
#define MHA_NEON_FMA(a, b, c) vfmaq_f32(c, a, b)
MHA_PEAK_PROBE(probe_neon, , float32x4_t, vdupq_n_f32(0.0f), MHA_NEON_FMA, "w")
#endif
#define MHA_SCALAR_FMA(a, b, c) ((a) * (b) + (c))
MHA_PEAK_PROBE(probe_scalar, , float, 0.0f, MHA_SCALAR_FMA, "x")

double gflops(void (*probe)(), int chains, int lanes) {
  double best = 0;
  for (int repetition = 0; repetition < 12; ++repetition) {
    const double start = seconds_now();
    probe();
    const double rate = 2e-9 * lanes * chains * static_cast<double>(steps) / (seconds_now() - start);
    if (rate > best) best = rate;
  }
  return best;
}

double best_of(double a, double b) { return a > b ? a : b; }

}  // namespace

double fma_peak(uint32_t instruction_set) {
  switch (instruction_set) {
#if defined(__x86_64__)
    case MHA_INSTRUCTION_SET_AVX512:
      return best_of(gflops(probe_avx512<10>, 10, 16), gflops(probe_avx512<24>, 24, 16));
    case MHA_INSTRUCTION_SET_AVX2:
      return best_of(gflops(probe_avx2<10>, 10, 8), gflops(probe_avx2<12>, 12, 8));
#elif defined(__aarch64__)
    case MHA_INSTRUCTION_SET_NEON:
      return best_of(gflops(probe_neon<12>, 12, 4), gflops(probe_neon<24>, 24, 4));
#endif
    default:
      return best_of(gflops(probe_scalar<8>, 8, 1), gflops(probe_scalar<12>, 12, 1));
  }
}

}  // namespace bench
