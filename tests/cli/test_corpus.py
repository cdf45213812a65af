"""Every command on every hostile input: it is refused, nothing is executed, and no partial output is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests.cli.running import MACHINE, REFUSED, USAGE, Transaxle
from tests.corpus import archives, checksums, deepspeed, folders, megatron
from tests.corpus.case import Case

CASES = {**checksums.CASES, **archives.CASES, **folders.CASES, **deepspeed.CASES, **megatron.CASES}
TARGETS = ("safetensors:identity", "dcp:identity", "torch:identity")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize("name", CASES)
def test_every_command_refuses(here: Path, transaxle: Transaxle, name: str) -> None:
    case = CASES[name]
    (here / "source").mkdir()
    path = case.make(here / "source") or here / "source"
    before = _files(here)
    for command in ("info", "ls"):
        done = transaxle(command, path, "--json")
        assert done.code in ({0} if case.late else {USAGE, REFUSED, MACHINE}), (command, done)
        if not case.late:
            _said(case, done.codes, done.out)
    for target in TARGETS:
        done = transaxle("convert", path, here / "out", "--to", target, "--json")
        _said(case, done.codes, done.out)
    done = transaxle("verify", path, "--json")
    if not case.unverified:
        _said(case, [each["code"] for each in done.json["problems"]] if case.late else done.codes, done.out)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.load(_state(path) if case.late else {"a": torch.zeros(1)}, path)
    _said(case, [each.code for each in caught.value.refusals], str(caught.value))
    assert _files(here) == before


def _said(case: Case, codes: list[str], text: str) -> None:
    assert case.code in codes, text
    assert case.said in text, text


def _state(path: Path) -> dict[str, torch.Tensor]:
    with tx.open(path) as checkpoint:
        return {name: torch.zeros(tensor.shape) for name, tensor in checkpoint.items()}
