"""The KV cache."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from . import _arrays, _structs
from ._arrays import _buffer, _integers, _named, _needed, _writeable, aligned
from ._library import _call
from ._structs import _CacheConfig, _new, _NotCopied, cache_kinds, cache_values, types

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import CacheConfig, Integers


class KvCache(_NotCopied):
    """Keys and values of earlier calls. `buffer` is all of it: an array of bytes to be copied,
    written to a file, and viewed again; a given one is used as it is (on a border of 64 bytes).

    The parameters are the fields of mha_kv_cache_config: num_sequences, capacity, num_kv_heads,
    head_dim, head_dim_v, k_type and v_type ("f32", "f16", "bf16", "int8", of values also "int4";
    values have the type of keys if v_type is None), kind ("contiguous", "ring", "paged"), values
    ("own", or "in_keys": a value is the first head_dim_v elements of its key, and v is None in what
    appends), block_positions and num_blocks. What changes a cache must not run at the same time as
    anything else with it.
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
        _call("mha_kv_cache_init", self._config(**config), *_buffer(self.buffer, "buffer"), handle)
        self._adopt(handle)

    @classmethod
    def size(cls, **config: Unpack[CacheConfig]) -> int:
        """The bytes of a cache, which a buffer of the caller's must have at least."""
        bytes = ctypes.c_size_t()
        _call("mha_kv_cache_size", cls._config(**config), bytes)
        return bytes.value

    @staticmethod
    def _config(*, k_type="f32", v_type=None, kind="contiguous", values="own", **config):
        unknown = set(config) - {field for field, _ in _CacheConfig._fields_[1:]}
        if unknown:
            raise TypeError(f"a cache has no {', '.join(sorted(unknown))}")
        return _new(
            _CacheConfig,
            k_type=_named(types, k_type, "k_type"),
            v_type=0 if v_type is None else _named(types, v_type, "v_type"),
            kind=_named(cache_kinds, kind, "kind"),
            values=_named(cache_values, values, "values"),
            **config,
        )

    @classmethod
    def view(cls, buffer: np.ndarray) -> KvCache:
        """The cache that a buffer holds already: a copy of another one's (on a border of 64 bytes:
        mha.aligned), or numpy.memmap of a file. One over memory that cannot be written to
        (mode="r") can be read, with cache_read=True too; what would change it is a ValueError."""
        self, handle = cls.__new__(cls), ctypes.c_void_p()
        self.buffer = buffer
        _call("mha_kv_cache_view", *_buffer(buffer, "buffer"), handle)
        self._adopt(handle)
        return self

    def _adopt(self, handle):
        self._handle = handle.value
        config = _new(_CacheConfig)
        _call("mha_kv_cache_shape", self, config)
        self.shape = _structs._fields(config)

    def _changed(self):
        """The cache, for what changes it."""
        if not self.buffer.flags.writeable:
            raise ValueError(
                "the cache lies in a buffer that cannot be written to; it can be read"
                " (cache_read=True), and KvCache.view of a copy of the buffer (mha.aligned) is a"
                " cache that can be changed"
            )
        return self

    def length(self, sequence: int = 0) -> int:
        """How many positions a sequence has."""
        length = ctypes.c_int64()
        _call("mha_kv_cache_length", self, *_numbers(sequence=sequence), length)
        return length.value

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all positions of a sequence from length on."""
        numbers = _numbers(sequence=sequence, length=length)
        _call("mha_kv_cache_truncate", self._changed(), *numbers)

    def set_blocks(self, sequence: int, blocks: Integers) -> None:
        """Paged only: the blocks of a sequence from now on."""
        if blocks is None:
            raise TypeError("blocks is None; it must be integers")
        array = _integers(blocks, "blocks", (None,), np.int32)
        numbers = _numbers(sequence=sequence)
        _call("mha_kv_cache_set_blocks", self._changed(), *numbers, array, array.size)

    def unshare(self, sequence: int, block: int) -> bool:
        """Paged only, before rows are appended to a sequence: if its last block is partly filled
        and other sequences have it too, copies it to the free block of this number, which takes its
        place. Whether it did: otherwise the block stays free. block=-1 says that none is free."""
        used, block = ctypes.c_uint32(), _structs._number(block, "block", "i32")
        _call("mha_kv_cache_unshare", self._changed(), *_numbers(sequence=sequence), block, used)
        return bool(used.value)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Makes the first length positions of sequence source all that sequence target has."""
        numbers = _numbers(source=source, target=target, length=length)
        _call("mha_kv_cache_copy_prefix", self._changed(), *numbers)

    def append(self, sequence: int, k: np.ndarray, v: np.ndarray | None = None) -> None:
        """Appends rows k [count, num_kv_heads, head_dim] and v [count, num_kv_heads, head_dim_v] to
        a sequence, without attention."""
        heads = self.shape["num_kv_heads"]
        _needed(k, "k", [np.float32], (None, heads, self.shape["head_dim"]))
        has_values = v is not None or not self.shape["values"]
        if has_values:
            _needed(v, "v", [np.float32], (len(k), heads, self.shape["head_dim_v"]))
        numbers, v = _numbers(sequence=sequence), v if has_values else None
        _arrays._check_memory({"cache": self.buffer}, {"k": k, "v": v})
        _call("mha_kv_cache_append", self._changed(), *numbers, len(k), k, v)

    def read(self, sequence: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(k, v): the positions [first, first + count) of a sequence, as the numbers that they are
        taken as."""
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
