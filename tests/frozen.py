"""The last import of a process that others are forked from: what was imported before belongs to them all.

A full garbage collection writes into each object that it looks at, and so makes a copy of its page: some 90 MB for each
of the forked processes, if it looks at all of torch and transformers.

The parent of all of them is the server. That the process which asked for them is gone they learn from a pipe.
"""

import gc
from typing import Any

from transaxle.live.save_process import Parent

_parent: Any = Parent
_parent._is_alive = lambda _: True

gc.collect()
gc.freeze()
