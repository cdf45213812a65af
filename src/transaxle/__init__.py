"""Portable checkpoints for large PyTorch models: one model, many layouts, exactly.

import transaxle as tx

ck = tx.open("Qwen3-30B-A3B/")          # a mapping; nothing is loaded, torch is not imported
tx.convert(ck, "out/", to="torchtitan")
tx.load(model, "out/")                  # a live model, sharded in any way; this imports torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transaxle.errors import CODES, Refusal, TransaxleError

__version__ = "0.1.0"

_LAZY = "transaxle.verbs"
"""Where everything below lives that is not imported above: it is loaded when it is first used."""
_ELSEWHERE = {
    "AccelerateHooks": "live.integrations.accelerate_hooks",
    "Checkpoint": "engine.checkpoint.checkpoint",
    "Comparison": "engine.compare.compare",
    "Executor": "engine.distribute.executors",
    "Explanation": "engine.explanations",
    "Leftover": "formats.store.leftovers",
    "LightningCheckpoints": "live.integrations.lightning_io",
    "LoadPlanner": "live.integrations.dcp_planners",
    "LoadReport": "live.model.report",
    "Plan": "engine.plan.planned",
    "Random": "live.training.extra_state",
    "Refit": "refit.refitting",
    "RefitReport": "refit.refitting",
    "Report": "engine.execute.carry",
    "ReshardReport": "live.reexpress.reshard",
    "SaveJob": "live.background.asynchronous",
    "SavePlanner": "live.integrations.dcp_planners",
    "SaveReport": "live.model.report",
    "Sharding": "engine.facts.sharding_facts",
    "StoredTensor": "engine.checkpoint.stored_tensor",
    "Table": "derivation.sources",
    "TrainerCheckpoints": "live.integrations.trainer_callback",
    "Verification": "engine.compare.verification",
    "as_runs": "live.sharding.dcp_chunks",
    "async_save": "live.background.asynchronous",
    "explain": "engine.explanations",
    "load": "live.load.load",
    "loadable_as": "live.reexpress.state_dict_adapter",
    "prepare_async": "live.background.asynchronous",
    "report": "reports.reporting",
    "reshard": "live.reexpress.reshard",
    "save": "live.save.save",
    "sharding": "live.reexpress.model_sharding",
    "state_dict_as": "live.reexpress.state_dict_adapter",
}
"""What is no verb of files -> its module: results, and what works on live models, which imports torch."""

_ROOMS = frozenset({"nn", "parallel", "quant", "refit"})
"""Rooms with public names of their own, `tx.quant.MXFP8`; they import torch."""

if TYPE_CHECKING:
    from transaxle import nn, parallel, quant, refit
    from transaxle.derivation.sources import Table
    from transaxle.engine.checkpoint.checkpoint import Checkpoint
    from transaxle.engine.checkpoint.stored_tensor import StoredTensor
    from transaxle.engine.compare.compare import Comparison
    from transaxle.engine.compare.verification import Verification
    from transaxle.engine.distribute.executors import Executor
    from transaxle.engine.execute.carry import Report
    from transaxle.engine.explanations import Explanation, explain
    from transaxle.engine.facts.sharding_facts import Sharding
    from transaxle.engine.plan.planned import Plan
    from transaxle.formats.store.leftovers import Leftover
    from transaxle.live.background.asynchronous import SaveJob, async_save, prepare_async
    from transaxle.live.integrations.accelerate_hooks import AccelerateHooks
    from transaxle.live.integrations.dcp_planners import LoadPlanner, SavePlanner
    from transaxle.live.integrations.lightning_io import LightningCheckpoints
    from transaxle.live.integrations.trainer_callback import TrainerCheckpoints
    from transaxle.live.load.load import load
    from transaxle.live.model.report import LoadReport, SaveReport
    from transaxle.live.reexpress.model_sharding import sharding
    from transaxle.live.reexpress.reshard import ReshardReport, reshard
    from transaxle.live.reexpress.state_dict_adapter import loadable_as, state_dict_as
    from transaxle.live.save.save import save
    from transaxle.live.sharding.dcp_chunks import as_runs
    from transaxle.live.training.extra_state import Random
    from transaxle.refit.refitting import Refit, RefitReport
    from transaxle.reports.reporting import report
    from transaxle.verbs import check_rules, clean, convert, derive, diff, info, open, plan, verify  # noqa: A004


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = name if name in _ROOMS else _ELSEWHERE.get(name, "")
    try:
        found = import_module(f"{__name__}.{module}" if module else _LAZY)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "torch":
            raise
        from transaxle.extras import install

        message = f"transaxle.{name} needs torch, which is not installed: {install('torch')}"
        raise ImportError(message, name=error.name) from None
    return found if name in _ROOMS else getattr(found, name)


def __dir__() -> list[str]:
    """Return the public names, for Tab and `help`; without torch those that work without it."""
    hidden = () if _has_torch() else filter(_is_live, __all__)
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))}.difference(hidden))


def _is_live(name: str) -> bool:
    """Tell whether a name brings torch."""
    return name in _ROOMS or _ELSEWHERE.get(name, "").startswith(("live.", "refit."))


def _has_torch() -> bool:
    from importlib.util import find_spec

    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # what hides a module raises the first, one without a spec the second
        return False


__all__ = [
    "CODES",
    "AccelerateHooks",
    "Checkpoint",
    "Comparison",
    "Executor",
    "Explanation",
    "Leftover",
    "LightningCheckpoints",
    "LoadPlanner",
    "LoadReport",
    "Plan",
    "Random",
    "Refit",
    "RefitReport",
    "Refusal",
    "Report",
    "ReshardReport",
    "SaveJob",
    "SavePlanner",
    "SaveReport",
    "Sharding",
    "StoredTensor",
    "Table",
    "TrainerCheckpoints",
    "TransaxleError",
    "Verification",
    "__version__",
    "as_runs",
    "async_save",
    "check_rules",
    "clean",
    "convert",
    "derive",
    "diff",
    "explain",
    "info",
    "load",
    "loadable_as",
    "nn",
    "open",
    "parallel",
    "plan",
    "prepare_async",
    "quant",
    "refit",
    "report",
    "reshard",
    "save",
    "sharding",
    "state_dict_as",
    "verify",
]
