"""From flat buckets to the state of every parameter, or the reason why that is not possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from transaxle.errors import Refusal, Where
from transaxle.formats.catalog import BITS, Container, Entry, Twin, numpy_dtype
from transaxle.formats.megatron.flat_buckets.bucket_layout import FlatBuffer
from transaxle.formats.megatron.flat_buckets.optimizer_tensors import tensors_by_parameter
from transaxle.formats.megatron.flat_buckets.parameter_order import UnknownOrderError, orders
from transaxle.formats.megatron.flat_buckets.pipeline_stages import Groups, Held, NoFitError, shared_out
from transaxle.formats.megatron.flat_buckets.rank_parameters import Model, model_of
from transaxle.formats.megatron.flat_buckets.stored_buckets import GATHERED, Chain, Objects, chains, gathered, is_bucket
from transaxle.formats.storage.storage import Storage
from transaxle.formats.training_state.full_precision import MASTER
from transaxle.formats.training_state.state import OPTIMIZER

_SAMPLE = 64
"""Elements at the beginning of a tensor by which orders are tried."""
_STORED_MASTER = "param"
_WHY = "the flat buckets of its distributed optimizer cannot be read: {}"
LEAVE_OUT = "--no-optimizer leaves the optimizer's state out."
_HINT = (
    f"{LEAVE_OUT} Megatron itself writes it by parameter if it loads this "
    "checkpoint and saves it with --dist-ckpt-optim-fully-reshardable."
)


def with_state_of_parameters(
    container: Container, objects: Objects, files: Mapping[tuple[int, int, str], str], arguments: Mapping[str, Any]
) -> Container:
    """Return a container with the optimizer's state of every parameter in place of flat buckets.

    Where the order of the parameters in them is not known, the container says why, and has neither.

    Args:
        container: with buckets under their own names.
        objects: what the groups of ranks have besides, see `stored_buckets`.
        files: where each of these is.
        arguments: of the run.
    """
    buckets = {name: entry for name, entry in container.entries.items() if is_bucket(name)}
    in_objects = any(what == GATHERED for _, _, what in objects)
    if not buckets and not in_objects:
        return container
    others = {name: entry for name, entry in container.entries.items() if name not in buckets}
    weights = [entry for name, entry in others.items() if not name.startswith(OPTIMIZER)]
    try:
        optimizers = chains(buckets, objects) if buckets else gathered(objects, files, arguments)
        entries, twins = _by_parameter(container.storage, weights, optimizers, arguments)
    except (UnknownOrderError, NoFitError) as error:
        refusal = Refusal("UNSUPPORTED", _WHY.format(error), Where(container.path), _HINT)
        return replace(container, entries=others, unread=(*container.unread, refusal))
    return replace(container, entries={**others, **entries}, twins=(*container.twins, *twins))


def _by_parameter(
    storage: Storage, weights: Sequence[Entry], optimizers: Sequence[Chain], arguments: Mapping[str, Any]
) -> tuple[dict[str, Entry], list[Twin]]:
    """Return the state of every parameter, and what must be equal.

    Where several orders fit, samples of the weights choose. That they are all right is proved later, by `twins`.

    Raises:
        NoFitError: the buckets do not hold what the model's parameters make of them in any known order.
        UnknownOrderError: the order of the parameters is not known.
    """
    kept = {
        bucket.states[_STORED_MASTER].dtype if _STORED_MASTER in bucket.states else "missing"
        for chain in optimizers
        for buffers in chain.groups.values()
        for buffer in buffers
        for bucket in buffer.buckets
    }
    if kept != {"F32"}:
        raise UnknownOrderError(f"the full-precision copies of the weights are {', '.join(sorted(kept))}, not F32")
    model = model_of(weights)
    first: tuple[dict[str, Entry], list[Twin]] | None = None
    for held in _fits(model, optimizers, arguments):
        found = tensors_by_parameter(held, model.ranks, {_STORED_MASTER: MASTER}, MASTER)
        if all(_samples_agree(storage, twin) for twin in found[1] if twin.rounded):
            return found
        first = first or found
    assert first is not None
    return first


def _samples_agree(storage: Storage, twin: Twin) -> bool:
    """Tell whether the first elements of two tensors are equal, as far as they lie together in both."""
    one, other = twin.first.extents[0], twin.second.extents[0]
    count = min(one.shape[-1:], other.shape[-1:], (_SAMPLE,))[0] if one.shape else 1
    master, weight = (
        np.frombuffer(storage.read(extent.file, extent.offset, count * BITS[code] // 8), numpy_dtype(code))
        for extent, code in ((one, twin.first.dtype), (other, twin.second.dtype))
    )
    with np.errstate(all="ignore"):
        return master.astype(weight.dtype).tobytes() == weight.tobytes()


def _fits(model: Model, optimizers: Sequence[Chain], arguments: Mapping[str, Any]) -> Iterator[list[Held]]:
    """Yield what every buffer holds, for each order in which all fit.

    Raises:
        NoFitError: they fit in none; what is said is of the first.
    """
    problem: NoFitError | None = None
    fits = False
    for order in orders(arguments):
        for dense, experts in _splits(model, optimizers):
            try:
                held = shared_out(model, order, dense, experts)
            except NoFitError as error:
                problem = problem or error
                continue
            fits = True
            yield held
    if not fits and problem is not None:
        raise problem


def _splits(model: Model, optimizers: Sequence[Chain]) -> Iterator[tuple[Groups, Groups]]:
    """Yield which groups may be of all ranks, and which of expert-parallel ranks; the likely case comes first."""
    if model.experts and len(optimizers) > 1:
        yield _merged(optimizers[:-1]), optimizers[-1].groups
    yield _merged(optimizers), {}


def _merged(optimizers: Sequence[Chain]) -> Groups:
    """Return the groups of several optimizers: one for each model chunk."""
    merged: dict[int, list[FlatBuffer]] = {}
    for chain in optimizers:
        for group, buffers in chain.groups.items():
            merged.setdefault(group, []).extend(buffers)
    return merged
