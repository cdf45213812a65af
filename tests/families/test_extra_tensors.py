"""A model with one tensor more than its config has: refused, or carried where the target's program has it too.

Every family in every dialect, into every other: a tensor that the config rules out; a bias that a program adds on its
own account; and the state of an optimizer that trained something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.families.test_layers_ahead import EVERY_SIZE
from tests.some import some
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Dialect, Family, Line, Sizes
from transaxle.axes.translation.translate import Translation, translate
from transaxle.errors import Code, TransaxleError
from transaxle.families import builtin
from transaxle.formats.catalog import Entry, Extent

Shapes = Mapping[str, tuple[int, ...]]
SAMPLE = ("llama", "deepseek_v3", "qwen3_moe", "nemotron_h", "hy_v3")
SWEPT = 80
"""Families of whose models all sizes follow from `EVERY_SIZE`, at least."""


def _stored(family: Family, dialect: Dialect, sizes: Sizes) -> Shapes | None:
    """The tensors of a model; None where the keys of its config are others than those here."""
    try:
        return dict(Model(family, sizes, tp=0).stored_shapes(dialect))
    except (TransaxleError, KeyError):
        return None


def _translated(family: Family, source: Dialect, target: Dialect, shapes: Shapes, sizes: Sizes) -> Translation:
    entries = {n: Entry(n, "BF16", s, (Extent((0,) * len(s), s, "file", 0),)) for n, s in shapes.items()}
    return translate(bind(list(entries), family, source, sizes, stored=entries), entries, target, sizes)


def _extra(
    family: Family, dialect: Dialect, sizes: Sizes, shapes: Shapes
) -> Iterator[tuple[Line, str, tuple[int, ...]]]:
    """Names and shapes of tensors that the config rules out, one for each line of one logical tensor."""
    known = sizes.at({})
    for line in dialect.lines:
        (component, *others) = line.expression.components
        when = family.tensors[component].when
        if others or line.read_only or when is None or component in {*family.copies, *family.added}:
            continue
        if not any(isinstance(sizes.settings.get(key), bool | int | str) for key in when.names - family.tensors.keys()):
            continue
        for position in product(*(range(known.get(axis, 0)) for axis in line.name.axes)):
            index = dict(zip(line.name.axes, position, strict=True))
            there = dict.fromkeys(when.names & family.tensors.keys(), False)
            if sizes.holds(when, {}) is not False or sizes.holds(line.when, index, there) is False:
                continue
            numbers = line.name.numbering(known).numbers(position)
            if any(number is None or number < 0 for number in numbers):
                continue
            name = line.name.format(tuple(number or 0 for number in numbers))
            try:
                layout = line.expression.layout(sizes.at(index))
            except (TransaxleError, KeyError):
                break
            if name not in shapes:
                yield line, name, layout.shape
                break


def _fate(family: Family, source: Dialect, target: Dialect, shapes: Shapes, sizes: Sizes, name: str) -> str:
    """What becomes of a tensor: `refused`, `carried`, `left out if zero`, or `kept` under its name."""
    try:
        view = _translated(family, source, target, shapes, sizes)
    except TransaxleError:
        return "refused"
    if view.refusals:
        return "refused"
    if name in view.kept_names:
        return "kept"
    return "left out if zero" if any(check.zero and check.first.name == name for check in view.checks) else "carried"


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*SAMPLE, pytest.param("", marks=pytest.mark.oracle)])
def test_a_tensor_that_the_config_rules_out_is_refused_in_every_dialect(name: str) -> None:
    fates: dict[tuple[str, str, str, str], str] = {}
    families = [name] if name else list(builtin().entries)
    swept = set()
    for each in families:
        family, sizes = builtin()[each], Sizes(builtin()[each], {**EVERY_SIZE, "model_type": each})
        for source in family.dialects:
            shapes = _stored(family, source, sizes)
            if shapes is None:
                continue
            swept.add(each)
            for line, extra, shape in _extra(family, source, sizes, shapes):
                more = {**shapes, extra: shape}
                for target in family.dialects:
                    if target is not source:
                        fate = _fate(family, source, target, more, sizes, extra)
                        fates[each, source.label, target.label, line.text] = fate
    assert len(swept) >= (1 if name else SWEPT)
    assert fates
    assert {key: fate for key, fate in fates.items() if fate != "refused"} == {}


@pytest.mark.parametrize(("name", "config"), [
    ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": []}),
    ("gpt_oss", {}),
    ("qwen3_5_moe_text", {}),
    ("deepseek_v3", {"topk_method": "greedy"}),
])  # fmt: skip
def test_a_bias_of_torchtitans_routers_goes_where_there_is_one(name: str, config: Mapping[str, Any]) -> None:
    """Into torchtitan zeros; from one release of it into the other as it is; everywhere else it must be zero."""
    family = builtin()[name]
    sizes = Sizes(family, {**EVERY_SIZE, "model_type": name, "layer_types": ["full_attention"] * 2, **config})
    titan, hub = family.dialect("torchtitan"), family.dialect("hf")
    assert titan is not None
    assert hub is not None
    shapes = some(_stored(family, hub, sizes))
    view = _translated(family, hub, titan, shapes, sizes)
    zeros = {name: target.shape for name, target in view.targets.items() if name.endswith("expert_bias_E")}
    assert (view.refusals, len(view.notes)) == ((), 1)
    assert zeros
    assert all(not view.targets[name].parts for name in zeros)
    whole = {name: target.shape for name, target in view.targets.items()}
    without = {name: shape for name, shape in whole.items() if name not in zeros}
    for target in family.dialects:
        # Where layers differ, Megatron's distributed checkpoints have no tensor of all of them.
        if target is not titan and not _translated(family, titan, target, without, sizes).refusals:
            fates = {_fate(family, titan, target, whole, sizes, name) for name in zeros}
            assert fates == {"carried" if target.name == "torchtitan" else "left out if zero"}, target.label


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", pytest.param("", marks=pytest.mark.oracle)])
def test_state_without_its_parameter_is_refused_in_every_dialect(name: str, tmp_path: Path) -> None:
    fates: dict[tuple[str, str], list[Code]] = {}
    for number, each in enumerate([name] if name else builtin().entries):
        family = builtin()[each]
        config = {**EVERY_SIZE, "model_type": family.model_types[0]}
        hub = family.dialects[0]
        shapes = _stored(family, hub, Sizes(family, config))
        if shapes is None:
            continue
        tensors = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
        last = next(reversed(tensors))
        held = tensors | {f"optim/{key}/exp_avg": value for key, value in tensors.items()}
        held["optim/ghost.weight/exp_avg"] = tensors[last]
        source = checkpoints.write(tmp_path / str(number), held, config=config)
        for target in family.dialects:
            plan = tx.plan(source, tmp_path / "out", to=f"dcp:{target.label}", optimizer=True, family=each)
            named = [refusal.code for refusal in plan.refusals if "ghost.weight" in str(refusal)]
            fates[each, target.label] = named or [refusal.code for refusal in plan.refusals]
    assert fates
    assert {key: codes for key, codes in fates.items() if not codes} == {}
    by_name = [key for key, codes in fates.items() if "MISSING_TENSOR" in codes]
    assert len(by_name) > 0.7 * len(fates)  # where the model itself can be had in the dialect
