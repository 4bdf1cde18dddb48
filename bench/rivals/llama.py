#!/usr/bin/env python3
"""Measures llama.cpp with and without the module libggml-mha.so: its flash attention, recurrent
attention and products with quantised weights as one operation each, and prompts and tokens of whole
models.

llama.cpp is that of decoders.py, built from the source in the package llama-cpp-python. Models:
those of decoders.py (random weights), or GGUF files; other types are made by llama-quantize.
Settings take turns, each in a separate process, which reads a prompt of 4,096 tokens and generates
some at depths on the way:

  off, on               -fa off, -fa on
  off plain, on plain   the same with --no-repack: no weights are reordered for products
  mha                   -fa on with the module

"""

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
from decoders import call, compile_with, files, llama, prepare, quantised, shapes, versions
from session import Failed, about, build, keep, load, parser_for, run_main, say, take_turns, work

examples = """Examples:
  build/rivals/venv/bin/python bench/rivals/llama.py \\
      --models {768,2048,SmolLM2.gguf}.{F16,Q8_0,Q4_0,Q4_K_M,Q6_K}  all figures of the page
  build/rivals/venv/bin/python bench/rivals/llama.py --parts operation --threads 1
  build/rivals/venv/bin/python bench/rivals/llama.py --parts models \\
      --models SmolLM2.gguf --threads 2 --rounds 1 --add          one more round

Results go to build/rivals/llama.json.
Exit status: 0 success; 2 wrong usage; 4 a requirement is missing.
"""

module = build / "tools" / "adapters" / "ggml" / "libggml-mha.so"
rivals = ("off", "on", "off plain", "on plain")
settings = (*rivals, "mha")
order = [
    f"{shape}.{kind}{variant}"
    for variant in ("", " AVX2")
    for shape in ("768", "2048", "SmolLM2")
    for kind in ("F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q4_K_M", "Q6_K")
]
# heads, kv heads, width of a head, queries, keys, type (1: f16, 8: q8_0)
operations = [
    (heads, kv_heads, width, queries, 4096, kind)
    for heads, kv_heads, width in ((9, 3, 64), (32, 8, 128))
    for queries in (512, 1)
    for kind in (1, 8)
]
# heads, key heads, width of a head, tokens, width of a decay
recurrent = [(heads, 16, 128, tokens, 1) for heads in (16, 32) for tokens in (1024, 4096)]
# rows, inputs, outputs, type (2: q4_0, 3: q4_1, 8: q8_0)
products = [(rows, 2048, 5632, kind) for kind in (2, 3, 8) for rows in (512, 1)]


def pinned(threads):
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    return {"preexec_fn": lambda: os.sched_setaffinity(0, cores)}


def environment(path):
    others = {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}
    return {**others, **({"GGML_BACKEND_PATH": str(path)} if path else {})}


def time_operation(device, threads, shape):
    rounds = 200 if 1 in shape[:-1] else 5
    words = [work / "llama_operation", device, threads, rounds, *shape]
    said = call(*words, env=environment(module), **pinned(threads)).stdout
    return {"call": min(map(float, said.split()))}


def time_model(setting, model, threads, options):
    """{"prompt": seconds a token, "token at DEPTH": seconds a token, "resident MB": memory}."""
    words = [
        work / f"llama_model{options.variant}",
        model,
        int(not setting.startswith("off")) + 2 * setting.endswith("plain"),
        threads,
        options.prompt,
        options.tokens,
        *options.depths,
    ]
    return json.loads(
        call(
            *words, env=environment(options.module if setting == "mha" else None), **pinned(threads)
        ).stdout
    )


def model_of(name):
    """(what results call it, its file) of SHAPE.TYPE, FILE.gguf.TYPE or FILE.gguf"""
    stem, _, kind = name.rpartition(".")
    if kind == "gguf":
        return pathlib.Path(stem).name, pathlib.Path(name)
    if stem in shapes:
        made = files(stem)[1]
        return name, made.get(kind) or quantised(made["F32"], kind)
    return f"{pathlib.Path(stem).stem}.{kind}", quantised(pathlib.Path(stem), kind)


def main():
    parser = parser_for(__doc__, examples, 3, "llama")
    parser.add_argument(
        "--parts", nargs="+", choices=("operation", "models"), default=["operation", "models"]
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["768.F16"],
        metavar="MODEL",
        help="SHAPE.TYPE or FILE.gguf.TYPE, or a file as it is (default: 768.F16)",
    )
    parser.add_argument(
        "--prompt", type=int, default=4096, help="tokens of the prompt (default: 4096)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens at each depth (default: 64)")
    parser.add_argument(
        "--depths",
        type=int,
        nargs="*",
        default=[0, 512, 2048, 4096],
        help="tokens before them (default: 0 512 2048 4096)",
    )
    parser.add_argument(
        "--add", action="store_true", help="add these rounds to those of the results"
    )
    parser.add_argument(
        "--variant",
        default="",
        help="the name of another build of both, such as AVX2, for models; with:",
    )
    parser.add_argument(
        "--llama", type=pathlib.Path, default=llama, help="the folder of its libraries"
    )
    parser.add_argument("--module", type=pathlib.Path, default=module, help="the module")
    options = parser.parse_args()
    if not options.module.exists():
        raise Failed(
            f"{options.module} is missing; build it: cmake --build build --target ggml-mha"
        )
    prepare({name.split(".")[0] for name in options.models} & set(shapes))
    models = dict(map(model_of, options.models))
    compile_with(llama, "llama_operation", "llama_operation")
    compile_with(options.llama, "llama_model", f"llama_model{options.variant}")
    for threads in options.threads:
        for shape in operations + recurrent + products if "operation" in options.parts else ():
            devices = {"on": "CPU", "mha": "MHA_WEIGHTS" if shape in products else "MHA"}
            runs = {
                name: lambda device=device, threads=threads, shape=shape: time_operation(
                    device, threads, shape
                )
                for name, device in devices.items()
            }
            finish(options, ["llama operation", list(shape), threads], runs)
        for label, model in models.items() if "models" in options.parts else ():
            runs = {
                setting: lambda setting=setting, model=model, threads=threads: time_model(
                    setting, model, threads, options
                )
                for setting in settings
            }
            finish(options, ["llama model", f"{label} {options.variant}".strip(), threads], runs)


def finish(options, key, runs):
    before = (
        next((result for result in load(options.json) if result["key"] == key), None)
        if options.add
        else None
    )
    seconds, reasons = take_turns(runs, options.rounds, options.busy)
    for name, times in seconds.items() if before else ():
        seconds[name] = {
            what: before["seconds"][name][what] + values for what, values in times.items()
        }
    rounds = options.rounds + (before["about"]["rounds"] if before else 0)
    keep(
        options.json,
        [{"key": key, "about": about(rounds, versions()), "seconds": seconds, "reasons": reasons}],
    )
    for name, reason in reasons.items():
        say(f"{key}, {name}: {reason}")


if __name__ == "__main__":
    run_main(main)
