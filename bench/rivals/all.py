#!/usr/bin/env python3
"""Measures layers, attention, arithmetic, decoders and models beside other libraries again, part by
part, and writes their tables and pictures. Tables keep the figures of the processor that was
measured before.

Each run first builds what it measures, so that the figures name the commit that was measured;
commit your changes before. The results of a part stay in build/rivals, so that parts can be
measured one by one, each in under 10 minutes; the last part, report, writes the existing results.
Nothing else may run meanwhile.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
from session import commit, load, root, say, work

examples = """Examples:
  tools/bindings/python/setup.sh --rivals                        installs gigabytes of packages
  build/rivals/venv/bin/python bench/rivals/all.py               everything
  build/rivals/venv/bin/python bench/rivals/all.py --list        the parts; commits with results
  build/rivals/venv/bin/python bench/rivals/all.py --only prepare layers-1-small report
  build/rivals/venv/bin/python bench/rivals/all.py --rounds 1    quickly

Exit status: 0 success; 1 a part failed or a result is wrong, and the other parts are done; 2 wrong
usage; 4 the library could not be built.
"""
small = """1,128,256,4 1,128,768,12 1,512,768,12 1,1024,768,12 8,128,768,12 1,197,768,12,uncausal
    1,77,768,12,uncausal 1,1500,512,8,uncausal 1,49,96,3,uncausal"""
large = "1,2048,1024,16 1,1024,2048,16 1,512,4096,32"
parts = {"prepare": "decoders.py --prepare"}
for threads in "12":
    more = f"--threads {threads}"
    parts[f"layers-{threads}-small"] = f"layers.py layers {more} --shapes {small}"
    parts[f"layers-{threads}-large"] = f"layers.py layers {more} --shapes {large}"
    for kind in ("decode", "attention", "attention_decode"):
        parts[f"{kind}-{threads}"] = f"layers.py {kind} {more}"
    for shape in ("768", "2048"):
        parts[f"decoders-{threads}-{shape}"] = f"decoders.py {more} --shapes {shape}"
    for model in ("llama", "qwen3", "minilm"):
        parts[f"models-{threads}-{model}"] = f"models.py {more} --models {model}"
    parts[f"onnx-{threads}"] = f"onnx_models.py {more}"
for name, shapes in {
    "768": "1,128,768,12 8,128,768,12 1,1024,768,12",
    "2048": "1,1024,2048,16",
    "4096": "1,512,4096,32",
}.items():
    parts[f"arithmetic-{name}"] = f"layers.py arithmetic --shapes {shapes}"
parts["report"] = "report.py"


def show():
    """Each part with its command; and of which commits there are results."""
    for name, command in parts.items():
        print(f"{name:16} bench/rivals/{' '.join(command.split())}")
    print(f"\nThe sources are at commit {commit()}. Results exist for these commits:")
    for path in sorted(work.glob("*.json")):
        commits = sorted({result["about"]["commit"] for result in load(path)})
        print(f"{path.stem:16} {', '.join(commits)}")


def prepared():
    """Whether what is measured is there, of the sources as they are."""
    configure = "cmake -S . -B build --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DMHA_ONNX=ON"
    targets = "mha_shared mha_static mha_openmp mha_onnx"
    make = f"cmake --build build --parallel {os.cpu_count()} --target {targets}"
    commands = f"tools/adapters/onnx/headers.sh && {configure} && {make}"
    return subprocess.run(commands, shell=True, cwd=root, stdout=sys.stderr).returncode == 0


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the parts and the existing results; measure nothing",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=parts,
        metavar="PART",
        help="measure only these parts; the first run must include prepare",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="the rounds of each part (default: 15; decoders and models: 3, ONNX models: 7)",
    )
    parser.add_argument(
        "--busy",
        type=float,
        metavar="SHARE",
        help="the share of the processors that others may use (default: 0.05; not for layers)",
    )
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if options.list:
        show()
        return 0
    if not prepared():
        say("all.py: the library could not be built; see above")
        return 4
    failed, chosen = [], [name for name in parts if name in (options.only or parts)]
    for number, name in enumerate(chosen, 1):
        command, start = parts[name].split(), time.monotonic()
        say(f"{number} of {len(chosen)}: {name}")
        more = []
        if name not in ("prepare", "report"):
            more += ["--rounds", str(options.rounds)] * (options.rounds is not None)
            more += ["--busy", str(options.busy)] * (
                options.busy is not None and command[0] != "layers.py"
            )
        if subprocess.run(
            [sys.executable, pathlib.Path(__file__).with_name(command[0]), *command[1:], *more]
        ).returncode:
            failed.append(name)
        say(
            f"{name}: {'failed' if name in failed else 'done'} after"
            f" {time.monotonic() - start:.0f} s"
        )
    if failed:
        say(f"failed: {' '.join(failed)}; all.py --only {' '.join(failed)} measures them again")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
