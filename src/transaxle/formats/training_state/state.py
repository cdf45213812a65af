"""Names of the items in a training state, the same for every format that nests dicts.

A model's tensors keep the model's names; an optimizer's state is named after its parameter; everything else after its
path. Nothing is paired by shape or order, and two paths that would get one name are refused. Numbers become tensors
without dims; an optimizer's settings become its `groups`. Everything else is left behind, and listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from transaxle.errors import Faults, refuse
from transaxle.formats.pickled.descriptors import NOTHING
from transaxle.formats.training_items import TrainingItem, is_training, tops
from transaxle.formats.training_state.state_groups import (
    GROUPS,
    KEPT,
    NAMES,
    PARAMS,
    ParamGroup,
    groups_of_equal_settings,
    plain,
    settings_of,
)

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a state to a leaf."""
LeafKind = Literal["tensor", "number", "other", "empty"]

ROOT = "root"
"""Metadata key: the top-level container whose name was removed from all names."""
RUN = "deepspeed"
"""Key of a container's metadata: what a training run says of itself, counters and settings."""
MEGATRON = "megatron"
"""Key of a container's metadata: what a run of Megatron says of itself."""
TRAINING = "training_state"
"""Metadata key: top-level names that are training state, see `formats.training_items`."""
LEFT_BEHIND = "left_behind"
"""Metadata key: path -> kind of every item that is neither tensor nor number."""
OPTIMIZER = "optim/"
"""Prefix of the names of optimizer state: `optim/<parameter>/<state>`."""

_ROOTS = ("model", "module", "state_dict")
_OPTIMIZERS = frozenset({"optim", "optimizer", "optimizer_state_dict", "optimizer_state"})
_STATE = "state"
_LONGEST = 1 << 28
"""Cap on the characters of all names together."""


class Leaf(msgspec.Struct, frozen=True, eq=False):
    """One item of a state."""

    path: KeyPath
    """Its path."""
    kind: LeafKind
    """Whether it is a tensor, a number, a dict or list of nothing, or something else."""
    value: Any = None
    """Its value, as the format describes it; for an optimizer's lists `params` and `param_names`, their items."""
    what: str = ""
    """A description, for items that are left behind."""


class State(msgspec.Struct, frozen=True):
    """A state's leaves by name."""

    leaves: Mapping[str, Leaf]
    """Tensors and numbers, in their order."""
    root: str | None
    """Top-level container whose name was removed from the names."""
    left_behind: Mapping[str, str]
    """Path -> description of every other item; a container without tensors is one item."""
    groups: Sequence[ParamGroup] = ()
    """Settings of all optimizers, see `state_groups`."""
    training: Sequence[TrainingItem] = ()
    """State beside model and optimizer, such as schedulers and counters."""
    paths: Mapping[str, KeyPath] = msgspec.field(default_factory=dict)
    """Name -> path of every leaf outside of `root`, or of the top if there is no root, and of an optimizer's state."""

    def metadata(self) -> dict[str, Any]:
        """Return its entries in a container's metadata."""
        root = {} if self.root is None else {ROOT: self.root}
        groups = {GROUPS: list(self.groups)} if self.groups else {}
        beside = {TRAINING: tops(self.training)} if self.training else {}
        return root | groups | beside | ({LEFT_BEHIND: dict(self.left_behind)} if self.left_behind else {})


def arrange(leaves: Sequence[Leaf], *, file: str, read: Callable[[Any], object] | None = None) -> State:
    """Name the leaves of a state.

    Args:
        leaves: every item; order is kept.
        file: for errors.
        read: returns the value of a tensor without dims among an optimizer's settings, given its leaf's value, or
            `NOTHING`.

    Raises:
        Refused: NAME_COLLISION for two leaves of one name; CORRUPT if the names exceed the cap.
    """
    leaves, empty = _without_empty(leaves)
    optimizers = _OptimizerNames(leaves)
    model = [leaf for leaf in leaves if optimizers.root_of(leaf.path) is None]
    root = _root(model)
    settings = _settings(model)
    holding = {*_ROOTS, *(leaf.path[0] for leaf in model if leaf.kind == "tensor")}
    named: dict[str, Leaf] = {}
    left_behind: dict[str, str] = {}
    groups = _GroupSettings(read)
    training: list[TrainingItem] = []
    faults = Faults()
    length = 0
    for leaf in leaves:
        optimizer_root = optimizers.root_of(leaf.path)
        if leaf.path[0] == KEPT or (optimizer_root is not None and _in_groups(leaf.path[len(optimizer_root)])):
            if not groups.add(optimizer_root or (), leaf):
                left_behind[joined(leaf.path)] = leaf.what or leaf.kind
            continue
        settings_container = _shortest(leaf.path, settings) if optimizer_root is None else None
        outside = optimizer_root is None and leaf.path[0] != root
        is_beside = outside and is_training(leaf.path, leaf.kind, root, holding)
        if is_beside and (settings_container is not None or leaf.kind == "other"):
            training.append(TrainingItem(leaf.path, None, leaf.value, leaf.what or leaf.kind))
        if settings_container is not None:
            left_behind[joined(settings_container)] = "settings"
            continue
        if optimizer_root is None:
            name = joined(leaf.path[1:] if root is not None and leaf.path[0] == root else leaf.path)
        else:
            name = optimizers.name(optimizer_root, leaf.path)
        length += len(name)
        if length > _LONGEST:
            raise refuse("CORRUPT", f"the names of its items are longer than {_LONGEST} characters together", file=file)
        if leaf.kind == "other":
            left_behind[name] = leaf.what
            continue
        if name in named:
            first_path, second_path = (repr(list(same_name.path)) for same_name in (named[name], leaf))
            faults.add("NAME_COLLISION", f"two items would have this name: {first_path} and {second_path}", file, name)
        named[name] = leaf
        if is_beside:
            training.append(TrainingItem(leaf.path, name, leaf.value if leaf.kind == "number" else None))
    beside = [leaf for leaf in empty if optimizers.root_of(leaf.path) is None and leaf.path[0] != root]
    beside = [leaf for leaf in beside if is_training(leaf.path, leaf.kind, root, holding)]
    training += (TrainingItem(leaf.path, None, leaf.value, leaf.what) for leaf in beside)
    if faults:
        raise faults.error()
    return State(named, root, left_behind, groups.groups(optimizers.parameter_name), training, _outside(named, root))


def _without_empty(leaves: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
    """Return the leaves that hold something, and the others, which only training state keeps."""
    empty = [leaf for leaf in leaves if leaf.kind == "empty"]
    return ([leaf for leaf in leaves if leaf.kind != "empty"] if empty else leaves), empty


def _outside(named: Mapping[str, Leaf], root: str | None) -> dict[str, KeyPath]:
    """Return the paths of leaves that are not where those of a model are, nor an optimizer's state; see `State`."""
    least = 2 if root is None else 1
    return {
        name: leaf.path
        for name, leaf in named.items()
        if len(leaf.path) >= least and leaf.path[0] != root and not name.startswith(OPTIMIZER)
    }


def joined(path: KeyPath) -> str:
    """Return a path as one name."""
    return ".".join(str(part) for part in path)


def _prefixes(paths: Iterable[KeyPath]) -> set[KeyPath]:
    """Return all proper prefixes of paths except the empty one."""
    prefixes: set[KeyPath] = set()
    for path in paths:
        for length in range(len(path) - 1, 0, -1):
            prefix = path[:length]
            if prefix in prefixes:
                break
            prefixes.add(prefix)
    return prefixes


def _shortest(path: KeyPath, among: set[KeyPath]) -> KeyPath | None:
    """Return the shortest proper prefix of a path that is in a set."""
    if among:
        for length in range(1, len(path)):
            if path[:length] in among:
                return path[:length]
    return None


def _root(leaves: Sequence[Leaf]) -> str | None:
    """Return the one top-level container whose children are tensors; None if there is none, or more."""
    flat = {leaf.path[0] for leaf in leaves if leaf.kind == "tensor" and len(leaf.path) == 2}
    nested = {leaf.path[0] for leaf in leaves if leaf.kind == "tensor" and len(leaf.path) > 2}
    candidates = [root for root in _ROOTS if root in flat and root not in nested]
    return candidates[0] if len(candidates) == 1 else None


def _settings(leaves: Sequence[Leaf]) -> set[KeyPath]:
    """Return the containers that hold no tensor but something that is not a number: settings, not state."""
    holding = _prefixes(leaf.path for leaf in leaves if leaf.kind == "tensor")
    containers: set[KeyPath] = set()
    for leaf in leaves:
        if leaf.kind == "other":
            for length in range(1, len(leaf.path)):
                if leaf.path[:length] not in holding:
                    containers.add(leaf.path[:length])
                    break
    return containers


class _OptimizerNames:
    """The optimizers of a state: their paths, and the names of their parameters."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._roots = {root for leaf in leaves for root in _optimizers(leaf)}
        numbered = dict.fromkeys(root for leaf in leaves if (root := self._numbered(leaf)) is not None)
        lists = {leaf.path: leaf.value for leaf in leaves if leaf.path[-1:] in ((PARAMS,), (NAMES,))}
        self._names = {root: _parameter_names(root, lists) for root in numbered}
        unnamed = [root for root, names in self._names.items() if not names]
        self._marks = {root: f"#{at}." for at, root in enumerate(unnamed)} if len(unnamed) > 1 else {}

    def root_of(self, path: KeyPath) -> KeyPath | None:
        """Return the path of the optimizer that contains a path."""
        if self._roots:
            for length in range(len(path)):
                if path[:length] in self._roots and _inside(path[length]):
                    return path[:length]
        return None

    def _numbered(self, leaf: Leaf) -> KeyPath | None:
        """Return the path of the optimizer that contains a leaf, if it numbers its parameters."""
        root = self.root_of(leaf.path)
        if root is None:
            return None
        parts = _parts(leaf.path[len(root) :])
        if parts is None:
            listed = leaf.value if leaf.path[-1] == PARAMS and isinstance(leaf.value, list | tuple) else ()
            return root if any(isinstance(parameter, int) for parameter in listed) else None
        return root if _is_number(parts[0]) else None

    def name(self, root: KeyPath, path: KeyPath) -> str:
        """Return the name of a leaf of an optimizer."""
        parts = _parts(path[len(root) :])
        if parts is None:
            return joined(path)
        parameter, state = parts
        return f"{OPTIMIZER}{self.parameter_name(root, parameter)}/{state}"

    def parameter_name(self, root: KeyPath, parameter: str | int) -> str:
        """Return the name of a parameter, which the optimizer may know by its number only."""
        if not _is_number(parameter):
            return str(parameter)
        saved_name = self._names.get(root, {}).get(str(parameter))
        return saved_name or f"{self._marks.get(root, '#')}{parameter}"


class _GroupSettings:
    """Settings of optimizers, collected leaf by leaf.

    torch keeps them in a list of groups, `param_groups, 0, lr`, or flattened by parameter,
    `param_groups.<parameter>.lr`. Where an optimizer has both, the list counts.

    Args:
        read: see `arrange`.
    """

    def __init__(self, read: Callable[[Any], object] | None) -> None:
        self._read = read
        self._listed: dict[KeyPath, dict[int, dict[str, Any]]] = {}
        self._flat: dict[KeyPath, dict[str, dict[str, Any]]] = {}

    def add(self, root: KeyPath, leaf: Leaf) -> bool:
        """Add a setting; False if it cannot be represented."""
        inner = leaf.path[len(root) :]
        if leaf.kind == "tensor":
            value = NOTHING if self._read is None else self._read(leaf.value)
        else:
            value = plain(leaf.value)
        if len(inner) == 1 and inner[0] in (GROUPS, KEPT):
            return value in ([], ())
        if value is NOTHING:
            return False
        if len(inner) == 3 and isinstance(inner[1], int) and isinstance(inner[2], str):
            self._listed.setdefault(root, {}).setdefault(inner[1], {})[inner[2]] = value
            return inner[2] not in (PARAMS, NAMES) or isinstance(value, list | tuple)
        parameter, _, setting = str(inner[0]).removeprefix(f"{GROUPS}.").rpartition(".")
        if len(inner) > 1 or not parameter:
            return False
        self._flat.setdefault(root, {}).setdefault(parameter, {})[setting] = value
        return True

    def groups(self, parameter_name: Callable[[KeyPath, str | int], str]) -> list[ParamGroup]:
        """Return the groups of all optimizers, with the names of their parameters."""
        groups: list[ParamGroup] = []
        for root in dict.fromkeys([*self._listed, *self._flat]):
            if root not in self._listed:
                groups += groups_of_equal_settings(self._flat[root])
            for _, group in sorted(self._listed.get(root, {}).items()):
                listed = group.get(PARAMS)
                listed_parameters = listed if isinstance(listed, list | tuple) else ()
                names = [
                    parameter_name(root, parameter)
                    for parameter in listed_parameters
                    if isinstance(parameter, str | int)
                ]
                groups.append({**settings_of(group), PARAMS: names})
        return groups


def _begins(key: str | int, word: str) -> bool:
    """Tell whether a key is a word, or a flattened key that begins with it."""
    return isinstance(key, str) and key.partition(".")[0] == word


def _in_groups(key: str | int) -> bool:
    return _begins(key, GROUPS)


def _inside(key: str | int) -> bool:
    return _begins(key, _STATE) or _in_groups(key)


def _optimizers(leaf: Leaf) -> Iterator[KeyPath]:
    """Yield the paths that must be an optimizer for a leaf's path to make sense."""
    path = leaf.path
    for at, key in enumerate(path):
        after = path[at + 1 :]
        flattened = isinstance(key, str) and "." in key and not after
        if _in_groups(key):
            has_list = leaf.kind == "other" if not after else isinstance(after[0], int)
            is_optimizer = flattened or (key == GROUPS and has_list)
        elif _begins(key, _STATE) and at and path[at - 1] in _OPTIMIZERS:
            is_optimizer = flattened or (key == _STATE and len(after) > 1)
        else:
            is_optimizer = False
        if is_optimizer:
            yield path[:at]


def _parts(inner: KeyPath) -> tuple[str | int, str] | None:
    """Return parameter and state of a path in an optimizer: `state, p, s, …`, or the flattened key `state.p.s`."""
    head = inner[0]
    if head == _STATE:
        return (inner[1], joined(inner[2:])) if len(inner) > 2 else None
    if isinstance(head, str) and len(inner) == 1 and _begins(head, _STATE):
        parameter, _, state = head.removeprefix(f"{_STATE}.").rpartition(".")
        return (parameter, state) if parameter else None
    return None


def _is_number(parameter: str | int) -> bool:
    return isinstance(parameter, int) or parameter.isdecimal()


def _parameter_names(root: KeyPath, lists: Mapping[KeyPath, Any]) -> dict[str, str]:
    """Return number -> name of an optimizer's parameters; empty unless all its groups list both."""
    names_by_number: dict[str, str] = {}
    for group in itertools.count():
        numbers = lists.get((*root, GROUPS, group, PARAMS))
        if numbers is None:
            return names_by_number
        names = lists.get((*root, GROUPS, group, NAMES))
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            return {}
        if not isinstance(numbers, list | tuple) or len(numbers) != len(names):
            return {}
        names_by_number |= {
            str(number): name for number, name in zip(numbers, names, strict=True) if isinstance(number, int)
        }
    return names_by_number
