"""LinearAttention and CausalConvWithState of ONNX (opset 27) and com.microsoft, as mha's."""

from __future__ import annotations

from onnx import TensorProto

from ._find import Left, attribute, unknown

recurrent_types = "LinearAttention", "CausalConvWithState"
rules = {"linear": (), "gated": ("decay",), "delta": ("beta",), "gated_delta": ("decay", "beta")}
# Attributes that mha's operators have not, and what they are where they change nothing.
neutral = {
    **dict.fromkeys(["channels_last", "input_channel_offset", "input_channels"], 0),
    **dict.fromkeys(["state_length", "state_update_capacity", "state_window"], 0),
    **{"dilation": 1, "ndim": 1, "state_channels_last": -1},
}


def take(node, graph):
    """Makes a node mha's, and says what it does; None of another node. Raises Left where mha has
    no equivalent."""
    if node.op_type not in recurrent_types or node.domain not in ("", "ai.onnx", "com.microsoft"):
        return None
    reason = unknown(node)
    if reason:
        raise Left(reason)
    for name, only in neutral.items():
        if attribute(node, name, only) != only:
            raise Left(f"its {name} is {attribute(node, name)}; mha's operator takes only {only}")
    for name in node.input:
        if name and graph.type(name) != TensorProto.FLOAT:
            raise Left(f"{name} is not known to be float")
    if node.op_type == "LinearAttention":
        rule = attribute(node, "update_rule", "gated_delta")
        inputs = dict(zip(("decay", "beta"), [*node.input[4:], "", ""]))
        if rule not in rules or {name for name in inputs if inputs[name]} != set(rules[rule]):
            given = " and ".join(name for name in inputs if inputs[name]) or "no decay or beta"
            raise Left(f"its update_rule is {rule}, and it has {given}")
        heads = [attribute(node, f"{which}_num_heads") for which in ("q", "kv")]
        said = [rule, f"{heads[0]} heads over {heads[1]}"]
    else:
        shape = graph.shape(node.input[1]) or []
        if len(shape) != 3 or not isinstance(shape[2], int) or not 2 <= shape[2] <= 8:
            raise Left("its kernel is not known to have 2 to 8 positions")
        activation = attribute(node, "activation", "none")
        if activation not in ("none", "silu", "swish"):
            raise Left(f"its activation is {activation}")
        said = [f"{shape[2]} positions", activation]
    for i in reversed(range(len(node.attribute))):
        if node.attribute[i].name in ("chunk_size", *neutral):  # which change no result
            del node.attribute[i]
    node.domain = "mha"
    return ", ".join(said)
