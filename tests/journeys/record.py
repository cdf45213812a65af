"""What a journey notes: steps, each with its verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from transaxle.errors import CODES, Code, TransaxleError

MARK, SAMPLED = "journey", "sampled"
STEPS = {
    "convert": "the hub's checkpoint in the trainer's format, by `convert`",
    "load": "the trainer's own loader, strict",
    "live load": "`tx.load` into the trainer's model, strict",
    "train": "three steps of training, in which every buffer moves",
    "save": "saved by the trainer's own means",
    "back": "that to the hub's format, by `convert`",
    "logits": "transformers loads it, no name missing or unexpected, and gives the trainer's logits",
    "live save": "`tx.save` of the trainer's model, to the hub's format or with its optimizer",
    "optimizer": "optimizer state with the weights, into each target that has it",
    "resume": "training goes on, also on another number of ranks",
}
"""Steps of journeys in their order -> what is done."""
EQUAL, PASSED, FAILED = "equal", "passed", "failed"
_CLOSE = 1e-4
"""Largest difference of logits in single precision, relative to the largest of them."""
_NODE = re.compile(r"::test_(\w+)(?:\[(.*)\])?$", re.DOTALL)


def chosen(config: pytest.Config, names: Callable[[], Iterable[str]], sample: Collection[str]) -> list[Any]:
    """Return the names of journeys to run, as parameters: all of them, or the sample alone, which is marked."""
    mark = getattr(pytest.mark, SAMPLED)
    every = f"not {MARK}" not in config.getoption("markexpr")  # only then are registries read, which takes seconds
    return [pytest.param(name, marks=[mark] if name in sample else []) for name in (names() if every else sample)]


def name_of(node: str) -> str:
    """Return a journey's name, of the id of its test."""
    found = _NODE.search(node)
    assert found is not None, node
    words = found[1].replace("_", " ")
    return f"{found[2]}: {words}" if found[2] else words


@dataclass
class Journey:
    """A journey under way."""

    name: str
    peer: str
    """Distribution of the peer."""
    version: str = ""
    """Version of it, set by tests whose peer is in an environment of its own."""
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Names of `STEPS` with verdicts, in the order in which they were done."""

    def passed(self, *steps: str) -> None:
        """Note steps that were done, and whose results were compared as far as there are any."""
        for step in steps:
            self._note(step, PASSED)

    def equal(self, step: str, ours: torch.Tensor, trainers: torch.Tensor) -> None:
        """Note that logits are those of the trainer; fail if they are not."""
        ours, trainers = ours.detach().float().cpu(), trainers.detach().float().cpu()
        assert ours.shape == trainers.shape
        assert bool(trainers.isfinite().all())
        assert trainers.std() > 1e-3, "logits that hardly differ show nothing"
        apart = (ours - trainers).abs().max() / trainers.abs().max()
        assert apart <= _CLOSE, f"{step}: logits differ by {apart:.2g} of the largest"
        self._note(step, EQUAL)

    @contextmanager
    def refused(self, step: str, code: Code, *says: str) -> Iterator[None]:
        """Note that a step is refused with this code, in a text that says all of these; fail if it is not."""
        with pytest.raises(TransaxleError) as error:
            yield
        assert error.value.code == code, str(error.value)
        assert [each for each in says if each not in str(error.value)] == [], str(error.value)
        assert all(each.hint for each in error.value.refusals), f"no way out: {error.value}"
        self._note(step, f"refused: {code}")

    def _note(self, step: str, verdict: str) -> None:
        assert step in STEPS, f"{step}: none of {', '.join(STEPS)}"
        self.steps.append((step, verdict))

    def write(self, folder: Path, worker: str, *, failed: bool) -> None:
        """Add a line to what this worker has noted."""
        assert self.steps or failed, f"{self.name}: no step was noted"
        row = {
            "journey": self.name,
            "peer": self.peer,
            "version": self.version or version(self.peer).partition("+")[0],
            "steps": [*self.steps, *([(FAILED, FAILED)] if failed else [])],
        }
        folder.mkdir(parents=True, exist_ok=True)
        with Path(folder, f"{worker}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def is_verdict(text: str) -> bool:
    """Tell whether this is a verdict that a journey may end with."""
    return text in (EQUAL, PASSED) or text.removeprefix("refused: ") in CODES
