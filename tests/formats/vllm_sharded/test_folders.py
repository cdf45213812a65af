"""Folders of vLLM's sharded state: what each rank's files have, by torch's own operations, and what is refused.

That names, shapes and values are those that vLLM itself saves is compared in `tests.oracles.test_vllm`; that vLLM
starts from such folders, in `test_engines`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import FSDP, LLAMA, MOE, build, source
from transaxle.engine.plan.rank_parts import state_table

SHARDED = "vllm_sharded"
LAYER = "model.layers.1"
ATTENTION, EXPERTS = f"{LAYER}.self_attn", f"{LAYER}.mlp.experts.routed_experts"
SCALES = ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")
TIED = LLAMA | {"tie_word_embeddings": True}
Tensors = dict[str, torch.Tensor]


def _hub(folder: Path, config: dict[str, Any]) -> tuple[str, Tensors]:
    path = source(folder / "hub", config)
    return path, load_file(f"{path}/model.safetensors")


def _rank(folder: Path, rank: int) -> Tensors:
    tensors: Tensors = {}
    for path in folder.glob(f"model-rank-{rank}-part-*.safetensors"):
        tensors |= load_file(path)
    return tensors


def _share(value: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> torch.Tensor:
    return value.chunk(ranks, dim)[rank]


def _converted(folder: Path, config: dict[str, Any] = LLAMA, **options: Any) -> tuple[Path, Tensors]:
    path, hub = _hub(folder, config)
    tx.convert(path, folder / "sharded", to=SHARDED, sync=False, verify=True, **options)
    return folder / "sharded", hub


def _refused(action: Any, code: str, text: str) -> None:
    with pytest.raises(tx.TransaxleError) as caught:
        action()
    assert caught.value.refusals[0].code == code
    assert text in str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_has_its_part_of_a_llama(ranks: int, tmp_path: Path) -> None:
    folder, hub = _converted(tmp_path, tp=ranks)
    for rank in range(ranks):
        found = _rank(folder, rank)
        q, k, v = (_share(hub[f"{ATTENTION}.{name}_proj.weight"], rank, ranks) for name in "qkv")
        assert torch.equal(found[f"{ATTENTION}.qkv_proj.weight"], torch.cat((q, k, v)))
        assert torch.equal(
            found[f"{ATTENTION}.o_proj.weight"], _share(hub[f"{ATTENTION}.o_proj.weight"], rank, ranks, 1)
        )
        mlp = [_share(hub[f"{LAYER}.mlp.{name}_proj.weight"], rank, ranks) for name in ("gate", "up")]
        assert torch.equal(found[f"{LAYER}.mlp.gate_up_proj.weight"], torch.cat(mlp))
        rows = torch.cat((hub["lm_head.weight"], torch.zeros(32, 32)))
        assert torch.equal(found["lm_head.weight"], _share(rows, rank, ranks))
        assert torch.equal(found["model.norm.weight"], hub["model.norm.weight"])
        scales = {name: value for name, value in found.items() if name.endswith("_scale")}
        assert scales.keys() == {f"model.layers.{layer}.self_attn.attn.{name}" for layer in (0, 1) for name in SCALES}
        assert all(value.item() == 1 and value.dtype == torch.float32 for value in scales.values())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_heads_of_which_there_are_fewer_than_ranks_are_on_several(tmp_path: Path) -> None:
    folder, hub = _converted(tmp_path, LLAMA | {"num_key_value_heads": 2}, tp=4)
    for rank in range(4):
        q = _share(hub[f"{ATTENTION}.q_proj.weight"], rank, 4)
        k, v = (_share(hub[f"{ATTENTION}.{name}_proj.weight"], rank // 2, 2) for name in "kv")
        assert torch.equal(_rank(folder, rank)[f"{ATTENTION}.qkv_proj.weight"], torch.cat((q, k, v)))
    assert tx.diff(tmp_path / "hub", folder).equal


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_are_divided_whole_or_each_in_parts(ep: int, tmp_path: Path) -> None:
    folder, hub = _converted(tmp_path, MOE, tp=2, ep=ep)
    names = [f"{LAYER}.mlp.experts.{expert}" for expert in range(6)]
    gate, up, down = (
        torch.stack([hub[f"{each}.{part}_proj.weight"] for each in names]) for part in ("gate", "up", "down")
    )
    for rank in range(2):
        found = _rank(folder, rank)
        dim = 0 if ep == 2 else 1
        w13 = torch.cat([_share(each, rank, 2, dim) for each in (gate, up)], 1)
        assert torch.equal(found[f"{EXPERTS}.w13_weight"], w13)
        assert torch.equal(found[f"{EXPERTS}.w2_weight"], _share(down, rank, 2, 0 if ep == 2 else 2))
        assert torch.equal(found[f"{LAYER}.mlp.experts.gate.weight"], hub[f"{LAYER}.mlp.gate.weight"])
        assert f"{LAYER}.mlp.gate.weight" not in found
    assert tx.diff(tmp_path / "hub", folder).equal


def test_a_tied_head_stands_for_the_embedding(tmp_path: Path) -> None:
    folder, hub = _converted(tmp_path, TIED, tp=2)
    found = _rank(folder, 1)
    assert torch.equal(found["lm_head.weight"][:32], hub["model.embed_tokens.weight"][64:])
    assert "model.embed_tokens.weight" not in found
    tx.convert(folder, tmp_path / "back", to="hf", sync=False)
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == hub.keys()


def test_files_are_split_into_parts(tmp_path: Path) -> None:
    folder, _ = _converted(tmp_path, tp=2, shard_size="10KB")
    for rank in range(2):
        sizes = [folder / f"model-rank-{rank}-part-{part}.safetensors" for part in range(4)]
        assert all(0 < sum(t.nbytes for t in load_file(path).values()) <= 10_000 for path in sizes)
    assert tx.diff(tmp_path / "hub", folder).equal
    (folder / "model-rank-1-part-2.safetensors").unlink()
    _refused(lambda: tx.open(folder), "INCOMPLETE", "files of rank 1 are missing")


def _saved(rank: int, world: int, folder: str) -> None:
    del rank, world
    torch.manual_seed(0)
    model = build(MOE, FSDP, meta=False)
    tx.save(model, f"{folder}/hub", to="hf", sync=False)
    for ep in (1, 2):
        tx.save(model, f"{folder}/live-{ep}", to=SHARDED, tp=2, ep=ep, sync=False, verify=True)


def test_a_trainer_of_several_ranks_saves_for_an_engine(tmp_path: Path) -> None:
    run(3, _saved, str(tmp_path))
    for ep in (1, 2):
        tx.convert(tmp_path / "hub", tmp_path / "converted", to=SHARDED, tp=2, ep=ep, sync=False, overwrite=True)
        for rank in range(2):
            name = f"model-rank-{rank}-part-0.safetensors"
            assert (tmp_path / f"live-{ep}" / name).read_bytes() == (tmp_path / "converted" / name).read_bytes()


def test_what_vllm_has_no_place_for_is_left_out_and_named(tmp_path: Path) -> None:
    path, hub = _hub(tmp_path, LLAMA)
    save_file({**hub, "model.layers.2.eh_proj.weight": torch.ones(2)}, f"{path}/model.safetensors")
    report = tx.convert(path, tmp_path / "sharded", to=SHARDED, sync=False)
    assert report.ignored == ("model.layers.2.eh_proj.weight",)
    assert "1 tensors are left out, such as model.layers.2.eh_proj.weight" in report.notes[0]
    assert "model.layers.2.eh_proj.weight" not in _rank(tmp_path / "sharded", 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp": 2, "ep": 3}, "divides experts over all of its 2"),
        ({"pp": 2}, "tensor and expert parallelism"),
        ({"tp": 3}, "does not divide over 3 ranks"),
        ({"to": f"{SHARDED}:hf"}, "looks for tensors of the dialect vllm"),
    ],
)
def test_what_vllm_could_not_read_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    path, _ = _hub(tmp_path, LLAMA)
    _refused(lambda: tx.convert(path, tmp_path / "sharded", **{"to": SHARDED, **options}), "UNSUPPORTED", text)
    assert not (tmp_path / "sharded").exists()


def test_a_family_whose_names_are_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = _hub(tmp_path, LLAMA)
    families = state_table().families
    monkeypatch.delitem(families, "llama")
    _refused(lambda: tx.convert(path, tmp_path / "sharded", to=SHARDED), "UNSUPPORTED", "llama")


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    path, _ = _hub(tmp_path, MOE | {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 128})
    convert = lambda: tx.convert(path, tmp_path / "sharded", to=SHARDED, encode="float8_block")  # noqa: E731
    _refused(convert, "UNSUPPORTED", "--decode bf16")


def test_a_folder_that_vllm_saved_is_refused(tmp_path: Path) -> None:
    folder, _ = _converted(tmp_path)
    path = folder / "model-rank-0-part-0.safetensors"
    save_file(load_file(path), path)
    (folder / "transaxle.json").unlink()
    _refused(lambda: tx.open(folder), "UNSUPPORTED", "vLLM saved it")


def _note(folder: Path, rank: int) -> tuple[Path, dict[str, Any]]:
    path = folder / f"model-rank-{rank}-part-0.safetensors"
    with safe_open(path, "pt") as file:
        return path, json.loads(file.metadata()["transaxle.rank"])


def _change(path: Path, note: dict[str, Any], tensors: Tensors | None = None) -> None:
    values = load_file(path) if tensors is None else tensors
    save_file(values, path, metadata={"format": "pt", "transaxle.rank": json.dumps(note)})
    path.with_name("transaxle.json").unlink(missing_ok=True)


def test_files_of_two_folders_are_refused(tmp_path: Path) -> None:
    folder, _ = _converted(tmp_path, tp=2)
    tx.convert(tmp_path / "hub", tmp_path / "four", to=SHARDED, tp=4, sync=False)
    shutil.copy(tmp_path / "four" / "model-rank-1-part-0.safetensors", folder)
    (folder / "transaxle.json").unlink()
    _refused(lambda: tx.open(folder), "CORRUPT", "of two conversions")


@pytest.mark.parametrize("ranks", [0, -1, 10**9])
def test_a_wrong_number_of_ranks_is_refused(ranks: int, tmp_path: Path) -> None:
    folder, _ = _converted(tmp_path, tp=2)
    for rank in range(2):
        path, note = _note(folder, rank)
        _change(path, note | {"ranks": ranks})
    with pytest.raises(tx.TransaxleError):
        tx.open(folder)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"shape": [128, 31]}, "SHAPE_MISMATCH"),
        ({"shape": [-128, 32]}, "CORRUPT"),
        ({"dim": 2}, "CORRUPT"),
        ({"dim": -1}, "CORRUPT"),
        ({"intervals": [[64, 32]]}, "CORRUPT"),
        ({"intervals": [[96, 160]]}, "CORRUPT"),
        ({"intervals": [[0, 64]]}, "INCOMPLETE"),
        ({"intervals": [[64.5, 128]]}, "CORRUPT"),
        ({"name": "model.norm.weight"}, "INCOMPLETE"),
    ],
)
def test_a_wrong_note_is_refused(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    folder, _ = _converted(tmp_path, tp=2)
    path, note = _note(folder, 1)
    note["tensors"]["lm_head.weight"] |= changes
    _change(path, note)
    _refused(lambda: tx.open(folder), code, "")


def test_copies_on_two_ranks_must_be_equal(tmp_path: Path) -> None:
    folder, _ = _converted(tmp_path, tp=2)
    path, note = _note(folder, 1)
    _change(path, note, load_file(path) | {"model.norm.weight": torch.zeros(32)})
    _refused(lambda: tx.convert(folder, tmp_path / "back", to="hf"), "UNEQUAL_COPIES", "model.norm.weight")
