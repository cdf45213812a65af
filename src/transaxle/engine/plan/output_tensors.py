"""Output tensors: what a conversion writes, each with the source of its bytes and what is done to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import msgspec

from transaxle.axes.layout.relayout import Target
from transaxle.encodings.arithmetic.codec import Error
from transaxle.encodings.conventions.convention import CONVENTIONS, PREFERRED
from transaxle.encodings.encoding import ENCODINGS, Encoded, Role
from transaxle.engine.views.encode import Step
from transaxle.engine.views.encoded import View
from transaxle.errors import Refusal, Where

_LARGEST = 1 << 44
"""Cap on the elements of a tensor."""
Action = Literal["decoded", "encoded", "averaged", "cast"]


class Recoded(msgspec.Struct, frozen=True):
    """A tensor whose values are decoded, encoded, averaged or cast."""

    name: str
    """Table name: the target's if it is encoded, the source's otherwise."""
    action: Action
    """What is done."""
    encoding: str
    """The encoding it is decoded from or encoded to; empty for averages; for casts, the dtype it had."""
    convention: str
    """The convention of that encoding."""
    dtype: str
    """Safetensors code of the plain values."""
    shape: tuple[int, ...]
    """Elements along each dim."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A recoded tensor and how far its values are from the source's."""

    what: Recoded
    """The tensor."""
    error: Error
    """Difference of decoded values from the products of code and scale; of encoded values, read back, from those
    given; of replicas from their mean; of cast values from the originals.
    """
    infinite: int = 0
    """Number of finite values that became infinite."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        error_data: dict[str, Any] = {"max_abs": self.error.max, "rms": self.error.rms, "exact": self.error.exact}
        if self.infinite:
            error_data["infinite"] = self.infinite
        data: dict[str, Any] = msgspec.to_builtins(self.what)
        return {**data, "shape": list(self.what.shape), **error_data}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor to be written."""

    name: str
    """Stored name in the target."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """As stored."""
    target: Target
    """Where its values come from."""
    step: Step | None = None
    """How its values become one buffer of an encoding; None: they are written as they are."""


def products(view: View, names: Iterable[str], encoding: str) -> list[OutputTensor]:
    """Return the tensors that are written for a view.

    Args:
        view: the target's tensors.
        names: tensors to encode.
        encoding: the encoding to use.
    """
    encoded = frozenset(names)
    outputs = []
    for name, target in view.targets.items():
        if name in encoded:
            outputs.extend(_buffers(view, name, encoding))
        else:
            outputs.append(OutputTensor(name, *view.described(name), target))
    return outputs


def _buffers(view: View, name: str, encoding: str) -> list[OutputTensor]:
    """Return the buffers that one tensor is written as."""
    convention, spec = CONVENTIONS[PREFERRED[encoding]], ENCODINGS[encoding]
    target = view.targets[name]
    dtype, shape = view.described(name)
    buffers = []
    for role in (Role.CODES, Role.SCALE, *([Role.GLOBAL] if spec.has_global else ())):
        step = Step(encoding, convention.name, role, name, dtype, shape)
        stored = convention.stored(name, role, spec)
        buffers.append(OutputTensor(stored, *convention.presented(spec, shape, role), target, step))
    return buffers


def encoded_tensors(view: View, written: Iterable[OutputTensor]) -> dict[str, Encoded]:
    """Return the encoded tensors of a target by table name, both moved and newly encoded.

    Args:
        view: the target's tensors.
        written: the tensors that are written.
    """
    encoded = dict(view.encoded)
    for product in written:
        step = product.step
        if step is not None:
            known_tensor = encoded.get(step.tensor)
            parts = {**(known_tensor.parts if known_tensor else {}), Role(step.role): product.name}
            encoded[step.tensor] = Encoded(step.tensor, step.spec, step.shape, parts, step.convention)
    return encoded


def by_name(written: Iterable[OutputTensor], problems: list[Refusal]) -> dict[str, OutputTensor]:
    """Return output tensors by name; duplicates, and sizes that no machine can hold, are problems."""
    outputs: dict[str, OutputTensor] = {}
    for product in written:
        if prod(product.shape) > _LARGEST:  # else laying it out would never end
            message = f"the tensor would have the shape {list(product.shape)}: a size in the config is not plausible"
            problems.append(Refusal("CORRUPT", message, Where(None, product.name)))
            continue
        if product.name in outputs:
            message = f"{product.target.rule}\nwrites the same name as {outputs[product.name].target.rule}"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, product.name)))
        outputs[product.name] = product
    return outputs
