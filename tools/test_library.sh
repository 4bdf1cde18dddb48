#!/usr/bin/env bash
# Builds the library with any compiler and runs its tests. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/test_library.sh [--setup] [SETTING...]

Builds the library and its tests in build-library-tests/ and runs the tests of its bits, its caches and its interface. This is for compilers and
systems that tools/test.sh does not know: macOS, Windows by Microsoft's compiler or MinGW-w64 (in Git's bash), other compilers on Linux. By
Microsoft's compiler, which refuses the other tests, it compares the published results alone. It needs CMake 3.22, Python 3, the headers of xsimd
and GoogleTest. Each SETTING goes to CMake.

  --setup   first installs xsimd and GoogleTest: on macOS by brew, on Windows by the vcpkg in VCPKG_INSTALLATION_ROOT, on Debian by tools/setup.sh
  --help    this text

Examples:
  tools/test_library.sh --setup                                                        macOS; Windows, Microsoft's compiler
  tools/test_library.sh --setup -G Ninja -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++    Windows, MinGW-w64
  tools/test_library.sh -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++          Linux, clang
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
setup=no settings=()
for argument in "$@"; do
  case $argument in
    --setup) setup=yes ;;
    --help | -h) usage && exit ;;
    -*) settings+=("$argument") ;;
    *)
      [[ ${settings[*]: -1} == -[GAT] ]] || { echo "tools/test_library.sh: '$argument' is not a setting; see tools/test_library.sh --help" >&2 && exit 2; }
      settings+=("$argument")
      ;;
  esac
done

if [[ $setup == yes ]]; then
  case $(uname -s) in
    Darwin) brew install --quiet cmake ninja xsimd googletest ;;
    Linux) tools/setup.sh ;;
    *)
      triplet=x64-windows-static-md
      if [[ " ${settings[*]} " == *=g++* ]]; then  # static: Git's bash has older libraries of the compiler before its own
        triplet=x64-mingw-static settings+=(-DCMAKE_EXE_LINKER_FLAGS=-static)
      fi
      "$VCPKG_INSTALLATION_ROOT/vcpkg" install --triplet "$triplet" --host-triplet "$triplet" xsimd gtest
      settings+=("-DCMAKE_TOOLCHAIN_FILE=$VCPKG_INSTALLATION_ROOT/scripts/buildsystems/vcpkg.cmake" "-DVCPKG_TARGET_TRIPLET=$triplet")
      ;;
  esac
fi

folder=build-library-tests
cmake -S . -B "$folder" --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DMHA_TESTS=ON -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF -DMHA_ONNX=OFF \
  -DMHA_TOOLS=OFF -DMHA_BENCH=OFF "${settings[@]+"${settings[@]}"}"
cmake --build "$folder" --config Release --parallel --target mha_static mha_shared tests_bits tests_cache tests_interface
ctest --test-dir "$folder" --build-config Release --output-on-failure --no-tests=error --parallel "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 4)" \
  -L '^(bits|cache|interface)$' -LE '^slow$'
