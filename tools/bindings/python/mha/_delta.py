"""The recurrent layers of transformers' models: functions of model files, replaced for a while."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from . import _openmp
from ._docs import documented
from ._library import _loaded
from ._structs import _CausalConvArgs, _empty, _packer, _RecurrentArgs, activations
from .torch._common import calls, neighbours, refuse, strides_of, types, unserved_tensors, warn

_rule_takes = (
    "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel kwargs"
)
_conv_takes = {
    "causal_conv1d_fn": "hidden_states weight bias activation kwargs",
    "causal_conv1d_update": "hidden_states conv_state weight bias activation",
}
_rules = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
_pack_rule, _pack_conv = (
    _packer(_RecurrentArgs, "num_snapshots"),
    _packer(_CausalConvArgs, "state_out"),
)


@contextlib.contextmanager
@documented()
def recurrent_layers(model: torch.nn.Module, strict: bool = False) -> Iterator[None]:
    """Let mha compute the delta rules and short convolutions of a model's family.

    It is a context manager for Qwen3-Next, Qwen3.5, Kimi Linear, Olmo Hybrid and others. It
    replaces functions of the file that the family is in, for all models of the family and all
    threads, and puts them back in the end.

    Parameters
    ----------
    model : torch.nn.Module
        A model of the family.
    strict : bool
        Whether a call that mha does not support, such as one with a gradient, raises an error.
        Otherwise the model's own functions compute it, with one warning.

    Yields
    ------
    None

    Raises
    ------
    ValueError
        If the model has no such functions, or if those of this version of transformers are others.
    """
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    found = [
        (file, names)
        for file in files
        for names in _rules
        if any(hasattr(file, name) for name in names)
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no delta rule that mha.transformers knows, in transformers"
            f" {transformers.__version__}: a family's file has {' and '.join(_rules[0])}, or"
            f" {' and '.join(_rules[1])}"
        )
    before = []
    try:
        for file, names in found:
            _check_functions(file, names)
            for name in (*names, *_conv_takes):
                original = getattr(file, name)
                make = (
                    _rule
                    if name in names
                    else _convolution
                    if name == "causal_conv1d_fn"
                    else _update
                )
                before.append((file, name, original))
                setattr(file, name, make(original, strict))
        yield
    finally:
        for file, name, original in reversed(before):
            setattr(file, name, original)


@functools.cache
def _check_functions(file, names):
    """Raises where a function takes other arguments than those of the versions that are tested, or
    computes something else on a few rows."""
    unlike = (
        f"{file.__name__} of transformers {transformers.__version__} is unlike that of the versions"
        " that mha.transformers is tested with: "
    )
    for name in (*names, *_conv_takes):
        takes = inspect.signature(getattr(file, name)).parameters if hasattr(file, name) else None
        if takes is None:
            raise ValueError(f"{unlike}it has no {name}")
        takes, wanted = (
            " ".join(each for each in takes if each != "chunk_size"),
            _conv_takes.get(name, _rule_takes),
        )
        if takes != wanted:
            raise ValueError(f"{unlike}{name} takes {takes}, not {wanted}")
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    q, k, v, state = draw(2, 3, 2, 4), draw(2, 3, 2, 4), draw(2, 3, 2, 5), draw(2, 2, 4, 5)
    g = -draw(2, 3, 2, *((4,) if "kimi" in names[0] else ())).abs()
    given = dict(
        g=g,
        beta=draw(2, 3, 2).sigmoid(),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    x, rows, weight, bias = draw(2, 6, 3), draw(2, 6, 4), draw(6, 4), draw(6)
    with torch.no_grad():
        for name, arguments, options, make in (
            *((name, (q, k, v), given, _rule) for name in names),
            ("causal_conv1d_fn", (x, weight, bias, "silu"), {}, _convolution),
            ("causal_conv1d_update", (x[..., :1], rows, weight, bias, "silu"), {}, _update),
        ):
            function, results = getattr(file, name), []
            for call in function, make(function, True):
                own = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
                result = call(*own, **options)
                results.append(
                    [
                        *(result if isinstance(result, tuple) else (result,)),
                        *(one for one in own if isinstance(one, torch.Tensor)),
                    ]
                )
            if not all(torch.allclose(*both, 1e-3, 1e-4) for both in zip(*results, strict=True)):
                raise ValueError(f"{unlike}{name} computes something else")


def _served(what, tensors, strict):
    """Whether mha computes with these; otherwise it says why not."""
    reasons = (unserved_tensors(x, x, x) for x in tensors if x is not None)
    reason = (
        "torch.compile cannot look into it"
        if torch.compiler.is_compiling()
        else next(filter(None, reasons), None)
    )
    if reason:
        refuse(what, reason, strict)
        warn(what, reason)
    return not reason


def _rule(original, strict):
    @functools.wraps(original)
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if kwargs.get("cu_seqlens") is not None or not _served(
            "a delta rule", (query, key, value, g, beta, initial_state), strict
        ):
            return original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **kwargs,
            )
        (batch, rows, heads, width), (v_heads, width_v) = query.shape, value.shape[2:]
        q, k, v = neighbours(query), neighbours(key), neighbours(value)
        decay, betas = (
            (g if g.ndim == 4 else g[..., None]).contiguous(),
            beta[..., None].contiguous(),
        )
        output = torch.empty(batch, rows, v_heads, width_v, dtype=query.dtype, device="cpu")
        state = None if initial_state is None else initial_state.to(torch.float32).contiguous()
        after = (
            torch.empty(batch, v_heads, width, width_v, device="cpu")
            if output_final_state
            else None
        )
        args = _RecurrentArgs()
        inputs = [
            number
            for tensor in (q, k, v, decay, betas)
            for number in (tensor.data_ptr(), types[tensor.dtype], 0, *strides_of(tensor), 0)
        ]
        counts = heads, key.shape[2], v_heads, width, width_v, decay.shape[3]
        options = 0.0, 1e-6 if use_qk_l2norm_in_kernel else 0.0, 0, 0, 0, 0
        extents = _openmp.scheduler(torch.get_num_threads()), batch or _empty, rows or _empty
        to = output.data_ptr(), types[output.dtype], 0, 0, 0, 0, 0
        states = [0 if tensor is None else tensor.data_ptr() for tensor in (state, after)]
        size = ctypes.sizeof(args)
        _pack_rule(args, 0, size, *counts, *options, *extents, *inputs, *to, *states, 0, 0)
        _run("mha_recurrent_attention", args)
        return output, after

    return rule


def _convolution(original, strict):
    @functools.wraps(original)
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        known = (
            activation in (None, "silu", "swish")
            and 2 <= weight.shape[-1] <= 8
            and kwargs.get("seq_idx") is None
            and kwargs.get("cu_seqlens") is None
        )
        if not known or not _served("a convolution", (hidden_states, weight, bias), strict):
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        x = neighbours(hidden_states.transpose(1, 2))
        (batch, rows, channels), output = x.shape, torch.empty(x.shape, dtype=x.dtype, device="cpu")
        kernel = weight.detach().to(torch.float32).contiguous()
        offset = None if bias is None else bias.detach().to(torch.float32).contiguous()
        args = _CausalConvArgs()
        at_offset = 0 if offset is None else offset.data_ptr()
        weights = channels, weight.shape[-1], kernel.data_ptr(), at_offset
        options = activations["silu" if activation else "none"], 0
        extents = _openmp.scheduler(torch.get_num_threads()), batch or _empty, rows or _empty
        of_x = x.data_ptr(), types[x.dtype], 0, *strides_of(x), 0, 0
        to = output.data_ptr(), types[x.dtype], *(0,) * 7
        _pack_conv(args, 0, ctypes.sizeof(args), *weights, *options, *extents, *of_x, *to)
        _run("mha_causal_conv", args)
        return output.transpose(1, 2)

    return convolve


def _update(original, strict):
    convolve = _convolution(lambda *_, **__: None, strict)

    @functools.wraps(original)
    def update(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        rows, size = hidden_states.shape[-1], weight.shape[-1]
        whole = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], dim=-1)
        output = (
            convolve(whole[..., -(rows + size - 1) :], weight, bias, activation)
            if conv_state.shape[-1] >= size - 1
            else None
        )
        if output is None:
            return original(hidden_states, conv_state, weight, bias, activation)
        conv_state.copy_(whole[..., -conv_state.shape[-1] :])
        return output[..., -rows:].to(hidden_states.dtype)

    return update


def _run(name, args):
    library, own, address = _loaded(), calls, ctypes.addressof(args)
    function = getattr(library, name)
    status = function(address, own.at_workspace, own.room, own.at_error)
    if status:
        own.again(status, getattr(library, name + "_workspace"), function, address)
