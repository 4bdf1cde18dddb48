#!/usr/bin/env bash
# Builds the npm package mha-wasm. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bindings/wasm/build.sh [--page] [--pack]

Builds mha.wasm (relaxed SIMD) and mha_simd128.wasm, and puts the package together in
build/wasm/package. It needs what tools/bindings/wasm/setup.sh installs, CMake and Ninja.

  --page   also build build/wasm/page, a page that recomputes the published results; needs
           GoogleTest's sources (Debian: googletest)
  --pack   also write build/wasm/mha-wasm-VERSION.tgz
  --help   show this text

Exit status: 0 success; 1 a build fails; 2 wrong usage; 3 a tool is missing.
TEXT
}

fail() { echo "tools/bindings/wasm/build.sh: $1" >&2 && exit "$2"; }

page=no pack=no
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    --page) page=yes ;;
    --pack) pack=yes ;;
    *) fail "'$argument' is not an option; see --help" 2 ;;
  esac
done
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
here=tools/bindings/wasm out=build/wasm package=build/wasm/package
[[ -x $out/bin/wasm-c++ ]] || fail "run tools/bindings/wasm/setup.sh first" 3
declare -A off=([mha]=SIMD128 [mha_simd128]=RELAXED)
mapfile -t functions < <(grep -hoP '^MHA_API .*?\b\Kmha_\w+(?=\()' include/mha*.h)
functions+=(aligned_alloc free)

build() {  # MODULE TARGETS OPTION...: for one of the modules
  cmake -S . -B "$out/$1" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cmake/wasm.cmake" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-Os -DNDEBUG" \
    -DMHA_{SCALAR,WASM_${off[$1]},SHARED,ONNX,GGML,BENCH,OPENBLAS,PTHREADPOOL,INSTALL}=OFF \
    "${@:3}" >"$out/$1.log" 2>&1 && ninja -C "$out/$1" $2 >>"$out/$1.log" 2>&1 ||
    fail "the build of $2 fails; see $out/$1.log" 1
}

for module in mha mha_simd128; do
  build $module mha_static
  # The stack lies below the data: one that overflows ends in a trap.
  "$out/bin/wasm-c++" -mexec-model=reactor -O3 -s "$out/$module/src/libmha.a" \
    "${functions[@]/#/-Wl,--export=}" -Wl,--gc-sections -Wl,-z,stack-size=262144 \
    -o "$out/$module/mha.wasm"
done
rm -rf "$package"
mkdir -p "$package"
for module in mha mha_simd128; do cp "$out/$module/mha.wasm" "$package/$module.wasm"; done
cp $here/*.js $here/*.d.ts $here/README.md LICENSE "$package"
python3 tools/interface.py javascript "$package"
version=$(grep -hoP '^#define MHA_VERSION_(MAJOR|MINOR|PATCH) \K\d+' include/mha.h | paste -sd.)
sed "s/VERSION/$version/" $here/package.json >"$package/package.json"
if [[ $page == yes ]]; then
  rm -rf "$out/page"
  mkdir -p "$out/page"
  cp $here/page/*.html $here/page/*.js "$package"/*.{js,wasm} "$out/page"
  for module in mha mha_simd128; do
    build $module "mha_fixtures mha_results" -DMHA_TESTS=ON
    mapfile -t objects < <(find "$out/$module/tests/support" -name '*.obj')
    "$out/bin/wasm-c++" -mexec-model=reactor -O2 -s -std=c++17 -Iinclude -Itests \
      $here/page/results.cpp "${objects[@]}" "$out/$module/src/libmha.a" -Wl,--export=compare \
      -Wl,-z,stack-size=1048576 -o "$out/page/results_$module.wasm"
  done
fi
[[ $pack == no ]] || npm pack --silent --pack-destination "$out" "./$package"
