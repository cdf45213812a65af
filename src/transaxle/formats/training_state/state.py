"""Names of what a training state holds: the same for every format that nests dicts, in files or in keys.

A model's tensors are called what the model calls them; an optimizer's state is called after the parameter it belongs
to; everything else after its path. Nothing is paired by shape or order, and two paths that would get one name are
refused. Numbers are kept as tensors without dims; an optimizer's settings are kept as its `groups`. What is none of
these is left behind, and listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transaxle.errors import refuse
from transaxle.formats.catalog.problem_list import Faults
from transaxle.formats.pickled.descriptors import NOTHING
from transaxle.formats.training_items import Item, is_training, tops
from transaxle.formats.training_state.state_groups import GROUPS, KEPT, NAMES, PARAMS, Group, gathered, plain

Path = tuple[str | int, ...]
"""Keys and list indices from the top of a state to a leaf."""
Kind = Literal["tensor", "number", "other"]

ROOT = "root"
"""Key of a container's metadata: the top-level container that was taken off all names."""
RUN = "deepspeed"
"""Key of a container's metadata: what a training run says of itself, counters and settings."""
TRAINING = "training_state"
"""Key of a container's metadata: names at the top of a state that are training state, see `formats.training`."""
LEFT_BEHIND = "left_behind"
"""Key of a container's metadata: path -> kind of everything that is neither tensor nor number."""
OPTIMIZER = "optim/"
"""How the names of optimizer state begin: `optim/<parameter>/<state>`."""

_ROOTS = ("model", "module", "state_dict")
_OPTIMIZERS = frozenset({"optim", "optimizer", "optimizer_state_dict", "optimizer_state"})
_STATE = "state"
_LONGEST = 1 << 28
"""Characters of all names together."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One item of a state."""

    path: Path
    """Where it is."""
    kind: Kind
    """Whether it is a tensor, a number, or neither."""
    value: Any = None
    """What the format needs to know of it; for the lists `params` and `param_names` of an optimizer, their items."""
    what: str = ""
    """What it is in words; for what is left behind."""


@dataclass(frozen=True, slots=True)
class State:
    """A state's leaves by name."""

    leaves: Mapping[str, Leaf]
    """Tensors and numbers, in their order."""
    root: str | None
    """Top-level container that was taken off the names."""
    left_behind: Mapping[str, str]
    """Path of everything else -> what it is; a container that holds no tensor is one item."""
    groups: Sequence[Group] = ()
    """The settings of all optimizers, see `formats.groups`."""
    training: Sequence[Item] = ()
    """What is beside model and optimizer, such as schedulers and counters."""

    def metadata(self) -> dict[str, Any]:
        """Return what a container's metadata says of it."""
        root = {} if self.root is None else {ROOT: self.root}
        groups = {GROUPS: list(self.groups)} if self.groups else {}
        beside = {TRAINING: tops(self.training)} if self.training else {}
        return root | groups | beside | ({LEFT_BEHIND: dict(self.left_behind)} if self.left_behind else {})


def arrange(leaves: Sequence[Leaf], *, file: str, read: Callable[[Any], object] | None = None) -> State:
    """Name the leaves of a state.

    Args:
        leaves: every item; order is kept.
        file: for errors.
        read: returns the number that a tensor without dims among an optimizer's settings is, by its leaf's value, or
            `NOTHING`.

    Raises:
        Refused: NAME_COLLISION for two leaves of one name; CORRUPT for names beyond all measure.
    """
    optimizers = _Optimizers(leaves)
    model = [leaf for leaf in leaves if optimizers.root_of(leaf.path) is None]
    root = _root(model)
    settings = _settings(model)
    named: dict[str, Leaf] = {}
    left: dict[str, str] = {}
    groups = _Groups(read)
    training: list[Item] = []
    faults = Faults()
    length = 0
    for leaf in leaves:
        inside = optimizers.root_of(leaf.path)
        if leaf.path[0] == KEPT or (inside is not None and _in_groups(leaf.path[len(inside)])):
            if not groups.add(inside or (), leaf):
                left[joined(leaf.path)] = leaf.what or leaf.kind
            continue
        held = _shortest(leaf.path, settings) if inside is None else None
        beside = inside is None and leaf.path[0] != root and is_training(leaf.path, leaf.kind)
        if beside and (held is not None or leaf.kind == "other"):
            training.append(Item(leaf.path, None, leaf.value, leaf.what or leaf.kind))
        if held is not None:
            left[joined(held)] = "settings"
            continue
        if inside is None:
            name = joined(leaf.path[1:] if root is not None and leaf.path[0] == root else leaf.path)
        else:
            name = optimizers.name(inside, leaf.path)
        length += len(name)
        if length > _LONGEST:
            raise refuse("CORRUPT", f"the names of its items take more than {_LONGEST} characters", file=file)
        if leaf.kind == "other":
            left[name] = leaf.what
            continue
        if name in named:
            one, other = (repr(list(each.path)) for each in (named[name], leaf))
            faults.add("NAME_COLLISION", f"two items get this name: {one} and {other}", file, name)
        named[name] = leaf
        if beside:
            training.append(Item(leaf.path, name, leaf.value if leaf.kind == "number" else None))
    if faults:
        raise faults.error()
    return State(named, root, left, groups.found(optimizers.called), training)


def joined(path: Path) -> str:
    """Return a path as one name."""
    return ".".join(str(part) for part in path)


def _prefixes(paths: Iterable[Path]) -> set[Path]:
    """Return all proper prefixes of paths, the empty one excepted."""
    found: set[Path] = set()
    for path in paths:
        for length in range(len(path) - 1, 0, -1):
            prefix = path[:length]
            if prefix in found:
                break
            found.add(prefix)
    return found


def _shortest(path: Path, among: set[Path]) -> Path | None:
    """Return the shortest prefix of a path that is in a set, the path itself excepted."""
    if among:
        for length in range(1, len(path)):
            if path[:length] in among:
                return path[:length]
    return None


def _root(leaves: Sequence[Leaf]) -> str | None:
    """Return the one top-level container whose children are tensors; None if there is none, or more."""
    flat = {leaf.path[0] for leaf in leaves if leaf.kind == "tensor" and len(leaf.path) == 2}
    nested = {leaf.path[0] for leaf in leaves if leaf.kind == "tensor" and len(leaf.path) > 2}
    found = [root for root in _ROOTS if root in flat and root not in nested]
    return found[0] if len(found) == 1 else None


def _settings(leaves: Sequence[Leaf]) -> set[Path]:
    """Return the containers that hold no tensor, and something that is no number either: settings, not state."""
    holding = _prefixes(leaf.path for leaf in leaves if leaf.kind == "tensor")
    found: set[Path] = set()
    for leaf in leaves:
        if leaf.kind == "other":
            for length in range(1, len(leaf.path)):
                if leaf.path[:length] not in holding:
                    found.add(leaf.path[:length])
                    break
    return found


class _Optimizers:
    """The optimizers of a state: where they are, and what their parameters are called."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._roots = {root for leaf in leaves for root in _optimizers(leaf)}
        numbered = dict.fromkeys(root for leaf in leaves if (root := self._numbered(leaf)) is not None)
        lists = {leaf.path: leaf.value for leaf in leaves if leaf.path[-1:] in ((PARAMS,), (NAMES,))}
        self._names = {root: _parameter_names(root, lists) for root in numbered}
        unnamed = [root for root, names in self._names.items() if not names]
        self._marks = {root: f"#{at}." for at, root in enumerate(unnamed)} if len(unnamed) > 1 else {}

    def root_of(self, path: Path) -> Path | None:
        """Return the path of the optimizer that a path leads into."""
        if self._roots:
            for length in range(len(path)):
                if path[:length] in self._roots and _inside(path[length]):
                    return path[:length]
        return None

    def _numbered(self, leaf: Leaf) -> Path | None:
        """Return the path of the optimizer that a leaf is in and whose parameters it calls by number."""
        root = self.root_of(leaf.path)
        if root is None:
            return None
        parts = _parts(leaf.path[len(root) :])
        if parts is None:
            listed = leaf.value if leaf.path[-1] == PARAMS and isinstance(leaf.value, list | tuple) else ()
            return root if any(isinstance(each, int) for each in listed) else None
        return root if _is_number(parts[0]) else None

    def name(self, root: Path, path: Path) -> str:
        """Return the name of a leaf of an optimizer."""
        parts = _parts(path[len(root) :])
        if parts is None:
            return joined(path)
        parameter, state = parts
        return f"{OPTIMIZER}{self.called(root, parameter)}/{state}"

    def called(self, root: Path, parameter: str | int) -> str:
        """Return the name of a parameter, which the optimizer may only have numbered."""
        if not _is_number(parameter):
            return str(parameter)
        known = self._names.get(root, {}).get(str(parameter))
        return known or f"{self._marks.get(root, '#')}{parameter}"


class _Groups:
    """Settings of optimizers, leaf by leaf.

    torch keeps them in a list of groups, `param_groups, 0, lr`, or flattened by parameter,
    `param_groups.<parameter>.lr`. Where an optimizer has both, the list counts.

    Args:
        read: see `arrange`.
    """

    def __init__(self, read: Callable[[Any], object] | None) -> None:
        self._read = read
        self._listed: dict[Path, dict[int, dict[str, Any]]] = {}
        self._flat: dict[Path, dict[str, dict[str, Any]]] = {}

    def add(self, root: Path, leaf: Leaf) -> bool:
        """Take a setting; tell whether it could be taken."""
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

    def found(self, called: Callable[[Path, str | int], str]) -> list[Group]:
        """Return the groups of all optimizers, with the names of their parameters."""
        groups: list[Group] = []
        for root in dict.fromkeys([*self._listed, *self._flat]):
            if root not in self._listed:
                groups += gathered(self._flat[root])
            for _, group in sorted(self._listed.get(root, {}).items()):
                listed = group.get(PARAMS)
                held = listed if isinstance(listed, list | tuple) else ()
                names = [called(root, each) for each in held if isinstance(each, str | int)]
                groups.append({**{k: v for k, v in group.items() if k not in (PARAMS, NAMES)}, PARAMS: names})
        return groups


def _begins(part: str | int, word: str) -> bool:
    """Tell whether a key is a word, or a flattened key that begins with it."""
    return isinstance(part, str) and part.partition(".")[0] == word


def _in_groups(part: str | int) -> bool:
    return _begins(part, GROUPS)


def _inside(part: str | int) -> bool:
    return _begins(part, _STATE) or _in_groups(part)


def _optimizers(leaf: Leaf) -> Iterator[Path]:
    """Yield the paths that must be an optimizer's for the path of a leaf to make sense."""
    path = leaf.path
    for at, part in enumerate(path):
        after = path[at + 1 :]
        flattened = isinstance(part, str) and "." in part and not after
        if _in_groups(part):
            whole = leaf.kind == "other" if not after else isinstance(after[0], int)
            found = flattened or (part == GROUPS and whole)
        elif _begins(part, _STATE) and at and path[at - 1] in _OPTIMIZERS:
            found = flattened or (part == _STATE and len(after) > 1)
        else:
            found = False
        if found:
            yield path[:at]


def _parts(inner: Path) -> tuple[str | int, str] | None:
    """Return parameter and state of a path inside an optimizer: `state, p, s, …`, or the flattened key `state.p.s`."""
    first = inner[0]
    if first == _STATE:
        return (inner[1], joined(inner[2:])) if len(inner) > 2 else None
    if isinstance(first, str) and len(inner) == 1 and _begins(first, _STATE):
        parameter, _, state = first.removeprefix(f"{_STATE}.").rpartition(".")
        return (parameter, state) if parameter else None
    return None


def _is_number(parameter: str | int) -> bool:
    return isinstance(parameter, int) or parameter.isdecimal()


def _parameter_names(root: Path, lists: Mapping[Path, Any]) -> dict[str, str]:
    """Return number -> name of an optimizer's parameters; empty unless all its groups give both."""
    found: dict[str, str] = {}
    for group in itertools.count():
        numbers = lists.get((*root, GROUPS, group, PARAMS))
        if numbers is None:
            return found
        names = lists.get((*root, GROUPS, group, NAMES))
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            return {}
        if not isinstance(numbers, list | tuple) or len(numbers) != len(names):
            return {}
        found |= {str(number): name for number, name in zip(numbers, names, strict=True) if isinstance(number, int)}
    return found
