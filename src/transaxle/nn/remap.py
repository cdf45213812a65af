"""The remap of grouped parameters in state dicts: N names and one tensor are two dialects of one table.

One implementation for the module, for containers of modules, and for optimizer state; `transaxle.load` and the DCP
planners use the same table (`transaxle.axes.grouped`) on what is in files. Quantized parameters are several plain
entries, each of which is stacked or taken apart by itself: no value is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from transaxle.axes.grouped import Packing, Stem, numbered, regrouped
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.nn.layer import WEIGHT, Layer
from transaxle.nn.mover import described, equal, move
from transaxle.quant.entries import entries, is_quantized
from transaxle.quant.frame import COMPONENTS, DATA, STATE

EXTRA_STATE = "_extra_state"
"""Name of what TransformerEngine keeps beside the parameters of a module; nothing in it is needed here."""
_RESTS = ("", *(f"_{name}" for name in (*COMPONENTS, *STATE) if name != DATA))
"""What can follow a stem or its number: the names of the buffers of a quantized parameter."""


def remapped(state: Mapping[str, Any], prefix: str, layer: Layer) -> dict[str, Any]:
    """Return a state dict in which a layer's parameters are under the names that it has itself.

    Args:
        state: any state dict; it is left as it is.
        prefix: what stands before the layer's names.
        layer: what it needs.

    Returns:
        A new dict. Tensors that are rearranged have memory of their own; the others are the same objects.

    Raises:
        Refused: SHAPE_MISMATCH for another number of experts, naming both; INCOMPLETE for a part of them, naming those
            that lack; UNEQUAL_COPIES for two forms of one parameter that differ.
    """
    found = {name: value for name, value in state.items() if name != f"{prefix}{EXTRA_STATE}"}
    _unwrap(found, prefix, layer)
    stems: list[Stem] = []
    problems: list[Refusal] = []
    for stem in layer.shapes:
        try:
            stems += _stems(found, prefix, stem, layer)
        except TransaxleError as error:
            problems += error.refusals
    if problems:
        raise gathered(problems)
    wanted = [one for one in stems if (one.stored is None) == layer.single[one.name.removeprefix(prefix)]]
    straight = [one for one in stems if one not in wanted and one.stored not in (None, "stack")]
    for one in (*wanted, *straight):
        found |= _turned(found, one)
    for one in straight:  # one tensor, that is wanted as one, but packed in another way: now N, and together again
        found |= _turned(found, Stem(one.name, one.rest, one.dims, None, one.count))
    return found


def _turned(found: dict[str, Any], stem: Stem) -> dict[str, torch.Tensor]:
    """Take a stem's tensors out of a state dict, and return them in the other form."""
    names = [stem.single] if stem.stored else [stem.member(place) for place in range(stem.count)]
    taken = {name: found.pop(name) for name in names}
    return move(regrouped([stem], described(taken)), taken)


def _unwrap(found: dict[str, Any], prefix: str, layer: Layer) -> None:
    """Put codes and scales in the place of quantized tensors."""
    for name in [name for name, value in found.items() if is_quantized(value) and _place(name, prefix, layer)]:
        parameter = found.pop(name)
        found |= {f"{name}{rest}": entry for rest, entry in entries(parameter).items()}


def _place(name: str, prefix: str, layer: Layer) -> tuple[str, int | None, str] | None:
    """Return stem, number and rest of a layer's name; None for any other."""
    if not name.startswith(prefix):
        return None
    bare = name[len(prefix) :]
    split = numbered(bare)
    if split is not None and split[0] in layer.shapes and split[2] in _RESTS:
        return split
    for stem in layer.shapes:
        if bare.startswith(stem) and bare.removeprefix(stem) in _RESTS:
            return stem, None, bare.removeprefix(stem)
    return None


def _stems(found: dict[str, Any], prefix: str, stem: str, layer: Layer) -> list[Stem]:
    """Return how each buffer of a parameter is stored; of two equal forms the one that is not needed is dropped."""
    many: dict[str, dict[int, str]] = {}
    one: dict[str, str] = {}
    for name, value in found.items():
        place = _place(name, prefix, layer) if isinstance(value, torch.Tensor) else None
        if place is not None and place[0] == stem:
            if place[1] is None:
                one[place[2]] = name
            else:
                many.setdefault(place[2], {})[place[1]] = name
    packed = {rest: _packing(found[name], name, rest, stem, layer) for rest, name in one.items()}
    for rest, members in list(many.items()):
        if rest in one:
            _check_equal(found, packed[rest], members, prefix + stem, layer)
            for name in members.values():
                del found[name]
            del many[rest]
        else:
            _check_all(members, prefix + stem, layer)
    stems = [
        Stem(f"{prefix}{stem}", rest, found[members[0]].dim(), None, layer.count) for rest, members in many.items()
    ]
    return stems + list(packed.values())


def _packing(tensor: torch.Tensor, name: str, rest: str, stem: str, layer: Layer) -> Stem:
    """Tell how one tensor holds N, by its number of dims.

    Raises:
        Refused: SHAPE_MISMATCH where it holds another number; UNSUPPORTED for scales that N experts share.
    """
    shape, dims, count = tuple(tensor.shape), len(layer.shapes[stem]), layer.count
    before = name.removesuffix(rest)
    first = shape[0] if shape else 0
    packing: Packing = "stack"
    own = dims
    if rest:
        own = tensor.dim() - 1
        if stem == WEIGHT and first != count and tensor.dim() == dims and first % count == 0 and first:
            packing, own = "rows", dims
        elif first != count:
            message = f"{list(shape)} are not the scales of {count} experts, each with its own"
            raise refuse("UNSUPPORTED", message, tensor=name, hint="quantize each expert's weight by itself")
    elif tensor.dim() == dims:
        packing = "rows"
        high = layer.shapes[stem][0]
        if first != count * high:
            raise _count(
                f"{first // high if high and not first % high else f'{first} rows, no whole number of'}", count, name
            )
    elif tensor.dim() == dims + 2 and shape[1] == 1 and dims == 1:
        packing = "column"
    if packing != "rows" and first != count:
        raise _count(str(first), count, name)
    return Stem(before, rest, own, packing, count)


def _count(found: str, wanted: int, name: str) -> TransaxleError:
    return refuse(
        "SHAPE_MISMATCH",
        f"the state dict has {found} experts, the layer {wanted}",
        tensor=name,
        hint="build the layer with num_gemms of the checkpoint, or load the share of one rank with transaxle.load",
    )


def _check_all(members: Mapping[int, str], stem: str, layer: Layer) -> None:
    """Refuse another number of experts than the layer's, and a set with holes."""
    lacking = sorted(set(range(layer.count)) - members.keys())
    more = sorted(members.keys() - set(range(layer.count)))
    if not lacking and not more:
        return
    if sorted(members) == list(range(len(members))):
        extra = f"; {_listed(lacking)} lack" if lacking else ""
        raise gathered(
            [
                Refusal(r.code, f"{r.message}{extra}", r.where, r.hint)
                for r in _count(str(len(members)), layer.count, stem).refusals
            ]
        )
    said = [f"experts {_listed(lacking)} of {layer.count} lack"] if lacking else []
    said += [f"there are experts {_listed(more)}, the layer has {layer.count}"] if more else []
    raise gathered([Refusal("INCOMPLETE", f"{len(members)} experts: {'; '.join(said)}", Where(None, stem))])


def remapped_stems(names: Collection[str], prefix: str, layer: Layer) -> list[Stem]:
    """Return which of a layer's parameters are under names of the other form; for what is told by names only.

    Raises:
        Refused: SHAPE_MISMATCH or INCOMPLETE for another set of experts.
    """
    found = []
    for stem, shape in layer.shapes.items():
        single, whole = layer.single[stem], f"{prefix}{stem}"
        members = {place: f"{whole}{place}" for place in _numbers(names, whole)}
        if single and members:
            _check_all(members, whole, layer)
            found.append(Stem(whole, "", len(shape), None, layer.count))
        elif not single and whole in names:
            found.append(Stem(whole, "", len(shape), "stack", layer.count))
    return found


def _numbers(names: Iterable[str], whole: str) -> list[int]:
    split = (numbered(name) for name in names if name.startswith(whole))
    return [one[1] for one in split if one is not None and (one[0], one[2]) == (whole, "")]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _check_equal(found: Mapping[str, Any], packed: Stem, members: Mapping[int, str], stem: str, layer: Layer) -> None:
    """Refuse two forms of one parameter that differ.

    Raises:
        Refused: UNEQUAL_COPIES, SHAPE_MISMATCH.
    """
    if max(members) >= layer.count:
        raise _count(f"at least {max(members) + 1}", layer.count, stem)
    whole = found[packed.single]
    parts = move(regrouped([packed], described({packed.single: whole})), {packed.single: whole})
    unlike = [place for place, name in sorted(members.items()) if not equal(parts[name], found[name])]
    if unlike:
        raise refuse(
            "UNEQUAL_COPIES",
            f"{packed.single} and {packed.member(unlike[0])} are both there, and differ for experts {_listed(unlike)}",
            tensor=packed.single,
            hint="drop the one that is out of date from the state dict",
        )


def refuse_codes(found: Mapping[str, Any], prefix: str, parameters: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse codes for parameters that hold values: torch would copy them as if they were numbers.

    Args:
        found: a state dict.
        prefix: what stands before the parameters' names in it.
        parameters: of a module, by name.

    Raises:
        Refused: DTYPE_MISMATCH.
    """
    problems = []
    for name, parameter in parameters.items():
        entry = found.get(f"{prefix}{name}")
        if parameter is None or is_quantized(parameter) or not isinstance(entry, torch.Tensor):
            continue
        if entry.dtype.itemsize == 1 and parameter.dtype.itemsize > 1:
            message = f"codes of {entry.dtype} for a parameter of {parameter.dtype}, which is not quantized"
            hint = "GroupedLinear(..., recipe=...) for one that is; transaxle.load(..., decode=...) for values"
            problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, f"{prefix}{name}"), hint))
    if problems:
        raise gathered(problems)
