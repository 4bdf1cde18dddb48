"""The attention of a layer in .safetensors files, as it is or quantised by AWQ, GPTQ or
compressed-tensors."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import numpy as np

from . import formats
from ._config import Model, parse_json, quoted, read_model
from ._packed import count_text

_dtypes = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "I32": "<i4", "I64": "<i8"}


class Tensor(NamedTuple):
    path: str
    dtype: str
    shape: tuple[int, ...]
    at: int


class Tensors(dict[str, Tensor]):
    """Name -> Tensor of a file, or of all files that an index names."""

    def __init__(self, path):
        self.path, self.files, self.types = path, {path}, set()
        index = _index(path)
        if index is None:
            return self.update(_header(path))
        found = {file: _header(file) for file in set(index.values())}
        self.files |= set(found)
        for name, file in index.items():
            if name not in found[file]:
                raise ValueError(f"{path}: says that {file} has {quoted(name)}, which it has not")
            self[name] = found[file][name]

    def __missing__(self, name):
        raise ValueError(f"{self.path}: has no tensor {quoted(name)}")

    def stored(self, name):
        """As the file has it; bfloat16 as uint16."""
        tensor = self[name]
        if tensor.dtype not in _dtypes:
            raise ValueError(
                f"{self.path}: the tensor {quoted(name)} is stored as {quoted(tensor.dtype)}; one"
                f" of {', '.join(_dtypes)} is expected"
            )
        count, dtype = math.prod(tensor.shape), _dtypes[tensor.dtype]
        read = np.fromfile(tensor.path, dtype, count, offset=tensor.at)
        if len(read) != count:
            raise ValueError(f"{tensor.path}: became shorter while it was read")
        return read.reshape(tensor.shape)

    def floats(self, name, shape=None):
        tensor = self[name]
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise ValueError(
                f"{self.path}: the tensor {quoted(name)} is stored as {quoted(tensor.dtype)}; F32,"
                " F16 or BF16 is expected"
            )
        if shape and tensor.shape != shape:
            raise ValueError(
                f"{self.path}: the tensor {quoted(name)} has the shape {tensor.shape}; {shape} is"
                " expected"
            )
        stored = self.stored(name)
        if stored.ndim > 1:
            self.types.add(tensor.dtype.lower())
        if tensor.dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32, copy=False)


def _index(path):
    """Name of a tensor -> its file, of a model.safetensors.index.json; None for other files."""
    with open(path, "rb") as file:
        begin = file.read(1)
        index = parse_json(path, begin + file.read()) if begin == b"{" else None
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        return None
    for name, file in index["weight_map"].items():
        if not isinstance(file, str) or file in ("", ".", "..") or {"/", "\\", "\0"} & set(file):
            raise ValueError(
                f"{path}: the file of {quoted(name)} in weight_map must be the name of a file in"
                " the same folder"
            )
    if not index["weight_map"]:
        raise ValueError(f"{path}: has no tensor in weight_map")
    folder = os.path.dirname(path)
    return {name: os.path.join(folder, file) for name, file in index["weight_map"].items()}


def _header(path):
    """Name -> Tensor: 8 bytes with the length of the header, the header in JSON, the data."""
    with open(path, "rb") as file:
        size, begin = os.fstat(file.fileno()).st_size, file.read(9)
        if begin[8:] != b"{":
            raise ValueError(
                f"{path}: is not a .safetensors file (no header in JSON follows the first 8 bytes)"
            )
        length = int.from_bytes(begin[:8], "little")
        if length > size - 8:
            raise ValueError(
                f"{path}: says that its header has {length} bytes, but only {size - 8} follow; it"
                " looks truncated"
            )
        if length > 10**8:
            raise ValueError(
                f"{path}: says that its header has {length} bytes, more than the format allows"
            )
        header = parse_json(path, b"{" + file.read(length - 1))
    if not isinstance(header, dict):
        raise ValueError(f"{path}: has a header that is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor(path, name, entry, start, size):
    is_whole = lambda given: (
        type(given) is list and all(type(n) is int and 0 <= n < 2**63 for n in given)
    )
    if (
        not isinstance(entry, dict)
        or set(entry) != {"dtype", "shape", "data_offsets"}
        or not isinstance(entry["dtype"], str)
        or not is_whole(entry["shape"])
        or not is_whole(entry["data_offsets"])
        or len(entry["data_offsets"]) != 2
    ):
        raise ValueError(
            f"{path}: the tensor {quoted(name)} is not described by its dtype, shape and two"
            " data_offsets"
        )
    begin, end = entry["data_offsets"]
    if not begin <= end <= size - start:
        raise ValueError(
            f"{path}: the tensor {quoted(name)} lies from byte {begin} to {end} of the data, but"
            f" there are {size - start}; it looks truncated"
        )
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype in _dtypes and math.prod(shape) * np.dtype(_dtypes[dtype]).itemsize != end - begin:
        raise ValueError(
            f"{path}: the tensor {quoted(name)} takes {end - begin} bytes, which does not fit its"
            f" shape {shape} of {dtype}"
        )
    return Tensor(path, dtype, shape, start + begin)


class Names(NamedTuple):
    """How models name the matrices of a layer: queries, keys and values, or one of all three
    (k = None). Biases lie beside them. outputs: the first one that is there; "" = no W_O."""

    q: str
    k: str | None
    v: str | None
    outputs: tuple[str, ...]
    is_in_out: bool = False
    may_rotate: bool = False  # some models of these names rotate, others do not
    is_alone: bool = False  # what else is there changes the layer


_outputs = "out_proj.weight", "out_proj", ""
_names = (
    Names("W_query.weight", "W_key.weight", "W_value.weight", _outputs),
    Names("W_query", "W_key", "W_value", _outputs, is_in_out=True),
    # nn.MultiheadAttention
    Names("in_proj_weight", None, None, ("out_proj.weight",)),
    # timm's vision transformers
    Names("qkv.weight", None, None, ("proj.weight",), may_rotate=True, is_alone=True),
    # Phi-3
    Names("qkv_proj.weight", None, None, ("o_proj.weight",), may_rotate=True),
    # Llama
    Names(
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        ("o_proj.weight", "out_proj.weight", "dense.weight"),
        may_rotate=True,
    ),
    # BERT
    Names("self.query.weight", "self.key.weight", "self.value.weight", ("output.dense.weight",)),
    # GPT-2
    Names("c_attn.weight", None, None, ("c_proj.weight",), is_in_out=True),
)
# Beside a layer, these change what it computes.
_additions = """q_norm.bias query_layernorm.weight bias_k q_layernorm.weight query_norm.weight
    q_attn.weight g_proj.weight self.distance_embedding.weight""".split()
_packed = "qweight", "weight_packed"


def _forms(name):
    """The tensors that a matrix of this name may be stored as."""
    base = name[: -len("weight")]
    return name, *(base + form for form in _packed if name.endswith(".weight"))


def _choose(tensors, wanted):
    """The prefix and the Names of a layer."""
    found = {
        name[: len(name) - len(form)]: names
        for name in tensors
        for names in _names
        for form in _forms(names.q)
        if ("." + name).endswith("." + form)
    }
    if wanted is not None and f"{wanted}." in found:
        return f"{wanted}.", found[f"{wanted}."]
    chosen = [prefix for prefix in found if wanted is None or f".{wanted}." in f".{prefix}"]
    if len(chosen) == 1:
        return chosen[0], found[chosen[0]]
    if not found:
        raise ValueError(
            f"{tensors.path}: has no attention layer with known names; mha pack --help lists them"
        )
    some = ", ".join(quoted(prefix[:-1]) for prefix in (chosen or list(found))[:4])
    if not chosen:
        raise ValueError(f"{tensors.path}: has no layer {quoted(wanted)}; others are {some}")
    raise ValueError(
        f"{tensors.path}: has {len(chosen)} layers; choose one with --layer, such as {some}"
    )


def config_beside(weights):
    path = os.path.join(os.path.dirname(weights), "config.json")
    return path if os.path.exists(path) else None


def _model(options, may_rotate, number):
    """What config.json says, or in its place the options."""
    config = options.config or (None if options.no_config else config_beside(options.weights))
    said = {
        "--heads": options.heads,
        "--causal": options.causal is True,
        "--no-causal": options.causal is False,
        "--rope-base": options.rope_base,
        "--no-rope": options.no_rope,
    }
    if config:
        for name, is_given in said.items():
            if is_given:
                raise ValueError(
                    f"{name}: {config} already sets it; leave the option out, or give --no-config"
                    " and set everything with options"
                )
        return read_model(config, number)
    why = (
        f"{options.weights} is read without a config.json"
        if options.no_config
        else f"there is no config.json next to {options.weights}"
    )
    if not options.heads:
        raise ValueError(f"--heads is needed, because {why}")
    if options.causal is None:
        raise ValueError(
            f"--causal or --no-causal is needed, because {why}, and the weights do not show whether"
            " rows attend to later rows"
        )
    if may_rotate and not options.rope_base and not options.no_rope:
        raise ValueError(
            f"--rope-base or --no-rope is needed, because {why}, and only some models with its"
            " names rotate queries and keys (RoPE)"
        )
    rope = {"rope": {"base": options.rope_base}} if options.rope_base else {}
    return Model("", options.heads, {"version": 1, "causal": options.causal, **rope})


class _Reader:
    """The matrices of a layer, [out, in]: float32, or formats.Grouped."""

    def __init__(self, tensors, prefix, names, model):
        self.tensors, self.prefix, self.names, self.model = tensors, prefix, names, model

    def matrix(self, name, is_in_out):
        full, tensors = self.prefix + name, self.tensors
        base, method = full[: -len("weight")], self.model.quantised
        beside = {
            other[len(base) :]: other
            for other in tensors
            if name.endswith(".weight") and other.startswith(base)
        }
        is_packed = full in tensors and f"{base}weight_scale" in tensors
        if is_packed or any(form in beside for form in _packed):
            if method is None:
                raise ValueError(
                    f"{tensors.path}: {quoted(base[:-1])} is quantised, and"
                    f" {self.model.name or 'the options'} say not how; a config.json with its"
                    " quantization_config is expected"
                )
            beside.pop("bias", None)
            stored = {part: tensors.stored(other) for part, other in beside.items()}
            try:
                return self.quantised(stored, *method)
            except (LookupError, TypeError, ValueError) as error:
                missing = "there is no tensor " if isinstance(error, LookupError) else ""
                raise ValueError(f"{tensors.path}: {base[:-1]}: {missing}{error}") from None
        for part in set(beside) - {"weight", "bias"}:
            raise ValueError(
                f"{tensors.path}: the tensor {quoted(beside[part])} changes the layer in a way that"
                " is not supported"
            )
        shape = tensors[full].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"{tensors.path}: the tensor {quoted(full)} has the shape {shape}; a matrix is"
                " expected"
            )
        stored = tensors.floats(full)
        return np.ascontiguousarray(stored.T) if is_in_out else stored

    def quantised(self, stored, method, how):
        known = ["qweight", "qzeros", "scales"] + (["g_idx"] if method == "gptq" else [])
        is_compressed = method == "compressed-tensors"
        for part in stored:
            if part not in known if not is_compressed else not part.startswith("weight"):
                raise ValueError(f"there is a tensor {part}, which this version does not know")
        if is_compressed:
            return formats.from_compressed_tensors(stored, **how)
        read = formats.from_gptq if method == "gptq" else formats.from_awq
        return read(*(stored[part] for part in known), **how)

    def bias(self, name, width):
        other = name[: -len("weight")] + "bias"
        if not name.endswith("weight") or self.prefix + other not in self.tensors:
            return None
        return self.tensors.floats(self.prefix + other, (width,))

    def check(self, name, matrix, fits, heads, kv_heads):
        if fits:
            return
        outputs, inputs = _extents(matrix)
        more = f" and {count_text(kv_heads, 'key and value head')}" if kv_heads else ""
        raise ValueError(
            f"{self.tensors.path}: the tensor {quoted(self.prefix + name)} takes rows of {inputs}"
            f" to rows of {outputs}, which does not fit {count_text(heads, 'head')}{more}; check"
            f" {self.model.name or '--heads'}"
        )

    def read(self):
        """The matrices and biases by name, and the shape of the layer."""
        names, model, heads = self.names, self.model, self.model.num_heads
        found = {"w_q": self.matrix(names.q, names.is_in_out)}
        outputs, inputs = _extents(found["w_q"])
        if names.k is None:
            kv_heads = model.num_kv_heads or heads
            head_dim = head_dim_v = outputs // (heads + 2 * kv_heads)
            fits = outputs == head_dim * (heads + 2 * kv_heads) > 0
            self.check(names.q, found["w_q"], fits, heads, kv_heads)
            ends = np.cumsum([0, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
            parts = [slice(*pair) for pair in zip(ends, ends[1:])]
            biases, whole = self.bias(names.q, outputs), found["w_q"]
            found = {f"w_{key}": _rows(whole, part) for key, part in zip("qkv", parts)}
            if biases is not None:
                found.update({f"b_{key}": biases[part] for key, part in zip("qkv", parts)})
        else:
            head_dim = outputs // heads
            fits = outputs == heads * head_dim > 0
            self.check(names.q, found["w_q"], fits, heads, None)
            found["w_k"] = k = self.matrix(names.k, names.is_in_out)
            found["w_v"] = v = self.matrix(names.v, names.is_in_out)
            kv_heads = _extents(k)[0] // head_dim
            fits = _extents(k) == (kv_heads * head_dim, inputs) and kv_heads > 0
            fits = fits and model.num_kv_heads in (None, kv_heads)
            self.check(names.k, k, fits, heads, kv_heads)
            head_dim_v = _extents(v)[0] // kv_heads
            fits = _extents(v) == (kv_heads * head_dim_v, inputs)
            self.check(names.v, v, fits, heads, kv_heads)
            for key, name in zip("qkv", (names.q, names.k, names.v)):
                found[f"b_{key}"] = self.bias(name, _extents(found[f"w_{key}"])[0])
        fits = heads % kv_heads == 0 and model.head_dim in (None, head_dim)
        fits = fits and model.query_dim in (None, inputs)
        self.check(names.q, found["w_q"], fits, heads, kv_heads)
        shape = {
            "query_dim": inputs,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "scale": model.scale,
        }
        is_there = lambda name: any(self.prefix + form in self.tensors for form in _forms(name))
        for name in names.outputs:
            if not name or is_there(name):
                break
        else:
            name = names.outputs[0]  # reading it says that it is missing
        if name:
            # Of layers with W_query this may be nn.Linear, whatever the others are.
            found["w_o"] = o = self.matrix(
                name, name == "out_proj" or (names.is_in_out and name != "out_proj.weight")
            )
            self.check(name, o, _extents(o)[1] == heads * head_dim_v, heads, kv_heads)
            shape["output_dim"] = _extents(o)[0]
            found["b_o"] = self.bias(name, shape["output_dim"])
        return {name: one for name, one in found.items() if one is not None}, shape

    def call(self, shape):
        """The call settings, with the weights of norms and the sinks."""
        call, model, tensors = dict(self.model.call), self.model, self.tensors
        q_norm, k_norm, sinks = (
            self.prefix + name for name in ("q_norm.weight", "k_norm.weight", "sinks")
        )
        for name, is_known in (
            (q_norm, model.family.has_norm),
            (k_norm, model.family.has_norm),
            (sinks, model.family.has_sinks),
        ):
            if name in tensors and not is_known:
                source = (
                    f"for the model_type in {model.name}" if model.name else "without a config.json"
                )
                raise ValueError(
                    f"{tensors.path}: has the tensor {quoted(name)}, which is not known {source}"
                )

        def row(name, width, added=0):
            numbers = tensors.floats(name, (width,)) + np.float32(added)
            if not np.all(np.isfinite(numbers)):
                raise ValueError(
                    f"{tensors.path}: the tensor {quoted(name)} holds a number that is not finite"
                )
            return numbers.tolist()

        heads, kv_heads, head_dim = (
            shape[name] for name in ("num_heads", "num_kv_heads", "head_dim")
        )
        if model.family.has_sinks:
            call["sinks"] = row(sinks, heads)
        if model.family.has_norm:
            is_of_all = heads > 1 and tensors[q_norm].shape == (heads * head_dim,)
            added = int(model.family.norm_adds_one)
            call["norm"] = {
                "epsilon": model.norm_epsilon,
                "all_heads": is_of_all,
                "q_weight": row(q_norm, (heads if is_of_all else 1) * head_dim, added),
                "k_weight": row(k_norm, (kv_heads if is_of_all else 1) * head_dim, added),
            }
        return call


def _extents(matrix):
    return (matrix.codes if isinstance(matrix, formats.Grouped) else matrix).shape


def _rows(matrix, part):
    return matrix.rows(part) if isinstance(matrix, formats.Grouped) else matrix[part]


def read(options) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str], set[str]]:
    """The matrices and biases by name, the shape of the layer, its call settings, the files
    that were read, and the types of matrices of floats."""
    tensors = Tensors(options.weights)
    prefix, names = _choose(tensors, options.layer)
    for name in tensors:
        rest = name[len(prefix) :]
        is_own = not names.is_alone or rest.startswith(("qkv.", "proj."))
        if name.startswith(prefix) and (rest in _additions or not is_own):
            raise ValueError(
                f"{tensors.path}: the tensor {quoted(name)} changes the layer in a way that is not"
                " supported"
            )
    number = next((int(word) for word in prefix.split(".") if word.isdecimal()), None)
    model = _model(options, names.may_rotate, number)
    reader = _Reader(tensors, prefix, names, model)
    given, shape = reader.read()
    return given, shape, reader.call(shape), {*tensors.files, model.name} - {""}, tensors.types
