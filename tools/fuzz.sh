#!/usr/bin/env bash
# Fuzzes the library with libFuzzer. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/fuzz.sh TARGET SECONDS [--jobs N] [--all-instrumented] [-- OPTION...]
tools/fuzz.sh all SECONDS
tools/fuzz.sh TARGET --replay FILE...
tools/fuzz.sh TARGET --keep FILE...
tools/fuzz.sh TARGET --minimise

Builds tests/fuzz/TARGET.cpp in build-fuzz/ with clang and its address and undefined behaviour
sanitizers, and searches for SECONDS seconds for inputs that make the library misbehave. The search
starts from the inputs in tests/fuzz/corpus/TARGET.corpus and those of earlier runs. The kernels are
not instrumented: reads and writes outside their arrays fault at guard pages. "all" runs every
target, one at a time on each processor. Requires Debian's clang and libclang-rt-14-dev
(tools/setup.sh --all), and what the tests require.

  --jobs N             run N fuzzers at once, which share what they find (default: 1)
  --all-instrumented   also instrument the kernels; the build takes several minutes more, and each
                       input takes longer
  -- OPTION...         pass options to libFuzzer, such as -print_pcs=1 or -only_ascii=1
  --replay FILE...     run only these inputs
  --keep FILE...       add these inputs to tests/fuzz/corpus/TARGET.corpus
  --minimise           write tests/fuzz/corpus/TARGET.corpus: of all inputs so far, the shortest
                       ones that reach the same code, as many as leave the files of all targets at
                       300,000 bytes or less
  --help               show this text

  build-fuzz/TARGET/corpus/     inputs found so far
  build-fuzz/TARGET/crashes/    inputs that failed; a report shows why and where

Exit status: 0 nothing was found; 1 something was found; 2 wrong arguments; 3 a requirement is
missing.

Every build runs the stored inputs as the test fuzz.TARGET, which names a failing input by its
number: the name of its file in build-fuzz/TARGET/stored/. --keep makes a test of an input that
failed.

Examples:
  tools/fuzz.sh interface 60
  tools/fuzz.sh all 6                             what tools/test.sh --all runs
  tools/fuzz.sh interface 3600 --jobs 4
  tools/fuzz.sh packed --replay build-fuzz/packed/crashes/crash-*
  tools/fuzz.sh packed --minimise
TEXT
}

fail() { echo "tools/fuzz.sh: $*; see tools/fuzz.sh --help" >&2 && exit 2; }
lacks() { echo "tools/fuzz.sh: $*" >&2 && exit 3; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
targets=$(cd tests/fuzz && ls ./*.cpp | sed 's|^\./||; s|\.cpp$||' | grep -v '^replay$' | tr '\n' \
  ' ')
[[ ${1-} != --help && ${1-} != -h ]] || { usage && exit; }
target=${1-}
[[ " $targets all " == *" $target "* && $target ]] ||
  fail "'$target' is not a target; choose one of ${targets}all"
shift
seconds='' jobs=1 do=fuzz build=build-fuzz options=() files=()
while (($#)); do
  case $1 in
    --help | -h) usage && exit ;;
    --jobs)
      [[ ${2-} =~ ^[1-9][0-9]*$ ]] || fail "--jobs needs a number of fuzzers"
      jobs=$2 && shift
      ;;
    --all-instrumented) build='build-fuzz-all' ;;
    --minimise) do=minimise ;;
    --replay | --keep) do=${1#--} && shift && files=("$@") && break ;;
    --) shift && options=("$@") && break ;;
    *)
      [[ $1 =~ ^[1-9][0-9]*$ && ! $seconds ]] || fail "'$1' is not an option"
      seconds=$1
      ;;
  esac
  shift
done
[[ $do != fuzz || $seconds ]] || fail "SECONDS is missing"
[[ $do != replay && $do != keep ]] || ((${#files[@]})) || fail "--$do needs files of inputs"
[[ $target != all || $do == fuzz ]] || fail "'all' takes only SECONDS"
[[ $target == all ]] || targets=$target

unpack() {  # TARGET: into its folder stored
  mkdir -p "$build/$1"/{stored,corpus,crashes,shortest}
  find "$build/$1/stored" -type f -delete
  [[ ! -e tests/fuzz/corpus/$1.corpus ]] ||
    tests/fuzz/corpus.py unpack "tests/fuzz/corpus/$1.corpus" "$build/$1/stored"
}
if [[ $do == keep ]]; then
  unpack "$target"
  cp -- "${files[@]}" "$build/$target/stored/"
  tests/fuzz/corpus.py pack "$build/$target/stored" "tests/fuzz/corpus/$target.corpus"
  exit
fi

command -v clang++ > /dev/null ||
  lacks "clang++ is not installed (Debian: apt-get install clang libclang-rt-14-dev)"
# Without the values of comparisons, which take a third of the time and find nothing here that the
# targets do not choose themselves.
flags='-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-coverage=trace-cmp'
flags+=' -fno-sanitize-recover=undefined -g1'
settings=(-DMHA_FUZZING_FLAGS="$flags")
[[ $build == build-fuzz ]] || settings=(-DCMAKE_CXX_FLAGS="$flags" -DCMAKE_C_FLAGS="$flags")
generator=()
[[ -e $build/CMakeCache.txt ]] || generator=(-G Ninja)
cmake -S . -B "$build" "${generator[@]}" --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF -DMHA_ONNX=OFF -DMHA_GGML=OFF -DMHA_BINDINGS=OFF \
  -DMHA_BENCH=OFF -DMHA_SHARED=OFF -DMHA_TESTS=ON \
  "${settings[@]}" -DMHA_FUZZING_ENGINE=-fsanitize=fuzzer > /dev/null ||
  lacks "the build could not be configured; see above"
mapfile -t programs < <(printf 'mha_fuzz_%s\n' $targets)
cmake --build "$build" --target "${programs[@]}" > "$build/log.txt" || { cat "$build/log.txt" &&
  lacks "$target does not build; see above"; }

run() {  # TARGET OPTION...
  "$build/bin/mha_fuzz_$1" -artifact_prefix="$build/$1/crashes/" -timeout=20 -print_final_stats=1 \
    -len_control=0 -entropic=0 "${@:2}"
}
fuzz() {  # TARGET
  unpack "$1"
  ((jobs == 1)) || options+=(-fork="$jobs")
  run "$1" -max_total_time="$seconds" "${options[@]}" "$build/$1/corpus" "$build/$1/stored" &&
    return
  echo "tools/fuzz.sh: $1 found something; the input is in $build/$1/crashes/ (to run it again: \
tools/fuzz.sh $1 --replay FILE)" >&2
  return 1
}
fuzz_beside() {  # TARGET: what it printed is shown if it found something
  if fuzz "$1" > "$build/$1.txt" 2>&1; then
    echo "$1: nothing found, $(sed -n 's/^stat::number_of_executed_units: *//p' \
      "$build/$1.txt") inputs"
  else
    cat "$build/$1.txt" && touch "$build/found"
  fi
}
case $do-$target in
  replay-*) unpack "$target" && run "$target" "${files[@]}" || exit 1 ;;
  minimise-*)
    unpack "$target"
    find "$build/$target/shortest" -type f -delete
    run "$target" -merge=1 "$build/$target"/{shortest,stored,corpus} || exit 1
    tests/fuzz/corpus.py pack "$build/$target/shortest" "tests/fuzz/corpus/$target.corpus" 300000
    ;;
  fuzz-all)
    rm -f "$build/found"
    for target in $targets; do
      while (($(jobs -pr | wc -l) >= $(nproc))); do sleep 0.1; done
      fuzz_beside "$target" &
    done
    wait
    [[ ! -e $build/found ]] || exit 1
    ;;
  fuzz-*) fuzz "$target" || exit 1 ;;
esac
