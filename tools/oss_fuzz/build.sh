#!/bin/bash -eu
# Builds the targets of tests/fuzz as OSS-Fuzz asks for. See --help.
if [[ ${1-} == --help || ${1-} == -h ]]; then
  cat <<'TEXT'
tools/oss_fuzz/build.sh

Builds the targets of tests/fuzz as OSS-Fuzz asks for: with $CC, $CXX, $CFLAGS, $CXXFLAGS and
$LIB_FUZZING_ENGINE, in $WORK, into $OUT; beside each its stored inputs and a dictionary. TARGETS
limits them.

Examples:
  # without OSS-Fuzz
  export CC=clang CXX=clang++ LIB_FUZZING_ENGINE=-fsanitize=fuzzer WORK=/tmp/work OUT=/tmp/out
  export CFLAGS='-O1 -fsanitize=address,fuzzer-no-link'
  export CXXFLAGS=$CFLAGS
  tools/oss_fuzz/build.sh && /tmp/out/packed -runs=1000
TEXT
  exit
fi
cd "$(dirname "$0")/../.."
mkdir -p "$WORK" "$OUT"
targets=$(cd tests/fuzz && ls -- *.cpp | sed 's/\.cpp$//' | grep -v '^replay$')
cmake -S . -B "$WORK/build" -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release \
  -DMHA_SHARED=OFF -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF \
  -DMHA_ONNX=OFF -DMHA_GGML=OFF -DMHA_TOOLS=OFF -DMHA_BENCH=OFF -DMHA_TESTS=ON \
  -DMHA_FUZZING_ENGINE="$LIB_FUZZING_ENGINE"
for target in ${TARGETS:-$targets}; do
  cmake --build "$WORK/build" --target "mha_fuzz_$target"
  cp "$WORK/build/bin/mha_fuzz_$target" "$OUT/$target"
  cp tools/oss_fuzz/numbers.dict "$OUT/$target.dict"
  seeds=$WORK/$target && mkdir -p "$seeds"
  tests/fuzz/corpus.py unpack "tests/fuzz/corpus/$target.corpus" "$seeds"
  python3 -m zipfile -c "$OUT/${target}_seed_corpus.zip" "$seeds"/*
done
