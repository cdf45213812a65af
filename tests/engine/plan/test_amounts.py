"""Checkpoints of a great many parts: what looking at them takes grows with the parts and no faster.

`make fuzz` has the same inputs at full size, with caps on seconds and megabytes; here calls and bytes are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import transaxle as tx
from fuzz.resources import chunked_payload, views
from tests.formats.files import FILE, info, made
from tests.work import assert_linear, calls, peak
from transaxle.cli import main

Make = Callable[[Path, int], None]


def _tensors(folder: Path, count: int) -> None:
    held = {f"a.{at // 16}.b.{at}.c": info("U8", [1], at, at + 1) for at in range(count)}
    folder.joinpath(FILE).write_bytes(made(held, bytes(count)))


def _the_same_view(folder: Path, count: int) -> None:
    base = torch.zeros(2)
    torch.save({f"t{at}": base[at % 2 : at % 2 + 1] for at in range(count)}, folder / "model.pt")


def _shards(folder: Path, count: int) -> None:
    names = {f"t{at}": f"model-{at:05}-of-{count:05}.safetensors" for at in range(count)}
    for name, shard in names.items():
        folder.joinpath(shard).write_bytes(made({name: info("U8", [1], 0, 1)}, b"\0"))
    folder.joinpath(f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize(
    ("make", "each"),
    [(_tensors, 1_300), (views, 1_800), (_the_same_view, 1_800), (chunked_payload, 4_000), (_shards, 1_700)],
)
def test_opening_is_linear_in_the_parts_of_a_checkpoint(make: Make, each: int, tmp_path: Path) -> None:
    """`each`: bytes of memory for one more part, while it is opened and looked at."""

    def looking(count: int) -> Callable[[], None]:
        folder = tmp_path / str(count)
        folder.mkdir()
        make(folder, count)

        def work() -> None:
            with tx.open(folder) as found:
                assert sum(tensor.nbytes for tensor in found.values())

        return work

    works = [looking(count) for count in (60, 120, 240)]
    works[0]()  # what it imports counts once
    assert_linear([calls(work) for work in works], 1.6)  # beyond some files, the first ones are opened once more
    peaks = [peak(work) for work in works]
    assert (peaks[2] - peaks[1]) / 120 < each, peaks


@pytest.mark.parametrize("arguments", [("ls",), ("info",), ("plan", "OUT", "--to", "safetensors:identity")])
def test_commands_are_linear_in_the_tensors(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def running(count: int) -> Callable[[], None]:
        folder = tmp_path / str(count)
        folder.mkdir()
        _tensors(folder, count)
        command, *rest = arguments
        options = [str(tmp_path / "out") if part == "OUT" else part for part in rest]

        def work() -> None:
            assert main([command, str(folder), *options]) == 0

        return work

    works = [running(count) for count in (64, 128, 256)]
    works[0]()
    assert_linear([calls(work) for work in works])
    capsys.readouterr()
