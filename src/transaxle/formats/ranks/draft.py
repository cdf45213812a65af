"""Lays out a folder with one torch file for each rank, as `torch.save` writes FSDP2's state dicts (verl does so).

    model_world_size_4_rank_0.pt         the rank's part of each parameter, and every buffer whole
    optim_world_size_4_rank_0.pt         the rank's part of the optimizer's state
    extra_state_world_size_4_rank_0.pt   other training state, equal on all ranks
    fsdp_config.json                     the number of ranks

A parameter is a pickled DTensor, cut over the ranks of a mesh with one dim as `torch.chunk` cuts dim 0: parts may be
uneven or empty. The pickles have the form of torch 2.13. torch's `load_state_dict` requires that this mesh equals that
of the model: its device type, its ranks, and the name of its dim.

Only sources that a trainer saved as DTensors say which of a model's tensors are buffers. In other sources, tensors
without dims, tensors of integers and tensors with the usual names of buffers count as buffers. If that is wrong,
`load_state_dict` fails, because it copies no DTensor into a plain tensor.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from transaxle.arguments import Degrees
from transaxle.axes.geometry import Interval, MeshCut, place
from transaxle.errors import Faults
from transaxle.formats.catalog import Draft, Entry, Extent, Fragment, Shape, Spec, elements_shape, nbytes
from transaxle.formats.flattened_state import Nesting, nest_state, optimizer_path
from transaxle.formats.pickled.descriptors import CODES, DType, Global, Object, OrderedMap, Shared, TensorRef
from transaxle.formats.registry import FSDP_CONFIG, RANKS
from transaxle.formats.torch_file.draft import lay_out_value, reference, settings_to_save, tensor_size
from transaxle.formats.training_state import GROUPS, NAMES, PARAMS, KeyPath, ParamGroup, join_path

_VERSION = 2
"""Version of FSDP whose files these are."""
_DTYPES = {code: DType(name) for name, code in CODES.items()}
"""Safetensors dtype code -> torch dtype."""
_FLOATS = ("F", "BF", "C")
"""Beginnings of the codes of dtypes that parameters have: floating-point and complex numbers."""
_BUFFERS = frozenset({
    "running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "e_score_correction_bias",
    "expert_bias", "tokens_per_expert", "layer_scalar", "masked_bias", "_extra_state",
})  # fmt: skip
"""Last segments of the names that buffers of models have."""
_SHOWN = 4
"""Largest number of tensor names that a note lists."""
_WITHOUT = "Write the weights alone: --no-optimizer (optimizer=False)."
_GROUP = "0"
"""Name of torch's process group of all ranks."""
_STATE = "state"

_DEVICE_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_LAYOUT = Global("torch.distributed._mesh_layout", "_MeshLayout")
_FLAT_LAYOUT = Global("torch.distributed._mesh_layout", "_FlatLayout")
_TENSOR = Global("torch.distributed.tensor", "DTensor")
_SPEC, _META, _ORDER = (
    Global("torch.distributed.tensor._dtensor_spec", name) for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
)
_SHARD = Global("torch.distributed.tensor.placement_types", "Shard")
_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")
_WRAP = Global("torch._utils", "_rebuild_wrapper_subclass")
_SIZE = Global("torch", "Size")
_STRIDED = Object(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CPU = Object(Global("torch", "device"), ("cpu",))


class _Sets(NamedTuple):
    """The tensors of the three sets of rank files."""

    model: list[Spec]
    optimizer: list[Spec]
    extra: list[Spec]


class _Numbering(NamedTuple):
    """How the files refer to the parameters of the optimizer."""

    keys: Mapping[str, int | str]
    """Parameter name -> its number, or its name."""
    groups: Sequence[Mapping[str, object]]
    """Parameter groups to write."""
    notes: tuple[str, ...]


def draft(
    tensors: Sequence[Spec],
    *,
    groups: Sequence[ParamGroup] = (),
    in_order: bool = False,
    fsdp: Degrees | None = None,
    whole: Collection[str] | None = None,
    training: Mapping[KeyPath, object] = MappingProxyType({}),
    training_paths: Mapping[str, KeyPath] = MappingProxyType({}),
    **_unused: object,
) -> Draft:
    """Lay out the files of all ranks.

    Args:
        tensors: the tensors to write, under the whole model's names.
        groups: parameter groups of the optimizer.
        in_order: whether the groups list all parameters in the order in which the optimizer numbers them.
        fsdp: the number of FSDP ranks, and their mesh; None means a single rank.
        whole: names of the tensors that every rank has whole, such as buffers; None means that this is unknown.
        training: values of the training state that are not tensors, by key path.
        training_paths: names of those tensors that are training state -> their key path.
        **_unused: options that the layout does not depend on: each rank has one file of weights, without notes.

    Raises:
        Refused: with every tensor that cannot be stored, and the code UNSUPPORTED, NAME_COLLISION or SHAPE_MISMATCH.
    """
    fsdp = fsdp or Degrees()
    sets = _Sets([], [], [])
    for spec in tensors:
        is_state = optimizer_path(spec.name) is not None
        (sets.extra if spec.name in training_paths else sets.optimizer if is_state else sets.model).append(spec)
    trained = {_parameter(spec.name) for spec in sets.optimizer}.union(*(group[PARAMS] for group in groups))
    plain = {spec.name for spec in sets.model if _is_whole(spec, whole, trained)}
    _check(tensors, sets, plain)
    numbering = _number(sets.optimizer, groups, in_order=in_order)
    drafted = _RankFiles(fsdp, plain)
    for rank in range(fsdp.dp):
        drafted.add_model(rank, sets.model)
        if sets.optimizer or groups:
            drafted.add_optimizer(rank, sets.optimizer, numbering)
        if sets.extra or training:
            drafted.add_extra(rank, sets.extra, training_paths, training)
    drafted.add(FSDP_CONFIG, json.dumps({"FSDP_version": _VERSION, "world_size": fsdp.dp}, indent=4).encode())
    notes = (*_buffer_notes(plain, whole, fsdp), *numbering.notes)
    return drafted.draft(tensors, (*notes, _mesh_note(fsdp)))


def _parameter(name: str) -> str:
    """Return the parameter to which an optimizer's state belongs; for any other tensor, the tensor's own name."""
    path = optimizer_path(name)
    return name if path is None else str(path[2])


def _is_whole(spec: Spec, whole: Collection[str] | None, trained: Collection[str]) -> bool:
    """Return whether every rank has the whole of a model's tensor, because it is a buffer; FSDP2 cannot shard tensors
    without dims.
    """
    if whole is not None or not spec.shape:
        return not spec.shape or spec.name in (whole or ())
    is_buffer = not spec.dtype.startswith(_FLOATS) or spec.name.rpartition(".")[2] in _BUFFERS
    return is_buffer and spec.name not in trained


def _check(tensors: Sequence[Spec], sets: _Sets, plain: Collection[str]) -> None:
    """Refuse tensors that a torch file cannot hold, and optimizer state that cannot be cut as its parameter is.

    Raises:
        Refused: see `draft`.
    """
    faults = Faults()
    names_so_far: set[str] = set()
    weights = {spec.name: spec for spec in sets.model}
    for spec in tensors:
        tensor_size(spec, names_so_far, faults)
        names_so_far.add(spec.name)
    for spec in sets.optimizer:
        weight = weights.get(_parameter(spec.name))
        if weight is None:
            message = f"it is state of {_parameter(spec.name)}, which is not among the weights"
            faults.add("UNSUPPORTED", message, None, spec.name, _WITHOUT)
        elif spec.shape and spec.shape != weight.shape and weight.name not in plain:
            message = f"its shape is {list(spec.shape)}, that of the weight {list(weight.shape)}: ranks cut both alike"
            faults.add("UNSUPPORTED", message, None, spec.name, _WITHOUT)
    if faults:
        raise faults.error()


def _number(state: Sequence[Spec], groups: Sequence[ParamGroup], *, in_order: bool) -> _Numbering:
    """Number the optimizer's parameters as torch's optimizers do, if their order is known; else refer to them by name.

    Args:
        state: tensors of the optimizer's state.
        groups: parameter groups of the optimizer.
        in_order: whether the groups list the parameters in the order in which the optimizer numbers them.
    """
    parameters = dict.fromkeys(_parameter(spec.name) for spec in state)
    listed = [parameter for group in groups for parameter in group[PARAMS]]
    if in_order and parameters.keys() <= set(listed) and len(set(listed)) == len(listed):
        keys = {parameter: number for number, parameter in enumerate(listed)}
        numbered = [
            {**group, PARAMS: [keys[parameter] for parameter in group[PARAMS]], NAMES: list(group[PARAMS])}
            for group in groups
        ]
        return _Numbering(keys, numbered, ())
    if not parameters and not groups:
        return _Numbering({}, (), ())
    note = (
        "the source does not tell in which order its optimizer numbers the parameters, so the optimizer's files name "
        "them: load them with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
    )
    return _Numbering({parameter: parameter for parameter in parameters}, groups, (note,))


def _buffer_notes(plain: Collection[str], whole: Collection[str] | None, fsdp: Degrees) -> tuple[str, ...]:
    if not plain or whole is not None:
        return ()
    names = sorted(plain)
    examples = ", ".join(names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)
    return (f"by their names and types, {len(names)} tensors are buffers, whole in the files of {fsdp.dp}: {examples}",)


def _mesh_note(fsdp: Degrees) -> str:
    dim = "a dim without a name" if fsdp.mesh_dim is None else f"the dim {fsdp.mesh_dim!r}"
    return f"torch 2.13 loads the files into a model that FSDP2 shards over {dim} of {fsdp.dp} {fsdp.device} ranks"


class _RankFiles:
    """The files of all ranks, as far as they are laid out.

    Args:
        fsdp: the number of ranks, and their mesh.
        plain: names of the model's tensors that every rank has whole.
    """

    def __init__(self, fsdp: Degrees, plain: Collection[str]) -> None:
        self._fsdp = fsdp
        self._plain = plain
        self._extents: dict[str, list[Extent]] = {}
        self._copies: dict[str, list[Extent]] = {}
        self._files: dict[str, int] = {}
        self._owners: dict[str, dict[str, int]] = {}
        self._fragments: list[Fragment] = []

    def add_model(self, rank: int, tensors: Sequence[Spec]) -> None:
        """Lay out a rank's file with its parts of the model."""
        contents = _RankContents(self._fsdp, rank)
        values = OrderedMap({spec.name: contents.add(spec, is_cut=spec.name not in self._plain) for spec in tensors})
        self._lay_out("model", contents, values)

    def add_optimizer(self, rank: int, tensors: Sequence[Spec], numbering: _Numbering) -> None:
        """Lay out a rank's file with its parts of the optimizer's state; numbers in it, such as steps, are whole."""
        contents = _RankContents(self._fsdp, rank)
        states: dict[int | str, dict[str, object]] = {}
        for spec in tensors:
            path = optimizer_path(spec.name)
            assert path is not None
            is_cut = bool(spec.shape) and _parameter(spec.name) not in self._plain
            states.setdefault(numbering.keys[_parameter(spec.name)], {})[str(path[3])] = contents.add(
                spec, is_cut=is_cut
            )
        groups = [
            {key: settings_to_save(setting, contents.storages) for key, setting in group.items()}
            for group in numbering.groups
        ]
        self._lay_out("optim", contents, {_STATE: states, GROUPS: groups})

    def add_extra(
        self, rank: int, tensors: Sequence[Spec], paths: Mapping[str, KeyPath], training: Mapping[KeyPath, object]
    ) -> None:
        """Lay out a rank's file with other training state; see `draft` for the arguments."""
        contents = _RankContents(self._fsdp, rank)
        values: dict[str, object] = {spec.name: contents.add(spec, is_cut=False) for spec in tensors}
        values |= {join_path(path): settings_to_save(value, contents.storages) for path, value in training.items()}
        nesting = Nesting(None, {**paths, **{join_path(path): path for path in training}})
        self._lay_out("extra_state", contents, nest_state(values, nesting, ()))

    def add(self, file: str, data: bytes) -> None:
        """Add a file whose contents are known."""
        self._files[file] = len(data)
        self._fragments.append(Fragment(file, 0, data))

    def _lay_out(self, kind: str, contents: _RankContents, value: object) -> None:
        file = f"{kind}_world_size_{self._fsdp.dp}_rank_{contents.rank}.pt"
        layout = lay_out_value(file, value, contents.storages)
        self._files[file] = layout.size
        self._owners[file] = {"dp": contents.rank}
        self._fragments += (Fragment(file, at, data) for at, data in layout.fragments)
        for part in contents.parts:
            is_copy = not part.is_cut and contents.rank > 0
            extents = (self._copies if is_copy else self._extents).setdefault(part.name, [])
            if nbytes(part.dtype, part.shape):
                extents.append(Extent(part.start, part.shape, file, layout.offsets[part.storage]))

    def draft(self, tensors: Sequence[Spec], notes: tuple[str, ...]) -> Draft:
        """Return the layout of all files."""
        entries = {
            name: Entry(name, spec.dtype, spec.shape, tuple(extents))
            for spec in {spec.name: spec for spec in tensors}.values()
            for name, extents in [(spec.name, self._extents[spec.name])]
        }
        copies = {name: tuple(extents) for name, extents in self._copies.items() if extents}
        fragments = tuple(self._fragments)
        return Draft(RANKS.name, entries, self._files, fragments, copies=copies, owners=self._owners, notes=notes)


class _Part(NamedTuple):
    """A rank's part of a tensor."""

    name: str
    dtype: str
    start: Shape
    """Index of the part's first element in the whole tensor."""
    shape: Shape
    storage: int
    """Number of the part's tensor storage in the rank's file."""
    is_cut: bool
    """Whether the ranks have different parts."""


class _RankContents:
    """The tensors in one file of a rank.

    Args:
        fsdp: the number of ranks, and their mesh.
        rank: the rank.
    """

    def __init__(self, fsdp: Degrees, rank: int) -> None:
        self._fsdp = fsdp
        self.rank = rank
        self.storages: list[int | bytes] = []
        """Size in bytes, or contents, of each tensor storage in the file."""
        self.parts: list[_Part] = []
        self._mesh: Shared | None = None
        self._placements = Shared((Object(_SHARD, state={"dim": 0}, new=True),))
        self._order = Shared((Object(_ORDER, (0, (0,)), new=True),))

    def add(self, spec: Spec, *, is_cut: bool) -> TensorRef | Object:
        """Add this rank's part of a tensor to the file, and return its description for the pickle."""
        whole = reference(spec.dtype, spec.shape, 0)  # counts packed elements as one, as torch does
        start, stop = self._rows(whole.shape) if is_cut else (0, whole.shape[0] if whole.shape else 1)
        local = elements_shape((stop - start, *whole.shape[1:]) if whole.shape else (), spec.dtype)
        origin = elements_shape((start, *(0 for _ in whole.shape[1:])) if whole.shape else (), spec.dtype)
        self.parts.append(_Part(spec.name, spec.dtype, origin, local, len(self.storages), is_cut))
        part = reference(spec.dtype, local, len(self.storages))
        self.storages.append(nbytes(spec.dtype, local))
        return self._as_dtensor(part, whole, _DTYPES[spec.dtype]) if is_cut else part

    def _rows(self, shape: Shape) -> Interval:
        intervals = place(shape, [MeshCut(0, self._fsdp.dp, self.rank)])[0]
        return intervals[0] if intervals else (shape[0], shape[0])

    def _as_dtensor(self, part: TensorRef, whole: TensorRef, dtype: DType) -> Object:
        """Return the description of a DTensor; the mesh is written once in each file.

        Args:
            part: this rank's part of the tensor.
            whole: the whole tensor.
            dtype: dtype of the tensor.
        """
        if self._mesh is None:
            self._mesh = Shared(self._device_mesh())
        spec = Object(
            _SPEC,
            state={
                "mesh": self._mesh,
                "placements": self._placements,
                "tensor_meta": Object(_META, (Object(_SIZE, (whole.shape,)), whole.strides, dtype), new=True),
                "shard_order": self._order,
                "use_strided_shard_as_shard_order": False,
                "_hash": None,
            },
            new=True,
        )
        wrapped = (_TENSOR, dtype, whole.shape, whole.strides, 0, _STRIDED, _CPU, False)
        return Object(_REBUILD, (_WRAP, _TENSOR, wrapped, {"_local_tensor": part, "_spec": spec}))

    def _device_mesh(self) -> Object:
        fsdp = self._fsdp
        sizes, strides = ((), ()) if fsdp.dp == 1 else ((fsdp.dp,), (1,))  # torch omits a mesh dim of size 1
        layout = Object(_FLAT_LAYOUT, state={"shape": sizes, "stride": strides}, new=True)
        self.storages.append(np.arange(fsdp.dp, dtype="<i4").tobytes())
        return Object(
            _DEVICE_MESH,
            state={
                "_device_type": fsdp.device,
                "_layout": Object(_LAYOUT, state={"axes": (layout,)}, new=True),
                "_rank_map": reference("I32", (fsdp.dp,), len(self.storages) - 1),
                "_mesh_dim_names": None if fsdp.mesh_dim is None else (fsdp.mesh_dim,),
                "_root_mesh": None,
                "_flatten_rank_map": tuple(range(fsdp.dp)),
                "_thread_id": None,
                "_flatten_mapping": {},
                "_dim_group_names": [_GROUP],
                "_rank": self.rank,
                "_coordinate_on_dim": (self.rank,),
                "_hash": None,
            },
            new=True,
        )
