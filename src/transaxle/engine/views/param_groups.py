"""Parameter groups in another dialect: the settings follow the parameters, under the names that these get.

A tensor that several parameters become (a stack, a fused projection) is one parameter of the target, so all of them
must be of one group: an optimizer has no way to train parts of a parameter with different settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target
from transaxle.errors import Refusal, Where
from transaxle.formats.training_state.state_groups import PARAMS, Group, renamed

_HINT = "--no-optimizer leaves the optimizer's state and settings behind."


def regrouped(groups: Iterable[Group], targets: Mapping[str, Target], problems: list[Refusal]) -> list[Group]:
    """Return parameter groups by the target's names.

    Args:
        groups: by the source's names.
        targets: the tensors of the target.
        problems: receives UNSUPPORTED for every target tensor whose parameters are of different groups.

    A parameter that has a state and is in no group is as those that it becomes one tensor with: where ranks share out
    experts, torch's own checkpoints keep the groups of one rank only.
    """
    groups = list(groups)
    group_of = {name: number for number, group in enumerate(groups) for name in group[PARAMS]}
    names: dict[str, list[str]] = {}
    origins = (origin.name for target in targets.values() for part in target.parts for origin in part.origins)
    trained = {parameter for parameter, slot in map(split_slot, origins) if slot != WEIGHT} if groups else set()
    for target in targets.values() if groups else ():
        if split_slot(target.name)[1] != WEIGHT:
            continue
        sources = dict.fromkeys(origin.name for part in target.parts for origin in part.origins)
        found = {group_of.get(source) for source in sources if source in group_of or source not in trained}
        if len(found) > 1:
            problems.append(Refusal("UNSUPPORTED", _unlike(target, sources, group_of), Where(None, target.name), _HINT))
            continue
        for source in sources:
            names.setdefault(source, []).append(target.name)
    return renamed(groups, names)


def _unlike(target: Target, sources: Iterable[str], group_of: Mapping[str, int]) -> str:
    """Say which parameters of a target tensor are trained with other settings than the first."""
    first, *others = sources
    other = next(name for name in others if group_of.get(name) != group_of.get(first))
    said: Sequence[str] = [
        f"{name} is in {'no group' if name not in group_of else f'group {group_of[name]}'}" for name in (first, other)
    ]
    return f"{target.rule}\nits parts are trained with different settings: {', '.join(said)}"
