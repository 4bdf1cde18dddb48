"""The rows of src/kernels/sets.def."""

import pathlib
import re
from typing import NamedTuple


class Row(NamedTuple):
    constant: str
    number: str
    architecture: str
    kernels: str  # the set itself, or the one that it adds products of bytes to
    flags: list


def rows(source):
    """name of a set -> its row, the best of an architecture first."""
    text = (pathlib.Path(source) / "src" / "kernels" / "sets.def").read_text()
    words = ", ".join([r"(\w+)"] * 5)
    found = re.findall(rf'^MHA_SET\({words},\s+"([^"]*)",\s+"[^"]*"\)$', text, re.MULTILINE)
    if len(found) != len(re.findall(r"^MHA_SET\(", text, re.MULTILINE)):
        raise SystemExit("src/kernels/sets.def has a row of another form.")
    sets = {name: Row(*words, flags.split()) for name, *words, flags in found}
    for name, row in sets.items():
        base = sets[row.kernels].flags if row.kernels != name else []
        sets[name] = row._replace(flags=base + row.flags)
    return sets
