#!/usr/bin/env python3
"""Measures tokens of a model with latent attention over caches of several lengths: the caches of
transformers, and mha.transformers.LatentCache.

The model has the shapes of DeepSeek V2 Lite, with 6 of its layers, 8 of its experts, a vocabulary
of 32,000, random weights and float32: 3 GB. The caches are filled with random latents; the ways
take turns, a token each. Memory is that of the cache, and the most that a token needs besides;
logits are compared with those of sdpa.

With --attention, it measures only PyTorch's attention: a token over 8,192 positions, as in the
group latent of mha_bench. All heads share the memory of the keys, 576 numbers each (expand), whose
first 512 are the values; caches of 1 GB in total take turns. It prints the best of 5 calls.

Examples:
  build/rivals/venv/bin/python bench/rivals/latents.py
  taskset -c 1 build/rivals/venv/bin/python bench/rivals/latents.py --attention --threads 1
"""

import argparse
import ctypes
import pathlib
import statistics
import sys
import time
import warnings

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bindings" / "python")
)
sys.dont_write_bytecode = True


def resident(name):
    """VmRSS, the bytes in memory now, or VmHWM, the most since the last reset."""
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return 1024 * int(line.split()[1])


def bytes_of(cache):
    return sum(
        (
            layer.cache.buffer.size
            if hasattr(layer, "cache")
            else layer.keys.nbytes + layer.values.nbytes
        )
        for layer in cache.layers
    )


def time_attention(torch):
    for heads in (1, 16, 32, 128):
        for type in (torch.float32, torch.float16, torch.bfloat16):
            caches = [
                torch.randn(1, 1, 8192, 576, dtype=type)
                for _ in range(2**30 // (8192 * 576 * type.itemsize))
            ]
            q = torch.randn(1, heads, 1, 576, dtype=type)
            times = []
            for k in caches[:5]:
                start = time.perf_counter()
                torch.nn.functional.scaled_dot_product_attention(
                    q, k.expand(1, heads, -1, -1), k[..., :512].expand(1, heads, -1, -1)
                )
                times.append(time.perf_counter() - start)
            print(f"{heads} heads, {type}: {1000 * min(times):.2f} ms", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[512, 4096, 16384],
        metavar="N",
        help="positions in the caches (default: 512 4096 16384)",
    )
    parser.add_argument(
        "--tokens", type=int, default=5, metavar="N", help="the tokens after them (default: 5)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, metavar="N", help="the number of threads (default: 2)"
    )
    parser.add_argument("--attention", action="store_true", help="measure only PyTorch's attention")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    if arguments.attention:
        torch.set_num_threads(arguments.threads)
        return time_attention(torch)
    import mha.transformers as mt
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    config = transformers.DeepseekV2Config(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=8,
        num_experts_per_tok=6,
        n_shared_experts=2,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, weight.shape[-1] ** -0.5)
    for length in arguments.lengths:
        room = length + arguments.tokens
        ways = {
            "sdpa": ("sdpa", transformers.DynamicCache(config=config)),
            "mha": ("mha_strict", transformers.DynamicCache(config=config)),
            **{
                f"mha, LatentCache {kind}": ("mha_strict", mt.LatentCache(model, room, kind))
                for kind in ("f32", "f16", "int8")
            },
        }
        ids = torch.randint(3, 32000, (1, room), generator=torch.Generator().manual_seed(length))
        times, peaks, errors = (
            {way: [] for way in ways},
            dict.fromkeys(ways, 0),
            dict.fromkeys(ways, 0.0),
        )
        with torch.inference_mode():
            for layer in range(config.num_hidden_layers):
                latents = (
                    torch.randn(1, 1, length, config.kv_lora_rank),
                    torch.randn(1, 1, length, config.qk_rope_head_dim),
                )
                for _, cache in ways.values():
                    cache.update(*latents, layer)
            for position in range(length, room):
                for way, (implementation, cache) in ways.items():
                    model.set_attn_implementation(implementation)
                    ctypes.CDLL(None).malloc_trim(0)
                    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
                    before, start = resident("VmRSS"), time.perf_counter()
                    logits = model(ids[:, position : position + 1], cache=cache).logits
                    times[way].append(time.perf_counter() - start)
                    peaks[way] = max(peaks[way], resident("VmHWM") - before)
                    if way == "sdpa":  # the first of them
                        expected = logits
                    errors[way] = max(
                        errors[way], ((logits - expected).abs().max() / expected.abs().max()).item()
                    )
        for way, (_, cache) in ways.items():
            print(
                f"{length} positions, {way}: {1 / statistics.median(times[way]):.3g} tokens/s,"
                f" cache {bytes_of(cache) / room / 1024:.3g} KiB a position, a token beside it"
                f" {peaks[way] / 2**20:.3g} MiB, logits off by {errors[way]:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
