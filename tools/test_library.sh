#!/usr/bin/env bash
# Builds the library with any compiler and runs its tests. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/test_library.sh [--setup] [SETTING...]

Builds the library and its tests in build-library-tests/, and runs the tests of its bits, caches and
interface. Use it for compilers and systems that tools/test.sh does not cover: macOS, Windows with
Microsoft's compiler or MinGW-w64 (in Git's bash), other compilers on Linux. With Microsoft's
compiler, which rejects the other tests, it compares only the published results. Requires CMake
3.22, Python 3, and the headers of xsimd and GoogleTest. Passes each SETTING to CMake.

  --setup   first install xsimd and GoogleTest: with brew on macOS, with the vcpkg in
            VCPKG_INSTALLATION_ROOT on Windows, with tools/setup.sh on Debian
  --help    show this text

Examples:
  macOS; Windows with Microsoft's compiler:
    tools/test_library.sh --setup
  Windows with MinGW-w64:
    tools/test_library.sh --setup -G Ninja -DCMAKE_C_COMPILER=gcc -DCMAKE_CXX_COMPILER=g++
  Linux with clang:
    tools/test_library.sh -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++
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
      [[ ${settings[*]: -1} == -[GAT] ]] ||
        { echo "tools/test_library.sh: '$argument' is not a setting; see tools/test_library.sh \
--help" >&2 && exit 2; }
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
      # Static: Git's bash has older libraries of the compiler before its own.
      if [[ " ${settings[*]} " == *=g++* ]]; then
        triplet=x64-mingw-static settings+=(-DCMAKE_EXE_LINKER_FLAGS=-static)
      fi
      "$VCPKG_INSTALLATION_ROOT/vcpkg" install --triplet "$triplet" --host-triplet "$triplet" \
        xsimd gtest
      settings+=("-DCMAKE_TOOLCHAIN_FILE=$VCPKG_INSTALLATION_ROOT/scripts/buildsystems/vcpkg.cmake"
        "-DVCPKG_TARGET_TRIPLET=$triplet")
      ;;
  esac
fi

folder=build-library-tests
cmake -S . -B "$folder" --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DMHA_TESTS=ON \
  -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF -DMHA_ONNX=OFF -DMHA_GGML=OFF \
  -DMHA_BINDINGS=OFF -DMHA_BENCH=OFF "${settings[@]+"${settings[@]}"}"
cmake --build "$folder" --config Release --parallel --target mha_static mha_shared tests_bits \
  tests_cache tests_interface
ctest --test-dir "$folder" --build-config Release --output-on-failure --no-tests=error --parallel \
  "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 4)" \
  -L '^(bits|cache|interface)$' -LE '^slow$'
