"""What the tests of the Python package have in common: their arguments, an interpreter that has
what they need, and the package of these sources."""

import argparse
import doctest
import importlib.util
import inspect
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


def arrays_of(kind):
    """{name: (type, extents)} of the arrays that the documentation of a class lists."""
    found = re.findall(
        r"^(\w+) : ndarray of (\w+).*, shape \((.+?)\)", inspect.getdoc(kind), re.MULTILINE
    )
    return {name: (of, re.findall(r"\w+", shape)) for name, of, shape in found}


def need(packages, arguments, installed_by="tools/bindings/python/setup.sh"):
    """Goes on where the packages are: with this interpreter, or else with that of the folder
    --venv. Without them the test is skipped. From then on `import mha` is the package of these
    sources, with the library of --library, in programs that a test starts as well. What Python
    compiles of all packages, among them PyTorch, is kept beside the virtual environments."""
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    if missing:
        python = arguments.venv / "bin" / "python"
        if python.exists() and pathlib.Path(sys.prefix).resolve() != arguments.venv.resolve():
            os.execv(python, [python, *sys.argv])
        print(f"skipped: {', '.join(missing)} not there; {installed_by} installs what is needed")
        sys.exit(_skipped)
    os.environ["MHA_LIBRARY"] = arguments.library
    sys.path.insert(0, str(tools))
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(arguments.venv.parent / "pycache")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


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


def check_reference(case, module, **values):
    """Every public function and class of a module is described in NumPy's form: its parameters are
    those of its signature, with their defaults, and its examples run."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in module.__all__:
        whole = getattr(module, name)
        methods = vars(whole) if isinstance(whole, type) else {}
        parts = [one for one in methods if one[0] != "_" or one == "__call__"]
        for title in [name, *(f"{name}.{one}" for one in parts)] if callable(whole) else ():
            one = getattr(whole, title.rpartition(".")[2], whole)
            if not callable(one) or one is not whole and not one.__doc__:
                continue  # an attribute, or a method that overrides a runtime's
            with case.subTest(title):
                text = inspect.getdoc(one)
                case.assertRegex(text, r"\A[A-Z][^\n]*\.(\n\n|\Z)")
                described = re.search(r"^Parameters\n-+\n(.*?)(\n\n|\Z)", text, re.M | re.S)
                if isinstance(one, type) and (
                    "__init__" not in methods or name in ("Error", "Prepared")
                ):
                    continue  # which a user does not make
                entries = re.findall(
                    r"^\**(\w+(?:, \w+)*) : (.*)", described[1] if described else "", re.M
                )
                taken = dict(inspect.signature(one).parameters)
                taken.pop("self", None)
                case.assertEqual([n for names, _ in entries for n in names.split(", ")], [*taken])
                for names, kind in entries:
                    default = taken[names.split(",")[0]].default
                    if default is not inspect.Parameter.empty:
                        shown = "optional" if default in (None, ()) else f"default {default!r}"
                        case.assertTrue(kind.endswith(f", {shown}"), f"{names} : {kind}")
        for test in doctest.DocTestFinder().find(whole, name, module=False, globs={**values}):
            runner.run(test)
    for test in doctest.DocTestFinder(recurse=False).find(module, globs={**values}):
        runner.run(test)
    case.assertEqual(runner.failures, 0)
    case.assertGreater(runner.tries, 0)


def run(*cases):
    """The tests of these classes; exits with 0 if all is well."""
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
