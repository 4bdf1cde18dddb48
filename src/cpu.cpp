#include "cpu.h"

#if defined(__x86_64__) && defined(__clang__) && !defined(MHA_EMULATES_VNNI)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace mha {
namespace {

// Best first. Each entry is there if this build contains its kernels.
constexpr const Kernels *built_kernels[] = {
#if defined(MHA_HAS_AVX512_VNNI)
    &kernels_avx512_vnni,
#endif
#if defined(MHA_HAS_AVX512)
    &kernels_avx512,
#endif
#if defined(MHA_HAS_AVX2_VNNI)
    &kernels_avx2_vnni,
#endif
#if defined(MHA_HAS_AVX2)
    &kernels_avx2,
#endif
#if defined(MHA_HAS_NEON_I8MM)
    &kernels_neon_i8mm,
#endif
#if defined(MHA_HAS_NEON_DOTPROD)
    &kernels_neon_dotprod,
#endif
#if defined(MHA_HAS_NEON)
    &kernels_neon,
#endif
    &kernels_scalar,
};

#if defined(MHA_HAS_AVX2_VNNI)
bool has_avx_vnni() {
#if defined(MHA_EMULATES_VNNI)
  return true;
#elif defined(__clang__)
  // Which cannot be asked for it. No processor has it without GFNI, so that others are not asked in every call, which takes time in a
  // virtual machine.
  uint32_t eax = 0, ebx, ecx, edx;
  return __builtin_cpu_supports("gfni") && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1) != 0;
#else
  return __builtin_cpu_supports("avxvnni");
#endif
}
#endif

// The compiler's own detection includes whether the operating system saves the registers. It reads the processor once per process.
bool machine_has(uint32_t instruction_set) {
  switch (instruction_set) {
#if defined(__x86_64__)
    case MHA_INSTRUCTION_SET_AVX512:
      __builtin_cpu_init();
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx2") &&
             __builtin_cpu_supports("fma");
#if defined(MHA_HAS_AVX512_VNNI)  // a compiler that has not the instructions cannot be asked for them
    case MHA_INSTRUCTION_SET_AVX512_VNNI:
      return machine_has(MHA_INSTRUCTION_SET_AVX512) && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(MHA_HAS_AVX2_VNNI)
    case MHA_INSTRUCTION_SET_AVX2_VNNI:
      return machine_has(MHA_INSTRUCTION_SET_AVX2) && has_avx_vnni();
#endif
    case MHA_INSTRUCTION_SET_AVX2:
      __builtin_cpu_init();
#if !defined(__clang__) && __GNUC__ >= 11
      if (!__builtin_cpu_supports("f16c")) return false;  // other compilers cannot be asked; every processor with AVX2 and FMA has it
#endif
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(__aarch64__)
    case MHA_INSTRUCTION_SET_NEON:
      return true;
#if defined(__linux__)
    case MHA_INSTRUCTION_SET_NEON_DOTPROD:
      return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    case MHA_INSTRUCTION_SET_NEON_I8MM: {
      constexpr unsigned long hwcap2_i8mm = 1ul << 13;  // HWCAP2_I8MM, which older headers lack
      return machine_has(MHA_INSTRUCTION_SET_NEON_DOTPROD) && (getauxval(AT_HWCAP2) & hwcap2_i8mm) != 0;
    }
#endif
#endif
    case MHA_INSTRUCTION_SET_SCALAR:
      return true;
    default:
      return false;
  }
}

}  // namespace

mha_status check_instruction_set(Report report, uint32_t instruction_set) {
  if (instruction_set <= MHA_INSTRUCTION_SET_NEON_I8MM) return MHA_OK;
  return report.invalid("instruction_set %u is none; use one of MHA_INSTRUCTION_SET_*", instruction_set);
}

mha_status choose_kernels(Report report, uint32_t instruction_set, const Kernels **kernels) {
  if (const mha_status status = check_instruction_set(report, instruction_set)) return status;
  bool is_built = false;
  for (const Kernels *built : built_kernels) {
    if (instruction_set != MHA_INSTRUCTION_SET_AUTO && instruction_set != built->instruction_set) continue;
    is_built = true;
    if (machine_has(built->instruction_set)) {
      *kernels = built;
      return MHA_OK;
    }
  }
  return report.fail(MHA_ERROR_INSTRUCTION_SET, "%s %s; use MHA_INSTRUCTION_SET_AUTO (0) for the best there is",
                     is_built ? "this machine has no" : "this build of the library has no kernels for",
                     mha_instruction_set_name(instruction_set));
}

// By what numbers come to, which is the same on every machine. volatile: the compiler rounds to nearest always.
uint32_t contract_of_thread() {
  const volatile float one = 1.0f, half = 0.5f, most_of_a_place = 0x1.8p-24f, little = 0x1p-26f, least_normal = 0x1p-126f;
  const bool is_nearest = one + most_of_a_place > one && one + little == one;
  return is_nearest && least_normal * half != 0.0f ? MHA_CONTRACT : 0;
}

}  // namespace mha

uint32_t mha_instruction_sets(void) {
  uint32_t sets = 0;
  for (const mha::Kernels *built : mha::built_kernels) {
    if (mha::machine_has(built->instruction_set)) sets |= 1u << built->instruction_set;
  }
  return sets;
}

const char *mha_instruction_set_name(uint32_t instruction_set) {
  static constexpr const char *names[] = {"auto",      "scalar",      "avx2",         "avx512",   "neon",
                                          "avx2_vnni", "avx512_vnni", "neon_dotprod", "neon_i8mm"};
  static_assert(sizeof names / sizeof names[0] == MHA_INSTRUCTION_SET_NEON_I8MM + 1, "a name for each, by its number");
  return instruction_set <= MHA_INSTRUCTION_SET_NEON_I8MM ? names[instruction_set] : "unknown";
}

uint32_t mha_version(void) { return 10000u * MHA_VERSION_MAJOR + 100u * MHA_VERSION_MINOR + MHA_VERSION_PATCH; }

uint32_t mha_contract(void) { return MHA_CONTRACT; }
