#!/usr/bin/env bash
# Installs the packages that this project is built with. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/setup.sh [--all]

Installs by apt-get (Debian, Ubuntu) the packages that are needed to build and test mha, as far as they are missing. Says nothing and
takes no time if all are there. Needs root or sudo only if something is missing.

  --all    also what tools/test.sh needs: clang, compilers and an emulator for AArch64 and RISC-V, what looks at packages, man pages, the
           header and the binary interface, a browser, what virtual environments of Python need, and cargo if there is none
  --help   this text

Examples:
  tools/setup.sh          to build, and to run tools/demo.sh
  tools/setup.sh --all    to run tools/test.sh
TEXT
}

packages=(cmake ninja-build g++ libxsimd-dev libopenblas-dev libpthreadpool-dev libbenchmark-dev libgtest-dev googletest pkg-config
  libcli11-dev nlohmann-json3-dev python3 git valgrind)

wants_cargo=no
for argument in "$@"; do
  case $argument in
    --all)
      packages+=(clang libclang-rt-dev g++-aarch64-linux-gnu g++-riscv64-linux-gnu qemu-user abigail-tools dpkg-dev lintian man-db groff-base
        doxygen python3-venv chromium)
      command -v cargo >/dev/null || wants_cargo=yes
      ;;
    --help | -h) usage && exit ;;
    *) echo "tools/setup.sh: '$argument' is not an option; see tools/setup.sh --help" >&2 && exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "tools/setup.sh: this system has no apt-get. Install these Debian packages or what corresponds to them by hand, and give" \
    "--no-setup to the other scripts: ${packages[*]}" >&2
  exit 1
fi

installed=$(dpkg-query --show --showformat '${Package} ${db:Status-Status}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  grep -qxF "$package installed" <<<"$installed" || missing+=("$package")
done
[[ $wants_cargo == yes ]] || ((${#missing[@]})) || exit 0

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    [[ $wants_cargo == no ]] || missing+=(cargo)
    echo "tools/setup.sh: these packages are missing, and installing them needs root or sudo: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt_get() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get --quiet --yes -o DPkg::Lock::Timeout=120 "$@" </dev/null >"$log" 2>&1 && return
  cat "$log" >&2
  echo "tools/setup.sh: apt-get $1 failed; what it said is above" >&2
  exit 1
}
apt_get update
if [[ $wants_cargo == yes ]]; then
  if [[ -n $(apt-cache madison cargo-web) ]]; then
    missing+=(cargo-web rustc-web rust-web-clippy rustfmt-web)  # Debian 12's cargo is too old for the crates; this one is kept up to date
  else
    echo "tools/setup.sh: there is no cargo, and no package of a recent one (cargo-web); see https://rustup.rs. The Rust crates stay untested" >&2
  fi
fi
((${#missing[@]})) || exit 0
echo "tools/setup.sh: installing ${missing[*]}"
apt_get install --no-install-recommends "${missing[@]}"
