"""The published schemas of `--json` documents, and a check of documents against them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import transaxle.cli

SCHEMAS = Path(transaxle.cli.__file__).parent / "schemas"
ERROR, EVENT, PARTS, PLAN_DOCUMENT = "error", "event", "parts", "plan_document"
"""Documents that no command is named after."""


@cache
def schemas() -> dict[str, Any]:
    """Return the schemas by name."""
    return {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(SCHEMAS.glob("*.json"))}


def closed(schema: Any) -> Any:
    """Return a schema that refuses keys it does not list: users must bear new ones, tests must not."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "required" in schema else {}
    return {**more, **{key: closed(value) for key, value in schema.items()}}


@cache
def _validator(name: str) -> Any:
    known = [(f"{each}.json", Resource.from_contents(closed(schema))) for each, schema in schemas().items()]
    return Draft202012Validator(closed(schemas()[name]), registry=Registry().with_resources(known))


def check(command: str, document: Any) -> None:
    """Check the document that a command printed against its schema."""
    failed = isinstance(document, dict) and set(document) == {"error"}
    problems = list(_validator(ERROR if failed else command).iter_errors(document))
    assert not problems, "\n".join(str(each) for problem in problems for each in (problem, *(problem.context or ())))
