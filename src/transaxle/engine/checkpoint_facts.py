"""Facts as data, for `info`, `sharding`, `check-rules` and their pages.

What a checkpoint is recognised as, and what it holds: the data of `transaxle info`.

Who holds what of a live model: plain data that ranks have agreed on, to be printed, written as JSON, or drawn.

What a table declares, and what it reads of a checkpoint: the data of `transaxle check-rules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import Any

from msgspec.structs import replace

from transaxle.axes.layout.bind import group, score, split_slot
from transaxle.axes.notation.family import Dialect, Family
from transaxle.axes.notation.name import skeleton
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.manifest import load, stale
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.wording import notebook, plural, size
from transaxle.errors import Code, Refusal, TransaxleError, refuse
from transaxle.families import builtin
from transaxle.formats.catalog import NUMBERS, nbytes
from transaxle.formats.training_state import OPTIMIZER

JsonFacts = dict[str, Any]
_FACTS = (
    "model_type", "architectures", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "tie_word_embeddings",
    "torch_dtype", "dtype", "quantization_config",
)  # fmt: skip
"""Config keys that people look for first."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The amount of data in a checkpoint."""

    tensors: int
    """Stored tensors."""
    optimizer: int
    """Those of them that are the optimizer's state."""
    parameters: int
    """Elements of the model."""
    bytes: int
    """Bytes of all of them."""
    files: int
    """Files that hold tensors."""


def totals(checkpoint: Checkpoint) -> Totals:
    """Count the tensors of a checkpoint, in the dialect of the view."""
    tensors = list(checkpoint.values())
    tensor_files = {extent.file for entry in checkpoint.container.entries.values() for extent in entry.extents}
    tensor_files.discard(NUMBERS)  # they are in a pickle
    state = sum(tensor.name.startswith(OPTIMIZER) for tensor in tensors)
    return Totals(len(tensors), state, checkpoint.parameters, sum(t.nbytes for t in tensors), len(tensor_files))


def checkpoint_facts(checkpoint: Checkpoint) -> JsonFacts:
    """Return what is known of a checkpoint from its headers."""
    return {"path": checkpoint.path, **_recognised(checkpoint), **_contents(checkpoint)}


def _recognised(checkpoint: Checkpoint) -> JsonFacts:
    """Return family and dialect with everything that follows from them, or why they are unknown."""
    beside = checkpoint.container.beside
    facts: JsonFacts = {"format": checkpoint.format, "family": None, "dialect": None, "reason": None, "prefix": None}
    facts |= {
        "replaces": False,
        "read": None,
        "names": sum(name not in beside for name in checkpoint.catalog.entries),
        "unknown": [],
        "axes": {},
        "tied": [],
        "aliases": {},
    }
    try:
        reading = checkpoint.recognised
        bound = checkpoint.bound
        sizes = checkpoint.sizes
        ties = [tie for tie in reading.family.ties if sizes.holds(tie.when, {})]
        facts |= {
            "family": reading.family.name,
            "replaces": checkpoint.settings.families.replaces(reading.family.name),
            "dialect": reading.dialect.label,
            "prefix": reading.prefix,
            "read": sum(len(names) for names in bound.names.values()),
            "unknown": [name for name in bound.unknown if name not in beside],
            "axes": dict(sizes.at({})),
            "tied": [f"{tie.alias} = {tie.original}" for tie in ties],
        }
    except TransaxleError as error:
        if checkpoint.settings.family or checkpoint.settings.dialect:
            raise
        facts["reason"] = error.refusals[0].as_json()
    if checkpoint.manifest is not None:
        facts["aliases"] = dict(checkpoint.manifest.aliases)
    return facts


def _contents(checkpoint: Checkpoint) -> JsonFacts:
    """Return the amount of data by dtype and file, and whether it is as it was written."""
    amount = totals(checkpoint)
    dtypes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for tensor in checkpoint.values():
        dtypes[tensor.dtype] += tensor.nbytes
        count[tensor.dtype] += 1
    container = checkpoint.container
    return {
        "tensors": amount.tensors,
        "optimizer": amount.optimizer,
        "parameters": amount.parameters,
        "bytes": amount.bytes,
        "config": {key: checkpoint.config[key] for key in _FACTS if key in checkpoint.config},
        "dtypes": {code: {"tensors": count[code], "bytes": nbytes} for code, nbytes in dtypes.most_common()},
        "encodings": _encodings(checkpoint),
        "misfits": [refusal.as_json() for refusal in checkpoint.catalog.refusals],
        "files": dict(container.files),
        "carried": list(container.carried),
        "ignored": list(container.ignored),
        "metadata": dict(container.metadata),
        "manifest": _manifest(checkpoint),
    }


def _encodings(checkpoint: Checkpoint) -> list[JsonFacts]:
    """Return the number of tensors in each encoding."""
    count = Counter((tensor.encoding.name, tensor.convention) for tensor in checkpoint.encoded.values())
    return [
        {"encoding": encoding, "convention": convention, "tensors": tensors}
        for (encoding, convention), tensors in count.most_common()
    ]


def _manifest(checkpoint: Checkpoint) -> JsonFacts:
    """Return whether there is a manifest, and whether its files are unchanged."""
    problems: list[Refusal] = []
    made_of: JsonFacts = {}
    try:
        manifest = load(checkpoint.container)
        if manifest is None:
            return {"state": "none", "problems": []}
        made_of = {"source": manifest.source} if manifest.source else {}
        problems = stale(manifest, checkpoint.container)
    except TransaxleError as error:
        problems = list(error.refusals)
    state = "stale" if problems else "matches"
    return {"state": state, "problems": [problem.as_json() for problem in problems], **made_of}


Share = tuple[tuple[tuple[int, int], ...], ...]
"""Per dim, the intervals of positions that a rank holds."""


@dataclass(frozen=True)
class HeldTensor:
    """One tensor as the ranks hold it."""

    name: str
    """Its name."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Elements along each dim of the whole tensor."""
    held: Mapping[int, Share]
    """What each rank holds that has any of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return nbytes(self.dtype, self.shape)

    @cached_property
    def rank_bytes(self) -> dict[int, int]:
        """Rank -> bytes that it holds; ranks with none are absent."""
        sizes = {share: self._bytes(share) for share in set(self.held.values())}
        return {rank: sizes[share] for rank, share in sorted(self.held.items()) if sizes[share]}

    @cached_property
    def copies(self) -> dict[int, int]:
        """Rank -> on how many ranks there is what it holds, itself included."""
        ranks: dict[Share, int] = {}
        for share in self.held.values():
            ranks[share] = ranks.get(share, 0) + 1
        return {rank: ranks[self.held[rank]] for rank in self.rank_bytes}

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Into how many different parts each dim is cut."""
        return tuple(len({share[dim] for share in self.held.values()}) for dim in range(len(self.shape)))

    def _bytes(self, share: Share) -> int:
        shape = tuple(sum(stop - start for start, stop in intervals) for intervals in share)
        return nbytes(self.dtype, shape) if prod(shape) else 0


@dataclass(frozen=True, repr=False)
class Sharding:
    """Who holds what of a live model."""

    ranks: tuple[int, ...]
    """All ranks, by their number in the job."""
    tensors: tuple[HeldTensor, ...]
    """Its tensors; one that has several names is here once."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of a tensor -> the one under which it is in `tensors`."""
    coordinates: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Rank -> named dim of the tensors' meshes -> where the rank is along it; ranks on none are absent."""

    @property
    def nbytes(self) -> int:
        """Bytes of the model, each tensor counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def rank_bytes(self) -> dict[int, int]:
        """Rank -> bytes that it holds."""
        found = dict.fromkeys(self.ranks, 0)
        for tensor in self.tensors:
            for rank, count in tensor.rank_bytes.items():
                found[rank] += count
        return found

    @property
    def imbalance(self) -> float:
        """By how much the rank that holds most is above the mean: 0 where all hold as much, 1 for twice as much."""
        held = self.rank_bytes.values()
        return max(held) * len(held) / sum(held) - 1 if sum(held) else 0.0

    @property
    def spare_bytes(self) -> int:
        """Bytes on all ranks together beyond one copy of what they hold."""
        held = sum(self.rank_bytes.values())
        once = 0
        for tensor in self.tensors:
            once += sum(count / tensor.copies[rank] for rank, count in tensor.rank_bytes.items()).__round__()
        return held - once

    def __repr__(self) -> str:
        return f"<sharding {self}>"

    def __str__(self) -> str:
        """Return what `print` shows: one line."""
        most = max(self.rank_bytes.values(), default=0)
        return (
            f"{plural(len(self.tensors), 'tensor')}, {size(self.nbytes)} on {plural(len(self.ranks), 'rank')} · "
            f"at most {size(most)} on one, {100 * self.imbalance:.1f} % above the mean · "
            f"{size(self.spare_bytes)} of copies"
        )

    def _repr_html_(self) -> str:
        return notebook(str(self))

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return {
            "ranks": list(self.ranks),
            "bytes": self.nbytes,
            "rank_bytes": {str(rank): count for rank, count in self.rank_bytes.items()},
            "imbalance": self.imbalance,
            "spare_bytes": self.spare_bytes,
            "aliases": dict(self.aliases),
            "coordinates": {str(rank): dict(places) for rank, places in self.coordinates.items()},
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "held": {str(rank): share for rank, share in sorted(tensor.held.items())},
                }
                for tensor in self.tensors
            ],
        }


_MISSHAPEN: Code = "SHAPE_MISMATCH"
_TENSORS, _MANIFEST = "the tensors", "transaxle.json"
_TOLD, _TRIED = 3, 50
"""Names that a refusal shows, and those for which it looks for a line that is close."""
_NOTHING: JsonFacts = {
    "dialect": None, "unknown": [], "ignored": [], "misshapen": [], "axes": {}, "absent_keys": [], "writes": {},
}  # fmt: skip
"""What is read of a checkpoint by a family that knows none of its names."""


def rules_facts(file: str, checkpoint: str | None = None) -> JsonFacts:
    """Return what a table declares, and what its families read of a checkpoint.

    Raises:
        TransaxleError: every mistake in the table; UNKNOWN_FAMILY where it reads no name of the checkpoint.
    """
    known = settings(rules=file).families
    declared = [known[name] for name, entry in known.entries.items() if not entry.file]
    facts: JsonFacts = {
        "file": file,
        "families": [_declared(family) | {"replaces": known.replaces(family.name)} for family in declared],
    }
    if checkpoint is None:
        return facts
    reads = [_read(checkpoint, file, family) for family in declared]
    if declared and not any(map(reads_any, reads)):
        raise _unread(checkpoint, declared)
    return facts | {"checkpoint": checkpoint, "fits": not any(map(_shapes_differ, reads)), "reads": reads}


def _declared(family: Family) -> JsonFacts:
    new = [dialect for dialect in family.dialects if not _ships(family, dialect)]
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "axes": {axis: None if formula is None else formula.text for axis, formula in family.axes.items()},
        "unsized": _unsized(family),
        "tensors": list(family.tensors),
        "dialects": {dialect.label: len(dialect.lines) for dialect in new},
        "says_anew": _said_anew(family),
    }


def _said_anew(family: Family) -> list[JsonFacts]:
    """Return the statements of other families that a family replaces by its own."""
    replaced = () if family.written is None else family.written.replaced
    return [
        {
            "of": each.inherited.owner,
            "taken": " ".join(each.inherited.text.split()),
            "own": " ".join(each.replacement.text.split()),
        }
        for each in replaced
    ]


def _unsized(family: Family) -> list[str]:
    """Return the name axes without a formula: their size is known from a checkpoint's names only."""
    return [axis for axis, formula in family.axes.items() if formula is None and axis in family.name_axes]


def _ships(family: Family, dialect: Dialect) -> bool:
    shipped_family = builtin().get(family.name)
    return shipped_family is not None and any(dialect is shipped for shipped in shipped_family.dialects)


def _read(ckpt: str, file: str, family: Family) -> JsonFacts:
    """Return which names of a checkpoint each dialect of a family reads, and what prevents writing the others."""
    with open_checkpoint(ckpt, rules=file, family=family.name) as checkpoint:
        names = checkpoint.catalog.entries
        grouped = group(split_slot(name)[0] for name in names)
        counts = {dialect.label: score(grouped, dialect)[0] for dialect in family.dialects}
        if not any(counts.values()):
            return {**_NOTHING, "family": family.name, "tensors": len(names), "names_read": counts}
        source_dialect = checkpoint.recognised.dialect
        own_refusals = _written(checkpoint, source_dialect)["refusals"]
        return {
            "family": family.name,
            "tensors": len(checkpoint),
            "names_read": counts,
            "dialect": source_dialect.label,
            "unknown": list(checkpoint.bound.unknown),
            "ignored": list(checkpoint.bound.ignored),
            "misshapen": [refusal for refusal in own_refusals if refusal["code"] == _MISSHAPEN],
            "axes": dict(checkpoint.sizes.at({})),
            "absent_keys": _absent_keys(checkpoint),
            "writes": {d.label: _written(checkpoint, d) for d in family.dialects if d.label != source_dialect.label},
        }


def reads_any(read: JsonFacts) -> bool:
    """Tell whether any dialect reads any name."""
    return any(read["names_read"].values())


def _unread(ckpt: str, families: Sequence[Family]) -> TransaxleError:
    """Build the refusal of a checkpoint of which no family reads a name, with the line closest to one."""
    with open_checkpoint(ckpt) as checkpoint:
        names = list(checkpoint)
    lines = {key: found[0] for each in families for d in each.dialects for key, found in d.by_skeleton.items()}
    close = [(name, match) for name in names[:_TRIED] for match in get_close_matches(skeleton(name), lines, 1, 0.7)]
    closest = f" Closest to {close[0][0]}:  {lines[close[0][1]].text}" if close else ""
    listed, shown = ", ".join(family.name for family in families), ", ".join(names[:_TOLD]) or "(no tensors)"
    return refuse(
        "UNKNOWN_FAMILY",
        f"no dialect of {listed} reads any of its {plural(len(names), 'name')}: {shown}",
        file=ckpt,
        hint=f"A line begins with the whole name; only what all names begin with may be missing.{closest}",
    )


def _absent_keys(checkpoint: Checkpoint) -> list[JsonFacts]:
    """Return the axes in use whose formula has no value because the config lacks its keys."""
    sizes, family = checkpoint.sizes, checkpoint.recognised.family
    if not sizes.config:
        return []
    lines = {line for line, _ in checkpoint.bound.names}
    used = {axis for line in lines for axis in (*line.name.axes, *line.expression.axes)}
    from_config = replace(sizes, overrides={}).at({})
    absent = []
    for axis, formula in family.axes.items():
        if formula is None or axis in from_config or axis not in used:
            continue
        keys = sorted(formula.names - sizes.settings.keys() - (family.axes.keys() - {axis}))
        if keys:
            absent.append({"axis": axis, "keys": keys, "size_from": _MANIFEST if axis in sizes.overrides else _TENSORS})
    return absent


def _shapes_differ(read: JsonFacts) -> bool:
    refusals = [refusal for outcome in read["writes"].values() for refusal in outcome["refusals"]]
    return bool(read["misshapen"]) or any(refusal["code"] == _MISSHAPEN for refusal in refusals)


def _written(checkpoint: Checkpoint, dialect: Dialect) -> JsonFacts:
    """Return the result of writing a checkpoint in another dialect, or everything that prevents it."""
    try:
        translation = checkpoint.translation(dialect.label)
    except TransaxleError as error:
        return {"tensors": 0, "refusals": [refusal.as_json() for refusal in error.refusals]}
    unknown = checkpoint.foreign(dialect.label) or checkpoint.half_converted(dialect.label, translation)
    refusals = (*unknown, *translation.refusals)
    return {"tensors": len(translation.targets), "refusals": [refusal.as_json() for refusal in refusals]}
