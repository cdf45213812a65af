"""Time and memory: inputs that are cheap to make, and what the program may take to read or refuse them.

Each input is written into a temporary folder and given to the program as a process of its own, which is killed when
it takes longer than it may. A table says what each run took; one that broke a cap, or did not read or refuse the
input as it should, makes this script fail.

    python fuzz/resources.py                    all inputs, at full size
    python fuzz/resources.py --scale 0.1        a tenth of it
    python fuzz/resources.py metadata index     those whose names hold one of these words
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ, REFUSED = 0, 3
MB = 1 << 20
_PATIENCE = 10
"""A run is killed after so many times the processor time that it may take: it may be waiting for ever."""
_SPACE = 6 << 30
"""Address space of each run, so that a leak ends the run and not the machine."""


@dataclass(frozen=True)
class Input:
    """One input, and what reading it may take."""

    name: str
    make: Callable[[Path, float], Any]
    """Writes it into an empty folder, at a scale from 0 to 1."""
    runs: tuple[tuple[str, ...], ...]
    """Arguments of the program; `@` stands for the folder."""
    code: int
    """What the program must exit with."""
    seconds: float
    """Processor time that a run may take."""
    megabytes: int
    """Memory that it may have."""


@dataclass(frozen=True)
class Taken:
    """What one run took."""

    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float
    """Of processor time: how busy the machine is does not count."""
    megabytes: float
    text: int
    """Characters that it printed where an error was expected, of both streams."""
    last: str
    """The last line that it printed."""


def run(arguments: Sequence[str], seconds: float) -> Taken:
    """Run the program, and kill it when its time is over."""
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        timer = threading.Timer(seconds * _PATIENCE, child.kill)
        timer.start()
        _, status, used = os.wait4(child.pid, 0)
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        took = used.ru_utime + used.ru_stime
        size = out.seek(0, os.SEEK_END)
        out.seek(max(0, size - 4096))
        message = out.read().decode("utf-8", "replace").strip().splitlines()
    return Taken(child.returncode, took, used.ru_maxrss * 1024 / MB, size, message[-1][-100:] if message else "")


_CHILD = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_SPACE}, {_SPACE}))
from transaxle.cli import main
sys.exit(main())
"""


def many(scale: float, count: int) -> int:
    """Return how many of something there are at a scale."""
    return max(1, int(scale * count))


# Tables and configs.


def fifo(folder: Path, scale: float) -> None:
    """Nobody ever writes into it."""
    del scale
    os.mkfifo(folder / "file")


def endless(folder: Path, scale: float) -> None:
    """A device that never ends."""
    del scale
    (folder / "file").symlink_to("/dev/zero")


def loop(folder: Path, scale: float) -> None:
    """A link to itself."""
    del scale
    (folder / "file").symlink_to("file")


def long_line(folder: Path, scale: float) -> None:
    """One line."""
    (folder / "file").write_text("family toy\naxes " + "a " * many(scale, 25_000_000))


def long_table(folder: Path, scale: float) -> None:
    """Lines that are sound, too many of them."""
    lines = "\n".join(f"layers.{{l}}.x{at} = t[f d]" for at in range(many(scale, 100_000)))
    (folder / "file").write_text(f"family toy\naxes l=n f=i d=h\nt : l f d\ndialect hf\n{lines}\n")


def longest_table(folder: Path, scale: float) -> None:
    """The most lines that are read."""
    names = (str(at).translate(str.maketrans("0123456789", "abcdefghij")) for at in range(many(scale, 9_990)))
    lines = "\n".join(f"x.{{l}}.{name} = t[f d]" for name in names)
    (folder / "file").write_text(f"family toy\naxes l=n f=i d=h\nt : l f d\ndialect hf\n{lines}\n")


# safetensors.


def safetensors(path: Path, header: bytes, data: int) -> None:
    """Write a file of a header and zeros."""
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data)


def entry(name: str, at: int) -> str:
    """Return the header's words of a tensor of one byte."""
    return f'"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{at},{at + 1}]}}'


def long_name(folder: Path, scale: float) -> None:
    """One name."""
    safetensors(folder / "model.safetensors", f"{{{entry('x' * many(scale, 99_000_000), 0)}}}".encode(), 1)


def name_with_dots(folder: Path, scale: float) -> None:
    """One name of a great many parts."""
    safetensors(folder / "model.safetensors", f"{{{entry('x.0' * many(scale, 33_000_000), 0)}}}".encode(), 1)


def long_metadata(folder: Path, scale: float) -> None:
    """One text."""
    text = "x" * many(scale, 99_000_000)
    safetensors(folder / "model.safetensors", f'{{"__metadata__":{{"a":"{text}"}},{entry("t", 0)}}}'.encode(), 1)


def tensors(pattern: str) -> Callable[[Path, float], None]:
    """Return what writes a million tensors."""

    def make(folder: Path, scale: float) -> None:
        count = many(scale, 1_000_000)
        entries = ",".join(entry(pattern.format(at, at // 128), at) for at in range(count))
        safetensors(folder / "model.safetensors", f"{{{entries}}}".encode(), count)

    return make


def metadata_pairs(folder: Path, scale: float) -> None:
    """Keys without texts."""
    pairs = ",".join(f'"k{at}":""' for at in range(many(scale, 3_900_000)))
    safetensors(folder / "model.safetensors", f'{{"__metadata__":{{{pairs}}},{entry("t", 0)}}}'.encode(), 1)


def absent_shards(folder: Path, scale: float) -> None:
    """A tensor in each."""
    count = many(scale, 400_000)
    index = {f"t{at}": f"model-{at:06}-of-{count:06}.safetensors" for at in range(count)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


# Pickles.


def views(folder: Path, count: int) -> None:
    """Write a torch file of tensors on one storage."""
    import torch

    base = torch.zeros(count)
    torch.save({f"t{at}": base[at : at + 1] for at in range(count)}, folder / "model.pt")


def one_storage(folder: Path, scale: float) -> None:
    """Views of one storage."""
    views(folder, many(scale, 300_000))


def long_text(folder: Path, scale: float) -> None:
    """A key as long as the file."""
    import torch

    torch.save({"x" * many(scale, 150_000_000): torch.zeros(1)}, folder / "model.pt")


def chunked_payload(folder: Path, count: int) -> None:
    """Write a DCP folder of one tensor, in chunks of one element."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    data = folder / "__0_0.distcp"
    chunk = io.BytesIO()
    torch.save(torch.zeros(1), chunk)
    length = len(chunk.getvalue())
    data.write_bytes(chunk.getvalue() * count)
    row = torch.Size([1])
    payload = [ChunkStorageMetadata(torch.Size([at]), row) for at in range(count)]
    places = {
        MetadataIndex("t", torch.Size([at]), at): _StorageInfo("__0_0.distcp", at * length, length)
        for at in range(count)
    }
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([count]), payload)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata({"t": tensor}, storage_data=places), file)


def chunks(folder: Path, scale: float) -> None:
    """A tensor in chunks of one element."""
    chunked_payload(folder, many(scale, 200_000))


LOOK = (("info", "@"), ("ls", "@"))
PLAN = (*LOOK, ("plan", "@", "@-out", "--to", "safetensors:identity"))
TABLE = (("check-rules", "@/file"),)

INPUTS = (
    Input("rules that are a FIFO", fifo, TABLE, REFUSED, 10, 200),
    Input("rules that are /dev/zero", endless, TABLE, REFUSED, 10, 200),
    Input("rules that are a link to itself", loop, TABLE, 4, 10, 200),
    Input("a line of 50 MB", long_line, TABLE, REFUSED, 10, 200),
    Input("rules of 100,000 lines", long_table, TABLE, REFUSED, 10, 200),
    Input("rules of 10,000 lines", longest_table, TABLE, READ, 30, 300),
    Input("safetensors: a name of 99 MB", long_name, LOOK, REFUSED, 30, 1000),
    Input("safetensors: 33 million dots in a name", name_with_dots, LOOK, REFUSED, 30, 1000),
    Input("safetensors: 99 MB of metadata", long_metadata, LOOK, READ, 30, 1000),
    Input("safetensors: a million tensors", tensors("t{0}"), PLAN, READ, 120, 2500),
    Input("safetensors: a million experts", tensors("a.{1}.b.{0}.c"), PLAN, READ, 120, 2500),
    Input("safetensors: 3.9 million metadata pairs", metadata_pairs, LOOK, REFUSED, 30, 1000),
    Input("index of 400,000 absent shards", absent_shards, LOOK, REFUSED, 30, 1000),
    Input("torch: 300,000 tensors on one storage", one_storage, PLAN, READ, 120, 2500),
    Input("torch: a key of 150 MB", long_text, LOOK, REFUSED, 30, 1000),
    Input("DCP: 200,000 chunks", chunks, PLAN, READ, 120, 2500),
)


@contextlib.contextmanager
def write_input(input: Input, scale: float) -> Iterator[Path]:  # noqa: A002 - what it is
    """Make an input, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="transaxle-resources-"))
    try:
        # In a process of its own: what a process has had at most, a child that it starts has had as well.
        maker = multiprocessing.get_context("fork").Process(target=input.make, args=(folder, scale))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit(f"{input.name}: it could not be made")
        yield folder
    finally:
        shutil.rmtree(folder)


_MOST_TEXT = 100_000
"""Characters that an error may have."""


def problem(input: Input, elapsed: Taken) -> str:  # noqa: A002 - what it is
    """Return what is wrong with a run; empty where nothing is."""
    if elapsed.seconds > input.seconds:
        return f"more than {input.seconds:.0f} s"
    if elapsed.megabytes > input.megabytes:
        return f"more than {input.megabytes} MB"
    if elapsed.code != input.code:
        return f"exit code {input.code} expected"
    if elapsed.code and elapsed.text > _MOST_TEXT:
        return f"an error of {elapsed.text:,} characters"
    return ""


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("words", nargs="*", help="only inputs whose names hold one of these")
    parser.add_argument("--scale", type=float, default=1.0, help="how large the inputs are")
    options = parser.parse_args()
    chosen = [case for case in INPUTS if not options.words or any(word in case.name for word in options.words)]
    print(f"{'input':42}{'command':14}{'exit':>5}{'s':>8}{'MB':>8}")
    failed = 0
    for case in chosen:
        with write_input(case, options.scale) as folder:
            for arguments in case.runs:
                elapsed = run([part.replace("@", str(folder)) for part in arguments], case.seconds)
                wrong = problem(case, elapsed)
                failed += bool(wrong)
                row = f"{case.name:42}{arguments[0]:14}{elapsed.code:5}{elapsed.seconds:8.1f}{elapsed.megabytes:8.0f}"
                print(f"{row}   {wrong and f'FAILED: {wrong}: {elapsed.last}'}".rstrip(), flush=True)
    if failed:
        print(f"{failed} runs took more than they may, or ended otherwise", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
