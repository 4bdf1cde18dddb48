"""The measurements of tools/compare.py --arithmetic as tables (Markdown, CSV) and as a chart (SVG), time and error side by side.

Results are as in report.py. Each row has "errors": {"normal", "outliers"}, as far as they are known; operations and differences have none.
"""

import csv
import io
import json
import math
import statistics

from drawing import Drawing
from report import columns, filled, idle_load, is_measured, milliseconds, names, seconds, shape_name, title, versions

kinds = ["normal", "outliers"]
of_floats = 1e-5  # errors below are those of float32

# Shades of one colour for a library, the darker the fewer bits.
colours = {"mha f32": "#ffc078", "mha int16": "#fd7e14", "mha int8": "#d9480f", "mha int16, attention too": "#f06595",
           "mha int8, attention too": "#a61e4d", "mha int16, int4 weights": "#ffa94d", "mha int8, int4 weights": "#862e00",
           "PyTorch f32": "#a5b8f3", "PyTorch bf16": "#748ffc", "PyTorch int8": "#3b5bdb",
           "ONNX Runtime f32": "#8ce99a", "ONNX Runtime int8": "#2b8a3e", "ONNX Runtime QAttention": "#66a80f", "OpenVINO f32": "#d8b5f0",
           "OpenVINO bf16": "#ae6ad8", "OpenVINO int8": "#862e9c", "system's PyTorch f32": "#ced4da", "system's PyTorch bf16": "#adb5bd",
           "system's PyTorch int8": "#868e96"}


def write(results, folder):
    texts = [markdown(results), table(results), chart(results), json.dumps(results, indent=1) + "\n"]
    for name, text in zip(names, texts):
        (folder / name).write_text(text)


def share_of_time(cell, row):
    """Of mha's float32, compared round by round, since machines drift."""
    return statistics.median(theirs / ours for theirs, ours in zip(row["seconds"], cell["rows"][0]["seconds"]))


def spread(row):
    """How far the rounds lie apart, as a share of their median."""
    return (max(row["seconds"]) - min(row["seconds"])) / seconds(row)


# ---- Markdown


def markdown(results):
    about = results["about"]
    lines = ["# Arithmetics beside each other", "", f"{about['machine']}. {about['date']}. {versions(results)}.", "",
             "One causal attention layer, from x to y through W_Q, W_K, W_V and W_O. Shapes are (batch, rows, width, heads). Each cell: the",
             "median time of a call; the median, over the rounds, of its share of the time of mha in float32 in the same round; and in brackets two errors, without and with outliers. An error is",
             "the root of the mean square of the differences from the layer in double precision, in units of that of the result. Rows and",
             "weights are normally distributed; outliers are channels of the rows, one in 256, 20 times as large.", "",
             f"Medians of {about['rounds']} rounds in which the libraries took turns; one thread: processor time, several threads: wall time.",
             "mha is called from C, the others from Python. PyTorch int8 and ONNX Runtime int8 are quantize_dynamic, whose ranges are those",
             "of each call; QAttention likewise. OpenVINO int8 is NNCF's quantize, for transformers, whose ranges were measured before on the",
             "same rows. Reproduced by", "", "```sh", about["command"], "```", ""]
    if about["load"] > idle_load:
        lines += [f"Other programs were running (load average {about['load']:.1f} before).", ""]
    for suite in results["suites"]:
        lines += [f"## {title(suite).capitalize()}", "", *suite_table(suite), *notes(suite), ""]
    return filled("\n".join(lines))


def suite_table(suite):
    cells = suite["cells"]
    if not cells:
        return []
    lines = [f"| | {' | '.join(shape_name(cell['shape']) for cell in cells)} |", "|---" * (len(cells) + 1) + "|"]
    for label in columns(cells[0]):
        lines.append(f"| {label} | {' | '.join(field(cell, columns(cell)[label]) for cell in cells)} |")
    return lines + [""]


def field(cell, row):
    if not is_measured(row):
        return "not measured"
    return f"{milliseconds(row)}, {share_of_time(cell, row):.0%} [{', '.join(number(row['errors'][kind]) for kind in kinds)}]"


def number(error):
    return f"{error:.1e}".replace("e-0", "e-")


def notes(suite):
    lines, why = [], {}
    for cell in suite["cells"]:
        measured = [row for row in cell["rows"] if is_measured(row)]
        fewer = [row for row in columns(cell).values() if is_measured(row) and not row["label"].endswith(" f32")]
        if fewer:
            best = min(fewer, key=seconds)
            lines.append(f"- {shape_name(cell['shape'])}: the fastest is {best['label']}, {share_of_time(cell, best):.0%} of the time of mha in "
                         f"float32. Rounds of one form lie {statistics.median(map(spread, measured)):.0%} apart in the median, "
                         f"{max(map(spread, measured)):.0%} at most.")
        for row in cell["rows"]:
            if row["reason"]:
                why.setdefault((row["label"], row["form"], row["reason"]), []).append(cell)
    for (label, form, reason), cells in why.items():
        where = "" if len(cells) == len(suite["cells"]) else " at " + ", ".join(shape_name(cell["shape"]) for cell in cells)
        lines.append(f"- {label} ({form}) was not measured{where}: {reason.removeprefix('RuntimeError: ')}.")
    return lines


# ---- CSV


def table(results):
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["threads", "batch", "n", "width", "heads", "library", "version", "form", "ms_median", "ms_least", "ms_most",
                     "share_of_time_of_mha_f32", *(f"error_{kind}" for kind in kinds), "not_measured_because"])
    for suite in results["suites"]:
        for cell in suite["cells"]:
            for row in cell["rows"]:
                fields = [suite["threads"], *cell["shape"][:4], row["library"], results["libraries"].get(row["library"], {}).get("version", ""),
                          row["form"]]
                if is_measured(row):
                    fields += [f"{1e3 * value:.6g}" for value in (seconds(row), min(row["seconds"]), max(row["seconds"]))]
                    fields += [f"{share_of_time(cell, row):.4f}", *(f"{row['errors'][kind]:.3g}" for kind in kinds), ""]
                else:
                    fields += [""] * 6 + [row["reason"]]
                writer.writerow(fields)
    return text.getvalue()


# ---- SVG


def chart(results):
    """A panel for each shape: to the right the time, upwards the error, from that without outliers (the dot) to that with them. What float32
    has is on the axis: a scale that reached down to it would leave little of itself to the others."""
    width, left, right, gap, height, columns_of_panels = 980, 52, 16, 46, 250, 3
    drawing = Drawing()
    cells = [(suite, cell) for suite in results["suites"] for cell in suite["cells"]]
    measured = [[row for row in columns(cell).values() if is_measured(row)] for _, cell in cells]
    labels = [label for label in colours if any(row["label"] == label for rows in measured for row in rows)]
    description = "What arithmetic in fewer bits costs and buys: time and error of one causal attention layer"
    drawing.text(16, 28, description, "title")
    drawing.text(16, 46, "Left is faster, low is better. A line leads from the error on normally distributed rows (the dot) to that with outliers.",
                 "small")
    x, y = 16, 70
    for label in labels:
        if x + 24 + 6.6 * len(label) > width:
            x, y = 16, y + 19
        drawing.bar(x, y - 9, 11, 11, colours[label], label)
        drawing.text(x + 16, y, label)
        x += 36 + 6.6 * len(label)

    times = [share_of_time(cell, row) for (_, cell), rows in zip(cells, measured) for row in rows]
    errors = [row["errors"][kind] for rows in measured for row in rows for kind in kinds if row["errors"][kind] > of_floats]
    most = max(1.25, 0.25 * math.ceil(4 * max(times, default=1)))
    lowest, highest = (math.floor(math.log10(min(errors, default=0.1))), math.ceil(math.log10(max(errors, default=1))))
    panel_width = (width - left - right) / columns_of_panels - gap
    top = y
    for number_of_panel, ((suite, cell), rows) in enumerate(zip(cells, measured)):
        start = left + number_of_panel % columns_of_panels * (panel_width + gap)
        top = y + 44 + number_of_panel // columns_of_panels * (height + 62)

        def place(time, error):
            share = (math.log10(max(error, 10.0**lowest)) - lowest) / max(1, highest - lowest)
            return start + panel_width * time / most, top + height * (1 - share)

        drawing.text(start, top - 12, f"{shape_name(cell['shape'])}{'' if suite['threads'] == 1 else ', ' + title(suite)}", "panel")
        for percent in range(0, round(100 * most) + 1, 25):
            at = place(percent / 100, 1)[0]
            drawing.vertical(at, top, top + height, "axis" if percent in (0, 100) else "grid")
            if percent % 50 == 0:
                drawing.text(at, top + height + 14, f"{percent}%", "small", "middle")
        for power in range(lowest, highest + 1):
            at = place(0, 10.0**power)[1]
            drawing.horizontal(start, start + panel_width, at, "axis" if power == lowest else "grid")
            drawing.text(start - 6, at + 4, f"{100 * 10.0**power:g}%" if power > lowest else "f32", "small", "end")
        for row in rows:
            time, ends = share_of_time(cell, row), [row["errors"][kind] for kind in kinds]
            tip = f"{row['label']}: {milliseconds(row)}, {time:.0%}; error {number(ends[0])}, with outliers {number(ends[1])}"
            drawing.curve([place(time, error) for error in ends], colours[row["label"]])
            drawing.dot(*place(time, ends[0]), colours[row["label"]], tip)

    about = results["about"]
    y = top + height + 38
    for line in ("To the right: the time of a call, of that of mha in float32 in the same rounds. Upwards: the rms error, relative to the result; "
                 "that of float32 is about 1e-6.",
                 f"{about['machine']}. {about['date']}. Medians of {about['rounds']} rounds.", f"{versions(results)}."):
        drawing.text(16, y, line, "small")
        y += 16
    return drawing.svg(width, y, description)
