"""The binary interface against the one that is written down in tests/package/abi, by abidiff. See abi.py --help.

check      fails with what changed if a program compiled before would break, and, where something was only added, until that is written down
write      writes it down, if CHANGELOG.md names what was added; never something that breaks programs
changes    that check tells breaking changes from additions: a field moved or of another type, a function removed; a field and a function added

check and changes exit with 77, which ctest shows as skipped, where there is no abidiff.

What is compared is the library without its kernels, which have nothing of the interface, compiled with what debuggers need.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parent.parent.parent


def output_of(*command, statuses=(0,)):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode not in statuses:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.returncode, done.stdout


def describe(source, work, cxx):
    """The public interface of the sources, as abidw writes it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    library, description = work / "libmha.so.0", work / "mha.abi"
    flags = ["-std=c++17", "-g", "-O0", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"]
    # The description is the same wherever the sources and the build folder are.
    flags += [f"-ffile-prefix-map={folder}/=" for folder in (source, work)]
    output_of(cxx, *flags, "-I", source / "src", "-I", source / "include", "-shared", "-Wl,-soname,libmha.so.0",
              f"-Wl,--version-script={source / 'src' / 'mha.map'}", *sorted((source / "src").glob("*.cpp")), "-o", library)
    output_of("abidw", "--exported-interfaces-only", "--headers-dir", source / "include", "--drop-private-types", "--no-show-locs",
              "--no-corpus-path", "--no-comp-dir-path", "--no-elf-needed", "--type-id-style", "hash", library, "--out-file", description)
    if absolute := re.search(r"path='(/[^']*)'", description.read_text()):
        sys.exit(f"The description of the interface names {absolute.group(1)}, a path of this machine.")
    return description


# What abidiff prints where functions were added, or members behind the end that a struct had. Any other line is about something that breaks.
harmless = [re.compile(pattern) for pattern in (
    r"(Functions|Variables) changes summary: 0 Removed", r"\d+ Added functions?:", r"\[A\] 'function .*'", r"\d+ functions? with some indirect sub-type change",
    r"\[C\] 'function .* has some indirect sub-type changes:", r"parameter \d+ of type '.*' has sub-type changes:", r"in (pointed to|unqualified underlying) type '",
    r"underlying type 'struct mha_\w+' changed:", r"type size changed from \d+ to \d+ \(in bits\)", r"type size hasn't changed", r"\d+ data member (insertion|change)s?:",
    r"type of '[^']*\* \w+' changed:",  # a pointer to something that grew
    r"'.*', at offset \d+ \(in bits\)$")]


def compare(before, now):
    """(what abidiff says, the lines of it about what breaks programs, the names that were added); all empty if there is no difference."""
    status, said = output_of("abidiff", "--no-default-suppression", before, now, statuses=(0, 4, 8, 12))
    breaks, added, size = [], [], 0
    for line in said.strip().splitlines() if status else []:
        line = line.strip()
        if line and not any(pattern.match(line) for pattern in harmless):
            breaks.append(line)
        if found := re.match(r"type size changed from (\d+)", line):
            size = int(found.group(1))
        if found := re.match(r"'.*?(\w+)(\[\d+\])?', at offset (\d+)", line):
            added.append(found.group(1))
            if int(found.group(3)) < size:
                breaks.append(f"{line}, inside of what the struct was")
        if found := re.match(r"\[A\] 'function .*?(\w+)\(", line):
            added.append(found.group(1))
    return said if status else "", breaks, added


def check(arguments, now):
    said, breaks, added = compare(arguments.description, now)
    if breaks:
        return ("Programs compiled against an earlier mha.h would break: functions never change, and structs only grow at their end.\n"
                + "\n".join(breaks) + f"\n\n{said}")
    if said:
        return f"The binary interface has grown by {', '.join(added)}. Name that in CHANGELOG.md, and write it down: python3 tests/package/abi.py write"
    return ""


def write(arguments, now):
    if arguments.description.exists():
        said, breaks, added = compare(arguments.description, now)
        if breaks:
            sys.exit(check(arguments, now))
        changes = (root / "CHANGELOG.md").read_text()
        for name in added:
            if not re.search(rf"\b{name}\b", changes):
                sys.exit(f"CHANGELOG.md does not name {name}, which is new.")
    arguments.description.parent.mkdir(exist_ok=True)
    shutil.copy(now, arguments.description)
    print(f"wrote {arguments.description}")


def changed(arguments, verdict, changes):
    """The interface of a copy of the sources with these changes."""
    source = arguments.work / verdict
    shutil.rmtree(source, ignore_errors=True)
    for folder in ("include", "src"):
        shutil.copytree(root / folder, source / folder)
    for file, pattern, replacement, _ in changes:
        text, count = re.subn(pattern, replacement, (source / file).read_text(), count=1, flags=re.MULTILINE)
        if count != 1:
            sys.exit(f"{file} has no {pattern}; bring abi.py up to date.")
        (source / file).write_text(text)
    return describe(source, source / "build", arguments.cxx)


def changes(arguments):
    """Of several changes at once, each has to be named among those that break programs, or among the additions; compiling takes long."""
    cases = {"would break": [("include/mha.h", r"^(  int64_t query_dim;.*\n)(  int64_t num_heads;.*\n)", r"\2\1", "query_dim"),
                             ("src/cpu.cpp", r"^uint32_t mha_contract", "static uint32_t contract", "mha_contract"),
                             ("include/mha.h", r"^  float scale;", "  int32_t scale;", "scale")],
             "has grown": [("include/mha.h", r"^\} mha_taps;", r"  float *newest;\n} mha_taps;", "newest"),
                           ("src/cpu.cpp", r"^uint32_t mha_contract",
                            'extern "C" MHA_API uint32_t mha_newest(void) { return 1; }\n\nuint32_t mha_contract', "mha_newest")]}
    for verdict, made in cases.items():
        said = check(arguments, changed(arguments, verdict.replace(" ", "_"), made))
        told = said.partition("\n\n")[0]  # without what abidiff says of everything
        for *_, what in made:
            if verdict not in told.partition("\n")[0] or not re.search(rf"\b{what}\b", told):
                sys.exit(f"The change of '{what}' should be one of which check says '{verdict}'. It says:\n{said or 'nothing'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", choices=["check", "write", "changes"])
    parser.add_argument("--cxx", default="g++", help="the compiler")
    parser.add_argument("--work", type=pathlib.Path, default=root / "build" / "abi", help="a folder to work in")
    parser.add_argument("--description", type=pathlib.Path, default=root / "tests" / "package" / "abi" / "mha-x86_64.abi", help="what is written down")
    arguments = parser.parse_args()
    if not shutil.which("abidiff"):
        print("SKIPPED: there is no abidiff here (Debian: abigail-tools)")
        sys.exit(1 if arguments.test == "write" else 77)
    if arguments.test == "changes":
        return changes(arguments)
    now = describe(root, arguments.work / arguments.test, arguments.cxx)
    if arguments.test == "write":
        return write(arguments, now)
    sys.exit(check(arguments, now) or 0)


main()
