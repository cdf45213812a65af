"""`plan` and `convert`: the same options, and the same refusals before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoints import CONFIG, GATE, TENSORS, read, same, tensors, tiny, write
from tests.cli.running import DIFFERENT, REFUSED, USAGE, Transaxle, flip, only, tree
from tests.engine import quantized
from transaxle.engine import execute as execute_module
from transaxle.engine.carry import Report

LIMITS = ("--jobs", "1", "--memory", "9MiB")


def test_a_plan_shows_which_axes_move(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("plan", ck, "out", "--to", "safetensors:automodel", *LIMITS).out == (
        "qwen3_moe · safetensors:hf -> safetensors:automodel\n"
        "  gate, up  name e -> shape, transposed, joined  "
        "model.layers.{l}.mlp.experts.{e}.gate_proj.weight[f d] + model.layers.{l}.mlp.experts.{e}.up_proj.weight[f d]"
        " -> model.layers.{l}.mlp.experts.gate_and_up_projs[e d [gate:f | up:f]]\n"
        "  down      name e -> shape, transposed          "
        "model.layers.{l}.mlp.experts.{e}.down_proj.weight[d f] -> model.layers.{l}.mlp.experts.down_projs[e f d]\n"
        "  12 rules unchanged: embed, ln1, q, k, v, o, q_norm, k_norm, ln2, router, norm, head\n"
        "  carried along: config.json\n"
        "  read 27.87 kB  write 30.73 kB in 2 files  69 copies, 30 % contiguous  "
        "peak memory 9.44 MB of buffers  nothing refused\n"
    )
    assert [path.name for path in Path().iterdir()] == ["ck"]


def test_a_plan_as_json(ck: Path, transaxle: Transaxle) -> None:
    plan = transaxle("plan", ck, "out", "--to", "torchtitan", "--memory", "3MB", "--jobs", "1", "--json").json
    told = tuple(plan[key] for key in ("target", "dialect", "copies", "contiguous"))
    assert told == ("out", "torchtitan@0.3", TENSORS, TENSORS)
    assert plan["bytes_read"] == sum(array.nbytes for array in tensors().values())
    assert plan["buffers"] <= 3 * 10**6
    assert plan["refusals"] == []
    assert {"layers.1.moe.routed_experts.inner_experts.w1_EFD"} <= {tensor["name"] for tensor in plan["tensors"]}


@pytest.mark.parametrize(
    ("source", "to", "said"),
    [
        ("hf", "torchtitan", "name e -> shape"),
        ("torchtitan", "megatron", "shape e -> name, joined"),
        ("automodel", "hf", "shape e -> name, transposed, split"),
        ("megatron", "te", "packed differently"),
    ],
)
def test_moves_are_described_in_words(
    source: str, to: str, said: str, ck: Path, converted: Callable[[str], Path], transaxle: Transaxle
) -> None:
    folder = ck if source == "hf" else converted(source)
    assert said in transaxle("plan", folder, "out", "--to", to).out


def test_a_reordered_dim_is_reported(here: Path, transaxle: Transaxle) -> None:
    quantized.store(here / "llama", quantized.plain_llama(d=8, f=5, g=1, r=2, head=4))
    assert "order t h -> h t" in transaxle("plan", "llama", "out", "--to", "torchtitan").out


@pytest.mark.parametrize("dialect", ["transformers", "torchtitan", "torchtitan@0.2", "automodel", "megatron", "te"])
def test_converting_there_and_back_gives_the_same_tensors(dialect: str, ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "there", "--to", f"safetensors:{dialect}").code == 0
    assert transaxle("convert", "there", "back", "--to", "hf").code == 0
    assert same(ck, Path("back"))
    assert read(ck).keys() != read(Path("there")).keys()


def test_the_report(ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify", "--no-sync")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("out · safetensors · torchtitan@0.3 · 29 tensors · 31.09 kB · ")
    assert "carried along: config.json" in outcome.out
    assert "not synced (--no-sync)" in outcome.out
    assert "intact: 29 tensors" in outcome.out
    assert "equal: 69 tensors on the left are 29 on the right, 13,936 parameters" in outcome.out


def test_the_report_as_json(ck: Path, transaxle: Transaxle) -> None:
    report = transaxle("convert", ck, "out", "--to", "hf", "--shard-size", "10kB", "--verify", "--json").json
    told = tuple(report[key] for key in ("path", "tensors", "synced", "carried"))
    assert told == ("out", TENSORS, True, ["config.json"])
    assert (report["verification"]["ok"], report["comparison"]["equal"]) == (True, True)
    assert len(list(Path("out").glob("model-*.safetensors"))) > 1
    assert same(ck, Path("out"))


def test_damaged_bytes_are_converted_on_request_and_reported(ck: Path, transaxle: Transaxle) -> None:
    transaxle("convert", ck, "own", "--to", "hf").expect(0)
    flip(Path("own/model.safetensors"), -1)
    again = ("convert", "own", "out", "--to", "torchtitan")
    transaxle(*again).expect(REFUSED, err=("CORRUPT  own · ", ", expected ", "--no-check-source (check_source=False)"))
    assert not Path("out").exists()
    outcome = transaxle(*again, "--no-check-source")
    outcome.expect(0, out="source not checked (--no-check-source): damaged bytes of it are in the result too")


def test_unknown_tensors_are_kept_and_listed(here: Path, transaxle: Transaxle) -> None:
    held = tensors() | {f"extra.{n}.scale": np.full(3, n, np.float32) for n in (0, 1, 4)}
    write(here / "more", held, config=CONFIG)
    outcome = transaxle("convert", "more", "out", "--to", "torchtitan")
    assert "3 tensors without a line in the target" in outcome.out
    assert "extra.[0-1,4].scale  x3" in outcome.out
    out = read(Path("out"))
    assert all(out[name].tobytes() == held[name].tobytes() for name in ("extra.0.scale", "extra.4.scale"))
    strict = transaxle("convert", "more", "strict", "--to", "torchtitan", "--strict")
    assert strict.code == REFUSED
    assert strict.err == (
        "refused, nothing was written (3 reasons)\n"
        "  UNEXPECTED_TENSOR  extra.[0-1,4].scale x3\n"
        "      dialect torchtitan has no line for this tensor\n"
        "      Omit --strict (strict=True).\n"
        "  for details: transaxle explain UNEXPECTED_TENSOR\n"
    )
    assert not Path("strict").exists()


def test_all_refusals_come_at_once(here: Path, transaxle: Transaxle) -> None:
    held = tensors()
    held[GATE] = held[GATE].astype(np.float32)
    del held["model.norm.weight"]
    held["model.layers.1.mlp.experts.2.down_proj.weight"] = np.zeros((16, 13), ml_dtypes.bfloat16)
    held["model.layers.0.strange"] = np.zeros(3, np.float32)
    write(here / "broken", held, config=CONFIG)
    asked = ("broken", "out", "--to", "automodel", "--strict")
    outcome = transaxle("convert", *asked)
    assert (outcome.code, outcome.out) == (REFUSED, "")
    assert {"DTYPE_MIXED", "MISSING_TENSOR", "SHAPE_MISMATCH", "UNEXPECTED_TENSOR"} <= set(outcome.err.split())
    for said in ("[e d [gate:f | up:f]]", "expected [16, 12]", "model.norm.weight", "model.layers.0.strange"):
        assert said in outcome.err
    plan = transaxle("plan", *asked)
    assert (plan.code, plan.err) == (REFUSED, "")
    assert "the conversion would be refused" in plan.out
    refusals = transaxle("convert", *asked, "--json").json["error"]["refusals"]
    planned = transaxle("plan", *asked, "--json").json
    assert planned["error"]["refusals"] == refusals == planned["refusals"]
    assert transaxle("convert", *asked, "--resume", "--overwrite").code == REFUSED
    assert not Path("out").exists()


def test_a_long_list_of_refusals_is_shortened(here: Path, transaxle: Transaxle) -> None:
    held = {name: (np.zeros((*array.shape, 1), array.dtype)) for name, array in tensors().items()}
    write(here / "odd", held, config=CONFIG)
    outcome = transaxle("convert", "odd", "out", "--to", "torchtitan")
    assert "(--all or --json shows them)" in outcome.err
    assert outcome.err.count("SHAPE_MISMATCH  ") == 5
    everything = transaxle("convert", "odd", "out", "--to", "torchtitan", "--all")
    assert "--json shows them" not in everything.err
    assert everything.err.count("SHAPE_MISMATCH  ") > 5


def test_overwrite_takes_a_checkpoint_only(ck: Path, transaxle: Transaxle) -> None:
    """Notes, a repository or adapters in the folder prevent it, except with `--overwrite=everything`."""
    assert transaxle("convert", ck, "out", "--to", "torchtitan").code == 0
    for name in (".git/HEAD", "notes.md", "adapters/adapter_model.safetensors"):
        Path("out", name).parent.mkdir(exist_ok=True)
        Path("out", name).write_text("mine")
    before = tree(Path("out"))
    for target in ("hf", "dcp:hf", "torch:hf"):
        transaxle("convert", "--overwrite", ck, "out", "--to", target).expect(
            USAGE, err=(".git/, adapters/, notes.md belong to no checkpoint", "--overwrite=everything")
        )
        assert tree(Path("out")) == before
    assert transaxle("convert", ck, "out", "--to", "hf", "--overwrite=all").code == USAGE
    assert transaxle("convert", "--overwrite=everything", ck, "out", "--to", "hf").code == 0
    assert not Path("out/notes.md").exists()
    assert transaxle("convert", "--overwrite", ck, "out", "--to", "dcp:hf").code == 0


def test_verify_after_writing_can_fail(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage the result between the commit and its verification, as a bad disk would."""

    execute = execute_module.execute

    def damaged(*args: object, **kwargs: object) -> Report:
        report = execute(*args, **kwargs)  # type: ignore[arg-type]
        flip(only(list(Path("out").glob("*.safetensors"))), -1)
        return report

    monkeypatch.setattr("transaxle.engine.execute.execute", damaged)
    outcome = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify", "--json")
    assert outcome.code == DIFFERENT
    assert (outcome.json["verification"]["ok"], outcome.json["comparison"]["equal"]) == (False, False)


def test_sizes_from_a_file_or_an_option(here: Path, transaxle: Transaxle) -> None:
    """Without q_norm and config nothing tells the head size, and fusing q, k and v needs it."""
    held = {name: array for name, array in tensors().items() if "_norm" not in name or "layernorm" in name}
    write(here / "bare", held)
    said = ("convert", "bare", "out", "--family", "mixtral", "--from", "hf", "--to", "megatron")
    assert transaxle(*said, "--json").code in {USAGE, REFUSED}
    (here / "my.json").write_text(json.dumps(CONFIG))
    tiny(here / "plain", config=None)
    by_file = ("convert", "plain", "by-file", "--to", "megatron", "--config", "my.json")
    by_axis = ("convert", "plain", "by-axis", "--to", "megatron", "--axis", "g=2", "--axis", "c=8")
    assert transaxle(*by_file).code == 0
    assert transaxle(*by_axis).code == 0
    assert same(Path("by-file"), Path("by-axis"))
    wrong = transaxle("convert", "plain", "wrong", "--to", "megatron", "--axis", "c=4", "--json")
    assert wrong.code == REFUSED
    assert "SHAPE_MISMATCH" in wrong.codes


def test_an_unknown_family_keeps_its_names(here: Path, transaxle: Transaxle) -> None:
    held = {f"h.{n}.w": np.full((2, 3), n, np.float32) for n in range(3)}
    write(here / "other", held, config={"model_type": "gpt0"})
    assert transaxle("convert", "other", "no", "--to", "hf", "--json").codes == ["UNKNOWN_FAMILY"]
    transaxle("convert", "other", "out", "--to", "safetensors:identity", "--shard-size", "24", "--verify").expect(0)
    assert same(Path("other"), Path("out"))
    assert "with names and shapes unchanged" in transaxle("plan", "other", "out2", "--to", "safetensors").out


def test_a_table_of_the_user(ck: Path, transaxle: Transaxle) -> None:
    Path("my.rules").write_text(
        "dialect mine of qwen3_moe like hf\n  model.layers.{l}.mlp.experts.all = [e [gate:f | up:f] d]\n"
    )
    assert transaxle("convert", ck, "out", "--to", "mine", "--rules", "my.rules", "--verify").code == 0
    assert read(Path("out"))["model.layers.1.mlp.experts.all"].shape == (8, 24, 16)
    assert transaxle("convert", "out", "back", "--to", "hf", "--rules", "my.rules").code == 0
    assert same(ck, Path("back"))


def test_state_of_an_optimizer_that_is_left_behind_is_one_line(transaxle: Transaxle) -> None:
    state = {f"optim/{name}/exp_avg": np.zeros(value.shape, np.float32) for name, value in tensors().items()}
    write(Path("run"), {**tensors(), **state}, config=CONFIG)
    line = f"  left behind: state of the optimizer, {TENSORS} entries (--all lists them)\n"
    for verb in ("plan", "convert"):
        told = transaxle(verb, "run", f"out-{verb}", "--to", "hf").out
        assert line in told
        assert "exp_avg" not in told
        assert "exp_avg" in transaxle(verb, "run", f"all-{verb}", "--to", "hf", "--all").out


def test_what_megatrons_modules_save_beside_tensors_is_one_line(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "mine", "--to", "torch_dist").code == 0
    short, long = (transaxle("plan", "mine", "out", "--to", "hf", *more).out for more in ((), ("--all",)))
    assert short.count("_extra_state") == 1
    assert "left behind: _extra_state of 10 modules (--all lists them)" in short
    assert long.count("._extra_state") == 10


def test_a_model_of_a_hub_without_a_config_says_what_is_missing(ck: Path, transaxle: Transaxle) -> None:
    said = (
        "warning: no config.json goes along, since the source has none: transformers cannot load the target without "
        'it; give --config FILE (config="FILE")'
    )
    assert said not in transaxle("convert", ck, "with", "--to", "hf").err
    assert transaxle("convert", ck, "run", "--to", "dcp:torchtitan").code == 0
    config = (ck / "config.json").read_bytes()
    Path("run", "transaxle.json").unlink()  # which says that there was a config
    for source in (ck, Path("run")):
        (source / "config.json").unlink()
        asked = ("--family", "qwen3_moe", *(part for size in ("l=2", "r=2", "g=2", "c=8") for part in ("--axis", size)))
        for verb in ("plan", "convert"):
            outcome = transaxle(verb, source, "without", "--to", "hf", *asked)
            assert (outcome.code, outcome.err.splitlines()) == (0, [said])
        *_, note = json.loads(transaxle("convert", source, "noted", "--to", "hf", "--json", *asked).out)["notes"]
        assert f"warning: {note}" == said
        shutil.rmtree("without")
        shutil.rmtree("noted")
        assert said not in transaxle("convert", source, "single.safetensors", "--to", "hf", *asked).err
        assert said not in transaxle("convert", source, "other", "--to", "torchtitan", *asked).err
        shutil.rmtree("other")
        Path("single.safetensors").unlink()
        above = source.parent / "config.json"
        above.write_bytes(config)
        for verb in ("plan", "convert"):
            told = transaxle(verb, source, "taken", "--to", "hf", *asked)
            assert (told.code, told.err) == (0, "")
            shown = above if above.is_absolute() else f"./{above}"
            assert f"note: config.json is {shown}, since the folder of the source has none" in told.out
        assert Path("taken/config.json").read_bytes() == config
        assert transaxle("verify", "taken").code == 0
        shutil.rmtree("taken")
        above.write_text("{}")  # no model's
        assert f"{said} (there is {above})" in transaxle("convert", source, "hinted", "--to", "hf", *asked).err
        shutil.rmtree("hinted")
        above.write_bytes(config)
        assert transaxle("convert", source, "mended", "--to", "hf", "--config", above).err == ""
        assert json.loads(Path("mended/config.json").read_bytes()) == json.loads(config)
        shutil.rmtree("mended")
        above.unlink()


def test_the_folder_of_a_run_is_its_only_checkpoint(here: Path, transaxle: Transaxle) -> None:
    """The files are those of torchtune 0.6.1: shards with an index, and the recipe's state beside them."""
    step = tiny(here / "out" / "epoch_0", shards=2)
    shutil.copytree(step, here / "wanted")
    (here / "out" / "recipe_state").mkdir()
    for file in ("recipe_state/recipe_state.pt", "torchtune_config.yaml"):
        (here / "out" / file).write_bytes(b"")
    said = "note: the source is out/epoch_0, which was found in the folder that you gave"
    assert said in transaxle("plan", "out", "hub", "--to", "dcp:torchtitan").out
    told = transaxle("convert", "out", "hub", "--to", "dcp:torchtitan", "--verify")
    assert (told.code, told.err) == (0, "")
    assert said in told.out
    assert transaxle("verify", "wanted", "hub").code == 0
    info = transaxle("info", "out").out
    assert info.startswith("out/epoch_0\n")
    assert "epoch_0, which was found in the folder that you gave" in info
    tiny(here / "out" / "epoch_1")
    transaxle("ls", "out").expect(USAGE, err=("epoch_1, epoch_0", "Give one of these checkpoints: out/epoch_1"))


def test_a_config_that_is_given_becomes_that_of_the_target(here: Path, transaxle: Transaxle) -> None:
    Path("my.json").write_text(json.dumps(CONFIG))
    tiny(here / "bare", config=None)
    told = transaxle("convert", "bare", "out", "--to", "hf", "--config", "my.json", "--verify")
    assert told.code == 0, told.err
    assert json.loads(Path("out/config.json").read_text()) == CONFIG
    assert "config.json is written from the config that you gave" in told.out
    assert "no config.json goes along" not in told.err
    assert transaxle("verify", "out").code == 0
    again = ("convert", "bare", "dcp", "--to", "dcp:torchtitan", "--config", "my.json")
    assert transaxle(*again).code == 0
    assert not Path("dcp/config.json").exists()  # only transformers and its kin read it where the tensors are
    assert transaxle("convert", "dcp", "back", "--to", "hf", "--config", "my.json").code == 0
    assert same(Path("out"), Path("back"))
    assert Path("back/config.json").read_bytes() == Path("out/config.json").read_bytes()
    single = transaxle("convert", "bare", "one.safetensors", "--to", "hf", "--config", "my.json")
    assert single.code == 0
    assert "config.json" not in single.out


def test_a_config_that_is_given_says_how_the_target_is_encoded(here: Path, transaxle: Transaxle) -> None:
    Path("my.json").write_text(json.dumps(CONFIG))
    tiny(here / "with")
    tiny(here / "without", config=None)
    asked = ("--to", "hf", "--encode", "float8_block")
    assert transaxle("convert", "with", "a", *asked).code == 0
    assert transaxle("convert", "without", "b", *asked, "--config", "my.json").code == 0
    written = json.loads(Path("b/config.json").read_text())
    assert written == json.loads(Path("a/config.json").read_text())
    assert "quantization_config" in written


def test_a_config_beside_the_source_is_not_replaced(ck: Path, transaxle: Transaxle) -> None:
    before = (ck / "config.json").read_bytes()
    note = "config.json is that of the source: the config that you gave differs from it, and only gave sizes"
    Path("same.json").write_bytes(before)
    assert note not in transaxle("convert", ck, "a", "--to", "hf", "--config", "same.json").out
    Path("other.json").write_text(json.dumps({**CONFIG, "rope_theta": 7}))
    for verb in ("plan", "convert"):
        assert note in transaxle(verb, ck, "b", "--to", "hf", "--config", "other.json").out
    assert Path("b/config.json").read_bytes() == before


def test_sizes_alone_are_no_config_of_a_model(here: Path, transaxle: Transaxle) -> None:
    Path("sizes.json").write_text(json.dumps({**CONFIG, "model_type": None}))
    tiny(here / "bare", config=None)
    asked = ("--family", "qwen3_moe", "--config", "sizes.json")
    assert "no config.json goes along" in transaxle("convert", "bare", "out", "--to", "hf", *asked).err
    assert not Path("out/config.json").exists()
