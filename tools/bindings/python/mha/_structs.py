"""The structs of mha.h, and the names of its numbers; _interface.py has both as text."""

import ctypes
import operator
import struct

import numpy as np

from . import _interface

_c = {
    "size": ctypes.c_size_t,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "ptr": ctypes.c_void_p,
    "out": ctypes.c_void_p,
    "text": ctypes.c_char * 248,
}
_codes = {
    ctypes.c_size_t: "N",
    ctypes.c_int64: "q",
    ctypes.c_uint32: "I",
    ctypes.c_float: "f",
    ctypes.c_void_p: "P",
}


_limits = {"i64": (-(2**63), 2**63 - 1), "i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1)}
_reals = "f32", "f64"


def _kind(value):
    return "None" if value is None else f"of type {type(value).__name__}"


def _number(value, name, kind="i64"):
    """A number as a field or an argument of this kind takes it. ctypes names neither, and would
    cut an integer that is none of the type's down to another one."""
    is_real = kind in _reals
    try:
        if is_real:  # float() reads text, and drops the imaginary part of NumPy's numbers
            is_complex = getattr(getattr(value, "dtype", None), "kind", None) == "c"
            is_other = isinstance(value, (str, bytes, bytearray)) or is_complex
            return float(None if is_other else value)
        number = operator.index(value)
    except (TypeError, ValueError, OverflowError):
        expected = "a number" if is_real else "an integer"
        raise TypeError(f"{name} is {_kind(value)}; it must be {expected}") from None
    least, most = _limits[kind]
    if not least <= number <= most:
        raise ValueError(f"{name} is {value}; the library takes numbers from {least} to {most}")
    return number


def _is_true(value, name):
    if value is True or value is False:
        return value
    is_number = isinstance(value, (int, np.integer, np.bool_))
    if not is_number or value not in (0, 1):
        found = value if is_number else _kind(value)
        raise TypeError(f"{name} is {found}; it must be True or False")
    return bool(value)


def _writeable(array, name):
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(
            f"{name} cannot be written to; pass an array whose flags.writeable is True"
        )
    return array


_from_buffer = ctypes.c_char.from_buffer


def _start(array):
    """As array.ctypes.data, which takes a microsecond longer."""
    if array.flags.carray and array.size:
        return ctypes.addressof(_from_buffer(array))
    return array.ctypes.data


def _address(owner, name):
    """Where an array, a tensor, a struct, a function or what a handle stands for lies."""
    if isinstance(owner, np.ndarray):
        return _start(owner)
    if isinstance(owner, (ctypes.Structure, ctypes.Array, ctypes._SimpleCData)):
        return ctypes.addressof(owner)
    if isinstance(owner, ctypes._CFuncPtr):
        return ctypes.cast(owner, ctypes.c_void_p).value
    if hasattr(owner, "_handle"):
        return owner._handle
    if hasattr(owner, "data_ptr"):
        return owner.data_ptr()
    raise TypeError(
        f"{name} is {owner!r}; it must be the object that lies at an address, so that the object is"
        " kept alive"
    )


class _ReadOnly:
    """An object whose attributes in _fixed, from which calls take sizes and addresses, stay as they
    were made. Each call checks the others that it reads."""

    __slots__ = ()
    _fixed: tuple = ()

    def __setattr__(self, name, value):
        if name in self._fixed and name in self.__dict__:
            raise AttributeError(f"{name} of a {type(self).__name__} is read-only; make another")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        if name in self._fixed:
            raise AttributeError(f"{name} of a {type(self).__name__} is read-only; make another")
        super().__delattr__(name)


class _NotCopied(_ReadOnly):
    """What has an address inside: a copy of it would use the memory of the first one, and use it
    after that one is gone. _instead is what to do."""

    __slots__ = ()
    _instead: str

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, for it points to memory;"
            f" {self._instead}"
        )


_set_field = ctypes.Structure.__setattr__


class _Checked(ctypes.Structure):
    """A struct that owns what it points to: a pointer is set to an object, never to an address, and
    the object lives as long as the struct. A struct inside another one keeps its objects with the
    outermost one, whose memory it lies in."""

    __slots__ = ("_objects_at",)  # which makes a name that is no field an error

    def __setattr__(self, name, value):
        kind = self._kinds.get(name)
        if kind in ("ptr", "out"):
            if kind == "out":
                _writeable(value, name)
            address = None if value is None else _address(value, name)
            owners, at = self._owners()
            owners[at + getattr(type(self), name).offset] = value
            value = address
        elif isinstance(kind, type):
            if type(value) is not kind:
                raise TypeError(f"{name} is {value!r}; it must be a {kind.__name__}")
            (owners, at), (given, given_at), size = (
                self._owners(),
                value._owners(),
                ctypes.sizeof(kind),
            )
            at += getattr(type(self), name).offset
            of_value = {
                at + offset - given_at: owner
                for offset, owner in given.items()
                if given_at <= offset < given_at + size
            }
            for offset in [offset for offset in owners if at <= offset < at + size]:
                del owners[offset]
            owners.update(of_value)
        elif kind is not None and not (
            type(value) is int
            and 0 <= value < 2**31  # which all of the types hold
            or type(value) is float
            and kind in _reals
        ):
            value = _number(value, name, kind)
        _set_field(self, name, value)

    def _owners(self):
        """What the outermost struct points to, by the offset of the pointer, and the offset of this
        struct."""
        outermost, base = self, self._b_base_
        while base is not None:
            outermost, base = base, base._b_base_
        try:
            owners = outermost._objects_at
        except AttributeError:
            owners = {}
            _set_field(outermost, "_objects_at", owners)
        return owners, (
            0 if outermost is self else ctypes.addressof(self) - ctypes.addressof(outermost)
        )

    def _object(self, name):
        """What a pointer was set to; None if it was not."""
        owners, at = self._owners()
        return owners.get(at + getattr(type(self), name).offset)


def _struct(name, lines):
    """A struct, of lines such as "i64 batch n_q": a type and the names of the fields that have it.
    "out" is a pointer to what the library writes."""
    pairs = [(field, kind) for line in lines for kind, *names in [line.split()] for field in names]
    kinds = {field: kind if kind in _c else _named[kind] for field, kind in pairs}
    declared = [(field, _c.get(kind, kind)) for field, kind in kinds.items()]
    if "call" in kinds:  # whose fields are also those of the struct
        kinds.update(kinds["call"]._kinds)
    return type(
        name,
        (_Checked,),
        {
            "_anonymous_": ["call"] if "call" in kinds else [],
            "_fields_": declared,
            "_kinds": {field: kind for field, kind in kinds.items() if kind not in _unchecked},
            "__slots__": (),
        },
    )


_unchecked = {"size", "u64", "text"}
_named: dict = {}
for _text in _interface.structs.replace("\n  ", " ").splitlines():
    _name, _lines = _text.split(": ")
    _named[_name] = _struct(_name, _lines.split(", "))
structs = list(_named.values())
_Strides = _named["mha_strides"]
_Input = _named["mha_input"]
_Output = _named["mha_output"]
_Matrix = _named["mha_matrix"]
_Format = _named["mha_weight_format"]
_Call = _named["mha_call"]
_Error = _named["mha_error"]
_Scheduler = _named["mha_scheduler"]
_Config = _named["mha_layer_config"]
_Weights = _named["mha_layer_weights"]
_AllocatorStruct = _named["mha_allocator"]
_Options = _named["mha_layer_options"]
_CacheConfig = _named["mha_kv_cache_config"]
_Pool = _named["mha_kv_pool"]
_Sequences = _named["mha_sequences"]
_Rope = _named["mha_rope"]
_RopeConfig = _named["mha_rope_config"]
_Norm = _named["mha_norm"]
_ScoreOptions = _named["mha_score_options"]
_ScoreArrays = _named["mha_score_arrays"]
_Outputs = _named["mha_outputs"]
_ForwardArgs = _named["mha_forward_args"]
_AttentionArgs = _named["mha_attention_args"]
_PartialsArgs = _named["mha_partials_args"]
_ChooseKeysArgs = _named["mha_choose_keys_args"]
_CallInfo = _named["mha_call_info"]
_LinearWeights = _named["mha_linear_weights"]
_LinearArgs = _named["mha_linear_args"]
_RecurrentArgs = _named["mha_recurrent_args"]
_CausalConvArgs = _named["mha_causal_conv_args"]

_numbers = {
    name: int(number) for text in _interface.constants.split() for name, number in [text.split("=")]
}


def _family(prefix, names=None):
    """{"f32": MHA_TYPE_F32, ...}: all constants of a prefix, or those with these names."""
    found = {
        name[len(prefix) :].lower(): number
        for name, number in _numbers.items()
        if name.startswith(prefix)
    }
    return {name: found[name] for name in names.split()} if names else found


types = _family("TYPE_")
given_types = _family("TYPE_", "f32 f16 bf16 int8 int4")  # the others are of packed weights
scale_types = _family("TYPE_", "f32 f16 int8")
layouts = _family("LAYOUT_")
gates = _family("FUNCTION_", "none sigmoid softplus")
activations = _family("FUNCTION_", "none silu")
arithmetics = _family("ARITHMETIC_")
_attention_arithmetics = _family("ARITHMETIC_", "f32 int16")
# The types that weights of floats can get and an arithmetic multiplies, unless it takes all.
multiplied = {"int8": ("int8", "int4"), "int16": ("int8", "int4"), "bf16": ("bf16",)}
score_columns = _family("COLUMNS_")
score_segments = _family("SEGMENTS_")
instruction_set_names = _family("INSTRUCTION_SET_")
cache_kinds = _family("CACHE_KIND_")
cache_values = _family("CACHE_VALUES_")
rope_styles = _family("ROPE_")
# MHA_EMPTY, an extent of none, and MHA_BROADCAST, a stride of what is the same for all.
_empty, _broadcast = _numbers["EMPTY"], _numbers["BROADCAST"]
_gate_in_w_q = _numbers["GATE_IN_W_Q"]
_causal, _window_left, _window_right, _equal_scores = (
    _numbers[name] for name in ("CAUSAL", "WINDOW_LEFT", "WINDOW_RIGHT", "EQUAL_SCORES")
)
_norm_layer, _norm_all_heads, _norm_after_rope, _norm_values, _norm_after_gate = _family(
    "NORM_", "layer all_heads after_rope values after_gate"
).values()
_optional_outputs = [field for field, _ in _Outputs._fields_[1:] if field != "partials"]


# The fields of mha_weight_format by the names that they have beside other types.
format_fields = {
    "weight_type": "type",
    "group_size": "group_size",
    "scale_type": "scale_type",
    "arithmetic": "arithmetic",
}
_somewhere = ctypes.c_char()  # for a pointer that must not be NULL, to what nobody reads or writes


def _new(structure, **fields):
    return structure(struct_size=ctypes.sizeof(structure), **fields)


class _Numbers(dict):
    """The numbers of a struct by name, which cannot be changed; a copy of them can."""

    def _refuse(self, *_, **__):
        raise TypeError("these numbers are read-only; change a copy, dict(...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self):
        return dict, (dict(self),)


def _fields(struct):
    """The numbers of a struct by name, and those of the weight format."""
    numbers = _Numbers()
    for field, kind in struct._fields_[1:]:
        value = getattr(struct, field)
        given = {field: value}
        if kind is _Format:
            given = {name: getattr(value, of) for name, of in format_fields.items()}
        dict.update(numbers, given)
    return numbers


def _packer(structure, last):
    """pack_into(struct, 0, field, field, ...) of the fields up to and with `last`, and of a struct
    inside its own fields in turn: a tenth of the time that setting them one by one takes."""
    names = [name for name, _ in structure._fields_]
    return struct.Struct(
        "".join(_code(kind) for _, kind in structure._fields_[: names.index(last) + 1])
    ).pack_into


def _code(kind):
    return _codes[kind] if kind in _codes else "".join(_code(inner) for _, inner in kind._fields_)
