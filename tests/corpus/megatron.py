"""Distributed checkpoints of Megatron of which what says what they are is damaged, missing, or of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import transaxle as tx
from tests.checkpoints import tiny
from tests.corpus.case import Case
from transaxle.errors import Code
from transaxle.formats.registry import MANIFEST

ABOUT, COMMON, RELEASE = "metadata.json", "common.pt", "release"
SAID = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def made(damage: Callable[[Path], object], *, inside: bool) -> Callable[[Path], Path | None]:
    """A run, or its iteration alone, that is damaged."""

    def make(folder: Path) -> Path | None:
        tx.convert(tiny(folder.parent / "hub"), folder, to="torch_dist:megatron", overwrite=True, sync=False)
        (folder / MANIFEST).unlink()
        damage(folder / RELEASE)
        return folder / RELEASE if inside else None

    return make


def about(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / ABOUT).write_text(text)


def without(*names: str) -> Callable[[Path], object]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


_MALFORMED = "no JSON object with one sharded_backend"
_DAMAGES: dict[str, tuple[Callable[[Path], object], Code, str]] = {
    "half of what it says": (about(json.dumps(SAID)[:30]), "CORRUPT", _MALFORMED),
    "nothing said": (about(""), "CORRUPT", _MALFORMED),
    "a list": (about("[]"), "CORRUPT", _MALFORMED),
    "another key": (about(json.dumps(SAID).replace("sharded_backend", "rharded_backend", 1)), "CORRUPT", _MALFORMED),
    "no text": (about(json.dumps({**SAID, "sharded_backend": ["torch_dist"]})), "CORRUPT", _MALFORMED),
    "two backends": (about(json.dumps(SAID).replace("{", '{"sharded_backend": "zarr", ')), "CORRUPT", _MALFORMED),
    "an unknown backend": (about(json.dumps({**SAID, "sharded_backend": "uorch_dist"})), "UNSUPPORTED", "uorch_dist"),
    "the older backend": (about(json.dumps({**SAID, "sharded_backend": "zarr"})), "UNSUPPORTED", "zarr"),
    "an unknown state": (
        about(json.dumps({**SAID, "common_backend": "zip"})),
        "UNSUPPORTED",
        "common_backend is 'zip'",
    ),
    "no backend's file": (without(ABOUT), "INCOMPLETE", "the file is missing"),
    "no state": (without(COMMON), "INCOMPLETE", "the file is missing"),
}
CASES = {
    f"torch_dist with {name}, {'its iteration' if inside else 'its run'}": Case(made(damage, inside=inside), code, said)
    for name, (damage, code, said) in _DAMAGES.items()
    for inside in (False, True)
}
