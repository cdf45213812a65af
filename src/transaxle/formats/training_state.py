"""Names of the items in a training state, the same for every format that nests dicts.

A model's tensors keep the model's names; an optimizer's state is named after its parameter; everything else after its
path. Nothing is paired by shape or order, and two paths that would get one name are refused. Numbers become tensors
without dims; an optimizer's settings become its `groups`. Everything else is left behind, and listed.

Beside model and optimizer trainers save schedulers, counters, the position in the data and averages of the weights, in
the same dict as the model (torchtitan: `train_state`, `lr_scheduler`, `dataloader`; Lightning: `loops`, `callbacks`,
`hyper_parameters`; nanoGPT: `model_args`, `iter_num`). Such an item is recognised by the names of its containers, by
its place beside the model's container, or as a Python number (`epoch`), which no parameter is. Its tensors and numbers
are ordinary tensors of the catalog; a `TrainingItem` records which these are, and keeps the other values as far as they
are plain data. Formats without a place for counters and schedules keep them beside the optimizer's state (`KEPT_RUN`).

**Parameter groups**: an optimizer's settings, with the names of the parameters that they apply to.

Every format keeps them in its own way; here they are plain data, under one key of a container's metadata:

    ck.metadata["param_groups"] == [{"lr": 0.001, "betas": (0.9, 0.95), "params": ["model.norm.weight", ...]}, ...]

A setting keeps its type: numbers, texts, None, and tuples, lists and dicts of them stay as they are; a number with
a dtype of its own (a tensor without dims, a numpy number) is a numpy scalar. Parameters have the names of their state,
`optim/<parameter>/<state>`.

**Full-precision weights**: the copies of low-precision weights that an optimizer updates, `optim/<parameter>/fp32`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import BITS, Container, Entry, code_of, is_scalar, scalar
from transaxle.formats.pickled.descriptors import NOTHING, Scalar
from transaxle.formats.storage.storage import Storage, parsed

ParamGroup = Mapping[str, Any]
"""Settings of one group, and its parameters' names under `PARAMS`."""

GROUPS = "param_groups"
"""Key of a container's metadata, and of the list of groups in torch's own states."""
PARAMS, NAMES = "params", "param_names"
KEPT = "optim/param_groups"
"""Key for groups in formats that have no place for them: beside the tensors, or in a header."""
_DEEPEST_SETTINGS, _MOST = 8, 1_000_000
"""Caps on the depth of a setting, and on its values."""
_TUPLE, _DICT, _FLOAT, _TYPED = "tuple", "dict", "float", "dtype"
_VALUE = "hex"


def plain(value: object) -> object:
    """Return a setting as plain data; `NOTHING` if a group cannot hold it, or it exceeds the caps."""
    return _plain_settings(value, _DEEPEST_SETTINGS, [_MOST])


def _plain_settings(value: object, depth: int, budget: list[int]) -> object:
    budget[0] -= 1
    if depth < 0 or budget[0] < 0:
        return NOTHING
    if value is None or type(value) in (bool, int, float, str) or is_scalar(value):
        return value
    if type(value) is Scalar:
        return scalar(value.data, value.code)
    if type(value) in (list, tuple):
        items = []
        for item in value:  # type: ignore[attr-defined]
            items.append(_plain_settings(item, depth - 1, budget))
            if items[-1] is NOTHING:
                break  # a list that is shared again and again has no end
        return NOTHING if any(item is NOTHING for item in items) else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, dict):
        pairs = {key: _plain_settings(item, depth - 1, budget) for key, item in value.items() if budget[0] >= 0}
        odd = any(type(key) is not str or item is NOTHING for key, item in pairs.items())
        return NOTHING if odd or len(pairs) < len(value) else pairs
    return NOTHING


def single(storage: Storage, entry: Entry) -> object:
    """Return a stored tensor without dims as a numpy scalar; `NOTHING` for any other tensor."""
    if entry.shape or entry.dtype not in BITS or len(entry.extents) != 1:
        return NOTHING
    (extent,) = entry.extents
    return scalar(storage.read(extent.file, extent.offset, entry.nbytes), entry.dtype)


def groups_of_equal_settings(settings: Mapping[str, Mapping[str, Any]]) -> list[ParamGroup]:
    """Return groups from settings given by parameter: parameters with equal settings form a group.

    Args:
        settings: parameter -> its settings.

    Post-condition: groups and parameters are in the order in which they first appear.
    """
    by_settings: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for parameter, parameter_settings in settings.items():
        by_settings.setdefault(repr(sorted(parameter_settings.items())), (parameter_settings, []))[1].append(parameter)
    return [{**parameter_settings, PARAMS: parameters} for parameter_settings, parameters in by_settings.values()]


def settings_of(group: ParamGroup) -> dict[str, Any]:
    """Return a group's settings without its parameters."""
    return {key: value for key, value in group.items() if key not in (PARAMS, NAMES)}


def group_numbers(groups: Iterable[ParamGroup]) -> dict[str, int]:
    """Return the number of the group that each parameter is in: parameters of one group have the same settings."""
    return {name: number for number, group in enumerate(groups) for name in group[PARAMS]}


def renamed(groups: Iterable[ParamGroup], names: Mapping[str, Sequence[str]]) -> list[ParamGroup]:
    """Return groups with renamed parameters; duplicates are dropped, and a name without a new one stays."""
    return [
        {**group, PARAMS: list(dict.fromkeys(new for old in group[PARAMS] for new in names.get(old, (old,))))}
        for group in groups
    ]


def encode(groups: Iterable[ParamGroup]) -> str:
    """Return groups as JSON; values that JSON cannot express are tagged.  Inverse: `decode`."""
    return json.dumps([{key: _tagged(value) for key, value in group.items()} for group in groups], allow_nan=False)


def decode(text: str) -> list[ParamGroup] | None:
    """Read what `encode` returned; None for any other text."""
    try:
        listed = parsed(text)
        groups = [{key: _untagged(value) for key, value in group.items()} for group in listed]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return None
    return list[ParamGroup](groups) if all(_is_group(group) for group in groups) else None


def _is_group(group: ParamGroup) -> bool:
    names = group.get(PARAMS)
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _tagged(value: Any) -> Any:
    if is_scalar(value):
        return {_TYPED: code_of(value.dtype), _VALUE: value.tobytes().hex()}
    if isinstance(value, tuple):
        return {_TUPLE: [_tagged(item) for item in value]}
    if isinstance(value, dict):
        return {_DICT: {key: _tagged(item) for key, item in value.items()}}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    return {_FLOAT: repr(value)} if isinstance(value, float) and not isfinite(value) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_untagged(item) for item in value[_TUPLE])
    if _DICT in value:
        return {key: _untagged(item) for key, item in value[_DICT].items()}
    if _FLOAT in value:
        return float(value[_FLOAT])
    return scalar(bytes.fromhex(value[_VALUE]), value[_TYPED])


_NAMES = frozenset(
    {
        "train_state", "training_state", "trainer_state", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict",
        "scheduler", "schedulers", "scheduler_state_dict", "opt_param_scheduler", "dataloader", "data_loader",
        "dataloaders", "train_dataloader", "dataloader_state_dict", "dataset_state", "sampler", "samplers", "rng_state",
        "rng_states", "rng", "random_state", "random_states", "cuda_rng_state", "torch_rng_state", "grad_scaler",
        "scaler", "scaler_state_dict", "loss_scaler", "native_amp_scaling_state", "amp_scaling_state",
        "MixedPrecision", "rerun_state_machine", "args", "epoch", "step", "global_step", "iteration", "loops",
        "callbacks", "hyper_parameters", "datamodule_hyper_parameters", "model_args", "iter_num", "best_val_loss",
        "client_state", "metrics", "history",
    }
)  # fmt: skip
"""Containers and numbers that trainers write at the top of a state."""
_AVERAGES = frozenset(
    {
        "ema", "ema_state", "ema_state_dict", "ema_model", "ema_model_state_dict", "model_ema", "state_dict_ema",
        "ema_params", "ema_weights", "averaged_model", "shadow_params",
    }
)  # fmt: skip
"""Containers of averages of the weights beside those of the model; alone they are the model."""
EXTRA_STATE = "_extra_state"
"""Last segment of what modules keep beside parameters, such as TransformerEngine's scales, as bytes."""
_DEEPEST = 64


class TrainingItem(msgspec.Struct, frozen=True):
    """One item of the training state."""

    path: tuple[str | int, ...]
    """Keys and list indices from the top of the state."""
    name: str | None
    """Name of its tensor in the catalog; None if it is not a tensor."""
    value: Any = None
    """Its value if it was not saved as a tensor, as the pickle describes it."""
    what: str = ""
    """A description of the value."""

    @property
    def is_tensor(self) -> bool:
        """Whether it was saved as a tensor."""
        return self.name is not None and self.value is None

    def plain(self) -> object:
        """Return the value as plain data; `NOTHING` where some of it is not, or it was saved as a tensor."""
        return NOTHING if self.is_tensor else _plain_value(self.value, _DEEPEST)


def is_training(path: tuple[str | int, ...], kind: str, root: str | None, holding: Collection[str | int]) -> bool:
    """Tell whether a leaf outside of model and optimizer is training state.

    Args:
        path: where it is.
        kind: see `formats.state.Leaf`; a tensor is a parameter, unless a container of training state holds it, or the
            model is in a container and the tensor is alone beside that.
        root: name of the model's container; None: there is none.
        holding: tops of the paths of all tensors.
    """
    top, nested = str(path[0]), len(path) > 1
    if kind == "tensor":
        return top in _NAMES if nested and top not in _AVERAGES else root is not None and "." not in top
    if top.partition(".")[0] in _NAMES:
        return True
    return kind == "number" and "." not in top and (not nested or root is not None or path[0] not in holding)


def is_extra_state(name: str) -> bool:
    """Tell whether a tensor is what a module keeps beside its parameters; Megatron's shards add `/shard_0_2`."""
    return name.rpartition(".")[2].partition("/")[0] == EXTRA_STATE


def tops(items: Sequence[TrainingItem]) -> list[str]:
    """Return the top-level names of the training state."""
    return list(dict.fromkeys(str(item.path[0]) for item in items))


def nested(items: Sequence[TrainingItem], top: str, read: Callable[[str], object]) -> tuple[object, list[str]]:
    """Return the state under one name as it was saved, and descriptions of the values that are not plain data.

    Args:
        items: of a container.
        top: the name.
        read: returns the value of a tensor of the catalog.
    """
    odd: list[str] = []
    tree: dict[str | int, Any] = {}
    for item in items:
        if str(item.path[0]) != top:
            continue
        value = read(str(item.name)) if item.is_tensor else item.plain()
        if value is NOTHING:
            odd.append(f"{'.'.join(map(str, item.path))} is {item.what}")
        at = tree
        for key in item.path[:-1]:
            at = at.setdefault(key, {})
        at[item.path[-1]] = value
    return _listed(tree).get(top), odd


def _listed(tree: dict[str | int, Any]) -> Any:
    """Turn dicts whose keys are 0, 1, … into lists: a path does not tell the two apart."""
    inner = {key: _listed(value) if type(value) is dict else value for key, value in tree.items()}
    numbers = [key for key in inner if isinstance(key, int)]
    return [inner[key] for key in sorted(numbers)] if inner and sorted(numbers) == list(range(len(inner))) else inner


def _plain_value(value: Any, depth: int) -> object:
    """Return a value as plain data; `NOTHING` where some of it is not."""
    if depth < 0:
        return NOTHING
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is Scalar:
        return scalar(value.data, value.code)
    if type(value) in (list, tuple, set):
        items = [_plain_value(item, depth - 1) for item in value]
        return NOTHING if any(item is NOTHING for item in items) else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: _plain_value(item, depth - 1) for key, item in value.items()}
        odd = any(not isinstance(key, str | int | float | bytes | tuple) or v is NOTHING for key, v in pairs.items())
        return NOTHING if odd else pairs
    return NOTHING


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
"""Metadata key: top-level names that are training state, see `TrainingItem`."""
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
    """Settings of all optimizers, one mapping for each group."""
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


KEPT_RUN = "optim/run"
"""Key for the facts in the header of a file."""
_COUNTS = ("global_steps", "global_samples")


def facts_as_text(run: Mapping[str, Any]) -> str | None:
    """Return the facts as text; None where there are none.  Inverse: `facts_in`.

    Args:
        run: what the source says of its run, as drafts take it.
    """
    counts = {key: run[key] for key in _COUNTS if isinstance(run.get(key), int)}
    facts = {RUN: counts, MEGATRON: run.get(MEGATRON) or {}}
    return encode([{**facts, PARAMS: []}]) if any(facts.values()) else None


def facts_in(text: str) -> dict[str, Any]:
    """Return the facts as a container's metadata keep them; none for any other text."""
    groups = decode(text) or []
    found = settings_of(groups[0]) if len(groups) == 1 else {}
    facts = {key: found[key] for key in (RUN, MEGATRON) if isinstance(found.get(key), dict) and found[key]}
    counts = facts.get(MEGATRON, {}).get("counters", {})
    whole = [*facts.get(RUN, {}).values(), *(counts.values() if isinstance(counts, dict) else [None])]
    whole += [facts[MEGATRON]["iteration"]] if "iteration" in facts.get(MEGATRON, {}) else []
    return facts if all(type(count) is int and count >= 0 for count in whole) else {}


MASTER = "fp32"
"""State: the full-precision copy of a low-precision weight."""
_FULL = frozenset({"F32", "F64"})


def with_full_precision(container: Container, *, strict: bool) -> Container:
    """Return a container whose weights are the copies in full precision that the optimizer keeps.

    Args:
        container: with optimizer state by parameter.
        strict: refuse weights of low precision that have no such copy, instead of keeping them.

    Raises:
        Refused: UNSUPPORTED for each of these.
    """
    faults = Faults()
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        if name.startswith(OPTIMIZER):
            parameter, _, state = name.removeprefix(OPTIMIZER).rpartition("/")
            if state != MASTER or parameter not in container.entries:
                entries[name] = entry
            continue
        master = container.entries.get(f"{OPTIMIZER}{name}/{MASTER}")
        entries[name] = entry if master is None else replace(master, name=name)
        if strict and master is None and entry.dtype not in _FULL:
            message = "the checkpoint holds no full-precision copy of this tensor"
            faults.add("UNSUPPORTED", message, container.path, name, "Omit --weights fp32.")
    if faults:
        raise faults.error()
    return replace(container, entries=entries)
