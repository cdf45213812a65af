"""Tables of converters: derived, read by our own parser, and proved on other weights and sizes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as torch_file

import transaxle as tx
from tests.some import some
from transaxle.axes.notation import tables
from transaxle.derivation.sources import from_folders
from transaxle.derivation.table import Labels
from transaxle.derivation.traces import number_elements

CONFIGS = ({"layers": 2, "heads": 3, "width": 10, "ffn": 7}, {"layers": 3, "heads": 2, "width": 6, "ffn": 5})
LAST = {"layers": 4, "heads": 5, "width": 14, "ffn": 9}


def _before(config: dict[str, int], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    heads, width, ffn = config["heads"], config["width"], config["ffn"]
    layers = [f"model.layers.{at}." for at in range(config["layers"])]
    shapes = {"gate": (ffn, width), "up": (ffn, width), "q": (heads * 4, width), "norm": (width,)}
    return {f"{layer}{name}": torch.zeros(shape, dtype=dtype) for layer in layers for name, shape in shapes.items()}


def pack(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fuse gate and up, interleave the two halves of every head, and rename."""
    packed = {}
    for layer in sorted({name.rpartition(".")[0] for name in state}):
        target = layer.replace("model.layers", "blocks")
        packed[f"{target}.gate_up"] = torch.cat([state[f"{layer}.gate"], state[f"{layer}.up"]]).T.contiguous()
        q = state[f"{layer}.q"]
        packed[f"{target}.q"] = q.reshape(-1, 2, 2, q.shape[1]).transpose(1, 2).reshape(q.shape)
        packed[f"{target}.norm"] = state[f"{layer}.norm"]
    return packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_becomes_a_table(dtype: torch.dtype, tmp_path: Path) -> None:
    """The last sample proves it; and on random weights the engine does what the function does."""
    samples = [_before(config, dtype) for config in (*CONFIGS, LAST)]
    table = tx.derive(pack, samples=samples, configs=(*CONFIGS, LAST), dialects=("hf", "packed"))
    assert (table.proved, table.left_out) == (True, ())
    (family,) = tables.read(table.text)
    assert some(family.axes["l"]).text == "layers"
    table.save(tmp_path / "pack.rules")
    weights = {name: torch.randn(each.shape) for name, each in samples[-1].items()}
    _save(tmp_path / "in", weights)
    tx.convert(
        tmp_path / "in", tmp_path / "out", to="packed", rules=tmp_path / "pack.rules", config=LAST, family="pack"
    )
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == pack(weights).keys()
    assert all(np.array_equal(made[name], each.numpy()) for name, each in pack(weights).items())


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file({name: each.numpy() for name, each in tensors.items()}, folder / "model.safetensors")


def test_what_no_table_says_is_listed_and_not_guessed() -> None:
    def loses(state: dict[str, Any]) -> dict[str, Any]:
        kept = {name: each for name, each in state.items() if not name.endswith("norm")}
        return {**kept, "table": torch.full((3,), 0.0)}

    table = tx.derive(loses, samples=[_before(config) for config in CONFIGS])
    assert "table is made of nothing" in table.left_out
    assert "model.layers.0.norm is dropped" in table.left_out
    assert "norm" not in table.text


INVENTED: dict[str, Callable[[int], torch.Tensor]] = {
    "arange": torch.arange,
    "arange from 1": lambda n: torch.arange(1, n + 1).float(),
    "arange reversed": lambda n: torch.arange(n, 0, -1),
    "one": lambda _: torch.ones(1),
    "ones": torch.ones,
    "zeros": torch.zeros,
    "twos": lambda n: torch.full((2, n), 2.0),
}


def _with(extra: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**pack(state), "extra": extra}


@pytest.mark.parametrize("values", INVENTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_function_invents_is_listed(values: str, dtype: torch.dtype) -> None:
    samples = [_before(config, dtype) for config in (*CONFIGS, LAST)]

    def invents(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _with(INVENTED[values](state["model.layers.0.norm"].numel()), state)

    table = tx.derive(invents, samples=samples)
    assert table.left_out == ("extra is made of nothing",)
    assert "extra" not in table.text


@pytest.mark.parametrize("values", INVENTED)
def test_what_a_converter_of_folders_invents_is_listed(values: str, tmp_path: Path) -> None:
    pair = _numbered_pair(tmp_path, lambda state: _with(INVENTED[values](LAST["width"]), state))
    table = from_folders([pair], Labels("packed"))
    assert table.left_out == ("extra is made of nothing",)
    assert "extra" not in table.text


def _numbered_pair(
    folder: Path, convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> tuple[str, str]:
    _save(folder / "hub", _before(LAST))
    number_elements(str(folder / "hub"), str(folder / "in"))
    numbered = load_file(folder / "in" / "model.safetensors")
    (folder / "out").mkdir()
    made = convert({name: torch.from_numpy(each) for name, each in numbered.items()})
    torch_file(made, folder / "out" / "model.safetensors")
    return str(folder / "in"), str(folder / "out")


def _beside(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "model.layers.0.norm": torch.cat([state["model.layers.0.norm"], torch.ones(1)])}


def _padded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([each, torch.zeros(2, *each.shape[1:])]) for name, each in state.items()}


def _rounded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.bfloat16() for name, each in state.items()}


def _sorted(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.flatten().sort().values.reshape(each.shape) for name, each in state.items()}


def _halved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each * 0.5 for name, each in state.items()}


@pytest.mark.parametrize(("convert", "words"), [
    (_beside, "layers.0.norm: some of its values"),
    (_padded, "of its"),
    (_rounded, "bfloat16"),
    (_sorted, "layers"),
    (_halved, "changed"),
])  # fmt: skip
def test_values_that_are_not_only_moved_are_refused(
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(tx.TransaxleError, match=words) as caught:
        tx.derive(convert, samples=[_before(config) for config in (*CONFIGS, LAST)])
    assert caught.value.code == "UNSUPPORTED"
    pair = _numbered_pair(tmp_path, convert)
    with pytest.raises(tx.TransaxleError, match=words) as caught:
        from_folders([pair], Labels("packed"))
    assert caught.value.code == "UNSUPPORTED"


@pytest.mark.parametrize(("returned", "words"), [
    (None, "it returned None"),
    ([1], "it returned a value of type list"),
    ({}, "it returned an empty one"),
    ({"a": 3}, "its 'a' is a value of type int"),
])  # fmt: skip
def test_a_function_that_returns_no_state_dict(returned: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^the converter must return .*{words}$"):
        tx.derive(lambda _: returned, samples=[_before(LAST)])


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"samples": ()}, TypeError, "samples must be a list of state dicts, at least one"),
    ({"samples": {"a": np.zeros(3)}}, TypeError, "samples must be a list of state dicts"),
    ({"samples": [{}]}, TypeError, "none of them empty"),
    ({"samples": [{"a": [1, 2]}]}, TypeError, "'a' is a value of type list"),
    ({"configs": [{}, {}]}, ValueError, "one for each of the 1 samples; there are 2"),
    ({"config": {"layers": 2}}, TypeError, "for a function, give configs"),
    ({"dialects": ("hf", "hf")}, ValueError, "two different names"),
    ({"dialects": "hf"}, ValueError, "two different names"),
    ({"dialects": ("hf", "my own")}, ValueError, "two different names"),
    ({"converter": 3}, TypeError, "a model type or a function"),
    ({"converter": "llama"}, TypeError, "are for a function"),
])  # fmt: skip
def test_arguments_that_cannot_be(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tx.derive(**{"converter": dict, "samples": [{"a": np.zeros(3, np.float32)}], **given})


def test_a_function_without_a_name() -> None:
    assert tx.derive(lambda state: pack(state), samples=[_before(LAST)]).family == "derived"  # noqa: PLW0108


def test_numbers_in_names_that_no_dots_separate() -> None:
    def flat(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace(".", "_"): each for name, each in state.items()}

    with pytest.raises(tx.TransaxleError) as caught:
        tx.derive(flat, samples=[_before(LAST)])
    assert "in no name of the other dialect" in str(caught.value)
    assert "dots separate them" in caught.value.hint


def test_a_folder_that_is_not_numbered_is_refused(tmp_path: Path) -> None:
    """Numbers 1, 2, 3 … would be those of ranges that a converter makes."""
    tensors = {"a": torch.arange(1, 7).float()}
    _save(tmp_path / "in", tensors)
    _save(tmp_path / "out", tensors)
    with pytest.raises(tx.TransaxleError, match="derive --number"):
        from_folders([(str(tmp_path / "in"), str(tmp_path / "out"))], Labels("mine"))


def test_a_copy_is_numbered_whatever_the_source_is(tmp_path: Path) -> None:
    """A file alone has its config beside it."""
    _save(tmp_path / "hub", _before(CONFIGS[0]))
    (tmp_path / "hub" / "config.json").write_text("{}")
    for name, source in (("folder", tmp_path / "hub"), ("file", tmp_path / "hub" / "model.safetensors")):
        count = sum(each.numel() for each in _before(CONFIGS[0]).values())
        assert number_elements(str(source), str(tmp_path / name)) == count
    assert (tmp_path / "folder" / "config.json").read_text() == "{}"
    with pytest.raises(tx.TransaxleError, match=r"the folder .*absent does not exist"):
        number_elements(str(tmp_path / "hub"), str(tmp_path / "absent" / "numbered"))


def test_nothing_is_left_of_a_copy_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_numbers: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "no space")

    _save(tmp_path / "hub", _before(CONFIGS[0]))
    monkeypatch.setattr("transaxle.derivation.traces.save_file", full)
    with pytest.raises(tx.TransaxleError) as caught:
        number_elements(str(tmp_path / "hub"), str(tmp_path / "numbered"))
    assert caught.value.code == "NO_SPACE"
    assert not (tmp_path / "numbered").exists()


def test_a_pair_of_folders_becomes_a_table(tmp_path: Path) -> None:
    pairs = []
    for at, config in enumerate(CONFIGS):
        _save(tmp_path / f"hub{at}", _before(config))
        number_elements(str(tmp_path / f"hub{at}"), str(tmp_path / f"in{at}"))
        numbered = load_file(tmp_path / f"in{at}" / "model.safetensors")
        numbers = np.concatenate([each.ravel() for each in numbered.values()])
        assert len(np.unique(numbers)) == numbers.size
        _save(tmp_path / f"out{at}", pack({name: torch.from_numpy(each) for name, each in numbered.items()}))
        pairs.append((str(tmp_path / f"in{at}"), str(tmp_path / f"out{at}")))
    with pytest.raises(tx.TransaxleError, match="exists"):
        number_elements(str(tmp_path / "hub0"), str(tmp_path / "in0"))
    one = from_folders(pairs[:1], Labels("packed", dialects=("hf", "mine")))
    assert not one.proved
    assert "[layers_gate:x | layers_up:x]" in one.text
