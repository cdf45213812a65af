"""torch files that we lay out: torch's own writer is the oracle for the layout, torch.load for what is in it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.drafts import build
from tests.formats.refusals import refuses
from tests.formats.torch_file.made import octets
from tests.formats.torch_file.test_reader import QUANTIZED, torch_dtypes
from transaxle.errors import Code, TransaxleError
from transaxle.formats.catalog import Spec, nbytes
from transaxle.formats.detect import open_container
from transaxle.formats.pickled.descriptors import DType
from transaxle.formats.pickled.interpreter import Bounds
from transaxle.formats.torch_file.archive import ALIGNMENT, ZipItem, lay_out
from transaxle.formats.torch_file.draft import draft

WHOLE = "pytorch_model.bin"
INDEX = f"{WHOLE}.index.json"


def laid_out(data: bytes) -> bytes:
    """The bytes of an archive that holds the records of another one; checksums of storages as in the other."""
    with zipfile.ZipFile(io.BytesIO(data)) as theirs:
        infos = theirs.infolist()
        folder = infos[0].filename.partition("/")[0]
        items = [ZipItem(info.filename.partition("/")[2], info.file_size, theirs.read(info)) for info in infos]
    layout = lay_out(folder, items)
    out = bytearray(layout.size)
    for offset, fragments in layout.fragments:
        out[offset : offset + len(fragments)] = fragments
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    return bytes(out)


@given(st.lists(st.tuples(st.sampled_from(["float32", "int8", "uint16"]), st.integers(0, 300)), max_size=30))
@settings(max_examples=50)
def test_the_layout_is_that_of_torch(tensors: Sequence[tuple[str, int]]) -> None:
    """Byte for byte: headers, padding, descriptors, directory and end records."""
    file = io.BytesIO()
    torch.save(
        {str(at): torch.zeros(size, dtype=getattr(torch, kind)) for at, (kind, size) in enumerate(tensors)}, file
    )
    assert laid_out(file.getvalue()) == file.getvalue()


def test_the_layout_of_many_records(tmp_path: Path) -> None:
    """More than 65,535 records need the zip64 end record."""
    place = tmp_path / "many.pt"
    writer = torch._C.PyTorchFileWriter(str(place))
    for number in range(66_000):
        writer.write_record(f"data/{number}", b"ab", 2)
    writer.write_end_of_file()
    assert laid_out(place.read_bytes()) == place.read_bytes()


def specs(names: Mapping[str, torch.dtype]) -> list[Spec]:
    return [Spec(name, DType(name.partition(".")[0]).code, (3, 4)) for name in names]


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_torch_loads_every_type(tmp_path: Path, mapped: bool) -> None:
    kinds = {name: kind for name, kind in torch_dtypes().items() if name not in QUANTIZED}
    made = draft(specs(kinds))
    contents = {
        entry.name: bytes((7 * number + at) % (2 if entry.dtype == "BOOL" else 251) for at in range(entry.nbytes))
        for number, entry in enumerate(made.entries.values())
    }
    build(made, tmp_path, contents)
    found = torch.load(tmp_path / WHOLE, weights_only=True, mmap=mapped)
    assert list(found) == list(kinds)
    for name, kind in kinds.items():
        assert found[name].dtype == kind
        assert tuple(found[name].shape) == ((3, 2) if name == "float4_e2m1fn_x2" else (3, 4))
        assert found[name].is_contiguous()
        assert bytes(found[name].untyped_storage())[: len(contents[name])] == contents[name]


CODES = st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "C64"])
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(st.dictionaries(st.text(st.characters()), st.tuples(CODES, SHAPES), max_size=8))
@settings(max_examples=100)
def test_any_names_and_shapes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    made = draft([Spec(name, code, shape) for name, (code, shape) in tensors.items()])
    out = bytearray(made.files[WHOLE])
    for fragment in made.fragments:
        out[fragment.offset : fragment.offset + len(fragment.data)] = fragment.data
    found = torch.load(io.BytesIO(bytes(out)), weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: shape for name, (_, shape) in tensors.items()
    }
    assert all(tensor.stride() == torch.empty(tensor.shape).stride() for tensor in found.values())
    with zipfile.ZipFile(io.BytesIO(bytes(out))) as theirs:
        assert len(theirs.namelist()) == len(tensors) + 6
        assert theirs.read("archive/byteorder") == b"little"


def test_a_draft_is_the_same_each_time() -> None:
    tensors = [Spec("a", "F32", (3,)), Spec("b", "I64", ())]
    assert draft(tensors) == draft(tensors)
    assert draft(tensors, metadata={"x": "y"}) == draft(tensors)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
@settings(max_examples=50)
def test_shards_are_those_of_hugging_face(sizes: list[int], shard_size: int) -> None:
    state = {f"t{at:02}": torch.zeros(size, dtype=torch.uint8) for at, size in enumerate(sizes)}
    theirs = split_torch_state_dict_into_shards(
        state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=shard_size
    )
    made = draft([Spec(name, "U8", tuple(tensor.shape)) for name, tensor in state.items()], shard_size=shard_size)
    ours: dict[str, list[str]] = {}
    for entry in made.entries.values():
        ours.setdefault(entry.extents[0].file, []).append(entry.name)
    assert {file: sorted(names) for file, names in theirs.filename_to_tensors.items()} == {
        file: sorted(names) for file, names in ours.items()
    }


REFUSED: dict[str, tuple[list[Spec], Code, str]] = {
    "a type of safetensors only": ([Spec("a", "F6_E2M3", (4,))], "UNSUPPORTED", "is not written to torch files"),
    "a quantized type": ([Spec("a", "QINT8", (4,))], "UNSUPPORTED", "is not written to torch files"),
    "no type": ([Spec("a", "NONE", (4,))], "UNSUPPORTED", "is not written to torch files"),
    "two of a name": ([Spec("a", "F32", (4,)), Spec("a", "F32", (4,))], "NAME_COLLISION", "two tensors"),
    "too many dims": ([Spec("a", "F32", (1,) * 65)], "UNSUPPORTED", "65 dims"),
    "half a pack": ([Spec("a", "F4", (2, 3))], "SHAPE_MISMATCH", "is not a multiple of 2"),
    "a pack without dims": ([Spec("a", "F4", ())], "SHAPE_MISMATCH", "is not a multiple of 2"),
}


@pytest.mark.parametrize(("tensors", "code", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_place(tensors: list[Spec], code: Code, said: str) -> None:
    with pytest.raises(TransaxleError, match=said) as caught:
        draft([*tensors, Spec("fine", "F32", (1,))])
    assert [(one.code, one.where.tensor) for one in caught.value.refusals] == [(code, "a")]


def test_more_names_than_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transaxle.formats.torch_file.draft.Bounds", lambda: Bounds(size=100))
    with refuses("UNSUPPORTED", "more than readers accept", file=WHOLE):
        draft([Spec("a" * 100, "F32", (1,))])


def test_a_storage_beyond_4_gib(tmp_path: Path) -> None:
    """The file is a hole but for its headers; torch maps it and finds the tensor behind the large one."""
    made = draft([Spec("large", "U8", (5 << 30,)), Spec("small", "F32", (3,))])
    with (tmp_path / WHOLE).open("wb") as file:
        file.truncate(made.files[WHOLE])
        for fragment in made.fragments:
            file.seek(fragment.offset)
            file.write(fragment.data)
        file.seek(made.entries["small"].extents[0].offset)
        file.write(torch.arange(3.0).numpy().tobytes())
    found = torch.load(tmp_path / WHOLE, weights_only=True, mmap=True)
    assert found["small"].tolist() == [0, 1, 2]
    assert found["large"].numel() == 5 << 30
    container = open_container(str(tmp_path))
    assert octets(container, "small") == torch.arange(3.0).numpy().tobytes()
    assert nbytes("U8", container.entries["large"].shape) == 5 << 30
