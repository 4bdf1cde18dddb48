"""The inner loops of the kernels for NEON keep what they multiply and add up in registers. See linking_spills.py --help.

An inner loop is what leads from the target of a backward branch to that branch, with no other such branch inside of it; the loops meant are
those that multiply and add. Such a loop spills if it loads or stores a vector register at an address on the stack, for the loop then waits for
memory that it does not need.
"""

import argparse
import re
import subprocess
import sys

# What the disassembler prints: a label, or an address, a name and operands.
label = re.compile(r"^([0-9a-f]+) <(.*)>:$")
instruction = re.compile(r"^ *([0-9a-f]+):\s+(\S+)\s*(.*)$")
branch = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z)$")
leaves = re.compile(r"^(b|br|ret)$")  # and does not go on to the next instruction
multiply_add = re.compile(r"^fml[as]$")
memory = re.compile(r"^(ld|st)(r|p|ur|1|np)$")
vector_on_stack = re.compile(r"^\{?\s*[qdsv]\d+.*\[(sp|x29)\b")


def functions(text):
    """(name, instructions as (address, name, operands)) for each function."""
    name, body = None, []
    for line in text.splitlines():
        if found := label.match(line):
            if body:
                yield name, body
            name, body = found.group(2), []
        elif found := instruction.match(line):
            body.append((int(found.group(1), 16), found.group(2), found.group(3)))
    if body:
        yield name, body


def reached(begin, edges):
    """What the edges lead to, from `begin` on."""
    found, left = {begin}, [begin]
    while left:
        new = set(edges[left.pop()]) - found
        found |= new
        left += new
    return found


def inner_loops(body):
    """The instructions of each loop that has no loop inside. Code that only lies between a loop's two ends is no part of it."""
    index = {address: at for at, (address, _, _) in enumerate(body)}
    follow, loops = {}, {}
    for at, (_, name, operands) in enumerate(body):
        follow[at] = [] if leaves.match(name) else [at + 1]
        target = re.search(r"(?:^|, )([0-9a-f]+) <", operands) if branch.match(name) else None
        if target and int(target.group(1), 16) in index:
            follow[at].append(index[int(target.group(1), 16)])
    for end in follow:
        for begin in (to for to in follow[end] if to <= end):
            forward = {at: [to for to in follow[at] if begin <= to <= end] for at in range(begin, end + 1)}
            backward = {at: [] for at in forward}
            for at in forward:
                for to in forward[at]:
                    backward[to].append(at)
            if end in reached(begin, forward):
                loops[begin, end] = sorted(reached(begin, forward) & reached(end, backward))
    for begin, end in loops:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops):
            yield [body[at] for at in loops[begin, end]]


def hot_loops(text, least):
    """(function, loop, its spills) for each inner loop of at least so many multiply-adds, which are an eighth of it or more."""
    for name, body in functions(text):
        for loop in inner_loops(body):
            count = sum(bool(multiply_add.match(word)) for _, word, _ in loop)
            if count >= least and 8 * count >= len(loop):
                yield name, loop, [line for line in loop if memory.match(line[1]) and vector_on_stack.match(line[2])]


# The same loop with all in registers and with one sum on the stack, and one with other code between its ends: what this test is to tell apart.
example = """0000000000000000 <example>:
   0:	ldr	q2, [x0], #16
   4:	ldr	q3, [x1], #16
%s   c:	fmla	v0.4s, v2.4s, v3.s[0]
  10:	fmla	v1.4s, v2.4s, v3.s[1]
  14:	fmla	v4.4s, v2.4s, v3.s[2]
  18:	fmla	v5.4s, v2.4s, v3.s[3]
  1c:	cmp	x0, x2
  20:	b.ne	%s <example>  // b.any
  24:	str	q0, [sp, #16]
  28:	ret
  2c:	b	0 <example>
"""


def check_itself():
    for spill, back, expected in (("   8:	ldr	q0, [sp, #32]\n", "0", 1), ("   8:	stp	q0, q1, [sp, #-32]\n", "0", 1),
                                  ("   8:	ldr	q0, [sp, #32]\n", "2c", 1), ("   8:	ldr	x3, [sp, #32]\n", "0", 0), ("", "0", 0), ("", "2c", 0)):
        loops = list(hot_loops(example % (spill, back), 4))
        if [len(spills) for _, _, spills in loops] != [expected]:
            sys.exit(f"This test does not see spills where they are, or sees some where none are: {loops}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objdump", required=True, help="the disassembler for AArch64")
    parser.add_argument("--least", type=int, default=8, help="the least multiply-adds of a loop that is looked at")
    parser.add_argument("object", help="the object file of the kernels")
    arguments = parser.parse_args()
    check_itself()
    done = subprocess.run([arguments.objdump, "-d", "-C", "--no-show-raw-insn", arguments.object], stdout=subprocess.PIPE, text=True, check=True)
    loops = list(hot_loops(done.stdout, arguments.least))
    if not loops:
        sys.exit("No inner loop multiplies and adds: has the disassembler another form?")
    spilling = [(name, loop, spills) for name, loop, spills in loops if spills]
    for name, loop, spills in spilling:
        print(f"{name}\n  at {loop[0][0]:x}: {len(loop)} instructions, {len(spills)} loads and stores of vector registers on the stack, such as "
              f"{spills[0][1]} {spills[0][2]}")
    print(f"{len(loops)} inner loops multiply and add; {len(spilling)} of them spill")
    sys.exit(bool(spilling))


if __name__ == "__main__":
    main()
