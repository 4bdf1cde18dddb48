#!/usr/bin/env python3
"""Runs the scripts of tools/ and bench/ on a machine with little installed: their help, the files
of the demonstration in a new folder, and virtual environments that are incomplete. Uses no network.
Exits with 77, which ctest shows as skipped, if all pass but those this Python cannot run.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

tools = pathlib.Path(__file__).resolve().parent.parent.parent / "tools"
no_network = {
    **os.environ,
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class InAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


class Scripts(InAFolder):
    def test_every_script_has_help_with_examples_and_needs_nothing_for_it(self):
        scripts = [
            path
            for folder in (tools, tools.parent / "bench")
            for path in sorted(folder.glob("**/*"))
            if path.suffix in (".sh", ".py") and path.is_file() and path.read_bytes()[:2] == b"#!"
        ]
        self.assertLess(
            {tools / "demo.sh", tools.parent / "bench" / "rivals" / "report.py"}, set(scripts)
        )
        for script in scripts:
            with self.subTest(script=script.name):
                # -S: without the packages of this Python
                command = (
                    [sys.executable, "-S", "-B", script] if script.suffix == ".py" else [script]
                )
                done = subprocess.run(
                    [*command, "--help"],
                    cwd=self.folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                self.assertEqual(done.returncode, 0, done.stdout)
                self.assertRegex(done.stdout, r"(?mi)^examples?\b.*:")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_the_files_of_the_demonstration_are_written_into_a_new_folder(self):
        new = self.folder / "some" / "folder"
        subprocess.run([sys.executable, tools / "demo_files.py", new], check=True)
        self.assertEqual(
            {path.name for path in new.iterdir()},
            {"layer.safetensors", "x.npy", "sentence.safetensors", "sentence.npy", "sentence.txt"},
        )

    def test_a_folder_that_cannot_be_made_is_a_sentence(self):
        (self.folder / "file").touch()
        done = subprocess.run(
            [sys.executable, tools / "demo_files.py", self.folder / "file"],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "^demo_files.py: .*/file cannot be made: File exists\n$")


@unittest.skipUnless(
    importlib.util.find_spec("ensurepip"),
    "this Python makes no virtual environments (Debian: python3-venv)",
)
class HalfAnEnvironment(InAFolder):
    """The environment that a Python without ensurepip makes, such as Debian's without the package
    python3-venv."""

    def made_whole_by(self, *command, status):
        """The command completes it, but for packages that cannot be fetched here."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        done = subprocess.run(
            command, env=no_network, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.assertEqual(done.returncode, status, done.stdout)
        self.assertIn("No matching distribution found", done.stdout)
        self.assertTrue((self.folder / "bin" / "pip").exists())

    def test_setup_makes_it_whole(self):
        self.made_whole_by(tools / "bindings" / "python" / "setup.sh", self.folder, status=1)

    def test_torch_comes_from_the_index_that_the_environment_names(self):
        index = self.folder / "index" / "torch"
        index.mkdir(parents=True)
        with zipfile.ZipFile(index / "torch-9.9-py3-none-any.whl", "w") as wheel:
            wheel.writestr("torch-9.9.dist-info/METADATA", "Name: torch\nVersion: 9.9\n")
            wheel.writestr("torch-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr("torch-9.9.dist-info/RECORD", "")
        (index / "index.html").write_text("<a href='torch-9.9-py3-none-any.whl'>torch</a>")
        nowhere = {"PIP_INDEX_URL": (self.folder / "none").as_uri(), "PIP_FIND_LINKS": ""}
        command = [tools / "bindings" / "python" / "setup.sh", "--runtimes", self.folder / "new"]
        without, named = (
            subprocess.run(
                [*command, *words],
                env={**os.environ, **nowhere, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for words, more in (
                (["--dry-run"], {}),
                ([], {"MHA_TORCH_INDEX": index.parent.as_uri()}),
            )
        )
        self.assertRegex(without.stdout, r"3\.1 GB, 2\.5 GB of it CUDA libraries")
        self.assertEqual(without.returncode, 0)
        self.assertTrue((self.folder / "new").exists(), named.stdout)
        self.assertIn("torch from MHA_TORCH_INDEX", named.stdout)
        self.assertEqual(named.returncode, 1, named.stdout)
        self.assertTrue([*self.folder.glob("new/lib/*/site-packages/torch-9.9.dist-info")])

    def test_a_folder_of_another_kind_keeps_what_is_in_it(self):
        notes = self.folder / "notes"
        notes.write_text("mine")
        without_venv = self.folder / "python3"
        without_venv.write_text("#!/bin/sh\nexit 1\n")
        without_venv.chmod(0o755)
        done = subprocess.run(
            [tools / "bindings" / "python" / "setup.sh", self.folder],
            env={**no_network, "PATH": f"{self.folder}:{os.environ['PATH']}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("needs the package python3-venv", done.stderr)
        self.assertEqual(notes.read_text(), "mine")


result = unittest.main(exit=False).result
sys.exit(1 if not result.wasSuccessful() else 77 if result.skipped else 0)
