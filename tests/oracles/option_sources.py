"""The sources of the option sweep, written with torch, numpy and safetensors as other programs write them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from tests.formats.deepspeed import built
from tests.oracles import option_pairs as names
from tests.oracles.cases import HF, MEGATRON, TORCHTITAN, TRANSFORMERS
from tests.oracles.hub import Tensors
from tests.oracles.option_models import TORCH_DIST, Places, Truth, is_linear, places, relaid, truth
from tests.oracles.quiet import quiet

Parts = dict[str, tuple[str, torch.Tensor]]
"""Name on a rank -> name in the whole model, and the numbers of the elements."""
_EMBEDDING, _HEAD, _LAYERS = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers."
STATES = built.STATES
"""The moments: twice and three times the weights, in full precision."""
LAYERS, EXPERTS, TILE = 2, 4, 128
STEP = "iter_0000007"
MEGATRON_DIST = "megatron_dist"
FORMATS = {
    "hf": "safetensors", "shards": "safetensors", "transformers": "safetensors", "bin": "torch", "pt": "torch",
    "dcp titan": "dcp", "megatron": "safetensors", "torch_dist": "torch_dist", "ranks": "megatron_torch",
    names.FP8: "safetensors", "dcp trained": "dcp", "zero": "deepspeed", "replicas": "deepspeed",
    "universal": "deepspeed-universal",
}  # fmt: skip
DIALECTS = {
    "transformers": TRANSFORMERS, "pt": TRANSFORMERS, "dcp titan": TORCHTITAN, "megatron": MEGATRON,
    "torch_dist": TORCH_DIST, "ranks": MEGATRON,
}  # fmt: skip
"""Source -> the key of `places` of its names; the others have the hub's."""


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk and what it holds, under the hub's names."""

    path: Path
    """What a conversion reads."""
    folder: Path
    """Everything that belongs to it."""
    model: Truth
    wide: bool
    where: Places
    """Of the names in its files."""
    weights: Mapping[str, Tensors]
    """By the value of `weights`: none, fp32 or lp. Of a coded weight, the values of its codes and scales."""
    states: Mapping[str, Tensors] = field(default_factory=dict)
    codes: Tensors = field(default_factory=dict)
    scales: Tensors = field(default_factory=dict)
    """Of each element of a coded weight."""


def dialect(source: str) -> str:
    """The key of `places` for the names of a source."""
    return DIALECTS.get(source, HF)


def write(source: str, family: str, folder: Path) -> Source:
    """Write a source into a new folder."""
    folder.mkdir(parents=True)
    model = truth(family, source == names.FP8)
    if source == names.FP8:
        return _fp8(model, folder)
    (folder / "config.json").write_text(json.dumps(model.config))
    where = places(family, dialect(source))
    stored = relaid(model.tensors, where, model.shapes)
    made = partial(Source, folder, folder, model, False, where)
    if source in names.TRAINED:
        return _trained(source, model, folder)
    if source == "pt":
        torch.save(stored, folder / "model.pt")
        return Source(folder / "model.pt", folder, model, False, where, {names.NONE: model.tensors})
    if source == "bin":
        torch.save(stored, folder / "pytorch_model.bin")
    elif source == "dcp titan":
        _dcp(stored, folder)
    elif source == "torch_dist":
        _dcp(stored, folder / STEP)
        (folder / "iter_0000007/metadata.json").write_text(
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        )
        torch.save(
            {"args": _arguments(model, 1, 1), "checkpoint_version": 3.0, "iteration": 7},
            folder / "iter_0000007/common.pt",
        )
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    elif source == "ranks":
        _ranks(model, where, folder)
    else:
        _safetensors(stored, folder, 3 if source == "shards" else 1)
    return made({names.NONE: model.tensors})


def _safetensors(stored: Tensors, folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return
    placed: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = {name: stored[name] for name in list(stored)[number::shards]}
        save_file(mine, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(mine, file)
    size = sum(value.nbytes for value in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _dcp(state: Mapping[str, Any], folder: Path) -> None:
    with quiet():
        save(dict(state), checkpoint_id=folder, no_dist=True)


def _trained(source: str, model: Truth, folder: Path) -> Source:
    """What a run leaves: weights in full precision and bf16, and two moments."""
    masters = {name: value.float() * 1.001 for name, value in model.tensors.items()}
    where = places(model.family, HF)
    made = partial(Source, folder, folder, model, False, where)
    if source == "replicas":
        return made(*_replicas(masters, folder))
    states = {state: {name: value * (n + 2) for name, value in masters.items()} for n, state in enumerate(STATES)}
    if source == "dcp trained":
        moments = {
            name: {"step": torch.tensor(float(built.STEP)), **{state: states[state][name] for state in STATES}}
            for name in masters
        }
        group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(masters)}
        _dcp({"model": model.tensors, "optimizer": {"state": moments, "param_groups": [group]}}, folder)
        return made({names.NONE: model.tensors}, states)
    rounded = {name: value.bfloat16() for name, value in masters.items()}
    if source == "universal":
        _universal(masters, states, folder)
    else:
        built.write_old(folder, [{name: value.numpy() for name, value in masters.items()}])
    return made({names.NONE: masters, "fp32": masters, "lp": rounded}, states)


def _replicas(masters: Tensors, folder: Path) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Two tensor-parallel ranks, as AutoTP cuts a model, whose norms drifted apart; and the means of what differs."""
    ranks: list[Tensors] = [{}, {}]
    for name, value in masters.items():
        dim = None
        if "_proj" in name:
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
        for rank, contents in enumerate(ranks):
            if dim is None:
                contents[name] = value + rank / 64 if "norm" in name else value
            else:
                contents[name] = value.chunk(2, dim)[rank].contiguous()
    built.write_old(folder, [{name: value.numpy() for name, value in contents.items()} for contents in ranks])

    def joined(name: str, *, dtype: torch.dtype = torch.float32, times: int = 1) -> torch.Tensor:
        one, two = ((contents[name] * times).to(dtype) for contents in ranks)
        if "norm" in name:
            return ((one.double() + two.double()) / 2).to(dtype)
        return (masters[name] * times).to(dtype)

    full = {name: joined(name) for name in masters}
    low = {name: joined(name, dtype=torch.bfloat16) for name in masters}
    states = {state: {name: joined(name, times=n + 2) for name in masters} for n, state in enumerate(STATES)}
    return {names.NONE: full, "fp32": full, "lp": low}, states


def _universal(masters: Tensors, states: Mapping[str, Tensors], folder: Path) -> None:
    """What DeepSpeed's `ds_to_universal` makes of a run below ZeRO-3."""
    step = folder / f"global_step{built.STEP}_universal"
    for name, value in masters.items():
        place = step / "zero" / name
        place.mkdir(parents=True)
        for state, tensor in (("fp32", value), *((state, states[state][name]) for state in STATES)):
            torch.save({"param": tensor}, place / f"{state}.pt")
        torch.save(float(built.STEP), place / "step.pt")
    group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "params": [0]}
    torch.save({"param_groups": [group], "zero_stage": 1}, step / "zero/optimizer_state.pt")
    model = {
        "module": {name: value.bfloat16() for name, value in masters.items()}, "buffer_names": [], "optimizer": None,
        "param_shapes": [{name: value.shape for name, value in masters.items()}], "global_steps": built.STEP,
        "dp_world_size": 1, "mp_world_size": 1, "universal_checkpoint_info": {},
    }  # fmt: skip
    torch.save(model, step / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(step.name)


def _fp8(model: Truth, folder: Path) -> Source:
    """The weights of linear layers as DeepSeek-V3 stores them: codes, and a scale for each tile."""
    generator = torch.Generator().manual_seed(5)
    stored, values, codes, scales = {}, dict(model.tensors), {}, {}
    for name, value in model.tensors.items():
        stored[name] = value
        if not is_linear(name):
            continue
        bits = torch.randint(0, 127, value.shape, generator=generator) + 128 * torch.randint(
            0, 2, value.shape, generator=generator
        )
        codes[name] = stored[name] = bits.to(torch.uint8).view(torch.float8_e4m3fn)
        grid = [-(-size // TILE) for size in value.shape]
        exponents = torch.randint(-9, 3, grid, generator=generator)
        tiles = torch.exp2(exponents) * (1 + torch.randint(0, 2, grid, generator=generator) / 2)
        stored[f"{name}_scale_inv"] = tiles
        scales[name] = tiles.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[: value.shape[0], : value.shape[1]]
        values[name] = (codes[name].float() * scales[name]).bfloat16()
    section = {"quant_method": "fp8", "weight_block_size": [TILE, TILE], "activation_scheme": "dynamic", "fmt": "e4m3"}
    config = {**model.config, "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    model = Truth(model.family, config, model.tensors)
    return Source(folder, folder, model, True, places(model.family, HF, True), {names.NONE: values}, {}, codes, scales)


def _arguments(model: Truth, tp: int, pp: int, rank: int = 0) -> argparse.Namespace:
    """What Megatron calls its args."""
    config = model.config
    heads = config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    return argparse.Namespace(
        num_layers=LAYERS, hidden_size=config["hidden_size"], ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads, num_query_groups=config["num_key_value_heads"], group_query_attention=True,
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads, vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"], swiglu=True,
        untie_embeddings_and_output_weights=not config["tie_word_embeddings"], add_qkv_bias=model.family == "qwen2",
        rank=rank, world_size=tp * pp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None, expert_model_parallel_size=1, expert_tensor_parallel_size=tp,
        num_experts=experts,
        moe_ffn_hidden_size=config.get("moe_intermediate_size", config["intermediate_size"]) if experts else None,
        moe_layer_freq=1, data_parallel_size=1, context_parallel_size=1, use_distributed_optimizer=False,
        optimizer="adam",
    )  # fmt: skip


def _ranks(model: Truth, where: Places, folder: Path) -> None:
    """Two tensor-parallel ranks in each of two stages, as `--ckpt-format torch` writes them."""
    tied = bool(model.config["tie_word_embeddings"])
    for number, (place, parts) in enumerate(rank_parts(where, tp=2, pp=2, ep=1, tied=tied).items()):
        step = folder / STEP / place
        step.mkdir(parents=True)
        contents = {"args": _arguments(model, 2, 2, number), "checkpoint_version": 3.0, "iteration": 7}
        # Copies: a cut shares the storage of the whole, which torch would save with each part.
        mine = relaid(model.tensors, {name: part for name, (_, part) in parts.items()}, model.shapes)
        torch.save(
            {**contents, "model": {name: value.clone() for name, value in mine.items()}}, step / "model_optim_rng.pt"
        )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


_ROWS = (
    "linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight", "up_proj.weight",
    "linear_q_proj.weight",
)  # fmt: skip
"""Ends of the names of what Megatron's ranks share out by rows; gate and up of an MLP each for itself."""


class Rank(NamedTuple):
    """The place of one of Megatron's ranks."""

    tp: int
    pp: int
    ep: int


def ranks(*, tp: int, pp: int, ep: int, experts: bool) -> dict[str, Rank]:
    """The folder of each rank -> its place; stage by stage."""
    collected = {}
    several = ep > 1 and experts
    for rank in (Rank(t, p, e) for p in range(pp) for e in range(ep if several else 1) for t in range(tp)):
        end = f"_{rank.ep:03d}" if several else ""
        collected[f"mp_rank_{rank.tp:02d}" + (f"_{rank.pp:03d}" if pp > 1 else "") + end] = rank
    return collected


def rank_parts(where: Places, *, tp: int, pp: int, ep: int, tied: bool, multiple: int = 1) -> dict[str, Parts]:
    """Share the tensors of Megatron's model out as its ranks hold them: single experts, vocabularies in multiples.

    Returns the folder of each rank -> its name for each tensor -> the name in the whole model, and its part.
    """
    collected: dict[str, Parts] = {}
    whole = padded(where, multiple * tp)
    for place, rank in ranks(tp=tp, pp=pp, ep=ep, experts=any(".experts." in name for name in where)).items():
        mine = collected[place] = {}
        for name, number in whole.items():
            own = _own_name(name, rank, pp, ep)
            if own is not None:
                mine[own] = name, _cut(name, number, tp, rank.tp)
        if tied and rank.pp == pp - 1 > 0:
            mine[_HEAD] = _EMBEDDING, _cut(_HEAD, whole[_EMBEDDING], tp, rank.tp)
    return collected


def padded(where: Places, multiple: int) -> Places:
    """Pad the vocabulary's rows to a multiple."""
    whole = dict(where)
    for name in {_EMBEDDING, _HEAD} & whole.keys():
        rows = whole[name]
        whole[name] = torch.cat([rows, rows.new_full((-len(rows) % multiple, rows.shape[1]), -1)])
    return whole


def _own_name(name: str, rank: Rank, pp: int, ep: int) -> str | None:
    """The name of a tensor on a rank, or None where the rank has no part of it."""
    each = LAYERS // pp
    if not name.startswith(_LAYERS):
        return name if rank.pp == (0 if name == _EMBEDDING else pp - 1) else None
    layer, rest = name.removeprefix(_LAYERS).split(".", 1)
    if int(layer) // each != rank.pp:
        return None
    expert = re.fullmatch(r"(.*\.experts\..*\.weight)(\d+)", rest)
    if expert is not None:
        local = EXPERTS // ep
        if int(expert[2]) // local != rank.ep:
            return None
        rest = f"{expert[1]}{int(expert[2]) % local}"
    return f"{_LAYERS}{int(layer) % each}.{rest}"


def _cut(name: str, number: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    if ".linear_fc1.weight" in name:
        return torch.cat([half.chunk(tp)[rank] for half in number.chunk(2)])
    if ".linear_fc2.weight" in name or name.endswith(".linear_proj.weight"):
        return number.chunk(tp, 1)[rank]
    return number.chunk(tp)[rank] if name.endswith(_ROWS) else number
