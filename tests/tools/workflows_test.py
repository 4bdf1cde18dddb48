#!/usr/bin/env python3
"""Checks the workflows of CI: they call only pinned actions and scripts of the tree, and can only
read. With --lint also runs tools/lint.sh: all files are well formed, and each of its checks finds
one that is not. Exits with 77, which ctest shows as skipped, where one of its tools is missing.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

root = pathlib.Path(__file__).resolve().parent.parent.parent
workflows = {
    path.name: path.read_text() for path in sorted((root / ".github" / "workflows").glob("*.yml"))
}


class Workflows(unittest.TestCase):
    def test_there_are_workflows(self):
        self.assertEqual(list(workflows), ["ci.yml", "nightly.yml", "release.yml"])

    def test_actions_are_pinned_by_digest_and_say_their_version(self):
        for name, text in workflows.items():
            uses = re.findall(r"uses: (.*)", text)
            self.assertTrue(uses, name)
            for action in uses:
                self.assertRegex(action, r"^actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", name)

    def test_scripts_that_are_called_exist(self):
        for name, text in workflows.items():
            packages = re.search(r"package: \[(.*)\]", text)
            text = text.replace(
                "tools/release/${{ matrix.package }}.sh",
                (
                    " ".join(f"tools/release/{package}.sh" for package in packages[1].split(", "))
                    if packages
                    else ""
                ),
            )
            called = set(re.findall(r"tools/[\w/]+\.sh", text))
            self.assertTrue(called, name)
            for script in called:
                self.assertTrue(os.access(root / script, os.X_OK), f"{name}: {script}")

    def test_steps_run_scripts_of_the_tree_alone(self):
        for name, text in workflows.items():
            for step in re.findall(r"run: (\S+)", text):
                self.assertRegex(step, r"^(tools/.*|apt-get|gh|\$\{\{)$", name)

    def test_jobs_can_only_read_but_for_the_one_that_drafts_a_release(self):
        for name, text in workflows.items():
            self.assertIn("\npermissions:\n  contents: read\n", text, name)
            self.assertEqual(text.count(": write"), 1 if name == "release.yml" else 0, name)
            self.assertNotIn("secrets.", text, name)
            self.assertNotIn("pull_request_target", text, name)
            self.assertEqual(
                text.count("actions/checkout@"), text.count("persist-credentials: false"), name
            )
            self.assertIn("\nconcurrency:\n", text, name)


class Lint(unittest.TestCase):
    """Runs tools/lint.sh in a copy of the commit with the changes since."""

    def lint(self, change=None):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "copy"
            subprocess.run(["git", "clone", "--quiet", "--shared", root, copy], check=True)
            changed = subprocess.run(
                ["git", "-C", root, "diff", "--binary", "HEAD"], check=True, stdout=subprocess.PIPE
            ).stdout
            subprocess.run(
                ["git", "-C", copy, "apply", "--index", "--allow-empty"], input=changed, check=True
            )
            (copy / "build").mkdir()
            (copy / "build" / "lint").symlink_to(root / "build" / "lint")
            if change:
                path, text = change
                with open(copy / path, "a") as file:
                    file.write(text)
                subprocess.run(["git", "-C", copy, "add", path], check=True)
            done = subprocess.run(
                [copy / "tools" / "lint.sh"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            return done.returncode, done.stdout

    def test_the_tree_is_well_formed(self):
        status, said = self.lint()
        self.assertEqual(status, 0, said)

    def test_each_check_finds_what_is_not(self):
        for change, said in [
            (("src/check/report.cpp", "int  badly_formed ;\n"), "clang-format"),
            (("tools/mutate.py", "import inspect\n"), "ruff"),
            (("tools/bindings/rust/mha/src/lib.rs", "fn  badly_formed() { }\n"), "rustfmt"),
            (("tools/fuzz.sh", "cd $1/sub\n[ -z ]] \n"), "shellcheck"),
            ((".github/workflows/ci.yml", "  nothing:\n    runs-on: nowhere\n"), "nowhere"),
            ((".github/ISSUE_TEMPLATE/bug.yml", "  - { type: input, id: shape }\n"), "bug.yml"),
        ]:
            with self.subTest(check=said):
                status, output = self.lint(change)
                self.assertEqual(status, 1, output)
                self.assertRegex(output, rf"{said}.*(Failed|unknown|once)")


if "--lint" in sys.argv:
    sys.argv.remove("--lint")
    done = subprocess.run(
        [root / "tools" / "lint.sh"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode == 3 or not shutil.which("git"):
        print(f"skipped: {done.stdout}")
        sys.exit(77)
else:
    del Lint
unittest.main()
