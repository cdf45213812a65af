"""DCP folders that are damaged, or out for harm: refused with code, file, item and reason; nothing in them runs."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import transaxle as tx
from tests.formats.dcp.conftest import Saved
from tests.formats.dcp.damage import (
    MARKER,
    METADATA,
    Damage,
    Evil,
    archive,
    edit,
    header_edited,
    index_of,
    info,
    moved,
    note_edited,
    payload,
    place,
    put,
    putting,
    read,
    repacked,
    write,
)
from tests.formats.dcp.peers.world import CHECKPOINT
from tests.formats.pickled.assemble import call, name, program, touches
from transaxle.errors import Code, TransaxleError

FIRST, SECOND, LAST = "__0_0.distcp", "__1_0.distcp", "__3_0.distcp"
ROWS, STEPS = "rows", "steps"
HUGE = 2**62
DEEP = "." * 100_000
WHOLE = "00001"
DATA = "archive/data.pkl"
MODULE = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Hostile:
    """What is done to a checkpoint, and how it must be refused."""

    damage: Damage
    code: Code
    said: str
    """In the message."""
    file: str | None = METADATA
    tensor: str | None = ROWS
    case: str = "sharded"
    """What torch saved, at world 4."""


def evil(folder: Path) -> Evil:
    return Evil(folder)


def raw(make: Callable[[Path], bytes]) -> Damage:
    return lambda folder: (folder / METADATA).write_bytes(make(folder))


def entry(change: Callable[[Any], object]) -> Damage:
    return edit(lambda metadata: change(metadata.state_dict_metadata[ROWS]) and None)


def field(**fields: Any) -> Damage:
    def change(tensor: Any) -> None:
        for key, value in fields.items():
            setattr(tensor, key, value)

    return entry(change)


def box(chunk: int, **fields: Any) -> Damage:
    def change(tensor: Any) -> None:
        for key, value in fields.items():
            setattr(tensor.chunks[chunk], key, value)

    return entry(change)


def holding_evil(change: Callable[[Any, Evil], object]) -> Damage:
    def damage(folder: Path) -> None:
        metadata = read(folder)
        change(metadata, Evil(folder))
        write(folder, metadata)

    return damage


def unsafe(damage: Damage, **where: Any) -> Hostile:
    return Hostile(damage, "UNSAFE_PICKLE", "posix.system", tensor=where.pop("tensor", None), **where)


def named(module: str, attribute: str, *args: Any) -> Hostile:
    said = f"{module}.{attribute}"
    return Hostile(raw(lambda _: program(call(module, attribute, *args))), "UNSAFE_PICKLE", said, tensor=None)


def _twice(folder: Path) -> None:
    """Give one chunk two places: two equal keys in a dict that only a pickle can have."""
    metadata = read(folder)
    index = index_of(metadata, ROWS, 0)
    twin = MetadataIndex(ROWS, [0, 0])
    object.__setattr__(twin, "offset", torch.Size([99, 99]))
    metadata.storage_data[twin] = metadata.storage_data[index]
    data = pickle.dumps(metadata, protocol=2)
    assert data.count(b"KcKc\x86") == 1
    (folder / METADATA).write_bytes(data.replace(b"KcKc\x86", b"K\0K\0\x86"))


def _without(metadata: Any, chunk: int) -> None:
    metadata.storage_data.pop(index_of(metadata, ROWS, chunk))
    metadata.state_dict_metadata[ROWS].chunks.pop(chunk)


def _flat(file: Path) -> None:
    header_edited(file, 0, lambda header: header[ROWS].update(shape=[10]))
    note_edited(file, 0, lambda note: note.update(rows={"saved_offsets": [4]}))


def _deep(metadata: Any) -> None:
    metadata.state_dict_metadata[DEEP] = metadata.state_dict_metadata.pop("scalar")
    metadata.planner_data[DEEP] = ("",) * (len(DEEP) + 1)


def _linked(file: Path, target: Path) -> None:
    file.rename(target)
    file.symlink_to(target)


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _overwritten(file: Path, at: int, data: bytes) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + data + whole[at + len(data) :])


def _off_by_one(folder: Path) -> None:
    place(ROWS, offset=info(folder, ROWS).offset + 1)(folder)


def _shortened(folder: Path) -> None:
    place(ROWS, length=info(folder, ROWS).length - 1)(folder)


def _flipped(folder: Path) -> None:
    data = payload(folder, ROWS)
    at = data.index(b"_rebuild_tensor_v2")
    put(folder, ROWS, data[:at] + b"_rebuild_tensor_v3" + data[at + 18 :])


METADATA_PICKLES = {
    "a command": unsafe(lambda folder: write(folder, Evil(folder))),
    "a command by hand": Hostile(
        raw(lambda folder: program(call("os", "system", touches(folder)))), "UNSAFE_PICKLE", "os.system", tensor=None),
    "a process": named("subprocess", "Popen", "true"),
    "torch.load": named("torch", "load", "x"),
    "a class of torch's that is no part of it": named("torch.distributed.checkpoint.filesystem", "FileSystem"),
    "getattr": Hostile(raw(lambda _: program(call("builtins", "getattr", name(MODULE, "Metadata"), "x"))),
        "UNSAFE_PICKLE", "Metadata.x", tensor=None),
    "a command in the planner's data": unsafe(holding_evil(lambda m, e: m.planner_data.update(x=e))),
    "a command in a path": unsafe(holding_evil(lambda m, e: m.planner_data.update(rows=(e,)))),
    "a command as a file name": unsafe(
        holding_evil(lambda m, e: setattr(m.storage_data[MetadataIndex(STEPS)], "relative_path", e))),
    "a command in what nobody reads": unsafe(holding_evil(lambda m, e: setattr(m.storage_meta, "modules", [e]))),
    "nothing": Hostile(raw(lambda _: b""), "CORRUPT", "ends", tensor=None),
    "text": Hostile(raw(lambda _: b"no pickle"), "CORRUPT", "unknown opcode", tensor=None),
    "half of it": Hostile(lambda folder: os.truncate(folder / METADATA, (folder / METADATA).stat().st_size // 2),
        "CORRUPT", "frame", tensor=None),
    "something else": Hostile(lambda folder: write(folder, [1, 2]), "CORRUPT", "a list", tensor=None),
    "a place instead": Hostile(
        lambda folder: write(folder, info(folder, ROWS)), "CORRUPT", "_StorageInfo, not the metadata", tensor=None),
}  # fmt: skip

FIELDS = {
    "no items": Hostile(edit(lambda m: delattr(m, "state_dict_metadata")), "CORRUPT", "does not list", tensor=None),
    "no places": Hostile(edit(lambda m: setattr(m, "storage_data", None)), "CORRUPT", "does not list", tensor=None),
    "a number as a key": Hostile(
        edit(lambda m: m.state_dict_metadata.update({7: 1})), "CORRUPT", "key of an item is a int", tensor=None),
    "a number as an item": Hostile(
        edit(lambda m: m.state_dict_metadata.update(rows=1)), "CORRUPT", "described by a int"),
    "a place that is none": Hostile(
        edit(lambda m: m.storage_data.update({index_of(m, ROWS, 0): 1})), "CORRUPT", "not a byte range"),
    "two places": Hostile(_twice, "CORRUPT", "stored in two places"),
    "a place without an item": Hostile(
        edit(lambda m: m.storage_data.update({MetadataIndex("more"): m.storage_data[MetadataIndex(STEPS)]})), "CORRUPT",
        "not list it among the items", tensor="more"),
    "an object with places of chunks": Hostile(
        edit(lambda m: m.storage_data.update({MetadataIndex(STEPS, [0]): m.storage_data[MetadataIndex(STEPS)]})),
        "CORRUPT", "not a tensor", tensor=STEPS),
    "a chunk too many in the files": Hostile(
        edit(lambda m: m.storage_data.update({MetadataIndex(ROWS, [9, 9]): m.storage_data[index_of(m, ROWS, 0)]})),
        "CORRUPT", "a chunk at [9, 9]"),
    "a tensor with the place of an object": Hostile(
        edit(lambda m: m.storage_data.update({MetadataIndex(ROWS): m.storage_data[index_of(m, ROWS, 0)]})), "CORRUPT",
        "an object"),
    "another path": Hostile(edit(lambda m: m.planner_data.update(rows=("columns",))), "CORRUPT", "another name"),
    "a path without end": Hostile(edit(_deep), "CORRUPT", "nested more than 100 levels deep", tensor=DEEP),
    "no dtype": Hostile(entry(lambda t: setattr(t.properties, "dtype", None)), "CORRUPT", "dtype is missing"),
    "sparse": Hostile(
        entry(lambda t: setattr(t.properties, "layout", torch.sparse_coo)), "UNSUPPORTED", "torch.sparse_coo"),
    "a size of floats": Hostile(field(size=(7.0, 5.0)), "CORRUPT", "malformed"),
    "a negative size": Hostile(field(size=(-7, 5)), "CORRUPT", "malformed"),
    "a size beyond all numbers": Hostile(field(size=(2**63, 5)), "CORRUPT", "malformed"),
    "65 dims": Hostile(field(size=(1,) * 65), "UNSUPPORTED", "64 dims"),
    "a number as a chunk": Hostile(field(chunks=[1]), "CORRUPT", "malformed"),
    "a chunk without sizes": Hostile(box(0, sizes=None), "CORRUPT", "malformed"),
    "a negative offset": Hostile(box(0, offsets=(-1, 0)), "CORRUPT", "malformed"),
    "a transformed stream": Hostile(
        place(ROWS, transform_descriptors=["stream.zstd/1"]), "UNSUPPORTED", "stream.zstd/1"),
}  # fmt: skip

GEOMETRY = {
    "no chunks": Hostile(field(chunks=[]), "CORRUPT", "which it does not have"),
    "a hole": Hostile(edit(lambda m: _without(m, 1)), "INCOMPLETE", "none of its 3 chunks contains the index [2, 0]"),
    "a larger whole": Hostile(field(size=torch.Size([8, 5])), "INCOMPLETE", "[7, 0]"),
    "a smaller whole": Hostile(field(size=torch.Size([6, 5])), "CORRUPT", "does not lie inside"),
    "a whole of other dims": Hostile(field(size=torch.Size([35])), "CORRUPT", "does not lie inside"),
    "a chunk twice": Hostile(entry(lambda t: t.chunks.append(t.chunks[0])), "OVERLAP", "both contain the index [0, 0]"),
    "chunks that overlap": Hostile(
        edit(lambda m: moved(m, ROWS, 1, [1, 0], [2, 5])), "OVERLAP", "both contain the index [1, 0]"),
    "a chunk that lies outside": Hostile(
        edit(lambda m: moved(m, ROWS, 3, [6, 0], [2, 5])), "CORRUPT", "does not lie inside"),
    "a chunk without dims": Hostile(edit(lambda m: moved(m, ROWS, 3, [], [])), "CORRUPT", "does not lie inside"),
    "a chunk that lies nowhere": Hostile(
        edit(lambda m: m.storage_data.pop(index_of(m, ROWS, 1)) and None), "INCOMPLETE", "1 of its 4 chunks"),
    "an object that lies nowhere": Hostile(
        edit(lambda m: m.storage_data.pop(MetadataIndex(STEPS)) and None), "INCOMPLETE", "no file", tensor=STEPS),
}  # fmt: skip


def escape(path: str, said: str = "") -> Hostile:
    return Hostile(place(ROWS, relative_path=path), "PATH_ESCAPE", said or "is not the name", path, None)


FILES = {
    "a path that leads out": escape("../checkpoint/__0_0.distcp"),
    "an absolute path": escape("/etc/hostname"),
    "no path": escape(""),
    "a path with a NUL": escape("__0_0.distcp\0"),
    "no text": Hostile(place(ROWS, relative_path=7), "CORRUPT", "not a byte range"),
    "a missing file": Hostile(
        lambda folder: (folder / SECOND).unlink(), "INCOMPLETE", "the file is missing", SECOND, None),
    "a link that leads out": Hostile(
        lambda folder: _linked(folder / SECOND, folder.parent / "elsewhere"), "PATH_ESCAPE", "leads out", SECOND, None),
    "a FIFO": Hostile(lambda folder: _fifo(folder / SECOND), "UNSUPPORTED", "a FIFO", SECOND, None),
    "a folder": Hostile(lambda folder: _folder(folder / SECOND), "UNSUPPORTED", "a folder", SECOND, None),
    "a truncated file": Hostile(lambda folder: os.truncate(folder / LAST, (folder / LAST).stat().st_size - 1),
        "CORRUPT", "outside", LAST, "complex"),
    "an empty file": Hostile(lambda folder: os.truncate(folder / FIRST, 0), "CORRUPT", "outside", FIRST),
    "an offset behind the end": Hostile(place(ROWS, offset=10**6), "CORRUPT", "outside", FIRST),
    "an offset beyond all numbers": Hostile(place(ROWS, offset=2**64), "CORRUPT", "not a count"),
    "an offset one off": Hostile(_off_by_one, "CORRUPT", "not an archive", FIRST),
    "a length one short": Hostile(_shortened, "CORRUPT", "does not end", FIRST),
    "no length": Hostile(place(ROWS, length=0), "CORRUPT", "not an archive", FIRST),
    "the bytes of another chunk": Hostile(
        edit(lambda m: m.storage_data.update({index_of(m, ROWS, 1): m.storage_data[index_of(m, ROWS, 0)]})), "OVERLAP",
        "overlap those of 'rows'", FIRST),
}  # fmt: skip


def chunk(value: object, code: Code, said: str) -> Hostile:
    """Another object where the first chunk of the tensor was."""
    return Hostile(putting(ROWS, lambda _: archive(value)), code, said, FIRST)


def records(change: Callable[[dict[str, bytes]], object], code: Code, said: str, method: int = 0) -> Hostile:
    def make(folder: Path) -> bytes:
        return repacked(payload(folder, ROWS), change, method)

    return Hostile(putting(ROWS, make), code, said, FIRST)


def pickled(make: Callable[[Path], bytes], code: Code, said: str) -> Hostile:
    """Another pickle in the archive of the first chunk."""

    def damage(folder: Path) -> bytes:
        data = make(folder)
        return repacked(payload(folder, ROWS), lambda records: records.update({DATA: data}))

    return Hostile(putting(ROWS, damage), code, said, FIRST)


def _patched(old: bytes, new: bytes) -> Callable[[dict[str, bytes]], object]:
    def change(records: dict[str, bytes]) -> None:
        assert records[DATA].count(old) == 1
        records[DATA] = records[DATA].replace(old, new)

    return change


ARCHIVES = {
    "a command for a tensor": unsafe(lambda folder: put(folder, ROWS, archive(Evil(folder))), file=FIRST, tensor=ROWS),
    "a command in the archive": pickled(
        lambda folder: program(call("os", "system", touches(folder))), "UNSAFE_PICKLE", "record data.pkl"),
    "a class of the metadata in the archive": pickled(
        lambda _: program(call(MODULE, "StorageMeta")), "UNSAFE_PICKLE", "StorageMeta"),
    "another type": chunk(torch.zeros(2, 5, dtype=torch.int32), "DTYPE_MISMATCH", "but the file holds int32"),
    "another shape": chunk(torch.zeros(5, 2), "SHAPE_MISMATCH", "[2, 5] in the metadata, but [5, 2] in the file"),
    "no tensor": chunk(7, "CORRUPT", "does not hold a tensor, but int"),
    "a sparse tensor": chunk(torch.zeros(2, 5).to_sparse(), "CORRUPT", "not hold a tensor"),
    "a storage that is too small": records(
        lambda r: r.update({"archive/data/0": b"1234"}), "CORRUPT", "record data/0 has 4 bytes"),
    "no storage": records(lambda r: r.pop("archive/data/0") and None, "CORRUPT", "which is missing"),
    "a storage too many": records(
        lambda r: r.update({"archive/data/1": b"1234"}), "CORRUPT", "no tensor uses the record data/1"),
    "a view beyond its storage": records(_patched(b"K\x02K\x05\x86", b"K\x02K\xff\x86"), "CORRUPT", "ends at byte"),
    "a terabyte of one element": records(_patched(b"K\x02K\x05\x86q\x06K\x05K\x01\x86",
        b"J\0\0\x10\0J\0\0\x10\0\x86q\x06K\0K\0\x86"), "SHAPE_MISMATCH", "[1048576, 1048576]"),
    "another byte order": records(lambda r: r.update({"archive/byteorder": b"big"}), "UNSUPPORTED", "big-endian"),
    "compressed": records(lambda _: None, "UNSUPPORTED", "compressed", zipfile.ZIP_DEFLATED),
    "a record that leads out": records(
        lambda r: r.update({"archive/../../x": b""}), "PATH_ESCAPE", "outside the archive's folder"),
    "a flipped bit in the pickle": Hostile(_flipped, "CORRUPT", "checksum", FIRST),
    "half an archive": Hostile(
        putting(ROWS, lambda folder: payload(folder, ROWS)[:700]), "CORRUPT", "does not end like", FIRST),
}  # fmt: skip

OBJECTS = {
    "a command for a number": unsafe(
        lambda folder: put(folder, STEPS, archive(Evil(folder)), None), file=None, tensor=STEPS),
    "a command where nobody looks": unsafe(
        lambda folder: put(folder, "note", archive(Evil(folder)), None), file=None, tensor="note"),
    "a module": Hostile(
        putting(STEPS, lambda _: archive(torch.nn.Linear(1, 1)), None), "UNSAFE_PICKLE", "torch.nn", None, STEPS),
    "a bare pickle": Hostile(
        putting(STEPS, lambda _: pickle.dumps(7), None), "UNSUPPORTED", "not one that torch wrote", None, STEPS),
    "nothing for a number": Hostile(putting(STEPS, lambda _: b"", None), "CORRUPT", "", None, STEPS),
}  # fmt: skip


def blob(change: Callable[[Path, int], None], code: Code, said: str, tensor: str | None = ROWS) -> Hostile:
    """Change the safetensors data at the end of the first file."""

    def damage(folder: Path) -> None:
        there = info(folder, ROWS)
        change(folder / there.relative_path, there.offset)

    return Hostile(damage, code, said, FIRST, tensor, "as_safetensors")


def shard(
    change: Callable[[Path], object], code: Code, said: str, tensor: str | None = ROWS, file: str = "00003"
) -> Hostile:
    """Change the third of four shards; where the parts do not fit together, the first is named."""
    third, named = (f"shard-{number}-model-00001-of-00001.safetensors" for number in ("00003", file))
    return Hostile(lambda folder: change(folder / third), code, said, named, tensor, "hf_shards")


SAFETENSORS = {
    "a header of no JSON": blob(
        lambda file, at: _overwritten(file, at + 8, b"x"), "CORRUPT", "not a JSON object", None),
    "no note": blob(lambda file, at: header_edited(file, at, lambda h: h.pop("__metadata__")), "CORRUPT",
        "DCP_SHARDING_INFO", None),
    "another place in the note": blob(lambda file, at: note_edited(file, at,
        lambda n: n.update(rows={"saved_offsets": [2, 0]})), "INCOMPLETE", "holds the one at [2, 0]"),
    "a part that is not there": blob(lambda file, at: header_edited(file, at, lambda h: h.update(other=h.pop(ROWS))),
        "CORRUPT", "does not say", "other"),
    "another type in safetensors": blob(
        lambda file, at: header_edited(file, at, lambda h: h[ROWS].update(dtype="I32")), "DTYPE_MISMATCH", "I32"),
    "another shape in safetensors": blob(
        lambda file, at: header_edited(file, at, lambda h: h[ROWS].update(shape=[5, 2])), "SHAPE_MISMATCH", "[5, 2]"),
    "another length in safetensors": Hostile(
        place(ROWS, length=41), "CORRUPT", "would have 40", FIRST, case="as_safetensors"),
    "a shard that is missing": shard(lambda file: file.unlink(), "INCOMPLETE", "contains the index", file=WHOLE),
    "a shard twice": shard(lambda file: shutil.copy(file.parent / "shard-00002-model-00001-of-00001.safetensors", file),
        "OVERLAP", "both", file=WHOLE),
    "a shard without a note": shard(
        lambda file: header_edited(file, 0, lambda h: h.pop("__metadata__")), "CORRUPT", "DCP_SHARDING_INFO", None),
    "a note without a tensor": shard(
        lambda file: note_edited(file, 0, lambda n: n.pop(ROWS) and None), "CORRUPT", "does not say"),
    "a note of other dims": shard(
        lambda file: note_edited(file, 0, lambda n: n.update(rows={"saved_offsets": [4]})), "CORRUPT", "does not say"),
    "a shard far out": shard(lambda file: note_edited(file, 0, lambda n: n.update(rows={"saved_offsets": [HUGE, 0]})),
        "INCOMPLETE", "[4, 0]", file=WHOLE),
    "a shard of other dims": shard(_flat, "SHAPE_MISMATCH", "1 here"),
}  # fmt: skip

HOSTILE = METADATA_PICKLES | FIELDS | GEOMETRY | FILES | ARCHIVES | OBJECTS | SAFETENSORS


@pytest.fixture(scope="module", autouse=True)
def _warm(saved: Saved) -> None:
    """What opening imports by itself is imported before anything is counted."""
    tx.open(saved(4) / "sharded" / CHECKPOINT).close()


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_refused(saved: Saved, tmp_path: Path, hostile: Hostile) -> None:
    folder = tmp_path / CHECKPOINT
    shutil.copytree(saved(4) / hostile.case / CHECKPOINT, folder)
    hostile.damage(folder)
    modules, descriptors = set(sys.modules), len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TransaxleError) as caught:
        tx.open(folder)
    error = caught.value
    assert error.exit_code == 3
    assert hostile.code in {refusal.code for refusal in error.refusals}
    first = next(refusal for refusal in error.refusals if refusal.code == hostile.code)
    assert hostile.said in first.message
    assert first.where.tensor == hostile.tensor
    assert first.where.file == hostile.file or (
        hostile.file is None and re.fullmatch(r"__\d_0.distcp", first.where.file or "")
    )
    assert not (folder / MARKER).exists()
    assert {one for one in set(sys.modules) - modules if not one.startswith("transaxle")} == set()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors  # others, of before, may be closed meanwhile


def test_torch_would_run_them(saved: Saved, tmp_path: Path) -> None:
    """The test above would pass on anything if the payloads were harmless: Python's own unpickler leaves the marker."""
    for case in ("a command", "a command in the planner's data", "a command in what nobody reads"):
        folder = tmp_path / case
        shutil.copytree(saved(4) / "sharded" / CHECKPOINT, folder)
        HOSTILE[case].damage(folder)
        pickle.loads((folder / METADATA).read_bytes())  # noqa: S301 - that is the point
        assert (folder / MARKER).exists()


def test_everything_that_is_wrong_is_said_at_once(saved: Saved, tmp_path: Path) -> None:
    folder = tmp_path / CHECKPOINT
    shutil.copytree(saved(4) / "sharded" / CHECKPOINT, folder)
    put(folder, ROWS, archive(torch.zeros(5, 2)))
    put(folder, "columns", archive(7), 1)
    put(folder, STEPS, b"7", None)
    edit(lambda m: m.state_dict_metadata["last"].chunks.pop(0) and m.storage_data.pop(index_of(m, "last", 0)) and None)
    with pytest.raises(TransaxleError) as caught:
        tx.open(folder)
    assert {refusal.where.tensor for refusal in caught.value.refusals} == {ROWS, "columns", STEPS}


def test_a_chunk_of_no_elements_may_lie_nowhere(saved: Saved, tmp_path: Path) -> None:
    """Old versions of torch did not save what ranks without rows hold."""
    folder = Path(shutil.copytree(saved(4) / "sharded" / CHECKPOINT, tmp_path / CHECKPOINT))
    metadata: Any = read(folder)
    chunks = metadata.state_dict_metadata["few"].chunks
    empty = [number for number, chunk in enumerate(chunks) if 0 in chunk.sizes]
    assert empty
    for number in empty:
        metadata.storage_data.pop(index_of(metadata, "few", number), None)
    write(folder, metadata)
    assert tx.open(folder)["few"].shape == (2, 3)
