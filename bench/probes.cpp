#include "probes.h"

#include <string_view>

#include "mha.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bench {
namespace {

constexpr int64_t cache_line = 64;
constexpr int64_t prefetch_distance = 1024;

// Two templates for each instruction set; a macro, since each has to be compiled for its own. The
// values stay in registers: an empty asm that claims to read or change them keeps the compiler from
// folding the chains, taking the product out of them and leaving out the loads.
#define MHA_PROBES(target, Vector, zero, fma, load, constraint)                                   \
  template <int chains>                                                                           \
  target void run_fma(int64_t steps) {                                                            \
    Vector sums[chains];                                                                          \
    _Pragma("GCC unroll 32") for (int i = 0; i < chains; ++i) sums[i] = zero;                     \
    Vector a = zero, b = zero;                                                                    \
    asm volatile("" : "+" constraint(a), "+" constraint(b));                                      \
    for (int64_t step = 0; step < steps; ++step) {                                                \
      _Pragma("GCC unroll 32") for (int i = 0; i < chains; ++i) {                                 \
        sums[i] = fma(a, b, sums[i]);                                                             \
        asm volatile("" : "+" constraint(sums[i]), "+" constraint(a));                            \
      }                                                                                           \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  template <int streams, bool prefetches>                                                         \
  target void run_read(const char *base, int64_t bytes) {                                         \
    for (int64_t offset = 0; offset < bytes; offset += read_step) {                               \
      _Pragma("GCC unroll 8") for (int stream = 0; stream < streams; ++stream) {                  \
        const char *const from = base + stream * bytes + offset;                                  \
        if (prefetches) {                                                                         \
          _Pragma("GCC unroll 4") for (int64_t i = 0; i < read_step; i += cache_line)             \
              __builtin_prefetch(from + prefetch_distance + i);                                   \
        }                                                                                         \
        _Pragma("GCC unroll 64") for (int64_t i = 0; i < read_step;                               \
                                      i += static_cast<int64_t>(sizeof(Vector))) {                \
          Vector value = load(reinterpret_cast<const float *>(from + i));                         \
          asm volatile("" : : constraint(value));                                                 \
        }                                                                                         \
      }                                                                                           \
    }                                                                                             \
  }                                                                                               \
                                                                                                  \
  /* Enough chains for two units of any latency that is known, and few enough for the registers.  \
   */                                                                                             \
  template <int few_chains, int many_chains>                                                      \
  Probes all_probes() {                                                                           \
    constexpr double flops = 2.0 * sizeof(Vector) / sizeof(float);                                \
    return {                                                                                      \
        {{few_chains * flops, run_fma<few_chains>}, {many_chains * flops, run_fma<many_chains>}}, \
        {{1, run_read<1, false>},                                                                 \
         {1, run_read<1, true>},                                                                  \
         {2, run_read<2, false>},                                                                 \
         {2, run_read<2, true>},                                                                  \
         {4, run_read<4, false>},                                                                 \
         {4, run_read<4, true>},                                                                  \
         {8, run_read<8, false>},                                                                 \
         {8, run_read<8, true>}}};                                                                \
  }

#if defined(__x86_64__)
namespace avx512 {
MHA_PROBES(__attribute__((target("avx512f"))), __m512, _mm512_setzero_ps(), _mm512_fmadd_ps,
           _mm512_loadu_ps, "v")
}
namespace avx2 {
MHA_PROBES(__attribute__((target("avx2,fma"))), __m256, _mm256_setzero_ps(), _mm256_fmadd_ps,
           _mm256_loadu_ps, "x")
}
#define MHA_SCALAR_REGISTER "x"
#elif defined(__aarch64__)
#define MHA_NEON_FMA(a, b, c) vfmaq_f32(c, a, b)
namespace neon {
MHA_PROBES(, float32x4_t, vdupq_n_f32(0.0f), MHA_NEON_FMA, vld1q_f32, "w")
}
#define MHA_SCALAR_REGISTER "w"
#endif

#if defined(__FP_FAST_FMAF)
#define MHA_SCALAR_FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MHA_SCALAR_FMA(a, b, c) ((a) * (b) + (c))
#endif
#define MHA_SCALAR_LOAD(from) (*(from))
namespace scalar {
MHA_PROBES(, float, 0.0f, MHA_SCALAR_FMA, MHA_SCALAR_LOAD, MHA_SCALAR_REGISTER)
}

}  // namespace

uint32_t best_instruction_set() {
#define MHA_SET(name, NAME, number, ...) \
  if (mha_instruction_sets() >> number & 1) return number;
#include "../src/kernels/sets.def"
  return MHA_INSTRUCTION_SET_SCALAR;
}

Probes probes_of(uint32_t instruction_set) {
  std::string_view kernels;
#define MHA_SET(name, NAME, number, architecture, of_set, ...) \
  if (instruction_set == number) kernels = #of_set;
#include "../src/kernels/sets.def"
#if defined(__x86_64__)
  if (kernels == "avx512") return avx512::all_probes<10, 24>();
  if (kernels == "avx2") return avx2::all_probes<10, 12>();
#elif defined(__aarch64__)
  if (kernels == "neon") return neon::all_probes<12, 24>();
#endif
  return scalar::all_probes<8, 12>();
}

}  // namespace bench
