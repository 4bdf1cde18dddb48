"""Functions of the caller's that the library calls: schedulers, products and allocators."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING

import numpy as np

from ._arrays import _buffer, _writeable
from ._structs import _AllocatorStruct, _Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable


class _Callback:
    """What is raised in one, C cannot pass on: it is kept, and raised when the call of that thread is over."""

    def __init__(self):
        self._kept = {}  # thread -> exception

    def _keep(self, exception):
        self._kept[threading.get_ident()] = exception

    def _raise_kept(self):
        exception = self._kept.pop(threading.get_ident(), None)
        if exception is not None:
            raise exception


def _raising(*callbacks):
    """Raises what was raised in them, rather than what the library says to it."""
    return _nothing if all(callback is None for callback in callbacks) else _raising_kept(callbacks)


@contextlib.contextmanager
def _raising_kept(callbacks):
    try:
        yield
    finally:
        for callback in callbacks:
            if callback is not None:
                callback._raise_kept()


_nothing = contextlib.nullcontext()


_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
_ParallelFor = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, _Task, ctypes.c_void_p)
_Product = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 6, ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
                            ctypes.c_float, ctypes.c_void_p, ctypes.c_int)
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Scheduler(_Callback):
    """Threads for calls: parallel_for(count, task) must call task(index) once for each index below count, and return when all have returned.

        pool = concurrent.futures.ThreadPoolExecutor(4)
        scheduler = mha.Scheduler(4, lambda count, task: list(pool.map(task, range(count))))
    """

    def __init__(self, num_threads: int, parallel_for: Callable[[int, Callable[[int], None]], object]) -> None:
        def run(_, count, task, context):
            started = [False] * count

            def start(index):
                started[index] = True
                task(context, index)

            try:
                parallel_for(count, start)
            except BaseException as exception:
                self._keep(exception)
            for index in range(count):
                if not started[index]:
                    start(index)

        super().__init__()
        self._callback = _ParallelFor(run)
        self._struct = _Scheduler(num_threads=num_threads, parallel_for=ctypes.cast(self._callback, ctypes.c_void_p))


class _Sgemm(_Callback):
    """The sgemm of a layer: a function of C as it is, or one of Python over arrays."""

    def __init__(self, multiply):
        def run(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):  # order and trans are always the same
            try:
                multiply(_matrix(a, m, k, lda), _matrix(b, k, n, ldb), _matrix(c, m, n, ldc), alpha, beta)
            except BaseException as exception:
                self._keep(exception)

        super().__init__()
        if not callable(multiply):
            raise TypeError(f"sgemm is a {type(multiply).__name__}; it must be a function")
        self._function = multiply if isinstance(multiply, ctypes._CFuncPtr) else _Product(run)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value


class _Allocator(_Callback):
    """The allocator of a layer, for the one block of memory that it takes."""

    def __init__(self, allocate):
        def run(_, bytes):
            try:
                self._block = allocate(bytes)
                return None if self._block is None else _room(self._block, bytes)
            except BaseException as exception:
                self._keep(exception)

        def release(*_):
            self._block = None

        super().__init__()
        if not callable(allocate):
            raise TypeError(f"allocator is a {type(allocate).__name__}; it must be a function")
        self._functions = _Allocate(run), _Release(release)
        self.struct = _AllocatorStruct(None, *[ctypes.cast(function, ctypes.c_void_p).value for function in self._functions])


def _matrix(address, rows, columns, stride):
    """The matrix at an address, as an array."""
    row = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), ((rows - 1) * stride + columns,))
    return np.lib.stride_tricks.as_strided(row, (rows, columns), (4 * stride, 4))


def _room(block, bytes):
    """The address of what an allocator returned."""
    address, size = _buffer(_writeable(block, "the allocator's array"), "the allocator's array")
    if size < bytes or address % 16:
        raise ValueError(f"the allocator's array has {size} bytes at address {address:#x}; there must be {bytes} on a border of 16, as in those "
                         "of mha.aligned")
    return address
