"""Models as protobuf and files have them: protobuf neither writes nor copies more than 2 GiB."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

most = 2**31 - 2**20  # bytes of one file
_holders = onnx.ModelProto, onnx.GraphProto, onnx.NodeProto, onnx.AttributeProto, onnx.FunctionProto
_mark = os.urandom(8).hex()  # what an array has as its doc_string, before its number


def without_arrays(message: Any, arrays: list[TensorProto], made: Any = None) -> Any:
    """A copy of a model without the numbers of arrays of more than 16,384 elements, which `arrays`
    gets."""
    made = type(message)() if made is None else made
    if isinstance(message, TensorProto) and (
        message.data_location == TensorProto.EXTERNAL
        or message.data_type != TensorProto.STRING
        and math.prod(message.dims) > 1 << 14
    ):
        made.name, made.data_type = message.name, message.data_type
        made.dims.extend(message.dims)
        made.doc_string = f"{_mark}{len(arrays)}"
        arrays.append(message)
    elif not isinstance(message, _holders):
        made.CopyFrom(message)
    else:
        for field, value in message.ListFields():
            own = getattr(made, field.name)
            if field.message_type is None and not hasattr(value, "extend"):
                setattr(made, field.name, value)
            elif field.message_type is None:
                own.extend(value)
            elif hasattr(value, "extend"):
                for part in value:
                    without_arrays(part, arrays, own.add())
            else:
                own.SetInParent()
                without_arrays(value, arrays, own)
    return made


def _left_out(graph, arrays):
    """Each array that without_arrays left empty, and the one that it stands for."""
    found = list(getattr(graph, "initializer", []))
    for node in graph.node:
        for a in node.attribute:
            found += [*([a.t] if a.HasField("t") else []), *a.tensors]
            for body in [*([a.g] if a.HasField("g") else []), *a.graphs]:
                yield from _left_out(body, arrays)
    for tensor in found:
        if tensor.doc_string.startswith(_mark):
            yield tensor, arrays[int(tensor.doc_string[len(_mark) :])]


def is_large(model: onnx.ModelProto) -> bool:
    """Whether one file cannot hold a model, with the numbers that are loaded."""
    arrays: list[TensorProto] = []
    size, kinds = without_arrays(model, arrays).ByteSize(), helper.get_all_tensor_dtypes()
    for tensor in arrays:
        if tensor.data_location != TensorProto.EXTERNAL and tensor.data_type in kinds:
            kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            size += math.prod(tensor.dims) * kind.itemsize
    return size >= most


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model with the nodes of its functions in their place."""
    arrays: list[TensorProto] = []
    made = onnx.inliner.inline_local_functions(without_arrays(model, arrays))
    for tensor, original in _left_out(made.graph, arrays):
        tensor.CopyFrom(original)
    return made


def save(model: onnx.ModelProto, output: str, source: str | None = None) -> None:
    """Writes a model that was read from `source`, and what one file cannot hold into a second one.
    Files have their names when they are complete; until then they are in a folder beside them."""
    is_one = not is_large(model)
    if is_one and os.path.exists(output) and not os.path.isfile(output):  # a pipe, /dev/null
        onnx.save(model, output)
        return
    folder, name = os.path.split(os.path.realpath(output))
    data = os.path.join(folder, name + ".data")
    if not is_one and source is not None and os.path.exists(data):
        for tensor in onnx.load(source, load_external_data=False).graph.initializer:
            entries = (entry.value for entry in tensor.external_data if entry.key == "location")
            place = os.path.join(os.path.dirname(source), next(entries, ""))
            if os.path.realpath(place) == os.path.realpath(data):
                raise ValueError(f"{data} has the arrays of the model itself; give another name")
    with tempfile.TemporaryDirectory(prefix=name + ".partial-", dir=folder) as partial:
        if not is_one:
            model = _with_second_file(model, os.path.join(partial, name + ".data"))
        onnx.save(model, os.path.join(partial, name))
        for part in [name] if is_one else [name + ".data", name]:
            os.replace(os.path.join(partial, part), os.path.join(folder, part))


def _with_second_file(model: onnx.ModelProto, path: str) -> onnx.ModelProto:
    """A copy of a model whose arrays lie in a file, each from a multiple of 4096 bytes on."""
    arrays: list[TensorProto] = []
    made = without_arrays(model, arrays)
    with open(path, "xb") as file:
        for part in (made.graph, *made.functions):
            for tensor, original in _left_out(part, arrays):
                if original.data_location == TensorProto.EXTERNAL:
                    tensor.CopyFrom(original)
                    continue
                text = original.doc_string
                if not original.HasField("raw_data"):
                    original = numpy_helper.from_array(numpy_helper.to_array(original))
                file.seek(-(-file.tell() // 4096) * 4096)
                place = {"location": os.path.basename(path), "offset": file.tell()}
                place["length"] = file.write(original.raw_data)
                tensor.doc_string = text
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in place.items():
                    tensor.external_data.add(key=key, value=str(value))
    return made
