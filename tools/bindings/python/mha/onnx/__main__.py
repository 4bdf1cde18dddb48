"""mha onnx rewrite MODEL.onnx [-o OUT.onnx]: replaces the attention in a model with mha's
operators."""

import argparse
import os
import signal
import sys

from .._structs import arithmetics, given_types, multiplied


def main(arguments=None):
    epilog = """Examples:
  mha onnx rewrite model.onnx                                  writes model.mha.onnx
  mha onnx rewrite model.onnx --weight-type int8 -o small.onnx
  mha onnx rewrite --help
"""
    parser = argparse.ArgumentParser(
        prog="mha onnx",
        description="Replaces the attention in ONNX models with mha's operators.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "rewrite",
        help="rewrite a model",
        description=(
            "Finds attention in a model, replaces it with mha's operators where that gives the same"
            " results, and reports what it found, and what it left and why. Exit status: 0 if a"
            " model was written, 3 if nothing in it can be replaced, 1 with an error message if the"
            " model cannot be read."
        ),
    )
    command.add_argument("model")
    command.add_argument("-o", "--output", help="the file to write (default: MODEL.mha.onnx)")
    command.add_argument(
        "--weight-type",
        default="f32",
        choices=list(given_types),
        help=(
            "the type in which sessions store the weights of replaced projections; fewer bits cost"
            " accuracy (default: f32)"
        ),
    )
    command.add_argument(
        "--arithmetic",
        default="f32",
        choices=list(arithmetics),
        help=(
            "the arithmetic of these projections; int8 and int16 need int8 or int4 weights, and"
            " bf16 those of bf16 (default: f32)"
        ),
    )
    arguments = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which removes what is half written
    needed = multiplied.get(arguments.arithmetic, given_types)
    if arguments.weight_type not in needed:
        command.error(
            f"--arithmetic {arguments.arithmetic} needs --weight-type {' or '.join(needed)}"
        )
    output = arguments.output or os.path.splitext(arguments.model)[0] + ".mha.onnx"
    if os.path.exists(output) and os.path.samefile(arguments.model, output):
        sys.exit(f"mha.onnx: {output} is the model itself; give another name")
    try:
        import google.protobuf.message as protobuf
        import onnx

        from . import rewrite
        from ._files import save
    except ImportError as error:
        sys.exit(f"mha.onnx: {error}")
    try:
        model, report = rewrite(arguments.model, arguments.weight_type, arguments.arithmetic)
    except (OSError, protobuf.DecodeError, onnx.checker.ValidationError) as error:
        sys.exit(f"mha.onnx: {arguments.model} cannot be read as an ONNX model: {error}")
    for entry in report:
        print(entry)
    if not report.rewritten:
        print(f"nothing to rewrite in {arguments.model}; no model was written")
        sys.exit(3)
    try:
        save(model, output, arguments.model)
    except (OSError, ValueError, protobuf.EncodeError, onnx.checker.ValidationError) as error:
        sys.exit(f"mha.onnx: {output} cannot be written: {error}")
    print(f"{len(report.rewritten)} of {len(report)} rewritten, in {output}")


if __name__ == "__main__":
    main()
