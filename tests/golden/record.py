"""What the steps of a golden case leave, as short digests that do not depend on time, place or machine."""

from __future__ import annotations

import io
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

import transaxle as tx
from transaxle.cli import main

Digests = dict[str, Any]
"""What -> its digest; a number or a refusal as it is. Steps have one such mapping each, and so have the files."""
VOLATILE = frozenset({"seconds", "stages"})
MOST_FILES = 40
"""Of more files, those of one name in several folders have one digest."""
DEFAULTS: Mapping[str, Any] = {"jobs": 2, "sync": False}
"""What every conversion here is asked for: the number of threads is that of the cores where nobody says it."""
_TIME = re.compile(r"\b\d[\d.,]* ?(?:ms|s|min|h)\b(?: \d+ ?s\b)?")
_SPEED = re.compile(r"\b\d[\d.,]* ?[kMGT]?B/s")
_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")
_TIMES = re.compile(r'<section id="times".*?</section>', re.DOTALL)
_DATA = re.compile(r'(<script type="application/json" id="data">)(.*?)(?=</script>)', re.DOTALL)


def digest(data: bytes | str) -> str:
    return xxhash.xxh3_64_hexdigest(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)[:10]


def _text(text: str) -> str:
    """A text without times, speeds, the working directory, and this process's name as a worker."""
    text = text.replace(str(Path.cwd()), "HERE").replace(f"{socket.gethostname()}:{os.getpid()}", "WORKER")
    return _SPEED.sub("SPEED", _TIME.sub("TIME", text))


def _plain(value: Any) -> Any:
    """A document without what differs between runs, and without what is empty."""
    if isinstance(value, dict):
        kept = {str(key): _plain(each) for key, each in value.items() if key not in VOLATILE}
        if isinstance(kept.get("workers"), dict):
            kept["workers"] = sum(kept["workers"].values())
        return kept
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _text(value) if isinstance(value, str) else value


def document(value: Any) -> Digests:
    """Each key of a document: numbers as they are, the rest as digests, and nothing for what is empty."""
    if not isinstance(value, dict):
        return {"document": _of(value)}
    if value.keys() == {"error"}:
        texts = [_refusal(each) for each in value["error"]["refusals"]]
        return refused(texts or [_text(value["error"]["message"])])
    found: Digests = {}
    for key, each in _plain(value).items():
        if each is None or each in ("", [], {}, False):
            continue
        found[key] = each if isinstance(each, int | float) else _of(each)
    return found


def _of(value: Any) -> str:
    """The digest of a document; what JSON has no form for, such as a type, is taken as its text."""
    return digest(json.dumps(_plain(value), sort_keys=True, default=str))


def _refusal(refusal: Mapping[str, Any]) -> str:
    where = " ".join(str(refusal[key]) for key in ("file", "tensor") if refusal.get(key))
    return " · ".join(
        _text(str(part)) for part in (refusal["code"], where, refusal["message"], refusal["hint"]) if part
    )


def refused(texts: Sequence[str]) -> Digests:
    return {"refused": [*texts[:3], *([f"{len(texts) - 3} more: {digest(repr(texts[3:]))}"] if texts[3:] else [])]}


def tensors(held: Mapping[str, torch.Tensor]) -> Digests:
    """A digest of all tensors whose names differ in numbers alone: with types, shapes and values."""
    groups: dict[str, list[Any]] = {}
    for name, tensor in sorted(held.items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        groups.setdefault(_NUMBER.sub("*", name), []).append((name, str(tensor.dtype), [*tensor.shape], digest(raw)))
    return {name: digest(repr(each)) for name, each in groups.items()}


def files(folder: Path, left_out: Iterable[str]) -> Digests:
    """Every file below a folder, hidden ones too, but for what a case began with, and plans for workers, which have
    whole paths.
    """
    found = {
        path.relative_to(folder).as_posix(): digest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".work" and path.relative_to(folder).parts[0] not in left_out
    }
    if len(found) <= MOST_FILES:
        return found
    groups: dict[str, list[Any]] = {}
    for name, each in found.items():
        first, _, rest = name.partition("/")
        groups.setdefault(f"{first}/…/{Path(rest).name}", []).append((name, each))
    return {name: digest(repr(each)) for name, each in groups.items()}


class Stopped(Exception):
    """What a case ends a conversion with."""


class Module(torch.nn.Module):
    """A model of any names, each a parameter."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        inner: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in held.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = tensor
            else:
                self.register_parameter(first, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
        for name, below in inner.items():
            self.add_module(name, Module(below))


def _adamw(model: torch.nn.Module, *, stepped: bool) -> torch.optim.Optimizer:
    """An optimizer that has made three steps, whose state is worked out without rounding."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, foreach=False)
    for parameter in model.parameters() if stepped else ():
        moments = {"exp_avg": parameter.detach() / 8, "exp_avg_sq": parameter.detach().abs() / 4}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return optimizer


def _state_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _stored(source: str, dialect: str, **reading: Any) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in another dialect, without its optimizer; nothing is left of the files."""
    folder = Path("stored")
    tx.convert(source, folder, to=f"safetensors:{dialect}", sync=False, optimizer=False, **reading)
    found = {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return found


def plan(source: str, target: str = "out", **options: Any) -> Digests:
    return document(tx.plan(source, target, **{"jobs": 2, **options}).as_json())


def convert(source: str, target: str = "out", **options: Any) -> Digests:
    return document(tx.convert(source, target, **{**DEFAULTS, **options}).as_json())


def convert_on(source: str, target: str = "out", *, threads: int = 2, **options: Any) -> Digests:
    """Convert by a pool of threads."""
    with ThreadPoolExecutor(threads) as pool:
        return convert(source, target, on=pool, **options)


def convert_opened(source: str, target: str = "out", *, reading: Mapping[str, Any], **options: Any) -> Digests:
    """Convert a checkpoint that was opened before."""
    with tx.open(source, **reading) as checkpoint:
        return document(tx.convert(checkpoint, target, **{**DEFAULTS, **options}).as_json())


def stop(source: str, target: str = "out", *, after: int, **options: Any) -> Digests:
    """End a conversion after some bytes."""
    written = 0

    def progress(count: int) -> None:
        nonlocal written
        written += count
        if written >= after:
            raise Stopped

    try:
        tx.convert(source, target, **{**DEFAULTS, "jobs": 1, "progress": progress, **options})
    except Stopped:
        return {"stopped": 1}
    raise AssertionError(f"{source} was converted before {after} bytes were written")


def load(
    source: str, dialect: str, /, *, shapes_of: str = "", adam: bool = False, cast: str = "", **options: Any
) -> Digests:
    """Load into zeros in a dialect, those of a model with an optimizer if `adam`."""
    zeros = {name: torch.zeros_like(each) for name, each in _stored(shapes_of or source, dialect).items()}
    if cast:
        zeros = {name: each.to(getattr(torch, cast)) for name, each in zeros.items()}
    model = Module(zeros) if adam else None
    optimizer = _adamw(model, stepped=False) if model is not None else None
    state = zeros if model is None else model
    report = tx.load(state, source, **{"jobs": 2, **options, **({"optimizer": optimizer} if optimizer else {})})
    found = document(asdict(report)) | tensors(zeros if model is None else model.state_dict())
    return found | (tensors(_state_of(optimizer, model)) if optimizer is not None and model is not None else {})


def _saved(verb: Callable[..., Any], source: str, dialect: str, adam: bool, options: Mapping[str, Any]) -> Any:
    """Save tensors of a dialect; the whole path, as the process that saves in the background has its own directory."""
    held = _stored(source, dialect)
    model = Module(held)
    more = {"optimizer": _adamw(model, stepped=True)} if adam else {}
    defaults = {"sync": False, "config": f"{source}/config.json"}
    return verb(model if adam else held, Path.cwd() / "out", **{**defaults, **options, **more})


def save(source: str, dialect: str = "hf", /, *, adam: bool = False, **options: Any) -> Digests:
    return document(asdict(_saved(tx.save, source, dialect, adam, options)))


def async_save(source: str, dialect: str = "hf", /, *, adam: bool = False, **options: Any) -> Digests:
    return document(asdict(_saved(tx.async_save, source, dialect, adam, options).result()))


def reshard(source: str, dialect: str, to: str, /, *, drop: str = "", **options: Any) -> Digests:
    """Copy tensors in one dialect into zeros in another; `drop` is a name that the source shall lack."""
    held, target = _stored(source, dialect), {n: torch.zeros_like(t) for n, t in _stored(source, to).items()}
    held.pop(drop, None)
    report = tx.reshard(held, target, **{"config": f"{source}/config.json", **options})
    return document(report.as_json()) | tensors(target)


def state_dict_as(source: str, dialect: str, to: str, /, **options: Any) -> Digests:
    held = _stored(source, dialect)
    return tensors(tx.state_dict_as(held, to, **{"config": f"{source}/config.json", **options}))


def verify(*paths: str, **options: Any) -> Digests:
    return document(tx.verify(*paths, **{"jobs": 2, **options}).as_json())


def diff(*paths: str, **options: Any) -> Digests:
    return document(tx.diff(*paths, **{"jobs": 2, **options}).as_json())


def info(path: str, **options: Any) -> Digests:
    return document(tx.info(path, **options))


def check_rules(*paths: str) -> Digests:
    return document(tx.check_rules(*paths))


def clean(path: str, **options: Any) -> Digests:
    return document({"leftovers": [repr(each) for each in tx.clean(path, **options)]})


def report(path: str, **options: Any) -> Digests:
    tx.report(path, "page.html", **options)
    return _page()


def _page() -> Digests:
    """The page that a step has written, without times: its text, and each part of what its script draws."""
    page = Path("page.html")
    if not page.exists():
        return {}
    text = page.read_text("utf-8")
    page.unlink()
    data = _DATA.search(text)
    assert data is not None
    drawn = json.loads(data[2])
    drawn["facts"].pop("seconds", None)
    drawn["tables"] = [each for each in drawn["tables"] if each["id"] != "times"]
    shown = digest(_text(_TIMES.sub("", _DATA.sub(r"\1", text))))
    return {"page": shown} | {f"page {key}": each for key, each in document(drawn).items()}


def cli(*arguments: str) -> Digests:
    """Run the program in this process; each line that it prints has a digest."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    found: Digests = {"code": code, **_page()}
    if "--json" in arguments and out.getvalue():
        found |= document(json.loads(out.getvalue()))
    else:
        found |= {f"out {number}": digest(_text(line)) for number, line in enumerate(out.getvalue().splitlines(), 1)}
    return found | ({"err": _text(err.getvalue())} if err.getvalue() else {})


def flip(file: str, at: int) -> Digests:
    """Flip a bit of a file; a negative place counts from the end."""
    data = bytearray(Path(file).read_bytes())
    data[at] ^= 1
    Path(file).write_bytes(data)
    return {}


def write(file: str, text: str) -> Digests:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(text)
    return {}


def remove(file: str) -> Digests:
    Path(file).unlink()
    return {}


STEPS: Mapping[str, Callable[..., Digests]] = {
    each.__name__: each
    for each in (
        plan, convert, convert_on, convert_opened, stop, load, save, async_save, reshard, state_dict_as, verify, diff,
        info, check_rules, clean, report, cli, flip, write, remove,
    )
}  # fmt: skip
"""What a step of a case may be, by its name."""


def step(verb: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Digests:
    """Carry a step out; a refusal is a result like any other."""
    try:
        return STEPS[verb](*arguments, **options)
    except tx.TransaxleError as error:
        return {"error": type(error).__name__} | refused([_refusal(each.as_json()) for each in error.refusals])
    except (TypeError, ValueError) as error:
        return {"error": type(error).__name__, "refused": [_text(str(error))]}
