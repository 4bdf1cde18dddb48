#!/usr/bin/env python3
"""The node tests of ONNX's LinearAttention and CausalConvWithState (opset 27), as the onnx package
has them, through the Python binding.

    onnx_recurrent_test.py --library LIBMHA.SO [--operators LIBMHA_ONNX.SO] [--venv FOLDER]

Also the operators of ONNX Runtime on random shapes; with --operators instead models of these cases,
rewritten to mha's operators. Runs with the packages of the interpreter that it is started by, or
those that tools/bindings/python/setup.sh put into FOLDER. Exits with 77, which ctest shows as
skipped, where they are in neither, or onnx is older than 1.23.
"""

import os
import sys
import unittest

import python_support

parser = python_support.parser(__doc__)
parser.add_argument("--operators", type=os.path.abspath)
arguments = parser.parse_args()
os.environ["MHA_ONNX_LIBRARY"] = arguments.operators or ""
python_support.need(["numpy", "onnx", "onnxruntime"], arguments)

import numpy as np
import onnx.helper
import onnxruntime

try:
    from onnx.backend.test.case.node import causal_conv_with_state, linear_attention
except ImportError:
    print(f"skipped: onnx {onnx.__version__} has no LinearAttention; 1.23 has")
    sys.exit(77)

import mha
import mha.onnx

onnxruntime.set_default_logger_severity(4)  # what is wrong comes as an exception too
# In 16 bits the reference rounds after each step.
tolerances = {"float32": (1e-5, 1e-5), "float16": (2**-9, 1e-3), "bfloat16": (2**-6, 1e-2)}
# Name -> why mha lacks it.
left_out = {
    "test_causal_conv_with_state_kernel_size_one": "a product without rows; kernel_size is 2 to 8"
}
types = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


random = np.random.default_rng(3)


def floats(*shape):
    return random.standard_normal(shape).astype(np.float32)


def cases(module, exporter):
    """(name, attributes, inputs by the operator's names, expected outputs) of each node test."""
    found, names = [], [one.name for one in onnx.defs.get_schema(exporter.__name__, 27).inputs]

    def record(node, inputs, outputs, name, **_):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        given = iter(inputs)
        found.append(
            (
                name,
                attributes,
                {to: next(given) for to, own in zip(names, node.input) if own},
                outputs,
            )
        )

    module.expect = record
    for name in dir(exporter):
        if name.startswith("export"):
            getattr(exporter, name)()
    return found


def bits(array):
    """The array as mha takes it."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def linear(attributes, query, key, value, past_state=None, decay=None, beta=None):
    q_heads, heads = attributes["q_num_heads"], attributes["kv_num_heads"]
    q, k, v = (
        bits(x).reshape(*x.shape[:2], count, -1)
        for x, count in ((query, q_heads), (key, heads), (value, heads))
    )
    if decay is not None:
        decay = (
            bits(decay)
            if decay.shape[2] == heads
            else bits(decay).reshape(*decay.shape[:2], heads, -1)
        )
    kind = query.dtype
    y, state = mha.recurrent_attention(
        q,
        k,
        v,
        decay,
        None if beta is None else bits(beta),
        scale=attributes.get("scale", 0.0),
        bf16=True,
        state=None if past_state is None else past_state.astype(np.float32),
        output_type=types[kind.name],
    )
    return y.view(kind).reshape(*y.shape[:2], -1), state.astype(
        kind if past_state is None else past_state.dtype
    )


def convolve(attributes, input, weight, bias=None, past_state=None):
    wide = {
        name: None if x is None else np.ascontiguousarray(x.astype(np.float32))
        for name, x in (("weight", weight[:, 0]), ("bias", bias))
    }
    state = (
        None
        if past_state is None
        else np.ascontiguousarray(past_state.astype(np.float32).transpose(0, 2, 1))
    )
    y, state = mha.causal_conv(
        np.ascontiguousarray(bits(input).transpose(0, 2, 1)),
        wide["weight"],
        bias=wide["bias"],
        bf16=True,
        state=state,
        output_type=types[input.dtype.name],
        activation={b"none": "none"}.get(attributes.get("activation", b"none"), "silu"),
    )
    return y.view(input.dtype).transpose(0, 2, 1), state.transpose(0, 2, 1).astype(input.dtype)


def model_of(operator, attributes, given, domain="", outputs=("y", "state")):
    names = [one.name for one in onnx.defs.get_schema(operator, 27).inputs]
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in given.items()}
    node = onnx.helper.make_node(
        operator,
        [name if name in given else "" for name in names],
        outputs,
        name="it",
        domain=domain,
        **attributes,
    )
    values = [
        onnx.helper.make_tensor_value_info(name, kinds[name], x.shape) for name, x in given.items()
    ]
    outputs = [
        onnx.helper.make_tensor_value_info(name, next(iter(kinds.values())), None)
        for name in outputs
    ]
    return onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", values, outputs),
        opset_imports=[
            onnx.helper.make_opsetid("", 27),
            onnx.helper.make_opsetid("com.microsoft", 1),
        ],
        ir_version=11,
    )


class Rewritten(unittest.TestCase):
    """Models whose operators mha.onnx.rewrite makes mha's."""

    def test_cases_of_floats_are_rewritten_and_the_others_left_with_a_reason(self):
        done, left = [], []
        for module, exporter in (
            (linear_attention, linear_attention.LinearAttention),
            (causal_conv_with_state, causal_conv_with_state.CausalConvWithState),
        ):
            for name, attributes, given, expected in cases(module, exporter):
                with self.subTest(name):
                    model, report = mha.onnx.rewrite(model_of(exporter.__name__, attributes, given))
                    if not report.rewritten:
                        self.assertRegex(
                            str(report[0]),
                            f"left: {exporter.__name__} 'it': (.* is not known to be float|its"
                            " kernel is not known to have 2 to 8)",
                        )
                        self.assertTrue(expected[0].dtype != np.float32 or name in left_out)
                        left.append(name)
                        continue
                    done.append(name)
                    for own, theirs in zip(
                        mha.onnx.session(model).run(None, given), expected, strict=True
                    ):
                        np.testing.assert_allclose(own, theirs, *tolerances["float32"])
        self.assertEqual(len(done) + len(left), 27)
        self.assertGreater(len(done), 18)

    def test_a_prompt_has_the_bits_of_its_parts(self):
        random = np.random.default_rng(3)
        given = {
            name: random.standard_normal(shape).astype(np.float32)
            for name, shape in (
                ("query", (2, 9, 24)),
                ("key", (2, 9, 12)),
                ("value", (2, 9, 10)),
                ("past_state", (2, 2, 6, 5)),
                ("decay", (2, 9, 2)),
                ("beta", (2, 9, 1)),
            )
        }
        attributes = {"q_num_heads": 4, "kv_num_heads": 2}

        def run(part):
            return mha.onnx.session(
                mha.onnx.rewrite(model_of("LinearAttention", attributes, part))[0]
            ).run(None, part)

        whole, state = run(given)
        first, past = run(
            {name: x if name == "past_state" else x[:, :4] for name, x in given.items()}
        )
        second, last = run({**{name: x[:, 4:] for name, x in given.items()}, "past_state": past})
        np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
        np.testing.assert_array_equal(last, state)
        self.assertEqual(
            run({name: x if name == "past_state" else x[:, :0] for name, x in given.items()})[
                1
            ].tobytes(),
            given["past_state"].tobytes(),
        )
        for wrong, sentence in (
            ({"key": given["key"][..., :11]}, r"key is \[2, 9, 11\]; it has to be \[2, 9, 12\]"),
            ({"beta": given["decay"][:, :8]}, "beta is"),
            ({"past_state": given["past_state"][:1]}, "past_state is"),
        ):
            model, _ = mha.onnx.rewrite(model_of("LinearAttention", attributes, given))
            # Of any extents, or ONNX Runtime itself would refuse them.
            for value in model.graph.input:
                value.type.tensor_type.ClearField("shape")
            with self.assertRaisesRegex(Exception, f"mha.LinearAttention 'it': {sentence}"):
                mha.onnx.session(model).run(None, {**given, **wrong})
        with self.assertRaisesRegex(
            Exception, "update_rule is linear, which takes no decay and no beta"
        ):
            linear = {**attributes, "update_rule": "linear"}
            mha.onnx.session(model_of("LinearAttention", linear, given, "mha"))

    def assert_like_onnx_runtime(self, operator, attributes, given):
        made = model_of(operator, attributes, given, "com.microsoft")
        try:
            theirs = onnxruntime.InferenceSession(made.SerializeToString()).run(None, given)
        except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
            self.skipTest(f"ONNX Runtime {onnxruntime.__version__} lacks it: {error}")
        model, report = mha.onnx.rewrite(made)
        self.assertEqual([entry.into for entry in report], [f"mha.{operator}"])
        for own, other in zip(mha.onnx.session(model).run(None, given), theirs, strict=True):
            self.assertEqual(own.shape, other.shape)
            np.testing.assert_allclose(own, other, *tolerances["float32"])

    def test_nodes_of_com_microsoft_have_onnx_runtimes_results(self):
        heads = [(q, k, v) for q in (1, 2, 4, 8) for k in (1, 2, 4) for v in (1, 2, 4)]
        for number, (q, k, v) in enumerate(heads):
            if v % k:
                continue
            given = {"query": floats(2, 5, q * 6), "key": floats(2, 5, k * 6) / 6}
            given["value"] = floats(2, 5, v * 7)
            rule = ("linear", "gated", "delta", "gated_delta")[number % 4]
            decays = v * (6, 1)[k % 2]
            given.update({"past_state": floats(2, v, 6, 7)} if number % 3 else {})
            given.update({"decay": -np.abs(floats(2, 5, decays))} if "gated" in rule else {})
            given.update({"beta": np.abs(floats(2, 5, v)) / 2} if "delta" in rule else {})
            attributes = {"q_num_heads": q, "kv_num_heads": v, "update_rule": rule}
            with self.subTest(q=q, k=k, v=v):
                self.assert_like_onnx_runtime(
                    "LinearAttention", {**attributes, "state_window": 0, "scale": q / 4}, given
                )
        for size, activation in (2, "none"), (4, "silu"), (8, "swish"):
            given = {"input": floats(2, 6, 5), "weight": floats(6, 1, size), "bias": floats(6)}
            with self.subTest(size=size):
                more = {"activation": activation, "ndim": 1, "channels_last": 0}
                self.assert_like_onnx_runtime("CausalConvWithState", more, given)
                given["past_state"] = floats(2, 6, size - 1)
                self.assert_like_onnx_runtime("CausalConvWithState", {}, given)

    def test_what_differs_from_mha_is_left_and_named(self):
        linear = {name: floats(1, 3, 4) for name in ("query", "key", "value", "decay", "beta")}
        convolution = {"input": floats(2, 6, 5), "weight": floats(6, 1, 4)}
        heads = {"q_num_heads": 4, "kv_num_heads": 4}
        cases = [
            ("LinearAttention", {"state_window": 2}, linear, "its state_window is 2; "),
            ("LinearAttention", {"made_up": 1}, linear, "the attribute 'made_up'"),
            ("LinearAttention", {"update_rule": "linear"}, linear, "linear, and it has decay and"),
            ("LinearAttention", {"update_rule": "gated"}, linear, "gated, and it has decay and"),
            ("LinearAttention", {"update_rule": "new"}, linear, "its update_rule is new"),
            ("CausalConvWithState", {"activation": "relu"}, convolution, "its activation is relu"),
        ]
        for name, value in {
            **{"channels_last": 1, "dilation": 2, "input_channel_offset": 1, "input_channels": 4},
            **{"ndim": 2, "state_channels_last": 0, "state_length": 9, "state_update_capacity": 1},
            **{"state_window": 1, "made_up": 1},
        }.items():
            sentence = (
                f"the attribute '{name}'" if name == "made_up" else f"its {name} is {value}; "
            )
            cases.append(("CausalConvWithState", {name: value}, convolution, sentence))
        for operator, attributes, given, sentence in cases:
            with self.subTest(operator=operator, **attributes):
                attributes = {**heads, **attributes} if given is linear else attributes
                made = model_of(operator, attributes, given, "com.microsoft")
                before = made.SerializeToString()
                model, report = mha.onnx.rewrite(made)
                self.assertEqual([entry.into for entry in report], [None])
                self.assertIn(sentence, report[0].reason)
                self.assertEqual(model.SerializeToString(), before)
        for domain in "", "com.microsoft":
            made = model_of("CausalConvWithState", {}, convolution, domain, ("y", "state", "more"))
            self.assertEqual(mha.onnx.rewrite(made)[1][0].reason, "its output 2 is not known")


class Operators(unittest.TestCase):
    def check(self, module, exporter, compute, count):
        found = cases(module, exporter)
        self.assertGreaterEqual(len(found), count)
        self.assertLessEqual(
            {name for name in left_out if module.__name__.rsplit(".", 1)[1] in name},
            {name for name, *_ in found},
            "no such cases any more",
        )
        for name, attributes, given, expected in found:
            if name in left_out:
                continue
            with self.subTest(name):
                for own, theirs in zip(compute(attributes, **given), expected, strict=True):
                    self.assertEqual((own.shape, own.dtype), (theirs.shape, theirs.dtype))
                    np.testing.assert_allclose(
                        own.astype(np.float32),
                        theirs.astype(np.float32),
                        *tolerances[theirs.dtype.name],
                    )

    def test_every_case_of_linear_attention_has_the_operators_result(self):
        self.check(linear_attention, linear_attention.LinearAttention, linear, 14)

    def test_every_case_of_the_convolution_has_the_operators_result(self):
        self.check(causal_conv_with_state, causal_conv_with_state.CausalConvWithState, convolve, 13)

    def test_onnx_runtime_has_the_same_results_on_random_shapes(self):
        for number in range(24):
            batch, rows, heads, group, d_k, d_v = (
                int(random.integers(1, most + 1)) for most in (3, 40, 4, 3, 24, 24)
            )
            rule, is_wide = ("linear", "gated", "delta", "gated_delta")[number % 4], number % 8 > 3
            given = {
                "query": floats(batch, rows, heads * group * d_k),
                "key": floats(batch, rows, heads * d_k) / d_k,
                "value": floats(batch, rows, heads * d_v),
                "past_state": floats(batch, heads, d_k, d_v),
            }
            if "gated" in rule:
                given["decay"] = -np.abs(floats(batch, rows, heads * (d_k if is_wide else 1)))
            if "delta" in rule:
                given["beta"] = np.abs(floats(batch, rows, 1 if number % 3 else heads)) / 2
            attributes = {"q_num_heads": heads * group, "kv_num_heads": heads, "update_rule": rule}
            with self.subTest(number=number, **attributes):
                self.compare("LinearAttention", attributes, given, linear)
            channels, size = heads * d_k, 2 + number % 7
            given = {
                "input": floats(batch, channels, rows),
                "weight": floats(channels, 1, size),
                "bias": floats(channels),
                "past_state": floats(batch, channels, size - 1),
            }
            with self.subTest(number=number, size=size):
                self.compare(
                    "CausalConvWithState",
                    {"activation": ("none", "silu")[number % 2]},
                    given,
                    convolve,
                )

    def compare(self, operator, attributes, given, compute):
        model = model_of(operator, attributes, given)
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString())
        except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented as error:
            self.skipTest(f"ONNX Runtime {onnxruntime.__version__} lacks it: {error}")
        in_bytes = {
            name: value.encode() if isinstance(value, str) else value
            for name, value in attributes.items()
        }
        for own, theirs in zip(compute(in_bytes, **given), session.run(None, given), strict=True):
            np.testing.assert_allclose(
                own, theirs, rtol=0, atol=1e-4 * max(1, np.abs(theirs).max(initial=0))
            )


if __name__ == "__main__":
    python_support.run(Rewritten if arguments.operators else Operators)
