"""How many bytes a refit moves between which ranks.

**Traffic**: the bytes that a refit would move between every pair of ranks, from what each holds of each kind of
tensors.

Nothing is enumerated but kinds of tensors, pipeline stages and ranks: boxes meet by arithmetic on their intervals, and
layers that are alike are counted.

The ranks of a trainer and of an engine: the degrees of their meshes, and the coordinates of each rank.

What each rank of a trainer or an engine holds of a kind of tensors, as boxes of a logical tensor.

A trainer cuts as torch does: experts over `ep`, what the tables name over `tp`, and then FSDP divides dim 0 of what
is left, in `torch.chunk`'s chunks. Its other tensors FSDP divides over `fsdp` and `ep` together. An engine cuts as its
own loader does, which the tables say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transaxle.axes.geometry import Interval, Intervals, Shard, axes_in, pieces, take, torch_chunk, whole
from transaxle.axes.layout.divide import rank_shares
from transaxle.axes.layout.model_tensors import Index, Model, TensorKind
from transaxle.axes.notation.expression import Axis
from transaxle.axes.notation.family import Family, Sizes
from transaxle.encodings.encoding import CASTS
from transaxle.engine.checkpoint.recognise import ENGINES, model_types, pick_dialect, pick_family
from transaxle.engine.checkpoint.settings import Settings
from transaxle.engine.plan.rank_parts import for_ranks
from transaxle.errors import Code, refuse
from transaxle.formats.catalog import ITEM_BITS

FSDP, EP, TP, PP, REPLICATE, DP, REPLICAS = "fsdp", "ep", "tp", "pp", "replicate", "dp", "replicas"
EXPERT_DIM = "expert_dim"
"""Not a degree: the dim of an expert's tensors that FSDP divides."""
TRAINING = (REPLICATE, PP, FSDP, EP, TP)
SERVING = (REPLICAS, DP, PP, TP)
MOST_RANKS = 1 << 16
"""Cap on the ranks of one side."""
_MOST_PAIRS = 1 << 24
"""Cap on the pairs of ranks, each of which has a number."""


@dataclass(frozen=True)
class RankMesh:
    """The ranks of one side."""

    dialect: str
    """How it names and fuses its tensors."""
    degrees: Mapping[str, int]
    """Mesh dim -> its size, outermost first."""
    ep: int = 1
    """Of an engine: how many ranks share out the experts; of a trainer, the size of that mesh dim."""
    expert_dim: int = 0
    """Of a trainer: the dim of an expert's tensors that FSDP divides."""

    @property
    def serves(self) -> bool:
        """Whether it is an inference engine."""
        return self.dialect.partition("@")[0] in ENGINES

    @property
    def ranks(self) -> int:
        """Number of its ranks."""
        return prod(self.degrees.values())

    def degree(self, name: str) -> int:
        """Return the size of a mesh dim; 1 where it is not there."""
        return self.degrees.get(name, 1)

    def at(self, rank: int, *names: str) -> int:
        """Return a rank's number among those of some mesh dims together, in the order of the mesh."""
        number, stride = 0, 1
        for name, size in reversed(list(self.degrees.items())):
            if name in names:
                number += rank % size * stride
                stride *= size
            rank //= size
        return number

    @property
    def text(self) -> str:
        """As the user writes it."""
        return ",".join(f"{name}={size}" for name, size in self.degrees.items()) or "1 rank"


def read_mesh(dialect: str, text: str) -> RankMesh:
    """Read the degrees of one side, such as `fsdp=64,ep=8`.

    Args:
        dialect: of that side; those of inference engines have other mesh dims than trainers.
        text: as the user wrote it; empty: one rank.

    Raises:
        UsageError: UNKNOWN_AXIS for a mesh dim that this side does not have, or a number that is none.
        Refused: UNSUPPORTED for degrees that do not go together.
    """
    serves = RankMesh(dialect, {}).serves
    known = (*SERVING, EP) if serves else (*TRAINING, EXPERT_DIM)
    degrees: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, count = part.partition("=")
        least = 0 if name == EXPERT_DIM else 1
        if name not in known or name in degrees:
            again = "is given twice" if name in degrees else f"is no dim of the mesh of {dialect}"
            raise refuse("UNKNOWN_AXIS", f"{text}\n{name} {again}", hint=f"It may have: {', '.join(known)}.")
        if not (equals and count.isascii() and count.isdigit() and len(count) < 7 and int(count) >= least):
            raise refuse("UNKNOWN_AXIS", f"{text}\n{part!r} is not DIM=SIZE", hint="Write for example fsdp=64,ep=8.")
        degrees[name] = int(count)
    expert_dim = degrees.pop(EXPERT_DIM, 0)
    ep = degrees.pop(EP, 1) if serves else degrees.get(EP, 1)
    mesh = RankMesh(dialect, degrees, ep, expert_dim)
    if mesh.ranks > MOST_RANKS:
        raise refuse(
            "UNSUPPORTED", f"{text}\n{mesh.ranks} ranks are more than {MOST_RANKS}", hint="Plan a part of them."
        )
    together = mesh.degree(DP) * mesh.degree(TP)
    if serves and ep not in (1, together):
        message = f"{text}\nep={ep}, but experts are shared out over all {together} ranks of dp and tp, or over none"
        raise refuse("UNSUPPORTED", message, hint=f"Write ep={together}, or leave it out.")
    return mesh


def check_pairs(trainer: RankMesh, engine: RankMesh) -> None:
    """Refuse more pairs of ranks than a matrix holds.

    Raises:
        Refused: UNSUPPORTED.
    """
    if trainer.ranks * engine.ranks > _MOST_PAIRS:
        message = f"{trainer.ranks} x {engine.ranks} pairs of ranks are more than {_MOST_PAIRS}"
        raise refuse("UNSUPPORTED", message, hint="Replicas all receive the same: plan fewer of them.")


_CHUNK = Shard()


@dataclass(frozen=True)
class HeldBoxes:
    """Boxes of a logical tensor that some ranks hold, each of them all."""

    ranks: NDArray[np.int64]
    """The ranks."""
    boxes: NDArray[np.int64]
    """Box, axis, first index and the one after the last."""


@dataclass(frozen=True)
class Cutter:
    """Cuts the tensors of one side over its ranks."""

    family: Family
    """Of the model."""
    mesh: RankMesh
    """The side's ranks."""

    def stage(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer: stages are as long as each other, but that the first ones of a
        trainer, and the last ones before the last of an engine, have one more where they do not divide.
        """
        stages = self.mesh.degree(PP)
        each, more = divmod(layers, stages)
        longer = set(range(stages - 1 - more, stages - 1)) if self.mesh.serves else set(range(more))
        ends = np.cumsum([each + (stage in longer) for stage in range(stages)])
        return int(np.searchsorted(ends, layer, side="right"))

    def held(
        self, kind: TensorKind, component: str, axes: Sequence[str], layers: Sequence[Interval] = ()
    ) -> list[HeldBoxes]:
        """Return what the ranks of every pipeline stage hold, alike ones together, those with nothing left out.

        Args:
            kind: the tensors.
            component: the logical tensor.
            axes: those of a box.
            layers: intervals of the axis that numbers layers, where it is one of a box.
        """
        found: dict[tuple[tuple[Interval, ...], ...], list[int]] = defaultdict(list)
        memory: dict[tuple[int, ...], tuple[tuple[Interval, ...], ...]] = {}
        for rank in range(self.mesh.ranks):
            key = self._key(rank)
            if key not in memory:
                memory[key] = self._boxes(kind, component, axes, layers, rank)
            if memory[key]:
                found[memory[key]].append(rank)
        return [
            HeldBoxes(np.array(ranks), np.array(boxes, np.int64).reshape(len(boxes), -1, 2))
            for boxes, ranks in found.items()
        ]

    def _key(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates on which it depends what a rank holds of a stage."""
        mesh = self.mesh
        names = (DP, TP) if mesh.serves else (FSDP, EP, TP)
        return tuple(mesh.at(rank, name) for name in names)

    def _boxes(
        self, kind: TensorKind, component: str, axes: Sequence[str], layers: Sequence[Interval], rank: int
    ) -> tuple[tuple[Interval, ...], ...]:
        named, dims = (self._served if self.mesh.serves else self._trained)(kind, rank)
        spans = {axis: list(intervals) for axis, intervals in named.items()}
        spans |= {axis: list(layers) for axis in kind.axes if axis in axes}
        outside = [axis for axis in axes if axis in spans]
        found: list[tuple[Interval, ...]] = []
        if prod(sum(stop - start for start, stop in intervals) for intervals in dims) == 0:
            return ()
        for piece in pieces(kind.layout, component, dims):
            for chosen in product(*(spans[axis] for axis in outside)):
                box = {**piece.box, **dict(zip(outside, chosen, strict=True))}
                found.append(tuple(box.get(axis, (0, 1)) for axis in axes))
        return tuple(sorted(box for box in found if all(start < stop for start, stop in box)))

    def _trained(self, kind: TensorKind, rank: int) -> tuple[dict[str, Intervals], list[Intervals]]:
        """Return what a rank of a trainer has of the axes in names, and of the dims."""
        mesh, expression = self.mesh, kind.line.expression
        named = {axis: whole(kind.sizes[axis]) for axis in kind.experts}
        dims = [whole(size) for size in kind.layout.shape]
        expert = self._axis_of_experts(kind)
        ep, fsdp, place = mesh.degree(EP), mesh.degree(FSDP), mesh.at(rank, FSDP)
        if expert is None:
            fsdp, place = fsdp * ep, mesh.at(rank, FSDP, EP)
        elif expert in named:
            named[expert] = (torch_chunk(kind.sizes[expert], ep, mesh.at(rank, EP)),)
        elif ep > 1:
            dim = next((n for n, node in enumerate(expression.dims) if node == Axis(expert)), None)
            if dim is None:
                message = f"{kind.line.whole}\nits experts are no dim of their own, which ep could share out"
                raise refuse("UNSUPPORTED", message, hint="Choose another dialect of the trainer.")
            dims[dim] = _CHUNK(dims[dim], ep, mesh.at(rank, EP))
        tp = mesh.degree(TP)
        shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=tp) if tp > 1 else None
        if shares is not None:
            dim, positions = shares
            dims[dim] = positions[mesh.at(rank, TP)]
        if dims and fsdp > 1:
            dim = mesh.expert_dim if expert is not None else 0
            if dim >= len(dims):
                message = f"{kind.line.whole}\nhas no dim {dim}, which expert_dim names"
                raise refuse("UNSUPPORTED", message, hint="Leave expert_dim out, or give a smaller one.")
            dims[dim] = _CHUNK(dims[dim], fsdp, place)
        return named, dims

    def _served(self, kind: TensorKind, rank: int) -> tuple[dict[str, Intervals], list[Intervals]]:
        """Return what a rank of an engine has of the axes in names, and of the dims."""
        mesh, expression = self.mesh, kind.line.expression
        named = {axis: whole(kind.sizes[axis]) for axis in kind.experts}
        dims = [whole(size) for size in kind.layout.shape]
        expert = self._axis_of_experts(kind) if mesh.ep > 1 else None
        place, shares = mesh.at(rank, TP), None
        if expert is not None:
            place = mesh.at(rank, DP, TP)
            if expert in named:
                each, more = divmod(kind.sizes[expert], mesh.ep)
                start = each * place + min(place, more)
                named[expert] = take(named[expert], start, start + each + (place < more))
            else:
                shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=1, ep=mesh.ep)
        elif mesh.degree(TP) > 1:
            shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=mesh.degree(TP))
        if shares is not None:
            dim, positions = shares
            dims[dim] = positions[place]
        return named, dims

    @property
    def _name(self) -> str:
        return self.mesh.dialect.partition("@")[0]

    def _axis_of_experts(self, kind: TensorKind) -> str | None:
        """Return the axis that expert-parallel ranks share out of a tensor; None where it is of no experts."""
        expression = kind.line.expression
        for cut in self.family.cuts_of("ep", self._name):
            if cut.tensors is not None and cut.tensors.isdisjoint(expression.components):
                continue
            within = {*kind.experts}.union(*(axes_in(node) for node in expression.dims))
            return next((axis for axis in cut.axes if axis in within), None)
        return None


Matrix = NDArray[np.int64]
_WIDE = "fp32"
"""What tensors keep that are not cast with the others."""
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Types as configs name them -> keys of `CASTS`."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of a config that say its type."""
_LAYERS = "l"
"""The axis of the layers that pipeline stages share out."""
_FIRST, _LAST = frozenset({"embed"}), frozenset({"norm", "norm_bias", "head", "head_bias"})
"""Logical tensors of the first pipeline stage, and of the last, that are in no layer."""


@dataclass(frozen=True)
class Traffic:
    """What a refit would move."""

    family: str
    """The model's."""
    trainer: RankMesh
    """Its source."""
    engine: RankMesh
    """Its target."""
    dtype: str
    """Type in which values are sent."""
    parameters: int
    """Elements of the model that are moved, each counted once."""
    together: bool
    """Whether rank i of the engine is rank i of the trainer; else the engine's ranks follow the trainer's."""
    matrix: Matrix
    """Bytes that each rank of the trainer has for each rank of the engine, what is the same rank included."""
    tensors: Mapping[str, int]
    """Logical tensor -> bytes of it that the engine's ranks need."""
    stays: tuple[str, ...]
    """Logical tensors that the engine's dialect does not have."""
    undecided: tuple[str, ...]
    """Logical tensors that the config neither asks for nor excludes."""

    @cached_property
    def sent(self) -> Matrix:
        """The matrix without what a rank has for itself."""
        matrix = self.matrix.copy()
        if self.together:
            np.fill_diagonal(matrix, 0)
        return matrix

    @property
    def total(self) -> int:
        """Bytes that are sent."""
        return int(self.sent.sum())

    @property
    def own(self) -> int:
        """Bytes that ranks copy by themselves."""
        return int(self.matrix.sum()) - self.total

    def within(self, ranks_per_node: int) -> int:
        """Return the bytes that are sent between ranks of one machine.

        Args:
            ranks_per_node: how many ranks a machine has.
        """
        sources, targets = np.arange(self.trainer.ranks), np.arange(self.engine.ranks)
        first = 0 if self.together else self.trainer.ranks
        same = (sources // ranks_per_node)[:, None] == ((first + targets) // ranks_per_node)[None, :]
        return int(self.sent[same].sum())

    def as_json(self, ranks_per_node: int | None = None) -> dict[str, Any]:
        """Return it as plain JSON data.

        Args:
            ranks_per_node: how many ranks a machine has; None: not known.
        """
        shown: dict[str, Any] = {
            "family": self.family,
            "trainer": {"dialect": self.trainer.dialect, "mesh": self.trainer.text, "ranks": self.trainer.ranks},
            "engine": {"dialect": self.engine.dialect, "mesh": self.engine.text, "ranks": self.engine.ranks},
            "same_ranks": self.together,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "bytes": self.total,
            "bytes_own": self.own,
            "sent": self.sent.sum(axis=1).tolist(),
            "received": self.sent.sum(axis=0).tolist(),
            "tensors": dict(self.tensors),
            "stays": list(self.stays),
            "undecided": list(self.undecided),
        }
        if ranks_per_node is not None:
            inside = self.within(ranks_per_node)
            shown |= {"bytes_inside_nodes": inside, "bytes_between_nodes": self.total - inside}
        return shown | {"matrix": self.sent.tolist()}


def planned_traffic(
    given: Settings, sides: tuple[RankMesh, RankMesh], *, dtype: str | None = None, together: bool = False
) -> Traffic:
    """Return what a refit of a model would move, as its config says.

    Args:
        given: what the user says of the model; it has a config.
        sides: the ranks of the trainer, and those of the engine.
        dtype: type in which values are sent, a key of `CASTS`; None: that of the config, or else bf16.
        together: rank i of the engine is rank i of the trainer.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS where nothing tells the family; UNKNOWN_AXIS.
        Refused: as `traffic`.
    """
    config = given.config or {}
    if given.family is not None:
        family = pick_family(given.family, given.families)
    else:
        types = model_types(config)
        families = given.families.of_types(types[:1]) or given.families.of_types(types[1:])
        if len(families) != 1:
            near = f"; it may be {' or '.join(family.name for family in families)}" if families else ""
            code: Code = "AMBIGUOUS" if families else "UNKNOWN_FAMILY"
            message = f"the config's model_type {', '.join(map(repr, types)) or '(none)'} names no one family{near}"
            raise refuse(code, message, hint="Name it: --family NAME.")
        (family,) = families
    nested = config.get("text_config")
    levels = [config, nested] if isinstance(nested, Mapping) else [config]
    said = [str(level[key]).removeprefix("torch.") for level in levels for key in DTYPE_KEYS if level.get(key)]
    sent = dtype or next((_SHORT[each] for each in said if each in _SHORT), "bf16")
    return traffic(family, config, sides, axes=given.axes, dtype=sent, together=together)


def traffic(
    family: Family,
    config: Mapping[str, Any],
    sides: tuple[RankMesh, RankMesh],
    *,
    axes: Mapping[str, int],
    dtype: str = "bf16",
    together: bool = False,
) -> Traffic:
    """Return what a refit would move between which ranks.

    Args:
        family: of the model.
        config: of the model.
        sides: the ranks of the trainer, and those of the engine.
        axes: sizes that go before the config's.
        dtype: type in which values are sent, a key of `CASTS`.
        together: rank i of the engine is rank i of the trainer.

    Raises:
        Refused: MISSING_TENSOR for what the engine needs and the trainer's dialect does not have; UNSUPPORTED where
            something does not divide.
        UsageError: UNKNOWN_AXIS where a size is not known.
    """
    check_pairs(*sides)
    trainer, engine = (_Side.of(family, config, mesh, axes) for mesh in sides)
    matrix = np.zeros((sides[0].ranks, sides[1].ranks), np.int64)
    tensors: dict[str, int] = {}
    lacking = sorted(name for name, there in engine.kinds.items() if there.keys() - trainer.kinds.get(name, {}).keys())
    if lacking:
        message = f"the trainer's dialect {sides[0].dialect} does not have {', '.join(lacking)}, which the engine needs"
        raise refuse("MISSING_TENSOR", message, hint="Choose the dialect of the whole model, such as hf.")
    parameters = 0
    for component in engine.kinds:
        item = ITEM_BITS[CASTS[_WIDE if component in family.precise else dtype]] // 8
        moved = np.zeros_like(matrix)
        for meeting in _meetings(component, trainer, engine):
            parameters += meeting.add(moved, item, together=together)
        matrix += moved
        tensors[component] = int(moved.sum())
    stays = tuple(sorted(trainer.kinds.keys() - engine.kinds.keys()))
    undecided = tuple(sorted(trainer.model.undecided))
    return Traffic(family.name, *sides, dtype, parameters, together, matrix, tensors, stays, undecided)


@dataclass(frozen=True)
class _Side:
    """One side: its tensors, and how they are cut."""

    model: Model
    cutter: Cutter
    kinds: Mapping[str, Mapping[Index, TensorKind]]

    @classmethod
    def of(cls, family: Family, config: Mapping[str, Any], mesh: RankMesh, axes: Mapping[str, int]) -> _Side:
        tp = mesh.degree(TP) if mesh.serves and mesh.ep == 1 else 1
        model = Model(family, Sizes(family, for_ranks(config, tp), axes), mesh.degree(TP))
        dialect = pick_dialect(family, mesh.dialect)
        kinds = model.kinds(dialect)
        model.check_decided(dialect)
        return cls(model, Cutter(family, mesh), kinds)

    def stages(self, component: str, index: Index) -> tuple[int, ...]:
        """Return the pipeline stages that have a logical tensor at a layer; none where there are no stages.

        The embedding is in the first one, norm and head in the last one; an embedding that is the head is in both.

        Raises:
            Refused: UNSUPPORTED where nothing tells.
        """
        last = self.cutter.mesh.degree(PP) - 1
        if not last:
            return ()
        kind, tied = self.kinds[component][index], {chain[-1] for chain in self.model.sizes.originals.values()}
        if not index and component in _FIRST | _LAST:
            first = component in _FIRST
            return (0, last) if component in tied else (0,) if first else (last,)
        if kind.axes != (_LAYERS,) or not index:
            message = f"{kind.line.whole}\nnothing tells which pipeline stage has it"
            raise refuse("UNSUPPORTED", message, hint="Leave pp out, or choose a dialect that names its layers.")
        return (self.cutter.stage(index[0], self.model.sizes.at({})[_LAYERS]),)

    def of_stages(self, held: Sequence[HeldBoxes], stages: tuple[int, ...]) -> list[HeldBoxes]:
        """Leave of what ranks hold that which those of some stages do."""
        if not stages:
            return list(held)
        mesh = self.cutter.mesh
        at = np.array([mesh.at(rank, PP) for rank in range(mesh.ranks)])
        found = [HeldBoxes(each.ranks[np.isin(at[each.ranks], stages)], each.boxes) for each in held]
        return [each for each in found if len(each.ranks)]


@dataclass(frozen=True)
class _Meeting:
    """Layers of a logical tensor that are alike on both sides."""

    what: str
    sources: Sequence[HeldBoxes]
    targets: Sequence[HeldBoxes]
    count: int

    def add(self, matrix: Matrix, item: int, *, together: bool) -> int:
        """Add the bytes of each pair of ranks; return the elements that are moved, each counted once.

        Of ranks that hold the same, each gives an equal share; but a rank that needs what it holds takes its own.

        Args:
            matrix: what is added to.
            item: bytes of an element.
            together: the ranks of both sides are the same ones.

        Raises:
            Refused: UNSUPPORTED where what ranks of the source hold overlaps in part, or leaves something out.
        """
        if not self.sources or not self.targets:
            return 0
        elements = np.stack([_overlaps(self.sources, target.boxes) for target in self.targets], axis=1)
        wanted = [_overlaps([target], target.boxes)[0] for target in self.targets]
        if (elements.sum(axis=0) != wanted).any():
            message = f"{self.what}\nthe trainer's ranks hold parts of it that overlap each other, or not all of it"
            raise refuse("UNSUPPORTED", message, hint="Choose degrees that divide it.")
        alike = np.repeat(
            [len(source.ranks) for source in self.sources], [len(source.ranks) for source in self.sources]
        )
        place = np.concatenate([np.arange(len(source.ranks)) for source in self.sources])
        owner = np.repeat(np.arange(len(self.sources)), [len(source.ranks) for source in self.sources])
        each, more = np.divmod(elements[owner] * item * self.count, alike[:, None])
        given = each + (place[:, None] < more)
        ranks = np.concatenate([source.ranks for source in self.sources])
        for column, target in enumerate(self.targets):
            matrix[np.ix_(ranks, target.ranks)] += given[:, column, None]
            for number, source in enumerate(self.sources) if together else ():
                here = np.intersect1d(source.ranks, target.ranks)
                matrix[np.ix_(source.ranks, here)] -= given[owner == number, column, None]
                matrix[here, here] += elements[number, column] * item * self.count
        return sum(int(_overlaps([source], source.boxes)[0]) for source in self.sources) * self.count


def _overlaps(held: Sequence[HeldBoxes], boxes: NDArray[np.int64]) -> Matrix:
    """Count the elements that each of several ranks has in common with some boxes, the boxes of each being disjoint."""
    first = np.concatenate([each.boxes for each in held])
    low = np.maximum(first[:, None, :, 0], boxes[None, :, :, 0])
    high = np.minimum(first[:, None, :, 1], boxes[None, :, :, 1])
    counts = np.clip(high - low, 0, None).prod(axis=-1).sum(axis=1)
    starts = np.cumsum([0, *(len(each.boxes) for each in held[:-1])])
    return np.add.reduceat(counts, starts)


def _meetings(component: str, trainer: _Side, engine: _Side) -> Iterator[_Meeting]:
    """Yield the layers of a logical tensor, those together that are alike."""
    groups: dict[tuple[Any, ...], list[Index]] = defaultdict(list)
    for index, target in engine.kinds[component].items():
        source = trainer.kinds[component][index]
        key = source, target, trainer.stages(component, index), engine.stages(component, index)
        groups[tuple(map(_identity, key))].append(index)
    cache: dict[tuple[Any, ...], list[HeldBoxes]] = {}
    own = trainer.model.axes_of(component)
    for indices in groups.values():
        first = indices[0]
        source, target = trainer.kinds[component][first], engine.kinds[component][first]
        stages = trainer.stages(component, first), engine.stages(component, first)
        inside = tuple(axis for axis in own if axis not in source.axes or axis not in target.axes)
        layers = _runs(indices, own, inside, component)
        axes = tuple(a for a in trainer.model.family.tensors[component].axes if a not in own or a in inside)
        held = []
        for side, kind, stage in ((trainer, source, stages[0]), (engine, target, stages[1])):
            place = id(side), id(kind), layers
            if place not in cache:
                cache[place] = side.cutter.held(kind, component, axes, layers)
            held.append(side.of_stages(cache[place], stage))
        yield _Meeting(component, held[0], held[1], 1 if inside else len(indices))


def _identity(value: object) -> object:
    return id(value) if isinstance(value, TensorKind) else value


def _runs(indices: Sequence[Index], own: Sequence[str], inside: Sequence[str], component: str) -> tuple[Interval, ...]:
    """Return the intervals of the layers where one side has them as a dim."""
    if not inside:
        return ()
    if len(own) > 1:
        message = f"{component}: of its axes {', '.join(own)}, one side has some as dims, the other in names"
        raise refuse("UNSUPPORTED", message, hint="Choose a dialect that names its layers.")
    runs: list[Interval] = []
    for (layer,) in sorted(indices):
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return tuple(runs)
