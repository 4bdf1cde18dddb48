"""Attention over keys that lie in several places: what becomes of the states that attention(...,
states=True) returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import _arrays
from ._arrays import _check, _contiguous, _describe, _named, _needed, _output, _output_struct, _some
from ._library import _call
from ._structs import _empty, _new, _StatesArgs, instruction_set_names

if TYPE_CHECKING:
    from ._typing import Array


def states_merge(
    left: Array, right: Array, *, out: Array | None = None, instruction_set: str = "auto"
) -> Array:
    """The states of the keys of both, [..., head_dim_v + 2]; left has the earlier keys. out may be
    left or right (mha_states_merge)."""
    _check(left, "left", [np.float32])
    at_left = _needed(left, "left", [np.float32], left.shape)
    at_right = _needed(right, "right", [np.float32], left.shape)
    if left.ndim == 0 or left.shape[-1] < 3:
        raise ValueError(f"left is {_describe(left)}; rows of states have head_dim_v + 2 numbers")
    out = _output(out, left.shape)
    may_be = [("out", "left"), ("out", "right")]
    _arrays._check_memory({"out": out}, {"left": left, "right": right}, may_be)
    _call(
        "mha_states_merge",
        left.size // left.shape[-1] or _empty,
        left.shape[-1] - 2,
        at_left,
        at_right,
        _contiguous(out, "out", [np.float32], left.shape, True),
        _named(instruction_set_names, instruction_set, "instruction_set"),
    )
    return out


def states_finish(
    states: Array,
    *,
    sinks: Array | None = None,
    head_scales: Array | None = None,
    out: Array | None = None,
    output_type: str = "f32",
    instruction_set: str = "auto",
) -> tuple[Array, Array]:
    """The output [batch, n_q, heads, head_dim_v] and the lse [batch, heads, n_q] of states over all
    keys [batch, heads, n_q, head_dim_v + 2] (mha_states_finish). sinks and head_scales are as in
    ScoreOptions."""
    _check(states, "states", [np.float32], (None, _some, None, None))
    batch, heads, n_q, width = states.shape
    if width < 3:
        raise ValueError(
            f"states is {_describe(states)}; rows of states have head_dim_v + 2 numbers"
        )
    out, lse = (
        _output(out, (batch, n_q, heads, width - 2), output_type),
        np.empty((batch, heads, n_q), np.float32),
    )
    args = _new(
        _StatesArgs,
        batch=batch or _empty,
        num_heads=heads,
        n_q=n_q or _empty,
        head_dim_v=width - 2,
        states=_contiguous(states, "states", [np.float32], states.shape),
        sinks=_contiguous(sinks, "sinks", [np.float32], (heads,)),
        head_scales=_contiguous(head_scales, "head_scales", [np.float32], (heads,)),
        output=_output_struct(out),
        lse=lse,
        instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"),
    )
    _arrays._check_memory({"out": out}, _arrays._read_by(args))
    _call("mha_states_finish", args)
    return out, lse
