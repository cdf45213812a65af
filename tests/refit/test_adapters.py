"""Adapters: an engine gets what peft's own merge gives, and the trainer's weights do not change."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.model.test_peft import CONFIGS, TARGETS, _base, _filled, _whole, _with
from tests.live.ranks import run
from tests.live.topologies import full
from tests.oracles.quiet import quiet

pytestmark = pytest.mark.filterwarnings("ignore")


def _merged(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = copy.deepcopy(model).merge_and_unload().state_dict()
    return found


KINDS: dict[str, Any] = {
    **{kind: CONFIGS[kind] for kind in ("lora", "embedding", "vera", "norms")},
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_while_pushing(kind: str) -> None:
    """Low-rank, with magnitudes, by factors, by rotations; with modules that are trained as a whole."""
    engine = _base(2)
    with quiet():
        model = _filled(peft.get_peft_model(_base(1), KINDS[kind]()), 1)
    refit = tx.Refit(model, engine, adapter="merged")
    for _ in range(2):
        before = _whole(model)
        refit.push()
        wanted, found = _merged(model), engine.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in found)
        after = _whole(model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)


def test_an_adapter_is_sent_alone() -> None:
    model, other = _with("lora", 1), _with("lora", 2)
    before = _whole(other)
    report = tx.Refit(model, other, adapter="alone").push()
    wanted, found = _whole(model), _whole(other)
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert changed == {name for name in found if "lora_" in name or ".modules_to_save." in name}
    assert all(torch.equal(found[name], wanted[name]) for name in changed)
    assert report.tensors == len(changed)


def _sharded(rank: int, world: int) -> float:
    """Merge under FSDP2; return how far the result is from that of one process."""
    engine = _base(2)
    model = _filled(peft.get_peft_model(_base(1), peft.LoraConfig(r=2, target_modules=TARGETS)), 1)
    wanted = _merged(model)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = {name: full(parameter) for name, parameter in model.named_parameters()}
    tx.Refit(model, engine, adapter="merged").push()
    assert all(torch.equal(full(parameter), before[name]) for name, parameter in model.named_parameters())
    found = engine.state_dict()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def test_an_adapter_is_merged_in_shards() -> None:
    assert max(run(2, _sharded)) < 1e-5


def test_a_source_without_adapters_is_reported() -> None:
    with pytest.raises(tx.TransaxleError, match="the source is no model of peft"):
        tx.Refit(_base(1), _base(2), adapter="merged")
    with pytest.raises(ValueError, match="adapter must be one of merged, alone"):
        tx.Refit(_base(1), _base(2), adapter="both")  # type: ignore[arg-type]  # that is the point
    model = _with("lora", 1)
    model.merge_adapter()
    with pytest.raises(tx.TransaxleError, match="its adapter is merged"):
        tx.Refit(model, _base(2), adapter="merged")


def _tied_model(seed: int, *, tied: bool) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("how", "one"),
    [
        ({"target_modules": ["embed_tokens"]}, False),
        ({"target_modules": ["lm_head"]}, False),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]}, True),
    ],
)
def test_an_adapter_on_tied_weights(how: dict[str, Any], *, one: bool) -> None:
    """If the adapter changes only one of both tied weights, only an engine with an untied head can take it."""
    model = peft.get_peft_model(_tied_model(1, tied=True), peft.LoraConfig(r=2, **how)).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
        tokens = torch.arange(10)[None]
        wanted = model(tokens).logits
        before = _whole(model)
        for tied in (True, False):
            engine = _tied_model(2, tied=tied)
            if tied and not one:
                with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES"):
                    tx.Refit(model, engine, adapter="merged")
                continue
            tx.Refit(model, engine, adapter="merged").push()
            torch.testing.assert_close(engine(tokens).logits, wanted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in _whole(model).items())


def test_adapters_of_two_parameters_of_one_module_are_all_merged() -> None:
    """The experts of a layer are one module, in which adapters lie around one another."""
    import transformers

    def base(seed: int) -> Any:
        torch.manual_seed(seed)
        config = transformers.MixtralConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=32, num_local_experts=4,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config)

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(base(1), peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
    before, engine = _whole(_filled(model, 1)), base(2)
    tx.Refit(model, engine, adapter="merged").push()
    wanted = _merged(model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in engine.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in _whole(model).items())
