"""Fields of the objects in a `.metadata` file, each checked: what is of another kind than torch writes is absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transaxle.formats.dcp.allowed_classes import GLOBALS, TENSOR_PROPERTIES
from transaxle.formats.dtype import Shape
from transaxle.formats.pickled.descriptors import DType, Global, Key, Object

MAX_DIMS = 64
"""numpy's cap on the dims of an array."""
_MAX_COUNT = 2**63 - 1


def fields_of(value: object, name: str, *, bare: bool = False) -> Mapping[str, Any] | None:
    """Return the fields of a dataclass by name; None if the value is not of that class.

    Args:
        value: the value in the pickle.
        name: the class.
        bare: it may have no fields.
    """
    if not isinstance(value, Object) or value.args or value.items or value.pairs or value.cls not in GLOBALS[name]:
        return None
    if isinstance(value.state, dict):
        return value.state
    return {} if bare else None


def properties_of(value: object) -> tuple[DType | None, str | None]:
    """Return a tensor's dtype, and its layout if it is not dense.

    The class moved twice and wrote its fields as a tuple; only its first two concern the bytes.
    """
    if not isinstance(value, Object) or (value.cls.module, value.cls.name) not in TENSOR_PROPERTIES:
        return None, None
    state = value.state
    dtype: object = None
    layout: object = None
    if isinstance(state, tuple) and state:
        dtype, layout = state[0], state[1] if len(state) > 1 else None
    elif isinstance(state, dict):
        dtype, layout = state.get("dtype"), state.get("layout")
    name = layout_of(layout)
    return dtype if isinstance(dtype, DType) else None, None if name == "torch.strided" else name


def layout_of(value: object) -> str:
    """Return the name of a layout; a missing one is dense."""
    if value is None:
        return "torch.strided"
    if isinstance(value, Object) and len(value.args) == 1 and isinstance(value.args[0], str):
        return value.args[0]
    return str(value) if isinstance(value, Global) else kind_of(value)


def counts_of(value: object) -> Shape | None:
    """Return a tuple of counts; lists, which old versions wrote, are accepted too."""
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple) or len(value) > MAX_DIMS + 1:
        return None
    for count in value:
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            return None
    return value


def kind_of(value: object) -> str:
    """Return the type of a value, for a message; never its contents."""
    if isinstance(value, Object):
        return f"a {value.cls.module[:100]}.{value.cls.name[:100]}"
    return "a compound key" if isinstance(value, Key) else f"a {type(value).__name__}"
