"""That kernels compute nothing twice, which no result would tell: what a call executes is at most a multiple of its multiply-adds.

Valgrind counts the instructions of calls that the program of the performance gate makes, with the instruction sets that valgrind knows.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile

# One row alone, a few and many; heads that share keys and values; keys and values of a cache and of the call; numbers of fewer bits; layers.
# With the most instructions that a multiply-add may take with the scalar kernels, to which an fma is some ten operations, and with AVX2, which
# does eight at once: a third more than g++ 12 needs, for loads, softmax, widened numbers and the rest too.
shapes = {
    "attention n=1 past=512 H=4 head_dim=64": (22, 0.52),
    "attention n=1 past=2000 H=1 head_dim=64": (22, 0.52),
    "attention n=1 past=2000 H=1 head_dim=64 kv_type=f16": (38, 0.69),
    "attention n=1 past=2000 H=1 head_dim=64 kv_type=int8": (35, 0.89),
    "attention n=1 past=512 H=8 kv_heads=1 head_dim=64": (19, 0.57),
    "attention n=1 past=520 H=7 kv_heads=1 head_dim=80 kv_type=bf16": (22, 0.7),
    "attention n=1 past=512 H=4 head_dim=72": (22, 0.55),
    "attention n=2 past=512 H=2 head_dim=64": (19, 0.69),
    "attention n=50 n_kv=300 H=1 head_dim=64": (20, 0.51),
    "layer n=1 D=192 H=3": (20, 0.44),
    "layer n=2 D=192 H=3": (18, 0.4),
    "layer n=7 D=192 H=3": (20, 0.47),
    "layer n=40 D=96 H=3": (19, 0.48),
}


def multiply_adds(shape):
    """Of a call whose rows attend to all keys."""
    kind, *words = shape.split()
    given = dict(word.split("=") for word in words)
    rows, heads, width = (int(given.get(name, 0)) for name in ("n", "H", "D"))
    keys = int(given.get("past") or given.get("n_kv") or rows)
    head_dim = int(given.get("head_dim") or width // heads)
    return 2 * rows * keys * heads * head_dim + (4 * rows * width * width if kind == "layer" else 0)


def instructions(program, library, calls):
    function = "mha_perf_gate_counted_call"
    with tempfile.TemporaryDirectory() as work:
        profile = os.path.join(work, "profile")
        done = subprocess.run(["valgrind", "--tool=callgrind", "--collect-atstart=no", f"--toggle-collect={function}",
                               f"--dump-after={function}", "--combine-dumps=yes", f"--callgrind-out-file={profile}", program,
                               "--counted-calls", "new", library, *calls], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"valgrind ended with status {done.returncode}:\n{done.stdout}")
        with open(profile) as lines:
            counts = [int(line.split()[1]) for line in lines if line.startswith("totals: ")]
    if len(counts) < len(calls) or 0 in counts[:len(calls)]:
        sys.exit(f"valgrind has not counted each of {len(calls)} calls:\n{done.stdout}")
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="mha_perf_gate")
    parser.add_argument("library", help="a libmha.so, of any tuning")
    arguments = parser.parse_args()
    if not shutil.which("valgrind"):
        print("SKIPPED: there is no valgrind here (Debian: valgrind)")
        sys.exit(77)
    too_many = False
    for i, name in enumerate(("scalar", "avx2")):
        calls = [f"{shape} instruction_set={name}" for shape in shapes]
        for call, shape, count in zip(calls, shapes, instructions(arguments.program, arguments.library, calls)):
            share, limit = count / multiply_adds(shape), shapes[shape][i]
            print(f"{share:6.2f} of at most {limit:<5} {call}: {count} instructions" + (" -- too many" if share > limit else ""))
            too_many |= share > limit
    sys.exit("A call executes more for each multiply-add than work_test.py allows." if too_many else 0)


main()
