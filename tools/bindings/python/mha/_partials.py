"""Attention over keys that lie in several places: what becomes of partials."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import _arrays
from ._arrays import (
    _batched,
    _check,
    _contiguous,
    _describe,
    _named,
    _needed,
    _output,
    _output_struct,
    _some,
)
from ._docs import documented
from ._library import _call
from ._structs import _empty, _new, _PartialsArgs, instruction_set_names

if TYPE_CHECKING:
    from ._typing import Array


@documented()
def partials_merge(
    left: Array, right: Array, *, out: Array | None = None, instruction_set: str = "auto"
) -> Array:
    """Merge the partials of two neighbouring parts of the keys.

    Parameters
    ----------
    left : ndarray of float32, shape (..., head_dim_v + 2)
        Partials of the earlier keys, from ``attention(..., partials=True)`` or `partials_merge`.
    right : ndarray of float32, shape of `left`
        Partials of the later keys.
    out : ndarray of float32, shape of `left`
        Receives the result; it may be `left` or `right`.

    Returns
    -------
    ndarray of float32, shape of `left`
        Partials of the keys of both.

    Examples
    --------
    >>> q = k = v = np.random.rand(6, 2, 8).astype(np.float32)
    >>> first = mha.attention(q, k[:4], v[:4], partials=True)
    >>> last = mha.attention(q, k[4:], v[4:], kv_first_position=4, partials=True)
    >>> y, lse = mha.partials_finish(mha.partials_merge(first, last))
    >>> np.allclose(y, mha.attention(q, k, v))
    True
    """
    _check(left, "left", [np.float32])
    at_left = _needed(left, "left", [np.float32], left.shape)
    at_right = _needed(right, "right", [np.float32], left.shape)
    if left.ndim == 0 or left.shape[-1] < 3:
        raise ValueError(f"left is {_describe(left)}; rows of partials have head_dim_v + 2 numbers")
    out = _output(out, left.shape)
    may_be = [("out", "left"), ("out", "right")]
    _arrays._check_memory({"out": out}, {"left": left, "right": right}, may_be)
    _call(
        "mha_partials_merge",
        left.size // left.shape[-1] or _empty,
        left.shape[-1] - 2,
        at_left,
        at_right,
        _contiguous(out, "out", [np.float32], left.shape, True),
        _named(instruction_set_names, instruction_set, "instruction_set"),
    )
    return out


@documented()
def partials_finish(
    partials: Array,
    *,
    sinks: Array | None = None,
    head_scales: Array | None = None,
    out: Array | None = None,
    output_type: str = "f32",
    instruction_set: str = "auto",
) -> tuple[Array, Array]:
    """Compute the output of attention from the partials over all keys.

    Parameters
    ----------
    partials : ndarray of float32, shape ([batch,] num_heads, n_q, head_dim_v + 2)
        Partials over all keys. `partials_merge` has an example.
    sinks : ndarray of float32, shape (num_heads,)
        Logits that take part in the softmax and have no value, as in `ScoreOptions`.
    head_scales : ndarray of float32, shape (num_heads,)
        Factors of the heads' contexts, as in `ScoreOptions`; None is 1.
    out : ndarray, shape ([batch,] n_q, num_heads, head_dim_v)
        Receives the output.

    Returns
    -------
    y : ndarray of `output_type`, shape ([batch,] n_q, num_heads, head_dim_v)
        The context.
    lse : ndarray of float32, shape ([batch,] num_heads, n_q)
        The logarithm of the sum of exp(score) over all keys, sinks included.
    """
    is_single = getattr(partials, "ndim", 0) == 3
    if is_single:
        partials, out = _batched(3, partials=partials, out=out)
    _check(partials, "partials", [np.float32], (None, _some, None, None))
    batch, heads, n_q, width = partials.shape
    if width < 3:
        raise ValueError(
            f"partials is {_describe(partials)}; rows of partials have head_dim_v + 2 numbers"
        )
    out, lse = (
        _output(out, (batch, n_q, heads, width - 2), output_type),
        np.empty((batch, heads, n_q), np.float32),
    )
    args = _new(
        _PartialsArgs,
        batch=batch or _empty,
        num_heads=heads,
        n_q=n_q or _empty,
        head_dim_v=width - 2,
        partials=_contiguous(partials, "partials", [np.float32], partials.shape),
        sinks=_contiguous(sinks, "sinks", [np.float32], (heads,)),
        head_scales=_contiguous(head_scales, "head_scales", [np.float32], (heads,)),
        output=_output_struct(out),
        lse=lse,
        instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"),
    )
    _arrays._check_memory({"out": out}, _arrays._read_by(args))
    _call("mha_partials_finish", args)
    return (out[0], lse[0]) if is_single else (out, lse)
