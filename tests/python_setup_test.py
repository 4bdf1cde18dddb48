#!/usr/bin/env python3
"""tools/python/setup.sh and tools/compare.py --install where a Python without ensurepip has left half a virtual environment, as Debian's does
without the package python3-venv. Asks no network. Exits with 77, which ctest shows as skipped, where this Python is such a one.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

tools = pathlib.Path(__file__).resolve().parent.parent / "tools"
no_network = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PYTHONDONTWRITEBYTECODE": "1"}


class HalfAnEnvironment(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def made_whole_by(self, *command, status):
        """All that is missing in the end are the packages, which cannot be fetched here."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        done = subprocess.run(command, env=no_network, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, status, done.stdout)
        self.assertIn("No matching distribution found", done.stdout)
        self.assertTrue((self.folder / "bin" / "pip").exists())

    def test_setup_makes_it_whole(self):
        self.made_whole_by(tools / "python" / "setup.sh", self.folder, status=1)

    def test_compare_makes_it_whole(self):
        self.made_whole_by(sys.executable, tools / "compare.py", "--install", "onnxruntime", "--venv", self.folder, status=4)

    def test_a_folder_of_another_kind_keeps_what_is_in_it(self):
        notes = self.folder / "notes"
        notes.write_text("mine")
        without_venv = self.folder / "python3"
        without_venv.write_text("#!/bin/sh\nexit 1\n")
        without_venv.chmod(0o755)
        done = subprocess.run([tools / "python" / "setup.sh", self.folder], env={**no_network, "PATH": f"{self.folder}:{os.environ['PATH']}"},
                              stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("needs the package python3-venv", done.stderr)
        self.assertEqual(notes.read_text(), "mine")


if not importlib.util.find_spec("ensurepip"):
    print("skipped: this Python makes no virtual environments (Debian: python3-venv)")
    sys.exit(77)
unittest.main()
