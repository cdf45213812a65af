"""Endpoints: this rank's source and target tensors in a refit, which are looked up again at each push (each transfer of
weights).

The tensors may have moved in memory since the last push, but must have the same dtype, shape, placement and ties. A
push sends the values that the source has at that time. A target rank receives the values either in staging memory, from
which all are copied into the target tensors at the end, or directly in the target tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from transaxle.errors import Refusal, Where, gathered
from transaxle.live.memory import tensor_of
from transaxle.live.model.destination import find_overlapping, unlike_overlap, view_of
from transaxle.live.model.state_tensors import Leaves
from transaxle.move.transfer import Transfer, as_box_copy
from transaxle.torch_tensors import (
    copy_box,
    local_of,
    local_parts,
    part_of,
    raw_local,
    same_bytes,
    same_views,
    torch_dtype,
    with_plain_bytes,
)

_ANEW = "Make a new Refit after tensors of a model were replaced by other tensors."


@dataclass(frozen=True)
class Form:
    """The properties of a rank's tensor that must not change between two pushes."""

    dtype: torch.dtype
    """Dtype of the tensor's elements."""
    shape: tuple[int, ...]
    """Global shape if the tensor is a DTensor; otherwise its shape on this rank."""
    placement: object
    """Mesh and placements if the tensor is a DTensor, and which part of the whole tensor this rank holds."""
    tied_to: str
    """Name of the first tensor in the same memory; the tensor's own name if the tensor is not tied."""


def forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, Form]:
    """Return tensor name -> `Form` (dtype, shape, placement, ties), for each of this rank's tensors."""
    first: dict[object, str] = {}
    return {name: _form(tensor, first.setdefault(view_of(tensor), name)) for name, tensor in tensors.items()}


def _form(tensor: torch.Tensor, tied_to: str) -> Form:
    if isinstance(tensor, DTensor):
        placement = tensor.device_mesh, tensor.placements, part_of(tensor)
        return Form(tensor.dtype, tuple(tensor.shape), placement, tied_to)
    return Form(tensor.dtype, tuple(tensor.shape), part_of(tensor), tied_to)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor, as `local_of` does, but ten times faster for DTensors."""
    return raw_local(tensor).detach() if isinstance(tensor, DTensor) else local_of(tensor)


def check_forms(side: str, tensors: Mapping[str, torch.Tensor], planned: Mapping[str, Form]) -> None:
    """Refuse tensors whose dtype, shape, placement or ties have changed since the refit was made.

    Args:
        side: "source" or "target", the word to use in error messages.
        tensors: name -> tensor of this rank at this push.
        planned: tensor name -> form of the tensor when the refit was made.

    Raises:
        Refused: with code MISSING_TENSOR or UNEXPECTED_TENSOR; with code SHAPE_MISMATCH, if the form of a tensor has
            changed.
    """
    problems = [
        Refusal("MISSING_TENSOR", f"the {side} no longer has it", Where(None, name), _ANEW)
        for name in planned
        if name not in tensors
    ]
    for name, form in forms(tensors).items():
        planned_form = planned.get(name)
        if planned_form is None:
            problems.append(Refusal("UNEXPECTED_TENSOR", f"the {side} did not have it", Where(None, name), _ANEW))
        elif planned_form != form:
            now, before = _words(form, planned_form, name), _words(planned_form, form, name)
            message = f"the {side} has it in another form: {now}; was {before}"
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name), _ANEW))
    if problems:
        raise gathered(problems)


def _words(form: Form, other_form: Form, name: str) -> str:
    words = f"{str(form.dtype).removeprefix('torch.')} {list(form.shape)}"
    if form.tied_to == other_form.tied_to:
        return words
    return f"{words}, not tied" if form.tied_to == name else f"{words}, tied to {form.tied_to}"


class SourceReader:
    """Reads the values of this rank's source tensors, cast to the dtypes in which they are sent.

    Args:
        source: this rank's source tensors.
        sent_as: tensor name -> safetensors code of a dtype, for tensors that are cast before they are sent.
    """

    def __init__(self, source: Leaves, sent_as: Mapping[str, str]) -> None:
        self._locals = {part: tensor for _, part, tensor in local_parts(source.tensors)}
        self._types = {
            part: torch_dtype(sent_as[name]) if name in sent_as else tensor.dtype
            for name, part, tensor in local_parts(source.tensors)
        }
        self._last: tuple[str, torch.Tensor] = "", torch.empty(0)

    def copy(self, transfer: Transfer, buffer: torch.Tensor) -> None:
        """Copy values of a source shard into a buffer, cast to the dtype in which they are sent.

        Args:
            transfer: describes the copy, from a shard of the source into the buffer.
            buffer: the memory to fill, as bytes or as elements of the dtype in which values are sent.
        """
        name = tensor_of(transfer.file)
        dtype, values = self._types[name], self._flat(name)
        element_type = torch.uint8 if dtype.itemsize == 1 else dtype
        copy_box(
            as_box_copy(transfer, dtype.itemsize),
            values,
            buffer if buffer.dtype == element_type else buffer.view(element_type),
        )

    def _flat(self, name: str) -> torch.Tensor:
        """Return the values of a shard as a flat tensor; the last result is cached, because it may be a copy."""
        if self._last[0] != name:
            self._last = name, with_plain_bytes(_local(self._locals[name]).contiguous()).view(-1)
        return self._last[1]


class Overlaps:
    """Stores which tensors may share elements, because the search is slow; it searches again if any tensor has moved in
    memory.
    """

    def __init__(self) -> None:
        self._places: list[tuple[str, int]] = []
        self._names: frozenset[str] = frozenset()

    def of(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names of tensors that may share elements; see `overlapping`."""
        places = [(name, _local(tensor).data_ptr()) for name, tensor in tensors.items()]
        if places != self._places:
            self._places, self._names = places, frozenset(find_overlapping(tensors))
        return self._names


class TargetMemory:
    """Memory that receives values on this rank, until they are copied into the target tensors.

    Args:
        tensors: name of a shard -> local tensor, for this rank's target tensors.
        names: for each item, the name of its shard; the key of an item is an index into this list. Shards of other
            ranks are not in `tensors`.
        padded: keys of items whose values do not fill their shard; the rest of such a shard is set to zero.
        in_place: whether to receive values directly in the target tensors if possible, without staging memory.
        shared: names of tensors that may share elements; their values are staged, and checked before any of these
            tensors is written.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        names: Sequence[str],
        padded: Iterable[int],
        *,
        in_place: bool,
        shared: Collection[str] = (),
    ) -> None:
        self._names = names
        self._padded = frozenset(padded)
        self._locals = {name: _local(tensor) for name, tensor in tensors.items()}
        self._staged: dict[str, torch.Tensor] = {}
        self._in_place = in_place
        self._shared = shared

    def __bool__(self) -> bool:
        """Return whether this rank has any target tensor."""
        return bool(self._locals)

    def begin(self, keys: Iterable[int]) -> None:
        """Allocate memory for the items with the given keys."""
        for key in keys:
            name = self._names[key]
            local = self._locals.get(name)
            if local is None or name in self._staged:
                continue
            if self._in_place and local.is_contiguous() and name not in self._shared:
                memory = local
            else:
                memory = torch.empty(local.shape, dtype=local.dtype, device=local.device)
            self._staged[name] = with_plain_bytes(memory).view(-1)
            if key in self._padded:
                self._staged[name].zero_()

    def of(self, key: int) -> torch.Tensor:
        """Return the memory of an item as a flat tensor with the dtype of the item."""
        return self._staged[self._names[key]]

    def lay(self, key: int, transfer: Transfer, parcel: torch.Tensor) -> None:
        """Copy values from a received parcel (block of bytes) into the memory of an item."""
        memory = self.of(key)
        copy_box(as_box_copy(transfer, memory.dtype.itemsize), parcel.view(memory.dtype), memory)

    def hand_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy received values into `tensors` before the push ends. Copying before the end is safe, because users never
        read these internal tensors.
        """
        for name, tensor in tensors.items():
            memory = self._staged.pop(name, None)
            if memory is not None and memory.data_ptr() != tensor.data_ptr():
                with_plain_bytes(tensor).copy_(memory.view(tensor.shape))

    def check_shared(self) -> None:
        """Check that tensors that share memory have received equal values for the elements that they share.

        Raises:
            Refused: with code UNEQUAL_COPIES, if such values differ.
        """
        groups: dict[tuple[torch.device, int], list[str]] = {}
        for name in sorted(self._staged.keys() & self._shared):
            local = self._locals[name]
            groups.setdefault((local.device, local.untyped_storage().data_ptr()), []).append(name)
        problems: list[Refusal] = []
        for names in groups.values():
            views = same_views({name: with_plain_bytes(self._locals[name]) for name in names})
            for name, view in views.items():
                view.copy_(self._staged[name].view(view.shape))
            unequal = (
                name for name, view in views.items() if not same_bytes(view, self._staged[name].view(view.shape))
            )
            problems += (unlike_overlap(name) for name in sorted(unequal))
        if problems:
            raise gathered(problems)

    def switch(self) -> int:
        """Copy all staged values into the target tensors; return the number of bytes written."""
        byte_count = 0
        with torch.no_grad():
            for name, memory in self._staged.items():
                local = self._locals[name]
                byte_count += local.nbytes
                if memory.data_ptr() != local.data_ptr() or not local.numel():
                    plain = with_plain_bytes(local)
                    plain.copy_(memory.view(local.shape))
        self._staged.clear()
        return byte_count
