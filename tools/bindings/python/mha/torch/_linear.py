"""nn.Linear, its weights packed once."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection
from typing import Any

import torch

from .. import _library, _openmp
from .._docs import documented
from .._structs import _empty, _LinearArgs, _packer
from .._weights import weight_type_of
from ._common import (
    NotServed,
    calls,
    check_known,
    check_parameters,
    is_eager,
    library,
    names,
    packed_weights,
    refuse,
    types,
    unserved_tensors,
    view,
    warn,
)

_name = "Linear"


class Linear(torch.nn.Module):
    """A torch.nn.Linear for inference, whose weights are packed once.

    `from_module` makes it. The packed weights are the buffer `packed`, of bytes. `weight` and
    `bias` are tensors on the device "meta", with shapes and types alone, for models that ask for
    these.

    Examples
    --------
    >>> module = torch.nn.Linear(64, 32)
    >>> layer = mha.torch.Linear.from_module(module, weight_type="int8", arithmetic="int16")
    >>> layer(torch.rand(2, 5, 64)).shape
    torch.Size([2, 5, 32])
    """

    @classmethod
    @documented()
    def from_module(
        cls,
        module: torch.nn.Module,
        *,
        weight_type: str | None = None,
        group_size: int = 0,
        arithmetic: str = "f32",
        strict: bool = False,
    ) -> Linear:
        """Pack the weights of a module.

        Parameters
        ----------
        module : torch.nn.Linear
            The module, or a Conv1D of transformers (GPT-2).
        strict : bool
            Whether to drop the float weights, so that a call that mha does not support raises
            `NotServed`. Otherwise `module` computes such a call.

        Returns
        -------
        Linear
            The packed module.
        """
        if not isinstance(module, torch.nn.Linear) and not isinstance(module, _conv1d()):
            raise TypeError(f"module is a {type(module).__name__}; it must be a torch.nn.Linear")
        self = cls()
        check_known(
            module,
            [torch.nn.Linear, torch.nn.modules.linear.NonDynamicallyQuantizableLinear, *_conv1d()],
        )
        check_parameters(module)
        given: Any = module
        weight, bias = given.weight, given.bias
        weight_type = weight_type_of(weight_type, arithmetic, names[weight.dtype])
        is_out_in = isinstance(module, torch.nn.Linear)
        self.out_features, self.in_features = weight.shape if is_out_in else weight.shape[::-1]
        self.stock = None if strict else module
        self.train(module.training)
        self.register_buffer(
            "packed",
            packed_weights(
                self.in_features,
                0,
                {"w_o": weight},
                {"b_o": bias},
                output_dim=self.out_features,
                layout="out_in" if is_out_in else "in_out",
                weight_type=weight_type,
                group_size=group_size,
                arithmetic=arithmetic,
            ),
        )
        self.weight, self.bias = (
            None if tensor is None else torch.empty_like(tensor, device="meta", requires_grad=False)
            for tensor in (weight, bias)
        )
        self.weight_type, self.group_size, self.arithmetic = weight_type, group_size, arithmetic
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute y = x W^T + b.

        Parameters
        ----------
        x : torch.Tensor, shape (..., in_features)
            Rows.

        Returns
        -------
        torch.Tensor, shape (..., out_features)
            The result, of the type of `x`.
        """
        if torch.is_autocast_enabled("cpu") and x.is_cpu and x.dtype in types:
            x = x.to(torch.get_autocast_dtype("cpu"))
        reason = unserved_tensors(x, x, x)
        if reason is not None:
            refuse(_name, reason, self.stock is None)
            y = self.stock(x)
            warn(_name, reason)
            return y
        return (_kernel if is_eager() else _operator)(x, self.packed, self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, weight_type={self.weight_type!r},"
            f" group_size={self.group_size}, arithmetic={self.arithmetic!r}"
        )


def _conv1d() -> tuple[Any, ...]:
    """The class of transformers whose weights are [in, out], if that is loaded."""
    module = sys.modules.get("transformers.pytorch_utils")
    return (module.Conv1D,) if module else ()


@documented()
def pack_linears(
    model: torch.nn.Module,
    *,
    weight_type: str | None = None,
    group_size: int = 0,
    arithmetic: str = "f32",
    skip: Collection[str] = (),
    strict: bool = False,
) -> list[str]:
    """Replace each torch.nn.Linear of a model by a `Linear`.

    So is each Conv1D of transformers. Subclasses, which may compute something else, and modules
    with hooks or with a forward of their own stay. A module at several places is packed once. Code
    that asks a layer's weight for its device finds "meta": skip such layers.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is changed.
    skip : collection of str
        Modules that stay, with all inside of them: their names, or the ends of these after a dot.
    strict : bool
        Whether to drop the float weights, and to raise an error, which leaves the model as it was,
        for weights that mha does not take; otherwise these stay, with a warning.

    Returns
    -------
    list of str
        Names of the modules that were replaced.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    >>> mha.torch.pack_linears(model.bfloat16(), arithmetic="bf16", skip=["1"])
    ['0']
    """
    skip = [skip] if isinstance(skip, str) else list(skip)
    classes, found = (torch.nn.Linear, *_conv1d()), []
    if type(model) in classes:
        raise TypeError(
            f"model is itself a {type(model).__name__}; Linear.from_module makes one of it"
        )

    def is_called(name, end):
        return name == end or name.endswith("." + end)

    for end in skip:
        if not any(is_called(name, end) for name, _ in model.named_modules(remove_duplicate=False)):
            raise ValueError(f"skip has {end!r}, which no module of the model is called")

    def find(parent, path):
        for name, child in parent._modules.items():
            whole = path + name
            if (
                child is None
                or isinstance(child, Linear)
                or any(is_called(whole, end) for end in skip)
            ):
                continue
            if type(child) not in classes:
                find(child, whole + ".")
            elif not (
                child._forward_hooks or child._forward_pre_hooks or "forward" in child.__dict__
            ):
                found.append((parent, name, whole, child))

    find(model, "")
    refused = {}
    for _, _, whole, child in found:
        try:
            check_known(child, classes)
            check_parameters(child)
            weight_type_of(weight_type, arithmetic, names[child.weight.dtype])
        except NotServed as error:
            refuse(whole, error, strict)
            refused[whole] = str(error)
    packed: dict[torch.nn.Module, Linear] = {}
    for parent, name, whole, child in found:
        if whole not in refused:
            packed[child] = packed.get(child) or Linear.from_module(
                child,
                weight_type=weight_type,
                group_size=group_size,
                arithmetic=arithmetic,
                strict=strict,
            )
            setattr(parent, name, packed[child])
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and any(
            isinstance(inner, Linear) for inner in module.modules()
        ):
            # Which it would make of padded rows, for layers whose weights are its own.
            module.use_nested_tensor = False
    for whole, reason in refused.items():
        warn(whole, reason)
    return [whole for _, _, whole, _ in found if whole not in refused]


# ---- The operator

library.define("linear(Tensor x, Tensor packed, int out_features) -> Tensor")
_pack = _packer(_LinearArgs, "scheduler")
_size = ctypes.sizeof(_LinearArgs)
_no_residual = (0,) * 7


def _kernel(x, packed, out_features):
    layer, shape, packed = view(_library._library or _library._loaded(), packed)
    inputs = shape.num_heads * shape.head_dim_v or shape.query_dim
    return _compute(layer, inputs, shape.output_dim, x, out_features)


def _compute(layer, inputs, outputs, x, out_features):
    """The product of `x` with the weights of a layer that has so many inputs and outputs; the
    caller expects `out_features` of these."""
    extents = x.shape
    if not extents or extents[-1] != inputs or out_features != outputs:
        raise ValueError(
            f"x is {list(extents)}, for {out_features} outputs; the layer has {inputs} inputs and"
            f" {outputs} outputs"
        )
    y = torch.empty((*extents[:-1], outputs), dtype=x.dtype, device="cpu")
    row = inputs
    if not x.is_contiguous():
        x = x.reshape(-1, inputs)
        row, step = x.stride()
        if row < inputs or step != 1:
            x, row = x.contiguous(), inputs
    functions, own = _library._library or _library._loaded(), calls
    number = types[x.dtype]
    rows, threads = x.numel() // inputs or _empty, _openmp.scheduler(torch.get_num_threads())
    here, there = (x.data_ptr(), number, 0, 0, row, 0, 0), (y.data_ptr(), number, 0, 0, 0, 0)
    _pack(own.linear, 0, _size, rows, *here, *_no_residual, *there, threads)
    status = functions.mha_linear(layer, own.at_linear, own.at_workspace, own.room, own.at_error)
    if status:
        own.again(
            status, functions.mha_linear_workspace, functions.mha_linear, layer, own.at_linear
        )
    return y


def _fake(x, packed, out_features):
    return x.new_empty((*x.shape[:-1], out_features))


library.impl("linear", _kernel, "CPU")
torch.library.register_fake("mha::linear", _fake, lib=library)
_operator = torch.ops.mha.linear.default
