"""The records of formats are true; wrong answers of formats of installed packages are refused."""

from __future__ import annotations

import ast
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import pytest

import transaxle
from tests.formats.refusals import refuses
from transaxle.errors import Refused
from transaxle.formats import registry
from transaxle.formats.catalog import Container, Draft, Entry, Extent, Fragment, Spec
from transaxle.formats.detect import open_container
from transaxle.formats.package_checks import check_container, check_draft
from transaxle.formats.registry import Clue, Format, builtin, ending, every_format, is_one_file, is_step, one_file_ends
from transaxle.formats.store.staging import storage_at

PACKAGE = Path(transaxle.__file__).parent
SPELLED_ELSEWHERE = {
    "__init__.py": "the name of a module",
    "cli/info.py": "a package that may be installed",
    "engine/checkpoint/settings.py": "an example in an error",
    "options.py": "an example of a value, for errors",
    "formats/training_state.py": "a key of the metadata",
    "readers/reader.py": "formats that other programs open, which are theirs",
    "readers/probes/of_deepspeed.py": "the name of a package",
    "readers/probes/of_torchtitan.py": "the format in its request",
    "readers/probes/of_vllm.py": "a value of an option of vLLM's",
}
"""Modules that have a word which is also a format's name."""


@pytest.mark.parametrize("kind", builtin().values(), ids=list(builtin()))
def test_a_record_names_what_is_there(kind: Format) -> None:
    readers = {kind.reader, *(clue.reader for clue in kind.clues if clue.reader)}
    for reader in readers:
        assert kind.reader_takes <= set(signature(registry.import_object(reader)).parameters)
    for clue in kind.clues:
        assert callable(
            registry.import_object(clue.candidates) if isinstance(clue.candidates, str) else clue.candidates
        )
    if kind.draft:
        assert kind.draft_takes <= set(signature(kind.drafter).parameters)
        draft = kind.drafter([Spec("a", "F32", (2,))], metadata={}, shard_size=None)
        assert draft.format == kind.name
        assert not kind.one_file or all(map(is_one_file, draft.files))
        assert all(is_step(name.partition("/")[0]) or kind.file_pattern.fullmatch(name) for name in draft.files
                   if name not in kind.sidecars | {kind.newest})  # fmt: skip


def test_names_are_those_of_the_records() -> None:
    assert registry.find("dcp") is registry.get_format("dcp") is registry.DCP
    assert registry.find("gguf") is None
    with pytest.raises(ValueError, match="gguf"):
        registry.get_format("gguf")
    names = ["torch_dist", "megatron_torch", "dcp", "deepspeed", "deepspeed-universal", "safetensors", "vllm_sharded"]
    assert [kind.name for kind in every_format()] == [*names, "ranks", "torch"]
    assert registry.writable() == (
        "safetensors", "torch", "ranks", "dcp", "torch_dist", "megatron_torch", "deepspeed-universal", "vllm_sharded",
    )  # fmt: skip


def test_files_are_claimed_by_their_ends() -> None:
    assert one_file_ends() == (".safetensors", ".bin", ".pt", ".pth")
    assert is_one_file("a/b.pt")
    assert not is_one_file("a/b.distcp")
    assert set(registry.foreign_ends()) > {".distcp", ".metadata", ".gguf"}
    assert all(map(registry.holds_tensors, ("a.SAFETENSORS", "a.gguf", "__0_0.distcp", ".metadata")))
    assert not any(map(registry.holds_tensors, ("config.json", "latest")))
    openers = ("x.safetensors.index.json", ".metadata", "latest", "latest_universal", "mp_rank_00_model_states.pt")
    assert all(map(registry.opens_checkpoint, openers))
    assert not any(map(registry.opens_checkpoint, ("model.safetensors", "__0_0.distcp", "x_optim_states.pt")))
    assert registry.is_of_checkpoint("__0_0.distcp")
    assert not registry.is_of_checkpoint("notes.txt")
    assert registry.has_right_signature("a.bin", b"PK\x03\x04")
    assert registry.has_right_signature("a.bin", b"")
    assert not registry.has_right_signature("a.bin", b"\0\0\0\0\0\0\0\0{")
    assert registry.has_right_signature("a.safetensors", b"\0\0\0\0\0\0\0\0{")


def test_no_two_formats_claim_a_file() -> None:
    ends = one_file_ends()
    assert len(set(ends)) == len(ends)
    assert not {end for kind in every_format() for end in kind.parts} & set(ends)


def test_the_records_are_the_only_place_that_spells_a_format() -> None:
    """Everybody else asks them: a new format is one new record."""
    names = set(builtin()) - {"torch", "ranks"}  # which are also a module of Python, and what files and jobs have
    found = set()
    for module in PACKAGE.rglob("*.py"):
        if module.name != "registry.py":
            for node in ast.walk(ast.parse(module.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and node.value in names:
                    found.add(module.relative_to(PACKAGE).as_posix())
    assert found == set(SPELLED_ELSEWHERE)


# Formats of installed packages.

KIND = Format(
    name="tiny",
    title="a tiny checkpoint",
    clues=(Clue(ending(".tiny")),),
    reader="nowhere:open",
    files=r"t\d+\.raw",
    package="tiny-format 1.0",
)
RAW = "t0.raw"


def _entry(shape: Any = (4,), offset: Any = 0, dtype: Any = "F32", **changes: Any) -> Entry:
    extent = Extent((0,) * len(shape), shape, RAW, offset)
    return Entry("a", dtype, shape, (msgspec.structs.replace(extent, **changes),))


CATALOGS = {
    "negative dims": (_entry((-4, -4)), "CORRUPT", "shape (-4, -4)"),
    "a bool": (_entry((True,)), "CORRUPT", "shape (True,)"),
    "a float": (_entry((4.0,)), "CORRUPT", "shape (4.0,)"),
    "an overflow": (_entry((0, 2**70)), "CORRUPT", "overflows"),
    "a float offset": (_entry(offset=4.0), "CORRUPT", "offset 4.0"),
    "a negative offset": (_entry(offset=-4), "CORRUPT", "offset -4"),
    "beyond the file": (_entry(offset=8), "CORRUPT", "bytes 8 to 24 of a file of 16"),
    "strides beyond the file": (_entry(strides=(2,)), "CORRUPT", "of a file of 16"),
    "another file": (_entry(file="b"), "CORRUPT", "'b'"),
    "no dtype": (_entry(dtype="F33"), "CORRUPT", "F33"),
    "half a byte": (_entry((3,), dtype="F4"), "SHAPE_MISMATCH", "whole bytes"),
    "a hole": (msgspec.structs.replace(_entry(), extents=(Extent((1,), (3,), RAW, 0),)), "CORRUPT", "[0]"),
    "outside": (_entry((2,), start=(1,)), "CORRUPT", "does not lie inside"),
    "another name": (msgspec.structs.replace(_entry(), name="b"), "CORRUPT", "'a'"),
    "no text": (msgspec.structs.replace(_entry(), name="\ud800"), "CORRUPT", "expected an Entry"),
    "no entry": (3, "CORRUPT", "3 for the tensor"),
}


@pytest.mark.parametrize(("entry", "code", "said"), CATALOGS.values(), ids=CATALOGS)
def test_a_catalog_that_is_not_true(tmp_path: Path, entry: Any, code: str, said: str) -> None:
    (tmp_path / RAW).write_bytes(bytes(16))
    name = "\ud800" if "expected an Entry" in said else "a"
    storage = storage_at(str(tmp_path))
    good = Container("tiny", "x", storage, {"a": _entry()}, {RAW: 16})
    check_container(KIND, good, RAW)
    with refuses(code, said, "tiny-format 1.0"):
        check_container(KIND, msgspec.structs.replace(good, entries={name: entry}), RAW)
    storage.close()


def _draft(places: dict[str, int], size: int, *, file: str = RAW, head: bytes = b"") -> Draft:
    entries = {name: Entry(name, "F32", (2,), (Extent((0,), (2,), file, at),)) for name, at in places.items()}
    return Draft("tiny", entries, {file: size}, (Fragment(file, 0, head),))


DRAFTS = {
    "outside": (_draft({"a": 0, "b": 12}, 16), "CORRUPT", "of a file of 16"),
    "overlapping": (_draft({"a": 0, "b": 4}, 12), "OVERLAP", "the tensor a"),
    "a head that overlaps": (_draft({"a": 0, "b": 8}, 16, head=b"x"), "OVERLAP", "twice"),
    "a gap": (_draft({"a": 0, "b": 12}, 20), "CORRUPT", "no tensor and no fragment"),
    "a file that is not its own": (_draft({"a": 0, "b": 8}, 16, file="model.bin"), "CORRUPT", "`files`"),
    "a file outside": (_draft({"a": 0, "b": 8}, 16, file="../t0.raw"), "PATH_ESCAPE", "out of the folder"),
    "a tensor too few": (_draft({"a": 0}, 8), "CORRUPT", "no place"),
    "no draft": (None, "CORRUPT", "expected a Draft"),
}


@pytest.mark.parametrize(("draft", "code", "said"), DRAFTS.values(), ids=DRAFTS)
def test_a_draft_that_is_not_true(draft: Any, code: str, said: str) -> None:
    specs = [Spec(name, "F32", (2,)) for name in ("a", "b")]
    check_draft(KIND, _draft({"b": 1, "a": 9}, 17, head=b"x"), specs)
    with refuses(code, said, "tiny-format 1.0"):
        check_draft(KIND, draft, specs)


def test_a_package_s_exception_names_it() -> None:
    with pytest.raises(Refused, match=r"tiny-format 1\.0: its reader failed: KeyError"), KIND.answerable("its reader"):
        raise KeyError("x")
    with pytest.raises(KeyError), replace(KIND, package="").answerable("its reader"):
        raise KeyError("x")


def test_a_manifest_names_a_format_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "t0.bin").write_bytes(bytes(16))
    (tmp_path / "transaxle.json").write_text('{\n "transaxle": 1,\n "format": "rawdir",\n "family": null\n}')
    with pytest.raises(Refused, match="written as 'rawdir', which no installed package provides"):
        open_container(str(tmp_path))
