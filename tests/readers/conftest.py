"""Probes that run in the process of the tests, where the programs are imported once.

What a probe replaces in a program is put back. One test of each reader runs the probe as users do, in its own process.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.quiet import quiet
from tests.readers import probe_server
from transaxle.readers import reader_runs
from transaxle.readers.reader import PROBES, Reader


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache of results, for the tests of a module."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run probes in this process."""

    def run(reader: Reader, request: Path, result: Path, python: str | None, limit: int) -> Any:
        return run_probe(reader.probe, json.loads(request.read_text("utf-8")))

    monkeypatch.setattr(reader_runs, "_run", run)


@contextmanager
def served(python: Path, probe: str, folder: Path) -> Iterator[None]:
    """Run a probe in one process of its own, for all checks, which then starts only once.

    Args:
        python: the interpreter of the reader's environment.
        probe: name of the probe.
        folder: an empty folder for what the process prints, and for results.
    """
    command = [str(python), probe_server.__file__, str(PROBES), probe]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM", "NVTE"))}
    errors = folder / "errors"
    with (
        pytest.MonkeyPatch.context() as patch,
        errors.open("w") as log,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        assert server.stdin is not None
        run_others = reader_runs._run

        def run(reader: Reader, request: Path, result: Path, *options: Any) -> Any:
            if reader.probe != probe:
                return run_others(reader, request, result, *options)
            print(json.dumps([str(request), str(result)]), file=server.stdin, flush=True)
            assert server.stdout is not None
            assert server.stdout.readline() == "done\n", errors.read_text("utf-8")[-4000:]
            return json.loads(result.read_text("utf-8"))

        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(reader_runs, "_run", run)
        yield
        server.stdin.close()


def run_probe(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return what a probe reports, as JSON data."""
    from transformers import modeling_utils

    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.syspath_prepend(str(PROBES))
        probe, files = importlib.import_module(name), importlib.import_module("headers")
        safetensors, functions = importlib.import_module("safetensors"), importlib.import_module("safetensors.torch")
        originals = {"safe_open": safetensors.safe_open, "load_file": functions.load_file}
        for module in (safetensors, functions, modeling_utils):
            for attribute, original in originals.items():
                if hasattr(module, attribute):
                    patch.setattr(module, attribute, original)
        patch.setattr(modeling_utils, "convert_and_load_state_dict_in_model",
                      modeling_utils.convert_and_load_state_dict_in_model)  # fmt: skip
        patch.setattr(files, "_FOLDERS", {})
        headers = files.Headers(request["folder"], request["files"])
        headers.install()
        for module in list(sys.modules.values()):
            for attribute, original in originals.items():
                if vars(module).get(attribute) is original:
                    patch.setattr(module, attribute, getattr(functions, attribute))
        report: dict[str, Any] = {}
        try:
            probe.trace(request, headers, report)
        except Exception as error:  # noqa: BLE001 - as in `headers.run`
            report["error"] = files.explain(error)
        report["untaken"] = headers.untaken()
        answer: dict[str, Any] = json.loads(json.dumps(report, default=str))
        return answer
