"""Measures how large the kernels of an instruction set are, and whether loops keep sums in
registers.

For each object: the bytes that `size` calls text, the packed multiply-adds, the loads and stores of
vectors on the stack in loops, and the most instructions for 100 multiply-adds in loops with 48 or
more, which are those of many rows of floats. A loop is what lies between a branch back and its
target without another branch, with 8 multiply-adds or more. Fails above a budget."""

import argparse
import pathlib
import re
import subprocess
import sys

# compiler, instruction set -> bytes of text, packed multiply-adds, vectors on the stack in loops:
# some 2% more than there are; and instructions for 100 multiply-adds, some 1% more
budgets = {
    "GNU 12": {
        "avx2": (253_000, 1800, 11, 185),
        "avx2_vnni": (55_000, 312, 0, 0),
        "avx512": (312_000, 2780, 2, 169),
        "avx512_amx": (7_800, 2, 0, 0),
        "avx512_bf16": (30_200, 425, 0, 171),
        "avx512_vnni": (70_500, 385, 0, 0),
        "neon": (212_500, 2820, 2, 237),
        "neon_dotprod": (31_400, 212, 0, 0),
        "neon_i8mm": (32_200, 212, 0, 0),
    }
}
fma = re.compile(r"fml[as]\s+v|v(?:fn?m(?:add|sub)\d+p[sd]|dpbf16ps)\s.*%[yz]mm")
branch = re.compile(r"(?:b|b\.\w+|br|cbn?z|tbn?z|ret|j\w+)\s")
stack = re.compile(
    r"(?:(?:ld|st)(?:r|p|ur|1|np)\s+\{?\s*[qdsv]\d.*\[(?:sp|x29)\b|vmov[au]p[sd]\s.*\(%r[sb]p\))"
)


def output_of(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def figures(objdump, file):
    sections = re.findall(
        r"^ *\d+ \S+ +([0-9a-f]+) .*\bALLOC\b.*\bREADONLY\b",
        output_of(objdump, "-h", "-w", file),
        re.MULTILINE,
    )
    multiply_adds = spills = most = 0
    code, at = [], {}  # since the last branch or label: of an address, where it is in the code
    for line in output_of(objdump, "-d", "--no-show-raw-insn", file).splitlines():
        found = re.match(r" *([0-9a-f]+):\t(.*)", line)
        if not found:
            code, at = [], {}
            continue
        instruction = found.group(2) + " "
        multiply_adds += bool(fma.match(instruction))
        if branch.match(instruction):
            target = re.search(r"\b([0-9a-f]+) <", instruction)
            loop = code[at[target.group(1)] :] if target and target.group(1) in at else []
            in_loop = sum(bool(fma.match(each)) for each in loop)
            if in_loop >= 8:
                spills += sum(bool(stack.match(each)) for each in loop)
            if in_loop >= 48:
                most = max(most, -(-100 * (len(loop) + 1) // in_loop))
            code, at = [], {}
        else:
            at[found.group(1)] = len(code)
            code.append(instruction)
    return sum(int(size, 16) for size in sections), multiply_adds, spills, most


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--objdump", required=True)
parser.add_argument("--compiler", required=True, help=f"whose budgets hold: {', '.join(budgets)}")
parser.add_argument(
    "objects", nargs="+", help="objects of kernels, named after their instruction sets: avx2.cpp.o"
)
arguments = parser.parse_args()
if arguments.compiler not in budgets:
    print(f"SKIPPED: there are budgets for {', '.join(budgets)}, and none for {arguments.compiler}")
    sys.exit(77)
for file in arguments.objects:
    name = pathlib.Path(file).name.split(".")[0]
    found, most = figures(arguments.objdump, file), budgets[arguments.compiler][name]
    print(
        f"{name}: {found[0]} bytes of text, {found[1]} packed multiply-adds, {found[2]} vectors on"
        f" the stack in loops, {found[3]} instructions for 100 multiply-adds; at most {most}"
    )
    if any(one > limit for one, limit in zip(found, most)):
        sys.exit("That is above the budget in tests/package/code.py.")
