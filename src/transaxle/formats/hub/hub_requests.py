"""Requests to a hub, and to the hosts that it sends us to for the bytes of large files.

`huggingface_hub` knows the hub's address and the login; the requests are made here, by a client of httpx. (Its own file
system follows any redirect, also from https to http, reads answers to their end however long they are, and waits as
long as a server says. Its HTTP client is another one in each of its major versions.)

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transaxle.errors import TransaxleError, refuse, without_secrets
from transaxle.extras import install
from transaxle.formats.remote.service import RANGES
from transaxle.formats.remote.url import harmless

if TYPE_CHECKING:
    import httpx

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


@dataclass(frozen=True, slots=True)
class Answer:
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
