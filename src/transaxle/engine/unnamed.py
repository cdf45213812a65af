"""Tensors that a dialect cannot name: the refusals of a conversion that would rename only a part of a model.

The table of a text model also fits such a model inside a larger one, where its names follow a prefix such as
`language_model.`. But the table does not know how another framework names the tensors outside of the text model, or
additional tensors in its layers. If only some tensors of a layer were renamed, the target framework would never find
the others. So a conversion is refused if some tensors have no known name in the target dialect (`refuse_foreign`,
`refuse_half_converted`). Without a change of dialect, such a checkpoint can still be moved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from transaxle.axes.layout.bind import WEIGHT, BoundNames, Index, split_slot
from transaxle.axes.notation.family import Dialect, Line, Sizes
from transaxle.axes.notation.name import is_outer, natural
from transaxle.axes.translation.translate import Translation
from transaxle.engine.wording import plural
from transaxle.errors import Code, Refusal, Where
from transaxle.formats.training_state import is_extra_state

_LISTED = 6
"""Largest number of tensor names that one refusal lists."""
_IDENTITY = 'keep all names with --to safetensors:identity (to="safetensors:identity")'
_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
"""Pattern for the beginning of a tensor name, up to and including its layer number."""
_COMPUTED = (".inv_freq", ".position_ids")
"""Last name segments of buffers whose values follow from the config; older programs stored such buffers."""


_TABLE = 'add lines for them to a table of your own (--rules FILE, rules="FILE")'


def refuse_foreign(
    bound: BoundNames,
    config: Mapping[str, Any],
    target: Dialect,
    beside: Collection[str] = (),
    *,
    family_given: bool = False,
) -> list[Refusal]:
    """Return refusals of tensors whose names in the target dialect are unknown.

    Extra tensors outside the layers of a known model (extra heads, layers that other programs add) are not refused:
    they keep their names, and the report lists them. For tensors inside its layers see `refuse_half_converted`.

    Args:
        bound: the stored tensor names, matched with the table of their own dialect.
        config: the model's config; empty if there is none.
        target: the target dialect; if it is the stored dialect, tensors with unknown names keep these names.
        beside: names of training state, which does not belong to a model.
        family_given: whether the user named the family; if so, a model inside a wrapper is converted without the
            wrapper, provided that the wrapper contains nothing else.
    """
    family = bound.family
    top, text = config.get("model_type"), config.get("text_config")
    is_wrapper = is_outer(bound.prefix)
    levels = (config, text) if isinstance(text, Mapping) else ()
    is_nested = top not in family.model_types and any(isinstance(level.get("model_type"), str) for level in levels)
    unknown = tuple(name for name in bound.unknown if split_slot(name)[1] == WEIGHT and name not in beside)
    has_others_outside = bool(bound.prefix) and not all(
        bound.own.get(name, name).startswith(bound.prefix) for name in unknown
    )
    inside = is_nested or not is_wrapper or has_others_outside
    is_wrapped = inside and not family_given and not (is_wrapper and top in family.wrappers)
    is_known_model = not inside and (family_given or top in family.model_types)
    if not is_wrapped and (is_known_model or not unknown or (target is bound.dialect and not inside)):
        return []
    lines = [_describe_whole_model(bound, config, target.label, is_nested=is_nested)] if is_wrapped else []
    if unknown:
        count = len(unknown) + len(bound.ignored) + sum(map(len, bound.names.values()))
        headline = f"no line of {family.name}, dialect {bound.dialect.label}, reads {len(unknown):,} of {count:,} names"
        lines += [
            headline if is_wrapped else f"{headline}; their names in {target.label} are unknown",
            *unknown[:_LISTED],
        ]
    if len(unknown) > _LISTED:
        lines.append(f"… and {len(unknown) - _LISTED:,} more")
    alternatives = [_IDENTITY, _TABLE]
    if not unknown:
        subject = "only the text model" if is_nested else f"it without {bound.prefix!r}"
        alternatives.append(f'convert {subject} with --family {family.name} (family="{family.name}")')
    elif not inside:
        alternatives.append(
            f'declare the model a {family.name} with --config FILE (config="FILE") or --family {family.name}'
            f' (family="{family.name}"), and those in none of its layers keep their names'
        )
    where = Where(None, unknown[0] if len(unknown) == 1 else None)
    code: Code = "UNKNOWN_FAMILY" if is_wrapped else "UNEXPECTED_TENSOR"
    return [Refusal(code, "\n".join(lines), where, f"{', '.join(alternatives[:-1])} or {alternatives[-1]}")]


def _describe_whole_model(bound: BoundNames, config: Mapping[str, Any], target: str, *, is_nested: bool) -> str:
    top = config.get("model_type")
    inside = f" after {bound.prefix!r}" if bound.prefix else ""
    if bound.prefix and not is_nested and not bound.unknown:
        return (
            f"all names begin with {bound.prefix!r}, so this may be part of a larger model, whose layout in {target} "
            f"is unknown; --family {bound.family.name} converts it as a model of its own"
        )
    model = f"config.json says model_type {top!r}: " if isinstance(top, str) else ""
    statement = f"{bound.family.name} is only one part of this model{inside}"
    return f"{model}{statement}; the layout of the whole model in {target} is unknown"


def refuse_half_converted(
    bound: BoundNames, target: Dialect, sizes: Sizes, view: Translation, file_refusals: Sequence[Refusal]
) -> list[Refusal]:
    """Refuse tensors that would keep their names inside converted layers or modules.

    Such a tensor has no line in the table of the stored dialect, or is in a layer and has no line in that of the target
    dialect. Tensors outside the layers that a dialect omits, such as heads, are not refused.

    Args:
        bound: the stored tensor names, matched with the table of their own dialect.
        target: the target dialect; if it is the stored dialect, nothing is refused.
        sizes: axis sizes and config; a tensor that the model lacks according to its config may keep its name.
        view: the translation of the checkpoint into the target dialect.
        file_refusals: refusals of the files; problems that follow from them, or from the view's refusals, are not
            repeated.
    """
    # If codes and scales could not be matched, no table line reads the scales.
    is_grouped = all(refusal.where.tensor for refusal in file_refusals)
    kept_names = frozenset(view.kept_names if is_grouped and target is not bound.dialect else ())
    refused = tuple(refusal.where.tensor for refusal in (*view.refusals, *file_refusals) if refusal.where.tensor)
    unread_names = [
        name
        for name in bound.unknown
        if bound.own.get(name, name) in kept_names and split_slot(name)[1] == WEIGHT
        if not (name.startswith(refused) or is_extra_state(name))
    ]
    # If there are refusals, a tensor may have kept its name only because it was refused, although the target dialect
    # has a line for it.
    awaited = {part for line in target.lines for part in line.expression.components} if view.refusals else set[str]()
    excepted = awaited.union(bound.family.copies)
    homeless, converted = list[tuple[str, Sequence[str]]](), set[str]()
    for (line, slot), names in bound.names.items() if kept_names else ():
        for position, name in names.items():
            inner_name = bound.own.get(name, name)
            if inner_name not in view.targets:
                layer = _layer(bound, name, line)
                converted.update([layer] if layer else _modules(bound, name), line.name.axes[:1])
            elif inner_name in kept_names and slot == WEIGHT and _exists(bound, sizes, line, position, excepted):
                homeless.append((name, [_layer(bound, name, line)]))
    into = f"of layers and modules whose other tensors get their names in {target.label}"
    reads = f"no line of {bound.family.name}, dialect {bound.dialect.label}, reads"
    writes = f"{bound.family.name} has no line in dialect {target.label} for"
    table = f"{_TABLE[0].upper()}{_TABLE[1:]}, or {_IDENTITY}."
    choose_other = f"Models of {target.label} are without them: choose another dialect, {_TABLE}, or {_IDENTITY}."
    inside = [(name, [layer] if (layer := _layer(bound, name)) else _modules(bound, name)) for name in unread_names]
    halves = [(inside, reads, table), (homeless, writes, choose_other)]
    refusals = []
    for names_left, headline, hint in halves:
        shown = sorted((name for name, around in names_left if not converted.isdisjoint(around)), key=natural)
        if shown:
            omitted_line = [f"… and {len(shown) - _LISTED:,} more"] if len(shown) > _LISTED else []
            where = Where(None, shown[0] if len(shown) == 1 else None)
            message = "\n".join([f"{headline} {plural(len(shown), 'tensor')} {into}", *shown[:_LISTED], *omitted_line])
            refusals.append(Refusal("UNEXPECTED_TENSOR", message, where, hint))
    return refusals


def _layer(bound: BoundNames, name: str, line: Line | None = None) -> str:
    """Return the start of a tensor name up to its layer number, or a stacked tensor's layer axis, or "" (no layer)."""
    match = _LAYER.match(bound.own.get(name, name))
    if match is not None or line is None:
        return "" if match is None else match[0]
    axes = (axis for part in line.expression.components for axis in bound.family.tensors[part].axes[:1])
    return next((axis for axis in axes if axis in bound.family.name_axes), "")


def _modules(bound: BoundNames, name: str) -> Sequence[str]:
    """Return the modules that contain a tensor, outermost first; empty for a buffer computed from the config."""
    inner_name = bound.own.get(name, name).removeprefix(bound.prefix)
    if inner_name.endswith(_COMPUTED):
        return ()
    return tuple(accumulate(inner_name.split(".")[:-1], "{}.{}".format))


def _exists(bound: BoundNames, sizes: Sizes, line: Line, position: Index, without: Collection[str]) -> bool:
    """Return whether the config's model has a tensor of the line that is not in `without`; True without config."""
    index = line.name.index_at(position)
    tensors = (bound.family.tensors[part] for part in line.expression.components if part not in without)
    return any(sizes.holds(tensor.when, index) is not False for tensor in tensors)
