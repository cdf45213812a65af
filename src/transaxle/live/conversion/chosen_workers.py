"""A conversion by several workers: those that hand items out, or the ranks of a job.

Nothing is imported for the one that is not asked for: the ranks of a job need torch.
"""

from __future__ import annotations

from collections.abc import Callable

from transaxle.engine.distribute.driver import Launch, convert_on, is_torchrun
from transaxle.engine.distribute.work_plan import ConversionOrder
from transaxle.engine.execute.carry import Report
from transaxle.engine.plan.conversion import Prepared


def convert_by(order: ConversionOrder, prepared: Callable[[], Prepared], launch: Launch) -> Report:
    """Carry a conversion out by the workers that a launch names.

    Args:
        order: what is converted.
        prepared: makes the plan of it; the ranks of a job leave that to the first of them.
        launch: by whom, and how.

    Raises:
        TypeError: nobody knows how to hand items to what it names.
        TransaxleError: as `execute`; UNSUPPORTED where what it needs is not installed.
    """
    if not is_torchrun(launch.on):
        return convert_on(order, prepared(), launch)
    from transaxle.live.conversion.torchrun import convert_together

    return convert_together(order, launch)
