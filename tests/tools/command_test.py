#!/usr/bin/env python3
"""Tests the command mha: what it computes, what packed files keep, what it takes from config.json,
and what it refuses. Needs only Python.

    command_test.py MHA [unittest arguments]

Results are compared with a layer in plain Python, in double precision.
"""

import array
import json
import math
import os
import pathlib
import random
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import unittest

from formats import bfloat16, flat, float16, floats, safetensors, shape_of, transposed, with_header

MHA = os.path.abspath(sys.argv.pop(1))
width, heads, head_dim, rows = 20, 4, 6, 7


def normal(*shape):
    """Nested lists of floats that are exact in binary32, and in bfloat16."""
    if not shape:
        return struct.unpack("<f", b"\0\0" + struct.pack("<f", random.gauss(0, 0.5))[2:])[0]
    return [normal(*shape[1:]) for _ in range(shape[0])]


def npy(values, descr="<f4", encode=floats, shape=None, order="False"):
    header = (
        f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape':"
        f" {shape or tuple(shape_of(values))}, }}".encode()
    )
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + encode(values)


class Layer:
    """A layer of a model, and its results; matrices are [in, out]."""

    def __init__(self, kv_heads=heads, has_bias=True, q_norm=0):
        self.kv_heads = kv_heads
        self.w = {
            "q": normal(width, heads * head_dim),
            "k": normal(width, kv_heads * head_dim),
            "v": normal(width, kv_heads * head_dim),
            "o": normal(heads * head_dim, width),
        }
        self.b = {
            name: normal(len(matrix[0])) if has_bias else [0.0] * len(matrix[0])
            for name, matrix in self.w.items()
        }
        self.has_bias, self.norms = (
            has_bias,
            (
                {
                    "q": normal(q_norm),
                    "k": normal(kv_heads * head_dim if q_norm > head_dim else q_norm),
                }
                if q_norm
                else {}
            ),
        )
        self.sinks = normal(heads)

    def linears(self, *names):
        """As nn.Linear stores q, k, v and o."""
        tensors = {}
        for name, key in zip(names, "qkvo"):
            tensors[name + ".weight"] = transposed(self.w[key])
            tensors.update({name + ".bias": self.b[key]} if self.has_bias else {})
        return tensors

    def llama(self, prefix="model.layers.0.self_attn.", output="o_proj"):
        tensors = self.linears(*(prefix + name for name in ("q_proj", "k_proj", "v_proj", output)))
        return {
            **tensors,
            **{f"{prefix}{name}_norm.weight": values for name, values in self.norms.items()},
        }

    def fused(self):
        return [q + k + v for q, k, v in zip(*(self.w[name] for name in "qkv"))], sum(
            (self.b[name] for name in "qkv"), []
        )

    def result(
        self,
        x,
        causal=True,
        frequencies=None,
        factor=1.0,
        dims=head_dim,
        epsilon=None,
        adds_one=False,
        all_heads=False,
        scale=None,
        window=0,
        softcap=0,
        sinks=None,
        has_output=True,
    ):
        """The output for one sequence; frequencies: angle of each pair per position."""
        project = lambda row, name: [
            sum(a * w for a, w in zip(row, column)) + b
            for column, b in zip(transposed(self.w[name]), self.b[name])
        ]
        split = lambda row: [row[at : at + head_dim] for at in range(0, len(row), head_dim)]

        def prepared(row, name, position):
            if epsilon is not None:
                weight = [w + adds_one for w in self.norms[name]]
                if all_heads:
                    root = math.sqrt(sum(a * a for a in row) / len(row) + epsilon)
                    row = [a / root * w for a, w in zip(row, weight)]
                else:
                    row = [
                        a / math.sqrt(sum(b * b for b in part) / head_dim + epsilon) * w
                        for part in split(row)
                        for a, w in zip(part, weight)
                    ]
            parts = split(row)
            for part in parts if frequencies else []:
                for pair, frequency in enumerate(frequencies):
                    cos, sin = (
                        factor * math.cos(position * frequency),
                        factor * math.sin(position * frequency),
                    )
                    a, b = part[pair], part[pair + dims // 2]
                    part[pair], part[pair + dims // 2] = a * cos - b * sin, b * cos + a * sin
            return parts

        q = [prepared(project(row, "q"), "q", i) for i, row in enumerate(x)]
        k = [prepared(project(row, "k"), "k", i) for i, row in enumerate(x)]
        v = [split(project(row, "v")) for row in x]
        output = []
        for i in range(len(x)):
            merged = []
            for head in range(heads):
                kv = head // (heads // self.kv_heads)
                seen = [
                    j
                    for j in range(len(x))
                    if (not causal or j <= i) and (not window or j > i - window)
                ]
                scores = [
                    sum(a * b for a, b in zip(q[i][head], k[j][kv])) * (scale or head_dim**-0.5)
                    for j in seen
                ]
                scores = (
                    [softcap * math.tanh(score / softcap) for score in scores]
                    if softcap
                    else scores
                )
                weights = [math.exp(score) for score in scores]
                total = sum(weights) + (math.exp(sinks[head]) if sinks else 0)
                merged += [
                    sum(w * v[j][kv][d] for w, j in zip(weights, seen)) / total
                    for d in range(head_dim)
                ]
            output.append(
                [
                    sum(a * w for a, w in zip(merged, column)) + b
                    for column, b in zip(transposed(self.w["o"]), self.b["o"])
                ]
                if has_output
                else merged
            )
        return output


def frequencies(base, dims=head_dim):
    return [base ** (-2 * pair / dims) for pair in range(dims // 2)]


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


class Command(unittest.TestCase):
    def setUp(self):
        random.seed(1)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.x = normal(rows, width)
        self.write("x.npy", npy(self.x))

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    def mha(self, *words, **more):
        return subprocess.run(
            [MHA, *map(str, words)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            **more,
        )

    def ok(self, *words):
        done = self.mha(*words)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def run_it(self, *words):
        """(rows of y.npy as one list, what was said)"""
        done = self.ok(
            "run",
            *words,
            "--output",
            "y.npy",
            *([] if "--input" in words else ["--input", "x.npy"]),
        )
        self.assertEqual((done.stdout, done.stderr.count("\n")), ("", 1))
        bytes = (self.folder / "y.npy").read_bytes()
        length = 10 + struct.unpack("<H", bytes[8:10])[0]
        self.assertEqual(length % 64, 0)
        return list(array.array("f", bytes[length:])), done.stderr

    def assert_close(self, actual, expected, bound=2e-5):
        expected = flat(expected)
        self.assertEqual(len(actual), len(expected))
        self.assertLess(
            max(abs(a - b) for a, b in zip(actual, expected)), bound * max(map(abs, expected))
        )

    def refused(self, done, *sentence):
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        self.assertRegex(done.stderr, r"\Amha: [^\n]*\n\Z")
        for words in sentence:
            self.assertIn(words, done.stderr)


class Packed(Command):
    """A packed file keeps what is needed to run the layer."""

    def check(self, layer, tensors, settings, said, **expected):
        """run --weights and run --packed, without options, give this result and the same bits."""
        self.write("config.json", settings)
        self.write("model.safetensors", safetensors(tensors))
        y, told = self.run_it("--weights", "model.safetensors")
        self.assertIn(said, told)
        self.assert_close(y, layer.result(self.x, **expected))
        self.assertIn(
            said, self.ok("pack", "--weights", "model.safetensors", "--output", "layer.mha").stderr
        )
        packed, told = self.run_it("--packed", "layer.mha")
        self.assertIn(said, told)
        self.assertEqual(packed, y)
        decoded, _ = self.run_it(
            "--packed",
            "layer.mha",
            *(["--decode", "--prompt", "3"] if expected.get("causal", True) else []),
        )
        self.assertEqual(decoded, y)
        self.assertIn(said, self.ok("verify", "layer.mha").stdout)

    def test_the_rotation_is_not_lost(self):
        layer = Layer(kv_heads=2)
        self.check(
            layer, layer.llama(), llama, "causal, rotated (base 500)", frequencies=frequencies(500)
        )
        self.check(
            layer,
            layer.llama(),
            {**llama, "rope_theta": 1e6},
            "rotated (base 1000000)",
            frequencies=frequencies(1e6),
        )

    def test_scaled_rotations_come_from_either_form_of_the_configuration(self):
        layer = Layer()
        linear = {"rope_type": "linear", "factor": 4.0}
        slower = [frequency / 4 for frequency in frequencies(500)]
        self.check(
            layer,
            layer.llama(),
            {**llama, "rope_scaling": linear},
            "linear_factor 4",
            frequencies=slower,
        )
        parameters = {
            **{key: value for key, value in llama.items() if key != "rope_theta"},
            "rope_parameters": {**linear, "rope_theta": 500.0},
        }
        self.check(layer, layer.llama(), parameters, "linear_factor 4", frequencies=slower)
        # All pairs turn slower than once in 1 position here, so that all are stretched in full.
        scaled = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1,
        }
        self.check(
            layer,
            layer.llama(),
            {**llama, "rope_scaling": scaled},
            "llama3_factor 8",
            frequencies=[f / 8 for f in frequencies(500)],
        )
        yarn = {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 300,
            "truncate": False,
            "attention_factor": 1.5,
            "beta_fast": 8.0,
        }
        low, high = (
            head_dim * math.log(300 / (turns * 2 * math.pi)) / (2 * math.log(500))
            for turns in (8, 1)
        )
        ramps = [min(max((pair - low) / (high - low), 0), 1) for pair in range(head_dim // 2)]
        mixed = [frequency * (1 - ramp / 2) for frequency, ramp in zip(frequencies(500), ramps)]
        self.assertTrue(any(0 < ramp < 1 for ramp in ramps))
        self.check(
            layer,
            layer.llama(),
            {**llama, "rope_scaling": yarn},
            "yarn_factor 2",
            frequencies=mixed,
            factor=1.5,
        )
        self.check(
            layer,
            layer.llama(),
            {**llama, "partial_rotary_factor": 0.67},
            "4 elements",
            frequencies=frequencies(500, 4),
            dims=4,
        )

    def test_norms_are_not_lost(self):
        layer = Layer(kv_heads=2, q_norm=head_dim)
        qwen3 = {
            **llama,
            "model_type": "qwen3",
            "num_key_value_heads": 2,
            "use_sliding_window": False,
            "sliding_window": None,
        }
        self.check(
            layer,
            layer.llama(),
            qwen3,
            "normalised (RMS), rotated (base 500)",
            frequencies=frequencies(500),
            epsilon=1e-5,
        )
        layer = Layer(kv_heads=2, q_norm=heads * head_dim)
        self.check(
            layer,
            layer.llama(),
            {**llama, "model_type": "olmo2"},
            "of all heads together",
            frequencies=frequencies(500),
            epsilon=1e-5,
            all_heads=True,
        )

    def test_windows_are_those_of_the_layer(self):
        layer = Layer()
        mistral = {**llama, "model_type": "mistral", "sliding_window": 3}
        self.check(
            layer,
            layer.llama(),
            mistral,
            "window of 3 rows",
            frequencies=frequencies(500),
            window=3,
        )
        gemma2 = {
            **llama,
            "model_type": "gemma2",
            "sliding_window": 2,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 1.5,
        }
        expected = {"frequencies": frequencies(500), "softcap": 1.5, "scale": 0.25}
        self.check(
            layer, layer.llama(), gemma2, "window of 2 rows, softcap 1.5", window=2, **expected
        )
        self.check(
            layer,
            layer.llama("model.layers.1.self_attn."),
            gemma2,
            "rotated (base 500), softcap 1.5",
            **expected,
        )
        qwen2 = {
            **llama,
            "model_type": "qwen2",
            "sliding_window": 2,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        }
        self.check(
            layer,
            layer.llama("model.layers.1.self_attn."),
            qwen2,
            "window of 2 rows",
            frequencies=frequencies(500),
            window=2,
        )
        self.check(
            layer, layer.llama(), qwen2, "causal, rotated (base 500)", frequencies=frequencies(500)
        )

    def test_gemma_3_rotates_layers_with_a_window_otherwise_and_adds_one_to_norms(self):
        layer = Layer(q_norm=head_dim)
        gemma3 = {
            **llama,
            "model_type": "gemma3_text",
            "sliding_window": 2,
            "query_pre_attn_scalar": 6,
            "rope_local_base_freq": 20.0,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
        expected = {"epsilon": 1e-5, "adds_one": True}
        self.check(
            layer,
            layer.llama(),
            gemma3,
            "rotated (base 20), window of 2 rows",
            frequencies=frequencies(20),
            window=2,
            **expected,
        )
        slow = [frequency / 8 for frequency in frequencies(500)]
        self.check(
            layer,
            layer.llama("model.layers.1.self_attn."),
            gemma3,
            "base 500, linear_factor 8",
            frequencies=slow,
            **expected,
        )
        later = {
            **{key: value for key, value in gemma3.items() if not key.startswith("rope")},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        }
        self.check(
            layer,
            layer.llama(),
            later,
            "rotated (base 20), window of 2 rows",
            frequencies=frequencies(20),
            window=2,
            **expected,
        )
        self.check(
            layer,
            layer.llama("model.layers.1.self_attn."),
            later,
            "base 500, linear_factor 8",
            frequencies=slow,
            **expected,
        )

    def test_one_matrix_of_grouped_queries(self):
        layer = Layer(kv_heads=2, has_bias=False)
        tensors = {
            "model.layers.0.self_attn.qkv_proj.weight": transposed(layer.fused()[0]),
            "model.layers.0.self_attn.o_proj.weight": transposed(layer.w["o"]),
        }
        phi3 = {
            **llama,
            "model_type": "phi3",
            "num_key_value_heads": 2,
            "sliding_window": 3,
            "original_max_position_embeddings": 4096,
            "auto_map": {},
        }
        self.check(layer, tensors, phi3, "window of 3 rows", frequencies=frequencies(500), window=3)
        self.check(
            layer,
            tensors,
            {**phi3, "sliding_window": None},
            "causal, rotated (base 500)",
            frequencies=frequencies(500),
        )

    def test_sinks_are_not_lost(self):
        layer = Layer(kv_heads=2)
        tensors = {**layer.llama(), "model.layers.0.self_attn.sinks": layer.sinks}
        settings = {
            **llama,
            "model_type": "gpt_oss",
            "num_key_value_heads": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention"],
            "rope_scaling": None,
        }
        self.check(
            layer,
            tensors,
            settings,
            "window of 4 rows, sinks",
            frequencies=frequencies(500),
            window=4,
            sinks=layer.sinks,
        )

    def test_causality_is_that_of_the_family(self):
        bert = {
            "model_type": "bert",
            "hidden_size": width,
            "num_attention_heads": heads,
            "position_embedding_type": "absolute",
        }
        gpt2 = {
            "model_type": "gpt2",
            "n_embd": width,
            "n_head": heads,
            "activation_function": "gelu_new",
        }
        for settings, causal in ((bert, False), (gpt2, True)):
            self.write("config.json", settings)
            w, b = normal(width, 3 * width), normal(3 * width)
            tensors = {
                "h.0.attn.c_attn.weight": w,
                "h.0.attn.c_attn.bias": b,
                "h.0.attn.c_proj.weight": normal(width, width),
            }
            if not causal:
                parts = {
                    name: transposed([row[at : at + width] for row in w])
                    for name, at in (("query", 0), ("key", width), ("value", 2 * width))
                }
                tensors = {
                    f"layer.0.attention.self.{name}.weight": part for name, part in parts.items()
                }
                tensors["layer.0.attention.output.dense.weight"] = normal(width, width)
            self.write("model.safetensors", safetensors(tensors))
            y, told = self.run_it("--weights", "model.safetensors")
            self.assertIn(
                f"{heads} heads of {width // heads}, {'causal' if causal else 'not causal'}, ", told
            )
            shorter = self.x[:-1] + [normal(width)]
            self.write("other.npy", npy(shorter))
            other, _ = self.run_it("--weights", "model.safetensors", "--input", "other.npy")
            self.assertEqual(y[:width] == other[:width], causal)
            self.ok("pack", "--weights", "model.safetensors", "--output", "layer.mha")
            self.assertEqual(self.run_it("--packed", "layer.mha")[0], y)

    def test_the_layer_is_what_the_library_packs_and_the_call_lies_behind_it(self):
        layer = Layer(q_norm=head_dim)
        self.write("config.json", {**llama, "model_type": "qwen3"})
        self.write("model.safetensors", safetensors(layer.llama()))
        self.ok("pack", "--weights", "model.safetensors", "--output", "layer.mha")
        bytes = (self.folder / "layer.mha").read_bytes()
        length = struct.unpack("<Q", bytes[-16:-8])[0]
        call = json.loads(bytes[-24 - length : -24])
        self.assertEqual(
            (bytes[:8], bytes[-8:], (len(bytes) - 24 - length) % 64), (b"mha pack", b"mha call", 0)
        )
        self.assertEqual(
            {key: call[key] for key in ("version", "causal", "rope")},
            {"version": 1, "causal": True, "rope": {"base": 500.0}},
        )
        self.assertEqual(call["norm"]["q_weight"], layer.norms["q"])
        self.refused(self.changed(bytes[: -24 - length]), "has no call settings", "mha pack")
        self.refused(
            self.changed(bytes[: -24 - length // 2] + b"?" + bytes[-23 - length // 2 :]), "damaged"
        )
        self.refused(
            self.changed(self.with_call(bytes, length, {**call, "tilt": 3})),
            "'tilt'",
            "a later version",
        )
        self.refused(
            self.changed(self.with_call(bytes, length, {**call, "version": 2})), "another version"
        )
        self.refused(
            self.changed(self.with_call(bytes, length, {**call, "sinks": [1.0]})),
            "needs one sink for each head",
        )
        self.refused(self.changed(bytes[:100] + b"!" + bytes[101:]), "broken.mha")

    def with_call(self, bytes, length, call):
        """The packed bytes followed by another call with the right checksum."""
        text, total = json.dumps(call).encode(), 0xCBF29CE484222325
        for byte in text:
            total = (total ^ byte) * 0x100000001B3 % 2**64
        return bytes[: -24 - length] + text + struct.pack("<QQ", total, len(text)) + b"mha call"

    def changed(self, bytes):
        self.write("broken.mha", bytes)
        self.refused(self.mha("verify", "broken.mha"))
        return (
            self.mha("run", "--packed", "broken.mha", "--input", "x.npy", "--output", "y.npy")
            if b"!" not in bytes[100:101]
            else self.mha("verify", "broken.mha")
        )


class Configuration(Command):
    def setUp(self):
        super().setUp()
        self.layer = Layer(kv_heads=2)
        self.write("model.safetensors", safetensors(self.layer.llama()))

    def run_with(self, settings, *words):
        self.write("config.json", settings)
        return self.mha(
            "run", "--weights", "model.safetensors", "--input", "x.npy", "--output", "y.npy", *words
        )

    def test_what_is_not_known_is_refused(self):
        deep = lambda levels: [deep(levels - 1)] if levels > 1 else []
        without = lambda key: {name: value for name, value in llama.items() if name != key}
        table = [
            (
                {**llama, "attention_sinks": 4},
                "'attention_sinks', which this version does not know",
            ),
            ({**llama, "model_type": "mamba"}, "'mamba'; one of bert"),
            (without("model_type"), "'model_type', which is needed"),
            (without("rope_theta"), "'rope_theta', which is needed"),
            (without("num_attention_heads"), "'num_attention_heads', which is needed"),
            ({**llama, "num_attention_heads": "4"}, "a whole number of at least 1"),
            (
                {**llama, "rope_scaling": {"rope_type": "longrope", "factor": 2}},
                "'longrope'; linear, yarn, llama3 or default",
            ),
            (
                {**llama, "rope_scaling": {"rope_type": "linear", "factor": 2, "twist": 1}},
                "'twist'",
            ),
            ({**llama, "rope_scaling": {"rope_type": "linear"}}, "'factor', which is needed"),
            ({**llama, "rope_scaling": 3}, "not a JSON object"),
            ({**llama, "sliding_window": 3}, "'sliding_window'"),
            ({**llama, "rope_theta": 0.5}, "base"),
            ({**llama, "hidden_size": 24}, "check config.json"),
            ({**llama, "num_attention_heads": 3}, "check config.json"),
            ({**llama, "num_key_value_heads": 4}, "check config.json"),
            ({**llama, "partial_rotary_factor": 0.5}, "even number"),
            ({**llama, "model_type": "qwen3"}, "q_norm.weight"),
            ({**llama, "model_type": "qwen2", "sliding_window": 3}, "'layer_types'"),
            ({**llama, "model_type": "gemma2"}, "'query_pre_attn_scalar'"),
            (
                {
                    **llama,
                    "model_type": "qwen2",
                    "sliding_window": 3,
                    "layer_types": ["chunked_attention"],
                },
                "'chunked_attention'",
            ),
            (
                {**llama, "model_type": "qwen2", "sliding_window": 3, "layer_types": []},
                "'layer_types'",
            ),
            (b"{", "not a JSON object"),
            ({**llama, "model_type": "bert", "is_decoder": True}, "'is_decoder' is true"),
            ({**llama, "partial_rotary_factor": -0.5}, "a number above 0"),
            ({**llama, "partial_rotary_factor": 1e300}, "up to 1 is expected"),
            ({**llama, "partial_rotary_factor": 0.1}, "nothing of a head of 6 to rotate"),
            ({**llama, "rope_theta": 1e300}, "3.4e38"),
            (
                {**llama, "model_type": "gemma2", "query_pre_attn_scalar": -4},
                "config.json: 'query_pre_attn_scalar' is -4",
            ),
            (json.dumps(llama)[:-1].encode() + b', "rope_theta": 9}', "'rope_theta' twice"),
            ({**llama, "rope_scaling": deep(32)}, "not a JSON object"),
            ({**llama, "rope_scaling": deep(33)}, "nested more than 32"),
            (b'{"a": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", "nested more than 32"),
            (
                {
                    **llama,
                    "model_type": "gemma2",
                    "query_pre_attn_scalar": 4,
                    "attn_logit_softcapping": -1,
                    "sliding_window": None,
                },
                "config.json: score.softcap is -1",
            ),
        ]
        for settings, sentence in table:
            with self.subTest(sentence):
                self.refused(self.run_with(settings), sentence)
        self.refused(self.run_with(llama, "--layer", "3"), "has no layer '3'")

    def test_what_a_family_has_without_being_told_has_to_be_said(self):
        all_rows, window = ["full_attention"], ["sliding_attention"]
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
                without.update({"layer_types": all_rows} if key == "sliding_window" else {})
                name = {"rope_parameters": "rope_scaling"}.get(key, key)
                with self.subTest(kind=kind, key=key):
                    self.refused(self.run_with(without), f"has no '{name}', which is needed")
                if name == "sliding_window" and kind != "gpt_oss":  # which needs its sinks
                    self.assertEqual(self.run_with({**without, name: None}).returncode, 0)

    def test_what_contradicts_itself_is_refused(self):
        rope = {"rope_type": "linear", "factor": 2.0}
        qwen2 = {**llama, "model_type": "qwen2", "layer_types": ["sliding_attention"]}
        for settings, sentence in (
            ({**llama, "rope_scaling": {**rope, "type": "dynamic"}}, "'linear' and the type"),
            (
                {**llama, "rope_scaling": {**rope, "rope_theta": 9.0}},
                "'rope_theta' is 9, and 500 in",
            ),
            (qwen2, "'layer_types' is not all full"),
            ({**qwen2, "sliding_window": 3, "use_sliding_window": False}, "not all full"),
        ):
            with self.subTest(sentence):
                self.refused(self.run_with(settings), sentence)
        same = {**rope, "type": "linear", "rope_theta": 500.0}
        done = self.run_with({**llama, "rope_scaling": same})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_copy_without_what_is_not_known_runs(self):
        self.write("config.json", {**llama, "attention_sinks": 4})
        other = self.write("other.json", llama)
        y, _ = self.run_it("--weights", "model.safetensors", "--config", other)
        self.assert_close(y, self.layer.result(self.x, frequencies=frequencies(500)))

    def test_options_do_not_contradict_it(self):
        for words in (
            ["--heads", 4],
            ["--causal"],
            ["--no-causal"],
            ["--rope-base", 100],
            ["--no-rope"],
        ):
            self.refused(self.run_with(llama, *words), words[0], "config.json already sets it")
        y, told = self.run_it(
            "--weights",
            "model.safetensors",
            "--no-config",
            "--heads",
            4,
            "--causal",
            "--rope-base",
            100,
        )
        self.assertIn("rotated (base 100)", told)
        self.assert_close(y, self.layer.result(self.x, frequencies=frequencies(100)))

    def test_without_one_options_say_all(self):
        run = ["run", "--weights", "model.safetensors", "--input", "x.npy", "--output", "y.npy"]
        self.refused(self.mha(*run), "--heads is needed", "no config.json")
        self.refused(self.mha(*run, "--heads", 4), "--causal or --no-causal is needed")
        self.refused(
            self.mha(*run, "--heads", 4, "--causal"), "--rope-base or --no-rope is needed", "RoPE"
        )
        self.refused(
            self.mha(*run, "--heads", 4, "--causal", "--no-rope", "--rope-base", 100),
            "--no-rope: can't be combined",
        )
        self.refused(
            self.mha(*run, "--heads", 5, "--causal", "--no-rope"), "5 heads; check --heads"
        )
        self.assert_close(
            self.run_it("--weights", "model.safetensors", "--heads", 4, "--no-causal", "--no-rope")[
                0
            ],
            self.layer.result(self.x, causal=False),
        )
        tensors = {**self.layer.llama(), "model.layers.0.self_attn.q_norm.weight": normal(head_dim)}
        self.write("model.safetensors", safetensors(tensors))
        self.refused(
            self.mha(*run, "--heads", 4, "--causal", "--no-rope"),
            "q_norm.weight",
            "without a config.json",
        )
        self.refused(self.run_with(llama), "q_norm.weight", "config.json")
        self.write(
            "model.safetensors",
            safetensors(
                {**self.layer.llama(), "model.layers.0.self_attn.g_proj.weight": normal(4, width)}
            ),
        )
        self.refused(self.run_with(llama), "g_proj.weight", "not supported")


class Running(Command):
    options = ["--heads", heads, "--causal"]

    def setUp(self):
        super().setUp()
        self.layer = Layer()
        self.write(
            "model.safetensors",
            safetensors(self.layer.linears("W_query", "W_key", "W_value", "out_proj")),
        )
        self.y, self.told = self.run_it("--weights", "model.safetensors", *self.options)

    def test_every_family(self):
        self.assert_close(self.y, self.layer.result(self.x))
        self.assertRegex(
            self.told,
            r"\A\(7, 20\) -> \(7, 20\), 4 heads of 6, causal, \w+, 1 thread, [\d.e-]+ ms, \d+"
            r" GFLOP/s\n\Z",
        )
        layer, (w, b) = self.layer, self.layer.fused()
        o = {"out_proj.weight": transposed(layer.w["o"]), "out_proj.bias": layer.b["o"]}
        files = {
            "nn.MultiheadAttention": {"in_proj_weight": transposed(w), "in_proj_bias": b, **o},
            "BERT": layer.linears(
                "l.0.self.query", "l.0.self.key", "l.0.self.value", "l.0.output.dense"
            ),
            "GPT-2": {
                "h.0.attn.c_attn.weight": w,
                "h.0.attn.c_attn.bias": b,
                "h.0.attn.c_proj.weight": layer.w["o"],
                "h.0.attn.c_proj.bias": layer.b["o"],
                "h.0.mlp.c_proj.weight": normal(2, 2),
            },
            "Phi-3": {
                "h.0.qkv_proj.weight": transposed(w),
                "h.0.qkv_proj.bias": b,
                "h.0.o_proj.weight": o["out_proj.weight"],
                "h.0.o_proj.bias": o["out_proj.bias"],
            },
            "timm": {
                "blocks.0.attn.qkv.weight": transposed(w),
                "blocks.0.attn.qkv.bias": b,
                "blocks.0.norm1.weight": normal(2),
                "blocks.0.attn.proj.weight": o["out_proj.weight"],
                "blocks.0.attn.proj.bias": o["out_proj.bias"],
            },
        }
        for name, tensors in files.items():
            with self.subTest(name):
                self.write("model.safetensors", safetensors(tensors))
                rope = ["--no-rope"] if name in ("Phi-3", "timm") else []
                self.assertEqual(
                    self.run_it("--weights", "model.safetensors", *self.options, *rope)[0], self.y
                )
        self.refused(
            self.mha(
                "run",
                "--weights",
                "model.safetensors",
                *self.options,
                "--input",
                "x.npy",
                "--output",
                "y.npy",
            ),
            "--rope-base or --no-rope is needed",
        )
        self.write(
            "model.safetensors",
            safetensors({**tensors, "blocks.0.attn.relative_position_bias_table": normal(2, 2)}),
        )
        self.refused(
            self.mha(
                "pack",
                "--weights",
                "model.safetensors",
                *self.options,
                "--no-rope",
                "--output",
                "layer.mha",
            ),
            "position_bias_table",
            "not supported",
        )
        plain = Layer(has_bias=False)
        matrices = {f"W_{name}": plain.w[name[0]] for name in ("query", "key", "value")}
        for more in ({"out_proj": plain.w["o"]}, {"out_proj.weight": transposed(plain.w["o"])}, {}):
            self.write("model.safetensors", safetensors({**matrices, **more}))
            self.assert_close(
                self.run_it("--weights", "model.safetensors", *self.options)[0],
                plain.result(self.x, has_output=bool(more)),
            )

    def test_one_of_several_layers(self):
        tensors = {
            name: value
            for i in (0, 1, 10)
            for name, value in (
                (self.layer if i == 1 else Layer()).llama(f"model.layers.{i}.self_attn.").items()
            )
        }
        self.write("model.safetensors", safetensors(tensors))
        run = ["--weights", "model.safetensors", *self.options, "--no-rope"]
        for layer in ("1", "layers.1", "model.layers.1.self_attn"):
            self.assertEqual(self.run_it(*run, "--layer", layer)[0], self.y)
        self.refused(
            self.mha("run", *run, "--input", "x.npy", "--output", "y.npy"),
            "3 layers; choose one with --layer",
            "model.layers.0.self_attn",
        )
        missing = {
            name: value for name, value in self.layer.llama().items() if "o_proj" not in name
        }
        self.write("model.safetensors", safetensors(missing))
        self.refused(
            self.mha("run", *run, "--input", "x.npy", "--output", "y.npy"), "o_proj.weight"
        )

    def test_models_in_several_files(self):
        tensors = {
            name: value
            for i in (0, 1)
            for name, value in (
                (self.layer if i == 1 else Layer()).llama(f"model.layers.{i}.self_attn.").items()
            )
        }
        files = {name: f"{2 * at // len(tensors)}.safetensors" for at, name in enumerate(tensors)}
        files["model.layers.1.self_attn.v_proj.weight"] = "0.safetensors"
        # Each has also a tensor that the index takes from the other one.
        for file in ("0.safetensors", "1.safetensors"):
            self.write(
                file,
                safetensors(
                    {name: value for name, value in tensors.items() if files[name] == file}
                    | {name: normal(2, 2) for name in list(tensors)[:1] if files[name] != file}
                ),
            )
        index = lambda **more: self.write(
            "model.safetensors.index.json", {"metadata": {}, "weight_map": {**files, **more}}
        )
        index()
        run = [
            "--weights",
            "model.safetensors.index.json",
            *self.options,
            "--no-rope",
            "--layer",
            "layers.1",
        ]
        self.assertEqual(self.run_it(*run)[0], self.y)
        self.refused(
            self.mha("pack", *run, "--output", "1.safetensors"), "is also a file of the --weights"
        )
        for more, sentence in (
            ({"a": "1.safetensors"}, "says that 1.safetensors has 'a', which it has not"),
            ({"a": "2.safetensors"}, "2.safetensors: cannot be read"),
            ({"a": "../1.safetensors"}, "must be the name of a file in the same folder"),
            ({"a": 3}, "must be the name of a file"),
            ({"a": "model.safetensors.index.json"}, "which it has not"),
        ):
            index(**more)
            self.refused(self.mha("pack", *run, "--output", "layer.mha"), sentence)

    def test_types_of_weights_and_rows(self):
        tensors = self.layer.linears("W_query", "W_key", "W_value", "out_proj")
        for dtype, encode in (("BF16", bfloat16), ("F16", float16)):
            self.write("model.safetensors", safetensors(tensors, dtype, encode))
            self.assertEqual(
                self.run_it("--weights", "model.safetensors", *self.options)[0], self.y
            )
        for descr, encode in (("<f2", float16), ("<V2", bfloat16), ("|V2", bfloat16)):
            self.write("half.npy", npy(self.x, descr, encode))
            self.assertEqual(
                self.run_it("--weights", "model.safetensors", *self.options, "--input", "half.npy")[
                    0
                ],
                self.y,
            )
        # As tools/demo_files.py and other writers have it.
        self.write("other.npy", npy(self.x).replace(b", }", b"}  "))
        self.assertEqual(
            self.run_it("--weights", "model.safetensors", *self.options, "--input", "other.npy")[0],
            self.y,
        )
        special = {"W_query": [[float("inf"), 6e-8], [-6e-8, 65504.0]]}
        self.write("x2.npy", npy([[1.0, 0.0]]))
        tensors = {**special, "W_key": [[0.0, 0.0]] * 2, "W_value": [[6e-8, 65504.0], [-6e-8, 1.0]]}
        self.write("model.safetensors", safetensors(tensors, "F16", float16))
        y, _ = self.run_it(
            "--weights", "model.safetensors", "--heads", 1, "--no-causal", "--input", "x2.npy"
        )
        self.assertTrue(all(map(math.isnan, y)))  # infinity times 0
        self.write(
            "model.safetensors",
            safetensors({**tensors, "W_query": [[0.0, 0.0]] * 2}, "F16", float16),
        )
        self.assertEqual(
            self.run_it(
                "--weights", "model.safetensors", "--heads", 1, "--no-causal", "--input", "x2.npy"
            )[0],
            [2**-24, 65504.0],
        )

    def test_the_same_bits_packed_in_batches_on_threads_and_token_by_token(self):
        run = ["--weights", "model.safetensors", *self.options]
        self.assertEqual(self.run_it(*run, "--threads", 2)[0], self.y)
        self.ok("pack", *run, "--output", "layer.mha", "--quiet")
        self.write("batch.npy", npy([normal(rows, width), self.x, normal(rows, width)]))
        for words in ([], ["--decode"], ["--decode", "--prompt", 3], ["--decode", "--prompt", 7]):
            y, told = self.run_it("--packed", "layer.mha", "--input", "batch.npy", *words)
            self.assertEqual(y[rows * width : 2 * rows * width], self.y)
            self.assertEqual("tokens/s" in told, bool(words) and 7 not in words, told)
        for types, bound in (["f16"], 2e-3), (["int8", "int4"], 0.3):
            rounded, told = self.run_it("--packed", "layer.mha", "--decode", "--cache-type", *types)
            self.assertIn(f"cache of {', '.join(types)}, prompt of 1 row in ", told)
            self.assertNotEqual(rounded, self.y)
            self.assert_close(rounded, self.layer.result(self.x), bound)
        self.refused(
            self.mha(
                "run",
                "--packed",
                "layer.mha",
                "--input",
                "x.npy",
                "--output",
                "y.npy",
                "--decode",
                "--cache-type",
                "int4",
            ),
            "only values are stored as MHA_TYPE_INT4",
        )
        self.assertEqual(
            self.ok(
                "run", "--packed", "layer.mha", "--input", "x.npy", "--output", "y.npy", "--quiet"
            ).stderr,
            "",
        )

    def test_weight_types_and_arithmetic_are_kept(self):
        exact, sizes = self.layer.result(self.x), []
        for words, bound in (
            (["--weight-type", "f16"], 2e-3),
            (["--weight-type", "int8"], 3e-2),
            (["--weight-type", "int8", "--arithmetic", "int16"], 3e-2),
        ):
            y, _ = self.run_it("--weights", "model.safetensors", *self.options, *words)
            self.ok(
                "pack",
                "--weights",
                "model.safetensors",
                *self.options,
                *words,
                "--output",
                "layer.mha",
            )
            self.assertEqual(self.run_it("--packed", "layer.mha")[0], y)
            self.assertEqual(y == self.y, "f16" in words)  # in which these weights are exact
            self.assert_close(y, exact, bound)
            sizes.append((self.folder / "layer.mha").stat().st_size)
        self.assertLess(sizes[1], sizes[0])

    def test_outputs_are_whole_or_not_there(self):
        out, run = (
            self.folder / "y.npy",
            ["run", "--weights", "model.safetensors", *self.options, "--input", "x.npy"],
        )
        out.unlink()
        self.refused(
            self.mha(
                "run",
                "--weights",
                "model.safetensors",
                "--heads",
                5,
                "--causal",
                "--input",
                "x.npy",
                "--output",
                "y.npy",
            )
        )
        self.assertFalse(out.exists())
        out.write_bytes(b"old")
        out.chmod(0o640)
        (self.folder / "link.npy").symlink_to("y.npy")
        self.ok(*run, "--output", "link.npy")
        self.assertTrue((self.folder / "link.npy").is_symlink())
        self.assertEqual(
            (stat.S_IMODE(out.stat().st_mode), out.read_bytes()[:6]), (0o640, b"\x93NUMPY")
        )
        self.ok(*run, "--output", "/dev/null")
        for output, sentence in (
            ("x.npy", "is also the --input"),
            ("model.safetensors", "is also the --weights"),
            (".", "is a directory"),
            ("none/y.npy", "cannot be written: No such file or directory"),
            ("-", "cannot go to standard output"),
            ("/sys/y.npy", "/sys/y.npy: cannot be written: "),
            ("/dev/full", "cannot be written: No space left on device"),
        ):
            self.refused(self.mha(*run, "--output", output), sentence)
        self.write("config.json", llama)
        self.refused(
            self.mha(
                "run",
                "--weights",
                "model.safetensors",
                "--input",
                "x.npy",
                "--output",
                "config.json",
            ),
            "is also the config.json",
        )
        self.assertEqual(
            sorted(os.listdir(self.folder)),
            ["config.json", "link.npy", "model.safetensors", "x.npy", "y.npy"],
        )
        (self.folder / "config.json").unlink()
        if (
            subprocess.run(
                ["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True
            ).returncode
            == 0
        ):
            (self.folder / "disk").mkdir()
            on_full_disk = (
                'mount -t tmpfs -o size=4k none disk && head -c 4096 /dev/zero > disk/full; "$@";'
                " status=$?; ls disk; exit $status"
            )
            done = subprocess.run(
                [
                    "unshare",
                    "--user",
                    "--map-root-user",
                    "--mount",
                    "sh",
                    "-c",
                    on_full_disk,
                    "sh",
                    MHA,
                    *map(str, run),
                    "--output",
                    "disk/y.npy",
                ],
                cwd=self.folder,
                capture_output=True,
                text=True,
            )
            self.assertEqual((done.returncode, done.stdout), (2, "full\n"), done.stderr)
            self.assertIn("disk/y.npy: cannot be written: No space left on device", done.stderr)

    def test_an_output_that_ends_early_leaves_what_was_there(self):
        out, run = (
            self.folder / "y.npy",
            [
                "run",
                "--weights",
                "model.safetensors",
                *self.options,
                "--input",
                "x.npy",
                "--output",
                "y.npy",
            ],
        )
        whole = out.stat().st_size
        for packs, most in [(False, most) for most in (0, 1, 127, 128, 129, whole - 1)] + [
            (True, 0),
            (True, 4096),
        ]:
            out.write_bytes(b"old")
            limit = lambda most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            words = (
                ["pack", "--weights", "model.safetensors", *self.options, "--output", "y.npy"]
                if packs
                else run
            )
            self.refused(
                self.mha(*words, preexec_fn=limit), "y.npy: cannot be written: File too large"
            )
            self.assertEqual(
                (out.read_bytes(), sorted(os.listdir(self.folder))),
                (b"old", ["model.safetensors", "x.npy", "y.npy"]),
            )

    def started(self):
        """A long run that has begun its temporary file."""
        self.write(
            "x.npy",
            npy(
                [[0.0] * width],
                shape=f"({2**16}, {width})",
                encode=lambda values: bytes(2**18 * width),
            ),
        )
        run = subprocess.Popen(
            [
                MHA,
                "run",
                "--weights",
                "model.safetensors",
                *map(str, self.options),
                "--input",
                "x.npy",
                "--output",
                "y.npy",
            ],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(run.communicate)
        self.addCleanup(run.kill)
        while not any("partial" in name for name in os.listdir(self.folder)):
            self.assertIsNone(run.poll())
        return run

    def test_a_signal_leaves_no_temporary_file_and_sigkill_one_that_says_what_it_is(self):
        (self.folder / "y.npy").write_bytes(b"old")
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGQUIT,
            signal.SIGKILL,
        ):
            run = self.started()
            run.send_signal(number)
            self.assertEqual(
                (run.wait(60), run.stdout.read(), run.stderr.read()), (-number, "", "")
            )
            self.assertEqual((self.folder / "y.npy").read_bytes(), b"old")
            others = [
                name
                for name in os.listdir(self.folder)
                if name not in ("model.safetensors", "x.npy", "y.npy")
            ]
            self.assertEqual(
                [name[:-6] for name in others],
                ["y.npy.partial-"] if number == signal.SIGKILL else [],
            )

    def test_an_input_that_becomes_shorter_is_said(self):
        run = self.started()
        os.truncate(self.folder / "x.npy", 0)
        self.assertEqual((run.wait(60), run.stdout.read()), (2, ""))
        self.assertRegex(
            run.stderr.read(), r"\Amha: a file became shorter, [^\n]* while it was read\n\Z"
        )
        self.assertEqual(sorted(os.listdir(self.folder)), ["model.safetensors", "x.npy", "y.npy"])


class BadFiles(Command):
    def test_rows(self):
        self.write(
            "model.safetensors",
            safetensors(Layer().linears("W_query", "W_key", "W_value", "out_proj")),
        )
        good = npy(self.x)
        zeros = lambda values: bytes(8 * len(flat(values)))
        table = [
            (b"", "not a .npy file"),
            (b"PK\3\4", ".npz archive"),
            (good[:8], "ends inside its header"),
            (good[:60], "ends inside its header"),
            (good[:-4], "it looks truncated"),
            (good + b"1234", "do not match the shape"),
            (npy(self.x, "<f8", zeros), "'<f8'; float32"),
            (npy(self.x, ">f4"), "'>f4'; float32"),
            (npy(self.x, order="True"), "Fortran order"),
            (npy(self.x[0]), "(20,); (n, width)"),
            (npy([self.x[0][:19]]), "rows of 19, but model.safetensors takes rows of 20"),
            (npy([], shape="(0, 20)"), "at least one row"),
            (npy(self.x, shape="(7, 20, 'a')"), "numpy.save does not write"),
            (npy(self.x, shape="(99999999999, 99999999999)"), "it looks truncated"),
            (good.replace(b"NUMPY\1", b"NUMPY\7"), "version 7"),
            (good.replace(b"'descr': ", b"'descr': ["), "numpy.save does not write"),
        ]
        for content, sentence in table:
            with self.subTest(sentence):
                self.write("x.npy", content)
                self.refused(
                    self.mha(
                        "run",
                        "--weights",
                        "model.safetensors",
                        "--heads",
                        4,
                        "--causal",
                        "--input",
                        "x.npy",
                        "--output",
                        "y.npy",
                    ),
                    sentence,
                )

    def test_weights(self):
        entry = lambda **fields: with_header(
            json.dumps(
                {"W_query": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **fields}}
            ).encode(),
            bytes(24),
        )
        linear = lambda inputs, outputs, bias: {
            "weight": normal(outputs, inputs),
            **({"bias": normal(bias)} if bias else {}),
        }
        layer = lambda q, k, v, o=(4, 4, 0): safetensors(
            {
                f"{name}.{kind}": values
                for name, shape in zip(("W_query", "W_key", "W_value", "out_proj"), (q, k, v, o))
                for kind, values in linear(*shape).items()
            }
        )
        one = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
        table = [
            (layer((4, 4, 0), (4, 2, 0), (4, 4, 0)), "'W_key.weight' takes rows of 4 to rows of 2"),
            (layer((4, 4, 3), (4, 4, 0), (4, 4, 0)), "(3,); (4,) is expected"),
            (layer((4, 4, 0), (4, 4, 0), (5, 4, 0)), "'W_value.weight' takes rows of 5"),
            (
                layer((4, 4, 0), (4, 4, 0), (4, 4, 0), (5, 4, 0)),
                "'out_proj.weight' takes rows of 5",
            ),
            (
                layer((4, 4, 0), (4, 8, 0), (4, 3, 0)),
                "'W_value.weight' takes rows of 4 to rows of 3",
            ),
            (layer((4, 4, 0), (4, 4, 0), (4, 4, 5)), "(5,); (4,) is expected"),
            (b"", "not a .safetensors file"),
            (b"12345678", "not a .safetensors file"),
            (b"12345678<", "not a .safetensors file"),
            (with_header(b"{}", length=99), "it looks truncated"),
            (with_header(b"{]"), "not a JSON object"),
            (with_header(b"{}"), "no attention layer"),
            (with_header(f"{{{one}, {one}}}".encode(), bytes(4)), "twice"),
            (entry(dtype=3), "is not like"),
            (entry(shape=[2, -3]), "is not like"),
            (entry(data_offsets=[0, 24, 25]), "is not like"),
            (entry(more=1), "is not like"),
            (entry(data_offsets=[0, 28]), "it looks truncated"),
            (entry(data_offsets=[24, 0]), "lies from byte 24"),
            (entry(shape=[2, 2]), "does not fit its shape"),
            (entry(shape=[2**62, 2**62]), "does not fit"),
            (entry(), "has no tensor 'W_key'"),
            (entry(dtype="I8"), "stored as 'I8'"),
            (with_header(b"[" * 5000 + b"]" * 5000), "not a .safetensors file"),
            (b'{"weight_map": {}}', "has no tensor in weight_map"),
            (b'{"weight_map": 3}', "not a .safetensors file"),
            (with_header(b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"), "nested more than 32 deep"),
        ]
        for content, sentence in table:
            with self.subTest(sentence):
                self.write("model.safetensors", content)
                self.refused(
                    self.mha(
                        "pack",
                        "--weights",
                        "model.safetensors",
                        "--heads",
                        1,
                        "--causal",
                        "--output",
                        "layer.mha",
                    ),
                    sentence,
                )
        self.refused(
            self.mha(
                "pack", "--weights", "none", "--heads", 1, "--causal", "--output", "layer.mha"
            ),
            "none: cannot be read: No such file",
        )
        self.refused(
            self.mha("pack", "--weights", ".", "--heads", 1, "--causal", "--output", "layer.mha"),
            "is a directory",
        )

    def test_packed_layers(self):
        self.write("text", b"mha packed?" * 30)
        for path, sentence in (
            ("x.npy", "not a packed layer; mha pack writes one"),
            ("none", "cannot be read"),
            ("text", "text: "),
        ):
            self.refused(self.mha("verify", path), sentence)
            self.refused(
                self.mha("run", "--packed", path, "--input", "x.npy", "--output", "y.npy"), sentence
            )
        for option in (
            ["--heads", 3],
            ["--causal"],
            ["--weight-type", "int8"],
            ["--weights", "w"],
            ["--no-config"],
        ):
            self.refused(
                self.mha(
                    "run", "--packed", "layer.mha", *option, "--input", "x.npy", "--output", "y.npy"
                ),
                option[0],
                "layer.mha already sets it",
            )

    def test_damaged_files_are_read_or_refused_by_name(self):
        """Some files that are cut short or have a changed byte in the header; mha_fuzz_files reads
        many more."""
        self.write("config.json", {**llama, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
        weights = self.write("model.safetensors", safetensors(Layer().llama())).read_bytes()
        self.ok("pack", "--weights", "model.safetensors", "--output", "layer.mha")
        header = 8 + struct.unpack("<Q", weights[:8])[0]
        from_weights, from_packed = ["--weights", "model.safetensors"], ["--packed", "layer.mha"]
        table = [
            ("x.npy", from_packed, 128),
            ("model.safetensors", from_weights, header),
            ("config.json", from_weights, 10**6),
            ("layer.mha", from_packed, 512),
        ]
        for name, words, length in table:
            path = self.folder / name
            good = path.read_bytes()
            length = min(length, len(good))
            cuts = [
                good[:at]
                for at in [0, 1, 8, length - 1, len(good) - 1, *random.sample(range(len(good)), 7)]
            ]
            changed = [
                good[:at] + bytes([good[at] ^ 1 << random.randrange(8)]) + good[at + 1 :]
                for at in random.sample(range(length), 20)
            ]
            for number, content in enumerate(cuts + changed):
                path.write_bytes(content)
                done = self.mha("run", *words, "--input", "x.npy", "--output", "y.npy", "--quiet")
                if number >= len(cuts) and done.returncode == 0:
                    (self.folder / "y.npy").unlink()
                    continue
                self.refused(done)
                self.assertTrue(
                    name in done.stderr or "model.safetensors: " in done.stderr,
                    (content, done.stderr),
                )
                self.assertFalse((self.folder / "y.npy").exists())
            path.write_bytes(good)


class Usage(Command):
    def test_wrong_usage_is_one_sentence(self):
        table = [
            ([], "run, pack, verify or info is expected"),
            (["explain"], "explain"),
            (["run"], "--weights (or --packed) is needed"),
            (["run", "--packed", "a"], "--input is needed"),
            (["run", "--packed", "a", "--input", "b"], "--output is needed"),
            (["pack"], "--weights is needed"),
            (["pack", "--weights", "a"], "--output is needed"),
            (["verify"], "mha verify FILE"),
            (["run", "--hed", "3"], "--hed"),
            (["run", "--heads", "x"], "a whole number of at least 1 is expected, not 'x'"),
            (["run", "--heads"], "--heads"),
            (["run", "--heads", "0"], "'0'"),
            (["run", "--threads", "2000"], "a whole number from 1 to 1024"),
            (["run", "--rope-base", "-1"], "--rope-base"),
            (
                ["pack", "--weight-type", "int5"],
                "f32, f16, bf16, int8 or int4 is expected, not 'int5'",
            ),
            (["run", "--cache-type", "int5"], "or int4 is expected"),
            (
                ["run", "--packed", "a", "--input", "b", "--output", "c", "--prompt", "3"],
                "--prompt: is an option of --decode",
            ),
            (["info", "x"], "x"),
        ]
        for words, sentence in table:
            with self.subTest(words):
                self.refused(self.mha(*words), sentence)

    def test_decoding_needs_a_causal_layer_and_a_prompt_that_is_there(self):
        self.write(
            "model.safetensors",
            safetensors(Layer().linears("W_query", "W_key", "W_value", "out_proj")),
        )
        run = [
            "run",
            "--weights",
            "model.safetensors",
            "--heads",
            4,
            "--input",
            "x.npy",
            "--output",
            "y.npy",
            "--decode",
        ]
        self.refused(self.mha(*run, "--no-causal"), "the layer is not causal")
        self.refused(self.mha(*run, "--causal", "--prompt", 8), "8 rows are more than the 7")

    def test_help_and_version_and_info(self):
        for words in ([], ["run"], ["pack"], ["verify"], ["info"]):
            help = self.ok(*words, "--help").stdout
            self.assertRegex(help, r"\nExamples?:\n  mha ")
            for line in help.splitlines():
                self.assertLessEqual(len(line), 140)
        self.assertRegex(self.ok("--version").stdout, r"\Amha \d+\.\d+\.\d+ \(contract \d+\)\n\Z")
        self.assertRegex(
            self.ok("info").stdout,
            r"\Aversion +\d+\.\d+\.\d+\ncontract +\d+\ninstruction sets +scalar[\w, ]*\nback ends"
            r" +native.*\n\Z",
        )

    def test_the_published_results_are_those_of_this_machine(self):
        lines = self.ok("verify", "--results").stdout.splitlines()
        results = [line for line in lines if re.match(r"[0-9a-f]{16}  \w", line)]
        self.assertGreaterEqual(len(results), 50)
        self.assertRegex(
            lines[-1],
            rf"^{len(results)} of {len(results)} as published, on each of \d instruction sets$",
        )
        self.refused(self.mha("verify", "--results", "layer.mha"), "two checks")

    def test_every_option_is_documented_and_every_example_has_known_options(self):
        for command in "run", "pack":
            help = self.ok(command, "--help").stdout
            known = set(re.findall(r"^  (?:-h,)?(--[a-z-]+)", help, re.MULTILINE))
            for example in re.findall(rf"^  mha {command} .*", help, re.MULTILINE):
                self.assertLessEqual(set(re.findall(r"--[a-z-]+", example)), known, example)

    def test_names_from_files_stay_on_one_line(self):
        self.write(
            "model.safetensors", safetensors({"a\n\x1b[2J.W_query": [[1.0]], "b.W_query": [[1.0]]})
        )
        self.refused(
            self.mha(
                "pack",
                "--weights",
                "model.safetensors",
                "--heads",
                1,
                "--causal",
                "--output",
                "layer.mha",
            ),
            "a??[2J",
        )
        self.write("config.json", {"model_type": "\x9b2J\u00e9\n" + "\u00e9" * 100})
        self.refused(
            self.mha(
                "pack", "--weights", "model.safetensors", "--layer", "b", "--output", "layer.mha"
            ),
            "'??2J\u00e9?" + "\u00e9" * 56 + "...'",
        )

    def test_any_words_are_one_sentence_or_a_result(self):
        words = """
            run pack verify info --weights --packed --layer --config --no-config --heads --causal
            --no-causal --rope-base --no-rope --weight-type --arithmetic --input --output
            --threads --decode --prompt --cache-type --quiet --help --version -h -- - = --heads=
            --rope-base=nan 1 -1 99999999999999999999 1e400 nan int8 x.npy none
            """.split()
        words += ["", "\n", "\u00e9", "a" * 5000]
        for _ in range(100):
            chosen = (
                random.choices(words, k=random.randrange(8))
                if random.random() < 0.5
                else random.sample(words[:4], 1) + random.choices(words[4:], k=5)
            )
            if "y.npy" in chosen:
                continue
            done = self.mha(*chosen)
            if done.returncode != 0:
                self.refused(done)


unittest.main()
