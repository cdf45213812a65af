"""Refit: sending live weights into inference engines, where each rank receives only the bytes of its own shards."""

from transaxle.refit.hops import meet
from transaxle.refit.hub_stream import VllmSource, named_tensors
from transaxle.refit.refitting import Refit, RefitReport
from transaxle.refit.vllm_refit import VllmRefit

__all__ = ["Refit", "RefitReport", "VllmRefit", "VllmSource", "meet", "named_tensors"]
