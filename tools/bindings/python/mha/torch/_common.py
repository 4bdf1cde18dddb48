"""What the operators have in common: which tensors are served, memory of each thread, and calls."""

import ctypes
import threading
import warnings

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from .. import _library
from .._layer import pack, pack_size
from .._library import Error
from .._structs import (
    _AttentionArgs,
    _broadcast,
    _Config,
    _Error,
    _ForwardArgs,
    _kind,
    _LinearArgs,
    _new,
    _Outputs,
    _packer,
    _ScoreArrays,
    _Sequences,
)
from .._structs import (
    types as _numbers,
)

names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
types = {dtype: _numbers[name] for dtype, name in names.items()}  # MHA_TYPE_*
library = torch.library.Library("mha", "DEF")  # as long as the module lives
_plain = torch.Tensor, torch.nn.Parameter
_buffer_too_small = 6  # MHA_ERROR_BUFFER_TOO_SMALL


class NotServed(RuntimeError):
    """Why mha does not compute a call, with strict=True."""


class NotServedWarning(UserWarning):
    """Why PyTorch computed a call, and not mha; once for each reason."""


def unserved_tensors(query, key, value):
    """Why mha does not compute with these, or None."""
    # What nearly all calls are, first.
    if not (
        type(query) is type(key) is type(value) is torch.Tensor
        and query.dtype is key.dtype is value.dtype
        and query.dtype in types
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.layout is key.layout is value.layout is torch.strided
        and not (query.is_nested or key.is_nested or value.is_nested)
    ):
        for tensor in query, key, value:
            if not isinstance(tensor, torch.Tensor):  # PyTorch says which argument it is
                return f"a tensor is {_kind(tensor)}"
            if tensor.is_nested:
                return "a tensor is nested"
            if (
                type(tensor) not in _plain
                and not torch.compiler.is_compiling()
                and not isinstance(tensor, FakeTensor)
            ):
                return f"a tensor is a {type(tensor).__name__}"
            if not tensor.is_cpu:
                return f"a tensor is on the device {tensor.device.type!r}"
            if tensor.layout is not torch.strided:
                return f"a tensor has the layout {tensor.layout}"
            if tensor.dtype not in types:
                return f"tensors are {tensor.dtype}; it computes float32, float16 and bfloat16"
            if tensor.dtype is not query.dtype:
                return f"tensors are {query.dtype} and {tensor.dtype}"
    # An operator gets them resolved.
    if not torch.compiler.is_compiling() and (query.is_neg() or key.is_neg() or value.is_neg()):
        return (
            "a tensor is a view of the negative of what is stored, as the imaginary part of a"
            " conjugate is"
        )
    if torch.is_grad_enabled():
        if query.requires_grad or key.requires_grad or value.requires_grad:
            return (
                "a tensor requires a gradient; torch.no_grad() or torch.inference_mode() says that"
                " none is wanted"
            )
    if not torch.compiler.is_compiling() and (
        forward_ad._current_level >= 0 or _functorch() is not None
    ):
        return "this is under forward-mode differentiation, vmap or another transform of torch.func"
    return None


def is_eager():
    """Whether nobody looks on who is to see an operator: then its function is called by itself,
    which saves 6 us."""
    return not (
        torch.compiler.is_compiling() or _dispatch_modes() or _tracing() is not None or _profiled()
    )


_functorch = torch._C._functorch.peek_interpreter_stack
_dispatch_modes, _tracing, _profiled = (
    torch._C._len_torch_dispatch_stack,
    torch._C._get_tracing_state,
    torch._C._autograd._profiler_enabled,
)


_said: set = set()


def refuse(what, reason, strict):
    if strict:
        raise NotServed(f"{what} is not computed by mha: {reason}")


def warn(what, reason):
    """Says it once. Not while torch.compile looks on, which would break its graph."""
    if not torch.compiler.is_compiling() and (what, reason) not in _said:
        _said.add((what, reason))
        warnings.warn(
            f"{what} is computed by PyTorch and not by mha: {reason}",
            NotServedWarning,
            stacklevel=3,
        )


class Calls(threading.local):
    """What a thread makes its calls with: the structs, and memory to compute in, which grows and
    stays."""

    def __init__(self):
        (
            self.attention,
            self.forward,
            self.linear,
            self.masks,
            self.sequences,
            self.outputs,
            self.shape,
        ) = map(
            _new,
            (
                _AttentionArgs,
                _ForwardArgs,
                _LinearArgs,
                _ScoreArrays,
                _Sequences,
                _Outputs,
                _Config,
            ),
        )
        (
            self.at_attention,
            self.at_forward,
            self.at_linear,
            self.at_masks,
            self.at_sequences,
            self.at_outputs,
            self.at_shape,
        ) = map(
            ctypes.addressof,
            (
                self.attention,
                self.forward,
                self.linear,
                self.masks,
                self.sequences,
                self.outputs,
                self.shape,
            ),
        )
        self.storage, self.layer = None, ctypes.c_void_p()
        self.error, self.bytes = _Error(), ctypes.c_size_t()
        self.at_error, self.at_bytes = ctypes.byref(self.error), ctypes.addressof(self.bytes)
        self.workspace = torch.empty(4096, dtype=torch.uint8, device="cpu")
        self.at_workspace, self.room = self.workspace.data_ptr(), 4096

    def again(self, status, workspace, call, *arguments):
        """After a call that failed: with more memory if that is what it lacked. Nothing had been
        written."""
        if status == _buffer_too_small:
            status = workspace(*arguments, self.at_bytes, self.at_error)
            if not status:
                self.room = self.bytes.value
                self.workspace = torch.empty(self.room, dtype=torch.uint8, device="cpu")
                self.at_workspace = self.workspace.data_ptr()
                status = call(*arguments, self.at_workspace, self.room, self.at_error)
        if status:
            self.fail(status)

    def fail(self, status):
        raise Error(
            self.error.message.decode(),
            status,
            _library._loaded().mha_status_string(status).decode(),
            self.error.argument,
        )


calls = Calls()


# ---- Packed weights


def check_known(module, classes, attributes=None):
    """Refuses a module that may compute something else than its class does: a subclass, one with
    hooks or a forward of its own, with parts that the class has not, or, where the public
    `attributes` of the class are given, with others."""
    if type(module) not in classes:
        raise NotServed(
            f"the module is a {type(module).__name__}, which may compute something else than"
            f" {classes[0].__name__}"
        )
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        raise NotServed("the module has hooks or a forward of its own, which would not be called")
    known = {"weight", "bias"} if attributes is None else attributes
    names = [
        *module._parameters,
        *module._buffers,
        *module._modules,
        *(vars(module) if attributes else []),
    ]
    strange = [name for name in names if name not in known and not name.startswith("_")]
    if strange:
        raise NotServed(f"the module has {strange[0]!r}, which mha does not know")


def check_parameters(module):
    for name, tensor in module.named_parameters():
        if tensor.dtype not in types or not tensor.is_cpu:
            raise NotServed(
                f"{name} is {tensor.dtype} on the device {tensor.device.type!r}; mha takes float32,"
                " float16 and bfloat16 on the CPU"
            )
        if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
            raise NotServed(
                f"{name} is a {type(tensor.data).__name__} of the layout {tensor.layout}; mha takes"
                " plain tensors"
            )
        if tensor.numel() == 0:
            raise NotServed(f"{name} is {list(tensor.shape)}, without numbers")


def packed_weights(query_dim, num_heads, matrices, biases, **shape):
    """A tensor of bytes: the weights of a layer, packed. Matrices are all of one type; those that
    are None are left out."""
    arrays = {name: _array(tensor) for name, tensor in matrices.items()}
    arrays.update(
        {name: _array(tensor.float()) for name, tensor in biases.items() if tensor is not None}
    )
    shape["type"] = names[next(iter(matrices.values())).dtype]
    packed = _aligned(pack_size(query_dim, num_heads, **arrays, **shape))
    pack(query_dim, num_heads, out=packed.numpy(), **arrays, **shape)
    return packed


def _array(tensor):
    """As the array that the library packs: bfloat16 as its bits."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _aligned(bytes):
    """A tensor of bytes on a border of 64."""
    room = torch.empty(bytes + 64, dtype=torch.uint8, device="cpu")
    first = -room.data_ptr() % 64
    return room[first : first + bytes]


def view(functions, packed):
    """The layer over packed weights, which takes a microsecond, its shape, both of this thread, and
    the bytes that it lies in. Bytes that are no packed layer are an error."""
    if not packed.is_cpu:
        raise ValueError(
            f"the packed weights are on the device {packed.device.type!r}; mha computes on the CPU"
        )
    if packed.data_ptr() % 64 or not packed.is_contiguous():
        packed = _aligned(packed.numel()).copy_(packed)
    if calls.storage is None:
        calls.storage = (ctypes.c_char * functions.mha_layer_view_size())()
    storage = calls.storage
    status = functions.mha_layer_view(
        packed.data_ptr(),
        packed.numel(),
        None,
        ctypes.addressof(storage),
        len(storage),
        ctypes.addressof(calls.layer),
        calls.at_error,
    )
    if not status:
        status = functions.mha_layer_shape(calls.layer.value, calls.at_shape, calls.at_error)
    if status:
        calls.fail(status)
    return calls.layer.value, calls.shape, packed


# ---- Tensors as the library takes them


def neighbours(tensor):
    """The tensor with rows that the library can step over: itself, but where elements of a row are
    not neighbours or rows overlap."""
    shape, strides = tensor.shape, tensor.stride()
    width = shape[-1]
    if (
        width > 1
        and strides[-1] != 1
        or any(
            extent > 1 and 0 < stride < width for extent, stride in zip(shape[:-1], strides[:-1])
        )
    ):
        return tensor.contiguous()
    return tensor


def strides_of(tensor):
    """The strides of all axes but the last: those of axes of one element are replaced, and 0 is
    MHA_BROADCAST."""
    shape, strides = tensor.shape[:-1], tensor.stride()[:-1]
    beyond = max(
        [extent * stride for extent, stride in zip(shape, strides) if extent > 1]
        + [tensor.shape[-1]]
    )
    return [
        (stride or _broadcast) if extent > 1 else beyond for extent, stride in zip(shape, strides)
    ]


def set_masks(arrays, mask, bias, shape):
    """Points the struct to a boolean mask, and to one that is added; either may be None. Returns
    the tensors that it points to: others where elements of a row are not neighbours, as where one
    column stands for all, and for bfloat16, which the library does not add."""
    at_bias, bias_strides, bias_type, at_mask, mask_strides = 0, _no_strides, 0, 0, _no_strides
    if mask is not None:
        mask, mask_strides = _rows(mask, shape)
        at_mask = mask.data_ptr()
    if bias is not None:
        bias, bias_strides = _rows(
            bias if bias.dtype in (torch.float32, torch.float16) else bias.float(), shape
        )
        at_bias, bias_type = bias.data_ptr(), types[bias.dtype]
    _pack_masks(
        arrays, 0, _size_of_arrays, at_bias, bias_type, 0, *bias_strides, 0, at_mask, *mask_strides
    )
    return mask, bias


_pack_masks, _size_of_arrays = _packer(_ScoreArrays, "mask_strides"), ctypes.sizeof(_ScoreArrays)
_no_strides = 0, 0, 0


def _rows(mask, shape):
    """The mask as rows of neighbours, and its strides, of batch, row and head."""
    extents, strides = mask.shape, mask.stride()
    if len(extents) == 2:
        extents, strides = (1, 1, *extents), (0, 0, *strides)
    elif len(extents) == 3:
        extents, strides = (1, *extents), (0, *strides)
    elif len(extents) != 4:
        raise ValueError(f"the mask is {list(extents)}; it must broadcast to {list(shape)}")
    (batch, heads, rows, columns), (whole_batch, whole_heads, whole_rows, whole_columns) = (
        extents,
        shape,
    )
    if not (
        (batch == 1 or batch == whole_batch)
        and (heads == 1 or heads == whole_heads)
        and (rows == 1 or rows == whole_rows)
        and (columns == 1 or columns == whole_columns)
    ):
        raise ValueError(f"the mask is {list(mask.shape)}; it must broadcast to {list(shape)}")
    if (
        columns != whole_columns
        or columns > 1
        and (
            strides[3] != 1
            or rows > 1
            and 0 < strides[2] < columns
            or heads > 1
            and 0 < strides[1] < columns
        )
    ):
        return _rows(mask.expand(*mask.shape[:-1], whole_columns).contiguous(), shape)
    of_batch, of_head, of_row = [
        stride if extent > 1 and stride else _broadcast
        for extent, stride in zip((batch, heads, rows), strides)
    ]
    return mask, (of_batch, of_row, of_head)


_zeros = torch.zeros(64, dtype=torch.int64)


def from_the_first_key(batch):
    """The address of this thread's mha_sequences, of queries that count from the first key: without
    it the last one is at the last key."""
    calls.sequences.q_first_positions = (
        _zeros if batch <= 64 else torch.zeros(batch, dtype=torch.int64)
    )
    return calls.at_sequences
