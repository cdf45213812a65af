"""Promise: verifying a checkpoint takes little longer than reading it, comparing two across dialects twice as long.

The Qwen3-MoE-like checkpoint of `convert.py` (36 layers x 64 experts, 6 GB of random bf16) lies in a file system in
memory, once more as `transformers` has it, which stacks and fuses every expert, with our manifest, and once more as a
copy. In each round `cat` reads the converted one, `transaxle verify` hashes it, `cmp` compares the original with its
copy, and `transaxle diff` the original with the converted one. All are whole processes, with bytecode cached.

Beside a ratio that misses its promise stands a floor, from the same rounds: a process that imports numpy and xxhash and
nothing of ours, and whose threads take the files from one another, read each in order and hash it, of one checkpoint or
of both.

    python benchmarks/verify.py [--rounds 5] [--layers 36] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from convert import FLOOR, LARGE, MEMORY_FILES, run, write_hub
from promises import Promises

READ, COMPARED = 0.9, 0.5
"""Promised shares of the speed of `cat`, and of `cmp`."""


def main() -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LARGE)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--folder", default=MEMORY_FILES, help="where the checkpoints are written")
    options = parser.parse_args()
    promises = Promises()
    with tempfile.TemporaryDirectory(prefix="transaxle-bench-", dir=options.folder) as name:
        folder = Path(name)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        total = write_hub(folder, options.layers, options.experts)
        hub, converted, copy = (str(folder / each) for each in ("hub", "made", "copy"))
        shutil.copytree(hub, copy)
        own_program = [sys.executable, "-m", "transaxle"]
        subprocess.run(
            [*own_program, "convert", hub, converted, "--to", "transformers"], check=True, capture_output=True
        )
        print(f"{total / 1e9:.2f} GB, {options.rounds} rounds, times the other's speed")
        floor, cores = [sys.executable, "-c", FLOOR], str(os.cpu_count())
        for label, peer_command, arguments, least, limit in [
            (
                "verify against cat",
                ["sh", "-c", 'cat "$0"/* > /dev/null', converted],
                ["verify", converted],
                [converted, "", cores],
                READ,
            ),
            (
                "diff across dialects against cmp of equal files",
                ["sh", "-c", 'for file in "$0"/*; do cmp "$file" "$1/${file##*/}" || exit 1; done', hub, copy],
                ["diff", hub, converted],
                [hub, "", cores, converted],
                COMPARED,
            ),
        ]:
            seconds = [
                [run(command)[0] for command in (peer_command, [*own_program, *arguments], [*floor, *least])]
                for _ in range(options.rounds + 1)
            ][1:]
            ratios, floors = ([each[0] / each[at] for each in seconds] for at in (1, 2))
            promises.at_least(f"{total / 1e9:.0f} GB, {label}", ratios, limit, floor=floors)
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
