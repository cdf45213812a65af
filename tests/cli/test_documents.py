"""Every `--json` document has a published schema; all runs of these tests hold theirs against it as well."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import CONFIG, tensors, write
from tests.cli import documents
from tests.cli.running import Transaxle
from tests.engine import quantized
from transaxle import families
from transaxle.cli.command import COMMANDS
from transaxle.cli.screen import Screen
from transaxle.engine.distribute.driver import Event
from transaxle.engine.duplicates import PlannedCheck

_WAY = (
    "ls ck", "ls ck --all --as torchtitan", "info ck", "info", "info --family qwen3_moe", "families", "dialects",
    "report ck", "check ck --for transformers", "dialects qwen3_moe", "supports fp8 --to hf",
    "supports dense --to dcp:hff", "plan ck out --to torchtitan", "convert ck out --to torchtitan",
    "plan fp8 decoded --to hf --decode bf16", "convert fp8 decoded --to hf --decode bf16 --verify",
    "plan decoded mx --to hf --encode mxfp8", "verify out", "verify ck out", "diff ck out", "diff ck changed",
    "diff ck changed --numeric", "diff fp8 decoded", "verify ck changed", "clean .", "check-rules own.rules",
    "check-rules own.rules fp8", "explain", "explain LOSSY", "derive --number ck numbered", "derive numbered numbered",
    "plan ck there --to torchtitan --items 2 --write PLAN", "work PLAN --begin", "work PLAN --items 0-1",
    "work PLAN --commit", "plan hf vllm --mesh fsdp=2 --mesh tp=2 --config dense --ranks-per-node 2",
)  # fmt: skip
"""Commands, one after the other, in all forms with documents of their own; demo and `serve` have their own tests."""
_FAILURES = ("ls missing", "ls --nonsense", "convert ck out --to hf", "plan ck out --to hf")
"""Commands that fail after these."""


@pytest.fixture
def around(ck: Path, here: Path) -> Path:
    """What the commands speak of, beside the tiny checkpoint."""
    quantized.store(here / "fp8", quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=1))
    (here / "dense").mkdir()
    (here / "dense/config.json").write_bytes((here / "fp8/config.json").read_bytes())
    changed = tensors()
    changed["model.norm.weight"][0] = np.nan
    del changed["lm_head.weight"]
    write(here / "changed", changed, config=CONFIG)
    (here / "own.rules").write_bytes((Path(families.__file__).parent / "llama.rules").read_bytes())
    return here


def test_what_commands_print_is_as_their_schemas_say(around: Path, transaxle: Transaxle) -> None:
    """The fixture holds every document against its schema."""
    for line in _WAY:
        assert "error" not in transaxle(*line.split(), "--json").json, line
    for line in _FAILURES:
        assert transaxle(*line.split(), "--json").json["error"]["exit_code"], line
    assert {line.split()[0] for line in _WAY} == {*COMMANDS} - {"demo", "serve"}


def test_a_plan_with_everything_in_it(ck: Path) -> None:
    """Python's form has the single copies too."""
    plan = tx.plan(ck, "out", to="automodel")
    tensors = [msgspec.structs.replace(each, arithmetic=(("affine", 2.0, -1.0),)) for each in plan.tensors]
    moved = next(each.transfers for each in tensors if any(transfer.loops for transfer in each.transfers))
    check = PlannedCheck("a", "tie a = b", 8, moved, moved, ("F32", "BF16"))
    more = {"target": "out", "finished": False, "buffers": 0}
    document = msgspec.structs.replace(plan, tensors=tuple(tensors), checks=(check,)).as_json()
    document = json.loads(json.dumps(document))
    documents.check("plan", more | document)
    assert document["checks"][0]["rounded"] == {"first": "F32", "second": "BF16"}
    assert document["tensors"][0]["arithmetic"] == [{"operation": "affine", "scale": 2.0, "shift": -1.0}]
    loop = document["checks"][0]["first"][0]["loops"][0]
    assert tuple(loop.values()) == moved[0].loops[0]


def test_every_command_has_a_schema_that_is_one() -> None:
    known = documents.schemas()
    assert {*known} == {*COMMANDS, documents.ERROR, documents.EVENT, documents.PARTS, documents.PLAN_DOCUMENT}
    for name, schema in known.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"{name}.json"
        for key, value in _properties(schema):
            assert value.get("description"), f"{name}: {key} is not described"


def _properties(schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _properties(value)


def test_events_are_as_their_schema_says() -> None:
    for event in (
        Event(event="begun", items=3, total=9, done=0),
        Event(event="item", items=3, total=9, done=3, item=1),
    ):
        documents.check(documents.EVENT, msgspec.json.decode(msgspec.json.encode(event)))


def test_numbers_without_digits_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    """What Python writes for them is no JSON."""
    Screen().document({"a": [math.nan, {"b": np.float32("inf")}, -math.inf, 1.5], "n": np.int64(3)})
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"a": ["NaN", {"b": "Infinity"}, "-Infinity", 1.5], "n": 3}
