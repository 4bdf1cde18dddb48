"""Files of packed layers: the bytes of pack(), and behind them how the layer is called: JSON, its
FNV-1a checksum, its length and "mha call"."""

from __future__ import annotations

import json
import os
import stat
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from ._layer import Layer
from ._library import Error
from ._options import Norm, Rope, ScoreOptions

if TYPE_CHECKING:
    from ._typing import Array

_call_keys = set("version causal window softcap sinks norm rope".split())
_norm_keys = set("epsilon all_heads q_weight k_weight".split())
_angles = """base linear_factor yarn_factor yarn_beta_fast yarn_beta_slow llama3_factor
    llama3_low_freq_factor llama3_high_freq_factor attention_factor""".split()
_rope_keys = {*_angles, "dims", "original_positions", "yarn_unrounded"}


def open_layer(
    path: str | os.PathLike[str], *, num_positions: int = 4096
) -> tuple[Layer, dict[str, Any]]:
    """Maps a file that the command `mha pack` wrote.

    Parameters
    ----------
    path : str or os.PathLike
        The file. It stays mapped as long as the layer lives, and must not change.
    num_positions : int, default 4096
        How many positions the tables of a rotation (RoPE) have.

    Returns
    -------
    layer : Layer
        The layer, whose weights are not copied.
    call : dict
        How the model calls it, as arguments of `Layer.forward` and `Layer.info`: `is_causal` and,
        where the layer has them, `window_left`, `rope`, `norm` and `score`.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is not a packed layer, is damaged, or was written by a later version.

    Examples
    --------
    >>> layer, call = mha.open_layer("layer.mha")    # doctest: +SKIP
    >>> y = layer.forward(x, **call)                 # doctest: +SKIP
    """
    layer, call, _ = read(path)
    return layer, arguments(path, layer, call, num_positions)


def read(path: str | os.PathLike[str]) -> tuple[Layer, dict[str, Any], np.ndarray]:
    """The layer, its call settings as the file has them, and the mapped file."""
    if os.path.getsize(path) == 0:
        raise ValueError(f"{path}: is not a packed layer; mha pack writes one")
    packed = np.memmap(path, np.uint8, "r")
    if bytes(packed[:8]) != b"mha pack":
        raise ValueError(f"{path}: is not a packed layer; mha pack writes one")
    end = bytes(packed[-24:])
    total, length = struct.unpack("<QQ", end[:16]) if len(end) == 24 else (0, 0)
    if end[16:] != b"mha call":
        raise ValueError(
            f"{path}: holds the weights of a layer, but not how it is called (rotation, norm,"
            " causal or not), as what mha.pack or mha_layer_pack makes; mha pack writes both, and"
            " mha.Layer.view takes the weights alone"
        )
    text = bytes(packed[max(len(packed) - 24 - length, 0) : -24])
    if len(text) != length or _checksum(text) != total:
        raise ValueError(f"{path}: is damaged: the checksum of its call settings does not match")
    try:
        call = json.loads(text)
        names = [list(x.keys()) for x in (call, call.get("rope", {}), call.get("norm", {}))]
    except (AttributeError, ValueError):
        raise ValueError(f"{path}: is damaged: its call settings are not objects of JSON") from None
    for given, known in zip(names, (_call_keys, _rope_keys, _norm_keys)):
        for key in given:
            if key not in known:
                raise ValueError(
                    f"{path}: has {key!r} in its call settings, which this version does not know; a"
                    " later version of mha wrote it"
                )
    if call.get("version") != 1 or type(call.get("causal")) is not bool:
        raise ValueError(f"{path}: has call settings of another version; a later mha wrote it")
    try:
        return Layer.view(packed), call, packed
    except Error as error:
        raise ValueError(f"{path}: {error}") from None


def arguments(
    source: str | os.PathLike[str], layer: Layer, call: dict[str, Any], num_positions: int
) -> dict[str, Any]:
    """What Layer.forward takes; source begins the sentence about what does not fit the layer."""
    floats = lambda values: np.array(values, np.float32)
    result: dict[str, Any] = {"is_causal": call["causal"]}
    try:
        if "window" in call:
            result["window_left"] = call["window"] - 1
        if "rope" in call:
            angles = dict(call["rope"])
            dims = angles.pop("dims", 0) or layer.shape["head_dim"]
            if dims % 2 or not 0 < dims <= layer.shape["head_dim"]:
                raise ValueError(
                    f"{dims} elements of a head of {layer.shape['head_dim']} cannot be rotated; an"
                    " even number of them can"
                )
            result["rope"] = Rope.tables(dims, num_positions, **angles)
        if "norm" in call:
            result["norm"] = Norm(
                q_weight=floats(call["norm"]["q_weight"]),
                k_weight=floats(call["norm"]["k_weight"]),
                epsilon=call["norm"]["epsilon"],
                all_heads=call["norm"]["all_heads"],
            )
        if "softcap" in call or "sinks" in call:
            sinks = floats(call["sinks"]) if "sinks" in call else None
            result["score"] = ScoreOptions(softcap=call.get("softcap", 0), sinks=sinks)
        layer.info(1, **result)
    except (Error, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None
    return result


def count_text(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def printable(text: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def describe(layer: Layer, call: dict[str, Any]) -> str:
    """12 heads of 64, causal, rotated (base 10000)"""
    heads, kv_heads = layer.shape["num_heads"], layer.shape["num_kv_heads"]
    is_plain = heads == kv_heads
    words = [
        f"{count_text(heads, 'head' if is_plain else 'query head')} of {layer.shape['head_dim']}"
    ]
    words += [] if is_plain else [count_text(kv_heads, "key head")]
    words.append("causal" if call["causal"] else "not causal")
    if "norm" in call:
        together = " of all heads together" if call["norm"]["all_heads"] else ""
        words.append(f"normalised (RMS{together})")
    if "rope" in call:
        rope = call["rope"]
        parts = [f"{name} {rope[name]:.15g}" for name in _angles if rope.get(name)]
        if rope.get("dims", layer.shape["head_dim"]) != layer.shape["head_dim"]:
            parts.append(f"{rope['dims']} elements")
        words.append(f"rotated ({', '.join(parts)})")
    words += [f"window of {count_text(call['window'], 'row')}"] if "window" in call else []
    words += [f"softcap {call['softcap']:g}"] if "softcap" in call else []
    words += ["sinks"] if "sinks" in call else []
    return ", ".join(words)


def _checksum(text):
    total = 0xCBF29CE484222325
    for byte in text:
        total = (total ^ byte) * 0x100000001B3 % 2**64
    return total


def write(path: str | os.PathLike[str], packed: Array, call: dict[str, Any]) -> None:
    """Writes the file whole or not at all: to PATH.partial-PID, which then takes its place."""
    text = json.dumps(call).encode()
    parts = packed.data, text + struct.pack("<QQ", _checksum(text), len(text)) + b"mha call"
    path = os.path.realpath(path)
    mode = os.stat(path).st_mode if os.path.exists(path) else None
    if mode is not None and not stat.S_ISREG(mode):  # a pipe, /dev/null
        with open(path, "wb") as file:
            file.writelines(parts)
        return
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            file.writelines(parts)
        if mode is not None:
            os.chmod(partial, stat.S_IMODE(mode))
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)
