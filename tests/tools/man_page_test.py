"""The man page has every command and option that --help has, and no other, names the version, and man has nothing to say against it.

usage: man_page_test.py mha mha.1
"""

import re
import shutil
import subprocess
import sys

command, page = sys.argv[1:]
text = open(page).read().replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")


def help_of(*words):
    return subprocess.run([command, *words, "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout


def options(part):
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", part)))


commands = re.findall(r"^  (\w+) ", help_of().partition("Subcommands:")[2].partition("Examples:")[0], re.MULTILINE)
sections = {found.group(1).lower(): found.group(2) for found in re.finditer(r"^\.SH MHA (\w+)\n(.*?)(?=^\.SH )", text, re.MULTILINE | re.DOTALL)}
if not commands or sorted(sections) != sorted(commands):
    sys.exit(f"mha --help has the commands {commands}, the man page sections about {list(sections)}.")
for name in commands:
    if options(help_of(name)) != options(sections[name]):
        sys.exit(f"mha {name} --help has {options(help_of(name))}, the man page {options(sections[name])}.")
    if f".B mha {name}\n" not in text:
        sys.exit(f"The synopsis of the man page does not have mha {name}.")
for words in re.findall(r"^  (mha .*)$", "\n".join(help_of(name) for name in commands), re.MULTILINE):
    if words not in text:
        sys.exit(f"The man page does not have the example '{words}'.")

version = subprocess.run([command, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
if f'"{version}"' not in text.splitlines()[0]:
    sys.exit(f"The man page does not name {version}; it begins with {text.splitlines()[0]}")

if not shutil.which("man") or not shutil.which("groff"):
    print("Not looked at by man, which is not there (Debian: man-db groff-base)")
    sys.exit(77)
done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", page], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                      env={"LC_ALL": "C.UTF-8", "MANROFFSEQ": "", "MANWIDTH": "80", "PATH": "/usr/bin:/bin"})
if done.returncode or done.stderr:
    sys.exit(f"man --warnings says:\n{done.stderr}")
print(f"{len(commands)} commands; man --warnings says nothing")
