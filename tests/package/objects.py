"""Checks what the compiled library contains: exported and undefined symbols, and sections. See
objects.py --help."""

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile

failures = []


def fail(sentence):
    failures.append(sentence)


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


# kind is nm's letter: capital for external, lower case for local, U undefined, W w V v weak, u
# unique.
Symbol = collections.namedtuple("Symbol", "name kind")
Section = collections.namedtuple("Section", "name size flags")


def symbols(nm, *arguments):
    for line in output_of(nm, "--portability", *arguments).splitlines():
        fields = line.split()
        if len(fields) >= 2 and len(fields[1]) == 1:
            yield Symbol(*fields[:2])


def lines_by_member(readelf, option, file):
    """(object, line) for what readelf prints about an object file, or about each object in an
    archive."""
    member = file
    for line in output_of(readelf, option, "--wide", file).splitlines():
        found = re.match(r"File: .*\((.*)\)", line)
        if found:
            member = found.group(1)
        else:
            yield member, line


def sections(readelf, file):
    """(object, index, section) for each section."""
    for member, line in lines_by_member(readelf, "--sections", file):
        found = re.match(
            r"\s*\[ *(\d+)\] (\S+)\s+\S+\s+[0-9a-f]+ [0-9a-f]+ ([0-9a-f]+)"
            r" [0-9a-f]+\s+([A-Za-z]*)\s",
            line,
        )
        if found:
            index, name, size, flags = found.groups()
            yield member, index, Section(name, int(size, 16), flags)


def variables(readelf, file):
    """(object, index of its section) -> the names of the variables there."""
    names = collections.defaultdict(list)
    for member, line in lines_by_member(readelf, "--symbols", file):
        found = re.match(r"\s*\d+: [0-9a-f]+ +\S+ (OBJECT|TLS|COMMON) +\S+ +\S+ +(\S+) (\S+)", line)
        if found:
            _, index, name = found.groups()
            names[member, index].append(name)
    return names


def is_weak(symbol):
    return symbol.kind in "WwVvu"


# What the library may take from elsewhere: libc's memory functions, formatting of error messages
# into a buffer, memory and its advice for mha_layer_create. The rest is what compilers add by
# themselves: libgcc's counting of bits and atomic operations, which are linked statically; the
# table of offsets of position-independent code; and, where the flags ask for them, checked memory
# functions and stack protectors.
memory_functions = r"memcpy|memset|memmove|memcmp|bcmp"
of_libgcc = r"__popcountdi2|__aarch64_\w+"
of_compilers = (
    r"_GLOBAL_OFFSET_TABLE_|__(memcpy|memset|memmove|snprintf|vsnprintf)_chk"
    r"|__stack_chk_(fail|guard)"
)
allowed_in_kernels = re.compile(
    rf"(_ZN3mha\d+(codes|pairs)_\w+|{memory_functions}|{of_libgcc}|{of_compilers})$"
)
allowed_in_library = re.compile(
    rf"({memory_functions}|strlen|strnlen|snprintf|vsnprintf|malloc|getauxval|syscall"
    rf"|posix_memalign|madvise|free|__errno_location|{of_libgcc}|{of_compilers})$"
)


def check_undefined(what, all_symbols, allowed):
    defined = {symbol.name for symbol in all_symbols if symbol.kind not in "Uwv"}
    for name in sorted({symbol.name for symbol in all_symbols if symbol.kind in "Uwv"} - defined):
        if not allowed.match(name):
            fail(
                f"{what} needs {name}, which is not among the functions that it may need (see"
                " allowed_in_* in linking_objects.py)."
            )


def check_sections(file, readelf):
    in_section = variables(readelf, file)
    seen = False
    for member, index, section in sections(readelf, file):
        seen = True
        if not section.size:
            continue
        if re.match(r"\.(init_array|fini_array|ctors|dtors|preinit_array)\b", section.name):
            fail(
                f"{member} has the section {section.name}: something is initialised when the"
                " program starts. Make it a constant."
            )
        # Constants without a name may lie in .data too: what an aggregate on the stack is
        # initialised with. Nothing writes there.
        elif (
            "W" in section.flags
            and "A" in section.flags
            and not section.name.startswith(".data.rel.ro")
        ):
            for name in in_section[member, index]:
                # src/cpu.cpp's, which each caller would set to the same.
                if not re.search(r"\d+sets_of_machineE", name):
                    fail(
                        f"{member} has the writable variable {name} in {section.name}. The library"
                        " has none of this name: make it a constant."
                    )
    if not seen or not in_section:
        sys.exit(
            f"no section or no variable found in {file}: has the output of {readelf} another form?"
        )


def check_exports(arguments):
    """The shared library exports the functions of the headers, and nothing else, and calls its own.
    (abi.py has that none is taken away.)"""
    text = "\n".join(header.read_text() for header in sorted(arguments.include.glob("*.h")))
    expected = set(re.findall(r"^MHA_API [\w ]+?\**(mha_\w+)\(", text, re.MULTILINE))
    exported = set()
    if arguments.library.endswith(".dll.a"):  # what a DLL exports, as its import library lists it
        exported = {
            symbol.name
            for symbol in symbols(arguments.nm, "--defined-only", arguments.library)
            if symbol.kind == "T"
        }
    else:
        for symbol in symbols(arguments.nm, "--dynamic", "--defined-only", arguments.library):
            if symbol.kind != "A":  # the names of versions themselves
                exported.add(symbol.name.split("@")[0])
        for name in re.findall(
            r" (mha_\w+)", output_of(arguments.readelf, "--relocs", "--wide", arguments.library)
        ):
            fail(
                f"{arguments.library} looks up its own {name} when it is loaded, and may find"
                " another copy's. Link with -Bsymbolic-functions."
            )
    for name in sorted(exported - expected):
        fail(f"{arguments.library} exports {name}, which is no function of mha.h. Hide it.")
    for name in sorted(expected - exported):
        fail(f"{arguments.library} does not export {name}. Is it in the version script?")


def check_archive(arguments):
    """The static library needs libc only, has no writable data but the instruction sets of the
    machine, and defines only mha_* and names in the namespace mha."""
    all_symbols = list(symbols(arguments.nm, "--extern-only", arguments.library))
    if not any(symbol.name == "mha_forward" for symbol in all_symbols):
        sys.exit(
            f"mha_forward is not in {arguments.library}: has the output of {arguments.nm} another"
            " form?"
        )
    check_undefined(arguments.library, all_symbols, allowed_in_library)
    for symbol in all_symbols:
        # _ZN3mha..., _ZNK3mha..., _ZTVN3mha... are C++ names in the namespace mha.
        if (
            symbol.kind != "U"
            and not is_weak(symbol)
            and not re.match(r"mha_|_Z[A-Z]*N?K?3mha", symbol.name)
        ):
            fail(
                f"{arguments.library} defines {symbol.name}, which is neither mha_* nor in the"
                " namespace mha."
            )
    check_sections(arguments.library, arguments.readelf)


def check_kernels(arguments):
    """A kernel object holds tables and shares nothing with those of other instruction sets, so that
    the linker cannot mix them up."""
    weak_in = collections.defaultdict(list)
    for kernel in arguments.kernels:
        all_symbols = list(symbols(arguments.nm, "--extern-only", kernel))
        check_undefined(kernel, all_symbols, allowed_in_kernels)
        defined = [symbol for symbol in all_symbols if symbol.kind not in "Uwv"]
        strong = [symbol.name for symbol in defined if not is_weak(symbol)]
        if not strong or not all(
            re.match(r"_ZN3mha\d+(kernels|codes|pairs)_", name) for name in strong
        ):
            fail(
                f"{kernel} defines the external symbols {', '.join(strong)}. It must be its tables;"
                " the rest belongs into the unnamed namespace."
            )
        for symbol in defined:
            if is_weak(symbol):
                weak_in[symbol.name].append(kernel)
        check_sections(kernel, arguments.readelf)
    for name, kernels in sorted(weak_in.items()):
        if len(kernels) > 1:
            fail(
                f"{' and '.join(kernels)} share the weak symbol {name}: the linker keeps one of"
                " them, which another processor may not be able to run."
            )


def check_moves(arguments):
    """Kernels for Windows, where the stack is aligned to 16 bytes, move no longer vector by an
    instruction for aligned memory."""
    for kernel in arguments.kernels:
        moves = re.findall(
            r"\tv?mov\w+ .*",
            output_of(arguments.objdump, "--disassemble", "--no-show-raw-insn", kernel),
        )
        if not moves:
            sys.exit(
                f"no move found in {kernel}: has the output of {arguments.objdump} another form?"
            )
        aligned = [
            move.strip()
            for move in moves
            if re.match(r"\tvmov(ap[sd]|dqa(32|64)?|nt\w+) .*\(.*", move)
            and re.search(r"%[yz]mm", move)
        ]
        if aligned:
            fail(
                f"{kernel} has {len(aligned)} moves that need aligned memory, such as {aligned[0]};"
                " src/CMakeLists.txt says how to avoid them."
            )


# What an object may not contain, by the instruction sets that it is not for. Objects other than
# kernels are for any processor of the architecture.
avx = r"v[a-z]\w*|.*%[yz]mm"
beyond_sse2 = (
    r"h?(add|sub)subp[sd]|h(add|sub)p[sd]|ph(add|sub)|pshufb|palignr|pabs|pmaddubsw|pmulhrsw|"
    r"psign|p?blend|pm(in|ax)(s[bd]|u[wd])|pmul(ld|dq)\b|ptest|round[ps][sd]|(insert|extract)ps|"
    r"p(ins|ext)r[bdq]|pmov[sz]x|dpp[sd]|mpsadbw|packusdw|pcmp(eqq|gtq|[ei]str)|popcnt|lzcnt|"
    r"crc32|movbe|lddqu|mov(ddup|s[hl]dup)|andn\b|bextr|bls|mulx|pdep|pext\b|rorx|s[ahr][lr]x\b|"
    r"bzhi"
)
evex = r".*(%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]|\{z\})"
vnni = r"(\{vex\}\s*)?vpdp"
rarer = (
    r"vpmadd52|vp(erm[bit]2?b|multishift|popcnt[bw]|compress[bw]|expand[bw]|sh[lr]d)"
    r"|vaes|vpclmul|vgf2|v(add|sub|mul|div|fn?m\w*)[ps]h\b"
)
amx = r".*%tmm|[ls][dt]tilecfg|tilerelease"
bf16 = r"vdpbf16|vcvtne"
arm_codes = (
    r"[su]dot|us?dot|[su]mmla|usmmla|bf(dot|mmla|cvt)|fmlal|f\w+\s+v\d+\.[48]h,.*v\d+\.[48]h,"
)
forbidden = {
    "x86-64": {
        "avx2": (evex, vnni, bf16, amx, rarer),
        "avx2_vnni": (evex, bf16, amx, rarer),
        "avx512": (vnni, bf16, amx, rarer),
        "avx512_vnni": (bf16, amx, rarer),
        "avx512_bf16": (vnni, amx, rarer),
        "avx512_amx": (vnni, bf16, rarer),
        None: (avx, beyond_sse2, amx),
    },
    "aarch64": {
        "neon_dotprod": (r"[su]mmla|usmmla|bf(dot|mmla|cvt)",),
        "neon_i8mm": (r"bf(dot|mmla|cvt)",),
        None: (arm_codes,),
    },
}


def check_instructions(arguments):
    """No object has an instruction of an instruction set that it is not for: what a processor lacks
    is not run."""
    member, seen, found = None, collections.Counter(), collections.defaultdict(list)
    text = output_of(arguments.objdump, "--disassemble", "--no-show-raw-insn", arguments.library)
    patterns = forbidden["aarch64" if "file format elf64-littleaarch64" in text else "x86-64"]
    patterns = {name: re.compile("|".join(parts)) for name, parts in patterns.items()}
    pattern = patterns[None]
    for line in text.splitlines():
        if line.startswith(" "):
            instruction = line.partition(":")[2].strip()
            seen[member] += 1
            if pattern.match(instruction):
                found[member].append(instruction)
        elif name := re.match(r"(?:.*\()?(\w+)\.(?:cpp|c)\.o(?:bj)?\)?:\s+file format", line):
            member = name[1]
            pattern = patterns.get(member, patterns[None])
    if not {"cpu", "scalar"} <= set(seen):
        sys.exit(
            f"no instructions of cpu and scalar found in {arguments.library}: has the output of"
            f" {arguments.objdump} another form?"
        )
    for member, instructions in sorted(found.items()):
        fail(
            f"{member} has {len(instructions)} instructions that are not for every processor it"
            f" runs on, such as: {' '.join(instructions[0].split())}"
        )


# KiB of the stripped shared library, built as MinSizeRel for x86-64: more is a failure.
size_budget = 527


def check_size(arguments):
    """Prints the size of the stripped shared library, and compares it with the budget of the
    smallest build."""
    with tempfile.NamedTemporaryFile() as stripped:
        output_of(arguments.strip, "-o", stripped.name, arguments.library)
        kib = os.path.getsize(stripped.name) / 1024
    print(
        f"{os.path.basename(arguments.library)}: {kib:.0f} KiB stripped,"
        f" {arguments.config or 'no build type'}, {arguments.processor}"
    )
    if (arguments.config, arguments.processor) == ("MinSizeRel", "x86_64") and kib > size_budget:
        fail(f"{arguments.library} has {kib:.0f} KiB stripped, more than {size_budget} KiB.")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--nm", default="nm")
parser.add_argument("--readelf", default="readelf")
commands = parser.add_subparsers(
    required=True, metavar="exports|archive|kernels|instructions|moves|size"
)
command = commands.add_parser("exports", help=check_exports.__doc__)
command.add_argument(
    "--include", required=True, type=pathlib.Path, help="the folder of the headers"
)
command.add_argument("library", help="libmha.so, or libmha.dll.a")
command.set_defaults(check=check_exports)
command = commands.add_parser("archive", help=check_archive.__doc__)
command.add_argument("library", help="libmha.a")
command.set_defaults(check=check_archive)
command = commands.add_parser("kernels", help=check_kernels.__doc__)
command.add_argument("kernels", nargs="+", help="the object files of the kernels")
command.set_defaults(check=check_kernels)
command = commands.add_parser("instructions", help=check_instructions.__doc__)
command.add_argument("--objdump", required=True)
command.add_argument("library", help="libmha.a")
command.set_defaults(check=check_instructions)
command = commands.add_parser("moves", help=check_moves.__doc__)
command.add_argument("--objdump", required=True)
command.add_argument(
    "kernels", nargs="+", help="the object files of the kernels for AVX2 and AVX-512"
)
command.set_defaults(check=check_moves)
command = commands.add_parser("size", help=check_size.__doc__)
command.add_argument("--strip", default="strip")
command.add_argument("--config", default="", help="the build type")
command.add_argument("--processor", default="", help="that the library is for")
command.add_argument("library", help="libmha.so")
command.set_defaults(check=check_size)

arguments = parser.parse_args()
arguments.check(arguments)
if failures:
    sys.exit("\n".join(failures))
