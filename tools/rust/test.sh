#!/usr/bin/env bash
# Tests the Rust crates, from their sources and from their packages. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/rust/test.sh [--all] [--help]

Tests the crates mha-sys and mha: their form, clippy, all tests and examples, documentation, and packages, from which a program is built in an empty
folder. Says how long each part took. Works in build-rust/. With --all also mha-candle, beside candle and candle-transformers, which take 2 GB there
and, the first time, minutes to compile.

MHA_BUILD names a build folder of the library, build/ if not set: it is installed into build-rust/prefix and found there by pkg-config, so that
the tests do not compile it again. Without one, the library is built first. The program that is built from the packages compiles it once.

Testing takes a newer cargo than using the crates. With the least version for users, their rust-version, the program is checked too if rustup has it.

Exit codes:
  0   all is well
  1   a part failed; what it said is above
  2   wrong arguments
  3   there is no cargo with rustfmt and clippy, it is too old to test with, or crates cannot be fetched, so nothing was tested; with --all perhaps
      all but mha-candle, which is said

Examples:
  tools/rust/test.sh
  tools/rust/test.sh --all
  MHA_BUILD=build-clang tools/rust/test.sh
TEXT
}

all=no
case ${1-} in
  '') ;;
  --all) all=yes ;;
  --help | -h) usage && exit ;;
  *) echo "tools/rust/test.sh: '$1' is not an option; see tools/rust/test.sh --help" >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD
work=$root/build-rust

cannot_test() {
  echo "tools/rust/test.sh: $*, so the Rust crates were not tested" >&2
  exit 3
}
to_install="Debian 12: apt-get install cargo-web rustc-web rust-web-clippy rustfmt-web; elsewhere: https://rustup.rs"
least=1.90  # to test: packages crates that depend on each other
least_for_users=$(sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' tools/rust/Cargo.toml)

command -v cargo >/dev/null || cannot_test "there is no cargo ($to_install)"
cargo=$(cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p') || true
[[ -n $cargo ]] || cannot_test "there is a cargo, but 'cargo --version' fails ($to_install)"
printf '%s\n' "$least" "$cargo" | sort --check=quiet --version-sort || cannot_test "cargo is $cargo, and to test them $least or newer is needed ($to_install)"
cargo fmt --version >/dev/null 2>&1 || cannot_test "cargo has no rustfmt ($to_install)"
cargo clippy --version >/dev/null 2>&1 || cannot_test "cargo has no clippy ($to_install)"

part=
part_start=0
begin() {
  end
  part=$*
  part_start=$SECONDS
  printf -- '-- %s\n' "$part"
}
end() {
  [[ -z $part ]] || printf -- '-- %s: %d s\n' "$part" $((SECONDS - part_start))
  part=
}
# What vendor.sh copies is for the package alone: left there, later builds would compile it in place of the tree.
trap '[[ -z $part ]] || echo "tools/rust/test.sh: $part failed; see above" >&2; rm -rf "$root/tools/rust/mha-sys/vendor"' EXIT

fail() {
  echo "tools/rust/test.sh: $*" >&2
  exit 1
}

# Neither the user's nor a caller's settings decide which library is tested.
unset MHA_LIB_DIR MHA_INCLUDE_DIR MHA_NO_PKG_CONFIG MHA_XSIMD_INCLUDE_DIR DOCS_RS

begin "crates to depend on"
# Of this machine alone: what is there already needs no network.
fetch() {  # FOLDER
  cargo fetch --quiet --locked --target "$(rustc -vV | sed -n 's/^host: //p')" --manifest-path "$1/Cargo.toml" 2>"$work/fetch.log" && return
  cat "$work/fetch.log" >&2
  ! grep -q -e 'lock file' "$work/fetch.log" || fail "$1/Cargo.lock does not fit the crates"
  part=
  return 1
}
mkdir -p "$work"
fetch tools/rust || cannot_test "the crates that they depend on cannot be fetched, as said above"
export CARGO_NET_OFFLINE=true  # nothing more is needed

begin "sources for the package"
tools/rust/vendor.sh

begin "the program in README.md"
# The first of a file; what begins with # is not shown in the documentation.
first_program() { awk '/^```rust/ { inside = 1; next } inside && /^```/ { exit } inside' "$1"; }
[[ -n $(first_program README.md) ]] || fail "README.md has no program in Rust"
diff <(first_program README.md) <(first_program tools/rust/mha/README.md | grep -v '^# ') ||
  fail "README.md and tools/rust/mha/README.md begin with different programs, as shown above; copy the one to the other"

begin "a library to link"
build=${MHA_BUILD-build}
if [[ ! -e $build/src/libmha.a ]]; then
  [[ -z ${MHA_BUILD-} ]] || fail "MHA_BUILD is $MHA_BUILD, where there is no src/libmha.a; build it first"
  build=$work/library
  cmake -S . -B "$build" --log-level=NOTICE -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF -DMHA_TOOLS=OFF -DMHA_BENCH=OFF -DMHA_TESTS=OFF
  cmake --build "$build" --parallel "$(nproc)"
fi
rm -rf "$work/prefix"
cmake --install "$build" --prefix "$work/prefix" >/dev/null
package=$(find "$work/prefix" -name mha.pc)
[[ -n $package ]] || fail "$build does not install the library; configure it with -DMHA_INSTALL=ON"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' tools/rust/Cargo.toml)
# Statically, so that programs run without being told where it is; and never built by the crate, if it were not found.
found=(env "PKG_CONFIG_PATH=$(dirname "$package")" MHA_STATIC=1 CMAKE=/nowhere/it_should_be_found_by_pkg-config)
"${found[@]}" pkg-config --print-errors --static --exists "mha >= $version" || fail "pkg-config does not find the mha $version of $package"
export CARGO_TARGET_DIR=$work/target
cd tools/rust

begin "cargo fmt"
cargo fmt --all --check

begin "cargo clippy"
"${found[@]}" cargo clippy --quiet --locked --workspace --all-targets --all-features -- -D warnings

begin "cargo test"
"${found[@]}" cargo test --quiet --locked --workspace --all-features

begin "cargo test of mha without rayon, under valgrind"
# Which sees whether the library reads and writes within the slices that the crate has checked, and whether all memory is freed.
without_rayon=(cargo test --quiet --locked -p mha --test interface)
if command -v valgrind >/dev/null; then
  runner=CARGO_TARGET_$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')_RUNNER
  "${found[@]}" "$runner=valgrind --quiet --error-exitcode=1 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite" \
    "${without_rayon[@]}"
else
  echo "valgrind is not there: tested without it"
  "${found[@]}" "${without_rayon[@]}"
fi

begin "the example"
# With a library that lies where those of a system do, which the crate pkg-config would link as a shared one.
"${found[@]}" "SYSROOT=$work/prefix" cargo run --quiet --locked -p mha --example generate

begin "cargo doc"
RUSTDOCFLAGS="-D warnings" DOCS_RS=1 cargo doc --quiet --locked --no-deps --all-features -p mha -p mha-sys

begin "cargo package"
# The sources for the package are not committed, which is what --allow-dirty allows.
rm -rf "$CARGO_TARGET_DIR/package"
# Without cargo's own check that they build, which takes the mha-sys that an earlier run in a folder of this name packaged: cargo keeps it, by
# name and version, in its home. The program below is built from the packages instead.
"${found[@]}" cargo package --locked --workspace --exclude systest --allow-dirty --no-verify 2>&1 | tee "$work/package.log"
# Not what cargo says of its own records in the user's folder, where another cargo that runs may be writing.
warnings=$(grep '^warning' "$work/package.log" | grep -v -e 'last-use data' -e 'auto-clean cache data') || true
[[ -z $warnings ]] || fail "cargo package warns"

begin "a program from the packages, which build the library"
unset CARGO_TARGET_DIR
program=$work/program
rm -rf "$program"
mkdir -p "$program/src"
cd "$program"
for package in "$work"/target/package/*.crate; do
  tar -xzf "$package"
done
cat >Cargo.toml <<TOML
[package]
name = "program"
edition = "2021"

[dependencies]
mha = "$version"

[patch.crates-io]
mha = { path = "mha-$version" }
mha-sys = { path = "mha-sys-$version" }
TOML
cp "$root/tools/rust/Cargo.lock" . # the same versions of the dependencies
# The first program of the crate's documentation.
first_program "mha-$version/README.md" | sed 's/^# //' >src/main.rs

# What is missing is said in a sentence.
says() {  # SENTENCE SETTING...
  local sentence=$1
  ! env MHA_NO_PKG_CONFIG=1 CARGO_TARGET_DIR=missing "${@:2}" cargo build --quiet >build.log 2>&1 || fail "the program builds with ${*:2}"
  grep -qF "$sentence" build.log || { cat build.log >&2 && fail "no sentence '$sentence' above, with ${*:2}"; }
}
echo 'set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)' >no_xsimd.cmake
echo 'set(CMAKE_FIND_ROOT_PATH /nowhere)' >>no_xsimd.cmake
says "On Debian: apt-get install libxsimd-dev" "CMAKE_TOOLCHAIN_FILE=$PWD/no_xsimd.cmake"
says "building mha needs CMake" CMAKE=/nowhere/cmake
says "MHA_LIB_DIR is /nowhere, where there is no libmha.so" MHA_LIB_DIR=/nowhere

# The sources of all kernels are there; those of plain C++ are built, which are soon compiled.
diff -r "$root/src/kernels" "mha-sys-$version/vendor/src/kernels" || fail "the package of mha-sys has other kernels, as shown above"
printf 'set(MHA_%s OFF)\n' AVX2 AVX512 NEON >plain.cmake
said=$(MHA_NO_PKG_CONFIG=1 CMAKE_TOOLCHAIN_FILE="$PWD/plain.cmake" cargo run --quiet)
echo "$said"
[[ $said == "y[3] =  0.1602 -0.2338 ..." ]] || fail "this is not what stands in the README of the crate"

begin "the program with Rust $least_for_users"
# Clippy has looked for what is newer in the standard library, but not in the language.
in_least() { "${found[@]}" CARGO_TARGET_DIR=least rustup run "$least_for_users" cargo "$@"; }
if ! in_least --version >/dev/null 2>&1; then
  echo "not tested, for rustup has no Rust $least_for_users: rustup toolchain install --profile minimal $least_for_users"
elif ! CARGO_NET_OFFLINE=false in_least fetch --quiet 2>fetch.log; then  # that cargo has a store of crates of its own to fill
  cat fetch.log >&2
  ! grep -q -e 'lock file' -e manifest fetch.log || fail "Rust $least_for_users cannot read Cargo.lock or a Cargo.toml"
  echo "not tested with Rust $least_for_users, for which the crates cannot be fetched, as said above"
else
  in_least check --quiet --features mha/rayon
fi

test_candle() {
  cd "$root"
  begin "mha-candle: crates to depend on"
  CARGO_NET_OFFLINE=false fetch tools/rust/mha-candle ||
    { echo "tools/rust/test.sh: candle cannot be fetched, as said above, so mha-candle alone was not tested" >&2 && exit 3; }
  export CARGO_TARGET_DIR=$work/candle
  cd tools/rust/mha-candle
  begin "mha-candle: cargo fmt"
  cargo fmt --check
  begin "mha-candle: cargo clippy"
  "${found[@]}" cargo clippy --quiet --locked --all-targets --all-features -- -D warnings
  begin "mha-candle: cargo test"
  "${found[@]}" cargo test --quiet --locked --all-features
  begin "mha-candle: cargo doc"
  RUSTDOCFLAGS="-D warnings" DOCS_RS=1 cargo doc --quiet --locked --no-deps --all-features
}
[[ $all == no ]] || test_candle
end
