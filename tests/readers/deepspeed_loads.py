"""The program that lets DeepSpeed save models of a config, or load folders into models of other configs.

    python -m tests.readers.deepspeed_loads save FOLDER CONFIG ...
    python -m tests.readers.deepspeed_loads load RESULT (FOLDER CONFIG) ...

`save` makes FOLDER and a subfolder for each config, by its name; `load` writes for each pair DeepSpeed's error, or the
names of the parameters and buffers that then differ from those saved.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.oracles.deepspeed_peer.uncompiled import gloo_alone

_RANDOM = 7


def _engine(config: Path, *, universal: bool = False) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).float()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    if universal:
        settings["checkpoint"] = {"load_universal": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def _save(target: Path, config: Path) -> None:
    torch.manual_seed(_RANDOM)
    engine = _engine(config)
    engine.backward(engine(torch.arange(6).reshape(1, 6)).logits.square().mean())
    engine.step()
    parameters = dict(engine.module.named_parameters())
    for name, value in engine.module.state_dict().items():
        if name not in parameters and value.is_floating_point():
            value.normal_()
    torch.save(engine.module.state_dict(), target / f"{config.name}.pt")
    engine.save_checkpoint(str(target / config.name), tag="step")


def _load(folder: Path, config: Path) -> str:
    engine = _engine(config, universal=folder.name.endswith("universal"))
    try:
        engine.load_checkpoint(str(folder))
    except Exception as error:  # noqa: BLE001 - whatever DeepSpeed raises is its answer
        return f"{type(error).__name__}: {error}"
    saved = torch.load(folder.with_name(f"{folder.name.partition('-')[0]}.pt"))
    state = engine.module.state_dict()
    return " ".join(name for name in saved if not torch.equal(saved[name], state.get(name, torch.empty(0))))


def main(mode: str, target: Path, paths: list[Path]) -> None:
    """Save or load."""
    gloo_alone()
    torch.distributed.init_process_group("gloo", init_method=f"file://{target}.store", rank=0, world_size=1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    if mode == "save":
        target.mkdir()
        for config in paths:
            _save(target, config)
    else:
        target.write_text(json.dumps([_load(*pair) for pair in zip(paths[::2], paths[1::2], strict=True)]), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(path) for path in sys.argv[3:]])
