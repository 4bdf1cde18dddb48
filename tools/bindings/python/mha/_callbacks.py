"""Schedulers: the caller's functions that run tasks of the library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING

from ._docs import documented
from ._structs import _kind, _NotCopied, _Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
_ParallelFor = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, _Task, ctypes.c_void_p)


@documented()
class Scheduler(_NotCopied):
    """Threads for calls.

    A child of fork has none of its parent's threads: there, the calling thread does the tasks of a
    scheduler that the parent made.

    Parameters
    ----------
    num_threads : int
        The most tasks at once; >= 1.
    parallel_for : callable
        ``parallel_for(count, task)`` calls ``task(index)`` once for each index below count, and
        returns when all have returned. What it raises is raised by the call.

    Examples
    --------
    >>> import concurrent.futures
    >>> pool = concurrent.futures.ThreadPoolExecutor(2)
    >>> scheduler = mha.Scheduler(2, lambda count, task: list(pool.map(task, range(count))))
    >>> q = np.ones((64, 4, 16), np.float32)
    >>> y = mha.attention(q, q, q, scheduler=scheduler)
    """

    _instead = "use this one, or make another one with Scheduler(num_threads, parallel_for)"

    def __init__(
        self, num_threads: int, parallel_for: Callable[[int, Callable[[int], None]], object]
    ) -> None:
        if not callable(parallel_for):
            raise TypeError(f"parallel_for is {_kind(parallel_for)}; it must be a function")
        process = os.getpid()

        def run(_, count, task, context):
            started = [False] * count

            def start(index):
                started[index] = True
                task(context, index)

            try:
                if os.getpid() == process:
                    parallel_for(count, start)
            except BaseException as exception:
                self._keep(exception)
            for index in range(count):
                if not started[index]:
                    start(index)

        self._kept: dict = {}  # thread -> exception
        self._callback = _ParallelFor(run)
        self._struct = _Scheduler(num_threads=num_threads, parallel_for=self._callback)

    def _keep(self, exception):
        """C cannot pass on what is raised here: it is kept, and raised when the call of that thread
        is over."""
        self._kept[threading.get_ident()] = exception

    @contextlib.contextmanager
    def _raising(self):
        try:
            yield
        finally:
            exception = self._kept.pop(threading.get_ident(), None)
            if exception is not None:
                raise exception
