"""How a trainer tells vLLM what to do: over HTTP, by an `LLM` in this process, or by a client of vLLM's own kind."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from transaxle.errors import refuse, without_secrets
from transaxle.extras import install
from transaxle.formats.store.service import harmless

_LOCAL = "127.0.0.1"
_PORTS = {"http": 80, "https": 443}
_LONGEST = 1 << 20
"""Bytes of an answer: vLLM's have a few hundred."""
_SHOWN = 2000
"""Characters of an answer that an error shows."""
_MOST = 1 << 20
"""Workers of an engine."""
_DEV = "Is it there, and was it started with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config?"
_FINISH = "Let requests finish before you push, or use a server, which stops them by itself."
Said = Mapping[str, Any]


class Control(Protocol):
    """What a trainer asks of one engine."""

    def workers(self) -> int:
        """Return how many workers the engine has."""

    def local_host(self) -> str:
        """Return the address of this machine as the engine can reach it."""

    def init(self, info: Said) -> None:
        """Say who comes."""

    def pause(self) -> None:
        """Let requests finish, and hold back new ones."""

    def start(self) -> None:
        """Say that an update begins."""

    def update(self, info: Said) -> None:
        """Say what comes; returns when it is there."""

    def finish(self, version: str | None) -> None:
        """Say that the engine is to have what has come."""

    def resume(self) -> None:
        """Forget what was computed with older weights, and serve requests again."""


class _Server:
    """A server, `vllm serve`. Errors show neither what is secret in its URL nor what it was told in confidence.

    Args:
        url: its address; a user and password in it are sent as such.
        timeout: seconds that it may take for an answer.

    Raises:
        ValueError: it is no address of the web.
        Refused: UNSUPPORTED where httpx is not installed.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            import httpx
        except ImportError:
            message, hint = "no installed package speaks HTTP to vLLM", f"Install it:  {install('vllm')}"
            raise refuse("UNSUPPORTED", message, hint=hint) from None
        self._shown, self._timeout = without_secrets(url), timeout
        try:
            parsed = httpx.URL(url.rstrip("/"))
        except (httpx.InvalidURL, ValueError):
            parsed = httpx.URL()
        if parsed.scheme not in _PORTS or not parsed.host or parsed.query or parsed.fragment:
            raise ValueError(f"engine must be a URL such as http://10.0.0.8:8000; got {self._shown}")
        self._url = parsed.copy_with(userinfo=b"")
        self._host, self._port = parsed.host, parsed.port or _PORTS[parsed.scheme]
        self._trusted = ssl.create_default_context() if parsed.scheme == "https" else False
        self._login = httpx.BasicAuth(parsed.username, parsed.password) if parsed.userinfo else None
        encoded = base64.b64encode(f"{parsed.username}:{parsed.password}".encode()).decode()
        own = parsed.password or parsed.username  # a user alone is a token
        raw = parsed.userinfo.decode("ascii")
        forms = (own, raw, raw.partition(":")[2], quote(own), quote(own, ""), json.dumps(own)[1:-1], encoded)
        self._secrets = {each for each in forms if each} if parsed.userinfo else set[str]()

    def _ask(self, path: str, said: Said | None = None, *, post: bool = True) -> Mapping[str, Any]:
        """Return what the server answers; {} where that is no object, which nobody reads."""
        import httpx

        content = json.dumps(said).encode() if said is not None else b""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "transaxle"}
        where = f"{self._url}/{path}".partition("?")[0]
        body = bytearray()
        # nobody in between: no proxy of the environment, and no login that it has for other programs
        how: dict[str, Any] = {
            "timeout": self._timeout,
            "trust_env": False,
            "auth": self._login,
            "verify": self._trusted,
        }
        try:
            with (
                httpx.Client(follow_redirects=False, **how) as client,
                client.stream(
                    "POST" if post else "GET", f"{self._url}/{path}", content=content, headers=headers
                ) as got,
            ):
                begun = time.monotonic()
                for part in got.iter_raw():
                    body += part[: _LONGEST + 1 - len(body)]
                    if len(body) > _LONGEST:
                        raise refuse("IO", f"{where} sent more than {_LONGEST:,} bytes", hint=_DEV)
                    if time.monotonic() - begun > self._timeout:
                        raise refuse("IO", f"{where} did not end its answer in {self._timeout:g} s", hint=_DEV)
                status, to = got.status_code, got.headers.get("Location")
        except httpx.HTTPError as error:
            message = f"{self._url} cannot be reached: {self._harmless(str(error)) or type(error).__name__}"
            raise refuse("IO", message, hint=_DEV) from None
        except (ValueError, httpx.InvalidURL, httpx.StreamError) as error:
            raise refuse("IO", f"asking {self._url}: {type(error).__name__}", hint=_DEV) from None
        if to is not None and 300 <= status < 400:
            message = f"{where} redirects to {self._harmless(to)}; nothing was sent there"
            raise refuse("IO", message, hint="Give the address of vLLM itself.")
        if not 200 <= status < 300:
            raise refuse("IO", f"{where} answered {status}: {self._harmless(_text(body))}", hint=_DEV)
        return self._read(where, bytes(body))

    def _read(self, where: str, body: bytes) -> Mapping[str, Any]:
        try:
            found = json.loads(body or b"null")
        except (ValueError, RecursionError):
            message = f"{where} answered no JSON: {self._harmless(_text(body))}"
            raise refuse("IO", message, hint="Is it vLLM that listens there?") from None
        return found if isinstance(found, dict) else {}

    def _harmless(self, text: str) -> str:
        """Return what somebody says without what is secret."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "…")
        return "\n".join(harmless(line) for line in text[:_SHOWN].splitlines() if line.strip())

    def workers(self) -> int:
        answer = self._ask("get_world_size", post=False)
        size = answer.get("world_size")
        if type(size) is not int or not 1 <= size <= _MOST:
            message = f"{self._url} does not say how many workers it has"
            raise refuse("IO", message, hint="Is it vLLM that listens there?")
        return size

    def local_host(self) -> str:
        try:
            with socket.create_connection((self._host, self._port), self._timeout) as seen:
                return str(seen.getsockname()[0])
        except OSError as error:
            raise refuse("IO", f"{self._url} cannot be reached: {error.strerror or error}", hint=_DEV) from None

    def init(self, info: Said) -> None:
        if secret := info.get("secret"):
            self._secrets.add(str(secret))
        self._ask("init_weight_transfer_engine", {"init_info": info})

    def pause(self) -> None:
        self._ask("pause?mode=wait&clear_cache=true")

    def start(self) -> None:
        self._ask("start_weight_update")

    def update(self, info: Said) -> None:
        self._ask("update_weights", {"update_info": info})

    def finish(self, version: str | None) -> None:
        self._ask("finish_weight_update", None if version is None else {"weight_version": version})

    def resume(self) -> None:
        self._ask("resume")


def _text(body: bytes | bytearray) -> str:
    return body.decode(errors="replace")


class _Local:
    """An `LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def workers(self) -> int:
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size_across_dp)

    def local_host(self) -> str:
        return _LOCAL

    def init(self, info: Said) -> None:
        self._llm.init_weight_transfer_engine({"init_info": info})

    def pause(self) -> None:
        if self._llm.llm_engine.has_unfinished_requests():
            raise refuse("UNSUPPORTED", "the LLM has unfinished requests", hint=_FINISH)

    def start(self) -> None:
        self._llm.start_weight_update()

    def update(self, info: Said) -> None:
        self._llm.update_weights({"update_info": info})

    def finish(self, version: str | None) -> None:
        self._llm.finish_weight_update(version)

    def resume(self) -> None:
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()


class _Client:
    """A client with the four methods of vLLM's `VLLMWeightSyncClient`; requests are the user's own to stop.

    Args:
        client: the client.
        workers: how many workers it speaks for.
    """

    def __init__(self, client: Any, workers: int | None) -> None:
        self._client, self._workers = client, workers

    def workers(self) -> int:
        if self._workers is None:
            raise refuse("AMBIGUOUS", "a client does not say how many workers it speaks for", hint="Give workers=.")
        return self._workers

    def local_host(self) -> str:
        try:
            return socket.gethostbyname(socket.gethostname())
        except OSError as error:
            message = f"this machine's name {socket.gethostname()} has no address: {error.strerror or error}"
            raise refuse("IO", message, hint="Give address=, HOST:PORT of this machine.") from error

    def init(self, info: Said) -> None:
        self._client.init_weight_transfer_engine(dict(info))

    def pause(self) -> None:
        pass

    def start(self) -> None:
        self._client.start_weight_update()

    def update(self, info: Said) -> None:
        self._client.update_weights(dict(info))

    def finish(self, version: str | None) -> None:
        self._client.finish_weight_update(version)

    def resume(self) -> None:
        pass


def control(engine: object, workers: int | None, timeout: float) -> Control:
    """Return how an engine is told what to do.

    Args:
        engine: URL, `LLM`, or client.
        workers: what the user says of its workers.
        timeout: seconds that a server may take for an answer.

    Raises:
        TypeError: it is none of these.
        ValueError: it is no address of the web.
        Refused: UNSUPPORTED where httpx is not installed.
    """
    if isinstance(engine, str):
        return _Server(engine, timeout)
    if hasattr(engine, "llm_engine"):
        return _Local(engine)
    if all(hasattr(engine, name) for name in ("init_weight_transfer_engine", "update_weights")):
        return _Client(engine, workers)
    kinds = "the URL of a server, an LLM, or a client with vLLM's methods"
    raise TypeError(f"engine must be {kinds}; got {without_secrets(repr(engine))} ({type(engine).__name__})")
