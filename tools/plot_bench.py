#!/usr/bin/env python3
"""Draws results of tools/bench.sh as charts. See --help."""

import argparse
import math
import os
import pathlib
import re
import signal
import statistics
import sys
import tempfile
import textwrap

import bench_targets
from bench_targets import InputError
from drawing import Drawing

DESCRIPTION = """\
Draws results of tools/bench.sh --benchmark_format=json as a chart, an SVG that needs nothing else and follows the reader's light or dark
mode. Of repetitions the median counts. What was void or not measured is named, not drawn.

  share     a bar for each benchmark: its share of what the machine can do (of_limit)
  lengths   a curve for each kind of benchmark that was measured at several lengths (n, or past of decoding): its speed
  compare   two results: a bar for each benchmark that both have, how many times as fast the second one is

Exit status: 0 drawn, 2 wrong arguments or files.
"""
EXAMPLES = """\
Examples:
  tools/bench.sh --benchmark_out=build/result.json
  tools/plot_bench.py share build/result.json --filter '^layer_prefill/' --output build/share.svg
  tools/plot_bench.py lengths build/result.json --filter '^attention_prefill.*causal:1' --output build/lengths.svg
  tools/plot_bench.py compare build/before.json build/after.json --output build/compared.svg
"""

WIDTH, RIGHT = 980, 70
BAR, HEADLINE = 18, 32  # heights
LETTER = 6.6  # the width that a letter takes, at most on average
MOST_SHARE = 1.03  # beyond it the limit is wrong, and the run void
COLOURS = ["#e8590c", "#4263eb", "#0ca678", "#ae6ad8", "#d6336c", "#1098ad", "#f08c00", "#74b816", "#868e96", "#5c3d2e"]
FASTER, SLOWER, SAME = "#0ca678", "#e8590c", "#868e96"
NOISE = 0.02  # a difference below it is drawn as none
IDLE_LOAD = 0.5
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Result:
    """One file: the figures of its benchmarks by their names, in its order."""

    def __init__(self, path, pattern):
        self.path = path
        context, benchmarks = bench_targets.read(path)
        self.context, self.instruction_set = context, context["instruction_set"]
        results = bench_targets.Results(self.instruction_set)
        try:
            results.add(context, [in_seconds(entry) for entry in benchmarks])
        except (TypeError, KeyError, AttributeError, statistics.StatisticsError) as error:
            raise InputError(f"{path} is no result of mha_bench; make one by tools/bench.sh --benchmark_format=json") from error
        names = dict.fromkeys(entry.get("run_name", entry["name"]).removesuffix("/real_time") for entry in benchmarks)
        self.names = [name for name in names if pattern.search(name)]
        if not self.names:
            raise InputError(f"{path} has no benchmark whose name fits {pattern.pattern!r}; it has {', '.join(names) or 'none'}"[:600])
        self.figures = {name: results.figures[name][1] for name in self.names if name in results.figures and name not in results.errors}
        self.errors = results.errors

    def about(self):
        parts = [self.context.get("processor"), self.instruction_set, str(self.context.get("date", ""))[:10]]
        load = (self.context.get("load_avg") or [0])[0]
        busy = f". Other programs were running (load average {load:.1f} before), which falsifies the figures" if load > IDLE_LOAD else ""
        return ", ".join(part for part in parts if part) + busy

    def need(self, figure):
        """The names that have the figure."""
        found = [name for name in self.names if is_number(self.figures.get(name, {}).get(figure))]
        if not found:
            raise InputError(f"{self.path}: no benchmark has {figure}; " + (next(iter(self.errors.values()), "") or "nothing was measured"))
        return found


def in_seconds(entry):
    """Its times: of what unit they are gets lost in the medians."""
    times = {key: entry[key] * UNITS[entry.get("time_unit", "ns")] for key in ("cpu_time", "real_time") if key in entry}
    return {**entry, **times}


def is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def group_of(name):
    return name.split("/")[0]


def label_of(name):
    """B:1/n:128/D:256/H:4/causal:0 as "B 1, n 128, D 256, H 4, not causal"."""
    parts = [part for part in name.split("/")[1:] if part != "causal:1"]
    return ", ".join("not causal" if part == "causal:0" else part.replace(":", " ") for part in parts) or name


def bars(title, sentence, names, ticks, place, draw, captions):
    """Horizontal bars on one scale, under a headline for each group. ticks: {value: text}, the first one the axis; place(value): where on the
    scale, from 0 to 1; draw(drawing, name, x, y): the bar of a name, where x(value) is a place in the picture."""
    drawing, groups = Drawing(), {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    title = f"{title}: {', '.join(groups)}" if len(groups) <= 3 else title
    drawing.text(16, 28, title, "title")
    drawing.text(16, 46, sentence, "small")

    left, top = 30 + LETTER * max(len(label_of(name)) for name in names), 66

    def x(value):
        return left + (WIDTH - left - RIGHT) * place(value)

    bottom = top + BAR * len(names) + HEADLINE * len(groups)
    for index, (value, text) in enumerate(ticks.items()):
        drawing.vertical(x(value), top + 12, bottom, "grid" if index else "axis")
        drawing.text(x(value), bottom + 15, text, "small", "middle")
    y = top
    for group, members in groups.items():
        drawing.text(16, y + 21, group, "panel")
        y += HEADLINE
        for name in members:
            drawing.text(left - 10, y + 12, label_of(name), "", "end")
            draw(drawing, name, x, y)
            y += BAR
    return finished(drawing, bottom + 40, title, captions)


def finished(drawing, y, title, captions):
    for caption in captions:
        for line in textwrap.wrap(caption, 150):
            drawing.text(16, y, line, "small")
            y += 16
    return drawing.svg(WIDTH, y, title)


def share(result):
    result.need("of_limit")

    def draw(drawing, name, x, y):
        value = result.figures.get(name, {}).get("of_limit")
        if not is_number(value):
            drawing.text(x(0) + 5, y + 12, result.errors.get(name, "not measured"), "small")
            return
        drawing.bar(x(0), y + 2, x(min(value, MOST_SHARE)) - x(0), BAR - 4, COLOURS[0], f"{name}: {value:.1%} of the limit")
        drawing.text(x(min(value, MOST_SHARE)) + 6, y + 13, f"{value:.0%}", "own")

    return bars("Share of the machine's limit", "Longer is better. The limit is the time that the operations take at the multiply-add peak or, where "
                "that is longer, the bytes at the read bandwidth.", result.names, {percent / 100: f"{percent}%" for percent in (0, 25, 50, 75, 100)},
                lambda value: value / MOST_SHARE, draw, [result.about() + ". Peak and bandwidth are measured beside each benchmark."])


def compare(before, after):
    def times(name):
        """How many times as fast the second one is."""
        clock = "real_time" if group_of(name) == "threads" else "cpu_time"
        seconds = []
        for result in (before, after):
            figures = result.figures.get(name, {})
            if not is_number(figures.get(clock)) or figures[clock] <= 0:
                return None
            seconds.append(figures[clock])
        return seconds[0] / seconds[1]

    ratios = {name: times(name) for name in before.names if name in after.names}
    ratios = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not ratios:
        raise InputError(f"{before.path} and {after.path} have no benchmark in common that was measured in both")
    widest = max([1.1, *ratios.values(), *(1 / ratio for ratio in ratios.values())])

    def draw(drawing, name, x, y):
        ratio = ratios[name]
        colour = SAME if abs(math.log(ratio)) < NOISE else FASTER if ratio > 1 else SLOWER
        left, right = sorted((x(1), x(ratio)))
        drawing.bar(left, y + 2, max(right - left, 1), BAR - 4, colour, f"{name}: {ratio:.3f} times as fast")
        drawing.text(right + 6, y + 13, f"{ratio:.2f}x", "own")

    left_out = [name for name in dict.fromkeys([*before.names, *after.names]) if name not in ratios]
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios.values()))
    captions = [f"Before: {before.path}, {before.about()}.", f"After: {after.path}, {after.about()}.",
                f"Geometric mean of {len(ratios)}: {mean:.3f}x. Grey: less than {NOISE:.0%} apart."]
    if left_out:
        captions.append(f"Not measured in both: {', '.join(left_out)}.")
    ticks = {1: "1x", 1 / widest: f"{1 / widest:.2g}x", widest: f"{widest:.2g}x"}
    return bars("Times as fast as before", "To the right: faster. To the left: slower.", list(ratios), ticks,
                lambda value: 0.5 + 0.5 * math.log(value) / math.log(widest), draw, captions)


def kind_and_length(name):
    """("attention_prefill, head_dim 64", 1024): what stays the same, and how long; None where there is no length. Where the width of a head
    is named, the number of heads may follow the length."""
    parts = dict(part.split(":", 1) for part in name.split("/")[1:] if ":" in part)
    length = next((parts.pop(key) for key in ("n", "past") if re.fullmatch(r"[0-9]+", parts.get(key, ""))), None)
    if length is None:
        return None
    if "head_dim" in parts:
        parts.pop("D", None), parts.pop("H", None)
    plain = "/".join([group_of(name), *(part for part in name.split("/")[1:] if ":" not in part), *(":".join(item) for item in parts.items())])
    return f"{group_of(name)}, {label_of(plain)}", int(length)


def lengths(result, figure):
    curves = {}
    for name in result.need(figure):
        found = kind_and_length(name)
        if found:
            curves.setdefault(found[0], {})[found[1]] = name
    curves = {kind: dict(sorted(points.items())) for kind, points in curves.items() if len(points) > 1}
    if not curves:
        raise InputError(f"{result.path}: no benchmark was measured at several lengths (n: or past: in its name)")

    def value(name):
        return result.figures[name][figure]

    xs = sorted({length for points in curves.values() for length in points})
    highest = max(value(name) for points in curves.values() for name in points.values())
    step = next(step for step in (factor * 10.0 ** power for power in range(-12, 13) for factor in (1, 2, 5)) if highest / step <= 6)
    most = step * math.ceil(highest / step)
    drawing, left, right, top, height = Drawing(), 70, WIDTH - 30, 70, 360
    title = f"{'Share of the limit' if figure == 'of_limit' else figure} against the length"
    drawing.text(16, 28, title, "title")
    drawing.text(16, 46, "Higher is better. The length is the number of rows (n), of decoding the number of positions in the cache (past).", "small")

    def place(length, number):
        share_of_width = math.log(length / xs[0]) / math.log(xs[-1] / xs[0])
        return left + (right - left) * share_of_width, top + height * (1 - number / most)

    for index in range(round(most / step) + 1):
        y = place(xs[0], index * step)[1]
        drawing.horizontal(left, right, y, "grid" if index else "axis")
        drawing.text(left - 8, y + 4, f"{index * step:.0%}" if figure == "of_limit" else f"{index * step:g}", "small", "end")
    last = -math.inf
    for length in xs:
        x = place(length, 0)[0]
        if x > last + 44:
            drawing.text(x, top + height + 16, str(length), "small", "middle")
            last = x
    y = top + height + 44
    for index, (kind, points) in enumerate(curves.items()):
        colour, dashes = COLOURS[index % len(COLOURS)], ["", "6 3", "2 3"][index // len(COLOURS) % 3]
        drawing.curve([place(length, value(name)) for length, name in points.items()], colour, dashes)
        for length, name in points.items():
            drawing.dot(*place(length, value(name)), colour, f"{name}: {value(name):.3g} {figure}")
        drawing.curve([(16, y - 4), (40, y - 4)], colour, dashes)
        drawing.text(48, y, kind)
        y += 18
    return finished(drawing, y + 14, title, [result.about() + "."])


def write(text, path):
    """To the file as a whole or not at all; to standard output where there is none."""
    if path is None:
        sys.stdout.write(text)
        return
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".plot-", delete=False, encoding="utf-8") as file:
            temporary = pathlib.Path(file.name)
            file.write(text)
        temporary.chmod(0o666 & ~umask())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def pattern(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def main():
    parser = argparse.ArgumentParser(description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chart", choices=("share", "lengths", "compare"))
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="what tools/bench.sh --benchmark_format=json wrote; two for compare")
    parser.add_argument("--filter", type=pattern, default=pattern(""), metavar="REGEX", help="only benchmarks with such a name")
    parser.add_argument("--figure", default="GFLOP/s", help="what lengths draws: GFLOP/s (default), GB/s, of_limit or another of the results")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="where the chart goes (.svg); default standard output")
    arguments = parser.parse_args()

    needed = 2 if arguments.chart == "compare" else 1
    if len(arguments.results) != needed:
        raise InputError(f"{arguments.chart} takes {'two results' if needed == 2 else 'one result'}, not {len(arguments.results)}")
    results = [Result(path, arguments.filter) for path in arguments.results]
    if arguments.chart == "share":
        chart = share(*results)
    elif arguments.chart == "compare":
        chart = compare(*results)
    else:
        chart = lengths(*results, arguments.figure)
    write(chart, arguments.output)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other commands
    try:
        main()
    except InputError as error:
        print(f"tools/plot_bench.py: {error}", file=sys.stderr)
        sys.exit(2)
