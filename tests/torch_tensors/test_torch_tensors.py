"""Strided copies against a walk over the elements, bytes of tensors, and models in wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.oracles.quiet import quiet
from transaxle.axes.geometry import BoxCopy, row_major
from transaxle.axes.notation.name import CHECKPOINTED, COMPILED, FSDP1, own_name
from transaxle.live.load import load
from transaxle.live.model.state_tensors import leaves, own_config
from transaxle.torch_tensors import (
    as_bytes,
    assemble_boxes,
    byte_view,
    copy_box,
    copy_box_back,
    flat,
    innermost,
    same_bytes,
    stack_view,
    unwrap,
    with_plain_bytes,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


@st.composite
def moves(draw: st.DrawFn) -> BoxCopy:
    """A box that is cut out of one array and goes into another, its dims in any order."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    order = draw(st.permutations(range(len(sizes))))
    wider = [size + draw(st.integers(0, 2)) for size in sizes]
    source, target = row_major(wider), row_major([sizes[dim] for dim in order])
    loops = tuple((sizes[dim], source[dim], step) for dim, step in zip(order, target, strict=True))
    return BoxCopy(draw(st.integers(0, 5)), draw(st.integers(0, 5)), loops)


def _walked(move: BoxCopy) -> list[tuple[int, int]]:
    """The oracle: (place in the source, place in the target) of every element."""
    pairs = [(move.source_offset, move.target_offset)]
    for count, step, into in move.loops:
        pairs = [(a + i * step, b + i * into) for a, b in pairs for i in range(count)]
    return pairs


def _numbers(count: int, dtype: torch.dtype, first: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.arange(first, first + count) % 3 == 0
    if dtype.itemsize == 1:
        return (torch.arange(first, first + count) % 120).to(torch.uint8).view(dtype)
    return torch.arange(first, first + count).to(dtype)


@given(moves(), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 3))
def test_each_element_goes_to_its_place(move: BoxCopy, dtype: torch.dtype, back: bool, offset: int) -> None:
    """Also between tensors that begin inside of their storages, and the other way."""
    pairs = _walked(move)
    ends = [max(pair[side] for pair in pairs) + 1 for side in (0, 1)]
    source = _numbers(ends[0] + offset, dtype, 1)[offset:]
    target = _numbers(ends[1] + offset, dtype, 60)[offset:]
    wanted_source, wanted_target = source.clone(), target.clone()
    for a, b in pairs:
        if back:
            wanted_source[a] = target[b]
        else:
            wanted_target[b] = source[a]
    (copy_box_back if back else copy_box)(move, source, target)
    assert torch.equal(source.view(torch.uint8), wanted_source.view(torch.uint8))
    assert torch.equal(target.view(torch.uint8), wanted_target.view(torch.uint8))


def test_what_no_box_fills_is_zero() -> None:
    rows = torch.arange(6.0)
    made = assemble_boxes((3, 4), rows.dtype, rows.device, [(BoxCopy(0, 0, ((2, 3, 4), (3, 1, 1))), rows)])
    assert made.tolist() == [[0, 1, 2, 0], [3, 4, 5, 0], [0, 0, 0, 0]]
    whole = assemble_boxes((6,), rows.dtype, rows.device, [(BoxCopy(0, 0, ((6, 1, 1),)), rows)])
    assert torch.equal(whole, rows)
    assert assemble_boxes((2, 3), rows.dtype, torch.device("meta"), [(BoxCopy(0, 0, ((6, 1, 1),)), rows)]).is_meta


def test_flat_shares_storage_where_it_can() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert flat(tensor[1:]).data_ptr() == tensor[1:].data_ptr()
    assert flat(tensor.T).tolist() == tensor.T.reshape(-1).tolist()
    assert not flat(torch.nn.Parameter(tensor)).requires_grad


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_tensors_one_after_the_other_are_one(shape: tuple[int, ...]) -> None:
    buffer = torch.arange(24.0)
    size = torch.Size(shape).numel()
    members = [buffer[3 + i * size : 3 + (i + 1) * size].view(shape) for i in range(3)]
    view = stack_view(members[0], 3)
    assert torch.equal(view, torch.stack(members))
    view[2].zero_()
    assert not members[2].any()


# Equal bytes: types, shapes and every pattern of a NaN count; strides and devices do not.

NAN, OTHER_NAN = 0x7FC00000, 0x7FC00001


def _float(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def test_every_pattern_of_a_nan_is_a_value_of_its_own() -> None:
    """Numbers that compare equal, or never do, are told apart by their bits."""
    assert same_bytes(_float(NAN), _float(NAN))
    assert not same_bytes(_float(NAN), _float(OTHER_NAN))
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_types_and_shapes_count_and_strides_do_not() -> None:
    """The same bytes of another type or shape are another tensor."""
    square = torch.arange(6.0).reshape(2, 3)
    assert same_bytes(square.T, square.T.contiguous())
    assert not same_bytes(square, square.reshape(3, 2))
    assert not same_bytes(square, square.view(torch.int32))
    assert same_bytes(torch.empty(0), torch.empty(0))


def test_what_has_no_memory_does_not_differ() -> None:
    """On the meta device only type and shape are known."""
    assert same_bytes(torch.empty(2, device="meta"), torch.zeros(2))
    assert not same_bytes(torch.empty(2, device="meta"), torch.zeros(3))


def test_views_share_the_memory() -> None:
    """What is written into the bytes is in the tensor."""
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    as_bytes(tensor)[:] = 0xFF
    assert bool((byte_view(tensor) == 0xFF).all())
    assert byte_view(torch.empty(0, dtype=torch.bfloat16)).numel() == 0
    assert with_plain_bytes(tensor) is tensor
    assert with_plain_bytes(torch.zeros(1, dtype=torch.float8_e4m3fn)).dtype == torch.uint8


# Wrapped modules: the model below what torch puts around it, and its tensors by their own names.


class _Configured(nn.Linear):
    config = None


class _Config:
    def to_dict(self) -> dict[str, int]:
        return {"hidden_size": 2}


def _compiled(model: nn.Module) -> nn.Module:
    with quiet():
        compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


def test_torch_keeps_the_module_where_we_look_for_it() -> None:
    """The attributes are also the segments that wrappers put into names."""
    model = nn.Linear(2, 2)
    assert _compiled(model)._modules[COMPILED] is model
    assert checkpoint_wrapper(model)._modules[CHECKPOINTED] is model
    assert own_name(f"{COMPILED}.a.{CHECKPOINTED}.b.{FSDP1}.c") == "a.b.c"


def test_a_compiled_model_is_the_model() -> None:
    """Nothing is left of compilation; the checkpoint wrapper goes where only the class is asked for."""
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = _compiled(model)
    wrapped = checkpoint_wrapper(compiled)
    assert unwrap(compiled) is model
    assert unwrap(wrapped) is wrapped
    assert innermost(wrapped) is model
    assert innermost(nn.Sequential()) is not None
    assert leaves(compiled).tensors.keys() == leaves(model).tensors.keys()


def test_the_class_of_the_model_is_its_architecture_whatever_is_around_it() -> None:
    """A wrapper's class is not what config.json names."""
    model = _Configured(2, 2)
    model.config = _Config()  # type: ignore[assignment]
    for module in (model, _compiled(model), checkpoint_wrapper(model)):
        assert own_config(module) == {"hidden_size": 2, "architectures": ["_Configured"]}


def _net(kind: str, seed: int) -> nn.Module:
    """A model of no known family, with wrappers around some of its modules."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    if kind == "inside":
        inner[0] = checkpoint_wrapper(_compiled(inner[0]))
    return nn.Sequential(nn.Linear(3, 4), _compiled(inner) if kind == "inner" else inner)


@pytest.mark.oracle
@pytest.mark.parametrize("before", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("stored", ["", "inner", "inside"])
def test_a_state_dict_is_loaded_whatever_wrappers_either_side_has(stored: str, before: str, tmp_path: Path) -> None:
    """Into models and into state dicts, of a family that no table knows."""
    source = _net(stored, 0)
    truth = list(source.parameters())
    torch.save({before + name: tensor for name, tensor in source.state_dict().items()}, tmp_path / "model.pt")
    for kind in ("", "inner", "inside"):
        model, compiled, state = _net(kind, 1), _compiled(_net(kind, 2)), _net(kind, 3).state_dict()
        for target in (model, compiled, state):
            load(target, tmp_path / "model.pt")
        for values in (model.parameters(), compiled.parameters(), state.values()):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(values, truth, strict=True))
