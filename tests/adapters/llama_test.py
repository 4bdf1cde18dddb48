"""Whole models under llama.cpp with and without the module mha, and llama.cpp's own tests of the
operation. Takes a llama.cpp that is built.

    llama_test.py [PART ...] --llama BUILD --source SOURCE --module libggml-mha.so [--smollm2 GGUF
    --text FILE] [--work FOLDER]

Models with random weights are those of llama.cpp's test-llama-archs. Each scenario is run without
flash attention, which is the reference; with llama.cpp's flash attention; and with that of mha,
whose logits have to be as close to the reference as llama.cpp's are (or closer than 1e-5 of their
norm). Exit status: 0 all is as it should be; 1 something is not.
"""

import argparse
import array
import concurrent.futures
import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.request

# Softcap and sliding window: gemma2; sliding window: gemma3, phi3; sinks: gpt-oss; latent
# attention: deepseek2
architectures = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt-oss", "deepseek2")
# Recurrent attention; with a decay for each key dimension: kimi-linear
hybrids = ("qwen3next", "qwen35", "kimi-linear")
scenarios = ("one", "four", "unified", "prefix", "shift", "together")
kinds = "q4_0 q4_1 q5_0 q5_1 q8_0 q4_K q5_K q6_K".split()
processors = sorted(os.sched_getaffinity(0))
failures = []


def check(is_right, sentence):
    print(("ok    " if is_right else "WRONG ") + sentence, flush=True)
    if not is_right:
        failures.append(sentence)


def call(command, module=None, **variables):
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    environment.pop("GGML_BACKEND_PATH", None)
    environment["GGML_NO_BACKTRACE"] = "1"  # which waits for a debugger
    if module:
        environment["GGML_BACKEND_PATH"] = str(module)
    return subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        errors="replace",
    )


def cases_of(arguments, operation, mode, *words):
    """(parameters, what test-backend-ops says), on one processor, where threads of OpenMP do not
    wait for each other."""
    os.sched_setaffinity(0, processors[:1])
    said = call(
        [arguments.llama / "bin" / "test-backend-ops", mode, "-o", operation, *words],
        arguments.module,
    ).stdout
    os.sched_setaffinity(0, processors)
    return re.findall(
        rf"^.*{operation}\((.*)\): (.*)$", re.sub("\x1b\\[[0-9;]*m", "", said), re.MULTILINE
    )


def operations(arguments):
    """Every case of test-backend-ops that the device takes; those that it declines are ALiBi's, and
    recurrent attention of few rows."""
    cases = cases_of(arguments, "GATED_DELTA_NET", "test", "-b", "MHA")
    few = [
        case
        for case, _ in cases
        if int(re.search(r"n_seq_tokens=(\d+)", case)[1]) < 8 * int(re.search(r"K=(\d+)", case)[1])
    ]
    declined = [case for case, result in cases if result.startswith("not supported")]
    passed = [case for case, result in cases if result.startswith("OK")]
    check(
        len(passed) >= 10 and len(passed) + len(declined) == len(cases) and few == declined,
        f"test-backend-ops -o GATED_DELTA_NET: {len(passed)} passed, {len(few)} of few rows were"
        " declined",
    )
    cases = cases_of(arguments, "FLASH_ATTN_EXT", "test", "-b", "MHA")
    passed = [case for case, result in cases if result.startswith("OK")]
    declined = [case for case, result in cases if result.startswith("not supported")]
    with_alibi = [case for case in declined if "max_bias=0.0" not in case]
    check(
        len(passed) > 500 and len(passed) + len(declined) == len(cases) and with_alibi == declined,
        f"test-backend-ops -o FLASH_ATTN_EXT: {len(passed)} passed, {len(with_alibi)} with ALiBi"
        f" and {len(declined) - len(with_alibi)} others were declined,"
        f" {len(cases) - len(passed) - len(declined)} failed",
    )

    # test-backend-ops puts weights into the CPU's buffers, so a program of ours computes its cases.
    # Those of other weights stay llama.cpp's.
    for kind in kinds:
        shapes = [
            re.match(
                rf"type_a={kind},type_b=f32,m=(\d+),n=(\d+),k=(\d+),bs=\[1,1\],nr=\[(\d+),(\d+)\],per=\[0,1,2,3\],k_v=0,o=1",
                case,
            )
            for case, _ in cases_of(
                arguments, "MUL_MAT", "support", "-b", "CPU", "-p", f"type_a={kind},type_b=f32"
            )
        ]
        errors = {
            shape[0]: (
                call(
                    [arguments.work / "llama_products", kind, *shape.groups()], arguments.module
                ).stdout.split()[-1:]
            )
            for shape in shapes
            if shape
        }
        wrong = [
            shape
            for shape, said in errors.items()
            if not said or not re.match(r"[\d.]", said[0]) or not float(said[0]) < 5e-4
        ]
        check(
            len(errors) >= 12 and not wrong,
            f"MUL_MAT with weights of type {kind}: {len(errors) - len(wrong)} of {len(errors)}"
            f" shapes passed, {len(shapes) - len(errors)} have batches of"
            f" weights{''.join(', ' + shape for shape in wrong)}",
        )


def logits(arguments, model, flash, scenario, module=None, **variables):
    path = arguments.work / "logits"
    done = call(
        [arguments.work / "llama_models", model, flash, scenario, path], module, **variables
    )
    values = array.array("f")
    if done.returncode == 0:
        values.frombytes(path.read_bytes())
    return values, done.stdout


def error(values, expected):
    """The norm of the difference, of that of what is expected."""
    if len(values) != len(expected) or not expected:
        return math.inf
    return math.sqrt(
        sum((a - b) ** 2 for a, b in zip(values, expected)) / sum(b * b for b in expected)
    )


def model_of(arguments, name):
    """The first one of this architecture that test-llama-archs writes."""
    folder = arguments.work / "models"
    folder.mkdir(exist_ok=True)
    if not list(folder.glob(f"{name}-*.gguf")):
        call([arguments.llama / "bin" / "test-llama-archs", "-a", f"^{name}$", "-o", folder])
    return next(iter(sorted(folder.glob(f"{name}-*.gguf"))), None)


def quantised(arguments, model, kind):
    path = arguments.work / f"{kind}.gguf"
    program = arguments.llama / "bin" / "llama-quantize"
    call([program, "--allow-requantize", "--pure", model, path, kind])
    return path


def models(arguments):
    differs = False
    for name in architectures + hybrids:
        path = model_of(arguments, name)
        if not path:
            check(False, f"{name}: test-llama-archs wrote no model")
            continue
        for scenario in scenarios:
            off, _ = logits(arguments, path, "off", scenario)
            on, _ = logits(arguments, path, "on", scenario)
            mha, said = logits(arguments, path, "on", scenario, arguments.module)
            found, limit = error(mha, off), max(1e-5, 1.1 * error(on, off))
            check(
                found <= limit,
                f"{name}, {scenario}: error {found:.1e}, of ggml's flash attention"
                f" {error(on, off):.1e}{said if not mha else ''}",
            )
            if name in hybrids:
                mha, said = logits(arguments, path, "off", scenario, arguments.module)
                differs = differs or mha != off
                check(
                    error(mha, off) <= 1e-5,
                    f"{name}, {scenario}, -fa off: error"
                    f" {error(mha, off):.1e}{said if not mha else ''}",
                )
    check(
        differs,
        "-fa off: logits of models with recurrent attention are not those without the module",
    )


def settings(arguments):
    """auto and on are mha, whatever the threads; off is llama.cpp's, bit by bit, with weights that
    the module leaves to it."""
    model = (
        quantised(arguments, arguments.smollm2, "f16")
        if arguments.smollm2
        else model_of(arguments, "llama")
    )
    off, _ = logits(arguments, model, "off", "one")
    on, _ = logits(arguments, model, "on", "one")
    with_off, _ = logits(arguments, model, "off", "one", arguments.module)
    with_on, _ = logits(arguments, model, "on", "one", arguments.module)
    with_auto, said = logits(arguments, model, "auto", "one", arguments.module)
    check(with_off == off, "-fa off is as without the module")
    check(with_on != on and with_on != off, "-fa on is not as without it")
    check(with_auto == with_on and "Flash Attention enabled" in said, "-fa auto is -fa on")
    for threads in (1, 4):
        of_threads, _ = logits(
            arguments, model, "on", "one", arguments.module, LLAMA_MODELS_THREADS=threads
        )
        check(
            error(of_threads, off) < 2 * error(on, off),
            f"{threads} threads: error {error(of_threads, off):.1e}",
        )
    for types in (1, 8, 30):  # f16, q8_0, bf16
        of_ggml, _ = logits(arguments, model, "on", "one", LLAMA_MODELS_TYPES=types)
        of_mha, _ = logits(
            arguments, model, "on", "one", arguments.module, LLAMA_MODELS_TYPES=types
        )
        found = error(of_mha, off), error(of_ggml, off)
        check(
            found[0] < 2 * found[1],
            f"keys and values of type {types}: error {found[0]:.1e}, of ggml's flash attention"
            f" {found[1]:.1e}",
        )


def products(arguments):
    """Quantised weights: products of mha differ from llama.cpp's as two roundings of rows to 8 bits
    do, also with LoRAs, which lie beside the weights, and a control vector. All tensors in the
    module's buffers give the same bits. A model is saved as it was read."""
    everywhere = {"LLAMA_MODELS_WEIGHTS": "MHA_WEIGHTS"}
    for kind in kinds:
        model = quantised(arguments, model_of(arguments, "llama"), kind)
        of_one = None
        for scenario in ("four", "one", "lora", "control"):
            of_ggml, _ = logits(arguments, model, "off", scenario)
            of_mha, said = logits(arguments, model, "off", scenario, arguments.module)
            found, of_one = error(of_mha, of_ggml), of_ggml if scenario == "one" else of_one
            check(
                0 < found < 0.03,
                f"weights of type {kind}, {scenario}: difference"
                f" {found:.1e}{said if not of_mha else ''}",
            )
            if scenario in ("lora", "control"):
                check(error(of_ggml, of_one) > 0.1, f"{scenario} changes logits")
                same, _ = logits(arguments, model, "off", scenario, arguments.module, **everywhere)
                check(same and same == of_mha, f"{kind}, {scenario}: all tensors in buffers of mha")
        saved, _ = logits(arguments, model, "off", "save")
        of_mha, _ = logits(arguments, model, "off", "save", arguments.module)
        check(saved and saved.tobytes() == of_mha.tobytes(), f"weights of type {kind} are saved")


def perplexity(arguments):
    """Of a real model and text: 4,608 tokens."""
    found = {}
    for name, flash, module in (
        ("off", "off", None),
        ("ggml's flash attention", "on", None),
        ("mha", "on", arguments.module),
    ):
        # -ot, which names no tensor here, has llama.cpp look at GGML_BACKEND_PATH although the
        # CPU's backend is not a module.
        command = [arguments.llama / "bin" / "llama-perplexity", "-ot", "^$=CPU", "-fa", flash]
        command += ["-m", arguments.smollm2, "-f", arguments.text]
        said = call([*command, *"-c 1536 -t 2 --chunks 3".split()], module).stdout
        value = re.search(r"Final estimate: PPL = ([\d.]+)", said)
        found[name] = float(value[1]) if value else math.nan
    check(
        abs(found["mha"] - found["off"]) <= 0.01 * found["off"],
        "perplexity: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()),
    )


def peak(arguments, model, module):
    """MB of a short answer, with the model read instead of mapped; with the module, how it is
    loaded as well (see perplexity)."""
    words = [arguments.llama / "bin" / "llama-completion", "-m", model, "-ot", "^$=CPU"]
    words += "-t 1 -c 512 -no-cnv --load-mode none -fa on -n 8 -p Hello".split()
    run = subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "GGML_BACKEND_PATH": str(module or "")},
    )
    return os.wait4(run.pid, 0)[2].ru_maxrss / 1e3


def serve(arguments):
    """200 requests, four at a time; contexts are shifted, and prompts have common beginnings."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [arguments.llama / "bin" / "llama-server", "-m", arguments.smollm2, "--port", port]
    words += "-np 4 -c 1024 -t 1 --context-shift -fa on -ot ^$=CPU".split()
    environment = {**os.environ, "GGML_BACKEND_PATH": str(arguments.module)}
    log = arguments.work / "server.log"

    def ask(i):
        request = {"prompt": f"Count from {i % 7} to", "n_predict": 400 if i % 50 == 0 else 8}
        request.update(temperature=0, ignore_eos=True)
        url = f"http://127.0.0.1:{port}/completion"
        with urllib.request.urlopen(url, json.dumps(request).encode(), timeout=300) as answer:
            return json.load(answer)["tokens_predicted"] == request["n_predict"]

    with open(log, "w") as said:
        server = subprocess.Popen([str(word) for word in words], stderr=said, env=environment)
    try:
        while server.poll() is None and "listening" not in log.read_text():
            time.sleep(0.2)
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(ask, range(200)))
    finally:
        server.terminate()
        server.wait()
    check(sum(answers) == 200, f"llama-server -np 4: {sum(answers)} of 200 requests are answered")
    return log.read_text()


def programs(arguments):
    """Each does its work, and says what the module is and took, at the verbosity in the table."""
    loaded = r"mha: loaded MHA backend, version \d+\.\d+\.\d+ with \w+\n"
    took = r"mha: attention of 30 layers, 211 of 211 matrices\n"
    model, both = ["-m", arguments.smollm2], rf"(?s){loaded}.*{took}"
    draft = ["-md", quantised(arguments, arguments.smollm2, "q8_0")]
    for words, expected in (
        (["llama-cli", *model, *"-lv 2 -st -n 8 -p Hello".split()], rf"{both}.*Generation: \d"),
        (
            ["llama-bench", *model, *"-p 32 -n 8 -r 1 -fa 1".split()],
            rf"(?s){loaded}.*\| MHA .* tg8 ",
        ),
        (["llama-bench", *model, *"-v -p 32 -n 8 -r 1 -fa 1".split()], both),
        (["llama-batched-bench", *model, *"-c 512 -npp 32 -ntg 8 -npl 1,4".split()], both),
        (
            ["llama-speculative", *model, *draft, *"-n 32 -p A".split()],
            rf"{both}.*{took}.*accept",
        ),
        (
            ["llama-completion", *model, *"-c 256 -n 400 --context-shift -no-cnv -p Hello".split()],
            rf"{both}.* 400 runs",
        ),
        (["llama-completion", *model, *"-ot attn=CPU -n 4 -no-cnv -p A".split()], both),
        (["llama-embedding", *model, *"-p Hello".split()], both),
    ):
        program, *options = words
        if program != "llama-bench":
            options += ["-ot", "^$=CPU", "--ignore-eos"]
        command = [arguments.llama / "bin" / program, *options, "-t", 1]
        done = call(command, arguments.module)
        is_right = done.returncode == 0 and re.search(expected, done.stdout)
        check(is_right, f"{' '.join(map(str, words))}{'' if is_right else done.stdout[-2000:]}")
        done = call(command, arguments.module, MHA_GGML_QUIET=1)
        check(done.returncode == 0 and "mha:" not in done.stdout, f"{program} is quiet")
    said = serve(arguments)
    check(re.search(both, said), "llama-server says what it took")
    for kind in ("q4_K_M", *kinds):
        path = quantised(arguments, arguments.smollm2, kind)
        of_ggml, of_mha = peak(arguments, path, None), peak(arguments, path, arguments.module)
        check(of_mha < 1.03 * of_ggml, f"{kind}: {of_mha:.0f} MB, of ggml {of_ggml:.0f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        help="operations (ten minutes), models, settings, products, perplexity, programs; default:"
        " all",
    )
    for name in ("llama", "source", "module"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    for name in ("smollm2", "text"):
        parser.add_argument(f"--{name}", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build/llama_test"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    libraries, source = arguments.llama / "bin", arguments.source
    for name in "llama_models", "llama_products":
        headers = ["-I", source / "include", "-I", source / "ggml" / "include"]
        flags = ["-L", libraries, f"-Wl,-rpath,{libraries.resolve()}"]
        flags += ["-lllama", "-lggml", "-lggml-base", "-pthread", "-o", arguments.work / name]
        program = pathlib.Path(__file__).with_name(f"{name}.cpp")
        done = call(["c++", "-O1", program, *headers, *flags])
        if done.returncode:
            sys.exit(f"{name}.cpp does not compile: {done.stdout}")
    parts = {
        "operations": operations,
        "models": models,
        "settings": settings,
        "products": products,
        "perplexity": perplexity,
        "programs": programs,
    }
    if not arguments.smollm2:
        del parts["perplexity"], parts["programs"]
    for part in arguments.parts or parts:
        parts[part](arguments)
    print(f"{len(failures)} of the checks failed" if failures else "all is as it should be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
