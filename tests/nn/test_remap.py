"""State dicts of grouped layers, packed or per expert, into layers of either form; loaded whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run
from tests.nn.layers import EXPERTS, SINGLE, SPLITS, layer, rows, stacked
from tests.quant.kinds import MORE, raw
from transaxle.errors import TransaxleError, refuse
from transaxle.nn import GroupedLinear
from transaxle.quant import MXFP8, Float8Block, QuantizedTensor, Quantizer, kernels
from transaxle.quant.entries import entries
from transaxle.torch_tensors import local_of

MULTI: dict[str, Any] = {}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PREFIXES = ["", "0.", "block.experts.fc1."]
State = dict[str, Any]


def _equal(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        assert one.shape == wanted[name].shape
        assert one.dtype == wanted[name].dtype
        assert torch.equal(raw(one), raw(wanted[name])), name


def _nested(made: nn.Module, prefix: str) -> nn.Module:
    """A module in which the layer's names have a prefix."""
    for part in reversed(prefix.split(".")[:-1]):
        made = nn.ModuleDict({part: made})
    return made


def _quantized(recipe: Quantizer, seed: int = 0, **said: Any) -> GroupedLinear:
    return layer(seed, in_features=64, out_features=64, params_dtype=torch.bfloat16, recipe=recipe, bias=False, **said)


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was dequantized during the test."""
    calls: list[str] = []

    def counted(name: str, real: Any) -> Any:
        def count(*args: Any, **said: Any) -> Any:
            calls.append(name)
            return real(*args, **said)

        return count

    monkeypatch.setattr(kernels, "dequantize", counted("kernel", kernels.dequantize))
    monkeypatch.setattr(QuantizedTensor, "dequantize", counted("tensor", QuantizedTensor.dequantize))
    return calls


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_packed_into_experts_and_back(dtype: torch.dtype, prefix: str, strict: bool, assign: bool) -> None:
    many, one = (layer(seed, params_dtype=dtype, **form) for seed, form in enumerate((MULTI, SINGLE)))
    again, state = layer(7, params_dtype=dtype), many.state_dict()
    for target, given, wanted in ((one, state, stacked(state)), (again, stacked(state), state)):
        told = {f"{prefix}{name}": value for name, value in given.items()}
        keys = _nested(target, prefix).load_state_dict(told, strict=strict, assign=assign)
        assert keys.missing_keys == keys.unexpected_keys == []
        _equal(target.state_dict(), wanted)
    x = rows(many, dtype=dtype)
    assert torch.equal(again(x, SPLITS[0]), one(x, SPLITS[0]))


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("assign", [True, False])
def test_raw_quantized_conversion(kind: str, assign: bool, dequantized: list[str]) -> None:
    """TransformerEngine dequantizes, or refuses: here codes, scales and histories move, and nothing is computed."""
    many, one, again = (_quantized(MORE[kind], seed, single_grouped_weight=seed == 1) for seed in range(3))
    state = {name: value.clone() for name, value in many.state_dict().items()}
    assert f"weight3{'_scale_inv'}" in state
    dequantized.clear()
    one.load_state_dict(state, assign=assign)
    _equal(one.state_dict(), stacked(state))
    again.load_state_dict(one.state_dict(), assign=assign)
    _equal(again.state_dict(), state)
    for parameter in (*one.parameters(), *again.parameters()):
        assert isinstance(parameter, QuantizedTensor)
        assert isinstance(parameter, nn.Parameter)
    assert dequantized == []
    assert torch.equal(one.weight[2].dequantize(), many.weight2.dequantize())
    assert dequantized


@pytest.mark.parametrize("kind", MORE)
def test_quantized_tensors_in_a_state_dict(kind: str, dequantized: list[str]) -> None:
    """A dict of parameters, not of their entries."""
    many, one = _quantized(MORE[kind], 0), _quantized(MORE[kind], 1, single_grouped_weight=True)
    dequantized.clear()
    one.load_state_dict(dict(many.named_parameters()))
    _equal(one.state_dict(), stacked(many.state_dict()))
    back = _quantized(MORE[kind], 2)
    back.load_state_dict(dict(one.named_parameters()))
    _equal(back.state_dict(), many.state_dict())
    assert dequantized == []


def test_mxfp8_cross_format() -> None:
    """Codes go into parameters of the same format only, packed or not: into another they would be other numbers."""
    state = _quantized(MXFP8()).state_dict()
    for form in (MULTI, {"single_grouped_weight": True}):
        other = _quantized(Float8Block(), 1, **form)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(TransaxleError, match="DTYPE_MISMATCH"):
            other.load_state_dict(state)
        _equal(other.state_dict(), before)
        plain = layer(in_features=64, out_features=64, params_dtype=torch.bfloat16, bias=False, **form)
        with pytest.raises(TransaxleError, match=r"codes of torch\.float8_e4m3fn, but the parameter is torch\.bfl"):
            plain.load_state_dict(state, strict=False)
    both = _quantized(MXFP8(columnwise=True), 1, single_grouped_weight=True)
    with pytest.raises(TransaxleError, match="MISSING_TENSOR"):
        both.load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", [MULTI, SINGLE], ids=str)
def test_assign_keeps_the_class_without_aliasing(form: dict[str, bool], strict: bool) -> None:
    """TransformerEngine's `assign=True` replaces the class, and makes experts share memory."""
    source = layer(1)
    for state in (source.state_dict(), stacked(source.state_dict())):
        made = layer(2, **form)
        kinds = {name: type(parameter) for name, parameter in made.named_parameters()}
        made.load_state_dict(state, assign=True, strict=strict)
        assert {name: type(parameter) for name, parameter in made.named_parameters()} == kinds
        for name in [name for name, _ in made.named_parameters()]:
            others = {other: value.clone() for other, value in made.state_dict().items() if other != name}
            with torch.no_grad():
                getattr(made, name).fill_(9)
            _equal({other: made.state_dict()[other] for other in others}, others)


@pytest.mark.parametrize("single", [False, True])
def test_assigned_experts_that_are_one_tensor_do_not_alias(single: bool) -> None:
    """All begin alike (upcycling): the state dict holds one matrix N times, or expanded."""
    for kind in ("mxfp8", "float8 delayed"):
        state = _quantized(MORE[kind], 1, single_grouped_weight=single).state_dict()
        for name in state:
            alike = state[name][:1].expand(state[name].shape) if single else state[name.replace("1", "0")]
            state[name] = alike
        made = _quantized(MORE[kind], 2, single_grouped_weight=single)
        made.load_state_dict(state, assign=True)
        first, second = (made.weight[0], made.weight[1]) if single else (made.weight0, made.weight1)
        before = {name: raw(buffer).clone() for name, buffer in second.components.items()}
        assert all(torch.equal(raw(first.components[name]), buffer) for name, buffer in before.items())
        with torch.no_grad():
            first.copy_(torch.full((64, 64), 3.0, dtype=torch.bfloat16))
        assert all(torch.equal(raw(buffer), before[name]) for name, buffer in second.components.items())


@pytest.mark.parametrize("form", [MULTI, SINGLE], ids=str)
def test_biases_that_are_absent_are_missed_and_superfluous_ones_told(form: dict[str, bool]) -> None:
    state = layer(1).state_dict()
    without = {name: value for name, value in state.items() if name.startswith("weight")}
    made = layer(2, **form)
    with pytest.raises(RuntimeError, match="Missing key"):
        made.load_state_dict(without)
    found = made.load_state_dict(without, strict=False)
    assert found.missing_keys == [name for name, _ in made.named_parameters() if name.startswith("bias")]
    plain = layer(2, bias=False, single_grouped_weight=bool(form))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain.load_state_dict(state)
    assert len(plain.load_state_dict(state, strict=False).unexpected_keys) == EXPERTS


def test_sequential_remap() -> None:
    """TransformerEngine's operation containers number their layers; every layer reads its own names."""

    class Ops(nn.Sequential):
        """A container that keeps its layers in a list of operations, as `te.ops.Sequential` does."""

        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.operations = nn.ModuleList([nn.ModuleDict({"op": one}) for one in layers])

    for container in (nn.Sequential, lambda *layers: nn.ModuleList(layers), Ops):
        many, one, again = (
            container(layer(seed, **form), layer(seed + 10, in_features=24, out_features=16, **form))
            for seed, form in enumerate((MULTI, SINGLE, MULTI))
        )
        state = many.state_dict()
        one.load_state_dict(state)
        _equal(one.state_dict(), stacked(state))
        again.load_state_dict(one.state_dict())
        _equal(again.state_dict(), state)


def test_a_checkpoint_of_meta_tensors_is_of_the_right_form() -> None:
    with torch.device("meta"):
        many, one = GroupedLinear(EXPERTS, 16, 24), GroupedLinear(EXPERTS, 16, 24, **SINGLE)
    one.load_state_dict(many.state_dict(), assign=True)
    assert one.weight.is_meta
    assert one.weight.shape == (EXPERTS, 24, 16)


# A state dict of a whole model: all of it is loaded, or nothing, on one rank and on several.


def model(seed: int) -> nn.Module:
    """Three grouped layers, one of them quantized, between others that torch loads by itself."""
    torch.manual_seed(seed)
    grouped = tx.nn.GroupedLinear
    layers = nn.Sequential(
        nn.Linear(32, 32), grouped(4, 32, 32), grouped(4, 32, 64, recipe=MXFP8()), nn.BatchNorm1d(8),
        grouped(4, 64, 32, **SINGLE),
    )  # fmt: skip
    with torch.no_grad():
        for buffer in layers.buffers():
            buffer.add_(seed)
    return layers


def values(made: nn.Module) -> State:
    """Copies of all that a model holds, codes and scales too."""
    found: State = {}
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        parts = entries(tensor) if isinstance(local_of(tensor), tx.quant.QuantizedTensor) else {"": tensor}
        found |= {f"{name}{rest}": local_of(part.detach()).clone() for rest, part in parts.items()}
    return found


def equal(one: State, two: State) -> bool:
    """Whether the same names have the same bytes."""
    return one.keys() == two.keys() and all(torch.equal(raw(value), raw(two[name])) for name, value in one.items())


def conflicting(state: State) -> None:
    """Give the last layer both forms of a weight, which differ."""
    for expert in range(4):
        state[f"4.weight{expert}"] = torch.zeros(32, 64)


def of_other_shape(state: State) -> None:
    """Give the last layer a bias that is too long."""
    state["4.bias"] = torch.zeros(4, 33)


def lacking(state: State) -> None:
    """Leave out a tensor of the last layer."""
    del state["4.weight"]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("spoil", [conflicting, of_other_shape, lacking])
def test_what_the_last_layer_refuses_changes_no_layer(spoil: Callable[[State], None], assign: bool) -> None:
    made, state = model(1), dict(model(2).state_dict())
    spoil(state)
    before, objects = values(made), dict(made.named_parameters())
    with pytest.raises((TransaxleError, RuntimeError)) as found:
        tx.nn.load_state_dict(made, state, assign=assign)
    assert "4." in str(found.value)
    assert equal(values(made), before)
    assert all(parameter is objects[name] for name, parameter in made.named_parameters())
    # torch's own has changed the layers before by then.
    with pytest.raises((TransaxleError, RuntimeError)):
        made.load_state_dict(state, assign=assign)
    assert not equal(values(made), before)


@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_what_the_module_loads(assign: bool) -> None:
    made, other = model(1), model(2)
    found = tx.nn.load_state_dict(made, other.state_dict(), assign=assign)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert equal(values(made), values(other))
    state = {name: tensor for name, tensor in model(3).state_dict().items() if not name.startswith("0.")}
    found = tx.nn.load_state_dict(made, {**state, "other": torch.zeros(1)}, strict=False, assign=assign)
    assert (found.missing_keys, found.unexpected_keys) == (["0.weight", "0.bias"], ["other"])
    assert torch.equal(made.get_parameter("0.weight"), other.get_parameter("0.weight"))


def _one_rank_refuses(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    made, other = model(1), model(2)
    for layers in (made, other):
        for one in (layers[0], layers[1], layers[4]):  # type: ignore[index]
            fully_shard(one, mesh=mesh)
    state, before = dict(other.state_dict()), values(made)
    whole = dict(state)
    if rank == world - 1:
        del state["4.weight"]
    with pytest.raises(RuntimeError, match=r"4\.weight") as found:
        tx.nn.load_state_dict(made, state)
    assert f"This is rank {world - 1}" in str(found.value.__notes__)
    assert equal(values(made), before)
    tx.nn.load_state_dict(made, whole)
    assert equal(values(made), values(other))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "broadcast_object_list"):  # these unpickle
            patch.setattr(dist, name, None)
        if rank == world - 1:

            def refused(*_: object, **__: object) -> None:
                raise refuse("IO", "no such disk", file="x", tensor="4.weight", hint="Wait.")

            patch.setattr(made, "load_state_dict", refused)
        with pytest.raises(tx.TransaxleError, match="no such disk") as other_found:
            tx.nn.load_state_dict(made, whole)
    said = other_found.value
    assert (said.code, str(said.where), said.hint) == ("IO", "x · 4.weight", "Wait.")


def test_what_one_rank_refuses_no_rank_loads() -> None:
    run(2, _one_rank_refuses)
