"""mha under PyTorch, on CPU tensors without gradients.

    import mha.torch

    # PyTorch's signature and meaning
    y = mha.torch.scaled_dot_product_attention(q, k, v, is_causal=True)

    with mha.torch.enabled():  # or for a model as it is, which calls
        y = model(x)  # torch.nn.functional.scaled_dot_product_attention

    # an nn.MultiheadAttention, its weights packed once
    layer = mha.torch.MultiheadAttention.from_module(model.self_attn)
    y, _ = layer(x, x, x, need_weights=False)

    # the nn.Linear of a model, with weights of 8 bits, in integers
    mha.torch.pack_linears(model, weight_type="int8", arithmetic="int16")

All are custom operators, which torch.compile and torch.export keep. Tensors are taken by their
strides and not copied, in float32, float16 and bfloat16; mha computes in float32. What is not
served goes to PyTorch's own operator, with one warning for each reason; with strict=True it is an
error. Calls use as many threads as torch.get_num_threads() says, PyTorch's own ones, and the
results are the same bits for any number. src/docs/python.md has the cases and figures.
"""

try:
    import torch as _torch
except ImportError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "mha.torch needs PyTorch, which is not installed: pip install torch"
    ) from None
if tuple(int(number) for number in _torch.__version__.split(".")[:2]) < (2, 5):
    raise ImportError(f"mha.torch needs PyTorch 2.5 or newer; this is {_torch.__version__}")

from ._attention import enabled, scaled_dot_product_attention
from ._common import NotServed, NotServedWarning
from ._linear import Linear, pack_linears
from ._multihead import MultiheadAttention

__all__ = [
    "Linear",
    "MultiheadAttention",
    "NotServed",
    "NotServedWarning",
    "enabled",
    "pack_linears",
    "scaled_dot_product_attention",
]
