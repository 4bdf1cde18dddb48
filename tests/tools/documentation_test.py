"""Checks the reference that Doxygen makes from the headers: there are no warnings, and it contains each comment word by word.

Exits with 77, which ctest shows as skipped, where there is no Doxygen.
"""

import argparse
import html
import pathlib
import re
import shutil
import subprocess
import sys


def words(text):
    return " ".join(re.findall(r"\w+", text))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--doxygen", required=True)
parser.add_argument("--doxyfile", required=True, help="the settings of the target doc")
parser.add_argument("--include", required=True, type=pathlib.Path, help="the folder of the headers")
parser.add_argument("--work", required=True, type=pathlib.Path, help="the folder to work in")
arguments = parser.parse_args()
if not shutil.which(arguments.doxygen):
    print("skipped: doxygen is not there. On Debian: apt-get install doxygen, then configure anew")
    sys.exit(77)
shutil.rmtree(arguments.work, ignore_errors=True)
arguments.work.mkdir(parents=True)
settings = arguments.work / "Doxyfile"
settings.write_text(f"@INCLUDE = {arguments.doxyfile}\nOUTPUT_DIRECTORY = {arguments.work}\nGENERATE_HTML = NO\n")
done = subprocess.run([arguments.doxygen, settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
if done.returncode or done.stdout:
    sys.exit(f"Doxygen ends with {done.returncode} and says:\n{done.stdout}")
shown = words(" ".join(html.unescape(re.sub(r"<[^>]*>", " ", file.read_text()))
                       for file in sorted((arguments.work / "xml").glob("*.xml"))))
count = 0
for header in sorted(arguments.include.glob("*.h")):
    for comment in re.findall(r"/\*(.*?)\*/", header.read_text(), re.DOTALL):
        for paragraph in re.split(r"\n \*\n|-{9,}", comment):
            count += 1
            if words(paragraph) not in shown:
                sys.exit(f"{header.name}: Doxygen does not show this comment:\n{paragraph}")
if not count:
    sys.exit(f"There are no comments to be shown in {arguments.include}.")
print(f"{count} paragraphs of the headers' comments are shown, without a warning.")
