"""Arrays, checked for type, shape and layout before the library sees them."""

from __future__ import annotations

import ctypes
import functools
import threading

import numpy as np

from . import _structs
from ._docs import documented
from ._structs import _broadcast, _Error, _Input, _Output, _start, _Strides, _writeable, types

_rows_bf16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16)
_rows = _rows_bf16[:2]
_row_dtypes = dict(zip(("f32", "f16", "bf16"), _rows_bf16))
_row_names = {name: types[name] for name in _row_dtypes}
_row_numbers = {dtype: types[name] for name, dtype in _row_dtypes.items()}
_dtypes = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "int8": np.int8,
    "int4": np.uint8,
}


def _named(table, name, what):
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{what} is {name!r}; it must be one of {', '.join(map(repr, table))}")
    return table[name]


def _describe(array):
    return f"{array.dtype} {list(array.shape)}"


def _must_be(kind, value, name):
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(f"an mha.{one.__name__}" for one in kinds)
        raise TypeError(f"{name} is a {type(value).__name__}; it must be {wanted}")


def _named_fields(struct, **tables):
    """The fields of a struct by name, with names for the numbers of those that have a table."""
    numbers = dict(_structs._fields(struct))
    for field, table in tables.items():
        numbers[field] = {number: name for name, number in table.items()}[numbers[field]]
    return _structs._Numbers(numbers)


# An extent in a shape. 0 would reach the library as "the default", and it would read or write
# beyond the array.
_some = "at least 1"


def _check(array, name, dtypes=None, shape=None):
    """Raises unless array is of one of the types and of the shape, whose None stands for any extent
    and _some for any but 0; None for any type or shape."""
    if type(array) is not np.ndarray:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is {_structs._kind(array)}; it must be a NumPy array")
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array, whose mask would be ignored; pass {name}.filled(...)"
            )
    if dtypes is not None and array.dtype not in dtypes:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} is {_describe(array)}; its type must be {wanted}")
    if shape is not None:
        fits = array.ndim == len(shape)
        for extent, has in zip(shape, array.shape):
            if extent is not None and (has == 0 if extent is _some else has != extent):
                fits = False
        if not fits:
            wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
            raise ValueError(f"{name} is {_describe(array)}; its shape must be [{wanted}]")
    if not array.flags.aligned:
        raise ValueError(
            f"{name} is not aligned to elements of {array.itemsize} bytes; pass an array that is"
        )


def _batched(dimensions, **arrays):
    """The arrays with a batch of 1. The first one has this many dimensions, without a batch."""
    first = next(iter(arrays))
    for name, array in arrays.items():
        if isinstance(array, np.ndarray) and array.ndim > dimensions + (name == "snapshots"):
            raise ValueError(
                f"{name} is {_describe(array)}, but {first} is {_describe(arrays[first])}, without"
                " a batch; leave it out of both"
            )
    return [array[None] if isinstance(array, np.ndarray) else array for array in arrays.values()]


def _remedy(name, is_written):
    """What to do about the layout of an array. A copy of one that is written to would take the
    result, and be gone."""
    return (
        "pass a contiguous array"
        if is_written
        else f"np.ascontiguousarray({name}) makes it contiguous"
    )


def _contiguous(array, name, dtypes, shape, is_written=False):
    """The array, which must be one without strides; None stays None."""
    if array is None:
        return None
    _check(array, name, dtypes, shape)
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous; {_remedy(name, is_written)}")
    return array


def _needed(array, name, dtypes, shape, is_written=False):
    """The array, which must be given, and be one without strides."""
    if array is None:
        _check(array, name)
    return _contiguous(array, name, dtypes, shape, is_written)


def _strides(array, name, may_repeat=False, is_written=False):
    """The strides of all axes but the last, in elements; all 0 stand for a contiguous array. That
    of an axis of one element, which may be anything, steps over the others; that of one that
    repeats the same elements is 0 to NumPy."""
    if array.flags.c_contiguous or 0 in array.shape:
        return _contiguous_strides[array.ndim]
    item = array.itemsize
    # What queries, keys and values mostly are.
    if array.ndim == 4 and (may_repeat or 1 not in array.shape):
        batch, row, head, step = array.strides
        width = array.shape[3] * item
        if (
            step == item
            and batch >= width <= row
            and head >= width
            and not (batch % item or row % item or head % item)
        ):
            return batch // item, row // item, head // item
    outer = list(zip(array.shape[:-1], array.strides[:-1]))
    beyond = max(
        [extent * stride for extent, stride in outer if extent > 1] + [array.shape[-1] * item]
    )
    strides = [stride if extent > 1 else beyond for extent, stride in outer]
    if (
        array.shape[-1] > 1
        and array.strides[-1] != item
        or any(stride < (0 if may_repeat else 1) or stride % item for stride in strides)
    ):
        raise ValueError(
            f"{name} has strides of {array.strides} bytes, which the library cannot step by;"
            f" {_remedy(name, is_written)}"
        )
    return [stride // item or _broadcast for stride in strides]


def _place(array, name, may_repeat=False, is_written=False):
    """The address of an array, and its strides as _strides has them."""
    if array.flags.c_contiguous:
        return _start(array), _contiguous_strides[array.ndim]
    strides = _strides(array, name, may_repeat, is_written)
    return _start(array[_first_row[array.ndim]] if array.size else array), strides


def _strides_struct(array, name, may_repeat=False, is_written=False):
    """The struct of the strides of an array: [rows, width], [batch, rows, width] or [batch, rows,
    heads, width]."""
    names = ("row",) if array.ndim == 2 else ("batch", "row", "head")
    return _Strides(**dict(zip(names, _strides(array, name, may_repeat, is_written))))


def _input(array, name):
    """The struct of an array that a call reads; of one that is None, that of no array."""
    return (
        _Input()
        if array is None
        else _Input(data=array, type=_row_type(array), strides=_strides_struct(array, name, True))
    )


def _as_rows(array, name, is_written=False):
    """The array as [rows, width], in the same memory; None stays None."""
    if array is None or array.ndim == 2:
        return array
    rows = array.reshape(-1, array.shape[-1])
    if array.size and not np.may_share_memory(rows, array):
        raise ValueError(
            f"{name} has strides of {array.strides} bytes, which the library cannot step by;"
            f" {_remedy(name, is_written)}"
        )
    return rows


_first_row = [(0,) * max(dimensions - 1, 0) for dimensions in range(65)]
_contiguous_strides = [(0,) * max(dimensions - 1, 0) for dimensions in range(65)]


def _array(values, name):
    """Numbers as an array of a type of their own."""
    if isinstance(values, np.ndarray):
        _check(values, name)
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError):  # of lists of different lengths, for example
        raise TypeError(f"{name} is {_structs._kind(values)} and no array of numbers") from None


def _integers(values, name, shape=None, dtype=np.int64):
    """Numbers as an array that the library reads; None stays None."""
    if values is None:
        return None
    array = _array(values, name)
    # [] has no type, and stands for every shape without elements.
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = np.empty(shape if shape and 0 in shape else array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {_describe(array)}; it must be integers")
    if shape is not None:
        _check(array, name, None, shape)
    if array.dtype != dtype and array.size:
        limits = np.iinfo(dtype)
        if not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
            raise ValueError(
                f"{name} reaches from {array.min()} to {array.max()}; the library takes numbers"
                f" from {limits.min} to {limits.max}"
            )
    return np.asarray(array, dtype, order="C")


@documented()
def aligned(bytes: int) -> np.ndarray:
    """Make an array of bytes that is aligned to 64 bytes, as packed weights and caches need it.

    Parameters
    ----------
    bytes : int
        Number of bytes.

    Returns
    -------
    ndarray of uint8, shape (bytes,)
        The array, whose contents are arbitrary.

    Examples
    --------
    >>> mha.aligned(100).ctypes.data % 64
    0
    """
    bytes = _structs._number(bytes, "bytes")
    if bytes < 0:
        raise ValueError(f"bytes is {bytes}; it must be at least 0")
    room = np.empty(bytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    return room[first : first + bytes]


def _buffer(array, name):
    """A buffer and its size: an array of bytes, which may be a numpy.memmap. It is used where it
    is, whether it is written to or not."""
    return _needed(array, name, [np.uint8], (None,), True), array.size


class _Workspace:
    """What calls compute in, which grows as needed. And where the library says what is wrong."""

    def __init__(self):
        self.error = _Error()
        self.at_error = ctypes.byref(self.error)
        self.grow(4096)

    def grow(self, bytes):
        self.room, self.size = np.empty(bytes, np.uint8), bytes
        self.address = self.room.ctypes.data


class _OfThread(threading.local):
    def __init__(self):
        self.own = _Workspace()


_workspace = _OfThread()


def _output(out, shape, type="f32"):
    dtype = _named(_row_dtypes, type, "output_type")
    if out is None:
        return np.empty(shape, dtype)
    _check(out, "out", [dtype], shape)
    return _writeable(out, "out")


def _output_struct(out):
    """The struct of an array that a call writes."""
    return _Output(
        data=out, type=_row_type(out), strides=_strides_struct(out, "out", is_written=True)
    )


def _read_by(struct):
    """The arrays that a struct and those that it points to have the library read, by name."""
    arrays, names = {}, _pointers(type(struct))
    for at, owner in getattr(struct, "_objects_at", {}).items():
        if isinstance(owner, _structs._Checked):
            arrays.update(_read_by(owner))
        elif names.get(at) == "cache_read":
            arrays.update(owner._parts)
        elif isinstance(owner, np.ndarray) and at in names:
            arrays[names[at]] = owner
    return arrays


@functools.cache
def _pointers(structure):
    """The names of the pointers to what is read, by their offsets; mha_input.data is the input."""
    found = {}
    for field, kind in structure._kinds.items():
        at = getattr(structure, field).offset
        if kind == "ptr":
            found[at] = field
        elif isinstance(kind, type):
            for inner, name in _pointers(kind).items():
                found[at + inner] = field if name == "data" else f"{field}.{name}"
    return found


def _check_memory(written, read, same=()):
    """Raises where an array that a call writes to overlaps another one of the call, as mha.h has it
    under "Aliasing". Arrays are given by name; the pairs of names in `same` may be one array."""
    for name, array in written.items():
        for other, beside in read.items():
            if beside is None or not np.may_share_memory(array, beside):  # by their bounds
                continue
            if name[:6] == other[:6] == "cache.":  # of one pool, as its constructor has checked
                continue
            may_be = (name, other) in same
            if not (may_be and _is_same(array, beside)) and _shares(array, beside):
                itself = f"{other} itself or " if may_be else ""
                raise ValueError(
                    f"{name}, which the call writes to, overlaps {other}; pass {itself}other memory"
                )
        read = {**read, name: array}


def _shares(one, other):
    try:
        return np.shares_memory(one, other, max_work=10**6)  # within milliseconds
    except RuntimeError:  # too hard to say
        return True


def _is_same(one, other):
    steps = _steps(one.shape, one.strides), _steps(other.shape, other.strides)
    is_alike = one.shape == other.shape and one.dtype == other.dtype and steps[0] == steps[1]
    return is_alike and one.ctypes.data == other.ctypes.data


def _steps(shape, strides):
    """The strides that count: those of an axis of one element step nowhere."""
    return [stride for extent, stride in zip(shape, strides) if extent != 1]


def _row_types(bf16):
    return _rows_bf16 if _structs._is_true(bf16, "bf16") else _rows


def _row_type(array):
    """The number of the type of rows."""
    return _row_numbers[array.dtype]
