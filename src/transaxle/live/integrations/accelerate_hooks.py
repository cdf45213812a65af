"""The hooks for accelerate's `save_state` and `load_state`; accelerate is not imported here.

They keep what accelerate saves besides weights, in its own folder, and write beside that; or under a URL, where they
rotate themselves.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from transaxle.arguments import Axes, Config, PathLike, Size, read_flag, read_path, suggests, wrong_type
from transaxle.errors import refuse
from transaxle.live.extra_state import Stateful
from transaxle.live.integrations.step_checkpoints import (
    FOLDER,
    TICKET,
    StepCheckpoints,
    check_loadable,
    read_place,
    text_beside,
)
from transaxle.live.load import load
from transaxle.live.save import SAVING, check_options, save
from transaxle.live.transport.world import World
from transaxle.options import SHARD_SIZE, select
from transaxle.torch_tensors import Ranks, read_group, unwrapped

_BEST = "transaxle_best"
"""Name under which a checkpoint has the name of the best one."""


class AccelerateHooks:
    """Make accelerate's `save_state` and `load_state` use Transaxle, so a model loads at any world size.

    `hooks.register(accelerator)` registers both hooks. Accelerate then omits its own copy of the weights; with its FSDP
    plugin it first writes and reads model and optimizer itself, and the values that Transaxle loads afterwards win.

    Hooks take one model each. Of several models, those registered first save into `transaxle`, the next ones into
    `transaxle_1`, and so on, as accelerate numbers its own files: register them in the same order when you load.

    With `url`, the checkpoint of `save_state("out/checkpoint_3")` is `checkpoint_3` there, and old ones are deleted
    after a newer one is complete; accelerate's own files stay in its folder. The hooks of each model need their own.

    Args:
        model: the prepared model.
        optimizer: its optimizer, to include its state in the checkpoint; accelerate always writes its own copy of a
            prepared optimizer, and loads that copy afterwards unless it is sharded.
        to: `FORMAT[:DIALECT]`, as for `save`.
        extra: other objects to save, as for `save`; those with `load_state_dict` are restored by `load_state`.
        background: with `url`, write while training goes on, as `async_save` does; call `wait` at the end.
        group: the ranks that train, and save, together; None: all.
        url: a folder or URL for the checkpoints.
        keep: how many of them stay; what `keep_best` names stays, too; None: all. Names end in the number of the step.

    The other arguments are those of `save`.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: a format, family or dialect that there is not; a config that cannot be read.
    """

    @suggests
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        to: str = "hf",
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        group: Ranks | None = None,
        url: PathLike | None = None,
        keep: int | None = None,
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
        place, kept = read_place(url, keep)
        if not isinstance(model, nn.Module):
            raise wrong_type("model", "a torch.nn.Module, as `accelerator.prepare` returns it", model)
        if extra is not None and not isinstance(extra, Mapping):
            raise wrong_type("extra", "a mapping of names to objects or plain data", extra)
        read_flag("background", background)
        if background and url is None:
            hint = "Give url=, where nothing of accelerate's is."
            raise refuse("UNSUPPORTED", "accelerate expects its folder to be complete: no background there", hint=hint)
        self._model = model
        self._optimizer = optimizer
        self._to = to
        self._extra = extra
        self._before: list[AccelerateHooks] = []
        self._handles: list[Any] = []
        self._is_prepared = False
        self._group = read_group("group", group)
        self._steps = None if place is None else StepCheckpoints(place, kept, self._group, background=background)

    def register(self, accelerator: Any) -> None:
        """Register both hooks with an `Accelerator`; those of models that its `free_memory` has dropped go.

        Raises:
            Refused: NAME_COLLISION for a `url` that other hooks of this accelerator have; UNSUPPORTED for a model into
                which `load_state` could load nothing: its values are kept by DeepSpeed, or offloaded.
        """
        check_loadable(self._model)
        registered = _REGISTERED.setdefault(accelerator, [])
        if any(each._is_prepared and not each._is_among(accelerator._models) for each in registered):
            for handle in (handle for each in registered for handle in each._handles):
                handle.remove()
            registered.clear()
        if self._steps is not None and any(self._steps.shares(each._steps) for each in registered):
            hint = "Give the hooks of each model a url of their own."
            raise refuse("NAME_COLLISION", "other hooks of this accelerator save under this url", hint=hint)
        self._before = list(registered)
        self._is_prepared = self._is_among(accelerator._models)
        registered.append(self)
        self._handles = [
            accelerator.register_save_state_pre_hook(self.save),
            accelerator.register_load_state_pre_hook(self.load),
        ]

    def save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save the model, and remove its weights from the list that accelerate will write.

        Raises:
            TransaxleError: what `save` raises; UNSUPPORTED where another hook has removed weights before.
        """
        left = [model for model in models if not any(each._is_ours(model) for each in self._before)]
        if weights and len(weights) != len(left):
            message = f"accelerate has {len(left)} models here, but another hook has left the weights of {len(weights)}"
            raise refuse("UNSUPPORTED", message, hint="Register AccelerateHooks before it.")
        told = {"to": self._to, "optimizer": self._optimizer, "extra": self._extra, **self._options}
        if self._steps is not None:
            best, ticket = World(self._group).gather((self._steps.best, uuid.uuid4().hex))[0]
            told["extra"] = {**(self._extra or {}), TICKET: ticket, **({} if best is None else {_BEST: best})}
            with suppress(FileNotFoundError):
                Path(output_dir, self._folder(TICKET)).write_text(ticket, "utf-8")
            self._steps.save(self._model, Path(output_dir).name, **told)
        else:
            save(self._model, Path(output_dir, self._folder(FOLDER)), overwrite=True, group=self._group, **told)
        if weights:
            weights[:] = [held for model, held in zip(left, weights, strict=True) if not self._is_ours(model)]

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the model, and remove it from the list that accelerate will load.

        Raises:
            TransaxleError: what `load` raises; INCOMPLETE where the checkpoint under `url` is of an earlier save.
        """
        self.wait()
        steps = self._steps
        place = str(Path(input_dir, self._folder(FOLDER)) if steps is None else steps.place(Path(input_dir).name))
        held = {name: each for name, each in (self._extra or {}).items() if isinstance(each, Stateful)}
        world, best = World(self._group), None
        if steps is not None:
            best, ticket = world.pool(lambda: (text_beside(place, _BEST), text_beside(place, TICKET)))[0]
            with world.together():
                self._check_ticket(input_dir, place, ticket)
        load(self._model, place, optimizer=self._optimizer, extra=held, group=self._group)
        if steps is not None:
            steps.best = steps.best or best
        models[:] = [model for model in models if not self._is_ours(model)]

    def _folder(self, name: str) -> str:
        """Return a name in accelerate's folder, numbered as accelerate numbers its own."""
        return f"{name}_{len(self._before)}" if self._before else name

    def _check_ticket(self, input_dir: str, place: str, ticket: str | None) -> None:
        """Refuse what lies under `url` if accelerate's folder is of a later save, which was never completed.

        Raises:
            Refused: INCOMPLETE.
        """
        try:
            wanted = Path(input_dir, self._folder(TICKET)).read_text("utf-8")
        except FileNotFoundError:
            return
        if ticket is not None and ticket != wanted:
            message = f"{input_dir} was saved again, but the checkpoint here is still that of the save before"
            hint = "Load another step: that save was not completed."
            raise refuse("INCOMPLETE", message, file=place, hint=hint)

    def keep_best(self, output_dir: PathLike | None) -> None:
        """Let a checkpoint stay however old it becomes, and no longer the one that was the best before.

        Each later checkpoint has its name, and `load_state` of one of these takes it up again.

        Args:
            output_dir: what `save_state` was given, or returned; None: none stays.

        Raises:
            TypeError: it is no path.
            Refused: UNSUPPORTED without `url`: accelerate deletes in its own folder.
        """
        if self._steps is None:
            hint = "Give AccelerateHooks(url=…, keep=…), or copy it elsewhere."
            raise refuse("UNSUPPORTED", "accelerate deletes its checkpoints itself", hint=hint)
        self._steps.best = None if output_dir is None else Path(read_path("output_dir", output_dir)).name

    def wait(self) -> None:
        """Wait for the last save in the background, and delete what it replaces.

        Raises:
            TransaxleError: what it failed with.
        """
        if self._steps is not None:
            self._steps.wait()

    def _is_ours(self, model: nn.Module) -> bool:
        """Tell whether accelerate speaks of our model; of what DDP wraps, it knows the inside."""
        return unwrapped(model) is unwrapped(self._model)

    def _is_among(self, models: list[nn.Module]) -> bool:
        return any(self._is_ours(model) for model in models)


_REGISTERED: WeakKeyDictionary[Any, list[AccelerateHooks]] = WeakKeyDictionary()
"""The hooks of each `Accelerator`, in the order in which they run."""
