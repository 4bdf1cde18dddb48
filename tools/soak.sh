#!/usr/bin/env bash
# Runs the library for a long time as a server would. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/soak.sh [MINUTES]

Builds mha_soak (tests/load/soak.cpp) in build/ and runs it for MINUTES minutes (default: 30). It
behaves like a server, with a thread per core: sequences arrive with a new prompt or after the
prefix of another one, grow by one to four tokens in batches, lose drafted tokens, and leave. They
are in paged caches of f32, f16, bf16 and int8, with grouped heads, windows and chosen keys. It
recomputes every tenth result, the whole sequence at once without a cache (where the cache has fewer
bits: with an empty one), and compares with memcmp. It counts blocks, and prints counts and memory
every 10 seconds.

Before that, it plants a leaked block, wrong block tables and leaked memory for 6 seconds each,
which it must find.

Exit status: 0 success; 1 a result has a wrong bit, a call failed, a block was lost, or the process
ended more than 1 MiB larger than it was after the first minute; 2 wrong arguments.

Examples:
  tools/soak.sh
  tools/soak.sh 3
TEXT
}

[[ ${1-} != --help && ${1-} != -h ]] || { usage && exit; }
minutes=${1-30}
[[ $# -le 1 && $minutes =~ ^[1-9][0-9]*$ ]] || { echo "tools/soak.sh: '$*' is not a number of minutes; see tools/soak.sh --help" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -e build/CMakeCache.txt ]] || cmake -S . -B build -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release
cmake --build build --target mha_soak
for plant in block table memory; do
  status=0
  said=$(build/bin/mha_soak 6 "$plant" 2>&1 >/dev/null) || status=$?
  echo "planted in $plant: $said"
  ((status == 1)) || { echo "tools/soak.sh: the planted fault was not found" >&2 && exit 1; }
done
exec build/bin/mha_soak $((60 * minutes))
