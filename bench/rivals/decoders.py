#!/usr/bin/env python3
"""Compares a whole decoder, tests/examples/decoder.c, with llama.cpp: a prompt of 512 tokens, and
the tokens after it.

The models have Llama's shape and the same random weights: a file written by the example, and files
for llama.cpp made from it. The programs take turns, each in a separate process; llama.cpp runs with
its bench tool, built from the source in the Python package llama-cpp-python. The logits after the
prompt are compared with those of the same program in float32, to show what fewer bits cost.

  mha       f32, f16, int8 weights in INT16 and INT8, int4 weights in INT8
  llama.cpp F32, F16, Q8_0, Q4_0

models.py measures a decoder of the same shape with PyTorch.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
from session import Failed, about, build, keep, parser_for, root, run_main, say, take_turns, work

examples = """Examples:
  tools/bindings/python/setup.sh --rivals                             installs the packages
  build/rivals/venv/bin/python bench/rivals/decoders.py --prepare     makes programs and models
  build/rivals/venv/bin/python bench/rivals/decoders.py --shapes 768 --threads 1

Results go to build/rivals/decoders.json.
Exit status: 0 success; 1 logits are wrong; 2 wrong usage; 4 a requirement is missing.
"""

# layers, width, heads, kv heads, hidden width, vocabulary
shapes = {
    "768": (12, 768, 12, 12, 2048, 32000),
    "2048": (4, 2048, 32, 8, 5632, 32000),
    "tiny": (2, 128, 4, 2, 352, 512),
}
# Form -> (program, its words, bound of the rms error of logits). float32 is compared with mha's:
# the same model, computed by others.
forms = {
    "mha f32": ("mha", ["f32", "f32"], 1e-4),
    "mha f16": ("mha", ["f16", "f32"], 0.01),
    "mha int8 in INT16": ("mha", ["int8", "int16"], 0.1),
    "mha int8 in INT8": ("mha", ["int8", "int8"], 0.2),
    "mha int4 in INT8": ("mha", ["int4", "int8"], 1),
    "llama.cpp F32": ("llama", "F32", 1e-3),
    "llama.cpp F16": ("llama", "F16", 0.02),
    "llama.cpp Q8_0": ("llama", "Q8_0", 0.1),
    "llama.cpp Q4_0": ("llama", "Q4_0", 1),
}
prompt_tokens = 512
source = work / "llama.cpp"
llama = source / "build" / "bin"


def call(*command, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)
    if done.returncode:
        raise Failed(
            f"{' '.join(map(str, command))} failed:"
            f" {' '.join((done.stderr or done.stdout).split()[-40:])}"
        )
    return done


def prepare_llama():
    if not source.exists():
        pip = "-m pip download --no-deps --no-binary llama-cpp-python llama-cpp-python -d".split()
        call(sys.executable, *pip, work)
        (archive,) = work.glob("llama_cpp_python-*.tar.gz")
        call("tar", "xf", archive, "-C", work)
        source.symlink_to(next(work.glob("llama_cpp_python-*/vendor/llama.cpp")).relative_to(work))
        # g++ 12 drops most of what ggml writes into AMX's configuration.
        tiles, load = source / "ggml/src/ggml-cpu/amx/mmq.cpp", "    _tile_loadconfig(&tc);"
        barrier = '    asm volatile("" ::"r"(&tc) : "memory");\n'
        tiles.write_text(tiles.read_text().replace(load, barrier + load))
    if not (llama / "llama-quantize").exists():
        off = "OPENSSL BUILD_TESTS BUILD_EXAMPLES BUILD_SERVER BUILD_APP BUILD_HTML".split()
        settings = ["CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=ON"]
        settings += [f"LLAMA_{name}=OFF" for name in off]
        call("cmake", "-S", source, "-B", source / "build", *(f"-D{s}" for s in settings))
        call("cmake", "--build", source / "build", "--target", "llama-bench", "llama-quantize")
    compile_with(llama, "llama_logits", "llama_logits")


def compile_with(libraries, name, output):
    """Compiles a program beside this one with llama.cpp's libraries of a folder."""
    includes = "-I", source / "include", "-I", source / "ggml" / "include"
    found = "-L", libraries, f"-Wl,-rpath,{libraries.resolve()}", "-lllama", "-lggml", "-lggml-base"
    program = pathlib.Path(__file__).with_name(f"{name}.cpp")
    call("c++", "-std=c++17", "-O2", program, *includes, *found, "-o", work / output)


def write_gguf(path, target, shape, name):
    """The same model for llama.cpp, which rotates pairs of neighbours: rows of W_Q and W_K change
    places within each head."""
    import gguf
    import numpy

    layers, width, heads, kv_heads, hidden, vocabulary = shape
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = numpy.fromfile(file, numpy.float32)
    writer = gguf.GGUFWriter(target, "llama")
    for key, value in (
        ("context_length", 4096),
        ("embedding_length", width),
        ("block_count", layers),
        ("feed_forward_length", hidden),
        ("head_count", heads),
        ("head_count_kv", kv_heads),
        ("layer_norm_rms_eps", 1e-5),
        ("rope_freq_base", 10000.0),
        ("rope_dimension_count", width // heads),
        ("vocab_size", vocabulary),
    ):
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("no_vocab")
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    kind = gguf.GGMLQuantizationType[name]
    for whole, entry in header.items():
        if whole == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values, part = (
            data[begin // 4 : end // 4].reshape(entry["shape"]),
            whole.removesuffix(".weight"),
        )
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", part)
        if part.endswith(("q_proj", "k_proj")):
            count = heads if part.endswith("q_proj") else kv_heads
            values = values.reshape(count, 2, -1, width).swapaxes(1, 2).reshape(values.shape)
        to = f"blk.{match[1]}.{parts[match[2]]}.weight" if match else f"{parts[part]}.weight"
        if values.ndim == 2 and name != "F32":
            writer.add_tensor(
                to, gguf.quants.quantize(numpy.ascontiguousarray(values), kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(to, numpy.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def files(name):
    return work / f"decoder{name}.safetensors", {
        kind: work / f"decoder{name}.{kind}.gguf" for kind in ("F32", "F16", "Q8_0", "Q4_1", "Q4_0")
    }


def quantised(model, kind):
    """The file of this model in which llama-quantize chose the types, such as Q4_K_M."""
    target = work / f"{model.stem}.{kind}.gguf"
    if not target.exists():
        call(llama / "llama-quantize", "--allow-requantize", model, target, kind)
    return target


def prepare(names):
    """What is there already stays: programs and models."""
    work.mkdir(parents=True, exist_ok=True)
    library = build / "src" / "libmha.a"
    if not library.exists():
        raise Failed(
            f"{library} is missing; build it: cmake -S . -B build -DCMAKE_BUILD_TYPE=Release &&"
            " cmake --build build --target mha_static"
        )
    program = root / "tests" / "examples" / "decoder.c", "-I", root / "include", library
    call(os.environ.get("CC", "cc"), "-O2", *program, "-lm", "-pthread", "-o", work / "decoder")
    prepare_llama()
    for name in names:
        path, ggufs = files(name)
        if not path.exists():
            call(work / "decoder", "write", path, *shapes[name])
        for kind, target in ggufs.items():
            if not target.exists():
                write_gguf(path, target, shapes[name], kind)
        tokens, numbers = 1, []
        while len(numbers) < prompt_tokens:
            tokens = (tokens * 1103515245 + 12345) % 2**31
            numbers.append((tokens >> 8) % shapes[name][5])
        (work / f"prompt{name}").write_text(" ".join(map(str, numbers)))


def command(form, name, threads, tokens, logits):
    return [
        work / "decoder",
        "run",
        files(name)[0],
        shapes[name][2],
        work / f"prompt{name}",
        tokens,
        threads,
        *forms[form][1],
        logits,
    ]


def run(form, name, threads, tokens):
    """{"prompt", "token"}: seconds of one process on the last cores."""
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    pin = {"preexec_fn": lambda: os.sched_setaffinity(0, cores)}
    if forms[form][0] == "llama":
        model = files(name)[1][forms[form][1]]
        bench = [llama / "llama-bench", "-m", model, *f"-t {threads} -r 1 -o json -ngl 0".split()]
        found = json.loads(call(*bench, "-p", prompt_tokens, "-n", 0, **pin).stdout) + json.loads(
            call(*bench, "-p", 0, "-n", tokens, "-d", prompt_tokens, **pin).stdout
        )
        return {"prompt": found[0]["avg_ns"] / 1e9, "token": found[1]["avg_ns"] / 1e9 / tokens}
    said = call(*command(form, name, threads, tokens, "/dev/null"), **pin).stderr
    prompt, token = re.search(r"^prompt (\S+) s, token (\S+) s$", said, re.MULTILINE).groups()
    return {"prompt": float(prompt), "token": float(token)}


def errors_of(name, chosen):
    """Of the logits after the prompt: of fewer bits from the same program's float32, of float32
    from mha's."""
    import numpy

    found, path = {}, work / "logits"
    first = {"mha": "mha f32", "llama": "llama.cpp F32"}
    for form in dict.fromkeys(["mha f32", *(first[forms[form][0]] for form in chosen), *chosen]):
        if forms[form][0] == "llama":
            call(
                work / "llama_logits", files(name)[1][forms[form][1]], work / f"prompt{name}", path
            )
        else:
            call(*command(form, name, 1, 1, path))
        found[form] = numpy.fromfile(path, numpy.float32)[: shapes[name][5]]
    errors = {}
    for form in chosen:
        expected = found["mha f32" if form in first.values() else first[forms[form][0]]]
        errors[form] = float(
            numpy.linalg.norm(found[form] - expected) / numpy.linalg.norm(expected)
        )
    return errors


def wrong(errors):
    """The forms whose logits are further off than their bound, NaN too."""
    return [form for form, error in errors.items() if not error <= forms[form][2]]


def main():
    parser = parser_for(__doc__, examples, 3, "decoders")
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=["768", "2048"])
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=forms,
        default=list(forms),
        metavar="FORM",
        help=", ".join(forms),
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="the tokens after the prompt (default: 64)"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="make programs and models, and measure nothing"
    )
    options = parser.parse_args()
    prepare(options.shapes)
    is_wrong = False
    for name in options.shapes if not options.prepare else []:
        errors = errors_of(name, options.forms)
        for form in wrong(errors):
            is_wrong = True
            say(
                f"{name}: the logits of {form} are off by {errors[form]:.1g}, more than"
                f" {forms[form][2]:g}"
            )
        for threads in options.threads:
            runs = {
                form: lambda form=form, name=name, threads=threads: run(
                    form, name, threads, options.tokens
                )
                for form in options.forms
            }
            seconds, reasons = take_turns(runs, options.rounds, options.busy)
            result = {
                "key": ["decoder", name, threads],
                "about": about(options.rounds, versions()),
                "errors": errors,
                "seconds": seconds,
                "reasons": reasons,
            }
            keep(options.json, [result])
            say(
                f"{name}, {threads} threads: "
                + ", ".join(
                    f"{form} {min(times['prompt']):.3f} s {1e3 * min(times['token']):.2f} ms"
                    for form, times in seconds.items()
                    if times
                )
            )
    return 1 if is_wrong else 0


def versions():
    readme = next(iter((source / ".." / "..").resolve().glob("PKG-INFO")), None)
    found = re.search(r"^Version: (.*)", readme.read_text(), re.MULTILINE) if readme else None
    return {"llama.cpp": f"of llama-cpp-python {found[1] if found else ''}".strip()}


if __name__ == "__main__":
    run_main(main)
