"""Checks that each page with figures names their commit.

A page has figures where it has the marks of bench/rivals, or says how fast something is.
"""

import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parents[2]
pages = [
    root / "README.md",
    *sorted((root / "src" / "docs").glob("*.md")),
    root / "src" / "kernels" / "SPECIAL_FORMS.md",
]
has_figures = re.compile(
    r"<!-- figures: |\d (?:us|GB/s|GFLOP/s)\b|\d times as fast|% of the (?:peak|time)"
)
commit = re.compile(r"\bcommits?\s([0-9a-f]{7,40}(?:\sand\s[0-9a-f]{7,40})*)")


def complaints(name, text):
    """What is wrong with a page that has figures. Each block of tables between marks names its
    commit."""
    blocks = re.findall(r"<!-- figures: (\w+) -->\n(.*?)<!-- end of figures -->", text, re.DOTALL)
    found = [
        f"{name}: the tables '{block}' name no commit"
        for block, inside in blocks
        if not commit.search(inside)
    ]
    if has_figures.search(text) and not commit.search(text):
        found.append(
            f"{name}: has figures, and names no commit that they are of ('commit abc1234')"
        )
    return found


def main():
    assert complaints("a", "It takes 3 us.") and complaints(
        "a", "<!-- figures: x -->\n| 1 |\n<!-- end of figures -->\n\nAt commit abcdef0."
    )
    assert not complaints("a", "It takes 3 us at commit abcdef0.") and not complaints(
        "a", "No figures."
    )
    wrong = []
    for page in filter(pathlib.Path.exists, pages):
        wrong += complaints(page.relative_to(root), page.read_text())
    print(*wrong, sep="\n")
    return len(wrong)


sys.exit(1 if main() else 0)
