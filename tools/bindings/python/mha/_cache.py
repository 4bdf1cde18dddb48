"""The KV cache."""

from __future__ import annotations

import ctypes
import inspect
from typing import TYPE_CHECKING

import numpy as np

from . import _arrays, _structs
from ._arrays import (
    _buffer,
    _check,
    _describe,
    _dtypes,
    _integers,
    _named,
    _needed,
    _writeable,
    aligned,
)
from ._docs import documented
from ._library import _call
from ._structs import (
    _CacheConfig,
    _new,
    _NotCopied,
    _Pool,
    _set_field,
    cache_kinds,
    cache_values,
    given_types,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import CacheConfig, Integers


def _config(
    *,
    num_sequences,
    capacity,
    num_kv_heads,
    head_dim,
    head_dim_v=0,
    k_type="f32",
    v_type=None,
    kind="contiguous",
    value_place="own",
    block_positions=0,
    num_blocks=0,
):
    return _new(
        _CacheConfig,
        num_sequences=num_sequences,
        capacity=capacity,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        k_type=_named(given_types, k_type, "k_type"),
        v_type=0 if v_type is None else _named(given_types, v_type, "v_type"),
        kind=_named(cache_kinds, kind, "kind"),
        value_place=_named(cache_values, value_place, "value_place"),
        block_positions=block_positions,
        num_blocks=num_blocks,
    )


# All keywords of a cache, with their defaults.
_keywords = {name: one.default for name, one in inspect.signature(_config).parameters.items()}


@documented(_keywords)
class KvCache(_NotCopied):
    """Keys and values of earlier calls, in one buffer.

    A new token then costs one row of projections and one pass over the cache. Calls that modify a
    cache must not run concurrently with any other call that uses it; calls that only read it may.

    Parameters
    ----------
    num_kv_heads : int
        Number of key and value heads, those of the layer.
    head_dim : int
        Width of a key of one head.
    buffer : ndarray of uint8, shape (bytes,)
        Memory for the cache: at least `size` bytes, aligned to 64 as by `aligned`. None makes it.

    Attributes
    ----------
    buffer : ndarray of uint8
        The whole cache, which can be copied, saved, and viewed again.
    shape : mapping from str to int or str
        The keywords of the cache, with all defaults resolved: ``mha.KvCache(**cache.shape)`` makes
        another one like it.

    Examples
    --------
    >>> cache = mha.KvCache(num_sequences=2, capacity=64, num_kv_heads=1, head_dim=4, k_type="int8")
    >>> k = v = q = np.random.rand(2, 3, 1, 4).astype(np.float32)
    >>> y = mha.attention(q, k, v, is_causal=True, cache=cache)
    >>> cache.length(0), cache.shape["v_type"]
    (3, 'int8')
    """

    _fixed = ("shape", "buffer")
    _instead = (
        "copy its buffer (into one of mha.aligned, or a file), and use KvCache.view of the copy"
    )

    def __init__(self, *, buffer: np.ndarray | None = None, **config: Unpack[CacheConfig]) -> None:
        self.buffer, handle = (
            aligned(self.size(**config)) if buffer is None else _writeable(buffer, "buffer"),
            ctypes.c_void_p(),
        )
        _call("mha_kv_cache_init", _config(**config), *_buffer(self.buffer, "buffer"), handle)
        self._adopt(handle)

    @classmethod
    @documented(_keywords)
    def size(cls, **config: Unpack[CacheConfig]) -> int:
        """Number of bytes of a cache.

        Parameters
        ----------
        num_kv_heads : int
            Number of key and value heads, those of the layer.
        head_dim : int
            Width of a key of one head.

        Returns
        -------
        int
            Bytes that a buffer must have at least.
        """
        bytes = ctypes.c_size_t()
        _call("mha_kv_cache_size", _config(**config), bytes)
        return bytes.value

    @classmethod
    @documented()
    def view(cls, buffer: np.ndarray) -> KvCache:
        """Make a cache over a buffer that holds one already.

        Parameters
        ----------
        buffer : ndarray of uint8, shape (bytes,)
            A copy of another cache's buffer, aligned to 64 bytes as by `aligned`, or numpy.memmap
            of a file. If it cannot be written to, the cache can only be read.

        Returns
        -------
        KvCache
            The cache, which keeps `buffer` alive.
        """
        self, handle = cls.__new__(cls), ctypes.c_void_p()
        self.buffer = buffer
        _call("mha_kv_cache_view", *_buffer(buffer, "buffer"), handle)
        self._adopt(handle)
        return self

    def _adopt(self, handle):
        self._handle, self._parts = handle.value, {"cache": self.buffer}
        self.shape = _shape(self)

    def _changed(self):
        """The cache, for what changes it."""
        if not self.buffer.flags.writeable:
            raise ValueError(
                "the cache lies in a buffer that cannot be written to; it can be read"
                " (cache_read=True), and KvCache.view of a copy of the buffer (mha.aligned) is a"
                " cache that can be changed"
            )
        return self

    @documented()
    def length(self, sequence: int = 0) -> int:
        """Number of positions of a sequence, with those that a ring has overwritten.

        Parameters
        ----------

        Returns
        -------
        int
            Positions.
        """
        length = ctypes.c_int64()
        _call("mha_kv_cache_length", self, *_numbers(sequence=sequence), length)
        return length.value

    @documented()
    def truncate(self, sequence: int, length: int) -> None:
        """Shorten a sequence to its first `length` positions.

        Parameters
        ----------
        length : int
            Positions that stay; 0 empties the sequence.
        """
        numbers = _numbers(sequence=sequence, length=length)
        _call("mha_kv_cache_truncate", self._changed(), *numbers)

    @documented()
    def set_blocks(self, sequence: int, blocks: Integers) -> None:
        """Set the blocks of a sequence of a paged cache.

        Parameters
        ----------
        blocks : array_like of int, shape (count,)
            Numbers of blocks, in the order of their positions. Those that hold positions of the
            sequence stay in their places.
        """
        if blocks is None:
            raise TypeError("blocks is None; it must be integers")
        array = _integers(blocks, "blocks", (None,), np.int32)
        numbers = _numbers(sequence=sequence)
        _call("mha_kv_cache_set_blocks", self._changed(), *numbers, array, array.size)

    @documented()
    def unshare(self, sequence: int, block: int) -> bool:
        """Copy the last block of a sequence of a paged cache if other sequences share it.

        Call this before rows are appended to a sequence that shares blocks.

        Parameters
        ----------
        block : int
            A free block, which takes the place of the shared one; -1 if none is free.

        Returns
        -------
        bool
            Whether `block` is used. It is not if the last block is full or not shared.
        """
        used, block = ctypes.c_uint32(), _structs._number(block, "block", "i32")
        _call("mha_kv_cache_unshare", self._changed(), *_numbers(sequence=sequence), block, used)
        return bool(used.value)

    @documented()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Replace a sequence by the first positions of another one.

        Parameters
        ----------
        source : int
            Number of the sequence that is read.
        target : int
            Number of the sequence that is replaced. In a paged cache it has blocks for the
            positions; those that both have are not copied.
        length : int
            Number of positions.
        """
        numbers = _numbers(source=source, target=target, length=length)
        _call("mha_kv_cache_copy_prefix", self._changed(), *numbers)

    @documented()
    def append(self, sequence: int, k: np.ndarray, v: np.ndarray | None = None) -> None:
        """Append rows to a sequence, without attention.

        Parameters
        ----------
        k : ndarray of float32, shape (count, num_kv_heads, head_dim)
            Keys, normalised and rotated.
        v : ndarray of float32, shape (count, num_kv_heads, head_dim_v)
            Values; None if the cache has its values in its keys.
        """
        heads = self.shape["num_kv_heads"]
        _needed(k, "k", [np.float32], (None, heads, self.shape["head_dim"]))
        has_values = v is not None or self.shape["value_place"] == "own"
        if has_values:
            _needed(v, "v", [np.float32], (len(k), heads, self.shape["head_dim_v"]))
        numbers, v = _numbers(sequence=sequence), v if has_values else None
        _arrays._check_memory({"cache": self.buffer}, {"k": k, "v": v})
        _call("mha_kv_cache_append", self._changed(), *numbers, len(k), k, v)

    @documented()
    def read(self, sequence: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Read positions of a sequence as the numbers that attention uses.

        Parameters
        ----------
        first : int
            The first position.
        count : int
            Number of positions.

        Returns
        -------
        k : ndarray of float32, shape (count, num_kv_heads, head_dim)
            Keys.
        v : ndarray of float32, shape (count, num_kv_heads, head_dim_v)
            Values.
        """
        sequence, first, count = _numbers(sequence=sequence, first=first, count=count)
        heads = self.shape["num_kv_heads"]
        rows = max(min(count, self.length(sequence)), 0)  # the library refuses more than there are
        k, v = (
            np.empty((rows, heads, self.shape[width]), np.float32)
            for width in ("head_dim", "head_dim_v")
        )
        _call("mha_kv_cache_read", self, sequence, first, count, k, v)
        return k, v


def _shape(cache):
    config = _new(_CacheConfig)
    _call("mha_kv_cache_shape", cache, config)
    return _arrays._named_fields(
        config, k_type=given_types, v_type=given_types, kind=cache_kinds, value_place=cache_values
    )


_stored_types = {np.dtype(dtype): name for name, dtype in _dtypes.items()}


def _stored(array, name, type):
    """The type of the numbers of an array of blocks."""
    if type is None:
        _check(array, name, _stored_types)
        return _stored_types[array.dtype]
    _check(array, name, [np.dtype(_named(_dtypes, type, f"{name}_type"))])
    return type


@documented()
class KvPool(_NotCopied):
    """Blocks of keys and values in the caller's arrays, whose sequences the caller keeps.

    A serving engine passes it as `cache`, with `cache_lengths` and `block_tables`: the call
    computes what it would over a paged `KvCache`, with the same bits. Calls that write different
    blocks may run concurrently.

    Axis 0 of an array is the block, from which to the next there may be other memory; keys and
    values may be views of one array. The rest of an array has the bytes of a block, without strides
    and in any shape: keys (num_kv_heads, block_positions / 16, head_dim, 16), with values in keys
    (num_kv_heads, block_positions, ceil16(head_dim)), values (num_kv_heads, block_positions,
    ceil16(head_dim_v)), of int4 half as many, and scales (num_kv_heads, block_positions), where
    ceil16 rounds up to a multiple of 16. Arrays are aligned to 64 bytes, as by `aligned`, and need
    not be initialised.

    Parameters
    ----------
    k : ndarray of `k_type`, shape (num_blocks, ...)
        Keys. The pool keeps all arrays alive; if one cannot be written to, it can only be read.
    v : ndarray of `v_type`, shape (num_blocks, ...)
        Values; None with ``value_place="in_keys"``.
    k_scales : ndarray of float32, shape (num_blocks, ...)
        Scales of int8 keys; None for others.
    v_scales : ndarray of float32, shape (num_blocks, ...)
        Scales of int8 and int4 values; None for others.
    num_sequences : int
        The most sequences of a call.
    num_kv_heads : int
        Number of key and value heads, those of the layer.
    head_dim : int
        Width of a key of one head.
    k_type : {types}
        Type of the keys, which is not int4. None is that of `k`: bf16 of uint16, int4 of uint8.
    v_type : {types}
        Type of the values; None is that of `v`.

    Attributes
    ----------
    shape : mapping from str to int or str
        The numbers and names of the pool, with all defaults resolved.

    Examples
    --------
    >>> kv = mha.aligned(8 * 2 * 1024).view(np.float32).reshape(8, 2, 256)  # 8 blocks, k beside v
    >>> shape = {"num_kv_heads": 1, "head_dim": 16, "block_positions": 16}
    >>> pool = mha.KvPool(kv[:, 0], kv[:, 1], num_sequences=2, capacity=64, **shape)
    >>> q = k = v = np.random.rand(2, 3, 1, 16).astype(np.float32)
    >>> tables = {"cache_lengths": [0, 0], "block_tables": [[5], [2]]}
    >>> y = mha.attention(q, k, v, is_causal=True, cache=pool, **tables)
    >>> np.array_equal(y, mha.attention(q, k, v, is_causal=True))
    True
    """

    _fixed = ("shape", "k", "v", "k_scales", "v_scales")
    _instead = "make another one of the same arrays"

    def __init__(
        self,
        k: np.ndarray,
        v: np.ndarray | None = None,
        *,
        k_scales: np.ndarray | None = None,
        v_scales: np.ndarray | None = None,
        num_sequences: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int = 0,
        block_positions: int,
        k_type: str | None = None,
        v_type: str | None = None,
        value_place: str = "own",
    ) -> None:
        self.k, self.v, self.k_scales, self.v_scales = k, v, k_scales, v_scales
        more = {"v": v, "k_scales": k_scales, "v_scales": v_scales}
        given = {"k": k, **{name: array for name, array in more.items() if array is not None}}
        kinds = {"k": k_type, "v": v_type, "k_scales": "f32", "v_scales": "f32"}
        kinds.update({name: _stored(array, name, kinds[name]) for name, array in given.items()})
        config = _config(
            num_sequences=num_sequences,
            capacity=capacity,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            k_type=kinds["k"],
            v_type=kinds["v"],
            kind="pool",
            value_place=value_place,
            block_positions=block_positions,
            num_blocks=len(k) if k.ndim else 0,
        )
        bytes, pool, handle = ctypes.c_size_t(), _new(_Pool), ctypes.c_void_p()
        _call("mha_kv_cache_size", config, bytes)  # says what is wrong with the numbers
        k_width = head_dim if value_place == "own" else -(-head_dim // 16) * 16
        v_width = -(-(head_dim_v or head_dim) // 16) * (8 if kinds["v"] == "int4" else 16)
        widths = {"k": k_width, "v": v_width, "k_scales": 1, "v_scales": 1}
        for name, array in given.items():
            of_block = num_kv_heads * block_positions * widths[name] * array.itemsize
            stride = array.strides[0] if array.ndim and len(array) > 1 else of_block
            is_whole = array.shape[:1] == k.shape[:1] and stride >= of_block == array[0].nbytes
            if not (is_whole and array[0].flags.c_contiguous):
                raise ValueError(
                    f"{name} is {_describe(array)} with strides of {array.strides} bytes; it must"
                    f" have {len(k)} blocks of {of_block} bytes without strides inside"
                )
            _set_field(pool, name, array.ctypes.data)
            _set_field(pool, name + "_block_stride", stride)
        self._header = aligned(bytes.value)
        _call("mha_kv_pool_init", config, pool, *_buffer(self._header, "buffer"), handle)
        self._handle = handle.value
        self.shape = _shape(self)
        self._parts = {"cache." + name: array for name, array in given.items()}

    def _changed(self):
        """The pool, for what changes it."""
        for name, array in self._parts.items():
            _writeable(array, name)
        return self


_caches = KvCache, KvPool


def _numbers(**integers):
    return [_structs._number(value, name) for name, value in integers.items()]
