#!/usr/bin/env python3
"""mha-vllm with a stub of the classes of vLLM that it uses; vllm_models_test.py has vLLM itself.

    vllm_test.py --library LIBMHA.SO [--venv FOLDER]

Without PyTorch, also in FOLDER, it exits with 77, which ctest shows as skipped.
"""

import abc
import enum
import os
import pathlib
import sys
import types
import unittest
from types import SimpleNamespace as Record
from unittest import mock

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "tests" / "bindings"), str(root / "tools" / "adapters" / "vllm")]
import python_support

arguments = python_support.parser(__doc__, venv="runtimes").parse_args()
python_support.need(["numpy", "torch"], arguments, "tools/bindings/python/setup.sh --runtimes")

import mha
import numpy as np
import torch
from mha import torch as mha_torch

registered = {}


class Backend(enum.Enum):
    CPU_ATTN = "stock"


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class Builder(abc.ABC):
    def __class_getitem__(cls, _):
        return cls

    @abc.abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec


class Worker:
    def load_model(self):
        self.loaded = True


Norm = type("Norm", (torch.nn.LayerNorm,), {})
Norm.__module__ = "vllm.model_executor.layers.layernorm"
Embedding = type("VocabParallelEmbedding", (torch.nn.Embedding,), {})
platform = Record(is_cpu=lambda: True)
for name, fields in {
    "platforms": dict(current_platform=platform),
    "version": dict(__version__="0.32.0+cpu"),
    "envs": dict(VLLM_BATCH_INVARIANT=False),
    "config": dict(VllmConfig=object),
    "logger": dict(init_logger=lambda _: mock.Mock()),
    "v1.attention.backends.registry": dict(
        AttentionBackendEnum=Backend, register_backend=registered.__setitem__
    ),
    "v1.attention.backend": dict(
        AttentionBackend=type("AttentionBackend", (), {}),
        AttentionImpl=type("AttentionImpl", (), {}),
        AttentionMetadataBuilder=Builder,
        AttentionType=AttentionType,
        CommonAttentionMetadata=Record,
        MultipleOf=lambda base: base,
    ),
    "v1.kv_cache_interface": dict(
        CrossAttentionSpec=type("CrossAttentionSpec", (), {}),
        EncoderOnlyAttentionSpec=type("EncoderOnlyAttentionSpec", (), {}),
        KVCacheLayout=Record(LBHNC="LBHNC"),
    ),
    "v1.worker.cpu_worker": dict(CPUWorker=Worker),
    "model_executor.determinism.batch_invariant": dict(init_batch_invariance=None),
    "model_executor.layers.utils": dict(
        dispatch_cpu_unquantized_gemm=lambda layer, _: setattr(layer, "cpu_linear", "stock")
    ),
    "model_executor.layers.vocab_parallel_embedding": dict(VocabParallelEmbedding=Embedding),
}.items():
    path = ["vllm", *name.split(".")]
    for end in range(1, len(path) + 1):
        module = sys.modules.setdefault(".".join(path[:end]), types.ModuleType(".".join(path)))
        if end > 1:
            setattr(sys.modules[".".join(path[: end - 1])], path[end - 1], module)
    vars(module).update(fields)

import mha_vllm
from mha_vllm import attention, linear, model
from vllm import envs
from vllm.model_executor.layers import utils
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

H, KV, WIDTH, BLOCK = 4, 2, 32, 16


def environment(**variables):
    return mock.patch.dict(os.environ, variables)


def layer_of(rows=24, columns=40, bias=True, dtype=torch.float32, **fields):
    layer = torch.nn.Linear(columns, rows, bias=bias).to(dtype)
    vars(layer).update(fields)
    return layer


def impl_of(**options):
    given = dict(alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto")
    impl = attention.MhaAttentionImpl(H, WIDTH, WIDTH**-0.5, KV, **{**given, **options})
    impl.process_weights_after_loading(torch.float32)
    return impl


def step_of(lengths, rows, tables, spec=None, causal=True, **fields):
    """What the builder makes of requests with `rows` new positions after `lengths` others."""
    starts = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    after = torch.tensor(lengths) + torch.tensor(rows)
    builder = attention.MhaMetadataBuilder(spec, [], None, None)
    common = Record(num_reqs=len(rows), num_actual_tokens=sum(rows), causal=causal, **fields)
    vars(common).setdefault("seq_lens", after)
    common.query_start_loc_cpu, common.block_table_tensor = starts, tables
    return builder.build(0, common)


def expected(q, k, v, first, sinks=None, softcap=0.0, window=None, causal=True):
    """Attention of one request in float64: q [n, H, WIDTH] from position `first` on."""
    k, v = (x.double().repeat_interleave(H // KV, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * WIDTH**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(len(k)) - (first + torch.arange(len(q)))[:, None]
    hidden = distance > 0 if causal else distance != distance
    if window is not None:
        hidden = hidden | (distance <= -window) | (distance >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(H, len(q), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[:, :, : len(k)], v)


class Registration(unittest.TestCase):
    def test_parts(self):
        for parts in "", "attention", "linear":
            registered.clear()
            linear.uninstall()
            with environment(MHA_VLLM=parts):
                mha_vllm.register()
            path = None if parts == "linear" else f"{attention.__name__}.MhaAttentionBackend"
            self.assertEqual(registered.get(Backend.CPU_ATTN), path)
            is_linear = utils.dispatch_cpu_unquantized_gemm is linear.dispatch
            self.assertEqual(is_linear, parts != "attention")

    def test_refusals(self):
        for variables, sentence in (
            (dict(MHA_VLLM="attn"), "MHA_VLLM has 'attn'; the words are attention, linear"),
            (dict(MHA_VLLM_WEIGHTS="fp8"), "MHA_VLLM_WEIGHTS has 'fp8'"),
            (dict(MHA_VLLM_WEIGHTS="f32:32"), "groups of N weights are int8:N or int4:N"),
            (dict(MHA_VLLM_ARITHMETIC="f16"), "MHA_VLLM_ARITHMETIC has 'f16'"),
        ):
            with environment(**variables), self.assertRaisesRegex(ValueError, sentence):
                mha_vllm.register()
        with mock.patch("vllm.version.__version__", "0.33.0"):
            with self.assertRaisesRegex(RuntimeError, r"tested with vLLM 0\.32\.0; this is 0\.33"):
                mha_vllm.register()
            with mock.patch.object(platform, "is_cpu", lambda: False):
                mha_vllm.register()  # of another device, whose vLLM may be any


class Linears(unittest.TestCase):
    def test_bits(self):
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            x, layer = torch.rand(33, 40), layer_of(dtype=dtype)
            packed = mha_torch.Linear.from_module(layer, weight_type=linear.names[dtype])
            linear.dispatch(layer, remove_weight=True)
            self.assertTrue(linear.is_served(layer) and layer.weight.numel() == 0)
            given = x.to(dtype)
            y = layer.cpu_linear(given, layer.weight, layer.bias)
            self.assertTrue(torch.equal(y, packed(given)))
            alone = [layer.cpu_linear(row[None], layer.weight, layer.bias) for row in given]
            self.assertTrue(torch.equal(y, torch.cat(alone)))
            with self.assertRaisesRegex(RuntimeError, "a bias in some calls"):
                layer.cpu_linear(given, layer.weight, None)

    def test_converted_weights(self):
        x = torch.rand(5, 64)
        kinds = "int8 f32 0.02, int8 int16 0.02, int8 int8 0.03, int4:32 f32 0.2,  bf16 0.02"
        for weights, arithmetic, error in (kind.split(" ") for kind in kinds.split(", ")):
            layer = layer_of(columns=64, bias=False)
            exact = layer(x)
            with environment(MHA_VLLM_WEIGHTS=weights, MHA_VLLM_ARITHMETIC=arithmetic):
                linear.dispatch(layer, remove_weight=True)
            y = layer.cpu_linear(x, layer.weight)
            self.assertLess((y - exact).norm() / exact.norm(), float(error), (weights, arithmetic))
            self.assertFalse(torch.equal(y, exact))

    def test_biases_that_vllm_adds_later(self):
        x = torch.rand(3, 40)
        for layer in layer_of(skip_bias_add=True), layer_of(input_is_parallel=True, tp_rank=1):
            exact = torch.nn.functional.linear(x, layer.weight)
            linear.dispatch(layer, remove_weight=True)
            torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), exact)

    def test_heads_of_models(self):
        head = layer_of()
        exact = head(torch.eye(40))
        linear.dispatch(head, remove_weight=False)
        self.assertEqual(head.weight.shape, (24, 40))
        torch.testing.assert_close(head.cpu_linear(torch.eye(40), head.weight, head.bias), exact)

    def test_what_stays_with_vllm(self):
        for layer in Record(weight=torch.rand(2, 3, 4)), Record(weight=torch.ones(2, 2).byte()):
            linear.dispatch(layer, remove_weight=True)
            self.assertEqual(layer.cpu_linear, "stock")


class Attention(unittest.TestCase):
    def run_steps(self, steps, batches, dtype=torch.float32, spec=None, causal=True, **options):
        """Outputs of each request over the steps, each computed in the given batches."""
        torch.manual_seed(3)
        total = [sum(rows) for rows in steps]
        data = [[torch.rand(n, heads, WIDTH) - 0.5 for heads in (H, KV, KV)] for n in total]
        data = [[x.to(dtype) for x in request] for request in data]
        # Blocks apart, as where layers share an allocation; what was in them must not matter.
        memory = torch.full((40, 2, KV, BLOCK, 2 * WIDTH), torch.nan, dtype=dtype)
        cache, outputs = memory[:, 0], [[] for _ in steps]
        tables = torch.arange(len(steps) * 6, dtype=torch.int32).reshape(-1, 6).flip(1)
        impl, done = impl_of(**options), [0] * len(steps)
        for number in range(len(steps[0])):
            for batch in batches:
                rows = [steps[i][number] for i in batch]
                lengths = [done[i] for i in batch]
                parts = [[x[done[i] :][:n] for x in data[i]] for i, n in zip(batch, rows)]
                q, k, v = (torch.cat(x) for x in zip(*parts))
                step = step_of(lengths, rows, tables[batch], spec, causal)
                out = impl.forward(None, q, k, v, cache, step, torch.empty_like(q))
                for i, part in zip(batch, out.split(rows)):
                    outputs[i].append(part)
                    done[i] += len(part)
        self.assertTrue(memory[:, 1].isnan().all())
        return data, [torch.cat(parts) for parts in outputs]

    def test_decoders(self):
        steps = [[21, 1, 1], [3, 20, 1], [40, 1, 17]]
        sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
        for options in (
            {},
            dict(sinks=sinks),
            dict(logits_soft_cap=2.0),
            dict(sliding_window=18),
            dict(dtype=torch.bfloat16),
            dict(dtype=torch.float16, sliding_window=18, sinks=sinks),
        ):
            data, together = self.run_steps(steps, [[2, 0, 1]], **options)
            _, alone = self.run_steps(steps, [[0], [1], [2]], **options)
            dtype = options.get("dtype", torch.float32)
            for (q, k, v), y, one in zip(data, together, alone):
                self.assertTrue(torch.equal(y, one), options)
                window, softcap = options.get("sliding_window"), options.get("logits_soft_cap", 0.0)
                exact = expected(q, k, v, 0, options.get("sinks"), softcap, window)
                torch.testing.assert_close(y, exact.to(dtype), atol=1e-5, rtol=2 * 2.0**-8)

    def test_alibi(self):
        slopes = [0.5, 0.25, 0.125, 0.0625]
        (data, *_), (y, *_) = self.run_steps([[20, 1]], [[0]], alibi_slopes=slopes)
        q, k, v = data
        score = mha.ScoreOptions(alibi_slopes=np.array(slopes, np.float32))
        one = mha.attention(q.numpy(), k.numpy(), v.numpy(), is_causal=True, score=score)
        self.assertTrue(np.array_equal(one, y.numpy()))

    def test_encoders(self):
        for window in None, 5:
            given = dict(attn_type=AttentionType.ENCODER_ONLY, sliding_window=window)
            steps, spec = [[9], [30]], EncoderOnlyAttentionSpec()
            data, together = self.run_steps(steps, [[0, 1]], spec=spec, causal=False, **given)
            _, alone = self.run_steps(steps, [[1], [0]], spec=spec, causal=False, **given)
            for (q, k, v), y, one in zip(data, together, alone):
                self.assertTrue(torch.equal(y, one))
                exact = expected(q, k, v, 0, window=window, causal=False)
                torch.testing.assert_close(y, exact.float(), atol=1e-5, rtol=1e-5)

    def test_cross_attention(self):
        """A request that has its encoder's keys already, beside one that brings them."""
        torch.manual_seed(4)
        keys = [[torch.rand(n, KV, WIDTH) for _ in "kv"] for n in (19, 33)]
        q = [torch.rand(n, H, WIDTH) for n in (2, 1, 3)]
        cache = torch.empty(8, KV, BLOCK, 2 * WIDTH)
        impl = impl_of(attn_type=AttentionType.ENCODER_DECODER)
        tables = torch.tensor([[0, 1, 2], [5, 4, 3]], dtype=torch.int32)

        def run(queries, k, v, rows, after, new, tables):
            fields = dict(seq_lens=torch.tensor(after), encoder_seq_lens_cpu=np.array(new))
            step = step_of([0] * len(rows), rows, tables, CrossAttentionSpec(), False, **fields)
            return impl.forward(None, queries, k, v, cache, step, torch.empty_like(queries))

        y = [run(q[0], *keys[0], [2], [19], [19], tables[:1])]
        both = run(torch.cat(q[1:]), *keys[1], [1, 3], [19, 33], [0, 33], tables)
        y += both.split([1, 3])
        y.append(run(q[2], None, None, [3], [33], [0], tables[1:]))
        for result, queries, (k, v) in zip(y, [*q, q[2]], [keys[0], keys[0], keys[1], keys[1]]):
            exact = expected(queries, k, v, 0, causal=False)
            torch.testing.assert_close(result, exact.float(), atol=1e-5, rtol=1e-5)
        self.assertTrue(torch.equal(y[2], y[3]))

    def test_layers_that_read_anothers_keys(self):
        torch.manual_seed(5)
        q, k, v = (torch.rand(20, heads, WIDTH) for heads in (H, KV, KV))
        cache = torch.empty(4, KV, BLOCK, 2 * WIDTH)
        step = step_of([0], [20], torch.tensor([[2, 1]], dtype=torch.int32))
        y = impl_of().forward(None, q, k, v, cache, step, torch.empty_like(q))
        reader = impl_of(kv_sharing_target_layer_name="other")
        again = reader.forward(None, q, k, v, cache, step, torch.empty_like(q))
        self.assertTrue(torch.equal(y, again))

    def test_refusals(self):
        for options, sentence in (
            (dict(kv_cache_dtype="fp8"), "no room for the scales of 8-bit numbers"),
            (dict(use_alibi_sqrt=True), "does not know use_alibi_sqrt"),
            (dict(alibi_slopes=[1.0] * H, attn_type="encoder_only"), "ALiBi in decoders alone"),
        ):
            with self.assertRaisesRegex(NotImplementedError, sentence):
                impl_of(**options)
        with self.assertRaisesRegex(NotImplementedError, "heads are 20 wide"):
            attention.MhaAttentionImpl(H, 20, 1.0, KV, None, None, "auto")
        with self.assertRaisesRegex(NotImplementedError, "some requests are causal"):
            step_of([0], [1], torch.zeros(1, 1), causal=torch.tensor([True]))


class Models(unittest.TestCase):
    def config(self, lora=None, speculative=None, **fields):
        names = "is_hybrid", "has_inner_state", "is_mm_prefix_lm"
        given = Record(**{**dict.fromkeys(names, False), "rswa_window": None, **fields})
        return Record(model_config=given, lora_config=lora, speculative_config=speculative)

    def test_refusals(self):
        for fields, sentence in (
            (dict(is_hybrid=True), "recurrent layers"),
            (dict(lora=object()), "LoRA"),
            (dict(is_mm_prefix_lm=True), "see what follows"),
            (dict(rswa_window=5), "reference sliding windows"),
        ):
            with self.assertRaisesRegex(ValueError, sentence):
                model.check_config(self.config(**fields))
        with mock.patch.object(envs, "VLLM_BATCH_INVARIANT", True):
            with self.assertRaisesRegex(ValueError, "speculative"):
                model.check_config(self.config(speculative=object()))

    def test_batch_invariance(self):
        served = layer_of()
        linear.dispatch(served, remove_weight=True)
        whole = torch.nn.Sequential(served, Norm(24), Embedding(3, 24))
        whole[1].attention = torch.nn.Identity()
        whole[1].attention.impl = impl_of()
        model.install()
        worker = Worker()
        worker.vllm_config, worker.model_runner = self.config(), Record(get_model=lambda: whole)
        with mock.patch.object(envs, "VLLM_BATCH_INVARIANT", True):
            worker.load_model()
            self.assertEqual(model.survey(whole), ({"attention": 1, "linear": 1}, {}))
            whole.append(torch.nn.Conv1d(1, 1, 1))
            with self.assertRaisesRegex(ValueError, r"depend on the batch: Conv1d \(1, such as 3"):
                worker.load_model()
            whole[1].attention.impl = object()
            with self.assertRaisesRegex(ValueError, r"Identity \(1, such as 1\.attention\)"):
                worker.load_model()
        worker.load_model()  # said in the log alone


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
