#!/usr/bin/env python3
"""Compares results of tools/bench.sh with the targets for this project's speed. See --help."""

import argparse
import json
import signal
import statistics
import sys

DESCRIPTION = """\
Reads results of tools/bench.sh --benchmark_format=json and prints a Markdown table of the project's targets, what was measured (the
median of the repetitions; of several files one after the other, of which the median counts) and whether the target is met. Results
of different instruction sets get a table each. A target that was not measured is not met, and so is one whose benchmark was void, or
whose rival was OpenBLAS with kernels for a lesser instruction set.

Exit status: 0 all targets are met, 1 some are not, 2 wrong arguments or files.
"""
EXAMPLES = """\
Examples:
  tools/bench.sh --benchmark_out=build/result.json; tools/bench_targets.py build/result.json
  tools/bench_targets.py --group layer_prefill --group threads build/result.json
  tools/bench_targets.py --missed build/monday.json build/tuesday.json build/wednesday.json
"""

PREFILL_N = [128 << i for i in range(8)]
LONG_N = [n for n in PREFILL_N if n >= 1024]
LATENCY_SHAPES = [(1, 1, 8, 2), (1, 1, 64, 4), (1, 3, 6, 2), (1, 16, 64, 4), (1, 8, 128, 4)]
# (batch, n, width, heads), causal, least of_limit
LAYER_TARGETS = [
    ((1, 128, 256, 4), 1, 0.85),
    ((1, 128, 768, 12), 1, 0.92),
    ((1, 512, 768, 12), 1, 0.90),
    ((1, 1024, 768, 12), 1, 0.90),
    ((1, 2048, 1024, 16), 1, 0.90),
    ((8, 128, 768, 12), 1, 0.92),
    ((1, 1024, 2048, 16), 1, 0.90),
    ((1, 512, 4096, 32), 1, 0.90),
    ((1, 197, 768, 12), 0, 0.85),
    ((1, 77, 768, 12), 0, 0.85),
    ((1, 1500, 512, 8), 0, 0.85),
    ((1, 49, 96, 3), 0, 0.60),
]
DECODE_SHAPES = ["D:768/H:12/Hkv:12/past:1024", "D:2048/H:16/Hkv:16/past:4096", "D:2048/H:32/Hkv:8/past:4096",
                 "D:4096/H:32/Hkv:8/past:8192", "D:4096/H:32/Hkv:32/past:32768"]
ONE_HEAD = "H:1/Hkv:1/head_dim:128/past:32768"
SEVERAL = (2, 4, 8, 16)  # sequences, or tokens of one
# stored type, least time of f32 / its time, the same with AVX2
CACHE_TARGETS = [("f16", 1.8, 1.8), ("bf16", 1.8, 1.8), ("int8", 3.2, 3.0)]
WEIGHT_TARGETS = [*CACHE_TARGETS, ("int4", 5.0, 3.5)]
# option, least of_limit / that of a plain causal call (packed: / that of a call for each document): mha_attention, the layer
VARIANT_TARGETS = [
    ("window_256/n:8192", 0.85, None),
    ("window_512/n:1024", 0.95, 0.95),
    ("not_causal/n:1024", 0.95, 0.95),
    ("lengths/n:1024", 0.95, 0.95),
    ("softcap/n:1024", 0.85, 0.85),
    ("bias/n:1024", 0.85, 0.85),
    ("bias_f16/n:1024", 0.85, 0.85),
    ("mask/n:1024", 0.85, 0.85),
    ("alibi/n:1024", None, 0.95),
    ("sinks/n:1024", None, 0.95),
    ("rope/n:1024", None, 0.95),
    ("relative_bias/n:1024", 0.85, 0.85),
    ("q_scales/n:1024", None, 0.95),
    ("qk_norm/n:1024", None, 0.95),
    ("gate/n:1024", None, 0.95),
    ("groups/n:4096", 0.95, None),
    ("packed/n:4096", 0.97, None),
]


class InputError(Exception):
    """What is wrong with the arguments or files, in a sentence."""


class Missing(Exception):
    """Why there is no figure."""


class Results:
    """The medians of one or more files, by the names of the benchmarks."""

    def __init__(self, instruction_set):
        self.instruction_set = instruction_set
        self.figures = {}  # name -> number of the file -> its figures
        self.errors = {}  # name -> message
        self.openblas_cores = set()  # whose kernels it was measured with
        self.files = 0

    def add(self, context, benchmarks):
        """The benchmarks of one more file."""
        self.files += 1
        core = context.get("openblas_core")
        is_crippled = core is not None and context.get("openblas_has_instruction_set") != "yes"
        if core is not None and not is_crippled:
            self.openblas_cores.add(core)
        repetitions, medians = {}, {}
        for entry in benchmarks:
            name = entry.get("run_name", entry["name"]).removesuffix("/real_time")
            if is_crippled and "_openblas/" in name:
                self.errors[name] = f"OpenBLAS had its kernels for {core}"
            elif entry.get("error_occurred"):
                self.errors[name] = entry.get("error_message", "error").split(":")[0]
            elif entry.get("aggregate_name") == "median":
                medians[name] = entry
            elif entry.get("run_type") == "iteration":
                repetitions.setdefault(name, []).append(entry)
        for name, entries in repetitions.items():
            keys = [key for key, value in entries[0].items() if isinstance(value, (int, float))]
            medians.setdefault(name, {key: statistics.median(entry[key] for entry in entries) for key in keys})
        for name, figures in medians.items():
            self.figures.setdefault(name, {})[self.files] = figures

    def openblas(self):
        return f"OpenBLAS ({', '.join(sorted(self.openblas_cores))})" if self.openblas_cores else "OpenBLAS"

    def groups(self):
        return {name.split("/")[0] for name in [*self.figures, *self.errors]}

    def by_file(self, name, figure):
        found = {file: figures[figure] for file, figures in self.figures.get(name, {}).items() if figure in figures}
        if not found:
            raise Missing(self.errors.get(name, "not measured"))
        return found

    def get(self, name, figure="of_limit"):
        """The figure in each file that has it."""
        return list(self.by_file(name, figure).values())

    def ratios(self, name, other, figure):
        """The figure of name / that of other, in each file that has both."""
        figures, others = self.by_file(name, figure), self.by_file(other, figure)
        both = [file for file in figures if file in others]
        if not both:
            raise Missing("not measured in one file")
        return [figures[file] / others[file] for file in both]

    def counts(self, start):
        """The numbers behind `start`, which are the ends of names."""
        return [int(name.removeprefix(start)) for name in [*self.figures, *self.errors] if name.startswith(start)]


class Table:
    def __init__(self, missed_only):
        self.missed_only = missed_only
        self.lines = []
        self.met = self.count = 0

    def add(self, name, what, target, measure, at_most=False):
        """measure() gives the figure of each file, or raises Missing."""
        try:
            values = measure()
            value = statistics.median(values)
            met = value <= target if at_most else value >= target
            shown = ", ".join(f"{value:.3f}" for value in values)
        except Missing as missing:
            met, shown = False, str(missing)
        self.count += 1
        self.met += met
        if not (met and self.missed_only):
            sign = "<=" if at_most else ">="
            self.lines.append(f"| {name} | {what} | {shown} | {sign} {target:.2f} | {'yes' if met else 'no'} |")

    def print(self, title):
        print(f"## {title}: {self.met} of {self.count} targets met\n")
        if self.lines:
            print("| benchmark | figure | measured | target | met |\n|---|---|---|---|---|")
            print("\n".join(self.lines) + "\n")


def shape_name(shape, causal):
    return "B:{}/n:{}/D:{}/H:{}".format(*shape) + f"/causal:{causal}"


def attention_name(n, head_dim, causal):
    heads = 4 if n <= 2048 else 2
    return f"attention_prefill/{shape_name((1, n, heads * head_dim, heads), causal)}/head_dim:{head_dim}"


def least_of_limit(results, name):
    """Less where arithmetic and memory take about as long: they do not overlap fully."""
    try:
        times = statistics.median(results.get(name, "compute_us")), statistics.median(results.get(name, "memory_us"))
    except Missing:
        return 0.90
    return 0.80 if max(times) < 2 * min(times) else 0.90


def layer_prefill(results, table):
    for shape, causal, target in LAYER_TARGETS:
        name = f"layer_prefill/{shape_name(shape, causal)}"
        table.add(name, "of_limit", target, lambda: results.get(name))


def attention_prefill(results, table):
    def of_limit(n, head_dim, causal, target):
        name = attention_name(n, head_dim, causal)
        table.add(name, "of_limit", target, lambda: results.get(name))

    for n, target in {128: 0.5, 512: 0.7, 1024: 0.8, 4096: 0.85, 8192: 0.85, 16384: 0.85}.items():
        of_limit(n, 64, 1, target)
    of_limit(128, 64, 0, 0.70)
    for n in LONG_N:
        of_limit(n, 64, 0, 0.85)
    for n in LONG_N:
        of_limit(n, 128, 0, 0.90)
    for causal in (1, 0):
        for n in LONG_N:
            of_limit(n, 32, causal, 0.70)

    for causal in (1, 0):
        for n in PREFILL_N:
            at_64, at_128 = attention_name(n, 64, causal), attention_name(n, 128, causal)
            table.add(at_128, "of_limit / that of head_dim 64", 1.0, lambda: results.ratios(at_128, at_64, "of_limit"))
            for head_dim in (80, 96):
                name = attention_name(n, head_dim, causal)

                def of_the_worse():
                    return [max(pair) for pair in zip(*(results.ratios(name, other, "of_limit") for other in (at_64, at_128)))]

                table.add(name, "of_limit / the worse of head_dim 64 and 128", 0.9, of_the_worse)

    for head_dim in (32, 64, 80, 96, 128):
        for causal in (1, 0):

            def least_of_best_before():
                values = [statistics.median(results.get(attention_name(n, head_dim, causal))) for n in LONG_N]
                return [min(values[i] / max(values[: i + 1]) for i in range(len(values)))]

            name = f"attention_prefill, head_dim {head_dim}, causal {causal}, n {LONG_N[0]} to {LONG_N[-1]}"
            table.add(name, "of_limit / the best at a smaller n", 0.97, least_of_best_before)


def projection(results, table):
    for depth in (256, 768, 2048, 4096):
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024):
            shape = f"/M:{rows}/K:{depth}/N:{3 * depth}"
            name, openblas = "projection" + shape, "projection_openblas" + shape
            table.add(name, "of_limit", least_of_limit(results, name), lambda: results.get(name))
            table.add(name, f"time / {results.openblas()}", 1.0, lambda: results.ratios(name, openblas, "cpu_time"), at_most=True)


def latency(results, table):
    for shape in LATENCY_SHAPES:
        arguments = shape_name(shape, 1)
        name, loops = "latency/" + arguments, "latency_scalar_loops/" + arguments
        target = 1.5 if shape == (1, 1, 8, 2) else 1.0
        table.add(name, "time / plain loops", target, lambda: results.ratios(name, loops, "cpu_time"), at_most=True)
    name = "latency/" + shape_name((1, 16, 64, 4), 1)
    table.add(name, "of_limit", 0.4, lambda: results.get(name))


def decode(results, table):
    for shape in DECODE_SHAPES:
        name = f"decode/{shape}"
        table.add(name, "of_limit", 0.90, lambda: results.get(name))


def several(results, table, start):
    for count in SEVERAL:
        name = f"{start}{count}/{DECODE_SHAPES[2]}"
        table.add(name, "of_limit", least_of_limit(results, name), lambda: results.get(name))


def decode_batch(results, table):
    several(results, table, "decode_batch/B:")


def decode_tokens(results, table):
    several(results, table, "decode_tokens/n:")


def decode_attention(results, table):
    grouped = "decode_attention/H:32/Hkv:8/head_dim:64/past:4096"
    table.add(grouped, "time / that of as many heads as kv heads", 1.1, lambda: [1 / times for times in results.get(grouped, "times_ungrouped")],
              at_most=True)
    for name in (grouped, f"decode_attention/{ONE_HEAD}"):
        table.add(name, "of_limit", 0.90, lambda: results.get(name))


def storage(results, table):
    for start, end, targets in (("cache", "H:16/Hkv:16/head_dim:128/past:4096", CACHE_TARGETS),
                                ("weights", "D:4096/H:32/Hkv:32/past:0", WEIGHT_TARGETS)):
        for kind, target, avx2_target in targets:
            name = f"storage/{start}:{kind}/{end}"
            table.add(name, "time of f32 / its time", avx2_target if results.instruction_set == "avx2" else target,
                      lambda: results.get(name, "times_f32"))


def variants(results, table):
    for option, of_attention, of_layer in VARIANT_TARGETS:
        for what, target in (("attention", of_attention), ("layer", of_layer)):
            name = f"variants/{what}/{option}"
            if target:
                table.add(name, "of_limit / that of a plain call", target, lambda: results.get(name, "of_plain"))


def threads(results, table):
    layers = [shape_name(shape, causal) for shape, causal, _ in LAYER_TARGETS
              if shape not in ((1, 128, 256, 4), (1, 49, 96, 3))]  # under 1 ms
    for name in [*layers, f"decode/{DECODE_SHAPES[-1]}", f"decode_attention/{ONE_HEAD}"]:
        start = f"threads/{name}/T:"
        most = max(results.counts(start), default=1)

        def of_one():
            if most == 1:
                raise Missing("not measured")
            return results.ratios(f"{start}{most}", f"{start}1", "of_limit")

        table.add(start + ("all" if most == 1 else str(most)), "of_limit / that on one core", 0.95, of_one)


GROUPS = {group.__name__: group for group in (layer_prefill, attention_prefill, projection, latency, decode, decode_batch, decode_tokens,
                                              decode_attention, storage, variants, threads)}


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        context, benchmarks = content["context"], content["benchmarks"]
        context["instruction_set"]
        for entry in benchmarks:
            entry["name"]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no result of mha_bench; make one by tools/bench.sh --benchmark_format=json") from error
    return context, benchmarks


def main():
    parser = argparse.ArgumentParser(description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="what tools/bench.sh --benchmark_format=json wrote")
    parser.add_argument("--group", action="append", choices=GROUPS, help="the targets of this group alone; may be given again")
    parser.add_argument("--missed", action="store_true", help="print only the targets that are not met")
    arguments = parser.parse_args()

    by_instruction_set = {}
    for path in arguments.results:
        context, benchmarks = read(path)
        instruction_set = context["instruction_set"]
        by_instruction_set.setdefault(instruction_set, Results(instruction_set)).add(context, benchmarks)

    groups = arguments.group or GROUPS
    all_met = True
    for instruction_set, results in by_instruction_set.items():
        if results.groups().isdisjoint(groups):
            raise InputError(f"there is no benchmark of {', '.join(groups)} among the results of {instruction_set}")
        table = Table(arguments.missed)
        for group in groups:
            GROUPS[group](results, table)
        table.print(instruction_set)
        all_met &= table.met == table.count
    return 0 if all_met else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other commands
    try:
        sys.exit(main())
    except InputError as error:
        print(f"tools/bench_targets.py: {error}", file=sys.stderr)
        sys.exit(2)
