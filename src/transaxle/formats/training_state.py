"""Names the values of a training state; the names are the same for all formats that save nested dicts.

A model's tensors keep their names; optimizer state is named after its parameter; all other values are named after their
key path. No tensor is matched by its shape or position, and two key paths that would get the same name are refused. A
number becomes a tensor without dims; the settings of an optimizer become parameter groups (`groups`). Values that are
neither tensors, numbers nor settings are not read, but the metadata lists them.

Training programs also save schedulers, counters, the position in the data and averages of the weights, in the same dict
as the model (torchtitan: `train_state`, `lr_scheduler`, `dataloader`; Lightning: `loops`, `callbacks`,
`hyper_parameters`; nanoGPT: `model_args`, `iter_num`). A value belongs to this training state if the names of the dicts
around it show this, if it is next to the model's dict, or if it is a Python number (`epoch`). The tensors and numbers
of training state are ordinary tensors of the catalog; a `TrainingItem` refers to them, and stores all values that are
not tensors, if they are plain data. Formats without a place for counters and schedules store these with the optimizer's
state (`KEPT_RUN`).

**Parameter groups**: the settings of an optimizer, with the names of the parameters to which each group applies.

Each format stores parameter groups in its own way; after reading, they are plain data under one key of the metadata:

    ck.metadata["param_groups"] == [{"lr": 0.001, "betas": (0.9, 0.95), "params": ["model.norm.weight", ...]}, ...]

A setting keeps its type: numbers, strings, None, and tuples, lists and dicts of these are unchanged; a number with a
dtype (a tensor without dims, or a numpy number) becomes a numpy scalar. Parameters are listed by the names that are
also used for their state, `optim/<parameter>/<state>`.

**Full-precision weights** (`optim/<parameter>/fp32`): full-precision copies of low-precision weights, which the
optimizer updates.
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
from transaxle.formats.storage.storage import Storage, parse_json

ParamGroup = Mapping[str, Any]
"""Settings of one parameter group; the names of its parameters are under the key `PARAMS`."""

GROUPS = "param_groups"
"""Key of the parameter groups in the metadata of an opened checkpoint, and in torch's optimizer state dicts."""
PARAMS, NAMES = "params", "param_names"
KEPT = "optim/param_groups"
"""Name under which a format without a place for parameter groups stores them, as a tensor or in a header."""
_DEEPEST_SETTINGS, _MAX_VALUES = 8, 1_000_000
"""Maximum nesting depth of an optimizer setting, and maximum number of values in it."""
_TUPLE, _DICT, _FLOAT, _TYPED = "tuple", "dict", "float", "dtype"
_VALUE = "hex"


def plain(value: object) -> object:
    """Return a setting as plain data; `NOTHING` if a parameter group cannot contain the setting, or the setting is too
    large.
    """
    return _plain_settings(value, _DEEPEST_SETTINGS, [_MAX_VALUES])


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
                break  # a list that occurs many times may have billions of elements in total
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
    """Put parameters with equal settings into one parameter group.

    Args:
        settings: maps the name of each parameter to its settings.

    Post-condition: groups and parameters are in the order in which they first appear.
    """
    by_settings: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for parameter, parameter_settings in settings.items():
        by_settings.setdefault(repr(sorted(parameter_settings.items())), (parameter_settings, []))[1].append(parameter)
    return [{**parameter_settings, PARAMS: parameters} for parameter_settings, parameters in by_settings.values()]


def settings_of(group: ParamGroup) -> dict[str, Any]:
    """Return the settings of a parameter group, except the list of the group's parameters."""
    return {key: value for key, value in group.items() if key not in (PARAMS, NAMES)}


def group_numbers(groups: Iterable[ParamGroup]) -> dict[str, int]:
    """Return parameter name -> index of the parameter's group."""
    return {name: number for number, group in enumerate(groups) for name in group[PARAMS]}


def rename_parameters(groups: Iterable[ParamGroup], names: Mapping[str, Sequence[str]]) -> list[ParamGroup]:
    """Return parameter groups with renamed parameters; `names` maps an old name to one or more new names. Duplicate
    names are dropped; a name that is not in `names` stays unchanged.
    """
    return [
        {**group, PARAMS: list(dict.fromkeys(new for old in group[PARAMS] for new in names.get(old, (old,))))}
        for group in groups
    ]


def encode(groups: Iterable[ParamGroup]) -> str:
    """Return parameter groups as JSON text, which `decode` parses; values that JSON cannot express are tagged."""
    return json.dumps([{key: _tag(value) for key, value in group.items()} for group in groups], allow_nan=False)


def decode(text: str) -> list[ParamGroup] | None:
    """Parse the text that `encode` returns; return None for any other text."""
    try:
        parsed_groups = parse_json(text)
        groups = [{key: _untag(value) for key, value in group.items()} for group in parsed_groups]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return None
    return list[ParamGroup](groups) if all(_is_group(group) for group in groups) else None


def _is_group(group: ParamGroup) -> bool:
    names = group.get(PARAMS)
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _tag(value: Any) -> Any:
    if is_scalar(value):
        return {_TYPED: code_of(value.dtype), _VALUE: value.tobytes().hex()}
    if isinstance(value, tuple):
        return {_TUPLE: [_tag(item) for item in value]}
    if isinstance(value, dict):
        return {_DICT: {key: _tag(item) for key, item in value.items()}}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    return {_FLOAT: repr(value)} if isinstance(value, float) and not isfinite(value) else value


def _untag(value: Any) -> Any:
    if isinstance(value, list):
        return [_untag(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_untag(item) for item in value[_TUPLE])
    if _DICT in value:
        return {key: _untag(item) for key, item in value[_DICT].items()}
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
"""Keys at the top level under which training programs save training state."""
_AVERAGES = frozenset(
    {
        "ema", "ema_state", "ema_state_dict", "ema_model", "ema_model_state_dict", "model_ema", "state_dict_ema",
        "ema_params", "ema_weights", "averaged_model", "shadow_params",
    }
)  # fmt: skip
"""Keys at the top level under which training programs save averaged weights, if the model is saved as well; without a
model, the averages count as the model."""
EXTRA_STATE = "_extra_state"
"""Last segment of the name of a module's extra state, which consists of bytes, such as TransformerEngine's scales."""
_DEEPEST = 64


class TrainingItem(msgspec.Struct, frozen=True):
    """One value of the training state, such as a counter or a schedule's setting."""

    path: tuple[str | int, ...]
    """Key path of the value: keys and list indices from the top of the state."""
    name: str | None
    """Name of the value's tensor in the catalog; None if the value is neither a tensor nor a number."""
    value: Any = None
    """The value as the pickle contains it, if it was not saved as a tensor; otherwise None."""
    what: str = ""
    """Description of the value, for messages."""

    @property
    def is_tensor(self) -> bool:
        """Whether the value was saved as a tensor."""
        return self.name is not None and self.value is None

    def plain(self) -> object:
        """Return the value as plain data; `NOTHING` if it contains objects of other kinds, or was saved as a tensor."""
        return NOTHING if self.is_tensor else _plain_value(self.value, _DEEPEST)


def is_training(path: tuple[str | int, ...], kind: str, root: str | None, holding: Collection[str | int]) -> bool:
    """Return whether a leaf (a value in the nested state) that belongs to neither model nor optimizer is training
    state.

    Args:
        path: key path of the value.
        kind: kind of the value, see `Leaf`; a tensor is a parameter, unless it is in a dict of training state, or is at
            the top level while the model is in a dict of its own.
        root: key of the model's dict at the top level; None if the model's tensors are at the top level.
        holding: keys at the top level whose values contain tensors.
    """
    top, nest_items = str(path[0]), len(path) > 1
    if kind == "tensor":
        return top in _NAMES if nest_items and top not in _AVERAGES else root is not None and "." not in top
    if top.partition(".")[0] in _NAMES:
        return True
    return kind == "number" and "." not in top and (not nest_items or root is not None or path[0] not in holding)


def is_extra_state(name: str) -> bool:
    """Return whether a tensor's name is that of a module's extra state; the names of Megatron's shards end in
    `/shard_0_2` or the like.
    """
    return name.rpartition(".")[2].partition("/")[0] == EXTRA_STATE


def tops(items: Sequence[TrainingItem]) -> list[str]:
    """Return the keys at the top level of the training state."""
    return list(dict.fromkeys(str(item.path[0]) for item in items))


def nest_items(items: Sequence[TrainingItem], top: str, read: Callable[[str], object]) -> tuple[object, list[str]]:
    """Return the nested state under a key of the top level, and descriptions of those of its values that are not plain
    data.

    Args:
        items: the values of the training state of an opened checkpoint.
        top: key at the top level, whose state is nested.
        read: function that returns the value of a tensor, given its name.
    """
    not_plain: list[str] = []
    tree: dict[str | int, Any] = {}
    for item in items:
        if str(item.path[0]) != top:
            continue
        value = read(str(item.name)) if item.is_tensor else item.plain()
        if value is NOTHING:
            not_plain.append(f"{'.'.join(map(str, item.path))} is {item.what}")
        at = tree
        for key in item.path[:-1]:
            at = at.setdefault(key, {})
        at[item.path[-1]] = value
    return _lists_from_dicts(tree).get(top), not_plain


def _lists_from_dicts(tree: dict[str | int, Any]) -> Any:
    """Turn dicts with the keys 0, 1, … into lists, because key paths do not distinguish dicts from lists."""
    inner = {key: _lists_from_dicts(value) if type(value) is dict else value for key, value in tree.items()}
    numbers = [key for key in inner if isinstance(key, int)]
    return [inner[key] for key in sorted(numbers)] if inner and sorted(numbers) == list(range(len(inner))) else inner


def _plain_value(value: Any, depth: int) -> object:
    """Return a value as plain data; `NOTHING` if the value contains objects of other kinds."""
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
"""Keys and list indices from the top of a nested state to one of its values."""
LeafKind = Literal["tensor", "number", "other", "empty"]

ROOT = "root"
"""Metadata key for the key of the model's dict at the top level, which was removed from the names of tensors."""
RUN = "deepspeed"
"""Metadata key for counters and settings of a DeepSpeed training run."""
MEGATRON = "megatron"
"""Metadata key for counters and arguments of a Megatron training run."""
TRAINING = "training_state"
"""Metadata key for the list of the training state's keys at the top level, see `TrainingItem`."""
LEFT_BEHIND = "left_behind"
"""Metadata key of a dict from path to description, for values that are not read because they are neither tensors nor
numbers."""
OPTIMIZER = "optim/"
"""Prefix of the names of optimizer state: `optim/<parameter>/<state>`."""

_ROOTS = ("model", "module", "state_dict")
_OPTIMIZERS = frozenset({"optim", "optimizer", "optimizer_state_dict", "optimizer_state"})
_STATE = "state"
_LONGEST = 1 << 28
"""Maximum total number of characters in all names."""


class Leaf(msgspec.Struct, frozen=True, eq=False):
    """One leaf of a nested state: a value that is not itself a dict or list with tensors."""

    path: KeyPath
    """Key path of the value."""
    kind: LeafKind
    """Kind of the value: a tensor, a number, an empty dict or list, or anything else."""
    value: Any = None
    """The value itself, as the format's reader represents it. For the keys `params` and `param_names` of a parameter
    group, it is the whole list.
    """
    what: str = ""
    """Description of a value that cannot be read."""


class State(msgspec.Struct, frozen=True):
    """The named values of a state dict, with the parameter groups of the optimizer and the training state."""

    leaves: Mapping[str, Leaf]
    """Name -> value, for tensors and numbers, in the order of the file."""
    root: str | None
    """Key of the model's dict at the top level, which was removed from the names; None if there is no such dict."""
    left_behind: Mapping[str, str]
    """Path of a value that is not read -> description; a dict or list without tensors counts as one value."""
    groups: Sequence[ParamGroup] = ()
    """Parameter groups of all optimizers in the state."""
    training: Sequence[TrainingItem] = ()
    """Training state other than model and optimizer, such as schedulers and counters."""
    paths: Mapping[str, KeyPath] = msgspec.field(default_factory=dict)
    """Name -> key path, for each value that is neither directly in the model's dict nor optimizer state."""
    is_numbered: bool = False
    """Whether the groups list all parameters by number, in the order in which the optimizer has them."""

    def metadata(self) -> dict[str, Any]:
        """Return the metadata entries that describe this state."""
        root = {} if self.root is None else {ROOT: self.root}
        groups = {GROUPS: list(self.groups)} if self.groups else {}
        training = {TRAINING: tops(self.training)} if self.training else {}
        return root | groups | training | ({LEFT_BEHIND: dict(self.left_behind)} if self.left_behind else {})


def arrange(leaves: Sequence[Leaf], *, file: str, read: Callable[[Any], object] | None = None) -> State:
    """Name the values of a state dict, and sort them into model, optimizer and training state.

    Args:
        leaves: all values of the state dict (see `Leaf`); their order is preserved.
        file: name of the file, for error messages.
        read: function that returns the value of a tensor without dims in an optimizer's settings, or `NOTHING`; its
            argument is the tensor as the reader represents it.

    Raises:
        Refused: with the code NAME_COLLISION for two values with one name; with the code CORRUPT if the total length of
            the names is too large.
    """
    leaves, empty = _without_empty(leaves)
    optimizers = _OptimizerNames(leaves)
    model = [leaf for leaf in leaves if optimizers.root_of(leaf.path) is None]
    root = _root(model)
    settings = _settings(model)
    holding = {*_ROOTS, *(leaf.path[0] for leaf in model if leaf.kind == "tensor")}
    leaves_by_name: dict[str, Leaf] = {}
    left_behind: dict[str, str] = {}
    groups = _GroupSettings(read)
    training: list[TrainingItem] = []
    faults = Faults()
    length = 0
    for leaf in leaves:
        optimizer_root = optimizers.root_of(leaf.path)
        if leaf.path[0] == KEPT or (optimizer_root is not None and _in_groups(leaf.path[len(optimizer_root)])):
            if not groups.add(optimizer_root or (), leaf):
                left_behind[join_path(leaf.path)] = leaf.what or leaf.kind
            continue
        settings_container = _shortest(leaf.path, settings) if optimizer_root is None else None
        outside = optimizer_root is None and leaf.path[0] != root
        is_beside = outside and is_training(leaf.path, leaf.kind, root, holding)
        if is_beside and (settings_container is not None or leaf.kind == "other"):
            training.append(TrainingItem(leaf.path, None, leaf.value, leaf.what or leaf.kind))
        if settings_container is not None:
            left_behind[join_path(settings_container)] = "settings"
            continue
        if optimizer_root is None:
            name = join_path(leaf.path[1:] if root is not None and leaf.path[0] == root else leaf.path)
        else:
            name = optimizers.name(optimizer_root, leaf.path)
        length += len(name)
        if length > _LONGEST:
            raise refuse("CORRUPT", f"the names of its items are longer than {_LONGEST} characters together", file=file)
        if leaf.kind == "other":
            left_behind[name] = leaf.what
            continue
        if name in leaves_by_name:
            first_path, second_path = (repr(list(same_name.path)) for same_name in (leaves_by_name[name], leaf))
            faults.add("NAME_COLLISION", f"two items would have this name: {first_path} and {second_path}", file, name)
        leaves_by_name[name] = leaf
        if is_beside:
            training.append(TrainingItem(leaf.path, name, leaf.value if leaf.kind == "number" else None))
    empty_items = [leaf for leaf in empty if optimizers.root_of(leaf.path) is None and leaf.path[0] != root]
    empty_items = [leaf for leaf in empty_items if is_training(leaf.path, leaf.kind, root, holding)]
    training += (TrainingItem(leaf.path, None, leaf.value, leaf.what) for leaf in empty_items)
    if faults:
        raise faults.error()
    return State(
        leaves_by_name,
        root,
        left_behind,
        groups.groups(optimizers.parameter_name),
        training,
        _outside(leaves_by_name, root),
        groups.are_numbered,
    )


def _without_empty(leaves: Sequence[Leaf]) -> tuple[Sequence[Leaf], Sequence[Leaf]]:
    """Split values into those with contents, and empty dicts and lists, which only training state contains."""
    empty = [leaf for leaf in leaves if leaf.kind == "empty"]
    return ([leaf for leaf in leaves if leaf.kind != "empty"] if empty else leaves), empty


def _outside(leaves_by_name: Mapping[str, Leaf], root: str | None) -> dict[str, KeyPath]:
    """Return the key paths of values that belong to neither the model nor the optimizer; see `State.paths`."""
    min_length = 2 if root is None else 1
    return {
        name: leaf.path
        for name, leaf in leaves_by_name.items()
        if len(leaf.path) >= min_length and leaf.path[0] != root and not name.startswith(OPTIMIZER)
    }


def join_path(path: KeyPath) -> str:
    """Join the keys of a path with dots, into one name."""
    return ".".join(str(part) for part in path)


def _prefixes(paths: Iterable[KeyPath]) -> set[KeyPath]:
    """Return all proper prefixes of key paths, except the empty prefix."""
    prefixes: set[KeyPath] = set()
    for path in paths:
        for length in range(len(path) - 1, 0, -1):
            prefix = path[:length]
            if prefix in prefixes:
                break
            prefixes.add(prefix)
    return prefixes


def _shortest(path: KeyPath, among: set[KeyPath]) -> KeyPath | None:
    """Return the shortest proper prefix of a key path that is in a set; None if no prefix is in the set."""
    if among:
        for length in range(1, len(path)):
            if path[:length] in among:
                return path[:length]
    return None


def _root(leaves: Sequence[Leaf]) -> str | None:
    """Return the key of the only dict at the top level that contains tensors; None if there is none, or several."""
    flat = {leaf.path[0] for leaf in leaves if leaf.kind == "tensor" and len(leaf.path) == 2}
    nest_items = {leaf.path[0] for leaf in leaves if leaf.kind == "tensor" and len(leaf.path) > 2}
    candidates = [root for root in _ROOTS if root in flat and root not in nest_items]
    return candidates[0] if len(candidates) == 1 else None


def _settings(leaves: Sequence[Leaf]) -> set[KeyPath]:
    """Return the key paths of dicts and lists that count as settings: they contain no tensors, and at least one value
    that is not a number.
    """
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
    """The optimizers in a state dict: their key paths, and the names of their parameters."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._roots = {root for leaf in leaves for root in _optimizers(leaf)}
        numbered = dict.fromkeys(root for leaf in leaves if (root := self._numbered_root(leaf)) is not None)
        lists = {leaf.path: leaf.value for leaf in leaves if leaf.path[-1:] in ((PARAMS,), (NAMES,))}
        self._names = {root: _parameter_names(root, lists) for root in numbered}
        unnamed = [root for root, names in self._names.items() if not names]
        self._marks = {root: f"#{at}." for at, root in enumerate(unnamed)} if len(unnamed) > 1 else {}

    def root_of(self, path: KeyPath) -> KeyPath | None:
        """Return the path of the optimizer that contains a key path; None if no optimizer contains it."""
        if self._roots:
            for length in range(len(path)):
                if path[:length] in self._roots and _inside(path[length]):
                    return path[:length]
        return None

    def _numbered_root(self, leaf: Leaf) -> KeyPath | None:
        """Return the path of the optimizer that contains a value, if this optimizer numbers its parameters."""
        root = self.root_of(leaf.path)
        if root is None:
            return None
        parts = _parts(leaf.path[len(root) :])
        if parts is None:
            parameters = leaf.value if leaf.path[-1] == PARAMS and isinstance(leaf.value, list | tuple) else ()
            return root if any(isinstance(parameter, int) for parameter in parameters) else None
        return root if _is_number(parts[0]) else None

    def name(self, root: KeyPath, path: KeyPath) -> str:
        """Return the name of a value in an optimizer, such as `optim/<parameter>/<state>`."""
        parts = _parts(path[len(root) :])
        if parts is None:
            return join_path(path)
        parameter, state = parts
        return f"{OPTIMIZER}{self.parameter_name(root, parameter)}/{state}"

    def parameter_name(self, root: KeyPath, parameter: str | int) -> str:
        """Return the name of an optimizer's parameter; `#<number>` if the optimizer lists parameters only by number."""
        if not _is_number(parameter):
            return str(parameter)
        saved_name = self._names.get(root, {}).get(str(parameter))
        return saved_name or f"{self._marks.get(root, '#')}{parameter}"


class _GroupSettings:
    """Collects the settings of optimizers from the values of a state dict.

    torch saves settings either in a list of groups, as `param_groups, 0, lr`, or flattened by parameter, as
    `param_groups.<parameter>.lr`. If an optimizer has settings in both forms, those in the list are used.

    Args:
        read: function that returns the value of a tensor without dims; see `arrange`.
    """

    def __init__(self, read: Callable[[Any], object] | None) -> None:
        self._read = read
        self._listed: dict[KeyPath, dict[int, dict[str, Any]]] = {}
        self._flat: dict[KeyPath, dict[str, dict[str, Any]]] = {}

    def add(self, root: KeyPath, leaf: Leaf) -> bool:
        """Add a setting; return False if a parameter group cannot contain the setting."""
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

    @property
    def are_numbered(self) -> bool:
        """Whether there is one optimizer, whose groups list all their parameters by number."""
        if len(self._listed) != 1 or self._flat:
            return False
        (groups,) = self._listed.values()
        lists = [group.get(PARAMS) for group in groups.values()]
        return all(isinstance(each, list | tuple) and all(type(one) is int for one in each) for each in lists)

    def groups(self, parameter_name: Callable[[KeyPath, str | int], str]) -> list[ParamGroup]:
        """Return the parameter groups of all optimizers, with the names of their parameters."""
        groups: list[ParamGroup] = []
        for root in dict.fromkeys([*self._listed, *self._flat]):
            if root not in self._listed:
                groups += groups_of_equal_settings(self._flat[root])
            for _, group in sorted(self._listed.get(root, {}).items()):
                parameters = group.get(PARAMS)
                listed_parameters = parameters if isinstance(parameters, list | tuple) else ()
                names = [
                    parameter_name(root, parameter)
                    for parameter in listed_parameters
                    if isinstance(parameter, str | int)
                ]
                groups.append({**settings_of(group), PARAMS: names})
        return groups


def _begins(key: str | int, word: str) -> bool:
    """Return whether a key is `word`, or a flattened key whose first segment is `word`."""
    return isinstance(key, str) and key.partition(".")[0] == word


def _in_groups(key: str | int) -> bool:
    return _begins(key, GROUPS)


def _inside(key: str | int) -> bool:
    return _begins(key, _STATE) or _in_groups(key)


def _optimizers(leaf: Leaf) -> Iterator[KeyPath]:
    """Yield each prefix of a value's key path that is the path of an optimizer's state dict; the keys after the prefix,
    such as `param_groups`, show this.
    """
    path = leaf.path
    for at, key in enumerate(path):
        following = path[at + 1 :]
        flattened = isinstance(key, str) and "." in key and not following
        if _in_groups(key):
            has_list = leaf.kind == "other" if not following else isinstance(following[0], int)
            is_optimizer = flattened or (key == GROUPS and has_list)
        elif _begins(key, _STATE) and at and path[at - 1] in _OPTIMIZERS:
            is_optimizer = flattened or (key == _STATE and len(following) > 1)
        else:
            is_optimizer = False
        if is_optimizer:
            yield path[:at]


def _parts(inner: KeyPath) -> tuple[str | int, str] | None:
    """Return `(parameter, state)` of a path inside an optimizer: the path is `state, p, s, …`, or the flattened key
    `state.p.s`.
    """
    head = inner[0]
    if head == _STATE:
        return (inner[1], join_path(inner[2:])) if len(inner) > 2 else None
    if isinstance(head, str) and len(inner) == 1 and _begins(head, _STATE):
        parameter, _, state = head.removeprefix(f"{_STATE}.").rpartition(".")
        return (parameter, state) if parameter else None
    return None


def _is_number(parameter: str | int) -> bool:
    return isinstance(parameter, int) or parameter.isdecimal()


def _parameter_names(root: KeyPath, lists: Mapping[KeyPath, Any]) -> dict[str, str]:
    """Return number -> name, for an optimizer's parameters; empty unless all groups list both numbers and names."""
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
"""Key in a file's header under which the facts about the training run are stored."""
_COUNTS = ("global_steps", "global_samples")


def facts_as_text(run: Mapping[str, Any]) -> str | None:
    """Return the counters of a training run as text; None if the run has no counters. `facts_in` parses the text again.

    Args:
        run: facts about the training run, as the functions `draft` of formats receive them.
    """
    counts = {key: run[key] for key in _COUNTS if isinstance(run.get(key), int)}
    facts = {RUN: counts, MEGATRON: run.get(MEGATRON) or {}}
    return encode([{**facts, PARAMS: []}]) if any(facts.values()) else None


def facts_in(text: str) -> dict[str, Any]:
    """Parse the text of `facts_as_text` into metadata; return an empty dict for any other text."""
    groups = decode(text) or []
    settings = settings_of(groups[0]) if len(groups) == 1 else {}
    facts = {key: settings[key] for key in (RUN, MEGATRON) if isinstance(settings.get(key), dict) and settings[key]}
    counts = facts.get(MEGATRON, {}).get("counters", {})
    whole = [*facts.get(RUN, {}).values(), *(counts.values() if isinstance(counts, dict) else [None])]
    whole += [facts[MEGATRON]["iteration"]] if "iteration" in facts.get(MEGATRON, {}) else []
    return facts if all(type(count) is int and count >= 0 for count in whole) else {}


MASTER = "fp32"
"""Name of the optimizer state that is a full-precision copy of a low-precision weight."""
_FULL = frozenset({"F32", "F64"})


def with_full_precision(container: Container, *, require_copies: bool) -> Container:
    """Return an opened checkpoint in which weights are replaced by the optimizer's full-precision copies.

    Args:
        container: an opened checkpoint with optimizer state.
        require_copies: whether to refuse a low-precision weight without a full-precision copy, instead of keeping the
            weight.

    Raises:
        Refused: with the code UNSUPPORTED, if `require_copies`, for each low-precision weight without a full-precision
            copy.
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
        if require_copies and master is None and entry.dtype not in _FULL:
            message = "the checkpoint holds no full-precision copy of this tensor"
            faults.add("UNSUPPORTED", message, container.path, name, "Omit --weights fp32.")
    if faults:
        raise faults.error()
    return replace(container, entries=entries)
