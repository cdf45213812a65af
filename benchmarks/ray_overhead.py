"""Promise: on one machine `on="ray"` takes at most a tenth longer than one process, once the cluster is up.

A Qwen3-MoE of the given size is converted to torchtitan by one process with a thread for each core, and by a local Ray
cluster with a worker for each core, in turn; the least wall time of the rounds counts. Planning, starting the items,
the commit and making everything durable are in it.

    python benchmarks/ray_overhead.py [--gigabytes 6] [--folder /tmp] [--rounds 3] [--items 8]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transaxle as tx

PROMISE = 1.10
ROOM = 80 << 20
"""Bytes of the cluster's object store."""


def seconds(source: Path, target: Path, **options: Any) -> float:
    """Convert, and return the wall time; the target is removed."""
    begin = time.monotonic()
    tx.convert(source, target, to="torchtitan", **options)
    elapsed = time.monotonic() - begin
    shutil.rmtree(target)
    os.sync()
    return elapsed


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests import checkpoints

    for setting, long in (("RAY_agent_register_timeout_ms", "240000"), ("RAY_raylet_start_wait_time_s", "240")):
        os.environ.setdefault(setting, long)  # on a busy machine a cluster is late
    try:
        import ray
    except ImportError:
        print("Ray is not installed: nothing to measure")
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--folder", help="folder for source and target; default: the system's temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, default=8)
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    sizes = {**checkpoints.SIZES, "num_hidden_layers": 8, "num_experts": 16, "hidden_size": 1024}
    sizes["moe_intermediate_size"] = int(options.gigabytes * 1e9 / (8 * 16 * 3 * 1024 * 2))
    with TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        config = {**checkpoints.CONFIG, **sizes}
        source = checkpoints.write(folder / "source", checkpoints.tensors(sizes), config=config, shards=4)
        size = sum(file.stat().st_size for file in source.iterdir())
        ray.init(num_cpus=cores, log_to_driver=False, logging_level="ERROR", object_store_memory=ROOM)
        alone, together = [], []
        try:
            seconds(source, folder / "warm", on="ray", items=options.items)
            for _ in range(options.rounds):
                alone.append(seconds(source, folder / "one", jobs=cores))
                together.append(seconds(source, folder / "ray", on="ray", items=options.items))
        finally:
            ray.shutdown()
    ratio = min(together) / min(alone)
    print(f"{size / 1e9:.1f} GB, {cores} cores, {options.items} items, {folder.parent}")
    print(f"one process {min(alone):6.1f} s   ({', '.join(f'{each:.1f}' for each in alone)})")
    print(f"Ray         {min(together):6.1f} s   ({', '.join(f'{each:.1f}' for each in together)})")
    print(f"promise (at most {PROMISE:g} times as long): {ratio:.2f}, {'kept' if ratio <= PROMISE else 'NOT KEPT'}")
    return 0 if ratio <= PROMISE else 1


if __name__ == "__main__":
    sys.exit(main())
