"""URLs are told from paths, and shown without what is secret in them."""

from __future__ import annotations

import time

import pytest

from transaxle.errors import without_secrets
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.service import harmless, local_path
from transaxle.formats.store.staging import display_path

SECRET = "sEcReT"


@pytest.mark.parametrize("path", ["s3://bucket/x", "memory://x", "file:///x", "a+b-c.d://x", "HTTP://x"])
def test_urls(path: str) -> None:
    assert is_url(path)


@pytest.mark.parametrize("path", ["", "a/b", "/a://b", "1://x", "C:\\x", "a:b", "simplecache::s3://x", "ä://x"])
def test_paths(path: str) -> None:
    assert not is_url(path)
    assert display_path(path) == path


def test_local_files() -> None:
    assert local_path("file:///a%20b/c") == local_path("file://localhost/a b/c") == "/a b/c"
    assert local_path("file:///a?b#c") == "/a?b#c"
    assert local_path("file://elsewhere/c") is None
    assert local_path("s3://bucket/c") is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a b/c", "s3://bucket/a b/c"),
        (f"https://host/x.bin?sig={SECRET}&b=c", "https://host/x.bin?…"),
        (f"ftp://me:{SECRET}@host/x", "ftp://me:…@host/x"),
        (f"https://{SECRET}@host/x", "https://…@host/x"),
        ("abfs://container@account.example/x", "abfs://container@account.example/x"),
    ],
)
def test_shown(url: str, expected: str) -> None:
    assert display_path(url) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", ""),
        ("plain\nand more", "plain"),
        (f"403, url='https://host/x?X-Amz-Signature={SECRET}'", "403, url='https://host/x?…'"),
        (f"aws_secret_access_key = {SECRET} is wrong", "aws_secret_access_key =… is wrong"),
        ("key AKIAIOSFODNN7EXAMPLE unknown", "key … unknown"),
        (f"cannot reach s3://id:{SECRET}@host", "cannot reach s3://id:…@host"),
        ("x" * 1000, "x" * 300 + "…"),
    ],
)
def test_harmless(said: str, expected: str) -> None:
    assert harmless(said) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"http:///user:{SECRET}@host", f"http:////{SECRET}@host/x", f"http:\\/\\/user:{SECRET}@host\\/x",
        f"http:\\/\\/host\\/x?sig={SECRET}", f"s3:///AKIA:{SECRET}@bucket", f"a http://b:80/c,http://u:{SECRET}@d",
    ],
)  # fmt: skip
def test_slashes_of_any_kind_hide_nothing(text: str) -> None:
    """One too many, as people type, and with a backslash, as some write JSON."""
    assert SECRET not in without_secrets(text)
    assert SECRET not in harmless(text)
    assert without_secrets(text)[:5] == text[:5]


@pytest.mark.parametrize(
    "part", ["/", "\\/", "://", "://a", "://a:", "://a:b@", "http://", "http://x?", "https:/a#", "@:"]
)
def test_a_text_by_the_megabyte_takes_no_time(part: str) -> None:
    """Names of tensors are a stranger's: time must not grow with the square of their length."""
    begun = time.process_time()
    without_secrets("http:" + part * (1_000_000 // len(part)))
    without_secrets(part * (1_000_000 // len(part)))
    assert time.process_time() - begun < 5
