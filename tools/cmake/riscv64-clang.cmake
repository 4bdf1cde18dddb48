# Cross-compiles for 64-bit RISC-V with clang 19, which makes the kernels for its vectors, and the
# libraries of Debian's g++-riscv64-linux-gnu; the tests run under emulation (qemu-user), with
# vectors of 128 bits.
include(${CMAKE_CURRENT_LIST_DIR}/riscv64-linux-gnu.cmake)
set(CMAKE_C_COMPILER_TARGET riscv64-linux-gnu)
set(CMAKE_CXX_COMPILER_TARGET riscv64-linux-gnu)
set(CMAKE_C_COMPILER clang-19)
set(CMAKE_CXX_COMPILER clang++-19)
list(APPEND CMAKE_CROSSCOMPILING_EMULATOR -cpu rv64,v=true,vlen=128,vext_spec=v1.0)
