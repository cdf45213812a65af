"""Data for `info`, `sharding`, `check-rules` and their report pages.

**info**: how a checkpoint is recognised, and what it contains.

**sharding**: which rank of a live model holds which shard of each tensor. A sharding is plain data on which all ranks
agree; it can be printed, stored as JSON or drawn.

**check-rules**: what a rules file (a table of tensor names) declares, and which tensor names of a checkpoint the table
can read.
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

from transaxle.arguments import PathLike, read_path
from transaxle.axes.layout.bind import group, score, split_slot
from transaxle.axes.notation.family import Dialect, Family
from transaxle.axes.notation.name import skeleton
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.manifest import load, stale
from transaxle.engine.checkpoint.promised import find_lacks
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
"""Config keys that `info` shows before the others, because users look for them first."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Numbers of tensors, parameters, bytes and files of a checkpoint."""

    tensors: int
    """Number of stored tensors."""
    optimizer: int
    """Number of stored tensors that are optimizer state."""
    parameters: int
    """Number of elements in all tensors of the model."""
    bytes: int
    """Size of all tensors in bytes."""
    files: int
    """Number of files that contain tensors."""


def totals(checkpoint: Checkpoint) -> Totals:
    """Count the tensors, parameters, bytes and files of a checkpoint, with the tensors of the dialect in which it is
    viewed.
    """
    tensors = list(checkpoint.values())
    tensor_files = {extent.file for entry in checkpoint.container.entries.values() for extent in entry.extents}
    tensor_files.discard(NUMBERS)  # the entry that stands for plain numbers is not a file on disk
    state = sum(tensor.name.startswith(OPTIMIZER) for tensor in tensors)
    return Totals(len(tensors), state, checkpoint.parameters, sum(t.nbytes for t in tensors), len(tensor_files))


def checkpoint_facts(checkpoint: Checkpoint) -> JsonFacts:
    """Return the facts about a checkpoint that can be read from its files' headers, without reading tensor data."""
    place = {"path": checkpoint.path, "inside": checkpoint.container.inside}
    return {**place, **_reading_facts(checkpoint), **_contents(checkpoint)}


def _reading_facts(checkpoint: Checkpoint) -> JsonFacts:
    """Return family and dialect of a checkpoint with all facts that depend on them, or the reason why they are
    unknown.
    """
    training_names = checkpoint.container.beside
    facts: JsonFacts = {"format": checkpoint.format, "family": None, "dialect": None, "reason": None, "prefix": None}
    facts |= {
        "replaces": False,
        "read": None,
        "names": sum(name not in training_names for name in checkpoint.catalog.entries),
        "unknown": [],
        "axes": {},
        "tied": [],
        "aliases": {},
    }
    try:
        reading = checkpoint.reading
        bound = checkpoint.bound
        sizes = checkpoint.sizes
        ties = [tie for tie in reading.family.ties if sizes.holds(tie.when, {})]
        facts |= {
            "family": reading.family.name,
            "replaces": checkpoint.settings.families.replaces(reading.family.name),
            "dialect": reading.dialect.label,
            "prefix": reading.prefix,
            "read": sum(len(names) for names in bound.names.values()),
            "unknown": [name for name in bound.unknown if name not in training_names],
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
    """Return the bytes per dtype and per file, and whether the files are unchanged since they were written."""
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
        "config_path": container.config_path,
        "config": {key: checkpoint.config[key] for key in _FACTS if key in checkpoint.config},
        "dtypes": {code: {"tensors": count[code], "bytes": nbytes} for code, nbytes in dtypes.most_common()},
        "encodings": _encodings(checkpoint),
        "misfits": [refusal.as_json() for refusal in checkpoint.catalog.refusals],
        "missing": [lack.as_json() for lack in find_lacks(checkpoint)],
        "files": dict(container.files),
        "carried": list(container.carried),
        "ignored": list(container.ignored),
        "metadata": dict(container.metadata),
        "manifest": _manifest(checkpoint),
    }


def _encodings(checkpoint: Checkpoint) -> list[JsonFacts]:
    """Return the number of tensors in each number format."""
    count = Counter((tensor.encoding.name, tensor.convention) for tensor in checkpoint.encoded.values())
    return [
        {"encoding": encoding, "convention": convention, "tensors": tensors}
        for (encoding, convention), tensors in count.most_common()
    ]


def _manifest(checkpoint: Checkpoint) -> JsonFacts:
    """Return whether the checkpoint has a manifest, and whether the files that the manifest lists are unchanged."""
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


RankPart = tuple[tuple[tuple[int, int], ...], ...]
"""For each dim of a tensor, the intervals of indices that a rank holds."""


@dataclass(frozen=True)
class ShardedTensor:
    """One tensor of a live model, with the shard that each rank holds."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Safetensors code of the tensor's dtype."""
    shape: tuple[int, ...]
    """Number of elements along each dim of the whole tensor."""
    held: Mapping[int, RankPart]
    """Rank -> shard of the tensor that it holds; ranks that hold no shard are absent."""

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return nbytes(self.dtype, self.shape)

    @cached_property
    def rank_bytes(self) -> dict[int, int]:
        """Rank -> size in bytes of the shard that it holds; ranks that hold no shard are absent."""
        sizes = {share: self._bytes(share) for share in set(self.held.values())}
        return {rank: sizes[share] for rank, share in sorted(self.held.items()) if sizes[share]}

    @cached_property
    def copies(self) -> dict[int, int]:
        """Rank -> number of ranks that hold the same shard of the tensor, including this rank."""
        ranks: dict[RankPart, int] = {}
        for share in self.held.values():
            ranks[share] = ranks.get(share, 0) + 1
        return {rank: ranks[self.held[rank]] for rank in self.rank_bytes}

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """For each dim, the number of different index ranges into which the dim is cut."""
        return tuple(len({share[dim] for share in self.held.values()}) for dim in range(len(self.shape)))

    def _bytes(self, share: RankPart) -> int:
        shape = tuple(sum(stop - start for start, stop in intervals) for intervals in share)
        return nbytes(self.dtype, shape) if prod(shape) else 0


@dataclass(frozen=True, repr=False)
class Sharding:
    """Which rank of a live model holds which shard of each tensor."""

    ranks: tuple[int, ...]
    """Numbers of all ranks of the distributed job."""
    tensors: tuple[ShardedTensor, ...]
    """All tensors of the model; a tensor with several names is listed once."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Additional name of a tensor -> the name under which `tensors` lists the tensor."""
    coordinates: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Rank -> mesh dim -> the rank's coordinate along that dim; ranks on no mesh are absent."""

    @property
    def nbytes(self) -> int:
        """Size of the model in bytes; each tensor is counted once, however many ranks hold it."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def rank_bytes(self) -> dict[int, int]:
        """Rank -> size in bytes of all shards that the rank holds."""
        bytes_by_rank = dict.fromkeys(self.ranks, 0)
        for tensor in self.tensors:
            for rank, count in tensor.rank_bytes.items():
                bytes_by_rank[rank] += count
        return bytes_by_rank

    @property
    def imbalance(self) -> float:
        """How far the largest rank exceeds the mean of all ranks in bytes: 0 if all hold equally much, 1 for twice the
        mean.
        """
        sizes = self.rank_bytes.values()
        return max(sizes) * len(sizes) / sum(sizes) - 1 if sum(sizes) else 0.0

    @property
    def spare_bytes(self) -> int:
        """Size in bytes of the redundant copies of tensors on all ranks together."""
        total = sum(self.rank_bytes.values())
        distinct = 0
        for tensor in self.tensors:
            distinct += sum(count / tensor.copies[rank] for rank, count in tensor.rank_bytes.items()).__round__()
        return total - distinct

    def __repr__(self) -> str:
        return f"<sharding {self}>"

    def __str__(self) -> str:
        """Return the line that `print(sharding)` shows."""
        largest = max(self.rank_bytes.values(), default=0)
        return (
            f"{plural(len(self.tensors), 'tensor')}, {size(self.nbytes)} on {plural(len(self.ranks), 'rank')} · "
            f"at most {size(largest)} on one, {100 * self.imbalance:.1f} % above the mean · "
            f"{size(self.spare_bytes)} of copies"
        )

    def _repr_html_(self) -> str:
        return notebook(str(self))

    def as_json(self) -> dict[str, Any]:
        """Return the sharding as plain JSON data."""
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
_SHOWN_NAMES, _COMPARED_NAMES = 3, 50
"""Largest number of tensor names that a refusal shows, and of names for which it looks for a similar table line."""
_NOTHING: JsonFacts = {
    "dialect": None, "unknown": [], "ignored": [], "misshapen": [], "axes": {}, "absent_keys": [], "writes": {},
}  # fmt: skip
"""Facts about a model family whose table reads none of a checkpoint's tensor names."""


def check_rules(rules: PathLike, path: PathLike | None = None) -> JsonFacts:
    """Check a rules file; with a checkpoint, also report which of its tensor names the mapping rules match.

    Args:
        rules: path of the rules file.
        path: a checkpoint whose tensor names are matched with the rules.

    Returns:
        Plain data, as `transaxle check-rules --json` prints it: `families` that the file declares; with a checkpoint
        also `reads`, and `fits`, which is False if a tensor's shape differs from that in its mapping rule.

    Raises:
        Refused: with the code CORRUPT if the rules file has mistakes; the error lists all of them.
        UsageError: with the code UNKNOWN_FAMILY if the rules match no tensor name of the checkpoint.
    """
    file, checkpoint = read_path("rules", rules), None if path is None else read_path("path", path)
    families = settings(rules=file).families
    declared = [families[name] for name, entry in families.entries.items() if not entry.file]
    facts: JsonFacts = {
        "file": file,
        "families": [_family_facts(family) | {"replaces": families.replaces(family.name)} for family in declared],
    }
    if checkpoint is None:
        return facts
    reads = [_reads_of(checkpoint, file, family) for family in declared]
    if declared and not any(map(reads_any, reads)):
        raise _refuse_unread(checkpoint, declared)
    return facts | {"checkpoint": checkpoint, "fits": not any(map(_shapes_differ, reads)), "reads": reads}


def _family_facts(family: Family) -> JsonFacts:
    new = [dialect for dialect in family.dialects if not _is_builtin(family, dialect)]
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "axes": {axis: None if formula is None else formula.text for axis, formula in family.axes.items()},
        "unsized": _axes_without_size(family),
        "tensors": list(family.tensors),
        "dialects": {dialect.label: len(dialect.lines) for dialect in new},
        "says_anew": _own_statements(family),
    }


def _own_statements(family: Family) -> list[JsonFacts]:
    """Return the statements of a family that replace statements inherited from its base family."""
    replaced = () if family.written is None else family.written.replaced
    return [
        {
            "of": each.inherited.owner,
            "taken": " ".join(each.inherited.text.split()),
            "own": " ".join(each.replacement.text.split()),
        }
        for each in replaced
    ]


def _axes_without_size(family: Family) -> list[str]:
    """Return the axes without a formula for their size, so that only the tensor names of a checkpoint show it."""
    return [axis for axis, formula in family.axes.items() if formula is None and axis in family.name_axes]


def _is_builtin(family: Family, dialect: Dialect) -> bool:
    shipped_family = builtin().get(family.name)
    return shipped_family is not None and any(dialect is shipped for shipped in shipped_family.dialects)


def _reads_of(ckpt: str, file: str, family: Family) -> JsonFacts:
    """Return which tensor names of a checkpoint each dialect of a family can read, and why a dialect cannot be
    written.
    """
    with open_checkpoint(ckpt, rules=file, family=family.name) as checkpoint:
        names = checkpoint.catalog.entries
        grouped = group(split_slot(name)[0] for name in names)
        counts = {dialect.label: score(grouped, dialect)[0] for dialect in family.dialects}
        if not any(counts.values()):
            return {**_NOTHING, "family": family.name, "tensors": len(names), "names_read": counts}
        source_dialect = checkpoint.reading.dialect
        own_refusals = _target_facts(checkpoint, source_dialect)["refusals"]
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
            "writes": {
                d.label: _target_facts(checkpoint, d) for d in family.dialects if d.label != source_dialect.label
            },
        }


def reads_any(read: JsonFacts) -> bool:
    """Return whether at least one dialect of a family can read at least one tensor name."""
    return any(read["names_read"].values())


def _refuse_unread(ckpt: str, families: Sequence[Family]) -> TransaxleError:
    """Return the error for a rules file whose tables read no tensor name; it shows the table line most similar to a
    name.
    """
    with open_checkpoint(ckpt) as checkpoint:
        names = list(checkpoint)
    lines = {
        key: found_lines[0] for each in families for d in each.dialects for key, found_lines in d.by_skeleton.items()
    }
    similar = [
        (name, match) for name in names[:_COMPARED_NAMES] for match in get_close_matches(skeleton(name), lines, 1, 0.7)
    ]
    closest = f" Closest to {similar[0][0]}:  {lines[similar[0][1]].text}" if similar else ""
    family_names, first_names = (
        ", ".join(family.name for family in families),
        ", ".join(names[:_SHOWN_NAMES]) or "(no tensors)",
    )
    return refuse(
        "UNKNOWN_FAMILY",
        f"no dialect of {family_names} reads any of its {plural(len(names), 'name')}: {first_names}",
        file=ckpt,
        hint=(
            "A table line begins with the whole tensor name; only a prefix that all names share "
            f"may be missing.{closest}"
        ),
    )


def _absent_keys(checkpoint: Checkpoint) -> list[JsonFacts]:
    """Return the axes whose size is needed but unknown, because the config lacks the keys in their formulas."""
    sizes, family = checkpoint.sizes, checkpoint.reading.family
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


def _target_facts(checkpoint: Checkpoint, dialect: Dialect) -> JsonFacts:
    """Return facts about the result of writing a checkpoint in a given dialect, or all refusals of that conversion."""
    try:
        translation = checkpoint.translation(dialect.label)
    except TransaxleError as error:
        return {"tensors": 0, "refusals": [refusal.as_json() for refusal in error.refusals]}
    unknown = checkpoint.refuse_foreign(dialect.label) or checkpoint.refuse_half_converted(dialect.label, translation)
    refusals = (*unknown, *translation.refusals)
    return {"tensors": len(translation.targets), "refusals": [refusal.as_json() for refusal in refusals]}
