"""The public names: each is there, and only those that work on live models bring torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import transaxle as tx

CORE = {
    "CODES",
    "Checkpoint",
    "Comparison",
    "Executor",
    "Leftover",
    "Plan",
    "Refusal",
    "Report",
    "StoredTensor",
    "Table",
    "TransaxleError",
    "Verification",
    "__version__",
    "clean",
    "convert",
    "derive",
    "diff",
    "open",
    "plan",
    "verify",
}
LIVE = {
    "AccelerateHooks",
    "LoadPlanner",
    "LoadReport",
    "Random",
    "Refit",
    "RefitReport",
    "ReshardReport",
    "SaveJob",
    "SavePlanner",
    "SaveReport",
    "TrainerCheckpoints",
    "as_runs",
    "async_save",
    "load",
    "loadable_as",
    "nn",
    "parallel",
    "quant",
    "refit",
    "reshard",
    "save",
    "state_dict_as",
}


def test_these_are_the_public_names() -> None:
    assert set(tx.__all__) == CORE | LIVE
    assert len(tx.__all__) == len(set(tx.__all__))


@pytest.mark.parametrize("name", sorted(tx.__all__))
def test_each_name_is_what_it_says(name: str) -> None:
    found = getattr(tx, name)
    assert name in {"CODES", "__version__"} or found.__name__.removeprefix("transaxle.") in {name, "open"}


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = tx.laod


def test_a_module_does_not_hide_the_function_of_its_name() -> None:
    """`transaxle.live.load.load` is a module, `transaxle.load` a function, whichever is imported first."""
    script = "import transaxle.live.load.load, transaxle as tx; assert callable(tx.load) and callable(tx.save)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_only_live_names_bring_torch() -> None:
    names = [name for name in tx.__all__ if name in CORE]
    script = f"""
import sys, transaxle as tx, transaxle.cli
for name in {names!r}:
    getattr(tx, name)
assert "torch" not in sys.modules
tx.load
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
