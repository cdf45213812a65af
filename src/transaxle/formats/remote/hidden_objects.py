"""What lies beside a target on a service while several workers write to it: how it was begun, and what they have done.

A service has no hidden folder that becomes the target. But every worker that may write the target can write beside it,
so results of work need no file system that all machines share. The name is that of a hidden folder on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from transaxle.errors import refuse
from transaxle.formats.remote.multipart import Multipart
from transaxle.formats.remote.service import Service
from transaxle.formats.strict_json import NotJsonError, parsed_as

_ENDING = "transaxle-partial"
_BEGUN, _COMMIT, _ITEMS = "begun", "commit", "items"
_FORM = 2
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class BegunUpload(msgspec.Struct, frozen=True, kw_only=True):
    """Uploads that have begun, as data: any process can go on with them."""

    form: int = _FORM
    """Version of what follows."""
    token: str
    """Names this beginning; what belongs to another one does not count."""
    task: str
    """What the work belongs to."""
    division: str
    """Hash of which item sends which files."""
    uploads: dict[str, str]
    """File -> its upload."""
    places: dict[str, str]
    """File -> what the client calls it."""
    items: int = 0
    """How many items of work there are."""
    continued: bool = False
    """Somebody has gone on with it: parts may be there that no result tells of."""


class BegunCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit that has begun lets appear."""

    token: str
    """Of the beginning that it ends."""
    tags: dict[str, str]
    """File -> the tag that it will have, in order of appearance; empty where the service makes up its own."""


class HiddenObjects:
    """Small objects beside a target.

    Args:
        service: its path is the target.
        calls: of the service.
    """

    def __init__(self, service: Service, calls: Multipart) -> None:
        self._service = service
        self._calls = calls
        self.path = hidden_path(service.path)
        """What the client calls the hidden folder."""

    def begun(self) -> BegunUpload | None:
        """Return how the work was begun; None where there is none.

        Raises:
            Refused: CORRUPT where it cannot be read.
        """
        return self._read(_BEGUN, BegunUpload)

    def begin(self, begun: BegunUpload, *, new: bool = False) -> None:
        """Say that the work has begun.

        Args:
            begun: how.
            new: only where no other work has.

        Raises:
            UsageError: EXISTS, where `new`.
        """
        self._put(_BEGUN, msgspec.json.encode(begun), new=new)

    def commit(self) -> BegunCommit | None:
        """Return what a commit has begun to let appear; None where none has begun."""
        return self._read(_COMMIT, BegunCommit)

    def begin_commit(self, commit: BegunCommit) -> None:
        """Say that the files appear now."""
        self._put(_COMMIT, msgspec.json.encode(commit))

    def result(self, number: int) -> bytes | None:
        """Return the result of an item of work."""
        return self._calls.get(f"{self.path}/{_ITEMS}/{number}", self._service.shown)

    def put_result(self, number: int, text: bytes) -> None:
        """Keep the result of an item of work."""
        self._put(f"{_ITEMS}/{number}", text)

    def names(self) -> list[str]:
        """Return the names of all of these objects."""
        return [path.removeprefix(f"{self.path}/") for path in self._service.below(self.path, self._service.shown)]

    def numbers(self) -> list[int]:
        """Return the numbers of the items that have a result."""
        parts = (name.split("/") for name in self.names())
        return sorted(int(part[1]) for part in parts if len(part) == 2 and part[0] == _ITEMS and part[1].isdigit())

    def delete(self, names: Sequence[str] | None = None, *, finished: bool = False) -> None:
        """Remove some objects, or all.

        Args:
            names: of them.
            finished: the target is complete: what says how it has begun goes first, so that nobody goes on. Otherwise
                it goes last, so that removing can be repeated.
        """
        found = self.names() if names is None else names
        last = (_BEGUN, _COMMIT) if finished else (_COMMIT, _BEGUN)
        order = {name: number + 1 for number, name in enumerate(last)}
        for name in sorted(found, key=lambda each: ((order.get(each, 3 if finished else 0)), each)):
            self._service.delete(f"{self.path}/{name}", self._service.shown)

    def delete_result(self, number: int) -> None:
        """Remove the result of an item."""
        self.delete([f"{_ITEMS}/{number}"])

    def _put(self, name: str, data: bytes, *, new: bool = False) -> None:
        self._calls.put(f"{self.path}/{name}", data, self._service.shown, new=new)

    def _read(self, name: str, kind: type[_Kind]) -> _Kind | None:
        text = self._calls.get(f"{self.path}/{name}", self._service.shown)
        try:
            return None if text is None else parsed_as(text, kind)
        except NotJsonError:
            message = f"{name} beside the target is none of this program's, or damaged"
            hint = "Remove the unfinished work:  transaxle clean URL."
            raise refuse("CORRUPT", message, file=self._service.shown, hint=hint) from None


def hidden_path(path: str) -> str:
    """Return what the client calls the hidden folder beside a target.

    Args:
        path: what it calls the target.
    """
    above, _, name = path.rpartition("/")
    return f"{above}/.{name}.{_ENDING}"
