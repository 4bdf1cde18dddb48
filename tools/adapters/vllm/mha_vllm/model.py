"""What mha computes of a model that vLLM has loaded, and what it refuses."""

from __future__ import annotations

import functools

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.determinism import batch_invariant
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.cpu_worker import CPUWorker

from . import linear, options

_logger = init_logger("vllm.mha_vllm")
# Of each row by itself, in one order; so is what has no weights.
_row_by_row = (
    "vllm.model_executor.layers.layernorm",
    "vllm.model_executor.layers.rotary_embedding",
    "torch.nn.modules.normalization",
    "torch.nn.modules.sparse",
)


def install() -> None:
    """Have vLLM's worker check the model that it has loaded, and not put kernels for GPUs in the
    place of PyTorch's, as VLLM_BATCH_INVARIANT=1 does: on CPUs the first call of one fails."""
    stock = CPUWorker.load_model
    if hasattr(stock, "__wrapped__"):
        return
    batch_invariant.init_batch_invariance = lambda: None

    @functools.wraps(stock)
    def load_model(self, *arguments, **keywords):
        check_config(self.vllm_config)
        stock(self, *arguments, **keywords)
        check_model(self.model_runner.get_model())

    CPUWorker.load_model = load_model


def check_config(config: VllmConfig) -> None:
    """Refuse what mha-vllm is known not to serve, before the weights are loaded."""
    model, parts = config.model_config, options().parts
    attention, linears = "attention" in parts, "linear" in parts
    recurrent = (
        "models with recurrent layers: vLLM clears new blocks of theirs by the numbers of its"
        " manager's blocks, which are others than those of a backend's smaller blocks, and so may"
        " clear states of other requests"
    )
    future = "prompts parts of which see what follows, as images do in Gemma 3"
    for is_there, what, remedy in (
        (model.is_hybrid or model.has_inner_state, recurrent, "VLLM_PLUGINS='' runs vLLM alone"),
        (linears and config.lora_config is not None, "LoRA", "set MHA_VLLM=attention"),
        (attention and model.is_mm_prefix_lm, future, "set MHA_VLLM=linear"),
        (attention and model.rswa_window, "reference sliding windows", "set MHA_VLLM=linear"),
    ):
        if is_there:
            raise ValueError(f"mha-vllm does not serve {what}; {remedy}")
    if envs.VLLM_BATCH_INVARIANT and config.speculative_config is not None:
        raise ValueError(
            "VLLM_BATCH_INVARIANT=1, but mha-vllm is not tested with speculative decoding"
        )


def check_model(model: torch.nn.Module) -> None:
    """Say once what vLLM computes; refuse it if answers must not depend on the batch."""
    served, stock = survey(model)
    what = "; ".join(
        f"{name} ({len(places)}, such as {places[0] or 'the model'})"
        for name, places in stock.items()
    )
    if stock and envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            "VLLM_BATCH_INVARIANT=1, but vLLM's own code computes layers whose results may depend"
            f" on the batch: {what}"
        )
    _logger.info(
        "mha computes %d layers of attention and %d linear layers; vLLM computes %s",
        served["attention"],
        served["linear"],
        what or "the rest, row by row",
    )


def survey(model: torch.nn.Module) -> tuple[dict[str, int], dict[str, list[str]]]:
    """The numbers of layers that mha computes, and by class the places of those with weights, or of
    attention, that vLLM computes and not row by row."""
    served, stock = {"attention": 0, "linear": 0}, {}
    for place, module in model.named_modules():
        kind, origin = type(module).__name__, type(module).__module__
        weights = [name for name, _ in module.named_parameters(recurse=False) if name != "sinks"]
        if hasattr(module, "impl"):
            if getattr(module.impl, "is_mha", False):
                served["attention"] += 1
                continue
        elif linear.is_served(module):
            served["linear"] += 1
            continue
        elif isinstance(module, VocabParallelEmbedding) and kind != "ParallelLMHead":
            continue
        elif origin.startswith(_row_by_row):
            continue
        elif not weights and not origin.startswith("vllm.model_executor.layers.attention"):
            continue
        stock.setdefault(kind, []).append(place)
    return served, stock
