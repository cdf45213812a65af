"""Opened checkpoints: a mapping, lazy, in any dialect, that reads what is asked for and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal, law
from tests.engine.counting import counted
from tests.formats import files
from transaxle.formats.catalog import BITS

EXPERTS = "model.layers.1.mlp.experts.gate_and_up_projs"
"""A stack that dialect automodel makes of every expert's gate and up, transposed."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.tiny(tmp_path_factory.mktemp("engine") / "tiny", shards=3)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of many ranks and item sizes, empty and 0-d ones among them."""
    random = np.random.default_rng(1)
    kinds = [np.dtype(kind) for kind in ("u1", "i2", "f4", "f8", ml_dtypes.bfloat16)]
    sizes: list[tuple[int, ...]] = [
        (), (1,), (0,), (7,), (5, 3), (4, 0, 2), (3, 4, 5), (2, 3, 1, 4), (1, 1, 1), (40, 300),
    ]  # fmt: skip
    held = {f"t{i}": random.integers(0, 200, size).astype(kinds[i % len(kinds)]) for i, size in enumerate(sizes)}
    return checkpoints.write(tmp_path_factory.mktemp("engine") / "shapes", held)


def test_tab_shows_what_users_need(tiny: Path) -> None:
    """And nothing of it is missing: what is hidden is still there."""
    with tx.open(tiny) as checkpoint:
        shown = {name for name in dir(checkpoint) if not name.startswith("_")}
        assert {"as_dialect", "dialect", "decode", "items", "path", "select", "state_dict", "stream"} <= shown
        assert not {"bound", "catalog", "container", "settings", "targets", "translation", "view"} & shown
        assert all(hasattr(checkpoint, name) for name in ("catalog", "container", "view"))


def test_it_is_a_mapping(tiny: Path) -> None:
    wanted = checkpoints.tensors()
    with tx.open(tiny) as checkpoint:
        assert len(checkpoint) == len(wanted) == checkpoints.TENSORS
        assert set(checkpoint) == wanted.keys() == checkpoint.keys()
        assert checkpoints.GATE in checkpoint
        assert "model.layers" not in checkpoint
        assert checkpoint.get("no such tensor") is None
        with pytest.raises(KeyError, match="no such tensor"):
            _ = checkpoint["no such tensor"]
        for name, tensor in checkpoint.items():
            assert (tensor.name, tensor.dtype, tensor.shape) == (name, "BF16", wanted[name].shape)
            assert tensor.nbytes == wanted[name].nbytes
            assert tensor.parameters == wanted[name].size
            assert tensor.read().tobytes() == tensor.tobytes() == wanted[name].tobytes()
            assert tensor.read().dtype == ml_dtypes.bfloat16
        assert (checkpoint.format, checkpoint.family, checkpoint.dialect) == ("safetensors", "qwen3_moe", "hf")
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.path == str(tiny)
        assert repr(checkpoint[checkpoints.GATE]) == f"<{checkpoints.GATE} BF16 [12, 16]>"
        assert "57 tensors" in repr(checkpoint) or str(len(wanted)) in repr(checkpoint)


@pytest.mark.parametrize("code", list(BITS))
def test_every_type_comes_as_it_is_stored(code: str, tmp_path: Path) -> None:
    shape = (3, 5, 8)
    size = prod(shape) * BITS[code] // 8
    data = np.random.default_rng(2).integers(0, 2 if code == "BOOL" else 256, size, np.uint8).tobytes()
    (tmp_path / files.FILE).write_bytes(files.made({"x": files.info(code, list(shape), 0, size)}, data))
    with tx.open(tmp_path) as checkpoint:
        tensor = checkpoint["x"]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (code, shape, size)
        assert tensor.tobytes() == data
        whole = tensor.read()
        assert whole.tobytes() == data
        assert whole.shape == (shape if BITS[code] >= 8 else (3, 5, BITS[code]))
        box = tensor.read((slice(1, 3), slice(0, 2), slice(4, 8)))
        columns = slice(4, 8) if BITS[code] >= 8 else slice(4 * BITS[code] // 8, None)
        assert box.tobytes() == np.ascontiguousarray(whole[1:3, 0:2, columns]).tobytes()
        assert box.dtype == whole.dtype


@pytest.mark.parametrize(("code", "shape", "box"), [("F4", [2, 8], slice(1, 3)), ("F6_E2M3", [2, 8], slice(0, 2))])
def test_a_byte_of_packed_elements_is_not_taken_apart(code: str, shape: list[int], box: slice, tmp_path: Path) -> None:
    size = prod(shape) * BITS[code] // 8
    (tmp_path / files.FILE).write_bytes(files.made({"x": files.info(code, shape, 0, size)}, bytes(size)))
    with tx.open(tmp_path) as checkpoint, pytest.raises(tx.TransaxleError) as caught:
        checkpoint["x"].read((slice(None), box))
    assert caught.value.code in {"UNSUPPORTED", "SHAPE_MISMATCH"}


@pytest.mark.parametrize("box", [slice(1, 3), slice(-2, None), slice(3, 1)], ids=str)
def test_one_slice_is_a_box_of_the_first_dim(box: slice, tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    checkpoints.write(tmp_path / "ck", {"x": values, "number": np.full((), 3, np.float32)})
    with tx.open(tmp_path / "ck") as checkpoint:
        assert np.array_equal(checkpoint["x"].read(box), values[box])
        with demand_refusal("SHAPE_MISMATCH"):
            checkpoint["number"].read(box)


def a_box(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices as people write them: open, negative, beyond the end, empty."""
    bound = st.none() | st.integers(-6, 45)
    return tuple(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1]))) for _ in shape)


@given(st.data())
@law
def test_boxes_are_what_numpy_slices(shapes: Path, data: st.DataObject) -> None:
    wanted = checkpoints.read(shapes)
    with tx.open(shapes) as checkpoint:
        name = data.draw(st.sampled_from(sorted(wanted)))
        box = data.draw(st.composite(a_box)(wanted[name].shape))
        got = checkpoint[name].read(box)
    assert got.dtype == wanted[name].dtype
    assert got.shape == wanted[name][box].shape
    assert got.tobytes() == wanted[name][box].tobytes()


@pytest.mark.oracle
@pytest.mark.parametrize("dialect", ["automodel", "megatron", "te"])
@given(data=st.data())
@law
def test_boxes_of_another_dialect_are_boxes_of_its_tensors(tiny: Path, dialect: str, data: st.DataObject) -> None:
    with tx.open(tiny) as checkpoint:
        view = checkpoint.as_dialect(dialect)
        name = data.draw(st.sampled_from(sorted(view)))
        box = data.draw(st.composite(a_box)(view[name].shape))
        whole = view[name].read()
        got = view[name].read(box)
    assert got.shape == whole[box].shape
    assert got.tobytes() == whole[box].tobytes()


@pytest.mark.parametrize(
    "box", [(slice(None),), (slice(None),) * 3, (slice(0, 4, 2), slice(None)), (0, slice(None)), 5, "0:2"]
)
def test_what_is_no_box_is_refused(tiny: Path, box: Any) -> None:
    with tx.open(tiny) as checkpoint, demand_refusal("SHAPE_MISMATCH"):
        checkpoint[checkpoints.GATE].read(box)


def test_padding_reads_as_zeros(tiny: Path) -> None:
    name = "embedding.word_embeddings.weight"
    with tx.open(tiny, axes={"p": 24}) as checkpoint:
        view = checkpoint.as_dialect("megatron")
        assert view[name].shape == (64, 16)
        np.ones(1 << 20).copy()  # fresh memory is often zero by luck
        whole = view[name].read()
        assert whole[:40].tobytes() == checkpoint["model.embed_tokens.weight"].tobytes()
        assert not whole[40:].astype(np.float32).any()
        assert not view[name].read((slice(39, 64), slice(3, 5))).astype(np.float32)[1:].any()


def test_opening_and_looking_reads_no_tensor(tiny: Path) -> None:
    with tx.open(tiny) as checkpoint:
        mine, storage = counted(checkpoint)
        view = mine.as_dialect("automodel")
        assert {view[name].shape for name in view}
        config = (tiny / "config.json").stat().st_size
        assert storage.bytes <= config


@pytest.mark.parametrize(
    ("box", "most"),
    [((slice(3, 11), slice(None)), 1.0), ((slice(7, 8), slice(5, 6)), 1.0), ((slice(None), slice(10, 70)), 1.25)],
)
def test_only_the_bytes_of_the_box_are_read(shapes: Path, box: tuple[slice, ...], most: float) -> None:
    with tx.open(shapes) as checkpoint:
        mine, storage = counted(checkpoint)
        got = mine["t9"].read(box)
    assert got.nbytes <= storage.bytes <= most * got.nbytes


def test_one_expert_of_a_stack_is_read_alone(tiny: Path) -> None:
    with tx.open(tiny) as checkpoint:
        mine, storage = counted(checkpoint)
        view = mine.as_dialect("automodel")
        storage.bytes = 0
        got = view[EXPERTS].read((slice(3, 4), slice(None), slice(None)))
        assert storage.bytes == got.nbytes
        stem = EXPERTS.replace("gate_and_up_projs", "3")
        gate, up = (mine[f"{stem}.{half}_proj.weight"].read() for half in ("gate", "up"))
    assert got.tobytes() == np.concatenate([gate, up]).T[None].tobytes()


def test_what_we_wrote_tells_what_it_is(tiny: Path, tmp_path: Path) -> None:
    """The manifest gives family, dialect and axes without a config; not once a file was changed."""
    out = tmp_path / "out"
    tx.convert(tiny, out, to="megatron", axes={"p": 24})
    with tx.open(out) as checkpoint:
        assert checkpoint.manifest is not None
        assert checkpoint.sizes.at({})["p"] == 24
        assert checkpoint.as_dialect("hf")["model.embed_tokens.weight"].shape == (40, 16)
    with tx.open(out, config=checkpoints.CONFIG) as checkpoint:
        assert "p" not in checkpoint.sizes.at({}), "what the user says now comes before what was true then"
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "changed": 1}))
    with tx.open(out) as checkpoint:
        assert checkpoint.manifest is None
        assert checkpoint.dialect == "megatron"


def test_what_shapes_told_once_is_remembered(tmp_path: Path) -> None:
    """Only the Hugging Face shapes tell how many groups there are; the manifest tells it to whoever comes back."""
    source = checkpoints.tiny(tmp_path / "source", config=None)
    tx.convert(source, tmp_path / "out", to="megatron", axes={"p": 24})
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf")
    assert checkpoints.same(source, tmp_path / "back")
    with tx.open(tmp_path / "out") as checkpoint:
        assert checkpoint.sizes.overrides.items() >= {"g": 2, "r": 2, "c": 8, "n": 40, "p": 24}.items()
    with tx.open(tmp_path / "back") as checkpoint:
        assert "p" not in checkpoint.sizes.overrides, "it is not padded, and was not meant to be"
    (tmp_path / "out" / "transaxle.json").unlink()
    with pytest.raises(tx.TransaxleError, match="UNKNOWN_AXIS"):
        tx.convert(tmp_path / "out", tmp_path / "again", to="hf")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' * 100_000])
def test_a_config_that_is_none_is_refused(tiny: Path, tmp_path: Path, text: str) -> None:
    folder = checkpoints.write(tmp_path / "out", {"x": np.zeros(3, np.float32)})
    (folder / "config.json").write_text(text)
    with tx.open(folder) as checkpoint, demand_refusal("CORRUPT"):
        _ = checkpoint.family


def test_values_that_would_be_rounded_are_not_shown(tmp_path: Path) -> None:
    """A view runs no arithmetic: it refuses, and names every tensor."""
    rules = tmp_path / "my.rules"
    rules.write_text(
        "family shifted\n  axes d\n  norm : d\n  w : d\n"
        "dialect hf\n  norm = norm[d]\n  w = w[d]\n"
        "dialect minus like hf\n  norm.minus = norm[d] lossy: norm - 1\n"
        "dialect less like hf\n  norm.less = norm[d] lossy: norm - 1\n"
    )
    held = {"norm": np.arange(4, dtype=np.float32), "w": np.ones(4, np.float32)}
    folder = checkpoints.write(tmp_path / "source", held)
    with tx.open(folder, rules=rules, family="shifted") as checkpoint:
        with demand_refusal("LOSSY") as caught:
            checkpoint.as_dialect("minus")
        assert caught.value.where.tensor == "norm.minus"
    out = tmp_path / "out"
    report = tx.convert(folder, out, to="minus", rules=rules, family="shifted", allow_lossy=True)
    assert report.tensors == 2
    np.testing.assert_array_equal(checkpoints.read(out)["norm.minus"], held["norm"] - 1)
    with tx.open(out, rules=rules, family="shifted") as checkpoint:
        same = checkpoint.as_dialect("less")  # shifted alike on both sides: nothing is rounded
        assert same["norm.less"].tobytes() == checkpoint["norm.minus"].tobytes()


def test_nothing_here_imports_torch(tiny: Path, tmp_path: Path) -> None:
    script = """
        import sys
        import transaxle as tx
        source, target = sys.argv[1:]
        checkpoint = tx.open(source)
        name = next(iter(checkpoint))
        checkpoint[name].read()
        checkpoint.as_dialect("megatron")
        tx.plan(source, target, to="torchtitan")
        tx.convert(source, target, to="torchtitan")
        assert tx.verify(target).ok
        assert tx.diff(source, target).equal
        assert not {"torch", "transformers"} & sys.modules.keys()
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(tiny), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
