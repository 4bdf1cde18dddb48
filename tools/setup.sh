#!/usr/bin/env bash
# Installs the packages that this project is built with. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/setup.sh [--all] [--mpi] [--release]

Installs the missing packages among those that building and testing mha needs, with apt-get (Debian,
Ubuntu). Prints nothing and takes no time if none is missing. Needs root or sudo only to install.
Packages that only some tests of --all need are installed if apt provides them; otherwise the script
says so, and those tests are skipped.

  --all      also install what tools/test.sh needs: clang, compilers for AArch64, RISC-V and
             Windows, emulators, tools that inspect the header, and cargo if it is missing
  --mpi      also install Open MPI, for -DMHA_MPI=ON
  --release  also install what tools/release.sh and the scripts in tools/release need
  --help     show this text

Examples:
  tools/setup.sh          to build, and to run tools/demo.sh
  tools/setup.sh --all    to run tools/test.sh
TEXT
}

needed=(cmake make ninja-build g++ libxsimd-dev libopenblas-dev libpthreadpool-dev \
  libbenchmark-dev libgtest-dev googletest pkg-config
  python3 python3-venv git valgrind)
useful=()  # without one of these, tests are skipped

for argument in "$@"; do
  case $argument in
    --all)
      needed+=(ccache clang g++-aarch64-linux-gnu g++-riscv64-linux-gnu qemu-user)
      useful+=(g++-mingw-w64-x86-64-posix wine libclang-rt-dev clang-19)
      # What tools/test_avx512.sh needs. (Debian's busybox-static would take the place of busybox.)
      if [[ $(uname -m) == x86_64 ]]; then
        useful+=(bochs bochs-term bochsbios vgabios cpio isolinux syslinux-common xorriso)
        command -v busybox >/dev/null || useful+=(busybox-static)
      fi
      # Debian 12's package cargo is too old for the crates; this one is kept up to date.
      command -v cargo >/dev/null || useful+=(cargo-web rustc-web rust-web-clippy rustfmt-web)
      ;;
    --mpi) needed+=(libopenmpi-dev openmpi-bin) ;;
    --release) needed+=(abigail-tools openssh-client) ;;
    --help | -h) usage && exit ;;
    *) echo "tools/setup.sh: '$argument' is not an option; see tools/setup.sh --help" >&2 &&
      exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "tools/setup.sh: this system has no apt-get. Install these Debian packages or their \
equivalents by hand, and pass" \
    "--no-setup to the other scripts: ${needed[*]} ${useful[*]}" >&2
  exit 1
fi

installed=$(dpkg-query --show --showformat '${Package} ${db:Status-Status}\n' "${needed[@]}" \
  "${useful[@]}" 2>/dev/null || true)
missing() {  # PACKAGE...
  local package
  for package in "$@"; do
    grep -qxF "$package installed" <<<"$installed" || echo "$package"
  done
}
of_apt() {  # PACKAGE...: those that apt has
  local package
  for package in "$@"; do
    [[ -z $(apt-cache madison "$package" 2>/dev/null) ]] || echo "$package"
  done
}

mapfile -t missing_needed < <(missing "${needed[@]}")
mapfile -t missing_useful < <(missing "${useful[@]}")
((${#missing_needed[@]} + ${#missing_useful[@]})) || exit 0

as_root=()
is_root=yes
if ((EUID != 0)); then
  as_root=(sudo)
  command -v sudo >/dev/null || is_root=no
fi
if [[ $is_root == no ]] && ((${#missing_needed[@]})); then
  echo "tools/setup.sh: these packages are missing, and installing them needs root or sudo: \
${missing_needed[*]} ${missing_useful[*]}" >&2
  exit 1
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt_get() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get --quiet --yes -o \
    DPkg::Lock::Timeout=120 "$@" </dev/null >"$log" 2>&1 && return
  cat "$log" >&2
  echo "tools/setup.sh: apt-get $1 failed; see its output above" >&2
  return 1
}
install() {  # PACKAGE...
  (($#)) || return 0
  echo "tools/setup.sh: installing $*"
  apt_get install --no-install-recommends "$@"
}

if ((${#missing_needed[@]})); then
  apt_get update || exit 1
  install "${missing_needed[@]}" || exit 1
fi

mapfile -t had < <(of_apt "${missing_useful[@]}")
# What apt has not is not looked for each time: its lists are brought up to date only to install, or
# if they are empty.
if [[ $is_root == yes ]] && ((${#missing_needed[@]} == 0)) && { ((${#had[@]})) ||
  [[ -z $(of_apt cmake) ]]; }; then
  apt_get update || true
  mapfile -t had < <(of_apt "${missing_useful[@]}")
fi
if ((${#had[@]})) && [[ $is_root == yes ]] && install "${had[@]}"; then
  installed+=$(printf '\n%s installed' "${had[@]}")
fi
mapfile -t not_had < <(missing "${missing_useful[@]}")
if ((${#not_had[@]})); then
  echo "tools/setup.sh: these packages are not installed, so tests that need them will be skipped: \
${not_had[*]}" >&2
  [[ " ${not_had[*]} " != *' cargo-web '* ]] ||
    echo "tools/setup.sh: a recent cargo is also available from https://rustup.rs" >&2
fi
