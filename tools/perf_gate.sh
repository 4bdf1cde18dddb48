#!/usr/bin/env bash
# Says whether one version of the library is slower than another. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/perf_gate.sh [OPTION...] BASE [NEW]
tools/perf_gate.sh [OPTION...] --floor FILE [NEW]

Says whether NEW is slower than BASE. Each is a git revision of this repository, which is built first, or a libmha.so; without NEW it is the
working tree. Only the C interface is used, of each version as its own mha.h has it, so that any two versions with the same major number can be
compared. The mha.h of a libmha.so is ../include/mha.h beside it, as after installing it, or else that of the working tree.

Measured by time, both are loaded into one process and called in turns, shape by shape in random order, round by round. A shape is slower
if both hold: the median over the rounds of new time / base time is at least 1 + the threshold, and the ranges are apart. A range goes from
a library's fastest round to its median round, for what disturbs a machine only ever adds time. If the median is slower and the ranges are
not apart, or if the 95% interval of the median reaches the threshold and is wider than it, more rounds follow, up to four times as many;
if that does not help, the answer is that it is too noisy to say. One thread is timed by its processor time, several threads by the clock.

By --count, the instructions of one call of each shape are counted by valgrind, which knows AVX2 and not AVX-512. There is no noise.

  --count            count instructions instead of measuring time
  --floor FILE       BASE is the commit that FILE (bench/floor.txt) names for this processor
  --shapes FILE      what is measured, a line each (see below); without it bench/gate/shapes.txt, with --count a list that is built in
  --threshold P      how much slower is a regression: 5% (the default), with --count 1%
  --rounds N         rounds of measurements, at least 7 (default: 15)
  --json FILE        writes all results, with every round's times
  --markdown FILE    appends the table, for a job summary
  --list             only prints the shapes that would be measured
  --build FOLDER     where it builds, and keeps what it built for the next time (default: build/perf_gate)
  --help             this text

Lines of a shapes file, for example:
  layer      B=1 n=128 D=768 H=12 causal            mha_forward: batch, rows, width, heads
  attention  B=1 n=1 n_kv=1024 H=12 head_dim=64     mha_attention: queries and keys
  layer      B=1 n=1 past=1024 D=768 H=12 causal    decoding: one row over a KV cache that holds 1024 positions
Words of a line: B= (1 if not given), n=, D= (layer only), H=, kv_heads= (H=), head_dim= (layer: D/H), n_kv= (attention only; n=),
causal, past= (a KV cache; a layer appends its rows, attention none), kv_type=f32|f16|bf16|int8 (of that cache; f32),
instruction_set=auto|scalar|avx2|avx2_vnni|avx512|avx512_vnni|neon|neon_dotprod|neon_i8mm, threads= (1). '#' begins a comment.
Shapes with past= cannot be measured with a version that has no KV caches yet.

Exit status: 0 no regression, 1 regression, 2 wrong usage, 3 too noisy to say, 4 cannot measure, 5 no floor for this processor.

Examples:
  tools/perf_gate.sh HEAD                                     what was changed since the last commit, by time
  taskset -c 1 tools/perf_gate.sh --threshold 3% main         on one core, against the branch main
  tools/perf_gate.sh --floor bench/floor.txt                  against the fastest version for this processor
  tools/perf_gate.sh --count origin/main                      instructions
  tools/perf_gate.sh old/libmha.so new/libmha.so              two libraries that are there
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

wrong_usage() { echo "perf gate: $*; see tools/perf_gate.sh --help" >&2 && exit 2; }
cannot_measure() { echo "perf gate: cannot measure: $*" >&2 && exit 4; }

build=$root/build/perf_gate
options=()   # of the measuring program
versions=()  # BASE and NEW
is_list=no is_count=no shapes='' floor=''
while (($#)); do
  case $1 in
    --help | -h) usage && exit ;;
    --count) options+=("$1") is_count=yes ;;
    --list) is_list=yes ;;
    --shapes | --threshold | --rounds | --json | --markdown | --build | --floor)
      (($# > 1)) || wrong_usage "$1 needs a value"
      case $1 in
        --build) build=$2 ;;
        --floor) floor=$2 ;;
        --shapes) shapes=$2 ;;
        *) options+=("$1" "$2") ;;
      esac
      shift ;;
    -*) wrong_usage "'$1' is not an option" ;;
    *) versions+=("$1") ;;
  esac
  shift
done

# floor_of FILE: the commit that it names for this processor. A line: kind, vendor, family, models, commit.
floor_of() {
  awk -v processor="$(awk -F '[ \t]*: ' '/^(vendor_id|cpu family|model)[ \t]*:/ { print $2 }' /proc/cpuinfo 2>/dev/null | head -n 3 | tr '\n' ' ')" '
    function has(models, model,  parts, range, i) {
      for (i = split(models, parts, ","); i > 0; --i)
        if (split(parts[i], range, "-") == 2 ? range[1] <= model + 0 && model + 0 <= range[2] : parts[i] == model) return 1
    }
    BEGIN { split(processor, this, " ") }
    /^[ \t]*(#|$)/ { next }
    NF != 5 { print FILENAME ":" FNR ": a line has a kind, a vendor, a family, models and a commit" >"/dev/stderr"; exit 1 }
    $2 == this[1] && $3 == this[2] && has($4, this[3]) { print $5; exit }' "$1"
}
if [[ $floor ]]; then
  ((${#versions[@]} < 2)) || wrong_usage "the floor is the base, so that at most one version can be given, and ${#versions[@]} were"
  [[ $is_count == no ]] || wrong_usage "the floor is about time, not about --count"
  commit=$(floor_of "$floor") || cannot_measure "'$floor' is no file of floors"
  [[ $commit ]] || { echo "perf gate: not checked: $floor has no floor for this processor" >&2 && exit 5; }
  versions=("$commit" "${versions[@]}")
fi
((${#versions[@]} == 1 || ${#versions[@]} == 2)) || [[ $is_list == yes ]] ||
  wrong_usage "a base and at most one version to compare with it are needed, and ${#versions[@]} were given"
[[ $shapes || $is_count == yes ]] || shapes=$root/bench/gate/shapes.txt
[[ ! $shapes ]] || options+=(--shapes "$shapes")

mkdir -p "$build" || cannot_measure "the folder '$build' cannot be made"
build=$(cd "$build" && pwd)
exec 9>"$build/lock"
if ! flock --nonblock 9; then
  echo "perf gate: waiting for another gate that works in $build" >&2
  flock 9
fi

log=$build/log
# cmake_build SOURCE FOLDER TARGET SETTING...: silent; what the tools say is in $log. Configures for new settings only: what has changed
# otherwise, the build itself sees.
cmake_build() {
  local generator=()
  if [[ ! -e $2/CMakeCache.txt ]] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
  : >"$log"
  if [[ $(cat "$2/settings" 2>/dev/null) != "${*:4}" ]]; then
    cmake -S "$1" -B "$2" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release "${@:4}" >"$log" 2>&1 || return
    echo "${*:4}" >"$2/settings"
  fi
  cmake --build "$2" --target "$3" --parallel "$(nproc)" >>"$log" 2>&1
}

# Libraries are kept by commit and by what compiles them: a base built by another compiler is no base.
compilers() { "${CC:-cc}" --version && "${CXX:-c++}" --version && echo "${CFLAGS-} / ${CXXFLAGS-}"; }
compiler=$(compilers 2>/dev/null | cksum | cut -d ' ' -f 1 || true)

# build_library SOURCE FOLDER NAME: leaves the path of the shared library in $library.
build_library() {
  echo "perf gate: building $3" >&2
  if ! cmake_build "$1" "$2" mha_shared -DMHA_TESTS=OFF -DMHA_TOOLS=OFF -DMHA_BENCH=OFF -DMHA_OPENBLAS=OFF -DMHA_PTHREADPOOL=OFF -DMHA_INSTALL=OFF; then
    grep -E 'error|Error' "$log" | head -n 20 >&2 || true
    cannot_measure "$3 does not build; all that the compiler said is in $log"
  fi
  library=$(find "$2" -name libmha.so -print -quit)
  [[ $library ]] || cannot_measure "$3 builds no libmha.so"
}

# resolve VERSION: leaves the path of its library in $library, the folder of its mha.h in $include and what to call it in $name.
resolve() {
  name=$1 include=$root/include
  if [[ -f $1 ]]; then
    library=$1
    local beside
    beside=$(dirname "$(realpath "$1")")/../include
    [[ ! -e $beside/mha.h ]] || include=$beside
    return
  fi
  git -C "$root" rev-parse --git-dir >/dev/null 2>&1 ||
    cannot_measure "'$1' is no file, and $root is no git repository that could have such a revision"
  local commit folder
  commit=$(git -C "$root" rev-parse --verify --quiet "$1^{commit}") ||
    cannot_measure "'$1' is neither a file nor a revision of this repository (a clone of depth 1 has no older ones: git fetch --unshallow)"
  folder=$build/$commit-$compiler
  name=${commit:0:10}
  [[ $commit == "$1"* ]] || name="$1 ($name)"
  if [[ ! -e $folder/libmha.so ]]; then
    rm -rf "$folder" && mkdir -p "$folder/source"
    git -C "$root" archive "$commit" | tar -x -C "$folder/source"
    build_library "$folder/source" "$folder/build" "$name"
    cp "$library" "$folder/part" && rm -rf "$folder/source" "$folder/build" && mv "$folder/part" "$folder/libmha.so"
  fi
  library=$folder/libmha.so include=$folder/include
  git -C "$root" archive "$commit" include | tar -x -C "$folder"
}

program=$build/program-$compiler/mha_perf_gate
# build_program BASE_INCLUDE NEW_INCLUDE
build_program() {
  cmake_build "$root/tools/perf_gate" "$(dirname "$program")" mha_perf_gate -DMHA_BASE_INCLUDE="$1" -DMHA_NEW_INCLUDE="$2" ||
    cannot_measure "the measuring program does not build; all that the compiler said is in $log"
}
build_program "$root/include" "$root/include"
[[ $is_list == no ]] || exec "$program" "${options[@]}" --list
"$program" "${options[@]}" --list >/dev/null || exit  # what is wrong with the options is said before the libraries are built

resolve "${versions[0]}"
base=$library base_name=$name base_include=$include
if ((${#versions[@]} == 2)); then
  resolve "${versions[1]}"
else
  name="the working tree" include=$root/include
  build_library "$root" "$build/work-$compiler" "$name"
fi
build_program "$base_include" "$include"
exec "$program" "${options[@]}" --base-name "$base_name" --new-name "$name" "$base" "$library"
