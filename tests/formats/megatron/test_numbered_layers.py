"""Layers in one tensor beside layers that predict ahead, as Megatron saves them with `--moe-layer-freq 1`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.oracles import hub

SIZES = {
    "model_type": "glm4_moe", "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "first_k_dense_replace": 0,
    "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "vocab_size": 50, "tie_word_embeddings": False,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def _made(folder: Path) -> Tensors:
    """Write a hub folder with a layer that predicts ahead."""
    config, tensors = hub.make(SIZES, 0)
    last, ahead = "model.layers.1.", "model.layers.2."
    later = {ahead + name.removeprefix(last): value + 1 for name, value in tensors.items() if name.startswith(last)}
    width = config["hidden_size"]
    later |= {f"{ahead}{name}.weight": torch.randn(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    later[f"{ahead}eh_proj.weight"] = torch.randn(width, 2 * width)
    held = {name: value.float() for name, value in (tensors | later).items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(held, folder / hub.WEIGHTS)
    return held


def _together(run: Path, states: tuple[str, ...]) -> None:
    """Put the layers of a release into one tensor each, and add what an optimizer has of them."""
    folder = run / "release"
    items = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    tensors = {name: item for name, item in items if isinstance(item, TensorStorageMetadata)}
    state = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in tensors.items()}
    with warnings.catch_warnings(action="ignore"):
        load(state, checkpoint_id=folder, no_dist=True)
    first = {name for name in state if name.startswith("decoder.layers.0.")}
    for name in first:
        layers = [state.pop(name.replace(".0.", f".{layer}.", 1)) for layer in range(2)]
        state[name.replace("layers.0.", "layers.", 1)] = torch.stack(layers)
    for file in (*folder.glob("*.distcp"), folder / ".metadata", run / "transaxle.json"):
        file.unlink()
    for number, of in enumerate(states, 2):
        state |= {
            f"optimizer.state.{of}.{name}": value * number for name, value in state.items() if "optim" not in name
        }
    with warnings.catch_warnings(action="ignore"):
        save(state, storage_writer=FileSystemWriter(folder, overwrite=True), no_dist=True)


def test_they_become_the_hubs_layers(tmp_path: Path) -> None:
    held = _made(tmp_path / "hub")
    tx.convert(tmp_path / "hub", tmp_path / "run", to="torch_dist")
    _together(tmp_path / "run", ("exp_avg", "exp_avg_sq"))
    tx.convert(tmp_path / "run", tmp_path / "out", to="hf", optimizer=True)
    found = load_file(tmp_path / "out" / hub.WEIGHTS)
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], value) for name, value in held.items())
    state = load_file(tmp_path / "out/optimizer/optimizer.safetensors")
    for name, value in held.items():
        for number, of in enumerate(("exp_avg", "exp_avg_sq"), 2):
            assert torch.equal(state[f"optim/{name}/{of}"], value * number)
