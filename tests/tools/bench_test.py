#!/usr/bin/env python3
"""Tests mha_bench: exit statuses, messages, and that results contain only figures that were
measured.

    bench_test.py MHA_BENCH
"""

import json
import os
import resource
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

    def assert_refused(self, flags, sentence):
        result = self.bench(*flags)
        self.assertEqual(result.returncode, 2, f"{flags}: {result.stderr}")
        self.assertIn(sentence, result.stderr)
        self.assertEqual(result.stdout, "", f"{flags} printed results")

    def assert_no_figures(self, result):
        for entry in json.loads(result.stdout)["benchmarks"]:
            self.assertTrue(entry["error_occurred"])
            self.assertTrue(COUNTERS.isdisjoint(entry), entry)

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

    def test_an_instruction_set_is_the_one_that_is_used(self):
        result = self.bench(*SMALL, *NOISE, "--benchmark_format=json", "--instruction_set=scalar")
        self.assertEqual(result.returncode, 0, result.stderr)
        content = json.loads(result.stdout)
        self.assertEqual(content["context"]["instruction_set"], "scalar")
        names = self.bench("--instruction_set=scalar", "--benchmark_list_tests").stdout
        self.assertIn("instruction_set/scalar/", names)
        self.assertNotIn("instruction_set/avx2/", names)

    def test_all_groups_are_there(self):
        names = self.bench("--benchmark_list_tests").stdout.split()
        groups = {name.split("/")[0] for name in names}
        self.assertLessEqual(
            set(
                """
                layer_prefill attention_prefill projection latency threads instruction_set
                decode decode_hot decode_batch decode_tokens decode_attention plain_arrays
                storage arithmetic latent latent_chosen latent_prompt chosen_blocks
                """.split()
            ),
            groups,
        )
        self.assertEqual(len(names), len(set(names)))

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

    def test_decoding_takes_turns_through_no_more_memory_than_it_was_given(self):
        # There always is one copy.
        one = self.figures("decode_attention/H:8/Hkv:8/head_dim:64/past:4096", "--max_rotated_mb=1")
        self.assertRegex(one["label"], "capped: takes turns through 16 MB, not [0-9]+ MB")
        two = self.figures(
            "decode_attention/H:8/Hkv:8/head_dim:64/past:4096", "--max_rotated_mb=40"
        )
        self.assertRegex(two["label"], "capped: takes turns through 33 MB, not [0-9]+ MB")
        self.assertNotIn(
            "label", self.figures("decode_hot/D:768/H:12/Hkv:12/past:1024", "--max_rotated_mb=1")
        )

    def test_several_sequences_and_several_tokens(self):
        shape = "D:2048/H:32/Hkv:8/past:4096"
        two, eight, batch = (
            counts_of(self.figures(f"{name}/{shape}", "--max_rotated_mb=1"))
            for name in ("decode_tokens/n:2", "decode_tokens/n:8", "decode_batch/B:2")
        )
        self.assertAlmostEqual(eight[0] / two[0], 4, 2)
        self.assertAlmostEqual(eight[1] / two[1], 1, 1)
        self.assertGreater(batch[1], 1.2 * two[1])  # a second cache, which is shorter

    def test_what_is_measured_in_turns_tells_how_many_times_as_fast_it_is(self):
        for name, counter in (
            ("storage/cache:int8/H:16/Hkv:16/head_dim:128/past:4096", "times_f32"),
            ("decode_attention/H:32/Hkv:8/head_dim:64/past:4096", "times_ungrouped"),
            ("plain_arrays/f16/n:2/H:9/Hkv:3/head_dim:64/past:4000/head_first/T:1", "times_cache"),
        ):
            self.assertGreater(self.figures(name, "--max_rotated_mb=1")[counter], 0)
        self.assertGreater(
            self.figures("arithmetic/int16/B:1/n:16/D:768/H:12/causal:1")["times_f32"], 0
        )
        # Integers may pass the limit of floats: that voids nothing.
        self.assertGreater(
            self.figures("arithmetic/int16/B:1/n:16/D:768/H:12/causal:1", "--max_of_limit=1e-9")[
                "times_f32"
            ],
            0,
        )
        self.assertNotIn(
            "times_f32",
            self.figures(
                "storage/cache:f32/H:16/Hkv:16/head_dim:128/past:4096", "--max_rotated_mb=1"
            ),
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

    def test_help(self):
        result = self.bench("--help")
        self.assertEqual(result.returncode, 0)
        for text in (
            "of_limit",
            "--instruction_set",
            "Exit status",
            "Examples",
            "--benchmark_filter",
        ):
            self.assertIn(text, result.stdout)

    def test_wrong_flags_are_refused(self):
        self.assert_refused(["--no_such_flag"], "--no_such_flag")
        self.assert_refused(["layer_prefill"], "layer_prefill")
        self.assert_refused(["--benchmark_format=xml"], "use console, json or csv")
        self.assert_refused(["--benchmark_time_unit=h"], "use ns, us, ms or s")
        self.assert_refused(["--benchmark_repetitions=0"], "above 0")
        self.assert_refused(["--benchmark_min_time=long"], "above 0")
        self.assert_refused(["--max_of_limit=-1"], "above 0")
        self.assert_refused(["--max_drift="], "above 0")
        self.assert_refused(["--max_rotated_mb=all"], "above 0")
        self.assert_refused(
            ["--benchmark_out=/no/such/folder/result.json"], "/no/such/folder/result.json"
        )

    def test_an_instruction_set_that_is_not_there_is_refused(self):
        self.assert_refused(["--instruction_set=mmx"], "use one of auto, scalar")
        other = "neon" if os.uname().machine == "x86_64" else "avx2"
        self.assert_refused([f"--instruction_set={other}"], "use one of auto, scalar")

    def test_a_filter_that_matches_nothing_is_refused(self):
        self.assert_refused(["--benchmark_filter=^no_such_group/"], "no benchmark has such a name")
        self.assert_refused(["--benchmark_filter=("], "no benchmark has such a name")

    def test_void_runs_have_no_figures_and_a_status_of_their_own(self):
        for repetitions in (1, 3):
            result = self.bench(
                *SMALL,
                "--max_of_limit=1e-9",
                "--max_drift=1000",
                "--benchmark_format=json",
                f"--benchmark_repetitions={repetitions}",
            )
            self.assertEqual(result.returncode, 3, result.stderr)
            self.assertIn("latency/B:1/n:1/D:64/H:4/causal:1: void", result.stderr)
            self.assert_no_figures(result)

    def test_what_is_too_noisy_is_not_measured(self):
        # The limit is never the same to a billionth in all of several repetitions.
        result = self.bench(
            *SMALL,
            "--max_of_limit=1000",
            "--max_drift=1e-9",
            "--benchmark_format=json",
            "--benchmark_repetitions=5",
        )
        self.assertEqual(result.returncode, 4, result.stderr)
        self.assertIn("too noisy", result.stderr)

    def test_what_does_not_fit_in_memory_is_not_measured(self):
        def little_memory():
            resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))

        result = self.bench(
            "--benchmark_filter=^layer_prefill/B:1/n:512/D:4096/",
            "--benchmark_format=json",
            preexec_fn=little_memory,
        )
        self.assertEqual(result.returncode, 4, result.stderr)
        self.assertIn("not measured", result.stderr)
        self.assert_no_figures(result)

    def test_results_that_cannot_be_written_are_no_success(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            result = subprocess.run(
                [MHA_BENCH, *SMALL, *NOISE],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=300,
                check=False,
            )
        self.assertEqual(result.returncode, 4, result.stderr)
        self.assertIn("could not be written", result.stderr)

    def test_units_of_a_call(self):
        def units(*words):
            return subprocess.run(
                [f"{MHA_BENCH}_units", *words],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )

        cell = r" (0\.\d\d|1\.00) \(\d+ [\d.]+%, \d+ [\d.]+%, \d+ [\d.]+%\) \|"
        self.assertRegex(
            units("layer/B:1/n:49/").stdout.splitlines()[-1],
            rf"^\| layer/B:1/n:49/\S+ \|({cell}){{3}}$",
        )
        self.assertRegex(
            units("--check", "layer/B:1/n:49/").stdout.splitlines()[-1],
            r"^\| \S+ \| [12]\.\d\d \| \d\.\d\d \| \d\.\d\d \|$",
        )
        self.assertEqual(
            [units(word).returncode for word in ("--help", "--no", "nobody")], [0, 2, 2]
        )


if __name__ == "__main__":
    unittest.main()
