"""What is made of a damaged checkpoint gets hashes by which it is right: so a source is held against its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

import transaxle as tx
from tests.checkpoints import tiny
from tests.cli.running import flip
from tests.engine import killed, quantized
from tests.engine.distribute.test_executor import Backwards
from tests.engine.views.test_restated import CONFIG, HALF, Q, nvfp4, save, section
from transaxle.engine.checkpoint.source_hashes import HashWitness, watch_hashes
from transaxle.formats.registry import MANIFEST
from transaxle.move import journal

FORMS = ("safetensors:transformers", "dcp:torchtitan", "torch:automodel", "megatron_torch")
ADAPTER: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}


def form(folder: Path, to: str, **options: Any) -> Path:
    """Write the tiny model in a format, with a manifest; several files where there can be several."""
    made = folder / to.replace(":", "-")
    tx.convert(tiny(folder / "ck"), made, to=to, shard_size=9000, sync=False, **options)
    return made


def middles(source: Path) -> Iterator[tuple[Path, int]]:
    """Yield a place in each file of a checkpoint: in the middle of a tensor, of those that have one."""
    with tx.open(source) as checkpoint:
        entries = list(checkpoint.container.entries.values())
    of_tensors = {
        extent.file: extent.offset + entry.nbytes // len(entry.extents) // 2
        for entry in entries
        for extent in entry.extents
        if entry.nbytes and (source / extent.file).is_file()
    }
    for file in sorted(source.rglob("*")):
        if file.is_file() and file.stat().st_size:
            yield file, of_tensors.get(str(file.relative_to(source)), file.stat().st_size // 2)


def refused(source: Path, target: Path, **options: Any) -> tx.TransaxleError:
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, target, sync=False, **options)
    assert not target.exists()
    return caught.value


@pytest.mark.parametrize("to", FORMS)
def test_no_damaged_file_becomes_official(to: str, tmp_path: Path) -> None:
    source = form(tmp_path, to)
    places = list(middles(source))
    of_data = [each for each in places if each[0].suffix not in (".json", "")]
    for file, at in [*places[:: -(-len(places) // 9)], of_data[0], of_data[-1]]:
        flip(file, at)
        for number, target in enumerate(("hf", "safetensors:identity", "dcp:automodel")):
            error = refused(source, tmp_path / f"out-{number}", to=target)
            assert error.code != "IO", (file, target, error)
        flip(file, at)
    report = tx.convert(source, tmp_path / "out", to="hf", sync=False)
    assert report.source_against == "manifest"
    assert tx.verify(tmp_path / "ck", tmp_path / "out")


@pytest.mark.parametrize("to", ["automodel", "dcp:hf"])
def test_every_tensor_is_held_however_it_is_laid_out(to: str, tmp_path: Path) -> None:
    source = form(tmp_path, "safetensors:hf")
    with tx.open(source) as checkpoint:
        places = [(name, entry.extents[0], entry.nbytes) for name, entry in checkpoint.container.entries.items()]
    damaged = places[::9]
    messages = {}
    for name, extent, size in damaged:
        file, at = source / extent.file, extent.offset
        expected = xxhash.xxh3_128_hexdigest(file.read_bytes()[at : at + size])
        flip(file, at + size - 1, bit=7)
        actual = xxhash.xxh3_128_hexdigest(file.read_bytes()[at : at + size])
        change = f"the bytes were changed after they were written: xxh3-128 {actual}, expected {expected}"
        messages[name] = f"in the source, {change} ({extent.file})"
    error = refused(source, tmp_path / "out", to=to)
    assert {each.where.tensor: each.message for each in error.refusals} == messages
    assert all("use an intact copy" in each.hint for each in error.refusals)
    assert [each.message for each in tx.verify(source).problems] == [
        messages[name].removeprefix("in the source, ").rpartition(" (")[0] for name, _, _ in damaged
    ]
    (source / MANIFEST).unlink()
    report = tx.convert(source, tmp_path / "out", to=to, sync=False)
    assert report.source_against == "structure"


@pytest.mark.parametrize(
    "options",
    [{"dtype": "fp32"}, {"decode": "bf16"}, {"encode": "mxfp8"}, {"only": "*.0.*", "decode": "bf16"}],
    ids=str,
)
def test_what_is_computed_from_damaged_bytes_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    quantized.store(tmp_path / "fp8", quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=1))
    config = tmp_path / "fp8" / "config.json"
    first: dict[str, Any] = {"decode": "bf16"} if "encode" in options else {}
    tx.convert(tmp_path / "fp8", tmp_path / "own", to="hf", config=config, sync=False, **first)
    with tx.open(tmp_path / "own") as checkpoint:
        name = next(each for each in checkpoint if each.endswith("layers.0.mlp.down_proj.weight"))
        extent = checkpoint.container.entries[name].extents[0]
    tx.convert(tmp_path / "own", tmp_path / "intact", to="hf", sync=False, **options)
    flip(tmp_path / "own" / extent.file, extent.offset + 5)
    error = refused(tmp_path / "own", tmp_path / "out", to="hf", **options)
    assert [(each.code, each.where.tensor) for each in error.refusals] == [("CORRUPT", name)]


def test_bytes_that_are_read_when_the_source_is_opened_are_held_too(tmp_path: Path) -> None:
    """The numbers with which a convention is stored differently are read before the conversion begins."""
    config = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    source = tmp_path / "own"
    tx.convert(save(tmp_path / "ck", nvfp4(300.0), config), source, to="identity", sync=False)
    name = f"{Q}.weight_global_scale"
    with tx.open(source) as checkpoint:
        (extent,) = checkpoint.container.entries[name].extents
    flip(source / extent.file, extent.offset)
    with ThreadPoolExecutor(1) as threads:
        ways: list[dict[str, Any]] = [{}, {"on": threads}]
        for way in ways:
            error = refused(source, tmp_path / "out", to="identity", restate="modelopt", **way)
            assert [(each.code, each.where.tensor) for each in error.refusals] == [("CORRUPT", name)]


@pytest.mark.parametrize("to", FORMS)
def test_damaged_bytes_are_converted_on_request(to: str, tmp_path: Path) -> None:
    """A checked run, a run on request and a checked run again, whoever reads; the result has just that one bit."""
    source = form(tmp_path, to)
    tx.convert(source, tmp_path / "intact", to="hf", sync=False)
    _damage(source)
    unchecked: dict[str, Any] = {"to": "hf", "check_source": False, "sync": False}
    with tx.open(source) as opened, ThreadPoolExecutor(2) as threads:
        assert refused(source, tmp_path / "out", to="hf").code == "CORRUPT"
        ways: list[tuple[Any, dict[str, Any]]] = [
            (source, {}), (opened, {}), (source, {"on": threads, "items": 5}), (source, {"resume": True}),
        ]  # fmt: skip
        for number, (src, way) in enumerate(ways):
            with pytest.raises(tx.TransaxleError, match="expected"):
                tx.convert(src, tmp_path / f"out-{number}", to="hf", sync=False, **way)
            report = tx.convert(src, tmp_path / f"out-{number}", **unchecked, **way)
            assert report.source_against == "unchecked"
            (changed,) = tx.diff(tmp_path / "intact", tmp_path / f"out-{number}").differences
            first, second = (_bits(tmp_path / side, changed.name) for side in ("intact", f"out-{number}"))
            assert np.count_nonzero(first != second) == 1


def _bits(folder: Path, name: str) -> Any:
    with tx.open(folder) as checkpoint:
        return np.unpackbits(np.frombuffer(checkpoint[name].tobytes(), np.uint8))


def test_a_file_is_held_against_its_own_digests(tmp_path: Path) -> None:
    tiny(tmp_path / "ck")
    config, source = tmp_path / "ck" / "config.json", tmp_path / "own.safetensors"
    tx.convert(tmp_path / "ck", source, to="hf", sync=False)
    report = tx.convert(source, tmp_path / "first", to="torchtitan", config=config, sync=False)
    assert report.source_against == "digests"
    cast = tx.convert(source, tmp_path / "cast", to="torchtitan", dtype="fp32", config=config, sync=False)
    assert cast.source_against == "digests"
    for at, where in ((-1, "own.safetensors"), (-9000, "own.safetensors"), (70, "own.safetensors")):
        flip(source, at)
        error = refused(source, tmp_path / "out", to="torchtitan", config=config)
        assert all(where in str(each) for each in error.refusals)
        flip(source, at)


@pytest.mark.parametrize("which", ["base", "factor"])
def test_neither_side_of_a_merge_may_be_damaged(which: str, tmp_path: Path) -> None:
    base = form(tmp_path, "safetensors:hf")
    plain, adapter = tmp_path / "plain", tmp_path / "adapter"
    plain.mkdir()
    (plain / "adapter_config.json").write_text(json.dumps({**ADAPTER, "layers_to_transform": [0]}))
    with tx.open(base) as checkpoint:
        name = next(each for each in checkpoint if each.endswith("layers.0.self_attn.q_proj.weight"))
        rows, columns = checkpoint[name].shape
        extent = checkpoint.container.entries[name].extents[0]
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    generator = np.random.default_rng(0)
    factors = {
        f"{prefix}.lora_A.weight": generator.standard_normal((2, columns)).astype(np.float32),
        f"{prefix}.lora_B.weight": generator.standard_normal((rows, 2)).astype(np.float32),
    }
    save_file(factors, plain / "adapter_model.safetensors")
    tx.convert(plain, adapter, to="identity", sync=False)
    (file,) = adapter.glob("*.safetensors")
    tx.convert(base, tmp_path / "intact", to="hf", merge=adapter, sync=False)
    flip(*((base / extent.file, extent.offset + 3) if which == "base" else (file, -1)))
    error = refused(base, tmp_path / "out", to="hf", merge=adapter)
    (refusal,) = error.refusals
    assert refusal.where.file == str(base if which == "base" else adapter)


def _damage(source: Path) -> str:
    with tx.open(source) as checkpoint:
        entries = list(checkpoint.container.entries.items())
        name, entry = entries[len(entries) // 2]
    flip(source / entry.extents[0].file, entry.extents[0].offset + 1)
    return name


@pytest.mark.parametrize(
    ("source_form", "pool", "to"), [("safetensors:hf", "executor", "automodel"), ("megatron_torch", "threads", "hf")]
)
def test_workers_hold_what_they_read(source_form: str, pool: str, to: str, tmp_path: Path) -> None:
    """Also what several ranks hold, of which no tensor lies in one piece, and though one checkpoint serves them all."""
    ranks = {"tp": 2} if source_form == "megatron_torch" else {}
    source = form(tmp_path, source_form, **ranks)
    with ThreadPoolExecutor(2) as threads:
        on: Any = threads if pool == "threads" else Backwards()
        report = tx.convert(source, tmp_path / "intact", to=to, on=on, items=5)
        assert report.source_against == "manifest"
        name = _damage(source)
        with pytest.raises(tx.TransaxleError) as caught:
            tx.convert(source, tmp_path / "out", to=to, on=on, items=5)
    assert {each.where.tensor for each in caught.value.refusals} == {name}
    assert not (tmp_path / "out").exists()


def test_what_a_killed_run_has_read_is_held_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first run found of hashes is lost with it; its journal says only what it wrote."""
    to = "automodel"
    source = form(tmp_path, "safetensors:hf")
    _damage(source)
    with monkeypatch.context() as patched:
        patched.setattr(HashWitness, "recheck", killed.Death)
        with pytest.raises(TypeError):  # all is written then
            tx.convert(source, tmp_path / "out", to=to, resume=True)
    assert list(tmp_path.glob(".out*"))
    with pytest.raises(tx.TransaxleError, match="in the source, the bytes were changed"):
        tx.convert(source, tmp_path / "out", to=to, resume=True)
    assert not (tmp_path / "out").exists()


def test_a_source_that_lost_or_changed_a_file_beside_its_tensors(tmp_path: Path) -> None:
    tiny(tmp_path / "ck")
    (tmp_path / "ck" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    source = tmp_path / "own"
    tx.convert(tmp_path / "ck", source, to="hf", sync=False)
    for name, change in (("tokenizer.json", b'{"model": {"vocab": {"a": 1}}}'), ("config.json", None)):
        text = (source / name).read_bytes()
        (source / name).write_bytes(change or text + b"\n")
        error = refused(source, tmp_path / "out", to="torchtitan")
        assert [each.code for each in error.refusals] == ["CORRUPT"]
        assert name in error.refusals[0].message
        (source / name).unlink()
        error = refused(source, tmp_path / "out", to="identity")
        assert [each.code for each in error.refusals] == ["INCOMPLETE"]
        (source / name).write_bytes(text)
        assert MANIFEST in error.refusals[0].hint


SETTINGS = '{"temperature": 0.6, "top_p": 0.9}'
TEMPLATE = "{{ messages }}\n"


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A checkpoint of ours with files that only say how to use it."""
    folder = tiny(tmp_path / "ck")
    (folder / "generation_config.json").write_text(SETTINGS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "README.md").write_text("# A model\n")
    tx.convert(folder, tmp_path / "own", to="hf", sync=False)
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", '{"temperature": 0.6, "top_p": 0.95}'),
        ("chat_template.jinja", f"{{# new #}}{TEMPLATE}"),
        ("README.md", ""),
    ],
)
def test_what_was_edited_beside_the_tensors_goes_along(name: str, text: str, described: Path, tmp_path: Path) -> None:
    (described / name).write_text(text)
    with ThreadPoolExecutor(2) as threads:
        ways: list[dict[str, Any]] = [{"verify": True}, {"on": threads, "items": 2}]
        for number, how in enumerate(ways):
            target = tmp_path / f"out-{number}"
            report = tx.convert(described, target, to="torchtitan", sync=False, **how)
            assert [note for note in report.notes if note.startswith(f"{name} was edited")]
            assert (target / name).read_text() == text
    assert [problem.where.file for problem in tx.verify(described).problems] == [name]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("generation_config.json", SETTINGS.replace("6", "7").encode()),
        ("generation_config.json", None),
        ("chat_template.jinja", TEMPLATE[:-5].encode()),
        ("chat_template.jinja", TEMPLATE.encode() + bytes(4)),
    ],
)
def test_damage_beside_the_tensors_is_refused(name: str, data: bytes | None, described: Path, tmp_path: Path) -> None:
    if data is None:
        (described / name).unlink()
    else:
        (described / name).write_bytes(data)
    (refusal,) = refused(described, tmp_path / "out", to="torchtitan").refusals
    assert name in refusal.message
    assert tx.convert(described, tmp_path / "one.safetensors", to="hf", sync=False).source_against == "manifest"
    assert "`transaxle verify SRC`" in refusal.hint
    assert [problem.where.file for problem in tx.verify(described).problems] == [name]
    assert f"delete {MANIFEST}" in refusal.hint
    (described / MANIFEST).unlink()
    assert tx.verify(tx.convert(described, tmp_path / "out", to="torchtitan", sync=False).path)


@pytest.mark.parametrize("to", ["safetensors:transformers", "torch:automodel"])
def test_a_file_that_is_named_alone_is_held_against_the_manifest_beside_it(to: str, tmp_path: Path) -> None:
    source = form(tmp_path, to)
    files = sorted(file for file in source.iterdir() if file.suffix in (".safetensors", ".bin"))[:3]
    assert len(files) > 2
    for number, file in enumerate(files):
        report = tx.convert(file, tmp_path / f"out-{number}", to="dcp:identity", sync=False)
        assert report.source_against == tx.verify(file).against == "manifest"
        for part in (2, 3):
            at = file.stat().st_size // part
            flip(file, at)
            refused(file, tmp_path / "out", to="safetensors:identity")
            assert not tx.verify(file)
            flip(file, at)
    stranger = files[0].with_name(f"other{files[0].suffix}")
    stranger.write_bytes(files[0].read_bytes())
    assert tx.convert(stranger, tmp_path / "out", to="dcp:identity", sync=False).source_against == "structure"


def test_a_changed_config_is_used_where_it_is_named(tmp_path: Path) -> None:
    source = form(tmp_path, "safetensors:hf")
    config = source / "config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    error = refused(source, tmp_path / "out", to="torchtitan")
    assert "--config FILE" in error.refusals[0].hint
    assert tx.plan(source, tmp_path / "out", to="torchtitan").refusals == error.refusals
    assert tx.convert(source, tmp_path / "out", to="torchtitan", config=config, verify=True).verification


def test_large_tensors_are_held_in_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SPAN", 4096)
    held = {"a": np.arange(9000, dtype=np.float32).reshape(90, 100), "b": np.arange(1025, dtype=np.float32)}
    (tmp_path / "ck").mkdir()
    save_file(held, tmp_path / "ck" / "model.safetensors")
    tx.convert(tmp_path / "ck", tmp_path / "own", to="identity", sync=False)
    tx.convert(tmp_path / "own", tmp_path / "intact", to="dcp:identity", sync=False)
    for at in (-1, -5000, -20000):
        flip(tmp_path / "own" / "model.safetensors", at)
        refused(tmp_path / "own", tmp_path / "out", to="dcp:identity")
        flip(tmp_path / "own" / "model.safetensors", at)


def test_bytes_that_are_copied_as_they_are_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash is compared with the source's and recorded for the target; cast tensors need a second one."""
    names = list("abc")
    (tmp_path / "ck").mkdir()
    tensors = {name: np.arange(3000, dtype=np.float32) for name in names}
    save_file(tensors, tmp_path / "ck" / "model.safetensors")
    tx.convert(tmp_path / "ck", tmp_path / "own", to="identity", sync=False)
    sizes: list[int] = []

    class Counted(journal.ItemHash):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            sizes.append(1)

    monkeypatch.setattr(journal, "ItemHash", Counted)
    ways: list[tuple[dict[str, Any], int]] = [({}, 3), ({"dtype": "bf16"}, 6)]
    for options, hashes in ways:
        sizes.clear()
        made = tx.convert(tmp_path / "own", tmp_path / f"out-{hashes}", to="dcp:identity", sync=False, **options)
        assert (made.source_against, len(sizes)) == ("manifest", hashes)
        flip(tmp_path / "own" / "model.safetensors", -1)
        refused(tmp_path / "own", tmp_path / "out", to="dcp:identity", **options)
        flip(tmp_path / "own" / "model.safetensors", -1)


@pytest.mark.parametrize("damaged", [False, True])
def test_hashes_do_not_depend_on_who_reads_what_when(damaged: bool, tmp_path: Path) -> None:
    """Pieces in any order, twice, and by several threads: what did not pass in order is read again."""
    source = form(tmp_path, "safetensors:hf")
    names = [_damage(source)] if damaged else []
    with tx.open(source) as checkpoint:
        storage = checkpoint.container.storage
        watch_hashes(storage)
        pieces = [
            (extent.file, extent.offset + at, min(37, entry.nbytes - at))
            for entry in checkpoint.container.entries.values()
            for extent in entry.extents
            for at in range(0, entry.nbytes, 37)
        ]
        order = np.random.default_rng(0).permutation(len(pieces))
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda number: storage.read(*pieces[number]), [*order, *range(len(pieces)), *order]))
        if not damaged:
            storage.recheck()
            return
        with pytest.raises(tx.TransaxleError) as caught:
            storage.recheck()
    assert [each.where.tensor for each in caught.value.refusals] == names
