"""The map of the code: which room may import which, and the rules for names and sizes that can be counted.

The map is `HOUSE`. It also applies to imports inside functions. A room may be on the map before it is in the package.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "transaxle"
NAME = PACKAGE.name
DOORWAY = "__init__"

CORE = frozenset({"numpy", "ml_dtypes", "msgspec", "safetensors", "fsspec", "re2", "xxhash", "yaml"})
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
    "cli": _room(DOORWAY, "readers", "reports", "derivation", "live", "engine", needs=CORE | TERMINAL),
    DOORWAY: _room(
        "verbs",
        "serving",
        "readers",
        "reports",
        "refit",
        "parallel",
        "nn",
        "dcp",
        "testkit",
        "live",
        "quant",
        needs=frozenset(),
    ),
    "verbs": _room("conversions", "serving", "readers", "reports", "derivation", "live", "engine"),
    "conversions": _room("readers", "reports", "live", "engine"),
    # A checkpoint as a hub.
    "serving": _room("engine"),
    # The training side: only these may import torch.
    "dcp": _room("live", needs=CORE | TRAINING),
    "testkit": _room("verbs", needs=CORE | TRAINING),
    "refit": _room("live", needs=CORE | TRAINING),
    "parallel": _room("live", "nn", needs=CORE | TRAINING),
    "nn": _room("quant", "torch_tensors", "move", "axes", needs=CORE | TRAINING),
    "live": _room("quant", "torch_tensors", "engine", needs=CORE | TRAINING),
    "quant": _room("torch_tensors", "encodings", needs=CORE | TRAINING | {"triton"}),
    "torch_tensors": _room("axes", needs=CORE | TRAINING),
    # What other programs make of a checkpoint.
    "readers": _room("derivation", "engine"),
    # Pages for a browser.
    "reports": _room("engine"),
    # Tables from what converters do.
    "derivation": _room("engine"),
    # What vLLM calls in each of its processes: it must cost them nothing until vLLM uses what it registers.
    "vllm_plugin": _room("refit", needs=frozenset()),
    # What verl imports in each of its processes.
    "verl_plugin": _room("refit", needs=TRAINING | {"verl"}),
    # The path in NeMo-RL's config.
    "nemo_rl_plugin": _room("refit", needs=TRAINING),
    # The core.
    "engine": _room("move", "formats", "encodings", "families", "axes"),
    "move": _room("formats", "encodings", "axes"),
    "formats": _room("encodings", "axes", "plugins", "extras"),
    "encodings": _room("axes"),
    "families": _room("axes", "plugins"),
    "plugins": _room("errors", needs=frozenset()),
    "extras": _room(needs=frozenset()),
    "axes": _room("arguments", "errors", "spans", needs=frozenset({"numpy", "msgspec"})),
    "arguments": _room("errors", needs=frozenset()),
    "errors": _room("options", needs=frozenset()),
    "options": _room(needs=frozenset()),
    "spans": _room(needs=frozenset()),
}

LAZY_EXTRAS = {
    "cli/demo.py": frozenset({"torch", "transformers"}),
    "derivation/transformers_models.py": frozenset({"torch", "transformers"}),
    "engine/checkpoint/unstated.py": frozenset({"torch", "transformers"}),
    "engine/distribute/executors.py": frozenset({"ray"}),
    "engine/checkpoint/stored_tensor.py": frozenset({"torch"}),
    "formats/store/hub.py": frozenset({"httpx", "huggingface_hub"}),
    "live/integrations/pretrained.py": frozenset({"transformers"}),
    "refit/vllm_refit.py": frozenset({"httpx"}),
    "formats/store/service.py": frozenset({"aiohttp", "s3fs"}),
    "quant/quantized_modules.py": frozenset({"torchao"}),
    "refit/vllm_engine.py": frozenset({"vllm"}),
    "refit/vllm_loader.py": frozenset({"vllm"}),
    "refit/vllm_worker.py": frozenset({"vllm"}),
    "refit/hub_stream.py": frozenset({"vllm"}),
    "reports/html_page.py": frozenset({"jinja2"}),
    "vllm_plugin.py": frozenset({"vllm"}),
    "nemo_rl_plugin.py": frozenset({"ray"}),
}
"""Modules that may import more than their room, inside functions only."""

DYNAMIC = frozenset({"__init__.py", "cli/command.py", "formats/registry.py"})
"""Modules that may import by a computed name: the doorway finds its lazy rooms so, the program its commands,
a format its reader and its writer."""

BANNED_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
MAX_LINES = 800

PROBES = PACKAGE / "readers/probes"
"""Scripts, no modules of the package: other environments run them, with the libraries that are there."""
MODULES = sorted(module for module in PACKAGE.rglob("*.py") if module.parent != PROBES)
DEMO = "cli/demo.py"
SHARED_NAMES = frozenset({DOORWAY, "reader", "writer", "draft"})
"""Names that several files may have."""


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


@cache
def _tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text("utf-8"))


@pytest.fixture(autouse=True, scope="module")
def _no_trees_afterwards() -> Iterator[None]:
    yield
    _tree.cache_clear()


def _where(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


def test_arrows_point_down_only() -> None:
    for room, entry in HOUSE.items():
        assert entry.below <= HOUSE.keys(), f"{room} has an arrow to a room that is not in the map"
        assert not any(room in _reach(lower) for lower in entry.below), f"a circle of arrows through {room}"


def test_the_map_for_people_is_this_one() -> None:
    """CONTRIBUTING draws the rooms and their arrows; the doorway is left out there."""
    lines = re.findall(r"^  (\w+)(/|\.py) +.* -> (.+)$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    drawn = {room: set(arrows.split(", ")) - {"nothing"} for room, _, arrows in lines}
    rooms = {room: set(entry.below) - {DOORWAY} for room, entry in HOUSE.items() if not room.startswith("__")}
    rooms["cli"].add("verbs")  # by the doorway, which is left out
    assert drawn == rooms
    assert all((PACKAGE / f"{room}{end}").exists() for room, end, _ in lines)


def test_every_room_is_on_the_map() -> None:
    assert MODULES, f"no modules under {PACKAGE}"
    unknown = sorted({_room_of(module) for module in MODULES} - HOUSE.keys())
    assert not unknown, "a new room needs its line in HOUSE, and its place in CONTRIBUTING.md"


def test_imports_follow_the_arrows() -> None:
    faults = [
        fault
        for module in MODULES
        for fault in _faults(_where(module), _room_of(module), _dotted(module), module.read_text("utf-8"))
    ]
    assert faults == []


SEEN = (
    ("axes/box.py", "import torch"),
    ("axes/box.py", "def f():\n    from transaxle.engine.plan import Plan"),
    ("axes/box.py", "from ..formats import safetensors"),
    ("axes/box.py", "from transaxle import engine"),
    ("axes/box.py", "import transaxle"),
    ("formats/safetensors.py", "from transaxle.families import load"),
    ("engine/plan.py", "def f():\n    import torch"),
    ("engine/plan.py", "import importlib\nimportlib.import_module('torch')"),
    ("engine/plan.py", "from importlib import import_module\nimport_module(name)"),
    ("engine/plan.py", "import rich"),
    (DEMO, "import torch"),
    ("cli/convert.py", "def f():\n    import torch"),
    ("errors.py", "from transaxle.axes import box"),
)
"""Imports that break the map."""
ALLOWED = (
    ("axes/box.py", "import itertools\nimport numpy.typing\nfrom transaxle.errors import refuse"),
    ("axes/box.py", "from .piece import Piece\nfrom transaxle.axes.cut import cut"),
    ("axes/box.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ("engine/plan.py", "import xxhash\nfrom transaxle.formats import safetensors"),
    ("cli/convert.py", "import click\nimport transaxle\nfrom transaxle.engine import plan"),
    (DEMO, "def f():\n    import torch, transformers"),
    ("live/load.py", "import torch.distributed\nfrom transaxle.engine.plan import Plan"),
    ("__init__.py", "import importlib\ndef __getattr__(name):\n    return importlib.import_module(name)"),
)
"""Imports that keep to it."""


def test_the_arrow_test_sees() -> None:
    """The test above would pass on anything if it saw nothing: the first are found, the others are not."""
    for cases, bad in ((SEEN, True), (ALLOWED, False)):
        for where, source in cases:
            module = PACKAGE / where
            assert bool(_faults(where, _room_of(module), _dotted(module), source)) is bad, (where, source)


def test_no_folders_import_each_other_in_a_circle() -> None:
    """Neither folders of a room nor its modules; an import for a type checker alone is no arrow."""
    folders: dict[str, set[str]] = {}
    modules: dict[str, set[str]] = {}
    for module in MODULES:
        own = _module_name(module)
        for target in _module_imports(module):
            modules.setdefault(own, set()).add(target)
            if _folder(own) != _folder(target):
                folders.setdefault(_folder(own), set()).add(_folder(target))
    assert _circle(modules) == []
    assert _circle(folders) == []
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != [], "it would see one"
    assert _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def _module_name(module: Path) -> str:
    return ".".join([NAME, *module.relative_to(PACKAGE).with_suffix("").parts]).removesuffix("." + DOORWAY)


_NAMES = frozenset(map(_module_name, MODULES))


def _module_imports(module: Path) -> set[str]:
    """The package's modules that one imports when it runs, itself and packages above it left out."""
    tree = _tree(module)
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in node.body
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only and node.module:
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                found.add(longer if longer in _NAMES else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    own = _module_name(module)
    return {name for name in found & _NAMES if name != own and not own.startswith(name + ".")}


def _folder(name: str) -> str:
    """The folder that a module lies in: `transaxle.room.folder`; a module at the top of a room stands for itself."""
    return ".".join(name.split(".")[:3])


def _circle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a circle of arrows, if there is one."""
    done: set[str] = set()

    def walk(start: str, path: list[str]) -> list[str]:
        if start in path:
            return [*path[path.index(start) :], start]
        if start in done:
            return []
        for target in arrows.get(start, ()):
            found = walk(target, [*path, start])
            if found:
                return found
        done.add(start)
        return []

    return next((found for start in arrows if (found := walk(start, []))), [])


def test_file_names_are_unique() -> None:
    """Whoever searches for a file by its name finds one."""
    names = Counter(module.name for module in MODULES if module.stem not in SHARED_NAMES)
    assert sorted(name for name, count in names.items() if count > 1) == []


def test_modules_are_in_order() -> None:
    """A concept each, named after what is inside, and with a docstring that says why they exist."""
    faults = []
    for module in MODULES:
        where, text = _where(module), module.read_text("utf-8")
        lines = len(text.splitlines())
        if lines > MAX_LINES:
            faults.append(f"{where}: {lines} lines: more than one concept")
        if BANNED_NAMES & {part.strip("_") for part in Path(where).with_suffix("").parts}:
            faults.append(f"{where}: its name says nothing")
        private = module.stem.startswith("_") and not module.stem.startswith("__")
        if not (private or ast.get_docstring(_tree(module))):
            faults.append(f"{where}: no docstring")
    assert faults == []


MAX_FUNCTION_LINES = 60


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, signature and body, without its docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    documentation = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - documentation


def _functions(node: ast.AST, path: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions in a tree with their names, those inside others too."""
    for child in ast.iter_child_nodes(node):
        own = child.name if isinstance(child, _NAMED) else ""
        name = f"{path}.{own}" if path else own
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from _functions(child, name if isinstance(child, _NAMED) else path)


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def test_functions_are_short() -> None:
    """Each reads as one thought; public verbs as: resolve, plan, run."""
    long = {
        f"{_where(module)}:{name}": _code_lines(function)
        for module in MODULES
        for name, function in _functions(_tree(module))
        if _code_lines(function) > MAX_FUNCTION_LINES
    }
    assert long == {}


class Counted:
    """How much of the house is not yet as its rules want it; each number goes down only."""

    ONE_IMPORTER = 24
    """Modules with a single importer, which lies in the same folder and could hold them."""
    SMALL_FOLDERS = 2
    """Folders with three modules or fewer, below a room."""
    BARE_TUPLES = 44
    """Functions that return more than two values without names for them."""
    VAGUE_NAMES = 74
    """Variables and parameters whose name does not say what they hold."""
    PARTICIPLES = 107
    """Functions named by a participle in place of a verb or a noun."""


_VAGUE = frozenset({
    "asked", "begun", "beside", "both", "done", "each", "everything", "found", "given", "got", "held", "here",
    "kept", "known", "left", "made", "many", "meant", "mine", "more", "most", "named", "nothing", "one", "other",
    "others", "ours", "own", "rest", "said", "seen", "sent", "stays", "taken", "theirs", "there", "thing", "things",
    "told", "wanted", "what",
})  # fmt: skip
_IRREGULAR = frozenset({
    "begun", "born", "built", "chosen", "done", "drawn", "found", "given", "gone", "held", "kept", "known", "laid",
    "left", "lost", "made", "meant", "said", "seen", "sent", "shown", "taken", "told", "torn", "worn", "written",
})  # fmt: skip
_NO_PARTICIPLE = frozenset({
    "anything", "embed", "embedding", "encoding", "everything", "feed", "hashing", "heading", "listing", "mapping",
    "meaning", "merging", "naming", "need", "nothing", "ordering", "packing", "padding", "rating", "reading", "ring",
    "rounding", "scaling", "seed", "setting", "sharding", "sibling", "sizing", "speed", "spelling", "staging",
    "string", "thing", "tiling", "training", "warning",
})  # fmt: skip
"""Verbs and nouns that end as participles do."""


def test_few_modules_have_one_importer_beside_them() -> None:
    """Such a module is part of its importer, unless a reader looks for it by its name."""
    importers: dict[str, set[str]] = {}
    for module in MODULES:
        for target in _module_imports(module):
            importers.setdefault(target, set()).add(_module_name(module))
    lonely = [
        name
        for name, others in importers.items()
        if len(others) == 1 and name.rpartition(".")[0] == next(iter(others)).rpartition(".")[0]
    ]
    assert len(lonely) <= Counted.ONE_IMPORTER, sorted(lonely)


def test_folders_are_few_and_flat() -> None:
    """At most two deep below a room, and only for more than three modules."""
    folders = Counter(module.parent for module in MODULES if module.name != f"{DOORWAY}.py")
    deep = [folder for folder in folders if len(folder.relative_to(PACKAGE).parts) > 3]
    small = [folder for folder, count in folders.items() if PACKAGE not in (folder, folder.parent) and count < 4]
    assert deep == []
    assert len(small) <= Counted.SMALL_FOLDERS, sorted(map(str, small))


def test_what_returns_several_values_names_them() -> None:
    bare = [
        f"{_where(module)}:{name}"
        for module in MODULES
        for name, function in _functions(_tree(module))
        if isinstance(result := function.returns, ast.Subscript)
        and ast.unparse(result.value) == "tuple"
        and isinstance(result.slice, ast.Tuple)
        and len(result.slice.elts) > 2
        and ast.unparse(result.slice.elts[-1]) != "..."
    ]
    assert len(bare) <= Counted.BARE_TUPLES, bare


def test_variables_say_what_they_hold() -> None:
    """Outside of comprehensions, whose expression says it."""
    vague = Counter(name for module in MODULES for name in _bindings(module) if name.strip("_") in _VAGUE)
    assert vague.total() <= Counted.VAGUE_NAMES, vague


def _bindings(module: Path) -> Iterator[str]:
    """Yield the names of variables and parameters, once for each binding."""
    nodes = list(ast.walk(_tree(module)))
    inside = {id(part) for node in nodes if isinstance(node, ast.comprehension) for part in ast.walk(node.target)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside:
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_functions_say_what_they_do() -> None:
    names = [
        f"{_where(module)}:{name}"
        for module in MODULES
        for name, function in _functions(_tree(module))
        if not function.name.startswith("__") and _is_participle(function.name.strip("_").partition("_")[0])
    ]
    assert len(names) <= Counted.PARTICIPLES, names


def _is_participle(word: str) -> bool:
    return (word.endswith(("ed", "ing")) or word in _IRREGULAR) and word not in _NO_PARTICIPLE


def test_the_counting_of_names_sees(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "def f(held, *, own=1):\n    found: int = [each for each in held]\n    for _left, one in own: pass\n"
    )
    assert [name for name in _bindings(module) if name.strip("_") in _VAGUE] == ["held", "own", "found", "_left", "one"]
    words = {"placed": True, "written": True, "sharding": False, "read": False, "embed": False, "merging": False}
    assert {word: _is_participle(word) for word in words} == words


PRIMITIVES = {
    "as_strided": {
        "torch_tensors.py",  # copies and views of any tensor
        "quant/dispatch.py",  # the operation itself, of a tensor class
    },
    "from_local": {"torch_tensors.py"},
    "all_to_all_single": {
        "live/transport/shared_store.py",  # proofs, before there is a world
        "live/transport/tensor_exchange.py",  # bytes of checkpoints
        "nn/moe.py",  # activations, with their gradients
    },
    "os.pwrite": {"formats/store/staging.py"},
}
"""What only these modules may use: each is hard to get right, so it is got right in one place."""


def test_hard_things_are_done_in_one_place() -> None:
    uses: dict[str, set[str]] = {name: set() for name in PRIMITIVES}
    for module in MODULES:
        for node in ast.walk(_tree(module)):
            if not isinstance(node, ast.Attribute):
                continue
            for name in PRIMITIVES:
                if node.attr == name.rpartition(".")[2] and f".{ast.unparse(node)}".endswith(f".{name}"):
                    uses[name].add(_where(module))
    assert uses == PRIMITIVES


def _texts(node: ast.AST) -> Iterator[str]:
    """How the literal texts of an expression begin."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield from _texts(node.values[0])
    elif isinstance(node, ast.IfExp):
        yield from (text for branch in (node.body, node.orelse) for text in _texts(branch))


def _hints(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        given = [keyword.value for keyword in node.keywords if keyword.arg == "hint"]
        yield from (text for each in given + node.args[3:4] * (name == "Refusal") for text in _texts(each))
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(("hint", "HINT", "_OUT")):
        yield from _texts(node.value) if isinstance(node.targets[0], ast.Name) else ()


def test_hints_are_sentences() -> None:
    found = [(text, _where(module)) for module in MODULES for node in ast.walk(_tree(module)) for text in _hints(node)]
    assert len(found) > 200
    assert [each for each in found if each[0][:1].islower()] == []


def test_everything_but_the_training_side_imports_without_torch() -> None:
    """Import the doorway and every core module in a process where torch cannot be imported."""
    training = {room for room, entry in HOUSE.items() if entry.needs & TRAINING}
    modules = [_module_name(module) for module in MODULES if _room_of(module) not in training | {"__main__"}]
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


CAPS = {
    "average": 7, "merge": 7, "shard_size": 16, "decode": 11, "encode": 7, "strict": 17, "allow_lossy": 7, "resume": 14,
}  # fmt: skip
"""Option -> modules that name it at most; the caps go down only, to four: defined, shown, and acted on."""


_FOREIGN = {"zip", "realpath", "load_state_dict"}
"""Functions of Python and torch with an argument `strict`."""


def _called(call: ast.Call) -> str:
    """Return the name of the called function, without what is in front of it."""
    name: str = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name


def _named(tree: ast.Module) -> Iterator[str]:
    """Yield what a module names: parameters, keyword arguments, attributes, fields and literal texts.

    Of methods that are called, such as `text.encode()`, and of the arguments of `_FOREIGN`, the name is Python's or
    torch's.
    """
    nodes = list(ast.walk(tree))
    methods = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Call) and _called(node) not in _FOREIGN:
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Attribute) and id(node) not in methods:
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            yield from (
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_few_modules_name_an_option() -> None:
    pickled = PACKAGE / "formats/pickled"  # its `encode` is that of Python's `_codecs`
    modules = [module for module in MODULES if module.parent != pickled]
    counts = Counter(name for module in modules for name in CAPS.keys() & {*_named(_tree(module))})
    assert {name: count for name, count in counts.items() if count > CAPS[name]} == {}
    assert counts.keys() == CAPS.keys()
