"""Draws the figures of the docs, as SVG, from what the program itself does with small checkpoints.

Every element of such a checkpoint says where it belongs, and what is drawn is what is read of it in another dialect: a
figure cannot show what the program does not do. `docs/generate.py` writes them and checks that they are current.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import transaxle as tx
from transaxle.axes.geometry import MeshCut, place
from transaxle.axes.layout.tile import SplitTile

FOLDER = Path(__file__).parent / "figures"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Of Okabe and Ito, whom people who confuse colours can tell apart; labels say the same."""
INK, PAPER, LINE, QUIET = "#1c2024", "#ffffff", "#c9ced4", "#5d6670"
WIDTH = 560
EXPERTS, ROWS = 4, 6
"""Experts of the mixture that is drawn, and rows of each."""
DOWN = "model.layers.0.mlp.experts.{e}.down_proj.weight"
PARTS = ("q", "k", "v", "gate", "up")
"""What a Llama fuses; the thousands of an element's value say which it is of."""
FUSED = {
    "QKV": "decoder.layers.0.self_attention.linear_qkv.weight",
    "gate|up": "decoder.layers.0.mlp.linear_fc1.weight",
}
STACKED = "layers.0.moe.routed_experts.inner_experts.w2_EDF"
Array = npt.NDArray[Any]


@dataclass
class Drawing:
    """An SVG as it grows."""

    title: str
    """What it shows, in a sentence: it is read to those who do not see it."""
    height: int
    """Its height; all are equally wide."""

    def __post_init__(self) -> None:
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", code: bool = False
    ) -> None:
        """Write a line."""
        face = ' font-family="ui-monospace, monospace"' if code else ""
        fill = QUIET if size < 13 else INK
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self._parts.append(f"<text {place}{face}>{escape(words)}</text>")

    def box(self, x: float, y: float, width: float, height: float, colour: str, words: str = "") -> None:
        """Fill a rectangle; `words` are what it is, for those who open the file and rest the mouse on it."""
        title = f"<title>{escape(words)}</title>" if words else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} fill="{colour}" stroke="{PAPER}" stroke-width="1">{title}</rect>')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Draw the outline of a rectangle."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} fill="none" stroke="{LINE}" stroke-width="1.5" rx="3"/>')

    def outline(self, x: float, y: float, width: float, height: float, *, split: bool) -> None:
        """Draw a tile: thick and dashed where it splits."""
        look = (
            f'stroke="{INK}" stroke-width="1.5"'
            if not split
            else 'stroke="#b00020" stroke-width="3" stroke-dasharray="6 3"'
        )
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} fill="none" {look}/>')

    def arrow(self, x: float, y: float) -> None:
        """Draw an arrow to the right, from a place on."""
        path = f"M{x:g} {y:g}h22m-6 -5l6 5l-6 5"
        self._parts.append(f'<path d="{path}" fill="none" stroke="{QUIET}" stroke-width="1.5"/>')

    def svg(self) -> str:
        """Return the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif">\n<title>{escape(self.title)}</title>\n'
            f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="{PAPER}"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


def _write(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> Path:
    """Write a checkpoint; what has one byte an element are codes of FP8."""
    folder.mkdir()
    header: dict[str, Any] = {}
    end = 0
    for name, values in tensors.items():
        extent = [end, end := end + values.nbytes]
        dtype = "F8_E4M3" if values.dtype == np.uint8 else "F32"
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": extent}
    text = json.dumps(header).encode()
    data = b"".join([len(text).to_bytes(8, "little"), text, *(values.tobytes() for values in tensors.values())])
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def _mixture(folder: Path) -> Path:
    """Write a mixture of experts; every element of an expert's `down` is its number."""
    hidden, inner, vocabulary = ROWS, 4, 8
    base = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,), base + "input_layernorm.weight": (hidden,),
        base + "post_attention_layernorm.weight": (hidden,), base + "self_attn.q_norm.weight": (2,),
        base + "self_attn.k_norm.weight": (2,), base + "self_attn.q_proj.weight": (4, hidden),
        base + "self_attn.k_proj.weight": (2, hidden), base + "self_attn.v_proj.weight": (2, hidden),
        base + "self_attn.o_proj.weight": (hidden, 4), base + "mlp.gate.weight": (EXPERTS, hidden),
    }  # fmt: skip
    held = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for e in range(EXPERTS):
        for half in ("gate", "up"):
            held[f"{base}mlp.experts.{e}.{half}_proj.weight"] = np.zeros((inner, hidden), np.float32)
        held[DOWN.format(e=e)] = np.full((hidden, inner), e, np.float32)
    config = {
        "model_type": "qwen3_moe", "hidden_size": hidden, "moe_intermediate_size": inner, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": vocabulary, "tie_word_embeddings": False,
    }  # fmt: skip
    return _write(folder, held, config)


def _experts(folder: Path) -> tuple[list[Array], Array]:
    """Return the experts' `down` of a mixture, tensor by tensor as the hub has them, and stacked as torchtitan does."""
    with tx.open(_mixture(folder)) as checkpoint:
        apart = [checkpoint[DOWN.format(e=e)].read() for e in range(EXPERTS)]
        return apart, checkpoint.as_dialect("torchtitan")[STACKED].read()


def _llama(folder: Path, head: int, inner: int, *, hidden: int = 4, fp8: bool = False) -> Path:
    """Write a Llama; elements of q, k and v, and of gate and up, are the number of the tensor and of the row."""
    base, heads, groups = "model.layers.0.", 4, 2
    rows = {"q": heads * head, "k": groups * head, "v": groups * head, "gate": inner, "up": inner}
    held: dict[str, Array] = {
        "model.embed_tokens.weight": np.zeros((8, hidden), np.float32),
        "lm_head.weight": np.zeros((8, hidden), np.float32),
        "model.norm.weight": np.zeros(hidden, np.float32),
        base + "input_layernorm.weight": np.zeros(hidden, np.float32),
        base + "post_attention_layernorm.weight": np.zeros(hidden, np.float32),
        base + "self_attn.o_proj.weight": np.zeros((hidden, heads * head), np.float32),
        base + "mlp.down_proj.weight": np.zeros((hidden, inner), np.float32),
    }
    for number, (part, count) in enumerate(rows.items()):
        block = "self_attn" if part in {"q", "k", "v"} else "mlp"
        values = 1000 * number + np.arange(count, dtype=np.float32)
        held[f"{base}{block}.{part}_proj.weight"] = np.repeat(values[:, None], hidden, 1)
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head, "vocab_size": 8,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if fp8:
        for name in [name for name in held if name.endswith("_proj.weight")]:
            grid = tuple(-(-size // 128) for size in held[name].shape)
            held[name] = np.zeros(held[name].shape, np.uint8)
            held[name + "_scale_inv"] = np.ones(grid, np.float32)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    return _write(folder, held, config)


def name_shape_mesh(work: Path) -> str:
    """Draw where the axis of experts lives: in names, in a shape, on the mesh."""
    made = Drawing(
        "One axis, the four experts of a layer, in three places: in the names of four tensors, in the first dim of one "
        "stacked tensor, and on a mesh, where each of two ranks holds two of them.",
        268,
    )
    apart, stacked = _experts(work / "moe")
    for x, head, below in (
        (16, "in the name", "4 tensors"),
        (218, "in the shape", "1 tensor"),
        (400, "on the mesh", "2 ranks"),
    ):
        made.text(x, 28, head, size=15)
        made.text(x, 46, below, size=12)
    for e, values in enumerate(apart):
        made.box(16, 62 + 48 * e, 44, 40, COLOURS[int(values[0, 0])], DOWN.format(e=e))
        made.text(68, 87 + 48 * e, f"experts.{e}.down_proj", size=12, code=True)
    made.frame(216, 60, 48, 4 * 44 + 4)
    for at, values in enumerate(stacked):
        expert = int(values[0, 0])
        made.box(218, 62 + 44 * at, 44, 44, COLOURS[expert], f"{STACKED}[{at}]: expert {expert}")
        made.text(272, 88 + 44 * at, f"w2_EDF[{at}]", size=12, code=True)
    for rank in range(2):
        ((start, stop),) = place((EXPERTS,), [MeshCut(0, 2, rank)])[0]
        top = 60 + 100 * rank
        made.frame(398, top, 48, 2 * 44 + 4)
        for line, at in enumerate(range(start, stop)):
            expert = int(stacked[at][0, 0])
            made.box(400, top + 2 + 44 * line, 44, 44, COLOURS[expert], f"rank {rank}: expert {expert}")
        made.text(454, top + 42, f"rank {rank} holds", size=12)
        made.text(454, top + 58, f"w2_EDF[{start}:{stop}]", size=12, code=True)
    return made.svg()


def fused(work: Path) -> str:
    """Draw how q, k and v become one matrix, group by group, and gate and up one, half by half."""
    head, inner = 4, 12
    made = Drawing(
        "Rows of q, k and v of a Llama with four heads in two groups, and of the one matrix that Megatron makes of "
        "them: the two query heads of a group, its key head and its value head, then the next group. And gate and up, "
        "which become the two halves of one matrix.",
        376,
    )
    with tx.open(_llama(work / "llama", head, inner)) as checkpoint:
        view = checkpoint.as_dialect("megatron")
        rows = {name: view[stored].read()[:, 0].astype(int).tolist() for name, stored in FUSED.items()}
        own = {
            part: checkpoint[f"model.layers.0.{'self_attn' if at < 3 else 'mlp'}.{part}_proj.weight"].read()[:, 0]
            for at, part in enumerate(PARTS)
        }
    made.text(16, 28, "hf", size=15)
    made.text(150, 28, "megatron", size=15)
    made.text(310, 28, "hf", size=15)
    made.text(430, 28, "megatron", size=15)
    _stack(made, 16, {part: own[part].astype(int).tolist() for part in PARTS[:3]}, head)
    made.arrow(112, 190)
    _stack(made, 150, {"linear_qkv": rows["QKV"]}, head)
    _stack(made, 310, {part: own[part].astype(int).tolist() for part in PARTS[3:]}, inner)
    made.arrow(394, 190)
    _stack(made, 430, {"linear_fc1": rows["gate|up"]}, inner)
    return made.svg()


def _stack(made: Drawing, x: float, tensors: Mapping[str, Sequence[int]], unit: int) -> None:
    """Draw tensors below each other, row by row, in the colours of what the rows are of."""
    step, y = 8.0, 48.0
    for name, rows in tensors.items():
        made.text(x, y + 8, name, size=12, code=True)
        y += 14
        for (part, number), inside in groupby(rows, lambda row: (row // 1000, row % 1000 // unit)):
            lines = list(inside)
            for line in lines:
                words = f"{name}: {PARTS[part]}, row {line % 1000}"
                made.box(x, y, 44, step, COLOURS[part % 3], words)
                y += step
            label = f"{PARTS[part]} {number}" if part < 3 else PARTS[part]
            made.text(x + 50, y - step * len(lines) / 2 + 4, label, size=12)
        y += 10


def tiles(work: Path) -> str:
    """Draw tiles of scales that stay whole and tiles that would not: grouped QKV of two head sizes."""
    made = Drawing(
        "Rows of a fused QKV matrix in tiles of 128 that share one scale. With heads of 128 rows each tile comes from "
        "one tile of q, k or v, and its scale follows. With heads of 64 the second tile would take half of its rows "
        "from k and half from v, which have other scales, and so would the last one: that is refused.",
        190,
    )
    for y, head in ((44, 128), (130, 64)):
        rows = _origins(work / f"rows{head}", head)
        split = {at // 128 for at in range(0, len(rows), 128) if len(_source_tiles(rows[at : at + 128])) > 1}
        _check_refused(_llama(work / f"head{head}", head, 256, hidden=256, fp8=True), split)
        says = "refused, two tiles split" if split else "each tile keeps its scale"
        made.text(16, y - 12, f"heads of {head}: {says}", size=14)
        scale = (WIDTH - 32) / len(rows)
        for start in range(0, len(rows), head):  # a head's rows stay together
            part, number = rows[start] // 1000, rows[start] % 1000 // head
            left = 16 + scale * start
            made.box(left, y, scale * head, 26, COLOURS[part], f"{PARTS[part]}, head {number}")
            made.text(left + scale * head / 2, y + 43, f"{PARTS[part]} {number}", size=12, anchor="middle")
        for tile in sorted(range(len(rows) // 128), key=split.__contains__):
            made.outline(16 + scale * 128 * tile, y - 3, scale * 128, 32, split=tile in split)
    return made.svg()


def _source_tiles(rows: Sequence[int]) -> set[tuple[int, int]]:
    """Return the tiles of q, k and v that rows come from."""
    return {(row // 1000, row % 1000 // 128) for row in rows}


def _check_refused(source: Path, split: set[int]) -> None:
    """Check that the program refuses the fused matrix for the first of these tiles, or plans it if there is none."""
    plan = tx.plan(source, source.with_suffix(".out"), to="megatron")
    details = [each.detail() for each in plan.refusals if each.where.tensor == FUSED["QKV"] and each.detail is not None]
    refused = [each.number[0] for each in details if isinstance(each, SplitTile)]
    if refused != sorted(split)[:1]:
        raise RuntimeError(f"drawn: {split}; refused: {refused}")


def _origins(folder: Path, head: int) -> list[int]:
    """Return what each row of the fused matrix is of."""
    with tx.open(_llama(folder, head, 256)) as checkpoint:
        rows: list[int] = checkpoint.as_dialect("megatron")[FUSED["QKV"]].read()[:, 0].astype(int).tolist()
    return rows


def ep_fsdp(work: Path) -> str:
    """Draw what each of four ranks holds of stacked experts, cut over a mesh of two dims."""
    made = Drawing(
        "Four experts of six rows on a mesh of two by two ranks: expert parallelism cuts the experts, and FSDP the "
        "rows of each. Rank 0 holds the first three rows of experts 0 and 1, rank 3 the last three of experts 2 and 3.",
        310,
    )
    _, stacked = _experts(work / "cut")
    for rank in range(4):
        ep, shard = divmod(rank, 2)
        experts, rows = place(stacked.shape, [MeshCut(0, 2, ep), MeshCut(1, 2, shard)])[:2]
        left, top = 16 + 272 * shard, 46 + 142 * ep
        made.text(left, top - 12, f"rank {rank}: ep {ep}, fsdp {shard}", size=14)
        for e in range(EXPERTS):
            for row in range(ROWS):
                held = any(a <= e < b for a, b in experts) and any(a <= row < b for a, b in rows)
                colour = COLOURS[int(stacked[e, row, 0])] if held else "#eef0f2"
                words = f"expert {e}, row {row}: {'on' if held else 'not on'} rank {rank}"
                made.box(left + 60 * e, top + 14 * row, 54, 14, colour, words)
            made.text(left + 60 * e + 27, top + 14 * ROWS + 15, f"expert {e}", size=11, anchor="middle")
    return made.svg()


def wrong_rows(_: Path) -> str:
    """Draw a silent failure: which rows of a fused tensor a rank gets if it is cut before it is split."""
    parts, heads, ranks = PARTS[:3], 4, 2
    fused_rows = [(part, row) for part in range(len(parts)) for row in range(heads)]
    ((start, stop),) = place((len(fused_rows),), [MeshCut(0, ranks, 0)])[0]
    cut_first = fused_rows[start:stop]
    ((start, stop),) = place((heads,), [MeshCut(0, ranks, 0)])[0]
    split_first = [(part, row) for part, row in fused_rows if start <= row < stop]
    made = Drawing(
        "A fused tensor of q, k and v with four rows each, loaded on the first of two tensor-parallel ranks. "
        "transformers 5.24 cuts the tensor first and splits the half: k_proj gets rows of q, and v_proj rows of k. "
        "Split first and cut then, each gets its own first two rows, as Transaxle loads them.",
        262,
    )
    made.text(16, 26, "one fused tensor in the file", size=14)
    for at, row in enumerate(fused_rows):
        _labelled_row(made, 16 + 44 * at, 38, row, "fused")
    made.text(16, 118, "what rank 0 of 2 gets", size=14)
    width = len(cut_first) // len(parts)
    for at, part in enumerate(parts):
        made.text(176 + 132 * at + 22 * width, 118, f"{part}_proj", size=12, anchor="middle", code=True)
    for y, loader, rows in ((130, "transformers 5.24", cut_first), (204, "Transaxle", split_first)):
        made.text(16, y + 20, loader, size=13)
        for at, row in enumerate(rows):
            target = at // width
            x = 176 + 132 * target + 44 * (at % width)
            _labelled_row(made, x, y, row, f"{loader}, {parts[target]}_proj")
            if row[0] != target:
                made.outline(x, y, 44, 30, split=True)
    return made.svg()


def _labelled_row(made: Drawing, x: float, y: float, row: tuple[int, int], where: str) -> None:
    """Draw one row of q, k or v with its number below it."""
    part, number = row
    made.box(x, y, 44, 30, COLOURS[part], f"{where}: {PARTS[part]}, row {number}")
    made.text(x + 22, y + 45, f"{PARTS[part]} {number}", size=12, anchor="middle")


def drawn() -> Iterator[tuple[Path, str]]:
    """Yield each figure's file, and what it must hold."""
    with tempfile.TemporaryDirectory() as folder:
        for draw in (name_shape_mesh, fused, tiles, ep_fsdp, wrong_rows):
            yield FOLDER / f"{draw.__name__.replace('_', '-')}.svg", draw(Path(folder))
