"""Real checkpoints and resumes, made once a test run and shared by its processes.

A launch takes ten to twenty seconds however many cases it trains. So the first test that needs one of them makes all
cases of its launch, behind a file lock; everyone else finds them there.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.oracles.deepspeed_peer.case import BY_NAME, TRUTH, Case, Launch

ROOT = Path(__file__).parents[3]
_LIMIT = 240
_DONE, _LOCK = "done", "lock"

Raw = dict[str, tuple[tuple[int, ...], bytes]]
"""Name -> shape and bytes."""


@dataclass(frozen=True)
class Farm:
    """A folder for everything that real DeepSpeed makes in this run."""

    folder: Path

    def checkpoint(self, name: str) -> Path:
        """The folder that DeepSpeed saved a case into."""
        self._grown(BY_NAME[name])
        return self.folder / name / "checkpoint"

    def truth(self, name: str, state: str) -> Raw:
        """What the live optimizer held when a case was saved."""
        self._grown(BY_NAME[name])
        return raw(self.folder / name / "truth" / f"{state}.safetensors")

    def facts(self, name: str) -> Mapping[str, Any]:
        """Steps, settings and shard shapes of a case."""
        self._grown(BY_NAME[name])
        return facts(self.folder / name / "truth")

    def resumed(
        self,
        source: str,
        target: str,
        pairs: Sequence[tuple[str, str]],
        write: Write,
        *,
        together: bool = False,
        kind: str = "",
    ) -> Path:
        """The folder in which DeepSpeed, set up as `target`, says what it loaded of `source`.

        Args:
            source: case whose checkpoint was converted.
            target: case whose stage and degrees the resumed run has.
            pairs: all pairs of the test module; those of one launch are resumed together.
            write: makes a universal checkpoint of a case's.
            together: all parts of the optimizer count their steps in one tensor, as DeepSpeed 0.19.8 leaves them when
                it loads a universal checkpoint at ZeRO-3; otherwise each in its own, as everywhere else.
            kind: tells these resumes from others of the same pairs.
        """
        launch = BY_NAME[target].launch
        mine = [pair for pair in pairs if BY_NAME[pair[1]].launch == launch]
        for one, other in mine:
            self._grown(BY_NAME[one])
            self._grown(BY_NAME[other])

        kind = kind or ("together" if together else "apart")

        def jobs() -> Iterator[dict[str, Any]]:
            for one, other in mine:
                universal, out = self.folder / f"{one}.{kind}", self.folder / f"{one}--{other}.{kind}"
                if not universal.exists():
                    write(self.folder / one / "checkpoint", universal)
                how = {"case": other, "together": together}
                yield {"do": "universal", "source": str(universal), "out": str(out), **how}
                if launch.pp == 1:
                    truth = str(self.folder / one / "truth")
                    yield {"do": "start", "truth": truth, "out": str(out / "started"), **how}

        self._once(f"resume-{kind}-{_label(launch)}", launch, jobs)
        return self.folder / f"{source}--{target}.{kind}"

    def _grown(self, case: Case) -> None:
        """Train all cases of a launch, unless that was done."""
        launch = case.launch
        same = [each for each in BY_NAME.values() if each.launch == launch]
        jobs = [{"do": "train", "case": each.name, "out": str(self.folder / each.name)} for each in same]
        self._once(f"train-{_label(launch)}", launch, lambda: iter(jobs))

    def _once(self, what: str, launch: Launch, jobs: Callable[[], Iterator[dict[str, Any]]]) -> None:
        done = self.folder / f"{what}.{_DONE}"
        if done.exists():
            return
        with _locked(self.folder / _LOCK):
            if done.exists():
                return
            listed = self.folder / f"{what}.json"
            listed.write_text(json.dumps(list(jobs())), "utf-8")
            _launch(launch, listed)
            done.touch()


Write = Callable[[Path, Path], object]


def _label(launch: Launch) -> str:
    return f"{launch.world}-{launch.tp}-{launch.pp}"


def _launch(launch: Launch, jobs: Path) -> None:
    """Run one launch to its end; what it printed is in the error if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={launch.world}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-m", "tests.oracles.deepspeed_peer.run", str(jobs)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"DeepSpeed failed: {done.stdout[-2000:]}{done.stderr[-6000:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def facts(folder: Path) -> Mapping[str, Any]:
    """What a run wrote about itself beside its tensors."""
    found: Mapping[str, Any] = json.loads((folder / TRUTH).read_text("utf-8"))
    return found


@cache
def raw(path: Path) -> Raw:
    """The tensors of a safetensors file, as bytes: nothing of ours reads them."""
    import ml_dtypes  # noqa: F401 - safetensors finds bfloat16 through it

    return {name: (value.shape, value.tobytes()) for name, value in load_file(path).items()}
