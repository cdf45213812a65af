"""Settling: values that came into derived entries are put into place by the module's own `load_state_dict`.

Beforehand a trial shows that it can: other values are put into the module, shown, replaced by others still, and loaded.
What then is not as it was shown would have been lost. The module's own values are put back in the end. After a load the
state dict is asked once more, and has to say what was loaded.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, Where, gathered
from transaxle.live.derived.derived import Island, persistent, pieces
from transaxle.torch_tensors.local_tensor import byte_view, same_bytes

_NO_STATE = "its optimizer state has no name that another layout could use"
_OTHER_FORM = 'Leave optimizer= out, and keep the optimizer\'s state with extra={"optimizer": optimizer}.'
_FLAT = "Shard the model with fully_shard (FSDP2), or omit optimizer= and use FSDP.optim_state_dict."
_SEED = 20_260
_LOWEST, _COUNT = 1, 62
"""Numbers that any type of integers holds, and of which eight bits are no NaN in any."""
_HINT = "Load into the module before it is wrapped or fused, or report this to the author of its state_dict."


def untaken(islands: Iterable[Island]) -> tuple[list[Refusal], tuple[str, ...]]:
    """Find out what the modules' own `load_state_dict` cannot load; modules on meta are tried when they have memory.

    Args:
        islands: of a model, see `Leaves`.

    Returns:
        why some cannot; and the names of parameters and buffers that neither state dicts show nor loads fill.
    """
    problems, omitted = [], list[str]()
    for island in islands:
        if island.is_flat or (island.derived and island.is_meta):
            continue
        refusals, names = tried(island) if island.derived else ([], tuple(island.apart))
        problems += refusals
        omitted += (own_name(island.full(name)) for name in names)
    return problems, tuple(dict.fromkeys(omitted))


def reached(islands: Iterable[Island], loaded: Container[str]) -> set[str]:
    """Return the names of parameters and buffers that are no entries, and get values all the same.

    Args:
        islands: of a model.
        loaded: names of the entries that get values.
    """
    return {
        own_name(island.full(name))
        for island in islands
        if island.derived and all(own_name(island.full(key)) in loaded for key in island.derived)
        for name in island.apart
    }


def settle(islands: Iterable[Island], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put values of derived entries into place; all ranks that share a module do it together.

    Args:
        islands: of a model.
        tensors: its tensors by name, see `Leaves`: those that are copies hold what is to be loaded.

    Raises:
        Refused: UNSUPPORTED where a state dict says other values afterwards.
    """
    problems = []
    for island in islands:
        if not island.derived:
            continue
        loaded = {key: tensors[own_name(island.full(key))] for key in island.derived}
        with torch.no_grad():
            island.load({**island.state(), **loaded})
            shown = island.state()
        for key, values in loaded.items():
            if key not in shown or not same(shown[key].detach(), values):
                message = f"{type(island.module).__name__}.load_state_dict stored other values than it was given"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(island.full(key)))))
    if problems:
        raise gathered(problems)


def unnamed(parameters: Iterable[torch.Tensor], islands: Sequence[Island], entries: Container[str]) -> list[Refusal]:
    """Return a refusal for each parameter of an optimizer that has no name of its own: one that FSDP1 has in a flat
    parameter, or whose name the state dict has for another form of it.

    Args:
        parameters: the optimizer's.
        islands: of the model.
        entries: names of its state dict.
    """
    places = {id(tensor): (island, name) for island in islands for name, tensor in island.apart.items()}
    problems = []
    for parameter in parameters:
        island, name = places.get(id(parameter), (None, ""))
        if island is not None and (island.is_flat or own_name(island.full(name)) in entries):
            shown = ", ".join(island.derived[:3])
            message = (
                f"the state dict of {type(island.module).__name__} shows others in its place ({shown}): {_NO_STATE}"
            )
            hint = _FLAT if island.is_flat else _OTHER_FORM
            problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(island.full(name))), hint))
    return problems


def tried(island: Island) -> tuple[list[Refusal], tuple[str, ...]]:
    """Try a module, and leave it as it was; all ranks that share it try it together.

    Args:
        island: the module; none of its tensors is on the meta device.

    Returns:
        why it cannot be loaded; and the names, in the module, of the tensors that its `load_state_dict` leaves alone.
    """
    own = {id(tensor): (name, tensor) for name, tensor in persistent(island.module)}
    memory = [piece for _, tensor in own.values() for piece in pieces(tensor)]
    before = entries_of(island)
    with torch.no_grad(), _restored(island, memory):
        try:
            return _outcome(island, own.values(), memory, before)
        except Exception as error:  # noqa: BLE001 - whatever hooks of others raise: it cannot be loaded
            message = f"{type(island.module).__name__} cannot load its own state_dict: {error!r}"
            return [Refusal("UNSUPPORTED", message, Where(None, island.path or None), _HINT)], ()


def _outcome(
    island: Island,
    own: Iterable[tuple[str, torch.Tensor]],
    memory: list[torch.Tensor],
    before: Mapping[str, torch.Tensor],
) -> tuple[list[Refusal], tuple[str, ...]]:
    """Put values in, show, put others in, load; then compare tensors and entries with what was shown.

    Args:
        island: the module.
        own: its tensors by name.
        memory: the plain tensors that these are made of, in the same order.
        before: copies of its entries as they were.
    """
    for number, piece in enumerate(memory):
        piece.copy_(_values(piece, number))
    shown = _copied(island.state())
    for number, piece in enumerate(memory):
        piece.copy_(_others(_values(piece, number)))
    island.load(shown)
    numbers = iter(range(len(memory)))  # they run on from tensor to tensor
    untouched, lost = list[str](), list[str]()
    for name, tensor in own:
        pairs = [(piece, _values(piece, number)) for piece, number in zip(pieces(tensor), numbers, strict=False)]
        if all(same(piece, values) for piece, values in pairs):
            continue
        is_untouched = all(same(piece, _others(values)) for piece, values in pairs)
        (untouched if is_untouched and name in island.apart else lost).append(name)
    after = entries_of(island)
    unlike = [name for name, entry in after.items() if name not in shown or not same(entry, shown[name])]
    unlike += [name for name in before if name not in after]
    if not unlike and not lost:
        # An entry that no value in the parameters has changed may be kept somewhere else.
        fixed = [name for name in after if name in before and same(after[name], before[name]) and after[name].numel()]
        unlike = _not_taken(island, fixed, shown)
    if unlike:
        lost, untouched = [*lost, *untouched], []
    what = type(island.module).__name__
    message = f"{what} shows it differently in its state_dict, and its load_state_dict does not restore the values"
    names = [*lost, *(name for name in unlike if name not in lost)]
    return [Refusal("UNSUPPORTED", message, Where(None, island.full(name)), _HINT) for name in names], tuple(untouched)


def _not_taken(island: Island, names: list[str], shown: dict[str, Any]) -> list[str]:
    """Return those of some entries, which belong to no parameter or buffer, that do not take what is loaded."""
    if not names:
        return []
    original = {name: shown[name].clone() for name in names}
    for name in names:
        for piece in pieces(shown[name]):
            piece.copy_(_others(piece))
    loaded = {name: shown[name].clone() for name in names}
    island.load(shown)
    after = entries_of(island)
    unlike = [name for name in names if not same(after[name], loaded[name])]
    island.load({**shown, **original})
    return unlike


@contextmanager
def _restored(island: Island, memory: list[torch.Tensor]) -> Iterator[None]:
    """Put the values of a module back, and the tensors themselves where something replaced them."""
    owners = [(m, dict(m._parameters), dict(m._buffers)) for m in island.module.modules()]
    values = [piece.clone() for piece in memory]
    try:
        yield
    finally:
        for owner, parameters, buffers in owners:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)
        with torch.no_grad():
            for piece, value in zip(memory, values, strict=True):
                piece.copy_(value)


def entries_of(island: Island) -> dict[str, torch.Tensor]:
    """Return copies of the entries that a module makes."""
    state = island.state()
    return {name: state[name].detach().clone() for name in island.derived if name in state}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with copies of its tensors."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors of the same kind hold the same bits on this rank."""
    first_pieces, second_pieces = pieces(first), pieces(second)
    return len(first_pieces) == len(second_pieces) and all(map(same_bytes, first_pieces, second_pieces))


def _values(piece: torch.Tensor, number: int) -> torch.Tensor:
    """Return values for a tensor, the same on all ranks that hold it alike."""
    generator = torch.Generator().manual_seed(_SEED + number)
    if piece.dtype.itemsize > 1 and (piece.dtype.is_floating_point or piece.dtype.is_complex):
        exact = torch.rand(tuple(piece.shape), generator=generator, dtype=torch.float64) + _LOWEST
        return exact.to(piece.dtype).to(piece.device)  # every bit of a mantissa counts
    made = torch.randint(_LOWEST, _LOWEST + _COUNT, tuple(piece.shape), generator=generator, dtype=torch.int16)
    if piece.dtype == torch.bool:
        return (made % 2 == 0).to(piece.device)
    if piece.dtype.itemsize == 1:
        return made.to(torch.uint8).view(piece.dtype).to(piece.device)
    return made.to(piece.dtype).to(piece.device)


def _others(values: torch.Tensor) -> torch.Tensor:
    """Return values of which none is as it was."""
    if values.dtype == torch.bool:
        return ~values
    flipped = byte_view(values.detach().contiguous()) ^ 1
    return flipped.view(values.dtype).reshape(values.shape)
