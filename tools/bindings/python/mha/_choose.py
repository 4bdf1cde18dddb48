"""The keys with the greatest index scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import _calls
from ._arrays import _check, _contiguous, _input, _named, _row_types, _some, _writeable
from ._calls import _appended, _arrays_of_sequences, _longest, _run, _set_norm, _set_sequences
from ._structs import _AttentionArgs, _ChooseKeysArgs, _empty, _new, instruction_set_names

if TYPE_CHECKING:
    from ._cache import KvCache
    from ._callbacks import Scheduler
    from ._options import Norm, Rope
    from ._typing import Array, Integers


def choose_keys(
    q: Array,
    weights: Array,
    num_chosen: int,
    k: Array | None = None,
    *,
    out: Array | None = None,
    index_scores: Array | None = None,
    scale: float = 0.0,
    is_causal: bool = False,
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
    cache: KvCache | None = None,
    cache_sequences: Integers | None = None,
    cache_read: bool = False,
    scheduler: Scheduler | None = None,
    instruction_set: str = "auto",
    bf16: bool = False,
    workspace: Array | None = None,
) -> Array:
    """The positions of the num_chosen keys with the greatest index scores, ascending and then -1:
    int32 [batch, n_q, num_chosen].

    q is [batch, n_q, heads, head_dim], weights float32 [batch, n_q, heads], k [batch, n_kv,
    head_dim], or None with a cache of one kv head and cache_read=True. The score of a key is the
    sum over heads of weights * max(0, scale * q k^T); an array index_scores, float32 [batch, n_q,
    n_kv], is filled with them, -infinity for keys that may not be chosen. All else is as in
    attention.
    """
    stored = _row_types(bf16)
    _check(q, "q", stored, (None, None, _some, _some))
    batch, n_q, heads, head_dim = q.shape
    _check(weights, "weights", [np.dtype(np.float32)], (batch, n_q, heads))
    args = _new(
        _AttentionArgs,
        batch=batch or _empty,
        n_q=n_q or _empty,
        n_kv=_empty,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        scale=scale,
        q=_input(q, "q"),
        instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"),
    )
    n_kv = 0
    if k is not None:
        _check(k, "k", stored, (batch, None, head_dim))
        n_kv = k.shape[1]
        args.n_kv, args.k = n_kv or _empty, _input(k[:, :, None], "k")
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
        None,
        cache,
        cache_read,
        scheduler,
        is_causal,
        False,
        n_q,
        n_kv,
        heads,
        1,
        appended_lengths,
    )
    _set_norm(args, norm, heads, 1, head_dim, 0)
    choice = _new(_ChooseKeysArgs, attention=args, num_chosen=num_chosen)
    shape, is_new = (batch, n_q, max(choice.num_chosen, 0)), out is None
    out = np.empty(shape, np.int32) if out is None else _writeable(out, "out")
    choice.weights = _input(weights, "weights")
    choice.chosen_keys = _contiguous(out, "out", [np.dtype(np.int32)], shape, True)
    if index_scores is not None:
        shape = (
            batch,
            n_q,
            _longest(
                batch if cu_seqlens_q is None else len(cu_seqlens_q) - 1,
                n_kv,
                appended_lengths,
                cache,
                arrays["cache_sequences"],
            ),
        )
        choice.index_scores = _contiguous(
            _writeable(index_scores, "index_scores"),
            "index_scores",
            [np.dtype(np.float32)],
            shape,
            True,
        )
    if cache is not None or not is_new or workspace is not None or index_scores is not None:
        given_out, appended = None if is_new else out, None if cache_read else cache
        more = {"index_scores": index_scores}
        _calls._memory(choice, {}, given_out, workspace, cache=appended, **more)
    _run("mha_choose_keys", workspace, choice, scheduler)
    return out
