#!/usr/bin/env python3
"""tools/plot_bench.py: what it draws of small results, and its sentences.

    plot_bench_test.py PLOT_BENCH
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

PLOT_BENCH = sys.argv.pop(1)
SVG = "{http://www.w3.org/2000/svg}"


def entry(name, repetition=0, **figures):
    return {"name": name, "run_name": name, "run_type": "iteration", "repetition_index": repetition, "cpu_time": 10.0, "real_time": 20.0,
            "time_unit": "us", **figures}


def void(name):
    return {"name": name, "run_name": name, "run_type": "iteration", "error_occurred": True, "error_message": "void: 1.2 of the limit"}


class PlotBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def result(self, *benchmarks, name="result.json", **context):
        path = self.folder / name
        context = {"instruction_set": "avx2", "processor": "a <fast> machine", "date": "2000-01-01T10:00:00", **context}
        path.write_text(json.dumps({"context": context, "benchmarks": benchmarks}))
        return path

    def run_it(self, *arguments):
        command = [sys.executable, PLOT_BENCH, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def draw(self, *arguments):
        result = self.run_it(*arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertNotIn("href", result.stdout)
        return ElementTree.fromstring(result.stdout)

    def bars(self, tree):
        """{what a bar says when pointed at: its width}"""
        return {rect.find(f"{SVG}title").text: float(rect.get("width")) for rect in tree.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None}

    def texts(self, tree):
        return [text.text for text in tree.iter(f"{SVG}text")]

    def assert_refused(self, sentence, *arguments):
        before = sorted(self.folder.iterdir())
        result = self.run_it(*arguments)
        self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
        self.assertIn(sentence, result.stderr)
        self.assertEqual(sorted(self.folder.iterdir()), before)
        return result.stderr

    # ---- share

    def test_share_has_a_bar_for_each_benchmark_as_long_as_its_share(self):
        tree = self.draw("share", self.result(
            entry("layer_prefill/B:1/n:128/D:256/H:4/causal:1", of_limit=0.8), entry("layer_prefill/B:1/n:77/D:768/H:12/causal:0", of_limit=0.4),
            entry("decode/D:768/H:12/Hkv:12/past:1024", of_limit=0.6)))
        bars = self.bars(tree)
        self.assertEqual(list(bars), ["layer_prefill/B:1/n:128/D:256/H:4/causal:1: 80.0% of the limit",
                                      "layer_prefill/B:1/n:77/D:768/H:12/causal:0: 40.0% of the limit",
                                      "decode/D:768/H:12/Hkv:12/past:1024: 60.0% of the limit"])
        longest, shortest, third = bars.values()
        self.assertAlmostEqual(shortest, longest / 2, delta=0.2)
        self.assertAlmostEqual(third, longest * 0.75, delta=0.2)
        scale = {text.text: float(text.get("x")) for text in tree.iter(f"{SVG}text") if text.text.endswith("%") and text.get("class") == "small"}
        self.assertAlmostEqual(longest, 0.8 * (scale["100%"] - scale["0%"]), delta=0.3)
        texts = self.texts(tree)
        for text in ("layer_prefill", "B 1, n 128, D 256, H 4", "B 1, n 77, D 768, H 12, not causal", "D 768, H 12, Hkv 12, past 1024", "80%", "60%"):
            self.assertIn(text, texts)
        self.assertTrue(any("a <fast> machine, avx2, 2000-01-01." in text for text in texts), texts)

    def test_of_repetitions_the_median_counts_and_aggregates_are_taken_as_they_are(self):
        name = "layer_prefill/B:1/n:128/D:256/H:4/causal:1"
        repeated = [entry(name, i, of_limit=share) for i, share in enumerate((0.1, 0.7, 0.9))]
        self.assertEqual(list(self.bars(self.draw("share", self.result(*repeated)))), [f"{name}: 70.0% of the limit"])
        median = entry(name, of_limit=0.5, aggregate_name="median") | {"run_type": "aggregate", "name": f"{name}_median"}
        self.assertEqual(list(self.bars(self.draw("share", self.result(median)))), [f"{name}: 50.0% of the limit"])

    def test_what_was_void_is_named_and_has_no_bar(self):
        tree = self.draw("share", self.result(entry("a/n:1", of_limit=0.5), void("a/n:2"), entry("a/n:3")))
        self.assertEqual(len(self.bars(tree)), 1)
        self.assertIn("void", self.texts(tree))
        self.assertIn("not measured", self.texts(tree))

    def test_a_filter_chooses_benchmarks(self):
        path = self.result(entry("a/n:1", of_limit=0.5), entry("ab/n:1", of_limit=0.5))
        self.assertEqual(list(self.bars(self.draw("share", path, "--filter", "^a/"))), ["a/n:1: 50.0% of the limit"])
        self.assert_refused("has no benchmark whose name fits '^b'; it has a/n:1, ab/n:1", "share", path, "--filter", "^b")
        self.assert_refused("no regular expression", "share", path, "--filter", "(")

    def test_a_busy_machine_is_told(self):
        benchmark = entry("a/n:1", of_limit=0.5)
        self.assertNotIn("Other programs", " ".join(self.texts(self.draw("share", self.result(benchmark, load_avg=[0.3, 1, 1])))))
        self.assertIn("load average 3.5 before", " ".join(self.texts(self.draw("share", self.result(benchmark, load_avg=[3.5, 1, 1])))))

    # ---- lengths

    def points(self, tree):
        return [dot.find(f"{SVG}title").text for dot in tree.iter(f"{SVG}circle")]

    def test_lengths_has_a_curve_for_each_kind_with_its_points_in_order(self):
        names = ["attention_prefill/B:1/n:4096/D:128/H:2/causal:1/head_dim:64", "attention_prefill/B:1/n:128/D:256/H:4/causal:1/head_dim:64",
                 "attention_prefill/B:1/n:128/D:512/H:4/causal:1/head_dim:128", "attention_prefill/B:1/n:256/D:512/H:4/causal:1/head_dim:128",
                 "layer_prefill/B:1/n:128/D:768/H:12/causal:1"]  # of one length alone
        tree = self.draw("lengths", self.result(*(entry(name, **{"GFLOP/s": 10.0 * (i + 1)}) for i, name in enumerate(names))))
        self.assertEqual(self.points(tree), [f"{names[1]}: 20 GFLOP/s", f"{names[0]}: 10 GFLOP/s", f"{names[2]}: 30 GFLOP/s",
                                             f"{names[3]}: 40 GFLOP/s"])
        texts = self.texts(tree)
        self.assertIn("attention_prefill, B 1, head_dim 64", texts)
        self.assertIn("attention_prefill, B 1, head_dim 128", texts)
        self.assertFalse(any("layer_prefill" in text for text in texts))
        for length in ("128", "256", "4096"):
            self.assertIn(length, texts)
        heights = [float(dot.get("cy")) for dot in tree.iter(f"{SVG}circle")]
        self.assertAlmostEqual(heights[1] - heights[0], heights[2] - heights[3], delta=0.2, msg="10 and 20 are as far apart as 30 and 40")

    def test_lengths_draws_another_figure_on_demand(self):
        names = [f"decode/D:768/H:12/Hkv:12/past:{past}" for past in (1024, 4096)]
        path = self.result(*(entry(name, **{"GB/s": 5.0, "of_limit": 0.25}) for name in names))
        self.assertEqual(self.points(self.draw("lengths", path, "--figure", "GB/s")), [f"{name}: 5 GB/s" for name in names])
        self.assertIn("Share of the limit against the length", self.texts(self.draw("lengths", path, "--figure", "of_limit")))
        self.assert_refused("no benchmark has GFLOP/s", "lengths", path)

    def test_lengths_needs_several(self):
        path = self.result(entry("a/n:1", **{"GFLOP/s": 1.0}), entry("b/n:2", **{"GFLOP/s": 1.0}))
        self.assert_refused("no benchmark was measured at several lengths", "lengths", path)

    # ---- compare

    def test_compare_tells_how_many_times_as_fast_the_second_result_is(self):
        before = self.result(entry("a/n:1", cpu_time=10.0), entry("a/n:2", cpu_time=10.0), entry("a/n:3"), void("a/n:4"),
                             entry("threads/a/n:1/T:2/real_time", real_time=30.0), name="before.json")
        after = self.result(entry("a/n:1", cpu_time=5.0), entry("a/n:2", cpu_time=0.02, time_unit="ms"), entry("a/n:4"), entry("a/n:5"),
                            entry("threads/a/n:1/T:2/real_time", real_time=15.0, cpu_time=1000.0), name="after.json")
        tree = self.draw("compare", before, after)
        self.assertEqual(list(self.bars(tree)), ["a/n:1: 2.000 times as fast", "a/n:2: 0.500 times as fast",
                                                 "threads/a/n:1/T:2: 2.000 times as fast"])
        faster, slower, threads = self.bars(tree).values()
        self.assertAlmostEqual(faster, slower, delta=0.2, msg="twice and half are as far from 1")
        self.assertAlmostEqual(faster, threads, delta=0.2)
        starts = [float(rect.get("x")) for rect in tree.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
        self.assertAlmostEqual(starts[0], starts[1] + slower, delta=0.2, msg="both begin at 1x")
        texts = " ".join(self.texts(tree))
        self.assertIn("Geometric mean of 3: 1.260x", texts)
        self.assertIn("Not measured in both: a/n:3, a/n:4, a/n:5.", texts)

    def test_compare_takes_two_results_that_have_something_in_common(self):
        before, after = self.result(entry("a/n:1"), name="before.json"), self.result(entry("b/n:1"), name="after.json")
        self.assert_refused("have no benchmark in common", "compare", before, after)
        self.assert_refused("compare takes two results, not 1", "compare", before)
        self.assert_refused("share takes one result, not 2", "share", before, after)

    # ---- files

    def test_the_output_is_written_whole_or_not_at_all(self):
        path, output = self.result(entry("a/n:1", of_limit=0.5)), self.folder / "chart.svg"
        result = self.run_it("share", path, "--output", output)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
        self.assertEqual(output.read_text(), self.run_it("share", path).stdout)
        self.assertEqual(sorted(file.name for file in self.folder.iterdir()), ["chart.svg", "result.json"])
        output.write_text("before")
        path.write_text("{")
        self.assert_refused("no result of mha_bench", "share", path, "--output", output)
        self.assertEqual(output.read_text(), "before")
        path = self.result(entry("a/n:1", of_limit=0.5))
        self.assert_refused("cannot be written", "share", path, "--output", self.folder / "nowhere" / "chart.svg")
        self.assert_refused("cannot be written", "share", path, "--output", self.folder)

    def test_files_that_are_no_results_are_a_sentence(self):
        path = self.folder / "result.json"
        contents = ["", "{", "[]", "null", "{}", '{"context": {}, "benchmarks": []}', '{"context": {"instruction_set": "avx2"}}',
                    '{"context": {"instruction_set": "avx2"}, "benchmarks": [{"run_type": "iteration"}]}',
                    '{"context": {"instruction_set": "avx2"}, "benchmarks": 3}', "\x00\xff"]
        for content in contents:
            path.write_text(content, encoding="latin-1")
            sentence = self.assert_refused("no result of mha_bench; make one by tools/bench.sh --benchmark_format=json", "share", path)
            self.assertEqual(sentence.count("\n"), 1, sentence)
        path.write_text('{"context": {"instruction_set": "avx2"}, "benchmarks": []}')
        self.assert_refused("has no benchmark", "share", path)
        path.write_text('{"context": {"instruction_set": "avx2"}, "benchmarks": [{"name": "a/n:1", "run_type": "iteration", "of_limit": "x"}]}')
        self.assert_refused("no benchmark has of_limit", "share", path)
        self.assert_refused("cannot be read: No such file or directory", "share", self.folder / "nothing.json")
        self.assert_refused("no benchmark has of_limit; void", "share", self.result(void("a/n:1")))

    def test_help_has_examples_and_exit_statuses(self):
        result = self.run_it("--help")
        self.assertEqual(result.returncode, 0)
        for words in ("Examples:", "Exit status: 0", "share", "lengths", "compare"):
            self.assertIn(words, result.stdout)
        self.assert_refused("invalid choice: 'pie'", "pie", "x.json")


if __name__ == "__main__":
    unittest.main()
