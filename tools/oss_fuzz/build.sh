#!/bin/bash -eu
# Builds the targets of tests/fuzz as OSS-Fuzz asks for. See --help.
if [[ ${1-} == --help || ${1-} == -h ]]; then
  cat <<'TEXT'
tools/oss_fuzz/build.sh

Builds the targets of tests/fuzz as OSS-Fuzz asks for: with $CC, $CXX, $CFLAGS, $CXXFLAGS and $LIB_FUZZING_ENGINE, in $WORK, into $OUT; beside each
its stored inputs and a dictionary. TARGETS limits them.

Examples:
  # without OSS-Fuzz
  CC=clang CXX=clang++ CFLAGS='-O1 -fsanitize=address,fuzzer-no-link' CXXFLAGS='-O1 -fsanitize=address,fuzzer-no-link' \
    LIB_FUZZING_ENGINE=-fsanitize=fuzzer WORK=/tmp/work OUT=/tmp/out tools/oss_fuzz/build.sh && /tmp/out/packed -runs=1000
TEXT
  exit
fi
cd "$(dirname "$0")/../.."
mkdir -p "$WORK" "$OUT"
targets=$(cd tests/fuzz && ls -- *.cpp | sed 's/\.cpp$//' | grep -v '^replay$')
cmake -S . -B "$WORK/build" -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DMHA_SHARED=OFF -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF \
  -DMHA_ONNX=OFF -DMHA_TOOLS=OFF -DMHA_BENCH=OFF -DMHA_TESTS=ON -DMHA_FUZZING_ENGINE="$LIB_FUZZING_ENGINE"
for target in ${TARGETS:-$targets}; do
  cmake --build "$WORK/build" --target "mha_fuzz_$target"
  cp "$WORK/build/bin/mha_fuzz_$target" "$OUT/$target"
  cp tools/oss_fuzz/numbers.dict "$OUT/$target.dict"
  [[ ! -e tests/fuzz/corpus/$target.hex ]] || python3 - "tests/fuzz/corpus/$target.hex" "$OUT/${target}_seed_corpus.zip" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[2], "w", zipfile.ZIP_DEFLATED) as seeds:
    for number, line in enumerate(open(sys.argv[1])):
        seeds.writestr(f"{number:05}", bytes.fromhex(line))
PYTHON
done
