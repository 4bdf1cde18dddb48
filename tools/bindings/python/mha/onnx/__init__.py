"""mha under ONNX Runtime: operators that a session loads, and what puts them into models.

    import mha.onnx

    # needs the package onnx; on the command line: mha onnx rewrite model.onnx
    model, report = mha.onnx.rewrite("model.onnx")
    session = mha.onnx.session(model)  # an onnxruntime.InferenceSession that knows mha's operators

Other programs load the operators by one line:

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

from .._docs import documented

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx
    import onnxruntime

__all__ = ["library_path", "rewrite", "session"]
_file_name = "libmha_onnx.so"


def library_path() -> str:
    """The path of the library of operators.

    Returns
    -------
    str
        What MHA_ONNX_LIBRARY names, else the package's own, else that of the sources' folder
        `build`.

    Raises
    ------
    ImportError
        If there is none.
    """
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


@documented()
def session(
    model: onnx.ModelProto | bytes | str | os.PathLike[str],
    sess_options: onnxruntime.SessionOptions | None = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    **more: Any,
) -> onnxruntime.InferenceSession:
    """Make an onnxruntime.InferenceSession that knows mha's operators.

    Parameters
    ----------
    model : onnx.ModelProto, bytes, str or path-like
        The model, or its file. A ModelProto of 2 GiB or more is written into a temporary folder
        meanwhile.
    sess_options : onnxruntime.SessionOptions
        Options, which get the operators; None makes them.
    providers : sequence of str
        Execution providers.
    **more : Any
        What else onnxruntime.InferenceSession takes.

    Returns
    -------
    onnxruntime.InferenceSession
        The session.
    """
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


@documented()
def rewrite(
    model: onnx.ModelProto | str | os.PathLike[str],
    weight_type: str = "f32",
    arithmetic: str = "f32",
) -> tuple[onnx.ModelProto, list[Any]]:
    """Put mha's operators in the place of a model's attention.

    Parameters
    ----------
    model : onnx.ModelProto, str or path-like
        The model, or its file. A ModelProto is changed in place; one with functions is copied.
    weight_type : {types}
        How sessions store the weights of projections that are replaced as well.

    Returns
    -------
    model : onnx.ModelProto
        The model with mha's operators.
    report : list
        What became of each attention: ``entry.node``, ``entry.into`` (None where it was left) and
        ``entry.reason``; ``str(entry)`` says it.

    Raises
    ------
    ImportError
        If the package onnx is not installed.

    Examples
    --------
    >>> import onnx.parser
    >>> text = '<ir_version: 8, opset_import: ["": 17]> g (float x) => (float y) {y = Relu(x)}'
    >>> mha.onnx.rewrite(onnx.parser.parse_model(text))[1]  # without any attention
    []
    """
    try:
        from ._rewrite import rewrite as function
    except ImportError as error:
        if error.name and error.name.split(".")[0] == "onnx":
            raise ImportError("rewriting models needs the package onnx: pip install onnx") from None
        raise
    return function(model, weight_type, arithmetic)
