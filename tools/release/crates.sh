#!/usr/bin/env bash
# Packages the Rust crates. See --help.
usage() {
  cat <<'TEXT'
tools/release/crates.sh [--test] [OUTPUT_FOLDER]

Packages the crates mha-sys, mha and mha-candle of a clean clone of HEAD. mha-candle is packaged beside a local registry that has the other two and
what they depend on. Needs cargo 1.90 or newer, and crates.io for what is not in cargo's cache. The files are the same bytes wherever they are made.

  OUTPUT_FOLDER  default: build/release
  --test         also build, offline and from that registry alone, a program that depends on mha and one that depends on mha-candle, each in an empty
                 folder, and compare what they compute; and see that what is missing is said in a sentence. Takes minutes.
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
  { echo "tools/release/crates.sh: cargo 1.90 or newer is needed, and there is ${cargo:-none}; see https://rustup.rs" >&2 && exit 3; }
unset MHA_LIB_DIR MHA_INCLUDE_DIR MHA_STATIC MHA_XSIMD_INCLUDE_DIR DOCS_RS CARGO_NET_OFFLINE
export CARGO_TARGET_DIR=$work/target MHA_NO_PKG_CONFIG=1
git clone --quiet . "$work/clone"
rust=$work/clone/tools/bindings/rust candle=$work/clone/tools/adapters/candle registry=$work/registry

# The programs of --test are what builds the packages: cargo's own check would build each once more.
package() {  # ARGUMENT...
  cargo package --locked --no-verify "$@" 2>&1 | tee "$work/log" || exit
  # Not what cargo says of its own records in the user's folder, where another cargo that runs may be writing.
  ! grep '^warning' "$work/log" | grep -q -v -e 'last-use data' -e 'auto-clean cache data' || fail "cargo package warns; see above"
}
package --manifest-path "$rust/Cargo.toml" --workspace --exclude systest
cargo vendor --quiet --locked --versioned-dirs --manifest-path "$candle/Cargo.toml" --sync "$rust/Cargo.toml" "$registry" >/dev/null
publish() {  # CRATE
  local file=$CARGO_TARGET_DIR/package/$1-$version.crate
  tar -C "$registry" -xzf "$file"
  printf '{"files":{},"package":"%s"}\n' "$(sha256sum "$file" | cut -d ' ' -f 1)" >"$registry/$1-$version/.cargo-checksum.json"
  cp "$file" "$output/"
}
publish mha-sys
publish mha
for part in include src/kernels; do
  diff -r "$work/clone/$part" "$registry/mha-sys-$version/vendor/$part" || fail "the package of mha-sys has another $part, as shown above"
done
printf '[source.crates-io]\nreplace-with = "release"\n[source.release]\ndirectory = "%s"\n' "$registry" >"$work/offline.toml"
package --config "$work/offline.toml" --offline --manifest-path "$candle/Cargo.toml"
publish mha-candle
[[ $test == yes ]] || exit 0

# What is missing is said in a sentence.
says() {  # SENTENCE COMMAND...
  ! "${@:2}" >"$work/log" 2>&1 || fail "this succeeds: ${*:2}"
  grep -qF "$1" "$work/log" || { cat "$work/log" >&2 && fail "no sentence '$1' above, from ${*:2}"; }
}
git clone --quiet --config core.symlinks=false . "$work/without_links"
says "type: git config core.symlinks true" cargo package --quiet --manifest-path "$work/without_links/tools/bindings/rust/mha-sys/Cargo.toml"

# A program in an empty folder, of standard input.
program() {  # CRATE DEPENDENCY...
  mkdir -p "$work/with_$1/src" "$work/with_$1/.cargo"
  cd "$work/with_$1"
  cp "$work/offline.toml" .cargo/config.toml
  printf '[package]\nname = "program"\nedition = "2021"\n\n[dependencies]\n%s = "%s"\n' "$1" "${version%.*}" >Cargo.toml
  printf '%s\n' "${@:2}" >>Cargo.toml
  cat >src/main.rs
}
run() {  # EXPECTED
  local said
  said=$(cargo run --quiet --offline)
  echo "${PWD##*/}: $said"
  [[ $said == "$1" ]] || fail "${PWD##*/} should print: $1"
}
# The first program of the crate's documentation, where what begins with # is not shown.
awk '/^```rust/ { inside = 1; next } inside && /^```/ { exit } inside' "$registry/mha-$version/README.md" | sed 's/^# //' | program mha
cd "$work/with_mha"
build=(cargo build --quiet --offline)
printf 'set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)\nset(CMAKE_FIND_ROOT_PATH /nowhere)\n' >no_xsimd.cmake
says "On Debian: apt-get install libxsimd-dev" env "CMAKE_TOOLCHAIN_FILE=$PWD/no_xsimd.cmake" "CARGO_TARGET_DIR=$work/missing" "${build[@]}"
says "building mha needs CMake" env CMAKE=/nowhere/cmake "${build[@]}"
says "MHA_LIB_DIR is /nowhere, where there is no libmha.so" env MHA_LIB_DIR=/nowhere "${build[@]}"
run "y[3] =  0.1602 -0.2338 ..."

# Equal keys: every weight is the same, and the result is the mean of the values 0, 1, 2 and 3.
program mha-candle 'candle-core = { version = "0.11", default-features = false }' <<'RUST'
use candle_core::{DType, Device, Result, Tensor};

fn main() -> Result<()> {
    let ones = Tensor::ones((1, 1, 4, 8), DType::F32, &Device::Cpu)?;
    let values = Tensor::arange(0f32, 4., &Device::Cpu)?.reshape((1, 1, 4, 1))?.repeat((1, 1, 1, 8))?;
    let y = mha_candle::sdpa(&ones, &ones, &values, None, false, 1., 1.)?;
    println!("{:?}", y.flatten_all()?.to_vec1::<f32>()?[24..].to_vec());
    Ok(())
}
RUST
cd "$work/with_mha-candle"
run "[1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]"
