"""What others call: transformers' Trainer and accelerate, with their own copies of the weights spoilt or left out."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from torch.nn.functional import dropout

import transaxle as tx
from tests.cli.running import flip
from tests.formats.s3_server import Bucket, reach_s3
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.sweeps.test_sweep_optimizers import imported
from tests.live.topologies import FSDP, LLAMA, MOE, build, full
from tests.live.training.test_training_state import Loader
from tests.oracles import hub
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.live.integrations.step_checkpoints import FOLDER, StepCheckpoints, is_complete, remove

pytestmark = pytest.mark.peers
TOKENS = [{"input_ids": [(7 * n + 3 * i) % 96 for i in range(8)], "labels": list(range(n, n + 8))} for n in range(16)]
LOSS, STEP = "loss", "step"
DDP = "ddp"


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


def _best(rank: int, world: int, folder: str) -> None:
    """Keep one checkpoint, the best: when the run ends, the Trainer deletes the last one, which we write."""
    with quiet():
        told: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}
        told |= {"load_best_model_at_end": True, "save_total_limit": 1, "greater_is_better": False}
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], 4, **told)
        trainer.compute_metrics = lambda _: {"score": trainer.state.global_step}
        trainer.train()
    assert [path.name for path in Path(folder).iterdir()] == ["checkpoint-2"]


def test_a_trainer_that_keeps_only_the_best_checkpoint_waits_for_the_last_save(tmp_path: Path) -> None:
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
        own = out / "checkpoint-2" / "model.safetensors"  # the Trainer's copies of weights and moments are of no use
        save_file({name: t * 0 for name, t in load_file(own).items()}, own, {"format": "pt"})
        (out / "checkpoint-2" / "optimizer.pt").unlink()
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


def test_a_model_whose_values_deepspeed_keeps_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Nor one that could only be saved; the mark is that of ZeRO-1 and 2."""
    run(1, _kept, str(tmp_path))


def _kept(rank: int, world: int, folder: str) -> None:
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    _launched(rank, world)
    with quiet():
        trainer = _trainer(Path(folder), [tx.TrainerCheckpoints()], 2)
        adapted = get_peft_model(hub.model(MOE, torch.float32), LoraConfig(target_modules=["q_proj"]))
        unsavable = _trainer(Path(folder), [tx.TrainerCheckpoints()], 2)
        unsavable.model = unsavable.model_wrapped = adapted
        with pytest.raises(TransaxleError, match="adapters"):
            unsavable.train()
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


def _prepared(rank: int, world: int, seed: int) -> tuple[Any, Any, Any]:
    """An accelerator with a sharded Llama and its optimizer; call it where the environment is put back."""
    from accelerate import Accelerator

    torch.manual_seed(seed)
    _launched(rank, world)
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, world)
    model = build(LLAMA, FSDP, meta=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator._models.append(model)  # as `prepare` does; it would wrap a sharded model in DDP
    return accelerator, model, optimizer


def _held(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {name: (full(p), full(optimizer.state[p]["exp_avg"])) for name, p in names.items()}


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


def test_accelerates_hooks_of_several_models_use_separate_folders(tmp_path: Path) -> None:
    run(2, _several, str(tmp_path))
    assert {path.name for path in tmp_path.glob("transaxle*")} == {"transaxle", "transaxle_1"}
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors", "model_1.safetensors"}


# Trainer and accelerate save under a URL: in the background, rotated, and resumed where nothing else is left.

STEPS, KEPT = 10, 3
BEST = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}


def _steps(bucket: Bucket) -> list[str]:
    """Names of the complete checkpoints of a bucket; nothing else may lie there."""
    folders = {name.split("/")[1] for name in bucket.names()}
    assert folders == {name.split("/")[1] for name in bucket.names() if name.endswith(f"/{MANIFEST}")}
    return sorted(folders, key=lambda name: int(name.rpartition("-")[2]))


def _train(rank: int, world: int, server: str, folder: str, url: str, limit: int, again: bool) -> Any:
    """Train under DDP, four examples a step over all ranks; `again`: from what is fetched."""
    reach_s3(server)
    with quiet():
        _launched(rank, world)
        callback = tx.TrainerCheckpoints(url=url, keep=KEPT)
        trainer = _trainer(Path(folder), [callback], STEPS, 4 // world, save_total_limit=limit, **BEST)
        trainer.compute_metrics = lambda _: {"score": -trainer.state.global_step}  # the first is the best
        fetched = callback.fetch(folder) if again and rank == 0 else None
        if world > 1:
            torch.distributed.barrier()
        trainer.train(resume_from_checkpoint=again or None)
    weights = {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}
    return _losses(trainer), weights, fetched, trainer.state.best_global_step


@pytest.mark.oracle
def test_a_trainer_resumes_from_a_url_alone(tmp_path: Path, bucket: Bucket, s3_server: str) -> None:
    url = f"{bucket.url}/run"
    (losses, weights, _, best), _ = run(2, _train, s3_server, str(tmp_path / "first"), url, 1, False)
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert best == 2
    assert _steps(bucket) == ["checkpoint-2", "checkpoint-6", "checkpoint-8", "checkpoint-10"]
    assert bucket.uploads() == []
    stored = load_bytes(bucket.get("run/checkpoint-10/model.safetensors"))
    assert sum(torch.equal(stored[name], tensor) for name, tensor in weights.items() if name in stored) > 4
    for name in _steps(bucket):
        assert tx.verify(f"{url}/{name}").ok
    for name in ("checkpoint-8", "checkpoint-10"):
        remove(f"{url}/{name}")
    for world in (2, 1):
        for name in _steps(bucket):  # a run that went on leaves later ones
            if name not in ("checkpoint-2", "checkpoint-6"):
                remove(f"{url}/{name}")
        out = tmp_path / f"on-{world}"
        (found, after, fetched, best), *_ = run(world, _train, s3_server, str(out), url, 1, True)
        assert fetched == str(out / "checkpoint-6")
        assert best == 2
        wanted = {step: losses[step] if world == 2 else pytest.approx(losses[step], rel=1e-5) for step in range(7, 11)}
        assert {step: found[step] for step in range(7, 11)} == wanted
        assert world == 1 or all(torch.equal(after[name], tensor) for name, tensor in weights.items())
        assert _steps(bucket) == ["checkpoint-2", "checkpoint-6", "checkpoint-8", "checkpoint-10"]


def _noisy(rank: int, world: int, folder: str, steps: int, batch: int, again: bool) -> Any:
    """Train with dropout and a scaler of gradients; `again`: from what is fetched."""
    _launched(rank, world)
    url, out = Path(folder, "url"), Path(folder, f"again-{again}-{rank}")
    callback = tx.TrainerCheckpoints(url=url)
    with quiet():
        trainer = _trainer(out, [callback], steps, batch)
        trainer.model.get_input_embeddings().register_forward_hook(lambda _, __, found: dropout(found, 0.3))
        trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        trainer.train(resume_from_checkpoint=callback.fetch(out) if again else None)
    weights = {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}
    return _losses(trainer), weights, scaler.state_dict()


@pytest.mark.oracle
@pytest.mark.parametrize("batch", [2, 4])
def test_random_states_and_the_scaler_resume_from_a_url_alone(tmp_path: Path, batch: int) -> None:
    """Steps 2 and 4 of four an epoch (two ranks, two examples each), or of two: within an epoch, and between two."""
    whole = run(2, _noisy, str(tmp_path), 4, batch, False)
    shutil.rmtree(tmp_path / "url" / "checkpoint-4")
    for (losses, weights, scaler), wanted in zip(run(2, _noisy, str(tmp_path), 4, batch, True), whole, strict=True):
        assert losses == wanted[0]
        assert all(torch.equal(tensor, wanted[1][name]) for name, tensor in weights.items())
        assert scaler == wanted[2]
    assert whole[0][2]["scale"] == 4.0 * 2**4


def _fetched(rank: int, world: int, folder: str) -> None:
    """Whatever `fetch` finds, and what is lost if the copy of the weights alone is taken."""
    url, out = Path(folder, "url"), Path(folder, "out")
    with quiet():
        assert tx.TrainerCheckpoints(url=url).fetch(out) is None
        with pytest.raises(tx.TransaxleError, match="there is no url to fetch from"):
            tx.TrainerCheckpoints().fetch(out)
        callback = tx.TrainerCheckpoints(url=url, to="hf")
        trainer = _trainer(Path(folder, "first"), [callback], 4)
        trainer.train()
        losses = _losses(trainer)
        shutil.rmtree(url / "checkpoint-4")
        flip(url / "checkpoint-2" / "model.safetensors", -1)
        with refused("CORRUPT", "model.safetensors"):
            callback.fetch(out)
        assert list(out.iterdir()) == []
        flip(url / "checkpoint-2" / "model.safetensors", -1)
        fetched = callback.fetch(out)
        assert fetched == str(out / "checkpoint-2")
        assert callback.fetch(out) == fetched
        assert sorted(path.name for path in out.iterdir()) == ["checkpoint-2"]
        again = _trainer(out, [tx.TrainerCheckpoints(resume=url / "checkpoint-2")], 4)
        again.train(resume_from_checkpoint=fetched)
        assert {step: _losses(again)[step] for step in (3, 4)} == {step: losses[step] for step in (3, 4)}
        moments = _trainer(out, [], 4)
        moments.train(resume_from_checkpoint=fetched)
        assert _losses(moments)[4] != losses[4]
        other = tx.TrainerCheckpoints(url=Path(folder, "dcp"), to="dcp")
        _trainer(Path(folder, "second"), [other], 2).train()
        with pytest.raises(tx.TransaxleError, match="a Trainer reads safetensors files"):
            other.fetch(Path(folder, "third"))
        assert list(Path(folder, "third").iterdir()) == []


def test_fetch_returns_a_complete_folder_or_none(tmp_path: Path) -> None:
    run(1, _fetched, str(tmp_path))


@pytest.mark.parametrize("background", [True, False])
def test_nothing_is_deleted_before_a_newer_one_is_complete(tmp_path: Path, background: bool) -> None:
    """Neither an old one, nor what was the best until now, nor steps after the one that a run went back to."""
    url, model = tmp_path / "run", torch.nn.Linear(3, 2)
    steps = StepCheckpoints(str(url), 2, None, background=background)

    def names() -> set[int]:
        return set(steps.steps("step-"))

    def save(number: int, best: str | None = None) -> None:
        steps.save(model, f"step-{number}", best, to="safetensors:identity")
        steps.wait()

    url.mkdir()
    tx.save(model, url / "pretrained-0", to="safetensors:identity")  # a checkpoint, and no step of this run
    for number in range(1, 5):
        save(number, "step-1")
    assert names() == {1, 3, 4}
    assert tx.verify(url / "pretrained-0").ok
    (url / "step-5").mkdir()
    (url / "step-5" / "notes.txt").write_text("mine")
    with pytest.raises(tx.TransaxleError, match=r"EXISTS"):
        save(5, "step-5")
    assert names() == {1, 3, 4}, "what failed replaces nothing"
    save(2, "step-1")
    assert names() == {1, 2, 3, 4}, "later steps stay"
    (url / "step-1" / "notes.txt").write_text("mine")
    steps.best = None
    with pytest.warns(UserWarning, match=r"notes\.txt belongs to no checkpoint"):
        save(6)
    assert names() == {1, 2, 3, 4, 6}
    shutil.rmtree(url / "step-1")
    save(7)
    assert names() == {6, 7}
    assert all(tx.verify(url / f"step-{number}").ok for number in names())


def _others(rank: int, world: int, folder: str) -> None:
    """Two runs that log nothing, and so have the same history; under the url is the other one's second step."""
    out, url = Path(folder, "mine"), Path(folder, "url")
    with quiet():
        first = _trainer(out, [tx.TrainerCheckpoints(url=url)], 2, logging_strategy="no")
        first.train()
        mine = _trainer(out, [], 2, logging_strategy="no")
        again = _trainer(out, [tx.TrainerCheckpoints(url=url)], 2, logging_strategy="no")
        for trainer in (mine, again):
            trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        other = _trainer(Path(folder, "other"), [tx.TrainerCheckpoints(url=url)], 2, batch=1, logging_strategy="no")
        other.train()
        lost = _trainer(out, [tx.TrainerCheckpoints(url=url)], 2, logging_strategy="no")
        with pytest.warns(UserWarning, match="no checkpoint of this callback for step 2"):
            lost.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    # The rate is zero at the end, so the step that a Trainer makes where none is left changes nothing.
    for found, wanted in ((again, first), (lost, mine)):
        pairs = zip(found.model.state_dict().values(), wanted.model.state_dict().values(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


def test_a_checkpoint_of_another_run_with_equal_history_is_not_used(tmp_path: Path) -> None:
    run(1, _others, str(tmp_path))


def _save_states(rank: int, world: int, server: str, folder: str, url: str) -> list[dict[str, Any]]:
    """Save five states of a sharded model in the background, of which the first is the best; return what each held."""
    reach_s3(server)
    held = []
    with quiet():
        accelerator, model, optimizer = _prepared(rank, world, 5)
        hooks = tx.AccelerateHooks(model, optimizer, url=url, keep=2, background=True)
        hooks.register(accelerator)
        tokens = torch.arange(24).reshape(2, 12)
        for number in range(5):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            accelerator.save_state(f"{folder}/checkpoint-{number}")
            if number == 0:
                hooks.keep_best(f"{folder}/checkpoint-{number}")
            held.append(_held(model, optimizer))
        hooks.wait()
    return held


def _load_state_from_url(rank: int, world: int, server: str, folder: str, url: str, own: bool) -> dict[str, Any]:
    """Load a state by accelerate, or, where its own files are gone, by ours."""
    reach_s3(server)
    with quiet():
        accelerator, model, optimizer = _prepared(rank, world, 6)
        if own:
            tx.AccelerateHooks(model, optimizer, url=url).register(accelerator)
            accelerator.load_state(folder)
        else:
            tx.load(model, f"{url}/{Path(folder).name}", optimizer=optimizer)
    return _held(model, optimizer)


@pytest.mark.oracle
def test_accelerate_saves_under_a_url_and_loads_at_another_world(
    tmp_path: Path, bucket: Bucket, s3_server: str
) -> None:
    url = f"{bucket.url}/run"
    held, *_ = run(2, _save_states, s3_server, str(tmp_path), url)
    assert _steps(bucket) == ["checkpoint-0", "checkpoint-3", "checkpoint-4"]
    assert not list(tmp_path.rglob("model*"))
    for world, number, own in ((1, 4, True), (2, 0, False)):
        assert is_complete(f"{url}/checkpoint-{number}")
        found, *_ = run(world, _load_state_from_url, s3_server, str(tmp_path / f"checkpoint-{number}"), url, own)
        for name, (weight, moment) in held[number].items():
            assert torch.equal(found[name][0], weight), name
            assert torch.equal(found[name][1], moment), name


def test_the_best_state_stays_when_a_run_resumes(tmp_path: Path) -> None:
    """Each checkpoint says which one is the best, so hooks that are made anew keep it, too."""
    model, extra = torch.nn.Linear(2, 2), {"epoch": 3}

    def hooks() -> tx.AccelerateHooks:
        url, to = tmp_path / "run", "safetensors:identity"
        return tx.AccelerateHooks(model, to=to, extra=extra, url=url, keep=1, background=True)

    first = hooks()
    for number in range(3):
        first.save([model], [], f"out/checkpoint_{number}")
        first.wait()
        if number == 0:
            first.keep_best("out/checkpoint_0")
    resumed = hooks()
    resumed.load([model], "out/checkpoint_2")
    resumed.save([model], [], "out/checkpoint_3")
    resumed.wait()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_0", "checkpoint_3"]
    again = hooks()
    again.load([model], "out/checkpoint_3")
    again.keep_best("out/checkpoint_3")
    again.load([model], "out/checkpoint_3")  # what is said since the start of this run counts
    again.save([model], [], "out/checkpoint_4")
    again.wait()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint_3", "checkpoint_4"]


def test_impossible_arguments_are_refused_when_callbacks_are_created() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(tx.TransaxleError, match="keep counts the checkpoints under url"):
        tx.TrainerCheckpoints(keep=3)
    with pytest.raises(tx.TransaxleError, match="no background there"):
        tx.AccelerateHooks(model, background=True)
    with pytest.raises(tx.TransaxleError, match="accelerate deletes its checkpoints itself"):
        tx.AccelerateHooks(model).keep_best("out/checkpoint_1")
    with pytest.raises(ValueError, match="keep must be positive"):
        tx.AccelerateHooks(model, url="s3://bucket/run", keep=0)
    with pytest.raises(TypeError, match="url must be a path"):
        tx.TrainerCheckpoints(url=3)  # type: ignore[arg-type]  # what is tried


def test_accelerates_hooks_restore_what_they_save(tmp_path: Path) -> None:
    model, place = torch.nn.Linear(3, 2), Loader({"row": 5})
    hooks = tx.AccelerateHooks(model, to="safetensors", extra={"place": place, "name": "first run"})
    (tmp_path / "checkpoint_1").mkdir()
    hooks.save([model], [], str(tmp_path / "checkpoint_1"))
    place.state = {"row": 9}
    hooks.load([model], str(tmp_path / "checkpoint_1"))
    assert place.state == {"row": 5}


def test_a_checkpoint_of_an_earlier_save_is_not_loaded_with_later_files(tmp_path: Path) -> None:
    """A run that goes back saves a step that is there: where that fails, its url still has the earlier run's."""
    model, out = torch.nn.Linear(3, 2), tmp_path / "checkpoint_1"
    out.mkdir()
    hooks = tx.AccelerateHooks(model, to="safetensors:identity", url=tmp_path / "run")
    hooks.save([model], [], str(out))
    hooks.load([model], str(out))
    kept, os.pwrite = os.pwrite, _full_from(1)
    try:
        with pytest.raises(tx.TransaxleError, match="NO_SPACE"):
            hooks.save([model], [], str(out))
    finally:
        os.pwrite = kept
    with pytest.raises(tx.TransaxleError, match="still that of the save before"):
        hooks.load([model], str(out))
    tx.load(model, tmp_path / "run" / "checkpoint_1")
    hooks.save([model], [], str(out))
    hooks.load([model], str(out))


def test_hooks_that_would_overwrite_or_miss_models_are_refused(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    weights = [model.state_dict() for model in (first, second)]
    hooks = tx.AccelerateHooks(first, to="safetensors:identity")
    with pytest.raises(tx.TransaxleError, match="another hook has left the weights of 1"):
        hooks.save([first, second], weights[1:], str(tmp_path))
    assert not list(tmp_path.iterdir())
    accelerator = imported("accelerate", "Accelerator")(cpu=True)
    tx.AccelerateHooks(accelerator.prepare(first), url=tmp_path / "run").register(accelerator)
    with pytest.raises(tx.TransaxleError, match="save under this url"):
        tx.AccelerateHooks(accelerator.prepare(second), url=tmp_path / "run").register(accelerator)
