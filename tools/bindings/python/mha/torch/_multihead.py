"""nn.MultiheadAttention, its weights packed once."""

from __future__ import annotations

import ctypes

import torch

from .. import _library, _openmp
from .._docs import documented
from .._structs import _causal, _ForwardArgs, _packer
from .._structs import _empty as _none
from ._common import (
    NotServed,
    calls,
    check_known,
    check_parameters,
    from_the_first_key,
    is_eager,
    library,
    neighbours,
    packed_weights,
    refuse,
    set_masks,
    strides_of,
    types,
    unserved_tensors,
    view,
    warn,
)

_name = "MultiheadAttention"
_attributes = set(
    "add_zero_attn batch_first bias_k bias_v dropout embed_dim head_dim in_proj_bias in_proj_weight"
    " k_proj_weight kdim num_heads out_proj q_proj_weight training v_proj_weight vdim".split()
)


class MultiheadAttention(torch.nn.Module):
    """A torch.nn.MultiheadAttention for inference: projections, attention and output in one call.

    `from_module` makes it. The packed weights are the buffer `packed`, of bytes.

    Examples
    --------
    >>> module = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    >>> layer = mha.torch.MultiheadAttention.from_module(module)
    >>> x = torch.rand(2, 5, 32)
    >>> y, weights = layer(x, x, x)
    >>> y.shape, weights.shape
    (torch.Size([2, 5, 32]), torch.Size([2, 5, 5]))
    """

    @classmethod
    @documented()
    def from_module(
        cls,
        module: torch.nn.MultiheadAttention,
        *,
        weight_type: str | None = None,
        group_size: int = 0,
        arithmetic: str = "f32",
        strict: bool = False,
    ) -> MultiheadAttention:
        """Pack the weights of a module.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
            The module.
        strict : bool
            Whether to drop the float weights, so that a call that mha does not support raises
            `NotServed`. Otherwise `module` computes such a call: with a gradient, dropout or nested
            tensors.

        Returns
        -------
        MultiheadAttention
            The packed module.
        """
        if not isinstance(module, torch.nn.MultiheadAttention):
            raise TypeError(
                f"module is a {type(module).__name__}; it must be a torch.nn.MultiheadAttention"
            )
        check_known(module, [torch.nn.MultiheadAttention], _attributes)
        check_known(module.out_proj, [torch.nn.modules.linear.NonDynamicallyQuantizableLinear])
        self = cls()
        self.embed_dim, self.num_heads, self.head_dim = (
            module.embed_dim,
            module.num_heads,
            module.head_dim,
        )
        self.kdim, self.vdim, self.batch_first, self.dropout = (
            module.kdim,
            module.vdim,
            module.batch_first,
            module.dropout,
        )
        self.stock = None if strict else module
        self.train(module.training)
        check_parameters(module)
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise NotServed(
                "the module has add_bias_kv or add_zero_attn, which mha does not compute; it goes"
                " on as it is"
            )
        names = (
            ["in_proj_weight"]
            if module._qkv_same_embed_dim
            else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        )
        matrices = dict(
            zip(
                ["w_qkv"] if len(names) == 1 else ["w_q", "w_k", "w_v"],
                (getattr(module, name) for name in names),
            ),
            w_o=module.out_proj.weight,
        )
        biases = {"b_qkv": module.in_proj_bias, "b_o": module.out_proj.bias}
        self.register_buffer(
            "packed",
            packed_weights(
                self.embed_dim,
                self.num_heads,
                matrices,
                biases,
                key_dim=self.kdim,
                value_dim=self.vdim,
                layout="out_in",
                weight_type=weight_type,
                group_size=group_size,
                arithmetic=arithmetic,
            ),
        )
        return self

    @documented()
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention as torch.nn.MultiheadAttention does.

        Parameters
        ----------
        query : torch.Tensor, shape ([batch,] n_q, embed_dim)
            Queries; without ``batch_first`` of the module, (n_q, batch, embed_dim).
        key : torch.Tensor, shape ([batch,] n_kv, kdim)
            Keys.
        value : torch.Tensor, shape ([batch,] n_kv, vdim)
            Values.
        key_padding_mask : torch.Tensor, shape ([batch,] n_kv)
            Of bool: whether a key is left out. Of floats: added to scores.
        need_weights : bool
            Whether to return the attention weights.
        attn_mask : torch.Tensor, shape ([batch * num_heads,] n_q, n_kv)
            Of bool: whether a query does not attend to a key. Of floats: added to scores.
        average_attn_weights : bool
            Whether the weights are the mean over heads.
        is_causal : bool
            Whether `attn_mask`, which is needed, is the causal mask; it is not read then.

        Returns
        -------
        output : torch.Tensor, shape of `query`
            The result.
        weights : torch.Tensor or None, shape ([batch, [num_heads,]] n_q, n_kv)
            The attention weights.
        """
        reason = unserved_tensors(query, key, value)
        if reason is None and self.training and self.dropout:
            reason = "it has no dropout; eval() says that none is wanted"
        if reason is not None:
            refuse(_name, reason, self.stock is None)
            results = self.stock(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
            warn(_name, reason)
            return results
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal needs an attn_mask, the causal one")
        is_one = query.dim() == 2
        if is_one:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        mask, bias = _masks(
            attn_mask if not is_causal else None, key_padding_mask, query.shape[0], self.num_heads
        )
        operator = _kernel if is_eager() else _operator
        output, weights = operator(
            query,
            key,
            value,
            self.packed,
            self.num_heads,
            mask,
            bias,
            is_causal,
            (1 if average_attn_weights else 2) if need_weights else 0,
        )
        if is_one:
            return output[0], weights[0] if need_weights else None
        return output if self.batch_first else output.transpose(0, 1), (
            weights if need_weights else None
        )

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads}, kdim={self.kdim}, vdim={self.vdim},"
            f" batch_first={self.batch_first}"
        )


def _masks(attn_mask, key_padding_mask, batch, heads):
    """The masks of the module as one that says who attends and one to be added, each [batch, heads,
    n_q, n_kv] or broadcast to it."""
    mask = bias = None
    if attn_mask is not None:
        attn_mask = (
            attn_mask[None, None]
            if attn_mask.dim() == 2
            else attn_mask.unflatten(0, (batch, heads))
        )
    for given in (
        attn_mask,
        None if key_padding_mask is None else key_padding_mask[:, None, None, :],
    ):
        if given is None:
            continue
        # True is left out here, unlike in scaled_dot_product_attention.
        if given.dtype is torch.bool:
            mask = ~given if mask is None else mask & ~given
        else:
            bias = given if bias is None else bias + given
    return mask, bias


# ---- The operator

library.define(
    "multi_head_attention(Tensor query, Tensor key, Tensor value, Tensor packed, int num_heads,"
    " Tensor? mask=None, Tensor? bias=None, bool is_causal=False, int weights=0) -> (Tensor,"
    " Tensor)"
)
_pack = _packer(_ForwardArgs, "output")
_size = ctypes.sizeof(_ForwardArgs)


def _is_same(one, other):
    return (
        one is other
        or one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _kernel(query, key, value, packed, num_heads, mask=None, bias=None, is_causal=False, weights=0):
    """query [batch, n_q, query_dim]; key and value have the same form; weights: 0 none, 1 their
    mean over the heads, 2 those of all heads."""
    functions = _library._library or _library._loaded()
    layer, shape, packed = view(functions, packed)
    query, key, value = neighbours(query), neighbours(key), neighbours(value)
    batch, n_q, width = query.shape
    n_kv = key.shape[1]
    if (
        width != shape.query_dim
        or num_heads != shape.num_heads
        or tuple(key.shape) != (batch, n_kv, shape.key_dim)
        or tuple(value.shape) != (batch, n_kv, shape.value_dim)
    ):
        raise ValueError(
            f"query, key and value are {list(query.shape)}, {list(key.shape)} and"
            f" {list(value.shape)}, of {num_heads} heads; the layer has widths of"
            f" {shape.query_dim}, {shape.key_dim} and {shape.value_dim} and {shape.num_heads}"
            " heads, and needs one batch and as many keys as values"
        )
    output, out_weights = _empty(query, n_kv, shape.output_dim, num_heads, weights)
    if batch == 0 or n_q == 0:
        return output, out_weights.mean(dim=1) if weights == 1 else out_weights
    at_key, at_value = key.data_ptr(), value.data_ptr()
    if n_kv == 0:
        at_key = at_value = query.data_ptr()  # which is not read; NULL would be self-attention
    elif _is_same(key, value):
        at_value = 0
        if _is_same(query, key):
            at_key = 0
    (q_batch, q_row), k_strides, v_strides, (o_batch, o_row) = (
        strides_of(tensor) for tensor in (query, key, value, output)
    )
    # What is not given has none.
    k_strides, v_strides = k_strides if at_key else (0, 0), v_strides if at_value else (0, 0)
    at_masks = at_outputs = 0
    if mask is not None or bias is not None:
        masks = set_masks(calls.masks, mask, bias, (batch, num_heads, n_q, n_kv))
        at_masks = calls.at_masks
    if weights:
        calls.outputs.attention_weights, at_outputs = out_weights, calls.at_outputs
    at_sequences = from_the_first_key(batch) if is_causal and n_q != n_kv else 0
    struct, number = calls.forward, types[query.dtype]
    flags, threads = _causal if is_causal else 0, _openmp.scheduler(torch.get_num_threads())
    options = flags, 0, 0, 0, 0, 0, 0, threads
    rows = batch, n_q, n_kv or _none, at_sequences, at_masks, 0, 0, at_outputs
    of_query = query.data_ptr(), number, 0, q_batch, q_row, 0, 0
    of_key, of_value = (at_key, 0, 0, *k_strides, 0, 0), (at_value, 0, 0, *v_strides, 0, 0)
    to = output.data_ptr(), number, 0, o_batch, o_row, 0
    _pack(struct, 0, _size, *options, *rows, *of_query, *of_key, *of_value, *to)
    address = calls.at_forward
    status = functions.mha_forward(layer, address, calls.at_workspace, calls.room, calls.at_error)
    if status:
        calls.again(status, functions.mha_forward_workspace, functions.mha_forward, layer, address)
    calls.outputs.attention_weights = None
    return output, (out_weights.mean(dim=1) if weights == 1 else out_weights).to(query.dtype)


def _empty(query, n_kv, output_dim, num_heads, weights):
    batch, n_q, _ = query.shape
    shape = (batch, n_q, output_dim)
    if _is_transposed(query):
        output = query.new_empty([n_q, batch, output_dim]).transpose(0, 1)
    else:
        output = query.new_empty(shape)
    extents = [batch, num_heads, n_q, n_kv] if weights else [0]
    return output, query.new_empty(extents, dtype=torch.float32)


def _is_transposed(query):
    """Whether rows lie in the order [row, batch], as without batch_first. The output then lies so
    too."""
    return query.stride(0) < query.stride(1)


def _fake(query, key, value, packed, num_heads, mask=None, bias=None, is_causal=False, weights=0):
    output, out_weights = _empty(query, key.shape[1], query.shape[2], num_heads, weights)
    return output, (out_weights.mean(dim=1) if weights == 1 else out_weights).to(query.dtype)


library.impl("multi_head_attention", _kernel, "CPU")
torch.library.register_fake("mha::multi_head_attention", _fake, lib=library)
_operator = torch.ops.mha.multi_head_attention.default
