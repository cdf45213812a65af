"""Recognition: which family and dialect a checkpoint is of; its config and names tell, never its shapes."""

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
from transaxle.encodings.conventions.quantization import MODELOPT_CONFIG
from transaxle.encodings.encoding import EncodedTensor
from transaxle.engine.checkpoint.manifest import Manifest, read_manifest
from transaxle.engine.checkpoint.peft_adapter import ADAPTED, adapter_config, check_model
from transaxle.engine.checkpoint.settings import CONFIG, Settings, stored_config
from transaxle.engine.views.encoded import Catalog, catalog
from transaxle.errors import TransaxleError, refuse
from transaxle.families import Families, is_dialect
from transaxle.formats.catalog import Container
from transaxle.formats.registry import ADAPTER_CONFIG, CALLED

IDENTITY = "identity"
"""The dialect of every checkpoint: each tensor under its own name."""
_CLOSE = 3
"""Names of families that a refusal lists."""
_LISTED = 12
"""Readings of the same names that a refusal lists."""
_SHARED = frozenset({"hf", "transformers"})
"""Dialects whose names many models have in common, with other layouts."""
_ANY_SIZES = (1, 10**6)
"""Sizes of all axes: a condition that both fulfil does not depend on sizes."""
_CHOOSE = "Choose with --config FILE, or with --family NAME and --from DIALECT (config=, family=, dialect=)."
_KEEP = "Names stay as they are with --to safetensors:identity."
_KNOWN_TO_RUN = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim",
)  # fmt: skip
"""Keys of a config of which a checkpoint that says them itself must say the same: sizes of axes that are merged into
one dim can be exchanged, and the shapes still fit."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SAME: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_EXPERTS, _EXPERTS),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
}
"""Keys of which one may say a size, beside others with a value of no meaning: transformers writes its defaults too."""
_VOCABULARY, _ROWS = "vocab_size", "n"
"""Key of a config, and the axis in tables; rows beyond it are padding, which targets do not get."""
_TORCHTUNE = re.compile(
    r"(?:.+\.)?layers\.0\.(?:attn\.(?:q_proj|k_proj|v_proj|output_proj)\..+|(?:sa|mlp)_norm\.scale)"
)
"""Skeletons of names that only torchtune's models have."""
ENGINES = frozenset({"vllm"})
"""Dialects of inference engines, which files have only where their names, the manifest or the user say so: some engines
keep other contents under the names of the hub.
"""


class Recognised(msgspec.Struct, frozen=True):
    """One reading of a checkpoint's names."""

    family: Family
    """Its family."""
    dialect: Dialect
    """Its dialect."""
    prefix: str
    """Text before every name."""
    matched: int
    """Number of names that the dialect reads."""


def pick_family(label: str, families: Families) -> Family:
    """Return a family by its name, or by a model type that no other family has.

    Raises:
        UsageError: UNKNOWN_FAMILY, with the closest names.
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
    another = "Add one with --rules FILE, which `transaxle derive` makes for any model type of transformers"
    hint = f"Did you mean {close[0]}?" if close else f"{another}; `transaxle families` lists those there are."
    raise refuse("UNKNOWN_FAMILY", f"no family {label!r}; {near}{len(families)} are known", hint=hint)


_NUMBERS = {
    **dict.fromkeys(("fp8", "float8", "float8_block"), "--encode float8_block"),
    "mxfp8": "--encode mxfp8",
    **dict.fromkeys(("nvfp4", "fp4"), "--encode nvfp4"),
    **{
        name: f"--dtype {dtype} (or --decode {dtype}, of quantized tensors)"
        for dtype, names in {"bf16": ("bf16", "bfloat16"), "fp32": ("fp32", "float32")}.items()
        for name in names
    },
    **dict.fromkeys(("fp16", "float16"), "--dtype fp16"),
}
"""Formats of numbers that people write where a dialect belongs -> the option that is meant."""
_ELSEWHERE = {
    **dict.fromkeys(("gguf", "ggml", "llama.cpp", "llamacpp"), "llama.cpp's convert_hf_to_gguf.py"),
    "onnx": "Optimum's exporter (optimum-cli export onnx)",
    "mlx": "mlx_lm.convert",
}
"""Formats of other programs -> what makes them of a folder as a hub has it."""


def pick_dialect(family: Family, label: str, formats: Sequence[str] = ()) -> Dialect:
    """Return a dialect of a family by its label.

    Args:
        family: the family.
        label: what the user typed.
        formats: names that it could have been as well.

    Raises:
        UsageError: AMBIGUOUS, listing the dialects there are.
    """
    match = family.dialect(read_text("dialect", label, "hf"))
    if match is None:
        names = [*family.labels, *(d.name for d in family.dialects), IDENTITY]
        usual = [name for name in (CALLED.get(label.lower()),) if name in (*names, *formats)]
        close = usual or difflib.get_close_matches(label.lower(), [*names, *formats], 1)
        besides = f"; and no format is called so (known: {', '.join(formats)})" if formats else ""
        message = (
            f"family {family.name} has no dialect {label!r}; it has: {', '.join(family.labels)}, {IDENTITY}{besides}"
        )
        if close and close[0] in formats:
            message = (
                f"there is no format {label!r} (known: {', '.join(formats)}), and no such dialect of {family.name}"
            )
        ways = f"`transaxle dialects {family.name}` says what each is; --rules FILE adds one."
        near = f"Did you mean {close[0]}?" if close else ""
        raise refuse("AMBIGUOUS", message, hint=other_meaning(label) or near or ways)
    return match


def other_meaning(label: str) -> str:
    """Return what to do where a target is no dialect but a format of numbers, or of another program; else nothing."""
    word = label.lower()
    if word in _NUMBERS:
        return f"That is a format of numbers: --to hf {_NUMBERS[word]}."
    if word in _ELSEWHERE:
        return f'Write the form of a hub, --to hf (to="hf"), and give that folder to {_ELSEWHERE[word]}.'
    return ""


def check_dialect(label: str, families: Families, formats: Sequence[str] = ()) -> None:
    """Refuse what is the label of no dialect of any family.

    Args:
        label: what the user typed.
        families: all known families.
        formats: names that it could have been as well.

    Raises:
        UsageError: AMBIGUOUS, with what is meant.
    """
    if label == IDENTITY or is_dialect(label):
        return
    known = {each for entry in families.everything.entries.values() for each in entry.dialects}
    names = [*sorted(known | {each.partition("@")[0] for each in known}), IDENTITY, *formats]
    if label in names:
        return
    usual = [name for name in (CALLED.get(label.lower()),) if name in names]
    close = usual or difflib.get_close_matches(label.lower(), names, 1)
    besides = f", and no format is called so (there are: {', '.join(formats)})" if formats else ""
    near = f"Did you mean {close[0]}?" if close else "`transaxle dialects FAMILY` lists those of a family."
    hint = other_meaning(label) or f'{near} Those of a table of your own need --rules FILE (rules="FILE").'
    raise refuse("AMBIGUOUS", f"no family has a dialect {label!r}{besides}", hint=hint)


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the model types that a config states: its own, and that of the text model in it."""
    nested = config.get("text_config")
    levels = [config, nested] if isinstance(nested, Mapping) else [config]
    return [level["model_type"] for level in levels if isinstance(level.get("model_type"), str)]


def _present(reading: Recognised, grouped: Mapping[str, list[str]]) -> set[str]:
    """Return the logical tensors that the names hold."""
    stored = {skeleton(names[0][len(reading.prefix) :]) for names in grouped.values()}
    return {c for line in reading.dialect.lines if line.name.skeleton in stored for c in line.expression.components}


def _lacks(reading: Recognised, grouped: Mapping[str, list[str]]) -> tuple[int, int]:
    """Return how many tensors that every model of the family has are not among the names, and how many others.

    A tensor that may be stored as a tie does not count. Names without any of a layer lack at least the layers.
    """
    family, present = reading.family, _present(reading, grouped)
    numbered = {name for name, tensor in family.tensors.items() if not family.name_axes.isdisjoint(tensor.axes)}
    ties = {tie.alias for tie in family.ties}
    absent = [tensor for name, tensor in family.tensors.items() if name not in present | ties]
    first = dict.fromkeys(family.name_axes, 0)
    any_sizes = [Sizes(family, {}, dict.fromkeys(family.axes, size)) for size in _ANY_SIZES]
    # What is true of the first layer, whatever the sizes and the config, is true of every model.
    needed = sum(all(sizes.holds(tensor.when, first) for sizes in any_sizes) for tensor in absent)
    layers = bool(numbered) and numbered.isdisjoint(present)
    return needed + layers, len(absent) - needed


def _most_complete(readings: Sequence[Recognised], grouped: Mapping[str, list[str]]) -> list[Recognised]:
    """Return the readings that lack no mandatory tensor and the fewest optional ones.

    All names of a Llama are also names of a Qwen3, which always has more; all names of a Qwen3 are names of a Qwen3-MoE
    without experts. Where every reading lacks something (one shard of several), all of them are returned.
    """
    lacks = [(reading, *_lacks(reading, grouped)) for reading in readings]
    fewest = min((others for _, needed, others in lacks if not needed), default=0)
    return [reading for reading, needed, others in lacks if (needed, others) == (0, fewest)] or list(readings)


def _readings(family: Family, grouped: Mapping[str, list[str]], dialect: str | None) -> Iterator[Recognised]:
    """Yield how each dialect of a family, or the one named, reads the names."""
    for candidate in family.dialects if dialect is None else [family.dialect(dialect)]:
        matched, prefix = (0, "") if candidate is None else score(grouped, candidate)
        if candidate is not None and matched:
            yield Recognised(family, candidate, prefix, matched)


def _best_readings(families: Families, grouped: Mapping[str, list[str]], dialect: str | None) -> list[Recognised]:
    """Return the readings with the most matched names. Families are tried by an upper bound of their matches, so that
    tables which cannot win are never parsed. Families of installed packages are tried where no other reads all names.
    """
    readings: list[Recognised] = []
    most = 0
    for upper_bound, family in families.that_may_read({key: len(names_alike) for key, names_alike in grouped.items()}):
        if upper_bound < most:
            break
        readings.extend(_readings(family, grouped, dialect))
        most = max((reading.matched for reading in readings), default=0)
    if most < sum(map(len, grouped.values())) and families.everything is not families:
        return _best_readings(families.everything, grouped, dialect)
    order = {name: place for place, name in enumerate(families.entries)}
    return sorted(readings, key=lambda reading: order[reading.family.name])


def recognise(
    names: Sequence[str],
    config: Mapping[str, Any],
    families: Families,
    family: str | None = None,
    dialect: str | None = None,
) -> Recognised:
    """Find the family and dialect of a checkpoint.

    Args:
        names: its stored names.
        config: its config.json; empty where there is none.
        families: all known families.
        family: what the user says it is; believed.
        dialect: likewise.

    Raises:
        UsageError: UNKNOWN_FAMILY or AMBIGUOUS, listing the candidates.
    """
    grouped = _grouped(names)
    types = model_types(config)
    candidates = [pick_family(family, families)] if family is not None else families.of_types(types)
    if candidates:
        readings = [reading for candidate in candidates for reading in _readings(candidate, grouped, dialect)]
    else:
        readings = _best_readings(families, grouped, dialect)
    most = max((r.matched for r in readings), default=0)
    if 2 * most < len(names):
        _refuse_torchtune(grouped)
        refuse_headless(candidates, grouped, _ways(types))
    if not readings:
        raise _nothing(names, types, candidates, families, dialect)
    best = _most_complete([r for r in readings if r.matched == most], grouped)
    besides = {r.family.name for r in best if r.dialect.name not in ENGINES}
    best = [r for r in best if r.dialect.name not in ENGINES or r.family.name not in besides]
    distinct = {(r.family.name, _reading(r, grouped)): r for r in reversed(best)}
    if not types and family is None and (len(distinct) > 1 or _lacks(best[0], grouped)[0]):
        _refuse_silent({r.dialect.label for r in best}, grouped, families, most)
    if len(distinct) > 1 and types and family is None and not candidates:
        raise _unknown_type(types, _ways(types))
    if len(distinct) > 1:
        raise _several(best, most, len(names), types)
    chosen = best[0]
    if family is None and types and not any(t in chosen.family.model_types for t in types):
        look = f"Its names look like {chosen.family.name}; if that is right:  --family {chosen.family.name}"
        raise _unknown_type(types, f"{look}\n{_ways(types)}")
    return chosen


def _refuse_silent(labels: Collection[str], grouped: Mapping[str, list[str]], families: Families, most: int) -> None:
    """Refuse names of which tables that answer to a config alone read more than those that answer to names.

    Args:
        labels: the dialects in which these read the most.
        grouped: the names.
        families: all known families.
        most: how many these read.

    Raises:
        UsageError: AMBIGUOUS.
    """
    readings = [
        reading
        for name, entry in families.entries.items()
        if not entry.traced and not any(entry.dialects.values())
        for label in labels & entry.dialects.keys()
        for reading in _readings(families[name], grouped, label)
    ]
    more = max((reading.matched for reading in readings), default=0)
    if more > most:
        found = ", ".join(f"{r.family.name}:{r.dialect.label}" for r in readings if r.matched == more)
        names = sum(map(len, grouped.values()))
        raise refuse(
            "AMBIGUOUS",
            f"{found} reads {more} of {names} names, and other models may have these names: only config.json, which is "
            "not there, tells which model it is",
            hint=f"{_CHOOSE} {_KEEP}",
        )


def keep_names(names: Iterable[str], label: str, families: Families) -> bool:
    """Tell whether names are those of a dialect already, whichever of its families the model is of.

    What a run remembers besides its model and optimizer does not count: it is in no module of the model.

    Args:
        names: stored names.
        label: the dialect; one whose names many models have in common tells nothing.
        families: all known families.
    """
    if _bare(label) in _SHARED:
        return False
    grouped = _grouped(names)
    having = (n for n, entry in families.entries.items() if {label} & {*entry.dialects, *map(_bare, entry.dialects)})
    readings = [reading for name in having for reading in _readings(families[name], grouped, None)]
    most = max((reading.matched for reading in readings), default=0)
    best = [reading for reading in readings if reading.matched == most]
    theirs = {_reading(r, grouped) for r in best if r.dialect is r.family.dialect(label)}
    is_most = 2 * most >= sum(map(len, grouped.values()))
    return is_most and bool(theirs) and all(_reading(r, grouped) in theirs and _is_whole(r, grouped) for r in best)


def _bare(label: str) -> str:
    """Return a dialect's name without its version."""
    return label.partition("@")[0]


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the parameters of stored names, which wrappers have no part in."""
    listed = tuple(names)
    own = without_wrappers(listed)
    return group(split_slot(own.get(name, name))[0] for name in listed)


def _is_whole(reading: Recognised, grouped: Mapping[str, list[str]]) -> bool:
    """Tell whether a dialect reads all names that are in modules of which it reads any."""
    modules: dict[bool, set[str]] = {True: set(), False: set()}
    for alike in grouped.values():
        name = alike[0].removeprefix(reading.prefix)
        lines = reading.dialect.by_skeleton.get(skeleton(name), ())
        read = any(each.match(name) is not None for each in (*(line.name for line in lines), *reading.dialect.ignored))
        modules[read].add(name.partition(".")[0])
    return modules[True].isdisjoint(modules[False])


def _refuse_torchtune(grouped: Mapping[str, list[str]]) -> None:
    """Refuse names of torchtune's models: no table reads them, and those that they share with others are misleading.

    Raises:
        UsageError: UNKNOWN_FAMILY.
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


def _reading(reading: Recognised, grouped: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the rules by which a dialect reads the names: dialects with equal rules are one reading."""
    texts: set[str] = set()
    for names in grouped.values():
        name = names[0][len(reading.prefix) :]
        lines = reading.dialect.by_skeleton.get(skeleton(name), ())
        texts.update(line.text for line in lines if line.name.match(name) is not None)
    return tuple(sorted(texts))


def _several(readings: Sequence[Recognised], matched: int, names: int, types: Sequence[str]) -> TransaxleError:
    """Build the refusal where several families or dialects read the names equally well."""
    listed = ", ".join(f"{each.family.name}:{each.dialect.label}" for each in readings[:_LISTED])
    more = f" and {len(readings) - _LISTED} more" if len(readings) > _LISTED else ""
    names_only = "" if types else " (there is no config.json to decide)"
    return refuse(
        "AMBIGUOUS",
        f"several tables fit equally well: {listed}{more} each read {matched} of {names} names in different "
        f"ways{names_only}",
        hint=f"{_CHOOSE} {_KEEP}",
    )


def _nothing(
    names: Sequence[str], types: Sequence[str], candidates: Sequence[Family], families: Families, dialect: str | None
) -> TransaxleError:
    """Build the refusal where no dialect reads any name, with the closest one.

    A dialect that none of the families has is a slip of the fingers, and a model type that no table knows is called so.

    Args:
        names: the stored names.
        types: the model types of the config.
        candidates: the families that these, or the user, say it may be of; none: any that answers to names.
        families: all known families.
        dialect: the one that the user says it is.
    """
    every = families.everything.entries
    labels = {label for name in [f.name for f in candidates] or every for label in every[name].dialects}
    if dialect and dialect not in labels | {label.partition("@")[0] for label in labels}:
        return _no_such_dialect(dialect, sorted(labels), candidates)
    samples = list(dict.fromkeys(skeleton(name) for name in names[:200]))[:20]
    read: dict[str, Collection[str]] = {}
    for family in candidates:
        read.update({f"{family.name}:{each.label}": each.by_skeleton for each in family.dialects})
    for name, entry in every.items() if not candidates else ():  # the index has them; no table is parsed for it
        read.update({f"{name}:{label}": skeletons for label, skeletons in entry.dialects.items() if skeletons})
    # Tables have most skeletons in common, so each is compared once for all of them.
    every_skeleton = list(dict.fromkeys(itertools.chain.from_iterable(read.values())))
    near = [set(difflib.get_close_matches(each, every_skeleton, len(every_skeleton) + 1, 0.8)) for each in samples]
    close = {label: sum(not each.isdisjoint(skeletons) for each in near) for label, skeletons in read.items()}
    closest = max(close, key=close.__getitem__, default="")
    if dialect:
        wanted = f"dialect {dialect!r} knows none"
    elif candidates:
        wanted = f"the table of {' and that of '.join(family.name for family in candidates)} knows none"
    elif types:
        wanted = f"the model type {types[0]!r} of config.json is unknown, and no table knows any"
    else:
        wanted = "no table that answers to names alone knows any"
    first_names = ", ".join(names[:3]) or "(no tensors)"
    model = f" (config.json has model_type {types[0]!r})" if types and (candidates or dialect) else ""
    ways = _ways(types)
    # One name in twenty is like one of almost any table; half of them are not.
    known = samples and closest and 2 * close[closest] >= len(samples)
    hint = f"Closest: {closest}\n{ways}" if known else ways
    return refuse("UNKNOWN_FAMILY", f"{wanted} of the tensor names: {first_names}{model}", hint=hint)


def _no_such_dialect(label: str, known: Sequence[str], candidates: Sequence[Family]) -> TransaxleError:
    """Build the refusal of a source's dialect that none of the families has, with the nearest name."""
    close = difflib.get_close_matches(label.lower(), [*known, *(each.partition("@")[0] for each in known)], 1)
    whose = f"family {' and family '.join(f.name for f in candidates)} has" if candidates else "there is"
    message = f"{whose} no dialect {label!r}; there are: {', '.join(known)}"
    if label == IDENTITY:
        hint = f"Only a target can be {IDENTITY} (--to {IDENTITY}); open the source without a dialect."
    else:
        hint = f"Did you mean {close[0]}?" if close else "Add one with --rules FILE."
    return refuse("AMBIGUOUS", message, hint=hint)


def _unknown_type(types: Sequence[str], hint: str) -> TransaxleError:
    message = f"the model type {types[0]!r} of config.json is unknown: no table is for it"
    return refuse("UNKNOWN_FAMILY", message, hint=hint)


def _ways(types: Sequence[str]) -> str:
    """Return what can be done with a model that no table knows, a line each: transformers may know its model type."""
    own = "To keep its names:  --to safetensors:identity  (or dcp:identity and so on)"
    if not types:
        config = "Names show few families. To say which it is:  --config FILE  (its config.json), or --family NAME"
        return f"{config}\n{own}\nTo add a table:  --rules FILE"
    name = re.sub(r"\W", "_", types[0])
    file = f"{name}.rules"
    return (
        f"{own}\nTo derive its table from transformers:  --derive (of convert and plan)\n"
        f"or once, for all commands:  transaxle derive FOLDER -o {file}  and then  --rules {file}"
    )


def check_same(config: Mapping[str, Any], said: Mapping[str, Any], axes: Mapping[str, int]) -> None:
    """Check that a config has the sizes that a checkpoint's own files say, and no smaller a vocabulary.

    Args:
        config: of the model.
        said: by the checkpoint's own files.
        axes: sizes that the user gives: they decide.

    Raises:
        Refused: SHAPE_MISMATCH.
    """
    both = [key for key in _KNOWN_TO_RUN if config.get(key) is not None and key in said]
    differing = [key for key in both if all(config.get(same) != said[key] for same in _SAME.get(key, (key,)))]
    if differing:
        theirs, ours = (", ".join(f"{key} {of[key]!r}" for key in differing) for of in (config, said))
        message = f"the config says {theirs}, but the run that saved the checkpoint says {ours}"
        hint = "Give the config.json of this model, or none: its sizes are known."
        raise refuse("SHAPE_MISMATCH", message, hint=hint)
    kept, rows = config.get(_VOCABULARY), said.get(_VOCABULARY)
    if isinstance(kept, int) and isinstance(rows, int) and kept < rows and _ROWS not in axes:
        message = (
            f"the config says {_VOCABULARY} {kept}, but the run that saved the checkpoint says {rows}; "
            f"{rows - kept} rows of its vocabulary would be left out"
        )
        hint = f"Give the config.json of this model; if these rows only pad its vocabulary: --axis {_ROWS}={kept}."
        raise refuse("SHAPE_MISMATCH", message, hint=hint)


def _check_axes(family: Family, given: Mapping[str, int]) -> None:
    """Refuse sizes of axes that a family does not have: they would change nothing.

    Raises:
        UsageError: UNKNOWN_AXIS.
    """
    for axis in given:
        if axis not in family.axes:
            message = f"the family {family.name} has no axis {axis!r}"
            raise refuse("UNKNOWN_AXIS", message, hint=f"Axes: {', '.join(sorted(family.axes))}.")


class StoredNames:
    """The stored names of a checkpoint, read through its tables: found out once, and shared by all views of its files.

    Args:
        container: the files.
        settings: what the user said about them.
        undecoded: the names where they are stored, if tensors are decoded here.
    """

    def __init__(self, container: Container, settings: Settings, undecoded: StoredNames | None) -> None:
        self._container = container
        self._settings = settings
        self._undecoded = undecoded

    @cached_property
    def manifest(self) -> Manifest | None:
        """The checkpoint's `transaxle.json`; None where there is none, or its files were changed since."""
        return read_manifest(self._container) if self._undecoded is None else self._undecoded.manifest

    @cached_property
    def catalog(self) -> Catalog:
        """The stored tensors as tables see them: an encoded tensor is one entry."""
        has_modelopt = MODELOPT_CONFIG in self._container.carried
        modelopt = stored_config(self._container.storage, MODELOPT_CONFIG) if has_modelopt else None
        return catalog(self._container, self.config, modelopt)

    @cached_property
    def is_adapter(self) -> bool:
        """Whether the tensors are those of an adapter, under the names of peft's files."""
        if ADAPTER_CONFIG not in self._container.carried or adapter_config(self._container) is None:
            return False
        return any(name.startswith(ADAPTED) for name in self._container.entries)

    @cached_property
    def decoded(self) -> Mapping[str, EncodedTensor]:
        """Tensors that are plain here and encoded where they are stored, by table name."""
        if self._undecoded is None:
            return {}
        stored_encoded = self._undecoded.catalog.encoded
        return {name: tensor for name, tensor in stored_encoded.items() if name not in self.catalog.encoded}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json: the user's, or the checkpoint's; without one, what its own files say of sizes."""
        if self._settings.config is not None:
            return self._settings.config
        if CONFIG in self._container.carried:
            return stored_config(self._container.storage)
        return self._container.config

    @property
    def recognised(self) -> Recognised:
        """Family and dialect of the stored names.

        Raises:
            UsageError: UNKNOWN_FAMILY, AMBIGUOUS.
        """
        if isinstance(self.recognition, TransaxleError):
            raise self.recognition
        return self.recognition

    @cached_property
    def recognition(self) -> Recognised | TransaxleError:
        """Family and dialect of the stored names, or why they are not known."""
        settings = self._settings
        dialect = settings.dialect
        try:
            family = settings.family and pick_family(settings.family, settings.families).name
            known = None if self.manifest is None else settings.families.get(self.manifest.family or "")
            if self.manifest is not None and known is not None:
                family = family or known.name
                if dialect is None and family == known.name and known.dialect(self.manifest.dialect) is not None:
                    dialect = self.manifest.dialect
            if ADAPTER_CONFIG in self._container.carried:
                check_model(self._container)
            names = tuple(self.catalog.entries)  # state may have names of another dialect
            weights = tuple(name for name in names if not name.startswith(OPTIM)) or names
            found = recognise(weights, self.config, settings.families, family, dialect)
            _check_axes(found.family, settings.axes)
        except TransaxleError as error:
            return error
        return found

    def keep(self, label: str) -> bool:
        """Tell whether names are those of a dialect already, and neither a config nor the user says more of them."""
        said = self._settings.family or self._settings.dialect or self._settings.axes or model_types(self.config)
        return not said and keep_names(self.catalog.entries, label, self._settings.families)

    @cached_property
    def sizes(self) -> Sizes:
        """Axis sizes: the user's, the manifest's (unless the user gave a config), the config's.

        Raises:
            Refused: SHAPE_MISMATCH where the user's config is that of another model.
        """
        check_same(self.config, self._container.config, self._settings.axes)
        trusted = self.manifest if self._settings.config is None else None
        axes = {} if trusted is None else trusted.axes
        reading, names = self.recognised, self.catalog.entries
        sizes = Sizes(reading.family, self.config, {**axes, **self._settings.axes})
        return with_counts(sizes, reading.dialect, reading.prefix, names)

    @cached_property
    def bound(self) -> BoundNames:
        """The stored names read through the dialect; the optimizer's state through one of its own, where another of the
        family's reads more of it: a program may save weights under the hub's names, and state under those in memory.
        """
        reading = self.recognised
        catalog = self.catalog
        stored_as = {name: tensor.encoding.name for name, tensor in (*catalog.encoded.items(), *self.decoded.items())}
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
        except (
            TransaxleError
        ):  # no dialect reads its names, or two do; then it has none, and is refused where it has to
            return bound
        if of_state.matched == of_weights.matched:
            return bound
        return with_state_of(bound, of_state.dialect, of_state.prefix, self.sizes, catalog.entries)
