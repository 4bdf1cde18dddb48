"""How many innermost loops the kernels of an instruction set have, and how large their object is. Fails if either is above its budget.

Counted by disassembling the object. A loop is a backward branch: its body leads from the branch's target to the branch, by address. It is
innermost if no other loop of the function lies within its body, and it counts if its body has a packed fma: on x86-64 a vfmadd, vfmsub, vfnmadd
or vfnmsub of ymm or zmm registers, on AArch64 an fmla or fmls of vectors. Each copy of a loop counts: those of the instances of a template,
and those that the compiler made by inlining.

The text of an object is what `size` calls so: code, constants and the tables for unwinding.
"""

import argparse
import collections
import os
import re
import subprocess
import sys

from linking_spills import functions

# The most that an instruction set may have: innermost loops with packed fma, and bytes of text. By compiler, since each has its own mind about
# inlining; kept for Release. A change that leaves less lowers the budget; one that needs more says what for.
budgets = {
    "GNU 12": {"avx2": (285, 214_000), "avx512": (270, 200_000), "neon": (162, 136_000)},
}

branch = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z|j\w+)$")
target = re.compile(r"(?:^|, )([0-9a-f]+) <")
packed_fma = re.compile(r"^(fml[as] +v.*|vfn?m(add|sub)(132|213|231)p[sd] .*%[yz]mm.*)$")


def innermost_loops(body):
    """The instructions of each loop of a function that has no other inside."""
    index = {address: at for at, (address, _, _) in enumerate(body)}
    loops = set()
    for end, (_, name, operands) in enumerate(body):
        found = target.search(operands) if branch.match(name) else None
        begin = index.get(int(found.group(1), 16)) if found else None
        if begin is not None and begin <= end:
            loops.add((begin, end))
    for begin, end in sorted(loops):
        if not any(begin <= other[0] and other[1] <= end for other in loops - {(begin, end)}):
            yield body[begin:end + 1]


def counted_loops(disassembly):
    """How many counted loops each function has."""
    count = collections.Counter()
    for name, body in functions(disassembly):
        count[name] += sum(any(packed_fma.match(f"{word} {operands}") for _, word, operands in loop) for loop in innermost_loops(body))
    return +count


def text_bytes(headers):
    """The sections that are in memory and not written to."""
    sizes = re.findall(r"^ *\d+ \S+ +([0-9a-f]+) .*\bALLOC\b.*\bREADONLY\b", headers, re.MULTILINE)
    return sum(int(size, 16) for size in sizes)


# A loop in a loop, both with fma, a loop of scalar fma, and a loop without any: one counts, and another for AArch64.
example = """0000000000000000 <x86_64>:
   0:	vfmadd231ps (%rax),%ymm1,%ymm0
   5:	vfmadd231ps (%rbx),%ymm1,%ymm0
   a:	jne    5 <x86_64+0x5>
   c:	jne    0 <x86_64>
   e:	vfmadd231ss (%rbx),%xmm1,%xmm0
  13:	jne    e <x86_64+0xe>
  15:	vaddps (%rbx),%zmm1,%zmm0
  1a:	jmp    15 <x86_64+0x15>

0000000000000000 <aarch64>:
   0:	fmla	v0.4s, v1.4s, v2.s[0]
   4:	cbnz	x0, 0 <aarch64>
   8:	fmadd	s0, s1, s2, s3
   c:	b.ne	8 <aarch64+0x8>  // b.any
"""


def output_of(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objdump", default="objdump", help="the disassembler for the objects' architecture")
    parser.add_argument("--compiler", help=f"whose budgets hold: {', '.join(budgets)}; without it, nothing fails")
    parser.add_argument("--list", action="store_true", help="print how many of the loops each function has")
    parser.add_argument("objects", nargs="+", metavar="object", help="an object of kernels, named after its instruction set: avx2.cpp.o")
    arguments = parser.parse_args()
    if counted_loops(example) != {"x86_64": 1, "aarch64": 1}:
        sys.exit(f"This test counts wrongly: {counted_loops(example)} in its own example")

    above = False
    for file in arguments.objects:
        instruction_set = os.path.basename(file).split(".")[0]
        by_function = counted_loops(output_of(arguments.objdump, "-d", "-C", "--no-show-raw-insn", file))
        loops, text = sum(by_function.values()), text_bytes(output_of(arguments.objdump, "-h", "-w", file))
        if not loops or not text:
            sys.exit(f"{file}: found {loops} innermost loops with packed fma and {text} bytes of text; has the disassembler another form?")
        most = budgets.get(arguments.compiler, {}).get(instruction_set, (loops, text))
        above |= loops > most[0] or text > most[1]
        print(f"{instruction_set}: {loops} innermost loops with packed fma (at most {most[0]}), {text} bytes of text (at most {most[1]})"
              if arguments.compiler in budgets else f"{instruction_set}: {loops} innermost loops with packed fma, {text} bytes of text")
        if arguments.list:
            for name, count in by_function.most_common():
                print(f"{count:6} {name}")
    if above:
        sys.exit("That is above the budget in tests/linking_loops.py. Its option --list says where the loops are.")
    if arguments.compiler and arguments.compiler not in budgets:
        print(f"SKIPPED: there are budgets for {', '.join(budgets)}, and none for {arguments.compiler}")
        sys.exit(77)


main()
