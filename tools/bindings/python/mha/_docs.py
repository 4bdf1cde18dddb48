"""Completes docstrings, so that help() shows every parameter with its default."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ._structs import given_types

_T = TypeVar("_T")


class Shared:
    """Parameters that several functions take, described once.

    Parameters
    ----------
    is_causal : bool
        Whether the query at position p attends only to keys at positions <= p. The last query is at
        the position of the last key, unless `q_first_positions` says otherwise.
    equal_scores : bool
        Whether the scale is 0: before softcap and biases, all finite scores are equal.
    window_left, window_right : int
        The query at position p attends only to keys at positions >= p - `window_left` and
        <= p + `window_right`; both >= 0. None is no limit. Hugging Face's `sliding_window` is
        `window_left` + 1.
    q_lengths, kv_lengths : array_like of int, shape (sequences,)
        Number of valid rows of each sequence, in the arrays of queries and in those of keys and
        values; the others are padding, which is not read and whose output is 0. None is all rows.
    padding : {"right", "left"}
        Where the padding is: with "left", the valid rows are the last ones.
    q_first_rows, kv_first_rows : array_like of int, shape (sequences,)
        First valid row of each sequence; None is 0. Not together with `padding="left"`.
    cu_seqlens_q, cu_seqlens_kv : array_like of int, shape (sequences + 1,)
        For packed sequences: sequence s is the rows ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``
        of arrays that have no batch, or a batch of 1. `cu_seqlens_kv` is `cu_seqlens_q` if None.
    q_first_positions : array_like of int, shape (sequences,)
        Position of the first valid query of each sequence, counted from the sequence's first key.
    norm : Norm
        Norm of queries, keys, values or the context.
    rope : Rope
        Rotation of queries and keys, before they are scored or stored.
    score : ScoreOptions
        Softcap, ALiBi, sinks, masks, biases and others.
    attention_arithmetic : {"f32", "int16"}
        What scores and context compute in. With "int16", keys and values are 8-bit integers, those
        of a cache of "int8" (values also "int4") or the call's, which are rounded (`choose_keys`
        needs the cache); queries and weights become 16-bit integers.
    cache : KvCache or KvPool
        The call appends the rows of keys and values to its sequences, then attends to all that
        these hold. No other call may use the cache, or these blocks of the pool, meanwhile.
    cache_sequences : array_like of int, shape (sequences,)
        The sequences of the cache, no two equal. None is 0, 1, and so on.
    cache_lengths : array_like of int, shape (sequences,)
        With a `KvPool`: positions that each sequence has before the call.
    block_tables : array_like of int, shape (sequences, entries) or (all entries,)
        With a `KvPool`: numbers of the blocks of each sequence; position p is in block p //
        block_positions of them. Entries that no position needs may be anything. int32 with rows
        any distance apart is not copied.
    block_table_starts : array_like of int, shape (sequences + 1,)
        For block tables of different lengths one after the other: the first entry of each, and the
        end of the last. None is two-dimensional tables.
    cache_read : bool
        Whether to attend to the cache without appending to it; keys and values are not given then.
    scheduler : Scheduler
        Threads of the call; results have the same bits for any number. None is the calling thread.
    instruction_set : str
        Kernels that compute: "auto", the best ones of this machine, or one of `instruction_sets()`.
    bf16 : bool
        Whether rows in arrays of uint16 are accepted, as the bits of bfloat16.
    output_type : {"f32", "f16", "bf16"}
        Type of the result: float32, float16, or bfloat16 as bits in uint16.
    workspace : ndarray of uint8, shape (bytes,)
        Memory to compute in, at least ``workspace_bytes`` of the call's info. With None, each
        thread keeps its own.
    want : iterable of str or mapping from str to ndarray
        Optional outputs, float32: "lse" (batch, num_heads, n_q), the logarithm of the sum of
        exp(score); of each pair of query and key (batch, num_heads, n_q, n_kv) "scores",
        "scaled_scores", "softcapped_scores", "masked_scores" and "attention_weights"; of a layer
        also "q", "k" and "v" as projected (batch, n, heads, width) and "context" (batch, n_q,
        num_heads, head_dim_v). With a cache, n_kv is the longest length after the call. A mapping
        gives arrays that receive them.
    prepare : bool
        Whether to compute nothing, and to return a `Prepared` call.
    kv_first_position : int
        Position of the first key, of `k` or of the cache, where earlier keys are elsewhere.
    scale : float
        Factor of the scores; 0 is 1 / sqrt(head_dim).
    batch : int
        Number of sequences; with `cu_seqlens_q` 1.
    query_dim : int
        Width of a row of query (embed_dim).
    num_heads : int
        Number of query heads. Query head h uses key and value head h / (num_heads / num_kv_heads).
    num_kv_heads : int
        Number of key and value heads, which divides `num_heads`; 0 is `num_heads`.
    head_dim : int
        Width of a query or key of one head; 0 is query_dim / num_heads.
    head_dim_v : int
        Width of a value of one head; 0 is `head_dim`.
    key_dim : int
        Width of a row of key; 0 is `query_dim`.
    value_dim : int
        Width of a row of value; 0 is `key_dim`.
    output_dim : int
        Width of a row of output; 0 is `query_dim`, or without `w_o` that of the context.
    w_q, w_k, w_v, w_qkv : ndarray
        Projections of queries (query_dim, num_heads * head_dim), keys (key_dim, num_kv_heads *
        head_dim) and values (value_dim, num_kv_heads * head_dim_v), or all three side by side in
        `w_qkv`. The columns are those of head 0, then of head 1, and so on. `w_q` alone makes a
        layer for calls with ``cache_read=True``.
    w_o : ndarray, shape (num_heads * head_dim_v, output_dim)
        Projection of the context. None makes a layer whose output is the context.
    b_q, b_k, b_v, b_qkv, b_o, b_g : ndarray of float32, shape (out,)
        Biases, separate or fused, whether or not the matrices are.
    w_g : ndarray, shape (query_dim, num_heads * gate_dim)
        Projection of the gate.
    layout : {"in_out", "out_in"}
        Layout of all matrices: "in_out" is (in, out) for x @ w, "out_in" is (out, in), as in
        PyTorch's nn.Linear.
    type : {types}
        Type of the matrices. None takes it from arrays of float32, float16 and int8. bfloat16 is
        bits in uint16; int4 is two numbers + 8 in a uint8, the earlier input in the low half, with
        ``layout="out_in"``.
    scales : mapping from str to ndarray of float32
        Scales of int8 and int4 matrices by their names, such as ``{"w_q": ...}``: (out,) or, in
        groups, (out, ceil(in / group_size)).
    offsets : mapping from str to ndarray of float32
        Offsets in the shape of scales in groups: a weight is code * scale + offset.
    block_scales, block_offsets : mapping from str to ndarray of float32
        With ``scale_type="int8"``, factors of `scales` and `offsets`, each of 256 inputs of an
        output: (out, ceil(in / 256)).
    weight_type : {"f32", "f16", "bf16", "int8", "int4", "int5", "int6"}
        How the weights are stored. Matrices of floats are converted; int8 and int4 need the same
        type. "int5" and "int6" take int8 matrices in groups, with codes from -16 to 15 and -32 to
        31, or with offsets from 0 to 31 and 63, and need integer arithmetic. None is "bf16" in bf16
        arithmetic, where matrices of f16 are an error, else "f32".
    group_size : {0, 16, 32, 64, 128}
        Number of inputs of an output that share a scale; 0 is all for int8, and 32 for int4.
    scale_type : {"f32", "f16", "int8"}
        How scales and offsets of groups are stored. "f16" must hold them exactly. "int8", for
        integer arithmetic, takes integers from -128 to 127, and stores their factors as f16, which
        must hold these exactly.
    arithmetic : {"f32", "int8", "int16", "bf16"}
        What projections compute in. Integers need a `weight_type` of integers. bf16 rounds
        input rows to bf16, too, and needs a `weight_type` of bf16.
    gate : {"none", "sigmoid", "softplus"}
        Function of x @ w_g + b_g by which the context is multiplied before `w_o`.
    gate_in_w_q : bool
        Whether each head's columns of the gate, and its biases, follow the head's own in `w_q` or
        `w_qkv`, in place of `w_g`.
    gate_dim : int
        Numbers of each head's gate: 1, or head_dim_v; 0 is head_dim_v.
    num_sequences : int
        Number of sequences, numbered from 0.
    capacity : int
        The most positions of a sequence.
    k_type : {types}
        Type of the stored keys, which is not int4.
    v_type : {types}
        Type of the stored values; None is `k_type`.
    kind : {"contiguous", "ring", "paged"}
        "ring" keeps the last `capacity` positions, a multiple of 16 and more than `window_left`,
        for causal calls with a window. "paged" takes blocks from a common pool.
    value_place : {"own", "in_keys"}
        With "in_keys", the value of a position is the first head_dim_v elements of its key (latent
        attention); calls that append then have no v.
    block_positions : int
        Positions per block, a multiple of 16; only of caches in blocks.
    num_blocks : int
        Of a paged cache: blocks of the pool, numbered from 0.
    sequence : int
        Number of a sequence of the cache.
    packed : ndarray of uint8, shape (bytes,)
        Packed weights, aligned to 64 bytes: a result of `pack`, or numpy.memmap of a file. They are
        used where they lie and must not change.
    """


def _entries(section):
    """The entries of a list of parameters: name -> (names, type, lines that say what it means)."""
    found = re.findall(r"^(\**\w+(?:, \w+)*) : (.*)((?:\n    .*)*)", section, re.MULTILINE)
    return {
        name: (names.split(", "), *rest) for names, *rest in found for name in names.split(", ")
    }


_types = "{" + ", ".join(f'"{name}"' for name in given_types) + "}"
_shared = _entries(inspect.cleandoc(Shared.__doc__ or ""))


def documented(keywords: Mapping[str, Any] | None = None) -> Callable[[_T], _T]:
    """Complete a docstring: its list of parameters gets those of `Shared` that it lacks, in the
    order of the signature, and all defaults. `keywords` are those, with their defaults, that **...
    of the signature stands for; the signature then shows them.
    """

    def complete(owner):
        signature = inspect.signature(owner)
        taken = [*signature.parameters.values()]
        if keywords and taken[-1].kind is taken[-1].VAR_KEYWORD:
            taken.pop()
        for name, default in (keywords or {}).items():
            taken.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
        if keywords:
            owner.__signature__ = signature.replace(parameters=taken)
        if owner.__doc__:  # which python -OO drops
            owner.__doc__ = _completed(inspect.cleandoc(owner.__doc__), taken)
        return owner

    return complete


def _completed(text, taken):
    before, rest = f"{text}\n".split("\n\nParameters\n----------\n")
    end = re.search(r"\n*(^\w+\n--+\n|\Z)", rest, re.MULTILINE)
    own = _entries(rest[: end.start()])
    kinds, lines, done = {**_shared, **own}, [], {"self", "cls"}
    defaults = {
        str(one.replace(annotation=one.empty, default=one.empty)): one.default for one in taken
    }
    for name in (*defaults, *own):
        if name in done:
            continue
        names, kind, meaning = kinds[name]
        names = [one for one in names if one in defaults or one in own]
        done.update(names)
        default = defaults.get(name)
        if default is not inspect.Parameter.empty:
            kind += ", optional" if default in (None, ()) else f", default {default!r}"
        lines.append(f"{', '.join(names)} : {kind}{meaning}")
    lines = [before, "", "Parameters", "-" * 10, *lines, "", rest[end.start(1) :]]
    return "\n".join(lines).rstrip().replace("{types}", _types)
