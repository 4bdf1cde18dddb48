"""The model of minilm.py for ONNX Runtime, made of ONNX's own operators: what `minilm.py --compare`
compares with."""

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """A graph under construction. Values are known by their names."""

    def __init__(self, weights):
        self.weights, self.nodes, self.constants = weights, [], {}

    def apply(self, operator, *inputs, **attributes):
        output = f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def constant(self, array):
        name = f"constant_{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def weight(self, name):
        self.constants[name] = self.weights[name]
        return name

    def linear(self, x, name):
        """x W^T + b, which is nn.Linear's."""
        transposed = self.apply("Transpose", self.weight(name + ".weight"), perm=[1, 0])
        return self.apply("Add", self.apply("MatMul", x, transposed), self.weight(name + ".bias"))

    def layer_norm(self, x, name, epsilon):
        return self.apply(
            "LayerNormalization",
            x,
            self.weight(name + ".weight"),
            self.weight(name + ".bias"),
            axis=-1,
            epsilon=epsilon,
        )

    def heads(self, x, num_heads, perm):
        """[batch, n, width] as [batch, num_heads, n, head_dim], or with its last axes in another
        order."""
        return self.apply(
            "Transpose",
            self.apply("Reshape", x, self.constant(np.array([0, 0, num_heads, -1]))),
            perm=perm,
        )

    def attention(self, x, name, num_heads, head_dim, mask):
        q = self.heads(self.linear(x, name + "self.query"), num_heads, [0, 2, 1, 3])
        k = self.heads(self.linear(x, name + "self.key"), num_heads, [0, 2, 3, 1])
        v = self.heads(self.linear(x, name + "self.value"), num_heads, [0, 2, 1, 3])
        scores = self.apply(
            "Div", self.apply("MatMul", q, k), self.constant(np.float32(np.sqrt(head_dim)))
        )
        weights = self.apply("Softmax", self.apply("Add", scores, mask), axis=-1)
        context = self.apply("Transpose", self.apply("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self.linear(
            self.apply("Reshape", context, self.constant(np.array([0, 0, -1]))),
            name + "output.dense",
        )

    def gelu(self, x):
        erf = self.apply("Erf", self.apply("Div", x, self.constant(np.float32(np.sqrt(2)))))
        return self.apply(
            "Mul",
            x,
            self.apply(
                "Mul",
                self.apply("Add", erf, self.constant(np.float32(1))),
                self.constant(np.float32(0.5)),
            ),
        )


def model_of(weights, config, ids, lengths):
    """A model for these sentences, and its inputs."""
    graph, epsilon, num_heads = (
        Graph(weights),
        config["layer_norm_eps"],
        config["num_attention_heads"],
    )
    words = graph.apply("Gather", graph.weight("embeddings.word_embeddings.weight"), "ids")
    positions = graph.constant(weights["embeddings.position_embeddings.weight"][: ids.shape[1]])
    kind = graph.constant(weights["embeddings.token_type_embeddings.weight"][0])
    x = graph.layer_norm(
        graph.apply("Add", graph.apply("Add", words, kind), positions),
        "embeddings.LayerNorm",
        epsilon,
    )
    for number in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{number}."
        attended = graph.attention(
            x, name + "attention.", num_heads, config["hidden_size"] // num_heads, "mask"
        )
        x = graph.layer_norm(
            graph.apply("Add", attended, x), name + "attention.output.LayerNorm", epsilon
        )
        inner = graph.gelu(graph.linear(x, name + "intermediate.dense"))
        x = graph.layer_norm(
            graph.apply("Add", graph.linear(inner, name + "output.dense"), x),
            name + "output.LayerNorm",
            epsilon,
        )
    mean = graph.apply(
        "ReduceSum", graph.apply("Mul", x, "share"), graph.constant(np.array([1])), keepdims=0
    )
    embeddings = graph.apply("LpNormalization", mean, axis=1, p=2)

    is_token = np.arange(ids.shape[1]) < lengths[:, None]
    inputs = {
        "ids": ids,
        # Added to the scores.
        "mask": (
            np.where(is_token, 0, np.finfo(np.float32).min).astype(np.float32)[:, None, None, :]
        ),
        # Of each token in the mean.
        "share": (is_token / lengths[:, None]).astype(np.float32)[:, :, None],
    }
    types = {"ids": TensorProto.INT64, "mask": TensorProto.FLOAT, "share": TensorProto.FLOAT}
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "minilm",
            [
                helper.make_tensor_value_info(name, types[name], a.shape)
                for name, a in inputs.items()
            ],
            [
                helper.make_tensor_value_info(
                    embeddings, TensorProto.FLOAT, [len(ids), config["hidden_size"]]
                )
            ],
            [
                numpy_helper.from_array(np.ascontiguousarray(array), name)
                for name, array in graph.constants.items()
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.checker.check_model(model)
    return model, inputs


def embed(weights, config, ids, lengths):
    """The embeddings [batch, hidden_size] of sentences, each of length 1."""
    model, inputs = model_of(weights, config, ids, lengths)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)[0]
