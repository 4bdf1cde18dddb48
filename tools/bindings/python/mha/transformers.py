"""mha under the models of Hugging Face transformers, on CPUs.

    import mha.transformers

    model.set_attn_implementation("mha")  # or from_pretrained(..., attn_implementation="mha")
    model.set_attn_implementation("mha_strict")  # raises where "mha" would warn

    cache = mha.transformers.KvCache(model.config, max_length=4096, type="f16")
    model.generate(**inputs, past_key_values=cache)

    # delta rules and short convolutions of Qwen3-Next, Qwen3.5, Kimi Linear and others
    with mha.transformers.recurrent_layers(model):
        model.generate(**inputs)

The masks of transformers' own functions, such as causal, sliding, chunked, packed and padded,
become flags, lengths and groups of positions: no array of queries by keys is made. A function of
anybody else's becomes exactly the mask of eager attention. A `Mask` is a tensor to everybody else:
whatever looks into it finds the eager mask.

The model's own eager attention computes what mha does not support, with one warning that says why:
tensors that need a gradient, lie on another device or have a type other than float32, float16 and
bfloat16, dropout, and arguments that are not known here. So it does what torch.compile compiles,
without a warning.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

try:
    import torch
    import transformers
except ImportError as error:
    raise ImportError(
        f"mha.transformers needs PyTorch and transformers: {error}; pip install torch transformers"
    ) from None

from . import _openmp
from ._arrays import _named, aligned
from ._cache import KvCache as _Cache
from ._delta import recurrent_layers as recurrent_layers
from ._docs import documented
from ._library import Error, _loaded
from ._structs import (
    _attention_arithmetics,
    _AttentionArgs,
    _broadcast,
    _causal,
    _empty,
    _equal_scores,
    _new,
    _packer,
    _ScoreArrays,
    _ScoreOptions,
    _Sequences,
    _Strides,
    _window_left,
    _window_right,
    score_segments,
)
from .torch._common import calls, neighbours, set_masks, strides_of, types

__all__ = ["KvCache", "LatentCache", "Mask", "attention", "mask", "recurrent_layers"]

_tested = "5.23 and 5.24"


def _unusable(why):
    return ImportError(
        f"mha.transformers cannot be used with transformers {transformers.__version__}: {why}. It"
        f" is tested with {_tested}; older versions lack what it needs, and newer ones may have"
        " changed it."
    )


try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.cache_utils import (
        DynamicCache,
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )
except ImportError as error:
    raise _unusable(error) from None

# ---- Tensors that are computed only if somebody looks into them


class _Lazy(torch.Tensor):
    """A tensor without memory. Any operation on it computes it first, by make(), and works on that.
    is_pristine until somebody writes to it, or to a view of it, which is a _Lazy too."""

    @staticmethod
    def __new__(cls, shape, dtype, make):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        self._make, self._made, self._viewed, self.is_pristine = make, None, None, True
        return self

    def dense(self):
        if self._made is None:
            self._made = self._make()
        return self._made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        # Models cut masks to the number of keys, which they have already.
        if function is torch.ops.aten.alias.default:
            same = torch.Tensor._make_wrapper_subclass(
                cls, args[0].shape, dtype=args[0].dtype, device="cpu"
            )
            same.__dict__ = args[0].__dict__
            return same
        result = function(*_dense(args), **_dense(kwargs or {}))
        if any(returned.alias_info is not None for returned in function._schema.returns):
            if isinstance(result, torch.Tensor) and not any(
                a.alias_info is not None and a.alias_info.is_write
                for a in function._schema.arguments
            ):
                return args[0]._view(result) if isinstance(args[0], _Lazy) else result
            for lazy in (*args, *(kwargs or {}).values()):
                if isinstance(lazy, _Lazy):
                    lazy._written()
        return result

    def _view(self, dense):
        view = torch.Tensor._make_wrapper_subclass(
            _Lazy, dense.shape, strides=dense.stride(), dtype=dense.dtype, device="cpu"
        )
        view._made, view._viewed, view.is_pristine = dense, self, True
        return view

    def _written(self):
        self.is_pristine = False
        if self._viewed is not None:
            self._viewed._written()

    def tolist(self):
        return self.dense().tolist()

    def numpy(self, **options):
        self._written()
        return self.dense().numpy(**options)

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype})"


def _dense(tree):
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.dense() if isinstance(leaf, _Lazy) else leaf, tree
    )


# ---- Masks


class Mask(_Lazy):
    """The mask of a call: a tensor that is made when somebody looks into it.

    As long as ``is_pristine``, its `flags`, `windows` and so on say the same as its elements.
    """


class _Unknown(Exception):
    pass


def _code(function):
    return getattr(function, "__code__", None)


def _known_codes():
    """The code of each kind of mask function, once it is seen to do on a few positions what it is
    taken for."""
    m, (ids, blocks, positions) = (
        masking_utils,
        torch.tensor([[[0, 0, 1, 1, 1, 2]], [[-1, 3, 3, -1, -1, 5]], [[0, 1, 0, 1, 2, 0]]]),
    )
    q, k = torch.arange(6)[:, None], torch.arange(6)
    samples = {
        "causal": (m.causal_mask_function, k <= q),
        "bidirectional": (m.bidirectional_mask_function, k >= 0),
        "left": (m.sliding_window_overlay(2), k > q - 2),
        "both": (m.sliding_window_bidirectional_overlay(2), (k - q).abs() <= 2),
        "chunks": (m.chunked_overlay(2, torch.tensor([1])), (k - 1) // 2 == (q - 1) // 2),
        "packed": (m.packed_sequence_mask_function(ids), ids[0][q] == ids[0][k]),
        "remapped": (
            m.remap_positions_for_packed_sequence(m.causal_mask_function, positions),
            positions[0][k] <= positions[0][q],
        ),
        "blocks": (
            m.blockwise_overlay(blocks),
            (blocks[0][q] == blocks[0][k]) & (blocks[0][q] >= 0),
        ),
        "and": (
            m.and_masks(m.causal_mask_function, m.sliding_window_overlay(2)),
            (k <= q) & (k > q - 2),
        ),
        "or": (
            m.or_masks(m.causal_mask_function, m.blockwise_overlay(blocks)),
            (k <= q) | (blocks[0][q] == blocks[0][k]) & (blocks[0][q] >= 0),
        ),
    }
    for name, (function, meaning) in samples.items():
        if not torch.equal(
            m.sdpa_mask(1, 6, 6, 0, 0, function, allow_is_causal_skip=False)[0, 0],
            meaning.expand(6, 6),
        ):
            raise ValueError(f"a mask means something else ({name})")
    return {_code(function): name for name, (function, _) in samples.items()}


try:
    _kinds = _known_codes()
except Exception as error:  # whatever another version makes of these calls
    raise _unusable(error) from None


class _Structure:
    """What a mask function of transformers says, by the code that it runs and the variables that it
    holds. Raises _Unknown if that is not known to the last bit, so that the mask is computed
    element by element instead."""

    def __init__(self, function, num_keys):
        self.flags, self.left, self.right, self.groups, self.also, self.num_keys = (
            0,
            0,
            0,
            None,
            0,
            num_keys,
        )
        if _kinds.get(_code(function)) == "or":  # image blocks, beside what the other mask leaves
            function, *blocks = self._cells(function)["mask_functions"]
            if [_kinds.get(_code(part)) for part in blocks] != ["blocks"]:
                raise _Unknown
            self.groups, self.also = (
                self._cells(blocks[0])["block_sequence_ids"],
                score_segments["also"],
            )
        self._read(function)

    @staticmethod
    def _cells(function):
        return (
            dict(
                zip(
                    _code(function).co_freevars,
                    (cell.cell_contents for cell in function.__closure__ or ()),
                )
            )
            if _code(function)
            else {}
        )

    def _read(self, function):
        kind, cells = _kinds.get(_code(function)), self._cells(function)
        if kind == "causal":
            self.flags |= _causal
        elif kind == "and":
            # Which says what "remapped" asks.
            for part in sorted(
                cells["mask_functions"], key=lambda part: _kinds.get(_code(part)) != "packed"
            ):
                self._read(part)
        elif kind == "left":
            self._window(cells["sliding_window"] - 1, None)
        elif kind == "both":
            self._window(cells["sliding_window"], cells["sliding_window"])
        elif kind == "chunks":
            self._within(
                (torch.arange(self.num_keys) - cells["left_padding"][:, None])
                // cells["chunk_size"]
            )
        elif kind == "packed":
            self._within(cells["packed_sequence_mask"])
        elif (
            kind == "remapped"
            and self.groups is not None
            and ((cells["position_ids"].diff() == 1) | (self.groups.diff() > 0)).all()
        ):
            # As each position follows the one before it or begins a group, distances are those of
            # rows.
            self._read(cells["mask_function"])
        elif kind != "bidirectional":
            raise _Unknown

    def _window(self, left, right):
        if type(left) is not int or left < 0 or self.flags & (_window_left | _window_right):
            raise _Unknown
        self.flags, self.left = self.flags | _window_left, left
        if right is not None:
            self.flags, self.right = self.flags | _window_right, right

    def _within(self, groups):
        if self.groups is not None:
            raise _Unknown
        self.groups = groups


@documented()
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Make the mask of a call, for AttentionMaskInterface.

    Parameters
    ----------
    batch_size : int
        Number of sequences.
    q_length : int
        Number of queries.
    kv_length : int
        Number of keys.
    q_offset : int
        Position of the first query.
    kv_offset : int
        Position of the first key.
    mask_function : callable
        A function of transformers, or of anybody, that says whether a query attends to a key.
    attention_mask : torch.Tensor, shape (batch_size, keys)
        The padding.
    dtype : torch.dtype
        Type of the mask.
    device : torch.device or str
        Its device.
    **kwargs : Any
        What the mask of eager attention takes besides.

    Returns
    -------
    torch.Tensor or None
        A `Mask`, or where that cannot be one the mask of eager attention.
    """
    make = functools.partial(
        masking_utils.eager_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        dtype=dtype,
        device=device,
        **kwargs,
    )
    if (
        torch.compiler.is_compiling()
        or torch.device(device).type != "cpu"
        or dtype not in types
        or (
            attention_mask is not None
            and (attention_mask.ndim != 2 or len(attention_mask) != batch_size)
        )
    ):
        return make()
    try:
        structure = _Structure(mask_function, kv_offset + kv_length)
    except _Unknown:
        return make()
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        padding = None if padding.all() else padding
    if (
        padding is None
        and structure.flags == 0
        and structure.groups is None
        and kwargs.get("allow_is_bidirectional_skip")
    ):
        return None
    self = Mask(
        (batch_size, 1, q_length, kv_length),
        dtype,
        functools.partial(make, **{**kwargs, "allow_is_bidirectional_skip": False}),
    )
    self.flags, self.left, self.right, self.also = (
        structure.flags,
        structure.left,
        structure.right,
        structure.also,
    )
    self.kv_first_rows = self.kv_lengths = self.q_segments = self.kv_segments = self.holes = None
    if padding is not None:
        count, first = padding.sum(1), padding.to(torch.uint8).argmax(1)
        columns = torch.arange(kv_length)
        if torch.equal(padding, (columns >= first[:, None]) & (columns < (first + count)[:, None])):
            self.kv_first_rows, self.kv_lengths = first, count
        else:
            self.holes = padding[:, None, None, :]
    if structure.groups is not None:
        groups = structure.groups.to(torch.int32).expand(batch_size, -1)
        self.q_segments = groups[:, q_offset : q_offset + q_length].contiguous()
        self.kv_segments = groups[:, kv_offset : kv_offset + kv_length].contiguous()
        if self.q_segments.shape[1] != q_length or self.kv_segments.shape[1] != kv_length:
            return make()
    first = (
        torch.zeros(batch_size, dtype=torch.int64)
        if self.kv_first_rows is None
        else -self.kv_first_rows
    )
    self.q_first_positions = first + (int(q_offset) - kv_offset)
    return self


# ---- The cache


@documented()
class KvCache(DynamicCache):
    """A cache of transformers whose keys and values lie in a cache of mha.

    Attention by mha appends to it in the call, and reads it as it is stored. Anything else finds
    the tensors of a DynamicCache, which are read back: right, but slow.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        The configuration of the model.
    max_length : int
        The most positions of each sequence.
    type : str or tuple of str
        Type of the stored keys and values, "f32", "f16", "bf16" or "int8", or a pair of types,
        of which the second may be "int4", too.
    attention_arithmetic : {"f32", "int16"}
        What attention over the cache computes in. "int16" needs keys of "int8", and values of
        "int8" or "int4".

    Examples
    --------
    >>> config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=2)
    >>> cache = mha.transformers.KvCache(config, max_length=64, type=("int8", "int4"))
    """

    def __init__(
        self,
        config: transformers.PretrainedConfig,
        max_length: int,
        type: str | tuple[str, str] = "f32",
        attention_arithmetic: str = "f32",
    ) -> None:
        super().__init__(config=config)
        stored = (type, type) if isinstance(type, str) else type
        arithmetic = _arithmetic(attention_arithmetic, stored)
        self.layers: list = [
            (
                _CacheLayer(max_length, stored, arithmetic)
                if layer.__class__ in (DynamicLayer, DynamicSlidingWindowLayer)
                else layer
            )
            for layer in self.layers
        ]


def _arithmetic(name, stored):
    """The number of an attention_arithmetic, which keys and values of these types have to allow."""
    number = _named(_attention_arithmetics, name, "attention_arithmetic")
    if number and not (stored[0] == "int8" and stored[1] in ("int8", "int4")):
        raise ValueError(
            f"attention_arithmetic is {name!r}, but keys are stored as {stored[0]!r} and values as"
            f" {stored[1]!r}; keys must be 'int8', and values 'int8' or 'int4'"
        )
    return number


class _CacheLayer(DynamicLayer):
    """Rows that update() brings wait in `pending` until attention appends them; whatever else needs
    them appends them first."""

    def __init__(self, max_length, stored, arithmetic):
        super().__init__()
        self.max_length, self.stored, self.arithmetic = max_length, stored, arithmetic
        self.reset()

    def reset(self):
        self.cache, self.pending, self.length, self.is_initialized = None, None, 0, False
        # [batch]: rows of padding at the front, which are not stored; None: none of any sequence.
        self.skipped = None

    def __deepcopy__(self, memo):
        self.flush()
        other = type(self)(self.max_length, self.stored, self.arithmetic)
        if self.is_initialized:
            buffer = aligned(self.cache.buffer.size)
            buffer[:] = self.cache.buffer
            other.cache, other.length, other.is_initialized = _Cache.view(buffer), self.length, True
            other.skipped = None if self.skipped is None else self.skipped.clone()
        return other

    def lazy_initialization(self, keys, values):
        if keys.device.type != "cpu" or not {keys.dtype, values.dtype} <= set(types):
            raise ValueError(
                f"keys are {keys.dtype} on {keys.device}; KvCache takes float32, float16 and"
                " bfloat16 on CPUs"
            )
        batch, heads, _, width = keys.shape
        self.cache = _Cache(
            num_sequences=batch,
            capacity=self.max_length,
            num_kv_heads=heads,
            head_dim=width,
            head_dim_v=values.shape[3],
            k_type=self.stored[0],
            v_type=self.stored[1],
        )
        self.is_initialized = True

    def update(self, keys, values, *args, **kwargs):
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError(
                "keys or values need a gradient, which KvCache does not keep; torch.no_grad() says"
                " that none is wanted"
            )
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.flush()
        self.pending = keys, values
        return tuple(_Stored(self, which, tensor) for which, tensor in enumerate(self.pending))

    def flush(self, padding=None):
        if self.pending is not None:
            self.store(*self.pending, padding)
            self.appended(padding)

    def settle(self, mask):
        """Appends what is pending as a call with this mask would: without padding."""
        if (
            self.pending is not None
            and (mask is None or isinstance(mask, Mask))
            and self.takes(mask, False)
        ):
            self.flush(self.padding(mask))

    def store(self, keys, values, padding):
        """Appends rows [batch, heads, rows, width] without attention; padding is how many of each
        sequence are left out at the front, or None."""
        keys, values = (
            rows.detach().transpose(1, 2).to(torch.float32).contiguous().numpy()
            for rows in (keys, values)
        )
        for sequence in range(len(keys)):
            first = 0 if padding is None else min(int(padding[sequence]), keys.shape[1])
            self.cache.append(sequence, keys[sequence, first:], values[sequence, first:])

    def read(self, which, length, dtype):
        self.flush()
        shape = self.cache.shape
        result = torch.zeros(
            shape["num_sequences"],
            shape["num_kv_heads"],
            length,
            shape["head_dim_v" if which else "head_dim"],
            dtype=dtype,
        )
        for sequence, rows in enumerate(result):
            first = 0 if self.skipped is None else min(int(self.skipped[sequence]), length)
            rows[:, first:] = torch.from_numpy(
                self.cache.read(sequence, 0, length - first)[which]
            ).transpose(0, 1)
        return result

    def takes(self, mask, has_bias):
        """Whether a call can have the cache itself: no padding was stored, and the columns of
        arrays are what was."""
        if mask is None or mask.kv_first_rows is None:
            return self.skipped is None
        if (
            has_bias
            or mask.q_segments is not None
            or not torch.equal(
                mask.kv_first_rows + mask.kv_lengths,
                torch.full_like(mask.kv_first_rows, mask.shape[3]),
            )
        ):
            return False
        if self.length == 0:
            self.skipped = torch.zeros_like(mask.kv_first_rows)
        return self.skipped is not None and torch.equal(
            self.skipped, mask.kv_first_rows.clamp(max=self.length)
        )

    def padding(self, mask):
        """[batch]: how many of the pending rows of each sequence are padding, which is not stored;
        None where none ever was."""
        return (
            None
            if self.skipped is None
            else (mask.kv_first_rows - self.length).clamp(0, self.pending[0].shape[2])
        )

    def appended(self, padding=None):
        if padding is not None:
            self.skipped = self.skipped + padding
        if self.pending is not None:
            self.length, self.pending = self.length + self.pending[0].shape[2], None

    def get_seq_length(self):
        return self.length + (0 if self.pending is None else self.pending[0].shape[2])

    def get_max_length(self):
        return self.max_length

    def crop(self, tokens_to_remove):
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove}; to remove 3 tokens, it is -3"
            )
        self.flush()
        length = max(self.length + tokens_to_remove, 0)
        for sequence in range(
            self.cache.shape["num_sequences"] if tokens_to_remove and self.is_initialized else 0
        ):
            skipped = 0 if self.skipped is None else int(self.skipped[sequence])
            self.cache.truncate(sequence, max(length - skipped, 0))
            if self.skipped is not None:
                self.skipped[sequence] = min(skipped, length)
        self.length = length

    def _choose(self, indices):
        """Makes a cache of these sequences. What is read from one of int8 and stored again may
        differ in the last of its bits."""
        if self.get_seq_length():
            keys, values = (
                self.read(which, self.get_seq_length(), torch.float32)[indices] for which in (0, 1)
            )
            skipped = None if self.skipped is None else self.skipped[indices]
            self.reset()
            self.lazy_initialization(keys, values)
            self.store(keys, values, skipped)
            self.length, self.skipped = keys.shape[2], skipped

    reorder_cache = batch_select_indices = _choose

    def batch_repeat_interleave(self, repeats):
        self._choose(
            torch.arange(
                self.cache.shape["num_sequences"] if self.is_initialized else 0
            ).repeat_interleave(repeats)
        )


class _Stored(_Lazy):
    """The keys or the values of a layer, as the tensor that they would be."""

    @staticmethod
    def __new__(cls, layer, which, rows):
        shape = (*rows.shape[:2], layer.get_seq_length(), rows.shape[3])
        self = _Lazy.__new__(
            cls, shape, rows.dtype, functools.partial(layer.read, which, shape[2], rows.dtype)
        )
        self.layer, self.which = layer, which
        return self


@documented()
class LatentCache(KvCache):
    """A `KvCache` for multi-head latent attention (DeepSeek, Kimi, GLM and others).

    It keeps the latents and rotated keys that all heads share, and attention by mha reads these:
    kv_b_proj is applied to queries and outputs, not to each position. Other layers are as in
    `KvCache`. From now on the attention modules of the model make their keys and values only if
    somebody looks into them.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, whose attention modules have expand_kv.
    max_length : int
        The most positions of each sequence.
    type : {types}
        Type of what is stored, which is not int4.
    attention_arithmetic : {"f32", "int16"}
        What attention over the cache computes in. "int16" needs the type "int8".
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        max_length: int,
        type: str = "f32",
        attention_arithmetic: str = "f32",
    ) -> None:
        super().__init__(model.config, max_length, type, attention_arithmetic)
        modules = {
            module.layer_idx: module for module in model.modules() if hasattr(module, "expand_kv")
        }
        if not modules:
            raise ValueError(
                f"{model.__class__.__name__} has no latent attention; KvCache is for the attention"
                " that it has"
            )
        kinds = {_CacheLayer: _LatentLayer, DynamicIndexedLayer: _IndexedLatentLayer}
        for index, module in modules.items():
            if self.layers[index].__class__ in kinds:
                _check_latents(module)
                self.layers[index] = kinds[self.layers[index].__class__](
                    max_length, (type, type), _arithmetic(attention_arithmetic, (type, type))
                )
                module.expand_kv = functools.partial(_expand_kv, module)


def _check_latents(module):
    """Raises ValueError unless keys and values are what LatentCache takes them for."""
    name, weight = module.__class__.__name__, getattr(module.kv_b_proj, "weight", None)
    if type(module.kv_b_proj) is not torch.nn.Linear or module.kv_b_proj.bias is not None:
        raise ValueError(
            f"kv_b_proj of {name} is no nn.Linear without bias, which LatentCache needs;"
            " pack_linears(skip=['kv_b_proj']) leaves it"
        )
    with torch.no_grad():
        latent, rotated = (
            torch.randn(weight.shape[1], dtype=weight.dtype),
            torch.randn(module.qk_rope_head_dim, dtype=weight.dtype),
        )
        keys, values = module.__class__.expand_kv(
            module, latent.view(1, 1, 1, -1), rotated.view(1, 1, 1, -1)
        )
        (from_k, from_v), heads = _halves(module), keys.shape[1]
        if not (
            torch.allclose(
                keys[0, :, 0],
                torch.cat([from_k @ latent, rotated.expand(heads, -1)], 1),
                1e-2,
                1e-2,
            )
            and torch.allclose(values[0, :, 0], from_v @ latent, 1e-2, 1e-2)
        ):
            raise ValueError(
                f"LatentCache does not know how {name} makes keys and values of its latents;"
                " KvCache does not need to"
            )


def _halves(module):
    """The parts of kv_b_proj that make keys [heads, qk_nope_head_dim, kv_lora_rank] and values
    [heads, v_head_dim, kv_lora_rank]."""
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    return module.kv_b_proj.weight.unflatten(0, (-1, sum(widths))).split(widths, 1)


class _LatentLayer(_CacheLayer):
    """One whose keys are the latents and the rotated keys, [batch, 1, rows, both widths], and whose
    values are the first part of its keys."""

    def lazy_initialization(self, keys, values):
        if keys.device.type != "cpu" or keys.dtype not in types:
            raise ValueError(
                f"latents are {keys.dtype} on {keys.device}; LatentCache takes float32, float16 and"
                " bfloat16 on CPUs"
            )
        self.cache = _Cache(
            num_sequences=len(keys),
            capacity=self.max_length,
            num_kv_heads=1,
            head_dim=keys.shape[3],
            head_dim_v=values.shape[3],
            k_type=self.stored[0],
            v_type=self.stored[0],
            value_place="in_keys",
        )
        self.is_initialized = True

    def update(self, latents, rotated, *args, **kwargs):
        rows = torch.cat([latents, rotated], 3)
        super().update(rows, rows[..., : latents.shape[3]])
        self.keys = _Latents(self, 1, latents)  # whose shape some indexers ask for
        return _Latents(self, 1, latents), _Latents(self, 2, rotated)

    def store(self, keys, values, padding):
        keys = keys.detach().transpose(1, 2).to(torch.float32).contiguous().numpy()
        for sequence in range(len(keys)):
            self.cache.append(
                sequence,
                keys[
                    sequence, 0 if padding is None else min(int(padding[sequence]), keys.shape[1]) :
                ],
            )

    def read(self, which, length, dtype):
        rows, rank = super().read(0, length, dtype), self.cache.shape["head_dim_v"]
        return rows if which == 0 else rows[..., :rank] if which == 1 else rows[..., rank:]


class _IndexedLatentLayer(_LatentLayer):
    """One with the keys of an indexer, as transformers keeps them."""

    def reset(self):
        super().reset()
        self.indexer = DynamicIndexedLayer()

    def __deepcopy__(self, memo):
        other = super().__deepcopy__(memo)
        other.indexer = copy.deepcopy(self.indexer, memo)
        return other

    def update_indexer(self, keys):
        return self.indexer.update_indexer(keys)

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self.indexer.crop(tokens_to_remove)

    def _choose(self, indices):
        indexer = self.indexer  # which super() forgets
        super()._choose(indices)
        self.indexer = indexer
        indexer.reorder_cache(indices)

    reorder_cache = batch_select_indices = _choose


class _Latents(_Stored):
    """What update() gives the model: the latents, or the rotated keys."""


class _Expanded(_Lazy):
    """The keys or the values of all heads, which nobody has made of the latents yet."""


def _expand_kv(module, latents, rotated):
    expand = functools.partial(module.__class__.expand_kv, module)
    if not (
        type(latents) is type(rotated) is _Latents
        and latents.layer is rotated.layer
        and latents.is_pristine
        and rotated.is_pristine
    ):
        return expand(latents, rotated)
    both = functools.cache(lambda: expand(latents.dense(), rotated.dense()))
    widths = module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim
    shape = (
        len(latents),
        module.kv_b_proj.weight.shape[0] // (module.qk_nope_head_dim + module.v_head_dim),
        latents.shape[2],
    )
    keys, values = (
        _Expanded((*shape, width), latents.dtype, lambda which=which: both()[which])
        for which, width in enumerate(widths)
    )
    keys.latents = values.latents = latents
    return keys, values


def _attend_latents(module, query, key, value, mask, scaling, *rest):
    """_attend over latents in place of the keys and values of all heads. Making these costs for
    each position, doing without for each query: many queries at once take them, but not those with
    short lists of keys. The factors are measured, with the shapes of DeepSeek V2 Lite: from 113
    queries on, and up to lists of a seventh of the keys."""
    latents, (from_k, from_v), indices = key.latents, _halves(module), rest[-2]
    (_, heads, n_q, width), n_kv, (nope, rank) = query.shape, key.shape[2], from_k.shape[1:]
    expands = 1.5 * n_q * (2 * rank - nope - from_v.shape[1]) > rank * (nope + from_v.shape[1])
    expands = expands and not (
        indices is not None and _lists_pay(n_q, heads, 3 * indices.shape[2], n_kv)
    )
    # Packed by now, so that its weights cannot be applied to others.
    if expands or type(module.kv_b_proj) is not torch.nn.Linear:
        latents.layer.settle(
            mask if not isinstance(mask, _Lazy) or mask.is_pristine else mask.dense()
        )
        return _attend(module, query, key.dense(), value.dense(), mask, scaling, *rest)
    scaling = width**-0.5 if scaling is None else scaling
    query = torch.cat(
        [torch.einsum("bhqn,hnr->bhqr", query[..., :nope], from_k), query[..., nope:]], 3
    )
    keys, values = (
        _Stored(latents.layer, which, torch.empty(len(latents), 1, 0, width, dtype=latents.dtype))
        for which, width in enumerate((query.shape[3], rank))
    )
    output = _attend(module, query, keys, values, mask, scaling, *rest)
    return torch.einsum("bqhr,hvr->bqhv", output, from_v)


# ---- Attention


class _Refused(Exception):
    pass


# What attention functions are handed beside the arguments of `attention`, and what changes nothing:
# masks have windows, packing and causality in them already, as for eager attention, which reads
# none of these.
_harmless = set(
    """
    cu_seq_lens_k cu_seq_lens_q deterministic is_causal logits_to_keep max_length_k max_length_q
    num_items_in_batch output_attentions output_hidden_states output_router_logits position_ids
    return_dict seq_idx sliding_window use_cache
    """.split()
)


def _with_choice(module, query, key, mask, indices, block_indices, position_ids):
    """(mask, lists): what a model chose for each query, as lists or in the mask. Lists are
    (entries, keys of an entry): int32 [batch, 1 or kv heads, n_q, count], -1 where there is
    none."""
    (_, heads, n_q, _), (_, kv_heads, n_kv, _), structure = (
        query.shape,
        key.shape,
        mask if isinstance(mask, Mask) else None,
    )
    entries, block = (
        (indices[:, None], 1)
        if block_indices is None
        else (block_indices, module.indexer.block_size)
    )
    # Behind padding on the left MiniMax M3 counts blocks from the padding, and may choose padding
    # alone: then eager attention has the mean of all values.
    is_listed = (
        block_indices is None
        or structure is not None
        and kv_heads % entries.shape[1] == 0
        and not (structure.kv_first_rows is not None and structure.kv_first_rows.any())
    )
    blocks = -(-n_kv // block)
    if is_listed and entries.shape[3] >= blocks:  # which may be all
        # -1 is the last.
        found = torch.zeros(*entries.shape[:3], blocks + 1, dtype=torch.bool).scatter_(
            3, entries.long() % (blocks + 1), True
        )
        if found[..., :blocks].all():
            return mask, None
    if (
        not is_listed
        or structure is not None
        and structure.q_segments is not None
        or not _lists_pay(n_q, heads // kv_heads, entries.shape[3] * block, n_kv)
    ):
        return (
            _with_chosen_keys(module, query, key, mask, indices, block_indices, position_ids),
            None,
        )
    # From where positions count, and how many there are.
    if structure is not None and structure.kv_first_rows is not None:
        first, count = (
            numbers[:, None, None, None]
            for numbers in (structure.kv_first_rows, structure.kv_lengths)
        )
        entries = (entries - first).where(
            (entries >= first) & ((entries - first) * block < count), -1
        )
    entries = (
        entries
        if entries.shape[1] == 1
        else entries.repeat_interleave(kv_heads // entries.shape[1], 1)
    )
    return mask, (entries.to(torch.int32).contiguous(), block)


def _lists_pay(n_q, group, count, n_kv):
    """Whether lists of `count` keys take less time than a mask. Queries fetch the keys of lists one
    by one, for `group` heads at once; with a mask they share all keys. The factor is measured, with
    1 and 16 heads of 576."""
    return count * (1 + min(n_q - 1, 20) / group) <= n_kv


def _with_chosen_keys(module, query, key, mask, indices, block_indices, position_ids):
    """The mask, with the keys or blocks of keys left out that a model did not choose: what models
    put into the mask for eager attention and "sdpa", by these names; others are handed the
    choice."""
    mask = _dense([mask])[0]
    if block_indices is not None:
        n_q, n_kv = query.shape[2], key.shape[2]
        positions = (
            torch.arange(n_kv - n_q, n_kv)[None]
            if position_ids is None
            else position_ids
            if position_ids.ndim > 1
            else position_ids[None]
        )
        return module.indexer.build_block_mask(
            block_indices, mask, n_kv, query.dtype, query.device, positions.expand(len(query), -1)
        )
    n_kv = key.shape[2]
    left_out = torch.ones(
        *indices.shape[:2], n_kv + 1, dtype=torch.bool, device=query.device
    ).scatter(-1, indices.long() % (n_kv + 1), False)
    left_out = left_out[:, None, :, :n_kv]  # without the column of -1
    if mask is None:
        return ~left_out
    return (
        mask & ~left_out
        if mask.dtype == torch.bool
        else mask.masked_fill(left_out, torch.finfo(query.dtype).min)
    )


@functools.cache
def _parameters(module_name):
    """The arguments of the eager attention of the file that a module is from."""
    function = getattr(sys.modules[module_name], "eager_attention_forward", None)
    return frozenset(inspect.signature(function).parameters) if function else frozenset()


@documented()
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    is_strict: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention, for AttentionInterface.

    A mask of None is none, as for eager attention, whatever is_causal says: where a model is
    causal, `mask` has made one.

    Parameters
    ----------
    module : torch.nn.Module
        The module that calls.
    query : torch.Tensor, shape (batch, num_heads, n_q, head_dim)
        Queries.
    key : torch.Tensor, shape (batch, num_kv_heads, n_kv, head_dim)
        Keys.
    value : torch.Tensor, shape (batch, num_kv_heads, n_kv, head_dim_v)
        Values.
    attention_mask : torch.Tensor or None
        The mask, usually a `Mask`.
    scaling : float
        Factor of the scores; None is 1 / sqrt(head_dim).
    dropout : float
        Dropout; mha has none.
    position_bias : torch.Tensor
        Added to scores.
    softcap : float
        Scores become softcap * tanh(score / softcap).
    s_aux : torch.Tensor, shape (num_heads,)
        Sinks: logits that take part in the softmax and have no value.
    indices : torch.Tensor
        Keys that each query attends to.
    block_indices : torch.Tensor
        Blocks of keys that each query attends to.
    is_strict : bool
        Whether a call that mha does not support raises ValueError.
    **kwargs : Any
        What else the model passes to its attention.

    Returns
    -------
    output : torch.Tensor, shape (batch, n_q, num_heads, head_dim_v)
        The context.
    weights : None
        As of "sdpa".
    """
    # Which would break its graph here, and at a warning.
    if is_strict or not torch.compiler.is_compiling():
        try:
            if is_strict and kwargs.get("output_attentions"):
                raise _Refused(_no_weights)
            attend = (
                _attend_latents
                if type(key) is type(value) is _Expanded and key.is_pristine and value.is_pristine
                else _attend
            )
            output = attend(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling,
                dropout,
                position_bias,
                softcap,
                s_aux,
                kwargs,
                indices,
                block_indices,
            )
            if kwargs.get("output_attentions"):
                _warn_once(f"mha.transformers: {_no_weights}")
            return output, None
        except (_Refused, Error) as reason:
            if is_strict:
                raise ValueError(f"mha_strict: {reason}") from None
            _warn_once(
                f"mha.transformers takes the model's own attention in {type(module).__name__},"
                f" because {reason}"
            )
    if indices is not None or block_indices is not None:
        attention_mask = _with_chosen_keys(
            module, query, key, attention_mask, indices, block_indices, kwargs.get("position_ids")
        )
    optional = {"position_bias": position_bias, "softcap": softcap, "s_aux": s_aux}
    kwargs.update({name: option for name, option in optional.items() if option is not None})
    function = getattr(
        sys.modules[type(module).__module__],
        "eager_attention_forward",
        transformers.AttentionInterface._global_mapping["sdpa"],
    )
    tensors = [
        t.dense() if isinstance(t, _Lazy) else t for t in (query, key, value, attention_mask)
    ]
    return function(module, *tensors, scaling=scaling, dropout=dropout, **kwargs)


_no_weights = (
    "output_attentions is True, but mha returns no attention weights, and the attentions of the"
    ' model are empty; set the attention to "eager" for them'
)


@functools.cache
def _warn_once(sentence):
    warnings.warn(sentence + ". mha_strict in place of mha makes this an error.", stacklevel=4)


def _attend(
    module,
    query,
    key,
    value,
    mask,
    scaling,
    dropout,
    position_bias,
    softcap,
    sinks,
    kwargs,
    indices,
    block_indices,
):
    _check(module, query, key, value, mask, dropout, position_bias, sinks, kwargs)
    (batch, heads, n_q, width), (key_batch, kv_heads, n_kv, _), width_v = (
        query.shape,
        key.shape,
        value.shape[3],
    )
    batch = max(batch, key_batch)
    output = torch.empty(batch, n_q, heads, width_v, dtype=query.dtype, device="cpu")
    if output.numel() == 0 or n_kv == 0:
        return output.zero_()
    shape, layer = (batch, heads, n_q, n_kv), _layer_of(key, value)
    if isinstance(mask, _Lazy) and not (
        isinstance(mask, Mask) and mask.is_pristine and tuple(mask.shape) == (batch, 1, n_q, n_kv)
    ):
        mask = mask.dense()
    chosen = None
    if indices is not None or block_indices is not None:
        before = mask
        mask, chosen = _with_choice(
            module, query, key, mask, indices, block_indices, kwargs.get("position_ids")
        )
        if layer is not None and mask is not before:
            layer.settle(before)
    structure = mask if isinstance(mask, Mask) else None
    flags = left = right = arithmetic = 0
    at_sequences = at_cache = at_cache_read = at_score = at_arrays = 0
    padding = sequences = score = arrays = alive = None
    if structure is not None:
        flags, left, right = structure.flags, structure.left, structure.right
        sequences = _new(_Sequences, q_first_positions=structure.q_first_positions)
        at_sequences = ctypes.addressof(sequences)
    if scaling is not None and -1e-45 < scaling < 1e-45:  # which the struct has as 0, the default
        flags |= _equal_scores
    if softcap is not None or sinks is not None:
        score = _score_options(softcap, sinks, heads)
        at_score = ctypes.addressof(score)
    if not (
        position_bias is chosen is None
        and (
            mask is None
            or structure is not None
            and structure.holes is structure.q_segments is None
        )
    ):
        arrays, alive = _score_arrays(mask, structure, position_bias, chosen, shape)
        at_arrays = ctypes.addressof(arrays)
    if layer is not None and layer.takes(structure, position_bias is not None):
        arithmetic = layer.arithmetic
        if layer.pending is None:
            at_cache_read, n_kv = layer.cache._handle, 0
        else:
            at_cache, (key, value), padding = (
                layer.cache._handle,
                layer.pending,
                layer.padding(structure),
            )
            n_kv = key.shape[2]
            if padding is not None:
                sequences.kv_first_rows = padding
    else:
        if structure is not None and structure.kv_first_rows is not None:
            sequences.kv_first_rows, sequences.kv_lengths = (
                structure.kv_first_rows,
                structure.kv_lengths,
            )
        if type(key) is not torch.Tensor or type(value) is not torch.Tensor:
            (key, value), layer = (
                (
                    tensor.dense() if isinstance(tensor, _Lazy) else tensor
                    for tensor in (key, value)
                ),
                None,
            )
    query, at_q, *q_strides = _place(query, batch)
    of_k = of_v = _not_given
    if not at_cache_read:
        key, at_k, *k_strides = _place(key, batch)
        of_k = at_k, types[key.dtype], 0, *k_strides, 0
        if not (at_cache and isinstance(layer, _LatentLayer)):  # whose values are in the keys
            value, at_v, *v_strides = _place(value, batch)
            of_v = at_v, types[value.dtype], 0, *v_strides, 0
    args = _AttentionArgs()
    threads = _openmp.scheduler(torch.get_num_threads())
    options = flags, arithmetic, left, right, 0, 0, at_score, threads
    rows = batch or _empty, n_q or _empty, n_kv or _empty, at_sequences, at_arrays
    widths = heads, kv_heads, width, width_v, 0.0 if scaling is None else scaling, 0
    of_q = at_q, types[query.dtype], 0, *q_strides, 0
    to = output.data_ptr(), types[output.dtype], 0, 0, 0, 0
    caches = at_cache, at_cache_read, 0
    _pack(args, 0, _size, *options, *rows, *caches, *widths, *of_q, *of_k, *of_v, *to)
    _run(args)
    if layer is not None:
        layer.appended(padding)
    del alive
    return output


_pack, _size = _packer(_AttentionArgs, "output"), ctypes.sizeof(_AttentionArgs)
_not_given = (0,) * 7  # an mha_input of nothing


def _check(module, query, key, value, mask, dropout, position_bias, sinks, kwargs):
    """Raises _Refused for what mha does not serve."""
    tensors = query, key, value
    if not (
        query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.dtype in types
        and key.dtype in types
        and value.dtype in types
    ):
        for name, tensor in zip(("query", "key", "value"), tensors):
            if tensor.device.type != "cpu":
                raise _Refused(f"{name} lies on {tensor.device}; mha computes on CPUs")
            if tensor.dtype not in types:
                raise _Refused(f"{name} is {tensor.dtype}; mha takes float32, float16 and bfloat16")
    if torch.is_grad_enabled() and any(
        t.requires_grad for t in (*tensors, mask, position_bias, sinks) if t is not None
    ):
        raise _Refused(
            "a tensor needs a gradient, and mha has none; torch.no_grad() says that none is wanted"
        )
    if torch.compiler.is_compiling():
        raise _Refused("torch.compile cannot look into it")
    if dropout:
        raise _Refused("there is dropout, and mha has none; model.eval() turns it off")
    for name, argument in kwargs.items():
        if name not in _harmless and argument is not None:
            doubt = (
                ""
                if name in _parameters(type(module).__module__)
                else '; nor does its own attention by that name, so compare with "eager"'
            )
            raise _Refused(f"mha does not know the argument {name!r}" + doubt)


def _layer_of(key, value):
    """The layer of the cache that has just these keys and values, if they are of one."""
    if (
        type(key) is type(value) is _Stored
        and key.layer is value.layer
        and key.which < value.which
        and key.is_pristine
        and value.is_pristine
    ):
        return key.layer if key.shape[2] == key.layer.get_seq_length() else None
    return None


def _place(tensor, batch):
    """The rows of [batch, heads, rows, width], where they lie, and the strides of batch, row and
    head; they are copied only if the elements of a row are not neighbours."""
    of_batch, of_head, of_row, step = tensor.stride()
    width = tensor.shape[3]
    # Which nearly none is.
    if (
        step != 1
        or of_batch < width
        or of_head < width
        or of_row < width
        or tensor.shape[0] != batch
    ):
        tensor = neighbours(tensor.expand(batch, -1, -1, -1))
        of_batch, of_head, of_row = strides_of(tensor)
    return tensor, tensor.data_ptr(), of_batch, of_row, of_head


def _score_options(softcap, sinks, heads):
    """What the model does to scores."""
    score = _new(_ScoreOptions, softcap=softcap or 0.0)
    if sinks is not None:
        score.sinks = sinks.detach().reshape(heads).to(torch.float32).contiguous()
    return score


def _score_arrays(mask, structure, bias, chosen, shape):
    """What the step does to scores, and the masks that it points to."""
    arrays, pattern, alive = _new(_ScoreArrays), None, ()
    if structure is not None:
        pattern = structure.holes
    elif mask is not None:
        mask = mask[..., : shape[3]]
        if mask.dtype == torch.bool:
            pattern = mask
        else:
            bias = mask if bias is None else bias + mask
    if pattern is not None or bias is not None:
        alive = set_masks(arrays, pattern, bias, shape)
    if structure is not None and structure.q_segments is not None:
        arrays.q_segments, arrays.kv_segments, arrays.segments = (
            structure.q_segments,
            structure.kv_segments,
            structure.also,
        )
    if chosen is not None:
        entries, arrays.chosen_block = chosen
        arrays.chosen_keys, arrays.num_chosen = entries, entries.shape[3]
        arrays.chosen_keys_strides = _Strides(head=_broadcast if entries.shape[1] == 1 else 0)
    return arrays, alive


def _run(args):
    """The call, on the threads that PyTorch has, in memory that each thread keeps."""
    library, own, address = _loaded(), calls, ctypes.addressof(args)
    status = library.mha_attention(address, own.at_workspace, own.room, own.at_error)
    if status:
        own.again(status, library.mha_attention_workspace, library.mha_attention, address)


AttentionInterface.register("mha", attention)
AttentionInterface.register("mha_strict", functools.partial(attention, is_strict=True))
for _name in "mha", "mha_strict":
    AttentionMaskInterface.register(_name, mask)
