"""Promise: a report with values reads BF16 at a twentieth of the speed of `cat`, and F32 at a fiftieth.

A checkpoint of 6 GB is written, and is in the cache of files then. In each round `cat` reads it, then
`transaxle report --values` with as many threads as there are cores. What the processors did is shown
beside it: bytes by second and core, which no other program's work changes much. Then 70,824 tensors are reported on
from their headers. Memory is the most that the process had.

    python benchmarks/look.py [--gigabytes 6] [--rounds 5] [--types BF16 F32] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from promises import Promises

from transaxle.formats.catalog import ITEM_BITS, numpy_dtype

SPEED, SECONDS, MEMORY, SIZE = {"BF16": 0.05, "F32": 0.02}, 10.0, 300.0, 6.0
"""Promises: shares of the speed of `cat`; seconds, MB of memory and MB of the file for a report of many tensors."""
SHAPE = (4096, 2048)
LAYERS, EXPERTS = 61, 384
"""Sizes of the model with many tensors: 61 x (9 + 3 x 384) + 3 = 70,824."""
FILE = 1 << 30


@dataclass(frozen=True)
class Run:
    """Resources that a process used."""

    wall: float
    """Wall-clock seconds."""
    processor: float
    """Processor seconds of all threads."""
    memory: float
    """Peak memory in MB."""


def once(words: Sequence[str], folder: Path) -> Run:
    """Run a program, and discard its output."""
    begin = time.perf_counter()
    with Path(os.devnull).open("wb") as nowhere:
        process = subprocess.Popen(words, cwd=folder, stdout=nowhere)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed")
    return Run(time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the header of a safetensors file."""
    at, entries = 0, {}
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * ITEM_BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def weights(dtype: str) -> bytes:
    """Return the bytes of a tensor of normally distributed numbers."""
    kind = numpy_dtype(dtype)
    values = np.random.default_rng(0).standard_normal(SHAPE, np.float32) * (100 if kind.kind in "iu" else 0.02)
    return np.abs(values).astype(kind).tobytes() if kind.kind == "u" else values.astype(kind).tobytes()


def large(folder: Path, dtype: str, amount: int) -> list[str]:
    """Write a checkpoint of `amount` bytes; return its files."""
    values = weights(dtype)
    layer, files = 0, []
    while amount > 0:
        names = [
            f"model.layers.{layer + at}.mlp.down_proj.weight" for at in range(min(FILE, amount) // len(values) or 1)
        ]
        layer += len(names)
        amount -= len(names) * len(values)
        files.append(f"model-{len(files):05}.safetensors")
        with (folder / files[-1]).open("wb") as file:
            file.write(header(dict.fromkeys(names, (dtype, SHAPE))))
            for _ in names:
                file.write(values)
            file.flush()
            os.fsync(file.fileno())
    index = {"metadata": {}, "weight_map": dict(_places(folder, files))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def _places(folder: Path, files: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in files:
        with (folder / name).open("rb") as file:
            header_entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        yield from ((tensor, name) for tensor in header_entries)


def many(folder: Path) -> None:
    """Write a model of 70,824 tensors as a sparse file."""
    d, f = 64, 32
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    attention = {"q_norm": (16,), "k_norm": (16,), "q_proj": (64, d), "k_proj": (32, d), "v_proj": (32, d)}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (512, d))
    shapes["model.norm.weight"] = (d,)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.{norm}": (d,) for norm in norms}
        shapes |= {f"{base}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{base}.self_attn.o_proj.weight": (d, 64), f"{base}.mlp.gate.weight": (EXPERTS, d)}
        for expert in range(EXPERTS):
            shapes |= {f"{base}.mlp.experts.{expert}.{half}_proj.weight": (f, d) for half in ("gate", "up")}
            shapes[f"{base}.mlp.experts.{expert}.down_proj.weight"] = (d, f)
    start = header({name: ("BF16", shape) for name, shape in shapes.items()})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(len(start) + 2 * sum(int(np.prod(shape)) for shape in shapes.values()))
    config = {
        "model_type": "qwen3_moe", "hidden_size": d, "moe_intermediate_size": f, "intermediate_size": f, "head_dim": 16,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "vocab_size": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def report(*words: str) -> list[str]:
    """Return the command line of a report."""
    return [sys.executable, "-m", "transaxle", "report", *words, "-o", "page.html", "--overwrite"]


def main() -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--types", nargs="*", default=["BF16", "F32"])
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints")
    options = parser.parse_args()
    promises = Promises()
    for dtype in options.types:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            files = large(Path(place), dtype, int(options.gigabytes * 1e9))
            size = sum((Path(place) / name).stat().st_size for name in files) / 1e9
            pairs = [
                (once(["cat", *files], Path(place)), once(report(".", "--values"), Path(place)))
                for _ in range(options.rounds)
            ]
        promises.at_least(
            f"report --values, {size:.1f} GB of {dtype}, against cat",
            [cat.wall / own.wall for cat, own in pairs],
            SPEED.get(dtype),
        )
        cores = os.cpu_count() or 1
        spent = [cores * cat.processor / own.processor for cat, own in pairs]
        promises.at_least(f"  by processor time, {cores} cores", spent, None)
        promises.at_least("  GB by second of a core", [size / own.processor for _, own in pairs], None, "GB/s")
        promises.at_most("  memory", [own.memory for _, own in pairs], MEMORY, "MB")
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        many(Path(place))
        runs = [once(report("."), Path(place)) for _ in range(options.rounds)]
        promises.at_most("report of 70,824 tensors, processor time", [run.processor for run in runs], SECONDS, "s")
        promises.at_most("  memory", [run.memory for run in runs], MEMORY, "MB")
        promises.at_most("  its file", (Path(place) / "page.html").stat().st_size / 1e6, SIZE, "MB")
    return promises.exit_code


if __name__ == "__main__":
    sys.exit(main())
