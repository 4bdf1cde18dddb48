"""Checks the options of the build. See options.py --help.

A machine with nothing but a compiler, CMake and xsimd's headers is played by telling CMake to look
into none of the system's folders.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

import instruction_sets

tests = pathlib.Path(__file__).resolve().parent.parent
parts = {
    "OPENBLAS": "libopenblas-dev",
    "PTHREADPOOL": "libpthreadpool-dev",
    "BENCH": "libbenchmark-dev",
    "TESTS": "googletest",
    "ONNX": "libonnxruntime-dev",
}
targets = {
    "OPENBLAS": "mha_openblas",
    "PTHREADPOOL": "mha_pthreadpool",
    "BENCH": "mha_bench",
    "TESTS": "mha_test_contract",
    "ONNX": "mha_onnx",
}
nothing_installed = [
    "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF",
    "-DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF",
    "-DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON",
]


def run(*command):
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def must(*command):
    status, output = run(*command)
    if status:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{output}")
    return output


class Build:
    def __init__(self, arguments):
        self.__dict__.update(vars(arguments))
        self.work = pathlib.Path(self.work).resolve() / self.test
        shutil.rmtree(self.work, ignore_errors=True)
        self.folder = self.work / "build"
        self.common = [
            f"-DCMAKE_C_COMPILER={self.cc}",
            f"-DCMAKE_CXX_COMPILER={self.cxx}",
            f"-DCMAKE_MAKE_PROGRAM={self.make}",
        ]

    def command(self, source, folder):
        return [self.cmake, "-S", source, "-B", folder, "-G", self.generator, *self.common]

    def configure(self, *settings):
        """The exit status of CMake and its messages in one line, as CMake breaks long ones."""
        # What it found out about the compilers stays.
        (self.folder / "CMakeCache.txt").unlink(missing_ok=True)
        status, output = run(*self.command(tests.parent, self.folder), *settings)
        return status, " ".join(output.split())

    def configured(self, *settings):
        status, said = self.configure(*settings)
        if status:
            sys.exit(f"cmake {' '.join(settings)} fails:\n{said}")
        return said

    def expect_error(self, *settings, says):
        status, said = self.configure(*settings)
        if status == 0 or says not in said:
            sys.exit(
                f"cmake {' '.join(settings)} ends with {status}; it should fail, and say '{says}'."
                f" It said:\n{said}"
            )

    def targets(self):
        output = must(self.cmake, "--build", self.folder, "--target", "help")
        return set(re.findall(r"^(?:\.\.\. )?(\w+)(?:: phony)?", output, re.MULTILINE))

    def sets(self):
        """All instruction sets, and those of this architecture but for the scalar kernels."""
        rows = instruction_sets.rows(tests.parent)
        architecture = rows[self.left_out].architecture
        return rows, [name for name, row in rows.items() if row.architecture == architecture]

    # ---- What ctest runs

    def nothing(self):
        """With nothing installed, the library alone is built; messages name each part left out and
        the package it needs."""
        bare = [
            *nothing_installed,
            f"-DMHA_XSIMD_INCLUDE_DIR={self.xsimd}",
            "-DMHA_GOOGLETEST_SOURCE_DIR=",
            "-DMHA_ONNXRUNTIME_INCLUDE_DIR=",
        ]
        said = self.configured(*bare)
        if "MHA_STATIC=ON" in said:
            sys.exit(
                "MHA_STATIC is ON, and CMake says that something is left out for want of"
                f" it:\n{said}"
            )
        built = self.targets()
        for part, packages in parts.items():
            if packages not in said:
                sys.exit(
                    f"Without {packages}, CMake does not say that the package is missing:\n{said}"
                )
            if targets[part] in built:
                sys.exit(f"{targets[part]} is to be built although {packages} is missing.")
            self.expect_error(*bare, f"-DMHA_{part}=ON", says=f"apt-get install {packages}")
        if not {"mha_static", "mha_shared"} <= built:
            sys.exit("The libraries are not built.")
        self.expect_error(*nothing_installed, says="apt-get install libxsimd-dev")

    def choices(self):
        """Each part can be left out, and contradictions are errors."""
        self.configured("-DMHA_GGML=OFF", *(f"-DMHA_{part}=OFF" for part in parts))
        if self.targets() & set(targets.values()):
            sys.exit(
                f"Parts that are OFF are built: {' '.join(self.targets() & set(targets.values()))}"
            )
        off = ["-DMHA_GGML=OFF", *(f"-DMHA_{part}=OFF" for part in parts)]
        self.configured(*off, "-DMHA_STATIC=OFF")
        if "mha_static" in self.targets():
            sys.exit("MHA_STATIC=OFF builds the static library.")
        for library in "STATIC", "SHARED":  # with all parts that this machine can build
            self.configured(f"-DMHA_{library}=OFF")
            if f"mha_{library.lower()}" in self.targets():
                sys.exit(f"MHA_{library}=OFF alone builds that library.")
        self.expect_error(
            *off, "-DMHA_STATIC=OFF", "-DMHA_SHARED=OFF", says="leaves no library to build"
        )
        self.expect_error("-DMHA_STATIC=OFF", "-DMHA_BENCH=ON", says="MHA_STATIC=ON")
        said = self.configured("--preset", "library")
        if "for want of" in said:
            sys.exit(f"The preset of the library alone speaks of parts that it leaves out:\n{said}")
        rows, here = self.sets()
        adding = [name for name in here if rows[name].kernels != name]
        self.configured(*off, *(f"-DMHA_{name.upper()}=OFF" for name in adding))
        built = {target for target in self.targets() if target.startswith("mha_kernels_")}
        left = {f"mha_kernels_{name}" for name in ("scalar", *here) if name not in adding}
        if built != left:
            sys.exit(f"With {', '.join(adding)} OFF, these are built: {', '.join(sorted(built))}")
        for name in rows.keys() - {*here, "scalar"}:
            self.expect_error(*off, f"-DMHA_{name.upper()}=ON", says=f"has no {name.upper()}")

    def no_build_type(self):
        """Inside a build without a build type, the library is optimised unless that build says
        otherwise; the rest is not."""

        def optimised(*settings):
            """source -> the last of its options -O..."""
            shutil.rmtree(self.folder, ignore_errors=True)
            must(
                *self.command(tests / "consumers" / "add_subdirectory", self.folder),
                f"-DMHA_SOURCE_DIR={tests.parent}",
                f"-DMHA_XSIMD_INCLUDE_DIR={self.xsimd}",
                "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
                *settings,
            )
            return {
                pathlib.Path(entry["file"]).name: (
                    (["", *re.findall(r" -O\w*", entry["command"])])[-1].strip()
                )
                for entry in json.loads((self.folder / "compile_commands.json").read_text())
            }

        for settings, core in (
            ((), "-O3"),
            (("-DCMAKE_BUILD_TYPE=Debug",), ""),
            (("-DCMAKE_CXX_FLAGS=-Og",), "-Og"),
        ):
            levels = optimised(*settings)
            expected = {"layer.c": "", "forward.cpp": core, "cache.cpp": core, "scalar.cpp": "-O2"}
            found = {name: levels.get(name, "not compiled") for name in expected}
            if found != expected:
                sys.exit(
                    f"With {' '.join(settings) or 'no build type'}, sources are compiled by"
                    f" {found}; it should be {expected}."
                )

    def static_only(self):
        """A static library with the scalar kernels alone is installed, computes, and says what it
        lacks."""
        rows, here = self.sets()
        self.configured(
            *(f"-DMHA_{part}=OFF" for part in parts),
            "-DMHA_SHARED=OFF",
            *(f"-DMHA_{name.upper()}=OFF" for name in here if rows[name].kernels == name),
            "-DCMAKE_BUILD_TYPE=Debug",
        )
        must(self.cmake, "--build", self.folder, "--parallel", "2")
        prefix = self.work / "prefix"
        must(self.cmake, "--install", self.folder, "--prefix", prefix)
        if list(prefix.glob("**/libmha.so*")):
            sys.exit("MHA_SHARED=OFF installs a shared library.")
        program = self.work / "consumer"
        consumer = self.command(tests / "consumers" / "find_package", program)
        must(*consumer, f"-DCMAKE_PREFIX_PATH={prefix}", "-DLANGUAGES=C")
        must(self.cmake, "--build", program)
        print(must(program / "with_mha"), end="")
        asks = self.work / "left_out"
        linked = ["-I", prefix / "include", *prefix.glob("**/libmha.a")]
        must(self.cc, tests / "consumers" / "left_out.c", *linked, "-o", asks)
        said = must(asks, self.left_out)
        print(said, end="")
        expected = (
            "MHA_ERROR_INSTRUCTION_SET: this build of the library has no kernels for"
            f" {self.left_out};"
        )
        if not said.startswith(expected):
            sys.exit(f"It should say: {expected} ...")


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("test", choices=["nothing", "choices", "no_build_type", "static_only"])
parser.add_argument("--work", required=True, help="the folder to work in")
parser.add_argument("--cc", required=True)
parser.add_argument("--cxx", required=True)
parser.add_argument("--cmake", required=True)
parser.add_argument("--generator", required=True)
parser.add_argument("--make", required=True, help="CMAKE_MAKE_PROGRAM")
parser.add_argument("--xsimd", required=True, help="MHA_XSIMD_INCLUDE_DIR")
parser.add_argument(
    "--left-out",
    required=True,
    help="the instruction set that is left out: the best of the architecture",
)
arguments = parser.parse_args()
getattr(Build(arguments), arguments.test)()
