"""Only ranks with the secret can meet: other clients get no rank, run no code, learn nothing and block nobody."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, if not marked so

import transaxle as tx
from tests.live.jobs import SECRET, apart, free_port
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.transport.test_wire import Canary
from transaxle.live.transport.shared_store import _HELLO, _TAG, SharedStore, StoreServer
from transaxle.refit.hops import read_secret

PATIENCE = timedelta(seconds=20)
OTHER = "that only a stranger knows"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    found = StoreServer("127.0.0.1", 0, SECRET.encode(), 2, "2 ranks")
    yield found
    found.close()


def _connect(server: StoreServer, number: int, secret: str = SECRET, said: str = "2 ranks") -> SharedStore:
    return SharedStore(("127.0.0.1", server.port), secret.encode(), number, said, PATIENCE)


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def _silent(port: int, canary: Path) -> None:
    """Connect, and say nothing."""
    _STAYING.extend(_connected(port) for _ in range(150))


_STAYING: list[socket.socket] = []
"""Connections of strangers that do not close them."""


def _noisy(port: int, canary: Path) -> None:
    """Send bytes that mean nothing."""
    for size in (1, 63, 64, 65, 1 << 20):
        with _connected(port) as stranger, suppress(OSError):
            stranger.sendall(os.urandom(size))
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass


def _unpickling(port: int, canary: Path) -> None:
    """Send a pickle: bare, in a frame, and after a proof that is none."""
    octets = pickle.dumps(Canary(canary))
    frame = struct.pack("!I", len(octets)) + octets
    for message in (octets, frame, bytes(64) + frame + bytes(32)):
        with _connected(port) as stranger, suppress(OSError):
            stranger.sendall(message)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass


def _mirroring(port: int, canary: Path) -> None:
    """Send back what comes."""
    with _connected(port) as stranger, suppress(OSError):
        seen = stranger.recv(1 << 16)
        stranger.sendall(seen[len(_HELLO) :] + seen[-32:])
        assert stranger.recv(1) == b"\0"
        assert stranger.recv(1) == b""


def _of_torch(port: int, canary: Path) -> None:
    """Ask as a client of torch's store."""
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.3))


def _otherwise(port: int, canary: Path) -> None:
    """Come as a rank with another secret."""
    for number in range(2):
        with pytest.raises(tx.TransaxleError, match="has another secret") as found:
            SharedStore(("127.0.0.1", port), OTHER.encode(), number, "2 ranks", PATIENCE)
        assert found.value.code == "UNSUPPORTED"
        assert OTHER not in str(found.value)


STRANGERS: list[Callable[[int, Path], None]] = [_silent, _noisy, _unpickling, _mirroring, _of_torch, _otherwise]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda each: each.__name__)
def test_a_stranger_takes_no_number_and_runs_no_code(
    stranger: Callable[[int, Path], None], server: StoreServer, tmp_path: Path
) -> None:
    """Whatever a stranger does before and between the ranks, both meet, and the store has only their values."""
    canary = tmp_path / "canary"
    try:
        stranger(server.port, canary)
        begin = time.monotonic()
        first = _connect(server, 0)
        first.set("a", b"1")
        stranger(server.port, canary)
        second = _connect(server, 1)
        assert second.get("a") == b"1"
        assert first.num_keys() == 1
        assert time.monotonic() - begin < 15
        assert not canary.exists()
    finally:
        while _STAYING:
            _STAYING.pop().close()


def test_the_port_is_closed_when_all_have_come(server: StoreServer) -> None:
    stores = [_connect(server, 1), _connect(server, 0)]
    stores[0].set("late", "said")
    end = time.monotonic() + 10
    with pytest.raises(ConnectionRefusedError):  # noqa: PT012 - it closes soon
        while time.monotonic() < end:
            with suppress(ConnectionResetError):  # it closed while this one was waiting
                _connected(server.port).close()
    assert stores[1].get("late") == b"said"


def test_it_listens_at_the_address_alone(server: StoreServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 5)
    _connected(server.port).close()
    with refused("IO", "cannot listen at 192.0.2.1:0"):
        StoreServer("192.0.2.1", 0, SECRET.encode(), 2)
    with pytest.raises(tx.TransaxleError, match=r"cannot listen at 127\.0\.0\.1"):
        StoreServer("127.0.0.1", server.port, SECRET.encode(), 2)


def test_a_number_is_taken_once_and_by_those_who_agree(server: StoreServer) -> None:
    first = _connect(server, 0)
    with pytest.raises(tx.TransaxleError, match="another rank has the number 0"):
        _connect(server, 0)
    with pytest.raises(tx.TransaxleError, match="another rank has the number 7"):
        _connect(server, 7)
    with pytest.raises(tx.TransaxleError, match="this rank meets 3 ranks, but another one 2 ranks"):
        _connect(server, 1, said="3 ranks")
    second = _connect(server, 1)
    first.set("a", b"1")
    assert second.check(["a"])


def test_a_rank_may_ask_while_it_waits(server: StoreServer) -> None:
    """A thread that waits for a key does not keep the others of its rank from the store."""
    first, second = _connect(server, 0), _connect(server, 1)
    heard: list[bytes] = []
    waiting = threading.Thread(target=lambda: heard.append(first.get("late")))
    waiting.start()
    time.sleep(0.1)
    begun = time.monotonic()
    first.set("early", "x")
    assert time.monotonic() - begun < 3
    second.set("late", second.get("early"))
    waiting.join(10)
    assert heard == [b"x"]


def test_a_rank_reconnects_when_its_connection_is_closed() -> None:
    """With too many strangers, the oldest connection is closed, which may be a rank's."""
    secret, port, stores = SECRET.encode(), free_port(), list[SharedStore]()

    def come() -> None:
        stores.append(SharedStore(("127.0.0.1", port), secret, 0, "", PATIENCE))

    meeting = threading.Thread(target=come)
    with socket.create_server(("127.0.0.1", port)) as listener:
        meeting.start()
        listener.accept()[0].close()
    server = StoreServer("127.0.0.1", port, secret, 1)
    meeting.join()
    stores[0].set("a", "1")
    server.close()


def test_all_addresses_means_ipv4_and_ipv6() -> None:
    server = StoreServer("", 0, SECRET.encode(), 2)
    hosts = ["127.0.0.1", "::1"] if socket.has_dualstack_ipv6() else ["127.0.0.1"]
    stores = [SharedStore((host, server.port), SECRET.encode(), n, "", PATIENCE) for n, host in enumerate(hosts)]
    assert [each.own_host for each in stores] == hosts
    server.close()


class _Listener(threading.Thread):
    """A stranger at the port of number 0, who answers anybody."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._answer, self._socket = answer, socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.heard = b""

    def run(self) -> None:
        with self._socket, self._socket.accept()[0] as one:
            one.sendall(self._answer)
            with suppress(OSError):
                while part := one.recv(1 << 16):
                    self.heard += part


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no meeting"),
        (_HELLO + bytes(32) + b"\1" + bytes(32), "has another secret"),
        (_HELLO + bytes(32) + b"\0", "has another secret"),
    ],
)
def test_rank_0_proves_the_secret_too(answer: bytes, text: str) -> None:
    listener = _Listener(answer)
    listener.start()
    with pytest.raises(tx.TransaxleError, match=text):
        SharedStore(("127.0.0.1", listener.port), SECRET.encode(), 1, "2 ranks", PATIENCE)
    listener.join(10)
    assert len(listener.heard) in {0, 64}
    assert SECRET.encode() not in listener.heard


class _Changing(threading.Thread):
    """A proxy between a rank and rank 0 that changes one byte at an offset."""

    def __init__(self, port: int, at: int) -> None:
        super().__init__(daemon=True)
        self._to, self._at, self._socket = port, at, socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.seen = b""

    def run(self) -> None:
        with self._socket, self._socket.accept()[0] as one, _connected(self._to) as other:
            back = threading.Thread(target=self._back, args=(other, one), daemon=True)
            back.start()
            passed = 0
            with suppress(OSError):
                while part := bytearray(one.recv(1)):
                    part[0] ^= passed == self._at
                    passed += 1
                    other.sendall(part)
                    self.seen += part

    def _back(self, other: socket.socket, one: socket.socket) -> None:
        with suppress(OSError):
            while part := other.recv(1 << 16):
                one.sendall(part)
                self.seen += part
            one.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("at", [40, 70, 110, 140])
def test_changed_messages_are_rejected(at: int, server: StoreServer) -> None:
    """The proof, the frame, the number, a value."""
    between = _Changing(server.port, at)
    between.start()
    try:
        store = SharedStore(("127.0.0.1", between.port), SECRET.encode(), 0, "2 ranks", timedelta(seconds=3))
        for _ in range(3):
            store.set("key", b"value" * 10)
        pytest.fail("it was taken")
    except (tx.TransaxleError, RuntimeError):
        pass
    assert server._values.get("key", b"value" * 10) == b"value" * 10
    assert SECRET.encode() not in between.seen


def test_the_store_has_the_methods_that_torch_calls(server: StoreServer) -> None:
    first, second = _connect(server, 0), _connect(server, 1)
    assert first.compare_set("job", "", "a") == b"a"
    assert second.compare_set("job", "", "b") == b"a"
    assert second.compare_set("job", "a", "c") == b"c"
    assert second.compare_set("none", "x", "c") == b"x"
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    assert (first.check(["job", "n"]), first.check(["job", "m"])) == (True, False)
    assert (first.delete_key("n"), first.delete_key("n"), first.num_keys()) == (True, False, 1)
    late = threading.Timer(0.3, lambda: second.set("late", "x"))
    late.start()
    assert first.get("late") == b"x"
    with pytest.raises(dist.DistStoreError, match="not all of this is there: late, never"):
        first.wait(["late", "never"], timedelta(seconds=0.2))
    server.close()
    with pytest.raises(RuntimeError, match="is lost"):
        first.set("a", "b")


def test_a_secret_is_asked_for_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSAXLE_REFIT_SECRET", raising=False)
    with pytest.raises(ValueError, match="give secret= or TRANSAXLE_REFIT_SECRET"):
        tx.refit.meet("127.0.0.1:1", 0, 1)
    with pytest.raises(ValueError, match="but has 5 characters") as found:
        tx.refit.meet("127.0.0.1:1", 0, 1, secret="s3cre")
    assert "s3cre" not in str(found.value)
    wrong: Any = b"bytes that are a secret"
    with pytest.raises(TypeError) as other:
        tx.refit.meet("127.0.0.1:1", 0, 1, secret=wrong)
    assert "bytes that" not in str(other.value)
    for number in (1.0, True, "0", None):
        with pytest.raises(TypeError, match="number must be an int"):
            tx.refit.meet("127.0.0.1:1", number, 2, secret=SECRET)  # type: ignore[arg-type]  # as people do
    monkeypatch.setenv("TRANSAXLE_REFIT_SECRET", SECRET)
    assert read_secret(None) == SECRET.encode()
    assert read_secret("another one of 16") == b"another one of 16"


def _lying(rank: int, world: int, port: int) -> str:
    """Know the secret when the store is asked, and none on the connection to another rank."""
    apart(rank, world, 1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            usual = dist.all_to_all_single

            def strange(received: torch.Tensor, sent: torch.Tensor, **how: Any) -> Any:
                sent[:_TAG] = 0  # for rank 0
                return usual(received, sent, **how)

            patch.setattr(dist, "all_to_all_single", strange)
        try:
            tx.refit.meet(f"127.0.0.1:{port}", rank, world, secret=SECRET, backend="gloo", timeout=10)
        except tx.TransaxleError as error:
            return str(error)
    return "met"


def test_each_connection_between_ranks_proves_the_secret() -> None:
    first, second = run(2, _lying, free_port())
    assert "a program that does not know the secret answers rank 0 in place of rank 1" in first
    assert second == "met"
