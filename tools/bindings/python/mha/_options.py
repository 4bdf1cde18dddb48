"""What calls may be given besides their arrays: score options, norms and rotary position
embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays
from ._arrays import _check, _contiguous, _describe, _integers, _must_be, _named, _needed, _some
from ._library import _call
from ._structs import (
    _broadcast,
    _Input,
    _is_true,
    _new,
    _Norm,
    _norm_after_gate,
    _norm_after_rope,
    _norm_all_heads,
    _norm_layer,
    _norm_values,
    _number,
    _ReadOnly,
    _Rope,
    _RopeConfig,
    _ScoreArrays,
    _ScoreOptions,
    _somewhere,
    _Strides,
    rope_styles,
    score_columns,
    score_groups,
    types,
)

if TYPE_CHECKING:
    from ._typing import Integers


_f32 = [np.dtype(np.float32)]


class ScoreOptions:
    """What changes scores and who attends to whom, for score= of a call; all of it is optional, and
    all combines (mha_score_options, mha_score_arrays).

        score = mha.ScoreOptions(softcap=50)                                   # Gemma 2
        score = mha.ScoreOptions(sinks=sinks)  # gpt-oss: [num_heads]
        score = mha.ScoreOptions(alibi_slopes=mha.alibi_slopes(num_heads))     # BLOOM, MPT
        score = mha.ScoreOptions(relative_bias=mha.t5_relative_bias(embedding))  # encoders of T5
        score = mha.ScoreOptions(mask=mask)  # [n_q, n_kv], True = attends
        score = mha.ScoreOptions(q_groups=documents)  # [n]: each row attends to its own document
        # images both ways, under is_causal; text is -1
        score = mha.ScoreOptions(q_groups=images, groups="also")
        score = mha.ScoreOptions(head_scales=head_mask)  # [num_heads]; heads of 0 are not computed

    mask, bool or uint8, and bias, float32 or float16, are [batch, num_heads, n_q, columns]; what
    broadcasts to that will do. Columns are the rows of key or, with a cache, the positions in it
    after the call; with columns="new_keys" always the rows of key that come with the call. With
    num_columns, arrays have this many columns, and keys after them are masked. q_groups, int32, are
    [n_q] or [batch, n_q], kv_groups [columns] or [batch, columns]; None: those of the queries,
    where keys are their rows. relative_bias [num_heads, distances] begins at a distance of
    -relative_left; None: in its middle is that of 0. relative_rows, in its place, are [batch,
    num_heads, n_q, distances], numbers of each query, or broadcast to that. q_scales are [n_q] or
    [batch, n_q]. chosen_keys, int32 [batch, num_kv_heads, n_q, entries] or broadcast to that, are
    the positions that each query attends to, in any order, -1 for none; with chosen_block, numbers
    of blocks of this many keys.
    """

    def __init__(
        self,
        *,
        softcap: float = 0.0,
        alibi_slopes: np.ndarray | None = None,
        sinks: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        columns: str = "all_keys",
        relative_bias: np.ndarray | None = None,
        relative_left: int | None = None,
        q_scales: np.ndarray | None = None,
        head_scales: np.ndarray | None = None,
        num_columns: int = 0,
        groups: str = "within",
        q_groups: np.ndarray | None = None,
        kv_groups: np.ndarray | None = None,
        relative_rows: np.ndarray | None = None,
        chosen_keys: np.ndarray | None = None,
        chosen_block: int = 0,
    ) -> None:
        _named(score_columns, columns, "columns")
        _named(score_groups, groups, "groups")
        self.softcap, self.alibi_slopes, self.sinks = softcap, alibi_slopes, sinks
        self.head_scales, self.q_scales = head_scales, q_scales
        self.bias, self.mask, self.columns = bias, mask, columns
        self.relative_bias, self.relative_left = relative_bias, relative_left
        self.relative_rows, self.num_columns = relative_rows, num_columns
        self.groups, self.q_groups, self.kv_groups = groups, q_groups, kv_groups
        self.chosen_keys, self.chosen_block = chosen_keys, chosen_block

    def _structs(self, batch, num_heads, num_kv_heads, n_q, columns):
        """The two structs that the library takes: of the model, and of a step."""
        columns = self.num_columns or columns
        entries = (
            0 if self.chosen_keys is None else (getattr(self.chosen_keys, "shape", ()) or (1,))[-1]
        )
        score = _new(
            _ScoreOptions,
            softcap=self.softcap,
            alibi_slopes=_contiguous(self.alibi_slopes, "alibi_slopes", _f32, (num_heads,)),
            sinks=_contiguous(self.sinks, "sinks", _f32, (num_heads,)),
            relative_bias=_contiguous(
                self.relative_bias, "relative_bias", _f32, (num_heads, _some)
            ),
            head_scales=_contiguous(self.head_scales, "head_scales", _f32, (num_heads,)),
        )
        arrays = _new(
            _ScoreArrays,
            columns=_named(score_columns, self.columns, "columns"),
            num_columns=self.num_columns,
            groups=_named(score_groups, self.groups, "groups"),
            num_chosen=entries,
            chosen_block=self.chosen_block,
        )
        distances = 0
        relative = self.relative_rows if self.relative_bias is None else self.relative_bias
        if relative is not None:
            distances = (getattr(relative, "shape", ()) or (1,))[-1]
            score.relative_left = (
                distances // 2 if self.relative_left is None else self.relative_left
            )
            score.relative_right = distances - 1 - score.relative_left
        for name, array, dtype, width in (
            ("q_groups", self.q_groups, np.int32, n_q),
            ("kv_groups", self.kv_groups, np.int32, columns),
            ("q_scales", self.q_scales, np.float32, n_q),
        ):
            if array is not None:
                is_of_all = getattr(array, "ndim", 0) == 1
                _contiguous(array, name, [dtype], (width,) if is_of_all else (batch, width))
                setattr(
                    arrays, name, np.tile(array, (batch, 1)) if is_of_all and batch > 1 else array
                )
        for name, array, dtypes, extent, heads in (
            ("bias", self.bias, (np.float32, np.float16), columns, num_heads),
            ("mask", self.mask, (np.bool_, np.uint8), columns, num_heads),
            ("relative_rows", self.relative_rows, _f32, distances, num_heads),
            ("chosen_keys", self.chosen_keys, (np.int32,), entries, num_kv_heads),
        ):
            if array is None:
                continue
            _check(array, name, dtypes)
            shape = (batch, heads, n_q, extent)
            try:
                view = np.broadcast_to(array, shape)
            except ValueError:
                raise ValueError(
                    f"{name} is {_describe(array)}; its shape must be {list(shape)}, or broadcast"
                    " to that"
                ) from None
            *outer, innermost = [stride // array.itemsize for stride in view.strides]
            if extent > 1 and innermost != 1 or min(outer) < 0 or 0 < outer[2] < extent:
                raise ValueError(
                    f"{name} is {_describe(array)}; the elements of a row must be neighbours,"
                    f" {extent} of them"
                )
            strides = _Strides(
                **{
                    axis: stride or _broadcast
                    for axis, stride in zip(("batch", "head", "row"), outer)
                }
            )
            data = array if array.size else _somewhere
            if name == "bias":
                arrays.bias = _Input(
                    data=data,
                    type=types["f16" if array.dtype == np.float16 else "f32"],
                    strides=strides,
                )
            else:
                setattr(arrays, name, data), setattr(arrays, name + "_strides", strides)
        return score, arrays


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes of ALiBi for this many heads, float32 (mha_alibi_slopes)."""
    num_heads = _number(num_heads, "num_heads")
    slopes = np.empty(max(num_heads, 0), np.float32)
    _call("mha_alibi_slopes", num_heads, slopes)
    return slopes


def t5_relative_bias(
    embedding: np.ndarray, *, max_distance: int = 128, is_bidirectional: bool = True
) -> np.ndarray:
    """The relative bias of T5 from its embedding [num_buckets, num_heads], as far as distances
    differ (mha_t5_relative_bias): with is_bidirectional [num_heads, 2 * max_distance + 1]; without,
    for decoders, [num_heads, max_distance + 1], of which relative_left is max_distance."""
    _needed(embedding, "embedding", _f32, (_some, _some))
    (num_buckets, num_heads), max_distance = embedding.shape, _number(max_distance, "max_distance")
    right = max_distance if _is_true(is_bidirectional, "is_bidirectional") else 0
    table = np.empty((num_heads, max(max_distance, 0) + 1 + max(right, 0)), np.float32)
    _call(
        "mha_t5_relative_bias",
        embedding,
        num_buckets,
        max_distance,
        is_bidirectional,
        num_heads,
        max_distance,
        right,
        table,
    )
    return table


class ContextNorm(_ReadOnly):
    """Norm of the context before W_O, for context= of a Norm.

        # BitNet
        norm = mha.Norm(epsilon=0, context=mha.ContextNorm(weight, epsilon=1e-5, all_heads=True))
        # Kosmos-2
        context = mha.ContextNorm(weight, bias=bias, layer=True, all_heads=True)
        norm = mha.Norm(epsilon=0, context=context)

    weight and bias, float32, are [head_dim_v] for all heads, or else [num_heads, head_dim_v]; with
    all_heads [num_heads * head_dim_v] will do. The norm comes before the layer's gate, or with
    after_gate after it.
    """

    _fixed = ("flags", "all_heads")

    def __init__(
        self,
        weight: np.ndarray | None = None,
        *,
        bias: np.ndarray | None = None,
        epsilon: float = 1e-6,
        layer: bool = False,
        all_heads: bool = False,
        after_gate: bool = False,
    ) -> None:
        self.weight, self.bias, self.epsilon, self.all_heads = weight, bias, epsilon, all_heads
        self.flags = (
            (_norm_layer if _is_true(layer, "layer") else 0)
            | (_norm_all_heads if _is_true(all_heads, "all_heads") else 0)
            | (_norm_after_gate if _is_true(after_gate, "after_gate") else 0)
        )

    def _fill(self, struct, num_heads, head_dim_v):
        struct.context_flags, struct.context_epsilon = self.flags, self.epsilon
        first = self.weight if self.weight is not None else self.bias
        dimensions = getattr(first, "ndim", 0)
        if dimensions == 1:
            shape = (num_heads * head_dim_v,) if self.all_heads else (head_dim_v,)
        else:
            shape = (num_heads, head_dim_v)
        struct.context_weight = _contiguous(self.weight, "weight", _f32, shape)
        struct.context_bias = _contiguous(self.bias, "bias", _f32, shape)
        if self.all_heads or dimensions == 2:
            struct.context_head_stride = head_dim_v


class Norm(_ReadOnly):
    """Norm of queries and keys, for norm= of a call (mha_norm).

        norm = mha.Norm(q_weight=q_weight, k_weight=k_weight)  # Qwen3: RMS norm of each head
        # OLMo 2: one norm over all heads
        norm = mha.Norm(q_weight=q_weight, k_weight=k_weight, all_heads=True)
        # Cohere: layer norm
        norm = mha.Norm(layer=True, epsilon=1e-5, q_weight=q_weight, k_weight=k_weight)

    Weights and biases, float32, are [head_dim] for all heads, or else all of them [heads,
    head_dim]; with all_heads [heads * head_dim] will do. The norm comes before the rotation, or
    with after_rope after it. values normalises values too, without weights. context is a norm of
    the context too; with epsilon=0 it is the only one.
    """

    _fixed = ("flags", "all_heads", "arrays")

    def __init__(
        self,
        *,
        q_weight: np.ndarray | None = None,
        k_weight: np.ndarray | None = None,
        q_bias: np.ndarray | None = None,
        k_bias: np.ndarray | None = None,
        epsilon: float = 1e-6,
        layer: bool = False,
        all_heads: bool = False,
        after_rope: bool = False,
        values: bool = False,
        context: ContextNorm | None = None,
    ) -> None:
        self.context = context
        self.arrays = {
            "q_weight": q_weight,
            "k_weight": k_weight,
            "q_bias": q_bias,
            "k_bias": k_bias,
        }
        self.epsilon, self.all_heads = epsilon, all_heads
        self.flags = (
            (_norm_layer if _is_true(layer, "layer") else 0)
            | (_norm_all_heads if _is_true(all_heads, "all_heads") else 0)
            | (_norm_after_rope if _is_true(after_rope, "after_rope") else 0)
            | (_norm_values if _is_true(values, "values") else 0)
        )

    def _struct(self, num_heads, num_kv_heads, head_dim, head_dim_v):
        struct = _new(_Norm, flags=self.flags, epsilon=self.epsilon)
        dimensions = {array.ndim for array in self.arrays.values() if isinstance(array, np.ndarray)}
        if not self.all_heads and len(dimensions) > 1:
            raise ValueError(
                "of a norm's weights and biases, either all are [head_dim] or all are [heads,"
                " head_dim]"
            )
        for name, array in self.arrays.items():
            heads = num_heads if name[0] == "q" else num_kv_heads
            if isinstance(array, np.ndarray) and array.ndim == 1:
                shape = (heads * head_dim,) if self.all_heads else (head_dim,)
            else:
                shape = (heads, head_dim)
            setattr(struct, name, _contiguous(array, name, _f32, shape))
        if self.all_heads or 2 in dimensions:
            struct.head_stride = head_dim
        if self.context is not None:
            _must_be(ContextNorm, self.context, "context")
            self.context._fill(struct, num_heads, head_dim_v)
        return struct


class Rope(_ReadOnly):
    """Rotation of queries and keys by tables cos and sin [num_positions, dims / 2]; style is "half"
    or "interleaved".

    The tables rotate as many elements of a head as they have columns for, from offset on.
    q_positions [batch, n_q] and k_positions [batch, rows of key] are positions of other rows than
    the usual ones.
    """

    _fixed = ("cos", "sin", "dims", "style")

    def __init__(
        self,
        cos: np.ndarray,
        sin: np.ndarray,
        *,
        style: str = "half",
        dims: int = 0,
        q_positions: Integers | None = None,
        k_positions: Integers | None = None,
        offset: int = 0,
    ) -> None:
        self.style = _named(rope_styles, style, "style")
        self.cos, self.sin = cos, sin
        self.q_positions, self.k_positions, self.offset = q_positions, k_positions, offset
        self._struct()  # raises what a call would
        self.dims = 2 * cos.shape[1]
        if _number(dims, "dims") not in (0, self.dims):
            raise ValueError(
                f"dims is {dims}; tables of {cos.shape[1]} columns rotate {self.dims} elements of a"
                " head"
            )

    @classmethod
    def tables(
        cls,
        dims: int,
        num_positions: int,
        *,
        style: str = "half",
        offset: int = 0,
        first_position: int = 0,
        **angles: Any,
    ) -> Rope:
        """With tables by mha_rope_tables. angles are the fields of mha_rope_config: base,
        linear_factor, yarn_factor and so on; pair_factors is a sequence of dims / 2 numbers,
        mrope_section one of 3, and mrope_positions are integers [3, num_positions]."""
        unknown = set(angles) - {field for field, _ in _RopeConfig._fields_[1:]}
        if unknown:
            raise TypeError(f"mha_rope_config has no {', '.join(sorted(unknown))}")
        dims, num_positions = _number(dims, "dims"), _number(num_positions, "num_positions")
        factors = angles.get("pair_factors")
        if factors is not None:
            factors = _arrays._array(factors, "pair_factors")
            if factors.dtype.kind not in "iuf" or factors.shape != (dims // 2,):
                raise ValueError(
                    f"pair_factors is {_describe(factors)}; it must be {dims // 2} numbers"
                )
            angles["pair_factors"] = np.ascontiguousarray(factors, np.float64)
        for name, shape in ("mrope_section", (3,)), ("mrope_positions", (3, num_positions)):
            angles[name] = _integers(angles.get(name), name, shape)
        config = _new(
            _RopeConfig,
            dims=dims,
            num_positions=num_positions,
            first_position=first_position,
            **angles,
        )
        cos, sin = (
            np.empty((max(num_positions, 0), max(dims, 0) // 2), np.float32) for _ in range(2)
        )
        _call("mha_rope_tables", config, cos, sin)
        return cls(cos, sin, style=style, offset=offset)

    def _struct(self):
        _needed(self.cos, "cos", _f32, (None, _some))
        _needed(self.sin, "sin", _f32, self.cos.shape)
        return _new(
            _Rope,
            style=self.style,
            dims=2 * self.cos.shape[1],
            num_positions=self.cos.shape[0],
            cos=self.cos,
            sin=self.sin,
            offset=self.offset,
        )
