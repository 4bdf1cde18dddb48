#!/usr/bin/env bash
# Copies the library's sources into mha-sys. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/rust/vendor.sh [--help]

Copies what mha-sys builds the library from (include/, src/, CMakeLists.txt, LICENSE) into tools/rust/mha-sys/vendor/, anew each time: the
package is to have them, while the repository has them but once. Without it, mha-sys builds from the repository's own tree.

Example:
  tools/rust/vendor.sh && cd tools/rust && cargo package -p mha-sys --allow-dirty
TEXT
}

case ${1-} in
  '') ;;
  --help | -h) usage && exit ;;
  *) echo "tools/rust/vendor.sh: '$1' is not an option; see tools/rust/vendor.sh --help" >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
vendor=tools/rust/mha-sys/vendor
rm -rf "$vendor"
mkdir -p "$vendor"
cp CMakeLists.txt LICENSE "$vendor/"
cp -R include src "$vendor/"
rm -r "$vendor/src/docs" "$vendor/src/openblas" "$vendor/src/pthreadpool" # not part of the library itself
