#!/usr/bin/env python3
"""Tests mha_bench: exit statuses, messages, and that results contain only figures that were
measured.

    bench_test.py MHA_BENCH
"""

import json
import subprocess
import sys
import unittest

MHA_BENCH = sys.argv.pop(1)

SMALL = ["--benchmark_filter=^latency/B:1/n:1/", "--benchmark_min_time=0.001"]
NOISE = ["--max_of_limit=1000", "--max_drift=1000"]  # other tests run at the same time
COUNTERS = {"of_limit", "drift", "GFLOP/s", "GB/s", "peak", "bandwidth", "compute_us", "memory_us"}


def counts_of(figures):
    """Operations and bytes of a call. Each is a quotient of figures from the same time, so that
    noise cancels out."""
    operations = 1e3 * figures["compute_us"] * figures["peak"]
    return operations, operations * figures["GB/s"] / figures["GFLOP/s"]


class MhaBench(unittest.TestCase):
    def bench(self, *flags, **settings):
        return subprocess.run(
            [MHA_BENCH, *flags],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            **settings,
        )

    def test_results_are_json_with_all_counters_and_the_context(self):
        result = self.bench(*SMALL, *NOISE, "--benchmark_format=json", "--benchmark_repetitions=2")
        self.assertEqual(result.returncode, 0, result.stderr)
        content = json.loads(result.stdout)
        self.assertLessEqual(
            {"processor", "instruction_set", "caches", "compiler", "back_end"},
            set(content["context"]),
        )
        names = {entry["run_name"] for entry in content["benchmarks"]}
        self.assertEqual(
            names,
            {f"latency/B:1/n:1/D:{width}/H:{heads}/causal:1" for width, heads in ((8, 2), (64, 4))},
        )
        for entry in content["benchmarks"]:
            self.assertLessEqual(COUNTERS, set(entry))
        for entry in (entry for entry in content["benchmarks"] if entry["run_type"] == "iteration"):
            limit_us = entry["of_limit"] * 1e-3 * counts_of(entry)[0] / entry["GFLOP/s"]
            # One of them for each stage.
            greater, smaller = sorted((entry["compute_us"], entry["memory_us"]), reverse=True)
            self.assertGreaterEqual(limit_us, 0.999 * greater)
            self.assertLessEqual(limit_us, 1.001 * (greater + smaller))

    def figures(self, name, *flags):
        """The figures of the benchmark of this name, from a single call."""
        result = self.bench(
            f"--benchmark_filter=^{name}$",
            *NOISE,
            "--benchmark_format=json",
            "--benchmark_min_time=1e-6",
            *flags,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        (figures,) = json.loads(result.stdout)["benchmarks"]
        self.assertLessEqual(COUNTERS, set(figures))
        return figures

    def test_a_layer_its_attention_and_its_product_alone(self):
        for name, multiplications, numbers in (
            (
                "layer_prefill/B:1/n:49/D:96/H:3/causal:0",
                49 * 4 * 96 * 96 + 49 * 49 * 2 * 96,
                4 * 96 * 96 + 2 * 49 * 96,
            ),
            (
                "attention_prefill/B:1/n:128/D:128/H:4/causal:1/head_dim:32",
                128 * 129 // 2 * 2 * 128,
                4 * 128 * 128,
            ),
            ("projection/M:8/K:256/N:768", 8 * 256 * 768, 256 * 768 + 8 * (256 + 768)),
        ):
            figures = self.figures(name)
            operations, size = counts_of(figures)
            self.assertAlmostEqual(operations / (2 * multiplications), 1, 5, name)
            self.assertAlmostEqual(size / (4 * numbers), 1, 5, name)

    def test_decoding_goes_on_for_many_calls_and_the_cache_does_not_grow(self):
        figures = self.figures("decode_hot/D:768/H:12/Hkv:12/past:1024", "--benchmark_min_time=0.5")
        self.assertGreater(figures["iterations"], 2)  # the cache has room for one position more
        # One token: each weight and each stored number is multiplied and added once.
        numbers = 4 * 768 * 768 + 2 * 768 * 1025
        self.assertAlmostEqual(
            figures["GFLOP/s"] / figures["GB/s"], 2 * numbers / (4 * numbers + 8 * 768), 5
        )

    def test_stored_weights(self):
        shape = "D:4096/H:32/Hkv:32/past:0"
        bytes_read = {}
        for kind in ("f32", "int8", "int4"):
            figures = self.figures(f"storage/weights:{kind}/{shape}", "--max_rotated_mb=1")
            self.assertEqual("times_f32" in figures, kind != "f32")
            bytes_read[kind] = counts_of(figures)[1]
        # Without its scales, int4 would be 8 times smaller.
        self.assertAlmostEqual(bytes_read["f32"] / bytes_read["int8"] / 4, 1, delta=0.01)
        self.assertAlmostEqual(bytes_read["f32"] / bytes_read["int4"] / (32 / 5), 1, delta=0.01)

    def test_flags_that_are_wrong_are_refused(self):
        for flag, sentence in (
            ("--no_such_flag", "--no_such_flag"),
            ("--benchmark_min_time=long", "above 0"),
            ("--max_rotated_mb=all", "above 0"),
            ("--instruction_set=mmx", "use one of auto, scalar"),
            ("--benchmark_filter=^no_such_group/", "no benchmark has such a name"),
        ):
            result = self.bench(flag)
            self.assertEqual((result.returncode, result.stdout), (2, ""), flag)
            self.assertIn(sentence, result.stderr)

    def test_void_and_noisy_runs_have_no_figures_and_statuses_of_their_own(self):
        for of_limit, drift, repetitions, status, sentence in (
            ("1e-9", "1000", 1, 3, "latency/B:1/n:1/D:64/H:4/causal:1: void"),
            # The limit is never the same to a billionth in all of several repetitions.
            ("1000", "1e-9", 5, 4, "too noisy"),
        ):
            limits = [f"--max_of_limit={of_limit}", f"--max_drift={drift}"]
            more = ["--benchmark_format=json", f"--benchmark_repetitions={repetitions}"]
            result = self.bench(*SMALL, *limits, *more)
            self.assertEqual(result.returncode, status, result.stderr)
            self.assertIn(sentence, result.stderr)
            for entry in json.loads(result.stdout)["benchmarks"]:
                self.assertTrue(entry["error_occurred"] and COUNTERS.isdisjoint(entry), entry)


if __name__ == "__main__":
    unittest.main()
