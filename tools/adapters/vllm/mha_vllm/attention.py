"""Attention of vLLM by mha: over vLLM's own KV tensor, as a pool of mha's under vLLM's tables.

vLLM's page of a block has keys and values of all heads, [num_kv_heads, block_size, 2 * head_size].
In as many bytes, mha has the keys of the block first, and then its values.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import mha
import numpy as np
import torch
from mha import _library, _openmp
from mha._structs import (
    _AttentionArgs,
    _causal,
    _new,
    _packer,
    _ScoreOptions,
    _Sequences,
    _window_left,
    _window_right,
)
from mha.torch._common import calls, types
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheLayout

_pack = _packer(_AttentionArgs, "kv_first_position")
_size = ctypes.sizeof(_AttentionArgs)
_no_rows = (0,) * 7
_encoders = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class MhaAttentionBackend(AttentionBackend):
    """What vLLM asks of a backend. It takes the place of CPU_ATTN, whose name it keeps: vLLM's
    platform chooses by the names of an enumeration."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[MhaAttentionImpl]:
        return MhaAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MhaMetadataBuilder]:
        return MhaMetadataBuilder


@dataclass
class MhaMetadata:
    """The sequences of a step, for all layers of a group."""

    rows: int  # of queries
    new_rows: int  # of keys, which the step appends
    is_causal: bool
    num_threads: int
    sequences: Any  # mha_sequences with the lengths before the step
    reading: Any  # the same with the lengths after it, for layers that read another's keys
    slot_mapping: Any = None  # vLLM's, of cross-attention; unused


class MhaMetadataBuilder(AttentionMetadataBuilder[MhaMetadata]):
    """Makes the struct that says where the sequences of a step lie."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MhaMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "mha-vllm does not serve batches in which some requests are causal and others not"
            )
        count, spec = common.num_reqs, self.kv_cache_spec
        starts = common.query_start_loc_cpu[: count + 1].numpy().astype(np.int64)
        fields = {"count": count, "cu_seqlens_q": starts}
        new_rows = common.num_actual_tokens
        reading = None
        if not isinstance(spec, EncoderOnlyAttentionSpec):
            after = common.seq_lens[:count].numpy().astype(np.int64)
            new = starts[1:] - starts[:-1]
            tables = common.block_table_tensor[:count]
            if tables.dtype != torch.int32 or tables.stride(1) != 1:
                tables = tables.to(torch.int32).contiguous()
            fields["block_tables"] = tables
            fields["block_table_entries"] = tables.shape[1]
            fields["block_table_stride"] = tables.stride(0)
            reading = _new(_Sequences, cache_lengths=after, **fields)
            if isinstance(spec, CrossAttentionSpec):  # keys of the encoder, of new requests alone
                new = common.encoder_seq_lens_cpu[:count].astype(np.int64)
                fields["cu_seqlens_kv"] = np.concatenate(([0], np.cumsum(new)))
                new_rows = int(fields["cu_seqlens_kv"][-1])
            fields["cache_lengths"] = after - new
        return MhaMetadata(
            rows=common.num_actual_tokens,
            new_rows=new_rows,
            is_causal=common.causal,
            num_threads=torch.get_num_threads(),
            sequences=_new(_Sequences, **fields),
            reading=reading,
        )


class MhaAttentionImpl(AttentionImpl):
    """The attention of one layer."""

    is_mha = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise NotImplementedError(f"mha-vllm does not know {', '.join(unknown)} of attention")
        if head_size % 16:
            raise NotImplementedError(
                f"heads are {head_size} wide; mha-vllm serves multiples of 16, the blocks of which"
                " fit in vLLM's"
            )
        if kv_cache_dtype not in MhaAttentionBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"the KV cache is {kv_cache_dtype}; vLLM's blocks have no room for the scales of"
                " 8-bit numbers: mha-vllm serves auto, float16 and bfloat16"
            )
        if alibi_slopes is not None and attn_type != AttentionType.DECODER:
            raise NotImplementedError("mha-vllm serves ALiBi in decoders alone")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.softcap = sliding_window, logits_soft_cap or 0.0
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.args, self.score, self.pool = _AttentionArgs(), None, Pool()
        self.at_args = ctypes.addressof(self.args)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Point to the weights that attention has, which vLLM has loaded."""
        if self.sinks is None and self.alibi_slopes is None and not self.softcap:
            return
        self.score = _new(
            _ScoreOptions,
            softcap=self.softcap,
            alibi_slopes=None
            if self.alibi_slopes is None
            else np.array(self.alibi_slopes, np.float32),
            sinks=None if self.sinks is None else self.sinks.detach().float().contiguous(),
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: MhaMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = attn_metadata
        if step is None:  # vLLM is warming up
            return output
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("mha-vllm does not quantise the output of attention")
        reads = self.kv_sharing_target_layer_name is not None or not step.new_rows
        cache = 0 if self.attn_type in _encoders else self.pool.over(self, kv_cache)
        dtype, width = types[query.dtype], self.head_size
        k = v = _no_rows
        if not reads:
            k = key.data_ptr(), types[key.dtype], 0, 0, key.stride(0), key.stride(1), 0
            v = value.data_ptr(), types[value.dtype], 0, 0, value.stride(0), value.stride(1), 0
        flags, left, right = _causal if step.is_causal else 0, 0, 0
        if self.sliding_window is not None:
            flags, left = flags | _window_left, self.sliding_window - 1
            if not step.is_causal:
                flags, right = flags | _window_right, left
        score = ctypes.addressof(self.score) if self.score else 0
        sequences = ctypes.addressof(step.reading if reads else step.sequences)
        options = flags, 0, left, right, 0, 0, score, _openmp.scheduler(step.num_threads)
        rows = 1, step.rows, step.new_rows, sequences, 0
        caches = (0, cache, 0) if reads else (cache, 0, 0)
        widths = self.num_heads, self.num_kv_heads, width, width, self.scale, 0
        q = query.data_ptr(), dtype, 0, 0, query.stride(0), query.stride(1), 0
        to = output.data_ptr(), types[output.dtype], 0, 0, output.stride(0), output.stride(1), 0
        _pack(self.args, 0, _size, *options, *rows, *caches, *widths, *q, *k, *v, *to)
        functions, own = _library._loaded(), calls
        status = functions.mha_attention(self.at_args, own.at_workspace, own.room, own.at_error)
        if status:
            own.again(
                status, functions.mha_attention_workspace, functions.mha_attention, self.at_args
            )
        return output


class Pool:
    """The pool of a layer, made when the layer first sees vLLM's tensor."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
        self.pool: mha.KvPool | None = None

    def over(self, layer: MhaAttentionImpl, tensor: torch.Tensor) -> int:
        """The address of the pool over the tensor [num_blocks, num_kv_heads, block_size, 2 *
        head_size], whose blocks may be apart."""
        if tensor is not self.tensor:
            num_blocks, kv_heads, positions, width = tensor.shape
            if width != 2 * layer.head_size or not tensor[0].is_contiguous():
                raise NotImplementedError(
                    f"vLLM's blocks are {list(tensor[0].shape)} with strides {tensor[0].stride()};"
                    f" mha-vllm needs {[layer.num_kv_heads, positions, 2 * layer.head_size]},"
                    " contiguous"
                )
            half = tensor[0].numel() // 2
            blocks = _array(tensor.as_strided((num_blocks, 2 * half), (tensor.stride(0), 1)))
            self.pool = mha.KvPool(
                blocks[:, :half],
                blocks[:, half:],
                num_sequences=num_blocks,
                capacity=num_blocks * positions,
                num_kv_heads=kv_heads,
                head_dim=layer.head_size,
                block_positions=positions,
            )
            self.tensor = tensor
        return self.pool._handle


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of the tensor as an array: bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
