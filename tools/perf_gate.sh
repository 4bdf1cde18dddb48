#!/usr/bin/env bash
# Says whether one version of the library is slower than another. See --help.
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/../bench/gate/perf_gate.py" "$@"
