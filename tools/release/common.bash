# shellcheck shell=bash disable=SC2034  # used by those who source it
# What the scripts of tools/release begin with: they run at the root of a clone, and define usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

output=build/release test=no
for argument in "$@"; do
  case $argument in
    --test) test=yes ;;
    --help | -h) usage && exit ;;
    -*) echo "$0: '$argument' is not an option; see $0 --help" >&2 && exit 2 ;;
    *) output=$argument ;;
  esac
done
mkdir -p "$output"
output=$(realpath "$output")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
header_version() {  # the version that mha.h, read here, defines
  awk '/^#define MHA_VERSION_(MAJOR|MINOR|PATCH) / { printf "%s%s", dot, $3; dot = "." }'
}
version=$(git show HEAD:include/mha.h | header_version)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

# What HEAD has: the same bytes for the same commit.
archive=$output/mha-$version.tar.gz
git archive --format=tar --prefix="mha-$version/" HEAD | gzip -9n >"$archive"
# What README's program prints, for the packages' tests.
awk '/^```text/ { prints = 1; next } /^```/ && prints { exit } prints' README.md >"$work/expected"
