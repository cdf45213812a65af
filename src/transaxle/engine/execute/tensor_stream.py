"""Making planned tensors: the blocks that a worker gives for one, whatever is done to its values on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from transaxle.encodings.arithmetic.codec import Error
from transaxle.engine.plan.conversion import PlannedTensor
from transaxle.engine.views.decoded import decoders_of
from transaxle.engine.views.encode import Measure, buffer_blocks, largest
from transaxle.formats.storage.storage import Storage
from transaxle.move.workers import Limits, Worker, share

Sizes = Mapping[str, tuple[float, ...]]
"""Table name -> amax of each matrix, of tensors that are encoded with a scale for the whole of it."""


class Summed:
    """The errors of a tensor's bands, summed up."""

    def __init__(self) -> None:
        self.error = Error()

    def __call__(self, error: Error) -> None:
        """Add the error of a band."""
        self.error += error


def made(worker: Worker, tensor: PlannedTensor, sizes: Sizes, measured: Measure) -> Iterator[memoryview]:
    """Produce a planned tensor in order; each block is valid until the next one is asked for.

    Args:
        worker: does it.
        tensor: what is planned.
        sizes: from `measured_sizes`.
        measured: told the error of each band of codes that are encoded.
    """
    step = tensor.step
    if step is None:
        return worker.blocks(tensor.transfers, tensor.nbytes, dtype=tensor.dtype, arithmetic=tensor.arithmetic)
    values = partial(worker.cut, tensor.transfers, dtype=step.dtype, arithmetic=tensor.arithmetic)
    return buffer_blocks(step, values, sizes.get(step.tensor, ()), room=worker.room, measured=measured)


def measured_sizes(
    tensors: Iterable[PlannedTensor], limit: Limits, workers: Callable[..., Worker]
) -> dict[str, tuple[float, ...]]:
    """Read the tensors that need it once, and return the amax of each of their matrices."""
    wanted = {t.step.tensor: t for t in tensors if t.step is not None and t.step.spec.has_global}
    found: dict[str, tuple[float, ...]] = {}

    def measure(worker: Worker, tensor: PlannedTensor) -> None:
        step = tensor.step
        assert step is not None
        values = partial(worker.cut, tensor.transfers, dtype=step.dtype, arithmetic=tensor.arithmetic)
        found[step.tensor] = largest(step, values, room=worker.room)

    share(wanted.values(), limit.jobs, workers, measure)
    return found


def decoding_errors(storage: Storage, names: Iterable[str], limit: Limits) -> dict[str, Error]:
    """Read the codes and scales of decoded tensors once, and return how far their values are from the products."""
    wanted = set(names)
    decoders = [each for each in decoders_of(storage).values() if each.tensor.name in wanted]
    found: dict[str, Error] = {}

    def measure(_: object, number: int) -> None:
        found[decoders[number].tensor.name] = decoders[number].error()

    share(range(len(decoders)), limit.jobs, lambda _: None, measure)
    return found
