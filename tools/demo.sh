#!/usr/bin/env bash
# Shows mha: a small layer step by step, heat maps, and the speed of a layer of GPT-2's size. See
# --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/demo.sh [--no-setup]

Installs missing packages, builds what it needs in build/, and shows three things: a small layer
step by step (mha explain); heat maps of what heads attend to in a sentence (build/explained.html);
and the speed of a layer of GPT-2's size against the limit of this machine.

  --no-setup   install nothing
  --help       show this text

Exit status: 0 if everything was shown; 1 otherwise.

Example:
  tools/demo.sh
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
setup=yes
for argument in "$@"; do
  case $argument in
    --no-setup) setup=no ;;
    --help | -h) usage && exit ;;
    *) echo "tools/demo.sh: '$argument' is not an option; see tools/demo.sh --help" >&2 && exit 2 ;;
  esac
done

say() { printf '\n== %s\n' "$*"; }
show() { printf '$ %s\n' "$*" && "$@"; }

[[ $setup == no ]] || tools/setup.sh

say "Building the library and the benchmarks in build/"
generator=()
[[ -e build/CMakeCache.txt ]] || generator=(-G Ninja)
cmake -S . -B build "${generator[@]}" --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DMHA_BENCH=ON \
  -DMHA_SHARED=ON
cmake --build build --parallel "$(nproc)" --target mha_shared mha_bench

say "Python packages for the next steps, in build/python: numpy, matplotlib (once)"
explained=yes
if [[ $setup == yes ]]; then tools/bindings/python/setup.sh --explain || explained=no; fi
python=build/python/bin/python
[[ -x $python ]] || python=python3
"$python" -c 'import numpy, matplotlib' 2>/dev/null || explained=no
[[ $explained == yes ]] || echo \
  "The packages are missing, so the small layer and the heat maps are not shown. Can this machine \
reach PyPI?"

files=$(mktemp -d)
trap 'rm -rf "$files"' EXIT
if [[ $explained == yes ]]; then
  "$python" tools/demo_files.py "$files"
  export PYTHONPATH=tools/bindings/python
  say "A small layer, step by step"
  show "$python" -m mha explain
  say "What six hand-made heads attend to in a sentence: open build/explained.html in a browser"
  show "$python" -m mha pack --weights "$files/sentence.safetensors" --heads 6 --causal --output \
    "$files/sentence.mha"
  show "$python" -m mha explain --packed "$files/sentence.mha" --input "$files/sentence.npy" \
    --html build/explained.html \
    --tokens "$(cat "$files/sentence.txt")"
fi

say "A layer of GPT-2's size (1024 tokens of width 768, 12 heads, causal), repeatedly on one thread"
bench=(build/bin/mha_bench '--benchmark_filter=^layer_prefill/B:1/n:1024/D:768/H:12($|/)')
printf '$ %s %s\n' "${bench[0]}" "'${bench[1]}'"
"${bench[@]}" --benchmark_out="$files/bench.json" --benchmark_out_format=json >"$files/log" 2>&1 ||
  { cat "$files/log" >&2 && exit 1; }
python3 - "$files/bench.json" <<'PYTHON'
import json, sys
text = open(sys.argv[1]).read()  # empty if no benchmark has the name
found = json.loads(text or '{"benchmarks": []}')["benchmarks"]
results = [result for result in found if "of_limit" in result]
if not results:
    sys.exit("tools/demo.sh: mha_bench measured nothing named layer_prefill/B:1/n:1024/D:768/H:12")
best = max(results, key=lambda result: result["of_limit"])
milliseconds = best["cpu_time"] * {"ns": 1e-6, "us": 1e-3, "ms": 1, "s": 1e3}[best["time_unit"]]
print(f"From x to y the layer took {milliseconds:.1f} ms of one core,"
      f" {best['of_limit']:.0%} of what the machine can do.")
PYTHON
[[ $explained == yes ]] || { echo \
  "tools/demo.sh: the small layer and the heat maps were not shown; see above" >&2 && exit 1; }
