// What differs from compiler to compiler. Every file of the library includes it first. Extensions
// of C++ are here alone, and elsewhere by the names that are defined here (tests/package/sources.py
// extensions).
//
// CMake's build gives flags and says so by MHA_FLAGS_GIVEN. Other builds (docs/building.md) give a
// few of them, and this file sees to the rest.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(_MSC_VER)
#include <intrin.h>
#endif

// GCC's, which clang has too. MHA_WITHOUT_EXTENSIONS is for tests of what Microsoft's compiler is
// given.
#if defined(__GNUC__) && !defined(MHA_WITHOUT_EXTENSIONS)
#define MHA_EXTENSIONS
#endif
#if defined(__x86_64__) || (defined(_M_X64) && !defined(_M_ARM64EC))
#define MHA_X86_64
#endif

// ---- What the arithmetic needs

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    (defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0) || defined(_M_FP_FAST)
#error "the contract needs IEEE binary32 semantics: compile without -ffast-math (/fp:fast) and x87"
#endif

// A product and a sum stay two operations.
#if defined(MHA_FLAGS_GIVEN)
#elif defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#endif

// ---- Which instruction sets are built: those of sets.def that MHA_HAS_SET names, or all of an
// architecture

#if defined(MHA_FLAGS_GIVEN) || defined(MHA_SETS_GIVEN)  // by CMake
#elif defined(__MINGW32__) && !defined(__clang__)
// Plain C++ alone: GCC's vectors on the stack need -Wa,-muse-unaligned-vector-move
// (src/CMakeLists.txt), which no line here can give.
#elif defined(MHA_X86_64)
#define MHA_HAS_ALL_x86_64
#elif defined(__aarch64__)
#define MHA_HAS_ALL_aarch64
#elif defined(__wasm_relaxed_simd__)
#define MHA_HAS_ALL_wasm32
#elif defined(__wasm_simd128__)
#define MHA_HAS_WASM_SIMD128
#elif defined(__riscv_v) && __riscv_xlen == 64 && defined(__clang__) && __clang_major__ >= 17
#define MHA_HAS_ALL_riscv64
#endif
#if !defined(MHA_FLAGS_GIVEN)
#define MHA_HAS_ALL_any
#endif

#define MHA_PRAGMA(words) _Pragma(#words)

// ---- Extensions of C++

// Of GCC and clang; Microsoft's compiler, and any other, gets what comes nearest below.
#if defined(MHA_EXTENSIONS)

#define MHA_INLINED __attribute__((always_inline))  // of a lambda
#define MHA_INLINE inline MHA_INLINED
#define MHA_NOINLINE __attribute__((noinline))  // once, however many callers there are
#if defined(__clang__)
#define MHA_NOCLONE MHA_NOINLINE
#else
#define MHA_NOCLONE __attribute__((noinline, noclone))  // nor once for each kind of argument
#endif
#define MHA_COLD __attribute__((cold))
#if defined(__MINGW32__)  // where `printf` means Microsoft's, which once lacked %zu
#define MHA_FORMAT(format_at, first) __attribute__((format(gnu_printf, format_at, first)))
#else
#define MHA_FORMAT(format_at, first) __attribute__((format(printf, format_at, first)))
#endif

#define MHA_UNROLL_AT_MOST(times) MHA_PRAGMA(GCC unroll times)
#define MHA_LIKELY(condition) __builtin_expect(condition, true)
#define MHA_MEMCPY __builtin_memcpy
#define MHA_MEMSET __builtin_memset
#define MHA_FINISH_STORES() __asm__ volatile("" ::: "memory")  // for loads it does not know of
#define MHA_PREFETCH(p) __builtin_prefetch(p)                  // into the first level of the cache
#define MHA_PREFETCH_L2(p) __builtin_prefetch(p, 0, 2)         // into the second

#define MHA_RESTRICT __restrict  // nothing else in the function points there

#define MHA_INFINITY __builtin_inff()
#define MHA_NAN __builtin_nanf("")
#define MHA_SQRTF __builtin_sqrtf
#define MHA_SQRT __builtin_sqrt
#define MHA_FMAF __builtin_fmaf

// Vectors where no instruction set is chosen; _AMONG is one in an array of T, at the address of any
// number. The last two are clang's.
#define MHA_VECTOR(T) MHA_VECTOR_OF(16, T)
#define MHA_VECTOR_OF(bytes, T) T __attribute__((vector_size(bytes)))
#define MHA_VECTOR_AMONG(T) T __attribute__((vector_size(16), aligned(sizeof(T)), may_alias))
#define MHA_SHUFFLE(a, b, first, second, third, last) \
  __builtin_shufflevector(a, b, first, second, third, last)
#define MHA_CONVERTED(x, T) __builtin_convertvector(x, T)
#define MHA_FMA_OF_VECTORS(a, b, c) __builtin_elementwise_fma(a, b, c)

// Single instructions where g++ would choose others. MHA_HOLD keeps x in a register of a kind, and
// the optimizer does not know what it is afterwards. The next three add x, w * x, or w times a lane
// of x, in the register of sum, and the last one reads the mask from memory; `otherwise` is the
// same as an expression. Kinds of vectors: "x" on x86-64 is one of the first 16 registers, "v" any.
#define MHA_HOLD(x, kind) __asm__("" : "+" kind(x))
#define MHA_ADD_IN_PLACE(instruction, sum, x, otherwise) \
  __asm__(instruction " {%1, %0, %0|%0, %0, %1}" : "+v"(sum) : "v"(x))
#define MHA_ADD_PRODUCTS_IN_PLACE(instruction, kind, sum, w, x, otherwise) \
  __asm__(instruction " {%2, %1, %0|%0, %1, %2}" : "+" kind(sum) : kind(w), kind(x))
#define MHA_ADD_PRODUCTS_OF_LANE(sum, w, x, lane) \
  __asm__("fmla %0.4s, %1.4s, %2.s[" #lane "]" : "+w"(sum) : "w"(w), "w"(x))
#define MHA_AND_OF_MEMORY(result, x, mask, otherwise) \
  __asm__("vpand {%2, %1, %0|%0, %1, %2}" : "=x"(result) : "x"(x), "m"(*mask))

#else

#include <math.h>

#include <limits>
#define MHA_INLINED
#if defined(_MSC_VER)
#define MHA_INLINE __forceinline
#define MHA_NOINLINE __declspec(noinline)
#else
#define MHA_INLINE inline
#define MHA_NOINLINE
#endif
#define MHA_NOCLONE MHA_NOINLINE
#define MHA_COLD
#define MHA_FORMAT(format_at, first)

#define MHA_UNROLL_AT_MOST(times)
#define MHA_LIKELY(condition) (condition)
#define MHA_MEMCPY memcpy
#define MHA_MEMSET memset
#define MHA_FINISH_STORES()

#define MHA_INFINITY std::numeric_limits<float>::infinity()
#define MHA_NAN std::numeric_limits<float>::quiet_NaN()
#define MHA_SQRTF sqrtf
#define MHA_SQRT sqrt
#if defined(MHA_X86_64)
#include <immintrin.h>
#define MHA_PREFETCH(p) _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T0)
#define MHA_PREFETCH_L2(p) _mm_prefetch(reinterpret_cast<const char *>(p), _MM_HINT_T1)
#define MHA_FMAF(a, b, c) _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)))
#else
#define MHA_PREFETCH(p) static_cast<void>(p)
#define MHA_PREFETCH_L2(p) static_cast<void>(p)
#define MHA_FMAF fmaf
#endif

#define MHA_RESTRICT
#define MHA_HOLD(x, kind) static_cast<void>(x)
#define MHA_ADD_IN_PLACE(instruction, sum, x, otherwise) sum = otherwise
#define MHA_ADD_PRODUCTS_IN_PLACE(instruction, kind, sum, w, x, otherwise) sum = otherwise
#define MHA_ADD_PRODUCTS_OF_LANE(sum, w, x, lane) sum = vfmaq_laneq_f32(sum, w, x, lane)
#define MHA_AND_OF_MEMORY(result, x, mask, otherwise) result = otherwise

#endif
#if defined(MHA_EXTENSIONS) && defined(MHA_X86_64)
#define MHA_READS_XCR __attribute__((target("xsave")))  // may use _xgetbv
#else
#define MHA_READS_XCR
#endif

// ---- Numbers that threads share

namespace mha {
#if defined(_MSC_VER) && !defined(__clang__)
// Reads and writes of a volatile number are single ones on every processor that Windows runs on.
MHA_INLINE uint32_t atomic_load(const uint32_t *x) {
  return *static_cast<const volatile uint32_t *>(x);
}
MHA_INLINE void atomic_store(uint32_t *x, uint32_t value) {
  *static_cast<volatile uint32_t *>(x) = value;
}
// Returns what *x was before. Threads that add after this one see what it wrote.
MHA_INLINE int64_t atomic_fetch_add(int64_t *x, int64_t term) {
  return _InterlockedExchangeAdd64(x, term);
}
#else  // std::atomic needs functions of the C++ library where its assertions are on
MHA_INLINE uint32_t atomic_load(const uint32_t *x) { return __atomic_load_n(x, __ATOMIC_RELAXED); }
MHA_INLINE void atomic_store(uint32_t *x, uint32_t value) {
  __atomic_store_n(x, value, __ATOMIC_RELAXED);
}
// The numbers are aligned to 8 bytes, which 32-bit x86 does not ask of an int64_t. Otherwise clang
// would call libatomic there.
MHA_INLINE int64_t atomic_fetch_add(int64_t *x, int64_t term) {
  typedef int64_t Aligned __attribute__((aligned(8)));
  return __atomic_fetch_add(reinterpret_cast<Aligned *>(x), term, __ATOMIC_ACQ_REL);
}
#endif
}  // namespace mha

// ---- Integers

namespace mha {
namespace {

#if defined(MHA_EXTENSIONS)
inline bool mul_overflows(int64_t a, int64_t b, int64_t *product) {
  return __builtin_mul_overflow(a, b, product);
}
inline bool add_overflows(int64_t a, int64_t b, int64_t *sum) {
  return __builtin_add_overflow(a, b, sum);
}
// highest_bit and lowest_bit are of numbers other than 0.
MHA_INLINE int highest_bit(uint64_t x) { return 63 - __builtin_clzll(x); }
MHA_INLINE int lowest_bit(uint64_t x) { return __builtin_ctzll(x); }
MHA_INLINE int count_bits(uint64_t x) { return __builtin_popcountll(x); }
#else
// The counts are not negative.
inline bool mul_overflows(int64_t a, int64_t b, int64_t *product) {
  if (b != 0 && a > INT64_MAX / b) return true;
  *product = a * b;
  return false;
}
inline bool add_overflows(int64_t a, int64_t b, int64_t *sum) {
  if (a > INT64_MAX - b) return true;
  *sum = a + b;
  return false;
}
MHA_INLINE int count_bits(uint64_t x) {
  int count = 0;
  for (; x != 0; x &= x - 1) ++count;
  return count;
}
MHA_INLINE int lowest_bit(uint64_t x) { return count_bits(~x & (x - 1)); }
MHA_INLINE int highest_bit(uint64_t x) {
  int bit = 0;
  while (x >>= 1) ++bit;
  return bit;
}
#endif

}  // namespace
}  // namespace mha
