#!/usr/bin/env python3
"""Doxygen's input filter: prints a header with its plain C comments turned into Doxygen's.

The header is written to be read as it is. What a comment belongs to is seen from where it stands:

  at the top of the file          the file
  "---- Title ----"               a topic, to which all belongs that comes before the next one
  behind code on the same line    what that line declares
  right above a declaration       the declaration; above several #defines without a comment of their own, all of them
  above an empty line             the topic; likewise above a #define that has a comment of its own behind it
  below an empty line in a struct the heading of the fields up to the next empty line, and the comment of those that have none of their own

struct_size, reserved fields and fields that the comment of their struct names need no comment of their own.

Lines indented by four blanks or more, such as formulas and tables, are shown as they are.

Example:
  tools/doxygen/comments.py include/mha.h      what Doxygen gets to see
"""

import pathlib
import re
import sys

of_all_structs = {"struct_size": "sizeof the struct; set by the caller.", "reserved": "Must be 0.", "reserved_pointer": "Must be NULL."}
special = re.compile(r"[\\@&$#<>%*|]")


def text_of(comment):
    """The lines of a comment without what draws its frame."""
    lines = comment[2:-2].split("\n")
    return [lines[0].strip()] + [re.sub(r"^ +\* ?", "", line).rstrip() if re.match(r" +\*", line) else line.strip() for line in lines[1:]]


def rendered(lines):
    """The lines for Doxygen: special characters escaped, indented lines as they are."""
    out, is_verbatim = [], False
    for line in lines:
        is_indented = line.startswith("    ")
        if is_indented and not is_verbatim:
            out[-1] += " @verbatim"
        if not is_indented:
            line = special.sub(r"\\\g<0>", line).replace(".. ", "..&nbsp;")  # the dots of 0 .. n end no sentence
        if is_verbatim and not is_indented and line:
            line = "@endverbatim " + line
        is_verbatim = is_indented or (is_verbatim and not line)
        out.append(line)
    return "\n".join(out) + (" @endverbatim" if is_verbatim else "")


class Header:
    def __init__(self, text):
        self.text, self.topic = text, None

    def converted(self):
        text = re.sub(r"/\*.*?\*/", self.convert, self.text, flags=re.DOTALL)
        text = re.sub(r"^/\*\* ([^\n]*) \*/\n(#define [^\n/]+\n)((?:#define [^\n/]+\n)+)", self.repeat, text, flags=re.MULTILINE)
        text = re.sub(r"(?<=^typedef struct )\w+ \{\n.*?\n(?=\} )", self.group, text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"(/\*\* (?:(?!\*/).)*\*/)\ntypedef struct (\w+) \{\n.*?\n\} \2;", self.complete, text, flags=re.DOTALL)
        # Of several fields on a line, each has the comment behind the line.
        text = re.sub(r"^  (\w+) (\w+(?:, \w+)+);( [^\n]*)?$",
                      lambda line: "  " + " ".join(f"{line[1]} {name};{line[3] or ''}" for name in line[2].split(", ")), text, flags=re.MULTILINE)
        return text + ("/** @} */\n" if self.topic else "")

    def convert(self, match):
        comment, lines = match[0], text_of(match[0])
        before = self.text[self.text.rfind("\n", 0, match.start()) + 1:match.start()].strip()
        after = self.text[match.end():].split("\n", 2)[1]
        if before.startswith("#endif"):
            return comment
        if before:
            return f"/**< {rendered(lines)} */"
        if match.start() == 0:
            return f"/** @file {rendered(lines)} */"
        title = re.match(r"-+ (.*?) -+$", lines[0])
        if title:
            return self.begin_topic(title[1], rendered([""] + lines[1:]))
        if self.topic and (not after or after.startswith("#") and "/*" in after):
            return f"/** @}} */ /** @addtogroup {self.topic}\n@details {rendered(lines)} @{{ */"
        return f"/** {rendered(lines)} */"

    def begin_topic(self, title, text):
        end = "/** @} */ " if self.topic else ""
        self.topic = re.sub(r"\W+", "_", title.lower())
        return f"{end}/** @defgroup {self.topic} {title}\n@details {text} @{{ */"

    @staticmethod
    def group(match):
        """The fields of a struct, those below a heading as a group."""
        first, *groups = match[0].split("\n\n")
        for group in groups:
            found = re.match(r" *\/\*\* (.*?) \*\/\n(.*)", group, re.DOTALL)
            if not found or found[2].count(";") == 1:  # without a heading, or a comment of one field
                first += f"\n\n{group}"
                continue
            heading, fields = found.groups()
            heading = " ".join(heading.split())
            # A field has no comment behind it if its line ends with ";", and none above it if the line before is no comment's last.
            fields = re.sub(r"^(?: */\*\* .*?\*/\n)?[^\n]*;$", lambda field: field[0] if "/**" in field[0] else f"{field[0]} /**< {heading} */",
                            fields, flags=re.DOTALL | re.MULTILINE)
            first += f"\n/** @name {heading} */ /** @{{ */\n{fields}\n/** @}} */"
        return first + "\n"

    @staticmethod
    def complete(match):
        """A struct whose fields without a comment have the one that is the same in all structs, or that of the struct if it names them."""
        comment, text = match[1], match[0]

        def field(found):
            before, name = text[:found.start()].rstrip(), found[1] or found[2]
            if before.endswith("*/") and not before[before.rfind("/**"):].startswith("/**<"):
                return found[0]
            sentence = of_all_structs.get(name) or ("As the description of the struct says." if re.search(rf"\b{name}\b", comment) else None)
            return f"{found[0]} /**< {sentence} */" if sentence else found[0]

        return re.sub(r"^  \w[^;/]*?(?:\(\*(\w+)\)[^;/]*|\b(\w+));$", field, text, flags=re.MULTILINE)

    @staticmethod
    def repeat(match):
        others = re.sub(r"\n", f" /**< {match[1]} */\n", match[3])
        return f"/** {match[1]} */\n{match[2]}{others}"


if len(sys.argv) != 2 or sys.argv[1] in ("--help", "-h"):
    print(__doc__)
    sys.exit(0 if sys.argv[1:] in (["--help"], ["-h"]) else 2)
print(Header(pathlib.Path(sys.argv[1]).read_text()).converted(), end="")
