"""Saving in the background: `async_save` takes a snapshot of the model, and a separate process writes it while training
continues.

The snapshot is a copy in shared CPU memory; the next snapshot uses the same memory. Changes to the model after
`async_save` has returned are not written to the files. Each rank has one background process.

A program waits for its save before it ends, so every snapshot is written unless the program is killed. `atexit` cannot
be used for this, because its functions do not run in processes that multiprocessing has forked, such as the ranks of
some launchers. So the wait is registered as a finalizer of multiprocessing, which runs in all processes. A function
that Python calls at exit cannot change the exit code, but Python exits with code 120 if it cannot flush a standard
stream. So after a failed save, a standard stream is replaced by an object that cannot be flushed.
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
from transaxle.live.transport.shared_memory import Region, align
from transaxle.live.transport.world import World, is_loss
from transaxle.options import SHARD_SIZE
from transaxle.quant.masters import MasterWeights
from transaxle.torch_tensors import Bytes, Ranks, copy_into, local_of, local_parts

_TIMEOUT = timedelta(minutes=30)
_JOIN = 10.0
"""Seconds to wait until a background process ends by itself, before it is killed."""
_LOOK = 0.5
"""Seconds between two checks for lost background processes, during the wait for an answer."""
_PREFIX = "transaxle: "


class Saver:
    """The background process of this rank, and the shared memory from which this process reads snapshots.

    Args:
        world: the ranks that save together.
    """

    def __init__(self, world: World, timeout: timedelta = _TIMEOUT) -> None:
        context = mp.get_context("spawn")
        own_end, child_end = context.Pipe()
        self._rank = world.rank
        self._rendezvous = Rendezvous(world, timeout) if world.size > 1 else None
        address = None if self._rendezvous is None else self._rendezvous.address
        self._pipe = own_end
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
            args=(Parent(), world.rank, world.ranks, address, child_end, timeout),
            daemon=True,
            name="transaxle-save",
        )
        self._child_end = child_end

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's tensors into shared memory; if they have the same dtypes and shapes as before, the layout
        stays the same.
        """
        locals_ = {name: local_of(tensor) for name, tensor in tensors.items()}
        on_gpu = any(local.is_cuda for local in locals_.values())
        layout: dict[str, TensorSlot] = {}
        end = 0
        for name, local in locals_.items():
            layout[name] = TensorSlot(end, tuple(local.shape), local.dtype)
            end += align(layout[name].size)
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
        """Return shared memory of at least `size` bytes; if `on_gpu`, it is page-locked, so that copies from a GPU are
        fast.
        """
        if self._region is None or size > self._region.size:
            self._unlock()
            if self._sender is not None:
                self._sender.join()  # no save is running, so the process has received every order for the old memory
            self._forget_region()
            self._buffers, self._region = {}, None  # release the old memory before allocating new memory
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
        """Close shared memory that was never sent to the background process; memory that was sent stays mapped in that
        process.
        """
        if self._region is not None and (self._sender is None or not self._sender.is_alive()):
            self._region.close()

    def _start(self) -> None:
        """Start the background process if it is not running yet."""
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
        self._child_end.close()

    def warm_up(self) -> None:
        """Start the background process, and wait until it can receive an order to save.

        Raises:
            TransaxleError: raised on all ranks, if the background process of any rank is lost.
        """
        with self.kill_on_error():
            self._start()
            with suppress(OSError):
                self._pipe.send(None)
            self.wait_for_answer(None)
            answer = self.receive_answer()
        if isinstance(answer, TransaxleError):
            raise answer

    def order(self, settings: SaveSettings, state: CollectedState) -> None:
        """Order the background process to save the snapshot, and return without waiting for the save; start the process
        if needed.
        """
        self._start()
        size = 0 if self._region is None else self._region.size
        form = SnapshotForm(state.global_tensors, self._layout, size)
        # If the memory is new, the process must map the tensors again, even if their layout is the same.
        changed = None if form == self._form and not self._new_region else form
        self._form = form
        small_state = replace(state, local_tensors={}, global_tensors={})
        order = Order(settings, small_state, changed, self._new_region, dict(os.environ))
        self._sender = threading.Thread(target=self._send, args=(order,), daemon=True)
        self._sender.start()  # sent in a thread, because a process that is still starting does not read from the pipe

    @contextmanager
    def kill_on_error(self) -> Iterator[None]:
        """End the background process if an error such as Ctrl-C leaves the block; otherwise its answer would be taken
        as the answer to a later order.
        """
        try:
            yield
        except BaseException as error:
            self._kill(f"what rank {self._rank} told its background process was interrupted: {error!r}")
            raise

    def _send(self, order: Order) -> None:
        """Send an order through the pipe; if the process cannot receive the order, `receive_answer` reports that the
        process is lost.
        """
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

    def wait_for_answer(self, timeout: float | None) -> bool:
        """Wait for an answer, or for the loss of a background process; return False if neither happens within `timeout`
        seconds.
        """
        end = time.monotonic() + (inf if timeout is None else timeout)
        while True:
            seconds_left = max(0.0, end - time.monotonic())
            if self._pipe.poll(min(seconds_left, _LOOK)) or self._loss is not None:
                return True
            if seconds_left <= _LOOK:
                return False

    def receive_answer(self) -> Answer:
        """Return the answer to the last order; if the background process of any rank is lost, all ranks return the same
        error.
        """
        if not self._pipe.poll() and (loss := self._loss) is not None:
            return self._kill(loss)  # this rank's process is lost, or waits for the lost process of another rank
        try:
            answer: Answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_JOIN)
            code = self._process.exitcode
            return self._kill(f"the background process of rank {self._rank} ended (exit code {code})")
        if isinstance(answer, TransaxleError) and is_loss(answer):
            return self._kill(answer.refusals[0].message)
        return answer

    def _kill(self, message: str) -> TransaxleError:
        """Kill this rank's background process. The process of some rank is lost, and without it no rank's process can
        save.
        """
        self._has_lost = True
        if self._process.pid is not None:
            self._process.kill()
            self._process.join(_JOIN)
        return refuse("IO", message if self._rendezvous is None else self._rendezvous.report_loss(message))

    @property
    def _loss(self) -> str | None:
        """Message that names the rank whose background process is lost; None if no process is lost."""
        return None if self._rendezvous is None else self._rendezvous.loss

    @property
    def alive(self) -> bool:
        """Whether the background processes of all ranks are still running."""
        return not self._has_lost and self._process.pid is not None and self._process.is_alive()

    def close(self, patience: float = _JOIN) -> None:
        """End the background process; a save that is not committed yet is discarded.

        Args:
            patience: seconds to wait until the process ends by itself; an idle process ends immediately.
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
        self._was_reported = False
        self.stall = stall
        """Seconds for which `async_save` interrupted training."""

    def done(self) -> bool:
        """Return, without waiting, whether the save has ended, successfully or not."""
        return self._wait(0.0)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the save, and return its report.

        Args:
            timeout: seconds to wait; None means no limit.

        Raises:
            TransaxleError: if the save has failed on any rank; the target is unchanged.
            TimeoutError: if the save has not ended within `timeout` seconds.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"not saved after {timeout} s")
        if not isinstance(self._answer, SaveReport):
            self._was_reported = True
            raise self._answer if self._answer is not None else TimeoutError
        return self._answer

    def wait(self) -> None:
        """Wait until the save has ended, successfully or not."""
        self._wait(None)

    def over(self) -> None:
        """Wait for the save, and raise its error unless `result` has already raised it."""
        wait_for(self._dst)
        if not self._was_reported:
            self.result()

    def end(self) -> None:
        """Wait for the save at the end of the program. If the save failed and `result` was not called, print the error
        and make the program exit with an error code.
        """
        try:
            if not self.done() and self._first:
                say(f"the save of {self._dst} goes on; waiting for it (Ctrl-C gives it up)")
            self._wait(None)
        except KeyboardInterrupt:
            self._answer = refuse("IO", "the save was abandoned", hint="The target is unchanged.")
            self._saver.close(0.0)
        if not isinstance(self._answer, SaveReport) and not self._was_reported:
            say(f"the save of {self._dst} has failed, and nobody has asked for its result:\n{self._answer}")
            fail()

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._answer is None and self._saver.wait_for_answer(timeout):
                with self._saver.kill_on_error():
                    self._answer = self._saver.receive_answer()
            return self._answer is not None


_Key = tuple[int, tuple[int, ...]]
_SAVERS: dict[_Key, tuple[Saver, SaveJob | None]] = {}
"""(process id, set of ranks) -> background process of these ranks, and its last `SaveJob`."""


def _finish(key: _Key) -> None:
    """Wait for the last save of a background process, and end the process."""
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
    tp: int | None = None,
    ep: int | None = None,
) -> SaveJob:
    """Take a snapshot of the model and save it in the background; all ranks of the group must call this function. The
    arguments are those of `save`.

    At most one save runs at a time. The next call waits for the previous save, and raises its error if `result` was not
    called. If the program ends while a save is running, it waits for the save, with a message on stderr. If that save
    fails and `result` was not called, the error is printed on stderr, and the program exits with code 120.

    Returns:
        The running save, with the methods `done` and `result`. If `result` is not called, the next save raises this
        save's error.

    Raises:
        TransaxleError: raised on every rank, if the state cannot be saved (no snapshot is taken), or the previous save
            has failed.
    """
    world = World(group)
    begin = time.monotonic()
    settings_of = partial(
        read_settings, dst, to, optimizer=optimizer is not None, family=family, dialect=dialect, config=config,
        axes=axes, rules=rules, shard_size=shard_size, overwrite=overwrite, sync=sync, check_copies=check_copies,
        verify=verify, tp=tp, ep=ep,
    )  # fmt: skip
    alive = _alive(world)
    settings, collected = collect(settings_of, state, optimizer, extra, world)
    saver = alive or Saver(world)
    with world.together():
        saver.snapshot(collected.local_tensors)
    with saver.kill_on_error():
        # A process that begins to write competes for the CPU, so no process begins before all ranks have taken their
        # snapshots.
        saver.order(settings, collected)
        job = SaveJob(saver, settings.dst, time.monotonic() - begin, first=world.rank == world.ranks[0])
        _keep(world, saver, job)
        add_unfinished(settings.dst, job.wait)
    return job


@suggests
def prepare_async(state: State, *, optimizer: AnyOptimizer | None = None, group: Ranks | None = None) -> None:
    """Prepare `async_save`, so that its first call interrupts training no longer than later calls; all ranks of the
    group must call this function.

    The function starts the background process and allocates memory for the snapshot. The memory has the size of this
    rank's shards of the model and of the optimizer's state, including state that the optimizer will create in its first
    step. Without this call, the first `async_save` starts the process and allocates the memory. The best time to call
    this function is before training begins.

    Args:
        state: the model or state dict that will be saved.
        optimizer: the optimizer whose state will be saved.
        group: the ranks that will save together; None means all ranks.

    Raises:
        TransaxleError: raised on every rank, if the state cannot be saved, a background process is lost, or the
            previous save has failed and its `result` was not called.
    """
    world = World(group)
    alive = _alive(world)
    with world.together():
        foreseen = estimate_snapshot(state, optimizer)
    saver = alive or Saver(world)
    with world.together():
        saver.reserve(foreseen.size, on_gpu=foreseen.on_gpu)
    _keep(world, saver, None)
    with world.together():
        saver.warm_up()


def _alive(world: World) -> Saver | None:
    """Wait for the last save of these ranks' background process, and return the process; None if any rank has no
    process.
    """
    key = os.getpid(), world.ranks
    saver, last = _SAVERS.get(key, (None, None))

    def is_ready() -> bool:
        if last is not None and saver is not None:
            last.over()
            # the process is removed only after the wait: if Ctrl-C interrupts the wait, the save still reads the memory
            _SAVERS[key] = saver, None
        return saver is not None and saver.alive

    if all(world.pool(is_ready)):
        return saver
    if saver is not None:
        saver.close()  # once the background process of one rank is lost, no rank's process can save
    return None


def _keep(world: World, saver: Saver, job: SaveJob | None) -> None:
    """Store a background process for the next save, and make the program wait for the process's save before it ends."""
    key = os.getpid(), world.ranks
    if key not in _SAVERS:
        at_end(partial(_finish, key))
    _SAVERS[key] = saver, job


def at_end(work: Callable[[], None]) -> None:
    """Register a function that is called when this process ends; processes forked from this process do not inherit
    it.
    """
    util.Finalize(None, work, exitpriority=0)


def say(message: str) -> None:
    """Print a message on stderr."""
    if sys.stderr is not None:
        sys.stderr.write(f"{_PREFIX}{message}\n")
        sys.stderr.flush()


def fail() -> None:
    """Make this process, which is ending, exit with a nonzero code: 120, or 1 in a process that multiprocessing has
    forked.
    """
    if sys.stderr is not None and not isinstance(sys.stderr, _Unflushable):
        sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """A stream whose `flush` fails if the interpreter calls it during shutdown."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        """Flush the stream; if the interpreter calls this at shutdown, raise an error, so that Python exits with a
        nonzero code.
        """
        self._stream.flush()
        caller = sys._getframe().f_back
        if caller is None or caller.f_code is getattr(util._flush_std_streams, "__code__", None):  # type: ignore[attr-defined]
            raise RuntimeError("a save in the background failed; its error is shown above")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PageLock:
    """Page-locks memory for CUDA until `release` is called. If CUDA cannot lock it, no error is raised, but copies are
    slower.

    Args:
        memory: memory that remains mapped until `release` is called.
    """

    def __init__(self, memory: Bytes) -> None:
        self._address = memory.ctypes.data if self._register(memory) else None

    @staticmethod
    def _register(memory: Bytes) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
            return True
        # clear the CUDA error, which torch would otherwise report at the next kernel launch
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        return False

    def release(self) -> None:
        """Unlock the memory, which may then be unmapped."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None


@dataclass(frozen=True, slots=True)
class SnapshotEstimate:
    """Estimate of the shared memory that the snapshot of a rank needs."""

    size: int
    """Estimated bytes of shared memory."""
    on_gpu: bool
    """Whether any tensor of the snapshot is copied from a GPU."""


def estimate_snapshot(state: State, optimizer: AnyOptimizer | None) -> SnapshotEstimate:
    """Estimate the memory of a snapshot, including optimizer state that the first step will create.

    Raises:
        TransaxleError: if the state cannot be saved; raised by `leaves`, `by_name` or `states_of`.
    """
    state_leaves = leaves(state, sharded=True)
    tensors = dict(state_leaves.tensors)
    future_sizes = list[int]()
    if optimizer is not None:
        optimizers, parameters = by_name(optimizer, state_leaves)
        tensors |= states_of(optimizers, parameters)
        future_sizes = list(_future_sizes(optimizers, list(parameters.values())))
    locals_ = [local_of(tensor) for _, _, tensor in local_parts(tensors)]
    sizes = [*future_sizes, *(local.numel() * local.element_size() for local in locals_)]
    return SnapshotEstimate(sum(map(align, sizes)), any(local.is_cuda for local in locals_))


def _future_sizes(optimizers: Optimizers, parameters: list[torch.Tensor]) -> Iterator[int]:
    """Yield the size in bytes of each state tensor that the optimizers will create in their first step."""
    owners, twins = optimizers.owners(), Twins()
    for parameter in parameters:
        owner = owners.get(id(parameter))
        if owner is None or (owner.states if isinstance(owner, MasterWeights) else owner.state).get(parameter):
            continue
        elements = local_of(parameter).numel()
        for value in twins.state(owner, parameter).values():
            if isinstance(value, torch.Tensor):
                yield (elements if value.dim() else 1) * value.element_size()
