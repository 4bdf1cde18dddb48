"""What the tests of the Python package have in common: their arguments, an interpreter that has
what they need, and the package of these sources."""

import argparse
import importlib.util
import os
import pathlib
import re
import signal
import sys
import unittest

root = pathlib.Path(__file__).resolve().parent.parent.parent
tools = root / "tools" / "bindings" / "python"
_skipped = 77  # which ctest shows as skipped


def parser(text, tests=(), venv="python"):
    """Of a program with this text, that takes the name of one of the tests, if there are some, and
    looks for packages in build/VENV."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if tests:
        made.add_argument("test", choices=tests)
    made.add_argument("--library", required=True, type=os.path.abspath)
    made.add_argument("--venv", type=pathlib.Path, default=root / "build" / venv)
    return made


def need(packages, arguments, installed_by="tools/bindings/python/setup.sh"):
    """Goes on where the packages are: with this interpreter, or else with that of the folder
    --venv. Without them the test is skipped. From then on `import mha` is the package of these
    sources, with the library of --library, in programs that a test starts as well."""
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    if missing:
        python = arguments.venv / "bin" / "python"
        if python.exists() and pathlib.Path(sys.prefix).resolve() != arguments.venv.resolve():
            os.execv(python, [python, *sys.argv])
        print(f"skipped: {', '.join(missing)} not there; {installed_by} installs what is needed")
        sys.exit(_skipped)
    os.environ["MHA_LIBRARY"] = arguments.library
    sys.path.insert(0, str(tools))
    sys.dont_write_bytecode = True


def readme_program(word):
    """The program of README.md with this word in it."""
    programs = re.findall(
        r"^```python\n(.*?)^```$", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return next(program for program in programs if word in program)


def is_true_in_a_child(function):
    """Whether it returns True, or the like, in a child of fork, within a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os._exit(42 if function() else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def run(*cases):
    """The tests of these classes; exits with 0 if all is well."""
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
