#!/usr/bin/env python3
"""Attention over a long sequence whose keys are spread over processes, by torch.distributed (gloo):
the bits of one call for any number of them.

The chunks of 256 keys are cut into equal subtrees, of which each process holds some that follow
each other. In each step, all get the queries, compute the states of their keys (mha.attention with
states=True), and merge them up the tree to process 0, which finishes them. Exit codes: 0 done; 1 a
process failed, which all others say, at the latest after the time-out; 2 wrong usage.
src/docs/machines.md says more.

Examples:
  torchrun --nproc-per-node 4 tools/bindings/python/distributed.py --check torchrun --nnodes 2
  --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400
  tools/bindings/python/distributed.py --keys 1000000
"""

import argparse
import datetime
import hashlib
import os
import pathlib
import sys
import time

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
for name, default in dict(
    keys=65536, heads=8, kv_heads=2, head_dim=128, queries=1, steps=5, timeout=30
).items():
    parser.add_argument(
        "--" + name.replace("_", "-"), type=int, default=default, help=f"{default} if not given"
    )
parser.add_argument(
    "--check",
    action="store_true",
    help="compute the same in one call, in process 0, and compare bits and time",
)
parser.add_argument(
    "--fault",
    nargs=2,
    metavar=("RANK", "HOW"),
    default=("", ""),
    help="for tests: a process that has an 'error', 'exit's, or 'hang's",
)


class Job:
    def __init__(self, arguments, rank, processes):
        self.a, self.rank, self.processes, self.sent = arguments, rank, processes, 0
        chunks = -(-self.a.keys // 256)
        self.leaves = 1 << (min(chunks, 16 * processes) - 1).bit_length()
        self.leaf_keys = 256 << (-(-chunks // self.leaves) - 1).bit_length()
        self.used = -(-self.a.keys // self.leaf_keys)
        if self.used < processes:
            raise ValueError(
                f"--keys {self.a.keys} are not 256 for each of {processes} processes; use fewer"
            )
        self.caches = {
            first: self.cache(first * self.leaf_keys, min(end * self.leaf_keys, self.a.keys))
            for first, end in self.pieces(0, self.leaves)
        }

    def cache(self, first, end):
        """Of the keys [first, end), which are the same numbers whoever makes them."""
        cache = mha.KvCache(
            num_sequences=1,
            capacity=end - first,
            num_kv_heads=self.a.kv_heads,
            head_dim=self.a.head_dim,
            k_type="f16",
            v_type="f16",
        )
        for at in range(first, end, 256):
            rows = np.random.default_rng(at).standard_normal(
                (256, 2, self.a.kv_heads, self.a.head_dim), np.float32
            )[: end - at]
            cache.append(0, *(np.ascontiguousarray(rows[:, i]) for i in (0, 1)))
        return cache

    def owner(self, leaf):
        return ((leaf + 1) * self.processes - 1) // self.used

    def pieces(self, first, count):
        """The largest subtrees that are this process's alone, as the leaves [first, end)."""
        end = min(first + count, self.used)
        if first < end and self.owner(first) != self.owner(end - 1):
            yield from self.pieces(first, count // 2)
            yield from self.pieces(first + count // 2, count // 2)
        elif first < end and self.owner(first) == self.rank:
            yield first, end

    def attend(self, cache, q, **options):
        return mha.attention(
            q,
            cache=cache,
            cache_read=True,
            is_causal=True,
            q_first_positions=[self.a.keys - self.a.queries],
            **options,
        )

    def agree(self, error):
        """Raises the error of any process in all of them, and where one was started with other
        arguments."""
        shape = repr(
            sorted((name, value) for name, value in vars(self.a).items() if name != "fault")
        )
        mine = (error or "").encode()[:255].ljust(256, b"\0") + hashlib.sha256(
            shape.encode()
        ).digest()
        all_of_them = [torch.empty(len(mine), dtype=torch.uint8) for _ in range(self.processes)]
        dist.all_gather(all_of_them, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        for rank, other in enumerate(map(bytes, all_of_them)):
            if other[0] or other[256:] != bytes(all_of_them[0])[256:]:
                said = other[:256].rstrip(b"\0").decode(errors="replace")
                raise RuntimeError(
                    f"process {rank}:"
                    f" {said or 'it was started with other arguments than process 0'}"
                )

    def merge(self, first, count, states):
        """The process that has the states of a subtree, and these, if it is this one."""
        left, end, middle = self.owner(first), min(first + count, self.used), first + count // 2
        if left == self.owner(end - 1):
            return left, states.get(first)
        _, ours = self.merge(first, count // 2, states)
        if middle >= end:
            return left, ours
        right, theirs = self.merge(middle, count // 2, states)
        if right != left and self.rank == right:
            dist.send(torch.from_numpy(theirs), left)
            self.sent += theirs.nbytes
        if right != left and self.rank == left:
            theirs = np.empty_like(ours)
            dist.recv(torch.from_numpy(theirs), right)
        return left, mha.states_merge(ours, theirs, out=ours) if self.rank == left else None

    def step(self, number):
        """Queries, and the context in process 0."""
        shape = 1, self.a.queries, self.a.heads, self.a.head_dim
        q = (
            np.random.default_rng(10**9 + number).standard_normal(shape, np.float32)
            if self.rank == 0
            else np.empty(shape, np.float32)
        )
        self.agree(None)
        dist.broadcast(torch.from_numpy(q), 0)
        self.sent += q.nbytes * (self.processes - 1) * (self.rank == 0)
        error, states = None, {}
        try:
            if number == 1 and self.a.fault[0] == str(self.rank):
                {
                    "error": lambda: q.reshape(0),
                    "exit": lambda: os._exit(5),
                    "hang": lambda: time.sleep(600),
                }[self.a.fault[1]]()
            states = {
                first: self.attend(cache, q, kv_first_position=first * self.leaf_keys, states=True)
                for first, cache in self.caches.items()
            }
        except Exception as failure:
            error = str(failure)
        self.agree(error)
        _, whole = self.merge(0, self.leaves, states)
        return q, mha.states_finish(whole)[0] if self.rank == 0 else None


def least_time(call, count):
    taken, results = [], []
    for number in range(count):
        start = time.perf_counter()
        results.append(call(number))
        taken.append(time.perf_counter() - start)
    return min(taken[1:]), results  # the first is not counted


def run(arguments):
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=arguments.timeout))
    job = Job(arguments, rank, processes)
    taken, steps = least_time(job.step, arguments.steps + 1)
    sent = torch.tensor(job.sent)
    dist.reduce(sent, 0)
    if rank == 0:
        print(
            f"{processes} processes, checksum"
            f" {hashlib.sha256(b''.join(y.tobytes() for _, y in steps)).hexdigest()[:16]}"
        )
        print(
            f"bytes sent per layer and token: {int(sent) / len(steps) / arguments.queries:.0f};"
            f" time of a step: {1e6 * taken:.0f} us"
        )
    if rank == 0 and arguments.check:
        whole = job.cache(0, arguments.keys)
        alone, results = least_time(lambda number: job.attend(whole, steps[number][0]), len(steps))
        if not all(np.array_equal(y, expected) for (_, y), expected in zip(steps, results)):
            raise RuntimeError("the bits are not those of one call")
        print(
            f"one call: {1e6 * alone:.0f} us, the same bits; efficiency"
            f" {100 * alone / processes / taken:.0f}%"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("RANK is not set: start it by torchrun, as --help shows")
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    import mha
    import numpy as np
    import torch
    import torch.distributed as dist

    try:
        run(arguments)
    except Exception as error:
        print(
            f"distributed.py: process {os.environ['RANK']} stops: {str(error).splitlines()[0]}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
