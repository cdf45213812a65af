"""Computes the bytes that a refit (copying a trainer's weights into an inference engine) moves between ranks.

**Traffic**: the bytes that a refit would move between every pair of ranks, computed from the shards of each tensor on
each rank.

The computation enumerates only kinds of tensors, pipeline stages and ranks: overlaps of boxes follow from their
intervals, and identical layers are counted.

**Meshes**: the parallel degrees of a trainer and of an engine, and the coordinates of each rank.

**Shards**: which boxes (rectangular regions) of a logical tensor each rank of a trainer or engine holds.

A trainer cuts tensors as torch does: experts along mesh dim `ep`, and other axes that the tables name along `tp`. Then
FSDP divides dim 0 of what is left into the chunks of `torch.chunk`. Tensors that do not belong to experts are divided
along `fsdp` and `ep` together. An engine cuts tensors as its own loader does; the tables describe how.
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
from transaxle.engine.plan.rank_parts import config_for_ranks
from transaxle.errors import Code, refuse
from transaxle.formats.catalog import ITEM_BITS

FSDP, EP, TP, PP, REPLICATE, DP, REPLICAS = "fsdp", "ep", "tp", "pp", "replicate", "dp", "replicas"
EXPERT_DIM = "expert_dim"
"""Key, beside the parallel degrees, for the dim along which FSDP divides an expert's tensors."""
TRAINING = (REPLICATE, PP, FSDP, EP, TP)
SERVING = (REPLICAS, DP, PP, TP)
MOST_RANKS = 1 << 16
"""Largest number of ranks that a trainer or an engine may have."""
_MOST_PAIRS = 1 << 24
"""Largest number of pairs of trainer rank and engine rank, because each pair has an entry in the traffic matrix."""


@dataclass(frozen=True)
class RankMesh:
    """The device mesh of the trainer or of the inference engine."""

    dialect: str
    """Dialect of the tensor names that the trainer or engine uses."""
    degrees: Mapping[str, int]
    """Mesh dim -> its size, the outermost mesh dim first."""
    ep: int = 1
    """For an engine, the number of ranks among which experts are divided; for a trainer, the size of mesh dim `ep`."""
    expert_dim: int = 0
    """For a trainer, the dim of an expert's tensors that FSDP divides."""

    @property
    def serves(self) -> bool:
        """Whether the mesh belongs to the inference engine."""
        return self.dialect.partition("@")[0] in ENGINES

    @property
    def ranks(self) -> int:
        """Number of ranks in the mesh."""
        return prod(self.degrees.values())

    def degree(self, name: str) -> int:
        """Return the size of a mesh dim; 1 if the mesh lacks it."""
        return self.degrees.get(name, 1)

    def at(self, rank: int, *names: str) -> int:
        """Return a rank's index over several mesh dims taken together, in the order of the mesh."""
        number, stride = 0, 1
        for name, size in reversed(list(self.degrees.items())):
            if name in names:
                number += rank % size * stride
                stride *= size
            rank //= size
        return number

    @property
    def text(self) -> str:
        """The parallel degrees as a user types them, such as `fsdp=64,ep=8`."""
        return ",".join(f"{name}={size}" for name, size in self.degrees.items()) or "1 rank"


def read_mesh(dialect: str, text: str) -> RankMesh:
    """Parse the parallel degrees of a trainer or engine, such as `fsdp=64,ep=8`.

    Args:
        dialect: dialect of the tensor names; dialects of inference engines have different mesh dims than those of
            trainers.
        text: the degrees as the user typed them; an empty text means one rank.

    Raises:
        UsageError: with code UNKNOWN_AXIS, if a mesh dim is unknown, or its size is invalid.
        Refused: with code UNSUPPORTED, if the degrees do not fit together.
    """
    serves = RankMesh(dialect, {}).serves
    mesh_dims = (*SERVING, EP) if serves else (*TRAINING, EXPERT_DIM)
    degrees: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, count = part.partition("=")
        least = 0 if name == EXPERT_DIM else 1
        if name not in mesh_dims or name in degrees:
            problem = "is given twice" if name in degrees else f"is no dim of the mesh of {dialect}"
            raise refuse("UNKNOWN_AXIS", f"{text}\n{name} {problem}", hint=f"It may have: {', '.join(mesh_dims)}.")
        if not (equals and count.isascii() and count.isdigit() and len(count) < 7 and int(count) >= least):
            raise refuse("UNKNOWN_AXIS", f"{text}\n{part!r} is not DIM=SIZE", hint="Write for example fsdp=64,ep=8.")
        degrees[name] = int(count)
    expert_dim = degrees.pop(EXPERT_DIM, 0)
    ep = degrees.pop(EP, 1) if serves else degrees.get(EP, 1)
    mesh = RankMesh(dialect, degrees, ep, expert_dim)
    if mesh.ranks > MOST_RANKS:
        raise refuse(
            "UNSUPPORTED", f"{text}\n{mesh.ranks} ranks are more than {MOST_RANKS}", hint="Plan for fewer ranks."
        )
    together = mesh.degree(DP) * mesh.degree(TP)
    if serves and ep not in (1, together):
        message = f"{text}\nep={ep}, but experts are shared out over all {together} ranks of dp and tp, or over none"
        raise refuse("UNSUPPORTED", message, hint=f"Write ep={together}, or leave it out.")
    return mesh


def check_pairs(trainer: RankMesh, engine: RankMesh) -> None:
    """Refuse a trainer and an engine with more pairs of ranks than the traffic matrix may have.

    Raises:
        Refused: with code UNSUPPORTED, if the ranks form too many pairs.
    """
    if trainer.ranks * engine.ranks > _MOST_PAIRS:
        message = f"{trainer.ranks} x {engine.ranks} pairs of ranks are more than {_MOST_PAIRS}"
        raise refuse(
            "UNSUPPORTED", message, hint=("All replicas of an engine receive the same bytes: plan for fewer replicas.")
        )


_CHUNK = Shard()


@dataclass(frozen=True)
class RankBoxes:
    """Boxes (regions) of a logical tensor, with the ranks that each hold all these boxes."""

    ranks: NDArray[np.int64]
    """Numbers of the ranks."""
    boxes: NDArray[np.int64]
    """Array with dims `[box, axis, 2]` that contains the start and stop indices of each box."""


@dataclass(frozen=True)
class Cutter:
    """Divides the tensors of a trainer or an engine among its ranks."""

    family: Family
    """Family of the model."""
    mesh: RankMesh
    """Device mesh of the trainer or engine."""

    def stage(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer.

        All pipeline stages have the same number of layers if possible. If the layers cannot be divided evenly, some
        stages have one more layer: for a trainer the first stages, for an engine those just before the last stage.
        """
        stages = self.mesh.degree(PP)
        length, remainder = divmod(layers, stages)
        longer = set(range(stages - 1 - remainder, stages - 1)) if self.mesh.serves else set(range(remainder))
        ends = np.cumsum([length + (stage in longer) for stage in range(stages)])
        return int(np.searchsorted(ends, layer, side="right"))

    def rank_boxes(
        self, kind: TensorKind, component: str, axes: Sequence[str], layers: Sequence[Interval] = ()
    ) -> list[RankBoxes]:
        """Return the boxes that the ranks of every pipeline stage hold; ranks with the same boxes are listed together.

        Args:
            kind: the kind of tensor, which determines how it is divided among ranks.
            component: name of the logical tensor.
            axes: the axes along which boxes are described, in order.
            layers: intervals of the layer axis, if boxes are described along the layer axis too.
        """
        ranks_by_boxes: dict[tuple[tuple[Interval, ...], ...], list[int]] = defaultdict(list)
        cached_boxes: dict[tuple[int, ...], tuple[tuple[Interval, ...], ...]] = {}
        for rank in range(self.mesh.ranks):
            key = self._key(rank)
            if key not in cached_boxes:
                cached_boxes[key] = self._boxes(kind, component, axes, layers, rank)
            if cached_boxes[key]:
                ranks_by_boxes[cached_boxes[key]].append(rank)
        return [
            RankBoxes(np.array(ranks), np.array(boxes, np.int64).reshape(len(boxes), -1, 2))
            for boxes, ranks in ranks_by_boxes.items()
        ]

    def _key(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank that determine its boxes within a pipeline stage."""
        mesh = self.mesh
        names = (DP, TP) if mesh.serves else (FSDP, EP, TP)
        return tuple(mesh.at(rank, name) for name in names)

    def _boxes(
        self, kind: TensorKind, component: str, axes: Sequence[str], layers: Sequence[Interval], rank: int
    ) -> tuple[tuple[Interval, ...], ...]:
        name_intervals, dims = (self._engine_intervals if self.mesh.serves else self._trainer_intervals)(kind, rank)
        spans = {axis: list(intervals) for axis, intervals in name_intervals.items()}
        spans |= {axis: list(layers) for axis in kind.axes if axis in axes}
        name_axes = [axis for axis in axes if axis in spans]
        boxes: list[tuple[Interval, ...]] = []
        if prod(sum(stop - start for start, stop in intervals) for intervals in dims) == 0:
            return ()
        for piece in pieces(kind.layout, component, dims):
            for chosen in product(*(spans[axis] for axis in name_axes)):
                box = {**piece.box, **dict(zip(name_axes, chosen, strict=True))}
                boxes.append(tuple(box.get(axis, (0, 1)) for axis in axes))
        return tuple(sorted(box for box in boxes if all(start < stop for start, stop in box)))

    def _trainer_intervals(self, kind: TensorKind, rank: int) -> tuple[dict[str, Intervals], list[Intervals]]:
        """Return the intervals that a trainer's rank holds: along the axes in tensor names, and along the dims."""
        mesh, expression = self.mesh, kind.line.expression
        name_intervals = {axis: whole(kind.sizes[axis]) for axis in kind.experts}
        dims = [whole(size) for size in kind.layout.shape]
        expert = self._axis_of_experts(kind)
        ep, fsdp, position = mesh.degree(EP), mesh.degree(FSDP), mesh.at(rank, FSDP)
        if expert is None:
            fsdp, position = fsdp * ep, mesh.at(rank, FSDP, EP)
        elif expert in name_intervals:
            name_intervals[expert] = (torch_chunk(kind.sizes[expert], ep, mesh.at(rank, EP)),)
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
                raise refuse("UNSUPPORTED", message, hint="Omit expert_dim, or give a smaller dim.")
            dims[dim] = _CHUNK(dims[dim], fsdp, position)
        return name_intervals, dims

    def _engine_intervals(self, kind: TensorKind, rank: int) -> tuple[dict[str, Intervals], list[Intervals]]:
        """Return the intervals that an engine's rank holds: along the axes in tensor names, and along the dims."""
        mesh, expression = self.mesh, kind.line.expression
        name_intervals = {axis: whole(kind.sizes[axis]) for axis in kind.experts}
        dims = [whole(size) for size in kind.layout.shape]
        expert = self._axis_of_experts(kind) if mesh.ep > 1 else None
        position, shares = mesh.at(rank, TP), None
        if expert is not None:
            position = mesh.at(rank, DP, TP)
            if expert in name_intervals:
                length, remainder = divmod(kind.sizes[expert], mesh.ep)
                start = length * position + min(position, remainder)
                name_intervals[expert] = take(name_intervals[expert], start, start + length + (position < remainder))
            else:
                shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=1, ep=mesh.ep)
        elif mesh.degree(TP) > 1:
            shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=mesh.degree(TP))
        if shares is not None:
            dim, positions = shares
            dims[dim] = positions[position]
        return name_intervals, dims

    @property
    def _name(self) -> str:
        return self.mesh.dialect.partition("@")[0]

    def _axis_of_experts(self, kind: TensorKind) -> str | None:
        """Return the axis of a tensor that is divided among expert-parallel ranks; None if the tensor does not belong
        to experts.
        """
        expression = kind.line.expression
        for cut in self.family.cuts_of("ep", self._name):
            if cut.tensors is not None and cut.tensors.isdisjoint(expression.components):
                continue
            within = {*kind.experts}.union(*(axes_in(node) for node in expression.dims))
            return next((axis for axis in cut.axes if axis in within), None)
        return None


Matrix = NDArray[np.int64]
_WIDE = "fp32"
"""Dtype of the tensors that the family's table marks as precise, which are not cast."""
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Name of a dtype in the config -> key of `CASTS`."""
DTYPE_KEYS = ("dtype", "torch_dtype")
"""Config keys that state the model's dtype."""
_LAYERS = "l"
"""Name of the layer axis, which is divided among pipeline stages."""
_FIRST, _LAST = frozenset({"embed"}), frozenset({"norm", "norm_bias", "head", "head_bias"})
"""Logical tensors outside of layers that the first pipeline stage holds, and those that the last stage holds."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that a refit would move between ranks."""

    family: str
    """Name of the model's family."""
    trainer: RankMesh
    """Mesh of the trainer, whose ranks send bytes."""
    engine: RankMesh
    """Mesh of the engine, whose ranks receive bytes."""
    dtype: str
    """Dtype in which values are sent, a key of `CASTS`."""
    parameters: int
    """Number of elements of the model that are sent; an element that is sent several times counts once."""
    together: bool
    """Whether rank i of the engine and rank i of the trainer are the same process; if not, the engine's ranks are
    separate processes.
    """
    matrix: Matrix
    """Number of bytes from each trainer rank to each engine rank, including copies within one process."""
    tensors: Mapping[str, int]
    """Logical tensor -> number of its bytes that all ranks of the engine together receive."""
    trainer_only: tuple[str, ...]
    """Logical tensors that the trainer has but the engine's dialect lacks."""
    undecided: tuple[str, ...]
    """Logical tensors for which the config does not state whether the model has them."""

    @cached_property
    def between_ranks(self) -> Matrix:
        """The matrix of bytes from trainer ranks to engine ranks, without copies within one process."""
        matrix = self.matrix.copy()
        if self.together:
            np.fill_diagonal(matrix, 0)
        return matrix

    @property
    def total(self) -> int:
        """Total number of bytes sent between different processes."""
        return int(self.between_ranks.sum())

    @property
    def own(self) -> int:
        """Number of bytes that are copied within a process."""
        return int(self.matrix.sum()) - self.total

    def within(self, ranks_per_node: int) -> int:
        """Return the number of bytes that are sent between ranks of the same machine.

        Args:
            ranks_per_node: number of ranks per machine.
        """
        sources, targets = np.arange(self.trainer.ranks), np.arange(self.engine.ranks)
        first = 0 if self.together else self.trainer.ranks
        same = (sources // ranks_per_node)[:, None] == ((first + targets) // ranks_per_node)[None, :]
        return int(self.between_ranks[same].sum())

    def as_json(self, ranks_per_node: int | None = None) -> dict[str, Any]:
        """Return the traffic as plain JSON data.

        Args:
            ranks_per_node: number of ranks per machine; None if it is unknown.
        """
        data: dict[str, Any] = {
            "family": self.family,
            "trainer": {"dialect": self.trainer.dialect, "mesh": self.trainer.text, "ranks": self.trainer.ranks},
            "engine": {"dialect": self.engine.dialect, "mesh": self.engine.text, "ranks": self.engine.ranks},
            "same_ranks": self.together,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "bytes": self.total,
            "bytes_own": self.own,
            "sent": self.between_ranks.sum(axis=1).tolist(),
            "received": self.between_ranks.sum(axis=0).tolist(),
            "tensors": dict(self.tensors),
            "stays": list(self.trainer_only),
            "undecided": list(self.undecided),
        }
        if ranks_per_node is not None:
            inside_nodes = self.within(ranks_per_node)
            data |= {"bytes_inside_nodes": inside_nodes, "bytes_between_nodes": self.total - inside_nodes}
        return data | {"matrix": self.between_ranks.tolist()}


def family_of_config(settings: Settings) -> Family:
    """Return the family of a model, from its config alone, or as the user names it.

    Raises:
        UsageError: with code UNKNOWN_FAMILY or AMBIGUOUS, if the config names no family, or several.
    """
    if settings.family is not None:
        return pick_family(settings.family, settings.families)
    types = model_types(settings.config or {})
    families = settings.families.of_types(types[:1]) or settings.families.of_types(types[1:])
    if len(families) != 1:
        candidates = f"; it may be {' or '.join(family.name for family in families)}" if families else ""
        code: Code = "AMBIGUOUS" if families else "UNKNOWN_FAMILY"
        message = f"the config's model_type {', '.join(map(repr, types)) or '(none)'} names no one family{candidates}"
        raise refuse(code, message, hint="Name the family: --family NAME.")
    return families[0]


def config_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of a model's weights that a config states, a key of `CASTS`; bf16 if it states none."""
    nested = config.get("text_config")
    levels = [config, nested] if isinstance(nested, Mapping) else [config]
    dtypes = [str(level[key]).removeprefix("torch.") for level in levels for key in DTYPE_KEYS if level.get(key)]
    return next((_SHORT[each] for each in dtypes if each in _SHORT), "bf16")


def plan_traffic(
    settings: Settings, sides: tuple[RankMesh, RankMesh], *, dtype: str | None = None, together: bool = False
) -> Traffic:
    """Compute the traffic of a refit of a model from the model's config.

    Args:
        settings: the user's settings for the model; they must contain a config.
        sides: the mesh of the trainer, and the mesh of the engine.
        dtype: dtype in which values are sent, a key of `CASTS`; None means the config's dtype, or bf16 if the config
            states none.
        together: whether rank i of the engine and rank i of the trainer are the same process.

    Raises:
        UsageError: with code UNKNOWN_FAMILY or AMBIGUOUS, if the family is unknown; with code UNKNOWN_AXIS, if an axis
            has no known size.
        Refused: any refusal that `traffic` raises.
    """
    config = settings.config or {}
    family, sent_dtype = family_of_config(settings), dtype or config_dtype(config)
    return traffic(family, config, sides, axes=settings.axes, dtype=sent_dtype, together=together)


def traffic(
    family: Family,
    config: Mapping[str, Any],
    sides: tuple[RankMesh, RankMesh],
    *,
    axes: Mapping[str, int],
    dtype: str = "bf16",
    together: bool = False,
) -> Traffic:
    """Compute the bytes that a refit would move between ranks.

    Args:
        family: family of the model.
        config: config of the model.
        sides: the mesh of the trainer, and the mesh of the engine.
        axes: axis -> size, which overrides the size in the config.
        dtype: dtype in which values are sent, a key of `CASTS`.
        together: whether rank i of the engine and rank i of the trainer are the same process.

    Raises:
        Refused: with code MISSING_TENSOR, if the engine needs tensors that the trainer's dialect lacks; with code
            UNSUPPORTED, if a tensor cannot be divided among the ranks.
        UsageError: with code UNKNOWN_AXIS, if the size of an axis is unknown.
    """
    check_pairs(*sides)
    trainer, engine = (_Side.of(family, config, mesh, axes) for mesh in sides)
    matrix = np.zeros((sides[0].ranks, sides[1].ranks), np.int64)
    tensors: dict[str, int] = {}
    missing = sorted(
        name
        for name, component_kinds in engine.kinds.items()
        if component_kinds.keys() - trainer.kinds.get(name, {}).keys()
    )
    if missing:
        message = f"the trainer's dialect {sides[0].dialect} does not have {', '.join(missing)}, which the engine needs"
        raise refuse("MISSING_TENSOR", message, hint="Choose the dialect of the whole model, such as hf.")
    parameters = 0
    for component in engine.kinds:
        item = ITEM_BITS[CASTS[_WIDE if component in family.precise else dtype]] // 8
        component_bytes = np.zeros_like(matrix)
        for meeting in _layer_groups(component, trainer, engine):
            parameters += meeting.add(component_bytes, item, together=together)
        matrix += component_bytes
        tensors[component] = int(component_bytes.sum())
    stays = tuple(sorted(trainer.kinds.keys() - engine.kinds.keys()))
    undecided = tuple(sorted(trainer.model.undecided))
    return Traffic(family.name, *sides, dtype, parameters, together, matrix, tensors, stays, undecided)


@dataclass(frozen=True)
class _Side:
    """The trainer or the engine in a refit, with its tensors and their division among its ranks."""

    model: Model
    cutter: Cutter
    kinds: Mapping[str, Mapping[Index, TensorKind]]

    @classmethod
    def of(cls, family: Family, config: Mapping[str, Any], mesh: RankMesh, axes: Mapping[str, int]) -> _Side:
        tp = mesh.degree(TP) if mesh.serves and mesh.ep == 1 else 1
        model = Model(family, Sizes(family, config_for_ranks(config, tp), axes), mesh.degree(TP))
        dialect = pick_dialect(family, mesh.dialect)
        kinds = model.kinds(dialect)
        model.check_decided(dialect)
        return cls(model, Cutter(family, mesh), kinds)

    def stages(self, component: str, index: Index) -> tuple[int, ...]:
        """Return the pipeline stages that hold a logical tensor of a layer; empty without pipeline parallelism.

        The first stage holds the embedding, and the last stage norm and head. If the embedding is tied to the head, the
        first and the last stage hold it.

        Raises:
            Refused: with code UNSUPPORTED, if the stage of the logical tensor is unknown.
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
            raise refuse(
                "UNSUPPORTED", message, hint=("Omit pp, or choose a dialect with layer numbers in tensor names.")
            )
        return (self.cutter.stage(index[0], self.model.sizes.at({})[_LAYERS]),)

    def of_stages(self, boxes: Sequence[RankBoxes], stages: tuple[int, ...]) -> list[RankBoxes]:
        """Return only the boxes that ranks of the given pipeline stages hold."""
        if not stages:
            return list(boxes)
        mesh = self.cutter.mesh
        stage_of_rank = np.array([mesh.at(rank, PP) for rank in range(mesh.ranks)])
        stage_boxes = [RankBoxes(each.ranks[np.isin(stage_of_rank[each.ranks], stages)], each.boxes) for each in boxes]
        return [each for each in stage_boxes if len(each.ranks)]


@dataclass(frozen=True)
class _LayerGroup:
    """Layers of a logical tensor that are divided in the same way, in the trainer and in the engine."""

    component: str
    sources: Sequence[RankBoxes]
    targets: Sequence[RankBoxes]
    count: int

    def add(self, matrix: Matrix, item: int, *, together: bool) -> int:
        """Add the bytes between each pair of ranks to a matrix; return the number of sent elements, each counted once.

        If several ranks have the same boxes, each sends an equal share. A rank that needs its own boxes takes them from
        its own memory instead.

        Args:
            matrix: the matrix to which bytes are added.
            item: number of bytes per element.
            together: whether rank i of the engine and rank i of the trainer are the same process.

        Raises:
            Refused: with code UNSUPPORTED, if boxes on the trainer's ranks overlap partly, or do not cover the tensor.
        """
        if not self.sources or not self.targets:
            return 0
        elements = np.stack([_overlaps(self.sources, target.boxes) for target in self.targets], axis=1)
        needed = [_overlaps([target], target.boxes)[0] for target in self.targets]
        if (elements.sum(axis=0) != needed).any():
            message = (
                f"{self.component}\nthe trainer's ranks hold parts of it that overlap each other, or not all of it"
            )
            raise refuse("UNSUPPORTED", message, hint="Choose parallel degrees that divide the tensor evenly.")
        copies = np.repeat(
            [len(source.ranks) for source in self.sources], [len(source.ranks) for source in self.sources]
        )
        copy_index = np.concatenate([np.arange(len(source.ranks)) for source in self.sources])
        owner = np.repeat(np.arange(len(self.sources)), [len(source.ranks) for source in self.sources])
        share, remainder = np.divmod(elements[owner] * item * self.count, copies[:, None])
        bytes_sent = share + (copy_index[:, None] < remainder)
        ranks = np.concatenate([source.ranks for source in self.sources])
        for column, target in enumerate(self.targets):
            matrix[np.ix_(ranks, target.ranks)] += bytes_sent[:, column, None]
            for number, source in enumerate(self.sources) if together else ():
                shared_ranks = np.intersect1d(source.ranks, target.ranks)
                matrix[np.ix_(source.ranks, shared_ranks)] -= bytes_sent[owner == number, column, None]
                matrix[shared_ranks, shared_ranks] += elements[number, column] * item * self.count
        return sum(int(_overlaps([source], source.boxes)[0]) for source in self.sources) * self.count


def _overlaps(groups: Sequence[RankBoxes], boxes: NDArray[np.int64]) -> Matrix:
    """Count the elements that each group of boxes has in common with the given boxes; the boxes within a group are
    disjoint.
    """
    first = np.concatenate([each.boxes for each in groups])
    low = np.maximum(first[:, None, :, 0], boxes[None, :, :, 0])
    high = np.minimum(first[:, None, :, 1], boxes[None, :, :, 1])
    counts = np.clip(high - low, 0, None).prod(axis=-1).sum(axis=1)
    starts = np.cumsum([0, *(len(each.boxes) for each in groups[:-1])])
    return np.add.reduceat(counts, starts)


def _layer_groups(component: str, trainer: _Side, engine: _Side) -> Iterator[_LayerGroup]:
    """Yield the layers of a logical tensor, grouped by how they are divided among ranks."""
    groups: dict[tuple[Any, ...], list[Index]] = defaultdict(list)
    for index, target in engine.kinds[component].items():
        source = trainer.kinds[component][index]
        key = source, target, trainer.stages(component, index), engine.stages(component, index)
        groups[tuple(map(_identity, key))].append(index)
    cache: dict[tuple[Any, ...], list[RankBoxes]] = {}
    name_axes = trainer.model.axes_of(component)
    for indices in groups.values():
        first = indices[0]
        source, target = trainer.kinds[component][first], engine.kinds[component][first]
        stages = trainer.stages(component, first), engine.stages(component, first)
        dim_axes = tuple(axis for axis in name_axes if axis not in source.axes or axis not in target.axes)
        layers = _runs(indices, name_axes, dim_axes, component)
        axes = tuple(a for a in trainer.model.family.tensors[component].axes if a not in name_axes or a in dim_axes)
        sides_boxes = []
        for side, kind, stage in ((trainer, source, stages[0]), (engine, target, stages[1])):
            cache_key = id(side), id(kind), layers
            if cache_key not in cache:
                cache[cache_key] = side.cutter.rank_boxes(kind, component, axes, layers)
            sides_boxes.append(side.of_stages(cache[cache_key], stage))
        yield _LayerGroup(component, sides_boxes[0], sides_boxes[1], 1 if dim_axes else len(indices))


def _identity(value: object) -> object:
    return id(value) if isinstance(value, TensorKind) else value


def _runs(
    indices: Sequence[Index], name_axes: Sequence[str], dim_axes: Sequence[str], component: str
) -> tuple[Interval, ...]:
    """Return intervals of layer indices, if the layer axis is a dim of the tensors of the trainer or of the engine."""
    if not dim_axes:
        return ()
    if len(name_axes) > 1:
        message = f"{component}: of its axes {', '.join(name_axes)}, one side has some as dims, the other in names"
        raise refuse("UNSUPPORTED", message, hint="Choose a dialect with layer numbers in tensor names.")
    runs: list[Interval] = []
    for (layer,) in sorted(indices):
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return tuple(runs)
