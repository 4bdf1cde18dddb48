#!/usr/bin/env bash
# Tests the Rust crates, from their sources and from their packages. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bindings/rust/test.sh [--all] [--help]

Tests the crates mha-sys and mha: their form, clippy, all tests and examples, documentation. Says how long each part took. Works in build-rust/. With
--all also in Miri, and mha-candle, beside candle and candle-transformers, which take 2 GB there and, the first time, minutes to compile. The
packages are tested by tools/release/crates.sh --test.

MHA_BUILD names a build folder of the library, build/ if not set: it is installed into build-rust/prefix and found there by pkg-config, so that
the tests do not compile it again. Without one, the library is built first.

With the least version for users, the crates' rust-version, mha is checked too if rustup has it.

Exit codes:
  0   all is well
  1   a part failed; what it said is above
  2   wrong arguments
  3   there is no cargo with rustfmt and clippy, it is too old to test with, or crates cannot be fetched, so nothing was tested; with --all perhaps
      all but mha-candle, which is said

Examples:
  tools/bindings/rust/test.sh
  tools/bindings/rust/test.sh --all
  MHA_BUILD=build-clang tools/bindings/rust/test.sh
TEXT
}

all=no
case ${1-} in
  '') ;;
  --all) all=yes ;;
  --help | -h) usage && exit ;;
  *) echo "tools/bindings/rust/test.sh: '$1' is not an option; see tools/bindings/rust/test.sh --help" >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
root=$PWD
work=$root/build-rust

cannot_test() {
  echo "tools/bindings/rust/test.sh: $*, so the Rust crates were not tested" >&2
  exit 3
}
to_install="Debian 12: apt-get install cargo-web rustc-web rust-web-clippy rustfmt-web; elsewhere: https://rustup.rs"
least=1.90  # to test; as tools/release/crates.sh
least_for_users=$(sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' tools/bindings/rust/Cargo.toml)

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
trap '[[ -z $part ]] || echo "tools/bindings/rust/test.sh: $part failed; see above" >&2' EXIT

fail() {
  echo "tools/bindings/rust/test.sh: $*" >&2
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
fetch tools/bindings/rust || cannot_test "the crates that they depend on cannot be fetched, as said above"
export CARGO_NET_OFFLINE=true  # nothing more is needed

begin "the program in README.md"
# The first of a file; what begins with # is not shown in the documentation.
first_program() { awk '/^```rust/ { inside = 1; next } inside && /^```/ { exit } inside' "$1"; }
[[ -n $(first_program README.md) ]] || fail "README.md has no program in Rust"
diff <(first_program README.md) <(first_program tools/bindings/rust/mha/README.md | grep -v '^# ') ||
  fail "README.md and tools/bindings/rust/mha/README.md begin with different programs, as shown above; copy the one to the other"

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

version=$(sed -n 's/^version = "\(.*\)"/\1/p' tools/bindings/rust/Cargo.toml)
# Statically, so that programs run without being told where it is; and never built by the crate, if it were not found.
found=(env "PKG_CONFIG_PATH=$(dirname "$package")" MHA_STATIC=1 CMAKE=/nowhere/it_should_be_found_by_pkg-config)
"${found[@]}" pkg-config --print-errors --static --exists "mha >= $version" || fail "pkg-config does not find the mha $version of $package"
export CARGO_TARGET_DIR=$work/target
cd tools/bindings/rust

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

if [[ $all == yes ]]; then
  begin "mha in Miri, which finds undefined behaviour: what does not call the library"
  if cargo +nightly miri --version >/dev/null 2>&1; then
    CARGO_TARGET_DIR=$work/miri cargo +nightly miri test --quiet --locked -p mha --lib
  else
    echo "not tested, for there is no Miri: rustup toolchain install nightly --component miri,rust-src"
  fi
fi

begin "the example"
# With a library that lies where those of a system do, which the crate pkg-config would link as a shared one.
"${found[@]}" "SYSROOT=$work/prefix" cargo run --quiet --locked -p mha --example generate

begin "the example, with the shared library in MHA_LIB_DIR"
# Which cargo has to find when it runs the program, too.
shared=$(find "$work/prefix" -name "libmha.so" -o -name "libmha.dylib")
if [[ -n $shared ]]; then
  env -u LD_LIBRARY_PATH "MHA_LIB_DIR=$(dirname "$shared")" cargo run --quiet --locked -p mha --example generate
else
  echo "not tested, for $build has no shared library: configure it with -DMHA_SHARED=ON"
fi

begin "cargo doc"
RUSTDOCFLAGS="-D warnings" DOCS_RS=1 cargo doc --quiet --locked --no-deps --all-features -p mha -p mha-sys

begin "mha with Rust $least_for_users"
# Clippy has looked for what is newer in the standard library, but not in the language.
in_least() { "${found[@]}" "CARGO_TARGET_DIR=$work/least" CARGO_NET_OFFLINE=false rustup run "$least_for_users" cargo "$@"; }
if ! in_least --version >/dev/null 2>&1; then
  echo "not tested, for rustup has no Rust $least_for_users: rustup toolchain install --profile minimal $least_for_users"
elif ! in_least fetch --quiet --locked 2>"$work/fetch.log"; then  # that cargo has a store of crates of its own to fill
  cat "$work/fetch.log" >&2
  ! grep -q -e 'lock file' -e manifest "$work/fetch.log" || fail "Rust $least_for_users cannot read Cargo.lock or a Cargo.toml"
  echo "not tested with Rust $least_for_users, for which the crates cannot be fetched, as said above"
else
  in_least check --quiet --locked -p mha --features rayon
fi

test_candle() {
  cd "$root"
  begin "mha-candle: crates to depend on"
  CARGO_NET_OFFLINE=false fetch tools/adapters/candle ||
    { echo "tools/bindings/rust/test.sh: candle cannot be fetched, as said above, so mha-candle alone was not tested" >&2 && exit 3; }
  export CARGO_TARGET_DIR=$work/candle
  cd tools/adapters/candle
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
