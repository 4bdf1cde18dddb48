"""Compares the bytes of libraries and packages from two builds of the same sources, in different
folders and at different times.

    reproducible.py WORK CMAKE SETTING...

The builds have only the scalar kernels, optimised for size, and debug information, which is most
likely to differ. They use no compiler cache, which would compare a build with itself.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

source = pathlib.Path(__file__).resolve().parent.parent.parent
work, cmake = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
off = [
    f"-DMHA_{part}=OFF"
    for part in ("OPENBLAS", "PTHREADPOOL", "ONNX", "GGML", "BINDINGS", "BENCH", "TESTS")
]


def run(*command, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CCACHE_DISABLE": "1", **environment},
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} fails:\n{done.stdout}")


def build(folder):
    """Name of a file -> its checksum."""
    for name in ("src", "include", "CMakeLists.txt", "LICENSE", "CHANGELOG.md"):
        if (source / name).is_file():
            shutil.copy(source / name, folder)
        else:
            # With new times.
            shutil.copytree(source / name, folder / name, copy_function=shutil.copy)
    made, packages = folder / "build", folder / "packages"
    run(
        cmake,
        "-S",
        folder,
        "-B",
        made,
        "-DCMAKE_BUILD_TYPE=MinSizeRel",
        "-DCMAKE_C_FLAGS=-g",
        "-DCMAKE_CXX_FLAGS=-g",
        *off,
        *sys.argv[3:],
    )
    run(cmake, "--build", made, "--parallel", "2")
    run(
        cmake.with_name("cpack"),
        "--config",
        made / "CPackConfig.cmake",
        "-B",
        packages,
        SOURCE_DATE_EPOCH="1700000000",
    )
    files = [*made.glob("src/libmha.*"), *packages.glob("*.tar.gz")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


shutil.rmtree(work, ignore_errors=True)
first, second = build(work / "one"), build(work / "another" / "place")
print("\n".join(f"{first[name]}  {name}" for name in sorted(first)))
if first != second or len(first) < 3:
    sys.exit(
        "The second build gives other bytes, or too few files:"
        f" {' '.join(n for n in {**first, **second} if first.get(n) != second.get(n))}"
    )
