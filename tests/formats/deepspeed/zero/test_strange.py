"""Strange folders made by torch itself: payloads where an object is expected, lies about shapes, missing files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.engine import killed
from tests.engine.execute.test_execute import ROOT, names_in
from transaxle.errors import TransaxleError
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.categories import Patterns
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.formats.deepspeed.spread import by_widths, fold_dims, write_affine
from transaxle.parallel.universal_metadata import collected

torch = pytest.importorskip("torch")

from tests.formats.deepspeed.made import NAME, NORM, RECORD, TAG, folder  # noqa: E402

MODELS, STATES = f"{TAG}/*{keys.MODEL_END}", f"{TAG}/*{keys.OPTIM_END}"
Change = Callable[[Any], Any]


class Payload:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this was run",)


def in_a_scaler(payload: object) -> object:
    """A payload in an object of a class that checkpoints really hold."""
    held = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler").LossScaler(1.0)
    held.held = payload
    return held


def in_a_fragment(payload: object) -> object:
    return pytest.importorskip("deepspeed.utils.tensor_fragment").fragment_address(payload, 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder(tmp_path / "source")


@pytest.fixture
def universal(source: Path, tmp_path: Path) -> Path:
    target = tmp_path / "universal"
    tx.convert(source, target, to=UNIVERSAL, sync=False)
    shutil.rmtree(source)
    return target


def edit(path: Path, pattern: str, change: Change) -> None:
    found = sorted(path.glob(pattern))
    assert found, pattern
    for file in found:
        torch.save(change(torch.load(file, weights_only=False)), file)


def refused(path: Path, code: str) -> TransaxleError:
    """Every command that looks into it refuses it, and nothing is written."""
    out = path.parent / "out"
    with pytest.raises(TransaxleError) as caught:
        tx.convert(path, out, to=UNIVERSAL)
    assert code in {refusal.code for refusal in caught.value.refusals}, caught.value
    assert caught.value.exit_code == 3
    assert names_in(path.parent) == [path.name]
    return caught.value


INSIDE: dict[str, tuple[str, Callable[[Any], Change]]] = {
    "loss scaler": (STATES, lambda held: lambda file: put(file, [keys.STATE, keys.LOSS_SCALER], held)),
    "zero stage": (STATES, lambda held: lambda file: put(file, [keys.STATE, keys.ZERO_STAGE], held)),
    "slice mappings": (STATES, lambda held: lambda file: put(file, [keys.STATE, keys.MAPPINGS], [{NAME: held}])),
    "settings": (STATES, lambda held: lambda file: put(file, [keys.STATE, keys.BASE_STATE, keys.GROUPS], [held])),
    "scheduler": (MODELS, lambda held: lambda file: put(file, [keys.SCHEDULER], {"last": held})),
    "metadata": (MODELS, lambda held: lambda file: put(file, [keys.INFO, keys.SUB_PARAMS], [held])),
    "client state": (MODELS, lambda held: lambda file: put(file, ["note"], held)),
    "shapes": (MODELS, lambda held: lambda file: put(file, [keys.PARAM_SHAPES], [{NAME: held}])),
}
HOLDERS: dict[str, Callable[[object], object]] = {
    "bare": lambda payload: payload,
    "in a loss scaler": in_a_scaler,
    "in a fragment": in_a_fragment,
}


def put(file: Any, path: Sequence[str], value: object) -> Any:
    at = file
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return file


@pytest.mark.peers
@pytest.mark.parametrize(
    ("where", "holder"),
    [*((where, "bare") for where in INSIDE), *(("loss scaler", holder) for holder in HOLDERS if holder != "bare")],
)
def test_no_payload_inside_of_an_expected_object_runs(
    source: Path, where: str, holder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern, change = INSIDE[where]
    edit(source, pattern, change(HOLDERS[holder](Payload())))
    assert "builtins.print" in str(refused(source, "UNSAFE_PICKLE"))
    assert "this was run" not in capsys.readouterr().out


def lying(info: dict[str, Any]) -> Change:
    return lambda file: file | {keys.INFO: info}


@pytest.mark.parametrize("pattern", [r"(a+)+\1$", "(?P<x>a+)+$", "a{1000000}"])
def test_patterns_that_would_never_end_are_not_tried(source: Path, pattern: str) -> None:
    edit(source, MODELS, lying({keys.ROW_PATTERNS: [pattern], keys.UNSUPPORTED_PATTERNS: {}}))
    refused(source, "UNSUPPORTED")


@pytest.mark.oracle
def test_many_patterns_that_match_slowly_are_given_up() -> None:
    with pytest.raises(TransaxleError, match="too many expressions"):
        Patterns(f"{'a*' * 500}{number}" for number in range(1000))
    patterns = Patterns(["(" + "|".join(f".{{{n}}}x" for n in range(80)) + ")*y"])
    with pytest.raises(TransaxleError, match="takes too long"):
        [patterns.match(f"{number * 7919:020b}".replace("1", "x") * 40) for number in range(100_000)]


def test_a_view_of_billions_of_rows_is_not_walked() -> None:
    begin = time.perf_counter()
    rows = 1 << 30
    spread = by_widths((rows, rows, 4), 2, [[2, 2]])
    with pytest.raises(TransaxleError, match="by the metadata the shards have"):
        fold_dims(spread, [(8, 4), (8, 4)])
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        (keys.INFO_VERSION, 0.9, "UNSUPPORTED"),
        (keys.SHARD_WIDTHS, {}, "CORRUPT"),
        (keys.SUB_PARAMS, [{keys.PATTERNS: ["^a$"], keys.SHAPE: [[]], keys.PARTITION_DIM: 0}], "CORRUPT"),
        (keys.UNSUPPORTED_PATTERNS, ["^a$"], "CORRUPT"),
        (keys.AFFINE, {keys.AFFINE_VERSION: 2, keys.AFFINE_PARAMS: {}}, "UNSUPPORTED"),
        (keys.AFFINE, {keys.AFFINE_VERSION: 1, keys.AFFINE_PARAMS: []}, "CORRUPT"),
    ],
)
def test_malformed_metadata_is_refused(source: Path, name: str, value: object, code: str) -> None:
    info = collected({NAME: RECORD, NORM: (4,)}, 2)
    edit(source, MODELS, lying(info | {name: value}))
    refused(source, code)


def test_metadata_about_other_shapes_is_refused(source: Path) -> None:
    info = collected({NAME: RECORD, NORM: (4,)}, 2)
    params = info[keys.AFFINE][keys.AFFINE_PARAMS]
    first = next(iter(params))
    params[first] = write_affine(by_widths((1 << 40, 4), 0, [[1 << 39, 1 << 39]]))
    edit(source, MODELS, lying(info))
    error = refused(source, "SHAPE_MISMATCH")
    assert error.where.tensor == NAME


def test_model_files_of_two_saves_are_refused(source: Path) -> None:
    edit(source, f"{TAG}/mp_rank_01{keys.MODEL_END}", lambda file: file | {keys.GLOBAL_STEPS: 9})
    assert "saved after 9 steps, but" in str(refused(source, "CORRUPT"))


def test_a_rank_that_speaks_of_other_shapes_is_refused(source: Path) -> None:
    shapes = [{NAME: (9, 4), NORM: (4,)}]
    edit(source, f"{TAG}/mp_rank_01{keys.MODEL_END}", lambda file: put(file, [keys.PARAM_SHAPES], shapes))
    assert "mp_rank_01" in str(refused(source, "CORRUPT"))


def test_a_missing_parameter_of_a_universal_checkpoint_is_named(universal: Path) -> None:
    shutil.rmtree(next(universal.glob(f"*/{keys.ZERO_FOLDER}/{NORM}")))
    error = refused(universal, "INCOMPLETE")
    assert error.where.tensor == NORM


@pytest.mark.parametrize("shape", [(16, 5), (1 << 40, 1 << 20), "wide"])
def test_a_universal_checkpoint_whose_model_files_lie_is_refused(universal: Path, shape: object) -> None:
    edit(universal, f"*/*{keys.MODEL_END}", lambda file: put(file, [keys.PARAM_SHAPES], [{NAME: shape, NORM: (4,)}]))
    refused(universal, "CORRUPT" if shape == "wide" else "INCOMPLETE")


@pytest.mark.parametrize(
    ("said", "code"), [("../outside", "PATH_ESCAPE"), ("", "CORRUPT"), ("global_step7", "INCOMPLETE")]
)
def test_latest_never_leads_elsewhere(universal: Path, said: str, code: str) -> None:
    """What it names is no folder of the checkpoint, and no other one is taken for it."""
    (universal.parent / "outside").mkdir()
    (universal / keys.LATEST_UNIVERSAL).write_text(said, "utf-8")
    (universal / "transaxle.json").unlink()
    with pytest.raises(TransaxleError, match=keys.LATEST_UNIVERSAL) as caught:
        tx.open(universal)
    assert caught.value.code == code


@pytest.mark.oracle
def test_killed_at_any_point_it_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """Another run then finishes the work to the same bytes, with `resume` and without, and nothing is left over."""
    source, old = folder(tmp_path / "source"), tmp_path / "old"
    killed.convert(folder(tmp_path / "before", 500.0), old, UNIVERSAL)
    killed.convert(source, tmp_path / "reference", UNIVERSAL)
    (tmp_path / "work").mkdir()
    folders = [str(tmp_path / name) for name in ("source", "work", "reference", "old")]
    command = [sys.executable, "-m", "tests.engine.killed", *folders, UNIVERSAL, "7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 14, "points where a child died"
