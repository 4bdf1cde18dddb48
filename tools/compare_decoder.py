#!/usr/bin/env python3
"""Measures a whole decoder, tests/examples/decoder.c, beside the same model in PyTorch and in plain loops: the time of a prompt, and of each
token behind it. The model has random weights in float32, and Llama's shape. All have to choose the same tokens.

The programs run one after the other, round after round, each in a process of its own, and write what they took; written are tables of
medians. A run beside which other programs took more than a twentieth of the processors' time does not count, and is made again.

  mha       the example with the library; mha-f16 and so on keep the weights in fewer bits, and may choose other tokens
  pytorch   tools/compare/decoder_torch.py: torch.nn.functional, scaled_dot_product_attention, caches made in advance
  loops     tools/compare/decoder_loops.c: a product by two loops for each matrix, prompts token by token; cc -O3 -march=native -ffast-math
            -fopenmp
"""

import argparse
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root / "tools" / "compare"))
sys.dont_write_bytecode = True
import busy  # noqa: E402

examples = """Examples:
  tools/compare.py --install pytorch                           PyTorch into build/compare/venv: some gigabytes
  tools/compare_decoder.py                                     everything; some 10 minutes
  tools/compare_decoder.py --programs mha mha-f16 --rounds 3   without the others
  tools/compare_decoder.py --shape 3 256 4 4 688 2000 --prompts 20 --tokens 10 --rounds 1

Exit codes: 0 done; 1 a program chose other tokens; 2 wrong usage; 4 something cannot be built or run.
"""

arguments = argparse.ArgumentParser(description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--shape", type=int, nargs=6, default=[12, 768, 12, 12, 2048, 32000],
                       metavar=("LAYERS", "WIDTH", "HEADS", "KV_HEADS", "HIDDEN", "VOCABULARY"))
arguments.add_argument("--prompts", type=int, nargs="+", default=[512, 64], help="tokens of a prompt")
arguments.add_argument("--tokens", type=int, default=64, help="tokens behind it")
arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--programs", nargs="+", default=["mha", "pytorch", "loops", "mha-f16", "mha-int8"],
                       choices=["mha", "pytorch", "loops", "mha-f16", "mha-bf16", "mha-int8", "mha-int4"])
arguments.add_argument("--library", type=pathlib.Path, default=root / "build" / "src" / "libmha.a", help="build/src/libmha.a")
arguments.add_argument("--python", default=str(root / "build" / "compare" / "venv" / "bin" / "python"), help="an interpreter with torch")
arguments.add_argument("--work", type=pathlib.Path, default=root / "build" / "compare_decoder", help="a folder for the model and programs")
arguments.add_argument("--busy", type=float, default=0.05, help="the share of the processors that others may take; 1 = no run is made again")
arguments = arguments.parse_args()


def fail(sentence):
    print(sentence, file=sys.stderr)
    sys.exit(4)


def build(name, source, *flags):
    program = arguments.work / name
    command = [os.environ.get("CC", "cc"), "-std=c99", "-O3", source, "-I", root / "include", *flags, "-lm", "-pthread", "-o", program]
    if subprocess.run(list(map(str, command))).returncode:
        fail(f"{source} cannot be built, see above")
    return str(program)


def run(program, prompt, threads):
    """(seconds of the prompt, seconds of a token, tokens)"""
    file, count = str(prompt), str(arguments.tokens)
    model, heads = str(arguments.work / "model.safetensors"), str(arguments.shape[2])
    if program == "pytorch":
        command = [arguments.python, str(root / "tools" / "compare" / "decoder_torch.py"), model, heads, file, count, str(threads)]
    elif program == "loops":
        command = [programs["loops"], model, heads, file, count]
    else:
        command = [programs["mha"], "run", model, heads, file, count, str(threads), program[4:] or "f32"]
    for attempt in range(4):
        others = busy.Others()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        found = re.search(r"^prompt (\S+) s, token (\S+) s$", done.stderr, re.MULTILINE)
        if done.returncode or not found:
            fail(f"{program} fails: {' '.join(command)}\n{done.stderr}")
        share = others.share()
        if share <= arguments.busy:
            return float(found[1]), float(found[2]), done.stdout.split()
        print(f"again: other programs took {100 * share:.0f}% of the processors beside {program}", file=sys.stderr, flush=True)
    fail("other programs take too much of the processors; stop them, or allow more of them with --busy")


arguments.work.mkdir(parents=True, exist_ok=True)
if not arguments.library.exists():
    fail(f"{arguments.library} is not there: cmake -S . -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target mha_static")
programs = {"mha": build("decoder", root / "tests" / "examples" / "decoder.c", str(arguments.library))}
if "loops" in arguments.programs:
    flags = ["-march=native", "-ffast-math", "-fopenmp"]
    programs["loops"] = build("decoder_loops", root / "tools" / "compare" / "decoder_loops.c", *flags)
if subprocess.run([programs["mha"], "write", str(arguments.work / "model.safetensors"), *map(str, arguments.shape)]).returncode:
    fail("the model cannot be written")

numbers = random.Random(1)
have_others = False
for threads in arguments.threads:
    for prompt_tokens in arguments.prompts:
        prompt = arguments.work / f"prompt{prompt_tokens}"
        prompt.write_text(" ".join(str(numbers.randrange(arguments.shape[5])) for _ in range(prompt_tokens)))
        results = {program: [] for program in arguments.programs}
        for number in range(arguments.rounds):
            for program in arguments.programs:
                results[program].append(run(program, prompt, threads))
                print(f"{threads} threads, {prompt_tokens} tokens, round {number + 1}: {program} {results[program][-1][:2]}",
                      file=sys.stderr, flush=True)
        print(f"\nPrompt of {prompt_tokens} tokens, then {arguments.tokens}; threads: {threads}\n")
        print("| | prompt, s | tokens/s of the prompt | ms a token | tokens/s | tokens |\n|---|---|---|---|---|---|")
        expected = results[arguments.programs[0]][0][2]
        for program, runs in results.items():
            prompt_seconds, seconds = (statistics.median(column) for column in list(zip(*runs))[:2])
            same = sum(a == b for a, b in zip(expected, runs[0][2]))
            is_same = all(tokens == expected for _, _, tokens in runs)
            have_others |= not is_same and "-" not in program
            print(f"| {program} | {prompt_seconds:.3f} | {prompt_tokens / prompt_seconds:.0f} | {1e3 * seconds:.2f} | {1 / seconds:.1f} | "
                  f"{'the same' if is_same else f'{same} of {len(expected)} the same'} |", flush=True)
sys.exit(1 if have_others else 0)
