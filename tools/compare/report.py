"""The measurements of tools/compare.py as tables (Markdown, CSV) and as a chart (SVG).

results = {"about": {"date", "machine", "commit", "rounds", "load": average before, "command"},
           "libraries": {library: {"name", "version", "detail"}},
           "suites": [{"threads", "cells": [{"shape": [batch, n, width, heads, is_causal], "operations": of one call,
                                             "peaks": [GFLOP/s in each round], "reference": mha's difference from double precision or None,
                                             "rows": [{"library", "form", "label", "seconds": [in each round],
                                                       "difference": from mha or None, "reason": why it is not measured, or None,
                                                       "disagrees": True only where that is the reason}]}]}]}

A cell of decoding has "shape": {"width", "heads", "kv_heads", "past"}, "operations": the bytes of weights and cache, "peaks": [GB/s in each
round], and "rotated": the bytes that its calls took turns through. All cells are of one kind.
"""

import csv
import io
import json
import re
import statistics
import textwrap

from drawing import Drawing

names = ["compare.md", "compare.csv", "compare.svg", "compare.json"]
idle_load = 0.5
goal, goal_rows = 1.4, 1024  # the library's aim: so many times as fast as the best of the others, from so many rows on

# The chart: mha in a colour of its own, the forms of one library in shades of one.
colours = {"mha": "#e8590c", "PyTorch, plain class": "#a5b8f3", "PyTorch, nn.MultiheadAttention": "#748ffc",
           "PyTorch, scaled_dot_product_attention": "#4263eb", "ONNX Runtime": "#0ca678", "OpenVINO": "#ae6ad8",
           "system's PyTorch, plain class": "#ced4da", "system's PyTorch, nn.MultiheadAttention": "#adb5bd",
           "system's PyTorch, scaled_dot_product_attention": "#868e96"}


def write(results, folder):
    texts = [markdown(results), table(results), chart(results), json.dumps(results, indent=1) + "\n"]
    for name, text in zip(names, texts):
        (folder / name).write_text(text)


# ---- figures


def is_decode(shape):
    return isinstance(shape, dict)


def of_decoding(results):
    return any(is_decode(cell["shape"]) for suite in results["suites"] for cell in suite["cells"])


def decode_bytes(shape):
    """Of weights and cache, each read once."""
    width, kv_width = shape["width"], shape["width"] // shape["heads"] * shape["kv_heads"]
    return 4 * (2 * width * (width + kv_width) + 2 * (shape["past"] + 1) * kv_width)


def is_measured(row):
    return bool(row["seconds"]) and not row["reason"]


def seconds(row):
    return statistics.median(row["seconds"])


def share(cell, row):
    """Of the multiply-add peak, by the work that the layer needs: nobody is credited with computing masked pairs. Of decoding: of the
    bandwidth."""
    return statistics.median(cell["operations"] / (1e9 * peak * time) for peak, time in zip(cell["peaks"], row["seconds"]))


def columns(cell):
    """{label: its row}, of several forms the fastest; where none is measured, one that says why."""
    best = {}
    for row in cell["rows"]:
        other = best.get(row["label"])
        if not other or is_measured(row) and (not is_measured(other) or seconds(row) < seconds(other)):
            best[row["label"]] = row
    return best


def lead(cell):
    """(times as fast as the best of the others, that one's row), or None. Compared round by round, since machines drift."""
    own, *others = columns(cell).values()
    others = [row for row in others if is_measured(row)]
    if not others:
        return None
    best = min(others, key=seconds)
    return statistics.median(theirs / ours for theirs, ours in zip(best["seconds"], own["seconds"])), best


def is_probe(cell):
    """The shape with hardly any arithmetic, which shows what a call costs."""
    return cell["operations"] < 1e4


def title(suite):
    return "one thread" if suite["threads"] == 1 else f"{suite['threads']} threads"


def shape_name(shape):
    if is_decode(shape):
        return f"({', '.join(map(str, shape.values()))})"
    *numbers, is_causal = shape
    return f"({', '.join(map(str, numbers))})" + ("" if is_causal else " uncausal")


def milliseconds(row):
    return f"{1e3 * seconds(row):.3g} ms" if seconds(row) < 1 else f"{1e3 * seconds(row):.0f} ms"


def versions(results):
    text = ", ".join(f"{about['name']} {about['version']}{about['detail'] and ' (' + about['detail'] + ')'}"
                     for about in results["libraries"].values())
    return text + (f"; mha at commit {results['about']['commit']}" if results["about"]["commit"] else "")


# ---- Markdown


def markdown(results):
    about = results["about"]
    kind = ["One attention layer, float32, one row over a KV cache: its key and value are put behind those in the cache, and it attends to all.",
            "Shapes are (width, heads, kv heads, rows in the cache before). Each cell: the time of a call, and the share of the bandwidth that",
            "reading all weights and the whole cache once amounts to, measured on the same cores in the same round. Calls take turns through",
            f"equal layers with caches of their own ({rotated(results)}), the same for each library.",
            f"Medians of {about['rounds']} rounds in which"] if of_decoding(results) else [
             "One attention layer, float32, from x to y through W_Q, W_K, W_V and W_O. Shapes are (batch, rows, width, heads), causal",
             "unless it says otherwise. Each cell: the time of a call, and the share of the peak of fused multiply-adds that the same",
             f"cores reached in the same round; only the pairs that attend count as work. Medians of {about['rounds']} rounds in which"]
    lines = ["# mha beside other libraries", "",
             f"{about['machine']}. {about['date']}. {versions(results)}.", "", *kind,
             "the libraries took turns; one thread: processor time, several threads: wall time. mha is called from C, the others from",
             "Python. Reproduced by", "",
             "```sh", about["command"], "```", ""]
    if about["load"] > idle_load:
        lines += [f"Other programs were running (load average {about['load']:.1f} before), which falsifies above all the figures of "
                  "several threads.", ""]
    for suite in results["suites"]:
        lines += [f"## {title(suite).capitalize()}", "", *tables(suite), *probe_sentences(suite), *reasons(suite), ""]
    lines += ["## How it stands", "", *verdict(results), ""]
    return filled("\n".join(lines))


def filled(text, width=100):
    """The text with paragraphs and items of lists in lines of at most this width; tables, headings and code stay as they are."""
    blocks = []
    for block in text.split("\n\n"):
        if not re.match(r"\s*(\||#|```)", block):
            items = re.split(r"\n(?=- )", block)
            block = "\n".join(textwrap.fill(" ".join(item.split()), width, subsequent_indent="  " * item.startswith("- "), break_long_words=False,
                                            break_on_hyphens=False) for item in items) + "\n" * block.endswith("\n")
        blocks.append(block)
    return "\n\n".join(blocks)


def rotated(results):
    cells = [cell for suite in results["suites"] for cell in suite["cells"]]
    texts = {shape_name(cell["shape"]): f"{cell['rotated'] / 1e6:.0f} MB for {shape_name(cell['shape'])}" for cell in cells}
    return ", ".join(texts.values())


def tables(suite):
    cells = [cell for cell in suite["cells"] if not is_probe(cell)]
    if not cells:
        return []
    labels = list(columns(cells[0]))
    limit = "bandwidth, GB/s" if is_decode(cells[0]["shape"]) else "peak, GFLOP/s"
    lines = [f"| shape | {limit} | {' | '.join(labels)} | mha against the best of them |", "|---" * (len(labels) + 3) + "|"]
    for cell in cells:
        peak, best = statistics.median(cell["peaks"]), lead(cell)
        fields = [shape_name(cell["shape"]), f"{peak:.0f}" if peak >= 100 else f"{peak:.3g}"]
        fields += [f"{milliseconds(row)}, {share(cell, row):.0%}" if is_measured(row) else "not measured" for row in columns(cell).values()]
        fields.append(f"{best[0]:.2f}x ({best[1]['label']})" if best else "")
        lines.append(f"| {' | '.join(fields)} |")
    return lines + [""]


def probe_sentences(suite):
    lines = []
    for cell in suite["cells"]:
        if is_probe(cell):
            times = [f"{label} {1e6 * seconds(row):.3g} us" for label, row in columns(cell).items() if is_measured(row)]
            lines += [f"A layer with hardly any arithmetic, {shape_name(cell['shape'])}, shows what a call costs: {', '.join(times)}.", ""]
    return lines


def reasons(suite):
    """Which forms were taken, how far the results differ, and what was not measured."""
    lines = []
    by_label = {}
    for cell in suite["cells"]:
        for row in cell["rows"]:
            by_label.setdefault(row["label"], []).append((cell, row))
    for label, entries in by_label.items():
        if len({row["form"] for _, row in entries}) > 1:
            chosen = {}
            for cell, row in entries:
                if is_measured(row) and columns(cell)[label] is row and not is_probe(cell):
                    chosen.setdefault(row["form"], []).append(shape_name(cell["shape"]))
            if chosen:
                texts = [f"{form} was the faster at {', '.join(where)}" for form, where in chosen.items()]
                lines.append(f"- {label}: {'; '.join(texts)}.")
    differences = {}
    for label, entries in by_label.items():
        for _, row in entries:
            if is_measured(row) and row["library"] != "mha":
                differences[label] = max(row["difference"], differences.get(label, 0))
    if differences:
        texts = [f"{label} {value:.1g}" for label, value in differences.items()]
        lines.append(f"- The largest difference from mha, as a share of the largest element of y: {', '.join(texts)}.")
    references = [cell["reference"] for cell in suite["cells"] if cell["reference"] is not None]
    if references:
        lines.append(f"- mha differs from the same layer in double precision by {max(references):.1g} of the largest element at most, at "
                     f"the {len(references)} shapes with the least work.")
    for label, entries in by_label.items():
        why = {}
        for cell, row in entries:
            if row["reason"]:
                why.setdefault((row["form"], row["reason"]), []).append(cell)
        for (form, reason), cells in why.items():
            where = "" if len(cells) == len(suite["cells"]) else " at " + ", ".join(shape_name(cell["shape"]) for cell in cells)
            lines.append(f"- {label}{f' ({form})' if form not in label and form != 'class' else ''} was not measured{where}: {reason}.")
    for cell in suite["cells"]:
        for row in cell["rows"]:
            if is_measured(row) and share(cell, row) > 1.03:
                lines.append(f"- {row['label']} at {shape_name(cell['shape'])} reads {share(cell, row):.0%} of the peak, which cannot be: "
                             "the peak was disturbed. Measure again.")
    return lines


def verdict(results):
    behind, short, ahead = [], [], 0
    for suite in results["suites"]:
        for cell in suite["cells"]:
            best = lead(cell)
            if is_probe(cell) or not best:
                continue
            ratio, row = best
            where = f"{shape_name(cell['shape'])} on {title(suite)}: {ratio:.2f} times as fast as {row['label']}"
            ahead += ratio > 1
            if ratio <= 1:
                behind.append(where)
            elif not is_decode(cell["shape"]) and cell["shape"][1] >= goal_rows and ratio < goal:
                short.append(where)
    if not ahead and not behind:
        return ["Nothing was measured beside mha."]
    lines = [f"mha is the fastest in {ahead} of {ahead + len(behind)} cases (a shape at a number of threads)."]
    if behind:
        lines += ["", "Not the fastest:", "", *(f"- {where}" for where in behind)]
    if short:
        lines += ["", f"Ahead, but by less than the aim of {goal} times from {goal_rows} rows on:", "", *(f"- {where}" for where in short)]
    return lines


# ---- CSV


def numbers_of(shape):
    return shape.values() if is_decode(shape) else shape


def table(results):
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    shape, rate, share_of = ["batch", "n", "width", "heads", "is_causal"], ["gflops", "peak_gflops"], "share_of_peak"
    if of_decoding(results):
        shape, rate, share_of = ["width", "heads", "kv_heads", "past"], ["gbytes_per_second", "bandwidth"], "share_of_bandwidth"
    writer.writerow(["threads", *shape, "library", "version", "form", "ms_median", "ms_least", "ms_most", *rate, share_of,
                     "difference_from_mha", "not_measured_because"])
    for suite in results["suites"]:
        for cell in suite["cells"]:
            for row in cell["rows"]:
                fields = [suite["threads"], *numbers_of(cell["shape"]), row["library"], results["libraries"].get(row["library"], {}).get("version", ""),
                          row["form"]]
                if is_measured(row):
                    fields += [f"{1e3 * value:.6g}" for value in (seconds(row), min(row["seconds"]), max(row["seconds"]))]
                    fields += [f"{cell['operations'] / seconds(row) / 1e9:.4g}", f"{statistics.median(cell['peaks']):.4g}",
                               f"{share(cell, row):.4f}", f"{row['difference']:.2g}", ""]
                else:
                    fields += [""] * 7 + [row["reason"]]
                writer.writerow(fields)
    return text.getvalue()


# ---- SVG


def chart(results):
    """A panel for each number of threads; in it a group of bars for each shape, mha's the thick one."""
    width, left, right, gap = 980, 148, 16, 62
    own_height, bar_height, group_gap = 11, 6, 12
    drawing = Drawing()
    suites = [dict(suite, cells=[cell for cell in suite["cells"] if not is_probe(cell)]) for suite in results["suites"]]
    cells = suites[0]["cells"] if suites else []
    labels = [label for label in dict.fromkeys(label for suite in suites for cell in suite["cells"] for label in columns(cell))
              if any(is_measured(columns(cell)[label]) for suite in suites for cell in suite["cells"])]
    description = "Speed of one attention layer, float32: share of the multiply-add peak"
    if of_decoding(results):
        description = "Speed of one attention layer on one row over a KV cache, float32: share of the bandwidth"
    drawing.text(16, 28, description, "title")
    drawing.text(16, 46, "Longer is better. Behind mha's bars: its share, and how many times as fast it is as the best of the others.",
                 "small")

    x, y = 16, 70
    for label in labels:
        if x + 24 + 6.6 * len(label) > width:
            x, y = 16, y + 19
        drawing.bar(x, y - 9, 11, 11, colours[label], label)
        drawing.text(x + 16, y, label)
        x += 36 + 6.6 * len(label)

    group_height = own_height + bar_height * (len(labels) - 1) + group_gap
    top = y + 44
    bottom = top + group_height * len(cells)
    panel_width = (width - left - right - gap * len(suites)) / max(1, len(suites))
    for i, cell in enumerate(cells):
        middle = top + i * group_height + (group_height - group_gap) / 2
        *numbers, is_causal = [*numbers_of(cell["shape"]), 1][:5]
        drawing.text(left - 10, middle, shape_name([*numbers, 1]), "", "end")
        if not is_causal:
            drawing.text(left - 10, middle + 13, "not causal", "small", "end")
    for number, suite in enumerate(suites):
        start = left + number * (panel_width + gap)
        drawing.text(start, top - 14, title(suite).capitalize(), "panel")
        for percent in (0, 25, 50, 75, 100):
            at = start + panel_width * percent / 100
            drawing.vertical(at, top - 6, bottom, "grid" if percent else "axis")
            drawing.text(at, bottom + 14, f"{percent}%", "small", "middle")
        for i, cell in enumerate(suite["cells"]):
            y = top + i * group_height
            by_label = columns(cell)
            for label in labels:
                row, height = by_label[label], own_height if label == "mha" else bar_height
                if is_measured(row):
                    length = panel_width * share(cell, row)
                    drawing.bar(start, y, length, height - 1, colours[label], f"{label}: {milliseconds(row)}, {share(cell, row):.0%}")
                    if label == "mha":
                        best = lead(cell)
                        drawing.text(start + length + 5, y + 9, f"{share(cell, row):.0%}" + (f", {best[0]:.2f}x" if best else ""), "own")
                else:
                    drawing.text(start + 3, y + height, "not measured", "small")
                y += height

    about = results["about"]
    caption = ["Shapes: (width, heads, kv heads, rows in the cache). The bandwidth is that of reads on the same cores in the same round."
               if of_decoding(results) else
               "Shapes: (batch, rows, width, heads). The peak is that of fused multiply-adds on the same cores in the same round; only the "
               "pairs that attend count as work.",
               f"{about['machine']}. {about['date']}. Medians of {about['rounds']} rounds.", f"{versions(results)}."]
    y = bottom + 40
    for line in caption:
        drawing.text(16, y, line, "small")
        y += 16
    return drawing.svg(width, y, description)
