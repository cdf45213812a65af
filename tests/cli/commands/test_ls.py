"""`ls` and `info`: what a checkpoint contains, without reading its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import transaxle as tx
from tests.checkpoints import CONFIG, SIZES, TENSORS, Tensors, tensors, tiny, write
from tests.cli.running import Transaxle, lines, only
from transaxle import __version__
from transaxle.encodings.arithmetic.codec import active


def test_a_checkpoint_fits_on_a_page(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("ls", ck).out == (
        "safetensors · qwen3_moe · hf · 69 tensors · 13,936 parameters · 27.87 kB in 1 file\n"
        "  model.embed_tokens.weight                                   BF16  [40, 16]\n"
        "  model.layers.[0-1].input_layernorm.weight              x2   BF16  [16]\n"
        "  model.layers.[0-1].self_attn.q_proj.weight             x2   BF16  [32, 16]\n"
        "  model.layers.[0-1].self_attn.k_proj.weight             x2   BF16  [16, 16]\n"
        "  model.layers.[0-1].self_attn.v_proj.weight             x2   BF16  [16, 16]\n"
        "  model.layers.[0-1].self_attn.o_proj.weight             x2   BF16  [16, 32]\n"
        "  model.layers.[0-1].self_attn.q_norm.weight             x2   BF16  [8]\n"
        "  model.layers.[0-1].self_attn.k_norm.weight             x2   BF16  [8]\n"
        "  model.layers.[0-1].post_attention_layernorm.weight     x2   BF16  [16]\n"
        "  model.layers.[0-1].mlp.gate.weight                     x2   BF16  [8, 16]\n"
        "  model.layers.[0-1].mlp.experts.[0-7].gate_proj.weight  x16  BF16  [12, 16]\n"
        "  model.layers.[0-1].mlp.experts.[0-7].up_proj.weight    x16  BF16  [12, 16]\n"
        "  model.layers.[0-1].mlp.experts.[0-7].down_proj.weight  x16  BF16  [16, 12]\n"
        "  model.norm.weight                                           BF16  [16]\n"
        "  lm_head.weight                                              BF16  [40, 16]\n"
    )


def test_the_same_as_json(ck: Path, transaxle: Transaxle) -> None:
    found = transaxle("ls", ck, "--json").json
    told = tuple(found[key] for key in ("path", "format", "family", "dialect", "tensors", "files"))
    assert told == ("ck", "safetensors", "qwen3_moe", "hf", TENSORS, 1)
    assert found["parameters"] == sum(array.size for array in tensors().values())
    assert sum(row["count"] for row in found["rows"]) == TENSORS
    assert {"name": "model.norm.weight", "count": 1, "dtype": "BF16", "shape": [16]} in found["rows"]


def test_optimizer_state_does_not_count_as_parameters(here: Path, transaxle: Transaxle) -> None:
    weights = {name: torch.from_numpy(array.astype(np.float32)) for name, array in tensors().items()}
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": weight + 1, "exp_avg_sq": weight * weight}
        for number, weight in enumerate(weights.values())
    }
    groups = [{"lr": 0.1, "params": list(state)}]
    torch.save({"model_state_dict": weights, "optimizer": {"state": state, "param_groups": groups}}, "run.pt")
    elements = sum(array.size for array in tensors().values())
    for command in ("ls", "info"):
        amounts = transaxle(command, "run.pt", "--json").json
        assert (amounts["tensors"], amounts["optimizer"], amounts["parameters"]) == (4 * TENSORS, 3 * TENSORS, elements)
        shown = " ".join(transaxle(command, "run.pt").out.split())
        assert f"{4 * TENSORS} tensors, {3 * TENSORS} of them optimizer state" in shown
        assert f"{elements:,} parameters" in shown
    verified = transaxle("verify", "run.pt", "--json").json
    assert verified["parameters"] == elements


def test_all_prints_every_name(ck: Path, transaxle: Transaxle) -> None:
    _, *rows = lines(transaxle("ls", ck, "--all").out)
    assert sorted(row[0] for row in rows) == sorted(tensors())


def test_another_dialect_is_a_view(ck: Path, transaxle: Transaxle) -> None:
    head, *rows = lines(transaxle("ls", ck, "--as", "torchtitan").out)
    assert " ".join(head).startswith("safetensors · qwen3_moe · torchtitan@0.3 · stored as hf · 29 tensors")
    assert ["layers.[0-1].moe.routed_experts.inner_experts.w1_EFD", "x2", "BF16", "[8,", "12,", "16]"] in rows
    assert not list(Path().glob("*torchtitan*"))


def test_different_shapes_and_dtypes_are_different_rows(here: Path, transaxle: Transaxle) -> None:
    held: Tensors = {f"l.{layer}.w": np.zeros((4, 2), np.float32) for layer in (0, 1, 2, 5)}
    held["l.3.w"] = np.zeros((4, 3), np.float32)
    held["l.4.w"] = np.zeros((4, 2), np.float16)
    write(here / "odd", held)
    head, *rows = lines(transaxle("ls", "odd").out)
    assert head[:5] == ["safetensors", "·", "unknown", "family", "·"]
    assert rows == [
        ["l.[0-2,5].w", "x4", "F32", "[4,", "2]"],
        ["l.3.w", "F32", "[4,", "3]"],
        ["l.4.w", "F16", "[4,", "2]"],
    ]


def test_numbers_in_a_pickle_are_in_its_file(here: Path, transaxle: Transaxle) -> None:
    torch.save({"w": torch.arange(3.0), "step": 7}, here / "state.pt")
    head, *rows = lines(transaxle("ls", "state.pt").out)
    assert head[-3:] == ["in", "1", "file"]
    assert rows == [["step", "I64", "[]"], ["w", "F32", "[3]"]]
    assert json.loads(transaxle("ls", "state.pt", "--json").out)["files"] == 1
    transaxle("report", "state.pt", "-o", "page.html").expect(0)
    assert "//numbers" not in (here / "page.html").read_text()


def test_tensor_files_that_are_not_read_are_named(ck: Path, transaxle: Transaxle) -> None:
    torch.save({"w": torch.zeros(2)}, ck / "pytorch_model.bin")
    assert lines(transaxle("ls", ck).out)[-1] == ["pytorch_model.bin"]
    assert lines(transaxle("ls", ck, "--format", "torch").out)[-1] == ["model.safetensors"]
    (ck / "pytorch_model.bin").unlink()
    assert lines(transaxle("ls", ck).out)[-1][0].endswith(".weight")


def test_names_cannot_write_to_the_terminal(here: Path, transaxle: Transaxle) -> None:
    write(here / "odd", {"a\x1b[2Jb\nc": np.zeros(2, np.float32)})
    out = transaxle("ls", "odd").out
    assert "\x1b" not in out
    assert "a\\x1b[2Jb\\nc" in out


def test_info_shows_what_was_recognised(ck: Path, transaxle: Transaxle) -> None:
    found = transaxle("info", ck, "--json").json
    assert [found[key] for key in ("format", "family", "dialect", "prefix")] == ["safetensors", "qwen3_moe", "hf", ""]
    assert (found["read"], found["tensors"], found["unknown"]) == (TENSORS, TENSORS, [])
    assert found["axes"]["e"] == SIZES["num_experts"]
    assert found["dtypes"] == {"BF16": {"tensors": TENSORS, "bytes": found["bytes"]}}
    assert found["carried"] == ["config.json"]
    assert found["manifest"]["state"] == "none"
    assert (found["transaxle"], found["kernels"]) == (__version__, active())
    shown = transaxle("info", ck).out
    assert "hf, which reads 69 of 69 names" in shown
    assert f"{__version__}, kernels: {active()}" in shown


def test_info_finds_a_prefix(here: Path, transaxle: Transaxle) -> None:
    write(here / "wrapped", {f"module.{name}": array for name, array in tensors().items()}, config=CONFIG)
    assert transaxle("info", "wrapped", "--json").json["prefix"] == "module."


def test_info_explains_why_nothing_was_recognised(here: Path, transaxle: Transaxle) -> None:
    write(here / "other", {"transformer.h.0.w": np.zeros(2, np.float32)}, config={"model_type": "gpt0"})
    transaxle("info", "other").expect(0, out=("not recognised", "gpt0"))


def test_info_reports_a_manifest_that_no_longer_matches(converted: Callable[[str], Path], transaxle: Transaxle) -> None:
    folder = converted("torchtitan")
    assert transaxle("info", folder, "--json").json["manifest"] == {"state": "matches", "problems": []}
    file = only(list(folder.glob("*.safetensors")))
    file.write_bytes(file.read_bytes().replace(b'"format":"pt"', b'"format":"PT"'))
    manifest = transaxle("info", folder, "--json").json["manifest"]
    assert manifest["state"] == "stale"
    assert only(manifest["problems"])["file"] == file.name
    assert "no longer matches" in transaxle("info", folder).out


def test_info_without_a_path_describes_the_installation(transaxle: Transaxle) -> None:
    found = transaxle("info", "--json").json
    assert found["packages"]["numpy"] == np.__version__
    assert "hf" in found["families"]["qwen3_moe"]
    shown = transaxle("info").out
    assert f"kernels: {active()}" in shown
    assert f"{len(found['families'])}; `transaxle families` lists them" in shown
    assert len(shown.splitlines()) < 10


def test_given_options_override_recognition(here: Path, transaxle: Transaxle) -> None:
    tiny(here / "renamed", config={**CONFIG, "model_type": "my_moe"})
    assert transaxle("ls", "renamed", "--json").json["family"] is None
    assert transaxle("ls", "renamed", "--family", "qwen3_moe", "--json").json["family"] == "qwen3_moe"
    (here / "my.json").write_text(json.dumps(CONFIG))
    assert transaxle("ls", "renamed", "--config", "my.json", "--json").json["family"] == "qwen3_moe"


def test_info_shows_parameter_groups(here: Path, transaxle: Transaxle) -> None:
    """In few words for people; whole in JSON, where a number with a type of its own is a number."""
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([("w", parameter)], lr=torch.tensor(0.5), momentum=0.9, foreach=False)
    torch.save({"model": {"w": parameter.data}, "optimizer": optimizer.state_dict()}, here / "a.pt")
    assert "groups" in transaxle("info", "a.pt").out
    assert "1 parameter: lr=0.5 momentum=0.9" in transaxle("info", "a.pt").out
    (group,) = transaxle("info", "a.pt", "--json").json["metadata"]["param_groups"]
    assert (group["lr"], group["momentum"], group["params"]) == (0.5, 0.9, ["w"])


def test_a_notebook_shows_the_table_that_ls_shows(ck: Path, transaxle: Transaxle) -> None:
    """Folded, in the order of the dialect's table; of selections and views too."""
    for options in ((), ("--as", "torchtitan")):
        _, *listed = transaxle("ls", ck, *options).out.splitlines()
        with tx.open(ck) as checkpoint:
            view = checkpoint.as_dialect("torchtitan") if options else checkpoint
            html = view._repr_html_().removeprefix("<pre>").removesuffix("</pre>")
            assert html.splitlines()[1:] == listed
            assert len(view.select("*layers*")._repr_html_().splitlines()) == 1 + sum("layers" in row for row in listed)
            assert "  x2  " in html
