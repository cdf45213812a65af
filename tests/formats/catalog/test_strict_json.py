"""JSON with keys given twice: counted by colons, found by their paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transaxle
from transaxle.formats.storage.storage import NotJsonError, members, pairs_in, parse_json, parse_json_as, repeated_keys

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet=':"\\{}[],ab\n'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet=':"\\ab', max_size=4), inner),
)


def count(value: Any) -> int:
    def walk(item: Any) -> Iterator[None]:
        if isinstance(item, dict):
            for inner in item.values():
                yield None
                yield from walk(inner)
        elif isinstance(item, list):
            for inner in item:
                yield from walk(inner)

    return sum(1 for _ in walk(value))


@given(json_values, st.booleans())
def test_each_pair_is_one_colon(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert pairs_in(text) == count(value)
    assert repeated_keys(text) == []


def test_pairs_across_chunks() -> None:
    value = {f'"{i}": \\' * 3: {":" * i: i} for i in range(3000)}
    text = json.dumps(value).encode()
    assert len(text) > 2**20
    assert pairs_in(text) == 6000


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (b'{"a":1,"a":2}', [("a",)]),
        (b'{"a":1,"\\u0061":2}', [("a",)]),
        (b'{"a":{"b":1,"b":1},"c":{"d":[0,{"e":1,"e":2}]}}', [("a", "b"), ("c", "d", "1", "e")]),
        (b'{"a":{"b":1,"b":1},"a":{}}', [("a",), ("a", "b")]),
        (b'{"a":[{"a":1},{"a":1}],"b":"a:a"}', []),
    ],
)
def test_keys_given_twice_are_found(text: bytes, paths: list[tuple[str, ...]]) -> None:
    assert repeated_keys(text) == paths
    assert (pairs_in(text) != count(json.loads(text))) == bool(paths)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"a":"\xff"}', b"{} x", b'{"a":' + b"[" * 10**6])
def test_what_is_no_object(text: bytes) -> None:
    with pytest.raises(NotJsonError):
        members(text)


def test_nesting_is_bounded() -> None:
    with pytest.raises(NotJsonError):
        repeated_keys(b"[" * 10**5 + b"]" * 10**5)


@given(json_values)
def test_text_that_is_not_ambiguous_is_read_as_by_json(value: Any) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == parse_json(b"\xef\xbb\xbf" + text.encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}', '{"a":1,"\\u0061":1}', '[{"b":{"c":1,"c":1}}]', "{", "[" * 100_000, '{"a":1}{"a":1}',
        b'{"\xff":1}',
    ],
)  # fmt: skip
def test_what_two_readers_may_read_in_two_ways_is_not_read(text: str | bytes) -> None:
    with pytest.raises(NotJsonError):
        parse_json(text)
    with pytest.raises(NotJsonError):
        parse_json_as(text, dict[str, int])


def test_another_form_is_refused() -> None:
    assert parse_json_as('{"a":1}', dict[str, int]) == {"a": 1}
    with pytest.raises(NotJsonError):
        parse_json_as('{"a":"1"}', dict[str, int])


_READ_ELSEWHERE = {
    "engine/checkpoint/manifest.py": "the text must be what is written of what was read",
    "engine/distribute/work_plan.py": "the same",
    "engine/distribute/work_place.py": "what one process tells its workers", "families/__init__.py": "shipped",
    "families.py": "shipped", "formats/storage/storage.py": "this", "formats/safetensors.py": "counts keys",
    "formats/shards.py": "counts keys", "move/journal.py": "our own, with checksums",
    "nn/checkpoint_layouts.py": "what one rank tells the others", "parallel/tensor_parallel.py": "shipped",
    "refit/vllm_refit.py": "answers of an engine, which name no tensors",
    "engine/plan/rank_parts.py": "shipped",
    **{
        f"readers/probes/{name}.py": "runs without this package, on what it wrote"
        for name in ("headers", "of_compressed_tensors", "of_gguf", "of_peft", "of_torchtitan", "of_vllm")
    },
    "encodings/conventions/torchao_convention.py": "notes inside the text of a header; no key twice",
}  # fmt: skip
"""Modules that may decode JSON by themselves, and why."""


def test_all_json_of_strangers_goes_through_one_reader() -> None:
    root = Path(transaxle.__file__).parent
    decodes = re.compile(r"(?<!\w)json\.(?:loads?|decode|Decoder)\(")
    found = {
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if decodes.search(path.read_text("utf-8"))
    }
    assert found <= _READ_ELSEWHERE.keys()
