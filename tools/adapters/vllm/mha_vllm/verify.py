"""Whether answers of vLLM depend on what is computed beside them: python -m mha_vllm.verify --help.

Each request is computed alone on one thread, and again in batches, in another order, in chunks,
from cached prefixes, in a cache too small for all, and on two threads. All numbers have to have the
same bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

_batched = dict(max_num_seqs=16, max_num_batched_tokens=2048, enable_prefix_caching=False)
_settings = dict(kv_cache_memory_bytes=1 << 28, disable_log_stats=True)
_block = 32  # the least of vLLM's own attention
_engines: dict[str, dict[str, Any]] = {
    "whole": _batched,
    "chunks": {**_batched, "max_num_seqs": 7, "max_num_batched_tokens": 64},
    "caching": dict(max_num_seqs=9, max_num_batched_tokens=200, enable_prefix_caching=True),
    "small": {**_batched, "block_size": _block, "disable_log_stats": False},
}
# name, engine, order of the requests, threads, whether each is alone
_scenarios = [
    ("alone, two threads", "whole", "given", 2, True),
    ("batches of 16, one thread", "whole", "given", 1, False),
    ("batches of 16, shuffled, two threads", "whole", "shuffled", 2, False),
    ("chunks of 64 tokens, two threads", "chunks", "shuffled", 2, False),
    ("prefix caching, first pass, two threads", "caching", "shuffled", 2, False),
    ("prefix caching, from the cache, two threads", "caching", "given", 2, False),
    ("prefix caching, from the cache, alone, one thread", "caching", "given", 1, True),
    ("preempted by a small cache, two threads", "small", "shuffled", 2, False),
]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m mha_vllm.verify",
        description=(__doc__ or "").partition("\n\n")[2],
        epilog="Exit status: 0 all requests have the same bits in all scenarios; 1 some differ;"
        " 2 wrong usage. MHA_VLLM and the other variables of mha_vllm apply.",
    )
    add = made.add_argument
    add("model", help="a folder or name of a model of transformers")
    add("--dtype", default="auto", help="float32, bfloat16 or float16 (default: the model's)")
    add("--requests", type=int, default=64, help="number of requests (default: 64)")
    add("--tokens", type=int, default=20, help="tokens to generate of each (default: 20)")
    add("--longest", type=int, default=220, help="longest prompt, in tokens (default: 220)")
    add("--plain", action="store_true", help="also count for vLLM without mha")
    add("--parts", action="store_true", help="also with attention or linear layers alone by mha")
    add("--tensor-parallel", type=int, default=1, help="processes (default: 1)")
    add("--embeddings", action="store_true", help="of a model that has them and a tokenizer")
    add("--compile", action="store_true", help="with torch.compile")
    add("--json", action="store_true", help="print the counts as JSON")
    return made


def prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Random prompts, half of which begin with the same tokens."""
    rng = random.Random(7)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(5, vocabulary) for _ in range(n)]

    shared = tokens(longest + 40)
    made = [tokens(rng.randrange(3, longest)) for _ in range(count)]
    return [shared + own[: len(own) // 4 + 1] if i % 2 else own for i, own in enumerate(made)]


def numbers_of(output: Any) -> tuple:
    """All numbers of an answer."""
    outputs = getattr(output, "outputs", None)
    if hasattr(outputs, "embedding"):
        return tuple(outputs.embedding)
    if not isinstance(outputs, list):
        return tuple(getattr(outputs, "probs", None) or outputs.data.flatten().tolist())
    (answer,) = outputs
    return tuple(
        (token, tuple(sorted((other, found.logprob) for other, found in logprobs.items())))
        for token, logprobs in zip(answer.token_ids, answer.logprobs)
    )


def differing(reference: Iterable[tuple], found: Iterable[tuple]) -> int:
    """How many requests have a number of other bits; NaN, which no layer should give, differs."""
    return sum(one != other for one, other in zip(reference, found))


def count(arguments: argparse.Namespace) -> dict[str, int | None]:
    """The number of requests that differ in each scenario; None: vLLM refused the scenario, or did
    not preempt."""
    os.environ["OMP_NUM_THREADS"] = "2"
    if arguments.tensor_parallel == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # threads are of this process
    else:
        os.environ.setdefault("VLLM_CPU_SIM_MULTI_NUMA", "1")  # processes share one node
    import torch

    set_num_threads = torch.set_num_threads  # which vLLM replaces
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    sampling = SamplingParams(
        temperature=0, max_tokens=arguments.tokens, logprobs=4, detokenize=False, ignore_eos=True
    )
    order = {"given": list(range(arguments.requests))}
    order["shuffled"] = random.Random(8).sample(order["given"], arguments.requests)
    settings = dict(
        _settings,
        skip_tokenizer_init=not arguments.embeddings,
        model=arguments.model,
        dtype=arguments.dtype,
        max_model_len=2 * arguments.longest + arguments.tokens + 64,
        enforce_eager=not arguments.compile,
        tensor_parallel_size=arguments.tensor_parallel,
    )
    reference, found, engine, at, made, is_pooling = [], {}, None, None, [], False
    first = ("", "whole", "given", 1, True)
    for name, kind, which, threads, is_alone in [first, *_scenarios]:
        if arguments.tensor_parallel > 1 and (name == "alone, two threads"):
            continue
        if at != kind:
            del engine
            gc.collect()
            if at is not None:
                cleanup_dist_env_and_memory()
            if kind == "small":  # the first prompts fill it, beside a block of vLLM's
                least, blocks = settings["max_model_len"] // _block + 1, 1
                for i in order[which]:
                    blocks += -(-len(made[i]) // _block) if blocks <= least else 0
                settings["num_gpu_blocks_override"] = blocks
            try:
                engine = LLM(**{**settings, **_engines[kind]})
            except ValueError as error:
                # Models of embeddings see a prompt at once, so that chunks and small caches fail.
                is_refused = is_pooling if kind == "small" else "_batched_tokens" in str(error)
                if kind == "whole" or not is_refused:
                    raise
                found[name] = None
                engine, at = None, None
                continue
            at = kind
            is_pooling = engine.llm_engine.model_config.runner_type == "pooling"
            vocabulary = engine.llm_engine.model_config.get_vocab_size()
            made = prompts(arguments.requests, arguments.longest, vocabulary)
            given = [{"prompt_token_ids": tokens} for tokens in made]
        if arguments.tensor_parallel == 1:
            set_num_threads(threads)
        answers: list[tuple] = [()] * arguments.requests
        for group in [[i] for i in order[which]] if is_alone else [order[which]]:
            batch = [given[i] for i in group]
            ask, words = ("embed", ()) if is_pooling else ("generate", (sampling,))
            outputs = getattr(engine, ask)(batch, *words, use_tqdm=False)  # keeps no engine alive
            for i, output in zip(group, outputs):
                answers[i] = numbers_of(output)
        if not name:
            reference = answers
        elif kind != "small" or _preemptions(engine):
            found[name] = differing(reference, answers)
        else:
            print(f"{name}: vLLM preempted no request", file=sys.stderr)
            found[name] = None
    return found


def _preemptions(engine: Any) -> int:
    return sum(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")


def main(words: list[str] | None = None) -> int:
    """Print the table; the exit status."""
    arguments = parser().parse_args(words)
    found = {"mha": count(arguments)}
    if arguments.json:
        print(json.dumps(found["mha"]))
        return int(any(found["mha"].values()))
    beside = {"vLLM": {"VLLM_PLUGINS": ""}} if arguments.plain else {}
    if arguments.parts:
        beside.update({f"{part} alone": {"MHA_VLLM": part} for part in ("attention", "linear")})
    given = sys.argv[1:] if words is None else words
    for name, variables in beside.items():  # each in a process of its own
        said = subprocess.run(
            [sys.executable, "-m", "mha_vllm.verify", *given, "--json"],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        found[name] = json.loads(said.strip().rpartition("\n")[2])
    model = pathlib.Path(arguments.model).name
    print(f"{arguments.requests} requests to {model}: those whose bits differ from alone, 1 thread")
    print("| scenario | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for name in found["mha"]:
        row = ["-" if counts[name] is None else str(counts[name]) for counts in found.values()]
        print(f"| {name} | " + " | ".join(row) + " |")
    return int(any(found["mha"].values()))


if __name__ == "__main__":
    sys.exit(main())
