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

Calls run on the calling thread, without Python's lock, so that several threads can use one layer at once; or on those of a Scheduler. They
compute in memory of their own, or where they are told to: outputs, looks inside, workspace, packed weights and caches may be the caller's arrays.
"""

import contextlib
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
_Config = _struct("mha_layer_config", "size struct_size", "i64 query_dim num_heads num_kv_heads head_dim head_dim_v d_out",
                  "i64 key_dim value_dim output_dim", "f32 scale", "u32 weight_type gate reserved", "i64 gate_dim")
_Weights = _struct("mha_layer_weights", "size struct_size", "u32 layout type", "ptr w_q w_k w_v w_qkv w_q_heads w_k_heads w_v_heads w_o w_g",
                   "ptr b_q b_k b_v b_qkv b_o b_g", "i64 w_q_stride w_k_stride w_v_stride w_qkv_stride w_o_stride w_g_stride",
                   "ptr w_q_scales w_k_scales w_v_scales w_qkv_scales w_o_scales w_g_scales kept_heads")
_AllocatorStruct = _struct("mha_allocator", "ptr context allocate release")
_Options = _struct("mha_layer_options", "size struct_size", "u32 instruction_set reserved", "ptr sgemm allocator")
_CacheConfig = _struct("mha_kv_cache_config", "size struct_size", "i64 num_sequences capacity num_kv_heads head_dim head_dim_v",
                       "u32 k_type v_type kind reserved", "i64 block_positions num_blocks")
_Rope = _struct("mha_rope", "size struct_size", "u32 style reserved", "i64 dims num_positions", "ptr cos sin", "i64 table_stride",
                "ptr q_positions k_positions")
_RopeConfig = _struct("mha_rope_config", "size struct_size", "i64 dims num_positions first_position", "f64 base linear_factor yarn_factor",
                      "f64 yarn_beta_fast yarn_beta_slow llama3_factor llama3_low_freq_factor llama3_high_freq_factor ntk_factor",
                      "i64 ntk_positions", "ptr pair_factors", "i64 original_positions", "f64 attention_factor",
                      "u32 yarn_unrounded reserved")
_Norm = _struct("mha_norm", "size struct_size", "u32 flags", "f32 epsilon", "ptr q_weight k_weight q_bias k_bias", "i64 head_stride")
_Taps = _struct("mha_taps", "size struct_size", "ptr q k v scores scaled_scores softcapped_scores masked_scores context",
                "ptr chosen_weights mean_weights key_sums chosen_heads chosen_rows", "i64 num_chosen_heads num_chosen_rows")
_ScoreOptions = _struct("mha_score_options", "size struct_size", "f32 softcap", "u32 bias_type", "ptr alibi_slopes sinks bias",
                        "i64 bias_batch_stride bias_head_stride bias_row_stride", "ptr mask",
                        "i64 mask_batch_stride mask_head_stride mask_row_stride", "u32 columns groups", "i64 num_columns",
                        "ptr q_groups kv_groups", "i64 q_groups_stride kv_groups_stride", "ptr q_scales", "i64 q_scales_stride",
                        "ptr relative_bias", "i64 relative_left relative_right", "ptr head_scales")
_ForwardArgs = _struct("mha_forward_args", "size struct_size", "i64 batch n_q n_kv", "ptr query key value output", "u32 input_type output_type",
                       "i64 query_batch_stride query_row_stride key_batch_stride key_row_stride value_batch_stride value_row_stride",
                       "i64 output_batch_stride output_row_stride", "u32 flags reserved", "i64 window_left window_right",
                       "ptr score q_start q_lengths kv_lengths kv_start cu_seqlens_q cu_seqlens_kv norm rope cache cache_sequences lse",
                       "ptr attention_weights taps scheduler")
_Gate = _struct("mha_gate", "size struct_size", "u32 kind reserved", "i64 gate_dim", "ptr values", "i64 batch_stride row_stride head_stride")
_AttentionArgs = _struct("mha_attention_args", "size struct_size", "i64 batch n_q n_kv num_heads num_kv_heads head_dim head_dim_v",
                         "ptr q k v output", "u32 q_type k_type v_type output_type", "i64 q_batch_stride q_row_stride q_head_stride",
                         "i64 k_batch_stride k_row_stride k_head_stride v_batch_stride v_row_stride v_head_stride",
                         "i64 output_batch_stride output_row_stride output_head_stride", "u32 flags", "f32 scale",
                         "i64 window_left window_right",
                         "ptr score gate q_start q_lengths kv_lengths kv_start cu_seqlens_q cu_seqlens_kv norm rope cache cache_sequences lse",
                         "ptr attention_weights taps scheduler", "u32 instruction_set reserved")
_CallInfo = _struct("mha_call_info", "size struct_size", "u32 instruction_set back_end contract num_threads",
                    "i64 project_tile_rows project_tile_columns attend_tile_rows attend_block_rows attend_chunk_keys",
                    "size workspace_bytes packed_bytes", "u64 operations bytes")
_LinearArgs = _struct("mha_linear_args", "size struct_size", "i64 rows", "ptr x residual output", "u32 input_type output_type",
                      "i64 x_row_stride residual_row_stride output_row_stride", "ptr scheduler")
structs = [_Error, _Scheduler, _Config, _Weights, _AllocatorStruct, _Options, _CacheConfig, _Rope, _RopeConfig, _Norm, _ScoreOptions, _Taps,
           _ForwardArgs, _Gate, _AttentionArgs, _CallInfo, _LinearArgs]

types = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3, "int4": 4}
layouts = {"in_out": 0, "out_in": 1}
gates = {"none": 0, "sigmoid": 1, "softplus": 2}
score_columns = {"all_keys": 0, "new_keys": 1}
score_groups = {"within": 0, "also": 1}
instruction_set_names = {"auto": 0, "scalar": 1, "avx2": 2, "avx512": 3, "neon": 4}
cache_kinds = {"contiguous": 0, "ring": 1, "paged": 2}
rope_styles = {"half": 0, "interleaved": 1}
_causal, _window_left, _window_right, _padding_left, _cache_read = 1, 2, 4, 8, 16
_taps = [field for field, _ in _Taps._fields_[1:12]]
_optional_outputs = ["attention_weights", "lse", *_taps]

# ---- The library

_signatures = {  # of the functions that return a status, without the mha_error: p is a pointer, s a size_t, i an int64_t, u a uint32_t
    "mha_layer_pack_size": "pppp", "mha_layer_pack": "pppps", "mha_layer_view": "psppsp", "mha_layer_verify": "ps",
    "mha_layer_create": "pppp", "mha_layer_shape": "pp", "mha_kv_cache_size": "pp", "mha_kv_cache_init": "ppsp",
    "mha_kv_cache_view": "psp", "mha_kv_cache_shape": "pp", "mha_kv_cache_length": "pip", "mha_kv_cache_truncate": "pii",
    "mha_kv_cache_set_blocks": "pipi", "mha_kv_cache_copy_prefix": "piii", "mha_kv_cache_append": "piipp", "mha_kv_cache_read": "piiipp",
    "mha_rope_tables": "ppp", "mha_alibi_slopes": "ip", "mha_t5_relative_bias": "piiuiiip", "mha_info": "ppp", "mha_forward_workspace": "ppp",
    "mha_forward": "ppps", "mha_attention_workspace": "pp", "mha_attention": "pps", "mha_attention_info": "pp",
    "mha_linear_workspace": "ppp", "mha_linear": "ppps"}
_others = ["mha_version", "mha_contract", "mha_instruction_sets", "mha_status_string", "mha_layer_view_size", "mha_layer_destroy"]
_kinds = {"p": ctypes.c_void_p, "s": ctypes.c_size_t, "i": ctypes.c_int64, "u": ctypes.c_uint32}
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
        functions = {name: getattr(library, name) for name in [*_signatures, *_others]}
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


_some = "at least 1"  # an extent in a shape. 0 would reach the library as "the default", and it would read or write beyond the array.


def _check(array, name, dtypes, shape):
    """Raises unless array is of one of the types and of the shape, whose None stands for any extent and _some for any but 0."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {type(array).__name__}; it must be a NumPy array")
    if array.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} is {_describe(array)}; its type must be {wanted}")
    if array.ndim != len(shape) or not all(extent is None or (has > 0 if extent is _some else has == extent)
                                            for extent, has in zip(shape, array.shape)):
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


def _writeable(array, name):
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name} cannot be written to")
    return array


_broadcast = -2 ** 63  # MHA_BROADCAST


def _strides(array, name, may_repeat=False):
    """The strides of all axes but the last, in elements. That of an axis of one element, which may be anything, steps over the others; that of
    one that repeats the same elements is 0 to NumPy."""
    if 0 in array.shape:
        return [0] * (array.ndim - 1)
    item, outer = array.itemsize, list(zip(array.shape[:-1], array.strides[:-1]))
    beyond = max([extent * stride for extent, stride in outer if extent > 1] + [array.shape[-1] * item])
    strides = [stride if extent > 1 else beyond for extent, stride in outer]
    if array.shape[-1] > 1 and array.strides[-1] != item or any(stride < (0 if may_repeat else 1) or stride % item for stride in strides):
        raise ValueError(f"{name} has strides of {array.strides} bytes, which the library cannot step by; "
                         f"np.ascontiguousarray({name}) makes it contiguous")
    return [stride // item or _broadcast for stride in strides]


def _integers(values, name, shape, dtype=np.int64):
    """Numbers as an array that the library reads; None stays None."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.size == 0 and not isinstance(values, np.ndarray):  # [] has no type, and stands for every shape without elements
        array = np.empty(shape if 0 in shape else array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {_describe(array)}; it must be integers")
    if array.shape != shape:
        raise ValueError(f"{name} is {_describe(array)}; its shape must be {list(shape)}")
    limits = np.iinfo(dtype)
    if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
        raise ValueError(f"{name} reaches from {array.min()} to {array.max()}; the library takes numbers from {limits.min} to {limits.max}")
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

    gate is "sigmoid" or "softplus" of x W_G, w_g [query_dim, num_heads * gate_dim] with a bias b_g; without w_g, the columns of each head's gate are
    behind its own in w_q. kept_heads [num_heads], bool or uint8, leaves heads out for good: those of 0.

    Matrices are float32, float16, bfloat16 (type="bf16", bits in uint16), int8 with scales, or int4 with scales (type="int4": uint8,
    two numbers in each, layout="out_in" only); scales={"w_q": ..., "w_o": ...}. weight_type says how the layer keeps them.

    sgemm runs the projections in place of the library's kernels. It is a function of C with the signature of cblas_sgemm, such as
    ctypes.CDLL("libopenblas.so.0").cblas_sgemm, or one of Python, sgemm(a, b, c, alpha, beta), that sets c[...] = alpha * a @ b + beta * c,
    without looking at c where beta is 0. allocator(bytes) returns the memory for the packed weights, an array of at least so many bytes such as
    mha.aligned makes, or None if there is none left; the layer keeps it as long as it lives.

    The arrays are read once, and may be freed then. The attribute `shape` has the fields of mha_layer_config by name, all defaults resolved.
    """

    def __init__(self, query_dim, num_heads, *, instruction_set="auto", sgemm=None, allocator=None, **weights_and_shape):
        sgemm, allocator = sgemm and _Sgemm(sgemm), allocator and _Allocator(allocator)
        config, weights, _arrays = _describe_layer(query_dim, num_heads, **weights_and_shape)
        handle = ctypes.c_void_p()
        with _raising(allocator):
            _call("mha_layer_create", config, weights, _options(instruction_set, sgemm, allocator), handle)
        weakref.finalize(self, _destroy, handle.value, allocator)
        self._adopt(handle, None, sgemm)

    @classmethod
    def view(cls, packed, *, instruction_set="auto", sgemm=None):
        """A layer over packed weights, which are not copied: an array from pack(), or numpy.memmap of a file (dtype=uint8, mode="r"). With an
        sgemm exactly if they were packed with one."""
        self, sgemm = cls.__new__(cls), sgemm and _Sgemm(sgemm)
        address, size = _buffer(packed, "packed")
        storage = np.empty(_loaded().mha_layer_view_size(), np.uint8)
        handle = ctypes.c_void_p()
        _call("mha_layer_view", address, size, _options(instruction_set, sgemm), storage.ctypes.data, storage.size, handle)
        self._adopt(handle, (packed, storage), sgemm)
        return self

    def _adopt(self, handle, memory, sgemm):
        self._handle, self._memory, self._sgemm = handle.value, memory, sgemm
        config = _Config(struct_size=ctypes.sizeof(_Config))
        _call("mha_layer_shape", self._handle, config)
        self.shape = {field: getattr(config, field) for field, _ in _Config._fields_[1:]}

    def forward(self, query, key=None, value=None, *, out=None, is_causal=False, q_start=None, q_lengths=None, kv_lengths=None,
                kv_start=None, cu_seqlens_q=None, cu_seqlens_kv=None, window_left=None, window_right=None, padding="right", norm=None,
                rope=None, score=None, cache=None, cache_sequences=None, cache_read=False, scheduler=None, bf16=False, output_type="f32",
                workspace=None, want=()):
        """y [batch, n, output_dim], from query [batch, n, query_dim]; without the batch, both are a single sequence.

        key=None is self-attention, value=None is key. All else has the names and meanings of mha_forward_args; padding is "right" or
        "left". With cu_seqlens_q, query is [n, query_dim]: sequences one behind the other. want names what is returned beside y, as (y,
        dictionary): "attention_weights", "lse", and the steps in between "q", "k", "v", "scores", "scaled_scores", "softcapped_scores",
        "masked_scores", "context"; of the weights also "mean_weights" over the heads, "key_sums" over the queries, and "chosen_weights"
        (see Chosen). want={"lse": array} has it written into an array that is there. Rows may have gaps between them; the elements of a row
        may not. Rows may be float16, or with bf16=True bfloat16 (bits in uint16), and so may y, as output_type says. out may be query. norm
        is a Norm, score a ScoreOptions. workspace is memory to compute in, an array of info(...)["workspace_bytes"] bytes or more; without
        one, each thread keeps its own.
        """
        is_single = isinstance(query, np.ndarray) and query.ndim == 2
        if is_single:
            query, key, value, out = (a[None] if isinstance(a, np.ndarray) else a for a in (query, key, value, out))
        shape = self.shape
        _check(query, "query", _row_types(bf16), (None, None, shape["query_dim"]))
        batch, n_q, _ = query.shape
        other = key if key is not None else value
        if key is not None:
            _check(key, "key", [query.dtype], (batch, None, shape["key_dim"]))
        if value is not None:
            _check(value, "value", [query.dtype], (batch, None if key is None else key.shape[1], shape["value_dim"]))
        n_kv = 0 if other is None else other.shape[1]
        out = _output(out, (batch, n_q, shape["output_dim"]), output_type)
        args = _new(_ForwardArgs, batch=batch, n_q=n_q, n_kv=n_kv, input_type=_row_type(query), output_type=_row_type(out))
        for name, array in ("query", query), ("key", key), ("value", value), ("output", out):
            if array is not None:
                setattr(args, name, array.ctypes.data)
                batch_stride, row_stride = _strides(array, name, name != "output")
                setattr(args, name + "_batch_stride", batch_stride), setattr(args, name + "_row_stride", row_stride)
        appended = 0 if cache_read else n_kv if other is not None else n_q
        places = kv_start, cu_seqlens_q, cu_seqlens_kv
        appended_lengths = None if cache_read else _appended(appended, q_lengths if other is None else kv_lengths, places)
        alive = _set_sequences(args, batch, places, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, score, cache,
                               cache_sequences, scheduler, is_causal, n_q, appended, shape["num_heads"], appended_lengths)
        alive.append(_set_norm(args, norm, shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]))
        args.flags |= _cache_read if cache_read else 0
        wanted, taps = _wanted(args, want, is_single, batch, n_q, appended, shape["num_heads"], shape["num_kv_heads"], shape["head_dim"],
                               shape["head_dim_v"], cache, cache_sequences, appended_lengths)
        with _raising(scheduler, self._sgemm):
            _run("mha_forward", workspace, self._handle, args)
        del alive, taps
        if is_single:
            out = out[0]
        return (out, wanted) if want else out

    def info(self, n_q, n_kv=None, *, batch=1, is_causal=False, q_start=None, q_lengths=None, kv_lengths=None, kv_start=None,
             cu_seqlens_q=None, cu_seqlens_kv=None, window_left=None, window_right=None, padding="right", norm=None, rope=None, score=None,
             cache=None, cache_sequences=None, cache_read=False, scheduler=None, want=()):
        """How forward would run on so many rows, and what it costs: the fields of mha_call_info by name. n_kv=None is self-attention; want names
        what would be asked for. All else is as in forward."""
        args = _new(_ForwardArgs, batch=batch, n_q=n_q)
        if n_kv is not None:
            args.n_kv, args.key = n_kv, ctypes.addressof(args)  # that there is one counts, and nothing reads it
        appended = 0 if cache_read else n_q if n_kv is None else n_kv
        places = kv_start, cu_seqlens_q, cu_seqlens_kv
        appended_lengths = None if cache_read else _appended(appended, q_lengths if n_kv is None else kv_lengths, places)
        alive = _set_sequences(args, batch, places, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, score, cache,
                               cache_sequences, scheduler, is_causal, n_q, appended, self.shape["num_heads"], appended_lengths)
        alive.append(_set_norm(args, norm, self.shape["num_heads"], self.shape["num_kv_heads"], self.shape["head_dim"]))
        args.flags |= _cache_read if cache_read else 0
        return _info("mha_info", args, want, alive, self._handle)


class Linear:
    """A product alone, y = x W^T + b, on the kernels of the projections; `layer` is its Layer, of w alone. w is [out, in], as nn.Linear has it, or
    with layout="in_out" [in, out]; of int4 with an odd number of inputs, these are to be given. type, scales, weight_type and all else are as in
    Layer. A packed one is mha.pack(inputs, 0, output_dim=outputs, w_o=w, b_o=b)."""

    def __init__(self, w, b=None, *, inputs=None, layout="out_in", scales=None, **how):
        outputs, stored = (w.shape if layout == "out_in" else w.shape[::-1]) if isinstance(w, np.ndarray) and w.ndim == 2 else (1, 1)
        inputs = inputs or stored * (2 if how.get("type") == "int4" else 1)
        self.layer = Layer(inputs, 0, output_dim=outputs, w_o=w, b_o=b, layout=layout, scales=None if scales is None else {"w_o": scales}, **how)

    @classmethod
    def view(cls, packed, **how):
        """Over packed weights, as Layer.view."""
        self = cls.__new__(cls)
        self.layer = Layer.view(packed, **how)
        return self

    def __call__(self, x, residual=None, *, out=None, bf16=False, output_type="f32", scheduler=None, workspace=None):
        """y [rows, out] of x [rows, in], plus residual [rows, out] of y's type, which may be out. Types as in Layer.forward."""
        shape = self.layer.shape
        inputs = shape["num_heads"] * shape["head_dim_v"] or shape["query_dim"]
        _check(x, "x", _row_types(bf16), (None, inputs))
        out = _output(out, (len(x), shape["output_dim"]), output_type)
        args = _new(_LinearArgs, rows=len(x), input_type=_row_type(x), output_type=_row_type(out))
        if residual is not None:
            _check(residual, "residual", [out.dtype], out.shape)
        for name, array in ("x", x), ("residual", residual), ("output", out):
            if array is not None:
                setattr(args, name, array.ctypes.data), setattr(args, name + "_row_stride", _strides(array, name)[0])
        args.scheduler = ctypes.addressof(scheduler._struct) if scheduler is not None else None
        with _raising(scheduler, self.layer._sgemm):
            _run("mha_linear", workspace, self.layer._handle, args)
        return out


def pack(query_dim, num_heads, *, out=None, instruction_set="auto", sgemm=None, **weights_and_shape):
    """The packed weights of a layer as an array of bytes, for Layer.view; `pack(...).tofile(path)` writes them to a file. Takes what Layer takes.
    out is memory for them, such as numpy.memmap of a new file: an array of pack_size(...) bytes or more, of which the first ones are returned."""
    bytes = pack_size(query_dim, num_heads, instruction_set=instruction_set, sgemm=sgemm, **weights_and_shape)
    out = aligned(bytes) if out is None else _writeable(out, "out")
    sgemm = sgemm and _Sgemm(sgemm)
    config, weights, _arrays = _describe_layer(query_dim, num_heads, **weights_and_shape)
    _call("mha_layer_pack", config, weights, _options(instruction_set, sgemm), *_buffer(out, "out"))
    return out[:bytes]


def pack_size(query_dim, num_heads, *, instruction_set="auto", sgemm=None, **weights_and_shape):
    """The bytes that pack needs."""
    sgemm = sgemm and _Sgemm(sgemm)
    config, weights, _arrays = _describe_layer(query_dim, num_heads, **weights_and_shape)
    bytes = ctypes.c_size_t()
    _call("mha_layer_pack_size", config, weights, _options(instruction_set, sgemm), bytes)
    return bytes.value


def verify(packed):
    """Raises mha.Error unless the packed weights are what was packed, to the last bit. Reads them all."""
    _call("mha_layer_verify", *_buffer(packed, "packed"))


def _new(struct, **fields):
    return struct(struct_size=ctypes.sizeof(struct), **fields)


def _options(instruction_set, sgemm=None, allocator=None):
    return _new(_Options, instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"),
                sgemm=sgemm and sgemm.address, allocator=allocator and ctypes.addressof(allocator.struct))


def _destroy(layer, _allocator):  # which gets the memory back meanwhile
    _library.mha_layer_destroy(layer)


def _describe_layer(query_dim, num_heads, *, w_q=None, w_k=None, w_v=None, w_qkv=None, w_o=None, b_q=None, b_k=None, b_v=None, b_qkv=None,
                    b_o=None, w_g=None, b_g=None, kept_heads=None, layout="in_out", type=None, scales=None, weight_type="f32", gate="none", **shape):
    """The structs that describe a layer, and what they point to."""
    config = _new(_Config, query_dim=query_dim, num_heads=num_heads, weight_type=_named(types, weight_type, "weight_type"),
                  gate=_named(gates, gate, "gate"))
    for name, number in shape.items():
        if name not in [field for field, _ in _Config._fields_[1:]]:
            raise TypeError(f"a layer has no {name}")
        setattr(config, name, number)
    matrices = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_qkv": w_qkv, "w_o": w_o, "w_g": w_g}
    type = type or _type_of(matrices)
    weights = _new(_Weights, layout=_named(layouts, layout, "layout"), type=_named(types, type, "type"))
    is_linear = num_heads == 0 and w_o is not None and all(matrix is None for name, matrix in matrices.items() if name != "w_o")
    dims = {"w_o": (query_dim, config.output_dim or query_dim), "heads": {}} if is_linear else _resolved(config, w_g is None)
    alive = [array for array in (*matrices.values(), b_q, b_k, b_v, b_qkv, b_o, b_g, kept_heads) if array is not None]
    weights.kept_heads = _contiguous(kept_heads, "kept_heads", [np.uint8, np.bool_], (num_heads,))
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
    for name, bias in ("b_q", b_q), ("b_k", b_k), ("b_v", b_v), ("b_qkv", b_qkv), ("b_o", b_o), ("b_g", b_g):
        setattr(weights, name, _contiguous(bias, name, [np.float32], (dims.get("w" + name[1:], (0, 0))[1],)))
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


def _resolved(config, gate_in_q):
    """Matrix -> (inputs, outputs) of a layer, where the shape is one; what is wrong with it, the library says."""
    key_dim = config.key_dim or config.query_dim
    value_dim = config.value_dim or key_dim
    kv_heads = config.num_kv_heads or config.num_heads
    all_heads = config.d_out or config.query_dim
    if config.num_heads < 1 or not config.head_dim and all_heads % config.num_heads:
        raise ValueError(f"num_heads is {config.num_heads}; it must be at least 1 and, without a head_dim, divide {all_heads}")
    head_dim = config.head_dim or all_heads // config.num_heads
    head_dim_v = config.head_dim_v or head_dim
    gate_dim = (config.gate_dim or head_dim_v) if config.gate else 0
    q_dim = head_dim + gate_dim * gate_in_q
    q, k, v = config.num_heads * q_dim, kv_heads * head_dim, kv_heads * head_dim_v
    return {"w_g": (config.query_dim, config.num_heads * gate_dim),
            "w_q": (config.query_dim, q), "w_k": (key_dim, k), "w_v": (value_dim, v), "w_qkv": (config.query_dim, q + k + v),
            "w_o": (config.num_heads * head_dim_v, config.output_dim or config.query_dim),
            "heads": {"w_q": (config.num_heads, q_dim), "w_k": (kv_heads, head_dim), "w_v": (kv_heads, head_dim_v)}}


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


# ---- Functions of the caller's that the library calls


class _Callback:
    """What is raised in one, C cannot pass on: it is kept, and raised when the call of that thread is over."""

    def __init__(self):
        self._kept = {}  # thread -> exception

    def _keep(self, exception):
        self._kept[threading.get_ident()] = exception

    def _raise_kept(self):
        exception = self._kept.pop(threading.get_ident(), None)
        if exception is not None:
            raise exception


@contextlib.contextmanager
def _raising(*callbacks):
    """Raises what was raised in them, rather than what the library says to it."""
    try:
        yield
    finally:
        for callback in callbacks:
            if callback is not None:
                callback._raise_kept()


_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32)
_ParallelFor = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, _Task, ctypes.c_void_p)
_Product = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 6, ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
                            ctypes.c_float, ctypes.c_void_p, ctypes.c_int)
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Scheduler(_Callback):
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
            except BaseException as exception:
                self._keep(exception)
            for index in range(count):
                if not started[index]:
                    start(index)

        super().__init__()
        self._callback = _ParallelFor(run)
        self._struct = _Scheduler(num_threads=num_threads, parallel_for=ctypes.cast(self._callback, ctypes.c_void_p))


class _Sgemm(_Callback):
    """The sgemm of a layer: a function of C as it is, or one of Python over arrays."""

    def __init__(self, multiply):
        def run(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):  # order and trans are always the same
            try:
                multiply(_matrix(a, m, k, lda), _matrix(b, k, n, ldb), _matrix(c, m, n, ldc), alpha, beta)
            except BaseException as exception:
                self._keep(exception)

        super().__init__()
        if not callable(multiply):
            raise TypeError(f"sgemm is a {type(multiply).__name__}; it must be a function")
        self._function = multiply if isinstance(multiply, ctypes._CFuncPtr) else _Product(run)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value


class _Allocator(_Callback):
    """The allocator of a layer, for the one block of memory that it takes."""

    def __init__(self, allocate):
        def run(_, bytes):
            try:
                self._block = allocate(bytes)
                return None if self._block is None else _room(self._block, bytes)
            except BaseException as exception:
                self._keep(exception)

        def release(*_):
            self._block = None

        super().__init__()
        if not callable(allocate):
            raise TypeError(f"allocator is a {type(allocate).__name__}; it must be a function")
        self._functions = _Allocate(run), _Release(release)
        self.struct = _AllocatorStruct(None, *[ctypes.cast(function, ctypes.c_void_p).value for function in self._functions])


def _matrix(address, rows, columns, stride):
    """The matrix at an address, as an array."""
    row = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), ((rows - 1) * stride + columns,))
    return np.lib.stride_tricks.as_strided(row, (rows, columns), (4 * stride, 4))


def _room(block, bytes):
    """The address of what an allocator returned."""
    address, size = _buffer(_writeable(block, "the allocator's array"), "the allocator's array")
    if size < bytes or address % 16:
        raise ValueError(f"the allocator's array has {size} bytes at address {address:#x}; there must be {bytes} on a border of 16, as in those "
                         "of mha.aligned")
    return address


# ---- What forward and attention have in common


def _run(name, workspace, *arguments):
    """The call, in the caller's workspace or in one of the size that it asks for."""
    if workspace is not None:
        return _call(name, *arguments, *_buffer(_writeable(workspace, "workspace"), "workspace"))
    bytes = ctypes.c_size_t()
    _call(name + "_workspace", *arguments, bytes)
    _call(name, *arguments, _workspace.of(bytes.value), bytes.value)


def _output(out, shape, type="f32"):
    dtype = _named({name: _dtypes[name] for name in ("f32", "f16", "bf16")}, type, "output_type")
    if out is None:
        return np.empty(shape, dtype)
    _check(out, "out", [dtype], shape)
    return _writeable(out, "out")


def _row_types(bf16):
    return [np.float32, np.float16] + [np.uint16] * bf16


def _row_type(array):
    """The number of the type of rows."""
    return {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}[array.dtype]


def _set_sequences(args, batch, places, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, score, cache,
                   cache_sequences, scheduler, is_causal, n_q, n_k, num_heads, k_lengths):
    """Sets the fields about rows and positions, and returns what they point to."""
    kv_start, cu_seqlens_q, cu_seqlens_kv = places
    if cu_seqlens_q is not None:
        if batch != 1:
            raise ValueError(f"with cu_seqlens_q the rows of all sequences are those of a batch of 1, not of {batch}")
        args.batch = len(cu_seqlens_q) - 1
    arrays = []
    for name, values, count in (("q_start", q_start, 0), ("q_lengths", q_lengths, 0), ("kv_lengths", kv_lengths, 0), ("kv_start", kv_start, 0),
                                ("cu_seqlens_q", cu_seqlens_q, 1), ("cu_seqlens_kv", cu_seqlens_kv, 1), ("cache_sequences", cache_sequences, 0)):
        arrays.append(_integers(values, name, (args.batch + count,)))
        setattr(args, name, _address(arrays[-1]))
    args.flags = _named({"right": 0, "left": _padding_left}, padding, "padding") | (_causal if is_causal else 0)
    if window_left is not None:
        args.flags, args.window_left = args.flags | _window_left, window_left
    if window_right is not None:
        args.flags, args.window_right = args.flags | _window_right, window_right
    if rope is not None:
        struct, positions = rope._struct(batch, n_q, n_k)
        args.rope = ctypes.addressof(struct)
        arrays += [struct, positions]
    args.cache = cache._handle if cache is not None else None
    if score is not None:
        columns = n_k if score.columns == "new_keys" else _longest(args.batch, n_k, k_lengths, cache, cache_sequences)
        struct, views = score._struct(batch, num_heads, n_q, columns)
        args.score = ctypes.addressof(struct)
        arrays += [struct, views]
    args.scheduler = ctypes.addressof(scheduler._struct) if scheduler is not None else None
    return arrays


def _set_norm(args, norm, num_heads, num_kv_heads, head_dim):
    if norm is None:
        return None
    struct = norm._struct(num_heads, num_kv_heads, head_dim)
    args.norm = ctypes.addressof(struct)
    return struct


def _appended(rows, lengths, places):
    """How many rows of keys each sequence has in a call; None stands for all rows."""
    kv_start, cu_seqlens_q, cu_seqlens_kv = places
    if cu_seqlens_q is not None:
        return np.diff(cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv)
    return [rows - start for start in kv_start] if lengths is None and kv_start is not None else lengths


def _longest(batch, n_kv, kv_lengths, cache, cache_sequences):
    """The columns of an array with a number for each pair of query and key."""
    if cache is None:
        return n_kv
    rows = [n_kv] * batch if kv_lengths is None else kv_lengths
    sequences = range(batch) if cache_sequences is None else cache_sequences
    return max([cache.length(int(sequence)) + int(count) for sequence, count in zip(sequences, rows)], default=0)


def _wanted(args, want, is_single, batch, n_q, n_kv, num_heads, num_kv_heads, head_dim, head_dim_v, cache, cache_sequences, kv_lengths):
    """Arrays for the optional outputs, by name, and the struct that points to some of them."""
    seen = _longest(args.batch, n_kv, kv_lengths, cache, cache_sequences) if want else 0
    pairs = (batch, num_heads, n_q, seen)
    shapes = {"attention_weights": pairs, "lse": (batch, num_heads, n_q), "q": (batch, n_q, num_heads, head_dim),
              "k": (batch, n_kv, num_kv_heads, head_dim), "v": (batch, n_kv, num_kv_heads, head_dim_v), "scores": pairs,
              "scaled_scores": pairs, "softcapped_scores": pairs, "masked_scores": pairs, "context": (batch, n_q, num_heads, head_dim_v),
              "mean_weights": (batch, n_q, seen), "key_sums": (batch, num_heads, seen)}
    given, arrays = want if isinstance(want, dict) else dict.fromkeys(want), {}
    chosen = given.get("chosen_weights")
    if isinstance(chosen, Chosen):
        given = {**given, "chosen_weights": chosen.out}
    else:
        chosen = Chosen()
    lists = [_ascending(chosen.heads, "heads"), _ascending(chosen.rows, "rows")]
    lengths = [count if list is None else len(list) for list, count in zip(lists, (num_heads, n_q))]
    shapes["chosen_weights"] = (batch, *lengths, seen)
    for name, array in given.items():
        shape = _named(shapes, name, "want")
        if array is None:
            make = np.empty if n_q else np.zeros  # without queries the library computes nothing, not even k and v
            arrays[name] = make(shape[1:] if is_single else shape, np.float32)
        else:
            _contiguous(array, f"want[{name!r}]", [np.float32], shape[1:] if is_single else shape)
            arrays[name] = _writeable(array, f"want[{name!r}]")
    taps = _point_to(args, {name: array.ctypes.data for name, array in arrays.items()})
    for name, list in zip(("heads", "rows"), lists):
        if list is not None and "chosen_weights" in arrays:
            setattr(taps, "chosen_" + name, _address(list)), setattr(taps, "num_chosen_" + name, len(list))
    return arrays, (taps, lists)


def _ascending(numbers, name):
    return None if numbers is None else _integers(numbers, "Chosen." + name, (len(numbers),))


def _point_to(args, addresses):
    """Sets the optional outputs, name -> address. Returns the struct that points to some of them."""
    taps = _new(_Taps)
    for name, address in addresses.items():
        setattr(taps if name in _taps else args, name, address)
        if name in _taps:
            args.taps = ctypes.addressof(taps)
    return taps


def _info(name, args, want, alive, *before):
    """The fields of mha_call_info by name. Of the outputs counts that they are asked for, and nothing is written to them."""
    for output in want:
        _named(dict.fromkeys(_optional_outputs), output, "want")
    taps, info = _point_to(args, dict.fromkeys(want, ctypes.addressof(args))), _new(_CallInfo)
    _call(name, *before, args, info)
    del alive, taps
    return {field: getattr(info, field) for field, _ in _CallInfo._fields_[1:]}


def attention(q, k=None, v=None, *, out=None, scale=0.0, is_causal=False, q_start=None, q_lengths=None, kv_lengths=None, kv_start=None,
              cu_seqlens_q=None, cu_seqlens_kv=None, window_left=None, window_right=None, padding="right", norm=None, rope=None, score=None,
              cache=None, cache_sequences=None, cache_read=False, scheduler=None, instruction_set="auto", bf16=False, output_type="f32",
              workspace=None, want=(), gate=None):
    """The middle stage alone: softmax(scale * q k^T) v, [batch, n_q, heads, head_dim_v].

    q is [batch, n_q, heads, head_dim]; k and v are [batch, n_kv, kv_heads, width]. Other orders of the axes are views: q.transpose(0, 2, 1, 3)
    of [batch, heads, n_q, head_dim]. Each may be float16, or with bf16=True bfloat16 (bits in uint16). With cache_read=True there are no k and v.
    gate=("sigmoid", values) multiplies the context by a function of values [batch, n_q, heads, head_dim_v or 1]; or "softplus". All else is as in
    Layer.forward.
    """
    stored = _row_types(bf16)
    _check(q, "q", stored, (None, None, _some, _some))
    batch, n_q, heads, head_dim = q.shape
    if cache_read and cache is not None and k is None and v is None:
        n_kv, kv_heads, head_dim_v = 0, cache.shape["num_kv_heads"], cache.shape["head_dim_v"]
    else:
        _check(k, "k", stored, (batch, None, _some, head_dim))
        _, n_kv, kv_heads, _ = k.shape
        _check(v, "v", stored, (batch, n_kv, kv_heads, _some))
        head_dim_v = v.shape[3]
    out = _output(out, (batch, n_q, heads, head_dim_v), output_type)
    args = _new(_AttentionArgs, batch=batch, n_q=n_q, n_kv=n_kv, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
                scale=scale, instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"))
    for name, array in ("q", q), ("k", k), ("v", v), ("output", out):
        if array is None:
            continue
        setattr(args, name, array.ctypes.data), setattr(args, name + "_type", _row_type(array))
        for axis, stride in zip(("batch", "row", "head"), _strides(array, name, name != "output")):
            setattr(args, f"{name}_{axis}_stride", stride)
    places = kv_start, cu_seqlens_q, cu_seqlens_kv
    appended_lengths = None if cache_read else _appended(n_kv, kv_lengths, places)
    alive = _set_sequences(args, batch, places, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, score, cache,
                           cache_sequences, scheduler, is_causal, n_q, n_kv, heads, appended_lengths)
    alive.append(_set_norm(args, norm, heads, kv_heads, head_dim))
    args.flags |= _cache_read if cache_read else 0
    if gate is not None:
        kind, values = gate
        _check(values, "gate", [np.float32], (batch, n_q, heads, _some))
        strides = zip(("batch_stride", "row_stride", "head_stride"), _strides(values, "gate"))
        gate_struct = _new(_Gate, kind=_named(gates, kind, "gate"), gate_dim=values.shape[3], values=values.ctypes.data, **dict(strides))
        args.gate = ctypes.addressof(gate_struct)
    wanted, taps = _wanted(args, want, False, batch, n_q, n_kv, heads, kv_heads, head_dim, head_dim_v, cache, cache_sequences, appended_lengths)
    with _raising(scheduler):
        _run("mha_attention", workspace, args)
    del alive, taps
    return (out, wanted) if want else out


def attention_info(n_q, n_kv, num_heads, head_dim, *, batch=1, num_kv_heads=0, head_dim_v=0, k_type="f32", v_type="f32", is_causal=False,
                   q_start=None, q_lengths=None, kv_lengths=None, kv_start=None, cu_seqlens_q=None, cu_seqlens_kv=None, window_left=None,
                   window_right=None, padding="right", norm=None, rope=None, score=None, cache=None, cache_sequences=None, cache_read=False,
                   scheduler=None, instruction_set="auto", want=()):
    """How attention would run on so many rows, and what it costs: the fields of mha_call_info by name. All else is as in Layer.info."""
    args = _new(_AttentionArgs, batch=batch, n_q=n_q, n_kv=n_kv, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                head_dim_v=head_dim_v, k_type=_named(types, k_type, "k_type"), v_type=_named(types, v_type, "v_type"),
                instruction_set=_named(instruction_set_names, instruction_set, "instruction_set"))
    places = kv_start, cu_seqlens_q, cu_seqlens_kv
    appended_lengths = None if cache_read else _appended(n_kv, kv_lengths, places)
    alive = _set_sequences(args, batch, places, q_start, q_lengths, kv_lengths, window_left, window_right, padding, rope, score, cache,
                           cache_sequences, scheduler, is_causal, n_q, n_kv, num_heads, appended_lengths)
    alive.append(_set_norm(args, norm, num_heads, num_kv_heads or num_heads, head_dim))
    args.flags |= _cache_read if cache_read else 0
    return _info("mha_attention_info", args, want, alive)


# ---- The KV cache


class KvCache:
    """Keys and values of earlier calls. `buffer` is all of it: an array of bytes to be copied, written to a file, and viewed again; a given one
    is used as it is (on a border of 64 bytes).

    The parameters are the fields of mha_kv_cache_config: num_sequences, capacity, num_kv_heads, head_dim, head_dim_v, k_type and v_type ("f32",
    "f16", "bf16", "int8"), kind ("contiguous", "ring", "paged"), block_positions and num_blocks. What changes a cache must not run at the same
    time as anything else with it.
    """

    def __init__(self, *, buffer=None, **config):
        self.buffer, handle = aligned(self.size(**config)) if buffer is None else _writeable(buffer, "buffer"), ctypes.c_void_p()
        _call("mha_kv_cache_init", self._config(**config), *_buffer(self.buffer, "buffer"), handle)
        self._adopt(handle)

    @classmethod
    def size(cls, **config):
        """The bytes of a cache, which a buffer of the caller's must have at least."""
        bytes = ctypes.c_size_t()
        _call("mha_kv_cache_size", cls._config(**config), bytes)
        return bytes.value

    @staticmethod
    def _config(*, k_type="f32", v_type="f32", kind="contiguous", **config):
        unknown = set(config) - {field for field, _ in _CacheConfig._fields_[1:]}
        if unknown:
            raise TypeError(f"a cache has no {', '.join(sorted(unknown))}")
        return _new(_CacheConfig, k_type=_named(types, k_type, "k_type"), v_type=_named(types, v_type, "v_type"),
                    kind=_named(cache_kinds, kind, "kind"), **config)

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


class Chosen:
    """The heads and rows of want={"chosen_weights": Chosen(heads=[0, 3], rows=[n - 1])}, in ascending order; None is all. out is an array for
    the weights, [batch, heads, rows, n_kv]."""

    def __init__(self, heads=None, rows=None, *, out=None):
        self.heads, self.rows, self.out = heads, rows, out


class ScoreOptions:
    """What changes scores and who attends to whom, for score= of a call; all of it is optional, and all combines (mha_score_options).

        score = mha.ScoreOptions(softcap=50)                                   # Gemma 2
        score = mha.ScoreOptions(sinks=sinks)                                  # gpt-oss: [num_heads]
        score = mha.ScoreOptions(alibi_slopes=mha.alibi_slopes(num_heads))     # BLOOM, MPT
        score = mha.ScoreOptions(relative_bias=mha.t5_relative_bias(embedding))  # encoders of T5
        score = mha.ScoreOptions(mask=mask)                                    # [n_q, n_kv], True = attends
        score = mha.ScoreOptions(q_groups=documents)                           # [n]: each row attends to its own document
        score = mha.ScoreOptions(q_groups=images, groups="also")               # images both ways, under is_causal; text is -1
        score = mha.ScoreOptions(head_scales=head_mask)                        # [num_heads]; heads of 0 are not computed

    mask, bool or uint8, and bias, float32 or float16, are [batch, num_heads, n_q, columns]; what broadcasts to that will do. Columns are the rows
    of key or, with a cache, the positions in it after the call; with columns="new_keys" always the rows of key that come with the call.
    With num_columns, arrays have so many columns, and keys behind them are masked. q_groups, int32, are [n_q] or [batch, n_q], kv_groups [columns]
    or [batch, columns]; None: those of the queries, where keys are their rows.
    relative_bias [num_heads, distances] begins at a distance of -relative_left; None: in its middle is that of 0. q_scales are [n_q] or [batch, n_q].
    """

    def __init__(self, *, softcap=0.0, alibi_slopes=None, sinks=None, bias=None, mask=None, columns="all_keys", relative_bias=None, relative_left=None,
                 q_scales=None, head_scales=None, num_columns=0, groups="within", q_groups=None, kv_groups=None):
        _named(score_columns, columns, "columns")
        _named(score_groups, groups, "groups")
        self.num_columns, self.groups, self.q_groups, self.kv_groups = num_columns, groups, q_groups, kv_groups
        self.head_scales = head_scales
        self.softcap, self.alibi_slopes, self.sinks, self.bias, self.mask, self.columns = softcap, alibi_slopes, sinks, bias, mask, columns
        self.relative_bias, self.relative_left, self.q_scales = relative_bias, relative_left, q_scales

    def _struct(self, batch, num_heads, n_q, columns):
        columns = self.num_columns or columns
        struct = _new(_ScoreOptions, softcap=self.softcap, columns=score_columns[self.columns], num_columns=self.num_columns,
                      groups=score_groups[self.groups],
                      alibi_slopes=_contiguous(self.alibi_slopes, "alibi_slopes", [np.float32], (num_heads,)),
                      sinks=_contiguous(self.sinks, "sinks", [np.float32], (num_heads,)),
                      relative_bias=_contiguous(self.relative_bias, "relative_bias", [np.float32], (num_heads, _some)),
                      head_scales=_contiguous(self.head_scales, "head_scales", [np.float32], (num_heads,)))
        views = []
        if self.relative_bias is not None:
            distances = self.relative_bias.shape[1]
            struct.relative_left = distances // 2 if self.relative_left is None else self.relative_left
            struct.relative_right = distances - 1 - struct.relative_left
        for name, array, width in ("q_groups", self.q_groups, n_q), ("kv_groups", self.kv_groups, columns):
            if array is not None:
                setattr(struct, name, _contiguous(array, name, [np.int32], (width,) if np.ndim(array) == 1 else (batch, width)))
                setattr(struct, name + "_stride", width if np.ndim(array) == 2 else 0)
        if self.q_scales is not None:
            struct.q_scales = _contiguous(self.q_scales, "q_scales", [np.float32], (n_q,) if np.ndim(self.q_scales) == 1 else (batch, n_q))
            struct.q_scales_stride = n_q if np.ndim(self.q_scales) == 2 else 0
        for name, array, dtypes in ("bias", self.bias, (np.float32, np.float16)), ("mask", self.mask, (np.bool_, np.uint8)):
            if array is None:
                continue
            _check(array, name, dtypes, (None,) * np.ndim(array))
            shape = (batch, num_heads, n_q, columns)
            try:
                view = np.broadcast_to(array, shape)
            except ValueError:
                raise ValueError(f"{name} is {_describe(array)}; its shape must be {list(shape)}, or broadcast to that") from None
            *strides, innermost = [stride // array.itemsize for stride in view.strides]
            if columns > 1 and innermost != 1 or min(strides) < 0 or 0 < strides[2] < columns:
                raise ValueError(f"{name} is {_describe(array)}; the elements of a row must be neighbours, {columns} of them")
            setattr(struct, name, array.ctypes.data if array.size else ctypes.addressof(struct))
            for axis, stride in zip(("batch", "head", "row"), strides):
                setattr(struct, f"{name}_{axis}_stride", stride)
            struct.bias_type |= types["f16"] if array.dtype == np.float16 else 0
            views.append(view)
        return struct, views


def alibi_slopes(num_heads):
    """The slopes of ALiBi for so many heads, float32 (mha_alibi_slopes)."""
    slopes = np.empty(max(num_heads, 0), np.float32)
    _call("mha_alibi_slopes", num_heads, slopes.ctypes.data)
    return slopes


def t5_relative_bias(embedding, *, max_distance=128, is_bidirectional=True):
    """The relative bias of T5 from its embedding [num_buckets, num_heads], as far as distances differ (mha_t5_relative_bias): with is_bidirectional
    [num_heads, 2 * max_distance + 1]; without, for decoders, [num_heads, max_distance + 1], of which relative_left is max_distance."""
    _contiguous(embedding, "embedding", [np.float32], (_some, _some))
    num_buckets, num_heads = embedding.shape
    right = max_distance if is_bidirectional else 0
    table = np.empty((num_heads, max(max_distance, 0) + 1 + max(right, 0)), np.float32)
    _call("mha_t5_relative_bias", embedding.ctypes.data, num_buckets, max_distance, is_bidirectional, num_heads, max_distance, right,
          table.ctypes.data)
    return table


class Norm:
    """Norm of queries and keys, for norm= of a call (mha_norm).

        norm = mha.Norm(q_weight=q_weight, k_weight=k_weight)                          # Qwen3: RMS norm of each head
        norm = mha.Norm(q_weight=q_weight, k_weight=k_weight, all_heads=True)          # OLMo 2: one norm over all heads
        norm = mha.Norm(layer=True, epsilon=1e-5, q_weight=q_weight, k_weight=k_weight)    # Cohere: layer norm

    Weights and biases, float32, are [head_dim] for all heads, or else all of them [heads, head_dim]; with all_heads [heads * head_dim] will do.
    The norm comes before the rotation, or with after_rope behind it. values normalises values too, without weights.
    """

    def __init__(self, *, q_weight=None, k_weight=None, q_bias=None, k_bias=None, epsilon=1e-6, layer=False, all_heads=False, after_rope=False,
                 values=False):
        self.arrays = {"q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias}
        self.epsilon, self.all_heads = epsilon, all_heads
        self.flags = (1 if layer else 0) | (2 if all_heads else 0) | (4 if after_rope else 0) | (8 if values else 0)

    def _struct(self, num_heads, num_kv_heads, head_dim):
        struct = _new(_Norm, flags=self.flags, epsilon=self.epsilon)
        dimensions = {array.ndim for array in self.arrays.values() if isinstance(array, np.ndarray)}
        if not self.all_heads and len(dimensions) > 1:
            raise ValueError("of a norm's weights and biases, either all are [head_dim] or all are [heads, head_dim]")
        for name, array in self.arrays.items():
            heads = num_heads if name[0] == "q" else num_kv_heads
            if isinstance(array, np.ndarray) and array.ndim == 1:
                shape = (heads * head_dim,) if self.all_heads else (head_dim,)
            else:
                shape = (heads, head_dim)
            setattr(struct, name, _contiguous(array, name, [np.float32], shape))
        if self.all_heads or 2 in dimensions:
            struct.head_stride = head_dim
        return struct


class Rope:
    """Rotation of queries and keys by tables cos and sin [num_positions, dims / 2]; style is "half" or "interleaved".

    dims=0 rotates the whole head. q_positions [batch, n_q] and k_positions [batch, rows of key] are positions of other rows than the usual ones.
    """

    def __init__(self, cos, sin, *, style="half", dims=0, q_positions=None, k_positions=None):
        self.style = _named(rope_styles, style, "style")
        _contiguous(cos, "cos", [np.float32], (None, _some)), _contiguous(sin, "sin", [np.float32], np.shape(cos))
        if dims not in (0, 2 * cos.shape[1]):
            raise ValueError(f"dims is {dims}; tables of {cos.shape[1]} columns rotate {2 * cos.shape[1]} elements of a head")
        self.cos, self.sin, self.dims = cos, sin, 2 * cos.shape[1]
        self.q_positions, self.k_positions = q_positions, k_positions

    @classmethod
    def tables(cls, dims, num_positions, *, style="half", first_position=0, **angles):
        """With tables by mha_rope_tables. angles are the fields of mha_rope_config: base, linear_factor, yarn_factor and so on; pair_factors is
        a sequence of dims / 2 numbers."""
        unknown = set(angles) - {field for field, _ in _RopeConfig._fields_[1:]}
        if unknown:
            raise TypeError(f"mha_rope_config has no {', '.join(sorted(unknown))}")
        factors = None if angles.get("pair_factors") is None else np.ascontiguousarray(angles["pair_factors"], np.float64)
        if factors is not None:
            _check(factors, "pair_factors", [np.float64], (dims // 2,))
            angles["pair_factors"] = factors.ctypes.data
        config = _new(_RopeConfig, dims=dims, num_positions=num_positions, first_position=first_position, **angles)
        cos, sin = (np.empty((max(num_positions, 0), max(dims, 0) // 2), np.float32) for _ in range(2))
        _call("mha_rope_tables", config, cos.ctypes.data, sin.ctypes.data)
        return cls(cos, sin, style=style)

    def _struct(self, batch, n_q, n_k):
        positions = (_integers(self.q_positions, "q_positions", (batch, n_q)), _integers(self.k_positions, "k_positions", (batch, n_k)))
        struct = _new(_Rope, style=self.style, dims=self.dims, num_positions=self.cos.shape[0], cos=self.cos.ctypes.data, sin=self.sin.ctypes.data,
                      q_positions=_address(positions[0]), k_positions=_address(positions[1]))
        return struct, positions
