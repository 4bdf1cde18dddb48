"""Tests that comparisons leave no process behind, and that tables keep two processors."""

import os
import pathlib
import subprocess
import sys
import tempfile

rivals = str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "rivals")
library = """import os, time
started, Core, __version__ = os.pipe(), object, "1"
if not os.fork():
    time.sleep(30 * os.write(started[1], b"1"))
os.read(started[0], 1)
"""
script = """import layers, os
worker = layers.Worker("libraries.py", "OpenVINO", 1, min(os.sched_getaffinity(0)), "libm.so.6")
worker.ask("version"); """
with tempfile.TemporaryDirectory() as folder:
    for name, text in ("numpy", ""), ("openvino", library):
        (pathlib.Path(folder) / f"{name}.py").write_text(text)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, rivals])
    # Every process holds the end of the pipe that is read here.
    for end, status in ("worker.end()", 0), ("os.kill(os.getpid(), 9)", -9):
        done = subprocess.run(
            [sys.executable, "-Bc", script + end], capture_output=True, timeout=15
        )
        assert done.returncode == status, done.stderr.decode()
    sys.path.insert(0, rivals)
    import session

    session.data = pathlib.Path(folder)
    measured = ("Zen", "z"), ("Milan", "a"), ("Lake", "b"), ("Rapids", "c"), ("Lake", "d")
    for processor, column in measured:
        session.merge_data("table", processor, f"of {column}", [{column: "1"}] * 2)
    table = "# Lake: of d\n# Rapids: of c\n# Milan: of a\nprocessor,d,c,a\n"
    table += "Lake,1,,\n" * 2 + "Rapids,,1,\n" * 2 + "Milan,,,1\n" * 2
    assert (session.data / "table.csv").read_text() == table
