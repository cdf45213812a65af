"""Every name that is written as `transformers` is one that transformers has, or it is refused.

Every model type that builds from a tiny config is stored by `save_pretrained`, converted with its config and without,
and loaded; `make oracle` takes all of them, `make test` a sample with and without wrappers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests.oracles import wrappers
from tests.oracles.quiet import quiet

SAMPLE = {
    "gemma3": "",
    "llava": "",
    "voxtral": "",
    "qwen3_vl": "",
    "step3p7": "",
    "gemma3_text": "",
    "llama": "",
    "qwen3_moe": "",
}
"""Model type -> the code with which it is refused; none: it is converted."""
_MOST_DIFFER = 5


def outcomes(model_type: str, folder: Path) -> list[str] | None:
    """What becomes of a type with its config, without, and in a load: a code, or "" for the names that the peer has.

    None where it does not build. What is wrong and not refused is an assertion.
    """
    model = wrappers.build(model_type)
    source = None if model is None else wrappers.saved(model, folder / "source")
    if model is None or source is None or not (source / "model.safetensors").exists():
        return None
    wanted = model.state_dict()
    found = [_loaded(model, source)]
    for number in range(2):
        out = folder / f"out{number}"
        try:
            tx.convert(source, out, to="transformers", sync=False)
        except tx.TransaxleError as error:
            found.append(error.code)
        else:
            with tx.open(out) as checkpoint:
                differ = sorted(set(checkpoint) ^ wanted.keys())
            assert not differ, f"{model_type}: names that only one side has: {differ[:_MOST_DIFFER]}"
            found.append("")
        (source / "config.json").unlink(missing_ok=True)
    return found


def _loaded(model: torch.nn.Module, source: Path) -> str:
    """Load what a model has stored into it after its values were changed: they are back, or it was refused."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    try:
        with quiet():
            tx.load(model, source)
    except tx.TransaxleError as error:
        return error.code
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    differ = [name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])]
    differ = [name for name in differ if name in parameters and not before[name].isnan().any()]
    assert not differ, f"loaded, and not as they were: {differ[:_MOST_DIFFER]}"
    return ""


@pytest.mark.parametrize("model_type", SAMPLE)
def test_names_are_those_of_the_peer_or_refused(model_type: str, tmp_path: Path) -> None:
    found = outcomes(model_type, tmp_path)
    assert found is not None
    _, configured, bare = found
    assert configured == SAMPLE[model_type]
    assert bare == "" or bare in tx.CODES


@pytest.mark.oracle
def test_every_type_that_builds(tmp_path: Path) -> None:
    built, wrong = [], []
    for model_type in wrappers.types():
        try:
            if outcomes(model_type, tmp_path / model_type) is not None:
                built.append(model_type)
        except AssertionError as error:
            wrong.append(f"{model_type}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(built) > 250
