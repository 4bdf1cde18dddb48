"""Attention of llama.cpp by mha: the module that ggml loads, and what has llama-cpp-python load it.

    import llama_cpp, mha_ggml
    mha_ggml.load()                                          # before a model is loaded
    model = llama_cpp.Llama("model.gguf", flash_attn=True)

llama.cpp's own programs take it from the environment: GGML_BACKEND_PATH=$(python -m mha_ggml)
llama-cli ...
"""

from __future__ import annotations

import ctypes
import os
import pathlib

path = pathlib.Path(__file__).with_name("libggml-mha.so")


def _engine() -> tuple[str, ctypes.CDLL]:
    """The ggml of this process, made visible to what it loads."""
    mapped = [
        line.split(maxsplit=5)[5]
        for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
        if ".so" in line
    ]
    files = sorted(
        {
            file
            for file in mapped
            if "ggml" in os.path.basename(file) or "llama" in os.path.basename(file)
        }
    )
    engines = [file for file in files if os.path.basename(file).startswith("libggml.so")]
    if len(engines) > 1:
        raise RuntimeError(
            f"there are two of ggml in this process, {' and '.join(engines)}; load only one of them"
        )
    for file in [*engines, None, *files]:  # None: the program itself and what it is linked with
        if hasattr(ctypes.CDLL(file), "ggml_backend_load"):
            return file or "this program", ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
    if files:
        raise RuntimeError(
            f"{files[-1]} is loaded, but there is no function ggml_backend_load: ggml is linked"
            " into it statically. mha_ggml needs ggml as a library of its own, libggml.so, as `pip"
            " install llama-cpp-python` builds it"
        )
    raise RuntimeError("no ggml is loaded; import llama_cpp before mha_ggml.load()")


def load() -> None:
    """Has the ggml of this process load the module. Contexts that are made from then on use it; a
    second call does nothing. Raises RuntimeError if there is no ggml, or one that the module is not
    for."""
    file, ggml = _engine()
    if not hasattr(ggml, "ggml_log_get"):
        raise RuntimeError(
            f"{file} is too old: it has no ggml_log_get, which came with ggml 0.9.5. Install"
            " llama-cpp-python 0.3.30 or newer"
        )
    for name in "ggml_backend_reg_by_name", "ggml_backend_load":
        getattr(ggml, name).restype, getattr(ggml, name).argtypes = (
            ctypes.c_void_p,
            [ctypes.c_char_p],
        )
    if ggml.ggml_backend_reg_by_name(b"MHA"):
        return
    said = []
    listen = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
        lambda _, text, __: said.append(text.decode(errors="replace"))
    )
    callback, data = ctypes.c_void_p(), ctypes.c_void_p()
    ggml.ggml_log_get(ctypes.byref(callback), ctypes.byref(data))
    ggml.ggml_log_set(listen, None)
    try:
        registry = ggml.ggml_backend_load(os.fsencode(path))
    finally:
        ggml.ggml_log_set(callback, data)
    if not registry:
        raise RuntimeError("".join(said).strip())
