#!/usr/bin/env python3
"""Looks at the site as its readers do, in headless Chromium on a wide screen and on a telephone, and runs the programs of the first page.

Every page: loads without an error in the console and without asking another host, shows its pictures, is no wider than a telephone, and links to
nothing that is not there. Search finds; the maps can be clicked through; each of the first page's programs prints what the page says. Called by
tools/site/build.sh --test. Exits with 3 where Chromium is missing.

Example:
  build/site_tools/bin/python tools/site/test.py build/site --screenshots build/site_pictures
"""

import argparse
import functools
import http.server
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
import urllib.parse

root = pathlib.Path(__file__).resolve().parent.parent.parent
telephone, screen = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        from playwright.sync_api import sync_playwright

        cls.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=arguments.folder))
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()
        cls.address = f"http://127.0.0.1:{cls.server.server_port}/"
        cls.playwright = sync_playwright().start()
        cls.browser = cls.playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        cls.all_pages = sorted(str(path.relative_to(arguments.folder)) for path in arguments.folder.rglob("*.html"))
        cls.pages = [path for path in cls.all_pages if not path.startswith("api/") and path != "404.html"]

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()
        cls.server.shutdown()

    def open(self, path, size=screen):
        """The page, and what it complained of."""
        page = self.browser.new_page(viewport=size)
        self.addCleanup(page.close)
        page.set_default_timeout(60000)
        complaints = []
        page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("response", lambda answer: answer.status >= 400 and complaints.append(f"{answer.status} {answer.url}"))
        page.on("request", lambda request: request.url.startswith((self.address, "data:", "blob:")) or complaints.append(f"asks {request.url}"))
        page.goto(self.address + path, wait_until="networkidle" if path in ("index.html", "maps/index.html") else "load")
        return page, complaints

    def picture(self, page, name):
        if arguments.screenshots:
            arguments.screenshots.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=arguments.screenshots / f"{name}.png")

    def test_the_pages_that_there_should_be_are_there(self):
        self.assertGreater(len(self.pages), 20)
        for source in [*(root / "src" / "docs").glob("*.md"), *(root / name for name in ("CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"))]:
            self.assertIn(f"{source.stem.lower()}/index.html", self.pages)
        for header in ("mha", "mha__options", "mha__extra"):
            self.assertIn(f"api/{header}_8h.html", self.all_pages)

    def test_every_page_loads_without_a_complaint_with_its_pictures_and_fits_a_telephone(self):
        for path in self.pages:
            with self.subTest(page=path):
                page, complaints = self.open(path, telephone)
                broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)")
                self.assertEqual(broken, [])
                wide = page.evaluate("document.documentElement.scrollWidth")
                self.assertLessEqual(wide, telephone["width"], f"{path} is {wide} wide")
                raw = page.evaluate(r"[...document.querySelectorAll('.md-content p')].map(p => p.innerHTML).filter(t => /\n[-*|] |```|\]\(/.test(t))")
                self.assertEqual(raw, [], "Markdown that was not understood")
                self.assertEqual(complaints, [])
                page.close()
        page = self.open("api/index.html", telephone)[0]
        for path in self.all_pages:
            if path.startswith("api/"):
                page.goto(self.address + path)
                self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), telephone["width"], path)
        for name in ("index", "building/index", "maps/index"):
            for size in (telephone, screen):
                self.picture(self.open(f"{name}.html", size)[0], f"{name.split('/')[0]}_{size['width']}")

    def test_no_link_is_dead(self):
        anchors = {}

        def anchors_of(path):
            if path not in anchors:
                text = (arguments.folder / path).read_text(errors="replace")
                anchors[path] = set(re.findall(r'\b(?:id|name)="([^"]+)"', text))
            return anchors[path]

        count = 0
        for path in self.all_pages:
            text = (arguments.folder / path).read_text(errors="replace")
            for link in re.findall(r'(?:href|src)="([^"]*)"', text):
                if re.match(r"(https?|mailto|javascript|data):", link) or not link:
                    continue
                where = urllib.parse.urlsplit(urllib.parse.urljoin(f"/{'' if path == '404.html' else path}", link.replace("&amp;", "&")))
                target = urllib.parse.unquote(where.path).lstrip("/")
                if not target or target.endswith("/"):
                    target += "index.html"
                count += 1
                self.assertTrue((arguments.folder / target).is_file(), f"{path} links to {link}")
                if where.fragment and target.endswith(".html") and not where.fragment.startswith("__"):
                    self.assertIn(urllib.parse.unquote(where.fragment), anchors_of(target), f"{path} links to {link}")
        self.assertGreater(count, 2000)

    def test_search_finds_what_is_on_a_page_of_the_tree(self):
        page, complaints = self.open("index.html")
        page.click(".md-search__input")
        page.keyboard.type("pthreadpool")
        page.wait_for_selector(".md-search-result__item")
        found = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
        self.assertTrue(any("/building/" in link for link in found), found)
        self.picture(page, "search_1280")
        page.keyboard.type("zzzyqx")
        page.wait_for_selector("text=No matching documents")
        self.assertEqual(complaints, [])

    def test_the_maps_can_be_clicked_through(self):
        page, complaints = self.open("maps/index.html")
        said = page.locator(".maps-said")
        self.assertRegex(said.inner_text(), "^Head 1 .*“cat” attends most to “the”, with 93%")
        page.click("text=3: the first word")
        self.assertRegex(said.inner_text(), "^Head 3 .*“cat” attends most to “When”")
        page.click("text=next word")
        self.assertRegex(said.inner_text(), "“that” attends most to “When”")
        page.click(".maps-word:has-text('milk')")
        self.assertRegex(said.inner_text(), "“milk” attends most to “When”")
        self.assertEqual(page.locator(".maps-cell").count(), 24 * 24)
        self.picture(page, "maps_clicked_1280")
        self.assertEqual(complaints, [])


class Programs(unittest.TestCase):
    def test_each_program_of_the_first_page_prints_what_the_page_says(self):
        text = (root / "tools" / "site" / "pages" / "index.md").read_text()
        wanted = re.search(r"program prints\n?\s*`([^`]+)`", text)[1]
        programs = re.findall(r'^=== "(Python|Rust|C|C\+\+)"\n\n    ```\w+\n(.*?)^    ```$', text, re.DOTALL | re.MULTILINE)
        self.assertEqual([name for name, _ in programs], ["Python", "Rust", "C", "C++"])
        library = root / "build" / "src"
        link = ["-Wall", "-Wextra", "-Werror", f"-I{root / 'include'}", f"-L{library}", f"-Wl,-rpath,{library}", "-lmha", "-o", "program"]
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "src").mkdir()
            (folder / "Cargo.toml").write_text('[package]\nname = "program"\nversion = "0.1.0"\nedition = "2021"\n'
                                               f'[dependencies]\nmha = {{ path = "{root}/tools/bindings/rust/mha" }}\n[workspace]\n')
            ways = {"Python": ("main.py", [sys.executable, "main.py"], None), "Rust": ("src/main.rs", ["cargo", "run", "--quiet"], None),
                    "C": ("main.c", ["cc", "-std=c99", "main.c", *link], ["./program"]), "C++": ("main.cpp", ["c++", "-std=c++17", "main.cpp", *link], ["./program"])}
            environment = {**os.environ, "PYTHONPATH": str(root / "tools" / "bindings" / "python"), "MHA_LIB_DIR": str(library), "MHA_INCLUDE_DIR": str(root / "include"),
                           "LD_LIBRARY_PATH": str(library), "CARGO_TARGET_DIR": str(root / "build" / "site_cargo")}
            for language, program in programs:
                with self.subTest(language=language):
                    file, *commands = ways[language]
                    (folder / file).write_text(textwrap.dedent(program))
                    for command in filter(None, commands):
                        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                        self.assertEqual(done.returncode, 0, done.stdout)
                    self.assertEqual(done.stdout.strip(), wanted)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=pathlib.Path, help="where the site is")
parser.add_argument("--screenshots", type=pathlib.Path, metavar="FOLDER", help="keeps pictures of some pages there")
arguments, others = parser.parse_known_args()
arguments.folder = arguments.folder.resolve()
chromium = shutil.which("chromium")
if not chromium:
    print("tools/site/test.py: there is no chromium (Debian: apt-get install chromium)", file=sys.stderr)
    sys.exit(3)
unittest.main(argv=[sys.argv[0], *others])
