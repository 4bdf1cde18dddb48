"""Compares the size of the source tree with tests/package/budget.txt and names each excess."""

import ast
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


texts = {  # of the files with text
    path.relative_to(root): data.decode()
    for path in source_files()
    if b"\0" not in (data := path.read_bytes())
}


def text_of(*folders, endings=None, without=()):
    """What the files of these kinds hold, in one piece."""
    return "".join(
        text
        for path, text in texts.items()
        if path.parts[0] in folders and path.suffix in (endings or {path.suffix} - set(without))
    )


def docstrings(tree, is_public):
    """The lines of docstrings of a module's or class's public names, and its own if public."""
    if is_public and ast.get_docstring(tree):
        yield tree.body[0].end_lineno - tree.body[0].lineno + 1
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
            if isinstance(node, ast.ClassDef):
                yield from docstrings(node, True)
            elif ast.get_docstring(node):
                yield node.body[0].end_lineno - node.body[0].lineno + 1


documentation = sum(  # lines that users of Python, Rust and JavaScript read
    sum(docstrings(ast.parse(text), path.name[0] != "_" or path.name == "__init__.py"))
    if path.suffix == ".py"
    else len(re.findall(r"\n" if path.suffix == ".ts" else r"^ *(//[/!]|/\*\*| \* )", text, re.M))
    for path, text in texts.items()
    if path.match("tools/bindings/rust/*/src/*.rs")
    or path.match("tools/adapters/candle/src/*.rs")
    or path.match("tools/adapters/vllm/mha_vllm/*.py")
    or path.match("tools/bindings/wasm/*.[jt]s")
    or (path.suffix == ".py" and path.is_relative_to("tools/bindings/python/mha"))
)


def without_comments(text):
    """The same lines, with blanks in place of comments."""
    parts = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'
    blank = lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])
    return re.sub(parts, blank, text, flags=re.DOTALL)


library = text_of("src", "include", endings=(".c", ".h", ".cpp", ".inc", ".def"))
code = sum(bool(line.strip()) for line in without_comments(library).splitlines())
not_blank = sum(bool(line.strip()) for line in library.splitlines())
headers = text_of("include", endings=(".h",))
header = without_comments(headers)
bodies = re.findall(r"\bstruct \w+ \{(.*?)\n\}", header, re.DOTALL)
fields = [
    declarator
    for body in bodies
    for declaration in body.split(";")[:-1]
    for declarator in re.sub(r"\([^*].*\)", "", declaration, flags=re.DOTALL).split(",")
]
prose = re.sub(r"^```.*?^```", "", texts[pathlib.Path("README.md")], flags=re.DOTALL | re.MULTILINE)
words = sum(
    len(text.split())
    for path, text in texts.items()
    if path.suffix == ".md" and path.name != "CONTRACT.md"
)
corpus = root / "tests/fuzz/corpus"

measures = {  # each with its sentence
    "code_lines": (code, "src and include have {} code lines"),
    "comment_lines": (
        100 * (not_blank - code) / len(library.splitlines()),
        "{}% of the lines of src and include are comments",
    ),
    "test_lines": (text_of("tests").count("\n"), "tests has {} lines"),
    "tool_lines": (
        text_of("tools", "bench", without=(".lock", ".md")).count("\n") - documentation,
        "tools and bench have {} lines",
    ),
    "page_words": (words, "the pages have {} words"),
    "readme_words": (len(prose.split()), "README.md has {} words outside of code"),
    "corpus_bytes": (
        sum(path.stat().st_size for path in corpus.rglob("*")),
        "tests/fuzz/corpus has {} bytes",
    ),
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
