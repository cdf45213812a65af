"""What the peers themselves say: tiny models in every layout that another library's own code writes or reads.

Nothing here uses Transaxle. A test that compares with a peer marks itself `peers` and skips when `MISSING` is
not empty; the tensors of a case are shared between tests, so treat them as read-only.
"""

from __future__ import annotations

from tests.oracles.cases import MISSING, VARIANTS, Case, case, from_hf, to_hf

__all__ = ["MISSING", "VARIANTS", "Case", "case", "from_hf", "to_hf"]
