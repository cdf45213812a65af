"""Installed packages that add formats and families: those of the documentation, and broken ones."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import same, tensors, tiny, write
from tests.cli.running import REFUSED, Outcome, process

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "extending.md").read_text("utf-8")
TOY = (ROOT / "docs" / "how-to" / "add-a-family.md").read_text("utf-8")

Program = Callable[..., Outcome]


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def install(site: Path, name: str, points: str, files: dict[str, str]) -> None:
    """Put a package where Python finds it, as an installer does: its modules, and its metadata beside them."""
    for file, text in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text, "utf-8")
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    (metadata / "entry_points.txt").write_text(points, "utf-8")


def _points(block: str) -> str:
    """Return the entry points of a pyproject.toml as installers write them."""
    group, line = re.findall(r'^\[project\.entry-points\."(.*)"\]\n(\w+ = .*)$', block, re.MULTILINE)[0]
    return f"[{group}]\n{line.replace(chr(34), '')}\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of installed packages."""
    return tmp_path / "site"


@pytest.fixture
def program(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs the program in a process of its own that finds the packages, beside a checkpoint `ck`."""
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT / 'src'}")
    monkeypatch.chdir(tmp_path)
    tiny(tmp_path / "ck")
    return process


@pytest.fixture
def tiny_format(site: Path) -> None:
    """The package of the guide."""
    points = _points(_blocks(GUIDE, "toml")[1])
    record, files = _blocks(GUIDE, "python")
    install(site, "tiny-format", points, {"tiny_format/__init__.py": record, "tiny_format/files.py": files})


@pytest.mark.usefixtures("tiny_format")
def test_a_package_adds_a_format(program: Program, tmp_path: Path) -> None:
    """The container of the guide is written, recognised, listed, verified, and read back bit for bit."""
    assert program("convert", "ck", "out", "--to", "tiny:torchtitan", "--verify").code == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["config.json", "model.tiny", "transaxle.json"]
    facts = program("info", "out", "--json").json
    assert (facts["format"], facts["dialect"]) == ("tiny", "torchtitan@0.3")
    assert program("ls", "out", "--json").json["format"] == "tiny"
    assert program("verify", "out").code == 0
    assert program("verify", "ck", "out").code == 0
    assert program("convert", "out", "back", "--to", "hf").code == 0
    assert same(tmp_path / "ck", tmp_path / "back")
    assert program("convert", "ck", "out", "--to", "tiny", "--overwrite").code == 0
    assert "tiny" in program("info", "--json").json["formats"]["writes"]


@pytest.mark.usefixtures("tiny_format")
def test_a_package_s_format_claims_names_of_files(program: Program, tmp_path: Path) -> None:
    assert program("convert", "ck", "one.tiny", "--to", "tiny").code == 0
    assert Path("one.tiny").is_file()
    assert program("diff", "ck", "one.tiny", "--family", "qwen3_moe").code == 0
    assert set(program("convert", "ck", "two.tiny", "--to", "dcp", "--json").codes) == {"UNSUPPORTED"}
    Path("one.tiny").rename(tmp_path / "ck" / "other.tiny")
    assert "other.tiny" in program("info", "ck", "--json").json["ignored"]
    broken = Path("broken.tiny")
    broken.write_bytes(b"TINY" + bytes(4))
    assert program("ls", "broken.tiny", "--json").codes == ["CORRUPT"]
    # What it cannot hold is refused.
    write(tmp_path / "wide", {name: array.astype("u4") for name, array in list(tensors().items())[:2]})
    outcome = program("convert", "wide", "out", "--to", "tiny:identity", "--json")
    assert outcome.code == REFUSED
    assert outcome.codes == ["UNSUPPORTED"] * 2


@pytest.mark.usefixtures("tiny_format")
def test_what_ships_answers_without_packages(program: Program, site: Path) -> None:
    """A package that cannot be imported does not matter to commands that do not need it."""
    (site / "tiny_format" / "__init__.py").write_text("raise RuntimeError('not today')")
    assert program("ls", "ck").code == 0
    assert program("convert", "ck", "out", "--to", "dcp:torchtitan").code == 0
    assert program("convert", "ck", "two", "--to", "torchtitan").code == 0
    outcome = program("convert", "ck", "three", "--to", "tiny", "--json")
    assert outcome.codes == ["UNSUPPORTED"]
    assert "tiny-format 1.0" in outcome.out
    assert "not today" in outcome.out


RAW_RECORD = """
from transaxle.formats.registry import Clue, Format, named

RAW = Format(
    name="rawdir", title="a folder of raw tensors", clues=(Clue(named("index.json")),), reader="raw.files:open_raw",
    draft="raw.files:draft", openers=("index.json",), files=r"index\\.json|t\\d+\\.bin",
)
"""
RAW_FILES = """
import json

from transaxle.formats.catalog import Container, Draft, Entry, Extent, Fragment
from transaxle.formats.registry import sort_sidecars
from transaxle.formats.catalog import nbytes


def open_raw(storage, path, member):
    entries, files = {}, {member: storage.size(member)}
    for name, (dtype, shape, file) in json.loads(storage.read(member, 0, files[member])).items():
        files[file] = storage.size(file)
        entries[name] = Entry(name, dtype, tuple(shape), (Extent((0,) * len(shape), tuple(shape), file, 0),))
    beside = sort_sidecars(storage, files)
    return Container("rawdir", path, storage, entries, files, {}, beside.carried, beside.ignored)


def draft(tensors, *, metadata, shard_size):
    entries, sizes, index = {}, {}, {}
    for number, spec in enumerate(tensors):
        file = f"t{number}.bin"
        index[spec.name] = (spec.dtype, spec.shape, file)
        extents = (Extent((0,) * len(spec.shape), spec.shape, file, 0),)
        entries[spec.name] = Entry(spec.name, spec.dtype, spec.shape, extents)
        sizes[file] = nbytes(spec.dtype, spec.shape)
    text = json.dumps(index).encode()
    sizes["index.json"] = len(text)
    return Draft("rawdir", entries, sizes, (Fragment("index.json", 0, text),))
"""


def test_a_folder_whose_files_end_like_those_of_torch(program: Program, site: Path, tmp_path: Path) -> None:
    """Its manifest says who reads it, and which files are its own when the package is gone."""
    points = "[transaxle.formats]\nrawdir = raw:RAW\n"
    install(site, "raw-format", points, {"raw/__init__.py": RAW_RECORD, "raw/files.py": RAW_FILES})
    assert program("convert", "ck", "out", "--to", "rawdir").code == 0
    assert program("verify", "out").code == 0
    assert program("convert", "out", "back", "--to", "hf").code == 0
    assert same(tmp_path / "ck", tmp_path / "back")
    site.rename(tmp_path / "gone")
    outcome = program("ls", "out", "--json")
    assert outcome.codes == ["UNSUPPORTED"]
    assert "written as 'rawdir', which no installed package provides" in outcome.out
    outcome = program("convert", "ck", "other", "--to", "rawdir", "--json")
    assert "there is no such format either (formats: safetensors, torch" in outcome.out
    assert program("convert", "ck", "out", "--to", "hf", "--overwrite").code == 0
    assert not list(Path("out").glob("*.bin"))


HOSTILE = {
    '{"a": ["F32", [16.0], 0]}': "CORRUPT",
    '{"a": ["F32", [4], 0], "a": ["F32", [2], 0]}': "NAME_COLLISION",
    "[" * 200_000: "CORRUPT",
}


@pytest.mark.usefixtures("tiny_format")
@pytest.mark.parametrize(("header", "code"), HOSTILE.items(), ids=range(len(HOSTILE)))
def test_the_guide_s_format_refuses_hostile_files(header: str, code: str, program: Program) -> None:
    text = header.encode()
    Path("bad.tiny").write_bytes(b"TINY" + len(text).to_bytes(8, "little") + text + bytes(64))
    assert program("convert", "bad.tiny", "out", "--to", "identity", "--json").codes == [code]
    assert not Path("out").exists()


def _torch(**changes: object) -> str:
    """Return a module whose format is that of torch files but for some fields."""
    fields = ", ".join(f"{name}={value!r}" for name, value in {"name": "tiny", **changes}.items())
    return (
        "from dataclasses import replace\nfrom transaxle.formats.registry import TORCH\n"
        f"TINY = replace(TORCH, {fields})"
    )


_POINT = "tiny = broken:TINY"
FORMATS = {
    "no module": ("tiny = nowhere:TINY", "", "UNSUPPORTED", "nowhere"),
    "no record": (_POINT, "TINY = 3", "UNSUPPORTED", "is 3"),
    "another name": (_POINT, _torch(name="small"), "UNSUPPORTED", "'small'"),
    "a name that is taken": ("torch = broken:TINY", _torch(name="torch"), "NAME_COLLISION", "built-in format"),
    "an ending that is taken": (_POINT, _torch(), "NAME_COLLISION", ".bin"),
    "an ordinary ending": (_POINT, _torch(one_file=(".json",)), "NAME_COLLISION", ".json"),
    "no reader": (_POINT, _torch(one_file=(".tiny",), reader="nowhere:open"), "UNSUPPORTED", "nowhere"),
}


@pytest.mark.parametrize(("point", "code", "refusal", "said"), FORMATS.values(), ids=FORMATS)
def test_a_broken_format_is_named(
    point: str, code: str, refusal: str, said: str, site: Path, program: Program, tmp_path: Path
) -> None:
    install(site, "broken-format", f"[transaxle.formats]\n{point}\n", {"broken.py": code})
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model.tiny").write_bytes(b"")
    words = ("--format", "tiny") if said == "nowhere" else ()
    path = "x/model.tiny" if said == "nowhere" else "x"
    outcome = program("ls", path, *words, "--json")
    assert outcome.codes == [refusal]
    assert said in outcome.out
    assert "broken-format 1.0" in outcome.out


@pytest.mark.usefixtures("tiny_format")
def test_two_packages_with_one_name(site: Path, program: Program) -> None:
    install(site, "other-tiny", "[transaxle.formats]\ntiny = tiny_format:TINY\n", {})
    outcome = program("convert", "ck", "out", "--to", "tiny", "--json")
    assert outcome.codes == ["NAME_COLLISION"]
    assert "other-tiny 1.0" in outcome.out
    assert "tiny-format 1.0" in outcome.out


@pytest.fixture
def toy_family(site: Path, tmp_path: Path) -> None:
    """A package with the table of the other guide, and a checkpoint `toy` of it."""
    files = {"toy_family/__init__.py": "", "toy_family/toy.rules": _blocks(TOY, "text")[0]}
    install(site, "toy-family", _points(_blocks(GUIDE, "toml")[0]), files)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (7, 4)}
    for half in ("gate", "up"):
        shapes[f"model.layers.0.{half}_proj.weight"] = (5, 4)
    some = next(iter(tensors().values()))
    held = {name: some.ravel()[: shape[0] * shape[1]].reshape(shape) for name, shape in shapes.items()}
    write(tmp_path / "toy", held, config={"model_type": "toy"})
    write(tmp_path / "bare", held)


@pytest.mark.usefixtures("toy_family")
def test_a_package_adds_a_family(program: Program, tmp_path: Path) -> None:
    """It is recognised by its model type, by its names, and by its own name; and read back bit for bit."""
    for folder in ("toy", "bare"):
        facts = program("info", folder, "--json").json
        assert (facts["family"], facts["dialect"]) == ("toy", "hf")
    assert program("convert", "toy", "out", "--to", "joined", "--verify").code == 0
    assert program("info", "out", "--json").json["dialect"] == "joined"
    assert program("convert", "out", "back", "--to", "hf").code == 0
    assert same(tmp_path / "toy", tmp_path / "back")
    assert program("ls", "bare", "--family", "toy", "--axis", "f=5").code == 0
    assert program("ls", "ck", "--json").json["family"] == "qwen3_moe"
    assert "toy" in program("info", "--json").json["families"]


FAMILIES = {
    "no module": ("toy = nowhere", {}, "UNSUPPORTED", "nowhere"),
    "no package": ("toy = broken", {"broken.py": ""}, "UNSUPPORTED", "no package"),
    "no tables": ("toy = broken", {"broken/__init__.py": ""}, "UNSUPPORTED", "no *.rules"),
    "a table that is not sound": (
        "toy = broken", {"broken/__init__.py": "", "broken/a.rules": "family\n"}, "CORRUPT", "a.rules",
    ),
    "a family that ships": (
        "toy = broken", {"broken/__init__.py": "", "broken/a.rules": "family llama\n"}, "NAME_COLLISION", "llama",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("point", "files", "refusal", "said"), FAMILIES.values(), ids=FAMILIES)
def test_a_broken_family_is_named(
    point: str, files: dict[str, str], refusal: str, said: str, site: Path, program: Program
) -> None:
    install(site, "broken-family", f"[transaxle.families]\n{point}\n", files)
    outcome = program("ls", "ck", "--family", "toy", "--json")
    assert outcome.codes == [refusal]
    assert said in outcome.out
    assert "broken-family 1.0" in outcome.out


def test_the_code_of_the_guides_is_tested() -> None:
    assert len(_blocks(GUIDE, "python")) == len(_blocks(GUIDE, "toml")) == 2
    assert textwrap.dedent(_blocks(TOY, "text")[0]).startswith("family toy")


ENDS = {
    "when it is imported": ("raise SystemExit(0)", ""),
    "when its reader is imported": (
        _torch(one_file=(".tiny",), reader="late:open_it"), "class Stop(BaseException): ...\nraise Stop('enough')",
    ),
    "when that reads": (
        _torch(one_file=(".tiny",), reader="late:open_it"),
        "def open_it(*_, **__):\n    import sys\n    print('{}')\n    sys.exit('over')",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("record", "reader"), ENDS.values(), ids=ENDS)
def test_a_package_that_ends_the_program_is_named(
    record: str, reader: str, site: Path, program: Program, tmp_path: Path
) -> None:
    """And what it prints does not mix with the result."""
    (tmp_path / "x.tiny").write_bytes(b"")
    install(site, "ending", f"[transaxle.formats]\n{_POINT}\n", {"broken.py": record, "late.py": reader})
    outcome = program("ls", "x.tiny", "--format", "tiny", "--json")
    assert outcome.code == REFUSED
    assert [each["code"] for each in json.loads(outcome.out)["error"]["refusals"]] == ["UNSUPPORTED"]
    assert "ending 1.0" in outcome.out
