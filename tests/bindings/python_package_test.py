#!/usr/bin/env python3
"""The Python package, installed into a virtual environment with nothing else and used from an empty
folder: from the wheel that `python -m build` makes of its own source distribution, with the kernels
of plain C++ alone, which compile soon. tools/release/wheels.sh --test tries those of a release.
Exits with 77, which ctest shows as skipped, where PyPI cannot be reached.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

root = pathlib.Path(__file__).resolve().parent.parent.parent
package = root / "tools" / "bindings" / "python"
skipped = 77
environment = {
    name: value for name, value in os.environ.items() if name not in ("MHA_LIBRARY", "PYTHONPATH")
}

# What a user would write; it prints what the tests look at.
program = """
import mha, numpy as np, pathlib, sys
random = np.random.default_rng(1)
q, k, v = (random.standard_normal((2, rows, 4, 16)).astype(np.float32) for rows in (5, 7, 7))
scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 4
weights = np.exp(scores - scores.max(axis=3, keepdims=True))
expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=3, keepdims=True), v)
np.testing.assert_allclose(mha.attention(q, k, v), expected, rtol=0, atol=1e-5)
folder = pathlib.Path(mha.__file__).parent
loaded = pathlib.Path(mha._library._library._name)
assert loaded == folder / "libmha.so", loaded
assert (folder / "py.typed").exists() and (folder / "libmha_openmp.so").exists()
print(mha.__version__, mha.version(), sorted(set(sys.modules) & {"torch", "transformers", "onnx"}))
import mha.torch
"""


def run(*command, **more):
    settings = {"cwd": work / "empty", "env": environment, **more}
    return subprocess.run(command, capture_output=True, text=True, **settings)


class Package(unittest.TestCase):
    def run_module(self, *words):
        done = subprocess.run(
            [python, "-m", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stdout)

    def run_pip(self, *words):
        self.run_module("pip", "--disable-pip-version-check", "--quiet", *words)

    def test_it_runs_from_an_empty_folder(self):
        options = "-Ccmake.define.MHA_AVX2=OFF", "-Ccmake.define.MHA_AVX512=OFF"
        self.run_module("build", "--no-isolation", "--outdir", work / "dist", *options, root)
        made, wheel = sorted((work / "dist").iterdir(), key=lambda path: path.suffix)
        self.assertRegex(made.name, r"\Amha-[\d.]+\.tar\.gz\Z")
        self.run_pip("install", "--no-deps", wheel)
        (work / "empty").mkdir()
        done = run(python, "-c", program)
        header = (root / "include" / "mha.h").read_text()
        major, minor, patch = (
            int(re.search(rf"#define MHA_VERSION_{part} (\d+)", header).group(1))
            for part in ("MAJOR", "MINOR", "PATCH")
        )
        self.assertEqual(
            done.stdout,
            f"{major}.{minor}.{patch} {10000 * major + 100 * minor + patch} []\n",
            done.stderr,
        )
        self.assertEqual(
            done.stderr.splitlines()[-1],
            "ImportError: mha.torch needs PyTorch, which is not installed: pip install torch",
        )
        for words, said in (["info"], "instruction sets  scalar\n"), (["explain"], "Step 12 "):
            done = run(work / "venv" / "bin" / "mha", *words)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(said, done.stdout)
        self.run_pip("check")
        self.run_pip("uninstall", "--yes", "mha")
        done = run(python, "-c", "import mha")
        self.assertIn("No module named 'mha'", done.stderr)
        status = "git", "status", "--porcelain", "--ignored", package, root / "dist"
        left = re.findall(
            r".*/(?:build|dist|\w+\.egg-info|\w+\.so)\b.*", run(*status, cwd=root).stdout
        )
        self.assertEqual(left, [], "the build left files")


with tempfile.TemporaryDirectory() as folder:
    work = pathlib.Path(folder)
    python = work / "venv" / "bin" / "python"
    made = subprocess.run(
        [sys.executable, "-m", "venv", work / "venv"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if made.returncode == 0:
        made = subprocess.run(
            [
                python,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--quiet",
                "install",
                "--timeout",
                "20",
                "--retries",
                "1",
                "numpy",
                "build",
                "scikit-build-core",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if made.returncode:
        print(f"skipped: no virtual environment with NumPy could be made:\n{made.stdout}")
        sys.exit(skipped)
    result = unittest.TextTestRunner(verbosity=2).run(
        unittest.defaultTestLoader.loadTestsFromTestCase(Package)
    )
sys.exit(not result.wasSuccessful())
