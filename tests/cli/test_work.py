"""`transaxle plan --write` and `transaxle work`: a conversion in steps, as a job array runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import REFUSED, USAGE, Transaxle, tree

PLAN = ("plan", "ck", "out", "--to", "torchtitan", "--shard-size", "8kB")


def test_the_steps_of_a_job_array(ck: Path, here: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "wanted", *PLAN[3:]).code == 0
    outcome = transaxle(*PLAN, "--items", "5", "--write", "PLAN")
    assert outcome.code == 0
    assert "written into PLAN: next  transaxle work PLAN --begin" in outcome.out
    assert len(json.loads((here / "PLAN").read_text("utf-8"))["items"]) == 5
    assert sorted(path.name for path in here.iterdir()) == ["PLAN", "ck", "wanted"], "nothing else is written"
    outcome = transaxle("work", "PLAN", "--begin")
    assert outcome.out.splitlines() == ["5 items of 5 left to do", "  transaxle work PLAN --items 0-4"]
    outcome = transaxle("work", "PLAN", "--items", "3,0-1")
    assert [line.partition(" · ")[0] for line in outcome.out.splitlines()] == ["item 3", "item 0", "item 1"]
    outcome = transaxle("work", "PLAN", "--commit")
    assert outcome.code == REFUSED
    assert "transaxle work PLAN --items 2,4." in outcome.err
    found = json.loads(transaxle("work", "PLAN", "--items", "2-4", "--json").out)["items"]
    assert [item["number"] for item in found] == [2, 3, 4]
    assert json.loads(transaxle("work", "PLAN", "--begin", "--json").out) == {"items": 5, "left": 0}
    outcome = transaxle("work", "PLAN", "--commit")
    assert outcome.code == 0
    assert "written by 1 process" in outcome.out
    assert tree(here / "out") == tree(here / "wanted")
    assert transaxle("work", "PLAN", "--items", "0").code == REFUSED, "there is nothing left to work on"
    assert transaxle("work", "PLAN", "--begin").code == USAGE, "the target exists"


def test_a_stored_plan_is_executed(ck: Path, here: Path, transaxle: Transaxle) -> None:
    """A table and a config of one's own are in the plan: their files may be gone."""
    config = here / "config.json"
    config.write_bytes((ck / "config.json").read_bytes())
    (ck / "config.json").unlink()
    rules = here / "my.rules"
    rules.write_text("# nothing of my own\n", "utf-8")
    more = ("--config", config, "--rules", rules)
    assert transaxle("convert", ck, "wanted", *PLAN[3:], *more).code == 0
    assert transaxle(*PLAN, "--write", "PLAN", "--jobs", "1", *more).code == 0
    config.unlink()
    rules.unlink()
    outcome = transaxle("work", "PLAN")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"{here / 'out'} · safetensors · torchtitan")
    assert tree(here / "out") == tree(here / "wanted")
    for step, code in (("", "EXISTS"), ("--begin", "EXISTS"), ("--commit", "INCOMPLETE"), ("--items=0", "INCOMPLETE")):
        done = transaxle("work", "PLAN", *step.split(), "--json")
        assert done.codes == [code]
        assert "transaxle verify" in done.json["error"]["refusals"][0]["hint"], "no step of work has --overwrite"
    assert transaxle("verify", "out").code == 0


@pytest.mark.parametrize("typed", ["", "a", "1-", "-1", "3-1", "0,,1", "1..2", "9999999999"])
def test_invalid_worker_numbers_are_usage_errors(typed: str, ck: Path, transaxle: Transaxle) -> None:
    transaxle(*PLAN, "--items", "2", "--write", "PLAN")
    assert transaxle("work", "PLAN", "--items", typed).code == USAGE


def test_options_that_exclude_each_other(ck: Path, here: Path, transaxle: Transaxle) -> None:
    assert transaxle(*PLAN, "--items", "2").code == USAGE
    assert transaxle(*PLAN, "--items", "2", "--write", "PLAN").code == 0
    assert transaxle(*PLAN, "--items", "2", "--write", "PLAN").code == USAGE, "PLAN exists"
    assert transaxle("work", "PLAN", "--begin", "--commit").code == USAGE
    assert "the plan has the items 0-1, and not 2-4" in transaxle("work", "PLAN", "--items", "1-4").err
    assert transaxle("work", "ck", "--begin").code == REFUSED
    assert transaxle("plan", "ck", "ck/out", "--to", "hf", "--write", "other").code == USAGE
    assert not (here / "other").exists(), "a plan that cannot run is not written"
