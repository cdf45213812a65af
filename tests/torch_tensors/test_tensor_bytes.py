"""Equal bytes: types, shapes and every pattern of a NaN count; strides and devices do not."""

from __future__ import annotations

import torch

from transaxle.torch_tensors import as_bytes, byte_view, same_bytes, with_plain_bytes

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
