"""Multi-head attention for CPUs, on NumPy arrays.

>>> import numpy as np, mha
>>> w_qkv = np.random.rand(64, 192).astype(np.float32)
>>> w_o = np.random.rand(64, 64).astype(np.float32)
>>> layer = mha.Layer(query_dim=64, num_heads=4, w_qkv=w_qkv, w_o=w_o)
>>> x = np.random.rand(10, 64).astype(np.float32)  # rows; or a batch of sequences, [2, 10, 64]
>>> y = layer.forward(x, is_causal=True)
>>> y, outputs = layer.forward(x, is_causal=True, want=["attention_weights"])

>>> cache = mha.KvCache(num_sequences=1, capacity=4096, num_kv_heads=4, head_dim=16, k_type="f16")
>>> rope = mha.Rope.tables(16, num_positions=4096)
>>> y = layer.forward(x, is_causal=True, rope=rope, cache=cache)  # a prompt, then token by token
>>> cache.length()
10

Arrays are checked for type, shape and layout, and never converted or copied. A wrong one raises
TypeError or ValueError; what the library refuses raises `mha.Error`. Every call takes arrays with a
batch, or leaves it out. Rows are float32 or float16, or bfloat16 as the bits in uint16.

Calls run on the calling thread or on those of a `Scheduler`, without Python's lock, so that several
threads can use one layer at once. Outputs, workspaces, packed weights and caches may be the
caller's arrays. `load` says which shared library is used.

The dictionaries `types`, `layouts`, `gates`, `activations`, `arithmetics`, `cache_kinds`,
`cache_values`, `rope_styles`, `score_columns`, `score_segments` and `instruction_set_names` have
the names that keywords take, with the numbers of the C interface; `structs` are its structs.
`mha.formats` imports quantised weights; `mha.torch`, `mha.transformers` and `mha.onnx` serve those
runtimes. Each is imported by its own name.
"""

from ._arrays import aligned
from ._attention import attention, attention_info
from ._cache import KvCache, KvPool
from ._callbacks import Scheduler
from ._calls import Prepared
from ._choose import choose_keys
from ._layer import Layer, Linear, pack, pack_size, verify
from ._library import Error, __version__, contract, instruction_sets, load, version
from ._options import ContextNorm, Norm, Rope, ScoreOptions, alibi_slopes, t5_relative_bias
from ._packed import open_layer
from ._partials import partials_finish, partials_merge
from ._recurrent import causal_conv, recurrent_attention, recurrent_attention_info
from ._structs import (
    activations,
    arithmetics,
    cache_kinds,
    cache_values,
    gates,
    instruction_set_names,
    layouts,
    rope_styles,
    score_columns,
    score_segments,
    structs,
    types,
)

__all__ = [
    "__version__",
    "ContextNorm",
    "Error",
    "KvCache",
    "KvPool",
    "Layer",
    "Linear",
    "Norm",
    "Prepared",
    "Rope",
    "Scheduler",
    "ScoreOptions",
    "activations",
    "alibi_slopes",
    "aligned",
    "arithmetics",
    "attention",
    "attention_info",
    "cache_kinds",
    "cache_values",
    "causal_conv",
    "choose_keys",
    "contract",
    "gates",
    "instruction_set_names",
    "instruction_sets",
    "layouts",
    "load",
    "open_layer",
    "pack",
    "pack_size",
    "recurrent_attention",
    "recurrent_attention_info",
    "rope_styles",
    "score_columns",
    "score_segments",
    "partials_finish",
    "partials_merge",
    "structs",
    "t5_relative_bias",
    "types",
    "verify",
    "version",
]
