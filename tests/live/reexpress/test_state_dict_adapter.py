"""The adapter: every local value equals the full tensor of the target dialect, cut by torch; and nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import transaxle as tx
from tests.live.ranks import run
from transaxle.errors import TransaxleError
from transaxle.live.state_dict_adapter import state_dict_as

E, D, F, L = 10, 6, 8, 2
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 16, "hidden_size": D, "intermediate_size": 12, "num_hidden_layers": L,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": E, "num_experts_per_tok": 2,
    "moe_intermediate_size": F, "tie_word_embeddings": False, "decoder_sparse_step": 1,
}  # fmt: skip
NATIVE = "model.layers.{}.mlp.experts.{}"


def _values(*shape: int, start: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def automodel() -> dict[str, torch.Tensor]:
    """Automodel's experts: `[E, D, 2F]`, gate before up, and `[E, F, D]`."""
    found = {}
    for layer in range(L):
        found[NATIVE.format(layer, "gate_and_up_projs")] = _values(E, D, 2 * F, start=1000 * layer)
        found[NATIVE.format(layer, "down_projs")] = _values(E, F, D, start=5000 + 1000 * layer)
    return found


def hub(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same experts one by one, in torch operations."""
    found = {}
    for layer in range(L):
        both = full[NATIVE.format(layer, "gate_and_up_projs")].transpose(1, 2)
        gate, up = both.chunk(2, dim=1)
        down = full[NATIVE.format(layer, "down_projs")].transpose(1, 2)
        for expert in range(E):
            found[NATIVE.format(layer, f"{expert}.gate_proj.weight")] = gate[expert].contiguous()
            found[NATIVE.format(layer, f"{expert}.up_proj.weight")] = up[expert].contiguous()
            found[NATIVE.format(layer, f"{expert}.down_proj.weight")] = down[expert].contiguous()
    return found


def stacked(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' experts: `[E, 2F, D]` and `[E, D, F]`."""
    return {
        name.replace("gate_and_up_projs", "gate_up_proj").replace("down_projs", "down_proj"): t.transpose(
            1, 2
        ).contiguous()
        for name, t in full.items()
    }


def _as(rank: int, world: int, placements: tuple[Any, Any], dialect: str, back: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    full = automodel()
    sd = {name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in full.items()}
    with CommDebugMode() as comm:
        found = state_dict_as(sd, dialect, config=CONFIG, source="automodel")
        again = state_dict_as(found, "automodel", config=CONFIG, source=dialect) if back else None
    assert comm.get_total_counts() == 0
    truth = stacked(full) if dialect == "transformers" else hub(full)
    for name, tensor in found.items():
        assert tuple(tensor.shape) == tuple(truth[name].shape), name
        if not isinstance(tensor, DTensor):  # this rank alone holds it, whole
            assert torch.equal(tensor, truth[name]), name
            continue
        assert tensor.stride() == truth[name].stride()
        cut = distribute_tensor(truth[name], tensor.device_mesh, tensor.placements, src_data_rank=None)
        assert torch.equal(tensor.to_local(), cut.to_local()), name
    if again is not None:
        assert again.keys() == full.keys()
        for name, tensor in again.items():
            assert isinstance(tensor, DTensor)
            assert tensor.placements == sd[name].placements
            assert torch.equal(tensor.to_local(), sd[name].to_local())
    return sorted(found)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "placements", [(Shard(1), Shard(0)), (Replicate(), Shard(0)), (Shard(-2), Shard(-3)), (Replicate(), Replicate())]
)
@pytest.mark.parametrize("world", [4, 8])
def test_experts_keep_their_places(world: int, placements: tuple[Any, Any]) -> None:
    run(world, _as, placements, "transformers", True)
    names = run(world, _as, placements, "hf", False)
    assert sorted({name for each in names for name in each}) == sorted(hub(automodel()))


@pytest.mark.parametrize("beside", [(), (Shard(1),)], ids=["alone", "rows cut too"])
def test_a_cut_of_gate_and_up_together_leaves_each_whole_on_one_half(tmp_path: Path, beside: tuple[Shard, ...]) -> None:
    """Each half of the mesh has one of the two names; torch saves them, and loads them into what knows the way back."""
    names = run(2 << len(beside), _halves, beside, str(tmp_path / "saved"))
    half = len(names) // 2
    assert all("up_proj" not in name for one in names[:half] for name in one)
    assert all("gate_proj" not in name for one in names[half:] for name in one)


def _halves(rank: int, world: int, beside: tuple[Shard, ...], folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, world // 2)[: 1 + len(beside)], mesh_dim_names=("a", "b")[: 1 + len(beside)])
    full = automodel()
    placed = {name: (Shard(2) if "gate" in name else Replicate(), *beside) for name in full}
    sd = {name: distribute_tensor(full[name], mesh, placed[name], src_data_rank=None) for name in full}
    found = state_dict_as(sd, "hf", config=CONFIG, source="automodel")
    truth = hub(full)
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, truth[name]), name
    with pytest.raises(TransaxleError) as caught:
        state_dict_as(found, "automodel", config=CONFIG, source="hf")
    assert {refusal.code for refusal in caught.value.refusals} == {"MISSING_TENSOR"}
    assert 'state, give_back = tx.loadable_as(model, "hf")' in caught.value.hint
    dcp_save(dict(found), checkpoint_id=folder)
    empty = {name: distribute_tensor(torch.zeros_like(full[name]), mesh, placed[name]) for name in full}
    state, give_back = tx.loadable_as(empty, "hf", config=CONFIG, source="automodel")
    dcp_load(state, checkpoint_id=folder)
    give_back()
    for name, tensor in empty.items():
        assert torch.equal(tensor.to_local(), sd[name].to_local()), name
    return sorted(found)


def _fused(rank: int, world: int, gate: Any, up: Any) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    w1, w3 = _values(E, F, D, start=0), _values(E, F, D, start=7000)
    names = ("layers.0.moe.routed_experts.inner_experts.w1_EFD", "layers.0.moe.routed_experts.inner_experts.w3_EFD")
    sd = {
        name: distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
        for name, tensor, placement in zip(names, (w1, w3), (gate, up), strict=True)
    }
    (tensor,) = state_dict_as(sd, "transformers", config=CONFIG, source="torchtitan").values()
    assert isinstance(tensor, DTensor)
    parts = [torch.chunk(w, world, dim=gate.dim)[rank] for w in (w1, w3)]
    assert torch.equal(tensor.to_local(), torch.cat(parts, dim=1))
    return tensor.placements


def test_gate_and_up_cut_alike_fuse_into_a_strided_shard() -> None:
    assert run(2, _fused, Shard(1), Shard(1))[0] == (_StridedShard(1, split_factor=2),)
    assert run(2, _fused, Shard(2), Shard(2))[0] == (Shard(2),)


def test_parts_cut_differently_need_what_others_hold() -> None:
    with pytest.raises(TransaxleError) as found:
        run(2, _fused, Shard(1), Shard(2))
    assert found.value.code == "UNSUPPORTED"
    assert "w1_EFD" in str(found.value)


@pytest.mark.parametrize("dialect", ["automodel", "transformers"])
def test_some_experts_become_no_tensor_of_all(dialect: str) -> None:
    """Of experts that ranks share out: what a rank lacks is not taken for zeros."""
    mine = {name: tensor for name, tensor in hub(automodel()).items() if ".7." not in name}
    with pytest.raises(TransaxleError, match=r"this rank has 18 tensors of it, but needs more") as error:
        state_dict_as(mine, dialect, config=CONFIG)
    assert error.value.code == "INCOMPLETE"
