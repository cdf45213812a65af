"""Training state beside a model: optimizer state, whose parameters must be in the target, and other state of a training
run.

Training state does not belong to a model on a hub, and is ignored when two checkpoints are compared.

Optimizer state under a name that no program reads would be lost silently, and a program that lacks state begins with
zeros. A parameter without optimizer state is no error by itself: frozen parameters have no such state, and torch
creates the state with the first gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY, pick_dialect
from transaxle.engine.views.decoded import rename_groups
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
    join_path,
)

_MODEL = "model"
"""Key under which the target's state dict nests the model, if the source has no state dict whose nesting can be
kept.
"""
_States = Mapping[str, AbstractSet[str]]
"""Parameter name -> the kinds of optimizer state that it has, such as `exp_avg`."""
_LISTED = 4
"""Largest number of parameter names that a refusal or a note lists."""
_NUMBER = "#"
"""Prefix of the placeholder name of a parameter that an optimizer identifies only by a number."""
_WITHOUT = "or leave the optimizer's state out: --no-optimizer (optimizer=False)."


def without_training(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without training state and extra state of modules; the omitted names are listed in its
    metadata.
    """
    items = checkpoint.container.training
    training_names = set(checkpoint.container.beside)
    training_names.update(name for name in checkpoint.container.entries if EXTRA_STATE in name and is_extra_state(name))
    if not items and not training_names:
        return checkpoint
    metadata = dict(checkpoint.container.metadata)
    metadata[LEFT_BEHIND] = {
        **metadata.get(LEFT_BEHIND, {}),
        **dict.fromkeys(metadata.pop(TRAINING, ()), "training state"),
    }
    kept_container = checkpoint.container.without(training_names)
    container = replace(kept_container, metadata=metadata, training=())
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


def training_only_in(first: Checkpoint, second: Checkpoint) -> set[str]:
    """Return the names of training-state tensors that only the first of two checkpoints has."""
    return {name for name in first.container.beside if name not in second}


def writable_items(checkpoint: Checkpoint, kind: Format) -> dict[KeyPath, object]:
    """Return key path -> value, for training state that is not a tensor and that the target format stores unchanged."""
    if "training" not in kind.draft_takes:
        return {}
    items = ((item.path, item.plain()) for item in checkpoint.container.training)
    return {path: value for path, value in items if value is not NOTHING and is_writable(value)}


def unwritten_items(checkpoint: Checkpoint, written_paths: Collection[KeyPath]) -> Iterator[str]:
    """Yield names of training state that is not written; a dict or list whose complete content is written is
    omitted.
    """
    paths = [item.path for item in checkpoint.container.training if not item.is_tensor]
    for name in checkpoint.container.metadata.get(LEFT_BEHIND, ()):
        inner_paths = [path for path in paths if f"{join_path(path)}.".startswith(f"{name}.")]
        if not inner_paths or not all(path in written_paths for path in inner_paths):
            yield name


def whole_targets(view: View, whole: Collection[str] | None) -> frozenset[str] | None:
    """Return the names of the target's tensors that every rank of a job has whole, such as buffers; None if unknown.

    Args:
        view: the tensors of the target.
        whole: names of the source's tensors that every rank has whole; None if unknown.
    """
    if whole is None:
        return None
    origins = {
        name: [origin.name for part in target.parts for origin in part.origins] for name, target in view.targets.items()
    }
    return frozenset(name for name, names in origins.items() if names and all(each in whole for each in names))


def state_dict_nesting(checkpoint: Checkpoint, names: Collection[str]) -> Nesting | None:
    """Return how to nest the state dict of a single-file target as the source nests it; None if only the model is
    written.

    Args:
        checkpoint: the source checkpoint.
        names: names of all output tensors.
    """
    container = checkpoint.container
    if not container.training and not any(name.startswith(OPTIMIZER) for name in names):
        return None
    is_state_dict = container.format in (DCP.name, TORCH.name)
    root = container.metadata.get(ROOT, None if is_state_dict else _MODEL)
    return Nesting(root and root.rpartition(".")[2], container.paths)


def has_state_of_other_names(checkpoint: Checkpoint) -> bool:
    """Return whether optimizer state belongs to parameters stored in parts, or uses the parameter names of a different
    dialect.
    """
    names = checkpoint.container.entries
    if all(split_slot(name)[0] in names for name in names) or checkpoint.family is None:
        return False
    bound = checkpoint.bound
    return bound.state_dialect is not None or any(line.of_state and slot for line, slot in bound.names)


def refuse_misplaced_state(checkpoint: Checkpoint, view: View, kind: Format, target_dialect: str) -> list[Refusal]:
    """Refuse optimizer state whose parameter is missing, and parameters that lack state that similar parameters have.

    A target with the source's own names (`identity`) keeps such tensors, unless its format stores a parameter's values
    together with its optimizer state.

    Args:
        checkpoint: the source checkpoint.
        view: the tensors of the target.
        kind: file format of the target.
        target_dialect: dialect of the target.
    """
    states = _states(view)
    if view.refusals or (target_dialect == IDENTITY and not kind.full_precision):
        return []
    problems = []
    orphans = _orphans(checkpoint, view, states, target_dialect)
    if numbered := [name for name in orphans if name.startswith(_NUMBER)]:
        message = f"the file numbers the parameters of its optimizer, and nothing names them: {_list_names(numbered)}"
        hint = f'Keep all names with --to dcp (to="dcp"), {_WITHOUT}'
        problems.append(Refusal("UNSUPPORTED", message, _where(numbered), hint))
    if orphans := [name for name in orphans if name not in numbered]:
        message = f"the target would have optimizer state, but no values, for {_list_names(orphans)}"
        hint = f"Check whether a shard is missing, add a line for it to your own table (--rules, rules=), {_WITHOUT}"
        problems.append(Refusal("MISSING_TENSOR", message, _where(orphans), hint))
    for missing_kinds, names in _partial_state(checkpoint, view, states).items():
        message = f"other parameters of the same group have {', '.join(missing_kinds)}, {_list_names(names)} not"
        hint = f"Check whether a shard is missing, {_WITHOUT}"
        problems.append(Refusal("INCOMPLETE", message, _where(names), hint))
    return problems


def state_notes(checkpoint: Checkpoint, view: View, target_dialect: str) -> Iterator[str]:
    """Yield notes for the user on the optimizer state of a target; for a description of the arguments see
    `refuse_misplaced_state`.
    """
    states = _states(view)
    if target_dialect == IDENTITY:
        if orphans := _orphans(checkpoint, view, states, target_dialect):
            yield f"optimizer state without values: {_list_names(orphans)}"
    else:
        if checkpoint.bound.state_dialect is not None:
            labels = checkpoint.bound.state_dialect.label, checkpoint.bound.dialect.label
            yield "the optimizer's state has the names of {}, the weights those of {}".format(*labels)
        for name, condition in _presumably_fused(checkpoint, states, target_dialect):
            yield (
                f"the optimizer's state is written for {name}: fused, unless the config (--config, config=) "
                f'has "{condition}": false'
            )
    numbers = group_numbers(rename_groups(checkpoint.container.metadata.get(GROUPS, ()), view.targets, []))
    if without := [name for name in numbers if name in view.targets and name not in states]:
        names = _list_names(without)
        yield f"in the optimizer's groups, but without state (frozen, or without a gradient so far): {names}"


def _states(view: View) -> dict[str, set[str]]:
    """Return parameter name -> the kinds of optimizer state that the parameter has."""
    states: defaultdict[str, set[str]] = defaultdict(set)
    for parameter, slot in map(split_slot, view.targets):
        if slot != WEIGHT:
            states[parameter].add(slot)
    return dict(states)


def _orphans(checkpoint: Checkpoint, view: View, states: _States, target_dialect: str) -> list[str]:
    """Return the parameters that have optimizer state but are missing in the target, both whole and in parts."""
    without_values = [name for name in states if name not in view.targets and name not in view.encoded]
    if not without_values:
        return []
    if target_dialect == IDENTITY:
        known_names = set(checkpoint.catalog.entries)
        if checkpoint.family is not None:
            bound = checkpoint.bound
            has_state_dialect = bound.state_dialect is not None
            state_names = (
                of_line.values() for (line, _), of_line in bound.names.items() if line.of_state or has_state_dialect
            )
            known_names.update(split_slot(name)[0] for names in state_names for name in names)
        return [name for name in without_values if name not in known_names]
    lines = [line for line in pick_dialect(checkpoint.reading.family, target_dialect).lines if line.of_state]
    return [name for name in without_values if not any(line.name.match(name) is not None for line in lines)]


def _presumably_fused(checkpoint: Checkpoint, states: _States, target_dialect: str) -> list[tuple[str, str]]:
    """Return (name, condition) of parameters that are written fused although no config states that they are fused."""
    dialect = pick_dialect(checkpoint.reading.family, target_dialect)
    if dialect is checkpoint.reading.dialect and checkpoint.format != UNIVERSAL.name:
        return []
    return [
        (line.name.text, line.when.text)
        for line in dialect.lines
        if line.of_state
        and line.when is not None
        and checkpoint.sizes.holds(line.when, {}) is None
        and any(line.name.match(name) is not None for name in states)
    ]


def _partial_state(checkpoint: Checkpoint, view: View, states: _States) -> dict[tuple[str, ...], list[str]]:
    """Return kinds of optimizer state -> names of parameters that lack these kinds, although similar parameters have
    them.

    Parameters are similar if they are in the same parameter group and have the same number of dims. Full-precision
    copies of weights do not count as state in this comparison, because only weights of lower precision have such
    copies.
    """
    groups = group_numbers(rename_groups(checkpoint.container.metadata.get(GROUPS, ()), view.targets, []))
    similar: defaultdict[tuple[int | None, int], dict[frozenset[str], list[str]]] = defaultdict(dict)
    for name, kinds in states.items():
        if name in view.targets:
            key = groups.get(name), len(view.targets[name].layout.shape)
            similar[key].setdefault(frozenset(kinds - {MASTER}), []).append(name)
    missing_state: dict[tuple[str, ...], list[str]] = {}
    for of_kinds in similar.values():
        all_kinds = frozenset[str]().union(*of_kinds)
        for kinds, names in of_kinds.items():
            if kinds and kinds != all_kinds and all_kinds in of_kinds:
                missing_state.setdefault(tuple(sorted(all_kinds - kinds)), []).extend(names)
    return missing_state


def _where(names: Sequence[str]) -> Where:
    return Where(None, names[0] if len(names) == 1 else None)


def _list_names(names: Sequence[str]) -> str:
    """Return a text with the number of parameters, and the first few of their names."""
    ellipsis = ", …" if len(names) > _LISTED else ""
    return f"{plural(len(names), 'parameter')} ({', '.join(names[:_LISTED])}{ellipsis})"
