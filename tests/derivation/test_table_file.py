"""The file of a table: nothing that must stay is replaced, and nothing is left half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transaxle.derivation.sources import Table, check_place, write_table
from transaxle.errors import StorageError, UsageError

TEXT = "# of mine\nfamily mine\n  axes d=width\n"
TABLE = Table("mine", TEXT, (), 1, proved=False)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_table_is_written(tmp_path: Path) -> None:
    for path in (tmp_path / "one.rules", str(tmp_path / "other.rules")):
        TABLE.save(path)
        assert Path(path).read_text("utf-8") == TEXT
    assert _names(tmp_path) == ["one.rules", "other.rules"]


@pytest.mark.parametrize("overwrite", [False, True, "everything"])
@pytest.mark.parametrize(
    ("there", "stays"),
    [
        (TEXT, {False: "already exists"}),
        ("\n  dialect mine of qwen3\n", {False: "already exists"}),
        ("family.txt", {False: "already exists", True: "it is no table"}),
        ("", {False: "already exists", True: "it is no table"}),
        (None, {False: "a folder", True: "a folder", "everything": "a folder"}),
    ],
)
def test_what_is_there_is_replaced_only_if_that_is_asked_for(
    there: str | None, stays: dict[Any, str], overwrite: Any, tmp_path: Path
) -> None:
    path = tmp_path / "mine.rules"
    path.mkdir() if there is None else path.write_text(there)
    if overwrite in stays:
        for write in (TABLE.save, check_place):
            with pytest.raises(UsageError, match=stays[overwrite]) as caught:
                write(path, overwrite=overwrite)
            assert (caught.value.code, bool(caught.value.hint)) == ("EXISTS", True)
            assert there is None or ("=everything" in caught.value.hint) == (len(stays) == 2)
        assert there is None or path.read_text() == there
    else:
        TABLE.save(path, overwrite=overwrite)
        assert path.read_text("utf-8") == TEXT
    assert _names(tmp_path) == ["mine.rules"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link, dangling = tmp_path / "real.rules", tmp_path / "link.rules", tmp_path / "dangling.rules"
    real.write_text("family old\n")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "absent.rules")
    TABLE.save(link, overwrite=True)
    assert link.is_symlink()
    assert real.read_text("utf-8") == TEXT
    with pytest.raises(UsageError, match="already exists"):
        TABLE.save(dangling)


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the folder .*absent does not exist"):
        TABLE.save(tmp_path / "absent" / "mine.rules")
    with pytest.raises(StorageError, match="writing the table"):
        TABLE.save(tmp_path / ("a" * 250))
    with pytest.raises(UsageError, match="overwrite must be"):
        TABLE.save(tmp_path / "mine.rules", overwrite="table")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path"):
        TABLE.save(3)  # type: ignore[arg-type]
    assert _names(tmp_path) == []


def test_a_file_that_appears_in_the_meantime_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.rules"
    monkeypatch.setattr("transaxle.derivation.sources.check_place", lambda *_, **__: path.write_text("theirs"))
    with pytest.raises(UsageError, match="in the meantime"):
        write_table(TEXT, path)
    assert path.read_text() == "theirs"
    assert _names(tmp_path) == ["mine.rules"]
