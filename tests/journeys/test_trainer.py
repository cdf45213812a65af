"""transformers' Trainer with its defaults: one process, and FSDP2 on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.journeys import trained_models as models
from tests.journeys.fsdp_on_cpus import check_training_state, launched, whole_training_state
from tests.journeys.record import Journey
from tests.live.ranks import run
from tests.oracles.quiet import quiet

PEER = "transformers"
pytestmark = pytest.mark.peers

FAMILIES = [
    "llama", pytest.param("qwen3_moe", marks=pytest.mark.sampled), "qwen3", "qwen2", "gpt_oss", "deepseek_v3",
    "gemma3_text", "mixtral",
]  # fmt: skip
CHECKPOINT = f"checkpoint-{models.STEPS}"


def _trainer(model: Any, folder: Path, rows: Any = None, **said: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(**models.settings(folder, use_cpu=True, **said))
    return Trainer(model=model, args=args, train_dataset=rows or models.rows())


def _new_optimizer(model: Any) -> Any:
    with quiet():
        return _trainer(model, Path("unused")).create_optimizer()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_process(journey: Journey, model_type: str, tmp_path: Path) -> None:
    hub = models.hub_folder(model_type, tmp_path / "hub")
    model = models.loaded(hub)
    journey.passed("load")
    before = models.whole(model)
    with quiet():
        trainer = _trainer(model, tmp_path / "run")
        trainer.train()
    buffers = [name for name in before if name not in dict(model.named_parameters(remove_duplicate=False))]
    assert models.unmoved(before, models.whole(model)) == buffers  # it moves none
    journey.passed("train", "save")
    checkpoint, wanted = tmp_path / "run" / CHECKPOINT, models.logits(model)

    tx.convert(checkpoint, tmp_path / "back", to="hf", sync=False)
    journey.passed("back")
    journey.equal("logits", models.logits(models.loaded(tmp_path / "back")), wanted)
    other = models.loaded(hub)
    tx.load(other, checkpoint)
    journey.passed("live load")
    journey.equal("logits", models.logits(other), wanted)

    tx.save(model, tmp_path / "live", to="hf", optimizer=trainer.optimizer, sync=False)
    journey.passed("live save")
    journey.equal("logits", models.logits(models.loaded(tmp_path / "live")), wanted)
    step = models.next_step(model, trainer.optimizer)
    formats = models.targets(model_type)
    models.goes_on(journey, tmp_path, tmp_path / "live", hub, step, _new_optimizer, formats)


_IMAGE, _PARTS = 3, 4
"""The token that stands for a part of an image, and how many parts an image has."""


def _pictures(model_type: str) -> list[dict[str, torch.Tensor]]:
    """Texts that begin with an image."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for row in models.rows(24):
        ids = torch.tensor([_IMAGE] * _PARTS + row["input_ids"][_PARTS:])
        one = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(3, 28, 28, generator=generator)}
        if model_type == "gemma3":
            one["token_type_ids"] = (ids == _IMAGE).long()
        found.append(one)
    return found


@torch.no_grad()
def _seen(model: Any, rows: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Logits of images and texts."""
    given = {key: torch.stack([row[key] for row in rows[:4]]) for key in rows[0] if key != "labels"}
    said: torch.Tensor = model.eval()(**given).logits
    return said


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gemma3", {"mm_tokens_per_image": _PARTS, "image_token_index": _IMAGE}),
        ("llava", {"image_token_index": _IMAGE}),
    ],
)
def test_images_and_texts(journey: Journey, model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Parts of the vision tower get no gradient, so the optimizer has no state of them."""
    hub = models.hub_folder(model_type, tmp_path / "hub", **changes)
    model = models.loaded(hub)
    journey.passed("load")
    before, rows = models.whole(model), _pictures(model_type)
    with quiet():
        trainer = _trainer(model, tmp_path / "run", rows, remove_unused_columns=False)
        trainer.train()
    still = models.unmoved(before, models.whole(model))
    assert still
    assert all("vision" in name for name in still)
    journey.passed("train", "save")
    wanted = _seen(model, rows)
    tx.convert(tmp_path / "run" / CHECKPOINT, tmp_path / "back", to="hf", sync=False)
    journey.passed("back")
    journey.equal("logits", _seen(models.loaded(tmp_path / "back"), rows), wanted)
    tx.save(model, tmp_path / "live", to="hf", optimizer=trainer.optimizer, sync=False)
    journey.passed("live save")
    trained = {name: trainer.optimizer.state[value] for name, value in model.named_parameters()}
    for to in ("dcp", "deepspeed-universal", "safetensors:transformers"):
        there = tmp_path / to.replace(":", "-")
        tx.convert(tmp_path / "live", there, to=to, optimizer=True, sync=False)
        other = models.loaded(hub)
        optimizer = _new_optimizer(other)
        tx.load(other, there, optimizer=optimizer)
        journey.passed("optimizer")
        journey.equal("logits", _seen(other, rows), wanted)
        for name, value in other.named_parameters():
            state = optimizer.state[value]
            assert state.keys() == trained[name].keys(), name
            assert all(
                torch.equal(torch.as_tensor(each), torch.as_tensor(trained[name][key])) for key, each in state.items()
            )


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
def test_its_optimizer_file(journey: Journey, model_type: str, tmp_path: Path) -> None:
    """Moments by the order of groups: they go with their names, or are refused; never left behind."""
    hub = models.hub_folder(model_type, tmp_path / "hub")
    model = models.loaded(hub)
    with quiet():
        trainer = _trainer(model, tmp_path / "run")
        trainer.train()
    journey.passed("save")
    tx.save(model, tmp_path / "live", to="hf", optimizer=trainer.optimizer, sync=False)
    models.carried(journey, tmp_path / "run" / CHECKPOINT, tmp_path / "live", tmp_path / "there")


def _sharded(rank: int, world: int, folder: str, saved: str) -> tuple[models.Tensors, torch.Tensor, models.Tensors]:
    """Train and save; return what moved, logits, and what one more step makes of it."""
    out = Path(folder)
    with quiet(), launched(rank, world):
        model = models.loaded(out / "hub")
        more = {} if saved == FULL else {"fsdp_config": {"state_dict_type": saved}}
        trainer = _trainer(model, out / "run", fsdp=True, **more)
        trainer.train()
        trained = trainer.model_wrapped
        assert all(isinstance(each, DTensor) for each in trained.parameters())
        values, said = models.whole(trained), models.logits(trained)
        tx.save(trained, out / "live", to="hf", optimizer=trainer.optimizer, sync=False)
        return values, said, models.next_step(trained, trainer.optimizer)


def _resumed(rank: int, world: int, folder: str, source: str) -> tuple[torch.Tensor, models.Tensors]:
    """Load into a new run under FSDP2, and make one step."""
    out = Path(folder)
    with quiet(), launched(rank, world):
        trainer = _trainer(models.loaded(out / "hub"), out / "again", fsdp=True)
        trainer.train()
        trained = trainer.model_wrapped
        tx.load(trained, source, optimizer=trainer.optimizer)
        return models.logits(trained), models.next_step(trained, trainer.optimizer)


FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
OWN_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")


@pytest.mark.parametrize("saved", [FULL, SHARDED])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_fsdp2(journey: Journey, model_type: str, saved: str, tmp_path: Path) -> None:
    hub = models.hub_folder(model_type, tmp_path / "hub")
    (values, wanted, step), _ = run(2, _sharded, str(tmp_path), saved)
    checkpoint = tmp_path / "run" / CHECKPOINT
    assert all((checkpoint / each).exists() == (saved == SHARDED) for each in OWN_FOLDERS)
    models.returns_to_the_hub(journey, tmp_path, values, wanted, checkpoint)
    config = hub / "config.json"
    with tx.open(tmp_path / "run") as outer:  # of which it is the only checkpoint
        assert (outer.path, outer.container.inside) == (str(checkpoint), CHECKPOINT)
    if saved == SHARDED:  # its weights alone are a checkpoint as well
        tx.convert(checkpoint / OWN_FOLDERS[0], tmp_path / "weights", to="hf", config=config, sync=False)
        journey.passed("back")
        journey.equal("logits", models.logits(models.loaded(tmp_path / "weights")), wanted)
    models.carried(journey, checkpoint, tmp_path / "live", tmp_path / "with-optimizer", config=config)

    for to in ("dcp", "deepspeed-universal"):
        tx.convert(tmp_path / "live", tmp_path / to, to=to, optimizer=True, sync=False)
        journey.passed("optimizer")
        found, after = run(2, _resumed, str(tmp_path), str(tmp_path / to))[0]
        assert torch.equal(found, wanted)
        assert models.unmoved(step, after) == list(step)
        journey.passed("resume")


def _saved_in_run(rank: int, world: int, folder: str, version: int) -> tuple[models.Tensors, models.Tensors]:
    """Train with sharded saves; return whole copies of the weights and of the optimizer's state."""
    out = Path(folder)
    with quiet(), launched(rank, world):
        model = models.loaded(out / "hub")
        layer = type(model.model.layers[0]).__name__
        settings = {"state_dict_type": SHARDED, "version": version, "transformer_layer_cls_to_wrap": [layer]}
        settings |= {"sync_module_states": False} if version == 1 else {}  # of which accelerate is capable on GPUs only
        trainer = _trainer(model, out / "run", fsdp=True, fsdp_config=settings)
        trainer.train()
        assert isinstance(trainer.model_wrapped, FullyShardedDataParallel) == (version == 1)
        return whole_training_state(trainer.model_wrapped, trainer.optimizer.optimizer)


@pytest.mark.parametrize("version", [1, 2], ids=["FSDP1", "FSDP2"])
def test_a_sharded_run_as_it_lies(journey: Journey, version: int, tmp_path: Path) -> None:
    """Given the folder of the run, `checkpoint-3` is opened; FSDP1 and FSDP2 save other tensors there."""
    hub = models.hub_folder("qwen3_moe", tmp_path / "hub")
    truth = run(2, _saved_in_run, str(tmp_path), version)[0]
    journey.passed("load", "train", "save")
    check_training_state(journey, tmp_path / "run", CHECKPOINT, truth, hub, tmp_path)
