"""Drafts written the simplest way, and files of any bytes damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hypothesis import strategies as st

from transaxle.formats.catalog import Draft, nbytes

EDGES = st.sampled_from([0, 1, 4, 8, 16, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])


def build(plan: Draft, folder: Path, data: Mapping[str, bytes]) -> Path:
    """Write a draft whose every byte is of a fragment or of a tensor."""
    files = {file: bytearray(size) for file, size in plan.files.items()}
    known = {file: bytearray(size) for file, size in plan.files.items()}
    parts = [(fragment.file, fragment.offset, fragment.data) for fragment in plan.fragments]
    for name, entry in plan.entries.items():
        at = 0
        for extent in entry.extents:
            size = nbytes(entry.dtype, extent.shape)
            parts.append((extent.file, extent.offset, data[name][at : at + size]))
            at += size
        assert at == len(data[name])
    for file, offset, part in parts:
        files[file][offset : offset + len(part)] = part
        known[file][offset : offset + len(part)] = b"\1" * len(part)
    for file, content in files.items():
        assert 0 not in known[file], "bytes that belong to nothing"
        assert len(content) == plan.files[file]
        folder.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(file).write_bytes(content)
    return folder


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Change bits, bytes and numbers, cut, insert and copy."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at, start = (draw(st.integers(0, max(len(changed) - 1, 0))) for _ in range(2))
        match draw(st.sampled_from(["bit", "byte", "number", "cut", "insert", "copy"])):
            case "bit":
                changed[at : at + 1] = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in changed[at : at + 1])
            case "byte":
                changed[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "number":
                size = draw(st.sampled_from([2, 4, 8]))
                changed[at : at + size] = draw(EDGES).to_bytes(8, "little")[:size]
            case "cut":
                del changed[at : at + draw(st.integers(1, 64))]
            case "insert":
                changed[at:at] = draw(st.binary(max_size=16))
            case "copy":
                changed[at:at] = changed[start : start + 40]
    return bytes(changed)
