"""Sharded state dicts, entry by entry: boxes, copies that factories make, objects, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.checkpoints import WHOLE
from tests.live.ranks import run
from tests.oracles.quiet import quiet
from transaxle.errors import Refused
from transaxle.live.load import load
from transaxle.live.model.state_tensors import leaves
from transaxle.live.save import save

pytestmark = pytest.mark.peers
EXPERTS, WIDTH, ROWS = 3, 4, 5
"""Of a layer's mixture: experts, columns, and rows of the gate."""


def _mapping() -> Any:
    """Megatron's classes, which are imported when a test asks for them."""
    with quiet():
        from megatron.core.dist_checkpointing import mapping
    return mapping


def _stack() -> dict[str, torch.Tensor]:
    """Two layers of experts, gate above up; a norm; a number."""
    shape = (2, EXPERTS, 2 * ROWS, WIDTH)
    fc1 = torch.arange(2 * EXPERTS * 2 * ROWS * WIDTH, dtype=torch.float32).reshape(shape)
    return {"fc1": fc1, "norm": torch.arange(2.0 * WIDTH).reshape(2, WIDTH), "steps": torch.tensor(7)}


def _source(folder: Path) -> str:
    save_file(_stack(), folder / WHOLE)
    return str(folder)


def _shard(key: str, data: torch.Tensor | None, shape: tuple[int, ...], offset: tuple[int, ...], **more: Any) -> Any:
    local = tuple(data.shape) if data is not None else shape[1:]
    dtype = torch.float32 if data is None else data.dtype
    more = {"replica_id": (0, 0, 0), "prepend_axis_num": len(shape) - len(local), **more}
    return _mapping().ShardedTensor(key, data, dtype, local, shape, offset, None, **more)


def _columns(layer: int, *, copies: bool) -> tuple[torch.nn.Parameter, Any]:
    """A parameter that has its experts side by side as columns; its factory gives the two halves of their rows."""
    weight = torch.nn.Parameter(torch.full((WIDTH, EXPERTS * 2 * ROWS), torch.nan))

    def build(key: str, value: torch.Tensor, replica_id: Any, _: Any) -> dict[str, Any]:
        experts = value.detach().view(WIDTH, EXPERTS, 2 * ROWS).permute(1, 2, 0)
        halves = experts.chunk(2, dim=1)
        data = [half.contiguous() for half in halves] if copies else halves
        shape = (2, EXPERTS, 2 * ROWS, WIDTH)
        boxes = [_shard(key, half, shape, (layer, 0, at * ROWS, 0)) for at, half in enumerate(data)]
        return {"kind": _mapping().LocalNonpersistentObject("columns"), "halves": boxes}

    def merge(built: dict[str, Any]) -> torch.Tensor:
        assert built["kind"] == "columns"
        return torch.cat(built["halves"], dim=1).permute(2, 0, 1).reshape(WIDTH, -1)

    return weight, _mapping().ShardedTensorFactory("fc1", weight, build, merge)


@pytest.mark.parametrize("copies", [False, True])
def test_factories_of_views_and_of_copies(copies: bool, tmp_path: Path) -> None:
    weights, factories = zip(*(_columns(layer, copies=copies) for layer in range(2)), strict=True)
    norms = [torch.full((WIDTH,), torch.nan) for _ in range(2)]
    state = {
        "layers": [{"fc1": factory} for factory in factories],
        **{f"{number}.norm": _shard("norm", norm, (2, WIDTH), (number, 0)) for number, norm in enumerate(norms)},
        "steps": _shard("steps", steps := torch.tensor(0), (), ()),
        "extra": _mapping().ShardedObject("fc1._extra_state", b"untouched", (2,), (0,)),
        "own": _mapping().LocalNonpersistentObject(object()),
    }
    assert bool(leaves(state, sharded=True).factories) == copies
    report = load(state, _source(tmp_path))
    truth = _stack()
    assert (report.tensors, report.untouched, steps.item()) == (3, ("fc1._extra_state",), 7)
    for layer, (weight, norm) in enumerate(zip(weights, norms, strict=True)):
        assert torch.equal(weight, truth["fc1"][layer].permute(2, 0, 1).reshape(WIDTH, -1))
        assert torch.equal(norm, truth["norm"][layer])
    saved = save(state, tmp_path / "out", to="safetensors:identity")
    assert saved.ignored == ("fc1._extra_state",)
    written = load_file(tmp_path / "out" / WHOLE)
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], value) for name, value in truth.items())


def _norms(*, key: str = "norm", **more: Any) -> list[Any]:
    return [_shard(key, torch.zeros(WIDTH), (2, WIDTH), (layer, 0), **more) for layer in range(2)]


class _Codes(torch.Tensor):
    """A tensor whose memory is not its values."""

    def detach(self) -> _Codes:
        return self


def _broken(_: str, value: torch.Tensor, *__: Any) -> Any:
    raise ValueError("no such split")


REFUSED: list[tuple[str, Callable[[], list[Any]], str]] = [
    ("UNSUPPORTED", lambda: [_shard("norm", None, (2, WIDTH), (0, 0))], "without its data"),
    (
        "UNSUPPORTED",
        lambda: [_shard("norm", torch.zeros(WIDTH).as_subclass(_Codes), (2, WIDTH), (0, 0))],
        "a _Codes, whose",
    ),
    ("UNSUPPORTED", lambda: [_shard("norm", torch.zeros(WIDTH, device="meta"), (2, WIDTH), (0, 0))], "meta device"),
    ("UNSUPPORTED", lambda: [_shard("norm", torch.zeros(1).expand(WIDTH), (2, WIDTH), (0, 0))], "share memory"),
    ("UNSUPPORTED", lambda: [_shard("norm", torch.zeros(WIDTH), (2, WIDTH), (2, 0))], "at [2, 0] is no part of [2, 4]"),
    (
        "SHAPE_MISMATCH",
        lambda: [_norms()[0], _shard("norm", torch.zeros(WIDTH), (3, WIDTH), (1, 0))],
        "[2, 4] and [3, 4]",
    ),
    (
        "DTYPE_MISMATCH",
        lambda: [_norms()[0], _shard("norm", torch.zeros(4).half(), (2, 4), (1, 0))],
        "float32 and torch.fl",
    ),
    ("NAME_COLLISION", lambda: [*_norms(), *_norms()], "the same part"),
    ("NAME_COLLISION", lambda: [*_norms(), *_norms(key="there")], "has it as its key"),
    ("UNSUPPORTED", lambda: [_mapping().ShardedTensorFactory("norm", torch.zeros(4), _broken, None)], "no such split"),
    (
        "UNSUPPORTED",
        lambda: [_shard("norm", torch.zeros(rows, 2), (4, 4), at) for rows, at in ((2, (0, 0)), (2, (2, 2)))],
        "no grid",
    ),
    (
        "UNSUPPORTED",
        lambda: [_shard("norm", torch.zeros(rows, 4), (4, 4), at) for rows, at in ((3, (0, 0)), (2, (2, 0)))],
        "no grid",
    ),
]


@pytest.mark.parametrize(("code", "shards", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_what_cannot_be_loaded_is_refused(
    code: str, shards: Callable[[], list[Any]], text: str, tmp_path: Path
) -> None:
    state = {**{str(number): shard for number, shard in enumerate(shards())}, "there": torch.zeros(1)}
    with pytest.raises(Refused, match=re.escape(text)) as caught:
        load(state, _source(tmp_path), strict=False)
    assert {refusal.code for refusal in caught.value.refusals} == {code}


def test_one_memory_may_be_given_twice_and_nothing_need_not_be_given(tmp_path: Path) -> None:
    norms = _norms()
    empty = _shard("fc1", torch.zeros(0, 2 * ROWS, WIDTH), (2, EXPERTS, 2 * ROWS, WIDTH), (0, 0, 0, 0))
    state = {"first": norms, "again": list(norms), "empty": empty}
    report = load(state, _source(tmp_path), strict=False)
    assert (report.tensors, set(report.unexpected)) == (1, {"fc1", "steps"})
    assert torch.equal(torch.stack([norm.data for norm in norms]), _stack()["norm"])


@pytest.mark.parametrize("call", [tx.state_dict_as, lambda state, _: tx.reshard(state, state)])
def test_other_functions_say_that_they_do_not_take_them(call: Any) -> None:
    with pytest.raises(Refused, match=r"only tx.load, tx.save and tx.async_save"):
        call({"norm": _norms()}, "hf")


def test_an_optimizer_is_not_taken_with_them(tmp_path: Path) -> None:
    norms = _norms()
    optimizer = torch.optim.AdamW([norm.data.requires_grad_() for norm in norms])
    for call in (
        lambda: load({"norms": norms}, _source(tmp_path), optimizer=optimizer),
        lambda: save({"norms": norms}, tmp_path / "out", optimizer=optimizer),
    ):
        with pytest.raises(Refused, match="Leave optimizer= out"):
            call()


def _one_in_shards(rank: int, world: int, folder: str) -> None:
    state = {"norm": torch.zeros(2, WIDTH)} if rank else {"norms": _norms()}
    load(state, folder, strict=False)


def test_ranks_must_describe_a_tensor_alike(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="only one has it in shards"):
        run(2, _one_in_shards, _source(tmp_path))


def _in_background(rank: int, world: int, folder: str) -> bool:
    shape = (2, EXPERTS, 2 * ROWS, WIDTH)
    own = _stack()["fc1"][rank].clone()
    shards = [_shard("fc1", own[e], shape, (rank, e, 0, 0)) for e in range(EXPERTS)]
    shards.append(_shard("norm", _stack()["norm"], (2, WIDTH), (0, 0), replica_id=(0, rank, 0)))
    job = tx.async_save({"model": shards}, folder, to="safetensors:identity")
    own.zero_()
    return bool(job.result().tensors == 2)


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path: Path) -> None:
    assert run(2, _in_background, str(tmp_path / "out")) == [True] * 2
    written, truth = load_file(tmp_path / "out" / WHOLE), _stack()
    assert torch.equal(written["fc1"], truth["fc1"])
    assert torch.equal(written["norm"], truth["norm"])
