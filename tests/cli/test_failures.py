"""Bad input: one message, the right exit code, no traceback (`Outcome` checks that), and no secrets of URLs."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.checkpoints import CONFIG, GATE, INDEX, WHOLE, tensors, tiny, write
from tests.cli.running import MACHINE, REFUSED, USAGE, Transaxle
from transaxle.cli.shell import write_report
from transaxle.engine.distribute.work_plan import WorkPlan, write_plan
from transaxle.formats.registry import builtin, writable

NORM = "model.norm.weight"
READING = (
    ("ls",), ("info",), ("verify",), ("plan", "--to", "torchtitan"), ("convert", "--to", "torchtitan"), ("diff",)
)  # fmt: skip


def _arguments(command: tuple[str, ...], path: str) -> list[str]:
    """Put a path, and what else the command needs, behind its name."""
    name, *options = command
    second = ["out"] if name in {"plan", "convert"} else [path] if name == "diff" else []
    return [name, path, *second, *options]


def _missing(folder: Path) -> str:
    tiny(folder, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "INCOMPLETE"


def _truncated(folder: Path) -> str:
    tiny(folder)
    data = (folder / WHOLE).read_bytes()
    (folder / WHOLE).write_bytes(data[:-100])
    return "CORRUPT"


def _disagreeing(folder: Path) -> str:
    tiny(folder, shards=2)
    index = json.loads((folder / INDEX).read_text())
    where = index["weight_map"]
    where[NORM] = next(file for file in where.values() if file != where[NORM])
    (folder / INDEX).write_text(json.dumps(index))
    return "CORRUPT"


def _unknown_dtype(folder: Path) -> str:
    tiny(folder)
    data = (folder / WHOLE).read_bytes()
    (folder / WHOLE).write_bytes(data.replace(b'"BF16"', b'"BF17"'))
    return "UNSUPPORTED"


def _empty(folder: Path) -> str:
    folder.mkdir()
    return "UNSUPPORTED"


def _escaping(folder: Path) -> str:
    tiny(folder, shards=2)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace("model-00002-of-00002.safetensors", "../outside.safetensors"))
    return "PATH_ESCAPE"


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
@pytest.mark.parametrize(
    "damage",
    [_missing, _truncated, _disagreeing, _unknown_dtype, _empty, _escaping],
    ids=lambda damage: damage.__name__,
)
def test_damaged_input_is_refused(
    command: tuple[str, ...], damage: Callable[[Path], str], here: Path, transaxle: Transaxle
) -> None:
    code = damage(here / "ck")
    before = sorted(here.iterdir())
    transaxle(*_arguments(command, "ck")).expect(REFUSED, err=(code, f"transaxle explain {code}"))
    found = transaxle(*_arguments(command, "ck"), "--json")
    assert found.codes[0] == code
    assert found.json["error"]["exit_code"] == found.code == REFUSED
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_a_wrong_path_is_no_refusal(command: tuple[str, ...], ck: Path, transaxle: Transaxle) -> None:
    transaxle(*_arguments(command, "ckk")).expect(MACHINE, err=("no such file or folder", "Did you mean ck?"))


def test_a_broken_link_is_reported_as_such(here: Path, transaxle: Transaxle) -> None:
    (here / "latest").symlink_to("gone")
    transaxle("ls", "latest").expect(MACHINE, err="It is a link to gone, which is not there.")


def test_refusals_name_file_tensor_and_both_sizes(here: Path, transaxle: Transaxle) -> None:
    _truncated(here / "ck")
    assert transaxle("ls", "ck").err == (
        "refused\n"
        "  CORRUPT  model.safetensors · model.layers.1.self_attn.v_proj.weight\n"
        "      the file is truncated: its tensors take 27872 bytes, but there are only 27772\n"
        "      Copy or download the file again.\n"
        "  for details: transaxle explain CORRUPT\n"
    )


def test_one_problem_of_many_tensors_is_reported_once(here: Path, transaxle: Transaxle) -> None:
    _unknown_dtype(here / "ck")
    outcome = transaxle("ls", "ck")
    assert outcome.err.startswith("refused (69 reasons)\n")
    assert outcome.err.count("BF17") == 1
    assert "model.layers.[0-1].mlp.experts.[0-7].gate_proj.weight x16" in transaxle("ls", "ck", "--all").err


def _checkpoint(ck: Path) -> None:
    shutil.copytree(ck, "there")


def _with_notes(ck: Path) -> None:
    _checkpoint(ck)
    Path("there/notes.md").write_text("mine")


def _project(ck: Path) -> None:
    Path("there").mkdir()
    Path("there/chapter1.tex").write_text("years of work")


def _file(ck: Path) -> None:
    Path("there").write_text("mine")


def _here(ck: Path) -> None:
    _checkpoint(ck)
    os.chdir("there")


@pytest.mark.parametrize(
    ("make", "target", "way"),
    [
        (_checkpoint, "there", "--overwrite"),
        (_with_notes, "there", "--overwrite=everything"),
        (_project, "there", ""),
        (_file, "there", ""),
        (_here, "../there", ""),
        (_checkpoint, "there/model.safetensors", "--overwrite"),
    ],
)
def test_the_hint_for_an_existing_target_works(
    make: Callable[[Path], None], target: str, way: str, ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suggested option works; where none would, only another target is suggested."""
    monkeypatch.chdir(Path.cwd())  # back afterwards
    make(ck := ck.resolve())
    asked = ("convert", ck, target, "--to", "hf")
    refused = transaxle(*asked)
    offered = re.search(r"--overwrite(=everything)?", refused.err)
    assert (refused.code, offered[0] if offered else "") == (USAGE, way)
    assert transaxle(*asked, way or "--overwrite").code == (0 if way else USAGE)
    if not way:
        assert "overwriting it would be refused" in refused.err


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("command", ["plan", "convert"])
def test_source_and_target_swapped(command: str, exists: bool, ck: Path, transaxle: Transaxle) -> None:
    if exists:
        Path("out").mkdir()
    transaxle(command, "out/", ck, "--to", "hf").expect(
        REFUSED if exists else MACHINE,
        err=f"The source comes first, then the target; here the target, {ck}, holds a checkpoint.",
    )
    assert "comes first" not in transaxle(command, "out/", "nothing", "--to", "hf").err
    with pytest.raises(tx.TransaxleError, match="The source comes first"):
        getattr(tx, command)("out/", ck, to="hf")


def _cache(ck: Path, revision: str = "0123abcd") -> Path:
    """Make the cache of a hub: links in `snapshots` to files without names in `blobs`."""
    cache = ck.parent / "models--me--mine"
    (snapshot := cache / "snapshots" / revision).mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(ck.iterdir())):
        shutil.copy(file, cache / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_a_snapshot_in_a_hub_cache(ck: Path, transaxle: Transaxle) -> None:
    snapshot = _cache(ck)
    assert transaxle("convert", snapshot, "out", "--to", "dcp:torchtitan").code == 0
    assert transaxle("convert", "models--me--mine", "again", "--to", "dcp:torchtitan").code == 0
    assert transaxle("verify", "out", "again").code == 0
    shutil.copytree(snapshot, snapshot.parent / "89ab", symlinks=True)
    transaxle("ls", "models--me--mine").expect(USAGE, err="models--me--mine/snapshots/0123abcd")


def test_hints_for_files_of_other_formats(ck: Path, transaxle: Transaxle) -> None:
    Path("models").mkdir()
    for name in ("model.gguf", "arrays.npz", "model.onnx", "models/model.gguf"):
        Path(name).write_bytes(b"GGUF")
    for path in ("model.gguf", "arrays.npz", "model.onnx", "models"):
        outcome = transaxle("ls", path).expect(
            REFUSED,
            err=(
                "are not read",
                "Give the checkpoint from which this file was made, or save its tensors as safetensors.",
            ),
        )
        assert "--format" not in outcome.err
    assert f"Give the folder: {ck}\n" in transaxle("ls", ck / "config.json").err
    assert "--format safetensors" in transaxle("ls", __file__).err
    Path("alone.bin").write_bytes(pickle.dumps([1]))
    assert "save the tensors with torch.save" in transaxle("ls", "alone.bin").err


def test_hints_mention_axis_and_config_first(ck: Path, transaxle: Transaxle) -> None:
    transaxle("plan", ck, "out", "--to", "torchtitan", "--axis", "g=3").expect(
        REFUSED, out="Correct --axis (axes=) and --config (config=), if you gave them."
    )
    Path("empty").mkdir()
    transaxle("plan", ck, "out", "--to", "torchtitan", "--config", "empty").expect(
        MACHINE, err="empty/config.json\n      no such file"
    )


@pytest.mark.parametrize(
    ("target", "way"),
    [("ck", "you can remove the old one"), ("ck/out", "a folder beside it"), (".", "does not contain the source")],
)
def test_a_target_in_or_around_the_source(target: str, way: str, ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, target, "--to", "hf", "--overwrite")
    assert (outcome.code, way in outcome.err, "--overwrite" in outcome.err) == (USAGE, True, False)


HELD, IDENTITY = tensors(), "--to safetensors:identity"
HINTS: dict[str, tuple[checkpoints.Tensors, dict[str, Any], str, str, str]] = {
    "mixed": ({**HELD, GATE: HELD[GATE].astype(np.float32)}, {}, "", "--dtype", "--dtype bf16"),
    "tied": (HELD, {"tie_word_embeddings": True}, "", "--config FILE", "--config untied.json"),
    "lossy": ({**HELD, NORM: HELD[NORM] * 0 + 1e30}, {}, "--dtype fp16", "--allow-lossy", "--dtype fp16 --allow-lossy"),
    "unheard of": ({"q.w": np.zeros((3, 3), np.float32)}, {"model_type": "ctrl"}, "", IDENTITY, IDENTITY),
    "in part": ({name: HELD[name] for name in HELD if name != GATE}, {}, "", IDENTITY, IDENTITY),
    "strict": ({**HELD, "foo.bar": np.zeros(3, np.float32)}, {}, "--strict", "Omit --strict (strict=True).", ""),
}
"""What is stored, what its config says, options, the hint of the refusal, and options that follow it."""


@pytest.mark.parametrize("name", HINTS)
def test_hints_of_refusals_work(name: str, here: Path, transaxle: Transaxle) -> None:
    held, said, asked, way, followed = HINTS[name]
    write(here / "ck", held, config={**CONFIG, **said})
    Path("untied.json").write_text(json.dumps(CONFIG))
    refused = transaxle("convert", "ck", "out", "--to", "automodel", *asked.split())
    assert (refused.code in (USAGE, REFUSED), way in refused.err) == (True, True)
    assert transaxle("convert", "ck", "out", "--to", "automodel", *followed.split()).code == 0


@pytest.mark.parametrize(
    ("target", "to", "way"),
    [
        ("x.pt", "hf", 'End it in .safetensors, or write another format: --to torch (to="torch").'),
        ("x.safetensors", "torch", 'or write another format: --to safetensors (to="safetensors").'),
        ("x.bin", "dcp", 'Name a folder, or write another format: --to torch (to="torch").'),
    ],
)
def test_a_file_name_of_another_format(target: str, to: str, way: str, ck: Path, transaxle: Transaxle) -> None:
    transaxle("convert", ck, target, "--to", to).expect(REFUSED, err=way)
    assert transaxle("convert", ck, target, "--to", re.findall(r"--to (\w+)", way)[0]).code == 0


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("hf:Qwen/Qwen3-0.6B", "Did you mean hf://Qwen/Qwen3-0.6B?"),
        ("s3:/bucket/ck", "Did you mean s3://bucket/ck?"),
        ("Qwen/Qwen3-0.6B", "If it is a repository of a hub, write hf://Qwen/Qwen3-0.6B."),
        ("absent/deep/ck", "absent/deep does not exist either."),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Write hf://Qwen/Qwen3-0.6B\n"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Write hf://Qwen/Qwen3-0.6B@main\n"),
    ],
)
def test_a_path_that_may_be_a_url(path: str, meant: str, here: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("ls", path)
    code = REFUSED if path.startswith("https:") else MACHINE  # a page of the hub is not the repository
    assert (outcome.code, meant in outcome.err) == (code, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "hf", "--axis", "q=3"], "the family qwen3_moe has no axis 'q'"),
        (["--to", "hf", "--axis", "zz=3"], "no family has an axis 'zz'"),
        (["--to", "hf", "--axis", "g"], "is not AXIS=SIZE"),
        (["--to", "hf", "--axis", "g=2", "--axis", "g=3"], "given twice"),
        (["--to", "hf", "--shard-size", "many"], "is not a size"),
        (["--to", "hf", "--memory", "0"], "is not a size"),
        (["--to", "hf", "--memory", "1KB"], "1KB is too little: one worker alone needs 384KiB of buffers"),
        (["--to", "hf", "--jobs", "0"], "--jobs"),
        (["--to", "hf", "--frm", "hf"], "--from"),
        ([], "--to"),
    ],
)
def test_usage_errors(options: list[str], said: str, ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, "out", *options).expect(USAGE, err=said)
    assert len(outcome.err.splitlines()) <= 5
    found = transaxle("convert", ck, "out", *options, "--json")
    assert found.json["error"]["exit_code"] == USAGE
    assert not Path("out").exists()


def test_two_checkpoints_in_one_folder(ck: Path, transaxle: Transaxle) -> None:
    (ck / WHOLE).rename(ck / "a.safetensors")
    (ck / "b.safetensors").write_bytes((ck / "a.safetensors").read_bytes())
    outcome = transaxle("ls", ck).expect(USAGE, err="a.safetensors, b.safetensors")
    assert f"Give one of these checkpoints: {ck}/a.safetensors\n" in outcome.err
    assert "--format" not in outcome.err
    assert transaxle("ls", ck / "a.safetensors").code == 0


def test_names_that_two_dialects_read_are_not_guessed(here: Path, transaxle: Transaxle) -> None:
    Path("two.rules").write_text(
        "family toy\n  axes a=a b=b\n  w : a b\n  u : a b\ndialect one\n  x = w[a b]\n  y = u[a b]\n"
        "dialect two\n  x = u[a b]\n  y = w[a b]\n"
    )
    write(here / "toy", {"x": np.zeros((2, 3)), "y": np.ones((2, 3))})
    said = ("convert", "toy", "out", "--to", "two", "--rules", "two.rules")
    assert transaxle(*said, "--json").codes == ["AMBIGUOUS"]
    assert transaxle(*said).code == USAGE
    assert transaxle(*said, "--family", "toy", "--from", "one").code == 0


UNWRITABLE = [name for name in builtin() if name not in writable()]


@pytest.mark.parametrize("to", [*UNWRITABLE, *(f"{name}:hf" for name in UNWRITABLE)])
def test_a_format_that_cannot_be_written(to: str, ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, "out", "--to", to, "--json")
    assert outcome.code == REFUSED
    assert outcome.codes == ["UNSUPPORTED"]


def test_config_files_that_cannot_be_read(ck: Path, transaxle: Transaxle) -> None:
    said = ("plan", ck, "out", "--to", "torchtitan", "--config")
    assert transaxle(*said, "none.json").code == MACHINE
    Path("bad.json").write_text("{")
    assert transaxle(*said, "bad.json").code == REFUSED
    (ck / "config.json").write_text("[1]")
    assert transaxle("ls", ck).code == REFUSED


def test_a_tilde_no_shell_expanded(here: Path, ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    hint = f"Only shells expand ~, and only outside quotes: write {here}/"
    for arguments in (("ls", "~/ck"), ("convert", ck, "~/out", "--to", "torchtitan")):
        transaxle(*arguments).expect(MACHINE, err=hint)
    (here / "~").mkdir()
    assert transaxle("convert", ck, "~/out", "--to", "torchtitan").code == 0  # it is a name like others
    assert transaxle("ls", "~/out").code == 0


def test_an_empty_path_is_none(here: Path, ck: Path, transaxle: Transaxle) -> None:
    for arguments in (("ls", ""), ("convert", "", "out", "--to", "hf"), ("convert", ck, "", "--to", "hf")):
        transaxle(*arguments).expect(MACHINE, err="'' is not a path")


def test_paths_that_cannot_be_examined_are_errors_like_others(ck: Path, transaxle: Transaxle) -> None:
    """Methods such as `Path.exists` raise for paths with a part that is too long or may not be entered."""
    long = "x" * 300
    for said in (
        ("convert", ck, "out", "--to", "hf", "--config", long),
        ("convert", ck, "out", "--to", "hf", "--config", f"{long}/config.json"),
        ("diff", ck, long),
        ("diff", f"{long}/a", ck),
        ("derive", f"{long}/config.json"),
    ):
        transaxle(*said).expect(MACHINE, err="IO  xxx")


def test_a_link_to_itself_is_an_io_error(here: Path, transaxle: Transaxle) -> None:
    Path("loop").symlink_to("loop")
    Path("around").mkdir()
    Path("around/model.safetensors").symlink_to("model.safetensors")
    for path in ("loop", "around", "loop/deeper"):
        for verb in ("ls", "info", "verify", "report", "check-rules"):
            outcome = transaxle(verb, path)
            assert outcome.code in {MACHINE, REFUSED}, (verb, path, outcome.err)
            assert outcome.err


NOT_UTF8 = os.fsdecode(b"ck\xff\xfe")


def test_paths_that_are_not_utf8(tmp_path: Path, transaxle: Transaxle) -> None:
    source, adapter = tiny(tmp_path / NOT_UTF8), tmp_path / os.fsdecode(b"lora\xe9")
    for number, words in enumerate([(), ("--json",), ("--resume",), ("--verify",)]):
        for target, to in ((f"out-{number}", "hf"), (f"{NOT_UTF8}-{number}", "dcp:torchtitan")):
            assert transaxle("convert", source, tmp_path / target, "--to", to, *words).code == 0
    page = str(tmp_path / "page.html")
    for verb, *options in (["ls"], ["info", "--json"], ["verify"], ["report", "-o", page], ["clean"]):
        assert transaxle(verb, source, *options).code == 0
    assert transaxle("convert", source, tmp_path / "lora", "--to", "hf", "--merge", adapter).code == MACHINE
    for words in (("--on", "ray"), ("--on", "torchrun")):
        outcome = transaxle("convert", source, tmp_path / "several", "--to", "hf", *words, "--json")
        assert outcome.code == REFUSED
        assert outcome.codes == ["UNSUPPORTED"]
    assert not (tmp_path / "several").exists()


@pytest.mark.parametrize("rank", ["../../x", "", "-1", "1.5", "1" * 30, os.fsdecode(b"\xff"), "²"])
def test_invalid_rank_numbers(rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transaxle: Transaxle) -> None:
    """They come from environment variables and are used in paths."""
    source = tiny(tmp_path / "deep" / "er" / "ck")
    monkeypatch.setenv("RANK", rank)
    before = sorted(tmp_path.rglob("*"))
    traced = transaxle("verify", source, "--profile", source.parent / "trace.json", "--json")
    assert traced.code == USAGE
    assert traced.codes == ["AMBIGUOUS"]
    for name, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert transaxle("convert", source, tmp_path / "out", "--to", "hf", "--on", "torchrun").code == USAGE
    monkeypatch.setenv("RANK", "1")  # of one
    assert transaxle("convert", source, tmp_path / "out", "--to", "hf", "--on", "torchrun").code == USAGE
    assert sorted(tmp_path.rglob("*")) == before
    assert transaxle("verify", source).code == 0


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "torch_dist"])
def test_too_many_files(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transaxle: Transaxle) -> None:
    monkeypatch.setattr("transaxle.formats.shards.MAX_FILES", 10)
    source = tiny(tmp_path / "ck")
    outcome = transaxle("convert", source, tmp_path / "out", "--to", f"{to}:megatron", "--shard-size", "1", "--json")
    assert outcome.code == USAGE
    assert outcome.codes == ["AMBIGUOUS"]
    (refusal,) = outcome.json["error"]["refusals"]
    assert "files; at most 10 are written" in refusal["message"]
    said = re.search(r"--shard-size (\S+)", refusal["hint"])
    assert said is not None
    monkeypatch.setattr("transaxle.formats.shards.MAX_FILES", 1000)
    assert not (tmp_path / "out").exists()
    transaxle("convert", source, tmp_path / "out", "--to", f"{to}:megatron", "--shard-size", said[1]).expect(0)


# Secrets in URLs are in no message, no bug report and no file that others can read.

SECRET = "s3cr/et"
URLS = [
    f"s3://AKIA:{SECRET}@bucket/x", f"s3a://AKIA:12345/{SECRET}@bucket/x",
    f"http://user:{SECRET}@127.0.0.1:1/x?X-Amz-Signature={SECRET}", f"http://127.0.0.1:1/x?sig={SECRET}",
    f"ftp://user:a@{SECRET}@127.0.0.1/x", f"hf://user:{SECRET}@owner/name",
    f"https://127.0.0.1:1/x#access_token={SECRET}",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.tiny(tmp_path_factory.mktemp("secrets") / "source"))


@pytest.mark.parametrize("url", URLS)
def test_no_error_shows_secrets_of_a_url(url: str, source: str, tmp_path: Path) -> None:
    """As a place, as another argument, and as one of the wrong type; as text, and as data."""
    anything: Any = url
    calls: list[Callable[[], object]] = [
        lambda: tx.open(source, config=url),
        lambda: tx.open(source, rules=url),
        lambda: tx.convert(*(source, tmp_path / "out", anything)),  # type: ignore[call-arg]  # as people do
        lambda: tx.open(anything.encode()),
        lambda: tx.convert(source, tmp_path / "out", to=url),
        lambda: tx.open(source, format=anything),
    ]
    for call in calls:
        with pytest.raises((tx.TransaxleError, TypeError, ValueError)) as found:
            call()
        said = str(found.value)
        if isinstance(found.value, tx.TransaxleError):
            said += str([each.as_json() for each in found.value.refusals])
        assert SECRET not in said


@pytest.mark.parametrize("url", URLS)
def test_no_command_prints_secrets_of_a_url(url: str, transaxle: Transaxle, source: str) -> None:
    for arguments in (["ls", source, url], ["ls", source, "--config", url], ["convert", source, url, "--to", url]):
        for more in ([], ["--json"]):
            outcome = transaxle(*arguments, *more)
            assert outcome.code != 0
            assert SECRET not in outcome.out + outcome.err


@pytest.mark.parametrize("url", URLS)
def test_no_bug_report_has_secrets_of_a_url(url: str) -> None:
    try:
        raise RuntimeError(f"reading '{url}' failed")
    except RuntimeError as error:
        said = write_report(error, ["ls", url])
    path = Path(said.partition(", with ")[2].partition(": it has")[0])
    text = path.read_text("utf-8")
    path.unlink()
    assert "RuntimeError: reading '" in text
    assert SECRET not in text


class _Order:
    source, target = f"s3://key:{SECRET}@bucket/x", "/y"


class _Plan:
    order, text = _Order(), b"{}"


def test_only_its_owner_can_read_a_plan_with_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers need the URL; everybody else who sees the folder does not."""
    plan: WorkPlan = _Plan()  # type: ignore[assignment]  # what the function looks at
    mask = os.umask(0o022)
    try:
        write_plan(plan, str(tmp_path / "a"))
        monkeypatch.setattr(_Order, "source", "s3://bucket/x")
        write_plan(plan, str(tmp_path / "b"))
    finally:
        os.umask(mask)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o600, 0o644]
    with pytest.raises(tx.TransaxleError, match="already exists"):
        write_plan(plan, str(tmp_path / "b"))


@pytest.mark.parametrize(
    "text",
    ["http://127.0.0.1:8000/a@b", "hf://owner/name@main/folder", "abfs://box@account/x", "C:/x", "a:b@c", "s3://b/x@y"],
)
def test_other_parts_of_a_url_are_shown(text: str) -> None:
    assert str(tx.errors.refuse("IO", text)).endswith(text)
