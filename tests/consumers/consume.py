"""Programs that use mha as its users do: each is built in an empty folder by a plain C compiler,
run, and looked at.

install puts the library into a folder and moves the folder away from the place that it was
installed to; the others build against what lies there then.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile

here = pathlib.Path(__file__).resolve().parent
source_dir = here.parent.parent
warnings = ["-pedantic", "-Wall", "-Wextra", "-Werror"]


def run(command, sentence, env=None):
    """Runs a command and returns what it printed; if it fails, ends with the sentence and what it
    printed."""
    command = [str(word) for word in command]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    if done.returncode:
        sys.exit(f"{sentence}\n$ {shlex.join(command)}\n{done.stdout}exit status {done.returncode}")
    return done.stdout


class Consumer:
    def __init__(self, arguments):
        self.__dict__.update(vars(arguments))
        self.work = pathlib.Path(self.work).resolve() / self.consumer
        self.prefix = self.work.parent / "moved"
        self.emulator = shlex.split(self.emulator)
        compilers = [f"-DCMAKE_C_COMPILER={self.cc}", f"-DCMAKE_CXX_COMPILER={self.cxx}"]
        self.configure = [self.cmake, "-B", self.work, "-G", self.generator, *compilers]
        of_config = ["--config", self.config] if self.config else []
        self.installing = [self.cmake, "--install", self.build, *of_config]
        if self.toolchain:
            self.configure.append(f"-DCMAKE_TOOLCHAIN_FILE={self.toolchain}")
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def execute(self, program, *libraries, optional=()):
        """Runs a program, and checks that it needs the given shared libraries besides libc, and no
        other."""
        output = run(
            [*self.emulator, program],
            f"{program.name}, built as a user of the library builds it, fails.",
        )
        print(output, end="")
        self.check_needed(program, *libraries, optional=optional)
        return output

    def execute_cxx(self, program, *libraries):
        of_cxx = ["libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"]
        return self.execute(program, *libraries, *of_cxx, optional=of_cxx)

    def check_needed(self, file, *libraries, optional=()):
        printed = run([self.readelf, "--dynamic", "--wide", file], "readelf fails.")
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", printed))
        print(f"{file.name} needs {' '.join(sorted(needed)) or 'nothing'}")
        for name in needed - set(libraries):
            if not re.match(r"(libc|ld)\b", name):
                sys.exit(
                    f"{file.name} needs {name}; it should do with"
                    f" libc{''.join(', ' + library for library in libraries)}."
                )
        for name in set(libraries) - needed - set(optional):
            sys.exit(f"{file.name} does not need {name}: it was linked with something else.")

    def pkg_config(self, prefix, *arguments):
        # Only what lies in the prefix, so that an mha of the system cannot be meant; the system's
        # folders come after it.
        folder = next(prefix.glob("**/pkgconfig"))
        command = [self.pkg_config_command, *arguments]
        return shlex.split(
            run(
                command,
                "pkg-config does not find what was installed.",
                {"PKG_CONFIG_PATH": str(folder)},
            )
        )

    def compile(self, name, source, *flags):
        program = self.work / name
        compiler = [self.cxx, "-std=c++17"] if source.suffix == ".cpp" else [self.cc, "-std=c99"]
        run(
            [*compiler, *warnings, source, *flags, "-o", program],
            f"{source.name} does not compile or link by {' '.join(map(str, flags))}.",
        )
        return program

    def static_only(self):
        """A copy of the installed tree without the shared library, for a linker prefers that one
        where both are there."""
        copy = self.work / "static_only"
        shutil.copytree(self.prefix, copy, symlinks=True)
        for file in copy.glob("**/libmha.so*"):
            file.unlink()
        return copy

    def library_folder(self, prefix=None):
        return next((prefix or self.prefix).glob("**/pkgconfig")).parent

    def files(self, prefix):
        return {str(path.relative_to(prefix)) for path in prefix.glob("**/*") if not path.is_dir()}

    def run_through_pkg_config(self, prefix, what, source=here / "layer.c"):
        """Compiles and runs a program by what pkg-config says of the shared library in a prefix."""
        flags = self.pkg_config(prefix, "--cflags", "--libs", "mha")
        program = self.compile(what, source, *flags, f"-Wl,-rpath,{self.library_folder(prefix)}")
        return (self.execute_cxx if source.suffix == ".cpp" else self.execute)(
            program, "libmha.so.0"
        )

    def check_pages(self, folder, *others):
        """The folder has the pages, their pictures and data, what the header cites and the other
        files; what they link to lies there too."""
        docs = source_dir / "src" / "docs"
        cited = re.findall(r"\w+\.md", (source_dir / "include" / "mha.h").read_text())
        if not cited:
            sys.exit("mha.h cites no page, so this test has nothing to look for.")
        for name in {
            *cited,
            "CONTRACT.md",
            *(path.relative_to(docs) for path in docs.rglob("*.*")),
            *others,
        }:
            if not (folder / name).is_file():
                sys.exit(f"{name} is not installed into {folder}.")
        for page in folder.glob("*.md"):
            for link in re.findall(r"\]\((?!\w+:|#)([^)#]*)", page.read_text()):
                if not (folder / link).is_file():
                    sys.exit(f"{page} links to {link}, which is not installed.")
        self.check_spdx(json.loads((folder / "mha.spdx.json").read_text()))

    def check_spdx(self, document):
        """The list of what is in the libraries is of these sources and of the xsimd that was
        compiled, each with what SPDX 2.3 asks for."""
        elements = [document, *document["packages"], *document["files"]]
        ids = [element["SPDXID"] for element in elements]
        packages = {package["name"]: package for package in document["packages"]}
        paths = [
            path
            for folder in ("include", "src")
            for path in (source_dir / folder).glob("**/*")
            if path.suffix in (".h", ".c", ".cpp")
        ]
        of_sources = {
            (
                f"./{path.relative_to(source_dir)}",
                kind,
                hashlib.new(kind, path.read_bytes()).hexdigest(),
            )
            for path in paths
            for kind in ("SHA1", "SHA256")
        }
        listed = {
            (file["fileName"], sum["algorithm"], sum["checksumValue"])
            for file in document["files"]
            for sum in file["checksums"]
        }
        sha1 = "".join(sorted(value for _, kind, value in listed if kind == "SHA1"))
        cache = (pathlib.Path(self.build) / "CMakeCache.txt").read_text()
        xsimd = re.search(r"(?m)^MHA_XSIMD_INCLUDE_DIR:PATH=(.*)$", cache)[1]
        config = (pathlib.Path(xsimd) / "xsimd" / "config" / "xsimd_config.hpp").read_text()
        version = ".".join(re.findall(r"define XSIMD_VERSION_\w+ (\d+)", config))
        needed = {"name", "downloadLocation", "filesAnalyzed", "licenseConcluded", "versionInfo"}
        related = {
            line[end]
            for line in document["relationships"]
            for end in ("spdxElementId", "relatedSpdxElement")
        }
        code = packages["mha"]["packageVerificationCode"]["packageVerificationCodeValue"]
        for what, is_right in {
            "version": document["spdxVersion"] == "SPDX-2.3",
            "namespace": document["documentNamespace"].startswith("https://"),
            "SPDXID": len(set(ids)) == len(ids) and related <= set(ids),
            "packages": all(needed <= set(package) for package in document["packages"]),
            "files": listed == of_sources,
            "verification code": code == hashlib.sha1(sha1.encode()).hexdigest(),
            "xsimd": packages["xsimd"]["versionInfo"] == version,
        }.items():
            if not is_right:
                sys.exit(f"mha.spdx.json is wrong in: {what}.")

    # ---- What ctest runs

    def install(self):
        installed = self.work / "prefix"
        run([*self.installing, "--prefix", installed], "The installation fails. Is all built?")
        shutil.rmtree(self.prefix, ignore_errors=True)
        installed.rename(self.prefix)
        for file in sorted(self.prefix.glob("**/*")):
            if file.suffix in (".cmake", ".pc") and str(self.work) in file.read_text():
                sys.exit(
                    f"{file.relative_to(self.prefix)} names the place it was installed to, so the"
                    " tree cannot be moved."
                )
        shared = self.library_folder() / "libmha.so"
        soname = re.findall(
            r"\(SONAME\).*\[(.*)\]",
            run([self.readelf, "--dynamic", "--wide", shared], "readelf fails."),
        )
        if soname != ["libmha.so.0"]:
            sys.exit(
                f"The SONAME of libmha.so is {' '.join(soname) or 'missing'}, not libmha.so.0."
            )
        self.check_needed(shared)
        self.check_pages(
            self.prefix / "share" / "doc" / "mha", "LICENSE", "NOTICES.txt", "CHANGELOG.md"
        )

    def destdir(self):
        """DESTDIR takes in everything, under the prefix that was configured, and what lies there
        can be used in its place."""
        stage = self.work / "stage"
        run(self.installing, "The installation with DESTDIR fails.", {"DESTDIR": str(stage)})
        cache = (pathlib.Path(self.build) / "CMakeCache.txt").read_text()
        configured = re.search(r"^CMAKE_INSTALL_PREFIX:PATH=(.*)$", cache, re.MULTILINE).group(1)
        prefix = stage / configured.lstrip("/")
        outside = [name for name in self.files(stage) if not (stage / name).is_relative_to(prefix)]
        if outside or self.files(prefix) != self.files(self.prefix):
            sys.exit(
                f"DESTDIR gets other files than the installation into a prefix: {' '.join(outside)}"
                f" {' '.join(self.files(prefix) ^ self.files(self.prefix))}"
            )
        self.run_through_pkg_config(prefix, "layer")

    def pkg_config_shared(self):
        self.run_through_pkg_config(self.prefix, "layer")
        self.run_through_pkg_config(self.prefix, "layer_cxx", here / "layer.cpp")

    def pkg_config_static(self):
        flags = self.pkg_config(self.static_only(), "--static", "--cflags", "--libs", "mha")
        self.execute(self.compile("layer", here / "layer.c", *flags))
        self.execute_cxx(self.compile("layer_cxx", here / "layer.cpp", *flags))

    def pkg_config_openblas(self):
        flags = self.pkg_config(self.prefix, "--cflags", "--libs", "mha_openblas")
        flags += ["-DWITH_OPENBLAS", f"-Wl,-rpath,{self.library_folder()}"]
        program = self.compile("layer", here / "layer.c", *flags)
        self.execute(program, "libmha.so.0", "libopenblas.so.0")

    def pkg_config_pthreadpool(self):
        flags = self.pkg_config(self.prefix, "--cflags", "--libs", "mha_pthreadpool")
        flags.append(f"-Wl,-rpath,{self.library_folder()}")
        program = self.compile("pthreadpool", here.parent / "examples" / "pthreadpool.c", *flags)
        self.execute(program, "libmha.so.0", "libpthreadpool.so.0")

    def find_package(self, *settings, languages="C"):
        here_too = [f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DLANGUAGES={languages}", *settings]
        command = [*self.configure, "-S", here / "find_package", *here_too]
        run(command, "find_package(mha) fails.")
        run(
            [self.cmake, "--build", self.work],
            f"A program in {languages} does not build with find_package(mha).",
        )

    def find_package_mha(self):
        self.find_package()
        self.execute(self.work / "with_mha", *(["libmha.so.0"] if self.shared else []))
        self.execute(self.work / "with_mha_static")
        self.execute(self.work / "with_mha_shared", "libmha.so.0")

    def find_package_cxx(self):
        self.find_package(languages="C;CXX")
        self.execute(self.work / "with_mha_shared", "libmha.so.0")  # of a project that has both
        self.execute_cxx(self.work / "with_mha_cxx", *(["libmha.so.0"] if self.shared else []))
        self.execute_cxx(self.work / "with_mha_static_cxx")
        self.execute_cxx(self.work / "with_mha_shared_cxx", "libmha.so.0")

    def find_package_openblas(self):
        self.find_package("-DWITH_OPENBLAS=ON")
        self.execute(
            self.work / "with_openblas",
            "libopenblas.so.0",
            *(["libmha.so.0"] if self.shared else []),
        )

    def find_package_pthreadpool(self):
        self.find_package("-DWITH_PTHREADPOOL=ON")
        self.execute(
            self.work / "with_pthreadpool",
            "libpthreadpool.so.0",
            *(["libmha.so.0"] if self.shared else []),
        )

    def package_tgz(self):
        """The archive, unpacked anywhere, has what an installation has, but for the folder around
        it, and can be used."""
        settings = pathlib.Path(self.build) / "CPackConfig.cmake"
        command = [self.cmake.with_name("cpack"), "-G", "TGZ", "--config", settings]
        of_config = ["-C", self.config] if self.config else []
        run([*command, "-B", self.work, *of_config], "cpack fails.")
        archives = list(self.work.glob("*.tar.gz"))
        if len(archives) != 1 or not archives[0].with_name(archives[0].name + ".sha256").exists():
            sys.exit(
                f"cpack makes {[path.name for path in self.work.iterdir()]}; one archive and its"
                " checksum were expected."
            )
        with tarfile.open(archives[0]) as tar:
            tar.extractall(self.work / "unpacked")
        prefix = self.work / "unpacked" / archives[0].name.removesuffix(".tar.gz")
        if self.files(prefix) != self.files(self.prefix):
            sys.exit(
                "The archive has other files than the installation:"
                f" {' '.join(self.files(prefix) ^ self.files(self.prefix))}"
            )
        self.run_through_pkg_config(prefix, "layer")

    def build_with(self, consumer, *settings):
        """Builds a project that compiles mha as a part of itself, with the scalar kernels alone,
        which every processor has: the others take long."""
        sets = [f"-DMHA_{name}=OFF" for name in ("AVX2", "AVX512", "NEON")]
        run(
            [*self.configure, "-S", here / consumer, "-DCMAKE_BUILD_TYPE=Debug", *sets, *settings],
            f"A program with {consumer} of mha fails.",
        )
        run(
            [self.cmake, "--build", self.work, "--parallel", "2"],
            f"A program with {consumer} of mha does not build.",
        )

    def add_subdirectory(self):
        """In a parent that compiles its files as one, and has warnings that are errors."""
        self.build_with(
            "add_subdirectory",
            f"-DMHA_SOURCE_DIR={source_dir}",
            "-DCMAKE_UNITY_BUILD=ON",
            "-DCMAKE_CXX_FLAGS=-Wshadow -Wconversion -Werror",
        )
        self.execute(self.work / "with_mha")
        self.execute(self.work / "with_mha_static")
        self.execute(self.work / "with_mha_shared", "libmha.so.0")

    def fetch_content(self):
        """The sources as an archive, fetched by a file: URL: no network, and no more than what a
        release holds."""
        archive = self.work / "mha.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name in ("CMakeLists.txt", "include", "src"):
                tar.add(source_dir / name, f"mha/{name}")
        self.build_with(
            "fetch_content",
            f"-DMHA_URL=file://{archive};URL_HASH;SHA256={hashlib.sha256(archive.read_bytes()).hexdigest()}",
        )
        self.execute(self.work / "with_fetched", "libmha.so.0")
        self.execute_cxx(self.work / "with_fetched_cxx", "libmha.so.0")

    def pieces(self, page):
        """The C blocks of a page, each with the block after it if that is what a program prints."""
        blocks = re.findall(
            r"^```(\w+)\n(.*?)^```$", (source_dir / page).read_text(), re.MULTILINE | re.DOTALL
        )
        return [
            (block, after[1] if after[0] == "text" else None)
            for (language, block), after in zip(blocks, [*blocks[1:], ("", "")])
            if language == "c"
        ]

    def examples(self):
        """The examples run. README.md shows minimal.c and a piece of generate.c, each with what it
        prints, and a piece of gpt_oss.c; the C blocks of embedding.md and latent.md are pieces of
        embedding.c and latent.c, of decoder.md of decoder.h, of recurrent.md of hybrid.c; the index
        names every example.

        pthreadpool.c needs the optional target of that name: it is what pkg_config_pthreadpool and
        find_package_pthreadpool run.
        """
        sources = sorted((here.parent / "examples").glob("*.c"))
        text = {source.stem: source.read_text() for source in sources}
        text["decoder"] = (here.parent / "examples" / "decoder.h").read_text()
        text["recurrent"] = text["hybrid"]
        readme = self.pieces("README.md")
        pages = {
            name: self.pieces(f"src/docs/{name}.md")
            for name in ("embedding", "decoder", "latent", "recurrent")
        }
        if len(readme) != 3 or not all(pages.values()):
            sys.exit(
                "README.md has to have three ```c blocks, minimal.c and pieces of generate.c and"
                " gpt_oss.c, and four pages of src/docs some."
            )
        (minimal, _), *_ = readme
        if minimal != text["minimal"]:
            sys.exit(
                "The C program in README.md and tests/examples/minimal.c differ. Copy the one to"
                " the other."
            )
        for name, (piece, _) in [
            ("generate", readme[1]),
            ("gpt_oss", readme[2]),
            *((page, block) for page, blocks in pages.items() for block in blocks),
        ]:
            if piece not in text[name]:
                sys.exit(
                    f"This piece does not stand in tests/examples/{name}.c (of decoder.md,"
                    f" decoder.h; of recurrent.md, hybrid.c); copy the one to the other:\n{piece}"
                )
        printed = dict(zip(["minimal", "generate"], [after for _, after in readme]))
        index = (here.parent / "examples" / "README.md").read_text()
        for source in sources:
            if f"[{source.name}]({source.name})" not in index:
                sys.exit(f"tests/examples/README.md does not name {source.name}.")
        flags = self.pkg_config(self.prefix, "--cflags", "--libs", "mha")
        flags += ["-lm", "-pthread", f"-Wl,-rpath,{self.library_folder()}"]
        for source in sources:
            if source.stem == "pthreadpool":
                continue
            program = self.compile(source.stem, source, *flags)
            output = self.execute(program, "libmha.so.0", "libm.so.6", optional=["libm.so.6"])
            if output != printed.get(source.stem, output):
                sys.exit(
                    f"{source.name} prints\n{output}where README.md says\n{printed[source.stem]}"
                )


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "consumer",
    help="one of "
    + ", ".join(
        """install destdir package_tgz pkg_config_shared pkg_config_static pkg_config_openblas
        pkg_config_pthreadpool find_package_mha find_package_cxx find_package_openblas
        find_package_pthreadpool add_subdirectory fetch_content examples""".split()
    ),
)
parser.add_argument("--work", required=True, help="the folder to work in")
parser.add_argument("--build", required=True, help="the build folder to install from")
parser.add_argument("--config", default="", help="the configuration to install")
parser.add_argument("--cc", default="cc")
parser.add_argument("--cxx", default="c++")
parser.add_argument("--cmake", default="cmake", type=pathlib.Path)
parser.add_argument("--generator", default="Ninja")
parser.add_argument("--readelf", default="readelf")
parser.add_argument("--pkg-config", dest="pkg_config_command", default="pkg-config")
parser.add_argument(
    "--emulator", default="", help="a command that runs the programs, for cross-compiling"
)
parser.add_argument("--toolchain", help="CMAKE_TOOLCHAIN_FILE of the consumers")
parser.add_argument("--shared", action="store_true", help="mha::mha is the shared library")
arguments = parser.parse_args()
getattr(Consumer(arguments), arguments.consumer)()
