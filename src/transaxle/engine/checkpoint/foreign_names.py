"""Foreign names: what a family's tables do not know of a checkpoint, so that its names elsewhere are not known either.

A table of a text model also reads that model inside of another one, after a prefix such as `language_model.`; how a
framework names the whole, no table of the part can say. Under its own names such a checkpoint still moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transaxle.axes.layout.bind import WEIGHT, Bound, split_slot
from transaxle.axes.notation.family import Dialect
from transaxle.axes.notation.name import is_outer
from transaxle.engine.checkpoint.recognise import model_types
from transaxle.errors import Code, Refusal, Where

_LISTED = 6
"""Names that a refusal shows."""
_IDENTITY = 'keep all names with --to FORMAT:identity (to="FORMAT:identity")'
_TABLE = "give a table of them with --rules FILE"


def foreign(bound: Bound, config: Mapping[str, Any], target: Dialect, *, said: bool = False) -> list[Refusal]:
    """Refuse a dialect in which the names of some tensors are not known.

    A few tensors beside a model that is known as a whole (heads of its own, layers that other programs add) are none
    of these: they keep their names, and the report lists them.

    Args:
        bound: the stored names, read through their own dialect.
        config: the model's config.json; empty where there is none.
        target: the dialect that is wanted; in their own, names that no line reads stay what they are.
        said: whether the user said which family it is: then what is wrapped is
            taken out of its wrapper, if there is nothing else.
    """
    family = bound.family
    top, text = config.get("model_type"), config.get("text_config")
    outer = is_outer(bound.prefix)
    nested = isinstance(text, Mapping) and top not in family.model_types and model_types(config) != []
    inside = nested or not outer
    wrapped = inside and not said and not (outer and top in family.wrappers)
    whole = not inside and (said or top in family.model_types)
    unknown = tuple(name for name in bound.unknown if split_slot(name)[1] == WEIGHT)
    if not wrapped and (whole or not unknown or (target is bound.dialect and not inside)):
        return []
    lines = [_whole(bound, config, target.label)] if wrapped else []
    if unknown:
        count = len(unknown) + len(bound.ignored) + sum(map(len, bound.names.values()))
        what = f"no line of {family.name}, dialect {bound.dialect.label}, reads {len(unknown):,} of {count:,} names"
        lines += [what if wrapped else f"{what}; what {target.label} calls them is not known", *unknown[:_LISTED]]
    if len(unknown) > _LISTED:
        lines.append(f"… and {len(unknown) - _LISTED:,} more")
    ways = [_IDENTITY, _TABLE]
    if not unknown:
        ways.append(f"take the text model out with --family {family.name}")
    elif not inside:
        ways.append(f"say that it is a {family.name} by --config FILE or --family {family.name}: they keep their names")
    where = Where(None, unknown[0] if len(unknown) == 1 else None)
    code: Code = "UNKNOWN_FAMILY" if wrapped else "UNEXPECTED_TENSOR"
    return [Refusal(code, "\n".join(lines), where, f"{', '.join(ways[:-1])} or {ways[-1]}")]


def _whole(bound: Bound, config: Mapping[str, Any], target: str) -> str:
    top = config.get("model_type")
    inside = f" after {bound.prefix!r}" if bound.prefix else ""
    model = f"config.json says model_type {top!r}: " if isinstance(top, str) else ""
    part = f"{bound.family.name} is only a part of this model{inside}"
    return f"{model}{part}; what {target} calls the whole is not known"
