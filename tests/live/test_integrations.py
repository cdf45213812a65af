"""What others call: transformers' Trainer and accelerate, with their own copies of the weights spoilt or left out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.live.ranks import run
from tests.live.test_models import LLAMA, MOE, full, sharded
from tests.oracles import hub
from tests.oracles.quiet import quiet

pytestmark = pytest.mark.peers
TOKENS = [{"input_ids": [(7 * n + 3 * i) % 96 for i in range(8)], "labels": list(range(n, n + 8))} for n in range(16)]
LOSS, STEP = "loss", "step"


def _trainer(folder: Path, callbacks: list[Any], steps: int) -> Any:
    """A Trainer in one process, on weights of seed 1."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(1)
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, logging_steps=1, per_device_train_batch_size=2,
        learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
    )  # fmt: skip
    return Trainer(model=hub.model(MOE, torch.float32), args=args, train_dataset=TOKENS, callbacks=callbacks)


def _losses(trainer: Any) -> dict[int, float]:
    return {entry[STEP]: entry[LOSS] for entry in trainer.state.log_history if LOSS in entry}


def _train(rank: int, world: int, folder: str, background: bool) -> None:
    """Train four steps, then resume at the second from what we wrote, the Trainer's own copies being useless."""
    out = Path(folder)
    with quiet():
        trainer = _trainer(out, [tx.TrainerCheckpoints(background=background)], 4)
        trainer.train()
        losses = _losses(trainer)
        assert sorted(losses) == [1, 2, 3, 4]
        weights = {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}
        checkpoint = out / "checkpoint-2"
        assert tx.verify(checkpoint / "transaxle").ok
        own = checkpoint / "model.safetensors"
        save_file({name: t * 0 for name, t in load_file(own).items()}, own, {"format": "pt"})
        (checkpoint / "optimizer.pt").unlink()
        again = _trainer(out, [tx.TrainerCheckpoints()], 4)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert {step: _losses(again)[step] for step in (3, 4)} == {step: losses[step] for step in (3, 4)}
        assert all(torch.equal(p, weights[name]) for name, p in again.model.state_dict().items())
        shutil.rmtree(checkpoint / "transaxle")
        spoilt = _trainer(out, [], 4)
        spoilt.train(resume_from_checkpoint=str(checkpoint))
        assert _losses(spoilt)[3] != losses[3]


@pytest.mark.parametrize("background", [True, False])
def test_the_trainer_resumes_from_what_its_callback_wrote(tmp_path: Path, background: bool) -> None:
    run(1, _train, str(tmp_path), background)


def test_the_trainers_checkpoint_is_a_model_for_transformers(tmp_path: Path) -> None:
    run(1, _plain, str(tmp_path))


def _plain(rank: int, world: int, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    with quiet():
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], 2)
        trainer.train()
        found = AutoModelForCausalLM.from_pretrained(Path(folder, "checkpoint-2", "transaxle"), dtype=torch.float32)
    truth = trainer.model.state_dict()
    assert found.state_dict().keys() == truth.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in found.state_dict().items())


def _prepared(rank: int, world: int, seed: int) -> tuple[Any, Any, Any]:
    """An accelerator with a sharded Llama and its optimizer; call it where the environment is put back."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    torch.manual_seed(seed)
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = "29500"  # the process group is there already: nobody listens
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, world)
    model = sharded(LLAMA, world, meta=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator._models.append(model)  # as `prepare` does; it would wrap a sharded model in DDP
    return accelerator, model, optimizer


def _save_state(rank: int, world: int, folder: str) -> dict[str, Any]:
    with quiet():
        accelerator, model, optimizer = _prepared(rank, world, 5)
        model.train()
        tokens = torch.arange(24).reshape(2, 12)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        tx.AccelerateHooks(model, optimizer).register(accelerator)
        accelerator.save_state(folder)
    assert not list(Path(folder).glob("model*"))
    names = dict(model.named_parameters())
    return {name: (full(p), full(optimizer.state[p]["exp_avg"])) for name, p in names.items()}


def _load_state(rank: int, world: int, folder: str) -> dict[str, Any]:
    with quiet():
        accelerator, model, optimizer = _prepared(rank, world, 6)
        tx.AccelerateHooks(model, optimizer).register(accelerator)
        accelerator.load_state(folder)
    names = dict(model.named_parameters())
    return {name: (full(p), full(optimizer.state[p]["exp_avg"])) for name, p in names.items()}


def test_accelerate_loads_at_another_world_what_it_saved(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    saved, *_ = run(2, _save_state, folder)
    config = json.loads(Path(folder, "transaxle", "config.json").read_text())
    assert config["model_type"] == "llama"
    for world in (1, 2):
        found, *_ = run(world, _load_state, folder)
        assert found.keys() == saved.keys()
        for name, (weight, moment) in saved.items():
            assert torch.equal(found[name][0], weight), name
            assert torch.equal(found[name][1], moment), name
