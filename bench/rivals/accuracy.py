#!/usr/bin/env python3
"""Measures how far PyTorch's float32 attention is from the exact result, beside plain float32 code and mha.

It prints the table of tests/contract/accuracy_test.cpp: for each shape, the rms error of PyTorch's scaled_dot_product_attention on one thread, divided
by that of plain float32 code, for calls of one query and of 64. The plain code is tests/oracle in float: sums in natural order, multiplied and
added in two roundings. Data, shapes and seeds are those of the test. Beside each row stand mha's errors over PyTorch's, if libmha.so is there
(as tools/python/mha looks for it).

Needs NumPy and PyTorch: tools/python/setup.sh --rivals, then build/rivals/venv/bin/python bench/rivals/accuracy.py
"""

import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "python"))
try:
    import mha
    mha.version()
except (ImportError, OSError):
    mha = None

heads, queries, calls = 4, 64, (1, 64)


class Random:
    """tests/support/random.h"""

    def __init__(self, seed):
        self.state = seed

    def normals(self, *shape):
        count = 12 * int(np.prod(shape))
        with np.errstate(over="ignore"):
            z = np.uint64(self.state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9e3779b97f4a7c15)
            self.state = int(z[-1])
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
            z ^= z >> np.uint64(31)
        units = (z >> np.uint64(11)).astype(np.float64).reshape(-1, 12) * 2.0**-53
        total = np.full(len(units), -6.0)
        for n in range(12):
            total += units[:, n]
        return total.astype(np.float32).reshape(shape)


def plain(q, k, v, scale):
    """One head of tests/oracle in float; the scale is a float32."""
    dots = np.zeros((len(q), len(k)), np.float32)
    for d in range(q.shape[1]):
        dots += q[:, d, None] * k[None, :, d]
    scores = dots * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # NumPy adds these up one by one
    context = np.zeros((len(q), v.shape[1]), np.float32)
    for j in range(len(k)):
        context += weights[:, j, None] * v[None, j]
    return context


def exact(q, k, v, scale):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.T * scale
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


def by_head(function, q, k, v, scale):
    """function for each head of [rows, heads, width]."""
    return np.stack([function(q[:, h], k[:, h], v[:, h], scale) for h in range(heads)], axis=1)


def of_pytorch(q, k, v, scale, rows):
    """In calls of so many rows."""
    k, v = (torch.from_numpy(x).transpose(0, 1)[None] for x in (k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    parts = (torch.from_numpy(q[first:first + rows]).transpose(0, 1)[None] for first in range(0, queries, rows))
    return np.concatenate([attention(part, k, v, scale=float(scale))[0].transpose(0, 1).numpy() for part in parts])


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print(f"// PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for head_dim in 16, 32, 64, 80, 96, 128, 192, 256, 512:
        for n_kv in 512, 2048:
            for given in 0, 1:
                random = Random(head_dim * 10000 + n_kv)
                q, k, v = (random.normals(rows, heads, head_dim) for rows in (queries, n_kv, n_kv))
                scale = np.float32(given or 1) / (np.float32(1) if given else np.sqrt(np.float32(head_dim)))
                truth = by_head(exact, q, k, v, np.float64(given or 1 / np.sqrt(head_dim)))

                def error(result):
                    return np.sqrt(np.mean((result - truth)**2))
                reference = error(by_head(plain, q, k, v, scale))
                errors = [error(of_pytorch(q, k, v, scale, rows)) for rows in calls]
                note = ""
                if mha:
                    own = error(mha.attention(q[None], k[None], v[None], scale=float(given))[0])
                    note = f"  // mha / PyTorch: {', '.join(f'{own / each:.2f}' for each in errors)}"
                print(f"    {{{head_dim}, {n_kv}, {given}, {{{', '.join(f'{each / reference:.2f}' for each in errors)}}}}},{note}", flush=True)


if __name__ == "__main__":
    main()
