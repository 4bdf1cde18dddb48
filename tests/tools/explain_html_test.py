#!/usr/bin/env python3
"""The page of `mha explain --html` in a real browser: maps, colours, labels and values, at the width of a desktop and of a phone.

    explain_html_test.py MHA [unittest arguments]

Exits with 77 where there is neither Chromium nor Chrome (Debian: chromium): CTest shows the test as skipped.
Set MHA_SCREENSHOTS to a folder to keep the screenshots.
"""

import html
import json
import math
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tools"))
from demo_files import floats, write_npy, write_safetensors  # noqa: E402

MHA = sys.argv.pop(1)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if not CHROMIUM:
    print("SKIPPED: there is neither Chromium nor Chrome here (Debian: chromium)")
    sys.exit(77)

DESKTOP, PHONE = (1280, 1000), (390, 844)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1"]
# More than fit into a phone's width.
WORDS = ("When the old clock above the <b>door</b> struck \"nine\" & 3/4 , \\ a cat woke up 'n asked for some milk , but all that it was given "
         "was yesterday's bread .").split()

# A window is never as narrow as a phone, but a frame is. When all of it is loaded, the page around it writes down what the frame sees.
FRAME = """<!doctype html><style>body { margin: 0 } iframe { border: 0 }</style><pre id=probe></pre>
<iframe srcdoc="PAGE" width=WIDTH height=HEIGHT></iframe>
<script>addEventListener('load', () => document.getElementById('probe').textContent = JSON.stringify(frames[0].probe()))</script>"""
LISTEN = """<head><script>
const problems = [];
addEventListener('error', event => problems.push(event.message || 'not loaded: ' + event.target.src), true);
addEventListener('securitypolicyviolation', event => problems.push('refused: ' + event.blockedURI));
</script>"""
PROBE = """<script>
function probe() {
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; };
  const pictures = [...document.querySelectorAll('.map img')].map(image => ({box: box(image), alt: image.alt,
    size: [image.naturalWidth, image.naturalHeight], rendering: getComputedStyle(image).imageRendering}));
  const read = [];
  for (const [x, y] of POINTS) {
    const image = document.querySelector('.map img');
    if (!image) break;
    const r = image.getBoundingClientRect();
    image.dispatchEvent(new PointerEvent('pointermove', {clientX: r.left + x * r.width, clientY: r.top + y * r.height}));
    read.push([...document.querySelectorAll('.map output')].map(output => output.textContent));
  }
  const focus = document.querySelector('.map img');
  if (focus) focus.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));
  return {
    problems, pictures, read, after_key: focus && document.querySelector('.map output').textContent,
    loaded: performance.getEntriesByType('resource').map(entry => entry.name).filter(name => !name.startsWith('data:')),
    width: innerWidth, needed: document.documentElement.scrollWidth,
    text: document.querySelector('main').innerText, steps: [...document.querySelectorAll('.number')].map(e => e.textContent),
    maps: document.querySelectorAll('.map').length,
    labels: [...document.querySelectorAll('.map .left span, .map th[scope=row]')].map(e => e.textContent),
    injected: document.querySelectorAll('.labelled b, .weights b').length,
    cells: [...document.querySelectorAll('.weights td')].map(cell => ({box: box(cell), text: cell.textContent, kind: cell.className,
      title: cell.title, colour: getComputedStyle(cell).backgroundColor})),
  };
}
</script></body>"""


class Layer:
    """A small causal layer with random weights, in files; and its attention weights, computed here."""

    def __init__(self, folder, n, heads, head_dim=2):
        self.n, self.heads, self.head_dim, self.width = n, heads, head_dim, heads * head_dim
        draw = random.Random(n).gauss
        self.x = [draw(0, 1) for _ in range(n * self.width)]
        matrices = {name: [draw(0, 1) for _ in range(self.width**2)] for name in ("W_query", "W_key", "W_value")}
        self.w_q, self.w_k = matrices["W_query"], matrices["W_key"]
        self.files = [folder / "layer.safetensors", folder / "x.npy"]
        write_safetensors(self.files[0], {name: ([self.width] * 2, floats(values)) for name, values in matrices.items()})
        write_npy(self.files[1], (n, self.width), floats(self.x))

    def arguments(self):
        return ["--weights", self.files[0], "--heads", str(self.heads), "--input", self.files[1], "--causal"]

    def row(self, matrix, i, head):
        columns = range(head * self.head_dim, (head + 1) * self.head_dim)
        return [sum(self.x[i * self.width + r] * matrix[r * self.width + c] for r in range(self.width)) for c in columns]

    def weights(self, i, head):
        """Of row i, for the keys that it sees."""
        q = self.row(self.w_q, i, head)
        scores = [sum(a * b for a, b in zip(q, self.row(self.w_k, j, head))) / math.sqrt(self.head_dim) for j in range(i + 1)]
        exponentials = [math.exp(score - max(scores)) for score in scores]
        return [e / sum(exponentials) for e in exponentials]


class Picture:
    """A PNG as Chromium writes it: 8 bits for each of red, green, blue and perhaps alpha."""

    def __init__(self, png):
        at, data = 8, b""
        while at < len(png):
            length, kind = struct.unpack(">I4s", png[at:at + 8])
            content = png[at + 8:at + 8 + length]
            if kind == b"IHDR":
                width, height, depth, colour_type, _, _, interlaced = struct.unpack(">IIBBBBB", content)
                assert depth == 8 and colour_type in (2, 6) and not interlaced
            data += content if kind == b"IDAT" else b""
            at += length + 12
        self.size, self.channels = (width, height), 3 if colour_type == 2 else 4
        stride, filtered = width * self.channels, zlib.decompress(data)
        self.rows, above = [], bytes(stride)
        for start in range(0, height * (stride + 1), stride + 1):
            above = self.row(filtered[start], filtered[start + 1:start + 1 + stride], above)
            self.rows.append(above)

    def row(self, kind, line, above):
        line, step = bytearray(line), self.channels
        if kind == 2:
            return bytes(map(lambda x, up: (x + up) & 255, line, above))
        for i in range(len(line)) if kind else ():
            left, up, corner = (line[i - step], above[i], above[i - step]) if i >= step else (0, above[i], 0)
            p = left + up - corner
            nearest = min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
            line[i] = (line[i] + (left, up, (left + up) // 2, nearest)[kind - 1]) & 255
        return bytes(line)

    def pixel(self, x, y):
        return tuple(self.rows[int(y)][int(x) * self.channels:int(x) * self.channels + 3])


def is_viridis(pixel):
    """Near a straight line between two of viridis's colours."""
    anchors = [(68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140), (34, 168, 132), (68, 191, 112),
               (122, 209, 81), (189, 223, 38), (253, 231, 37)]
    steps = [[a + (b - a) * t / 4 for a, b in zip(low, high)] for low, high in zip(anchors, anchors[1:]) for t in range(5)]
    return any(max(abs(p - s) for p, s in zip(pixel, step)) < 12 for step in steps)


def lightness(pixel):
    """CIE L*."""
    linear = [c / 3294.6 if c <= 10.3 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in pixel]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


class InABrowser(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.page = self.folder / "page.html"

    def explain(self, *arguments):
        command = [MHA, "explain", "--html", self.page, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout, "")
        return result.stderr

    def chromium(self, size, page, *flags):
        with tempfile.TemporaryDirectory() as profile:
            command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", *flags, page.as_uri()]
            environment = dict(os.environ, HOME=profile, XDG_CONFIG_HOME=profile, XDG_CACHE_HOME=profile)
            result = subprocess.run(command, capture_output=True, timeout=120, check=False, env=environment)
        self.assertEqual(result.returncode, 0, result.stderr.decode(errors="replace"))
        return result.stdout.decode()

    def look(self, size, points=()):
        """What a script in the page sees. points: where to point in each picture, as shares of its width and height."""
        page, frame = self.page.read_text(), self.folder / "frame.html"
        self.assertEqual((page.count("<head>"), page.count("</body>")), (1, 1))
        page = page.replace("<head>", LISTEN).replace("</body>", PROBE.replace("POINTS", json.dumps(list(points))))
        frame.write_text(FRAME.replace("WIDTH", str(size[0])).replace("HEIGHT", str(size[1])).replace("PAGE", html.escape(page)))
        dom = self.chromium(DESKTOP, frame, "--dump-dom")
        seen = json.loads(html.unescape(dom.split("<pre id=\"probe\">")[1].split("</pre>")[0]) or "null")
        self.assertIsNotNone(seen, "the page broke off")
        self.assertEqual(seen["problems"], [])
        self.assertEqual(seen["loaded"], [], "the page loads something")
        self.assertEqual(seen["width"], size[0])
        self.assertLessEqual(seen["needed"], size[0], "the page is wider than the screen")
        return seen

    def screenshot(self, size, name, *flags):
        path = self.folder / "screenshot.png"
        self.chromium(size, self.page, f"--screenshot={path}", *flags)
        image = Picture(path.read_bytes())
        self.assertEqual(image.size, size)
        if "MHA_SCREENSHOTS" in os.environ:
            shutil.copy(path, pathlib.Path(os.environ["MHA_SCREENSHOTS"]) / f"{name}-{size[0]}.png")
        return image

    def test_the_worked_example_has_tables_of_numbers_whose_colours_are_on_the_screen(self):
        self.explain("--tokens", "the cat sleeps")
        for size in (DESKTOP, PHONE):
            seen = self.look(size)
            self.assertEqual(seen["steps"], ["1", "2", "3", "4", "5", "6", "7", "8a", "8b", "8c", "9", "10", "11", "12",
                                             "6", "7", "8a", "8b", "8c", "9", "10", "11"])
            self.assertEqual(seen["maps"], 4)
            self.assertEqual(seen["labels"], ["the", "cat", "sleeps"] * 4)
            # The second half, whose numbers the examples of the command's tests have too.
            cells = {cell["title"].split(":")[0]: cell for cell in seen["cells"][18:27]}
            self.assertEqual(cells["cat \u2192 the"]["text"], "0.49")
            self.assertEqual(cells["cat \u2192 sleeps"]["kind"], "hatched")
            self.assertEqual(cells["sleeps \u2192 sleeps"]["text"], "0.24")
            self.assertTrue(cells["sleeps \u2192 cat"]["title"].startswith("sleeps \u2192 cat: 0.3956"))
            image = self.screenshot(size, "example")
            visible = [cell for cell in seen["cells"] if cell["box"][1] + cell["box"][3] < size[1]]
            self.assertGreaterEqual(len(visible), 18)
            for cell in visible:
                left, top, width, height = cell["box"]
                pixel = image.pixel(left + 4, top + height / 2)
                if cell["kind"] == "hatched":
                    self.assertFalse(is_viridis(pixel), cell)
                else:
                    self.assertTrue(is_viridis(pixel), (cell, pixel))
                    self.assertEqual(cell["colour"], "rgb({}, {}, {})".format(*pixel))

    def test_a_sentence_has_pictures_with_its_tokens_and_values(self):
        layer = Layer(self.folder, len(WORDS), heads=3)
        self.explain(*layer.arguments(), "--tokens", " ".join(WORDS))
        pairs = [(0, 0), (5, 2), (12, 12), (len(WORDS) - 1, 7), (3, 9)]
        points = [((j + 0.5) / layer.n, (i + 0.5) / layer.n) for i, j in pairs]
        for size in (DESKTOP, PHONE):
            seen = self.look(size, points)
            self.assertEqual(seen["labels"], WORDS * 3)
            self.assertEqual(seen["injected"], 0, "a token has become HTML")
            self.assertEqual([picture["size"] for picture in seen["pictures"]], [[layer.n, layer.n]] * 3)
            for head, picture in enumerate(seen["pictures"]):
                self.assertIn(f"head {head + 1}", picture["alt"])
                self.assertEqual(picture["rendering"], "pixelated")
                self.assertAlmostEqual(picture["box"][2], picture["box"][3], delta=1, msg="squares are squares")
            for (i, j), outputs in zip(pairs, seen["read"]):
                for head, output in enumerate(outputs):
                    start, _, value = output.rpartition(": ")
                    self.assertEqual(start, f"{WORDS[i]} ({i + 1}) \u2192 {WORDS[j]} ({j + 1})")
                    if j > i:
                        self.assertEqual(value, "masked")
                        continue
                    expected = layer.weights(i, head)[j]
                    self.assertAlmostEqual(float(value), expected, delta=0.06 * expected + 1e-4, msg=f"head {head}, {i} to {j}")
            self.assertIn(f"({pairs[-1][0] + 1}) \u2192 {WORDS[pairs[-1][1] - 1]} ", seen["after_key"])

            image = self.screenshot(size, "sentence")
            left, top, width, height = seen["pictures"][0]["box"]
            step = width / layer.n
            rows = [i for i in range(layer.n) if top + (i + 1) * step < size[1]]
            self.assertGreaterEqual(len(rows), 8)
            shades = set()
            for i in rows:
                below = [j for j in range(i + 1) if left + (j + 1) * step < size[0] - 20]
                weights = layer.weights(i, 0)
                found = [image.pixel(left + (j + 0.5) * step, top + (i + 0.5) * step) for j in below]
                shades.update(found)
                self.assertTrue(all(is_viridis(pixel) for pixel in found), (i, found))
                ranked = [lightness(pixel) for _, pixel in sorted(zip(weights, found))]
                self.assertEqual([round(x) for x in ranked], sorted(round(x) for x in ranked), "larger weights are brighter")
            self.assertGreater(len(shades), 20)

    def test_long_inputs_are_reduced_and_it_is_said(self):
        layer = Layer(self.folder, 1, heads=2)
        draw = random.Random(1).random
        n = 4096
        write_npy(layer.files[1], (n, layer.width), floats(draw() for _ in range(n * layer.width)))
        told = self.explain(*layer.arguments())
        self.assertIn("2 attention maps of 4096 x 4096 weights, reduced to 683 x 683 cells, each the mean of 6 x 6", told)
        self.assertLess(self.page.stat().st_size, 4 << 20)
        for size in (DESKTOP, PHONE):
            seen = self.look(size, [(0.001, 0.9999), (0.001, 0.001)])
            self.assertEqual([picture["size"] for picture in seen["pictures"]], [[683, 683]] * 2)
            self.assertIn("Reduced: 4096 \u00d7 4096 weights are too many to draw", seen["text"])
            start, _, value = seen["read"][0][0].rpartition(": ")
            self.assertEqual(start, "4093 ... 4096 \u2192 1 ... 6")
            self.assertTrue(0.1 / n < float(value) < 10 / n, value)
            self.assertTrue(seen["read"][1][0].startswith("1 ... 6 \u2192 1 ... 6: 0."), seen["read"])

    def test_rows_of_nan_and_without_a_key_are_marked(self):
        folder, one = self.folder, ([1, 1], floats([1.0]))
        write_safetensors(folder / "layer.safetensors", {name: one for name in ("W_query", "W_key", "W_value")})
        write_npy(folder / "x.npy", (3, 1), floats([1.0, 1e30, math.nan]))
        write_npy(folder / "k.npy", (2, 1), floats([-1e30, -1e30]))
        self.explain("--weights", folder / "layer.safetensors", "--heads", "1", "--input", folder / "x.npy", "--key", folder / "k.npy",
                     "--tokens", "even none bad", "--key-tokens", "left right")
        seen = self.look(PHONE)
        self.assertEqual([cell["text"] for cell in seen["cells"]], ["0.50", "0.50", "", "", "NaN", "NaN"])
        self.assertEqual([cell["kind"] for cell in seen["cells"]], ["", "", "hatched", "hatched", "nan", "nan"])
        self.assertEqual(seen["cells"][3]["title"], "none \u2192 right: masked")
        self.assertIn("Row 2 (none): all keys are masked, so that all weights are 0.", seen["text"])
        self.assertIn("Row 3 (bad): NaN.", seen["text"])

    def test_it_is_dark_where_the_system_is(self):
        self.explain()
        light = self.screenshot(PHONE, "light")
        dark = self.screenshot(PHONE, "dark", "--blink-settings=preferredColorScheme=0")
        self.assertGreater(lightness(light.pixel(3, 3)), 90)
        self.assertLess(lightness(dark.pixel(3, 3)), 20)

    def test_the_scale_is_of_even_steps_to_the_eye(self):
        self.explain()
        box_of_scale = self.page.read_text().split("linear-gradient(to right, ")[1].split(")")[0].split(", ")
        colours = [tuple(int(colour[i:i + 2], 16) for i in (1, 3, 5)) for colour in box_of_scale]
        steps = [lightness(b) - lightness(a) for a, b in zip(colours, colours[1:])]
        self.assertGreater(min(steps), 0.5 * sum(steps) / len(steps))
        self.assertLess(max(steps), 1.5 * sum(steps) / len(steps))


if __name__ == "__main__":
    unittest.main()
