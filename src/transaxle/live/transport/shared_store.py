"""A key-value store for ranks that share a secret; torch's own store, by contrast, answers any program that reaches its
port.

Server and client first prove to each other that they know the secret. Server and client each compute a code
(HMAC-SHA256) of a random number from the other, so neither the secret nor a reusable answer is ever sent. Every later
message contains a code that depends on the connection and on the message's position in it. So an attacker can read
messages in transit, but cannot change them. A client that fails the proof gets no rank number, and does not delay any
other client. When all ranks are connected, the port is closed.

    number 0                                      another rank
    "transaxle store 1", number a           ->
                                            <-    number b, HMAC(secret, "I come" a b)
    1, HMAC(secret, "I listen" a b)         ->
                                            <-    which rank it is, and what it expects
    "", or why it cannot take part          ->
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal
from weakref import WeakSet

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, if not marked so

from transaxle.errors import TransaxleError, refuse
from transaxle.live.transport.world import collective, on_accelerator

_HELLO = b"transaxle store 1\n"
_NONCE, _CODE = 32, 32
_COMES, _LISTENS = b"I come", b"I listen"
_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 26
"""Largest size in bytes of a message from a client that has proved the secret."""
_MEETING, _TAG = "meeting", 32
"""Key under which the random number is stored that identifies this group of connected ranks, and size of the number in
bytes.
"""
_HANDSHAKE = 15.0
"""Seconds within which a client must prove that it knows the secret."""
_STRANGERS = 64
"""Largest number of connections that have not proved the secret; an additional connection closes the oldest of them."""
_TURN = 1.0
"""Seconds after which a rank that waits for a key asks again, so that another thread of the rank can send a request in
between.
"""
_MOMENT = 0.01
"""Seconds to sleep while the store is shut down, and between two requests of a rank that waits for a key."""
_AGAIN = 0.1
"""Seconds between two attempts to connect to rank number 0."""
_THERE = "Is the process of rank number 0 running, and can this machine reach it?"
_OTHER = "Give the same secret to all ranks of all jobs."


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


class _Rank(msgspec.Struct):
    """First message of a client after it has proved the secret."""

    number: int
    """Rank number of the client."""
    said: str
    """Description, in words, of the group of ranks that the client expects to join."""


class _Request(msgspec.Struct):
    """Request of a client to the server of the store."""

    do: Literal["set", "get", "add", "swap", "delete", "count"]
    """Name of the operation. `get` waits for at most `wait` seconds; `swap` sets a key only if its value is
    `expected`.
    """
    keys: tuple[str, ...] = ()
    """Keys of the operation; `get` waits until all of these keys exist."""
    value: bytes = b""
    """New value of the key, for the operations `set` and `swap`."""
    expected: bytes = b""
    """Present value that the key must have, for the operation `swap`."""
    amount: int = 0
    """Number that is added to the key's value, for the operation `add`."""
    wait: float = 0.0
    """Largest number of seconds to wait for the keys, for the operation `get`."""


class _Answer(msgspec.Struct):
    """Answer of the server to a request."""

    value: bytes | None = None
    """Value of the first key; None if one of the keys does not exist."""
    amount: int = 0
    """Sum after `add`, or number of keys in the store after `count`."""


class _Seal:
    """Computes the authentication codes for the messages in one direction of a connection.

    Args:
        key: HMAC key of this direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def code(self, message: bytes) -> bytes:
        """Return the code of the next message."""
        self._count += 1
        return _code(self._key, self._count.to_bytes(8, "big"), message)

    def frame(self, message: bytes) -> bytes:
        """Return the next message in the form in which it is sent: with its length and its code."""
        return _LENGTH.pack(len(message)) + message + self.code(message)

    def check(self, message: bytes, code: bytes) -> None:
        """Raise an error if the code does not match the next message."""
        if not hmac.compare_digest(self.code(message), code):
            raise ConnectionError("a message was changed on its way")


def _seals(secret: bytes, nonces: bytes) -> tuple[_Seal, _Seal]:
    """Return two `_Seal`s for a connection: for messages to rank number 0, and for messages from rank number 0."""
    return _Seal(_code(secret, b"to number 0", nonces)), _Seal(_code(secret, b"from number 0", nonces))


def _size(header: bytes) -> int:
    size: int = _LENGTH.unpack(header)[0]
    if size > _LONGEST:
        raise ConnectionError(f"a message of {size:,} bytes")
    return size


def _listener(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine; "" means all addresses, IPv4 and IPv6."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=512)


class StoreServer:
    """Serves the store in a thread, until rank number 0 disconnects, `close` is called, or the process ends.

    Args:
        host: address of this machine at which the server listens; "" means all its addresses.
        port: TCP port; 0 means any free port.
        secret: secret that all clients must prove that they know.
        size: number of clients; when this number is reached, the port is closed.
        expectation: description of the group of ranks that all clients must expect to join.

    Raises:
        StorageError: with code IO, if the server cannot listen at this address.
    """

    def __init__(self, host: str, port: int, secret: bytes, size: int, expectation: str = "") -> None:
        self._secret, self._numbers, self._expectation = secret, set(range(size)), expectation
        self._values: dict[str, bytes] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._writers: WeakSet[asyncio.StreamWriter] = WeakSet()
        self._first: asyncio.StreamWriter | None = None
        """Connection of rank number 0; when it ends, the store is shut down."""
        try:
            self._socket = _listener(host, port)
        except OSError as error:
            message = f"cannot listen at {host or 'any address'}:{port}: {error.strerror or error}"
            hint = "Give an address of the machine of rank number 0, with a free port."
            raise refuse("IO", message, hint=hint) from error
        self.port: int = self._socket.getsockname()[1]
        """TCP port at which the server listens."""
        self.refused = 0
        """Number of connections whose client failed to prove that it knows the secret."""
        self._changed, self._over = asyncio.Condition(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="transaxle-store", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()

    def close(self) -> None:
        """Close all connections and the port."""
        with suppress(RuntimeError):  # the event loop is already closed
            self._loop.call_soon_threadsafe(self._over.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._serve, sock=self._socket)
        self._started.set()
        await self._over.wait()
        await self._shut()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(_MOMENT)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(_MOMENT)

    async def _shut(self) -> None:
        """Close the port. Accepting is stopped first, because asyncio would lose a connection that it accepts while
        closing.
        """
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        await asyncio.sleep(_MOMENT)
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, TimeoutError, ValueError, msgspec.MsgspecError, asyncio.CancelledError):
            self._writers.add(writer)
            try:
                async with asyncio.timeout(_HANDSHAKE):
                    seals = await self._welcome(reader, writer)
                if seals is not None:
                    await self._answer(reader, writer, *seals)
            finally:
                self._strangers.pop(writer, None)
                writer.close()
                if writer is self._first:
                    self._over.set()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[_Seal, _Seal] | None:
        """Let a client prove that it knows the secret, and read its first message; return None if the client cannot
        take part.
        """
        self._strangers[writer] = None
        if len(self._strangers) > _STRANGERS:
            next(iter(self._strangers)).transport.abort()
        first = secrets.token_bytes(_NONCE)
        writer.write(_HELLO + first)
        nonces = first + await reader.readexactly(_NONCE)
        proof = await reader.readexactly(_CODE)
        if not hmac.compare_digest(_code(self._secret, _COMES, nonces), proof):
            self.refused += 1
            writer.write(b"\0")
            await writer.drain()
            return None
        self._strangers.pop(writer, None)
        writer.write(b"\1" + _code(self._secret, _LISTENS, nonces))
        coming, going = _seals(self._secret, nonces)
        rank = msgspec.msgpack.decode(await _next(reader, coming), type=_Rank)
        problem = self._problem(rank)
        writer.write(going.frame(problem.encode()))
        await writer.drain()
        if problem:
            return None
        self._numbers.discard(rank.number)
        self._first = writer if rank.number == 0 else self._first
        if not self._numbers:
            await self._shut()
        return coming, going

    def _problem(self, rank: _Rank) -> str:
        """Return the reason why a client cannot take part; return "" if it can."""
        if rank.said != self._expectation:
            return f"this rank meets {rank.said}, but another one {self._expectation}"
        return "" if rank.number in self._numbers else f"another rank has the number {rank.number}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, come: _Seal, go: _Seal) -> None:
        while True:
            request = msgspec.msgpack.decode(await _next(reader, come), type=_Request)
            writer.write(go.frame(msgspec.msgpack.encode(await self._execute(request))))
            await writer.drain()

    async def _execute(self, request: _Request) -> _Answer:
        values, first = self._values, request.keys[0] if request.keys else ""
        async with self._changed:
            if request.do == "get":
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(request.wait, _TURN)):
                        await self._changed.wait_for(lambda: all(key in values for key in request.keys))
                is_complete = all(key in values for key in request.keys)
                return _Answer(values.get(first, b"") if is_complete else None)
            if request.do == "count":
                return _Answer(amount=len(values))
            self._changed.notify_all()
            if request.do == "delete":
                return _Answer(values.pop(first, None))
            if request.do == "add":
                request.amount += int(values.get(first, b"0"))
                values[first] = str(request.amount).encode()
            elif request.do == "set" or values.get(first, b"") == request.expected:
                values[first] = request.value
            return _Answer(values.get(first, request.expected), request.amount)


async def _next(reader: asyncio.StreamReader, seal: _Seal) -> bytes:
    message = await reader.readexactly(_size(await reader.readexactly(_LENGTH.size)))
    seal.check(message, await reader.readexactly(_CODE))
    return message


class SharedStore(Store):
    """The connection of one rank to the store, in the form that torch's process groups need.

    Args:
        address: host and port of the store's server, which runs in rank number 0.
        secret: secret that all ranks know.
        number: number of this rank among the clients of the store.
        expectation: description of the group of ranks that this rank expects to join.
        timeout: the longest wait for the server, and for keys.

    Raises:
        StorageError: with code IO, if the server cannot be reached in time.
        Refused: with code UNSUPPORTED, if the server has a different secret, or is not a server of such a store.
        UsageError: with code AMBIGUOUS, if another client has this number, or the server's `expectation` differs.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, number: int, expectation: str, timeout: timedelta
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._patience = timeout
        self._lock = threading.Lock()
        self._where = f"{address[0]}:{address[1]}"
        end = time.monotonic() + timeout.total_seconds()
        # the server closed the connection before the proof, because too many unproved connections were open
        while not self._connect(address, end, secret):
            time.sleep(_AGAIN)
        try:
            self._introduce(msgspec.msgpack.encode(_Rank(number, expectation)))
        except OSError as error:
            self.close()
            raise self._connection_error(error) from error
        except BaseException:
            self.close()
            raise

    @property
    def own_host(self) -> str:
        """The IP address of this machine on the connection to the store's server."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Disconnect from the store."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self.close()

    def _connection_error(self, error: OSError) -> TransaxleError:
        return refuse("IO", f"cannot meet at {self._where}: {error.strerror or error}", hint=_THERE)

    def _connect(self, address: tuple[str, int], end: float, secret: bytes) -> bool:
        """Connect to the store's server and prove the secret; return False if the caller should try it again."""
        try:
            self._socket = socket.create_connection(address, max(end - time.monotonic(), _AGAIN))
        except OSError as error:
            if time.monotonic() + _AGAIN > end:
                raise self._connection_error(error) from error
            return False
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(max(self._patience.total_seconds(), _HANDSHAKE))
            self._go, self._come = self._prove(secret)
        except OSError as error:
            self.close()
            if time.monotonic() + _AGAIN > end:
                raise self._connection_error(error) from error
            return False
        except BaseException:
            self.close()
            raise
        return True

    def _prove(self, secret: bytes) -> tuple[_Seal, _Seal]:
        """Exchange proofs of the secret with the server; return the `_Seal`s for sent and for received messages."""
        if self._exactly(len(_HELLO)) != _HELLO:
            message = f"the server at {self._where} is no meeting of this version of transaxle"
            raise refuse("UNSUPPORTED", message, hint="Give a port that no other program uses.")
        first, second = self._exactly(_NONCE), secrets.token_bytes(_NONCE)
        self._socket.sendall(second + _code(secret, _COMES, first, second))
        knows = self._exactly(1) == b"\1"
        if not knows or not hmac.compare_digest(_code(secret, _LISTENS, first, second), self._exactly(_CODE)):
            raise refuse("UNSUPPORTED", f"the server at {self._where} has another secret", hint=_OTHER)
        return _seals(secret, first + second)

    def _introduce(self, rank: bytes) -> None:
        """Send this rank's number, and the description of the group of ranks that it expects to join."""
        problem = self._exchange(rank).decode()
        if problem:
            raise refuse(
                "AMBIGUOUS",
                problem,
                hint=("Pass the same size and backend on all ranks, and a different number on each rank."),
            )

    def _exactly(self, size: int) -> bytes:
        octets = bytearray()
        while len(octets) < size:
            part = self._socket.recv(size - len(octets))
            if not part:
                raise ConnectionError("the connection was closed")
            octets += part
        return bytes(octets)

    def _exchange(self, message: bytes) -> bytes:
        self._socket.sendall(self._go.frame(message))
        answer = self._exactly(_size(self._exactly(_LENGTH.size)))
        self._come.check(answer, self._exactly(_CODE))
        return answer

    def _ask(self, request: _Request) -> _Answer:
        """Send a request to the server, and return the answer.

        Raises:
            dist.DistNetworkError: if the connection is lost; it is a subclass of RuntimeError, as torch's own stores
            raise.
        """
        try:
            with self._lock:
                answer = self._exchange(msgspec.msgpack.encode(request))
        except OSError as error:
            self._socket.close()  # a message that was only partly sent cannot be continued
            raise dist.DistNetworkError(f"the store at {self._where} is lost: {error}") from error
        return msgspec.msgpack.decode(answer, type=_Answer)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; after the timeout, raise `dist.DistStoreError`, a RuntimeError."""
        self._wait_for(tuple(keys), timeout or self._patience)

    def _wait_for(self, keys: tuple[str, ...], timeout: timedelta) -> bytes:
        end = time.monotonic() + timeout.total_seconds()
        while True:
            seconds_left = end - time.monotonic()
            value = self._ask(_Request("get", keys, wait=max(seconds_left, 0.0))).value
            if value is not None:
                return value
            if seconds_left <= 0:
                raise dist.DistStoreError(
                    f"after {timeout.total_seconds():g} s not all of this is there: {', '.join(keys)}"
                )
            # without the pause, this thread would get the lock again immediately, before any other thread
            time.sleep(_MOMENT)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return self._wait_for((key,), self._patience)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask(_Request("set", (key,), _octets(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is `expected`, or if the key does not exist and `expected` is empty; return the key's
        value afterwards.
        """
        answer = self._ask(_Request("swap", (key,), _octets(desired), _octets(expected)))
        return answer.value or b""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number stored under a key, and return the sum."""
        return self._ask(_Request("add", (key,), amount=amount)).amount

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self._ask(_Request("get", tuple(keys))).value is not None

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether the key existed."""
        return self._ask(_Request("delete", (key,))).value is not None

    def num_keys(self) -> int:
        """Return the number of keys in the store."""
        return self._ask(_Request("count")).amount

    def clone(self) -> SharedStore:
        """Return this same object, which several threads may use at the same time."""
        return self


def _octets(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def check_connections(group: dist.ProcessGroup, store: SharedStore, secret: bytes, number: int, size: int) -> None:
    """Let each rank prove the secret on its direct connections to other ranks, which bypass the store.

    Args:
        group: the process group of the ranks.
        store: the store through which these ranks have connected.
        secret: secret that all ranks know.
        number: number of this rank among the clients of the store.
        size: number of ranks.

    Raises:
        StorageError: with code IO, if a connection leads to a program that is none of these ranks.
    """
    if size == 1:
        return
    meeting = store.compare_set(_MEETING, "", secrets.token_bytes(_TAG))

    def tag(sender: int, receiver: int) -> bytes:
        return hmac.digest(secret, b"between ranks" + meeting + f"{sender} {receiver}".encode(), "sha256")

    own_tags = b"".join(tag(number, other) for other in range(size))
    outgoing = torch.frombuffer(bytearray(own_tags), dtype=torch.uint8)
    device = torch.device("cuda" if on_accelerator(group) else "cpu")
    outgoing, received = outgoing.to(device), torch.empty(len(own_tags), dtype=torch.uint8, device=device)
    with collective():
        dist.all_to_all_single(received, outgoing, group=group)
    octets = received.cpu().numpy().tobytes()
    strange = [
        other for other in range(size)
        if not hmac.compare_digest(octets[other * _TAG : (other + 1) * _TAG], tag(other, number))
    ]  # fmt: skip
    if strange:
        message = f"a program that does not know the secret answers rank {number} in place of rank {strange[0]}"
        raise refuse(
            "IO", message, hint="Another program has connected to this machine: keep other programs off its network."
        )
