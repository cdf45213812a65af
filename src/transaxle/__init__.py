"""Portable checkpoints for large PyTorch models: the same model in the layouts of many frameworks, bit for bit.

import transaxle as tx

ck = tx.open("Qwen3-30B-A3B/")          # a mapping of tensors; no tensor is read, and torch is not imported
tx.convert(ck, "out/", to="torchtitan")
tx.load(model, "out/")                  # a live model, sharded in any way; this call imports torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transaxle.errors import CODES, Refusal, TransaxleError

__version__ = "0.2.0"

_LAZY = "transaxle.verbs"
"""Name of the module that defines all public names without an entry in `_ELSEWHERE`; it is imported when a name is
first used.
"""
_ELSEWHERE = {
    "AccelerateHooks": "live.integrations.hugging_face",
    "Check": "readers.checking",
    "Checkpoint": "engine.checkpoint.checkpoint",
    "Comparison": "engine.compare",
    "Executor": "engine.distribute.executors",
    "Explanation": "engine.explanations",
    "Finding": "readers.findings",
    "HubServer": "serving",
    "Leftover": "formats.store.leftovers",
    "LightningCheckpoints": "live.integrations.lightning_io",
    "LoadPlanner": "live.integrations.dcp_planners",
    "LoadReport": "live.model.destination",
    "Plan": "engine.plan.planned",
    "Random": "live.extra_state",
    "Refit": "refit.refitting",
    "RefitReport": "refit.refitting",
    "Report": "engine.carry",
    "ReshardReport": "live.reshard",
    "SaveJob": "live.asynchronous",
    "SavePlanner": "live.integrations.dcp_planners",
    "SaveReport": "live.model.destination",
    "Sharding": "engine.checkpoint_facts",
    "StoredTensor": "engine.checkpoint.stored_tensor",
    "Support": "engine.support",
    "Table": "derivation.sources",
    "TrainerCheckpoints": "live.integrations.hugging_face",
    "Verification": "engine.verification",
    "as_runs": "live.global_tensors",
    "async_save": "live.asynchronous",
    "check_rules": "engine.checkpoint_facts",
    "clean": "formats.store.leftovers",
    "derive": "derivation.sources",
    "explain": "engine.explanations",
    "from_pretrained": "live.integrations.pretrained",
    "load": "live.load",
    "loadable_as": "live.state_dict_adapter",
    "prepare_async": "live.asynchronous",
    "report": "reports.reporting",
    "reshard": "live.reshard",
    "save": "live.save",
    "save_pretrained": "live.integrations.pretrained",
    "sharding": "live.reshard",
    "state_dict_as": "live.state_dict_adapter",
}
"""Public name -> module that defines it, for result types, and for functions on live models, which import torch."""

_ROOMS = frozenset({"dcp", "nn", "parallel", "quant", "refit", "testkit"})
"""Modules that contain public names, such as `tx.quant.MXFP8`; importing any of them imports torch."""

if TYPE_CHECKING:
    from transaxle import dcp, nn, parallel, quant, refit, testkit
    from transaxle.derivation.sources import Table, derive
    from transaxle.engine.carry import Report
    from transaxle.engine.checkpoint.checkpoint import Checkpoint
    from transaxle.engine.checkpoint.stored_tensor import StoredTensor
    from transaxle.engine.checkpoint_facts import Sharding, check_rules
    from transaxle.engine.compare import Comparison
    from transaxle.engine.distribute.executors import Executor
    from transaxle.engine.explanations import Explanation, explain
    from transaxle.engine.plan.planned import Plan
    from transaxle.engine.support import Support
    from transaxle.engine.verification import Verification
    from transaxle.formats.store.leftovers import Leftover, clean
    from transaxle.live.asynchronous import SaveJob, async_save, prepare_async
    from transaxle.live.extra_state import Random
    from transaxle.live.global_tensors import as_runs
    from transaxle.live.integrations.dcp_planners import LoadPlanner, SavePlanner
    from transaxle.live.integrations.hugging_face import AccelerateHooks, TrainerCheckpoints
    from transaxle.live.integrations.lightning_io import LightningCheckpoints
    from transaxle.live.integrations.pretrained import from_pretrained, save_pretrained
    from transaxle.live.load import load
    from transaxle.live.model.destination import LoadReport, SaveReport
    from transaxle.live.reshard import ReshardReport, reshard, sharding
    from transaxle.live.save import save
    from transaxle.live.state_dict_adapter import loadable_as, state_dict_as
    from transaxle.readers.checking import Check
    from transaxle.readers.findings import Finding
    from transaxle.refit.refitting import Refit, RefitReport
    from transaxle.reports.reporting import report
    from transaxle.serving import HubServer
    from transaxle.verbs import check, convert, diff, info, open, plan, serve, supports, verify  # noqa: A004


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = name if name in _ROOMS else _ELSEWHERE.get(name, "")
    try:
        imported = import_module(f"{__name__}.{module}" if module else _LAZY)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "torch":
            raise
        from transaxle.extras import install

        message = f"transaxle.{name} needs torch, which is not installed: {install('torch')}"
        raise ImportError(message, name=error.name) from None
    return imported if name in _ROOMS else getattr(imported, name)


def __dir__() -> list[str]:
    """Return the public names, for completion and `help`; if torch is missing, only names that do not need torch."""
    hidden = () if _has_torch() else filter(_is_live, __all__)
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))}.difference(hidden))


def _is_live(name: str) -> bool:
    """Return whether using a public name imports torch."""
    return name in _ROOMS or _ELSEWHERE.get(name, "").startswith(("live.", "refit."))


def _has_torch() -> bool:
    from importlib.util import find_spec

    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # an import hook may raise ImportError; a torch module without a spec, ValueError
        return False


__all__ = [
    "CODES",
    "AccelerateHooks",
    "Check",
    "Checkpoint",
    "Comparison",
    "Executor",
    "Explanation",
    "Finding",
    "HubServer",
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
    "Support",
    "Table",
    "TrainerCheckpoints",
    "TransaxleError",
    "Verification",
    "__version__",
    "as_runs",
    "async_save",
    "check",
    "check_rules",
    "clean",
    "convert",
    "dcp",
    "derive",
    "diff",
    "explain",
    "from_pretrained",
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
    "save_pretrained",
    "serve",
    "sharding",
    "state_dict_as",
    "supports",
    "testkit",
    "verify",
]
