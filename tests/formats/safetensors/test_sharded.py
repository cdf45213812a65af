"""Indexes that name a great many shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import transaxle as tx
from tests.formats.files import INDEX
from tests.work import assert_linear, calls
from transaxle.errors import Refused


def test_an_index_of_absent_shards_is_refused_in_linear_time(tmp_path: Path) -> None:
    def read(count: int) -> Callable[[], None]:
        names = {f"t{at}": f"model-{at:06}.safetensors" for at in range(count)}
        folder = tmp_path / str(count)
        folder.mkdir()
        folder.joinpath(INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))

        def work() -> None:
            with pytest.raises(Refused, match="places 1 tensors in it") as caught:
                tx.open(folder)
            assert len(caught.value.refusals) == 101

        return work

    works = [read(count) for count in (500, 1_000, 2_000)]
    works[0]()  # what it imports counts once
    assert_linear([calls(work) for work in works])
    assert calls(works[-1]) - calls(works[0]) < 1_500 * 20
