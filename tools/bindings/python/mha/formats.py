"""Quantised weights of model files, for mha.Linear and mha.Layer: the same numbers, exactly.

>>> import mha.formats
>>> blocks = np.zeros((32, 36), np.uint8)  # the data of a tensor of gguf.GGUFReader
>>> linear = mha.formats.from_gguf(blocks, "Q4_0").linear()

A weight is code * scale + offset, with a scale and an offset for each group of inputs of an output;
those of K-quants are integers times a factor for each 256 inputs.
Each function returns a `Grouped`, and raises ValueError for what that cannot hold exactly, as real
numbers. Matrices of files that have x W, [in, out], are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._docs import documented
from ._layer import Linear
from ._weights import scale_fields

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Array, How

__all__ = [
    "Grouped",
    "arguments",
    "from_awq",
    "from_compressed_tensors",
    "from_gguf",
    "from_gptq",
]
_group_sizes = 128, 64, 32, 16


class Grouped(NamedTuple):
    """A matrix of codes in groups.

    Attributes
    ----------
    codes : ndarray of int8, shape (out, in)
        Codes: of 8 bits, or of 4 bits from -8 to 7, with offsets from 0 to 15; of 5 and 6 bits
        likewise.
    scales : ndarray of float32, shape (out, ceil(in / group_size))
        Scales.
    offsets : ndarray of float32, shape of `scales`
        Offsets; None is none.
    group_size : int
        Inputs that share a scale; 0 is all.
    bits : {4, 5, 6, 8}
        Bits of a code.
    block_scales, block_offsets : ndarray of float32, shape (out, ceil(in / 256))
        Factors of `scales` and `offsets`, which are integers from -128 to 127 then; None is 1.
    """

    codes: Array
    scales: Array
    offsets: Array | None
    group_size: int
    bits: int
    block_scales: Array | None = None
    block_offsets: Array | None = None

    @property
    def w(self) -> Array:
        """The codes as `mha.Layer` takes them.

        Codes of 4 bits are two numbers in a byte, the first one low.
        """
        if self.bits != 4:
            return self.codes
        stored = np.zeros((len(self.codes), -(-self.codes.shape[1] // 2) * 2), np.uint8)
        stored[:, : self.codes.shape[1]] = self.codes + (8 if self.offsets is None else 0)
        return stored[:, ::2] | stored[:, 1::2] << 4

    @documented({"arithmetic": "f32", "instruction_set": "auto"})
    def linear(self, b: Array | None = None, **how: Unpack[How]) -> Linear:
        """Make a linear layer, which keeps the codes, scales and offsets, as numbers.

        Parameters
        ----------
        b : ndarray of float32, shape (out,)
            The bias; None is 0.

        Returns
        -------
        mha.Linear
            The layer.
        """
        given = arguments(arithmetic=how.pop("arithmetic", "f32"), w=self)
        given.update({name: given[name].get("w") for name in scale_fields})
        return Linear(given.pop("w"), b, inputs=self.codes.shape[1], **given, **how)

    def rows(self, chosen: Any) -> Grouped:
        """Select outputs.

        Parameters
        ----------
        chosen : int array or slice
            Numbers of the outputs.

        Returns
        -------
        Grouped
            The matrix with these rows.
        """
        parts: Any = (part[chosen] if isinstance(part, np.ndarray) else part for part in self)
        return Grouped(*parts)


def from_gguf(data: Array, tensor_type: str) -> Grouped:
    """Import a tensor of a GGUF file.

    Parameters
    ----------
    data : ndarray of uint8, shape (out, bytes of a row)
        The data of a tensor of gguf.GGUFReader.
    tensor_type : {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
        The name of its type.

    Returns
    -------
    Grouped
        The matrix.
    """
    if tensor_type not in _ggml:
        raise ValueError(f"the tensor is of type {tensor_type}; {', '.join(_ggml)} can be imported")
    size, decode = _ggml[tensor_type]
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] % size:
        raise ValueError(
            f"data is {data.dtype} {list(data.shape)}; {tensor_type} has rows of bytes, {size} for"
            " each block"
        )
    with np.errstate(invalid="ignore"):
        group, bits, *parts = decode(np.ascontiguousarray(data).reshape(-1, size))
    rows = (None if part is None else part.reshape(len(data), -1) for part in parts)
    codes, scales, offsets, *factors = rows
    return _grouped(codes, scales, offsets, group, bits, *factors)


def from_awq(qweight: Array, qzeros: Array, scales: Array) -> Grouped:
    """Import a layer of AWQ with 4 bits, version "gemm".

    Parameters
    ----------
    qweight : ndarray of int32, shape (in, out / 8)
        Codes.
    qzeros : ndarray of int32, shape (in / group, out / 8)
        Zeros.
    scales : ndarray of float16 or float32, shape (in / group, out)
        Scales.

    Returns
    -------
    Grouped
        The matrix.
    """
    if np.ndim(qweight) != 2 or np.ndim(scales) != 2 or scales.shape[1] != 8 * qweight.shape[1]:
        raise ValueError(
            f"qweight is {list(np.shape(qweight))} and scales {list(np.shape(scales))}; AWQ's"
            " version 'gemm' with 4 bits has [in, out / 8] and [in / group, out]"
        )
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word has its columns
    codes, zeros = (
        _unpacked(words, 4, name).reshape(len(words), -1, 8)[:, :, order].reshape(len(words), -1)
        for words, name in ((qweight, "qweight"), (qzeros, "qzeros"))
    )
    _refuse_zeros(zeros, 7, "GPTQ, of which each is 1 less")
    return _with_zeros(codes.T, zeros.T, _floats(scales).T, 4)


@documented()
def from_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array,
    *,
    bits: int = 4,
    checkpoint_format: str = "gptq",
) -> Grouped:
    """Import a layer of GPTQ.

    Parameters
    ----------
    qweight : ndarray of int32, shape (in * bits / 32, out)
        Codes.
    qzeros : ndarray of int32, shape (in / group, out * bits / 32)
        Zeros.
    scales : ndarray of float16 or float32, shape (in / group, out)
        Scales.
    g_idx : ndarray of int32, shape (in,)
        The group of each input, which must be i / group: groups of inputs that are not adjacent
        (desc_act) cannot be imported.
    bits : {4, 8}
        Bits of a code.
    checkpoint_format : {"gptq", "gptq_v2"}
        "gptq" stores zero - 1, "gptq_v2" zero.

    Returns
    -------
    Grouped
        The matrix.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; 4 and 8 can be imported")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"checkpoint_format is {checkpoint_format!r}; gptq and gptq_v2 can be imported"
        )
    zeros = _unpacked(qzeros, bits, "qzeros")
    if checkpoint_format == "gptq_v2":
        _refuse_zeros(zeros, 2 ** (bits - 1) - 1, "checkpoint_format gptq")
    else:
        _refuse_zeros(zeros, 2 ** (bits - 1), "checkpoint_format gptq_v2")
        if np.any(zeros == 2**bits - 1):
            raise ValueError(
                f"qzeros has a stored zero of {2**bits - 1}, which some readers take as {2**bits}"
                " and others as 0; gptq_v2 stores zeros as they are"
            )
        zeros = zeros + 1
    codes = _unpacked(np.ascontiguousarray(qweight.T), bits, "qweight")
    return _with_zeros(codes, zeros.T, _floats(scales).T, bits, g_idx)


@documented()
def from_compressed_tensors(tensors: Mapping[str, Array], *, bits: int = 4) -> Grouped:
    """Import a layer of compressed-tensors.

    Parameters
    ----------
    tensors : mapping from str to ndarray
        Its tensors by name. Of pack-quantized: weight_packed, weight_scale, weight_shape, and where
        they exist weight_zero_point and weight_g_idx. Of int-quantized: weight (int8), weight_scale
        and weight_zero_point.
    bits : {4, 8}
        Bits of a code.

    Returns
    -------
    Grouped
        The matrix.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; 4 and 8 can be imported")
    scales, zeros = _floats(tensors["weight_scale"]), tensors.get("weight_zero_point")
    known = {f"weight_{name}" for name in ("packed", "scale", "shape", "zero_point", "g_idx")}
    for name in tensors:
        if name.startswith("weight_") and name not in known:
            raise ValueError(f"there is a tensor {name}, which this version does not know")
    if zeros is not None and zeros.dtype != np.int32:
        middle = 2 ** (bits - 1)
        if zeros.dtype != np.int8 or np.any((zeros < -middle) | (zeros >= middle)):
            raise ValueError(
                f"weight_zero_point is {zeros.dtype} from {zeros.min()} to {zeros.max()}; int8 from"
                f" {-middle} to {middle - 1} is expected, or packed in int32"
            )
    if "weight_packed" in tensors:
        outputs, inputs = (int(extent) for extent in tensors["weight_shape"])
        codes = _unpacked(tensors["weight_packed"], bits, "weight_packed")
        if codes.shape[0] != outputs or not 0 <= codes.shape[1] - inputs < 32 // bits:
            raise ValueError(
                f"weight_packed has {codes.shape[1]} codes in each of {len(codes)} rows;"
                f" weight_shape is {[outputs, inputs]}"
            )
        codes = codes[:, :inputs]
        if zeros is not None and zeros.dtype == np.int32:
            zeros = _unpacked(np.ascontiguousarray(zeros.T), bits, "weight_zero_point").T[:outputs]
            _refuse_zeros(zeros, 0, "a writer that packs them without an offset")
        elif zeros is not None:
            zeros = zeros.astype(np.int16) + 2 ** (bits - 1)
    else:
        codes = tensors["weight"]
        if codes.dtype != np.int8 or codes.ndim != 2 or bits != 8:
            raise ValueError(
                f"weight is {codes.dtype} {list(codes.shape)} of {bits} bits; int-quantized with"
                " int8 [out, in] of 8 bits can be imported"
            )
        codes, zeros = (
            codes.astype(np.int16) + 128,
            None if zeros is None else zeros.astype(np.int16) + 128,
        )
        scales = np.broadcast_to(
            scales.reshape(len(scales), -1), (len(codes), scales.size // len(scales))
        )
    zeros = (
        np.full(scales.shape, 2 ** (bits - 1))
        if zeros is None
        else np.broadcast_to(zeros.reshape(len(zeros), -1), scales.shape)
    )
    return _with_zeros(codes, zeros, scales, bits, tensors.get("weight_g_idx"))


@documented()
def arguments(*, arithmetic: str = "f32", **matrices: Grouped) -> dict[str, Any]:
    """Make the arguments of `mha.Layer` and `mha.pack` from a layer's matrices.

    A layer has one format, so all are brought into one that holds each exactly: codes of the most
    bits, in the smallest groups. Scales and offsets are stored as integers if all have factors,
    else as f16 if that holds them all. Only integer arithmetic has codes of 5 and 6 bits, which are
    otherwise stored as 8, and integer scales.

    Parameters
    ----------
    **matrices : Grouped
        The matrices by name, ``w_q=...`` and so on.

    Returns
    -------
    dict from str to Any
        Keywords; `arithmetic` is one of them unless it is "f32".

    Examples
    --------
    >>> codes, scales = np.ones((32, 32), np.int8), np.ones((32, 1), np.float32)
    >>> m = mha.formats.Grouped(codes, scales, None, group_size=32, bits=8)
    >>> layer = mha.Layer(32, 4, **mha.formats.arguments(w_q=m, w_k=m, w_v=m, w_o=m))
    """
    made = dict(zip(matrices, _common(list(matrices.values()), arithmetic in ("int8", "int16"))))
    one = next(iter(made.values()))
    given = {
        field: {name: a for name, m in made.items() if (a := getattr(m, field)) is not None}
        for field in scale_fields
    }
    if not one.group_size:
        given["scales"] = {name: np.ascontiguousarray(m.scales[:, 0]) for name, m in made.items()}
    with np.errstate(over="ignore"):
        is_f16 = one.group_size and all(
            np.array_equal(a, a.astype(np.float16)) for by in given.values() for a in by.values()
        )
    return {
        **{name: m.w for name, m in made.items()},
        **given,
        "group_size": one.group_size,
        "layout": "out_in",
        "scale_type": "int8" if given["block_scales"] else "f16" if is_f16 else "f32",
        "type": "int4" if one.bits == 4 else "int8",
        "weight_type": f"int{one.bits}",
        **({} if arithmetic == "f32" else {"arithmetic": arithmetic}),
    }


# ---- What files store


def _common(matrices, has_integers):
    """The matrices in one format, of integer arithmetic or not."""
    bits, group = max(m.bits for m in matrices), min(m.group_size or 128 for m in matrices)
    if all(m.group_size == 0 for m in matrices):
        return matrices
    if not has_integers and bits > 4:
        bits = 8
    keeps_blocks = has_integers and all(
        m.block_scales is not None and (m.offsets is None) == (m.block_offsets is None)
        for m in matrices
    )

    def multiplied(m, name):
        scales, factors = getattr(m, name), getattr(m, f"block_{name}")
        if factors is None:
            return scales
        factors = np.repeat(np.float64(factors), 256 // m.group_size, axis=1)
        return _exact(scales * factors[:, : scales.shape[1]], name)

    def regrouped(m):
        factors = m[5:] if keeps_blocks else (None, None)
        parts = m[1:3] if keeps_blocks else [multiplied(m, name) for name in scale_fields[:2]]
        inputs = m.codes.shape[1]
        times = (m.group_size or -(-inputs // group) * group) // group
        scales, offsets = (
            None if a is None else np.repeat(a, times, axis=1)[:, : -(-inputs // group)]
            for a in parts
        )
        return Grouped(m.codes, scales, offsets, group, bits, *factors)

    return [regrouped(m) for m in matrices]


def _halves(blocks, at):
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float64)


def _nibbles(stored, width):
    """Codes of bytes [blocks, n]: of each `width` bytes first the low nibbles, then the high
    ones."""
    stored = stored.reshape(len(stored), -1, 1, width)
    return (
        np.concatenate([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1).astype(np.int8)
    )


def _bits_of_32(stored):
    return np.unpackbits(stored, axis=1, bitorder="little").astype(np.int8) << 4


def _scales_of_k(blocks):
    """Scales and minima of the groups of Q4_K and Q5_K, whose 6 bits the first 4 have together and
    the last 4 in two places, and their factors d and -dmin."""
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    return scales, minima, _halves(blocks, 0), -_halves(blocks, 2)


def _q5_k(blocks):
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(
        len(blocks), 256
    ).astype(np.int8) << 4
    return 32, 5, _nibbles(blocks[:, 48:], 32) + high, *_scales_of_k(blocks)


def _q6_k(blocks):
    low = _nibbles(blocks[:, :128], 64)
    high = (
        blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    )
    return (
        16,
        6,
        low + (high.reshape(len(blocks), 256).astype(np.int8) << 4) - np.int8(32),
        blocks[:, 192:208].view(np.int8),
        None,
        _halves(blocks, 208),
    )


# Bytes of a block, and its group size, bits, codes, scales and offsets, and factors of these.
_ggml = {
    "Q4_0": (18, lambda b: (32, 4, _nibbles(b[:, 2:], 16) - np.int8(8), _halves(b, 0), None)),
    "Q4_1": (20, lambda b: (32, 4, _nibbles(b[:, 4:], 16), _halves(b, 0), _halves(b, 2))),
    "Q5_0": (
        22,
        lambda b: (
            32,
            5,
            _nibbles(b[:, 6:], 16) + _bits_of_32(b[:, 2:6]) - np.int8(16),
            _halves(b, 0),
            None,
        ),
    ),
    "Q5_1": (
        24,
        lambda b: (
            32,
            5,
            _nibbles(b[:, 8:], 16) + _bits_of_32(b[:, 4:8]),
            _halves(b, 0),
            _halves(b, 2),
        ),
    ),
    "Q8_0": (34, lambda b: (32, 8, b[:, 2:].view(np.int8), _halves(b, 0), None)),
    "Q4_K": (144, lambda b: (32, 4, _nibbles(b[:, 16:], 32), *_scales_of_k(b))),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}


def _unpacked(words, bits, name):
    """Unsigned codes of int32 [rows, n]: in each word the lowest bits first."""
    if not isinstance(words, np.ndarray) or words.dtype != np.int32 or words.ndim != 2:
        raise ValueError(
            f"{name} is {getattr(words, 'dtype', type(words).__name__)} {list(np.shape(words))}; a"
            " matrix of int32 is expected"
        )
    parts = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 4:
        parts = np.stack([parts & 15, parts >> 4], axis=2).reshape(len(parts), -1)
    return parts.astype(np.int16)


def _floats(scales):
    """float16 and float32, or bfloat16 as bits in uint16, in double precision."""
    if scales.dtype == np.uint16:
        return (scales.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if scales.dtype not in (np.float16, np.float32):
        raise ValueError(
            f"scales are {scales.dtype}; float16, float32 or bfloat16 as uint16 is expected"
        )
    return scales.astype(np.float64)


def _refuse_zeros(zeros, stored, whose):
    """Refuses what symmetric codes have by another convention than the caller's."""
    if zeros.size and np.all(zeros == stored):
        raise ValueError(f"all stored zeros are {stored}, as those of {whose}")


def _with_zeros(codes, zeros, scales, bits, g_idx=None):
    """(code - zero) * scale of unsigned codes, [out, in], and zeros and scales [out, groups]. Zeros
    in the middle of all codes need no offsets."""
    outputs, inputs = codes.shape
    groups = scales.shape[1] if scales.ndim == 2 else 0
    group = inputs // max(groups, 1) if g_idx is None else int(np.count_nonzero(g_idx == 0))
    if g_idx is not None and len(g_idx) != inputs:
        raise ValueError(f"g_idx is of {len(g_idx)} inputs, and codes of {bits} bits of {inputs}")
    if g_idx is not None and not (group and np.array_equal(g_idx, np.arange(inputs) // group)):
        raise ValueError(
            "g_idx is not i / group: inputs of a group are not adjacent (act-order, desc_act);"
            " quantise the model without"
        )
    if (
        scales.shape != (outputs, groups)
        or zeros.shape != scales.shape
        or not group
        or -(-inputs // group) != groups
        or g_idx is None
        and inputs % groups
    ):
        raise ValueError(
            f"{outputs} outputs of {inputs} inputs have scales {list(scales.shape)} and zeros"
            f" {list(zeros.shape)}, both with outputs first; a row for each output and a column for"
            " each group of one size are expected"
        )
    middle = 2 ** (bits - 1)
    if np.all(zeros == middle):
        return _grouped(codes - middle, scales, None, group, bits)
    base = 0 if bits == 4 else middle  # codes with offsets are 0 to 15, or int8
    return _grouped(codes - base, scales, (base - zeros) * scales, group, bits)


def _grouped(codes, scales, offsets, group, bits, *factors):
    inputs = codes.shape[1]
    scales, offsets, *factors = (
        None if part is None else _exact(part, name)
        for name, part in zip(scale_fields, (scales, offsets, *factors))
    )
    if bits == 8 and offsets is None and scales.shape[1] == 1:
        return Grouped(np.ascontiguousarray(codes, np.int8), scales, None, 0, bits)
    size = next((size for size in _group_sizes if group % size == 0 or group == inputs), None)
    if size is None:
        raise ValueError(f"groups have {group} inputs; multiples of 16 can be imported")
    times, columns = -(-group // size), -(-inputs // size)
    scales, offsets = (
        None if a is None else np.repeat(a, times, axis=1)[:, :columns] for a in (scales, offsets)
    )
    return Grouped(np.ascontiguousarray(codes, np.int8), scales, offsets, size, bits, *factors)


def _exact(values, name):
    """float32 of numbers of double precision that it holds."""
    with np.errstate(over="ignore", invalid="ignore"):
        given = values.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(given) | (given != values))
    if len(wrong):
        raise ValueError(
            f"{name}[{', '.join(map(str, wrong[0]))}] is {float(values[tuple(wrong[0])])}, which is"
            " no finite float32; it cannot be imported exactly"
        )
    return given
