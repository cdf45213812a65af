"""Real checkpoints and resumes, made once a test run and shared by its processes.

The first test that needs a case makes all cases of its launch, behind a file lock; everyone else finds them there.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.oracles.deepspeed_peer.case import BY_NAME, TRUTH, Case, Launch
from tests.oracles.deepspeed_peer.resumes import OWN, PLAIN, RESUMES, WAYS, Resume

_LIMIT = 240.0
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

    def resumed(self, resume: Resume) -> Path:
        """The folder in which DeepSpeed, set up as the target, says what it loaded of the source."""
        launch, is_swept = BY_NAME[resume.target].launch, resume in PLAIN
        others = [each for each in RESUMES if BY_NAME[each.target].launch == launch and each not in PLAIN]
        together = [resume] if is_swept else others
        for each in together:
            self._grown(BY_NAME[each.source])
            self._grown(BY_NAME[each.target])
        what = f"resume-{resume if is_swept else _label(launch)}"
        self._once(what, launch, lambda: self._resumes(together))
        return self.folder / str(resume)

    def started(self, resume: Resume) -> Path:
        """The folder in which a run says what it does whose state was put there by hand; not for pipelines."""
        self.resumed(resume)
        return self.folder / resume.beside

    def _resumes(self, resumes: Sequence[Resume]) -> Iterator[dict[str, Any]]:
        begun: set[str] = set()
        for each in resumes:
            source, written = self.folder / each.source / "checkpoint", self.folder / f"{each.source}.{each.way}"
            if not written.exists():
                WAYS[each.way](source, written)
            how = {"case": each.target, "together": each.together}
            paths = {"source": str(written), "out": str(self.folder / str(each))}
            yield {"do": "load", **paths, "universal": each.way != OWN, **how}
            is_there = each.beside in begun or (self.folder / each.beside).exists()
            if BY_NAME[each.target].launch.pp == 1 and not is_there:
                begun.add(each.beside)
                truth = str(self.folder / each.source / "truth")
                yield {"do": "start", "truth": truth, "out": str(self.folder / each.beside), **how}

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
        with (self.folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if done.exists():
                return
            listed = self.folder / f"{what}.json"
            listed.write_text(json.dumps(list(jobs())), "utf-8")
            _launch(launch, listed)
            done.touch()


def _label(launch: Launch) -> str:
    return f"{launch.world}-{launch.tp}-{launch.pp}"


def _launch(launch: Launch, jobs: Path) -> None:
    """Run one launch to its end; what its ranks have printed is in the error if it hangs."""
    from torch.multiprocessing.spawn import start_processes

    from tests.forks import context

    meeting = jobs.with_suffix(".meeting")
    meeting.unlink(missing_ok=True)
    arguments = (str(jobs), launch, str(meeting))
    method = context().get_start_method()
    ranks = start_processes(_rank, arguments, launch.world, join=False, start_method=method)
    assert ranks is not None
    end = time.monotonic() + _LIMIT
    while not ranks.join(end - time.monotonic()):
        if time.monotonic() >= end:
            for process in ranks.processes:
                process.kill()
            logs = sorted(jobs.parent.glob(f"{jobs.name}.*.log"))
            raise AssertionError("\n".join(["DeepSpeed hangs:", *(log.read_text("utf-8")[-2000:] for log in logs)]))


def _rank(rank: int, jobs: str, launch: Launch, meeting: str) -> None:
    """Be one rank; what it prints goes to a file."""
    with Path(f"{jobs}.{rank}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    from tests.oracles.deepspeed_peer.run import main

    main(Path(jobs), launch, rank, Path(meeting))


def facts(folder: Path) -> Mapping[str, Any]:
    """What a run wrote about itself beside its tensors."""
    found: Mapping[str, Any] = json.loads((folder / TRUTH).read_text("utf-8"))
    return found


@cache
def raw(path: Path) -> Raw:
    """The tensors of a safetensors file, as bytes: nothing of ours reads them."""
    import ml_dtypes  # noqa: F401 - safetensors finds bfloat16 through it

    return {name: (value.shape, value.tobytes()) for name, value in load_file(path).items()}
