"""Reads repositories of a Hugging Face hub at a fixed commit, by requests for byte ranges.

The revision is resolved to a commit when the repository is opened, and all later requests name this commit, so a branch
may move meanwhile. The hub stores large files on other hosts, under signed addresses that are valid for about an hour.
The address of a file is requested once, and again after it has expired.

The library `huggingface_hub` provides the hub's address and the login; this module makes the requests, with httpx. (The
file system of `huggingface_hub` has one client per process, which follows any redirect, even from https to http, reads
responses of any length, accepts bytes of a wrong range, and waits as long as a server asks.)

- The user's token is sent only to the hub's own address: same scheme, host and port.

- Redirects are followed only to http or https, and never from https to http.

- At most the requested bytes of a response are read, and always with a time limit.

- Temporary failures are retried a few times, after the delay that the server asks for, unless the delay is too long.
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
"""Kinds of repositories on a hub; `models` may be omitted in URLs."""
_OTHERS = ("buckets", "kernels")
"""Kinds of storage on a hub that Transaxle does not read."""
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_FORM = re.compile(
    rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]*))?(?:/(?P<inside>.*))?",
    re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HINT = "Write hf://OWNER/NAME, hf://OWNER/NAME@REVISION or hf://OWNER/NAME@REVISION/FOLDER."


def is_commit(text: str) -> bool:
    """Return whether a string is a full commit hash."""
    return _COMMIT.fullmatch(text) is not None


class HubUrl(msgspec.Struct, frozen=True):
    """A parsed `hf://` URL: a repository, a revision, and a path inside the repository."""

    kind: str
    """Kind of repository: `models`, `datasets` or `spaces`."""
    repository: str
    """Name of the repository, as `OWNER/NAME`."""
    revision: str
    """Branch, tag or commit of the repository; `main` by default."""
    inside: str
    """Path of a folder or file inside the repository; empty for the whole repository."""

    @property
    def _prefix(self) -> str:
        return "" if self.kind == _MODELS else f"{self.kind}/"

    @property
    def page(self) -> str:
        """URL path of the repository's page on the hub."""
        return f"/{self._prefix}{self.repository}"

    @property
    def api(self) -> str:
        """URL path of the repository in the hub's API."""
        return f"/api/{self.kind}/{self.repository}"

    def file(self, commit: str, path: str) -> str:
        """Return the URL path of a file in the repository at a commit."""
        return f"{self.page}/resolve/{commit}/{quote(path)}"

    def tree(self, commit: str, folder: str) -> str:
        """Return the URL path of a folder's listing at a commit."""
        return f"{self.api}/tree/{commit}{'/' if folder else ''}{quote(folder, safe='')}?recursive=false&expand=false"

    def revision_path(self) -> str:
        """Return the URL path of the revision in the hub's API."""
        return f"{self.api}/revision/{quote(self.revision, safe='')}"

    def at(self, commit: str) -> str:
        """Return the `hf://` URL with the commit as revision."""
        return f"{HUB}://{self._prefix}{self.repository}@{commit}{'/' if self.inside else ''}{self.inside}"


def parse_hub_url(url: str) -> HubUrl:
    """Parse an `hf://` URL.

    Raises:
        Refused: with the code UNSUPPORTED for a URL without a repository; with the code PATH_ESCAPE for a path that
            leads out of the repository.
    """
    body = url.partition("://")[2]
    first, _, rest_of_path = body.partition("/")
    if first in _OTHERS:
        raise refuse(
            "UNSUPPORTED", f"checkpoints are not read from a hub's {first}", file=without_secrets(url), hint=_HINT
        )
    match = _FORM.fullmatch(rest_of_path if first in _KINDS else body)
    if match is None or match["revision"] == "" or any("\ud800" <= letter <= "\udfff" for letter in url):
        raise refuse("UNSUPPORTED", "the URL names no repository of a hub", file=without_secrets(url), hint=_HINT)
    inside = (match["inside"] or "").rstrip("/")
    if inside:
        split_name(inside)
    revision = unquote(match["revision"] or _DEFAULT)
    return HubUrl(first if first in _KINDS else _MODELS, match["repository"], revision, inside)


ATTEMPTS = 5
"""Maximum number of times that a request is tried."""
LONGEST_WAIT = 300.0
"""Longest delay in seconds that a server may ask for; the hub limits the number of requests in windows of five
minutes."""
_MAX_SECONDS = 600.0
"""Maximum duration of one response in seconds."""
_MAX_REDIRECTS = 10
OF_FILE = ("X-Repo-Commit", "X-Linked-Size", "X-Linked-ETag")
"""Response headers that identify a file by its commit, its size in bytes, and its hash."""
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RATE = re.compile(r";\s*r=0\b.*?;\s*t=([0-9]+)")
_HOW_TO_REACH = "Check the network, and HF_ENDPOINT if it is set."


class Answer(msgspec.Struct, frozen=True):
    """The response of a server to one request."""

    status: int
    """HTTP status code of the response."""
    headers: Mapping[str, str]
    """Headers of the response; header names are case-insensitive."""
    body: bytes
    """Body of the response, up to the permitted size."""
    url: str
    """URL of the response; it may contain a signature, so it is never shown in full."""
    had_token: bool
    """Whether the request included the user's token."""
    message: str = ""
    """The server's error message, without passwords and tokens."""
    location: str | None = None
    """Address to which a redirect leads that was not followed; None if the response is no redirect."""

    def says(self, header: str) -> str:
        """Return the value of a response header; empty if the header is missing."""
        return self.headers.get(header, "")


def redirect_target(url: str, location: str) -> str:
    """Return the absolute address to which a redirect leads, after checking the scheme.

    Args:
        url: address of the request that was redirected.
        location: the redirect's `Location` header, absolute or relative.

    Raises:
        StorageError: with the code IO for a scheme other than http and https, and for a redirect from https to http.
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


_NO_REDIRECT = "No request was sent to that address. Check HF_ENDPOINT, or report it to the operators of the hub."


class HubRequests:
    """Makes requests to a hub, with retries and redirects.

    Args:
        shown: URL of the repository, for error messages.

    Raises:
        Refused: with the code UNSUPPORTED if a package is missing, network access is forbidden, or the hub's address is
            not http(s).
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
        """Address of the hub, without a trailing `/`."""
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
        """Return whether a URL has the hub's own scheme, host and port."""
        import httpx

        try:
            return _origin(httpx.URL(url)) == self._home
        except (httpx.InvalidURL, ValueError):
            return False

    def get(self, url: str, file: str, max_bytes: int, span: tuple[int, int] | None = None) -> Answer:
        """Make a GET request, and follow redirects.

        Args:
            url: address to request.
            file: name of the file, for error messages.
            max_bytes: maximum size of the response in bytes.
            span: `(first byte, offset after the last byte)` of the requested range; None for the whole file.

        Raises:
            StorageError: with the code IO if the request fails.
        """
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1] - 1}"}
        for _ in range(_MAX_REDIRECTS):
            answer = self._request("GET", url, headers, file, max_bytes)
            if answer.location is None:
                return answer
            url = answer.location
        raise refuse("IO", f"{_host(url)} redirects without end", file=file)

    def head(self, url: str, file: str) -> Answer:
        """Make a HEAD request for a file; if the file's bytes are at a different address, this address is the
        response's `location`.

        Redirects (of a renamed repository, or from a mirror to the hub) are followed until a response identifies the
        file by its headers. A redirect in the response that identifies the file is not followed, because its target may
        be an address signed for GET requests only.

        Raises:
            StorageError: with the code IO if the request fails.
        """
        for _ in range(_MAX_REDIRECTS):
            answer = self._request("HEAD", url, {}, file, 0)
            if answer.location is None or any(map(answer.says, OF_FILE)):
                return answer
            url = answer.location
        raise refuse("IO", f"{_host(url)} redirects without end", file=file)

    def _request(self, method: str, url: str, headers: Mapping[str, str], file: str, max_bytes: int) -> Answer:
        """Make a request, and retry it after temporary failures."""
        for attempt in range(1, ATTEMPTS + 1):
            last = attempt == ATTEMPTS
            # the delay before a retry is partly random, so that workers do not all retry at the same time
            pause = 2 ** (attempt - 2) * (1 + random.random() / 4)
            try:
                answer = self._request_once(method, url, headers, file, max_bytes)
            except _TemporaryError as error:
                if last:
                    raise refuse("IO", f"{error.message}, {ATTEMPTS} times", file=file, hint=_HOW_TO_REACH) from None
            else:
                if answer.status not in _AGAIN or last:
                    return answer
                delay = _wait(answer)
                if delay > LONGEST_WAIT:
                    message = f"{_host(url)} answers {answer.status}, and asks to come back in {delay:,.0f} seconds"
                    raise refuse("IO", message, file=file, hint="Run the command again after this time.")
                pause = max(pause, delay)
            time.sleep(pause)
        raise AssertionError

    def _request_once(self, method: str, url: str, headers: Mapping[str, str], file: str, max_bytes: int) -> Answer:
        import httpx

        is_home = self.is_home(url)
        token = _login(self._shown) if is_home else ""
        request_headers = {**headers, "Accept-Encoding": "identity", "User-Agent": "transaxle"}
        if token:
            request_headers["Authorization"] = f"Bearer {token}"
        seconds = self._data_timeout if "Range" in headers else self._metadata_timeout
        client = _client()
        try:
            request = client.build_request(
                method, url, headers=request_headers, timeout=httpx.Timeout(seconds, pool=None)
            )
            response = client.send(request, stream=True, follow_redirects=False)
            try:
                status = response.status_code
                cap = max_bytes if status in (200, 206) else 1 << 16
                body = b"" if method == "HEAD" else _read_body(response, cap, status, file)
            finally:
                response.close()
            location = None
            if status in _REDIRECTS:
                location = redirect_target(url, response.headers.get("Location", ""))
            text = harmless(_without(token, response.headers.get("X-Error-Message", "")))
            return Answer(status, response.headers, body, url, bool(token), text, location)
        except MemoryError:
            raise
        except TransaxleError as error:
            refusal = error.refusals[0]
            raise refuse(refusal.code, refusal.message, file=file, hint=refusal.hint) from None
        except httpx.InvalidURL:
            message = f"{_host(url)} redirects to what is no address"
            raise refuse("IO", message, file=file, hint=_NO_REDIRECT) from None
        except httpx.TransportError as error:
            kind, text = type(error).__name__, harmless(_without(token, str(error)))
            raise _TemporaryError(f"{_host(url)} cannot be read ({kind}{': ' if text else ''}{text})") from None
        except Exception as error:  # noqa: BLE001 - what libraries raise may have the token in it
            raise refuse("IO", f"asking {_host(url)}: {type(error).__name__}", file=file) from None


CLIENTS: dict[int, httpx.Client] = {}
"""Process id -> HTTP client; all repositories and threads of a process share one client, and forked processes have
separate clients."""


def _client() -> httpx.Client:
    import httpx

    process = os.getpid()
    return CLIENTS.get(process) or CLIENTS.setdefault(process, httpx.Client(follow_redirects=False))


class _TemporaryError(Exception):
    """Raised for a temporary failure, after which the request is tried again."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def _login(shown: str) -> str:
    """Return the token of the user's login or environment; empty if there is no token."""
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


def _read_body(response: httpx.Response, max_bytes: int, status: int, file: str) -> bytes:
    """Read the raw body of a response; refuse a body that is too long, but only truncate the body of an error
    response.
    """
    start, data = time.monotonic(), bytearray()
    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise refuse("IO", "the server compresses what was requested as it is", file=file, hint=RANGES)
    for part in response.iter_raw():
        data += part
        if len(data) > max_bytes:
            if status >= 300:
                break
            message = f"the server sent more than the {max_bytes:,} bytes that were requested"
            raise refuse("IO", message, file=file, hint=RANGES)
        if time.monotonic() - start > _MAX_SECONDS:
            message = f"the server has not sent {max_bytes:,} bytes in {_MAX_SECONDS:,.0f} seconds"
            raise refuse("IO", message, file=file, hint=_HOW_TO_REACH)
    return bytes(data[:max_bytes])


def _wait(answer: Answer) -> float:
    """Return the delay in seconds that a server asks for before a retry; 0 if the server asks for none."""
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
    """Return the error to raise for an error response of the hub.

    Args:
        answer: the hub's response.
        place: parsed `hf://` URL that is being read.
        endpoint: address of the hub.
        file: name of the file, for the error message.
    """
    repository, code, text = place.repository, answer.says("X-Error-Code"), answer.message
    page = f"{without_secrets(endpoint)}{place.page}"
    if code == "RevisionNotFound":
        message = f"{repository} has no revision {place.revision!r}"
        hint = f"Name a branch, a tag or a commit after the @; they are listed at {page}/tree/main."
    elif code == "GatedRepo":
        message = f"{repository} is gated: its files are for those who were given access"
        hint = f"Ask for access at {page}; then log in with that account ({_LOG_IN})."
    elif text.startswith("Access to this resource is disabled"):
        message, hint = f"the hub has disabled {repository}", f"See {page}."
    elif code == "EntryNotFound":
        message, hint = "the hub lists this file, but does not have it", f"See {page}."
    elif answer.status == 401 and answer.had_token and code != "RepoNotFound":
        message = "the hub does not accept the token"
        hint = f"The token may have expired: log in again ({_LOG_IN}), or remove it to read what is public."
    elif code == "RepoNotFound" or answer.status in (401, 404):
        who = "that this token may see" if answer.had_token else "that everybody may see"
        message = f"the hub has no repository {repository} {who}"
        hint = f"Check the name at {page}. If it is private, log in with an account that may read it ({_LOG_IN})."
    elif answer.status == 403:
        message = f"access to {repository} is denied"
        hint = f"The token must be allowed to read it: see its permissions in the hub's settings ({_LOG_IN})."
    elif answer.status == 429:
        message, hint = f"too many requests: refused {ATTEMPTS} times", f"Wait, or log in for more ({_LOG_IN})."
    elif answer.status >= 500:
        message, hint = f"the hub answers {answer.status}, {ATTEMPTS} times", "Run the command again later."
    else:
        message, hint = f"the hub answers {answer.status}", "Run the command again later."
    return refuse("IO", f"{message} ({text})" if text else message, file=file, hint=hint)


def refusal_elsewhere(answer: Answer, file: str) -> TransaxleError:
    """Return the error to raise for an error response of a host to which the hub redirected; the arguments are those of
    `refusal`.
    """
    message = f"the hub redirects to {urlsplit(answer.url).hostname}, which answers {answer.status}"
    return refuse("IO", message, file=file, hint="Run the command again: addresses that a hub returns expire.")


_FOLDER = "directory"
_LARGEST_PAGE = 16 << 20
_LARGEST_WHOLE = 16 << 20
"""Maximum size in bytes of a file for which the whole file is accepted as response to a request for a range."""
_MAX_PAGES = 100
"""Maximum number of pages of a listing; one page of the hub lists a thousand files."""
_NEXT = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_EXPIRED = frozenset({400, 401, 403, 404, 410})
"""HTTP status codes that a host returns for an expired signed address."""


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Large(msgspec.Struct):
    oid: str
    size: _Size


class _Entry(msgspec.Struct):
    """A file or folder in a listing of the hub's API."""

    type: str
    path: str
    size: _Size = 0
    oid: str = ""
    lfs: _Large | None = None


class _Revision(msgspec.Struct):
    sha: str


_Form = TypeVar("_Form")


class HubService:
    """The repository of one URL, at one commit (see `service.Readable`).

    Args:
        url: `hf://OWNER/NAME`, optionally followed by a revision, and by a folder or file.

    Raises:
        Refused: with the code UNSUPPORTED if the URL names no repository, or network access is forbidden; with the code
            PATH_ESCAPE if the URL's path leads out of the repository.
        StorageError: with the code IO if the repository does not exist, this user has no access, or the hub cannot be
            reached.
    """

    scheme = HUB
    """URL scheme of hubs, which is `hf`."""
    pinned = True
    """True, because the content of a commit never changes."""

    def __init__(self, url: str) -> None:
        self._place = parse_hub_url(url)
        self._requests = HubRequests(url)
        self._commit = ""
        self._lists: dict[str, dict[str, Info]] = {}
        self._at: dict[str, str] = {}
        address = self._requests.endpoint + self._place.revision_path()
        answer = self._require_success(self._requests.get(address, url, _LARGEST_PAGE), url)
        revision = self._decode(answer, _Revision, url)
        if not is_commit(revision.sha):
            raise refuse("IO", "the hub does not tell the commit of the revision", file=url, hint=_NO_HUB)
        if is_commit(self._place.revision) and revision.sha != self._place.revision:
            message = f"commit {self._place.revision} was requested, and the hub gives {revision.sha}"
            raise refuse("CORRUPT", message, file=url)
        self._commit = revision.sha
        self.shown = self._place.at(self._commit)
        """The URL with the resolved commit as revision."""
        self.path = f"/{self._place.inside}" if self._place.inside else ""
        """Path of the URL in the repository, with a leading `/`; empty for the whole repository."""

    def info(self, path: str, file: str) -> Info | None:
        """Return what the listing states about a file or folder; None if the path does not exist.

        Raises:
            StorageError: with the code IO if the hub cannot be read.
        """
        if not path:
            return {"name": path, "type": _FOLDER}
        return self._list(path.rpartition("/")[0], file).get(path)

    def members(self, path: str, file: str) -> list[Info]:
        """Return the files and folders directly in a folder; empty if the folder does not exist.

        Raises:
            StorageError: with the code IO if the hub cannot be read.
        """
        return list(self._list(path, file).values())

    def fetch(self, path: str, start: int, stop: int, file: str) -> bytes:
        """Return the bytes of a range of a file.

        Raises:
            Refused: with the code CORRUPT if the file at the address is not the listed file.
            StorageError: with the code IO if the hub cannot be read.
        """
        if start >= stop:
            return b""
        info = self.info(path, file)
        if info is None or info["type"] != FILE:
            raise refuse("IO", "no such file", file=file, system=FileNotFoundError)
        size = int(info["size"])
        max_bytes = size if info["whole"] else stop - start
        address = self._at.get(path)
        if address is not None:
            answer = self._requests.get(address, file, max_bytes, (start, stop))
            if answer.status not in _EXPIRED:
                return self._check_range(answer, start, stop, size, file)
        address = self._at[path] = self._locate(path, info, file)
        answer = self._requests.get(address, file, max_bytes, (start, stop))
        return self._check_range(answer, start, stop, size, file)

    def _locate(self, path: str, info: Info, file: str) -> str:
        """Return the address of a file's bytes, after checking that the response describes the file in the listing."""
        address = self._requests.endpoint + self._place.file(self._commit, path.removeprefix("/"))
        answer = self._requests.head(address, file)
        if answer.location is None:
            self._require_success(answer, file)
        listed_values = self._commit, str(info["size"]), str(info["ETag"])
        for label, header, listed_value in zip(
            ("its commit", "its bytes", "its hash"), OF_FILE, listed_values, strict=True
        ):
            given = answer.says(header).removeprefix("W/").strip('"')
            if given and given != listed_value:
                message = f"the hub does not give the file that it lists: {label}: {listed_value} listed, {given} given"
                raise refuse("CORRUPT", harmless(message), file=file)
        return answer.location or answer.url

    def _check_range(self, answer: Answer, start: int, stop: int, size: int, file: str) -> bytes:
        """Check that a response contains exactly the requested range, and return the bytes."""
        if answer.status == 416:
            raise refuse("CORRUPT", f"the hub lists {size:,} bytes, and the file ends before {stop:,}", file=file)
        self._require_success(answer, file)
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
            members = map(_info, self._request_listing(path.removeprefix("/"), file))
            self._lists[path] = {str(member["name"]): member for member in members}
        return self._lists[path]

    def _request_listing(self, folder: str, file: str) -> list[_Entry]:
        """Request the listing of a folder, page by page; empty if the folder does not exist."""
        address = self._requests.endpoint + self._place.tree(self._commit, folder)
        entries: list[_Entry] = []
        for _ in range(_MAX_PAGES):
            answer = self._requests.get(address, file, _LARGEST_PAGE)
            if folder and answer.status == 404 and answer.says("X-Error-Code") in ("", "EntryNotFound"):
                return []
            entries += self._decode(self._require_success(answer, file), list[_Entry], file)
            match = _NEXT.search(answer.says("Link"))
            if match is None:
                return entries
            address = match[1]
            if not self._requests.is_home(address):
                raise refuse("IO", "the hub's list goes on at another host", file=file, hint=_NO_HUB)
        raise refuse("UNSUPPORTED", f"the folder has more than {_MAX_PAGES:,} pages of files", file=file)

    def _require_success(self, answer: Answer, file: str) -> Answer:
        """Return a successful response; raise an error for an unsuccessful response."""
        if answer.status not in (200, 206):
            if self._requests.is_home(answer.url):
                raise refusal(answer, self._place, self._requests.endpoint, file)
            raise refusal_elsewhere(answer, file)
        return answer

    def _decode(self, answer: Answer, form: type[_Form], file: str) -> _Form:
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
