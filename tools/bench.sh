#!/usr/bin/env bash
# Builds the benchmarks and runs them. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bench.sh [--no-setup] [--instruction_set=NAME] [Google Benchmark flags]

Installs missing packages (tools/setup.sh), builds build/bin/mha_bench, and runs it. It reports the
speed of mha as a fraction of what this machine can do (of_limit), measured right before and right
after each run. Results go to stdout in the requested format, and everything else to stderr.
Single-threaded benchmarks run on the last core, those of the group threads on every core; `taskset
-c CORES tools/bench.sh` restricts both. With --benchmark_repetitions=3, the whole set takes about 6
minutes of processor time (measured on one AVX-512 core, and so without threads on several).
Decoding cycles through more memory than the largest cache holds, up to a quarter of the available
memory; --max_rotated_mb=1000 limits that. Any other load on the machine falsifies the results.

  --no-setup               install nothing
  --instruction_set=NAME   the instruction set that the library uses: auto (the best; default),
                           scalar, avx2, avx2_vnni, avx512, avx512_vnni, neon, neon_dotprod or
                           neon_i8mm
  --benchmark_...          any Google Benchmark flag; the defaults here are
                           --benchmark_repetitions=5 --benchmark_min_time=0.1
                           --benchmark_display_aggregates_only=true
                           --benchmark_counters_tabular=true
  --help                   show this text; `build/bin/mha_bench --help` explains the figures and
                           all flags

A benchmark keeps its arrays across repetitions and measures its limit with each of them, so
--benchmark_enable_random_interleaving, which would rebuild the arrays each time, gains nothing.

Exit status: 0 everything was measured; 1 the benchmarks could not be built; 2 wrong flags, or a
filter that matches no benchmark; 3 some runs were void (above 1.03 of the limit, which is then
wrong); 4 something could not be measured.

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
  cmake -S . -B build "${settings[@]}" --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DMHA_BENCH=ON &&
    cmake --build build --parallel "$(nproc)" --target mha_bench
}
if ! build >&2; then
  echo "tools/bench.sh: the benchmarks could not be built; see above" >&2
  exit 1
fi

exec build/bin/mha_bench --benchmark_repetitions=5 --benchmark_min_time=0.1 --benchmark_display_aggregates_only=true \
  --benchmark_counters_tabular=true "${flags[@]}"
