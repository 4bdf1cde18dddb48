#!/usr/bin/env python3
"""Runs the command mha without memory: each of its allocations fails in turn, alone and with all
later ones.

    out_of_memory_test.py MHA LIBMHA_FAILING_MALLOC.SO [--all]

The command ends with status 1 and one sentence, leaves no file and changes none; or it succeeds
despite the failure. Without --all, only each 29th allocation after the 30th fails.
"""

import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest

from formats import safetensors

MHA, SHIM = map(os.path.abspath, sys.argv[1:3])
takes_all = "--all" in sys.argv
last_of_all = 10**9
random.seed(1)


def matrix(rows, columns):
    return [[random.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]


class OutOfMemory(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        tensors = {
            f"h.{i}.self_attn.{name}_proj.weight": matrix(8, 8) for i in range(2) for name in "qkvo"
        }
        (self.folder / "w.safetensors").write_bytes(safetensors(tensors))
        header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 8), }".ljust(117) + "\n"
        (self.folder / "x.npy").write_bytes(
            b"\x93NUMPY\x01\x00v\x00" + header.encode() + bytes(3 * 8 * 4)
        )
        self.run_it(["pack", *self.weights, "--output", "layer.mha"])

    weights = [
        "--weights",
        "w.safetensors",
        "--layer",
        "h.1",
        "--heads",
        "2",
        "--causal",
        "--no-rope",
    ]

    def run_it(self, words, **environment):
        return subprocess.run(
            [MHA, *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environment},
        )

    def fail_each(self, *words, output=None):
        whole = self.run_it(words)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        result = (self.folder / output).read_bytes() if output else b""
        seen, failures = self.folder / "seen", 0
        for for_good in False, True:
            number = 1
            while True:
                if output:
                    (self.folder / output).write_bytes(b"before")
                files = set(os.listdir(self.folder))
                done = self.run_it(
                    words,
                    LD_PRELOAD=SHIM,
                    MHA_FAIL_FIRST=str(number),
                    MHA_FAIL_LAST=str(last_of_all if for_good else number),
                    MHA_FAIL_SEEN=str(seen),
                )
                what = (
                    f"allocation {number}{' and all later ones' if for_good else ''}: {done.stderr}"
                )
                written = (self.folder / output).read_bytes() if output else b""
                if not seen.exists():
                    break
                seen.unlink()
                failures += done.returncode != 0
                if done.returncode == 0:
                    self.assertEqual(
                        (re.sub(r"[\d.]+ (ms|us|s)\b", "", done.stdout), written),
                        (re.sub(r"[\d.]+ (ms|us|s)\b", "", whole.stdout), result),
                        what,
                    )
                else:
                    self.assertEqual(done.returncode, 1, what)
                    self.assertRegex(done.stderr, r"\Amha: [^\n]*memory[^\n]*\n\Z", what)
                    self.assertEqual(written, b"before" if output else b"", what)
                self.assertEqual(set(os.listdir(self.folder)), files, what)
                number += 1 if takes_all or number < 30 else 29
            self.assertEqual(done.returncode, 0, what)
        self.assertGreater(failures, 60)
        self.assertEqual(self.run_it(words).returncode, 0)
        print(f"{words[0]}: {failures} runs failed, of about {number} allocations", flush=True)

    def test_run(self):
        self.fail_each(
            "run", *self.weights, "--input", "x.npy", "--output", "y.npy", output="y.npy"
        )

    def test_pack(self):
        self.fail_each("pack", *self.weights, "--output", "p.mha", output="p.mha")

    def test_verify(self):
        self.fail_each("verify", "layer.mha")


unittest.main(argv=[sys.argv[0]])
