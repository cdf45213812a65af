"""Items on a Ray cluster of four small nodes, a process each: bytes, lost nodes, lost drivers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine import killed
from tests.engine.distribute.slow import Slow, There
from tests.engine.killed import contents
from tests.formats.s3_server import Bucket
from tests.formats.stores import download
from transaxle.engine.distribute.work_plan import WorkItem
from transaxle.errors import UsageError

ray = pytest.importorskip("ray")

ROOT = Path(__file__).parents[3]
HOW: dict[str, Any] = {"to": killed.TO, "shard_size": killed.SHARD_SIZE}
ROOM = 80 << 20
"""Bytes of a node's object store; Ray wants 75 MiB."""
_TRIES = 3


def started(cluster: Any) -> Any:
    """Add a node of one CPU; Ray gives up one that has not started in half a minute, as on a busy machine."""
    for _ in range(_TRIES):
        with suppress(Exception):
            return cluster.add_node(num_cpus=1, object_store_memory=ROOM)
    return cluster.add_node(num_cpus=1, object_store_memory=ROOM)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Four nodes of one CPU each; only three of them are ever lost."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_agent_register_timeout_ms", "240000")  # on a busy machine a node may be late
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        found = Cluster()
        for _ in range(4):
            started(found)
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        yield found
        ray.shutdown()
        found.shutdown()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.tiny(tmp_path / "source")


@pytest.mark.oracle
@pytest.mark.parametrize(("first", "to"), [(None, "dcp:torchtitan"), ("dcp:torchtitan", "hf")])
def test_the_bytes_are_those_of_one_process(
    cluster: Any, first: str | None, to: str, source: Path, tmp_path: Path
) -> None:
    assert cluster.list_all_nodes()
    if first is not None:
        tx.convert(source, tmp_path / "first", to=first)
        source = tmp_path / "first"
    tx.convert(source, tmp_path / "wanted", to=to, shard_size=8000)
    report = tx.convert(source, tmp_path / "out", to=to, shard_size=8000, on="ray", items=12)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    assert sum(report.workers.values()) == sum(tensor.nbytes for tensor in tx.open(tmp_path / "out").values())


def test_nodes_write_to_a_service(cluster: Any, source: Path, bucket: Bucket, tmp_path: Path) -> None:
    assert cluster.list_all_nodes()
    tx.convert(source, tmp_path / "wanted", **HOW)
    tx.convert(source, f"{bucket.url}/out", on=There(None, cpus=1), items=6, **HOW)
    assert contents(download(bucket, "out", tmp_path / "out")) == contents(tmp_path / "wanted")
    assert len(bucket.names()) == len(contents(tmp_path / "wanted"))
    assert bucket.uploads() == []


@pytest.mark.oracle
@pytest.mark.parametrize("after", np.linspace(0.1, 2, 10))
def test_a_lost_node_is_replaced_by_the_others(cluster: Any, after: float, source: Path, tmp_path: Path) -> None:
    killed.convert(source, tmp_path / "wanted")
    node = started(cluster)

    class Losing(Slow):
        def run(self, work: Any, items: Sequence[WorkItem], take: Any) -> None:
            threading.Timer(after, lambda: cluster.remove_node(node, allow_graceful=False)).start()
            super().run(work, items, take)

    tx.convert(source, tmp_path / "out", on=Losing(0.2), items=24, **HOW)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "wanted"]


DRIVER = """
import sys
import transaxle as tx
from tests.engine import killed
from tests.engine.distribute.slow import Slow
how = {"to": killed.TO, "shard_size": killed.SHARD_SIZE}
tx.convert(sys.argv[1], sys.argv[2], on=Slow(1.0), items=24, resume=True, **how)
"""


def test_a_driver_that_is_killed_is_followed_by_another(cluster: Any, source: Path, tmp_path: Path) -> None:
    """Its workers end with it, or keep the next driver waiting: nobody writes for two at once."""
    killed.convert(source, tmp_path / "wanted")
    target, results = tmp_path / "out", tmp_path / ".out.transaxle-partial" / ".transaxle" / "items"
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(source), str(target)], cwd=ROOT, env=environment)
    try:
        end = time.monotonic() + 200
        while not (results.is_dir() and len(list(results.iterdir())) > 3):
            assert driver.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert not target.exists()
    report = None
    while report is None:
        assert time.monotonic() < end
        with suppress(UsageError):
            report = tx.convert(source, target, on="ray", items=24, resume=True, **HOW)
    assert 0 < report.resumed < report.tensors
    assert contents(target) == contents(tmp_path / "wanted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "wanted"]


def test_an_item_that_fits_no_node_is_refused(cluster: Any, source: Path, tmp_path: Path) -> None:
    """Ray would wait for a node that can take it."""
    assert cluster.list_all_nodes()
    with pytest.raises(tx.TransaxleError, match="takes 2 CPUs of a node, and the largest node of the cluster has 1"):
        tx.convert(source, tmp_path / "out", on="ray", jobs=2, **HOW)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_address_of_no_cluster_is_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own client waits half a minute before it says so."""
    asked = list[Any]()

    def nobody(address: str | None = None, **_: Any) -> None:
        asked.append(address)
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(tx.TransaxleError, match="connecting to Ray failed: nobody answers"):
        tx.convert(source, tmp_path / "out", on="ray://127.0.0.1:1", items=4, **HOW)
    assert asked == ["ray://127.0.0.1:1"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
