"""mha under PyTorch, on CPU tensors without gradients.

>>> import mha.torch, torch
>>> q = k = v = torch.rand(2, 4, 10, 16)
>>> y = mha.torch.scaled_dot_product_attention(q, k, v, is_causal=True)

>>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
>>> x = torch.rand(2, 10, 32)
>>> with mha.torch.enabled(), torch.inference_mode():  # a model as it is
...     y = model(x)
>>> mha.torch.pack_linears(model.eval(), weight_type="int8", skip=["self_attn"])
['linear1', 'linear2']

All are custom operators, which torch.compile and torch.export keep. Tensors are taken by their
strides and not copied, in float32, float16 and bfloat16; mha computes in float32. PyTorch computes
what mha does not support, with one warning for each reason; with strict=True this is an error.
Calls use torch.get_num_threads() threads, PyTorch's own, and the results have the same bits for any
number. src/docs/python.md has the cases and figures.
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
