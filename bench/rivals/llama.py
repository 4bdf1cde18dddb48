#!/usr/bin/env python3
"""Measures llama.cpp with and without the module libggml-mha.so: its flash attention, recurrent attention and
products with Q4_0 weights as one operation each, and prompts and tokens of whole models.

llama.cpp is that of decoders.py, built from the source in the package llama-cpp-python. Models: those
of decoders.py (random weights), or GGUF files. Settings take turns, each in a separate process:

  off   -fa 0        on   -fa 1        mha   -fa 1 with the module
"""

import json
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
from decoders import call, files, llama, prepare, shapes, source, versions  # noqa: E402
from session import Failed, about, build, keep, parser_for, run_main, say, take_turns, work  # noqa: E402

examples = """Examples:
  build/rivals/venv/bin/python bench/rivals/llama.py --models 768.F16 768.Q4_0 SmolLM2.gguf   all figures of the page
  build/rivals/venv/bin/python bench/rivals/llama.py --parts operation --threads 1
  build/rivals/venv/bin/python bench/rivals/llama.py --models SmolLM2.gguf --depths 0 4096

Results go to build/rivals/llama.json.
Exit status: 0 success; 2 wrong usage; 4 a requirement is missing.
"""

module = build / "tools" / "adapters" / "ggml" / "libggml-mha.so"
settings = {"off": (0, None), "on": (1, None), "mha": (1, module)}
# heads, kv heads, width of a head, queries, keys, type (1: f16, 8: q8_0)
operations = [(heads, kv_heads, width, queries, 4096, kind) for heads, kv_heads, width in ((9, 3, 64), (32, 8, 128)) for queries in (512, 1)
              for kind in (1, 8)]
# heads, key heads, width of a head, tokens, width of a decay
recurrent = [(heads, 16, 128, tokens, 1) for heads in (16, 32) for tokens in (1024, 4096)]
# rows, inputs, outputs, type (2: q4_0)
products = [(rows, 2048, 5632, 2) for rows in (512, 1)]


def pinned(threads):
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    return {"preexec_fn": lambda: os.sched_setaffinity(0, cores)}


def environment(path):
    return {**{name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}, **({"GGML_BACKEND_PATH": str(path)} if path else {})}


def time_operation(device, threads, shape):
    rounds = 200 if 1 in shape[:-1] else 5
    said = call(work / "llama_operation", device, threads, rounds, *shape, env=environment(module), **pinned(threads)).stdout
    return {"call": min(map(float, said.split()))}


def time_model(setting, model, threads, prompt, tokens, depths):
    """{"prompt": seconds a token, "token at DEPTH": seconds a token}."""
    flash, path = settings[setting]
    bench = [llama / "llama-bench", "-m", model, "-t", threads, "-fa", flash, "-r", 1, "-o", "json", "-ngl", 0]
    found = {}
    if prompt:
        part, = json.loads(call(*bench, "-p", prompt, "-n", 0, env=environment(path), **pinned(threads)).stdout)
        found["prompt"] = part["avg_ns"] / 1e9 / prompt
    if depths:
        said = call(*bench, "-p", 0, "-n", tokens, "-d", ",".join(map(str, depths)), env=environment(path), **pinned(threads)).stdout
        for part in json.loads(said):
            found[f"token at {part['n_depth']}"] = part["avg_ns"] / 1e9 / tokens
    return found


def main():
    parser = parser_for(__doc__, examples, 3, "llama")
    parser.add_argument("--parts", nargs="+", choices=("operation", "models"), default=["operation", "models"])
    parser.add_argument("--models", nargs="+", default=["768.F16"], metavar="MODEL", help="SHAPE.TYPE of decoders.py, or a file (default: 768.F16)")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt; 0 = none (default: 4096)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens after it (default: 16)")
    parser.add_argument("--depths", type=int, nargs="*", default=[0, 512, 2048, 4096], help="tokens before them (default: 0 512 2048 4096)")
    options = parser.parse_args()
    if not module.exists():
        raise Failed(f"{module} is missing; build it: cmake --build build --target ggml-mha")
    names = {name: name.split(".") for name in options.models if name.split(".")[0] in shapes}
    prepare([shape for shape, _ in names.values()])
    call("c++", "-std=c++17", "-O2", pathlib.Path(__file__).with_name("llama_operation.cpp"), "-I", source / "ggml" / "include", "-L", llama,
         f"-Wl,-rpath,{llama}", "-lggml", "-lggml-base", "-o", work / "llama_operation")
    for threads in options.threads:
        for shape in operations + recurrent + products if "operation" in options.parts else ():
            devices = {"on": "CPU", "mha": "MHA_Q4_0" if shape in products else "MHA"}
            runs = {name: lambda device=device: time_operation(device, threads, shape) for name, device in devices.items()}
            finish(options, ["llama operation", list(shape), threads], runs)
        for name in options.models if "models" in options.parts else ():
            model = files(names[name][0])[1][names[name][1]] if name in names else pathlib.Path(name)
            runs = {setting: lambda setting=setting: time_model(setting, model, threads, options.prompt, options.tokens, options.depths)
                    for setting in settings}
            finish(options, ["llama model", pathlib.Path(name).stem if name not in names else name, threads], runs)


def finish(options, key, runs):
    seconds, reasons = take_turns(runs, options.rounds, options.busy)
    keep(options.json, [{"key": key, "about": about(options.rounds, versions()), "seconds": seconds, "reasons": reasons}])
    for what in next(iter(seconds.values())):
        said = {name: statistics.median(times[what]) for name, times in seconds.items() if times}
        say(f"{key}, {what}: " + ", ".join(f"{name} {1e3 * value:.3f} ms ({1 / value:.1f}/s)" for name, value in said.items()))
    for name, reason in reasons.items():
        say(f"{key}, {name}: {reason}")


if __name__ == "__main__":
    run_main(main)
