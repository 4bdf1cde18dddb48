// Detects the processor and chooses the kernels.
//
// A build contains kernels for several instruction sets, each in its own file with its own compiler
// flags. Which of them can run is asked of the processor and of the operating system, because
// registers that the system does not save are lost when it switches threads. An instruction set may
// need several features; all of them are checked, for virtual machines can hide single ones.
#include "cpu.h"

#if defined(MHA_X86_64)
#include <immintrin.h>
#if !defined(_MSC_VER)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__riscv) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace mha {
namespace {

// Whether a macro is defined, and expands to something else than its name. MHA_HAS is for a row of
// sets.def.
#define MHA_TEXT(x) #x
#define MHA_IS_DEFINED(macro) (MHA_TEXT(macro)[0] != 'M')
#define MHA_HAS(NAME, architecture) \
  (MHA_IS_DEFINED(MHA_HAS_##NAME) || MHA_IS_DEFINED(MHA_HAS_ALL_##architecture))

struct InstructionSet {
  uint32_t number;
  const char *name;
  const Kernels *kernels;  // null: this build lacks them
};
constexpr InstructionSet instruction_sets[] = {
#define MHA_SET(name, NAME, number, architecture, ...) \
  {number, #name, MHA_HAS(NAME, architecture) ? &kernels_##name : nullptr},
#include "kernels/sets.def"
};
#define MHA_SET(name, NAME, number, ...) static_assert(MHA_INSTRUCTION_SET_##NAME == number, #name);
#include "kernels/sets.def"

const InstructionSet *find_set(uint32_t number) {
  for (const InstructionSet &set : instruction_sets) {
    if (set.number == number) return &set;
  }
  return nullptr;
}

// Sets of instruction sets are masks that have a bit for each number, as mha_instruction_sets
// returns them.
constexpr uint32_t bit(uint32_t instruction_set) { return 1u << instruction_set; }

#if defined(MHA_X86_64)
// What the instruction cpuid returns for a leaf and a part of it.
struct Registers {
  int eax, ebx, ecx, edx;
};
Registers cpuid(int leaf, int part) {
  int r[4];
#if defined(_MSC_VER)
  __cpuidex(r, leaf, part);
#else
  __cpuid_count(leaf, part, r[0], r[1], r[2], r[3]);
#endif
  return {r[0], r[1], r[2], r[3]};
}
constexpr int amx_bf16_tile = 1 << 22 | 1 << 24;  // of edx of leaf 7
// Whether all of the bits are set.
bool has_bits(uint64_t x, uint64_t bits) { return (x & bits) == bits; }

#if defined(__linux__) && (defined(MHA_HAS_AVX512_AMX) || defined(MHA_HAS_ALL_x86_64))
#define MHA_HAS_AMX
// Linux has the registers of AMX for processes that asked for them, as mha_extra.h says.
bool may_use_tiles() {
  uint64_t permitted = 0;  // by ARCH_GET_XCOMP_PERM; 18 is XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, 0x1022, &permitted) == 0 && has_bits(permitted, 1 << 18);
}
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char *name) {
  int value = 0;
  size_t bytes = sizeof value;
  return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 && value != 0;
}
#endif

// The sets whose instructions the processor has and whose registers the system saves.
//
// On x86, detection stops where a level is missing. XCR0, which _xgetbv reads, has bits for the
// registers that the system saves: 0x6 for those of AVX, and 0xe6 with the masks and the
// upper registers of AVX-512, and 0x60000 for AMX's. AArch64 always has NEON, and its systems tell
// of the extensions. On a system that is not named here, the extensions count as missing.
MHA_READS_XCR uint32_t ask_machine() {
  uint32_t sets = bit(MHA_INSTRUCTION_SET_SCALAR);
#if defined(MHA_X86_64)
  // Bits of ecx of leaf 1, of ebx and ecx of leaf 7, and of eax of leaf 7 part 1. OSXSAVE allows
  // reading XCR0.
  constexpr int fma_osxsave_f16c = 1 << 12 | 1 << 27 | 1 << 29, avx2 = 1 << 5, vnni = 1 << 11,
                avx_vnni = 1 << 4;
  constexpr unsigned avx512_f_dq_cd_bw_vl = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
  if (cpuid(0, 0).eax < 7 || !has_bits(cpuid(1, 0).ecx, fma_osxsave_f16c)) return sets;
  const uint64_t saved = _xgetbv(0);
  const Registers leaf7 = cpuid(7, 0);
  if (!has_bits(saved, 0x6) || !has_bits(leaf7.ebx, avx2)) return sets;
  sets |= bit(MHA_INSTRUCTION_SET_AVX2);
#if defined(MHA_EMULATES_VNNI)
  sets |= bit(MHA_INSTRUCTION_SET_AVX2_VNNI);
#endif
  const int leaf7_part1 = leaf7.eax >= 1 ? cpuid(7, 1).eax : 0;
  if (has_bits(leaf7_part1, avx_vnni)) sets |= bit(MHA_INSTRUCTION_SET_AVX2_VNNI);
#if defined(__APPLE__)
  // macOS 10.15.6 to 12.1 change the mask registers of AVX-512 at a signal.
  return sets;
#endif
  if (!has_bits(saved, 0xe6) || !has_bits(leaf7.ebx, avx512_f_dq_cd_bw_vl)) return sets;
  sets |= bit(MHA_INSTRUCTION_SET_AVX512);
  if (has_bits(leaf7.ecx, vnni)) sets |= bit(MHA_INSTRUCTION_SET_AVX512_VNNI);
#if defined(MHA_HAS_AVX512_BF16) || defined(MHA_HAS_ALL_x86_64)
#if defined(MHA_EMULATES_BF16)
  const bool has_bf16 = true;
#else
  // Emerald Rapids starts one vdpbf16ps in two cycles, or four multiply-adds of floats, which are
  // twice as many products. Processors with AMX are taken to be like it.
  constexpr int avx512_bf16 = 1 << 5;  // of eax of leaf 7 part 1
  const bool has_bf16 = has_bits(leaf7_part1, avx512_bf16) && !has_bits(leaf7.edx, amx_bf16_tile);
#endif
  // A processor that computed other bits would not have the set.
  if (has_bits(leaf7.ecx, vnni) && has_bf16 && pairs_avx512_bf16.is_as_defined())
    sets |= bit(MHA_INSTRUCTION_SET_AVX512_BF16);
#endif
#if defined(MHA_HAS_AMX)
  if (has_bits(leaf7.ecx, vnni) && has_bits(leaf7.edx, amx_bf16_tile) && has_bits(saved, 0x60000) &&
      may_use_tiles() && pairs_avx512_amx.is_as_defined())
    sets |= bit(MHA_INSTRUCTION_SET_AVX512_AMX);
#endif
#elif defined(__aarch64__)
  sets |= bit(MHA_INSTRUCTION_SET_NEON);
#if defined(__linux__)
  constexpr unsigned long hwcap2_i8mm = 1ul << 13;  // HWCAP2_I8MM, which older headers lack
  const bool has_dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0,
             has_i8mm = (getauxval(AT_HWCAP2) & hwcap2_i8mm) != 0;
#elif defined(__APPLE__)
  const bool has_dotprod = has_feature("hw.optional.arm.FEAT_DotProd"),
             has_i8mm = has_feature("hw.optional.arm.FEAT_I8MM");
#else
  const bool has_dotprod = false, has_i8mm = false;
#endif
  if (has_dotprod) sets |= bit(MHA_INSTRUCTION_SET_NEON_DOTPROD);
  if (has_dotprod && has_i8mm) sets |= bit(MHA_INSTRUCTION_SET_NEON_I8MM);
#elif defined(__wasm__)
#if defined(MHA_HAS_WASM_SIMD128) || defined(MHA_HAS_ALL_wasm32)
  sets |= bit(MHA_INSTRUCTION_SET_WASM_SIMD128);
#endif
#if defined(MHA_HAS_WASM_RELAXED) || defined(MHA_HAS_ALL_wasm32)
  if (codes_wasm_relaxed.is_as_defined()) {
    sets |= bit(MHA_INSTRUCTION_SET_WASM_RELAXED);
#if defined(MHA_HAS_WASM_SIGNED_DOT) || defined(MHA_HAS_ALL_wasm32)
    if (codes_wasm_signed_dot.is_as_defined()) sets |= bit(MHA_INSTRUCTION_SET_WASM_SIGNED_DOT);
#endif
#if defined(MHA_HAS_WASM_UNSIGNED_DOT) || defined(MHA_HAS_ALL_wasm32)
    if (codes_wasm_unsigned_dot.is_as_defined()) sets |= bit(MHA_INSTRUCTION_SET_WASM_UNSIGNED_DOT);
#endif
  }
#endif
#elif defined(__riscv) && defined(__linux__)
  constexpr unsigned long hwcap_v = 1ul << ('V' - 'A');
  if ((getauxval(AT_HWCAP) & hwcap_v) != 0) sets |= bit(MHA_INSTRUCTION_SET_RVV);
#endif
  return sets;
}

// The machine is asked once in each process, because that takes 0.04 ms in a virtual machine and is
// a system call on macOS. 0 stands for an answer that is not there yet. Threads that ask at the
// same time store the same answer, so the order does not matter.
uint32_t sets_of_machine = 0;

bool machine_has(uint32_t instruction_set) {
  uint32_t sets = atomic_load(&sets_of_machine);
  if (sets == 0) {
    sets = ask_machine();
    atomic_store(&sets_of_machine, sets);
  }
  return (sets & bit(instruction_set)) != 0;
}

}  // namespace

mha_status check_instruction_set(Report report, uint32_t instruction_set) {
  if (instruction_set == MHA_INSTRUCTION_SET_AUTO || find_set(instruction_set)) return MHA_OK;
  return report.invalid("instruction_set is %u; set it to one of MHA_INSTRUCTION_SET_*",
                        instruction_set);
}

// The message tells kernels that this build lacks from instructions that the machine lacks.
mha_status choose_kernels(Report report, uint32_t instruction_set, const Kernels **kernels) {
  MHA_TRY(check_instruction_set(report, instruction_set));
  bool is_built = false;
  for (const InstructionSet &set : instruction_sets) {
    if (!set.kernels ||
        (instruction_set != MHA_INSTRUCTION_SET_AUTO && instruction_set != set.number))
      continue;
    is_built = true;
    if (machine_has(set.number)) {
      *kernels = set.kernels;
      return MHA_OK;
    }
  }
  return report.fail(
      MHA_ERROR_INSTRUCTION_SET, "%s %s; use MHA_INSTRUCTION_SET_AUTO (0) for the best there is",
      is_built ? "this machine has no" : "this build of the library has no kernels for",
      mha_instruction_set_name(instruction_set));
}

// Tries out how the thread computes, which works on every machine, where reading its control
// register would need code for each. The numbers are volatile because a compiler computes constants
// as if the thread rounded to nearest.
uint32_t contract_of_thread() {
  const volatile float one = 1.0f, half = 0.5f, most_of_a_place = 0x1.8p-24f, little = 0x1p-26f,
                       least_normal = 0x1p-126f;
  const bool is_nearest = one + most_of_a_place > one && one + little == one;
  return is_nearest && least_normal * half != 0.0f ? MHA_CONTRACT : 0;
}

}  // namespace mha

// The sets that this build has kernels for and this machine can run.
uint32_t mha_instruction_sets(void) {
  uint32_t sets = 0;
  for (const mha::InstructionSet &set : mha::instruction_sets) {
    if (set.kernels && mha::machine_has(set.number)) sets |= mha::bit(set.number);
  }
  return sets;
}

// Messages name instruction sets like this, too.
const char *mha_instruction_set_name(uint32_t instruction_set) {
  if (instruction_set == MHA_INSTRUCTION_SET_AUTO) return "auto";
  const mha::InstructionSet *set = mha::find_set(instruction_set);
  return set ? set->name : "unknown";
}

// One number that can be compared, as 10203 for version 1.2.3.
uint32_t mha_version(void) {
  return 10000u * MHA_VERSION_MAJOR + 100u * MHA_VERSION_MINOR + MHA_VERSION_PATCH;
}

uint32_t mha_contract(void) { return MHA_CONTRACT; }
