"""Keys of DCP items: tensor names, and the keys of the state dict that torch saves and loads.

Model tensors are written under their names, as keys of the state dict itself. The optimizer's state is written under
torchtitan's keys, `optimizer.state.<parameter>.<state>`, which is also what torch flattens `{"optimizer":
get_optimizer_state_dict(...)}` to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transaxle.formats.training_state.nesting import optimizer_path
from transaxle.formats.training_state.state import KeyPath
from transaxle.formats.training_state.state_groups import GROUPS

_OPTIMIZER = "optimizer"
_FLATTENED = re.compile(r"(?:(.+?)\.)?(optim|optimizer)\.((?:state|param_groups)\..+)", re.DOTALL)
_WRAPPER = "app"


def path_of(name: str) -> KeyPath:
    """Return the path in the saved state dict under which a tensor is written.

    `optim/<parameter>/<state>` becomes `optimizer`, `state`, parameter, state; a parameter that is only a number,
    `#<i>`, is that number. Any other name is a key of its own.
    """
    path = optimizer_path(name)
    return (name,) if path is None else tuple(map(str, path))


def flat_path(parameter: str, setting: str) -> KeyPath:
    """Return the path of a parameter's setting where the optimizer's state is flattened."""
    return (_OPTIMIZER, f"{GROUPS}.{parameter}.{setting}")


def paths_within(paths: Sequence[KeyPath]) -> tuple[list[KeyPath], str | None]:
    """Return the paths that name the items, and the wrapper that was removed from all of them.

    The wrapper is torch's own `{"app": AppState(...)}`. A flat key without a known path is a single part; only an
    optimizer's state is recognised in such keys.
    """
    split_paths = [_split(path[0]) if len(path) == 1 else path for path in paths]
    if split_paths and all(len(path) > 1 and path[0] == _WRAPPER for path in split_paths):
        return [path[1:] for path in split_paths], _WRAPPER
    return split_paths, None


def _split(key: str | int) -> KeyPath:
    match = _FLATTENED.fullmatch(key) if isinstance(key, str) else None
    if not match:
        return (key,)
    outer, container, inner = match.groups()
    return (*([outer] if outer else []), container, inner)
