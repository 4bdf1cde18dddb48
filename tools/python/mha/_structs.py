"""The structs of mha.h, field by field, and the names of its numbers. tests/adapters/python_test.py compares them with the header."""

import ctypes
import operator
import struct

import numpy as np

_c = {"size": ctypes.c_size_t, "i64": ctypes.c_int64, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "f32": ctypes.c_float,
      "f64": ctypes.c_double, "ptr": ctypes.c_void_p, "out": ctypes.c_void_p, "text": ctypes.c_char * 248}
_codes = {ctypes.c_size_t: "N", ctypes.c_int64: "q", ctypes.c_uint32: "I", ctypes.c_float: "f", ctypes.c_void_p: "P"}


_limits = {"i64": (-2**63, 2**63 - 1), "u32": (0, 2**32 - 1)}


def _in_range(name, value, kind):
    """Raises where an integer is none of the type's: ctypes would cut it down to another one."""
    least, most = _limits[kind]
    if hasattr(value, "__index__") and not least <= operator.index(value) <= most:
        raise ValueError(f"{name} is {value}; the library takes numbers from {least} to {most}")


def _writeable(array, name):
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name} cannot be written to; pass an array whose flags.writeable is True")
    return array


def _address(owner, name):
    """Where an array, a tensor, a struct, a function or what a handle stands for lies."""
    if isinstance(owner, np.ndarray):
        return owner.ctypes.data
    if isinstance(owner, (ctypes.Structure, ctypes.Array, ctypes._SimpleCData)):
        return ctypes.addressof(owner)
    if isinstance(owner, ctypes._CFuncPtr):
        return ctypes.cast(owner, ctypes.c_void_p).value
    if hasattr(owner, "_handle"):
        return owner._handle
    if hasattr(owner, "data_ptr"):
        return owner.data_ptr()
    raise TypeError(f"{name} is {owner!r}; it must be the object that lies at an address, so that the object is kept alive")


_set_field = ctypes.Structure.__setattr__


class _Checked(ctypes.Structure):
    """A struct that owns what it points to: a pointer is set to an object, never to an address, and the object lives as long as the struct."""

    __slots__ = ("_owners",)  # which makes a name that is no field an error

    def __setattr__(self, name, value):
        kind = self._kinds.get(name)
        if kind in ("ptr", "out"):
            if kind == "out":
                _writeable(value, name)
            address = None if value is None else _address(value, name)
            try:
                self._owners[name] = value
            except AttributeError:
                _set_field(self, "_owners", {name: value})
            value = address
        elif kind is not None and not (type(value) is int and 0 <= value < 2**32):  # which all of the types hold
            _in_range(name, value, kind)
        _set_field(self, name, value)


def _struct(name, *fields):
    """A struct, of lines such as "i64 batch n_q": a type and the names of the fields that have it. "out" is a pointer to what the library writes."""
    pairs = [(field, kind) for line in fields for kind, *names in [line.split()] for field in names]
    kinds = {field: kind for field, kind in pairs if kind in ("ptr", "out", *_limits)}
    return type(name, (_Checked,), {"_fields_": [(field, _c[kind]) for field, kind in pairs], "_kinds": kinds, "__slots__": ()})


_Error = _struct("mha_error", "u32 status argument", "text message")
_Scheduler = _struct("mha_scheduler", "ptr context", "u32 num_threads reserved", "ptr parallel_for")
_Config = _struct("mha_layer_config", "size struct_size", "i64 query_dim num_heads num_kv_heads head_dim head_dim_v",
                  "i64 key_dim value_dim output_dim", "f32 scale", "u32 weight_type gate arithmetic", "i64 gate_dim")
_Weights = _struct("mha_layer_weights", "size struct_size", "u32 layout type", "ptr w_q w_k w_v w_qkv w_o w_g",
                   "ptr b_q b_k b_v b_qkv b_o b_g", "i64 w_q_stride w_k_stride w_v_stride w_qkv_stride w_o_stride w_g_stride",
                   "ptr w_q_scales w_k_scales w_v_scales w_qkv_scales w_o_scales w_g_scales")
_AllocatorStruct = _struct("mha_allocator", "ptr context allocate release")
_Options = _struct("mha_layer_options", "size struct_size", "u32 instruction_set reserved", "ptr sgemm allocator")
_CacheConfig = _struct("mha_kv_cache_config", "size struct_size", "i64 num_sequences capacity num_kv_heads head_dim head_dim_v",
                       "u32 k_type v_type kind values", "i64 block_positions num_blocks")
_Rope = _struct("mha_rope", "size struct_size", "u32 style reserved", "i64 dims num_positions", "ptr cos sin", "i64 table_stride",
                "ptr q_positions k_positions", "i64 offset")
_RopeConfig = _struct("mha_rope_config", "size struct_size", "i64 dims num_positions first_position", "f64 base linear_factor yarn_factor",
                      "f64 yarn_beta_fast yarn_beta_slow llama3_factor llama3_low_freq_factor llama3_high_freq_factor ntk_factor",
                      "i64 ntk_positions", "ptr pair_factors", "i64 original_positions", "f64 attention_factor",
                      "u32 yarn_unrounded reserved", "ptr mrope_section mrope_positions", "i64 mrope_interleaved")
_Norm = _struct("mha_norm", "size struct_size", "u32 flags", "f32 epsilon", "ptr q_weight k_weight q_bias k_bias", "i64 head_stride",
                "u32 context_flags", "f32 context_epsilon", "ptr context_weight context_bias", "i64 context_head_stride")
_Taps = _struct("mha_taps", "size struct_size", "out q k v scores scaled_scores softcapped_scores masked_scores context")
_ScoreOptions = _struct("mha_score_options", "size struct_size", "f32 softcap", "u32 bias_type", "ptr alibi_slopes sinks bias",
                        "i64 bias_batch_stride bias_head_stride bias_row_stride", "ptr mask",
                        "i64 mask_batch_stride mask_head_stride mask_row_stride", "u32 columns groups", "i64 num_columns",
                        "ptr q_groups kv_groups", "i64 q_groups_stride kv_groups_stride", "ptr q_scales", "i64 q_scales_stride",
                        "ptr relative_bias", "i64 relative_left relative_right", "ptr head_scales relative_rows",
                        "i64 relative_rows_batch_stride relative_rows_head_stride relative_rows_row_stride", "ptr chosen_keys",
                        "i64 chosen_keys_batch_stride chosen_keys_head_stride chosen_keys_row_stride num_chosen chosen_block")
_ForwardArgs = _struct("mha_forward_args", "size struct_size", "i64 batch n_q n_kv", "ptr query key value", "out output", "u32 input_type output_type",
                       "i64 query_batch_stride query_row_stride key_batch_stride key_row_stride value_batch_stride value_row_stride",
                       "i64 output_batch_stride output_row_stride", "u32 flags reserved", "i64 window_left window_right",
                       "ptr score q_start q_lengths kv_lengths kv_start cu_seqlens_q cu_seqlens_kv norm rope cache cache_sequences",
                       "out lse attention_weights", "ptr taps scheduler")
_AttentionArgs = _struct("mha_attention_args", "size struct_size", "i64 batch n_q n_kv num_heads num_kv_heads head_dim head_dim_v",
                         "ptr q k v", "out output", "u32 q_type k_type v_type output_type", "i64 q_batch_stride q_row_stride q_head_stride",
                         "i64 k_batch_stride k_row_stride k_head_stride v_batch_stride v_row_stride v_head_stride",
                         "i64 output_batch_stride output_row_stride output_head_stride", "u32 flags", "f32 scale",
                         "i64 window_left window_right",
                         "ptr score q_start q_lengths kv_lengths kv_start cu_seqlens_q cu_seqlens_kv norm rope cache cache_sequences",
                         "out lse attention_weights", "ptr taps scheduler", "u32 instruction_set reserved", "out states", "i64 kv_position")
_StatesArgs = _struct("mha_states_args", "size struct_size", "i64 batch num_heads n_q head_dim_v", "ptr states sinks head_scales", "out output",
                      "u32 output_type instruction_set", "out lse")
_ChooseKeysArgs = _struct("mha_choose_keys_args", "size struct_size", "ptr attention weights",
                          "i64 weights_batch_stride weights_row_stride num_chosen", "out chosen_keys index_scores")
_CallInfo = _struct("mha_call_info", "size struct_size", "u32 instruction_set back_end contract num_threads",
                    "size workspace_bytes packed_bytes", "u64 operations bytes")
_LinearWeights = _struct("mha_linear_weights", "size struct_size", "i64 input_dim output_dim", "u32 layout type", "ptr w bias", "i64 w_stride",
                         "ptr w_scales", "u32 weight_type arithmetic")
_LinearArgs = _struct("mha_linear_args", "size struct_size", "i64 rows", "ptr x residual", "out output", "u32 input_type output_type",
                      "i64 x_row_stride residual_row_stride output_row_stride", "ptr scheduler")
structs = [_Error, _Scheduler, _Config, _Weights, _AllocatorStruct, _Options, _CacheConfig, _Rope, _RopeConfig, _Norm, _ScoreOptions, _Taps,
           _ForwardArgs, _AttentionArgs, _StatesArgs, _ChooseKeysArgs, _CallInfo, _LinearWeights, _LinearArgs]

types = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3, "int4": 4}
layouts = {"in_out": 0, "out_in": 1}
gates = {"none": 0, "sigmoid": 1, "softplus": 2}
arithmetics = {"f32": 0, "int8": 1, "int16": 2}
score_columns = {"all_keys": 0, "new_keys": 1}
score_groups = {"within": 0, "also": 1}
instruction_set_names = {"auto": 0, "scalar": 1, "avx2": 2, "avx512": 3, "neon": 4, "avx2_vnni": 5, "avx512_vnni": 6, "neon_dotprod": 7,
                         "neon_i8mm": 8}
cache_kinds = {"contiguous": 0, "ring": 1, "paged": 2}
cache_values = {"own": 0, "in_keys": 1}
rope_styles = {"half": 0, "interleaved": 1}
_empty = _broadcast = -2 ** 63  # MHA_EMPTY, an extent of none, and MHA_BROADCAST, a stride of what is the same for all
_causal, _window_left, _window_right, _padding_left, _cache_read = 1, 2, 4, 8, 16
_taps = [field for field, _ in _Taps._fields_[1:]]
_optional_outputs = ["attention_weights", "lse", *_taps]


_somewhere = ctypes.c_char()  # for a pointer that must not be NULL, to what nobody reads or writes


def _new(structure, **fields):
    return structure(struct_size=ctypes.sizeof(structure), **fields)


def _packer(structure, last):
    """pack_into(struct, 0, field, field, ...) of the fields up to and with `last`: a tenth of the time that setting them one by one takes."""
    names, codes = zip(*[(name, _codes[kind]) for name, kind in structure._fields_])
    return struct.Struct("".join(codes[:names.index(last) + 1])).pack_into
