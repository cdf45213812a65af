"""The trainer's side of the plug for vLLM: it comes to running engines, and pushes its weights into them.

How a trainer tells vLLM what to do: over HTTP, by an `LLM` in this process, or by a client of vLLM's own kind.
"""

from __future__ import annotations

import base64
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, Protocol, Self
from urllib.parse import quote

import torch

from transaxle.arguments import (
    Config,
    DType,
    Patterns,
    Size,
    read_config,
    read_float_type,
    read_optional_text,
    read_patterns,
    read_size,
    suggests,
)
from transaxle.engine.views.encode import chosen
from transaxle.errors import TransaxleError, refuse, without_secrets
from transaxle.extras import install
from transaxle.formats.store.service import harmless
from transaxle.live.model.state_tensors import State
from transaxle.live.transport.world import World, is_loss
from transaxle.options import select
from transaxle.refit.adapters import MERGED, read_adapter
from transaxle.refit.hops import meet
from transaxle.refit.refitting import Pause, Refit, RefitReport
from transaxle.refit.vllm_engine import DIALECT, VERSION, PieceOverlap, split_layers
from transaxle.torch_tensors import Ranks

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


_PATIENCE = 300
_LOOK = "Look at vLLM's own log."
_OURS = frozenset({"backend", "workers", "timeout", "pause"})
"""Options that are not those of a refit."""
_ANEW = "Make a new VllmRefit; the engine serves the weights it had."


_OPTIONS = (
    "family", "config", "dtype", "strict", "bucket", "adapter", "backend", "workers", "timeout", "pause",
)  # fmt: skip
"""How weights are moved into vLLM: keyword arguments of `VllmRefit`."""


class VllmRefit:
    """Moves a trainer's weights into running vLLM engines, as often as asked; collective on the trainer's ranks.

        refit = tx.refit.VllmRefit(model, "http://10.0.0.8:8000", dtype="bf16")
        refit.push()

    Engines are started with `weight_transfer_config={"backend": "transaxle"}`, in an environment that has this package.
    Requests that are in flight when all has come finish with the old weights, and later ones wait for the new.

    Args:
        src_state: the trainer's model or state dict.
        engine: URL of a server (`vllm serve` with `VLLM_SERVER_DEV_MODE=1`), an `LLM`, a client with the four methods
            of vLLM's `VLLMWeightSyncClient`; or a list of these. The first rank's counts.
        group: the trainer's ranks; None: all.
        address: `HOST:PORT` where the first rank waits for the engines; None: found out.
        family: as of `Refit`, and so are `config`, `dtype`, `strict` and `bucket`.
        adapter: `merged`: the trainer's adapter is merged into what is sent.
        backend: `gloo` or `nccl`; None: `nccl` where torch has a GPU.
        workers: of a client: how many it speaks for.
        timeout: seconds that any side waits for the other.
        pause: returns a context manager that is entered on the first rank while engines are updated; None: requests of
            servers are stopped, an `LLM` must have none.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank of the trainer; the engines' logs say the same.
    """

    @suggests
    def __init__(
        self,
        src_state: State,
        engine: object,
        group: Ranks | None = None,
        *,
        address: str | None = None,
        family: str | None = None,
        config: Config | None = None,
        dtype: DType | None = None,
        strict: bool = True,
        bucket: Size = "64MB",
        adapter: Literal["merged", "alone"] | None = None,
        backend: str | None = None,
        workers: int | None = None,
        timeout: float = _PATIENCE,
        pause: Pause | None = None,
    ) -> None:
        options = select(locals(), _OPTIONS)
        self._trainers = trainers = World(group)
        with trainers.together():
            read_optional_text("address", address, "10.0.0.7:29600")
            self._engines = _Engines(engine if trainers.rank == trainers.ranks[0] else [], options)
            meeting = self._engines.prepare(address, trainers.size, _said(options))
        meeting = trainers.gather(meeting)[0]
        assert meeting is not None  # of the first rank
        number = trainers.ranks.index(trainers.rank)
        with self._while_engines(lambda each, first: each.init(replace(meeting, first=first).as_json())):
            group = meet(
                meeting.address, number, meeting.size,
                secret=meeting.secret, backend=meeting.backend, timeout=meeting.timeout,
            )  # fmt: skip
            self._world = World(group)
            heard = self._world.gather((-1, False))
            self._refit = Refit(src_state, {}, group, **_of_refit(options))
        self._engines.left_open([left for _, left in heard])
        self._lost = ""

    @property
    def version(self) -> int:
        """How many pushes the engines have taken; vLLM says it as its `weight_version`."""
        return self._refit.version

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is moved, as vLLM has them."""
        return self._refit.names

    def push(self, *, only: Patterns = (), skip: Patterns = ()) -> RefitReport:
        """Move the values of now; collective on the trainer's ranks.

        Args:
            only: patterns of vLLM's names that are moved, all of a layer or none; none: all.
            skip: patterns of names that are not moved.

        Raises:
            TypeError: an argument of a type that it cannot have.
            TransaxleError: on every rank. Engines that live serve the weights that they had.
        """
        wanted, unwanted = read_patterns("only", only), read_patterns("skip", skip)
        if self._lost:
            raise refuse("IO", f"an earlier push failed: {self._lost}", hint=_ANEW)
        split_layers(self.names, frozenset(chosen(self.names, wanted, unwanted, "tensor")))
        said = {"only": [*wanted], "skip": [*unwanted]}
        try:
            try:
                with self._trainers.together():
                    self._engines.start()
                with self._while_engines(lambda each, _: each.update(said)):
                    with self._world.together():
                        pass  # all have room for what comes
                    report = self._refit.push(only=wanted, skip=unwanted)
                with self._trainers.together():
                    self._engines.switch(str(self.version))
            except TransaxleError:
                self._engines.abandon()
                raise
        except TransaxleError as error:
            self._lost = error.refusals[0].message if is_loss(error) else ""
            raise
        return report

    def close(self) -> None:
        """Let the buckets go; make a new one for another push."""
        self._refit.close()
        self._lost = "it was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _while_engines(self, action: Callable[[Control, int], None]) -> Iterator[None]:
        """Do something while engines do their part of it; what goes wrong in one of them goes wrong on all ranks."""
        asked = self._engines.begin(action)
        try:
            yield
        except BaseException:
            wait(asked)
            raise
        with self._trainers.together():
            for each in asked:
                each.result()


class _Engines:
    """The engines, as the first rank speaks to them; the others have none.

    Args:
        engine: one, or several.
        options: how they are spoken to.
    """

    def __init__(self, engine: object, options: Mapping[str, Any]) -> None:
        several = engine if isinstance(engine, list | tuple) else [engine]
        self._timeout = options["timeout"]
        self._controls = [control(each, options["workers"], self._timeout + _PATIENCE) for each in several]
        self._firsts: list[int] = []
        self._secret = ""
        self._pause = options["pause"]
        self._pool = ThreadPoolExecutor(max(1, len(self._controls)))
        self._open: set[Control] = set()

    def left_open(self, left: Sequence[bool]) -> None:
        """Note the engines in which a lost trainer has left an update open.

        Args:
            left: of each rank of the meeting, whether it has one.
        """
        ends = [*self._firsts[1:], len(left)][: len(self._firsts)]  # none on ranks that speak to no engine
        spans = zip(self._controls, self._firsts, ends, strict=True)
        self._open = {each for each, first, last in spans if any(left[first:last])}

    def prepare(self, address: str | None, trainers: int, said: PieceOverlap) -> PieceOverlap | None:
        """Ask all engines whether they can take weights; return what all ranks need to meet."""
        if not self._controls:
            return None
        size = trainers
        for each in self._controls:
            self._firsts.append(size)
            size += each.workers()
        self.each(lambda each, _: each.init(said.as_json()))
        address = address or _address(self._controls[0].local_host())
        self._secret = secrets.token_hex()
        return replace(said, address=address, size=size, secret=self._secret)

    def begin(
        self, action: Callable[[Control, int], None], only: Container[Control] | None = None
    ) -> list[Future[None]]:
        """Begin something with several engines at once.

        Args:
            action: what is begun; it is given the number of an engine's first worker.
            only: with these; None: with all.
        """

        def run(each: Control, first: int) -> None:
            try:
                action(each, first)
            except TransaxleError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a client raises
                said = str(error)
                shown = said.replace(self._secret, "…") if self._secret else said
                raise refuse("IO", f"vLLM could not do it: {shown}", hint=_LOOK) from (error if shown == said else None)

        engines = zip(self._controls, self._firsts, strict=True)
        return [self._pool.submit(run, each, first) for each, first in engines if only is None or each in only]

    def each(self, action: Callable[[Control, int], None], only: Container[Control] | None = None) -> None:
        """Do something with engines at once; see `begin`."""
        asked = self.begin(action, only)
        wait(asked)
        for future in asked:
            future.result()

    def start(self) -> None:
        """Begin an update; one that a lost trainer has left open ends without a trace."""
        self.abandon()

        def begin(each: Control, _: int) -> None:
            each.start()
            self._open.add(each)

        self.each(begin)

    def switch(self, version: str) -> None:
        """Let the engines have what has come, while they serve no requests."""

        def finish(each: Control, _: int) -> None:
            self._open.discard(each)  # whatever comes of it: nobody knows what a model has that could not take them
            each.finish(version)

        with self._stopped():
            self.each(finish)

    def abandon(self) -> None:
        """End an update that has failed: engines that live keep what they have."""
        for action in (lambda each, _: each.update({"forget": True}), lambda each, _: each.finish(None)):
            with suppress(TransaxleError):
                self.each(action, self._open)
        self._open.clear()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        if self._pause is not None and self._controls:
            with self._pause():
                yield
            return
        try:
            self.each(lambda each, _: each.pause())
            yield
        except BaseException:
            with suppress(TransaxleError):  # the first error is the one to tell
                self.each(lambda each, _: each.resume())
            raise
        self.each(lambda each, _: each.resume())


def _said(options: Mapping[str, Any]) -> PieceOverlap:
    """Return what engines are told, but for where all meet.

    Raises:
        TypeError, ValueError: an argument that it cannot have.
    """
    read_config(options["config"])
    adapter = read_adapter(options["adapter"])
    if adapter not in {None, MERGED}:
        raise ValueError(
            f"adapter must be {MERGED}, or None: vLLM has the parameters of a whole model; got {adapter!r}"
        )
    timeout, backend = options["timeout"], options["backend"]
    return PieceOverlap(
        version=VERSION, address="", first=0, size=0, timeout=timeout,
        backend=backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        dtype=read_float_type("dtype", options["dtype"]),
        family=read_optional_text("family", options["family"], "qwen3_moe"),
        strict=options["strict"], bucket=read_size("bucket", options["bucket"]), adapter=adapter,
    )  # fmt: skip


def _of_refit(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the trainer's side of the refit."""
    own = {key: value for key, value in options.items() if key not in _OURS}
    return {"in_place": True, "dialect": DIALECT, **own}


def _address(host: str) -> str:
    """Return an address of this machine where nobody listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        return f"[{host}]:{found.getsockname()[1]}" if ":" in host else f"{host}:{found.getsockname()[1]}"
