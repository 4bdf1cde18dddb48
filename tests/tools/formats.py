"""Encodes numbers, which are nested lists, as files have them, and writes .safetensors. The tests
need a little-endian machine."""

import array
import json
import struct


def shape_of(values):
    return [len(values), *shape_of(values[0])] if isinstance(values, list) else []


def flat(values):
    return (
        [number for row in values for number in flat(row)] if isinstance(values, list) else [values]
    )


def transposed(matrix):
    return [list(column) for column in zip(*matrix)]


def floats(values):
    return array.array("f", flat(values)).tobytes()


def bfloat16(values):
    return b"".join(struct.pack("<f", number)[2:] for number in flat(values))


def float16(values):
    return b"".join(struct.pack("<e", number) for number in flat(values))


def safetensors(tensors, dtype="F32", encode=floats):
    """A file of tensors by name: numbers, or (dtype, shape, bytes)."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        kind, shape, encoded = (
            values if isinstance(values, tuple) else (dtype, shape_of(values), encode(values))
        )
        header[name] = dict(
            dtype=kind, shape=shape, data_offsets=[len(data), len(data) + len(encoded)]
        )
        data += encoded
    return with_header(json.dumps(header).encode(), data)


def with_header(header, data=b"", length=None):
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header) if length is None else length) + header + data
