#!/usr/bin/env bash
# Runs the library for a long time as a server would. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/soak.sh [MINUTES]

Builds mha_soak (tests/load/soak.cpp) in build/, which does for MINUTES minutes (30) what a server does, on a thread for each core: sequences come,
with a prompt of their own or behind another one's prefix, grow by one to four tokens in batches, lose drafted tokens and go, in paged caches of
f32, f16, bf16 and int8, with grouped heads, windows and chosen keys. Every tenth result is computed anew, the whole sequence at once without
a cache (where it keeps fewer bits: with an empty one) and compared by memcmp. Blocks are counted. It prints counts and memory every 10 seconds.

Before that it measures the latency of one token of a layer of width 512 behind 500 others, alone and beside prompts on another core; and it
plants a leaked block, wrong block tables and leaked memory for 6 seconds each, which it must find.

Exits with 0 if all is well, with 1 if a result has a wrong bit, a call fails, a block is lost, or the process is at the end more than 1 MiB
larger than after the first minute, with 2 if the arguments are wrong.

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
  ((status == 1)) || { echo "tools/soak.sh: this was not found" >&2 && exit 1; }
done
exec build/bin/mha_soak $((60 * minutes))
