"""Bytes between ranks, against a brute-force count: every element has a number, and torch and numpy cut for real."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import transaxle as tx
from tests.engine import demand_refusal
from tests.oracles import hub
from transaxle.engine.plan.rank_parts import engine_parts
from transaxle.engine.traffic import Cutter, Traffic, read_mesh, traffic
from transaxle.errors import Code, TransaxleError
from transaxle.families import builtin

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
TIED = LLAMA | {"tie_word_embeddings": True}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "tie_word_embeddings": False,
    "num_experts": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [1], "attention_bias": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 8, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}  # fmt: skip
EXPERTS = "experts."
Numbers = NDArray[np.int64]
Tensors = Mapping[str, torch.Tensor]
Held = list[dict[str, Numbers]]
"""Of each rank: name -> the numbers of the elements that it has."""


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hub folders in which every element has a number of its own, from one on."""
    folders = {}
    for name, config in CONFIGS.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        said, tensors = hub.make(config, 0)
        (folder / "config.json").write_text(json.dumps(said | config), "utf-8")
        begin, whole = 1, {}
        for key, tensor in tensors.items():
            whole[key] = torch.arange(begin, begin + tensor.numel()).reshape(tensor.shape)
            begin += tensor.numel()
        save_file(whole, folder / hub.WEIGHTS)
    return folders


def _whole(folder: Path, dialect: str) -> Tensors:
    with tx.open(folder) as checkpoint:
        return {name: torch.from_numpy(each.read().copy()) for name, each in checkpoint.as_dialect(dialect).items()}


def _chunk(tensor: torch.Tensor, parts: int, rank: int, dim: int = 0) -> torch.Tensor:
    chunks = tensor.chunk(parts, dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def _sharded(whole: Tensors, fsdp: int, ep: int, replicas: int = 1, expert_dim: int = 0) -> Held:
    """What FSDP2 leaves on each rank: of experts, what it has of those that ep gave; of others, over both."""
    ranks: Held = []
    for rank in range(fsdp * ep):
        held = {}
        for name, tensor in whole.items():
            if EXPERTS not in name or "shared" in name:
                held[name] = _chunk(tensor, fsdp * ep, rank).flatten().numpy()
                continue
            stacked = tensor.dim() == 3
            own = _chunk(tensor, ep, rank % ep) if stacked else tensor
            if not stacked:
                number, count = int(name.split(EXPERTS)[1].split(".")[0]), _count(whole, name)
                if number not in _chunk(torch.arange(count), ep, rank % ep):
                    continue
            held[name] = _chunk(own, fsdp, rank // ep, expert_dim).flatten().numpy()
        ranks.append(held)
    return ranks * replicas


def _count(whole: Tensors, name: str) -> int:
    before, after = name.split(EXPERTS)
    tail = after.partition(".")[2]
    return sum(each.startswith(before + EXPERTS) and each.endswith(tail) for each in whole)


def _served(folder: Path, config: Mapping[str, Any], tp: int, ep: int, replicas: int) -> Held:
    """What an engine's ranks have, as the tables say; these are compared with vLLM's own loader elsewhere."""
    whole = _whole(folder, "vllm")
    parts = engine_parts(builtin()[config["model_type"]], "vllm", config, whole, tp=tp, ep=ep)
    ranks: Held = []
    for rank in range(tp):
        held = {}
        for name, tensor in whole.items():
            part = parts[name]
            if part is not None:
                dim, positions = part
                taken = [torch.arange(start, stop) for start, stop in positions[rank]]
                tensor = tensor.index_select(dim, torch.cat([torch.arange(0), *taken]))
            held[name] = tensor.flatten().numpy()
        ranks.append(held)
    return ranks * replicas


def _joined(held: dict[str, Numbers]) -> Numbers:
    """All elements of a rank but padding."""
    found = np.unique(np.concatenate([*held.values(), np.zeros(1, np.int64)]))
    return found[found > 0]


def _counted(sources: Held, targets: Held) -> Numbers:
    own, wanted = [_joined(each) for each in sources], [_joined(each) for each in targets]
    return np.array([[len(np.intersect1d(a, b, assume_unique=True)) for b in wanted] for a in own])


def _planned(config: Mapping[str, Any], *sides: str, **options: Any) -> Traffic:
    (trainer, source), (engine, target) = (side.split(" ", 1) for side in sides)
    meshes = read_mesh(trainer, source), read_mesh(engine, target)
    return traffic(builtin()[config["model_type"]], config, meshes, axes={}, **options)


CASES = [
    ("llama", "torchtitan", (4, 1), (2, 1, 2)),
    ("moe", "transformers", (3, 4), (2, 2, 2)),
    ("moe", "automodel", (4, 2), (4, 1, 1)),
    ("deepseek", "hf", (3, 2), (2, 1, 2)),
]
CONFIGS = {"llama": LLAMA, "moe": MOE, "deepseek": DEEPSEEK}


@pytest.mark.parametrize(("model", "dialect", "trainer", "engine"), CASES)
def test_as_many_elements_as_both_ranks_have(
    model: str, dialect: str, trainer: tuple[int, int], engine: tuple[int, int, int], numbered: dict[str, Path]
) -> None:
    """Ten experts over three and four ranks, padded vocabulary, kv heads on several ranks, dense layers between."""
    config, (fsdp, ep), (tp, experts, replicas) = CONFIGS[model], trainer, engine
    planned = _planned(config, f"{dialect} fsdp={fsdp},ep={ep}", f"vllm replicas={replicas},tp={tp},ep={experts}")
    expected = _counted(
        _sharded(_whole(numbered[model], dialect), fsdp, ep), _served(numbered[model], config, tp, experts, replicas)
    )
    precise = _precise(config, expected, planned)
    np.testing.assert_array_equal(planned.matrix, expected * 2 + precise)
    assert planned.trainer_only == planned.undecided == ()


def _precise(config: Mapping[str, Any], expected: Numbers, planned: Traffic) -> Any:
    """Bytes of what is not cast with the rest: DeepSeek's bias of the router."""
    if config["model_type"] != "deepseek_v3":
        return 0
    more = planned.matrix - expected * 2
    biases = (config["num_hidden_layers"] - 1) * config["n_routed_experts"] * 2
    assert (more >= 0).all()
    assert (more.sum(axis=0) == biases).all()
    return more


def test_of_replicas_each_gives_an_equal_share(numbered: dict[str, Path]) -> None:
    alone = _planned(LLAMA, "hf fsdp=3", "vllm tp=2")
    twice = _planned(LLAMA, "hf replicate=2,fsdp=3", "vllm tp=2")
    np.testing.assert_array_equal(twice.matrix[:3] + twice.matrix[3:], alone.matrix)
    assert abs(twice.matrix[:3] - twice.matrix[3:]).max() <= 60
    inside = _planned(LLAMA, "hf fsdp=3,replicate=2", "vllm tp=2")
    np.testing.assert_array_equal(inside.matrix[::2], twice.matrix[:3])


def test_experts_may_be_cut_along_another_dim(numbered: dict[str, Path]) -> None:
    planned = _planned(MOE, "transformers fsdp=3,ep=2,expert_dim=1", "vllm tp=2")
    sources = _sharded(_whole(numbered["moe"], "transformers"), 3, 2, expert_dim=1)
    np.testing.assert_array_equal(planned.matrix, _counted(sources, _served(numbered["moe"], MOE, 2, 1, 1)) * 2)


def test_what_a_rank_has_itself_is_not_sent(numbered: dict[str, Path]) -> None:
    apart, same = (_planned(MOE, "hf fsdp=2,ep=2", "vllm replicas=2,tp=2", together=each) for each in (False, True))
    np.testing.assert_array_equal(same.matrix, apart.matrix)
    assert (same.between_ranks.diagonal() == 0).all()
    assert same.total + same.own == apart.total
    assert same.within(4) == same.total
    assert same.within(1) == 0
    assert apart.within(4) == 0
    assert apart.within(8) == apart.total


def test_tensor_parallel_trainer_and_stages(numbered: dict[str, Path]) -> None:
    """What each stage has is what is asked of it, and each of its ranks what the tables say."""
    planned = _planned(MOE, "megatron pp=2,fsdp=2,tp=2", "vllm pp=2,tp=2")
    alone = _planned(MOE, "hf ", "vllm tp=2")
    assert planned.total == alone.total
    assert planned.parameters == alone.parameters
    received = planned.matrix.sum(axis=0)
    np.testing.assert_array_equal(received[:2] + received[2:], alone.matrix.sum(axis=0))
    # Both sides have two of the three layers in their first stage, so stages have nothing for each other.
    assert planned.matrix[:4, 2:].sum() == planned.matrix[4:, :2].sum() == 0


def test_stages_that_do_not_divide_are_as_long_as_each_framework_makes_them() -> None:
    """The first ones of a trainer are longer; vLLM's before the last, from behind."""
    family = builtin()["llama"]
    sides = Cutter(family, read_mesh("megatron", "pp=4")), Cutter(family, read_mesh("vllm", "pp=4"))
    stages = [[side.stage(layer, 10) for layer in range(10)] for side in sides]
    assert stages == [[0, 0, 0, 1, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]]


def test_a_tied_embedding_is_in_the_first_and_the_last_stage() -> None:
    one, two = (_planned(TIED, "megatron pp=2", f"vllm pp={pp}") for pp in (1, 2))
    assert two.tensors["embed"] == 2 * one.tensors["embed"]
    assert two.parameters == one.parameters


@pytest.mark.parametrize(
    ("sides", "code", "said"),
    [
        (("hf fsdp=2", "vllm tp=3"), "UNSUPPORTED", "does not divide"),
        (("hf fsdp=2", "vllm tp=2,ep=4"), "UNSUPPORTED", "ep=4"),
        (("hf tp=x", "vllm tp=2"), "UNKNOWN_AXIS", "DIM=SIZE"),
        (("hf fsdp=2,fsdp=2", "vllm tp=2"), "UNKNOWN_AXIS", "twice"),
        (("hf replicas=2", "vllm tp=2"), "UNKNOWN_AXIS", "no dim of the mesh of hf"),
        (("hf fsdp=999999", "vllm tp=2"), "UNSUPPORTED", "more than"),
        (("hf fsdp=65536", "vllm replicas=4096,tp=2"), "UNSUPPORTED", "pairs of ranks"),
        (("hf fsdp=2,expert_dim=2", "vllm tp=2"), "UNSUPPORTED", "has no dim 2"),
        (("megatron_dist fsdp=2,pp=2", "vllm tp=2"), "UNSUPPORTED", "for some of them only"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(sides: tuple[str, str], code: Code, said: str) -> None:
    with demand_refusal(code, said) as caught:
        _planned(MOE, *sides)
    assert caught.value.refusals[0].hint


def test_a_config_that_leaves_matrices_open_is_refused() -> None:
    """Whether there are biases is noted; whether there are experts is too much to leave open."""
    short = {key: value for key, value in MOE.items() if key != "attention_bias"}
    assert _planned(short, "hf fsdp=2", "vllm tp=2").undecided == ("k_bias", "o_bias", "q_bias", "v_bias")
    open_ = {key: value for key, value in MOE.items() if key != "mlp_only_layers"}
    with pytest.raises(TransaxleError, match=r"does not say whether the model has down, .*: it lacks mlp_only_layers"):
        _planned(open_, "hf fsdp=2", "vllm tp=2")


def test_a_key_that_is_null_says_that_there_is_none() -> None:
    """DeepSeek-V2-Lite: queries are not compressed."""
    planned = _planned(DEEPSEEK | {"q_lora_rank": None}, "hf fsdp=2", "vllm tp=2")
    assert planned.tensors["q_nope"] == 3 * 4 * 8 * 32 * 2
    assert "q_a" not in planned.tensors
    assert planned.undecided == ()
