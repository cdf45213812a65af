"""A `CheckpointIO`: the object that Lightning's trainer calls to write, read and delete checkpoints. Lightning is not
imported by this module.

Lightning collects the state of a run in a checkpoint dict on its first rank. The dict's weights and optimizer state are
saved under parameter names, and all other entries as plain data. So nothing is pickled, and any number of ranks can
resume.

**Lightning's strategies**: most strategies call a `CheckpointIO` on the first rank only, so the other ranks would not
learn that a save failed. Strategies that shard the module call a `CheckpointIO` only to delete checkpoints. So when a
run begins, methods of its strategy are replaced, so that every rank takes part in saves and loads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from transaxle.arguments import Axes, Config, PathLike, Size, read_flag, read_path, suggests, wrong_type
from transaxle.axes.notation.name import own_name
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.errors import refuse
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.staging import as_local_path
from transaxle.live.asynchronous import SaveJob, async_save
from transaxle.live.extra_state import FILE, MODEL, SavedStates, encode_states
from transaxle.live.integrations.step_checkpoints import read_stored, remove
from transaxle.live.load import load
from transaxle.live.model.state_tensors import State, as_tensor
from transaxle.live.save import SAVING, check_options, save
from transaxle.live.source_check import SourceCheck
from transaxle.live.transport.world import World
from transaxle.options import SHARD_SIZE, select
from transaxle.torch_tensors import local_of, same_bytes, torch_dtype, unwrap

_CONFIGURE = "configure_callbacks"
"""Name of the hook of a `LightningModule` that Lightning calls on every rank when a run begins, before any set-up."""
_SAVE, _LOAD = "save_checkpoint", "load_checkpoint"
_PACKAGES = ("pytorch_lightning.strategies", "lightning.pytorch.strategies")
_BASE, _SHARDED = "Strategy", "ModelParallelStrategy"
_PARTS = "_save_distributed_checkpoint"
"""Attribute of `ModelParallelStrategy`: true if each rank saves its own shards, false if one rank saves whole
tensors.
"""
_INNER = "checkpoint_io"
_AVERAGING = "WeightAveraging"
_SPAWNING = "_MultiProcessingLauncher"
"""Lightning's class that starts the rank processes of the strategies `ddp_spawn`, `ddp_fork` and `ddp_notebook`."""


class Checkpoints(Protocol):
    """The methods of `LightningCheckpoints` that Lightning's strategies call."""

    is_sharded: bool
    """Whether every rank saves its own shards; if False, the first rank saves all tensors."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: object = None) -> None:
        """Write Lightning's checkpoint dict to a path."""

    def load_checkpoint(self, path: Any) -> dict[str, Any]:
        """Read a checkpoint, and return Lightning's checkpoint dict."""

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the checkpoint at a path."""

    def teardown(self) -> None:
        """Wait until the last save has ended."""


def follow(module: nn.Module, kind: type[Checkpoints]) -> None:
    """Arrange that `take_part` is called whenever a run of a `LightningModule` begins, if the run's `CheckpointIO` is
    of type `kind`.
    """
    configure = getattr(module, _CONFIGURE, None)
    if configure is not None and _CONFIGURE not in vars(module):
        setattr(module, _CONFIGURE, partial(_begin, module, configure, kind))


def _begin(module: Any, configure: Any, kind: type[Checkpoints]) -> Any:
    """Replacement for the module's hook `configure_callbacks`, which calls `take_part` in addition to the original
    hook.
    """
    checkpoints = module.trainer.strategy.checkpoint_io
    if isinstance(getattr(checkpoints, _INNER, None), kind):
        message = f"{type(checkpoints).__name__} saves in a thread, while training goes on and changes the weights"
        raise refuse("UNSUPPORTED", message, hint="Give LightningCheckpoints(…, background=True) alone.")
    if isinstance(checkpoints, kind):
        take_part(module.trainer, checkpoints)
    return configure()


def take_part(trainer: Any, checkpoints: Checkpoints) -> None:
    """Make every rank take part in saves and loads of a trainer's strategy, and raise an error on all ranks if any rank
    has one.

    Raises:
        Refused: with code UNSUPPORTED, if the strategy has its own save method, or spawns its ranks.
    """
    strategy = trainer.strategy
    checkpoints.is_sharded = _is_sharded(strategy)
    if checkpoints.is_sharded:
        _check_sharded(trainer)
    else:
        _check_whole(strategy)
    ranks = _Ranks(strategy, checkpoints)
    strategy.save_checkpoint, strategy.load_checkpoint = ranks.save, ranks.load
    strategy.remove_checkpoint, strategy.on_train_end = ranks.remove, ranks.end


class _Ranks:
    """Replacements for methods of Lightning's strategy, which are called on every rank."""

    def __init__(self, strategy: Any, checkpoints: Checkpoints) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: object = None) -> None:
        is_sharded = self._checkpoints.is_sharded
        path = self._strategy.broadcast(filepath) if is_sharded else filepath
        with World().together():
            if is_sharded or self._strategy.is_global_zero:
                self._checkpoints.save_checkpoint(checkpoint, path, storage_options)

    def load(self, checkpoint_path: Any, weights_only: object = None) -> dict[str, Any]:  # noqa: ARG002 - Lightning's
        return self._checkpoints.load_checkpoint(self._strategy.broadcast(checkpoint_path))

    def remove(self, filepath: Any) -> None:
        with World().together():
            if self._checkpoints.is_sharded:
                self._checkpoints.teardown()
            if self._strategy.is_global_zero:
                self._checkpoints.remove_checkpoint(filepath)

    def end(self) -> None:
        type(self._strategy).on_train_end(self._strategy)
        with World().together():
            self._checkpoints.teardown()


def _is_sharded(strategy: Any) -> bool:
    """Return whether a strategy shards the module over all ranks, with FSDP2 or tensor parallelism."""
    return any(isinstance(strategy, getattr(sys.modules[name], _SHARDED)) for name in _PACKAGES if name in sys.modules)


def _check_sharded(trainer: Any) -> None:
    """Refuse trainer options that do not work if a sharded module is saved.

    Raises:
        Refused: with code UNSUPPORTED, if the trainer has such an option.
    """
    if not getattr(trainer.strategy, _PARTS, True):
        hint = "Omit this option: the result is the same, and no rank ever holds whole weights."
        raise refuse("UNSUPPORTED", "save_distributed_checkpoint=False gathers everything on one rank", hint=hint)
    if any(kind.__name__ == _AVERAGING for callback in trainer.callbacks for kind in type(callback).__mro__):
        hint = f"Train without {_AVERAGING}, or under DDP."
        raise refuse("UNSUPPORTED", f"{_AVERAGING} keeps whole averages, beside sharded weights", hint=hint)


def _check_whole(strategy: Any) -> None:
    """Refuse a strategy whose first rank does not save the whole model through a `CheckpointIO`.

    Raises:
        Refused: with code UNSUPPORTED, for such a strategy.
    """
    own_methods = [
        kind for kind in type(strategy).__mro__ if kind.__name__ != _BASE and vars(kind).keys() & {_SAVE, _LOAD}
    ]
    if own_methods:
        message = f"{own_methods[0].__name__} saves or loads checkpoints in a way of its own, and asks no CheckpointIO"
        hint = f"Use DDP, or {_SHARDED} to shard; or leave out LightningCheckpoints."
        raise refuse("UNSUPPORTED", message, hint=hint)
    if type(strategy.launcher).__name__ == _SPAWNING:
        message = "ranks that are spawned or forked from one process hand back their weights through the CheckpointIO"
        hint = 'Start one process for each rank: strategy="ddp", or torchrun.'
        raise refuse("UNSUPPORTED", message, hint=hint)


_INTERFACES = ("lightning_fabric.plugins.io.checkpoint_io", "lightning.fabric.plugins.io.checkpoint_io")
"""The Python modules with Lightning's class `CheckpointIO`, one in each of Lightning's two packages."""
_WEIGHTS, _OPTIMIZERS, _GROUPS, _STATE = "state_dict", "optimizer_states", "param_groups", "state"
"""Two keys of Lightning's checkpoint dict, and two keys of an optimizer's state dict."""
_TRAINED = "current_model_state"
"""Key under which Lightning's `WeightAveraging` stores the trained weights; it stores the averages under the usual
key.
"""
_BEFORE = f"{_TRAINED}."
_FITTING = "fit"
_REST = "lightning"
"""Name, in a checkpoint's extra state, of the checkpoint dict's entries that are neither weights nor optimizer
state.
"""


class LightningCheckpoints:
    """A `CheckpointIO` for Lightning's `Trainer`, used as in `Trainer(plugins=[tx.LightningCheckpoints(module)])`.

    Each checkpoint is a folder, on a local disk or under a URL. `fit(ckpt_path=…)` resumes from such a folder on any
    number of ranks, and `ModelCheckpoint` rotates the folders. An old checkpoint that Transaxle wrote is deleted after
    a newer one is complete. The supported strategies are a single device, DDP, and `ModelParallelStrategy`, under which
    each rank saves and loads its own shards. A strategy with its own save method is refused when a run begins. With
    Lightning's `WeightAveraging` (not supported if ranks shard the module), a checkpoint contains the averages under
    the module's names, and the trained weights under `current_model_state.…`.

    Args:
        module: the `LightningModule` that is trained.
        to: format of the checkpoints, with the module's own tensor names: `safetensors:identity` or `dcp:identity`.
            `transaxle convert` converts such checkpoints to any other format or dialect.
        background: whether to write the files while training continues, as `async_save` does.

    All other arguments are those of `save`.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: if `to` is an unknown format.
    """

    is_sharded = False
    """Whether the run's strategy shards the module, so that every rank saves and loads its own shards."""

    @suggests
    def __init__(
        self,
        module: nn.Module,
        *,
        to: str = "safetensors:identity",
        background: bool = False,
        family: str | None = None,
        dialect: str | None = None,
        config: Config | None = None,
        axes: Axes | None = None,
        rules: PathLike | None = None,
        shard_size: Size = SHARD_SIZE,
        sync: bool = True,
        check_copies: bool = True,
        verify: bool = False,
    ) -> None:
        self._options = select(locals(), SAVING)
        check_options(to, self._options)
        if not isinstance(module, nn.Module):
            raise wrong_type("module", "the LightningModule that is trained", module)
        read_flag("background", background)
        if not to.endswith(":identity"):
            hint = f"Give {to.partition(':')[0]}:identity, and convert the checkpoint afterwards."
            raise refuse("UNSUPPORTED", "Lightning's checkpoints keep the names of the module", hint=hint)
        self._module = unwrap(module)  # Lightning unwraps the module that `torch.compile` returns
        self._to = to
        self._background = background
        self._job: SaveJob | None = None
        self._alone: dist.ProcessGroup | None = None
        for name in _INTERFACES:  # a program with a LightningModule has imported at least one of these Python modules
            if name in sys.modules:
                sys.modules[name].CheckpointIO.register(type(self))
        follow(self._module, type(self))

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: PathLike, storage_options: object = None) -> None:
        """Save Lightning's checkpoint dict; this is called on the first rank, or on every rank if the module is
        sharded.

        Args:
            checkpoint: Lightning's checkpoint dict.
            path: folder or URL of the checkpoint.
            storage_options: refused, because storage clients are configured by their environment.

        Raises:
            TransaxleError: if the save has failed; the target is unchanged.
        """
        if storage_options is not None:
            hint = "Configure the storage service's own client: environment variables, a profile or a login."
            raise refuse("UNSUPPORTED", "storage_options are not passed on", file=str(path), hint=hint)
        group = None if self.is_sharded else self._own_group()
        with (world := World(group)).together():
            prefix, state = self._state(checkpoint)
            optimizers = list(self._trainer.optimizers) if _OPTIMIZERS in checkpoint else []
            other_entries = self._other_entries(checkpoint, optimizers, prefix)
        if world.size > 1:  # each rank has its own dict entries; as in Lightning, those of the first rank are saved
            other_entries = self._first(other_entries, world)
        # the checkpoint is a folder, even if Lightning's name for it ends in .ckpt
        place = read_path("path", path).rstrip("/") + "/"
        if not is_url(as_local_path(place)):
            Path(as_local_path(place)).parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "to": self._to, "optimizer": optimizers or None, "extra": {_REST: other_entries}, "overwrite": True,
            "group": group, **self._options,
        }  # fmt: skip
        if self._background:
            self._job = async_save(state, place, **options)
        else:
            save(state, place, **options)

    def _other_entries(
        self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], prefix: str
    ) -> dict[str, Any]:
        """Return the entries of Lightning's checkpoint dict that are neither weights nor optimizer state.

        Raises:
            Refused: with code UNSUPPORTED, if an optimizer has a parameter that the module does not have.
        """
        entries = {key: value for key, value in checkpoint.items() if key not in (_WEIGHTS, _OPTIMIZERS)}
        if prefix:
            entries.pop(_TRAINED)
        if _OPTIMIZERS not in checkpoint:
            return entries
        names = {id(parameter): prefix + own_name(name) for name, parameter in self._module.named_parameters()}
        optimizer_states = checkpoint[_OPTIMIZERS]
        states = [optimizer.state_dict() for optimizer in optimizers] if self.is_sharded else optimizer_states
        entries[_OPTIMIZERS] = []
        for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
            trained = [each for group in optimizer.param_groups for each in group["params"]]
            if any(id(each) not in names for each in trained):
                message = f"optimizer {number} trains a parameter that is none of the module's"
                hint = "Make the parameter an attribute of the module, so that checkpoints contain it."
                raise refuse("UNSUPPORTED", message, hint=hint)
            entries[_OPTIMIZERS].append(_outline(state, [names[id(each)] for each in trained]))
        return entries

    def _first(self, entries: dict[str, Any], world: World) -> dict[str, Any]:
        """Return, on every rank, the plain data of the first rank.

        Raises:
            Refused: with code UNSUPPORTED, if a value is not plain data.
        """

        def text() -> bytes | None:
            return encode_states({_REST: entries}, World(self._own_group())) if world.rank == world.ranks[0] else None

        first_entries: dict[str, Any] = SavedStates(world.pool(text)[0], world).states[_REST]
        return first_entries

    def _state(self, checkpoint: Mapping[str, Any]) -> tuple[str, State]:
        """Return the prefix of the trained weights' names, and the state to save.

        Raises:
            Refused: with code UNSUPPORTED, if the weights are neither the module's weights, nor averages of
                `WeightAveraging`.
        """
        shown = self._own_weights()
        weights, trained = checkpoint[_WEIGHTS], checkpoint.get(_TRAINED)
        averaged = isinstance(trained, Mapping) and _unlike(trained, shown) is None
        if averaged and weights.keys() == shown.keys() and _are_tensors(weights) and _are_tensors(shown):
            averages = {own_name(name): tensor for name, tensor in weights.items()}
            return _BEFORE, {**averages, **{_BEFORE + own_name(name): tensor for name, tensor in shown.items()}}
        changed_name = _unlike(weights, shown)
        if changed_name is None:
            return "", self._module
        if not changed_name:
            message = "on_save_checkpoint has changed the names of the weights"
            hint = "Store values that belong to the run under different keys of the checkpoint."
            raise refuse("UNSUPPORTED", message, hint=hint)
        message = "on_save_checkpoint (of the module or a callback) has put other values in its place"
        hint = "Save with Lightning's own CheckpointIO; transaxle can read its files."
        raise refuse("UNSUPPORTED", message, tensor=changed_name, hint=hint)

    def _own_weights(self) -> dict[str, Any]:
        """Return the module's weights under the names that Lightning's strategy uses for them."""
        return get_model_state_dict(self._module) if self.is_sharded else self._module.state_dict(keep_vars=True)

    def load_checkpoint(
        self,
        path: PathLike,
        map_location: object = None,  # noqa: ARG002 - Lightning gives it
        weights_only: bool | None = None,  # noqa: ARG002 - Lightning gives it
    ) -> dict[str, Any]:
        """Return the checkpoint dict that Lightning collected when it saved; this is called on every rank.

        Args:
            path: folder or URL of the checkpoint.
            map_location: ignored; tensors are loaded into CPU memory, and Lightning copies them from there.
            weights_only: ignored; reading a checkpoint never runs code.

        Raises:
            TransaxleError: if the checkpoint is incomplete or damaged, or was not written by Transaxle.
        """
        self._wait()
        place, receiver = read_path("path", path), _EntryReceiver()
        if self.is_sharded:
            return self._load_parts(place)
        shown, is_strict = self._module.state_dict(), bool(self._module.strict_loading)
        with open_checkpoint(place) as checkpoint:
            averaged = any(_BEFORE + own_name(name) in checkpoint for name in shown)
            weights = {
                prefix + name: _empty(tensor, prefix + name, checkpoint)
                for prefix in (("", _BEFORE) if averaged else ("",))
                for name, tensor in ((own_name(name), tensor) for name, tensor in shown.items())
                if isinstance(tensor, torch.Tensor) and (is_strict or prefix + name in checkpoint)
            }
            load(weights, place, extra={_REST: receiver}, strict=is_strict)
            extra = _extra_states(place)
            result = {_WEIGHTS: _rename(shown, {**extra, **weights}, ""), **receiver.entries}
            if averaged:
                result[_TRAINED] = _rename(shown, weights, _BEFORE)
            check = SourceCheck(checkpoint, World.alone(), is_enabled=True)
            for state in result.get(_OPTIMIZERS, ()):
                for name, values in zip(state.pop("names"), state[_STATE].values(), strict=True):
                    for key in (key for key, value in values.items() if value is None):
                        entry = f"optim/{name}/{key}"
                        values[key] = as_tensor(entry, checkpoint[entry].read())
            check.finish()
        return result

    def _load_parts(self, place: str) -> dict[str, Any]:
        """Load this rank's shards of weights and optimizer state in place, and return all other entries of the
        checkpoint dict.
        """
        receiver, trainer = _EntryReceiver(), self._trainer
        optimizers = list(trainer.optimizers) if trainer.state.fn == _FITTING else []
        load(
            self._module,
            place,
            optimizer=optimizers or None,
            extra={_REST: receiver},
            strict=bool(self._module.strict_loading),
        )
        receiver.entries.pop(_OPTIMIZERS, None)
        return receiver.entries

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint that a newer one replaces, after the newer checkpoint is complete.

        Raises:
            TransaxleError: if the save of the newer checkpoint has failed; with code EXISTS, if the folder contains a
                file that belongs to no checkpoint of Transaxle. After an error, nothing is deleted.
        """
        self._wait()
        remove(as_local_path(read_path("path", path)))

    def teardown(self) -> None:
        """Wait until the last save has ended.

        Raises:
            TransaxleError: if the last save has failed.
        """
        self._wait()

    @property
    def _trainer(self) -> Any:
        try:
            return self._module.trainer
        except RuntimeError as error:
            message = "the module that LightningCheckpoints was given has no trainer"
            raise refuse(
                "UNSUPPORTED", message, hint=("Pass the module that `fit` gets to LightningCheckpoints.")
            ) from error

    def _wait(self) -> None:
        if self._job is not None:
            self._job.result()

    def _own_group(self) -> dist.ProcessGroup | None:
        """Return a process group of only this rank, for saves that Lightning makes on one rank; None without a process
        group.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._alone


def _unlike(weights: Mapping[str, Any], shown: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor whose values differ from those of the module; "" if the names differ; None if
    all are equal.
    """
    if weights.keys() != shown.keys():
        return ""
    tensors = ((name, tensor) for name, tensor in shown.items() if isinstance(tensor, torch.Tensor))
    return next((name for name, tensor in tensors if not _same(weights[name], tensor)), None)


def _are_tensors(state: Mapping[str, Any]) -> bool:
    return all(isinstance(each, torch.Tensor) for each in state.values())


def _empty(tensor: torch.Tensor, name: str, checkpoint: Checkpoint) -> torch.Tensor:
    """Return an empty tensor, in the stored dtype, for a tensor of the module; Lightning may cast the module later."""
    dtype = torch_dtype(checkpoint[name].dtype) if name in checkpoint else tensor.dtype
    return torch.empty_like(tensor, dtype=dtype, device="cpu")


def _extra_states(place: str) -> dict[str, Any]:
    """Return name -> extra state (`get_extra_state`) of the modules."""
    states = SavedStates(read_stored(place, FILE), World()).states
    return {name.removeprefix(f"{MODEL}/"): state for name, state in states.items() if name.startswith(f"{MODEL}/")}


def _rename(shown: Mapping[str, Any], weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return weights under the names of the module's state dict, in the order of the state dict."""
    stored_names = {name: prefix + own_name(name) for name in shown}
    return {name: weights[stored_name] for name, stored_name in stored_names.items() if stored_name in weights}


def _same(value: Any, tensor: torch.Tensor) -> bool:
    """Return whether a value is the given tensor of the module, or an equal copy of it."""
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        return False
    own_local, other_local = local_of(tensor.detach()), local_of(value.detach())
    return other_local.data_ptr() == own_local.data_ptr() or same_bytes(other_local.to(own_local.device), own_local)


class _EntryReceiver:
    """Receives the entries of a checkpoint that are not tensors during a load, as an object in the argument `extra`."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the entries that were received."""
        return self.entries

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the entries by those that were loaded."""
        self.entries = state


def _outline(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state dict without its tensors; these are saved separately under parameter names.

    Args:
        state: the optimizer's state dict.
        names: names of all parameters, in the order of the parameter groups.
    """
    numbers = [number for group in state[_GROUPS] for number in group["params"]]
    names_by_number = dict(zip(numbers, names, strict=True))
    stepped = {
        number: {key: None if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for number, values in state[_STATE].items()
    }
    return {_STATE: stepped, _GROUPS: state[_GROUPS], "names": [names_by_number[number] for number in stepped]}
