#!/usr/bin/env bash
# Builds the site. See --help.
set -euo pipefail

case ${1-} in
  --help | -h)
    cat <<'TEXT'
tools/site/build.sh [FOLDER]

Builds the site in FOLDER (build/site) by MkDocs: the pages of the tree, the sources that they link
to, and the headers. A dead link is an error. MkDocs and its theme come from PyPI, into
build/site_tools.

Exit codes: 0 the site is built; 1 a page has an error; 2 wrong arguments; 3 MkDocs is missing.

Examples:
  tools/site/build.sh
  python3 -m http.server --directory build/site    to look at it
TEXT
    exit ;;
  -*) echo "tools/site/build.sh: '$1' is not an option; see tools/site/build.sh --help" >&2 &&
    exit 2 ;;
esac
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../../build/site}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
lacks() { echo "tools/site/build.sh: $*" >&2 && exit 3; }
tools=build/site_tools pages=build/site_pages
[[ -x $tools/bin/pip ]] || python3 -m venv "$tools" ||
  lacks "python3 makes no virtual environment (Debian: apt-get install python3-venv)"
"$tools/bin/pip" install --quiet --disable-pip-version-check mkdocs-material==9.8.2 ||
  lacks "pip cannot install MkDocs; see above"

rm -rf "$pages"
mkdir -p "$pages"
git ls-files -z LICENSE '*.md' '*.csv' '*.png' '*.h' '*.c' '*.cpp' '*.py' '*.rs' '*.patch' |
  xargs -0 cp --parents -t "$pages"
for header in mha mha_options mha_extra mha_recurrent; do  # as pages
  { printf '# %s.h\n\n~~~~c\n' "$header" && cat "include/$header.h" &&
    echo '~~~~'; } >"$pages/$header.md"
done
NO_MKDOCS_2_WARNING=1 "$tools/bin/mkdocs" --quiet build --strict --config-file \
  tools/site/mkdocs.yml --site-dir "$folder"
