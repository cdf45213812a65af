"""What verl imports if its config names this module. It registers the checkpoint engine `transaxle`, and an FSDP engine
whose weights this checkpoint engine sends without gathering them.

    actor_rollout_ref.rollout.checkpoint_engine.backend=transaxle
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=transaxle.verl_plugin
    actor_rollout_ref.model.external_lib=transaxle.verl_plugin

verl imports `external_lib` before it makes the trainer's model, and `custom_backend_module` afterwards. With the latter
alone, the model is one of verl's own class, which gathers every tensor on every rank of the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.device import get_device_name, get_vendor
from verl.utils.fsdp_utils import fsdp_version
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from transaxle.refit.verl_engine import BACKEND, ShardedWeights, VerlEngine

CheckpointEngineRegistry.register(BACKEND)(VerlEngine)


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], get_device_name(), get_vendor())
class ShardedFSDPEngine(FSDPEngineWithLMHead):  # type: ignore[misc]  # verl has no types
    """verl's FSDP engine, which passes the shards of FSDP2 on."""

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterable[Any], dict[str, Any] | None]:
        """Return `ShardedWeights`, and no config of an adapter; what verl's engine returns for FSDP1, for models with
        an adapter, and for quantization-aware training.
        """
        gather = super().get_per_tensor_param
        if fsdp_version(self.module) != 2 or hasattr(self.module, "peft_config") or self._qat_enabled:
            pairs, adapter = gather(**options)
            return pairs, adapter
        return ShardedWeights(self.module, lambda: gather(**options)[0]), None
