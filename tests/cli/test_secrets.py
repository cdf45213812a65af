"""Secrets in URLs are in no message, no bug report and no file that others can read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests import checkpoints
from tests.cli.running import Transaxle
from transaxle.cli.shell import write_report
from transaxle.engine.distribute.work_plan import WorkPlan, write_plan

SECRET = "s3cr/et"
URLS = [
    f"s3://AKIA:{SECRET}@bucket/x", f"s3a://AKIA:12345/{SECRET}@bucket/x",
    f"http://user:{SECRET}@127.0.0.1:1/x?X-Amz-Signature={SECRET}", f"http://127.0.0.1:1/x?sig={SECRET}",
    f"ftp://user:a@{SECRET}@127.0.0.1/x", f"hf://user:{SECRET}@owner/name",
    f"https://127.0.0.1:1/x#access_token={SECRET}",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.tiny(tmp_path_factory.mktemp("secrets") / "source"))


@pytest.mark.parametrize("url", URLS)
def test_no_error_shows_secrets_of_a_url(url: str, source: str, tmp_path: Path) -> None:
    """As a place, as another argument, and as one of the wrong type; as text, and as data."""
    anything: Any = url
    calls: list[Callable[[], object]] = [
        lambda: tx.open(source, config=url),
        lambda: tx.open(source, rules=url),
        lambda: tx.convert(*(source, tmp_path / "out", anything)),  # type: ignore[call-arg]  # as people do
        lambda: tx.open(anything.encode()),
        lambda: tx.convert(source, tmp_path / "out", to=url),
        lambda: tx.open(source, format=anything),
    ]
    for call in calls:
        with pytest.raises((tx.TransaxleError, TypeError, ValueError)) as found:
            call()
        said = str(found.value)
        if isinstance(found.value, tx.TransaxleError):
            said += str([each.as_json() for each in found.value.refusals])
        assert SECRET not in said


@pytest.mark.parametrize("url", URLS)
def test_no_command_prints_secrets_of_a_url(url: str, transaxle: Transaxle, source: str) -> None:
    for arguments in (["ls", source, url], ["ls", source, "--config", url], ["convert", source, url, "--to", url]):
        for more in ([], ["--json"]):
            outcome = transaxle(*arguments, *more)
            assert outcome.code != 0
            assert SECRET not in outcome.out + outcome.err


@pytest.mark.parametrize("url", URLS)
def test_no_bug_report_has_secrets_of_a_url(url: str) -> None:
    try:
        raise RuntimeError(f"reading '{url}' failed")
    except RuntimeError as error:
        said = write_report(error, ["ls", url])
    path = Path(said.partition(", with ")[2].partition(": it has")[0])
    text = path.read_text("utf-8")
    path.unlink()
    assert "RuntimeError: reading '" in text
    assert SECRET not in text


class _Order:
    source, target = f"s3://key:{SECRET}@bucket/x", "/y"


class _Plan:
    order, text = _Order(), b"{}"


def test_only_its_owner_can_read_a_plan_with_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need the URL; everybody else who sees the folder does not."""
    plan: WorkPlan = _Plan()  # type: ignore[assignment]  # what the function looks at
    mask = os.umask(0o022)
    try:
        write_plan(plan, str(tmp_path / "a"))
        monkeypatch.setattr(_Order, "source", "s3://bucket/x")
        write_plan(plan, str(tmp_path / "b"))
    finally:
        os.umask(mask)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o600, 0o644]
    with pytest.raises(tx.TransaxleError, match="already exists"):
        write_plan(plan, str(tmp_path / "b"))


@pytest.mark.parametrize(
    "text",
    ["http://127.0.0.1:8000/a@b", "hf://owner/name@main/folder", "abfs://box@account/x", "C:/x", "a:b@c", "s3://b/x@y"],
)
def test_other_parts_of_a_url_are_shown(text: str) -> None:
    assert str(tx.errors.refuse("IO", text)).endswith(text)
