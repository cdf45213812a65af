"""Lightning's `CheckpointIO`: what its trainer calls to write, read and delete checkpoints; it is not imported here.

Lightning gives its first rank one dict with everything. Weights and optimizer state go into the checkpoint under the
names of parameters, everything else beside them as plain data, so nothing is pickled and any number of ranks resumes.

**Lightning's strategies**: how each of them saves, and how every rank takes part in it.

A strategy asks a `CheckpointIO` on its first rank only, so the others would wait for one that has failed; those that
shard do not ask it at all, but still have it delete. When a run begins, the strategy at hand gets functions of ours.
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
from transaxle.formats.store.staging import on_this_machine
from transaxle.live.asynchronous import SaveJob, async_save
from transaxle.live.extra_state import FILE, MODEL, Extras, written
from transaxle.live.integrations.step_checkpoints import remove, stored_bytes
from transaxle.live.load import load
from transaxle.live.model.state_tensors import State, as_tensor
from transaxle.live.save import SAVING, check_options, save
from transaxle.live.transport.world import World
from transaxle.options import SHARD_SIZE, select
from transaxle.torch_tensors import local_of, same_bytes, torch_dtype, unwrap

_CONFIGURE = "configure_callbacks"
"""Hook of a `LightningModule` that is called on every rank when a run begins, before anything is set up."""
_SAVE, _LOAD = "save_checkpoint", "load_checkpoint"
_PACKAGES = ("pytorch_lightning.strategies", "lightning.pytorch.strategies")
_BASE, _SHARDED = "Strategy", "ModelParallelStrategy"
_PARTS = "_save_distributed_checkpoint"
"""Attribute of the sharded strategy that tells whether ranks give their own parts, and not one of them everything."""
_INNER = "checkpoint_io"
_AVERAGING = "WeightAveraging"
_SPAWNING = "_MultiProcessingLauncher"
"""Class that starts the ranks of `ddp_spawn`, `ddp_fork` and `ddp_notebook`."""


class Checkpoints(Protocol):
    """A `CheckpointIO` of ours."""

    is_sharded: bool
    """Whether every rank saves its own parts; else the first one saves everything."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: object = None) -> None:
        """Save."""

    def load_checkpoint(self, path: Any) -> dict[str, Any]:
        """Load."""

    def remove_checkpoint(self, path: Any) -> None:
        """Delete."""

    def teardown(self) -> None:
        """Wait for the last save."""


def follow(module: nn.Module, kind: type[Checkpoints]) -> None:
    """Let every run of a `LightningModule` begin with `take_part`, if its trainer has a `CheckpointIO` of a kind."""
    configure = getattr(module, _CONFIGURE, None)
    if configure is not None and _CONFIGURE not in vars(module):
        setattr(module, _CONFIGURE, partial(_begin, module, configure, kind))


def _begin(module: Any, configure: Any, kind: type[Checkpoints]) -> Any:
    """Stand in for `configure_callbacks`."""
    checkpoints = module.trainer.strategy.checkpoint_io
    if isinstance(getattr(checkpoints, _INNER, None), kind):
        message = f"{type(checkpoints).__name__} saves in a thread, while training goes on and changes the weights"
        raise refuse("UNSUPPORTED", message, hint="Give LightningCheckpoints(…, background=True) alone.")
    if isinstance(checkpoints, kind):
        take_part(module.trainer, checkpoints)
    return configure()


def take_part(trainer: Any, checkpoints: Checkpoints) -> None:
    """Let every rank take part in what a trainer's strategy does with checkpoints, and raise what any rank met.

    Raises:
        Refused: UNSUPPORTED for a strategy that saves in a way of its own, or ranks that start in one of its own.
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
    """Takes the place of a strategy's own functions."""

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
    """Tell whether a strategy has the ranks shard the module themselves, by FSDP2 and tensor parallelism."""
    return any(isinstance(strategy, getattr(sys.modules[name], _SHARDED)) for name in _PACKAGES if name in sys.modules)


def _check_sharded(trainer: Any) -> None:
    """Refuse what cannot be saved where ranks shard.

    Raises:
        Refused: UNSUPPORTED.
    """
    if not getattr(trainer.strategy, _PARTS, True):
        hint = "Leave it out: the result is the same, and whole weights are never in one place."
        raise refuse("UNSUPPORTED", "save_distributed_checkpoint=False gathers everything on one rank", hint=hint)
    if any(kind.__name__ == _AVERAGING for callback in trainer.callbacks for kind in type(callback).__mro__):
        hint = f"Train without {_AVERAGING}, or under DDP."
        raise refuse("UNSUPPORTED", f"{_AVERAGING} keeps whole averages, beside sharded weights", hint=hint)


def _check_whole(strategy: Any) -> None:
    """Refuse a strategy that does not let its first rank save the whole model through a `CheckpointIO`.

    Raises:
        Refused: UNSUPPORTED.
    """
    own = [kind for kind in type(strategy).__mro__ if kind.__name__ != _BASE and vars(kind).keys() & {_SAVE, _LOAD}]
    if own:
        message = f"{own[0].__name__} saves or loads checkpoints in a way of its own, and asks no CheckpointIO"
        hint = f"Use DDP, or {_SHARDED} to shard; or leave out LightningCheckpoints."
        raise refuse("UNSUPPORTED", message, hint=hint)
    if type(strategy.launcher).__name__ == _SPAWNING:
        message = "ranks that are spawned or forked from one process hand back their weights through the CheckpointIO"
        hint = 'Start one process for each rank: strategy="ddp", or torchrun.'
        raise refuse("UNSUPPORTED", message, hint=hint)


_INTERFACES = ("lightning_fabric.plugins.io.checkpoint_io", "lightning.fabric.plugins.io.checkpoint_io")
"""Modules with Lightning's class, under the names of its two packages."""
_WEIGHTS, _OPTIMIZERS, _GROUPS, _STATE = "state_dict", "optimizer_states", "param_groups", "state"
"""Keys of Lightning's dict, and of an optimizer's."""
_TRAINED = "current_model_state"
"""Key under which `WeightAveraging` keeps the module's own weights, after it has put averages in their place."""
_BEFORE = f"{_TRAINED}."
_FITTING = "fit"
_REST = "lightning"
"""Name under which a checkpoint has the rest of the dict."""


class LightningCheckpoints:
    """A `CheckpointIO` for Lightning's `Trainer`: `Trainer(plugins=[tx.LightningCheckpoints(module)])`.

    Each checkpoint is a folder, or lies under a URL. `fit(ckpt_path=…)` resumes from it on any number of ranks, and
    `ModelCheckpoint` rotates it; what is deleted is what Transaxle has written, after the newer one is complete. For
    one device, DDP, and `ModelParallelStrategy`, under which each rank saves and loads its own parts; a strategy that
    saves in a way of its own is refused when a run begins. With Lightning's `WeightAveraging` (but not where ranks
    shard) it has the averages under the module's names, and the trained weights under `current_model_state.…`.

    Args:
        module: the `LightningModule` that is trained.
        to: format of the checkpoints under the module's own names, `safetensors:identity` or `dcp:identity`;
            `transaxle convert` makes any other layout of them.
        background: write while training goes on, as `async_save` does.

    The other arguments are those of `save`.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: a format that there is not.
    """

    is_sharded = False
    """Whether the run's strategy shards, and every rank saves and loads its own parts."""

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
        self._module = unwrap(module)  # Lightning unwraps what `torch.compile` returns
        self._to = to
        self._background = background
        self._job: SaveJob | None = None
        self._alone: dist.ProcessGroup | None = None
        for name in _INTERFACES:  # whoever has a LightningModule has imported one of them
            if name in sys.modules:
                sys.modules[name].CheckpointIO.register(type(self))
        follow(self._module, type(self))

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: PathLike, storage_options: object = None) -> None:
        """Save what Lightning collected, on its first rank; where ranks shard, on every one.

        Args:
            checkpoint: Lightning's dict.
            path: folder or URL.
            storage_options: refused: clients of services are set up by their environment.

        Raises:
            TransaxleError: the target is then as it was.
        """
        if storage_options is not None:
            hint = "Set up the service's client in its own way: environment, profile or login."
            raise refuse("UNSUPPORTED", "storage_options are not passed on", file=str(path), hint=hint)
        group = None if self.is_sharded else self._own_group()
        with (world := World(group)).together():
            prefix, state = self._state(checkpoint)
            optimizers = list(self._trainer.optimizers) if _OPTIMIZERS in checkpoint else []
            rest = self._rest(checkpoint, optimizers, prefix)
        if world.size > 1:  # each rank has its own, and the first one's counts, as Lightning has it
            rest = self._first(rest, world)
        place = read_path("path", path).rstrip("/") + "/"  # a folder, even where Lightning's name for it ends in .ckpt
        if not is_url(on_this_machine(place)):
            Path(on_this_machine(place)).parent.mkdir(parents=True, exist_ok=True)
        told: dict[str, Any] = {
            "to": self._to, "optimizer": optimizers or None, "extra": {_REST: rest}, "overwrite": True,
            "group": group, **self._options,
        }  # fmt: skip
        if self._background:
            self._job = async_save(state, place, **told)
        else:
            save(state, place, **told)

    def _rest(self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], prefix: str) -> dict[str, Any]:
        """Return what Lightning collected beside tensors.

        Raises:
            Refused: UNSUPPORTED for an optimizer with a parameter that the module does not have.
        """
        rest = {key: value for key, value in checkpoint.items() if key not in (_WEIGHTS, _OPTIMIZERS)}
        if prefix:
            rest.pop(_TRAINED)
        if _OPTIMIZERS not in checkpoint:
            return rest
        names = {id(parameter): prefix + own_name(name) for name, parameter in self._module.named_parameters()}
        given = checkpoint[_OPTIMIZERS]
        states = [optimizer.state_dict() for optimizer in optimizers] if self.is_sharded else given
        rest[_OPTIMIZERS] = []
        for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
            trained = [each for group in optimizer.param_groups for each in group["params"]]
            if any(id(each) not in names for each in trained):
                message = f"optimizer {number} trains a parameter that is none of the module's"
                hint = "Make it an attribute of the module, so that a checkpoint has it."
                raise refuse("UNSUPPORTED", message, hint=hint)
            rest[_OPTIMIZERS].append(_outline(state, [names[id(each)] for each in trained]))
        return rest

    def _first(self, rest: dict[str, Any], world: World) -> dict[str, Any]:
        """Return the first rank's plain data on every rank.

        Raises:
            Refused: UNSUPPORTED for what is no plain data.
        """

        def text() -> bytes | None:
            return written({_REST: rest}, World(self._own_group())) if world.rank == world.ranks[0] else None

        found: dict[str, Any] = Extras(world.pool(text)[0], world).states[_REST]
        return found

    def _state(self, checkpoint: Mapping[str, Any]) -> tuple[str, State]:
        """Return what is saved, and what the names of the weights that are trained begin with in it.

        Raises:
            Refused: UNSUPPORTED for weights that are neither the module's, nor averages of `WeightAveraging`.
        """
        shown = self._shown()
        given, trained = checkpoint[_WEIGHTS], checkpoint.get(_TRAINED)
        averaged = isinstance(trained, Mapping) and _unlike(trained, shown) is None
        if averaged and given.keys() == shown.keys() and _are_tensors(given) and _are_tensors(shown):
            averages = {own_name(name): tensor for name, tensor in given.items()}
            return _BEFORE, {**averages, **{_BEFORE + own_name(name): tensor for name, tensor in shown.items()}}
        other = _unlike(given, shown)
        if other is None:
            return "", self._module
        if not other:
            message = "on_save_checkpoint has changed the names of the weights"
            hint = "Keep what belongs to the run under other keys of the checkpoint."
            raise refuse("UNSUPPORTED", message, hint=hint)
        message = "on_save_checkpoint (of the module or a callback) has put other values in its place"
        hint = "Let it save with Lightning's own CheckpointIO; transaxle reads its files."
        raise refuse("UNSUPPORTED", message, tensor=other, hint=hint)

    def _shown(self) -> dict[str, Any]:
        """Return the module's weights under the names that Lightning's strategy gives them."""
        return get_model_state_dict(self._module) if self.is_sharded else self._module.state_dict(keep_vars=True)

    def load_checkpoint(
        self,
        path: PathLike,
        map_location: object = None,  # noqa: ARG002 - Lightning gives it
        weights_only: bool | None = None,  # noqa: ARG002 - Lightning gives it
    ) -> dict[str, Any]:
        """Return what Lightning had collected; every rank calls it.

        Args:
            path: folder or URL.
            map_location: not needed: tensors are in CPU memory, and Lightning copies them.
            weights_only: not needed: reading runs no code.

        Raises:
            TransaxleError: the checkpoint lacks something, or is of another program.
        """
        self._wait()
        place, rest = read_path("path", path), _Rest()
        if self.is_sharded:
            return self._load_parts(place)
        shown, is_strict = self._module.state_dict(), bool(self._module.strict_loading)
        with open_checkpoint(place) as checkpoint:
            averaged = any(_BEFORE + own_name(name) in checkpoint for name in shown)
            weights = {
                before + name: _empty(tensor, before + name, checkpoint)
                for before in (("", _BEFORE) if averaged else ("",))
                for name, tensor in ((own_name(name), tensor) for name, tensor in shown.items())
                if isinstance(tensor, torch.Tensor) and (is_strict or before + name in checkpoint)
            }
            load(weights, place, extra={_REST: rest}, strict=is_strict)
            extra = _extra_states(place)
            found = {_WEIGHTS: _named(shown, {**extra, **weights}, ""), **rest.held}
            if averaged:
                found[_TRAINED] = _named(shown, weights, _BEFORE)
            for state in found.get(_OPTIMIZERS, ()):
                for name, values in zip(state.pop("names"), state[_STATE].values(), strict=True):
                    for key in (key for key, value in values.items() if value is None):
                        entry = f"optim/{name}/{key}"
                        values[key] = as_tensor(entry, checkpoint[entry].read())
        return found

    def _load_parts(self, place: str) -> dict[str, Any]:
        """Load each rank's parts of weights and optimizers into place, and return the rest."""
        rest, trainer = _Rest(), self._trainer
        optimizers = list(trainer.optimizers) if trainer.state.fn == _FITTING else []
        load(
            self._module,
            place,
            optimizer=optimizers or None,
            extra={_REST: rest},
            strict=bool(self._module.strict_loading),
        )
        rest.held.pop(_OPTIMIZERS, None)
        return rest.held

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint that a newer one replaces, once that is complete.

        Raises:
            TransaxleError: what the newer one failed with; EXISTS where anything in the folder is not of a checkpoint
                that Transaxle wrote. Nothing is deleted then.
        """
        self._wait()
        remove(on_this_machine(read_path("path", path)))

    def teardown(self) -> None:
        """Wait for the last save.

        Raises:
            TransaxleError: what it failed with.
        """
        self._wait()

    @property
    def _trainer(self) -> Any:
        try:
            return self._module.trainer
        except RuntimeError as error:
            message = "the module that LightningCheckpoints was given has no trainer"
            raise refuse("UNSUPPORTED", message, hint="Give it the module that `fit` gets.") from error

    def _wait(self) -> None:
        if self._job is not None:
            self._job.result()

    def _own_group(self) -> dist.ProcessGroup | None:
        """Return a group of this rank, the only one that Lightning lets save; None without a process group."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._alone


def _unlike(given: Mapping[str, Any], shown: Mapping[str, Any]) -> str | None:
    """Return the name of a tensor that has other values than the module's; empty for other names; None for none."""
    if given.keys() != shown.keys():
        return ""
    tensors = ((name, tensor) for name, tensor in shown.items() if isinstance(tensor, torch.Tensor))
    return next((name for name, tensor in tensors if not _same(given[name], tensor)), None)


def _are_tensors(state: Mapping[str, Any]) -> bool:
    return all(isinstance(each, torch.Tensor) for each in state.values())


def _empty(tensor: torch.Tensor, name: str, checkpoint: Checkpoint) -> torch.Tensor:
    """Return memory for a tensor of a module, of the type that is stored: Lightning may cast the module later."""
    dtype = torch_dtype(checkpoint[name].dtype) if name in checkpoint else tensor.dtype
    return torch.empty_like(tensor, dtype=dtype, device="cpu")


def _extra_states(place: str) -> dict[str, Any]:
    """Return what modules keep beside tensors (`get_extra_state`), by name."""
    states = Extras(stored_bytes(place, FILE), World()).states
    return {name.removeprefix(f"{MODEL}/"): state for name, state in states.items() if name.startswith(f"{MODEL}/")}


def _named(shown: Mapping[str, Any], weights: Mapping[str, Any], before: str) -> dict[str, Any]:
    """Return weights under the names of the module's state dict, in its order."""
    found = {name: before + own_name(name) for name in shown}
    return {name: weights[own] for name, own in found.items() if own in weights}


def _same(given: Any, own: torch.Tensor) -> bool:
    """Tell whether a value is a tensor of a module, or a copy of it."""
    if not isinstance(given, torch.Tensor) or (given.shape, given.dtype) != (own.shape, own.dtype):
        return False
    mine, other = local_of(own.detach()), local_of(given.detach())
    return other.data_ptr() == mine.data_ptr() or same_bytes(other.to(mine.device), mine)


class _Rest:
    """Takes what a checkpoint has beside tensors."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.held = state


def _outline(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state dict without its tensors, which are saved under the names of the parameters.

    Args:
        state: the state dict.
        names: of all parameters, in the order of the groups.
    """
    numbers = [number for group in state[_GROUPS] for number in group["params"]]
    named = dict(zip(numbers, names, strict=True))
    stepped = {
        number: {key: None if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for number, values in state[_STATE].items()
    }
    return {_STATE: stepped, _GROUPS: state[_GROUPS], "names": [named[number] for number in stepped]}
