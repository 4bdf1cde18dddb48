"""Checks that kernels compute nothing twice, which no result shows: a call executes at most a
multiple of its multiply-adds.

Valgrind counts the instructions of calls that the program of the performance gate makes, with the
instruction sets that valgrind knows.
"""

import argparse
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "gate"))
import perf_gate

# One row, a few and many; heads that share keys and values; keys and values of a cache and of the
# call; narrow types; layers. The numbers are the most instructions for each multiply-add with the
# scalar kernels, where an fma takes some ten operations, and with AVX2, which does eight at once.
# They are a third more than g++ 12 needs, which includes loads, softmax and widening.
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
    """The multiply-adds of a call whose rows attend to all keys."""
    size = shape.size
    return size["n"] * (
        2 * (size["past"] or size["n_kv"]) * size["H"] * size["head_dim"] + 4 * size["D"] ** 2
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", help="mha_gate")
    parser.add_argument("library", help="a libmha.so")
    arguments = parser.parse_args()
    if not shutil.which("valgrind"):
        print("SKIPPED: there is no valgrind here (Debian: valgrind)")
        sys.exit(77)
    too_many = False
    for i, name in enumerate(("scalar", "avx2")):
        calls = [perf_gate.Shape(f"{line} instruction_set={name}") for line in shapes]
        counts = perf_gate.counted(
            arguments.program, 0, arguments.library, [call.argument() for call in calls]
        )
        for call, limits, count in zip(calls, shapes.values(), counts):
            share, limit = count / multiply_adds(call), limits[i]
            print(
                f"{share:6.2f} of at most {limit:<5} {call.text}: {count} instructions"
                + (" -- too many" if share > limit else "")
            )
            too_many |= share > limit
    sys.exit(
        "A call executes more for each multiply-add than work_test.py allows." if too_many else 0
    )


main()
