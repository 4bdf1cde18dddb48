#!/usr/bin/env python3
"""Compares one attention layer of mha, from input rows to output rows, with PyTorch, ONNX Runtime
and OpenVINO; and its attention alone with PyTorch, vLLM and llama.cpp.

  layers       float32, and what users of others get by default or often take; speed is a share of
               what the multiply-add units of the same cores do in the same round
  decode       one row over a KV cache, in float32; calls cycle through equal layers, more than the
               processor's cache holds, and speed is a share of the bandwidth of reading all weights
               and the whole cache
  arithmetic   causal layers in floats and in integers: the time, and the errors on normal rows and
               on rows with outliers
  attention    float32, from queries, keys and values to context; prompts
  attention_decode  the same for one query over a cache that each library made in its own form

Each library runs in a separate process, which is stopped while another one works; in each round,
each computes the shape once. A form whose result differs from that in double precision by more
than its bound is not measured, and the exit status is 1.

Samples are sorted by the state of the calling thread's core (bench/slots.py).
"""

import argparse
import contextlib
import json
import os
import pathlib
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile

sys.path[:0] = [str(folder) for folder in pathlib.Path(__file__).resolve().parents[:2]]
sys.dont_write_bytecode = True
import slots
from session import Failed, about, build, keep, root, run_main, say, take_turns, work

examples = """Examples:
  tools/bindings/python/setup.sh --rivals                         installs gigabytes of libraries
  build/rivals/venv/bin/python bench/rivals/layers.py layers      12 shapes on one thread
  build/rivals/venv/bin/python bench/rivals/layers.py layers --libraries mha PyTorch \\
      --shapes 1,1024,768,12 1,1500,512,8,uncausal
  build/rivals/venv/bin/python bench/rivals/layers.py decode --shapes 768,12,12,1024
  build/rivals/venv/bin/python bench/rivals/layers.py attention --threads 2
                                                                  with llama.cpp, which decoders.py
                                                                  --prepare builds

Results go to build/rivals/KIND.json and replace older ones of the same shape; report.py writes
tables and pictures of them.
Exit status: 0 success; 1 a result is wrong; 2 wrong usage; 4 a requirement is missing.
"""

# Each form with its largest rms error on normally distributed rows, relative to the result: some
# three times what it was measured to be, which a wrong mask, scale or head would pass by far.
exact, bf16, int4 = 1e-5, 0.02, {"int4_int16": 0.3, "int4_int8": 0.3}
forms = {
    "layers": {
        "mha": {"f32": exact, "bf16": bf16},
        "PyTorch": {
            "scaled_dot_product_attention": exact,
            "MultiheadAttention": exact,
            "bf16": bf16,
        },
        "ONNX Runtime": {"Attention": exact, "MultiHeadAttention": exact},
        "OpenVINO": {"scaled_dot_product_attention": exact, "default": bf16},
    },
    "decode": {
        "mha": {"f32": exact},
        "PyTorch": {"scaled_dot_product_attention": exact},
        "ONNX Runtime": {"GroupQueryAttention": exact},
    },
    **dict.fromkeys(
        ("attention", "attention_decode"),
        {
            "mha": {"f32": exact},
            "PyTorch": {"attention": exact},
            "vLLM": {"attention": exact},
            "llama.cpp": {"flash_attn_ext": exact},
        },
    ),
    "arithmetic": {
        "mha": {"f32": exact, "bf16": bf16, "int16": 0.04, "int8": 0.05, **int4},
        "PyTorch": {"scaled_dot_product_attention": exact, "bf16": bf16, "int8": 0.3},
        "ONNX Runtime": {
            "Attention": exact,
            "MultiHeadAttention": exact,
            "quantize_dynamic": 0.15,
            "QAttention": 0.15,
        },
        "OpenVINO": {"scaled_dot_product_attention": exact, "default": bf16, "int8": 0.12},
    },
}
all_libraries = list(dict.fromkeys(name for some in forms.values() for name in some))
# (batch, n, width, heads, kv heads, causal, past, and 1 for attention alone), as Shape of
# libraries.py
shapes = {
    "layers": [
        (*shape, shape[3], causal, 0)
        for causal, some in (
            (
                1,
                [
                    (1, 128, 256, 4),
                    (1, 128, 768, 12),
                    (1, 512, 768, 12),
                    (1, 1024, 768, 12),
                    (1, 2048, 1024, 16),
                    (8, 128, 768, 12),
                    (1, 1024, 2048, 16),
                    (1, 512, 4096, 32),
                ],
            ),
            (0, [(1, 197, 768, 12), (1, 77, 768, 12), (1, 1500, 512, 8), (1, 49, 96, 3)]),
        )
        for shape in some
    ],
    "decode": [
        (1, 1, *shape[:3], 1, shape[3])
        for shape in [(768, 12, 12, 1024), (2048, 32, 8, 4096), (4096, 32, 8, 8192)]
    ],
    "attention": [
        (1, n, width, heads, heads, causal, 0, 1)
        for causal in (1, 0)
        for width, heads in ((768, 12), (1024, 8))
        for n in (197, 512, 1024)
    ],
    "attention_decode": [
        (1, 1, *heads, 1, past, 1)
        for heads in ((768, 12, 12), (4096, 32, 8))
        for past in (1024, 4096, 8192)
    ],
    "arithmetic": [
        (*shape, shape[3], 1, 0)
        for shape in [
            (1, 128, 768, 12),
            (8, 128, 768, 12),
            (1, 1024, 768, 12),
            (1, 1024, 2048, 16),
            (1, 512, 4096, 32),
        ]
    ],
}
cell_seconds = 0.1  # for one form in one round; a call that takes longer is made twice
patience_seconds = 300  # for an answer of a library


class Worker:
    """A library in a separate process, which runs only while it answers; so do those that the
    library starts, which would outlive it otherwise."""

    def __init__(self, script, *words, **more):
        self.process = subprocess.Popen(
            list(map(str, [sys.executable, pathlib.Path(__file__).with_name(script), *words])),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            **more,
        )

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ask(self, request, **arguments):
        try:
            self.signal(signal.SIGCONT)
            self.process.stdin.write(json.dumps([request, arguments]).encode() + b"\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], patience_seconds)[0]:
                self.end()
                raise Failed(f"no answer in {patience_seconds} seconds")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self.process.wait()
            raise Failed(
                f"its process ended by {signal.Signals(-code).name}"
                if code < 0
                else f"its process ended with code {code}"
            )
        self.signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"].removeprefix("RuntimeError: "))
        return answer["answer"]

    def end(self):
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def build_helper(library, folder):
    """The shared object around libmha.so that libraries.py loads."""
    library, helper = pathlib.Path(library).resolve(), folder / "helper.so"
    command = [
        os.environ.get("CXX", "c++"),
        *"-std=c++17 -O3 -shared -fPIC -pthread".split(),
        *("-I", root / "include", "-I", root / "bench"),
        pathlib.Path(__file__).with_name("helper.cpp"),
        root / "bench" / "probes.cpp",
        library,
        f"-Wl,-rpath,{library.parent}",
        "-o",
        helper,
    ]
    if subprocess.run(list(map(str, command))).returncode:
        raise Failed(f"the helper cannot be built: {shlex.join(map(str, command))}")
    return helper


def work_of(shape):
    """(operations, bytes) of one call: nobody is credited with computing masked pairs, and all
    weights and keys are read once."""
    batch, n, width, heads, kv_heads, causal, past, alone = (*shape, 0)[:8]
    kv_width = width // heads * kv_heads
    weights, keys = (0, past or n) if alone else (2 * width * (width + kv_width), past + n)
    pairs = n * (n + 1) / 2 if causal and not past else n * keys
    return batch * (2 * n * weights + 4 * pairs * width), 4 * (weights + 2 * keys * kv_width)


def copies_of(shape):
    """How many layers with a cache take turns: 4 times what the largest cache of the processor
    holds."""
    sizes = [
        path.read_text().strip()
        for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    cache = max(
        [int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1:] in "KM"],
        default=32 << 20,
    )
    return max(1, -(-4 * cache // work_of(shape)[1])) if shape[6] else 1


def prepare(kind, shape, workers, rows, reasons, folder):
    """Lets every library make its forms of this shape, and compares each with the exact result.
    Returns the errors."""
    import libraries

    inputs, exact_file, errors = folder / "inputs", folder / "exact", {}
    # The last layers are those that are timed.
    for data in ["outliers"] * (kind == "arithmetic") + ["normal"]:
        libraries.make(libraries.Shape(*shape), data == "outliers", inputs, exact_file)
        for name, (library, form, bound) in rows.items():
            if name in reasons:
                continue
            try:
                error = workers[library].ask(
                    "load",
                    form=form,
                    shape=shape,
                    inputs=str(inputs),
                    exact=str(exact_file),
                    copies=copies_of(shape),
                )
            except Failed as failed:
                reasons[name] = str(failed)
                continue
            errors.setdefault(name, {})[data] = error
            if data == "normal" and not error <= bound:  # NaN too
                reasons[name] = (
                    f"WRONG: its result differs from that in double precision by {error:.1g}, more"
                    f" than {bound:g}"
                )
    return errors


def measure(kind, shape, cores, names, rounds, helper, folder):
    """One shape: libraries are started anew for each, so that their memory is freed. "limit" stands
    among the forms with its rate."""
    rows = {
        f"{library} {form}": (library, form, bound)
        for library in names
        for form, bound in forms[kind][library].items()
    }
    workers, versions, reasons = {}, {}, {}
    with open(folder / "log", "a") as log:
        try:
            for library in names:
                words = library, len(cores), ",".join(map(str, cores)), helper
                workers[library] = Worker("libraries.py", *words, stderr=log)
                try:
                    versions[library] = workers[library].ask("version")
                except Failed as failed:
                    if library == "mha":
                        raise
                    reasons.update(
                        (name, str(failed)) for name, row in rows.items() if row[0] == library
                    )
            errors = prepare(kind, shape, workers, rows, reasons, folder)
            for library in versions:  # now with the precision that its layers have by default
                with contextlib.suppress(Failed):
                    versions[library] = workers[library].ask("version")

            def run(library, form):
                return lambda: {
                    "samples": (
                        workers[library].ask("time", form=form, shape=shape, seconds=cell_seconds)
                    )
                }

            size = copies_of(shape) * work_of(shape)[1] if shape[6] else 0
            runs = {
                name: run(library, form)
                for name, (library, form, _) in rows.items()
                if name not in reasons
            }
            seconds, more = take_turns(
                {"limit": lambda: {"call": workers["mha"].ask("limit", size=size)}, **runs}, rounds
            )
        finally:
            for worker in workers.values():
                worker.end()
    return {
        "key": [kind, list(shape), len(cores)],
        "about": about(rounds, versions),
        "errors": errors,
        "states": by_state(seconds),
        "seconds": seconds,
        "reasons": {**reasons, **more},
    }


def by_state(seconds):
    """Puts the medians of rounds in the place of their samples, and returns {state: the same of the
    rounds in which each has samples in it}: at least a tenth."""
    samples = {name: what.pop("samples") for name, what in seconds.items() if "samples" in what}
    best = slots.best_of(
        [
            rates
            for rounds in samples.values()
            for some in rounds
            for _, *both in some
            for rates in both
        ]
    )
    found = {}
    for state in ("", *slots.STATES):
        some = {
            name: [
                [
                    taken
                    for taken, *rates in each
                    if not state or slots.state_of(*rates, best) == state
                ]
                for each in rounds
            ]
            for name, rounds in samples.items()
        }
        kept = [
            i
            for i in range(max(map(len, some.values()), default=0))
            if all(10 * len(some[name][i]) >= len(samples[name][i]) for name in some)
        ]
        if kept:
            found[state] = {
                name: {
                    "call": [
                        statistics.median(some[name][i]) if name in some else what["call"][i]
                        for i in kept
                    ]
                }
                for name, what in seconds.items()
                if name in some or what
            }
    seconds.update(found.pop("", {}))
    return found


def parse_shape(kind, text):
    fields, causal, has_past = text.split(","), 1, kind.endswith("decode")
    if kind in ("layers", "attention") and fields[4:] == ["uncausal"]:
        fields, causal = fields[:4], 0
    names = (
        "WIDTH,HEADS,KV_HEADS,PAST"
        if has_past
        else "BATCH,N,WIDTH,HEADS" + "[,uncausal]" * (kind != "arithmetic")
    )
    if len(fields) != 4 or not all(field.isdecimal() and int(field) for field in fields):
        raise Failed(f"'{text}' is not a shape of {kind}; write {names}")
    a, b, c, d = map(int, fields)
    shape = ((1, 1, a, b, c, 1, d) if has_past else (a, b, c, d, d, causal, 0)) + (
        1,
    ) * kind.startswith("attention")
    if shape[2] % shape[3] or shape[3] % shape[4]:
        raise Failed(f"'{text}': heads must divide the width, and kv heads the heads")
    return shape


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=forms)
    parser.add_argument(
        "--shapes",
        nargs="+",
        help=(
            "BATCH,N,WIDTH,HEADS[,uncausal], or over a cache WIDTH,HEADS,KV_HEADS,PAST (default:"
            " those of the page)"
        ),
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="threads on as many of the last cores (default: 1)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--libraries",
        nargs="+",
        choices=all_libraries,
        metavar="LIBRARY",
        help=", ".join(all_libraries) + " (default: all)",
    )
    parser.add_argument(
        "--mha",
        type=pathlib.Path,
        default=build / "src" / "libmha.so",
        metavar="FILE",
        help="the libmha.so to measure",
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="the file of results (default: build/rivals/KIND.json)",
    )
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= options.threads <= len(cores) or options.rounds < 1:
        parser.error(f"--threads must be 1 to {len(cores)} here, and --rounds 1 or more")
    options.cores = cores[-options.threads :]
    try:
        chosen = [parse_shape(options.kind, text) for text in options.shapes or []]
    except Failed as failed:
        parser.error(str(failed))
    options.shapes = list(dict.fromkeys(chosen)) or shapes[options.kind]
    options.libraries = ["mha"] + [
        name
        for name in options.libraries or forms[options.kind]
        if name != "mha" and name in forms[options.kind]
    ]
    options.json = options.json or work / f"{options.kind}.json"
    if not options.mha.is_file():
        parser.error(
            f"there is no {options.mha}; cmake --build build --target mha_shared builds it"
        )
    return options


def main(arguments=None):
    options = parse(arguments)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    is_wrong = False
    with tempfile.TemporaryDirectory(dir=options.json.parent) as folder:
        folder = pathlib.Path(folder)
        helper = build_helper(options.mha, folder)
        for shape in options.shapes:
            result = measure(
                options.kind,
                shape,
                options.cores,
                options.libraries,
                options.rounds,
                helper,
                folder,
            )
            keep(options.json, [result])
            for name, reason in result["reasons"].items():
                say(f"{options.kind} {shape}: {name} is not measured: {reason}")
            say(
                f"{options.kind} {shape}, {options.threads} threads: "
                + ", ".join(
                    f"{name} {1e3 * min(seconds['call']):.3g} ms"
                    for name, seconds in result["seconds"].items()
                    if seconds and name != "limit"
                )
            )
            is_wrong |= any(reason.startswith("WRONG") for reason in result["reasons"].values())
    return 1 if is_wrong else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run_main(main)
