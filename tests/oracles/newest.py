"""The newest releases of the peers against those that `constraints.txt` pins: `make newest` lists what differs.

    python -m tests.oracles.newest trace FILE [TYPE ...]  what the installed transformers makes of every model type
    python -m tests.oracles.newest compare OLD NEW        new and absent types, and which have other tensors
    python -m tests.oracles.newest names                  packages whose newest releases are tried
    python -m tests.oracles.newest versions PYTHON        packages of which another environment has another version
    python -m tests.oracles.newest models PYTHON FOLDER   both traces, and their comparison, if transformers differs

A difference means that a table, a record or a page may have become stale; nothing fails. Types that only the newer
transformers has are converted both ways, which says whether they need a table.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.every_type import fresh_process, installed_types, outcome

_MODULE = "tests.oracles.newest"
_SECONDS = 240
"""Longest time for one type."""
_LONGEST = 200
_SHOWN = 4
"""Number of names that a line lists."""
PEERS = (
    "accelerate", "bitsandbytes", "compressed-tensors", "deepspeed", "gguf", "huggingface_hub", "megatron-core",
    "nemo-automodel", "peft", "pytorch-lightning", "safetensors", "torch", "torchao", "torchtitan", "transformers",
    "trl",
)  # fmt: skip
"""Distributions that tests compare with."""

APART = {"torch", "torchtitan", "nemo-automodel"}
"""Those that the Makefile installs by themselves: torch is a build for CPUs, the others come without dependencies."""

Tensors = Mapping[str, list[Any]]
"""Tensor name -> its shape, and for files a digest of which elements of which tensors in memory it consists."""


def traced(model_type: str) -> dict[str, Any]:
    """Return the class of a tiny model of a type, and its tensors in files (`hub`) and in memory.

    If transformers builds or saves no such model, `error` says why.
    """
    from tests.oracles.quiet import quiet
    from transaxle.derivation.transformers_models import Peer, try_trace, variants

    peer = Peer()
    complaints: list[str] = []
    try:
        with quiet():
            for model, _ in variants(peer, model_type, None, complaints, numbers=(0,)):
                trace = try_trace(peer, model, complaints)
                if trace is not None:
                    in_memory = {name: [list(values.shape), ""] for name, values in trace.memory.items()}
                    in_files = _described(trace.hub, trace.memory)
                    in_fp32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
                    return {
                        "class": type(model).__name__, "hub": in_files, "memory": in_memory, "fp32": sorted(in_fp32),
                    }  # fmt: skip
    except Exception as error:  # noqa: BLE001 - of the peer; not every error of it survives the way to another process
        complaints.append(f"{type(error).__name__}: {error}"[:_LONGEST])
    return {"error": complaints[-1] if complaints else "no model class"}


def _described(tensors: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return name -> [shape, digest of which elements of which tensors in memory]."""
    names = sorted(memory)
    numbers = np.concatenate([memory[name].ravel() for name in names])
    owners = np.repeat(np.arange(len(names)), [memory[name].size for name in names])
    places = np.concatenate([np.arange(memory[name].size) for name in names])
    order = np.argsort(numbers, kind="stable")
    described = {}
    for name, values in tensors.items():
        at = order[np.searchsorted(numbers, values.ravel(), sorter=order).clip(max=len(order) - 1)]
        parts = {names[owner] for owner in np.unique(owners[at])}
        computed = numbers[at] != values.ravel()
        text = (sorted(parts), places[at].tobytes(), computed.tobytes())
        described[name] = [list(values.shape), sha256(repr(text).encode()).hexdigest()[:16]]
    return described


def trace_all(target: Path, types: list[str]) -> None:
    """Write what the installed transformers makes of the types, all where none is given."""
    result: dict[str, Any] = {}
    pool = fresh_process()
    for model_type in types or installed_types():
        try:
            result[model_type] = pool.apply_async(traced, (model_type,)).get(_SECONDS)
        except multiprocessing.TimeoutError:
            result[model_type] = {"error": f"no answer after {_SECONDS} s"}
            pool.terminate()
            pool = fresh_process()
    pool.terminate()
    record = {"transformers": metadata.version("transformers"), "types": result}
    target.write_text(json.dumps(record, indent=1, sort_keys=True), "utf-8")


def differences(older: Mapping[str, Any], newer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each way in which the tensors of a type differ between two versions of transformers."""
    if "error" in older or "error" in newer:
        if older.get("error") != newer.get("error"):
            yield f"{older.get('error', 'was built')} -> {newer.get('error', 'is built')}"
        return
    if older["class"] != newer["class"]:
        yield f"class {older['class']} -> {newer['class']}"
    if older["fp32"] != newer["fp32"]:
        yield f"kept in float32: {', '.join(older['fp32']) or 'none'} -> {', '.join(newer['fp32']) or 'none'}"
    for side, where in (("hub", "in files"), ("memory", "in memory")):
        before, after = older[side], newer[side]
        common = [name for name in before if name in after]
        shapes = [name for name in common if before[name][0] != after[name][0]]
        layouts = [name for name in common if name not in shapes and before[name] != after[name]]
        for word, names in (
            ("no longer", sorted(before.keys() - after.keys())),
            ("new", sorted(after.keys() - before.keys())),
            ("another shape", shapes),
            ("another layout", layouts),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                yield f"{where}, {word}: {', '.join(names[:_SHOWN])}{more}"


def compare(older: Path, newer: Path) -> Iterator[str]:
    """Yield the lines of the comparison of two files that `trace_all` has written."""
    first, second = (json.loads(path.read_text("utf-8")) for path in (older, newer))
    yield f"transformers {first['transformers']} -> {second['transformers']}"
    before, after = first["types"], second["types"]
    for model_type in sorted(before.keys() - after.keys()):
        yield f"{model_type}: no longer there"
    for model_type in sorted(after.keys() - before.keys()):
        pool = fresh_process()
        try:
            table, result = pool.apply_async(outcome, (model_type,)).get(_SECONDS)
        except Exception as error:  # noqa: BLE001 - of the peer, or a wrong conversion
            table, result = "", f"{type(error).__name__}: {error}"
        pool.terminate()
        yield f"{model_type}: new; table {table}: {result}"
    for model_type in sorted(before.keys() & after.keys()):
        for line in differences(before[model_type], after[model_type]):
            yield f"{model_type}: {line}"


def versions(python: str) -> Iterator[str]:
    """Yield a line for each peer of which another environment has another version than this one."""
    others = _installed(python)
    for name in PEERS:
        pinned, newest = metadata.version(name), others.get(name.lower(), "none")
        if pinned != newest:
            yield f"{name} {pinned} -> {newest}"


def _installed(python: str) -> dict[str, str]:
    """Return package -> version of another environment."""
    code = (
        "import json, sys; from importlib import metadata as m\n"
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    packages: dict[str, str] = json.loads(answer)
    return packages


def models(python: str, folder: Path) -> None:
    """Trace all types with this transformers and with that of another environment, side by side; print what differs."""
    pinned = metadata.version("transformers")
    if pinned == _installed(python)["transformers"]:
        sys.stdout.write(f"transformers {pinned} is the newest: no model type differs\n")
        return
    folder.mkdir(parents=True, exist_ok=True)
    older, newer = folder / "pinned.json", folder / "newest.json"
    with subprocess.Popen([sys.executable, "-m", _MODULE, "trace", older]) as here:
        subprocess.run([python, "-m", _MODULE, "trace", newer], check=True)
    if here.returncode:
        raise subprocess.CalledProcessError(here.returncode, here.args)
    subprocess.run([python, "-m", _MODULE, "compare", older, newer], check=True)


def main(words: list[str]) -> int:
    """Do what the docstring of the module says."""
    match words:
        case ["trace", target, *types]:
            trace_all(Path(target), types)
        case ["compare", older, newer]:
            for line in compare(Path(older), Path(newer)):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        case ["names"]:
            sys.stdout.write(f"{' '.join(sorted(set(PEERS) - APART))}\n")
        case ["versions", python]:
            sys.stdout.writelines(f"{line}\n" for line in versions(python))
        case ["models", python, folder]:
            models(python, Path(folder))
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
