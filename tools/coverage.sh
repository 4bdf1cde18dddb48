#!/usr/bin/env bash
# Says which lines and branches of the code the tests run. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/coverage.sh [--html FOLDER]

Builds with g++ in build-coverage/, with coverage counters in the library except its kernels and in
the operators for ONNX Runtime. Runs the tests with the labels bits, cache and interface on one
instruction set, and those of the operators where ONNX Runtime and its headers
are there. Prints for each file how many lines and branches ran, and those that did not. Installs
gcovr from PyPI in build-coverage/venv. Takes 3 minutes on 2 cores once the kernels are compiled.

  --html FOLDER   also write pages that show the code
  --help          show this text
MHA_TEST_ROUNDS multiplies the number of random cases (default here: 0.1).

These lines cannot run: instruction sets that this machine lacks (src/cpu.cpp); the product in
src/openblas, of which tests link a copy; some branches for sizes larger than any memory.

Exit status: 0 if at least 99% of the lines and 96% of the branches of src ran; 1 if fewer did, or a
test failed; 2 wrong arguments.

Example:
  tools/coverage.sh --html build-coverage/html
TEXT
}

html=()
while (($#)); do
  case $1 in
    --help | -h) usage && exit ;;
    --html) (($# > 1)) || { echo \
      "tools/coverage.sh: --html needs a folder; see tools/coverage.sh --help" >&2 && exit 2; }
      mkdir -p "$2" && html=(--html-details "$(cd "$2" && pwd)/index.html") && shift 2 ;;
    *) echo "tools/coverage.sh: '$1' is not an option; see tools/coverage.sh --help" >&2 &&
      exit 2 ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build='build-coverage'
gcovr=$build/venv/bin/gcovr
[[ -x $gcovr ]] || { python3 -m venv "$build/venv" &&
  "$build/venv/bin/pip" install --quiet --disable-pip-version-check gcovr; }
CC=gcc CXX=g++ cmake -S . -B "$build" -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release \
  -DMHA_TESTS=ON \
  -DMHA_BINDINGS=OFF -DMHA_BENCH=OFF -DCMAKE_PROJECT_mha_INCLUDE=tools/cmake/coverage.cmake
find "$build" -name '*.gcda' -delete
cmake --build "$build" --target mha_shared tests_bits tests_cache tests_interface
! cmake --build "$build" --target help | grep -q '^mha_onnx:' ||
  cmake --build "$build" --target mha_onnx

# A program runs once, not once for each of its tests. What compares kernels with exact results, or
# all numbers with each other, adds nothing here.
export MHA_TEST_ROUNDS=${MHA_TEST_ROUNDS:-0.1} GTEST_BRIEF=1 \
  GTEST_FILTER='-*/scalar:*/avx512:*/avx512_vnni:*/avx2_vnni:*Accuracy*'
status=0
run() { "$@" >"$build/log.$$" 2>&1 || { cat "$build/log.$$" &&
  echo "tools/coverage.sh: this failed: $*" && return 1; }; }
export -f run && export build
tests() {
  find "$build/bin" -name 'mha_test_*' | grep -vE '_(accuracy|cache_accuracy|fma|function|workers)$'
  echo "python3 tests/tools/decoder_test.py $build/bin/mha_example_decoder"
  [[ ! -e $build/tools/adapters/onnx/libmha_onnx.so || ! -x build/python/bin/python ]] ||
    echo "build/python/bin/python tests/adapters/onnx_runtime_test.py \
operators --library $build/src/libmha.so --operators $build/tools/adapters/onnx/libmha_onnx.so"
}
tests | xargs -P "$(nproc)" -d '\n' -I{} bash -c 'run {}' || status=1

report() {  # NAME OPTION...: of the files that the options select
  printf '\n== %s\n' "$1"
  "$gcovr" --root . --object-directory "$build" --json-add-tracefile "$build/counts.json" \
    --merge-lines "${@:2}" || status=1
}
"$gcovr" --root . "$build" --exclude-throw-branches --merge-lines -j "$(nproc)" --filter \
  'src/[^/]*$' --filter src/openblas/ \
  --filter src/pthreadpool/ --filter tools/adapters/onnx/ --json \
  "$build/counts.json" "${html[@]}" >/dev/null
report "tools/adapters/onnx: lines" --filter tools/adapters/onnx/
report "src: branches" --filter src/ --txt-metric branch
report "src: lines" --filter src/ --fail-under-line 99 --fail-under-branch 96
exit "$status"
