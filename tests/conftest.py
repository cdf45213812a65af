"""What every test starts from: no network, one native thread, Ctrl-C, and process state put back afterwards."""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import pytest

from tests.golden.digests import REWRITE, Rewriting
from tests.journeys import OPTION as JOURNEYS
from tests.memory_meter import OPTION as MEMORY
from tests.memory_meter import MemoryMeter
from tests.sampled import OPTION as TURN
from tests.sampled import current_turn, defer_cases

# Before torch is imported anywhere: xdist already uses the cores, peers must never reach for the hub, Ray must not
# replace `print`, which tests of hostile pickles name, and torch.compile must not compile its headers beforehand, which
# takes two minutes and 3 GB. What DeepSpeed compiles is kept with its torch, one file at a time: each takes 1.6 GB.
_EXTENSIONS = Path(sys.prefix, "torch_extensions")
_COMPILING = 600
"""Seconds after which a lock of torch's compiler is left from a process that was killed; others wait for it forever."""
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_TQDM_PATCH_PRINT": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCH_EXTENSIONS_DIR": str(_EXTENSIONS),
    "MAX_JOBS": "1",
}.items():
    os.environ.setdefault(_name, _value)
# A shell without job control starts what is followed by `&` with Ctrl-C ignored, and so would every program here.
signal.signal(signal.SIGINT, signal.default_int_handler)
# So does `nohup` with the hang-up. A handler keeps the tests alive as well, and is not handed down to programs.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# No example has to be found, or to be done, in a given time: these machines are shared. Tests of a GPU do without it.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("shared")

_GLIBC = ctypes.CDLL(None) if hasattr(ctypes.CDLL(None), "malloc_trim") else None
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
"""What `mallopt` calls what is set here, in `malloc.h`."""
# What is large goes back when it is freed, and not only if nothing smaller came to lie above it: half of what a worker
# grows by. Of this process alone, since programs under test must have what users have.
if _GLIBC is not None:
    _GLIBC.mallopt(_MMAP_THRESHOLD, 1 << 20)
    _GLIBC.mallopt(_ARENA_MAX, 2)

EXAMPLES, QUICK = "--examples", "--quick"
QUICK_ROOMS = frozenset({"axes", "encodings", "engine", "formats", "cli", "test_errors.py"})
"""Folders and files of `tests` that `make check` looks at."""
QUICK_HOUSE = "test_house.py"
"""Runs with them although it starts two programs: it says what is where."""
QUICK_IMPORTS = (sys.stdlib_module_names - {"subprocess", "multiprocessing"}) | frozenset(
    {"pytest", "hypothesis", "numpy", "ml_dtypes", "msgspec", "safetensors", "fsspec", "xxhash", "click", "rich"}
)
"""What a quick test may import beside the package and what is beside it here: no torch, no peers, no processes."""
_TESTS = Path(__file__).parent
_TEMPORARY = pytest.StashKey[str]()
"""The folder for everything temporary, if it is to be removed."""
_AFTER_MULTIPROCESSING = -200
"""When that is: the sockets of multiprocessing are in a folder below it, which it removes at -100, and misses."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make check`, `make test`, `make journeys` and `make golden` ask for."""
    parser.addoption(EXAMPLES, type=int, metavar="N", help="try each property on at most N examples")
    parser.addoption(QUICK, action="store_true", help="only test files that start nothing and import no frameworks")
    parser.addoption(JOURNEYS, metavar="DIR", help="write what journeys note into this folder")
    parser.addoption(REWRITE, action="store_true", help="keep what golden cases give now, and write it down")
    parser.addoption(
        TURN, type=int, metavar="N", help="run part N of ten of each sweep; the number of commits if not given"
    )
    parser.addoption(MEMORY, type=float, metavar="GB", help="say what is used at most; fail above it")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that `--quick` does not want, before they are imported: by what they import themselves."""
    if not config.getoption(QUICK) or not collection_path.is_relative_to(_TESTS) or collection_path == _TESTS:
        return None
    room = collection_path.relative_to(_TESTS).parts[0]
    is_test = collection_path.suffix == ".py" and room != QUICK_HOUSE
    return room not in {*QUICK_ROOMS, QUICK_HOUSE} or (is_test and not _is_quick(collection_path)) or None


@cache
def _is_quick(file: Path) -> bool:
    """Tell whether a file, and each one of `tests` that it imports, imports only what a quick test may."""
    names = {
        name
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }  # fmt: skip
    ours = {name for name in names if name.partition(".")[0] == _TESTS.name}
    tops = {name.partition(".")[0] for name in names - ours} - {"transaxle"}
    if not tops <= QUICK_IMPORTS or any(name.startswith("safetensors.torch") for name in names):
        return False
    beside = (_TESTS.parent.joinpath(*name.split(".")).with_suffix(".py") for name in ours)
    return all(_is_quick(each) for each in beside if each.exists() and each != file)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Defer cases of sweeps, give properties few examples if asked to, and skip GPU tests where there is no GPU."""
    turn: int | None = config.getoption(TURN)
    defer_cases(items, current_turn() if turn is None else turn)
    most: int | None = config.getoption(EXAMPLES)
    for item in items if most is not None else ():
        _shorten(item, most)
    _skip_without_gpu(items)


def _shorten(item: pytest.Item, most: int | None) -> None:
    """Let a property have at most so many examples; any other test stays as it is."""
    from hypothesis import settings

    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)  # hypothesis has no public way to ask or to tell
    if test is not None and own is not None and most is not None and own.max_examples > most:
        test._hypothesis_internal_use_settings = settings(own, max_examples=most)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none; torch is imported only if such a test is here."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Leave out of each later garbage collection what was imported for the tests: millions of objects that stay."""
    _collect()


def _collect() -> None:
    """Free what nobody reaches any more: by itself the collector counts objects, and not how large they are."""
    gc.collect()
    gc.freeze()
    if _GLIBC is not None:
        _GLIBC.malloc_trim(0)


def pytest_configure(config: pytest.Config) -> None:
    """Give everything temporary one folder, of whatever processes the tests start; workers get it with the rest."""
    if hasattr(config, "workerinput"):
        return
    if config.getoption(REWRITE):
        config.pluginmanager.register(Rewriting())
    folder = config.stash[_TEMPORARY] = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tx-")
    if (cap := config.getoption(MEMORY)) is not None:
        config.pluginmanager.register(MemoryMeter("TMPDIR", folder, cap))
    _unlock_extensions()


def _unlock_extensions() -> None:
    """Remove the locks of compilers that were killed."""
    for lock in _EXTENSIONS.glob("*/lock"):
        with suppress(FileNotFoundError):  # it may have been a living one after all
            if time.time() - lock.stat().st_mtime > _COMPILING:
                lock.unlink()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the ranks that live as long as the session, since this process would wait for them; keep what failed."""
    if ranks := sys.modules.get("tests.live.ranks"):
        ranks.stop_all()
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.config.stash[_TEMPORARY] = ""


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what is temporary when this process ends, unless something failed."""
    if folder := config.stash.get(_TEMPORARY, ""):
        remove = {"ignore_errors": True}
        Finalize(None, shutil.rmtree, args=(folder,), kwargs=remove, exitpriority=_AFTER_MULTIPROCESSING)


@pytest.fixture(autouse=True, scope="module")
def _what_is_needed() -> Iterator[None]:
    """Give back what no test of a file needed, or needs any more: ranks, and memory."""
    yield
    if ranks := sys.modules.get("tests.live.ranks"):
        ranks.stop_unused()
    _collect()


@pytest.fixture(autouse=True)
def _process_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put back environment, working directory and random state, also when the test fails."""
    environment, here = dict(os.environ), Path.cwd()
    state, numpy_state = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    torch_state = (torch.get_default_dtype(), torch.get_rng_state()) if torch else None
    yield
    os.chdir(here)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    random.setstate(state)
    np.random.set_state(numpy_state)
    if torch and torch_state:
        torch.set_default_dtype(torch_state[0])
        torch.set_rng_state(torch_state[1])
    if request.node.get_closest_marker("oracle"):  # the next case may be another large model
        _collect()
