"""Shows every step of an attention layer, with all shapes and matrices, and heat maps of what its
heads attend to."""

from __future__ import annotations

import argparse
import base64
import html
import io
import math
import os
import shutil
import sys
import textwrap

import numpy as np

from ._attention import attention
from ._layer import Layer
from ._options import Norm, Rope, ScoreOptions, alibi_slopes
from ._packed import count_text, printable, read
from ._structs import instruction_set_names

examples = """\
Without options, it walks through a worked example of 3 tokens and 2 heads. It shows only the
corners of large matrices. To explain a layer of a model, pack it first: mha pack --weights FILE.

Examples:
  mha explain
  mha explain --softcap 50 --alibi
  mha explain --html explained.html --tokens "the cat sleeps"
  mha pack --weights gpt2.safetensors --layer h.0 --heads 12 --causal --output layer.mha
  mha explain --packed layer.mha --input x.npy --picture maps.png

Exit status: 0 on success, 1 for wrong input (with a one-line message), 2 for wrong usage."""

# The worked example. Its scores are so large that softmax gives nearly all weight to one token.
example_x = "1 2 3 4 5 6; 6 5 4 3 2 1; 1 1 1 1 1 1"
example_weights = {
    "w_q": """
        .4993 .2528 .9087 .4387 .0761 .6710;
        .4096 .0766 .3847 .5818 .5646 .5658;
        .2798 .7151 .1058 .6133 .2456 .3947;
        .5394 .9090 .6069 .5502 .2611 .0625;
        .9705 .0770 .5557 .5505 .4124 .5342;
        .1674 .8521 .7174 .2237 .0440 .4619""",
    "w_k": """
        .2858 .4111 .6800 .7871 .7942 .9427;
        .2936 .8079 .2960 .4484 .4080 .0224;
        .6710 .9872 .1064 .0914 .7141 .2901;
        .4991 .7919 .2702 .5881 .2960 .7207;
        .2867 .9855 .7803 .1783 .6278 .9921;
        .7149 .9552 .8109 .9274 .8857 .5978""",
    "w_v": """
        .0403 .9850 .9636 .2161 .2303 .7819;
        .6405 .3427 .0892 .8515 .8595 .4642;
        .8738 .0162 .1105 .0801 .5262 .2379;
        .0604 .5162 .9510 .8857 .4536 .1404;
        .3554 .6543 .0071 .3822 .7250 .8788;
        .4789 .0458 .6999 .9771 .9141 .1221""",
}
# Queries, keys and values of the size that trained layers have, head by head.
grouped_example = [
    (
        ".0299 .7057 .1425; .5029 .6294 .3265; .8386 .7803 .8877; .0808 .7281 .7343; .5948 .8757"
        " .6526; .8280 .1269 .9827"
    ),
    (
        ".2260 .7611 .6772; .7446 .4209 .6467; .4521 .1769 .1615; .6787 .7103 .8188; .5338 .8099"
        " .9866; .0227 .4601 .4753"
    ),
    (
        ".8375 .7430 .8563; .1214 .1560 .0729; .1887 .9912 .1640; .7458 .6515 .1220; .6801 .4366"
        " .6720; .8135 .6831 .7280"
    ),
]

steps = """q k v scores scaled_scores softcapped_scores masked_scores attention_weights
    context""".split()


class BadInput(ValueError):
    pass


def matrix_of(text, *shape):
    rows = np.array(
        [[float(number) for number in row.split()] for row in text.split(";")], np.float32
    )
    return rows.reshape(shape) if shape else rows


def shape_text(*extents):
    return f"({extents[0]},)" if len(extents) == 1 else f"({', '.join(map(str, extents))})"


class Page:
    """Steps, each with its blocks of matrices; a block is (title, matrix), of which None stands for
    those left out."""

    def __init__(self):
        self.parts = []

    def headline(self, title, *paragraphs):
        self.parts.append(("headline", title, paragraphs))

    def step(self, number, title, shapes, why, *rows_of_blocks):
        self.parts.append(("step", f"Step {number:<4}{title:<23}{shapes}", why))
        for blocks in rows_of_blocks:
            if blocks:
                self.parts.append(("blocks", blocks))

    def note(self, sentence):
        self.parts.append(("note", sentence))

    def text(self, width):
        lines = []
        for kind, first, *rest in self.parts:
            if kind == "headline":
                lines += ([""] * 2 if lines else []) + [
                    first,
                    *(line for paragraph in rest[0] for line in textwrap.wrap(paragraph, width)),
                ]
            elif kind == "step":
                lines += [
                    "",
                    first.rstrip(),
                    *(f"  {line}" for line in textwrap.wrap(rest[0], width - 2)),
                ]
            elif kind == "note":
                lines += ["", *(f"  {line}" for line in textwrap.wrap(first, width - 2))]
            else:
                lines += ["", *block_lines(first, width)]
        return "\n".join(lines) + "\n"

    def html(self, pictures):
        body, pictures = [], list(pictures)
        for kind, first, *rest in self.parts:
            if kind == "headline":
                body.append(
                    f"<h1>{html.escape(first)}</h1>"
                    + "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in rest[0])
                )
                if pictures:
                    encoded = base64.b64encode(pictures.pop(0)).decode()
                    body.append(
                        '<h2>What each head attends to</h2><img alt="Heat maps of the heads"'
                        f' src="data:image/png;base64,{encoded}">'
                    )
            elif kind == "step":
                body.append(f"<h3>{html.escape(first)}</h3><p>{html.escape(rest[0])}</p>")
            elif kind == "note":
                body.append(f"<p>{html.escape(first)}</p>")
            else:
                body.append("<pre>" + html.escape("\n".join(block_lines(first, 150))) + "</pre>")
        style = (
            "body{max-width:76em;margin:2em auto;padding:0"
            " 1em;font-family:sans-serif}h3{white-space:pre-wrap;font-family:monospace}"
            "pre{overflow-x:auto;background:#f4f4f4;padding:1em}img{max-width:100%}"
        )
        title = html.escape(self.parts[0][1])
        return (
            "<!doctype html>\n<html lang=en><head><meta"
            f" charset=utf-8><title>{title}</title><style>{style}</style></head>\n<body>\n"
            + "\n".join(body)
            + "\n</body></html>\n"
        )


def shown_indices(count, most, first, last):
    """All if they are at most this many, else the first and last ones with None in between."""
    return (
        list(range(count)) if count <= most else [*range(first), None, *range(count - last, count)]
    )


def blocks_of(count, make):
    """One block for each head or token, or for a few at either end of many."""
    return [
        ("...", None) if index is None else make(index) for index in shown_indices(count, 4, 2, 1)
    ]


def cells_of(matrix):
    """A matrix as lines of the same width, its middle left out where it is large."""
    rows, columns = (shown_indices(extent, 8, 3, 3) for extent in matrix.shape)
    shown = matrix[
        np.ix_([i for i in rows if i is not None], [i for i in columns if i is not None])
    ]
    finite = np.abs(shown[np.isfinite(shown)])
    form = "{:.4e}" if finite.size and finite.max() >= 1e6 else "{:.4f}"
    texts = [
        [
            "..." if row is None or column is None else form.format(matrix[row, column])
            for column in columns
        ]
        for row in rows
    ]
    width = max(
        (
            len(text)
            for row, line in zip(rows, texts)
            for column, text in zip(columns, line)
            if None not in (row, column)
        ),
        default=0,
    )
    return [
        "  ".join(text.rjust(3 if column is None else width) for column, text in zip(columns, line))
        for line in texts
    ]


def block_lines(blocks, width):
    """Blocks beside each other, as many as fit into the width."""
    drawn = [[title] + ([] if matrix is None else cells_of(matrix)) for title, matrix in blocks]
    widths = [max(map(len, lines)) for lines in drawn]
    lines, first = [], 0
    while first < len(drawn):
        last, used = first + 1, 2 + widths[first]
        while last < len(drawn) and used + 4 + widths[last] <= width:
            used, last = used + 4 + widths[last], last + 1
        lines += [""] if first else []
        for row in range(max(map(len, drawn[first:last]))):
            cells = [
                (lines_of[row] if row < len(lines_of) else "").ljust(size)
                for lines_of, size in zip(drawn[first:last], widths[first:last])
            ]
            lines.append(("  " + "    ".join(cells)).rstrip())
        first = last
    return lines


def weights_picture(maps, labels, form="png"):
    """A picture with a heat map for each head of maps, [(weights, masked)]; labels are of rows and
    columns, or None."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.colors
        import matplotlib.figure
    except ImportError:
        raise SystemExit("mha explain: pictures need matplotlib: pip install matplotlib") from None
    drawn = maps[:64]
    n_q, n_kv = drawn[0][0].shape
    across = min(len(drawn), 4 if len(drawn) > 6 else 3)
    down = -(-len(drawn) // across)
    side = 4.2 if n_kv > 12 or across < 3 else 3.4
    figure = matplotlib.figure.Figure(
        (side * across + 0.6, side * down * max(0.6, min(1.6, n_q / n_kv)) + 0.4),
        layout="constrained",
        dpi=110,
    )
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#d62f56")
    # Small weights are stretched, or rows of many keys would all be dark: an even share of all keys
    # has a quarter of the colours.
    scale = matplotlib.colors.PowerNorm(
        1 if n_kv <= 4 else math.log(0.25) / math.log(1 / n_kv), 0, 1
    )
    for head, (weights, masked) in enumerate(drawn):
        axes = figure.add_subplot(down, across, head + 1)
        image = axes.imshow(
            weights, cmap=colours, norm=scale, aspect="auto", interpolation="nearest"
        )
        axes.imshow(
            np.ma.masked_where(~masked, np.ones(masked.shape)),
            cmap=matplotlib.colors.ListedColormap(["#e8e8e8"]),
            aspect="auto",
            interpolation="nearest",
        )
        title = f"Head {head + 1}"
        good = np.isfinite(weights).all(axis=1) & ~masked.all(axis=1)
        if good.any():
            entropy = -np.sum(
                weights[good] * np.log(np.where(weights[good] > 0, weights[good], 1)), axis=1
            )
            keys = f"{math.exp(entropy.mean()):.1f}"
            title += f", spread over {keys} key{'' if keys == '1.0' else 's'}"
        axes.set_title(title, fontsize=9)
        for axis, names, count in (axes.yaxis, labels[0], n_q), (axes.xaxis, labels[1], n_kv):
            if count <= 40:
                axis.set_ticks(
                    range(count),
                    names or range(1, count + 1),
                    fontsize=7,
                    rotation=90 if axis is axes.xaxis and names else 0,
                )
        if max(n_q, n_kv) <= 12:
            for row, column in zip(*np.nonzero(~masked)):
                colour = "white" if scale(weights[row, column]) < 0.6 else "black"
                axes.text(
                    column,
                    row,
                    f"{weights[row, column]:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=colour,
                )
    figure.colorbar(image, ax=figure.axes, shrink=0.6, label="weight (grey: masked)")
    file = io.BytesIO()
    figure.savefig(file, format=form)
    return file.getvalue()


def read_rows(path, dtypes=("float32", "float16"), ranks=(2, 3)):
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as a .npy file: {error}") from None
    if not isinstance(array, np.ndarray):
        raise BadInput(
            f"{path}: is an archive; a single array, as numpy.save writes it, is expected"
        )
    if array.dtype.name not in dtypes or array.ndim not in ranks:
        raise BadInput(
            f"{path}: holds {array.dtype} of the shape {array.shape}; {' or '.join(dtypes)} of "
            f"{' or '.join(map(str, ranks))} dimensions is expected"
        )
    return (
        np.ascontiguousarray(array, np.float32)
        if array.dtype.kind == "f"
        else np.ascontiguousarray(array)
    )


def call_of(options):
    """The worked example's, as a packed layer describes it."""
    return {"causal": True, "window": options.window or 0, "softcap": options.softcap or 0}


class Call:
    """What the library computed at each point of a call, for one sequence."""

    def __init__(self, shape, call, options, inputs):
        self.shape, self.inputs, self.is_causal, self.window = (
            shape,
            inputs,
            bool(call.get("causal")),
            call.get("window") or 0,
        )
        n_q, n_kv = (
            len(inputs[0]),
            len(next(rows for rows in (inputs[1], inputs[2], inputs[0]) if rows is not None)),
        )
        heads, head_dim = shape["num_heads"], shape["head_dim"]
        if 0 in (n_q, n_kv):
            raise BadInput("the input has no rows; there is nothing to explain")
        if heads * n_q * n_kv > 2**27:
            raise BadInput(
                f"the input is too long to explain: {heads} heads with {n_q} rows and {n_kv} keys"
                f" have {heads * n_q * n_kv / 2**20:.0f} Mi scores; at most 128 Mi are allowed"
            )
        if self.is_causal and n_q > n_kv:
            raise BadInput(
                f"{count_text(n_q, 'row')} are more than {count_text(n_kv, 'key')}; in a causal"
                " call, the last row stands at the last key"
            )
        if self.window and not self.is_causal:
            raise BadInput(
                "the layer has a window but is not causal; a window needs a causal layer"
            )
        self.positions = np.arange(n_kv - n_q, n_kv), np.arange(n_kv)
        self.rope = self.rope_text = self.norm = None
        rope = dict(call.get("rope") or {})
        if rope:
            style, dims = rope.pop("style", "half"), rope.pop("dims", 0) or head_dim
            self.rope = Rope.tables(dims, max(n_q, n_kv), style=style, **rope)
            part = "" if dims == head_dim else f", {dims} elements"
            self.rope_text = f"{style}, base {rope['base']:.15g}{part}"
        self.norm_call = call.get("norm")
        if self.norm_call:
            row = lambda name: (
                np.array(self.norm_call[name], np.float32) if self.norm_call.get(name) else None
            )
            self.q_weight, self.k_weight = row("q_weight"), row("k_weight")
            self.norm = Norm(
                q_weight=self.q_weight,
                k_weight=self.k_weight,
                epsilon=self.norm_call["epsilon"],
                all_heads=self.norm_call.get("all_heads", False),
            )
        self.softcap, self.slopes = (
            call.get("softcap") or 0,
            alibi_slopes(heads) if options.alibi else None,
        )
        self.sinks = np.array(call["sinks"], np.float32) if call.get("sinks") else None
        self.mask = read_rows(options.mask, ("bool", "uint8"), (2,)) if options.mask else None
        has_score = self.softcap or not (self.slopes is self.sinks is self.mask is None)
        self.score = (
            ScoreOptions(
                softcap=self.softcap, alibi_slopes=self.slopes, sinks=self.sinks, mask=self.mask
            )
            if has_score
            else None
        )
        self.arguments = {
            "is_causal": self.is_causal,
            "window_left": self.window - 1 if self.window else None,
            "norm": self.norm,
            "rope": self.rope,
            "score": self.score,
            "want": steps,
        }

    def describe(self):
        said = ["normalised"] * bool(self.norm) + [f"rotated ({self.rope_text})"] * bool(self.rope)
        said += [f"window of {count_text(self.window, 'row')}"] * bool(self.window) + [
            f"softcap {self.softcap:g}"
        ] * bool(self.softcap)
        said += (
            ["ALiBi"] * (self.slopes is not None)
            + ["mask"] * (self.mask is not None)
            + ["sinks"] * (self.sinks is not None)
        )
        return ", ".join(["causal"] * self.is_causal + said)

    def run(self, layer):
        self.y, taps = layer.forward(*self.inputs, **self.arguments)
        self.adopt(taps)

    def adopt(self, taps):
        self.steps = taps
        self.q, self.k = taps["q"], taps["k"]

    def normalised(self, rows, weight):
        of = rows.reshape(len(rows), -1) if self.norm.all_heads else rows
        mean = np.mean(of.astype(np.float64) ** 2, axis=-1, keepdims=True)
        result = of / np.sqrt(mean + self.norm_call["epsilon"]) * (1 if weight is None else weight)
        return result.reshape(rows.shape).astype(np.float32)

    def rotated(self, rows, positions):
        cos, sin = (table[positions][:, None, :] for table in (self.rope.cos, self.rope.sin))
        pairs, result = self.rope.dims // 2, rows.copy()
        first, second = (
            (np.s_[..., 0 : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2])
            if self.rope.style
            else (np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs])
        )
        result[first], result[second] = (
            rows[first] * cos - rows[second] * sin,
            rows[second] * cos + rows[first] * sin,
        )
        return result + np.float32(0)  # no -0, as in the library


def explain(page, layer, weights, call, what):
    call.run(layer)
    shape, instruction_set = call.shape, layer.info(len(call.inputs[0]))["instruction_set"]
    set_name = next(
        name for name, number in instruction_set_names.items() if number == instruction_set
    )
    about = call.describe()
    page.headline(
        "Multi-head attention, step by step",
        f"{what}: {count_text(len(call.inputs[0]), 'token')} of width {shape['query_dim']},"
        f" {count_text(shape['num_heads'], 'head')} of width"
        f" {shape['head_dim']}{', ' if about else ''}{about}. Every number is what the library"
        " computed.",
        # In a line by itself: a name has no say in where other lines break.
        f"Instruction set: {set_name}.",
    )
    show_projection(page, weights, call)
    show_preparation(page, call)
    show_attention(page, call, shape["scale"])
    show_output(page, weights, call)


def show_projection(page, weights, call):
    """Steps 1 to 5: from the rows to queries, keys and values."""
    shape, (x, key, value), taps = call.shape, call.inputs, call.steps
    heads, kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    n_q, n_kv = len(taps["q"]), len(taps["k"])
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * shape["head_dim_v"]}
    is_self = key is None and value is None
    named = (("x" if is_self else "query input", x), ("key input", key), ("value input", value))
    page.step(
        1,
        "input",
        shape_text(1, n_q, shape["query_dim"]),
        "A row for each token.",
        [(title, rows) for title, rows in named if rows is not None],
    )
    if kv_heads == heads:
        about = (
            f"The {widths['q']} columns of the queries are shared out to"
            f" {count_text(heads, 'head')} of width {head_dim}: each can look for something else."
        )
    else:
        about = (
            f"The {heads} query heads are served by {count_text(kv_heads, 'key and value head')},"
            f" {heads // kv_heads} by each: fewer keys and values to compute and keep."
        )
    page.step(2, "heads", f"{widths['q']} / {heads} -> {head_dim}", about)
    fused = shape_text(shape["query_dim"], sum(widths.values()))
    parts = [(f"W_{which.upper()}", weights[f"w_{which}"]) for which in "qkv"] if weights else []
    if is_self:
        page.step(
            3,
            "fused projection",
            f"W_Q|W_K|W_V {fused}",
            "Side by side the three matrices are one, so that one product does the work of three.",
            parts,
        )
    else:
        shapes = ", ".join(
            shape_text(shape[inputs], widths[which])
            for which, inputs in zip("qkv", ("query_dim", "key_dim", "value_dim"))
        )
        page.step(
            3,
            "projections",
            shapes,
            "Queries, keys and values come from different inputs, each through its own matrix.",
            parts,
        )
    if weights is None:
        page.note("(packed: not shown)")
    rows = [
        shape_text(1, n_q, widths["q"]),
        shape_text(1, n_kv, widths["k"]),
        shape_text(1, n_kv, widths["v"]),
    ]
    results = f"3 x {rows[0]}" if len(set(rows)) == 1 else ", ".join(rows)
    page.step(
        4,
        "queries, keys, values",
        f"{shape_text(1, n_q, shape['query_dim'])} x {fused} -> {results}" if is_self else results,
        "What each token looks for, what it can be found by, and what it has to give.",
        [(which.upper(), taps[which].reshape(len(taps[which]), -1)) for which in "qkv"],
    )
    page.step(
        5,
        "split by heads",
        f"{rows[0]} -> {shape_text(1, n_q, heads, head_dim)}",
        "A head is a range of columns, so nothing moves. Shown are the queries, a row for each"
        " head.",
        blocks_of(n_q, lambda i: (f"token {i + 1}", taps["q"][i])),
    )


def show_preparation(page, call):
    """Steps 5a and 5b: what is done to queries and keys, where something is."""
    letters = iter("ab")

    def show(title, why, *before):
        blocks = [
            *before,
            ("Q", call.q.reshape(len(call.q), -1)),
            ("K", call.k.reshape(len(call.k), -1)),
        ]
        page.step(
            f"5{next(letters)}",
            title,
            f"{shape_text(1, *call.q.shape)}, {shape_text(1, *call.k.shape)}",
            why,
            blocks,
        )

    if call.norm:
        call.q, call.k = (
            call.normalised(call.q, call.q_weight),
            call.normalised(call.k, call.k_weight),
        )
        of = "all heads together" if call.norm.all_heads else "each head"
        weights = [
            (f"weight of {which}", weight[None])
            for which, weight in (("Q", call.q_weight), ("K", call.k_weight))
            if weight is not None
        ]
        show(
            "normalised",
            f"RMS norm of {of}: x / sqrt(mean of x^2 +"
            f" {call.norm_call['epsilon']:g}){' * weight' if weights else ''}.",
            *weights,
        )
    if call.rope:
        call.q, call.k = (
            call.rotated(rows, positions)
            for rows, positions in zip((call.q, call.k), call.positions)
        )
        show(
            "rotated",
            f"RoPE, {call.rope_text}: (a, b) -> (a cos - b sin, b cos + a sin), by an angle that"
            " grows with the position.",
        )


def sentence_about_masks(call):
    said = []
    if call.slopes is not None:
        said.append("ALiBi: s - slope * |j - i|, from the row's own place i to the key's, j.")
    unmasked = len(said)
    if call.is_causal:
        said.append("Causal: no token sees those that follow it.")
    if call.window:
        said.append(
            f"Window: none sees more than {count_text(call.window, 'token')}, itself included."
        )
    if call.mask is not None:
        said.append("None sees those where the mask is 0.")
    said.append(
        "-inf will become the weight 0."
        if len(said) > unmasked
        else "Nothing is masked: every token sees all."
    )
    return " ".join(said)


def show_attention(page, call, scale):
    """Steps 6 to 11: from the heads of q, k and v to the merged context."""
    taps, (n_q, heads, width), (n_kv, kv_heads, width_v) = (
        call.steps,
        call.q.shape,
        call.steps["v"].shape,
    )
    q_shape, k_shape, v_shape = (
        shape_text(1, rows.shape[1], rows.shape[0], rows.shape[2])
        for rows in (call.q, call.k, taps["v"])
    )
    score_shape, context_shape = shape_text(1, heads, n_q, n_kv), shape_text(1, heads, n_q, width_v)
    context_rows = shape_text(1, n_q, heads, width_v)
    of_heads = lambda name: blocks_of(heads, lambda i: (f"head {i + 1}", taps[name][i]))
    page.step(
        6,
        "group by heads",
        f"{shape_text(1, n_q, heads, width)} -> {q_shape}",
        "From here on each head works alone, on its own three matrices with a row for each token.",
        *(
            blocks_of(
                rows.shape[1], lambda i, name=name, rows=rows: (f"{name} head {i + 1}", rows[:, i])
            )
            for name, rows in (("Q", call.q), ("K", call.k), ("V", taps["v"]))
        ),
    )
    page.step(
        7,
        "attention scores",
        f"{q_shape} x {k_shape}^T -> {score_shape}",
        "Q K^T: row i, column j tells how well what token i looks for fits what token j can be"
        " found by.",
        of_heads("scores"),
    )
    is_default = np.float32(scale) == np.float32(1 / math.sqrt(width))
    how = f"1 / sqrt({width}) = {scale:.4f}" if is_default else f"the scale, {scale:g}"
    letters = iter("abcd")
    page.step(
        f"8{next(letters)}",
        "scaled",
        f"{score_shape} x {scale:.4f}",
        f"Times {how}, since sums over a head grow with its width.",
        of_heads("scaled_scores"),
    )
    if call.softcap:
        cap = f"{call.softcap:g}"
        page.step(
            f"8{next(letters)}",
            "softcap",
            score_shape,
            f"{cap} * tanh(s / {cap}): no score is beyond {cap}.",
            of_heads("softcapped_scores"),
        )
    page.step(
        f"8{next(letters)}",
        "masked",
        score_shape,
        sentence_about_masks(call),
        [("slopes", call.slopes[None])] if call.slopes is not None else [],
        of_heads("masked_scores"),
    )
    why = (
        "Softmax turns each row into shares that sum to 1."
        if call.sinks is None
        else (
            "Softmax with a sink: exp(s) / (sum of exp(s) + exp(sink)). A row sums to less than 1:"
            " the rest goes to no value."
        )
    )
    page.step(
        f"8{next(letters)}",
        "attention weights",
        score_shape,
        why,
        [("sinks", call.sinks[None])] if call.sinks is not None else [],
        of_heads("attention_weights"),
    )
    page.step(
        9,
        "context of each head",
        f"{score_shape} x {v_shape} -> {context_shape}",
        "Each token takes from the values in the shares of its row.",
        blocks_of(heads, lambda i: (f"head {i + 1}", taps["context"][:, i])),
    )
    page.step(
        10,
        "group by tokens",
        f"{context_shape} -> {context_rows}",
        "Back to the order of the input: what each token learnt, a row for each head.",
        blocks_of(n_q, lambda i: (f"token {i + 1}", taps["context"][i])),
    )
    page.step(
        11,
        "merge the heads",
        f"{context_rows} -> {shape_text(1, n_q, heads * width_v)}",
        "The heads of a token, side by side: again a row for each token.",
        [("context", taps["context"].reshape(n_q, -1))],
    )


def show_output(page, weights, call):
    n_q, merged, width = (
        len(call.y),
        call.shape["num_heads"] * call.shape["head_dim_v"],
        call.y.shape[-1],
    )
    if weights:
        page.step(
            12,
            "output",
            shape_text(1, n_q, merged),
            "This layer has no W_O: the merged heads are its output.",
            [("y", call.y)],
        )
        return
    page.step(
        12,
        "output projection",
        f"{shape_text(1, n_q, merged)} x {shape_text(merged, width)} ->"
        f" {shape_text(1, n_q, width)}",
        "W_O, if the packed layer has one, mixes what the heads have found.",
        [("y", call.y)],
    )


def maps_of(call):
    return [
        (weights, masked == -np.inf)
        for weights, masked in zip(call.steps["attention_weights"], call.steps["masked_scores"])
    ]


def words_of(words, option, rows, what):
    if words is None:
        return None
    names = [word if len(word) <= 20 else word[:20] + "…" for word in words.split()]
    if len(names) != rows:
        raise BadInput(
            f"{option}: {count_text(len(names), 'token')} for {count_text(rows, 'row')} of {what};"
            " one for each row is expected, separated by blanks"
        )
    return names


def make_parser():
    parser = argparse.ArgumentParser(
        prog="mha explain",
        description=__doc__,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    positive = lambda text: (
        int(text)
        if text.isdigit() and int(text) > 0
        else parser.error(f"a whole number of at least 1 is expected, not {text!r}")
    )
    for name, kind, text in (
        ("--packed", "FILE", "a layer written by mha pack"),
        (
            "--input",
            "FILE",
            (
                "the rows (.npy): (n, width), or (batch, n, width), of which only the first"
                " sequence is shown"
            ),
        ),
        ("--key", "FILE", "the rows for the keys, in cross-attention (default: the input)"),
        ("--value", "FILE", "the rows for the values (default: those for the keys)"),
        ("--mask", "FILE", "which keys each row attends to (.npy): (n, keys)"),
        (
            "--window",
            int,
            "in the worked example, each row attends to the last N rows, including itself",
        ),
        ("--softcap", float, "in the worked example, scores become S * tanh(score / S)"),
        ("--html", "FILE", "write a page with heat maps for a browser instead of text"),
        ("--picture", "FILE", "write only the heat maps (.png, .svg, .pdf)"),
        ("--tokens", "WORDS", 'label the rows on the maps: "the cat sleeps"'),
        ("--key-tokens", "WORDS", "label the rows of --key"),
    ):
        kind_of = positive if kind is int else kind if kind is float else str
        parser.add_argument(
            name,
            type=kind_of,
            metavar="N" if kind is int else "S" if kind is float else kind,
            help=text,
        )
    parser.add_argument(
        "--alibi",
        action="store_true",
        help="subtract a slope times the distance from the scores (ALiBi)",
    )
    return parser


def check(parser, options):
    if bool(options.packed) != bool(options.input):
        parser.error("--packed and --input are needed, or neither for the worked example")
    for name in "window", "softcap":
        if options.packed and getattr(options, name):
            parser.error(f"--{name}: the packed layer already sets it; leave it out")
    if not (options.html or options.picture) and (options.tokens or options.key_tokens):
        parser.error("--tokens: labels the maps of --html and --picture, but neither is given")
    if options.key_tokens and not (options.key or options.value):
        parser.error(
            "--key-tokens: the keys have the same tokens as the queries; leave it out, or give"
            " --key"
        )


def work(options):
    is_example = not options.packed
    if is_example:
        shape = {"query_dim": 6, "num_heads": 2}
        weights, inputs = (
            {name: matrix_of(text) for name, text in example_weights.items()},
            [matrix_of(example_x), None, None],
        )
        layer, call, what = (
            Layer(layout="in_out", **shape, **weights),
            call_of(options),
            "A worked example",
        )
    else:
        inputs = [
            read_rows(path) if path else None
            for path in (options.input, options.key, options.value)
        ]
        inputs = [
            (
                rows
                if rows is None or rows.ndim == 2
                else rows[0]
                if len(rows)
                else np.empty((0, rows.shape[-1]), np.float32)
            )
            for rows in inputs
        ]
        weights, (layer, call, _) = None, read(options.packed)
        what = f"The layer of {printable(options.packed)} on {printable(options.input)}"
    call = Call(layer.shape, call, options, inputs)
    n_q, n_kv = len(call.positions[0]), len(call.positions[1])
    rows = words_of(options.tokens, "--tokens", n_q, options.input or "the worked example")
    labels = (
        rows,
        (
            words_of(options.key_tokens, "--key-tokens", n_kv, options.key or options.value)
            if options.key or options.value
            else rows
        ),
    )
    page, calls = Page(), [call]
    explain(page, layer, weights, call, what)
    if is_example and call.describe() == "causal":
        q, k, v = (
            np.ascontiguousarray(matrix_of(text, 2, 3, 3).transpose(1, 0, 2))
            for text in grouped_example
        )
        smaller = Call({**layer.shape, "head_dim": 3}, {"causal": True}, options, inputs)
        _, taps = attention(
            q[None],
            k[None],
            v[None],
            is_causal=True,
            want=[name for name in steps if name not in "qkv"],
        )
        smaller.adopt({"q": q, "k": k, "v": v, **{name: array[0] for name, array in taps.items()}})
        page.headline(
            "The same steps on smaller numbers",
            "The scores above are so large that softmax gave nearly all weight to one token."
            " Trained layers keep them small, like those below: from step 6 on, with queries, keys"
            " and values made up for the purpose.",
        )
        show_attention(page, smaller, 1 / math.sqrt(3))
        page.note(
            "Here it ends: these smaller numbers come without an output projection, so that there"
            " is no step 12."
        )
        calls.append(smaller)
    if options.picture:
        form = os.path.splitext(options.picture)[1][1:] or "png"
        if form not in ("png", "svg", "pdf"):
            raise BadInput(
                f"--picture: {options.picture} ends in .{form}; .png, .svg or .pdf is expected"
            )
        write(options.picture, weights_picture(maps_of(calls[-1]), labels, form))
    if options.html:
        write(
            options.html, page.html(weights_picture(maps_of(one), labels) for one in calls).encode()
        )
    if not (options.html or options.picture):
        sys.stdout.write(
            page.text(shutil.get_terminal_size((120, 50)).columns if sys.stdout.isatty() else 120)
        )


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)
    print(f"{printable(path)}: {len(data) / 1024:.1f} KiB", file=sys.stderr)


def run(arguments):
    parser = make_parser()
    options = parser.parse_args(arguments)
    check(parser, options)
    work(options)
