"""The trainer's side of the vLLM plugin: it connects to running engines, and pushes the trainer's weights into them.

A trainer controls an engine over HTTP, or through an `LLM` object in this process, or through a client object with the
methods of vLLM's `VLLMWeightSyncClient`.
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
from transaxle.engine.views.encode import select_names
from transaxle.errors import TransaxleError, refuse, without_secrets
from transaxle.extras import install
from transaxle.formats.store.service import harmless
from transaxle.live.model.state_tensors import State
from transaxle.live.transport.world import World, is_loss
from transaxle.options import select
from transaxle.refit.adapters import MERGED, read_adapter
from transaxle.refit.hops import free_address, meet
from transaxle.refit.refitting import Pause, Refit, RefitReport
from transaxle.refit.vllm_engine import VERSION, Meeting, split_layers
from transaxle.refit.vllm_worker import DIALECT
from transaxle.torch_tensors import Ranks

_LOCAL = "127.0.0.1"
_PORTS = {"http": 80, "https": 443}
_LONGEST_ANSWER = 1 << 20
"""Largest number of bytes of an engine's answer; the answers of vLLM have a few hundred bytes."""
_SHOWN_CHARACTERS = 2000
"""Largest number of characters of an engine's answer that an error shows."""
_MOST_WORKERS = 1 << 20
"""Largest number of workers that an engine may have."""
_CHECK_SERVER = "Is the server running, and was it started with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config?"
_FINISH = "Let requests finish before you push, or use a server, which stops them by itself."
Payload = Mapping[str, Any]


class Control(Protocol):
    """Controls one engine for a trainer."""

    def workers(self) -> int:
        """Return the number of the engine's workers."""

    def local_host(self) -> str:
        """Return an address of this machine that the engine can reach."""

    def init(self, info: Payload) -> None:
        """Send the fields of a `Meeting` (invitation to a common process group) to the engine."""

    def pause(self) -> None:
        """Wait until the engine's running requests have finished, and hold back new requests."""

    def start(self) -> None:
        """Begin an update of the engine's weights."""

    def update(self, info: Payload) -> None:
        """Send the fields of an `Update` to the engine; return when the engine has received all values."""

    def finish(self, version: str | None) -> None:
        """End the update: if all values have arrived, they are copied into the engine's model."""

    def resume(self) -> None:
        """Clear caches that were computed with older weights, and serve requests again."""


class _Server:
    """Controls a server (`vllm serve`) over HTTP. Error messages contain neither secrets in the URL nor the secret of
    the common process group.

    Args:
        url: address of the server; user and password in it are sent as HTTP basic authentication.
        timeout: seconds within which the server must answer.

    Raises:
        ValueError: if `url` is not an HTTP URL.
        Refused: with code UNSUPPORTED, if httpx is not installed.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            import httpx
        except ImportError:
            message, hint = "no installed package speaks HTTP to vLLM", f"Install it:  {install('vllm')}"
            raise refuse("UNSUPPORTED", message, hint=hint) from None
        self._with_values, self._timeout = without_secrets(url), timeout
        try:
            parsed = httpx.URL(url.rstrip("/"))
        except (httpx.InvalidURL, ValueError):
            parsed = httpx.URL()
        if parsed.scheme not in _PORTS or not parsed.host or parsed.query or parsed.fragment:
            raise ValueError(f"engine must be a URL such as http://10.0.0.8:8000; got {self._with_values}")
        self._url = parsed.copy_with(userinfo=b"")
        self._host, self._port = parsed.host, parsed.port or _PORTS[parsed.scheme]
        self._trusted = ssl.create_default_context() if parsed.scheme == "https" else False
        self._login = httpx.BasicAuth(parsed.username, parsed.password) if parsed.userinfo else None
        encoded = base64.b64encode(f"{parsed.username}:{parsed.password}".encode()).decode()
        credential = parsed.password or parsed.username  # a user name without a password may be an access token
        raw = parsed.userinfo.decode("ascii")
        forms = (
            credential,
            raw,
            raw.partition(":")[2],
            quote(credential),
            quote(credential, ""),
            json.dumps(credential)[1:-1],
            encoded,
        )
        self._secrets = {each for each in forms if each} if parsed.userinfo else set[str]()

    def _ask(self, path: str, payload: Payload | None = None, *, post: bool = True) -> Mapping[str, Any]:
        """Send a request, and return the JSON object in the answer; return {} if the answer is JSON but not an
        object.
        """
        import httpx

        content = json.dumps(payload).encode() if payload is not None else b""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "transaxle"}
        address = f"{self._url}/{path}".partition("?")[0]
        body = bytearray()
        # proxies and .netrc of the environment are ignored, because the request must reach the server directly
        client_options: dict[str, Any] = {
            "timeout": self._timeout,
            "trust_env": False,
            "auth": self._login,
            "verify": self._trusted,
        }
        try:
            with (
                httpx.Client(follow_redirects=False, **client_options) as client,
                client.stream(
                    "POST" if post else "GET", f"{self._url}/{path}", content=content, headers=headers
                ) as answer,
            ):
                started = time.monotonic()
                for part in answer.iter_raw():
                    body += part[: _LONGEST_ANSWER + 1 - len(body)]
                    if len(body) > _LONGEST_ANSWER:
                        raise refuse("IO", f"{address} sent more than {_LONGEST_ANSWER:,} bytes", hint=_CHECK_SERVER)
                    if time.monotonic() - started > self._timeout:
                        raise refuse(
                            "IO", f"{address} did not end its answer in {self._timeout:g} s", hint=_CHECK_SERVER
                        )
                status, to = answer.status_code, answer.headers.get("Location")
        except httpx.HTTPError as error:
            message = f"{self._url} cannot be reached: {self._harmless(str(error)) or type(error).__name__}"
            raise refuse("IO", message, hint=_CHECK_SERVER) from None
        except (ValueError, httpx.InvalidURL, httpx.StreamError) as error:
            raise refuse("IO", f"asking {self._url}: {type(error).__name__}", hint=_CHECK_SERVER) from None
        if to is not None and 300 <= status < 400:
            message = f"{address} redirects to {self._harmless(to)}; nothing was sent there"
            raise refuse("IO", message, hint="Give the address of vLLM itself.")
        if not 200 <= status < 300:
            raise refuse("IO", f"{address} answered {status}: {self._harmless(_text(body))}", hint=_CHECK_SERVER)
        return self._read(address, bytes(body))

    def _read(self, address: str, body: bytes) -> Mapping[str, Any]:
        try:
            answer = json.loads(body or b"null")
        except (ValueError, RecursionError):
            message = f"{address} answered no JSON: {self._harmless(_text(body))}"
            raise refuse("IO", message, hint="Is it vLLM that listens there?") from None
        return answer if isinstance(answer, dict) else {}

    def _harmless(self, text: str) -> str:
        """Return a text without secrets and control characters, shortened to a readable length."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "…")
        return "\n".join(harmless(line) for line in text[:_SHOWN_CHARACTERS].splitlines() if line.strip())

    def workers(self) -> int:
        answer = self._ask("get_world_size", post=False)
        size = answer.get("world_size")
        if type(size) is not int or not 1 <= size <= _MOST_WORKERS:
            message = f"{self._url} does not say how many workers it has"
            raise refuse("IO", message, hint="Is it vLLM that listens there?")
        return size

    def local_host(self) -> str:
        try:
            with socket.create_connection((self._host, self._port), self._timeout) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            raise refuse(
                "IO", f"{self._url} cannot be reached: {error.strerror or error}", hint=_CHECK_SERVER
            ) from None

    def init(self, info: Payload) -> None:
        if secret := info.get("secret"):
            self._secrets.add(str(secret))
        self._ask("init_weight_transfer_engine", {"init_info": info})

    def pause(self) -> None:
        self._ask("pause?mode=wait&clear_cache=true")

    def start(self) -> None:
        self._ask("start_weight_update")

    def update(self, info: Payload) -> None:
        self._ask("update_weights", {"update_info": info})

    def finish(self, version: str | None) -> None:
        self._ask("finish_weight_update", None if version is None else {"weight_version": version})

    def resume(self) -> None:
        self._ask("resume")


def _text(body: bytes | bytearray) -> str:
    return body.decode(errors="replace")


class _Local:
    """Controls an `LLM` object in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def workers(self) -> int:
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size_across_dp)

    def local_host(self) -> str:
        return _LOCAL

    def init(self, info: Payload) -> None:
        self._llm.init_weight_transfer_engine({"init_info": info})

    def pause(self) -> None:
        if self._llm.llm_engine.has_unfinished_requests():
            raise refuse("UNSUPPORTED", "the LLM has unfinished requests", hint=_FINISH)

    def start(self) -> None:
        self._llm.start_weight_update()

    def update(self, info: Payload) -> None:
        self._llm.update_weights({"update_info": info})

    def finish(self, version: str | None) -> None:
        self._llm.finish_weight_update(version)

    def resume(self) -> None:
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()


class _Client:
    """Controls an engine through a client with the four methods of vLLM's `VLLMWeightSyncClient`.

    The user must stop requests, because such a client cannot stop them.

    Args:
        client: the client object.
        workers: number of the engine's workers.
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

    def init(self, info: Payload) -> None:
        self._client.init_weight_transfer_engine(dict(info))

    def pause(self) -> None:
        pass

    def start(self) -> None:
        self._client.start_weight_update()

    def update(self, info: Payload) -> None:
        self._client.update_weights(dict(info))

    def finish(self, version: str | None) -> None:
        self._client.finish_weight_update(version)

    def resume(self) -> None:
        pass


def control(engine: object, workers: int | None, timeout: float) -> Control:
    """Return the `Control` for an engine, according to the type of the argument.

    Args:
        engine: URL of a server, an `LLM` object, or a client object.
        workers: number of vLLM workers behind a client; None means that it was not given.
        timeout: seconds within which a server must answer.

    Raises:
        TypeError: if `engine` is neither a URL nor an `LLM` nor a client.
        ValueError: if `engine` is a str, but not an HTTP URL.
        Refused: with code UNSUPPORTED, if httpx is not installed.
    """
    if isinstance(engine, str):
        return _Server(engine, timeout)
    if hasattr(engine, "llm_engine"):
        return _Local(engine)
    if all(hasattr(engine, name) for name in ("init_weight_transfer_engine", "update_weights")):
        return _Client(engine, workers)
    kinds = "the URL of a server, an LLM, or a client with vLLM's methods"
    raise TypeError(f"engine must be {kinds}; got {without_secrets(repr(engine))} ({type(engine).__name__})")


_TIMEOUT = 300
_LOOK = "Look at vLLM's own log."
_OWN_OPTIONS = frozenset({"backend", "workers", "timeout", "pause"})
"""Options of `VllmRefit` that are not passed on to `Refit`."""
_ANEW = "Make a new VllmRefit; the engine serves its previous weights."


_OPTIONS = (
    "family", "config", "dtype", "strict", "bucket", "adapter", "backend", "workers", "timeout", "pause",
)  # fmt: skip
"""Keyword arguments of `VllmRefit` that determine how weights are sent."""


class VllmRefit:
    """Pushes a trainer's weights into running vLLM engines, as often as needed; all ranks of the trainer must create
    this object together.

        refit = tx.refit.VllmRefit(model, "http://10.0.0.8:8000", dtype="bf16")
        refit.push()

    Start the engines with `weight_transfer_config={"backend": "transaxle"}`, in an environment in which Transaxle is
    installed. Requests that are running finish with the old weights; later requests wait for the new weights.

    Args:
        src_state: the trainer's model or state dict.
        engine: URL of a server (`vllm serve` with `VLLM_SERVER_DEV_MODE=1`), an `LLM`, or a client with the four
            methods of vLLM's `VLLMWeightSyncClient`; or a list of such engines. Only the engines that the first rank
            passes are used.
        group: the trainer's ranks; None means all ranks of the job.
        address: `HOST:PORT` at which the first rank waits for the engines; None means that it is chosen automatically.
        family: as in `Refit`; the same applies to `config`, `dtype`, `strict` and `bucket`.
        adapter: `merged` sends the base weights of a peft model with its active adapter merged in.
        backend: `gloo` or `nccl`; None means `nccl` if torch finds a GPU, else `gloo`.
        workers: number of vLLM workers behind a client; it is not needed for a URL or an `LLM`.
        timeout: seconds that trainer and engines wait for each other.
        pause: function that returns a context manager, which is active on the first rank while engines change to new
            weights. If `pause` is None, servers hold back requests, and an `LLM` must have no running requests.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank of the trainer; the engines log the same error.
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
        timeout: float = _TIMEOUT,
        pause: Pause | None = None,
    ) -> None:
        options = select(locals(), _OPTIONS)
        self._trainers = trainers = World(group)
        with trainers.together():
            read_optional_text("address", address, "10.0.0.7:29600")
            self._engines = _Engines(engine if trainers.rank == trainers.ranks[0] else [], options)
            meeting = self._engines.prepare(address, trainers.size, _invitation(options))
        meeting = trainers.gather(meeting)[0]
        assert meeting is not None  # the first rank always has at least one engine
        number = trainers.ranks.index(trainers.rank)
        with self._while_engines(lambda control, first: control.init(replace(meeting, first=first).as_json())):
            group = meet(
                meeting.address, number, meeting.size,
                secret=meeting.secret, backend=meeting.backend, timeout=meeting.timeout,
            )  # fmt: skip
            self._world = World(group)
            answers = self._world.gather((-1, False))
            self._refit = Refit(src_state, {}, group, **_of_refit(options))
        self._engines.note_open([is_open for _, is_open in answers])
        self._lost = ""

    @property
    def version(self) -> int:
        """Number of completed pushes, which vLLM reports as `weight_version`."""
        return self._refit.version

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in vLLM, of all parameters that receive values."""
        return self._refit.names

    def push(self, *, only: Patterns = (), skip: Patterns = ()) -> RefitReport:
        """Push the trainer's present weights into the engines; all ranks of the trainer must call this method.

        Args:
            only: patterns of vLLM's parameter names to push, which must match whole layers; no pattern means all
                parameters.
            skip: patterns of vLLM's parameter names that are not pushed.

        Raises:
            TypeError: if an argument has the wrong type.
            TransaxleError: raised on every rank. After an error, the engines that still run serve their old weights.
        """
        only_patterns, skip_patterns = read_patterns("only", only), read_patterns("skip", skip)
        if self._lost:
            raise refuse("IO", f"an earlier push failed: {self._lost}", hint=_ANEW)
        split_layers(self.names, frozenset(select_names(self.names, only_patterns, skip_patterns, "tensor")))
        update = {"only": [*only_patterns], "skip": [*skip_patterns]}
        try:
            try:
                with self._trainers.together():
                    self._engines.start()
                with self._while_engines(lambda control, _: control.update(update)):
                    with self._world.together():
                        pass  # wait until every rank has allocated its memory
                    report = self._refit.push(only=only_patterns, skip=skip_patterns)
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
        """Free the memory of the exchange buckets; for a later push, make a new `VllmRefit`."""
        self._refit.close()
        self._lost = "it was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _while_engines(self, action: Callable[[Control, int], None]) -> Iterator[None]:
        """Run an action on all engines during the `with` block; an error of one engine is raised on all ranks."""
        futures = self._engines.begin(action)
        try:
            yield
        except BaseException:
            wait(futures)
            raise
        with self._trainers.together():
            for future in futures:
                future.result()


class _Engines:
    """Controls all engines from the first rank of the trainer; on all other ranks, the list of engines is empty.

    Args:
        engine: one engine, or a list of engines.
        options: the options `workers`, `timeout` and `pause` of `VllmRefit`.
    """

    def __init__(self, engine: object, options: Mapping[str, Any]) -> None:
        several = engine if isinstance(engine, list | tuple) else [engine]
        self._timeout = options["timeout"]
        self._controls = [control(each, options["workers"], self._timeout + _TIMEOUT) for each in several]
        self._firsts: list[int] = []
        self._secret = ""
        self._pause = options["pause"]
        self._pool = ThreadPoolExecutor(max(1, len(self._controls)))
        self._open: set[Control] = set()

    def note_open(self, open_by_rank: Sequence[bool]) -> None:
        """Record which engines have an unfinished update from a trainer that was lost.

        Args:
            open_by_rank: for each rank of the common process group, whether its engine has an unfinished update.
        """
        # For each engine, the rank after its last rank; empty on ranks that control no engine.
        ends = [*self._firsts[1:], len(open_by_rank)][: len(self._firsts)]
        spans = zip(self._controls, self._firsts, ends, strict=True)
        self._open = {each for each, first, last in spans if any(open_by_rank[first:last])}

    def prepare(self, address: str | None, trainers: int, invitation: Meeting) -> Meeting | None:
        """Check that all engines can take weights; return the complete invitation, or None if this rank controls no
        engines.
        """
        if not self._controls:
            return None
        size = trainers
        for control in self._controls:
            self._firsts.append(size)
            size += control.workers()
        self.each(lambda control, _: control.init(invitation.as_json()))
        address = address or free_address(self._controls[0].local_host())
        self._secret = secrets.token_hex()
        return replace(invitation, address=address, size=size, secret=self._secret)

    def begin(
        self, action: Callable[[Control, int], None], only: Container[Control] | None = None
    ) -> list[Future[None]]:
        """Start an action on several engines at the same time; return one future per engine.

        Args:
            action: function called in a thread, with the engine's `Control` and the rank of the engine's first worker.
            only: `Control`s of the engines to use; None means all engines.
        """

        def run(control: Control, first: int) -> None:
            try:
                action(control, first)
            except TransaxleError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a client raises
                message = str(error)
                shown = message.replace(self._secret, "…") if self._secret else message
                raise refuse("IO", f"vLLM could not do it: {shown}", hint=_LOOK) from (
                    error if shown == message else None
                )

        engines = zip(self._controls, self._firsts, strict=True)
        return [self._pool.submit(run, control, first) for control, first in engines if only is None or control in only]

    def each(self, action: Callable[[Control, int], None], only: Container[Control] | None = None) -> None:
        """Run an action on several engines at the same time, and wait for all of them; the arguments are those of
        `begin`.
        """
        futures = self.begin(action, only)
        wait(futures)
        for future in futures:
            future.result()

    def start(self) -> None:
        """Begin an update on all engines; an unfinished update from a trainer that was lost is ended first."""
        self.abandon()

        def begin(control: Control, _: int) -> None:
            control.start()
            self._open.add(control)

        self.each(begin)

    def switch(self, version: str) -> None:
        """Make the engines change to the received values while no requests are served."""

        def finish(control: Control, _: int) -> None:
            # The engine counts as finished even if `finish` fails, because its model is then in an unknown state.
            self._open.discard(control)
            control.finish(version)

        with self._pause_requests():
            self.each(finish)

    def abandon(self) -> None:
        """End a failed update; the engines that still run keep their old weights."""
        for action in (lambda control, _: control.update({"forget": True}), lambda control, _: control.finish(None)):
            with suppress(TransaxleError):
                self.each(action, self._open)
        self._open.clear()

    @contextmanager
    def _pause_requests(self) -> Iterator[None]:
        if self._pause is not None and self._controls:
            with self._pause():
                yield
            return
        try:
            self.each(lambda control, _: control.pause())
            yield
        except BaseException:
            with suppress(TransaxleError):  # the error of the block is raised, not an error of `resume`
                self.each(lambda control, _: control.resume())
            raise
        self.each(lambda control, _: control.resume())


def _invitation(options: Mapping[str, Any]) -> Meeting:
    """Return the trainer's invitation to the engines, still without address, size and secret.

    Raises:
        TypeError, ValueError: if an option is invalid.
    """
    read_config(options["config"])
    adapter = read_adapter(options["adapter"])
    if adapter not in {None, MERGED}:
        raise ValueError(
            f"adapter must be {MERGED}, or None: vLLM has the parameters of a whole model; got {adapter!r}"
        )
    timeout, backend = options["timeout"], options["backend"]
    return Meeting(
        version=VERSION, address="", first=0, size=0, timeout=timeout,
        backend=backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        dtype=read_float_type("dtype", options["dtype"]),
        family=read_optional_text("family", options["family"], "qwen3_moe"),
        strict=options["strict"], bucket=read_size("bucket", options["bucket"]), adapter=adapter,
    )  # fmt: skip


def _of_refit(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for the `Refit` on the trainer's ranks."""
    refit_options = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    return {"in_place": True, "dialect": DIALECT, **refit_options}
