"""The threads of an OpenMP runtime that the process has already, such as PyTorch's, as schedulers
of calls: no others are started besides."""

import ctypes
import os
import pathlib
import sys

from ._library import _loaded
from ._structs import _Scheduler

_file_name = "libmha_openmp" + {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
_schedulers: dict = {}  # number of threads -> the struct and its address; without OpenMP None and 0
_functions = None  # those that structs point to


def _load():
    """parallel_for (openmp.c), and the functions that are its context; None where one of them is
    not there."""
    folders = [
        pathlib.Path(__file__).resolve().parent,
        pathlib.Path(_loaded()._name).resolve().parent,
    ]
    found = [folder / _file_name for folder in folders if (folder / _file_name).exists()]
    for name in "libgomp.so.1", None:  # by its own name, else among all that is loaded
        try:
            runtime = ctypes.CDLL(name, mode=ctypes.DEFAULT_MODE | getattr(os, "RTLD_NOLOAD", 0))
            functions = [
                getattr(runtime, function)
                for function in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
            ]
            return ctypes.CDLL(str(found[0])).mha_openmp_parallel_for, (ctypes.c_void_p * 3)(
                *map(_address, functions)
            )
        except (OSError, TypeError, AttributeError, IndexError):  # TypeError: of None, on Windows
            pass
    return None


def _forked():
    """A child of fork has none of its parent's threads, for which GCC's runtime waits forever."""
    global _functions, _load
    _schedulers.clear()
    _functions, _load = None, lambda: None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


def scheduler(num_threads):
    """The address of a scheduler over this many threads of OpenMP; 0 is the calling thread alone:
    for one thread, or without OpenMP."""
    global _functions
    if num_threads not in _schedulers:
        _functions, struct = _functions or _load(), None
        if num_threads > 1 and _functions:
            struct = _Scheduler(
                context=_functions[1], num_threads=num_threads, parallel_for=_functions[0]
            )
        _schedulers[num_threads] = struct, ctypes.addressof(struct) if struct else 0
    return _schedulers[num_threads][1]
