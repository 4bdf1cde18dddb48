#!/usr/bin/env python3
"""Writes the files of the demonstration: an attention layer of GPT-2's smallest model with random weights, and random input rows.

Usage: demo_files.py FOLDER      writes FOLDER/layer.safetensors and FOLDER/x.npy
"""

import array
import json
import pathlib
import random
import struct
import sys

tokens, width = 1024, 768


def uniform(count, bound):
    """count random floats between -bound and bound, as little-endian bytes."""
    values = array.array("f", (bound * (2 * random.random() - 1) for _ in range(count)))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def write_safetensors(path, tensors):
    """tensors: {name: (shape, bytes)}"""
    header, offset = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, data in tensors.values():
            file.write(data)


def write_npy(path, shape, data):
    text = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data)


if len(sys.argv) != 2:
    sys.exit(__doc__)
folder = pathlib.Path(sys.argv[1])
random.seed(1)
weight_bound = 3**0.5 / width**0.5  # columns of length 1, so that the layer neither grows nor shrinks its rows by much
write_safetensors(folder / "layer.safetensors", {
    "h.0.attn.c_attn.weight": ([width, 3 * width], uniform(width * 3 * width, weight_bound)),
    "h.0.attn.c_attn.bias": ([3 * width], uniform(3 * width, 0.1)),
    "h.0.attn.c_proj.weight": ([width, width], uniform(width * width, weight_bound)),
    "h.0.attn.c_proj.bias": ([width], uniform(width, 0.1)),
})
write_npy(folder / "x.npy", (tokens, width), uniform(tokens * width, 3**0.5))
