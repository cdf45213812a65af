"""Refit: live weights into inference engines, every rank only its own bytes."""

from transaxle.refit.meeting import meet
from transaxle.refit.refitting import Refit, RefitReport

__all__ = ["Refit", "RefitReport", "meet"]
