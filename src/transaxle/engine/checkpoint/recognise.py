"""Recognises a checkpoint's family and dialect from its config and tensor names, but never from tensor shapes."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from transaxle.arguments import read_text
from transaxle.axes.layout.bind import (
    group,
    refuse_headless,
    score,
    split_slot,
    without_wrappers,
)
from transaxle.axes.notation.family import Dialect, Family, Sizes
from transaxle.axes.notation.name import skeleton
from transaxle.errors import TransaxleError, refuse
from transaxle.families import Families, is_dialect
from transaxle.formats.registry import CALLED

IDENTITY = "identity"
"""Label of the dialect that fits every checkpoint: each tensor keeps its stored name."""
_CLOSE = 3
"""Largest number of similar family names that a refusal lists."""
_LISTED = 12
"""Largest number of readings (pairs of family and dialect that fit the tensor names) that a refusal lists."""
_SHARED = frozenset({"hf", "transformers"})
"""Dialects whose tensor names are shared by many models with different layouts."""
_ANY_SIZES = (1, 10**6)
"""The smallest and the largest possible axis size. A condition that is true for both sizes does not depend on sizes."""
_CHOOSE = "Choose with --config FILE, or with --family NAME and --from DIALECT (config=, family=, dialect=)."
KEEP = "With --to safetensors:identity, all tensor names stay as they are."
"""Advice for tensors that no table can convert."""
_TORCHTUNE = re.compile(
    r"(?:.+\.)?layers\.0\.(?:attn\.(?:q_proj|k_proj|v_proj|output_proj)\..+|(?:sa|mlp)_norm\.scale)"
)
"""Patterns of tensor names that only torchtune's models have."""
ENGINES = frozenset({"vllm"})
"""Dialects of inference engines, such as vLLM. The dialect of an engine is chosen only by distinctive tensor names, a
manifest or the user, because some engines store different contents under the hub's names.
"""


class Reading(msgspec.Struct, frozen=True):
    """A model family and one of its dialects whose table fits a checkpoint's tensor names."""

    family: Family
    """The family whose table fits the tensor names."""
    dialect: Dialect
    """The dialect of the family that fits the tensor names."""
    prefix: str
    """Text at the beginning of every stored name, such as `model.`; empty if the names have no common prefix."""
    matched: int
    """Number of stored names that the dialect's table contains."""


def pick_family(label: str, families: Families) -> Family:
    """Return a family by its name, or by a model type that no other family has.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, and the closest names, if there is no such family.
    """
    if label in families:
        return families[label]
    of_type = families.of_types([label])
    if len(of_type) == 1:
        return of_type[0]
    close = difflib.get_close_matches(label.lower(), families, _CLOSE)
    if of_type:
        close = [family.name for family in of_type]
    near = f"close to it: {', '.join(close)}; " if close else ""
    another = "Add one with --rules FILE; for a model type of transformers, `transaxle derive MODEL` writes it"
    hint = f"Did you mean {close[0]}?" if close else f"{another}. `transaxle families` lists those there are."
    raise refuse("UNKNOWN_FAMILY", f"no family {label!r}; {near}{len(families)} are known", hint=hint)


_NUMBERS = {
    **dict.fromkeys(("fp8", "float8", "float8_block"), "--encode float8_block"),
    "mxfp8": "--encode mxfp8",
    **dict.fromkeys(("nvfp4", "fp4"), "--encode nvfp4"),
    **{
        name: f"--dtype {dtype}, or for quantized tensors --to hf --decode {dtype}"
        for dtype, names in {"bf16": ("bf16", "bfloat16"), "fp32": ("fp32", "float32")}.items()
        for name in names
    },
    **dict.fromkeys(("fp16", "float16"), "--dtype fp16"),
}
"""Number format that users may type instead of a dialect -> the option that they need."""
_ELSEWHERE = {
    **dict.fromkeys(("gguf", "ggml", "llama.cpp", "llamacpp"), "llama.cpp's convert_hf_to_gguf.py"),
    "onnx": "Optimum's exporter (optimum-cli export onnx)",
    "mlx": "mlx_lm.convert",
}
"""File format of a program other than Transaxle -> the tool that makes such a file from a folder in the hub's
layout.
"""


def pick_dialect(family: Family, label: str, formats: Sequence[str] = ()) -> Dialect:
    """Return the dialect of a family that has a given label.

    Args:
        family: the family that should have the dialect.
        label: label of the dialect, as the user typed it.
        formats: names of file formats, which the user may have confused with dialects.

    Raises:
        UsageError: with code AMBIGUOUS, if the family has no such dialect; the error lists the dialects that it has.
    """
    match = family.dialect(read_text("dialect", label, "hf"))
    if match is None:
        names = [*family.labels, *(d.name for d in family.dialects), IDENTITY]
        usual = [name for name in (CALLED.get(label.lower()),) if name in (*names, *formats)]
        close = usual or difflib.get_close_matches(label.lower(), [*names, *formats], 1)
        besides = f"; there is no such format either (formats: {', '.join(formats)})" if formats else ""
        message = (
            f"family {family.name} has no dialect {label!r}; it has: {', '.join(family.labels)}, {IDENTITY}{besides}"
        )
        if close and close[0] in formats:
            message = (
                f"there is no format {label!r} (known: {', '.join(formats)}), and no such dialect of {family.name}"
            )
        default_hint = f"`transaxle dialects {family.name}` explains each dialect; --rules FILE adds a dialect."
        near = f"Did you mean {close[0]}?" if close else ""
        raise refuse("AMBIGUOUS", message, hint=other_meaning(label) or near or default_hint)
    return match


def other_meaning(label: str) -> str:
    """Return a hint if a target names a number format or the file format of a different program instead of a dialect;
    else return "".
    """
    word = label.lower()
    if word in _NUMBERS:
        return f"This is a number format: --to hf {_NUMBERS[word]}."
    if word in _ELSEWHERE:
        return f'Write a folder in the layout of a hub, --to hf (to="hf"), and give this folder to {_ELSEWHERE[word]}.'
    return ""


def check_dialect(label: str, families: Families, formats: Sequence[str] = ()) -> None:
    """Refuse a label that no family uses for a dialect.

    Args:
        label: label of the dialect, as the user typed it.
        families: all known families.
        formats: names of file formats, which the user may have confused with dialects.

    Raises:
        UsageError: with code AMBIGUOUS and a suggestion, if no family has such a dialect.
    """
    if label == IDENTITY or is_dialect(label):
        return
    labels = {each for entry in families.everything.entries.values() for each in entry.dialects}
    names = [*sorted(labels | {each.partition("@")[0] for each in labels}), IDENTITY, *formats]
    if label in names:
        return
    usual = [name for name in (CALLED.get(label.lower()),) if name in names]
    close = usual or difflib.get_close_matches(label.lower(), names, 1)
    besides = f", and there is no such format (formats: {', '.join(formats)})" if formats else ""
    near = f"Did you mean {close[0]}?" if close else "`transaxle dialects FAMILY` lists the dialects of a family."
    hint = other_meaning(label) or f'{near} Those of a table of your own need --rules FILE (rules="FILE").'
    raise refuse("AMBIGUOUS", f"no family has a dialect {label!r}{besides}", hint=hint)


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the model types in a config: the type of the whole model, and the type of its text model."""
    nested = config.get("text_config")
    levels = [config, nested] if isinstance(nested, Mapping) else [config]
    return [level["model_type"] for level in levels if isinstance(level.get("model_type"), str)]


def _present_tensors(reading: Reading, grouped: Mapping[str, list[str]]) -> set[str]:
    """Return the logical tensors to which at least one of the stored names belongs."""
    stored = {skeleton(names[0][len(reading.prefix) :]) for names in grouped.values()}
    return {c for line in reading.dialect.lines if line.name.skeleton in stored for c in line.expression.components}


def _count_missing(reading: Reading, grouped: Mapping[str, list[str]]) -> tuple[int, int]:
    """Return how many mandatory and how many optional tensors of the family have no stored name.

    A tensor is mandatory if every model of the family has it. A tensor that may be stored as a tie (a second name of
    another tensor) does not count as missing. If no stored name belongs to a layer, at least the tensors of the layers
    are missing.
    """
    family, present = reading.family, _present_tensors(reading, grouped)
    numbered = {name for name, tensor in family.tensors.items() if not family.name_axes.isdisjoint(tensor.axes)}
    ties = {tie.alias for tie in family.ties}
    absent = [tensor for name, tensor in family.tensors.items() if name not in present | ties]
    first = dict.fromkeys(family.name_axes, 0)
    any_sizes = [Sizes(family, {}, dict.fromkeys(family.axes, size)) for size in _ANY_SIZES]
    # A tensor is mandatory if its condition is true for the first layer with every size and config.
    mandatory = sum(all(sizes.holds(tensor.when, first) for sizes in any_sizes) for tensor in absent)
    layers = bool(numbered) and numbered.isdisjoint(present)
    return mandatory + layers, len(absent) - mandatory


def _most_complete(readings: Sequence[Reading], grouped: Mapping[str, list[str]]) -> list[Reading]:
    """Return the readings that lack no mandatory tensor; of these, return those that lack the fewest optional tensors.

    All tensor names of a Llama model also occur in a Qwen3 model, which always has additional tensors; all names of a
    Qwen3 model occur in a Qwen3-MoE model, apart from its experts. If every reading lacks a tensor, as for a single
    shard file of several, all readings are returned.
    """
    missing_counts = [(reading, *_count_missing(reading, grouped)) for reading in readings]
    fewest = min((others for _, mandatory, others in missing_counts if not mandatory), default=0)
    return [reading for reading, mandatory, others in missing_counts if (mandatory, others) == (0, fewest)] or list(
        readings
    )


def _readings(family: Family, grouped: Mapping[str, list[str]], dialect: str | None) -> Iterator[Reading]:
    """Yield, for each dialect of a family or only for the given dialect, a reading of the tensor names."""
    for candidate in family.dialects if dialect is None else [family.dialect(dialect)]:
        matched, prefix = (0, "") if candidate is None else score(grouped, candidate)
        if candidate is not None and matched:
            yield Reading(family, candidate, prefix, matched)


def _best_readings(families: Families, grouped: Mapping[str, list[str]], dialect: str | None) -> list[Reading]:
    """Return the readings that match the most tensor names, in the order of the families.

    Families are tried in the order of an upper bound of their matches, so that tables that cannot match the most names
    are never parsed. Families of installed plugins are tried only if no built-in family matches all names.
    """
    readings: list[Reading] = []
    best_count = 0
    for upper_bound, family in families.that_may_read({key: len(names_alike) for key, names_alike in grouped.items()}):
        if upper_bound < best_count:
            break
        readings.extend(_readings(family, grouped, dialect))
        best_count = max((reading.matched for reading in readings), default=0)
    if best_count < sum(map(len, grouped.values())) and families.everything is not families:
        return _best_readings(families.everything, grouped, dialect)
    order = {name: place for place, name in enumerate(families.entries)}
    return sorted(readings, key=lambda reading: order[reading.family.name])


def _best_dialects(
    families: Families, grouped: Mapping[str, list[str]], least: int, selects: Callable[[str, str], bool]
) -> list[Reading]:
    """Return the readings that match the most tensor names, at least `least`, in the order of the families. Tables that
    cannot match so many are never parsed.

    Args:
        families: all known families.
        grouped: the stored tensor names, grouped by pattern.
        least: smallest number of names that a reading must match.
        selects: function that returns whether a dialect, given the names of its family and its label, is considered.
    """
    bounds = families.most_names({key: len(names_alike) for key, names_alike in grouped.items()})
    readings: list[Reading] = []
    for (name, label), bound in sorted(bounds.items(), key=lambda item: -item[1]):
        if bound < least:
            break
        if selects(name, label):
            readings.extend(_readings(families[name], grouped, label))
            least = max([least, *(reading.matched for reading in readings)])
    dialects = [(name, label) for name, entry in families.entries.items() for label in entry.dialects]
    order = {dialect: place for place, dialect in enumerate(dialects)}
    best = [reading for reading in readings if reading.matched == least]
    return sorted(best, key=lambda reading: order[reading.family.name, reading.dialect.label])


def recognise(
    names: Sequence[str],
    config: Mapping[str, Any],
    families: Families,
    family: str | None = None,
    dialect: str | None = None,
) -> Reading:
    """Find the family and dialect of a checkpoint.

    Args:
        names: the checkpoint's stored names.
        config: content of the checkpoint's config.json; empty if there is none.
        families: all known families.
        family: the family that the user gave, which is accepted without a check; None means that it is recognised.
        dialect: the dialect that the user gave, which is accepted without a check; None means that it is recognised.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, if no family's table fits the tensor names; with code AMBIGUOUS, and the
            candidates, if several fit.
    """
    grouped = _group_names(names)
    types = model_types(config)
    candidates = [pick_family(family, families)] if family is not None else families.of_types(types)
    if candidates:
        readings = [reading for candidate in candidates for reading in _readings(candidate, grouped, dialect)]
    else:
        readings = _best_readings(families, grouped, dialect)
    best_count = max((r.matched for r in readings), default=0)
    if 2 * best_count < len(names):
        _refuse_torchtune(grouped)
        refuse_headless(candidates, grouped, _ways_out(types))
    if not readings:
        raise _no_reading(names, types, candidates, families, dialect)
    best = _most_complete([r for r in readings if r.matched == best_count], grouped)
    besides = {r.family.name for r in best if r.dialect.name not in ENGINES}
    best = [r for r in best if r.dialect.name not in ENGINES or r.family.name not in besides]
    distinct = {(r.family.name, _rules_used(r, grouped)): r for r in reversed(best)}
    unsure = len(distinct) > 1 or 2 * best_count < len(names) or _count_missing(best[0], grouped)[0]
    if not types and family is None and unsure:
        _refuse_silent({r.dialect.label for r in best}, grouped, families, best_count)
    if len(distinct) > 1 and types and family is None and not candidates:
        raise _unknown_type(types, _ways_out(types))
    if len(distinct) > 1:
        raise _ambiguous_readings(best, best_count, len(names), types)
    chosen = best[0]
    if family is None and types and not any(t in chosen.family.model_types for t in types):
        look = f"Its names look like {chosen.family.name}; if that is right:  --family {chosen.family.name}"
        raise _unknown_type(types, f"{look}\n{_ways_out(types)}")
    return chosen


def _refuse_silent(
    labels: Collection[str], grouped: Mapping[str, list[str]], families: Families, best_count: int
) -> None:
    """Refuse tensor names that fit best a table which only a config can select; without the config, a table that fits
    worse would be selected.

    Args:
        labels: the dialects that match the most names, among all tables that names alone can select.
        grouped: the stored tensor names, grouped by pattern.
        families: all known families.
        best_count: number of tensor names that these dialects match.

    Raises:
        UsageError: with code AMBIGUOUS, if a table that only a config can select fits better.
    """
    reads_few = 2 * best_count < sum(map(len, grouped.values()))

    def selects(name: str, label: str) -> bool:
        entry = families.entries[name]
        return not any(entry.dialects.values()) and (reads_few or (not entry.traced and label in labels))

    better = _best_dialects(families, grouped, best_count + 1, selects)
    if better:
        listed = ", ".join(f"{reading.family.name}:{reading.dialect.label}" for reading in better)
        names = sum(map(len, grouped.values()))
        raise refuse(
            "AMBIGUOUS",
            f"{listed} reads {better[0].matched} of {names} names, and other models may have these names: only "
            "config.json, which is not there, tells which model it is",
            hint=f"{_CHOOSE} {KEEP}",
        )


def keep_names(names: Iterable[str], label: str, families: Families) -> bool:
    """Return whether tensor names already are those of a dialect, whatever the model's family.

    Extra state of a training run, apart from its model and optimizer, is ignored, because it belongs to no module of
    the model.

    Args:
        names: stored tensor names.
        label: label of the dialect; if many models share the names of this dialect, the result is always False.
        families: all known families.
    """
    if _bare(label) in _SHARED:
        return False
    grouped = _group_names(names)
    having = {n for n, entry in families.entries.items() if {label} & {*entry.dialects, *map(_bare, entry.dialects)}}
    best = _best_dialects(families, grouped, 1, lambda name, _: name in having)
    rules_of_dialect = {_rules_used(r, grouped) for r in best if r.dialect is r.family.dialect(label)}
    is_most = bool(best) and 2 * best[0].matched >= sum(map(len, grouped.values()))
    return (
        is_most
        and bool(rules_of_dialect)
        and all(_rules_used(r, grouped) in rules_of_dialect and _is_whole(r, grouped) for r in best)
    )


def _bare(label: str) -> str:
    """Return a dialect's name without its version suffix."""
    return label.partition("@")[0]


def _group_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the parameters in stored names by pattern, ignoring wrapper prefixes and optimizer slots."""
    listed = tuple(names)
    inner_names = without_wrappers(listed)
    return group(split_slot(inner_names.get(name, name))[0] for name in listed)


def _is_whole(reading: Reading, grouped: Mapping[str, list[str]]) -> bool:
    """Return whether a dialect matches all names in every top-level module in which it matches at least one name."""
    modules: dict[bool, set[str]] = {True: set(), False: set()}
    for alike in grouped.values():
        name = alike[0].removeprefix(reading.prefix)
        lines = reading.dialect.by_skeleton.get(skeleton(name), ())
        read = any(each.match(name) is not None for each in (*(line.name for line in lines), *reading.dialect.ignored))
        modules[read].add(name.partition(".")[0])
    return modules[True].isdisjoint(modules[False])


def _refuse_torchtune(grouped: Mapping[str, list[str]]) -> None:
    """Refuse the tensor names of torchtune's models. No table fits them, and the names that they share with other
    models are misleading.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, if only torchtune's models use the names.
    """
    first = next((alike[0] for key, alike in grouped.items() if _TORCHTUNE.fullmatch(key)), None)
    if first is not None:
        message = (
            f"these are names of torchtune, such as {first}, which no table reads; the rows of its q_proj and k_proj "
            "may be in another order than the hub's"
        )
        hint = (
            "Give the folder that torchtune's own FullModelHFCheckpointer writes, or the names that its "
            "torchtune.models.convert_weights.tune_to_hf returns: both are the hub's.\n"
            "To keep its names:  --to safetensors:identity\nTo add a table:  --rules FILE"
        )
        raise refuse("UNKNOWN_FAMILY", message, hint=hint)


def _rules_used(reading: Reading, grouped: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the mapping rules by which a dialect reads the names; if these are equal for two dialects, the choice
    between the two makes no difference.
    """
    texts: set[str] = set()
    for names in grouped.values():
        name = names[0][len(reading.prefix) :]
        lines = reading.dialect.by_skeleton.get(skeleton(name), ())
        texts.update(line.text for line in lines if line.name.match(name) is not None)
    return tuple(sorted(texts))


def _ambiguous_readings(readings: Sequence[Reading], matched: int, names: int, types: Sequence[str]) -> TransaxleError:
    """Return the error for tensor names that several families or dialects fit equally well."""
    listed = ", ".join(f"{each.family.name}:{each.dialect.label}" for each in readings[:_LISTED])
    omitted = f" and {len(readings) - _LISTED} more" if len(readings) > _LISTED else ""
    names_only = "" if types else " (there is no config.json to decide)"
    return refuse(
        "AMBIGUOUS",
        f"several tables fit equally well: {listed}{omitted} each read {matched} of {names} names in different "
        f"ways{names_only}",
        hint=f"{_CHOOSE} {KEEP}",
    )


def _no_reading(
    names: Sequence[str], types: Sequence[str], candidates: Sequence[Family], families: Families, dialect: str | None
) -> TransaxleError:
    """Return the error for tensor names that no dialect fits; it names the dialect with the closest names.

    A dialect label that no candidate has is reported as a typing error, and an unknown model type as unknown.

    Args:
        names: the stored tensor names.
        types: the model types in the config.
        candidates: the families selected by the model types or the user; if empty, all families that names can select.
        families: all known families.
        dialect: label of the dialect that the user gave.
    """
    entries = families.everything.entries
    labels = {label for name in [f.name for f in candidates] or entries for label in entries[name].dialects}
    if dialect and dialect not in labels | {label.partition("@")[0] for label in labels}:
        return _no_such_dialect(dialect, sorted(labels), candidates)
    samples = list(dict.fromkeys(skeleton(name) for name in names[:200]))[:20]
    patterns_of: dict[str, Collection[str]] = {}
    for family in candidates:
        patterns_of.update({f"{family.name}:{each.label}": each.by_skeleton for each in family.dialects})
    # the name patterns are in the index of families, so no table is parsed
    for name, entry in entries.items() if not candidates else ():
        patterns_of.update({f"{name}:{label}": skeletons for label, skeletons in entry.dialects.items() if skeletons})
    # Tables share most name patterns, so each sample is compared with each distinct pattern only once.
    every_skeleton = list(dict.fromkeys(itertools.chain.from_iterable(patterns_of.values())))
    similar = [set(difflib.get_close_matches(each, every_skeleton, len(every_skeleton) + 1, 0.8)) for each in samples]
    close = {label: sum(not each.isdisjoint(skeletons) for each in similar) for label, skeletons in patterns_of.items()}
    closest = max(close, key=close.__getitem__, default="")
    if dialect:
        subject = f"dialect {dialect!r} knows none"
    elif candidates:
        subject = f"the table of {' and that of '.join(family.name for family in candidates)} knows none"
    elif types:
        subject = f"the model type {types[0]!r} of config.json is unknown, and no table knows any"
    else:
        subject = "no table that answers to names alone knows any"
    first_names = ", ".join(names[:3]) or "(no tensors)"
    model = f" (config.json has model_type {types[0]!r})" if types and (candidates or dialect) else ""
    ways = "Omit --from: the dialect is then recognised from the names." if dialect else _ways_out(types)
    # If one name in twenty is similar, this proves nothing; if half of them are, it is evidence.
    is_close = samples and closest and 2 * close[closest] >= len(samples)
    hint = f"Closest: {closest}\n{ways}" if is_close else ways
    return refuse("UNKNOWN_FAMILY", f"{subject} of the tensor names: {first_names}{model}", hint=hint)


def _no_such_dialect(label: str, labels: Sequence[str], candidates: Sequence[Family]) -> TransaxleError:
    """Return the error for a source dialect that no candidate family has; it suggests the most similar label."""
    close = difflib.get_close_matches(label.lower(), [*labels, *(each.partition("@")[0] for each in labels)], 1)
    whose = f"family {' and family '.join(f.name for f in candidates)} has" if candidates else "there is"
    message = f"{whose} no dialect {label!r}; there are: {', '.join(labels)}"
    if label == IDENTITY:
        hint = f"Only a target can be written as {IDENTITY}: omit --from."
    else:
        hint = f"Did you mean {close[0]}?" if close else "Add one with --rules FILE."
    return refuse("AMBIGUOUS", message, hint=hint)


def _unknown_type(types: Sequence[str], hint: str) -> TransaxleError:
    message = f"the model type {types[0]!r} of config.json is unknown: no table is for it"
    return refuse("UNKNOWN_FAMILY", message, hint=hint)


def _ways_out(types: Sequence[str]) -> str:
    """Return advice for a model that no table fits, one suggestion per line; transformers may know the model type."""
    keep_names_line = "To keep its names:  --to safetensors:identity  (or dcp:identity and so on)"
    if not types:
        config = (
            "Tensor names identify few families. To name the family:  --config FILE  (the model's config.json), "
            "or --family NAME"
        )
        return f"{config}\n{keep_names_line}\nTo add a table:  --rules FILE"
    name = re.sub(r"\W", "_", types[0])
    file = f"{name}.rules"
    return (
        f"{keep_names_line}\nTo derive its table from transformers, for the dialects hf and transformers:  --derive "
        "(of convert and plan)\n"
        f"or once, for all commands:  transaxle derive FOLDER -o {file}  and then  --rules {file}"
    )
