"""What is copied between two live states, as all ranks have agreed: every problem of every rank is found before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.errors import Refusal, gathered, refuse
from transaxle.live.derived.settle import untaken
from transaxle.live.model.source_view import compared, left_out, unmatched
from transaxle.live.model.state_tensors import Leaves, unwritable
from transaxle.live.reexpress.ties import Sides, filled_by_ties, spare, torn

_CAST = "Resharding never changes dtypes. Give both sides the same, for example {name: tensor.to(torch.bfloat16)}."
_SHOWN = 3
"""Names of each side that an error shows."""


@dataclass(frozen=True)
class Match:
    """What all ranks have agreed to copy."""

    stored: Mapping[str, StoredTensor]
    """The source's tensors by the target's names."""
    missing: tuple[str, ...]
    """Names that only the target has."""
    unexpected: tuple[str, ...]
    """Names that only the source has."""


def matched(
    sides: Sides,
    own_target: Leaves,
    tensors: Callable[[], Mapping[str, StoredTensor]],
    *,
    strict: bool,
    others: Callable[[], list[Refusal]] = list,
    hint: str = _CAST,
    once: bool = True,
) -> Match:
    """Match both sides and gather every problem; collective.

    Args:
        sides: what is copied from and to.
        own_target: what this rank's target holds.
        tensors: returns the source's tensors by the target's names.
        strict: refuse names that only one side has.
        others: returns what else stands against it.
        hint: what to do about types that differ.
        once: the values of now are all that is copied: then tensors that are equal now count as one.

    Raises:
        TransaxleError: on every rank.
    """
    world = sides.world
    with world.together():
        stored = tensors()
        differences, missing, unexpected = compared(sides.target, stored, optimizer=True)
        problems = [replace(each, hint=hint) if each.code == "DTYPE_MISMATCH" else each for each in differences]
        unloadable_modules, omitted = untaken(() if own_target.kept else own_target.islands)
        problems += [*unwritable(sides.own_target), *own_target.kept, *unloadable_modules, *others()]
    ties = filled_by_ties(sides, stored) | spare(sides, stored, unexpected, once=once)
    problems += torn(sides, stored, once=once)
    missing, unexpected = (tuple(name for name in names if name not in ties) for names in (missing, unexpected))
    with world.together():
        if not any(name in stored for name in sides.target) and (sides.target or sides.source):
            shown = (", ".join([*names][:_SHOWN]) or "(none)" for names in (sides.target, stored))
            message = "target and source have no tensor name in common\ntarget: {}\nsource: {}".format(*shown)
            raise refuse(
                "UNKNOWN_FAMILY",
                message,
                hint="Check that both are the same model; if they are, give family= and dialect=.",
            )
        if strict:
            problems += [*unmatched(missing, unexpected), *left_out(omitted)]
        if problems:
            raise gathered(problems)
    return Match(stored, missing, unexpected)
