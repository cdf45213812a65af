"""Foreign names: tensors whose names in another dialect no table knows.

A table of a text model also reads that model inside a larger one, after a prefix such as `language_model.`, but it
cannot know how another framework names the whole, nor what is in a layer beside the tensors that it reads: converted in
part, the layer would have the others where nobody looks for them. Under its own names such a checkpoint can still be
moved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from transaxle.axes.layout.bind import WEIGHT, Bound, Index, split_slot
from transaxle.axes.notation.family import Dialect, Line, Sizes
from transaxle.axes.notation.name import is_outer, natural
from transaxle.axes.translation.translate import Translation
from transaxle.engine.checkpoint.recognise import model_types
from transaxle.engine.number_text import plural
from transaxle.errors import Code, Refusal, Where
from transaxle.formats.training_items import is_extra_state

_LISTED = 6
"""Cap on the names that a refusal lists."""
_IDENTITY = 'keep all names with --to safetensors:identity (to="safetensors:identity")'
_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
"""Beginning of a name, up to the number of its layer."""
_COMPUTED = (".inv_freq", ".position_ids")
"""Ends of the names of buffers that follow from the config, which older programs stored."""
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
    they keep their names, and the report lists them. Those inside what is converted are: see `half_converted`.

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


def half_converted(
    bound: Bound, target: Dialect, sizes: Sizes, view: Translation, others: Sequence[Refusal]
) -> list[Refusal]:
    """Refuse tensors that keep their names inside what is converted: no line reads them, or they are in a layer and the
    wanted dialect has none for them. What a dialect leaves out beside the layers are heads and the like.

    Args:
        bound: the stored names, read through their own dialect.
        target: the wanted dialect; in the names' own dialect, they simply stay.
        sizes: sizes and the config; a tensor that the model is without, by its config, may stay.
        view: the checkpoint in that dialect.
        others: refusals of its files; what follows from those and the view's is not said again.
    """
    # Where codes and scales cannot be grouped, no line reads the scales.
    is_grouped = all(refusal.where.tensor for refusal in others)
    kept = frozenset(view.kept if is_grouped and target is not bound.dialect else ())
    refused = tuple(refusal.where.tensor for refusal in (*view.refusals, *others) if refusal.where.tensor)
    unread = [
        name
        for name in bound.unknown
        if bound.own.get(name, name) in kept and split_slot(name)[1] == WEIGHT
        if not (name.startswith(refused) or is_extra_state(name))
    ]
    # Where something is refused, what the dialect has a line for may have kept its name for that reason.
    awaited = {part for line in target.lines for part in line.expression.components} if view.refusals else set[str]()
    excepted = awaited.union(bound.family.copies)
    homeless, converted = list[tuple[str, Sequence[str]]](), set[str]()
    for (line, slot), names in bound.names.items() if kept else ():
        for position, name in names.items():
            own = bound.own.get(name, name)
            if own not in view.targets:
                layer = _layer(bound, name, line)
                converted.update([layer] if layer else _modules(bound, name), line.name.axes[:1])
            elif own in kept and slot == WEIGHT and _exists(bound, sizes, line, position, excepted):
                homeless.append((name, [_layer(bound, name, line)]))
    into = f"of layers and modules whose other tensors get their names in {target.label}"
    reads = f"no line of {bound.family.name}, dialect {bound.dialect.label}, reads"
    writes = f"{bound.family.name} has no line in dialect {target.label} for"
    table = f"{_TABLE[0].upper()}{_TABLE[1:]}, or {_IDENTITY}."
    other = f"Models of {target.label} are without them: choose another dialect, {_TABLE}, or {_IDENTITY}."
    inside = [(name, [layer] if (layer := _layer(bound, name)) else _modules(bound, name)) for name in unread]
    halves = [(inside, reads, table), (homeless, writes, other)]
    refusals = []
    for names_left, headline, hint in halves:
        left = sorted((name for name, around in names_left if not converted.isdisjoint(around)), key=natural)
        if left:
            more = [f"… and {len(left) - _LISTED:,} more"] if len(left) > _LISTED else []
            where = Where(None, left[0] if len(left) == 1 else None)
            message = "\n".join([f"{headline} {plural(len(left), 'tensor')} {into}", *left[:_LISTED], *more])
            refusals.append(Refusal("UNEXPECTED_TENSOR", message, where, hint))
    return refusals


def _layer(bound: Bound, name: str, line: Line | None = None) -> str:
    """Return the beginning of a name up to the number of its layer, or the axis of layers where they are one tensor;
    empty for what is in none.
    """
    match = _LAYER.match(bound.own.get(name, name))
    if match is not None or line is None:
        return "" if match is None else match[0]
    axes = (axis for part in line.expression.components for axis in bound.family.tensors[part].axes[:1])
    return next((axis for axis in axes if axis in bound.family.name_axes), "")


def _modules(bound: Bound, name: str) -> Sequence[str]:
    """Return the modules around a tensor, the outermost first; none of a buffer that follows from the config."""
    own = bound.own.get(name, name).removeprefix(bound.prefix)
    if own.endswith(_COMPUTED):
        return ()
    return tuple(accumulate(own.split(".")[:-1], "{}.{}".format))


def _exists(bound: Bound, sizes: Sizes, line: Line, position: Index, without: Collection[str]) -> bool:
    """Tell whether a model has what a line holds, without some parts, and no other tensor in its place; so it is where
    no config tells.
    """
    index = dict(zip(line.name.axes, position, strict=True))
    tensors = (bound.family.tensors[part] for part in line.expression.components if part not in without)
    return any(sizes.holds(tensor.when, index) is not False for tensor in tensors)
