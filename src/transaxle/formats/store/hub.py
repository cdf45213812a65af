"""Repositories of a Hugging Face hub, read in ranges at one commit.

The revision is resolved when the repository is opened, and everything after that is asked for at the commit: a branch
that moves meanwhile changes nothing. The hub keeps large files elsewhere, under addresses that are signed for an hour
or so: each is asked for once a file, without bytes, and again when it is no longer taken.

`huggingface_hub` knows the hub's address and the login; the requests are made here, by a client of httpx. (Its own file
system reads with one client for the whole process, which follows any redirect, also from https to http, reads answers
to their end however long they are, takes bytes of another range, and waits as long as a server says.)

- The token goes to the hub's own address alone: same scheme, host and port.
- A redirect leads to http or https, and never from https to http.
- No answer is read beyond what was asked for, and none for ever.
- What fails for a moment is asked for again, a few times, and as late as the server says if that is not too late.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from transaxle.errors import TransaxleError, refuse, without_secrets
from transaxle.extras import install
from transaxle.formats.storage.storage import NotJsonError, parse_json_as, split_name
from transaxle.formats.store.service import FILE, HUB, RANGES, Info, harmless

if TYPE_CHECKING:
    import httpx


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


class HubUrl(msgspec.Struct, frozen=True):
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
        split_name(inside)
    revision = unquote(match["revision"] or _DEFAULT)
    return HubUrl(first if first in _KINDS else _MODELS, match["repository"], revision, inside)


ATTEMPTS = 5
"""Requests made for one answer, at most."""
LONGEST_WAIT = 300.0
"""Seconds that a server may ask us to wait: the hub counts requests in windows of five minutes."""
_LONGEST_ANSWER = 600.0
"""Seconds that one answer may take."""
_MOST_REDIRECTS = 10
OF_FILE = ("X-Repo-Commit", "X-Linked-Size", "X-Linked-ETag")
"""Headers by which a hub tells which file it gives: commit, bytes, hash."""
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RATE = re.compile(r";\s*r=0\b.*?;\s*t=([0-9]+)")
_HOW_TO_REACH = "Check the network, and HF_ENDPOINT if it is set."


class Answer(msgspec.Struct, frozen=True):
    """What a server says."""

    status: int
    """Its code."""
    headers: Mapping[str, str]
    """By names in any case."""
    body: bytes
    """What it sent."""
    url: str
    """Who said it; may be signed, so it is never shown whole."""
    known: bool
    """Whether the token was sent along."""
    said: str = ""
    """Why it refuses, in its own words, without what is secret."""
    location: str | None = None
    """Where it redirects to, if that may be followed but was not."""

    def says(self, header: str) -> str:
        """Return a header's text; empty where there is none."""
        return self.headers.get(header, "")


def redirected(url: str, location: str) -> str:
    """Return the address that a redirect leads to.

    Args:
        url: who redirects.
        location: where to, perhaps relative.

    Raises:
        StorageError: IO if it leads out of the web, or from https to http.
    """
    import httpx

    before = httpx.URL(url)
    try:
        after = before.join(location)
    except (httpx.InvalidURL, ValueError):
        raise refuse("IO", f"{before.host} redirects to what is no address", hint=_NO_REDIRECT) from None
    if after.scheme not in ("http", "https") or not after.host:
        message = f"{before.host} redirects to {after.scheme}://, and only http and https are followed"
        raise refuse("IO", message, hint=_NO_REDIRECT)
    if before.scheme == "https" and after.scheme != "https":
        raise refuse("IO", f"{before.host} redirects from https to http://{after.host}", hint=_NO_REDIRECT)
    return str(after)


_NO_REDIRECT = "Nothing was requested there. Tell those who run the hub, or check HF_ENDPOINT."


class HubRequests:
    """A hub, and what it is asked.

    Args:
        shown: URL of the repository, for errors.

    Raises:
        Refused: UNSUPPORTED where a package is missing, the network is forbidden, or the hub has no address on the web.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        try:
            import httpx
            from huggingface_hub import constants
        except ImportError:
            message, hint = "no installed package can open hf:// URLs", f"Install it:  {install('hf')}"
            raise refuse("UNSUPPORTED", message, file=shown, hint=hint) from None
        if constants.HF_HUB_OFFLINE:
            hint = "Unset HF_HUB_OFFLINE; or give the folder of a download, which `hf download OWNER/NAME` prints."
            raise refuse("UNSUPPORTED", "HF_HUB_OFFLINE forbids the network", file=shown, hint=hint)
        self.endpoint = str(constants.ENDPOINT).rstrip("/")
        """The hub's address."""
        try:
            self._home = _origin(httpx.URL(self.endpoint))
        except (httpx.InvalidURL, ValueError):
            self._home = ("", "", None)
        if self._home[0] not in ("http", "https") or not self._home[1]:
            message = f"the hub's address {without_secrets(self.endpoint)} is none of the web"
            raise refuse("UNSUPPORTED", message, file=shown, hint="HF_ENDPOINT is like https://huggingface.co.")
        self._metadata_timeout = float(constants.HF_HUB_ETAG_TIMEOUT)
        self._data_timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def is_home(self, url: str) -> bool:
        """Tell whether an address is the hub's own: its scheme, host and port."""
        import httpx

        try:
            return _origin(httpx.URL(url)) == self._home
        except (httpx.InvalidURL, ValueError):
            return False

    def get(self, url: str, file: str, most: int, span: tuple[int, int] | None = None) -> Answer:
        """Return what is at an address, through redirects.

        Args:
            url: the address.
            file: name of what is read, for errors.
            most: cap on the bytes of the answer.
            span: first byte and one past the last; None: all of it.

        Raises:
            StorageError: IO.
        """
        asked = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        for _ in range(_MOST_REDIRECTS):
            answer = self._patiently("GET", url, asked, file, most)
            if answer.location is None:
                return answer
            url = answer.location
        raise refuse("IO", f"{_host(url)} redirects without end", file=file)

    def head(self, url: str, file: str) -> Answer:
        """Return what the hub says of a file, without its bytes; `location` is where it keeps them, if not here.

        Redirects are followed until somebody says which file it is: of a repository with another name, of a mirror to
        the hub. What follows then may be signed for reading alone.

        Raises:
            StorageError: IO.
        """
        for _ in range(_MOST_REDIRECTS):
            answer = self._patiently("HEAD", url, {}, file, 0)
            if answer.location is None or any(map(answer.says, OF_FILE)):
                return answer
            url = answer.location
        raise refuse("IO", f"{_host(url)} redirects without end", file=file)

    def _patiently(self, method: str, url: str, headers: Mapping[str, str], file: str, most: int) -> Answer:
        """Make one request, again where it fails for a moment."""
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            pause = 2 ** (attempt - 2) * (1 + random.random() / 4)  # not all workers at once
            try:
                answer = self._once(method, url, headers, file, most)
            except _PassingError as error:
                if last:
                    raise refuse("IO", f"{error.said}, {ATTEMPTS} times", file=file, hint=_HOW_TO_REACH) from None
            else:
                if answer.status not in _AGAIN or last:
                    return answer
                asked = _wait(answer)
                if asked > LONGEST_WAIT:
                    message = f"{_host(url)} answers {answer.status}, and asks to come back in {asked:,.0f} seconds"
                    raise refuse("IO", message, file=file, hint="Run it again then.")
                pause = max(pause, asked)
            time.sleep(pause)
        raise AssertionError

    def _once(self, method: str, url: str, headers: Mapping[str, str], file: str, most: int) -> Answer:
        import httpx

        is_home = self.is_home(url)
        token = _login(self._shown) if is_home else ""
        sent = {**headers, "Accept-Encoding": "identity", "User-Agent": "transaxle"}
        if token:
            sent["Authorization"] = f"Bearer {token}"
        seconds = self._data_timeout if "Range" in headers else self._metadata_timeout
        client = _client()
        try:
            request = client.build_request(method, url, headers=sent, timeout=httpx.Timeout(seconds, pool=None))
            response = client.send(request, stream=True, follow_redirects=False)
            try:
                status = response.status_code
                cap = most if status in (200, 206) else 1 << 16
                body = b"" if method == "HEAD" else _bounded(response, cap, status, file)
            finally:
                response.close()
            location = None
            if status in _REDIRECTS:
                location = redirected(url, response.headers.get("Location", ""))
            said = harmless(_without(token, response.headers.get("X-Error-Message", "")))
            return Answer(status, response.headers, body, url, bool(token), said, location)
        except MemoryError:
            raise
        except TransaxleError as error:
            refusal = error.refusals[0]
            raise refuse(refusal.code, refusal.message, file=file, hint=refusal.hint) from None
        except httpx.InvalidURL:
            message = f"{_host(url)} redirects to what is no address"
            raise refuse("IO", message, file=file, hint=_NO_REDIRECT) from None
        except httpx.TransportError as error:
            kind, said = type(error).__name__, harmless(_without(token, str(error)))
            raise _PassingError(f"{_host(url)} cannot be read ({kind}{': ' if said else ''}{said})") from None
        except Exception as error:  # noqa: BLE001 - what libraries raise may have the token in it
            raise refuse("IO", f"asking {_host(url)}: {type(error).__name__}", file=file) from None


CLIENTS: dict[int, httpx.Client] = {}
"""Process -> its client, with connections that all repositories and threads share, and no forked process."""


def _client() -> httpx.Client:
    import httpx

    process = os.getpid()
    return CLIENTS.get(process) or CLIENTS.setdefault(process, httpx.Client(follow_redirects=False))


class _PassingError(Exception):
    """A failure that may be over at the next attempt."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


def _login(shown: str) -> str:
    """Return the token of the user's login or environment; empty if there is none."""
    from huggingface_hub import constants, get_token

    try:
        token = "" if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token() or ""
    except Exception as error:  # noqa: BLE001 - its message may hold what was read
        message = f"reading the login of the hub: {type(error).__name__}"
        raise refuse("IO", message, file=shown, hint="Log in again:  hf auth login") from None
    if not (token.isascii() and token.isprintable()):
        hint = "Set HF_TOKEN anew, or log in again:  hf auth login"
        raise refuse("IO", "the token of the hub has letters that no token has", file=shown, hint=hint)
    return token


def _without(token: str, text: str) -> str:
    return text.replace(token, "…") if token else text


def _bounded(response: httpx.Response, most: int, status: int, file: str) -> bytes:
    """Return the bytes of an answer as they were sent; too many are refused, except those of an error."""
    begun, data = time.monotonic(), bytearray()
    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise refuse("IO", "the server compresses what was requested as it is", file=file, hint=RANGES)
    for part in response.iter_raw():
        data += part
        if len(data) > most:
            if status >= 300:
                break
            message = f"the server sent more than the {most:,} bytes that were requested"
            raise refuse("IO", message, file=file, hint=RANGES)
        if time.monotonic() - begun > _LONGEST_ANSWER:
            message = f"the server has not sent {most:,} bytes in {_LONGEST_ANSWER:,.0f} seconds"
            raise refuse("IO", message, file=file, hint=_HOW_TO_REACH)
    return bytes(data[:most])


def _wait(answer: Answer) -> float:
    """Return the seconds after which a server wants to be asked again; 0 where it does not say."""
    after = answer.says("Retry-After").strip()
    rate = _RATE.search(answer.says("RateLimit")) if answer.status == 429 else None
    return max(float(after) if after.isdecimal() else 0.0, float(rate[1]) if rate else 0.0)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _host(url: str) -> str:
    import httpx

    return httpx.URL(url).host


_LOG_IN = "hf auth login, or HF_TOKEN"


def refusal(answer: Answer, place: HubUrl, endpoint: str, file: str) -> TransaxleError:
    """Return the error for an answer that is none of what was asked for.

    Args:
        answer: of the hub, or of a host that it sent us to.
        place: what is read.
        endpoint: the hub's address.
        file: name for errors.
    """
    repository, code, said = place.repository, answer.says("X-Error-Code"), answer.said
    page = f"{without_secrets(endpoint)}{place.page}"
    if code == "RevisionNotFound":
        message = f"{repository} has no revision {place.revision!r}"
        hint = f"Name a branch, a tag or a commit after the @; they are listed at {page}/tree/main."
    elif code == "GatedRepo":
        message = f"{repository} is gated: its files are for those who were given access"
        hint = f"Ask for access at {page}; then log in with that account ({_LOG_IN})."
    elif said.startswith("Access to this resource is disabled"):
        message, hint = f"the hub has disabled {repository}", f"See {page}."
    elif code == "EntryNotFound":
        message, hint = "the hub lists this file, but does not have it", f"See {page}."
    elif answer.status == 401 and answer.known and code != "RepoNotFound":
        message = "the hub does not accept the token"
        hint = f"It may have expired: log in again ({_LOG_IN}), or remove it to read what is public."
    elif code == "RepoNotFound" or answer.status in (401, 404):
        who = "that this token may see" if answer.known else "that everybody may see"
        message = f"the hub has no repository {repository} {who}"
        hint = f"Check the name at {page}. If it is private, log in with an account that may read it ({_LOG_IN})."
    elif answer.status == 403:
        message = f"access to {repository} is denied"
        hint = f"The token must be allowed to read it: see its permissions in the hub's settings ({_LOG_IN})."
    elif answer.status == 429:
        message, hint = f"too many requests: refused {ATTEMPTS} times", f"Wait, or log in for more ({_LOG_IN})."
    elif answer.status >= 500:
        message, hint = f"the hub answers {answer.status}, {ATTEMPTS} times", "Run it again later."
    else:
        message, hint = f"the hub answers {answer.status}", "Run it again later."
    return refuse("IO", f"{message} ({said})" if said else message, file=file, hint=hint)


def refusal_elsewhere(answer: Answer, file: str) -> TransaxleError:
    """Return the error for an answer of another host, to which the hub has sent us; args as of `refusal`."""
    message = f"the hub redirects to {urlsplit(answer.url).hostname}, which answers {answer.status}"
    return refuse("IO", message, file=file, hint="Run it again later. What the hub gives out is signed for some time.")


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
    """The repository behind one URL, at one commit (see `formats.store.service.Readable`).

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
            return parse_json_as(answer.body, form)
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
