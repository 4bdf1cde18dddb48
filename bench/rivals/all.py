#!/usr/bin/env python3
"""Measures everything of this folder anew, and writes the tables and pictures of README.md and src/docs: some 45 minutes.

Each piece takes at most some 3 minutes. --through runs each by a command of yours, such as one that keeps other work off the machine. Pieces
that fail are named in the end, and the others' figures are written.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys

here = pathlib.Path(__file__).resolve().parent
small = ["1,128,256,4", "1,128,768,12", "1,512,768,12", "1,1024,768,12", "8,128,768,12", "1,197,768,12,uncausal", "1,77,768,12,uncausal",
         "1,1500,512,8,uncausal", "1,49,96,3,uncausal"]
large = ["1,2048,1024,16", "1,1024,2048,16", "1,512,4096,32"]
pieces = [["layers.py", "layers", "--threads", threads, "--shapes", *shapes] for threads in "12" for shapes in (small, large)]
pieces += [["layers.py", "decode", "--threads", threads] for threads in "12"]
pieces += [["layers.py", "arithmetic", "--rounds", "3", "--shapes", *shapes] for shapes in (
    ["1,128,768,12", "8,128,768,12", "1,1024,768,12"], ["1,1024,2048,16"], ["1,512,4096,32"])]
pieces += [["decoders.py", "--shapes", shape, "--threads", threads, "--rounds", "2"] for shape in ("768", "2048") for threads in "12"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--through", type=shlex.split, default=[], metavar="COMMAND", help="runs each piece")
through = parser.parse_args().through
failed = [piece for piece in [["decoders.py", "--prepare"], *([*piece] for piece in pieces), ["report.py"]]
          if subprocess.run([*(through if piece in pieces else []), sys.executable, here / piece[0], *piece[1:]]).returncode]
for piece in failed:
    print("failed:", shlex.join(piece), file=sys.stderr)
sys.exit(bool(failed))
