#!/usr/bin/env bash
# Runs the library for a long time as a server would. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/soak.sh [MINUTES]

Builds mha_soak (tests/load/soak.cpp) in build/ and runs it for MINUTES minutes (default: 30). It
behaves like a server with a thread per core: sequences arrive, grow, lose drafted tokens and leave,
in paged caches of several types. It recomputes every tenth result without a cache and compares with
memcmp, and prints counts of blocks and the memory every 10 seconds. Before that, it plants
faults for 6 seconds each, which it must find.

Exit status: 0 success; 1 a result has a wrong bit, a call failed, a block was lost, or the process
grew by more than 1 MiB after the first minute; 2 wrong arguments.

Examples:
  tools/soak.sh
  tools/soak.sh 3
TEXT
}

[[ ${1-} != --help && ${1-} != -h ]] || { usage && exit; }
minutes=${1-30}
[[ $# -le 1 && $minutes =~ ^[1-9][0-9]*$ ]] ||
  { echo "tools/soak.sh: '$*' is not a number of minutes; see tools/soak.sh --help" >&2 && exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -e build/CMakeCache.txt ]] || cmake -S . -B build -G Ninja --log-level=NOTICE \
  -DCMAKE_BUILD_TYPE=Release
cmake --build build --target mha_soak
for plant in block table memory; do
  status=0
  said=$(build/bin/mha_soak 6 "$plant" 2>&1 >/dev/null) || status=$?
  echo "planted in $plant: $said"
  ((status == 1)) || { echo "tools/soak.sh: the planted fault was not found" >&2 && exit 1; }
done
exec build/bin/mha_soak $((60 * minutes))
