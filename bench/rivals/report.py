#!/usr/bin/env python3
"""Writes the results in build/rivals as tables into src/docs/data, and what the pages show of them:
tables between the marks <!-- figures: NAME --> and <!-- end of figures -->, and pictures.

Examples, after comparisons such as bench/rivals/layers.py:
  build/rivals/venv/bin/python bench/rivals/report.py
  python3 bench/rivals/report.py --check    whether the pages show the figures of the data
"""

import argparse
import pathlib
import statistics
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
import decoders
import llama
import models
import onnx_models
from layers import exact, forms, shapes, work_of
from session import (
    digits,
    load,
    median,
    merge_data,
    processor,
    ratio,
    read_data,
    root,
    run_main,
    say,
    source,
    work,
)

docs = root / "src" / "docs"
colours = {
    "mha": "#e8590c",
    "PyTorch": "#4263eb",
    "ONNX Runtime": "#0ca678",
    "OpenVINO": "#ae6ad8",
    "off": "#ced4da",
    "on": "#868e96",
    "off plain": "#a5d8ff",
    "on plain": "#74c0fc",
}


# ---- results -> tables


def milliseconds(seconds):
    return "" if seconds is None else digits(1e3 * seconds)


def time_of(result, name):
    return milliseconds(median(result, name))


def name_of(shape):
    batch, n, width, heads, kv_heads, causal, past = shape[:7]
    if past:
        return f"{width}, {heads}, {kv_heads}, {past}"
    return f"{batch}, {n}, {width}, {heads}" + ("" if causal else " uncausal")


def error_of(result, name, kind="normal"):
    error = result["errors"].get(name, {}).get(kind)
    return "" if error is None else f"{error:.1e}".replace("e-0", "e-")


def best(result, library):
    """The fastest form of a library in float32; None where none was measured."""
    names = [
        f"{library} {form}"
        for form, bound in forms[result["key"][0]][library].items()
        if bound == exact and median(result, f"{library} {form}")
    ]
    return min(names, key=lambda name: median(result, name), default=None)


def share(result):
    """Of the multiply-add peak; over a cache, of the bandwidth."""
    needed = work_of(result["key"][1])[result["key"][1][6] > 0]
    limits, times = (result["seconds"][name]["call"] for name in ("limit", "mha f32"))
    return statistics.median(
        needed / 1e9 / limit / taken for limit, taken in zip(limits, times, strict=True)
    )


def by_state(results):
    """(result, state) of the rounds in which the core was quiet, and of those in which it was busy;
    of all rounds, if neither occurred throughout."""
    for result in results:
        states = result.get("states", {})
        states = {state: states[state] for state in ("quiet", "busy") if state in states}
        for state, seconds in (states or {"in any state": result["seconds"]}).items():
            yield {**result, "seconds": seconds}, state


def layer_rows(results):
    """Times in ms; the gain is over the fastest other library in float32."""
    for result, state in by_state(results):
        kind, shape, threads = result["key"]
        fastest = {library: best(result, library) for library in forms[kind] if library != "mha"}
        rival = min(
            filter(fastest.get, fastest),
            key=lambda library: median(result, fastest[library]),
            default=None,
        )
        yield {
            "shape": name_of(shape),
            "threads": threads,
            "core": state,
            "mha": time_of(result, "mha f32"),
            "share": f"{share(result):.0%}",
            **{library: time_of(result, name) for library, name in fastest.items()},
            "gain": f"{ratio(result, 'mha f32', fastest[rival]):.2f}" if rival else "",
            "over": rival or "",
            "rounds": len(result["seconds"]["mha f32"]["call"]),
            **{
                f"{library} {form}{what}": value(result, f"{library} {form}")
                for library, some in forms[kind].items()
                for form, bound in some.items()
                if bound != exact
                for what, value in (("", time_of), (" error", error_of))
            },
        }


def arithmetic_rows(results):
    """Times of float32's in mha, and the errors."""
    chosen = {tuple(result["key"][1]): result for result, _ in reversed(list(by_state(results)))}
    for result in reversed(chosen.values()):
        for library, some in forms["arithmetic"].items():
            for form in some:
                name = f"{library} {form}"
                if form.endswith("Attention") and form != "QAttention" or not median(result, name):
                    continue
                yield {
                    "shape": name_of(result["key"][1]),
                    "form": name.replace("scaled_dot_product_attention", "f32"),
                    "time": f"{ratio(result, 'mha f32', name):.2f}",
                    "error": error_of(result, name),
                    "error with outliers": error_of(result, name, "outliers"),
                }


rivals = {
    "mha f32": "llama.cpp F32",
    "mha f16": "llama.cpp F16",
    "mha int8 in INT16": "llama.cpp Q8_0",
    "mha int8 in INT8": "llama.cpp Q8_0",
    "mha int4 in INT8": "llama.cpp Q4_0",
}


def decoder_rows(results):
    """A prompt of 512 tokens, and each token after it."""
    for result in results:
        _, width, threads = result["key"]
        for form in decoders.forms:
            prompt, token = (median(result, form, what) for what in ("prompt", "token"))
            if prompt is None:
                continue
            over = rivals.get(form, "")
            gains = {
                f"{what} gain": f"{ratio(result, form, over, what):.2f}" if over else ""
                for what in ("prompt", "token")
            }
            yield {
                "width": width,
                "threads": threads,
                "form": form,
                "prompt s": f"{prompt:.2f}",
                "token ms": f"{1e3 * token:.1f}",
                "error": f"{result['errors'].get(form, 0):.0e}".replace("e-0", "e-"),
                "over": over,
                **gains,
            }


def model_rows(results):
    for result in results:
        for way in models.ways:
            token = median(result, way, "token")
            attention = median(result, way, "attention of call")
            yield {
                "case": result["key"][1],
                "threads": result["key"][2],
                "way": way,
                "ms": milliseconds(median(result, way)),
                "tokens per second": digits(token and 1 / token),
                "attention": attention and f"{attention / median(result, way):.0%}",
                "error": f"{result['errors'].get(way, 0):.1%}",
            }


def onnx_rows(results):
    for result in results:
        yield {
            "model": result["key"][1],
            "threads": result["key"][2],
            "unchanged": milliseconds(median(result, "unchanged")),
            "rewritten": milliseconds(median(result, "rewritten")),
            "gain": f"{ratio(result, 'rewritten', 'unchanged'):.2f}",
        }


def llama_rows(results):
    """Tokens per second; the gain is over the better setting without mha, and the spread is how far
    apart the times of a setting's rounds are at most."""
    for result in results:
        seconds = result["seconds"]
        spread = max(
            (max(some) - min(some)) / statistics.median(some)
            for setting in seconds
            for some in seconds[setting].values()
        )
        for what in ("prompt", *(what for what in seconds["mha"] if what.startswith("token at"))):
            better = min(llama.rivals, key=lambda name: median(result, name, what))
            yield {
                "model": result["key"][1],
                "threads": result["key"][2],
                "tokens": what.replace("token at", "at depth"),
                **{name: digits(1 / median(result, name, what)) for name in llama.settings},
                "gain": f"{ratio(result, 'mha', better, what):.2f}",
                "spread": f"{spread:.0%}",
                "rounds": len(seconds["mha"]["prompt"]),
            }


# Name of the table -> (its results, rows)
tables = {
    **{kind: (kind, layer_rows) for kind in ("layers", "decode", "attention", "attention_decode")},
    "arithmetic": ("arithmetic", arithmetic_rows),
    "decoder": ("decoders", decoder_rows),
    "models": ("models", model_rows),
    "onnx": ("onnx", onnx_rows),
    "llama": ("llama", llama_rows),
}
orders = {
    "decoders": list(decoders.shapes),
    "models": list(models.models),
    "onnx": list(onnx_models.cases),
    "llama": llama.order,
    **{kind: [list(shape) for shape in some] for kind, some in shapes.items()},
}


def results_of(kind):
    """Those of build/rivals/KIND.json of this processor that the table has, in its order."""

    def place(result):
        what = result["key"][1]
        return what.split(",")[0] if kind == "models" else what

    some = [
        result
        for result in load(work / f"{kind}.json")
        if place(result) in orders[kind]
        and place(result) != "tiny"
        and result["about"]["processor"] == processor()
    ]
    return sorted(some, key=lambda result: (orders[kind].index(place(result)), result["key"][2]))


# ---- tables -> what the pages say


def span(values):
    low, *_, high = sorted([*values] * 2, key=lambda value: float(value.rstrip("%")))
    return low if low == high else f"{low.rstrip('%')}–{high}"


def by_threads(rows):
    return {
        "one thread" if threads == "1" else f"{threads} threads": [
            row for row in rows if row["threads"] == threads
        ]
        for threads in dict.fromkeys(row["threads"] for row in rows)
    }


def quiet(rows):
    """One row for each shape and number of threads: quiet if there is one."""
    return list({(row["shape"], row["threads"]): row for row in reversed(rows)}.values())[::-1]


def layers_summary(rows):
    return {
        name: f"{span(row['gain'] for row in some)}"
        f" ({sum(float(row['gain']) > 1 for row in some)} of {len(some)}),"
        f" {span(row['share'] for row in some)}"
        f"{', core busy' * any(row['core'] == 'busy' for row in some)}"
        for name, some in by_threads(quiet(rows)).items()
    }


def arithmetic_summary(rows):
    def of(*names):
        some = [row for row in rows if row["form"] in names]
        errors = [row[key] for row in some for key in list(row)[-2:]]
        return f"{span(row['time'] for row in some)} ({span(errors)})" if some else ""

    others = "PyTorch int8", "ONNX Runtime quantize_dynamic", "ONNX Runtime QAttention"
    return {
        "bf16 weights in `MHA_ARITHMETIC_BF16`": of("mha bf16"),
        "int8 weights in `MHA_ARITHMETIC_INT16`": of("mha int16"),
        "int8 weights in `MHA_ARITHMETIC_INT8`": of("mha int8"),
        "int8 in other libraries": of(*others, "OpenVINO int8"),
        **{name: of(name) for name in ("PyTorch bf16", "OpenVINO default")},
    }


def decoder_summary(rows):
    return {
        label: span(row[f"{what} gain"] for row in rows if row["over"])
        for what, label in (("prompt", "prompt of 512 tokens"), ("token", "each token after it"))
    }


def models_summary(rows):
    return {
        row["way"]: row["tokens per second"]
        + (f" ({row['error']})" if row["way"] not in ("sdpa", "mha") else "")
        for row in rows
        if row["case"].startswith("llama") and row["threads"] == "1"
    }


def onnx_summary(rows):
    return {name: span(row["gain"] for row in some) for name, some in by_threads(rows).items()}


def llama_summary(rows):
    return {
        what.replace("at", "token at"): span(row["gain"] for row in rows if row["tokens"] == what)
        for what in dict.fromkeys(row["tokens"] for row in rows)
    }


gains = "Speed relative to the fastest other library (shapes where mha is faster), and share of the"
blocks = {  # name of a table -> (what pages show of it, {name of a line: its figures})
    **dict.fromkeys(("layers", "attention"), (f"{gains} multiply-add peak", layers_summary)),
    **dict.fromkeys(("decode", "attention_decode"), (f"{gains} bandwidth", layers_summary)),
    "arithmetic": (
        "Time of causal layers on one thread, relative to mha's in float32 (rms error)",
        arithmetic_summary,
    ),
    "decoder": ("Speed relative to llama.cpp, weights of about the same size", decoder_summary),
    "models": ("Tokens per second of llama on one thread (rms error of logits)", models_summary),
    "onnx": ("Speed-up of all-MiniLM-L6-v2 on 16 to 512 tokens by rewriting it", onnx_summary),
    "llama": ("Speed relative to the best of the other settings", llama_summary),
}


def table_of(name):
    """The figures of the last three processors side by side."""
    what, summary = blocks[name]
    columns = {"": {}}
    for which, (sentence, rows) in read_data(name).items():
        commit = sentence.split(", ")[0].removeprefix("mha at commit ")
        columns[f"{which}, {commit}"] = summary(rows)
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    lines = [[label, *(c.get(label, "") for c in list(columns.values())[1:])] for label in labels]
    said = textwrap.fill(f"{what}:", 100, break_long_words=False, break_on_hyphens=False)
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([said, "", *head, *(f"| {' | '.join(line)} |" for line in lines)])


def pages_with_tables():
    """{page: its text with the figures of today's tables}"""
    written = {}
    for page in (root / "README.md", *sorted(docs.glob("*.md"))):
        head, *parts = page.read_text().split("<!-- figures: ")
        for part in parts:
            name = part.split(" ")[0]
            tail = part.split("<!-- end of figures -->", 1)[1]
            head += f"<!-- figures: {name} -->\n\n{table_of(name)}\n\n<!-- end of figures -->{tail}"
        written[page] = head
    return written


# ---- pictures


def number(text):
    return float(text.rstrip("%")) / (100 if "%" in text else 1) if text else 0


def bars(axes, labels, series, text=None):
    """Groups of horizontal bars: series {name: values}; text(i) stands behind the bar of mha."""
    height = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        at = [i + (place + 0.5) * height - 0.4 for i in range(len(labels))]
        axes.barh(at, values, height, color=colours.get(name), label=name)
        for i, value in enumerate(values if name == "mha" else ()):
            axes.text(value, at[i], f" {text(i)}", va="center", fontsize=7, fontweight="bold")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def save(figure, axes, name, title):
    handles = axes.get_legend_handles_labels()
    if handles[0]:
        figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(docs / name, dpi=110, metadata={"Software": None})
    say(f"wrote src/docs/{name}")


def layers_picture(pyplot, about, rows):
    groups = by_threads(quiet(rows))
    figure, panels = pyplot.subplots(1, len(groups), figsize=(9.6, 8), layout="constrained")
    for axes, (name, some) in zip(panels, groups.items(), strict=True):
        series = {
            library: [
                number(row["share"]) * number(row["mha"]) / number(row[library])
                if row[library]
                else 0
                for row in some
            ]
            for library in forms["layers"]
        }
        labels = [row["shape"].replace(" uncausal", "\nuncausal") for row in some]
        bars(axes, labels, series, lambda i, some=some: f"{some[i]['share']}, {some[i]['gain']}x")
        axes.set_title(name)
        axes.set_xlim(0, 1.15)
        axes.xaxis.set_major_formatter("{x:.0%}")
    save(
        figure,
        panels[0],
        "compare.png",
        "One attention layer, float32 (batch, rows, width, heads): share of the multiply-add peak\n"
        f"{about}; after its bars, the speed relative to the fastest other library",
    )


def arithmetic_picture(pyplot, about, rows):
    names = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(12, 4), layout="constrained", sharey=True
    )
    for axes, name in zip(panels, names, strict=True):
        for row in rows:
            if row["shape"] != name or row["form"].endswith("f32"):
                continue
            time, *errors = (float(row[key]) for key in list(row)[-3:])
            library = next(library for library in colours if row["form"].startswith(library))
            axes.plot([time] * 2, errors, color=colours[library])
            axes.plot(time, errors[0], "o", color=colours[library], markersize=4)
            axes.annotate(
                row["form"].removeprefix(library),
                (time, errors[0]),
                fontsize=6,
                xytext=(3, -3),
                textcoords="offset points",
            )
        axes.set_yscale("log")
        axes.axvline(1, color="grey", linewidth=0.6)
        axes.set_title(name, fontsize=9)
    panels[0].set_ylabel("error (dot), with outliers (end of line)")
    figure.supxlabel(
        "time of a call, of that of mha in float32; orange mha, blue PyTorch, green ONNX Runtime,"
        " purple OpenVINO",
        fontsize=8,
    )
    title = f"Fewer bits in one causal layer (batch, rows, width, heads), {about}"
    save(figure, panels[0], "compare_arithmetic.png", title)


def decoder_picture(pyplot, about, rows):
    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
    rows = [row for row in rows if row["over"]]
    for axes, what in zip(panels, ("prompt", "token"), strict=True):
        series = {
            f"width {width}, {name}": [
                number(row[f"{what} gain"]) for row in some if row["width"] == width
            ]
            for name, some in by_threads(rows).items()
            for width in dict.fromkeys(row["width"] for row in some)
        }
        labels = [f"{own[4:]}\nto {other[10:]}" for own, other in rivals.items()]
        bars(axes, labels, series)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title("Prompt of 512 tokens" if what == "prompt" else "Each token after it")
    title = f"A whole decoder: times as fast as llama.cpp, {about}"
    save(figure, panels[1], "decoder.png", title)


def llama_picture(pyplot, about, rows):
    rows = [row for row in rows if row["threads"] == "2" and "AVX2" not in row["model"]]
    titles = {
        row["model"]: row["model"].replace(".", " ", 1).replace("-135M-Instruct", "")
        for row in rows
    }
    names = [name for name in titles if name.endswith((".F16", ".Q4_K_M"))]
    figure, (prompts, *panels) = pyplot.subplots(
        1,
        1 + len(names),
        figsize=(3 + 2 * len(names), 3.6),
        layout="constrained",
        width_ratios=[1.6] + [1] * len(names),
    )
    first = [row for row in rows if row["tokens"] == "prompt"]
    series = {name: [number(row[name]) for row in first] for name in llama.settings}
    bars(prompts, list(titles.values()), series, lambda i: f"{first[i]['gain']}x")
    prompts.set_title("Prompt", fontsize=9)
    panels[0].set_ylabel("Tokens by depth", fontsize=8)
    for axes, name in zip(panels, names, strict=True):
        some = [row for row in rows if row["model"] == name and row["tokens"] != "prompt"]
        depths = [int(row["tokens"].split()[-1]) for row in some]
        for setting in llama.settings:
            rates = [number(row[setting]) for row in some]
            axes.plot(depths, rates, "o-", color=colours[setting], markersize=3)
        axes.set_ylim(0)
        axes.set_title(titles[name], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (prompts, *panels):
        axes.tick_params(labelsize=7)
    title = "llama.cpp with -fa off, -fa on and mha, tokens per second on 2 threads; after the bars"
    title += f" of mha, the speed\nrelative to the best other setting; plain: --no-repack; {about}"
    save(figure, prompts, "llama.png", title)


pictures = {
    "layers": layers_picture,
    "arithmetic": arithmetic_picture,
    "decoder": decoder_picture,
    "llama": llama_picture,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        wrong = [page for page, text in pages_with_tables().items() if text != page.read_text()]
        for page in wrong:
            say(f"{page}: its figures are not those of src/docs/data; run bench/rivals/report.py")
        return 1 if wrong else 0
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, (kind, rows) in tables.items():
        if results := results_of(kind):
            merge_data(name, processor(), source(results), rows(results))
        else:
            say(f"{name}: build/rivals/{kind}.json has no results; the table stays as it is")
    for name, picture in pictures.items():
        newest, (about, rows) = next(iter(read_data(name).items()))
        picture(pyplot, f"{about.split(',')[0]}, {newest}", rows)
    for page, text in pages_with_tables().items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    run_main(main)
