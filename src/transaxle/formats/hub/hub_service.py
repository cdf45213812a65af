"""A repository of a hub as a service: lists, and ranges of files, all of one commit.

The revision is resolved when the repository is opened, and everything after that is asked for at the commit: a branch
that moves meanwhile changes nothing. The hub keeps large files elsewhere, under addresses that are signed for an hour
or so: each is asked for once a file, without bytes, and again when it is no longer taken.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec

from transaxle.errors import refuse
from transaxle.formats.hub.hub_refusals import refusal, refusal_elsewhere
from transaxle.formats.hub.hub_requests import OF_FILE, Answer, HubRequests
from transaxle.formats.hub.hub_url import is_commit, parse_hub_url
from transaxle.formats.remote.service import FILE, RANGES, Info
from transaxle.formats.remote.url import HUB, harmless
from transaxle.formats.strict_json import NotJsonError, parsed_as

_FOLDER = "directory"
_LARGEST_PAGE = 16 << 20
_LARGEST_WHOLE = 16 << 20
"""Up to so many bytes a file that the hub keeps itself may come whole where a range was requested; most are smaller."""
_MOST_PAGES = 100
"""Pages of a list; the hub's have a thousand files each."""
_NEXT = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_EXPIRED = frozenset({400, 401, 403, 404, 410})
"""How hosts answer for an address that was signed too long ago."""


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Large(msgspec.Struct):
    oid: str
    size: _Size


class _Entry(msgspec.Struct):
    """One line of a list."""

    type: str
    path: str
    size: _Size = 0
    oid: str = ""
    lfs: _Large | None = None


class _Revision(msgspec.Struct):
    sha: str


_Form = TypeVar("_Form")


class HubService:
    """The repository behind one URL, at one commit (see `formats.remote.service.Readable`).

    Args:
        url: `hf://OWNER/NAME`, with a revision and a folder or file if wanted.

    Raises:
        Refused: UNSUPPORTED where the URL names no repository, or the network is forbidden; PATH_ESCAPE.
        StorageError: IO where there is none, it is not for this user, or the hub cannot be reached.
    """

    scheme = HUB
    """What stands before the `://`."""
    pinned = True
    """What is at a commit never changes."""

    def __init__(self, url: str) -> None:
        self._place = parse_hub_url(url)
        self._requests = HubRequests(url)
        self._commit = ""
        self._lists: dict[str, dict[str, Info]] = {}
        self._at: dict[str, str] = {}
        address = self._requests.endpoint + self._place.resolving()
        answer = self._asked(self._requests.get(address, url, _LARGEST_PAGE), url)
        revision = self._decoded(answer, _Revision, url)
        if not is_commit(revision.sha):
            raise refuse("IO", "the hub does not tell the commit of the revision", file=url, hint=_NO_HUB)
        if is_commit(self._place.revision) and revision.sha != self._place.revision:
            message = f"commit {self._place.revision} was requested, and the hub gives {revision.sha}"
            raise refuse("CORRUPT", message, file=url)
        self._commit = revision.sha
        self.shown = self._place.at(self._commit)
        """The URL at the commit that is read."""
        self.path = f"/{self._place.inside}" if self._place.inside else ""
        """Where the URL leads to in the repository: empty for all of it, otherwise with a `/` before it."""

    def info(self, path: str, file: str) -> Info | None:
        """Return what is known of a file or folder; None if it does not exist.

        Raises:
            StorageError: IO.
        """
        if not path:
            return {"name": path, "type": _FOLDER}
        return self._list(path.rpartition("/")[0], file).get(path)

    def members(self, path: str, file: str) -> list[Info]:
        """Return the direct contents of a folder; empty if it does not exist.

        Raises:
            StorageError: IO.
        """
        return list(self._list(path, file).values())

    def fetch(self, path: str, start: int, stop: int, file: str) -> bytes:
        """Return a range of a file's bytes.

        Raises:
            Refused: CORRUPT where it is not the file of the list.
            StorageError: IO.
        """
        if start >= stop:
            return b""
        info = self.info(path, file)
        if info is None or info["type"] != FILE:
            raise refuse("IO", "no such file", file=file, system=FileNotFoundError)
        size = int(info["size"])
        most = size if info["whole"] else stop - start
        address = self._at.get(path)
        if address is not None:
            answer = self._requests.get(address, file, most, (start, stop))
            if answer.status not in _EXPIRED:
                return self._checked(answer, start, stop, size, file)
        address = self._at[path] = self._found(path, info, file)
        answer = self._requests.get(address, file, most, (start, stop))
        return self._checked(answer, start, stop, size, file)

    def _found(self, path: str, info: Info, file: str) -> str:
        """Return where a file's bytes are, after a look that it is the one of the list."""
        address = self._requests.endpoint + self._place.file(self._commit, path.removeprefix("/"))
        answer = self._requests.head(address, file)
        if answer.location is None:
            self._asked(answer, file)
        listed_headers = self._commit, str(info["size"]), str(info["ETag"])
        for what, header, listed in zip(("its commit", "its bytes", "its hash"), OF_FILE, listed_headers, strict=True):
            found = answer.says(header).removeprefix("W/").strip('"')
            if found and found != listed:
                message = f"the hub does not give the file that it lists: {what}: {listed} listed, {found} given"
                raise refuse("CORRUPT", harmless(message), file=file)
        return answer.location or answer.url

    def _checked(self, answer: Answer, start: int, stop: int, size: int, file: str) -> bytes:
        """Return the bytes of an answer that is just the range that was requested."""
        if answer.status == 416:
            raise refuse("CORRUPT", f"the hub lists {size:,} bytes, and the file ends before {stop:,}", file=file)
        self._asked(answer, file)
        if answer.status == 206:
            match = _CONTENT_RANGE.fullmatch(answer.says("Content-Range").strip())
            if match is None or (int(match[1]), int(match[2])) != (start, stop - 1):
                message = f"bytes {start} to {stop} were requested, but the server sent others"
                raise refuse("IO", message, file=file, hint=RANGES)
            if match[3] not in ("*", str(size)):
                message = f"the hub lists {size:,} bytes, and the server has {int(match[3]):,}"
                raise refuse("CORRUPT", message, file=file)
        elif len(answer.body) == size:
            return answer.body[start:stop]
        if len(answer.body) != stop - start:
            message = f"bytes {start} to {stop} were requested, but the server sent {len(answer.body)}"
            raise refuse("IO", message, file=file, hint=RANGES)
        return answer.body

    def _list(self, path: str, file: str) -> dict[str, Info]:
        if path not in self._lists:
            members = map(_info, self._listed(path.removeprefix("/"), file))
            self._lists[path] = {str(member["name"]): member for member in members}
        return self._lists[path]

    def _listed(self, folder: str, file: str) -> list[_Entry]:
        """Ask for the list of a folder, page by page; empty if there is no such folder."""
        address = self._requests.endpoint + self._place.tree(self._commit, folder)
        entries: list[_Entry] = []
        for _ in range(_MOST_PAGES):
            answer = self._requests.get(address, file, _LARGEST_PAGE)
            if folder and answer.status == 404 and answer.says("X-Error-Code") in ("", "EntryNotFound"):
                return []
            entries += self._decoded(self._asked(answer, file), list[_Entry], file)
            match = _NEXT.search(answer.says("Link"))
            if match is None:
                return entries
            address = match[1]
            if not self._requests.is_home(address):
                raise refuse("IO", "the hub's list goes on at another host", file=file, hint=_NO_HUB)
        raise refuse("UNSUPPORTED", f"the folder has more than {_MOST_PAGES:,} pages of files", file=file)

    def _asked(self, answer: Answer, file: str) -> Answer:
        """Return an answer that is what was asked for."""
        if answer.status not in (200, 206):
            if self._requests.is_home(answer.url):
                raise refusal(answer, self._place, self._requests.endpoint, file)
            raise refusal_elsewhere(answer, file)
        return answer

    def _decoded(self, answer: Answer, form: type[_Form], file: str) -> _Form:
        try:
            return parsed_as(answer.body, form)
        except NotJsonError:
            raise refuse("IO", "the server's answer is none of a hub", file=file, hint=_NO_HUB) from None


_NO_HUB = "Check HF_ENDPOINT: it must be the address of a hub, like https://huggingface.co."


def _info(entry: _Entry) -> Info:
    if entry.type != FILE:
        return {"name": f"/{entry.path}", "type": _FOLDER}
    large = entry.lfs
    size = entry.size if large is None else large.size
    is_small = large is None and size <= _LARGEST_WHOLE
    tag = entry.oid if large is None else large.oid
    return {"name": f"/{entry.path}", "type": FILE, "size": size, "ETag": tag, "whole": is_small}
