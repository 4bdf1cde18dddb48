#!/usr/bin/env bash
# Tests the crates mha-sys and mha. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bindings/rust/test.sh [--help]

Tests the crates mha-sys and mha: format, clippy, tests and examples, documentation. If a nightly
Rust has Miri, it also runs the tests that do not call the library; if rustup has the oldest Rust
for users (rust-version in Cargo.toml), it checks that mha compiles. tools/release/crates.sh --test
tests the packages.

MHA_BUILD names a build folder of the library (default: build). The library is installed from there
into build-rust/prefix, where pkg-config finds it. Without that folder, the script builds it. If
MHA_TEST_ROUNDS is below 1, valgrind runs only the tests of slices, and clippy leaves out systest.

Exit codes: 0 all tests pass; 1 a test fails; 2 wrong arguments; 3 nothing was tested, because cargo
1.90, rustfmt or clippy is missing, or crates cannot be fetched.

Examples:
  tools/bindings/rust/test.sh
  MHA_BUILD=build-clang tools/bindings/rust/test.sh
TEXT
}
case ${1-} in
  '') ;;
  --help | -h) usage && exit ;;
  *) echo "tools/bindings/rust/test.sh takes no argument '$1'; see tools/bindings/rust/test.sh \
--help" >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
crates=$PWD/tools/bindings/rust work=$PWD/build-rust
fail() { echo "tools/bindings/rust/test.sh: $*" >&2 && exit 1; }
cannot_test() {
  echo "tools/bindings/rust/test.sh: $* (Debian 12: apt-get install cargo-web rustc-web \
rust-web-clippy rustfmt-web; elsewhere: https://rustup.rs)" >&2
  exit 3
}
cargo=$(cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p') || true
printf '%s\n' 1.90 "${cargo:-0}" | sort --check=quiet --version-sort ||
  cannot_test "cargo 1.90 or newer is needed, and there is ${cargo:-none}"
cargo fmt --version >/dev/null 2>&1 || cannot_test "cargo has no rustfmt"
cargo clippy --version >/dev/null 2>&1 || cannot_test "cargo has no clippy"
begin() { printf -- '-- %s (%d s so far)\n' "$*" "$SECONDS"; }

# Settings of the caller must not decide which library is tested.
unset MHA_LIB_DIR MHA_INCLUDE_DIR MHA_NO_PKG_CONFIG MHA_XSIMD_INCLUDE_DIR DOCS_RS

begin "crates to depend on"
# For this machine alone, so that a filled cache of crates needs no network.
cargo fetch --quiet --locked --target "$(rustc -vV | sed -n 's/^host: //p')" --manifest-path \
  "$crates/Cargo.toml" ||
  cannot_test "cargo cannot fetch the crates that mha depends on; see above"
export CARGO_NET_OFFLINE=true

begin "the program in README.md"
# The first program of a page. Lines that begin with # are hidden in the documentation.
first_program() { awk '/^```rust/ { inside = 1; next } inside && /^```/ { exit } inside' "$1" |
  grep -v '^# '; }
diff <(first_program README.md) <(first_program "$crates/mha/README.md") ||
  fail "README.md and tools/bindings/rust/mha/README.md begin with different programs, as shown \
above; copy one to the other"

begin "a library to link"
build=${MHA_BUILD-build}
if [[ ! -e $build/src/libmha.a ]]; then
  [[ -z ${MHA_BUILD-} ]] ||
    fail "MHA_BUILD is $MHA_BUILD, which has no src/libmha.a; build it first"
  build=$work/library
  cmake -S . -B "$build" --log-level=NOTICE -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF \
    -DMHA_BINDINGS=OFF -DMHA_BENCH=OFF -DMHA_TESTS=OFF
  cmake --build "$build" --parallel "$(nproc)"
fi
rm -rf "$work/prefix"
cmake --install "$build" --prefix "$work/prefix" >/dev/null
package=$(find "$work/prefix" -name mha.pc)
[[ -n $package ]] || fail "$build does not install the library; configure it with -DMHA_INSTALL=ON"
# The static library, so that programs need no search path. If pkg-config did not find it, the crate
# would run this CMake and fail.
export MHA_STATIC=1 CMAKE=/nowhere/cmake CARGO_TARGET_DIR=$work/target
PKG_CONFIG_PATH=$(dirname "$package")
export PKG_CONFIG_PATH
cd "$crates"

begin "cargo fmt and clippy"
linted=(--workspace) under_valgrind=()
[[ ${MHA_TEST_ROUNDS-1} != 0* ]] || linted=(-p mha -p mha-sys) under_valgrind=(slices)
cargo fmt --all --check
cargo clippy --quiet --locked "${linted[@]}" --all-targets --all-features -- -D warnings

begin "cargo test"
cargo test --quiet --locked --workspace --all-features

begin "cargo test of mha without rayon, under valgrind"
# It sees whether the library stays within the slices that the crate has checked, and leaks.
if command -v valgrind >/dev/null; then
  runner=CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_RUNNER
  export "$runner=valgrind --quiet --error-exitcode=1 --leak-check=full --show-leak-kinds=definite \
--errors-for-leak-kinds=definite"
fi
cargo test --quiet --locked -p mha --test interface -- "${under_valgrind[@]}"
[[ -z ${runner-} ]] || unset "$runner"

begin "the example, with the static library of a system and with the shared one in MHA_LIB_DIR"
# As in /usr/lib, where the crate pkg-config would link the shared library.
SYSROOT=$work/prefix cargo run --quiet --locked -p mha --example generate
shared=$(find "$work/prefix" -name "libmha.so" -o -name "libmha.dylib")
[[ -n $shared ]] || fail "$build has no shared library; configure it with -DMHA_SHARED=ON"
env -u LD_LIBRARY_PATH -u MHA_STATIC "MHA_LIB_DIR=$(dirname "$shared")" cargo run --quiet --locked \
  -p mha --example generate

begin "cargo doc"
RUSTDOCFLAGS="-D warnings" DOCS_RS=1 cargo doc --quiet --locked --no-deps --all-features -p mha -p \
  mha-sys

begin "the unit tests of mha in Miri, which finds undefined behaviour"
if cargo +nightly miri --version >/dev/null 2>&1; then
  CARGO_TARGET_DIR=$work/miri cargo +nightly miri test --quiet --locked -p mha --lib
else
  echo "skipped without Miri: rustup toolchain install nightly --component miri,rust-src"
fi

oldest=$(sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' Cargo.toml)
begin "mha with Rust $oldest"
if rustup run "$oldest" cargo --version >/dev/null 2>&1; then
  CARGO_TARGET_DIR=$work/oldest CARGO_NET_OFFLINE=false rustup run "$oldest" cargo check --quiet \
    --locked -p mha --features rayon
else
  echo "skipped without Rust $oldest: rustup toolchain install --profile minimal $oldest"
fi
