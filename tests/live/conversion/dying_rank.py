"""The program on a rank of a job of which one rank is killed at a point.

    torchrun … -m tests.live.conversion.dying_rank RANK POINT convert …

The other ranks take their time, so that the one that dies has something to do.
"""

from __future__ import annotations

import os
import sys
import time

from tests.engine.killed import Death
from transaxle.cli import main
from transaxle.engine.distribute.item_work import do_item
from transaxle.live import torchrun

_PAUSE = 0.5
"""Seconds before each item of another rank."""


def _slow(text: bytes, number: int) -> bytes:
    time.sleep(_PAUSE)
    return do_item(text, number)


if __name__ == "__main__":
    dying, point, *command = sys.argv[1:]
    if os.environ["RANK"] == dying:
        Death(int(point)).prepare()
    else:
        torchrun.do_item = _slow  # type: ignore[attr-defined]
    sys.exit(main(command))
