#!/usr/bin/env bash
# Builds the benchmarks and runs them. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bench.sh [--no-setup] [FLAG OF MHA_BENCH...]

Installs missing packages (tools/setup.sh), builds build/bin/mha_bench, and runs it; mha_bench
--help explains its figures, flags and exit status. Results go to stdout, everything else to stderr.
Any other load on the machine falsifies the results; `taskset -c CORES tools/bench.sh` restricts the
cores. With --benchmark_repetitions=3 the whole set takes about 6 minutes of one core.

  --no-setup      install nothing
  --benchmark_... any flag of Google Benchmark; the defaults here are --benchmark_repetitions=5
                  --benchmark_min_time=0.1 --benchmark_display_aggregates_only=true
                  --benchmark_counters_tabular=true
  --help          show this text

Exit status: that of mha_bench, or 1 if it could not be built.

Examples:
  tools/bench.sh                                                           everything
  tools/bench.sh --benchmark_filter='^layer_prefill/'                      one group
  tools/bench.sh --instruction_set=avx2 --benchmark_filter='^projection'   one group with AVX2 only
  tools/bench.sh --benchmark_format=json >build/result.json                all figures, as JSON
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
setup=yes
flags=()
for argument in "$@"; do
  case $argument in
    --no-setup) setup=no ;;
    --help | -h) usage && exit ;;
    *) flags+=("$argument") ;;
  esac
done

build() {
  local settings=()
  [[ $setup == no ]] || tools/setup.sh || return
  # A new folder is not for the tests; in one that is there already, they stay as they are.
  [[ -e build/CMakeCache.txt ]] || settings=(-G Ninja -DMHA_TESTS=OFF)
  cmake -S . -B build "${settings[@]}" --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release \
    -DMHA_BENCH=ON &&
    cmake --build build --parallel "$(nproc)" --target mha_bench
}
if ! build >&2; then
  echo "tools/bench.sh: the benchmarks could not be built; see above" >&2
  exit 1
fi

exec build/bin/mha_bench --benchmark_repetitions=5 --benchmark_min_time=0.1 \
  --benchmark_display_aggregates_only=true \
  --benchmark_counters_tabular=true "${flags[@]}"
