"""What calls may be given besides their arrays: score options, norms and rotary embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays
from ._arrays import _check, _contiguous, _describe, _integers, _must_be, _named, _needed, _some
from ._docs import documented
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
    score_segments,
    types,
)

if TYPE_CHECKING:
    from ._typing import Integers


_f32 = [np.dtype(np.float32)]
_arrays_of_angles = "pair_factors", "mrope_section", "mrope_positions"
# Keywords of tables of rotation, with their defaults.
_angles = {
    name: None if name in _arrays_of_angles else 0
    for name, _ in _RopeConfig._fields_[1:]
    if name not in ("dims", "num_positions", "first_position")
}


@documented()
class ScoreOptions:
    """What changes scores, and who attends to whom. All options combine.

    Of a query at position p and a key at position j, in this order: ``s = scale * (q_scales * q) @
    k``; ``s = softcap * tanh(s / softcap)``; ``s -= alibi_slopes * abs(j - p)``; ``s +=
    relative_bias[j - p]`` or ``relative_rows``; ``s += bias``; masked keys have -infinity. The
    weights are exp(s) / (sum of exp(s) over all keys + exp(sinks)), and the context is multiplied
    by head_scales.

    Parameters
    ----------
    softcap : float
        > 0 and finite; 0 is none.
    alibi_slopes : ndarray of float32, shape (num_heads,)
        Slopes of ALiBi, such as those of the function `alibi_slopes`.
    sinks : ndarray of float32, shape (num_heads,)
        Logits that take part in the softmax and have no value.
    bias : ndarray of float32 or float16, shape ([batch, num_heads, n_q,] columns)
        Added to scores; -infinity masks the key. Arrays that broadcast to it are accepted.
    mask : ndarray of bool or uint8, shape ([batch, num_heads, n_q,] columns)
        Whether a query may attend to a key. Arrays that broadcast to it are accepted.
    column_keys : {"all_keys", "new_keys"}
        What the columns of `bias`, `mask` and `kv_segments` stand for: the rows of key or, with a
        cache, its positions after the call; or always the rows of key that come with the call.
    relative_bias : ndarray of float32, shape (num_heads, distances)
        Added by the distance j - p of key and query, from -relative_left on. Keys that are farther
        away have the first or the last number.
    relative_left : int
        Distances before the query; None puts a distance of 0 in the middle.
    q_scales : ndarray of float32, shape ([batch,] n_q)
        Factors of the queries, after rotation.
    head_scales : ndarray of float32, shape (num_heads,)
        Factors of the heads' contexts. A head of 0 is not computed.
    num_columns : int
        Columns of the arrays; later keys are masked. 0 is all keys of the longest sequence.
    segments : {"within", "also"}
        What segments do: with "within", a query attends only to keys of its segment; with
        "also", to all of these besides what `is_causal` and windows allow, and a negative number is
        no segment.
    q_segments : ndarray of int32, shape ([batch,] n_q)
        Segments of the queries, such as documents or images.
    kv_segments : ndarray of int32, shape ([batch,] columns)
        Segments of the keys; None is `q_segments`.
    relative_rows : ndarray of float32, shape ([batch, num_heads, n_q,] distances)
        As `relative_bias`, in its place, with numbers of each query.
    chosen_keys : ndarray of int32, shape ([batch, num_kv_heads, n_q,] entries)
        Positions that each query attends to, in any order, -1 for none, as `choose_keys` returns
        them.
    chosen_block : int
        If not 0, entries of `chosen_keys` are numbers of blocks of this many keys.

    Examples
    --------
    >>> score = mha.ScoreOptions(softcap=50)  # Gemma 2
    >>> score = mha.ScoreOptions(alibi_slopes=mha.alibi_slopes(4))  # BLOOM, MPT
    >>> documents = np.int32([0, 0, 0, 1, 1])
    >>> score = mha.ScoreOptions(q_segments=documents)  # each row attends to its own document
    >>> q = k = v = np.random.rand(5, 4, 8).astype(np.float32)
    >>> y = mha.attention(q, k, v, is_causal=True, score=score)
    >>> np.array_equal(y[3:], mha.attention(q[3:], k[3:], v[3:], is_causal=True))
    True
    """

    def __init__(
        self,
        *,
        softcap: float = 0.0,
        alibi_slopes: np.ndarray | None = None,
        sinks: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        column_keys: str = "all_keys",
        relative_bias: np.ndarray | None = None,
        relative_left: int | None = None,
        q_scales: np.ndarray | None = None,
        head_scales: np.ndarray | None = None,
        num_columns: int = 0,
        segments: str = "within",
        q_segments: np.ndarray | None = None,
        kv_segments: np.ndarray | None = None,
        relative_rows: np.ndarray | None = None,
        chosen_keys: np.ndarray | None = None,
        chosen_block: int = 0,
    ) -> None:
        _named(score_columns, column_keys, "column_keys")
        _named(score_segments, segments, "segments")
        self.softcap, self.alibi_slopes, self.sinks = softcap, alibi_slopes, sinks
        self.head_scales, self.q_scales = head_scales, q_scales
        self.bias, self.mask, self.column_keys = bias, mask, column_keys
        self.relative_bias, self.relative_left = relative_bias, relative_left
        self.relative_rows, self.num_columns = relative_rows, num_columns
        self.segments, self.q_segments, self.kv_segments = segments, q_segments, kv_segments
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
            column_keys=_named(score_columns, self.column_keys, "column_keys"),
            num_columns=self.num_columns,
            segments=_named(score_segments, self.segments, "segments"),
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
            ("q_segments", self.q_segments, np.int32, n_q),
            ("kv_segments", self.kv_segments, np.int32, columns),
            ("q_scales", self.q_scales, np.float32, n_q),
        ):
            if array is not None:
                _check(array, name, [dtype])
                setattr(arrays, name, _of_rows(array, name, batch, width))
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


def _of_rows(array, name, batch, rows):
    """An array of numbers of rows, [rows] for all sequences or [batch, rows], as the latter."""
    is_of_all = array.ndim == 1
    _contiguous(array, name, None, (rows,) if is_of_all else (batch, rows))
    return np.tile(array, (batch, 1)) if is_of_all and batch > 1 else array


@documented()
def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes of ALiBi.

    Parameters
    ----------
    num_heads : int
        Number of query heads; >= 1.

    Returns
    -------
    ndarray of float32, shape (num_heads,)
        Slopes.

    Examples
    --------
    >>> mha.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    num_heads = _number(num_heads, "num_heads")
    slopes = np.empty(max(num_heads, 0), np.float32)
    _call("mha_alibi_slopes", num_heads, slopes)
    return slopes


@documented()
def t5_relative_bias(
    embedding: np.ndarray, *, max_distance: int = 128, is_bidirectional: bool = True
) -> np.ndarray:
    """The relative bias of T5, of all distances that have different numbers.

    Parameters
    ----------
    embedding : ndarray of float32, shape (num_buckets, num_heads)
        The model's embedding of relative positions.
    max_distance : int
        Distances of this and more share the last bucket.
    is_bidirectional : bool
        True for encoders, False for decoders.

    Returns
    -------
    ndarray of float32, shape (num_heads, 2 * max_distance + 1) or (num_heads, max_distance + 1)
        `relative_bias` of `ScoreOptions`; the second shape is that of decoders, whose
        `relative_left` is max_distance.

    Examples
    --------
    >>> embedding = np.random.rand(32, 4).astype(np.float32)
    >>> score = mha.ScoreOptions(relative_bias=mha.t5_relative_bias(embedding))
    """
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


@documented()
class ContextNorm(_ReadOnly):
    """Norm of the context before W_O, for `context` of a `Norm`.

    Parameters
    ----------
    weight : ndarray of float32, shape (head_dim_v,) or (num_heads, head_dim_v)
        Weights; None is 1. With `all_heads`, also (num_heads * head_dim_v,).
    bias : ndarray of float32, shape of `weight`
        Biases of a layer norm; None is 0.
    epsilon : float
        Added to the mean of squares; > 0.
    layer : bool
        Whether this is a layer norm, and not an RMS norm.
    all_heads : bool
        Whether this is one norm over all heads, and not one of each head.
    after_gate : bool
        Whether the norm comes after the layer's gate, and not before.

    Examples
    --------
    >>> weight = np.ones(64, np.float32)
    >>> context = mha.ContextNorm(weight, epsilon=1e-5, all_heads=True)
    >>> norm = mha.Norm(epsilon=0, context=context)  # BitNet
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


@documented()
class Norm(_ReadOnly):
    """Norm of queries and keys, before they are scored or stored.

    An RMS norm is x / sqrt(mean of x^2 + epsilon) * weight. A layer norm subtracts the mean first,
    and adds the bias. Models that store w for a weight of 1 + w (Gemma) pass the sum.

    Parameters
    ----------
    q_weight : ndarray of float32, shape (head_dim,) or (num_heads, head_dim)
        Weights of queries; None is 1. With `all_heads`, also (num_heads * head_dim,).
    k_weight : ndarray of float32, shape (head_dim,) or (num_kv_heads, head_dim)
        Weights of keys; None is 1.
    q_bias : ndarray of float32, shape of `q_weight`
        Biases of queries, of a layer norm; None is 0.
    k_bias : ndarray of float32, shape of `k_weight`
        Biases of keys, of a layer norm; None is 0.
    epsilon : float
        Added to the mean of squares; > 0. 0 is no norm of queries and keys.
    layer : bool
        Whether this is a layer norm, and not an RMS norm.
    all_heads : bool
        Whether this is one norm over all heads, and not one of each head.
    after_rope : bool
        Whether the norm comes after the rotation, and not before.
    values : bool
        Whether values are normalised too: an RMS norm of each head, without weights.
    context : ContextNorm
        Norm of the context.

    Examples
    --------
    >>> weight = np.ones(8, np.float32)
    >>> norm = mha.Norm(q_weight=weight, k_weight=weight)  # Qwen3: RMS norm of each head
    >>> norm = mha.Norm(layer=True, epsilon=1e-5, q_weight=weight, k_weight=weight)  # Cohere
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


@documented()
class Rope(_ReadOnly):
    """Rotary position embedding, by tables of cosines and sines.

    Pair (a, b) of a query or key becomes (a cos - b sin, b cos + a sin). The tables rotate twice as
    many elements of each head as they have columns.

    Parameters
    ----------
    cos : ndarray of float32, shape (num_positions, dims / 2)
        Cosines: row p is position p, column i is pair i.
    sin : ndarray of float32, shape (num_positions, dims / 2)
        Sines.
    style : {"half", "interleaved"}
        Which elements are pair i: i and i + dims / 2, or 2 i and 2 i + 1.
    dims : int
        Elements of a head to rotate, if given that of the tables.
    q_positions : array_like of int, shape ([batch,] n_q)
        Rows of the tables for the queries; None counts up from `q_first_positions`.
    k_positions : array_like of int, shape ([batch,] n_kv)
        Rows of the tables for the keys; None counts from each sequence's first key.
    offset : int
        The first element of a head to rotate.

    Examples
    --------
    >>> rope = mha.Rope.tables(8, num_positions=32)
    >>> q = k = v = np.random.rand(5, 2, 8).astype(np.float32)
    >>> mha.attention(q, k, v, is_causal=True, rope=rope).shape
    (5, 2, 8)
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
    @documented(_angles)
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
        """Make the tables: the original ones, or those of a `rope_scaling` of Hugging Face.

        Parameters
        ----------
        dims : int
            Elements of a head to rotate; even.
        num_positions : int
            Rows of the tables.
        style : {"half", "interleaved"}
            Which elements are pair i: i and i + dims / 2, or 2 i and 2 i + 1.
        offset : int
            The first element of a head to rotate.
        first_position : int
            Position of row 0.
        base : float
            The angle of pair i is position * base^(-2 i / dims); 0 is 10000.
        attention_factor : float
            Factor of the tables; 0 is 1, or that of YaRN.
        linear_factor : float
            Divisor of positions; 0 is 1.
        original_positions : int
            Context length in training, for YaRN, llama3 and dynamic NTK.
        yarn_factor : float
            How far YaRN stretches slow pairs; 0 is no YaRN.
        yarn_beta_fast : float
            Turns of pairs that keep their angle; 0 is 32.
        yarn_beta_slow : float
            Turns of pairs that are stretched in full; 0 is 1.
        yarn_unrounded : int
            1 does not round the bounds ("truncate": false, gpt-oss).
        mrope_interleaved : int
            1 interleaves the sections of M-RoPE (Qwen3-VL).
        llama3_factor : float
            How far llama3 stretches slow pairs; 0 is no llama3.
        llama3_low_freq_factor : float
            Turns of slow pairs; 0 is 1.
        llama3_high_freq_factor : float
            Turns of fast pairs; 0 is 4.
        ntk_factor : float
            Factor of dynamic NTK; 0 is none.
        ntk_positions : int
            Current context length, for dynamic NTK.
        pair_factors : array_like of float, shape (dims / 2,)
            Divisors of the angles, of LongRoPE.
        mrope_section : array_like of int, shape (3,)
            Pairs of each section of M-RoPE; the sum is dims / 2.
        mrope_positions : array_like of int, shape (3, num_positions)
            Positions of M-RoPE.

        Returns
        -------
        Rope
            The rotation.

        Examples
        --------
        >>> rope = mha.Rope.tables(8, 16, base=5e5, llama3_factor=8, original_positions=8192)
        >>> rope.cos.shape
        (16, 4)
        """
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

    def _has_positions(self):
        return not (self.q_positions is self.k_positions is None)

    def _set_positions(self, struct, batch, n_q, n_kv):
        for name, rows in ("q_positions", n_q), ("k_positions", n_kv):
            given = _integers(getattr(self, name), name)
            if given is not None:
                is_of_all = given.ndim == 1 and (given.size or not rows)
                shape = (rows,) if is_of_all else (batch, rows)
                given = _integers(getattr(self, name), name, shape)
                setattr(struct, "rope_" + name, _of_rows(given, name, batch, rows))
