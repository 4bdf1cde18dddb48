#!/usr/bin/env bash
# Checks the form of the sources and of the workflows. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/lint.sh [--base REVISION]

Runs the checks of .pre-commit-config.yaml on all files (clang-format only on what changed since
REVISION, or since HEAD) and actionlint on the workflows, and checks that the issue forms are valid
and ask for the shape and the output of `mha info`. Installs pre-commit and ruff from PyPI in
build/lint/, and actionlint with go if it is missing; clang-format, rustfmt, shellcheck and a recent
go must be installed (Debian 12: clang-format rustfmt-web shellcheck).

  --base REVISION   run clang-format on what changed since the merge base of REVISION and HEAD
  --help            show this text

Exit status: 0 all checks pass; 1 a check fails; 2 wrong usage; 3 a tool is missing.

Examples:
  tools/lint.sh
  tools/lint.sh --base origin/main     what CI runs for a pull request
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=HEAD
case ${1-} in
  '') ;;
  --help | -h) usage && exit ;;
  --base) base=${2:?tools/lint.sh: --base needs a revision} ;;
  *) echo "tools/lint.sh: '$1' is not an option; see tools/lint.sh --help" >&2 && exit 2 ;;
esac
lacks() { echo "tools/lint.sh: $1 is missing ($2)" >&2 && exit 3; }

folder=$PWD/build/lint
export PATH=$folder/bin:$PATH
for tool in clang-format shellcheck; do command -v $tool >/dev/null ||
  lacks $tool "Debian: apt-get install $tool"; done
cargo fmt --version >/dev/null 2>&1 || lacks rustfmt "Debian: apt-get install rustfmt-web"
[[ -x $folder/bin/pip ]] || python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check ruff==0.17.6 pre-commit==4.7.0 ||
  lacks ruff "PyPI: pip install ruff pre-commit"
[[ $(actionlint -version 2>/dev/null) =~ ^v?1\.7\.12 ]] ||
  GOBIN=$folder/bin go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 ||
  lacks actionlint "with go: go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"

status=0
PRE_COMMIT_FROM_REF=$(git merge-base HEAD "$base") pre-commit run --all-files \
  --show-diff-on-failure || status=1
actionlint || status=1
"$folder/bin/python" - .github/ISSUE_TEMPLATE/*.yml <<'PYTHON' || status=1
import sys, yaml
for path in sys.argv[1:]:
    asked = [field["id"] for field in yaml.safe_load(open(path))["body"]]
    if len(set(asked)) < len(asked) or not {"shape", "info"} <= set(asked):
        sys.exit(f"{path}: a form must ask for each thing once, including shape and info; this one"
                 f" asks for {asked}")
PYTHON
exit $status
