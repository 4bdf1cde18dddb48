"""Finds attention in a graph: what it computes, of which values, and which nodes it is made of."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from onnx import TensorProto

from ._graph import attribute

# What makes no empty array out of one that is not.
kept_empty = """
    Add Cast Identity LayerNormalization MatMul MatMulNBits Mul Reshape RotaryEmbedding
    SimplifiedLayerNormalization Transpose
    """.split()


def is_named(node):
    """Whether a node's type says that it is attention, or a convolution like that before it."""
    return "Attention" in node.op_type or "CausalConv" in node.op_type


# What is known of operators: their attributes (none of those that are not here), and of attention
# how many inputs and outputs.
known_attributes = {
    (
        "",
        "Attention",
    ): (
        "is_causal kv_num_heads left_window_size q_num_heads qk_matmul_output_mode"
        " right_window_size scale softcap softmax_precision"
    ),
    (
        "com.microsoft",
        "Attention",
    ): (
        "do_rotary mask_filter_value num_heads past_present_share_buffer qkv_hidden_sizes"
        " rotary_embedding_dim scale unidirectional"
    ),
    ("com.microsoft", "MultiHeadAttention"): "mask_filter_value num_heads scale unidirectional",
    (
        "com.microsoft",
        "GroupQueryAttention",
    ): (
        "causal do_rotary k_norm_epsilon k_quant_type kv_cache_bit_width kv_num_heads"
        " local_window_size num_heads q_norm_epsilon qk_norm_epsilon qk_output rotary_interleaved"
        " scale sliding_window_cache smooth_softmax softcap v_quant_type"
    ),
    ("", "LinearAttention"): "chunk_size kv_num_heads q_num_heads scale update_rule",
    ("com.microsoft", "LinearAttention"): "chunk_size kv_num_heads q_num_heads scale state_window "
    "update_rule",
    ("", "CausalConvWithState"): "activation",
    ("com.microsoft", "CausalConvWithState"): "activation channels_last dilation "
    "input_channel_offset input_channels ndim state_channels_last state_length "
    "state_update_capacity state_window",
    ("", "Gemm"): "alpha beta transA transB",
    ("", "Reshape"): "allowzero",
    ("", "Softmax"): "axis",
    ("", "Split"): "axis num_outputs split",
    ("", "Transpose"): "perm",
    ("", "Unsqueeze"): "axes",
}
known_sizes = {
    ("", "Attention"): (7, 4),
    ("com.microsoft", "Attention"): (7, 2),
    ("com.microsoft", "MultiHeadAttention"): (10, 4),
    ("com.microsoft", "GroupQueryAttention"): (16, 4),
    ("", "LinearAttention"): (6, 2),
    ("com.microsoft", "LinearAttention"): (6, 2),
    ("", "CausalConvWithState"): (4, 2),
    ("com.microsoft", "CausalConvWithState"): (4, 2),
}


def unknown(node):
    """What of a node the finder does not know; None if it knows all. Such a node may compute
    something else."""
    kind = "" if node.domain == "ai.onnx" else node.domain, node.op_type
    names = [a.name for a in node.attribute if a.name not in known_attributes.get(kind, "").split()]
    if names:
        return f"the attribute {names[0]!r} of {node.op_type} is not known"
    for what, given, count in zip(
        ("input", "output"), (node.input, node.output), known_sizes.get(kind, ())
    ):
        if any(given[count:]):
            return f"its {what} {count} is not known"
    return None


class Left(Exception):
    """Why an attention stays as it is."""


@dataclasses.dataclass
class Projection:
    """x W + b, of some columns of a constant matrix [in, out]."""

    x: str
    weight: str
    first: int
    last: int  # after the last column
    bias: np.ndarray | None
    nodes: set


@dataclasses.dataclass
class Attention:
    """softmax(scale q k^T + masks) v. Operands are [batch, heads, rows, width] or, with is_rows,
    [batch, rows, heads * width]."""

    node: object  # that it is called by
    q: str
    k: str
    v: str
    heads: int  # of operands and output of 3 dimensions; 0 where there are none
    kv_heads: int
    scale: float  # 0 = 1 / sqrt(width)
    output: str
    is_rows: bool = False  # the output
    softcap: float = 0.0
    is_causal: bool = False
    windows: tuple = (-1, -1)
    # ("add", value), ("drop" or "keep", where, number), ("padding", value, number, dimensions), or
    # alone ("lengths", value, number)
    masks: list = dataclasses.field(default_factory=list)
    past: tuple = ("", "")
    lengths: str = ""
    present: tuple = ("", "")
    projections: tuple | None = None  # of q, k and v, where they are part of the operator
    biases: tuple | None = None  # arrays that the operator adds to q, k and v
    # First outputs of the nodes that it consists of.
    nodes: set = dataclasses.field(default_factory=set)
    swap: bool = False  # the node itself, under another domain


def key(node):
    return next(name for name in node.output if name)


def is_standard(node, op_type):
    return node is not None and node.op_type == op_type and node.domain in ("", "ai.onnx")


class Finder:
    def __init__(self, graph):
        self.graph = graph

    def made_by(self, name, op_type):
        node = self.graph.producer.get(name)
        return node if is_standard(node, op_type) and node.output[0] == name else None

    def find(self, node):
        """The attention that a node is the heart of; None if it is of another kind; Left with the
        reason if it cannot be replaced."""
        found = self.found(node)
        for name in sorted(found.nodes) if found is not None else []:
            reason = unknown(self.graph.producer[name])
            if reason:
                raise Left(reason)
        return found

    def found(self, node):
        if node.op_type == "Softmax" and node.domain in ("", "ai.onnx"):
            return self.decomposed(node)
        if node.op_type == "Attention" and node.domain in ("", "ai.onnx"):
            return self.standard(node)
        if node.domain == "com.microsoft":
            finders = {
                "Attention": self.fused,
                "MultiHeadAttention": self.multi_head,
                "GroupQueryAttention": self.group_query,
            }
            if node.op_type in finders:
                return finders[node.op_type](node)
        if is_named(node) and node.domain != "mha":
            raise Left(f"mha has no operator in place of {node.op_type}")
        return None

    # ---- operators

    def expect_float(self, *names):
        for name in names:
            kind = self.graph.type(name)
            if name and kind != TensorProto.FLOAT:
                raise Left(
                    f"'{name}' is of type {TensorProto.DataType.Name(kind).lower()}; mha's"
                    " operators take float"
                    if kind
                    else f"the type of '{name}' is not known, and mha's operators take float alone"
                )

    def mask_shape(self, name):
        shape = self.graph.shape(name)
        if shape is None:
            raise Left(f"nothing is known of the shape of the mask '{name}'")
        return shape

    def shape_with_keys(self, name):
        """The shape of a mask, of which the last extent must be that of the keys."""
        shape = self.mask_shape(name)
        if not 1 <= len(shape) <= 4 or shape[-1] == 1:
            raise Left(
                f"the mask '{name}' has the shape {shape}; mha's have up to four dimensions, of"
                " which the last is that of the keys"
            )
        return shape

    def check_columns(self, name, keys=None):
        """Refuses a mask that has one column for all keys, or nothing is known of its columns;
        `keys` is what is known of the number of keys. Names of dimensions are taken for theirs,
        those that shape inference makes too, as where a mask is cut out of a longer one."""
        shape = self.shape_with_keys(name)
        if shape[-1] is None or (
            isinstance(shape[-1], str) and shape[-1].startswith("?") and shape[-1] != keys
        ):
            raise Left(
                f"it is not known whether the mask '{name}' has one column for all keys, which"
                " mha's have not"
            )

    def added(self, name):
        """A mask that com.microsoft's operators add to the scores, [batch or 1, heads or 1, rows,
        keys]."""
        self.shape_with_keys(name)
        self.expect_float(name)
        return "add", name

    def standard(self, node):
        inputs = list(node.input) + [""] * (7 - len(node.input))
        outputs = list(node.output) + [""] * (4 - len(node.output))
        if outputs[3] and (outputs[3] in self.graph.consumers or outputs[3] in self.graph.fixed):
            raise Left("its scores are an output, which mha's operator has not")
        self.expect_float(*inputs[:3], inputs[4], inputs[5])
        if attribute(node, "softmax_precision", TensorProto.FLOAT) != TensorProto.FLOAT:
            raise Left("its softmax is asked for in another type than float")
        softcap = attribute(node, "softcap", 0.0)
        if not 0 <= softcap < math.inf:
            raise Left(f"its softcap is {softcap:g}")
        scale = attribute(node, "scale")
        # Mha takes 0 for a scale that is not given.
        if scale is not None and (scale == 0 or not math.isfinite(scale)):
            raise Left(f"its scores are multiplied by {scale:g}")
        masks = []
        if inputs[3]:
            keys = self.graph.shape(inputs[1])
            self.check_columns(
                inputs[3], keys[-2 if len(keys) == 4 else 1] if keys and not inputs[4] else None
            )
            is_boolean = self.graph.type(inputs[3]) == TensorProto.BOOL
            masks.append(("keep", inputs[3], -math.inf) if is_boolean else self.added(inputs[3]))
        rank = len(self.graph.shape(inputs[0]) or ())
        heads = attribute(node, "q_num_heads", 0)
        if not rank and not heads:
            raise Left(f"nothing is known of the shape of '{inputs[0]}'")
        if rank == 4 and heads:
            raise Left("it has q_num_heads, and its operands four dimensions")
        return Attention(
            node,
            *inputs[:3],
            heads=heads,
            kv_heads=attribute(node, "kv_num_heads", 0),
            scale=scale or 0.0,
            output=outputs[0],
            is_rows=bool(heads),
            softcap=softcap,
            is_causal=attribute(node, "is_causal", 0) == 1,
            windows=(
                attribute(node, "left_window_size", -1),
                attribute(node, "right_window_size", -1),
            ),
            masks=masks,
            past=(inputs[4], inputs[5]),
            lengths=inputs[6],
            present=(outputs[1], outputs[2]),
            nodes={key(node)},
        )

    def masks(self, node, padding, added):
        """What com.microsoft's operators leave out, by a mask of numbers or the lengths of
        sequences, and what they add to the scores."""
        masks = []
        if padding:
            rank, filter_value = (
                len(self.mask_shape(padding)),
                attribute(node, "mask_filter_value", -10000.0),
            )
            if rank not in (1, 2, 3):
                raise Left(
                    f"its mask '{padding}' has {rank} dimensions; of masks of numbers, those of 1"
                    " to 3 are rewritten"
                )
            if self.graph.type(padding) != TensorProto.INT32:
                raise Left(f"its mask '{padding}' is not of int32")
            if rank == 1 and added:
                raise Left(f"its mask '{padding}' of one dimension has another beside it")
            masks.append(
                ("padding", padding, filter_value, rank)
                if rank > 1
                else ("lengths", padding, filter_value)
            )
        return masks + [self.added(added)] if added else masks

    def fused(self, node):
        """com.microsoft.Attention."""
        inputs = list(node.input) + [""] * (7 - len(node.input))
        outputs = list(node.output) + [""] * (2 - len(node.output))
        if inputs[4] or inputs[6] or outputs[1]:
            raise Left("it has a past or a present, keys and values in one array")
        if attribute(node, "do_rotary", 0):
            raise Left("it rotates queries and keys")
        weight = self.graph.constant(inputs[1])
        bias = self.graph.constant(inputs[2]) if inputs[2] else None
        if weight is None or (inputs[2] and bias is None):
            raise Left("its weights are not constant")
        if weight.ndim != 2:
            raise Left(f"its weights have {weight.ndim} dimensions, not two")
        self.expect_float(inputs[1])
        heads = attribute(node, "num_heads", 0)
        sizes = attribute(node, "qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
        if len(sizes) != 3 or sum(sizes) != weight.shape[1]:
            raise Left(f"its qkv_hidden_sizes are {sizes}, of {weight.shape[1]} columns of weights")
        ends = np.cumsum([0, *sizes])
        projections = tuple(
            Projection(
                inputs[0],
                inputs[1],
                int(first),
                int(last),
                bias[first:last] if bias is not None else None,
                set(),
            )
            for first, last in zip(ends, ends[1:])
        )
        return Attention(
            node,
            "",
            "",
            "",
            heads=heads,
            kv_heads=heads,
            scale=attribute(node, "scale", 0.0),
            output=outputs[0],
            is_rows=True,
            is_causal=attribute(node, "unidirectional", 0) == 1,
            masks=self.masks(node, inputs[3], inputs[5]),
            projections=projections,
            nodes={key(node)},
        )

    def multi_head(self, node):
        inputs = list(node.input) + [""] * (10 - len(node.input))
        outputs = list(node.output) + [""] * (4 - len(node.output))
        query, name_k, value, bias, padding, added, past_key, past_value = inputs[:8]
        if not name_k or not value:
            raise Left("its queries, keys or values are packed into one array")
        if inputs[8] or inputs[9]:
            raise Left("its past lies in a buffer that it appends to")
        if outputs[3]:
            raise Left("its scores are an output, which mha's operator has not")
        if any(inputs[6:8]) and not all(outputs[1:3]):
            raise Left("it has a past and no present, which ONNX Runtime takes for no past")
        ranks = [len(self.graph.shape(name) or ()) for name in (name_k, value)]
        if bias and ranks != [3, 3]:
            raise Left(
                "it has a bias, and keys or values that are not known to have three dimensions"
            )
        biases = None
        if bias:
            array = self.graph.constant(bias)
            widths = [self.width(name) for name in (query, name_k, value)]
            if array is None or None in widths or sum(widths) != array.size:
                raise Left("its bias is not constant, or it is not known how it is shared")
            biases = tuple(np.split(array, np.cumsum(widths)[:2]))
        self.expect_float(query)
        heads = attribute(node, "num_heads", 0)
        return Attention(
            node,
            query,
            name_k,
            value,
            heads=heads,
            kv_heads=heads,
            scale=attribute(node, "scale", 0.0),
            output=outputs[0],
            is_rows=True,
            is_causal=attribute(node, "unidirectional", 0) == 1,
            masks=self.masks(node, padding, added),
            past=(past_key, past_value),
            present=(outputs[1], outputs[2]),
            biases=biases,
            nodes={key(node)},
        )

    def group_query(self, node):
        inputs = list(node.input) + [""] * (16 - len(node.input))
        bits = attribute(node, "kv_cache_bit_width", 0)
        kinds = [
            f"{name} is '{kind}'"
            for name in ("k_quant_type", "v_quant_type")
            if (kind := attribute(node, name, "NONE")) != "NONE"
        ]
        if bits or kinds or any(inputs[12:14]):
            raise Left(
                f"it keeps keys and values in {bits or 8} bits"
                f" ({' and '.join(kinds) or 'with scales'}); mha's operator keeps them as float"
            )
        window = attribute(node, "local_window_size", -1)
        if window == 0 or window < -1:
            raise Left(
                f"its local_window_size is {window}; mha's operator takes 1 or more, or -1 for no"
                " window"
            )
        if attribute(node, "sliding_window_cache", 0):
            raise Left(
                "its past keeps the rows of a window only (sliding_window_cache), which mha's"
                " operator does not"
            )
        if attribute(node, "causal", 1) != 1:
            raise Left("it is not causal (causal is 0), which mha's operator always is")
        if attribute(node, "qk_output", 0) or len(node.output) > 3:
            raise Left("its scores are an output, which mha's operator has not")
        if inputs[1] and not self.has_rows(inputs[1], inputs[0]):
            raise Left("its keys may have no rows, which stands for those of another layer")
        self.expect_float(inputs[0], inputs[3], inputs[14], inputs[15])
        return Attention(
            node,
            *inputs[:3],
            heads=attribute(node, "num_heads", 0),
            kv_heads=attribute(node, "kv_num_heads", 0),
            scale=0.0,
            output=node.output[0],
            swap=True,
            nodes={key(node)},
        )

    def has_rows(self, keys, queries):
        """Whether keys are known to have rows if queries [batch, rows, width] have some."""
        shapes = [self.graph.shape(name) or [None] * 3 for name in (keys, queries)]
        rows = [shape[1] if len(shape) == 3 else None for shape in shapes]
        if rows[0] is not None and (rows[0] == rows[1] or isinstance(rows[0], int)):
            return rows[0] != 0
        return bool(self.sources(keys) & self.sources(queries))

    def sources(self, name):
        """The values of which one is computed by what makes no empty array out of one that is
        not."""
        found = {name}
        for _ in range(12):
            node = self.graph.producer.get(name)
            if node is None or node.op_type not in kept_empty:
                break
            name = next((i for i in node.input if self.graph.constant(i) is None), "")
            found.add(name)
        return found - {""}

    # ---- the pattern

    def unscaled(self, name, nodes):
        """(value, factor) such that `name` is value * factor."""
        node = self.graph.producer.get(name)
        if is_standard(node, "Mul") or is_standard(node, "Div"):
            for value, other in ((0, 1), (1, 0)):
                factor = self.graph.scalar(node.input[other])
                if factor and not (node.op_type == "Div" and value == 1):
                    nodes.add(key(node))
                    inner, more = self.unscaled(node.input[value], nodes)
                    return inner, more * (factor if node.op_type == "Mul" else 1 / factor)
        return name, 1.0

    def decomposed(self, softmax):
        graph = self.graph
        axis = attribute(softmax, "axis", -1 if graph.opset >= 13 else 1)
        takers = graph.consumers.get(softmax.output[0], [])
        nodes, weights = {key(softmax)}, softmax.output[0]
        guards = [t for t in takers if is_standard(t, "IsNaN")]
        if guards:  # rows of NaN, where all is masked, become 0, as they are here
            where = graph.only_consumer(guards[0].output[0])
            if not (
                is_standard(where, "Where")
                and where.input[0] == guards[0].output[0]
                and graph.scalar(where.input[1]) == 0
                and where.input[2] == weights
            ):
                return None
            nodes |= {key(guards[0]), key(where)}
            weights = where.output[0]
        product = next(
            (
                t
                for t in graph.consumers.get(weights, [])
                if is_standard(t, "MatMul") and t.input[0] == weights
            ),
            None,
        )
        if product is None:
            between = self.before_product(weights)
            if between:
                raise Left(f"{between} stands where weights and values are multiplied by MatMul")
            return None
        scores = self.scores(softmax.input[0])
        if scores is None or scores.is_tanh:
            raise Left(
                "what leads to its softmax is not a product of queries and keys with factors and"
                " masks in an order that is known"
            )
        nodes |= scores.nodes | {key(product)}
        rank = (
            max(
                (
                    self.rank(name) or 0
                    for name in (
                        softmax.input[0],
                        scores.product.output[0],
                        scores.product.input[0],
                    )
                ),
                default=0,
            )
            or None
        )
        if rank != 4:
            raise Left(
                "it is not known to have four dimensions, [batch, heads, queries, keys]"
                if rank is None
                else f"its scores have {rank} dimensions, not four"
            )
        if axis not in (-1, 3):
            raise Left(f"its softmax is over axis {axis}, not the keys")
        self.check_inside(nodes, product.output[0])

        q, q_factor = self.unscaled(scores.product.input[0], nodes)
        k4, k_factor = self.keys_of(scores.product.input[1], nodes)
        v4 = product.input[1]
        scale = scores.factor * q_factor * k_factor
        if scores.softcap is not None and not scores.softcap > 0 or not math.isfinite(scale):
            raise Left("its factors are not those of attention")
        self.expect_float(q, v4)
        result = Attention(
            softmax,
            q,
            k4,
            v4,
            heads=0,
            kv_heads=0,
            scale=scale,
            output=product.output[0],
            softcap=scores.softcap or 0.0,
            masks=scores.masks,
            nodes=nodes,
        )
        result.k, result.v = self.shared_heads(result.k, nodes), self.shared_heads(result.v, nodes)
        self.check_extents(result)
        self.by_rows(result, product)
        if np.float32(result.scale) == 0 or not abs(result.scale) <= np.finfo(np.float32).max:
            raise Left(
                f"its scores are multiplied by {result.scale:g}, which is 0 or infinite as a float"
            )
        return result

    def before_product(self, name, depth=0):
        """The type of the node by which weights lead to a product, if it is no MatMul of weights
        and values itself; or None."""
        for taker in self.graph.consumers.get(name, []) if depth < 4 else []:
            if taker.op_type in ("Einsum", "MatMul"):
                return taker.op_type
            passing = "Cast Dropout Identity IsNaN Mul Reshape Transpose Where".split()
            if taker.op_type in passing and self.before_product(taker.output[0], depth + 1):
                return taker.op_type
        return None

    def check_extents(self, found):
        """Refuses operands and masks that MatMul, Add and Where broadcast as mha's operator does
        not."""
        shapes = {}
        for which in "qkv":
            name = getattr(found, which)
            by_rows = isinstance(name, tuple)  # keys [batch, rows, heads, width]
            name = name[1].input[0] if by_rows else name
            rank = self.rank(name)
            # A Transpose of four dimensions takes the keys.
            if rank != 4 and not (which == "k" and rank is None):
                raise Left(
                    f"'{name}' is not known to have four dimensions"
                    if rank is None
                    else f"'{name}' has {rank} dimensions, not four"
                )
            shape = self.graph.shape(name) or [None] * 4
            shapes[which] = [shape[i] for i in (0, 2, 1, 3)] if by_rows else shape
        q, k, v = ([d if isinstance(d, int) else None for d in shapes[which]] for which in "qkv")
        if None not in (k[1], v[1]) and k[1] != v[1] or None not in (k[2], v[2]) and k[2] != v[2]:
            raise Left(
                f"keys are {shapes['k']} and values {shapes['v']}; mha's have the same heads and"
                " rows"
            )
        if q[1] is not None and any(heads and q[1] % heads for heads in (k[1], v[1])):
            raise Left(
                f"queries have {q[1]} heads, and keys or values others, of which that is no"
                " multiple"
            )
        if len({d for d in (q[0], k[0], v[0]) if d not in (None, 1)}) > 1:
            raise Left("queries, keys and values are of different batches")
        batch = next((d for d in (q[0], k[0], v[0]) if d != 1), 1)
        most = [batch, q[1], q[2], k[2]]  # what a mask has to broadcast to, where it is known
        for kind, name, *number in found.masks:
            self.check_columns(name, shapes["k"][2])
            if kind == "add":
                self.expect_float(name)
            elif not number[0] <= -1e30:
                raise Left(
                    f"what its mask leaves out gets a score of {number[0]:g}, which may still count"
                )
            shape = self.graph.shape(name)
            if any(
                isinstance(d, int) and d != 1 and to is not None and d != to
                for d, to in zip(reversed(shape), reversed(most))
            ):
                raise Left(
                    f"the mask '{name}' has the shape {shape}, which does not broadcast to the"
                    " scores"
                )

    def check_inside(self, nodes, output):
        for name in nodes:
            for value in self.graph.producer[name].output:
                if value and value != output:
                    takers = self.graph.consumers.get(value, [])
                    if value in self.graph.fixed or not all(
                        self.ends_inside(t, nodes) for t in takers
                    ):
                        raise Left(f"'{value}', which is inside of it, is used elsewhere")

    def is_inside(self, nodes, output):
        try:
            self.check_inside(nodes, output)
        except Left:
            return False
        return True

    def ends_inside(self, node, nodes, depth=0):
        """Whether a node is one of these, or computes only what they take, such as a shape."""
        if key(node) in nodes:
            return True
        if depth > 8 or any(name in self.graph.fixed for name in node.output):
            return False
        return all(
            self.ends_inside(t, nodes, depth + 1)
            for name in node.output
            for t in self.graph.consumers.get(name, [])
        )

    def taker(self, name, *op_types):
        """The one node of these kinds that takes a value, beside others that may only take its
        shape (is_inside tells); or None."""
        takers = [
            t
            for t in self.graph.consumers.get(name, [])
            if t.op_type in op_types and t.domain in ("", "ai.onnx")
        ]
        return (
            takers[0]
            if len(takers) == 1
            and list(takers[0].input).count(name) == 1
            and name not in self.graph.fixed
            else None
        )

    @dataclasses.dataclass
    class Scores:
        product: object
        nodes: set
        factor: float = 1.0
        softcap: float | None = None
        is_tanh: bool = False  # just now: what comes next is the cap
        masks: list = dataclasses.field(default_factory=list)

    def scores(self, name, depth=0):
        """What leads from a product to the scores `name`, or None."""
        node = self.graph.producer.get(name)
        if node is None or node.domain not in ("", "ai.onnx") or depth > 12:
            return None
        if node.op_type == "MatMul":
            return self.Scores(node, {key(node)})
        if node.op_type in ("Mul", "Div"):
            for value, other in ((0, 1), (1, 0)):
                factor = self.graph.scalar(node.input[other])
                if not factor or (node.op_type == "Div" and value == 1):
                    continue
                found = self.scores(node.input[value], depth + 1)
                if found is None or found.masks:  # a mask would be multiplied too
                    return None
                factor = factor if node.op_type == "Mul" else 1 / factor
                if found.is_tanh:
                    found.softcap, found.factor, found.is_tanh = (
                        factor,
                        found.factor * factor,
                        False,
                    )
                elif found.softcap is not None:
                    return None
                else:
                    found.factor *= factor
                found.nodes.add(key(node))
                return found
        if node.op_type == "Tanh":
            found = self.scores(node.input[0], depth + 1)
            if found is None or found.masks or found.softcap is not None or found.is_tanh:
                return None
            found.is_tanh, found.nodes = True, found.nodes | {key(node)}
            return found
        if node.op_type == "Add":
            for value, other in ((0, 1), (1, 0)):
                found = self.scores(node.input[value], depth + 1)
                if found is not None and not found.is_tanh:
                    found.masks.append(("add", node.input[other]))
                    found.nodes.add(key(node))
                    return found
        if node.op_type == "Where":
            for value, other, kind in ((1, 2, "keep"), (2, 1, "drop")):
                number = self.graph.scalar(node.input[other])
                found = self.scores(node.input[value], depth + 1) if number is not None else None
                if found is not None and not found.is_tanh:
                    found.masks.append((kind, node.input[0], number))
                    found.nodes.add(key(node))
                    return found
        return None

    def rank(self, name, depth=0):
        shape, node = self.graph.shape(name), self.graph.producer.get(name)
        if shape is not None or node is None or depth > 4:
            return None if shape is None else len(shape)
        if is_standard(node, "Transpose") and attribute(node, "perm"):
            return len(attribute(node, "perm"))
        if is_standard(node, "Reshape"):
            to = self.graph.constant(node.input[1])
            return None if to is None else to.size
        if any(is_standard(node, kind) for kind in ("Softmax", "Neg")):
            return self.rank(node.input[0], depth + 1)
        if any(is_standard(node, kind) for kind in ("Add", "Div", "Mul", "Sub")):
            ranks = [self.rank(i, depth + 1) for i in node.input]
            return None if None in ranks else max(ranks)
        return None

    def keys_of(self, name, nodes):
        """(k, factor) such that `name` is k * factor with its last two dimensions exchanged."""
        name, factor = self.unscaled(name, nodes)
        node = self.made_by(name, "Transpose")
        perm = attribute(node, "perm") if node is not None else None
        if perm == [0, 1, 3, 2]:
            nodes.add(key(node))
            inner, more = self.unscaled(node.input[0], nodes)
            return inner, factor * more
        # Keys that were never put into the order [batch, heads, rows, width].
        if perm == [0, 2, 3, 1]:
            return ("transposed", node), factor
        raise Left("its keys are not transposed by a Transpose of their last two dimensions")

    def shared_heads(self, name, nodes):
        """The keys or values that several heads share, before they are repeated for each."""
        if isinstance(name, tuple):
            return name
        reshape = self.made_by(name, "Reshape")
        expand = self.made_by(reshape.input[0], "Expand") if reshape is not None else None
        unsqueeze = self.made_by(expand.input[0], "Unsqueeze") if expand is not None else None
        if unsqueeze is None:
            return name
        axes = (
            self.graph.constant(unsqueeze.input[1])
            if len(unsqueeze.input) > 1
            else np.array(attribute(unsqueeze, "axes", []))
        )
        few, many = self.graph.shape(unsqueeze.input[0]), self.graph.shape(name)
        repeated = self.graph.shape(expand.output[0])
        if (
            axes is None
            or axes.tolist() != [2]
            or not few
            or not many
            or not repeated
            or len(few) != 4
            or len(many) != 4
            or len(repeated) != 5
        ):
            return name
        same = [
            few[i] is not None and few[i] == many[i] == repeated[j]
            for i, j in ((0, 0), (2, 3), (3, 4))
        ]
        if not (
            isinstance(few[1], int)
            and repeated[1] == few[1]
            and isinstance(repeated[2], int)
            and many[1] == few[1] * repeated[2]
            and all(same)
        ):
            return name
        nodes |= {key(reshape), key(expand), key(unsqueeze)}
        return unsqueeze.input[0]

    def width(self, name):
        """The last extent of a value, if it is known."""
        shape = self.graph.shape(name)
        if shape and isinstance(shape[-1], int):
            return shape[-1]
        projection = self.projection(name)
        return projection.last - projection.first if projection else None

    def split_rows(self, reshape):
        """(x, heads) if a Reshape takes [batch, rows, heads * width] to [batch, rows, heads,
        width]."""
        if not is_standard(reshape, "Reshape"):
            return None
        x, to = reshape.input[0], self.graph.constant(reshape.input[1])
        before, after = self.graph.shape(x), self.graph.shape(reshape.output[0])
        to = to.tolist() if to is not None and to.ndim == 1 else None
        if (
            (to is not None and len(to) != 4)
            or (after is not None and len(after) != 4)
            or (to is None and after is None)
        ):
            return None
        if attribute(reshape, "allowzero", 0) or (before is not None and len(before) != 3):
            return None
        to, after, before = to or [None] * 4, after or [None] * 4, before or [None] * 3
        total = self.width(x)
        heads = (
            to[2]
            if isinstance(to[2], int) and to[2] > 0
            else after[2]
            if isinstance(after[2], int)
            else None
        )
        each = (
            to[3]
            if isinstance(to[3], int) and to[3] > 0
            else after[3]
            if isinstance(after[3], int)
            else None
        )
        if not heads or not total or total % heads or (each is not None and heads * each != total):
            return None
        kept = [
            to[i] == 0 or (before[i] is not None and before[i] in (after[i], to[i])) for i in (0, 1)
        ]
        # Of batch, rows and width of a row, the third follows from the other two.
        return (x, heads) if sum(kept) + (each is not None) >= 2 else None

    def merged_rows(self, product, like, width):
        """The name of [batch, rows, heads * width] that the result [batch, heads, rows, width] of a
        product becomes, and the nodes."""
        transpose = self.taker(product.output[0], "Transpose")
        if transpose is None or attribute(transpose, "perm") != [0, 2, 1, 3]:
            return None
        reshape = self.taker(transpose.output[0], "Reshape")
        if reshape is None or attribute(reshape, "allowzero", 0) or not width:
            return None
        to, after = self.graph.constant(reshape.input[1]), self.graph.shape(reshape.output[0])
        to = to.tolist() if to is not None and to.ndim == 1 else None
        if (
            (to is not None and len(to) != 3)
            or (after is not None and len(after) != 3)
            or (to is None and after is None)
        ):
            return None
        to, after, before = (
            to or [None] * 3,
            after or [None] * 3,
            self.graph.shape(like) or [None] * 3,
        )
        kept = [
            to[i] == 0 or (before[i] is not None and before[i] in (after[i], to[i])) for i in (0, 1)
        ] + [width in (to[2], after[2])]
        return (reshape.output[0], {key(transpose), key(reshape)}) if sum(kept) >= 2 else None

    def by_rows(self, found, product):
        """Takes operands and output as rows, without the reshapes and transposes around, where
        these are no more than that."""
        heads, nodes, scales = {}, {}, 1.0
        for which in "qkv":
            name = getattr(found, which)
            node = name[1] if isinstance(name, tuple) else self.made_by(name, "Transpose")
            if node is None or (
                not isinstance(name, tuple) and attribute(node, "perm") != [0, 2, 1, 3]
            ):
                continue
            inner, own = node.input[0], {key(node)}
            factor = 1.0
            if which != "v":
                inner, factor = self.unscaled(inner, own)
            reshape = self.graph.producer.get(inner)
            split = self.split_rows(reshape)
            if split is not None:
                x, more = split[0], 1.0
                own.add(key(reshape))
                if which != "v":
                    x, more = self.unscaled(x, own)
                heads[which], nodes[which] = (x, split[1], factor * more), own
        if isinstance(found.k, tuple) and "k" not in heads:
            raise Left(
                "its keys come from no Reshape to [batch, rows, heads, width] that is known to"
                " leave batch and rows alone"
            )
        for which in "kv":
            if which in heads:
                setattr(found, which, heads[which][0])
                found.kv_heads = heads[which][1]
                found.nodes |= nodes[which]
                scales *= heads[which][2]
        if "k" in heads and "v" in heads and heads["k"][1] != heads["v"][1]:
            raise Left("keys and values have different numbers of heads")
        values = self.width(found.v) if "v" in heads else (self.graph.shape(found.v) or [None])[-1]
        each = (
            values // heads["v"][1]
            if "v" in heads and values
            else values
            if isinstance(values, int)
            else None
        )
        merged = (
            self.merged_rows(product, heads["q"][0], heads["q"][1] * each)
            if "q" in heads and each
            else None
        )
        if merged and self.is_inside(found.nodes | nodes["q"] | merged[1], merged[0]):
            found.q, found.heads, found.is_rows = heads["q"][0], heads["q"][1], True
            found.output = merged[0]
            found.nodes |= nodes["q"] | merged[1]
            scales *= heads["q"][2]
        found.scale *= scales

    # ---- projections

    def projection(self, name):
        """x W + b with constant W [in, out] and b, or None."""
        node = self.graph.producer.get(name)
        if node is None or node.domain not in ("", "ai.onnx") or unknown(node):
            return None
        if node.op_type == "MatMul":
            weight, rows = self.graph.constant(node.input[1]), self.graph.shape(node.input[0])
            if (
                weight is None
                or weight.ndim != 2
                or weight.dtype != np.float32
                or (rows is not None and len(rows) != 3)
            ):
                return None
            return Projection(node.input[0], node.input[1], 0, weight.shape[1], None, {key(node)})
        if node.op_type == "Add":
            for value, other in ((0, 1), (1, 0)):
                bias = self.graph.constant(node.input[other])
                found = (
                    self.projection(node.input[value])
                    if bias is not None and bias.dtype == np.float32
                    else None
                )
                if (
                    found is not None
                    and found.bias is None
                    and 1 <= bias.ndim <= 3
                    and bias.size == found.last - found.first == bias.shape[-1]
                ):
                    return dataclasses.replace(
                        found, bias=bias.ravel(), nodes=found.nodes | {key(node)}
                    )
            return None
        if node.op_type == "Split":
            shape = self.graph.shape(name)
            found = self.projection(node.input[0])
            if (
                found is None
                or shape is None
                or not isinstance(shape[-1], int)
                or attribute(node, "axis", 0) not in (-1, len(shape) - 1)
            ):
                return None
            first = found.first
            for output in node.output:
                width = (self.graph.shape(output) or [None])[-1]
                if not isinstance(width, int):
                    return None
                if output == name:
                    bias = (
                        found.bias[first - found.first : first - found.first + width]
                        if found.bias is not None
                        else None
                    )
                    return Projection(
                        found.x, found.weight, first, first + width, bias, found.nodes | {key(node)}
                    )
                first += width
            return None
        # [batch, rows, in] -> [batch * rows, in] -> Gemm -> [batch, rows, out].
        if node.op_type == "Reshape":
            gemm = self.made_by(node.input[0], "Gemm")
            flat = self.made_by(gemm.input[0], "Reshape") if gemm is not None else None
            if (
                flat is None
                or unknown(gemm)
                or unknown(flat)
                or attribute(gemm, "alpha", 1.0) != 1
                or attribute(gemm, "beta", 1.0) != 1
                or attribute(gemm, "transA", 0)
                or attribute(gemm, "transB", 0)
            ):
                return None
            before, after, weight = (
                self.graph.shape(flat.input[0]),
                self.graph.shape(name),
                self.graph.constant(gemm.input[1]),
            )
            bias = (
                self.graph.constant(gemm.input[2])
                if len(gemm.input) > 2 and gemm.input[2]
                else None
            )
            between = self.graph.shape(gemm.input[0])
            if (
                weight is None
                or weight.dtype != np.float32
                or not before
                or not after
                or not between
                or len(before) != 3
                or len(after) != 3
            ):
                return None
            if (
                after[2] != weight.shape[1]
                or before[2] != weight.shape[0]
                or between[-1] != before[2]
                or before[0] is None
                or before[0] != after[0]
            ):
                return None
            if (
                len(gemm.input) > 2
                and gemm.input[2]
                and (bias is None or bias.dtype != np.float32 or bias.size != weight.shape[1])
            ):
                return None
            return Projection(
                flat.input[0],
                gemm.input[1],
                0,
                weight.shape[1],
                bias.ravel() if bias is not None else None,
                {key(node), key(gemm), key(flat)},
            )
        return None

    def output_projection(self, name):
        """(name of what follows, W, b or None, nodes) if a value is only multiplied by a constant
        matrix, or None."""
        node = self.taker(name, "MatMul", "Reshape")
        if is_standard(node, "MatMul") and node.input[0] == name and not unknown(node):
            weight = self.graph.constant(node.input[1])
            if weight is None or weight.ndim != 2 or weight.dtype != np.float32:
                return None
            result, nodes, bias = node.output[0], {key(node)}, None
            add = self.graph.only_consumer(result)
            if is_standard(add, "Add") and not unknown(add):
                array = self.graph.constant(
                    add.input[1] if add.input[0] == result else add.input[0]
                )
                if (
                    array is not None
                    and array.dtype == np.float32
                    and 1 <= array.ndim <= 3
                    and array.size == weight.shape[1] == array.shape[-1]
                ):
                    result, bias = add.output[0], array.ravel()
                    nodes.add(key(add))
            return result, node.input[1], bias, nodes
        if is_standard(node, "Reshape"):
            gemm = self.taker(node.output[0], "Gemm")
            last = self.taker(gemm.output[0], "Reshape") if gemm is not None else None
            if last is not None:
                found = self.projection(last.output[0])
                if found is not None and found.x == name:
                    return last.output[0], found.weight, found.bias, found.nodes
        return None
