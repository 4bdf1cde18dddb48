#!/usr/bin/env python3
"""mha explain: its numbers, its pages and pictures, and what it refuses.

    explain_test.py --library LIBMHA.SO [--venv FOLDER]

explain.txt is what the worked example has always printed. Runs with the packages of the interpreter
that it is started by, or those that tools/bindings/python/setup.sh put into FOLDER. Exits with 77,
which ctest shows as skipped, where they are in neither.
"""

import contextlib
import io
import pathlib
import re
import tempfile
import unittest
from unittest import mock

import python_support

arguments = python_support.parser(__doc__).parse_args()
python_support.need(["numpy", "matplotlib"], arguments)

import mha
import numpy as np
from mha import _command, _packed, explain

rng = np.random.default_rng(1)
heads, head_dim, width, tokens = 4, 6, 20, 5
expected_text = (pathlib.Path(__file__).parent / "explain.txt").read_text()


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


packed = mha.pack(
    width,
    heads,
    head_dim=head_dim,
    output_dim=width,
    w_qkv=normal(width, 3 * heads * head_dim),
    w_o=normal(heads * head_dim, width),
)


def block(text, step, title):
    """The matrix below a title in a step."""
    lines = text[re.search(rf"^Step {step} ", text, re.MULTILINE).start() :].splitlines()
    at = lines.index("  " + title) + 1
    rows = [line.split() for line in lines[at : lines.index("", at) if "" in lines[at:] else None]]
    return np.array(
        [[float(cell) for cell in row if cell != "..."] for row in rows if row[0] != "..."]
    )


class Explaining(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.x = normal(tokens, width)
        np.save(self.folder / "x.npy", self.x)

    def run_it(self, *words):
        """(exit status, standard output, standard error); x.npy and others are files of the
        folder."""
        words = [
            (
                str(self.folder / word)
                if re.fullmatch(r"[\w.-]+\.(npy|safetensors|mha|html|png|txt)", str(word))
                else str(word)
            )
            for word in words
        ]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = _command.main(["explain", *words])
            except SystemExit as error:
                status = error.code
        return status, out.getvalue(), err.getvalue()

    def text_of(self, *words):
        status, out, err = self.run_it(*words)
        self.assertEqual((status, err), (0, ""))
        return out


class Numbers(Explaining):
    def test_the_worked_example_is_what_it_always_was_whatever_the_instruction_set_is_called(self):
        number = mha.attention_info(3, 3, 2, 3)["instruction_set"]
        for name in mha.instruction_set_names:
            with (
                self.subTest(name),
                mock.patch.object(explain, "instruction_set_names", {name: number}),
            ):
                self.assertEqual(self.text_of(), expected_text.replace("NAME", name, 1))

    def test_options_change_scores_and_weights(self):
        text = self.text_of("--softcap", 50, "--alibi", "--window", 2)
        np.testing.assert_allclose(
            block(text, "8b", "head 1                       head 2")[0],
            [49.9975, 49.9837, 44.0546, 49.8804, 49.8036, 36.4259],
        )
        np.testing.assert_allclose(
            block(text, "8d", "head 1                    head 2")[1],
            [0.4956, 0.5044, 0, 0.5080, 0.4920, 0],
        )
        self.assertIn("ALiBi: s - slope", text)
        self.assertIn("none sees more than 2 tokens", text)

    def test_what_is_shown_as_normalised_and_rotated_gives_the_scores(self):
        weights = {
            name: normal(width, count * head_dim)
            for name, count in (("w_q", heads), ("w_k", 2), ("w_v", 2))
        }
        weights["w_o"] = normal(heads * head_dim, width)
        norm = dict(
            epsilon=1e-5, q_weight=normal(head_dim).tolist(), k_weight=normal(head_dim).tolist()
        )
        for rope in (
            {"base": 500.0, "linear_factor": 2.0},
            {"style": "interleaved", "base": 10000.0, "dims": 4},
        ):
            with self.subTest(rope):
                layer = mha.Layer(
                    width, heads, num_kv_heads=2, head_dim=head_dim, output_dim=width, **weights
                )
                call = explain.Call(
                    layer.shape,
                    {"causal": True, "rope": rope, "norm": norm},
                    explain.make_parser().parse_args([]),
                    [self.x, None, None],
                )
                call.run(layer)
                explain.show_preparation(explain.Page(), call)
                scores = np.einsum("ihd,jhd->hij", call.q, np.repeat(call.k, heads // 2, axis=1))
                seen = np.tril(np.ones((tokens, tokens), bool))
                np.testing.assert_allclose(
                    call.steps["scores"][:, seen], scores[:, seen], rtol=1e-4, atol=1e-4
                )

    def test_a_packed_layer_is_called_as_it_says(self):
        call = {
            "version": 1,
            "causal": True,
            "window": 3,
            "softcap": 5.0,
            "rope": {"base": 100.0},
            "sinks": [1.0, 2.0, 0.0, -1.0],
        }
        _packed.write(self.folder / "layer.mha", packed, call)
        text = self.text_of("--packed", "layer.mha", "--input", "x.npy")
        layer = mha.Layer.view(packed)
        y = layer.forward(
            self.x,
            is_causal=True,
            window_left=2,
            rope=mha.Rope.tables(head_dim, tokens, base=100.0),
            score=mha.ScoreOptions(softcap=5, sinks=np.array(call["sinks"], np.float32)),
        )
        np.testing.assert_allclose(
            block(text, "12", "y"), np.hstack([y[:, :3], y[:, -3:]]), atol=6e-5
        )
        self.assertIn(
            "causal, rotated (half, base 100), window of 3 rows, softcap 5, sinks",
            " ".join(text.split()),
        )


class Files(Explaining):
    def test_a_page_has_all_steps_and_a_picture_for_each_part(self):
        status, out, err = self.run_it("--html", "page.html", "--tokens", "<b>a</b> b c")
        self.assertEqual((status, out), (0, ""))
        self.assertRegex(err, r"page\.html: \d+")
        page = (self.folder / "page.html").read_text()
        self.assertEqual(
            page.count('<img alt="Heat maps of the heads" src="data:image/png;base64,iVBORw0KGgo'),
            2,
        )
        self.assertEqual(
            re.findall(r"<h3>Step (\w+)", page),
            re.findall(r"^Step (\w+)", expected_text, re.MULTILINE),
        )
        self.assertNotIn("<b>", page)
        self.assertEqual(len(re.findall(r"https?://", page)), 0)

    def test_a_picture_has_the_format_of_its_name(self):
        self.assertEqual(self.run_it("--picture", "maps.png")[0], 0)
        self.assertEqual((self.folder / "maps.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertRegex(
            self.run_it("--picture", "maps.txt")[2],
            "--picture: .*maps.txt ends in .txt; .png, .svg or .pdf is expected",
        )


class BadInput(Explaining):
    def test_each_is_one_sentence_with_exit_status_1_for_input_and_2_for_usage(self):
        _packed.write(self.folder / "layer.mha", packed, {"version": 1, "causal": True})
        np.save(self.folder / "double.npy", np.zeros((2, width)))
        np.save(self.folder / "empty.npy", np.zeros((0, width), np.float32))
        np.save(self.folder / "narrow.npy", np.zeros((2, width - 1), np.float32))
        (self.folder / "text.txt").write_text("no layer")
        plain = ["--packed", "layer.mha"]
        usage = [
            (["--window", "x"], "a whole number of at least 1 is expected, not 'x'"),
            (["--hed", 3], "unrecognized arguments: --hed 3"),
            (["--input", "x.npy"], "--packed and --input are needed"),
            (["--packed", "layer.mha"], "--packed and --input are needed"),
            (["--tokens", "a b c"], "--tokens: labels the maps of --html and --picture"),
            (
                [*plain, "--window", 2, "--input", "x.npy"],
                "--window: the packed layer already sets it",
            ),
        ]
        inputs = [
            (
                ["--html", "page.html", "--tokens", "a b"],
                "--tokens: 2 tokens for 3 rows of the worked example",
            ),
            ([*plain, "--input", "nothing.npy"], "nothing.npy: cannot be read"),
            ([*plain, "--input", "double.npy"], "holds float64"),
            ([*plain, "--input", "empty.npy"], "there is nothing to explain"),
            ([*plain, "--input", "narrow.npy"], "query"),
            (
                ["--packed", "text.txt", "--input", "x.npy"],
                "is not a packed layer; mha pack writes one",
            ),
        ]
        for status, (words, sentence) in [
            *((2, row) for row in usage),
            *((1, row) for row in inputs),
        ]:
            with self.subTest(words):
                done, out, err = self.run_it(*words)
                self.assertEqual((done, out), (status, ""), err)
                start = "usage: (.|\n)*\nmha explain: error: " if status == 2 else "mha explain: "
                self.assertRegex(err, rf"\A{start}.*{sentence}.*\n\Z")

    def test_help_has_examples(self):
        for words in ["explain"], ["onnx"]:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), self.assertRaises(SystemExit) as exit:
                _command.main([*words, "--help"])
            self.assertEqual(exit.exception.code, 0)
            self.assertIn(f"Examples:\n  mha {' '.join(words)}", out.getvalue())


python_support.run(Numbers, Files, BadInput)
