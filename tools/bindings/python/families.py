#!/usr/bin/env python3
"""Runs every model family of the installed transformers with attention by mha, and compares it with
the family's own eager attention.

Each model is made tiny, with random weights that let attention count, and runs prompts without
padding, padded left and right, packed, and 32 generated tokens. Its logits must equal those of
eager attention within 1e-4; with attention that is wrong on purpose they must not, nor with all
keys where a model chooses some, or the comparison says nothing. Rows that eager attention itself
moves as far, once its weights are off by a rounding, are not compared: there a router finds two
experts equal. Each runs in a separate process.

Exits with 0, or with 1 if a family's results are wrong.

Examples:
  families.py llama gemma3 bert                  these alone, with what was compared
  families.py --jobs 2 --write                   all of them, families.txt, and the table in
                                                 src/docs/transformers.md
"""

import argparse
import collections
import contextlib
import copy
import inspect
import logging
import math
import multiprocessing
import pathlib
import re
import resource
import subprocess
import sys
import textwrap
import time
import traceback
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True
page = pathlib.Path(__file__).resolve().parents[3] / "src" / "docs" / "transformers.md"
names_file = pathlib.Path(__file__).resolve().with_suffix(".txt")
tolerance = 1e-4
tokens = 32
seconds = 60  # of the processor, for a family

# ---- Tiny models: for each name of a number in a configuration, the number; those that a
# configuration has are set

tiny = {
    64: (
        "hidden_size d_model n_embd dim embed_dim hidden_dim embedding_size decoder_hidden_size"
        " encoder_hidden_size emb_dim decoder_embed_dim encoder_embed_dim projection_dim"
        " text_embed_dim hidden_channels model_dim d_embed word_embed_proj_dim"
        " hidden_size_per_layer_input out_hidden_size output_dim mlp_dim adapter_hidden_dim"
        " audio_embed_dim vision_embed_dim mamba_d_model"
    ),
    96: (
        "intermediate_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim"
        " decoder_intermediate_size intermediate_dim ffn_hidden_size feed_forward_dim"
        " intermediate_size_mlp shared_expert_intermediate_size moe_intermediate_size"
        " dense_intermediate_size shared_intermediate_size expert_ffn_hidden_size"
        " prefix_dense_intermediate_size encoder_intermediate_size ffn_intermediate_size"
    ),
    4: (
        "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads"
        " n_heads decoder_num_attention_heads encoder_num_attention_heads num_experts"
        " num_local_experts n_routed_experts moe_num_experts num_encoder_attention_heads"
        " num_decoder_attention_heads attention_heads num_self_attention_heads"
        " num_cross_attention_heads num_experts_per_layer index_n_heads index_topk index_block_size"
        " index_kpool block_size global_block_size n_window indexer_budget indexer_n_heads"
    ),
    3: "local_radius",
    2: (
        "num_key_value_heads num_kv_heads n_head_kv num_hidden_layers n_layer num_layers n_layers"
        " encoder_layers decoder_layers depth num_decoder_layers num_encoder_layers"
        " decoder_num_hidden_layers encoder_num_hidden_layers num_experts_per_tok moe_topk moe_k"
        " num_experts_per_token top_k moe_top_k decoder_num_key_value_heads"
        " encoder_num_key_value_heads num_block num_blocks text_num_hidden_layers"
        " vision_num_hidden_layers expert_top_k num_selected_experts num_attention_groups"
        " swa_num_key_value_heads num_global_key_value_heads attn_layer_period index_topk_blocks"
        " num_global_tokens window_size"
    ),
    16: (
        "head_dim d_kv attention_head_dim kv_lora_rank qk_nope_head_dim v_head_dim kv_channels"
        " attention_head_size head_size swa_head_dim swa_v_head_dim global_head_dim"
        " per_layer_input_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state"
        " d_head index_head_dim indexer_head_dim relative_attention_max_distance n_window_infer"
    ),
    8: (
        "qk_rope_head_dim patch_size mamba_n_heads prediction_length mamba_chunk_size"
        " relative_attention_num_buckets canvas_length left_max_position_embeddings"
        " bias_max_distance"
    ),
    24: "q_lora_rank",
    1: (
        "n_group topk_group n_shared_experts num_shared_experts moe_n_group attn_layer_offset"
        " max_window_layers indexer_kv_heads"
    ),
    # Limits: below the 20 rows of a prompt, so that what they limit is at work.
    6: (
        "sliding_window attention_chunk_size local_attention attention_window_size"
        " sliding_window_size keep_window_size context_size"
    ),
    32: "image_size moe_intermediate_size expert_hidden_dim",
    128: "vocab_size text_vocab_size mamba_d_ssm",
    256: (
        "max_position_embeddings max_source_positions max_target_positions n_positions max_seq_len"
    ),
}
numbers = {name: number for number, names in tiny.items() for name in names.split()}
special = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
small_resnet = {
    "use_timm_backbone": False,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 32, 32],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    },
}
of_a_kind = {
    **dict.fromkeys(["detr", "conditional_detr", "dab-detr", "table-transformer"], small_resnet),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "esm": {"pad_token_id": 0},
    "bamba": {"attn_layer_indices": [1]},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_n_heads": 2,
    },
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "index_kpool": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    },
    "bailing_hybrid": {
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    },
}
limit = re.compile(
    "topk(?!_group|_method|_prob)|top_k$|window|chunk_size|block_size|radius|max_distance|compress_rate|num_global_tokens"
)
most_weights = 200e6


def configurations(config_class):
    """Tiny configurations to be tried one after the other, the plainest first."""
    as_many = {name: 4 for name in numbers if "key_value_heads" in name or "kv_heads" in name}
    variants = [
        ((), {}),
        ((), as_many),
        (("head_dim",), as_many),
        (("num_key_value_heads",), {}),
        (("head_dim",), {}),
        ((), {**as_many, "hidden_size": 256, "n_embd": 256, "d_model": 256}),
        (("patch_size", "image_size"), {}),
        (("hidden_size", "dim", "embed_dim", "head_dim"), as_many),
        (tuple(name for name in numbers if "layer" not in name and name != "depth"), {}),
        (tuple(numbers), {}),
    ]
    for drop, other in variants:
        with contextlib.suppress(Exception):
            yield config_class(**shrunk(config_class, drop, {**numbers, **other}))


def shrunk(config_class, drop, numbers, depth=0):
    default = config_class()
    values = default.to_dict()
    result = {}
    for name, value in values.items():
        number = numbers.get(name)
        if name in special and value is not None and not isinstance(value, list):
            result[name] = special[name]
        elif name in special and isinstance(value, list):
            result[name] = [special[name]] if special[name] is not None else None
        elif number is None or name in drop:
            continue
        elif value is None and any(
            part in name
            for part in ("head", "expert", "group", "vocab", "prediction", "window", "indexer")
        ):
            result[name] = number
        elif isinstance(value, int) and not isinstance(value, bool):
            result[name] = min(number, value) if "layer" in name or "expert" in name else number
        elif (
            isinstance(value, list)
            and value
            and all(type(item) is int for item in value)
            and "layer" not in name
            and depth < 3
        ):
            continue
    if "qk_rope_head_dim" in result and "head_dim" in result:
        result["head_dim"] = result["qk_rope_head_dim"]  # of what is rotated, in latent attention
    layers = next(
        (result[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in result),
        None,
    )
    types = values.get("layer_types")
    if layers and isinstance(types, list) and len(types) > layers:
        kinds = list(dict.fromkeys(types))[:4]
        result["layer_types"] = kinds * (2 if len(kinds) == 1 else 1)
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            if name in result:
                result[name] = len(result["layer_types"])
        for name, value in values.items():  # what else there is one of for each layer
            if name != "layer_types" and isinstance(value, list) and len(value) == len(types):
                result[name] = [value[types.index(kind)] for kind in result["layer_types"]]
    elif layers:
        full = default.to_dict().get("num_hidden_layers")
        for name, value in values.items():
            if (
                name != "layer_types"
                and isinstance(value, list)
                and full
                and len(value) == full
                and full > layers
            ):
                result[name] = value[:layers]
    # Its layer types follow from these.
    if result.get("sliding_window") and "use_sliding_window" in values:
        result["use_sliding_window"] = True
        result.pop("layer_types", None)
    rope = values.get("rope_parameters")
    if (
        isinstance(rope, dict)
        and "mrope_section" in sources(config_class)
        and ({"head_dim", "hidden_size"} & set(result))
    ):
        half = (
            result["qk_rope_head_dim"] // 2
            if "qk_rope_head_dim" in result
            else int(8 * rope.get("partial_rotary_factor", 1))
        )
        result["rope_parameters"] = {
            **rope,
            "mrope_section": [half - half // 4 * 2, half // 4, half // 4],
        }
    for name in getattr(config_class, "sub_configs", None) or ():
        part = getattr(default, name, None)
        if part is None or depth > 3:
            continue
        with contextlib.suppress(Exception):
            result[name] = {
                "model_type": part.model_type,
                **shrunk(type(part), drop, numbers, depth + 1),
            }
    result.update(of_a_kind.get(config_class.model_type, {}))
    return result


def idle_limits(config):
    """The limits of a configuration that a prompt of 20 rows does not reach."""
    parts = [config] + [
        part
        for name in getattr(config, "sub_configs", None) or {}
        if "text" in name or "decoder" in name
        if (part := getattr(config, name, None)) is not None
    ]
    values = [item for part in parts for item in part.to_dict().items()]
    return sorted(
        {
            f"{name} {value}"
            for name, value in values
            if limit.search(name) and type(value) is int and value >= 20
        }
    )


def sources(config_class):
    """The text of the files that a configuration is for."""
    folder = pathlib.Path(inspect.getfile(config_class)).parent
    return "".join(path.read_text() for path in folder.glob("*.py"))


def weigh(model):
    """Random weights of about the size at which all parts of a model count."""
    import torch

    torch.manual_seed(1)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if name.endswith("sinks") or "relative_attention_bias" in name:
                weight.data.normal_()
            elif (
                weight.dim() == 2
                and isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
                or type(module).__name__ == "Conv1D"
            ):
                if weight.dim() == 2:
                    fan_in = (
                        weight.shape[1]
                        if isinstance(module, torch.nn.Linear)
                        else 1
                        if isinstance(module, torch.nn.Embedding)
                        else weight.shape[0]
                    )
                    weight.data.normal_(0, fan_in**-0.5)


# ---- Inputs


def find(config, name, default):
    if getattr(config, name, None) is not None:
        return getattr(config, name)
    for sub in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, sub, None)
        if part is not None and (value := find(part, name, None)) is not None:
            return value
    return default


def image_size(config):
    size = find(config, "image_size", 64)
    if isinstance(size, dict):
        return size.get("height", 64), size.get("width", 64)
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def inputs_of(model, with_images):
    """What the model is called with: name -> its inputs."""
    import torch

    config, names = model.config, set(inspect.signature(model.forward).parameters)
    vocabulary = min(find(config, "vocab_size", 128) or 128, 100)
    torch.manual_seed(2)
    ids = torch.randint(3, vocabulary, (3, 20))
    end = find(config, "eos_token_id", 2)
    # What some models take the output of.
    ids[:, 9] = end if isinstance(end, int) and 0 <= end < vocabulary else 2
    main = model.main_input_name
    if main not in names and "input_ids" in names:
        main = "input_ids"
    if main == "input_ids" and "input_ids" in names:
        plain, result = {"input_ids": ids}, {}
        if "decoder_input_ids" in names:
            plain["decoder_input_ids"] = torch.randint(3, vocabulary, (3, 9))
        if "bbox" in names:
            plain["bbox"] = torch.zeros(3, 20, 4, dtype=torch.long)
        if with_images and "pixel_values" in names:
            plain["pixel_values"] = torch.randn(
                3, find(config, "num_channels", 3), *image_size(config)
            )
        if with_images and "input_features" in names:
            plain["input_features"] = torch.randn(3, 1, 1001, 64)
        result["plain"] = plain
        if "attention_mask" in names:
            left = torch.ones(3, 20, dtype=torch.long)
            left[1, :5], left[2, :8] = 0, 0
            result["left"] = {**plain, "attention_mask": left}
            result["right"] = {**plain, "attention_mask": left.flip(1)}
        if (
            "position_ids" in names
            and "decoder_input_ids" not in names
            and getattr(config, "is_encoder_decoder", False) is False
        ):
            starts = torch.cat([torch.arange(7), torch.arange(9), torch.arange(4)])
            result["packed"] = {
                **plain,
                "position_ids": starts.expand(3, -1).contiguous(),
                **({"use_cache": False} if "use_cache" in names else {}),
            }
        return result
    height, width = image_size(config)
    channels = find(
        config, "num_channels", find(config, "in_channels", find(config, "in_chans", 3))
    )
    if main == "pixel_values":
        result = {"pixel_values": torch.randn(2, channels, height, width)}
        if "input_ids" in names:
            result["input_ids"] = ids[:2]
            result["attention_mask"] = torch.ones(2, 20, dtype=torch.long)
        if "decoder_input_ids" in names:
            result["decoder_input_ids"] = ids[:2]
        frames = torch.randn(2, find(config, "num_frames", 2), channels, height, width)
        return {"plain": result, "frames": {**result, "pixel_values": frames}}
    if main == "pixel_values_videos":
        frames = find(config, "num_frames", find(config, "frames_per_clip", 4))
        return {"plain": {"pixel_values_videos": torch.randn(1, frames, channels, height, width)}}
    if main == "input_features":
        bins = find(
            config,
            "num_mel_bins",
            find(config, "feature_size", find(config, "input_feat_per_channel", 80)),
        )
        length = 2 * find(config, "max_source_positions", 64)
        result = {"input_features": torch.randn(2, bins, length)}
        if "decoder_input_ids" in names:
            result["decoder_input_ids"] = ids[:2]
        width = find(config, "feature_projection_input_dim", bins)
        return {"plain": result, "turned": {**result, "input_features": torch.randn(2, 80, width)}}
    if main == "input_values":
        result = {
            "plain": {"input_values": torch.randn(2, 4000)},
            "one channel": {"input_values": torch.randn(2, 1, 4000)},
        }
        if "decoder_input_ids" in names:
            result["plain"]["decoder_input_ids"] = ids[:2]
        if "attention_mask" in names:
            heard = torch.ones(2, 4000, dtype=torch.long)
            heard[1, 2500:] = 0
            result["right"] = {"input_values": torch.randn(2, 4000), "attention_mask": heard}
        return result
    return {"plain": {name: value for name, value in model.dummy_inputs.items() if name in names}}


other_forms = {"turned", "frames", "one channel"}  # of the plain input, of which one must do

# ---- One family


def output_of(model, inputs):
    import torch

    torch.manual_seed(3)  # for models that draw lots
    with torch.no_grad():
        output = model(**inputs)
    names = (
        "logits last_hidden_state pred_masks logits_per_image prediction_logits predicted_depth"
        " image_embeds"
    )
    for name in names.split():
        value = getattr(output, name, None)
        if torch.is_tensor(value):
            return value
    tensors = [
        value
        for value in (output.to_tuple() if hasattr(output, "to_tuple") else output)
        if torch.is_tensor(value) and value.is_floating_point()
    ]
    if not tensors:
        raise ValueError("no output to compare")
    return tensors[0]


def difference(a, b, inputs):
    """The largest difference, over rows that are not padding."""
    mask = inputs.get("attention_mask")
    if mask is not None and a.ndim == 3 and a.shape[:2] == mask.shape:
        a, b = a[mask > 0], b[mask > 0]
    scale = max(1.0, a.abs().max().item())  # of logits of size 1, as most are
    return (a - b).abs().max().item() / scale


def ties(model, inputs, expected):
    """[batch, rows]: which rows eager attention itself gives otherwise once weights are off by a
    rounding, as where two experts are equal."""
    import torch

    model.set_attn_implementation("eager")
    kept, found = (
        [weight.data for weight in model.parameters()],
        torch.zeros(expected.shape[:2], dtype=torch.bool),
    )
    for seed in range(8):
        torch.manual_seed(seed)
        for weight, value in zip(model.parameters(), kept):
            weight.data = (
                value * (1 + 1e-7 * torch.randn_like(value)) if value.is_floating_point() else value
            )
        moved = (output_of(model, inputs) - expected).abs().reshape(*found.shape, -1).amax(-1)
        found |= moved > tolerance * max(1.0, expected.abs().max().item())
    for weight, value in zip(model.parameters(), kept):
        weight.data = value
    model.set_attn_implementation("mha")
    return found


def generate(model, inputs, **options):
    import torch

    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 0
    with torch.no_grad():
        made = model.generate(
            **{key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs},
            **options,
            do_sample=False,
            num_beams=1,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return made.sequences, torch.stack(made.logits, 1)


class Watch:
    """How often models ask for attention, and what becomes of it."""

    def __init__(self, mt):
        self.asked, self.refused, self.dense, self.structured, self.none, self.listed, self.mt = (
            0,
            collections.Counter(),
            0,
            0,
            0,
            0,
            mt,
        )
        inner = mt._attend

        def attend(module, query, key, value, mask, *rest):
            self.asked += 1
            try:
                result = inner(module, query, key, value, mask, *rest)
            except Exception as error:
                self.refused[re.sub(r"[0-9]+", "N", str(error))[:160]] += 1
                raise
            if isinstance(mask, mt.Mask) and mask.is_pristine:
                self.structured += 1
            elif mask is None:
                self.none += 1
            else:
                self.dense += 1
            return result

        def with_choice(*choice, inner=mt._with_choice):
            mask, lists = inner(*choice)
            self.listed += lists is not None
            return mask, lists

        # Though prompts are short.
        mt._attend, mt._with_choice, mt._lists_pay = attend, with_choice, lambda *_: True


def wrong_attention(module, query, key, value, attention_mask, **kwargs):
    """Each query takes the values of the first key."""
    return (
        value[:, :, :1]
        .repeat_interleave(query.shape[1] // value.shape[1], 1)
        .expand(-1, -1, query.shape[2], -1)
        .transpose(1, 2)
        .contiguous(),
        None,
    )


class TooLarge(Exception):
    pass


def prepare(model_class, config, with_images, result):
    """A model of this configuration, what it is called with, and what comes out with eager
    attention."""
    import torch

    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > most_weights:
        raise TooLarge(f"{size / 1e6:.0f} million weights")
    for is_weighed in True, False:
        torch.manual_seed(0)
        model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        if is_weighed:
            weigh(model)
        all_inputs, reference = inputs_of(model, with_images), {}
        for name, inputs in all_inputs.items():
            try:
                reference[name] = output_of(model, inputs)
            except Exception as error:
                if name == "plain" and not other_forms & set(all_inputs):
                    raise
                result.setdefault("skipped", {})[name] = f"{type(error).__name__}: {error}"[:160]
        if reference and all(torch.isfinite(value).all() for value in reference.values()):
            return model, all_inputs, reference
    raise ValueError(
        "its outputs are not finite" if reference else "; ".join(result["skipped"].values())
    )


def examine(model_type, class_name):
    """A dictionary that says how a family fared."""
    import mha.transformers as mt
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    watch, result = Watch(mt), {"type": model_type, "class": class_name, "compared": {}}
    transformers.AttentionInterface.register("wrong", wrong_attention)
    transformers.AttentionInterface.register(
        "all keys",
        lambda *tensors, indices=None, block_indices=None, **kwargs: mt.attention(
            *tensors, **kwargs
        ),
    )
    for name in "wrong", "all keys":
        transformers.AttentionMaskInterface.register(name, mt.mask)
    model_class, errors, model = getattr(transformers, class_name), [], None
    config_class = model_class.config_class
    for config in configurations(config_class):
        if sum("million weights" in error for error in errors) > 1:
            break
        for with_images in False, True:
            try:
                model, all_inputs, reference = prepare(model_class, config, with_images, result)
                break
            except TooLarge as error:
                errors.append(str(error))
                break
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                said = " ".join(str(error).split())[:150]
                errors.append(
                    f"{type(error).__name__}: {said}"
                    f" ({pathlib.Path(place.filename).name}:{place.lineno})"
                )
        if model is not None:
            break
    else:
        errors = errors or ["no tiny configuration"]
    if model is None:
        return {**result, "status": "unconfigured", "why": "; ".join(dict.fromkeys(errors))[:400]}
    first = next(iter(reference))
    is_unsteady, made = (
        difference(reference[first], output_of(model, all_inputs[first]), all_inputs[first]) > 0,
        {},
    )
    try:
        if model.can_generate() and "input_ids" in all_inputs.get("plain", {}):
            names = (
                {"plain"}
                if "left" not in reference
                or any(hasattr(module, "indexer") for module in model.modules())
                else set()
            )
            # In which the first sequence has no padding.
            for name in sorted(names | {"left"} & set(reference), reverse=True):
                made[name] = generate(model, all_inputs[name])
    except Exception as error:
        result.setdefault("skipped", {})["generate"] = f"{type(error).__name__}: {error}"[:160]
    try:
        model.set_attn_implementation("mha")
    except Exception as error:
        return {**result, "status": "never asks", "why": f"set_attn_implementation: {error}"[:200]}
    result["idle"] = idle_limits(model.config)
    for name, expected in reference.items():
        output = output_of(model, all_inputs[name])
        result["compared"][name] = difference(expected, output, all_inputs[name])
        if result["compared"][name] > tolerance and expected.ndim > 2:
            tied = ties(model, all_inputs[name], expected)
            if 0 < tied.sum() <= tied.numel() / 20:
                result.setdefault("skipped", {})[name] = (
                    f"{tied.sum()} of {tied.numel()} rows, which are ties"
                )
                output[tied] = expected[tied]
                result["compared"][name] = difference(expected, output, all_inputs[name])

    def compare(what, name, **options):
        expected_tokens, expected_logits = made[name]
        sequences, logits = generate(model, all_inputs[name], **options)
        is_same = torch.equal(sequences, expected_tokens)
        result["compared"][what] = difference(expected_logits, logits, {}) if is_same else math.inf

    for name in made:
        compare(f"{tokens} tokens, {name}", name)
    if made and any(hasattr(module, "expand_kv") for module in model.modules()):
        compare("LatentCache", name, past_key_values=mt.LatentCache(model, 20 + tokens))
    result.update(
        asked=watch.asked,
        refused=dict(watch.refused),
        structured=watch.structured,
        dense=watch.dense,
        none=watch.none,
        listed=watch.listed,
    )
    if is_unsteady:
        return {
            **result,
            "status": "unconfigured",
            "why": "eager attention gives other results each time",
        }
    bad = [name for name, value in result["compared"].items() if not value <= tolerance]
    if bad:
        return {**result, "status": "wrong", "why": ", ".join(bad)}
    if watch.asked == 0:
        source = inspect.getsource(sys.modules[model_class.__module__])
        return {
            **result,
            "status": "never asks",
            "why": (
                "has attention of its own" if "softmax" in source.lower() else "has no attention"
            ),
        }
    if sum(watch.refused.values()) == watch.asked:
        return {**result, "status": "refused", "why": "; ".join(watch.refused)}
    for name, why in {
        "wrong": "attention makes no difference",
        "all keys": "chosen keys make no difference",
    }.items():
        if name == "all keys" and watch.listed == 0:
            continue
        model.set_attn_implementation(name)
        with contextlib.suppress(Exception):
            if (
                max(
                    difference(expected, output_of(model, all_inputs[name]), all_inputs[name])
                    for name, expected in reference.items()
                )
                < 10 * tolerance
            ):
                return {**result, "status": "unconfigured", "why": why}
    return {**result, "status": "passes", "why": "; ".join(watch.refused)}


# ---- All of them


def families():
    """(folder, model type, class) of all that the installed version has, those with the folder's
    name first; the class is the one with the most to compare."""
    from transformers.models.auto import configuration_auto, modeling_auto

    order = [
        "FOR_CAUSAL_LM",
        "FOR_IMAGE_TEXT_TO_TEXT",
        "FOR_SEQ_TO_SEQ_CAUSAL_LM",
        "FOR_SPEECH_SEQ_2_SEQ",
        "FOR_MASKED_LM",
        "FOR_CTC",
    ]
    maps = [getattr(modeling_auto, f"MODEL_{name}_MAPPING_NAMES") for name in order] + [
        modeling_auto.MODEL_MAPPING_NAMES
    ]
    found = {}
    for names in maps:
        for model_type, class_name in names.items():
            found.setdefault(
                model_type, class_name if isinstance(class_name, str) else class_name[0]
            )
    folders = collections.defaultdict(list)
    for model_type in found:
        folders[configuration_auto.model_type_to_module_name(model_type)].append(model_type)
    result = []
    for folder, types in folders.items():
        main = [
            model_type for model_type in types if model_type.replace("-", "_") == folder
        ] + types
        result += [
            (model_type != main[0], folder, model_type, found[model_type]) for model_type in types
        ]
    return [entry[1:] for entry in sorted(result)]


def run(model_type, class_name, pipe):
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # at which the process ends
    try:
        pipe.send(examine(model_type, class_name))
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{pathlib.Path(place.filename).name}:{place.lineno}"
        why = f"{type(error).__name__}: {error} ({where})"
        pipe.send(
            {
                "type": model_type,
                "class": class_name,
                "status": "fails",
                "compared": {},
                "why": why[:300],
            }
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="FAMILY",
        help="model types of transformers, or folders (default: all)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="families at once (default: 1)"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write the table in {page.name}, and {names_file.name}",
    )
    arguments = parser.parse_args()
    import mha.transformers  # noqa: F401  before the processes are forked

    found, names = families(), set(arguments.names)
    names |= {
        model_type
        for folder, model_type, _ in found
        if folder in names - {model_type for _, model_type, _ in found}
    }
    wanted = [entry for entry in found if not names or entry[1] in names]
    results, context, running = [], multiprocessing.get_context("fork"), []
    while wanted or running:
        while wanted and len(running) < arguments.jobs:
            folder, model_type, class_name = wanted.pop(0)
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(model_type, class_name, theirs))
            process.start()
            theirs.close()
            running.append((process, ours, folder, model_type, class_name, time.monotonic()))
        for entry in list(running):
            process, ours, folder, model_type, class_name, started = entry
            if not ours.poll(0.05) and process.is_alive():
                continue
            process.join(0 if ours.poll() else None)
            why = (
                f"the process ended with {process.exitcode}, or {seconds} s of the processor were"
                " not enough"
            )
            result = {
                "type": model_type,
                "class": class_name,
                "status": "fails",
                "compared": {},
                "why": why,
            }
            with contextlib.suppress(EOFError):
                result = ours.recv() if ours.poll() else result
            process.kill(), process.join()
            running.remove(entry)
            results.append(
                {"folder": folder, "seconds": round(time.monotonic() - started, 1), **result}
            )
            print(describe(results[-1]), flush=True)
    if arguments.write:
        write_table(results)
    print(
        ", ".join(
            f"{count} {status}"
            for status, count in collections.Counter(result["status"] for result in results).items()
        )
    )
    sys.exit(any(result["status"] == "wrong" for result in results))


meanings = {
    "passes": (
        "logits equal those of eager attention within 1e-4 of the largest, or of 1 if that is less"
    ),
    "passes in part": "equal too, but some calls go to the model's own attention",
    "own attention": "the model does not use transformers' attention interface",
    "no attention": "the model has no softmax attention",
    "refused": "all calls go to the model's own attention",
    "not compared": "the script could not build a tiny model; `families.py NAME` says why",
    "wrong": "results differ",
    "not run": "left out of this run",
}


def write_table(results):
    """The part of the page between its two marks, and the names of all families that do not
    pass."""
    import transformers

    best = {}
    ranks = list(meanings)
    for result in results:
        kind = {
            "passes": "passes in part" if result.get("refused") else "passes",
            "wrong": "wrong",
            "refused": "refused",
            "never asks": (
                "no attention" if result["why"] == "has no attention" else "own attention"
            ),
        }.get(result["status"], "not compared")
        if (
            result["folder"] not in best
            or ranks.index(kind) < ranks.index(best[result["folder"]][0])
            or kind == "wrong"
        ):
            best[result["folder"]] = kind, result
    for folder, _, _ in families():
        best.setdefault(folder, ("not run", None))
    groups = collections.defaultdict(list)
    for folder, (kind, result) in sorted(best.items()):
        groups[kind].append((folder, result))
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=page.parent, capture_output=True, text=True
    ).stdout.strip()
    lines = [
        (
            f"transformers {transformers.__version__} has {len(best)} families, folders of models"
            f" that an Auto class knows. At commit {commit}:"
        ),
        "",
        "| Result | Families | |",
        "|---|---|---|",
    ]
    lines += [
        f"| {kind} | {len(groups[kind])} | {meaning} |"
        for kind, meaning in meanings.items()
        if groups[kind] or kind == "wrong"
    ]
    named = [
        f"Families of transformers {transformers.__version__} that do not pass, by result;"
        " src/docs/transformers.md explains these."
    ]
    for kind in [kind for kind in meanings if kind != "passes"]:
        reasons = {
            folder: " ".join(result["why"].split())[:160]
            for folder, result in groups[kind]
            if kind in ("passes in part", "refused", "wrong")
        }
        names = [
            folder + (f" ({reasons[folder]})" if folder in reasons else "")
            for folder, _ in groups[kind]
        ]
        named += (
            ["", *textwrap.wrap(f"{kind}: " + ", ".join(names), 98, break_on_hyphens=False)]
            if names
            else []
        )
    names_file.write_text("\n".join(named) + "\n")
    begin, end = "<!-- families -->\n", "<!-- end of families -->\n"
    text = page.read_text()
    page.write_text(
        text[: text.index(begin) + len(begin)]
        + "\n"
        + "\n".join(lines)
        + "\n\n"
        + text[text.index(end) :]
    )


def describe(result):
    compared = ", ".join(f"{name} {value:.0e}" for name, value in result["compared"].items())
    asked = (
        f"{result.get('structured', 0)}+{result.get('dense', 0)}+{result.get('none', 0)} of"
        f" {result['asked']}"
        if result.get("asked")
        else ""
    )
    asked += f", {result['listed']} by lists of keys" if result.get("listed") else ""
    skipped = "".join(f"; no {name}: {why}" for name, why in result.get("skipped", {}).items())
    idle = "".join(f"; not reached: {name}" for name in result.get("idle", []))
    return (
        f"{result['type']:28} {result['status']:13} {asked} {compared}"
        f" {result.get('why') or ''}{skipped}{idle} {result['seconds']} s"
    )


if __name__ == "__main__":
    main()
