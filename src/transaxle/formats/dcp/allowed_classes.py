"""The classes that a `.metadata` file may name: torch's, under all names that they have had, and Megatron's."""

from __future__ import annotations

from collections.abc import Iterator

from transaxle.formats.pickled.allowed_globals.allowed import ALLOWED, INERT, GlobalRule, Names
from transaxle.formats.pickled.descriptors import Global
from transaxle.formats.pickled.repeats import bare, described, elements, keys

MODULES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
"""Package of torch's classes, and its name before 2.0."""
_PROPERTIES = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata")
"""Module of a tensor's properties, and its name before 2.3."""
_CLASSES = {
    "Metadata": "metadata", "TensorStorageMetadata": "metadata", "BytesStorageMetadata": "metadata",
    "ChunkStorageMetadata": "metadata", "MetadataIndex": "metadata", "StorageMeta": "metadata",
    "_StorageInfo": "filesystem",
}  # fmt: skip
"""Class -> module in the package."""
TENSOR_PROPERTIES = frozenset((module, "TensorProperties") for module in _PROPERTIES)
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")

_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
GLOBALS = {name: tuple(Global(f"{package}.{module}", name) for package in MODULES) for name, module in _CLASSES.items()}
"""Class -> its possible names."""
GLOBALS["Metadata"] += (Global(_MEGATRON, "MCoreMetadata"),)  # megatron-core 0.15
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""Classes of torch's planner: Megatron keeps the plans of all ranks beside the metadata."""
_KINDS_OF_ITEM = ("TENSOR", "SHARD", "BYTE_IO")


def _names() -> Iterator[tuple[str, str]]:
    for names_of_class in GLOBALS.values():
        for global_name in names_of_class:
            yield global_name.module, global_name.name
    for name in _PLANNER:
        yield f"{MODULES[0]}.planner", name
    for member in _KINDS_OF_ITEM:  # up to Python 3.11.3, members of an Enum were pickled by name
        yield f"{MODULES[0]}.planner", f"WriteItemType.{member}"
    yield _MEGATRON, "MCoreSavePlan"  # up to megatron-core 0.15
    for module in _PROPERTIES:
        yield module, "TensorProperties"
        for formats in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
            yield module, formats
            for member in _MEMORY_FORMATS:
                yield module, f"{formats}.{member}"


_BUILDERS = {
    "ChunkStorageMetadata": elements, "MetadataIndex": keys, "BytesStorageMetadata": bare,
    "TensorStorageMetadata": described,
}  # fmt: skip
NAMES: Names = {
    **ALLOWED,
    **dict.fromkeys(_names(), INERT),
    # A name that stands for the one object of `GLOBALS` is found there by its identity, in a tenth of the time.
    **{
        (each.module, each.name): GlobalRule(each, _BUILDERS.get(name))
        for name, possible in GLOBALS.items()
        for each in possible
    },
    (f"{MODULES[0]}.planner", "WriteItem"): GlobalRule(build=elements),
}
"""Globals that this file may name; the files that hold tensors may not."""
ONE_BY_ONE = {
    name: GlobalRule(rule.value) if rule.build in (bare, described, elements, keys) else rule
    for name, rule in NAMES.items()
}
"""The same, without runs."""
