"""Facts that a checkpoint does not state, but that follow from its model or its family's table of tensor names.

**Names of the parameters that torch's `optimizer.state_dict()` numbers.**

    model.safetensors  optimizer.pt     transformers' Trainer in one process: weights with decay, then those without
    model.safetensors  optimizer.bin    accelerate: the groups that the script makes

The parameters of each group are numbered in the order in which the model registers them, because groups are made by
looping over `model.named_parameters()`. A torch file lists the weights in this order. If the weights are in safetensors
files, transformers' model for the config, which is built without memory for its weights, shows the order. If the names
in the files differ from those of transformers' model, as for experts, the tables translate them. The numbers get names
only if there is proof. Either the sizes of the groups and the shapes of the optimizer state leave a single way of
assigning parameters to groups, or the rule that Trainer uses leads to an assignment that fits.

    model_world_size_2_rank_0.pt  optim_world_size_2_rank_0.pt    verl: rank files

Rank files have the model's order too. They also show how ranks share each tensor, and a parameter is shared like its
state. So the weights may include buffers and frozen parameters, which have no state: if they can be left out in a
single way, that is proof as well.

**How tensor-parallel ranks cut parameters**, if the files do not record it: the tables state which axes may be cut, and
`cutter` divides the parameters along these axes.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transaxle.axes.layout.bind import Index, bind, split_slot
from transaxle.axes.layout.divide import Division, divide
from transaxle.axes.notation.family import Line, Sizes
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.engine.checkpoint.settings import CONFIG, Settings, read_stored_config
from transaxle.engine.checkpoint.stored_names import check_same
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Extent, Shape
from transaxle.formats.deepspeed.spread import HINT, UNKNOWN_CUTS, Cutter, Divider
from transaxle.formats.registry import TORCH
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.reader import TIES
from transaxle.formats.training_state import GROUPS, PARAMS

_TRAINER = "trainer_state.json"
"""File that transformers' Trainer writes beside the weights."""
_DECAY = "weight_decay"
_STEP = "step"
_OUT_OF_ORDER = "the shapes of its state are not those of the model's parameters in the model's order"
_MOST_STATES = 20_000
"""Largest number of partial assignments of parameters to optimizer groups that the search stores at once."""
_HINT = (
    "Save the optimizer state by name from the training program: tx.save(model, FOLDER, to=…, optimizer=optimizer). "
    "To convert without optimizer state: --no-optimizer (optimizer=False)."
)


InMemory = Callable[[Container], Mapping[str, Shape]]
"""A function that returns the shapes of stored weights under the parameter names that transformers' model has in
memory.
"""


class _UnprovedError(Exception):
    """An exception with the reason why the names of an optimizer's numbered parameters cannot be proved."""


def names_by_number(
    weights: Container, state: Container, config: Mapping[str, Any] | None, in_memory: InMemory
) -> dict[str, str]:
    """Return the names of an optimizer's numbered parameters: number, written `#0`, `#1`, … -> name.

    torch and transformers are imported only if the weight files do not show the order of the model's parameters.

    Args:
        weights: the stored weights of the model that the optimizer trains.
        state: the optimizer's state, and the settings of its parameter groups.
        config: the config of the model; None means the config.json beside the weights.
        in_memory: function that returns the weights' shapes under the model's names in memory, if the names in the
            files differ.

    Raises:
        Refused: with code UNSUPPORTED, if the names cannot be proved.
    """
    try:
        return _prove_names(weights, state, config, in_memory)
    except _UnprovedError as error:
        (file, *_) = state.files
        message = f"the optimizer numbers its parameters, and it cannot be proved which is which: {error}"
        raise gathered([Refusal("UNSUPPORTED", message, Where(file), _HINT)]) from None


def _prove_names(
    weights: Container, state: Container, config: Mapping[str, Any] | None, in_memory: InMemory
) -> dict[str, str]:
    groups = [list(group[PARAMS]) for group in state.metadata.get(GROUPS, ())]
    numbers = [number for group in groups for number in group]
    shapes = _state_shapes(state)
    if not shapes.keys() <= set(numbers) or len(set(numbers)) < len(numbers):
        raise _UnprovedError("its groups do not list each parameter once")
    if weights.spreads and state.spreads:
        try:
            return _names_in_rank_files(weights, state, groups)
        except _UnprovedError as error:
            with suppress(_UnprovedError):
                return _names_in_model(weights, state, groups, config, in_memory)
            raise error from None
    return _names_in_model(weights, state, groups, config, in_memory)


def _names_in_model(
    weights: Container,
    state: Container,
    groups: Sequence[Sequence[str]],
    config: Mapping[str, Any] | None,
    in_memory: InMemory,
) -> dict[str, str]:
    """Return number -> name, for the parameters of an optimizer that numbers them in the order of the torch file, or of
    transformers' model.
    """
    shapes, numbers = _state_shapes(state), [number for group in groups for number in group]
    if config is None:
        config = read_stored_config(weights.storage) if CONFIG in weights.carried else {}
    model, parameter_shapes = None, dict[str, Shape]()
    if weights.format == TORCH.name:
        omitted = weights.beside.union(weights.metadata.get(TIES, {}))
        parameter_shapes = {name: entry.shape for name, entry in weights.entries.items() if name not in omitted}
    # If the numbers differ, the weights file contains buffers too, or does not show the order of the parameters.
    if len(parameter_shapes) != len(numbers):
        model = _meta_model(config)
        parameter_shapes = _parameter_shapes(model, weights, in_memory)
    if len(parameter_shapes) != len(numbers):
        raise _UnprovedError(
            f"it has {len(numbers)} parameters, and the model {len(parameter_shapes)}; some are frozen, or are buffers"
        )
    names, order = list(parameter_shapes), list(parameter_shapes.values())
    expected = [[shapes.get(number) for number in group] for group in groups]
    owners, assignments = assign_groups(order, expected)
    if not assignments:
        raise _UnprovedError(_OUT_OF_ORDER)
    if assignments > 1:
        if _TRAINER not in weights.carried or len(groups) != 2 or state.metadata[GROUPS][1].get(_DECAY) != 0:
            raise _UnprovedError("they can be dealt to its groups in several ways")
        owners = [*_by_trainer(model or _meta_model(config), names)]
        if not _fits(order, owners, expected):
            raise _UnprovedError("they can be dealt to its groups in several ways, and Trainer's is none of them")
    return _dealt(names, owners, groups)


def _names_in_rank_files(weights: Container, state: Container, groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return number -> name, for the parameters of an optimizer that numbers them in the order of the weights in rank
    files.
    """
    shapes = _state_shapes(state)
    parts = {full: entry for full, entry in state.entries.items() if entry.shape and split_slot(full)[0] in shapes}
    keys: dict[str, tuple[Shape, Hashable]] = {
        split_slot(full)[0]: (entry.shape, state.spreads.get(full)) for full, entry in parts.items()
    }
    candidates: dict[tuple[Extent, ...] | str, tuple[str, Hashable]] = {}
    for name, entry in weights.entries.items():
        if name not in weights.beside:  # weights at one place in the file are tied: the model registers the first
            place = entry.extents if entry.nbytes else name
            candidates.setdefault(place, (name, (entry.shape, weights.spreads.get(name))))
    names, order = zip(*candidates.values(), strict=True) if candidates else ((), ())
    owners, assignments = assign_groups(order, [[keys.get(number) for number in group] for group in groups])
    count = sum(map(len, groups))
    if not assignments:
        raise _UnprovedError(f"{_OUT_OF_ORDER}; it has {count} parameters, and the model {len(names)}")
    if assignments > 1:
        spare = len(names) - count
        frozen = f", of which {spare} have no state: they are frozen, or are buffers" if spare else ""
        raise _UnprovedError(f"its {count} parameters can be dealt to the model's {len(names)} in several ways{frozen}")
    return _dealt(names, owners, groups)


def _dealt(names: Sequence[str], owners: Sequence[int | None], groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return number -> name: the numbers of each group, in order, are those of the group's parameters in the model's
    order.
    """
    numbers_left = [iter(group) for group in groups]
    return {next(numbers_left[group]): name for name, group in zip(names, owners, strict=True) if group is not None}


def _state_shapes(state: Container) -> dict[str, Shape]:
    """Return number of a parameter -> its shape, which is that of its optimizer state; all its states except 0-d ones
    must have one shape.
    """
    shapes: dict[str, Shape] = {}
    for full, entry in state.entries.items():
        number, key = split_slot(full)
        if not key or key == _STEP or not entry.shape:
            continue
        if shapes.setdefault(number, entry.shape) != entry.shape:
            first_shape = list(shapes[number])
            raise _UnprovedError(
                f"the state of parameter {number} has the shapes {first_shape} and {list(entry.shape)}"
            )
    return shapes


def assign_groups(
    order: Sequence[Hashable], groups: Sequence[Sequence[Hashable | None]]
) -> tuple[list[int | None], int]:
    """Assign a model's parameters to optimizer groups; within each group, the parameters keep the model's order.

    If the groups have fewer parameters than the model, the remaining parameters are frozen.

    Args:
        order: shapes of the parameters, in the model's order, or any other property that a parameter shares with its
            state.
        groups: for each group, the shapes that it expects, in the group's order; None means any shape.

    Returns:
        The index of each parameter's group, None for a frozen one, and the number of possible assignments: 0, 1, or 2,
            which means two or more.
    """
    expected = Counter(shape for group in groups for shape in group)
    surplus = {shape: count - expected[shape] for shape, count in Counter(order).items()}
    spare = len(order) - expected.total()
    partial_counts = {(0,) * len(groups): 1}
    origins: list[dict[tuple[int, ...], int | None]] = []
    for at, shape in enumerate(order):
        next_counts: dict[tuple[int, ...], int] = {}
        origin: dict[tuple[int, ...], int | None] = {}
        may_be_frozen = expected[None] > 0 or surplus[shape] > 0
        for filled, count in partial_counts.items():
            if may_be_frozen and at - sum(filled) < spare:
                next_counts[filled] = min(2, next_counts.get(filled, 0) + count)
                origin[filled] = None
            for number, group in enumerate(groups):
                position = filled[number]
                if position < len(group) and group[position] in (None, shape):
                    reached = (*filled[:number], position + 1, *filled[number + 1 :])
                    next_counts[reached] = min(2, next_counts.get(reached, 0) + count)
                    origin[reached] = number
        if len(next_counts) > _MOST_STATES:
            return [], 2
        partial_counts = next_counts
        origins.append(origin)
    end = tuple(map(len, groups))
    if end not in partial_counts:
        return [], 0
    count = partial_counts[end]
    owners: list[int | None] = []
    for origin in reversed(origins):
        owner = origin[end]
        owners.append(owner)
        if owner is not None:
            end = (*end[:owner], end[owner] - 1, *end[owner + 1 :])
    return owners[::-1], count


def _by_trainer(model: Any, names: Sequence[str]) -> list[int]:
    """Return the index of each parameter's group in an optimizer that Trainer makes: 0 with weight decay, 1 without."""
    from transformers import Trainer

    trainer = Trainer.__new__(Trainer)  # the method called below uses no attributes of the object
    decayed = frozenset(trainer.get_decay_parameter_names(model))
    return [int(name not in decayed) for name in names]


def _fits(order: Sequence[Shape], owners: Sequence[int | None], groups: Sequence[Sequence[Shape | None]]) -> bool:
    """Return whether each group gets the shapes that it expects; see `assign_groups`."""
    assigned = [
        [shape for shape, owner in zip(order, owners, strict=True) if owner == number] for number in range(len(groups))
    ]
    return all(
        len(shapes) == len(group) and all(b in (None, a) for a, b in zip(shapes, group, strict=True))
        for shapes, group in zip(assigned, groups, strict=True)
    )


def _meta_model(config: Mapping[str, Any]) -> Any:
    """Build transformers' model for a config on torch's meta device (without memory for the weights)."""
    if not config.get("model_type"):
        raise _UnprovedError("there is no config.json of the model (--config FILE, config=)")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise _UnprovedError(f"the order of its parameters takes torch and transformers: {error}") from None
    (name, *_) = config.get("architectures") or ("AutoModelForCausalLM",)
    try:
        with warnings.catch_warnings(), TemporaryDirectory() as folder, torch.device("meta"):
            warnings.simplefilter("ignore")
            Path(folder, CONFIG).write_text(json.dumps(config), "utf-8")
            # this function of transformers reads nested configs correctly
            read = transformers.AutoConfig.from_pretrained(folder)
            model_class = getattr(transformers, name)
            return model_class.from_config(read) if hasattr(model_class, "from_config") else model_class(read)
    except Exception as error:  # noqa: BLE001 - the model class of an unknown config may raise anything
        raise _UnprovedError(f"transformers {transformers.__version__} cannot build {name}: {error!r}") from None


def _parameter_shapes(model: Any, weights: Container, in_memory: InMemory) -> dict[str, Shape]:
    """Return parameter name -> shape, in the model's order; the shapes must match the stored weights."""
    registered = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored: Mapping[str, Shape] = {name: entry.shape for name, entry in weights.entries.items()}
    why = ""
    if not registered.keys() <= stored.keys():  # transformers splits and renames these parameters when it saves them
        try:
            stored = in_memory(weights)
        except TransaxleError as error:
            why = f": {error.refusals[0].message}"
    for name, shape in registered.items():
        if name not in stored:
            message = f"in memory, {type(model).__name__} has {name}, which the weights' files do not have{why}"
            raise _UnprovedError(message)
        if stored[name] != shape:
            raise _UnprovedError(f"{name} is {list(shape)} in the config's model, and {list(stored[name])} in its file")
    return registered


_TP = "tp"


def cutter(settings: Settings) -> Cutter:
    """Return a function that finds in the family's table how tensor parallelism cuts a checkpoint's parameters.

    Args:
        settings: the user's settings for reading the checkpoint.
    """

    def read(storage: Storage, names: Sequence[str], recorded: Mapping[str, Any]) -> Divider:
        config = settings.config
        if config is None:
            config = read_stored_config(storage) or recorded
        check_same(config, recorded, settings.axes)
        try:
            reading = recognise(names, config, settings.families, settings.family, settings.dialect)
        except TransaxleError as error:
            if settings.family or settings.dialect:
                raise
            raise refuse("UNSUPPORTED", f"{UNKNOWN_CUTS}; {error.refusals[0].message}", hint=HINT) from None
        sizes = Sizes(reading.family, config, settings.axes)
        bound = bind(names, reading.family, reading.dialect, sizes, reading.prefix)
        lines = {
            name: (line, index)
            for (line, _), names_of_line in bound.names.items()
            for index, name in names_of_line.items()
        }
        return _Tables(sizes, reading.dialect.label, lines)

    return read


class _Tables:
    """Divides parameters among tensor-parallel ranks according to the lines of a dialect's table."""

    def __init__(self, sizes: Sizes, dialect: str, lines: Mapping[str, tuple[Line, Index]]) -> None:
        self._sizes, self._lines = sizes, lines
        self._cuts = tuple(cut for cut in sizes.family.cuts if cut.mesh == _TP)
        self._table = f"{sizes.family.name}, dialect {dialect},"

    def __call__(self, name: str, shards: Sequence[tuple[int, ...]]) -> Division:
        if name not in self._lines:
            raise refuse("UNSUPPORTED", f"{UNKNOWN_CUTS}; {self._table} has no line for it", tensor=name, hint=HINT)
        if not self._cuts:
            message = f"{UNKNOWN_CUTS}; {self._table} has no `cut tp` statement"
            raise refuse(
                "UNSUPPORTED",
                message,
                tensor=name,
                hint="Add a `cut` statement that names the axes that tensor parallelism divides.",
            )
        line, position = self._lines[name]
        index = line.name.index_at(position)
        try:
            return divide(line.expression, self._cuts, self._sizes.at(index), shards)
        except TransaxleError as error:
            raise gathered(Refusal(r.code, r.message, Where(None, name), r.hint) for r in error.refusals) from None
