"""Attention with a recurrent state, and the short convolution before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import _calls
from ._arrays import (
    _batched,
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
from ._docs import documented
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


@documented()
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
    """Attention with a recurrent state: linear attention and its gated and delta rules.

    Each value head has a state S, a matrix [head_dim, head_dim_v]. Row t of a sequence, in order,
    does ``S = exp(decay) * S``, then without `beta` ``S += outer(k, v)`` or with it the delta rule
    ``S += outer(k, beta * (v - k @ S))``, and outputs ``scale * q @ S``. All arrays of rows and
    states may leave out the batch.

    Parameters
    ----------
    q : ndarray of float32 or float16, shape ([batch,] n, num_q_heads, head_dim)
        Queries; num_q_heads divides num_v_heads, or is a multiple of it.
    k : ndarray of float32 or float16, shape ([batch,] n, num_k_heads, head_dim)
        Keys; num_k_heads divides num_v_heads.
    v : ndarray of float32 or float16, shape ([batch,] n, num_v_heads, head_dim_v)
        Values.
    decay : ndarray of float32 or float16, shape ([batch,] n, num_v_heads[, head_dim])
        Logarithm of the factor of the state, for each head or each of its rows; None is 0.
    beta : ndarray of float32 or float16, shape ([batch,] n, num_v_heads or 1)
        Strength of the delta rule; with a last extent of 1 for all heads. None is no delta rule.
    state : ndarray of float32, shape ([sequences,] num_v_heads, head_dim, head_dim_v)
        States before the first row; None is 0. Packed sequences have one each.
    state_out : ndarray of float32, shape of `state`
        Receives the states after the last row; it may be `state`.
    snapshots : ndarray of float32, shape ([sequences,] 1 .. 16, num_v_heads, head_dim, head_dim_v)
        Receives the states before the last row, before the last two, and so on, to drop rejected
        tokens.
    scale : float
        Factor of the output; 0 is 1 / sqrt(head_dim).
    norm_epsilon : float
        If > 0, q and k are x / sqrt(sum of x^2 + norm_epsilon).
    a_log : ndarray of float32, shape (num_v_heads,)
        If given, the decay is -exp(a_log) * softplus(decay + dt_bias).
    dt_bias : ndarray of float32, shape (num_v_heads,) or (num_v_heads, head_dim)
        Added to the decay, with `a_log`; None is 0.
    beta_function : {"none", "sigmoid"}
        "sigmoid" takes `beta` as it is projected.
    out : ndarray, shape of the output
        Receives the output.

    Returns
    -------
    y : ndarray of `output_type`, shape ([batch,] n, max(num_q_heads, num_v_heads), head_dim_v)
        The output.
    state : ndarray of float32, shape ([sequences,] num_v_heads, head_dim, head_dim_v)
        The states after the last row: a new array, or `state_out`.

    Examples
    --------
    >>> q = k = v = np.random.rand(6, 2, 8).astype(np.float32)
    >>> decay = np.full((6, 2), -0.1, np.float32)
    >>> y, state = mha.recurrent_attention(q, k, v, decay)
    >>> y, state = mha.recurrent_attention(q[:1], k[:1], v[:1], decay[:1], state=state)  # a token
    >>> y.shape, state.shape
    ((1, 2, 8), (2, 8, 8))
    """
    written = {"out": out, "state_out": state_out, "snapshots": snapshots, "workspace": workspace}
    args, out, state_out = _recurrent_args(locals())
    _run_on("mha_recurrent_attention", args, scheduler, **written)
    return out, state_out


@documented()
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
    """How a call of `recurrent_attention` would run, and what it would cost.

    Parameters
    ----------
    q : ndarray of float32 or float16, shape ([batch,] n, num_q_heads, head_dim)
        Queries. Of all arrays of rows, only types and shapes count.
    k : ndarray of float32 or float16, shape ([batch,] n, num_k_heads, head_dim)
        Keys.
    v : ndarray of float32 or float16, shape ([batch,] n, num_v_heads, head_dim_v)
        Values.
    decay : ndarray of float32 or float16, shape ([batch,] n, num_v_heads[, head_dim])
        Logarithm of the factor of the state.
    beta : ndarray of float32 or float16, shape ([batch,] n, num_v_heads or 1)
        Strength of the delta rule; None is no delta rule.
    scale : float
        Factor of the output; 0 is 1 / sqrt(head_dim).
    norm_epsilon : float
        If > 0, q and k are normalised.
    a_log : ndarray of float32, shape (num_v_heads,)
        If given, the decay is -exp(a_log) * softplus(decay + dt_bias).
    dt_bias : ndarray of float32, shape (num_v_heads,) or (num_v_heads, head_dim)
        Added to the decay, with `a_log`.
    beta_function : {"none", "sigmoid"}
        "sigmoid" takes `beta` as it is projected.

    Returns
    -------
    dict from str to int
        The same names as of `attention_info`.

    Examples
    --------
    >>> q = k = v = np.zeros((6, 2, 8), np.float32)
    >>> mha.recurrent_attention_info(q, k, v)["num_threads"]
    1
    """
    args, _, _ = _recurrent_args(locals())
    return _info("mha_recurrent_attention_info", args, ())


@documented()
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
    """Depthwise causal convolution: the short convolution before recurrent attention.

    Channel c of row t is the activation of ``bias[c]`` plus the sum over j of ``weights[c, j] *
    x[t - (kernel_size - 1) + j, c]``. All arrays of rows and states may leave out the batch.

    Parameters
    ----------
    x : ndarray of float32 or float16, shape ([batch,] n, channels)
        Input rows.
    weights : ndarray of float32, shape (channels, kernel_size)
        The kernel of each channel; kernel_size is 2 .. 8.
    bias : ndarray of float32, shape (channels,)
        Added to each row; None is 0.
    activation : {"none", "silu"}
        Function of the sum; "silu" is y * sigmoid(y).
    state : ndarray of float32, shape ([sequences,] kernel_size - 1, channels)
        The rows before the first one; None is 0. Packed sequences have one each.
    state_out : ndarray of float32, shape of `state`
        Receives the last rows; it may be `state`.
    out : ndarray, shape of `x`
        Receives the output.

    Returns
    -------
    y : ndarray of `output_type`, shape of `x`
        The output.
    state : ndarray of float32, shape ([sequences,] kernel_size - 1, channels)
        The `state` for the rows that follow: a new array, or `state_out`.

    Examples
    --------
    >>> y, state = mha.causal_conv(np.ones((5, 3), np.float32), np.ones((3, 2), np.float32))
    >>> y[:, 0].tolist(), state.shape
    ([1.0, 2.0, 2.0, 2.0, 2.0], (1, 3))
    """
    written = {"out": out, "state_out": state_out, "workspace": workspace}
    call, is_single, are_single = _rows_of(2, locals(), "x")
    x = call["x"]
    _check(x, "x", _row_types(bf16), (None, None, _some))
    batch, rows, channels = x.shape
    weights = _contiguous(weights, "weights", _f32, (channels, _some))
    if weights is None:
        raise TypeError("weights is None; it must be a NumPy array")
    out = _output(call["out"], x.shape, output_type)
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
    count = _set_rows(args, batch, rows, call)
    state_out = _set_state(args, call, (count, weights.shape[1] - 1, channels))
    _run_on("mha_causal_conv", args, scheduler, **written)
    return out[0] if is_single else out, state_out[0] if are_single else state_out


def _recurrent_args(call):
    """The struct for these arguments by name, the output and the state after it."""
    call, is_single, are_single = _rows_of(3, call, "q", "k", "v", "decay", "beta")
    q, k, v, decay, beta = (call[name] for name in ("q", "k", "v", "decay", "beta"))
    a_log, dt_bias, snapshots = call["a_log"], call["dt_bias"], call["snapshots"]
    stored = _row_types(call["bf16"])
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
    shape = batch, rows, max(q_heads, heads), head_dim_v
    out = _output(call["out"], shape, call["output_type"])
    args = _new(
        _RecurrentArgs,
        num_q_heads=q_heads,
        num_k_heads=k.shape[2],
        num_v_heads=heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        decay_dim=decay_dim,
        scale=call["scale"],
        norm_epsilon=call["norm_epsilon"],
        a_log=_contiguous(a_log, "a_log", _f32, (heads,)),
        dt_bias=dt_bias,
        beta_function=_named(_beta_functions, call["beta_function"], "beta_function"),
        q=_input(q, "q"),
        k=_input(k, "k"),
        v=_input(v, "v"),
        decay=_input(decay, "decay"),
        beta=_input(beta, "beta"),
        output=_output_struct(out),
    )
    count = _set_rows(args, batch, rows, call)
    shape = heads, head_dim, head_dim_v
    state_out = _set_state(args, call, (count, *shape))
    if snapshots is not None:
        _check(snapshots, "snapshots", _f32, (count, _some, *shape))
        args.snapshots = _contiguous(
            _writeable(snapshots, "snapshots"), "snapshots", _f32, snapshots.shape, True
        )
        args.num_snapshots = snapshots.shape[1]
    return args, out[0] if is_single else out, state_out[0] if are_single else state_out


def _rows_of(dimensions, call, first, *names):
    """The arguments with a batch of 1 if the first array has none. Whether it has none; and whether
    states have none, which packed sequences have one each of."""
    call = {"out": None, "state": None, "state_out": None, "snapshots": None, **call}
    is_single = getattr(call[first], "ndim", 0) == dimensions
    are_single = is_single and call["cu_seqlens_q"] is None
    if is_single:
        names = first, *names, "out", *(("state", "state_out", "snapshots") if are_single else ())
        given = {name: call[name] for name in names}
        call.update(zip(names, _batched(dimensions, **given)))
    return call, is_single, are_single


def _set_rows(args, batch, rows, call):
    """Sets the fields about rows and threads, and returns how many sequences there are."""
    args.batch, args.rows, count = batch or _empty, rows or _empty, batch
    args.instruction_set = _named(instruction_set_names, call["instruction_set"], "instruction_set")
    arrays, scheduler = _arrays_of_sequences(call), call["scheduler"]
    is_left = _named(_paddings, call["padding"], "padding")
    if arrays is not _no_arrays:
        arrays = {**arrays, **_left(arrays, batch, rows, 0)} if is_left else arrays
        args.sequences = struct = _new(_Sequences)
        if arrays["cu_seqlens_q"] is not None:
            count = _set_packed(args, struct, batch, rows, arrays)
        for name in "q_lengths", "q_first_rows":
            setattr(struct, name, _integers(arrays[name], name, (count,)))
    if scheduler is not None:
        _must_be(Scheduler, scheduler, "scheduler")
        args.scheduler = scheduler._struct
    return count


def _set_state(args, call, shape):
    """Sets the states before and after, and returns the second one."""
    args.state, state_out = _contiguous(call["state"], "state", _f32, shape), call["state_out"]
    state_out = (
        np.empty(shape, np.float32) if state_out is None else _writeable(state_out, "state_out")
    )
    args.state_out = _contiguous(state_out, "state_out", _f32, shape, True)
    return state_out


def _run_on(name, args, scheduler, workspace, **written):
    if workspace is not None or any(array is not None for array in written.values()):
        _calls._memory(args, {}, workspace=workspace, same=[("state_out", "state")], **written)
    _run(name, workspace, args, scheduler)
