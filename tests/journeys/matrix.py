"""The record of journeys, of which the documentation shows a table.

    python -m tests.journeys.matrix FOLDER

takes what `pytest --journeys FOLDER` wrote into `docs/reference/journeys.json`: journeys that ran get their new
verdicts, those that did not keep theirs, and those that are gone are left out. `docs/generate.py` makes the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.record import MARK, SAMPLED, STEPS, name_of

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs/reference/journeys.json"


def collected() -> list[str]:
    """Names of all journeys, the sample among them."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", f"{MARK} or {SAMPLED}", "tests/journeys"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout[-4000:] + done.stderr[-4000:]
    return [name_of(line) for line in done.stdout.splitlines() if "::test_" in line]


def recorded() -> dict[str, Any]:
    """The record: `steps`, step -> what is done, and `journeys`, rows in their order."""
    return dict(json.loads(RECORD.read_text("utf-8")))


def main(folder: Path) -> int:
    """Write the record; 1 if a journey failed, or has not run yet."""
    rows = {row["journey"]: row for row in recorded()["journeys"]} if RECORD.exists() else {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
            rows[row["journey"]] = row
    names = collected()
    kept = sorted((rows[name] for name in names if name in rows), key=lambda row: (row["peer"], row["journey"]))
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in kept)
    steps = json.dumps(STEPS, indent=2, ensure_ascii=False)
    RECORD.write_text(f'{{"steps": {steps},\n "journeys": [\n{lines}\n ]}}\n', "utf-8")
    missing = sorted(set(names) - set(rows))
    sys.stdout.writelines(f"{name}: has not run yet\n" for name in missing)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
