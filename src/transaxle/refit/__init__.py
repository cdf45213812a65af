"""Refit: live weights into inference engines, every rank only its own bytes."""

from transaxle.refit.hub_stream import named_tensors
from transaxle.refit.meeting import meet
from transaxle.refit.refitting import Refit, RefitReport

__all__ = ["Refit", "RefitReport", "meet", "named_tensors"]
