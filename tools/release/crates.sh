#!/usr/bin/env bash
# Packages the Rust crates. See --help.
usage() {
  cat <<'TEXT'
tools/release/crates.sh [--test] [OUTPUT_FOLDER]

Packages the crates mha-sys, mha and mha-candle of a clean clone of HEAD by cargo package. Needs
cargo 1.90 or newer, and crates.io for what is not in cargo's cache. The files are the same bytes
wherever they are made.

  OUTPUT_FOLDER  default: build/release
  --test         also let cargo build each package, and check the messages of mha-sys where
                 something is missing; takes minutes
  --help         this text

Examples:
  tools/release/crates.sh
  tools/release/crates.sh --test /tmp/release
TEXT
}
# shellcheck source=tools/release/common.bash
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

fail() { echo "tools/release/crates.sh: $1" >&2 && exit 1; }
cargo=$(cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p') || true
printf '%s\n' 1.90 "${cargo:-0}" | sort --check=quiet --version-sort ||
  { echo "tools/release/crates.sh: cargo 1.90 or newer is needed, and there is ${cargo:-none}; see \
https://rustup.rs" >&2 && exit 3; }
unset MHA_LIB_DIR MHA_INCLUDE_DIR MHA_STATIC MHA_XSIMD_INCLUDE_DIR DOCS_RS CARGO_NET_OFFLINE
export CARGO_TARGET_DIR=$work/target MHA_NO_PKG_CONFIG=1
git clone --quiet . "$work/clone"
rust=$work/clone/tools/bindings/rust candle=$work/clone/tools/adapters/candle

verify=(--no-verify)
[[ $test == no ]] || verify=()
package() {  # ARGUMENT...
  cargo package --locked ${verify[@]+"${verify[@]}"} "$@" 2>&1 | tee "$work/log" || exit
  # Warnings about cargo's own records in the user's folder come where another cargo is writing.
  ! grep '^warning' "$work/log" | grep -q -v -e 'last-use data' -e 'auto-clean cache data' ||
    fail "cargo package warns; see above"
}
package --manifest-path "$rust/Cargo.toml" --workspace --exclude systest
# mha-candle depends on a release of mha that may not be published yet.
package --manifest-path "$candle/Cargo.toml" --config "patch.crates-io.mha.path='$rust/mha'" \
  --config "patch.crates-io.mha-sys.path='$rust/mha-sys'"
cp "$CARGO_TARGET_DIR"/package/*.crate "$output"
[[ $test == yes ]] || exit 0

says() {  # SENTENCE COMMAND...
  ! "${@:2}" >"$work/log" 2>&1 || fail "this succeeds: ${*:2}"
  grep -qF "$1" "$work/log" || { cat "$work/log" >&2 &&
    fail "no sentence '$1' above, from ${*:2}"; }
}
git clone --quiet --config core.symlinks=false . "$work/without_links"
says "type: git config core.symlinks true" cargo package --quiet --manifest-path \
  "$work/without_links/tools/bindings/rust/mha-sys/Cargo.toml"
tar -C "$work" -xzf "$output/mha-sys-$version.crate"
build=(cargo build --quiet --offline --manifest-path "$work/mha-sys-$version/Cargo.toml")
printf 'set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)\nset(CMAKE_FIND_ROOT_PATH /nowhere)\n' \
  >"$work/no_xsimd.cmake"
says "On Debian: apt-get install libxsimd-dev" env "CMAKE_TOOLCHAIN_FILE=$work/no_xsimd.cmake" \
  "CARGO_TARGET_DIR=$work/missing" "${build[@]}"
says "building mha needs CMake" env CMAKE=/nowhere/cmake "${build[@]}"
says "MHA_LIB_DIR is /nowhere, where there is no libmha.so" env MHA_LIB_DIR=/nowhere "${build[@]}"
