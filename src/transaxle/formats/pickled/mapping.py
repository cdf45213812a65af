"""Dicts whose keys a stranger chose.

Hashing nested tuples takes time that doubles with each level, and integers can be chosen so that all hashes are equal.
So only plain scalars are hashed; any other key is kept as a `Key`, which is equal only to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transaxle.formats.pickled.descriptors import DType, Global, Key, Object, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.fault import malformed

_PLAIN = frozenset(
    {str, bytes, bool, float, type(None), Global, DType, StorageType, Object, Persistent, TensorRef, Key}
)
_KEPT = frozenset({tuple, int, complex})
_SMALL = 2**64


def put(target: dict[Any, Any], flat: Sequence[Any]) -> None:
    """Add key, value, key, value, … to a dict.

    Raises:
        PickleFault: CORRUPT for a key without a value, a key that no dict can have, and one that is there already.
    """
    if len(flat) % 2:
        raise malformed("a key without a value")
    expected = len(target) + len(flat) // 2
    keys, values = flat[::2], flat[1::2]
    if _PLAIN.issuperset(map(type, keys)):  # the usual case
        target.update(zip(keys, values, strict=True))
    else:
        for key, value in zip(keys, values, strict=True):
            kind = type(key)
            if kind in _PLAIN or (kind is int and -_SMALL < key < _SMALL):
                target[key] = value
            elif kind in _KEPT:
                target[Key(key)] = value
            else:
                raise malformed(f"a {kind.__name__} as a key of a dict")
    if len(target) != expected:
        raise malformed("a dict has the same key twice")
