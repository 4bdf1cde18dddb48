#!/usr/bin/env python3
"""Writes the tables and pictures of README.md and src/docs from the results in build/rivals, into the pages that have their marks."""

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
from decoders import forms as decoder_forms, shapes as decoder_shapes  # noqa: E402
from layers import forms, shapes, work_of  # noqa: E402
from session import load, median, milliseconds, pages, ratio, root, run_main, say, source, table, work, write_block  # noqa: E402

docs = root / "src" / "docs"
colours = {"mha": "#e8590c", "PyTorch": "#4263eb", "ONNX Runtime": "#0ca678", "OpenVINO": "#ae6ad8", "llama.cpp": "#868e96"}


def name_of(shape):
    batch, n, width, heads, kv_heads, causal, past = shape
    if past:
        return f"{width}, {heads}, {kv_heads}, {past}"
    return f"{batch}, {n}, {width}, {heads}" + ("" if causal else " uncausal")


def best(result, library):
    """The fastest form of a library; None where none was measured."""
    names = [f"{library} {form}" for form in forms[result["key"][0]].get(library, {}) if median(result, f"{library} {form}")]
    return min(names, key=lambda name: median(result, name), default=None)


def gain(result):
    """(how many times as fast as the best of the others, its library), or None."""
    others = {best(result, library): library for library in colours if library != "mha" and best(result, library)}
    if not others:
        return None
    rival = min(others, key=lambda name: median(result, name))
    return ratio(result, "mha f32", rival), others[rival]


def share(result, name="mha f32"):
    """Of the multiply-add peak; of decoding, of the bandwidth."""
    needed = work_of(result["key"][1])[result["key"][0] == "decode"]
    return statistics.median(needed / 1e9 / limit / taken for limit, taken in zip(result["seconds"]["limit"]["call"], result["seconds"][name]["call"]))


def by_threads(results):
    return {threads: [result for result in results if result["key"][2] == threads] for threads in sorted({result["key"][2] for result in results})}


def threads_name(threads):
    return "One thread" if threads == 1 else f"{threads} threads"


def reasons(results):
    """What was not measured, each reason once."""
    found = dict.fromkeys(f"{name} was not measured: {reason}." for result in results for name, reason in result["reasons"].items())
    return [f"- {line}" for line in found] + [""] * bool(found)


def layer_tables(results):
    lines, libraries = source(results), [library for library in forms[results[0]["key"][0]] if library != "mha"]
    for threads, some in by_threads(results).items():
        rows = []
        for result in some:
            lead, rival = gain(result) or (None, "")
            rows.append([name_of(result["key"][1]), milliseconds(median(result, "mha f32")), f"{share(result):.0%}",
                         *(milliseconds(median(result, best(result, library))) for library in libraries), lead and f"{lead:.2f}", rival])
        lines += table([f"{threads_name(threads)}, ms", "mha", "its share", *libraries, "gain", "over"], rows)
    return lines + reasons(results)


def arithmetic_tables(results):
    lines, rows = source(results), []
    for library, some in forms["arithmetic"].items():
        for form in some:
            name, cells = f"{library} {form}", []
            if form in ("Attention", "MultiHeadAttention") or not any(median(result, name) for result in results):
                continue
            for result in results:
                errors = result["errors"].get(name, {})
                cells.append(f"{ratio(result, 'mha f32', name):.2f} [{errors['normal']:.1e}, {errors['outliers']:.1e}]".replace("e-0", "e-")
                             if median(result, name) else "")
            rows.append([f"{library} {'f32' if form == 'scaled_dot_product_attention' else form}", *cells])
    return lines + table(["", *(name_of(result["key"][1]) for result in results)], rows) + reasons(results)


def decoder_tables(results):
    columns = [f"{result['key'][1]}, {threads_name(result['key'][2]).lower()}" for result in results]
    errors = {result["key"][1]: result["errors"] for result in results}

    def times(result, form):
        prompt, token = (median(result, form, what) for what in ("prompt", "token"))
        return "" if prompt is None else f"{prompt:.2f}, {1e3 * token:.1f}"

    lines = source(results)
    lines += table(["Prompt of 512, s; token behind it, ms", *columns, *(f"error, {name}" for name in errors)],
                   [[form, *(times(result, form) for result in results), *(f"{each.get(form, 0):.0e}".replace("e-0", "e-") for each in errors.values())]
                    for form in decoder_forms])
    lines += table(["Times as fast: prompt, token", *columns],
                   [[f"{own} / {other}", *(f"{ratio(result, own, other, 'prompt'):.2f}, {ratio(result, own, other, 'token'):.2f}"
                                           for result in results)] for own, other in pairs])
    return lines + reasons(results)


pairs = [("mha f32", "llama.cpp F32"), ("mha f16", "llama.cpp F16"), ("mha int8 in INT16", "llama.cpp Q8_0"), ("mha int8 in INT8", "llama.cpp Q8_0"),
         ("mha int4 in INT8", "llama.cpp Q4_0"), ("mha f32", "PyTorch f32"), ("mha int8 in INT8", "PyTorch int8")]


# ---- pictures


def bars(axes, labels, series, text):
    """Groups of horizontal bars: series {name: values, None where there is none}; text(i) stands behind the bar of mha."""
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
    figure, panels = pyplot.subplots(1, len(groups), figsize=(9.6, 8), layout="constrained", squeeze=False)
    for axes, (threads, some) in zip(panels[0], groups.items()):
        series = {library: [share(result, best(result, library)) if best(result, library) else None for result in some] for library in forms["layers"]}
        bars(axes, [name_of(result["key"][1]).replace(" uncausal", "\nuncausal") for result in some], series,
             lambda i: f"{series['mha'][i]:.0%}, {gain(some[i])[0]:.2f}x" if gain(some[i]) else "")
        axes.set_title(threads_name(threads))
        axes.set_xlim(0, 1.15)
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"One attention layer, float32 (batch, rows, width, heads): share of the multiply-add peak\nmha at commit "
                    f"{results[0]['about']['commit']}; behind its bars, times as fast as the best of the others", fontsize=10)
    save(figure, "compare.png")


def arithmetic_picture(results):
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(1, len(results), figsize=(12, 4), layout="constrained", sharey=True, squeeze=False)
    for axes, result in zip(panels[0], results):
        for library, some in forms["arithmetic"].items():
            for form in some:
                name = f"{library} {form}"
                if not median(result, name) or result["errors"][name]["normal"] < 1e-4:
                    continue
                time, errors = ratio(result, "mha f32", name), result["errors"][name]
                axes.plot([time] * 2, [errors["normal"], errors["outliers"]], color=colours[library])
                axes.plot(time, errors["normal"], "o", color=colours[library], markersize=4)
                axes.annotate(form, (time, errors["normal"]), fontsize=6, xytext=(3, -3), textcoords="offset points")
        axes.set_yscale("log")
        axes.axvline(1, color="grey", linewidth=0.6)
        axes.set_title(name_of(result["key"][1]), fontsize=9)
    panels[0][0].set_ylabel("error (dot), with outliers (end of line)")
    figure.supxlabel("time of a call, of that of mha in float32; orange mha, blue PyTorch, green ONNX Runtime, purple OpenVINO", fontsize=8)
    figure.suptitle(f"Fewer bits in one causal layer (batch, rows, width, heads), mha at commit {results[0]['about']['commit']}", fontsize=10)
    save(figure, "compare_arithmetic.png")


def decoder_picture(results):
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
    chosen = [pair for pair in pairs if "llama" in pair[1]]
    for axes, what in zip(panels, ("prompt", "token")):
        for number, result in enumerate(results):
            height = 0.8 / len(results)
            axes.barh([i + (number + 0.5) * height - 0.4 for i in range(len(chosen))], [ratio(result, *pair, what) for pair in chosen], height,
                      label=f"width {result['key'][1]}, {threads_name(result['key'][2]).lower()}")
        axes.set_yticks(range(len(chosen)), [f"{own[4:]}\nto {other[10:]}" for own, other in chosen], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title("Prompt of 512 tokens" if what == "prompt" else "Each token behind it", fontsize=9)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"A whole decoder: times as fast as llama.cpp, mha at commit {results[0]['about']['commit']}", fontsize=10)
    save(figure, "decoder.png")


blocks = {"layers": ("layers", layer_tables, layers_picture), "decode": ("decode", layer_tables, None),
          "arithmetic": ("arithmetic", arithmetic_tables, arithmetic_picture), "decoder": ("decoders", decoder_tables, decoder_picture)}


def main():
    import matplotlib
    matplotlib.use("Agg")
    for name, (file, tables, picture) in blocks.items():
        results = [result for result in load(work / f"{file}.json") if "tiny" not in result["key"]]
        if not results:
            say(f"{name}: build/rivals/{file}.json has no results; its tables stay as they are")
            continue
        order = list(decoder_shapes) if name == "decoder" else [list(shape) for shape in shapes[name]]
        results = sorted((result for result in results if result["key"][1] in order), key=lambda result: (order.index(result["key"][1]), result["key"][2]))
        write_block(name, tables(results), pages())
        if picture:
            picture(results)
    return 0


if __name__ == "__main__":
    run_main(main)
