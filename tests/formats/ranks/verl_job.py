"""A job of verl: ranks train a tiny model on a CPU, and verl's own checkpoint manager saves it.

`launch` starts this file once for each rank, as a script: verl's wheel has a package `tests` of its own, which would
hide ours. The folder gets `actor`, as verl's trainer names it, and `truth.pt`: the whole tensors, gathered by torch and
not read from the files, by the names that Transaxle gives them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ACTOR, TRUTH = "actor", "truth.pt"
STEPS = 2
PACKAGES = Path(os.environ.get("VERL_PACKAGES", f"{sys.prefix}/verl"))
"""The folder into which `make` installs verl without its dependencies, and the few packages that it imports."""
NEEDED = "CI" in os.environ or "NEEDS_VERL" in os.environ
"""Whether tests fail without verl, and do not skip."""


@dataclass(frozen=True)
class Job:
    """What a job trains, and how its ranks share the model."""

    kind: str
    """`fsdp1`, `fsdp2`, or `hsdp`, whose groups of two ranks are replicas of each other."""
    world: int
    model: str = "qwen2"
    tied: bool = False
    frozen: bool = False
    """Whether the embedding is frozen, and the optimizer does without it."""
    groups: int = 1
    """Number of parameter groups: with two, norms and biases have no weight decay."""
    use_orig_params: bool = False
    """The option of FSDP1."""
    lora: bool = False
    """Whether an adapter is trained, and it alone is saved."""
    based: bool = False
    """Whether the base of the adapter is saved too."""
    step: int = STEPS


def launch(job: Job, folder: Path) -> None:
    """Run all ranks of a job, and wait for them."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, json.dumps(asdict(job)), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "RENDEZVOUS": str(folder / "rendezvous")}
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(job.world)
    ]
    outputs = [rank.communicate()[0].decode(errors="replace") for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output


def config(job: Job) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        job.model,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=34,
        tie_word_embeddings=job.tied,
        architectures=[f"{job.model.title()}ForCausalLM"],
    )


def main(job: Job, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=rank, world_size=job.world)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config(job), dtype=torch.float32)
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    if job.frozen:
        model.model.embed_tokens.requires_grad_(False)
    model = shard(job, model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    plain = [parameter for name, parameter in trained if job.groups == 1 or not name.endswith(("norm.weight", "bias"))]
    small = [parameter for name, parameter in trained if job.groups == 2 and name.endswith(("norm.weight", "bias"))]
    groups = [{"params": part, "weight_decay": decay} for part, decay in ((plain, 0.1), (small, 0.0)) if part]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(job.step):
        torch.manual_seed(10 + step * job.world + rank)
        tokens = torch.randint(0, 34, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    contents = {"save_contents": ["model", "optimizer", "extra"], "save_lora_only": job.lora and not job.based}
    manager = FSDPCheckpointManager(model, optimizer, schedule, checkpoint_config=contents)
    manager.save_checkpoint(str(folder / ACTOR), global_step=job.step)
    whole = gather(job, model, optimizer)
    if rank == 0:
        torch.save(whole, folder / TRUTH)
    dist.barrier()
    dist.destroy_process_group()


def shard(job: Job, model: Any) -> Any:
    """Shard a model over the ranks as verl's workers do."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

    if job.kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, job.world // 2), mesh_dim_names=("ddp", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("fsdp",))
    if job.kind == "fsdp1":
        return FullyShardedDataParallel(
            model,
            use_orig_params=job.use_orig_params,
            auto_wrap_policy=get_fsdp_wrap_policy(model, {}, job.lora),
            device_id=torch.device("cpu"),
            device_mesh=mesh,
        )
    apply_fsdp2(model, {"mesh": mesh}, {})
    return model


def gather(job: Job, model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the whole tensors of model and optimizer, as torch itself puts them together."""
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    if job.kind == "fsdp1":
        full = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
        with Fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, *full):
            return dict(model.state_dict())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    whole = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    for parameter, states in optimizer.state.items():
        whole |= {f"optim/{names[id(parameter)]}/{key}": full_tensor(value) for key, value in states.items()}
    return whole


def full_tensor(tensor: Any) -> Any:
    """Return the whole tensor of a DTensor; other tensors are whole."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), Path(sys.argv[2]))
