"""Compares a framework's own loader with every layout of a model, in the framework's own tests.

    python -m transaxle.testkit my_framework.testing:load_hub qwen3_moe configs/tiny.json

`load_hub` is a function of the framework. It gets the folder of a small checkpoint with random weights, as a model hub
has it, loads it with the framework's own code, and returns the state dict of the framework's model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from safetensors.numpy import save_file

from transaxle import verbs
from transaxle.arguments import Config, PathLike, Patterns
from transaxle.engine.checkpoint.settings import CONFIG, model_config
from transaxle.engine.views.encode import select_names
from transaxle.engine.wording import plural
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import SAFETENSORS, get_format, writable

LoadHub = Callable[[Path], Mapping[str, torch.Tensor]]
"""Function of a framework: folder of a hub checkpoint -> state dict of its model after loading."""
HUB = f"{SAFETENSORS.name}:hf"
LOADER = "the loader"
STATE = "state.pt"
_SEED = 54
_FILES = 2
"""Number of files of the first hub folder, so that a loader needs the index."""
_SHOWN = 3
"""Number of differences that a line names."""


class _Words(msgspec.Struct, frozen=True):
    """Sentences for the differences of two sets of tensors; `{actual}` and `{expected}` are their values or shapes."""

    absent: str
    """For a tensor that only the expected set has."""
    additional: str
    """For a tensor that only the actual set has."""
    values: str
    """For two values or shapes."""


_CONVERTED = _Words(
    absent="the loader returns {name}, which no checkpoint has",
    additional="the loader returns no {name}",
    values="the loader has {expected} where the table gives {actual}",
)
"""For what the table makes of the hub's files, against what the loader makes of them."""
_WRITTEN_BACK = _Words(
    absent="the files that are written back lack {name}",
    additional="the files that are written back have {name}, which the first files lack",
    values="the files that are written back have {actual} where the first files have {expected}",
)
_LOADED_AGAIN = _Words(
    absent="the loader returns no {name} for files that Transaxle writes",
    additional="the loader returns {name} only for files that Transaxle writes",
    values="the loader has {actual} for files that Transaxle writes, {expected} for the first files",
)


class Round(msgspec.Struct, frozen=True):
    """One way from a checkpoint to another, and whether its end is what the loader makes."""

    way: tuple[str, ...]
    """Formats and dialects that the weights pass through, in order."""
    outcome: Literal["equal", "different", "refused"]
    """`refused` if Transaxle refuses the layout between the ends, because it cannot have these tensors."""
    problem: str = ""
    """What differs, or why the conversion is refused; empty if the end is equal."""

    def __str__(self) -> str:
        text = f"{self.outcome:9}  {' -> '.join(self.way)}"
        return f"{text}: {self.problem}" if self.problem else text


class Rounds(msgspec.Struct, frozen=True):
    """All rounds of one model; true if none ends with other tensors."""

    model: str
    """The model type, or the path of its config."""
    dialect: str
    """Dialect of the framework's names."""
    rounds: tuple[Round, ...]
    """The rounds, in the order in which they were run."""

    def __bool__(self) -> bool:
        return all(entry.outcome != "different" for entry in self.rounds)

    def __str__(self) -> str:
        count = sum(entry.outcome == "equal" for entry in self.rounds)
        lines = [f"{self.model}: {count} of {len(self.rounds)} rounds equal, dialect {self.dialect}"]
        direct = self.rounds[0]
        if direct.outcome == "different":
            lines.append(f"  the loader differs from the table: {direct.problem}")
        elif any(entry.outcome == "different" and entry.way[-1] == LOADER for entry in self.rounds):
            lines.append("  the loader makes other tensors of the files that Transaxle writes than of the first files")
        folded = [entry for entry in self.rounds if entry.outcome == "different" and entry.problem == direct.problem]
        if folded:
            lines.append(
                f"  different  {plural(len(folded), 'round')} from {HUB} to {folded[0].way[-1]}, by this alone"
            )
        lines += [f"  {entry}" for entry in self.rounds if entry not in folded]
        return "\n".join(lines)


def run(
    load_hub: LoadHub,
    model: str | Config,
    *,
    dialect: str | None = None,
    rules: PathLike | None = None,
    skip: Patterns = (),
) -> Rounds:
    """Compare a loader with every dialect and every format that a model has.

    The weights are random multiples of 1/64, exact in each floating-point type of 16 bits, so that a loader may cast.

    Args:
        load_hub: function of the framework that loads the folder of a hub checkpoint, and returns the state dict of its
            model: parameters by name, whole tensors.
        model: a model type, such as `qwen3_moe`, of which transformers' default config is shrunk; or a small config,
            which is taken as it is.
        dialect: dialect of the names that the loader returns; None means that the names determine it.
        rules: path of a rules file with the table of the model, as for `open`; None means the families that ship.
        skip: patterns of names in the state dict that no checkpoint has, such as buffers.

    Returns:
        The rounds: from the hub to the framework's names and back; what the loader makes of that; and through every
        other dialect and format to the framework's names.

    Raises:
        UsageError: with the code UNKNOWN_FAMILY or AMBIGUOUS if no table has the config, or the names of the state
            dict; with the code IO if the path of a config does not exist.
        TypeError: if the loader returns anything but a state dict of whole tensors with values.
        RuntimeError: if the loader ends the program.

    Other exceptions of the loader are raised as they are.
    """
    config = _small_config(model)
    name = model if isinstance(model, str) else str(config.get("model_type"))
    reading: dict[str, Any] = {"rules": rules}
    with TemporaryDirectory(prefix="transaxle-testkit-") as place:
        folder = Path(place)
        hub = folder / "hub"
        _write_hub(hub, config, reading)
        load = partial(_state, load_hub, (skip,) if isinstance(skip, str) else tuple(skip))
        state = load(hub)
        torch.save(state, folder / STATE)
        names = {**reading, "config": hub, "dialect": dialect}
        with verbs.open(folder / STATE, **names) as loaded:
            label, family = loaded.reading.dialect.label, loaded.reading.family
        kit = _Kit(hub, state, label, folder, reading)
        targets = _targets([choice.label for choice in family.dialects], label)
        returned = kit.to_hub(names, load)
        return Rounds(name, label, (kit.through(), *returned, *(kit.through(target) for target in targets)))


class _Kit:
    """The checkpoints of one model that the rounds start from."""

    def __init__(
        self, hub: Path, state: Mapping[str, torch.Tensor], dialect: str, folder: Path, reading: Mapping[str, Any]
    ) -> None:
        self._hub, self._state, self._folder = hub, state, folder
        self._end = f"{SAFETENSORS.name}:{dialect}"
        self._reading = {**reading, "config": hub}

    def through(self, target: str = "") -> Round:
        """Convert the hub's folder to the framework's names, by way of another layout if one is named."""

        def end(folder: Path) -> str:
            source, reading = self._hub, self._reading
            if target:
                verbs.convert(source, folder / "between", to=target, sync=False, **reading)
                source = folder / "between"
                reading = {**reading, "dialect": target.partition(":")[2] or None}
            verbs.convert(source, folder / "own", to=self._end, sync=False, **reading)
            with verbs.open(folder / "own") as converted:
                return _compare(converted.state_dict(), self._state, _CONVERTED)

        return self._round(tuple(filter(None, (HUB, target, self._end))), end)

    def to_hub(self, names: Mapping[str, Any], load: LoadHub) -> Iterator[Round]:
        """Convert the framework's state dict to hub files, and let the loader load these."""
        files = self._folder / "back"

        def end(_folder: Path) -> str:
            verbs.convert(self._folder / STATE, files, to=HUB, sync=False, **names)
            with verbs.open(files) as converted, verbs.open(self._hub) as first:
                return _compare(converted.state_dict(), first.state_dict(), _WRITTEN_BACK)

        way = (self._end, HUB)
        yield self._round(way, end)
        if files.exists():
            yield self._round((*way, LOADER), lambda _: _compare(load(files), self._state, _LOADED_AGAIN))

    def _round(self, way: tuple[str, ...], end: Callable[[Path], str]) -> Round:
        try:
            with TemporaryDirectory(dir=self._folder) as folder:
                problem = end(Path(folder))
        except TransaxleError as error:
            # Without these rounds, no checkpoint of the hub reaches the framework, or leaves it.
            required = set(way) <= {HUB, self._end}
            return Round(way, "different" if required else "refused", " ".join(str(error).split()))
        return Round(way, "different" if problem else "equal", problem)


def _targets(dialects: Sequence[str], label: str) -> Iterator[str]:
    """Yield every other dialect in safetensors files, then every other format in the dialect that it is loaded in."""
    for dialect in dialects:
        if dialect != label and f"{SAFETENSORS.name}:{dialect}" != HUB:
            yield f"{SAFETENSORS.name}:{dialect}"
    for name in writable():
        if name != SAFETENSORS.name:
            yield name if get_format(name).dialects else f"{name}:{label}"


def _small_config(model: str | Config) -> Mapping[str, Any]:
    """Return the config of a small model: of a model type, or the given one."""
    if not isinstance(model, str) or Path(model).exists():
        config = model_config(model)
        assert config is not None  # only for None
        return config
    if Path(model).name != model or Path(model).suffix == ".json":
        hint = "Give the path of a small config.json, or of its folder; or a model type, such as qwen3_moe."
        raise refuse("IO", "no such file or folder", file=model, hint=hint)
    try:
        from transaxle.derivation.transformers_models import Peer, variants

        peer = Peer()
    except ImportError as error:
        hint = "Install transformers, or give the path of a small config.json."
        raise refuse("UNSUPPORTED", f"a model type needs transformers for its config: {error}", hint=hint) from None
    for small, _ in variants(peer, model, numbers=(0,)):
        return {**small.config.to_dict(), "architectures": [type(small).__name__]}
    hint = "Give the path of a small config.json."
    raise refuse("UNSUPPORTED", f"transformers builds no small {model} from its default config", hint=hint)


def _write_hub(folder: Path, config: Mapping[str, Any], reading: Mapping[str, Any]) -> None:
    """Write the hub folder of a model with random weights."""
    support = verbs.supports(config, HUB, **reading)
    if support.plan is None or not support:
        raise TransaxleError(support.refusals)
    random = np.random.default_rng(_SEED)
    names = [tensor.name for tensor in support.plan.tensors]
    tensors = {
        tensor.name: (random.integers(-127, 128, tensor.shape) / 64).astype(np.float32)
        for tensor in support.plan.tensors
    }
    folder.mkdir()
    files: dict[str, str] = {}
    for number in range(_FILES):
        file = f"model-{number + 1:05}-of-{_FILES:05}.safetensors"
        files |= dict.fromkeys(names[number::_FILES], file)
        save_file({name: tensors[name] for name in names[number::_FILES]}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(values.nbytes for values in tensors.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / CONFIG).write_text(json.dumps(dict(config)), "utf-8")


def _state(load_hub: LoadHub, skip: Sequence[str], folder: Path) -> dict[str, torch.Tensor]:
    """Return copies of the tensors that a loader makes of a folder, without those that are skipped.

    Raises:
        TypeError: if the loader returns anything but a mapping from names to whole tensors of real numbers.
        RuntimeError: if the loader ends the program, which would count as success.
    """
    try:
        returned: object = load_hub(folder)
    except SystemExit as error:
        raise RuntimeError(f"the loader ended the program, with the exit code {error.code}") from error
    if not isinstance(returned, Mapping):
        raise TypeError(f"the loader returned {type(returned).__name__}; it must return the state dict of its model")
    if not returned:
        raise TypeError("the loader returned a state dict without tensors")
    return {name: _copy(name, returned[name]) for name in select_names(returned, (), skip, "tensor")}


def _copy(name: object, value: object) -> torch.Tensor:
    """Return a copy of a loader's tensor in the memory of the CPU.

    Raises:
        TypeError: if the value is not a whole tensor of real numbers, or the name not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"the loader must name tensors by texts; {name!r} is {type(name).__name__}")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the loader must return tensors of torch only; {name!r} is {type(value).__name__}")
    if value.is_meta:
        raise TypeError(f"{name!r} is on the meta device: the loader has given it no values")
    if hasattr(value, "full_tensor"):
        raise TypeError(f"the loader must return whole tensors; {name!r} is divided: return its full_tensor()")
    if value.layout != torch.strided or value.is_complex():
        raise TypeError(
            f"the loader must return dense tensors of real numbers; {name!r} is {value.layout}, {value.dtype}"
        )
    return value.detach().cpu().contiguous().clone()


def _compare(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], words: _Words) -> str:
    """Return in what tensors differ from the expected ones; empty if every name, shape and value is equal."""
    problems = [words.absent.format(name=name) for name in expected if name not in tensors]
    problems += [words.additional.format(name=name) for name in tensors if name not in expected]
    problems += [_difference(name, tensors[name], value, words) for name, value in expected.items() if name in tensors]
    problems = list(filter(None, problems))
    count = len(problems) - _SHOWN
    return "; ".join([*problems[:_SHOWN], *([f"and {count} more"] if count > 0 else [])])


def _difference(name: str, actual: torch.Tensor, expected: torch.Tensor, words: _Words) -> str:
    if actual.shape != expected.shape:
        shapes = words.values.format(actual=list(actual.shape), expected=list(expected.shape))
        return f"{name} differs in its shape: {shapes}"
    unequal = actual.double() != expected.double()
    count = int(unequal.sum())
    if not count:
        return ""
    at = [int(index) for index in unequal.nonzero()[0]]
    values = words.values.format(actual=float(actual[*at]), expected=float(expected[*at]))
    return f"{name} differs in {count} of {unequal.numel()} elements, first at {at}: {values}"


def _import_loader(where: str) -> LoadHub:
    """Import a function that is named `module:function`."""
    try:
        loader: LoadHub = resolve_name(where)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "Name the function as MODULE:FUNCTION, importable from the working directory."
        raise refuse("UNSUPPORTED", f"the loader {where!r} cannot be imported: {error}", hint=hint) from None
    if not callable(loader):
        raise refuse("UNSUPPORTED", f"the loader {where!r} is no function")
    return loader


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds of the named models, print them, and return the exit code.

    Returns:
        0 if every round ends with equal tensors or is refused, 1 if one differs, or the code of a refusal.
    """
    parser = argparse.ArgumentParser("python -m transaxle.testkit", description=(run.__doc__ or "").partition("\n")[0])
    parser.add_argument("loader", metavar="MODULE:FUNCTION", help="loads a hub folder, and returns the state dict")
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a model type, or the path of a small config.json")
    parser.add_argument("--dialect", help="dialect of the names that the loader returns")
    parser.add_argument("--rules", help="a rules file with the table of the model")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="names that no checkpoint has")
    options = vars(parser.parse_args(arguments))
    sys.path.insert(0, "")
    code = 0
    try:
        loader = _import_loader(options.pop("loader"))
        for model in options.pop("models"):
            rounds = run(loader, model, **options)
            sys.stdout.write(f"{rounds}\n")
            sys.stdout.flush()
            code = code or int(not rounds)
    except TransaxleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return code


if __name__ == "__main__":
    raise SystemExit(main())
