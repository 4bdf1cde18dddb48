#!/usr/bin/env python3
"""Writes the man page of the command mha from what its --help prints, so that the two say the same. The build runs it; see --help."""

import argparse
import pathlib
import re
import subprocess
import sys

synopsis = """.TH MHA 1 "" "{version}" "User Commands"
.SH NAME
mha \\- multi\\-head attention on CPUs: look inside a layer, run it on files, pack it
.SH SYNOPSIS
"""
footer = """.SH SEE ALSO
The library that the command is made with, and its header
.IR mha.h ,
are described in the file README.md of its sources.
"""


def escaped(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def help_of(command, *words):
    done = subprocess.run([command, *words, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{command} {' '.join(words)} --help failed: {done.stderr.strip()}")
    return done.stdout.strip().splitlines()


def blocks(lines):
    """(heading or None, lines) for each part between empty lines."""
    for part in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        part = part.splitlines()
        heading = part[0][:-1] if re.match(r"[A-Z][\w ]*:$", part[0]) and len(part) > 1 else None
        yield heading, part[1:] if heading else part


def entries(lines):
    """(what is to be typed, what it does): the second is a column of its own, and goes on where a line begins there."""
    found = []
    for line in lines:
        entry = re.match(r"  (\S(?:.*?\S)?)(?:\s{2,}(\S.*))?$", line)
        if entry and not line.startswith("   "):
            found.append([entry.group(1), entry.group(2) or ""])
        elif found:
            found[-1][1] += " " + line.strip()
        else:
            sys.exit(f"'{line}' is in no form that tools/man_page.py knows")
    return found


def page_of(heading, lines, section):
    """One block of a help text as roff, under its heading."""
    if heading in ("Example", "Examples"):
        return [f"{section} {heading}", ".EX", *(escaped(line.strip()) for line in lines), ".EE"]
    if heading:
        page = [f"{section} {escaped(heading)}"]
        for name, text in entries(lines):
            page += [".TP", f".B {escaped(name)}", escaped(text.strip())]
        return page
    return [".PP", *(escaped(line.strip()) for line in lines)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="example: tools/man_page.py build/bin/mha --output mha.1 && man ./mha.1")
    parser.add_argument("command", help="the command mha")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="the file to write")
    arguments = parser.parse_args()

    version = subprocess.run([arguments.command, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    top = help_of(arguments.command)
    by_heading = {heading: lines for heading, lines in blocks(top)}
    names = [name for name, _ in entries(by_heading["Subcommands"])]
    page = [line for name in names for line in (f".B mha {name}", "[OPTIONS]", ".br")][:-1]
    page += [".SH DESCRIPTION", escaped(top[0])]
    for heading, lines in blocks(top[2:]):
        if heading:
            page += page_of(heading, lines, ".SS")
    for name in names:
        lines = help_of(arguments.command, name)
        page += [f".SH MHA {name.upper()}", escaped(lines[0]) + "."]
        for heading, block in blocks(lines[2:]):
            page += page_of(heading, block, ".SS")
    exit_status = [line for line in top if line.startswith("Exit status: ")]
    if len(exit_status) != 1:
        sys.exit("mha --help has no line 'Exit status: ...'")
    page += [".SH EXIT STATUS", escaped(exit_status[0].removeprefix("Exit status: "))]
    arguments.output.write_text(synopsis.format(version=version) + "\n".join(page) + "\n" + footer)


main()
