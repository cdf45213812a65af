"""A new user: the wheel in an environment with only its dependencies, the README's commands, and some failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.checkpoints import tiny
from tests.cli.running import BUG

ROOT = Path(__file__).parent.parent
NAME = "tiny-qwen3-moe"
pytestmark = pytest.mark.oracle
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


def test_it_needs_no_torch(user: User) -> None:
    assert "ModuleNotFoundError" in user.run("python -c 'import torch'", code=1)
    assert str(user.scripts.parent) in user.run("python -c 'import transaxle; print(transaxle.__file__)'")


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


def test_a_wrong_path_names_the_one_that_was_meant(user: User) -> None:
    said = user.run("transaxle ls tiny-qwen3-mo", code=4)
    assert f"Did you mean {NAME}" in said
    assert "Traceback" not in said


def test_a_killed_run_is_continued_or_cleaned(user: User) -> None:
    """The target does not exist until it is complete, wherever the first run was killed."""
    command = f"exec transaxle convert {NAME} killed --to torchtitan"
    process = subprocess.Popen(["bash", "-c", command], cwd=user.folder, env=user.environment)
    hidden = user.folder / ".killed.transaxle-partial"
    while process.poll() is None and not hidden.exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (user.folder / "killed").exists() or not hidden.exists()
    user.run("transaxle clean . --yes")
    assert not hidden.exists()
    user.run("rm -rf killed")
    user.run(f"transaxle convert {NAME} killed --to torchtitan")
    user.run(f"transaxle verify {NAME} killed")


def test_a_checkpoint_that_is_cut_off_is_refused(user: User) -> None:
    user.run(f"cp -r {NAME} cut")
    file = user.folder / "cut/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = user.run("transaxle convert cut no --to torchtitan", code=3)
    assert "model.safetensors" in said
    assert "Traceback" not in said
    assert not (user.folder / "no").exists()


def test_a_bug_leaves_a_report_to_send(user: User) -> None:
    (module,) = user.scripts.parent.glob("lib/python*/site-packages/transaxle/cli/ls.py")
    as_it_was = module.read_text("utf-8")
    broken = "def fold_rows(*_, **__):\n    raise ZeroDivisionError('so it is')\n"
    module.write_text(f"{as_it_was}\n\n{broken}", "utf-8")
    try:
        said = user.run(f"transaxle ls {NAME}", code=BUG)
    finally:
        module.write_text(as_it_was, "utf-8")
    assert "Traceback" not in said
    (report,) = re.findall(r"\S+transaxle-bug-\S+\.txt", said)
    text = Path(report).read_text("utf-8")
    assert "Traceback" in text
    assert "ZeroDivisionError: so it is" in text
    assert f"transaxle ls {NAME}" in text


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
