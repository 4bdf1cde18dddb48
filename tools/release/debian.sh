#!/usr/bin/env bash
# Builds Debian's packages. See --help.
usage() {
  cat <<'TEXT'
tools/release/debian.sh [--test] [OUTPUT_FOLDER]

Builds the source package and libmha0, libmha-dev and mha of HEAD for Debian 12 and 13, each in a
new root of that release that mmdebstrap makes. lintian must find no error and no warning. Roots are
kept for a day in ~/.cache/mha-release. MHA_DEBIAN_SUITES names other releases, DEBFULLNAME and
DEBEMAIL the maintainer (default: the author of HEAD).

  OUTPUT_FOLDER  default: build/release
  --test         also install the packages in a new root, run README's program with the shared and
                 with the static library, and compare the command's results with the published ones
  --help         this text

Examples:
  tools/release/debian.sh --test
  MHA_DEBIAN_SUITES=trixie tools/release/debian.sh /tmp/release
TEXT
}
# shellcheck source=tools/release/common.bash
. "$(dirname "${BASH_SOURCE[0]}")/common.bash"

command -v mmdebstrap >/dev/null || { echo \
  "tools/release/debian.sh needs the package mmdebstrap: tools/setup.sh --release" >&2 && exit 3; }
roots=${XDG_CACHE_HOME:-$HOME/.cache}/mha-release
mkdir -p "$roots"

# Runs /work/SCRIPT in a new root of SUITE with PACKAGES; FOLDER is /work there, and what is written
# into it comes back.
in_root() {  # SUITE PACKAGES FOLDER SCRIPT
  local root log=$work/$1-$4.log
  root=$roots/$1-$(cksum <<<"$2" | cut -d ' ' -f 1).tar
  find "$roots" -name '*.tar' -mmin +1440 -delete
  [[ -e $root ]] || { mmdebstrap --quiet --variant=minbase --include="$2" "$1" "$root.new.tar" &&
    mv "$root.new.tar" "$root"; } ||
    { echo "tools/release/debian.sh: mmdebstrap makes no root of $1; what it said is above" >&2 &&
    return 1; }
  mmdebstrap --quiet --variant=custom --format=null \
    --setup-hook="mmtarfilter '--path-exclude=/dev/*' <'$root' | tar -C \"\$1\" -x" \
    --customize-hook='mkdir "$1/work"' --customize-hook="sync-in '$3' /work" \
    --customize-hook="chroot \"\$1\" sh -eu /work/$4" \
    --customize-hook="sync-out /work '$3'" '' - >"$log" 2>&1 || { tail -n 40 "$log" >&2 &&
    return 1; }
}

for suite in ${MHA_DEBIAN_SUITES:-bookworm trixie}; do
  folder=$work/$suite debian=$work/$suite/mha-$version/debian
  mkdir "$folder"
  tar -C "$folder" -xf "$archive"
  cp "$archive" "$folder/mha_$version.orig.tar.gz"
  cp -r "$folder/mha-$version/tools/release/debian" "$debian"
  maintainer="${DEBFULLNAME:-$(git log -1 --format=%an)} <${DEBEMAIL:-$(git log -1 --format=%ae)}>"
  sed -i "s|@MAINTAINER@|$maintainer|" "$debian/control"
  sed '1,4d; s/^$/./; s/^/ /' LICENSE >>"$debian/copyright"
  cat >"$folder/build" <<TEXT
. /etc/os-release
cd /work/mha-$version
cat >debian/changelog <<CHANGES
mha ($version-1+deb\$VERSION_ID) \$VERSION_CODENAME; urgency=medium

  * New release.

 -- $maintainer  $(date --utc --date="@$SOURCE_DATE_EPOCH" -R)
CHANGES
export SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH DEB_BUILD_OPTIONS="noautodbgsym parallel=$(nproc)"
dpkg-buildpackage --no-sign
cd ..
lintian --allow-root --display-info --fail-on error,warning *.changes
rm -r mha-$version *.buildinfo *.changes
TEXT
  needed=build-essential,debhelper,cmake,help2man,ninja-build
  needed+=,libcli11-dev,libxsimd-dev,nlohmann-json3-dev,lintian
  in_root "$suite" "$needed" "$folder" build
  cp "$folder"/*.{deb,dsc,tar.*} "$output"
  [[ $test == yes ]] || continue
  mkdir "$folder/test"
  cp "$folder"/*.deb tests/examples/minimal.c "$work/expected" "$folder/test"
  cat >"$folder/test/install" <<'TEXT'
cd /work
dpkg --install *.deb
for libraries in "$(pkg-config --libs mha)" -l:libmha.a; do
  cc minimal.c $libraries -o minimal
  ./minimal | diff - expected
done
mha verify --results >results
dpkg --purge mha libmha-dev libmha0
TEXT
  in_root "$suite" gcc,libc6-dev,pkgconf "$folder/test" install
  echo "$suite: README's program prints what README has; results: $(tail -n 1 \
    "$folder/test/results")"
done
