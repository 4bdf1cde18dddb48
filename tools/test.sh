#!/usr/bin/env bash
# Builds everything and runs the tests. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/test.sh [--quick | --all] [--no-setup]

Installs missing packages (tools/setup.sh --all, tools/bindings/python/setup.sh), builds, and runs
the tests. Exits with 0 only if every build and every test succeeded. The tests of the g++ build
come last, so that their summary is at the end; only an emulated machine that ran in parallel
reports after them.

  build/             g++, Release: the library, the benchmarks, all tests
  build-clang/       clang, Release: the library, and the tests that may fail with another compiler
                     though others pass
  build-aarch64/     cross-compiled for AArch64: the same, under emulation
  build-windows/     cross-compiled for Windows with MinGW-w64: the library; the bits of its DLL
                     under Wine
  build-wasm/        WebAssembly: the published results under Node, by both compilers of V8, and
                     without fused multiply-adds
  build-riscv64-vectors/   the same for RISC-V with vectors, by clang 19, under emulation
  build/avx512/      on a processor without AVX-512 or its VNNI, the bits of these kernels under
                     emulation (tools/test_avx512.sh)

Before them, and with nothing else running, tools/perf_gate.sh compares build/ with the commit
before HEAD (or, if MHA_PERF_GATE_BASE names a revision, with its merge base with HEAD) by
instructions and by time, and by time with the floor for this processor in bench/floor.txt. A
regression fails. The line "Perf-Gate: expected" at the end of a commit message since the base
excuses a regression against the base, but never one against the floor. The last lines list what was
skipped, including comparisons that were too noisy, and what failed. MHA_TEST_ROUNDS scales the
number of random cases (default: 0.3; with --all: 1).

  --quick      test only build/, without its long tests; run no performance gate
  --all        also test
               - build-fuzz/, by clang: each fuzz target for 6 seconds (tools/fuzz.sh)
               - the objects of build-debug/ and build-minsizerel/, and the bits and the size of the
                 latter
               - build-sanitize/, instrumented to find wrong addresses, undefined behaviour, leaks
                 and wrapping sizes; build-sanitize-threads/, to find data races; the stored inputs
                 of the fuzz targets under valgrind
               - emulated processors without AVX, with only AVX2 (tools/test_cpus.sh), and with
                 AVX-512 but no VNNI (tools/test_avx512.sh); build-riscv64/, cross-compiled for
                 64-bit RISC-V
               - all random cases; all tests with clang and for AArch64, more for Windows, RISC-V
                 with vectors, WebAssembly (wasmtime too) and emulated AVX-512, and slow tests
               - the crate mha-candle; vLLM (3.6 GB); packages (tools/release); the coverage
                 (tools/coverage.sh); all mutants and every check left out (tools/mutate.py)
  --no-setup   install nothing
  --help       show this text

MHA_TORCH_INDEX names a package index to take PyTorch from, such as its own of builds for CPUs;
PyPI's brings 2.5 GB of CUDA libraries. The script says at its start what it will download.

Examples:
  tools/test.sh                       what CI runs
  tools/test.sh --quick               while you work on something
  ctest --test-dir build -L cache     one group of tests, after any of these; CONTRIBUTING.md lists
                                      the labels
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
matrix=default
setup=yes
for argument in "$@"; do
  case $argument in
    --quick) matrix=quick ;;
    --all) matrix=all ;;
    --no-setup) setup=no ;;
    --help | -h) usage && exit ;;
    *) echo "tools/test.sh: '$argument' is not an option; see tools/test.sh --help" >&2 && exit 2 ;;
  esac
done

jobs=$(nproc)
library=(-DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF -DMHA_ONNX=OFF -DMHA_GGML=OFF -DMHA_BINDINGS=OFF \
  -DMHA_BENCH=OFF)
failed=() skipped=()

say() { printf '\n== %s (%d s so far)\n' "$*" "$SECONDS"; }

skip() {  # WHAT AND WHY
  echo "skipped: $*"
  skipped+=("$*")
}

configure() {  # FOLDER BUILD_TYPE SETTING...
  local folder=$1 generator=()
  say "building $folder"
  [[ -e $folder/CMakeCache.txt ]] || generator=(-G Ninja)
  cmake -S . -B "$folder" "${generator[@]}" --log-level=NOTICE -DCMAKE_BUILD_TYPE="$2" \
    -DMHA_TESTS=ON "${@:3}"
}

build() {  # FOLDER ARGUMENT...
  cmake --build "$1" --parallel "$jobs" "${@:2}" && return
  echo "tools/test.sh: $1 does not build; see above" >&2
  exit 1
}

# What a suite or a part prints is kept as well: where a long log is cut, its end shows the last
# lines of what failed.
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT

# Every suite runs, whatever happened to those before it. The closing list of skipped tests is left
# out for its length; ctest counts them.
run_tests() {  # FOLDER ARGUMENT...
  say "testing $1"
  if ! ctest --test-dir "$1" --output-on-failure --no-tests=error --parallel "$jobs" "${@:2}" 2>&1 |
    grep --line-buffered -v ' (Skipped)$' | tee "$logs/$1"; then
    failed+=("$1")
  fi
}

# Part NAME by COMMAND, which exits with 3 where it cannot test; the reason stands above then.
run_part() {  # NAME COMMAND...
  local status=0
  "${@:2}" 2>&1 | tee "$logs/$1" || status=$?
  part_ended "$1" "$status"
}

# The same beside what follows. What it prints comes when it is waited for.
declare -A started=()
start_part() {  # NAME COMMAND...
  "${@:2}" >"$logs/$1" 2>&1 &
  started[$1]=$!
}
await_part() {  # NAME
  local status=0
  wait "${started[$1]}" || status=$?
  cat "$logs/$1"
  part_ended "$1" "$status"
}

part_ended() {  # NAME STATUS
  if (($2 == 3)); then
    skip "$1; see above for the reason"
  elif (($2)); then
    failed+=("$1")
  fi
}

if [[ $setup == yes ]]; then
  # Said before anything begins, for it takes minutes.
  [[ $matrix == quick ]] || { tools/bindings/python/setup.sh --dry-run &&
    tools/bindings/python/setup.sh --dry-run --runtimes; }
  if [[ $matrix == quick ]]; then tools/setup.sh; else tools/setup.sh --all; fi
  [[ $matrix == quick ]] || tools/adapters/onnx/headers.sh ||
    skip "tests onnx_runtime.*, without ONNX Runtime's headers; see above for the reason"
fi

# Tests build the library again, as users do, and so does the gate: what one compiler has compiled
# once is not compiled again.
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD \
    CCACHE_DIR=${CCACHE_DIR:-$PWD/build/ccache}
  export CCACHE_DEPEND=1  # most files are compiled once: no extra run of the preprocessor for each
fi

# All that a user's own settings in build/ may have left out.
configure build Release -DMHA_OPENBLAS=ON -DMHA_PTHREADPOOL=ON -DMHA_BINDINGS=ON -DMHA_BENCH=ON \
  -DMHA_INSTALL=ON \
  -DMHA_STATIC=ON -DMHA_SHARED=ON -DBUILD_SHARED_LIBS=OFF -U 'MHA_AVX*' -U 'MHA_NEON*'
build build

# One comparison by tools/perf_gate.sh.
gate() {  # NAME IS_EXCUSABLE ARGUMENT...
  local status=0
  say "$1"
  tools/perf_gate.sh "${@:3}" 2>&1 | tee "$logs/$1" || status=$?
  case $status in
    0) ;;
    1) if [[ $2 == yes ]] && git log --format='%(trailers:key=Perf-Gate,valueonly)' "$base..HEAD" |
      grep -xF expected >/dev/null; then
         echo "performance gate: a commit since $base says that this is expected"
       else
         failed+=("$1")
       fi ;;
    3) skip "$1: too noisy to say" ;;
    5) skip "$1: not checked, because bench/floor.txt has no floor for this processor" ;;
    *) if [[ $(git rev-parse --is-shallow-repository) == true ]]; then
         skip "$1: this clone lacks older revisions (git fetch --unshallow)"
       else
         failed+=("$1")
       fi ;;
  esac
}
perf_gates() {
  local base=HEAD~1 new=()
  [[ -z ${MHA_PERF_GATE_BASE-} ]] || base=$(git merge-base HEAD "$MHA_PERF_GATE_BASE" 2>/dev/null) \
    || base=$MHA_PERF_GATE_BASE
  if ! git rev-parse --git-dir >/dev/null 2>&1; then
    skip "the performance gates: this is not a git repository"
    return
  fi
  # The library in build/ is what the gate would build again, if it is as the gate compiles.
  if grep -qx "CMAKE_CXX_COMPILER:[A-Z]*=$(command -v "${CXX:-c++}")" build/CMakeCache.txt &&
    grep -qx 'CMAKE_CXX_FLAGS:STRING=' build/CMakeCache.txt; then
    new=(build/src/libmha.so)
  fi
  if grep -qsw avx2 /proc/cpuinfo; then
    gate "instructions against $base" yes --count "$base" "${new[@]}"
  else
    skip "instructions against $base: counting them needs AVX2"
  fi
  gate "times against $base" yes "$base" "${new[@]}"
  gate "times against the floor" no --floor bench/floor.txt "${new[@]}"
  local commit
  for commit in $(git log --format=%h --no-merges --diff-filter=M "$base..HEAD" -- \
    bench/floor.txt); do
    [[ $(git diff-tree --no-commit-id --name-only -r "$commit") == bench/floor.txt ]] ||
      failed+=("the floor: a commit that moves it must change nothing else, but $commit does")
  done
}

[[ $matrix == quick ]] || perf_gates  # alone, before anything runs beside

# Packages for the tests of Python come from PyPI in parallel with what follows.
python_packages() { nice -n 5 tools/bindings/python/setup.sh &&
  nice -n 5 tools/bindings/python/setup.sh --runtimes; }
if [[ $setup == yes && $matrix != quick ]]; then
  python_packages >"$logs/python" 2>&1 &
  python=$!
fi

# The emulator takes one processor for some ten minutes. It has what the parts that follow leave
# idle, and a little more, so that none waits for it.
avx512="the kernels for AVX-512 with VNNI, which this processor cannot run, emulated" emulate=no \
  wide=()
[[ $matrix != all ]] || wide=(-L '^wide')  # and wide_long
if [[ $matrix != quick && $(uname -m) == x86_64 ]] && ! grep -qs avx512_vnni /proc/cpuinfo; then
  emulate=yes
  say "testing the AVX-512 kernels of build under emulation, in parallel with what follows"
  start_part "$avx512" nice -n 5 tools/test_avx512.sh --machines 1 --time-limit 2400 "${wide[@]}"
fi

if [[ $matrix != quick ]]; then
  configure build-clang Release -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
    -DMHA_EMULATE_VNNI=ON -DMHA_EMULATE_BF16=ON "${library[@]}"
  configure build-aarch64 Release \
    -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cmake/aarch64-linux-gnu.cmake" "${library[@]}"
  if [[ $matrix == default ]]; then
    build build-clang --target mha_static mha_shared tests_machine
    build build-aarch64 --target mha_static mha_shared tests_machine
    MHA_TEST_ROUNDS=0.3 run_tests build-clang -L '^(machine|objects|package)$' -LE \
      '^(once|repeated)$'
    MHA_TEST_ROUNDS=0.1 run_tests build-aarch64 -L '^(machine|objects|package)$' -LE \
      '^(once|repeated)$'
  else
    configure build-riscv64 Release \
      -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cmake/riscv64-linux-gnu.cmake" "${library[@]}"
    for folder in build-clang build-aarch64 build-riscv64; do build "$folder"; done
    run_tests build-clang -LE '^once$'
    run_tests build-aarch64
    run_tests build-riscv64 -L '^(bits|cache|interface)$'
  fi
fi
if [[ $matrix == all ]]; then
  say "fuzzing each target for 6 s, in build-fuzz"
  run_part "fuzzing" tools/fuzz.sh all 6
  say "planting faults, in build/mutate"
  run_part "mutants" tools/mutate.py
  run_part "refusals" tools/mutate.py --refusals
fi
test_windows() {
  if ! command -v x86_64-w64-mingw32-g++-posix >/dev/null || ! command -v wine >/dev/null; then
    skip "Windows, which needs the Debian packages g++-mingw-w64-x86-64-posix and wine"
    return
  fi
  configure build-windows Release \
    -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cmake/x86_64-w64-mingw32.cmake" "${library[@]}"
  if [[ $matrix == default ]]; then
    build build-windows --target tests_windows
    run_tests build-windows -L '^windows$'
  else
    build build-windows
    MHA_TEST_ROUNDS=0.3 run_tests build-windows -L '^(bits|cache|interface|objects)$'
  fi
}
build_four_lanes() {  # FOLDER TOOLCHAIN
  configure "$1" Release -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cmake/$2.cmake" -DMHA_SHARED=OFF \
    "${library[@]}"
  build "$1" --target tests_published
}
test_more_of_four_lanes() {  # FOLDER
  build "$1" --target tests_brief tests_machine tests_interface
  # Without what takes many minutes so, or repeats the published results.
  MHA_TEST_ROUNDS=0.1 run_tests "$1" -L '^(brief|machine|interface)$' \
    -LE '^(once|repeated|not_wasm)$' -E 'GeneratedPairs|ChecksumsOfResults'
}
test_wasm() {
  [[ $setup == no ]] || tools/bindings/wasm/setup.sh || rm -f build/wasm/bin/wasm-c++
  if [[ ! -x build/wasm/bin/wasm-c++ ]]; then
    skip "WebAssembly, which needs tools/bindings/wasm/setup.sh"
    return
  fi
  build_four_lanes build-wasm wasm
  run_tests build-wasm -L '^published$'
  [[ $matrix == all ]] || return 0
  test_more_of_four_lanes build-wasm
  local run=(build/wasm/venv/bin/python tools/cmake/wasi.py) of=build-wasm/bin/mha_test_published
  run_part "wasmtime" "${run[@]}" default $of wasm_simd128 wasm_relaxed
  run_part "wasmtime, deterministic" "${run[@]}" deterministic $of wasm_relaxed wasm_signed_dot
}
# One emulated program, which takes one processor for a minute and a half.
published="the published results on build-riscv64-vectors"
start_riscv_vectors() {
  if ! command -v clang++-19 >/dev/null || ! command -v riscv64-linux-gnu-g++ >/dev/null; then
    skip "the kernels for vectors of RISC-V, which need Debian's clang-19 and g++-riscv64-linux-gnu"
    return
  fi
  build_four_lanes build-riscv64-vectors riscv64-clang
  say "testing build-riscv64-vectors, in parallel with what follows"
  start_part "$published" ctest --test-dir build-riscv64-vectors --output-on-failure \
    --no-tests=error -L '^published$'
}
if [[ $matrix != quick ]]; then
  start_riscv_vectors
  [[ $(uname -m) != x86_64 ]] || test_windows
  test_wasm
  [[ ! ${started[$published]-} ]] || await_part "$published"
fi
[[ $matrix != all || ! ${started[$published]-} ]] || test_more_of_four_lanes build-riscv64-vectors
test_objects() {  # BUILD_TYPE
  local folder=build-${1,,}
  configure "$folder" "$1" "${library[@]}"
  build "$folder" --target mha_static mha_shared
  run_tests "$folder" -L '^(objects|package)$' -LE '^once$'
}
if [[ $matrix == all ]]; then
  test_objects MinSizeRel
  # The compiler makes other loops for this build.
  build build-minsizerel --target mha_test_checksums
  run_tests build-minsizerel -R '^checksums\.'
  test_objects Debug
  sanitize="-fsanitize=address,undefined,unsigned-integer-overflow \
-fsanitize-ignorelist=$PWD/tests/unsigned_wraps.txt -fno-sanitize-recover=all"
  configure build-sanitize Release -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
    "-DCMAKE_C_FLAGS=$sanitize" "-DCMAKE_CXX_FLAGS=$sanitize" \
    "${library[@]}"
  build build-sanitize
  run_tests build-sanitize -LE '^once$'
  # By g++: clang sees no race between accesses of more than 16 bytes, which are most of those of
  # AVX2 and AVX-512.
  configure build-sanitize-threads Release -DCMAKE_C_FLAGS=-fsanitize=thread \
    -DCMAKE_CXX_FLAGS=-fsanitize=thread "${library[@]}"
  build build-sanitize-threads --target tests_threads
  run_tests build-sanitize-threads -L '^threads$'
  say "testing emulated processors without AVX, and with only AVX2"
  run_part "emulated processors" tools/test_cpus.sh
  say "testing an emulated processor with AVX-512 and without VNNI"
  [[ $(uname -m) != x86_64 ]] || run_part "AVX-512 without VNNI, emulated" tools/test_avx512.sh \
    --without-vnni --time-limit 2400 "${wide[@]}"
  for program in build/bin/mha_fuzz_*; do
    target=${program##*/mha_fuzz_}
    say "testing the inputs of fuzz.$target under valgrind"
    run_part "fuzz.$target under valgrind" valgrind -q --error-exitcode=1 "$program" \
      "tests/fuzz/corpus/$target.corpus"
  done
  say "the coverage, in build-coverage"
  run_part "coverage" tools/coverage.sh
fi

other_parts() {
  [[ $matrix != all ]] || run_part "the packages of the Rust crates" tools/release/crates.sh --test
  # If PyPI cannot be reached, ctest shows the tests that need it as skipped.
  if [[ $setup == yes ]]; then
    say "waiting for the Python packages"
    tail --follow --lines=+1 --pid="$python" "$logs/python"
    wait "$python" || skip "tests python.* that lack packages; see above for the reason"
  fi
}
[[ $matrix == quick ]] || other_parts

case $matrix in
  quick) MHA_TEST_ROUNDS=${MHA_TEST_ROUNDS-0.3} run_tests build -LE '^(slow|long)$' ;;
  default) MHA_TEST_ROUNDS=${MHA_TEST_ROUNDS-0.3} run_tests build -LE '^slow$' ;;
  all) run_tests build ;;
esac
if [[ $emulate == yes ]]; then
  say "the emulated AVX-512 kernels, which ran in parallel"
  await_part "$avx512"
fi
# print_list HEADING ITEM...: nothing without an item.
print_list() {
  (($# == 1)) || printf '\ntools/test.sh: %s:\n' "$1"
  (($# == 1)) || printf '  %s\n' "${@:2}"
}
# failed_output LOG: of each test that ctest has seen fail in it, the last lines of what it printed.
failed_output() {
  awk '/^ *[0-9]+\/[0-9]+ Test +#|^ *Start +[0-9]+:|^[0-9]+% tests passed/ { ended() }
       /\*\*\*/ && !/\*\*\*(Skipped|Not Run)/ &&
         /^ *[0-9]+\/[0-9]+ Test +#/ { gsub(/\.\.+/, ".. "); name = $0; next }
       name { lines[++count] = $0 }
       END { ended() }
       function ended(  i) {
         if (name) print name
         for (i = count > 30 ? count - 29 : 1; name && i <= count; ++i) print "  " lines[i]
         name = ""
         count = 0
       }' "$1"
}
for name in "${failed[@]}"; do
  [[ ! -e $logs/$name ]] || printf '\n== the end of what failed: %s\n%s\n' "$name" \
    "$(failed_output "$logs/$name"; tail -n 20 "$logs/$name")"
done
print_list "skipped" "${skipped[@]}"
print_list "failed, see above" "${failed[@]}" >&2
((${#failed[@]} == 0))
