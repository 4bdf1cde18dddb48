"""One library of the comparison, in a process of its own. Run by tools/compare.py, with the interpreter that has the library:

    worker.py LIBRARY THREADS CORES [HELPER]

Answers each request, a line of JSON on standard input, by a line of JSON on standard output. Files hold float32 numbers: the inputs
x [batch, n, width], w_qkv [width, 3 * width], w_o [width, width] one after the other; the output y [batch, n, width].

Decoding is the other kind of shape, a dictionary: one row x [width], w_qkv [width, width + 2 * kv_width], w_o [width, width], and what lies in
the cache, k and v [past, kv_heads, head_dim]; kv_width = kv_heads * head_dim, head_dim = width / heads. Its keys and values are k and v with
those of x behind them, and the next call overwrites these.

With tools/compare.py --arithmetic, the library "numpy" makes up the inputs, and computes y in double precision: a file of float64.
"""

import array
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time

sample_seconds = 0.002  # of the calls between two looks at the clock, which cost less than a microsecond


def repeated(call):
    def run(calls):
        for _ in range(calls):
            call()
    return run


def is_decode(shape):
    return isinstance(shape, dict)


def key_of(shape):
    return tuple(shape.items()) if is_decode(shape) else tuple(shape)


def sizes(shape):
    """Of the arrays in the file of inputs."""
    if not is_decode(shape):
        batch, n, width, _, _ = shape
        return [batch * n * width, 3 * width**2, width**2]
    width, kv_width = shape["width"], shape["width"] // shape["heads"] * shape["kv_heads"]
    return [width, width * (width + 2 * kv_width), width**2, shape["past"] * kv_width, shape["past"] * kv_width]


def in_turns(runs):
    turns = itertools.cycle(runs)

    def run(calls):
        for _ in range(calls):
            next(turns)(1)
    return run


class Mha:
    """Made by the helper, a shared object around libmha. Needs no package."""

    name = "mha"
    # MHA_TYPE_* of the weights, MHA_ARITHMETIC_* of the projections, and of scores and context.
    arithmetics = {"f32": (0, 0, 0), "int16": (3, 2, 0), "int8": (3, 1, 0), "int16_attention": (3, 2, 2), "int8_attention": (3, 1, 1),
                   "int4_int16": (4, 2, 0), "int4_int8": (4, 1, 0)}

    def __init__(self, threads, helper):
        self.threads, self.helper, self.inputs = threads, ctypes.CDLL(helper), {}
        self.helper.compare_layer.restype = self.helper.compare_decode.restype = ctypes.c_void_p
        self.helper.compare_output.restype = ctypes.POINTER(ctypes.c_float)
        for function in (self.helper.compare_operations, self.helper.compare_peak, self.helper.compare_bandwidth):
            function.restype = ctypes.c_double
        self.helper.compare_instruction_set.restype = ctypes.c_char_p
        number = self.helper.mha_version()
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        self.detail = self.helper.compare_instruction_set().decode()

    def make(self, shape, inputs, output):
        """Makes up the inputs, runs the layer on them, and writes both files. Returns the operations of one call."""
        arrays = [(ctypes.c_float * count)() for count in sizes(shape)]
        width = shape["width"] if is_decode(shape) else shape[2]
        # Rows and queries of variance 1, and so scores too: the softmax has something to do.
        for seed, (values, bound) in enumerate(zip(arrays, (3**0.5, (3 / width)**0.5, (3 / width)**0.5, 3**0.5, 3**0.5))):
            self.helper.compare_fill(values, ctypes.c_int64(len(values)), ctypes.c_float(bound), ctypes.c_uint64(seed))
        with open(inputs, "wb") as file:
            file.writelines(arrays)
        layer = self.new_layer(shape, arrays)
        self.inputs[key_of(shape)] = arrays, layer
        self.run(layer, 1)
        with open(output, "wb") as file:
            file.write(ctypes.string_at(self.helper.compare_output(layer), 4 * len(arrays[0])))
        return self.helper.compare_operations(layer)

    def read(self, shape, inputs):
        arrays = [(ctypes.c_float * count)() for count in sizes(shape)]
        with open(inputs, "rb") as file:
            for values in arrays:
                file.readinto(values)
        return arrays

    def new_layer(self, shape, arrays, arithmetic="f32"):
        message = ctypes.create_string_buffer(248)
        if is_decode(shape):
            numbers = map(ctypes.c_int64, (shape[name] for name in ("width", "heads", "kv_heads", "past")))
            layer = self.helper.compare_decode(*numbers, *arrays, self.threads, message)
        else:
            *numbers, is_causal = shape
            layer = self.helper.compare_layer(*map(ctypes.c_int64, numbers), is_causal, *self.arithmetics[arithmetic], *arrays,
                                              self.threads, message)
        if not layer:
            raise RuntimeError(message.value.decode())
        return ctypes.c_void_p(layer)

    def load_layer(self, shape, *_):
        _, layer = self.inputs[key_of(shape)]
        return lambda calls: self.run(layer, calls), None

    def load_decode(self, shape, *_):
        arrays, _ = self.inputs[key_of(shape)]
        layer = self.new_layer(shape, arrays)
        return lambda calls: self.run(layer, calls), None

    def load_f32(self, shape, *arrays, arithmetic="f32"):
        layer = self.new_layer(shape, arrays, arithmetic)
        return (lambda calls: self.run(layer, calls),
                lambda: array.array("f", ctypes.string_at(self.helper.compare_output(layer), 4 * len(arrays[0]))))

    load_int16 = functools.partialmethod(load_f32, arithmetic="int16")
    load_int8 = functools.partialmethod(load_f32, arithmetic="int8")
    load_int16_attention = functools.partialmethod(load_f32, arithmetic="int16_attention")
    load_int8_attention = functools.partialmethod(load_f32, arithmetic="int8_attention")
    load_int4_int16 = functools.partialmethod(load_f32, arithmetic="int4_int16")
    load_int4_int8 = functools.partialmethod(load_f32, arithmetic="int4_int8")

    def run(self, layer, calls):
        if self.helper.compare_forward(layer, calls):
            raise RuntimeError("mha_forward failed")

    def peak(self):
        return self.helper.compare_peak(self.threads)

    def bandwidth(self, size):
        return self.helper.compare_bandwidth(self.threads, ctypes.c_int64(size))


def openblas_core():
    """Whose kernels the system's OpenBLAS computes with; nothing if it is not loaded."""
    try:
        name = ctypes.CDLL("libopenblas.so.0", os.RTLD_NOLOAD | os.RTLD_NOW).openblas_get_corename
    except OSError:
        return ""
    name.restype = ctypes.c_char_p
    return f"with OpenBLAS for {name().decode()}"


class PyTorch:
    name = "PyTorch"

    def __init__(self, threads, _):
        import torch
        self.torch, self.version, self.detail = torch, torch.__version__, openblas_core()
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

    def causal_mask(self, n):
        return self.torch.ones(n, n, dtype=self.torch.bool).triu(1)

    def load_class(self, shape, x, w_qkv, w_o):
        """The plain multi-head attention of textbooks: each step a tensor."""
        torch = self.torch
        batch, n, width, heads, is_causal = shape
        query, key, value, out = (self.linear(w) for w in (*split(w_qkv), w_o))
        mask = self.causal_mask(n)

        def by_heads(rows):
            return rows.view(batch, n, heads, width // heads).transpose(1, 2)

        def forward(x):
            q, k, v = by_heads(query(x)), by_heads(key(x)), by_heads(value(x))
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // heads)
            if is_causal:
                scores = scores.masked_fill(mask, float("-inf"))
            context = torch.softmax(scores, dim=-1) @ v
            return out(context.transpose(1, 2).contiguous().view(batch, n, width))

        return self.loaded(forward, x)

    def load_MultiheadAttention(self, shape, x, w_qkv, w_o):
        torch = self.torch
        _, n, width, heads, is_causal = shape
        # Biases, which are 0, only where there must be some: PyTorch 1.13 fails without, 2.15 is slower with them.
        is_old = not hasattr(torch.nn.functional, "scaled_dot_product_attention")
        attention = torch.nn.MultiheadAttention(width, heads, bias=is_old, batch_first=True).eval()
        attention.in_proj_weight.copy_(torch.from_numpy(w_qkv.T.copy()))
        attention.out_proj.weight.copy_(torch.from_numpy(w_o.T.copy()))
        mask = {"attn_mask": self.causal_mask(n)} if is_causal else {}
        if is_causal and "is_causal" in torch.nn.MultiheadAttention.forward.__annotations__:
            mask["is_causal"] = True
        return self.loaded(lambda x: attention(x, x, x, need_weights=False, **mask)[0], x)

    def load_scaled_dot_product_attention(self, shape, x, w_qkv, w_o):
        return self.loaded(self.layer(shape, self.linear(w_qkv), self.linear(w_o)), x)

    def layer(self, shape, project, out):
        torch = self.torch
        batch, n, width, heads, is_causal = shape
        if not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
            raise RuntimeError(f"PyTorch {self.version} has no scaled_dot_product_attention")

        def forward(x):
            q, k, v = (rows.view(batch, n, heads, width // heads).transpose(1, 2) for rows in project(x).chunk(3, dim=-1))
            context = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(is_causal))
            return out(context.transpose(1, 2).reshape(batch, n, width))

        return forward

    def load_bf16(self, shape, x, w_qkv, w_o):
        """Rows and all between are bfloat16, too. Without instructions for it this is several times as slow as float32."""
        if not processor_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
            raise RuntimeError("the processor has no instructions for bfloat16")
        bf16 = self.torch.bfloat16
        return self.loaded(self.layer(shape, self.linear(w_qkv).to(bf16), self.linear(w_o).to(bf16)), x, bf16)

    def load_int8(self, shape, x, w_qkv, w_o):
        """Its successor, quantize_ of torchao, is 20 times as slow on a processor, compiled or not."""
        def quantized(w):
            return torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(self.linear(w)), {torch.nn.Linear}, dtype=torch.qint8)

        torch = self.torch
        return self.loaded(self.layer(shape, quantized(w_qkv), quantized(w_o)), x)

    def load_preallocated_cache(self, shape, x, w_qkv, w_o, k, v):
        """scaled_dot_product_attention over tensors that have room for the new key and value."""
        torch = self.torch
        width, heads, kv_heads, past = (shape[name] for name in ("width", "heads", "kv_heads", "past"))
        head_dim = width // heads
        project, out = self.linear(w_qkv), self.linear(w_o)
        keys, values = (torch.empty(1, kv_heads, past + 1, head_dim) for _ in "kv")
        for cache, rows in ((keys, k), (values, v)):
            cache[0, :, :past] = torch.from_numpy(rows).transpose(0, 1)
        grouped = {"enable_gqa": True} if heads != kv_heads else {}

        def forward(x):
            q, new_key, new_value = project(x).split([width, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
            keys[0, :, past] = new_key.view(kv_heads, head_dim)
            values[0, :, past] = new_value.view(kv_heads, head_dim)
            context = torch.nn.functional.scaled_dot_product_attention(q.view(1, heads, 1, head_dim), keys, values, **grouped)
            return out(context.view(1, width))

        return self.loaded(forward, x.reshape(1, width))


class OnnxRuntime:
    name = "ONNX Runtime"

    def __init__(self, threads, _):
        import onnx
        import onnxruntime
        self.onnx, self.onnxruntime, self.version, self.detail = onnx, onnxruntime, onnxruntime.__version__, ""
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads
        self.options.inter_op_num_threads = 1
        self.options.log_severity_level = 3
        self.convert = lambda model: model.SerializeToString()

    def loaded(self, x, nodes, constants, caches=()):
        """The graph from x to y, with the named arrays as constants. Caches are its inputs past_... and, in the same memory, outputs present_..."""
        numpy, helper = sys.modules["numpy"], self.onnx.helper

        def info(name, shape):
            return helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, shape)

        inputs = [info("x", x.shape)] + [info(f"past_{name}", cache.shape) for name, cache in caches]
        outputs = [info("y", x.shape)] + [info(f"present_{name}", cache.shape) for name, cache in caches]
        graph = helper.make_graph(nodes, "layer", inputs, outputs,
                                  [self.onnx.numpy_helper.from_array(numpy.ascontiguousarray(a), name) for name, a in constants.items()])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
        model.ir_version = 8
        session = self.onnxruntime.InferenceSession(self.convert(model), self.options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        y = numpy.empty_like(x)
        pointers = [self.onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in (x, y)]
        binding.bind_ortvalue_input("x", pointers[0])
        binding.bind_ortvalue_output("y", pointers[1])
        for name, cache in caches:
            shared = self.onnxruntime.OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(f"past_{name}", shared)
            binding.bind_ortvalue_output(f"present_{name}", shared)
        return repeated(lambda: session.run_with_iobinding(binding)), pointers[1].numpy

    def load_Attention(self, shape, x, w_qkv, w_o):
        numpy, node = sys.modules["numpy"], self.onnx.helper.make_node
        _, _, _, heads, is_causal = shape
        nodes = [node("Attention", ["x", "w_qkv", "b_qkv"], ["context"], domain="com.microsoft", num_heads=heads, unidirectional=is_causal),
                 node("MatMul", ["context", "w_o"], ["y"])]
        return self.loaded(x, nodes, {"w_qkv": w_qkv, "b_qkv": numpy.zeros(w_qkv.shape[1], "f"), "w_o": w_o})

    def load_MultiHeadAttention(self, shape, x, w_qkv, w_o):
        node = self.onnx.helper.make_node
        _, _, _, heads, is_causal = shape
        nodes = [node("MatMul", ["x", f"w_{name}"], [name]) for name in "qkv"]
        nodes += [node("MultiHeadAttention", list("qkv"), ["context"], domain="com.microsoft", num_heads=heads, unidirectional=is_causal),
                  node("MatMul", ["context", "w_o"], ["y"])]
        return self.loaded(x, nodes, dict(zip(("w_q", "w_k", "w_v"), split(w_qkv)), w_o=w_o))

    def load_quantize_dynamic(self, *arguments):
        return self.quantized(self.load_MultiHeadAttention, *arguments)

    def load_QAttention(self, *arguments):
        return self.quantized(self.load_Attention, *arguments)

    def quantized(self, load, *arguments):
        from onnxruntime.quantization import quantize_dynamic

        def convert(model):
            with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
                quantize_dynamic(model, file.name)
                return file.read()

        self.convert = convert
        try:
            return load(*arguments)
        finally:
            self.convert = lambda model: model.SerializeToString()

    def load_GroupQueryAttention(self, shape, x, w_qkv, w_o, k, v):
        """Queries, keys and values packed in one input; past and present share their memory, so that the operator only adds a row."""
        numpy, node = sys.modules["numpy"], self.onnx.helper.make_node
        heads, kv_heads, past = (shape[name] for name in ("heads", "kv_heads", "past"))
        nodes = [node("MatMul", ["x", "w_qkv"], ["qkv"]),
                 node("GroupQueryAttention", ["qkv", "", "", "past_key", "past_value", "last_position", "total_length"],
                      ["context", "present_key", "present_value"], domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads),
                 node("MatMul", ["context", "w_o"], ["y"])]
        caches = [(name, numpy.zeros((1, kv_heads, past + 1, rows.shape[2]), "f")) for name, rows in (("key", k), ("value", v))]
        for (_, cache), rows in zip(caches, (k, v)):
            cache[0, :, :past] = rows.transpose(1, 0, 2)
        constants = {"w_qkv": w_qkv, "w_o": w_o, "last_position": numpy.array([past], "i"), "total_length": numpy.array(past + 1, "i")}
        return self.loaded(x.reshape(1, 1, -1), nodes, constants, caches)


class OpenVino:
    name = "OpenVINO"

    def __init__(self, threads, _):
        import openvino
        self.openvino, self.version, self.detail = openvino, openvino.__version__.split("-")[0], ""
        self.core = openvino.Core()
        # Without the precision hint it would compute in bfloat16 where the processor has that.
        self.settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}

    def load_scaled_dot_product_attention(self, shape, x, w_qkv, w_o):
        return self.loaded(self.model(shape, x, w_qkv, w_o), x)

    def load_bf16(self, shape, x, w_qkv, w_o):
        """Its default where the processor has it."""
        if "BF16" not in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise RuntimeError("OpenVINO computes in float32 here, since the processor has no instructions for bfloat16")
        return self.loaded(self.model(shape, x, w_qkv, w_o), x, {"INFERENCE_PRECISION_HINT": "bf16"})

    def load_int8(self, shape, x, w_qkv, w_o):
        """By NNCF's quantize for transformers, which smooths outliers; ranges are measured on the very rows that are computed."""
        import nncf
        data = nncf.Dataset([x])
        return self.loaded(nncf.quantize(self.model(shape, x, w_qkv, w_o), data, subset_size=1, model_type=nncf.ModelType.TRANSFORMER), x)

    def model(self, shape, x, w_qkv, w_o):
        from openvino import opset13 as ops
        batch, n, width, heads, is_causal = shape
        numpy = sys.modules["numpy"]
        rows = ops.parameter(x.shape, numpy.float32)

        def by_heads(rows):
            return ops.transpose(ops.reshape(rows, [batch, n, heads, width // heads], False), [0, 2, 1, 3])

        q, k, v = (by_heads(ops.matmul(rows, ops.constant(numpy.ascontiguousarray(w)), False, False)) for w in split(w_qkv))
        context = ops.transpose(ops.scaled_dot_product_attention(q, k, v, causal=bool(is_causal)), [0, 2, 1, 3])
        y = ops.matmul(ops.reshape(context, x.shape, False), ops.constant(w_o), False, False)
        return self.openvino.Model([y], [rows])

    def loaded(self, model, x, settings={}):
        compiled = self.core.compile_model(model, "CPU", {**self.settings, **settings})
        request = compiled.create_infer_request()
        request.set_input_tensor(self.openvino.Tensor(x))
        return repeated(request.infer), lambda: request.get_output_tensor().data


class Numpy:
    """Makes up the inputs of tools/compare.py --arithmetic, and computes what is exact beside integers."""

    name = "NumPy"

    def __init__(self, *_):
        import numpy
        self.numpy, self.version, self.detail = numpy, numpy.__version__, ""

    def make(self, shape, outliers, inputs, output):
        """Normally distributed numbers. Outliers: one channel of the rows in 256 is 20 times as large."""
        numpy = self.numpy
        random = numpy.random.default_rng(1)
        width = shape[2]
        arrays = [random.standard_normal(count, "f") for count in sizes(shape)]
        for weights in arrays[1:]:
            weights /= numpy.float32(width**0.5)
        if outliers:
            arrays[0].reshape(-1, width)[:, random.choice(width, max(1, width // 256), replace=False)] *= numpy.float32(20)
        with open(inputs, "wb") as file:
            file.writelines(arrays)
        reference(shape, *read(shape, inputs)).tofile(output)


def processor_flags():
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return {word for line in file if line.startswith(("flags", "Features")) for word in line.split()}
    return set()


def split(w_qkv):
    width = len(w_qkv)
    return [w_qkv[:, i * width:(i + 1) * width] for i in range(3)]


def read(shape, inputs):
    """x, w_qkv and w_o, of decoding also k and v, as arrays of NumPy."""
    import numpy
    values = numpy.fromfile(inputs, "f")
    x, w_qkv, w_o, *cached = numpy.split(values, numpy.cumsum(sizes(shape)[:-1]))
    if is_decode(shape):
        width = shape["width"]
        cached = [rows.reshape(shape["past"], shape["kv_heads"], width // shape["heads"]) for rows in cached]
    else:
        batch, n, width, _, _ = shape
        x = x.reshape(batch, n, width)
    return x, w_qkv.reshape(width, -1), w_o.reshape(width, width), *cached


def difference(actual, expected):
    """The largest difference, as a share of the largest element. NaN where there is one."""
    import numpy
    return float(numpy.max(numpy.abs(actual.reshape(-1) - expected)) / numpy.max(numpy.abs(expected)))


def rms_error(actual, expected):
    """The root of the mean square of the differences, in units of that of what is expected: two arrays of the module array."""
    return math.dist(actual, expected) / math.dist(expected, bytes(len(expected)))


def reference(shape, x, w_qkv, w_o, *cached):
    """The layer in double precision."""
    import numpy
    if is_decode(shape):
        _, kv_heads, head_dim = cached[0].shape
        q, k, v = numpy.split(x.astype("d") @ w_qkv, numpy.cumsum([len(x), kv_heads * head_dim]))
        keys, values = (numpy.concatenate([rows, row.reshape(1, kv_heads, head_dim)]) for rows, row in zip(cached, (k, v)))
        scores = numpy.einsum("kgd,nkd->kgn", q.reshape(kv_heads, -1, head_dim), keys) / math.sqrt(head_dim)
        weights = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
        return numpy.einsum("kgn,nkd->kgd", weights / weights.sum(axis=-1, keepdims=True), values).reshape(-1) @ w_o
    batch, n, width, heads, is_causal = shape
    q, k, v = ((x.astype("d") @ w).reshape(batch, n, heads, -1).transpose(0, 2, 1, 3) for w in split(w_qkv.astype("d")))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    if is_causal:
        scores += numpy.triu(numpy.full((n, n), -numpy.inf), 1)
    weights = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    context = weights / weights.sum(axis=-1, keepdims=True) @ v
    return context.transpose(0, 2, 1, 3).reshape(batch, n, width) @ w_o


class Worker:
    def __init__(self, library, threads):
        self.library, self.layers = library, {}
        # One thread: processor time, which leaves out what others did on this core meanwhile.
        self.clock = time.process_time if threads == 1 else time.perf_counter

    def about(self):
        return {"name": self.library.name, "version": self.library.version, "detail": self.library.detail}

    def peak(self):
        return {"gflops": self.library.peak()}

    def bandwidth(self, size):
        return {"gbytes": self.library.bandwidth(size)}

    def make(self, shape, inputs, output, **options):
        return {"operations": self.library.make(shape, inputs=inputs, output=output, **options)}

    def load(self, form, shape, inputs, expected, copies=1):
        """Makes the layer, runs it once, and compares. Several copies take turns, each with weights and a cache of its own."""
        arrays = [None] * len(sizes(shape)) if isinstance(self.library, Mha) else read(shape, inputs)
        made = [getattr(self.library, f"load_{form}")(shape, *arrays) for _ in range(copies)]
        for run, _ in made:
            run(1)
        run, output = made[-1]
        self.layers[form, key_of(shape)] = in_turns([run for run, _ in made]) if copies > 1 else run, output, arrays
        if not output:
            return {"difference": 0.0}
        import numpy
        return {"difference": difference(output(), numpy.fromfile(expected, "f"))}

    def error(self, form, shape, inputs, expected, keep):
        """Makes the layer of tools/compare.py --arithmetic, runs it once, and keeps it to be timed."""
        arrays = self.library.read(shape, inputs) if isinstance(self.library, Mha) else read(shape, inputs)
        run, output = getattr(self.library, f"load_{form}")(shape, *arrays)
        run(1)
        exact = array.array("d")
        with open(expected, "rb") as file:
            exact.frombytes(file.read())
        error = rms_error(output() if isinstance(self.library, Mha) else array.array("f", output().tobytes()), exact)
        if keep:
            self.layers[form, key_of(shape)] = run, output, arrays
        return {"rms": error}

    def reference(self, shape, inputs, expected):
        import numpy
        return {"difference": difference(numpy.fromfile(expected, "f"), reference(shape, *read(shape, inputs)).reshape(-1))}

    def time(self, form, shape, seconds):
        """The median time of a call."""
        run = self.layers[form, key_of(shape)][0]
        end = time.perf_counter() + seconds
        begin = self.clock()
        run(1)
        calls = max(1, round(sample_seconds / max(self.clock() - begin, 1e-7)))
        samples = []
        while not samples or time.perf_counter() < end:
            begin = self.clock()
            run(calls)
            samples.append((self.clock() - begin) / calls)
        return {"seconds": statistics.median(samples)}


def end_with_parent():
    """Also when it is killed: this process may be stopped then, and would stay for ever."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main():
    name, threads, cores, *helper = sys.argv[1:]
    end_with_parent()
    os.sched_setaffinity(0, map(int, cores.split(",")))
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = threads
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is not an answer
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if not worker:
                library = {"mha": Mha, "pytorch": PyTorch, "onnxruntime": OnnxRuntime, "openvino": OpenVino, "numpy": Numpy}[name]
                worker = Worker(library(int(threads), *(helper or [None])), int(threads))
            answer = getattr(worker, request.pop("request"))(**request)
        except Exception as error:  # whatever a library throws is an answer too
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=answers)


main()
