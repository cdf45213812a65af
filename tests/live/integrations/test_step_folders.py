"""The step folders of transformers' Trainer, of accelerate and of NeMo Automodel, each written by the program itself.

They are opened whole and compared with what the program held when it wrote them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import transaxle as tx
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.topologies import LLAMA, full, shard
from tests.oracles import hub
from tests.oracles.quiet import quiet
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.errors import TransaxleError

pytestmark = pytest.mark.peers
Tensors = dict[str, torch.Tensor]
BIASED = {**LLAMA, "attention_bias": True}
"""Biases and norms are of one group of Trainer's, weights of the other."""
MAMBA = {
    "model_type": "mamba2", "vocab_size": 96, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "expand": 2,
    "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4, "tie_word_embeddings": True,
}  # fmt: skip
"""Its `dt_bias` has no weight decay; `A_log` and `D` of the same shape, which come next, have some."""
TOKENS = [{"input_ids": [(7 * n + 3 * i) % 96 for i in range(8)], "labels": list(range(n, n + 8))} for n in range(8)]
SHARDED = "SHARDED_STATE_DICT"
STEPS = 3


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Let this process look to accelerate like one that torchrun has started, on GPUs: on CPUs it never shards."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = "29500"  # the process group is there already: nobody listens
    plain = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **said: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **said)
        if fsdp_plugin is not None:
            AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):
                shared["distributed_type"] = DistributedType.FSDP

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "__init__", init)
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
        AcceleratorState._reset_state(reset_partial_state=True)


def held(model: torch.nn.Module, optimizer: Any) -> Tensors:
    """Weights and state, whole, under the names that they have in a checkpoint."""
    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optim/{name}/{key}": full(value) for key, value in optimizer.state[parameter].items()}
    return found


def by_trainer(
    rank: int, world: int, folder: str, config: dict[str, Any] | None, sizes: dict[str, Any] = BIASED
) -> Tensors:
    """Trainer, under FSDP2 with a config for it, or in one process."""
    from transformers import Trainer, TrainingArguments

    with quiet(), launched(rank, world):
        torch.manual_seed(1)
        args = TrainingArguments(
                output_dir=folder, max_steps=STEPS, save_steps=STEPS, per_device_train_batch_size=1, learning_rate=1e-2,
                use_cpu=True, report_to=[], disable_tqdm=True, weight_decay=0.1,
                **({} if config is None else {"fsdp": True, "fsdp_config": config}),
            )  # fmt: skip
        trainer = Trainer(model=hub.model(sizes, torch.float32), args=args, train_dataset=TOKENS)
        trainer.train()
        return held(trainer.model, trainer.optimizer)


def by_accelerate(rank: int, world: int, folder: str, sharded: bool) -> Tensors:
    """accelerate's `save_state`, under FSDP2 or in one process."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with quiet(), launched(rank, world):
        torch.manual_seed(2)
        plugin = None
        if sharded:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )  # fmt: skip
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = hub.model(BIASED, torch.float32)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        _step(model, optimizer)
        place = f"{folder}/checkpoint-{STEPS}"
        accelerator.save_state(place)
        if rank == 0:
            accelerator.unwrap_model(model).config.to_json_file(f"{place}/{CONFIG}")  # as users do
        return held(accelerator.unwrap_model(model), optimizer)


def by_automodel(rank: int, world: int, folder: str, kind: str, consolidated: str) -> Tensors:
    """Automodel's `Checkpointer`, with the safetensors that it writes by default, or DCP's own files."""
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, save_config
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig

    with quiet():
        torch.manual_seed(3)
        model = hub.model(BIASED, torch.float32)
        mesh = init_device_mesh("cpu", (world,))
        shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _step(model, optimizer)
        place = Path(folder, f"checkpoint-{STEPS}")
        config = CheckpointingConfig(
            checkpoint_dir=folder, model_save_format=kind, save_consolidated=consolidated, model_repo_id="none",
            model_cache_dir=folder,
        )  # fmt: skip
        checkpointer = Checkpointer(config, rank, 0, 0)
        checkpointer.save_model(model, str(place))
        checkpointer.save_optimizer(optimizer, model, str(place), [torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)])
        if rank == 0:
            save_config({"model": {}}, str(place))
        dist.barrier()
        return held(model, optimizer)


def _rate(step: int) -> float:
    return 1 / (1 + step)


def _step(model: torch.nn.Module, optimizer: Any) -> None:
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        tokens = torch.randint(0, 96, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


WAYS: dict[str, tuple[int, Callable[..., Tensors], tuple[Any, ...], tuple[str, ...]]] = {
    "trainer": (1, by_trainer, (None,), ("model.safetensors", "optimizer.pt")),
    "trainer-fsdp2": (2, by_trainer, ({},), ("model.safetensors", "optimizer.bin")),
    "trainer-sharded": (2, by_trainer, ({"state_dict_type": SHARDED},), ("pytorch_model_fsdp_0", "optimizer_0")),
    "accelerate": (1, by_accelerate, (False,), ("model.safetensors", "optimizer.bin")),
    "accelerate-fsdp2": (2, by_accelerate, (True,), ("pytorch_model_fsdp_0", "optimizer_0")),
    "automodel": (2, by_automodel, ("safetensors", "final"), ("model", "optim")),
    "automodel-dcp": (2, by_automodel, ("torch_save", "final"), ("model", "optim")),
}
"""Ranks, program, how it is told to save, and where it then has the weights and the optimizer's state."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensors]]:
    made: dict[str, tuple[Path, Tensors]] = {}

    def write(way: str) -> tuple[Path, Tensors]:
        if way not in made:
            folder = tmp_path_factory.mktemp(way)
            world, program, said, _ = WAYS[way]
            truth, *_ = run(world, program, str(folder), *said)
            made[way] = folder / f"checkpoint-{STEPS}", truth
        return made[way]

    return write


def compare(found: Any, truth: Tensors) -> None:
    assert sorted(found) == sorted(truth)
    for name, tensor in truth.items():
        assert torch.equal(torch.as_tensor(found[name].read().copy()), tensor), name


def config_for(step: Path, tmp_path: Path) -> Path | None:
    """The model's config where the program leaves it out: a sharded Trainer, and DCP of Automodel."""
    if (step / CONFIG).exists() or (step / "model" / ".hf_metadata").exists():
        return None
    hub.configuration(BIASED).to_json_file(tmp_path / CONFIG)
    return tmp_path / CONFIG


def ways(*left_to_oracle: str) -> list[Any]:
    """All ways, of which some are tried by `make oracle` only."""
    return [pytest.param(way, marks=pytest.mark.oracle if way in left_to_oracle else ()) for way in WAYS]


FEW = ways("trainer-fsdp2", "accelerate", "accelerate-fsdp2", "automodel-dcp")


@pytest.mark.oracle
@pytest.mark.parametrize("way", FEW)
def test_a_step_folder_opens_as_one_checkpoint(
    written: Callable[[str], tuple[Path, Tensors]], way: str, tmp_path: Path
) -> None:
    step, truth = written(way)
    with tx.open(step, optimizer=True) as whole:
        compare(whole, truth)
        groups = whole.metadata["param_groups"]
        names = [name for group in groups for name in group["params"]]
        assert sorted(names) == sorted(name for name in truth if not name.startswith("optim/"))
        if way.startswith("trainer"):
            assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
            assert all(truth[name].dim() == 2 for name in groups[0]["params"])
            assert "trainer_state.json" in whole.container.carried
    assert tx.verify(step).ok
    config = config_for(step, tmp_path)
    options: dict[str, Any] = {} if config is None else {"config": config}
    tx.convert(step, tmp_path / "hub", to="hf", optimizer=True, verify=True, sync=False, **options)
    assert tx.diff(step, tmp_path / "hub", optimizer=True).equal
    with tx.open(tmp_path / "hub") as back:
        compare(back, truth)
        assert back.config["model_type"] == "llama"
        assert CONFIG in back.container.carried


@pytest.mark.parametrize("way", FEW)
def test_a_step_folder_loads_into_a_model_and_its_optimizer(
    written: Callable[[str], tuple[Path, Tensors]], way: str
) -> None:
    step, truth = written(way)
    model = hub.model(BIASED, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    if way.startswith("trainer"):
        vectors = [p for p in model.parameters() if p.dim() == 1]
        matrices = [p for p in model.parameters() if p.dim() == 2]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    extra = {"scheduler": schedule} if way.startswith("trainer") else {}
    report = tx.load(model, step, optimizer=optimizer, extra=extra)
    assert report.missing == ()
    assert schedule.last_epoch == (STEPS if extra else 0)
    found = held(model, optimizer)
    assert sorted(found) == sorted(truth)
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())


def test_weights_or_state_of_a_step_folder_open_alone(written: Callable[[str], tuple[Path, Tensors]]) -> None:
    step, truth = written("automodel")
    weights, states = WAYS["automodel"][3]
    with tx.open(step / weights) as alone:
        compare(alone, {name: tensor for name, tensor in truth.items() if not name.startswith("optim/")})
        assert alone.config != {}
    with tx.open(step / states) as alone:
        compare(alone, {name: tensor for name, tensor in truth.items() if name.startswith("optim/")})
    with tx.open(step, optimizer=False) as bare:
        compare(bare, {name: tensor for name, tensor in truth.items() if not name.startswith("optim/")})
        assert f"{states}/" in bare.container.ignored


def test_trainers_weight_decay_rule_decides_where_shapes_are_ambiguous(tmp_path: Path) -> None:
    (truth,) = run(1, by_trainer, str(tmp_path), None, MAMBA)
    truth.pop("lm_head.weight")  # tied
    step = tmp_path / f"checkpoint-{STEPS}"
    with tx.open(step, optimizer=True) as whole:
        compare(whole, truth)
    (step / "trainer_state.json").unlink()  # then anybody may have made the groups
    with refused("UNSUPPORTED", "in several ways"):
        tx.open(step, optimizer=True)


def test_a_step_folder_with_several_models_is_refused(
    written: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> None:
    step = shutil.copytree(written("trainer-sharded")[0], tmp_path / "step")
    shutil.copytree(step / "pytorch_model_fsdp_0", step / "pytorch_model_fsdp_1")
    with refused("AMBIGUOUS", "pytorch_model_fsdp_0, pytorch_model_fsdp_1"):
        tx.open(step)


def test_optimizer_state_without_provable_names_is_refused(
    written: Callable[[str], tuple[Path, Tensors]], tmp_path: Path
) -> None:
    step = shutil.copytree(written("accelerate")[0], tmp_path / "step")
    (step / CONFIG).unlink()
    with tx.open(step) as whole:  # nobody asks for the state
        assert not any(name.startswith("optim/") for name in whole)
        assert "optimizer.bin" in whole.metadata["left_behind"]
    model = hub.model(BIASED, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for call in (
        lambda: tx.open(step, optimizer=True),
        lambda: tx.convert(step, tmp_path / "out", to="dcp", optimizer=True),
        lambda: tx.load(model, step, optimizer=optimizer),
    ):
        with refused("UNSUPPORTED", "there is no config.json"):
            call()
    assert not (tmp_path / "out").exists()
    report = tx.load(model, step, optimizer=optimizer, strict=False)
    assert (report.states, report.missing) == (0, ("optimizer",))
    other = hub.configuration({**BIASED, "intermediate_size": 64})
    with pytest.raises(TransaxleError, match="in the config's model"):
        tx.open(step, optimizer=True, config=other)
    reordered = torch.load(step / "optimizer.bin")
    reordered["param_groups"][0]["params"].reverse()
    torch.save(reordered, step / "optimizer.bin")
    with pytest.raises(TransaxleError, match="in the model's order"):
        tx.open(step, optimizer=True, config=hub.configuration(BIASED))
