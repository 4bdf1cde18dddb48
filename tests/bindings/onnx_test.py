#!/usr/bin/env python3
"""The node tests of ONNX's Attention operator (opset 23 to 25), as the onnx package has them,
through the Python binding.

    onnx_test.py --library LIBMHA.SO [--venv FOLDER]

Each case has the operator's result, or stands in `left_out` with the reason. Causal alignment,
which ONNX derives from its inputs, is what the caller gives as q_first_positions. Runs with the
packages of the interpreter that it is started by, or those that tools/bindings/python/setup.sh put
into FOLDER. Exits with 77, which ctest shows as skipped, where they are in neither.
"""

import itertools
import os
import pathlib
import tempfile
import unittest
from unittest import mock

import python_support

arguments = python_support.parser(__doc__).parse_args()
python_support.need(["numpy", "onnx"], arguments)

import google.protobuf.message
import mha.onnx
import numpy as np
import onnx.helper
import onnx.numpy_helper
from mha.onnx import _files
from onnx.backend.test.case.node import attention

# Relative and absolute. In 16 bits two units in the last place, since ONNX's reference rounds to
# the type after each step.
tolerances = {"float32": (1e-5, 1e-6), "float16": (2**-9, 1e-3), "bfloat16": (2**-6, 1e-2)}
left_out = {}  # name -> why the library does not have it
# qk_matmul_output_mode 0 to 3.
taps = ["scaled_scores", "softcapped_scores", "masked_scores", "attention_weights"]


def attention_cases():
    """(name, attributes, inputs by name, expected outputs by name) of each node test."""
    cases = []

    # In place of what makes a model of each, and another one of its expanded form.
    def record(node, inputs, outputs, name, **_):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        cases.append(
            (
                name,
                attributes,
                dict(zip(filter(None, node.input), inputs)),
                dict(zip(filter(None, node.output), outputs)),
            )
        )

    attention.expect = record
    for name in dir(attention.Attention):
        if name.startswith("export"):
            getattr(attention.Attention, name)()
    return cases


def rows(array, heads):
    """[batch, rows, heads, width] of ONNX's [batch, heads, rows, width] or [batch, rows, heads *
    width]."""
    if array.ndim == 4:
        return array.transpose(0, 2, 1, 3)
    return array.reshape(array.shape[0], array.shape[1], heads, -1)


def compute(attributes, given):
    """The outputs that the operator has for these inputs, by its names."""
    q = rows(given["Q"], attributes.get("q_num_heads"))
    k, v = (rows(given[name], attributes.get("kv_num_heads")) for name in "KV")
    past = [rows(given[name], None) for name in ("past_key", "past_value") if name in given]
    if past:
        k, v = (np.concatenate(both, axis=1) for both in zip(past, (k, v)))
    batch, n_q, n_kv = q.shape[0], q.shape[1], k.shape[1]
    lengths = given.get("nonpad_kv_seqlen")
    starts = (
        lengths - n_q if lengths is not None else np.full(batch, past[0].shape[1] if past else 0)
    )
    windows = {
        side: size
        for side in ("left", "right")
        if (size := attributes.get(f"{side}_window_size", -1)) >= 0
    }
    is_causal = attributes.get("is_causal", 0) == 1
    score = {"softcap": attributes.get("softcap", 0.0)}
    mask = given.get("attn_mask")
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        score["mask" if mask.dtype == bool else "bias"] = (
            mask if mask.dtype in (bool, np.float16) else mask.astype(np.float32)
        )
        score["num_columns"] = mask.shape[3] if mask.shape[3] < n_kv else 0
    tap = taps[attributes.get("qk_matmul_output_mode", 0)]
    is_bf16 = q.dtype.name == "bfloat16"
    y, steps = mha.attention(
        *(array.view(np.uint16) if is_bf16 else array for array in (q, k, v)),
        bf16=is_bf16,
        scale=attributes.get("scale", 0.0),
        is_causal=is_causal,
        output_type={"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[q.dtype.name],
        kv_lengths=lengths,
        q_first_positions=starts if is_causal or windows else None,
        window_left=windows.get("left"),
        window_right=windows.get("right"),
        score=mha.ScoreOptions(**score),
        want=[tap],
    )
    y = y.view(q.dtype)
    return {
        "Y": y.transpose(0, 2, 1, 3) if given["Q"].ndim == 4 else y.reshape(batch, n_q, -1),
        "qk_matmul_output": steps[tap],
        "present_key": k.transpose(0, 2, 1, 3),
        "present_value": v.transpose(0, 2, 1, 3),
    }


class AttentionOperator(unittest.TestCase):
    def test_every_case_has_the_operators_result_or_a_reason(self):
        names = set()
        for name, attributes, given, expected in attention_cases():
            names.add(name)
            if name in left_out:
                continue
            with self.subTest(name):
                computed = compute(attributes, given)
                for output, values in expected.items():
                    np.testing.assert_allclose(
                        computed[output].astype(np.float32),
                        values.astype(np.float32),
                        *tolerances[values.dtype.name],
                        err_msg=output,
                    )
        self.assertGreaterEqual(len(names), 60)
        self.assertEqual(set(left_out) - names, set(), "no such cases any more")


class Damaged(unittest.TestCase):
    def test_a_damaged_model_is_rewritten_or_refused(self):
        random, make = np.random.default_rng(5), onnx.helper.make_node
        nodes = [
            make("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]),
            make("MatMul", ["q", "t"], ["s"]),
            make("Softmax", ["s"], ["p"], axis=-1),
            make("MatMul", ["p", "v"], ["y"]),
        ]
        graph = onnx.helper.make_graph(
            nodes,
            "g",
            *(
                [onnx.helper.make_tensor_value_info(name, 1, [2, 2, 5, 8]) for name in names]
                for names in ("qkv", "y")
            ),
        )
        good = onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 17)]
        ).SerializeToString()
        refused = 0
        self.assertEqual(len(mha.onnx.rewrite(onnx.ModelProto.FromString(good))[1].rewritten), 1)
        for _ in range(3000):
            damaged = np.frombuffer(good, np.uint8).copy()
            damaged[random.integers(len(good), size=random.integers(1, 3))] ^= np.uint8(
                1 << random.integers(8)
            )
            try:
                mha.onnx.rewrite(onnx.ModelProto.FromString(damaged.tobytes()))
            except (google.protobuf.message.DecodeError, ValueError, onnx.checker.ValidationError):
                refused += 1
        self.assertGreater(refused, 100)


class Saving(unittest.TestCase):
    def setUp(self):
        """A model with an array among its initialisers, in a node and in a function; and others."""
        random, make = np.random.default_rng(6), onnx.helper.make_node
        self.arrays = [random.standard_normal(20000).astype(np.float32) for _ in range(3)]
        wide, node, inner = (onnx.numpy_helper.from_array(a, "a") for a in self.arrays)
        typed = onnx.helper.make_tensor("t", 1, [20000], self.arrays[0])  # not raw_data
        small = onnx.numpy_helper.from_array(np.float32([2]), "s")
        texts = onnx.helper.make_tensor("words", 8, [20000], [b"word"] * 20000)
        small.doc_string = wide.doc_string = "0"
        body = [make("Constant", [], ["c"], value=inner), make("Add", ["x", "c"], ["y"])]
        opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("local", 1)]
        function = onnx.helper.make_function("local", "AddInner", ["x"], ["y"], body, opsets)
        nodes = [make("Constant", [], ["n"], value=node), make("Sum", ["a", "n", "t", "s"], ["x"])]
        nodes += [make("AddInner", [x], [y], domain="local") for x, y in ("xz", "zy")]
        outputs = [onnx.helper.make_tensor_value_info(*o, None) for o in (("y", 1), ("words", 8))]
        graph = onnx.helper.make_graph(nodes, "g", [], outputs, [wide, typed, small, texts])
        self.model = onnx.helper.make_model(
            graph, opset_imports=opsets, functions=[function], ir_version=8
        )
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "out.onnx")

    def assert_is_model(self, model):
        from onnx.reference import ReferenceEvaluator

        expected = 2 * self.arrays[0] + self.arrays[1] + 2 + 2 * self.arrays[2]
        y = ReferenceEvaluator(model).run(None, {})[0]
        np.testing.assert_allclose(y, expected, atol=1e-5)
        self.assertEqual([t.doc_string for t in model.graph.initializer], ["0", "", "0", ""])
        self.assertEqual(model.graph.initializer[3].string_data[19999], b"word")

    def test_the_reference(self):
        python_support.check_reference(self, mha.onnx, mha=mha)

    def test_a_model_has_its_name_when_it_is_whole(self):
        self.path.write_bytes(b"old")
        before, folder = self.model.SerializeToString(), self.path.parent
        for most, error in itertools.product(
            (2**31, 100), (OSError("full"), KeyboardInterrupt(), SystemExit(143))
        ):

            def half(model, output, error=error):
                pathlib.Path(output).write_bytes(b"half")
                raise error

            with mock.patch("onnx.save", half), mock.patch.object(_files, "most", most):
                self.assertRaises(type(error), _files.save, self.model, str(self.path))
            found = os.listdir(folder), self.path.read_bytes()
            self.assertEqual(found, (["out.onnx"], b"old"))
        two = ["out.onnx", "out.onnx.data"]
        for most, files in (2**31, two[:1]), (100, two), (100, two):
            with mock.patch.object(_files, "most", most):
                _files.save(self.model, str(self.path))
            self.assertEqual(sorted(os.listdir(folder)), files)
            self.assertEqual(self.path.stat().st_size < 300_000, most == 100)
            self.assert_is_model(onnx.load(self.path))
        self.assertLess((folder / two[1]).stat().st_size, 330_000)  # each array once
        self.assertEqual(self.model.SerializeToString(), before)
        with mock.patch.object(_files, "most", 100):
            with self.assertRaisesRegex(ValueError, "has the arrays of the model itself"):
                _files.save(self.model, str(self.path), str(self.path))

    def test_functions_are_inlined_with_their_arrays(self):
        before = self.model.SerializeToString()
        with mock.patch.object(_files, "most", 100):
            _files.save(self.model, str(self.path))
        for given in self.model, str(self.path):
            made, report = mha.onnx.rewrite(given)
            self.assertEqual((len(made.functions), report), (0, []))
            self.assert_is_model(made)
        self.assertEqual(self.model.SerializeToString(), before)


if __name__ == "__main__":
    python_support.run(AttentionOperator, Damaged, Saving)
