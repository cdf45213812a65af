"""What the formats of installed packages return is refused where it is not true; tie-breaks by the manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transaxle.errors import Refused
from transaxle.formats.catalog import Container, Draft, Entry, Extent, Fragment, Spec
from transaxle.formats.detect import open_container
from transaxle.formats.package_checks import check_container, check_draft
from transaxle.formats.registry import Clue, Format, ending
from transaxle.formats.store.staging import storage_at

KIND = Format(
    name="tiny",
    title="a tiny checkpoint",
    clues=(Clue(ending(".tiny")),),
    reader="nowhere:open",
    files=r"t\d+\.raw",
    package="tiny-format 1.0",
)
FILE = "t0.raw"


def _entry(shape: Any = (4,), offset: Any = 0, dtype: Any = "F32", **changes: Any) -> Entry:
    extent = Extent((0,) * len(shape), shape, FILE, offset)
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
    "a hole": (msgspec.structs.replace(_entry(), extents=(Extent((1,), (3,), FILE, 0),)), "CORRUPT", "[0]"),
    "outside": (_entry((2,), start=(1,)), "CORRUPT", "does not lie inside"),
    "another name": (msgspec.structs.replace(_entry(), name="b"), "CORRUPT", "'a'"),
    "no text": (msgspec.structs.replace(_entry(), name="\ud800"), "CORRUPT", "expected an Entry"),
    "no entry": (3, "CORRUPT", "3 for the tensor"),
}


@pytest.mark.parametrize(("entry", "code", "said"), CATALOGS.values(), ids=CATALOGS)
def test_a_catalog_that_is_not_true(tmp_path: Path, entry: Any, code: str, said: str) -> None:
    (tmp_path / FILE).write_bytes(bytes(16))
    name = "\ud800" if "expected an Entry" in said else "a"
    storage = storage_at(str(tmp_path))
    good = Container("tiny", "x", storage, {"a": _entry()}, {FILE: 16})
    check_container(KIND, good, FILE)
    with pytest.raises(Refused) as caught:
        check_container(KIND, msgspec.structs.replace(good, entries={name: entry}), FILE)
    assert caught.value.code == code
    assert said in str(caught.value.refusals[0].message)
    assert "tiny-format 1.0" in caught.value.refusals[0].message
    storage.close()


def _draft(places: dict[str, int], size: int, *, file: str = FILE, head: bytes = b"") -> Draft:
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
    with pytest.raises(Refused) as caught:
        check_draft(KIND, draft, specs)
    assert caught.value.code == code
    assert said in caught.value.refusals[0].message
    assert "tiny-format 1.0" in caught.value.refusals[0].message


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
