"""Recognises a checkpoint's family and dialect from its config and tensor names, but never from tensor shapes."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from transaxle.arguments import read_text
from transaxle.axes.layout.bind import (
    OPTIM,
    BoundNames,
    bind,
    group,
    refuse_headless,
    score,
    split_slot,
    with_counts,
    with_state_of,
    without_wrappers,
)
from transaxle.axes.notation.family import Dialect, Family, Sizes
from transaxle.axes.notation.name import skeleton
from transaxle.encodings.conventions.packed_methods import (
    OF_BITSANDBYTES,
    PACKED_CODES,
    PACKED_FILES,
    PACKED_METHODS,
    QUANT_STATE,
    ROW_SCALES,
)
from transaxle.encodings.conventions.quantization import MODELOPT_CONFIG, read_packed
from transaxle.encodings.encoding import EncodedTensor
from transaxle.engine.checkpoint.manifest import Manifest, read_manifest
from transaxle.engine.checkpoint.peft_adapter import ADAPTED, adapter_config, check_model
from transaxle.engine.checkpoint.settings import CONFIG, Settings, read_stored_config
from transaxle.engine.views.encoded import Catalog, ForeignForm, catalog, refuse_section
from transaxle.errors import TransaxleError, refuse
from transaxle.families import Families, is_dialect
from transaxle.formats.catalog import Container
from transaxle.formats.registry import ADAPTER_CONFIG, CALLED

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
_KEEP = "With --to safetensors:identity, all tensor names stay as they are."
_KNOWN_TO_RUN = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim",
)  # fmt: skip
"""Config keys whose values must equal the sizes recorded in the checkpoint's own files, if these files record any. If
the sizes of two axes that are merged into one dim were swapped, the shapes would still fit.
"""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SAME: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_EXPERTS, _EXPERTS),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
}
"""Config key of a size -> all keys that may state the same size; transformers also writes keys with meaningless
defaults.
"""
_VOCABULARY, _ROWS = "vocab_size", "n"
"""Config key of the vocabulary size, and the axis of the vocabulary's rows. Rows beyond that size are padding, which is
not converted.
"""
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
    readings = [
        reading
        for name, entry in families.entries.items()
        if (reads_few or not entry.traced) and not any(entry.dialects.values())
        for label in (entry.dialects if reads_few else labels & entry.dialects.keys())
        for reading in _readings(families[name], grouped, label)
    ]
    better_count = max((reading.matched for reading in readings), default=0)
    if better_count > best_count:
        listed = ", ".join(f"{r.family.name}:{r.dialect.label}" for r in readings if r.matched == better_count)
        names = sum(map(len, grouped.values()))
        raise refuse(
            "AMBIGUOUS",
            f"{listed} reads {better_count} of {names} names, and other models may have these names: only config.json, "
            "which is not there, tells which model it is",
            hint=f"{_CHOOSE} {_KEEP}",
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
    having = (n for n, entry in families.entries.items() if {label} & {*entry.dialects, *map(_bare, entry.dialects)})
    readings = [reading for name in having for reading in _readings(families[name], grouped, None)]
    best_count = max((reading.matched for reading in readings), default=0)
    best = [reading for reading in readings if reading.matched == best_count]
    rules_of_dialect = {_rules_used(r, grouped) for r in best if r.dialect is r.family.dialect(label)}
    is_most = 2 * best_count >= sum(map(len, grouped.values()))
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
        hint=f"{_CHOOSE} {_KEEP}",
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


def check_same(config: Mapping[str, Any], recorded: Mapping[str, Any], axes: Mapping[str, int]) -> None:
    """Check that a config agrees with the sizes in the checkpoint's own files, and that its vocabulary is not smaller.

    Args:
        config: the config of the model.
        recorded: the sizes that the checkpoint's own files record.
        axes: axis sizes given by the user, which take precedence over the config.

    Raises:
        Refused: with code SHAPE_MISMATCH, if the config differs from the recorded sizes.
    """
    shared_keys = [key for key in _KNOWN_TO_RUN if config.get(key) is not None and key in recorded]
    differing = [
        key for key in shared_keys if all(config.get(same) != recorded[key] for same in _SAME.get(key, (key,)))
    ]
    if differing:
        config_sizes, recorded_sizes = (
            ", ".join(f"{key} {of[key]!r}" for key in differing) for of in (config, recorded)
        )
        message = f"the config says {config_sizes}, but the run that saved the checkpoint says {recorded_sizes}"
        hint = "Give the config.json of this model, or no config: the sizes are in the checkpoint."
        raise refuse("SHAPE_MISMATCH", message, hint=hint)
    config_rows, recorded_rows = config.get(_VOCABULARY), recorded.get(_VOCABULARY)
    if (
        isinstance(config_rows, int)
        and isinstance(recorded_rows, int)
        and config_rows < recorded_rows
        and _ROWS not in axes
    ):
        message = (
            f"the config says {_VOCABULARY} {config_rows}, but the run that saved the checkpoint says {recorded_rows}; "
            f"{recorded_rows - config_rows} rows of its vocabulary would be left out"
        )
        hint = (
            f"Give the config.json of this model; if these rows only pad its vocabulary: --axis {_ROWS}={config_rows}."
        )
        raise refuse("SHAPE_MISMATCH", message, hint=hint)


def _check_axes(family: Family, axes: Mapping[str, int]) -> None:
    """Refuse sizes that the user gives for axes that a family does not have, because such sizes would have no effect.

    Raises:
        UsageError: with code UNKNOWN_AXIS, for each axis that the family does not have.
    """
    for axis in axes:
        if axis not in family.axes:
            message = f"the family {family.name} has no axis {axis!r}"
            raise refuse("UNKNOWN_AXIS", message, hint=f"Axes: {', '.join(sorted(family.axes))}.")


def show_foreign(container: Container, config: Mapping[str, Any], *, is_given: bool = False) -> ForeignForm:
    """Return a checkpoint of GPTQ, AWQ or bitsandbytes in a form in which its tensors can be read; any other as it is.

    Args:
        container: the stored tensors.
        config: the model's config.
        is_given: whether the user gave the config, whose section is then right whatever other files say.

    Raises:
        TransaxleError: one error with the refusals of all tensors that do not fit together.
    """
    names = () if is_given and read_packed(config) else PACKED_FILES.keys() & {*container.carried}
    has_codes = any(name.rpartition(".")[2] == PACKED_CODES for name in container.entries) if names else False
    files = {name: read_stored_config(container.storage, name) for name in sorted(names) if has_codes}
    method = read_packed(config, files)
    if method is not None:
        _refuse_conv1d(config, PACKED_METHODS[method.name])
        # imported inside the function, because few checkpoints need these modules
        from transaxle.engine.views.packed_integers import as_compressed_tensors

        return as_compressed_tensors(container, config, method)
    if any(QUANT_STATE in name or name.endswith(ROW_SCALES) for name in container.entries):
        from transaxle.engine.views.bitsandbytes import show_blocks

        _refuse_conv1d(config, PACKED_METHODS[OF_BITSANDBYTES])
        changed, config = show_blocks(container, config)
        return ForeignForm(changed, config, "" if changed is container else PACKED_METHODS[OF_BITSANDBYTES])
    return ForeignForm(container, config)


_CONV1D = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
"""Model types of transformers 5.24 whose layers are `Conv1D`, with weights `[inputs, outputs]`."""


def _refuse_conv1d(config: Mapping[str, Any], program: str) -> None:
    """Refuse a model whose weights are stored transposed once they are quantized, and not otherwise."""
    model_type = config.get("model_type")
    if model_type in _CONV1D:
        message = f"{program} transposes the weights of {model_type}, whose layers are Conv1D; they are not read"
        raise refuse("UNSUPPORTED", message, file=CONFIG, hint=_KEEP)


class StoredNames:
    """How the family's table reads a checkpoint's stored names. This object is computed once, and shared by all views
    of the files.

    Args:
        container: the files of the checkpoint.
        settings: the user's settings for reading the checkpoint.
        undecoded: the stored names of the undecoded checkpoint, if `container` is a decoded view.
    """

    def __init__(self, container: Container, settings: Settings, undecoded: StoredNames | None) -> None:
        self._container = container
        self._settings = settings
        self._undecoded = undecoded

    @cached_property
    def manifest(self) -> Manifest | None:
        """The checkpoint's `transaxle.json`; None if the file does not exist, describes files that have changed, or
        lacks tensors that are grafted.
        """
        if self._container.recoding.grafted:
            return None
        return read_manifest(self._container) if self._undecoded is None else self._undecoded.manifest

    @cached_property
    def catalog(self) -> Catalog:
        """The stored tensors as entries for the families' tables; an encoded tensor and its scales are one entry."""
        has_modelopt = MODELOPT_CONFIG in self._container.carried
        modelopt = read_stored_config(self._container.storage, MODELOPT_CONFIG) if has_modelopt else None
        try:
            shown = show_foreign(self._container, self.config, is_given=self._settings.config is not None)
        except TransaxleError as error:
            refusals = refuse_section(error, self._container)
            return Catalog(self._container, self._container.entries, {}, None, refusals)
        return catalog(shown.container, shown.config, modelopt, shown)

    @cached_property
    def is_adapter(self) -> bool:
        """Whether the tensors have the names that peft gives to the tensors of an adapter."""
        if ADAPTER_CONFIG not in self._container.carried or adapter_config(self._container) is None:
            return False
        return any(name.startswith(ADAPTED) for name in self._container.entries)

    @cached_property
    def decoded(self) -> Mapping[str, EncodedTensor]:
        """Tensor name -> stored encoding, for the tensors that this view decodes."""
        if self._undecoded is None:
            return {}
        stored_encoded = self._undecoded.catalog.encoded
        return {name: tensor for name, tensor in stored_encoded.items() if name not in self.catalog.encoded}

    @cached_property
    def encodings_in_files(self) -> Mapping[str, EncodedTensor]:
        """Tensor name -> stored encoding, for the tensors that this view shows in a different encoding."""
        if self._undecoded is None or not self._container.recoding.encodings:
            return {}
        shown, stored = self.catalog.encoded, self._undecoded.catalog.encoded
        return {name: stored[name] for name in shown if shown[name].encoding.name != stored[name].encoding.name}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config: the user's, or else the checkpoint's config.json, or else sizes from the checkpoint's own
        files.
        """
        if self._settings.config is not None:
            return self._settings.config
        if CONFIG in self._container.carried:
            return read_stored_config(self._container.storage)
        return self._container.config

    @property
    def reading(self) -> Reading:
        """Family and dialect of the stored tensor names.

        Raises:
            UsageError: with code UNKNOWN_FAMILY, if no family's table fits the names; with code AMBIGUOUS, if several
                fit.
        """
        if isinstance(self.reading_or_error, TransaxleError):
            raise self.reading_or_error
        return self.reading_or_error

    @cached_property
    def reading_or_error(self) -> Reading | TransaxleError:
        """Family and dialect of the stored tensor names, or the error that explains why they are unknown."""
        settings = self._settings
        dialect = settings.dialect
        try:
            family = settings.family and pick_family(settings.family, settings.families).name
            manifest_family = None if self.manifest is None else settings.families.get(self.manifest.family or "")
            if self.manifest is not None and manifest_family is not None:
                family = family or manifest_family.name
                if (
                    dialect is None
                    and family == manifest_family.name
                    and manifest_family.dialect(self.manifest.dialect) is not None
                ):
                    dialect = self.manifest.dialect
            if ADAPTER_CONFIG in self._container.carried:
                check_model(self._container)
            # optimizer state may have the names of a different dialect than the weights
            names = tuple(self.catalog.entries)
            weights = tuple(name for name in names if not name.startswith(OPTIM)) or names
            reading = recognise(weights, self.config, settings.families, family, dialect)
            _check_axes(reading.family, settings.axes)
        except TransaxleError as error:
            return error
        return reading

    def has_names_of(self, label: str) -> bool:
        """Return whether the names already are those of a dialect, although neither config nor user identifies the
        model.
        """
        is_specified = (
            self._settings.family or self._settings.dialect or self._settings.axes or model_types(self.config)
        )
        return not is_specified and keep_names(self.catalog.entries, label, self._settings.families)

    @cached_property
    def sizes(self) -> Sizes:
        """Axis sizes: from the user, else from the manifest (unless the user gave a config), else from the config.

        Raises:
            Refused: with code SHAPE_MISMATCH, if the user's config belongs to a different model.
        """
        check_same(self.config, self._container.config, self._settings.axes)
        trusted = self.manifest if self._settings.config is None else None
        axes = {} if trusted is None else trusted.axes
        reading, names = self.reading, self.catalog.entries
        sizes = Sizes(reading.family, self.config, {**axes, **self._settings.axes})
        return with_counts(sizes, reading.dialect, reading.prefix, names)

    @cached_property
    def bound(self) -> BoundNames:
        """The stored names, each matched with a table line of their dialect; optimizer state may have a second dialect.

        A program may save weights under the hub's names, but optimizer state under the names of its modules in memory.
        So optimizer state is read with the dialect of the family that matches most of its names.
        """
        reading = self.reading
        catalog = self.catalog
        stored_as = {name: tensor.encoding.name for name, tensor in (*catalog.encoded.items(), *self.decoded.items())}
        stored_as |= {name: tensor.encoding.name for name, tensor in self.encodings_in_files.items()}
        names = tuple(catalog.entries)
        bound = bind(names, reading.family, reading.dialect, self.sizes, reading.prefix, stored_as, catalog.entries)
        if not any(split_slot(name)[1] for name in bound.unknown):
            return bound
        state = tuple(name for name in names if split_slot(name)[1])
        families, family = self._settings.families, reading.family.name
        try:
            of_weights, of_state = (
                recognise(state, self.config, families, family, dialect) for dialect in (reading.dialect.label, None)
            )
        except TransaxleError:
            # no dialect, or more than one, fits the names of the optimizer state; it is refused later, if it is needed
            return bound
        if of_state.matched == of_weights.matched:
            return bound
        return with_state_of(bound, of_state.dialect, of_state.prefix, self.sizes, catalog.entries)
