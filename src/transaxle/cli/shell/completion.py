"""Completion in bash, where a colon divides words: `dcp:torchtitan` is three of them, and click takes it for others."""

from __future__ import annotations

import os

from click.shell_completion import BashComplete, split_arg_string

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
    """Completion in bash, from the line as it was typed; it offers the part of a word after its first colon."""

    source_template = _SOURCE

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one under the cursor, and that one."""
        line = os.environ.get("COMP_LINE")
        if line is None:  # a script of an earlier version, still loaded in some shell
            return super().get_completion_args()
        words = split_arg_string(line)
        if not words or line[-1].isspace():
            return words[1:], ""
        return words[1:-1], words[-1]
