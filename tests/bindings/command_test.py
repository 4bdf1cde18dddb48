#!/usr/bin/env python3
"""The command mha: what packed files keep, what it takes from config.json, what it refuses.

    command_test.py --library LIBMHA.SO [--venv FOLDER]

Results are compared with a layer in NumPy, in double precision. Skipped with 77 without NumPy.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import re
import resource
import stat
import struct
import sys
import tempfile
import unittest
from unittest import mock

import python_support

sys.path.insert(0, str(python_support.root / "tests" / "tools"))
from formats import with_header

arguments = python_support.parser(__doc__).parse_args()
python_support.need(["numpy"], arguments)

import mha
import numpy as np
from mha import _command

width, heads, head_dim, rows = 20, 4, 6, 7
random = np.random.default_rng(1)


def normal(*shape):
    """Floats that are exact in bfloat16."""
    numbers = random.normal(0, 0.5, shape).astype(np.float32)
    return (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)


def safetensors(tensors):
    """A file of arrays; uint16 stands for bfloat16."""
    kinds = {"f4": "F32", "f2": "F16", "u2": "BF16", "i1": "I8", "i4": "I32", "i8": "I64"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        begin, data = len(data), data + np.ascontiguousarray(array).tobytes()
        header[name] = dict(
            dtype=kinds[array.dtype.str[1:]], shape=array.shape, data_offsets=[begin, len(data)]
        )
    return with_header(json.dumps(header).encode(), data)


class Layer:
    """A layer of a model, and its results; matrices are [out, in]."""

    def __init__(self, kv_heads=heads, has_bias=True, q_norm=0):
        self.kv_heads = kv_heads
        outputs = {"q": heads, "k": kv_heads, "v": kv_heads}
        self.w = {name: normal(count * head_dim, width) for name, count in outputs.items()}
        self.w["o"] = normal(width, heads * head_dim)
        self.b = {name: normal(len(w)) * np.float32(has_bias) for name, w in self.w.items()}
        self.has_bias, self.sinks = has_bias, normal(heads)
        k_norm = kv_heads * head_dim if q_norm > head_dim else q_norm
        self.norms = {"q": normal(q_norm), "k": normal(k_norm)} if q_norm else {}

    def linears(self, *names):
        tensors = {f"{name}.weight": self.w[key] for name, key in zip(names, "qkvo")}
        more = {f"{name}.bias": self.b[key] for name, key in zip(names, "qkvo")}
        return {**tensors, **(more if self.has_bias else {})}

    def llama(self, prefix="model.layers.0.self_attn."):
        tensors = self.linears(*(f"{prefix}{name}_proj" for name in "qkvo"))
        norms = {f"{prefix}{name}_norm.weight": values for name, values in self.norms.items()}
        return {**tensors, **norms}

    def fused(self, w="w", b="b"):
        part = lambda values: np.concatenate([values[name] for name in "qkv"])
        return {w: part(self.w), **({b: part(self.b)} if self.has_bias else {})}

    def result(
        self,
        x,
        causal=True,
        frequencies=None,
        factor=1.0,
        epsilon=None,
        adds_one=False,
        all_heads=False,
        scale=None,
        window=None,
        softcap=None,
        sinks=False,
        has_output=True,
    ):
        """The output for one sequence; frequencies: angle of each pair per position."""

        def prepared(name):
            parts = (np.float64(x) @ self.w[name].T + self.b[name]).reshape(len(x), -1, head_dim)
            if epsilon is not None and name != "v":
                axes = (1, 2) if all_heads else 2
                parts = parts / np.sqrt((parts**2).mean(axis=axes, keepdims=True) + epsilon)
                weight = self.norms[name] + adds_one
                parts = parts * weight.reshape(-1 if all_heads else 1, head_dim)
            if frequencies is not None and name != "v":
                count = len(frequencies)
                turn = factor * np.exp(1j * np.outer(np.arange(len(x)), frequencies))[:, None]
                turned = (parts[..., :count] + 1j * parts[..., count : 2 * count]) * turn
                parts = np.concatenate([turned.real, turned.imag, parts[..., 2 * count :]], axis=2)
            return parts.swapaxes(0, 1)

        q, k, v = map(prepared, "qkv")
        k, v = (np.repeat(part, heads // self.kv_heads, axis=0) for part in (k, v))
        scores = q @ k.swapaxes(1, 2) * (scale or head_dim**-0.5)
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        seen = (distance >= 0) | (not causal)
        weights = np.exp(scores) * (seen & (distance < (window or len(x))))
        total = weights.sum(axis=2, keepdims=True)
        total += np.exp(np.float64(self.sinks))[:, None, None] if sinks else 0
        merged = (weights / total @ v).swapaxes(0, 1).reshape(len(x), -1)
        return merged @ self.w["o"].T + self.b["o"] if has_output else merged


def frequencies(base, dims=head_dim):
    return base ** (-np.arange(0, dims, 2) / dims)


config = {
    "architectures": ["ForCausalLM"],
    "hidden_size": width,
    "num_attention_heads": heads,
    "head_dim": head_dim,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
llama = {**config, "model_type": "llama", "rope_theta": 500.0}
first, second = "model.layers.0.self_attn.", "model.layers.1.self_attn."
plain = ["--heads", heads, "--causal", "--no-rope"]


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder.name)
        self.x = normal(rows, width)

    def write(self, name, content):
        if isinstance(content, dict) and name.endswith("safetensors"):
            content = safetensors(content)
        path = pathlib.Path(name)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    def mha(self, *words):
        """(exit status, standard output, standard error)"""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = _command.main(list(map(str, words)))
            except SystemExit as error:
                status = error.code
        return status, out.getvalue(), err.getvalue()

    def pack(self, *words):
        return self.mha("pack", "--weights", "model.safetensors", "--output", "layer.mha", *words)

    def refused(self, done, *sentences):
        status, out, err = done
        self.assertEqual((status, out), (1, ""), err)
        self.assertRegex(err, r"\Amha \w+: [^\n]*\n\Z")
        for words in sentences:
            self.assertIn(words, err)

    def packed(self, *words):
        """The rows of the packed layer, and what was said."""
        status, out, err = self.pack(*words)
        self.assertEqual((status, out, err.count("\n")), (0, "", 1), err)
        layer, call = mha.open_layer("layer.mha", num_positions=rows)
        y = layer.forward(self.x, **call)
        del layer
        return y, err

    def assert_close(self, y, expected, bound=2e-5):
        self.assertEqual(y.shape, expected.shape)
        self.assertLess(np.abs(y - expected).max(), bound * np.abs(expected).max())


class Packed(Command):
    """A packed file keeps what is needed to call the layer."""

    def check(self, layer, tensors, settings, said, **expected):
        with self.subTest(said):
            self.write("config.json", settings)
            self.write("model.safetensors", tensors)
            y, told = self.packed()
            self.assertIn(said, told)
            self.assert_close(y, layer.result(self.x, **expected))
            for command in "verify", "info":
                self.assertIn(said, self.mha(command, "layer.mha")[1])

    def test_rotations(self):
        layer = Layer(kv_heads=2)
        linear = {"rope_type": "linear", "factor": 4.0}
        # All pairs turn slower than once in 1 position here, so that all are stretched in full.
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 1}
        yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 300}
        yarn |= {"truncate": False, "attention_factor": 1.5, "beta_fast": 8.0}
        low, high = (
            head_dim * math.log(300 / (turns * 2 * math.pi)) / (2 * math.log(500))
            for turns in (8, 1)
        )
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        self.assertTrue(np.any((0 < ramp) & (ramp < 1)))
        usual = frequencies(500)
        parameters = {"rope_theta": None, "rope_parameters": {**linear, "rope_theta": 500.0}}
        for more, said, expected, factor in (
            ({}, "causal, rotated (base 500)", usual, 1),
            ({"rope_theta": 1e6}, "rotated (base 1000000)", frequencies(1e6), 1),
            ({"rope_scaling": linear}, "linear_factor 4", usual / 4, 1),
            (parameters, "linear_factor 4", usual / 4, 1),
            ({"rope_scaling": llama3}, "llama3_factor 8", usual / 8, 1),
            ({"rope_scaling": yarn}, "yarn_factor 2", usual * (1 - ramp / 2), 1.5),
            ({"partial_rotary_factor": 0.67}, "4 elements", frequencies(500, 4), 1),
        ):
            settings = {**llama, **more}
            self.check(layer, layer.llama(), settings, said, frequencies=expected, factor=factor)

    def test_norms_windows_sinks_and_softcaps(self):
        rope = {"frequencies": frequencies(500)}
        kinds = {"layer_types": ["full_attention", "sliding_attention"]}
        cases = [
            ("qwen3", {"use_sliding_window": False}, "normalised (RMS), rotated", head_dim, first),
            ("olmo2", {}, "of all heads together", heads * head_dim, first),
            ("mistral", {"sliding_window": 3}, "window of 3 rows", 0, first),
            ("gemma2", {"sliding_window": 2}, "window of 2 rows, softcap 1.5", 0, first),
            ("gemma2", {"sliding_window": 2}, "(base 500), softcap 1.5", 0, second),
            ("qwen2", {"sliding_window": 2, **kinds}, "window of 2 rows", 0, second),
            ("qwen2", {"sliding_window": 2, **kinds}, "causal, rotated (base 500)", 0, first),
            ("gpt_oss", {"sliding_window": 4, **kinds}, "window of 4 rows, sinks", 0, second),
        ]
        more = {
            "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.5},
            "qwen2": {"use_sliding_window": True},
            "gpt_oss": {"rope_scaling": None},
        }
        for name, settings, said, q_norm, prefix in cases:
            layer = Layer(kv_heads=2, q_norm=q_norm)
            tensors = layer.llama(prefix)
            tensors |= {f"{prefix}sinks": layer.sinks} if "sinks" in said else {}
            window = re.search(r"window of (\d)", said)
            expected = {**rope, "window": int(window[1]) if window else None}
            expected |= {"epsilon": 1e-5, "all_heads": q_norm > head_dim} if q_norm else {}
            expected |= {"softcap": 1.5, "scale": 0.25} if name == "gemma2" else {}
            settings = {**llama, "model_type": name, **settings, **more.get(name, {})}
            self.check(layer, tensors, settings, said, sinks="sinks" in said, **expected)

    def test_gemma_3_rotates_layers_with_a_window_otherwise_and_adds_one_to_norms(self):
        layer, linear = Layer(q_norm=head_dim), {"rope_type": "linear", "factor": 8.0}
        gemma3 = {**llama, "model_type": "gemma3_text", "sliding_window": 2}
        gemma3 |= {"query_pre_attn_scalar": 6}
        gemma3 |= {"layer_types": ["sliding_attention", "full_attention"]}
        kinds = {
            "full_attention": {**linear, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        }
        for more in (
            {"rope_local_base_freq": 20.0, "rope_scaling": linear},
            {"rope_theta": None, "rope_parameters": kinds},
        ):
            for prefix, said, window, expected in (
                (first, "rotated (base 20), window of 2 rows", 2, frequencies(20)),
                (second, "base 500, linear_factor 8", None, frequencies(500) / 8),
            ):
                settings, expected = {**gemma3, **more}, {"frequencies": expected}
                expected |= {"epsilon": 1e-5, "adds_one": True, "window": window}
                self.check(layer, layer.llama(prefix), settings, said, **expected)

    def test_causality_is_that_of_the_family(self):
        layer = Layer()
        bert = {"hidden_size": heads * head_dim, "num_attention_heads": heads}
        gpt2 = {"n_embd": heads * head_dim, "n_head": heads, "activation_function": "gelu_new"}
        self.x = normal(rows, heads * head_dim)
        layer.w = {name: normal(heads * head_dim, heads * head_dim) for name in "qkvo"}
        layer.b["o"] = normal(heads * head_dim)
        names = (f"l.0.self.{name}" for name in ("query", "key", "value"))
        self.check(
            layer,
            layer.linears(*names, "l.0.output.dense"),
            {**bert, "model_type": "bert", "position_embedding_type": "absolute"},
            "4 heads of 6, not causal",
            causal=False,
        )
        fused = layer.fused("h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias")
        fused["h.0.attn.c_attn.weight"] = fused["h.0.attn.c_attn.weight"].T
        o = {"h.0.attn.c_proj.weight": layer.w["o"].T, "h.0.attn.c_proj.bias": layer.b["o"]}
        self.check(layer, {**fused, **o}, {**gpt2, "model_type": "gpt2"}, "4 heads of 6, causal")

    def test_every_family_of_names(self):
        layer = Layer()
        o, b = {"weight": layer.w["o"]}, {"bias": layer.b["o"]}
        output = lambda name: {f"{name}.{kind}": values for kind, values in {**o, **b}.items()}
        phi3 = {**layer.fused("0.qkv_proj.weight", "0.qkv_proj.bias"), **output("0.o_proj")}
        timm = {**layer.fused("0.attn.qkv.weight", "0.attn.qkv.bias"), **output("0.attn.proj")}
        torch = {**layer.fused("in_proj_weight", "in_proj_bias"), **output("out_proj")}
        own = layer.linears("W_query", "W_key", "W_value", "out_proj")
        for tensors in phi3, timm, torch, own, layer.llama("1.attn."):
            self.write("model.safetensors", tensors)
            self.assert_close(self.packed(*plain)[0], layer.result(self.x))
        timm["0.attn.relative_position_bias_table"] = normal(2, 2)
        self.write("model.safetensors", timm)
        self.refused(self.pack(*plain), "position_bias_table", "not supported")
        layer = Layer(has_bias=False)
        matrices = {f"W_{name}": layer.w[name[0]].T for name in ("query", "key", "value")}
        for more in {"out_proj": layer.w["o"].T}, {"out_proj.weight": layer.w["o"]}, {}:
            self.write("model.safetensors", {**matrices, **more})
            expected = layer.result(self.x, has_output=bool(more))
            self.assert_close(self.packed(*plain)[0], expected)

    def test_types(self):
        layer = Layer()
        exact, sizes = layer.result(self.x), {}
        tensors = layer.llama()
        self.write("model.safetensors", tensors)
        y, _ = self.packed(*plain)
        half = {name: values.astype(np.float16) for name, values in tensors.items()}
        brain = {
            name: (values.view(np.uint32) >> 16).astype(np.uint16)
            for name, values in tensors.items()
        }
        for stored in half, brain:
            self.write("model.safetensors", stored)
            np.testing.assert_array_equal(self.packed(*plain)[0], y)
        for words, bound in (
            (["--weight-type", "f16"], 2e-3),
            (["--weight-type", "int8"], 3e-2),
            (["--weight-type", "int8", "--arithmetic", "int16"], 3e-2),
            (["--arithmetic", "bf16"], 1e-2),
        ):
            other, _ = self.packed(*plain, *words)
            self.assert_close(other, exact, bound)
            self.assertEqual(np.array_equal(other, y), "f16" in words)  # which holds these weights
            shown = dict(
                line.split(None, 1) for line in self.mha("info", "layer.mha")[1].splitlines()
            )
            given = dict(zip(words[::2], words[1::2]))
            self.assertEqual(shown["weight_type"], given.get("--weight-type", "bf16"))
            self.assertEqual(shown.get("arithmetic"), given.get("--arithmetic"))
        self.write("model.safetensors", half)
        self.refused(self.pack(*plain, *words), "the matrices are f16, of which bf16 keeps 3 bits")
        words += ["--weight-type", "bf16"]
        np.testing.assert_array_equal(self.packed(*plain, *words)[0], other)

    def test_quantised_models(self):
        """Codes of AWQ, GPTQ and compressed-tensors are read as the configuration says."""
        inputs = outputs = heads * 16
        names = [f"{first}{name}_proj" for name in "qkvo"]
        codes, scales = random.integers(0, 16, (outputs, inputs)), np.full((2, outputs), 0.25)
        scales, matrix = scales.astype(np.float16), (np.float32(codes) - 8) * np.float32(0.25)
        words = lambda a: sum(a.reshape(len(a), -1, 8)[:, :, i] << 4 * i for i in range(8)).astype(
            np.uint32
        )
        packed = lambda a: words(np.int64(a)).view(np.int32)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        awq = codes.T.reshape(inputs, -1, 8)[:, :, order].reshape(inputs, outputs)
        middle = np.full((2, outputs), 8)
        stored = {
            "awq": {"qweight": packed(awq), "qzeros": packed(middle), "scales": scales},
            "gptq": {
                "qweight": packed(codes).T,
                "qzeros": packed(middle - 1),
                "scales": scales,
                "g_idx": np.arange(inputs, dtype=np.int32) // 32,
            },
            "compressed-tensors": {
                "weight_packed": packed(codes),
                "weight_scale": scales.T,
                "weight_shape": np.array([outputs, inputs]),
            },
        }
        group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
        said = {
            "awq": {"bits": 4, "version": "gemm", "group_size": 32, "zero_point": True},
            "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
            "compressed-tensors": {"format": "pack-quantized", "config_groups": {"group_0": group}},
        }
        self.x = normal(rows, inputs)
        model = {**llama, "hidden_size": inputs, "head_dim": 16}
        layer = mha.Layer(
            inputs, heads, layout="out_in", **{f"w_{name}": matrix for name in "qkvo"}
        )
        rope = mha.Rope.tables(16, rows, base=500.0)
        expected = layer.forward(self.x, is_causal=True, rope=rope)
        for method, tensors in stored.items():
            with self.subTest(method):
                settings = dict(
                    **model, quantization_config={"quant_method": method, **said[method]}
                )
                tensors = {f"{name}.{part}": a for name in names for part, a in tensors.items()}
                self.write("config.json", settings)
                self.write("model.safetensors", tensors)
                y, told = self.packed()
                self.assertIn("int4 in groups of 32", told)
                self.assert_close(y, expected, 1e-4)
                self.refused(self.pack("--weight-type", "f16"), "leave --weight-type out")
                wrong = {**settings["quantization_config"], "twist": 1}
                self.write("config.json", {**model, "quantization_config": wrong})
                self.refused(self.pack(), "has 'twist', which this version does not know")
                self.write("config.json", model)
                self.refused(self.pack(), "q_proj' is quantised", "quantization_config")
                self.write("config.json", settings)
                self.write("model.safetensors", {**tensors, f"{names[0]}.twist": normal(2)})
                self.refused(self.pack(), "twist")
                floats = {f"{names[3]}.weight": matrix}
                kept = {name: a for name, a in tensors.items() if "o_proj" not in name}
                self.write("model.safetensors", {**kept, **floats})
                self.refused(self.pack(), "some matrices are floats and others codes")
        for method, changed, sentence in (
            ("marlin", {}, "'marlin'; one of awq, gptq, compressed-tensors"),
            ("awq", {"version": "gemv"}, 'only "gemm" is supported'),
            ("compressed-tensors", {"config_groups": {}}, "has 0 groups; one is expected"),
            (
                "compressed-tensors",
                {"config_groups": {"g": {**group, "input_activations": {"num_bits": 8}}}},
                "'input_activations', which this version does not know",
            ),
        ):
            how = {"quant_method": method, **said.get(method, {}), **changed}
            self.write("config.json", {**model, "quantization_config": how})
            self.refused(self.pack(), sentence)

    def test_one_of_several_layers_in_several_files(self):
        layer = Layer()
        tensors = {**Layer().llama(first), **layer.llama(second)}
        tensors |= Layer().llama("model.layers.10.self_attn.")
        self.write("model.safetensors", tensors)
        y, _ = self.packed(*plain, "--layer", "1")
        self.assert_close(y, layer.result(self.x))
        for name in "layers.1", second[:-1]:
            np.testing.assert_array_equal(self.packed(*plain, "--layer", name)[0], y)
        self.refused(self.pack(*plain), "3 layers; choose one with --layer", first[:-1])
        self.refused(self.pack(*plain, "--layer", "3"), "has no layer '3'")
        files = {name: f"{2 * at // len(tensors)}.safetensors" for at, name in enumerate(tensors)}
        files[f"{second}v_proj.weight"] = "0.safetensors"
        other = next(iter(tensors))  # also in a file from which the index does not take it
        for file in "0.safetensors", "1.safetensors":
            own = {name: values for name, values in tensors.items() if files[name] == file}
            self.write(file, {other: normal(2, 2), **own})
        words = ["pack", "--weights", "model.safetensors.index.json", *plain, "--layer", "layers.1"]
        index = lambda **more: self.write(words[2], {"metadata": {}, "weight_map": files | more})
        index()
        self.assertEqual(self.mha(*words, "--output", "layer.mha")[0], 0)
        layer, call = mha.open_layer("layer.mha")
        np.testing.assert_array_equal(layer.forward(self.x, **call), y)
        self.refused(self.mha(*words, "--output", "1.safetensors"), "is also read")
        for given, sentence in (
            ("1.safetensors", "says that 1.safetensors has 'a', which it has not"),
            ("2.safetensors", "2.safetensors: No such file"),
            ("../1.safetensors", "must be the name of a file in the same folder"),
            (3, "must be the name of a file"),
        ):
            index(a=given)
            self.refused(self.mha(*words, "--output", "layer.mha"), sentence)


class Configuration(Command):
    def setUp(self):
        super().setUp()
        self.layer = Layer(kv_heads=2)
        self.write("model.safetensors", self.layer.llama())

    def pack_with(self, settings, *words):
        self.write("config.json", settings)
        return self.pack(*words)

    def test_what_is_not_known_or_contradicts_is_refused(self):
        deep = lambda levels: b'{"a": ' + b"[" * levels + b"]" * levels + b"}"
        linear = {"rope_type": "linear", "factor": 2.0}
        sliding = {"model_type": "qwen2", "layer_types": ["sliding_attention"]}
        gemma2 = {"model_type": "gemma2", "query_pre_attn_scalar": 4, "sliding_window": None}
        for more, sentence in (
            ({"attention_sinks": 4}, "'attention_sinks', which this version does not know"),
            ({"model_type": "mamba"}, "'mamba'; one of bert"),
            ({"model_type": None}, "'model_type', which is needed"),
            ({"rope_theta": None}, "'rope_theta', which is needed"),
            ({"num_attention_heads": None}, "'num_attention_heads', which is needed"),
            ({"num_attention_heads": "4"}, "a whole number of at least 1"),
            ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope'; linear, yarn"),
            ({"rope_scaling": {**linear, "twist": 1}}, "'twist'"),
            ({"rope_scaling": {"rope_type": "linear"}}, "'factor', which is needed"),
            ({"rope_scaling": 3}, "not a JSON object"),
            ({"sliding_window": 3}, "'sliding_window'"),
            ({"rope_theta": 0.5}, "base"),
            ({"hidden_size": 24}, "check config.json"),
            ({"num_attention_heads": 3}, "check config.json"),
            ({"num_key_value_heads": 4}, "check config.json"),
            ({"partial_rotary_factor": 0.5}, "even number"),
            ({"partial_rotary_factor": -0.5}, "a number above 0"),
            ({"partial_rotary_factor": 1e300}, "up to 1 is expected"),
            ({"partial_rotary_factor": 0.1}, "nothing of a head of 6 to rotate"),
            ({"rope_theta": 1e300}, "3.4e38"),
            ({"model_type": "qwen3"}, "q_norm.weight"),
            ({"model_type": "qwen2", "sliding_window": 3}, "'layer_types'"),
            ({"model_type": "gemma2"}, "'query_pre_attn_scalar'"),
            ({**gemma2, "query_pre_attn_scalar": -4}, "'query_pre_attn_scalar' is -4"),
            ({**gemma2, "attn_logit_softcapping": -1}, "score.softcap is -1"),
            ({**sliding, "layer_types": ["chunked"], "sliding_window": 3}, "'chunked'"),
            ({**sliding, "layer_types": [], "sliding_window": 3}, "'layer_types'"),
            ({"model_type": "bert", "is_decoder": True}, "'is_decoder' is true"),
            ({"rope_scaling": {**linear, "type": "dynamic"}}, "'linear' and the type"),
            ({"rope_scaling": {**linear, "rope_theta": 9.0}}, "'rope_theta' is 9, and 500 in"),
            ({"rope_scaling": linear, "rope_parameters": linear}, "has both"),
            (sliding, "'layer_types' is not all full"),
            ({**sliding, "sliding_window": 3, "use_sliding_window": False}, "not all full"),
            (b"{", "not a JSON object"),
            (json.dumps(llama)[:-1].encode() + b', "rope_theta": 9}', "'rope_theta' twice"),
            (deep(10**6), "nested too deep"),
            ({"model_type": "\x9b2J\u00e9\n" + "\u00e9" * 200}, "'?2J\u00e9?" + "\u00e9" * 115),
        ):
            with self.subTest(sentence):
                settings = more if isinstance(more, bytes) else {**llama, **more}
                self.refused(self.pack_with(settings), sentence)
        same = {**linear, "type": "linear", "rope_theta": 500.0}
        self.assertEqual(self.pack_with({**llama, "rope_scaling": same})[0], 0)

    def test_what_a_family_has_without_being_told_has_to_be_said(self):
        window = ["sliding_attention"]
        gemma2 = {"query_pre_attn_scalar": 4, "attn_logit_softcapping": 1, "sliding_window": 3}
        gpt_oss = {"sliding_window": 3, "layer_types": window, "rope_parameters": {"rope_theta": 5}}
        qwen2 = {"sliding_window": 3, "use_sliding_window": True, "layer_types": window}
        for kind, said, keys in (
            ("gemma2", gemma2, ("attn_logit_softcapping", "sliding_window")),
            ("gpt_oss", {**gpt_oss, "rope_theta": 5}, ("sliding_window", "rope_parameters")),
            ("mistral", {"sliding_window": 3}, ("sliding_window",)),
            ("qwen2", qwen2, ("use_sliding_window",)),
        ):
            settings = {**llama, "model_type": kind, **said}
            for key in keys:
                without = {name: value for name, value in settings.items() if name != key}
                without |= {"layer_types": ["full_attention"]} if key == "sliding_window" else {}
                name = {"rope_parameters": "rope_scaling"}.get(key, key)
                with self.subTest(kind=kind, key=key):
                    self.refused(self.pack_with(without), f"has no '{name}', which is needed")
                if name == "sliding_window" and kind != "gpt_oss":  # which needs its sinks
                    self.assertEqual(self.pack_with({**without, name: None})[0], 0)

    def test_options_stand_in_for_it_and_do_not_contradict_it(self):
        for words in (
            ["--heads", 4],
            ["--causal"],
            ["--no-causal"],
            ["--rope-base", 1],
            ["--no-rope"],
        ):
            self.refused(self.pack_with(llama, *words), words[0], "config.json already sets it")
        self.write("config.json", {**llama, "attention_sinks": 4})
        self.write("other.json", llama)
        expected = self.layer.result(self.x, frequencies=frequencies(500))
        self.assert_close(self.packed("--config", "other.json")[0], expected)
        words = ["--no-config", "--heads", 4, "--causal", "--rope-base", 100]
        y, told = self.packed(*words)
        self.assertIn("rotated (base 100)", told)
        self.assert_close(y, self.layer.result(self.x, frequencies=frequencies(100)))
        os.remove("config.json")
        y, _ = self.packed("--heads", 4, "--no-causal", "--no-rope")
        self.assert_close(y, self.layer.result(self.x, causal=False))
        for words, sentence in (
            ([], "--heads is needed, because there is no config.json"),
            (["--heads", 4], "--causal or --no-causal is needed"),
            (["--heads", 4, "--causal"], "--rope-base or --no-rope is needed"),
            (["--heads", 5, "--causal", "--no-rope"], "5 heads; check --heads"),
        ):
            self.refused(self.pack(*words), sentence)
        for name, sentence in ("q_norm.weight", "without a config"), ("g_proj.weight", "supported"):
            self.write("model.safetensors", {**self.layer.llama(), first + name: normal(head_dim)})
            self.refused(self.pack(*plain), name, sentence)
        self.refused(self.pack_with(llama), "g_proj.weight", "not supported")


class Files(Command):
    def setUp(self):
        super().setUp()
        self.write("config.json", {**llama, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
        self.write("model.safetensors", Layer().llama())

    def test_outputs_are_whole_or_not_there(self):
        files = ["config.json", "model.safetensors"]
        out = self.write("layer.mha", b"old")
        out.chmod(0o640)
        os.symlink("layer.mha", "link.mha")
        for output in "link.mha", "/dev/null":
            self.assertEqual(self.pack("--output", output, "--quiet"), (0, "", ""))
        self.assertTrue(pathlib.Path("link.mha").is_symlink())
        self.assertEqual((stat.S_IMODE(out.stat().st_mode), out.read_bytes()[:3]), (0o640, b"mha"))
        for output, sentence in (
            ("config.json", "is also read"),
            ("model.safetensors", "is also read"),
            (".", "directory"),
            ("none/y.mha", "none/y.mha.partial-"),
            ("/dev/full", "No space left on device"),
        ):
            self.refused(self.pack("--output", output), sentence)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in 0, 4096, out.stat().st_size - 1:
            out.write_bytes(b"old")
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
            try:
                done = self.pack()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            self.refused(done, "File too large")
            self.assertEqual(out.read_bytes(), b"old")
        for stop, status in (KeyboardInterrupt, 130), (SystemExit(143), 143):
            with mock.patch("os.replace", side_effect=stop):
                self.assertEqual(self.pack("--quiet"), (status, "", ""))
            self.assertEqual(out.read_bytes(), b"old")
        self.assertEqual(sorted(os.listdir()), sorted([*files, "layer.mha", "link.mha"]))

    def test_weights(self):
        entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
        of = lambda **more: with_header(
            json.dumps({"W_query": {**entry, **more}}).encode(), bytes(24)
        )

        def layer(*shapes):
            """q, k, v and o: inputs, outputs and the width of a bias."""
            names, tensors = ("W_query", "W_key", "W_value", "out_proj"), {}
            for name, (inputs, outputs, bias) in zip(names, [*shapes, (4, 4, 0)]):
                tensors[f"{name}.weight"] = normal(outputs, inputs)
                tensors |= {f"{name}.bias": normal(bias)} if bias else {}
            return tensors

        good, one = (4, 4, 0), '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
        for content, sentence in (
            (layer(good, (4, 2, 0), good), "'W_key.weight' takes rows of 4 to rows of 2"),
            (layer((4, 4, 3), good, good), "(3,); (4,) is expected"),
            (layer(good, good, (5, 4, 0)), "'W_value.weight' takes rows of 5"),
            (layer(good, good, good, (5, 4, 0)), "'out_proj.weight' takes rows of 5"),
            (layer(good, (4, 8, 0), (4, 3, 0)), "'W_value.weight' takes rows of 4 to rows of 3"),
            ({"0.q_proj.weight": normal(4, 4), "0.q_proj.lora_A.weight": normal(1, 4)}, "lora_A"),
            ({"a\n\x1b[2J.W_query": normal(1, 1), "b.W_query": normal(1, 1)}, "a??[2J"),
            (b"", "not a .safetensors file"),
            (b"12345678<", "not a .safetensors file"),
            (with_header(b"{}", length=99), "it looks truncated"),
            (with_header(b"{]"), "not a JSON object"),
            (with_header(b"{}"), "no attention layer"),
            (with_header(f"{{{one}, {one}}}".encode(), bytes(4)), "twice"),
            (of(dtype=3), "is not described by"),
            (of(shape=[2, -3]), "is not described by"),
            (of(data_offsets=[0, 24, 25]), "is not described by"),
            (of(more=1), "is not described by"),
            (of(data_offsets=[0, 28]), "it looks truncated"),
            (of(data_offsets=[24, 0]), "lies from byte 24"),
            (of(shape=[2**62, 2**62]), "does not fit"),
            (of(), "has no tensor 'W_key'"),
            (of(dtype="F8"), "stored as 'F8'"),
            (b'{"weight_map": {}}', "has no tensor in weight_map"),
            (with_header(b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), "nested too deep"),
        ):
            with self.subTest(sentence):
                self.write("model.safetensors", content)
                words = ["--no-config", "--heads", 1, "--causal", "--no-rope"]
                self.refused(self.pack(*words), sentence)
        for path, sentence in ("none", "none: No such file"), (".", "Is a directory"):
            self.refused(self.pack("--weights", path), sentence)

    def test_packed_layers(self):
        self.assertEqual(self.pack()[0], 0)
        whole = pathlib.Path("layer.mha").read_bytes()
        length = struct.unpack("<Q", whole[-16:-8])[0]
        weights, call = whole[: -24 - length], json.loads(whole[-24 - length : -24])

        def with_call(**more):
            text, total = json.dumps({**call, **more}).encode(), 0xCBF29CE484222325
            for byte in text:
                total = (total ^ byte) * 0x100000001B3 % 2**64
            return weights + text + struct.pack("<QQ", total, len(text)) + b"mha call"

        self.assertEqual(whole, with_call())
        for content, sentence in (
            (b"", "is not a packed layer; mha pack writes one"),
            (b"\x93NUMPY" * 99, "is not a packed layer; mha pack writes one"),
            (weights, "holds the weights of a layer, but not how it is called"),
            (whole[:-30] + b"?" + whole[-29:], "the checksum of its call settings"),
            (weights[:100] + b"!" + whole[101:], "broken.mha"),
            (with_call(tilt=3), "'tilt' in its call settings"),
            (with_call(rope={"base": 5, "twist": 1}), "'twist' in its call settings"),
            (with_call(rope=5), "not objects of JSON"),
            (with_call(version=2), "another version"),
            (with_call(sinks=[1.0]), "sinks"),
            (with_call(window=0), "window_left"),
        ):
            with self.subTest(sentence):
                self.write("broken.mha", content)
                self.refused(self.mha("verify", "broken.mha"), "broken.mha: ", sentence)
        with self.assertRaisesRegex(ValueError, "sinks"):
            mha.open_layer(self.write("broken.mha", with_call(sinks=[1.0])))
        self.refused(self.mha("verify", "none"), "none: No such file")

    def test_damaged_files_are_read_or_refused_by_name(self):
        self.assertEqual(self.pack()[0], 0)
        pick = lambda end, count: map(int, random.integers(0, end, count))
        for name in "model.safetensors", "config.json", "layer.mha":
            path = pathlib.Path(name)
            good = path.read_bytes()
            end = 8 + struct.unpack("<Q", good[:8])[0] if name[0] == "m" else min(len(good), 512)
            cuts = [good[:at] for at in (0, 1, 8, end - 1, len(good) - 1, *pick(len(good), 30))]
            changed = [
                good[:at] + bytes([good[at] ^ 1 << int(random.integers(8))]) + good[at + 1 :]
                for at in pick(end, 200)
            ]
            for number, content in enumerate(cuts + changed):
                path.write_bytes(content)
                words = ["verify", name] if name == "layer.mha" else None
                done = self.mha(*words) if words else self.pack("--output", "new.mha", "--quiet")
                if number >= len(cuts) and done[0] == 0:
                    continue
                self.refused(done)
                self.assertTrue(name in done[2] or "model.safetensors: " in done[2], done)
            path.write_bytes(good)


class Usage(Command):
    def test_wrong_usage_has_exit_status_2(self):
        for words, sentence in (
            ([], "info, pack, verify, explain or onnx is expected"),
            (["run"], "invalid choice: 'run'"),
            (["pack", "--output", "a"], "--weights"),
            (["pack", "--weights", "a"], "--output"),
            (["verify"], "FILE"),
            (["info", "--hed"], "--hed"),
            (["pack", "--heads", "0"], "a whole number of at least 1 is expected, not '0'"),
            (["pack", "--rope-base", "-1"], "--rope-base"),
            (["pack", "--weight-type", "int5"], "invalid choice: 'int5'"),
            (["pack", "--causal", "--no-causal"], "not allowed with"),
        ):
            with self.subTest(words):
                status, out, err = self.mha(*words)
                self.assertEqual((status, out), (2, ""))
                self.assertIn(sentence, err.splitlines()[-1])

    def test_help_version_and_info(self):
        for words in [], ["pack"], ["verify"], ["info"]:
            status, out, _ = self.mha(*words, "--help")
            self.assertEqual(status, 0)
            self.assertRegex(out, r"\nExamples?:\n  mha ")
            known = set(re.findall(r"--[a-z-]+", out[: out.index("Example")]))
            used = set(re.findall(r"--[a-z-]+", out[out.index("Example") :]))
            self.assertTrue(not words or used <= known, used - known)
        self.assertRegex(self.mha("--version")[1], r"\Amha \d+\.\d+\.\d+ \(contract \d+\)\n\Z")
        self.assertRegex(
            self.mha("info")[1],
            r"\Aversion +\d+\.\d+\.\d+\ncontract +\d+\ninstruction sets +scalar[\w, ]*\n\Z",
        )


python_support.run(Packed, Configuration, Files, Usage)
