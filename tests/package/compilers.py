"""Builds the library without CMake, with one compiler, as docs/building.md says. See compilers.py
--help.

Where its programs run here, the library must give the published results on each instruction set
that it should have. Elsewhere it is linked into a program, or compiled alone. Ends with 77 where
the compiler is missing.
"""

import argparse
import concurrent.futures
import itertools
import pathlib
import re
import shutil
import subprocess
import sys

import instruction_sets

source = pathlib.Path(__file__).resolve().parent.parent.parent
tests = source / "tests"
known_sets = instruction_sets.rows(source)
# Emulated processors of the second have everything; of the first, only sets with kernels are asked
# for.
of_x86, of_arm = ("x86_64", "any"), ("aarch64", "any")
x86 = [n for n, row in known_sets.items() if row.architecture in of_x86 and row.kernels == n]
arm = [name for name, row in known_sets.items() if row.architecture in of_arm]
native, built, compiled_alone = [], None, "compiled alone"
qemu = ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]
wine = ["env", "WINEDEBUG=-all", "WINEDLLOVERRIDES=mscoree,mshtml=", "wine"]
# Flags that make clang accept what Microsoft's compiler does: no extension of GCC. -mxsave is for
# _xgetbv, which Microsoft's compiler has without a flag.
plain = ["-DMHA_WITHOUT_EXTENSIONS", "-pedantic-errors", "-mxsave"]
# name: command, how its programs run, the instruction sets that they should have where the
# processor has them
known = {
    "g++/without_extensions": (["g++", *plain], native, x86),
    "clang++/without_extensions": (["clang++", *plain], native, x86),
    "aarch64-linux-gnu-g++": (["aarch64-linux-gnu-g++"], qemu, arm),
    "clang++/aarch64-linux-gnu": (
        ["clang++", "--target=aarch64-linux-gnu"],
        qemu,
        arm,
    ),
    "x86_64-w64-mingw32-g++-posix": (["x86_64-w64-mingw32-g++-posix", "-static"], wine, ["scalar"]),
}
known["g++/avx2_alone"] = (
    ["g++", "-DMHA_SETS_GIVEN", "-DMHA_HAS_AVX2"],
    native,
    ["scalar", "avx2"],
)
# Attention in tiles of two rows, for vectors too: a set with few registers has these.
two_rows = "g++/two_rows"
known[two_rows] = known["g++/avx2_alone"]
# Everything is compiled for one processor, as engines do. Elsewhere its programs do not run.
here = pathlib.Path("/proc/cpuinfo").read_text()
needed = {"x86-64-v2": "sse4_2", "x86-64-v3": " avx2 ", "x86-64-v4": " avx512bw "}
for compiler, march in itertools.product(("g++", "clang++"), (*needed, "native")):
    runs = native if needed.get(march, "") in here else built
    known[f"{compiler}/{march}"] = ([compiler, f"-march={march}"], runs, x86)
for target, runs, sets in [
    ("x86_64-windows-gnu", wine, x86),
    ("aarch64-windows-gnu", built, arm),
    ("aarch64-macos", built, arm),
    ("x86_64-macos", built, x86),
    ("x86_64-freebsd", built, x86),
    ("aarch64-freebsd", built, arm),
    ("x86-linux-musl", native, ["scalar"]),
    ("wasm32-wasi", compiled_alone, ["scalar"]),
]:
    known[f"zig/{target}"] = (
        [sys.executable, "-m", "ziglang", "c++", "-target", target, "-fno-sanitize=undefined"],
        runs,
        sets,
    )

# The code for Microsoft's compiler, by clang, which knows its keywords. The headers of the system
# come first, then the macros of Microsoft's compiler.
microsoft = "zig/x86_64-windows-gnu/microsoft"
known[microsoft] = ([*known["zig/x86_64-windows-gnu"][0], "-fms-extensions", "-mxsave"], wine, x86)
headers = """
    algorithm cmath complex cstdio cstring functional map memory sstream stdexcept string vector
    immintrin.h intrin.h math.h stdint.h
""".split()
prelude = (
    "".join(f"#include <{name}>\n" for name in headers)
    + "#define _MSC_VER 1940\n#define __INTRIN_H\n"
    + "".join(
        f"#undef {name}\n" for name in ("__GNUC__", "__clang__", "__MINGW32__", "__MINGW64__")
    )
)


def run(*command, refused=None):
    """Runs a command, and ends with its output if it fails; with `refused`, it must fail and print
    that."""
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if (done.returncode != 0 and not refused) or (
        refused and (done.returncode == 0 or refused not in done.stdout)
    ):
        sys.exit(
            f"{' '.join(map(str, command))} ends with"
            f" {done.returncode}{f'; it should say: {refused}' if refused else ''}:\n{done.stdout}"
        )
    return done.stdout


def is_there(command):
    try:
        return subprocess.run([*command, "--version"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--work", type=pathlib.Path, required=True, help="a folder that is emptied")
parser.add_argument("--launcher", default="", help="a compiler cache")
parser.add_argument(
    "--xsimd", type=pathlib.Path, default="/usr/include", help="the folder of xsimd/xsimd.hpp"
)
parser.add_argument(
    "compiler",
    help=(
        "a command such as g++ or clang++-19, whose programs run here, or one of"
        f" {', '.join(known)}"
    ),
)
arguments = parser.parse_args()
command, runs, sets = known.get(arguments.compiler, ([arguments.compiler], native, x86))
if not is_there(command) or (
    runs
    and runs is not compiled_alone
    and not shutil.which(next(word for word in runs if "=" not in word and word != "env"))
):
    print(f"{arguments.compiler} or what runs its programs is missing")
    sys.exit(77)

shutil.rmtree(arguments.work, ignore_errors=True)
(arguments.work / "include").mkdir(parents=True)
# And nothing else of that folder.
(arguments.work / "include" / "xsimd").symlink_to(arguments.xsimd / "xsimd")
flags = ["-O2", "-std=c++17", "-I", source / "include"]
xsimd = ["-isystem", arguments.work / "include"]
# A parent's flags are the library's. Its sizes are signed, and xsimd's are not.
warnings = ["-Werror=shadow", "-Werror=conversion", "-Wno-sign-conversion"]
table = (tests / "contract" / "checksums.txt").read_text()
rows = re.findall(r"^([0-9a-f]{16}) (.*)$", table, re.MULTILINE)
(arguments.work / "published.h").write_text(
    "".join(f'{{"{name}", 0x{digits}u}},\n' for digits, name in rows)
)
contract = re.search(r"^contract (\d+)$", table, re.MULTILINE).group(1)

if arguments.compiler == microsoft:
    (arguments.work / "prelude.h").write_text(prelude)
    flags += ["-include", arguments.work / "prelude.h"]
root = source
if arguments.compiler == two_rows:
    root = arguments.work
    shutil.copytree(source / "src", root / "src")
    shapes = root / "src" / "kernels" / "avx2.h"
    shapes.write_text(re.sub(r"attend_rows = \d", "attend_rows = 2", shapes.read_text()))
library = [*root.glob("src/*.cpp"), *root.glob("src/*/*.cpp")]
program = [
    tests / "package" / "compilers.cpp",
    tests / "contract" / "results.cpp",
    *(
        tests / "support" / f"{name}.cpp"
        for name in ("attention", "cache", "call", "layer", "strided")
    ),
]
of_program = [
    "-ffp-contract=off",
    "-I",
    tests,
    "-I",
    arguments.work,
    f"-DMHA_PUBLISHED_CONTRACT={contract}",
]


def compiled(path):
    object_file = arguments.work / f"{path.parent.name}_{path.name}.o"
    row = known_sets.get(path.stem)
    for_kernels = row.flags if row and row.kernels in sets else []
    run(
        *arguments.launcher.split(),
        *command,
        *flags,
        *for_kernels,
        *(of_program if path in program else (*xsimd, *warnings)),
        "-c",
        path,
        "-o",
        object_file,
    )
    return object_file


with concurrent.futures.ThreadPoolExecutor(2) as pool:
    objects = list(pool.map(compiled, library if runs is compiled_alone else library + program))
if runs is compiled_alone:
    sys.exit(0)
run(*command, *objects, "-o", arguments.work / "results.exe")

kernels = source / "src" / "kernels" / "avx2.cpp"
if runs == native and not any(word.startswith(("-march", "-target")) for word in command):
    run(
        *command,
        *flags[1:],
        *known_sets["avx2"].flags,
        *xsimd,
        "-fsyntax-only",
        kernels,
        refused="compile this file with -O2",
    )
    run(*command, *flags, *xsimd, "-fsyntax-only", kernels, refused="compile this file with -mavx2")
    run(
        *command,
        *flags,
        *xsimd,
        "-ffast-math",
        "-fsyntax-only",
        source / "src" / "tables" / "tables.cpp",
        refused="needs IEEE binary32 semantics",
    )
if runs is built:
    sys.exit(0)
said = run(*runs, arguments.work / "results.exe")
print(said)
missing = [name for name in sets if f"{name}: {len(rows)} of {len(rows)}" not in said]
has = {"avx2": " avx2 ", "avx512": " avx512bw "}
missing = [name for name in missing if name not in has or has[name] in here]
for name in re.findall(r"^(\w+): \d+ of", said, re.MULTILINE):
    if known_sets[name].kernels not in sets:
        sys.exit(f"{name} is built, which was not asked for")
if missing:
    sys.exit(f"These instruction sets are not built, or were not found: {', '.join(missing)}")
