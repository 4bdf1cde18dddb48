"""Attention without projections."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Literal, overload

from ._arrays import (
    _batched,
    _check,
    _contiguous,
    _must_be,
    _named,
    _output,
    _place,
    _row_names,
    _row_type,
    _row_types,
    _some,
)
from ._cache import _caches
from ._calls import (
    Prepared,
    _check_prepared,
    _complete,
    _in_place,
    _info,
    _keywords,
    _memory,
    _no_options,
    _no_pointers,
    _point_to,
    _run,
    _set_call,
    _wanted,
)
from ._docs import documented
from ._structs import (
    _AttentionArgs,
    _empty,
    _Input,
    _is_true,
    _new,
    _number,
    _packer,
    instruction_set_names,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Array, AttentionCall, Info, Structure, Want

_pack, _size = _packer(_AttentionArgs, "output"), ctypes.sizeof(_AttentionArgs)
_nowhere = 0, (0, 0, 0)  # address and strides of no array
_q_shape = None, None, _some, _some


@overload
def attention(  # type: ignore[overload-overlap]
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    want: tuple[()] = (),
    prepare: Literal[False] = False,
    **options: Unpack[AttentionCall],
) -> Array: ...


@overload
def attention(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    want: Want,
    prepare: Literal[False] = False,
    **options: Unpack[AttentionCall],
) -> tuple[Array, dict[str, Array]]: ...


@overload
def attention(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    prepare: Literal[True],
    want: Want = (),
    **options: Unpack[AttentionCall],
) -> Prepared: ...


@documented(_keywords)
def attention(
    q,
    k=None,
    v=None,
    *,
    out=None,
    scale=0.0,
    instruction_set="auto",
    bf16=False,
    output_type="f32",
    workspace=None,
    kv_first_position=0,
    partials=False,
    want=(),
    prepare=False,
    **call,
):
    """Attention without projections: softmax(scale * q k^T) v of each head.

    Arrays are read and written where they lie, by their strides; the elements of a row of one head
    are neighbours. All may leave out the batch. Views serve PyTorch's order [batch, heads, n,
    width]: ``q.transpose(0, 2, 1, 3)``.

    Parameters
    ----------
    q : ndarray of float32 or float16, shape ([batch,] n_q, num_heads, head_dim)
        Queries.
    k : ndarray of float32 or float16, shape ([batch,] n_kv, num_kv_heads, head_dim)
        Keys; num_kv_heads divides num_heads. None with ``cache_read=True``.
    v : ndarray of float32 or float16, shape ([batch,] n_kv, num_kv_heads, head_dim_v)
        Values. None with ``cache_read=True``, or with a cache whose values are in its keys.
    out : ndarray, shape of the result
        Receives the result. It may be `q`, unless `want` has numbers of pairs, and must not overlap
        `k` or `v`.
    partials : bool
        Whether the result is the partials of the keys, for `partials_merge` and `partials_finish`.

    Returns
    -------
    y : ndarray of `output_type`, shape ([batch,] n_q, num_heads, head_dim_v)
        The context: a new array, or `out`. With `partials`, float32 of the shape ([batch,]
        num_heads, n_q, head_dim_v + 2).
    outputs : dict from str to ndarray
        Only with `want`: the optional outputs by name.
    call : Prepared
        Only with `prepare`, in place of the others.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type, shape or layout, or if arrays overlap that must not.
    Error
        If the library refuses the arguments. Nothing has been written then.

    Examples
    --------
    >>> q = k = v = np.random.rand(10, 4, 64).astype(np.float32)  # or with a batch, [2, 10, 4, 64]
    >>> mha.attention(q, k, v, is_causal=True).shape
    (10, 4, 64)
    >>> y, outputs = mha.attention(q, k, v, want=["lse"])
    >>> outputs["lse"].shape
    (4, 10)
    """
    call, rows = _complete(call), (q, k, v, out)
    cache, cache_read = call["cache"], call["cache_read"]
    is_single = getattr(q, "ndim", 0) == 3
    if is_single:
        q, k, v, out = _batched(3, q=q, k=k, v=v, out=out)
    stored = _row_types(bf16)
    if not (partials is prepare is cache_read is False):
        (
            _is_true(partials, "partials"),
            _is_true(prepare, "prepare"),
            _is_true(cache_read, "cache_read"),
        )
    _check(q, "q", stored, _q_shape)
    if cache is not None:
        _must_be(_caches, cache, "cache")
    batch, n_q, heads, head_dim = q.shape
    if cache_read and cache is not None and k is None and v is None:
        n_kv, kv_heads, head_dim_v = 0, cache.shape["num_kv_heads"], cache.shape["head_dim_v"]
    elif (
        v is None
        and k is not None
        and cache is not None
        and cache.shape["value_place"] == "in_keys"
    ):
        _check(k, "k", stored, (batch, None, _some, head_dim))
        _, n_kv, kv_heads, _ = k.shape
        head_dim_v = cache.shape["head_dim_v"]
    else:
        if v is not k or k is not q:
            for name, array in ("k", k), ("v", v):
                if array is None:
                    raise TypeError(
                        f"{name} is None; give k and v, or a cache with cache_read=True"
                    )
            _check(k, "k", stored, (batch, None, _some, head_dim))
            _check(v, "v", stored, (*k.shape[:3], _some))
        _, n_kv, kv_heads, head_dim_v = v.shape
    extents = batch, n_q, n_kv, heads, kv_heads, head_dim, head_dim_v
    shape = (batch, heads, n_q, head_dim_v + 2) if partials else (batch, n_q, heads, head_dim_v)
    is_new, out = out is None, _output(out, shape, output_type)
    args = _AttentionArgs()
    at_q, q_strides = _place(q, "q", True)
    (at_k, k_strides), (at_v, v_strides) = (
        _nowhere if x is None else _place(x, name, True) for x, name in ((k, "k"), (v, "v"))
    )
    at_out, out_strides = _nowhere if partials else _place(out, "out", is_written=True)
    number_k, number_v = 0 if k is None else _row_type(k), 0 if v is None else _row_type(v)
    number_out = 0 if partials and output_type == "f32" else _row_type(out)
    kernels = (
        0
        if instruction_set == "auto"
        else _named(instruction_set_names, instruction_set, "instruction_set")
    )
    widths = heads, kv_heads, head_dim, head_dim_v, 0.0, kernels
    of_q, of_k = (at_q, _row_type(q), 0, *q_strides, 0), (at_k, number_k, 0, *k_strides, 0)
    of_v, to = (at_v, number_v, 0, *v_strides, 0), (at_out, number_out, 0, *out_strides)
    counts, inputs = [n or _empty for n in extents[:3]], (*of_q, *of_k, *of_v)
    _pack(args, 0, _size, *_no_options, *counts, *_no_pointers, *widths, *inputs, *to)
    args.scale = scale
    if kv_first_position or type(kv_first_position) is not int:
        args.kv_first_position = kv_first_position
    if partials:
        _point_to(args, {"partials": _contiguous(out, "out", [out.dtype], out.shape, True)})
    sequences = _set_call(args, call, extents)
    wanted = _wanted(args, want, is_single, extents, cache, *sequences) if want else None
    result = out[0] if is_single else out
    if prepare or want or not (is_new and cache is workspace is None):
        same, appended = _in_place("q", wanted), None if cache_read else cache
        given = dict(zip("qkv", rows))
        memory = _memory(args, given, rows[3], workspace, wanted, appended, None, same)
    if prepare:
        _check_prepared(cache, call["score"], want)
        return Prepared(
            "mha_attention",
            None,
            args,
            memory,
            result,
            is_new,
            workspace,
            call["scheduler"],
            wanted,
            "partials" if partials else "output",
        )
    _run("mha_attention", workspace, args, call["scheduler"])
    return (result, wanted) if want else result


@documented(_keywords)
def attention_info(
    n_q: int,
    n_kv: int,
    num_heads: int,
    head_dim: int,
    *,
    batch: int = 1,
    num_kv_heads: int = 0,
    head_dim_v: int = 0,
    k_type: str = "f32",
    v_type: str | None = None,
    instruction_set: str = "auto",
    kv_first_position: int = 0,
    want: Want = (),
    **call: Unpack[Structure],
) -> Info:
    """How a call of `attention` would run, and what it would cost.

    Parameters
    ----------
    n_q : int
        Rows of queries of each sequence.
    n_kv : int
        Rows of keys and values of each sequence that come with the call.
    head_dim : int
        Width of a query or key of one head.
    k_type : {"f32", "f16", "bf16"}
        Type of the keys.
    v_type : {"f32", "f16", "bf16"}
        Type of the values; None is `k_type`.
    want : iterable of str
        Names of the optional outputs that the call would return.

    Returns
    -------
    dict from str to int
        "instruction_set" (its number), "back_end" (0, the library's kernels), "contract",
        "num_threads", "workspace_bytes", "packed_bytes" (0), "operations" and "bytes": the
        multiplications and additions, and the bytes read and written.

    Examples
    --------
    >>> mha.attention_info(1, 1000, 8, 64)["operations"] >= 2 * 8 * 64 * 1000
    True
    """
    args = _new(
        _AttentionArgs,
        batch=_number(batch, "batch") or _empty,
        n_q=_number(n_q, "n_q") or _empty,
        n_kv=_number(n_kv, "n_kv") or _empty,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        k=_Input(type=_named(_row_names, k_type, "k_type")),
        v=_Input(type=0 if v_type is None else _named(_row_names, v_type, "v_type")),
        instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"),
        kv_first_position=kv_first_position,
    )
    kv_heads = num_kv_heads or num_heads
    extents = batch, n_q, n_kv, num_heads, kv_heads, head_dim, head_dim_v or head_dim
    _set_call(args, _complete(call), extents)
    return _info("mha_attention_info", args, want)
