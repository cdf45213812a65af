"""Command that installs the packages of an extra, by their names.

`pip install 'transaxle[report]'` would look for this package in an index, and fail if it was installed from a clone.
"""

from __future__ import annotations

import re
import shlex

_NAME = "transaxle"
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)['"]""")


def install(extra: str) -> str:
    """Return the pip command that installs the packages of an extra, from this installation's metadata."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires(_NAME) or []
    except PackageNotFoundError:  # the package is not installed: its source tree is on the path
        listed = []
    parts = [requirement.partition(";") for requirement in listed]
    packages = [package.strip() for package, _, marker in parts if extra in _EXTRA.findall(marker)]
    return f"pip install {shlex.join(packages or [f'{_NAME}[{extra}]'])}"
