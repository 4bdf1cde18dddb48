"""What type checkers read of calls with many options. Nothing of it is needed to run, and it is not
imported."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

import numpy as np

from ._cache import KvCache, KvPool
from ._callbacks import Scheduler
from ._options import Norm, Rope, ScoreOptions

Array = np.ndarray
Integers = Sequence[int] | np.ndarray
Matrix = np.ndarray | Sequence[np.ndarray]
Path = str | os.PathLike[str]
Want = Iterable[str] | Mapping[str, np.ndarray | None]
Info = dict[str, int]


class Choice(TypedDict, total=False):
    """What calls and infos have in common, choose_keys too."""

    is_causal: bool
    attention_arithmetic: str
    q_first_positions: Integers | None
    q_lengths: Integers | None
    kv_lengths: Integers | None
    q_first_rows: Integers | None
    kv_first_rows: Integers | None
    cu_seqlens_q: Integers | None
    cu_seqlens_kv: Integers | None
    window_left: int | None
    window_right: int | None
    padding: str
    norm: Norm | None
    rope: Rope | None
    cache: KvCache | KvPool | None
    cache_sequences: Integers | None
    cache_lengths: Integers | None
    block_tables: Integers | Sequence[Sequence[int]] | None
    block_table_starts: Integers | None
    cache_read: bool
    scheduler: Scheduler | None


class Structure(Choice, total=False):
    """What all but choose_keys have in common."""

    equal_scores: bool
    score: ScoreOptions | None


class Call(Structure, total=False):
    """What all calls have in common."""

    out: np.ndarray | None
    bf16: bool
    output_type: str
    workspace: np.ndarray | None


class AttentionCall(Call, total=False):
    scale: float
    instruction_set: str
    kv_first_position: int
    partials: bool


class Weights(TypedDict, total=False):
    """Of a layer, with its shape."""

    w_q: Matrix | None
    w_k: Matrix | None
    w_v: Matrix | None
    w_qkv: np.ndarray | None
    w_o: np.ndarray | None
    w_g: np.ndarray | None
    b_q: np.ndarray | None
    b_k: np.ndarray | None
    b_v: np.ndarray | None
    b_qkv: np.ndarray | None
    b_o: np.ndarray | None
    b_g: np.ndarray | None
    layout: str
    type: str | None
    scales: Mapping[str, np.ndarray] | None
    offsets: Mapping[str, np.ndarray] | None
    block_scales: Mapping[str, np.ndarray] | None
    block_offsets: Mapping[str, np.ndarray] | None
    weight_type: str | None
    group_size: int
    scale_type: str
    arithmetic: str
    gate: str
    gate_in_w_q: bool
    gate_dim: int
    key_dim: int
    value_dim: int
    output_dim: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float


class How(TypedDict, total=False):
    """A product alone."""

    type: str | None
    weight_type: str | None
    group_size: int
    scale_type: str
    arithmetic: str
    instruction_set: str


class CacheConfig(TypedDict, total=False):
    num_sequences: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    k_type: str
    v_type: str | None
    kind: str
    value_place: str
    block_positions: int
    num_blocks: int
