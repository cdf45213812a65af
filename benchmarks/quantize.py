"""Quantize and dequantize as parameters in training are: GPU programs against a plain copy, or what a CPU does.

Promises, on an H200: float8_block and mxfp8, from 64 MB of bfloat16 up, at 80 % of the bandwidth of a copy that moves
as many bytes. Where there is no GPU nothing is promised, and the CPU's figures are shown.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP8, NVFP4, Encoding
from transaxle.quant import kernels

MEGABYTE = 1 << 20
SIZES = (64, 256, 1024)
"""Bytes of the bfloat16 matrix, in megabytes."""
COLUMNS = 8192
TURNOVER = 1 << 30
"""Bytes touched before a buffer is used again: many times the size of a cache."""
PAGE = 4096
PROMISED = 0.8


@dataclass(frozen=True)
class Job:
    """One way to quantize."""

    name: str
    encoding: Encoding
    columnwise: bool = False
    over: tuple[int, int] | None = None
    promised: bool = False


JOBS = (
    Job("float8", FLOAT8),
    Job("float8_block", FLOAT8_BLOCK, promised=True),
    Job("float8_block 1x128", replace(FLOAT8_BLOCK, tile=(1, 128))),
    Job("mxfp8", MXFP8, promised=True),
    Job("mxfp8 both ways", MXFP8, columnwise=True),
    Job("nvfp4", NVFP4),
    Job("nvfp4 16x16", NVFP4, over=(16, 16)),
)


def graph_seconds(calls: list[Callable[[], object]], rounds: int = 15) -> float:
    """Return the median seconds of one call: all calls are captured in a CUDA graph, which is replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times[3:]) / len(calls)


def cpu_seconds(calls: list[Callable[[], object]], rounds: int = 3) -> float:
    """Return the least seconds of one call on the CPU."""
    calls[0]()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        calls[0]()
        times.append(time.perf_counter() - start)
    return min(times)


def matrix(megabytes: int, device: str) -> torch.Tensor:
    """Return a matrix of normally distributed bfloat16 numbers."""
    return torch.randn(megabytes * MEGABYTE // (2 * COLUMNS), COLUMNS, device=device).to(torch.bfloat16)


def copy_rate(traffic: int, device: str) -> float:
    """Return bytes per second, read and written, of a copy with this traffic.

    The faster of torch's copy and a kernel that inverts bits counts: torch may use the GPU's copy engines, which are up
    to a third slower at some sizes.
    """
    words = traffic // 2 // PAGE * PAGE // 4
    count = max(2, TURNOVER // traffic) if device == "cuda" else 1
    pairs = [
        [torch.randint(0, 1 << 30, (words,), dtype=torch.int32, device=device) for _ in "ab"] for _ in range(count)
    ]
    timed = graph_seconds if device == "cuda" else cpu_seconds
    engine = timed([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
    program = timed([lambda a=a, b=b: torch.bitwise_not(a, out=b) for a, b in pairs])
    return 8 * words / min(engine, program)


def measure(job: Job, megabytes: int, device: str) -> list[tuple[str, int, float]]:
    """Return (direction, bytes moved, seconds) for quantizing and dequantizing."""
    x = matrix(megabytes, device)
    total = kernels.amax(x) if job.encoding.has_global or job.encoding is FLOAT8 else None
    common = {"amax": total, "columnwise": job.columnwise, "over": job.over}
    first = kernels.quantize(x, job.encoding, **common)
    moved = x.nbytes + sum(buffer.nbytes for buffer in first.present().values())
    count = max(2, TURNOVER // moved) if device == "cuda" else 1
    xs = [x, *(x.roll(place + 1) for place in range(count - 1))]
    quantized = [kernels.quantize(each, job.encoding, **common) for each in xs]
    timed = graph_seconds if device == "cuda" else cpu_seconds
    rows = [
        (
            "quantize",
            moved,
            timed(
                [
                    lambda a=a, m=m: kernels.quantize(a, job.encoding, out=m, **common)
                    for a, m in zip(xs, quantized, strict=True)
                ]
            ),
        )
    ]
    if job.encoding is FLOAT8:
        rows.append(("amax", x.nbytes, timed([lambda a=a: kernels.amax(a) for a in xs])))
    if not job.columnwise:
        seconds = timed(
            [
                lambda a=a, m=m: kernels.dequantize(m, job.encoding, torch.bfloat16, out=a)
                for a, m in zip(xs, quantized, strict=True)
            ]
        )
        rows.append(("dequantize", moved, seconds))
    return rows


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    missed = 0
    print(f"on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU, one process'}; GB/s read and written")
    print(f"{'MB':>5} {'':20} {'':11} {'GB/s':>7} {'of a copy':>10}")
    for megabytes in SIZES if device == "cuda" else SIZES[:1]:
        for job in JOBS:
            for direction, moved, seconds in measure(job, megabytes, device):
                share = moved / seconds / copy_rate(moved, device)
                late = device == "cuda" and job.promised and share < PROMISED
                missed += late
                print(
                    f"{megabytes:5} {job.name:20} {direction:11} {moved / seconds / 1e9:7.1f} {share:10.0%}"
                    f"{'  below direction is promised' if late else ''}"
                )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
