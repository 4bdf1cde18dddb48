#!/usr/bin/env python3
"""Runs the example decoder.c as a user does, with files of weights written here, and compares its
logits with a decoder in plain Python.

    decoder_test.py DECODER [unittest arguments]
"""

import array
import math
import operator
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

from formats import bfloat16, float16, floats, safetensors

DECODER = os.path.abspath(sys.argv.pop(1))
encodings = {"F32": floats, "BF16": bfloat16, "F16": float16}


def rounded(number, dtype):
    bytes = encodings[dtype]([number])
    return (
        struct.unpack("<e", bytes)[0]
        if dtype == "F16"
        else struct.unpack("<f", bytes.rjust(4, b"\0"))[0]
    )


def product(w, x):
    return [sum(map(operator.mul, row, x)) for row in w]


def normed(x, weights):
    root = math.sqrt(sum(a * a for a in x) / len(x) + 1e-5)
    return [a / root * w for a, w in zip(x, weights)]


class Model:
    def __init__(
        self, dtype="F32", tied=False, layers=2, width=48, hidden=72, embedding=1, base=10000
    ):
        random.seed(7)
        self.base, self.codes = base, {}
        self.dtype, self.layers, self.heads, self.kv_heads = dtype, layers, 6, 2
        self.head_dim, self.vocabulary = width // 6, 50
        small, kv_width = width**-0.5, 2 * self.head_dim
        shapes = {"model.embed_tokens": ((50, width), 0, embedding)}
        for layer in range(layers):
            shapes.update(
                {
                    f"model.layers.{layer}.{name}": shape
                    for name, shape in (
                        # Scores that matter.
                        ("input_layernorm", ((width,), 1, 0.3)),
                        ("self_attn.q_proj", ((width, width), 0, 2 * small)),
                        ("self_attn.k_proj", ((kv_width, width), 0, small)),
                        ("self_attn.v_proj", ((kv_width, width), 0, small)),
                        ("self_attn.o_proj", ((width, width), 0, small)),
                        ("post_attention_layernorm", ((width,), 1, 0.3)),
                        ("mlp.gate_proj", ((hidden, width), 0, small)),
                        ("mlp.up_proj", ((hidden, width), 0, small)),
                        ("mlp.down_proj", ((width, hidden), 0, hidden**-0.5)),
                    )
                }
            )
        shapes["model.norm"] = ((width,), 1, 0.3)
        if not tied:
            shapes["lm_head"] = ((50, width), 0, small)
        numbers = lambda count, *normal: [
            rounded(random.gauss(*normal), dtype) for _ in range(count)
        ]
        self.w = {
            name + ".weight": (
                numbers(*shape, *normal)
                if len(shape) == 1
                else [numbers(shape[1], *normal) for _ in range(shape[0])]
            )
            for name, (shape, *normal) in shapes.items()
        }

    def file(self):
        return safetensors({**self.w, **self.codes}, self.dtype, encodings[self.dtype])

    def with_codes(self):
        """Each matrix but the embedding becomes one of codes in groups of 32: that of the logits of
        8 bits, others of 4 and with offsets."""
        for name, rows in list(self.w.items()):
            if "norm" in name or "embed" in name:
                continue
            is_wide = "lm_head" in name
            codes = [
                [random.randrange(*(-128, 128) if is_wide else (0, 16)) for _ in row]
                for row in rows
            ]
            scales = [
                [random.randrange(64, 128) * 2 ** (-18 if is_wide else -14) for _ in row[::32]]
                for row in rows
            ]
            offsets = [
                [0 if is_wide else -random.randrange(4, 12) * 2**-7 for _ in row] for row in scales
            ]
            self.w[name] = [
                [code * s[i // 32] + o[i // 32] for i, code in enumerate(row)]
                for row, s, o in zip(codes, scales, offsets)
            ]
            stored = (
                codes
                if is_wide
                else [[low | high << 4 for low, high in zip(row[::2], row[1::2])] for row in codes]
            )
            self.codes[name] = (
                "I8" if is_wide else "U8",
                [len(stored), len(stored[0])],
                bytes(code & 255 for row in stored for code in row),
            )
            self.codes.update(
                {name + ".scales": scales, **({} if is_wide else {name + ".offsets": offsets})}
            )
        return self

    def rotated(self, row, position):
        half, row = self.head_dim // 2, row[:]
        for begin in range(0, len(row), self.head_dim):
            for i in range(half):
                turn = math.e ** (1j * position * self.base ** (-i / half))
                pair = complex(row[begin + i], row[begin + half + i]) * turn
                row[begin + i], row[begin + half + i] = pair.real, pair.imag
        return row

    def logits(self, tokens):
        """The logits after each token."""
        x = [self.w["model.embed_tokens.weight"][token] for token in tokens]
        for layer in range(self.layers):
            w = lambda name, layer=layer: self.w[f"model.layers.{layer}.{name}.weight"]
            rows = [normed(row, w("input_layernorm")) for row in x]
            q, k = (
                [
                    self.rotated(product(w(f"self_attn.{name}_proj"), row), p)
                    for p, row in enumerate(rows)
                ]
                for name in "qk"
            )
            v = [product(w("self_attn.v_proj"), row) for row in rows]
            for p, row in enumerate(q):
                context = []
                for head in range(self.heads):
                    kv = head // (self.heads // self.kv_heads) * self.head_dim
                    part = row[head * self.head_dim : (head + 1) * self.head_dim]
                    weights = [
                        math.exp(
                            sum(map(operator.mul, part, key[kv : kv + self.head_dim]))
                            / math.sqrt(self.head_dim)
                        )
                        for key in k[: p + 1]
                    ]
                    context += [
                        a / sum(weights)
                        for a in product(
                            list(zip(*(value[kv : kv + self.head_dim] for value in v[: p + 1]))),
                            weights,
                        )
                    ]
                x[p] = list(map(operator.add, x[p], product(w("self_attn.o_proj"), context)))
                inner = normed(x[p], w("post_attention_layernorm"))
                gated = [
                    g / (1 + math.exp(-g)) * up
                    for g, up in zip(
                        product(w("mlp.gate_proj"), inner), product(w("mlp.up_proj"), inner)
                    )
                ]
                x[p] = list(map(operator.add, x[p], product(w("mlp.down_proj"), gated)))
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return [product(head, normed(row, self.w["model.norm.weight"])) for row in x]


class Decoder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_it(self, *words):
        return subprocess.run(
            [DECODER, *map(str, words)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def write(self, name, content):
        (self.folder / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
        return name

    def check(self, model, prompt, count, threads, weight_type="file", arithmetic="f32", most=1e-4):
        """Each token has the largest logit, and logits differ from those in plain Python by less
        than `most`. Returns the difference."""
        tokens = [(i * i + 3 * i) % 47 for i in range(prompt)]
        self.write("model", model.file())
        done = self.run_it(
            "run",
            "model",
            model.heads,
            self.write("prompt", "\n".join(map(str, tokens))),
            count,
            threads,
            weight_type,
            arithmetic,
            "logits",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        tokens += map(int, done.stdout.split())
        self.assertEqual(len(tokens), prompt + count)
        numbers = array.array("f", (self.folder / "logits").read_bytes())
        plain, difference = model.logits(tokens), 0
        self.assertEqual(len(numbers), count * model.vocabulary)
        for i in range(count):
            logits = numbers[i * model.vocabulary : (i + 1) * model.vocabulary].tolist()
            self.assertEqual(tokens[prompt + i], logits.index(max(logits)))
            difference = max(
                difference, *(abs(a - b) for a, b in zip(logits, plain[prompt + i - 1]))
            )
        self.assertLess(difference, most)
        return difference

    def test_logits_are_those_in_plain_python(self):
        for threads in 1, 5:
            self.check(Model(), 45, 30, threads)
        self.check(Model(), 1, 3, 1)

    def test_a_prompt_that_is_longer_than_a_call_is_cut(self):
        self.check(Model(layers=1, width=24, hidden=24), 600, 2, 2)

    def test_files_have_tied_embeddings_and_16_bits(self):
        self.check(Model(tied=True), 20, 8, 1)
        self.check(Model("BF16"), 20, 8, 1)
        self.check(Model("F16", embedding=1e-4), 20, 8, 2)  # with subnormal numbers
        self.check(Model("F16"), 20, 8, 1, "f32")

    def test_fewer_bits_and_integers_are_further_off(self):
        found = [
            self.check(Model(), 20, 8, threads, weight_type, arithmetic, most)
            for threads, weight_type, arithmetic, most in (
                (1, "int8", "f32", 0.075),
                (1, "int8", "int16", 0.075),
                (2, "int8", "int8", 0.2),
                (1, "int4", "int8", 1.5),
                (2, "bf16", "bf16", 0.1),
            )
        ]
        self.assertGreater(min(found), 0.02)
        self.assertNotEqual(found[0], found[1])
        self.assertLess(max(found[:2]), found[2])
        self.assertLess(found[2], 0.3)
        self.assertLess(0.3, found[3])

    def test_codes_of_a_quantiser_stay_as_they_are(self):
        self.check(Model().with_codes(), 20, 8, 2)
        self.assertGreater(self.check(Model().with_codes(), 20, 8, 1, "file", "int8", 0.1), 1e-3)

    def test_scores_are_log_likelihoods_of_second_halves(self):
        model, window = Model(base=500), 41
        self.write("model", model.file())
        tokens = [(i * i + 3 * i) % 47 for i in range(2 * window + 5)]
        self.write("tokens", " ".join(map(str, tokens)))
        plain = []
        for begin in 0, window:
            logits = model.logits(tokens[begin : begin + window])
            plain += [
                row[token] - math.log(sum(map(math.exp, row)))
                for row, token in list(zip(logits, tokens[begin + 1 : begin + window]))[
                    window // 2 :
                ]
            ]
        apart = []
        for caches in (
            [],
            ["f32"],
            ["f16"],
            ["int8", "f32"],
            ["f32", "int8"],
            ["int8"],
            ["int8", "int4"],
            ["int8", "int8", "int16"],
        ):
            done = self.run_it(
                "score", "model", "6,500", "tokens", window, 2, "file", "f32", *caches
            )
            self.assertEqual(
                (done.returncode, [len(line.split()) for line in done.stdout.splitlines()]),
                (0, [window - 1 - window // 2] * 2),
                done.stderr,
            )
            apart.append(max(abs(a - b) for a, b in zip(map(float, done.stdout.split()), plain)))
        self.assertLess(max(apart[:2]), 1e-4)
        self.assertLess(max(apart[:2]), min(apart[2:]))
        self.assertLess(max(apart[:-2]), 0.1)
        self.assertLess(apart[-2], 1)
        # Keys and values each have their type; values have that of keys, where none is given.
        self.assertEqual(len(set(apart)), 7)
        # Attention in integers adds little to the cache's own error.
        self.assertLess(abs(apart[-1] - apart[-3]), 1e-3)

    def test_all_ways_to_the_same_tokens_give_the_same_bits(self):
        self.write("model", Model("BF16").file())
        self.assertEqual(self.run_it("write", "written", 2, 40, 5, 1, 33, 60).returncode, 0)
        for words in [], ["check", "model", 6], ["check", "written", 5]:
            done = self.run_it(*words)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(
                done.stdout.splitlines()[1:],
                [
                    f"{what}: the same bits"
                    for what in (
                        "one token at a time",
                        "a shared prefix, beside another sequence",
                        "wrong drafts taken back",
                        "back into a shared prefix",
                    )
                ],
            )


unittest.main()
