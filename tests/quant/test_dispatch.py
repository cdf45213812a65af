"""The table of operations in the documentation, cell by cell, and torch functions on quantized tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional

from tests.live.ranks import run
from tests.quant.kinds import KINDS, MORE, raw, same, values
from tests.some import a, some
from transaxle.errors import TransaxleError
from transaxle.quant import Float8CurrentScaling, NVFP4BlockScaling, QuantizedTensor, Quantizer, quantize_
from transaxle.quant.quantizers import ROUNDING

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "quantized-tensor.md"
ROWS, COLUMNS = 256, 384
Operation = Callable[[torch.Tensor], object]


def _other(q: torch.Tensor) -> QuantizedTensor:
    """The same values in codes of another type."""
    return Float8CurrentScaling(code="F8_E5M2").quantize(values(ROWS, COLUMNS))


def _twin(q: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Another tensor: quantized in the same way if this one is quantized."""
    x = values(ROWS, COLUMNS, seed=seed)
    return q.quantizer.quantize(x) if isinstance(q, QuantizedTensor) else x


def _three(q: torch.Tensor) -> torch.Tensor:
    """A stack of three matrices."""
    return torch.stack([q[128:], q[:128], q[128:]])


OPERATIONS: dict[str, list[Operation]] = {
    "`q.detach()`": [lambda q: q.detach()],
    "`q.clone()`": [lambda q: q.clone()],
    "`q.to(device, copy=True)`": [lambda q: q.to("cpu", copy=True), lambda q: q.to("meta").to("meta", copy=True)],
    "`q.to(float32)`": [lambda q: q.to(torch.float32), lambda q: q.float()],
    "`q.view(-1)`": [lambda q: q.view(-1), lambda q: q.view(-1).view(ROWS, COLUMNS)],
    "`q.as_strided` to whole rows": [lambda q: q.as_strided((ROWS, COLUMNS), (COLUMNS, 1), 0),
        lambda q: q.as_strided((3, COLUMNS), (COLUMNS, 1), 5 * COLUMNS)],
    "`q.as_strided` to part of a row": [lambda q: q.as_strided((ROWS, 3), (COLUMNS, 1), 0)],
    "`q[a:b]`, `q.narrow(0, a, n)`": [lambda q: q[3:77], lambda q: q.narrow(0, 130, 9), lambda q: q[200:][7:9]],
    "`q.split(n)`, `q.chunk(n)`": [lambda q: q.split(100), lambda q: q.chunk(3), lambda q: q.split([1, 200, 55])],
    "`q[:, a:b]` on tiles": [lambda q: q[:, 128:256], lambda q: q.narrow(1, 256, 128)[130:140]],
    "`q[:, a:b]` across tiles": [lambda q: q[:, 4:22]],
    "`q[::2]`": [lambda q: q[::2]],
    "`torch.cat` of its chunks": [lambda q: torch.cat(q.chunk(3)), lambda q: torch.cat(q.chunk(3)[1:])],
    "`torch.cat` along columns, on tiles": [lambda q: torch.cat([q[:, :128], q[:, 256:]], 1)],
    "`torch.cat` with a plain tensor": [lambda q: torch.cat([q, torch.ones(2, COLUMNS, dtype=q.dtype)])],
    "`torch.stack` of matrices": [lambda q: torch.stack([q, q]),
        lambda q: torch.stack([q[:128].clone(), q[128:].clone()])],
    "`torch.stack` along another dim": [lambda q: torch.stack([q, q], 1), lambda q: torch.stack([_three(q)] * 2)],
    "`s[e]`, `s.unbind()` of a stack `s`": [lambda q: _three(q)[1], lambda q: _three(q)[-1],
        lambda q: _three(q).unbind()],
    "`s[a:b]`, `s.split(n)`, `s.view(-1)`": [lambda q: _three(q)[1:], lambda q: _three(q).split(2),
        lambda q: _three(q).view(-1)],
    "`torch.cat` of stacks": [lambda q: torch.cat([_three(q), _three(q)[:1]])],
    "`s[:, a:b]`, `s[:, :, a:b]` on tiles": [lambda q: torch.stack([q, q])[:, 128:],
        lambda q: _three(q)[1:, :, 128:256]],
    "`s[:, :, a:b]` across tiles": [lambda q: _three(q)[:, :, 4:22]],
    "`s.unbind(1)`": [lambda q: _three(q).unbind(1)],
    "`s[index]`, `s.transpose(1, 2)`": [lambda q: _three(q)[torch.tensor([2, 0])], lambda q: _three(q).transpose(1, 2)],
    "`F.pad` with rows of zeros": [lambda q: functional.pad(q, (0, 0, 0, 7))],
    "`F.pad` of anything else": [lambda q: functional.pad(q, (0, 2, 0, 7)),
        lambda q: functional.pad(q, (0, 0, 0, 1), value=1.0)],
    "`q.copy_(q)`": [lambda q: q.copy_(_twin(q))],
    "`q.copy_(plain)`": [lambda q: q.copy_(values(ROWS, COLUMNS))],
    "`q.copy_(another encoding)`": [lambda q: q.copy_(_other(q))],
    "`plain.copy_(q)`": [lambda q: torch.ones(ROWS, COLUMNS).copy_(q)],
    "`q.zero_()`": [lambda q: q.zero_(), lambda q: q[4:9].zero_()],
    "`q.new_zeros`, `q.new_empty`": [lambda q: q.new_zeros(7, COLUMNS), lambda q: q.new_empty((7, COLUMNS)).zero_()],
    "`torch.empty_like`": [lambda q: torch.empty_like(q).zero_()],
    "`torch.zeros_like`": [torch.zeros_like],
    "`q.t()`, `q.transpose(0, 1)`": [lambda q: q.t(), lambda q: q.transpose(0, 1), lambda q: q.permute(1, 0)],
    "`q[0]`": [lambda q: q[0], lambda q: q[-1]],
    "`q + 1`, `q @ x`": [lambda q: q + 1, lambda q: q @ values(COLUMNS, 3), torch.abs],
    "`q.add_(1)`, `q.mul_(2)`": [lambda q: q.add_(1), lambda q: q.mul_(2), lambda q: q.normal_()],
    "`q.fill_(1)`": [lambda q: q.fill_(1)],
    "`q[0] = x`, `q[0, 0] = x`": [lambda q: q.__setitem__(0, 1.0), lambda q: q.__setitem__((0, 0), 1.0)],
    "`q.unsqueeze(0)`": [lambda q: q.unsqueeze(0)],
}  # fmt: skip

ROUNDED_ONCE = ("`q.to(float32)`", "`plain.copy_(q)`")
"""Operations that go to float32 straight from the codes."""
QUANTIZES = ("`q.copy_(q)`", "`q.copy_(plain)`")
"""Operations after which there are other values than in the plain tensor."""


def _cells() -> Iterator[tuple[str, str, str]]:
    """Operation, kind of scaling and class of each cell of the page's table."""
    lines = PAGE.read_text("utf-8").splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("| operation |"))
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return
        operation, *classes = (cell.strip() for cell in line.strip("|").split("|"))
        assert len(classes) == len(KINDS)
        for kind, told in zip(KINDS, classes, strict=True):
            yield operation, kind, told


CELLS = list(_cells())
five = pytest.mark.parametrize("quantizer", KINDS.values(), ids=KINDS.keys())


def test_the_page_and_this_file_name_the_same_operations() -> None:
    assert {operation for operation, _, _ in CELLS} == set(OPERATIONS)


@pytest.mark.parametrize(("operation", "kind", "told"), CELLS, ids=str)
def test_each_cell_is_true(operation: str, kind: str, told: str) -> None:
    for act in OPERATIONS[operation]:
        tensor = KINDS[kind].quantize(values(ROWS, COLUMNS))
        before = {name: buffer.clone() for name, buffer in tensor.components.items()}
        if told == "raises":
            with pytest.raises(TransaxleError):
                act(tensor)
            assert all(torch.equal(raw(before[name]), raw(buffer)) for name, buffer in tensor.components.items())
            continue
        plain = tensor.dequantize(torch.float32 if operation in ROUNDED_ONCE else None)
        found, wanted = _several(act(tensor)), _several(act(plain))
        kinds = {QuantizedTensor if told == "raw" else torch.Tensor}
        assert {type(one) for one in found} == kinds
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape
            if isinstance(one, QuantizedTensor):
                assert one.quantizer == tensor.quantizer
                one = one.dequantize()
            if one.device.type != "meta" and operation not in QUANTIZES:
                assert torch.equal(one, other)


def _several(found: object) -> list[torch.Tensor]:
    several = list(found) if isinstance(found, (list, tuple)) else [found]
    assert all(isinstance(one, torch.Tensor) for one in several)
    return [one for one in several if isinstance(one, torch.Tensor)]


@five
def test_views_share_what_they_are_views_of(quantizer: Quantizer) -> None:
    made = quantizer.quantize(values(ROWS, COLUMNS))
    made.narrow(0, 0, ROWS).view(-1).view(ROWS, COLUMNS).detach().copy_(_twin(made, seed=3))
    assert torch.equal(made.dequantize(), quantizer.quantize(values(ROWS, COLUMNS, seed=3)).dequantize())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@five
def test_no_dims_are_one_element(quantizer: Quantizer, device: str) -> None:
    made = quantizer.quantize(values(4, 32)).new_empty((), device=device)
    assert (made.numel(), made.dequantize().shape, made.clone().device.type) == (1, (), device)


@five
def test_assigned_rows_are_quantized(quantizer: Quantizer) -> None:
    made, x = quantizer.quantize(values(ROWS, COLUMNS)), values(ROWS, COLUMNS, seed=3)
    plain = torch.zeros(ROWS, COLUMNS, dtype=made.dtype)
    expected = made.clone().copy_(x)
    made[:] = x
    plain[2:] = made[2:]
    assert torch.equal(made.dequantize(), expected.dequantize())
    assert not plain[:2].any()
    assert plain[2:].any()


# Torch functions that look at storage, and what keeps tensors between forward and backward.

kinds = pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())


def _flipped(rank: int, world: int, tensor: QuantizedTensor) -> bool:
    """In another process: flip each bit of the codes."""
    tensor.components["data"].view(torch.uint8).bitwise_not_()
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def test_processes_share_codes() -> None:
    made = MORE["nvfp4"].quantize(values(64, 64))
    before = raw(made.components["data"]).clone()
    assert not made.is_shared()  # type: ignore[no-untyped-call]
    assert made.share_memory_() is made  # type: ignore[no-untyped-call]
    assert made.is_shared()
    assert run(1, _flipped, made) == [True]
    assert torch.equal(raw(made.components["data"]), ~before)


@kinds
def test_modules_change_dtype_and_keep_codes(quantizer: Quantizer) -> None:
    model = nn.Linear(64, 48).bfloat16()
    quantize_(model, quantizer)
    assert isinstance(model.weight, QuantizedTensor)
    before = model.weight.detach().clone()
    model.float()
    assert isinstance(model.weight, QuantizedTensor)
    assert isinstance(before, QuantizedTensor)
    assert same(model.weight, before)
    assert model.weight.dtype == model(torch.ones(2, 64)).dtype == torch.float32
    assert model.weight.untyped_storage().nbytes() == 0
    assert torch.equal(model.weight.dequantize(), before.dequantize(torch.float32))


@kinds
def test_data_that_is_set_is_there(quantizer: Quantizer) -> None:
    model = nn.Linear(64, 48).bfloat16()
    quantize_(model, quantizer)
    other = quantizer.quantize(values(48, 64, seed=4))
    model.weight.data = other
    assert isinstance(model.weight, QuantizedTensor)
    assert same(model.weight, other)
    if not model.weight.state:
        model.weight.data = values(48, 64, seed=5)
        assert same(model.weight, quantizer.quantize(values(48, 64, seed=5)))


@kinds
def test_what_is_kept_for_backward_are_codes(quantizer: Quantizer) -> None:
    """Activation offload copies what is kept, bit for bit; hooks that keep plain tensors only get the values."""
    weight = nn.Parameter(quantizer.quantize(values(48, 64)))
    x, kept = values(3, 64).requires_grad_(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.to("cpu", copy=True))
        return kept[-1]

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", copy=True)

    def gradient(*hooks: Any) -> torch.Tensor:
        with saved_tensors_hooks(*hooks) if hooks else save_on_cpu():
            made = nn.functional.linear(x, weight)
        found = torch.autograd.grad(made.float().square().sum(), (x,))[0]
        rounding = a(QuantizedTensor, weight).state.get(ROUNDING)
        if rounding is not None:
            assert rounding[1] == 1  # counted here, not in a copy
            rounding[1] = 0
        return found

    wanted = gradient(lambda tensor: tensor, lambda tensor: tensor)
    assert torch.equal(gradient(), wanted)
    assert torch.equal(gradient(pack, unpack), wanted)
    codes = [tensor for tensor in kept if isinstance(tensor, QuantizedTensor)]
    assert len(codes) == 1
    assert same(codes[0], weight)
    with pytest.raises(TransaxleError) if quantizer.multiplies_codes else nullcontext():
        assert torch.equal(
            gradient(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor), unpack), wanted
        )


@pytest.mark.parametrize("quantizer", [*MORE.values(), NVFP4BlockScaling()])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
def test_an_output_may_be_changed_in_place(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    """Models scale what a linear layer gives (`y *= …`), and autograd follows."""
    grads = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 48, bias=False).bfloat16()
        quantize_(model, quantizer)
        output = model(values(32, 64).view(shape).requires_grad_())
        if in_place:
            output *= 3
        else:
            output = output * 3
        output.float().square().sum().backward()
        grads.append(some(model.weight.grad))
    assert torch.equal(*grads)
