"""mha from Python: multi-head attention for CPUs, through the shared library. Needs NumPy and libmha.so, and nothing else.

    import numpy as np, mha

    layer = mha.Layer(query_dim=768, num_heads=12, w_qkv=w_qkv, w_o=w_o)       # [768, 2304] and [768, 768], float32
    y = layer.forward(x, is_causal=True)                                       # [batch, n, 768] or [n, 768], float32
    y, steps = layer.forward(x, is_causal=True, want=["attention_weights"])    # and a look inside

    cache = mha.KvCache(num_sequences=1, capacity=4096, num_kv_heads=12, head_dim=64, k_type="f16", v_type="f16")
    rope = mha.Rope.tables(64, num_positions=4096)
    y = layer.forward(prompt, is_causal=True, rope=rope, cache=cache)          # then token by token

Names and meanings are those of mha.h, which is the reference. What is here adds shapes: arrays are checked for type, shape and layout, never
converted or copied without being asked, and a wrong one is a TypeError or ValueError. What the library finds to be wrong is an mha.Error
with the library's sentence.

The library is looked for in load(path), else in the environment variable MHA_LIBRARY, else as build/src/libmha.so of the sources that this
file belongs to, else among the system's libraries.

Calls run on the calling thread, without Python's lock, so that several threads can use one layer at once; or on those of a Scheduler.
"""

import ctypes
import ctypes.util
import os
import pathlib
import threading
import weakref

import numpy as np

# ---- The structs of mha.h, field by field (tests/python_test.py compares them, and the functions below, with the header)

_c = {"size": ctypes.c_size_t, "i64": ctypes.c_int64, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "f32": ctypes.c_float,
      "f64": ctypes.c_double, "ptr": ctypes.c_void_p, "text": ctypes.c_char * 248}


def _struct(name, *fields):
    """A struct, of lines such as "i64 batch n_q": a type and the names of the fields that have it."""
    pairs = [(field, _c[kind]) for line in fields for kind, *names in [line.split()] for field in names]
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


_Error = _struct("mha_error", "u32 status argument", "text message")
_Scheduler = _struct("mha_scheduler", "ptr context", "u32 num_threads reserved", "ptr parallel_for")
_Config = _struct("mha_layer_config", "size struct_size", "i64 query_dim key_dim value_dim output_dim num_heads num_kv_heads head_dim",
                  "i64 head_dim_v d_out", "f32 scale", "u32 weight_type")
_Weights = _struct("mha_layer_weights", "size struct_size", "u32 layout type", "ptr w_q w_k w_v w_qkv w_q_heads w_k_heads w_v_heads w_o",
                   "ptr b_q b_k b_v b_qkv b_o", "i64 w_q_stride w_k_stride w_v_stride w_qkv_stride w_o_stride",
                   "ptr w_q_scales w_k_scales w_v_scales w_qkv_scales w_o_scales")
_Options = _struct("mha_layer_options", "size struct_size", "u32 instruction_set reserved", "ptr sgemm allocator")
_CacheConfig = _struct("mha_kv_cache_config", "size struct_size", "i64 num_sequences capacity num_kv_heads head_dim head_dim_v",
                       "u32 k_type v_type kind reserved", "i64 block_positions num_blocks")
_Rope = _struct("mha_rope", "size struct_size", "u32 style reserved", "i64 dims num_positions", "ptr cos sin", "i64 table_stride",
                "ptr q_positions k_positions")
_RopeConfig = _struct("mha_rope_config", "size struct_size", "i64 dims first_position num_positions", "f64 base linear_factor yarn_factor",
                      "i64 yarn_original_positions", "f64 yarn_beta_fast yarn_beta_slow yarn_attention_factor")
_Taps = _struct("mha_taps", "size struct_size", "ptr q k v scores scaled_scores masked_scores context")
_ForwardArgs = _struct("mha_forward_args", "size struct_size", "i64 batch n_q n_kv", "ptr query key value output",
                       "i64 query_batch_stride query_row_stride key_batch_stride key_row_stride value_batch_stride value_row_stride",
                       "i64 output_batch_stride output_row_stride", "u32 is_causal flags",
                       "ptr q_start scheduler attention_weights lse taps q_lengths kv_lengths", "i64 window_left window_right",
                       "ptr rope cache cache_sequences")
_AttentionArgs = _struct("mha_attention_args", "size struct_size", "i64 batch n_q n_kv num_heads num_kv_heads head_dim head_dim_v",
                         "ptr q k v output", "u32 q_type k_type v_type output_type", "i64 q_batch_stride q_row_stride q_head_stride",
                         "i64 k_batch_stride k_row_stride k_head_stride v_batch_stride v_row_stride v_head_stride",
                         "i64 output_batch_stride output_row_stride output_head_stride", "f32 scale", "u32 is_causal",
                         "ptr q_start scheduler attention_weights lse taps", "u32 instruction_set flags", "ptr q_lengths kv_lengths",
                         "i64 window_left window_right", "ptr rope cache cache_sequences")
_CallInfo = _struct("mha_call_info", "size struct_size", "u32 instruction_set back_end contract num_threads",
                    "i64 project_tile_rows project_tile_columns attend_tile_rows attend_block_rows attend_chunk_keys",
                    "size workspace_bytes packed_bytes", "u64 operations bytes")
structs = [_Error, _Scheduler, _Config, _Weights, _Options, _CacheConfig, _Rope, _RopeConfig, _Taps, _ForwardArgs, _AttentionArgs, _CallInfo]

types = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3, "int4": 4}
layouts = {"in_out": 0, "out_in": 1}
instruction_set_names = {"auto": 0, "scalar": 1, "avx2": 2, "avx512": 3, "neon": 4}
cache_kinds = {"contiguous": 0, "ring": 1, "paged": 2}
rope_styles = {"half": 0, "interleaved": 1}
_window_left, _window_right, _padding_left, _cache_read = 1, 2, 4, 8
_taps = [field for field, _ in _Taps._fields_[1:]]

# ---- The library

_signatures = {  # of the functions that return a status, without the mha_error: p is a pointer, s a size_t, i an int64_t
    "mha_layer_pack_size": "pppp", "mha_layer_pack": "pppps", "mha_layer_view": "psppsp", "mha_layer_verify": "ps",
    "mha_layer_create": "pppp", "mha_layer_shape": "pp", "mha_kv_cache_size": "pp", "mha_kv_cache_init": "ppsp",
    "mha_kv_cache_view": "psp", "mha_kv_cache_shape": "pp", "mha_kv_cache_length": "pip", "mha_kv_cache_truncate": "pii",
    "mha_kv_cache_set_blocks": "pipi", "mha_kv_cache_copy_prefix": "piii", "mha_kv_cache_append": "piipp", "mha_kv_cache_read": "piiipp",
    "mha_rope_tables": "ppp", "mha_info": "ppp", "mha_forward_workspace": "ppp", "mha_forward": "ppps", "mha_attention_workspace": "pp",
    "mha_attention": "pps"}
_kinds = {"p": ctypes.c_void_p, "s": ctypes.c_size_t, "i": ctypes.c_int64}
_version = 100  # of the header whose structs stand above: 10000 * major + 100 * minor + patch
_library = None
_lock = threading.Lock()


class Error(Exception):
    """What the library finds to be wrong. str() is its sentence; name is such as "MHA_ERROR_SHAPE"; argument counts from 1."""

    def __init__(self, message, status, name, argument):
        super().__init__(message)
        self.status, self.name, self.argument = status, name, argument


def load(path=None):
    """Loads libmha.so: the given one, or the one that is found (see above). Not needed where that one is right."""
    global _library
    path = os.fspath(path) if path is not None else _find()
    try:
        library = ctypes.CDLL(path)
        functions = {name: getattr(library, name) for name in [*_signatures, "mha_version", "mha_contract", "mha_instruction_sets",
                                                               "mha_status_string", "mha_layer_view_size", "mha_layer_destroy"]}
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} cannot be used: {error}. It has to be a libmha.so of version {_version // 10000}.{_version // 100 % 100} "
                          "or newer, which `cmake --build build --target mha_shared` makes.") from None
    for name, signature in _signatures.items():
        functions[name].argtypes = [_kinds[kind] for kind in signature] + [ctypes.POINTER(_Error)]
        functions[name].restype = ctypes.c_uint32
    for name in "mha_version", "mha_contract", "mha_instruction_sets":
        functions[name].restype = ctypes.c_uint32
    library.mha_status_string.argtypes, library.mha_status_string.restype = [ctypes.c_uint32], ctypes.c_char_p
    library.mha_layer_view_size.restype = ctypes.c_size_t
    library.mha_layer_destroy.argtypes, library.mha_layer_destroy.restype = [ctypes.c_void_p], None
    version = library.mha_version()
    if version // 10000 != _version // 10000 or version < _version:
        raise ImportError(f"{path} is of version {version}; this mha.py needs {_version} or newer with the same major number.")
    _library = library


def _find():
    named = os.environ.get("MHA_LIBRARY")
    if named:
        return named
    built = pathlib.Path(__file__).resolve().parents[2] / "build" / "src" / "libmha.so"
    if built.exists():
        return str(built)
    installed = ctypes.util.find_library("mha")
    if installed:
        return installed
    raise ImportError(f"libmha.so was not found: MHA_LIBRARY is not set, there is no {built}, and the system has none. Build it by "
                      "`cmake -S . -B build && cmake --build build --target mha_shared`, or name it in MHA_LIBRARY or mha.load(path).")


def _loaded():
    with _lock:
        if _library is None:
            load()
    return _library


def _call(name, *arguments):
    library, error = _loaded(), _Error()
    addresses = [ctypes.addressof(a) if isinstance(a, (ctypes.Structure, ctypes._SimpleCData)) else a for a in arguments]
    status = getattr(library, name)(*addresses, ctypes.byref(error))
    if status:
        raise Error(error.message.decode(), status, library.mha_status_string(status).decode(), error.argument)


def version():
    """10000 * major + 100 * minor + patch of the library."""
    return _loaded().mha_version()


def contract():
    """MHA_CONTRACT of the library: versions with the same number give the same bits."""
    return _loaded().mha_contract()


def instruction_sets():
    """The names of the instruction sets that the library has kernels for and this machine can run."""
    bits = _loaded().mha_instruction_sets()
    return [name for name, number in instruction_set_names.items() if number and bits >> number & 1]


# ---- Arrays


def _named(table, name, what):
    if name not in table:
        raise ValueError(f"{what} is {name!r}; it must be one of {', '.join(map(repr, table))}")
    return table[name]


def _describe(array):
    return f"{array.dtype} {list(array.shape)}"


def _check(array, name, dtypes, shape):
    """Raises unless array is of one of the types and of the shape, whose None stands for any extent."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {type(array).__name__}; it must be a NumPy array")
    if array.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} is {_describe(array)}; its type must be {wanted}")
    if array.ndim != len(shape) or any(extent is not None and extent != has for extent, has in zip(shape, array.shape)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} is {_describe(array)}; its shape must be [{wanted}]")


def _contiguous(array, name, dtypes, shape):
    """The address of an array without strides; None stays None."""
    if array is None:
        return None
    _check(array, name, dtypes, shape)
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous; np.ascontiguousarray({name}) makes it so")
    return array.ctypes.data


def _strides(array, name):
    """The strides of all axes but the last, in elements. That of an axis of one element, which may be anything, steps over the others."""
    if 0 in array.shape:
        return [0] * (array.ndim - 1)
    item, outer = array.itemsize, list(zip(array.shape[:-1], array.strides[:-1]))
    beyond = max([extent * stride for extent, stride in outer if extent > 1] + [array.shape[-1] * item])
    strides = [stride if extent > 1 else beyond for extent, stride in outer]
    if array.shape[-1] > 1 and array.strides[-1] != item or any(stride <= 0 or stride % item for stride in strides):
        raise ValueError(f"{name} has strides of {array.strides} bytes, which the library cannot step by; "
                         f"np.ascontiguousarray({name}) makes it contiguous")
    return [stride // item for stride in strides]


def _integers(values, name, shape, dtype=np.int64):
    """Numbers as an array that the library reads; None stays None."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {_describe(array)}; it must be integers")
    if array.shape != shape:
        raise ValueError(f"{name} is {_describe(array)}; its shape must be {list(shape)}")
    return np.ascontiguousarray(array, dtype)


def _address(array):
    return None if array is None else array.ctypes.data


def aligned(bytes):
    """An array of so many bytes on a border of 64, as packed layers and caches need it."""
    room = np.empty(bytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    return room[first:first + bytes]


def _buffer(array, name):
    """The address and size of a buffer: an array of bytes, which may be a numpy.memmap."""
    return _contiguous(array, name, [np.uint8], (None,)), array.size


class _Workspace(threading.local):
    """What calls compute in, for each thread; it grows as needed."""

    room = np.empty(0, np.uint8)

    def of(self, bytes):
        if self.room.size < bytes:
            self.room = np.empty(bytes, np.uint8)
        return self.room.ctypes.data


_workspace = _Workspace()

# ---- The layer


class Layer:
    """A layer: its shape and its packed weights. Immutable; any number of threads may use it at once.

    query_dim, num_heads and shape (key_dim, value_dim, output_dim, num_kv_heads, head_dim, head_dim_v, d_out, scale) are the fields of
    mha_layer_config; those left out have its defaults.

    W_Q, W_K and W_V come as w_q, w_k, w_v, as one fused w_qkv, or as three lists of one matrix per head. w_o=None is a layer without W_O.
    layout is "in_out" (x W, [in, out]) or "out_in" (x W^T, [out, in], such as nn.Linear's). Biases are float32 vectors.

    Matrices are float32, float16, bfloat16 (type="bf16", bits in uint16), int8 with scales, or int4 with scales (type="int4": uint8,
    two numbers in each, layout="out_in" only); scales={"w_q": ..., "w_o": ...}. weight_type says how the layer keeps them.

    The arrays are read once, and may be freed then. The attribute `shape` has the fields of mha_layer_config by name, all defaults resolved.
    """

    def __init__(self, query_dim, num_heads, *, instruction_set="auto", **weights_and_shape):
        options = _options(instruction_set)
        config, weights, _arrays = _describe_layer(query_dim, num_heads, **weights_and_shape)
        handle = ctypes.c_void_p()
        _call("mha_layer_create", config, weights, options, handle)
        self._adopt(handle, None)
        weakref.finalize(self, _library.mha_layer_destroy, handle.value)

    @classmethod
    def view(cls, packed, *, instruction_set="auto"):
        """A layer over packed weights, which are not copied: an array from pack(), or numpy.memmap of a file (dtype=uint8, mode="r")."""
        self = cls.__new__(cls)
        address, size = _buffer(packed, "packed")
        storage = np.empty(_loaded().mha_layer_view_size(), np.uint8)
        handle = ctypes.c_void_p()
        _call("mha_layer_view", address, size, _options(instruction_set), storage.ctypes.data, storage.size, handle)
        self._adopt(handle, (packed, storage))
        return self

    def _adopt(self, handle, memory):
        self._handle, self._memory = handle.value, memory
        config = _Config(struct_size=ctypes.sizeof(_Config))
        _call("mha_layer_shape", self._handle, config)
        self.shape = {field: getattr(config, field) for field, _ in _Config._fields_[1:]}

    def forward(self, query, key=None, value=None, *, out=None, is_causal=False, q_start=None, q_lengths=None, kv_lengths=None,
                window_left=None, window_right=None, padding="right", rope=None, cache=None, cache_sequences=None, cache_read=False,
                scheduler=None, want=()):
        """y [batch, n, output_dim], from query [batch, n, query_dim]; without the batch, both are a single sequence.

        key=None is self-attention, value=None is key. All else has the names and meanings of mha_forward_args; padding is "right" or
        "left". want names what is returned beside y, as (y, dictionary): "attention_weights", "lse", and the steps in between "q", "k", "v",
        "scores", "scaled_scores", "masked_scores", "context". Rows may have gaps between them; the elements of a row may not.
        """
        is_single = isinstance(query, np.ndarray) and query.ndim == 2
        if is_single:
            query, key, value, out = (a[None] if isinstance(a, np.ndarray) else a for a in (query, key, value, out))
        shape = self.shape
        _check(query, "query", [np.float32], (None, None, shape["query_dim"]))
        batch, n_q, _ = query.shape
        other = key if key is not None else value
        if key is not None:
            _check(key, "key", [np.float32], (batch, None, shape["key_dim"]))
        if value is not None:
            _check(value, "value", [np.float32], (batch, None if key is None else key.shape[1], shape["value_dim"]))
        n_kv = 0 if other is None else other.shape[1]
        out = _output(out, (batch, n_q, shape["output_dim"]))
        args = _new(_ForwardArgs, batch=batch, n_q=n_q, n_kv=n_kv)
        for name, array in ("query", query), ("key", key), ("value", value), ("output", out):
            if array is not None:
                setattr(args, name, array.ctypes.data)
                batch_stride, row_stride = _strides(array, name)
                setattr(args, name + "_batch_stride", batch_stride), setattr(args, name + "_row_stride", row_stride)
        appended = 0 if cache_read else n_kv if other is not None else n_q
        alive = _set_sequences(args, batch, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, cache, cache_sequences,
                               scheduler, is_causal, n_q, appended)
        args.flags |= _cache_read if cache_read else 0
        wanted, taps = _wanted(args, want, batch, n_q, appended, shape["num_heads"], shape["num_kv_heads"], shape["head_dim"],
                               shape["head_dim_v"], cache, cache_sequences, q_lengths if other is None else kv_lengths)
        _run("mha_forward", scheduler, self._handle, args)
        del alive, taps
        if is_single:
            out, wanted = out[0], {name: array[0] for name, array in wanted.items()}
        return (out, wanted) if want else out

    def info(self, n_q, *, batch=1, is_causal=False, window_left=None, window_right=None, cache=None, cache_sequences=None, scheduler=None):
        """How forward would run on so many rows, and what it costs: the fields of mha_call_info by name."""
        args, info = _new(_ForwardArgs, batch=batch, n_q=n_q), _new(_CallInfo)
        alive = _set_sequences(args, batch, None, None, None, window_left, window_right, "right", None, cache, cache_sequences, scheduler,
                               is_causal, n_q, n_q)
        _call("mha_info", self._handle, args, info)
        del alive
        return {field: getattr(info, field) for field, _ in _CallInfo._fields_[1:]}


def pack(query_dim, num_heads, *, instruction_set="auto", **weights_and_shape):
    """The packed weights of a layer as an array of bytes, for Layer.view; `pack(...).tofile(path)` writes them to a file. Takes what Layer takes."""
    config, weights, _arrays = _describe_layer(query_dim, num_heads, **weights_and_shape)
    options, bytes = _options(instruction_set), ctypes.c_size_t()
    _call("mha_layer_pack_size", config, weights, options, bytes)
    packed = aligned(bytes.value)
    _call("mha_layer_pack", config, weights, options, packed.ctypes.data, packed.size)
    return packed


def verify(packed):
    """Raises mha.Error unless the packed weights are what was packed, to the last bit. Reads them all."""
    _call("mha_layer_verify", *_buffer(packed, "packed"))


def _new(struct, **fields):
    return struct(struct_size=ctypes.sizeof(struct), **fields)


def _options(instruction_set):
    return _new(_Options, instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"))


def _describe_layer(query_dim, num_heads, *, w_q=None, w_k=None, w_v=None, w_qkv=None, w_o=None, b_q=None, b_k=None, b_v=None, b_qkv=None,
                    b_o=None, layout="in_out", type=None, scales=None, weight_type="f32", **shape):
    """The structs that describe a layer, and what they point to."""
    config = _new(_Config, query_dim=query_dim, num_heads=num_heads, weight_type=_named(types, weight_type, "weight_type"))
    for name, number in shape.items():
        if name not in [field for field, _ in _Config._fields_[1:]]:
            raise TypeError(f"a layer has no {name}")
        setattr(config, name, number)
    matrices = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_qkv": w_qkv, "w_o": w_o}
    type = type or _type_of(matrices)
    weights = _new(_Weights, layout=_named(layouts, layout, "layout"), type=_named(types, type, "type"))
    dims = _resolved(config)
    alive = [array for array in (*matrices.values(), b_q, b_k, b_v, b_qkv, b_o) if array is not None]
    for name, matrix in matrices.items():
        if matrix is None:
            continue
        depth, width = dims[name]
        if isinstance(matrix, (list, tuple)):
            alive.append(_set_heads(weights, name, matrix, depth, dims, layout))
            continue
        extents = (width, -(-depth // 2) if type == "int4" else depth) if layout == "out_in" else (depth, width)
        _check(matrix, name, [_dtypes[type]], extents)
        [stride] = _strides(matrix, name)
        setattr(weights, name, matrix.ctypes.data), setattr(weights, name + "_stride", stride * (2 if type == "int4" else 1))
    for name, bias in ("b_q", b_q), ("b_k", b_k), ("b_v", b_v), ("b_qkv", b_qkv), ("b_o", b_o):
        setattr(weights, name, _contiguous(bias, name, [np.float32], (dims["w" + name[1:]][1],)))
    for name, array in (scales or {}).items():
        if name not in matrices:
            raise ValueError(f"there are no scales of {name!r}; the matrices are {', '.join(matrices)}")
        depth, width = dims[name]
        extents = (width, -(-depth // 32)) if type == "int4" else (width,)
        setattr(weights, name + "_scales", _contiguous(array, f"scales[{name!r}]", [np.float32], extents))
        alive.append(array)
    return config, weights, alive


_dtypes = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8": np.int8, "int4": np.uint8}


def _type_of(matrices):
    """The type that the matrices have by their NumPy type."""
    for name, matrix in matrices.items():
        if isinstance(matrix, np.ndarray):
            for type in "f32", "f16", "int8":
                if matrix.dtype == _dtypes[type]:
                    return type
            raise TypeError(f"{name} is {_describe(matrix)}; without type=, its type must be float32, float16 or int8")
    return "f32"


def _resolved(config):
    """Matrix -> (inputs, outputs) of a layer, where the shape is one; what is wrong with it, the library says."""
    key_dim = config.key_dim or config.query_dim
    value_dim = config.value_dim or key_dim
    kv_heads = config.num_kv_heads or config.num_heads
    all_heads = config.d_out or config.query_dim
    if config.num_heads < 1 or not config.head_dim and all_heads % config.num_heads:
        raise ValueError(f"num_heads is {config.num_heads}; it must be at least 1 and, without a head_dim, divide {all_heads}")
    head_dim = config.head_dim or all_heads // config.num_heads
    head_dim_v = config.head_dim_v or head_dim
    q, k, v = config.num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim_v
    return {"w_q": (config.query_dim, q), "w_k": (key_dim, k), "w_v": (value_dim, v), "w_qkv": (config.query_dim, q + k + v),
            "w_o": (config.num_heads * head_dim_v, config.output_dim or config.query_dim),
            "heads": {"w_q": (config.num_heads, head_dim), "w_k": (kv_heads, head_dim), "w_v": (kv_heads, head_dim_v)}}


def _set_heads(weights, name, matrices, depth, dims, layout):
    """Sets the array of pointers of a list of one matrix per head, and returns it."""
    if name not in dims["heads"]:
        raise TypeError(f"{name} must be one matrix, not a list of them")
    count, width = dims["heads"][name]
    if len(matrices) != count:
        raise ValueError(f"{name} is a list of {len(matrices)} matrices; there must be one for each of {count} heads")
    extents = (width, depth) if layout == "out_in" else (depth, width)
    pointers = (ctypes.c_void_p * count)(*[_contiguous(matrix, f"{name}[{head}]", [np.float32], extents)
                                           for head, matrix in enumerate(matrices)])
    setattr(weights, name + "_heads", ctypes.addressof(pointers))
    return pointers


# ---- Threads

_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
_ParallelFor = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, _Task, ctypes.c_void_p)


class Scheduler:
    """Threads for calls: parallel_for(count, task) must call task(index) once for each index below count, and return when all have returned.

        pool = concurrent.futures.ThreadPoolExecutor(4)
        scheduler = mha.Scheduler(4, lambda count, task: list(pool.map(task, range(count))))
    """

    def __init__(self, num_threads, parallel_for):
        def run(_, count, task, context):
            started = [False] * count

            def start(index):
                started[index] = True
                task(context, index)

            try:
                parallel_for(count, start)
            except BaseException as exception:  # which C cannot pass on; forward and attention raise it
                self.failure = exception
            for index in range(count):
                if not started[index]:
                    start(index)

        self.failure, self._callback = None, _ParallelFor(run)
        self._struct = _Scheduler(num_threads=num_threads, parallel_for=ctypes.cast(self._callback, ctypes.c_void_p))


# ---- What forward and attention have in common


def _run(name, scheduler, *arguments):
    """The call, in a workspace of the size that it asks for."""
    bytes = ctypes.c_size_t()
    _call(name + "_workspace", *arguments, bytes)
    _call(name, *arguments, _workspace.of(bytes.value), bytes.value)
    if scheduler is not None and scheduler.failure is not None:
        failure, scheduler.failure = scheduler.failure, None
        raise failure


def _output(out, shape):
    if out is None:
        return np.empty(shape, np.float32)
    _check(out, "out", [np.float32], shape)
    if not out.flags.writeable:
        raise ValueError("out cannot be written to")
    return out


def _set_sequences(args, batch, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, cache, cache_sequences, scheduler,
                   is_causal, n_q, n_k):
    """Sets the fields about rows and positions, and returns what they point to."""
    arrays = [_integers(values, name, (batch,)) for values, name in ((q_start, "q_start"), (q_lengths, "q_lengths"), (kv_lengths, "kv_lengths"),
                                                                     (cache_sequences, "cache_sequences"))]
    args.q_start, args.q_lengths, args.kv_lengths, args.cache_sequences = map(_address, arrays)
    args.is_causal = 1 if is_causal else 0
    args.flags = _named({"right": 0, "left": _padding_left}, padding, "padding")
    if window_left is not None:
        args.flags, args.window_left = args.flags | _window_left, window_left
    if window_right is not None:
        args.flags, args.window_right = args.flags | _window_right, window_right
    if rope is not None:
        struct, positions = rope._struct(batch, n_q, n_k)
        args.rope = ctypes.addressof(struct)
        arrays += [struct, positions]
    args.cache = cache._handle if cache is not None else None
    args.scheduler = ctypes.addressof(scheduler._struct) if scheduler is not None else None
    return arrays


def _wanted(args, want, batch, n_q, n_kv, num_heads, num_kv_heads, head_dim, head_dim_v, cache, cache_sequences, kv_lengths):
    """Arrays for the optional outputs, by name, and the struct that points to some of them."""
    seen = n_kv
    if cache is not None and want:
        rows = [n_kv] * batch if kv_lengths is None else kv_lengths
        sequences = range(batch) if cache_sequences is None else cache_sequences
        seen = max([cache.length(int(sequence)) + int(count) for sequence, count in zip(sequences, rows)], default=0)
    pairs = (batch, num_heads, n_q, seen)
    shapes = {"attention_weights": pairs, "lse": (batch, num_heads, n_q), "q": (batch, n_q, num_heads, head_dim),
              "k": (batch, n_kv, num_kv_heads, head_dim), "v": (batch, n_kv, num_kv_heads, head_dim_v), "scores": pairs,
              "scaled_scores": pairs, "masked_scores": pairs, "context": (batch, n_q, num_heads, head_dim_v)}
    wanted = {name: np.empty(_named(shapes, name, "want"), np.float32) for name in want}
    taps = _new(_Taps)
    for name, array in wanted.items():
        setattr(taps if name in _taps else args, name, array.ctypes.data)
        if name in _taps:
            args.taps = ctypes.addressof(taps)
    return wanted, taps


def attention(q, k, v, *, out=None, scale=0.0, is_causal=False, q_start=None, q_lengths=None, kv_lengths=None, window_left=None,
              window_right=None, padding="right", rope=None, cache=None, cache_sequences=None, scheduler=None, instruction_set="auto",
              bf16=False, want=()):
    """The middle stage alone: softmax(scale * q k^T) v, [batch, n_q, heads, head_dim_v].

    q is [batch, n_q, heads, head_dim]; k and v are [batch, n_kv, kv_heads, width]. Other orders of the axes are views: q.transpose(0, 2, 1, 3)
    of [batch, heads, n_q, head_dim]. k and v may be float16, or with bf16=True bfloat16 (bits in uint16). All else is as in Layer.forward.
    """
    _check(q, "q", [np.float32], (None, None, None, None))
    batch, n_q, heads, head_dim = q.shape
    stored = [np.float32, np.float16] + [np.uint16] * bf16
    _check(k, "k", stored, (batch, None, None, head_dim))
    _, n_kv, kv_heads, _ = k.shape
    _check(v, "v", stored, (batch, n_kv, kv_heads, None))
    head_dim_v = v.shape[3]
    out = _output(out, (batch, n_q, heads, head_dim_v))
    args = _new(_AttentionArgs, batch=batch, n_q=n_q, n_kv=n_kv, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
                scale=scale, instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"))
    numbers = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}
    args.k_type, args.v_type = numbers[k.dtype], numbers[v.dtype]
    for name, array in ("q", q), ("k", k), ("v", v), ("output", out):
        setattr(args, name, array.ctypes.data)
        for axis, stride in zip(("batch", "row", "head"), _strides(array, name)):
            setattr(args, f"{name}_{axis}_stride", stride)
    alive = _set_sequences(args, batch, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, cache, cache_sequences,
                           scheduler, is_causal, n_q, n_kv)
    wanted, taps = _wanted(args, want, batch, n_q, n_kv, heads, kv_heads, head_dim, head_dim_v, cache, cache_sequences, kv_lengths)
    _run("mha_attention", scheduler, args)
    del alive, taps
    return (out, wanted) if want else out


# ---- The KV cache


class KvCache:
    """Keys and values of earlier calls. `buffer` is all of it: an array of bytes to be copied, written to a file, and viewed again.

    The parameters are the fields of mha_kv_cache_config: num_sequences, capacity, num_kv_heads, head_dim, head_dim_v, k_type and v_type ("f32",
    "f16", "bf16", "int8"), kind ("contiguous", "ring", "paged"), block_positions and num_blocks. What changes a cache must not run at the same
    time as anything else with it.
    """

    def __init__(self, *, k_type="f32", v_type="f32", kind="contiguous", buffer=None, **config):
        unknown = set(config) - {field for field, _ in _CacheConfig._fields_[1:]}
        if unknown:
            raise TypeError(f"a cache has no {', '.join(sorted(unknown))}")
        struct = _new(_CacheConfig, k_type=_named(types, k_type, "k_type"), v_type=_named(types, v_type, "v_type"),
                      kind=_named(cache_kinds, kind, "kind"), **config)
        bytes, handle = ctypes.c_size_t(), ctypes.c_void_p()
        _call("mha_kv_cache_size", struct, bytes)
        self.buffer = aligned(bytes.value) if buffer is None else buffer
        _call("mha_kv_cache_init", struct, *_buffer(self.buffer, "buffer"), handle)
        self._adopt(handle)

    @classmethod
    def view(cls, buffer):
        """The cache that a buffer holds already: a copy of another one's (on a border of 64 bytes: mha.aligned), or numpy.memmap of a file."""
        self, handle = cls.__new__(cls), ctypes.c_void_p()
        self.buffer = buffer
        _call("mha_kv_cache_view", *_buffer(buffer, "buffer"), handle)
        self._adopt(handle)
        return self

    def _adopt(self, handle):
        self._handle = handle.value
        config = _new(_CacheConfig)
        _call("mha_kv_cache_shape", self._handle, config)
        self.shape = {field: getattr(config, field) for field, _ in _CacheConfig._fields_[1:]}

    def length(self, sequence=0):
        """How many positions a sequence has."""
        length = ctypes.c_int64()
        _call("mha_kv_cache_length", self._handle, sequence, length)
        return length.value

    def truncate(self, sequence, length):
        """Forgets all positions of a sequence from length on."""
        _call("mha_kv_cache_truncate", self._handle, sequence, length)

    def set_blocks(self, sequence, blocks):
        """Paged only: the blocks of a sequence from now on."""
        array = _integers(blocks, "blocks", (len(blocks),), np.int32)
        _call("mha_kv_cache_set_blocks", self._handle, sequence, array.ctypes.data, array.size)

    def copy_prefix(self, source, target, length):
        """Makes the first length positions of sequence source all that sequence target has."""
        _call("mha_kv_cache_copy_prefix", self._handle, source, target, length)

    def append(self, sequence, k, v):
        """Appends rows k [count, num_kv_heads, head_dim] and v [count, num_kv_heads, head_dim_v] to a sequence, without attention."""
        heads = self.shape["num_kv_heads"]
        k_address = _contiguous(k, "k", [np.float32], (None, heads, self.shape["head_dim"]))
        v_address = _contiguous(v, "v", [np.float32], (len(k), heads, self.shape["head_dim_v"]))
        _call("mha_kv_cache_append", self._handle, sequence, len(k), k_address, v_address)

    def read(self, sequence, first, count):
        """(k, v): the positions [first, first + count) of a sequence, as the numbers that they are taken as."""
        heads = self.shape["num_kv_heads"]
        k, v = (np.empty((max(count, 0), heads, self.shape[width]), np.float32) for width in ("head_dim", "head_dim_v"))
        _call("mha_kv_cache_read", self._handle, sequence, first, count, k.ctypes.data, v.ctypes.data)
        return k, v


# ---- Rotary position embedding


class Rope:
    """Rotation of queries and keys by tables cos and sin [num_positions, dims / 2]; style is "half" or "interleaved".

    dims=0 rotates the whole head. q_positions [batch, n_q] and k_positions [batch, rows of key] are positions of other rows than the usual ones.
    """

    def __init__(self, cos, sin, *, style="half", dims=0, q_positions=None, k_positions=None):
        self.style = _named(rope_styles, style, "style")
        _contiguous(cos, "cos", [np.float32], (None, None)), _contiguous(sin, "sin", [np.float32], np.shape(cos))
        if dims not in (0, 2 * cos.shape[1]):
            raise ValueError(f"dims is {dims}; tables of {cos.shape[1]} columns rotate {2 * cos.shape[1]} elements of a head")
        self.cos, self.sin, self.dims = cos, sin, 2 * cos.shape[1]
        self.q_positions, self.k_positions = q_positions, k_positions

    @classmethod
    def tables(cls, dims, num_positions, *, style="half", first_position=0, **angles):
        """With tables by mha_rope_tables. angles are the fields of mha_rope_config: base, linear_factor, yarn_factor and so on."""
        unknown = set(angles) - {field for field, _ in _RopeConfig._fields_[1:]}
        if unknown:
            raise TypeError(f"mha_rope_config has no {', '.join(sorted(unknown))}")
        config = _new(_RopeConfig, dims=dims, num_positions=num_positions, first_position=first_position, **angles)
        cos, sin = (np.empty((max(num_positions, 0), max(dims, 0) // 2), np.float32) for _ in range(2))
        _call("mha_rope_tables", config, cos.ctypes.data, sin.ctypes.data)
        return cls(cos, sin, style=style)

    def _struct(self, batch, n_q, n_k):
        positions = (_integers(self.q_positions, "q_positions", (batch, n_q)), _integers(self.k_positions, "k_positions", (batch, n_k)))
        struct = _new(_Rope, style=self.style, dims=self.dims, num_positions=self.cos.shape[0], cos=self.cos.ctypes.data, sin=self.sin.ctypes.data,
                      q_positions=_address(positions[0]), k_positions=_address(positions[1]))
        return struct, positions
