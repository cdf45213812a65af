"""Time and memory limits for inputs that are cheap to make but could be expensive to read or refuse.

Each input is written into a temporary folder and given to the program in its own process, which is killed when it
takes too long. A table lists the resources of each run. The script fails if a run exceeds a limit, or does not read or
refuse its input as expected.

    python fuzz/resources.py                    all inputs, at full size
    python fuzz/resources.py --scale 0.1        a tenth of it
    python fuzz/resources.py metadata index     inputs whose names contain one of these words
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
"""A run is killed when its wall time is this multiple of its limit of processor time, since it may hang."""
_SPACE = 6 << 30
"""Limit of the address space of a run, so that a leak does not exhaust the machine."""


@dataclass(frozen=True)
class Input:
    """One input, and the limits for reading it."""

    name: str
    make: Callable[[Path, float], Any]
    """Writes the input into an empty folder, at a scale from 0 to 1."""
    runs: tuple[tuple[str, ...], ...]
    """Arguments of the program; `@` stands for the folder."""
    code: int
    """Expected exit code."""
    seconds: float
    """Limit of processor time of a run, in seconds."""
    megabytes: int
    """Limit of memory of a run, in MB."""


@dataclass(frozen=True)
class RunResult:
    """Result and resources of one run."""

    code: int
    """Exit code; negative: number of the signal that ended the run."""
    seconds: float
    """Processor time in seconds."""
    megabytes: float
    text: int
    """Number of characters printed to both streams, if an error was expected."""
    last: str
    """Last printed line."""


def run(arguments: Sequence[str], seconds: float) -> RunResult:
    """Run the program, and kill it if it exceeds its time."""
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
    return RunResult(child.returncode, took, used.ru_maxrss * 1024 / MB, size, message[-1][-100:] if message else "")


_CHILD = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_SPACE}, {_SPACE}))
from transaxle.cli import main
sys.exit(main())
"""


def many(scale: float, count: int) -> int:
    """Return a count at a scale, at least 1."""
    return max(1, int(scale * count))


# Tables and configs.


def fifo(folder: Path, scale: float) -> None:
    """Make a FIFO that nobody writes to."""
    del scale
    os.mkfifo(folder / "file")


def endless(folder: Path, scale: float) -> None:
    """Make a link to a device without end."""
    del scale
    (folder / "file").symlink_to("/dev/zero")


def loop(folder: Path, scale: float) -> None:
    """Make a link to itself."""
    del scale
    (folder / "file").symlink_to("file")


def long_line(folder: Path, scale: float) -> None:
    """Write one very long line."""
    (folder / "file").write_text("family toy\naxes " + "a " * many(scale, 25_000_000))


def long_table(folder: Path, scale: float) -> None:
    """Write valid lines, but too many."""
    lines = "\n".join(f"layers.{{l}}.x{at} = t[f d]" for at in range(many(scale, 100_000)))
    (folder / "file").write_text(f"family toy\naxes l=n f=i d=h\nt : l f d\ndialect hf\n{lines}\n")


def longest_table(folder: Path, scale: float) -> None:
    """Write the largest number of lines that is read."""
    names = (str(at).translate(str.maketrans("0123456789", "abcdefghij")) for at in range(many(scale, 9_990)))
    lines = "\n".join(f"x.{{l}}.{name} = t[f d]" for name in names)
    (folder / "file").write_text(f"family toy\naxes l=n f=i d=h\nt : l f d\ndialect hf\n{lines}\n")


# safetensors.


def safetensors(path: Path, header: bytes, data: int) -> None:
    """Write a file with a header and zeros."""
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data)


def entry(name: str, at: int) -> str:
    """Return the header entry of a tensor of one byte."""
    return f'"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{at},{at + 1}]}}'


def long_name(folder: Path, scale: float) -> None:
    """Write one very long name."""
    safetensors(folder / "model.safetensors", f"{{{entry('x' * many(scale, 99_000_000), 0)}}}".encode(), 1)


def name_with_dots(folder: Path, scale: float) -> None:
    """Write one name with very many segments."""
    safetensors(folder / "model.safetensors", f"{{{entry('x.0' * many(scale, 33_000_000), 0)}}}".encode(), 1)


def long_metadata(folder: Path, scale: float) -> None:
    """Write one very long text."""
    text = "x" * many(scale, 99_000_000)
    safetensors(folder / "model.safetensors", f'{{"__metadata__":{{"a":"{text}"}},{entry("t", 0)}}}'.encode(), 1)


def tensors(pattern: str) -> Callable[[Path, float], None]:
    """Return a function that writes a million tensors."""

    def make(folder: Path, scale: float) -> None:
        count = many(scale, 1_000_000)
        entries = ",".join(entry(pattern.format(at, at // 128), at) for at in range(count))
        safetensors(folder / "model.safetensors", f"{{{entries}}}".encode(), count)

    return make


def metadata_pairs(folder: Path, scale: float) -> None:
    """Write keys with empty texts."""
    pairs = ",".join(f'"k{at}":""' for at in range(many(scale, 3_900_000)))
    safetensors(folder / "model.safetensors", f'{{"__metadata__":{{{pairs}}},{entry("t", 0)}}}'.encode(), 1)


def absent_shards(folder: Path, scale: float) -> None:
    """Write very many files with a tensor each."""
    count = many(scale, 400_000)
    index = {f"t{at}": f"model-{at:06}-of-{count:06}.safetensors" for at in range(count)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


# Pickles.


def views(folder: Path, count: int) -> None:
    """Write a torch file whose tensors share one storage."""
    import torch

    base = torch.zeros(count)
    torch.save({f"t{at}": base[at : at + 1] for at in range(count)}, folder / "model.pt")


def one_storage(folder: Path, scale: float) -> None:
    """Write very many views of one storage."""
    views(folder, many(scale, 300_000))


def long_text(folder: Path, scale: float) -> None:
    """Write a key as long as the file."""
    import torch

    torch.save({"x" * many(scale, 150_000_000): torch.zeros(1)}, folder / "model.pt")


def chunked_payload(folder: Path, count: int) -> None:
    """Write a DCP folder with one tensor in chunks of one element."""
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
    """Write a tensor in chunks of one element."""
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
    """Write an input into a temporary folder; it is removed after the block."""
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
"""Largest number of characters of an error."""


def problem(input: Input, elapsed: RunResult) -> str:  # noqa: A002 - what it is
    """Return the problem of a run as text; empty if there is none."""
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
    """Run the chosen inputs, and print a table."""
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
