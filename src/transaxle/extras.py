"""Builds the pip command that installs the packages of an optional extra of Transaxle, such as `report`.

The command names each package, because `pip install 'transaxle[report]'` would look for Transaxle in a package index,
and fail if Transaxle was installed from a clone.
"""

from __future__ import annotations

import re
import shlex

_NAME = "transaxle"
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)['"]""")


def install(extra: str) -> str:
    """Return the pip command for an extra; the metadata of the installed Transaxle lists the packages of the extra."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        listed = requires(_NAME) or []
    except PackageNotFoundError:  # Transaxle is not installed: it runs from its source tree
        listed = []
    parts = [requirement.partition(";") for requirement in listed]
    packages = [package.strip() for package, _, marker in parts if extra in _EXTRA.findall(marker)]
    return f"pip install {shlex.join(packages or [f'{_NAME}[{extra}]'])}"
