"""Foreign names: tensors whose names in another dialect no table knows.

A table of a text model also reads that model inside a larger one, after a prefix such as `language_model.`, but it
cannot know how another framework names the whole, nor what is in a layer beside the tensors that it reads: converted in
part, the layer would have the others where nobody looks for them. Under its own names such a checkpoint can still be
moved.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transaxle.axes.layout.bind import WEIGHT, Bound, split_slot
from transaxle.axes.notation.family import Dialect
from transaxle.axes.notation.name import is_outer, natural
from transaxle.engine.checkpoint.recognise import model_types
from transaxle.errors import Code, Refusal, Where

_LISTED = 6
"""Cap on the names that a refusal lists."""
_IDENTITY = 'keep all names with --to safetensors:identity (to="safetensors:identity")'
_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
"""Beginning of a name, up to the number of its layer."""
_TABLE = 'add lines for them to a table of your own (--rules FILE, rules="FILE")'


def foreign(
    bound: Bound,
    config: Mapping[str, Any],
    target: Dialect,
    beside: Collection[str] = (),
    *,
    family_given: bool = False,
) -> list[Refusal]:
    """Refuse a dialect in which the names of some tensors are not known.

    A few tensors beside a model that is known as a whole (extra heads, layers that other programs add) are no reason:
    they keep their names, and the report lists them. Those in a layer that is converted are: see `half_converted`.

    Args:
        bound: the stored names, read through their own dialect.
        config: the model's config.json; empty if there is none.
        target: the wanted dialect; in the names' own dialect, unknown names simply stay.
        beside: names of training state, which is no part of a model.
        family_given: whether the user named the family: then a wrapped model is taken out of its wrapper, if nothing
            else is in it.
    """
    family = bound.family
    top, text = config.get("model_type"), config.get("text_config")
    outer = is_outer(bound.prefix)
    nested = isinstance(text, Mapping) and top not in family.model_types and model_types(config) != []
    unknown = tuple(name for name in bound.unknown if split_slot(name)[1] == WEIGHT and name not in beside)
    others_beside = bool(bound.prefix) and not all(
        bound.own.get(name, name).startswith(bound.prefix) for name in unknown
    )
    inside = nested or not outer or others_beside
    wrapped = inside and not family_given and not (outer and top in family.wrappers)
    known_model = not inside and (family_given or top in family.model_types)
    if not wrapped and (known_model or not unknown or (target is bound.dialect and not inside)):
        return []
    lines = [_whole(bound, config, target.label, nested=nested)] if wrapped else []
    if unknown:
        count = len(unknown) + len(bound.ignored) + sum(map(len, bound.names.values()))
        headline = f"no line of {family.name}, dialect {bound.dialect.label}, reads {len(unknown):,} of {count:,} names"
        lines += [
            headline if wrapped else f"{headline}; their names in {target.label} are unknown",
            *unknown[:_LISTED],
        ]
    if len(unknown) > _LISTED:
        lines.append(f"… and {len(unknown) - _LISTED:,} more")
    ways = [_IDENTITY, _TABLE]
    if not unknown:
        what = "only the text model" if nested else f"it without {bound.prefix!r}"
        ways.append(f'convert {what} with --family {family.name} (family="{family.name}")')
    elif not inside:
        ways.append(
            f'declare the model a {family.name} with --config FILE (config="FILE") or --family {family.name}'
            f' (family="{family.name}"), and those in none of its layers keep their names'
        )
    where = Where(None, unknown[0] if len(unknown) == 1 else None)
    code: Code = "UNKNOWN_FAMILY" if wrapped else "UNEXPECTED_TENSOR"
    return [Refusal(code, "\n".join(lines), where, f"{', '.join(ways[:-1])} or {ways[-1]}")]


def _whole(bound: Bound, config: Mapping[str, Any], target: str, *, nested: bool) -> str:
    top = config.get("model_type")
    inside = f" after {bound.prefix!r}" if bound.prefix else ""
    if bound.prefix and not nested and not bound.unknown:
        return (
            f"all names begin with {bound.prefix!r}, so this may be part of a larger model, whose layout in {target} "
            f"is unknown; --family {bound.family.name} converts it as a model of its own"
        )
    model = f"config.json says model_type {top!r}: " if isinstance(top, str) else ""
    statement = f"{bound.family.name} is only one part of this model{inside}"
    return f"{model}{statement}; the layout of the whole model in {target} is unknown"


def half_converted(bound: Bound, target: Dialect, kept: Collection[str], refusals: Iterable[Refusal]) -> list[Refusal]:
    """Refuse tensors that no line reads in layers whose other tensors are converted.

    Args:
        bound: the stored names, read through their own dialect.
        target: the wanted dialect; in the names' own dialect, they simply stay.
        kept: the stored names that stay in it.
        refusals: others; what follows from those is not said again.
    """
    refused = tuple(refusal.where.tensor for refusal in refusals if refusal.where.tensor)
    unread: dict[str, list[str]] = defaultdict(list)
    staying = frozenset(kept)
    for name in staying.intersection(bound.unknown) if target is not bound.dialect else ():
        layer = _LAYER.match(name)
        if layer is not None and split_slot(name)[1] == WEIGHT and not name.startswith(refused):
            unread[layer[0]].append(name)
    if not unread:
        return []
    converted = {
        layer[0]
        for of_line in bound.names.values()
        for name in of_line.values()
        if name not in staying and (layer := _LAYER.match(name)) is not None
    }
    names = sorted((name for layer in unread.keys() & converted for name in unread[layer]), key=natural)
    if not names:
        return []
    headline = (
        f"no line of {bound.family.name}, dialect {bound.dialect.label}, reads {len(names):,} tensors of layers whose "
        f"other tensors get their names in {target.label}"
    )
    more = [f"… and {len(names) - _LISTED:,} more"] if len(names) > _LISTED else []
    hint = f"{_TABLE[0].upper()}{_TABLE[1:]}, or {_IDENTITY}."
    where = Where(None, names[0] if len(names) == 1 else None)
    return [Refusal("UNEXPECTED_TENSOR", "\n".join([headline, *names[:_LISTED], *more]), where, hint)]
