"""What the calls of a layer and of attention have in common."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from . import _library
from ._arrays import _buffer, _contiguous, _describe, _first, _integers, _must_be, _named, _workspace, _writeable
from ._cache import KvCache
from ._callbacks import Scheduler, _raising
from ._library import _call
from ._options import Norm, Rope, ScoreOptions
from ._structs import (_CallInfo, _Taps, _cache_read, _causal, _empty, _new, _optional_outputs, _padding_left, _somewhere, _taps, _window_left,
                       _window_right)

_buffer_too_small = 6  # MHA_ERROR_BUFFER_TOO_SMALL
_paddings = {"right": 0, "left": _padding_left}


def _run(name, workspace, args, *layer):
    """The call, in the caller's workspace, or in one that grows to the size that it asks for."""
    if workspace is not None:
        return _call(name, *layer, args, *_buffer(_writeable(workspace, "workspace"), "workspace"))
    own, functions = _workspace.own, _library._library or _library._loaded()
    status = getattr(functions, name)(*layer, ctypes.addressof(args), own.address, own.size, own.at_error)
    if not status:
        return
    if status == _buffer_too_small:
        bytes = ctypes.c_size_t()
        _call(name + "_workspace", *layer, args, bytes)
        own.grow(bytes.value)
        _call(name, *layer, args, own.room, own.size)
    else:
        raise _library._failure(own.error, status)


class Prepared:
    """A call whose arguments have been checked, to be made again and again: attention(..., prepare=True) and Layer.forward(..., prepare=True).

        call = mha.attention(q, k, v, is_causal=True, prepare=True)    # computes nothing yet
        y = call(q, k, v)                                              # 5 to 8 us more than the same call of C

    A call takes as many arrays as it was prepared with, with their shapes, strides and types. The result is a new array, that of out=, or that which
    it was prepared with; what was asked for beside it is in the same arrays each time. Everything else stays as it was prepared: arrays of starts,
    lengths and positions, if they are int64 and contiguous, masks, biases and gates are read anew by each call, and may be changed between two. One
    thread at a time may use it.
    """

    def __init__(self, name, layer, args, given, out, is_new, workspace, scheduler, wanted, output="output"):
        fields = {output: out, **{field: array for field, array in given.items() if array is not None}}
        self._places = [(getattr(type(args), field).offset, field, array.shape, array.strides, array.dtype) for field, array in fields.items()]
        self._is_new = is_new
        self._name, self._args, self._workspace, self._scheduler, self._wanted, self._out = name, args, workspace, scheduler, wanted, out
        self._layer, self._handles = layer, () if layer is None else (layer._handle,)

    def __call__(self, *arrays: np.ndarray, out: np.ndarray | None = None) -> Any:
        if len(arrays) != len(self._places) - 1:
            raise TypeError(f"this call takes {len(self._places) - 1} arrays, as it was prepared with; these are {len(arrays)}")
        if out is None:
            _, _, shape, _, dtype = self._places[0]
            out = np.empty(shape, dtype) if self._is_new else self._out
        for array, (offset, name, shape, strides, dtype) in zip((_writeable(out, "out"), *arrays), self._places):
            if not isinstance(array, np.ndarray) or array.shape != shape or array.strides != strides or array.dtype != dtype:
                raise _other(array, name, shape, strides, dtype)
            _point(self._args, offset, _first(array))
        if self._scheduler is not None:
            with _raising(self._scheduler):
                _run(self._name, self._workspace, self._args, *self._handles)
        else:
            _run(self._name, self._workspace, self._args, *self._handles)
        return (out, self._wanted) if self._wanted else out


_point = struct.Struct("P").pack_into


def _other(array, name, shape, strides, dtype):
    """What is wrong with an array of a prepared call."""
    has = f"{_describe(array)} with strides of {array.strides} bytes" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
    return ValueError(f"{name} is {has}; this call was prepared for {dtype} {list(shape)} with strides of {strides}")


def _check_prepared(cache, score, want):
    """What depends on how many positions a cache has, cannot be prepared."""
    if cache is not None and (want or score is not None and score.columns != "new_keys" and any(
            array is not None for array in (score.bias, score.mask, score.kv_groups))):
        raise ValueError("with a cache, a call that returns looks inside, or has a bias, mask or groups of all keys, cannot be prepared: their extents "
                         "change as the cache grows")


def _set_sequences(args, batch, places, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, score, cache,
                   cache_sequences, cache_read, scheduler, is_causal, n_q, n_k, num_heads, num_kv_heads, k_lengths):
    """Sets the fields about rows and positions. Arrays of rows are of the batch, which is 1 with cu_seqlens_q, for any number of sequences."""
    kv_start, cu_seqlens_q, cu_seqlens_kv = places
    sequences = batch
    if cu_seqlens_q is not None:
        if batch != 1:
            raise ValueError(f"with cu_seqlens_q the rows of all sequences are those of a batch of 1, not of {batch}")
        sequences = len(cu_seqlens_q) - 1
        args.batch = sequences or _empty
    if not (q_start is q_lengths is kv_lengths is kv_start is cu_seqlens_q is cu_seqlens_kv is cache_sequences is None):
        for name, values, count in (("q_start", q_start, 0), ("q_lengths", q_lengths, 0), ("kv_lengths", kv_lengths, 0), ("kv_start", kv_start, 0),
                                    ("cu_seqlens_q", cu_seqlens_q, 1), ("cu_seqlens_kv", cu_seqlens_kv, 1), ("cache_sequences", cache_sequences, 0)):
            if values is not None:
                setattr(args, name, _integers(values, name, (sequences + count,)))
    args.flags = _named(_paddings, padding, "padding") | (_causal if is_causal else 0) | (_cache_read if cache_read else 0)
    if window_left is not None:
        args.flags, args.window_left = args.flags | _window_left, window_left
    if window_right is not None:
        args.flags, args.window_right = args.flags | _window_right, window_right
    if rope is not None:
        _must_be(Rope, rope, "rope")
        args.rope = rope._struct(batch, n_q, n_k)
    if cache is not None:
        _must_be(KvCache, cache, "cache")
        args.cache = cache if cache_read else cache._changed()
    if score is not None:
        _must_be(ScoreOptions, score, "score")
        columns = n_k if score.columns == "new_keys" else _longest(sequences, n_k, k_lengths, cache, cache_sequences)
        args.score = score._struct(batch, num_heads, num_kv_heads, n_q, columns)
    if scheduler is not None:
        _must_be(Scheduler, scheduler, "scheduler")
        args.scheduler = scheduler._struct


def _set_norm(args, norm, num_heads, num_kv_heads, head_dim, head_dim_v):
    if norm is not None:
        _must_be(Norm, norm, "norm")
        args.norm = norm._struct(num_heads, num_kv_heads, head_dim, head_dim_v)


def _appended(rows, lengths, places):
    """How many rows of keys each sequence has in a call; None stands for all rows."""
    kv_start, cu_seqlens_q, cu_seqlens_kv = places
    if cu_seqlens_q is not None:
        return np.diff(cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv)
    return [rows - start for start in kv_start] if lengths is None and kv_start is not None else lengths


def _longest(sequences, n_kv, kv_lengths, cache, cache_sequences):
    """The columns of an array with a number for each pair of query and key. Lengths beyond n_kv, which the library refuses, make none longer."""
    if cache is None:
        return n_kv
    rows = [n_kv] * sequences if kv_lengths is None else kv_lengths
    numbers = range(sequences) if cache_sequences is None else cache_sequences
    return max([cache.length(int(sequence)) + max(min(int(count), n_kv), 0) for sequence, count in zip(numbers, rows)], default=0)


def _wanted(args, want, is_single, batch, n_q, n_kv, num_heads, num_kv_heads, head_dim, head_dim_v, cache, cache_sequences, kv_lengths):
    """Arrays for the optional outputs, by name."""
    if not want:
        return {}
    seen = _longest(max(args.batch, 0), n_kv, kv_lengths, cache, cache_sequences)
    pairs = (batch, num_heads, n_q, seen)
    shapes = {"attention_weights": pairs, "lse": (batch, num_heads, n_q), "q": (batch, n_q, num_heads, head_dim),
              "k": (batch, n_kv, num_kv_heads, head_dim), "v": (batch, n_kv, num_kv_heads, head_dim_v), "scores": pairs,
              "scaled_scores": pairs, "softcapped_scores": pairs, "masked_scores": pairs, "context": (batch, n_q, num_heads, head_dim_v)}
    given, arrays = want if isinstance(want, dict) else dict.fromkeys(want), {}
    for name, array in given.items():
        shape = _named(shapes, name, "want")
        if array is None:
            make = np.empty if n_q else np.zeros  # without queries the library computes nothing, not even k and v
            arrays[name] = make(shape[1:] if is_single else shape, np.float32)
        else:
            _contiguous(array, f"want[{name!r}]", [np.float32], shape[1:] if is_single else shape)
            arrays[name] = _writeable(array, f"want[{name!r}]")
    _point_to(args, arrays)
    return arrays


def _point_to(args, arrays):
    """Sets the optional outputs, by name."""
    taps = _new(_Taps)
    for name, array in arrays.items():
        setattr(taps if name in _taps else args, name, array)
    if any(name in _taps for name in arrays):
        args.taps = taps


def _info(name, args, want, *before):
    """The fields of mha_call_info by name. Of the outputs counts that they are asked for, and nothing is written to them."""
    for output in want:
        _named(dict.fromkeys(_optional_outputs), output, "want")
    _point_to(args, dict.fromkeys(want, _somewhere))
    info = _new(_CallInfo)
    _call(name, *before, args, info)
    return {field: getattr(info, field) for field, _ in _CallInfo._fields_[1:]}
