"""The public names: each exists, and only those for live models import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import transaxle as tx

CORE = {
    "CODES", "Check", "Checkpoint", "Comparison", "Executor", "Explanation", "Finding", "HubServer", "Leftover", "Plan",
    "Refusal", "Report", "Sharding", "StoredTensor", "Support", "Table", "TransaxleError", "Verification",
    "__version__", "check", "check_rules", "clean", "convert", "derive", "diff", "explain", "info", "open", "plan",
    "report", "serve", "supports", "verify",
}  # fmt: skip
LIVE = {
    "AccelerateHooks", "LightningCheckpoints", "LoadPlanner", "LoadReport", "Random", "Refit", "RefitReport",
    "ReshardReport", "SaveJob", "SavePlanner", "SaveReport", "TrainerCheckpoints", "as_runs", "async_save", "dcp",
    "from_pretrained", "load", "loadable_as", "nn", "parallel", "prepare_async", "quant", "refit",
    "reshard", "save", "save_pretrained", "sharding",
    "state_dict_as", "testkit",
}  # fmt: skip


def test_the_public_names() -> None:
    assert sorted(tx.__all__) == sorted(CORE | LIVE)


@pytest.mark.parametrize("name", sorted(tx.__all__))
def test_each_name_is_the_object_of_that_name(name: str) -> None:
    found = getattr(tx, name)
    assert name in {"CODES", "__version__"} or found.__name__.removeprefix("transaxle.") in {name, "open"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = tx.laod


def _printed(script: str) -> list[str]:
    """Run a script in a process of its own; return the lines that it prints."""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()


SHOWN = """
import pydoc
print(*(name for name in dir(tx) if not name.startswith("__")))
page = pydoc.plain(pydoc.render_doc(tx))
print(*(name for name in tx.__all__ if f"\\n    {name}(" in page))
"""
"""Prints what completion and `help` show of `tx`, one line each."""
WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import transaxle as tx
"""
"""The beginning of a program that has no torch."""


def test_only_live_names_import_torch() -> None:
    script = f"""
import sys, transaxle as tx, transaxle.cli
assert set(dir(tx)) >= {CORE | LIVE!r}
for name in {sorted(CORE)!r}:
    getattr(tx, name)
assert "torch" not in sys.modules
import transaxle.live.load  # a module with the name of a public function does not hide it
assert callable(tx.load) and callable(tx.save)
assert "torch" in sys.modules
{SHOWN}
from transaxle import *
print(*dir())
"""
    completed, helped, starred = (set(line.split()) for line in _printed(script))
    assert completed == (CORE | LIVE) - {"__version__"}
    assert helped >= {"convert", "open", "load", "save"}
    assert starred >= (CORE | LIVE) - {"__version__"}
    assert {"__all__", "__doc__", "__file__", "__version__"} <= set(dir(tx))


def test_without_torch_an_error_says_what_to_install() -> None:
    script = f"""
for name in {sorted(LIVE)!r}:
    for ask in ("tx." + name, "from transaxle import " + name):
        try:
            exec(ask)
        except ImportError as error:
            print(error)
"""
    completed, helped, *errors = _printed(WITHOUT_TORCH + SHOWN + script)
    assert set(completed.split()) == CORE - {"__version__"}
    assert set(helped.split()) >= {"convert", "open"}
    needs = "transaxle.{} needs torch, which is not installed: pip install 'torch>=2.11'"
    assert errors == [needs.format(name) for name in sorted(LIVE) for _ in range(2)]
