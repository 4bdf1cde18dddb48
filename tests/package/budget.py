"""Compares the size of the source tree with tests/package/budget.txt and names each excess."""

import pathlib
import re
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parents[2]


def source_files():
    """The files of the repository; in an archive of it, the files outside folders of builds."""
    files = []
    if (root / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
        files = [root / name for name in listed.stdout.split("\0")[:-1]]
    if not files:
        built = re.compile(r"build.*|target|__pycache__")
        files = [
            path
            for path in root.rglob("*")
            if not any(map(built.fullmatch, path.relative_to(root).parts[:-1]))
        ]
    return [path for path in files if path.is_file() and not path.is_symlink()]


files = source_files()


def text_of(folders, endings):
    """What the files of these kinds hold, in one piece."""
    return "".join(
        path.read_text()
        for path in files
        if path.relative_to(root).parts[0] in folders and path.suffix in endings
    )


def lines_in(*folders, without=()):
    data = [
        path.read_bytes()
        for path in files
        if path.relative_to(root).parts[0] in folders and path.suffix not in without
    ]
    return sum(one.count(b"\n") for one in data if b"\0" not in one)


def without_comments(text):
    """The same lines, with blanks in place of comments."""
    parts = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'
    blank = lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])
    return re.sub(parts, blank, text, flags=re.DOTALL)


library = text_of(("src", "include"), (".c", ".h", ".cpp"))
code = sum(bool(line.strip()) for line in without_comments(library).splitlines())
not_blank = sum(bool(line.strip()) for line in library.splitlines())
headers = text_of(("include",), (".h",))
header = without_comments(headers)
bodies = re.findall(r"\bstruct \w+ \{(.*?)\n\}", header, re.DOTALL)
fields = [
    declarator
    for body in bodies
    for declaration in body.split(";")[:-1]
    for declarator in re.sub(r"\([^*].*\)", "", declaration, flags=re.DOTALL).split(",")
]
readme = (root / "README.md").read_text()
prose = re.sub(r"^```.*?^```", "", readme, flags=re.DOTALL | re.MULTILINE)
words = sum(
    len(path.read_text().split())
    for path in files
    if path.suffix == ".md" and path.name != "CONTRACT.md"
)
corpora = [path.stat().st_size for path in files if root / "tests/fuzz/corpus" in path.parents]

measures = {  # each with its sentence
    "code_lines": (code, "src and include have {} code lines"),
    "comment_lines": (
        100 * (not_blank - code) / len(library.splitlines()),
        "{}% of the lines of src and include are comments",
    ),
    "test_lines": (lines_in("tests"), "tests has {} lines"),
    "tool_lines": (
        lines_in("tools", "bench", without=(".lock", ".md")),
        "tools and bench have {} lines",
    ),
    "page_words": (words, "the pages have {} words"),
    "readme_words": (len(prose.split()), "README.md has {} words outside of code"),
    "corpus_bytes": (sum(corpora), "tests/fuzz/corpus has {} bytes"),
    "public_fields": (len(fields), "the public structs have {} fields"),
    "public_strides": (
        sum("stride" in field for field in fields),
        "the public structs have {} strides",
    ),
    "public_functions": (
        len(re.findall(r"^MHA_API\b", header, re.MULTILINE)),
        "the public headers have {} functions",
    ),
    "public_lines": (headers.count("\n"), "the public headers have {} lines"),
}

listed = (root / "tests" / "package" / "budget.txt").read_text()
budget = re.findall(r"^(\w+) +([\d,]+) ", listed, re.MULTILINE)
if sorted(name for name, _ in budget) != sorted(measures):
    sys.exit(f"budget.txt should have one line for each of {', '.join(measures)}.")
failures = []
for name, limit in budget:
    found, sentence = measures[name]
    sentence = sentence.format(f"{found:,.4g}" if isinstance(found, float) else f"{found:,}")
    print(f"{sentence}; the budget is {limit}")
    limit = int(limit.replace(",", ""))
    if found < limit if name == "comment_lines" else found > limit:
        failures.append(f"{sentence}; the budget is {limit:,}")
if failures:
    sys.exit("\n".join(["", "Over the budget of tests/package/budget.txt:", *failures]))
