#!/usr/bin/env python3
"""tools/perf_gate.sh [OPTION...] BASE [NEW]
tools/perf_gate.sh [OPTION...] --floor FILE [NEW]

Reports whether NEW is slower than BASE. Each is a git revision of this repository, which is built
first, or a libmha.so; NEW defaults to the working tree. Only the C interface is used, with each
version's own headers, so any two versions with the same major number can be compared. The headers
of a libmha.so are those in ../include next to it, as after installing it, or else those of the
working tree.

To compare times, both libraries are loaded into one process and called in turn, shape by shape in
random order, round by round. A shape is slower if both hold: the median over the rounds of new time
/ base time is at least 1 + the threshold, and the ranges do not overlap. A range extends from a
library's fastest round to its median round, because disturbances only ever add time. If the median
is slower but the ranges overlap, or if the 95% interval of the median reaches the threshold and is
wider than it, more rounds follow, up to four times as many; if that does not help, it is too noisy
to say. One thread is timed by its processor time, several threads by the clock.

A virtual machine does not show who else uses its cores. So before and after each sample, the
calling thread runs a loop that is slow only where another hardware thread shares its core. A sample
is quiet, busy, or mixed (where that thread comes or goes, or does little). Only samples in one
state are compared: quiet ones if 7 rounds have some of each library, or else busy ones, or else
mixed ones. The table names the state, and the ratio of busy samples, even if quiet ones decide.

With --count, valgrind counts the instructions of one call of each shape, without noise. It knows
AVX2 but not AVX-512.
"""

EPILOG = """\
Lines of a shapes file, for example:
  layer      B=1 n=128 D=768 H=12 causal            mha_forward: batch, rows, width, heads
  attention  B=1 n=1 n_kv=1024 H=12 head_dim=64     mha_attention: queries and keys
  layer      B=1 n=1 past=1024 D=768 H=12 causal    decoding: one row over a cache of 1024 positions
  recurrent  n=1024 H=16 head_dim=128               mha_recurrent_attention: the gated delta rule
Words of a line, with defaults in parentheses: B= (1), n=, D= (layer only), H=, kv_heads= (H=),
head_dim= (layer: D/H), n_kv= (attention only; n=), causal, past= (the positions in a KV cache; a
layer appends its rows, attention does not), kv_type= and weights= (a type of mha.h, of that cache
and of a layer; f32), arithmetic=f32|int8|int16|bf16 (of a layer; f32),
instruction_set= (auto, or a name of src/kernels/sets.def),
threads= (1). '#' begins a comment. A shape that BASE has no function or type for is not in the
base.

Exit status: 0 no regression, 1 regression, 2 wrong usage, 3 too noisy to say, 4 cannot measure,
5 no floor for this processor.

Examples:
  tools/perf_gate.sh HEAD                                changes since the last commit, by time
  tools/perf_gate.sh --floor bench/floor.txt             the fastest version for this processor
  taskset -c 1 tools/perf_gate.sh --threshold 3% main    on one core, against the branch main
  tools/perf_gate.sh --count origin/main                 instructions
  tools/perf_gate.sh old/libmha.so new/libmha.so         two existing libraries
"""

import argparse
import collections
import fcntl
import json
import math
import operator
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import slots

# By MHA_INSTRUCTION_SET_*, whose numbers are without gaps.
ROW = re.compile(r"^MHA_SET\((\w+), \w+, (\d+)", re.MULTILINE)
ROWS = ROW.findall((ROOT / "src" / "kernels" / "sets.def").read_text())
SETS = ["auto", *(name for name, number in sorted(ROWS, key=lambda row: int(row[1])))]
HEADER = (ROOT / "include" / "mha.h").read_text()
TYPES = [name.lower() for name in re.findall(r"^#define MHA_TYPE_(\w+)", HEADER, re.MULTILINE)]
CHOICES = {
    "kv_type": (TYPES, "a cache type"),
    "instruction_set": (SETS, "an instruction set"),
    "weights": (TYPES, "a weight type"),
    "arithmetic": (["f32", "int8", "int16", "bf16"], "an arithmetic"),
}
LEAST_ROUNDS, IN_ROUND = 7, 4  # samples of each version, as main.cpp takes them


class Stop(Exception):
    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status


def wrong_usage(sentence):
    return Stop(2, f"{sentence}; see tools/perf_gate.sh --help")


def cannot_measure(sentence):
    return Stop(4, f"cannot measure: {sentence}")


# ---- Shapes


class Shape:
    """A line of a shapes file. Raises ValueError with a sentence."""

    def __init__(self, line):
        kind, *words = line.split()
        self.text = " ".join([kind, *words])
        if kind not in ("layer", "attention", "recurrent"):
            raise ValueError(
                f"'{kind}' is not a kind of shape; a line must begin with 'layer', 'attention' or"
                " 'recurrent'"
            )
        self.is_layer, self.is_recurrent = kind == "layer", kind == "recurrent"
        refused = {
            "layer": ["n_kv"],
            "attention": ["D", "weights", "arithmetic"],
            "recurrent": [
                "D",
                "weights",
                "arithmetic",
                "n_kv",
                "past",
                "kv_heads",
                "kv_type",
                "causal",
            ],
        }[kind]
        self.size = dict.fromkeys(
            ("B", "n", "n_kv", "D", "H", "kv_heads", "head_dim", "past", "threads"), 0
        )
        self.is_causal, names = False, {name: choices[0] for name, (choices, _) in CHOICES.items()}
        for word in words:
            key, equals, value = word.partition("=")
            if word == "causal" and word not in refused:
                self.is_causal = True
            elif equals and key in self.size and key not in refused:
                if not re.fullmatch("[0-9]{1,10}", value) or not 0 < int(value) < 2**31:
                    raise ValueError(
                        f"'{word}' is not a size; it must be a whole number from 1 to {2**31 - 1}"
                    )
                self.size[key] = int(value)
            elif equals and key in names and key not in refused:
                choices, what = CHOICES[key]
                if value not in choices:
                    raise ValueError(f"'{value}' is not {what}; use one of {', '.join(choices)}")
                names[key] = value
            else:
                raise ValueError(
                    f"'{word}' is not allowed in a line that begins with '{kind}';"
                    " tools/perf_gate.sh --help lists the words"
                )
        size = self.size
        for key in ("n", "H", "D" if self.is_layer else "head_dim"):
            if not size[key]:
                raise ValueError(f"{'a layer' if self.is_layer else kind} needs {key}=")
        if self.is_layer and not size["head_dim"]:
            size["head_dim"], rest = divmod(size["D"], size["H"])
            if rest:
                raise ValueError("H does not divide D; give head_dim= or another number of heads")
        if size["past"] and size["n_kv"]:
            raise ValueError("n_kv= and past= both provide keys; give only one of them")
        if names["kv_type"] != "f32" and not size["past"]:
            raise ValueError("kv_type= is the type of a cache; add past=")
        for key, default in ("B", 1), ("threads", 1), ("kv_heads", size["H"]), ("n_kv", size["n"]):
            size[key] = size[key] or default
        if size["threads"] > os.cpu_count():
            raise ValueError(
                f"'{self.text}' asks for more threads than this machine has processors"
                f" ({os.cpu_count()})"
            )
        self.names = names

    def use_set(self, name):
        if self.names["instruction_set"] == "auto":
            self.names["instruction_set"] = name
            self.text += f" instruction_set={name}"

    def argument(self):
        """As mha_gate reads it."""
        size = self.size
        numbers = [
            int(self.is_layer),
            int(self.is_recurrent),
            *(size[key] for key in ("B", "n", "n_kv", "D", "H", "kv_heads", "head_dim", "past")),
            int(self.is_causal),
            size["threads"],
            *(
                CHOICES[name][0].index(self.names[name])
                for name in ("kv_type", "weights", "arithmetic", "instruction_set")
            ),
        ]
        return " ".join(map(str, [*numbers, self.text]))

    def bytes(self):
        """An estimate, with the packed weights and caches of both libraries."""
        size = self.size
        q_width, kv_width = (size[key] * size["head_dim"] for key in ("H", "kv_heads"))
        rows = size["B"] * (
            size["n"] * 4 * (q_width + size["D"]) + (size["n_kv"] + 3 * size["past"]) * 4 * kv_width
        )
        return 4 * (rows + 4 * size["D"] * (2 * q_width + 2 * kv_width))


def read_shapes(path):
    shapes = []
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError as error:
        raise cannot_measure(
            f"the file of shapes '{path}' cannot be opened: {error.strerror}"
        ) from error
    for number, line in enumerate(lines, 1):
        line = line.split("#")[0].strip()
        try:
            shapes += [Shape(line)] if line else []
        except ValueError as error:
            raise cannot_measure(f"{path}:{number}: {error}") from error
    if not shapes:
        raise cannot_measure(
            f"the file '{path}' has no shape; add a line such as 'layer B=1 n=128 D=768 H=12'"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = sum(shape.bytes() for shape in shapes)
    if needed > memory / 2:
        raise cannot_measure(
            f"the shapes need about {needed * 1e-9:.3g} GB, more than half of this machine's"
            f" {memory * 1e-9:.3g} GB"
        )
    return shapes


# ---- What is compared


def floor_of(path):
    """The commits that a file of floors names for this processor."""
    try:
        lines = [line.split("#")[0].split() for line in pathlib.Path(path).read_text().splitlines()]
        found = dict(
            re.findall(
                r"^(vendor_id|cpu family|model)\s*: (.*)$",
                pathlib.Path("/proc/cpuinfo").read_text(),
                re.MULTILINE,
            )
        )
    except OSError as error:
        raise cannot_measure(f"'{error.filename}' cannot be read: {error.strerror}") from error
    for words in filter(None, lines):
        if len(words) != 5:
            raise cannot_measure(
                f"{path}: a line has a kind, a vendor, a family, models and commits, not"
                f" '{' '.join(words)}'"
            )
        _, vendor, family, models, commits = words
        if (vendor, family) == (found.get("vendor_id"), found.get("cpu family")):
            for part in models.split(","):
                low, _, high = part.partition("-")
                if int(low) <= int(found["model"]) <= int(high or low):
                    return commits.split(",")
    raise Stop(5, f"not checked: {path} has no floor for this processor")


# The folder of its headers; what to call it.
Version = collections.namedtuple("Version", "library include name")


class Builder:
    def __init__(self, folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(folder / "lock", "w", encoding="utf-8")
        except OSError as error:
            raise cannot_measure(
                f"the folder '{folder}' cannot be created: {error.strerror}"
            ) from error
        self.folder = folder = folder.resolve()
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        # Libraries are kept by commit and by what compiles them: a base built by another compiler
        # is no base.
        said = [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS")]
        for name, default in ("CC", "cc"), ("CXX", "c++"):
            said.append(
                subprocess.run(
                    f"{os.environ.get(name, default)} --version",
                    shell=True,
                    capture_output=True,
                    text=True,
                ).stdout
            )
        self.compiler = f"{zlib.crc32(' '.join(said).encode()):08x}"

    def cmake(self, source, folder, target, settings, what):
        """Silent; what the tools say is in the log. Configures for new settings only: what else has
        changed, the build itself sees."""
        log, kept, settings = (
            self.folder / "log",
            folder / "settings",
            [*settings, "-DCMAKE_BUILD_TYPE=Release"],
        )
        generator = (
            ["-G", "Ninja"]
            if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists()
            else []
        )
        commands = [
            [
                "cmake",
                "--build",
                folder,
                "--target",
                target,
                "--parallel",
                str(len(os.sched_getaffinity(0))),
            ]
        ]
        if not kept.exists() or kept.read_text() != " ".join(settings):
            commands.insert(0, ["cmake", "-S", source, "-B", folder, *generator, *settings])
        with open(log, "w", encoding="utf-8") as output:
            for command in commands:
                if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode:
                    kept.unlink(missing_ok=True)
                    sys.stderr.write(
                        "".join(
                            [line for line in open(log, encoding="utf-8") if "rror" in line][:20]
                        )
                    )
                    raise cannot_measure(
                        f"{what} does not build; the compiler's output is in {log}"
                    )
        kept.write_text(" ".join(settings))

    def build_library(self, source, folder, name):
        print(f"perf gate: building {name}", file=sys.stderr)
        off = [
            f"-DMHA_{part}=OFF"
            for part in ("TESTS", "TOOLS", "BENCH", "OPENBLAS", "PTHREADPOOL", "ONNX", "INSTALL")
        ]
        self.cmake(source, folder, "mha_shared", off, name)
        found = next(folder.glob("**/libmha.so"), None)
        if not found:
            raise cannot_measure(f"{name} builds no libmha.so")
        return found

    def working_tree(self):
        return Version(
            self.build_library(ROOT, self.folder / f"work-{self.compiler}", "the working tree"),
            ROOT / "include",
            "the working tree",
        )

    def version(self, given):
        if pathlib.Path(given).is_file():
            beside = pathlib.Path(given).resolve().parent.parent / "include"
            return Version(
                pathlib.Path(given).resolve(),
                beside if (beside / "mha.h").exists() else ROOT / "include",
                given,
            )
        git = ["git", "-C", ROOT]
        found = subprocess.run(
            [*git, "rev-parse", "--verify", "--quiet", f"{given}^{{commit}}"],
            capture_output=True,
            text=True,
        )
        if found.returncode:
            raise cannot_measure(
                f"'{given}' is neither a file nor a revision of this repository (a shallow clone"
                " lacks older ones: git fetch --unshallow)"
            )
        commit = found.stdout.strip()
        folder, name = self.folder / f"{commit}-{self.compiler}", commit[:10]
        name = name if commit.startswith(given) else f"{given} ({name})"
        if not (folder / "libmha.so").exists():
            shutil.rmtree(folder, ignore_errors=True)
            source = folder / "source"
            source.mkdir(parents=True)
            archive = subprocess.run(
                [*git, "archive", commit], stdout=subprocess.PIPE, check=True
            ).stdout
            subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
            shutil.copytree(source / "include", folder / "include")
            # Where a cache of compilations is in use, files that are as in another version's folder
            # are found in it.
            os.environ["CCACHE_BASEDIR"] = str(source)
            shutil.copy(self.build_library(source, source / "build", name), folder / "part")
            shutil.rmtree(source)
            (folder / "part").rename(folder / "libmha.so")
        return Version(folder / "libmha.so", folder / "include", name)

    def program(self, versions):
        folder = self.folder / f"program-{self.compiler}"
        self.cmake(
            ROOT / "bench" / "gate",
            folder,
            "mha_gate",
            ["-DMHA_GATE_INCLUDES=" + ";".join(str(version.include) for version in versions)],
            "the measuring program",
        )
        return folder / "mha_gate"


# ---- Measuring


def run_times(program, rounds, versions, shapes):
    """Of each shape: the difference of the outputs, and of each round the samples of each version:
    (seconds of a call, its state). None and a sentence if it is not in a base."""
    libraries = [word for version in versions for word in (version.library, version.name)]
    done = subprocess.run(
        [program, "times", str(rounds), *libraries, *(shape.argument() for shape in shapes)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise cannot_measure(
            done.stderr.strip() or f"the measuring program ended with status {done.returncode}"
        )
    texts = done.stdout.splitlines()
    lines = [
        [] if line.startswith("absent ") else [float(word) for word in line.split()]
        for line in texts
    ]
    if not any(lines):
        raise cannot_measure("the base has none of the shapes")
    best = slots.best_of(
        [
            line[i : i + 2]
            for line in lines
            for i in (*range(3, len(line), 6), *range(5, len(line), 6))
        ]
    )
    found = []
    for text, line in zip(texts, lines):
        if not line:
            found.append((None, text.removeprefix("absent ")))
            continue
        samples = [
            (line[i], (line[i + 1], slots.state_of(line[i + 2 : i + 4], line[i + 4 : i + 6], best)))
            for i in range(1, len(line), 6)
        ]
        rounds = [
            samples[i : i + IN_ROUND * len(versions)]
            for i in range(0, len(samples), IN_ROUND * len(versions))
        ]
        found.append(
            (
                line[0],
                [
                    [
                        [sample for number, sample in each if number == i]
                        for i in range(len(versions))
                    ]
                    for each in rounds
                ],
            )
        )
    return found


def median_interval(values):
    """The 95% interval of the median: the k-th value is above it if fewer than k lie below, each of
    which happens by the toss of a coin."""
    values, n, k = sorted(values), len(values), 0
    while 2 * (k + 1) < n and 2 * sum(math.comb(n, i) for i in range(k + 2)) <= 0.05 * 2**n:
        k += 1
    return values[k], values[n - 1 - k]


def times_in(state, rounds):
    """For each version, the fastest sample of each round in this state: the fastest stands for the
    round because disturbances only ever add time, and is one of as many samples for each
    version."""
    found = []
    for samples in rounds:
        times = [
            [seconds for seconds, sample_state in each if state in (sample_state, "any")]
            for each in samples
        ]
        count = min(map(len, times))
        found += [[min(each[:count]) for each in times]] if count else []
    return [list(each) for each in zip(*found)]


class Result:
    def __init__(self, shape):
        self.shape, self.rounds, self.states = shape, [], []

    def is_absent(self, difference, reason):
        """Whether the shape is not in the base, and therefore not compared."""
        if difference is None:
            print(f"perf gate: {reason}", file=sys.stderr)
            (
                self.verdict,
                self.difference,
                self.ratio,
                self.base,
                self.new,
                self.state,
                self.busy_ratio,
            ) = (
                "absent",
                0,
                None,
                [],
                [],
                "",
                None,
            )
            self.base_name = ""
        return difference is None

    def choose(self, names):
        """The times that are compared: of the state that has enough of them, and of the fastest
        base."""
        for self.state in (*slots.STATES, "any"):
            *bases, self.new = times_in(self.state, self.rounds) or [[]]
            if len(self.new) >= LEAST_ROUNDS:
                break
        fastest = min(range(len(bases)), key=lambda index: statistics.median(bases[index]))
        self.base, self.base_name = bases[fastest], names[fastest]
        busy = times_in("busy", self.rounds)
        self.busy_ratio = (
            statistics.median(map(operator.truediv, busy[-1], busy[fastest])) if busy else None
        )
        self.states = [
            state for versions in self.rounds for samples in versions for _, state in samples
        ]

    def judge(self, threshold):
        ratios = [new / base for base, new in zip(self.base, self.new)]
        self.ratio, self.interval = statistics.median(ratios), median_interval(ratios)
        self.ranges = [(min(each), statistics.median(each)) for each in (self.base, self.new)]
        low, high = self.interval
        if self.state == "any":
            self.verdict = "too_noisy"
        elif self.ratio >= 1 + threshold:
            self.verdict = "regression" if self.ranges[1][0] > self.ranges[0][1] else "too_noisy"
        else:
            self.verdict = "ok" if high < 1 + threshold or high - low < threshold else "too_noisy"


def measure_times(program, versions, shapes, threshold, rounds):
    results = {shape: Result(shape) for shape in shapes}
    undecided = shapes
    for more in (rounds, rounds, 2 * rounds):
        print(
            f"perf gate: {more} rounds of {len(undecided)} shape{'s'[: len(undecided) > 1]}",
            file=sys.stderr,
        )
        for shape, (difference, found) in zip(
            undecided, run_times(program, more, versions, undecided)
        ):
            result = results[shape]
            if result.is_absent(difference, found):
                continue
            result.difference = difference
            result.rounds += found
            result.choose([version.name for version in versions])
            result.judge(threshold)
        undecided = [shape for shape in undecided if results[shape].verdict == "too_noisy"]
        if not undecided:
            break
    return list(results.values())


def counted(program, index, library, arguments):
    """Instructions of one call of each shape, with the headers of this index."""
    if not shutil.which("valgrind"):
        raise cannot_measure(
            "valgrind, which counts the instructions, is not installed (Debian: apt-get install"
            " valgrind)"
        )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                "--collect-atstart=no",
                "--toggle-collect=mha_gate_counted_call",
                "--dump-after=mha_gate_counted_call",
                "--combine-dumps=yes",
                f"--callgrind-out-file={folder}/profile",
                program,
                "call",
                str(index),
                library,
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        profile = pathlib.Path(folder, "profile")
        counts = (
            [
                int(line.split()[1])
                for line in profile.read_text().splitlines()
                if line.startswith("totals: ")
            ]
            if profile.exists()
            else []
        )
    counts = counts[: len(arguments)]  # then comes what is between the last call and the end
    if done.returncode or len(counts) < len(arguments) or 0 in counts:
        raise cannot_measure(
            f"valgrind ended with status {done.returncode} without counting each of"
            f" {len(arguments)} calls of {library}:\n{done.stdout}"
        )
    return counts


def count_instructions(program, versions, shapes, threshold):
    for shape in shapes:
        shape.use_set("avx2")
        if shape.size["threads"] > 1:
            raise cannot_measure(
                f"the shape '{shape.text}' has several threads; instructions are counted for one"
                " thread only"
            )
        if shape.names["instruction_set"] not in ("scalar", "avx2"):
            raise cannot_measure(
                f"the shape '{shape.text}' needs what valgrind does not know; leave instruction_set"
                " out for AVX2"
            )
    results = list(map(Result, shapes))
    present = []
    for result, (result.difference, reason) in zip(
        results, run_times(program, 0, versions, shapes)
    ):
        present += [] if result.is_absent(result.difference, reason) else [result]
    print(f"perf gate: counting the instructions of {len(present)} calls of both", file=sys.stderr)
    arguments = [result.shape.argument() for result in present]
    counts = [
        counted(program, index, version.library, arguments)
        for index, version in enumerate(versions)
    ]
    for result, old, now in zip(present, *counts):
        result.base, result.new = [old], [now]
        result.ratio = result.new[0] / result.base[0]
        result.verdict = "regression" if result.ratio > 1 + threshold else "ok"
    return results


# ---- What is said


def table(results, is_count, has_bases):
    if is_count:
        rows = [
            ["shape", "base instructions", "new instructions", "new / base", "outputs", "verdict"]
        ]
    else:
        rows = [
            [
                "shape",
                "base",
                "new",
                "new / base",
                "95% interval",
                "rounds",
                "state",
                "busy",
                "outputs",
                "verdict",
            ]
        ]
    for result in results:
        if result.verdict == "absent":
            rows.append([result.shape.text, *[""] * (len(rows[0]) - 2), "not in the base"])
            continue
        outputs = "same bits" if result.difference < 0 else f"differ by {result.difference:.1e}"
        if is_count:
            figures = [str(result.base[0]), str(result.new[0]), f"{result.ratio:.4f}"]
        else:
            figures = [
                *(f"{low * 1e3:.4g} - {high * 1e3:.4g} ms" for low, high in result.ranges),
                f"{result.ratio:.3f}",
                "{:.3f} - {:.3f}".format(*result.interval),
                str(len(result.base)),
                result.state,
                f"{result.busy_ratio:.3f}" if result.busy_ratio else "",
            ]
            figures[0] += f", {result.base_name}" * has_bases
        verdict = {"ok": "ok", "regression": "SLOWER", "too_noisy": "too noisy"}[result.verdict]
        rows.append([result.shape.text, *figures, outputs, verdict])
    return rows


def conclude(results, threshold, is_count):
    """The verdict of all, and a sentence."""
    unit, count = "instructions" if is_count else "time", len(results)
    absent = sum(result.verdict == "absent" for result in results)
    slower, noisy = (
        [result for result in results if result.verdict == verdict]
        for verdict in ("regression", "too_noisy")
    )
    if slower:
        worst = max(slower, key=lambda result: result.ratio)
        return (
            1,
            (
                f"Regression in {len(slower)} of {count} shapes; the worst is '{worst.shape.text}',"
                f" which takes {(worst.ratio - 1) * 100:.1f}% more {unit}."
            ),
        )
    if noisy:
        worst = max(noisy, key=lambda result: result.interval[1] - result.interval[0])
        low, high = ((bound - 1) * 100 for bound in worst.interval)
        return (
            3,
            (
                f"Too noisy to say for {len(noisy)} of {count} shapes: '{worst.shape.text}' came"
                f" out between {low:+.1f}% and {high:+.1f}%. Run it again on a quieter machine, or"
                " with a larger --threshold or more --rounds."
            ),
        )
    return (
        0,
        f"No regression: no shape takes {threshold * 100:g}% more {unit}."
        + f" {absent} of {count} shapes are not in the base." * (absent > 0),
    )


def report(arguments, bases, new, results):
    status, sentence = conclude(results, arguments.threshold, arguments.count)
    base = ", ".join(version.name for version in bases) + ", for each shape the fastest" * (
        len(bases) > 1
    )
    heading = (
        ("instructions" if arguments.count else "time")
        + " of one call"
        + ("" if arguments.count else ", fastest - median round")
        + ":"
        f" base = {base}, new = {new.name}, threshold {arguments.threshold * 100:g}%"
    )
    rows = table(results, arguments.count, len(bases) > 1)
    if not arguments.count:
        states = slots.shares_of([state for result in results for state in result.states])
        sentence = (
            f"Samples: {', '.join(f'{share:.0%} {state}' for state, share in states.items())}."
            f" {sentence}"
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(
        heading,
        "",
        *(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows
        ),
        "",
        sentence,
        sep="\n",
    )
    try:
        if arguments.json:
            shapes = [
                {
                    "shape": result.shape.text,
                    "verdict": result.verdict,
                    "ratio": result.ratio,
                    "base": result.base,
                    "new": result.new,
                    "outputs_difference": max(0, result.difference),
                    **(
                        {}
                        if arguments.count
                        else {
                            "fastest_base": result.base_name,
                            "state": result.state,
                            "busy_ratio": result.busy_ratio,
                            "states": slots.shares_of(result.states),
                        }
                    ),
                }
                for result in results
            ]
            pathlib.Path(arguments.json).write_text(
                json.dumps(
                    {
                        "base": base,
                        "new": new.name,
                        "threshold": arguments.threshold,
                        "sentence": sentence,
                        "shapes": shapes,
                    },
                    indent=2,
                )
                + "\n"
            )
    except OSError as error:
        raise cannot_measure(
            f"the report cannot be written to '{error.filename}': {error.strerror}"
        ) from error
    return status


def parse():
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise wrong_usage(message)

    def percent(text):
        value = float(text.removesuffix("%"))
        if not 0 < value <= 1000:
            raise ValueError
        return value / 100

    def rounds(text):
        if not LEAST_ROUNDS <= int(text) <= 10000:
            raise ValueError
        return int(text)

    percent.__name__, rounds.__name__ = "percentage above 0", f"number from {LEAST_ROUNDS} to 10000"
    usage, _, description = __doc__.partition("\n\n")
    parser = Parser(
        usage=usage.replace("\n", "\n       "),
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("versions", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--count", action="store_true", help="count instructions instead of measuring time"
    )
    parser.add_argument(
        "--floor",
        metavar="FILE",
        help=(
            "use as BASE what FILE (bench/floor.txt) names for this processor: a commit, "
            "or several, of which the fastest counts for each shape"
        ),
    )
    parser.add_argument(
        "--shapes",
        metavar="FILE",
        help=(
            "the shapes to measure, one per line (default: bench/gate/shapes.txt; "
            "with --count, bench/gate/counted_shapes.txt)"
        ),
    )
    parser.add_argument(
        "--threshold",
        metavar="P",
        type=percent,
        help="the slowdown that is a regression (default: 5%%; with --count, 1%%)",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=rounds,
        default=15,
        help="the number of rounds, at least 7 (default: 15)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all results, with the times of every round that was compared",
    )
    parser.add_argument(
        "--build",
        metavar="FOLDER",
        type=pathlib.Path,
        default=ROOT / "build" / "perf_gate",
        help=(
            "the folder to build in, which keeps builds for the next run (default: build/perf_gate)"
        ),
    )
    arguments = parser.parse_args()
    if arguments.floor and arguments.count:
        raise wrong_usage("--floor compares times and cannot be combined with --count")
    most = 1 if arguments.floor else 2
    if not most - 1 <= len(arguments.versions) <= most:
        raise wrong_usage(
            f"{'with --floor,' if arguments.floor else 'a base and'} at most one version to compare"
            f" with it can be given, but {len(arguments.versions)} were given"
        )
    arguments.threshold = arguments.threshold or (0.01 if arguments.count else 0.05)
    arguments.shapes = arguments.shapes or ROOT / "bench" / "gate" / (
        "counted_shapes.txt" if arguments.count else "shapes.txt"
    )
    return arguments


def main():
    try:
        arguments = parse()
        shapes = read_shapes(arguments.shapes)
        bases = floor_of(arguments.floor) if arguments.floor else arguments.versions[:1]
        new = arguments.versions[not arguments.floor :]
        builder = Builder(arguments.build)
        versions = [
            *map(builder.version, bases),
            builder.version(new[0]) if new else builder.working_tree(),
        ]
        program = builder.program(versions)
        if arguments.count:
            results = count_instructions(program, versions, shapes, arguments.threshold)
        else:
            results = measure_times(
                program, versions, shapes, arguments.threshold, arguments.rounds
            )
        sys.exit(report(arguments, versions[:-1], versions[-1], results))
    except Stop as stop:
        print(f"perf gate: {stop}", file=sys.stderr)
        sys.exit(stop.status)


if __name__ == "__main__":
    main()
