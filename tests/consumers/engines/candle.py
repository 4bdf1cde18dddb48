#!/usr/bin/env python3
"""Llama of candle-transformers with mha in it: takes the published crate, applies candle.patch, and
compares what the patched engine generates with what the published one does.

Example: candle.py --build build --work build/engines

Exit status: 0 the patched engine gives the same; 1 it does not; 77 something that is needed is not
there, which is said.
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

here = pathlib.Path(__file__).resolve().parent
root = here.parents[2]
version = "0.11.1"
checksum = "2b1e1abeac23d7df4f94e8a3852b3dbb661d332e37c3bef479507bac867187b2"
manifest = f"""[package]
name = "engine"
version = "0.0.0"
edition = "2021"

[[bin]]
name = "engine"
path = "{here}/candle.rs"

[dependencies]
candle-core = "={version}"
candle-nn = "={version}"
candle-transformers = "={version}"
mha-candle = {{ version = "0.1.0", features = ["static"] }}
patched_transformers = {{ package = "candle-transformers", path = "patched" }}
serde_json = "1"

[profile.release]
codegen-units = 16

[patch.crates-io]
mha-candle = {{ path = "{root}/tools/adapters/candle" }}

[workspace]
exclude = ["patched"]
"""


def skip(reason):
    print(f"SKIPPED: {reason}")
    sys.exit(77)


def patched_crate(work):
    """Leaves the patched crate in `work`, unless it is there: cargo would compile it again."""
    locked = root / "tools" / "adapters" / "candle" / "Cargo.toml"
    fetch = ["cargo", "fetch", "--quiet", "--locked", "--manifest-path", locked]
    fetched = subprocess.run(fetch, stderr=subprocess.PIPE, text=True)
    if fetched.returncode:
        skip(f"the crates cannot be fetched: {fetched.stderr.strip()}")
    cargo_home = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
    [crate] = cargo_home.glob(f"registry/cache/*/candle-transformers-{version}.crate")
    found = hashlib.sha256(crate.read_bytes()).hexdigest()
    if found != checksum:
        sys.exit(f"candle.py: the SHA-256 of {crate} is {found}; the published one is {checksum}")
    patch, applied = here / "candle.patch", work / "applied.patch"
    if not applied.exists() or applied.read_bytes() != patch.read_bytes():
        shutil.rmtree(work / "patched", ignore_errors=True)
        shutil.unpack_archive(crate, work, "gztar")
        (work / f"candle-transformers-{version}").rename(work / "patched")
        command = ["patch", "--quiet", "--strip=1", "--directory", work / "patched"]
        subprocess.run([*command, "--input", patch], check=True)
        shutil.copy(patch, applied)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = lambda word: pathlib.Path(word).absolute()
    parser.add_argument("--build", type=folder, default=root / "build", help="mha's build folder")
    parser.add_argument("--work", type=folder, default=root / "build" / "engines")
    options = parser.parse_args()
    for tool in "cargo", "patch":
        if not shutil.which(tool):
            skip(f"there is no command {tool}")
    work = options.work / "candle"
    work.mkdir(parents=True, exist_ok=True)
    patched_crate(work)
    (work / "Cargo.toml").write_text(manifest)
    # The same versions and checksums of all crates.
    shutil.copy(root / "tools" / "adapters" / "candle" / "Cargo.lock", work)
    library = {"MHA_LIB_DIR": str(options.build / "src"), "MHA_STATIC": "1"}
    environment = {**os.environ, **library, "CARGO_NET_OFFLINE": "true"}
    target = pathlib.Path(environment.setdefault("CARGO_TARGET_DIR", str(work / "target")))
    build = ["cargo", "build", "--quiet", "--release"]
    subprocess.run(build, cwd=work, env=environment, check=True)
    program = target / "release" / "engine"
    subprocess.run([program], check=True)


main()
