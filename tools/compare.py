#!/usr/bin/env python3
"""Measures mha beside other libraries: one attention layer, from input rows to output rows, in float32, on one thread and on all cores.

The libraries run in one session, each in a process of its own that is stopped while another one works. Round after round, each computes
each shape, on the same weights and rows, and what they compute is compared. Speed is stated as a share of what the multiply-add units of
the same cores do in the same round. Written are compare.md (tables), compare.csv, compare.svg (chart) and compare.json (all measurements).

With --decode the layer computes one row over a KV cache, into which it first puts the row's key and value. Each library takes turns through
equal layers with caches of their own, together several times as large as the processor's cache, so that all is read from memory, and
speed is stated as a share of the bandwidth of reading that much.

With --arithmetic, causal layers run in all arithmetics, of floats and of integers, and beside the time stands the error: the root of the mean
square of the differences from the layer in double precision, on normally distributed rows, and on rows of which one channel in 256 is 20 times
as large.

Libraries (those that are there are measured, and the others named with the reason):
  mha              this library, built first
  pytorch          the plain class of tensor operations, nn.MultiheadAttention, and scaled_dot_product_attention between two nn.Linear
  onnxruntime      the operators Attention and MultiHeadAttention of com.microsoft; the faster one counts. Decoding: GroupQueryAttention,
                   with past and present in the same memory
  openvino         scaled_dot_product_attention of the CPU plugin; not for decoding
  pytorch-system   the same as pytorch, with the PyTorch of /usr/bin/python3 (Debian: apt-get install python3-torch)

Decoding by PyTorch is scaled_dot_product_attention over keys and values that have room for the new ones.

Arithmetics (each library's float32 is as above):
  mha              projections in integers of 16 or 8 bits, with weights of int8 or int4; attention too, over keys and values
                   of int8
  pytorch          bfloat16, where the processor has it; torch.ao.quantization.quantize_dynamic
  onnxruntime      quantize_dynamic of MatMul beside MultiHeadAttention, and of Attention (QAttention)
  openvino         bfloat16, which is its default where the processor has it; int8 by NNCF, its ranges taken from the rows themselves

They come from the virtual environment where --install puts them, else from /usr/bin/python3.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

root = pathlib.Path(__file__).resolve().parent.parent
parts = root / "tools" / "compare"
sys.path[:0] = [str(parts), str(root / "tools")]
import arithmetic  # noqa: E402
import report  # noqa: E402

examples = """Examples:
  tools/compare.py --install onnxruntime --install openvino      some 100 MB
  tools/compare.py --install pytorch                             some gigabytes, most of it for GPUs
  tools/compare.py                                               everything, on one thread and on all cores; some 10 minutes
  tools/compare.py --threads 1 --core 1 --rounds 3               a quick look, on core 1
  tools/compare.py --shapes 1,1024,768,12 1,1500,512,8,uncausal --libraries mha onnxruntime
  tools/compare.py --decode                                      one token over a cache, written to build/compare/decode
  tools/compare.py --decode 768,12,12,1024 --libraries mha onnxruntime
  tools/compare.py --arithmetic --rounds 5                       integers and bfloat16, written to build/compare/arithmetic

Exit codes: 0 done; 1 a library computes something else (the tables say which); 2 wrong usage; 4 there is nothing to compare with, or
something that is needed cannot be built, installed or run; 130 interrupted.
"""

# (batch, n, width, heads, is_causal)
shapes = [(1, 128, 256, 4, 1), (1, 128, 768, 12, 1), (1, 512, 768, 12, 1), (1, 1024, 768, 12, 1), (1, 2048, 1024, 16, 1),
          (8, 128, 768, 12, 1), (1, 1024, 2048, 16, 1), (1, 512, 4096, 32, 1),
          (1, 197, 768, 12, 0), (1, 77, 768, 12, 0), (1, 1500, 512, 8, 0), (1, 49, 96, 3, 0)]
smallest = (1, 1, 8, 1, 1)  # hardly any arithmetic: what a call costs
decode_shapes = [{"width": width, "heads": heads, "kv_heads": kv_heads, "past": past} for width, heads, kv_heads, past in (
    (768, 12, 12, 1024), (2048, 32, 8, 4096), (4096, 32, 8, 8192))]
arithmetic_shapes = [(1, 128, 768, 12, 1), (8, 128, 768, 12, 1), (1, 1024, 768, 12, 1), (1, 1024, 2048, 16, 1), (1, 512, 4096, 32, 1)]

# Library -> its forms, each with the column of the tables where it stands. Of forms in one column the fastest counts.
forms = {
    "mha": {"layer": "mha"},
    "pytorch": {"class": "PyTorch, plain class", "MultiheadAttention": "PyTorch, nn.MultiheadAttention",
                "scaled_dot_product_attention": "PyTorch, scaled_dot_product_attention"},
    "onnxruntime": {"Attention": "ONNX Runtime", "MultiHeadAttention": "ONNX Runtime"},
    "openvino": {"scaled_dot_product_attention": "OpenVINO"},
}
decode_forms = {
    "mha": {"decode": "mha"},
    "pytorch": {"preallocated_cache": "PyTorch, scaled_dot_product_attention"},
    "onnxruntime": {"GroupQueryAttention": "ONNX Runtime"},
}
arithmetic_forms = {
    "mha": {"f32": "mha f32", "int16": "mha int16", "int8": "mha int8", "int16_attention": "mha int16, attention too",
            "int8_attention": "mha int8, attention too", "int4_int16": "mha int16, int4 weights", "int4_int8": "mha int8, int4 weights"},
    "pytorch": {"scaled_dot_product_attention": "PyTorch f32", "bf16": "PyTorch bf16", "int8": "PyTorch int8"},
    "onnxruntime": {"Attention": "ONNX Runtime f32", "MultiHeadAttention": "ONNX Runtime f32", "quantize_dynamic": "ONNX Runtime int8",
                    "QAttention": "ONNX Runtime QAttention"},
    "openvino": {"scaled_dot_product_attention": "OpenVINO f32", "bf16": "OpenVINO bf16", "int8": "OpenVINO int8"},
}
for some in forms, decode_forms, arithmetic_forms:
    some["pytorch-system"] = {form: f"system's {label}" for form, label in some["pytorch"].items()}
defaults = ["mha", "pytorch", "onnxruntime", "openvino"]
packages = {"pytorch": ["numpy", "torch"], "onnxruntime": ["numpy", "onnx", "onnxruntime"], "openvino": ["numpy", "openvino", "nncf"]}

agreement = 1e-3  # the largest difference between two libraries, as a share of the largest element; bfloat16 would not pass
sane_error = 0.5  # of an arithmetic, on normally distributed rows; what is further from the layer computes something else
cell_seconds = 0.1  # for one library on one shape in one round; a call that takes longer is made twice
patience_seconds = 300  # for an answer of a library


class Failed(Exception):
    """A sentence that says what does not work."""


def say(sentence):
    print(sentence, file=sys.stderr, flush=True)


# ---- one library in a process of its own


class Worker:
    def __init__(self, command, log, environment):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)

    def ask(self, request, **arguments):
        """The answer. The process runs only until it has given it."""
        try:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.write(json.dumps({"request": request, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], patience_seconds)[0]:
                self.end()
                raise Failed(f"no answer in {patience_seconds} seconds")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self.process.wait()
            raise Failed(f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with code {code}")
        self.process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def end(self):
        self.process.kill()
        self.process.wait()


class Settings:
    """What the libraries of one suite are started with."""

    def __init__(self, folder, venv, helper, log):
        self.folder, self.venv, self.helper, self.log = folder, venv, helper, log
        self.environment = {**os.environ, **openblas_environment(helper)}

    def pythons(self, library):
        if library == "mha":
            return [sys.executable]
        pythons = [self.venv / "bin" / "python", pathlib.Path("/usr/bin/python3")]
        return [python for python in pythons[library == "pytorch-system":] if python.exists()]

    def start(self, library, cores):
        """(worker, what it says about itself), with the first interpreter that has the library."""
        reasons = []
        for python in self.pythons(library):
            command = [python, parts / "worker.py", library.replace("-system", ""), len(cores), ",".join(map(str, cores))]
            worker = Worker([str(word) for word in command + [self.helper] * (library == "mha")], self.log, self.environment)
            try:
                return worker, worker.ask("about")
            except Failed as failed:
                worker.end()
                reasons.append(f"{failed} ({python})")
        raise Failed("; ".join(reasons) or "there is no interpreter for it")


# ---- one suite: all libraries and shapes at one number of threads


def rotated_bytes():
    """What has to be read before the same bytes are, if none of them is to come from a cache: 4 times the largest one."""
    sizes = [path.read_text().strip() for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return 4 * max([int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if size[-1:] in "KM"], default=32 << 20)


def available_bytes():
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return 4 << 30


def copies_of(shape, share):
    """How many layers with a cache take turns, and their bytes. No more than `share` bytes, but at least one."""
    size = report.decode_bytes(shape)
    copies = max(1, min(-(-rotated_bytes() // size), int(share) // size))
    return copies, copies * size


def load(settings, workers, shape, rows, share):
    """Lets every library make the layer of this shape, and compares. Returns what is known about the shape."""
    inputs, expected = settings.folder / "inputs", settings.folder / "expected"
    cell = {"shape": shape, "operations": workers["mha"].ask("make", shape=shape, inputs=str(inputs), output=str(expected))["operations"],
            "peaks": [], "reference": None, "rows": rows}
    files = {"shape": shape, "inputs": str(inputs), "expected": str(expected)}
    copies = {}
    if report.is_decode(shape):
        cell["operations"] = report.decode_bytes(shape)
        copies["copies"], cell["rotated"] = copies_of(shape, share)
        is_little_work = cell["operations"] < 2e8
    else:
        batch, n, width, _, _ = shape
        is_little_work = batch * n * width**2 < 2e8
    others = [name for name in workers if name != "mha"]
    if others and is_little_work:
        with contextlib.suppress(Failed):  # without a reference this is not claimed
            cell["reference"] = workers[others[0]].ask("reference", **files)["difference"]
    for row in rows:
        if row["reason"]:
            continue
        try:
            row["difference"] = workers[row["library"]].ask("load", form=row["form"], **files, **copies)["difference"]
            if not row["difference"] <= agreement:  # NaN too
                row["reason"] = f"its y differs from mha's by {row['difference']:.1g} of the largest element"
                row["disagrees"] = True
        except Failed as failed:
            row["reason"] = str(failed)
    inputs.unlink()
    expected.unlink()
    return cell


def load_arithmetic(settings, workers, shape, rows):
    """The same for all arithmetics, whose results differ."""
    files = {"shape": shape, "inputs": str(settings.folder / "inputs")}
    expected = str(settings.folder / "expected")
    for data in ("outliers", "normal"):  # the last layers are those that are timed
        workers["numpy"].ask("make", outliers=data == "outliers", output=expected, **files)
        for row in rows:
            if row["reason"]:
                continue
            try:
                error = workers[row["library"]].ask("error", form=row["form"], expected=expected, keep=data == "normal", **files)["rms"]
                row.setdefault("errors", {})[data] = error
                if data == "normal" and not error <= sane_error:  # NaN too
                    row["reason"] = f"its y is off by {error:.1g} of the layer in double precision"
                    row["disagrees"] = True
            except Failed as failed:
                row["reason"] = str(failed)
    return {"shape": shape, "peaks": [], "reference": None, "rows": rows}


def run_suite(settings, libraries, suite_shapes, cores, rounds, able):
    """The measurements at len(cores) threads, and what the libraries say about themselves."""
    threads = "one thread" if len(cores) == 1 else f"{len(cores)} threads"
    workers, reasons, about = {}, {}, {}
    try:
        for library in libraries + ["numpy"] * (able is arithmetic_forms):
            try:
                workers[library], about[library] = settings.start(library, cores)
                say(f"{threads}: {library} {about[library]['version']} {about[library]['detail']}")
            except Failed as failed:
                if library == "mha":
                    raise
                if library == "numpy":
                    raise Failed(f"exact results are NumPy's, which is not there: {failed}; see --install in tools/compare.py --help")
                reasons[library] = str(failed)
                say(f"{threads}: {library} is not measured: {failed}")
        cells = []
        share = available_bytes() / 2 / (len(suite_shapes) * len(libraries))
        for shape in suite_shapes:
            say(f"{threads}: making the layers of {report.shape_name(shape)}")
            rows = [{"library": library, "form": form, "label": label, "seconds": [], "difference": None, "reason": reasons.get(library)}
                    for library in libraries for form, label in able[library].items()]
            if able is arithmetic_forms:
                cells.append(load_arithmetic(settings, workers, shape, rows))
            else:
                cells.append(load(settings, workers, shape, rows, share))
        for number in range(rounds):
            for cell in cells:
                measure(workers, cell, number)
                times = [f"{row['library']} {row['form']} {1e3 * row['seconds'][-1]:.3g} ms" for row in cell["rows"] if not row["reason"]]
                say(f"{threads}, round {number + 1} of {rounds}, {report.shape_name(cell['shape'])}: {', '.join(times)}")
        return cells, about
    finally:
        for worker in workers.values():
            worker.end()


def measure(workers, cell, number):
    """One round of one shape: every library once, with another one first each time, between two looks at the peak
    (or, for decoding, at the bandwidth)."""

    def look():
        if report.is_decode(cell["shape"]):
            return workers["mha"].ask("bandwidth", size=cell["rotated"])["gbytes"]
        return workers["mha"].ask("peak")["gflops"]

    peaks = [look()]
    start = number % len(cell["rows"])
    for row in cell["rows"][start:] + cell["rows"][:start]:
        if row["reason"]:
            continue
        try:
            answer = workers[row["library"]].ask("time", form=row["form"], shape=cell["shape"], seconds=cell_seconds)
            row["seconds"].append(answer["seconds"])
        except Failed as failed:
            if row["library"] == "mha":
                raise
            row["reason"] = str(failed)
    peaks.append(look())
    cell["peaks"].append(max(peaks))


# ---- what is built and installed


def run_command(command, doing):
    say(f"{doing}: {shlex.join(map(str, command))}")
    if subprocess.run(list(map(str, command)), stdout=sys.stderr).returncode:
        raise Failed(f"{doing} failed; see above")


def build_mha():
    build = root / "build"
    cache = build / "CMakeCache.txt"
    if not cache.exists():
        settings = [f"-DMHA_{name}=OFF" for name in ("TESTS", "TOOLS", "BENCH", "OPENBLAS", "PTHREADPOOL")]
        run_command(["cmake", "-S", root, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *settings], "configuring mha")
    if "CMAKE_BUILD_TYPE:STRING=Release\n" not in cache.read_text():
        raise Failed(f"{build} is no Release build; configure it with -DCMAKE_BUILD_TYPE=Release, or give --mha a libmha.so")
    run_command(["cmake", "--build", build, "--target", "mha_shared", "--parallel", os.cpu_count()], "building mha")
    return build / "src" / "libmha.so"


def build_helper(library, folder):
    """The shared object around library that worker.py loads."""
    library, helper = pathlib.Path(library).resolve(), folder / "helper.so"
    run_command([os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-I", root / "include",
                 "-I", root / "bench", parts / "helper.cpp", root / "bench" / "probes.cpp", root / "bench" / "openblas_core.cpp", library,
                 f"-Wl,-rpath,{library.parent}", "-o", helper], "building the helper")
    return helper


def openblas_environment(helper):
    """Debian's PyTorch multiplies by the system's OpenBLAS, which takes old and slow kernels on a processor that it does not know. This is
    what gives it its best ones for this machine, unless the user has chosen."""
    if "OPENBLAS_CORETYPE" in os.environ:
        return {}
    ask = """import ctypes, sys
openblas, helper = map(ctypes.CDLL, ["libopenblas.so.0", sys.argv[1]])
openblas.openblas_get_corename.restype = helper.compare_better_openblas_core.restype = ctypes.c_char_p
print((helper.compare_better_openblas_core(openblas.openblas_get_corename()) or b"").decode())"""
    done = subprocess.run([sys.executable, "-c", ask, str(helper)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    core = done.stdout.strip()  # nothing where there is no OpenBLAS
    return {"OPENBLAS_CORETYPE": core} if core else {}


def install(library, venv):
    if not (venv / "bin" / "pip").exists():  # it comes last: half an environment is made whole
        run_command([sys.executable, "-m", "venv", venv], "making a virtual environment")
    run_command([venv / "bin" / "python", "-m", "pip", "install", "--upgrade", *packages[library]], f"installing {library}")


# ---- what the figures are to be read with


def machine():
    name = platform.machine()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    with contextlib.suppress(OSError):
        release = pathlib.Path("/etc/os-release").read_text()
        name += ", " + dict(line.split("=", 1) for line in release.splitlines() if "=" in line)["PRETTY_NAME"].strip('"')
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} core{'s' * (cores > 1)}"


def commit():
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(git, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) if shutil.which("git") else None
    return done.stdout.strip() if done and not done.returncode else ""


# ---- the command


def parse_shape(text):
    fields = text.split(",")
    is_causal = fields[4:] != ["uncausal"]
    if len(fields) not in (4, 5) or is_causal and len(fields) == 5 or not all(field.isdecimal() and int(field) for field in fields[:4]):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape; write BATCH,N,WIDTH,HEADS, and behind it ,uncausal if not causal")
    batch, n, width, heads = map(int, fields[:4])
    if width % heads:
        raise argparse.ArgumentTypeError(f"'{text}': {heads} heads do not divide the width {width}")
    return batch, n, width, heads, int(is_causal)


def parse_decode_shape(text):
    fields = text.split(",")
    if len(fields) != 4 or not all(field.isdecimal() and int(field) for field in fields):
        raise argparse.ArgumentTypeError(f"'{text}' is no shape of decoding; write WIDTH,HEADS,KV_HEADS,PAST")
    shape = dict(zip(("width", "heads", "kv_heads", "past"), map(int, fields)))
    if shape["width"] % shape["heads"] or shape["heads"] % shape["kv_heads"]:
        raise argparse.ArgumentTypeError(f"'{text}': heads have to divide the width, and kv heads the heads")
    return shape


def parse_rounds(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of rounds; give 1 or more")
    return int(text)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(prog="tools/compare.py", description=__doc__, epilog=examples,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, metavar="SHAPE",
                        help="BATCH,N,WIDTH,HEADS for a causal layer, behind it ,uncausal for another (default: those of the README)")
    parser.add_argument("--decode", nargs="*", type=parse_decode_shape, metavar="SHAPE",
                        help="WIDTH,HEADS,KV_HEADS,PAST: one row over a cache that holds PAST rows, instead of --shapes (without a shape: "
                        + " ".join(",".join(map(str, shape.values())) for shape in decode_shapes) + ")")
    parser.add_argument("--arithmetic", nargs="*", type=parse_shape, metavar="SHAPE",
                        help="causal layers in floats and in integers, instead of --shapes (without a shape: "
                        + " ".join(",".join(map(str, shape[:4])) for shape in arithmetic_shapes) + ")")
    parser.add_argument("--rounds", type=parse_rounds, default=10, help="how often each library computes each shape (default: %(default)s)")
    parser.add_argument("--threads", choices=["1", "all", "both"], help="default: both; with --arithmetic 1")
    parser.add_argument("--core", type=int, help="the core for one thread (default: the last one that may be used)")
    parser.add_argument("--libraries", nargs="+", choices=list(forms), metavar="LIBRARY",
                        help=f"of {', '.join(forms)} (default: {' '.join(defaults)}, with --decode those that can)")
    parser.add_argument("--mha", type=pathlib.Path, metavar="FILE",
                        help="the libmha.so to measure (default: build/src/libmha.so, built first)")
    parser.add_argument("--install", action="append", choices=list(packages), metavar="LIBRARY",
                        help=f"install one of {', '.join(packages)} into the virtual environment by pip, measure nothing")
    parser.add_argument("--venv", type=pathlib.Path, default=root / "build" / "compare" / "venv", metavar="DIR",
                        help="the virtual environment (default: build/compare/venv)")
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR",
                        help="where the results are written (default: build/compare, with --decode build/compare/decode and so on)")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if options.core is None:
        options.core = cores[-1]
    if options.core not in cores:
        parser.error(f"argument --core: this process may not use core {options.core}, only {', '.join(map(str, cores))}")
    if options.mha and not options.mha.is_file():
        parser.error(f"argument --mha: there is no file {options.mha}")
    if options.decode is not None and options.arithmetic is not None:
        parser.error("--decode and --arithmetic are two comparisons; give one of them")
    kind = "decode" if options.decode is not None else "arithmetic" if options.arithmetic is not None else None
    able = options.able = {"decode": decode_forms, "arithmetic": arithmetic_forms, None: forms}[kind]
    options.libraries = options.libraries or [library for library in defaults if library in able]
    for library in options.libraries:
        if library not in able:
            parser.error(f"argument --libraries: {library} is not for decoding, only {', '.join(able)}")
    options.output = options.output or root.joinpath("build", "compare", *[kind] * bool(kind))
    options.libraries = ["mha"] + [library for library in dict.fromkeys(options.libraries) if library != "mha"]
    options.shapes = list(dict.fromkeys(options.shapes)) + [smallest]
    if options.decode is not None:
        options.shapes = [shape for i, shape in enumerate(options.decode) if shape not in options.decode[:i]] or decode_shapes
    if options.arithmetic is not None:
        if not all(shape[4] for shape in options.arithmetic):
            parser.error("argument --arithmetic: these layers are causal")
        options.shapes = list(dict.fromkeys(options.arithmetic)) or arithmetic_shapes
    both = [[options.core], cores] if len(cores) > 1 else [cores]
    options.threads = options.threads or ("both" if options.arithmetic is None else "1")
    options.suites = {"1": [[options.core]], "all": [cores], "both": both}[options.threads]
    return options


def run(options):
    write = report.write if options.arithmetic is None else arithmetic.write
    options.output.mkdir(parents=True, exist_ok=True)
    results = {"about": {"date": datetime.date.today().isoformat(), "machine": machine(), "commit": commit(), "rounds": options.rounds,
                         "load": os.getloadavg()[0], "command": shlex.join(["tools/compare.py", *sys.argv[1:]])},
               "libraries": {}, "suites": []}
    if results["about"]["load"] > report.idle_load:
        say(f"other programs are running (load average {results['about']['load']:.1f}): figures of several threads will not be worth much")
    log_path = options.output / "compare.log"
    with tempfile.TemporaryDirectory(dir=options.output) as folder, open(log_path, "w") as log:
        folder = pathlib.Path(folder)
        helper = build_helper(options.mha or build_mha(), folder)
        settings = Settings(folder, options.venv.absolute(), helper, log)
        for cores in options.suites:
            results["suites"].append({"threads": len(cores), "cells": []})
            # Layers in many arithmetics take much memory: one shape after the other, which is freed with the processes.
            for some in [options.shapes] if options.arithmetic is None else [[shape] for shape in options.shapes]:
                cells, about = run_suite(settings, options.libraries, some, cores, options.rounds, options.able)
                results["suites"][-1]["cells"] += cells
                results["libraries"].update((name, said) for name, said in about.items() if name != "numpy")
                write(results, options.output)
    rows = [row for suite in results["suites"] for cell in suite["cells"] for row in cell["rows"]]
    say(f"wrote {', '.join(str(options.output / name) for name in report.names)}; what the libraries printed is in {log_path}")
    references = [cell["reference"] for suite in results["suites"] for cell in suite["cells"] if cell["reference"] is not None]
    if any("disagrees" in row for row in rows) or not all(difference <= agreement for difference in references):
        say("tools/compare.py: the results do not agree; compare.md says where")
        return 1
    if options.libraries != ["mha"] and not any(row["seconds"] for row in rows if row["library"] != "mha"):
        say("tools/compare.py: there is nothing to compare with; see above, and --install in tools/compare.py --help")
        return 4
    return 0


def main():
    options = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up, too
    try:
        for library in options.install or []:
            install(library, options.venv)
        return 0 if options.install else run(options)
    except (Failed, OSError) as error:
        say(f"tools/compare.py: {error}")
        return 4
    except KeyboardInterrupt:
        say("tools/compare.py: interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
