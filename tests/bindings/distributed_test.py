#!/usr/bin/env python3
"""tools/bindings/python/distributed.py: any number of processes gives the bits of one call, and no
failure makes a process wait for ever.

    distributed_test.py --library LIBMHA.SO [--venv FOLDER]

Exits with 77, which ctest shows as skipped, where PyTorch is neither with this interpreter nor in
FOLDER.
"""

import os
import re
import socket
import subprocess
import sys
import time
import unittest

import python_support
from python_support import tools

python_support.need(
    ["numpy", "torch"],
    python_support.parser(__doc__, venv="runtimes").parse_args(),
    "tools/bindings/python/setup.sh --runtimes",
)
timeout = 8


def run(count, *arguments, others=None):
    """The exit code and the output of each process. others: arguments of process 1 in place of the
    same."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                tools / "distributed.py",
                "--timeout",
                str(timeout),
                "--steps",
                "1",
                *(others if others and rank == 1 else arguments),
            ],
            env={**place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        if "hang" in arguments:  # process 1 does, and the end of process 0 is what is tested
            processes[0].wait(4 * timeout)
            processes[1].kill()
        return [
            (process.returncode, text)
            for process in processes
            for text in [process.communicate(timeout=4 * timeout)[0]]
        ]
    finally:
        for process in processes:
            process.kill()


class Distributed(unittest.TestCase):
    def test_any_number_of_processes_gives_the_bits_of_one_call(self):
        checksums = set()
        for count in 1, 3:
            results = run(count, "--keys", "5000", "--queries", "2", "--check")
            self.assertEqual([code for code, _ in results], [0] * count, results)
            self.assertIn("the same bits", results[0][1])
            checksums.add(re.search(r"checksum (\w{16})", results[0][1])[1])
        self.assertEqual(len(checksums), 1)

    def expect_failure(self, sentence, results, silent=()):
        for rank, (code, text) in enumerate(results):
            self.assertNotEqual(code, 0)
            if rank not in silent:
                self.assertRegex(text, rf"process {rank} stops: .*{sentence}")

    def test_an_error_of_a_process_is_said_by_all(self):
        self.expect_failure(
            "process 1: cannot reshape", run(2, "--keys", "5000", "--fault", "1", "error")
        )

    def test_a_process_with_other_arguments_is_refused_by_all(self):
        self.expect_failure(
            "process 1: it was started with other arguments",
            run(2, "--keys", "5000", others=["--keys", "6000"]),
        )

    def test_a_process_that_exits_or_hangs_ends_the_others_within_the_time_out(self):
        for how in "exit", "hang":
            start = time.monotonic()
            self.expect_failure(
                "(reset|closed|[Tt]imed out)",
                run(2, "--keys", "5000", "--fault", "1", how),
                silent=[1],
            )
            self.assertLess(time.monotonic() - start, 4 * timeout + 60)

    def test_without_torchrun_the_usage_is_said(self):
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        done = subprocess.run(
            [sys.executable, tools / "distributed.py"],
            capture_output=True,
            text=True,
            env=environment,
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn("torchrun", done.stderr)


python_support.run(Distributed)
