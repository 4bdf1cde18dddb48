"""mha from Python: multi-head attention for CPUs, through the shared library. Needs NumPy, and
nothing else.

    import numpy as np, mha

    # [768, 2304] and [768, 768], float32
    layer = mha.Layer(query_dim=768, num_heads=12, w_qkv=w_qkv, w_o=w_o)
    y = layer.forward(x, is_causal=True)  # [batch, n, 768] or [n, 768], float32
    y, steps = layer.forward(x, is_causal=True, want=["attention_weights"])    # and a look inside

    cache = mha.KvCache(
        num_sequences=1, capacity=4096, num_kv_heads=12, head_dim=64, k_type="f16", v_type="f16"
    )
    rope = mha.Rope.tables(64, num_positions=4096)
    y = layer.forward(prompt, is_causal=True, rope=rope, cache=cache)          # then token by token

Names and meanings are those of mha.h, which is the reference. What is here adds shapes: arrays are
checked for type, shape and layout, never converted or copied without being asked, and a wrong one
is a TypeError or ValueError. What the library finds to be wrong is an mha.Error with the library's
sentence.

The library is looked for in load(path), else in the environment variable MHA_LIBRARY, else in this
package, where `pip install .` puts it, else as build/src/libmha.so of the sources that this package
lies in, else among the system's libraries.

mha.torch, mha.transformers and mha.onnx put it under those runtimes; each needs its runtime, and is
imported by its own name.

Calls run on the calling thread, without Python's lock, so that several threads can use one layer at
once; or on those of a Scheduler. They compute in memory of their own, or where they are told to:
outputs, looks inside, workspace, packed weights and caches may be the caller's arrays.
"""

from ._arrays import aligned
from ._attention import attention, attention_info
from ._cache import KvCache
from ._callbacks import Scheduler
from ._calls import Prepared
from ._choose import choose_keys
from ._layer import Layer, Linear, pack, pack_size, verify
from ._library import Error, __version__, contract, instruction_sets, load, version
from ._options import ContextNorm, Norm, Rope, ScoreOptions, alibi_slopes, t5_relative_bias
from ._packed import open_layer
from ._recurrent import causal_conv, recurrent_attention, recurrent_attention_info
from ._states import states_finish, states_merge
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
    score_groups,
    structs,
    types,
)

__all__ = [
    "__version__",
    "ContextNorm",
    "Error",
    "KvCache",
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
    "score_groups",
    "states_finish",
    "states_merge",
    "structs",
    "t5_relative_bias",
    "types",
    "verify",
    "version",
]
