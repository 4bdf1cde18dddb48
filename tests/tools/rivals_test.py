"""Tests that a comparison with other libraries leaves no process behind."""

import os
import pathlib
import subprocess
import sys
import tempfile

rivals = str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "rivals")
library = """import os, time
started, Core, __version__ = os.pipe(), object, "1"
if not os.fork():
    os.write(started[1], b"1")
    time.sleep(30)
os.read(started[0], 1)
"""
script = """import layers, os
worker = layers.Worker("OpenVINO", [min(os.sched_getaffinity(0))], "libm.so.6", None)
assert worker.ask("version") == "1"
"""
with tempfile.TemporaryDirectory() as folder:
    for name, text in ("numpy", ""), ("openvino", library):
        (pathlib.Path(folder) / f"{name}.py").write_text(text)
    # Every process holds the end of the pipe that is read here.
    for end, status in ("worker.end()", 0), ("os.kill(os.getpid(), 9)", -9):
        command = sys.executable, "-B", "-c", script + end
        path = {"PYTHONPATH": os.pathsep.join([folder, rivals])}
        done = subprocess.run(command, stderr=subprocess.PIPE, env=os.environ | path, timeout=15)
        assert done.returncode == status, done.stderr.decode()
