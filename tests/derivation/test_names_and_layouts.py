"""Tables of small converters: numbers in names, the layout that a name has, and the file that a table is written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import transaxle as tx
from tests.some import a
from transaxle.derivation.sources import Table, check_place, prove, write_table
from transaxle.derivation.table import Labels, derive
from transaxle.derivation.traces import Trace
from transaxle.errors import StorageError, UsageError

State = dict[str, npt.NDArray[np.float32]]
LAYERS = (3, 4, 5)
"""In each of three samples; the last one proves."""


def _zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def _table(convert: Callable[[State], State], make: Callable[[int], State], configs: Any = None) -> str:
    configs = configs or [{"layers": layers, "width": 4 + 3 * layers} for layers in LAYERS]
    table = tx.derive(convert, samples=[make(config["layers"]) for config in configs], configs=configs)
    assert (table.proved, table.left_out) == (True, ())
    return table.text


def _renamed(words: Mapping[str, str]) -> Callable[[State], State]:
    def convert(state: State) -> State:
        made = {}
        for name, each in state.items():
            for old, new in words.items():
                name = name.replace(old, new)
            made[name] = each
        return made

    return convert


def test_a_name_that_counts_from_another_number() -> None:
    """One dialect has query 0 where the other has layer 1, whose index is that of all layers."""

    def make(layers: int) -> State:
        state = {f"layers.{at}.up": _zeros(2, 4 + 3 * layers) for at in range(layers)}
        return state | {f"queries.{at}": _zeros(4 + 3 * layers) for at in range(layers - 1)}

    def convert(state: State) -> State:
        return {
            f"layers.{int(name.partition('.')[2]) + 1}.query" if name.startswith("queries") else name: each
            for name, each in state.items()
        }

    lines = [" ".join(line.split()) for line in _table(convert, make).splitlines()]
    assert "queries.{q-1} = queries[w]" in lines
    assert "layers.{q}.query = queries[w]" in lines
    assert any(line.startswith("queries : q w when q > 0") for line in lines)


def test_numbers_that_the_other_dialect_has_words_for() -> None:
    def make(layers: int) -> State:
        width = 4 + 3 * layers
        return {f"layers.{at}.mlp.{which}.weight": _zeros(width, width) for at in range(layers) for which in range(2)}

    text = _table(_renamed({"mlp.0.": "fc1.", "mlp.1.": "fc2."}), make)
    assert "layers.{l}.mlp.0.weight" in text
    assert "layers.{l}.fc2.weight" in text


def test_numbers_are_no_words_where_there_are_more_of_them_in_one_model_than_in_another() -> None:
    def make(layers: int) -> State:
        return {f"layers.{at}.up": _zeros(2, layers + 2) for at in range(layers)}

    def spelled(state: State) -> State:
        words = ("one", "two", "three", "four", "five")
        return {f"{words[int(name.split('.')[1])]}.up": each for name, each in state.items()}

    with pytest.raises(tx.TransaxleError, match="in no name of the other dialect"):
        _table(spelled, make)


def test_layers_of_two_kinds_under_one_name() -> None:
    """A vector in every second layer, a matrix in the others: two tensors."""
    configs = [{"layers": n, "kinds": ["wide", "flat", "flat", "wide", "wide"][:n]} for n in LAYERS]

    def make(layers: int) -> State:
        kinds = a(list, configs[LAYERS.index(layers)]["kinds"])
        shapes = [(2, 4 + layers) if kind == "wide" else (4 + layers,) for kind in kinds]
        return {f"layers.{at}.query": _zeros(*shape) for at, shape in enumerate(shapes)}

    text = _table(_renamed({"query": "q"}), make, configs)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert 'layers.{l}.q = layers_q_query[x x2] when kinds[l] == "wide"' in lines
    assert 'layers.{l}.q = layers_q_query2[x2] when kinds[l] == "flat"' in lines


def test_which_layout_a_name_has_is_not_asked_where_it_is_not() -> None:
    """Without biases, nothing tells whether they would be fused; and where they are fused, so are the weights."""
    configs = [
        {"layers": 3, "gated": True, "bias": True},
        {"layers": 4, "gated": False, "bias": True},
        {"layers": 5, "gated": True, "bias": False},
        {"layers": 6, "gated": False, "bias": False},
    ]

    def make(layers: int) -> State:
        config = next(each for each in configs if each["layers"] == layers)
        kinds = [""] if not config["bias"] else ["", "_bias"]
        names = [*(["gate"] if config["gated"] else []), "up"]
        return {
            f"layers.{at}.{name}{kind}": _zeros(*((layers + 2, 3) if not kind else (layers + 2,)))
            for at in range(layers)
            for name in names
            for kind in kinds
        }

    def fused(state: State) -> State:
        made: dict[str, list[npt.NDArray[np.float32]]] = {}
        for name, each in sorted(state.items()):
            made.setdefault(name.replace("gate", "w12").replace("up", "w12"), []).append(each)
        return {name: np.concatenate(parts) for name, parts in made.items()}

    text = " ".join(_table(fused, make, configs).split())
    assert "w12_bias = [[layers_gate_bias:x3 | layers_up_bias:x5]] when gated" in text
    assert "w12_bias = layers_up_bias[x5] when not gated" in text


def test_a_count_that_is_the_same_in_every_model_has_no_key_that_happens_to_be_as_large() -> None:
    configs = [{"layers": n, "top_k": 2, "codebooks": 3} for n in LAYERS]

    def make(layers: int) -> State:
        blocks = {f"layers.{at}.attn.{which}.q": _zeros(layers + 2, 4) for at in range(layers) for which in range(2)}
        return blocks | {f"codebooks.{at}.embed": _zeros(layers + 2, 4) for at in range(3)}

    text = _table(_renamed({"q": "query", "embed": "table"}), make, configs)
    assert "a=2" in text
    assert "top_k" not in text
    assert "c=codebooks" in text


# The file of a table: nothing that must stay is replaced, and nothing is left half written.

TEXT = "# of mine\nfamily mine\n  axes d=width\n"
TABLE = Table("mine", TEXT, (), 1, proved=False)


def test_padding_that_is_stored_has_a_size_from_the_config() -> None:
    """A vocabulary that is padded in files: how much is to be written, no shape in memory shows."""
    traces = []
    for vocabulary, padded, width in ((5, 8, 3), (6, 11, 4), (9, 10, 7)):
        memory = np.arange(1, vocabulary * width + 1).reshape(vocabulary, width)
        config = {"vocab_size": padded, "unpadded_vocab_size": vocabulary, "hidden_size": width}
        traces.append(
            Trace({"unembed": np.pad(memory, ((0, padded - vocabulary), (0, 0)))}, {"lm_head": memory}, config)
        )
    labels = Labels("padded")
    text = derive(traces[:2], labels).text
    assert "vocab_size-unpadded_vocab_size" in text
    assert prove(text, traces, labels) == ()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_table_is_written(tmp_path: Path) -> None:
    for path in (tmp_path / "one.rules", str(tmp_path / "other.rules")):
        TABLE.save(path)
        assert Path(path).read_text("utf-8") == TEXT
    assert _names(tmp_path) == ["one.rules", "other.rules"]


@pytest.mark.parametrize("overwrite", [False, True, "everything"])
@pytest.mark.parametrize(("there", "stays"), [
    (TEXT, {False: "already exists"}),
    ("\n  dialect mine of qwen3\n", {False: "already exists"}),
    ("family.txt", {False: "already exists", True: "it is no table"}),
    ("", {False: "already exists", True: "it is no table"}),
    (None, {False: "a folder", True: "a folder", "everything": "a folder"}),
])  # fmt: skip
def test_what_is_there_is_replaced_only_if_that_is_asked_for(
    there: str | None, stays: dict[Any, str], overwrite: Any, tmp_path: Path
) -> None:
    path = tmp_path / "mine.rules"
    path.mkdir() if there is None else path.write_text(there)
    if overwrite in stays:
        for write in (TABLE.save, check_place):
            with pytest.raises(UsageError, match=stays[overwrite]) as caught:
                write(path, overwrite=overwrite)
            assert (caught.value.code, bool(caught.value.hint)) == ("EXISTS", True)
            assert there is None or ("=everything" in caught.value.hint) == (len(stays) == 2)
        assert there is None or path.read_text() == there
    else:
        TABLE.save(path, overwrite=overwrite)
        assert path.read_text("utf-8") == TEXT
    assert _names(tmp_path) == ["mine.rules"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link, dangling = tmp_path / "real.rules", tmp_path / "link.rules", tmp_path / "dangling.rules"
    real.write_text("family old\n")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "absent.rules")
    TABLE.save(link, overwrite=True)
    assert link.is_symlink()
    assert real.read_text("utf-8") == TEXT
    with pytest.raises(UsageError, match="already exists"):
        TABLE.save(dangling)


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the folder .*absent does not exist"):
        TABLE.save(tmp_path / "absent" / "mine.rules")
    with pytest.raises(StorageError, match="writing the table"):
        TABLE.save(tmp_path / ("a" * 250))
    with pytest.raises(UsageError, match="overwrite must be"):
        TABLE.save(tmp_path / "mine.rules", overwrite="table")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path"):
        TABLE.save(3)  # type: ignore[arg-type]
    assert _names(tmp_path) == []


def test_a_file_that_appears_in_the_meantime_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.rules"
    monkeypatch.setattr("transaxle.derivation.sources.check_place", lambda *_, **__: path.write_text("theirs"))
    with pytest.raises(UsageError, match="in the meantime"):
        write_table(TEXT, path)
    assert path.read_text() == "theirs"
    assert _names(tmp_path) == ["mine.rules"]
