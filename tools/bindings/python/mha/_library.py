"""The shared library: found, loaded and called."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import pathlib
import platform
import re
import sys
import threading

from . import _interface
from ._docs import documented
from ._structs import _address, _Error, _kind, instruction_set_names

# Of the functions that return a status: the kinds of parameters before the mha_error.
_signatures = dict(text.split("=") for text in _interface.functions.split())
_others = [
    "mha_version",
    "mha_contract",
    "mha_instruction_sets",
    "mha_status_string",
    "mha_layer_view_size",
    "mha_layer_destroy",
]
_kinds = {
    "p": ctypes.c_void_p,
    "s": ctypes.c_size_t,
    "i": ctypes.c_int64,
    "n": ctypes.c_int32,
    "u": ctypes.c_uint32,
}
# Of the header whose structs are in _structs.py: 10000 * major + 100 * minor + patch.
_version = 100
__version__ = f"{_version // 10000}.{_version // 100 % 100}.{_version % 100}"
_file_name = {"win32": "libmha.dll", "darwin": "libmha.dylib"}.get(sys.platform, "libmha.so")
_library = None
_lock = threading.Lock()
_plain = int, type(None)  # addresses that the caller of _call keeps valid, such as handles


class Error(Exception):
    """What the library refuses, in its own sentence.

    Attributes
    ----------
    status : int
        The number of the error.
    name : str
        Its name, such as "MHA_ERROR_SHAPE".
    argument : int
        Number of the argument of the C function, counted from 1; 0 is none.

    Examples
    --------
    >>> x = np.ones((3, 2, 8), np.float32)
    >>> try:
    ...     mha.attention(x, x, x, q_lengths=[4])
    ... except mha.Error as error:
    ...     print(error.name)
    MHA_ERROR_INVALID_VALUE
    """

    def __init__(self, message: str, status: int, name: str, argument: int) -> None:
        super().__init__(message)
        self.status, self.name, self.argument = status, name, argument

    def __reduce__(self) -> tuple[type[Error], tuple[str, int, str, int]]:
        # Of the message alone, as of other exceptions, none can be made.
        return type(self), (str(self), self.status, self.name, self.argument)


@documented()
def load(path: str | os.PathLike[str] | None = None) -> None:
    """Load the shared library, which the first call does otherwise.

    Parameters
    ----------
    path : str or path-like
        The library. None is the environment variable MHA_LIBRARY, else the package's own, that of
        the sources' folder `build`, or the system's.

    Raises
    ------
    ImportError
        If it is not found, cannot be used, or has another version than the package needs.
    """
    global _library
    if not isinstance(path, (str, bytes, os.PathLike, type(None))):
        raise TypeError(f"path is {_kind(path)}; it must be the path of a library")
    path = os.fspath(path) if path is not None else _find()
    if sys.platform == "linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(158, 0x1023, 18)  # for AMX, as mha_extra.h says
    try:
        library = ctypes.CDLL(path)
        functions = {name: getattr(library, name) for name in [*_signatures, *_others]}
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"{path} cannot be used: {error}. It has to be a libmha.so of version {__version__} "
            "or newer, which `cmake --build build --target mha_shared` makes."
        ) from None
    for name, signature in _signatures.items():
        functions[name].argtypes = [_kinds[kind] for kind in signature] + [ctypes.POINTER(_Error)]
        functions[name].restype = ctypes.c_uint32
    for name in "mha_version", "mha_contract", "mha_instruction_sets":
        functions[name].restype = ctypes.c_uint32
    library.mha_status_string.argtypes, library.mha_status_string.restype = (
        [ctypes.c_uint32],
        ctypes.c_char_p,
    )
    library.mha_layer_view_size.restype = ctypes.c_size_t
    library.mha_layer_destroy.argtypes, library.mha_layer_destroy.restype = [ctypes.c_void_p], None
    version = library.mha_version()
    if version // 10000 != _version // 10000 or version < _version:
        raise ImportError(
            f"{path} is of version {version}; this package needs {_version} or newer with the same"
            " major number."
        )
    _library = library


def _find():
    named = os.environ.get("MHA_LIBRARY")
    if named:
        return named
    folder = pathlib.Path(__file__).resolve().parent
    installed = folder / _file_name
    built = (
        folder.parents[3] / "build" / ("bin" if sys.platform == "win32" else "src") / _file_name
        if len(folder.parents) > 3
        else installed
    )
    for path in installed, built:
        if path.exists():
            return str(path)
    found = ctypes.util.find_library("mha")
    if found:
        return found
    raise ImportError(
        f"{_file_name} was not found: MHA_LIBRARY is not set, there is no {installed} and no"
        f" {built}, and the system has none. Install the package, which builds it, by `pip install"
        " .`; or build it by `cmake -S . -B build && cmake --build build --target mha_shared`; or"
        " name it in MHA_LIBRARY or mha.load(path)."
    )


def _loaded():
    with _lock:
        if _library is None:
            load()
    return _library


def _call(name, *arguments):
    library, error = _library or _loaded(), _Error()
    try:
        status = getattr(library, name)(
            *[
                _address(a, name) if kind == "p" and not isinstance(a, _plain) else a
                for kind, a in zip(_signatures[name], arguments)
            ],
            ctypes.byref(error),
        )
    except ctypes.ArgumentError as failure:
        raise TypeError(f"{name}: {failure}") from None
    if status:
        raise _failure(error, status)


def _failure(error, status):
    # The fields of mha_weight_format are keywords of their own.
    message = error.message.decode().replace("format.type", "weight_type")
    message = re.sub(r"\bformat\.(?=[a-z])", "", message)
    return Error(message, status, _loaded().mha_status_string(status).decode(), error.argument)


def version() -> int:
    """The version of the library.

    Returns
    -------
    int
        10000 * major + 100 * minor + patch.
    """
    return _loaded().mha_version()


def contract() -> int:
    """The arithmetic contract of the library: versions with the same number give the same bits.

    Returns
    -------
    int
        MHA_CONTRACT.
    """
    return _loaded().mha_contract()


def instruction_sets() -> list[str]:
    """The instruction sets that the library has kernels for and this machine runs.

    Returns
    -------
    list of str
        Names for the keyword `instruction_set`.

    Examples
    --------
    >>> "scalar" in mha.instruction_sets()
    True
    """
    bits = _loaded().mha_instruction_sets()
    return [name for name, number in instruction_set_names.items() if number and bits >> number & 1]
