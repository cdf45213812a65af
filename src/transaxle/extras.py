"""How to install what an extra of this package brings: its packages by name.

`pip install 'transaxle[report]'` asks an index for this package, and finds none where it was installed from a clone.
"""

from __future__ import annotations

import re
import shlex

_NAME = "transaxle"
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)['"]""")


def install(extra: str) -> str:
    """Return the command that installs what an extra brings, from the metadata of this installation."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires(_NAME) or []
    except PackageNotFoundError:  # a source tree on the path, installed nowhere
        listed = []
    parts = [requirement.partition(";") for requirement in listed]
    packages = [package.strip() for package, _, marker in parts if extra in _EXTRA.findall(marker)]
    return f"pip install {shlex.join(packages or [f'{_NAME}[{extra}]'])}"
