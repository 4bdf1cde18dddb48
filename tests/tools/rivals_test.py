"""Tests bench/rivals without any other library: what it computes and times for mha, how it treats
wrong results and libraries that crash, and what it writes.

Usage: rivals_test.py LIBMHA VENV
VENV is the environment that tools/bindings/python/setup.sh makes.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

root = pathlib.Path(__file__).resolve().parents[2]
libmha, venv = (pathlib.Path(word).absolute() for word in sys.argv[1:3])
if pathlib.Path(sys.prefix).resolve() != venv.resolve():
    if not (venv / "bin" / "python").exists():
        print(f"{venv} is not there; tools/bindings/python/setup.sh makes it")
        sys.exit(77)
    os.execv(venv / "bin" / "python", [str(venv / "bin" / "python"), *sys.argv])
sys.path.insert(0, str(root / "bench" / "rivals"))
sys.dont_write_bytecode = True
import all as all_parts
import decoders
import layers
import libraries
import report
import session

folder = helper = None  # set below, before the tests run
core = [min(os.sched_getaffinity(0))]
small = (2, 5, 64, 2, 2, 1, 0)


class Mha(unittest.TestCase):
    def worker(self, cores):
        log = open(os.devnull, "w")
        self.addCleanup(log.close)
        worker = layers.Worker("mha", cores, helper, log)
        self.addCleanup(worker.end)
        return worker

    def files(self, shape):
        inputs, exact = folder / "inputs", folder / "exact"
        libraries.make(libraries.Shape(*shape), False, inputs, exact)
        return {"shape": shape, "inputs": str(inputs), "exact": str(exact), "copies": 1}

    def median_time(self, worker, shape):
        """Each sample has rates before and after, if this architecture has a loop for them; those
        after are those before the next one."""
        samples = worker.ask("time", form="f32", shape=shape, seconds=0.05)
        for sample, following in zip(samples, samples[1:]):
            self.assertEqual([len(rates) for rates in sample[1:]], [2, 2])
            self.assertEqual(sample[2], following[1])
            self.assertEqual(min(sample[1]) > 0, os.uname().machine == "x86_64")
        return statistics.median(taken for taken, *_ in samples)

    def test_what_is_timed_is_the_layer(self):
        # More threads than cores.
        for threads, shape in [
            (1, small),
            (1, (1, 7, 12, 3, 3, 0, 0)),
            (3, (2, 30, 8, 4, 4, 1, 0)),
        ]:
            self.assertLess(
                self.worker(core * threads).ask("load", form="f32", **self.files(shape)), 1e-6
            )

    def test_attention_alone(self):
        for shape in [
            (2, 7, 12, 3, 3, 1, 0, 1),
            (1, 9, 8, 4, 4, 0, 0, 1),
            (1, 1, 12, 6, 3, 1, 21, 1),
        ]:
            self.assertLess(self.worker(core).ask("load", form="f32", **self.files(shape)), 1e-6)

    def test_a_row_over_a_cache_however_often(self):
        worker, shape = self.worker(core), (1, 1, 12, 6, 3, 1, 21)
        self.assertLess(worker.ask("load", form="f32", **{**self.files(shape), "copies": 3}), 1e-6)
        # The cache has room for one row more.
        self.assertGreater(self.median_time(worker, shape), 0)
        self.assertGreater(worker.ask("limit", size=1 << 20), 0.1)

    def test_errors_of_arithmetics_are_within_their_bounds_and_above_those_of_floats(self):
        worker, files = self.worker(core), self.files(small)
        errors = {
            form: worker.ask("load", form=form, **files)
            for form in layers.forms["arithmetic"]["mha"]
        }
        for form, bound in layers.forms["arithmetic"]["mha"].items():
            self.assertLess(errors[form], bound)
            self.assertGreater(errors[form], 0 if form == "f32" else 1e-3)
        self.assertLess(errors["int16"], errors["int8"])
        self.assertLess(errors["int8"], errors["int4_int8"])

    def test_the_time_grows_with_the_work_and_the_peak_is_above_it(self):
        worker, seconds = self.worker(core), []
        for shape in [(1, 16, 64, 4, 4, 1, 0), (1, 256, 256, 4, 4, 1, 0)]:
            worker.ask("load", form="f32", **self.files(shape))
            seconds.append(self.median_time(worker, shape))
        self.assertGreater(seconds[1], 5 * seconds[0])
        self.assertGreater(
            1.1 * worker.ask("limit", size=0), layers.work_of(shape)[0] / seconds[1] / 1e9
        )

    def test_a_request_that_fails_is_answered_by_its_reason(self):
        with self.assertRaisesRegex(layers.Failed, "KeyError"):
            # It was not loaded.
            self.worker(core).ask("time", form="f32", shape=small, seconds=0.01)

    def test_work_counts_pairs_that_attend_and_bytes_that_are_read(self):
        self.assertEqual(
            layers.work_of((1, 2, 8, 2, 2, 1, 0))[0], 2 * 4 * 2 * 64 * 2 / 2 + 4 * 3 * 8
        )
        self.assertEqual(layers.work_of((1, 1, 8, 4, 2, 1, 9))[1], 4 * (2 * 64 + 2 * 32 + 2 * 40))
        self.assertEqual(layers.work_of((1, 1, 8, 4, 2, 1, 9, 1)), (4 * 9 * 8, 4 * 2 * 9 * 4))


class StandIn:
    """A library with given errors and times. The answer "dies" stands for a crash."""

    errors, answers = {}, {}

    def __init__(self, library, *_):
        self.library = library

    def ask(self, request, form=None, **_):
        if request == "time" and self.answers.get((self.library, form)) == "dies":
            raise layers.Failed("its process ended by SIGSEGV")
        return {
            "version": "1",
            "load": self.errors.get((self.library, form), 1e-7),
            "limit": 100.0,
            "time": [[0.25, [1, 1], [1, 1]], [0.5, [1, 0.66], [1, 0.66]], [0.25, [1, 1], [1, 1]]],
        }[request]

    def end(self):
        pass


class Sessions(unittest.TestCase):
    def run_with(self, kind, errors=None, answers=None, shape="1,16,32,2"):
        path = folder / "results.json"
        path.unlink(missing_ok=True)
        with (
            mock.patch.multiple(StandIn, errors=errors or {}, answers=answers or {}),
            mock.patch.object(layers, "Worker", StandIn),
            mock.patch.object(layers, "build_helper", lambda *_: helper),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            code = layers.main(
                [
                    kind,
                    "--shapes",
                    shape,
                    "--rounds",
                    "2",
                    "--mha",
                    str(libmha),
                    "--json",
                    str(path),
                ]
            )
        (result,) = json.loads(path.read_text())
        return code, result

    def test_each_form_has_a_bound_of_its_own(self):
        code, result = self.run_with("arithmetic")
        self.assertEqual((code, result["reasons"]), (0, {}))
        self.assertEqual(result["seconds"]["mha int8"], {"call": [0.25] * 2})
        self.assertEqual(
            {state: of_state["mha int8"]["call"] for state, of_state in result["states"].items()},
            {"quiet": [0.25] * 2, "busy": [0.5] * 2},
        )
        for library, form, error in [
            ("PyTorch", "scaled_dot_product_attention", 2e-5),
            ("mha", "f32", 1e-3),
            ("mha", "int8", 0.1),
            ("PyTorch", "bf16", 0.1),
            ("OpenVINO", "int8", 0.45),
            ("mha", "int4_int8", math.nan),
        ]:
            code, result = self.run_with("arithmetic", {(library, form): error})
            self.assertEqual((code, list(result["reasons"])), (1, [f"{library} {form}"]))
            self.assertRegex(
                result["reasons"][f"{library} {form}"],
                "WRONG: its result differs from that in double precision by (.*), more than",
            )
            self.assertEqual(result["seconds"].get(f"{library} {form}", {}), {})
        self.assertEqual(
            self.run_with(
                "decode", {("ONNX Runtime", "GroupQueryAttention"): 1e-4}, shape="32,4,2,100"
            )[0],
            1,
        )

    def test_one_that_dies_leaves_the_others(self):
        code, result = self.run_with(
            "layers", answers={("OpenVINO", "scaled_dot_product_attention"): "dies"}
        )
        self.assertEqual(
            (code, result["reasons"]),
            (0, {"OpenVINO scaled_dot_product_attention": "its process ended by SIGSEGV"}),
        )
        self.assertEqual(len(result["seconds"]["PyTorch MultiheadAttention"]["call"]), 2)
        self.assertIn(
            "- OpenVINO scaled_dot_product_attention was not measured: its process ended by"
            " SIGSEGV.",
            report.layer_tables([result]),
        )

    def test_wrong_usage_is_code_2_and_a_sentence(self):
        for arguments, sentence in [
            (["layers", "--shapes", "1,128,256"], "write BATCH,N,WIDTH,HEADS"),
            (["layers", "--shapes", "1,0,256,4"], "is not a shape"),
            (["arithmetic", "--shapes", "1,8,8,2,uncausal"], "is not a shape of arithmetic"),
            (["decode", "--shapes", "768,12,5,16"], "kv heads the heads"),
            (["layers", "--rounds", "0"], "1 or more"),
            (["layers", "--mha", "/nowhere/libmha.so"], "there is no /nowhere/libmha.so"),
        ]:
            said = io.StringIO()
            with contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as ended:
                layers.parse(
                    ["--mha", str(libmha), *arguments] if "--mha" not in arguments else arguments
                )
            self.assertEqual(ended.exception.code, 2)
            self.assertIn(sentence, " ".join(said.getvalue().split()))

    def test_all_take_turns_with_another_one_first(self):
        order = []
        seconds, reasons = session.take_turns(
            {name: lambda name=name: order.append(name) or {"call": len(order)} for name in "abc"},
            2,
            warm=1,
        )
        self.assertEqual(("".join(order), reasons), ("cababcbca", {}))
        self.assertEqual(seconds["a"], {"call": [4, 9]})

    def test_logits_of_decoders_have_bounds(self):
        self.assertEqual(
            decoders.wrong({form: 0.9 * bound for form, (_, _, bound) in decoders.forms.items()}),
            [],
        )
        self.assertEqual(
            decoders.wrong(
                {"mha f32": 0, "mha f16": 0.5, "llama.cpp F32": 0.01, "llama.cpp Q4_0": math.nan}
            ),
            ["mha f16", "llama.cpp F32", "llama.cpp Q4_0"],
        )


def result_of(seconds, kind="layers", shape=(1, 128, 256, 4, 4, 1, 0), threads=1, **more):
    about = {
        "commit": "abc1234",
        "date": "2000-01-01",
        "machine": "a machine",
        "rounds": 3,
        "versions": {},
    }
    return {
        "key": [kind, list(shape), threads],
        "about": about,
        "errors": {},
        "reasons": {},
        **more,
        "seconds": {
            name: {"call": times} for name, times in {"limit": [100, 200, 50], **seconds}.items()
        },
    }


class Reports(unittest.TestCase):
    def test_a_row_has_times_shares_and_the_gain_over_the_best_round_by_round(self):
        work = layers.work_of((1, 128, 256, 4, 4, 1, 0))[0] / 1e9
        result = result_of(
            {
                "mha f32": [work / 80, work / 160, work / 40],
                "ONNX Runtime Attention": [work / 40, work / 64, work / 20],
                "ONNX Runtime MultiHeadAttention": [9, 9, 9],
            }
        )
        text = "\n".join(report.layer_tables([result]))
        self.assertIn("mha at commit abc1234", text)
        self.assertRegex(
            text, r"\| 1, 128, 256, 4 \| [\d.]+ \| 80% \|  \| [\d.]+ \|  \| 2.00 \| ONNX Runtime \|"
        )

    def test_rounds_in_different_states_are_apart(self):
        shares = (1, 0.6), [1] * 12, [0.6]
        seconds = {
            name: {
                "samples": [
                    [[time, [1, share], [1, share]] for share in some]
                    for time, some in zip(times, shares)
                ]
            }
            for name, times in (("mha f32", (1, 2, 4)), ("PyTorch MultiheadAttention", (3, 6, 4)))
        }
        # Less than a tenth of the round.
        seconds["PyTorch MultiheadAttention"]["samples"][1][0][1:] = [[1, 0.6]] * 2
        seconds.update(
            {"limit": {"call": [100, 200, 50]}, "OpenVINO scaled_dot_product_attention": {}}
        )
        states = layers.by_state(seconds)
        self.assertEqual(seconds["mha f32"], {"call": [1, 2, 4]})
        self.assertEqual(
            {
                state: {name: what["call"] for name, what in some.items()}
                for state, some in states.items()
            },
            {
                "quiet": {
                    "mha f32": [1, 2],
                    "PyTorch MultiheadAttention": [3, 6],
                    "limit": [100, 200],
                },
                "busy": {
                    "mha f32": [1, 4],
                    "PyTorch MultiheadAttention": [3, 4],
                    "limit": [100, 50],
                },
            },
        )
        result = {**result_of({}), "seconds": seconds, "states": states}
        text = "\n".join(report.layer_tables([result]))
        self.assertRegex(
            text,
            r"One thread, core quiet, ms .* rounds \|\n.*\n\| 1, 128, 256, 4 \| 1500 .* \| 3.00 \|"
            r" PyTorch \| 2 \|",
        )
        self.assertRegex(
            text,
            r"One thread, core busy, ms .* rounds \|\n.*\n\| 1, 128, 256, 4 \| 2500 .* \| 2.00 \|"
            r" PyTorch \| 2 \|",
        )
        self.assertNotIn("no round was", text)
        self.assertRegex(
            " ".join(report.layers_summary([result])),
            r"mha is 3.00 to 3.00 .*; with the core busy 2.00 to",
        )
        self.assertTrue(
            report.source_in_short(report.chosen([result])).endswith("a machine, the core quiet.")
        )
        for state, table, sentence in (
            ("quiet", "quiet", "busy"),
            ("mixed", "in any state", "quiet or busy"),
        ):
            text = "\n".join(report.layer_tables([{**result, "states": {state: states["quiet"]}}]))
            self.assertIn(f"One thread, core {table}, ms", text)
            self.assertIn(f"One thread: no round was {sentence} throughout.", text)

    def test_arithmetics_have_time_and_both_errors(self):
        errors = {
            name: {"normal": 5e-7 if "f32" in name else 0.0184, "outliers": 0.035}
            for name in ("mha f32", "mha int8")
        }
        text = "\n".join(
            report.arithmetic_tables(
                [
                    result_of(
                        {"mha f32": [2, 1, 4], "mha int8": [1, 0.75, 3]},
                        "arithmetic",
                        errors=errors,
                    )
                ]
            )
        )
        self.assertIn("| mha int8 | 0.75 [1.8e-2, 3.5e-2] |", text)  # shares of 0.5, 0.75 and 0.75

    def test_what_pages_say_in_short_is_of_the_same_results(self):
        errors = {
            name: {"normal": 0.01, "outliers": 0.02}
            for name in ("mha int16", "mha int8", "PyTorch int8")
        }
        layer = [
            result_of(
                {"mha f32": [2], "OpenVINO scaled_dot_product_attention": [each]}, threads=threads
            )
            for each in (1, 4)
            for threads in (1, 2)
        ]
        self.assertIn(
            "mha is 0.50 to 2.00 times as fast on one thread (faster at 1 of 2 shapes) and 0.50 to",
            " ".join(report.layers_summary(layer)),
        )
        few = [
            result_of(
                {
                    "mha f32": [4],
                    "mha int16": [2],
                    "mha int8": [1],
                    "mha int4_int16": [2],
                    "mha int4_int8": [2],
                    "PyTorch int8": [3],
                },
                "arithmetic",
                errors=errors,
            )
        ]
        self.assertIn(
            "int8 in the other libraries takes 0.75 to 0.75 of that time (1.0% to 2.0%).",
            " ".join(report.arithmetic_summary(few)),
        )
        self.assertIn("| int8 | 2.0 to 2.0 | 4.0 to 4.0 |", report.storage_summary(few))
        rows = [
            result_of(
                {"mha f32": [1], "PyTorch scaled_dot_product_attention": [2 * threads]},
                "decode",
                (1, 1, 64, 4, 2, 1, 9),
                threads,
            )
            for threads in (1, 2)
        ]
        self.assertRegex(
            report.decode_summary(rows)[2],
            r"\| 64, 4, 2, 9 \| 1000 ms, \d+% \| \d+% \|  \| 2.00x \| \d+%, 4.00x \|",
        )
        models = result_of(
            {}, "models", ["llama, prompt of 512"], errors={way: 0.25 for way in report.ways}
        )
        models["key"][1], models["seconds"] = (
            "llama, prompt of 512",
            {
                way: {
                    "call": [2],
                    "token": [0.5],
                    "attention of call": [1],
                    "attention of token": [0.05],
                }
                for way in report.ways
            },
        )
        summary = " ".join(report.models_summary([models]))
        self.assertIn("Attention takes 10% to 50% of the time", summary)
        self.assertIn(
            "On one thread, llama generates 2 tokens per second with sdpa, 2 with PyTorch int8 (rms"
            " error of the logits 25.0%), 2 with mha int16 (25.0%)",
            summary,
        )
        self.assertIn(
            "| llama, prompt of 512 | 1 | 2 | 2 | 2 | 2 | 2 |", report.model_tables([models])
        )
        onnx = result_of({"unchanged": [3], "rewritten": [2]}, "onnx", threads=2)
        onnx["key"][1] = "a model"
        self.assertIn("| a model | 3000 | 2000 | 1.50 |", report.onnx_tables([onnx]))

    def test_all_runs_the_parts_that_are_named_and_says_which_failed(self):
        for arguments, code, sentence in [
            (["--list"], 0, "layers-1-small"),
            (["--only", "nothing"], 2, "invalid choice: 'nothing'"),
            (["--rounds", "0"], 2, "--rounds must be 1 or more"),
        ]:
            done = subprocess.run(
                [sys.executable, root / "bench" / "rivals" / "all.py", *arguments],
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, code)
            self.assertIn(sentence, done.stdout + done.stderr)
        ran = []
        with (
            mock.patch.object(all_parts, "prepared", lambda: True),
            mock.patch.object(
                all_parts.subprocess,
                "run",
                lambda command: (
                    ran.append(command[1:]) or mock.Mock(returncode="decode" in command)
                ),
            ),
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            self.assertEqual(
                all_parts.main(
                    ["--only", "report", "decode-1", "onnx-2", "--rounds", "2", "--busy", "1"]
                ),
                1,
            )
        self.assertEqual(
            [[command[0].name, *command[1:]] for command in ran],
            [
                ["layers.py", "decode", "--threads", "1", "--rounds", "2"],
                ["onnx_models.py", "--threads", "2", "--rounds", "2", "--busy", "1.0"],
                ["report.py"],
            ],
        )
        self.assertIn("failed: decode-1;", said.getvalue())

    def test_results_replace_those_of_the_same_shape(self):
        path = folder / "kept.json"
        session.keep(path, [result_of({"mha f32": [1]}), result_of({"mha f32": [2]}, threads=2)])
        kept = session.keep(path, [result_of({"mha f32": [3]})])
        self.assertEqual([result["seconds"]["mha f32"]["call"] for result in kept], [[3], [2]])
        self.assertEqual(session.load(path), kept)

    def test_a_block_is_written_between_its_marks(self):
        page = folder / "page.md"
        page.write_text("before\n<!-- figures: a -->\nold\n<!-- end of figures -->\nafter\n")
        session.write_block("a", ["new"], [page])
        self.assertEqual(
            page.read_text(),
            "before\n<!-- figures: a -->\n\nnew\n\n<!-- end of figures -->\nafter\n",
        )
        with self.assertRaisesRegex(session.Failed, "no page has the mark"):
            session.write_block("b", ["new"], [page])

    def test_each_block_has_one_page(self):
        for name in report.blocks:
            self.assertEqual(
                sum(session.begin.format(name) in page.read_text() for page in session.pages()),
                1,
                name,
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        helper = layers.build_helper(libmha, folder)
        unittest.main(argv=sys.argv[:1])
