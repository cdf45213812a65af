from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import law
from transaxle.axes.notation.family import Formula
from transaxle.errors import Refused, TransaxleError

CONFIG: dict[str, Any] = {
    "heads": 8,
    "kv": 2,
    "head_dim": None,
    "hidden": 48,
    "types": ["full", "sliding", "full"],
    "moe": "1, 2",
    "only": [0],
    "other": {"heads": 10, "deep": {"x": 3}},
    "flag": False,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("heads/kv", 4),
        ("heads//3", 2),
        ("heads % 3", 2),
        ("-(heads - 3) * 2 + 1", -9),
        ("head_dim|hidden/heads", 6),
        ("absent|heads", 8),
        ("flag|heads", False),
        ("absent|head_dim", None),
        ("absent + 1", None),
        ("absent / 0", None),
        ('types[l] == "full"', True),
        ('types[l + 1] == "full"', False),
        ("types[7]", None),
        ("types[-1]", "full"),
        ("other.heads", 10),
        ("other.deep.x", 3),
        ('other["heads"]', 10),
        ("heads.x", None),
        ("absent.x", None),
        ("absent[0]", None),
        ("l in moe", False),
        ("l + 1 in moe", True),
        ("l in only", True),
        ("l not in only", False),
        ("l in [1, 0]", True),
        ("l in absent", None),
        ("8 if flag else 9", 9),
        ("8 if absent else 9", None),
        ("not flag", True),
        ("not absent", None),
        ("1 < heads <= 8 != 9", True),
        ("1 < absent", None),
        ("True and absent", None),
        ("False and absent", False),
        ("absent and False", False),
        ("absent or True", True),
        ("absent or False", None),
        ("kv and heads % kv == 0", True),
        ("flag and heads % flag == 0", False),
        ("None", None),
    ],
)
def test_values(text: str, value: Any) -> None:
    found = Formula(text)({**CONFIG, "l": 0})
    assert found == value
    assert type(found) is type(value)


@law
@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=4), st.booleans())
def test_connectives_are_certain_or_unknown(values: list[bool | None], conjunction: bool) -> None:
    """What is unknown may become either: the answer is known where both give the same."""
    names = {f"v{i}": value for i, value in enumerate(values)}
    worlds = product(*([True, False] if value is None else [value] for value in values))
    outcomes = {all(world) if conjunction else any(world) for world in worlds}
    wanted = outcomes.pop() if len(outcomes) == 1 else None
    assert Formula((" and " if conjunction else " or ").join(names))(names) is wanted


def test_names() -> None:
    sparse = Formula("l in moe")
    assert Formula("heads/kv|other.heads", {}).names == {"heads", "kv", "other"}
    assert Formula("sparse and flag", {"sparse": sparse}).names == {"l", "moe", "flag"}
    assert Formula("sparse and not flag", {"sparse": sparse})({**CONFIG, "l": 2}) is True


def test_equality_is_that_of_the_text() -> None:
    assert Formula("a", {"a": Formula("b")}) == Formula("a")
    assert len({Formula("a"), Formula("a"), Formula("b")}) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("heads +", "invalid syntax"),
        ("", "invalid syntax"),
        ("f(x)", "only the call len(X) is allowed"),
        ("[x for x in y]", "ListComp is not allowed in formulas"),
        ("lambda: 1", "Lambda is not allowed in formulas"),
        ("a ** b", "Pow is not allowed in formulas"),
        ("a is b", "Is is not allowed in formulas"),
        ("f'{a}'", "JoinedStr is not allowed in formulas"),
        ("a[1:2]", "Slice is not allowed in formulas"),
        ("(a := 1)", "NamedExpr is not allowed in formulas"),
        ("a @ b", "MatMult is not allowed in formulas"),
        ("a\0b", ""),
        ("(" * 5000 + "a" + ")" * 5000, ""),
        ("+".join("a" * 50_000), ""),
        ("-" * 5000 + "a", ""),
        ("-" * 900 + "a", ""),
    ],
)
def test_only_arithmetic_is_read(text: str, why: str) -> None:
    with pytest.raises(Refused) as caught:
        _ = Formula(text).names
    assert caught.value.code == "CORRUPT"
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("heads/3", "SHAPE_MISMATCH", "8 is not divisible by 3"),
        ("heads/zero", "CORRUPT", "zero"),
        ("heads % zero", "CORRUPT", "zero"),
        ("heads < text", "CORRUPT", "not supported"),
        ("heads in heads", "CORRUPT", "not iterable"),
        ("-text", "CORRUPT", "bad operand"),
        ("heads + text", "CORRUPT", "'%9d' is not a number"),
        ("text % heads", "CORRUPT", "'%9d' is not a number"),
        ("text / heads", "CORRUPT", "'%9d' is not a number"),
        ("many * heads", "CORRUPT", "is not a number"),
        ("1 in odd", "CORRUPT", "invalid literal"),
        ("mapping[many]", "CORRUPT", "unhashable"),
    ],
)
def test_what_a_config_may_not_do_to_it(text: str, code: str, why: str) -> None:
    """Configs are untrusted: text is never formatted, lists are never multiplied, and no error goes unexplained."""
    values = {"heads": 8, "zero": 0, "text": "%9d", "many": [1], "odd": "2,²,1", "mapping": {}}
    if text == "1 in odd":
        assert Formula(text)(values) is True
        return
    with pytest.raises(TransaxleError) as caught:
        Formula(text)(values)
    assert caught.value.code == code
    assert text in str(caught.value)
    assert why in str(caught.value)


def test_a_number_finds_the_entry_that_json_writes_as_a_text() -> None:
    sized = Formula("per_layer_config[l].head_dim | head_dim")
    config = {"head_dim": 4, "per_layer_config": {"3": {"head_dim": 8}, "5": {}}}
    assert [sized({**config, "l": layer}) for layer in (2, 3, 5)] == [4, 8, 4]
    assert Formula("table[3]")({"table": {3: "number", "3": "text"}}) == "number"
    assert Formula("table[True]")({"table": {"True": 1}}) is None
    assert Formula("table['3']")({"table": {3: 1}}) is None
