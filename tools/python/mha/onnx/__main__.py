"""python -m mha.onnx rewrite MODEL.onnx [-o OUT.onnx]: puts mha's operators in place of the attention in a model."""

import argparse
import os
import sys


def main():
    parser = argparse.ArgumentParser(prog="python -m mha.onnx", description="Puts mha's operators in place of the attention in ONNX models.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("rewrite", help="rewrite a model", description="Finds attention in a model, replaces it by mha's operators where that "
                                  "gives the same results, and says what it found and what it left and why. Exits with 0 if a model was written, "
                                  "with 3 if nothing in it can be replaced, with 1 and a sentence if there is no model to be read.")
    command.add_argument("model")
    command.add_argument("-o", "--output", help="where to write it; MODEL.mha.onnx without")
    arguments = parser.parse_args()
    output = arguments.output or os.path.splitext(arguments.model)[0] + ".mha.onnx"
    if os.path.exists(output) and os.path.samefile(arguments.model, output):
        sys.exit(f"mha.onnx: {output} is the model itself; give another name")
    try:
        from . import rewrite
        import onnx
        import google.protobuf.message as protobuf
    except ImportError as error:
        sys.exit(f"mha.onnx: {error}")
    try:
        model, report = rewrite(arguments.model)
    except (OSError, protobuf.DecodeError, onnx.checker.ValidationError) as error:
        sys.exit(f"mha.onnx: {arguments.model} cannot be read as an ONNX model: {error}")
    for entry in report:
        print(entry)
    if not report.rewritten:
        print(f"nothing to rewrite in {arguments.model}; no model was written")
        sys.exit(3)
    if model.ByteSize() < 2**31 - 2**20:
        onnx.save(model, output)
    else:  # more than a file of this kind can hold
        onnx.save(model, output, save_as_external_data=True, location=os.path.basename(output) + ".data")
    print(f"{len(report.rewritten)} of {len(report)} rewritten, in {output}")


if __name__ == "__main__":
    main()
