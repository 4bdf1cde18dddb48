"""The KV cache."""

from __future__ import annotations

import ctypes
import inspect
from typing import TYPE_CHECKING

import numpy as np

from . import _arrays, _structs
from ._arrays import _buffer, _integers, _named, _needed, _writeable, aligned
from ._docs import documented
from ._library import _call
from ._structs import _CacheConfig, _new, _NotCopied, cache_kinds, cache_values, types

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
        k_type=_named(types, k_type, "k_type"),
        v_type=0 if v_type is None else _named(types, v_type, "v_type"),
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
        self._handle = handle.value
        config = _new(_CacheConfig)
        _call("mha_kv_cache_shape", self, config)
        self.shape = _arrays._named_fields(
            config, k_type=types, v_type=types, kind=cache_kinds, value_place=cache_values
        )

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


def _numbers(**integers):
    return [_structs._number(value, name) for name, value in integers.items()]
