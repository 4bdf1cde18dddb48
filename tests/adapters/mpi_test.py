"""Tests mha_mpi: any number of processes gives the bits of one call, and no failure makes a process
wait forever.

Usage: mpi_test.py MHA_MPI MPIRUN
"""

import os
import re
import subprocess
import sys
import time
import unittest

program, mpirun = sys.argv[1:3]
environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(*jobs, timeout=60):
    """The result of a job of (number of processes, arguments...), or of several that are one. A
    process that waits for its turn on a busy machine says nothing either, so time-outs are long."""
    command = [mpirun, "--oversubscribe"]
    for ranks, *arguments in jobs:
        command += [":"] * (command[-1] != "--oversubscribe") + [
            "-n",
            str(ranks),
            program,
            "--repeats",
            "1",
            "--timeout",
            str(timeout),
            *arguments,
        ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


class Mpi(unittest.TestCase):
    def checksum(self, ranks, *arguments):
        done = run((ranks, "--check", *arguments))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("the same bits", done.stdout)
        return re.search(r"checksum (\w{16})", done.stdout)[1]

    def test_any_number_of_processes_gives_the_bits_of_one_call(self):
        for arguments in ([], ["--queries", "3", "--head-dim-v", "40"]):
            checksums = {
                self.checksum(ranks, "--keys", "5000", *arguments) for ranks in (1, 2, 3, 4)
            }
            self.assertEqual(len(checksums), 1)

    def test_heads_are_spread_too(self):
        arguments = "--keys", "2500", "--queries", "2"
        self.assertEqual(
            {self.checksum(ranks, "--groups", "2", *arguments) for ranks in (2, 4)},
            {self.checksum(1, *arguments)},
        )

    def test_the_bytes_that_are_sent_are_those_of_queries_and_partials(self):
        # 20 chunks, 10 for each process: of the second one's, 10 and 11, 12 to 15 and 16 to 19 are
        # subtrees.
        header, keys = 10 * 8, ["--keys", "5120"]
        sent = int(re.search(r"bytes sent per layer and token: (\d+)", run((2, *keys)).stdout)[1])
        self.assertEqual(sent, header + 4 * 8 * 128 + 3 * (header + 4 * 8 * 130))

    def expect_failure(self, sentence, ranks, *jobs, silent=(), timeout=60):
        start = time.monotonic()
        done = run(*jobs, timeout=timeout)
        self.assertEqual(done.returncode, 3, done.stderr)
        for rank in range(ranks):
            said = re.findall(rf"^mha_mpi: rank {rank}\b.*", done.stderr, re.MULTILINE)
            self.assertEqual(len(said), rank not in silent, done.stderr)
        self.assertRegex(done.stderr, sentence)
        return time.monotonic() - start

    def test_no_memory_is_said_by_all(self):
        self.expect_failure(
            "there is no memory for [0-9]+ bytes; use more processes", 2, (2, "--keys", str(10**12))
        )

    def test_a_process_that_fails_is_named_by_all(self):
        for ranks in 2, 4:
            self.expect_failure("kv_first_position is -1", ranks, (ranks, "--fault", "1", "fail"))

    def test_partials_of_another_shape_are_refused_by_all(self):
        self.expect_failure(
            "rank 1 has --head-dim-v 129, but this rank has 128", 3, (3, "--fault", "1", "shape")
        )

    def test_processes_with_other_arguments_are_refused_by_all(self):
        self.expect_failure(
            "--keys (65536|4096), but this rank has (4096|65536)", 3, (2,), (1, "--keys", "4096")
        )

    def test_a_process_that_says_nothing_ends_the_job_after_the_time_outs(self):
        for ranks in 2, 4:
            job = ranks, "--fault", "1", "hang"
            said = "rank 1 .*within the time-out"
            taken = self.expect_failure(said, ranks, job, silent=[1], timeout=5)
            self.assertLess(taken, 6 * 5 + 20)  # of which 20 are for a busy machine

    def test_a_job_that_cannot_be_shared_out_is_refused(self):
        self.expect_failure("--groups must divide the 3 processes", 3, (3, "--groups", "2"))
        self.expect_failure("256 for each process", 2, (2, "--keys", "200"))

    def test_wrong_arguments_show_the_usage(self):
        done = run((1, "--unknown"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("mpirun -n N mha_mpi", done.stdout)


unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
