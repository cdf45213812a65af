"""Fuzzing the readers of DeepSpeed's folders with atheris: `python fuzz/deepspeed.py CORPUS [-runs=200000]`.

An input is a folder: one byte that chooses which files there are, then for each of them the length of its pickle in two
bytes, and the pickle. The storages that a pickle asks for are zeros. So what is tried here is what the readers make of
values, not of archives (`torch_file.py`). `python fuzz/deepspeed.py --seeds CORPUS` writes a folder of every kind to
begin with. Whatever an input says, it becomes a catalog whose every chunk lies in a file and adds up, or it is refused;
any other exception is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

from folder import HeldFolder
from target import run

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import NUMBERS, Container, Entry, nbytes
from transaxle.formats.deepspeed import keys, rank_files
from transaxle.formats.deepspeed import universal_reader as universal
from transaxle.formats.deepspeed.reader import HERE, open_deepspeed
from transaxle.formats.deepspeed.universal_record import Record
from transaxle.formats.pickled.descriptors import Global, Object, OrderedMap
from transaxle.formats.pickled.interpreter import Bounds, read_pickle
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.draft import reference
from transaxle.formats.torch_file.saved import Saved, Storages
from transaxle.parallel.universal_metadata import collected

_LENGTH = 2
_ROOM = bytes(1 << 16)
"""Storages of every file."""
_BOUNDS = Bounds(memory=20_000_000)
_PLAIN = ("mp_rank_00", "mp_rank_01")
_PARTS = ("zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_00", "zero_pp_rank_0_mp_rank_01")
_ONE, _TWO, _THIRD = _PARTS
_MODELS = tuple(f"{rank}{keys.MODEL_END}" for rank in _PLAIN)
_PARAMETER = f"{keys.ZERO_FOLDER}/a"
FOLDERS: tuple[tuple[str, ...], ...] = (
    (*_MODELS, f"{_ONE}{keys.OPTIM_END}", f"{_THIRD}{keys.OPTIM_END}"),
    (_MODELS[0], f"{_ONE}{keys.OPTIM_END}", f"{_TWO}{keys.OPTIM_END}"),
    tuple(f"{rank}{end}" for end in (keys.MODEL_END, keys.OPTIM_END) for rank in (_ONE, _TWO)),
    (*_MODELS, f"{_ONE}{keys.OPTIM_END}", f"{_THIRD}{keys.OPTIM_END}", "layer_00-model_states.pt"),
    (_MODELS[0], f"{keys.ZERO_FOLDER}/{keys.OPTIMIZER_FILE}", f"{_PARAMETER}/fp32.pt", f"{_PARAMETER}/step.pt"),
    (*_MODELS, f"{keys.ZERO_FOLDER}/{keys.OPTIMIZER_FILE}", f"{_PARAMETER}/fp32.pt", f"{_PARAMETER}/exp_avg.pt"),
)
"""Kinds of folders, by their file names: tensor-parallel, data-parallel, ZeRO-3, pipelines, two universal ones."""
_UNIVERSAL = (4, 5)
READ = "read_saved"


def one(data: bytes) -> None:
    """Read one input."""
    open_folder(data)


def open_folder(data: bytes) -> bool:
    """Read one input; return whether it was a valid checkpoint."""
    kind = data[0] % len(FOLDERS) if data else 0
    folder = dict(zip(FOLDERS[kind], _split(data[1:], len(FOLDERS[kind])), strict=True))
    read_one = {name: partial(_save, pickle) for name, pickle in folder.items()}

    def read_saved(_storage: Storage, file: str) -> Saved:
        return read_one[file](file)

    storage = HeldFolder(dict.fromkeys(folder, _ROOM))
    with patch.object(rank_files, READ, read_saved), patch.object(universal, READ, read_saved):
        try:
            container = _open(kind)(storage, storage.path, HERE)
        except TransaxleError:
            return False
    _check(container, storage)
    return True


def _open(kind: int) -> Callable[..., Container]:
    return universal.open_universal if kind in _UNIVERSAL else open_deepspeed


def _split(data: bytes, count: int) -> Iterator[bytes]:
    for _ in range(count):
        length = int.from_bytes(data[:_LENGTH], "little")
        yield data[_LENGTH : _LENGTH + length]
        data = data[_LENGTH + length :]


def _save(pickle: bytes, file: str) -> Saved:
    """Return the bytes of a torch file with this pickle."""
    storages = Storages(legacy=False)
    pickled = read_pickle(pickle, file=file, bounds=_BOUNDS, persistent=storages.refer)
    at = 0
    for stored in storages.by_key.values():
        stored.offset, at = at, at + stored.nbytes
    if at > len(_ROOM):
        raise refuse("CORRUPT", "the file is truncated", file=file)
    return Saved(pickled.value, storages.by_key, ())


def _check(container: Container, storage: HeldFolder) -> None:
    copies = [entry for twin in container.twins for entry in (twin.first, twin.second)]
    for entry in (*container.entries.values(), *copies):
        _check_entry(entry, storage)


def _check_entry(entry: Entry, storage: HeldFolder) -> None:
    assert sum(prod(extent.shape) for extent in entry.extents) == prod(entry.shape), "the chunks do not add up"
    for extent in entry.extents:
        ends = (start + size for start, size in zip(extent.start, extent.shape, strict=True))
        assert all(end <= size for end, size in zip(ends, entry.shape, strict=True)), entry
        if extent.file == NUMBERS:
            continue
        last = sum((size - 1) * step for size, step in zip(extent.shape, extent.strides or (), strict=False))
        reach = nbytes(entry.dtype, extent.shape if extent.strides is None else (last + 1,))
        assert 0 <= extent.offset <= storage.size(extent.file) - reach, entry


class _File:
    """Builds the content of one file, with a storage per tensor."""

    def __init__(self) -> None:
        self._count = 0

    def tensor(self, *shape: int, code: str = "F32") -> object:
        """Return a tensor in a storage of its own."""
        self._count += 1
        return reference(code, shape, self._count - 1)

    def model(self, shapes: dict[str, tuple[int, ...]], **further: Any) -> dict[str, Any]:
        """Return the content of a model file."""
        size = Global("torch", "Size")
        return {
            keys.MODULE: OrderedMap({name: self.tensor(*shape, code="BF16") for name, shape in shapes.items()}),
            keys.BUFFER_NAMES: [],
            keys.PARAM_SHAPES: [OrderedMap({name: Object(size, (shape,)) for name, shape in shapes.items()})],
            keys.FROZEN_SHAPES: None,
            keys.SHARED: {},
            keys.GLOBAL_STEPS: 3,
            keys.DP_WORLD: 1,
            **further,
        }

    def state(self, length: int, stage: int, padding: int = 0, parts: int = 1) -> dict[str, Any]:
        """Return the content of an optimizer file."""
        states = {keys.STEP: self.tensor(), "exp_avg": self.tensor(length), "exp_avg_sq": self.tensor(length)}
        moments = {keys.STATES: {0: states}, keys.GROUPS: [{"lr": 0.1, keys.PARAMS: [0]}]}
        buffer = self.tensor(length - padding)
        if stage == 3:
            return {keys.STATE: {keys.ZERO_STAGE: 3, keys.MASTER_ZERO3: [buffer], keys.STATE: moments}}
        fragment = Global("deepspeed.utils.tensor_fragment", "fragment_address")
        mapping = {"a": Object(fragment, new=True, state={"numel": length - padding, "start": 0})}
        paddings = {keys.GROUP_PADDINGS: [padding], keys.PARAM_PADDINGS: [[0]], keys.PARTITION_COUNT: [parts]}
        base = {keys.BASE_STATE: moments, keys.MASTER: [buffer], **paddings, keys.MAPPINGS: [OrderedMap(mapping)]}
        return {keys.STATE: {keys.ZERO_STAGE: stage, **base, keys.LOSS_SCALER: None}}


def _seeds() -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield (kind, files) of valid folders."""
    record = Record.cut("column", (8, 2), 0, [[2, 2], [2, 2]], view=((4, 4), -1))
    info = {keys.INFO: collected({"a": record, "b": (2,)}, 2)}
    lists = {keys.INFO: {key: value for key, value in info[keys.INFO].items() if key != keys.AFFINE}}
    degrees = {keys.DIMENSIONS: {keys.PP_DEGREE: 1, keys.TP_DEGREE: 2}, keys.MP_WORLD: 2}
    for options in (info, lists):
        models = [_File().model({"a": (4, 2)}, **options, **degrees) for _ in range(2)]
        yield 0, [*models, *(_File().state(8, 1) for _ in range(2))]
    yield 1, [_File().model({"a": (3, 5)}, **{keys.DP_WORLD: 2}), _File().state(8, 1, 0, 2), _File().state(8, 1, 1, 2)]
    sharded = [_File().model({"a": (3, 5)}, **{keys.DP_WORLD: 2}) for _ in range(2)]
    yield 2, [*sharded, *(_File().state(8, 3) for _ in range(2))]
    stages = {keys.DIMENSIONS: {keys.PP_DEGREE: 2, keys.TP_DEGREE: 1}}
    pipes = [_File().model({name: (4, 2)}, **stages) | {keys.MODULE: None} for name in ("0.a", "1.a")]
    flat = [_File().state(8, 1) for _ in range(2)]
    for state in flat:
        del state[keys.STATE][keys.MAPPINGS]
    yield 3, [*pipes, *flat, OrderedMap({"a": _File().tensor(4, 2, code="BF16")})]
    settings = {keys.GROUPS: [{"lr": 0.1, keys.PARAMS: [0]}]}
    shape = Object(
        Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), new=True,
        state={keys.PATTERNS: ["a"], keys.SHAPE: ((2, 1), -1), keys.PARTITION_DIM: 0},
    )  # fmt: skip
    model, file = _File().model({"a": (3, 5)}), {keys.PARAM: _File().tensor(3, 5), keys.SUB_SHAPE: shape}
    yield 4, [model, settings, {**file, keys.VOCABULARY: True, keys.CAT_DIM: 0}, _File().tensor()]
    models = [_File().model({"a": (4, 2)}, **info, **degrees) for _ in range(2)]
    whole = [{keys.PARAM: _File().tensor(8, 2)} for _ in range(2)]
    states = {keys.STATE: {keys.STATES: {0: {keys.STEP: 3.0}}}}
    yield 5, [*models, {**settings, **states}, *whole]


def seeds(folder: Path) -> None:
    """Write seed inputs that are valid."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (kind, values) in enumerate(_seeds()):
        data = bytes([kind])
        for value in values:
            pickle = write_pickle(value)
            data += len(pickle).to_bytes(_LENGTH, "little") + pickle
        assert open_folder(data), "a seed must be read"
        folder.joinpath(f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    run(one, seeds)
