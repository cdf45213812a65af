"""Published files: wheels with and without compiled parts, and the text of the package's page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import transaxle as tx
from hatch_build import with_links
from tests.cli.running import tree
from tests.engine import quantized

ROOT = Path(__file__).parent.parent
PACKED = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built without a compiler, from the source alone."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKED:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", ".build-*"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(command, cwd=source, env=os.environ | {"CC": "false"}, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def test_a_wheel_without_compiled_parts_is_for_any_platform_and_computes_the_same(pure: Path, tmp_path: Path) -> None:
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".so")] == []
        wheel.extractall(tmp_path / "pure")
    quantized.store(tmp_path / "fp8", quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=1))
    made = {}
    for name, package in (("pure", tmp_path / "pure"), ("compiled", ROOT / "src")):
        (tmp_path / name).mkdir(exist_ok=True)
        work = tmp_path / f"{name}-work"
        work.mkdir()
        kernels = _run(package, work, "from transaxle.encodings.arithmetic.codec import active as a; print(a())")
        assert kernels == {"pure": "numpy", "compiled": "compiled"}[name]
        _run(
            package,
            work,
            "import transaxle as tx",
            "tx.convert('../fp8', 'plain', to='torchtitan', decode='bf16')",
            "tx.convert('plain', 'mxfp8', to='hf', encode='mxfp8')",
            "tx.convert('../fp8', 'dcp', to='dcp:torchtitan')",
        )
        made[name] = tree(work)
    assert made["pure"] == made["compiled"]


def _run(package: Path, folder: Path, *lines: str) -> str:
    """Run Python with a package of ours, without warnings; return what it prints."""
    program = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_page_of_the_package_has_no_broken_links(pure: Path) -> None:
    with zipfile.ZipFile(pure) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(wheel.read(name).decode())
    assert told["Description-Content-Type"] == "text/markdown"
    page = told.get_payload()
    assert isinstance(page, str)
    assert page.startswith("# Transaxle\n")
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert [target for target in targets if not target.startswith(("http://", "https://", "#"))] == []


def test_links_lead_to_the_version_that_was_released() -> None:
    text = "[why](docs/why.md), [LICENSE](LICENSE), [here](#x), [there](https://there/a), ![drawn](a.svg)"
    assert with_links(text, "https://forge/x/", "1.2") == (
        "[why](https://forge/x/blob/v1.2/docs/why.md), [LICENSE](https://forge/x/blob/v1.2/LICENSE), [here](#x), "
        "[there](https://there/a), ![drawn](https://forge/x/raw/v1.2/a.svg)"
    )
    assert with_links(text, "", "1.2") == "why (`docs/why.md`), LICENSE, [here](#x), [there](https://there/a), drawn"


def test_the_version_is_the_changelogs_newest_and_the_one_to_cite() -> None:
    newest = re.findall(r"^## (\S+) \((\S+)\)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0]
    cited = dict(
        re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    )
    assert newest == (tx.__version__, cited["date-released"]) == (cited["version"], cited["date-released"])


def test_versions_of_python_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert project["requires-python"] == f">={named[0]}"
    assert named == sorted(named, key=lambda name: int(name.partition(".")[2]))
