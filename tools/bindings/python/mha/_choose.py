"""The keys with the greatest index scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import _calls
from ._arrays import (
    _batched,
    _check,
    _contiguous,
    _input,
    _named,
    _row_types,
    _some,
    _writeable,
)
from ._calls import (
    _choice_keywords,
    _complete,
    _keywords,
    _longest,
    _run,
    _set_call,
)
from ._docs import documented
from ._structs import _AttentionArgs, _ChooseKeysArgs, _empty, _new, instruction_set_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Array, Choice


@documented(_choice_keywords)
def choose_keys(
    q: Array,
    weights: Array,
    num_chosen: int,
    k: Array | None = None,
    *,
    out: Array | None = None,
    index_scores: Array | None = None,
    scale: float = 0.0,
    instruction_set: str = "auto",
    bf16: bool = False,
    workspace: Array | None = None,
    **call: Unpack[Choice],
) -> Array:
    """Choose the keys with the greatest index scores (DeepSeek V3.2's lightning indexer).

    The index score of query i and key j is the sum over heads h of
    ``weights[i, h] * max(0, scale * q[i, h] @ k[j])``. All arrays may leave out the batch.

    Parameters
    ----------
    q : ndarray of float32 or float16, shape ([batch,] n_q, num_heads, head_dim)
        Queries of the indexer.
    weights : ndarray of float32, shape ([batch,] n_q, num_heads)
        Weights of the heads.
    num_chosen : int
        The most keys of a query; >= 1.
    k : ndarray of float32 or float16, shape ([batch,] n_kv, head_dim)
        Keys of the indexer. None with ``cache_read=True`` and a cache of one key head.
    out : ndarray of int32, shape ([batch,] n_q, num_chosen)
        Receives the result.
    index_scores : ndarray of float32, shape ([batch,] n_q, n_kv)
        Receives the index scores, -infinity for keys that may not be chosen. With a cache, n_kv is
        the longest length after the call.

    Returns
    -------
    ndarray of int32, shape ([batch,] n_q, num_chosen)
        Positions of the chosen keys, ascending, then -1: `chosen_keys` of a `ScoreOptions`.

    Examples
    --------
    >>> q, k = (np.random.rand(6, *shape).astype(np.float32) for shape in ((2, 8), (8,)))
    >>> mha.choose_keys(q, np.ones((6, 2), np.float32), 3, k, is_causal=True)[0]
    array([ 0, -1, -1], dtype=int32)
    """
    options, given_out = {**_keywords, **_complete(call, _choice_keywords)}, out
    is_single, cache = getattr(q, "ndim", 0) == 3, options["cache"]
    if is_single:
        q, weights, k, out, index_scores = _batched(
            3, q=q, weights=weights, k=k, out=out, index_scores=index_scores
        )
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
    sequences = _set_call(args, options, (batch, n_q, n_kv, heads, 1, head_dim, 0))
    choice = _new(_ChooseKeysArgs, attention=args, num_chosen=num_chosen)
    shape = (batch, n_q, max(choice.num_chosen, 0))
    out = np.empty(shape, np.int32) if out is None else _writeable(out, "out")
    choice.weights = _input(weights, "weights")
    choice.chosen_keys = _contiguous(out, "out", [np.dtype(np.int32)], shape, True)
    if index_scores is not None:
        shape = (batch, n_q, _longest(batch, n_kv, cache, *sequences))
        choice.index_scores = _contiguous(
            _writeable(index_scores, "index_scores"),
            "index_scores",
            [np.dtype(np.float32)],
            shape,
            True,
        )
    if not (cache is given_out is workspace is index_scores is None):
        appended, more = None if options["cache_read"] else cache, {"index_scores": index_scores}
        _calls._memory(choice, {}, given_out, workspace, cache=appended, **more)
    _run("mha_choose_keys", workspace, choice, options["scheduler"])
    return out[0] if is_single else out
