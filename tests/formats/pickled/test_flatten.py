"""Walking nested values to their leaves."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from tests.formats.pickled.assemble import FILE
from tests.formats.pickled.test_interpreter import plain
from transaxle.formats.flattened_state import Odd, flatten, is_tensor
from transaxle.formats.pickled.descriptors import Global, Key, Object, OrderedMap, Scalar, TensorRef
from transaxle.formats.training_state import KeyPath, Leaf


def tensor() -> TensorRef:
    return TensorRef(None, None, 0, (1,), (1,))


def paths(leaves: list[Leaf], kind: str) -> list[KeyPath]:
    return [leaf.path for leaf in leaves if leaf.kind == kind]


def test_kinds() -> None:
    sparse = Object(Global("torch._utils", "_rebuild_sparse_tensor"))
    subclass = Object(Global("my", "Tensor"), (tensor(),))
    leaves = flatten(
        {
            "a": tensor(),
            "b": sparse,
            "c": subclass,
            "d": 1,
            "e": 1.5,
            "f": True,
            "g": Scalar("F32", bytes(4)),
            "h": "text",
            "i": None,
            "j": 2**70,
            "k": Object(Global("argparse", "Namespace")),
        },
        FILE,
    )
    assert paths(leaves, "tensor") == [("a",), ("b",), ("c",)]
    assert paths(leaves, "number") == [("d",), ("e",), ("f",), ("g",)]
    assert paths(leaves, "other") == [("h",), ("i",), ("j",), ("k",)]
    assert [leaf.what for leaf in leaves if leaf.kind == "other"] == ["str", "None", "int", "argparse.Namespace"]


def test_lists_are_walked_only_for_what_they_hold() -> None:
    """As `torch.distributed.checkpoint` does: a list of numbers is one thing, a list of tensors is many."""
    leaves = flatten({"a": [tensor(), 1], "b": [1, 2], "c": [{"d": 3}], "e": (tensor(),), "f": [], "g": ()}, FILE)
    assert paths(leaves, "tensor") == [("a", 0), ("e", 0)]
    assert paths(leaves, "number") == [("a", 1), ("c", 0, "d")]
    assert [(leaf.path, leaf.what) for leaf in leaves if leaf.kind == "other"] == [
        (("b",), "list of 2"),
        (("f",), "list of 0"),
        (("g",), "tuple of 0"),
    ]


def test_keys() -> None:
    leaves = flatten(OrderedMap({1: tensor(), "x": {b"y": 2, None: 3, Key((1, 2)): 4}}), FILE)
    assert [leaf.path for leaf in leaves] == [(1,), ("x", "<bytes>"), ("x", "<NoneType>"), ("x", "<Key>")]
    assert [isinstance(leaf.path[-1], Odd) for leaf in leaves] == [False, True, True, True]


def test_a_tensor_by_itself() -> None:
    (leaf,) = flatten(tensor(), FILE)
    assert (leaf.path, leaf.kind) == (("tensor",), "tensor")


def test_what_is_shared_comes_as_often_as_it_is_there() -> None:
    shared = {"w": tensor()}
    leaves = flatten({"a": shared, "b": [shared]}, FILE)
    assert [leaf.path for leaf in leaves] == [("a", "w"), ("b", 0, "w")]
    assert leaves[0].value is leaves[1].value


@given(plain)
def test_every_leaf_is_where_its_path_leads(what: Any) -> None:
    for leaf in flatten(what, FILE):
        if any(isinstance(key, Odd) for key in leaf.path):
            continue
        found = what
        for key in leaf.path:
            found = found[key]
        assert found is leaf.value or found == leaf.value
        assert not is_tensor(found)
