"""mha-vllm with vLLM itself and small models of random weights, which are made on the fly.

Started by tools/adapters/vllm/test.sh in an environment with vLLM.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import torch
import transformers as tf

_size = dict(hidden_size=128, num_hidden_layers=2, vocab_size=512, max_position_embeddings=2048)
_heads = dict(num_attention_heads=4, num_key_value_heads=2)
_narrow = dict(_size, **_heads, intermediate_size=256)
_wide = dict(_narrow, head_dim=64, num_hidden_layers=7)  # layers of all kinds
_experts = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=64)
# The beginning of the configuration's class, the class of the model, and numbers
_models = {
    "llama": ("Llama", "LlamaForCausalLM", dict(_narrow, tie_word_embeddings=False)),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", _wide),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", dict(_wide, sliding_window=64)),
    "gpt-oss": ("GptOss", "GptOssForCausalLM", dict(_wide, **_experts)),
    "bloom": ("Bloom", "BloomForCausalLM", dict(hidden_size=128, n_layer=2, n_head=4)),
    "bert": ("Bert", "BertModel", dict(_size, num_attention_heads=4)),
}
environment = dict(os.environ, VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
environment.update(VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
environment.update(VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo")  # of two processes
folder = tempfile.TemporaryDirectory()


def model(name):
    """The folder of a model, made once."""
    path = pathlib.Path(folder.name) / name
    if not path.exists():
        config, kind, options = _models[name]
        torch.manual_seed(1)
        made = getattr(tf, kind)(getattr(tf, config + "Config")(**options)).float()
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, (1 / parameter.shape[-1]) ** 0.5)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        made.save_pretrained(path)
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(507))]
        (path / "vocab.txt").write_text("\n".join(words))  # of bert
    return path


def same_bits(name, *words, least=8, **variables):
    """A test that no request differs, as the program verify says, in at least so many scenarios."""

    def test(self):
        program = [sys.executable, "-m", "mha_vllm.verify", model(name), "--json"]
        words_here = ["--requests=16", "--tokens=20", "--dtype", *words]
        here = {**environment, **variables}
        done = subprocess.run([*program, *words_here], env=here, capture_output=True, text=True)
        last = done.stdout.strip().rpartition("\n")[2]
        self.assertTrue(last.startswith("{"), done.stderr[-3000:])
        counts = json.loads(last)
        self.assertEqual({what: n for what, n in counts.items() if n}, {})
        self.assertEqual(done.returncode, 0)
        self.assertGreaterEqual(sum(n is not None for n in counts.values()), least)

    return test


class Server:
    """The OpenAI-compatible server on a free port, until the end of a with statement."""

    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = f"--model {model('llama')} --host 127.0.0.1 --port {self.port} --dtype float32"
        words += " --skip-tokenizer-init --enforce-eager --max-model-len 512 --max-num-seqs 16"
        module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()]
        self.log = tempfile.TemporaryFile()
        streams = dict(stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)
        self.process = subprocess.Popen(module, env=environment, **streams)
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10)
                return self
            if self.process.poll() is not None:
                break
            time.sleep(1)
        self.log.seek(0)
        said = self.log.read()[-3000:].decode(errors="replace")
        self.__exit__()
        raise AssertionError(f"the server does not start: {said}")

    def __exit__(self, *_):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it may have left
        self.process.wait()
        self.log.close()

    def ask(self, seed, **more):
        """An answer as it comes, for the prompt of this seed."""
        tokens = random.Random(seed).choices(range(5, 512), k=3 + 17 * seed)
        fields = dict(model=str(model("llama")), prompt=tokens, max_tokens=6, logprobs=4)
        fields.update(temperature=0, ignore_eos=True, return_tokens_as_token_ids=True, **more)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)

    def choices(self, seed):
        return json.dumps(json.load(self.ask(seed))["choices"])


class Models(unittest.TestCase):
    def test_clients_of_a_server_get_the_bytes_that_each_gets_alone(self):
        """Also when another one leaves."""
        with Server() as server, concurrent.futures.ThreadPoolExecutor(16) as clients:
            alone = [server.choices(seed) for seed in range(16)]
            leaving = server.ask(20, max_tokens=150, stream=True)
            leaving.read(20)
            together = clients.map(server.choices, range(16))
            leaving.close()
            self.assertEqual(list(together), alone)
            self.assertEqual([server.choices(seed) for seed in range(3)], alone[:3])
        self.assertEqual(len(set(alone)), 16)

    test_llama = same_bits("llama", "float32", VLLM_BATCH_INVARIANT="1")
    test_llama_in_integers = same_bits(
        "llama", "bfloat16", MHA_VLLM_WEIGHTS="int8", MHA_VLLM_ARITHMETIC="int8"
    )
    test_llama_compiled = same_bits("llama", "bfloat16", "--compile", MHA_VLLM_ARITHMETIC="bf16")
    test_llama_in_two_processes = same_bits("llama", "float32", "--tensor-parallel=2", least=7)
    test_qwen3 = same_bits("qwen3", "bfloat16")
    test_gemma3 = same_bits("gemma3", "float32")
    test_gpt_oss = same_bits("gpt-oss", "float32")
    test_bloom = same_bits("bloom", "float16")
    test_bert = same_bits("bert", "float32", "--embeddings", least=3)


if __name__ == "__main__":
    unittest.main()
