#!/usr/bin/env bash
# Tests the crate mha-candle. See --help.
set -euo pipefail

case ${1-} in
  '') ;;
  --help | -h)
    cat <<'TEXT'
tools/adapters/candle/test.sh [--help]

Tests mha-candle with candle and candle-transformers: format, clippy, tests, documentation. It links
the static library of the build folder MHA_BUILD (default: build), or builds one if there is none.
Candle takes 2 GB in build-rust/candle, and minutes to compile the first time.

Exit codes: 0 all tests pass; 1 a test fails; 2 wrong arguments; 3 nothing was tested, because cargo
is missing, or candle cannot be fetched.

Examples:
  tools/adapters/candle/test.sh
TEXT
    exit ;;
  *) echo "tools/adapters/candle/test.sh takes no argument '$1'; see tools/adapters/candle/test.sh \
--help" >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export CARGO_TARGET_DIR=$PWD/build-rust/candle
library=$(realpath "${MHA_BUILD-build}")/src
[[ ! -e $library/libmha.a ]] || export MHA_LIB_DIR=$library MHA_STATIC=1
cd tools/adapters/candle
cargo fetch --quiet --locked --target "$(rustc -vV | sed -n 's/^host: //p')" ||
  { echo "tools/adapters/candle/test.sh: nothing was tested; what cargo said is above" >&2 &&
  exit 3; }
export CARGO_NET_OFFLINE=true
cargo fmt --check
cargo clippy --quiet --locked --all-targets --all-features -- -D warnings
cargo test --quiet --locked --all-features
RUSTDOCFLAGS="-D warnings" DOCS_RS=1 cargo doc --quiet --locked --no-deps --all-features
