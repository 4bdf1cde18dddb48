#!/usr/bin/env python3
"""Writes the files of the demonstration: a small layer made up by hand, whose heads do with a
sentence what heads of trained models are known to do.
"""

import argparse
import json
import math
import pathlib
import random
import sys

import numpy as np

sentence = (
    "When the old clock above the door struck nine , the cat that slept on the sill woke and asked"
    " for some milk ."
)


def write_safetensors(path, tensors):
    """tensors: {name: array}"""
    header, data = {}, b""
    for name, values in tensors.items():
        end = len(data) + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [len(data), end]}
        data += values.astype("<f4").tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def turns(position):
    """Where a row stands: the dot product of two of these is the larger, the nearer they are."""
    return [
        turn
        for i in range(8)
        for turn in (math.cos(math.pi * position / 2**i), math.sin(math.pi * position / 2**i))
    ]


def sentence_rows(words):
    """Each row: its position, its word, whether it is the first one, whether it is a comma or full
    stop, and a 1."""
    code = {}
    rows = []
    for position, word in enumerate(words):
        letters = code.setdefault(word.lower(), [random.gauss(0, 0.5) for _ in range(16)])
        rows.append([*turns(position), *letters, position == 0, word in ",.", 1])
    return rows


def sentence_layer(row_width):
    """W_Q and W_K, [row_width, 6 * 16], of heads that look at the token before, at the same word,
    at the first token, at commas, at what is near, and at nothing in particular."""
    at_position, at_word, is_first, is_stop, one = range(16), range(16, 32), 32, 33, 34
    query, key = ([[0.0] * 96 for _ in range(row_width)] for _ in range(2))

    def match(head, rows, strength, back=0):
        for i, row in enumerate(rows):
            key[row][16 * head + i] = strength
            query[row][16 * head + i] = 1.0
        for i in range(0, 16 * bool(back), 2):  # as if the query stood further back
            cos, sin = turns(back)[i : i + 2]
            query[i][16 * head + i : 16 * head + i + 2] = cos, -sin
            query[i + 1][16 * head + i : 16 * head + i + 2] = sin, cos

    match(0, at_position, 5, back=1)
    match(1, at_word, 4)
    query[one][16 * 2], key[is_first][16 * 2] = 1.0, 16.0
    query[one][16 * 3], key[is_stop][16 * 3] = 1.0, 14.0
    match(4, at_position, 1.5)
    return query, key


def write_sentence(folder):
    """The sentence, and a layer whose heads do something with it."""
    words = sentence.split()
    rows = sentence_rows(words)
    w_q, w_k = sentence_layer(len(rows[0]))
    w_v = [[0.3 * (2 * random.random() - 1) for _ in range(96)] for _ in rows[0]]
    weights = {"W_query": w_q, "W_key": w_k, "W_value": w_v}
    write_safetensors(
        folder / "sentence.safetensors",
        {name: np.array(values, np.float32) for name, values in weights.items()},
    )
    np.save(folder / "sentence.npy", np.array(rows, np.float32))
    (folder / "sentence.txt").write_text(sentence + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""Example:
  python3 tools/demo_files.py build

Exit codes: 0 done; 1 the folder cannot be made; 2 wrong usage.
""",
    )
    parser.add_argument(
        "folder",
        type=pathlib.Path,
        metavar="FOLDER",
        help="gets sentence.safetensors, sentence.npy and sentence.txt; made if it is not there",
    )
    folder = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"demo_files.py: {folder} cannot be made: {error.strerror}")
    random.seed(1)
    write_sentence(folder)


if __name__ == "__main__":
    main()
