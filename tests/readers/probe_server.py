"""The program in a reader's environment that runs a probe on one request after another, so that it starts only once.

    python probe_server.py FOLDER_OF_PROBES PROBE

reads lines with the paths of a request and of its result, and writes a line when the result is there.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def main(folder: str, probe: str) -> None:
    """Answer until the input ends."""
    sys.path.insert(0, folder)
    headers, trace = import_module("headers"), import_module(probe).trace
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        sys.argv[1:3] = json.loads(line)
        headers.run(trace)
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
