"""Attention with a recurrent state, and the short convolution before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import _calls
from ._arrays import (
    _check,
    _contiguous,
    _input,
    _integers,
    _must_be,
    _named,
    _output,
    _output_struct,
    _row_types,
    _some,
)
from ._callbacks import Scheduler
from ._calls import _arrays_of_sequences, _info, _left, _no_arrays, _paddings, _run, _set_packed
from ._structs import (
    _CausalConvArgs,
    _empty,
    _new,
    _RecurrentArgs,
    _Sequences,
    _writeable,
    activations,
    instruction_set_names,
)

if TYPE_CHECKING:
    from ._typing import Array, Info, Integers

_f32 = [np.dtype(np.float32)]
_beta_functions = {"none": 0, "sigmoid": 1}


def recurrent_attention(
    q: Array,
    k: Array,
    v: Array,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    state: Array | None = None,
    state_out: Array | None = None,
    snapshots: Array | None = None,
    scale: float = 0.0,
    norm_epsilon: float = 0.0,
    a_log: Array | None = None,
    dt_bias: Array | None = None,
    beta_function: str = "none",
    q_lengths: Integers | None = None,
    q_first_rows: Integers | None = None,
    cu_seqlens_q: Integers | None = None,
    padding: str = "right",
    out: Array | None = None,
    scheduler: Scheduler | None = None,
    instruction_set: str = "auto",
    bf16: bool = False,
    output_type: str = "f32",
    workspace: Array | None = None,
) -> tuple[Array, Array]:
    """(output, state): the rule of the arrays that are given: linear attention, with decay gated,
    with beta the delta rule, with both the gated one.

    q, k and v are [batch, rows, heads, width], each with its own number of heads; the output
    [batch, rows, max(q's, v's heads), v's width]. decay is [batch, rows, v's heads], or that and
    [..., q's width]; beta [batch, rows, v's heads], or [batch, rows, 1] for all heads. The state
    [sequences, v's heads, q's width, v's width], float32, is that before the first row, or zeros;
    the one after the last row is a new array, or state_out, which may be state. snapshots, float32
    [sequences, 1 to 16, ...], is filled with the states before the last row, before the last two,
    and so on. beta_function="sigmoid" takes beta as projected; with a_log, decay is -exp(a_log) *
    softplus(decay + dt_bias). All else is as in attention and in mha_recurrent_args.
    """
    written = {"out": out, "state_out": state_out, "snapshots": snapshots, "workspace": workspace}
    args, out, state_out = _recurrent_args(
        q,
        k,
        v,
        decay,
        beta,
        state,
        state_out,
        snapshots,
        scale,
        norm_epsilon,
        a_log,
        dt_bias,
        beta_function,
        q_lengths,
        q_first_rows,
        cu_seqlens_q,
        padding,
        out,
        scheduler,
        instruction_set,
        bf16,
        output_type,
    )
    _run_on("mha_recurrent_attention", args, scheduler, **written)
    return out, state_out


def recurrent_attention_info(
    q: Array,
    k: Array,
    v: Array,
    decay: Array | None = None,
    beta: Array | None = None,
    *,
    scale: float = 0.0,
    norm_epsilon: float = 0.0,
    a_log: Array | None = None,
    dt_bias: Array | None = None,
    beta_function: str = "none",
    q_lengths: Integers | None = None,
    q_first_rows: Integers | None = None,
    cu_seqlens_q: Integers | None = None,
    padding: str = "right",
    scheduler: Scheduler | None = None,
    instruction_set: str = "auto",
    bf16: bool = False,
    output_type: str = "f32",
) -> Info:
    """How recurrent_attention would run on these arrays, whose numbers are not read, and what it
    costs: the fields of mha_call_info by name."""
    args, _, _ = _recurrent_args(
        q,
        k,
        v,
        decay,
        beta,
        None,
        None,
        None,
        scale,
        norm_epsilon,
        a_log,
        dt_bias,
        beta_function,
        q_lengths,
        q_first_rows,
        cu_seqlens_q,
        padding,
        None,
        scheduler,
        instruction_set,
        bf16,
        output_type,
    )
    return _info("mha_recurrent_attention_info", args, ())


def causal_conv(
    x: Array,
    weights: Array,
    *,
    bias: Array | None = None,
    activation: str = "none",
    state: Array | None = None,
    state_out: Array | None = None,
    q_lengths: Integers | None = None,
    q_first_rows: Integers | None = None,
    cu_seqlens_q: Integers | None = None,
    padding: str = "right",
    out: Array | None = None,
    scheduler: Scheduler | None = None,
    instruction_set: str = "auto",
    bf16: bool = False,
    output_type: str = "f32",
    workspace: Array | None = None,
) -> tuple[Array, Array]:
    """(output, state): the depthwise causal convolution of x [batch, rows, channels] with weights
    [channels, kernel_size] and bias [channels].

    activation is "none" or "silu". The state [sequences, kernel_size - 1, channels], float32, has
    the rows before the first; the one after the last row is a new array, or state_out, which may be
    state. All else is as in recurrent_attention.
    """
    _check(x, "x", _row_types(bf16), (None, None, _some))
    batch, rows, channels = x.shape
    weights = _contiguous(weights, "weights", _f32, (channels, _some))
    if weights is None:
        raise TypeError("weights is None; it must be a NumPy array")
    written = {"out": out, "state_out": state_out, "workspace": workspace}
    out = _output(out, x.shape, output_type)
    args = _new(
        _CausalConvArgs,
        channels=channels,
        kernel_size=weights.shape[1],
        weights=weights,
        bias=_contiguous(bias, "bias", _f32, (channels,)),
        activation=_named(activations, activation, "activation"),
        x=_input(x, "x"),
        output=_output_struct(out),
    )
    count = _set_rows(
        args,
        batch,
        rows,
        q_lengths,
        q_first_rows,
        cu_seqlens_q,
        padding,
        scheduler,
        instruction_set,
    )
    state_out = _set_state(args, state, state_out, (count, weights.shape[1] - 1, channels))
    _run_on("mha_causal_conv", args, scheduler, **written)
    return out, state_out


def _recurrent_args(
    q,
    k,
    v,
    decay,
    beta,
    state,
    state_out,
    snapshots,
    scale,
    norm_epsilon,
    a_log,
    dt_bias,
    beta_function,
    q_lengths,
    q_first_rows,
    cu_seqlens_q,
    padding,
    out,
    scheduler,
    instruction_set,
    bf16,
    output_type,
):
    """The struct, and the arrays that it writes to."""
    stored = _row_types(bf16)
    _check(q, "q", stored, (None, None, _some, _some))
    batch, rows, q_heads, head_dim = q.shape
    _check(k, "k", stored, (batch, rows, _some, head_dim))
    _check(v, "v", stored, (batch, rows, _some, _some))
    heads, head_dim_v = v.shape[2:]
    decay_dim = 1
    if decay is not None:
        is_wide = getattr(decay, "ndim", 0) == 4
        shape = (batch, rows, heads, _some) if is_wide else (batch, rows, heads)
        _check(decay, "decay", stored, shape)
        decay = decay[..., None] if decay.ndim == 3 else decay
        decay_dim = decay.shape[3]
    if beta is not None:
        is_shared = getattr(beta, "shape", ())[2:] == (1,)
        _check(beta, "beta", stored, (batch, rows, 1 if is_shared else heads))
        beta = (
            np.broadcast_to(beta[..., None], (batch, rows, heads, 1))
            if beta.shape[2] != heads
            else beta[..., None]
        )
    if dt_bias is not None:
        is_flat = decay_dim == 1 and getattr(dt_bias, "ndim", 0) == 1
        shape = (heads,) if is_flat else (heads, decay_dim)
        dt_bias = _contiguous(dt_bias, "dt_bias", _f32, shape)
    out = _output(out, (batch, rows, max(q_heads, heads), head_dim_v), output_type)
    args = _new(
        _RecurrentArgs,
        num_q_heads=q_heads,
        num_k_heads=k.shape[2],
        num_v_heads=heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        decay_dim=decay_dim,
        scale=scale,
        norm_epsilon=norm_epsilon,
        a_log=_contiguous(a_log, "a_log", _f32, (heads,)),
        dt_bias=dt_bias,
        beta_function=_named(_beta_functions, beta_function, "beta_function"),
        q=_input(q, "q"),
        k=_input(k, "k"),
        v=_input(v, "v"),
        decay=_input(decay, "decay"),
        beta=_input(beta, "beta"),
        output=_output_struct(out),
    )
    count = _set_rows(
        args,
        batch,
        rows,
        q_lengths,
        q_first_rows,
        cu_seqlens_q,
        padding,
        scheduler,
        instruction_set,
    )
    shape = heads, head_dim, head_dim_v
    state_out = _set_state(args, state, state_out, (count, *shape))
    if snapshots is not None:
        _check(snapshots, "snapshots", _f32, (count, _some, *shape))
        args.snapshots = _contiguous(
            _writeable(snapshots, "snapshots"), "snapshots", _f32, snapshots.shape, True
        )
        args.num_snapshots = snapshots.shape[1]
    return args, out, state_out


def _set_rows(
    args, batch, rows, q_lengths, q_first_rows, cu_seqlens_q, padding, scheduler, instruction_set
):
    """Sets the fields about rows and threads, and returns how many sequences there are."""
    args.batch, args.rows, count = batch or _empty, rows or _empty, batch
    args.instruction_set = _named(instruction_set_names, instruction_set, "instruction_set")
    arrays = _arrays_of_sequences(
        cu_seqlens_q, None, q_lengths, None, q_first_rows, None, None, None
    )
    is_left = _named(_paddings, padding, "padding")
    if arrays is not _no_arrays:
        arrays = {**arrays, **_left(arrays, batch, rows, 0)} if is_left else arrays
        args.sequences = struct = _new(_Sequences)
        if cu_seqlens_q is not None:
            count = _set_packed(args, struct, batch, rows, arrays)
        for name in "q_lengths", "q_first_rows":
            setattr(struct, name, _integers(arrays[name], name, (count,)))
    if scheduler is not None:
        _must_be(Scheduler, scheduler, "scheduler")
        args.scheduler = scheduler._struct
    return count


def _set_state(args, state, state_out, shape):
    """Sets the states before and after, and returns the second one."""
    args.state = _contiguous(state, "state", _f32, shape)
    state_out = (
        np.empty(shape, np.float32) if state_out is None else _writeable(state_out, "state_out")
    )
    args.state_out = _contiguous(state_out, "state_out", _f32, shape, True)
    return state_out


def _run_on(name, args, scheduler, workspace, **written):
    if workspace is not None or any(array is not None for array in written.values()):
        _calls._memory(args, {}, workspace=workspace, same=[("state_out", "state")], **written)
    _run(name, workspace, args, scheduler)
