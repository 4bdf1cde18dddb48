"""The structs of mha.h, field by field, and the names of its numbers. tests/bindings/python_test.py
compares them with the header."""

import ctypes
import operator
import struct

import numpy as np

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


def _struct(name, *fields):
    """A struct, of lines such as "i64 batch n_q": a type and the names of the fields that have it.
    "out" is a pointer to what the library writes."""
    pairs = [(field, kind) for line in fields for kind, *names in [line.split()] for field in names]
    kinds = {field: kind if kind in _c else _nested[kind] for field, kind in pairs}
    declared = [(field, _c.get(kind, kind)) for field, kind in kinds.items()]
    if "call" in kinds:  # whose fields are also those of the struct
        kinds.update(_Call._kinds)
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
_nested: dict = {}  # the structs that others have inside
_Strides = _nested["strides"] = _struct("mha_strides", "i64 batch row head")
_Input = _nested["input"] = _struct(
    "mha_input", "ptr data", "u32 type reserved", "strides strides", "ptr reserved_pointer"
)
_Output = _nested["output"] = _struct(
    "mha_output", "out data", "u32 type reserved", "strides strides"
)
_Matrix = _nested["matrix"] = _struct(
    "mha_matrix", "ptr data bias scales offsets", "i64 row_stride"
)
_Format = _nested["format"] = _struct(
    "mha_weight_format", "u32 type group_size scale_type arithmetic"
)
_Call = _nested["call"] = _struct(
    "mha_call",
    "u32 flags reserved",
    "i64 window_left window_right",
    "ptr rope norm score scheduler",
    "i64 batch n_q n_kv",
    "ptr sequences score_arrays cache cache_read outputs",
)
_Error = _struct("mha_error", "u32 status argument", "text message")
_Scheduler = _struct("mha_scheduler", "ptr context", "u32 num_threads reserved", "ptr parallel_for")
_Config = _struct(
    "mha_layer_config",
    "size struct_size",
    "i64 query_dim key_dim value_dim output_dim",
    "i64 num_heads num_kv_heads head_dim head_dim_v",
    "f32 scale",
    "format format",
    "u32 gate",
    "i64 gate_dim",
)
_Weights = _struct(
    "mha_layer_weights",
    "size struct_size",
    "u32 layout type gate_place",
    "matrix w_q w_k w_v w_qkv w_o w_g",
)
_AllocatorStruct = _struct("mha_allocator", "ptr context allocate release")
_Options = _struct(
    "mha_layer_options", "size struct_size", "u32 instruction_set reserved", "ptr sgemm allocator"
)
_CacheConfig = _struct(
    "mha_kv_cache_config",
    "size struct_size",
    "i64 num_sequences capacity num_kv_heads head_dim head_dim_v",
    "u32 k_type v_type kind value_place",
    "i64 block_positions num_blocks",
)
_Sequences = _struct(
    "mha_sequences",
    "size struct_size",
    "i64 count",
    "ptr cu_seqlens_q cu_seqlens_kv q_lengths kv_lengths q_first_rows kv_first_rows",
    "ptr q_first_positions cache_sequences rope_q_positions rope_k_positions",
)
_Rope = _struct(
    "mha_rope",
    "size struct_size",
    "u32 style reserved",
    "i64 dims offset num_positions",
    "ptr cos sin",
    "i64 table_stride",
)
_RopeConfig = _struct(
    "mha_rope_config",
    "size struct_size",
    "i64 dims num_positions first_position",
    "f64 base attention_factor linear_factor",
    "i64 original_positions",
    "f64 yarn_factor yarn_beta_fast yarn_beta_slow",
    "u32 yarn_unrounded mrope_interleaved",
    "f64 llama3_factor llama3_low_freq_factor llama3_high_freq_factor ntk_factor",
    "i64 ntk_positions",
    "ptr pair_factors mrope_section mrope_positions",
)
_Norm = _struct(
    "mha_norm",
    "size struct_size",
    "u32 flags",
    "f32 epsilon",
    "ptr q_weight k_weight q_bias k_bias",
    "i64 head_stride",
    "u32 context_flags",
    "f32 context_epsilon",
    "ptr context_weight context_bias",
    "i64 context_head_stride",
)
_ScoreOptions = _struct(
    "mha_score_options",
    "size struct_size",
    "f32 softcap",
    "u32 reserved",
    "ptr alibi_slopes sinks head_scales relative_bias",
    "i64 relative_left relative_right",
)
_ScoreArrays = _struct(
    "mha_score_arrays",
    "size struct_size",
    "input bias",
    "ptr mask",
    "strides mask_strides",
    "u32 column_keys segments",
    "i64 num_columns",
    "ptr q_segments kv_segments q_scales relative_rows",
    "strides relative_rows_strides",
    "ptr chosen_keys",
    "strides chosen_keys_strides",
    "i64 num_chosen chosen_block",
)
_Outputs = _struct(
    "mha_outputs",
    "size struct_size",
    "out lse partials q k v context scores scaled_scores softcapped_scores masked_scores"
    " attention_weights",
)
_ForwardArgs = _struct(
    "mha_forward_args",
    "size struct_size",
    "call call",
    "input query key value",
    "output output",
)
_AttentionArgs = _struct(
    "mha_attention_args",
    "size struct_size",
    "call call",
    "i64 num_heads num_kv_heads head_dim head_dim_v",
    "f32 scale",
    "u32 instruction_set",
    "input q k v",
    "output output",
    "i64 kv_first_position",
)
_PartialsArgs = _struct(
    "mha_partials_args",
    "size struct_size",
    "i64 batch num_heads n_q head_dim_v",
    "u32 instruction_set reserved",
    "ptr partials sinks head_scales",
    "output output",
    "out lse",
)
_ChooseKeysArgs = _struct(
    "mha_choose_keys_args",
    "size struct_size",
    "ptr attention",
    "input weights",
    "i64 num_chosen",
    "out chosen_keys index_scores",
)
_CallInfo = _struct(
    "mha_call_info",
    "size struct_size",
    "u32 instruction_set back_end contract num_threads",
    "size workspace_bytes packed_bytes",
    "u64 operations bytes",
)
_LinearWeights = _struct(
    "mha_linear_weights",
    "size struct_size",
    "i64 input_dim output_dim",
    "matrix w",
    "u32 layout type",
    "format format",
)
_LinearArgs = _struct(
    "mha_linear_args",
    "size struct_size",
    "i64 rows",
    "input x residual",
    "output output",
    "ptr scheduler",
)
_RecurrentArgs = _struct(
    "mha_recurrent_args",
    "size struct_size",
    "i64 num_q_heads num_k_heads num_v_heads head_dim head_dim_v decay_dim",
    "f32 scale norm_epsilon",
    "ptr a_log dt_bias",
    "u32 beta_function instruction_set",
    "ptr scheduler",
    "i64 batch rows",
    "input q k v decay beta",
    "output output",
    "ptr sequences state",
    "out state_out snapshots",
    "i64 num_snapshots",
)
_CausalConvArgs = _struct(
    "mha_causal_conv_args",
    "size struct_size",
    "i64 channels kernel_size",
    "ptr weights bias",
    "u32 activation instruction_set",
    "ptr scheduler",
    "i64 batch rows",
    "input x",
    "output output",
    "ptr sequences state",
    "out state_out",
)
structs = [
    *_nested.values(),
    _Error,
    _Scheduler,
    _Config,
    _Weights,
    _AllocatorStruct,
    _Options,
    _CacheConfig,
    _Sequences,
    _Rope,
    _RopeConfig,
    _Norm,
    _ScoreOptions,
    _ScoreArrays,
    _Outputs,
    _ForwardArgs,
    _AttentionArgs,
    _PartialsArgs,
    _ChooseKeysArgs,
    _CallInfo,
    _LinearWeights,
    _LinearArgs,
    _RecurrentArgs,
    _CausalConvArgs,
]

types = {"f32": 1, "f16": 2, "bf16": 3, "int8": 4, "int4": 5}
scale_types = {"f32": 1, "f16": 2}
layouts = {"in_out": 0, "out_in": 1}
gates = {"none": 0, "sigmoid": 1, "softplus": 2}
activations = {"none": 0, "silu": 3}
arithmetics = {"f32": 0, "int8": 0x501, "int16": 0x502}
score_columns = {"all_keys": 0, "new_keys": 0x301}
score_segments = {"within": 0, "also": 0x401}
_sets = "auto scalar avx2 avx512 neon avx2_vnni avx512_vnni neon_dotprod neon_i8mm"
instruction_set_names = {name: number for number, name in enumerate(_sets.split())}
cache_kinds = {"contiguous": 0, "ring": 0x101, "paged": 0x102}
cache_values = {"own": 0, "in_keys": 0x201}
rope_styles = {"half": 0, "interleaved": 1}
# MHA_EMPTY, an extent of none, and MHA_BROADCAST, a stride of what is the same for all.
_empty = _broadcast = -(2**63)
_gate_in_w_q = 0x801  # MHA_GATE_IN_W_Q
_causal, _window_left, _window_right, _equal_scores = 1, 2, 4, 8  # MHA_CAUSAL and others
# MHA_NORM_LAYER and others.
_norm_layer, _norm_all_heads, _norm_after_rope, _norm_values, _norm_after_gate = (
    0x100,
    0x200,
    0x400,
    0x800,
    0x1000,
)
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
