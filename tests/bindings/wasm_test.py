#!/usr/bin/env python3
"""Tests the npm package mha-wasm: builds it, computes results by the native library, and has
wasm_test.mjs compare; or has Chromium recompute the published results, with both compilers of V8.
Skipped without what tools/bindings/wasm/setup.sh installs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from python_support import need, parser, root

folder = root / "build" / "wasm"
arguments = parser(__doc__, ("package", "page"), venv="wasm/venv").parse_args()
lacks = lambda what: print(f"skipped: {what}") or sys.exit(77)
if not (folder / "bin" / "node").exists():
    lacks("build/wasm is not there; tools/bindings/wasm/setup.sh installs it")
build = root / "tools" / "bindings" / "wasm" / "build.sh"
node = folder / "bin" / "node"
if arguments.test == "page":
    if not shutil.which("chromium"):
        lacks("chromium is not there; Debian: apt-get install chromium")
    subprocess.run([build, "--page"], check=True)
    for flags in [], ["--js-flags=--liftoff-only"], ["--js-flags=--no-enable-fma3"]:
        words = [node, "wasm_browser.mjs", folder / "page", "#run", *flags]
        found = subprocess.run(words, cwd=pathlib.Path(__file__).parent, stdout=subprocess.PIPE)
        print(*flags, text := found.stdout.decode().strip())
        if not re.match(r"(\d+) of \1 results agree", text):
            sys.exit("Chromium computes other bits")
    sys.exit()
need(["numpy"], arguments, "tools/bindings/wasm/setup.sh")

import mha
import numpy as np

random = np.random.default_rng(1)


floats = lambda *shape: random.uniform(-1, 1, shape).astype(np.float32)
camel = lambda name: re.sub("_(.)", lambda found: found[1].upper(), name)
js = lambda words: {camel(name): x for name, x in words.items()}
cases = {}


def plain(array):
    """As JSON has it: {"Float32Array": numbers}."""
    if array.dtype == np.float16:
        return {"data": plain(array.view(np.uint16)), "type": "f16"}
    return {f"{array.dtype.name.capitalize()}Array": array.ravel().tolist()}


def step(case, on, method, options, expected=None, name=None):
    """on.method(options), whose results have the bits that are expected."""
    if not isinstance(expected, dict):
        expected = {} if expected is None else {"output": expected}
    one = dict(on=on, method=method, options=options, expected=expected, name=name)
    cases.setdefault(case, []).append(one)


def layer_case(case, words, layer, options=None, want=(), **call):
    """A layer, called once; `layer` and `call` are Python's words for `words` and `options`."""
    x = floats(2, 5, 16)
    y, more = mha.Layer(**layer).forward(x, want=["lse", *want], **call)
    step(case, "mha", "layer", {"queryDim": 16, "numHeads": 4, **words}, name="layer")
    expected = {"output": y, **{camel(name): more[name] for name in want}}
    step(case, "layer", "forward", {"query": x, "batch": 2, **(options or {})}, expected)


# ---- Layers

w_qkv, w_o, b = floats(16, 48), floats(16, 16), floats(48)
weights = {"wQkv": {"data": w_qkv, "bias": b}, "wO": w_o}
same = dict(query_dim=16, num_heads=4, w_qkv=w_qkv, b_qkv=b, w_o=w_o)
for kind, arithmetic, group in ("f16", "f32", 0), ("int8", "int8", 0), ("int4", "int16", 32):
    form = {"type": kind, "arithmetic": arithmetic, "groupSize": group}
    how = dict(weight_type=kind, arithmetic=arithmetic, group_size=group)
    layer_case(f"a layer of {kind} in {arithmetic}", {**weights, "format": form}, {**same, **how},
               {"outputs": {"lse": True}}, ["lse"])  # fmt: skip
matrices = dict(w_q=floats(16, 16), w_k=floats(16, 8), w_v=floats(16, 8), w_o=w_o)
norm = dict(epsilon=1e-6, q_weight=floats(4, 4), k_weight=floats(2, 4))
score, rope = dict(softcap=3, sinks=floats(4)), mha.Rope.tables(4, num_positions=40)
tables = dict(cos=rope.cos, sin=rope.sin)
step("RoPE tables", "mha", "ropeTables", {"dims": 4, "numPositions": 40, "base": 1e4}, tables)
layer_case("options of a layer", {"numKvHeads": 2, **js(matrices)},
           dict(query_dim=16, num_heads=4, num_kv_heads=2, **matrices),
           {"causal": True, "windowLeft": 2, "rope": tables, "score": score, "norm": js(norm),
            "sequences": {"qLengths": [3, 5]}, "outputs": {"attentionWeights": True}},
           ["attention_weights"], is_causal=True, window_left=2, rope=rope,
           score=mha.ScoreOptions(**score), norm=mha.Norm(**norm), q_lengths=[3, 5])  # fmt: skip
half = floats(7, 16).astype(np.float16)
step("rows in f16", "mha", "layer", {"queryDim": 16, "numHeads": 4, **weights}, name="layer")
step("rows in f16", "layer", "forward", {"query": half}, mha.Layer(**same).forward(half))

w, scales = random.integers(-127, 128, (6, 64)).astype(np.int8), floats(6, 2)
product = mha.Linear(w, scales=scales, weight_type="int8", group_size=32, arithmetic="int8")
step("a product of codes", "mha", "linear", {"inputDim": 64, "outputDim": 6, "layout": "outIn",
     "type": "int8", "w": {"data": w, "scales": scales},
     "format": {"type": "int8", "groupSize": 32, "arithmetic": "int8"}}, name="l")  # fmt: skip
x, residual = floats(3, 64), floats(3, 6)
step("a product of codes", "l", "linear", {"x": x, "residual": residual},
     product(x, residual=residual))  # fmt: skip

q, k, v = floats(2, 6, 4, 8), floats(2, 9, 2, 8), floats(2, 9, 2, 8)
heads = {"numHeads": 4, "numKvHeads": 2, "headDim": 8, "batch": 2}
mask, bias = np.tri(6, 9, 2).astype(np.uint8), floats(2, 4, 6, 9)
slopes = mha.alibi_slopes(4)
score = mha.ScoreOptions(mask=mask.astype(bool), bias=bias, alibi_slopes=slopes)
step("masks", "mha", "attention", {**heads, "q": q, "k": k, "v": v,
     "score": {"alibiSlopes": slopes}, "scoreArrays": {"mask": mask, "bias": bias,
     "maskStrides": {"batch": "broadcast", "head": "broadcast"}}},
     mha.attention(q, k, v, score=score))  # fmt: skip
chosen = np.sort(random.integers(0, 9, (2, 2, 6, 4)).astype(np.int32))
step("chosen keys", "mha", "attention", {**heads, "q": q, "k": k, "v": v,
     "scoreArrays": {"chosenKeys": chosen}},
     mha.attention(q, k, v, score=mha.ScoreOptions(chosen_keys=chosen)))  # fmt: skip
step("packed sequences", "mha", "attention", {**heads, "batch": 1, "q": q[:1], "k": k[:1, :6],
     "v": v[:1, :6], "causal": True, "sequences": {"cuSeqlensQ": [0, 4, 6]}},
     mha.attention(q[:1], k[:1, :6], v[:1, :6], is_causal=True,
                   cu_seqlens_q=[0, 4, 6]))  # fmt: skip
q, k, w = floats(1, 6, 4, 8), floats(1, 6, 1, 8), floats(1, 6, 4)
step("choosing keys", "mha", "chooseKeys", {"attention": {"numHeads": 4, "numKvHeads": 1,
     "headDim": 8, "causal": True, "q": q, "k": k}, "weights": w, "numChosen": 3},
     {"chosenKeys": mha.choose_keys(q, w, 3, k[:, :, 0], is_causal=True)})  # fmt: skip

# ---- Caches: a prompt, then single rows

common = dict(num_kv_heads=2, head_dim=4)
kinds = {
    "contiguous": dict(num_sequences=2, capacity=8),
    "contiguous of int8 and int4": dict(num_sequences=2, capacity=8, k_type="int8", v_type="int4"),
    "ring": dict(num_sequences=2, capacity=16, kind="ring"),
    "paged": dict(num_sequences=2, capacity=32, kind="paged", block_positions=16, num_blocks=4),
}
attention = {"numHeads": 4, "numKvHeads": 2, "headDim": 4, "batch": 2, "causal": True}
for name, room in kinds.items():
    case, cache = f"a cache, {name}", mha.KvCache(**common, **room)
    step(case, "mha", "kvCache", js({**common, **room}), name="cache")
    for sequence, blocks in enumerate([[2], [0, 3]] if name == "paged" else []):
        cache.set_blocks(sequence, blocks)
        step(case, "cache", "setBlocks", [sequence, blocks])
    window = {"window_left": 3} if name == "ring" else {}
    for rows in 4, 1, 1:
        q, k, v = floats(2, rows, 4, 4), floats(2, rows, 2, 4), floats(2, rows, 2, 4)
        y = mha.attention(q, k, v, cache=cache, is_causal=True, **window)
        given = {**attention, **js(window), "cache": True, "q": q, "k": k, "v": v}
        step(case, "mha", "attention", given, y)

q, k, v = floats(1, 5, 2, 8), floats(1, 5, 2, 8), floats(1, 5, 4, 6)
decay, beta = -np.abs(floats(1, 5, 4)), np.abs(floats(1, 5, 4))
y, state = mha.recurrent_attention(q, k, v, decay, beta)
step("recurrent attention", "mha", "recurrentAttention", {"numKHeads": 2, "numVHeads": 4,
     "headDim": 8, "headDimV": 6, "q": q, "k": k, "v": v, "decay": decay, "beta": beta,
     "stateOut": True}, {"output": y, "stateOut": state})  # fmt: skip
x, kernel = floats(1, 5, 8), floats(8, 4)
y, state = mha.causal_conv(x, kernel, activation="silu")
step("a causal convolution", "mha", "causalConv", {"channels": 8, "kernelSize": 4, "x": x,
     "weights": kernel, "activation": "silu", "stateOut": True},
     {"output": y, "stateOut": state})  # fmt: skip

(folder / "test").mkdir(exist_ok=True)
(folder / "test" / "cases.json").write_text(json.dumps(cases, default=plain))
subprocess.run([build, "--pack"], check=True)
environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
test = pathlib.Path(__file__).with_suffix(".mjs")
sys.exit(subprocess.run([node, "--test", test], env=environment).returncode)
