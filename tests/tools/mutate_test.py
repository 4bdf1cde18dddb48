#!/usr/bin/env python3
"""Tests tools/mutate.py without compiling anything: its list, its samples, and its report of
survivors."""

import contextlib
import importlib.util
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

root = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
spec = importlib.util.spec_from_file_location("mutate", root / "tools" / "mutate.py")
mutate = sys.modules["mutate"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutate)


class List(unittest.TestCase):
    def errors(self, text):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "a.cpp").write_text("f(1);\ng(2);\ng(2);\n")
            return "\n".join(mutate.errors_of(mutate.read_list(text), pathlib.Path(folder)))

    def test_a_fault_is_a_text_what_stands_in_its_place_tests_and_a_reason(self):
        self.assertEqual(
            mutate.read_list(
                "# about it\n[a.cpp] rope\nf(1); ==> f(2); ## norm:IsExact gate\ng(2); ==> ##"
                " equivalent: it is slower\n"
            ),
            [
                mutate.Mutant("a.cpp", "f(1);", "f(2);", ("norm:IsExact", "gate", "rope"), ""),
                mutate.Mutant("a.cpp", "g(2);", "", ("rope",), "it is slower"),
            ],
        )

    def test_a_line_that_is_no_fault_is_an_error(self):
        for text in "[a.cpp]\nf(1);", "f(1); ==> f(2);":
            with self.assertRaisesRegex(mutate.Stop, "line . of the list is not"):
                mutate.read_list(text)

    def test_its_text_must_name_one_place(self):
        self.assertEqual(self.errors("[a.cpp]\nf(1); ==> f(2);"), "")
        self.assertIn("occurs 2 times", self.errors("[a.cpp]\ng(2); ==>"))
        self.assertIn("occurs 0 times", self.errors("[a.cpp]\nh(2); ==>"))
        self.assertIn("occurs 0 times", self.errors("[b.cpp]\nf(1); ==>"))

    def test_programs_are_known_and_no_fault_is_there_twice(self):
        self.assertIn("'ropes' is not a test program", self.errors("[a.cpp] ropes\nf(1); ==>"))
        self.assertIn("is listed twice", self.errors("[a.cpp]\nf(1); ==>\nf(1); ==>"))


class Refusals(unittest.TestCase):
    TEXT = """mha_status f(int a) {
  MHA_TRY(check_a(a, {1}));
  const bool is_sound = a > 0 && b;
  other = (x || y) && f({1, 2});
  for (int i = 0; i < 3 && i < a; ++i) g(i);
  if (!is_sound || (c && d->e)) return report.invalid("a || b");  // c && d
  if (shortcut) return MHA_OK;
  g();
  if (a == 8) return MHA_OK;
  return a ? MHA_OK : check_b(a);
}
"""

    def test_conditions_their_operands_and_statuses_are_left_out(self):
        self.assertEqual(
            "; ".join(
                f"{self.TEXT[a:b]} {value}" for a, b, _, value in mutate.checks_of(self.TEXT)
            ),
            "check_a(a, {1}) MHA_OK; a > 0 true; b true; !is_sound || (c && d->e) false;"
            " !is_sound false; (c && d->e) false; c true; d->e true; a == 8 true; a true",
        )

    def test_all_are_planted_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            work = pathlib.Path(folder)
            (work / "src" / "check").mkdir(parents=True)
            (work / "src" / "check" / "a.cpp").write_text(self.TEXT)
            faults = mutate.plant_checks(work)
            self.assertEqual(str(faults[2]), "src/check/a.cpp: b ==> true")
            self.assertIn(
                "if (fault<bool>(3, false, fault<bool>(4, false, !is_sound) ||"
                " fault<bool>(5, false, (fault<bool>(6, true, c) &&"
                " fault<bool>(7, true, d->e))))) return",
                (work / "src" / "check" / "a.cpp").read_text(),
            )


class Runs(unittest.TestCase):
    def run_with(self, caught, *arguments):
        """Exit status and output where each fault is caught if `caught` says so of its number."""
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "list"
            file.write_text(
                "[src/plan/count.h]\n" + "".join(f"fault {i} ==>\n" for i in range(100))
            )
            build = mock.Mock()
            build.judge.side_effect = lambda mutant, work: (
                "rope, Rope.Turns" if caught(int(mutant.old.split()[1])) else None
            )
            output = io.StringIO()
            with (
                mock.patch.multiple(
                    mutate,
                    Build=lambda *_: build,
                    errors_of=lambda *_: [],
                    FOLDER=pathlib.Path(folder),
                ),
                mock.patch.object(sys, "argv", ["mutate.py", "--mutants", str(file), *arguments]),
                contextlib.redirect_stdout(output),
            ):
                return mutate.main(), output.getvalue()

    def test_a_survivor_is_named_and_the_score_has_a_limit(self):
        status, output = self.run_with(lambda i: i > 2)
        self.assertEqual(status, 0)
        self.assertIn("survivor: src/plan/count.h: fault 2 ==>", output)
        self.assertIn("score 0.970: 97 of 100 faults are caught", output)
        self.assertEqual(self.run_with(lambda i: i > 3)[0], 1)

    def test_in_a_sample_or_a_choice_nothing_may_survive(self):
        self.assertEqual(self.run_with(lambda i: i > 2, "--only", "fault [2-9]. ")[0], 0)
        self.assertEqual(self.run_with(lambda i: i != 20, "--only", "fault [2-9]. ")[0], 1)
        self.assertEqual(self.run_with(lambda i: False, "--sample", "1")[0], 1)

    def test_a_commit_always_draws_the_same_sample(self):
        mutants = [mutate.Mutant("a.cpp", f"f({i});", "", (), "") for i in range(100)]
        first = mutate.drawn(mutants, 10, "1234")
        self.assertEqual(len(set(first)), 10)
        self.assertEqual(mutate.drawn(mutants[::-1], 10, "1234"), first)
        self.assertNotEqual(mutate.drawn(mutants, 10, "1235"), first)


if __name__ == "__main__":
    unittest.main()
