"""Hints in the files of a universal checkpoint: how a run without records cuts the tensor again.

AutoTP's live parameters carry records and need none of this. Training frameworks that cut their models themselves have
no records: there DeepSpeed follows these keys, and without them cuts every parameter along dim 0 in one part. Hints are
plain data, so that they travel with the other facts about a run.
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
from transaxle.formats.deepspeed.universal_record import resolved
from transaxle.formats.pickled.descriptors import Global, Object

HINTS = "cuts"
"""Key of the hints among the facts about a run: parameter -> hint."""
_CUT_AGAIN = "DeepSpeed could not cut this parameter again. Convert the run's own checkpoint once more."
Hint = Mapping[str, Any]
"""Some of `cat_dim`, `param_n_sub_params`, `sub_param_shape` and `vocab_tensor`."""
_SHAPE_CLASS = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


def hints_of(models: Sequence[RankModel]) -> dict[str, Hint]:
    """Return the hints for the trained parameters of a run, by its metadata.

    Args:
        models: the model files of its ranks.

    Raises:
        Refused: CORRUPT, UNSUPPORTED for metadata that is malformed.
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
    """Return the hints as an entry of the facts about a run; empty where there are none."""
    return {HINTS: dict(hints)} if hints else {}


def _hint(categories: Categories, name: str) -> dict[str, Any]:
    kind = categories.kind(name)
    fused = categories.fused(name) if kind == keys.SUB_PARAMS else None
    hint: dict[str, Any] = {}
    if fused is not None:
        hint[keys.SUB_SHAPE] = {keys.SHAPE: list(fused.shape), keys.PARTITION_DIM: fused.dim}
    elif kind == keys.ROW_PATTERNS:
        hint[keys.CAT_DIM] = 1
    elif kind == keys.HALVES_PATTERNS:
        hint |= {keys.CAT_DIM: 0, keys.SUB_COUNT: 2}
    if categories.pads(name):
        hint[keys.VOCABULARY] = True
    return hint


def hint_in(file: CheckedValue) -> dict[str, Any]:
    """Return the hint in a file of a universal checkpoint; empty for the default, a column-parallel parameter.

    Raises:
        Refused: CORRUPT where it is malformed.
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
        hint: the hint.
        name: of the parameter.
        shape: of the whole tensor.
        file: the file that holds it.

    Raises:
        Refused: SHAPE_MISMATCH.
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


def written(hint: Hint, name: str, shape: Shape) -> dict[str, Any]:
    """Return what a pickle says beside a tensor.

    Args:
        hint: of its parameter.
        name: of its parameter.
        shape: of the whole tensor.

    Raises:
        Refused: SHAPE_MISMATCH where the hint is about a parameter of another shape.
    """
    found = {key: value for key, value in hint.items() if key != keys.SUB_SHAPE}
    said = hint.get(keys.SUB_SHAPE)
    if said is not None:
        dim, asked = said[keys.PARTITION_DIM], tuple(_tupled(size) for size in said[keys.SHAPE])
        _, parts = resolved(asked, dim, shape, None)
        sizes = [parts if at == dim else size for at, size in enumerate(asked)]
        state = {keys.PATTERNS: [name], keys.SHAPE: tuple(sizes), keys.PARTITION_DIM: dim}
        found[keys.SUB_SHAPE] = Object(_SHAPE_CLASS, state=state, new=True)
    return found


def _tupled(size: Any) -> Any:
    return tuple(size) if isinstance(size, list | tuple) else size
