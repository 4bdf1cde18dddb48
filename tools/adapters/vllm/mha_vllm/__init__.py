"""mha as the attention and the linear layers of vLLM on CPUs.

vLLM loads it by the entry point `vllm.general_plugins`. These environment variables say what it
does:

    MHA_VLLM             attention,linear (default), or one of them
    MHA_VLLM_WEIGHTS     f32, f16, bf16, int8 or int4, the last two with :N for groups of N weights;
                         default: the type of the model
    MHA_VLLM_ARITHMETIC  f32 (default), bf16, int16 or int8

With VLLM_BATCH_INVARIANT=1, vLLM starts only if mha computes all that depends on the batch.
`python -m mha_vllm.verify MODEL` tests it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

tested_versions = ("0.32.0",)
_parts = ("attention", "linear")
_types = ("f32", "f16", "bf16", "int8", "int4")
_arithmetics = ("f32", "bf16", "int16", "int8")


class Options(NamedTuple):
    """What the environment variables say."""

    parts: tuple[str, ...]
    weight_type: str | None  # None is the type of the model
    group_size: int
    arithmetic: str


def _word(variable: str, word: str, known: tuple[str, ...]) -> str:
    if word not in known:
        raise ValueError(f"{variable} has {word!r}; the words are {', '.join(known)}")
    return word


def options() -> Options:
    """Read the environment variables; ValueError says what one has that is unknown."""
    parts = os.environ.get("MHA_VLLM", "") or ",".join(_parts)
    weights = os.environ.get("MHA_VLLM_WEIGHTS", "")
    weight_type, _, group = weights.partition(":")
    arithmetic = _word(
        "MHA_VLLM_ARITHMETIC", os.environ.get("MHA_VLLM_ARITHMETIC") or "f32", _arithmetics
    )
    if group and not (group.isdecimal() and weight_type in ("int8", "int4")):
        raise ValueError(
            f"MHA_VLLM_WEIGHTS is {weights!r}; groups of N weights are int8:N or int4:N"
        )
    return Options(
        tuple(_word("MHA_VLLM", part.strip(), _parts) for part in parts.split(",")),
        _word("MHA_VLLM_WEIGHTS", weight_type, _types) if weight_type else None,
        int(group or 0),
        arithmetic,
    )


def register() -> None:
    """Register mha in a process of vLLM, which calls it before it chooses a backend or loads a
    model. It does nothing where vLLM computes on another device than the CPU."""
    from vllm.platforms import current_platform
    from vllm.version import __version__

    if not current_platform.is_cpu():
        return
    version = __version__.partition("+")[0]
    if version not in tested_versions:
        raise RuntimeError(
            f"mha-vllm is tested with vLLM {', '.join(tested_versions)}; this is {version}."
            " Install a tested version, or uninstall mha-vllm"
        )
    chosen = options()
    if "attention" in chosen.parts:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, "mha_vllm.attention.MhaAttentionBackend")
    if "linear" in chosen.parts:
        from . import linear

        linear.install()
    from . import model

    model.install()
