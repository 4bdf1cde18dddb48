#!/usr/bin/env bash
# Builds the site of the pages. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/site/build.sh [--test] [FOLDER]

Builds the site in FOLDER (build/site): the first page and the attention maps of tools/site/pages, the pages of the tree, and Doxygen's reference.
A warning is an error. Builds the shared library and the reference in build/, and puts MkDocs and its theme into build/site_tools (PyPI).

  --test   then looks at the site in Chromium (Debian: chromium) and runs the programs of the first page, by tools/site/test.py
  --help   this text

Exits with 0 if the site is there, with 1 if something is wrong with it, with 2 for wrong usage, with 3 if a tool is missing.

Examples:
  tools/site/build.sh
  tools/site/build.sh --test
  python3 -m http.server --directory build/site    to look at it
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder='' test=no
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    --test) test=yes ;;
    -*) echo "tools/site/build.sh: '$argument' is not an option; see tools/site/build.sh --help" >&2 && exit 2 ;;
    *)
      [[ -z $folder ]] || { echo "tools/site/build.sh takes one FOLDER; see tools/site/build.sh --help" >&2 && exit 2; }
      folder=$(realpath "$argument")
      ;;
  esac
done
folder=${folder:-$PWD/build/site}
lacks() { echo "tools/site/build.sh: $*" >&2 && exit 3; }
command -v doxygen >/dev/null || lacks "there is no doxygen (Debian: apt-get install doxygen)"

tools=build/site_tools
[[ -x $tools/bin/pip ]] || python3 -m venv "$tools" || lacks "python3 makes no virtual environment (Debian: apt-get install python3-venv)"
"$tools/bin/pip" install --quiet --disable-pip-version-check mkdocs-material==9.8.2 numpy playwright==1.65.2 ||
  lacks "PyPI has not given what the site is made with; what pip said is above"

generator=()
[[ -e build/CMakeCache.txt ]] || generator=(-G Ninja)
cmake -S . -B build "${generator[@]}" --log-level=NOTICE -DMHA_SHARED=ON
cmake --build build --parallel --target mha_shared doc
export MHA_SITE_API=$PWD/build/doc/html PYTHONDONTWRITEBYTECODE=1 NO_MKDOCS_2_WARNING=1
"$tools/bin/mkdocs" --quiet build --strict --config-file tools/site/mkdocs.yml --site-dir "$folder"
[[ $test == no ]] || "$tools/bin/python" tools/site/test.py "$folder"
