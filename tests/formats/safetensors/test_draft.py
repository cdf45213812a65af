"""Drafts: the files are those that Hugging Face's own writers make of the same tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.drafts import build
from tests.formats.files import FILE, INDEX, library
from tests.formats.refusals import refuses
from tests.formats.safetensors.test_reader import every_dtype, octets
from transaxle.errors import Code
from transaxle.formats.catalog import BITS, Draft, Spec, nbytes
from transaxle.formats.detect import open_container
from transaxle.formats.safetensors import METADATA, draft
from transaxle.formats.torch_file.draft import draft as torch_draft

Sink = Callable[..., Draft]
STATE = "optimizer"


def specs_of(tensors: Mapping[str, torch.Tensor], folder: Path) -> list[Spec]:
    safetensors.torch.save_file(dict(tensors), folder / FILE, {"format": "pt"})
    entries = open_container(str(folder)).entries
    return [Spec(name, entries[name].dtype, entries[name].shape) for name in tensors]


def test_the_same_bytes_as_the_library(tmp_path: Path) -> None:
    tensors = every_dtype()
    specs = specs_of(tensors, tmp_path)
    theirs = tmp_path.joinpath(FILE).read_bytes()
    plan = draft(specs, metadata={"format": "pt"})
    build(plan, tmp_path, {name: octets(tensor) for name, tensor in tensors.items()})
    assert tmp_path.joinpath(FILE).read_bytes() == theirs
    read = safetensors.torch.load_file(tmp_path / FILE)
    assert {name: octets(tensor) for name, tensor in read.items()} == {n: octets(t) for n, t in tensors.items()}


any_specs = st.lists(
    st.builds(Spec, st.text(max_size=4), st.sampled_from(sorted(BITS)), st.tuples(st.integers(0, 5), st.just(8))),
    max_size=12,
    unique_by=lambda spec: spec.name,
).filter(lambda specs: all(spec.name != METADATA for spec in specs))


@given(any_specs, st.none() | st.integers(0, 200))
def test_every_draft_is_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, specs: list[Spec], shard_size: int | None
) -> None:
    folder = tmp_path_factory.mktemp("draft")
    plan = draft(specs, metadata={"note": "é"}, shard_size=shard_size)
    data = {spec.name: bytes([at]) * nbytes(spec.dtype, spec.shape) for at, spec in enumerate(specs)}
    build(plan, folder, data)
    container = open_container(str(folder), "safetensors")
    assert dict(container.entries) == dict(plan.entries)
    assert container.files == plan.files
    assert container.metadata == {"note": "é"}
    for file in plan.files:
        if file != INDEX:
            with safetensors.safe_open(folder / file, "np") as theirs:
                assert set(theirs.keys()) == {n for n, e in plan.entries.items() if e.extents[0].file == file}
    for entry in plan.entries.values():
        assert entry.extents[0].offset % max(BITS[entry.dtype] // 8, 1) == 0
    if shard_size is not None:
        sizes: dict[str, list[int]] = {}
        for entry in plan.entries.values():
            sizes.setdefault(entry.extents[0].file, []).append(entry.nbytes)
        assert all(sum(inside) <= shard_size or len(inside) == 1 for inside in sizes.values())
    container.storage.close()


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_shards_are_those_of_huggingface_hub(sizes: list[int], shard_size: int) -> None:
    specs = [Spec(f"t{at}", "U8", (size,)) for at, size in enumerate(sizes)]
    theirs = split_state_dict_into_shards_factory(
        {spec.name: spec for spec in specs},
        get_storage_size=lambda spec: spec.shape[0],
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_size,
    )
    plan = draft(specs, shard_size=shard_size)
    ours = {name: entry.extents[0].file for name, entry in plan.entries.items()}
    assert ours == theirs.tensor_to_filename
    assert (INDEX in plan.files) == theirs.is_sharded
    if theirs.is_sharded:
        (index,) = (fragment for fragment in plan.fragments if fragment.file == INDEX)
        written = {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}
        assert index.data.decode() == json.dumps(written, indent=2, sort_keys=True) + "\n"


NAMES = ("a", "optim/a/step", "b", "optim/b/step", "optim/b/exp_avg")


@pytest.mark.parametrize(("kind", "stem"), [(draft, FILE), (torch_draft, "pytorch_model.bin")])
@pytest.mark.parametrize(("size", "counts"), [(99, (1, 1)), (2, (2, 3))])
def test_state_has_files_of_its_own(tmp_path: Path, kind: Sink, stem: str, size: int, counts: tuple[int, int]) -> None:
    """Whatever loads the model by the files beside its config meets the model's tensors only."""
    groups = [{"lr": 0.5, "params": ["a", "b"]}]
    plan = kind([Spec(name, "U8", (2,)) for name in NAMES], shard_size=size, groups=groups)
    build(plan, tmp_path, {name: f"{at} ".encode() for at, name in enumerate(NAMES)})
    model, state = ("a", "b"), (NAMES[1], *NAMES[3:])
    for names, folder, own, count in ((model, tmp_path, stem, counts[0]), (state, tmp_path / STATE, STATE, counts[1])):
        ending = stem.rpartition(".")[2]
        files = [path for path in folder.iterdir() if path.suffix == f".{ending}"]
        assert len(files) == count
        whole = own if own == stem else f"{own}.{ending}"
        if count > 1:
            index = json.loads(folder.joinpath(f"{whole}.index.json").read_text())["weight_map"]
            assert index.keys() == set(names)
            assert {folder / file for file in index.values()} == set(files)
        else:
            assert files == [folder / whole]
        if kind is draft:
            assert {name for file in files for name in library(file.read_bytes())} == set(names)
    container = open_container(str(tmp_path))
    assert container.entries == plan.entries
    assert container.files == plan.files
    assert container.metadata == {"param_groups": groups}
    assert container.ignored == ()
    if counts[0] == 1:
        assert open_container(str(tmp_path / stem)).entries.keys() == set(model)
    if kind is draft:
        assert open_container(str(tmp_path / STATE)).entries.keys() == set(state)


def test_all_in_one_file_where_one_is_asked_for(tmp_path: Path) -> None:
    plan = draft([Spec(name, "U8", (2,)) for name in NAMES])
    assert list(plan.files) == [FILE]
    alone = draft([Spec(name, "U8", (2,)) for name in NAMES if "/" in name], shard_size=99)
    assert list(alone.files) == [FILE]


def test_nothing_to_write() -> None:
    plan = draft([])
    assert (dict(plan.entries), list(plan.files)) == ({}, [FILE])
    assert library(plan.fragments[0].data) == {}


REFUSED: dict[str, tuple[Spec, Code, str]] = {
    "no such dtype": (Spec("b", "COMPLEX32", (1,)), "UNSUPPORTED", "b"),
    "half a byte": (Spec("b", "F4", (3,)), "SHAPE_MISMATCH", "b"),
    "the same name": (Spec("a", "F32", (1,)), "NAME_COLLISION", "a"),
    "the name of the metadata": (Spec(METADATA, "F32", (1,)), "NAME_COLLISION", METADATA),
    "no text": (Spec("b\ud800", "F32", (1,)), "UNSUPPORTED", "b\\ud800"),
    "too many dims": (Spec("b", "F32", (1,) * 65), "UNSUPPORTED", "b"),
}


@pytest.mark.parametrize(("spec", "code", "tensor"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_place(spec: Spec, code: Code, tensor: str) -> None:
    with refuses(code, tensor=tensor):
        draft([Spec("a", "F32", (2,)), spec])
