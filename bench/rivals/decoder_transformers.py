#!/usr/bin/env python3
"""Compares tests/examples/decoder.c with Hugging Face's LlamaForCausalLM on small models with
random weights: whether the tokens are the same, and the largest difference of the logits. It needs
torch and transformers, and writes into the folder that it is run from.

Example, in build/rivals, after tools/bindings/python/setup.sh --rivals:
  venv/bin/python ../../bench/rivals/decoder_transformers.py ../bin/mha_example_decoder
"""

import argparse
import subprocess
import sys

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "program", metavar="PROGRAM", help="built from decoder.c, as src/docs/decoder.md says"
)
program, failed = parser.parse_args().program, False  # help needs no packages

import numpy
import torch
import transformers

prompt = [position * position % 293 + 1 for position in range(37)]
with open("prompt", "w") as file:
    print(*prompt, file=file)
for name, is_tied, dtype in (
    ("float32", False, torch.float32),
    ("tied embeddings", True, torch.float32),
    ("bfloat16", False, torch.bfloat16),
):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=300,
        rms_norm_eps=1e-5,
        tie_word_embeddings=is_tied,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained("model")
    model = transformers.LlamaForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
    command = [
        program,
        "run",
        "model/model.safetensors",
        "6",
        "prompt",
        "20",
        "2",
        "file",
        "f32",
        "logits",
    ]
    tokens = list(
        map(
            int,
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split(),
        )
    )
    with torch.no_grad():
        expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].numpy()
    logits = numpy.fromfile("logits", numpy.float32).reshape(expected.shape)
    difference, is_same = abs(logits - expected).max(), tokens == expected.argmax(-1).tolist()
    failed |= not (is_same and difference < 1e-4)
    print(
        f"{name}: {'the same' if is_same else 'other'} tokens, logits within {difference:.1e} of up"
        f" to {abs(expected).max():.1f}"
    )
print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}")
sys.exit(failed)
