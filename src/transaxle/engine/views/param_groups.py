"""Parameter groups in another dialect: each group's settings follow its parameters to their new names.

A tensor made of several parameters (a stack, a fused projection) is one parameter of the target, so all of them must be
in one group: an optimizer cannot train parts of a parameter with different settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target
from transaxle.errors import Refusal, Where
from transaxle.formats.training_state.state_groups import ParamGroup, group_numbers, renamed

_HINT = "--no-optimizer leaves the optimizer state and its settings out."


def regrouped(groups: Iterable[ParamGroup], targets: Mapping[str, Target], problems: list[Refusal]) -> list[ParamGroup]:
    """Return parameter groups under the target's names.

    Args:
        groups: under the source's names.
        targets: the tensors of the target.
        problems: receives UNSUPPORTED for every target tensor whose parameters are in different groups.

    A parameter comes from those that its state is read from, where these are not those of its values: files may have
        the parts of a fused parameter, with the state and the group of the whole.
    A parameter with optimizer state but without a group takes the group of the parameters that it is fused with: where
        ranks share out experts, torch's own checkpoints keep the groups of one rank only.
    """
    groups = list(groups)
    group_of = group_numbers(groups)
    names: dict[str, list[str]] = {}
    made_of: dict[str, tuple[Target, dict[str, None]]] = {}
    by_state: dict[str, tuple[Target, dict[str, None]]] = {}
    trained: set[str] = set()
    for target in targets.values() if groups else ():
        parameter, slot = split_slot(target.name)
        origins = (origin.name for target_part in target.parts for origin in target_part.origins)
        sources = dict.fromkeys(split_slot(origin)[0] for origin in origins)
        if slot == WEIGHT:
            made_of[parameter] = target, sources
        else:
            trained.update(sources)
            by_state.setdefault(parameter, (target, {}))[1].update(sources)
    fused = {source for name, (_, sources) in by_state.items() if name not in made_of for source in sources}
    for parameter, (target, sources) in by_state.items():
        if parameter not in made_of or not sources.keys() <= made_of[parameter][1].keys():
            made_of[parameter] = target, sources
    for parameter, (target, sources) in made_of.items():
        if parameter not in by_state and fused.issuperset(sources):
            continue
        memberships = {group_of.get(source) for source in sources if source in group_of or source not in trained}
        if len(memberships) > 1:
            problems.append(Refusal("UNSUPPORTED", _unlike(target, sources, group_of), Where(None, parameter), _HINT))
            continue
        for source in sources:
            names.setdefault(source, []).append(parameter)
    return renamed(groups, names)


def _unlike(target: Target, sources: Iterable[str], group_of: Mapping[str, int]) -> str:
    """Say which parameters of a target tensor are trained with other settings than the first."""
    first, *other_sources = sources
    unlike_source = next(name for name in other_sources if group_of.get(name) != group_of.get(first))
    memberships: Sequence[str] = [
        f"{name} is in {'no group' if name not in group_of else f'group {group_of[name]}'}"
        for name in (first, unlike_source)
    ]
    return f"{target.rule}\nthe parts are trained with different settings: {', '.join(memberships)}"
