#!/usr/bin/env bash
# Makes everything that a release consists of. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/release.sh VERSION [--check | --once] [--sign KEY] [OUTPUT_FOLDER]

Checks that HEAD can be released as VERSION: it has the tag vVERSION; nothing is uncommitted; mha.h,
the crates and CHANGELOG.md (with a date) have VERSION; files written by VERSION are stored for
later versions to read (tests/interface/packed_files.txt); and programs compiled against the
previous version still run, according to the declarations (tests/package/abi.py) and to abidiff.
Then runs each script in tools/release with --test, and again in another folder, where the files
must have the same bytes. Adds the list of what the libraries contain (SPDX), SHA256SUMS and a
signature. Uploads nothing, but prints how to. Requires what tools/setup.sh --all --release
installs.

  --check        run only the checks
  --once         do not build a second time for comparison
  --sign KEY     sign SHA256SUMS with this private SSH key
  OUTPUT_FOLDER  a new folder (default: build/release-VERSION)
  --help         show this text

Example:
  git tag v0.1.0
  tools/release.sh 0.1.0 --sign ~/.ssh/id_ed25519
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
version='' output='' key='' builds=2
while (($#)); do
  case $1 in
    --check) builds=0 ;;
    --once) builds=1 ;;
    --sign) key=${2:?a key is missing after --sign} && shift ;;
    --help | -h) usage && exit ;;
    -*) echo "tools/release.sh: '$1' is not an option; see tools/release.sh --help" >&2 && exit 2 ;;
    *) if [[ -z $version ]]; then version=$1; else output=$1; fi ;;
  esac
  shift
done
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
  { echo "tools/release.sh: give a version such as 0.1.0; see tools/release.sh --help" >&2 &&
  exit 2; }

# ---- Checks

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wrong=0
refuse() { echo "tools/release.sh: $*" >&2 && wrong=1; }

tagged=$(git rev-parse --quiet --verify "refs/tags/v$version^{commit}" || true)
if [[ -z $tagged ]]; then
  refuse "there is no tag v$version; create it at the commit where CHANGELOG.md has the date: git \
tag v$version"
elif [[ $tagged != $(git rev-parse HEAD) ]]; then
  refuse "HEAD is not v$version; check it out: git checkout v$version"
fi
[[ -z $key || -r $key ]] || refuse "the key $key cannot be read"
[[ -z $(git status --porcelain) ]] ||
  refuse "there are uncommitted changes: $(git status --porcelain | head -n 3)"

says() {  # WHERE VERSION
  [[ $2 == "$version" ]] || refuse "$1 says version ${2:-nothing}, not $version"
}
# Of CMake and Python, the version comes from the header.
says include/mha.h "$(
  awk '/^#define MHA_VERSION_(MAJOR|MINOR|PATCH) / { printf "%s%s", dot, $3; dot = "." }' \
    include/mha.h
)"
while IFS=: read -r file line; do
  says "$file" "$(grep -o '[0-9][0-9.]*' <<<"$line" | head -n 1)"
done < <(git grep -E '^(version|mha|mha-sys) = .*"[0-9]' -- 'tools/bindings/rust/*Cargo.toml' \
  tools/adapters/candle/Cargo.toml)
grep -qE "^## ${version//./\\.} \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md ||
  refuse "CHANGELOG.md has no heading '## $version (YEAR-MONTH-DAY)'"

grep -q "^${version//./\\.} " tests/interface/packed_files.txt ||
  refuse "tests/interface/packed_files.txt has nothing written by $version; add it: \
build/bin/mha_test_packed_files --write"

previous=$(git describe --tags --abbrev=0 --match 'v*' HEAD^ 2>/dev/null || true)
python3 tests/package/abi.py check ||
  refuse "tests/package/interface.txt does not match this header"
if [[ -n $previous ]]; then
  git show "$previous:tests/package/interface.txt" >"$work/interface.txt"
  python3 tests/package/abi.py keeps --written "$work/interface.txt" ||
    refuse "the header breaks programs that were compiled with $previous"
fi
((wrong == 0)) || exit 1

# The kernels are no part of the interface, so those of plain C++ do.
for_abidiff() {  # REVISION
  mkdir "$work/$1"
  git archive "$1" | tar -C "$work/$1" -x
  cmake -S "$work/$1" -B "$work/$1/build" -DCMAKE_BUILD_TYPE=MinSizeRel -DCMAKE_C_FLAGS=-g \
    -DCMAKE_CXX_FLAGS=-g -DMHA_STATIC=OFF -DMHA_{OPENBLAS,PTHREADPOOL,TOOLS,TESTS}=OFF \
    "$([[ $(uname -m) == aarch64 ]] && echo -DMHA_NEON=OFF || echo -DMHA_AVX2=OFF)" \
    -DMHA_AVX512=OFF >"$work/log"
  cmake --build "$work/$1/build" --parallel "$(nproc)" >"$work/log"
}
if [[ -n $previous ]]; then
  for_abidiff "$previous"
  for_abidiff "v$version"
  status=0
  abidiff --headers-dir1 "$work/$previous/include" --headers-dir2 "$work/v$version/include" \
    "$work"/{"$previous","v$version"}/build/src/libmha.so || status=$?
  # Bits of the status: 1 and 2 are errors, 4 is a change, 8 one that breaks programs.
  (((status & ~4) == 0)) || { echo \
    "tools/release.sh: abidiff finds that programs linked with $previous would break; see above" \
    >&2 && exit 1; }
fi
echo "v$version can be released${previous:+ after $previous}"
((builds)) || exit 0

# ---- Everything that is published

output=$(realpath -m "${output:-build/release-$version}")
[[ ! -e $output ]] || { echo "tools/release.sh: $output already exists; choose a new folder" >&2 &&
  exit 1; }
mkdir -p "$output"
export SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
xsimd=$(dirname "$(echo '#include <xsimd/xsimd.hpp>' | c++ -E -x c++ - | grep -o \
  '/[^"]*/xsimd/xsimd.hpp' | head -n 1)")/..
build() {  # CLONE OUTPUT ARGUMENT...
  git clone --quiet . "$1"
  local script
  for script in "$1"/tools/release/*.sh; do
    echo "== ${script##*/} (${SECONDS} s so far)"
    "$script" "${@:3}" "$2"
  done
  cmake -D file="$2/mha-$version.spdx.json" -D source="$1" -D version="$version" -D xsimd="$xsimd" \
    -D parts=command -P src/cmake/sbom.cmake
}
build "$work/one" "$output" --test
if ((builds == 2)); then
  build "$work/another/place" "$work/again"
  diff -r "$output" "$work/again" || { echo \
    "tools/release.sh: the second build, in another folder, has other bytes; see above" >&2 &&
    exit 1; }
  echo "== two builds in different folders have the same bytes"
fi
(cd "$output" && find . -type f | sort | xargs sha256sum >"$work/SHA256SUMS" && mv \
  "$work/SHA256SUMS" .)
[[ -z $key ]] || ssh-keygen -Y sign -f "$key" -n file "$output/SHA256SUMS"

du -b "$output"/*
cat <<TEXT

$output contains version $version. Nothing was uploaded. To publish it:
  git push origin v$version
  twine upload $output/*.whl $output/sdist/*
  (cd tools/bindings/rust && cargo publish -p mha-sys && cargo publish -p mha) &&
    (cd tools/adapters/candle && cargo publish)
  copy $output, with SHA256SUMS and its signature, to where people download it
TEXT
