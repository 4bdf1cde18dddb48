#!/usr/bin/env bash
# Tests mha-vllm with vLLM itself. See --help.
set -euo pipefail

case ${1-} in
  --help | -h)
    cat <<'TEXT'
tools/adapters/vllm/test.sh [NAME...]

Tests mha-vllm with vLLM and models of random weights: in batches, chunks, from cached prefixes, in
a cache that is too small, by a server and in two processes. Installs vLLM (setup.sh; 3.6 GB) in the
environment MHA_VLLM_VENV (default: build/vllm), and takes the library of the build folder MHA_BUILD
(default: build).

  NAME    a test of tests/adapters/vllm_models_test.py, such as Models.test_llama

Exit codes: 0 all tests pass; 1 a test fails; 3 nothing was tested: vLLM cannot be installed.
TEXT
    exit ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
folder=$(realpath "${MHA_VLLM_VENV-build/vllm}")
tools/adapters/vllm/setup.sh "$folder" || exit 3
"$folder/bin/pip" install --quiet --no-deps --no-build-isolation --editable tools/adapters/vllm
MHA_LIBRARY=$(realpath "${MHA_BUILD-build}")/src/libmha.so PYTHONPATH=$PWD/tools/bindings/python \
  exec "$folder/bin/python" tests/adapters/vllm_models_test.py "$@"
