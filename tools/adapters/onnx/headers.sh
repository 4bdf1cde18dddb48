#!/usr/bin/env bash
# Puts ONNX Runtime's headers where the build looks for them. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/adapters/onnx/headers.sh [FOLDER]

Puts the headers of ONNX Runtime 1.21 into FOLDER/include (build/onnxruntime, where the build looks
for them), unless they are there or Debian's libonnxruntime-dev is installed. apt-get downloads that
package of Debian 13, also on Debian 12, and installs nothing.

Exit status: 0 the headers are there; 1 they could not be downloaded; 2 wrong usage.

Example:
  tools/adapters/onnx/headers.sh && cmake -S . -B build && cmake --build build --target mha_onnx
TEXT
}

folder=
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    -*) echo "tools/adapters/onnx/headers.sh: '$argument' is not an option; see \
tools/adapters/onnx/headers.sh --help" >&2 && exit 2 ;;
    *) [[ -z $folder ]] || { echo \
      "tools/adapters/onnx/headers.sh takes one FOLDER; see tools/adapters/onnx/headers.sh --help" \
      >&2 && exit 2; }
      folder=$argument ;;
  esac
done
folder=${folder:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/build/onnxruntime}
[[ $folder == /* ]] || folder=$PWD/$folder
[[ ! -e $folder/include/onnxruntime_c_api.h &&
  ! -e /usr/include/onnxruntime/onnxruntime_c_api.h ]] || exit 0
fail() { echo "tools/adapters/onnx/headers.sh: $1" >&2 && exit 1; }

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
  fail "this system has no apt-get; take the headers from a release of ONNX Runtime, \
and configure with -DMHA_ONNXRUNTIME_INCLUDE_DIR=FOLDER"
# The lists that apt has say where Debian's packages come from here.
sites() { apt-get indextargets --format '$(ORIGIN) $(LABEL) $(SITE)' 'Identifier: Packages' \
  2>/dev/null | sed -n 's/^Debian Debian //p'; }
site=$(sites | sort -u | head -n 1) || site=
[[ -n $site ]] || fail "apt knows no packages of Debian; on Debian, run apt-get update first"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work/lists/partial" "$work/keys" "$work/files"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site trixie main" \
  >"$work/sources.list"
apt_get() {
  apt-get --quiet -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$work/lists" \
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Acquire::Languages=none -o \
    APT::Sandbox::User="$(id -un)" \
    -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false "$@" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2 && fail "apt-get $1 fails; what it said is above"; }
}
echo "tools/adapters/onnx/headers.sh: taking ONNX Runtime's headers out of Debian 13's \
libonnxruntime-dev, into $folder/include"
apt_get update
cd "$work/files"
apt_get download libonnxruntime-dev
packages=(libonnxruntime-dev_*.deb)
dpkg-deb --extract "${packages[0]}" "$work/files" ||
  fail "dpkg-deb cannot unpack ${packages[0]}; what it said is above"
mkdir -p "$folder/include"
cp usr/include/onnxruntime/onnxruntime_*.h "$folder/include/"
