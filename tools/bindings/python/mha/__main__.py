"""python -m mha explain and python -m mha pack: see explain.py and _pack.py."""

import importlib
import sys

if __name__ == "__main__":
    modules = {"explain": ".explain", "pack": "._pack"}
    if sys.argv[1:2] and sys.argv[1] in modules:
        sys.exit(importlib.import_module(modules[sys.argv[1]], "mha").main(sys.argv[2:]))
    print(
        "usage: python -m mha explain | pack ...; see python -m mha explain --help\n\nExamples:\n "
        " python -m mha explain --softcap 50\n  python -m mha pack --weights model.gguf --layer"
        " blk.0 --output layer.mha"
    )
    sys.exit(0 if sys.argv[1:] in (["--help"], ["-h"]) else 2)
