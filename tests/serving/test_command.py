"""`transaxle serve`, as its users start and end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import transaxle as tx
from tests.checkpoints import WHOLE
from tests.cli import documents
from tests.cli.conftest import ck, here, transaxle  # noqa: F401 - fixtures
from tests.cli.running import MACHINE, TERMINATED, USAGE, Transaxle, command
from transaxle.serving import HubServer

START = "  export HF_ENDPOINT="


@contextmanager
def serving(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start the program, and kill it if the test has not ended it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command("serve", *words), **pipes, env={**os.environ, "NO_COLOR": "1"}) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Return the lines that a process prints, up to the first that begins so."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith(start):
        line = process.stdout.readline()
        assert line, process.communicate()
        lines.append(line.rstrip("\n"))
    return lines


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        data: bytes = response.read()
        return data


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, TERMINATED)])
def test_from_the_start_to_the_end(ck: Path, number: int, code: int) -> None:  # noqa: F811
    tx.convert(ck, "out", to="torchtitan")
    with serving("ck", "--as", "hf", "--to", "torchtitan", "--name", "my/ck") as process:
        head, *_, endpoint = read_until(process, START)
        assert head.startswith("qwen3_moe · safetensors:hf -> safetensors:torchtitan")
        url = endpoint.removeprefix(START)
        assert get(f"{url}/my/ck/resolve/main/{WHOLE}") == Path("out", WHOLE).read_bytes()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code
    assert "Traceback" not in err
    # The signal may arrive before the line of the last response, which its thread writes before the program ends.
    lines = [line.split()[:2] for line in err.splitlines() if line[:1].isdigit()]
    assert lines == [["302", "GET"], ["200", "GET"]]


def test_json_and_a_token(ck: Path) -> None:  # noqa: F811
    with serving("ck", "--json", "--host", "0.0.0.0") as process:
        document = json.loads("\n".join(read_until(process, "}")))
        documents.check("serve", document)
        assert document["files"] == {name: Path("ck", name).stat().st_size for name in ("config.json", WHOLE)}
        port = document["url"].rpartition(":")[2]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"http://127.0.0.1:{port}/")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/", headers={"Authorization": f"Bearer {document['token']}"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.status == 200


def test_refusals_come_before_the_server(
    ck: Path,  # noqa: F811
    transaxle: Transaxle,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HubServer, "wait", lambda _: pytest.fail("it serves"))
    transaxle("serve", "missing").expect(MACHINE, err="nothing was served")
    transaxle("serve", ck, "--as", "s3").expect(USAGE, err="hf")
    transaxle("serve", ck, "--port", "70000").expect(USAGE)
    transaxle("serve", ck, "--name", "a/b/c").expect(USAGE, err="--name ORG/MODEL")
    transaxle("serve", ck, "--to", "safetensors:deepseek").expect(USAGE)
    transaxle("serve", ck, "--decode", "bf16", "--encode", "mxfp8").expect(USAGE, err="exclude each other")
    Path("torn").mkdir()
    Path("torn", WHOLE).write_bytes(Path(ck, WHOLE).read_bytes()[:-1])
    assert transaxle("serve", "torn", "--json").codes == ["CORRUPT"]
    Path("token").write_text("short")
    transaxle("serve", ck, "--token-file", "token").expect(USAGE, err="16 characters")
