"""What transformers 5.24 reads wrongly, or cannot load, of the tensors that are encoded for a hub.

Weights whose codes it would silently take for other values stay plain, unless the user names them. What it loads with
an error is encoded, since other programs read it, and a note says so. `tests/oracles/test_encoded_readers.py` holds all
of this against transformers itself.

transformers has two ways to read: it keeps the codes (the method `fp8` on a GPU, compressed-tensors by default), or it
decodes them while it loads (`dequantize=True`, and the method `fp8` where there is no GPU). A weight is listed here if
either way is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Container as Holding
from functools import cache

from transaxle.axes.notation.family import Family, Line
from transaxle.encodings.conventions.convention import COMPRESSED_TENSORS, PREFERRED
from transaxle.encodings.conventions.quantization import module_of
from transaxle.encodings.encoding import ENCODINGS, FLOAT8_BLOCK, MXFP8, NVFP4
from transaxle.engine.views.encode import name_patterns
from transaxle.engine.views.encoded import View
from transaxle.engine.wording import plural
from transaxle.errors import in_both_languages

HUB, MEMORY = "hf", "transformers"
"""The dialect of a hub's files, and the dialect of the models that transformers builds from such files."""
_STACKED = "it does not decode stacks of matrices"
_TURNED = "on a GPU it has no quantized layer with rows of inputs"
_SPLIT = "it splits them while it loads, but not their scales"
_MERGED = "on a GPU it merges matrices of several layers or experts, whose last tiles are smaller"
_SUBCLASS = "on a GPU it does not replace their layers, which are of a subclass of nn.Linear"
_UNEVEN = "without a GPU it takes the tiles of a weight for equally large, and the last one is smaller"
_SUBCLASSED = frozenset({"falcon"})
"""Names of families in which transformers builds linear layers from a subclass of `nn.Linear`."""
_NUMBERED = frozenset({"llama4", "llama4_text"})
"""Families whose stacked experts are split into numbered experts by transformers, if the config describes
compressed-tensors.
"""
_OUT, _IN = ".out_proj.weight", ".in_proj_weight"
"""The ends of two tensor names in an `nn.MultiheadAttention`, whose `out_proj` is a subclass of `nn.Linear`."""
_MATRIX = 2
"""Number of dims of a weight that is not a stack of matrices."""
_READER = "transformers 5.24"
_MISREAD_EXPERTS = {
    NVFP4.name: f"{_READER} reads numbered experts in nvfp4 without their global scales, so with wrong values",
    MXFP8.name: f"{_READER} cannot load numbered experts in mxfp8",
}
_AS_STACKS = "; it reads stacks, which stay plain:  --to safetensors:transformers"


def misread_targets(
    family: Family, view: View, encoding: str, targets: Mapping[str, Sequence[str]], output_rows: Holding[str]
) -> dict[str, str]:
    """Return target tensor name -> reason, for the targets whose codes transformers 5.24 would read wrongly.

    Args:
        family: family of the model.
        view: the tensors of the target.
        encoding: name of the encoding, a key of `ENCODINGS`.
        targets: target tensor name -> its logical tensors.
        output_rows: target tensors whose rows are aligned with outputs.
    """
    fused_groups = [frozenset(line.expression.components) for line in _memory_lines(family)]
    memory_components = frozenset[str]().union(*fused_groups)
    in_blocks = encoding == FLOAT8_BLOCK.name
    present = {name: components for name, components in targets.items() if name in view.targets}
    merged = _find_uneven_merges(family, view, present) if in_blocks else set()

    @cache
    def is_split(components: frozenset[str]) -> bool:
        return components <= memory_components and not any(components <= each for each in fused_groups)

    def reason(name: str, components: Sequence[str]) -> str:
        shape = view.targets[name].shape
        if len(shape) > _MATRIX:
            return _STACKED if in_blocks or family.name not in _NUMBERED else ""
        if name in output_rows:
            return _TURNED
        if is_split(frozenset(components)):
            return _SPLIT
        in_attention = name.endswith(_OUT) and name.removesuffix(_OUT) + _IN in view.targets
        if in_blocks and (family.name in _SUBCLASSED or in_attention):
            return _SUBCLASS
        if in_blocks and any(_is_misread(*sizes) for sizes in zip(shape, FLOAT8_BLOCK.tile, strict=False)):
            return _UNEVEN
        return _MERGED if not merged.isdisjoint(components) else ""

    return {name: why for name, components in present.items() if (why := reason(name, components))}


def _find_uneven_merges(family: Family, view: View, targets: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the logical tensors of modules in which transformers merges matrices that end with a smaller tile.

    The merged matrix has tiles that begin at its first row, while the codes were made with tiles that begin at the
    first row of their own matrix.
    """
    parts = {part for line in _memory_lines(family) for part in line.expression.components[:-1]}
    smaller = {
        components[0]
        for name, components in targets.items()
        if len(components) == 1
        and components[0] in parts
        and len(view.targets[name].shape) == _MATRIX
        and view.targets[name].shape[0] % FLOAT8_BLOCK.tile[0]
    }
    lines = [(module_of(line.name.text), line.expression.components) for line in _memory_lines(family)]
    modules = {module for module, components in lines if not smaller.isdisjoint(components[:-1])}
    return {component for module, components in lines if module in modules for component in components}


def _is_misread(size: int, tile: int) -> bool:
    """Return whether transformers misreads a dim where it decodes: its last tile is smaller than the others, but its
    size is divisible by the number of tiles.
    """
    return _ends_smaller(size, tile) and size % -(-size // tile) == 0


def _ends_smaller(size: int, tile: int) -> bool:
    """Return whether a dim has several tiles, the last of which is smaller than the others."""
    return size > tile and size % tile != 0


def reader_notes(
    family: Family, view: View, encoding: str, targets: Mapping[str, Sequence[str]], names: Collection[str], label: str
) -> Iterator[str]:
    """Yield notes on what transformers 5.24 cannot load, or misreads, because these tensors are encoded.

    Args:
        family: family of the model.
        view: the tensors of the target.
        encoding: name of the encoding, a key of `ENCODINGS`.
        targets: target tensor name -> its logical tensors.
        names: names of the tensors that are encoded.
        label: dialect of the target.
    """
    if encoding == FLOAT8_BLOCK.name:
        yield from _undecodable(view, names)
    if PREFERRED[encoding] != COMPRESSED_TENSORS:
        return
    if family.name in _NUMBERED:
        yield f"{_READER} looks for numbered experts beside a config of compressed-tensors, and finds none here"
    elif label.partition("@")[0] == HUB:
        yield from map(in_both_languages, _expert_notes(family, view, encoding, targets, frozenset(names)))
    if family.name in _SUBCLASSED and ENCODINGS[encoding].code_bits < 8:
        yield f"{_READER} loads layers of a subclass of nn.Linear in {encoding} with dequantize=True only"


def _undecodable(view: View, names: Iterable[str]) -> Iterator[str]:
    """Yield a note on weights in blocks that transformers refuses to decode."""
    uneven = [
        name
        for name in names
        if any(
            _ends_smaller(*sizes) and not _is_misread(*sizes)
            for sizes in zip(view.targets[name].shape[-_MATRIX:], FLOAT8_BLOCK.tile, strict=True)
        )
    ]
    if uneven:
        count = plural(len(uneven), "weight")
        yield (f"{_READER} loads {count} on a GPU only, because their last tiles are smaller ({name_patterns(uneven)})")


def _expert_notes(
    family: Family, view: View, encoding: str, targets: Mapping[str, Sequence[str]], names: Holding[str]
) -> Iterator[str]:
    """Yield notes on numbered experts, which transformers merges into stacks while it loads. If the config describes
    encoded linear layers, transformers reads all experts as encoded alike, and can load plain experts only if the codes
    have eight bits.
    """
    stacks = [line.expression for line in _memory_lines(family) if len(line.expression.dims) > _MATRIX]
    stacked = {component for stack in stacks for component in stack.components}
    buffers = {stored for tensor in view.encoded.values() for stored in tensor.parts.values()}
    numbered = [
        name
        for name, components in targets.items()
        if name in view.targets
        and name not in buffers
        and len(view.targets[name].shape) == _MATRIX
        and not stacked.isdisjoint(components)
    ]
    if ENCODINGS[encoding].code_bits < 8 and any(name not in names for name in numbered):
        yield f"{_READER} cannot load plain numbered experts beside {encoding}{_AS_STACKS}"
    elif encoding in _MISREAD_EXPERTS and any(name in names for name in numbered):
        yield _MISREAD_EXPERTS[encoding] + _AS_STACKS


def _memory_lines(family: Family) -> Sequence[Line]:
    dialect = family.dialect(MEMORY)
    return () if dialect is None else dialect.lines
