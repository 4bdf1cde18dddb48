"""The decoder of tests/examples/decoder.h in PyTorch: torch.nn.functional, scaled_dot_product_attention, and caches that are made in advance.
Run by decoders.py:

    decoder_torch.py FILE HEADS PROMPT COUNT THREADS TYPE LOGITS        TYPE: f32, or int8 by quantize_dynamic
"""

import json
import sys
import time

import numpy
import torch
from torch.nn import functional

path, prompt_path, type_, logits_path = (sys.argv[i] for i in (1, 3, 6, 7))
heads, count, threads = (int(sys.argv[i]) for i in (2, 4, 5))
torch.set_num_threads(threads)


def read_safetensors():
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        data = numpy.fromfile(file, numpy.float32)
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, torch.from_numpy(data[begin // 4:end // 4]).view(entry["shape"])


weights = dict(read_safetensors())
layers = sum(name.endswith("input_layernorm.weight") for name in weights)
width = weights["model.norm.weight"].shape[0]
head_dim = weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads
kv_heads = weights["model.layers.0.self_attn.k_proj.weight"].shape[0] // head_dim
prompt = [int(word) for word in open(prompt_path).read().split()]
positions = len(prompt) + count

angles = torch.outer(torch.arange(positions, dtype=torch.float64), 10000 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))
cosines, sines = torch.cat([angles.cos()] * 2, -1).float(), torch.cat([angles.sin()] * 2, -1).float()
linears = {}
for name, weight in weights.items():
    if weight.dim() == 2 and "embed" not in name:
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if type_ == "int8":
            linear = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(linear), {torch.nn.Linear}, dtype=torch.qint8)
        linears[name] = linear
caches = [(torch.zeros(1, kv_heads, positions, head_dim), torch.zeros(1, kv_heads, positions, head_dim)) for _ in range(layers)]


def rotate(x, first, end):
    a, b = x.chunk(2, -1)
    return x * cosines[first:end] + torch.cat((-b, a), -1) * sines[first:end]


def norm(x, name):
    return functional.rms_norm(x, (width,), weights[name], 1e-5)


def step(tokens, first):
    """The logits behind the last of the tokens, which stand behind the first ones in the caches."""
    end = first + len(tokens)
    x = functional.embedding(torch.tensor([tokens]), weights["model.embed_tokens.weight"])
    for layer, (keys, values) in enumerate(caches):
        of = f"model.layers.{layer}."

        def linear(y, name):
            return linears[f"{of}{name}.weight"](y)

        normed = norm(x, of + "input_layernorm.weight")
        q, k, v = (linear(normed, f"self_attn.{name}_proj").view(1, len(tokens), -1, head_dim).transpose(1, 2) for name in "qkv")
        keys[:, :, first:end], values[:, :, first:end] = rotate(k, first, end), v
        context = functional.scaled_dot_product_attention(rotate(q, first, end), keys[:, :, :end], values[:, :, :end],
                                                          is_causal=first == 0 and end > 1, enable_gqa=kv_heads != heads)
        x = x + linear(context.transpose(1, 2).reshape(1, len(tokens), -1), "self_attn.o_proj")
        normed = norm(x, of + "post_attention_layernorm.weight")
        x = x + linear(functional.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj"), "mlp.down_proj")
    return linears["lm_head.weight"](norm(x[:, -1], "model.norm.weight"))


with torch.inference_mode():
    step(prompt, 0)  # what PyTorch does once does not count
    step(prompt[:1], len(prompt))
    start = time.perf_counter()
    logits = step(prompt, 0)
    tokens = [int(logits.argmax())]
    prompt_seconds = time.perf_counter() - start
    start = time.perf_counter()
    for position in range(len(prompt), positions - 1):
        tokens.append(int(step(tokens[-1:], position).argmax()))
    seconds = time.perf_counter() - start
logits.numpy().tofile(logits_path)
print(f"prompt {prompt_seconds:.6f} s, token {seconds / max(count - 1, 1):.6f} s", file=sys.stderr)
