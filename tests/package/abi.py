"""Compares the declarations of the public headers with those that programs were compiled with,
tests/package/interface.txt. See abi.py --help.

check   fails with what changed if a program compiled before would break, and, where something was
        only added, until that is written down
keeps   fails only with what would break, as for the file of an earlier version
write   writes the declarations down, if CHANGELOG.md names what was added; never something that
        breaks programs

Functions, types and constants stay as they are; structs that begin with struct_size grow at their
end, beyond the size that they had; others are frozen. Versions may change.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

root = pathlib.Path(__file__).resolve().parent.parent.parent
written = root / "tests" / "package" / "interface.txt"


def declarations(text):
    """{name: declaration} of a header, without comments and in one line each; the fields of structs
    are separated by ';'."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    # A pointer to a struct that is declared further on, or in another header.
    text = re.sub(r"\bstruct (mha_\w+ \*)", r"\1", text)
    found = {
        name: f"#define {name} {value.strip()}"
        for name, value in re.findall(r"^#define (MHA_\w+) (\S.*)$", text, re.MULTILINE)
        if not re.match(r"MHA_(API|CONTRACT|VERSION_\w+)$", name)
    }
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    for one in re.findall(
        r"\b(typedef struct \w+ \{.*?\} \w+|typedef [^{;]*|MHA_API [^;]*);", text, re.DOTALL
    ):
        one = re.sub(r"\s+", " ", one)
        name = re.search(
            r"\(\*(\w+)\)\(|(\w+)\(|(\w+)$", one if "{" not in one else one.rpartition("}")[2]
        )
        found[name[1] or name[2] or name[3]] = one
    return found


def compare(before, now, cc):
    """(what breaks programs, the names of what was added)"""
    breaks, added, grown = [], [name for name in now if name not in before], ""
    structs = (root / "src" / "base" / "structs.h").read_text()
    for name, declaration in before.items():
        fields, is_struct, end = declaration.rpartition(" }")
        new = now.get(name, "nothing")
        # without, it is an element or a field of others.
        may_grow = is_struct and "{ size_t struct_size;" in fields
        if new != declaration and not (
            may_grow and new.startswith(fields + " ") and new.endswith(end)
        ):
            breaks.append(f"{declaration}\nis now\n{new}")
        elif new != declaration:
            names = re.findall(r"(\w+)(?:\[\d+\])?[;,]|\(\*(\w+)\)\(", new[len(fields) :])
            names = [one or other for one, other in names]
            added += names
            if f"first_version_bytes<{name}>" not in structs:
                breaks.append(
                    f"src/base/structs.h does not say that {name} has grown: without its"
                    f" first_version_bytes, programs that do not know {names[0]} are refused"
                )
            old = fields.replace(f"struct {name}", f"struct before_{name}") + f" }} before_{name};"
            grown += (
                f"{old}\n_Static_assert(offsetof({name}, {names[0]}) >= sizeof(before_{name}),"
                f' "{names[0]} is inside of what {name} was");\n'
            )
    if grown:
        with tempfile.NamedTemporaryFile("w", suffix=".c") as program:
            program.write(f"#include <mha.h>\n{grown}")
            program.flush()
            done = subprocess.run(
                [cc, "-fsyntax-only", "-I", root / "include", program.name],
                stderr=subprocess.PIPE,
                text=True,
            )
        breaks += re.findall(r"error: (.*)", done.stderr)
    return breaks, added


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("command", choices=["check", "keeps", "write"])
parser.add_argument(
    "--written", type=pathlib.Path, default=written, help="the file; default: that of this version"
)
parser.add_argument("--cc", default="cc", help="the C compiler")
arguments = parser.parse_args()
now = declarations(
    "\n".join(header.read_text() for header in sorted((root / "include").glob("*.h")))
)
written = arguments.written
before = declarations(written.read_text()) if written.exists() else {}
breaks, added = compare(before, now, arguments.cc)
if breaks:
    sys.exit(
        "Programs compiled against an earlier header would break: declarations never change, and"
        " structs only grow at their end.\n\n" + "\n\n".join(breaks)
    )
if arguments.command == "write":
    changes = (root / "CHANGELOG.md").read_text()
    for name in added if before else []:
        if not re.search(rf"\b{name}\b", changes):
            sys.exit(f"CHANGELOG.md does not name {name}, which is new.")
    written.write_text(
        "".join(f"{one if one.startswith('#') else one + ';'}\n" for one in now.values())
    )
elif added and arguments.command == "check":
    sys.exit(
        f"The interface has grown by {', '.join(added)}. Name that in CHANGELOG.md, and write it"
        " down: python3 tests/package/abi.py write"
    )
