"""TransformerEngine's tensors in torch files: their buffers are plain tensors, without padding, byte for byte."""

from __future__ import annotations

import enum
import io
import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import transaxle as tx
from tests.formats.dcp.damage import MARKER, Evil
from tests.formats.refusals import refuses
from tests.oracles import te_pickles
from tests.oracles.te_pickles import (
    BLOCKWISE,
    FLOAT8,
    FUNCTIONS,
    MODULES,
    MXFP8,
    NEWEST,
    NVFP4,
    PACKAGE,
    RELEASES,
    Array,
    File,
    Release,
    Tensor,
    blockwise,
    call,
    float8,
    mxfp8,
    name,
    nvfp4,
    padded,
    restored,
)
from transaxle.errors import Code, TransaxleError
from transaxle.formats.catalog import Container
from transaxle.formats.detect import open_container
from transaxle.formats.torch_file.quantized_tensors import AMAX, HALVED, NOTE, SCALE

NAME, FILE = "layer.weight", "model.pt"
LEFT = "left_behind"


def write(folder: Path, file: File) -> Path:
    place = folder / FILE
    place.write_bytes(file.pickled())
    return place


def opened(folder: Path, tensor: Tensor, release: Release | None = None, **changed: Any) -> Container:
    file = File()
    file.items[NAME] = tensor.opcodes(file, release, **changed)
    return open_container(str(write(folder, file)))


def stored(container: Container) -> dict[str, Array]:
    """The bytes of every tensor, through a plain walk over its extent."""
    found = {}
    for key, entry in container.entries.items():
        (extent,) = entry.extents
        item = entry.nbytes // max(1, np.prod(entry.shape, dtype=int))
        steps = extent.strides or [int(np.prod(entry.shape[at + 1 :])) for at in range(len(entry.shape))]
        out = np.zeros((*entry.shape, item), np.uint8)
        for index in np.ndindex(*entry.shape):
            at = extent.offset + item * sum(i * step for i, step in zip(index, steps, strict=True))
            out[index] = np.frombuffer(container.storage.read(extent.file, at, item), np.uint8)
        found[key] = out
    return found


def octets(array: Array) -> Array:
    whole = np.ascontiguousarray(array)
    return whole.view(np.uint8).reshape(*array.shape, array.itemsize)


def refused(folder: Path, tensor: Tensor, code: Code, words: str, **changed: Any) -> None:
    with refuses(code, words, file=FILE, tensor=NAME) as caught:
        opened(folder, tensor, **changed)
    assert len(caught.value.refusals) == 1


def resized(tensor: Tensor, buffer: str, array: Array | None) -> Tensor:
    """The same tensor with another buffer, or without one."""
    buffers = {key: each for key, each in {**tensor.buffers, buffer: array}.items() if each is not None}
    return Tensor(tensor.kind, buffers, tensor.values, tensor.shape, tensor.settings, tensor.code)


# What is read.

SMALL = {FLOAT8: float8(1), MXFP8: mxfp8(2, (32, 64)), BLOCKWISE: blockwise(3, (130, 140)), NVFP4: nvfp4(4)}
CODES = {FLOAT8: "data", MXFP8: "rowwise_data", BLOCKWISE: "rowwise_data", NVFP4: "rowwise_data"}
GRIDS = {FLOAT8: (1,), MXFP8: (32, 2), BLOCKWISE: (2, 2), NVFP4: (20, 3)}
SCALES = {FLOAT8: "scale_inv", **dict.fromkeys((MXFP8, BLOCKWISE, NVFP4), "rowwise_scale_inv")}
TYPES = {
    FLOAT8: ("F8_E4M3", "F32"), MXFP8: ("F8_E4M3", "F8_E8M0"), BLOCKWISE: ("F8_E4M3", "F32"), NVFP4: ("U8", "F8_E4M3"),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: f"{release.kind} {release.version}")
def test_buffers_of_every_release(release: Release, tmp_path: Path) -> None:
    tensor = SMALL[release.kind]
    container = opened(tmp_path, tensor, release)
    found = stored(container)
    codes, scales = tensor.buffers[CODES[release.kind]], tensor.buffers[SCALES[release.kind]]
    expected = {NAME: codes, NAME + SCALE: scales[tuple(slice(size) for size in GRIDS[release.kind])]}
    if release.kind == NVFP4:
        expected[NAME + AMAX] = tensor.buffers["amax_rowwise"]
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], octets(array))
    assert (container.entries[NAME].dtype, container.entries[NAME + SCALE].dtype) == TYPES[release.kind]
    left = {f"{NAME}.columnwise_data"} if release.kind == MXFP8 else set()
    assert set(container.metadata.get(LEFT, {})) == left


@pytest.mark.oracle
@pytest.mark.parametrize("layout", ["square", "square columns", "rows", "rows compact", "columns", "columns compact"])
def test_blocks_in_every_order(layout: str, tmp_path: Path) -> None:
    tensor = blockwise(5, (130, 270), layout)
    container = opened(tmp_path, tensor)
    tile = (128, 128) if "square" in layout else (1, 128) if "rows" in layout else (128, 1)
    assert container.entries[NAME].shape == (130, 270)
    assert container.entries[NAME + SCALE].shape == (-(-130 // tile[0]), -(-270 // tile[1]))
    assert container.metadata[NOTE][NAME]["tile"] == list(tile)
    found = stored(container)
    codes = found[NAME][..., 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = found[NAME + SCALE].view(np.float32)[..., 0]
    whole = np.repeat(np.repeat(scale, tile[0], 0), tile[1], 1)[:130, :270]
    np.testing.assert_array_equal(codes * whole, tensor.values)


def test_scales_without_padding_are_read_too(tmp_path: Path) -> None:
    tensor = SMALL[MXFP8]
    exact = resized(tensor, "rowwise_scale_inv", np.ascontiguousarray(tensor.buffers["rowwise_scale_inv"][:32, :2]))
    one, two = (stored(opened(tmp_path, each)) for each in (tensor, exact))
    np.testing.assert_array_equal(one[NAME + SCALE], two[NAME + SCALE])


def test_codes_by_columns_alone(tmp_path: Path) -> None:
    tensor = mxfp8(6, (64, 40), "columns")
    container = opened(tmp_path, tensor)
    found = stored(container)
    np.testing.assert_array_equal(found[NAME], octets(tensor.buffers["columnwise_data"]))
    np.testing.assert_array_equal(found[NAME + SCALE], octets(tensor.buffers["columnwise_scale_inv"][:2, :40]))
    turned = float8(7, transposed=True)
    np.testing.assert_array_equal(
        stored(opened(tmp_path, turned))[NAME], octets(turned.buffers["data_transpose"].T.copy())
    )


def test_a_transposed_cache_beside_the_codes_is_left_and_listed(tmp_path: Path) -> None:
    tensor = float8(8)
    both = resized(tensor, "data_transpose", np.ascontiguousarray(tensor.buffers["data"].T))
    container = opened(tmp_path, both)
    assert list(container.metadata[LEFT]) == [f"{NAME}.data_transpose"]
    np.testing.assert_array_equal(stored(container)[NAME], octets(tensor.buffers["data"]))


def test_stacks_of_matrices(tmp_path: Path) -> None:
    tensor = mxfp8(9, (2, 3, 32, 64))
    container = opened(tmp_path, tensor)
    assert container.entries[NAME + SCALE].shape == (2, 3, 32, 2)
    flat = tensor.buffers["rowwise_scale_inv"][:192, :2]
    np.testing.assert_array_equal(stored(container)[NAME + SCALE], octets(flat.reshape(2, 3, 32, 2)))
    four = nvfp4(10, (3, 2, 32))
    found = stored(opened(tmp_path, four))
    np.testing.assert_array_equal(found[NAME + AMAX].view(np.float32)[:, 0], np.repeat(four.buffers["amax_rowwise"], 3))


def test_four_over_six_has_names_of_its_own(tmp_path: Path) -> None:
    """Its scales mean other values; the same bytes under the usual names would be read as something else."""
    container = opened(tmp_path, nvfp4(11, scale_max=256))
    assert set(container.entries) == {NAME, NAME + SCALE + HALVED, NAME + AMAX + HALVED}
    assert container.metadata[NOTE][NAME]["scale_max"] == 256
    usual: dict[str, Any] = {"nvfp4_use_4over6": False, "nvfp4_e4m3_max": 256}  # the class ignores the second then
    assert set(opened(tmp_path, nvfp4(11), **usual).entries) == {NAME, NAME + SCALE, NAME + AMAX}


def test_numbers_of_types(tmp_path: Path) -> None:
    """7 is e4m3 since 2.4; it was e5m2 before, which only another tensor of the file can tell."""
    two_zero, two_four = (each for each in RELEASES if each.kind == FLOAT8 and each.version in ("2.0", "2.4"))
    for release, code, dtype in (
        (two_zero, "e4m3", "F8_E4M3"),
        (two_four, "e4m3", "F8_E4M3"),
        (two_four, "e5m2", "F8_E5M2"),
        (NEWEST[FLOAT8], "e5m2", "F8_E5M2"),
        (next(each for each in RELEASES if each.version == "1.2"), "e5m2", "F8_E5M2"),
    ):
        assert opened(tmp_path, float8(1, code=code), release).entries[NAME].dtype == dtype
    file = File()
    file.items |= {
        "a": float8(1, code="e5m2").opcodes(file, two_zero),
        "b": float8(2).opcodes(file, two_zero),
        "c": float8(3).opcodes(file, NEWEST[FLOAT8]),
    }
    container = open_container(str(write(tmp_path, file)))
    assert [container.entries[key].dtype for key in "abc"] == ["F8_E5M2", "F8_E4M3", "F8_E4M3"]


def test_ties_are_found_buffer_by_buffer(tmp_path: Path) -> None:
    file = File()
    opcodes = float8(12).opcodes(file)
    file.items |= {"a": opcodes, "b": opcodes}
    assert open_container(str(write(tmp_path, file))).metadata["ties"] == {"b": "a", f"b{SCALE}": f"a{SCALE}"}


def test_extra_state_in_every_form(tmp_path: Path) -> None:
    """Bytes in a tensor are a tensor; an empty one says that there is none; older forms are listed. None is opened."""
    state = pickle.dumps({"recipe": Evil(tmp_path), "scale_fwd": torch.ones(3)})
    saved = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3)}, saved)
    place = tmp_path / FILE
    torch.save(
        {
            "a._extra_state": torch.frombuffer(bytearray(state), dtype=torch.uint8),
            "b._extra_state": torch.empty(0, dtype=torch.uint8),
            "c._extra_state": saved,
            "d._extra_state": None,
            "d.weight": torch.ones(2),
        },
        place,
    )
    with tx.open(place) as checkpoint:
        assert checkpoint["a._extra_state"].tobytes() == state
        assert checkpoint["b._extra_state"].shape == (0,)
        assert dict(checkpoint.metadata[LEFT]) == {"c._extra_state": "_io.BytesIO", "d._extra_state": "None"}
    assert not (tmp_path / MARKER).exists()


# What torch itself writes of such classes.


def _stubs(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """Stand-ins for TransformerEngine's modules, with its names: what torch.save needs to find them."""
    parts = ["transformer_engine", PACKAGE, f"{PACKAGE}.tensor", f"{PACKAGE}.constants"]
    modules = {each: ModuleType(each) for each in (*parts, *(f"{PACKAGE}.tensor.{m}" for m in MODULES.values()))}
    for each, module in modules.items():
        monkeypatch.setitem(sys.modules, each, module)
    constants = modules[f"{PACKAGE}.constants"]

    class DType(enum.IntEnum):
        E4M3 = 7

    DType.__module__, DType.__qualname__ = constants.__name__, DType.__name__
    vars(constants)[DType.__name__] = DType
    return modules


@pytest.mark.parametrize("is_method", [True, False], ids=["method", "function"])
@pytest.mark.parametrize("kind", [FLOAT8, MXFP8])
def test_what_torch_saves_of_a_class_that_reduces_so(
    kind: str, is_method: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opcodes of the oracle are those of Python's pickler, for a real wrapper subclass, as a parameter."""
    modules = _stubs(monkeypatch)
    module = modules[f"{PACKAGE}.tensor.{MODULES[kind]}"]
    made = SMALL[kind]
    order = te_pickles.ORDERS[kind][: 5 if kind == FLOAT8 else 9]
    values: dict[str, Any] = {key: torch.from_numpy(array) for key, array in made.buffers.items()}
    values |= {"codes": modules[f"{PACKAGE}.constants"].DType(7), "dtype": torch.bfloat16}
    values |= {"shape": torch.Size(made.shape), "with_gemm_swizzled_scales": False}

    def function(*_: Any) -> None:
        """Named as TransformerEngine's."""

    class Wrapper(torch.Tensor):
        def __new__(cls) -> Wrapper:
            made_of = torch.Tensor._make_wrapper_subclass(cls, made.shape, dtype=torch.bfloat16)
            assert isinstance(made_of, Wrapper)
            return made_of

        def __reduce_ex__(self, _: object) -> Any:
            rebuild = Wrapper._make_in_reduce_ex if is_method else function
            return rebuild, tuple(values.get(argument) for argument in order)

        @classmethod
        def _make_in_reduce_ex(cls, *_: Any) -> None:
            """Named as TransformerEngine's."""

        @classmethod
        def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            assert func is torch.ops.aten.detach.default
            return Wrapper()

    for each, attribute in ((function, FUNCTIONS[kind]), (Wrapper, kind)):
        each.__module__, each.__qualname__, each.__name__ = module.__name__, attribute, attribute
        setattr(module, attribute, each)
    weight = torch.nn.Parameter(Wrapper(), requires_grad=False)
    assert type(weight).__name__ == kind
    place = tmp_path / FILE
    torch.save({NAME: weight}, place)
    with zipfile.ZipFile(place) as archive:
        opcodes = archive.read("model/data.pkl")
    assert (b"getattr" in opcodes, FUNCTIONS[kind].encode() in opcodes) == (is_method, not is_method)
    container = open_container(str(place))
    found = stored(container)
    np.testing.assert_array_equal(found[NAME], octets(made.buffers[CODES[kind]]))
    scales = made.buffers[SCALES[kind]][tuple(slice(size) for size in GRIDS[kind])]
    np.testing.assert_array_equal(found[NAME + SCALE], octets(scales))


# What is refused.


def _type(number: int) -> bytes:
    return call(name(f"{PACKAGE}.constants", "DType"), number)


_FORMAT = restored(name("transformer_engine_torch", "Float8BlockScaleTensorFormat"), 2)
_ROWS = SMALL[NVFP4].buffers
COLUMNS = Tensor(
    NVFP4, {"columnwise_data": _ROWS["rowwise_data"], "amax_columnwise": _ROWS["amax_rowwise"]},
    SMALL[NVFP4].values, SMALL[NVFP4].shape, SMALL[NVFP4].settings, SMALL[NVFP4].code,
)  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("tensor", "changed", "words"),
    [
        (SMALL[MXFP8], {"with_gemm_swizzled_scales": True}, "order of a matrix-multiply kernel"),
        (SMALL[NVFP4], {"with_gemm_swizzled_scales": True}, "order of a matrix-multiply kernel"),
        (SMALL[NVFP4], {"row_scaled_nvfp4": True}, "a separate amax for every row"),
        (SMALL[NVFP4], {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 224}, "computed for a maximum of 224"),
        (SMALL[NVFP4], {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 1 << 900}, "computed for a maximum"),
        (COLUMNS, {}, "only columnwise codes"),
        (SMALL[BLOCKWISE], {"data_format": _FORMAT}, "format 2"),
        (SMALL[FLOAT8], {"codes": _type(10)}, "type 10"),
        (SMALL[FLOAT8], {"codes": _type(6)}, "type 6"),
        (SMALL[NVFP4], {"codes": _type(7)}, "type 7"),
        (SMALL[MXFP8], {"codes": _type(0)}, "type 0"),
    ],
)
def test_what_no_view_can_express(tensor: Tensor, changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(tmp_path, tensor, "UNSUPPORTED", words, **changed)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("tensor", "buffer", "array", "code", "words"),
    [
        (SMALL[MXFP8], "rowwise_scale_inv", np.ones((128, 5), np.uint8), "SHAPE_MISMATCH", "[32, 2], padded to"),
        (SMALL[MXFP8], "rowwise_scale_inv", np.ones((31, 2), np.uint8), "SHAPE_MISMATCH", "found [31, 2]"),
        (SMALL[MXFP8], "rowwise_scale_inv", np.ones(512, np.uint8), "SHAPE_MISMATCH", "found [512]"),
        (SMALL[MXFP8], "rowwise_scale_inv", np.ones((128, 4), np.float32), "DTYPE_MISMATCH", "found float32"),
        (SMALL[MXFP8], "rowwise_scale_inv", None, "MISSING_TENSOR", "has no rowwise_scale_inv"),
        (SMALL[MXFP8], "rowwise_data", np.ones((32, 63), np.uint8), "SHAPE_MISMATCH", "do not fill"),
        (SMALL[MXFP8], "rowwise_data", np.ones((), np.uint8), "SHAPE_MISMATCH", "no dims"),
        (SMALL[MXFP8], "rowwise_data", np.ones((32, 64), np.float32), "DTYPE_MISMATCH", "found float32"),
        (SMALL[MXFP8], "rowwise_data", np.ones((2, 16, 64), np.uint8), "SHAPE_MISMATCH", "have the shape [2, 16, 64]"),
        (SMALL[FLOAT8], "scale_inv", np.ones(2, np.float32), "SHAPE_MISMATCH", "one number; found [2]"),
        (SMALL[FLOAT8], "scale_inv", None, "MISSING_TENSOR", "has no fp8_scale_inv"),
        (SMALL[FLOAT8], "data", None, "MISSING_TENSOR", "has no data_transpose"),
        (SMALL[FLOAT8], "data", np.ones((10, 6), np.uint8), "SHAPE_MISMATCH", "have the shape [10, 6]"),
        (SMALL[BLOCKWISE], "rowwise_scale_inv", np.ones((4, 2), np.float32), "SHAPE_MISMATCH", "found [4, 2]"),
        (SMALL[BLOCKWISE], "rowwise_scale_inv", np.ones((2, 4), np.uint8), "DTYPE_MISMATCH", "found uint8"),
        (SMALL[NVFP4], "amax_rowwise", None, "MISSING_TENSOR", "has no amax_rowwise"),
        (SMALL[NVFP4], "amax_rowwise", np.ones(20, np.float32), "SHAPE_MISMATCH", "found [20]"),
        (SMALL[NVFP4], "rowwise_data", np.ones((20, 48), np.uint8), "SHAPE_MISMATCH", "[20, 6], padded to"),
        (SMALL[NVFP4], "rowwise_data", None, "MISSING_TENSOR", "has no rowwise_data"),
    ],
)
def test_buffers_that_do_not_go_together(
    tensor: Tensor, buffer: str, array: Array | None, code: Code, words: str, tmp_path: Path
) -> None:
    refused(tmp_path, resized(tensor, buffer, array), code, words)


def test_blocks_that_reach_across_matrices(tmp_path: Path) -> None:
    """TransformerEngine takes all dims but the last as rows; blocks of 128 then know nothing of the matrices."""
    codes, scale = np.ones((3, 100, 128), np.uint8), padded(np.ones((3, 1), np.float32), 1, 4)
    made = Tensor(
        BLOCKWISE, {"rowwise_data": codes, "rowwise_scale_inv": scale}, codes, codes.shape, {"is_2D_scaled": True}
    )
    refused(tmp_path, made, "BLOCK_MISALIGNED", "cross the boundaries of the matrices of [3, 100, 128]")


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ({"shape": (6, 11)}, "which has 60"),
        ({"shape": (1 << 62, 1 << 62)}, "overflows"),
        ({"offset": 1}, "which has 60"),
        ({"strides": (1 << 40, 1)}, "which has 60"),
    ],
)
def test_shapes_that_lie(view: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A buffer is a view like any other: it must lie in its storage."""
    tensor, file = float8(13), File()
    data = file.tensor(tensor.buffers["data"], **view)
    shape = view.get("shape", tensor.shape)
    file.items[NAME] = resized(tensor, "data", None).opcodes(file, data=data, shape=shape)
    with refuses("CORRUPT", words, file=FILE, tensor=NAME) as caught:
        open_container(str(write(tmp_path, file)))
    assert len(caught.value.refusals) == 1


def test_names_that_collide(tmp_path: Path) -> None:
    for first, second in ((NAME, NAME + SCALE), (NAME + SCALE, NAME)):
        file = File()
        opcodes = {NAME: float8(15).opcodes(file), NAME + SCALE: file.tensor(np.ones(1, np.float32))}
        file.items |= {first: opcodes[first], second: opcodes[second]}
        with pytest.raises(TransaxleError) as error:
            open_container(str(write(tmp_path, file)))
        assert [(r.code, r.where.tensor) for r in error.value.refusals] == [("NAME_COLLISION", NAME + SCALE)]


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = File()
    for at, bad in enumerate((resized(SMALL[FLOAT8], "scale_inv", None), resized(SMALL[NVFP4], "amax_rowwise", None))):
        file.items[f"{at}"] = bad.opcodes(file)
    file.items["2"] = SMALL[MXFP8].opcodes(file, with_gemm_swizzled_scales=True)
    with pytest.raises(TransaxleError) as error:
        open_container(str(write(tmp_path, file)))
    assert [refusal.where.tensor for refusal in error.value.refusals] == ["0", "1", "2"]
