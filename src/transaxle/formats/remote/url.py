"""URLs as users type them: their parts, and how to show one without its secrets.

A URL may hold a password, or in its query string a signature that opens the file to whoever reads it. Errors, reports
and logs are read by others, so every URL and every message of a service passes through here before it is shown.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from transaxle.errors import HIDDEN, without_secrets

HUB = "hf"
"""Scheme of the repositories of a Hugging Face hub."""
_LOCAL = "file"
_LOCAL_HOSTS = ("", "localhost")
_SECRET = re.compile(r"(?i)\b([\w-]*(?:secret|token|signature|password|credential|access[_-]?key)[\w-]*\s*[=:])\s*\S+")
_KEY_ID = re.compile(r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{8,}|hf_[A-Za-z0-9]{8,})\b")
_LONGEST = 300
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}
"""Scheme -> another scheme for the same service."""


def scheme(url: str) -> str:
    """Return the part before the `://`."""
    return url.partition("://")[0]


def local_path(url: str) -> str | None:
    """Return the path on this machine that a `file://` URL denotes; None for any other URL, or another host's."""
    if scheme(url).lower() != _LOCAL:
        return None
    parts = urlsplit(url)
    after_scheme = url.partition("://")[2]
    return unquote(after_scheme.removeprefix(parts.netloc)) if parts.netloc in _LOCAL_HOSTS else None


def address(url: str) -> str:
    """Return a URL in one canonical spelling, for comparison: one scheme per service, no repeated slashes, no query."""
    kind, _, after_scheme = url.partition("?")[0].partition("://")
    parts = [segment for segment in after_scheme.split("/") if segment not in ("", ".")]
    return "/".join((f"{_ALIASES.get(kind.lower(), kind.lower())}:/", *parts))


def harmless(message: str) -> str:
    """Return the first line of what a service said, without passwords, keys and query strings."""
    line = next(iter(message.strip().splitlines()), "")
    line = without_secrets(line)
    line = _KEY_ID.sub(HIDDEN, _SECRET.sub(rf"\1{HIDDEN}", line))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}{HIDDEN}"
