"""One row of the option sweep: the conversion that it asks for, what must come of it, and what came."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import transaxle as tx
from tests.formats.deepspeed import built
from tests.oracles import option_pairs as names
from tests.oracles import option_results as results
from tests.oracles.cases import AUTOMODEL, HF, MEGATRON, TE, TORCHTITAN, TRANSFORMERS
from tests.oracles.hub import Tensors
from tests.oracles.option_models import (
    BY_LAYER,
    TORCH_DIST,
    VLLM,
    MixedTypesError,
    Places,
    Truth,
    is_linear,
    origins,
    places,
    relaid,
)
from tests.oracles.option_pairs import NONE, Row
from tests.oracles.option_results import STATE
from tests.oracles.option_sources import FORMATS, MEGATRON_DIST, STATES, TILE, Source, dialect, padded, rank_parts
from transaxle.cli import main

ST = "safetensors"
TARGETS: dict[str, tuple[str, str, str]] = {
    "hf": (ST, HF, "hf"),
    "safetensors": (ST, "", ST),
    "safetensors:transformers": (ST, TRANSFORMERS, "safetensors:transformers"),
    "megatron": (ST, MEGATRON, "megatron"),
    "safetensors:te": (ST, TE, "safetensors:te"),
    "automodel": (ST, AUTOMODEL, "automodel"),
    "vllm": (ST, VLLM, "vllm"),
    "one file": ("one file", HF, "safetensors:hf"),
    "torch:hf": ("torch", HF, "torch:hf"),
    "pt": ("pt", TRANSFORMERS, "torch:transformers"),
    "dcp": ("dcp", "", "dcp"),
    "dcp:torchtitan": ("dcp", TORCHTITAN, "dcp:torchtitan"),
    "torch_dist": ("torch_dist", TORCH_DIST, "torch_dist"),
    "megatron_torch": ("megatron_torch", MEGATRON, "megatron_torch"),
    "deepspeed-universal:hf": ("deepspeed-universal", HF, "deepspeed-universal:hf"),
}
"""Factor `to` -> how the result is read, the key of `places` of its names (none: the source's), and the option."""
FILES = {"one file": "out.safetensors", "pt": "out.pt"}
RULES = """family other
  model_type other
  axes n=vocab_size d=hidden_size
  embed : n d

dialect hf
  other.embed.weight = embed[n d]
"""
VOCABULARY = "make_vocab_size_divisible_by"
SCALES = {"_scale_inv": (128, 128), "_scale": (1, 32)}
"""End of a name -> rows and columns of a tile."""
COPY = "/param"
"""End of the names of Megatron's copies in full precision."""
RANK = 2
PAGE = "page.html"


class Outcome(NamedTuple):
    """How a conversion ended."""

    report: Mapping[str, Any] | None
    """Of one that was done, as the command line prints it."""
    refusal: str = ""
    """Why it was not."""
    code: str = ""
    """Of the first reason against it; `TypeError` for options that exclude each other."""
    problem: str = ""
    """What is wrong with the refusal itself."""


class Wanted(NamedTuple):
    """What must be in the files."""

    tensors: Tensors
    encoded: frozenset[str]
    """Names of what is encoded on the way."""
    changed: frozenset[str]
    """Names of what is decoded, cast or merged: those of the hub."""
    total: int
    """Tensors of the target, of all ranks together."""


class MustRefuseError(Exception):
    """There is no exact result."""


def target_places(row: Row, source: Source) -> Places:
    """Where the elements of the hub's tensors are in the target."""
    key = TARGETS[row[names.TO]][1] or dialect(row[names.SOURCE])
    return places(row[names.FAMILY], key, source.wide)


def patterns(row: Row, source: Source) -> tuple[str | None, str | None]:
    """What `only` and `skip` say: names of linear layers, of the target for `encode` and else of the source."""
    where = target_places(row, source) if row[names.CHANGE] in names.ENCODINGS else source.where
    codes_only = source.codes and row[names.CHANGE] in names.PLAIN_CHANGES
    end = "input_layernorm.weight" if codes_only else "o_proj.weight"  # of a layer that no dialect joins with others
    first = next(name for name, number in where.items() if _is_of(number, source, lambda origin: origin.endswith(end)))
    only = first.replace(".0.", ".*.") if "only" in row["chosen"] else None
    skip = first if "skip" in row["chosen"] else None
    return only, skip


def _is_of(number: torch.Tensor, source: Source, is_one: Callable[[str], bool]) -> bool:
    """Whether a stored tensor is made of certain tensors of the hub's; constants are made of none."""
    made_of = origins(number, source.model.shapes)
    return bool(made_of) and all(map(is_one, made_of))


def adapter(model: Truth, folder: Path) -> Tensors:
    """Write a LoRA adapter of peft; return the weights' changes, all of them exact."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(11)
    stored: dict[str, torch.Tensor] = {}
    changes: dict[str, torch.Tensor] = {}
    for name, value in model.tensors.items():
        if not name.endswith("self_attn.o_proj.weight"):
            continue
        low = torch.randint(-8, 9, (RANK, value.shape[1]), generator=generator).float() / 8
        high = torch.randint(-8, 9, (value.shape[0], RANK), generator=generator).float() / 8
        path = f"base_model.model.{name.removesuffix('.weight')}"
        stored |= {f"{path}.lora_A.weight": low, f"{path}.lora_B.weight": high}
        changes[name] = 3.0 * (high.double() @ low.double())
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(stored, folder / "adapter_model.safetensors")
    return changes


def wanted(row: Row, source: Source, changes: Tensors) -> Wanted:
    """What a conversion has to write; MustRefuseError where nothing is exact: two scales, or a tensor of two types."""
    shapes, where = source.model.shapes, target_places(row, source)
    tp = 1 if row["tp"] == NONE else int(row["tp"])
    values, changed = _values(row, source, changes)
    if row[names.TO] == "torch_dist" and _mixes(values, where, shapes):  # then layers are stored one by one
        where = places(row[names.FAMILY], BY_LAYER, source.wide)
    if row[names.TO] == "torch_dist" and not row["tp"] == row[VOCABULARY] == NONE:
        where = padded(where, _multiple(row) * tp)
    try:
        tensors = relaid(values, where, shapes)
    except MixedTypesError as error:
        raise MustRefuseError(f"{error} is of two types") from error
    coded = {name: scale for name, scale in source.scales.items() if values[name].dtype == torch.float8_e4m3fn}
    for name, scales in (relaid(coded, where, shapes) if coded else {}).items():
        if tensors[name].dtype == torch.float8_e4m3fn:
            grid = results.tiles(scales)
            if grid is None:
                raise MustRefuseError(f"{name} has tiles under two scales")
            tensors[f"{name}_scale_inv"] = grid
    encoded = _encode(row, source, tensors, where)
    states = _states(row, source, where, values)
    if states and row[names.TO] in names.WITH_RANKS:
        trained = {name.removeprefix(STATE).rpartition("/")[0] for name in states}
        if any(name not in tensors or tensors[name].dtype != torch.float32 for name in trained):
            raise MustRefuseError("Megatron's optimizer lacks copies in full precision")
    tensors |= states
    total = sum(not name.endswith(COPY) for name in tensors)  # the weights themselves, under a second name
    if row[names.TO] == "megatron_torch":
        tensors = _by_rank(row, source, tensors, where)
    return Wanted(tensors, frozenset(encoded), frozenset(changed), total)


def _mixes(values: Tensors, where: Places, shapes: Mapping[str, torch.Size]) -> bool:
    try:
        relaid(values, where, shapes)
    except MixedTypesError:
        return True
    return False


def _values(row: Row, source: Source, changes: Tensors) -> tuple[Tensors, set[str]]:
    """The hub's tensors after decoding, casting and merging, and the names of those that this changes."""
    only, skip = patterns(row, source)
    method, _, kind = row[names.CHANGE].partition("=")
    taken = {
        origin
        for name, number in source.where.items()
        if results.chosen(name, only, skip)
        for origin in origins(number, source.model.shapes)
    }
    values = dict(source.weights.get(row["weights"], source.weights[NONE]))
    changed = set()
    for name, value in values.items():
        if name in source.codes:
            decoded = method == "decode" and name in taken
            values[name] = value.to(_float(kind)) if decoded else source.codes[name]
            changed |= {name} if decoded else set()
        elif method == "dtype" and name in taken and not name.endswith("correction_bias"):
            values[name] = value.to(_float(kind))
            changed |= {name} if values[name].dtype != value.dtype else set()
        elif method == "merge" and name in changes:
            values[name] = (value.double() + changes[name]).float().to(value.dtype)
            changed.add(name)
    return values, changed


def _encode(row: Row, source: Source, tensors: Tensors, where: Places) -> set[str]:
    """Put the buffers of encoded tensors in their place; return the names of these."""
    method, _, kind = row[names.CHANGE].partition("=")
    if method != "encode":
        return set()
    only, skip = patterns(row, source)
    key = TARGETS[row[names.TO]][1] or dialect(row[names.SOURCE])
    experts = _has_uneven_experts(key, kind, tensors)
    linear = {
        name
        for name in tensors.keys() & where.keys()
        if _is_of(where[name], source, is_linear)
        and not (only is None and (_is_misread(key, kind, tensors[name]) or (experts and _EXPERTS in name)))
        and results.chosen(name, only, skip)
        and tensors[name].dtype != torch.float8_e4m3fn
    }
    for name in linear:
        tensors |= results.encoded(kind, name, tensors.pop(name))
    return linear


_EXPERTS = ".experts."


def _has_uneven_experts(key: str, encoding: str, tensors: Tensors) -> bool:
    """Whether transformers merges experts whose rows end with a smaller tile, so that experts stay plain."""
    halves = ("gate_proj.weight", "up_proj.weight")
    return (
        key == HF
        and encoding == "float8_block"
        and any(_EXPERTS in n and n.endswith(halves) and t.ndim == 2 and t.shape[0] % TILE for n, t in tensors.items())
    )


def _is_misread(key: str, encoding: str, value: torch.Tensor) -> bool:
    """Whether transformers 5.24 would take codes for something else, so that they are written only where asked for.

    It knows no stacks, and takes the size of a block for the size of the matrix divided by the number of blocks.
    """
    if key not in (HF, TRANSFORMERS):
        return False
    uneven = encoding == "float8_block" and any(size > TILE and size % TILE for size in value.shape)
    return value.ndim > 2 or uneven


def _float(kind: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]


def _states(row: Row, source: Source, where: Places, weights: Tensors) -> Tensors:
    """The optimizer's state, which only a hub does without; `weights` are the hub's as they are written."""
    default = "no" if row[names.TO] in ("hf", "one file") else "yes"
    if (default if row["optimizer"] == NONE else row["optimizer"]) == "no":
        return {}
    collected: Tensors = {}
    values_of = dict(source.states)
    if values_of and row[names.TO] == "torch_dist":  # Megatron keeps the weights in full precision there, too
        values_of[COPY.removeprefix("/")] = weights
    where = {name: number for name, number in where.items() if bool((number >= 0).any())}  # constants are not trained
    if TORCHTITAN in (TARGETS[row[names.TO]][1], dialect(row[names.SOURCE])):
        where = _joined(where, source.model)
    for state, values in values_of.items():
        moved = relaid(values, where, source.model.shapes)
        collected |= {f"{STATE}{name}/{state}": value for name, value in moved.items()}
        collected |= {f"{STATE}{name}/step": torch.tensor(float(built.STEP)) for name in moved}
    return collected


def _joined(where: Places, model: Truth) -> Places:
    """torchtitan trains q, k and v as one parameter, group by group: its optimizer has state of that one."""
    groups = model.config["num_key_value_heads"]
    collected = dict(where)
    for first in [name for name in where if ".qkv_linear.wq." in name]:
        parts = [collected.pop(first.replace(".wq.", f".{part}.")) for part in ("wq", "wk", "wv")]
        by_group = [part.reshape(groups, -1, part.shape[-1]) for part in parts]
        collected[first.replace(".wq.", ".wqkv.")] = torch.cat(by_group, 1).flatten(0, 1)
    return collected


def _multiple(row: Row) -> int:
    """Of how many rows the vocabulary is on each rank; Megatron's default is 128."""
    return 128 if row[VOCABULARY] == NONE else int(row[VOCABULARY])


def _by_rank(row: Row, source: Source, tensors: Tensors, where: Places) -> Tensors:
    """What each rank of Megatron's has; a dim is shared out as its elements' numbers are."""
    tp, pp, ep = (1 if row[degree] == NONE else int(row[degree]) for degree in ("tp", "pp", "ep"))
    multiple = _multiple(row)
    tied = bool(source.model.config["tie_word_embeddings"])
    whole = {name: tensors[name] for name in where if name in tensors}
    numbers = {name: torch.arange(value.numel()).reshape(value.shape) for name, value in whole.items()}
    collected: Tensors = {}
    for place, mine in rank_parts(numbers, tp=tp, pp=pp, ep=ep, tied=tied, multiple=multiple).items():
        for name, (origin, number) in mine.items():
            collected[f"{place}/{name}"] = _taken(whole[origin], number)
            if step := {f"{STATE}{origin}/step"} & tensors.keys():
                collected[f"{STATE}{place}/{name}/step"] = tensors[step.pop()]
                for state in STATES:
                    value = tensors[f"{STATE}{origin}/{state}"]
                    collected[f"{STATE}{place}/{name}/{state}"] = _taken(value, number)
            for end, tile in SCALES.items():
                if f"{origin}{end}" in tensors:
                    scales = results.spread(tensors[f"{origin}{end}"], whole[origin], *tile).flatten()[number]
                    grid = results.tiles(scales, *tile)
                    if grid is None:
                        raise MustRefuseError(f"{place}/{name} has tiles under two scales")
                    collected[f"{place}/{name}{end}"] = grid
    return collected


def _taken(value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Elements by their number; zero for -1."""
    return torch.cat([value.flatten(), value.new_zeros(1)])[number]


def options(row: Row, source: Source, work: Path) -> dict[str, Any]:
    """The keywords of `convert` that a row asks for, but for `on`."""
    collected: dict[str, Any] = {}
    method, _, kind = row[names.CHANGE].partition("=")
    if method == "merge":
        collected["merge"] = work / "adapter"
    elif method != NONE:
        collected[method] = kind
    only, skip = patterns(row, source)
    collected |= {key: [value] for key, value in (("only", only), ("skip", skip)) if value is not None}
    for key in ("shard_size", "memory", "weights"):
        if row[key] != NONE:
            collected[key] = row[key]
    for key in ("jobs", "tp", "pp", "ep", VOCABULARY):
        if row[key] != NONE:
            collected[key] = int(row[key])
    collected |= {key: True for key in ("strict", "allow_lossy", "average", "verify") if row[key] != NONE}
    given = {
        "optimizer": row["optimizer"] == "yes",
        "resume": True,
        "overwrite": row["overwrite"] if row["overwrite"] == "everything" else True,
        "sync": False,
    }
    collected |= {key: value for key, value in given.items() if row[key] != NONE}
    if row["report"] != NONE:
        collected["report"] = work / PAGE
    return collected | _reading(row, source, work)


def _reading(row: Row, source: Source, work: Path) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    if row["config"] == "path":
        (work / "config.json").write_text(json.dumps(source.model.config))
        collected["config"] = work / "config.json"
    elif row["config"] == "mapping":
        collected["config"] = source.model.config
    if row["axes"] != NONE:
        collected["axes"] = {"n": source.model.config["vocab_size"]}
    if row["named family"] != NONE:
        collected["family"] = row[names.FAMILY]
    if row["named dialect"] != NONE:
        key = dialect(row[names.SOURCE])
        layered = "megatron_layers" if row[names.FAMILY] == "deepseek_v3" else MEGATRON_DIST
        collected["dialect"] = layered if key == TORCH_DIST else key
    if row["named format"] != NONE:
        collected["format"] = FORMATS[row[names.SOURCE]]
    if row["rules"] != NONE:
        (work / "other.rules").write_text(RULES)
        collected["rules"] = work / "other.rules"
    return collected


def convert(row: Row, source: Source, target: Path, asked: Mapping[str, Any]) -> Outcome:
    """Carry a conversion out through the interface that the row names."""
    to = TARGETS[row[names.TO]][2]
    if row[names.INTERFACE] != "python":
        return _typed(["convert", str(source.path), str(target), "--to", to, *_flags(asked), "--json"])
    with ExitStack() as stack:
        how: dict[str, Any] = {}
        if row["on"] != NONE:
            how["on"] = stack.enter_context(ThreadPoolExecutor(2))
            how |= {"items": 3} if row["on"].endswith("items=3") else {}
        try:
            report = tx.convert(source.path, target, to=to, **asked, **how)
        except tx.TransaxleError as error:
            refusals = [{"code": one.code, "message": one.message, "hint": one.hint} for one in error.refusals]
            return Outcome(None, str(error), refusals[0]["code"], _faults(refusals))
        except TypeError as error:
            return Outcome(None, str(error), "TypeError", "" if len(str(error).split()) > 2 else "no sentence")
    return Outcome(report.as_json())


def _faults(refusals: Sequence[Mapping[str, Any]]) -> str:
    """What a refusal lacks."""
    return "; ".join(
        f"{refusal} is no sentence with a way out"
        for refusal in refusals
        if refusal["code"] not in tx.CODES or len(refusal["message"].split()) < 3 or not refusal["hint"]
    )


def _flags(asked: Mapping[str, Any]) -> list[str]:
    """The options of the command line that say the same."""
    other = {"average": "--average-replicas", "dialect": "--from"}
    collected: list[str] = []
    for key, value in asked.items():
        flag = other.get(key, f"--{key.replace('_', '-')}")
        if key in ("optimizer", "sync"):
            collected.append(flag if value else f"--no-{key}")
        elif key == "overwrite":
            collected.append("--overwrite" if value is True else "--overwrite=everything")
        elif key == "axes":
            collected += [part for axis, size in value.items() for part in ("--axis", f"{axis}={size}")]
        elif key in ("only", "skip"):
            collected += [part for pattern in value for part in (flag, pattern)]
        else:
            collected += [flag] if value is True else [flag, str(value)]
    return collected


def _typed(arguments: list[str]) -> Outcome:
    printed, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        code = main(arguments)
    document = json.loads(printed.getvalue())
    if "error" not in document:
        return Outcome(document, problem="" if code == 0 else f"exit code {code}")
    error = document["error"]
    if code != error["exit_code"] or not 2 <= code <= 4:
        return Outcome(None, error["message"], problem=f"exit code {code}")
    refusals = error["refusals"]
    return Outcome(None, error["message"], refusals[0]["code"] if refusals else "TypeError", _faults(refusals))


def files_of(folder: Path) -> dict[str, str]:
    """Every file of a folder and its hash."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def problems(row: Row, source: Source, work: Path, *, clashes: bool = False) -> tuple[str, list[str]]:
    """Carry a row out in a new folder; return the code of a refusal, and all that is wrong with what was written.

    `clashes`: two of the options do not go together, so that there may be nothing to write.
    """
    work.mkdir()
    changes = adapter(source.model, work / "adapter") if row[names.CHANGE] == "merge" else {}
    asked = options(row, source, work)
    place = work / "place"
    place.mkdir()
    target = place / FILES.get(row[names.TO], "out")
    if row["overwrite"] != NONE:
        _older(target, row["overwrite"] == "everything")
    before, older = files_of(source.folder), files_of(place)
    outcome = convert(row, source, target, asked)
    wrong = [outcome.problem] if outcome.problem else []
    if files_of(source.folder) != before:
        wrong.append("the source is not what it was")
    if outcome.report is None:
        if files_of(place) != older:
            wrong.append(f"refused, and left {files_of(place).keys() ^ older.keys()}")
        if not clashes and not _has_no_result(row, source, changes):
            wrong.append(f"refused, though there is a result: {outcome.refusal}")
        return outcome.code, wrong
    if {path.name for path in place.iterdir()} - {target.name, f"{target.name}.transaxle.json"}:
        wrong.append(f"left {sorted(path.name for path in place.iterdir())}")
    if "report" in asked and outcome.report["format"] not in asked["report"].read_text("utf-8"):
        wrong.append("the page does not say what was written")
    try:
        expected = wanted(row, source, changes)
    except MustRefuseError as error:
        return "", [*wrong, f"written, but {error}"]
    wrong += differences(row, target, expected, outcome.report)
    if row["resume"] == "again":
        wrong += _once_more(row, source, target, asked)
    return "", wrong


def _has_no_result(row: Row, source: Source, changes: Tensors) -> bool:
    """Whether a conversion may be refused: nothing exact can be written, or it is one of the documented limits."""
    try:
        encoded = wanted(row, source, changes).encoded
    except MustRefuseError:
        return True
    if row[names.CHANGE] in names.ENCODINGS and not encoded:
        return True
    latent = row[names.FAMILY] == "deepseek_v3"  # its parameters have no known order
    if latent and row[names.TO] == "megatron_torch" and source.states and row["optimizer"] != "no":
        return True
    if row[names.TO] == "megatron_torch" and row["tp"] != NONE and (encoded or source.codes):
        return True  # no table has lines for scales, and so nothing says how ranks share them out
    # Automodel keeps experts with a layer's inputs in rows; blocks of these encodings are of inputs.
    return row[names.TO] == "automodel" and row[names.CHANGE] in ("encode=mxfp8", "encode=nvfp4")


def _once_more(row: Row, source: Source, target: Path, asked: Mapping[str, Any]) -> list[str]:
    """What is wrong where a conversion that is complete is resumed."""
    once = files_of(target.parent)
    kept = {key: value for key, value in asked.items() if key not in ("overwrite", "report")}
    again = convert(row, source, target, kept)
    if again.report is None or again.report["resumed"] != again.report["tensors"] or files_of(target.parent) != once:
        return [f"once more: {again.refusal or again.report}"]
    return []


def differences(row: Row, target: Path, expected: Wanted, report: Mapping[str, Any]) -> list[str]:
    """What differs between the files, what they must hold, and the report."""
    tensors = results.without_aliases(results.read(TARGETS[row[names.TO]][0], target), expected.tensors)
    wrong = [f"{name} is missing" for name in sorted(expected.tensors.keys() - tensors.keys())]
    wrong += [f"{name} is too many" for name in sorted(tensors.keys() - expected.tensors.keys())]
    for name in sorted(tensors.keys() & expected.tensors.keys()):
        one, two = tensors[name], expected.tensors[name]
        if not results.agree(name, one, two):
            wrong.append(f"{name}: {one.dtype} {tuple(one.shape)} is not {two.dtype} {tuple(two.shape)}")
    if report["tensors"] != expected.total:
        wrong.append(f"the report has {report['tensors']} tensors, and there are {expected.total}")
    recoded = {one["name"] for one in report["recoded"] if one["action"] != "averaged"}
    if row[names.CHANGE] in names.ENCODINGS and recoded != expected.encoded:
        wrong.append(f"the report has as encoded {sorted(recoded ^ expected.encoded)}, or not")
    if bool(recoded) != bool(expected.encoded or expected.changed):
        wrong.append(f"the report has as changed {sorted(recoded)}")
    if row["verify"] != NONE and not (report["verification"] or {}).get("ok"):
        wrong.append(f"verification: {report['verification']}")
    return wrong


def _older(target: Path, notes: bool) -> None:
    """Put another checkpoint where the result is to be, perhaps with a file of the user's in its folder."""
    if target.suffix == ".safetensors":
        save_file({"old": torch.zeros(3)}, target)
    elif target.suffix:
        torch.save({"old": torch.zeros(3)}, target)
    else:
        target.mkdir()
        save_file({"old": torch.zeros(3)}, target / "model.safetensors")
        if notes:
            (target / "notes.txt").write_text("mine")


def clear(work: Path) -> None:
    """Delete what a row has written."""
    shutil.rmtree(work, ignore_errors=True)
