#!/usr/bin/env bash
# Fills in the recipes of package managers that build from source. See --help.
usage() {
  cat <<'TEXT'
tools/release/recipes.sh [--test] [OUTPUT_FOLDER]

Writes the source archive mha-VERSION.tar.gz, and into OUTPUT_FOLDER/recipes the port of vcpkg, the
recipe of Conan, the formula of Homebrew and the lines for CMake's FetchContent, with its URL and
checksum.

  OUTPUT_FOLDER     default: build/release
  MHA_URL           the URL of the archive's folder; default: the output folder, as a file: URL
  MHA_HOMEPAGE      the project's page; default: MHA_URL
  --test            also check the port's JSON and the formula's Ruby, and run README's program with
                    the library that FetchContent and Conan (static and shared) build
  --help            this text

Examples:
  tools/release/recipes.sh --test
  MHA_URL=https://example.org/mha tools/release/recipes.sh /tmp/release
TEXT
}
# shellcheck source=tools/release/common.bash
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

render() {  # FOLDER URL
  rm -rf "$1"
  mkdir "$1"
  cp -r tools/release/{vcpkg,conan,homebrew} "$1"
  cp tests/examples/minimal.c "$1/conan/test_package"
  cat >"$1/fetch_content.cmake" <<'TEXT'
include(FetchContent)
FetchContent_Declare(mha URL @URL@ URL_HASH SHA256=@SHA256@)
FetchContent_MakeAvailable(mha)
TEXT
  find "$1" -type f -exec sed -i "s|@VERSION@|$version|; s|@HOMEPAGE@|${MHA_HOMEPAGE:-$2}|
    s|@URL@|$2/${archive##*/}|
    s|@SHA256@|$(sha256sum "$archive" | cut -d ' ' -f 1)|
    s|@SHA512@|$(sha512sum "$archive" | cut -d ' ' -f 1)|" {} +
}
render "$output/recipes" "${MHA_URL:-file://$output}"
[[ $test == yes ]] || exit 0
command -v ruby >/dev/null || { echo \
  "tools/release/recipes.sh --test needs the package ruby: tools/setup.sh --release" >&2 &&
  exit 3; }

recipes=$work/recipes
render "$recipes" "file://$output"
ruby -wc "$recipes/homebrew/mha.rb"
python3 - "$recipes/vcpkg/vcpkg.json" <<'TEXT'
import json, sys
port = json.load(open(sys.argv[1]))
assert set(port) == {"name", "version", "description", "homepage", "license", "dependencies"}, port
for one in port["dependencies"]:
    assert isinstance(one, str) or set(one) == {"name", "host"}, port
TEXT

say() { echo "README's program, by $1: the output that README has"; }
mkdir "$work/fetch"
cp tests/examples/minimal.c "$work/fetch"
{ printf 'cmake_minimum_required(VERSION 3.22)\nproject(fetch LANGUAGES C CXX)\n' &&
  cat "$recipes/fetch_content.cmake" &&
    printf 'add_executable(minimal minimal.c)\ntarget_link_libraries(minimal PRIVATE mha::mha)\n'; \
    } >"$work/fetch/CMakeLists.txt"
cmake -S "$work/fetch" -B "$work/fetch/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  --log-level=NOTICE -Wno-dev >/dev/null
cmake --build "$work/fetch/build" >/dev/null
"$work/fetch/build/minimal" | diff - "$work/expected"
say FetchContent

conan=${XDG_CACHE_HOME:-$HOME/.cache}/mha-release/conan
[[ -x $conan/bin/conan ]] || { python3 -m venv "$conan" &&
  "$conan/bin/pip" install --quiet conan; } ||
  { echo "tools/release/recipes.sh: Conan cannot be installed from PyPI; what was said is above" \
  >&2 && exit 1; }
export CONAN_HOME=$work/conan
"$conan/bin/conan" profile detect >"$work/log" 2>&1 || { cat "$work/log" >&2 && exit 1; }
# In place of Conan's own package of xsimd, which comes from where no test should go: one of the
# headers that are installed here.
mkdir "$work/xsimd"
cat >"$work/xsimd/conanfile.py" <<'TEXT'
from conan import ConanFile
from conan.tools.files import copy


class Xsimd(ConanFile):
    name = "xsimd"
    version = "8.1.0"
    package_type = "header-library"

    def package(self):
        copy(self, "xsimd/*", "/usr/include", f"{self.package_folder}/include")
TEXT
"$conan/bin/conan" create -verror "$work/xsimd"
for shared in False True; do
  "$conan/bin/conan" create "$recipes/conan" --no-remote -o "mha/*:shared=$shared" >"$work/log" \
    2>&1 || { cat "$work/log" >&2 && exit 1; }
  grep '^y\[' "$work/log" | diff - "$work/expected"
  say "Conan, shared=$shared"
done
