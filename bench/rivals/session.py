"""What every comparison shares: taking turns, keeping results, and writing them beside the pages.

A result is {"key": [what was measured], "about": {...}, "seconds": {name: {what: [one for each
round]}}, "reasons": {name: why not}, ...}. A file of results keeps the newest of each key, so that
a comparison can be measured piece by piece. Data for users are tables in src/docs/data/NAME.csv of
the last three processors; comments in their first lines name commit, machine and versions of each.
"""

import argparse
import contextlib
import csv
import datetime
import json
import math
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import time

root = pathlib.Path(__file__).resolve().parents[2]
build = root / "build"
work = build / "rivals"
data = root / "src" / "docs" / "data"


class Failed(Exception):
    """A sentence that says what does not work."""


def say(sentence):
    print(sentence, file=sys.stderr, flush=True)


def run_main(main, setup="tools/bindings/python/setup.sh --rivals"):
    """Exit status: 0 success; 1 a result is wrong; 2 wrong usage; 4 a requirement is missing."""
    try:
        sys.exit(main())
    except (Failed, OSError, ImportError) as error:
        say(f"{pathlib.Path(sys.argv[0]).name}: {error}; {setup} installs what is needed")
        sys.exit(4)


def parser_for(description, examples, rounds, kind):
    """The options of the comparisons of whole models."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--busy",
        type=float,
        default=0.05,
        help="the share of the processors that other programs may use; 1 = repeat no run",
    )
    parser.add_argument("--json", type=pathlib.Path, default=work / f"{kind}.json", metavar="FILE")
    return parser


# ---- measuring


class Others:
    """What other programs take of all processors from now on; children of this one count as its own
    when they have ended."""

    def __init__(self):
        self.start, self.taken = time.monotonic(), self._taken()

    @staticmethod
    def _taken():
        with open("/proc/stat") as file:
            user, nice, system, idle, iowait, *rest = map(int, file.readline().split()[1:])
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK") - sum(
            usage.ru_utime + usage.ru_stime for usage in own
        )

    def share(self):
        return (
            (self._taken() - self.taken) / max(time.monotonic() - self.start, 1e-9) / os.cpu_count()
        )


def take_turns(runs, rounds, busy=math.inf, warm=0):
    """runs: {name: a function that returns {what: seconds}}. In each round all run once, with
    another one first each time; the first `warm` rounds do not count. A run beside which others
    took more than `busy` of the processors is made again. Returns seconds and reasons."""
    seconds, reasons, names = {name: {} for name in runs}, {}, list(runs)
    for number in range(-warm, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in reasons:
                continue
            for _ in range(5):
                others = Others()
                try:
                    found = runs[name]()
                except Failed as failed:
                    reasons[name], seconds[name] = str(failed), {}
                    break
                share = others.share()
                if share <= busy or number < 0:
                    for what, value in found.items() if number >= 0 else ():
                        seconds[name].setdefault(what, []).append(value)
                    break
                say(f"repeating {name}: other programs used {share:.0%} of the processors")
            else:
                raise Failed(
                    "other programs use too much of the processors; stop them, or allow more with"
                    " --busy"
                )
    return seconds, reasons


def median(result, name, what="call"):
    """None where it was not measured."""
    values = result["seconds"].get(name, {}).get(what)
    return statistics.median(values) if values else None


def ratio(result, name, other, what="call"):
    """How many times the time of `other` is that of `name`, compared round by round, since machines
    drift."""
    seconds = result["seconds"]
    return statistics.median(b / a for a, b in zip(seconds[name][what], seconds[other][what]))


# ---- results


def machine():
    names = re.findall(
        r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE
    )
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    kind = (
        "AVX-512 with VNNI"
        if "avx512_vnni" in flags
        else "AVX-512"
        if "avx512f" in flags
        else "AVX2"
        if "avx2" in flags
        else ""
    )
    cores = len(os.sched_getaffinity(0))
    return (
        f"{names[0] if names else os.uname().machine}{kind and f' ({kind})'}, {cores} virtual"
        f" core{'s' if cores > 1 else ''}"
    )


def processor():
    """The name of its microarchitecture, since what processors call themselves differs and repeats;
    of others, what machine() says."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    fields = re.findall(r"^(?:vendor_id|cpu family|model)\s*: (.*)", info, re.MULTILINE)[:3]
    found = " ".join([*fields, machine()])
    names = {
        "AuthenticAMD 25 .*AVX-512": "Zen 4",
        "AuthenticAMD 25 ": "Zen 3",
        "AuthenticAMD 26 ": "Zen 5",
        "GenuineIntel 6 85 .*VNNI": "Cascade Lake",
        "GenuineIntel 6 106 ": "Ice Lake",
        "GenuineIntel 6 143 ": "Sapphire Rapids",
        "GenuineIntel 6 207 ": "Emerald Rapids",
    }
    return next((name for key, name in names.items() if re.match(key, found)), machine())


def git(*arguments):
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def commit():
    """The last one that changed what is measured; sources that differ from it are named so."""
    measured = ["--", "src", "include", ":!*.md", ":!src/docs"]
    return (
        git("log", "-1", "--abbrev=7", "--format=%h", *measured) or "unknown"
    ) + "-changed" * bool(git("status", "--porcelain", *measured))


def about(rounds, versions):
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "machine": machine(),
        "rounds": rounds,
        "versions": versions,
    }


def keep(path, results):
    """Puts results in the place of older ones of the same key, and returns all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = load(path)
    for result in results:
        at = next((i for i, old in enumerate(kept) if old["key"] == result["key"]), len(kept))
        kept[at : at + 1] = [result]
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def load(path):
    with contextlib.suppress(FileNotFoundError):
        return json.loads(path.read_text())
    return []


# ---- what the pages name


def digits(number):
    return "" if number is None else f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def all_of(results, name):
    return " and ".join(sorted({str(result["about"][name]) for result in results}))


def source(results):
    """The sentence that names what was measured: versions, machine, number of runs."""
    versions = {
        name: version for result in results for name, version in result["about"]["versions"].items()
    }
    return (
        f"mha at commit {all_of(results, 'commit')}, {all_of(results, 'date')},"
        f" {all_of(results, 'machine')}; medians of {all_of(results, 'rounds')} interleaved runs; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + "."
    )


def write_data(name, sentence, rows):
    """rows: dictionaries, or lists of which the first has the names."""
    rows = list(rows)
    if not isinstance(rows[0], dict):
        rows = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    with open(data / f"{name}.csv", "w", newline="") as file:
        file.writelines(f"# {line}\n" for line in sentence.splitlines())
        names = dict.fromkeys(name for row in rows for name in row)
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    say(f"wrote src/docs/data/{name}.csv")


def merge_data(name, processor, sentence, rows):
    """Writes the rows of a processor before those of the one that was measured before it."""
    rows, said = [{"processor": processor, **row} for row in rows], [f"{processor}: {sentence}"]
    others = [(other, part) for other, part in read_data(name).items() if other != processor]
    for other, (sentence, some) in others[:2]:
        said.append(f"{other}: {sentence}")
        rows += [{key: value for key, value in row.items() if value} for row in some]
    write_data(name, "\n".join(said), rows)


def read_data(name):
    """{processor: (its sentence, its rows as dictionaries of words)}, the newest first"""
    path = data / f"{name}.csv"
    lines = path.read_text().splitlines() if path.exists() else []
    said = [line.removeprefix("# ").split(": ", 1) for line in lines if line.startswith("# ")]
    rows = list(csv.DictReader(lines[len(said) :]))
    return {
        processor: (sentence, [row for row in rows if row["processor"] == processor])
        for processor, sentence in said
    }
