"""Checks the text of the sources: operations in the kernels, extensions of C++, versions, promises
and layout. See sources.py --help."""

import argparse
import pathlib
import re
import subprocess
import sys

import instruction_sets

failures = []


def fail(path, sentence, number=None):
    place = path.relative_to(arguments.source), number
    failures.append(f"{':'.join(str(part) for part in place if part)} {sentence}")


def wide_lines(path, text, sentence, is_left_out=lambda line: False):
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > 100 and not is_left_out(line):
            fail(path, f"has {len(line)} columns; {sentence} have at most 100.", number)


def found_in_lines(text, patterns):
    """(number of the line, what was found, pattern)."""
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        for pattern in patterns:
            if found := re.search(pattern, line):
                yield number, found[0], pattern


# CONTRACT.md, section 1, rules these out in the kernels: operations of the vector library and
# approximate instructions that round differently from machine to machine, and libm. The kernels use
# the functions of ops.h and functions.h.
ruled_out = [
    (
        r"xsimd::(fma|fms|fnma|fnms)\b",
        "xsimd's fused operations round twice on some instruction sets. Use mul_add of ops.h.",
    ),
    (
        r"xsimd::f?(max|min)\b",
        (
            "xsimd's max and min treat NaN differently from machine to machine. Use compare and"
            " select."
        ),
    ),
    (
        r"xsimd::(reduce\w*|haddp?|hadd)\b|\breduce_(add|max|min)\s*\(",
        "xsimd adds lanes in an order that the contract does not define. Use sum16 of ops.h.",
    ),
    (
        r"xsimd::(exp\w*|log\w*|sinh?|cosh?|tanh?|sincos|a(sin|cos|tan)\w*|erfc?|\w*gamma|pow|cbrt|hypot)\b",
        "xsimd's functions differ from machine to machine. Use those of functions.h.",
    ),
    (
        r"xsimd::(sqrt|rsqrt|reciprocal|fast_\w+)\b",
        "xsimd's roots and reciprocals are approximate on some machines.",
    ),
    (
        r"\busing\s+namespace\s+xsimd\b|\busing\s+xsimd::(?!batch\b)",
        "Name xsimd's functions in full, so that this test sees them.",
    ),
    (
        r"\b_mm\d*_(mask_|maskz_)?(rcp|rsqrt|exp2a)\w*\s*\(|\bv(recp|rsqrt)[es]\w*\s*\(",
        "This instruction is approximate.",
    ),
    (
        r"\bstd::(exp\w*|log\w*|tanh|sqrt|fma|fmax|fmin|max|min|pow|accumulate|reduce)\b",
        "No function of the standard library takes part in the kernels' arithmetic.",
    ),
    (
        r"(?<![\w:.>])(__builtin_)?(exp|exp2|expm1|log|log2|log1p|tanh|pow|fmax|fmin|rint|nearbyint|round|floor|ceil)f\s*\(|(?<!\w)sqrtf\s*\(",
        (
            "No function of libm takes part in the kernels' arithmetic. __builtin_sqrtf is an"
            " instruction here, correctly rounded."
        ),
    ),
    (
        r"#\s*pragma\s+(STDC\s+FP_CONTRACT\s+ON|GCC\s+optimize)|__attribute__\s*\(\(\s*optimize",
        "This changes the arithmetic that the contract defines.",
    ),
]


def without_comments(text):
    blank = lambda found: re.sub(r"[^\n]", " ", found.group())
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)


def check_operations(arguments):
    """The kernels use no operation that the arithmetic contract rules out."""
    files = [
        path
        for path in sorted((arguments.source / "src" / "kernels").rglob("*"))
        if path.suffix in (".h", ".hpp", ".cpp", ".inc")
    ]
    if not files:
        sys.exit("There is no source in src/kernels.")
    for path in files:
        for number, found, pattern in found_in_lines(path.read_text(), dict(ruled_out)):
            fail(path, f"has {found}: {dict(ruled_out)[pattern]}", number)
    flags = r"-march=native|-ffast-math|-Ofast|-funsafe-math-optimizations"
    lists = (arguments.source / "src").rglob("CMakeLists.txt")
    for path in [arguments.source / "CMakeLists.txt", *sorted(lists)]:
        for flag in re.findall(flags, path.read_text()):
            fail(path, f"has {flag}, which no build of this library is to use.")


# Microsoft's compiler refuses these, and -pedantic-errors (compilers.py, without_extensions) does
# not.
extensions = [
    r"\b__(attribute|asm|extension|typeof|restrict|builtin_\w+|(atomic|sync)_\w+)\b",
    r"\b(asm|typeof)\b(?!/)",
    r"\b(_Pragma|vector_size|alloca)\b",
    r"#\s*pragma (?!once)",
]


def check_extensions(arguments):
    """Only src/compiler.h has extensions of C++, and every file of the library includes it."""
    files = [
        path
        for path in sorted((arguments.source / "src").rglob("*"))
        if path.suffix in (".h", ".cpp") and path.name != "compiler.h"
    ]
    if len(files) < 50:
        sys.exit(f"There are {len(files)} sources in src.")
    for path in files:
        for number, found, _ in found_in_lines(path.read_text(), extensions):
            fail(path, f"has {found}, which is not C++; give it a name in src/compiler.h.", number)
        included = re.findall(r'#include "(?!mha)([^"]+)"', without_comments(path.read_text()))
        if not included and path.parent.name != "openblas":
            fail(path, "includes no header of src; it should include compiler.h.")


def check_versions(arguments):
    """The header, CMake, the package files and the change log name one version."""
    header = (arguments.source / "include" / "mha.h").read_text()
    version = ".".join(
        re.search(rf"#define MHA_VERSION_{part} (\d+)", header).group(1)
        for part in ("MAJOR", "MINOR", "PATCH")
    )

    def expect(where, pattern, text):
        found = re.search(pattern, text, re.MULTILINE)
        if not found or found.group(1) != version:
            failures.append(
                f"{where} says {found.group(1) if found else 'no version'}, mha.h says {version}."
            )

    expect(
        "The first heading of CHANGELOG.md",
        r"^## (\d+\.\d+\.\d+)",
        (arguments.source / "CHANGELOG.md").read_text(),
    )
    expect("The project in CMakeLists.txt", r"(.*)", arguments.project_version)
    if arguments.package:
        expect("mha.pc", r"^Version: (.*)$", (arguments.package / "mha.pc").read_text())
        expect(
            "mhaConfigVersion.cmake",
            r'^set\(PACKAGE_VERSION "(.*)"\)$',
            (arguments.package / "mhaConfigVersion.cmake").read_text(),
        )


def check_promises(arguments):
    """Every test, file and option that promises.md names exists."""
    folder = arguments.source / "tests"
    lists = [arguments.source / "CMakeLists.txt", *folder.rglob("CMakeLists.txt")]
    words = {word for path in lists for word in re.findall(r"[\w+-]+", path.read_text())}
    words |= {path.stem for path in folder.glob("fuzz/*.cpp")}
    of_googletest = {
        found
        for path in folder.rglob("*.cpp")
        for found in re.findall(r"\bTEST(?:_[FP])?\((\w+, \w+)\)", path.read_text())
    }

    def is_name(part):  # alone, or put together: interface_${name}
        return (
            part in words
            or any(part[:i] in words and part[i:] in words for i in range(1, len(part)))
            or any(part in test for test in of_googletest)
        )

    rows = re.findall(
        r"^\|.*\|(.*)\|$",
        (arguments.source / "src" / "docs" / "promises.md").read_text(),
        re.MULTILINE,
    )
    for name in re.findall(r"`([^`]+)`", "".join(rows)):
        if "/" in name:
            there = (arguments.source / name.split()[0]).exists()
        elif name.endswith("..."):
            stem = name.removesuffix("...").split(".")[-1]
            there = any(word.startswith(stem) for word in words)
        else:
            there = all(is_name(part) for part in name.removesuffix("=ON").split("."))
        if not there:
            failures.append(f"promises.md names {name}, which is no test, file or option.")
    if len(rows) < 50:
        failures.append(f"promises.md has {len(rows)} rows that this test can read.")


def check_layout(arguments):
    """Lines of C, C++, Python, Rust, shell and CMake, of README.md and of building.md have at most
    100 columns, as has the text of the other pages, where every row belongs to a table. Links of
    pages lead to files and headings."""
    for page in [
        *arguments.source.glob("*.md"),
        *arguments.source.glob("[st]*/**/*.md"),
    ]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^():\s#]*)(?:#([^()\s]*))?\)", prose):
            leads_to = page.parent / target if target else page
            lines = leads_to.read_text().splitlines() if anchor and leads_to.exists() else []
            headings = {
                re.sub(r"[^\w -]", "", line.lower()).strip().replace("-", " ") for line in lines
            }
            if not leads_to.exists() or (anchor and anchor.replace("-", " ") not in headings):
                fail(page, f"links to {target}#{anchor}, which is not there.")
    for page in [
        *arguments.source.glob("*.md"),
        *arguments.source.glob("src/**/*.md"),
        *arguments.source.glob("tests/**/*.md"),
    ]:
        code = r"(?ms)^(```.*?^```|    .*?|\|.*?)$"
        text = re.sub(code, lambda found: "\n" * found[0].count("\n"), page.read_text())
        wide_lines(page, text, "text should", lambda line: "https://" in line)
        prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
        for row, below in re.findall(r"(?m)^(?<!\|\n)(\|.*)\n(.*)", prose):
            if not re.fullmatch(r"\|[ :|-]+\|", below):
                fail(page, f"has a row after a blank line, which no table shows: {row[:60]}")
    # Cargo builds in tools/bindings/rust/target; what is in a folder vendor is as others wrote it.
    files = [
        path
        for folder in ("include", "src", "tests", "bench", "tools")
        for path in (arguments.source / folder).rglob("*")
        if re.search(r"\.(h|c|cpp|pyi?|rs|sh|bash|cmake|cmake\.in)$|/CMakeLists\.txt$", str(path))
        and not {"target", "vendor"} & set(path.relative_to(arguments.source).parts)
    ]
    # A word has no place to break, nor has a row of a table in Rust's documentation.
    unbroken = lambda line: len(line.split()) < 2 or line.startswith("//! |")
    pages = [arguments.source / page for page in ("README.md", "src/docs/building.md")]
    for path in sorted([*files, *pages]):
        wide_lines(path, path.read_text(), "it should", unbroken)


def check_format(arguments):
    """Python is as `ruff format` writes it, and passes the rules of pyproject.toml."""
    if not arguments.ruff.exists():
        print("ruff is missing; tools/bindings/python/setup.sh installs it", file=sys.stderr)
        sys.exit(77)
    for words in ["format", "--check"], ["check"]:
        command = [arguments.ruff, *words, "--quiet", "--no-cache", arguments.source]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            failures.append(f"ruff {' '.join(words)} says: {done.stdout.strip()}")


# What describes a call, and the files that write it (without their ending).
writers = {
    "SequenceArguments": ["check/entries", "check/recurrent", "check/request", "check/sequences"],
    "ScoredKeys": ["check/scores"],
    "AttentionRequest": ["check/entries", "check/request"],
    "AttentionPlan": ["plan/attention_plan"],
    "AttentionArrays": ["api/attention", "api/forward"],
    "AttentionRun": ["run/attend"],
}
# The folders and files of src, from the lowest floor up: each includes only what is below it. Those
# on one floor don't include each other.
floors = "compiler; contract; storage; kernels; base; cpu objects; plan; check run; api".split(";")
members = {
    "sequences": "SequenceArguments",
    "scored": "ScoredKeys",
    "request": "AttentionRequest",
    "plan": "AttentionPlan",
    "arrays": "AttentionArrays",
    "run": "AttentionRun",
}


def check_stages(arguments):
    """Only its own stage of a call writes a struct that describes the call; all other files take it
    as const. Includes lead downwards."""
    floor_of = {room: i for i, floor in enumerate(floors) for room in floor.split()}
    room_of = lambda path: path.relative_to(source).with_suffix("").parts[0]
    names, source = "|".join(writers), arguments.source / "src"
    for path in sorted([*source.rglob("*.h"), *source.rglob("*.cpp")]):
        stem = path.relative_to(source).with_suffix("").as_posix()
        text = without_comments(path.read_text())
        room = room_of(path)
        for name in re.findall(r'#include "(.+)"', path.read_text()):
            other = (path.parent / name).resolve()
            if other.exists() and source in other.parents and room_of(other) != room:
                if floor_of[room_of(other)] >= floor_of.get(room, len(floors)):
                    fail(path, f"includes {name}, which is not below it; see floors in sources.py.")
        written = [found[1] for found in re.finditer(rf"(?<!const )\b({names}) [*&]", text)]
        assigned = rf"(?:\.|->)({'|'.join(members)})(?:\.\w+)+ (?:[-+*|&]?=) "
        written += [members[found[1]] for found in re.finditer(assigned, text)]
        for name in sorted(set(written)):
            if stem not in writers[name]:
                owners = " and ".join(writers[name])
                fail(path, f"writes to {name}, which only {owners} should do; take it as const.")


def check_sets(arguments):
    """The header and Rust's bindings have the instruction sets of src/kernels/sets.def, by their
    numbers."""
    sets = {(row.constant, row.number) for row in instruction_sets.rows(arguments.source).values()}
    sets.add(("AUTO", "0"))
    header = (arguments.source / "include" / "mha_extra.h").read_text()
    declared = set(re.findall(r"#define MHA_INSTRUCTION_SET_(\w+) (\d+)u", header))
    rust = (arguments.source / "tools/bindings/rust/mha/src/types.rs").read_text()
    constants = set(re.findall(r"const (\w+): Self = Self\(sys::MHA_INSTRUCTION_SET_\1\)", rust))
    for what, difference in (
        ("include/mha_extra.h", declared ^ sets),
        ("Rust's InstructionSet", constants ^ {name for name, _ in sets}),
    ):
        if difference:
            failures.append(f"{what} and src/kernels/sets.def differ in {sorted(difference)}.")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--source",
    type=pathlib.Path,
    default=pathlib.Path(__file__).resolve().parent.parent.parent,
    help="the root of the sources",
)
checks = {name[6:]: check for name, check in globals().items() if name.startswith("check_")}
commands = parser.add_subparsers(required=True, metavar="|".join(checks))
parsers = {name: commands.add_parser(name, help=check.__doc__) for name, check in checks.items()}
for name, check in checks.items():
    parsers[name].set_defaults(check=check)
parsers["versions"].add_argument("--project-version", required=True, help="PROJECT_VERSION")
where = "where the build has put the package files"
parsers["versions"].add_argument("--package", type=pathlib.Path, help=where)
parsers["format"].add_argument("--ruff", type=pathlib.Path, required=True, help="the program")

arguments = parser.parse_args()
arguments.source = arguments.source.resolve()
arguments.check(arguments)
if failures:
    sys.exit("\n".join(failures))
