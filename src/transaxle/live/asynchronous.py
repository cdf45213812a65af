"""Saving in the background: a snapshot first, then a process of its own writes it while training goes on.

The snapshot is a copy in shared CPU memory, whose buffers are used again by the next one; what happens to the model
after `async_save` has returned never reaches the files. Each rank has one background process; together these form a
world of their own, so no collective of the training is disturbed.
"""

from __future__ import annotations

import atexit
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.optim import Optimizer

from transaxle.engine.plan import SHARD_SIZE
from transaxle.errors import TransaxleError, refuse
from transaxle.live.clock import Clock
from transaxle.live.config import shared_config
from transaxle.live.landing import local_of
from transaxle.live.leaves import State
from transaxle.live.report import SaveReport
from transaxle.live.save import Holding, Wish, fulfil, held
from transaxle.live.world import World

_TIMEOUT = timedelta(minutes=30)
_JOIN = 10.0
Answer = SaveReport | TransaxleError


@dataclass(frozen=True)
class _Order:
    """What a background process is told to write."""

    wish: Wish
    tensors: Mapping[str, torch.Tensor]
    holding: Holding


def _serve(rank: int, ranks: tuple[int, ...], meeting: str, pipe: Connection, timeout: timedelta) -> None:
    """Write what comes through a pipe, until it closes."""
    torch.set_num_threads(1)
    world = _World(rank, ranks)
    if len(ranks) > 1:
        place = ranks.index(rank)
        dist.init_process_group("gloo", f"file://{meeting}", timeout=timeout, rank=place, world_size=len(ranks))
        world.live, world.size = True, len(ranks)
    while True:
        try:
            order: _Order = pipe.recv()
        except EOFError:
            break
        answer: Answer
        try:
            answer = fulfil(order.wish, order.tensors, order.holding, world, Clock())
        except TransaxleError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to the one who waits
            answer = refuse("IO", f"the background process of rank {rank} failed: {error!r}", file=order.wish.dst)
        del order
        pipe.send(answer)


class _World(World):
    """The background processes, by the ranks that they serve.

    Args:
        rank: the rank that this one serves.
        ranks: all of them.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.group = None
        self.live = False
        self.rank = rank
        self.ranks = ranks
        self.size = 1


class Saver:
    """The background process of this rank, and the buffers it reads from.

    Args:
        world: the ranks that save together.
    """

    def __init__(self, world: World, timeout: timedelta = _TIMEOUT) -> None:
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        folder = tempfile.mkdtemp(prefix="transaxle-") if world.rank == world.ranks[0] else None
        folder = world.gather(folder)[0]
        meeting = str(Path(str(folder), "meeting"))
        self._pipe = here
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._process = context.Process(
            target=_serve, args=(world.rank, world.ranks, meeting, there, timeout), daemon=True, name="transaxle-save"
        )
        self._process.start()
        there.close()
        atexit.register(self.close)

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy what this rank holds into shared memory, using again the buffers of the last snapshot."""
        kept: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        found = {}
        for name, tensor in tensors.items():
            local = local_of(tensor)
            key = name, tuple(local.shape), local.dtype
            buffer = self._buffers.get(key)
            if buffer is None:
                buffer = torch.empty(local.shape, dtype=local.dtype).share_memory_()
            with torch.no_grad():
                buffer.copy_(local, non_blocking=True)
            kept[key] = found[name] = buffer
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._buffers = kept
        return found

    def order(self, order: _Order) -> None:
        """Begin to write."""
        self._pipe.send(order)

    def answered(self, timeout: float | None) -> bool:
        """Wait for the answer, or its loss; False if there is none after `timeout` seconds."""
        return bool(self._pipe.poll(timeout))

    def answer(self) -> Answer:
        """Return what came of it."""
        try:
            found: Answer = self._pipe.recv()
        except (EOFError, OSError):
            found = refuse("IO", f"the background process of this rank ended (exit code {self._process.exitcode})")
        return found

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process; what it has not committed is not there."""
        self._pipe.close()
        self._process.join(_JOIN)
        if self._process.is_alive():
            self._process.kill()


class SaveJob:
    """A save that goes on in the background."""

    def __init__(self, saver: Saver, stall: float) -> None:
        self._saver = saver
        self._answer: Answer | None = None
        self._lock = threading.Lock()
        self.stall = stall
        """Seconds for which training stood still."""

    def done(self) -> bool:
        """Tell whether it is over, well or not, without waiting."""
        return self._wait(0.0)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for it.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            TransaxleError: what any rank met; the target is then as it was.
            TimeoutError: it is not over yet.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"not saved after {timeout} s")
        if not isinstance(self._answer, SaveReport):
            raise self._answer if self._answer is not None else TimeoutError
        return self._answer

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._answer is None and self._saver.answered(timeout):
                self._answer = self._saver.answer()
            return self._answer is not None


_SAVERS: dict[tuple[int, ...], tuple[Saver, SaveJob | None]] = {}
"""For each set of ranks, its background process and its last job."""


def async_save(
    state: State,
    dst: str | Path,
    *,
    to: str = "hf",
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Mapping[str, Any] | None = None,
    shard_size: int = SHARD_SIZE,
    overwrite: bool = False,
    sync: bool = True,
    group: dist.ProcessGroup | None = None,
) -> SaveJob:
    """Take a snapshot, and save it in the background; collective over the group. The arguments are those of `save`.

    One save is in flight at a time: another one waits for it, and raises what it failed with.

    Returns:
        The job: `.done()`, `.result()`. A job whose result nobody asks for has its error raised by the next save.

    Raises:
        TransaxleError: on every rank, before the snapshot; or what the save before this one failed with.
    """
    world = World(group)
    begin = time.monotonic()
    with world.together():
        saver, last = _SAVERS.get(world.ranks, (None, None))
        if last is not None and saver is not None:
            _SAVERS[world.ranks] = saver, None
            last.result()
    tensors, holding = held(state, optimizer, extra, world)
    told = shared_config(state, config, world)
    whole = all(world.gather(saver is not None and saver.alive))
    if saver is not None and not whole:
        saver.close()  # where one is lost, the others can no longer write together
    if saver is None or not whole:
        saver = Saver(world)
    wish = Wish(
        str(dst),
        to,
        family,
        dialect,
        told,
        optimizer is not None,
        shard_size=shard_size,
        overwrite=overwrite,
        sync=sync,
    )
    with world.together():
        saver.order(_Order(wish, saver.snapshot(tensors), holding))
    job = SaveJob(saver, time.monotonic() - begin)
    _SAVERS[world.ranks] = saver, job
    return job
