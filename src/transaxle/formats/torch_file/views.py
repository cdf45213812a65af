"""Views: from a tensor's description in a pickle to the place of its bytes, which must be inside its storage.

torch checks neither: a view of stride zero makes a terabyte out of four bytes, and a storage of one dtype can be viewed
as another.
"""

from __future__ import annotations

from math import prod

from transaxle.errors import Code
from transaxle.formats.catalog import Entry, Extent
from transaxle.formats.pickled.descriptors import DType, Object, Quantized, TensorRef
from transaxle.formats.torch_file.stored_storage import BYTE, StoredStorage, item_bytes

REPEATED = 1 << 30
"""Cap on the bytes that the views of one file may repeat: expanded tensors are small, or a trap."""
_MAX_COUNT = 2**63 - 1
_PACKED = {"F4": 2}
"""Codes whose elements torch counts in packs -> elements per pack."""
_KINDS: dict[str, str] = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_qtensor": "a quantized tensor, whose scale is not among its bytes",
    "_rebuild_nested_tensor": "a nested tensor",
    "NestedTensor": "a nested tensor",
    "_rebuild_njt": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values",
    "DTensor": "a DTensor, of which this file holds only one rank's part",
    "UninitializedParameter": "a parameter without values",
    "UninitializedBuffer": "a buffer without values",
}
_HINT = "Save it as plain dense tensors."


class ViewFault(Exception):
    """A tensor that cannot be read, with the reason."""

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.hint = hint


def place(name: str, tensor: TensorRef | Object | Quantized, file: str) -> tuple[Entry, int]:
    """Return the entry of a tensor, and the bytes that it repeats.

    Args:
        name: what it is called.
        tensor: what the pickle says of it; its storage is a `Stored`.
        file: the file of its storage.

    Raises:
        ViewFault: CORRUPT if it does not lie in its storage; UNSUPPORTED for tensors that are no plain views.
    """
    if isinstance(tensor, Object):
        kind = _KINDS.get(tensor.cls.name, f"a tensor of the class {tensor.cls}")
        raise ViewFault("UNSUPPORTED", f"it is {kind}", _HINT)
    if isinstance(tensor, Quantized):
        raise ViewFault("UNSUPPORTED", f"it is a {tensor.kind}, which consists of several tensors", _HINT)
    stored = tensor.storage
    if not isinstance(stored, StoredStorage):
        raise ViewFault("UNSUPPORTED", "its storage is pickled inside another pickle", _HINT)
    if tensor.flags:
        message = f"the stored values are not the tensor's: they need {' and '.join(tensor.flags)}"
        raise ViewFault("UNSUPPORTED", message, "Save it after resolve_conj() and resolve_neg().")
    dtype = tensor.dtype or stored.dtype
    if stored.dtype not in (dtype, BYTE):
        raise ViewFault("CORRUPT", f"it views elements of {stored.dtype.name} as {dtype.name}")
    item = item_bytes(dtype)
    count, span = _count(tensor), _span(tensor)
    if (tensor.offset + span) * item > stored.nbytes and count:
        message = (
            f"{dtype.name} {list(tensor.shape)} with strides {list(tensor.strides)} from element {tensor.offset} ends "
            f"at byte {(tensor.offset + span) * item} of storage {stored.key!r}, which has {stored.nbytes}"
        )
        raise ViewFault("CORRUPT", message)
    shape, strides = _unpacked(tensor, dtype)
    offset = stored.offset + (tensor.offset * item if count else 0)
    extent = Extent((0,) * len(shape), shape, file, offset, strides)
    return Entry(name, dtype.code, shape, (extent,)), max(count - span, 0) * item


def identity(tensor: TensorRef) -> tuple[object, ...] | None:
    """Return a key that is equal for two tensors that are the same view of the same storage."""
    if not isinstance(tensor.storage, StoredStorage) or not prod(tensor.shape):
        return None
    return tensor.storage.key, tensor.dtype, tensor.offset, tensor.shape, tensor.strides


def _count(tensor: TensorRef) -> int:
    count = prod(tensor.shape)
    if prod(size or 1 for size in tensor.shape) * 16 > _MAX_COUNT:
        raise ViewFault("CORRUPT", f"the shape {list(tensor.shape)} overflows: no file holds so many elements")
    return count


def _span(tensor: TensorRef) -> int:
    """Return the number of storage elements from the first one of a view to its last."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))


def _unpacked(tensor: TensorRef, dtype: DType) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return shape and strides in logical elements; no strides if the view is row-major without gaps."""
    shape, strides = tensor.shape, tensor.strides
    dense = _is_dense(shape, strides)
    pack = _PACKED.get(dtype.code)
    if pack:
        if not shape:
            raise ViewFault("UNSUPPORTED", f"a scalar of {dtype.name} would pack {pack} values")
        if not dense and strides[-1] != 1 and shape[-1] > 1:
            message = f"{dtype.name} is transposed, so its packed values are not along the last dim"
            raise ViewFault("UNSUPPORTED", message, _HINT)
        shape = (*shape[:-1], shape[-1] * pack)
        strides = (*(step * pack for step in strides[:-1]), 1)
    return shape, None if dense else strides


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if step != expected:
                return 0 in shape
            expected *= size
    return True
