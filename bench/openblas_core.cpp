#include "openblas_core.h"

#include <string.h>

#include "mha.h"

namespace bench {
namespace {

// OpenBLAS's names for x86-64. Those with AVX-512 and those to come are in neither list.
constexpr const char *cores_with_avx2[] = {"Haswell", "Zen", "Excavator"};
constexpr const char *older_cores[] = {"Prescott", "Core2",       "Penryn",    "Dunnington",   "Nehalem",
                                       "Atom",     "Nano",        "Opteron",   "Opteron_SSE3", "Barcelona",
                                       "Bobcat",   "Sandybridge", "Bulldozer", "Piledriver",   "Steamroller"};

template <size_t count>
bool is_one_of(const char *const (&cores)[count], const char *core) {
  for (const char *const one : cores) {
    if (!strcmp(one, core)) return true;
  }
  return false;
}

}  // namespace

const char *better_openblas_core(const char *core, uint32_t instruction_sets) {
  const bool is_older = is_one_of(older_cores, core);
  if (instruction_sets >> MHA_INSTRUCTION_SET_AVX512 & 1) return is_older || is_one_of(cores_with_avx2, core) ? "SkylakeX" : nullptr;
  if (instruction_sets >> MHA_INSTRUCTION_SET_AVX2 & 1) return is_older ? "Haswell" : nullptr;
  return nullptr;
}

}  // namespace bench
