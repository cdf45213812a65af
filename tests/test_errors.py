"""Texts of errors, with very long names shortened."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

import transaxle as tx
from tests import checkpoints
from transaxle.errors import Faults, Refusal, Where, gathered, shortened
from transaxle.formats.storage.local import storage_error


def test_a_long_name_is_cut_in_the_middle() -> None:
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("a" * 6 + "b" * 6, 4) == "aa … (12 characters) … bb"


def test_the_text_of_a_name_of_megabytes_is_short() -> None:
    name = "x" * 15_000_000
    refusal = Refusal("CORRUPT", f"{name!r} is odd", Where(name, name), f"Rename {name}.")
    error = gathered([refusal] * 40)
    assert len(str(error)) < 30 * 4 * 11_000
    assert "(15,000,000 characters)" in str(error)
    told = refusal.as_json()
    assert sum(len(text) for text in told.values()) < 40_000
    assert error.where.tensor == name, "programs have the whole of it"


def test_one_error_lists_the_first_hundred_problems() -> None:
    faults = Faults()
    for number in range(100):
        assert not faults.full
        faults.add("CORRUPT", f"problem {number}", "file")
    faults.add("CORRUPT", "one more", "file")
    messages = [refusal.message for refusal in faults.error().refusals]
    assert messages[99:] == ["problem 99", "there are more; these are the first 100 problems"]


def test_errors_of_files_are_also_those_of_the_system(tmp_path: Path) -> None:
    """Handlers of FileNotFoundError and the like catch our errors too, also after pickling."""
    source = checkpoints.tiny(tmp_path / "source")
    file = source / "config.json"
    for path in (tmp_path / "nope", tmp_path / "nope" / "deeper", file / "inside", "memory://nowhere/at-all"):
        with pytest.raises(FileNotFoundError) as missing:
            tx.open(path)
        assert isinstance(missing.value, tx.TransaxleError)
        again = pickle.loads(pickle.dumps(missing.value))  # noqa: S301 - our own
        for error in (missing.value, again):
            assert (error.code, error.exit_code, isinstance(error, FileNotFoundError)) == ("IO", 4, True)
            assert error.errno == errno.ENOENT
            assert str(error).startswith(f"IO  {path}\n    no such file or folder")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tx.convert(source, tmp_path / "no" / "parent", to="hf")
    with pytest.raises(FileExistsError) as there:
        tx.convert(source, source.parent / "source", to="megatron")
    assert isinstance(there.value, tx.TransaxleError)
    assert (there.value.code, there.value.exit_code, there.value.errno) == ("EXISTS", 2, errno.EEXIST)
    with pytest.raises(tx.TransaxleError) as other:
        tx.open(file)
    assert not isinstance(other.value, OSError)


@pytest.mark.parametrize("kind", [PermissionError, IsADirectoryError, NotADirectoryError, FileNotFoundError])
def test_an_error_of_the_system_keeps_its_kind(kind: type[OSError]) -> None:
    error = storage_error(kind(13, "why"), "reading", "x")
    assert isinstance(error, kind)
    assert error.code == "IO"
    assert isinstance(error, OSError)
    assert storage_error(error, "opening", "y") is error, "one that is ours already says what storage_error"
    assert not isinstance(storage_error(OSError(5, "why"), "reading", "x"), OSError)
