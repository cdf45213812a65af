"""Tiny models of transformers with random weights: what journeys start with, and what they ask at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.journeys.record import Journey
from tests.oracles import wrappers
from tests.oracles.quiet import quiet

Tensors = dict[str, torch.Tensor]

LR = 1e-2
"""Of all that train: by the peers' own defaults, tiny weights would hardly move in three steps."""
STEPS = 3
LENGTH = 12
"""Tokens of a text."""
_TOKENS = 90
_CHANGES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen3": {"tie_word_embeddings": True},
        "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    }
)
"""What a tiny config has beside the sizes of all."""
_TITAN = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3")
_ALL = ("hf", "dcp", "torch", "deepspeed-universal", "safetensors:transformers", "safetensors:automodel", "torch_dist")


def settings(folder: Path, steps: int = STEPS, **said: Any) -> dict[str, Any]:
    """What transformers' Trainer, and TRL's, are told."""
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "learning_rate": LR,
        "report_to": [],
        "disable_tqdm": True,
        **said,
    }


def launched_as(rank: int, world: int) -> dict[str, str]:
    """The environment in which launchers start a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    return {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in place.items()}}


def rows(count: int = 64) -> list[dict[str, list[int]]]:
    """Texts to train on, of tokens that every vocabulary has; the first few, which may be special, are left out."""
    texts = [[4 + (7 * row + 3 * place * place) % (_TOKENS - 4) for place in range(LENGTH)] for row in range(count)]
    return [{"input_ids": text, "labels": text} for text in texts]


def batch(count: int = 4) -> Tensors:
    """A few texts as a model takes them."""
    return {key: torch.tensor([row[key] for row in rows(count)]) for key in ("input_ids", "labels")}


def hub_folder(model_type: str, folder: Path, *, ahead: int = 0, **changes: Any) -> Path:
    """Store a model whose parameters and buffers are all random, perhaps with layers that predict further ahead."""
    if ahead:
        return _with_layers_ahead(model_type, folder, ahead, changes)
    model = wrappers.build(model_type, **{**_CHANGES.get(model_type, {}), **changes})
    assert model is not None
    generator = torch.Generator().manual_seed(3)
    model.tie_weights()
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    with quiet():
        model.save_pretrained(folder)
    return folder


def _with_layers_ahead(model_type: str, folder: Path, ahead: int, changes: Mapping[str, Any]) -> Path:
    depth = 2
    hub_folder(model_type, folder, **changes, num_hidden_layers=depth + ahead)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text("utf-8"))
    width = config["hidden_size"]
    generator = torch.Generator().manual_seed(4)
    for layer in range(depth, depth + ahead):
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(width, generator=generator)
        tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.randn(width, 2 * width, generator=generator) * 0.1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    changed = {**config, "num_hidden_layers": depth, "num_nextn_predict_layers": ahead}
    (folder / "config.json").write_text(json.dumps(changed), "utf-8")
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model as transformers loads it; no name is missing or unexpected, but for those of layers ahead."""
    import transformers

    with quiet():
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, config.architectures[0])
        model, about = kind.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    ahead = f"model.layers.{getattr(config, 'num_hidden_layers', None)}."
    about = {key: [name for name in names if not str(name).startswith(ahead)] for key, names in about.items()}
    assert {key: names for key, names in about.items() if names} == {}
    return model.train()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What a model says of a few texts."""
    training = model.training
    model.eval()
    said: torch.Tensor = model(input_ids=batch()["input_ids"]).logits.float().clone()
    model.train(training)
    return said


def whole(model: Any) -> Tensors:
    """Copies of all that a model stores."""
    found = model.state_dict().items()
    return {name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for name, each in found}


def unmoved(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what training has left as it was."""
    assert before.keys() == after.keys()
    return [name for name, value in after.items() if torch.equal(value, before[name])]


def next_step(model: Any, optimizer: Any) -> Tensors:
    """What a model stores after one more step, at a rate that schedules have not lowered."""
    for group in optimizer.param_groups:
        group["lr"] = LR
    optimizer.zero_grad()
    model(**batch()).loss.backward()
    optimizer.step()
    return whole(model)


def targets(model_type: str) -> tuple[str, ...]:
    """What has a place for a family's optimizer state."""
    return (*_ALL, *(["dcp:torchtitan"] if model_type in _TITAN else []))


def goes_on(
    journey: Journey, folder: Path, saved: Path, hub: Path, wanted: Tensors, optimizer_of: Any, formats: Iterable[str]
) -> None:
    """Convert a checkpoint with its optimizer, load each result into a model of the hub, and make the `wanted` step."""
    for to in formats:
        there = folder / to.replace(":", "-")
        config = None if (saved / "config.json").exists() else hub / "config.json"
        tx.convert(saved, there, to=to, optimizer=True, config=config, sync=False)
        journey.passed("optimizer")
        model = loaded(hub)
        optimizer = optimizer_of(model)
        tx.load(model, there, optimizer=optimizer)
        assert unmoved(wanted, next_step(model, optimizer)) == list(wanted), to
        journey.passed("resume")


def carried(journey: Journey, source: Path, wanted: Path, there: Path, **said: Any) -> None:
    """Convert with the optimizer: the result equals a checkpoint that has all of it, or it is refused."""
    try:
        tx.convert(source, there, to="hf", optimizer=True, sync=False, **said)
    except tx.TransaxleError as error:
        with journey.refused("optimizer", error.code):
            again(error)
        return
    assert tx.verify(wanted, there).ok
    journey.passed("optimizer")


def returns_to_the_hub(
    journey: Journey, folder: Path, values: Mapping[str, torch.Tensor], wanted: torch.Tensor, checkpoint: Path
) -> None:
    """Check a trainer's own checkpoint of what began as `folder / "hub"`, and what `tx.save` wrote to `live`.

    `values` are the state of the trained model, in which every parameter has moved, and `wanted` its logits.
    """
    before = loaded(folder / "hub")
    parameters = dict(before.named_parameters(remove_duplicate=False))
    assert not set(unmoved(whole(before), values)) & parameters.keys()
    journey.passed("load", "train", "save", "live save")
    journey.equal("logits", logits(loaded(folder / "live")), wanted)
    tx.convert(checkpoint, folder / "back", to="hf", config=folder / "hub/config.json", sync=False)
    journey.passed("back")
    journey.equal("logits", logits(loaded(folder / "back")), wanted)


def again(error: tx.TransaxleError) -> None:
    """Raise what another process, or another place, has raised."""
    raise error
