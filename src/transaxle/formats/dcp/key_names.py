"""Names of tensors, and keys of the state dict that torch saves and loads.

What is written: model tensors keep their names, as keys of the state dict itself. The optimizer's state goes under the
keys that torchtitan saves it by: `optimizer.state.<parameter>.<state>`, which is also what torch flattens
`{"optimizer": get_optimizer_state_dict(...)}` to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transaxle.formats.training_state.state import OPTIMIZER, Path
from transaxle.formats.training_state.state_groups import GROUPS

_OPTIMIZER = "optimizer"
_WRITTEN = (_OPTIMIZER, "state")
_NUMBER = re.compile(r"#(\d+)")
_FLATTENED = re.compile(r"(?:(.+?)\.)?(optim|optimizer)\.((?:state|param_groups)\..+)", re.DOTALL)
_WRAPPER = "app"


def path_of(name: str) -> Path:
    """Return the path in the saved state dict under which a tensor is written.

    `optim/<parameter>/<state>` becomes `optimizer`, `state`, parameter, state; a parameter that is only a number,
    `#<i>`, is that number. Any other name is a key of its own.
    """
    parameter, _, state = name.removeprefix(OPTIMIZER).rpartition("/")
    if not name.startswith(OPTIMIZER) or not parameter or not state:
        return (name,)
    number = _NUMBER.fullmatch(parameter)
    return (*_WRITTEN, number[1] if number else parameter, state)


def group_path(number: int, setting: str) -> Path:
    """Return the path of a setting of a group, where the optimizer's state is nested."""
    return (_OPTIMIZER, GROUPS, number, setting)


def flat_path(parameter: str, setting: str) -> Path:
    """Return the path of a setting of a parameter, where the optimizer's state is flattened."""
    return (_OPTIMIZER, f"{GROUPS}.{parameter}.{setting}")


def as_numbered(parameter: str) -> str | int:
    """Return what torch lists a parameter as: its name, or its number where it has no name."""
    number = _NUMBER.fullmatch(parameter)
    return int(number[1]) if number else parameter


def paths_within(paths: Sequence[Path]) -> tuple[list[Path], str | None]:
    """Return the paths by which items are named, and the wrapper that was taken off all of them.

    The wrapper is torch's own `{"app": AppState(...)}`. A flat key of which no path is known is one part; only an
    optimizer's state is told from such keys.
    """
    known = [_split(path[0]) if len(path) == 1 else path for path in paths]
    if known and all(len(path) > 1 and path[0] == _WRAPPER for path in known):
        return [path[1:] for path in known], _WRAPPER
    return known, None


def _split(key: str | int) -> Path:
    found = _FLATTENED.fullmatch(key) if isinstance(key, str) else None
    if not found:
        return (key,)
    outer, container, inner = found.groups()
    return (*([outer] if outer else []), container, inner)
