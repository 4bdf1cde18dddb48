"""python -m mha explain: see explain.py."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] != ["explain"]:
        print("usage: python -m mha explain ...; see python -m mha explain --help")
        sys.exit(0 if sys.argv[1:] in (["--help"], ["-h"]) else 2)
    from .explain import main

    sys.exit(main(sys.argv[2:]))
