"""Published files: wheels with and without compiled parts, the text of the package's page, and a new installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import transaxle as tx
from hatch_build import with_links
from tests.checkpoints import tiny
from tests.cli.running import tree
from tests.engine import quantized
from tests.some import a

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
    page = a(str, told.get_payload())
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
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", citation, re.MULTILINE))
    assert newest == (tx.__version__, cited["date-released"]) == (cited["version"], cited["date-released"])


def test_versions_of_python_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert project["requires-python"] == f">={named[0]}"
    assert named == sorted(named, key=lambda name: int(name.partition(".")[2]))


# A new user: the wheel in an environment with only its dependencies, the README's commands, and some failures.

NAME = "tiny-qwen3-moe"
BIG = "Qwen3-30B-A3B/"
"""The checkpoint of which the README speaks; here it is a small one."""


@dataclass(frozen=True)
class User:
    """An environment, and a folder with a checkpoint."""

    scripts: Path
    folder: Path
    wheel: Path
    """From which the package was installed."""

    def run(self, command: str, code: int = 0) -> str:
        """Type a command; return all that is printed."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    @property
    def environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        return ours | {"PATH": f"{self.scripts}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    place = tmp_path_factory.mktemp("new")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "env", with_pip=True, symlinks=True)
    scripts = place / "env/bin"
    (site,) = (place / "env/lib").glob("python*/site-packages")
    for top in sorted(needed("transaxle")):
        if not (site / top.name).exists():
            (site / top.name).symlink_to(top)
    pip = [str(scripts / "python"), "-m", "pip", "install", "--quiet", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (place / "work").mkdir()
    tiny(place / "work" / NAME)
    tiny(place / "work" / BIG)
    return User(scripts, place / "work", wheel)


def needed(name: str) -> set[Path]:
    """Return the folders and modules of what a package asks for without extras, and what these ask for."""
    found: set[Path] = set()
    seen, left = {name}, [name]
    while left:
        asked = distribution(left.pop())
        for requirement in map(Requirement, asked.requires or ()):
            if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            seen.add(requirement.name)
            left.append(requirement.name)
            files = distribution(requirement.name).files or ()
            tops = {file.parts[0] for file in files} - {"..", "__pycache__"}
            found |= {Path(str(distribution(requirement.name).locate_file(top))) for top in tops}
    return found


@pytest.mark.oracle
def test_it_needs_no_torch(user: User) -> None:
    assert "ModuleNotFoundError" in user.run("python -c 'import torch'", code=1)
    assert str(user.scripts.parent) in user.run("python -c 'import transaxle; print(transaxle.__file__)'")


@pytest.mark.oracle
def test_the_readme_from_top_to_bottom(user: User) -> None:
    """Its commands, and its lines of Python; what needs a clone or ranks is not for this environment."""
    page = (ROOT / "README.md").read_text("utf-8")
    commands = re.findall(r"^\$ (transaxle .*)$", page, re.MULTILINE)
    assert [line.split()[1] for line in commands] == ["demo", "ls", "plan", "convert", "verify"]
    assert "pip install" in user.run(commands.pop(0).partition("#")[0], code=3)
    said = [user.run(line) for line in commands]
    assert "69 tensors" in said[0]
    assert "nothing refused" in said[1]
    assert "equal" in said[3]
    user.run("rm -r out")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (user.folder / "page.py").write_text(block)
    promised = re.findall(r"# -> (.*)$", block, re.MULTILINE)
    assert user.run("python -W error page.py").splitlines() == promised
    user.run("rm -r out")


@pytest.mark.oracle
def test_one_wheel_serves_every_python(user: User) -> None:
    """The compiled parts need only the C library of manylinux2014, and no Python."""
    assert re.fullmatch(r"transaxle-\S+-py3-none-linux_\w+\.whl", user.wheel.name)
    compiled = sorted(user.scripts.parent.glob("lib/python*/site-packages/transaxle/**/*.so"))
    assert [file.name for file in compiled] == ["libkernel.so", "libscan.so", "libcopier.so"]
    for file in compiled:
        dynamic = subprocess.run(["readelf", "-dW", file], check=True, capture_output=True, text=True).stdout
        assert set(re.findall(r"\(NEEDED\).*\[(\S+)\]", dynamic)) <= {"libc.so.6"}
        symbols = subprocess.run(["readelf", "--dyn-syms", "-W", file], check=True, capture_output=True, text=True)
        asked = re.findall(r" UND (\S+?)@GLIBC_(\d+)\.(\d+)", symbols.stdout)
        assert all((int(major), int(minor)) <= (2, 17) for _, major, minor in asked), asked
        assert " Py" not in symbols.stdout
