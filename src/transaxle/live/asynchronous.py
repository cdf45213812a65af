"""Saving in the background: a snapshot first, then a process of its own writes it while training goes on.

The snapshot is a copy in shared CPU memory, whose buffers are used again by the next one; what happens to the model
after `async_save` has returned never reaches the files. Each rank has one background process.

A program that ends waits for its save: what `async_save` has taken is written, unless the program is killed. Python's
own ways fall short of that. `atexit` is not for processes that multiprocessing has forked, such as the ranks of some
launchers; multiprocessing's finalizers run in these and in all others. And no function that is called at exit can
change the exit code, but a standard stream that cannot be flushed then does: Python exits with 120.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import inf
from multiprocessing import util
from multiprocessing.reduction import send_handle
from typing import Any

import torch
import torch.multiprocessing as mp

from transaxle.arguments import Axes, Config, Overwrite, PathLike, Size, suggests
from transaxle.errors import TransaxleError, refuse
from transaxle.live.model.destination import SaveReport
from transaxle.live.model.state_tensors import State, leaves
from transaxle.live.optimizer_state import Twins, by_name, states_of
from transaxle.live.optimizers import AnyOptimizer, Optimizers
from transaxle.live.save import CollectedState, SaveSettings, add_unfinished, collect, read_settings, wait_for
from transaxle.live.save_process import (
    Answer,
    Layout,
    Order,
    Parent,
    Rendezvous,
    SnapshotForm,
    TensorSlot,
    serve,
    without_main_script,
)
from transaxle.live.transport.shared_memory import Region, aligned
from transaxle.live.transport.world import World, is_loss
from transaxle.options import SHARD_SIZE
from transaxle.quant.masters import MasterWeights
from transaxle.torch_tensors import Bytes, Ranks, copy_into, local_of, local_parts

_TIMEOUT = timedelta(minutes=30)
_JOIN = 10.0
"""Seconds to wait for a process to end by itself."""
_LOOK = 0.5
"""Seconds after which one that waits looks for lost processes."""
_PREFIX = "transaxle: "


class Saver:
    """The background process of this rank, and the buffers it reads from.

    Args:
        world: the ranks that save together.
    """

    def __init__(self, world: World, timeout: timedelta = _TIMEOUT) -> None:
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        self._rank = world.rank
        self._rendezvous = Rendezvous(world, timeout) if world.size > 1 else None
        address = None if self._rendezvous is None else self._rendezvous.address
        self._pipe = here
        self._region: Region | None = None
        self._new_region = False
        self._sender: threading.Thread | None = None
        self._page_lock: PageLock | None = None
        self._layout: Layout = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._form: SnapshotForm | None = None
        self._has_lost = False
        self._process = context.Process(
            target=serve,
            args=(Parent(), world.rank, world.ranks, address, there, timeout),
            daemon=True,
            name="transaxle-save",
        )
        self._there = there

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what this rank holds into shared memory, where the last snapshot was if it has the same form."""
        locals_ = {name: local_of(tensor) for name, tensor in tensors.items()}
        on_gpu = any(local.is_cuda for local in locals_.values())
        layout: dict[str, TensorSlot] = {}
        end = 0
        for name, local in locals_.items():
            layout[name] = TensorSlot(end, tuple(local.shape), local.dtype)
            end += aligned(layout[name].size)
        region = self.reserve(end, on_gpu=on_gpu)
        if layout != self._layout or not self._buffers:
            self._buffers = {name: slot.tensor(region) for name, slot in layout.items()}
            self._layout = layout
        with torch.no_grad():
            for name, local in locals_.items():
                copy_into(local, self._buffers[name])
        if on_gpu:
            torch.cuda.synchronize()

    def reserve(self, size: int, *, on_gpu: bool) -> Region:
        """Return shared memory of so many bytes at least, which GPUs copy into by themselves where they are to."""
        if self._region is None or size > self._region.size:
            self._unlock()
            if self._sender is not None:
                self._sender.join()  # no job is under way: it has sent the old memory, or there was none
            self._forget_region()
            self._buffers, self._region = {}, None  # the old memory goes before the new one comes
            try:
                self._region, self._new_region = Region(size), True
            except OSError as error:
                message = f"there is no shared memory of {size:,} bytes for the snapshot: {error.strerror}"
                raise refuse("IO", message, hint="Free some memory, or save without a snapshot:  tx.save.") from error
        if on_gpu and self._page_lock is None:
            self._page_lock = PageLock(self._region.bytes)
        return self._region

    def _unlock(self) -> None:
        if self._page_lock is not None:
            self._page_lock.release()
            self._page_lock = None

    def _forget_region(self) -> None:
        """Close memory that was only reserved: an open one stays, whoever maps it or not."""
        if self._region is not None and (self._sender is None or not self._sender.is_alive()):
            self._region.close()

    def _start(self) -> None:
        """Start the process, if it is not there yet."""
        if self._process.pid is not None:
            return
        try:
            with without_main_script():
                self._process.start()
        except BaseException as error:
            if self._rendezvous is not None:
                message = f"the background process of rank {self._rank} did not start: {error!r}"
                self._rendezvous.report_loss(message)
            raise
        self._there.close()

    def warm_up(self) -> None:
        """Start the process, and wait until it could take an order.

        Raises:
            TransaxleError: on every rank, where a process is lost.
        """
        with self.unbroken():
            self._start()
            with suppress(OSError):
                self._pipe.send(None)
            self.answered(None)
            answer = self.answer()
        if isinstance(answer, TransaxleError):
            raise answer

    def order(self, settings: SaveSettings, state: CollectedState) -> None:
        """Begin to write the snapshot, in a process that is started here if it is the first; nothing is waited for."""
        self._start()
        size = 0 if self._region is None else self._region.size
        form = SnapshotForm(state.global_tensors, self._layout, size)
        # In new memory the tensors must be found anew, even if that has taken the place of as much.
        changed = None if form == self._form and not self._new_region else form
        self._form = form
        beside_tensors = replace(state, own={}, global_tensors={})
        order = Order(settings, beside_tensors, changed, self._new_region, dict(os.environ))
        self._sender = threading.Thread(target=self._send, args=(order,), daemon=True)
        self._sender.start()  # a process that starts does not read

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """End the process where an error leaves a block, as Ctrl-C: its answer would be taken for a later order's."""
        try:
            yield
        except BaseException as error:
            self._ended(f"what rank {self._rank} told its background process was interrupted: {error!r}")
            raise

    def _send(self, order: Order) -> None:
        """Hand an order over; where the process is gone, or gets no order, `answer` will tell."""
        try:
            with suppress(OSError):
                self._pipe.send(order)
                if order.new_region and self._region is not None and self._process.pid is not None:
                    send_handle(self._pipe, self._region.fd, self._process.pid)
                    self._region.close()
                    self._new_region = False
        except BaseException:
            self._process.kill()
            raise

    def answered(self, timeout: float | None) -> bool:
        """Wait for the answer, or the loss of a process; False if there is neither after `timeout` seconds."""
        end = time.monotonic() + (inf if timeout is None else timeout)
        while True:
            left = max(0.0, end - time.monotonic())
            if self._pipe.poll(min(left, _LOOK)) or self._lost is not None:
                return True
            if left <= _LOOK:
                return False

    def answer(self) -> Answer:
        """Return what came of it; where a process is lost, all ranks return the same."""
        if not self._pipe.poll() and (lost := self._lost) is not None:
            return self._ended(lost)  # this process waits for the lost one, or is it
        try:
            answer: Answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_JOIN)
            code = self._process.exitcode
            return self._ended(f"the background process of rank {self._rank} ended (exit code {code})")
        if isinstance(answer, TransaxleError) and is_loss(answer):
            return self._ended(answer.refusals[0].message)
        return answer

    def _ended(self, message: str) -> TransaxleError:
        """End this rank's process because one is lost: those that are left cannot write together any more."""
        self._has_lost = True
        if self._process.pid is not None:
            self._process.kill()
            self._process.join(_JOIN)
        return refuse("IO", message if self._rendezvous is None else self._rendezvous.report_loss(message))

    @property
    def _lost(self) -> str | None:
        """What another rank said of its process, if that is lost."""
        return None if self._rendezvous is None else self._rendezvous.lost

    @property
    def alive(self) -> bool:
        """Whether the process still runs, together with those of the other ranks."""
        return not self._has_lost and self._process.pid is not None and self._process.is_alive()

    def close(self, patience: float = _JOIN) -> None:
        """End the process; what it has not committed is not there.

        Args:
            patience: seconds to wait for it to end by itself, which it does at once unless it writes.
        """
        self._unlock()
        self._forget_region()
        self._pipe.close()
        if self._process.pid is None:
            return
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()


class SaveJob:
    """A save that runs in the background."""

    def __init__(self, saver: Saver, dst: str, stall: float, *, first: bool) -> None:
        self._saver = saver
        self._dst = dst
        self._first = first
        self._answer: Answer | None = None
        self._lock = threading.Lock()
        self._was_told = False
        self.stall = stall
        """Seconds for which training stood still."""

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not, without waiting."""
        return self._wait(0.0)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for it.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            TransaxleError: the error of any rank; the target is then unchanged.
            TimeoutError: the save has not ended yet.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"not saved after {timeout} s")
        if not isinstance(self._answer, SaveReport):
            self._was_told = True
            raise self._answer if self._answer is not None else TimeoutError
        return self._answer

    def wait(self) -> None:
        """Wait for it, whatever comes of it."""
        self._wait(None)

    def over(self) -> None:
        """Wait for it, and raise its error if nobody has been told."""
        wait_for(self._dst)
        if not self._was_told:
            self.result()

    def end(self) -> None:
        """Wait for it because the program ends; an error that nobody has been told is shown, and is the program's."""
        try:
            if not self.done() and self._first:
                say(f"the save of {self._dst} goes on; waiting for it (Ctrl-C gives it up)")
            self._wait(None)
        except KeyboardInterrupt:
            self._answer = refuse("IO", "the save was abandoned", hint="The target is unchanged.")
            self._saver.close(0.0)
        if not isinstance(self._answer, SaveReport) and not self._was_told:
            say(f"the save of {self._dst} has failed, and nobody has asked for its result:\n{self._answer}")
            fail()

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._answer is None and self._saver.answered(timeout):
                with self._saver.unbroken():
                    self._answer = self._saver.answer()
            return self._answer is not None


_Key = tuple[int, tuple[int, ...]]
_SAVERS: dict[_Key, tuple[Saver, SaveJob | None]] = {}
"""For each set of ranks, its background process and its last job; a forked process has none of these."""


def _finish(key: _Key) -> None:
    """Let the last job be done, and end its process."""
    saver, job = _SAVERS[key]
    try:
        if job is not None:
            job.end()
    finally:
        saver.close()


@suggests
def async_save(
    state: State,
    dst: PathLike,
    *,
    to: str = "hf",
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: Overwrite = False,
    group: Ranks | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    shard_size: Size = SHARD_SIZE,
    sync: bool = True,
    check_copies: bool = True,
    verify: bool = False,
) -> SaveJob:
    """Take a snapshot and save it in the background; collective over the group. The arguments are those of `save`.

    At most one save is in flight: the next one waits for it, and raises its error if nobody has asked for its result. A
    program that ends waits for its last save, with a message on stderr; if that save fails and nobody has asked for its
    result, the error is shown there, and the program exits with 120.

    Returns:
        The job, with `.done()` and `.result()`. If nobody asks for its result, the next save raises its error.

    Raises:
        TransaxleError: on every rank, before the snapshot; or the error of the previous save.
    """
    world = World(group)
    begin = time.monotonic()
    settings_of = partial(
        read_settings, dst, to, optimizer=optimizer is not None, family=family, dialect=dialect, config=config,
        axes=axes, rules=rules, shard_size=shard_size, overwrite=overwrite, sync=sync, check_copies=check_copies,
        verify=verify,
    )  # fmt: skip
    alive = _alive(world)
    settings, collected = collect(settings_of, state, optimizer, extra, world)
    saver = alive or Saver(world)
    with world.together():
        saver.snapshot(collected.own)
    with saver.unbroken():
        saver.order(settings, collected)  # nobody begins to write, and takes the processor, before all have snapshots
        job = SaveJob(saver, settings.dst, time.monotonic() - begin, first=world.rank == world.ranks[0])
        _keep(world, saver, job)
        add_unfinished(settings.dst, job.wait)
    return job


@suggests
def prepare_async(state: State, *, optimizer: AnyOptimizer | None = None, group: Ranks | None = None) -> None:
    """Get ready for `async_save`, so that the first one stands still no longer than those after it; collective.

    Starts the background process and takes the memory for the snapshot: as many bytes as this rank's part of the model
    and of the optimizer's state, also of state that the optimizer makes in its first step. Without it the first
    `async_save` does this. Best called before training begins.

    Args:
        state: what will be saved, as `async_save` takes it.
        optimizer: likewise.
        group: the ranks that will save together.

    Raises:
        TransaxleError: on every rank: the state cannot be saved so, or a process is lost; or the error of a save
            before this, if nobody has asked for its result.
    """
    world = World(group)
    alive = _alive(world)
    with world.together():
        foreseen = foresee(state, optimizer)
    saver = alive or Saver(world)
    with world.together():
        saver.reserve(foreseen.size, on_gpu=foreseen.on_gpu)
    _keep(world, saver, None)
    with world.together():
        saver.warm_up()


def _alive(world: World) -> Saver | None:
    """Return the background process of these ranks, when its last job is over; None if one of them is not there."""
    key = os.getpid(), world.ranks
    saver, last = _SAVERS.get(key, (None, None))

    def is_ready() -> bool:
        if last is not None and saver is not None:
            last.over()
            _SAVERS[key] = saver, None  # now: one that Ctrl-C leaves above still writes from the memory
        return saver is not None and saver.alive

    if all(world.pool(is_ready)):
        return saver
    if saver is not None:
        saver.close()  # where one is lost, the others can no longer write together
    return None


def _keep(world: World, saver: Saver, job: SaveJob | None) -> None:
    """Keep a background process for the next save; when the program ends, its job is waited for."""
    key = os.getpid(), world.ranks
    if key not in _SAVERS:
        at_end(partial(_finish, key))
    _SAVERS[key] = saver, job


def at_end(work: Callable[[], None]) -> None:
    """Call something when this process ends by itself; where it has forked, not in the new process."""
    util.Finalize(None, work, exitpriority=0)


def say(message: str) -> None:
    """Tell the user something on stderr."""
    if sys.stderr is not None:
        sys.stderr.write(f"{_PREFIX}{message}\n")
        sys.stderr.flush()


def fail() -> None:
    """Let this process, which is about to end, exit with a code other than 0: 120, and 1 where it was forked."""
    if sys.stderr is not None and not isinstance(sys.stderr, _Unflushable):
        sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """A stream that does everything but be flushed by the interpreter, when nothing else is left to run."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        """Flush the stream; fail if it is the interpreter that asks."""
        self._stream.flush()
        caller = sys._getframe().f_back
        if caller is None or caller.f_code is getattr(util._flush_std_streams, "__code__", None):  # type: ignore[attr-defined]
            raise RuntimeError("a save in the background failed; its error is shown above")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PageLock:
    """Locks memory for CUDA until it is released; where CUDA cannot, copies are slower, and nothing else differs.

    Args:
        memory: it must stay mapped until it is released.
    """

    def __init__(self, memory: Bytes) -> None:
        self._address = memory.ctypes.data if self._register(memory) else None

    @staticmethod
    def _register(memory: Bytes) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
            return True
        with suppress(RuntimeError):  # torch would hold the error against the next launch
            torch.zeros(1, device="cuda").add_(1)
        return False

    def release(self) -> None:
        """Let the memory go; it may be unmapped afterwards."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a rank's snapshot will take."""

    size: int
    """Bytes, about."""
    on_gpu: bool
    """Whether some of it comes from a GPU."""


def foresee(state: State, optimizer: AnyOptimizer | None) -> Foreseen:
    """Return what a snapshot will take; state that an optimizer has not made yet counts as what it will be.

    Raises:
        TransaxleError: as `leaves`, `by_name` and `states_of`.
    """
    held = leaves(state, sharded=True)
    tensors = dict(held.tensors)
    coming = list[int]()
    if optimizer is not None:
        optimizers, parameters = by_name(optimizer, held)
        tensors |= states_of(optimizers, parameters)
        coming = list(_coming(optimizers, list(parameters.values())))
    locals_ = [local_of(tensor) for _, _, tensor in local_parts(tensors)]
    sizes = [*coming, *(local.numel() * local.element_size() for local in locals_)]
    return Foreseen(sum(map(aligned, sizes)), any(local.is_cuda for local in locals_))


def _coming(optimizers: Optimizers, parameters: list[torch.Tensor]) -> Iterator[int]:
    """Yield the bytes of each piece of state that optimizers have not made yet."""
    owners, twins = optimizers.owners(), Twins()
    for parameter in parameters:
        owner = owners.get(id(parameter))
        if owner is None or (owner.states if isinstance(owner, MasterWeights) else owner.state).get(parameter):
            continue
        elements = local_of(parameter).numel()
        for value in twins.state(owner, parameter).values():
            if isinstance(value, torch.Tensor):
                yield (elements if value.dim() else 1) * value.element_size()
