"""The engine that vLLM's workers call where `weight_transfer_config` names the backend `transaxle`.

It has the methods of vLLM's `WeightTransferEngine` (0.32), which it does not inherit: nothing of it is needed. What the
trainer sends comes in beside the running model (`update_weights`); only when all ranks of all sides have everything
does the trainer say that the model is to have it (`finish_weight_update`).

An error of one worker becomes that of all, and only the last of them raises it: vLLM reads the answers of its workers
in order, stops at the first error, and takes the answers that it has not read for those of the next call.

The weights of one vLLM worker: what its parameters are parts of, and how new values get into the running model.

vLLM repacks parameters after it has loaded them: they may have another shape then, be codes of what was loaded, or
exist only inside a kernel. It knows how each was before, and can repack new values into the same memory: its layer-wise
reload. Values go through that, already cut, so that whatever vLLM makes of loaded ones it makes of these too.
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
from transaxle.axes.geometry import Intervals
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.engine.plan.rank_parts import engine_parts, for_ranks
from transaxle.engine.views.encode import chosen
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.families import builtin
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.refit.hops import meet
from transaxle.refit.refitting import Refit
from transaxle.torch_tensors import Part, mark, part_of

DIALECT = "vllm"
_LOADER = "weight_loader"
_ANOTHER = "Refit it in another way, such as vLLM's own backend `nccl`."
_WHOLE = "Push all parameters of a layer, or none of them."


@dataclass(frozen=True)
class Ranks:
    """Where a worker stands among those that share the model out."""

    tp: int
    """Tensor-parallel ranks."""
    tp_rank: int
    """This worker's number among them."""
    ep: int = 1
    """Ranks that share out the experts; 1 where each has a part of every expert."""
    ep_rank: int = 0
    """This worker's number among those."""


class Staged(dict[str, torch.Tensor]):
    """Parameters as they come in, before the running model has them; without memory between two updates.

    Args:
        config: of the model, which engines compare with the trainer's.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = _Config(config)


class _Config:
    """A config, as models carry it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def to_dict(self) -> Mapping[str, Any]:
        return self._values


@dataclass(frozen=True)
class _Held:
    """A parameter or buffer of one layer, as it was before vLLM repacked it."""

    layer: nn.Module
    """Its owner."""
    name: str
    """Its name there."""
    form: torch.Tensor
    """Shape and type; without memory, but for what vLLM never repacks."""

    @property
    def live(self) -> torch.Tensor | None:
        """What the running model has of it now."""
        found: torch.Tensor | None = getattr(self.layer, self.name, None)
        return found


class VllmWeights:
    """What a worker's model takes.

    Args:
        model: vLLM's.
        config: of the model, as vLLM read it.
        ranks: where the worker stands.
        device: where its parameters are.

    Raises:
        TransaxleError: with every parameter that is not understood.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any], ranks: Ranks, device: torch.device) -> None:
        self._model, self._device = model, device
        self._held = dict(_held(model))
        parameters = [name for name, each in self._held.items() if each.name in _names(each.layer, buffers=False)]
        read = recognise(parameters, config, builtin(), None, DIALECT)
        parts = engine_parts(read.family, DIALECT, config, self._held, tp=ranks.tp, ep=ranks.ep)
        self._twins = _twins(self._held, parts)
        parts = {name: part for name, part in parts.items() if name not in self._twins}
        unread = [n for n in parameters if n not in parts and n not in self._twins and not _is_scale(self._held[n])]
        problems = [
            Refusal("UNSUPPORTED", f"the table {read.family.name} does not say what it is", Where(None, name), _ANOTHER)
            for name in unread
        ]
        self.staged = Staged(for_ranks(config, 1 if ranks.ep > 1 else ranks.tp))
        for name, part in parts.items():
            form = self._held[name].form
            try:
                share = _share(tuple(form.shape), part, ranks)
            except ValueError as error:
                problems.append(Refusal("SHAPE_MISMATCH", str(error), Where(None, name), _ANOTHER))
                continue
            self.staged[name] = mark(torch.empty_like(form, device="meta").detach(), share)
        self._shares = dict(self.staged)
        if device.type != "cpu" and any(_prepares_experts(each.layer) for each in self._held.values()):
            problems.append(
                Refusal("UNSUPPORTED", "vLLM prepares experts in a way that it does not repeat", Where(), _ANOTHER)
            )
        if problems:
            raise gathered(problems)

    def begin(self, names: Iterable[str]) -> None:
        """Make room for the values of parameters."""
        for name in names:
            empty = self._shares[name]
            room = torch.empty(empty.shape, dtype=empty.dtype, device=self._device)
            self.staged[name] = mark(room, part_of(empty))

    def drop(self) -> None:
        """Give the room back."""
        self.staged.update(self._shares)

    def apply(self, model_config: Any) -> None:
        """Give the running model the values that have come in, and give the room back.

        Args:
            model_config: vLLM's.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        values = self._values()
        for layer in {id(self._held[name].layer): self._held[name].layer for name in values}.values():
            if _prepares_experts(layer):
                layer.quant_method.moe_kernel = None  # type: ignore[union-attr]  # vLLM's own
        with torch.no_grad(), _quiet(), _taking_parts(self._held[name] for name in values):
            initialize_layerwise_reload(self._model)
            try:
                for name, value in values.items():
                    each = self._held[name]
                    into = getattr(each.layer, each.name)
                    getattr(into, _LOADER)(into, value)
            except BaseException:
                for layer in self._model.modules():  # those that are not through keep what they have
                    info = get_layerwise_info(layer)
                    info.load_numel = 0
                    info.loaded_weights.clear()
                raise
            finally:
                finalize_layerwise_reload(self._model, model_config)
        self.drop()

    def _values(self) -> dict[str, torch.Tensor]:
        """Return what every layer gets that gets anything, buffers of its own included: it is made anew."""
        values: dict[str, torch.Tensor] = {name: tensor for name, tensor in self.staged.items() if not tensor.is_meta}
        values |= {twin: values[name] for twin, name in self._twins.items() if name in values}
        touched = {id(self._held[name].layer) for name in values}
        for name, each in self._held.items():
            live = each.live
            if name not in values and id(each.layer) in touched and live is not None and live.shape == each.form.shape:
                values[name] = live.detach().clone()
        return values


def split_layers(names: Iterable[str], wanted: Collection[str]) -> None:
    """Refuse to give a layer some of its parameters alone: vLLM repacks them together.

    Args:
        names: all parameters.
        wanted: those that are moved.

    Raises:
        Refused: UNSUPPORTED.
    """
    touched = {name.rpartition(".")[0] for name in wanted}
    left = [name for name in names if name not in wanted and name.rpartition(".")[0] in touched]
    if left:
        message = "vLLM repacks a layer as a whole, and this parameter of one is not pushed"
        raise gathered(Refusal("UNSUPPORTED", message, Where(None, name), _WHOLE) for name in left)


def _names(layer: nn.Module, *, buffers: bool) -> dict[str, torch.Tensor]:
    """Return what vLLM loads into a layer, in its form before it is repacked."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    parameters, others = get_layerwise_info(layer).restore_metadata
    live = {n: p for n, p in layer._parameters.items() if p is not None and n in SKIP_TENSORS}
    passing = layer._non_persistent_buffers_set
    kept = {n: b for n, b in others.items() if n not in passing} if buffers else {}
    return {**parameters, **live, **kept}


def _held(model: nn.Module) -> Iterator[tuple[str, _Held]]:
    for path, layer in model.named_modules():
        for name, form in _names(layer, buffers=True).items():
            yield f"{path}.{name}" if path else name, _Held(layer, name, form)


def _twins(held: Mapping[str, _Held], known: Collection[str]) -> dict[str, str]:
    """Return the names of tied parameters, of which there is one tensor: -> the first name that the table knows."""
    first: dict[int, str] = {}
    for name in known:
        if held[name].live is not None:
            first.setdefault(id(held[name].live), name)
    return {name: first[id(e.live)] for name, e in held.items() if first.get(id(e.live), name) != name}


def _is_scale(each: _Held) -> bool:
    """Tell whether a parameter belongs to the cache of keys and values, which no trainer has."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(each.layer))


def _share(shape: tuple[int, ...], part: tuple[int, tuple[Intervals, ...]] | None, ranks: Ranks) -> Part | None:
    """Return what a worker holds of a parameter; None where it holds all of it.

    Raises:
        ValueError: the worker holds something else than the table says.
    """
    if part is None:
        return None
    dim, positions = part
    own = positions[ranks.ep_rank if len(positions) == ranks.ep > 1 else ranks.tp_rank]
    count = sum(stop - start for start, stop in own)
    if shape[dim] != count:
        raise ValueError(f"vLLM has {shape[dim]} along dim {dim} on this worker, where the table gives it {count}")
    whole = max(stop for each in positions for _, stop in each)
    held = tuple(own if at == dim else ((0, size),) for at, size in enumerate(shape))
    return Part((*shape[:dim], whole, *shape[dim + 1 :]), held)


def _prepares_experts(layer: nn.Module) -> bool:
    """Tell whether vLLM packs the experts of a layer only when it makes their kernel: its reload leaves that out.

    On a CPU the kernel is made anew, as when the weights were first loaded.
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
    """Keep vLLM from warning of layers that get nothing, such as tables of positions: nothing was to get there."""
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _taking_parts(held: Iterable[_Held]) -> Iterator[None]:
    """Let parameters take values that are cut already; vLLM's own loaders cut whole ones."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    usual = [(each.form, getattr(each.form, _LOADER, None)) for each in held]
    for form, _ in usual:
        setattr(form, _LOADER, default_weight_loader)
    try:
        yield
    finally:
        for form, loader in usual:
            if loader is None:
                delattr(form, _LOADER)
            else:
                setattr(form, _LOADER, loader)


def check_config(vllm_config: Any) -> None:
    """Refuse what a worker is asked to do with its weights beside serving them.

    Args:
        vllm_config: vLLM's.

    Raises:
        Refused: UNSUPPORTED.
    """
    parallel = vllm_config.parallel_config
    offloads = getattr(getattr(vllm_config, "cache_config", None), "cpu_offload_gb", 0)
    for asked, what in (
        (getattr(vllm_config, "lora_config", None) is not None, "adapters (enable_lora)"),
        (getattr(parallel, "enable_eplb", False), "experts that move between ranks (enable_eplb)"),
        (getattr(parallel, "expert_placement_strategy", "linear") != "linear", "experts that are dealt out in turn"),
        (bool(offloads), "weights that are offloaded"),
    ):
        if asked:
            raise refuse("UNSUPPORTED", f"this vLLM has {what}: its parameters are not told apart", hint=_ANOTHER)


VERSION = 2
"""Of what trainers and engines say to each other."""
_LOG = logging.getLogger("transaxle.vllm")
_SAME = "Install the same version of transaxle in the trainer and in vLLM."


@dataclass(frozen=True)
class PieceOverlap:
    """What a trainer says when it comes; plain JSON."""

    version: int
    """See `VERSION`."""
    address: str
    """`HOST:PORT` where all ranks meet; "": only find out whether this engine can take weights."""
    first: int
    """Number of this engine's first worker in the meeting."""
    size: int
    """How many ranks meet."""
    backend: str
    """Of the process group."""
    timeout: float
    """Seconds that ranks wait for each other."""
    secret: str = field(default="", repr=False)
    """Of the meeting: all ranks prove that they know it."""
    dtype: str | None = None
    """See `Refit`, as the following."""
    family: str | None = None
    strict: bool = True
    bucket: Size = "64MB"
    adapter: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as vLLM takes it."""
        return asdict(self)


wire.tellable(PieceOverlap)  # the trainer's first rank tells the others


@dataclass(frozen=True)
class Update:
    """What a trainer says when it pushes; plain JSON."""

    only: list[str]
    """Patterns of the parameters that are moved; none: all."""
    skip: list[str]
    """Patterns of those that are not."""
    forget: bool
    """Take nothing, and forget what has come."""


class VllmEngine:
    """Takes weights into one worker's model.

    Args:
        config: vLLM's config of the transfer.
        vllm_config: its whole config.
        device: where the parameters are.
        model: this worker's.
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

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> PieceOverlap:
        """Read what a trainer says when it comes; what is wrong with it is said by `init_transfer_engine`."""
        if init_dict.get("version") != VERSION:
            return PieceOverlap(-1, "", 0, 0, "", 0)
        known = {each.name for each in fields(PieceOverlap)}
        return PieceOverlap(**{name: value for name, value in init_dict.items() if name in known})

    def parse_update_info(self, update_dict: Mapping[str, Any]) -> Update:
        """Read what a trainer says when it pushes."""
        return Update(list(update_dict.get("only", ())), list(update_dict.get("skip", ())), "forget" in update_dict)

    def init_transfer_engine(self, init_info: PieceOverlap) -> None:
        """Find out what the model takes, and meet the trainer."""

        def begin() -> None:
            if init_info.version != VERSION:
                raise refuse("UNSUPPORTED", "the trainer is of another version of transaxle", hint=_SAME)
            if self._weights is None:
                self._weights = self._understood()
            if init_info.address:
                self._meet(init_info)

        self.shutdown()
        self._as_one(begin)

    def _understood(self) -> VllmWeights:
        check_config(self.vllm_config)
        config = dict(self.model_config.hf_config.to_dict())
        return VllmWeights(self.model, config, _ranks(self.vllm_config.parallel_config), self.device)

    def _meet(self, said: PieceOverlap) -> None:
        parallel = self.vllm_config.parallel_config
        number = said.first + parallel.data_parallel_index * parallel.world_size + parallel.rank
        group = meet(said.address, number, said.size, secret=said.secret, backend=said.backend, timeout=said.timeout)
        assert self._weights is not None  # it is made before
        self._world = World(group)
        self._world.gather((number - said.first, self._open))
        self._refit = Refit(
            {}, self._weights.staged, group,
            in_place=True, dialect=DIALECT, family=said.family, dtype=said.dtype, strict=said.strict,
            bucket=said.bucket, adapter=said.adapter,  # type: ignore[arg-type]  # Refit checks it
        )  # fmt: skip

    def set_weight_update_target(self, *_: object) -> None:
        """Refuse another model: vLLM asks first, see `supports_draft_weight_update`."""
        raise RuntimeError("the backend transaxle updates no draft model")

    def reset_weight_update_target(self) -> None:
        """Do nothing: there is one model only."""

    def start_weight_update(self) -> None:
        """Forget what an earlier update has left."""
        self._open, self._complete = True, False
        if self._weights is not None:
            self._weights.drop()

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Take everything that the trainer sends; an error is raised in the trainer, where all learn of it."""
        info = self.parse_update_info(update_info)
        self._complete = not info.forget and self._as_one(lambda: self._receive(info), silent=True)

    def _receive(self, info: Update) -> None:
        weights, refit, world = self._weights, self._refit, self._world
        if weights is None or refit is None or world is None:
            raise refuse("IO", "no trainer has met this engine", hint="Make a new VllmRefit.")
        with world.together():
            wanted = chosen(refit.names, tuple(info.only), tuple(info.skip), "tensor")
            split_layers(refit.names, frozenset(wanted))
            weights.begin(name for name in wanted if name in weights.staged)
        refit.push(only=info.only, skip=info.skip)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Give the running model what has come in; nothing, if not all of it has."""
        complete, self._open, self._complete = self._complete, False, False
        weights = self._weights
        if weights is None:
            return
        if complete:
            self._as_one(lambda: weights.apply(self.model_config))
        weights.drop()

    def drain_pending(self) -> None:
        """Do nothing: what is finished is there."""

    def shutdown(self) -> None:
        """Leave the trainer; the model keeps the weights it has."""
        if self._refit is not None:
            self._refit.close()
        if self._weights is not None:
            self._weights.drop()
        self._refit, self._world, self._complete = None, None, False

    def _as_one(self, action: Callable[[], None], *, silent: bool = False) -> bool:
        """Run something on all workers; tell whether it succeeded on all of them.

        Args:
            action: what is run.
            silent: log what fails, and raise nothing.

        Raises:
            RuntimeError: on the last worker.
        """
        said = ""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - raised below, on one worker
            _LOG.warning("weights cannot be taken: %s", error)
            said = str(error)
        failures = [each for each in self._workers().gather(said) if each]
        parallel = self.vllm_config.parallel_config
        if failures and not silent and parallel.rank == parallel.world_size - 1:
            raise RuntimeError(failures[0])
        return not failures

    def _workers(self) -> World:
        from vllm.distributed.parallel_state import get_world_group

        return World(get_world_group().cpu_group)


def _ranks(parallel: Any) -> Ranks:
    """Return where this worker stands."""
    from vllm.distributed.parallel_state import get_ep_group, get_tp_group

    tp = get_tp_group()
    if not parallel.enable_expert_parallel:
        return Ranks(tp.world_size, tp.rank_in_group)
    ep = get_ep_group()
    return Ranks(tp.world_size, tp.rank_in_group, ep.world_size, ep.rank_in_group)
