"""The predicate: every condition of it, printed, forced, and with splits that are on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.nn.layers import ROWS, Unreadable, expected, layer, readable, rows, run
from transaxle.errors import TransaxleError
from transaxle.nn import kernel_choice as module
from transaxle.nn.grouped_tensor import read_back
from transaxle.nn.kernel_choice import path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
H200, B200, A100, RTX = (9, 0), (10, 0), (8, 0), (12, 0)


@pytest.mark.parametrize(
    ("dtype", "device", "features", "capability", "why"),
    [
        (torch.bfloat16, CPU, (24, 16), None, None),
        (torch.float16, CPU, (24, 16), None, None),
        (torch.float32, CPU, (23, 15), None, None),
        (torch.float64, CPU, (24, 16), None, "not torch.float64"),
        (torch.float32, CPU, (0, 16), None, "have no elements"),
        (torch.float32, CPU, (24, 0), None, "have no elements"),
        (torch.bfloat16, CUDA, (24, 16), H200, None),
        (torch.bfloat16, CUDA, (24, 16), B200, None),
        (torch.bfloat16, CUDA, (24, 16), A100, r"\(8, 0\) torch copies the offsets"),
        (torch.bfloat16, CUDA, (24, 16), RTX, r"\(12, 0\) torch copies the offsets"),
        (torch.float16, CUDA, (24, 16), H200, "not torch.float16"),
        (torch.float32, CUDA, (24, 16), H200, "not torch.float32"),
        (torch.bfloat16, torch.device("xpu"), (24, 16), None, "no grouped product on xpu"),
    ],
    ids=str,
)
def test_each_condition(
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[int, int],
    capability: tuple[int, int] | None,
    why: str | None,
) -> None:
    found = path(dtype, device, features, capability=capability)
    assert found.way == ("grouped" if why is None else "per_expert")
    if why is None:
        assert found.against == ()
        assert str(found) == "grouped (chosen): no obstacle to a grouped product"
    else:
        with pytest.raises(TransaxleError, match=why):
            path(dtype, device, features, capability=capability, forced="grouped")
        assert "per_expert (chosen)" in str(found)
    assert path(dtype, device, features, capability=capability, forced="per_expert").way == "per_expert"


def test_the_capability_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_capability", lambda index: A100 if index == 1 else H200)
    assert path(torch.bfloat16, torch.device("cuda", 1), (24, 16)).way == "per_expert"
    assert path(torch.bfloat16, torch.device("cuda", 0), (24, 16)).way == "grouped"


@pytest.mark.parametrize("said", [{"params_dtype": torch.float64}, {"in_features": 0}, {"out_features": 0}], ids=str)
def test_a_device_m_splits_works_where_the_condition_fails(said: dict[str, Any]) -> None:
    """One copy to the host, and the same results: here the numbers are on a CPU, but only reachable by that copy."""
    made = layer(**said)
    x = rows(made, dtype=said.get("params_dtype", torch.float32))
    assert made.path(x).way == "per_expert"
    reads = Counted(torch.tensor([3, 0, 5, 2]))
    found, wanted = run(made, x, reads), expected(made, x, [3, 0, 5, 2])
    assert reads.times == 1
    for name, one in found.items():
        torch.testing.assert_close(readable(one), wanted[name], rtol=0, atol=0)


def test_a_device_m_splits_works_where_the_user_forces_the_other_way() -> None:
    made = layer()
    x = rows(made)
    wanted = expected(made, x, [3, 0, 5, 2])
    assert str(made.path(x)).startswith("grouped (chosen)")
    made.force_path("per_expert")
    assert str(made.path(x)).startswith("per_expert (forced)")
    reads = Counted(torch.tensor([3, 0, 5, 2]))
    found = run(made, x, reads)
    assert reads.times == 1
    for name, one in found.items():  # the same kernel as the loop, biases included
        torch.testing.assert_close(readable(one), wanted[name], rtol=0, atol=0)
    assert made.force_path(None).path(x).way == "grouped"
    with pytest.raises(TransaxleError, match="a grouped product is not possible"):
        layer(params_dtype=torch.float64).force_path("grouped")(x.double(), [3, 0, 5, 2])
    with pytest.raises(TransaxleError, match="no way 'faster'"):
        made.force_path("faster")  # type: ignore[arg-type]


def test_wrong_numbers_are_read_as_the_device_takes_them() -> None:
    made = layer().force_path("per_expert")
    x = rows(made)
    found, wanted = run(made, x, Counted(torch.tensor([3, -2, 50, 2]))), expected(made, x, [3, 0, 9, 0])
    for name, one in found.items():
        torch.testing.assert_close(readable(one), wanted[name], rtol=0, atol=0)


def test_no_copy_to_the_host_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(TransaxleError, match="a CUDA graph is being captured") as caught:
        read_back(OnCuda(), ROWS)
    assert caught.value.code == "UNSUPPORTED"


class Counted(Unreadable):
    """Numbers on the device, of which copies to the host are counted."""

    READS = frozenset()
    times = 0

    def tolist(self) -> Any:
        """The one copy."""
        type(self).times += 1
        return self.hidden.tolist()

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(hidden)
        type(self).times = 0


class OnCuda:
    """As much of a CUDA tensor as is looked at before it is read."""

    device = CUDA

    def tolist(self) -> list[int]:
        """Must not be called."""
        raise AssertionError("the host reads it")
