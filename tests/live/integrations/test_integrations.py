"""What others call: transformers' Trainer and accelerate, with their own copies of the weights spoilt or left out."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import FSDP, LLAMA, MOE, build, full
from tests.oracles import hub
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.live.integrations.step_checkpoints import FOLDER

pytestmark = pytest.mark.peers
TOKENS = [{"input_ids": [(7 * n + 3 * i) % 96 for i in range(8)], "labels": list(range(n, n + 8))} for n in range(16)]
LOSS, STEP = "loss", "step"
DDP, PLUGIN = "ddp", "plugin"


def _trainer(folder: Path, callbacks: list[Any], steps: int, batch: int = 2, **said: Any) -> Any:
    """A Trainer on weights of seed 1; call it where the environment is put back."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(1)
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=2, logging_steps=1, per_device_train_batch_size=batch,
        learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True, seed=3, **said,
    )  # fmt: skip
    model = hub.model(MOE, torch.float32)
    return Trainer(model=model, args=args, train_dataset=TOKENS, eval_dataset=TOKENS[:4], callbacks=callbacks)


def _launched(rank: int, world: int) -> None:
    """Let this process look to accelerate like one that torchrun has started."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = "29500"  # the process group is there already: nobody listens


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
        _spoil(checkpoint)
        again = _trainer(out, [tx.TrainerCheckpoints()], 4)
        again.train(resume_from_checkpoint=str(checkpoint))
        assert {step: _losses(again)[step] for step in (3, 4)} == {step: losses[step] for step in (3, 4)}
        assert all(torch.equal(p, weights[name]) for name, p in again.model.state_dict().items())
        shutil.rmtree(checkpoint / "transaxle")
        spoilt = _trainer(out, [], 4)
        spoilt.train(resume_from_checkpoint=str(checkpoint))
        assert _losses(spoilt)[3] != losses[3]


@pytest.mark.oracle
@pytest.mark.parametrize("background", [True, False])
def test_the_trainer_resumes_from_what_its_callback_wrote(tmp_path: Path, background: bool) -> None:
    run(1, _train, str(tmp_path), background)


def _on_many(rank: int, world: int, folder: str, steps: int, resume: str | None, limit: int | None) -> Any:
    """Train under DDP, four examples a step over all ranks."""
    with quiet():
        _launched(rank, world)
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], steps, 4 // world, save_total_limit=limit)
        assert trainer.args.world_size == world
        trainer.train(resume_from_checkpoint=resume)
    return _losses(trainer), {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}


def _spoil(checkpoint: Path) -> None:
    """Make the Trainer's own copies of weights and moments useless."""
    own = checkpoint / "model.safetensors"
    save_file({name: t * 0 for name, t in load_file(own).items()}, own, {"format": "pt"})
    (checkpoint / "optimizer.pt").unlink()


def test_a_trainer_of_two_ranks_resumes_on_two_and_on_one(tmp_path: Path) -> None:
    first = tmp_path / "first"
    (losses, weights), (_, same) = run(2, _on_many, str(first), 4, None, None)
    assert all(torch.equal(same[name], tensor) for name, tensor in weights.items())
    for world in (2, 1):
        again = tmp_path / f"on-{world}"
        shutil.copytree(first / "checkpoint-2", again / "checkpoint-2")
        _spoil(again / "checkpoint-2")
        (found, after), *_ = run(world, _on_many, str(again), 4, str(again / "checkpoint-2"), None)
        want = {step: losses[step] if world == 2 else pytest.approx(losses[step], rel=1e-5) for step in (3, 4)}
        assert {step: found[step] for step in (3, 4)} == want
        if world == 2:
            assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())


def test_a_trainer_that_keeps_few_checkpoints_keeps_whole_ones(tmp_path: Path) -> None:
    """The Trainer deletes an older checkpoint before our callback writes: never one that is being written."""
    run(2, _on_many, str(tmp_path), 8, None, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
    assert tx.verify(tmp_path / "checkpoint-8" / "transaxle").ok


def _best(rank: int, world: int, folder: str) -> None:
    """Keep one checkpoint, the best: when the run ends, the Trainer deletes the last one, which we write."""
    with quiet():
        told: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}
        told |= {"load_best_model_at_end": True, "save_total_limit": 1, "greater_is_better": False}
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], 4, **told)
        trainer.compute_metrics = lambda _: {"score": trainer.state.global_step}
        trainer.train()
    assert [path.name for path in Path(folder).iterdir()] == ["checkpoint-2"]


def test_a_trainer_that_keeps_the_best_checkpoint_alone_deletes_none_that_is_being_written(tmp_path: Path) -> None:
    run(1, _best, str(tmp_path))


def _crash(rank: int, world: int, folder: str) -> None:
    """Fail while the second checkpoint is being written, and resume from the first; then from another folder."""
    out = Path(folder, "out")
    with quiet():
        trainer = _trainer(out, [tx.TrainerCheckpoints(background=False)], 4)
        kept, os.pwrite = os.pwrite, _full_from(2)
        try:
            with pytest.raises(tx.TransaxleError) as found:
                trainer.train()
        finally:
            os.pwrite = kept
        assert found.value.code == "NO_SPACE"
        assert not (out / "checkpoint-4" / FOLDER).exists()
        assert tx.verify(out / "checkpoint-2" / FOLDER).ok
        _spoil(out / "checkpoint-2")
        again = _trainer(out, [tx.TrainerCheckpoints()], 4)
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        truth = {name: p.detach().clone() for name, p in again.model.state_dict().items()}
        # A Trainer does not tell where it resumes from: another run's folder of the same step is not taken for it.
        elsewhere = Path(folder, "elsewhere")
        stale = elsewhere / "checkpoint-2"
        shutil.copytree(out / "checkpoint-4", stale)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lost = _trainer(elsewhere, [tx.TrainerCheckpoints()], 4)
            lost.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        assert any("give resume=" in str(each.message) for each in told)
        moved = _trainer(elsewhere, [tx.TrainerCheckpoints(resume=out / "checkpoint-2")], 4)
        moved.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        assert all(torch.equal(p, truth[name]) for name, p in moved.model.state_dict().items())
        assert not all(torch.equal(p, truth[name]) for name, p in lost.model.state_dict().items())


def _full_from(number: int) -> Any:
    """A disk that is full when so many files of weights have been begun."""
    write, seen = os.pwrite, set[int]()

    def pwrite(fd: int, octets: Any, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "model.safetensors":
            seen.add(os.fstat(fd).st_ino)
        if len(seen) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, octets, offset)

    return pwrite


def test_a_trainer_that_crashed_resumes_from_the_checkpoint_before(tmp_path: Path) -> None:
    run(1, _crash, str(tmp_path))


def _overwritten(rank: int, world: int, folder: str) -> None:
    """Train once more into the same folder, on a disk that is full when our part comes."""
    out = Path(folder)
    with quiet():
        _trainer(out, [tx.TrainerCheckpoints()], 2, logging_strategy="no").train()
        trainer = _trainer(out, [tx.TrainerCheckpoints(background=False)], 2, batch=1, logging_strategy="no")
        kept, os.pwrite = os.pwrite, _full_from(1)
        try:
            with pytest.raises(tx.TransaxleError, match="NO_SPACE"):
                trainer.train()
        finally:
            os.pwrite = kept
        assert (out / "checkpoint-2" / "trainer_state.json").exists()
        assert not (out / "checkpoint-2" / FOLDER).exists()


def test_a_checkpoint_of_an_earlier_run_is_not_taken_for_that_of_a_later_one(tmp_path: Path) -> None:
    run(1, _overwritten, str(tmp_path))


def test_the_trainers_checkpoint_is_a_model_for_transformers(tmp_path: Path) -> None:
    run(1, _plain, str(tmp_path))


def _plain(rank: int, world: int, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    with quiet():
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], 2)
        trainer.train()
        place = Path(folder, "checkpoint-2", "transaxle")
        found, told = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values())
    truth = trainer.model.state_dict()
    assert found.state_dict().keys() == truth.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in found.state_dict().items())


def test_what_the_first_save_would_refuse_ends_a_training_before_its_first_step(tmp_path: Path) -> None:
    run(1, _adapted, str(tmp_path))


def _adapted(rank: int, world: int, folder: str) -> None:
    from peft import LoraConfig, get_peft_model

    with quiet():
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], 2)
        adapted = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
        trainer.model = trainer.model_wrapped = adapted
        with pytest.raises(TransaxleError, match="adapters"):
            trainer.train()
    assert trainer.state.global_step == 0
    assert not any(Path(folder).glob("checkpoint-*"))


def test_a_model_whose_values_deepspeed_keeps_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """It could be saved, but nothing could be loaded into it; the mark is that of ZeRO-1 and 2."""
    run(1, _kept, str(tmp_path))


def _kept(rank: int, world: int, folder: str) -> None:
    from accelerate import Accelerator

    _launched(rank, world)
    with quiet():
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], 2)
        marked: Any = next(trainer.model.parameters())
        marked._hp_mapping = 1
        with pytest.raises(TransaxleError, match="DeepSpeed's optimizer has its own copy"):
            trainer.train()
        accelerator = Accelerator(cpu=True)
        with pytest.raises(TransaxleError, match="DeepSpeed's optimizer has its own copy"):
            tx.AccelerateHooks(trainer.model).register(accelerator)
    assert trainer.state.global_step == 0
    assert not any(Path(folder).glob("checkpoint-*"))
    assert not accelerator._save_model_state_pre_hook


def _prepared(rank: int, world: int, seed: int, kind: str) -> tuple[Any, Any, Any]:
    """An accelerator with a sharded Llama and its optimizer; call it where the environment is put back."""
    from accelerate import Accelerator

    torch.manual_seed(seed)
    _launched(rank, world)
    if kind == PLUGIN:
        return _under_fsdp2()
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, world)
    if kind == DDP:
        model = hub.model(LLAMA, torch.float32)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model = build(LLAMA, FSDP, meta=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator._models.append(model)  # as `prepare` does; it would wrap a sharded model in DDP
    return accelerator, model, optimizer


def _under_fsdp2() -> tuple[Any, Any, Any]:
    """What accelerate's own FSDP2 plugin makes; on CPUs it falls back to DDP unless its state is told otherwise."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
    model = hub.model(LLAMA, torch.float32)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _save_state(rank: int, world: int, folder: str, kind: str) -> dict[str, Any]:
    with quiet():
        accelerator, model, optimizer = _prepared(rank, world, 5, kind)
        assert kind == DDP or any(isinstance(p, DTensor) for p in model.parameters())
        model.train()
        tokens = torch.arange(24).reshape(2, 12)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        tx.AccelerateHooks(model, optimizer).register(accelerator)
        accelerator.save_state(folder)
    assert not list(Path(folder).glob("model*"))
    return _held(model, optimizer)


def _load_state(rank: int, world: int, folder: str, kind: str) -> dict[str, Any]:
    with quiet():
        accelerator, model, optimizer = _prepared(rank, world, 6, kind)
        tx.AccelerateHooks(model, optimizer).register(accelerator)
        accelerator.load_state(folder)
    return _held(model, optimizer)


def _held(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights and moments, whole, by the names of the plain model."""
    names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {name: (full(p), full(optimizer.state[p]["exp_avg"])) for name, p in names.items()}


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "worlds"), [(FSDP, (1, 2)), (DDP, (2,)), (PLUGIN, (2, 4))])
def test_accelerate_loads_at_another_world_what_it_saved(tmp_path: Path, kind: str, worlds: tuple[int, ...]) -> None:
    folder = str(tmp_path / "state")
    saved, *_ = run(2, _save_state, folder, kind)
    config = json.loads(Path(folder, FOLDER, "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["architectures"] == ["LlamaForCausalLM"]
    for world in worlds:
        found, *_ = run(world, _load_state, folder, kind)
        assert found.keys() == saved.keys()
        for name, (weight, moment) in saved.items():
            assert torch.equal(found[name][0], weight), name
            assert torch.equal(found[name][1], moment), name


def _several(rank: int, world: int, folder: str) -> None:
    """Two models with hooks between two that accelerate saves itself; all have the same shapes."""
    from accelerate import Accelerator

    with quiet():
        _launched(rank, world)
        accelerator = Accelerator(cpu=True)
        held = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            models = [accelerator.prepare(torch.nn.Linear(3, 2)) for _ in range(4)]
            for model in models[1:3]:
                tx.AccelerateHooks(model, to="safetensors:identity").register(accelerator)
            if seed == 1:
                accelerator.save_state(folder)
            else:
                accelerator.load_state(folder)
            held.append([each.detach().clone() for model in models for each in model.parameters()])
            accelerator.free_memory()
        assert all(torch.equal(one, other) for one, other in zip(*held, strict=True))
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        tx.AccelerateHooks(model, to="safetensors:identity").register(accelerator)
        accelerator.save_state(f"{folder}/next")
    assert [path.name for path in Path(folder, "next").glob("transaxle*")] == ["transaxle"]


@pytest.mark.parametrize("world", [1, 2])
def test_accelerates_hooks_of_several_models_keep_them_apart(tmp_path: Path, world: int) -> None:
    run(world, _several, str(tmp_path))
    assert {path.name for path in tmp_path.glob("transaxle*")} == {"transaxle", "transaxle_1"}
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors", "model_1.safetensors"}
