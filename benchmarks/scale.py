"""Promise: 1, 2, 4 … 128 workers convert a checkpoint of 2 TB at 0.9 of linear or better, whatever fails on the way.

A simulation. Real are the plan (61 layers x 384 experts in bf16, from hf to hf in other files, and to torchtitan with
stacked experts), its division into items, the order in which they begin, and how often Ray tries one again. Modelled
are machines with 64 workers of one thread and a network card, an object store with a latency and a bandwidth for
each connection and one for all, and what fails, drawn at random: one item in a thousand meets an error, one in 200 is
ten times slower than the others, and every machine is lost for good after 48 hours, on average.

Into a folder that all machines see, workers share files, and large tensors by spans. An object of a service has one
writer, so there an item is a file: how large files are decides how many workers have something to do, and how many
threads each should have.

    python benchmarks/scale.py [--nodes 16] [--items 16384] [--rounds 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from transaxle.engine.distribute.executors import RETRIES
from transaxle.engine.distribute.work_plan import WorkItem, divide, order_items, with_parts
from transaxle.engine.plan.conversion import make_plan

THREADS = tuple(1 << power for power in range(11))
"""Threads of all workers."""
A_NODE = 64
"""Threads of a machine: workers of one thread each are Ray's, where nobody says how many."""
NIC = 25e9 / 8
"""Bytes a second that a machine receives, and as many that it sends."""
LATENCY, CONNECTION, STORE = 0.03, 90e6, 400e9
"""Seconds before a request's first byte; bytes a second of a connection; those of the store, either way."""
READ, WRITE = 8 << 20, 8 << 20
"""Bytes of a request and of a part."""
START = 2.0
"""Seconds until a worker is there and has the program."""
FAILS, SLOW, SLOWER, LOST = 1e-3, 5e-3, 10.0, 48 * 3600.0
GET_PRICE, PUT_PRICE, NODE_PRICE = 0.4e-6, 5e-6, 5.0
"""USD a request, a part, and an hour of a machine."""
PROMISE, UP_TO, MANY = 0.9, 128, 16_384


@dataclass(frozen=True)
class Case:
    """A conversion, with its number of items and threads."""

    to: str
    """`FORMAT:DIALECT`."""
    shard_size: int | None = None
    """Bytes of a file."""
    many_items: bool = True
    """Whether to divide into more items than one per GiB."""
    service: bool = False
    """Whether the target is an object store, where no two items can write one file."""
    threads: int = 1
    """Number of threads per worker."""


CASES = (
    Case("hf", many_items=False),
    Case("hf"),
    Case("torchtitan"),
    Case("hf", service=True),
    Case("hf", service=True, threads=8),
    Case("hf", 1 << 28, service=True),
    Case("torchtitan", service=True, threads=8),
    Case("dcp:torchtitan", service=True, threads=8),
)


@dataclass
class Outcome:
    """Result of a simulated conversion."""

    seconds: float
    """Seconds from the first item to the last."""
    twice: float
    """Bytes moved by attempts that failed."""
    retries: float
    """Number of repeated items."""
    lost: float
    """Number of lost machines."""


def alone() -> float:
    """Return bytes per second of an undisturbed worker thread, which reads a block and then writes it."""
    second = (LATENCY + READ / CONNECTION) / READ + (LATENCY + WRITE / CONNECTION) / WRITE
    return 1 / second


class Simulation:
    """Workers on machines that take items one after another.

    Args:
        items: the work.
        workers: number of workers.
        a_node: number of workers per machine.
        seed: seed of the random failures.
        threads: number of threads per worker.
    """

    def __init__(self, items: Sequence[WorkItem], workers: int, a_node: int, seed: int, threads: int = 1) -> None:
        self.items = order_items(item for item in items if item.nbytes)
        self.sizes = {item.number: item.nbytes for item in self.items}
        self.threads = threads
        self.random = np.random.default_rng(seed)
        self.node = np.arange(workers) // a_node
        self.alive = np.ones(workers, bool)
        self.item = np.full(workers, -1)
        self.left = np.zeros(workers)
        self.until = np.zeros(workers)
        """Remaining bytes at which each worker's item fails; 0: it does not fail."""
        self.factor = np.ones(workers)
        self.queue = deque(item.number for item in self.items)
        self.tries = dict.fromkeys(self.sizes, 0)
        self.done: set[int] = set()
        self.now = 0.0
        self.outcome = Outcome(0.0, 0.0, 0, 0)
        nodes = int(self.node[-1]) + 1
        self.loss = sorted((float(self.random.exponential(LOST)), node) for node in range(nodes))

    def run(self) -> Outcome:
        """Run until all items are done."""
        while len(self.done) < len(self.items):
            self.hand_out()
            rates = self.rates()
            busy = self.item >= 0
            if not busy.any():
                raise RuntimeError("all machines are lost")
            due = np.where(busy, (self.left - self.until) / rates, np.inf)
            step = min(float(due.min()), self.loss[0][0] - self.now if self.loss else np.inf)
            self.now += step
            self.left -= np.where(busy, rates * step, 0.0)
            for worker in np.flatnonzero(busy & (due <= step * (1 + 1e-12))):
                self.end(int(worker))
            if self.loss and self.now >= self.loss[0][0]:
                self.lose(self.loss.pop(0)[1])
        self.outcome.seconds = self.now
        return self.outcome

    def hand_out(self) -> None:
        """Give the next items to free workers."""
        for worker in np.flatnonzero(self.alive & (self.item < 0))[: len(self.queue)]:
            number = self.queue.popleft()
            size = self.sizes[number]
            self.item[worker], self.left[worker] = number, size
            self.until[worker] = size * self.random.random() if self.random.random() < FAILS else 0.0
            self.factor[worker] = 1 / SLOWER if self.random.random() < SLOW else 1.0

    def rates(self) -> np.ndarray:
        """Return the bytes per second of every worker."""
        busy = self.item >= 0
        on_node = np.bincount(self.node, busy)[self.node]
        share = np.minimum(NIC / np.maximum(on_node, 1), STORE / max(int(busy.sum()), 1))
        return np.minimum(alone() * self.threads * self.factor, share)

    def end(self, worker: int) -> None:
        """Finish a worker's item, or repeat it if it failed."""
        number = int(self.item[worker])
        if self.until[worker] > 0:
            self.waste(worker)
            self.retry(number)
        else:
            self.done.add(number)
        self.item[worker] = -1

    def retry(self, number: int) -> None:
        """Put a failed item back into the queue."""
        self.tries[number] += 1
        if self.tries[number] > RETRIES:
            raise RuntimeError(f"item {number} failed too often")
        self.outcome.retries += 1
        self.queue.append(number)

    def waste(self, worker: int) -> None:
        """Count the bytes that a failed attempt has moved."""
        self.outcome.twice += self.sizes[int(self.item[worker])] - max(float(self.left[worker]), 0.0)

    def lose(self, node: int) -> None:
        """Lose a machine, unless it is the last one."""
        if not (self.alive & (self.node != node)).any():
            return
        self.outcome.lost += 1
        for worker in np.flatnonzero(self.node == node):
            self.alive[worker] = False
            if self.item[worker] >= 0:
                self.waste(int(worker))
                self.retry(int(self.item[worker]))
                self.item[worker] = -1


def average(items: Sequence[WorkItem], workers: int, a_node: int, seeds: Iterable[int], threads: int) -> Outcome:
    """Return the mean result of several simulations."""
    outcomes = [Simulation(items, workers, a_node, seed, threads).run() for seed in seeds]
    names = [field.name for field in fields(Outcome)]
    return Outcome(**{name: sum(getattr(each, name) for each in outcomes) / len(outcomes) for name in names})


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.engine import synthetic

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16, help="machines of the last row, filled with workers")
    parser.add_argument("--items", type=int, default=MANY, help="how many items there are the second time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="conversions of which the mean is printed")
    options = parser.parse_args()
    source = synthetic.model(61, 384)
    all_kept = True
    for case in CASES:
        begin = time.process_time()
        how: dict[str, Any] = {} if case.shard_size is None else {"shard_size": case.shard_size}
        prepared = make_plan(source, case.to, **how)
        count = options.items if case.many_items else None
        items = divide(prepared.plan, count, whole_files=case.service)
        items = with_parts(prepared.plan, items, prepared.checkpoint.container.storage)
        planning = time.process_time() - begin
        total, largest = sum(item.nbytes for item in items), max(item.nbytes for item in items)
        print(
            f"hf -> {case.to} {'on a service' if case.service else 'in a folder'}: {total / 1e12:.2f} TB, "
            f"{len(prepared.plan.tensors):,} tensors, {sum(not item.is_empty for item in items):,} items of at most "
            f"{largest / 1e9:.2f} GB; planned and divided in {planning:.1f} s; {case.threads} threads a worker, "
            f"each of which alone moves {alone() / 1e6:.0f} MB/s"
        )
        print("threads machines  copying  of linear     all  moved twice  tried again  lost  requests   USD")
        filled = options.nodes * -(-NIC // alone() // case.threads) * case.threads
        for threads in (*THREADS, int(filled)):
            if threads < case.threads:
                continue
            a_node = A_NODE if threads in THREADS else threads // options.nodes
            seeds = range(options.seed, options.seed + options.rounds)
            outcome = average(items, threads // case.threads, a_node // case.threads, seeds, case.threads)
            nodes = -(-threads // a_node)
            linear = total / min(threads * alone(), nodes * NIC, STORE)
            whole = planning + START + outcome.seconds
            moved = total + outcome.twice
            gets, puts = moved / READ, moved / WRITE
            dollars = gets * GET_PRICE + puts * PUT_PRICE + nodes * whole / 3600 * NODE_PRICE
            print(
                f"{threads:7,} {nodes:8,} {outcome.seconds:6,.0f} s {linear / outcome.seconds:10.2f} {whole:6,.0f} s "
                f"{outcome.twice / 1e9:9,.1f} GB {outcome.retries:12.1f} {outcome.lost:5.1f} "
                f"{gets + puts:9,.0f} {dollars:5.2f}"
            )
            if case == Case("hf") and threads <= UP_TO:
                all_kept = all_kept and linear / outcome.seconds >= PROMISE
    verdict = "kept" if all_kept else "NOT KEPT"
    print(f"promise ({PROMISE:g} of linear up to {UP_TO} workers, hf -> hf in many items of a folder): {verdict}")
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
