"""Checkpoints that the peers made themselves are grouped right: every buffer, its tiles, and what its scales mean.

What a peer makes of its own weights is compared with code x scale x factor, worked out here from the buffers that were
found: a scale of the wrong tensor, tile or meaning gives other values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import transaxle as tx
from tests.oracles.quantized_peers import Made, compressed, fp8, gpt_oss, torchao
from tests.some import some
from transaxle.encodings.conventions.buffer_group import BufferGroups, group
from transaxle.encodings.conventions.convention import CONVENTIONS
from transaxle.encodings.conventions.quantization import module_of, read
from transaxle.encodings.conventions.rewriting import rewrite_config
from transaxle.encodings.encoding import WHOLE, EncodedTensor, Role

pytestmark = pytest.mark.peers

CODE = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F4": None}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def stored(made: Made, name: str) -> np.ndarray:
    """The bytes of a stored tensor, as numpy has them."""
    return made.tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()


def numbers(made: Made, one: EncodedTensor, role: Role) -> np.ndarray:
    """A buffer of scales, in single precision."""
    value = made.tensors[one.parts[role]]
    if role is Role.SCALE and one.encoding.scale == "F8_E8M0":
        return np.ldexp(np.float32(1), stored(made, one.parts[role]).astype(np.int32) - 127)
    return value.float().numpy().reshape(-1)


def value(made: Made, one: EncodedTensor) -> np.ndarray:
    """Code x scale x factor of every element, in double precision."""
    octets = stored(made, one.parts[Role.CODES])
    if one.encoding.code == "F4":
        nibbles = np.stack([octets & 15, octets >> 4], axis=-1).reshape(one.shape)
        codes = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7]
    else:
        codes = octets.view(CODE[one.encoding.code]).astype(np.float32).reshape(one.shape)
    scale = numbers(made, one, Role.SCALE).reshape(one.encoding.grid(one.shape)).astype(np.float64)
    for dim, (size, step) in enumerate(zip(one.shape, one.encoding.tiles(one.shape), strict=True)):
        scale = scale.repeat(step, axis=dim).take(range(size), axis=dim)
    factor = np.float64(1)
    if Role.GLOBAL in one.parts:
        factor = np.float64(CONVENTIONS[one.convention].factor(float(numbers(made, one, Role.GLOBAL)[0]), one.encoding))
    return np.asarray(codes * scale * factor)


def opened(made: Made, folder: Path) -> BufferGroups:
    """Group the tensors of the files, as they are on disk."""
    made.save(folder)
    container = tx.open(folder).container
    config = json.loads((folder / "config.json").read_text())
    return group(container.entries, read(config), container.metadata)


PRESETS = ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"]
KINDS = ["float8_row", "float8_tensor", "float8_block", "mxfp8", "mxfp4", "nvfp4", "nvfp4_one_level"]


def _preset(name: str, folder: Path, scale: str = "bfloat16") -> Made:
    return compressed({name: ["Linear"]}, ["lm_head"], 1, folder, scale)


def _torchao(kind: str, _: Path) -> Made:
    return torchao(kind, 2)


def _gpt_oss(_: Path) -> Made:
    return gpt_oss(4)


def _mixed(folder: Path) -> Made:
    groups = {"NVFP4A16": ["re:.*(gate|up)_proj$"], "FP8_DYNAMIC": ["re:.*self_attn.*"], "FP8_BLOCK": ["Linear"]}
    return compressed(groups, ["lm_head", "re:.*k_proj"], 5, folder)


CASES: dict[str, Callable[[Path], Made]] = {
    **{f"compressed-tensors {name}": partial(_preset, name) for name in PRESETS},
    "compressed-tensors FP8 F32": partial(_preset, "FP8", scale="float32"),
    "compressed-tensors mixed": _mixed,
    **{f"torchao {kind}": partial(_torchao, kind) for kind in KINDS},
    "transformers fp8": lambda _: fp8((32, 32), "float", 3),
    "transformers fp8 ue8m0": lambda _: fp8((32, 64), "ue8m0", 3),
    "transformers mxfp8": lambda _: fp8((1, 32), "ue8m0", 3),
    "transformers fp8 per tensor": lambda _: fp8(None, "float", 3),
    "gpt-oss": _gpt_oss,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_every_weight_is_found_with_its_scales(make: Callable[[Path], Made], tmp_path: Path) -> None:
    made = make(tmp_path)
    found = opened(made, tmp_path)
    assert found.refusals == ()
    assert found.bare == ()
    assert found.encoded.keys() == made.values.keys()
    assert made.values
    for name, one in found.encoded.items():
        peer = made.values[name]
        assert one.shape == tuple(peer.shape)
        assert WHOLE in one.encoding.tile or len(one.encoding.tile) == 2
        rtol = 2.0**-7 if peer.dtype == torch.bfloat16 else 1e-6
        np.testing.assert_allclose(value(made, one), peer.double().numpy(), rtol=rtol, atol=1e-30)
    used = {part for one in found.encoded.values() for part in one.parts.values()}
    scales = {name for name in made.tensors if "scale" in name or "qdata" in name or "packed" in name}
    assert scales <= used
    container = tx.open(tmp_path).container
    for one in found.encoded.values():  # our convention has the peer's own types and shapes
        convention = CONVENTIONS[one.convention]
        for role, name in one.parts.items():
            entry = container.entries[name]
            own = entry.dtype if role is Role.INPUT_SCALE else None
            dtype, shape = convention.presented(one.encoding, one.shape, role, own)
            assert dtype == entry.dtype, name
            # torchao's are not written. One scale is [] in transformers' modules, [1, 1] from its operation.
            if one.convention != "torchao" and not (shape == () and entry.shape == (1, 1)):
                assert shape == entry.shape, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "words"), [("nvfp4_swizzled", "matrix-multiply kernel"), ("int8", "'Int8Tensor'")])
def test_what_is_not_read_of_torchao_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    found = opened(torchao(kind, 2), tmp_path)
    assert {refusal.code for refusal in found.refusals} == {"UNSUPPORTED"}
    assert len(found.refusals) == 7
    assert all(words in refusal.message for refusal in found.refusals)


@pytest.mark.filterwarnings("ignore")
def test_without_its_config_a_checkpoint_says_the_same(tmp_path: Path) -> None:
    """Names and types suffice where blocks are the usual ones: as in a DCP folder, which has no config."""
    presets = (partial(_preset, name) for name in ("NVFP4", "FP8", "FP8_DYNAMIC", "MXFP4", "MXFP8"))
    makers: list[Callable[[Path], Made]] = [*presets, _gpt_oss]
    for number, make in enumerate(makers):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = make(folder)
        said = opened(made, folder)
        container = tx.open(folder).container
        assert group(container.entries).encoded == said.encoded


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [make for name, make in CASES.items() if "torchao" not in name])
def test_a_config_stays_true_of_what_stays_encoded(make: Callable[[Path], Made], tmp_path: Path) -> None:
    """Moved raw, a peer's own config stays as it is; with half of the weights decoded, it says so of these alone."""
    made = make(tmp_path)
    found = opened(made, tmp_path)
    container = tx.open(tmp_path).container
    parts = {part for one in found.encoded.values() for part in one.parts.values()}
    plain = {name: entry.shape for name, entry in container.entries.items() if name not in parts}
    assert rewrite_config(made.config, found.encoded, plain) == made.config
    modules = sorted({module_of(name) for name in found.encoded})
    left = {name: one for name, one in found.encoded.items() if module_of(name) in modules[::2]}
    decoded = {name: one.shape for name, one in found.encoded.items() if name not in left}
    said = some(read(rewrite_config(made.config, left, plain | decoded, decoded=decoded)))
    assert [module for module in modules if said.encodings(module)] == modules[::2]
    entries = {name: container.entries[name] for one in left.values() for name in one.parts.values()}
    assert group(entries, said).encoded == left
    assert read(rewrite_config(made.config, {}, plain | decoded, decoded=decoded)) is None
