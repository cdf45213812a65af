"""Products: the tensors that a conversion writes, each with where its bytes come from and what is done to them."""

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
"""Elements of a tensor."""
Action = Literal["decoded", "encoded", "averaged", "cast"]


class Recoded(msgspec.Struct, frozen=True):
    """A tensor whose numbers are not those of the source."""

    name: str
    """Table name: of the target where it is encoded, of the source otherwise."""
    action: Action
    """What is done."""
    encoding: str
    """From which encoding, or to which; none where replicas are averaged; of what is cast, the type that it had."""
    convention: str
    """In which convention that is stored."""
    dtype: str
    """Safetensors code of the plain values."""
    shape: tuple[int, ...]
    """Elements along each dim."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A tensor whose numbers are not those of the source, and how far they are from those."""

    what: Recoded
    """The tensor."""
    error: Error
    """Decoded values against the products of code and scales; encoded ones, read again, against those given; replicas
    against their mean; cast ones against what they were."""
    infinite: int = 0
    """Finite values that are infinite now."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        found: dict[str, Any] = {"max_abs": self.error.max, "rms": self.error.rms, "exact": self.error.exact}
        if self.infinite:
            found["infinite"] = self.infinite
        what: dict[str, Any] = msgspec.to_builtins(self.what)
        return {**what, "shape": list(self.what.shape), **found}


@dataclass(frozen=True, slots=True)
class Product:
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
    """How these become what is written; None: as they are."""


def products(view: View, names: Iterable[str], encoding: str) -> list[Product]:
    """Return the tensors that a view is written as.

    Args:
        view: the target's tensors.
        names: those that are encoded.
        encoding: into what.
    """
    encoded = frozenset(names)
    found = []
    for name, target in view.targets.items():
        if name in encoded:
            found.extend(_buffers(view, name, encoding))
        else:
            found.append(Product(name, *view.described(name), target))
    return found


def _buffers(view: View, name: str, encoding: str) -> list[Product]:
    """Return the buffers that one tensor is written as."""
    convention, spec = CONVENTIONS[PREFERRED[encoding]], ENCODINGS[encoding]
    target = view.targets[name]
    dtype, shape = view.described(name)
    found = []
    for role in (Role.CODES, Role.SCALE, *([Role.GLOBAL] if spec.has_global else ())):
        step = Step(encoding, convention.name, role, name, dtype, shape)
        stored = convention.stored(name, role, spec)
        found.append(Product(stored, *convention.presented(spec, shape, role), target, step))
    return found


def encoded_tensors(view: View, written: Iterable[Product]) -> dict[str, Encoded]:
    """Return the encoded tensors of a target by table name: those that move, and those that are made.

    Args:
        view: the target's tensors.
        written: what it is written as.
    """
    found = dict(view.encoded)
    for product in written:
        step = product.step
        if step is not None:
            held = found.get(step.tensor)
            parts = {**(held.parts if held else {}), Role(step.role): product.name}
            found[step.tensor] = Encoded(step.tensor, step.spec, step.shape, parts, step.convention)
    return found


def by_name(written: Iterable[Product], problems: list[Refusal]) -> dict[str, Product]:
    """Return products by name; two of one name, and those that no machine can hold, are problems."""
    found: dict[str, Product] = {}
    for product in written:
        if prod(product.shape) > _LARGEST:  # else laying it out would never end
            message = f"it would have the shape {list(product.shape)}: a size that its config gives is no real one"
            problems.append(Refusal("CORRUPT", message, Where(None, product.name)))
            continue
        if product.name in found:
            message = f"{product.target.rule}\nwrites the name of {found[product.name].target.rule}"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, product.name)))
        found[product.name] = product
    return found
