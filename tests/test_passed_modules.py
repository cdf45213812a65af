"""How much of the house a verb walks through: the modules of the package in which it calls a function.

Whoever follows a `save` reads these modules. The caps go down only.

A module counts if a function of it, a method, a lambda or a generator, is called while the verb runs, in any thread.
What runs when a module is imported does not count: everything is imported before. Each verb has a process of its own,
so that nothing is cached that it would do; `__init__` methods of dataclasses have no source and do not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import tiny

CAPS = {"convert": 50, "load": 60, "save": 60}
"""Verb -> modules that it passes at most."""

PROGRAM = """
import importlib, json, os, pathlib, sys, threading
import torch
import transaxle as tx

verb, src, dst = sys.argv[1:]
home = os.path.dirname(tx.__file__) + os.sep
for file in pathlib.Path(home).rglob("*.py"):
    if file.stem != "__main__":
        dotted = ".".join(("transaxle", *file.relative_to(home).with_suffix("").parts))
        importlib.import_module(dotted.removesuffix(".__init__"))
passed = set()

def watch(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(home) and code.co_name != "<module>":
        passed.add(code.co_filename[len(home):])

prepared = {}
if verb != "convert":
    with tx.open(src) as checkpoint:
        prepared = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in checkpoint.items()}
verbs = {name: getattr(tx, name) for name in ("convert", "load", "save")}
work = {
    "convert": lambda: verbs["convert"](src, dst, to="safetensors"),
    "load": lambda: verbs["load"](prepared, src),
    "save": lambda: verbs["save"](prepared, dst, to="safetensors"),
}[verb]
for module in list(sys.modules.values()):  # what opening the source has cached
    if getattr(module, "__name__", "").startswith("transaxle"):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
threading.setprofile(watch)
sys.setprofile(watch)
work()
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(sorted(passed)))
"""


def _passed(verb: str, folder: Path) -> list[str]:
    """Return the modules that a verb passes on a tiny mixture of experts, from safetensors to safetensors."""
    source = tiny(folder / "source")
    command = [sys.executable, "-c", PROGRAM, verb, str(source), str(folder / "target")]
    found: list[str] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600).stdout)
    return found


@pytest.mark.parametrize("verb", sorted(CAPS))
def test_a_verb_passes_few_modules(verb: str, tmp_path: Path) -> None:
    passed = _passed(verb, tmp_path)
    assert "_api.py" in passed or f"live/{verb}/{verb}.py" in passed, passed
    assert len(passed) <= CAPS[verb], passed
