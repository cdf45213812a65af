"""Each container is one record, and the record is true."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path

import pytest

import transaxle
from transaxle.formats import registry
from transaxle.formats.catalog import Spec
from transaxle.formats.registry import (
    Format,
    builtin,
    every_format,
    find,
    foreign_ends,
    get_format,
    has_right_signature,
    holds_tensors,
    import_object,
    is_of_checkpoint,
    is_one_file,
    is_step,
    one_file_ends,
    opens_checkpoint,
    writable,
)

PACKAGE = Path(transaxle.__file__).parent
SPELLED_ELSEWHERE = {
    "cli/info.py": "a package that may be installed",
    "engine/checkpoint/settings.py": "an example in an error",
    "options.py": "an example of a value, for errors",
    "formats/training_state.py": "a key of the metadata",
}
"""Modules that have a word which is also a format's name."""


@pytest.mark.parametrize("kind", builtin().values(), ids=list(builtin()))
def test_a_record_names_what_is_there(kind: Format) -> None:
    readers = {kind.reader, *(clue.reader for clue in kind.clues if clue.reader)}
    for reader in readers:
        assert kind.reader_takes <= set(signature(import_object(reader)).parameters)
    for clue in kind.clues:
        assert callable(import_object(clue.candidates) if isinstance(clue.candidates, str) else clue.candidates)
    if kind.draft:
        assert kind.draft_takes <= set(signature(kind.drafter).parameters)
        draft = kind.drafter([Spec("a", "F32", (2,))], metadata={}, shard_size=None)
        assert draft.format == kind.name
        assert not kind.one_file or all(map(is_one_file, draft.files))
        assert all(is_step(name.partition("/")[0]) or kind.file_pattern.fullmatch(name) for name in draft.files
                   if name not in kind.sidecars | {kind.newest})  # fmt: skip


def test_names_are_those_of_the_records() -> None:
    assert find("dcp") is get_format("dcp") is registry.DCP
    assert find("gguf") is None
    with pytest.raises(ValueError, match="gguf"):
        get_format("gguf")
    names = ["torch_dist", "megatron_torch", "dcp", "deepspeed", "deepspeed-universal", "safetensors", "torch"]
    assert [kind.name for kind in every_format()] == names
    assert writable() == ("safetensors", "torch", "dcp", "torch_dist", "megatron_torch", "deepspeed-universal")


def test_files_are_claimed_by_their_ends() -> None:
    assert one_file_ends() == (".safetensors", ".bin", ".pt", ".pth")
    assert is_one_file("a/b.pt")
    assert not is_one_file("a/b.distcp")
    assert set(foreign_ends()) > {".distcp", ".metadata", ".gguf"}
    assert all(map(holds_tensors, ("a.SAFETENSORS", "a.gguf", "__0_0.distcp", ".metadata")))
    assert not any(map(holds_tensors, ("config.json", "latest")))
    openers = ("x.safetensors.index.json", ".metadata", "latest", "latest_universal", "mp_rank_00_model_states.pt")
    assert all(map(opens_checkpoint, openers))
    assert not any(map(opens_checkpoint, ("model.safetensors", "__0_0.distcp", "x_optim_states.pt")))
    assert is_of_checkpoint("__0_0.distcp")
    assert not is_of_checkpoint("notes.txt")
    assert has_right_signature("a.bin", b"PK\x03\x04")
    assert has_right_signature("a.bin", b"")
    assert not has_right_signature("a.bin", b"\0\0\0\0\0\0\0\0{")
    assert has_right_signature("a.safetensors", b"\0\0\0\0\0\0\0\0{")


def test_no_two_formats_claim_a_file() -> None:
    ends = one_file_ends()
    assert len(set(ends)) == len(ends)
    assert not {end for kind in every_format() for end in kind.parts} & set(ends)


def test_the_records_are_the_only_place_that_spells_a_format() -> None:
    """Everybody else asks them: a new format is one new record."""
    names = set(builtin()) - {"torch"}  # which is a module of Python, and spelled by whoever knows pickles
    found = set()
    for module in PACKAGE.rglob("*.py"):
        if module.name != "registry.py":
            for node in ast.walk(ast.parse(module.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and node.value in names:
                    found.add(module.relative_to(PACKAGE).as_posix())
    assert found == set(SPELLED_ELSEWHERE)
