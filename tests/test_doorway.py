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
    "Explanation",
    "Leftover",
    "Plan",
    "Refusal",
    "Report",
    "Sharding",
    "StoredTensor",
    "Table",
    "TransaxleError",
    "Verification",
    "__version__",
    "check_rules",
    "clean",
    "convert",
    "derive",
    "diff",
    "explain",
    "info",
    "open",
    "plan",
    "report",
    "verify",
}
LIVE = {
    "AccelerateHooks",
    "LightningCheckpoints",
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
    "prepare_async",
    "quant",
    "refit",
    "reshard",
    "save",
    "sharding",
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
    """`transaxle.live.load` is a module, `transaxle.load` a function, whichever is imported first."""
    script = "import transaxle.live.load, transaxle as tx; assert callable(tx.load) and callable(tx.save)"
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


def _said(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def test_item_1_tab_shows_the_public_names_and_only_these() -> None:
    """Before anything is used, and after it; without torch those that work without it."""
    shown = "print(*(name for name in dir(tx) if not name.startswith('__')))"
    assert set(_said(f"import transaxle as tx; {shown}; assert 'torch' not in __import__('sys').modules").split()) == (
        CORE | LIVE
    ) - {"__version__"}
    assert set(_said(WITHOUT_TORCH + shown).split()) == CORE - {"__version__"}
    assert {"__all__", "__doc__", "__file__", "__version__"} <= set(dir(tx))


def test_item_1_a_star_gives_the_public_names() -> None:
    assert set(_said("from transaxle import *; print(*dir())").split()) >= (CORE | LIVE) - {"__version__"}


def test_item_1_help_shows_the_public_names() -> None:
    pages = [_said(f"{begin}; import pydoc; print(pydoc.plain(pydoc.render_doc(tx)))") for begin in HELPED]
    for page, functions in zip(pages, ({"convert", "open", "load", "save"}, {"convert", "open"}), strict=True):
        assert all(f"\n    {name}(" in page for name in functions)


HELPED = ("import transaxle as tx", WITHOUT_TORCH.rstrip("\n"))


def test_item_1_without_torch_an_error_says_what_to_install() -> None:
    script = f"""
for name in {sorted(LIVE)!r}:
    for ask in ("tx." + name, "from transaxle import " + name):
        try:
            exec(ask)
        except ImportError as error:
            print(error)
"""
    wanted = [f"transaxle.{name} needs torch, which is not installed: pip install 'torch>=2.11'" for name in LIVE]
    assert _said(WITHOUT_TORCH + script).splitlines() == [line for line in sorted(wanted) for _ in range(2)]
