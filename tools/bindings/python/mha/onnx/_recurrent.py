"""ONNX's LinearAttention and CausalConvWithState (opset 27), which mha has under the same names."""

from __future__ import annotations

from onnx import TensorProto

from ._find import Left, attribute

recurrent_types = "LinearAttention", "CausalConvWithState"


def take(node, graph):
    """Makes a node mha's, and says what it does; None of another node. Raises Left where mha has
    not the like of it."""
    if node.op_type not in recurrent_types or node.domain not in ("", "ai.onnx"):
        return None
    for name in node.input:
        if name and graph.type(name) != TensorProto.FLOAT:
            raise Left(f"{name} is not known to be float")
    if node.op_type == "LinearAttention":
        said = [
            attribute(node, "update_rule", "gated_delta"),
            f"{attribute(node, 'q_num_heads')} heads over {attribute(node, 'kv_num_heads')}",
        ]
    else:
        shape = graph.shape(node.input[1]) or []
        if len(shape) != 3 or not isinstance(shape[2], int) or not 2 <= shape[2] <= 8:
            raise Left("its kernel is not known to have 2 to 8 positions")
        said = [f"{shape[2]} positions", attribute(node, "activation", "none")]
    for i in reversed(range(len(node.attribute))):
        if node.attribute[i].name == "chunk_size":  # which changes no result
            del node.attribute[i]
    node.domain = "mha"
    return ", ".join(said)
