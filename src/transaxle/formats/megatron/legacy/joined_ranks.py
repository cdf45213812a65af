"""Whole tensors from what the ranks hold: parts over tensor-parallel ranks are joined, copies must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import Entry, Extent, Twin
from transaxle.formats.deepspeed.metadata.spread import Shape, Spread, by_widths, whole
from transaxle.formats.deepspeed.table_cuts import TableCuts
from transaxle.formats.deepspeed.zero.shard import RankShard, merge_shards
from transaxle.formats.megatron.legacy.global_names import is_expert
from transaxle.formats.megatron.legacy.param_order import is_vocabulary
from transaxle.formats.megatron.legacy.rank_grid import Mesh, Place
from transaxle.formats.megatron.legacy.rank_optimizer import ParameterState

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_AHEAD = ".eh_proj.weight"
"""Projection in front of a layer that predicts ahead: Megatron cuts its rows, other programs keep it whole."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as one rank holds it."""

    place: Place
    shard: RankShard
    state: ParameterState
    """What the rank's optimizer keeps of it."""


@dataclass(slots=True)
class Whole:
    """Whole tensors, and the copies that must be equal."""

    weights: dict[str, Entry] = field(default_factory=dict)
    states: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Parameter -> state -> tensor or number."""
    twins: list[Twin] = field(default_factory=list)


def is_cut_by_rows(name: str) -> bool:
    """Tell whether Megatron cuts a parameter by its rows, whatever the table says of its axes.

    The rows of the vocabulary and its padding are cut as one dim.
    """
    return is_vocabulary(name) or name.endswith(_AHEAD)


class Joining:
    """Joins the parameters of all ranks.

    Args:
        mesh: the degrees of the run.
        cuts: what the tables say of the parameters that are cut; None where none is.
        args: of the run.
    """

    def __init__(self, mesh: Mesh, cuts: TableCuts | None, args: Mapping[str, Any]) -> None:
        self._mesh, self._cuts = mesh, cuts
        self._rows, self._width = args.get("padded_vocab_size"), args.get("hidden_size")
        self._numbers: set[tuple[tuple[Extent, ...], tuple[Extent, ...]]] = set()
        self.faults = Faults()

    def join(self, held: Mapping[str, Mapping[tuple[int, int], Sequence[Held]]], flat: frozenset[str]) -> Whole:
        """Join everything.

        Args:
            held: name -> pipeline stage and virtual stage -> what each rank holds of it.
            flat: parameters that must be in a flat buffer of some rank.

        Returns:
            the whole tensors; what stands against it is in `faults`.
        """
        found = Whole()
        for name, stages in held.items():
            for parts in stages.values():
                try:
                    self._stage(found, name, parts, must=name in flat)
                except TransaxleError as error:
                    self.faults.extend(*error.refusals)
                if self.faults.full:
                    return found
        return found

    def _stage(self, found: Whole, name: str, parts: Sequence[Held], *, must: bool) -> None:
        """Join what the ranks of one stage hold of a parameter."""
        count = self._mesh.etp if is_expert(name) else self._mesh.tp
        by_rank: list[list[Held]] = [[] for _ in range(count)]
        for part in parts:
            by_rank[part.place.tp % count].append(part)
        lacking = [rank for rank, holders in enumerate(by_rank) if not holders]
        if lacking:
            message = f"tensor-parallel ranks {lacking[:8]} do not hold it, but others of their stage do"
            raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name)
        spread = self._spread(name, [holders[0].shard for holders in by_rank])
        weights = self._merged(found, name, name, spread, [[each.shard for each in holders] for holders in by_rank])
        self._keep(found, found.weights, name, name, weights)
        states = dict.fromkeys(state for part in parts for state in part.state.states)
        for state in states:
            shards = [
                [each.state.states[state] for each in holders if state in each.state.states] for holders in by_rank
            ]
            if not all(shards):
                message = f"some ranks' optimizers have no {state} of it, but others do"
                raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name)
            shown = f"{name}/{state}"
            self._keep(
                found, found.states.setdefault(name, {}), state, shown, self._merged(found, name, shown, spread, shards)
            )
        if must and not states:
            message = "its optimizer's state is in a file distrib_optim.pt that is missing"
            hint = "Copy the missing file, or leave the optimizer out (--no-optimizer)."
            raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name, hint=hint)
        for part in parts:
            for key, number in part.state.numbers.items():
                self._number(found, name, key, number)

    def _spread(self, name: str, shards: Sequence[RankShard]) -> Spread:
        """Return how a parameter is spread over the ranks that share it.

        Raises:
            Refused, UsageError: where the tables do not say it, or something else.
        """
        shapes: list[Shape] = [shard.shape for shard in shards]
        if is_cut_by_rows(name) and shapes[0]:
            rows = [shape[0] for shape in shapes]
            known = self._rows if is_vocabulary(name) else self._width
            spread = by_widths((sum(rows), *shapes[0][1:]), 0, [rows])
            if tuple(shapes) != spread.shards or (known is not None and sum(rows) != known):
                wanted = f"{known} rows by the args of the run" if known else "alike"
                message = f"its shards have the shapes {', '.join(map(str, map(list, shapes)))}, which are not {wanted}"
                raise refuse("SHAPE_MISMATCH", message, file=shards[0].file, tensor=name)
            return spread
        if len(shards) == 1 or self._cuts is None:
            return whole(shapes[0], len(shards))
        return self._cuts.spread(name, shapes)

    def _merged(
        self, found: Whole, name: str, shown: str, spread: Spread, shards: Sequence[Sequence[RankShard]]
    ) -> Entry:
        """Return a whole tensor of the first holders' shards; those of the others must be equal to them."""
        firsts = [holders[0] for holders in shards]
        entry, twins = merge_shards(shown, firsts, spread)
        found.twins.extend(twins)
        for first, *others in shards:
            for other in others:
                if (other.dtype, other.shape) != (first.dtype, first.shape):
                    message = (
                        f"{other.file} holds {other.dtype} {list(other.shape)} of it, but {first.file} "
                        f"{first.dtype} {list(first.shape)}"
                    )
                    raise refuse("CORRUPT", message, file=other.file, tensor=name)
                why = f"{first.file} and {other.file} hold the same part of it"
                kept, compared = (Entry(shown, each.dtype, each.shape, each.extents) for each in (first, other))
                found.twins.append(Twin(kept, compared, why, replica=True))
        return entry

    def _keep(self, found: Whole, into: dict[str, Entry], key: str, shown: str, entry: Entry) -> None:
        """Add a tensor; one that an earlier stage holds too must be equal."""
        first = into.setdefault(key, entry)
        if first is not entry:
            self._same(found, first, entry, shown)

    def _same(self, found: Whole, first: Entry, entry: Entry, shown: str) -> None:
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            first_kind, kind = (f"{each.dtype} {list(each.shape)}" for each in (first, entry))
            message = f"one pipeline stage holds it as {first_kind}, another as {kind}"
            raise refuse("CORRUPT", message, tensor=shown)
        found.twins.append(Twin(first, entry, "two pipeline stages hold the same tensor"))

    def _number(self, found: Whole, name: str, key: str, number: Entry) -> None:
        first = found.states.setdefault(name, {}).setdefault(key, number)
        pair = first.extents, number.extents
        if first is not number and pair not in self._numbers:
            self._numbers.add(pair)
            found.twins.append(Twin(first, number, f"{key} of {name} is one number on all ranks"))

    def tie(self, found: Whole) -> None:
        """Remove the head of a model that uses its embedding as such: the last stage's copy, which must be equal."""
        embedding = found.weights.get(EMBEDDING)
        if embedding is None or HEAD not in found.weights:
            return
        self._same(found, embedding, found.weights.pop(HEAD), HEAD)
        states = found.states.pop(HEAD, {})
        for state, entry in states.items():
            first = found.states.get(EMBEDDING, {}).get(state)
            if first is not None:
                self._same(found, first, entry, f"{HEAD}/{state}")
