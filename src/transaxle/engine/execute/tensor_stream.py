"""Planned tensors as items to be moved: copies, or whatever else is done to their values on the way.

What one worker does from beginning to end before it takes something else is a queue. Where a target takes bytes at any
offset, each tensor has its own, and workers share even a single file. A service takes the bytes of a file in order
only: there all tensors of a file are in one queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from transaxle.encodings.error import Error
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.engine.views.encode import Step, buffer_blocks, largest
from transaxle.errors import Refused, refuse
from transaxle.move.runs import Item
from transaxle.move.transport import Alone
from transaxle.move.workers import Limits, Worker, share

Sizes = Mapping[str, tuple[float, ...]]
"""Table name -> amax of each matrix, of tensors that are encoded with a scale for the whole of it."""


def items_of(
    tensors: Sequence[PlannedTensor], sizes: Sizes, errors: dict[str, Error], *, ordered: bool = False
) -> list[Item]:
    """Return planned tensors as items, which have their places in the sequence as keys.

    Args:
        tensors: what is planned, in the order in which they lie in their files.
        sizes: from `measured_sizes`.
        errors: gets how far the values are of each tensor that is encoded, by its name.
        ordered: the bytes of a file must be written in order.
    """
    queues = file_queues(tensors) if ordered else [None] * len(tensors)
    return [
        Item(
            key,
            tensor.nbytes,
            tensor.transfers,
            Alone.ranks,
            Alone.ranks,
            queue,
            None if tensor.step is None and tensor.arithmetic is None else partial(_blocks, tensor, sizes, errors),
        )
        for key, (tensor, queue) in enumerate(zip(tensors, queues, strict=True))
    ]


def file_queues(tensors: Sequence[PlannedTensor]) -> list[int]:
    """Number the queue of each tensor: one for a file, and for all files that a tensor lies in."""
    queues = list(range(len(tensors)))
    owners: dict[str, int] = {}

    def first(queue: int) -> int:
        while queues[queue] != queue:
            queue = queues[queue]
        return queue

    for number, tensor in enumerate(tensors):
        for place in tensor.everywhere:
            joined = sorted({first(number), first(owners.setdefault(place.file, number))})
            queues[joined[-1]] = joined[0]
    return [first(number) for number in range(len(tensors))]


def _blocks(tensor: PlannedTensor, sizes: Sizes, errors: dict[str, Error], worker: Worker) -> Iterator[memoryview]:
    """Make a planned tensor in order; each block is valid until the next one is asked for."""
    step = tensor.step
    if step is None:
        try:
            yield from worker.blocks(tensor.transfers, tensor.nbytes, dtype=tensor.dtype, arithmetic=tensor.arithmetic)
        except Refused as error:
            if error.code != "LOSSY":
                raise
            raise refuse("LOSSY", f"{tensor.rule}\n{error.refusals[0].message}", tensor=tensor.name) from None
        return
    errors[tensor.name] = Error()

    def add(error: Error) -> None:
        errors[tensor.name] += error

    yield from buffer_blocks(
        step, _values(tensor, step, worker), sizes.get(step.tensor, ()), room=worker.room, measured=add
    )


def _values(tensor: PlannedTensor, step: Step, worker: Worker) -> Callable[[Sequence[int]], Iterator[memoryview]]:
    return partial(worker.cut, tensor.transfers, dtype=step.dtype, arithmetic=tensor.arithmetic)


def measured_sizes(
    tensors: Iterable[PlannedTensor], limit: Limits, workers: Callable[..., Worker]
) -> dict[str, tuple[float, ...]]:
    """Read the tensors that need it once, and return the amax of each of their matrices."""
    wanted = {t.step.tensor: (t, t.step) for t in tensors if t.step is not None and t.step.spec.has_global}
    found: dict[str, tuple[float, ...]] = {}

    def measure(worker: Worker, item: tuple[PlannedTensor, Step]) -> None:
        tensor, step = item
        found[step.tensor] = largest(step, _values(tensor, step, worker), room=worker.room)

    if wanted:
        share(wanted.values(), limit.jobs, workers, measure)
    return found
