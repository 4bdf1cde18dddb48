// How the kernels use the memory of each processor that was measured; the others have what is plain.
//
// A tuning does not depend on the instruction set: it is about caches and what the processor prefetches by itself. A new one is a row here
// and a line in choose_tuning. It says what it was measured on; kernels/SPECIAL_FORMS.md has the figures. CMake's option MHA_TUNING fixes
// one when the library is compiled, so that tests run each of them on any machine: CMake reads their names here.

#include "tuning.h"

namespace mha {
namespace {

[[maybe_unused]] constexpr Tuning plain = {1, false, int64_t{8} << 20, false};

// AMD Zen 3 and Zen 4 (EPYC 7003 and 9004): they follow several streams of memory by themselves, at 1.3 times the speed of one.
[[maybe_unused]] constexpr Tuning zen3 = {4, true, int64_t{3} << 20, true};

}  // namespace

const Tuning *choose_tuning() {
#if defined(MHA_TUNING)
  return &MHA_TUNING;
#elif defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amdfam19h") ? &zen3 : &plain;
#else
  return &plain;
#endif
}

}  // namespace mha
