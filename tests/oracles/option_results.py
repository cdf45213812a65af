"""What a conversion of the option sweep must have written, and what plain libraries read of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.oracles.hub import Tensors
from tests.oracles.quiet import quiet

STATE = "optim/"
_LOCAL = (
    (r"pre_mlp_layernorm\.weight", "mlp.linear_fc1.layer_norm_weight"),
    (r"input_layernorm\.weight", "self_attention.linear_qkv.layer_norm_weight"),
    (r"self_attention\.(q|kv)_layernorm\.weight", r"self_attention.linear_\1_up_proj.layer_norm_weight"),
    (r"local_experts\.(\d+)\.linear_(fc\d)\.weight", r"linear_\2.weight\1"),
)
"""Names of Megatron's own modules -> those of Transformer Engine's."""
_ALIASES = (
    *_LOCAL,
    (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
)
"""Second names in Megatron's folders -> first ones. Local layers join every norm with what follows it."""
_MODULES = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "output_layer.")
_OF_LAYER = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2", "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
_OF_MODULE = ("layer_norm_weight", "weight", "bias")
"""What megatron-core's modules register, in its order, which is that of the numbers in an optimizer's state."""


def read(container: str, path: Path) -> Tensors:
    """Read every tensor of a checkpoint; the optimizer's state as `optim/PARAMETER/STATE`."""
    if container == "safetensors":
        return {name: value for file in sorted(path.rglob("*.safetensors")) for name, value in load_file(file).items()}
    if container == "one file":
        return load_file(path)
    if container in ("torch", "pt"):
        files = [path] if path.is_file() else sorted(path.rglob("*.bin"))
        return {name: value for file in files for name, value in _flat(torch.load(file, weights_only=True))}
    if container == "deepspeed-universal":
        return dict(_universal(path))
    if container == "megatron_torch":
        return dict(_ranks(path))
    inner = path if container == "dcp" else _newest(path)
    return {_state_name(name, container): value for name, value in _dcp(inner).items()}


def _newest(path: Path) -> Path:
    step = (path / "latest_checkpointed_iteration.txt").read_text()
    return path / (step if step == "release" else f"iter_{int(step):07d}")


def _dcp(folder: Path) -> Tensors:
    items = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    state = {
        name: torch.zeros(item.size, dtype=item.properties.dtype)
        for name, item in items
        if isinstance(item, TensorStorageMetadata)
    }
    with quiet():
        load(state, checkpoint_id=folder, no_dist=True)
    return state


def _state_name(name: str, container: str) -> str:
    if not name.startswith("optimizer.state."):
        return name
    rest = name.removeprefix("optimizer.state.")
    if container == "dcp":
        parameter, state = rest.rsplit(".", 1)
    else:
        state, parameter = rest.split(".", 1)
    return f"{STATE}{parameter}/{state}"


def _flat(contents: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A torch file of one of our targets: flat, or nested with the model and the optimizer."""
    model = contents.get("model", contents)
    yield from ((name, value) for name, value in model.items() if isinstance(value, torch.Tensor))
    for parameter, states in contents.get("optimizer", {}).get("state", {}).items():
        yield from ((f"{STATE}{parameter}/{state}", value) for state, value in states.items())


def _universal(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    zero = path / (path / "latest_universal").read_text() / "zero"
    for file in sorted(zero.glob("*/*.pt")):
        value = torch.load(file, weights_only=True)
        tensor = value["param"] if isinstance(value, dict) else torch.as_tensor(value)
        parameter = file.parent.name
        yield parameter if file.stem == "fp32" else f"{STATE}{parameter}/{file.stem}", tensor


def _ranks(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(_newest(path).glob("mp_rank_*/model_optim_rng.pt")):
        contents = torch.load(file, weights_only=False)
        for name, value in contents["model"].items():
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                yield f"{file.parent.name}/{name}", value
        for name, value in _numbered(contents):
            yield f"{STATE}{file.parent.name}/{name}", value


def _numbered(contents: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The state of a rank's optimizer, or of two where experts have one: `get_megatron_optimizer` numbers parameters.

    Each group has its parameters in the order of the modules: vectors without weight decay, and the rest.
    """
    if "optimizer" not in contents:
        return
    model, top = contents["model"], contents["optimizer"]
    trained = sorted((name for name in model if not _is_local(name, model)), key=_module_order)
    for part in top if isinstance(top, list) else [top]:
        inner = part.get("optimizer", part)
        for group in inner["param_groups"]:
            members = [
                name
                for name in trained
                if (model[name].ndim > 1) == (group["wd_mult"] > 0)
                and (not isinstance(top, list) or (".experts." in name) == group["is_expert_parallel"])
            ]
            for name, number in zip(members, group["params"], strict=True):
                states = {"step": torch.tensor(group.get("step", torch.nan)), **inner["state"][number]}
                yield from ((f"{name}/{state}", value) for state, value in states.items())


def _is_local(name: str, model: Mapping[str, Any]) -> bool:
    """Whether a name is a second one, of Megatron's own modules, or no tensor's."""
    return not isinstance(model[name], torch.Tensor) or any(
        (other := re.sub(f"{second}$", first, name)) != name and other in model for second, first in _LOCAL
    )


def _module_order(name: str) -> tuple[int, ...]:
    top = next(number for number, start in enumerate(_MODULES) if name.startswith(start))
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.([a-z_]+)(\d*)", name)
    if match is None:
        return (top,)
    return top, int(match[1]), _OF_LAYER.index(match[2]), _OF_MODULE.index(match[3]), int(match[4] or 0)


def without_aliases(tensors: Tensors, wanted: Tensors) -> Tensors:
    """Leave out second names of norms that hold what the first one holds."""
    left = dict(tensors)
    for name in tensors.keys() - wanted.keys():
        for second, first in _ALIASES:
            other = re.sub(f"{second}(?=$|/)", first, name)
            if other in wanted and agree(name, tensors[name], wanted[other]):
                left.pop(name, None)
    return left


def agree(name: str, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are the same; of steps, which are numbers of any type, the value."""
    if name.startswith(STATE) and name.endswith("/step"):
        return one.numel() == two.numel() == 1 and float(one) == float(two)
    return same(one, two)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    first, second = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, two))
    return torch.equal(first, second)


def chosen(name: str, only: str | None, skip: str | None) -> bool:
    """Whether patterns choose a name."""
    return (only is None or fnmatchcase(name, only)) and not (skip is not None and fnmatchcase(name, skip))


def tiles(scales: torch.Tensor, rows: int = 128, columns: int = 128) -> torch.Tensor | None:
    """The scale of each tile, of scales of each element; None where a tile has several."""
    padding = (0, -scales.shape[-1] % columns, 0, -scales.shape[-2] % rows)
    padded = torch.nn.functional.pad(scales.double(), padding, value=torch.nan)
    grid = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    least = grid.nan_to_num(torch.inf).amin((-3, -1))
    most = grid.nan_to_num(-torch.inf).amax((-3, -1))
    return least.to(scales.dtype) if torch.equal(least, most) else None


def encoded(method: str, name: str, values: torch.Tensor) -> Tensors:
    """The buffers of an encoded tensor: the formulas of docs/reference/encodings.md, in torch's float32."""
    x = values.float()
    if method == "float8_block":
        grid = _amax(x, 128, 128)
        multiplier = torch.where(grid == 0, torch.ones(()), 448 / grid)
        multiplier = torch.exp2(torch.frexp(multiplier)[1].float() - 1)
        codes = (x * spread(multiplier, x, 128, 128)).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": 1 / multiplier}
    if method == "mxfp8":
        product = _amax(x, 1, 32) * torch.tensor(1 / 448, dtype=torch.float32)
        fraction, exponent = torch.frexp(product)
        power = exponent - (fraction == 0.5).int()
        codes = (x * spread(torch.exp2(-power.float()), x, 1, 32)).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale": (power + 127).to(torch.uint8)}
    whole = (torch.tensor(2688.0) / x.abs().amax((-2, -1), keepdim=True)).float()
    blocks = (
        (_amax(x, 1, 16) * (whole * torch.tensor(1 / 6, dtype=torch.float32))).clamp(max=448).to(torch.float8_e4m3fn)
    )
    multiplier = (1 / (blocks.float() * (1 / whole))).clamp(max=torch.finfo(torch.float32).max)
    codes = _e2m1(x * spread(multiplier, x, 1, 16))
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    of_matrices = whole.reshape(x.shape[:-2] or (1,))
    return {f"{name}_packed": packed, f"{name}_scale": blocks, f"{name}_global_scale": of_matrices}


def _amax(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    blocks: torch.Tensor = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return blocks.amax((-3, -1))


def spread(tile: torch.Tensor, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What each element of `x` has of a grid of tiles."""
    wide = tile.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : x.shape[-2], : x.shape[-1]]


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes of four bits: the nearest of eight values, on a tie the one with the even code."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = x.abs().clamp(max=6)
    above = torch.bucketize(size, values)
    below = (above - 1).clamp(min=0)
    down, up = size - values[below], values[above] - size
    nearest = torch.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (nearest + 8 * torch.signbit(x)).to(torch.uint8)
