"""The map of the house, kept true: which room may import which, and how large a module may get.

The map is `HOUSE`. It holds for imports inside functions too: being lazy changes when a room is entered, not
whether. A room may be in the map before it is in the package, and never the other way round.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "transaxle"
NAME = PACKAGE.name
DOORWAY = "__init__"

CORE = frozenset({"numpy", "ml_dtypes", "msgspec", "safetensors", "fsspec", "xxhash"})
TERMINAL = frozenset({"click", "rich"})
TRAINING = frozenset({"torch"})


@dataclass(frozen=True)
class Room:
    """A subpackage, or a module at the top of the package."""

    below: frozenset[str] = frozenset()
    """Rooms an arrow leads to. What those lead to may be imported as well: arrows point down."""
    needs: frozenset[str] = CORE
    """Distributions whose modules may be imported."""


def _room(*below: str, needs: frozenset[str] = CORE) -> Room:
    return Room(frozenset(below), needs)


HOUSE = {
    # The doors: what a user meets.
    "__main__": _room("cli", needs=frozenset()),
    "cli": _room(DOORWAY, "live", "engine", needs=CORE | TERMINAL),
    DOORWAY: _room("_api", "parallel", "nn", "live", "quant", needs=frozenset()),
    "_api": _room("live", "engine"),
    # The training side: only these four may import torch.
    "parallel": _room("live", "nn", needs=CORE | TRAINING),
    "nn": _room("quant", "axes", needs=CORE | TRAINING),
    "live": _room("quant", "engine", needs=CORE | TRAINING),
    "quant": _room("encodings", needs=CORE | TRAINING | {"triton"}),
    # The core.
    "engine": _room("formats", "encodings", "families", "axes"),
    "formats": _room("axes"),
    "encodings": _room("axes"),
    "families": _room("axes"),
    "axes": _room("errors", needs=frozenset({"numpy"})),
    "errors": _room(needs=frozenset()),
}

LAZY_EXTRAS = {
    "cli/demo.py": frozenset({"torch", "transformers"}),
    "formats/web.py": frozenset({"aiohttp"}),
    "quant/torchao.py": frozenset({"torchao"}),
}
"""Modules that may import more than their room, inside functions only."""

DYNAMIC = frozenset({"__init__.py"})
"""Modules that may import by a computed name: the doorway finds its lazy rooms so."""

BANNED_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
MAX_LINES = 500

MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [module.relative_to(PACKAGE).as_posix() for module in MODULES]
every_module = pytest.mark.parametrize("module", MODULES, ids=IDS)


@dataclass(frozen=True)
class Import:
    """One imported module, wherever in the file the import stands."""

    target: str
    line: int
    lazy: bool
    """It stands inside a function."""
    typing_only: bool
    """It stands under `if TYPE_CHECKING:`."""


def _room_of(module: Path) -> str:
    first = module.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _dotted(module: Path) -> list[str]:
    """The dotted name of the package that holds the module, for relative imports."""
    return [NAME, *module.relative_to(PACKAGE).parts[:-1]]


def _targets(node: ast.AST, package: list[str]) -> list[str]:
    """Names of the modules that one statement or call imports; a computed name gives an empty string."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        stem = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*stem, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names] if base == NAME else [base]
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in {"import_module", "__import__"}:
            name = node.args[0] if node.args else None
            return [name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""]
    return []


def _imports(source: str, package: list[str]) -> Iterator[Import]:
    def walk(node: ast.AST, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for target in _targets(node, package):
            yield Import(target, getattr(node, "lineno", 0), lazy, typing_only)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        kept: list[ast.stmt] = []
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            kept = node.body
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy=inside, typing_only=typing_only or child in kept)

    yield from walk(ast.parse(source), lazy=False, typing_only=False)


def _reach(room: str) -> frozenset[str]:
    """The room itself and every room its arrows lead to, directly or through others."""
    seen: set[str] = set()
    waiting = [room]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting.extend(HOUSE[current].below)
    return frozenset(seen)


def _internal(target: str) -> str | None:
    """The room that an import of our own package enters, None for other packages."""
    first, _, rest = target.partition(".")
    if first != NAME:
        return None
    room = rest.partition(".")[0]
    known = (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists() or room in HOUSE
    return room if room and known else DOORWAY


def _faults(where: str, room: str, package: list[str], source: str) -> list[str]:
    """Every import of a module that its room has no right to."""
    reach = _reach(room)
    faults = []
    for item in _imports(source, package):
        entered = _internal(item.target)
        top = item.target.partition(".")[0]
        lazily = LAZY_EXTRAS.get(where, frozenset()) if item.lazy else frozenset()
        if not item.target:
            bad = where not in DYNAMIC
        elif entered is not None:
            bad = entered not in reach
        else:
            bad = not (item.typing_only or top in sys.stdlib_module_names or top in HOUSE[room].needs | lazily)
        if bad:
            faults.append(f"{where}:{item.line} imports {item.target or 'what it computes'}; {room} may not")
    return faults


def test_the_package_is_here() -> None:
    assert MODULES, f"no modules under {PACKAGE}"


def test_arrows_point_down_only() -> None:
    for room, entry in HOUSE.items():
        assert entry.below <= HOUSE.keys(), f"{room} has an arrow to a room that is not in the map"
        assert not any(room in _reach(lower) for lower in entry.below), f"a circle of arrows through {room}"


@every_module
def test_every_room_is_on_the_map(module: Path) -> None:
    assert _room_of(module) in HOUSE, "a new room needs its line in HOUSE, and its place in CONTRIBUTING.md"


@every_module
def test_imports_follow_the_arrows(module: Path) -> None:
    where = module.relative_to(PACKAGE).as_posix()
    assert _faults(where, _room_of(module), _dotted(module), module.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("axes/box.py", "import torch"),
        ("axes/box.py", "import msgspec"),
        ("axes/box.py", "def f():\n    from transaxle.engine.plan import Plan"),
        ("axes/box.py", "from ..formats import safetensors"),
        ("axes/box.py", "from transaxle import engine"),
        ("axes/box.py", "import transaxle"),
        ("formats/safetensors.py", "from transaxle.families import load"),
        ("engine/plan.py", "def f():\n    import torch"),
        ("engine/plan.py", "import importlib\nimportlib.import_module('torch')"),
        ("engine/plan.py", "from importlib import import_module\nimport_module(name)"),
        ("engine/plan.py", "import rich"),
        ("cli/demo.py", "import torch"),
        ("cli/convert.py", "def f():\n    import torch"),
        ("errors.py", "from transaxle.axes import box"),
    ],
)
def test_the_arrow_test_sees(where: str, source: str) -> None:
    """The test above would pass on anything if it saw nothing: these must be found."""
    module = PACKAGE / where
    assert _faults(where, _room_of(module), _dotted(module), source) != []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("axes/box.py", "import itertools\nimport numpy.typing\nfrom transaxle.errors import refuse"),
        ("axes/box.py", "from .piece import Piece\nfrom transaxle.axes.cut import cut"),
        ("axes/box.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("engine/plan.py", "import xxhash\nfrom transaxle.formats import safetensors"),
        ("cli/convert.py", "import click\nimport transaxle\nfrom transaxle.engine import plan"),
        ("cli/demo.py", "def f():\n    import torch, transformers"),
        ("live/load.py", "import torch.distributed\nfrom transaxle.engine.plan import Plan"),
        ("__init__.py", "import importlib\ndef __getattr__(name):\n    return importlib.import_module(name)"),
    ],
)
def test_the_arrow_test_allows(where: str, source: str) -> None:
    module = PACKAGE / where
    assert _faults(where, _room_of(module), _dotted(module), source) == []


@every_module
def test_modules_stay_readable(module: Path) -> None:
    lines = len(module.read_text("utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: one noun per module"


@every_module
def test_names_say_what_is_inside(module: Path) -> None:
    parts = module.relative_to(PACKAGE).with_suffix("").parts
    assert not BANNED_NAMES & {part.strip("_") for part in parts}


@every_module
def test_public_modules_say_why_they_exist(module: Path) -> None:
    private = module.stem.startswith("_") and not module.stem.startswith("__")
    assert private or ast.get_docstring(ast.parse(module.read_text("utf-8")))


def test_everything_but_the_training_side_imports_without_torch() -> None:
    """Import the doorway and every core module in a process where torch cannot be imported."""
    training = {room for room, entry in HOUSE.items() if entry.needs & TRAINING}
    modules = [
        ".".join([NAME, *module.relative_to(PACKAGE).with_suffix("").parts]).removesuffix("." + DOORWAY)
        for module in MODULES
        if _room_of(module) not in training | {"__main__"}
    ]
    script = """
        import importlib, sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"torch", "transformers"}:
                    raise ImportError(f"{name} is blocked here")

        sys.meta_path.insert(0, Blocked())
        for name in sys.argv[1:]:
            importlib.import_module(name)
        assert not {"torch", "transformers"} & sys.modules.keys()
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), NAME, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_everything(tmp_path: Path) -> None:
    """Tables and py.typed travel with the code, and nothing else does."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == here
    assert {f"{NAME}/py.typed"} <= packed
