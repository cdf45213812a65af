"""The optimizer of a run without ZeRO: its state is whole in the model file, under the numbers of the parameters.

The file does not state which parameter has which number, and nothing is paired by shape or order: the state keeps its
numbers, `optim/#<i>/<state>`. The full-precision copies of low-precision weights are the state `fp32`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transaxle.formats.catalog import Entry, NumbersInMemory
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.deepspeed.zero.ranks import RankModel, Tensors
from transaxle.formats.training_state.flatten import flatten
from transaxle.formats.training_state.state import OPTIMIZER, Leaf, arrange, joined
from transaxle.formats.training_state.state_groups import ParamGroup


def read_numbered(
    model: RankModel, inline: NumbersInMemory
) -> tuple[Mapping[str, Entry], Mapping[str, str], Sequence[ParamGroup]]:
    """Read the optimizer's state out of a model file.

    Args:
        model: the model file.
        inline: keeps its numbers.

    Returns:
        the state by name, what is left behind (path -> what it is), and the settings.

    Raises:
        Refused: CORRUPT; UNSUPPORTED for tensors that are no plain views.
    """
    node = model.root.get(keys.OPTIMIZER)
    if node is None:
        return {}, {}, ()
    reader = Tensors(inline, model.file)
    leaves = flatten({keys.OPTIMIZER: node.value}, model.file)
    state = arrange(leaves, file=model.file)
    entries: dict[str, Entry] = {}
    left_behind = dict(state.left_behind)
    masters = 0
    for name, leaf in state.leaves.items():
        if leaf.path[1:2] in ((keys.MASTERS,), (keys.MASTERS_FLAT,)):
            name = f"{OPTIMIZER}#{masters}/{keys.FP32}"
            masters += 1
        elif not name.startswith(OPTIMIZER):
            left_behind[joined(leaf.path)] = "a setting" if leaf.kind == "number" else "a tensor"
            continue
        entries[name] = _entry(reader, name, leaf)
    return entries, left_behind, state.groups


def _entry(reader: Tensors, name: str, leaf: Leaf) -> Entry:
    node = CheckedValue(leaf.value, reader.file, tuple(map(str, leaf.path)))
    if leaf.kind == "tensor":
        return reader.tensor(name, node)
    number = reader.number(name, node)
    if number is None:
        raise node.fault("expected a number")
    return number
