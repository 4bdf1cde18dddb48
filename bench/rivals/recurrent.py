#!/usr/bin/env python3
"""Compares mha.recurrent_attention with the operators of others: the chunked form of transformers
(qwen3_next), and LinearAttention of ONNX Runtime. llama.py measures that of llama.cpp.

All compute the gated delta rule for the same rows, 16 heads of 128 x 128, one decay for each head,
on one thread, in turns. It prints the least time of some calls, and the rms and the largest error
of the first 1,024 rows, relative to the rms of the exact result, computed in float64. A package
that is missing is left out.

Example:
  taskset -c 1 build/rivals/venv/bin/python bench/rivals/recurrent.py
"""

import argparse
import pathlib
import sys
import time

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--rows",
    type=int,
    nargs="+",
    default=[1024, 4096],
    metavar="N",
    help="rows of a call (default: 1024 4096)",
)
parser.add_argument("--calls", type=int, default=5, metavar="N", help="calls of each (default: 5)")
arguments = parser.parse_args()  # help needs no packages

import numpy

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "bindings" / "python")
)
sys.dont_write_bytecode = True
heads, dim = 16, 128


def exact(q, k, v, decay, beta, state):
    q, k, v, decay, beta, state = (x[0].astype("d") for x in (q, k, v, decay, beta, state))
    y = []
    for t in range(min(len(q), 1024)):
        state *= numpy.exp(decay[t])[:, None, None]
        u = beta[t][:, None] * (v[t] - numpy.matmul(k[t][:, None], state)[:, 0])
        state += k[t][:, :, None] * u[:, None]
        y.append(numpy.matmul(q[t][:, None], state)[:, 0] / dim**0.5)
    return numpy.array(y)


def transformers_call(q, k, v, decay, beta, state):
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.set_num_threads(1)
    inputs = [torch.from_numpy(x) for x in (q, k, v, decay, beta)]
    return lambda: torch_chunk_gated_delta_rule(
        *inputs, initial_state=torch.from_numpy(state), output_final_state=True
    )[0].numpy()


def onnxruntime_call(q, k, v, decay, beta, state):
    import onnx
    import onnxruntime

    rows = q.shape[1]
    given = {"query": q, "key": k, "value": v, "past_state": state, "decay": decay, "beta": beta}
    given = {
        name: x if name == "past_state" else x.reshape(1, rows, -1) for name, x in given.items()
    }
    floats = onnx.TensorProto.FLOAT
    node = onnx.helper.make_node(
        "LinearAttention", list(given), ["y", "state"], q_num_heads=heads, kv_num_heads=heads
    )
    graph = onnx.helper.make_graph(
        [node],
        "rule",
        [onnx.helper.make_tensor_value_info(name, floats, x.shape) for name, x in given.items()],
        [onnx.helper.make_tensor_value_info(name, floats, None) for name in ("y", "state")],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 27)], ir_version=11
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return lambda: session.run(None, given)[0].reshape(q.shape)


def main():
    import mha

    random = numpy.random.default_rng(1)
    for rows in arguments.rows:
        q, k, v = (random.standard_normal((1, rows, heads, dim), "f") for _ in range(3))
        k /= numpy.linalg.norm(k, axis=-1, keepdims=True)
        decay, beta = (
            -random.random((1, rows, heads), "f") / 10,
            random.random((1, rows, heads), "f"),
        )
        state, out, state_out = (
            random.standard_normal((1, heads, dim, dim), "f"),
            numpy.empty_like(v),
            numpy.empty((1, heads, dim, dim), "f"),
        )
        inputs = (q, k, v, decay, beta)
        makers = {
            "mha": lambda inputs=inputs, state=state, more=dict(state_out=state_out, out=out): (
                lambda: mha.recurrent_attention(*inputs, state=state, **more)[0]
            ),
            "transformers": lambda inputs=inputs, state=state: transformers_call(*inputs, state),
            "onnxruntime": lambda inputs=inputs, state=state: onnxruntime_call(*inputs, state),
        }
        calls, times, results = {}, {}, {}
        for name, make in makers.items():
            try:
                calls[name] = make()
            except ImportError as missing:
                print(f"{name} is left out: {missing}")
        for _ in range(arguments.calls):
            for name, call in calls.items():
                start = time.perf_counter()
                results[name] = call()
                times.setdefault(name, []).append(time.perf_counter() - start)
        right = exact(*inputs, state)
        rms = numpy.sqrt(numpy.mean(right**2))
        for name in calls:
            error = (results[name][0, : len(right)] - right) / rms
            print(
                f"{rows} rows, {name}: {1000 * min(times[name]):.2f} ms,"
                f" {min(times[name]) / min(times['mha']):.2f} times, errors"
                f" {numpy.sqrt(numpy.mean(error**2)):.1e}, {numpy.abs(error).max():.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
