"""`m_splits` in every form that it is given in, what is refused on the host, and what never leaves the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.nn.layers import EXPERTS, SPLITS, Unreadable, expected, layer, readable, rows, run
from transaxle.errors import TransaxleError
from transaxle.nn.grouped_tensor import splits

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int32": lambda numbers: torch.tensor(numbers, dtype=torch.int32),
    "int64": lambda numbers: torch.tensor(numbers, dtype=torch.int64),
    "device, int32": lambda numbers: Unreadable(torch.tensor(numbers, dtype=torch.int32)),
    "device, int64": lambda numbers: Unreadable(torch.tensor(numbers, dtype=torch.int64)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numbers", SPLITS, ids=str)
def test_all_forms_are_one(form: str, numbers: list[int]) -> None:
    made = layer()
    x = rows(made)
    found, wanted = run(made, x, FORMS[form](numbers)), expected(made, x, numbers)
    for name, one in found.items():
        torch.testing.assert_close(readable(one), wanted[name])


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("features", [(16, 24), (15, 23)])
def test_the_device_path_never_reads_back(single: bool, features: tuple[int, int]) -> None:
    """Forward and backward with numbers that raise when the host asks for them."""
    made = layer(
        in_features=features[0], out_features=features[1], single_grouped_weight=single, single_grouped_bias=single
    )
    given = Unreadable(torch.tensor([3, 0, 5, 2]))
    found = run(made, rows(made), given)
    assert all(isinstance(one, Unreadable) for one in found.values())  # so what came of the numbers was seen too


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "numpy", "__index__", "__int__", "__bool__"])
def test_the_detector_detects(read: str) -> None:
    given = Unreadable(torch.tensor([3, 0, 5, 2]))
    one = given.cumsum(0)[1]
    with pytest.raises(AssertionError, match="the host reads it"):
        getattr(one, read)()


def test_a_device_without_numbers_is_enough() -> None:
    """Fake tensors have shapes only: whatever asks for a number raises."""
    with FakeTensorMode():
        made = layer(params_dtype=torch.bfloat16)
        x = torch.randn(12, 16, dtype=torch.bfloat16, requires_grad=True)
        found = made(x, torch.zeros(EXPERTS, dtype=torch.int64))
        found.sum().backward()
        assert found.shape == (12, 24)
        assert x.grad is not None
        assert made.weight3.grad is not None


@pytest.mark.parametrize(
    ("given", "code", "why"),
    [
        ([3, 0, 5], "SHAPE_MISMATCH", "4 numbers, one per expert, not 3"),
        ([3, 0, -1, 2], "SHAPE_MISMATCH", "-1 rows for expert 2"),
        ([3, 0, 8, 2], "SHAPE_MISMATCH", "sums to 13, but the input has only 12"),
        (torch.tensor([3, 0, 5]), "SHAPE_MISMATCH", r"the shape \[4\], one number per expert, not \[3\]"),
        (torch.tensor([[3, 0, 5, 2]]), "SHAPE_MISMATCH", r"\[1, 4\]"),
        (torch.tensor([3, 0, -1, 2]), "SHAPE_MISMATCH", "-1 rows for expert 2"),
        (torch.tensor([3, 0, 8, 2]), "SHAPE_MISMATCH", "sums to 13"),
        (torch.tensor([3.0, 0, 5, 2]), "DTYPE_MISMATCH", "float32"),
        (Unreadable(torch.tensor([3, 0, 5])), "SHAPE_MISMATCH", r"the shape \[4\], one number per expert, not \[3\]"),
        ([3, 0, 5.5, 2], "DTYPE_MISMATCH", "whole numbers"),
        ([True, False, True, True], "DTYPE_MISMATCH", "whole numbers"),
        (list(torch.tensor([True, False, True, True])), "DTYPE_MISMATCH", "whole numbers"),
        ("3052", "DTYPE_MISMATCH", "whole numbers"),
        (None, "DTYPE_MISMATCH", "whole numbers"),
        ([float("nan"), 0, 5, 2], "DTYPE_MISMATCH", "whole numbers"),
    ],
    ids=range(15),
)
def test_what_the_host_sees_to_be_wrong_is_refused(given: Any, code: str, why: str) -> None:
    made = layer()
    with pytest.raises(TransaxleError, match=why) as caught:
        made(rows(made), given)
    assert caught.value.code == code


def test_numbers_of_the_host_are_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for given in ([3, 0, 5, 2], torch.tensor([3, 0, 5, 2])):
        with pytest.raises(
            TransaxleError, match="m_splits is on the host while a CUDA graph is being captured"
        ) as caught:
            splits(given, EXPERTS, 12, torch.device("cuda"))
        assert caught.value.code == "UNSUPPORTED"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([3, -2, 5, 2], [3, 0, 5, 2]),
        ([3, 0, 50, 2], [3, 0, 9, 0]),
        ([2**40, 1, 1, 1], [12, 0, 0, 0]),
        ([2**62, 2**62, 2**62, 2**62], [12, 0, 0, 0]),
        ([-1, -1, -1, -1], [0, 0, 0, 0]),
    ],
)
def test_wrong_numbers_on_the_device_lead_nowhere_outside(given: list[int], meant: list[int]) -> None:
    """They are not read, so they cannot be refused; rows that exist are all that they reach."""
    made = layer()
    x = rows(made)
    wanted = expected(made, x, meant)
    found = run(made, x, Unreadable(torch.tensor(given)))
    for name, one in found.items():
        torch.testing.assert_close(readable(one), wanted[name])
    split = splits(Unreadable(torch.tensor(given)), EXPERTS, 12, torch.device("cpu"))
    assert readable(split.offsets).tolist() == torch.tensor(meant).cumsum(0).tolist()
    assert split.counts is None
