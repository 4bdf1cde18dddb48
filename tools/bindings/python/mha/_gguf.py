"""The attention of a layer in a GGUF file. The packed layer rotates halves: rows of llama, whose
files have pairs, go back to their order before."""

from __future__ import annotations

import numpy as np

from . import formats

# Whether they have a norm of queries and keys.
architectures = {"llama": False, "qwen2": False, "qwen3": True}
_floats = ("F32", "F16", "BF16")


class _Model:
    """The metadata of a GGUF file. Everything about attention in it must be asked for."""

    def __init__(self, path):
        import gguf

        reader = gguf.GGUFReader(path)
        if reader.byte_order != "I":
            raise ValueError("the file has the other byte order; convert it on this machine")
        self.fields, self.tensors, self.asked = (
            reader.fields,
            {tensor.name: tensor for tensor in reader.tensors},
            set(),
        )
        self.name = self.fields["general.architecture"].contents()
        if self.name not in architectures:
            raise ValueError(
                f"the architecture is {self.name!r}; {', '.join(architectures)} can be packed"
            )

    def get(self, key, default=None):
        self.asked.add(f"{self.name}.{key}")
        field = self.fields.get(f"{self.name}.{key}")
        if field is None and default is None:
            raise ValueError(f"the metadata have no {self.name}.{key}")
        value = default if field is None else field.contents()
        if isinstance(value, list):
            raise ValueError(
                f"{self.name}.{key} has a value for each layer; one for all is expected"
            )
        return value

    def finish(self):
        for key in self.fields:
            if key.startswith((f"{self.name}.att", f"{self.name}.rope.")) and key not in self.asked:
                raise ValueError(f"the metadata have {key}, which this version does not know")


def _rope(model, head_dim):
    """The rotation as the command writes it, without positions."""
    rope = {
        "base": model.get("rope.freq_base"),
        "dims": model.get("rope.dimension_count", head_dim),
    }
    kind = model.get("rope.scaling.type", "none")
    factor = model.get("rope.scaling.factor", None if kind == "linear" else 1.0)
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{model.name}.rope.scaling.type is {kind!r}; none and linear can be packed"
        )
    if kind == "none" and factor != 1:
        raise ValueError(f"{model.name}.rope.scaling.factor is {factor}, and its type is not known")
    if rope["dims"] % 2 or not 0 < rope["dims"] <= head_dim:
        raise ValueError(
            f"{model.name}.rope.dimension_count is {rope['dims']}; an even number of the {head_dim}"
            " of a head can rotate"
        )
    if kind == "linear":
        rope["linear_factor"] = factor
    if "rope_freqs.weight" not in model.tensors:
        return rope
    # Of Llama 3.1 and later, whose files have the factor of each pair in place of what it follows
    # from; all models have the same for that.
    factors, original = np.float64(model.tensors["rope_freqs.weight"].data), 8192
    turns = original / (2 * np.pi) * rope["base"] ** (-np.arange(0, rope["dims"], 2) / rope["dims"])
    smooth = np.clip((turns - 1) / 3, 0, 1)
    if (
        factors.shape != smooth.shape
        or not np.allclose(factors, 1 / ((1 - smooth) / factors.max() + smooth), rtol=1e-4)
        or kind != "none"
    ):
        raise ValueError("rope_freqs.weight has other factors than Llama 3.1 and later")
    return {
        **rope,
        "llama3_factor": float(factors.max()),
        "llama3_low_freq_factor": 1,
        "llama3_high_freq_factor": 4,
        "original_positions": original,
    }


def read(path, layer):
    """The matrices and biases by name, the shape of the layer, its call settings, and the types in
    which the file has the matrices."""
    model = _Model(path)
    heads, width = model.get("attention.head_count"), model.get("embedding_length")
    kv_heads, head_dim = (
        model.get("attention.head_count_kv", heads),
        model.get("attention.key_length", width // heads),
    )
    head_dim_v, epsilon = (
        model.get("attention.value_length", head_dim),
        model.get("attention.layer_norm_rms_epsilon", None if architectures[model.name] else 0.0),
    )
    call = {"version": 1, "causal": True, "rope": _rope(model, head_dim)}
    model.finish()
    found = {
        name[len(layer) + 1 :]: tensor
        for name, tensor in model.tensors.items()
        if name.startswith(f"{layer}.attn_")
    }
    found.pop("attn_norm.weight", None)
    extents = {
        "q": (heads * head_dim, width),
        "k": (kv_heads * head_dim, width),
        "v": (kv_heads * head_dim_v, width),
        "output": (width, heads * head_dim_v),
    }

    def take(name, shape):
        if name not in found:
            raise ValueError(
                f"there is no tensor {layer}.{name}; layers are called blk.0 and so on"
            )
        tensor = found.pop(name)
        if tuple(int(extent) for extent in tensor.shape[::-1]) != shape:
            raise ValueError(
                f"{layer}.{name} is {[int(extent) for extent in tensor.shape[::-1]]}; {list(shape)}"
                " is expected"
            )
        kind = tensor.tensor_type.name
        if kind not in _floats:
            return kind, formats.from_gguf(tensor.data, kind)
        return kind, (
            (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
            if kind == "BF16"
            else np.asarray(tensor.data, np.float32)
        )

    kinds, matrices = zip(*(take(f"attn_{name}.weight", shape) for name, shape in extents.items()))
    biases = {
        f"b_{name[0]}": take(f"attn_{name}.bias", shape[:1])[1]
        for name, shape in extents.items()
        if f"attn_{name}.bias" in found
    }
    if architectures[model.name]:
        call["norm"] = {
            "epsilon": epsilon,
            "all_heads": False,
            **{
                f"{name}_weight": take(f"attn_{name}_norm.weight", (head_dim,))[1].tolist()
                for name in "qk"
            },
        }
    if found:
        raise ValueError(
            f"there is a tensor {layer}.{next(iter(found))}, which this version does not know"
        )
    named = dict(zip(("w_q", "w_k", "w_v", "w_o"), matrices))
    if model.name == "llama":  # from pairs to halves
        dims = call["rope"]["dims"]
        order = np.concatenate(
            [np.arange(0, dims, 2), np.arange(1, dims, 2), np.arange(dims, head_dim)]
        )
        for name, count in (("q", heads), ("k", kv_heads)):
            rows = (np.arange(count)[:, None] * head_dim + order).ravel()
            named[f"w_{name}"] = (
                named[f"w_{name}"].rows(rows)
                if isinstance(named[f"w_{name}"], formats.Grouped)
                else named[f"w_{name}"][rows]
            )
            biases.update({f"b_{name}": biases[f"b_{name}"][rows]} if f"b_{name}" in biases else {})
    shape = {
        "query_dim": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
    }
    return {**named, **biases}, shape, call, {kind.lower() for kind in kinds}
