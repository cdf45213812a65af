"""`transaxle demo` converts a model to several layouts and back; the model is so small that every number can be
inspected.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

import transaxle as tx
from transaxle.cli.command import Command, with_screen
from transaxle.cli.screen import Screen
from transaxle.engine.moves import RENAMED, UNCHANGED, rules, words
from transaxle.engine.wording import parameters, plural
from transaxle.errors import refuse
from transaxle.extras import install
from transaxle.formats.storage.local import storage_error

_SIZES = {
    "vocab_size": 56,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
"""Config of the small model. No two axes that could be confused have the same size."""
_SOURCE = "hub"
_CONVERSIONS = (("torchtitan", "dcp:torchtitan"), ("automodel", "safetensors:automodel"), ("back", "hf"))
"""(folder, value of `--to`) of each conversion; each conversion converts the result of the previous one."""
_EXPERT, _ROW, _COLUMN = 3, 5, 7
_PLACES = (
    (_SOURCE, f"model.layers.0.mlp.experts.{_EXPERT}.gate_proj.weight", (_ROW, _COLUMN)),
    ("torchtitan", "layers.0.moe.routed_experts.inner_experts.w1_EFD", (_EXPERT, _ROW, _COLUMN)),
    ("automodel", "model.layers.0.mlp.experts.gate_and_up_projs", (_EXPERT, _COLUMN, _ROW)),
    ("back", f"model.layers.0.mlp.experts.{_EXPERT}.gate_proj.weight", (_ROW, _COLUMN)),
)
"""Where to find one number in each dialect, as (folder, tensor, index): the number in row 5, column 7 of expert 3's
gate weight.
"""
_TOKENS = 16


_STEP_TEXTS = {
    "torchtitan": (
        "Every expert was a separate tensor; now the experts' number e is the first dim of one tensor per layer."
    ),
    "automodel": "gate and up become one tensor, end to end in its last dim, and each expert's matrix is transposed.",
    "back": "The same two conversion tables, applied in the opposite direction.",
}
"""Explanation of each conversion step, printed for newcomers."""

JsonFacts = dict[str, Any]


@click.command(
    "demo",
    cls=Command,
    examples=(("transaxle demo", ""), ("transaxle demo --keep tour/", "and keep the files")),
    help="""Show a conversion there and back on a tiny model, step by step.

    Makes a mixture-of-experts model with random weights (by transformers), converts it from hf to a DCP folder in the
    torchtitan dialect, on to automodel and back to hf, compares the weights bit by bit, and runs the model: its
    outputs must be exactly equal. Needs torch and transformers, takes a few seconds, and deletes its files unless you
    give --keep.""",
)
@click.option("--keep", metavar="DIR", type=click.Path(readable=False), help="Keep the checkpoints in this new folder.")
@with_screen
def demo_command(screen: Screen, keep: str | None) -> int:
    """Run the demo."""
    with _quiet():
        _require_packages()
        if keep is None:
            with TemporaryDirectory(prefix="transaxle-demo-") as temporary:
                return _run(screen, Path(temporary), shown="")
        folder = Path(keep)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise refuse("EXISTS", "the folder already exists", file=keep, hint="Choose another folder.") from None
        except OSError as error:
            raise storage_error(error, "making the folder", keep) from None
        return _run(screen, folder, shown=f"{keep.rstrip('/')}/")


def _require_packages() -> None:
    """Refuse to run the demo without torch and transformers; the error explains how to install them."""
    try:
        import torch
        import transformers
    except ImportError as error:
        message = f"the demo needs torch and transformers: {error}"
        raise refuse("UNSUPPORTED", message, hint=f"Install them:  {install('demo')}") from None
    del torch, transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and warnings of packages that the demo calls."""
    variables = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.get(name) for name in variables}
    muted = logging.root.manager.disable
    os.environ.update(variables)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(muted)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(screen: Screen, folder: Path, shown: str) -> int:
    """Run all steps of the demo in a folder.

    Args:
        screen: output of the command.
        folder: folder in which the checkpoints are written.
        shown: path of that folder in the printed commands.
    """
    facts: JsonFacts = {"folder": shown or None, "steps": []}
    model, tokens, logits = _make(folder / _SOURCE)
    _say(screen, "A layout says where each axis of a weight is: {e} in the name of a tensor, [e] in its shape.")
    _say(screen, "Here l counts layers, e experts, f is the width of an expert and d the hidden size.")
    _step(screen, "1  transformers makes a small Qwen3-MoE with random weights, and saves it")
    facts["steps"].append(_describe(screen, folder, _SOURCE))
    source = _SOURCE
    for number, (target, to) in enumerate(_CONVERSIONS, 2):
        _step(screen, f"{number}  transaxle convert {shown}{source} {shown}{target} --to {to}")
        moved = _axis_moves(folder / source, folder / target, to)
        _say(screen, _STEP_TEXTS[target])
        _print_moved(screen, moved)
        tx.convert(folder / source, folder / target, to=to)
        facts["steps"].append({"to": to, "moved": moved, **_describe(screen, folder, target)})
        source = target
    _step(screen, f"5  where is the gate of layer 0, expert {_EXPERT}, f = {_ROW}, d = {_COLUMN}?")
    facts["number"] = _follow(screen, folder)
    _step(screen, "6  is it the same model?")
    facts["tensors_equal"] = _same_tensors(screen, folder)
    facts["logits_equal"] = _same_logits(screen, folder / source, tokens, logits, type(model))
    if screen.as_json:
        screen.document(facts)
    elif shown:
        _step(screen, f"   The checkpoints are in {shown}. Look at one:  transaxle ls {shown}automodel")
    return 0 if facts["tensors_equal"] and facts["logits_equal"] else 1


def _say(screen: Screen, text: str) -> None:
    if not screen.as_json:
        screen.line(f"   {text}")


def _step(screen: Screen, title: str) -> None:
    if not screen.as_json:
        screen.line()
        screen.line((title, "bold"))


def _make(folder: Path) -> tuple[Any, Any, Any]:
    """Create the small model and save it; return (model, tokens, the model's logits for these tokens)."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    random = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**_SIZES), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        # random values for norms too: if all elements were equal, a misplaced element would go unnoticed
        for weight in model.parameters():
            weight.normal_(0, 0.5, generator=random)
        tokens = torch.randint(_SIZES["vocab_size"], (1, _TOKENS), generator=random)
        logits = model(tokens).logits
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # safetensors raises this exception also when the disk is full
        hint = "Free some space in that folder, or choose another folder with --keep."
        raise refuse("IO", f"the model cannot be saved: {error}", file=str(folder), hint=hint) from None
    return model, tokens, logits


def _describe(screen: Screen, folder: Path, name: str) -> JsonFacts:
    """Print the size of a checkpoint, and its printed rows for attention queries and experts."""
    from transaxle.cli.ls import cells, fold_rows

    with tx.open(folder / name) as checkpoint:
        amount = sum(tensor.parameters for tensor in checkpoint.values())
        shown_rows = [cells(row) for row in fold_rows(checkpoint) if _is_shown(row.names[0])]
        facts: JsonFacts = {
            "folder": name,
            "dialect": checkpoint.dialect,
            "tensors": len(checkpoint),
            "parameters": amount,
        }
    _say(screen, f"{name}: {plural(facts['tensors'], 'tensor')}, {parameters(amount)}, among them")
    if not screen.as_json:
        screen.table(shown_rows, indent="     ")
    return facts


def _is_shown(name: str) -> bool:
    return any(segment in name for segment in ("q_proj", ".wq.", "experts"))


def _axis_moves(source: Path, target: Path, to: str) -> list[JsonFacts]:
    """Return how a conversion moves axes, for each line of the conversion table; lines that only rename tensors are
    omitted.
    """
    plan = tx.plan(source, target, to=to)
    moved = []
    for route in plan.routes:
        movement = words(route, plan.axes)
        if movement not in {RENAMED, UNCHANGED}:
            sources, goal = rules(route)
            moved.append({"tensor": route.component, "moves": movement, "from": list(sources), "to": goal})
    return moved


def _print_moved(screen: Screen, moved: Sequence[JsonFacts]) -> None:
    if screen.as_json:
        return
    for move in moved:
        screen.line(f"     {move['tensor']}: ", (move["moves"], "green"))
        for rule in move["from"]:
            screen.line((f"          {rule}", "dim"))
        screen.line((f"       -> {move['to']}", "dim"))


def _follow(screen: Screen, folder: Path) -> list[JsonFacts]:
    """Print one and the same number as it is read from the checkpoint in each dialect."""
    readings: list[JsonFacts] = []
    for name, tensor, place in _PLACES:
        with tx.open(folder / name) as checkpoint:
            box = tuple(slice(index, index + 1) for index in place)
            value = float(checkpoint[tensor].read(box).reshape(-1)[0])
        readings.append({"folder": name, "tensor": tensor, "index": list(place), "value": value})
    if not screen.as_json:
        cells = [
            [reading["folder"], reading["tensor"], str(reading["index"]), f"= {reading['value']}"]
            for reading in readings
        ]
        screen.table(cells, indent="   ")
    return readings


def _same_tensors(screen: Screen, folder: Path) -> bool:
    """Compare the first checkpoint with the last; both are read with the safetensors library instead of Transaxle's own
    reader.
    """
    first, last = ({k: v for f in _files(folder / name) for k, v in _load(f).items()} for name in (_SOURCE, "back"))
    same = sum(name in last and first[name] == last[name] for name in first)
    equal = same == len(first) == len(last)
    count_text = f"{same} of {plural(len(first), 'tensor')} equal bit for bit"
    _say(screen, f"its weights: {'yes' if equal else 'NO'}, {count_text}, as the safetensors library reads them")
    return equal


def _files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.safetensors"))


def _load(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Read a file with the safetensors library; return tensor name -> (dtype, shape, bytes)."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


def _same_logits(screen: Screen, folder: Path, tokens: Any, logits: Any, kind: Any) -> bool:
    """Load the last checkpoint with transformers, and compare its logits with those of the original model."""
    import torch

    model = kind.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        again = model(tokens).logits
    equal = torch.equal(logits, again)
    verdict = "yes, exactly the same logits" if equal else "NO, the logits differ"
    _say(screen, f"its output:  {verdict} for {_TOKENS} tokens, loaded by transformers")
    return equal
