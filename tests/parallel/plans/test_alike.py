"""What all ranks compute alike stays alike: dropout, types under autocast, experts in a narrower type."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.live.ranks import run
from tests.parallel.models import CONFIGS, build, tokens
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.save import save
from transaxle.parallel.cutting import clip_grad_norm_
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.torch_tensors import local_of


def _streams(rank: int, world: int) -> list[Tensor]:
    """The residual stream at the end of layers that drop, on ranks that are seeded differently, and its gradient."""
    config = {**CONFIGS["phi3"], "resid_pdrop": 0.3, "attention_dropout": 0.2}
    model = deepcopy(tensor_parallel(build(config), init_device_mesh("cpu", (world,))))
    found: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda *said: found.append(said[2].detach()))  # type: ignore[union-attr]
    torch.manual_seed(rank)
    ids = tokens(config)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    model.eval()
    model(input_ids=ids)
    grad: Tensor = model.model.norm.weight.grad  # type: ignore[union-attr,assignment]
    return [*found, local_of(grad)]


def test_all_ranks_drop_the_same() -> None:
    one, two, three = run(3, _streams)
    for each in (two, three):
        assert all(torch.equal(a, b) for a, b in zip(one, each, strict=True))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], one[2])


def _types(model: nn.Module, ids: Tensor) -> list[torch.dtype]:
    """Types of what the layers give under autocast."""
    found: list[torch.dtype] = []
    handles = [
        module.register_forward_hook(lambda *said: found.append(said[2].dtype))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return found


def _narrow(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    whole = build(CONFIGS["llama"])
    cut = tensor_parallel(deepcopy(whole), mesh)
    ids = tokens(CONFIGS["llama"])
    assert _types(cut, ids) == _types(whole, ids)
    # 24 columns are whole multiples of 16 bytes in bf16, 12 are none: the cut ones must not be what torch refuses.
    config = {**CONFIGS["mixtral"], "hidden_size": 48, "intermediate_size": 24}
    experts = tensor_parallel(build(config), mesh).to(torch.bfloat16)
    wanted = build(config).to(torch.bfloat16)(input_ids=ids).logits
    assert (experts(input_ids=ids).logits - wanted).abs().max() < 0.1 * wanted.abs().max()
    cut(input_ids=ids, labels=ids).loss.backward()
    cut.adapter = nn.Parameter(torch.ones(3))
    assert clip_grad_norm_(cut, 1e9) > 0
    cut.adapter.grad = torch.ones(3)
    with pytest.raises(TransaxleError) as caught:
        clip_grad_norm_(cut, 1.0)
    return str(caught.value)


def test_narrower_types_and_parameters_that_came_later() -> None:
    for said in run(2, _narrow):
        assert "1 parameters with gradients were added after the model was cut: adapter" in said


def _apart(rank: int, world: int) -> list[str]:
    mesh, config = init_device_mesh("cpu", (world,)), CONFIGS["llama"]
    plan = {"model.layers.0.mlp.*": "replicate"} if rank else "auto"
    frozen = build(config)
    frozen.lm_head.weight.requires_grad_(rank == 0)  # type: ignore[union-attr]
    noisy = build({**CONFIGS["mixtral"], "router_jitter_noise": 0.1})
    between = build(config)
    between.model.layers[0].mlp.drop = nn.Dropout(0.1)  # type: ignore[union-attr,index]
    empty = build(config).to("meta") if rank else build(config)
    wrong = build(config), {"nothing.here": "row"} if rank else "auto"
    said = []
    for model, rules in (
        (empty, "auto"), (build(config), plan), (frozen, "auto"), wrong, (noisy, "auto"), (between, "auto"),
    ):  # fmt: skip
        with pytest.raises(TransaxleError) as caught:
            tensor_parallel(model, mesh, rules)  # type: ignore[arg-type]
        assert type(model.lm_head) is nn.Linear
        said.append(str(caught.value))
    return said


def test_ranks_that_say_different_things() -> None:
    one, two = run(2, _apart)
    assert one == two
    texts = (
        "parameters have values on some ranks, but none on others",
        "5 parameters are cut or trained differently on rank 1",
        "lm_head.weight",
        "nothing.here",
        "jitter_noise=0.1: each rank would draw other noise",
        "model.layers.0.mlp.drop",
    )
    for text, said in zip(texts, one, strict=True):
        assert text in said


def _unseeded(rank: int, world: int) -> tuple[float, float]:
    """How far a model is from the first rank's that each rank began with values of its own, and then from another's."""
    config, mesh = CONFIGS["phi3"], init_device_mesh("cpu", (world,))
    ids = tokens(config)
    cut, first, other = tensor_parallel(build(config, seed=rank), mesh), build(config, seed=0), build(config, seed=7)
    begun = (cut(input_ids=ids).logits - first(input_ids=ids).logits).abs().max()
    before = {name: type(local_of(parameter)) for name, parameter in cut.named_parameters()}
    cut.load_state_dict(other.state_dict(), assign=bool(rank))
    assert before == {name: type(local_of(parameter)) for name, parameter in cut.named_parameters()}
    return float(begun), float((cut(input_ids=ids).logits - other(input_ids=ids).logits).abs().max())


def test_values_of_its_own_and_whole_ones_given_to_every_rank() -> None:
    assert max(max(each) for each in run(3, _unseeded)) < 1e-5


def _from_meta(rank: int, world: int, path: str) -> float:
    """Gemma's embedding has a buffer that no file holds, and a row of padding that only one rank holds."""
    config = CONFIGS["gemma3"]
    whole = build(config)
    save(whole, path, to="hf")
    with torch.device("meta"):
        model = type(whole)(whole.config)
    tensor_parallel(model, init_device_mesh("cpu", (world,)))
    load(model, path)
    ids = tokens(config)
    wanted = whole(input_ids=ids).logits
    return float((model(input_ids=ids).logits - wanted).abs().max() / wanted.abs().max())


def test_a_model_that_has_no_storage_yet(tmp_path: Path) -> None:
    assert max(run(2, _from_meta, str(tmp_path / "hub"))) < 1e-5
