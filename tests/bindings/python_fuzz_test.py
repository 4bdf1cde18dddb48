#!/usr/bin/env python3
"""The package mha with damaged buffers and any arguments: exceptions of the documented kinds, or a
result, and nothing read or written outside.

    python_fuzz_test.py --library LIBMHA.SO [--venv FOLDER]

Arrays end at memory that cannot be accessed. MHA_TEST_ROUNDS multiplies the number of cases.
Skipped with 77 without NumPy.
"""

import ctypes
import faulthandler
import mmap
import os
import resource
import unittest
import warnings

import python_support

arguments = python_support.parser(__doc__).parse_args()
python_support.need(["numpy"], arguments)

import mha
import mha.formats
import numpy as np

rounds = float(os.environ.get("MHA_TEST_ROUNDS", 1))
random = np.random.default_rng(11)
documented = TypeError, ValueError, mha.Error, MemoryError
_protect = ctypes.CDLL(None).mprotect


def guarded(array, border=1):
    """A copy that begins at a multiple of border, and ends less than that in front of a page that
    cannot be accessed."""
    used = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, used + mmap.PAGESIZE)
    page = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + used
    assert _protect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    first = (used - array.nbytes) // border * border
    copy = (
        np.frombuffer(memory, np.uint8, array.nbytes, first).view(array.dtype).reshape(array.shape)
    )
    copy[...] = array
    return copy


def floats(*shape):
    return guarded(random.standard_normal(shape).astype(np.float32))


def damaged(buffer, changes, cuts):
    """(position or None, buffer): with one bit changed, at positions below changes; and shorter
    ones."""
    for at in random.integers(0, changes, int(600 * rounds)):
        copy = guarded(buffer, 64)
        copy[at] ^= 1 << random.integers(8)
        yield at, copy
    for size in range(0, len(buffer), max(1, int(len(buffer) / cuts))):
        yield None, guarded(buffer[:size], 64)


class Buffers(unittest.TestCase):
    def test_packed_layers(self):
        x = floats(2, 3, 8)
        given = {"w_qkv": floats(8, 24), "b_qkv": floats(24), "w_o": floats(8, 8)}
        one = np.ones((24, 1), np.float32)
        codes = mha.formats.Grouped(np.ones((24, 8), np.int8), one, one, 16, 6, one, one)
        in_blocks = mha.formats.arguments(arithmetic="int8", w_qkv=codes, w_o=codes.rows(range(8)))
        for how in (
            {},
            {"weight_type": "int8", "arithmetic": "int16"},
            {"weight_type": "int4"},
            in_blocks,
        ):
            packed = mha.pack(8, 2, **{**given, **how})
            taken = 0
            for at, buffer in damaged(packed, 400, 150 * rounds):
                with self.subTest(how=how, at=at, size=len(buffer)):
                    with self.assertRaises(mha.Error):
                        mha.verify(buffer)
                    try:
                        layer = mha.Layer.view(buffer)
                    except mha.Error:
                        continue
                    self.assertIsNotNone(at, "a packed layer that is cut short is taken")
                    layer.forward(x)
                    taken += 1
            mha.verify(packed)

    def test_caches(self):
        q = floats(2, 1, 2, 8)
        for how in (
            {},
            {"kind": "ring", "k_type": "int8"},
            {"kind": "paged", "block_positions": 16, "num_blocks": 3, "v_type": "int4"},
        ):
            cache = mha.KvCache(num_sequences=2, capacity=16, num_kv_heads=1, head_dim=8, **how)
            if "num_blocks" in how:
                cache.set_blocks(0, [2])
            cache.append(0, floats(5, 1, 8), floats(5, 1, 8))
            for at, buffer in damaged(cache.buffer, 400, 150 * rounds):
                with self.subTest(how=how, at=at, size=len(buffer)):
                    try:
                        view = mha.KvCache.view(buffer)
                        self.assertIsNotNone(at, "a cache that is cut short is taken")
                        view.read(0, 0, view.length(0))
                        mha.attention(q, cache=view, cache_read=True)
                        view.append(1, floats(1, 1, 8), floats(1, 1, 8))
                        view.truncate(0, 2)
                    except mha.Error:
                        pass


numbers = [
    0,
    1,
    -1,
    2,
    3,
    5,
    7,
    2**40,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64 + 1,
    2**64 + 4,
    -(2**64) + 2,
    -(2**64) + 5,
    10**30,
    True,
    np.int64(3),
    np.uint64(2**64 - 5),
    1.5,
    float("nan"),
    float("inf"),
    1e300,
]
things = [
    None,
    "a",
    "f16",
    "bf16",
    "int8",
    "left",
    "half",
    b"",
    [],
    [3],
    (1, 2),
    {},
    object(),
    mha,
    np.float32(1),
    [2**70],
    ["a"],
    [0.5],
    {"w_q": 3},
]


def spoiled(value):
    """Another value in place of one, at times of its kind."""
    if not isinstance(value, np.ndarray) or random.random() < 0.15:
        pool = (
            numbers
            if isinstance(value, (int, float)) and random.random() < 0.8
            else numbers + things + [floats(2, 3), floats()]
        )
        return pool[random.integers(len(pool))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forms = [
            lambda a: guarded(a.astype(np.float64)),
            lambda a: guarded(a.astype(np.float16)),
            lambda a: guarded(a.astype(np.uint16)),
            lambda a: guarded(a.astype(np.int8)),
            lambda a: a.astype(">f4"),
            lambda a: a.astype(object),
            lambda a: a.view(np.uint8),
            lambda a: guarded(a.astype(np.int32)),
            lambda a: guarded(a.astype(np.bool_)),
            lambda a: a[::-1],
            lambda a: a.T,
            lambda a: a[..., ::2],
            lambda a: a[:-1],
            lambda a: a[..., :-1],
            lambda a: a[None],
            lambda a: a[..., None],
            lambda a: a[0],
            lambda a: np.broadcast_to(a[:1], a.shape),
            lambda a: np.broadcast_to(a[..., :1], a.shape),
            lambda a: a[:0],
            lambda a: a[..., :0],
            lambda a: np.asfortranarray(a),
            lambda a: a.tolist(),
            lambda a: np.broadcast_to(a, (3, *a.shape)),
            lambda a: guarded(np.repeat(a, 2, 0))[::2],
            lambda a: np.lib.stride_tricks.as_strided(a, strides=(0,) * a.ndim),
            lambda a: (
                np.lib.stride_tricks.sliding_window_view(a.reshape(-1), a.shape[-1])
                if a.size
                else a
            ),
            lambda a: a.astype("S4"),
        ]
        try:
            new = forms[random.integers(len(forms))](value)
        except (IndexError, ValueError):
            return value
        if isinstance(new, np.ndarray) and random.random() < 0.1:
            new.flags.writeable = False
        return new


class Calls(unittest.TestCase):
    def test_any_arguments(self):
        faulthandler.enable()
        # Huge extents are no memory, and not much of it.
        resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
        weights = dict(w_q=floats(8, 8), w_k=floats(8, 4), w_v=floats(8, 4), w_o=floats(8, 8))
        weights.update(b_q=floats(8), num_kv_heads=1, head_dim=4, layout="in_out", scales=None)
        weights.update(weight_type="f32", offsets=None, group_size=0, scale_type="f32")
        weights.update(block_scales=None, block_offsets=None)
        layer, rope = mha.Layer(8, 2, **weights), mha.Rope.tables(4, 20)
        threads = mha.Scheduler(2, lambda count, task: [task(index) for index in range(count)])
        packed = guarded(mha.pack(8, 2, **weights), 64)
        shape = {
            "num_sequences": 2,
            "capacity": 16,
            "num_kv_heads": 1,
            "head_dim": 4,
            "k_type": "f32",
            "kind": "contiguous",
        }

        def cache():
            made = mha.KvCache(**shape)
            (
                made.append(0, floats(3, 1, 4), floats(3, 1, 4)),
                made.append(1, floats(3, 1, 4), floats(3, 1, 4)),
            )
            return made

        def sequences():
            return {
                "q_first_positions": np.array([3, 4]),
                "q_lengths": np.array([2, 3]),
                "kv_lengths": [3, 2],
                "q_first_rows": [1, 0],
                "kv_first_rows": [0, 1],
                "is_causal": True,
                "equal_scores": False,
                "window_left": 2,
                "window_right": 1,
                "padding": "right",
            }

        def score(columns=3):
            sizes = {"batch": 2, "num_heads": 2, "num_kv_heads": 1, "n_q": 3, "columns": columns}
            sizes.update(distances=5, entries=2)
            given = {"softcap": 2.0, "column_keys": "all_keys", "num_columns": 0}
            given.update(segments="within", relative_left=2, chosen_block=1)
            for name, (of, extents) in python_support.arrays_of(mha.ScoreOptions).items():
                shape = [
                    sizes[extent]
                    for extent in extents
                    if extent != "batch" or random.random() < 0.5
                ]
                given[name] = guarded(random.integers(2, size=shape).astype(of))
            return mha.ScoreOptions(**some(given, 2))

        def norm():
            return mha.Norm(
                **some(
                    {
                        "q_weight": floats(4),
                        "k_weight": floats(4),
                        "q_bias": floats(4),
                        "epsilon": 1e-5,
                        "layer": True,
                        "all_heads": False,
                        "context": mha.ContextNorm(
                            **some(
                                {
                                    "weight": floats(4),
                                    "bias": floats(4),
                                    "epsilon": 1e-5,
                                    "all_heads": False,
                                },
                                2,
                            )
                        ),
                    },
                    2,
                )
            )

        def some(options, count):
            """Some of the options, at times with a spoiled one."""
            chosen = {
                name: options[name]
                for name in random.choice(
                    list(options), random.integers(min(count, len(options)) + 1), replace=False
                )
            }
            return spoil(chosen) if random.random() < 0.4 else chosen

        def spoil(values):
            if values:
                name = list(values)[random.integers(len(values))]
                values[name] = spoiled(values[name])
            return values

        def options():
            return {
                **some(sequences(), 2),
                **some(
                    {
                        "norm": norm(),
                        "score": score(),
                        "rope": rope,
                        "cache": cache(),
                        "out": floats(2, 3, 2, 4),
                        "want": ["lse", "attention_weights"],
                        "cache_sequences": [1, 0],
                        "scheduler": threads,
                        "workspace": guarded(np.zeros(2**16, np.uint8)),
                        "output_type": "f32",
                        "cache_read": True,
                        "prepare": False,
                        "scale": 0.5,
                        "kv_first_position": 0,
                        "partials": False,
                        "instruction_set": "scalar",
                        "bf16": False,
                    },
                    2,
                ),
            }

        def product(**changes):
            given = {"x": floats(3, 8), "w": floats(5, 8), "b": floats(5), **changes}
            return mha.Linear(
                given.pop("w"),
                given.pop("b"),
                **some({"inputs": 8, "layout": "out_in", "weight_type": "f16"}, 1),
            )(**given)

        q, k = lambda: floats(2, 3, 2, 4), lambda: floats(2, 3, 1, 4)
        calls = {  # function -> what it takes
            lambda **given: mha.Layer(**given): lambda: {"query_dim": 8, "num_heads": 2, **weights},
            lambda **given: mha.pack(**given): lambda: {
                "query_dim": 8,
                "num_heads": 2,
                **weights,
                "out": guarded(np.zeros(len(packed), np.uint8), 64),
            },
            lambda **given: layer.forward(**given): lambda: {
                "query": floats(2, 3, 8),
                "key": floats(2, 3, 8),
                "value": floats(2, 3, 8),
                **options(),
                "out": floats(2, 3, 8),
            },
            lambda **given: layer.info(**given): lambda: {
                "n_q": 3,
                "n_kv": 3,
                "batch": 2,
                **some(sequences(), 2),
            },
            lambda **given: mha.attention(**given): lambda: {
                "q": q(),
                "k": k(),
                "v": k(),
                **options(),
            },
            lambda **given: mha.attention_info(**given): lambda: {
                "n_q": 3,
                "n_kv": 3,
                "num_heads": 2,
                "head_dim": 4,
                "batch": 2,
                **some(sequences(), 2),
            },
            lambda **given: mha.choose_keys(**given): lambda: {
                "q": q(),
                "weights": floats(2, 3, 2),
                "num_chosen": 2,
                "k": floats(2, 3, 4),
                **some(sequences(), 2),
                **some(
                    {
                        "out": guarded(np.zeros((2, 3, 2), np.int32)),
                        "index_scores": floats(2, 3, 3),
                        "rope": rope,
                    },
                    2,
                ),
            },
            lambda **given: mha.recurrent_attention(**given): lambda: {
                "q": q(),
                "k": k(),
                "v": q(),
                **some(
                    {
                        "decay": floats(2, 3, 2),
                        "beta": floats(2, 3, 2),
                        "state": floats(2, 2, 4, 4),
                        "state_out": floats(2, 2, 4, 4),
                        "snapshots": floats(2, 2, 2, 4, 4),
                        "norm_epsilon": 1e-6,
                        "a_log": floats(2),
                        "dt_bias": floats(2),
                        "scale": 0.5,
                        "beta_function": "sigmoid",
                    },
                    5,
                ),
                **some(
                    {
                        "q_lengths": [2, 3],
                        "q_first_rows": [1, 0],
                        "padding": "left",
                        "scheduler": threads,
                        "out": q(),
                        "output_type": "f32",
                        "bf16": False,
                    },
                    2,
                ),
            },
            lambda **given: mha.causal_conv(**given): lambda: {
                "x": floats(2, 3, 8),
                "weights": floats(8, 3),
                **some(
                    {
                        "bias": floats(8),
                        "activation": "silu",
                        "state": floats(2, 2, 8),
                        "state_out": floats(2, 2, 8),
                        "q_lengths": [2, 3],
                        "padding": "left",
                        "scheduler": threads,
                        "out": floats(2, 3, 8),
                    },
                    3,
                ),
            },
            lambda **given: mha.KvCache(**given): lambda: {
                **shape,
                **some(
                    {
                        "buffer": guarded(np.zeros(4096, np.uint8), 64),
                        "value_place": "own",
                        "block_positions": 16,
                        "num_blocks": 2,
                    },
                    2,
                ),
            },
            lambda **given: cache().append(**given): lambda: {
                "sequence": 0,
                "k": floats(2, 1, 4),
                "v": floats(2, 1, 4),
            },
            lambda **given: cache().read(**given): lambda: {"sequence": 0, "first": 1, "count": 2},
            lambda **given: cache().truncate(**given): lambda: {"sequence": 0, "length": 2},
            lambda **given: cache().copy_prefix(**given): lambda: {
                "source": 0,
                "target": 1,
                "length": 2,
            },
            lambda **given: mha.KvCache(
                **{**shape, "kind": "paged", "block_positions": 16, "num_blocks": 2}
            ).set_blocks(**given): lambda: {"sequence": 0, "blocks": [1]},
            lambda **given: mha.KvCache(
                **{**shape, "kind": "paged", "block_positions": 16, "num_blocks": 2}
            ).unshare(**given): lambda: {"sequence": 0, "block": 1},
            lambda **given: cache().length(**given): lambda: {"sequence": 0},
            lambda **given: mha.Layer.view(**given): lambda: {
                "packed": packed,
                "instruction_set": "auto",
            },
            lambda **given: mha.verify(**given): lambda: {"packed": packed},
            lambda **given: mha.KvCache.view(**given): lambda: {"buffer": cache().buffer},
            lambda **given: mha.Rope.tables(**given): lambda: {
                "dims": 4,
                "num_positions": 9,
                **some(
                    {
                        "base": 100.0,
                        "first_position": 2,
                        "yarn_factor": 2.0,
                        "original_positions": 9,
                        "pair_factors": [1.0, 2.0],
                        "mrope_section": [1, 1, 0],
                        "offset": 0,
                    },
                    2,
                ),
            },
            lambda **given: mha.attention(q(), k(), k(), rope=mha.Rope(**given)): lambda: {
                "cos": floats(9, 2),
                "sin": floats(9, 2),
                **some(
                    {
                        "dims": 4,
                        "q_positions": [[0, 1, 2]] * 2,
                        "k_positions": [[0, 1, 2]] * 2,
                        "offset": 0,
                        "style": "half",
                    },
                    2,
                ),
            },
            lambda **given: mha.alibi_slopes(**given): lambda: {"num_heads": 4},
            lambda **given: mha.aligned(**given): lambda: {"bytes": 64},
            lambda **given: mha.t5_relative_bias(**given): lambda: {
                "embedding": floats(32, 2),
                "max_distance": 12,
                "is_bidirectional": True,
            },
            lambda **given: mha.partials_merge(**given): lambda: {
                "left": floats(2, 2, 3, 6),
                "right": floats(2, 2, 3, 6),
                "out": floats(2, 2, 3, 6),
            },
            lambda **given: mha.partials_finish(**given): lambda: {
                "partials": floats(2, 2, 3, 6),
                "sinks": floats(2),
                "head_scales": floats(2),
                "out": floats(2, 3, 2, 4),
            },
            product: lambda: {
                "x": floats(3, 8),
                **some(
                    {
                        "w": floats(5, 8),
                        "b": floats(5),
                        "residual": floats(3, 5),
                        "out": floats(3, 5),
                        "output_type": "f32",
                        "scheduler": threads,
                    },
                    3,
                ),
            },
        }
        done, refused = 0, 0
        for number in range(int(4000 * rounds)):
            function, takes = list(calls.items())[number % len(calls)]
            try:
                given = takes()
                spoil(given) if random.random() < 0.7 else None
                function(**given)
                done += 1
            except documented:
                refused += 1
            except BaseException:
                print(f"case {number}: {given}")
                raise
        print(f"{done} calls did, {refused} were refused")
        self.assertGreater(min(done, refused), 0.2 * number)


if __name__ == "__main__":
    python_support.run(Buffers, Calls)
