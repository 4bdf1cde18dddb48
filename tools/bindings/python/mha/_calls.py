"""What the calls of a layer and of attention have in common."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from . import _library
from ._arrays import (
    _buffer,
    _contiguous,
    _describe,
    _first,
    _integers,
    _must_be,
    _named,
    _workspace,
    _writeable,
)
from ._cache import KvCache
from ._callbacks import Scheduler, _raising
from ._library import _call
from ._options import Norm, Rope, ScoreOptions
from ._structs import (
    _CallInfo,
    _causal,
    _empty,
    _equal_scores,
    _new,
    _NotCopied,
    _optional_outputs,
    _Outputs,
    _Sequences,
    _somewhere,
    _window_left,
    _window_right,
)

_buffer_too_small = 6  # MHA_ERROR_BUFFER_TOO_SMALL
_paddings = {"right": False, "left": True}


def _run(name, workspace, args, *layer):
    """The call, in the caller's workspace, or in one that grows to the size that it asks for."""
    if workspace is not None:
        return _call(name, *layer, args, *_buffer(_writeable(workspace, "workspace"), "workspace"))
    own, functions = _workspace.own, _library._library or _library._loaded()
    status = getattr(functions, name)(
        *layer, ctypes.addressof(args), own.address, own.size, own.at_error
    )
    if not status:
        return
    if status == _buffer_too_small:
        bytes = ctypes.c_size_t()
        _call(name + "_workspace", *layer, args, bytes)
        own.grow(bytes.value)
        _call(name, *layer, args, own.room, own.size)
    else:
        raise _library._failure(own.error, status)


class Prepared(_NotCopied):
    """A call whose arguments have been checked, to be made again and again: attention(...,
    prepare=True) and Layer.forward(..., prepare=True).

        call = mha.attention(q, k, v, is_causal=True, prepare=True)    # computes nothing yet
        y = call(q, k, v)  # 5 to 8 us more than the same call of C

    A call takes as many arrays as it was prepared with, with their shapes, strides and types. The
    result is a new array, that of out=, or that which it was prepared with; what was asked for
    beside it is in the same arrays each time. Everything else stays as it was prepared: arrays of
    first rows, lengths and positions, if they are int64 and contiguous, masks, biases and gates are
    read anew by each call, and may be changed between two; not lengths with padding="left", nor
    groups and scales that several sequences share. One thread at a time may use it.
    """

    _instead = "prepare another call, with prepare=True"

    def __init__(
        self, name, layer, args, given, out, is_new, workspace, scheduler, wanted, output="output"
    ):
        fields = {
            output: out,
            **{field: array for field, array in given.items() if array is not None},
        }
        structs = {
            field: args._object("outputs") if field == "states" else args for field in fields
        }
        self._places = [
            (
                structs[field],
                getattr(type(structs[field]), field).offset,
                "out" if field == output else field,
                array.shape,
                array.strides,
                array.dtype,
            )
            for field, array in fields.items()
        ]
        self._is_new = is_new
        self._name, self._args, self._workspace, self._scheduler, self._wanted, self._out = (
            name,
            args,
            workspace,
            scheduler,
            wanted,
            out,
        )
        self._layer, self._handles = layer, () if layer is None else (layer._handle,)

    def __call__(self, *arrays: np.ndarray, out: np.ndarray | None = None) -> Any:
        if len(arrays) != len(self._places) - 1:
            raise TypeError(
                f"this call takes {len(self._places) - 1} arrays, as it was prepared with; these"
                f" are {len(arrays)}"
            )
        if out is None:
            _, _, _, shape, _, dtype = self._places[0]
            out = np.empty(shape, dtype) if self._is_new else self._out
        for array, (pointer_struct, offset, name, shape, strides, dtype) in zip(
            (_writeable(out, "out"), *arrays), self._places
        ):
            if (
                not isinstance(array, np.ndarray)
                or array.shape != shape
                or array.strides != strides
                or array.dtype != dtype
            ):
                raise _other(array, name, shape, strides, dtype)
            _point(pointer_struct, offset, _first(array))
        if self._scheduler is not None:
            with _raising(self._scheduler):
                _run(self._name, self._workspace, self._args, *self._handles)
        else:
            _run(self._name, self._workspace, self._args, *self._handles)
        return (out, self._wanted) if self._wanted else out


_point = struct.Struct("P").pack_into


def _other(array, name, shape, strides, dtype):
    """What is wrong with an array of a prepared call."""
    has = (
        f"{_describe(array)} with strides of {array.strides} bytes"
        if isinstance(array, np.ndarray)
        else f"a {type(array).__name__}"
    )
    return ValueError(
        f"{name} is {has}; this call was prepared for {dtype} {list(shape)} with strides of"
        f" {strides}"
    )


def _check_prepared(cache, score, want):
    """What depends on how many positions a cache has, cannot be prepared."""
    if cache is not None and (
        want
        or score is not None
        and score.columns != "new_keys"
        and any(array is not None for array in (score.bias, score.mask, score.kv_groups))
    ):
        raise ValueError(
            "with a cache, a call that returns looks inside, or has a bias, mask or groups of all"
            " keys, cannot be prepared: their extents change as the cache grows"
        )


_no_arrays = dict.fromkeys(
    (
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "q_lengths",
        "kv_lengths",
        "q_first_rows",
        "kv_first_rows",
        "q_first_positions",
        "cache_sequences",
    )
)


def _arrays_of_sequences(
    cu_seqlens_q,
    cu_seqlens_kv,
    q_lengths,
    kv_lengths,
    q_first_rows,
    kv_first_rows,
    q_first_positions,
    cache_sequences,
):
    """The arrays of mha_sequences by name; _no_arrays if none is given."""
    if (
        cu_seqlens_q
        is cu_seqlens_kv
        is q_lengths
        is kv_lengths
        is q_first_rows
        is kv_first_rows
        is q_first_positions
        is cache_sequences
        is None
    ):
        return _no_arrays
    if cu_seqlens_q is None and cu_seqlens_kv is not None:
        raise ValueError(
            "cu_seqlens_kv is given, but there is no cu_seqlens_q; give both, for packed sequences,"
            " or neither"
        )
    for name, values in ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv):
        if values is not None and np.ndim(values) != 1:
            raise ValueError(
                f"{name} is {_describe(np.asarray(values))}; it must be one-dimensional, [sequences"
                " + 1]"
            )
    return dict(
        zip(
            _no_arrays,
            (
                cu_seqlens_q,
                cu_seqlens_kv,
                q_lengths,
                kv_lengths,
                q_first_rows,
                kv_first_rows,
                q_first_positions,
                cache_sequences,
            ),
        )
    )


def _set_sequences(
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
    n_k,
    num_heads,
    num_kv_heads,
    k_lengths,
):
    """Sets the fields about rows and positions; arrays are those of mha_sequences by name. Arrays
    of rows are of the batch, which is 1 with cu_seqlens_q, for any number of sequences."""
    if cache is not None:
        _must_be(KvCache, cache, "cache")
    elif cache_read:
        raise ValueError("cache_read is True, but there is no cache; give the cache too")
    elif arrays["cache_sequences"] is not None:
        raise ValueError("cache_sequences is given, but there is no cache; give the cache too")
    sequences = batch
    if _named(_paddings, padding, "padding") and arrays is not _no_arrays:
        arrays = {**arrays, **_left(arrays, batch, n_q, n_k)}
    if rope is not None:
        _must_be(Rope, rope, "rope")
        args.rope = rope._struct()
    if (
        arrays is not _no_arrays
        or rope is not None
        and not (rope.q_positions is rope.k_positions is None)
    ):
        args.sequences = struct = _new(_Sequences)
        if arrays["cu_seqlens_q"] is not None:
            sequences = _set_packed(args, struct, batch, n_q, arrays)
        for name, values in arrays.items():
            if values is not None and name not in ("cu_seqlens_q", "cu_seqlens_kv"):
                setattr(struct, name, _integers(values, name, (sequences,)))
        if rope is not None:
            struct.rope_q_positions = _integers(rope.q_positions, "q_positions", (batch, n_q))
            struct.rope_k_positions = _integers(rope.k_positions, "k_positions", (batch, n_k))
    flags = (_causal if is_causal else 0) | (_equal_scores if equal_scores else 0)
    if window_left is not None:
        flags, args.window_left = flags | _window_left, _window(window_left, "window_left")
    if window_right is not None:
        flags, args.window_right = flags | _window_right, _window(window_right, "window_right")
    args.flags = flags
    if cache_read:
        args.cache_read = cache
    elif cache is not None:
        args.cache = cache._changed()
    if score is not None:
        _must_be(ScoreOptions, score, "score")
        columns = (
            n_k
            if score.columns == "new_keys"
            else _longest(sequences, n_k, k_lengths, cache, arrays["cache_sequences"])
        )
        args.score, args.score_arrays = score._structs(batch, num_heads, num_kv_heads, n_q, columns)
    if scheduler is not None:
        _must_be(Scheduler, scheduler, "scheduler")
        args.scheduler = scheduler._struct


def _window(size, name):
    if not hasattr(size, "__index__"):
        raise TypeError(
            f"{name} is a {type(size).__name__}; it must be an integer; pass None for no window"
        )
    if size < 0:
        raise ValueError(f"{name} is {size}; it must be at least 0; pass None for no window")
    return size


def _set_packed(args, struct, batch, n_q, arrays):
    """Sets the fields about packed sequences, and returns how many there are. Without any, there is
    nothing to do."""
    count = len(arrays["cu_seqlens_q"]) - 1
    if batch != 1:
        raise ValueError(
            f"with cu_seqlens_q the rows of all sequences are those of a batch of 1, not of {batch}"
        )
    if count < 1 and (count < 0 or n_q):
        raise ValueError(
            f"cu_seqlens_q has {count + 1} numbers; it must have those of the first rows of all"
            f" sequences, and then that of all rows, {n_q}"
        )
    for name in "cu_seqlens_q", "cu_seqlens_kv":
        numbers = _integers(arrays[name], name, (count + 1,))
        if count:
            setattr(struct, name, numbers)
    struct.count, args.batch = count, 1 if count else _empty
    return count


def _left(arrays, batch, n_q, n_k):
    """The first rows, where lengths are those of the last rows of arrays."""
    first_rows = {}
    for side, rows in ("q", n_q), ("kv", n_k):
        for name in "cu_seqlens_q", side + "_first_rows":
            if arrays[name] is not None:
                raise ValueError(
                    f"padding is 'left', but {name} says which rows are valid; give one of the two"
                )
        lengths = _integers(arrays[side + "_lengths"], side + "_lengths", (batch,))
        if lengths is not None:
            # Of other lengths, the library says what is wrong.
            first_rows[side + "_first_rows"] = rows - np.clip(lengths, 0, rows)
    return first_rows


def _set_norm(args, norm, num_heads, num_kv_heads, head_dim, head_dim_v):
    if norm is not None:
        _must_be(Norm, norm, "norm")
        args.norm = norm._struct(num_heads, num_kv_heads, head_dim, head_dim_v)


def _appended(rows, arrays, is_self):
    """How many rows of keys each sequence has in a call; None stands for all rows. arrays are those
    of mha_sequences by name."""
    side = "q" if is_self else "kv"
    cu_seqlens = arrays["cu_seqlens_q" if arrays["cu_seqlens_kv"] is None else "cu_seqlens_" + side]
    if cu_seqlens is not None:
        return np.diff(cu_seqlens)
    lengths, first_rows = arrays[side + "_lengths"], arrays[side + "_first_rows"]
    return (
        [rows - first for first in first_rows]
        if lengths is None and first_rows is not None
        else lengths
    )


def _longest(sequences, n_kv, kv_lengths, cache, cache_sequences):
    """The columns of an array with a number for each pair of query and key. Lengths beyond n_kv,
    which the library refuses, make none longer."""
    if cache is None:
        return n_kv
    rows = [n_kv] * sequences if kv_lengths is None else kv_lengths
    numbers = range(sequences) if cache_sequences is None else cache_sequences
    return max(
        [
            cache.length(int(sequence)) + max(min(int(count), n_kv), 0)
            for sequence, count in zip(numbers, rows)
        ],
        default=0,
    )


def _check_want(want):
    if isinstance(want, str):
        raise TypeError(f"want is a str; pass a list such as [{want or 'lse'!r}]")


def _wanted(
    args,
    want,
    is_single,
    batch,
    n_q,
    n_kv,
    num_heads,
    num_kv_heads,
    head_dim,
    head_dim_v,
    cache,
    arrays_of_sequences,
    kv_lengths,
):
    """Arrays for the optional outputs, by name."""
    if not want:
        return {}
    cu_seqlens, cache_sequences = (
        arrays_of_sequences["cu_seqlens_q"],
        arrays_of_sequences["cache_sequences"],
    )
    seen = _longest(
        batch if cu_seqlens is None else len(cu_seqlens) - 1,
        n_kv,
        kv_lengths,
        cache,
        cache_sequences,
    )
    pairs = (batch, num_heads, n_q, seen)
    shapes = {
        "attention_weights": pairs,
        "lse": (batch, num_heads, n_q),
        "q": (batch, n_q, num_heads, head_dim),
        "k": (batch, n_kv, num_kv_heads, head_dim),
        "v": (batch, n_kv, num_kv_heads, head_dim_v),
        "scores": pairs,
        "scaled_scores": pairs,
        "softcapped_scores": pairs,
        "masked_scores": pairs,
        "context": (batch, n_q, num_heads, head_dim_v),
    }
    _check_want(want)
    given, arrays = want if isinstance(want, dict) else dict.fromkeys(want), {}
    for name, array in given.items():
        shape = _named(shapes, name, "want")
        if array is None:
            # Without queries the library computes nothing, not even k and v.
            make = np.empty if n_q else np.zeros
            arrays[name] = make(shape[1:] if is_single else shape, np.float32)
        else:
            _contiguous(
                array, f"want[{name!r}]", [np.float32], shape[1:] if is_single else shape, True
            )
            arrays[name] = _writeable(array, f"want[{name!r}]")
    _point_to(args, arrays)
    return arrays


def _point_to(args, arrays):
    """Sets the optional outputs, by name."""
    if arrays:
        args.outputs = args._object("outputs") or _new(_Outputs)
        for name, array in arrays.items():
            setattr(args._object("outputs"), name, array)


def _info(name, args, want, *before):
    """The fields of mha_call_info by name. Of the outputs counts that they are asked for, and
    nothing is written to them."""
    _check_want(want)
    for output in want:
        _named(dict.fromkeys(_optional_outputs), output, "want")
    _point_to(args, dict.fromkeys(want, _somewhere))
    info = _new(_CallInfo)
    _call(name, *before, args, info)
    return {field: getattr(info, field) for field, _ in _CallInfo._fields_[1:]}
