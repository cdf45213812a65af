"""What the processes of one launch do: train cases and save them, or resume checkpoints, and tell the truth about both.

The truth is gathered from the live optimizer by collectives, into a folder that is not the checkpoint's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.utils import groups as parallel
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.oracles.deepspeed_peer import models, pipeline
from tests.oracles.deepspeed_peer.case import (
    BATCH,
    BETAS,
    BY_NAME,
    DECAY,
    FP32,
    LENGTH,
    LOW,
    LR,
    NO_DECAY,
    SAVED,
    STATES,
    STEPS,
    TAG,
    TRUTH,
    Case,
    Launch,
)  # fmt: skip
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone
from transaxle.parallel.tensor_parallel import tensor_parallel

FULL = deepspeed.utils.safe_set_full_fp32_param, deepspeed.utils.safe_set_full_optimizer_state
LOCAL = deepspeed.utils.safe_set_local_fp32_param, deepspeed.utils.safe_set_local_optimizer_state
Tensors = dict[str, Tensor]
Truth = dict[str, Tensors]


def configuration(case: Case, *, universal: bool = False) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.zero, "overlap_comm": False, "parameter_alignment": case.aligned}
    zero |= {"elastic_checkpoint": True} if case.elastic else {}
    zero |= {"round_robin_gradients": True} if case.dealt else {}
    if case.zero == 3:
        zero |= {"stage3_param_persistence_threshold": 10}
    if case.sub_group:
        zero |= {"sub_group_size": case.sub_group}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 2 if case.launch.pp > 1 else 1,
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "zero_optimization": zero,
    }  # fmt: skip
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.data_first:
        config["use_data_before_expert_parallelism"] = True
    if case.accumulate:
        config["data_types"] = {"grad_accum_dtype": case.accumulate}
    if case.launch.tp > 1 and case.launch.pp == 1:
        config["tensor_parallel"] = {"autotp_size": case.launch.tp}
        if case.model == "fused":
            config["tensor_parallel"] |= models.declared(case)
    if universal:
        config["checkpoint"] = {"load_universal": True}
    return config


@cache
def _mesh(launch: Launch) -> DeviceMesh:
    return init_device_mesh("cpu", (launch.dp, launch.tp), mesh_dim_names=("dp", "tp"))


def engine_for(case: Case, *, universal: bool = False, seed: int | None = None) -> tuple[Any, Tensors]:
    """A live engine, and the full initial weights."""
    module = pipeline.build(case) if case.launch.pp > 1 else models.build(case)
    if seed is not None:  # a resumed model must not agree with the checkpoint by luck
        generator = torch.Generator().manual_seed(seed)
        for parameter in module.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (case.frozen and re.search(case.frozen, name)))
    full = {name: value.detach().clone() for name, value in module.named_parameters()}
    init_utils._TP_MODEL_INIT_ARGS = None  # the arguments of the case before this one
    for known in (parallel._EXPERT_PARALLEL_GROUP, parallel._EXPERT_DATA_PARALLEL_GROUP):
        known.clear()  # its experts' ranks
    if case.ours:
        tensor_parallel(module, _mesh(case.launch)["tp"], dtensor=False)
    elif case.launch.tp > 1 and case.model not in ("fused", "pipe"):
        module = deepspeed.tp_model_init(module, tp_size=case.launch.tp, dtype=models.DTYPES[case.dtype])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if case.groups == 2:
        matrices = [parameter for parameter in trained if parameter.dim() >= 2]
        groups = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": NO_DECAY},
        ]
    else:
        groups = [{"params": trained, "weight_decay": DECAY}]
    if case.model == "moe":
        groups = split_params_into_different_moe_groups_for_optimizer(
            [{"name": f"group {number}", **group} for number, group in enumerate(groups)]
        )
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    config = configuration(case, universal=universal)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine, full


def step(engine: Any, case: Case, seed: int) -> float:
    """One training step on data that only depends on the seed and the data-parallel rank."""
    rank = torch.distributed.get_rank() // case.launch.tp % case.launch.dp
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if case.launch.pp > 1:
        generator = torch.Generator().manual_seed(1000 * seed + engine.grid.get_data_parallel_rank())
        batches = [torch.randint(0, case.vocab, (BATCH, LENGTH), generator=generator) for _ in range(2)]
        return float(engine.train_batch(iter([(ids, ids) for ids in batches])))
    ids = torch.randint(0, case.vocab, (BATCH, LENGTH), generator=generator)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def plain(name: str) -> str:
    return name.removeprefix("module.")


def local_truth(engine: Any, case: Case) -> Truth:
    """What this process's tensor-parallel and pipeline rank holds, gathered over its data-parallel group."""
    optimizer = engine.optimizer
    if case.zero == 0:
        return unsharded_truth(engine, case)
    if case.dealt:  # DeepSpeed 0.19.8 links fragments in the order that its flat buffers do not have
        as_given, optimizer.bit16_groups = optimizer.bit16_groups, optimizer.round_robin_bit16_groups
        optimizer._link_all_hp_params()
        optimizer.bit16_groups = as_given
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed 0.19.8 links all groups' fragments when the first group has stepped, before the others have.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    found: Truth = {FP32: {}, LOW: {}, **{state: {} for state in STATES}}
    for name, parameter in engine.module.named_parameters():
        name = plain(name)
        if case.zero == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                found[LOW][name] = parameter.detach().clone()
            shape = parameter.ds_shape
        else:
            found[LOW][name] = parameter.detach().clone()
            shape = parameter.shape
        if not parameter.requires_grad:
            continue
        empty = parameter.numel() == 0 and case.zero < 3
        values = {FP32: None if empty else safe_get_full_fp32_param(parameter)}
        values |= {state: None if empty else safe_get_full_optimizer_state(parameter, state) for state in STATES}
        for state, value in values.items():
            found[state][name] = torch.zeros(shape) if value is None else value.detach().reshape(shape).float().clone()
    return found


def unsharded_truth(engine: Any, case: Case) -> Truth:
    """What an optimizer without ZeRO holds: `#<number>` -> its state, and by name the module's tensors."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    found: Truth = {FP32: {}, LOW: {}, **{state: {} for state in STATES}}
    found[LOW] = {plain(name): value.detach().clone() for name, value in engine.module.named_parameters()}
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        found[FP32][f"#{number}"] = parameter.detach().clone()
        for state in STATES:
            found[state][f"#{number}"] = inner.state[parameter][state].detach().clone()
    return found


def everywhere(mine: Truth) -> list[Truth]:
    """What each rank has. As bytes, since torch's pickles take a millisecond for each tensor."""
    sent = {state: save({name: held.contiguous() for name, held in tensors.items()}) for state, tensors in mine.items()}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, sent)
    return [{state: load(held) for state, held in rank.items()} for rank in gathered]


def whole(case: Case, ranks: list[Truth], full: Mapping[str, Tensor]) -> Truth:
    """The whole tensors: pipeline stages united, tensor-parallel shards merged by our own statement about them."""
    launch, united = case.launch, Truth()
    if case.zero == 0 and case.model != "moe":
        return ranks[0]
    for state in (FP32, LOW, *STATES):
        united[state] = {}
        if launch.pp > 1:
            for start in range(0, len(ranks), launch.tp):
                beside = ranks[start : start + launch.tp]
                united[state] |= {
                    name: models.merged(case, name, [rank[state][name] for rank in beside], ())
                    for name in beside[0][state]
                }
            continue
        if case.model == "moe":
            first = range(0, len(ranks), len(ranks) // case.ep) if case.data_first else range(case.ep)
            for number, rank in enumerate(ranks[start] for start in first):
                united[state] |= {models.everywhere(case, name, number): held for name, held in rank[state].items()}
            continue
        for name in ranks[0][state]:
            shards = [ranks[rank][state][name] for rank in range(launch.tp)]
            united[state][name] = models.merged(case, name, shards, full[name].shape)
    return united


def steps_of(engine: Any) -> list[float]:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return sorted({float(state["step"]) for state in inner.state.values() if "step" in state})


def settings_of(engine: Any) -> list[dict[str, Any]]:
    keep = ("lr", "weight_decay", "betas", "eps")
    return [{key: group[key] for key in keep} for group in engine.optimizer.param_groups]


def write(truth: Truth, folder: Path, facts: Mapping[str, Any]) -> None:
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for state, tensors in truth.items():
            save_file({name: value.contiguous() for name, value in tensors.items()}, folder / f"{state}.safetensors")
        (folder / TRUTH).write_text(json.dumps(facts, indent=1), "utf-8")
    torch.distributed.barrier()


def prove(engine: Any, case: Case, full: Mapping[str, Tensor]) -> None:
    """Check that `models.share` says what DeepSpeed did, on the initial weights, before anything depends on it."""
    mine = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=case.zero == 3):
            mine[plain(name)] = parameter.detach().clone()
    ranks = everywhere({LOW: mine})
    for name, want in full.items():
        if name in mine:
            got = models.merged(case, name, [ranks[rank][LOW][name] for rank in range(case.launch.tp)], want.shape)
            if not torch.equal(got, want):
                raise AssertionError(f"{case.name}: {name} is not cut as stated")


def train(case: Case, out: Path) -> None:
    engine, full = engine_for(case)
    if case.launch.pp == 1 and case.model != "moe":
        prove(engine, case, full)
    losses = [step(engine, case, seed) for seed in range(STEPS)]
    if case.model == "odd":
        engine.module.seen.fill_(STEPS)
    engine.save_checkpoint(str(out / "checkpoint"), tag=TAG, client_state={"note": case.name, **pipeline.info(case)})
    ranks = everywhere(local_truth(engine, case))
    truth = whole(case, ranks, full)
    trained = {name: value.dim() for name, value in truth[FP32].items()}
    names = [sorted(trained)]
    if case.groups == 2:
        names = [sorted(name for name, dim in trained.items() if (dim >= 2) == wide) for wide in (True, False)]
    if case.model == "moe":  # DeepSpeed wants the experts in groups of their own, after the others
        names = [[n for n in group if models.is_expert(n) == experts] for experts in (False, True) for group in names]
    facts = {
        "case": asdict(case), "losses": losses, "steps": steps_of(engine), "groups": names,
        "settings": settings_of(engine),
        "shards": [{name: list(value.shape) for name, value in rank[LOW].items()} for rank in ranks],
    }  # fmt: skip
    write(truth, out / "truth", facts)
    engine.destroy()


def counted(engine: Any, *, together: bool) -> bool:
    """Let all parts of the optimizer count their steps in one tensor, or each in its own; tell whether they did share.

    torch adds to that tensor in place, once for each part that is updated.
    """
    held = [state for state in engine.optimizer.optimizer.state.values() if "step" in state]
    shared = len({id(state["step"]) for state in held}) < len(held)
    for state in held:
        state["step"] = held[0]["step"] if together else state["step"].clone()
    return shared


def resume(case: Case, source: Path, out: Path, *, universal: bool, together: bool) -> None:
    """Load a checkpoint with DeepSpeed itself, tell what was loaded, and take one more step."""
    engine, full = engine_for(case, universal=universal, seed=77)
    path, client = engine.load_checkpoint(str(source))
    if path is None:
        raise AssertionError("DeepSpeed loaded nothing")
    ranks = everywhere(local_truth(engine, case))
    facts = {"steps": steps_of(engine), "settings": settings_of(engine), "global_steps": engine.global_steps}
    facts["client"] = sorted(client)
    facts["one_step"] = counted(engine, together=together)
    loaded = whole(case, ranks, full)
    engine.save_checkpoint(str(out / SAVED), tag=TAG, client_state=pipeline.info(case))
    facts["loss"] = step(engine, case, 99)
    write(loaded, out / "loaded", facts)
    write(whole(case, everywhere(local_truth(engine, case)), full), out / "next", facts)
    engine.destroy()


def start(case: Case, truth: Path, out: Path, *, together: bool = False) -> None:
    """Build the same state by hand where a resumed run is to be compared, and take one step from there."""
    engine, full = engine_for(case, seed=78)
    step(engine, case, 5)  # makes the optimizer's state
    optimizer, launch = engine.optimizer, case.launch
    local_truth(engine, case)
    wanted = {state: load_file(truth / f"{state}.safetensors") for state in (FP32, LOW, *STATES)}
    rank = torch.distributed.get_rank() % launch.tp
    for name, parameter in engine.module.named_parameters():
        name = plain(name)
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=case.zero == 3, modifier_rank=0):
                parameter.data.copy_(models.shard(case, name, wanted[LOW][name], rank, launch.tp))
            continue
        for state in (FP32, *STATES):
            value = models.shard(case, name, wanted[state][name], rank, launch.tp)
            if case.zero == 3:  # DeepSpeed 0.19.8 cannot set a whole parameter that it has padded
                part = torch.distributed.get_rank(optimizer.dp_process_group)
                padded = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % launch.dp))
                value = padded.chunk(launch.dp)[part].clone()
            weight, moment = LOCAL if case.zero == 3 else FULL
            if state == FP32:
                weight(parameter, value)
            else:
                moment(parameter, value, state)
    for held in optimizer.optimizer.state.values():
        if "step" in held:
            held["step"].fill_(STEPS)
    counted(engine, together=together)
    if case.zero == 3:
        for flat, master, parts in zip(
            optimizer.fp16_partitioned_groups_flat,
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups,
            strict=True,
        ):
            flat.data.copy_(master.data)
            for part, value in zip(parts, optimizer.unflatten(flat, parts), strict=True):
                part.data = value.data
    else:
        optimizer.update_lp_params()
    facts = {"loss": step(engine, case, 99)}
    write(whole(case, everywhere(local_truth(engine, case)), full), out / "next", facts)
    engine.destroy()


def main(jobs: Path, launch: Launch, rank: int, meeting: Path) -> None:
    """Be one rank of a launch, and do all its jobs."""
    torch.set_num_threads(1)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.world, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    os.environ |= {key: str(value) for key, value in where.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    gloo_alone()
    deepspeed.init_distributed(
        dist_backend="gloo", timeout=timedelta(seconds=60), init_method=f"file://{meeting}", rank=rank,
        world_size=launch.world,
    )  # fmt: skip
    for job in json.loads(jobs.read_text("utf-8")):
        case, out = BY_NAME[job["case"]], Path(job["out"])
        try:
            if job["do"] == "train":
                train(case, out)
            elif job["do"] == "start":
                start(case, Path(job["truth"]), out, together=job["together"])
            else:
                source = Path(job["source"])
                resume(case, source, out, universal=job["universal"], together=job["together"])
        except Exception as error:  # the other ranks would wait for this one
            raise AssertionError(f"{job}: {error}") from error
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
