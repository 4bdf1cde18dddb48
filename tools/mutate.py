#!/usr/bin/env python3
"""Plants small faults in the library, one at a time, and reports those that no test finds.

tests/mutants.txt lists the faults. Each one is compiled into a separate libmha.so, for which only
the files that the fault changes are recompiled, and the test programs run with it until one fails.
A fault that passes all tests is a survivor: a promise that no test keeps.

Everything happens in build/mutate, in a copy of the files that git tracks, as they are now. Test
programs are compiled there once, when they are first needed. The library there has the scalar
kernels and those for AVX2 or NEON. Faults listed as equivalent change no result and are not
planted; the score is caught / planted.

With --refusals, the faults are made from the sources: each condition, and each operand of || and
&&, by which a function refuses its arguments is left out in turn. All are compiled at once, tests
that cannot tell the difference are not run, and tests/refusals.txt has those that are equivalent.
"""

EPILOG = """\
Exit status: 0 success; 1 a score below 0.97, a survivor in a choice, or an error in the
list; 2 wrong usage; 4 the unchanged tests cannot be built or run.

Examples:
  tools/mutate.py --check                         check that each fault of the list still matches
                                                  one place, as every run does before it begins
  tools/mutate.py --only 'partials|softcap'         faults with a word in their function or change
  tools/mutate.py --resume                        all faults, except those with results
  tools/mutate.py --refusals                      every check, left out, which takes ten minutes
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.txt"
EQUIVALENT = ROOT / "tests" / "refusals.txt"
PLANTED = ROOT / "tests" / "support" / "planted.h"
FOLDER = ROOT / "build" / "mutate"
LEAST_SCORE = 0.97
TEST_SECONDS = 60  # of processor time, which no program takes for three tenths of its random cases
# All that can see the library, the quickest first. What the list names for a fault comes before.
PROGRAMS = """interface_errors interface_info info_counts interface_packed process structs
  schedule cache_errors pool fma storage seeds partials options bias_tables specification
  chosen_keys linear recurrent weights rope_tables interface_edges interface_memory cache
  checksums contract generated cache_accuracy accuracy function""".split()
# These hold files of the library themselves.
WITH_SOURCES = "structs schedule fma storage function".split()


class Stop(Exception):
    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status


class DoesNotCompile(Exception):
    pass


# ---- The list


@dataclasses.dataclass(frozen=True)
class Mutant:
    function: str
    old: str
    new: str
    tests: tuple  # programs to begin with, or PROGRAM:PART_OF_A_TEST'S_NAME
    equivalent: str  # the reason, or ""

    def __str__(self):
        return f"{self.function}: {self.old} ==> {self.new}"

    def places(self, pieces):
        """Where the old text stands in functions of this name: (path, begin, end)."""
        return [
            (path, begin + found.start(), begin + found.end())
            for path, text, begin in pieces[self.function]
            for found in pattern_of(self.old).finditer(text)
        ]


def pattern_of(text):
    """Finds a text however it is spaced and broken into lines."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    joints = [
        r"\s+" if left[-1].isalnum() and right[0].isalnum() else r"\s*"
        for left, right in zip(tokens, tokens[1:])
    ]
    return re.compile(
        "".join(re.escape(token) + joint for token, joint in zip(tokens, [*joints, ""]))
    )


def pieces_of(text):
    """(name, begin, end) of each function, class and constant of a file, as clang-format lays it
    out: each begins with a line that is not indented. A member is a part of its class."""
    starts = list(re.finditer(r"(?m)^(?!template|namespace|extern|typedef)[A-Za-z_].*", text))
    for start, end in zip(starts, [*(after.start() for after in starts[1:]), len(text)]):
        name = r"\b(?:struct|class|union|enum)(?: class)? (\w+)[^(]*\{$|(\w+)\(|(\w+)\W* ="
        if found := re.search(name, start[0]):
            yield found[found.lastindex], start.start(), end


def pieces_in(root):
    """Name -> (path, text, place in the file) of all that has this name in src."""
    pieces = collections.defaultdict(list)
    for path in sorted((root / "src").rglob("*.*")):
        if path.suffix in (".h", ".cpp"):
            text = path.read_text()
            for name, begin, end in pieces_of(text):
                pieces[name].append((str(path.relative_to(root)), text[begin:end], begin))
    return pieces


def read_list(text):
    mutants, tests = [], ()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("# "):
            continue
        if heading := re.fullmatch(r"\[([^]]+)\]", line):
            tests = tuple(heading[1].split())
            continue
        fault = re.fullmatch(
            r"(\w+): (.+?) ==>(?: (.*?))??(?: ## (?!equivalent)(.+?))?(?: ## equivalent: (.+))?",
            line,
        )
        if not fault:
            raise Stop(
                1,
                f"line {number} of the list is not 'FUNCTION: OLD ==> NEW', optionally followed by"
                " '## TESTS' or '## equivalent: REASON'",
            )
        function, old, new, first, reason = (part or "" for part in fault.groups())
        mutants.append(Mutant(function, old, new, (*first.split(), *tests), reason))
    return mutants


def errors_of(mutants, root):
    """Sentences about faults that cannot be planted."""
    errors, pieces = [], pieces_in(root)
    for mutant in mutants:
        if (count := len(mutant.places(pieces))) != 1:
            errors.append(
                f"{mutant}\n  its text occurs {count} times in functions of this name; it must"
                " occur once"
            )
        for test in mutant.tests:
            if test.split(":")[0] not in PROGRAMS:
                errors.append(f"{mutant}\n  '{test}' is not a test program that this script knows")
    times = collections.Counter(map(str, mutants))
    return errors + [f"{name}\n  is listed twice" for name in times if times[name] > 1]


# ---- The copy and its build


def copy_tree(tree):
    """The files that git knows, as they are in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    names = {name for name in listed if name and (ROOT / name).is_file()}
    for path in [
        path
        for path in tree.glob("**/*")
        if "build" not in path.relative_to(tree).parts[:1] and path.is_file()
    ]:
        if str(path.relative_to(tree)) not in names:
            path.unlink()
    for name in names:
        path = tree / name
        if not path.exists() or path.read_bytes() != (ROOT / name).read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path)


class Build:
    def __init__(self, folder, jobs, is_quick):
        self.tree, self.jobs, self.is_quick = folder / "tree", jobs, is_quick
        self.folder = self.tree / "build"
        self.lock = threading.RLock()
        self.ready = {}  # name of a program -> its path
        self.passes = {}  # test that has failed -> whether it passes without a fault
        copy_tree(self.tree)
        on = ["TESTS", "SHARED"]
        off = """STATIC AVX512 COMPILES_avx2_vnni COMPILES_neon_dotprod COMPILES_neon_i8mm
            BENCH ONNX OPENBLAS PTHREADPOOL INSTALL""".split()
        settings = [
            "CMAKE_BUILD_TYPE=Release",
            *(f"MHA_{part}=ON" for part in on),
            *(f"MHA_{part}=OFF" for part in off),
        ]
        if shutil.which("ccache"):
            settings += ["CMAKE_C_COMPILER_LAUNCHER=ccache", "CMAKE_CXX_COMPILER_LAUNCHER=ccache"]
        if not (self.folder / "build.ninja").exists():
            how = [
                *"-G Ninja --log-level=NOTICE".split(),
                *(f"-D{setting}" for setting in settings),
            ]
            self.run("cmake", "-S", self.tree, "-B", self.folder, *how)
        self.build("mha_shared")
        self.commands = {}  # object -> how it is compiled
        for entry in json.loads((self.folder / "compile_commands.json").read_text()):
            command = shlex.split(entry["command"])
            self.commands[command[command.index("-o") + 1]] = command
        self.library = [name for name in self.commands if name.startswith("src/")]
        self.depends = self.dependencies(self.library)

    def dependencies(self, objects):
        """Objects -> the files that they are compiled of."""
        told = subprocess.check_output(
            ["ninja", "-t", "deps", *objects], cwd=self.folder, text=True
        ).split("\n\n")
        blocks = [block.split("\n") for block in told]
        return {
            target.split(":")[0]: {
                os.path.relpath(self.folder / path.strip(), self.tree) for path in paths
            }
            for target, *paths in blocks
        }

    def run(self, *command):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise Stop(4, f"{done.stdout}\n{' '.join(map(str, command))} failed")

    def build(self, target):
        how = "--parallel", str(self.jobs), "--target", target
        self.run("cmake", "--build", self.folder, *how)

    def program(self, name):
        with self.lock:
            if name not in self.ready:
                self.build(f"mha_test_{name}")
                self.ready[name] = self.folder / "bin" / f"mha_test_{name}"
        return self.ready[name]

    def compiled(self, name, work):
        """An object of the sources in `work`."""
        to = work / name.replace("/", "_")
        if not to.exists():
            # Without -O2 the kernels compile in two thirds of the time.
            words = [
                re.sub("^-O[23]$", "-O1", word).replace(f"{self.tree}/src", f"{work}/src")
                for word in self.commands[name]
            ]
            words[words.index("-o") + 1] = str(to)
            self.run_in_build(words)
        return to

    def link_library(self, work, objects):
        """A libmha.so in `work`, of which these objects are of the sources there."""
        compiler = [word for word in self.commands[objects[0]] if "ccache" not in word][0]
        self.run_in_build(
            [
                compiler,
                "-shared",
                f"-Wl,-soname,libmha.so.0,--version-script={work}/src/mha.map",
                "-o",
                work / "libmha.so.0",
                *(self.compiled(name, work) if name in objects else name for name in self.library),
            ]
        )

    def link_program(self, name, work, path):
        """A program that holds files of the library, of the sources in `work`, where it holds
        `path`."""
        told = subprocess.check_output(
            ["ninja", "-t", "commands", f"bin/mha_test_{name}"], cwd=self.folder, text=True
        )
        words = shlex.split(told.strip().split("\n")[-1].split(" && ")[1])
        depends = self.dependencies([word for word in words if word.endswith(".o")])
        if not any(path in files for files in depends.values()):
            return self.program(name)
        words = [
            self.compiled(word, work) if path in depends.get(word, ()) else word for word in words
        ]
        words[words.index("-o") + 1] = work / f"mha_test_{name}"
        self.run_in_build(words)
        return work / f"mha_test_{name}"

    def run_in_build(self, command):
        done = subprocess.run(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode != 0:
            raise DoesNotCompile(done.stdout)

    def failure(self, tests, without, rounds, work=None, path="", **variables):
        """The test of PROGRAM or PROGRAM:PART_OF_A_NAME that fails with the fault at `path` in
        `work`, or None. without: '-' and those to leave out."""
        name, _, part = tests.partition(":")
        program = self.program(name)
        if work and name in WITH_SOURCES:
            program = self.link_program(name, work, path)
        environment = {
            **os.environ,
            **variables,
            "GTEST_FAIL_FAST": "1",
            "GTEST_FILTER": f"*{part}*{without}",
            "MHA_TEST_ROUNDS": str(rounds),
        }
        if work:
            environment["LD_LIBRARY_PATH"] = str(work)

        def limit():
            resource.setrlimit(resource.RLIMIT_CPU, (TEST_SECONDS, TEST_SECONDS))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        try:
            done = subprocess.run(
                [program],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=limit,
                timeout=10 * TEST_SECONDS,
            )
            if done.returncode == 0:
                return None
            output = done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as expired:
            output = (expired.stdout or b"").decode(errors="replace")
        failed = (
            re.findall(r"\[  FAILED  \] ([\w/.]+)", output)
            or re.findall(r"\[ RUN      \] ([\w/.]+)", output)[-1:]
        )
        if not failed:
            raise Stop(4, f"{program} runs no test: {output}")
        with self.lock:
            if failed[0] not in self.passes:
                self.passes[failed[0]] = (
                    not work or self.failure(f"{name}:{failed[0]}", "", rounds) is None
                )
        if not self.passes[failed[0]]:
            raise Stop(4, f"a test fails without a fault: {name}, {failed[0]}")
        return f"{name}, {failed[0]}"

    def judge(self, mutant, work):
        """The test that catches it, or None of a survivor."""
        shutil.copytree(self.tree / "src", work / "src")
        [(path, begin, end)] = mutant.places(pieces_in(work))
        text = (work / path).read_text()
        (work / path).write_text(text[:begin] + mutant.new + text[end:])
        objects = [name for name in self.library if path in self.depends[name]]
        scalar = [name for name in objects if name.endswith("scalar.cpp.o")]
        if scalar and all("kernels" in name for name in objects):
            # What the scalar kernels show already is known in a quarter of the time.
            self.link_library(work, scalar)
            for tests in mutant.tests:
                if failure := self.failure(tests, "-*/avx2:*/neon", 0.1, work, path):
                    return failure
        self.link_library(work, objects)
        for rounds, programs in (0.1, mutant.tests), (0.3, () if self.is_quick else PROGRAMS):
            for tests in programs:
                if failure := self.failure(tests, "", rounds, work, path):
                    return failure
        return "" if self.is_quick else None


# ---- Refusals

CHECKS = "src/check/*.cpp src/check/*.h src/api/*.cpp src/objects/pack.cpp".split()
CHECKED_BY = """interface_errors interface_info info_counts interface_packed cache_errors pool
  partials bias_tables options chosen_keys linear recurrent weights rope_tables interface_edges
  interface_memory cache contract generated""".split()


def checks_of(text):
    """(begin, end, type, value) of each expression that refuses arguments, and the value by which
    it or a part of it is left out: conditions of `if (...) return`, operands of || and && in them
    and in what they are computed from, and statuses that are handed on."""
    no_code = r'(?m)//.*|"(?:\\.|[^"\\\n])*"|^ *#(?:.*\\\n)*.*|static_assert\([^;]*;'
    code = re.sub(no_code, lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    checks, operands, closes, groups, group = set(), set(), {}, [], (0, 0, [])

    def add(to, begin, end, value, kind="bool"):
        begin += len(code[begin:end]) - len(code[begin:end].lstrip())
        to.add((begin, begin + len(code[begin:end].rstrip()), kind, value))

    def add_operands(begin, operators, end):
        sign, value = ("|", "false") if any(code[at] == "|" for at in operators) else ("&", "true")
        cuts = [at for at in operators if code[at] == sign]
        for first, last in zip([begin, *(at + 2 for at in cuts)], [*cuts, end]) if cuts else ():
            add(operands, first, last, value)
            add_operands(first, [at for at in operators if first <= at < last], last)

    # A group: where its bracket opens, where its latest expression begins, the operators in that.
    for token in re.finditer(r"&&|\|\||::|[=!<>]=|[()\[\]{},;?:=]|\breturn\b", code):
        if token[0] in ("&&", "||"):
            group[2].append(token.start())
        elif token[0] in "([{":
            groups.append(group)
            group = token.start(), token.end(), []
        elif token[0] in ")]},;?:=return":
            add_operands(*group[1:], token.start())
            group = group[0], token.end(), []
            if token[0] in ")]}":
                closes[group[0]] = token.start()
                is_block = token[0] == "}" and code[group[0] - 1].isspace()
                group = (groups.pop()[0], token.end(), []) if is_block else groups.pop()
    for start in re.finditer(r"\bif (?=\((?!const))", code):
        close = closes[start.end()]
        then = re.match(r"[\s{]*(return|continue)\b\s*([^;]*);\s*(return)?", code[close + 1 :])
        is_sound = then and then[3] and then[2] in ("MHA_OK", "")
        if is_sound or then and re.match("report|fail|false", then[2]):
            add(checks, start.end() + 1, close, "true" if is_sound else "false")
    for choice in re.finditer(r"\breturn ([^;?]+)\?(\s*MHA_OK|[^;]*:\s*MHA_OK;)", code):
        add(checks, *choice.span(1), "true" if choice[2].strip() == "MHA_OK" else "false")
    names = set(re.findall(r"\w+", " ".join(code[begin:end] for begin, end, _, _ in checks)))
    spans = [check[:2] for check in checks]
    spans += [s.span() for s in re.finditer(r"\b(\w+) = [^;]*;", code) if s[1] in names]
    checks |= {o for o in operands if any(first <= o[0] and o[1] <= last for first, last in spans)}
    for call in re.finditer(r"\bMHA_TRY(?=\()|\breturn (?=(?:check|resolve)_\w+(\())", code):
        is_try = call[1] is None
        close = closes[call.end() if is_try else call.start(1)]
        add(checks, call.end() + is_try, close + 1 - is_try, "MHA_OK", "mha_status")
    return sorted(checks, key=lambda check: (check[0], -check[1]))


def plant_checks(work):
    """Plants all faults in the sources there at once, of which a test chooses one by its number.
    Returns them and the paths of what was changed."""
    faults, changed = [], set()
    for path in sorted(path for pattern in CHECKS for path in work.glob(pattern)):
        text, inserts = path.read_text(), [(0, 0, 0, f'#include "{PLANTED}"\n')]
        for begin, end, kind, value in checks_of(text):
            inserts.append((begin, 1, -end, f"fault<{kind}>({len(faults)}, {value}, "))
            inserts.append((end, 0, -begin, ")"))
            old = " ".join(text[begin:end].split())
            function = next(name for name, first, last in pieces_of(text) if first <= begin < last)
            faults.append(Mutant(function, old, value, (), ""))
            changed.add(str(path.relative_to(work)))
        for place, _, _, piece in sorted(inserts, reverse=True):
            text = text[:place] + piece + text[place:]
        path.write_text(text)
    return faults, changed


def sweep(folder, jobs, only, equivalent):
    """What catches each check that is left out, as `report` takes it."""
    build, work = Build(folder, jobs, False), folder / "checks"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(build.tree / "src", work / "src")
    faults, changed = plant_checks(work)
    objects = [name for name in build.library if build.depends[name] & changed]
    tests, suite = [], ""
    for program in CHECKED_BY:
        listed = subprocess.check_output([build.program(program), "--gtest_list_tests"], text=True)
        for name in re.findall(r"(?m)^ *(\S+)", listed.split("\n", 1)[1]):
            suite = name if name.endswith(".") else suite
            tests += [f"{program}:{suite}{name}"] if suite != name else []

    def record(test):
        """Its seconds, itself, and a byte for each fault that is 1 where it would notice that."""
        seen, begin = work / f"seen_{test.replace('/', '_')}", time.monotonic()
        if build.failure(test, "", 0.1, work, MHA_FAULTS_SEEN=str(seen)):
            raise Stop(4, f"{test} fails where no fault is chosen")
        seconds = time.monotonic() - begin
        return seconds, test, seen.read_bytes() if seen.exists() else bytes(1 << 13)

    def judge(number):
        of_it = (test for _, test, seen in recorded if seen[number])
        chosen = {"MHA_FAULT": str(number)}
        return next(filter(None, (build.failure(t, "", 0.1, work, **chosen) for t in of_it)), None)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda name: build.compiled(name, work), objects))
        build.link_library(work, objects)
        recorded = sorted(pool.map(record, tests))
        numbers = [n for n, fault in enumerate(faults) if re.search(only or "", str(fault))]
        results = {}
        for number, caught_by in zip(numbers, pool.map(judge, numbers)):
            name = str(faults[number])
            if caught_by or name not in equivalent:
                results[f"{number} {name}"] = caught_by
                print("" if caught_by else f"SURVIVES {name}\n", end="", flush=True)
    if unknown := equivalent.keys() - set(map(str, faults)):
        raise Stop(1, "\n".join(f"{name}\n  is no check" for name in sorted(unknown)))
    return results


# ---- The run


def report(results):
    """Lines about the results, which are text of a mutant -> what caught it or None; whether the
    score is enough."""
    survivors = [name for name, caught_by in results.items() if not caught_by]
    caught = len(results) - len(survivors)
    lines = [f"survivor: {name}" for name in survivors]
    lines.append(
        f"score {caught / max(1, len(results)):.3f}: {caught} of {len(results)} faults are caught"
    )
    return lines, caught >= LEAST_SCORE * len(results)


def run(mutants, folder, jobs, is_quick, known, save):
    build = Build(folder, jobs, is_quick)
    start, done, errors = time.monotonic(), 0, []
    # What passed the listed tests alone is "".
    results = {
        str(mutant): known[str(mutant)]
        for mutant in mutants
        if known.get(str(mutant), "") != "" or (is_quick and str(mutant) in known)
    }

    def one(mutant):
        work = folder / f"mutant_{hashlib.sha256(str(mutant).encode()).hexdigest()[:12]}"
        shutil.rmtree(work, ignore_errors=True)
        begin = time.monotonic()
        try:
            return mutant, build.judge(mutant, work), time.monotonic() - begin
        except DoesNotCompile as error:
            errors.append(f"{mutant}\n{error}")
            return mutant, "does not compile", 0
        finally:
            shutil.rmtree(work, ignore_errors=True)

    left = [mutant for mutant in mutants if str(mutant) not in results]
    print(f"{len(left)} faults, {jobs} at a time", flush=True)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, mutant) for mutant in left]
        try:
            for future in concurrent.futures.as_completed(futures):
                mutant, caught_by, seconds = future.result()
                done += 1
                if caught_by != "does not compile":
                    results[str(mutant)] = caught_by
                    save(results)
                print(
                    f"[{time.monotonic() - start:5.0f} s] {done}/{len(left)} {mutant}\n"
                    f"          {caught_by or 'SURVIVES'} ({seconds:.0f} s)",
                    flush=True,
                )
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    if errors:
        raise Stop(1, "\n".join(errors))
    return results


def arguments():
    parser = argparse.ArgumentParser(
        prog="tools/mutate.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print the faults that would be planted, and the equivalent ones",
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that the list fits the sources"
    )
    parser.add_argument(
        "--only",
        metavar="REGEX",
        help="plant only faults whose line 'FUNCTION: OLD ==> NEW' matches",
    )
    parser.add_argument(
        "--refusals", action="store_true", help="leave out each check of arguments instead"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="reuse the results of earlier runs in build/mutate/results.json",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run only the tests that the list names for each fault"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="the number of faults at a time (default: all processors)",
    )
    parser.add_argument(
        "--mutants",
        type=pathlib.Path,
        default=LIST,
        metavar="FILE",
        help="the list (default: tests/mutants.txt)",
    )
    return parser.parse_args()


def main():
    given = arguments()
    if given.refusals:
        FOLDER.mkdir(parents=True, exist_ok=True)
        equivalent = {str(fault): fault.equivalent for fault in read_list(EQUIVALENT.read_text())}
        results = sweep(FOLDER, given.jobs, given.only, equivalent)
        print(*report(results)[0], sep="\n")
        return 0 if all(results.values()) else 1
    listed = read_list(given.mutants.read_text())
    errors = errors_of(listed, ROOT)
    if errors:
        raise Stop(1, "\n".join(errors))
    chosen = [mutant for mutant in listed if not given.only or re.search(given.only, str(mutant))]
    mutants = [mutant for mutant in chosen if not mutant.equivalent]
    if given.check or given.list:
        equivalent = [
            f"{mutant}\n  equivalent: {mutant.equivalent}" for mutant in chosen if mutant.equivalent
        ]
        if given.list:
            print(*mutants, *equivalent, sep="\n")
        print(f"{len(mutants)} faults, and {len(equivalent)} equivalent ones")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "results.json"
    before = json.loads(file.read_text()) if file.exists() else {}

    def save(found):
        file.write_text(json.dumps({**before, **found}, indent=1))

    results = run(mutants, FOLDER, given.jobs, given.quick, before if given.resume else {}, save)
    lines, is_enough = report(results)
    print(*lines, sep="\n")
    return 0 if is_enough and (not given.only or all(results.values())) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stop as stop:
        print(f"mutate.py: {stop}", file=sys.stderr)
        sys.exit(stop.status)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"mutate.py: {error}", file=sys.stderr)
        sys.exit(4)
