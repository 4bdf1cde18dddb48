"""Hooks of MkDocs: the pages of the tree become those of the site, from where they lie, with their links rewritten; Doxygen's pages and the
attention maps of the demonstration are added. MHA_SITE_API names the folder of Doxygen's HTML."""

import json
import os
import pathlib
import posixpath
import re
import sys

from mkdocs.structure.files import File, InclusionLevel

root = pathlib.Path(__file__).resolve().parent.parent.parent
# Where pages of the tree go; those of src/docs keep their names.
places = {
    "README.md": "overview.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
    "src/kernels/CONTRACT.md": "contract.md", "tests/examples/README.md": "examples.md", "tests/examples": "examples.md",
    "tools/bindings/rust/mha/README.md": "rust.md", "tools/bindings/rust/mha": "rust.md", "tools/adapters/candle/README.md": "candle.md",
    "tools/adapters/candle": "candle.md", "include/mha.h": "api/mha_8h.html", "include/mha_options.h": "api/mha__options_8h.html",
    "include/mha_extra.h": "api/mha__extra_8h.html",
}
places.update({f"src/docs/{path.name}": path.name for path in sorted((root / "src" / "docs").iterdir())})
at = {place: path for path, place in places.items() if path.endswith((".md", ".png"))}
link = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
fence = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def outside_of_code(text, change):
    codes = fence.findall(text)
    return "".join(change(part) + code for part, code in zip(fence.split(text), [*codes, ""]))


def target_of(path, link_text):
    """What the page at this path of the tree links to, as a path of the tree."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link_text))


def place_of(path):
    """Files that are no pages are shown as such."""
    return places.get(path) or f"source/{path.replace('.', '_')}.md"


def on_config(config):
    """A page of src/docs that the navigation does not know stands at the end of the guide."""
    known = json.dumps(config.nav)
    guide = next(part["Guide"] for part in config.nav if "Guide" in part)
    guide.extend(name for name in at if name.endswith(".md") and f'"{name}"' not in known)
    return config


def on_files(files, config):
    shown = set()
    for place, path in at.items():
        files.append(File.generated(config, place, abs_src_path=str(root / path)))
        if path.endswith(".md"):
            outside_of_code((root / path).read_text(), lambda text, path=path: shown.update(target_of(path, found[1]) for found in link.finditer(text)) or "")
    for path in sorted(shown - set(places)):
        file = root / path  # one that is not there fails here
        text = "\n".join(sorted(each.name for each in file.iterdir())) if file.is_dir() else file.read_text()
        language = {".h": "c", ".py": "python", ".rs": "rust"}.get(pathlib.Path(path).suffix, pathlib.Path(path).suffix[1:])
        content = f"---\nsearch: {{ exclude: true }}\nhide: [toc]\n---\n\n# {path}\n\n~~~~{language}\n{text}\n~~~~\n"
        files.append(File.generated(config, place_of(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    for path in sorted(pathlib.Path(os.environ["MHA_SITE_API"]).rglob("*")):
        if path.is_file():
            files.append(File.generated(config, f"api/{path.relative_to(os.environ['MHA_SITE_API'])}", abs_src_path=str(path)))
    files.append(File.generated(config, "maps.json", content=json.dumps(attention_maps(), separators=(",", ":"))))
    return files


def on_page_markdown(markdown, page, config, files):
    path = at.get(page.file.src_uri)
    if not path:
        return markdown
    # Elsewhere a list may follow a paragraph without an empty line.
    markdown = outside_of_code(markdown, lambda text: re.sub(r"^([^\s|#>*-].*)\n(?=- |1\. )", r"\1\n\n", text, flags=re.MULTILINE))
    markdown = re.sub(r"^```rust,.*$", "```rust", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```rust$.*?^```$", lambda code: re.sub(r"^# .*\n", "", code[0], flags=re.MULTILINE), markdown, flags=re.DOTALL | re.MULTILINE)
    return outside_of_code(markdown, lambda text: link.sub(lambda found: f"]({place_of(target_of(path, found[1]))}{found[2] or ''})", text))


def attention_maps():
    """The weights of the demonstration's sentence: [head][query][key], in thousandths, as the library computes them."""
    sys.path[:0] = [str(root / "tools"), str(root / "tools" / "bindings" / "python")]
    import random

    import demo_files
    import mha
    import numpy as np

    random.seed(1)
    words = demo_files.sentence.split()
    x = np.array(demo_files.sentence_rows(words), np.float32)
    w_q, w_k = (np.array(w, np.float32).reshape(x.shape[1], 96) for w in demo_files.sentence_layer(x.shape[1]))
    layer = mha.Layer(query_dim=x.shape[1], num_heads=6, head_dim=16, w_q=w_q, w_k=w_k, w_v=w_k)
    _, steps = layer.forward(x[None], is_causal=True, want=("attention_weights",))
    return {"words": words, "weights": np.rint(1000 * steps["attention_weights"][0]).astype(int).tolist()}
