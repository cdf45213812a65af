"""Recognition: which family and dialect a checkpoint is of; its config and names tell, never its shapes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transaxle.axes.layout.bind import Bound, bind, group, score, split_slot
from transaxle.axes.notation.family import Dialect, Family, LogicalTensor, Sizes
from transaxle.axes.notation.name import skeleton
from transaxle.encodings.conventions.quantization import MODELOPT_CONFIG
from transaxle.encodings.encoding import Encoded
from transaxle.engine.checkpoint.manifest import Manifest, read_manifest
from transaxle.engine.checkpoint.peft_adapter import ADAPTER_CONFIG, check_model
from transaxle.engine.checkpoint.settings import CONFIG, Settings, stored_config
from transaxle.engine.views.encoded import Catalog, catalog
from transaxle.errors import TransaxleError, refuse
from transaxle.families import Families
from transaxle.formats.catalog.catalog import Container

IDENTITY = "identity"
"""The dialect of every checkpoint: each tensor under its own name."""
_CLOSE = 8
"""Names of families that a refusal lists."""
_KNOWN_TO_RUN = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim",
)  # fmt: skip
"""Keys of a config of which a checkpoint that says them itself must say the same: sizes of axes that are merged into
one dim can be exchanged, and the shapes still fit."""


@dataclass(frozen=True, slots=True)
class Recognised:
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
    close = difflib.get_close_matches(label, families, _CLOSE)
    if of_type:
        close = [family.name for family in of_type]
    near = f"close to it: {', '.join(close)}; " if close else ""
    hint = (
        f"Did you mean {close[0]}?" if close else "Add one with --rules FILE; `transaxle info` lists those there are."
    )
    raise refuse("UNKNOWN_FAMILY", f"no family {label!r}; {near}{len(families)} are known", hint=hint)


def pick_dialect(family: Family, label: str, formats: Sequence[str] = ()) -> Dialect:
    """Return a dialect of a family by its label.

    Args:
        family: the family.
        label: what the user typed.
        formats: names that it could have been as well.

    Raises:
        UsageError: AMBIGUOUS, listing the dialects there are.
    """
    match = family.dialect(label)
    if match is None:
        close = difflib.get_close_matches(label, [*family.labels, *(d.name for d in family.dialects), IDENTITY], 1)
        besides = f"; and no format is called so (known: {', '.join(formats)})" if formats else ""
        raise refuse(
            "AMBIGUOUS",
            f"family {family.name} has no dialect {label!r}; it has: {', '.join(family.labels)}, {IDENTITY}{besides}",
            hint=f"Did you mean {close[0]}?" if close else "add one with --rules FILE",
        )
    return match


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the model types that a config states: its own, and that of the text model in it."""
    nested = config.get("text_config")
    levels = [config, nested] if isinstance(nested, Mapping) else [config]
    return [level["model_type"] for level in levels if isinstance(level.get("model_type"), str)]


def _absent(reading: Recognised, grouped: Mapping[str, list[str]]) -> list[LogicalTensor]:
    """Return the family's tensors that the names lack; a tensor that may be stored as a tie does not count."""
    present = {skeleton(names[0][len(reading.prefix) :]) for names in grouped.values()}
    present_components = {
        c for line in reading.dialect.lines if line.name.skeleton in present for c in line.expression.components
    }
    present_components |= {tie.alias for tie in reading.family.ties}
    return [tensor for name, tensor in reading.family.tensors.items() if name not in present_components]


def _most_complete(readings: Sequence[Recognised], grouped: Mapping[str, list[str]]) -> list[Recognised]:
    """Return the readings that lack no mandatory tensor and the fewest optional ones.

    All names of a Llama are also names of a Qwen3, which always has more; all names of a Qwen3 are names of a Qwen3-MoE
    without experts. Where every reading lacks something (one shard of several), all of them are returned.
    """
    absent = [(reading, _absent(reading, grouped)) for reading in readings]
    complete = [(reading, len(lacks)) for reading, lacks in absent if all(t.when is not None for t in lacks)]
    fewest = min((count for _, count in complete), default=0)
    return [reading for reading, count in complete if count == fewest] or list(readings)


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
    grouped = group(split_slot(name)[0] for name in names)
    types = model_types(config)
    candidates = [pick_family(family, families)] if family is not None else families.of_types(types)
    if candidates:
        readings = [reading for candidate in candidates for reading in _readings(candidate, grouped, dialect)]
    else:
        readings = _best_readings(families, grouped, dialect)
    if not readings:
        raise _nothing(names, types, candidates or families.that_answer_to_names(), dialect)
    most = max(r.matched for r in readings)
    best = _most_complete([r for r in readings if r.matched == most], grouped)
    distinct = {(r.family.name, _reading(r, grouped)): r for r in reversed(best)}
    if len(distinct) > 1 and types and family is None and not candidates:
        ways = _ways(types)
        raise _unknown_type(types, f"{ways[0].upper()}{ways[1:]}")
    if len(distinct) > 1:
        listed = ", ".join(f"{r.family.name}:{r.dialect.label}" for r in best)
        names_only = "" if types else " (there is no config.json to decide)"
        raise refuse(
            "AMBIGUOUS",
            f"several tables fit equally well: {listed} each read {most} of {len(names)} names in different "
            f"ways{names_only}",
            hint="Choose with --config FILE, or with --family NAME and --from DIALECT (config=, family=, dialect=).",
        )
    chosen = best[0]
    if family is None and types and not any(t in chosen.family.model_types for t in types):
        look = f"Its names look like {chosen.family.name}: if that is right, give --family {chosen.family.name}"
        raise _unknown_type(types, f"{look}; or {_ways(types)}")
    return chosen


def _reading(reading: Recognised, grouped: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the rules by which a dialect reads the names: dialects with equal rules are one reading."""
    texts: set[str] = set()
    for names in grouped.values():
        name = names[0][len(reading.prefix) :]
        lines = reading.dialect.by_skeleton.get(skeleton(name), ())
        texts.update(line.text for line in lines if line.name.match(name) is not None)
    return tuple(sorted(texts))


def _nothing(
    names: Sequence[str], types: Sequence[str], candidates: Sequence[Family], dialect: str | None
) -> TransaxleError:
    """Build the refusal where no dialect reads any name, with the closest one."""
    samples = list(dict.fromkeys(skeleton(name) for name in names[:200]))
    close: list[str] = []
    for family in candidates:
        for candidate in family.dialects:
            matches = [m for s in samples[:20] for m in difflib.get_close_matches(s, candidate.by_skeleton, 1, 0.8)]
            if matches:
                close.append(f"{family.name}:{candidate.label}")
    wanted = f"dialect {dialect!r} knows none" if dialect else "no table knows any"
    first_names = ", ".join(names[:3]) or "(no tensors)"
    model = f" (config.json has model_type {types[0]!r})" if types else ""
    ways = _ways(types)
    hint = f"Closest: {close[0]}; if it is not that, {ways}" if close else f"{ways[0].upper()}{ways[1:]}"
    return refuse("UNKNOWN_FAMILY", f"{wanted} of the tensor names: {first_names}{model}", hint=hint)


def _unknown_type(types: Sequence[str], hint: str) -> TransaxleError:
    return refuse("UNKNOWN_FAMILY", f"config.json has model_type {types[0]!r}, which no table knows", hint=hint)


def _ways(types: Sequence[str]) -> str:
    """Return what can be done with a model that no table knows: its model type may be one that transformers knows."""
    own = 'convert it under its own names, into any format, with --to FORMAT:identity (to="FORMAT:identity")'
    if not types:
        return f"{own}, or add a table with --rules FILE."
    name = re.sub(r"\W", "_", types[0])
    return (
        f"{own}; or let --derive (of convert and plan) derive its table from transformers; or keep a derived table:  "
        f"transaxle derive FOLDER -o {name}.rules  (FOLDER has its config.json; often the model type alone will do), "
        f"and give --rules {name}.rules."
    )


def check_same(config: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Check that a config has the sizes that a checkpoint's own files say.

    Raises:
        Refused: SHAPE_MISMATCH.
    """
    both = [key for key in _KNOWN_TO_RUN if config.get(key) is not None and key in said]
    differing = [key for key in both if config[key] != said[key]]
    if differing:
        theirs, ours = (", ".join(f"{key} {of[key]!r}" for key in differing) for of in (config, said))
        message = f"the config says {theirs}, but the run that saved the checkpoint says {ours}"
        hint = "Give the config.json of this model, or none: its sizes are known."
        raise refuse("SHAPE_MISMATCH", message, hint=hint)


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
    def decoded(self) -> Mapping[str, Encoded]:
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
            return recognise(tuple(self.catalog.entries), self.config, settings.families, family, dialect)
        except TransaxleError as error:
            return error

    @cached_property
    def sizes(self) -> Sizes:
        """Axis sizes: the user's, the manifest's (unless the user gave a config), the config's.

        Raises:
            Refused: SHAPE_MISMATCH where the user's config is that of another model.
        """
        check_same(self.config, self._container.config)
        trusted = self.manifest if self._settings.config is None else None
        axes = {} if trusted is None else trusted.axes
        return Sizes(self.recognised.family, self.config, {**axes, **self._settings.axes})

    @cached_property
    def bound(self) -> Bound:
        """The stored names read through the dialect."""
        reading = self.recognised
        catalog = self.catalog
        stored_as = {name: tensor.encoding.name for name, tensor in (*catalog.encoded.items(), *self.decoded.items())}
        names = tuple(catalog.entries)
        return bind(names, reading.family, reading.dialect, self.sizes, reading.prefix, stored_as)
