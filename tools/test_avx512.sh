#!/usr/bin/env bash
# Runs the tests of the AVX-512 kernels on a processor that has no AVX-512. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
tools/test_avx512.sh [--build FOLDER] [--machines COUNT] [--time-limit SECONDS] [--without-vnni]
                     [SELECTION...]

Runs tests of the AVX-512 kernels in Bochs, a PC emulator that has these instructions, under
Debian's Linux kernel for cloud machines, which apt downloads (30 MB) into FOLDER/avx512. Each
processor of this machine boots one emulated machine (20 s), and these share the tests. An
instruction takes about 100 times as long as on a processor that has it. Requires the programs of
tools/test.sh and the Debian packages of tools/setup.sh --all; needs no root.

  SELECTION...           ctest options, such as -R and -L, that select from the tests that name
                         AVX-512 (default: -L '^wide$', what only vectors of another width get
                         wrong)
  --build FOLDER         the folder of the programs (default: build)
  --machines COUNT       the number of emulated machines (default: one for each processor)
  --time-limit SECONDS   the time that a machine may take (default: 1200)
  --without-vnni         emulate a processor without VNNI, and run no tests of kernels that need it
  --help                 show this text
MHA_TEST_ROUNDS multiplies the number of random cases (default here: 0.1).

Exit status: 0 all tests passed; 1 not all tests passed; 2 wrong arguments; 3 a requirement is
missing.

Examples:
  tools/test_avx512.sh
  tools/test_avx512.sh -L '^wide'    also all generated calls with every pair of options
  tools/test_avx512.sh -R 'cache.*Ring'
TEXT
}

fail() { echo "tools/test_avx512.sh: $*" >&2 && exit 2; }
lacks() { echo "tools/test_avx512.sh: $*" >&2 && exit 3; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build
machines=$(nproc)
time_limit=1200
selection=()
model=corei7_icelake_u kernels='avx512(?:_vnni)?'
while (($#)); do
  case $1 in
    --build | --machines | --time-limit)
      (($# > 1)) || fail "$1 needs a value; see tools/test_avx512.sh --help"
      case $1 in
        --build) build=$2 ;;
        --machines) machines=$2 ;;
        --time-limit) time_limit=$2 ;;
      esac
      shift 2
      ;;
    --without-vnni) model=corei7_skylake_x kernels=avx512 && shift ;;
    --help | -h) usage && exit ;;
    -[REL] | -LE)
      (($# > 1)) || fail "$1 needs a value; see tools/test_avx512.sh --help"
      selection+=("$1" "$2")
      shift 2
      ;;
    *) fail "'$1' is not an option; see tools/test_avx512.sh --help" ;;
  esac
done
[[ $machines =~ ^[1-9][0-9]*$ ]] ||
  fail "--machines is '$machines'; a number of machines is expected"
[[ $time_limit =~ ^[1-9][0-9]*$ ]] ||
  fail "--time-limit is '$time_limit'; a number of seconds is expected"
((${#selection[@]})) || selection=(-L '^wide$')
[[ -d $build/bin ]] ||
  fail "there are no programs in $build/bin; tools/test.sh --quick builds them all"
# A line for each program: its name, how many of its tests are selected, and the filter that leaves
# these.
selected=$(ctest --test-dir "$build" --show-only=json-v1 "${selection[@]}" |
  kernels=$kernels python3 -c '
import collections, json, os, re, sys
filters = collections.defaultdict(list)
for test in json.load(sys.stdin)["tests"]:
    command = " ".join(test.get("command", []))
    found = re.search(r"/mha_test_(\w+) --gtest_filter=(\S+/" + os.environ["kernels"] + ")( |$)",
                      command)
    if found:
        filters[found[1]].append(found[2])
for program, names in filters.items():
    print(program, len(names), ":".join(names))
')
[[ -n $selected ]] || fail "'${selection[*]}' selects no AVX-512 test in $build"
mapfile -t programs < <(cut -d ' ' -f 1 <<<"$selected")
tests=$(awk '{ sum += $2 } END { print sum }' <<<"$selected")

[[ $(uname -m) == x86_64 ]] ||
  lacks "this is not an x86-64 machine, so programs built here have no AVX-512 kernels"
packages="bochs bochs-term bochsbios vgabios busybox cpio isolinux syslinux-common xorriso"
isolinux=/usr/lib/ISOLINUX/isolinux.bin
ldlinux=/usr/lib/syslinux/modules/bios/ldlinux.c32
for command in bochs busybox cpio xorriso flock apt-get dpkg-deb; do
  command -v "$command" >/dev/null ||
    lacks "the command $command is missing; this needs the Debian packages $packages"
done
for file in "$isolinux" "$ldlinux" /usr/share/bochs/{BIOS-bochs-latest,VGABIOS-lgpl-latest} \
  /usr/lib/*/bochs/plugins/libbx_term_gui.so; do
  [[ -e $file ]] || lacks "$file is missing; this needs the Debian packages $packages"
done

folder=$build/avx512
mkdir -p "$folder"
exec {lock}>"$folder/lock"
flock --nonblock "$lock" || fail "another run uses $folder"
kernel=$folder/vmlinuz
if [[ ! -e $kernel ]]; then
  package=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n \
    's/^ *Depends: \(linux-image-.*\)/\1/p' | head -n 1) || true
  [[ -n $package ]] || lacks \
    "apt has no package linux-image-cloud-amd64, whose kernel the emulated machines boot (as root: \
apt-get update)"
  rm -rf "$folder/package"
  mkdir "$folder/package"
  (cd "$folder/package" && apt-get --quiet download "$package" >../download.log 2>&1) || {
    cat "$folder/download.log" >&2
    lacks "apt-get download $package failed; see its output above"
  }
  dpkg-deb --extract "$folder"/package/*.deb "$folder/package"
  mv "$folder"/package/boot/vmlinuz-* "$kernel"
  rm -rf "$folder/package"
fi

memory_mib=2048
for_all=$(($(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 1024 / memory_mib))
((machines <= for_all)) || machines=$((for_all > 0 ? for_all : 1))

# A machine's folder: what its Linux starts with, a CD that boots it, and the emulator's settings.
make_machine() {  # NUMBER
  local machine=$folder/machine$1 root library program
  root=$machine/root
  mkdir -p "$root"/{bin,dev,proc,tmp,tests,"$PWD/tests/contract"} "$machine/cd"
  cp "$(command -v busybox)" "$root/bin/busybox"
  ln -s busybox "$root/bin/sh"
  cp tests/contract/checksums.txt "$root/$PWD/tests/contract/"  # where the program looks for it
  for program in "${programs[@]}"; do
    strip -o "$root/tests/$program" "$build/bin/mha_test_$program"
    { ldd "$root/tests/$program" "$root/bin/busybox" 2>/dev/null || true; } |
      sed -n 's|^[^/]*\(/[^ ]*\) (.*|\1|p'
  done | sort --unique | while read -r library; do
    mkdir -p "$root/${library%/*}"
    cp --dereference "$library" "$root/$library"
  done
  cat >"$root/init" <<TEXT
#!/bin/sh
busybox=/bin/busybox
\$busybox mount -t proc proc /proc
\$busybox mount -t devtmpfs devtmpfs /dev
export MHA_TEST_ROUNDS=${MHA_TEST_ROUNDS:-0.1} GTEST_COLOR=no
export GTEST_TOTAL_SHARDS=$machines GTEST_SHARD_INDEX=$1
while read -r program tests filter; do
  echo "program \$program"
  GTEST_FILTER=\$filter /tests/\$program </dev/null
  status=\$?
  echo
  echo "exit status \$status of \$program"
done </selected
echo "all programs have run"
\$busybox sleep 1  # until the serial line has taken it
echo b >/proc/sysrq-trigger  # reboots, by a triple fault, at which the emulator ends
TEXT
  chmod +x "$root/init"
  echo "$selected" >"$root/selected"
  (cd "$root" && find . | cpio --quiet --create --format=newc | gzip -1) >"$machine/cd/initrd"
  cp "$kernel" "$isolinux" "$ldlinux" "$machine/cd/"
  # notests: without the kernel's tests of its cryptography, a third of the time to boot.
  # clearcpuid: without xsavec and xsaves (323, 321), about whose sizes this kernel and this
  # emulator disagree, upon which the kernel switches AVX off. nopku, 515: for the same reason. 514
  # UMIP, 528 LA57, 534 RDPID, 580 FSRM: with them the kernel does not come up; only one may be the
  # reason.
  options="console=ttyS0,115200 quiet nokaslr mitigations=off tsc=reliable cryptomgr.notests"
  options+=" panic=1 reboot=t clearcpuid=323,321,514,515,528,534,580 nopku"
  cat >"$machine/cd/isolinux.cfg" <<TEXT
default tests
prompt 0
label tests
  kernel vmlinuz
  append initrd=initrd $options
TEXT
  xorriso -as mkisofs -quiet -o "$machine/cd.iso" -b isolinux.bin -c boot.cat -no-emul-boot \
    -boot-load-size 4 -boot-info-table "$machine/cd" \
    2>"$machine/xorriso.log" || { cat "$machine/xorriso.log" >&2 && exit 1; }
  cat >"$machine/bochsrc" <<TEXT
display_library: term
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
vga: extension=vbe, update_freq=1
cpu: model=$model, count=1, ips=100000000, reset_on_triple_fault=0
memory: guest=$memory_mib, host=$memory_mib
ata0: enabled=1
ata0-master: type=cdrom, path=cd.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=printed.txt
clock: sync=none, time0=utc
log: bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
TEXT
  echo c >"$machine/commands"  # to its debugger: continue
}

# The emulator draws its screen for a terminal of this name, and needs no real one. (`script` would
# give it one, but when its child is stopped, as by a shell's job control, it stops itself, and
# stays stopped if the child goes on before it.)
run_machine() {  # NUMBER
  cd "$folder/machine$1"
  TERM=linux exec timeout --signal=KILL --kill-after=1 "$time_limit" bochs -q -f bochsrc -rc \
    commands </dev/null >screen.txt 2>&1
}

rm -rf "$folder"/machine*
for ((machine = 0; machine < machines; machine++)); do make_machine "$machine"; done
# Whatever ends this script ends the emulators.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'exit 1' INT TERM
for ((machine = 0; machine < machines; machine++)); do run_machine "$machine" & done

printed() { cat "$folder"/machine*/printed.txt 2>/dev/null | tr -d '\r'; }
count() { printed | grep -c "^\[ *$1 *\] .*([0-9]* ms)$" || true; }  # OK, FAILED, SKIPPED
while [[ -n $(jobs -pr) ]]; do
  sleep 1
  ((SECONDS % 60)) || echo "$SECONDS s: $(count OK) of $tests tests passed so far"
done

status=0
for ((machine = 0; machine < machines; machine++)); do
  what_it_printed=$folder/machine$machine/printed.txt
  grep -qs '^all programs have run' "$what_it_printed" && continue
  echo "tools/test_avx512.sh: machine $machine did not finish; its limit is $time_limit s. The \
last lines of $what_it_printed:" >&2
  tail -n 5 "$what_it_printed" >&2 || tail -n 5 "$folder/machine$machine/screen.txt" >&2
  status=1
done
printed | grep -B 20 '^\[ *\(FAILED\|SKIPPED\) *\] .*([0-9]* ms)$' >&2 || true
printed | grep '^exit status' | grep -v '^exit status 0 ' >&2 && status=1
passed=$(count OK) failed=$(count FAILED) skipped=$(count SKIPPED)
echo "AVX-512, emulated: $passed of $tests tests passed, $failed failed, $skipped skipped, in \
$SECONDS s"
# A machine whose kernel switches AVX-512 off skips them all.
((status == 0 && passed == tests && failed == 0 && skipped == 0))
