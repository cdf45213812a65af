"""Settling: values that came into derived entries are put into place by the module's own `load_state_dict`.

Beforehand a trial shows that it can; afterwards the state dict is asked once more, and has to say what was loaded.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, Where, gathered
from transaxle.live.derived.derived import Island
from transaxle.live.derived.trial import same, tried

_NO_STATE = "its optimizer state has no name that another layout could use"
_OTHER_FORM = 'Leave optimizer= out, and keep the optimizer\'s state with extra={"optimizer": optimizer}.'
_FLAT = "Shard the model with fully_shard (FSDP2), or omit optimizer= and use FSDP.optim_state_dict."


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
