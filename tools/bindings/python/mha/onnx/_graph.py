"""A model's graph as the rewriter looks at it: who makes and takes a value, its shape and type, and
what is constant."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ._files import without_arrays

# What computes constants of constants, one node at a time. Shapes are computed with what is known
# of them, see constant().
folded = set(
    """
    Add Cast Concat Constant ConstantOfShape Div Expand Gather Identity Mul Neg Pow Range
    Reciprocal Reshape Shape Slice Split Sqrt Squeeze Sub Transpose Unsqueeze
    """.split()
)
# Operators whose first output has the type of their first input, for what type inference does not
# reach.
of_input_type = set(
    """
    Add Sub Mul Div MatMul Gemm Transpose Reshape Concat Softmax Split Slice Unsqueeze Squeeze
    LayerNormalization SkipLayerNormalization SimplifiedLayerNormalization
    SkipSimplifiedLayerNormalization RMSNormalization RotaryEmbedding CausalConvWithState
    LinearAttention LinearAttentionGate LpNormalization Softplus Attention MultiHeadAttention
    GroupQueryAttention Gelu FastGelu BiasGelu QuickGelu MatMulNBits FusedMatMul Layer Tanh
    Sigmoid Identity Gather
    """.split()
)


class Graph:
    def __init__(self, model):
        self.model, self.graph = model, model.graph
        self.opset = max(
            (o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1
        )
        self.initializers = {i.name: i for i in self.graph.initializer}
        for graph_input in self.graph.input:  # a default that the caller may replace is no constant
            self.initializers.pop(graph_input.name, None)
        self.outputs = {o.name for o in self.graph.output}
        # Values that somebody outside of the graph's own nodes takes.
        self.fixed = set(self.outputs)
        for node in self.graph.node:
            for attribute in node.attribute:
                for body in [attribute.g, *attribute.graphs] if attribute.type in (5, 10) else []:
                    self.fixed |= names_in(body)
        self._constants, self._made = {}, 0
        self._names = {
            n for node in self.graph.node for n in [*node.input, *node.output, node.name]
        } | set(self.initializers)
        self._infer()
        self.update()

    def update(self):
        """Looks at the nodes again, after some were added or taken out."""
        self.producer = {name: node for node in self.graph.node for name in node.output if name}
        self.consumers = {}
        for node in self.graph.node:
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)

    def _infer(self):
        model = without_arrays(self.model, [])
        # Unnamed dimensions get names, so that it is seen where they come again.
        for value in model.graph.input:
            if value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape"):
                for i, dim in enumerate(value.type.tensor_type.shape.dim):
                    if not dim.HasField("dim_value") and not dim.dim_param:
                        dim.dim_param = f"?{value.name}:{i}"
        try:
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        except Exception:  # it raises what it likes; then what the model says itself is known
            pass
        self.shapes, self.types = {}, {}
        for value in [*model.graph.input, *model.graph.value_info, *model.graph.output]:
            tensor = value.type.tensor_type
            if tensor.elem_type:
                self.types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.shapes[value.name] = [
                    d.dim_value if d.HasField("dim_value") else d.dim_param or None
                    for d in tensor.shape.dim
                ]
        for name, tensor in self.initializers.items():
            self.shapes[name], self.types[name] = list(tensor.dims), tensor.data_type
        for node in self.graph.node:  # the lengths of sequences, of which inference knows nothing
            if node.op_type == "EmbedLayerNormalization" and len(node.output) > 1:
                self.shapes[node.output[1]], self.types[node.output[1]] = [None], TensorProto.INT32

    def shape(self, name):
        """A number for each dimension, a name where it is the same as others of that name, None
        where nothing is known; None without a rank."""
        return self.shapes.get(name)

    def type(self, name, depth=0):
        if name in self.types or depth > 100:
            return self.types.get(name)
        node = self.producer.get(name)
        if node is None:
            return None
        if node.op_type == "Cast":
            return attribute(node, "to")
        is_like_first = node.op_type in ("Split", "LinearAttentionGate") or name == node.output[0]
        if node.op_type in of_input_type and is_like_first:
            return self.type(node.input[0], depth + 1)
        if node.op_type == "EmbedLayerNormalization" and name == node.output[0]:
            return self.type(node.input[2], depth + 1)
        return None

    def constant(self, name, depth=0):
        """The array that a value always is, or None. Of a shape that is known in part, an array of
        objects: numbers, names of dimensions, None."""
        if name in self._constants:
            return self._constants[name]
        value = None
        if name in self.initializers:
            value = numpy_helper.to_array(self.initializers[name])
            if value.size > 1 << 14:  # one more copy of all weights would stay otherwise
                return value
        elif name in self.producer and depth < 40:
            value = self._computed(self.producer[name], name, depth)
        self._constants[name] = value
        return value

    def _computed(self, node, name, depth):
        if node.op_type not in folded or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Shape":
            shape = self.shape(node.input[0])
            if shape is None or attribute(node, "start") or attribute(node, "end"):
                return None
            if all(isinstance(d, int) for d in shape):
                return np.array(shape, np.int64)
            return np.array(shape, object)
        inputs = [self.constant(i, depth + 1) if i else None for i in node.input]
        if any(i and value is None for i, value in zip(node.input, inputs)):
            return None
        if any(value is not None and value.dtype == object for value in inputs):
            try:
                return self._part_of_shape(node, inputs)
            except (IndexError, ValueError, TypeError):
                return None
        if sum(value.nbytes for value in inputs if value is not None) > 1 << 28:
            return None
        given = [n for n in node.input if n]
        graph = helper.make_graph(
            [node],
            "one",
            [
                helper.make_value_info(
                    n,
                    helper.make_tensor_type_proto(
                        helper.np_dtype_to_tensor_dtype(v.dtype), v.shape
                    ),
                )
                for n, v in zip(node.input, inputs)
                if n
            ],
            [helper.make_value_info(name, onnx.TypeProto())],
        )
        from onnx.reference import ReferenceEvaluator

        try:
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
            return np.asarray(
                ReferenceEvaluator(model).run(
                    [name], {n: v for n, v in zip(node.input, inputs) if n in given}
                )[0]
            )
        except Exception:  # of whatever kind: then it is not known
            return None

    @staticmethod
    def _part_of_shape(node, inputs):
        """What takes shapes apart and puts them together, of one that is known in part."""
        result = None
        if node.op_type == "Gather" and inputs[1].dtype != object:
            result = inputs[0][inputs[1]]
        elif node.op_type == "Slice" and len(inputs) >= 3:
            step = int(inputs[4].ravel()[0]) if len(inputs) > 4 and inputs[4] is not None else 1
            result = inputs[0][slice(int(inputs[1].ravel()[0]), int(inputs[2].ravel()[0]), step)]
        elif node.op_type == "Concat":
            result = np.concatenate([value.astype(object) for value in inputs])
        elif node.op_type in ("Unsqueeze", "Squeeze"):  # of a number or a list of one
            result = inputs[0].reshape(1) if node.op_type == "Unsqueeze" else inputs[0].reshape(())
        elif node.op_type == "Identity" or (
            node.op_type == "Cast" and attribute(node, "to") == TensorProto.INT64
        ):
            result = inputs[0]
        if result is None:
            return None
        result = np.asarray(result, object)
        return (
            result.astype(np.int64)
            if all(isinstance(v, (int, np.integer)) for v in result.ravel())
            else result
        )

    def scalar(self, name):
        """The number that a value always is, or None."""
        value = self.constant(name)
        return (
            float(value.ravel()[0])
            if value is not None and value.size == 1 and value.dtype != object
            else None
        )

    def only_consumer(self, name):
        """The one node that takes a value, or None."""
        takers = self.consumers.get(name, [])
        return (
            takers[0]
            if len(takers) == 1
            and list(takers[0].input).count(name) == 1
            and name not in self.fixed
            else None
        )

    def new_name(self, wish):
        name = wish
        while name in self._names:
            self._made += 1
            name = f"{wish}_{self._made}"
        self._names.add(name)
        return name

    def add_constant(self, array, wish):
        name = self.new_name(wish)
        self.graph.initializer.append(numpy_helper.from_array(array.copy(order="C"), name))
        tensor = self.initializers[name] = self.graph.initializer[-1]
        self.shapes[name], self.types[name] = list(array.shape), tensor.data_type
        return name

    def remove_unused(self):
        """Takes out nodes and initialisers that nothing takes any more."""
        while True:
            used = self.fixed | {name for node in self.graph.node for name in node.input}
            unused = [
                i
                for i, node in enumerate(self.graph.node)
                if node.output and not any(name in used for name in node.output if name)
            ]
            for i in reversed(unused):
                del self.graph.node[i]
            if not unused:
                break
        inputs = {i.name for i in self.graph.input}
        for values in self.graph.initializer, self.graph.value_info:
            for i in reversed(
                [
                    i
                    for i, value in enumerate(values)
                    if value.name not in used and value.name not in inputs
                ]
            ):
                del values[i]
        self.update()

    def sort(self):
        """Puts nodes after what they take, each as early as it may be and otherwise in the order
        that they had."""
        nodes, made = list(self.graph.node), set()
        result, waiting = [], {}
        missing = {}
        for i, node in enumerate(nodes):
            missing[i] = {
                name
                for name in [*node.input, *self._outer(node)]
                if name in self.producer and name not in made
            }
            for name in missing[i]:
                waiting.setdefault(name, []).append(i)
            ready = [i] if not missing[i] else []
            while ready:
                first = ready.pop(0)
                result.append(first)
                for name in nodes[first].output:
                    made.add(name)
                    for other in waiting.pop(name, []):
                        missing[other].discard(name)
                        if not missing[other]:
                            ready.append(other)
        if result != list(range(len(nodes))) and len(result) == len(nodes):
            copies = []
            for i in result:
                copies.append(onnx.NodeProto())
                copies[-1].CopyFrom(nodes[i])
            del self.graph.node[:]
            self.graph.node.extend(copies)
            self.update()

    @staticmethod
    def _outer(node):
        return {
            name
            for a in node.attribute
            for body in ([a.g, *a.graphs] if a.type in (5, 10) else [])
            for name in names_in(body)
        }


def attribute(node, name, otherwise=None):
    for a in node.attribute:
        if a.name == name:
            value = helper.get_attribute_value(a)
            return value.decode() if isinstance(value, bytes) else value
    return otherwise


def names_in(graph):
    names = {name for node in graph.node for name in node.input} | {o.name for o in graph.output}
    for node in graph.node:
        for a in node.attribute:
            for body in [a.g, *a.graphs] if a.type in (5, 10) else []:
                names |= names_in(body)
    return names
