"""Refit: live weights into inference engines, every rank only its own bytes."""

from transaxle.refit.hub_stream import named_tensors
from transaxle.refit.meeting import meet
from transaxle.refit.plugs.vllm_refit import VllmRefit
from transaxle.refit.plugs.vllm_source import VllmSource
from transaxle.refit.refitting import Refit, RefitReport

__all__ = ["Refit", "RefitReport", "VllmRefit", "VllmSource", "meet", "named_tensors"]
