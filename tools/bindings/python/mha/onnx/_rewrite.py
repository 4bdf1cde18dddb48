"""Puts mha's operators in place of the attention in a model."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np
import onnx
import onnx.checker
import onnx.external_data_helper
from onnx import TensorProto, helper

from .._structs import arithmetics, given_types, multiplied
from ._files import inlined, is_large
from ._find import Finder, Left, is_named
from ._graph import Graph
from ._recurrent import take


@dataclasses.dataclass
class Entry:
    """What became of one attention: `into` is the operator that replaced it, or None, and then
    `reason` says why."""

    node: str
    into: str | None
    reason: str

    def __str__(self):
        return (
            f"rewritten: {self.node} -> {self.into}: {self.reason}"
            if self.into
            else f"left: {self.node}: {self.reason}"
        )


class Report(list):
    """Entries, one for each attention that was found."""

    @property
    def rewritten(self):
        return [entry for entry in self if entry.into]

    @property
    def left(self):
        return [entry for entry in self if not entry.into]


def named(node):
    kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{kind} '{node.name or node.output[0]}'"


def rewrite(
    model: onnx.ModelProto | str | os.PathLike, weight_type: str = "f32", arithmetic: str = "f32"
) -> tuple[onnx.ModelProto, Report]:
    """The model, with mha's operators instead of its attention, and what became of each. A
    ModelProto is changed in place, unless it has functions."""
    for name, given, choices in (
        ("weight_type", weight_type, given_types),
        ("arithmetic", arithmetic, arithmetics),
    ):
        if given not in choices:
            raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(choices)}")
    if weight_type not in multiplied.get(arithmetic, given_types):
        raise ValueError(
            f"arithmetic is {arithmetic}, and weight_type is {weight_type}; it multiplies weights"
            f" of {' or '.join(multiplied[arithmetic])}"
        )
    made = model if isinstance(model, onnx.ModelProto) else onnx.load(model, None, False)
    if made.functions:
        made = inlined(made)
    if not isinstance(model, onnx.ModelProto):
        folder = os.path.dirname(os.fspath(model))
        onnx.external_data_helper.load_external_data_for_model(made, folder)
    try:
        return made, Rewriter(made, weight_type, arithmetic).run()
    except (AttributeError, LookupError, StopIteration, TypeError):
        if not is_large(made):  # a ValidationError says what is wrong with a model that is none
            onnx.checker.check_model(made)
        raise


class Rewriter:
    def __init__(self, model, weight_type, arithmetic):
        self.model, self.graph = model, Graph(model)
        self.how = {
            name: value
            for name, value in (("weight_type", weight_type), ("arithmetic", arithmetic))
            if value != "f32"
        }
        self.without = ["without projections, whose weights could be packed"] if self.how else []
        self.finder, self.report = Finder(self.graph), Report()
        self.masks = {}  # what was made of a mask, for the layers that share it

    def run(self):
        nodes = list(self.graph.graph.node)
        for node in nodes:
            self.look_inside(node)
        for node in nodes:
            try:
                before, said = named(node), take(node, self.graph)
                if said is not None:
                    for output in filter(None, node.output):
                        self.keep_shape(output)
                    self.report.append(Entry(before, f"mha.{node.op_type}", said))
                    continue
                found = self.finder.find(node)
            except Left as left:
                self.report.append(Entry(named(node), None, str(left)))
                continue
            if found is not None:
                self.replace(found)
        self.graph.remove_unused()
        self.graph.sort()
        if self.report.rewritten:
            if not any(o.domain == "mha" for o in self.model.opset_import):
                self.model.opset_import.append(helper.make_opsetid("mha", 1))
        return self.report

    def look_inside(self, node):
        """Attention in the bodies of If, Loop and Scan stays, but is named."""
        for a in node.attribute:
            for body in [a.g, *a.graphs] if a.type in (5, 10) else []:
                multiplied = {
                    name for inner in body.node if inner.op_type == "MatMul" for name in inner.input
                }
                for inner in body.node:
                    if (
                        is_named(inner)
                        or inner.op_type == "Softmax"
                        and inner.output[0] in multiplied
                    ):
                        self.report.append(
                            Entry(
                                named(inner),
                                None,
                                f"it is in the body of {named(node)}, where nothing is rewritten",
                            )
                        )
                    self.look_inside(inner)

    # ---- making nodes

    def make(self, op_type, inputs, outputs=None, domain="", **attributes):
        name = self.graph.new_name(f"mha_{op_type.lower()}")
        node = helper.make_node(
            op_type, inputs, outputs or [name + "_output"], name=name, domain=domain, **attributes
        )
        self.new.append(node)
        return node.output[0]

    def unsqueezed(self, value, axes):
        if self.graph.opset < 13:
            return self.make("Unsqueeze", [value], axes=axes)
        return self.make(
            "Unsqueeze", [value, self.graph.add_constant(np.array(axes, np.int64), "mha_axes")]
        )

    def number(self, value):
        return self.graph.add_constant(np.array(value, np.float32), "mha_number")

    def mask(self, masks):
        """The name of one mask in place of all."""
        if not masks:
            return ""
        if masks[0][0] == "lengths":  # the only one
            return masks[0][1]
        # A boolean one.
        if len(masks) == 1 and masks[0][0] != "padding" and masks[0][-1] == -math.inf:
            return (
                masks[0][1]
                if masks[0][0] == "keep"
                else self.made(("not", masks[0][1]), lambda: self.make("Not", [masks[0][1]]))
            )
        total = ""
        # In their order: what a Where leaves out has its number, whatever was added before.
        for mask in masks:
            if total and mask[0] in ("keep", "drop"):
                total = self.made(
                    ("where", total, mask), lambda mask=mask, total=total: self.where(mask, total)
                )
                continue
            value = self.made(mask, lambda mask=mask: self.as_added(mask))
            total = (
                self.made(
                    ("sum", total, value),
                    lambda total=total, value=value: self.make("Add", [total, value]),
                )
                if total
                else value
            )
        return total

    def made(self, what, make):
        if what not in self.masks:
            self.masks[what] = make()
        return self.masks[what]

    def as_added(self, mask):
        if mask[0] == "add":
            return mask[1]
        if mask[0] == "padding":
            keep = self.make(
                "Greater", [mask[1], self.graph.add_constant(np.array(0, np.int32), "mha_zero")]
            )
            added = self.make("Where", [keep, self.number(0.0), self.number(mask[2])])
            return self.unsqueezed(added, [1, 2] if mask[3] == 2 else [1])
        return self.where(mask, self.number(0.0))

    def where(self, mask, otherwise):
        values = [otherwise, self.number(mask[2])]
        return self.make("Where", [mask[1], *(values if mask[0] == "keep" else reversed(values))])

    # ---- replacing

    def replace(self, found):
        self.new = []
        graph = self.graph
        if found.swap:
            # The same inputs, outputs and attributes; those that mha's operator has not are at
            # their defaults.
            self.report.append(
                Entry(
                    named(found.node),
                    "mha.GroupQueryAttention",
                    ", ".join(self.said(found) + self.without),
                )
            )
            found.node.domain = "mha"
            del found.node.input[16:], found.node.input[12:14]  # empty ones
            for i in reversed(range(len(found.node.attribute))):
                if found.node.attribute[i].name in (
                    "causal",
                    "qk_output",
                    "kv_cache_bit_width",
                    "k_quant_type",
                    "sliding_window_cache",
                    "v_quant_type",
                ):
                    del found.node.attribute[i]
            return
        what = self.layer(found) or self.attention(found)
        made = self.new[-1]
        outputs = {o for o in made.output if o}
        where = next(i for i, node in enumerate(graph.graph.node) if made.output[0] in node.output)
        # What goes away is emptied of its outputs, so that each value is still made once; nobody
        # takes what else these nodes made.
        for node in graph.graph.node:
            for i, output in enumerate(node.output):
                if output in outputs:
                    node.output[i] = graph.new_name("mha_unused")
        for offset, node in enumerate(self.new):
            graph.graph.node.insert(where + offset, node)
        self.keep_shape(made.output[0])
        self.report.append(Entry(named(found.node), f"mha.{made.op_type}", what))
        graph.update()

    def keep_shape(self, name):
        """What is known of the shape of an output is written down: from the operator itself, ONNX
        Runtime learns nothing of it."""
        shape = self.graph.shape(name)
        if shape is not None and not any(
            v.name == name for v in [*self.graph.graph.value_info, *self.graph.graph.output]
        ):
            shape = [None if isinstance(d, str) and d.startswith("?") else d for d in shape]
            self.graph.graph.value_info.append(
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            )

    def common(self, found):
        attributes = {
            "softcap": found.softcap,
            "is_causal": int(found.is_causal),
            "scale": float(np.float32(found.scale)),
            "left_window_size": found.windows[0],
            "right_window_size": found.windows[1],
            "mask_filter_value": next(
                (mask[2] for mask in found.masks if mask[0] == "lengths"), -10000.0
            ),
        }
        defaults = {
            "softcap": 0.0,
            "is_causal": 0,
            "scale": 0.0,
            "left_window_size": -1,
            "right_window_size": -1,
            "mask_filter_value": -10000.0,
        }
        return {name: value for name, value in attributes.items() if value != defaults[name]}

    def attention(self, found):
        q, k, v = found.q, found.k, found.v
        if found.biases is not None:
            q, k, v = (
                (
                    self.make("Add", [name, self.graph.add_constant(array, "mha_bias")])
                    if np.any(array)
                    else name
                )
                for name, array in zip((q, k, v), found.biases)
            )
        mask = self.mask(found.masks)
        inputs = [q, k, v, mask, *found.past, found.lengths]
        while not inputs[-1]:
            inputs.pop()
        outputs = [found.output, *found.present]
        while not outputs[-1]:
            outputs.pop()
        heads = (
            {"q_num_heads": found.heads, "kv_num_heads": found.kv_heads}
            if found.heads or found.kv_heads
            else {}
        )
        self.make(
            "Attention",
            inputs,
            outputs,
            domain="mha",
            **{name: n for name, n in heads.items() if n},
            **self.common(found),
        )
        return ", ".join(self.said(found) + self.without)

    def said(self, found):
        what = []
        if found.heads:
            what.append(
                f"{found.heads} heads"
                + (f" over {found.kv_heads}" if found.kv_heads not in (0, found.heads) else "")
            )
        if found.is_causal:
            what.append("causal")
        if found.softcap:
            what.append("softcap")
        if found.masks:
            what.append("mask")
        if any(found.past):
            what.append("past")
        return what or ["[batch, heads, rows, width]"]

    def layer(self, found):
        """Makes a mha.Layer, with the projections, and returns what is said of it; or None."""
        graph = self.graph
        projections = found.projections
        if projections is None:
            if (
                any(found.past)
                or any(found.present)
                or found.lengths
                or not found.is_rows
                or not found.heads
                or not found.kv_heads
            ):
                return None
            projections = tuple(
                self.finder.projection(name) for name in (found.q, found.k, found.v)
            )
            if None in projections or any(len(graph.shape(p.x) or ()) != 3 for p in projections):
                return None
            batches = [graph.shape(p.x)[0] for p in projections]
            if len({p.x for p in projections}) > 1 and (None in batches or len(set(batches)) > 1):
                return None  # a layer takes the same batch everywhere; a product broadcasts
            nodes = found.nodes.union(*(p.nodes for p in projections))
            if not self.finder.is_inside(nodes, found.output):  # or it would be computed twice
                return None
            if found.biases is not None:
                projections = tuple(
                    dataclasses.replace(p, bias=b if p.bias is None else p.bias + b)
                    for p, b in zip(projections, found.biases)
                )
        after = self.finder.output_projection(found.output)
        w_o, b_o, output = "", None, found.output
        if after is not None and self.finder.is_inside(
            found.nodes.union(after[3], *(p.nodes for p in projections)), after[0]
        ):
            output, weight, b_o, _ = after
            w_o = self.matrix(weight)
        mask = self.mask(found.masks)
        x = [p.x for p in projections]
        query, keys, values = (
            x[0],
            x[1] if x[1] != x[0] or x[2] != x[0] else "",
            x[2] if x[2] != x[1] else "",
        )
        q, k, v = projections
        is_fused = (
            q.weight == k.weight == v.weight
            and (q.first, q.last, k.last) == (0, k.first, v.first)
            and not keys
            and not values
            and v.last == graph.constant(v.weight).shape[1]
            and q.last // found.heads == (k.last - k.first) // found.kv_heads
            and k.last - k.first == v.last - v.first
        )
        if is_fused:
            weights = [self.matrix(q.weight), "", ""]
            biases = [
                (
                    np.concatenate(
                        [
                            np.zeros(p.last - p.first, np.float32) if p.bias is None else p.bias
                            for p in projections
                        ]
                    )
                    if any(p.bias is not None for p in projections)
                    else None
                ),
                None,
                None,
            ]
        else:
            weights = [self.matrix(p.weight, p.first, p.last) for p in projections]
            biases = [p.bias for p in projections]
        biases = [
            graph.add_constant(b, f"mha_b_{name}") if b is not None else ""
            for name, b in zip("qkvo", [*biases, b_o])
        ]
        inputs = [query, keys, values, *weights, w_o, *biases, mask]
        while not inputs[-1]:
            inputs.pop()
        self.make(
            "Layer",
            inputs,
            [output],
            domain="mha",
            num_heads=found.heads,
            kv_num_heads=found.kv_heads,
            **self.common(found),
            **self.how,
        )
        return ", ".join(
            [
                *self.said(found),
                "with the projections of q, k, v" + (" and the output" if w_o else ""),
                *(f"{name} {value}" for name, value in self.how.items()),
            ]
        )

    def matrix(self, name, first=0, last=None):
        array = self.graph.constant(name)
        last = array.shape[1] if last is None else last
        if name in self.graph.initializers and (first, last) == (0, array.shape[1]):
            return name
        return self.made(
            ("matrix", name, first, last),
            lambda: self.graph.add_constant(array[:, first:last], "mha_w"),
        )
