"""Plans that are refused, what must be equal on all ranks, and guards against taking a part for the whole."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from tests.live.ranks import run
from tests.parallel.models import CONFIGS, EVEN, build, tokens
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.save import save
from transaxle.parallel.cutting import clip_grad_norm_
from transaxle.parallel.tensor_parallel import check_type, tensor_parallel
from transaxle.parallel.tp_plan import Plan, Role, make_plan, read
from transaxle.torch_tensors import local_of

QUERY, KEY, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qko")
ATTENTION = "model.layers.*.self_attn.*"


def _plan(config: dict[str, Any], ranks: int, rules: Any = None) -> Plan:
    model = build(config)
    return make_plan(model, read(model), ranks, rules)


def _refused(config: dict[str, Any], ranks: int, rules: Any = None) -> str:
    with pytest.raises(TransaxleError) as caught:
        _plan(config, ranks, rules)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rules", "ranks", "said"),
    [
        ({QUERY: "row"}, 2, (QUERY, "row would cut dim 1 of [64, 32]", "axis d of 32", "allows: g in dim 0")),
        ({OUT: "column"}, 2, (OUT, "column would cut dim 0 of [32, 64]", "allows: g in dim 1")),
        ({"model.layers.9.mlp.up_proj": "column"}, 2, ("model.layers.9.mlp.up_proj", "no such module")),
        ({"model.layers.*.attn.q_proj": "column"}, 2, ("no such module", "the closest is")),
        ({QUERY: "columns"}, 2, ("there is no kind of cut 'columns'", "column, vocabulary, row")),
        ({QUERY: "replicate"}, 2, (QUERY, "g=4 is cut in", "in all or none")),
        ({QUERY: ("column", (20, 44))}, 2, (QUERY, "20 rows on rank 0 are 1.25 times the 16 rows of one g")),
        ({QUERY: ("column", (32, 16))}, 2, ("widths [2, 1] do not divide g=4 over 2 ranks",)),
        (
            {QUERY: ("column", (16, 48)), KEY: ("column", (16, 16))},
            2,
            ("divide g=4 in different ways", "[1, 3]", "[2, 2]"),
        ),
        (None, 9, ("(g r)=4x2=8 cannot be divided over 9 ranks", "without cutting through one")),
    ],
)
def test_wrong_plans(rules: Any, ranks: int, said: tuple[str, ...]) -> None:
    message = _refused(EVEN, ranks, rules)
    for text in said:
        assert text in message


def test_all_problems_at_once() -> None:
    message = _refused(EVEN, 2, {QUERY: "row", "nothing.here": "column", OUT: "sideways"})
    assert all(text in message for text in ("row would cut", "nothing.here", "'sideways'"))


def test_outputs_that_a_vector_scales_are_not_summed() -> None:
    """Dory's head has a vector beside its matrix: ranks would add up the logits of different words."""
    layers = {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0}
    assert "not known how to cut a DoryLMHead" in _refused({**EVEN, **layers, "model_type": "dory"}, 2)


def test_what_rules_may_say() -> None:
    rules = {
        ATTENTION: "replicate",
        "model.embed_tokens": "hidden",
        "lm_head": "hidden",
        "model.layers.0.mlp.up_proj": ("column", (8, 40)),
    }
    plan = _plan(EVEN, 2, rules)
    held = {cut.weight.name: cut.positions_by_rank for cut in plan.cuts}
    assert held[f"{QUERY}.weight"] == (((0, 64),), ((0, 64),))
    assert held["model.layers.0.mlp.down_proj.weight"] == (((0, 8),), ((8, 48),))
    assert held["model.layers.1.mlp.down_proj.weight"] == (((0, 24),), ((24, 48),))
    assert plan.roles["model.embed_tokens"] is Role.HIDDEN
    assert plan.roles["lm_head"] is Role.SLICED
    assert plan.heads == ()


def test_a_tied_parameter_is_cut_in_one_way() -> None:
    for found in run(2, _tied):
        assert "it is the same parameter as model.embed_tokens.weight" in found


def _tied(rank: int, world: int) -> str:
    model = build(CONFIGS["gemma3"])
    before = deepcopy(model.state_dict())
    with pytest.raises(TransaxleError) as caught:
        tensor_parallel(model, init_device_mesh("cpu", (world,)), {"lm_head": "replicate"})
    assert model.state_dict().keys() == before.keys()
    assert type(model.lm_head) is nn.Linear
    with pytest.raises(TransaxleError, match=r"one of its dims|takes one"):
        tensor_parallel(model, init_device_mesh("cpu", (world, 1)))
    tensor_parallel(model, init_device_mesh("cpu", (world,)))
    with pytest.raises(TransaxleError, match="already cut"):
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
    return str(caught.value)


def _of_another_type(rank: int, world: int, config: dict[str, Any]) -> str:
    model = build(config)
    with pytest.raises(TransaxleError) as caught:
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
    return str(caught.value)


def test_a_type_of_which_nobody_has_shown_that_it_can_be_cut() -> None:
    """Heads of this one work in pairs: by the table alone it would be cut, and compute something else."""
    for said in run(2, _of_another_type, {**EVEN, "model_type": "diffllama"}):
        assert "models of type diffllama are not cut over ranks" in said
    check_type(build(EVEN))
    check_type(nn.Sequential(nn.Linear(2, 2)))


def test_models_of_which_too_little_is_known() -> None:
    model = build(EVEN)
    model.model.adapter = nn.Linear(4, 4)  # type: ignore[union-attr]
    with pytest.raises(TransaxleError, match="no line for it") as caught:
        read(model)
    assert {refusal.where.tensor for refusal in caught.value.refusals} == {"model.adapter.weight", "model.adapter.bias"}
    with pytest.raises(TransaxleError, match="UNKNOWN_FAMILY"):
        read(nn.Sequential(nn.Linear(2, 2)))
    model = build(EVEN)
    setattr(model.config, "num_key_value_heads", 2)  # noqa: B010 - a module has no such attribute, for mypy
    with pytest.raises(TransaxleError, match=r"expected \[16, 32\] by the model's config, got \[32, 32\]"):
        read(model)


# What all ranks compute alike stays alike: dropout, types under autocast, experts in a narrower type.


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
    # Every token goes to all experts, because rounding may decide between two that score nearly the same.
    config = {**CONFIGS["mixtral"], "hidden_size": 48, "intermediate_size": 24}
    config["num_experts_per_tok"] = config["num_local_experts"]
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
        "5 parameters are cut or trained differently on rank 1", "lm_head.weight", "nothing.here",
        "jitter_noise=0.1: each rank would draw other noise", "model.layers.0.mlp.drop",
    )  # fmt: skip
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


# What would take a part for the whole without a word: refused, or pickled as the ordinary tensor that it is.

TAKEN = "part of a parameter, which torch's checkpoint would take for the whole"


def _state(rank: int, world: int, out: str) -> dict[str, str]:
    model = tensor_parallel(build(CONFIGS["llama"]), init_device_mesh("cpu", (world,)), dtensor=False)
    state = model.state_dict()
    dcp_save({name: torch.ones(value.shape) for name, value in state.items()}, checkpoint_id=f"{out}/whole")
    said = {}
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: dcp_save(state, checkpoint_id=f"{out}/saved"),
        "clones": lambda: dcp_save({k: v.cpu().clone() for k, v in state.items()}, checkpoint_id=f"{out}/clones"),
        "load": lambda: dcp_load(state, checkpoint_id=f"{out}/whole"),
        "async": lambda: dcp_async(state, checkpoint_id=f"{out}/later").result(),  # type: ignore[union-attr]
    }
    for name, call in calls.items():
        with pytest.raises(CheckpointException) as caught:
            call()
        said[name] = str(caught.value)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    for name, value in model.named_parameters():
        assert type(again[name]) is torch.Tensor
        assert torch.equal(again[name], value.detach())
        assert torch.equal(deepcopy(state[name]), value.detach())
    model.load_state_dict({name: value + 1 for name, value in again.items()})
    assert all(torch.equal(value.detach(), again[name] + 1) for name, value in model.named_parameters())
    return said


def test_state_dict_of_a_model_for_deepspeed(tmp_path: object) -> None:
    for said in run(2, _state, str(tmp_path)):
        assert all(TAKEN in message for message in said.values()), said


def _torch_asks(rank: int, world: int, config: dict[str, Any], dtensor: bool, out: str) -> list[str]:
    """What torch's functions say of a cut model and its optimizer; what they do not refuse is right."""
    mesh = init_device_mesh("cpu", (world,))
    model = tensor_parallel(build(config), mesh, dtensor=dtensor)
    model = deepcopy(model)
    optimizer = AdamW(model.parameters())
    calls: dict[str, Callable[[], Any]] = {
        "weights": lambda: get_model_state_dict(model),
        "optimizer": lambda: get_optimizer_state_dict(model, optimizer),
        "both": lambda: get_state_dict(model, optimizer),
        "full": lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    }
    for method, words in (("save_pretrained", out), ("resize_token_embeddings", 128)):
        with pytest.raises(TransaxleError, match=f"{method} would take this rank's part"):
            getattr(model, method)(words)
    said = []
    for name, call in calls.items():
        try:
            call()
        except TransaxleError as error:
            said.append(f"{name}: {error}")
    if not any(each.startswith("weights") for each in said):
        dcp_save(get_model_state_dict(model), checkpoint_id=out)
        other = tensor_parallel(build(config, 1), mesh)
        state = get_model_state_dict(other)
        dcp_load(state, checkpoint_id=out)
        set_model_state_dict(other, state)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(local_of(one), local_of(two)) for one, two in pairs)
    return said


def test_state_that_torch_would_take_for_the_whole(tmp_path: Path) -> None:
    """Nothing of an even model, the optimizer's state of one that has parts, all of a model for DeepSpeed."""
    lacking = {}
    for kind, config, dtensor in (
        ("even", EVEN, True),
        ("parts", CONFIGS["phi3"], True),
        ("deepspeed", CONFIGS["llama"], False),
    ):
        answers = run(2, _torch_asks, config, dtensor, str(tmp_path / kind))
        assert answers[0] == answers[1]
        assert all("its moments, for the whole" in said and "model." in said for said in answers[0]), answers
        lacking[kind] = [said.partition(":")[0] for said in answers[0]]
    assert lacking == {
        "even": [],
        "parts": ["optimizer", "both", "full"],
        "deepspeed": ["weights", "optimizer", "both", "full"],
    }
