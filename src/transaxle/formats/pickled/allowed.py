"""The table of globals (classes and functions) that a pickle may name; an entry only describes a call and runs nothing.

One table serves all formats: since no entry runs anything, an entry that one format needs does no harm in any other
format. A pickle that names a global outside the table is refused, however harmless that global may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from transaxle.formats.pickled import builders, transformer_engine
from transaxle.formats.pickled.builders import Build
from transaxle.formats.pickled.descriptors import NOTHING, DType, StorageType


class GlobalRule(msgspec.Struct, frozen=True, eq=False):
    """How the interpreter represents an allowed global (class or function), or a call of it."""

    value: Any = NOTHING
    """Python value that represents the global itself; NOTHING means that a `Global` represents it."""
    build: Build | None = None
    """Function that builds the result of a call of the global; None means that the result is an `Object` that describes
    the call."""


Names = Mapping[tuple[str, str], GlobalRule]
"""(module, qualified name) of a global -> how the global is represented."""

INERT = GlobalRule()
"""Entry for a class or function whose calls are only described, not rebuilt."""
MEMBER = GlobalRule()
"""Entry for a call of `getattr`: the attribute must be a method that the table of globals contains under its qualified
name."""

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "int64", "int32", "int16",
    "int8", "uint64", "uint32", "uint16", "uint8", "bool", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
    "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4",
    "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)  # fmt: skip
"""Names of all dtypes of torch 2.13 and earlier versions."""
STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
"""Name of a torch storage class -> name of the dtype of its elements."""

_PYTHON = {
    "_io": ("BytesIO",),
    "builtins": ("object", "list", "dict", "tuple", "str", "int", "float", "bool", "slice", "range"),
    "argparse": ("Namespace",),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "types": ("SimpleNamespace",),
    "uuid": ("UUID", "SafeUUID"),
}
_NUMPY = {
    "numpy": ("dtype", "ndarray", "bool_", "bool", "int64", "int32", "float64", "float32"),
    "numpy.core.multiarray": ("_reconstruct",),
    "numpy._core.multiarray": ("_reconstruct",),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "ml_dtypes": ("bfloat16", "float8_e4m3fn", "float8_e5m2"),
}
_TORCH = {
    "torch": ("Tensor", "device", "Generator", "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine",
              "per_channel_symmetric", "per_channel_affine_float_qparams", "preserve_format", "contiguous_format",
              "channels_last", "channels_last_3d"),
    "torch._utils": ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_nested_tensor",
                     "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass",
                     "_rebuild_device_tensor_from_numpy", "_rebuild_xla_tensor"),
    "torch.nn.parameter": ("Buffer", "UninitializedParameter", "UninitializedBuffer"),
    "torch.nested._internal.nested_tensor": ("NestedTensor", "_rebuild_njt"),
    "torch.serialization": ("_get_layout",),
    "torch.storage": ("_load_from_bytes",),
    "torch.distributed._mesh_layout": ("_FlatLayout", "_MeshLayout"),
    "torch.distributed._shard.metadata": ("ShardMetadata",),
    "torch.distributed._shard.sharded_tensor.api": ("ShardedTensor", "ShardedTensor.ProcessGroupState"),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "ShardedTensorMetadata",
                                                         "TensorProperties"),
    "torch.distributed._shard.sharded_tensor.shard": ("Shard",),
    "torch.distributed._shard.sharding_spec.api": ("EnumerableShardingSpec",),
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": ("ChunkShardingSpec",),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "torch.distributed.remote_device": ("_remote_device",),
    "torch.distributed.tensor": ("DTensor",),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "ShardOrderEntry", "TensorMeta"),
    "torch.distributed.tensor.placement_types": ("Partial", "Replicate", "Shard", "_StridedShard"),
    # Up to release 2.4:
    "torch.distributed._tensor.api": ("DTensor",),
    "torch.distributed._tensor.device_mesh": ("DeviceMesh",),
    "torch.distributed._tensor._dtensor_spec": ("DTensorSpec", "TensorMeta"),
    "torch.distributed._tensor.placement_types": ("DTensorSpec", "TensorMeta", "_Partial", "Partial", "Replicate",
                                                  "Shard", "_StridedShard"),
}  # fmt: skip
_DEEPSPEED = {
    "deepspeed.checkpoint.universal_checkpoint": ("SubparamShape",),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": (
        "ZeroStageEnum",
        *(
            f"ZeroStageEnum.{stage}" for stage in ("disabled", "optimizer_states", "gradients", "weights", "max_stage")
        ),  # up to Python 3.11.3, members of an Enum were pickled by name
    ),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "megatron.enums": ("AttnMaskType", "AttnType", "LayerType", "PositionEmbeddingType"),
    "megatron.model.enums": ("AttnMaskType", "AttnType", "LayerType", "PositionEmbeddingType"),
}

TENSORS = frozenset(
    [("torch._utils", name) for name in _TORCH["torch._utils"]]
    + [
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed._tensor.api", "DTensor"),
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
    ]
    + [("torch.nested._internal.nested_tensor", name) for name in _TORCH["torch.nested._internal.nested_tensor"]]
    + [("torch.nn.parameter", name) for name in _TORCH["torch.nn.parameter"]]
    + list(transformer_engine.TENSORS)
)
"""Functions whose calls return tensors that are not plain views of a storage."""


def _inert(table: Mapping[str, Iterable[str]]) -> Iterator[tuple[tuple[str, str], GlobalRule]]:
    for module, names in table.items():
        for name in names:
            yield (module, name), INERT


def _builders() -> dict[tuple[str, str], GlobalRule]:
    builds: dict[tuple[str, str], Build] = {
        ("_codecs", "encode"): builders.octets,
        ("builtins", "bytearray"): builders.octets,
        ("builtins", "bytes"): builders.octets,
        ("builtins", "complex"): builders.complex_number,
        ("builtins", "set"): builders.collection,
        ("builtins", "frozenset"): builders.collection,
        ("collections", "deque"): builders.collection,
        ("collections", "OrderedDict"): builders.ordered_map,
        ("collections", "Counter"): builders.ordered_map,
        ("collections", "defaultdict"): builders.default_map,
        ("copyreg", "_reconstructor"): builders.describe_reconstructor,
        ("numpy.core.multiarray", "scalar"): builders.numpy_scalar,
        ("numpy._core.multiarray", "scalar"): builders.numpy_scalar,
        ("torch", "Size"): builders.size,
        ("torch._utils", "_rebuild_tensor"): builders.tensor,
        ("torch._utils", "_rebuild_tensor_v2"): builders.tensor_v2,
        ("torch._utils", "_rebuild_tensor_v3"): builders.tensor_v3,
        ("torch._utils", "_rebuild_parameter"): builders.parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): builders.parameter,
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): builders.from_cpu,
        ("torch._tensor", "_rebuild_from_type_v2"): builders.of_type,
        ("torch._tensor", "_rebuild_from_type"): builders.of_type,
        ("torch.nn.parameter", "Parameter"): builders.parameter_class,
    }
    builds |= transformer_engine.BUILDS
    return {name: GlobalRule(build=build) for name, build in builds.items()} | {("builtins", "getattr"): MEMBER}


def _values() -> Iterator[tuple[tuple[str, str], GlobalRule]]:
    for name in DTYPES:
        yield ("torch", name), GlobalRule(DType(name))
    for name, dtype in STORAGES.items():
        for module in ("torch", "torch.cuda"):
            yield (module, name), GlobalRule(StorageType(DType(dtype)))
    untyped = GlobalRule(StorageType(None))
    for name in ("UntypedStorage", "_UntypedStorage"):
        yield ("torch", name), untyped
        yield ("torch.storage", name), untyped


_TABLES = (_PYTHON, _NUMPY, _TORCH, _DEEPSPEED, transformer_engine.INERT)

ALLOWED: Names = {
    **dict(row for table in _TABLES for row in _inert(table)),
    **dict(_values()),
    **_builders(),
}
"""The table of all globals that a pickle may name."""
