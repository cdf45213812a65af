"""The engine that vLLM's workers call where `weight_transfer_config` names the backend `transaxle`.

It has the methods of vLLM's `WeightTransferEngine` (0.32), which it does not inherit: nothing of it is needed. What the
trainer sends comes in beside the running model (`update_weights`); only when all ranks of all sides have everything
does the trainer say that the model is to have it (`finish_weight_update`).

An error of one worker becomes that of all, and only the last of them raises it: vLLM reads the answers of its workers
in order, stops at the first error, and takes the answers that it has not read for those of the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from transaxle.arguments import Size
from transaxle.engine.views.encode import chosen
from transaxle.errors import refuse
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.refit.hops import meet
from transaxle.refit.refitting import Refit
from transaxle.refit.vllm_weights import DIALECT, Ranks, VllmWeights, check_config, split_layers

VERSION = 2
"""Of what trainers and engines say to each other."""
_LOG = logging.getLogger("transaxle.vllm")
_SAME = "Install the same version of transaxle in the trainer and in vLLM."


@dataclass(frozen=True)
class Meeting:
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


wire.tellable(Meeting)  # the trainer's first rank tells the others


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

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> Meeting:
        """Read what a trainer says when it comes; what is wrong with it is said by `init_transfer_engine`."""
        if init_dict.get("version") != VERSION:
            return Meeting(-1, "", 0, 0, "", 0)
        known = {each.name for each in fields(Meeting)}
        return Meeting(**{name: value for name, value in init_dict.items() if name in known})

    def parse_update_info(self, update_dict: Mapping[str, Any]) -> Update:
        """Read what a trainer says when it pushes."""
        return Update(list(update_dict.get("only", ())), list(update_dict.get("skip", ())), "forget" in update_dict)

    def init_transfer_engine(self, init_info: Meeting) -> None:
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

    def _meet(self, said: Meeting) -> None:
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
