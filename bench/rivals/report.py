#!/usr/bin/env python3
"""Writes tables and pictures of the results in build/rivals into the pages that have their marks.

Example, after comparisons such as bench/rivals/layers.py:
  build/rivals/venv/bin/python bench/rivals/report.py
"""

import argparse
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
import llama
import onnx_models
from decoders import forms as decoder_forms
from decoders import shapes as decoder_shapes
from layers import forms, shapes, work_of
from models import models, ways
from session import (
    digits,
    in_states,
    load,
    median,
    milliseconds,
    pages,
    ratio,
    root,
    run_main,
    say,
    source,
    source_in_short,
    table,
    work,
    wrapped,
    write_block,
)

docs = root / "src" / "docs"
colours = {
    "mha": "#e8590c",
    "PyTorch": "#4263eb",
    "ONNX Runtime": "#0ca678",
    "OpenVINO": "#ae6ad8",
    "llama.cpp": "#868e96",
    "vLLM": "#f59f00",
    "-fa off": "#ced4da",
    "-fa on": "#868e96",
}


def name_of(shape):
    batch, n, width, heads, kv_heads, causal, past = shape[:7]
    if past:
        return f"{width}, {heads}, {kv_heads}, {past}"
    return f"{batch}, {n}, {width}, {heads}" + ("" if causal else " uncausal")


def best(result, library):
    """The fastest form of a library; None where none was measured."""
    names = [
        f"{library} {form}"
        for form in forms[result["key"][0]].get(library, {})
        if median(result, f"{library} {form}")
    ]
    return min(names, key=lambda name: median(result, name), default=None)


def gain(result):
    """(how many times as fast as the best of the others, its library), or None."""
    others = {
        best(result, library): library
        for library in colours
        if library != "mha" and best(result, library)
    }
    if not others:
        return None
    rival = min(others, key=lambda name: median(result, name))
    return ratio(result, "mha f32", rival), others[rival]


def share(result, name="mha f32"):
    """Of the multiply-add peak; over a cache, of the bandwidth."""
    needed = work_of(result["key"][1])[result["key"][1][6] > 0]
    return statistics.median(
        needed / 1e9 / limit / taken
        for limit, taken in zip(result["seconds"]["limit"]["call"], result["seconds"][name]["call"])
    )


def by_state(results):
    """{state: results of the rounds in it}: quiet and busy; or all rounds of a result, if it has
    neither."""
    found = {"quiet": [], "busy": [], "in any state": []}
    for result in results:
        states = {
            state: seconds for state, seconds in result.get("states", {}).items() if state in found
        } or {"in any state": result["seconds"]}
        for state, seconds in states.items():
            found[state].append({**result, "state": state, "seconds": seconds})
    return {state: some for state, some in found.items() if some}


def chosen(results):
    """Each in one state: quiet if it can be. Some comparisons do not know states."""
    return [
        next(iter(by_state([result]).values()))[0] if "states" in result else result
        for result in results
    ]


def by_threads(results):
    return {
        threads: [result for result in results if result["key"][2] == threads]
        for threads in sorted({result["key"][2] for result in results})
    }


def threads_name(threads):
    return "One thread" if threads == 1 else f"{threads} threads"


def reasons(results):
    """What was not measured, each reason once."""
    found = dict.fromkeys(
        f"{name} was not measured: {reason}."
        for result in results
        for name, reason in result["reasons"].items()
    )
    return [f"- {line}" for line in found] + [""] * bool(found)


def layer_tables(results):
    lines, libraries = (
        wrapped(source(results)),
        [library for library in forms[results[0]["key"][0]] if library != "mha"],
    )
    for threads, of_threads in by_threads(results).items():
        for state, some in by_state(of_threads).items():
            rows = []
            for result in some:
                lead, rival = gain(result) or (None, "")
                rows.append(
                    [
                        name_of(result["key"][1]),
                        milliseconds(median(result, "mha f32")),
                        f"{share(result):.0%}",
                        *(
                            milliseconds(median(result, best(result, library)))
                            for library in libraries
                        ),
                        lead and f"{lead:.2f}",
                        rival,
                        len(result["seconds"]["mha f32"]["call"]),
                    ]
                )
            lines += table(
                [
                    f"{threads_name(threads)}, core {state}, ms",
                    "mha",
                    "its share",
                    *libraries,
                    "gain",
                    "over",
                    "rounds",
                ],
                rows,
            )
        absent = [state for state in ("quiet", "busy") if state not in by_state(of_threads)]
        lines += (
            wrapped(f"{threads_name(threads)}: no round was {' or '.join(absent)} throughout.")
            if absent
            else []
        )
    return lines + reasons(results)


def arithmetic_tables(results):
    lines, rows = wrapped(source(results)), []
    for library, some in forms["arithmetic"].items():
        for form in some:
            name, cells = f"{library} {form}", []
            if form in ("Attention", "MultiHeadAttention") or not any(
                median(result, name) for result in results
            ):
                continue
            for result in results:
                errors = result["errors"].get(name, {})
                cells.append(
                    f"{ratio(result, 'mha f32', name):.2f} [{errors['normal']:.1e},"
                    f" {errors['outliers']:.1e}]".replace("e-0", "e-")
                    if median(result, name)
                    else ""
                )
            rows.append(
                [f"{library} {'f32' if form == 'scaled_dot_product_attention' else form}", *cells]
            )
    return (
        lines
        + table(["", *(name_of(result["key"][1]) for result in results)], rows)
        + reasons(results)
    )


def decoder_tables(results):
    columns = [
        f"{result['key'][1]}, {threads_name(result['key'][2]).lower()}" for result in results
    ]
    errors = {result["key"][1]: result["errors"] for result in results}

    def times(result, form):
        prompt, token = (median(result, form, what) for what in ("prompt", "token"))
        return "" if prompt is None else f"{prompt:.2f}, {1e3 * token:.1f}"

    lines = wrapped(source(results))
    lines += table(
        ["Prompt of 512, s; token after it, ms", *columns, *(f"error, {name}" for name in errors)],
        [
            [
                form,
                *(times(result, form) for result in results),
                *(f"{each.get(form, 0):.0e}".replace("e-0", "e-") for each in errors.values()),
            ]
            for form in decoder_forms
        ],
    )
    lines += table(
        ["Times as fast: prompt, token", *columns],
        [
            [
                f"{own} / {other}",
                *(
                    f"{ratio(result, own, other, 'prompt'):.2f},"
                    f" {ratio(result, own, other, 'token'):.2f}"
                    for result in results
                ),
            ]
            for own, other in pairs
        ],
    )
    return lines + reasons(results)


pairs = [
    ("mha f32", "llama.cpp F32"),
    ("mha f16", "llama.cpp F16"),
    ("mha int8 in INT16", "llama.cpp Q8_0"),
    ("mha int8 in INT8", "llama.cpp Q8_0"),
    ("mha int4 in INT8", "llama.cpp Q4_0"),
]


def model_tables(results):
    def rows(what, cell):
        return [
            [result["key"][1], result["key"][2], *(cell(result, way) for way in ways)]
            for result in results
            if median(result, "sdpa", what)
        ]

    lines = wrapped(source(results)) + table(
        ["Prompt or batch, ms", "threads", *ways],
        rows("call", lambda result, way: milliseconds(median(result, way))),
    )
    lines += table(
        ["Tokens a second", "threads", *ways],
        rows(
            "token",
            lambda result, way: (
                digits(1 / median(result, way, "token")) if median(result, way, "token") else ""
            ),
        ),
    )
    return (
        lines
        + table(
            ["Error", "threads", *ways],
            rows("call", lambda result, way: f"{result['errors'].get(way, 0):.1%}"),
        )
        + reasons(results)
    )


def onnx_tables(results):
    names = dict.fromkeys(result["key"][1] for result in results)
    found = {(result["key"][1], result["key"][2]): result for result in results}
    threads = sorted({result["key"][2] for result in results})

    def cells(result):
        if not result or not median(result, "rewritten"):
            return [""] * 3
        return [
            milliseconds(median(result, "unchanged")),
            milliseconds(median(result, "rewritten")),
            f"{ratio(result, 'rewritten', 'unchanged'):.2f}",
        ]

    lines = table(
        [
            "Model, ms",
            *(
                word
                for n in threads
                for word in (f"{threads_name(n).lower()}: unchanged", "rewritten", "ratio")
            ),
        ],
        [
            [name, *(cell for n in threads for cell in cells(found.get((name, n))))]
            for name in names
        ],
    )
    return wrapped(source(results)) + lines + reasons(results)


# ---- what README.md and storage_types.md say of these tables in short


def span(values, form="{:.2f}"):
    values = sorted(values)
    return f"{form.format(values[0])} to {form.format(values[-1])}"


def layers_summary(results):
    def said(results):
        gains = {
            threads: [gain(result)[0] for result in some if gain(result)]
            for threads, some in by_threads(results).items()
        }
        return " and ".join(
            f"{span(some)} times as fast on {threads_name(threads).lower()} (faster at"
            f" {sum(round(each, 2) > 1 for each in some)} of {len(some)} shapes)"
            for threads, some in gains.items()
        )

    busy = by_state(results).get("busy")
    return wrapped(
        "Compared with the fastest other library, mha is"
        f" {said(chosen(results))}{busy and f'; with the core busy {said(busy)}' or ''}."
        f" {source_in_short(chosen(results))}"
    )


def arithmetic_summary(results):
    def of(*names):
        measured = [(result, name) for result in results for name in names if median(result, name)]
        return (
            span(ratio(result, "mha f32", name) for result, name in measured),
            span(
                (error for result, name in measured for error in result["errors"][name].values()),
                "{:.1%}",
            ),
        )

    int16, int8 = of("mha int16"), of("mha int8")
    others = of(
        "PyTorch int8", "ONNX Runtime quantize_dynamic", "ONNX Runtime QAttention", "OpenVINO int8"
    )
    return wrapped(
        f"With int8 weights on one thread, causal layers take {int16[0]} of the float32 time in"
        f" `MHA_ARITHMETIC_INT16` (rms error {int16[1]}) and {int8[0]} in `MHA_ARITHMETIC_INT8`"
        f" ({int8[1]}). int8 in the other libraries takes {others[0]} of that time ({others[1]})."
        f" {source_in_short(results)}"
    )


def storage_summary(results):
    def cell(weights, arithmetic):
        name = f"mha {arithmetic}" if weights == "int8" else f"mha {weights}_{arithmetic}"
        return span(
            (ratio(result, name, "mha f32") for result in results if median(result, name)), "{:.1f}"
        )

    return table(
        ["Weights, times as fast as float32", "int16", "int8"],
        [[w, cell(w, "int16"), cell(w, "int8")] for w in ("int8", "int4")],
    ) + wrapped(source_in_short(results))


def decode_summary(results):
    first, *more = by_threads(results).values()
    libraries = [library for library in forms["decode"] if library != "mha"]
    rows = []
    for result in first:
        rows.append(
            [
                name_of(result["key"][1]),
                f"{milliseconds(median(result, 'mha f32'))} ms, {share(result):.0%}",
                *(
                    f"{share(result, best(result, library)):.0%}" if best(result, library) else ""
                    for library in libraries
                ),
                f"{gain(result)[0]:.2f}x" if gain(result) else "",
            ]
        )
        rows[-1] += [
            f"{share(other):.0%}, {gain(other)[0]:.2f}x"
            for some in more
            for other in some
            if other["key"][1] == result["key"][1] and gain(other)
        ]
    return table(
        [
            "Width, heads, kv heads, cached rows",
            "mha",
            *libraries,
            "gain",
            *(f"on {some[0]['key'][2]} cores" for some in more),
        ],
        rows,
    ) + wrapped(source_in_short(results))


def models_summary(results):
    some = [result for result in results if median(result, "sdpa", "token")]
    shares = [
        median(result, "sdpa", f"attention of {what}") / median(result, "sdpa", what)
        for result in results
        for what in ("call", "token")
        if median(result, "sdpa", what)
    ]
    chosen = [way for way in ways if way != "mha"]
    llama = some[0]
    name, threads = llama["key"][1].split(",")[0], threads_name(llama["key"][2]).lower()
    return wrapped(
        f"Attention takes {span(shares, '{:.0%}')} of the time of three models in PyTorch; int8"
        f" weights in linear layers save more. On {threads}, {name} generates"
        f" {digits(1 / median(llama, 'sdpa', 'token'))} tokens per second with sdpa, "
        + ", ".join(
            f"{digits(1 / median(llama, way, 'token'))} with"
            f" {way if way.startswith('PyTorch') else f'mha {way}'}"
            f" ({'' if number else 'rms error of the logits '}{llama['errors'][way]:.1%})"
            for number, way in enumerate(chosen[1:])
        )
        + f". {source_in_short(results)}"
    )


# ---- pictures


def bars(axes, labels, series, text):
    """Groups of horizontal bars: series {name: values, None where there is none}; text(i) stands
    behind the bar of mha."""
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        at = [i + (number + 0.5) * height - 0.4 for i in range(len(labels))]
        axes.barh(at, [value or 0 for value in values], height, color=colours[name], label=name)
        if name == "mha":
            for i, value in enumerate(values):
                axes.text(value, at[i], f" {text(i)}", va="center", fontsize=7, fontweight="bold")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def save(figure, name):
    figure.savefig(docs / name, dpi=110, metadata={"Software": None})
    say(f"wrote src/docs/{name}")


def layers_picture(results):
    from matplotlib import pyplot, ticker

    groups = by_threads(results)
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(9.6, 8), layout="constrained", squeeze=False
    )
    for axes, (threads, some) in zip(panels[0], groups.items()):
        series = {
            library: [
                share(result, best(result, library)) if best(result, library) else None
                for result in some
            ]
            for library in forms["layers"]
        }
        bars(
            axes,
            [name_of(result["key"][1]).replace(" uncausal", "\nuncausal") for result in some],
            series,
            lambda i, series=series, some=some: (
                f"{series['mha'][i]:.0%}, {gain(some[i])[0]:.2f}x" if gain(some[i]) else ""
            ),
        )
        axes.set_title(threads_name(threads))
        axes.set_xlim(0, 1.15)
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1))
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    figure.suptitle(
        f"One attention layer, float32 (batch, rows, width, heads){in_states(results)}: share of"
        f" the multiply-add peak\nmha at commit {results[0]['about']['commit']}; after its bars,"
        " the speed relative to the fastest other library",
        fontsize=10,
    )
    save(figure, "compare.png")


def arithmetic_picture(results):
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(12, 4), layout="constrained", sharey=True, squeeze=False
    )
    for axes, result in zip(panels[0], results):
        for library, some in forms["arithmetic"].items():
            for form in some:
                name = f"{library} {form}"
                if not median(result, name) or result["errors"][name]["normal"] < 1e-4:
                    continue
                time, errors = ratio(result, "mha f32", name), result["errors"][name]
                axes.plot(
                    [time] * 2, [errors["normal"], errors["outliers"]], color=colours[library]
                )
                axes.plot(time, errors["normal"], "o", color=colours[library], markersize=4)
                axes.annotate(
                    form,
                    (time, errors["normal"]),
                    fontsize=6,
                    xytext=(3, -3),
                    textcoords="offset points",
                )
        axes.set_yscale("log")
        axes.axvline(1, color="grey", linewidth=0.6)
        axes.set_title(name_of(result["key"][1]), fontsize=9)
    panels[0][0].set_ylabel("error (dot), with outliers (end of line)")
    figure.supxlabel(
        "time of a call, of that of mha in float32; orange mha, blue PyTorch, green ONNX Runtime,"
        " purple OpenVINO",
        fontsize=8,
    )
    figure.suptitle(
        f"Fewer bits in one causal layer (batch, rows, width, heads){in_states(results)}, mha at"
        f" commit {results[0]['about']['commit']}",
        fontsize=10,
    )
    save(figure, "compare_arithmetic.png")


def decoder_picture(results):
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
    for axes, what in zip(panels, ("prompt", "token")):
        for number, result in enumerate(results):
            height = 0.8 / len(results)
            axes.barh(
                [i + (number + 0.5) * height - 0.4 for i in range(len(pairs))],
                [ratio(result, *pair, what) for pair in pairs],
                height,
                label=f"width {result['key'][1]}, {threads_name(result['key'][2]).lower()}",
            )
        axes.set_yticks(
            range(len(pairs)), [f"{own[4:]}\nto {other[10:]}" for own, other in pairs], fontsize=8
        )
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(
            "Prompt of 512 tokens" if what == "prompt" else "Each token after it", fontsize=9
        )
    figure.legend(
        *panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    figure.suptitle(
        "A whole decoder: times as fast as llama.cpp, mha at commit"
        f" {results[0]['about']['commit']}",
        fontsize=10,
    )
    save(figure, "decoder.png")


def llama_picture(results):
    from matplotlib import pyplot

    groups, names = (
        by_threads([result for result in results if "AVX2" not in result["key"][1]]),
        {"-fa off": "off", "-fa on": "on", "mha": "mha"},
    )
    some = groups[max(groups)]
    titles = [
        result["key"][1].replace(".", " ", 1).replace("-135M-Instruct", "") for result in some
    ]
    figure, (prompts, *panels) = pyplot.subplots(
        1,
        1 + len(some),
        figsize=(3 + 2 * len(some), 3.6),
        layout="constrained",
        width_ratios=[1.6] + [1] * len(some),
    )
    bars(
        prompts,
        titles,
        {
            name: [1 / median(result, setting, "prompt") for result in some]
            for name, setting in names.items()
        },
        lambda i: f"{ratio(some[i], 'mha', llama.better(some[i], 'prompt'), 'prompt'):.2f}x",
    )
    prompts.set_title("Prompt of 4,096", fontsize=9)
    panels[0].set_ylabel("Tokens by depth", fontsize=8)
    for axes, result, title in zip(panels, some, titles):
        depths = [what for what in llama.columns([result]) if what != "prompt"]
        for name, setting in names.items():
            axes.plot(
                [int(what.split()[-1]) for what in depths],
                [1 / median(result, setting, what) for what in depths],
                "o-",
                color=colours[name],
                markersize=3,
            )
        axes.set_ylim(0)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (prompts, *panels):
        axes.tick_params(labelsize=7)
    figure.legend(
        *prompts.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    figure.suptitle(
        f"llama.cpp, tokens per second on {threads_name(some[0]['key'][2]).lower()}; after the bars"
        " of mha, the speed relative to the better setting; mha at commit"
        f" {some[0]['about']['commit']}",
        fontsize=9,
    )
    save(figure, "llama.png")


blocks = {
    "layers": ("layers", layer_tables, layers_picture),
    "layers_summary": ("layers", layers_summary, None),
    "attention": ("attention", layer_tables, None),
    "attention_decode": ("attention_decode", layer_tables, None),
    "decode": ("decode", layer_tables, None),
    "decode_summary": ("decode", decode_summary, None),
    "arithmetic": ("arithmetic", arithmetic_tables, arithmetic_picture),
    "arithmetic_summary": ("arithmetic", arithmetic_summary, None),
    "storage_summary": ("arithmetic", storage_summary, None),
    "decoder": ("decoders", decoder_tables, decoder_picture),
    "models": ("models", model_tables, None),
    "models_summary": ("models", models_summary, None),
    "onnx": ("onnx", onnx_tables, None),
    "llama": ("llama", llama.tables, llama_picture),
}
orders = {
    "decoders": list(decoder_shapes),
    "models": list(models),
    "onnx": list(onnx_models.cases),
    "llama": llama.order,
    **{kind: [list(shape) for shape in some] for kind, some in shapes.items()},
}


def results_of(kind):
    """Those of build/rivals/KIND.json that belong into the pages, in their order there."""

    def place(result):
        what = result["key"][1]
        return (what.split(",")[0] if kind == "models" else what), result["key"][2]

    some = [
        result
        for result in load(work / f"{kind}.json")
        if place(result)[0] in orders[kind] and place(result)[0] != "tiny"
    ]
    return sorted(some, key=lambda result: (orders[kind].index(place(result)[0]), place(result)[1]))


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    import matplotlib

    matplotlib.use("Agg")
    for name, (kind, tables, picture) in blocks.items():
        results = results_of(kind)
        if not results:
            say(f"{name}: build/rivals/{kind}.json has no results; the page stays as it is")
            continue
        write_block(
            name,
            tables(results if tables in (layer_tables, layers_summary) else chosen(results)),
            pages(),
        )
        if picture:
            picture(chosen(results))
    return 0


if __name__ == "__main__":
    run_main(main)
