"""tools/compare.py without any other library: what it computes and times for mha, how it treats libraries that agree, differ or die, what
it writes, and its messages.

Usage: compare_test.py LIBMHA [TEST...]      LIBMHA is the shared library
"""

import array
import contextlib
import csv
import ctypes
import importlib.util
import io
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock
from xml.etree import ElementTree

script = pathlib.Path(__file__).resolve().parent.parent.parent / "tools" / "compare.py"
spec = importlib.util.spec_from_file_location("compare", script)
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)
report, arithmetic = compare.report, compare.arithmetic

libmha = helper = folder = None  # set below, before the tests run


def row(label, times, library="other", form="form", reason=None):
    return {"library": library, "form": form, "label": label, "seconds": times, "difference": 1e-6 if times else None, "reason": reason}


def results_of(*cells):
    return {"about": {"date": "2000-01-01", "machine": "a <fast> machine", "commit": "", "rounds": 3, "load": 0.1,
                      "command": "tools/compare.py"},
            "libraries": {"mha": {"name": "mha", "version": "0.1.0", "detail": "scalar"}}, "suites": [{"threads": 1, "cells": list(cells)}]}


def cell_of(*rows, shape=(1, 128, 256, 4, 1), reference=None):
    """1e9 operations at a peak of 100 GFLOP/s: 10 ms are 100%."""
    return {"shape": list(shape), "operations": 1e9, "peaks": [100.0] * 3, "reference": reference, "rows": list(rows)}


def mha_row(times):
    return row("mha", times, "mha", "layer")


class Reports(unittest.TestCase):
    def test_a_cell_is_the_median_time_and_the_share_of_the_peak(self):
        text = report.markdown(results_of(cell_of(mha_row([0.02, 0.0125, 0.011]), row("OpenVINO", [0.025, 0.025, 0.02]))))
        self.assertIn("| (1, 128, 256, 4) | 100 | 12.5 ms, 80% | 25 ms, 40% | 1.82x (OpenVINO) |", text)
        self.assertIn("mha is the fastest in 1 of 1 cases", text)

    def test_text_is_in_lines_of_100_columns_and_tables_are_left_alone(self):
        item, table = "- " + "word " * 40, "| " + "cell | " * 40 + "\n|---|"
        text = report.filled("\n\n".join(["# A heading", item.strip() + ".\n" + item.strip(), table]))
        self.assertEqual([line[:6] for line in text.splitlines() if line], ["# A he", "- word", "  word", "  word", "- word", "  word", "  word", "| cell", "|---|"])
        self.assertLessEqual(max(len(line) for line in text.splitlines() if "|" not in line), 100)
        self.assertEqual(text.split("\n\n")[2], table)

    def test_the_share_compares_each_round_with_its_own_peak(self):
        cell = cell_of(mha_row([0.02, 0.01, 0.04]))
        cell["peaks"] = [100.0, 200.0, 50.0]
        self.assertEqual(report.share(cell, cell["rows"][0]), 0.5)

    def test_of_two_forms_in_a_column_the_faster_counts_and_is_named(self):
        cell = cell_of(mha_row([0.02] * 3), row("ONNX Runtime", [0.05] * 3, form="Attention"),
                       row("ONNX Runtime", [0.04] * 3, form="MultiHeadAttention"))
        text = report.markdown(results_of(cell))
        self.assertIn("| 20 ms, 50% | 40 ms, 25% | 2.00x (ONNX Runtime) |", text)
        self.assertIn("ONNX Runtime: MultiHeadAttention was the faster at (1, 128, 256, 4).", text)

    def test_where_mha_is_behind_or_short_of_its_aim_the_report_says_so(self):
        text = report.markdown(results_of(cell_of(mha_row([0.02] * 3), row("OpenVINO", [0.019] * 3)),
                                          cell_of(mha_row([0.02] * 3), row("OpenVINO", [0.027] * 3), shape=(1, 1024, 768, 12, 0)),
                                          cell_of(mha_row([0.02] * 3), row("OpenVINO", [0.029] * 3), shape=(1, 2048, 768, 12, 0))))
        self.assertIn("mha is the fastest in 2 of 3 cases", text)
        self.assertIn("Not the fastest:\n\n- (1, 128, 256, 4) on one thread: 0.95 times as fast as OpenVINO", text)
        self.assertIn("from 1024 rows on:\n\n- (1, 1024, 768, 12) uncausal on one thread: 1.35 times as fast as OpenVINO\n", text)
        self.assertNotIn("1.45 times as fast", text)

    def test_decoding_is_a_share_of_the_bandwidth(self):
        # 1e9 bytes at 20 GB/s: 50 ms are 100%.
        cell = cell_of(mha_row([0.0625] * 3), row("OpenVINO", [0.1] * 3))
        cell.update(shape={"width": 768, "heads": 12, "kv_heads": 4, "past": 1024}, peaks=[20.0] * 3, rotated=4e9)
        results = results_of(cell)
        text = report.markdown(results)
        self.assertIn("| shape | bandwidth, GB/s | mha |", text)
        self.assertIn("| (768, 12, 4, 1024) | 20 | 62.5 ms, 80% | 100 ms, 50% | 1.60x (OpenVINO) |", text)
        self.assertIn("caches of their own (4000 MB for (768, 12, 4, 1024))", text)
        lines = list(csv.DictReader(io.StringIO(report.table(results))))
        self.assertEqual([lines[0][name] for name in ("width", "heads", "kv_heads", "past", "gbytes_per_second", "share_of_bandwidth")],
                         ["768", "12", "4", "1024", "16", "0.8000"])
        texts = [text.text for text in ElementTree.fromstring(report.chart(results)).iter("{http://www.w3.org/2000/svg}text")]
        self.assertIn("(768, 12, 4, 1024)", texts)
        self.assertIn("80%, 1.60x", texts)

    def test_the_bytes_of_decoding_are_weights_and_cache(self):
        shape = {"width": 8, "heads": 4, "kv_heads": 2, "past": 9}  # W_Q and W_O of 8 x 8, W_K and W_V of 8 x 4, ten keys and values of 4
        self.assertEqual(report.decode_bytes(shape), 4 * (2 * 64 + 2 * 32 + 2 * 40))

    def test_what_is_not_measured_is_no_number_but_a_reason(self):
        cell = cell_of(mha_row([0.02] * 3), row("OpenVINO", [], reason="it crashed"), row("ONNX Runtime", [0.01], reason="it hung"))
        text = report.markdown(results_of(cell))
        self.assertIn("| 20 ms, 50% | not measured | not measured |  |", text)
        self.assertIn("OpenVINO (form) was not measured: it crashed.", text)
        self.assertIn("Nothing was measured beside mha.", text)
        lines = list(csv.DictReader(io.StringIO(report.table(results_of(cell)))))
        self.assertEqual([line["ms_median"] for line in lines], ["20", "", ""])
        self.assertEqual([line["not_measured_because"] for line in lines], ["", "it crashed", "it hung"])

    def test_a_share_that_cannot_be_is_reported(self):
        self.assertIn("which cannot be", report.markdown(results_of(cell_of(mha_row([0.009] * 3)))))
        self.assertNotIn("which cannot be", report.markdown(results_of(cell_of(mha_row([0.01] * 3)))))

    def test_a_machine_that_was_busy_is_mentioned(self):
        results = results_of(cell_of(mha_row([0.02] * 3)))
        self.assertNotIn("Other programs", report.markdown(results))
        results["about"]["load"] = 1.5
        self.assertIn("Other programs were running (load average 1.5 before)", report.markdown(results))

    def test_csv_has_a_line_for_each_form_with_all_its_figures(self):
        line, = csv.DictReader(io.StringIO(report.table(results_of(cell_of(mha_row([0.02, 0.0125, 0.011]))))))
        self.assertEqual([line[name] for name in ("threads", "batch", "n", "width", "heads", "is_causal")],
                         ["1", "1", "128", "256", "4", "1"])
        self.assertEqual([line[name] for name in ("library", "version", "form")], ["mha", "0.1.0", "layer"])
        self.assertEqual([line[name] for name in ("ms_median", "ms_least", "ms_most", "gflops", "share_of_peak")],
                         ["12.5", "11", "20", "80", "0.8000"])

    def test_the_bars_of_the_chart_are_as_long_as_the_shares(self):
        cell = cell_of(mha_row([0.0125] * 3), row("OpenVINO", [0.05] * 3), row("ONNX Runtime", [], reason="it crashed"))
        other = cell_of(mha_row([0.02] * 3), row("OpenVINO", [0.025] * 3), row("ONNX Runtime", [0.04] * 3), shape=(2, 8, 8, 1, 0))
        tree = ElementTree.fromstring(report.chart(results_of(cell, other)))
        svg = "{http://www.w3.org/2000/svg}"
        bars = {}
        for bar in tree.iter(svg + "rect"):
            tip = bar.find(svg + "title")
            if tip is not None and "ms" in tip.text:
                bars.setdefault(tip.text.split(":")[0], []).append(float(bar.get("width")))
        lengths = [length / bars["mha"][0] for name in ("mha", "OpenVINO", "ONNX Runtime") for length in bars[name]]
        for length, expected in zip(lengths, [1, 0.625, 0.25, 0.5, 0.3125]):
            self.assertAlmostEqual(length, expected, 3)
        texts = [text.text for text in tree.iter(svg + "text")]
        self.assertIn("80%, 4.00x", texts)
        self.assertEqual(texts.count("not measured"), 1)
        self.assertIn("not causal", texts)
        self.assertTrue(any("a <fast> machine. 2000-01-01." in text for text in texts))


def in_arithmetic(label, times, errors, **more):
    return {**row(label, times, **more), "errors": dict(zip(arithmetic.kinds, errors))}


class ArithmeticReports(unittest.TestCase):
    def results(self):
        return results_of(cell_of(
            in_arithmetic("mha f32", [0.02, 0.01, 0.04], [5e-7, 6e-7], library="mha"),
            in_arithmetic("mha int8", [0.01, 0.0075, 0.03], [0.0184, 0.035], library="mha"),
            in_arithmetic("ONNX Runtime f32", [0.05] * 3, [5e-7, 6e-7], form="Attention"),
            in_arithmetic("ONNX Runtime f32", [0.04] * 3, [7e-7, 8e-7], form="MultiHeadAttention"),
            in_arithmetic("PyTorch bf16", [], [], form="bf16", reason="the processor has no instructions for bfloat16")))

    def test_a_cell_has_time_and_both_errors_and_time_is_compared_round_by_round(self):
        text = arithmetic.markdown(self.results())
        self.assertIn("| mha f32 | 20 ms, 100% [5.0e-7, 6.0e-7] |", text)
        self.assertIn("| mha int8 | 10 ms, 75% [1.8e-2, 3.5e-2] |", text)  # shares of 50%, 75% and 75%
        self.assertIn("| ONNX Runtime f32 | 40 ms, 200% [7.0e-7, 8.0e-7] |", text)  # the faster form
        self.assertIn("the fastest is mha int8, 75% of the time", " ".join(text.split()))
        self.assertIn("Rounds of one form lie 75% apart in the median, 225% at most", " ".join(text.split()))

    def test_what_is_not_measured_has_a_reason_in_the_text_and_in_the_table(self):
        text = arithmetic.markdown(self.results())
        self.assertIn("| PyTorch bf16 | not measured |", text)
        self.assertIn("- PyTorch bf16 (bf16) was not measured: the processor has no instructions for bfloat16.", text)
        lines = list(csv.DictReader(io.StringIO(arithmetic.table(self.results()))))
        self.assertEqual([lines[1][name] for name in ("form", "ms_median", "share_of_time_of_mha_f32", "error_normal", "error_outliers")],
                         ["form", "10", "0.7500", "0.0184", "0.035"])
        self.assertEqual([lines[4][name] for name in ("ms_median", "error_normal", "not_measured_because")],
                         ["", "", "the processor has no instructions for bfloat16"])

    def test_the_chart_has_the_time_to_the_right_and_the_error_upwards(self):
        tree = ElementTree.fromstring(arithmetic.chart(self.results()))
        svg = "{http://www.w3.org/2000/svg}"
        dots = {dot.find(svg + "title").text.split(":")[0]: [float(dot.get(name)) for name in ("cx", "cy")] for dot in tree.iter(svg + "circle")}
        self.assertEqual(list(dots), ["mha f32", "mha int8", "ONNX Runtime f32"])
        axes = [float(line.get("x1")) for line in tree.iter(svg + "line") if line.get("class") == "axis" and line.get("x1") == line.get("x2")]
        shares = [(dots[name][0] - axes[0]) / (axes[1] - axes[0]) for name in dots]
        for share, expected in zip(shares, [1, 0.75, 2]):
            self.assertAlmostEqual(share, expected, 2)
        heights = [float(line.get("y1")) for line in tree.iter(svg + "line") if line.get("y1") == line.get("y2")]
        self.assertAlmostEqual((heights[0] - dots["mha int8"][1]) / (heights[0] - heights[1]), math.log10(0.0184 / 1e-2), 2)
        self.assertEqual(dots["mha f32"][1], heights[0])  # the axis
        self.assertLessEqual(max(x for x, _ in dots.values()), max(float(line.get("x2")) for line in tree.iter(svg + "line")))
        lines = [line.get("points").split() for line in tree.iter(svg + "polyline")]
        self.assertEqual([line[0] for line in lines], [f"{x:.1f},{y:.1f}" for x, y in dots.values()])
        texts = [text.text for text in tree.iter(svg + "text")]
        self.assertIn("(1, 128, 256, 4)", texts)
        self.assertNotIn("PyTorch bf16", texts)


class Arguments(unittest.TestCase):
    def run_script(self, *arguments):
        return subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_wrong_usage_is_code_2_and_a_sentence(self):
        for arguments, sentence in [
                (["--shapes", "1,128,256"], "'1,128,256' is no shape; write BATCH,N,WIDTH,HEADS"),
                (["--shapes", "1,0,256,4"], "'1,0,256,4' is no shape"),
                (["--shapes", "1,128,256,4,causal"], "'1,128,256,4,causal' is no shape"),
                (["--shapes", "1,128,256,5"], "5 heads do not divide the width 256"),
                (["--decode", "768,12,12"], "'768,12,12' is no shape of decoding; write WIDTH,HEADS,KV_HEADS,PAST"),
                (["--decode", "768,12,12,0"], "'768,12,12,0' is no shape of decoding"),
                (["--decode", "768,12,5,16"], "heads have to divide the width, and kv heads the heads"),
                (["--decode", "--libraries", "openvino"], "openvino is not for decoding"),
                (["--decode", "--arithmetic"], "--decode and --arithmetic are two comparisons; give one of them"),
                (["--arithmetic", "1,128,256,4,uncausal"], "argument --arithmetic: these layers are causal"),
                (["--rounds", "0"], "'0' is no number of rounds; give 1 or more"),
                (["--threads", "3"], "invalid choice: '3'"),
                (["--core", "100000"], "may not use core 100000"),
                (["--libraries", "nothing"], "invalid choice: 'nothing'"),
                (["--install", "mha"], "invalid choice: 'mha'"),
                (["--mha", "/nowhere/libmha.so"], "there is no file /nowhere/libmha.so")]:
            done = self.run_script(*arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn(sentence, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_help_has_examples_and_exit_codes(self):
        done = self.run_script("--help")
        self.assertEqual(done.returncode, 0)
        self.assertIn("Examples:\n  tools/compare.py", done.stdout)
        self.assertIn("Exit codes:", done.stdout)

    def test_a_shape_given_twice_is_measured_once(self):
        options = compare.parse_arguments(["--shapes", "1,2,8,2", "1,2,8,2,uncausal", "1,2,8,2", "--libraries", "openvino"])
        self.assertEqual(options.shapes, [(1, 2, 8, 2, 1), (1, 2, 8, 2, 0), compare.smallest])
        self.assertEqual(options.libraries, ["mha", "openvino"])


    def test_decoding_has_shapes_libraries_and_a_folder_of_its_own(self):
        options = compare.parse_arguments(["--decode"])
        self.assertEqual(options.shapes, compare.decode_shapes)
        self.assertEqual(options.libraries, ["mha", "pytorch", "onnxruntime"])
        self.assertEqual(options.output.name, "decode")
        options = compare.parse_arguments(["--decode", "8,2,1,4", "16,2,2,9", "8,2,1,4"])
        self.assertEqual([list(shape.values()) for shape in options.shapes], [[8, 2, 1, 4], [16, 2, 2, 9]])

    def test_arithmetics_have_shapes_and_a_folder_of_their_own_and_one_thread(self):
        options = compare.parse_arguments(["--arithmetic"])
        self.assertEqual((options.shapes, options.libraries, len(options.suites)), (compare.arithmetic_shapes, compare.defaults, 1))
        self.assertEqual((options.output.name, options.able), ("arithmetic", compare.arithmetic_forms))
        self.assertEqual(compare.parse_arguments(["--arithmetic", "1,2,8,2", "1,2,8,2"]).shapes, [(1, 2, 8, 2, 1)])
        for forms in compare.arithmetic_forms.values():
            self.assertLessEqual(set(forms.values()), set(arithmetic.colours))

    def test_layers_take_turns_until_no_cache_can_hold_them_or_memory_ends(self):
        shape = {"width": 768, "heads": 12, "kv_heads": 12, "past": 1024}
        size = report.decode_bytes(shape)
        copies, rotated = compare.copies_of(shape, 1e12)
        self.assertEqual(rotated, copies * size)
        self.assertTrue(compare.rotated_bytes() <= rotated < compare.rotated_bytes() + size)
        self.assertEqual(compare.copies_of(shape, 2.5 * size), (2, 2 * size))
        self.assertEqual(compare.copies_of(shape, 0), (1, size))


def decode_in_double(shape, x, w_qkv, w_o, k, v):
    """Likewise, of one row behind those in k and v."""
    width, heads, kv_heads, past = shape.values()
    head_dim = width // heads
    kv_width, columns = kv_heads * head_dim, width + 2 * kv_heads * head_dim
    qkv = [sum(x[i] * w_qkv[i * columns + j] for i in range(width)) for j in range(columns)]
    keys, values = ([rows[i * kv_width:][:kv_width] for i in range(past)] + [list(qkv[start:][:kv_width])]
                    for rows, start in ((list(k), width), (list(v), width + kv_width)))
    context = []
    for head in range(heads):
        first = head // (heads // kv_heads) * head_dim
        scores = [sum(qkv[head * head_dim + c] * key[first + c] for c in range(head_dim)) / math.sqrt(head_dim) for key in keys]
        weights = [math.exp(score - max(scores)) for score in scores]
        context += [sum(weight * value[first + c] for weight, value in zip(weights, values)) / sum(weights) for c in range(head_dim)]
    return [sum(context[c] * w_o[c * width + j] for c in range(width)) for j in range(width)]


def layer_in_double(shape, x, w_qkv, w_o):
    """Arrays in, a list of y's elements out, as the formulas say it."""
    batch, n, width, heads, is_causal = shape
    head_dim = width // heads
    y = []
    for b in range(batch):
        rows = [x[(b * n + i) * width:][:width] for i in range(n)]
        qkv = [[sum(row[i] * w_qkv[i * 3 * width + j] for i in range(width)) for j in range(3 * width)] for row in rows]
        for i in range(n):
            context = []
            for first in range(0, width, head_dim):
                keys = range(i + 1 if is_causal else n)
                scores = [sum(qkv[i][first + c] * qkv[j][width + first + c] for c in range(head_dim)) / math.sqrt(head_dim) for j in keys]
                weights = [math.exp(score - max(scores)) for score in scores]
                for c in range(head_dim):
                    context.append(sum(weight * qkv[j][2 * width + first + c] for j, weight in zip(keys, weights)) / sum(weights))
            y += [sum(context[c] * w_o[c * width + j] for c in range(width)) for j in range(width)]
    return y


class Mha(unittest.TestCase):
    def start(self, cores):
        log = open(os.devnull, "w")
        self.addCleanup(log.close)
        worker, _ = compare.Settings(folder, folder, helper, log).start("mha", cores)
        self.addCleanup(worker.process.stdout.close)
        self.addCleanup(worker.process.stdin.close)
        self.addCleanup(worker.end)
        return worker

    def test_what_is_timed_is_the_layer(self):
        core = min(os.sched_getaffinity(0))
        for threads, shape in [(1, (2, 5, 8, 2, 1)), (1, (1, 7, 12, 3, 0)), (3, (2, 30, 8, 4, 1))]:
            worker = self.start([core] * threads)  # more threads than cores
            inputs, output = folder / "inputs", folder / "output"
            answer = worker.ask("make", shape=shape, inputs=str(inputs), output=str(output))
            self.assertGreater(answer["operations"], 8 * shape[0] * shape[1] * shape[2] ** 2)
            values, y = (array.array("f", path.read_bytes()) for path in (inputs, output))
            batch, n, width, _, _ = shape
            ends = batch * n * width, batch * n * width + 3 * width**2
            expected = layer_in_double(shape, values[:ends[0]], values[ends[0]:ends[1]], values[ends[1]:])
            self.assertEqual(len(y), len(expected))
            largest = max(map(abs, expected))
            self.assertGreater(largest, 0.1)
            self.assertLess(max(abs(a - b) for a, b in zip(y, expected)) / largest, 1e-5)

    def test_what_is_timed_of_decoding_is_a_row_over_the_cache_however_often(self):
        shape = {"width": 12, "heads": 6, "kv_heads": 3, "past": 21}
        worker = self.start([min(os.sched_getaffinity(0))])
        inputs, output = folder / "inputs", folder / "output"
        worker.ask("make", shape=shape, inputs=str(inputs), output=str(output))
        values, y = (array.array("f", path.read_bytes()) for path in (inputs, output))
        parts = []
        for size in (12, 12 * 24, 12 * 12, 21 * 6, 21 * 6):
            parts.append(values[:size])
            values = values[size:]
        self.assertEqual(len(values), 0)
        expected = decode_in_double(shape, *parts)
        self.assertLess(max(abs(a - b) for a, b in zip(y, expected)) / max(map(abs, expected)), 1e-5)
        # A cache has room for one row more; each of many calls needs it.
        self.assertEqual(worker.ask("load", form="decode", shape=shape, inputs="", expected="", copies=3), {"difference": 0.0})
        self.assertGreater(worker.ask("time", form="decode", shape=shape, seconds=0.01)["seconds"], 0)
        self.assertGreater(worker.ask("bandwidth", size=1 << 20)["gbytes"], 0.1)

    def test_errors_in_all_arithmetics_are_those_of_the_layer(self):
        worker = self.start([min(os.sched_getaffinity(0))])
        shape, inputs, exact = (2, 5, 64, 2, 1), folder / "inputs", folder / "exact"
        worker.ask("make", shape=shape, inputs=str(inputs), output=str(folder / "output"))
        values = array.array("f", inputs.read_bytes())
        ends = 640, 640 + 3 * 64**2
        expected = array.array("d", layer_in_double(shape, values[:ends[0]], values[ends[0]:ends[1]], values[ends[1]:]))
        exact.write_bytes(expected.tobytes())
        question = {"shape": shape, "inputs": str(inputs), "expected": str(exact)}
        errors = {form: worker.ask("error", form=form, keep=form == "int8", **question)["rms"] for form in compare.arithmetic_forms["mha"]}
        for form, (least, most) in {"f32": (0, 1e-6), "int16": (1e-3, 0.02), "int8": (2e-3, 0.03), "int16_attention": (2e-3, 0.03),
                                    "int8_attention": (2e-3, 0.04), "int4_int16": (0.02, 0.3),
                                    "int4_int8": (0.02, 0.3)}.items():
            self.assertTrue(least < errors[form] < most, errors)
        self.assertLess(errors["int16"], errors["int8"])
        self.assertLess(errors["int8"], errors["int8_attention"])
        self.assertGreater(worker.ask("time", form="int8", shape=shape, seconds=0.01)["seconds"], 0)
        with self.assertRaisesRegex(compare.Failed, "KeyError"):  # it was not kept
            worker.ask("time", form="int16", shape=shape, seconds=0.01)
        # An error is relative to what is expected.
        exact.write_bytes(array.array("d", [2 * value for value in expected]).tobytes())
        self.assertAlmostEqual(worker.ask("error", form="f32", keep=False, **question)["rms"], 0.5, 4)

    def test_the_time_grows_with_the_work_and_the_peak_is_above_it(self):
        worker = self.start([min(os.sched_getaffinity(0))])
        seconds, rates = [], []
        for shape in [(1, 16, 64, 4, 1), (1, 256, 256, 4, 1)]:
            files = {"inputs": str(folder / "inputs"), "output": str(folder / "output")}
            operations = worker.ask("make", shape=shape, **files)["operations"]
            self.assertEqual(worker.ask("load", form="layer", shape=shape, inputs="", expected=""), {"difference": 0.0})
            seconds.append(worker.ask("time", form="layer", shape=shape, seconds=0.05)["seconds"])
            rates.append(operations / seconds[-1] / 1e9)
        self.assertGreater(seconds[1], 5 * seconds[0])
        self.assertGreater(1.1 * worker.ask("peak")["gflops"], max(rates))

    def test_a_request_that_fails_is_answered_by_its_reason(self):
        worker = self.start([min(os.sched_getaffinity(0))])
        with self.assertRaisesRegex(compare.Failed, "does not divide"):
            worker.ask("make", shape=(1, 4, 9, 2, 1), inputs=str(folder / "inputs"), output=str(folder / "output"))
        with self.assertRaisesRegex(compare.Failed, "KeyError"):
            worker.ask("time", form="layer", shape=(1, 4, 8, 2, 1), seconds=0.01)


class OpenBlas(unittest.TestCase):
    """By a stand-in for OpenBLAS that says whose kernels it has."""

    def environment(self, core, **variables):
        source, stand_in = folder / "openblas.c", folder / "libopenblas.so.0"
        source.write_text(f'char *openblas_get_corename(void) {{ return "{core}"; }}' if core else "")
        subprocess.run([os.environ.get("CXX", "c++"), "-x", "c", "-shared", "-fPIC", source, "-o", stand_in], check=True)
        self.addCleanup(lambda: stand_in.unlink(missing_ok=True))
        clean = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
        with mock.patch.dict(os.environ, {**clean, "LD_LIBRARY_PATH": str(folder), **variables}, clear=True):
            return compare.openblas_environment(helper)

    def test_it_gets_the_best_kernels_of_the_machine(self):
        best = ctypes.CDLL(str(helper)).compare_instruction_set
        best.restype = ctypes.c_char_p
        core = {b"avx512": "SkylakeX", b"avx2": "Haswell"}.get(best().removesuffix(b"_vnni"))
        self.assertEqual(self.environment("Prescott"), {"OPENBLAS_CORETYPE": core} if core else {})

    def test_its_own_choice_stays_where_it_is_as_good_and_so_does_the_users(self):
        self.assertEqual(self.environment("SkylakeX"), {})
        self.assertEqual(self.environment("Prescott", OPENBLAS_CORETYPE="Prescott"), {})

    def test_one_that_cannot_be_asked_is_left_alone(self):
        self.assertEqual(self.environment(None), {})


# Stands in for an interpreter that has a library. One of its threads spins, as those of some libraries do.
stand_in = """#!{python}
import array, json, os, sys, threading, time
library, used = sys.argv[2], time.process_time()
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
if library == "absent":
    print(json.dumps({{"error": "ModuleNotFoundError: No module named 'absent'"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = {{"about": {{"name": library, "version": "1", "detail": ""}}, "reference": {{"difference": 1e-7}},
              "make": {{"operations": 0}}, "error": {{"rms": {{"differs": 0.6, "nan": float("nan")}}.get(library, 0.01)}},
              "load": {{"difference": {{"differs": 0.004, "nan": float("nan")}}.get(library, 1e-6)}},
              "time": {{"seconds": 0.25}}}}[request["request"]]
    if request["request"] == "make":  # inputs and y in double precision
        open(request["inputs"], "wb").write(array.array("f", [0.5] * (16 * 32 + 4 * 32**2)))
        open(request["output"], "wb").write(array.array("d", [(200 if request["outliers"] else 128)] * (16 * 32)))
    if request["request"] == "time":
        if library == "dies":
            os.kill(os.getpid(), 11)
        if time.process_time() - used > 0.1:
            answer = {{"error": "it was not stopped while others worked"}}
    print(json.dumps(answer), flush=True)
    used = time.process_time()
"""


class Sessions(unittest.TestCase):
    def session(self, *libraries, rounds=2, shapes=("--shapes", "1,16,32,2")):
        """(exit code, compare.json, compare.md, standard error) of a run with stand-ins for the libraries."""
        interpreter = folder / "interpreter"
        interpreter.write_text(stand_in.format(python=sys.executable))
        interpreter.chmod(0o755)
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(mock.patch.object(compare.Settings, "pythons",
                                              lambda _, library: [sys.executable] if library == "mha" else [interpreter]))
        stack.enter_context(mock.patch.object(compare, "build_helper", lambda *_: helper))
        for forms in compare.forms, compare.decode_forms, compare.arithmetic_forms:
            stack.enter_context(mock.patch.dict(forms, {name: {"form": name} for name in libraries}))
        stack.enter_context(mock.patch.object(compare, "rotated_bytes", lambda: 1 << 20))
        for module in report, arithmetic:
            stack.enter_context(mock.patch.dict(module.colours, {name: "#000000" for name in libraries}))
        stack.enter_context(mock.patch.object(sys, "argv", [
            "compare.py", "--mha", str(libmha), *shapes, "--rounds", str(rounds), "--threads", "1", "--output", str(folder),
            "--libraries", "mha", *libraries]))
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        code = compare.main()
        return code, json.loads((folder / "compare.json").read_text()), (folder / "compare.md").read_text(), errors.getvalue()

    def test_libraries_that_agree(self):
        code, results, text, errors = self.session("agrees")
        self.assertEqual(code, 0, errors)
        cell = results["suites"][0]["cells"][0]
        self.assertEqual([(row["library"], len(row["seconds"]), row["reason"]) for row in cell["rows"]],
                         [("mha", 2, None), ("agrees", 2, None)])
        self.assertEqual(cell["rows"][1]["seconds"], [0.25, 0.25])
        self.assertEqual(len(cell["peaks"]), 2)
        self.assertIn("mha is the fastest in 1 of 1 cases", text)
        self.assertIn("mha differs from the same layer in double precision by 1e-07", text)
        self.assertIn("round 2 of 2, (1, 16, 32, 2): mha layer ", errors)
        self.assertEqual({path.name for path in folder.glob("compare*")}, {*report.names, "compare.log"})
        self.assertEqual(list(folder.glob("tmp*")), [])

    def test_decoding(self):
        code, results, text, errors = self.session("agrees", "differs", shapes=("--decode", "32,4,2,100"))
        self.assertEqual(code, 1, errors)
        cell, = results["suites"][0]["cells"]
        self.assertEqual(cell["shape"], {"width": 32, "heads": 4, "kv_heads": 2, "past": 100})
        self.assertEqual([(row["form"], len(row["seconds"])) for row in cell["rows"]], [("decode", 2), ("form", 2), ("form", 0)])
        self.assertGreaterEqual(cell["rotated"], 1 << 20)
        self.assertIn("round 2 of 2, (32, 4, 2, 100): mha decode ", errors)
        self.assertIn("mha is the fastest in 1 of 1 cases", text)

    def test_arithmetics(self):
        # Rows of 0.5 and weights of 0.5 give 8 for each value, and 128 for each element of y: exact in float32.
        code, results, text, errors = self.session("agrees", "differs", "nan", shapes=("--arithmetic", "1,16,32,2"))
        self.assertEqual(code, 1, errors)
        cell, = results["suites"][0]["cells"]
        self.assertEqual([(row["form"], len(row["seconds"])) for row in cell["rows"]],
                         [*((form, 2) for form in compare.arithmetic_forms["mha"]), ("form", 2), ("form", 0), ("form", 0)])
        self.assertLess(cell["rows"][0]["errors"]["normal"], 1e-6)
        self.assertAlmostEqual(cell["rows"][0]["errors"]["outliers"], 72 / 200, 6)
        self.assertEqual(cell["rows"][len(compare.arithmetic_forms["mha"])]["errors"], {"normal": 0.01, "outliers": 0.01})
        self.assertRegex(text, "differs .* was not measured: its y is off by 0.6 of the layer")
        self.assertRegex(text, "nan .* was not measured: its y is off by nan of the layer")
        self.assertNotIn("numpy", results["libraries"])
        self.assertEqual({path.name for path in folder.glob("compare*")}, {*report.names, "compare.log"})
        ElementTree.parse(folder / "compare.svg")

    def test_arithmetics_need_numpy(self):
        with mock.patch.object(compare.Settings, "pythons", lambda _, library: [sys.executable] * (library == "mha")), open(os.devnull, "w") as log, \
                contextlib.redirect_stderr(io.StringIO()), self.assertRaisesRegex(compare.Failed, "exact results are NumPy's.*no interpreter"):
            compare.run_suite(compare.Settings(folder, folder, helper, log), ["mha"], [(1, 16, 32, 2, 1)], [min(os.sched_getaffinity(0))], 1,
                              compare.arithmetic_forms)

    def test_one_that_differs_is_not_measured_and_the_code_is_1(self):
        for library in "differs", "nan":
            code, results, text, errors = self.session("agrees", library)
            self.assertEqual(code, 1)
            self.assertEqual([len(row["seconds"]) for row in results["suites"][0]["cells"][0]["rows"]], [2, 2, 0])
            self.assertRegex(text, f"{library}.* was not measured: its y differs from mha's by (0.004|nan) of the largest element")
            self.assertIn("the results do not agree; compare.md says where", errors)

    def test_one_that_dies_leaves_the_others(self):
        code, results, text, _ = self.session("dies", "agrees")
        self.assertEqual(code, 0)
        self.assertEqual([len(row["seconds"]) for row in results["suites"][0]["cells"][0]["rows"]], [2, 0, 2])
        self.assertRegex(text, "dies.* was not measured: its process ended by SIGSEGV")

    def test_nothing_to_compare_with_is_code_4(self):
        code, _, text, errors = self.session("absent")
        self.assertEqual(code, 4)
        self.assertIn("there is nothing to compare with", errors)
        self.assertRegex(text, "absent.* was not measured: ModuleNotFoundError: No module named 'absent'")

    def test_mha_alone_when_asked_for(self):
        code, results, text, _ = self.session()
        self.assertEqual(code, 0)
        self.assertEqual(len(results["suites"][0]["cells"][0]["rows"]), 1)
        self.assertIn("Nothing was measured beside mha.", text)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    libmha = pathlib.Path(sys.argv.pop(1))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "helper").mkdir()
        helper = compare.build_helper(libmha, folder / "helper")
        unittest.main()
