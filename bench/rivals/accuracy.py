#!/usr/bin/env python3
"""Measures the errors of mha, PyTorch and ONNX Runtime against exact results in float64, and writes
the tables accuracy_*.csv of src/docs/data.

Errors are relative to the rms of the exact result: the rms error, followed by the largest. The
exact result is computed from the very numbers that a library is given. Options that a library lacks
are computed as its users do, from plain operations.

With --test-table, it prints the table of tests/contract/accuracy_test.cpp instead: for each shape,
the rms error of PyTorch's attention on one thread, divided by that of plain float32 code, for calls
of one query and of 64. The plain code is tests/oracle in float: sums in natural order, multiplied
and added in two roundings. Data, shapes and seeds are those of the test.

Example, after tools/bindings/python/setup.sh --rivals:
  build/rivals/venv/bin/python bench/rivals/accuracy.py
"""

import argparse
import dataclasses
import datetime
import pathlib
import sys
import warnings

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--test-table",
    action="store_true",
    help="print the table of accuracy_test.cpp and write nothing",
)
options = parser.parse_args()  # help needs no packages

import numpy as np
import torch

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bindings" / "python")
)
sys.dont_write_bytecode = True
import mha
from libraries import OnnxRuntime
from session import commit, machine, run_main, say, write_data

heads, queries, calls = 4, 64, (1, 64)  # of the test's table
libraries = ("mha", "PyTorch", "ONNX Runtime")


# ---- attention


@dataclasses.dataclass
class Case:
    name: str
    n_kv: int
    head_dim: int = 64
    n_q: int = 64
    heads: int = 4
    kv_heads: int = 4
    causal: bool = False
    window: int = 0  # keys before a row's own
    softcap: float = 0
    alibi: bool = False
    sink: float = None
    cache: str = "f32"  # of mha: errors are those of the numbers before they are rounded
    change: callable = None  # q, k and v

    def numbers(self):
        random = np.random.default_rng(1)
        shapes = [(self.n_q, self.heads), *[(self.n_kv, self.kv_heads)] * 2]
        arrays = [random.standard_normal((*shape, self.head_dim), np.float32) for shape in shapes]
        if self.change:
            self.change(*arrays)
        return arrays

    def biases(self):
        """[heads, n_q, n_kv] in float64, -inf where a row does not attend; None if there is
        nothing."""
        distance = np.arange(self.n_kv)[None] - (
            np.arange(self.n_q)[:, None] + self.n_kv - self.n_q
        )
        left_out = (distance > 0) & self.causal | (distance < -self.window) & bool(self.window)
        bias = np.where(left_out, -np.inf, 0.0)[None].repeat(self.heads, 0)
        return (
            bias - self.slopes()[:, None, None] * abs(distance)
            if self.alibi
            else bias
            if left_out.any()
            else None
        )

    def slopes(self):
        return mha.alibi_slopes(self.heads)

    def sinks(self):
        return None if self.sink is None else np.full(self.heads, self.sink, np.float32)


def by_heads(function, case, q, k, v):
    """[n_q, heads, head_dim], by function(head, q, k, v) of each."""
    group = case.heads // case.kv_heads
    return np.stack(
        [function(h, q[:, h], k[:, h // group], v[:, h // group]) for h in range(case.heads)],
        axis=1,
    )


def in_double(case, q, k, v):
    bias, scale = case.biases(), 1 / np.sqrt(case.head_dim)

    def head(h, q, k, v):
        s = q.astype("d") @ k.astype("d").T * scale
        s = np.tanh(s / case.softcap) * case.softcap if case.softcap else s
        s = s if bias is None else s + bias[h]
        sink = -np.inf if case.sink is None else case.sink
        m = np.maximum(s.max(1, keepdims=True), sink)
        weights = np.exp(s - m)
        return weights @ v.astype("d") / (weights.sum(1, keepdims=True) + np.exp(sink - m))

    return by_heads(head, case, q, k, v)


def of_mha(case, q, k, v):
    score = mha.ScoreOptions(
        softcap=case.softcap, alibi_slopes=case.slopes() if case.alibi else None, sinks=case.sinks()
    )
    options = {"is_causal": case.causal, "score": score, "window_left": case.window or None}
    if case.cache != "f32":
        options["cache"] = mha.KvCache(
            num_sequences=1,
            capacity=case.n_kv,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            k_type=case.cache,
            v_type=case.cache,
        )
    return mha.attention(q[None], k[None], v[None], **options)[0]


def of_pytorch(case, q, k, v):
    q, k, v = (torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v))
    bias = case.biases()
    bias = None if bias is None else torch.from_numpy(bias).to(q.dtype)
    if not case.softcap and case.sink is None:
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, enable_gqa=case.heads != case.kv_heads
        )
    else:  # as transformers has it for Gemma 2 and gpt-oss
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
        s = q @ k.transpose(2, 3) * case.head_dim**-0.5
        s = torch.tanh(s / case.softcap) * case.softcap if case.softcap else s
        s = s if bias is None else s + bias
        if case.sink is not None:
            s = torch.cat([s, torch.full((1, case.heads, case.n_q, 1), case.sink)], dim=-1)
        y = torch.softmax(s, dim=-1)[..., : case.n_kv] @ v
    return y[0].transpose(0, 1).float().numpy()


def run_onnx(nodes, inputs, y_shape, constants=None):
    """The output y of a graph of the com.microsoft operators; inputs and y are of one type."""
    runtime = OnnxRuntime(1, None)
    onnx, helper = runtime.onnx, runtime.onnx.helper
    type = helper.np_dtype_to_tensor_dtype(next(iter(inputs.values())).dtype)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in inputs.items()
    ]
    graph = helper.make_graph(
        nodes,
        "one",
        given,
        [helper.make_tensor_value_info("y", type, y_shape)],
        [onnx.numpy_helper.from_array(x, name) for name, x in (constants or {}).items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    )
    model.ir_version = 9
    session = runtime.onnxruntime.InferenceSession(
        model.SerializeToString(), runtime.options, providers=["CPUExecutionProvider"]
    )
    return session.run(["y"], inputs)[0]


def of_onnx(case, q, k, v):
    """GroupQueryAttention where a model has one sequence and the operator is causal, otherwise
    MultiHeadAttention."""
    node = OnnxRuntime(1, None).onnx.helper.make_node
    q, k, v = (x.reshape(1, len(x), -1) for x in (q, k, v))
    inputs, bias = {"q": q, "k": k, "v": v}, case.biases()
    if case.causal and case.n_q == case.n_kv:
        inputs["last"], inputs["total"] = np.array([case.n_kv - 1], "i"), np.array(case.n_kv, "i")
        names = ["q", "k", "v", "", "", "last", "total", "", "", "", "", ""]
        if case.alibi:
            inputs["bias"], names[10] = (
                np.where(np.isinf(bias), 0, bias)[None].astype(q.dtype),
                "bias",
            )
        if case.sink is not None:
            inputs["sinks"], names[11] = case.sinks().astype(q.dtype), "sinks"
        options = {"local_window_size": case.window + 1} if case.window else {}
        last = node(
            "GroupQueryAttention",
            names,
            ["y", "present_k", "present_v"],
            domain="com.microsoft",
            num_heads=case.heads,
            kv_num_heads=case.kv_heads,
            softcap=float(case.softcap),
            **options,
        )
    else:
        names = ["q", "k", "v"]
        if bias is not None:
            inputs["bias"], names = bias[None].astype(q.dtype), ["q", "k", "v", "", "", "bias"]
        last = node(
            "MultiHeadAttention", names, ["y"], domain="com.microsoft", num_heads=case.heads
        )
    return run_onnx([last], inputs, q.shape).reshape(case.n_q, case.heads, -1)


def larger(q_factor=1, k_factor=1, v_factor=1, q_add=0, v_add=0):
    def change(*arrays):
        for x, factor, add in zip(arrays, (q_factor, k_factor, v_factor), (q_add, 0, v_add)):
            x *= np.float32(factor)
            x += np.float32(add)

    return change


def channels(q, k, v):
    """Outliers: each 32nd channel of keys and values 20 times as large."""
    k[:, :, ::32] *= 20
    v[:, :, ::32] *= 20


ordinary = [
    *[Case(f"{n:,} keys", n) for n in (16, 1024, 16384)],
    *[Case(f"1,024 keys, head_dim {d}", 1024, d) for d in (128, 256)],
    *[Case(f"131,072 keys, head_dim {d}", 131072, d, 8, 2, 2) for d in (64, 128)],
    *[
        Case(f"causal{text}", 1024, 64, 1024, causal=True, **more)
        for text, more in (
            ("", {}),
            (", 4 heads on 1", {"kv_heads": 1}),
            (", softcap 30", {"softcap": 30.0}),
            (", ALiBi", {"alibi": True}),
            (", sink 2", {"sink": 2.0}),
            (", window 128", {"window": 127}),
        )
    ],
    *[
        Case(f"{type} cache{text}", 1024, 64, cache=type, change=change)
        for text, change in (("", None), (", outliers", channels))
        for type in ("f16", "bf16", "int8")
    ],
]
hard = [
    Case("all scores equal, 131,072 keys", 131072, 64, 8, 2, 2, change=larger(q_factor=0)),
    Case(
        "all scores equal, values 100 larger",
        131072,
        64,
        8,
        2,
        2,
        change=larger(q_factor=0, v_add=100),
    ),
    *[
        Case(f"scores up to about {size:,}", 1024, change=larger(factor, factor))
        for size, factor in ((100, 5), (1000, 16), (10000, 50))
    ],
    Case(
        "scores around 300, apart by some units",
        1024,
        64,
        change=lambda q, k, v: (q.__iadd__(6), k.__imul__(0.05), k.__iadd__(6)),
    ),
    Case("q and k subnormal", 256, change=larger(2.0**-130, 2.0**-130)),
    Case("values subnormal", 256, change=larger(v_factor=2.0**-135)),
    Case("values 10,000 larger", 1024, change=larger(v_add=10000)),
]


def error_of(actual, exact):
    off, size = actual.astype("d") - exact, np.sqrt(np.mean(exact**2))
    return f"{short(np.sqrt(np.mean(off**2)) / size)}, {short(abs(off).max() / size)}"


def short(number):
    return "0" if number == 0 else f"{number:.1e}".replace("e-0", "e-").replace("e+00", "")


def cell(name, exact, function, *arguments):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return error_of(function(*arguments), exact)
    except Exception as error:  # whatever a library throws
        say(f"{name}: {' '.join(str(error).split())[:200]}")
        return ""


def attention_rows(cases):
    for case in cases:
        arrays = case.numbers()
        exact = in_double(case, *arrays)
        functions = [of_mha, of_pytorch, of_onnx] if case.cache == "f32" else [of_mha]
        found = [
            cell(f"{case.name}, {name}", exact, function, case, *arrays)
            for name, function in zip(libraries, functions)
        ]
        yield [case.name, *found, *[""] * (len(libraries) - len(found))]


# ---- products


def product_rows():
    """y = x w of 16 rows and 64 columns: a row for each way of keeping weights and computing, a
    column for each kind of inputs."""

    def of_mha(weights, arithmetic="f32"):
        return lambda x, w: mha.Linear(w, weight_type=weights, arithmetic=arithmetic)(x)

    ways = {
        "mha f32": of_mha("f32"),
        "PyTorch f32": torch_linear,
        "ONNX Runtime f32": onnx_product,
        "mha f16": of_mha("f16"),
        "PyTorch f16, x and y too": lambda x, w: torch_linear(x, w, torch.float16),
        "mha bf16": of_mha("bf16"),
        "mha bf16 in BF16": of_mha("bf16", "bf16"),
        "PyTorch bf16, x and y too": lambda x, w: torch_linear(x, w, torch.bfloat16),
        "mha int8": of_mha("int8"),
        "mha int8 in INT8": of_mha("int8", "int8"),
        "PyTorch quantize_dynamic int8": torch_int8,
        "ONNX Runtime MatMulNBits 8": lambda x, w: onnx_bits(x, w, 8, 0),
        "ONNX Runtime MatMulNBits 8, accuracy_level 4": lambda x, w: onnx_bits(x, w, 8, 4),
        "mha int4": of_mha("int4"),
        "ONNX Runtime MatMulNBits 4": lambda x, w: onnx_bits(x, w, 4, 0),
    }
    rows = [[way] for way in ways]
    for inputs, kind in product_kinds:
        random = np.random.default_rng(1)
        x, w = (
            random.standard_normal((16, inputs), np.float32),
            random.standard_normal((64, inputs), np.float32),
        )
        if kind == "positive":
            x, w = abs(x), abs(w)
        elif kind == "outliers":
            x[:, random.choice(inputs, inputs // 256, replace=False)] *= 20
        exact = x.astype("d") @ w.astype("d").T
        for row, (way, function) in zip(rows, ways.items()):
            row.append(cell(f"{inputs} inputs, {way}", exact, function, x, w))
    return rows


product_kinds = [(768, "normal"), (768, "outliers"), (16384, "normal"), (16384, "positive")]


def torch_linear(x, w, type=torch.float32):
    return (
        torch.nn.functional.linear(torch.from_numpy(x).to(type), torch.from_numpy(w).to(type))
        .float()
        .numpy()
    )


def torch_int8(x, w):
    linear = torch.nn.Linear(*w.shape[::-1], bias=False)
    linear.weight.copy_(torch.from_numpy(w))
    return torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(linear), {torch.nn.Linear}, dtype=torch.qint8
    )(torch.from_numpy(x)).numpy()


def onnx_product(x, w):
    node = OnnxRuntime(1, None).onnx.helper.make_node
    return run_onnx(
        [node("MatMul", ["x", "w"], ["y"])], {"x": x}, (len(x), len(w)), {"w": w.T.copy()}
    )


def onnx_bits(x, w, bits, accuracy_level):
    """MatMulNBits, groups of 32 of int4 and symmetrical codes as its quantiser makes them;
    accuracy_level 4: in integers of 8 bits."""
    node = OnnxRuntime(1, None).onnx.helper.make_node
    groups = w.reshape(len(w), -1, 32)
    extreme = np.take_along_axis(groups, abs(groups).argmax(-1, keepdims=True), -1)
    scales = (extreme / -(1 << bits - 1)).astype(np.float32)
    codes = (
        np.clip(np.rint(groups / scales), -(1 << bits - 1), (1 << bits - 1) - 1) + (1 << bits - 1)
    ).astype(np.uint8)
    packed = codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
    last = node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        K=w.shape[1],
        N=len(w),
        bits=bits,
        block_size=32,
        accuracy_level=accuracy_level,
    )
    return run_onnx(
        [last], {"x": x}, (len(x), len(w)), {"codes": packed, "scales": scales.reshape(len(w), -1)}
    )


# ---- the table of the test


class Random:
    """tests/support/random.h"""

    def __init__(self, seed):
        self.state = seed

    def normals(self, *shape):
        count = 12 * int(np.prod(shape))
        with np.errstate(over="ignore"):
            z = np.uint64(self.state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
                0x9E3779B97F4A7C15
            )
            self.state = int(z[-1])
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        units = (z >> np.uint64(11)).astype(np.float64).reshape(-1, 12) * 2.0**-53
        total = np.full(len(units), -6.0)
        for n in range(12):
            total += units[:, n]
        return total.astype(np.float32).reshape(shape)


def plain(q, k, v, scale):
    """One head of tests/oracle in float; the scale is a float32."""
    dots = np.zeros((len(q), len(k)), np.float32)
    for d in range(q.shape[1]):
        dots += q[:, d, None] * k[None, :, d]
    scores = dots * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # NumPy adds these up one by one
    context = np.zeros((len(q), v.shape[1]), np.float32)
    for j in range(len(k)):
        context += weights[:, j, None] * v[None, j]
    return context


def print_test_table():
    print(f"// PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for head_dim in 16, 32, 64, 80, 96, 128, 192, 256, 512:
        for n_kv in 512, 2048:
            for given in 0, 1:
                random, case = (
                    Random(head_dim * 10000 + n_kv),
                    Case("", n_kv, head_dim, queries, heads, heads),
                )
                q, k, v = (random.normals(rows, heads, head_dim) for rows in (queries, n_kv, n_kv))
                if given:  # the scale 1 in place of the default
                    scale, exact_q = np.float32(1), q.astype("d") * np.sqrt(head_dim)
                else:
                    scale, exact_q = np.float32(1) / np.sqrt(np.float32(head_dim)), q
                truth = in_double(case, exact_q, k, v)

                def of_calls(rows, k=k, v=v, q=q, scale=scale):
                    keys, values = (torch.from_numpy(x).transpose(0, 1)[None] for x in (k, v))
                    parts = (
                        torch.from_numpy(q[first : first + rows]).transpose(0, 1)[None]
                        for first in range(0, queries, rows)
                    )
                    attention = torch.nn.functional.scaled_dot_product_attention
                    return np.concatenate(
                        [
                            attention(part, keys, values, scale=float(scale))[0]
                            .transpose(0, 1)
                            .numpy()
                            for part in parts
                        ]
                    )

                def error(result, truth=truth):
                    return np.sqrt(np.mean((result - truth) ** 2))

                reference = error(
                    by_heads(lambda h, *rows, scale=scale: plain(*rows, scale), case, q, k, v)
                )
                errors = [error(of_calls(rows)) for rows in calls]
                own = error(mha.attention(q[None], k[None], v[None], scale=float(given))[0])
                print(
                    f"    {{{head_dim}, {n_kv}, {given},"
                    f" {{{', '.join(f'{each / reference:.2f}' for each in errors)}}}}},  // mha /"
                    f" PyTorch: {', '.join(f'{own / each:.2f}' for each in errors)}",
                    flush=True,
                )


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if options.test_table:
        return print_test_table()
    tables = {
        "attention": [["case", *libraries], *attention_rows(ordinary)],
        "hard": [["case", *libraries], *attention_rows(hard)],
        "products": [
            ["case", *(f"{inputs:,} inputs, {kind}" for inputs, kind in product_kinds)],
            *product_rows(),
        ],
    }
    used = {number: name for name, number in mha.instruction_set_names.items()}[
        mha.attention_info(1, 1, 1, 1)["instruction_set"]
    ]
    source = (
        f"mha at commit {commit()}, {datetime.date.today().isoformat()}, {machine()}; mha {used},"
        f" PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), ONNX Runtime"
        f" {OnnxRuntime(1, None).version}."
    )
    for name, rows in tables.items():
        write_data(f"accuracy_{name}", source, rows)
    return 0


if __name__ == "__main__":
    run_main(main)
