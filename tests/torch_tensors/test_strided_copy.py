"""Strided copies: against a walk over the elements, one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transaxle.axes.geometry import BoxCopy, row_major
from transaxle.torch_tensors import assemble_boxes, copy_box, copy_box_back, flat, stack_view

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
