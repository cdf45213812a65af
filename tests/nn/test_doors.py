"""What a checkpoint of grouped layers may be, through every way into a model; each test goes through all of them.

The sets of experts that are refused, both forms at once, tensors packed in other ways, what TransformerEngine keeps
beside, histories of scaling.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import full
from tests.nn.layers import EXPERTS, FORMS, SPLITS, forms, layer, rows, stacked
from tests.quant.kinds import KINDS, MORE, raw
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear
from transaxle.quant import DelayedScaling, QuantizedTensor
from transaxle.torch_tensors import local_of

State = dict[str, Any]
ODD = ("mxfp8, both ways", "nvfp4, 16x16, both ways")
"""Quantizers with more buffers than the five kinds have."""
Door = Callable[[nn.Module, State, Path, bool], None]
AT = "blocks.0.fc1."
"""What stands before the names of the layer."""


def _by_module(model: nn.Module, state: State, path: Path, strict: bool) -> None:
    found = model.load_state_dict(state, strict=strict)
    assert not found.missing_keys


def _by_safetensors(model: nn.Module, state: State, path: Path, strict: bool) -> None:
    held = {name: value.contiguous() for name, value in state.items() if isinstance(value, torch.Tensor)}
    save_file(held, path.with_suffix(".safetensors"))
    assert not tx.load(model, path.with_suffix(".safetensors"), strict=strict).missing


def _by_torch_file(model: nn.Module, state: State, path: Path, strict: bool) -> None:
    torch.save(state, path.with_suffix(".pt"))
    assert not tx.load(model, path.with_suffix(".pt"), strict=strict).missing


def _saved(state: State, path: Path) -> str:
    if not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            dcp_save(dict(state), checkpoint_id=str(path))
    return str(path)


def _by_dcp(model: nn.Module, state: State, path: Path, strict: bool) -> None:
    assert not tx.load(model, _saved(state, path), strict=strict).missing


def _by_planner(model: nn.Module, state: State, path: Path, strict: bool) -> None:
    asked = model.state_dict()
    before = dict(asked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            planner = tx.LoadPlanner(allow_partial_load=not strict)
            dcp_load(asked, checkpoint_id=_saved(state, path), planner=planner)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
    assert list(asked) == list(before)
    assert all(asked[name] is value for name, value in before.items())


DOORS: dict[str, Door] = {
    "load_state_dict": _by_module, "safetensors": _by_safetensors, "torch file": _by_torch_file, "dcp": _by_dcp,
    "planner": _by_planner,
}  # fmt: skip
doors = pytest.mark.parametrize("door", DOORS)


class Model(nn.Module):
    """A grouped layer in a block, and another module."""

    def __init__(self, form: str, seed: int, **said: Any) -> None:
        super().__init__()
        said = {**FORMS[form], **said}
        if not said.get("bias", True):
            said["single_grouped_bias"] = False
        self.blocks = nn.ModuleList([nn.ModuleDict({"fc1": layer(seed, **said)})])
        self.norm = nn.LayerNorm(8)
        nn.init.normal_(self.norm.weight, generator=torch.Generator().manual_seed(seed))

    def held(self) -> dict[str, torch.Tensor]:
        """Copies of all that is in it."""
        return {name: value.clone() for name, value in self.state_dict().items()}


def _same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(raw(value), raw(wanted[name])), name


def _load(door: str, form: str, state: State, path: Path, **said: Any) -> Model:
    """Load into a new model twice, without `strict` and with it; the state dict is left as it is."""
    kept, told = dict(state), getattr(state, "_metadata", None)
    made = Model(form, 9, **said)
    DOORS[door](made, state, path, False)
    once = made.held()
    DOORS[door](made, state, path, True)
    _same(made.state_dict(), once)
    assert list(state) == list(kept)
    assert all(state[name] is value for name, value in kept.items())
    assert getattr(state, "_metadata", None) is told
    return made


def _refused(door: str, form: str, state: State, path: Path, **said: Any) -> list[TransaxleError]:
    """Errors of a load with `strict` and one without, neither of which has written anything."""
    errors = []
    for strict in (True, False):
        made = Model(form, 9, **said)
        before = made.held()
        with pytest.raises(TransaxleError) as caught:
            DOORS[door](made, state, path, strict)
        own = made.state_dict()
        if door == "load_state_dict":  # torch loads module after module
            own, before = ({n: v for n, v in one.items() if n.startswith(AT)} for one in (own, before))
        _same(own, before)
        errors.append(caught.value)
    return errors


def _experts(count: int = EXPERTS, **said: Any) -> State:
    """A checkpoint with a name for each expert, of any number of them."""
    state = Model("experts", 1, **said).held()
    assert count <= EXPERTS + 1
    for name in [name for name in state if f"{EXPERTS - 1}" in name.rpartition(".")[2]]:
        if count < EXPERTS:
            del state[name]
        elif count > EXPERTS:
            state[name.replace(f"{EXPERTS - 1}", f"{EXPERTS}")] = state[name] + 1
    return state


def _unpacked(state: State) -> State:
    """A state dict with the experts of each buffer in one tensor, taken apart."""
    found: State = {}
    for name, value in state.items():
        stem, _, rest = name.removeprefix(AT).partition("_")
        members = {f"{AT}{stem}{place}{'_' if rest else ''}{rest}": value[place] for place in range(EXPERTS)}
        found |= {name: value} if "norm" in name else members
    return found


@doors
@forms
def test_another_number_of_experts_is_refused_naming_both(door: str, form: str, tmp_path: Path) -> None:
    for number, count in enumerate((EXPERTS - 1, EXPERTS + 1)):
        for error in _refused(door, form, _experts(count), tmp_path / f"{number}"):
            assert {refusal.code for refusal in error.refusals} == {"SHAPE_MISMATCH"}
            assert sorted(str(refusal.where) for refusal in error.refusals) == [f"{AT}bias", f"{AT}weight"]
            assert all(f"has {count} experts, the layer {EXPERTS}" in one.message for one in error.refusals)
            assert all(one.hint for one in error.refusals)
        for error in _refused(door, form, stacked(_experts(count)), tmp_path / f"packed {number}"):
            assert {refusal.code for refusal in error.refusals} == {"SHAPE_MISMATCH"}
            said = str(error)
            shapes = f"[{EXPERTS}, 24, 16]" in said and f"[{count}, 24, 16]" in said
            assert f"has {count} experts, the layer {EXPERTS}" in said or shapes


@doors
@forms
def test_some_of_the_experts_are_refused_naming_those_that_lack(door: str, form: str, tmp_path: Path) -> None:
    state = _experts()
    del state[f"{AT}weight1"], state[f"{AT}weight2"]
    for error in _refused(door, form, state, tmp_path / "holes"):
        assert [(one.code, one.where.tensor) for one in error.refusals] == [("INCOMPLETE", f"{AT}weight")]
        assert "experts 1, 2 of 4 are missing" in error.refusals[0].message
    state = _experts()
    del state[f"{AT}weight{EXPERTS - 1}"]
    for error in _refused(door, form, state, tmp_path / "last"):
        assert "has 3 experts, the layer 4; 3 are missing" in str(error)


@pytest.mark.oracle
@doors
@forms
def test_both_forms_are_accepted_where_they_are_equal(door: str, form: str, tmp_path: Path) -> None:
    said = _quantized("mxfp8")
    state = _experts(**said)
    wanted = state if form == "experts" else stacked(state)
    both = {**state, **stacked(state)}
    some = {name: value for name, value in both.items() if "1" not in name.rpartition(".")[2]}
    for given, path in ((both, "both"), (some, "some")):
        _same(_load(door, form, given, tmp_path / path, **said).state_dict(), wanted)
    of_one = [name for name in state if "2" in name.rpartition(".")[2]]
    assert len(of_one) == 2  # codes and scales
    unlike = {**both, **{name: _changed(both[name]) for name in of_one}}
    for error in _refused(door, form, unlike, tmp_path / "unlike", **said):
        told = [(one.code, one.message.partition("\n")[0]) for one in error.refusals]
        names = [(name.replace("2", ""), name) for name in of_one]
        assert sorted(told) == sorted(
            ("UNEQUAL_COPIES", f"{single} and {name} both hold expert 2") for single, name in names
        )


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    """The same but for its last bit."""
    made = tensor.clone()
    raw(made).view(-1)[-1] ^= 1
    return made


def _quantized(kind: str) -> dict[str, Any]:
    return {"in_features": 64, "out_features": 32, "params_dtype": torch.bfloat16, "recipe": KINDS[kind], "bias": False}


@doors
@forms
def test_experts_below_each_other_and_biases_as_columns(door: str, form: str, tmp_path: Path) -> None:
    state = _experts()
    packed = stacked(state)
    weight, bias = packed[f"{AT}weight"], packed[f"{AT}bias"]
    for number, biases in enumerate((bias, bias[:, None], bias.reshape(-1))):
        given = OrderedDict({**packed, f"{AT}weight": weight.flatten(0, 1), f"{AT}bias": biases.clone()})
        given._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
        made = _load(door, form, given, tmp_path / f"{number}")
        _same(made.state_dict(), state if form == "experts" else packed)
    fewer = {**packed, f"{AT}weight": weight[:3].flatten(0, 1), f"{AT}bias": bias[:3, None]}
    for error in _refused(door, form, fewer, tmp_path / "fewer"):
        assert [refusal.message for refusal in error.refusals] == ["the checkpoint has 3 experts, the layer 4"] * 2
    said = _quantized("mxfp8")
    state = _experts(**said)
    below = {name: value if "norm" in name else value.flatten(0, 1) for name, value in stacked(state).items()}
    made = _load(door, form, below, tmp_path / "codes", **said)
    _same(made.state_dict(), state if form == "experts" else stacked(state))
    if door != "planner":  # it converts nothing
        plain, said = {**said, "recipe": None}, {**said, "recipe": KINDS["nvfp4"]}
        state = stacked(_experts(**plain))
        below = {name: value if "norm" in name else value.flatten(0, 1) for name, value in state.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that values are quantized
            made, wanted = _load(door, form, below, tmp_path / "values", **said), Model(form, 2, **said)
            wanted.load_state_dict(state)
        _same(made.state_dict(), wanted.state_dict())


LEGACY = pickle.dumps({"scale_fwd": [1.0], "amax_history_fwd": [0.0]})
"""What earlier releases of TransformerEngine kept: a pickle."""
HOSTILE = b"cos\nsystem\n(S'touch %s'\ntR."
"""A pickle that runs a command."""


@pytest.mark.oracle
@doors
@forms
def test_what_transformer_engine_keeps_beside_is_never_opened(door: str, form: str, tmp_path: Path) -> None:
    """Missing is what all other tests have; here it is empty, a tensor of bytes, bytes, or a stream of bytes."""
    ran = tmp_path / "ran"
    hostile = HOSTILE.replace(b"%s", str(ran).encode())
    state = _experts()
    for number, extra in enumerate(
        (None, torch.frombuffer(bytearray(hostile), dtype=torch.uint8), io.BytesIO(LEGACY), hostile)
    ):
        given = {**state, f"{AT}_extra_state": extra}
        made = _load(door, form, given, tmp_path / f"{number}")
        _same(made.state_dict(), state if form == "experts" else stacked(state))
    assert not ran.exists()


@pytest.mark.oracle
@doors
@pytest.mark.parametrize("single", [True, False])
def test_histories_of_scaling_are_left_aside_or_begin_anew(door: str, single: bool, tmp_path: Path) -> None:
    """Codes and scales of delayed and current scaling are of one kind: either takes the other's as they are."""
    form = "packed" if single else "experts"
    delayed, current = _quantized("float8 delayed"), _quantized("float8")
    for stored in FORMS:
        for number, (there, here) in enumerate(((delayed, current), (current, delayed))):
            state = Model(stored, 1, **there).held()
            wanted = state if stored == form else (stacked(state) if single else _unpacked(state))
            found = _load(door, form, state, tmp_path / f"{number} {stored}", **here).held()
            history = {name: found.pop(name) for name in list(found) if name not in wanted}
            assert len(history) == (0 if here is current else 2 if single else 2 * EXPERTS)
            assert not any(value.any() for value in history.values())
            _same(found, {name: wanted[name] for name in found})
        longer = {**delayed, "recipe": DelayedScaling(length=8)}
        for error in _refused(door, form, Model(stored, 1, **longer).held(), tmp_path / f"long {stored}", **delayed):
            assert {refusal.code for refusal in error.refusals} == {"SHAPE_MISMATCH"}
            assert "amax_history" in str(error)


@pytest.mark.parametrize("kind", ["plain", *KINDS, *ODD])
def test_a_layer_loads_its_own_checkpoint_in_every_configuration(kind: str, tmp_path: Path) -> None:
    """Weights and biases in either form, the layer built, emptied or on the meta device; and into the other form."""
    for number, (single, bias, single_bias) in enumerate(product((False, True), (True, False), (False, True))):
        if single_bias and not bias:
            continue
        said: dict[str, Any] = {
            **_quantized("nvfp4"), "bias": bias, "recipe": MORE.get(kind), "single_grouped_weight": single,
            "single_grouped_bias": single_bias,
        }  # fmt: skip
        source = layer(1, **said)
        if isinstance(said["recipe"], DelayedScaling):  # a history that is not that of the beginning
            for one in (one for one in source.parameters() if isinstance(one, QuantizedTensor)):
                one.data.copy_(one.dequantize() * 2)
        state = {name: value.clone() for name, value in source.state_dict().items()}
        x = rows(source, dtype=torch.bfloat16)
        wanted = source(x, SPLITS[0])
        torch.save(state, tmp_path / f"{number}.pt")
        tx.save(source, tmp_path / f"{number}", to="safetensors:identity")
        for how in ("built", "emptied", "assigned", "built, transaxle", "meta, transaxle"):
            made = GroupedLinear(EXPERTS, **said, device="cpu" if how.startswith("built") else "meta")
            if how == "emptied":
                made.to_empty(device="cpu")
            if how.endswith("transaxle"):
                assert not tx.load(made, tmp_path / f"{number}").missing
            else:
                stored = torch.load(tmp_path / f"{number}.pt", weights_only=True, map_location="cpu")
                made.load_state_dict(stored, assign=how == "assigned")
            assert not any(one.is_meta for one in made.parameters())
            _same(made.state_dict(), state)
            assert torch.equal(made(x, SPLITS[0]), wanted)
        other = layer(
            2, **{**said, "single_grouped_weight": not single, "single_grouped_bias": bias and not single_bias}
        )
        other.load_state_dict(torch.load(tmp_path / f"{number}.pt", weights_only=True))
        assert torch.equal(other(x, SPLITS[0]), wanted)


@forms
@pytest.mark.parametrize("packed", [True, False])
def test_a_state_dict_that_is_filled_stays_the_dict_it_was(form: str, packed: bool, tmp_path: Path) -> None:
    stored = stacked(_experts()) if packed else _experts()
    save_file(stored, tmp_path / "state.safetensors")
    state = Model(form, 9).state_dict()
    kept, told = dict(state), dict(state._metadata)  # type: ignore[attr-defined]
    for _ in range(2):
        tx.load(state, tmp_path / "state.safetensors")
        assert list(state) == list(kept)
        assert all(state[name] is value for name, value in kept.items())
        assert state._metadata == told  # type: ignore[attr-defined]
        _same(state, stacked(_experts()) if form == "packed" else _experts())


@forms
def test_what_else_lacks_is_no_reason_to_leave_experts_out(form: str, tmp_path: Path) -> None:
    """Without `strict`, names that only one side has do not keep grouped layers from being read in the other form."""
    state = _experts()
    stored = stacked(state) if form == "experts" else state
    del stored["norm.weight"]
    save_file({**stored, "other": torch.ones(3)}, tmp_path / "state.safetensors")
    made = Model(form, 9)
    report = tx.load(made, tmp_path / "state.safetensors", strict=False)
    assert report.missing == ("norm.weight",)
    assert report.unexpected == ("other",)
    wanted = {**(state if form == "experts" else stacked(state)), "norm.weight": Model(form, 9).norm.weight.detach()}
    _same(made.state_dict(), wanted)
    with pytest.raises(TransaxleError) as caught:
        tx.load(made, tmp_path / "state.safetensors")
    assert {refusal.where.tensor for refusal in caught.value.refusals} == {"norm.weight", "other"}


def _shared_out(rank: int, world: int, path: str) -> None:
    """Each rank has two of four experts: all ranks together see other counts, both forms fill the right parts."""
    mesh = init_device_mesh("cpu", (world,))
    state = _experts()
    both = {**state, **stacked(state)}
    given = {
        "one": state,
        "more": _experts(EXPERTS + 1),
        "both": both,
        "conflict": {**both, f"{AT}weight3": both[f"{AT}weight3"] + 1},
    }
    at = {name: Path(path) / name for name in given}
    for name, one in given.items():
        dcp_save(dict(one), checkpoint_id=str(at[name]))
    for form in FORMS:
        made = Model(form, 9)
        fc1 = made.get_submodule(AT.rstrip("."))
        assert isinstance(fc1, GroupedLinear)
        fc1.divide(mesh)
        before = made.held()
        with pytest.raises(TransaxleError, match=f"has {EXPERTS + 1} experts, the layer {EXPERTS}"):
            _by_planner(made, {}, at["more"], True)
        if form == "packed":
            with pytest.raises(TransaxleError, match="weight3 both hold expert 3"):
                _by_planner(made, {}, at["conflict"], True)
        own, before = ({n: local_of(v) for n, v in state.items()} for state in (made.state_dict(), before))
        _same(own, before)
        _by_planner(made, {}, at["both" if form == "packed" else "one"], True)
        wanted = state if form == "experts" else stacked(state)
        found = made.state_dict()
        for name, value in found.items():
            assert torch.equal(full(value), wanted[name]), name
        assert len(found) == (4 if form == "packed" else EXPERTS + 2)


def test_experts_shared_out_are_counted_on_all_ranks_together(tmp_path: Path) -> None:
    run(2, _shared_out, str(tmp_path))
