"""What the calls of a layer and of attention have in common."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

import numpy as np

from . import _library
from ._arrays import (
    _buffer,
    _check,
    _check_memory,
    _contiguous,
    _describe,
    _integers,
    _must_be,
    _named,
    _read_by,
    _steps,
    _workspace,
    _writeable,
)
from ._cache import KvPool, _caches
from ._callbacks import Scheduler
from ._docs import documented
from ._library import _call
from ._options import Norm, Rope, ScoreOptions
from ._structs import (
    _attention_arithmetics,
    _CallInfo,
    _causal,
    _empty,
    _equal_scores,
    _fields,
    _is_true,
    _kind,
    _new,
    _NotCopied,
    _number,
    _optional_outputs,
    _Outputs,
    _Sequences,
    _somewhere,
    _start,
    _window_left,
    _window_right,
)

# The options of a call, and the pointers that stand behind its extents.
_no_options, _no_pointers = (0,) * 8, (0,) * 5
_buffer_too_small = 6  # MHA_ERROR_BUFFER_TOO_SMALL
_paddings = {"right": False, "left": True}


def _run(name, workspace, args, scheduler, *layer):
    """The call, in the caller's workspace, or in one that grows to the size that it asks for.
    Raises what was raised in its scheduler, rather than what the library says to it."""
    if scheduler is not None:
        with scheduler._raising():
            return _run(name, workspace, args, None, *layer)
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


def _memory(args, given, out, workspace, wanted=None, cache=None, layer=None, same=(), **more):
    """Raises where the memory of a call overlaps. Returns the given arrays, what it writes to
    besides the output, what it reads besides these, and the pairs that may be one array."""
    is_all = not (wanted or more or hasattr(args, "_objects_at")) and workspace is cache is None
    if is_all and (layer is None or layer._memory is None):  # of nearly all calls, in less time
        if not any([x is not None and np.may_share_memory(out, x) for x in given.values()]):
            return given, {}, {}, same
    if workspace is not None:
        _check(workspace, "workspace")
    written = {"workspace": workspace, **(cache._parts if cache is not None else {}), **more}
    written = {name: array for name, array in written.items() if array is not None}
    for name, array in wanted.items() if wanted else ():
        written[f"want[{name!r}]"] = array
    read = _read_by(args)
    if layer is not None and layer._memory is not None:
        read["the packed weights"] = layer._memory[0]
    _check_memory(written if out is None else {"out": out, **written}, {**given, **read}, same)
    return given, written, read, same


_of_pairs = {"attention_weights", "scores", "scaled_scores", "softcapped_scores", "masked_scores"}


def _in_place(name, wanted):
    """The array of queries may be the output, but where numbers of pairs are asked for."""
    return [("out", name)] if _of_pairs.isdisjoint(wanted or ()) else ()


class Prepared(_NotCopied):
    """A call whose arguments have been checked, to be made again and again.

    ``attention(..., prepare=True)`` and ``Layer.forward(..., prepare=True)`` return it. Everything
    but the arrays of rows stays as it was prepared: contiguous int64 arrays of first rows, lengths
    and positions, int32 block tables, masks, biases and gates are read anew by each call, and may
    be changed between two calls; not so lengths with ``padding="left"``, nor segments and scales
    that several sequences share. One thread at a time may use it: a concurrent call raises
    RuntimeError.

    Examples
    --------
    >>> q = k = v = np.random.rand(2, 5, 4, 8).astype(np.float32)
    >>> call = mha.attention(q, k, v, is_causal=True, prepare=True)  # computes nothing yet
    >>> np.array_equal(call(q, k, v), mha.attention(q, k, v, is_causal=True))
    True
    """

    _instead = "prepare another call, with prepare=True"

    def __init__(
        self, name, layer, args, memory, out, is_new, workspace, scheduler, wanted, output="output"
    ):
        given, self._written, self._read, self._same = memory
        fields = {
            output: out,
            **{field: array for field, array in given.items() if array is not None},
        }
        structs = {
            field: args._object("outputs") if field == "partials" else args for field in fields
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
        self._name, self._args, self._workspace = name, args, workspace
        self._scheduler, self._wanted, self._out = scheduler, wanted, out
        self._layer, self._handles = layer, () if layer is None else (layer._handle,)
        # Of one element, so that one thread at a time has it: the last places that did not overlap.
        self._turn = [None]

    @documented()
    def __call__(self, *arrays: np.ndarray, out: np.ndarray | None = None) -> Any:
        """Make the call.

        Parameters
        ----------
        *arrays : ndarray
            The arrays of rows, as many as it was prepared with, with their shapes, strides and
            types.
        out : ndarray
            Receives the result. None is a new array, or the one that the call was prepared with.

        Returns
        -------
        y : ndarray
            The result.
        outputs : dict from str to ndarray
            Only if it was prepared with `want`: the optional outputs, in the same arrays each time.
        """
        if len(arrays) != len(self._places) - 1:
            raise TypeError(
                f"this call takes {len(self._places) - 1} arrays, as it was prepared with; these"
                f" are {len(arrays)}"
            )
        is_given = out is not None or not self._is_new
        if out is None:
            _, _, _, shape, _, dtype = self._places[0]
            out = np.empty(shape, dtype) if self._is_new else self._out
        try:
            before = self._turn.pop()
        except IndexError:
            raise RuntimeError("this call is in use; prepare one for each thread") from None
        places: list = []
        try:
            for array, (pointer_struct, offset, name, shape, strides, dtype) in zip(
                (_writeable(out, "out"), *arrays), self._places
            ):
                if (
                    type(array) is not np.ndarray
                    or array.shape != shape
                    or array.strides != strides
                    or array.dtype != dtype
                    or not array.flags.aligned
                ):
                    _check_as_prepared(array, name, shape, strides, dtype)
                at = _start(array)
                _point(pointer_struct, offset, at)
                places.append(at)
            if (is_given or self._written) and places != before:
                self._check_memory(out if is_given else None, arrays)
                before = places
            _run(self._name, self._workspace, self._args, self._scheduler, *self._handles)
        finally:
            self._turn.append(before)
        return (out, self._wanted) if self._wanted else out

    def _check_memory(self, out, arrays):
        given = {place[2]: array for place, array in zip(self._places[1:], arrays)}
        _check_memory(self._written, given)
        if out is not None:
            _check_memory({"out": out}, {**self._written, **self._read, **given}, self._same)


_point = struct.Struct("P").pack_into


def _check_as_prepared(array, name, shape, strides, dtype):
    """Raises unless the array lies as that which a call was prepared with."""
    is_array = isinstance(array, np.ndarray)
    if is_array and array.shape == shape and array.dtype == dtype:
        if 0 in shape or _steps(shape, array.strides) == _steps(shape, strides):
            return _check(array, name)
    has = f"{_describe(array)} with strides of {array.strides} bytes" if is_array else _kind(array)
    raise ValueError(
        f"{name} is {has}; this call was prepared for {dtype} {list(shape)} with strides of"
        f" {strides}"
    )


def _check_prepared(cache, score, want):
    """What depends on how many positions a cache has, cannot be prepared."""
    if cache is not None and (
        want
        or score is not None
        and score.column_keys != "new_keys"
        and any(array is not None for array in (score.bias, score.mask, score.kv_segments))
    ):
        raise ValueError(
            "with a cache, a call that returns looks inside, or has a bias, mask or segments of all"
            " keys, cannot be prepared: their extents change as the cache grows"
        )


_no_arrays = dict.fromkeys(
    """cu_seqlens_q cu_seqlens_kv q_lengths kv_lengths q_first_rows kv_first_rows q_first_positions
    cache_sequences cache_lengths block_table_starts""".split()
)
_of_starts = "cu_seqlens_q", "cu_seqlens_kv", "block_table_starts"
# The keywords that calls share, with their defaults: of choose_keys, and of all others.
_choice_keywords = {
    "is_causal": False,
    "attention_arithmetic": "f32",
    "window_left": None,
    "window_right": None,
    "q_lengths": None,
    "kv_lengths": None,
    "padding": "right",
    "q_first_rows": None,
    "kv_first_rows": None,
    "cu_seqlens_q": None,
    "cu_seqlens_kv": None,
    "q_first_positions": None,
    "norm": None,
    "rope": None,
    "cache": None,
    "cache_sequences": None,
    "cache_lengths": None,
    "block_tables": None,
    "block_table_starts": None,
    "cache_read": False,
    "scheduler": None,
}
_keywords = {**_choice_keywords, "equal_scores": False, "score": None}


def _complete(call, keywords=_keywords):
    """All shared keywords of a call, of which it is given some."""
    all_of_them = {**keywords, **call}
    if len(all_of_them) > len(keywords):
        unknown = next(name for name in call if name not in keywords)
        raise TypeError(f"unexpected keyword argument {unknown!r}")
    return all_of_them


def _arrays_of_sequences(call):
    """The arrays of mha_sequences that a call is given, by name; _no_arrays without any."""
    for name in _no_arrays:
        if call.get(name) is not None:
            break
    else:
        return _no_arrays
    arrays = {name: _integers(call.get(name), name) for name in _no_arrays}
    if arrays["cu_seqlens_q"] is None and arrays["cu_seqlens_kv"] is not None:
        raise ValueError(
            "cu_seqlens_kv is given, but there is no cu_seqlens_q; give both, for packed sequences,"
            " or neither"
        )
    for name, array in arrays.items():
        if array is not None and array.ndim != 1:
            extent = "[sequences + 1]" if name in _of_starts else "[sequences]"
            raise ValueError(f"{name} is {_describe(array)}; it must be one-dimensional, {extent}")
    return arrays


def _set_call(args, call, extents, is_self=False):
    """Sets the fields of the keywords that calls share; `call` has them by name. extents are batch,
    n_q, n_kv, num_heads, num_kv_heads, head_dim and head_dim_v. Arrays of rows are of the batch,
    which is 1 with cu_seqlens_q, for any number of sequences. Returns the arrays of mha_sequences
    by name, and a function that says how many rows of keys each sequence has."""
    batch, n_q, n_kv, num_heads, num_kv_heads, head_dim, head_dim_v = extents
    arrays, cache, rope = _arrays_of_sequences(call), call["cache"], call["rope"]
    cache_read, sequences = _is_true(call["cache_read"], "cache_read"), batch
    lengths = None if cache_read else functools.partial(_appended, n_kv, arrays, is_self)
    if cache is not None:
        _must_be(_caches, cache, "cache")
    elif cache_read:
        raise ValueError("cache_read is True, but there is no cache; give the cache too")
    elif arrays["cache_sequences"] is not None:
        raise ValueError("cache_sequences is given, but there is no cache; give the cache too")
    tables, has_pool = call["block_tables"], isinstance(cache, KvPool)
    if has_pool or tables is not None or arrays is not _no_arrays:
        _check_of_pool({**arrays, "block_tables": tables}, has_pool)
    if _named(_paddings, call["padding"], "padding") and arrays is not _no_arrays:
        arrays = {**arrays, **_left(arrays, batch, n_q, n_kv)}
    if rope is not None:
        _must_be(Rope, rope, "rope")
        args.rope = rope._struct()
    if has_pool or arrays is not _no_arrays or rope is not None and rope._has_positions():
        args.sequences = struct = _new(_Sequences)
        if arrays["cu_seqlens_q"] is not None:
            sequences = _set_packed(args, struct, batch, n_q, arrays)
        for name, values in arrays.items():
            if values is not None and name not in _of_starts:
                _check(values, name, None, (sequences,))
                setattr(struct, name, values)
        if has_pool:
            _set_tables(struct, tables, arrays["block_table_starts"], sequences)
        if rope is not None:
            rope._set_positions(struct, batch, n_q, n_kv)
    flags = _causal if _is_true(call["is_causal"], "is_causal") else 0
    flags |= _equal_scores if _is_true(call["equal_scores"], "equal_scores") else 0
    left, right = call["window_left"], call["window_right"]
    if left is not None:
        flags, args.window_left = flags | _window_left, _window(left, "window_left")
    if right is not None:
        flags, args.window_right = flags | _window_right, _window(right, "window_right")
    args.flags, arithmetic = flags, call["attention_arithmetic"]
    if arithmetic != "f32":
        args.attention_arithmetic = _named(
            _attention_arithmetics, arithmetic, "attention_arithmetic"
        )
    if cache_read:
        args.cache_read = cache
    elif cache is not None:
        args.cache = cache._changed()
    score, norm, scheduler = call["score"], call["norm"], call["scheduler"]
    if score is not None:
        _must_be(ScoreOptions, score, "score")
        is_of_new = score.column_keys == "new_keys"
        columns = n_kv if is_of_new else _longest(batch, n_kv, cache, arrays, lengths)
        args.score, args.score_arrays = score._structs(batch, num_heads, num_kv_heads, n_q, columns)
    if norm is not None:
        _must_be(Norm, norm, "norm")
        args.norm = norm._struct(num_heads, num_kv_heads, head_dim, head_dim_v)
    if scheduler is not None:
        _must_be(Scheduler, scheduler, "scheduler")
        args.scheduler = scheduler._struct
    return arrays, lengths


def _check_of_pool(given, has_pool):
    """Raises where arrays do not fit the kind of the cache."""
    for name in "cache_lengths", "block_tables":
        if has_pool and given[name] is None:
            raise ValueError(f"{name} is None, but the cache is a KvPool; give those of the call")
    for name in ("cache_sequences",) if has_pool else ("cache_lengths", *_of_tables):
        if given[name] is not None:
            kind = "a KvPool" if has_pool else "not a KvPool"
            raise ValueError(f"{name} is given, but the cache is {kind}; leave it out")


_of_tables = "block_tables", "block_table_starts"


def _set_tables(struct, tables, starts, sequences):
    """Sets the block tables of a pool, beyond whose array the library must not read."""
    shape = (sequences, None) if starts is None else (None,)
    if not (
        type(tables) is np.ndarray
        and tables.dtype == np.int32
        and tables.ndim == 2
        and tables.strides[1] == 4
        and tables.strides[0] >= 4 * tables.shape[1]
    ):
        tables = _integers(tables, "block_tables", shape, np.int32)
    _check(tables, "block_tables", None, shape)
    struct.block_tables, struct.block_table_entries = tables, tables.shape[-1]
    if starts is not None:
        _check(starts, "block_table_starts", None, (sequences + 1,))
        struct.block_table_starts = starts
    elif not tables.flags.c_contiguous:
        struct.block_table_stride = tables.strides[0] // 4


def _window(size, name):
    size = _number(size, name)
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
        if arrays[name] is not None:
            _check(arrays[name], name, None, (count + 1,))
            if count:
                setattr(struct, name, arrays[name])
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


def _appended(rows, arrays, is_self):
    """How many rows of keys each sequence has in a call; None stands for all rows. arrays are those
    of mha_sequences by name."""
    side = "q" if is_self else "kv"
    cu_seqlens = arrays["cu_seqlens_q" if arrays["cu_seqlens_kv"] is None else "cu_seqlens_" + side]
    if cu_seqlens is not None:
        return np.diff(cu_seqlens)
    lengths, first_rows = arrays[side + "_lengths"], arrays[side + "_first_rows"]
    return (
        [rows - int(first) for first in first_rows]
        if lengths is None and first_rows is not None
        else lengths
    )


def _longest(batch, n_kv, cache, arrays, lengths):
    """The columns of an array with a number for each pair of query and key. Lengths beyond n_kv,
    which the library refuses, make none longer."""
    if cache is None:
        return n_kv
    cu_seqlens, numbers = arrays["cu_seqlens_q"], arrays["cache_sequences"]
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    lengths = lengths and lengths()
    rows = [n_kv] * sequences if lengths is None else lengths
    if isinstance(cache, KvPool):
        before = arrays["cache_lengths"].clip(0, cache.shape["capacity"])
    else:
        numbers = range(sequences) if numbers is None else numbers
        before = [cache.length(int(sequence)) for sequence in numbers]
    return max(
        [int(length) + max(min(int(count), n_kv), 0) for length, count in zip(before, rows)],
        default=0,
    )


def _check_want(want):
    if isinstance(want, str):
        raise TypeError(f"want is a str; pass a list such as [{want or 'lse'!r}]")
    try:
        return want if isinstance(want, dict) else dict.fromkeys(want)
    except TypeError:
        raise TypeError(f"want is {_kind(want)}; it must be a list of names") from None


def _wanted(args, want, is_single, extents, cache, arrays_of_sequences, lengths):
    """Arrays for the optional outputs, by name."""
    if not want:
        return {}
    batch, n_q, n_kv, num_heads, num_kv_heads, head_dim, head_dim_v = extents
    given, arrays = _check_want(want), {}
    seen = _longest(batch, n_kv, cache, arrays_of_sequences, lengths)
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
    want = _check_want(want)
    for output in want:
        _named(dict.fromkeys(_optional_outputs), output, "want")
    _point_to(args, dict.fromkeys(want, _somewhere))
    info = _new(_CallInfo)
    _call(name, *before, args, info)
    return dict(_fields(info))
