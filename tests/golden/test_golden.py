"""Every golden case again; what differs from the digests that are kept is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.golden import digests, record
from tests.golden.cases import CASES, sources
from tests.golden.sources import SOURCES

SAMPLE = [*CASES][::29]
"""What `make test` runs of them."""
Run = Callable[[str], digests.Case]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that cases begin with."""
    folder = tmp_path_factory.mktemp("sources")
    for name, make in SOURCES.items():
        make(folder / name)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Carries a case out in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def carry_out(name: str) -> digests.Case:
        case = CASES[name]
        for source in sources(case):
            copy = shutil.copytree if (made / source).is_dir() else shutil.copy
            copy(made / source, tmp_path / source)
        found = {f"{number} {step.verb}": record.step(*step) for number, step in enumerate(case, 1)}
        return found | {"files": record.files(tmp_path, sources(case))}

    yield carry_out
    shutil.rmtree(tmp_path)


@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
def test_nothing_has_changed(
    run: Run, name: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    found = run(name)
    if request.config.getoption(digests.REWRITE):
        record_property(digests.PROPERTY, {name: found})
    else:
        assert [*digests.differences(digests.kept()[name], found)] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_nothing_of_a_sample_has_changed(run: Run, name: str) -> None:
    assert [*digests.differences(digests.kept()[name], run(name))] == []


def test_digests_are_those_of_the_cases() -> None:
    """A case without digests, or digests without a case, would be nobody's."""
    assert digests.kept().keys() == CASES.keys()


def test_what_differs_is_named() -> None:
    before: digests.Case = {"1 convert": {"tensors": 3, "files": "ab"}, "files": {"out/a": "1", "out/b": "2"}}
    after: digests.Case = {"1 convert": {"tensors": 4, "files": "ab"}, "files": {"out/a": "1"}}
    assert [*digests.differences(before, after)] == [
        "1 convert: tensors: was 3, is 4",
        "files: out/b: was 2, is absent",
    ]
    assert [*digests.differences(before, before)] == []
