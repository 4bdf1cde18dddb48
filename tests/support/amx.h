// Asks Linux for the registers of AMX when a program starts, before it calls the library
// (mha_extra.h, "Instruction sets").
#pragma once

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace support {

inline const bool has_amx =
#if defined(__linux__) && defined(__x86_64__)
    syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    false;
#endif

}  // namespace support
