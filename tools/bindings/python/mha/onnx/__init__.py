"""mha under ONNX Runtime: operators that a session loads, and what puts them into models.

    import mha.onnx

    # needs the package onnx; on the command line: mha onnx rewrite model.onnx
    model, report = mha.onnx.rewrite("model.onnx")
    session = mha.onnx.session(model)  # an onnxruntime.InferenceSession that knows mha's operators

In other programs, one line loads the operators, of which mha.onnx.library_path() is the file:

    options.register_custom_ops_library(mha.onnx.library_path())

ONNX Runtime is 1.18 or newer. src/docs/onnx.md in the sources describes the operators, and what is
rewritten.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx
    import onnxruntime

__all__ = ["library_path", "rewrite", "session"]
_file_name = "libmha_onnx.so"


def library_path() -> str:
    """Where the library of operators is: as MHA_ONNX_LIBRARY says, else in this package, else in
    build/ of the sources that it lies in."""
    named = os.environ.get("MHA_ONNX_LIBRARY")
    if named:
        return named
    folder = pathlib.Path(__file__).resolve().parent
    places = [folder.parent / _file_name]
    if len(folder.parents) > 4:
        places.append(folder.parents[4] / "build" / "tools" / "adapters" / "onnx" / _file_name)
    for place in places:
        if place.exists():
            return str(place)
    raise ImportError(
        f"{_file_name} was not found: MHA_ONNX_LIBRARY is not set, and there is no"
        f" {' and no '.join(map(str, places))}. It is built where ONNX Runtime's headers are: run"
        " tools/adapters/onnx/headers.sh, then `pip install .` or `cmake -S . -B build && cmake"
        " --build build --target mha_onnx`."
    )


def session(
    model: onnx.ModelProto | bytes | str | os.PathLike[str],
    sess_options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    **more: Any,
) -> onnxruntime.InferenceSession:
    """An onnxruntime.InferenceSession of a model (a path, bytes or an onnx.ModelProto) that knows
    mha's operators. They are registered with sess_options unless they are already. A ModelProto of
    2 GiB or more is written into a temporary folder, which is removed when the session is made."""
    import onnxruntime

    sess_options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
    sess_options.register_custom_ops_library(library_path())
    with contextlib.ExitStack() as until_made:
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        elif not isinstance(model, (bytes, str)):
            from ._files import is_large, save

            if is_large(model):
                folder = until_made.enter_context(tempfile.TemporaryDirectory(prefix="mha-onnx-"))
                save(model, path := os.path.join(folder, "model.onnx"))
                model = path
            else:
                model = model.SerializeToString()
        return onnxruntime.InferenceSession(model, sess_options, providers=list(providers), **more)


def rewrite(
    model: onnx.ModelProto | str | os.PathLike[str],
    weight_type: str = "f32",
    arithmetic: str = "f32",
) -> tuple[onnx.ModelProto, list[Any]]:
    """(model, report): an onnx.ModelProto, or the file of one, with mha's operators in place of its
    attention, and a list of what became of each: entry.node, entry.into (None where it was left)
    and entry.reason; str(entry) says it. A ModelProto that is given is changed in place; but one
    with functions is left as it is, and the new one is a copy. Where projections are replaced as
    well, by mha.Layer, sessions keep their weights as weight_type says ("f32", "f16", "bf16",
    "int8" or "int4"), and compute them as arithmetic says: "f32", or with weights of int8 or int4
    also "int8" or "int16". Needs the package onnx."""
    try:
        from ._rewrite import rewrite as function
    except ImportError as error:
        if error.name and error.name.split(".")[0] == "onnx":
            raise ImportError("rewriting models needs the package onnx: pip install onnx") from None
        raise
    return function(model, weight_type, arithmetic)
