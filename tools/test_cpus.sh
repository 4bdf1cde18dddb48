#!/usr/bin/env bash
# Runs the tests on emulated processors that lack instruction sets. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/test_cpus.sh [--build FOLDER] [SELECTION...]

Runs tests with qemu-x86_64 on two emulated processors: Nehalem, which has no AVX, and Haswell,
which has AVX2 but nothing newer. First checks that the library detects the right instruction sets,
also on a Haswell without fma or F16C. Requires the programs of tools/test.sh and Debian's package
qemu-user.

  SELECTION...       options of ctest, such as -R and -L (default: -L '^brief$')
  --build FOLDER     the folder of the programs (default: build)
  --help             show this text
MHA_TEST_ROUNDS multiplies the number of random cases (default here: 0.1).

Exit status: 0 all tests passed; 1 a test failed; 2 wrong arguments; 3 qemu is missing.

Examples:
  tools/test_cpus.sh
  tools/test_cpus.sh -R '^(masked|window)[.]'
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build selection=()
while (($#)); do
  case $1 in
    --help | -h) usage && exit ;;
    --build | -[REL] | -LE)
      (($# > 1)) || { echo "tools/test_cpus.sh: $1 needs a value; see tools/test_cpus.sh --help" \
        >&2 && exit 2; }
      if [[ $1 == --build ]]; then build=$2; else selection+=("$1" "$2"); fi
      shift 2
      ;;
    *) echo "tools/test_cpus.sh: '$1' is not an option; see tools/test_cpus.sh --help" >&2 &&
      exit 2 ;;
  esac
done
((${#selection[@]})) || selection=(-L '^brief$')
command -v qemu-x86_64 >/dev/null || { echo \
  "tools/test_cpus.sh: qemu-x86_64 is not installed (Debian: qemu-user)" >&2 && exit 3; }
[[ -e $build/src/libmha.a ]] || { echo \
  "tools/test_cpus.sh: there is no library in $build; tools/test.sh --quick builds all" >&2 &&
  exit 2; }

"${CC:-cc}" -x c - -I include -x none "$build/src/libmha.a" -o "$build/bin/instruction_sets" <<'C'
#include <mha.h>
#include <stdio.h>
int main(void) {
  for (uint32_t set = MHA_INSTRUCTION_SET_SCALAR; set < 32; ++set)
    if (mha_instruction_sets() >> set & 1) printf("%s ", mha_instruction_set_name(set));
}
C

failed=0
for machine in 'Nehalem:scalar' 'SandyBridge:scalar' 'Haswell:scalar avx2' 'Haswell,-fma:scalar' \
  'Haswell,-f16c:scalar'; do
  found=$(qemu-x86_64 -cpu "${machine%%:*}" "$build/bin/instruction_sets" 2>/dev/null)
  [[ $found == "${machine#*:} " ]] && continue
  echo "tools/test_cpus.sh: ${machine%%:*} has ${machine#*:}, but the library finds \
${found:-nothing}" >&2
  failed=1
done

# A line for each test: its program and its filter.
tests=$(ctest --test-dir "$build" --show-only=json-v1 "${selection[@]}" | python3 -c '
import json, sys
for test in json.load(sys.stdin)["tests"]:
    command = test.get("command", [])
    if command and "/bin/mha_test_" in command[0]:
        print(*command)
')
[[ $tests ]] || { echo "tools/test_cpus.sh: '${selection[*]}' selects no test in $build" >&2 &&
  exit 2; }
for cpu in Nehalem Haswell; do
  # QEMU 7.2 reads 16 bytes for the one number of a scalar fma in memory, and so touches the guard
  # pages of these.
  [[ $cpu == Nehalem ]] || tests=$(grep -v GeneratedPairs <<<"$tests")
  log=$build/test_cpus_$cpu.txt
  export MHA_TEST_ROUNDS=${MHA_TEST_ROUNDS:-0.1}
  xargs -P "$(nproc)" -I{} sh -c "out=\$(qemu-x86_64 -cpu $cpu {} 2>&1) && echo 'passed: {}' ||
    printf 'failed: {}\n%s\n' \"\$out\"" <<<"$tests" >"$log"
  echo "$cpu: $(grep -c '^passed: ' "$log") of $(wc -l <<<"$tests") tests passed, in $SECONDS s so \
far"
  ! grep -A 20 '^failed: ' "$log" >&2 || failed=1
done
exit "$failed"
