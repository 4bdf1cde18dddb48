"""Layers, products alone, and packed weights."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import numpy as np

from ._arrays import (
    _buffer,
    _check,
    _check_memory,
    _contiguous,
    _describe,
    _dtypes,
    _input,
    _must_be,
    _named,
    _output,
    _output_struct,
    _place,
    _read_by,
    _row_names,
    _row_type,
    _row_types,
    _strides,
    _writeable,
    aligned,
)
from ._callbacks import Scheduler
from ._calls import (
    Prepared,
    _appended,
    _arrays_of_sequences,
    _check_prepared,
    _in_place,
    _info,
    _memory,
    _run,
    _set_norm,
    _set_sequences,
    _wanted,
)
from ._library import _call, _loaded
from ._structs import (
    _CallInfo,
    _Config,
    _empty,
    _fields,
    _ForwardArgs,
    _Input,
    _is_true,
    _LinearArgs,
    _LinearWeights,
    _Matrix,
    _new,
    _NotCopied,
    _number,
    _Options,
    _Output,
    _packer,
    _somewhere,
    _Weights,
    arithmetics,
    gates,
    instruction_set_names,
    layouts,
    scale_types,
    types,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._cache import KvCache
    from ._options import Norm, Rope, ScoreOptions
    from ._typing import Array, Call, How, Info, Integers, Want, Weights

_pack, _size = _packer(_ForwardArgs, "output"), ctypes.sizeof(_ForwardArgs)
_nowhere = 0, (0, 0)  # address and strides of no array


class Layer(_NotCopied):
    """A layer: its shape and its packed weights. Immutable; any number of threads may use it at
    once.

    query_dim, num_heads and shape (key_dim, value_dim, output_dim, num_kv_heads, head_dim,
    head_dim_v, scale) are the fields of mha_layer_config; those left out have its defaults.

    W_Q, W_K and W_V come as w_q, w_k, w_v or as one fused w_qkv. w_o=None is a layer without W_O.
    w_q alone is a layer for calls with cache_read=True, whose key_dim and value_dim are 0. layout
    is "in_out" (x W, [in, out]) or "out_in" (x W^T, [out, in], such as nn.Linear's). Biases are
    float32 vectors: b_q, b_k and b_v, or b_qkv; b_o and b_g.

    gate is "sigmoid" or "softplus" of x W_G, w_g [query_dim, num_heads * gate_dim] with a bias b_g;
    without w_g, the columns of each head's gate are after its own in w_q.

    Matrices are float32, float16, bfloat16 (type="bf16", bits in uint16), int8 with scales, or int4
    with scales (type="int4": uint8, two numbers in each, layout="out_in" only); scales={"w_q": ...,
    "w_o": ...}. weight_type says how the layer keeps the matrices; int8 arrays also need
    weight_type="int8", and int4 arrays weight_type="int4". With group_size (16, 32, 64, 128) as
    many inputs of an output share a scale; 0 is all of them for int8 and 32 for int4. Scales are
    float32: [out] where all inputs share one, in either layout; in groups [out, ceil(in /
    group_size)], as are offsets={"w_q": ...}, with which a weight is code * scale + offset.
    scale_type="f16" keeps both as float16, which must hold them exactly. mha.formats has those of
    other programs. arithmetic is what the projections compute in, "int8" or "int16" with weights of
    int8 or int4.

    The arrays are read once, and may be freed then. The attribute `shape` has the fields of
    mha_layer_config by name, all defaults resolved.
    """

    _fixed = ("shape",)
    _instead = "use mha.pack(...) into an array or a file, and Layer.view of that"

    def __init__(
        self,
        query_dim: int,
        num_heads: int,
        *,
        instruction_set: str = "auto",
        **weights_and_shape: Unpack[Weights],
    ) -> None:
        functions, structs = _describe_layer(query_dim, num_heads, **weights_and_shape)
        handle = ctypes.c_void_p()
        _call(functions.create, *structs, _options(instruction_set), handle)
        weakref.finalize(self, _loaded().mha_layer_destroy, handle.value)
        self._adopt(handle, None)

    @classmethod
    def view(cls, packed: Array, *, instruction_set: str = "auto") -> Layer:
        """A layer over packed weights, which are not copied: an array from pack(), or numpy.memmap
        of a file (dtype=uint8, mode="r"). No call may write to any part of that array."""
        self = cls.__new__(cls)
        buffer = _buffer(packed, "packed")
        storage = np.empty(_loaded().mha_layer_view_size(), np.uint8)
        handle = ctypes.c_void_p()
        _call("mha_layer_view", *buffer, _options(instruction_set), storage, storage.size, handle)
        self._adopt(handle, (packed, storage))
        return self

    def _adopt(self, handle, memory):
        self._handle, self._memory = handle.value, memory
        config = _Config(struct_size=ctypes.sizeof(_Config))
        _call("mha_layer_shape", self, config)
        self.shape = _fields(config)

    @overload
    def forward(  # type: ignore[overload-overlap]
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        want: tuple[()] = (),
        prepare: Literal[False] = False,
        **options: Unpack[Call],
    ) -> Array: ...

    @overload
    def forward(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        want: Want,
        prepare: Literal[False] = False,
        **options: Unpack[Call],
    ) -> tuple[Array, dict[str, Array]]: ...

    @overload
    def forward(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        prepare: Literal[True],
        want: Want = (),
        **options: Unpack[Call],
    ) -> Prepared: ...

    def forward(
        self,
        query,
        key=None,
        value=None,
        *,
        out=None,
        is_causal=False,
        equal_scores=False,
        q_first_positions=None,
        q_lengths=None,
        kv_lengths=None,
        q_first_rows=None,
        kv_first_rows=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        window_left=None,
        window_right=None,
        padding="right",
        norm=None,
        rope=None,
        score=None,
        cache=None,
        cache_sequences=None,
        cache_read=False,
        scheduler=None,
        bf16=False,
        output_type="f32",
        workspace=None,
        want=(),
        prepare=False,
    ):
        """y [batch, n, output_dim], from query [batch, n, query_dim]; without the batch, both are a
        single sequence.

        With is_causal, the last query sees the last key, unless q_first_positions says otherwise.

        key=None is self-attention, value=None is key. All else has the names and meanings of
        mha_forward_args and mha_sequences. q_lengths and kv_lengths count the valid rows of each
        sequence, the first ones or, with padding="left", the last ones; q_first_rows and
        kv_first_rows say where they begin. With cu_seqlens_q, query is [n, query_dim], sequences
        one after the other, and all arrays of rows have a batch of 1. cache_read=True attends to
        the cache without appending to it. With equal_scores, q k^T counts as 0 (MHA_EQUAL_SCORES).

        want names what is returned beside y, as (y, dictionary): "attention_weights", "lse", and
        the steps in between "q", "k", "v", "scores", "scaled_scores", "softcapped_scores",
        "masked_scores", "context". want={"lse": array} has it written into an array that is there.
        Rows may have gaps between them; the elements of a row may not. Rows may be float16, or with
        bf16=True bfloat16 (bits in uint16), and so may y, as output_type says. out may be query
        where key is another array. norm is a Norm, score a ScoreOptions. workspace is memory to
        compute in, an array of info(...)["workspace_bytes"] bytes or more; without one, each thread
        keeps its own. prepare=True computes nothing and returns a Prepared call.
        """
        is_single, rows, is_new = (
            isinstance(query, np.ndarray) and query.ndim == 2,
            (query, key, value),
            out is None,
        )
        if is_single:
            query, key, value, out = (
                a[None] if isinstance(a, np.ndarray) else a for a in (query, key, value, out)
            )
        shape = self.shape
        if not (prepare is cache_read is False):
            _is_true(prepare, "prepare"), _is_true(cache_read, "cache_read")
        _check(query, "query", _row_types(bf16), (None, None, shape["query_dim"]))
        batch, n_q, _ = query.shape
        other = key if key is not None else value
        if key is not None:
            _check(key, "key", [query.dtype], (batch, None, shape["key_dim"]))
        if value is not None:
            _check(
                value,
                "value",
                [query.dtype],
                (batch, None if key is None else key.shape[1], shape["value_dim"]),
            )
        n_kv = 0 if other is None else other.shape[1]
        out = _output(out, (batch, n_q, shape["output_dim"]), output_type)
        args = _ForwardArgs()
        at_query, query_strides = _place(query, "query", True)
        at_key, key_strides = _nowhere if key is None else _place(key, "key", True)
        at_value, value_strides = _nowhere if value is None else _place(value, "value", True)
        at_output, output_strides = _place(out, "out", is_written=True)
        _pack(
            args,
            0,
            _size,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            batch or _empty,
            n_q or _empty,
            n_kv or _empty,
            at_query,
            _row_type(query),
            0,
            *query_strides,
            0,
            0,
            at_key,
            0,
            0,
            *key_strides,
            0,
            0,
            at_value,
            0,
            0,
            *value_strides,
            0,
            0,
            at_output,
            _row_type(out),
            0,
            *output_strides,
            0,
        )
        appended = 0 if cache_read else n_kv if other is not None else n_q
        arrays = _arrays_of_sequences(
            cu_seqlens_q,
            cu_seqlens_kv,
            q_lengths,
            kv_lengths,
            q_first_rows,
            kv_first_rows,
            q_first_positions,
            cache_sequences,
        )
        appended_lengths = _appended(appended, arrays, other is None, cache_read)
        _set_sequences(
            args,
            batch,
            arrays,
            window_left,
            window_right,
            padding,
            rope,
            score,
            cache,
            cache_read,
            scheduler,
            is_causal,
            equal_scores,
            n_q,
            appended,
            shape["num_heads"],
            shape["num_kv_heads"],
            appended_lengths,
        )
        _set_norm(
            args,
            norm,
            shape["num_heads"],
            shape["num_kv_heads"],
            shape["head_dim"],
            shape["head_dim_v"],
        )
        wanted = _wanted(
            args,
            want,
            is_single,
            batch,
            n_q,
            appended,
            shape["num_heads"],
            shape["num_kv_heads"],
            shape["head_dim"],
            shape["head_dim_v"],
            cache,
            arrays,
            appended_lengths,
        )
        single = out[0] if is_single else out
        if prepare or want or not (is_new and cache is workspace is None):
            given, given_out = (
                dict(zip(("query", "key", "value"), rows)),
                None if is_new else single,
            )
            same = _in_place("query", wanted) if cache_read or key is not None else ()
            appended = None if cache_read else cache
            memory = _memory(args, given, given_out, workspace, wanted, appended, self, same)
        if prepare:
            _check_prepared(cache, score, want)
            return Prepared(
                "mha_forward",
                self,
                args,
                memory,
                single,
                is_new,
                workspace,
                scheduler,
                wanted,
            )
        _run("mha_forward", workspace, args, scheduler, self._handle)
        return (single, wanted) if want else single

    def info(
        self,
        n_q: int,
        n_kv: int | None = None,
        *,
        batch: int = 1,
        is_causal: bool = False,
        equal_scores: bool = False,
        q_first_positions: Integers | None = None,
        q_lengths: Integers | None = None,
        kv_lengths: Integers | None = None,
        q_first_rows: Integers | None = None,
        kv_first_rows: Integers | None = None,
        cu_seqlens_q: Integers | None = None,
        cu_seqlens_kv: Integers | None = None,
        window_left: int | None = None,
        window_right: int | None = None,
        padding: str = "right",
        norm: Norm | None = None,
        rope: Rope | None = None,
        score: ScoreOptions | None = None,
        cache: KvCache | None = None,
        cache_sequences: Integers | None = None,
        cache_read: bool = False,
        scheduler: Scheduler | None = None,
        want: Want = (),
    ) -> Info:
        """How forward would run on this many rows, and what it costs: the fields of mha_call_info
        by name. n_kv=None is self-attention; want names what would be asked for. All else is as in
        forward."""
        _is_true(cache_read, "cache_read")
        args = _new(
            _ForwardArgs, batch=_number(batch, "batch") or _empty, n_q=_number(n_q, "n_q") or _empty
        )
        if n_kv is not None:
            # That there is one counts, and nothing reads it.
            args.n_kv, args.key = _number(n_kv, "n_kv") or _empty, _Input(data=_somewhere)
        appended = 0 if cache_read else n_q if n_kv is None else n_kv
        arrays = _arrays_of_sequences(
            cu_seqlens_q,
            cu_seqlens_kv,
            q_lengths,
            kv_lengths,
            q_first_rows,
            kv_first_rows,
            q_first_positions,
            cache_sequences,
        )
        appended_lengths = _appended(appended, arrays, n_kv is None, cache_read)
        _set_sequences(
            args,
            batch,
            arrays,
            window_left,
            window_right,
            padding,
            rope,
            score,
            cache,
            cache_read,
            scheduler,
            is_causal,
            equal_scores,
            n_q,
            appended,
            self.shape["num_heads"],
            self.shape["num_kv_heads"],
            appended_lengths,
        )
        _set_norm(
            args,
            norm,
            self.shape["num_heads"],
            self.shape["num_kv_heads"],
            self.shape["head_dim"],
            self.shape["head_dim_v"],
        )
        return _info("mha_info", args, want, self)


class Linear(_NotCopied):
    """A product alone, y = x W^T + b, on the kernels of the projections; `layer` is its Layer, of w
    alone. w is [out, in], as nn.Linear has it, or with layout="in_out" [in, out]; of int4 with an
    odd number of inputs, these are to be given. type, scales, offsets, weight_type and all else are
    as in Layer. A packed one is mha.pack(inputs, 0, output_dim=outputs, w_o=w, b_o=b)."""

    _fixed = ("layer",)
    _instead = (
        "use mha.pack(inputs, 0, output_dim=outputs, w_o=w, b_o=b) into an array or a file, and"
        " Linear.view of that"
    )

    def __init__(
        self,
        w: Array,
        b: Array | None = None,
        *,
        inputs: int | None = None,
        layout: str = "out_in",
        scales: Array | None = None,
        offsets: Array | None = None,
        **how: Unpack[How],
    ) -> None:
        _named(layouts, layout, "layout"), _check(w, "w"), b is None or _check(b, "b")
        outputs, stored = (
            (w.shape if layout == "out_in" else w.shape[::-1])
            if isinstance(w, np.ndarray) and w.ndim == 2
            else (1, 1)
        )
        if inputs is None:
            inputs = stored * (2 if how.get("type") == "int4" else 1)
        self.layer = Layer(
            _number(inputs, "inputs"),
            0,
            output_dim=outputs,
            w_o=w,
            b_o=b,
            layout=layout,
            scales=None if scales is None else {"w_o": scales},
            offsets=None if offsets is None else {"w_o": offsets},
            **how,
        )

    @classmethod
    def view(cls, packed: Array, *, instruction_set: str = "auto") -> Linear:
        """Over packed weights, as Layer.view."""
        self = cls.__new__(cls)
        self.layer = Layer.view(packed, instruction_set=instruction_set)
        return self

    def __call__(
        self,
        x: Array,
        residual: Array | None = None,
        *,
        out: Array | None = None,
        bf16: bool = False,
        output_type: str = "f32",
        scheduler: Scheduler | None = None,
        workspace: Array | None = None,
    ) -> Array:
        """y [rows, out] of x [rows, in], plus residual [rows, out] of y's type, which may be out.
        Types as in Layer.forward."""
        shape = self.layer.shape
        inputs = shape["num_heads"] * shape["head_dim_v"] or shape["query_dim"]
        _check(x, "x", _row_types(bf16), (None, inputs))
        is_new, out = out is None, _output(out, (len(x), shape["output_dim"]), output_type)
        if residual is not None:
            _check(residual, "residual", [out.dtype], out.shape)
        if scheduler is not None:
            _must_be(Scheduler, scheduler, "scheduler")
        args = _new(
            _LinearArgs,
            rows=len(x) or _empty,
            x=_input(x, "x"),
            residual=_input(residual, "residual"),
            output=_output_struct(out),
            scheduler=None if scheduler is None else scheduler._struct,
        )
        if not is_new or workspace is not None:
            given_out, same = None if is_new else out, [("out", "residual")]
            _memory(args, {}, given_out, workspace, layer=self.layer, same=same)
        _run("mha_linear", workspace, args, scheduler, self.layer._handle)
        return out

    def info(
        self,
        rows: int,
        *,
        input_type: str = "f32",
        output_type: str = "f32",
        has_residual: bool = False,
        scheduler: Scheduler | None = None,
    ) -> Info:
        """How a call on this many rows would run, and what it costs: the fields of mha_call_info by
        name."""
        args, info = (
            _new(
                _LinearArgs,
                rows=_number(rows, "rows") or _empty,
                x=_Input(type=_named(_row_names, input_type, "input_type")),
            ),
            _new(_CallInfo),
        )
        args.output = _Output(type=_named(_row_names, output_type, "output_type"))
        if _is_true(has_residual, "has_residual"):
            # That there is one counts, and nothing reads it.
            args.residual = _Input(data=_somewhere)
        if scheduler is not None:
            _must_be(Scheduler, scheduler, "scheduler")
            args.scheduler = scheduler._struct
        _call("mha_linear_info", self.layer, args, info)
        return dict(_fields(info))


def pack(
    query_dim: int,
    num_heads: int,
    *,
    out: Array | None = None,
    instruction_set: str = "auto",
    **weights_and_shape: Unpack[Weights],
) -> Array:
    """The packed weights of a layer as an array of bytes, for Layer.view; `pack(...).tofile(path)`
    writes them to a file. Takes what Layer takes. out is memory for them, such as numpy.memmap of a
    new file: an array of pack_size(...) bytes or more, of which the first ones are returned."""
    bytes = pack_size(query_dim, num_heads, instruction_set=instruction_set, **weights_and_shape)
    out = aligned(bytes) if out is None else _writeable(out, "out")
    functions, structs = _describe_layer(query_dim, num_heads, **weights_and_shape)
    _check(out, "out")
    for struct in structs:
        _check_memory({"out": out}, _read_by(struct))
    _call(functions.pack, *structs, _options(instruction_set), *_buffer(out, "out"))
    return out[:bytes]


def pack_size(
    query_dim: int,
    num_heads: int,
    *,
    instruction_set: str = "auto",
    **weights_and_shape: Unpack[Weights],
) -> int:
    """The bytes that pack needs."""
    functions, structs = _describe_layer(query_dim, num_heads, **weights_and_shape)
    bytes = ctypes.c_size_t()
    _call(functions.pack_size, *structs, _options(instruction_set), bytes)
    return bytes.value


def verify(packed: np.ndarray) -> None:
    """Raises mha.Error unless the packed weights are what was packed, to the last bit. Reads them
    all."""
    _call("mha_layer_verify", *_buffer(packed, "packed"))


def _options(instruction_set):
    return _new(
        _Options, instruction_set=_named(instruction_set_names, instruction_set, "instruction_set")
    )


_type = type  # a parameter has its name


class _Functions(NamedTuple):
    create: str
    pack_size: str
    pack: str


_of_layers = _Functions("mha_layer_create", "mha_layer_pack_size", "mha_layer_pack")
_of_linear_layers = _Functions("mha_linear_create", "mha_linear_pack_size", "mha_linear_pack")


def _describe_layer(
    query_dim,
    num_heads,
    *,
    w_q=None,
    w_k=None,
    w_v=None,
    w_qkv=None,
    w_o=None,
    b_q=None,
    b_k=None,
    b_v=None,
    b_qkv=None,
    b_o=None,
    w_g=None,
    b_g=None,
    layout="in_out",
    type=None,
    scales=None,
    offsets=None,
    weight_type="f32",
    group_size=0,
    scale_type="f32",
    arithmetic="f32",
    gate="none",
    **shape,
):
    """The functions that make a layer, or one of a single matrix, and the structs that describe
    it."""
    config = _new(
        _Config,
        query_dim=query_dim,
        num_heads=num_heads,
        weight_type=_named(types, weight_type, "weight_type"),
        group_size=group_size,
        scale_type=_named(scale_types, scale_type, "scale_type"),
        gate=_named(gates, gate, "gate"),
        arithmetic=_named(arithmetics, arithmetic, "arithmetic"),
    )
    for name, number in shape.items():
        if name not in [field for field, _ in _Config._fields_[1:]]:
            raise TypeError(f"a layer has no {name}")
        setattr(config, name, number)
    matrices = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_qkv": w_qkv, "w_o": w_o, "w_g": w_g}
    type = _type_of(matrices) if type is None else type
    weights = _new(
        _Weights, layout=_named(layouts, layout, "layout"), type=_named(types, type, "type")
    )
    others = (
        *(matrix for name, matrix in matrices.items() if name != "w_o"),
        b_q,
        b_k,
        b_v,
        b_qkv,
        b_g,
    )
    is_linear = (
        num_heads == 0
        and w_o is not None
        and gate == "none"
        and set(shape) <= {"output_dim"}
        and all(one is None for one in others)
    )
    dims = (
        {
            "w_o": (query_dim, config.output_dim or query_dim),
        }
        if is_linear
        else _resolved(config, w_g is None)
    )
    scales, offsets = (
        _by_matrix(given, name, matrices)
        for given, name in ((scales, "scales"), (offsets, "offsets"))
    )
    biases = {"w_q": b_q, "w_k": b_k, "w_v": b_v, "w_qkv": b_qkv, "w_o": b_o, "w_g": b_g}
    for name, matrix in matrices.items():
        depth, width = dims.get(name, (0, 0))
        made = _Matrix(bias=_contiguous(biases[name], "b" + name[1:], [np.float32], (width,)))
        if matrix is not None:
            extents = (
                (width, -(-depth // 2) if type == "int4" else depth)
                if layout == "out_in"
                else (depth, width)
            )
            _check(matrix, name, [_dtypes[type]], extents)
            [stride] = _strides(matrix, name)
            made.data, made.row_stride = matrix, stride * (2 if type == "int4" else 1)
        group = group_size or (32 if type == "int4" else 0)
        extents = (width, -(-depth // group)) if group else (width,)
        made.scales, made.offsets = (
            _contiguous(given.get(name), f"{what}[{name!r}]", [np.float32], extents)
            for given, what in ((scales, "scales"), (offsets, "offsets"))
        )
        setattr(weights, name, made)
    if not is_linear:
        return _of_layers, (config, weights)
    linear = _new(
        _LinearWeights,
        input_dim=query_dim,
        output_dim=config.output_dim or query_dim,
        layout=weights.layout,
        type=weights.type,
        w=weights.w_o,
        weight_type=config.weight_type,
        group_size=group_size,
        scale_type=config.scale_type,
        arithmetic=config.arithmetic,
    )
    return _of_linear_layers, (linear,)


def _by_matrix(given, name, matrices):
    """scales or offsets, by the names of matrices."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name} is a {_type(given).__name__}; it must be a dictionary from matrices to arrays,"
            " such as {'w_q': array}"
        )
    for matrix in given:
        if matrix not in matrices:
            raise ValueError(
                f"there are no {name} of {matrix!r}; the matrices are {', '.join(matrices)}"
            )
    return given


def _type_of(matrices):
    """The type that the matrices have by their NumPy type."""
    for name, matrix in matrices.items():
        if isinstance(matrix, np.ndarray):
            for type in "f32", "f16", "int8":
                if matrix.dtype == _dtypes[type]:
                    return type
            raise TypeError(
                f"{name} is {_describe(matrix)}; without type=, its type must be float32, float16"
                " or int8"
            )
    return "f32"


def _resolved(config, gate_in_q):
    """Matrix -> (inputs, outputs) of a layer, where the shape is one; what is wrong with it, the
    library says."""
    key_dim = config.key_dim or config.query_dim
    value_dim = config.value_dim or key_dim
    kv_heads = config.num_kv_heads or config.num_heads
    if config.num_heads < 1 or not config.head_dim and config.query_dim % config.num_heads:
        raise ValueError(
            f"num_heads is {config.num_heads}; it must be at least 1 and, without a head_dim,"
            f" divide {config.query_dim}"
        )
    head_dim = config.head_dim or config.query_dim // config.num_heads
    head_dim_v = config.head_dim_v or head_dim
    gate_dim = (config.gate_dim or head_dim_v) if config.gate else 0
    q_dim = head_dim + gate_dim * gate_in_q
    q, k, v = config.num_heads * q_dim, kv_heads * head_dim, kv_heads * head_dim_v
    return {
        "w_g": (config.query_dim, config.num_heads * gate_dim),
        "w_q": (config.query_dim, q),
        "w_k": (key_dim, k),
        "w_v": (value_dim, v),
        "w_qkv": (config.query_dim, q + k + v),
        "w_o": (config.num_heads * head_dim_v, config.output_dim or config.query_dim),
    }
