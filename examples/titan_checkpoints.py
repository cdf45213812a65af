"""torchtitan's checkpoint manager, through Transaxle: a class for `--checkpoint`, by torchtitan's own interface.

    from titan_checkpoints import TransaxleManager

    config.checkpoint = TransaxleManager.Config(enable=True, interval=500, keep_latest_k=3)

Every step is saved in the background, in any layout, into a folder or under a URL of its own that appears when it is
complete; another number of ranks, or another parallelism, goes on from it. `keep_latest_k` counts complete checkpoints,
and nothing is deleted before a newer one is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, OPTIMIZER, BaseCheckpointManager
from torchtitan.tools import filesystem

import transaxle as tx

MANIFEST = "transaxle.json"
STEP = re.compile(r"step-(\d+)")


class TransaxleManager(BaseCheckpointManager):
    """Saves every few steps, keeps the newest few, and resumes from the last that is complete."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, and the layout."""

        to: str = "dcp:identity"
        """`FORMAT[:DIALECT]`; of the last step with `last_save_in_hf`: `hf`."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None  # a job of ours is no future: `_job` has it
        if not self.enable:
            return
        if len(model_parts) != 1:
            raise ValueError("this manager saves one part of the model on each rank, not several pipeline stages")
        if config.export_dtype != "float32":
            raise ValueError("parameters are saved in their own type: leave export_dtype at float32")
        self._config, self._folder = config, filesystem.join(base_folder, config.folder)
        (self._model,), self._optimizers = model_parts, optimizers
        all_states = {**states, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers}
        self._extra = {name: each for name, each in all_states.items() if each is not None}
        self._assets = getattr(sd_adapter, "hf_assets_path", None)  # all that tables of ours leave of it
        self._files = fsspec.url_to_fs(self._folder)[0]
        if not filesystem.is_remote(self._folder):
            Path(self._folder).mkdir(parents=True, exist_ok=True)
        self._job: tx.SaveJob | None = None
        self._saved = -1

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self._config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or first or curr_step % config.interval == 0):
            return False
        self._finish()
        only_model = last_step and config.last_save_model_only
        training = {} if only_model else {"optimizer": self._optimizers, "extra": self._extra}
        to = "hf" if last_step and config.last_save_in_hf else config.to
        self._saved = curr_step
        self._job = tx.async_save(self._model, self._step(curr_step), to=to, overwrite=True, **training)
        if last_step:
            self._finish()
        return True

    def _load(self, step: int = -1) -> bool:
        config, steps = self._config, self._steps()
        dist.barrier()  # nobody saves before all have looked
        wanted_step = step if step != -1 else (steps[-1] if steps else -1)
        unknown = set(config.exclude_from_loading) - {OPTIMIZER, *self._extra}
        if unknown:
            raise ValueError(f"exclude_from_loading: no such states: {', '.join(sorted(unknown))}")
        initial = config.initial_load_path or (self._assets if config.initial_load_in_hf else None)
        if wanted_step != -1:
            place, only_model, casts = self._step(wanted_step), wanted_step == 0, {}
        elif initial:
            place, only_model, casts = initial, config.initial_load_model_only, {"dtype": "fp32"}
            if config.initial_load_in_hf_quantized:
                casts["decode"] = "fp32"
        elif config.initial_load_in_hf:
            raise ValueError("initial_load_in_hf needs initial_load_path, or a model with hf_assets_path")
        else:
            return False
        training = {} if only_model else {OPTIMIZER: self._optimizers, **self._extra}
        extra = {name: each for name, each in training.items() if name not in config.exclude_from_loading}
        tx.load(self._model, place, optimizer=extra.pop(OPTIMIZER, None), extra=extra, **casts)
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: the snapshot is complete when `async_save` returns."""

    def _wait_for_saving(self) -> None:
        self._finish()

    def _close(self) -> None:
        if getattr(self, "_job", None) is not None:
            self._finish()

    def _finish(self) -> None:
        """Wait for the last save, and delete what is older than the newest few complete ones.

        Later steps are those of a run that this one went back before; they stay and do not count.
        """
        if self._job is None:
            return
        job, self._job = self._job, None
        job.result()
        keep = self._config.keep_latest_k
        if keep and dist.get_rank() == 0:
            for step in [step for step in self._steps() if step <= self._saved][:-keep]:
                self._files.rm(f"{self._step(step)}/{MANIFEST}")  # nobody takes what is half gone for complete
                self._files.rm(self._step(step), recursive=True)

    def _step(self, step: int) -> str:
        return str(filesystem.join(self._folder, f"step-{step}"))

    def _steps(self) -> list[int]:
        """Return the steps whose checkpoint is complete: the manifest comes last."""
        self._files.invalidate_cache()
        if not self._files.isdir(self._folder):
            return []
        names = (str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._folder, detail=False))
        steps = [int(match[1]) for name in names if (match := STEP.fullmatch(name))]
        return sorted(step for step in steps if self._files.exists(f"{self._step(step)}/{MANIFEST}"))
