#!/usr/bin/env python3
"""Unpacks and packs stored inputs of a fuzz target, which tests/fuzz/replay.cpp reads too.

corpus.py unpack FILE FOLDER     write each input to a file of FOLDER
corpus.py pack FOLDER FILE [LIMIT]
                                 write the inputs in FOLDER to FILE, without the longest ones if the
                                 files of all targets would have more than LIMIT bytes

The inputs are sorted. Each takes a byte that counts the first bytes it shares with the one before,
the length of the rest in two bytes, the low one first, and the rest.
"""

import os
import pathlib
import sys


def encoded(inputs):
    packed, before = bytearray(), b""
    for one in sorted(inputs):
        shared = min(255, len(os.path.commonprefix([before, one])))
        packed += bytes([shared]) + (len(one) - shared).to_bytes(2, "little") + one[shared:]
        before = one
    return bytes(packed)


def decoded(packed):
    at, one = 0, b""
    while at < len(packed):
        shared, end = packed[at], at + 3 + int.from_bytes(packed[at + 1 : at + 3], "little")
        if shared > len(one) or end > len(packed):
            sys.exit(f"The input at byte {at} is damaged.")
        one, at = one[:shared] + packed[at + 3 : end], end
        yield one


def unpack(file, folder):
    for number, one in enumerate(decoded(file.read_bytes())):
        (folder / f"{number:05}").write_bytes(one)


def pack(folder, file, limit):
    inputs = sorted({path.read_bytes() for path in folder.iterdir()}, key=len)
    room = limit - sum(path.stat().st_size for path in file.parent.iterdir() if path != file)
    count, too_many = 0, len(inputs) + 1
    while too_many - count > 1:
        middle = (count + too_many) // 2
        if len(encoded(inputs[:middle])) <= room:
            count = middle
        else:
            too_many = middle
    file.write_bytes(encoded(inputs[:count]))
    print(f"{file}: {count} of {len(inputs)} inputs, {file.stat().st_size:,} bytes")


command, source, target, *limit = sys.argv[1:] if len(sys.argv) > 3 else ("", "", "")
if command == "unpack":
    unpack(pathlib.Path(source), pathlib.Path(target))
elif command == "pack":
    pack(pathlib.Path(source), pathlib.Path(target), int(limit[0]) if limit else sys.maxsize)
else:
    sys.exit(__doc__)
