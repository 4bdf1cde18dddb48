"""Layers, products alone, and packed weights."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from ._arrays import (
    _as_rows,
    _batched,
    _buffer,
    _check,
    _check_memory,
    _input,
    _must_be,
    _named,
    _named_fields,
    _output,
    _output_struct,
    _place,
    _read_by,
    _row_names,
    _row_type,
    _row_types,
    _writeable,
    aligned,
)
from ._callbacks import Scheduler
from ._calls import (
    Prepared,
    _check_prepared,
    _complete,
    _in_place,
    _info,
    _keywords,
    _memory,
    _no_options,
    _no_pointers,
    _run,
    _set_call,
    _wanted,
)
from ._docs import documented
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
    _new,
    _NotCopied,
    _number,
    _Options,
    _Output,
    _packer,
    _somewhere,
    arithmetics,
    gates,
    instruction_set_names,
    layouts,
    scale_types,
    types,
)
from ._weights import _describe_layer, scale_fields
from ._weights import _keywords as _layer_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Array, Call, How, Info, Structure, Want, Weights

_pack, _size = _packer(_ForwardArgs, "output"), ctypes.sizeof(_ForwardArgs)
_how = "type", "weight_type", "group_size", "scale_type", "arithmetic"  # of a product
_nowhere = 0, (0, 0)  # address and strides of no array


@documented(_layer_keywords)
class Layer(_NotCopied):
    """A layer: its shape and its packed weights.

    A layer is immutable; any number of threads may use it at once. The arrays of weights are read
    once and not needed afterwards. `query_dim`, `num_heads` and the matrices are
    required, and `head_dim` too unless num_heads * head_dim is query_dim.

    Parameters
    ----------

    Attributes
    ----------
    shape : mapping from str to int, float or str
        The keywords of the layer, without the weights and with all defaults resolved:
        ``mha.Layer(**layer.shape, w_q=..., w_k=..., w_v=..., w_o=...)`` makes another one like it.

    Raises
    ------
    TypeError, ValueError
        If a matrix has a wrong type or shape.
    Error
        If the library refuses the shape, or memory is short.

    Examples
    --------
    >>> w_qkv, w_o = np.random.rand(32, 96).astype(np.float32), np.eye(32, dtype=np.float32)
    >>> layer = mha.Layer(32, 4, w_qkv=w_qkv, w_o=w_o, weight_type="int8")
    >>> layer.forward(np.ones((5, 32), np.float32), is_causal=True).shape
    (5, 32)
    >>> layer.shape["head_dim"], layer.shape["weight_type"]
    (8, 'int8')
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
    @documented()
    def view(cls, packed: Array, *, instruction_set: str = "auto") -> Layer:
        """Make a layer over packed weights, without copying them.

        Parameters
        ----------

        Returns
        -------
        Layer
            The layer, which keeps `packed` alive. No call may write to any part of that array.

        Examples
        --------
        >>> w = np.eye(8, dtype=np.float32)
        >>> layer = mha.Layer.view(mha.pack(8, 2, w_q=w, w_k=w, w_v=w))
        """
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
        self.shape = _named_fields(
            config, weight_type=types, scale_type=scale_types, arithmetic=arithmetics, gate=gates
        )
        heads = "num_heads", "num_kv_heads", "head_dim", "head_dim_v"
        self._heads = tuple(self.shape[name] for name in heads)

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

    @documented(_keywords)
    def forward(
        self,
        query,
        key=None,
        value=None,
        *,
        out=None,
        bf16=False,
        output_type="f32",
        workspace=None,
        want=(),
        prepare=False,
        **call,
    ):
        """Compute the layer: y [batch, n_q, output_dim] from rows [batch, n_q, query_dim].

        All arrays of rows may leave out the batch. Rows may have gaps between them; the elements of
        a row are neighbours.

        Parameters
        ----------
        query : ndarray of float32 or float16, shape ([batch,] n_q, query_dim)
            Rows that queries are projected from.
        key : ndarray of the type of `query`, shape ([batch,] n_kv, key_dim)
            Rows that keys are projected from; None is `query`, self-attention.
        value : ndarray of the type of `query`, shape ([batch,] n_kv, value_dim)
            Rows that values are projected from; None is `key`.
        out : ndarray, shape of the result
            Receives the result. It may be `query` if `key` is another array.

        Returns
        -------
        y : ndarray of `output_type`, shape ([batch,] n_q, output_dim)
            The result: a new array, or `out`.
        outputs : dict from str to ndarray
            Only with `want`: the optional outputs by name.
        call : Prepared
            Only with `prepare`, in place of the others.

        Raises
        ------
        TypeError, ValueError
            If an argument has a wrong type, shape or layout, or if arrays overlap that must not.
        Error
            If the library refuses the arguments. Nothing has been written then.

        Examples
        --------
        >>> w_qkv, w_o = np.random.rand(8, 24).astype(np.float32), np.eye(8, dtype=np.float32)
        >>> layer = mha.Layer(8, 2, w_qkv=w_qkv, w_o=w_o)
        >>> x = np.random.rand(3, 5, 8).astype(np.float32)
        >>> layer.forward(x, q_lengths=[5, 2, 4]).shape
        (3, 5, 8)
        >>> cache = mha.KvCache(num_sequences=1, capacity=64, num_kv_heads=2, head_dim=4)
        >>> for token in x[0]:  # one row after the other
        ...     y = layer.forward(token[None], is_causal=True, cache=cache)
        >>> np.array_equal(y[0], layer.forward(x[0], is_causal=True)[4])
        True
        """
        call, rows = _complete(call), (query, key, value, out)
        cache, cache_read = call["cache"], call["cache_read"]
        is_single = getattr(query, "ndim", 0) == 2
        if is_single:
            query, key, value, out = _batched(2, query=query, key=key, value=value, out=out)
        is_new, shape = out is None, self.shape
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
        counts = batch or _empty, n_q or _empty, n_kv or _empty
        of_query = at_query, _row_type(query), 0, *query_strides, 0, 0
        of_key, of_value = (
            (at_key, 0, 0, *key_strides, 0, 0),
            (at_value, 0, 0, *value_strides, 0, 0),
        )
        to = at_output, _row_type(out), 0, *output_strides, 0
        inputs = *of_query, *of_key, *of_value
        _pack(args, 0, _size, *_no_options, *counts, *_no_pointers, *inputs, *to)
        appended = 0 if cache_read else n_kv if other is not None else n_q
        extents = batch, n_q, appended, *self._heads
        sequences = _set_call(args, call, extents, other is None)
        wanted = _wanted(args, want, is_single, extents, cache, *sequences)
        single = out[0] if is_single else out
        if prepare or want or not (is_new and cache is workspace is None):
            same = _in_place("query", wanted) if cache_read or key is not None else ()
            appended = None if cache_read else cache
            given = dict(zip(("query", "key", "value"), rows))
            memory = _memory(args, given, rows[3], workspace, wanted, appended, self, same)
        if prepare:
            _check_prepared(cache, call["score"], want)
            return Prepared(
                "mha_forward",
                self,
                args,
                memory,
                single,
                is_new,
                workspace,
                call["scheduler"],
                wanted,
            )
        _run("mha_forward", workspace, args, call["scheduler"], self._handle)
        return (single, wanted) if want else single

    @documented(_keywords)
    def info(
        self,
        n_q: int,
        n_kv: int | None = None,
        *,
        batch: int = 1,
        want: Want = (),
        **call: Unpack[Structure],
    ) -> Info:
        """How a call of `forward` would run, and what it would cost.

        Parameters
        ----------
        n_q : int
            Rows of query of each sequence.
        n_kv : int
            Rows of key and value of each sequence; None is self-attention.
        want : iterable of str
            Names of the optional outputs that the call would return.

        Returns
        -------
        dict from str to int
            "instruction_set" (its number), "back_end" (0, the library's kernels), "contract",
            "num_threads", "workspace_bytes", "packed_bytes" (of the weights), "operations" and
            "bytes": the multiplications and additions, and the bytes read and written.

        Examples
        --------
        >>> w = np.eye(8, dtype=np.float32)
        >>> mha.Layer(8, 2, w_q=w, w_k=w, w_v=w).info(5)["num_threads"]
        1
        """
        call = _complete(call)
        args = _new(
            _ForwardArgs, batch=_number(batch, "batch") or _empty, n_q=_number(n_q, "n_q") or _empty
        )
        if n_kv is not None:
            # That there is one counts, and nothing reads it.
            args.n_kv, args.key = _number(n_kv, "n_kv") or _empty, _Input(data=_somewhere)
        is_read = _is_true(call["cache_read"], "cache_read")
        appended = 0 if is_read else n_q if n_kv is None else n_kv
        _set_call(args, call, (batch, n_q, appended, *self._heads), n_kv is None)
        return _info("mha_forward_info", args, want, self)


@documented({**{name: _layer_keywords[name] for name in _how}, "instruction_set": "auto"})
class Linear(_NotCopied):
    """A linear layer, y = x W^T + b, computed as the projections of a `Layer`.

    Parameters
    ----------
    w : ndarray, shape (out_features, in_features)
        The matrix; with ``layout="in_out"`` it is (in_features, out_features).
    b : ndarray of float32, shape (out_features,)
        The bias; None is 0.
    inputs : int
        in_features; needed only for int4 matrices with an odd number of them.
    layout : {"out_in", "in_out"}
        Layout of `w`.
    scales : ndarray of float32, shape (out_features[, ceil(in_features / group_size)])
        Scales of an int8 or int4 matrix.
    offsets : ndarray of float32, shape of `scales` in groups
        Offsets: a weight is code * scale + offset.
    block_scales, block_offsets : ndarray of float32, shape (out_features, ceil(in_features / 256))
        With ``scale_type="int8"``, factors of `scales` and `offsets`.

    Attributes
    ----------
    layer : Layer
        The packed weights. ``mha.pack(in_features, 0, output_dim=out_features, w_o=w, b_o=b,
        layout="out_in")`` packs the same for `view`.

    Examples
    --------
    >>> linear = mha.Linear(np.ones((3, 4), np.float32), weight_type="f16")
    >>> linear(np.ones((2, 5, 4), np.float32)).shape
    (2, 5, 3)
    """

    _fixed = ("layer",)
    _instead = (
        'use mha.pack(inputs, 0, output_dim=outputs, w_o=w, b_o=b, layout="out_in") into an array'
        " or a file, and Linear.view of that"
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
        block_scales: Array | None = None,
        block_offsets: Array | None = None,
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
        given = zip(scale_fields, (scales, offsets, block_scales, block_offsets))
        of_codes: Any = {name: {"w_o": array} for name, array in given if array is not None}
        self.layer = Layer(
            _number(inputs, "inputs"),
            0,
            output_dim=outputs,
            w_o=w,
            b_o=b,
            layout=layout,
            **of_codes,
            **how,
        )

    @classmethod
    @documented()
    def view(cls, packed: Array, *, instruction_set: str = "auto") -> Linear:
        """Make a linear layer over packed weights, without copying them.

        Parameters
        ----------

        Returns
        -------
        Linear
            The layer, which keeps `packed` alive. No call may write to any part of that array.
        """
        self = cls.__new__(cls)
        self.layer = Layer.view(packed, instruction_set=instruction_set)
        return self

    @documented()
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
        """Compute y = x W^T + b, and add `residual`.

        Parameters
        ----------
        x : ndarray of float32 or float16, shape (..., in_features)
            Rows, with any leading dimensions that can be stepped through with one stride.
        residual : ndarray of `output_type`, shape (..., out_features)
            Added to y; None is 0.
        out : ndarray of `output_type`, shape (..., out_features)
            Receives the result; it may be `residual`.

        Returns
        -------
        ndarray of `output_type`, shape (..., out_features)
            The result: a new array, or `out`.
        """
        shape = self.layer.shape
        inputs = shape["num_heads"] * shape["head_dim_v"] or shape["query_dim"]
        leading = getattr(x, "shape", ())[:-1]
        _check(x, "x", _row_types(bf16), (*[None] * len(leading), inputs))
        is_new, out = out is None, _output(out, (*leading, shape["output_dim"]), output_type)
        if residual is not None:
            _check(residual, "residual", [out.dtype], out.shape)
        x, residual, y = (
            _as_rows(x, "x"),
            _as_rows(residual, "residual"),
            _as_rows(out, "out", True),
        )
        if scheduler is not None:
            _must_be(Scheduler, scheduler, "scheduler")
        args = _new(
            _LinearArgs,
            rows=len(x) or _empty,
            x=_input(x, "x"),
            residual=_input(residual, "residual"),
            output=_output_struct(y),
            scheduler=None if scheduler is None else scheduler._struct,
        )
        if not is_new or workspace is not None:
            given_out, same = None if is_new else y, [("out", "residual")]
            _memory(args, {}, given_out, workspace, layer=self.layer, same=same)
        _run("mha_linear", workspace, args, scheduler, self.layer._handle)
        return out

    @documented()
    def info(
        self,
        rows: int,
        *,
        input_type: str = "f32",
        output_type: str = "f32",
        has_residual: bool = False,
        scheduler: Scheduler | None = None,
    ) -> Info:
        """How a call would run, and what it would cost.

        Parameters
        ----------
        rows : int
            Number of rows: the product of the leading dimensions.
        input_type : {"f32", "f16", "bf16"}
            Type of x.
        has_residual : bool
            Whether there is a residual.

        Returns
        -------
        dict from str to int
            The same names as of `Layer.info`.
        """
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


@documented(_layer_keywords)
def pack(
    query_dim: int,
    num_heads: int,
    *,
    out: Array | None = None,
    instruction_set: str = "auto",
    **weights_and_shape: Unpack[Weights],
) -> Array:
    """Pack the weights of a layer into an array of bytes.

    The bytes serve every instruction set and can be saved: ``pack(...).tofile(path)``, then
    ``Layer.view(np.memmap(path, mode="r"))``.

    Parameters
    ----------
    out : ndarray of uint8, shape (bytes,)
        Receives the bytes: at least `pack_size`, aligned to 64, such as numpy.memmap of a new file.

    Returns
    -------
    ndarray of uint8, shape (pack_size(...),)
        The packed weights: a new array, or the first bytes of `out`.

    Examples
    --------
    >>> w = np.eye(8, dtype=np.float32)
    >>> packed = mha.pack(8, 2, w_q=w, w_k=w, w_v=w, weight_type="bf16")
    >>> packed.size == mha.pack_size(8, 2, w_q=w, w_k=w, w_v=w, weight_type="bf16")
    True
    """
    bytes = pack_size(query_dim, num_heads, instruction_set=instruction_set, **weights_and_shape)
    out = aligned(bytes) if out is None else _writeable(out, "out")
    functions, structs = _describe_layer(query_dim, num_heads, **weights_and_shape)
    _check(out, "out")
    for struct in structs:
        _check_memory({"out": out}, _read_by(struct))
    _call(functions.pack, *structs, _options(instruction_set), *_buffer(out, "out"))
    return out[:bytes]


@documented(_layer_keywords)
def pack_size(
    query_dim: int,
    num_heads: int,
    *,
    instruction_set: str = "auto",
    **weights_and_shape: Unpack[Weights],
) -> int:
    """Number of bytes that `pack` needs for the same arguments.

    Parameters
    ----------

    Returns
    -------
    int
        Bytes.
    """
    functions, structs = _describe_layer(query_dim, num_heads, **weights_and_shape)
    bytes = ctypes.c_size_t()
    _call(functions.pack_size, *structs, _options(instruction_set), bytes)
    return bytes.value


@documented()
def verify(packed: np.ndarray) -> None:
    """Check the checksum of packed weights, which reads all of them.

    Parameters
    ----------

    Raises
    ------
    Error
        If they are not what was packed, to the last bit.

    Examples
    --------
    >>> w = np.eye(8, dtype=np.float32)
    >>> packed = mha.pack(8, 2, w_q=w, w_k=w, w_v=w)
    >>> packed[-1] ^= 1
    >>> mha.verify(packed)
    Traceback (most recent call last):
    mha._library.Error: ...
    """
    _call("mha_layer_verify", *_buffer(packed, "packed"))


def _options(instruction_set):
    return _new(
        _Options, instruction_set=_named(instruction_set_names, instruction_set, "instruction_set")
    )
