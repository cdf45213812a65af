"""Hints in the files of a universal checkpoint, which tell DeepSpeed how to cut a tensor among ranks when it loads the
tensor.

DeepSpeed needs hints if the training framework cuts the model itself; a parameter without a hint is cut into equal
shards along dim 0. Parameters that AutoTP has cut need no hints, because each of these parameters has a record of its
cut. Transaxle keeps the hints as plain data, together with the counters and settings of the training run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transaxle.errors import refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.categories import Categories, size_of
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.rank_files import RankModel
from transaxle.formats.deepspeed.universal_record import resolve_view
from transaxle.formats.pickled.descriptors import Global, Object

HINTS = "cuts"
"""Key of the hints in the dict of a run's counters and settings; the value is a dict from parameter name to hint."""
_CUT_AGAIN = (
    "DeepSpeed could not cut this parameter when it loads. Convert the checkpoint that the run saved, instead of this "
    "one."
)
Hint = Mapping[str, Any]
"""How one parameter is cut: a dict with some of the keys `cat_dim`, `param_n_sub_params`, `sub_param_shape`,
`vocab_tensor`."""
_SHAPE_CLASS = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


def hints_of(models: Sequence[RankModel]) -> dict[str, Hint]:
    """Return the hints for the trained parameters of a run, from the universal-checkpoint metadata in its model files.

    Args:
        models: the model files of the run's ranks.

    Raises:
        Refused: with the code CORRUPT if the metadata is malformed; with the code UNSUPPORTED if its version or its
            patterns cannot be read.
    """
    hints: dict[str, Hint] = {}
    for model in models:
        node = model.root.get(keys.INFO)
        if node is None:
            continue
        categories = Categories(node)
        for name in (name for group in model.shapes for name in group if name not in hints):
            hint = _hint(categories, name)
            if hint:
                hints[name] = hint
    return hints


def hints_entry(hints: Mapping[str, Hint]) -> dict[str, Any]:
    """Return a dict with the hints under the key `HINTS`; the dict is empty if there are no hints."""
    return {HINTS: dict(hints)} if hints else {}


def _hint(categories: Categories, name: str) -> dict[str, Any]:
    kind = categories.kind(name)
    fused = categories.fused_parameter(name) if kind == keys.SUB_PARAMS else None
    hint: dict[str, Any] = {}
    if fused is not None:
        hint[keys.SUB_SHAPE] = {keys.SHAPE: list(fused.shape), keys.PARTITION_DIM: fused.dim}
    elif kind == keys.ROW_PATTERNS:
        hint[keys.CAT_DIM] = 1
    elif kind == keys.HALVES_PATTERNS:
        hint |= {keys.CAT_DIM: 0, keys.SUB_COUNT: 2}
    if categories.is_padded_vocabulary(name):
        hint[keys.VOCABULARY] = True
    return hint


def read_hint(file: CheckedValue) -> dict[str, Any]:
    """Read the hint in a parameter's file of a universal checkpoint; an empty hint means the default cut, which is
    along dim 0.

    Raises:
        Refused: with the code CORRUPT if the hint is malformed.
    """
    hint: dict[str, Any] = {}
    for key in (keys.CAT_DIM, keys.SUB_COUNT):
        node = file.get(key)
        if node is not None:
            hint[key] = node.natural()
    if hint == {keys.CAT_DIM: 0}:
        hint = {}
    shape = file.get(keys.SUB_SHAPE)
    if shape is not None:
        state = shape.value.state if isinstance(shape.value, Object) else shape.value
        fields = CheckedValue(state, shape.file, shape.path)
        sizes, dim = [size_of(item) for item in fields[keys.SHAPE].list()], fields[keys.PARTITION_DIM].natural()
        hint[keys.SUB_SHAPE] = {keys.SHAPE: sizes, keys.PARTITION_DIM: dim}
    vocabulary = file.get(keys.VOCABULARY)
    if vocabulary is not None and vocabulary.flag():
        hint[keys.VOCABULARY] = True
    return hint


def check_hint(hint: Hint, name: str, shape: Shape, file: str) -> None:
    """Check that a file's hint fits its parameter's shape.

    Args:
        hint: the hint, as `read_hint` returns it.
        name: name of the parameter.
        shape: shape of the whole tensor.
        file: name of the file with the hint, for error messages.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the hint does not fit the shape.
    """
    sub_shape = hint.get(keys.SUB_SHAPE)
    dim, parts = hint.get(keys.CAT_DIM, 0), hint.get(keys.SUB_COUNT, 1)
    problem = ""
    if dim and dim >= len(shape):
        problem = f"{keys.CAT_DIM} is {dim}"
    elif sub_shape is not None and sub_shape[keys.PARTITION_DIM] >= max(len(sub_shape[keys.SHAPE]), 1):
        problem = f"{keys.PARTITION_DIM} of its {keys.SUB_SHAPE} is {sub_shape[keys.PARTITION_DIM]}"
    elif parts != 1 and (not parts or not shape or shape[dim] % parts):
        problem = f"{keys.SUB_COUNT} is {parts} along dim {dim}"
    if problem:
        message = f"{problem}, which does not fit the tensor's shape {list(shape)}"
        raise refuse("SHAPE_MISMATCH", message, file=file, tensor=name, hint=_CUT_AGAIN)


def hint_fields(hint: Hint, name: str, shape: Shape) -> dict[str, Any]:
    """Return the entries that a parameter's hint adds to the dict in the parameter's file.

    Args:
        hint: the parameter's hint.
        name: name of the parameter.
        shape: shape of the whole tensor.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the hint does not fit the shape.
    """
    fields = {key: value for key, value in hint.items() if key != keys.SUB_SHAPE}
    sub_shape = hint.get(keys.SUB_SHAPE)
    if sub_shape is not None:
        dim, view = sub_shape[keys.PARTITION_DIM], tuple(_as_tuple(size) for size in sub_shape[keys.SHAPE])
        _, parts = resolve_view(view, dim, shape, None)
        sizes = [parts if at == dim else size for at, size in enumerate(view)]
        state = {keys.PATTERNS: [name], keys.SHAPE: tuple(sizes), keys.PARTITION_DIM: dim}
        fields[keys.SUB_SHAPE] = Object(_SHAPE_CLASS, state=state, new=True)
    return fields


def _as_tuple(size: Any) -> Any:
    return tuple(size) if isinstance(size, list | tuple) else size
