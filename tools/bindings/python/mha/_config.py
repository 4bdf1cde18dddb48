"""What config.json of a model says about its attention. Unknown keys are refused."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_kinds = {
    "number": (
        "a number from -3.4e38 to 3.4e38",
        lambda given: type(given) in (int, float) and abs(given) <= 3.4028235e38,
    ),
    "share": (
        "a number above 0 and up to 1",
        lambda given: type(given) in (int, float) and 0 < given <= 1,
    ),
    "count": (
        "a whole number of at least 1",
        lambda given: type(given) is int and 1 <= given < 2**31,
    ),
    "flag": ("true or false", lambda given: type(given) is bool),
    "string": ("a string", lambda given: type(given) is str),
    "strings": (
        "a list of strings",
        lambda given: type(given) is list and all(type(word) is str for word in given),
    ),
}


class Family(NamedTuple):
    """The attention of a model_type, as far as its configuration does not say it. windows: which
    layers have one without layer_types; null says that a key of needed has no value."""

    is_causal: bool = True
    rotates: bool = True
    has_norm: bool = False
    norm_adds_one: bool = False
    has_sinks: bool = False
    windows: str = "none"
    needed: tuple[str, ...] = ()


_softcap, _window = "attn_logit_softcapping", "sliding_window"
families = {
    "bert": Family(is_causal=False, rotates=False),
    "gemma": Family(),
    "gemma2": Family(windows="alternate", needed=(_softcap, _window)),
    "gemma3_text": Family(has_norm=True, norm_adds_one=True, windows="listed", needed=(_window,)),
    "gpt2": Family(rotates=False),
    "gpt_oss": Family(has_sinks=True, windows="listed", needed=("rope_scaling", _window)),
    "llama": Family(),
    "mistral": Family(windows="all", needed=(_window,)),
    "olmo2": Family(has_norm=True),
    "phi3": Family(windows="all"),
    "qwen2": Family(windows="listed"),
    "qwen3": Family(has_norm=True, windows="listed"),
    "roberta": Family(is_causal=False, rotates=False),
}

# What changes nothing in the attention, or what the tensors show.
_harmless = """_name_or_path activation_function architectures attention_bias attention_dropout
    attention_probs_dropout_prob attn_pdrop auto_map bos_token_id cache_implementation
    classifier_dropout cls_token_id dtype embd_pdrop eos_token_id experts_per_token
    final_logit_softcapping gradient_checkpointing hidden_act hidden_activation
    hidden_dropout_prob id2label initial_context_length initializer_range intermediate_size
    label2id layer_norm_eps layer_norm_epsilon mask_token_id max_position_embeddings
    max_window_layers mlp_bias n_ctx n_inner n_layer n_positions num_experts_per_tok
    num_hidden_layers num_local_experts output_past output_router_logits pad_token_id
    pretraining_tp problem_type reorder_and_upcast_attn resid_pdrop rms_norm_eps
    router_aux_loss_coef sep_token_id summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj swiglu_limit task_specific_params
    tie_word_embeddings torch_dtype transformers_version type_vocab_size unk_token_id
    use_cache vocab_size""".split()
# In quantization_config; the tensors show group_size, desc_act, sym and zero_point.
_harmless_quantised = {
    "awq": """group_size zero_point modules_to_not_convert backend do_fuse exllama_config
        modules_to_fuse fuse_max_seq_len""",
    "gptq": """group_size desc_act sym damp_percent damp_auto_increment true_sequential
        static_groups model_name_or_path model_file_base_name lm_head meta mse pack_dtype dataset
        tokenizer use_cuda_fp16 model_seqlen block_name_to_quantize
        module_name_preceding_first_block batch_size pad_token_id use_exllama disable_exllama
        max_input_length exllama_config cache_block_outputs modules_in_block_to_quantize""",
    "compressed-tensors": "format ignore quantization_status global_compression_ratio version",
}
_advice = "; if it does not affect attention, remove it from a copy and pass the copy with --config"


def parse_json(path, text):
    """Each key stands in its object once."""

    def unique(pairs):
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{path}: has {quoted(twice)} twice in one object")
        return made

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    except RecursionError:
        raise ValueError(f"{path}: has JSON that is nested too deep") from None


def quoted(word):
    """'word', shortened if it is long."""
    word = str(word)
    return f"'{word[:120]}{'...' if len(word) > 120 else ''}'"


class Settings:
    """A JSON object. Each key is taken once, and finish refuses those that nobody took; null stands
    for an absent key. name begins the sentences."""

    def __init__(self, name, given):
        if not isinstance(given, dict):
            raise ValueError(f"{name}: is not a JSON object")
        self.name, self.given, self.known = name, given, set()

    def has(self, key):
        return self.given.get(key) is not None

    def take(self, key, kind, default=None):
        self.known.add(key)
        if not self.has(key):
            return default
        expected, is_fine = _kinds[kind]
        if not is_fine(self.given[key]):
            given = quoted(json.dumps(self.given[key]))
            raise ValueError(f"{self.name}: {key!r} is {given}; {expected} is expected")
        return self.given[key]

    def need(self, key, kind):
        given = self.take(key, kind)
        if given is None:
            raise ValueError(f"{self.name}: has no {key!r}, which is needed")
        return given

    def expect(self, key, kind, expected):
        """A key that has one value wherever this version computes the layer."""
        if (given := self.take(key, kind, expected)) != expected:
            raise ValueError(
                f"{self.name}: {key!r} is {json.dumps(given)}; only {json.dumps(expected)} is"
                " supported"
            )

    def object(self, key):
        self.known.add(key)
        return Settings(f"{self.name}: {key}", self.given[key]) if self.has(key) else None

    def need_object(self, key):
        if (given := self.object(key)) is None:
            raise ValueError(f"{self.name}: has no {key!r}, which is needed")
        return given

    def finish(self, *ignored):
        for key, given in self.given.items():
            if given not in (None, {}) and key not in self.known and key not in ignored:
                raise ValueError(
                    f"{self.name}: has {quoted(key)}, which this version does not know{_advice}"
                )


def _is_sliding(config, windows, layer, window):
    """Whether a layer has a window."""
    kinds, uses = config.take("layer_types", "strings", []), "use_sliding_window"
    if window is None or not config.take(uses, "flag", True):
        if window is None:
            config.expect(uses, "flag", False)
        if set(kinds) - {"full_attention"}:
            raise ValueError(
                f"{config.name}: 'layer_types' is not all full_attention, and no window is set"
            )
        return False
    if not kinds and windows == "all":
        return True
    if not kinds and windows == "listed":
        raise ValueError(f"{config.name}: has no 'layer_types', which is needed")
    if layer is None or kinds and layer >= len(kinds):
        raise ValueError(
            f"{config.name}: has several kinds of layers, and the name of this one does not tell"
            " its kind; one like layers.0 is expected"
        )
    if not kinds:
        return layer % 2 == 0
    if kinds[layer] not in ("full_attention", "sliding_attention"):
        raise ValueError(f"{config.name}: has the unknown kind of layer {quoted(kinds[layer])}")
    return kinds[layer] == "sliding_attention"


def _scaling(scaling):
    old = scaling.take("type", "string", "default")
    name = scaling.take("rope_type", "string", old)
    if scaling.has("type") and old != name:
        raise ValueError(
            f"{scaling.name}: has the rope_type {quoted(name)} and the type {quoted(old)}; one of"
            " them is expected"
        )
    rope = {}
    if name == "linear":
        rope["linear_factor"] = scaling.need("factor", "number")
    elif name == "yarn":
        rope["yarn_factor"] = scaling.need("factor", "number")
        for key, ours in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("attention_factor", "attention_factor"),
        ):
            rope[ours] = scaling.take(key, "number", 0)
        rope["yarn_unrounded"] = int(not scaling.take("truncate", "flag", True))
    elif name == "llama3":
        for key in "factor", "low_freq_factor", "high_freq_factor":
            rope[f"llama3_{key}"] = scaling.need(key, "number")
    elif name != "default":
        raise ValueError(
            f"{scaling.name}: has the rope_type {quoted(name)}; linear, yarn, llama3 or default is"
            " expected"
        )
    if name in ("yarn", "llama3"):
        rope["original_positions"] = scaling.need("original_max_position_embeddings", "count")
    return {key: given for key, given in rope.items() if given}


def _rotation(config, has_local_base, slides, head_dim):
    """has_local_base: Gemma 3 rotates its layers with a window otherwise than the others."""
    scaling, parameters = config.object("rope_scaling"), config.object("rope_parameters")
    whole = {
        "rope_theta": config.take("rope_theta", "number"),
        "partial_rotary_factor": config.take("partial_rotary_factor", "share"),
    }
    if has_local_base:
        local = config.take("rope_local_base_freq", "number")
        if parameters:
            kinds = {key: parameters.object(key) for key in ("full_attention", "sliding_attention")}
            parameters.finish()
            parameters = parameters.need_object("sliding_attention" if slides else "full_attention")
        elif slides:
            whole["rope_theta"] = (
                config.need("rope_local_base_freq", "number") if local is None else local
            )
            scaling = None
    if parameters and scaling:
        raise ValueError(
            f"{config.name}: has both 'rope_parameters' and 'rope_scaling'; one of them is expected"
        )
    scaling, rope = parameters or scaling, {}
    if scaling:
        rope = _scaling(scaling)
        for key, kind in ("rope_theta", "number"), ("partial_rotary_factor", "share"):
            own = scaling.take(key, kind)
            if own is not None and whole[key] not in (None, own) and not has_local_base:
                raise ValueError(
                    f"{scaling.name}: {key!r} is {own:g}, and {whole[key]:g} in {config.name}; one"
                    " of them is expected"
                )
            whole[key] = whole[key] if own is None else own
        scaling.finish()
    if whole["rope_theta"] is None:
        config.need("rope_theta", "number")
    rope["base"] = whole["rope_theta"]
    if (part := whole["partial_rotary_factor"]) not in (None, 1):
        rope["dims"] = int(head_dim * part)
        if rope["dims"] == 0:
            raise ValueError(
                f"{config.name}: 'partial_rotary_factor' is {part:g}, which leaves nothing of a"
                f" head of {head_dim} to rotate"
            )
    return rope


def _quantised(settings):
    """How matrices are stored: AWQ, GPTQ or compressed-tensors with its numbers; None."""
    if settings is None:
        return None
    method = settings.need("quant_method", "string")
    if method not in _harmless_quantised:
        raise ValueError(
            f"{settings.name}: has the quant_method {quoted(method)}; one of"
            f" {', '.join(_harmless_quantised)} is expected"
        )
    how = {}
    if method == "awq":
        settings.expect("bits", "count", 4)
        settings.expect("version", "string", "gemm")
    elif method == "gptq":
        how["bits"] = settings.need("bits", "count")
        how["checkpoint_format"] = settings.take("checkpoint_format", "string", "gptq")
        settings.expect("is_marlin_format", "flag", False)
    else:
        groups = settings.need_object("config_groups")
        if len(groups.given) != 1:
            raise ValueError(f"{groups.name}: has {len(groups.given)} groups; one is expected")
        group = groups.need_object(next(iter(groups.given)))
        weights = group.need_object("weights")
        how["bits"] = weights.need("num_bits", "count")
        weights.expect("type", "string", "int")
        weights.expect("dynamic", "flag", False)
        weights.finish(
            *"symmetric group_size strategy actorder observer observer_kwargs scale_dtype".split(),
            "zp_dtype",
        )
        group.finish("targets", "format")
    settings.finish(*_harmless_quantised[method].split())
    return method, how


class Model(NamedTuple):
    """What is not said about a layer is None, or left out of call, its call settings."""

    name: str
    num_heads: int
    call: dict[str, Any]
    family: Family = Family()
    num_kv_heads: int | None = None
    head_dim: int | None = None
    query_dim: int | None = None
    norm_epsilon: float = 0.0
    scale: float = 0.0
    quantised: tuple[str, dict[str, Any]] | None = None


def read_model(path, layer):
    """The model of a configuration, for its layer of this number, or None."""
    with open(path, "rb") as file:
        config = Settings(path, parse_json(path, file.read()))
    name = config.need("model_type", "string")
    if name not in families:
        raise ValueError(
            f"{path}: has the model_type {quoted(name)}; one of {', '.join(families)} is expected,"
            " or options after --no-config"
        )
    family, call = families[name], {"version": 1, "causal": families[name].is_causal}
    heads = config.need("n_head" if name == "gpt2" else "num_attention_heads", "count")
    query_dim = config.need("n_embd" if name == "gpt2" else "hidden_size", "count")
    kv_heads, head_dim, scale, epsilon = heads, query_dim // heads, 0.0, 0.0
    if family.has_norm:
        epsilon = config.need("rms_norm_eps", "number")
    if family.rotates:
        kv_heads = config.take("num_key_value_heads", "count")
        head_dim = config.take("head_dim", "count", head_dim)
        window = config.take(_window, "count")
        if window and family.windows == "none":
            raise ValueError(f"{path}: has {_window!r}, which models of this type do not have")
        slides = _is_sliding(config, family.windows, layer, window)
        call["rope"] = _rotation(config, name == "gemma3_text", slides, head_dim)
        if slides:
            call["window"] = window
            if name.startswith("qwen"):  # off where it is not said
                config.need("use_sliding_window", "flag")
    else:
        for key in "add_cross_attention", "is_decoder", "scale_attn_by_inverse_layer_idx":
            config.expect(key, "flag", False)
        config.expect("scale_attn_weights", "flag", True)
        config.expect("position_embedding_type", "string", "absolute")
    if name in ("gemma2", "gemma3_text"):
        scalar = config.need("query_pre_attn_scalar", "number")
        if not scalar > 1.2e-38:
            raise ValueError(
                f"{path}: 'query_pre_attn_scalar' is {scalar:g}; a number above 0 is expected"
            )
        scale = scalar**-0.5
        if softcap := config.take(_softcap, "number"):
            call["softcap"] = softcap
        config.expect("use_bidirectional_attention", "flag", False)
    for key in family.needed:
        is_other = key == "rope_scaling" and config.has("rope_parameters")
        if key not in config.given and not is_other:
            raise ValueError(
                f"{path}: has no {key!r}, which is needed; null says that there is none"
            )
    quantised = _quantised(config.object("quantization_config"))
    config.finish(*_harmless, *(["original_max_position_embeddings"] if name == "phi3" else []))
    return Model(
        path, heads, call, family, kv_heads, head_dim, query_dim, epsilon, scale, quantised
    )
