"""The parts of `hf://OWNER/NAME@REVISION/FOLDER`, and how it is written with the commit that was read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from transaxle.errors import refuse, without_secrets
from transaxle.formats.remote.url import HUB
from transaxle.formats.storage.storage import checked_parts

_DEFAULT = "main"
_MODELS = "models"
_KINDS = (_MODELS, "datasets", "spaces")
"""Kinds of repositories; the first may be left out."""
_OTHERS = ("buckets", "kernels")
"""What a hub has beside them."""
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_FORM = re.compile(
    rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]*))?(?:/(?P<inside>.*))?",
    re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HINT = "Write hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME@REVISION/FOLDER."


def is_commit(text: str) -> bool:
    """Tell whether a text is the full hash of a commit."""
    return _COMMIT.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class HubUrl:
    """A place in a repository."""

    kind: str
    """`models`, `datasets` or `spaces`."""
    repository: str
    """`OWNER/NAME`."""
    revision: str
    """Branch, tag or commit."""
    inside: str
    """Path of a folder or file in it; empty for all of it."""

    @property
    def _prefix(self) -> str:
        return "" if self.kind == _MODELS else f"{self.kind}/"

    @property
    def page(self) -> str:
        """Path of the repository's page, below the hub's address."""
        return f"/{self._prefix}{self.repository}"

    @property
    def api(self) -> str:
        """Path of what the hub tells of the repository."""
        return f"/api/{self.kind}/{self.repository}"

    def file(self, commit: str, path: str) -> str:
        """Return the path of a file's bytes at a commit."""
        return f"{self.page}/resolve/{commit}/{quote(path)}"

    def tree(self, commit: str, folder: str) -> str:
        """Return the path of the list of a folder at a commit."""
        return f"{self.api}/tree/{commit}{'/' if folder else ''}{quote(folder, safe='')}?recursive=false&expand=false"

    def resolving(self) -> str:
        """Return the path of what the hub tells of the revision."""
        return f"{self.api}/revision/{quote(self.revision, safe='')}"

    def at(self, commit: str) -> str:
        """Return the URL of the same place at a commit."""
        return f"{HUB}://{self._prefix}{self.repository}@{commit}{'/' if self.inside else ''}{self.inside}"


def parse_hub_url(url: str) -> HubUrl:
    """Return the parts of a URL.

    Raises:
        Refused: UNSUPPORTED where it names no repository; PATH_ESCAPE for a path that leads out of it.
    """
    body = url.partition("://")[2]
    first, _, others = body.partition("/")
    if first in _OTHERS:
        raise refuse(
            "UNSUPPORTED", f"checkpoints are not read from a hub's {first}", file=without_secrets(url), hint=_HINT
        )
    match = _FORM.fullmatch(others if first in _KINDS else body)
    if match is None or match["revision"] == "" or any("\ud800" <= letter <= "\udfff" for letter in url):
        raise refuse("UNSUPPORTED", "the URL names no repository of a hub", file=without_secrets(url), hint=_HINT)
    inside = (match["inside"] or "").rstrip("/")
    if inside:
        checked_parts(inside)
    revision = unquote(match["revision"] or _DEFAULT)
    return HubUrl(first if first in _KINDS else _MODELS, match["repository"], revision, inside)
