"""How many innermost loops the kernels of an instruction set have, and how large their object is. Fails if either is above its budget.

Counted by disassembling the object. Loops are natural loops of the flow of control: a branch to an instruction that all ways to the branch
pass (its head), and all from which that branch is reached without passing the head. (Counted by addresses alone, code that a compiler puts
out of the way, and that jumps back, would be a loop.) A loop is innermost if it has no other loop's head inside, and it counts if it has a
packed fma: on x86-64 a vfmadd, vfmsub, vfnmadd or vfnmsub of ymm or zmm registers, on AArch64 an fmla or fmls of vectors. Each copy of a loop
counts: those of the instances of a template, and those that the compiler made by inlining.

The text of an object is what `size` calls so: code, constants and the tables for unwinding.
"""

import argparse
import collections
import os
import re
import subprocess
import sys

from spills import functions

# The most that an instruction set may have: innermost loops with packed fma, and bytes of text. By compiler, since each has its own mind about
# inlining; kept for Release. A change that leaves less lowers the budget; one that needs more says what for.
budgets = {
    "GNU 12": {"avx2": (84, 152_500), "avx2_vnni": (0, 36_500), "avx512": (97, 172_500), "avx512_vnni": (0, 41_000),
               "neon": (75, 126_500), "neon_dotprod": (0, 34_000), "neon_i8mm": (0, 34_500)},
}

leaves = re.compile(r"^(jmp|b|br|ret[q]?|ud2)$")  # and does not go on to the next instruction
branch = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z|j\w+)$")
target = re.compile(r"(?:^|, )([0-9a-f]+) <")
packed_fma = re.compile(r"^(fml[as] +v.*|vfn?m(add|sub)(132|213|231)p[sd] .*%[yz]mm.*)$")


def flow(body):
    """Where control goes from each instruction of a function."""
    index = {address: at for at, (address, _, _) in enumerate(body)}
    follow = []
    for at, (_, name, operands) in enumerate(body):
        goes_on = not leaves.match(name) and at + 1 < len(body)
        found = target.search(operands) if branch.match(name) else None
        to = index.get(int(found.group(1), 16)) if found else None
        follow.append(([at + 1] if goes_on else []) + ([to] if to is not None else []))
    return follow


def ordered(follow):
    """The instructions that are reached, each before those it leads to but for branches back."""
    order, seen, left = [], {0}, [(0, iter(follow[0]))]
    while left:
        at, rest = left[-1]
        to = next((to for to in rest if to not in seen), None)
        if to is None:
            order.append(left.pop()[0])
        else:
            seen.add(to)
            left.append((to, iter(follow[to])))
    return order[::-1]


def innermost_loops(body):
    """The instructions of each loop of a function that has no other inside."""
    follow = flow(body)
    order = ordered(follow)
    place = {at: n for n, at in enumerate(order)}
    come_from = {at: [] for at in order}
    for at in order:
        for to in follow[at]:
            come_from[to].append(at)
    # The last instruction that all ways to an instruction pass before it (Cooper, Harvey and Kennedy's algorithm).
    above, changed = {0: 0}, True
    while changed:
        changed = False
        for at in order[1:]:
            known = [other for other in come_from[at] if other in above]
            found = known[0]
            for other in known[1:]:
                while found != other:
                    if place[found] > place[other]:
                        found = above[found]
                    else:
                        other = above[other]
            changed |= above.get(at) != found
            above[at] = found

    def passes(head, at):
        while place[at] > place[head]:
            at = above[at]
        return at == head

    loops = {}
    for at in order:
        for head in (to for to in follow[at] if passes(to, at)):
            loop, left = loops.setdefault(head, {head}), [at]
            while left:
                inside = left.pop()
                if inside not in loop:
                    loop.add(inside)
                    left += come_from[inside]
    for head, loop in loops.items():
        if not any(other in loop for other in loops if other != head):
            yield [body[at] for at in sorted(loop)]


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


# A loop in a loop, both with fma, a loop of scalar fma, a loop without any, and code that jumps back without being one: one counts, and another
# for AArch64.
example = """0000000000000000 <x86_64>:
   0:	vfmadd231ps (%rax),%ymm1,%ymm0
   5:	vfmadd231ps (%rbx),%ymm1,%ymm0
   a:	jne    5 <x86_64+0x5>
   c:	jne    0 <x86_64>
   e:	vfmadd231ss (%rbx),%xmm1,%xmm0
  13:	jne    e <x86_64+0xe>
  15:	vaddps (%rbx),%zmm1,%zmm0
  1a:	jne    15 <x86_64+0x15>
  1c:	jne    30 <x86_64+0x30>
  1e:	vfmadd231ps (%rbx),%ymm1,%ymm0
  23:	ret
  30:	jmp    1e <x86_64+0x1e>

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
        if not text or not loops and "_" not in instruction_set:  # the products of codes alone may have none
            sys.exit(f"{file}: found {loops} innermost loops with packed fma and {text} bytes of text; has the disassembler another form?")
        most = budgets.get(arguments.compiler, {}).get(instruction_set, (loops, text))
        above |= loops > most[0] or text > most[1]
        print(f"{instruction_set}: {loops} innermost loops with packed fma (at most {most[0]}), {text} bytes of text (at most {most[1]})"
              if arguments.compiler in budgets else f"{instruction_set}: {loops} innermost loops with packed fma, {text} bytes of text")
        if arguments.list:
            for name, count in by_function.most_common():
                print(f"{count:6} {name}")
    if above:
        sys.exit("That is above the budget in tests/package/loops.py. Its option --list says where the loops are.")
    if arguments.compiler and arguments.compiler not in budgets:
        print(f"SKIPPED: there are budgets for {', '.join(budgets)}, and none for {arguments.compiler}")
        sys.exit(77)


main()
