#!/usr/bin/env python3
"""Tests what tools/release.sh refuses: a small repository has the files that it checks, and each
test spoils one of them."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

source = pathlib.Path(__file__).resolve().parent.parent.parent
environment = {
    **os.environ,
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{
        f"GIT_{who}_{what}": "a@b.c"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
}


class Release(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "mha"
        for path in [
            *source.glob("include/*.h"),
            *source.glob("tools/*/**/Cargo.toml"),
            *(
                source / name
                for name in (
                    "CHANGELOG.md",
                    "tools/release.sh",
                    "tests/package/abi.py",
                    "tests/package/interface.txt",
                    "tests/interface/packed_files.txt",
                )
            ),
        ]:
            target = self.root / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        header = (self.root / "include" / "mha.h").read_text().split()
        self.version = ".".join(
            header[header.index(f"MHA_VERSION_{part}") + 1] for part in ("MAJOR", "MINOR", "PATCH")
        )
        changes = (self.root / "CHANGELOG.md").read_text()
        (self.root / "CHANGELOG.md").write_text(
            re.sub(r"^(## \S+) \(.*\)$", r"\1 (2026-01-31)", changes, count=1, flags=re.MULTILINE)
        )
        self.git("init", "--quiet")
        self.commit()

    def git(self, *words):
        subprocess.run(["git", "-C", self.root, *words], check=True, env=environment)

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "A change")
        self.git("tag", "--force", f"v{self.version}")

    def spoil(self, name, before, after):
        path = self.root / name
        self.assertIn(before, path.read_text())
        path.write_text(path.read_text().replace(before, after))

    def refused(self, sentence, version=None):
        done = subprocess.run(
            [self.root / "tools" / "release.sh", version or self.version, "--check"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(sentence, done.stdout)

    def test_what_is_right_passes(self):
        done = subprocess.run(
            [self.root / "tools" / "release.sh", self.version, "--check"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.assertEqual((done.returncode, done.stdout), (0, f"v{self.version} can be released\n"))

    def test_no_tag(self):
        self.git("tag", "--delete", f"v{self.version}")
        self.refused(f"there is no tag v{self.version}")

    def test_another_commit_than_the_tagged_one(self):
        self.git("commit", "--quiet", "--allow-empty", "--message", "Later")
        self.refused(f"HEAD is not v{self.version}")

    def test_changes_that_are_not_committed(self):
        (self.root / "new.txt").touch()
        self.refused("there are uncommitted changes: ?? new.txt")

    def test_another_version_than_the_header_has(self):
        self.git("tag", "v9.8.7")
        self.refused(f"include/mha.h says version {self.version}, not 9.8.7", "9.8.7")

    def test_a_crate_of_another_version(self):
        for name in ("tools/bindings/rust/Cargo.toml", "tools/adapters/candle/Cargo.toml"):
            self.spoil(name, f'version = "{self.version}"', 'version = "9.8.7"')
            self.commit()
            self.refused(f"{name} says version 9.8.7, not {self.version}")

    def test_a_change_log_without_a_date(self):
        self.spoil("CHANGELOG.md", "(2026-01-31)", "(unreleased)")
        self.commit()
        self.refused(f"CHANGELOG.md has no heading '## {self.version} (YEAR-MONTH-DAY)'")

    def test_no_files_of_this_version_for_later_ones_to_read(self):
        self.spoil("tests/interface/packed_files.txt", f"{self.version} ", "0.0.1 ")
        self.commit()
        self.refused(f"tests/interface/packed_files.txt has nothing written by {self.version}")

    def test_a_header_that_breaks_programs_of_the_version_before(self):
        self.git("tag", "v0.0.1")
        # Written down, but no less wrong.
        for name in ("include/mha.h", "tests/package/interface.txt"):
            self.spoil(
                name, "#define MHA_ERROR_NULL_POINTER 1u", "#define MHA_ERROR_NULL_POINTER 99u"
            )
        self.commit()
        self.refused("the header breaks programs that were compiled with v0.0.1")


unittest.main()
