"""The weight transfer engine that vLLM's workers use if `weight_transfer_config` names the backend `transaxle`.

The engine has the methods of vLLM's `WeightTransferEngine` (0.32), but does not inherit from this class. The engine's
method `update_weights` receives values in staging memory, beside the running model. When all ranks of trainer and
engines have received their values, the trainer calls `finish_weight_update`, which copies the values into the model.

If one worker fails, all workers fail, but only the last worker raises the error. The reason is that vLLM reads the
workers' answers in order, stops at the first error, and would take the unread answers for answers to the next call.

`VllmWeights` describes which region of which tensor each parameter of a worker is, and how new values enter the running
model. vLLM repacks parameters after it has loaded them: they may get a different shape, be quantized, or exist only
inside a kernel. vLLM's layer-wise reload stores the shapes before repacking, and repacks new values into the same
memory. The values of a push, which are already sharded, pass through this reload, so they are processed in the same way
as loaded values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from transaxle.arguments import Size
from transaxle.engine.plan.rank_parts import config_for_ranks
from transaxle.engine.views.encode import select_names
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.refit.hops import meet
from transaxle.refit.refitting import Refit
from transaxle.refit.vllm_worker import (
    ANOTHER_WAY,
    DIALECT,
    Ranks,
    Slot,
    WorkerParameters,
    find_moving_option,
    ranks_of,
)
from transaxle.torch_tensors import mark, part_of

_LOADER = "weight_loader"
_WHOLE = "Push all parameters of a layer, or none of them."


class Staged(dict[str, torch.Tensor]):
    """Parameter name -> staging tensor of a worker; between two updates, the staging tensors are meta tensors without
    memory.

    Args:
        config: config of vLLM's model, which is compared with the trainer's config.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = _Config(config)


class _Config:
    """A config object with the method `to_dict()`, like the `config` of a transformers model."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def to_dict(self) -> Mapping[str, Any]:
        return self._values


class VllmWeights:
    """The parameters of a worker's model, described as regions of whole tensors, with staging memory for new values.

    Args:
        model: vLLM's model on this worker.
        config: config of the model, as vLLM read it.
        ranks: the worker's parallel ranks.
        device: device of the parameters.

    Raises:
        TransaxleError: one error that lists every parameter for which it is unknown to which region of the model it
            belongs.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any], ranks: Ranks, device: torch.device) -> None:
        self._model, self._device = model, device
        worker = WorkerParameters(model, config, ranks)
        self._slots, self._twins, problems = worker.slots, worker.twins, list(worker.problems)
        self.staged = Staged(config_for_ranks(config, 1 if ranks.ep > 1 else ranks.tp))
        for name, part in worker.parts.items():
            self.staged[name] = mark(torch.empty_like(self._slots[name].form, device="meta").detach(), part)
        self._shares = dict(self.staged)
        if device.type != "cpu" and any(_prepares_experts(each.layer) for each in self._slots.values()):
            problems.append(
                Refusal("UNSUPPORTED", "vLLM prepares experts in a way that it does not repeat", Where(), ANOTHER_WAY)
            )
        if problems:
            raise gathered(problems)

    def begin(self, names: Iterable[str]) -> None:
        """Allocate staging memory for the new values of the named parameters."""
        for name in names:
            share = self._shares[name]
            memory = torch.empty(share.shape, dtype=share.dtype, device=self._device)
            self.staged[name] = mark(memory, part_of(share))

    def drop(self) -> None:
        """Free the staging memory."""
        self.staged.update(self._shares)

    def apply(self, model_config: Any) -> None:
        """Copy the staged values into the running model through vLLM's reload, and free the staging memory.

        Args:
            model_config: vLLM's `ModelConfig`.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        values = self._values()
        for layer in {id(self._slots[name].layer): self._slots[name].layer for name in values}.values():
            if _prepares_experts(layer):
                layer.quant_method.moe_kernel = None  # type: ignore[union-attr]  # vLLM's own
        with torch.no_grad(), _quiet(), _load_shards(self._slots[name] for name in values):
            initialize_layerwise_reload(self._model)
            try:
                for name, value in values.items():
                    slot = self._slots[name]
                    parameter = getattr(slot.layer, slot.name)
                    getattr(parameter, _LOADER)(parameter, value)
            except BaseException:
                for layer in self._model.modules():  # layers not reloaded yet keep their weights
                    info = get_layerwise_info(layer)
                    info.load_numel = 0
                    info.loaded_weights.clear()
                raise
            finally:
                finalize_layerwise_reload(self._model, model_config)
        self.drop()

    def _values(self) -> dict[str, torch.Tensor]:
        """Return all tensors of each layer that has a new value. Tensors without a new value are copied, because vLLM
        reloads whole layers.
        """
        values: dict[str, torch.Tensor] = {name: tensor for name, tensor in self.staged.items() if not tensor.is_meta}
        values |= {twin: values[name] for twin, name in self._twins.items() if name in values}
        touched = {id(self._slots[name].layer) for name in values}
        for name, slot in self._slots.items():
            live = slot.live
            if name not in values and id(slot.layer) in touched and live is not None and live.shape == slot.form.shape:
                values[name] = live.detach().clone()
        return values


def split_layers(names: Iterable[str], chosen_names: Collection[str]) -> None:
    """Refuse a choice of parameters that includes only some parameters of a layer, because vLLM repacks a layer as a
    whole.

    Args:
        names: names of all parameters.
        chosen_names: names of the parameters to push.

    Raises:
        Refused: with code UNSUPPORTED, if only some parameters of a layer are chosen.
    """
    touched = {name.rpartition(".")[0] for name in chosen_names}
    missing = [name for name in names if name not in chosen_names and name.rpartition(".")[0] in touched]
    if missing:
        message = "vLLM repacks a layer as a whole, and this parameter of one is not pushed"
        raise gathered(Refusal("UNSUPPORTED", message, Where(None, name), _WHOLE) for name in missing)


def _prepares_experts(layer: nn.Module) -> bool:
    """Return whether vLLM packs a layer's experts when it creates their kernel, a step that vLLM's reload omits.

    On a CPU, this engine makes vLLM create the kernel again, as in the first load; on other devices such layers are
    refused.
    """
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(layer, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return False
    usual = FusedMoEExperts.process_weights_after_loading
    return type(method.moe_kernel.fused_experts).process_weights_after_loading is not usual


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress vLLM's warnings about layers without new values, such as position tables, which need no new values."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _load_shards(slots: Iterable[Slot]) -> Iterator[None]:
    """Inside the `with` block, make parameters accept values that are already sharded, because vLLM's loaders would
    shard them.
    """
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loaders = [(each.form, getattr(each.form, _LOADER, None)) for each in slots]
    for form, _ in loaders:
        setattr(form, _LOADER, default_weight_loader)
    try:
        yield
    finally:
        for form, loader in loaders:
            if loader is None:
                delattr(form, _LOADER)
            else:
                setattr(form, _LOADER, loader)


def check_config(vllm_config: Any) -> None:
    """Refuse vLLM options that change a worker's weights in ways that a refit cannot handle, such as LoRA or
    offloading.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        Refused: with code UNSUPPORTED, if such an option is set.
    """
    adapters = getattr(vllm_config, "lora_config", None) is not None
    if feature := "adapters (enable_lora)" if adapters else find_moving_option(vllm_config):
        raise refuse("UNSUPPORTED", f"this vLLM has {feature}: its parameters are not told apart", hint=ANOTHER_WAY)


VERSION = 2
"""Version of the format of messages between trainers and engines."""
_LOG = logging.getLogger("transaxle.vllm")
_SAME = "Install the same version of transaxle in the trainer and in vLLM."


@dataclass(frozen=True)
class Meeting:
    """Message in which a trainer invites an engine to join a common process group, as plain JSON."""

    version: int
    """Version of the message format, which is the sender's `VERSION`."""
    address: str
    """`HOST:PORT` at which all ranks connect; "" means that the trainer only asks whether this engine can take
    weights.
    """
    first: int
    """Rank of this engine's first worker in the common process group."""
    size: int
    """Number of ranks in the common process group."""
    backend: str
    """Backend of the common process group, `gloo` or `nccl`."""
    timeout: float
    """Seconds that each rank waits for other ranks."""
    secret: str = field(default="", repr=False)
    """Secret that each rank must prove that it knows."""
    dtype: str | None = None
    """Option `dtype` of `Refit`; the fields after this one are options of `Refit` too."""
    family: str | None = None
    strict: bool = True
    bucket: Size = "64MB"
    adapter: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the message as a dict of plain data."""
        return asdict(self)


wire.tellable(Meeting)  # the trainer's first rank sends this invitation to its other ranks


@dataclass(frozen=True)
class Update:
    """Message in which a trainer announces a push (a transfer of weights), as plain JSON."""

    only: list[str]
    """Patterns of the parameter names to push; no pattern means all parameters."""
    skip: list[str]
    """Patterns of the parameter names that are not pushed."""
    forget: bool
    """Whether to receive nothing, and to discard the values received until now."""


class VllmEngine:
    """Receives new weights for the model of one vLLM worker.

    Args:
        config: vLLM's `WeightTransferConfig`.
        vllm_config: vLLM's `VllmConfig`.
        device: device of the parameters.
        model: this worker's model.
    """

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config
        self._weights: VllmWeights | None = None
        self._refit: Refit | None = None
        self._world: World | None = None
        self._open = False
        self._complete = False

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> Meeting:
        """Parse a trainer's invitation; `init_transfer_engine` refuses an invitation with a different version."""
        if init_dict.get("version") != VERSION:
            return Meeting(-1, "", 0, 0, "", 0)
        field_names = {each.name for each in fields(Meeting)}
        return Meeting(**{name: value for name, value in init_dict.items() if name in field_names})

    def parse_update_info(self, update_dict: Mapping[str, Any]) -> Update:
        """Parse a trainer's announcement of a push."""
        return Update(list(update_dict.get("only", ())), list(update_dict.get("skip", ())), "forget" in update_dict)

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Analyse the model's parameters; if the invitation contains an address, connect to the trainer."""

        def begin() -> None:
            if init_info.version != VERSION:
                raise refuse("UNSUPPORTED", "the trainer is of another version of transaxle", hint=_SAME)
            if self._weights is None:
                self._weights = self._analyse()
            if init_info.address:
                self._meet(init_info)

        self.shutdown()
        self._as_one(begin)

    def _analyse(self) -> VllmWeights:
        check_config(self.vllm_config)
        config = dict(self.model_config.hf_config.to_dict())
        return VllmWeights(self.model, config, ranks_of(self.vllm_config.parallel_config), self.device)

    def _meet(self, meeting: Meeting) -> None:
        parallel = self.vllm_config.parallel_config
        number = meeting.first + parallel.data_parallel_index * parallel.world_size + parallel.rank
        group = meet(
            meeting.address,
            number,
            meeting.size,
            secret=meeting.secret,
            backend=meeting.backend,
            timeout=meeting.timeout,
        )
        assert self._weights is not None  # `init_transfer_engine` has set this attribute
        self._world = World(group)
        self._world.gather((number - meeting.first, self._open))
        self._refit = Refit(
            {}, self._weights.staged, group,
            in_place=True, dialect=DIALECT, family=meeting.family, dtype=meeting.dtype, strict=meeting.strict,
            bucket=meeting.bucket, adapter=meeting.adapter,  # type: ignore[arg-type]  # Refit checks it
        )  # fmt: skip

    def set_weight_update_target(self, *_: object) -> None:
        """Refuse the call: only the main model can be updated, as `supports_draft_weight_update` shows."""
        raise RuntimeError("the backend transaxle updates no draft model")

    def reset_weight_update_target(self) -> None:
        """Do nothing, because the main model is the only target."""

    def start_weight_update(self) -> None:
        """Begin an update; values that an earlier update has left are discarded."""
        self._open, self._complete = True, False
        if self._weights is not None:
            self._weights.drop()

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive the values that the trainer sends; an error is raised in the trainer instead of the worker."""
        info = self.parse_update_info(update_info)
        self._complete = not info.forget and self._as_one(lambda: self._receive(info), silent=True)

    def _receive(self, info: Update) -> None:
        weights, refit, world = self._weights, self._refit, self._world
        if weights is None or refit is None or world is None:
            raise refuse("IO", "no trainer has met this engine", hint="Make a new VllmRefit.")
        with world.together():
            chosen_names = select_names(refit.names, tuple(info.only), tuple(info.skip), "tensor")
            split_layers(refit.names, frozenset(chosen_names))
            weights.begin(name for name in chosen_names if name in weights.staged)
        refit.push(only=info.only, skip=info.skip)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Copy the received values into the running model if the update is complete; otherwise discard the values."""
        complete, self._open, self._complete = self._complete, False, False
        weights = self._weights
        if weights is None:
            return
        if complete:
            self._as_one(lambda: weights.apply(self.model_config))
        weights.drop()

    def drain_pending(self) -> None:
        """Do nothing, because no work is pending after `finish_weight_update`."""

    def shutdown(self) -> None:
        """Leave the common process group; the model keeps its weights."""
        if self._refit is not None:
            self._refit.close()
        if self._weights is not None:
            self._weights.drop()
        self._refit, self._world, self._complete = None, None, False

    def _as_one(self, action: Callable[[], None], *, silent: bool = False) -> bool:
        """Run an action on every worker; return whether the action succeeded on all workers.

        Args:
            action: function that is called on this worker.
            silent: whether errors are only logged and not raised.

        Raises:
            RuntimeError: raised on the last worker, if the action has failed on any worker.
        """
        failure = ""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - raised below, on one worker
            _LOG.warning("weights cannot be taken: %s", error)
            failure = str(error)
        failures = [each for each in self._workers().gather(failure) if each]
        parallel = self.vllm_config.parallel_config
        if failures and not silent and parallel.rank == parallel.world_size - 1:
            raise RuntimeError(failures[0])
        return not failures

    def _workers(self) -> World:
        from vllm.distributed.parallel_state import get_world_group

        return World(get_world_group().cpu_group)
