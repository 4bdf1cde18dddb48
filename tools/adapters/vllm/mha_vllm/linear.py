"""Linear layers of vLLM by mha: their weights are packed once, after loading."""

from __future__ import annotations

from collections.abc import Callable

import mha
import torch
from mha._weights import weight_type_of
from mha.torch._common import is_eager, names, packed_weights
from mha.torch._linear import _compute, _operator
from vllm.model_executor.layers import utils

from . import options

_stock = utils.dispatch_cpu_unquantized_gemm


def install() -> None:
    """Put `dispatch` in the place of vLLM's function, which it looks up for each layer."""
    utils.dispatch_cpu_unquantized_gemm = dispatch


def uninstall() -> None:
    """Put vLLM's function back, for models that are loaded from then on."""
    utils.dispatch_cpu_unquantized_gemm = _stock


def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Set `layer.cpu_linear`, which computes the layer, as vLLM's function of this name does.

    vLLM keeps the weights of embeddings (`remove_weight` is false), of which few are also the
    matrix of an LM head: these are packed by the first call.
    """
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2 or weight.dtype not in names:
        return _stock(layer, remove_weight)
    layer.cpu_linear = _linear(weight.detach(), added_bias(layer), is_packed_now=remove_weight)
    if remove_weight:
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)


def is_served(layer: torch.nn.Module) -> bool:
    """Whether mha computes the layer."""
    return getattr(getattr(layer, "cpu_linear", None), "is_mha", False)


def added_bias(layer: torch.nn.Module) -> torch.Tensor | None:
    """The bias that vLLM adds in each call of the layer; of row-parallel layers the first rank adds
    it, and others are added by whoever calls the layer."""
    bias = getattr(layer, "bias", None)
    is_added = not getattr(layer, "skip_bias_add", False) and not (
        hasattr(layer, "input_is_parallel") and layer.tp_rank > 0
    )
    return bias.detach() if isinstance(bias, torch.Tensor) and is_added else None


def _linear(
    weight: torch.Tensor, bias: torch.Tensor | None, is_packed_now: bool
) -> Callable[..., torch.Tensor]:
    _, weight_type, group_size, arithmetic = options()
    rows, columns = weight.shape
    if weight_type is None and arithmetic in ("f32", "bf16"):
        weight_type = weight_type_of(
            names[weight.dtype] if arithmetic == "f32" else None, arithmetic, names[weight.dtype]
        )

    def pack(bias: torch.Tensor | None) -> torch.Tensor:
        return packed_weights(
            columns,
            0,
            {"w_o": weight},
            {"b_o": bias},
            output_dim=rows,
            layout="out_in",
            weight_type=weight_type,
            group_size=group_size,
            arithmetic=arithmetic,
        )

    def computing(packed: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = mha.Layer.view(packed.numpy())  # once, since the weights stay
        return lambda x: (
            _compute(layer._handle, columns, rows, x, rows)
            if is_eager()
            else _operator(x, packed, rows)
        )

    if is_packed_now:
        product = computing(pack(bias))
        weight = None  # frees it

        def linear(x, _, given=None):
            if (given is None) != (bias is None):
                raise RuntimeError("vLLM adds a bias in some calls of a layer and not in others")
            return product(x)

    else:
        lazily = []

        def linear(x, _, given=None):
            if not lazily:
                lazily.append(computing(pack(None)))
            y = lazily[0](x)
            return y if given is None else y + given

    linear.is_mha = True
    return linear
