"""Unknown names: the nearest known one is suggested, and completion offers the known ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import REFUSED, USAGE, Transaxle, process

WAYS = ("--to safetensors:identity", "--derive", "transaxle derive FOLDER -o frobnitz.rules", "--rules frobnitz.rules")
"""What one can do with a model that no table knows."""
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
        (("-o", "out", "--to", "hf"), "second argument: transaxle convert SRC DST --to TARGET"),
        (("--output-dir", "out", "--to", "hf"), "second argument: transaxle convert SRC DST --to TARGET"),
        (("out", "--to", "megatron_torch", "--tensor-model-parallel-size", "2"), "Did you mean '--tp'?"),
        (("out", "--to", "megatron_torch", "--target-tensor-parallel-size", "2"), "Did you mean '--tp'?"),
        (("out", "--to", "torchtitan:dcp"), "The format comes first: dcp:torchtitan"),
        (("out", "--to", "dcp/torchtitan"), "Did you mean dcp:torchtitan?"),
        (("out", "--to", "torchtitan, dcp"), "Did you mean dcp:torchtitan?"),
        (("out", "--to", "sglang"), "Did you mean hf?"),
        (
            ("out", "--to", "fp8"),
            'That is a format of numbers: --to hf (to="hf") --encode float8_block (encode="float8_block").',
        ),
        (
            ("out", "--to", "safetensors:BF16"),
            '--to hf (to="hf") --dtype bf16 (dtype="bf16") (or --decode bf16 (decode="bf16"), of quantized tensors)',
        ),
        (("out", "--to", "hf:torchtitan"), "a format stands before the colon: safetensors:torchtitan"),
        (("out", "--to", "hf:"), "a format stands before the colon: safetensors:hf"),
        (("out", "--to", "out.bin"), "the target is the second argument, and --to (to=) says what is written there"),
        (("out", "--to", "./out/"), "the target is the second argument, and --to (to=) says what is written there"),
        (
            ("out", "--to", "hf://me/mine"),
            "the target is the second argument, and --to (to=) says what is written there",
        ),
        (("out", "--to", ":hf"), "Did you mean hf?"),
        (("out", "--to", "hf", "--force"), "Did you mean '--overwrite'?"),
        (("out", "--to", "hf", "--axis", "num_experts=8"), "`transaxle info PATH` lists the axes"),
        (("out",), "For example --to hf, --to dcp:torchtitan"),
    ],
    ids=" ".join,
)
def test_formats_of_other_programs_get_a_hint(
    typed: tuple[str, ...], said: str, ck: Path, transaxle: Transaxle
) -> None:
    outcome = transaxle("convert", ck, *typed)
    assert (outcome.code, outcome.out, said in outcome.err) == (USAGE, "", True)


def test_a_name_that_is_nearest_to_a_format_is_called_a_format(ck: Path, transaxle: Transaxle) -> None:
    assert "there is no format 'deepspeed_universal'" in transaxle("plan", ck, "out", "--to", "deepspeed_universal").err


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
    """What is far from every name gets the list of them."""
    outcome = transaxle("convert", ck, "out", "--to", "gguf:hf")
    assert (outcome.code, "there are: safetensors, torch, dcp" in outcome.err) == (USAGE, True)
    assert "Did you mean" not in outcome.err


@pytest.mark.parametrize("typed", ["gguf", "GGUF", "ggml", "gguf:hf", "gguf:q4_0", "llama.cpp", "onnx", "mlx"])
@pytest.mark.parametrize("known", [True, False], ids=["a known family", "none"])
def test_formats_that_are_not_supported_get_a_hint(typed: str, known: bool, ck: Path, transaxle: Transaxle) -> None:
    if not known:
        (ck / "config.json").unlink()
        _renamed(ck)
    outcome = transaxle("plan", ck, "out", "--to", typed)
    assert (outcome.code, "Write the form of a hub, --to hf" in outcome.err) == (USAGE, True)
    program = {"onnx": "Optimum", "mlx": "mlx_lm.convert"}.get(typed, "llama.cpp's convert_hf_to_gguf.py")
    assert program in outcome.err


def test_a_file_of_another_program_gets_a_hint(ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("plan", ck, "out.gguf", "--to", "hf")
    assert (outcome.code, "convert_hf_to_gguf.py" in outcome.out) == (REFUSED, True)


@pytest.mark.parametrize(
    ("typed", "nearest"), [("torchtitn", "torchtitan"), ("safetensor", "safetensors"), ("pt", "torch")]
)
def test_a_misspelt_dialect_is_reported_before_an_unknown_family(
    typed: str, nearest: str, ck: Path, transaxle: Transaxle
) -> None:
    (ck / "config.json").unlink()
    _renamed(ck)
    assert f"Did you mean {nearest}?" in transaxle("plan", ck, "out", "--to", typed).err


def test_an_unknown_dialect(ck: Path, transaxle: Transaxle) -> None:
    """Also where the family is not known."""
    _of_type(ck, "frobnitz")
    _renamed(ck)
    outcome = transaxle("plan", ck, "out", "--to", "dcp:hf", "--from", "megatrn")
    assert (outcome.code, "Did you mean megatron?" in outcome.err) == (USAGE, True)


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


def test_values_joined_to_a_short_option_are_accepted(transaxle: Transaxle, tmp_path: Path) -> None:
    done = transaxle("report", "missing", f"-o{tmp_path}/page.html")
    assert done.code != USAGE
