"""How a trainer tells vLLM what to do: over HTTP, by an `LLM` in this process, or by a client of vLLM's own kind."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from transaxle.errors import refuse

_LOCAL = "127.0.0.1"
_PORTS = {"http": 80, "https": 443}
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
    """A server, `vllm serve`.

    Args:
        url: its address.
        timeout: seconds that it may take for an answer.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def _ask(self, path: str, said: Said | None = None, *, post: bool = True) -> Any:
        data = json.dumps(said).encode() if said is not None else b"" if post else None
        request = urllib.request.Request(f"{self._url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            message = f"{self._url}/{path} answered {error.code}: {error.read().decode(errors='replace')[:2000]}"
            raise refuse("IO", message, hint=_DEV) from error
        except OSError as error:
            raise refuse("IO", f"{self._url} cannot be reached: {error}", hint=_DEV) from error

    def workers(self) -> int:
        return int(self._ask("get_world_size", post=False)["world_size"])

    def local_host(self) -> str:
        parsed = urllib.parse.urlsplit(self._url)
        port = parsed.port or _PORTS.get(parsed.scheme, 80)
        try:
            with socket.create_connection((parsed.hostname or "", port), self._timeout) as seen:
                return str(seen.getsockname()[0])
        except OSError as error:
            raise refuse("IO", f"{self._url} cannot be reached: {error}", hint=_DEV) from error

    def init(self, info: Said) -> None:
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
        return socket.gethostbyname(socket.gethostname())

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
    """
    if isinstance(engine, str):
        return _Server(engine, timeout)
    if hasattr(engine, "llm_engine"):
        return _Local(engine)
    if all(hasattr(engine, name) for name in ("init_weight_transfer_engine", "update_weights")):
        return _Client(engine, workers)
    kinds = "the URL of a server, an LLM, or a client with vLLM's methods"
    raise TypeError(f"engine must be {kinds}; got {engine!r} ({type(engine).__name__})")
