#include "spec/spec.h"

namespace spec {

#if defined(__x86_64__)
bool HasHardwareFma() { return __builtin_cpu_supports("fma"); }

const Functions &Fastest() { return HasHardwareFma() ? kHardwareFma : kBaseline; }
#else
bool HasHardwareFma() { return false; }

const Functions &Fastest() { return kBaseline; }
#endif

}  // namespace spec
