"""Describes the weights of a layer to the library."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ._arrays import _check, _contiguous, _describe, _dtypes, _named, _strides
from ._structs import (
    _Config,
    _Format,
    _gate_in_w_q,
    _is_true,
    _LinearWeights,
    _Matrix,
    _new,
    _number,
    _Weights,
    arithmetics,
    gates,
    given_types,
    layouts,
    scale_types,
    types,
)

_type = type  # a parameter has its name
# What mha_matrix has beside codes, each a keyword.
scale_fields = "scales", "offsets", "block_scales", "block_offsets"


class _Functions(NamedTuple):
    create: str
    pack_size: str
    pack: str


_of_layers = _Functions("mha_layer_create", "mha_layer_pack_size", "mha_layer_pack")
_of_linear_layers = _Functions("mha_linear_create", "mha_linear_pack_size", "mha_linear_pack")


def _describe_layer(
    query_dim,
    num_heads,
    *,
    w_q=None,
    w_k=None,
    w_v=None,
    w_qkv=None,
    w_o=None,
    w_g=None,
    b_q=None,
    b_k=None,
    b_v=None,
    b_qkv=None,
    b_o=None,
    b_g=None,
    layout="in_out",
    type=None,
    scales=None,
    offsets=None,
    block_scales=None,
    block_offsets=None,
    weight_type=None,
    group_size=0,
    scale_type="f32",
    arithmetic="f32",
    gate="none",
    gate_in_w_q=False,
    gate_dim=0,
    key_dim=0,
    value_dim=0,
    output_dim=0,
    num_kv_heads=0,
    head_dim=0,
    head_dim_v=0,
    scale=0.0,
):
    """The functions that make a layer, or one of a single matrix, and the structs that describe
    it."""
    matrices = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_qkv": w_qkv, "w_o": w_o, "w_g": w_g}
    type = _type_of(matrices) if type is None else type
    weight_type = weight_type_of(weight_type, arithmetic, type)
    config = _new(
        _Config,
        query_dim=query_dim,
        num_heads=num_heads,
        format=_Format(
            type=_named(types, weight_type, "weight_type"),
            group_size=_number(group_size, "group_size", "u32"),
            scale_type=_named(scale_types, scale_type, "scale_type"),
            arithmetic=_named(arithmetics, arithmetic, "arithmetic"),
        ),
        gate=_named(gates, gate, "gate"),
        gate_dim=gate_dim,
        key_dim=key_dim,
        value_dim=value_dim,
        output_dim=output_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scale,
    )
    weights = _new(
        _Weights,
        layout=_named(layouts, layout, "layout"),
        type=_named(given_types, type, "type"),
        gate_place=_gate_in_w_q if _is_true(gate_in_w_q, "gate_in_w_q") else 0,
    )
    others = (
        *(matrix for name, matrix in matrices.items() if name != "w_o"),
        b_q,
        b_k,
        b_v,
        b_qkv,
        b_g,
    )
    is_linear = (
        num_heads == 0
        and w_o is not None
        and gate == "none"
        and not any((gate_dim, key_dim, value_dim, num_kv_heads, head_dim, head_dim_v, scale))
        and all(one is None for one in others)
    )
    dims = (
        {"w_o": (query_dim, config.output_dim or query_dim)}
        if is_linear
        else _resolved(config, gate_in_w_q)
    )
    if w_o is None and output_dim == dims["w_o"][0]:
        config.output_dim = 0  # a layer without W_O has this width by itself
    given = (scales, offsets, block_scales, block_offsets)
    of_codes = [(what, _by_matrix(one, what, matrices)) for what, one in zip(scale_fields, given)]
    biases = {"w_q": b_q, "w_k": b_k, "w_v": b_v, "w_qkv": b_qkv, "w_o": b_o, "w_g": b_g}
    for name, matrix in matrices.items():
        depth, width = dims.get(name, (0, 0))
        made = _Matrix(bias=_contiguous(biases[name], "b" + name[1:], [np.float32], (width,)))
        if matrix is not None:
            extents = (
                (width, -(-depth // 2) if type == "int4" else depth)
                if layout == "out_in"
                else (depth, width)
            )
            _check(matrix, name, [_dtypes[type]], extents)
            [stride] = _strides(matrix, name)
            made.data, made.row_stride = matrix, stride * (2 if type == "int4" else 1)
        group = group_size or (32 if type == "int4" else 0)
        for what, given in of_codes:
            size = 256 if what.startswith("block") else group
            extents = (width, -(-depth // size)) if size else (width,)
            array = _contiguous(given.get(name), f"{what}[{name!r}]", [np.float32], extents)
            setattr(made, what, array)
        setattr(weights, name, made)
    if not is_linear:
        return _of_layers, (config, weights)
    linear = _new(
        _LinearWeights,
        input_dim=query_dim,
        output_dim=config.output_dim or query_dim,
        layout=weights.layout,
        type=weights.type,
        w=weights.w_o,
        format=config.format,
    )
    return _of_linear_layers, (linear,)


# All keywords of a layer, with their defaults.
_keywords = {
    name: one.default
    for name, one in inspect.signature(_describe_layer).parameters.items()
    if one.kind is one.KEYWORD_ONLY
}


def weight_type_of(weight_type: str | None, arithmetic: str, type: str) -> str:
    """The type that matrices of a type are packed in, for an arithmetic: what None stands for."""
    if weight_type is not None or arithmetic != "bf16":
        return "f32" if weight_type is None else weight_type
    if type == "f16":
        raise ValueError(
            "the matrices are f16, of which bf16 keeps 3 bits less; weight_type='bf16' rounds them"
        )
    return "bf16"


def _by_matrix(given, name, matrices):
    """scales or offsets, by the names of matrices."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name} is a {_type(given).__name__}; it must be a dictionary from matrices to arrays,"
            " such as {'w_q': array}"
        )
    for matrix in given:
        if matrix not in matrices:
            raise ValueError(
                f"there are no {name} of {matrix!r}; the matrices are {', '.join(matrices)}"
            )
    return given


def _type_of(matrices):
    """The type that the matrices have by their NumPy type."""
    for name, matrix in matrices.items():
        if isinstance(matrix, np.ndarray):
            for type in "f32", "f16", "int8":
                if matrix.dtype == _dtypes[type]:
                    return type
            raise TypeError(
                f"{name} is {_describe(matrix)}; without type=, its type must be float32, float16"
                " or int8"
            )
    return "f32"


def _resolved(config, gate_in_q):
    """Matrix -> (inputs, outputs) of a layer, where the shape is one; what is wrong with it, the
    library says."""
    key_dim = config.key_dim or config.query_dim
    value_dim = config.value_dim or key_dim
    kv_heads = config.num_kv_heads or config.num_heads
    if config.num_heads < 1 or not config.head_dim and config.query_dim % config.num_heads:
        raise ValueError(
            f"num_heads is {config.num_heads}; it must be at least 1 and, without a head_dim,"
            f" divide {config.query_dim}"
        )
    head_dim = config.head_dim or config.query_dim // config.num_heads
    head_dim_v = config.head_dim_v or head_dim
    gate_dim = (config.gate_dim or head_dim_v) if config.gate else 0
    q_dim = head_dim + gate_dim * gate_in_q
    q, k, v = config.num_heads * q_dim, kv_heads * head_dim, kv_heads * head_dim_v
    return {
        "w_g": (config.query_dim, config.num_heads * gate_dim),
        "w_q": (config.query_dim, q),
        "w_k": (key_dim, k),
        "w_v": (value_dim, v),
        "w_qkv": (config.query_dim, q + k + v),
        "w_o": (config.num_heads * head_dim_v, config.output_dim or config.query_dim),
    }
