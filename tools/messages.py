#!/usr/bin/env python3
"""Prints all error messages of the library, one per line, for reading them as a list.

Usage: tools/messages.py [--words] [FILE...]

  FILE       the sources to read (default: src/*.cpp src/*/*.cpp)
  --words    print only the number of messages and of their words

Example: tools/messages.py | grep stride
"""

import glob
import re
import sys

CALL = re.compile(r"\.(?:invalid|null|shape|too_large|fail)\(", re.S)
STRING = re.compile(r'\s*"((?:[^"\\]|\\.)*)"')


def messages(path):
    """(line, text) of each message: the string literals that follow a call of Report."""
    text = open(path, encoding="utf-8").read()
    for call in CALL.finditer(text):
        at = call.end()
        status = re.match(r"\s*MHA_ERROR_\w+,", text[at:])
        at += status.end() if status else 0
        parts = []
        while literal := STRING.match(text, at):
            parts.append(literal[1])
            at = literal.end()
        if parts:
            yield text.count("\n", 0, call.start()) + 1, "".join(parts)


def main(arguments):
    if "--help" in arguments or "-h" in arguments:
        print(__doc__.strip())
        return 0
    files = [a for a in arguments if not a.startswith("-")] or sorted(
        glob.glob("src/*.cpp") + glob.glob("src/*/*.cpp")
    )
    found = [(path, line, text) for path in files for line, text in messages(path)]
    if "--words" in arguments:
        print(len(found), "messages,", sum(len(text.split()) for _, _, text in found), "words")
        return 0
    for path, line, text in found:
        print(f"{path}:{line}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
