"""How much of the house a verb walks through: the modules of the package in which it calls a function.

Whoever follows a `save` reads these modules. The caps go down only.

A module counts if a function of it, a method, a lambda or a generator, is called while the verb runs, in any thread.
What runs when a module is imported does not count: everything is imported before, once. Each verb has a process of its
own, forked after that, so that nothing is cached that it would do; `__init__` methods of dataclasses have no source
and do not count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import tiny

CAPS = {"convert": 52, "load": 62, "save": 62}
"""Verb -> modules that it passes at most.

Two more than when they were set: each verb looks for hashes of its source (`source_hashes`), and for finished work
beside its target (`leftovers`), or asks a catalog what is training state.
"""

PROGRAM = """
import importlib, json, os, pathlib, sys, threading
import torch
import transaxle as tx

src, *targets = sys.argv[1:]
home = os.path.dirname(tx.__file__) + os.sep
for file in pathlib.Path(home).rglob("*.py"):
    if file.stem != "__main__":
        dotted = ".".join(("transaxle", *file.relative_to(home).with_suffix("").parts))
        importlib.import_module(dotted.removesuffix(".__init__"))
for dst in targets:
    if not (child := os.fork()):
        verb = pathlib.Path(dst).name
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{dst} failed")
else:
    sys.exit()
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
pathlib.Path(dst + ".json").write_text(json.dumps(sorted(passed)))
"""


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The modules that each verb passes on a tiny mixture of experts, from safetensors to safetensors."""
    folder = tmp_path_factory.mktemp("passed")
    source = tiny(folder / "source")
    targets = {verb: str(folder / verb) for verb in sorted(CAPS)}
    subprocess.run([sys.executable, "-c", PROGRAM, str(source), *targets.values()], check=True, timeout=600)
    return {verb: json.loads(Path(f"{target}.json").read_text()) for verb, target in targets.items()}


@pytest.mark.parametrize("verb", sorted(CAPS))
def test_a_verb_passes_few_modules(verb: str, passed: dict[str, list[str]]) -> None:
    modules = passed[verb]
    assert "verbs.py" in modules or f"live/{verb}/{verb}.py" in modules, modules
    assert len(modules) <= CAPS[verb], modules
