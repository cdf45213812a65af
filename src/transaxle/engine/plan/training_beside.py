"""Training state beside a model: that of its optimizer, which must have its parameters in the target, and other state,
which is not part of a hub's model, nor of the equality of two checkpoints.

Optimizer state that no reader looks for is lost without a word, and a reader that looks for more begins with zeros. A
parameter without any is no fault by itself: frozen ones have none, and torch makes it with the first gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY, pick_dialect
from transaxle.engine.views.decoded import regrouped
from transaxle.engine.views.encoded import View
from transaxle.engine.wording import plural
from transaxle.errors import Refusal, Where
from transaxle.formats.flattened_state import Nesting
from transaxle.formats.pickled.descriptors import NOTHING
from transaxle.formats.pickled.writer import is_writable
from transaxle.formats.registry import DCP, TORCH, UNIVERSAL, Format
from transaxle.formats.training_state import (
    EXTRA_STATE,
    GROUPS,
    LEFT_BEHIND,
    MASTER,
    OPTIMIZER,
    ROOT,
    TRAINING,
    KeyPath,
    group_numbers,
    is_extra_state,
    joined,
)

_MODEL = "model"
"""Container of the model where the source is no state dict, which would show another, or none."""
_States = Mapping[str, AbstractSet[str]]
"""Parameter -> its kinds of state."""
_LISTED = 4
"""Cap on the names that a refusal or a note lists."""
_NUMBER = "#"
"""Begins what stands for the name of a parameter that has only a number."""
_WITHOUT = "or leave the optimizer's state out: --no-optimizer (optimizer=False)."


def without_training(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same checkpoint without its training state and what modules keep beside parameters, all listed."""
    items = checkpoint.container.training
    beside = set(checkpoint.container.beside)
    beside.update(name for name in checkpoint.container.entries if EXTRA_STATE in name and is_extra_state(name))
    if not items and not beside:
        return checkpoint
    metadata = dict(checkpoint.container.metadata)
    metadata[LEFT_BEHIND] = {
        **metadata.get(LEFT_BEHIND, {}),
        **dict.fromkeys(metadata.pop(TRAINING, ()), "training state"),
    }
    kept_container = checkpoint.container.without(beside)
    container = replace(kept_container, metadata=metadata, training=())
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


def beside(first: Checkpoint, second: Checkpoint) -> set[str]:
    """Return the tensors of training state that only the first checkpoint holds."""
    return {name for name in first.container.beside if name not in second}


def plain_items(checkpoint: Checkpoint, kind: Format) -> dict[KeyPath, object]:
    """Return the training state that a format keeps as it is, by its paths: what is plain data, and was no tensor."""
    if "training" not in kind.draft_takes:
        return {}
    items = ((item.path, item.plain()) for item in checkpoint.container.training)
    return {path: value for path, value in items if value is not NOTHING and is_writable(value)}


def left_behind(checkpoint: Checkpoint, written: Collection[KeyPath]) -> Iterator[str]:
    """Yield what the source's reader leaves behind, without containers of which all is written."""
    paths = [item.path for item in checkpoint.container.training if not item.is_tensor]
    for name in checkpoint.container.metadata.get(LEFT_BEHIND, ()):
        inside = [path for path in paths if f"{joined(path)}.".startswith(f"{name}.")]
        if not inside or not all(path in written for path in inside):
            yield name


def nesting_of(checkpoint: Checkpoint, names: Collection[str]) -> Nesting | None:
    """Return how the state dict of one file is nested: as the source's; None where there is nothing but a model.

    Args:
        checkpoint: the source.
        names: of all tensors that are written.
    """
    container = checkpoint.container
    if not container.training and not any(name.startswith(OPTIMIZER) for name in names):
        return None
    is_state_dict = container.format in (DCP.name, TORCH.name)
    root = container.metadata.get(ROOT, None if is_state_dict else _MODEL)
    return Nesting(root and root.rpartition(".")[2], container.paths)


def state_of_other_names(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint has state of parameters that it stores under other names: in parts, or those of another
    dialect.
    """
    names = checkpoint.container.entries
    if all(split_slot(name)[0] in names for name in names) or checkpoint.family is None:
        return False
    bound = checkpoint.bound
    return bound.state_dialect is not None or any(line.of_state and slot for line, slot in bound.names)


def misplaced_state(checkpoint: Checkpoint, view: View, kind: Format, wanted: str) -> list[Refusal]:
    """Refuse state without its parameter, and parameters that lack a part of the state that others like them have.

    Where names stay as they are (`identity`), both stay as they are, unless the format has a parameter's values and its
    state in one place.

    Args:
        checkpoint: the source.
        view: the target's tensors.
        kind: the target's format.
        wanted: its dialect.
    """
    states = _states(view)
    if view.refusals or (wanted == IDENTITY and not kind.full_precision):
        return []
    problems = []
    orphans = _orphans(checkpoint, view, states, wanted)
    if numbered := [name for name in orphans if name.startswith(_NUMBER)]:
        message = f"the file numbers the parameters of its optimizer, and nothing names them: {_named(numbered)}"
        hint = f'Keep all names with --to dcp (to="dcp"), {_WITHOUT}'
        problems.append(Refusal("UNSUPPORTED", message, _where(numbered), hint))
    if orphans := [name for name in orphans if name not in numbered]:
        message = f"the target would have optimizer state, but no values, for {_named(orphans)}"
        hint = f"Check whether a shard is missing, add a line for it to your own table (--rules, rules=), {_WITHOUT}"
        problems.append(Refusal("MISSING_TENSOR", message, _where(orphans), hint))
    for lacking, names in _partial(checkpoint, view, states).items():
        message = f"other parameters of the same group have {', '.join(lacking)}, {_named(names)} not"
        hint = f"Check whether a shard is missing, {_WITHOUT}"
        problems.append(Refusal("INCOMPLETE", message, _where(names), hint))
    return problems


def state_notes(checkpoint: Checkpoint, view: View, wanted: str) -> Iterator[str]:
    """Yield what is to be told of a target's optimizer state; for arguments see `misplaced_state`."""
    states = _states(view)
    if wanted == IDENTITY:
        if orphans := _orphans(checkpoint, view, states, wanted):
            yield f"optimizer state without values: {_named(orphans)}"
    else:
        if checkpoint.bound.state_dialect is not None:
            labels = checkpoint.bound.state_dialect.label, checkpoint.bound.dialect.label
            yield "the optimizer's state has the names of {}, the weights those of {}".format(*labels)
        for name, condition in _fused(checkpoint, states, wanted):
            yield (
                f"the optimizer's state is written for {name}: fused, unless the config (--config, config=) "
                f'has "{condition}": false'
            )
    numbers = group_numbers(regrouped(checkpoint.container.metadata.get(GROUPS, ()), view.targets, []))
    if without := [name for name in numbers if name in view.targets and name not in states]:
        yield f"in the optimizer's groups, but without state (frozen, or without a gradient so far): {_named(without)}"


def _states(view: View) -> dict[str, set[str]]:
    """Return the kinds of state of each parameter."""
    states: defaultdict[str, set[str]] = defaultdict(set)
    for parameter, slot in map(split_slot, view.targets):
        if slot != WEIGHT:
            states[parameter].add(slot)
    return dict(states)


def _orphans(checkpoint: Checkpoint, view: View, states: _States, wanted: str) -> list[str]:
    """Return the parameters that have state and no values, nor values of their parts."""
    left = [name for name in states if name not in view.targets and name not in view.encoded]
    if not left:
        return []
    if wanted == IDENTITY:
        known = set(checkpoint.catalog.entries)
        if checkpoint.family is not None:
            bound = checkpoint.bound
            others = bound.state_dialect is not None
            read = (of_line.values() for (line, _), of_line in bound.names.items() if line.of_state or others)
            known.update(split_slot(name)[0] for names in read for name in names)
        return [name for name in left if name not in known]
    lines = [line for line in pick_dialect(checkpoint.recognised.family, wanted).lines if line.of_state]
    return [name for name in left if not any(line.name.match(name) is not None for line in lines)]


def _fused(checkpoint: Checkpoint, states: _States, wanted: str) -> list[tuple[str, str]]:
    """Return the names and conditions of fused parameters that are written although nothing says that they are."""
    dialect = pick_dialect(checkpoint.recognised.family, wanted)
    if dialect is checkpoint.recognised.dialect and checkpoint.format != UNIVERSAL.name:
        return []
    return [
        (line.name.text, line.when.text)
        for line in dialect.lines
        if line.of_state
        and line.when is not None
        and checkpoint.sizes.holds(line.when, {}) is None
        and any(line.name.match(name) is not None for name in states)
    ]


def _partial(checkpoint: Checkpoint, view: View, states: _States) -> dict[tuple[str, ...], list[str]]:
    """Return kinds of state -> parameters that lack them, where others of their group and number of dims have all that
    they have, and these. Copies in full precision do not count: only weights of lower precision have some.
    """
    groups = group_numbers(regrouped(checkpoint.container.metadata.get(GROUPS, ()), view.targets, []))
    alike: defaultdict[tuple[int | None, int], dict[frozenset[str], list[str]]] = defaultdict(dict)
    for name, kinds in states.items():
        if name in view.targets:
            key = groups.get(name), len(view.targets[name].layout.shape)
            alike[key].setdefault(frozenset(kinds - {MASTER}), []).append(name)
    found: dict[tuple[str, ...], list[str]] = {}
    for of_kinds in alike.values():
        whole = frozenset[str]().union(*of_kinds)
        for kinds, names in of_kinds.items():
            if kinds and kinds != whole and whole in of_kinds:
                found.setdefault(tuple(sorted(whole - kinds)), []).extend(names)
    return found


def _where(names: Sequence[str]) -> Where:
    return Where(None, names[0] if len(names) == 1 else None)


def _named(names: Sequence[str]) -> str:
    """Write a number of parameters, and the first of them."""
    more = ", …" if len(names) > _LISTED else ""
    return f"{plural(len(names), 'parameter')} ({', '.join(names[:_LISTED])}{more})"
