"""Runs a reader on a checkpoint without data, in a process of its own, and keeps the result.

The process sees a folder with the checkpoint's config and other small files, and with empty weight files; the names,
shapes and dtypes of their tensors are in the request. So the reader's own code runs on the real names, at full size,
and no tensor is read. What a reader does depends only on its version and on this request: both are the key of the
result in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.peft_adapter import adapter_config, base_config
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.errors import refuse
from transaxle.formats.storage.storage import NotJsonError, parse_json
from transaxle.formats.training_state import OPTIMIZER
from transaxle.readers.reader import HUB_FORMATS, PROBES, Reader
from transaxle.readers.twins import form_of, make_twins, needs_twins, own_table, why_no_twins

Trace = Mapping[str, Any]
"""What a probe reports; its modules say what each key means."""
LIMIT = 600
"""Seconds after which a reader is stopped."""
_LARGEST_FILE = 8 << 20
"""Largest size in bytes of a file that is copied into the folder for the reader."""
_COPIED = (".json", ".jinja", ".txt")
"""Ends of the names of the files that readers look at beside the weights; tokenizers are not needed."""
_TOKENIZERS = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
_TORCH_FILES = (".bin", ".pt", ".pth")
_ASK = """
import importlib.metadata as m, json, sys
print(json.dumps({d.name: d.version for d in m.distributions() if d.name in sys.argv[1:]}))
"""


def reader_versions(reader: Reader, python: str | None, form: str) -> dict[str, str]:
    """Return the versions of the reader and of the packages that it depends on most.

    Args:
        reader: the reader.
        python: path of a Python interpreter; None means this one.
        form: name of the container format to be loaded.

    Returns:
        Distribution -> version; empty for a reader that is not run on this format, because it has no probe for it, or
        because it is not installed and tables may stand for it.

    Raises:
        Refused: with the code UNSUPPORTED if the reader is not installed there, and must be.
        StorageError: with the code IO if the interpreter cannot be started.
    """
    if not reader.probe or (reader.runs and form not in reader.runs):
        return {}
    sought = [(reader.package, *reader.also), *((name,) for name in reader.along if name != reader.package)]
    try:
        installed = _versions_at([name for names in sought for name in names], python)
    except subprocess.CalledProcessError as error:
        lacks = error.stderr.strip().splitlines()[-1:] or ["it failed"]
        raise _refuse_absent(reader, lacks[0], python) from None
    except (OSError, subprocess.TimeoutExpired, NotJsonError) as error:
        message = f"this Python cannot be run: {error}"
        raise refuse("IO", message, file=python, hint="Give the path of a Python interpreter, --python PATH.") from None
    versions = {}
    for names in sought:
        if not (present := [name for name in names if name in installed]):
            if reader.runs:
                return {}
            raise _refuse_absent(reader, f"it has no {' or '.join(names)}", python)
        versions[names[0]] = installed[present[0]]
    return versions


def _versions_at(names: Sequence[str], python: str | None) -> dict[str, str]:
    """Return the versions of those of some distributions that a Python has."""
    if python is None:
        return {each.name: each.version for each in metadata.distributions() if each.name in names}
    answer = subprocess.run([python, "-c", _ASK, *names], capture_output=True, text=True, timeout=60, check=True)
    versions: dict[str, str] = parse_json(answer.stdout)
    return versions


def _refuse_absent(reader: Reader, lacks: str, python: str | None) -> Exception:
    place = "with this Python" if python is None else f"with {python}"
    hint = "Name the Python of an environment that has it:  --python /path/to/venv/bin/python"
    return refuse("UNSUPPORTED", f"{reader.name} is not installed {place}: {lacks}", hint=hint)


class ReaderRun(msgspec.Struct, frozen=True):
    """A reader's loading of a checkpoint without data."""

    trace: Trace
    """What the probe reports."""
    is_cached: bool
    """Whether the result of an earlier run was taken."""


def run_reader(
    checkpoint: Checkpoint, reader: Reader, versions: Mapping[str, str], python: str | None, limit: int
) -> ReaderRun:
    """Run a reader on a checkpoint without data, and on small ones of its kind, or take the result from the cache.

    Args:
        checkpoint: the checkpoint.
        reader: the reader; it has a probe.
        versions: versions of the reader and of what it depends on.
        python: path of the reader's Python interpreter; None means this one.
        limit: seconds after which the reader is stopped.

    Raises:
        Refused: with the code UNSUPPORTED if the reader takes too long, its process dies, or the probe cannot build the
            reader's model.
    """
    with headers_only(checkpoint) as request, tempfile.TemporaryDirectory(prefix="transaxle-check-") as place:
        has_twins = reader.compares_values and needs_twins(checkpoint, reader.dialect)
        has_twins = has_twins and not why_no_twins(checkpoint, reader.dialect)
        form = msgspec.to_builtins(form_of(checkpoint)) if has_twins else None
        table = own_table(checkpoint) if has_twins else ""
        content = checkpoint.container.metadata.get("megatron", {}).get("content_metadata") or {}
        request |= {"form": form, "table": table, "format": checkpoint.format, "content": content}
        cached = _cache() / f"{_key(reader, request, versions)}.json"
        try:
            return ReaderRun(parse_json(cached.read_text("utf-8")), True)
        except (OSError, UnicodeDecodeError, NotJsonError):
            pass
        folder = Path(place)
        (folder / "small").mkdir()
        pairs = make_twins(checkpoint, reader.dialect, folder / "small") if has_twins else ()
        request["twins"] = [[str(plain), str(stored)] for plain, stored in pairs]
        (folder / "request.json").write_text(json.dumps(request), "utf-8")
        trace = _run(reader, folder / "request.json", folder / "result.json", python, limit)
    if "unsupported" in trace:
        raise refuse("UNSUPPORTED", trace["unsupported"], hint="Compare it with another reader:  --for READER")
    if _may_pass(trace):
        return ReaderRun(trace, False)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(trace), "utf-8")
        part.replace(cached)
    except OSError:  # a result that cannot be kept is computed again
        pass
    return ReaderRun(trace, False)


_PASSING = re.compile(
    r"(?:[\w.]+\.)?(?:MemoryError|OSError|\w*IOError|ConnectionError|TimeoutError|OutOfMemoryError)\b"
    r"|.*(?:out of memory|[Cc]annot allocate memory|can't allocate memory|No space left|Too many open files)",
    re.DOTALL,
)
"""Pattern of errors of the machine, not of the checkpoint; the next run may do without."""


def _may_pass(trace: Trace) -> bool:
    """Return whether a reader met an error that another run may not meet, so that its result must not be kept."""
    parts = (trace, trace.get("values") or {}, trace.get("drafts") or {})
    errors = [part.get(key) for part in parts for key in ("error", "unbuilt")]
    errors += [why for _, why in trace.get("failed") or ()]
    return any(_PASSING.match(error) for error in errors if isinstance(error, str))


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home, "transaxle", "readers").expanduser()


def _key(reader: Reader, request: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Return the hash of everything on which a trace depends; temporary folders have no part in it."""
    parts = {name: value for name, value in request.items() if name != "folder"}
    probes = {path.name: path.read_text("utf-8") for path in sorted(PROBES.glob("*.py"))}
    text = json.dumps([reader.name, dict(versions), parts, probes], sort_keys=True)
    return f"{reader.name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _run(reader: Reader, request: Path, result: Path, python: str | None, limit: int) -> Trace:
    program = [python or sys.executable, str(PROBES / f"{reader.probe}.py"), str(request), str(result)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSTARTUP"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            program, capture_output=True, text=True, errors="replace", timeout=limit, check=False,
            cwd=request.parent, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        message = f"{reader.name} took longer than {limit} s"
        raise refuse("UNSUPPORTED", message, hint="Give it more time:  --time-limit SECONDS") from None
    if not result.exists():
        last = ended.stderr.strip().splitlines()[-3:]
        message = "\n".join([f"{reader.name} ended with exit code {ended.returncode}", *last])
        raise refuse("UNSUPPORTED", message, hint="Run the reader itself on the checkpoint to see what it lacks.")
    trace: Trace = parse_json(result.read_text("utf-8"))
    return trace


@contextmanager
def headers_only(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """Yield the request for a probe: a folder with the checkpoint's small files and empty weight files, and the names,
    dtypes and shapes of the tensors of each file.
    """
    container = checkpoint.container
    tensors: dict[str, dict[str, tuple[str, Sequence[int]]]] = defaultdict(dict)
    for name, entry in container.entries.items():
        if name.startswith(OPTIMIZER) and checkpoint.format not in HUB_FORMATS:
            continue
        file = entry.extents[0].file if entry.extents else ""
        tensors[_weight_file(file)][name] = entry.dtype, entry.shape
    with tempfile.TemporaryDirectory(prefix="transaxle-headers-") as place:
        folder = Path(place)
        small_files = _small_files(checkpoint)
        for file, content in small_files.items():
            (folder / file).write_bytes(content)
        for file in tensors:
            (folder / file).touch()
        if [*tensors] != ["model.safetensors"]:
            index = {"metadata": {}, "weight_map": {name: file for file, names in tensors.items() for name in names}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
        digests = {file: hashlib.sha256(content).hexdigest() for file, content in sorted(small_files.items())}
        yield {"folder": place, "files": tensors, "small_files": digests}


def _weight_file(file: str) -> str:
    """Return the name of the safetensors file that stands for a file of the checkpoint."""
    name = file.rpartition("/")[2] or "model.safetensors"
    stem = next((name.removesuffix(end) for end in _TORCH_FILES if name.endswith(end)), name)
    return name if name.endswith(".safetensors") else f"{stem}.safetensors"


def _small_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return file name -> content, for the files beside the weights.

    The config is the one that the user gave, or that of an adapter's base.
    """
    storage = checkpoint.container.storage
    files: dict[str, bytes] = {}
    for member in checkpoint.container.carried:
        if "/" in member or not member.endswith(_COPIED) or member in _TOKENIZERS:
            continue
        size = storage.size(member)
        if size <= _LARGEST_FILE:
            files[member] = storage.read(member, 0, size)
    config = checkpoint.config
    if adapter_config(checkpoint.container) is not None:
        config = base_config(checkpoint.container, config)
    files[CONFIG] = json.dumps(dict(config)).encode()
    return files
