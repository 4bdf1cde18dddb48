"""The command mha, also `python -m mha`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap

from . import _config, _gguf, _packed, _safetensors, formats
from ._layer import Layer, pack, verify
from ._library import Error, contract, instruction_sets, version
from ._structs import arithmetics, given_types
from ._weights import weight_type_of

# Some of them from the package gguf, of damaged files.
_some = (Error, ImportError, LookupError, MemoryError, OSError)
_failures = (*_some, ArithmeticError, TypeError, ValueError)

_overview = """\
Examples:
  mha info
  mha pack --weights model.safetensors --layer layers.0 --output layer.mha
  mha explain --help

Exit status: 0 on success, 1 for wrong input (with a one-line message), 2 for wrong usage."""

_pack_notes = f"""\
From .safetensors, the command reads the config.json next to the weights. It knows these values of
model_type; matrices may be quantised by AWQ, GPTQ or compressed-tensors:
{textwrap.fill(", ".join(_config.families), 98)}.

Without a config.json it also knows W_query, W_key, W_value (as nn.Linear or as matrices),
nn.MultiheadAttention and timm's vision transformers. Windows, norms of queries and keys, sinks,
softcap and scaled RoPE need a config.json. An unknown key in it is an error. From .gguf (pip
install 'gguf>=0.16') it reads {", ".join(_gguf.architectures)}; llama includes Mistral.

Quantised weights keep their numbers exactly; matrices of several types (Q4_K_M) share codes that
hold all of them. Codes of 5 and 6 bits and integer scales stay in integer arithmetic; in others,
they become 8 bits and floats. A packed file works on every machine of this byte order, whatever its
instruction sets. The call settings follow the layer as JSON: rotation, norms, sinks, window, causal
or not. mha.open_layer reads both; in C, mha_layer_view takes the whole file and reads the layer.

Examples:
  mha pack --weights model.safetensors --layer layers.0 --output layer.mha
  mha pack --weights model.gguf --layer blk.0 --output layer.mha
  mha pack --weights model.safetensors --layer layers.0 --arithmetic bf16 --output layer.mha
  mha pack --weights layer.safetensors --heads 12 --causal --weight-type int8 \\
    --arithmetic int16 --output layer.mha"""

_info_notes = """\
Examples:
  mha info
  mha info layer.mha"""

_verify_notes = """\
Example:
  mha verify layer.mha"""


def _version():
    return ".".join(str(version() // unit % 100) for unit in (10000, 100, 1))


def _line(name, value):
    print(f"{name:<18}{value}")


def _info(options):
    if options.file is None:
        _line("version", _version())
        _line("contract", contract())
        _line("instruction sets", ", ".join(instruction_sets()))
        return
    layer, call, packed = _packed.read(options.file)
    _line("layer", _packed.describe(layer, call))
    _line("size", f"{packed.size / 2**20:.1f} MiB")
    for name, value in layer.shape.items():
        if value and value != {"arithmetic": "f32", "gate": "none"}.get(name):
            _line(name, value)


def _verify(options):
    layer, call, packed = _packed.read(options.file)
    _packed.arguments(options.file, layer, call, 1)
    try:
        verify(packed)
    except Error as error:
        raise ValueError(f"{options.file}: {error}") from None
    print(
        f"{options.file}: a packed layer whose weights are intact; {_packed.describe(layer, call)}"
    )


def _weights(given, options, stored, default):
    """The arguments of mha.pack. stored are the types of the matrices in the file."""
    weight_type = options.weight_type
    matrices = {name: one for name, one in given.items() if name.startswith("w_")}
    are_grouped = [isinstance(one, formats.Grouped) for one in matrices.values()]
    if not any(are_grouped):
        if options.arithmetic == "bf16":
            default = weight_type_of(weight_type, "bf16", "f16" if "f16" in stored else "")
        return {**given, "type": "f32", "layout": "out_in", "weight_type": weight_type or default}
    if not all(are_grouped):
        raise ValueError(
            "some matrices are floats and others codes, and no format of a layer holds both; make"
            " an mha.Linear of each matrix (mha.formats) and call mha.attention between them"
        )
    if weight_type:
        raise ValueError("the weights are quantised already; leave --weight-type out")
    return {**given, **formats.arguments(arithmetic=options.arithmetic, **matrices)}


def _pack(options):
    weights = options.weights
    if weights.lower().endswith(".gguf"):
        if options.layer is None:
            raise ValueError(f"{weights}: --layer is needed, such as --layer blk.0")
        for name in "config", "no_config", "heads", "causal", "rope_base", "no_rope":
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')}: {weights} already sets it")
        try:
            given, shape, call, stored = _gguf.read(weights, options.layer)
        except ImportError as error:
            raise ImportError(f"{error}: pip install 'gguf>=0.16'") from None
        except OSError:
            raise
        except _failures as error:  # some from the package gguf, of damaged files
            raise ValueError(f"{weights}: {error}") from None
        files, default = {weights}, "f32" if len(stored) > 1 else max(stored)
    else:
        given, shape, call, files, stored = _safetensors.read(options)
        default = "f32"
    for file in files:
        if os.path.exists(options.output) and os.path.samefile(options.output, file):
            raise ValueError(f"--output: {options.output} is also read; name another file")
    try:
        arguments = _weights(given, options, stored, default)
        packed = pack(**shape, **{**arguments, "arithmetic": options.arithmetic})
    except (Error, ValueError) as error:
        raise ValueError(f"{weights}: {error}") from None
    layer = Layer.view(packed)
    _packed.arguments(weights, layer, call, 1)
    _packed.write(options.output, packed, call)
    if not options.quiet:
        group = f" in groups of {layer.shape['group_size']}" if layer.shape["group_size"] else ""
        print(
            f"{_packed.describe(layer, call)}; {arguments['weight_type']}{group},"
            f" {packed.size / 2**20:.1f} MiB",
            file=sys.stderr,
        )


def _count(text):
    if text.isdecimal() and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"a whole number of at least 1 is expected, not {text!r}")


def _base(text):
    try:
        number = float(text)
    except ValueError:
        number = 0
    if 0 < number < 3.4e38:
        return number
    raise argparse.ArgumentTypeError(f"a number above 0 is expected, not {text!r}")


def _parser():
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(
        "mha", description="Multi-head attention for CPUs.", epilog=_overview, **how
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    def command(name, function, text, notes=None):
        made = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=notes, **how
        )
        made.set_defaults(function=function)
        return made

    info = command(
        "info", _info, "show the library and its instruction sets, or a packed layer", _info_notes
    )
    info.add_argument("file", nargs="?", metavar="FILE", help="a layer written by mha pack")
    made = command("pack", _pack, "pack the attention of a layer into a file to map", _pack_notes)
    add = made.add_argument
    add("--weights", required=True, metavar="FILE", help=".safetensors, .index.json or .gguf")
    add("--output", required=True, metavar="FILE", help="the packed layer (.mha)")
    add(
        "--layer",
        metavar="PREFIX",
        help="the layer of a model: its prefix, or a part that no other layer has (h.0)",
    )
    add(
        "--weight-type",
        choices=list(given_types),
        help="weights of the packed layer (default: f32; from .gguf as the file has them; with"
        " --arithmetic bf16 bf16, but files of f16 need --weight-type)",
    )
    add(
        "--arithmetic", choices=list(arithmetics), default="f32", help="what projections compute in"
    )
    add("--config", metavar="FILE", help="model configuration (default: config.json next to them)")
    add("--no-config", action="store_true", help="read no config.json, but the options below")
    add("--heads", type=_count, metavar="N", help="number of query heads")
    causal = made.add_mutually_exclusive_group()
    causal.add_argument(
        "--causal", action="store_true", default=None, help="rows do not attend to later rows"
    )
    causal.add_argument(
        "--no-causal", action="store_false", dest="causal", help="rows also attend to later rows"
    )
    rope = made.add_mutually_exclusive_group()
    rope.add_argument(
        "--rope-base", type=_base, metavar="B", help="rotate queries and keys (RoPE), rope_theta"
    )
    rope.add_argument("--no-rope", action="store_true", help="do not rotate queries and keys")
    add("--quiet", action="store_true", help="do not print a line about the layer")
    made = command("verify", _verify, "check a packed layer with all its weights", _verify_notes)
    made.add_argument("file", metavar="FILE", help="a layer written by mha pack")
    command("explain", None, "show each step of a layer, and what its heads attend to")
    command("onnx", None, "rewrite an ONNX model for mha.onnx")
    return parser


def _run(arguments):
    if arguments[:1] == ["explain"]:
        from . import explain

        return explain.run(arguments[1:])
    if arguments[:1] == ["onnx"]:
        from .onnx import __main__ as onnx

        return onnx.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        print(f"mha {_version()} (contract {contract()})")
    elif options.command is None:
        parser.error("info, pack, verify, explain or onnx is expected; see mha --help")
    else:
        options.function(options)


def main(arguments: list[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(143)
        )  # which removes what is half written
    try:
        _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")
    except _failures as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        elif isinstance(error, MemoryError):
            said = "there is not enough memory for this"
        print(f"mha {arguments[0]}: {_packed.printable(said)}", file=sys.stderr)
        return 1
    return 0
