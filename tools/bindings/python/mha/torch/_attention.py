"""scaled_dot_product_attention as PyTorch has it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import torch

from .. import _library, _openmp
from .._docs import documented
from .._structs import _AttentionArgs, _causal, _equal_scores, _packer
from ._common import (
    calls,
    from_the_first_key,
    is_eager,
    library,
    neighbours,
    refuse,
    set_masks,
    strides_of,
    types,
    unserved_tensors,
    warn,
)

_stock = torch._C._nn.scaled_dot_product_attention
_name = "scaled_dot_product_attention"


@documented()
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    strict: bool = False,
) -> torch.Tensor:
    """Attention with the parameters of torch.nn.functional.scaled_dot_product_attention.

    Parameters
    ----------
    query : torch.Tensor, shape (..., num_heads, n_q, head_dim)
        Queries, float32, float16 or bfloat16. Extents of 1 broadcast.
    key : torch.Tensor, shape (..., num_kv_heads, n_kv, head_dim)
        Keys.
    value : torch.Tensor, shape (..., num_kv_heads, n_kv, head_dim_v)
        Values.
    attn_mask : torch.Tensor, shape (..., num_heads, n_q, n_kv)
        Of bool: whether a query attends to a key. Of floats: added to scores. It may
        broadcast to the shape.
    dropout_p : float
        Dropout; mha has none, so that PyTorch computes a call with another number than 0.
    is_causal : bool
        Whether query i attends only to keys 0 to i.
    scale : float
        Factor of the scores; None is 1 / sqrt(head_dim).
    enable_gqa : bool
        Whether several heads of the query share one of key and value.
    strict : bool
        Whether a call that mha does not support raises `NotServed`.

    Returns
    -------
    torch.Tensor, shape (..., num_heads, n_q, head_dim_v)
        The context, of the type of `query`; rows without a key are 0.

    Examples
    --------
    >>> q = k = v = torch.rand(2, 4, 10, 16)
    >>> y = mha.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(y, expected, atol=1e-5)
    True
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value, attn_mask = (
            tensor.to(dtype) if tensor is not None and tensor.dtype is torch.float32 else tensor
            for tensor in (query, key, value, attn_mask)
        )
    reason = _unserved(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is None:
        return (_kernel if is_eager() else _operator)(
            query, key, value, attn_mask, is_causal, scale, enable_gqa
        )
    refuse(_name, reason, strict)
    output = _stock(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    warn(_name, reason)
    return output


def _unserved(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
    """Why mha cannot compute a call, or None. What PyTorch refuses is left to it, for the sake of
    its own sentence."""
    reason = unserved_tensors(query, key, value)
    if reason is not None:
        return reason
    if dropout_p != 0.0:
        return "it has no dropout"
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if len(q_shape) < 2 or len(k_shape) < 2 or len(v_shape) < 2:
        return "tensors have fewer than 2 dimensions"
    if q_shape[-1] != k_shape[-1]:
        return "query and key have different widths"
    if q_shape[-1] == 0:
        return "heads have a width of 0"
    if k_shape[-2] != v_shape[-2]:
        raise ValueError(
            f"key has {k_shape[-2]} rows and value has {v_shape[-2]}; there must be as many"
        )
    if scale is not None and (isinstance(scale, str) or not -3e38 < scale < 3e38):
        return f"the scale is {scale}"
    if enable_gqa:
        if len(q_shape) < 3 or len(k_shape) < 3 or len(v_shape) < 3:
            return "tensors have no heads to share"
        if k_shape[-3] != v_shape[-3]:
            return "key and value have different numbers of heads"
        if k_shape[-3] == 0 or q_shape[-3] % k_shape[-3]:
            return "the heads of key do not divide those of query"
    if mask is not None:
        if is_causal:
            return "there is a mask beside is_causal"
        if (
            type(mask) not in (torch.Tensor, torch.nn.Parameter)
            and not torch.compiler.is_compiling()
        ):
            return f"the mask is a {type(mask).__name__}"
        if not mask.is_cpu or mask.layout is not torch.strided:
            return "the mask is not a plain tensor of the CPU"
        if (
            mask.dtype is not torch.bool
            and mask.dtype is not torch.float32
            and mask.dtype is not query.dtype
        ):
            return f"the mask is {mask.dtype}"
        if mask.requires_grad and torch.is_grad_enabled():
            return "the mask requires a gradient"
        if mask.dim() < 2 or mask.dim() > max(len(q_shape), len(k_shape), len(v_shape)):
            return f"the mask has {mask.dim()} dimensions"
    return None


# ---- The operator

library.define(
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None,"
    " bool is_causal=False, float? scale=None, bool enable_gqa=False) -> Tensor"
)
_pack = _packer(_AttentionArgs, "output")
_size = ctypes.sizeof(_AttentionArgs)


def _is_transposed(query):
    """Whether rows lie in the order [batch, row, head]. The output then lies as the query does,
    which saves models a copy."""
    return query.stride(-2) > query.stride(-3)


def _kernel(query, key, value, mask=None, is_causal=False, scale=None, enable_gqa=False):
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return _in_four_dimensions(query, key, value, mask, is_causal, scale, enable_gqa)
    batch, heads, n_q, width = query.shape
    k_batch, kv_heads, n_kv, k_width = key.shape
    v_batch, v_heads, n_v, v_width = value.shape
    if k_width != width or n_v != n_kv:
        raise ValueError(
            f"key is {list(key.shape)} and value {list(value.shape)}, for a query of"
            f" {list(query.shape)}; their rows do not fit"
        )
    if not (
        batch == k_batch == v_batch and kv_heads == v_heads and (heads == kv_heads or enable_gqa)
    ):
        query, key, value = _broadcast(query, key, value, enable_gqa)
        batch, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    if enable_gqa and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"there are {heads} heads of query and {kv_heads} of key; the latter must divide the"
            " former"
        )
    dtype = query.dtype
    shape = (batch, heads, n_q, v_width)
    if _is_transposed(query):
        o_batch, o_head, o_row = n_q * heads * v_width, v_width, heads * v_width
        output = torch.empty_strided(shape, (o_batch, o_head, o_row, 1), dtype=dtype, device="cpu")
    else:
        o_batch, o_head, o_row = heads * n_q * v_width, n_q * v_width, v_width
        output = torch.empty(shape, dtype=dtype, device="cpu")
    if batch == 0 or heads == 0 or n_q == 0 or v_width == 0:
        return output
    if n_kv == 0:
        return output.zero_()

    q_batch, q_head, q_row, q_step = query.stride()
    k_batch, k_head, k_row, k_step = key.stride()
    v_batch, v_head, v_row, v_step = value.stride()
    if not (
        q_step == k_step == v_step == 1
        and q_batch >= width <= q_head
        and q_row >= width
        and k_batch >= width <= k_head
        and k_row >= width
        and v_batch >= v_width <= v_head
        and v_row >= v_width
    ):
        query, key, value = neighbours(query), neighbours(key), neighbours(value)
        (q_batch, q_head, q_row), (k_batch, k_head, k_row), (v_batch, v_head, v_row) = (
            strides_of(query),
            strides_of(key),
            strides_of(value),
        )

    flags = _causal if is_causal else 0
    if scale is None:
        scale = 0.0
    elif -1e-45 < scale < 1e-45:  # which the struct has as 0, the default
        scale, flags = 0.0, flags | _equal_scores
    own = calls
    at_masks = 0
    if mask is not None:
        is_bool = mask.dtype is torch.bool
        mask = set_masks(
            own.masks,
            mask if is_bool else None,
            None if is_bool else mask,
            (batch, heads, n_q, n_kv),
        )
        at_masks = own.at_masks
    at_sequences = from_the_first_key(batch) if is_causal and n_q != n_kv else 0
    number = types[dtype]
    struct, address = own.attention, own.at_attention
    options = flags, 0, 0, 0, 0, 0, 0, _openmp.scheduler(torch.get_num_threads())
    rows = batch, n_q, n_kv, at_sequences, at_masks, 0, 0, 0
    widths = heads, kv_heads, width, v_width, scale, 0
    of_q = query.data_ptr(), number, 0, q_batch, q_row, q_head, 0
    of_k = key.data_ptr(), number, 0, k_batch, k_row, k_head, 0
    of_v = value.data_ptr(), number, 0, v_batch, v_row, v_head, 0
    to = output.data_ptr(), number, 0, o_batch, o_row, o_head
    _pack(struct, 0, _size, *options, *rows, *widths, *of_q, *of_k, *of_v, *to)
    functions = _library._library or _library._loaded()
    status = functions.mha_attention(address, own.at_workspace, own.room, own.at_error)
    if status:
        own.again(status, functions.mha_attention_workspace, functions.mha_attention, address)
    return output


def _broadcast(query, key, value, enable_gqa):
    """The three with one batch, and with the heads that the library takes."""
    batch = torch.broadcast_shapes(query.shape[:1], key.shape[:1], value.shape[:1])[0]
    heads = query.shape[1], key.shape[1], value.shape[1]
    if enable_gqa:
        if heads[1] != heads[2]:
            raise ValueError(
                f"key has {heads[1]} heads and value has {heads[2]}; there must be as many"
            )
    else:
        one = max(heads, key=lambda count: count != 1 and count + 1)
        if any(count not in (1, one) for count in heads):
            raise ValueError(
                f"query, key and value have {heads} heads; without enable_gqa there must be as many"
                " of each, or 1"
            )
        heads = (
            one,
            (1 if heads[1] == heads[2] == 1 else one),
            (1 if heads[1] == heads[2] == 1 else one),
        )
    return (
        tensor.expand(batch, count, *tensor.shape[2:])
        for tensor, count in zip((query, key, value), heads)
    )


def _in_four_dimensions(query, key, value, mask, is_causal, scale, enable_gqa):
    """Fewer dimensions have extents of 1 before them; of more, all before the heads become one."""
    shape = _output_shape(query, key, value, enable_gqa)
    most = max(4, query.dim(), key.dim(), value.dim())
    leading = shape[:-3] if most > 4 else None

    def four(tensor, is_mask=False):
        tensor = (
            tensor[(None,) * (most - tensor.dim())]
            if not is_mask or leading is not None
            else tensor
        )
        if leading is None:
            return tensor
        return tensor.expand(*leading, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])

    mask = None if mask is None else four(mask, True)
    return _kernel(four(query), four(key), four(value), mask, is_causal, scale, enable_gqa).reshape(
        shape
    )


def _output_shape(query, key, value, enable_gqa):
    if enable_gqa:
        leading = (
            torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
            + query.shape[-3:-2]
        )
    else:
        leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return (*leading, query.shape[-2], value.shape[-1])


def _fake(query, key, value, mask=None, is_causal=False, scale=None, enable_gqa=False):
    shape = _output_shape(query, key, value, enable_gqa)
    if query.dim() == key.dim() == value.dim() == 4 and _is_transposed(query):
        return query.new_empty([shape[0], shape[2], shape[1], shape[3]]).transpose(1, 2)
    return query.new_empty(shape)


library.impl("scaled_dot_product_attention", _kernel, "CPU")
torch.library.register_fake("mha::scaled_dot_product_attention", _fake, lib=library)
_operator = torch.ops.mha.scaled_dot_product_attention.default

# ---- In the place of PyTorch's function

_lock = threading.Lock()
_uses: list = []  # `strict` of each `with enabled()` that is under way


def _instead(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        strict=_uses[-1:] == [True],
    )


@contextlib.contextmanager
@documented()
def enabled(*, strict: bool = False) -> Iterator[None]:
    """Replace torch.nn.functional.scaled_dot_product_attention by mha's, in all threads.

    It is a context manager or a decorator. What torch.compile makes while it lasts keeps mha
    afterwards.

    Parameters
    ----------
    strict : bool
        Whether a call that mha does not support raises `NotServed`. Otherwise PyTorch computes it,
        with a `NotServedWarning`.

    Yields
    ------
    None
    """
    functional = torch.nn.functional
    with _lock:
        _uses.append(strict)
        functional.scaled_dot_product_attention = _instead
    try:
        yield
    finally:
        with _lock:
            _uses.remove(strict)
            if not _uses:
                functional.scaled_dot_product_attention = _stock
