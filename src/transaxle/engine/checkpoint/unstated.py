"""What a checkpoint leaves unstated, as far as its model or its table proves it.

**Names of the parameters that torch's `optimizer.state_dict()` numbers.**

    model.safetensors  optimizer.pt     transformers' Trainer in one process: weights with decay, then those without
    model.safetensors  optimizer.bin    accelerate: the groups that the script makes

Each group numbers its parameters in the order in which the model registers them, and whoever makes groups goes through
`model.named_parameters()`. That order is in a torch file of the weights; otherwise it is that of transformers' model of
the config, built without memory; where files have other names than it has, as of experts, tables say which these are.
The numbers have names where the parameters can be dealt to the groups in one way only, going by the sizes of the groups
and by the shapes of all their state, or where Trainer's own rule deals them so.

**How tensor-parallel ranks were cut**, where they do not record it: the tables say which axes may be, and `cutter`
divides by them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transaxle.axes.layout.bind import Index, bind, split_slot
from transaxle.axes.layout.divide import Division, divide
from transaxle.axes.notation.family import Line, Sizes
from transaxle.engine.checkpoint.recognise import check_same, recognise
from transaxle.engine.checkpoint.settings import CONFIG, Settings, stored_config
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Shape
from transaxle.formats.deepspeed.spread import HINT, UNKNOWN_CUTS, Cutter, Divider
from transaxle.formats.registry import TORCH
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.reader import TIES
from transaxle.formats.training_state import GROUPS, PARAMS

_TRAINER = "trainer_state.json"
"""File beside the weights that Trainer writes."""
_DECAY = "weight_decay"
_STEP = "step"
_MOST_STATES = 20_000
"""Cap on the ways to deal a first part of the parameters that are followed at once."""
_HINT = (
    "Save the state by name from the program that trains: tx.save(model, FOLDER, to=…, optimizer=optimizer). "
    "To do without it: --no-optimizer (optimizer=False)."
)


InMemory = Callable[[Container], Mapping[str, Shape]]
"""Returns the shapes of weights under the names that transformers' model has in memory."""


class _UnprovedError(Exception):
    """Why it is not known which parameter has which number."""


def names_by_number(
    weights: Container, state: Container, config: Mapping[str, Any] | None, in_memory: InMemory
) -> dict[str, str]:
    """Return the names of an optimizer's numbered parameters, `#0` -> name.

    torch and transformers are imported if the order of the model's parameters is not in the weights' files.

    Args:
        weights: the model that the optimizer trains.
        state: its state, and the settings of its groups.
        config: of the model; None: that beside the weights.
        in_memory: says what the weights are in memory, where their files have other names.

    Raises:
        Refused: UNSUPPORTED where the names cannot be proved.
    """
    try:
        return _proved(weights, state, config, in_memory)
    except _UnprovedError as error:
        (file, *_) = state.files
        message = f"the optimizer numbers its parameters, and it cannot be proved which is which: {error}"
        raise gathered([Refusal("UNSUPPORTED", message, Where(file), _HINT)]) from None


def _proved(
    weights: Container, state: Container, config: Mapping[str, Any] | None, in_memory: InMemory
) -> dict[str, str]:
    groups = [list(group[PARAMS]) for group in state.metadata.get(GROUPS, ())]
    numbers = [number for group in groups for number in group]
    shapes = _shapes(state)
    if not shapes.keys() <= set(numbers) or len(set(numbers)) < len(numbers):
        raise _UnprovedError("its groups do not list each parameter once")
    if config is None:
        config = stored_config(weights.storage) if CONFIG in weights.carried else {}
    model, registered = None, dict[str, Shape]()
    if weights.format == TORCH.name:
        omitted = weights.beside.union(weights.metadata.get(TIES, {}))
        registered = {name: entry.shape for name, entry in weights.entries.items() if name not in omitted}
    if len(registered) != len(numbers):  # the file does not tell, or has buffers too
        model = _model(config)
        registered = _registered(model, weights, in_memory)
    if len(registered) != len(numbers):
        raise _UnprovedError(
            f"it has {len(numbers)} parameters, and the model {len(registered)}; some are frozen, or are buffers"
        )
    names, order = list(registered), list(registered.values())
    wanted = [[shapes.get(number) for number in group] for group in groups]
    owners, ways = dealt(order, wanted)
    if not ways:
        raise _UnprovedError("the shapes of its state are not those of the model's parameters in the model's order")
    if ways > 1:
        if _TRAINER not in weights.carried or len(groups) != 2 or state.metadata[GROUPS][1].get(_DECAY) != 0:
            raise _UnprovedError("they can be dealt to its groups in several ways")
        owners = _by_trainer(model or _model(config), names)
        if not _fits(order, owners, wanted):
            raise _UnprovedError("they can be dealt to its groups in several ways, and Trainer's is none of them")
    following = [iter(group) for group in groups]
    return {next(following[group]): name for name, group in zip(names, owners, strict=True)}


def _shapes(state: Container) -> dict[str, Shape]:
    """Return the shape of each numbered parameter that has state of dims; all of it must have one shape."""
    shapes: dict[str, Shape] = {}
    for full, entry in state.entries.items():
        number, key = split_slot(full)
        if not key or key == _STEP or not entry.shape:
            continue
        if shapes.setdefault(number, entry.shape) != entry.shape:
            other = list(shapes[number])
            raise _UnprovedError(f"the state of parameter {number} has the shapes {other} and {list(entry.shape)}")
    return shapes


def dealt(order: Sequence[Shape], groups: Sequence[Sequence[Shape | None]]) -> tuple[list[int], int]:
    """Deal parameters to groups, each of which takes its own in their order.

    Args:
        order: shapes of the parameters.
        groups: shapes that each group expects; None: any.

    Returns:
        The group of each parameter, and in how many ways they can be dealt: 0, 1, or 2 for more.
    """
    ways = {(0,) * len(groups): 1}
    origins: list[dict[tuple[int, ...], int]] = []
    for shape in order:
        following: dict[tuple[int, ...], int] = {}
        origin: dict[tuple[int, ...], int] = {}
        for taken, count in ways.items():
            for number, group in enumerate(groups):
                at = taken[number]
                if at < len(group) and group[at] in (None, shape):
                    reached = (*taken[:number], at + 1, *taken[number + 1 :])
                    following[reached] = min(2, following.get(reached, 0) + count)
                    origin[reached] = number
        if len(following) > _MOST_STATES:
            return [], 2
        ways = following
        origins.append(origin)
    end = tuple(map(len, groups))
    if end not in ways:
        return [], 0
    count = ways[end]
    owners: list[int] = []
    for origin in reversed(origins):
        number = origin[end]
        owners.append(number)
        end = (*end[:number], end[number] - 1, *end[number + 1 :])
    return owners[::-1], count


def _by_trainer(model: Any, names: Sequence[str]) -> list[int]:
    """Return the group of each parameter in an optimizer that Trainer makes: with weight decay, and without."""
    from transformers import Trainer

    trainer = Trainer.__new__(Trainer)  # the method asks nothing of it
    decayed = frozenset(trainer.get_decay_parameter_names(model))
    return [int(name not in decayed) for name in names]


def _fits(order: Sequence[Shape], owners: Sequence[int], groups: Sequence[Sequence[Shape | None]]) -> bool:
    """Tell whether each group gets what it expects, see `dealt`."""
    given = [
        [shape for shape, own in zip(order, owners, strict=True) if own == number] for number in range(len(groups))
    ]
    return all(
        len(shapes) == len(group) and all(b in (None, a) for a, b in zip(shapes, group, strict=True))
        for shapes, group in zip(given, groups, strict=True)
    )


def _model(config: Mapping[str, Any]) -> Any:
    """Build transformers' model of a config on the meta device."""
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
            read = transformers.AutoConfig.from_pretrained(folder)  # only so it reads what it has written itself
            model_class = getattr(transformers, name)
            return model_class.from_config(read) if hasattr(model_class, "from_config") else model_class(read)
    except Exception as error:  # noqa: BLE001 - whatever a model of somebody's config raises
        raise _UnprovedError(f"transformers {transformers.__version__} cannot build {name}: {error!r}") from None


def _registered(model: Any, weights: Container, in_memory: InMemory) -> dict[str, Shape]:
    """Return a model's parameters in its order, with their shapes; all must be those of the weights."""
    registered = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored: Mapping[str, Shape] = {name: entry.shape for name, entry in weights.entries.items()}
    why = ""
    if not registered.keys() <= stored.keys():  # transformers splits and renames parameters when it saves them
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
    """Return a function that asks the tables how a checkpoint's parameters are cut.

    Args:
        settings: the user's settings for the checkpoint.
    """

    def read(storage: Storage, names: Sequence[str], said: Mapping[str, Any]) -> Divider:
        config = settings.config
        if config is None:
            config = stored_config(storage) or said
        check_same(config, said, settings.axes)
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
    """Divides parameters by the lines of a dialect."""

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
                hint="Add one that names the axes over which tensor parallelism splits.",
            )
        line, position = self._lines[name]
        index = dict(zip(line.name.axes, position, strict=True))
        try:
            return divide(line.expression, self._cuts, self._sizes.at(index), shards)
        except TransaxleError as error:
            raise gathered(Refusal(r.code, r.message, Where(None, name), r.hint) for r in error.refusals) from None
