"""Writes bug reports, and completes words in bash.

A bug report is a file with the traceback of an unexpected exception and the versions of packages. Bash splits words at
colons, so click's completion fails for `dcp:torchtitan`. The class `Bash` completes the whole word.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import metadata

from click.shell_completion import BashComplete, split_arg_string

from transaxle import __version__
from transaxle.cli import NAME
from transaxle.errors import without_secrets

_PACKAGES = ("numpy", "ml_dtypes", "torch", "transformers")
"""Packages whose versions a bug report lists."""
_LABELS = ("issues", "bug tracker", "tracker", "repository", "source")
"""Labels under which the package metadata may store the URL for bug reports, the most preferred label first."""


def write_report(error: BaseException, arguments: Sequence[str]) -> str:
    """Write a bug report into a new file, and return a text that tells the user where to send it.

    Args:
        error: the unexpected exception to report.
        arguments: the command line after the program's name.
    """
    head = [
        f"{NAME} {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        shlex.join([NAME, *arguments]),
    ]
    text = without_secrets("\n".join([*head, "", *traceback.format_exception(error)]))
    ask = f"This is a bug in {NAME} {__version__}: please report it {_place()}"
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"{NAME}-bug-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        return f"{ask}. The traceback could not be kept ({reason}): run it again with TRANSAXLE_DEBUG=1 to see it."
    return f"{ask}, with {path}: it has the traceback, the command line, versions and paths, and no tensors."


def _place() -> str:
    """Return the place where users report bugs: a URL from the metadata of the installed package."""
    try:
        lines = metadata.metadata(NAME).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        lines = []
    pages = {label.strip().lower(): page.strip() for label, _, page in (line.partition(",") for line in lines)}
    tracker = next((pages[label] for label in _LABELS if label in pages), "")
    return f"at {tracker}" if tracker else f"to those from whom you have {NAME}"


def _version(name: str) -> str:
    """Return the installed version of a package, without importing the package."""
    if name in sys.modules and isinstance(getattr(sys.modules[name], "__version__", None), str):
        return str(sys.modules[name].__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(none)"


_SOURCE = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value
    local before=${COMP_LINE:0:COMP_POINT}
    local word=${before##*[[:space:]]} given=""
    if [[ $COMP_WORDBREAKS == *:* && $word == *:* ]]; then
        given=${word%%:*}:
    fi
    if [[ $COMP_WORDBREAKS == *=* && $given == -*=* ]]; then
        given=${given#*=}
    fi
    response=$(env COMP_LINE="$before" %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    for completion in $response; do
        type=${completion%%%%,*}
        value=${completion#*,}
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $type == plain ]]; then
            COMPREPLY+=("${value#"$given"}")
        fi
    done
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Completion in bash, which splits words at colons. So the class reads the whole typed line, and completes only the
    part after the first colon of a word.
    """

    source_template = _SOURCE

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return (the words before the cursor's word, the incomplete word at the cursor)."""
        line = os.environ.get("COMP_LINE")
        if line is None:  # the shell still uses the completion script that an earlier Transaxle version installed
            return super().get_completion_args()
        words = split_arg_string(line)
        if not words or line[-1].isspace():
            return words[1:], ""
        return words[1:-1], words[-1]
