# Cross-compiles for Windows on x86-64 with Debian's g++-mingw-w64-x86-64-posix, whose C++ library
# has threads; the tests run under Wine.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
# A Windows of this build's own, without what Wine would otherwise install and say.
set(CMAKE_CROSSCOMPILING_EMULATOR
  "env;WINEPREFIX=${CMAKE_BINARY_DIR}/wine;WINEDEBUG=-all;WINEDLLOVERRIDES=mscoree,mshtml=;wine")
# The compiler's libraries go into each program, which would not find their DLLs.
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
