"""The program around its commands: help, suggestions, completion, profiles, the demo, and how failures are reported."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest

from tests.checkpoints import TENSORS, same, tensors, tiny
from tests.cli import documents
from tests.cli.running import (
    BUG,
    DIFFERENT,
    MACHINE,
    REFUSED,
    USAGE,
    Transaxle,
    command,
    flip,
    on_terminal,
    only,
    process,
)
from transaxle import __version__
from transaxle.cli import NAME, main
from transaxle.cli import screen as screen_module
from transaxle.cli.command import COMMANDS, Command, dialects, program
from transaxle.cli.screen import Screen
from transaxle.engine.plan.conversion import parse_to
from transaxle.formats.registry import writable

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers"}:
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Blocked())
"""


def _commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(program, info_name=NAME)
    for name in COMMANDS:
        found = program.get_command(context, name)
        assert found is not None
        yield name, found


def test_without_a_command_the_help_is_shown(transaxle: Transaxle) -> None:
    outcome = transaxle()
    assert outcome.code == 0
    assert outcome.out == transaxle("--help").out == transaxle("-h").out
    assert outcome.out.index("transaxle demo") < outcome.out.index("Commands:") < outcome.out.index("Options:")
    assert all(f"  {name} " in outcome.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_first(name: str, transaxle: Transaxle) -> None:
    outcome = transaxle(name, "--help")
    assert outcome.code == 0
    assert outcome.out.index(f"\n  transaxle {name}") < outcome.out.index("Usage:") < outcome.out.index("Options:")
    assert all(option in outcome.out for option in ("--json", "--all", "--help"))


def test_examples_in_the_help_can_be_typed() -> None:
    for name, found in _commands():
        assert isinstance(found, Command)
        assert found.examples
        for line, _ in found.examples:
            program_name, command_name, *arguments = shlex.split(line)
            assert (program_name, command_name) == (NAME, name)
            found.make_context(name, arguments)


def test_the_help_mentions_only_options_of_the_command() -> None:
    strange = {}
    for name, found in _commands():
        context = click.Context(found, info_name=name)
        options = {word for each in found.get_params(context) for word in (*each.opts, *each.secondary_opts)}
        strange[name] = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", found.get_help(context))) - options
    assert strange.pop("work") == {"--array", "--wrap", "--write"}  # of Slurm and of `plan`, in its example
    assert {name for name, words in strange.items() if words} == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lss"], "Did you mean ls?"),
        (["covert"], "Did you mean convert?"),
        (["frobnicate"], "Commands: ls, info"),
        (["ls"], "Missing argument 'PATH'."),
        (["ls", ".", "--al"], "--all"),
        (["--frob"], "--frob"),
    ],
)
def test_a_typing_mistake_gets_a_suggestion(arguments: list[str], said: str, transaxle: Transaxle) -> None:
    outcome = transaxle(*arguments).expect(USAGE, err=said)
    assert outcome.out == ""
    assert "message" in transaxle(*arguments, "--json").json["error"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("transaxle con", {"convert"}),
        ("transaxle convert a b --to torch", {"torchtitan", "torchtitan@0.2", "torchtitan@0.3"}),
        ("transaxle convert a b --family qwen3_", {"qwen3_moe"}),
        ("transaxle explain BLOCK", {"BLOCK_MISALIGNED"}),
    ],
)
def test_completion(typed: str, offered: set[str]) -> None:
    words = shlex.split(typed)
    environment = {"_TRANSAXLE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    outcome = process(environment=environment)
    found = {line.partition(",")[2] for line in outcome.out.splitlines()}
    assert offered <= found
    assert all(name.startswith(words[-1]) for name in found)
    assert "complete" in process(environment={"_TRANSAXLE_COMPLETE": "bash_source"}).out


def test_completion_offers_what_programs_load() -> None:
    """Megatron's distributed folders and vLLM's sharded files have dialects of their own, in no other format."""
    command_line = "transaxle convert a b --to "
    outcome = process(environment={"_TRANSAXLE_COMPLETE": "bash_complete", "COMP_LINE": command_line})
    offered = [line.partition(",")[2] for line in outcome.out.splitlines()]
    targets = [parse_to(target) for target in offered]
    assert len({*offered}) == len(offered)
    assert {form for form, _ in targets} == {*writable()}
    assert {label for _, label in targets} == {None, "identity", *dialects()}
    own = {label: {form for form, of_form in targets if of_form == label} for label in dialects()}
    assert own["vllm"] == {"vllm_sharded"}
    assert own["megatron_dist"] == own["megatron_layers"] == {"torch_dist"}
    assert own["torchtitan_hf"] == {"safetensors"}
    assert own["te"].isdisjoint({"ranks", "deepspeed-universal", "torch_dist", "megatron_torch"})


def test_the_demo_says_that_it_needs_torch(here: Path) -> None:
    process("demo", before=BLOCKED).expect(3, err="pip install 'torch>=2.11' transformers==")
    assert process("demo", "--json", before=BLOCKED).codes == ["UNSUPPORTED"]


def test_it_is_a_module_too(ck: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "transaxle", "ls", str(ck)], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"{TENSORS} tensors" in done.stdout


def test_it_is_plain_when_piped(ck: Path, transaxle: Transaxle) -> None:
    for arguments in (["convert", "ck", "out", "--to", "hf"], ["ls", "nowhere"], ["verify", "ck", "ck"]):
        outcome = process(*arguments)
        assert "\x1b" not in outcome.out + outcome.err


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_on_a_terminal_it_has_progress_and_colours(environment: dict[str, str], ck: Path) -> None:
    text = on_terminal("convert", ck, "out", "--to", "torchtitan", "--verify", environment=environment)
    assert "equal: " in text.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert ("\x1b[1mout" in text) == (environment == {})
    assert ("━" in text) == (environment.get("TERM") != "dumb")


def test_a_reader_that_stops_is_no_error(ck: Path) -> None:
    writing = subprocess.Popen(
        command("ls", ck, "--all", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writing.stdout is not None
    assert writing.stderr is not None
    writing.stdout.close()
    err = writing.stderr.read()
    writing.stderr.close()
    assert (writing.wait(60), err) == (141, "")


def test_a_full_disk_behind_the_output(ck: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("ls", ck), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (4, "writing the result: No space left on device\n")


def test_closed_streams_are_no_error(ck: Path) -> None:
    closing = "import os, sys\nos.close(1)\nos.close(2)\nsys.stdout = sys.stderr = None"
    assert process("ls", ck, before=closing).code == 0
    assert process("ls", "nowhere", before=closing).code == 4


def test_bars_have_labels(ck: Path) -> None:
    text = on_terminal("convert", ck, "out", "--to", "torchtitan", "--verify", errors_only=True)
    places = [text.index(label) for label in ("planning", "copying", "verifying", "comparing")]
    assert places == sorted(places)


def test_lines_of_progress_without_a_terminal(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "_LINE_SECONDS", 0)
    told = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify").err.splitlines()
    shape = re.compile(r"(copying|verifying|comparing): \S+ k?B of \S+ kB \(\d+ %\), \S+ [kMG]?B/s")
    assert [line for line in told if not shape.fullmatch(line)] == []
    labels = list(dict.fromkeys(line.partition(":")[0] for line in told))
    assert labels == ["copying", "verifying", "comparing"]
    assert "(100 %)" in [line for line in told if line.startswith("copying")][-1]


def test_lines_are_seconds_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Screen().progress(1000) as progress:
        for _ in range(12):
            clock[0] += 1
            progress(50)
    assert capsys.readouterr().err.splitlines() == [
        "copying: 250 B of 1 kB (25 %), 50 B/s",
        "copying: 500 B of 1 kB (50 %), 50 B/s",
    ]


def test_quiet(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "_LINE_SECONDS", 0)
    for words in (("convert", ck, "out", "--to", "torchtitan"), ("verify", "out")):
        done = transaxle(*words, "-q")
        assert (done.code, done.out, done.err) == (0, "", "")
    flip(only(list(Path("out").glob("*.safetensors"))), -1)
    differs = transaxle("verify", ck, "out", "-q")
    assert (differs.code, differs.out) == (DIFFERENT, "")
    missing = transaxle("verify", "nowhere", "-q")
    assert (missing.code, missing.out) == (MACHINE, "")
    assert "nowhere" in missing.err
    assert transaxle("ls", ck, "-q", "--json").json["tensors"]


def test_verbose(ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify", "-v")
    labels = [line.partition(",")[0].partition(":")[0] for line in outcome.err.splitlines()]
    assert labels == ["planning", "copying", "verifying", "comparing"]
    assert all(re.search(r", \d+\.\d\d s$", line) for line in outcome.err.splitlines())
    assert transaxle("verify", "out", "-q", "-v").code == USAGE


def _break(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let every opening end with an error."""

    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transaxle.verbs.open_checkpoint", broken)


@pytest.mark.parametrize("urls", [[], ["Homepage, https://example.org", "Issues, https://example.org/issues"]])
def test_a_bug_leaves_its_traceback(
    urls: list[str], ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Described:
        def get_all(self, name: str) -> list[str]:
            assert name == "Project-URL"
            return urls

    _break(monkeypatch, ZeroDivisionError("division by zero"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: Described())
    outcome = transaxle("ls", ck)
    assert outcome.code == BUG
    report = only(list(tmp_path.glob("transaxle-bug-*.txt")))
    assert str(report) in outcome.err
    assert ("https://example.org/issues" in outcome.err) == bool(urls)
    text = report.read_text("utf-8")
    for said in (f"transaxle {__version__}", f"transaxle ls {ck}", "in broken", "ZeroDivisionError: division by zero"):
        assert said in text
    assert "internal error: ZeroDivisionError: division by zero" in outcome.err
    error = transaxle("ls", ck, "--json").json["error"]
    assert ("transaxle-bug-" in error["message"], error["exit_code"]) == (True, BUG)


def test_a_bug_without_a_place_for_the_report(
    ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break(monkeypatch, ZeroDivisionError("division by zero"))
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent/folder")
    transaxle("ls", ck).expect(BUG, err="TRANSAXLE_DEBUG=1")
    monkeypatch.setenv("TRANSAXLE_DEBUG", "1")
    assert main(["ls", str(ck)]) == BUG
    assert "Traceback" in capsys.readouterr().err


def test_running_out_of_memory_is_reported(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, MemoryError())
    transaxle("ls", ck).expect(MACHINE, err="--memory")


# The demo: a model saved and loaded by transformers, with every bit unchanged.


def test_the_demo_shows_all_steps(here: Path) -> None:
    outcome = process("demo")
    assert (outcome.code, outcome.err) == (0, ""), outcome.err
    for line in (
        "2  transaxle convert hub torchtitan --to dcp:torchtitan",
        "3  transaxle convert torchtitan automodel --to safetensors:automodel",
        "4  transaxle convert automodel back --to hf",
        "     gate, up: transposed, joined",
        "       -> model.layers.{l}.mlp.experts.gate_and_up_projs[e d [gate:f | up:f]]",
        "   its weights: yes, 51 of 51 tensors equal bit for bit, as the safetensors library reads them",
        "   its output:  yes, exactly the same logits for 16 tokens, loaded by transformers",
    ):
        assert line in outcome.out.splitlines()
    assert list(here.iterdir()) == []


def test_the_demo_keeps_its_files_if_told_so(here: Path) -> None:
    facts = process("demo", "--keep", "tour/", "--json").json
    documents.check("demo", facts)
    assert (facts["tensors_equal"], facts["logits_equal"]) == (True, True)
    assert len({number["value"] for number in facts["number"]}) == 1
    assert [step["dialect"] for step in facts["steps"]] == ["hf", "torchtitan@0.3", "automodel", "hf"]
    assert same(Path("tour/hub"), Path("tour/back"))
    process("demo", "--keep", "tour/").expect(USAGE, err="EXISTS")


@pytest.mark.oracle
def test_a_disk_without_room_for_the_model(here: Path) -> None:
    """Simulated by a limit on the size of files."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    process("demo", before=limit).expect(4, err="the model cannot be saved")
    assert list(here.iterdir()) == []


def test_a_folder_that_cannot_be_made(here: Path) -> None:
    Path("file").write_text("")
    process("demo", "--keep", "file/tour").expect(4, err="making the folder")
    assert [each.name for each in here.iterdir()] == ["file"]


# `--profile FILE`: the spans of each thread, with the bytes that were really moved.

Event = dict[str, Any]


def spans(path: Path) -> list[Event]:
    """Return the spans of a trace, which each have a thread that has a name."""
    events: list[Event] = json.loads(path.read_text("utf-8"))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in found} == set(threads)
    assert len(found) + len(threads) == len(events)
    return found


def moved(found: list[Event], name: str) -> int:
    return sum(event["args"]["bytes"] for event in found if event["name"] == name)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, int]:
    """A checkpoint, and the bytes of its tensors."""
    return tiny(tmp_path / "ck"), sum(tensor.nbytes for tensor in tensors().values())


def test_stages_and_bytes_are_those_of_the_conversion(source: tuple[Path, int], tmp_path: Path) -> None:
    folder, size = source
    process("convert", folder, tmp_path / "out", "--to", "torch_dist", "--profile", tmp_path / "trace.json").expect(0)
    found = spans(tmp_path / "trace.json")
    stages = [event["name"] for event in found if event["name"] not in {"read", "write", "hash"}]
    order = ["import", "open", "plan", "lay out files", "create files", "move", "write index and manifest", "commit"]
    assert [name for name in stages if name in order and name != "move"] == [each for each in order if each != "move"]
    assert moved(found, "read") >= size
    assert moved(found, "write") >= size
    assert moved(found, "hash") >= size
    main = [event for event in found if event["name"] in order and event["name"] != "lay out files"]
    assert len({event["tid"] for event in main}) == 1
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(main)), "stages follow one another"
    plan, inner = (next(event for event in found if event["name"] == name) for name in ("plan", "lay out files"))
    assert plan["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= plan["ts"] + plan["dur"]
    begun = found[0]
    assert begun["name"] == "import"
    assert begun["ts"] == 0


def test_a_failing_command_writes_its_trace(source: tuple[Path, int], tmp_path: Path, transaxle: Transaxle) -> None:
    (file,) = source[0].glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    transaxle("convert", source[0], tmp_path / "out", "--to", "hf", "--profile", tmp_path / "t").expect(REFUSED)
    assert "open" in {event["name"] for event in spans(tmp_path / "t")}


def test_an_existing_file_is_not_replaced(source: tuple[Path, int], tmp_path: Path, transaxle: Transaxle) -> None:
    (tmp_path / "t").write_text("mine")
    transaxle("convert", source[0], tmp_path / "out", "--to", "hf", "--profile", tmp_path / "t").expect(
        USAGE, err="already exists"
    )
    assert (tmp_path / "t").read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_a_trace_per_rank_by_an_environment_variable(
    source: tuple[Path, int], tmp_path: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSAXLE_TRACE", str(tmp_path / "trace.json"))
    assert transaxle("diff", source[0], source[0]).code == 0
    monkeypatch.setenv("RANK", "3")
    assert transaxle("diff", source[0], source[0]).code == 0
    assert spans(tmp_path / "trace.json")
    assert spans(tmp_path / "trace.rank3.json")
    monkeypatch.delenv("TRANSAXLE_TRACE")
    assert transaxle("diff", source[0], source[0]).code == 0
    assert len(list(tmp_path.glob("trace*"))) == 2


# Unknown names: the nearest known one is suggested, and completion offers the known ones.

WAYS = ("--to safetensors:identity", "--derive", "transaxle derive FOLDER -o frobnitz.rules", "--rules frobnitz.rules")
"""What one can do with a model that no table knows."""
SECOND = "second argument: transaxle convert SRC DST --to TARGET"
NO_PATH = "the target path is the second argument, and --to (to=) is the format to write"
AS_FP8 = '--to hf (to="hf") --encode float8_block (encode="float8_block").'
AS_BF16 = (
    '--to hf (to="hf") --dtype bf16 (dtype="bf16"), or for quantized tensors --to hf --decode bf16 (decode="bf16").'
)
BASH = """
{source}
transaxle() {{ {python} -m transaxle "$@"; }}
export -f transaxle
COMP_LINE="transaxle {typed}"; COMP_POINT=${{#COMP_LINE}}
env() {{ while [[ $1 == *=* ]]; do export "$1"; shift; done; "$@"; }}
_transaxle_completion transaxle
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        (("--to", "torchtitn"), "torchtitan"),
        (("--to", "dcp:torchtitn"), "torchtitan"),
        (("--to", "dcp:TorchTitan"), "torchtitan"),
        (("--to", "safetensor:hf"), "safetensors"),
        (("--to", "safetensor"), "safetensors"),
        (("--to", "dpc:torchtitan"), "dcp"),
        (("--to", "deepspeed_universal"), "deepspeed-universal"),
        (("--to", "huggingface"), "hf"),
        (("--to", "pt"), "torch"),
        (("--to", "hf", "--from", "hff"), "hf"),
        (("--to", "hf", "--format", "safetensor"), "safetensors"),
        (("--to", "hf", "--family", "qwn3_moe"), "qwen3_moe"),
    ],
    ids=" ".join,
)
def test_a_misspelt_name_gets_the_nearest(typed: tuple[str, ...], nearest: str, ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("plan", ck, "out", *typed)
    assert (outcome.code, outcome.out) == (USAGE, "")
    assert f"Did you mean {nearest}?" in outcome.err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("-o", "out", "--to", "hf"), SECOND),
        (("--output-dir", "out", "--to", "hf"), SECOND),
        (("out", "--to", "megatron_torch", "--tensor-model-parallel-size", "2"), "Did you mean '--tp'?"),
        (("out", "--to", "megatron_torch", "--target-tensor-parallel-size", "2"), "Did you mean '--tp'?"),
        (("out", "--to", "torchtitan:dcp"), "The format comes first: dcp:torchtitan"),
        (("out", "--to", "dcp/torchtitan"), "Did you mean dcp:torchtitan?"),
        (("out", "--to", "torchtitan, dcp"), "Did you mean dcp:torchtitan?"),
        (("out", "--to", "sglang"), "Did you mean hf?"),
        (("out", "--to", "fp8"), "This is a number format: " + AS_FP8),
        (("out", "--to", "safetensors:BF16"), AS_BF16),
        (("out", "--to", "hf:torchtitan"), "a format stands before the colon: safetensors:torchtitan"),
        (("out", "--to", "hf:"), "a format stands before the colon: safetensors:hf"),
        (("out", "--to", "out.bin"), NO_PATH),
        (("out", "--to", "./out/"), NO_PATH),
        (("out", "--to", "hf://me/mine"), NO_PATH),
        (("out", "--to", ":hf"), "Did you mean hf?"),
        (("out", "--to", "hf", "--force"), "Did you mean '--overwrite'?"),
        (("out", "--to", "hf", "--axis", "num_experts=8"), "`transaxle info PATH` lists the axes"),
        (("out",), "For example --to hf, --to dcp:torchtitan"),
    ],
    ids=" ".join,
)
def test_formats_of_others_get_a_hint(typed: tuple[str, ...], said: str, ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, *typed)
    assert (outcome.code, outcome.out, said in outcome.err) == (USAGE, "", True)


def test_megatrons_names_in_safetensors_come_with_what_megatron_loads(ck: Path, transaxle: Transaxle) -> None:
    loads = '--to torch_dist (to="torch_dist") or --to megatron_torch'
    assert loads in transaxle("convert", ck, "out", "--to", "megatron").out
    assert "note:" not in transaxle("convert", ck, "out2", "--to", "safetensors:megatron").out
    assert "what torchtitan loads, write --to dcp:torchtitan" in transaxle("plan", ck, "out3", "--to", "torchtitan").out
    assert "what vLLM loads, write --to hf" in transaxle("plan", ck, "out3", "--to", "vllm").out
    assert "note:" not in transaxle("plan", ck, "out3", "--to", "transformers").out  # from_pretrained takes them
    assert "write --to" not in transaxle("plan", ck, "out3", "--to", "dcp:torchtitan").out
    again = transaxle("convert", ck, "out", "--to", "megatron", "--resume")
    assert (again.code, "hashed while written" in again.out, "B/s" in again.out) == (0, False, False)


def test_an_unknown_format_gets_the_list(ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, "out", "--to", "gguf:hf").expect(USAGE, err="there are: safetensors, torch, ")
    assert "Did you mean" not in outcome.err


@pytest.mark.parametrize("typed", ["gguf", "GGUF", "ggml", "gguf:hf", "gguf:q4_0", "llama.cpp", "onnx", "mlx"])
@pytest.mark.parametrize("known", [True, False], ids=["a known family", "none"])
def test_formats_that_are_not_supported_get_a_hint(typed: str, known: bool, ck: Path, transaxle: Transaxle) -> None:
    if not known:
        (ck / "config.json").unlink()
        _renamed(ck)
    outcome = transaxle("plan", ck, "out", "--to", typed).expect(
        USAGE, err="Write a folder in the layout of a hub, --to hf"
    )
    program = {"onnx": "Optimum", "mlx": "mlx_lm.convert"}.get(typed, "llama.cpp's convert_hf_to_gguf.py")
    assert program in outcome.err


def test_an_unknown_dialect(ck: Path, transaxle: Transaxle) -> None:
    _of_type(ck, "frobnitz")
    _renamed(ck)
    transaxle("plan", ck, "out", "--to", "dcp:hf", "--from", "megatrn").expect(USAGE, err="Did you mean megatron?")


@pytest.mark.parametrize("renamed", [False, True], ids=["names like those of a table", "names of its own"])
def test_an_unknown_model_type_is_reported_as_such(renamed: bool, ck: Path, transaxle: Transaxle) -> None:
    _of_type(ck, "frobnitz")
    if renamed:
        _renamed(ck)
    outcome = transaxle("plan", ck, "out", "--to", "torchtitan")
    assert (outcome.code, outcome.out) == (USAGE, "")
    assert "the model type 'frobnitz' of config.json is unknown" in outcome.err
    assert [way for way in WAYS if way not in outcome.err] == []
    assert outcome.err.count("qwen") == 0 if renamed else outcome.err.count("--family qwen3_moe") == 1
    assert max(map(len, outcome.err.splitlines())) < 140  # a line for each way
    shown = transaxle("info", ck).out
    assert "the model type 'frobnitz'" in shown
    assert [way for way in WAYS if way not in shown] == []
    assert "\\n" not in shown
    assert transaxle("convert", ck, "out", "--to", "dcp:identity").code == 0


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("convert a b --to dcp:torchtitan@", ["torchtitan@0.2", "torchtitan@0.3"]),
        ("convert a b --to=dcp:torchtitan@", ["torchtitan@0.2", "torchtitan@0.3"]),
        ("convert a b --format deeps", ["deepspeed", "deepspeed-universal"]),
        ("conv", ["convert"]),
    ],
)
def test_completion_in_bash(typed: str, offered: list[str]) -> None:
    """A colon begins a word there: what is offered is what follows it."""
    source = process(environment={"_TRANSAXLE_COMPLETE": "bash_source"}).out
    script = BASH.format(source=source, python=sys.executable, typed=typed)
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == offered


def test_the_line_that_enables_completion_is_not_wrapped() -> None:
    text = process("--help", environment={"COLUMNS": "60"}).out
    shown = [line.strip() for line in text.splitlines() if "bash_source" in line]
    assert shown == ['eval "$(_TRANSAXLE_COMPLETE=bash_source transaxle)"']


def test_completion_after_a_space_begins_a_word() -> None:
    asked = {"_TRANSAXLE_COMPLETE": "bash_complete", "COMP_LINE": "transaxle convert a b --format "}
    assert "plain,safetensors" in process(environment=asked).out.splitlines()
    assert "plain,convert" in process(environment={**asked, "COMP_LINE": "transaxle "}).out.splitlines()


def _of_type(folder: Path, model_type: str) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": model_type}))


def _renamed(folder: Path) -> None:
    """Give the tensors names that no table knows, of the same lengths: offsets stay."""
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"model.", b"frobn.").replace(b"lm_head", b"em_tail"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ("convert", "src", "-out"),
            "No such option '-out'. Options have two dashes; a path that begins so is written ./-out",
        ),
        (("plan", "src", "out", "-to", "dcp"), "No such option '-to'. Did you mean --to? A path that"),
        (("report", "src", "-output", "x.html"), "No such option '-output'. Did you mean --output? A path"),
        (("report", "src", "-out"), "No such option '-out'. Did you mean --output? A path"),
    ],
    ids=" ".join,
)
def test_options_behind_a_single_dash(transaxle: Transaxle, typed: tuple[str, ...], said: str) -> None:
    """Without this click reads them letter by letter: `-out` as `-o ut`, a page of that name."""
    done = transaxle(*typed)
    assert done.code == USAGE
    assert done.err.startswith(said)
