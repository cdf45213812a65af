"""What ranks tell each other arrives as it was; and bytes of a stranger run nothing."""

from __future__ import annotations

import os
import pickle
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests.live.jobs import apart, free_port, joined
from tests.live.ranks import run
from transaxle.axes.geometry import Replicated, Shard, StridedShard
from transaxle.encodings.encoding import FLOAT8, EncodedTensor, Role
from transaxle.engine.distribute.work_plan import WorkItem, parse_part, parse_plan
from transaxle.engine.verification import Verification
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally
from transaxle.live.save_process import Rendezvous
from transaxle.live.transport import wire
from transaxle.live.transport.shared_memory import Address, Region, map_region
from transaxle.live.transport.shared_store import SharedStore
from transaxle.live.transport.world import World
from transaxle.move.journal import digest, item_file, parse_result, read_results, read_task, unfinished_task
from transaxle.torch_tensors import Placement

_TEXTS = st.text() | st.binary().map(os.fsdecode)
_KEYS = st.one_of(st.none(), st.booleans(), st.integers(), _TEXTS, st.binary())
_VALUES = st.recursive(
    _KEYS | st.floats(allow_nan=False),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(_KEYS, inner), st.sets(_KEYS),
        st.frozensets(_KEYS),
    ),
    max_leaves=30,
)  # fmt: skip


@given(_VALUES)
def test_plain_data_is_decoded_exactly(value: Any) -> None:
    heard = wire.decode(wire.encode(value))
    assert heard == value
    assert repr(heard) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)
    assert type(heard) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        Placement((2, 2), (0, 1, 2, 3), ((0, Shard()), (1, StridedShard(2))), (((0, 3),), ((1, 2),))),
        Placement((1,), (4,), ((None, Replicated()),), apart=True, spare=True, padded=True),
        Address(7, 3, "/memfd:x (deleted)"),
        {Checksum("a", 0, 9, 1 << 31, "a record"): Tally([(0, 9, 5)], read=9, share=1 << 200)},
        EncodedTensor("w", FLOAT8, (4, 4), {Role.CODES: "w", Role.SCALE: "w_scale"}, "te"),
        [torch.bfloat16, torch.float8_e4m3fn],
        {(1, 2): frozenset({((0, 1),)})},
    ],
    ids=lambda value: type(value).__name__,
)
def test_records_are_decoded_exactly(value: Any) -> None:
    heard = wire.decode(wire.encode(value))
    assert heard == value
    assert type(heard) is type(value)


def test_errors_are_decoded_with_all_refusals() -> None:
    refusals = [Refusal("IO", "no", Where("f", "t"), "wait"), Refusal("CORRUPT", "bad", detail=lambda: None)]
    error = gathered(refusals)
    heard = wire.decode(wire.encode((error, [])))[0]
    assert type(heard) is tx.errors.StorageError
    assert heard.refusals == error.refusals
    assert str(heard) == str(error)


@pytest.mark.parametrize("system", [FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError])
def test_an_os_error_keeps_its_class(system: type[OSError]) -> None:
    heard = wire.decode(wire.encode(refuse("IO", "no", file="x", system=system)))
    assert isinstance(heard, system)
    assert wire.decode(wire.encode(refuse("IO", "no", system=ConnectionError))).code == "IO"


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.int64)])
def test_arrays_are_decoded_exactly(array: np.ndarray) -> None:
    heard = wire.decode(wire.encode(array))
    assert (heard.dtype, heard.shape) == (array.dtype, array.shape)
    assert np.array_equal(heard, array)
    heard[...] = 1  # it is the reader's own
    assert wire.decode(wire.encode(np.float32(1.5))) == np.float32(1.5)


def test_objects_that_cannot_be_encoded_raise_a_type_error() -> None:
    for value in (object(), Path("x"), torch.zeros(1), np.array([object()]), {"a": [lambda: None]}):
        with pytest.raises(TypeError, match="ranks tell each other plain data"):
            wire.encode(value)
    assert wire.decode(wire.encode({"a": Path("x")}, str)) == {"a": "x"}
    with pytest.raises(TypeError, match="is no record"):
        wire.tellable(os.stat_result)


class Canary:
    """An object whose pickle makes a folder where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _hostile(folder: Path) -> list[bytes]:
    """Bytes that a stranger might send: pickles, classes that are not on the list, records of other fields, depth."""
    pack = msgspec.msgpack.encode
    kind = wire._Kind
    deep: Any = 0
    for _ in range(500):
        deep = [0, deep]
    return [
        pickle.dumps(Canary(folder)),
        pickle.dumps(Canary(folder), 0),
        pack([kind.RECORD, "posix.mkdir", str(folder)]),
        pack([kind.RECORD, "os.mkdir", str(folder)]),
        pack([kind.RECORD, "transaxle.live.transport.shared_memory.Region", 5]),
        pack([kind.RECORD, "transaxle.live.transport.shared_memory.Address", 1]),
        pack([kind.RECORD, "transaxle.errors.Refusal", "IO", "no", None, ""]),
        pack([kind.REFUSAL, "NONE", "no", [kind.RECORD, "transaxle.errors.Where", None, None], "", None]),
        pack([kind.REFUSAL, "IO", 1, [kind.RECORD, "transaxle.errors.Where", None, None], "", None]),
        pack([kind.REFUSAL, "IO", "no", [kind.RECORD, "transaxle.errors.Where", 1, None], "", None]),
        pack([kind.REFUSAL, "IO", "no", None, "", None]),
        pack([kind.DTYPE, "load"]),
        pack([kind.DTYPE, "no_module"]),
        pack([kind.ARRAY, "<04", b"1234"]),
        pack([kind.ARRAY, "f4,f4", b"12345678"]),
        pack([kind.TEXT, "x"]),
        pack([kind.ARRAY, "O", 1, bytes(8)]),
        pack([kind.ARRAY, "<f4", 1 << 40, bytes(4)]),
        pack([kind.ERROR, "no refusal"]),
        pack([kind.ERROR]),
        pack([kind.DICT, 1]),
        pack([kind.SET, [kind.LIST]]),
        pack([99]),
        pack([]),
        pack({"a": 1}),
        pack(deep) + b"x",
        b"",
        b"\xc7",
    ]


def test_hostile_bytes_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary, asked = tmp_path / "canary", list[str]()
    monkeypatch.setattr(torch, "__getattr__", asked.append)  # it imports modules
    for octets in _hostile(canary):
        with pytest.raises(tx.TransaxleError) as found:
            wire.decode(octets)
        assert found.value.code == "CORRUPT", octets
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))  # noqa: S301 - the canary sings where it is unpickled
    assert canary.exists()
    assert wire.decode(wire.encode(refuse("IO", "x"))).code == "IO"
    assert not asked


def test_changed_bytes_are_refused_or_decoded(tmp_path: Path) -> None:
    """Whatever comes, nothing but a refusal is raised, and what is read can be told again."""
    chance = random.Random(7)
    values: list[Any] = [
        {"a": [1, (2.5, None), {3}, 1 << 200], (1, "\udce9"): torch.bfloat16},
        np.arange(6, dtype=np.float32).reshape(2, 3),
        gathered([Refusal("IO", "no", Where("f", "t"), "wait", system=FileNotFoundError), Refusal("CORRUPT", "bad")]),
        {Checksum("a", 0, 9, 1 << 31, "a record"): Tally([(0, 9, 5)], read=9, share=1 << 200)},
    ]
    for number in range(3_000):
        octets = bytearray(wire.encode(values[number % len(values)]))
        for _ in range(chance.choice([1, 1, 2, 5])):
            at = chance.randrange(len(octets))
            octets[at : at + chance.choice([0, 1, 1, 1, 2])] = chance.randbytes(chance.choice([0, 1, 1, 2]))
        try:
            heard = wire.decode(bytes(octets))
        except tx.TransaxleError as error:
            assert error.code == "CORRUPT"  # noqa: PT017 - most of them
        else:
            wire.encode(heard)


def _told_with(kind: type, name: str) -> Iterator[type]:
    """Yield the classes of ours that a field of a record may have, those of a protocol too."""
    hints: list[Any] = [
        get_type_hints(kind, {**vars(sys.modules[kind.__module__]), "Verification": Verification})[name]
    ]
    while hints:
        hint = hints.pop()
        hints += get_args(hint)
        if not isinstance(hint, type) or not hint.__module__.startswith("transaxle."):
            continue
        if not getattr(hint, "_is_protocol", False):
            yield hint
            continue
        methods = {name for name, each in vars(hint).items() if isfunction(each)} - {"__init__", "__subclasshook__"}
        others = [each for each in vars(sys.modules[hint.__module__]).values() if isinstance(each, type)]
        others = [each for each in others if each.__module__ == hint.__module__]
        yield from (each for each in others if each is not hint and methods <= vars(each).keys())


def test_every_field_of_a_record_can_be_encoded() -> None:
    """In all rooms that ranks run: a class that no list has would be refused where it is first told."""
    for room in ("live", "refit", "parallel"):
        package = import_module(f"transaxle.{room}")
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    tried = 0
    for kind in wire.RECORDS.values():
        for name in () if issubclass(kind, Enum) else wire._fields(kind):
            if (kind, name) == (Verification, "comparison"):  # with another checkpoint; nobody tells of it
                continue
            lacking = {*_told_with(kind, name)} - {*wire.RECORDS.values(), Refusal}
            assert not lacking, f"{kind.__qualname__}.{name}"
            tried += 1
    assert tried > 80


def test_records_do_not_depend_on_what_else_is_imported() -> None:
    """A program may import one part only; records from below `live` are registered by the encoding itself."""
    code = "from transaxle.live.transport import wire; print(*wire.RECORDS)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    live = tuple(f"transaxle.{room}." for room in ("live", "refit", "parallel"))
    assert {name for name in wire.RECORDS if not name.startswith(live)} <= {*printed}
    assert "transaxle.engine.carry.Report" in printed


# Whatever comes from another process, machine or job: a pickle that somebody puts there runs no code.


def _moves(octets: bytes, _: Path) -> object:
    return parse_part(octets, WorkItem(number=0, nbytes=0, key=digest(octets)))  # it has even the hash that is planned


def _of_scratch(octets: bytes, folder: Path) -> object:
    for name in (item_file(0), "journal.json", "journal", "transaxle.journal", "moves"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(octets)
    return (read_results(folder, [0]) or None, read_task(folder), unfinished_task(folder)) == (None, None, None) or None


CHANNELS: dict[str, Callable[[bytes, Path], object]] = {
    "between ranks": lambda octets, _: wire.decode(octets),
    "a plan of work": lambda octets, _: parse_plan(octets, "plan.json"),
    "what an item does": _moves,
    "what a worker has done": lambda octets, _: parse_result(octets),
    "a folder of work": _of_scratch,
}


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("protocol", [0, 5])
def test_a_pickle_in_any_channel_runs_no_code(channel: str, protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    octets = pickle.dumps(Canary(canary), protocol)
    (tmp_path / "scratch").mkdir()
    with suppress(tx.TransaxleError, ValueError):  # msgspec's errors are ValueErrors; some channels take it for absent
        assert CHANNELS[channel](octets, tmp_path / "scratch") in (None, True)
    assert not canary.exists()


def _pickling(rank: int, world: int, port: int, canary: str, made: str) -> list[str]:
    """Let the other job's rank send pickles in the place of what ranks tell each other; and then the truth."""
    if made == "joined":
        apart(rank, world, 1)
        group = joined(rank, world, port)
    else:
        group = dist.new_group()
    together, said = World(group), list[str]()
    for octets in (pickle.dumps(Canary(Path(canary)), 0), pickle.dumps(Canary(Path(canary)))):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(wire, "encode", lambda *_, octets=octets: octets)
            with pytest.raises(tx.TransaxleError) as found:
                together.gather({"a": rank})
        said.append(found.value.code)
    assert together.gather(rank) == [0, 1]
    return said


@pytest.mark.parametrize("made", ["joined", "new"])
def test_a_rank_that_sends_pickles_runs_no_code_on_others(made: str, tmp_path: Path) -> None:
    """Also in groups that verl and OpenRLHF make, which anybody may join who reaches their port."""
    canary = tmp_path / "canary"
    assert run(2, _pickling, free_port(), str(canary), made) == [["CORRUPT", "CORRUPT"]] * 2
    assert not canary.exists()


def _meeting(rank: int, world: int, folder: str) -> tuple[str, int]:
    """Ranks whose background processes are to meet, and a stranger."""
    rendezvous = Rendezvous(World(), timedelta(seconds=20))
    host, port = rendezvous.address.host, rendezvous.address.port
    assert "secret" not in repr(rendezvous.address)
    with pytest.raises(tx.TransaxleError, match="has another secret"):
        SharedStore((host, port), bytes(32), 3, "", timedelta(seconds=5))
    if rank == 0:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), 5).close()
    threads = [threading.Thread(target=rendezvous.report_loss, args=(f"lost {rank}",))]
    for each in threads:
        each.start()
        each.join()
    dist.barrier()
    said = rendezvous.loss
    dist.barrier()
    return str(said), len(rendezvous.address.secret)


def test_background_processes_need_the_secret_to_connect(tmp_path: Path) -> None:
    first, second = run(2, _meeting, str(tmp_path))
    assert first == second
    assert first[0] in {"lost 0", "lost 1"}
    assert first[1] == 32


def test_the_address_of_a_region_opens_no_other_file(tmp_path: Path) -> None:
    """Another rank says where its memory is: files that this process has open are not among it."""
    path = tmp_path / "private"
    path.write_bytes(b"x" * 8192)
    with path.open("rb") as file:
        assert map_region(Address(os.getpid(), file.fileno(), str(path))) is None
        assert map_region(Address(os.getpid(), file.fileno(), f"/memfd:{path} (deleted)")) is None
    with Region(8) as region:
        found = map_region(region.address)
        assert found is not None
        region.bytes[:] = 7
        assert found[:8].tolist() == [7] * 8
