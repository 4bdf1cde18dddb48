#include "dots.h"

#include "mha.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bench {
namespace {

// As in probes.cpp. Instructions that not every compiler has are written out; MHA_HAS_* says which the assembler knows.
#define MHA_DOTS(name, target, Vector, constraint, products, add)                                     \
  namespace name {                                                                                    \
  template <int chains>                                                                               \
  target void run(int64_t steps) {                                                                    \
    Vector sums[chains], a = {}, b = {};                                                              \
    _Pragma("GCC unroll 32") for (int i = 0; i < chains; ++i) sums[i] = a;                            \
    asm volatile("" : "+" constraint(a), "+" constraint(b));                                          \
    for (int64_t step = 0; step < steps; ++step) {                                                    \
      _Pragma("GCC unroll 32") for (int i = 0; i < chains; ++i) {                                     \
        Vector &sum = sums[i];                                                                        \
        add;                                                                                          \
        asm volatile("" : "+" constraint(sum), "+" constraint(a));                                    \
      }                                                                                               \
    }                                                                                                 \
  }                                                                                                   \
  template <int few_chains, int many_chains>                                                          \
  std::vector<DotProbe> all() {                                                                       \
    return {{2.0 * products * few_chains, run<few_chains>}, {2.0 * products * many_chains, run<many_chains>}}; \
  }                                                                                                   \
  }

#if defined(__x86_64__)
#define MHA_AVX2 __attribute__((target("avx2")))
#define MHA_AVX512 __attribute__((target("avx512f,avx512bw")))
MHA_DOTS(avx2, MHA_AVX2, __m256i, "x", 16, sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)))
MHA_DOTS(avx512, MHA_AVX512, __m512i, "v", 32, sum = _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)))
#if defined(MHA_HAS_AVX2_VNNI)
MHA_DOTS(avx2_bytes, MHA_AVX2, __m256i, "x", 32, asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)))
MHA_DOTS(avx2_words, MHA_AVX2, __m256i, "x", 16, asm volatile("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)))
#endif
#if defined(MHA_HAS_AVX512_VNNI)
MHA_DOTS(avx512_bytes, MHA_AVX512, __m512i, "v", 64, asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)))
MHA_DOTS(avx512_words, MHA_AVX512, __m512i, "v", 32, asm volatile("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)))
#endif
#elif defined(__aarch64__)
MHA_DOTS(neon, , int32x4_t, "w", 4, asm volatile("smlal %0.4s, %1.4h, %2.4h" : "+w"(sum) : "w"(a), "w"(b)))
#if defined(__clang__)
#define MHA_WITH(feature) __attribute__((target(feature)))
#else
#define MHA_WITH(feature) __attribute__((target("arch=armv8.2-a+" feature)))
#endif
#if defined(MHA_HAS_NEON_DOTPROD)
MHA_DOTS(neon_dots, MHA_WITH("dotprod"), int32x4_t, "w", 16,
         asm volatile("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b)))
#endif
#if defined(MHA_HAS_NEON_I8MM)
MHA_DOTS(neon_matrices, MHA_WITH("i8mm"), int32x4_t, "w", 32,
         asm volatile("usmmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(a), "w"(b)))
#endif
#endif
MHA_DOTS(scalar, , int32_t, "r", 1, sum += a * b)

}  // namespace

std::vector<DotProbe> dot_probes_of(uint32_t instruction_set, int code_bits) {
  [[maybe_unused]] const bool are_bytes = code_bits == 8;
  switch (instruction_set) {
#if defined(__x86_64__)
    case MHA_INSTRUCTION_SET_AVX512_VNNI:
#if defined(MHA_HAS_AVX512_VNNI)
      return are_bytes ? avx512_bytes::all<12, 24>() : avx512_words::all<12, 24>();
#endif
    case MHA_INSTRUCTION_SET_AVX512:
      return avx512::all<12, 24>();
    case MHA_INSTRUCTION_SET_AVX2_VNNI:
#if defined(MHA_HAS_AVX2_VNNI)
      return are_bytes ? avx2_bytes::all<10, 12>() : avx2_words::all<10, 12>();
#endif
    case MHA_INSTRUCTION_SET_AVX2:
      return avx2::all<8, 12>();
#elif defined(__aarch64__)
    case MHA_INSTRUCTION_SET_NEON_I8MM:
#if defined(MHA_HAS_NEON_I8MM)
      return are_bytes ? neon_matrices::all<12, 24>() : neon::all<12, 24>();
#endif
    case MHA_INSTRUCTION_SET_NEON_DOTPROD:
#if defined(MHA_HAS_NEON_DOTPROD)
      return are_bytes ? neon_dots::all<12, 24>() : neon::all<12, 24>();
#endif
    case MHA_INSTRUCTION_SET_NEON:
      return neon::all<12, 24>();
#endif
    default:
      return scalar::all<4, 8>();
  }
}

}  // namespace bench
