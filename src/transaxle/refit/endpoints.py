"""Endpoints: this rank's side of a refit, read anew at each push: its tensors may have moved, but keep their form.

What is read are the values of that moment. A target gets them in memory of its own first (staged), from which it takes
them all at once; or straight into its tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from transaxle.errors import Refusal, Where, gathered
from transaxle.live.memory import tensor_of
from transaxle.live.model.destination import overlapping, unlike_overlap, view_of
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

_ANEW = "Make the Refit anew when tensors of a model are replaced by others."


@dataclass(frozen=True)
class Form:
    """What must not change between two pushes."""

    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Of this rank's part."""
    placement: object
    """Its mesh, and how it lies there."""
    tied_to: str
    """Name of the first tensor that is the same memory: its own where there is no other."""


def forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, Form]:
    """Return the forms of this rank's tensors."""
    first: dict[object, str] = {}
    return {name: _form(tensor, first.setdefault(view_of(tensor), name)) for name, tensor in tensors.items()}


def _form(tensor: torch.Tensor, tied_to: str) -> Form:
    if isinstance(tensor, DTensor):
        placement = tensor.device_mesh, tensor.placements, part_of(tensor)
        return Form(tensor.dtype, tuple(tensor.shape), placement, tied_to)
    return Form(tensor.dtype, tuple(tensor.shape), part_of(tensor), tied_to)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, as `local_of`; of DTensors in a tenth of the time."""
    return raw_local(tensor).detach() if isinstance(tensor, DTensor) else local_of(tensor)


def check_forms(side: str, now: Mapping[str, torch.Tensor], planned: Mapping[str, Form]) -> None:
    """Refuse tensors that are no longer what was planned with.

    Args:
        side: source or target.
        now: this rank's tensors.
        planned: their forms when the refit was made.

    Raises:
        Refused: MISSING_TENSOR, UNEXPECTED_TENSOR, SHAPE_MISMATCH.
    """
    problems = [
        Refusal("MISSING_TENSOR", f"the {side} no longer has it", Where(None, name), _ANEW)
        for name in planned
        if name not in now
    ]
    for name, form in forms(now).items():
        was = planned.get(name)
        if was is None:
            problems.append(Refusal("UNEXPECTED_TENSOR", f"the {side} did not have it", Where(None, name), _ANEW))
        elif was != form:
            message = f"the {side} has it in another form: {_words(form, was, name)}; was {_words(was, form, name)}"
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name), _ANEW))
    if problems:
        raise gathered(problems)


def _words(form: Form, other: Form, name: str) -> str:
    words = f"{str(form.dtype).removeprefix('torch.')} {list(form.shape)}"
    if form.tied_to == other.tied_to:
        return words
    return f"{words}, not tied" if form.tied_to == name else f"{words}, tied to {form.tied_to}"


class SourceValues:
    """The values of this rank's tensors, as they are sent.

    Args:
        own: what this rank holds.
        sent_as: safetensors codes of the tensors whose values are cast on the way, by name.
    """

    def __init__(self, own: Leaves, sent_as: Mapping[str, str]) -> None:
        self._locals = {part: tensor for _, part, tensor in local_parts(own.tensors)}
        self._types = {
            part: torch_dtype(sent_as[name]) if name in sent_as else tensor.dtype
            for name, part, tensor in local_parts(own.tensors)
        }
        self._last: tuple[str, torch.Tensor] = "", torch.empty(0)

    def copy(self, transfer: Transfer, room: torch.Tensor) -> None:
        """Copy values to where they belong.

        Args:
            transfer: from a part of the source into the room.
            room: bytes, or elements of the type that is sent.
        """
        name = tensor_of(transfer.file)
        dtype, values = self._types[name], self._flat(name)
        wanted = torch.uint8 if dtype.itemsize == 1 else dtype
        copy_box(as_box_copy(transfer, dtype.itemsize), values, room if room.dtype == wanted else room.view(wanted))

    def _flat(self, name: str) -> torch.Tensor:
        """Return the values of a part in one dim; a copy of those that are not contiguous is kept for the next run."""
        if self._last[0] != name:
            self._last = name, with_plain_bytes(_local(self._locals[name]).contiguous()).view(-1)
        return self._last[1]


class Overlaps:
    """Remembers which tensors may share elements, until tensors move: to look at all of them takes long."""

    def __init__(self) -> None:
        self._places: list[tuple[str, int]] = []
        self._names: frozenset[str] = frozenset()

    def of(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names of those that may, see `overlapping`."""
        places = [(name, _local(tensor).data_ptr()) for name, tensor in tensors.items()]
        if places != self._places:
            self._places, self._names = places, frozenset(overlapping(tensors))
        return self._names


class TargetRoom:
    """Where values come in on this rank.

    Args:
        tensors: what takes them, by the parts' names.
        names: the part of each item, by key; those of other ranks are not among the tensors.
        padded: keys of the items that no value fills whole.
        in_place: write them straight into the tensors.
        shared: names of tensors that may share elements, which are looked at before anything is written.
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
        self._rooms: dict[str, torch.Tensor] = {}
        self._in_place = in_place
        self._shared = shared

    def __bool__(self) -> bool:
        """Whether this rank has any of the target."""
        return bool(self._locals)

    def begin(self, keys: Iterable[int]) -> None:
        """Make room for items."""
        for key in keys:
            name = self._names[key]
            local = self._locals.get(name)
            if local is None or name in self._rooms:
                continue
            if self._in_place and local.is_contiguous() and name not in self._shared:
                room = local
            else:
                room = torch.empty(local.shape, dtype=local.dtype, device=local.device)
            self._rooms[name] = with_plain_bytes(room).view(-1)
            if key in self._padded:
                self._rooms[name].zero_()

    def of(self, key: int) -> torch.Tensor:
        """Return the room of an item: elements of its type in one dim."""
        return self._rooms[self._names[key]]

    def lay(self, key: int, transfer: Transfer, parcel: torch.Tensor) -> None:
        """Take values out of a parcel."""
        room = self.of(key)
        copy_box(as_box_copy(transfer, room.dtype.itemsize), parcel.view(room.dtype), room)

    def hand_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give some tensors their values before the others: nobody else sees these."""
        for name, tensor in tensors.items():
            room = self._rooms.pop(name, None)
            if room is not None and room.data_ptr() != tensor.data_ptr():
                with_plain_bytes(tensor).copy_(room.view(tensor.shape))

    def check_shared(self) -> None:
        """Prove that tensors in the same memory can hold the values that came in, each its own.

        Raises:
            Refused: UNEQUAL_COPIES.
        """
        groups: dict[tuple[torch.device, int], list[str]] = {}
        for name in sorted(self._rooms.keys() & self._shared):
            local = self._locals[name]
            groups.setdefault((local.device, local.untyped_storage().data_ptr()), []).append(name)
        problems: list[Refusal] = []
        for names in groups.values():
            views = same_views({name: with_plain_bytes(self._locals[name]) for name in names})
            for name, view in views.items():
                view.copy_(self._rooms[name].view(view.shape))
            lost = (name for name, view in views.items() if not same_bytes(view, self._rooms[name].view(view.shape)))
            problems += (unlike_overlap(name) for name in sorted(lost))
        if problems:
            raise gathered(problems)

    def switch(self) -> int:
        """Give the tensors the values that came in; return their bytes."""
        written = 0
        with torch.no_grad():
            for name, room in self._rooms.items():
                local = self._locals[name]
                written += local.nbytes
                if room.data_ptr() != local.data_ptr() or not local.numel():
                    plain = with_plain_bytes(local)
                    plain.copy_(room.view(local.shape))
        self._rooms.clear()
        return written
