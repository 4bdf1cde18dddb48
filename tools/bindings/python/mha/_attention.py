"""The middle stage alone, on the caller's queries, keys and values."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Literal, overload

from ._arrays import (
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
from ._cache import KvCache
from ._calls import (
    Prepared,
    _appended,
    _arrays_of_sequences,
    _check_prepared,
    _in_place,
    _info,
    _memory,
    _point_to,
    _run,
    _set_norm,
    _set_sequences,
    _wanted,
)
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

    from ._callbacks import Scheduler
    from ._options import Norm, Rope, ScoreOptions
    from ._typing import Array, AttentionCall, Info, Integers, Want

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


def attention(
    q,
    k=None,
    v=None,
    *,
    out=None,
    scale=0.0,
    is_causal=False,
    equal_scores=False,
    q_first_positions=None,
    q_lengths=None,
    kv_lengths=None,
    q_first_rows=None,
    kv_first_rows=None,
    cu_seqlens_q=None,
    cu_seqlens_kv=None,
    window_left=None,
    window_right=None,
    padding="right",
    norm=None,
    rope=None,
    score=None,
    cache=None,
    cache_sequences=None,
    cache_read=False,
    scheduler=None,
    instruction_set="auto",
    bf16=False,
    output_type="f32",
    workspace=None,
    kv_first_position=0,
    states=False,
    want=(),
    prepare=False,
):
    """The middle stage alone: softmax(scale * q k^T) v, [batch, n_q, heads, head_dim_v].

    q is [batch, n_q, heads, head_dim]; k and v are [batch, n_kv, kv_heads, width]. PyTorch's order
    is [batch, heads, n, width]: of such arrays, pass views, q.transpose(0, 2, 1, 3). Each may be
    float16, or with bf16=True bfloat16 (bits in uint16). With cache_read=True there are no k and v,
    with a cache of values "in_keys" no v. scale=0 is 1 / sqrt(head_dim). With is_causal, the last
    query sees the last key, unless q_first_positions says otherwise. out may be q, and must not
    overlap k or v. prepare=True computes nothing and returns a Prepared call. All else is as in
    Layer.forward.

    kv_first_position is that of the first key, of k or of the cache, where those before it are
    elsewhere. With states=True the result, and out=, are states, [batch, heads, n_q, head_dim_v +
    2], for states_merge and states_finish.
    """
    stored = _row_types(bf16)
    if not (states is prepare is cache_read is False):
        _is_true(states, "states"), _is_true(prepare, "prepare"), _is_true(cache_read, "cache_read")
    _check(q, "q", stored, _q_shape)
    if cache is not None:
        _must_be(KvCache, cache, "cache")
    batch, n_q, heads, head_dim = q.shape
    if cache_read and cache is not None and k is None and v is None:
        n_kv, kv_heads, head_dim_v = 0, cache.shape["num_kv_heads"], cache.shape["head_dim_v"]
    elif v is None and k is not None and cache is not None and cache.shape["values"]:
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
    is_new, out = (
        out is None,
        _output(
            out,
            (batch, heads, n_q, head_dim_v + 2) if states else (batch, n_q, heads, head_dim_v),
            output_type,
        ),
    )
    args = _AttentionArgs()
    at_q, q_strides = _place(q, "q", True)
    (at_k, k_strides), (at_v, v_strides) = (
        _nowhere if x is None else _place(x, name, True) for x, name in ((k, "k"), (v, "v"))
    )
    at_out, out_strides = _nowhere if states else _place(out, "out", is_written=True)
    number_k, number_v = 0 if k is None else _row_type(k), 0 if v is None else _row_type(v)
    number_out = 0 if states and output_type == "f32" else _row_type(out)
    kernels = (
        0
        if instruction_set == "auto"
        else _named(instruction_set_names, instruction_set, "instruction_set")
    )
    _pack(
        args,
        0,
        _size,
        heads,
        kv_heads,
        head_dim,
        head_dim_v,
        0.0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        kernels,
        0,
        batch or _empty,
        n_q or _empty,
        n_kv or _empty,
        at_q,
        _row_type(q),
        0,
        *q_strides,
        0,
        at_k,
        number_k,
        0,
        *k_strides,
        0,
        at_v,
        number_v,
        0,
        *v_strides,
        0,
        at_out,
        number_out,
        0,
        *out_strides,
    )
    args.scale = scale
    if kv_first_position or type(kv_first_position) is not int:
        args.kv_first_position = kv_first_position
    if states:
        _point_to(args, {"states": _contiguous(out, "out", [out.dtype], out.shape, True)})
    arrays = _arrays_of_sequences(
        cu_seqlens_q,
        cu_seqlens_kv,
        q_lengths,
        kv_lengths,
        q_first_rows,
        kv_first_rows,
        q_first_positions,
        cache_sequences,
    )
    appended_lengths = _appended(n_kv, arrays, False, cache_read)
    _set_sequences(
        args,
        batch,
        arrays,
        window_left,
        window_right,
        padding,
        rope,
        score,
        cache,
        cache_read,
        scheduler,
        is_causal,
        equal_scores,
        n_q,
        n_kv,
        heads,
        kv_heads,
        appended_lengths,
    )
    _set_norm(args, norm, heads, kv_heads, head_dim, head_dim_v)
    wanted = None
    if want:
        wanted = _wanted(
            args,
            want,
            False,
            batch,
            n_q,
            n_kv,
            heads,
            kv_heads,
            head_dim,
            head_dim_v,
            cache,
            arrays,
            appended_lengths,
        )
    if prepare or want or not (is_new and cache is workspace is None):
        given, same = {"q": q, "k": k, "v": v}, _in_place("q", wanted)
        given_out, appended = None if is_new else out, None if cache_read else cache
        memory = _memory(args, given, given_out, workspace, wanted, appended, None, same)
    if prepare:
        _check_prepared(cache, score, want)
        return Prepared(
            "mha_attention",
            None,
            args,
            memory,
            out,
            is_new,
            workspace,
            scheduler,
            wanted,
            "states" if states else "output",
        )
    _run("mha_attention", workspace, args, scheduler)
    return (out, wanted) if want else out


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
    is_causal: bool = False,
    equal_scores: bool = False,
    q_first_positions: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    q_first_rows: Integers | None = None,
    kv_first_rows: Integers | None = None,
    cu_seqlens_q: Integers | None = None,
    cu_seqlens_kv: Integers | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    padding: str = "right",
    norm: Norm | None = None,
    rope: Rope | None = None,
    score: ScoreOptions | None = None,
    cache: KvCache | None = None,
    cache_sequences: Integers | None = None,
    cache_read: bool = False,
    scheduler: Scheduler | None = None,
    instruction_set: str = "auto",
    kv_first_position: int = 0,
    want: Want = (),
) -> Info:
    """How attention would run on this many rows, and what it costs: the fields of mha_call_info by
    name. Values have the type of keys if v_type is None. All else is as in Layer.info."""
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
    arrays = _arrays_of_sequences(
        cu_seqlens_q,
        cu_seqlens_kv,
        q_lengths,
        kv_lengths,
        q_first_rows,
        kv_first_rows,
        q_first_positions,
        cache_sequences,
    )
    appended_lengths = _appended(n_kv, arrays, False, cache_read)
    _set_sequences(
        args,
        batch,
        arrays,
        window_left,
        window_right,
        padding,
        rope,
        score,
        cache,
        cache_read,
        scheduler,
        is_causal,
        equal_scores,
        n_q,
        n_kv,
        num_heads,
        num_kv_heads or num_heads,
        appended_lengths,
    )
    _set_norm(args, norm, num_heads, num_kv_heads or num_heads, head_dim, head_dim_v or head_dim)
    return _info("mha_attention_info", args, want)
